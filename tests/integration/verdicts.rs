//! The verdicts of `oomph leaks` on programs whose right answer is known, and on variations of their recordings: with the
//! exit of the program, from the middle, without marks, without history, under a limit, with a leak put into them.

use std::{collections::HashMap, path::Path};

use oomph::{
    answer::leaks::{GrowthThreshold, LeakError, ObservedSteps, Verdict, judge},
    base::{GIB, MIB, NoProgress, StreamId, TagId, parallel_map},
    models::Recipe,
    replay::{Replay, ReplayOptions},
    suite::{SourceSpec, all_cores},
    trace::{BEFORE_RECORDING, BlockSlot, Event, MarkKind, Op, Source, Trace, TraceBuilder, torch::Snapshot},
};

/// The memory of the H200 that made the recordings.
const H200_BYTES: f64 = 150_109_880_320.0;

/// What a careful person would say.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Leak,
    Steady,
    /// No leak; the cache may still grow.
    NoLeak,
    GrowingCache,
    /// There is too little to decide.
    CannotTell,
}

impl Expected {
    fn allows(self, verdict: Verdict) -> bool {
        match self {
            Expected::Leak => verdict == Verdict::Leak,
            Expected::Steady => verdict == Verdict::Steady,
            Expected::NoLeak => {
                matches!(verdict, Verdict::Steady | Verdict::GrowingCache | Verdict::Fragmentation)
            }
            Expected::GrowingCache => verdict == Verdict::GrowingCache,
            Expected::CannotTell => verdict == Verdict::CannotTell,
        }
    }
}

struct VerdictCase {
    name: String,
    source: Box<dyn Source>,
    strategy: &'static str,
    limit: Option<u64>,
    expected: Expected,
}

impl VerdictCase {
    fn new(name: impl Into<String>, source: impl Source + 'static, expected: Expected) -> VerdictCase {
        VerdictCase { name: name.into(), source: Box::new(source), strategy: "caching", limit: None, expected }
    }

    fn verdict(&self) -> Verdict {
        let options = ReplayOptions { resumes: true, ..ReplayOptions::default() };
        let replay = Replay::new(&*self.source).strategy(self.strategy).limit(self.limit).options(options);
        let found = ObservedSteps::of_replay(&replay, None)
            .and_then(|observed| judge(&observed, None, &GrowthThreshold::default()));
        match found {
            Ok(finding) => finding.verdict,
            Err(LeakError::NoHistory | LeakError::NoSteps | LeakError::TooShort { .. }) => Verdict::CannotTell,
            Err(error) => panic!("{}: {error}", self.name),
        }
    }
}

/// Checks a table: no verdict is wrong, and at most 10 % of what can be decided is left open.
fn check(cases: &[VerdictCase], at_least: usize) {
    assert!(cases.len() >= at_least, "{} cases", cases.len());
    let verdicts = parallel_map(cases, all_cores(), VerdictCase::verdict);
    let rows: Vec<(&VerdictCase, Verdict)> = cases.iter().zip(verdicts).collect();
    let wrong: Vec<String> = rows
        .iter()
        .filter(|(case, verdict)| !case.expected.allows(*verdict) && *verdict != Verdict::CannotTell)
        .map(|(case, verdict)| format!("{}: {verdict:?} instead of {:?}", case.name, case.expected))
        .collect();
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
    let decidable = rows.iter().filter(|(case, _)| case.expected != Expected::CannotTell);
    let open: Vec<&str> = decidable
        .clone()
        .filter(|(_, verdict)| *verdict == Verdict::CannotTell)
        .map(|(case, _)| case.name.as_str())
        .collect();
    assert!(
        open.len() * 10 <= decidable.count(),
        "{} of {} are left open:\n{}",
        open.len(),
        rows.len(),
        open.join("\n")
    );
}

fn generated(name: &str, set: &[(&str, &str)]) -> Trace {
    let recipe = set.iter().fold(Recipe::named(name).unwrap(), |recipe, (key, value)| recipe.with(key, value));
    Trace::read(&recipe.workload().unwrap()).unwrap()
}

fn path(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    path.display().to_string()
}

fn recorded(name: &str) -> Trace {
    let spec = SourceSpec { name: path(name), ..SourceSpec::default() };
    Trace::read(&*spec.open(&NoProgress).unwrap()).unwrap()
}

/// The requests of the blocks that are alive after the first `events`, by slot.
fn alive(trace: &Trace, events: usize) -> HashMap<BlockSlot, Event> {
    let mut alive = HashMap::new();
    for event in &trace.events[..events] {
        match event.op {
            Op::Alloc { slot, .. } => drop(alive.insert(slot, *event)),
            Op::Free { slot, .. } => drop(alive.remove(&slot)),
            _ => {}
        }
    }
    alive
}

fn step_marks(trace: &Trace) -> Vec<usize> {
    let is_step = |event: &Event| matches!(event.op, Op::Mark { kind: MarkKind::Step, .. });
    (0..trace.events.len()).filter(|&at| is_step(&trace.events[at])).collect()
}

/// The program exits: everything is freed, or everything but what was there before the first step.
fn with_exit(mut trace: Trace, keeps_model: bool) -> Trace {
    let kept = match step_marks(&trace).first() {
        Some(&first) if keeps_model => alive(&trace, first),
        _ => HashMap::new(),
    };
    let mut freed: Vec<(BlockSlot, Event)> = alive(&trace, trace.events.len())
        .into_iter()
        .filter(|(slot, event)| kept.get(slot).is_none_or(|kept| kept.op != event.op))
        .collect();
    freed.sort_by_key(|(slot, _)| *slot);
    for (slot, event) in freed {
        if let Op::Alloc { stream, .. } = event.op {
            trace.events.push(Event { op: Op::Free { slot, stream }, ..event });
        }
    }
    trace
}

/// The last events of a recording, as a ring buffer or a late start leaves them.
fn from_event(mut trace: Trace, first: usize) -> Trace {
    let label = trace.tables.intern_label(BEFORE_RECORDING);
    let nothing = trace.tables.intern_label("");
    let mut before: Vec<(BlockSlot, Event)> = alive(&trace, first).into_iter().collect();
    before.sort_by_key(|(slot, _)| *slot);
    let mark = |label| Event { op: Op::Mark { kind: MarkKind::Phase, label, index: 0 }, ..trace.events[0] };
    let mut events = vec![mark(label)];
    events.extend(before.into_iter().map(|(_, event)| event));
    events.push(mark(nothing));
    events.extend_from_slice(&trace.events[first..]);
    trace.events = events;
    trace
}

fn without_marks(mut trace: Trace) -> Trace {
    trace.events.retain(|event| !matches!(event.op, Op::Mark { .. }));
    trace
}

/// Every step leaves a block behind: a share of what is alive when the second step begins.
fn with_leak(mut trace: Trace, share: f64) -> Trace {
    let marks = step_marks(&trace);
    let level = alive(&trace, marks[1]).values().fold(0, |sum, event| match event.op {
        Op::Alloc { bytes, .. } => sum + bytes,
        _ => sum,
    });
    let unused = trace.events.iter().fold(0, |most, event| match event.op {
        Op::Alloc { slot, .. } | Op::HostAlloc { slot, .. } => most.max(slot + 1),
        _ => most,
    });
    for (place, &mark) in marks.iter().enumerate().rev() {
        let op = Op::Alloc {
            slot: unused + place as BlockSlot,
            bytes: (level as f64 * share) as u64,
            stream: StreamId::DEFAULT,
            tag: TagId(0),
            site: Default::default(),
        };
        let event = Event { op, ..trace.events[mark] };
        trace.events.insert(mark + 1, event);
    }
    trace
}

/// The first steps of a recording.
fn first_steps(mut trace: Trace, steps: usize) -> Trace {
    if let Some(&end) = step_marks(&trace).get(steps) {
        trace.events.truncate(end);
    }
    trace
}

/// The recording itself, with the exit of the program, and with an exit down to the model.
fn with_exits(name: &str, trace: &Trace, expected: Expected) -> [VerdictCase; 3] {
    [
        VerdictCase::new(name, trace.clone(), expected),
        VerdictCase::new(format!("{name}, exit"), with_exit(trace.clone(), false), expected),
        VerdictCase::new(format!("{name}, exit down to the model"), with_exit(trace.clone(), true), expected),
    ]
}

#[test]
fn leaks_of_every_kind_and_length() {
    let mut cases = Vec::new();
    for kind in ["outputs", "outputs-detached", "loss-graph", "retain-graph", "intermediates", "cache"] {
        for steps in ["4", "8", "20", "30", "60"] {
            let name = format!("leak-{kind}, {steps} steps");
            let trace = generated(&format!("leak-{kind}"), &[("steps", steps)]);
            cases.extend(with_exits(&name, &trace, Expected::Leak));
            if steps == "20" {
                let middle = from_event(trace.clone(), trace.events.len() / 3);
                cases.extend(with_exits(&format!("{name}, from the middle"), &middle, Expected::Leak));
                let ring = from_event(trace.clone(), trace.events.len() / 2);
                cases.push(VerdictCase::new(
                    format!("{name}, last half, exit"),
                    with_exit(ring, false),
                    Expected::Leak,
                ));
                let unmarked = with_exit(without_marks(trace.clone()), false);
                cases.push(VerdictCase::new(format!("{name}, without marks, exit"), unmarked, Expected::Leak));
            }
        }
    }
    for steps in ["60", "100"] {
        let trace = generated("leak-slow", &[("steps", steps)]);
        cases.extend(with_exits(&format!("leak-slow, {steps} steps"), &trace, Expected::Leak));
    }
    for name in ["val-keep-outputs", "val-keep-no-grad"] {
        cases.extend(with_exits(name, &generated(name, &[]), Expected::Leak));
    }
    check(&cases, 120);
}

#[test]
fn leaks_put_into_steady_recordings() {
    let mut cases = Vec::new();
    for name in ["train_base", "varlen", "streams", "resnet_base"] {
        for percent in [1, 20] {
            let trace = with_leak(recorded(name), f64::from(percent) / 100.0);
            let name = format!("{name} with a leak of {percent} %");
            cases.extend(with_exits(&name, &trace, Expected::Leak));
            for steps in [4, 5, 6] {
                let few = with_exit(first_steps(trace.clone(), steps), false);
                cases.push(VerdictCase::new(format!("{name}, {steps} steps, exit"), few, Expected::Leak));
            }
        }
    }
    let middle = with_leak(recorded("varlen"), 0.01);
    let middle = with_exit(from_event(middle.clone(), middle.events.len() / 2), false);
    cases.push(VerdictCase::new("varlen with a leak of 1 %, from the middle, exit", middle, Expected::Leak));
    check(&cases, 49);
}

#[test]
fn steady_generated_programs() {
    let mut cases = Vec::new();
    for name in [
        "leak-outputs-fixed",
        "leak-outputs-cpu",
        "leak-cache-cpu-fixed",
        "leak-intermediates-fixed",
        "leak-loss-graph-fixed",
        "leak-no-zero-grad",
        "leak-retain-graph-fixed",
        "leak-retain-rebound",
        "leak-retain-twice",
        "val-with-grad",
    ] {
        for steps in ["4", "8", "30"] {
            let trace = generated(name, &[("steps", steps)]);
            cases.extend(with_exits(&format!("{name}, {steps} steps"), &trace, Expected::Steady));
        }
    }
    // Reserved memory rises in step 23, once, as in PyTorch 2.11.
    let rises_once = generated("leak-loss-graph-fixed", &[("steps", "60")]);
    cases.extend(with_exits("leak-loss-graph-fixed, 60 steps", &rises_once, Expected::Steady));
    for name in ["leak-loss-sum", "leak-loss-sum-fixed"] {
        cases.extend(with_exits(name, &generated(name, &[]), Expected::Steady));
    }
    for steps in ["20", "30", "60"] {
        let trace = generated("leak-cycle", &[("steps", steps)]);
        cases.extend(with_exits(&format!("leak-cycle, {steps} steps"), &trace, Expected::Steady));
    }
    for name in
        ["leak-cache-fixed", "leak-slow-fixed", "training", "resnet-50", "streams", "loader-prefetched", "churn"]
    {
        cases.extend(with_exits(name, &generated(name, &[]), Expected::Steady));
    }
    for name in ["variable-length", "llm-serve", "llm-serve-concatenated"] {
        cases.extend(with_exits(name, &generated(name, &[]), Expected::NoLeak));
    }
    for name in ["training", "variable-length", "leak-outputs-fixed"] {
        let unmarked = with_exit(without_marks(generated(name, &[])), false);
        cases.push(VerdictCase::new(format!("{name}, without marks, exit"), unmarked, Expected::NoLeak));
    }
    check(&cases, 120);
}

#[test]
fn steady_recordings() {
    let mut cases = Vec::new();
    for name in ["train_base", "train_ckpt", "train_sgd", "train_accum4", "train_emptycache", "streams", "resnet_amp"] {
        cases.extend(with_exits(name, &recorded(name), Expected::Steady));
    }
    for name in ["leak_outputs_cpu", "leak_no_zero_grad", "leak_retain_rebound", "val_no_grad", "val_with_grad"] {
        cases.extend(with_exits(name, &recorded(name), Expected::Steady));
    }
    cases.push(VerdictCase::new("leak_cycle", recorded("leak_cycle"), Expected::Steady));
    for name in ["varlen", "varlen.seed2", "infer_kv"] {
        let trace = recorded(name);
        cases.extend(with_exits(name, &trace, Expected::NoLeak));
        let middle = with_exit(from_event(trace.clone(), trace.events.len() / 2), false);
        cases.push(VerdictCase::new(format!("{name}, from the middle, exit"), middle, Expected::NoLeak));
    }
    for (name, fraction) in [("varlen_cap047.exp", 0.047), ("varlen_cap052", 0.052), ("varlen_cap052.exp", 0.052)] {
        let strategy = if name.ends_with("exp") { "caching:expandable_segments:True" } else { "caching" };
        for case in with_exits(name, &recorded(name), Expected::Steady) {
            cases.push(VerdictCase { strategy, limit: Some((H200_BYTES * fraction) as u64), ..case });
        }
    }
    for case in with_exits("varlen.split64", &recorded("varlen.split64"), Expected::GrowingCache) {
        cases.push(VerdictCase { strategy: "caching:max_split_size_mb:64", ..case });
    }
    check(&cases, 60);
}

#[test]
fn recordings_with_too_little_are_left_open() {
    let snapshot = |name: &str, entries: usize| {
        let mut snapshot = Snapshot::open(path(name), &NoProgress).unwrap();
        for trace in &mut snapshot.traces {
            let left_out = trace.len().saturating_sub(entries);
            trace.drain(..left_out);
        }
        snapshot.into_recording(name, None, &NoProgress).unwrap()
    };
    let mut cases = Vec::new();
    for name in ["train_base", "leak_outputs", "infer_kv", "varlen"] {
        for entries in [0, 1, 2] {
            let name_of_case = format!("{name}, {entries} entries");
            cases.push(VerdictCase::new(name_of_case, snapshot(name, entries), Expected::CannotTell));
        }
    }
    // It died in its first step: the layers of one forward pass look like steps.
    cases.push(VerdictCase::new("oom_base", recorded("oom_base"), Expected::CannotTell));
    cases.push(VerdictCase::new("varlen_cap042", recorded("varlen_cap042"), Expected::CannotTell));
    for steps in [1, 2, 3] {
        let few = with_exit(first_steps(recorded("varlen"), steps), false);
        cases.push(VerdictCase::new(format!("varlen, {steps} steps, exit"), few, Expected::CannotTell));
    }
    check(&cases, 17);
}

/// A program of a model of 1 GiB and a temporary of varying size per step, and what else a step does.
fn program(steps: u64, mut step: impl FnMut(&mut TraceBuilder, &mut Vec<BlockSlot>, u64)) -> Trace {
    let mut builder = TraceBuilder::new();
    let mut kept = Vec::new();
    for _ in 0..16 {
        request(&mut builder, 64 * MIB);
    }
    for number in 0..steps {
        builder.mark(MarkKind::Step, "", number as u32);
        for layer in 0..8 {
            let activation = request(&mut builder, (8 + (number * 7 + layer) % 13) * 4 * MIB);
            builder.free(activation);
        }
        step(&mut builder, &mut kept, number);
    }
    builder.finish("program")
}

fn request(builder: &mut TraceBuilder, bytes: u64) -> BlockSlot {
    builder.alloc(bytes, StreamId::DEFAULT, TagId(0))
}

#[test]
fn programs_with_events_of_their_own() {
    let passing = |builder: &mut TraceBuilder, bytes: u64| {
        let block = request(builder, bytes);
        builder.free(block);
    };
    let with_window = |builder: &mut TraceBuilder, kept: &mut Vec<BlockSlot>, most: usize| {
        kept.push(request(builder, 32 * MIB));
        if kept.len() > most {
            builder.free(kept.remove(0));
        }
    };
    let evaluation = program(30, |builder, _, step| passing(builder, if step % 5 == 4 { 3 * GIB } else { MIB }));
    let checkpoint = program(20, |builder, _, step| passing(builder, if step == 9 { GIB } else { MIB }));
    let average = program(24, |builder, kept, step| {
        if step == 5 {
            kept.push(request(builder, GIB));
        }
    });
    let full_cache = program(40, |builder, kept, _| with_window(builder, kept, 12));
    let cleared = program(33, |builder, kept, step| {
        kept.push(request(builder, 32 * MIB));
        if step % 8 == 7 {
            kept.drain(..).for_each(|block| builder.free(block));
        }
    });
    let varying = program(30, |builder, kept, step| {
        kept.drain(..).for_each(|block| builder.free(block));
        kept.push(request(builder, (1 + step * 5 % 9) * 16 * MIB));
    });
    let never_full = program(30, |builder, kept, _| with_window(builder, kept, 1000));
    let longer = program(30, |builder, kept, step| {
        let next = request(builder, (step + 1) * 16 * MIB);
        kept.drain(..).for_each(|block| builder.free(block));
        kept.push(next);
    });
    let rare = program(40, |builder, kept, step| {
        if step % 4 == 3 {
            kept.push(request(builder, 64 * MIB));
        }
    });
    let late = program(40, |builder, kept, step| {
        if step >= 20 {
            kept.push(request(builder, 64 * MIB));
        }
    });
    let uneven = program(6, |builder, kept, step| kept.push(request(builder, (1 + step * 5 % 7) * 24 * MIB)));
    let mut cases = Vec::new();
    for (name, trace, expected) in [
        ("evaluation every fifth step", evaluation, Expected::NoLeak),
        ("a checkpoint", checkpoint, Expected::NoLeak),
        ("an average of weights from step 5 on", average, Expected::NoLeak),
        ("a cache that is full after 12 steps", full_cache, Expected::NoLeak),
        ("outputs cleared every eighth step", cleared, Expected::NoLeak),
        ("a batch of varying length kept for a step", varying, Expected::NoLeak),
        ("a cache that never fills", never_full, Expected::Leak),
        ("a sequence that gets longer", longer, Expected::Leak),
        ("a leak every fourth step", rare, Expected::Leak),
        ("a leak from step 20 on", late, Expected::Leak),
        ("six steps that leak different amounts", uneven, Expected::Leak),
    ] {
        cases.extend(with_exits(name, &trace, expected));
    }
    check(&cases, 33);
}

/// Two optimizers are used in turn, so that a step has two marks of the same name. The state of each is created when it is
/// first used.
fn with_two_optimizers(steps: u64, leaked: u64) -> Trace {
    let mut builder = TraceBuilder::new();
    request(&mut builder, GIB);
    for number in 0..steps {
        for (half, layers) in [(0, 9), (1, 6)] {
            builder.mark(MarkKind::Step, "", (2 * number + half) as u32);
            for layer in 0..layers {
                let activation = request(&mut builder, (8 + layer) * 4 * MIB);
                builder.free(activation);
            }
            if number == 0 {
                request(&mut builder, 128 * MIB);
            }
        }
        if leaked > 0 {
            request(&mut builder, leaked);
        }
    }
    builder.finish("two optimizers")
}

#[test]
fn staircases_late_leaks_and_lists_that_are_cleared() {
    let leak_if = |steps: u64, leaks: fn(u64) -> bool| {
        program(steps, |builder, kept, step| {
            if leaks(step) {
                kept.push(request(builder, 64 * MIB));
            }
        })
    };
    let bounded = |steps: u64, most: usize| {
        program(steps, |builder, kept, _| {
            kept.push(request(builder, 32 * MIB));
            if kept.len() > most {
                builder.free(kept.remove(0));
            }
        })
    };
    // A list of all outputs is cleared, and the model is evaluated on larger batches.
    let evaluated = |steps: u64| {
        program(steps + 1, |builder, kept, step| match step {
            step if step < steps => {
                kept.push(request(builder, 64 * MIB));
                if step == steps - 1 {
                    kept.drain(..).for_each(|block| builder.free(block));
                }
            }
            _ => (0..4).for_each(|_| {
                let block = request(builder, GIB);
                builder.free(block);
            }),
        })
    };
    // A leak of 16 MiB per step below garbage of 48 MiB per step, which is freed every sixth step.
    let below_garbage = |steps: u64| {
        program(steps, |builder, kept, step| {
            request(builder, 16 * MIB);
            kept.push(request(builder, 48 * MIB));
            if step % 6 == 5 {
                kept.drain(..).for_each(|block| builder.free(block));
            }
        })
    };
    // A step generates tokens: its cache gets longer by a copy per token.
    let generation = |steps: u64, keeps: bool| {
        program(steps, |builder, kept, _| {
            let mut cache = request(builder, 16 * MIB);
            for token in 1..16 {
                let longer = request(builder, (16 + token) * MIB);
                builder.free(cache);
                cache = longer;
            }
            if keeps { kept.push(cache) } else { builder.free(cache) }
        })
    };
    let mut cases = Vec::new();
    for (name, trace, expected) in [
        ("a leak from step 22 on, 30 steps", leak_if(30, |step| step >= 22), Expected::Leak),
        ("a leak from step 22 on, 22 steps", leak_if(22, |step| step >= 22), Expected::Steady),
        ("a leak in every fifth step, 24 steps", leak_if(24, |step| step % 5 == 4), Expected::Leak),
        ("a leak in every fifth step, 40 steps", leak_if(40, |step| step % 5 == 4), Expected::Leak),
        ("a leak in every tenth step, 44 steps", leak_if(44, |step| step % 10 == 9), Expected::Leak),
        ("a leak in 3 of 10 steps", leak_if(40, |step| [1, 4, 5].contains(&(step * 7 % 10))), Expected::Leak),
        ("two rises, then level", leak_if(24, |step| step == 3 || step == 6), Expected::Steady),
        ("a rise, then level", leak_if(24, |step| step == 10), Expected::Steady),
        ("a cache of 8 blocks, 20 steps", bounded(20, 8), Expected::Steady),
        ("a cache of 8 blocks, 40 steps", bounded(40, 8), Expected::Steady),
        ("outputs, cleared before an evaluation, 10 steps", evaluated(10), Expected::Leak),
        ("outputs, cleared before an evaluation, 30 steps", evaluated(30), Expected::Leak),
        ("a leak below garbage, 30 steps", below_garbage(30), Expected::Leak),
        ("two optimizers, 6 steps", with_two_optimizers(6, 0), Expected::Steady),
        ("two optimizers, 20 steps", with_two_optimizers(20, 0), Expected::Steady),
        ("two optimizers and a leak, 6 steps", with_two_optimizers(6, 24 * MIB), Expected::Leak),
        ("two optimizers and a leak, 20 steps", with_two_optimizers(20, 24 * MIB), Expected::Leak),
        ("generation", generation(20, false), Expected::Steady),
        ("generation, caches kept", generation(20, true), Expected::Leak),
    ] {
        cases.extend(with_exits(name, &trace, expected));
    }
    for (name, trace) in [
        ("a leak from step 22 on, 26 steps", leak_if(26, |step| step >= 22)),
        ("a leak in every fifth step, 12 steps", leak_if(12, |step| step % 5 == 4)),
        ("a leak in every tenth step, 25 steps", leak_if(25, |step| step % 10 == 9)),
        ("a leak in every tenth step, 30 steps", leak_if(30, |step| step % 10 == 9)),
        ("a cache of 8 blocks, 10 steps", bounded(10, 8)),
        ("a leak below garbage, 8 steps", below_garbage(8)),
    ] {
        cases.push(VerdictCase::new(name, trace, Expected::CannotTell));
    }
    check(&cases, 63);
}
