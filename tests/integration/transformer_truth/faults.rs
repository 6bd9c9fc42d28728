//! Programs with faults against recordings of the same programs: every action, and the growth of
//! memory.

use super::{
    actions::generated_by,
    measured::{ALLOCATED_TOLERANCE_PERCENT, Levels, RESERVED_TOLERANCE_PERCENT, Row, levels, table},
};
use crate::allocator_actions::{assert_equal_actions, recorded};
use oomph::{
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    models::Recipe,
    replay::{OomCause, ReplayOptions, replay},
    strategy::{Setup, StrategySpec},
};

/// Tolerance for the growth per step, in percent.
const GROWTH_TOLERANCE_PERCENT: f64 = 2.0;

/// Recorded runs, the recipes that model them, and the number of recorded steps.
const RECORDED: [(&str, &str, u32); 13] = [
    ("leak_loss_graph", "leak-loss-graph", 6),
    ("leak_outputs", "leak-outputs", 6),
    ("leak_outputs_detached", "leak-outputs-detached", 6),
    ("leak_outputs_cpu", "leak-outputs-cpu", 6),
    ("leak_retain_graph", "leak-retain-graph", 6),
    ("leak_retain_rebound", "leak-retain-rebound", 6),
    ("leak_retain_twice", "leak-retain-twice", 6),
    ("leak_no_zero_grad", "leak-no-zero-grad", 8),
    ("leak_cycle", "leak-cycle", 8),
    ("val_no_grad", "val-with-grad-fixed", 6),
    ("val_with_grad", "val-with-grad", 6),
    ("val_keep_outputs", "val-keep-outputs", 6),
    ("val_keep_no_grad", "val-keep-no-grad", 6),
];

fn recipe(name: &str, steps: u32) -> Recipe {
    Recipe::named(name).unwrap().with("steps", &steps.to_string())
}

#[test]
fn faulty_programs_match_recordings() {
    let mut failures = Vec::new();
    for (run, name, steps) in RECORDED {
        let (real, ours) = (recorded(run), generated_by(&recipe(name, steps)));
        if let Err(panic) = std::panic::catch_unwind(|| assert_equal_actions(run, &real, &ours)) {
            failures.push(panic.downcast_ref::<String>().cloned().unwrap());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Levels after every step, and the growth per step after warm-up: from the second step to the
/// last. A saw-tooth has no growth per step.
pub(crate) fn rows() -> Vec<Row> {
    let measured = table("per_step.csv");
    let mut rows = Vec::new();
    for (run, name, steps) in RECORDED {
        let predicted = levels(&recipe(name, steps).workload().unwrap(), "").after_steps;
        let of_run: Vec<_> = measured.iter().filter(|row| row["snapshot"] == run).collect();
        assert_eq!(of_run.len(), predicted.len(), "{run}");
        for (row, level) in of_run.iter().zip(&predicted) {
            let run = format!("{run}, step {}", row["step"]);
            for (quantity, column, predicted, bar) in [
                ("allocated after the step", "allocated", level.allocated, ALLOCATED_TOLERANCE_PERCENT),
                ("reserved after the step", "reserved", level.reserved, RESERVED_TOLERANCE_PERCENT),
            ] {
                rows.push(Row { run: run.clone(), quantity, real: row[column].parse().unwrap(), predicted, bar });
            }
        }
        if run != "leak_cycle" {
            let real: Vec<u64> = of_run.iter().map(|row| row["allocated"].parse().unwrap()).collect();
            let predicted: Vec<u64> = predicted.iter().map(|level| level.allocated).collect();
            let growth = |levels: &[u64]| (levels[levels.len() - 1] - levels[1]) / (levels.len() as u64 - 2);
            let (real, predicted) = (growth(&real), growth(&predicted));
            rows.push(Row {
                run: run.to_owned(),
                quantity: "growth of a step",
                real,
                predicted,
                bar: GROWTH_TOLERANCE_PERCENT,
            });
        }
    }
    rows
}

/// PyTorch 2.11 itself, run without a GPU: `memory_stats` after every step of the same programs, with `total += loss` and
/// `total += loss.item()` after backward, and with `total += loss.item()` in a loop without backward.
#[test]
fn summed_losses_match_pytorch() {
    for (name, allocated, reserved_first, reserved) in [
        ("leak-loss-sum", 2_029_130_752, 3_498_049_536, 4_739_563_520),
        ("leak-loss-sum-fixed", 2_029_130_240, 3_498_049_536, 4_739_563_520),
        ("leak-loss-graph-fixed", 2_020_224_000, 2_522_873_856, 3_867_148_288),
    ] {
        let levels = levels(&recipe(name, 8).workload().unwrap(), "").after_steps;
        let ours: Vec<(u64, u64)> = levels.iter().map(|level| (level.allocated, level.reserved)).collect();
        let mut real = vec![(allocated, reserved); 8];
        real[0].1 = reserved_first;
        assert_eq!(ours, real, "{name}");
    }
}

/// The expected failure is a refused request while the weights load, not a launch failure or a
/// crash.
#[test]
fn too_large_model_ooms_while_loading() {
    let run = |name| {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let spec = StrategySpec { name: "caching".to_owned(), parameters: String::new() };
        let mut strategy = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
        let workload = Recipe::named(name).unwrap().workload().unwrap();
        replay(&workload, &mut *strategy, &mut device, &ReplayOptions::default(), &mut Levels::default()).unwrap()
    };
    let refused = run("load-beyond-capacity").first_oom.unwrap();
    assert_eq!((refused.step, refused.cause), (None, OomCause::Exhaustion));
    assert_eq!(run("load-beyond-capacity-fixed").ooms, 0);
}
