//! Thresholds against real runs that failed or completed: `varlen` under three memory caps and four
//! settings.

use std::{ops::RangeInclusive, path::Path};

use oomph::{
    answer::threshold::{Threshold, ThresholdQuestion, threshold},
    base::NoProgress,
    device::{
        Device, DeviceSpec,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::Companion,
    strategy::StrategySpec,
    suite::SourceSpec,
    trace::{Trace, torch::Recording},
};

fn path_of(name: &str) -> String {
    format!("{}/workloads/recorded/{name}.pickle.xz", env!("CARGO_MANIFEST_DIR"))
}

/// The requests of the run without a cap, under default settings.
fn varlen() -> Trace {
    let spec = SourceSpec { name: path_of("varlen"), seed: 1, ..SourceSpec::default() };
    Trace::read(&*spec.open(&NoProgress).unwrap()).unwrap()
}

/// The settings of the run recorded as `name`.
fn settings_of(name: &str) -> StrategySpec {
    let parameters = Recording::open(path_of(name), None, &NoProgress).unwrap().settings.conf().to_owned();
    StrategySpec { name: "caching".to_owned(), parameters }
}

fn find(trace: &Trace, strategy: &StrategySpec, repeat: u32) -> Threshold {
    let device: DeviceSpec = "sim".parse().unwrap();
    let question = ThresholdQuestion { repeat, jobs: 2, ..ThresholdQuestion::new(trace, strategy, &device) };
    threshold(&question).unwrap()
}

#[test]
fn thresholds_match_twelve_capped_runs() {
    let trace = varlen();
    let total = SimDevice::new(SimConfig::default()).unwrap().props().total_bytes;
    let mut wrong = Vec::new();
    for setting in ["", ".exp", ".split64", ".gc"] {
        let strategy = settings_of(&format!("varlen_cap047{setting}"));
        let found = find(&trace, &strategy, 1);
        let bytes = found.needed_bytes.unwrap();
        for share in ["042", "047", "052"] {
            let run = format!("varlen_cap{share}{setting}");
            let Companion { memory_fraction, counters, .. } =
                Companion::beside(Path::new(&path_of(&run))).unwrap().unwrap();
            let cap = (memory_fraction.unwrap() * total as f64) as u64;
            let survived = counters.ooms == Some(0);
            if (bytes <= cap) != survived {
                wrong.push(format!("{run}: cap {cap}, threshold {bytes}, survived: {survived}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The number of probes of a search to 2 MiB with 16 around it. These searches take 21 to 29.
const PROBES: RangeInclusive<usize> = 17..=32;

/// The search is cheap because it needs few replays. `cargo bench --bench advice` measures the
/// times.
#[test]
fn a_threshold_needs_few_probes() {
    let trace = varlen();
    // 55,169 snapshot entries; a free takes two of them.
    assert!(trace.events.len() > 30_000);
    for setting in ["", ".exp", ".split64", ".gc"] {
        let strategy = settings_of(&format!("varlen_cap047{setting}"));
        for repeat in [1, 3] {
            let probes = find(&trace, &strategy, repeat).probes.len();
            assert!(PROBES.contains(&probes), "{strategy}: {repeat} rounds took {probes} probes");
        }
    }
}
