//! `oomph leaks` on programs that are known to leak and on programs that do not: recordings of real
//! PyTorch with their levels in `per_step.csv`, and workloads.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::command::run;
use oomph::{
    answer::leaks::{Finding, GrowthThreshold, ObservedSteps, RecoverableBy, StepsFrom, Verdict, judge},
    base::{GIB, NoProgress, parallel_map},
    models::Recipe,
    replay::Replay,
    report::{LeakAnswer, LeakReport, Medium, Render},
    suite::{SourceSpec, all_cores},
    trace::{Event, Op, Source, Trace, torch::Snapshot},
};

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"))
}

fn finding(source: &dyn Source, limit: Option<u64>) -> Finding {
    let observed = ObservedSteps::of_replay(&Replay::new(source).limit(limit), None).unwrap();
    let mut finding = judge(&observed, None, &GrowthThreshold::default()).unwrap();
    finding.growers = observed.growers(source, finding.first_step).unwrap();
    finding
}

fn of_recording(name: &str) -> Finding {
    let spec = SourceSpec { name: recorded(name).display().to_string(), ..SourceSpec::default() };
    finding(&*spec.open(&NoProgress).unwrap(), None)
}

/// Allocated bytes after every step, by recording.
fn per_step() -> BTreeMap<String, Vec<f64>> {
    let mut table = csv::Reader::from_path(recorded("x").with_file_name("per_step.csv")).unwrap();
    let mut levels: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for row in table.records() {
        let row = row.unwrap();
        levels.entry(row[0].to_owned()).or_default().push(row[2].parse().unwrap());
    }
    levels
}

/// The recordings that leak, as the measured levels show. All others return to their earlier level.
const LEAKS: [&str; 6] = [
    "leak_loss_graph",
    "leak_outputs",
    "leak_outputs_detached",
    "leak_retain_graph",
    "val_keep_outputs",
    "val_keep_no_grad",
];

#[test]
fn recordings_are_classified_as_measured() {
    let levels: Vec<(String, Vec<f64>)> = per_step().into_iter().collect();
    assert_eq!(levels.len(), 24);
    parallel_map(&levels, all_cores(), |(name, levels)| check(name, levels));
}

fn check(name: &str, levels: &[f64]) {
    let found = of_recording(name);
    let leaks = LEAKS.contains(&name);
    assert_eq!(found.verdict, if leaks { Verdict::Leak } else { Verdict::Steady }, "{name}: {found:#?}");
    // Check the list above against the levels: from the second step on they rise by a constant
    // amount, or return.
    let (second, last) = (levels[1], levels[levels.len() - 1]);
    let growth = (last - second) / (levels.len() - 2) as f64;
    assert_eq!(growth > 0.01 * second, leaks, "{name}");
    if leaks {
        assert!((found.bytes_per_step / growth - 1.0).abs() < 0.01, "{name}: {} {growth}", found.bytes_per_step);
        assert!(found.bytes_per_step_low <= growth * 1.01 && growth * 0.99 <= found.bytes_per_step_high, "{name}");
        assert!(found.p_value < 1e-3, "{name}: {}", found.p_value);
        assert!(!found.growers.is_empty(), "{name}");
    }
    let collected = name == "leak_cycle";
    assert_eq!(found.saw_tooth, collected, "{name}: {found:#?}");
    if !leaks {
        assert_eq!(found.recoverable_by, RecoverableBy::None, "{name}");
    }
    // Steps without marks are detected too, with the correct count.
    assert!(
        found.per_step.len().abs_diff(levels.len()) <= 1,
        "{name}: {} {:?}",
        found.per_step.len(),
        found.steps_from
    );
}

#[test]
fn steps_come_from_period_or_annotations() {
    assert!(matches!(of_recording("val_keep_outputs").steps_from, StepsFrom::Period(_)));
    assert!(matches!(of_recording("leak_loss_graph").steps_from, StepsFrom::Phase(_)));
    assert_eq!(of_recording("leak_outputs").steps_from, StepsFrom::Marks);
}

#[test]
fn faulty_workloads_leak_and_fixed_ones_do_not() {
    for (name, verdict) in [
        ("leak-slow", Verdict::Leak),
        ("leak-slow-fixed", Verdict::Steady),
        ("leak-cache", Verdict::Leak),
        ("leak-cache-fixed", Verdict::Steady),
        ("leak-intermediates", Verdict::Leak),
        ("leak-intermediates-fixed", Verdict::Steady),
        ("leak-cycle", Verdict::Steady),
        ("churn", Verdict::Steady),
        ("loader-prefetched", Verdict::Steady),
    ] {
        let found = finding(&Recipe::named(name).unwrap().workload().unwrap(), None);
        assert_eq!(found.verdict, verdict, "{name}: {found:#?}");
    }
}

#[test]
fn predicted_oom_step_is_right() {
    let limit = Some(24 * GIB);
    let short = Recipe::named("leak-outputs").unwrap().with("steps", "8").workload().unwrap();
    let predicted = finding(&short, limit).runs_out_at_step.unwrap();
    let long = Recipe::named("leak-outputs").unwrap().with("steps", "60").workload().unwrap();
    let ran_out = finding(&long, limit).ran_out_at_step.unwrap() as u64;
    assert!(predicted.abs_diff(ran_out) <= 1, "predicted {predicted}, ran out in {ran_out}");
}

#[test]
fn leaks_prints_text_json_and_exit_code() {
    let (leak, steady) = (recorded("leak_outputs"), recorded("val_with_grad"));
    let (leak, steady) = (leak.to_str().unwrap(), steady.to_str().unwrap());
    let (out, _) = run(".", &["leaks", leak], 105);
    for words in [": leak: ", "1.24 GiB of kept memory per step", "growing", "not known when"] {
        assert!(out.contains(words), "'{words}' is missing in\n{out}");
    }
    // The recording does not say how large the GPU was.
    let (out, _) = run(".", &["leaks", leak, "--card", "24GiB"], 105);
    assert!(out.contains("will run out in step"), "{out}");
    let (out, _) = run(".", &["leaks", "--each", leak, steady, "--format", "json", "--fail-on", "never"], 0);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["rows"][0]["verdict"], &json["rows"][1]["verdict"]), (&"leak".into(), &"steady".into()));
    run(".", &["leaks", leak, "--baseline", leak], 0);
    let (out, _) = run(".", &["leaks", steady, "--format", "csv"], 0);
    assert!(out.starts_with("source,verdict,step,") && out.lines().count() >= 6, "{out}");
}

#[test]
fn snapshots_in_order_are_one_series() {
    // Three different programs with final levels of 2.0, 4.5 and 10.0 GB show no trend; in this
    // order they fall.
    let path = |name: &str| recorded(name).display().to_string();
    let names = ["leak_outputs", "leak_outputs_detached", "leak_outputs_cpu"].map(path);
    let (out, _) = run(".", &["leaks", &names[0], &names[1], &names[2], "--format", "json"], 0);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = &json["rows"][0];
    assert_eq!((&row["steps_from"], &row["verdict"]), (&"snapshots".into(), &"steady".into()));
    assert_eq!(row["per_step"][1]["allocated_bytes"], 4_496_976_384_u64);
    let (out, _) = run(".", &["leaks", &names[0], &names[1]], 109);
    assert!(out.contains("cannot tell: 2 snapshots are too few") && out.contains("record more steps"), "{out}");
    let (_, err) = run(".", &["leaks", &names[0], "training"], 2);
    assert!(err.contains("'training' is not a PyTorch snapshot"), "{err}");
    let (_, err) = run(".", &["leaks", &names[0], "--step-at", "nonsense"], 2);
    assert!(err.contains("Optimizer.step#AdamW.step"), "{err}");
}

#[test]
fn snapshot_without_history_is_not_judged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no-history.pickle");
    let mut snapshot = Snapshot::open(recorded("leak_outputs"), &NoProgress).unwrap();
    snapshot.traces.iter_mut().for_each(Vec::clear);
    snapshot.write(std::fs::File::create(&file).unwrap(), &NoProgress).unwrap();
    let (file, leak) = (file.to_str().unwrap(), recorded("leak_outputs"));
    let (out, _) = run(".", &["leaks", file], 109);
    for words in [": cannot tell: there is no history", "_record_memory_history()", "`oomph record`"] {
        assert!(out.contains(words), "'{words}' is missing in\n{out}");
    }
    assert!(!out.contains("steady") && !out.contains("p = "), "{out}");
    // One source without an answer does not hide the answer for another.
    let (out, _) = run(".", &["leaks", "--each", file, leak.to_str().unwrap(), "--format", "json"], 105);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["rows"][0]["verdict"], &json["rows"][0]["doubt"]), (&"cannot_tell".into(), &"no_history".into()));
    assert!(json["rows"][0]["bytes_per_step"].is_null(), "{out}");
    assert_eq!(json["rows"][1]["verdict"], "leak");
    run(".", &["leaks", file, "--fail-on", "never"], 0);
}

#[test]
fn exit_is_named_and_left_out() {
    let (out, _) = run(".", &["leaks", "leak-outputs", "--set", "steps=8"], 105);
    assert!(!out.contains("left out"), "{out}");
    let mut trace = Trace::read(&Recipe::named("leak-outputs").unwrap().workload().unwrap()).unwrap();
    let mut alive = BTreeMap::new();
    for event in &trace.events {
        match event.op {
            Op::Alloc { slot, stream, .. } => drop(alive.insert(slot, stream)),
            Op::Free { slot, .. } => drop(alive.remove(&slot)),
            _ => {}
        }
    }
    let last = trace.events[trace.events.len() - 1];
    trace.events.extend(alive.into_iter().map(|(slot, stream)| Event { op: Op::Free { slot, stream }, ..last }));
    let found = finding(&trace, None);
    assert_eq!((found.verdict, found.recoverable_by), (Verdict::Leak, RecoverableBy::Unknown));
    let left_out = found.left_out.unwrap();
    assert!(left_out.is_exit && left_out.requests == 0 && left_out.freed_bytes > 10 * GIB, "{left_out:?}");
    let text = LeakReport { findings: vec![LeakAnswer::Judged(Box::new(found))], top: 3 }.text(Medium::PIPE);
    let words = format!("left out     the last {} events, which free ", left_out.events);
    assert!(text.contains(&words) && text.contains("when the program exits"), "{text}");
}

#[test]
fn recordings_without_stacks_say_so() {
    let file = recorded("leak_outputs");
    let (out, _) = run(".", &["leaks", file.to_str().unwrap()], 105);
    assert!(out.contains("blocks of ") && out.contains("no call stacks were recorded"), "{out}");
    let (out, _) = run(".", &["inspect", file.to_str().unwrap(), "--by", "site"], 0);
    assert!(out.contains("no call stacks were recorded") && !out.contains("unknown site"), "{out}");
    let (out, _) = run(".", &["inspect", recorded("varlen_stack").to_str().unwrap(), "--by", "site"], 0);
    assert!(!out.contains("no call stacks were recorded"), "{out}");
}
