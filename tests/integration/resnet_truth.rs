//! The residual network against real PyTorch: action by action against the recordings, and its
//! peaks against measured ones.

use std::{collections::BTreeMap, path::Path};

use crate::allocator_actions::{actions, assert_equal_actions, recorded};
use oomph::{
    base::MIB,
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    models::{Recipe, Workload},
    replay::{Observer, ReplayOptions, replay},
    strategy::{EventSink, Setup, StrategySpec, Usage},
};

fn workload(settings: &[(&str, &str)]) -> Workload {
    let recipe =
        settings.iter().fold(Recipe::named("resnet-50").unwrap(), |recipe, (key, text)| recipe.with(key, text));
    recipe.workload().unwrap()
}

#[test]
fn resnet_50_matches_recording_by_action() {
    for (name, techniques) in [("resnet_base", ""), ("resnet_amp", "amp")] {
        assert_equal_actions(name, &recorded(name), &actions(&workload(&[("techniques", techniques)])));
    }
}

struct Nothing;

impl EventSink for Nothing {}

impl Observer for Nothing {}

/// The peaks and the final levels under PyTorch's allocator.
fn levels(workload: &Workload) -> (Usage, Usage) {
    let mut device = SimDevice::new(SimConfig::default()).unwrap();
    let mut strategy = StrategySpec::from("caching").build(&Setup { props: device.props(), limit: None }).unwrap();
    let replayed = replay(workload, &mut *strategy, &mut device, &ReplayOptions::default(), &mut Nothing).unwrap();
    assert_eq!(replayed.ooms, 0);
    (strategy.stats().peak, strategy.stats().current)
}

#[test]
fn peaks_and_final_levels_match_exactly() {
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded/snapshots.csv");
    let rows: Vec<BTreeMap<String, String>> =
        csv::Reader::from_path(table).unwrap().deserialize().map(|row| row.unwrap()).collect();
    for (run, techniques) in [("resnet_base", ""), ("resnet_amp", "amp")] {
        let row = rows.iter().find(|row| row["snapshot"] == run).unwrap();
        let (peak, last) = levels(&workload(&[("techniques", techniques)]));
        for (column, ours) in [
            ("peak_allocated", peak.allocated),
            ("peak_reserved", peak.reserved),
            ("final_allocated", last.allocated),
            ("final_reserved", last.reserved),
        ] {
            assert_eq!(row[column].parse::<u64>().unwrap(), ours, "{run}: {column}");
        }
    }
}

/// Measured separately from the recordings, in MiB, with a program without optimizer state.
#[test]
fn in_place_activation_saves_little() {
    let peak = |activation| levels(&workload(&[("activation", activation), ("optimizer", "sgd")])).0.allocated / MIB;
    assert_eq!((peak("in_place"), peak("separate")), (5482, 5483));
}
