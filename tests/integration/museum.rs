//! The bug museum: reported failures, reproduced with our model of PyTorch's allocator.

use oomph::{
    base::MIB,
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    models::Recipe,
    replay::{Observer, ReplayMoment, ReplayOptions, replay},
    strategy::{EventSink, Setup, StrategySpec, Usage},
    trace::{MarkKind, Op},
};

/// Memory levels at the start of every step and at the end of the trace.
#[derive(Default)]
struct Levels(Vec<Usage>);

impl EventSink for Levels {}

impl Observer for Levels {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        if matches!(now.event.op, Op::Mark { kind: MarkKind::Step | MarkKind::Phase, .. }) {
            self.0.push(now.strategy.stats().current);
        }
    }
}

/// The levels of a workload under a setting of PyTorch's allocator, in MiB: allocated and reserved
/// at every mark, and peak reserved.
fn levels(recipe: &Recipe, settings: &str) -> (Vec<(u64, u64)>, u64) {
    let mut device = SimDevice::new(SimConfig::default()).unwrap();
    let spec = StrategySpec { name: "caching".to_owned(), parameters: settings.to_owned() };
    let mut strategy = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
    let mut levels = Levels::default();
    let replayed =
        replay(&recipe.workload().unwrap(), &mut *strategy, &mut device, &ReplayOptions::default(), &mut levels)
            .unwrap();
    assert_eq!(replayed.ooms, 0);
    let in_mib = levels.0.iter().map(|usage| (usage.allocated / MIB, usage.reserved / MIB)).collect();
    (in_mib, strategy.stats().peak.reserved / MIB)
}

fn named(name: &str) -> Recipe {
    Recipe::named(name).unwrap()
}

/// The numbers in the report, at the end of cycles 0, 20 and so on.
#[test]
fn pytorch_193400_needs_both_settings() {
    let recipe = named("museum-pytorch-193400");
    let (levels, _) = levels(&recipe, "max_split_size_mb:128,expandable_segments:True");
    // There is one mark before the canary, one before the cycles and one at the first cycle. The
    // level after a cycle is at the next mark.
    let after = |cycle: usize| levels[3 + cycle];
    let reported = [(66, 220), (106, 2980), (146, 5760), (186, 8520), (226, 11_300), (266, 14_060)];
    assert_eq!([0, 20, 40, 60, 80, 100].map(after), reported);
}

#[test]
fn either_setting_alone_stays_below_500_mib() {
    for settings in ["", "max_split_size_mb:128", "expandable_segments:True"] {
        let (_, peak) = levels(&named("museum-pytorch-193400"), settings);
        assert!(peak < 500, "'{settings}': {peak}");
    }
}

#[test]
fn rmm_35_caches_twice_the_live_bytes() {
    // At most two blocks of 2 GiB are live at a time.
    let reserved = |settings| levels(&named("museum-rmm-35"), settings).1;
    assert!(reserved("") > 7 * 1024, "{}", reserved(""));
    assert!(reserved("expandable_segments:True") < 4 * 1024 + 64, "{}", reserved("expandable_segments:True"));
}

#[test]
fn rmm_2039_second_stream_costs_memory() {
    let reserved = |streams| levels(&named("museum-rmm-2039").with("streams", streams), "").1;
    assert!(reserved("2") * 10 > reserved("1") * 11, "{} and {}", reserved("2"), reserved("1"));
}

#[test]
fn repacked_weights_leave_holes_that_pages_do_not() {
    let lost = |settings| levels(&named("museum-vllm-41268"), settings).1 - 18 * (530 + 270);
    assert!(lost("") > 1000 && lost("expandable_segments:True") < 600, "{}", lost(""));
}

#[test]
fn best_fit_avoids_the_first_fit_trap() {
    let (levels, peak) = levels(&named("museum-tt-metal-35516"), "");
    assert_eq!(levels.last().unwrap().1, peak);
    // Nothing is reserved beyond the initial walls and holes.
    assert_eq!(levels[1].1, peak, "{levels:?}");
}

/// As reported for another pool: the first round passes, and the same requests fail later with
/// gigabytes free.
#[test]
fn rmm_1969_fails_in_a_later_round() {
    let failing_round = |rounds: &str| {
        let output = assert_cmd::Command::new(env!("CARGO_BIN_EXE_oomph"))
            .current_dir(tempfile::tempdir().unwrap().path())
            .args(["replay", "museum-rmm-1969", "--limit", "84.6GB", "--strategy", "caching", "--format", "json"])
            .args(["--set", &format!("rounds={rounds}")])
            .output()
            .unwrap();
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let row = &rows["rows"][0];
        (row["oom_step"].as_u64(), row["oom_cause"].as_str().map(str::to_owned))
    };
    assert_eq!(failing_round("1"), (None, None));
    assert_eq!(failing_round("3"), (Some(1), Some("fragmentation".to_owned())));
}
