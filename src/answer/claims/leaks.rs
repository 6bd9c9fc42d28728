//! Claims about leaks: what holds on to memory, how that shows, and how to find it.

use super::{
    Claim,
    ClaimTest::AnyDevice,
    bench::{CACHING, ClaimBench, ClaimResult, model, recipe},
    finding::{
        ClaimAmount::{Count, Percent, Size, SizePerStep},
        ClaimFinding, Measured, ratio, reduction,
    },
    pytorch::{GARBAGE_PENDING, VALIDATION_NO_GRAD, VALIDATION_WITH_GRAPH, growth},
};
use crate::{
    answer::leaks::{self, GrowthThreshold, Verdict, judge},
    base::GIB,
    measure::Status,
    trace,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "gc-step",
        statement: "gc.collect in the loop lowers memory",
        published: "lower memory",
        lesson: "It frees reference cycles and nothing else. A loop without cycles gains nothing and pays for the call.",
        command: "oomph replay leak-cycle-collected-fixed --strategy caching; oomph replay reference-gpt-163m --set techniques=gc --strategy caching",
        test: AnyDevice(|bench, finding| {
            for (kind, plain, collected) in [
                ("without", model("reference-gpt-163m", "")?, model("reference-gpt-163m", "gc")?),
                ("with", recipe("leak-cycle", &[])?, recipe("leak-cycle-collected-fixed", &[])?),
            ] {
                let lower = bench.peak(&plain)?.saturating_sub(bench.peak(&collected)?);
                finding.figure(format!("{kind} cycles, peak lower by"), Size(lower));
                finding.check(format!("a loop {kind} cycles needs less"), lower > 0);
            }
            Ok(())
        }),
    },
    Claim {
        id: "leak-sign",
        statement: "A leak shows as a steady rise of allocated memory that empty_cache does not bring down",
        published: "steady rise",
        lesson: "empty_cache never changes allocated memory, so a rise of allocated memory is a leak whether it is called or not.",
        command: "oomph leaks leak-outputs --set techniques=empty_cache",
        test: AnyDevice(|bench, finding| {
            let plain = slope(bench, finding, "leak-outputs", &[], None)?;
            let emptied = bench.growth(&recipe("leak-outputs", &[("techniques", "empty_cache")])?, CACHING, None)?.1;
            finding.figure("with empty_cache after every step", SizePerStep(emptied.bytes_per_step));
            finding.check("what is allocated rises", plain.verdict == Verdict::Leak);
            let same = (emptied.bytes_per_step / plain.bytes_per_step - 1.0).abs() < 0.01;
            finding.check("and as fast with empty_cache", same);
            Ok(())
        }),
    },
    Claim {
        id: "slow-leak",
        statement: "Leaks in pre-processing raise residency by 15-20 % over 100 epochs",
        published: "15-20 % over 100 epochs",
        lesson: "A single step does not show it; a regression over all steps does.",
        command: "oomph leaks leak-slow",
        test: AnyDevice(|bench, finding| {
            let (observed, found) = bench.growth(&recipe("leak-slow", &[])?, CACHING, None)?;
            let kept = |step: Option<&leaks::StepUse>| step.map_or(0, |step| step.kept_bytes);
            let (first, last) = (kept(observed.judged().first()), kept(observed.judged().last()));
            let grown = reduction(first, last).map(|percent| -percent);
            finding.figure("what is kept grows by", grown.map(Percent));
            finding.figure("which is", SizePerStep(found.bytes_per_step));
            finding.check("the detector sees it", found.verdict == Verdict::Leak);
            finding.check_range("it raises residency by", grown, 15.0..=20.0, " %");
            Ok(())
        }),
    },
    Claim {
        id: "outputs-list",
        statement: "Appending model outputs to a list leaks; detaching them fixes it",
        published: "detach() is the fix",
        lesson: "Detached outputs are still tensors: the graph is freed, but the outputs stay, and so does the leak. Move them to the \
                 host or reduce them at once.",
        command: "oomph leaks --each leak-outputs leak-outputs-detached leak-outputs-cpu leak-outputs-fixed",
        test: AnyDevice(|bench, finding| {
            let [graph, detached, on_cpu] = [growth::OUTPUTS, growth::OUTPUTS_DETACHED, growth::OUTPUTS_ON_CPU];
            check_leak(bench, finding, "leak-outputs", graph, "appending leaks", true)?;
            check_leak(bench, finding, "leak-outputs-detached", detached, "detached it does not", false)?;
            check_leak(bench, finding, "leak-outputs-cpu", on_cpu, "moved to the CPU it does not", false)?;
            check_leak(bench, finding, "leak-outputs-fixed", None, "used up at once it does not", false)
        }),
    },
    Claim {
        id: "val-accumulate",
        statement: "Keeping the outputs of validation batches on the GPU leaks step by step",
        published: "growth with every batch",
        lesson: "Without the graph a third of the memory remains: the outputs themselves.",
        command: "oomph leaks --each val-keep-outputs val-keep-no-grad val-keep-outputs-fixed",
        test: AnyDevice(|bench, finding| {
            let [graph, no_grad] = [growth::VALIDATION_OUTPUTS, growth::VALIDATION_OUTPUTS_NO_GRAD];
            check_leak(bench, finding, "val-keep-outputs", graph, "with a graph it leaks", true)?;
            check_leak(bench, finding, "val-keep-no-grad", no_grad, "under no_grad it leaks", true)
        }),
    },
    Claim {
        id: "no-grad-val",
        statement: "Validation inside no_grad avoids storage for gradients",
        published: "lower memory",
        lesson: "No graph is stored, so the peak is less than half; but a graph that is dropped every time is not a leak.",
        command: "oomph replay val-with-grad --strategy caching; oomph replay val-with-grad-fixed --strategy caching",
        test: AnyDevice(|bench, finding| {
            let graph = (bench.peak(&recipe("val-with-grad", &[])?)?, VALIDATION_WITH_GRAPH);
            let none = (bench.peak(&recipe("val-with-grad-fixed", &[])?)?, VALIDATION_NO_GRAD);
            finding.figure("peak with a graph", Measured::from(graph).map(Size));
            finding.figure("peak without", Measured::from(none).map(Size));
            let lower = reduction(graph, none).map(|percent| percent >= 10.0);
            finding.check("the peak is at least a tenth lower", lower);
            Ok(())
        }),
    },
    Claim {
        id: "cycle",
        statement: "Circular references keep tensors until the garbage collector runs (elsewhere: for ever)",
        published: "until collected; elsewhere never freed",
        lesson: "A saw-tooth: the collector counts objects and not bytes, so much memory can wait for it, and an OOM can occur \
                 before it runs. Weak references and broken links need no collector.",
        command: "oomph leaks --each leak-cycle leak-cycle-fixed leak-cycle-broken-fixed leak-cycle-collected-fixed",
        test: AnyDevice(|bench, finding| {
            let (observed, found) = bench.growth(&recipe("leak-cycle", &[])?, CACHING, None)?;
            let allocated = || observed.steps.iter().map(|step| step.allocated_bytes);
            let pending = allocated().max().unwrap_or(0) - allocated().min().unwrap_or(0);
            finding.figure("waiting for the collector at most", (Size(pending), Size(GARBAGE_PENDING)));
            finding.check("tensors outlive their step", (pending > 0, GARBAGE_PENDING > 0));
            finding.check("they are freed when the collector runs", found.saw_tooth && found.collected_bytes > 0);
            finding.check("they are never freed", found.verdict == Verdict::Leak);
            // Room for the loop and not for all the garbage that waits.
            let peak = observed.steps.iter().map(|step| step.peak_allocated_bytes).max().unwrap_or(0);
            let fixed = bench.memory(&recipe("leak-cycle-fixed", &[])?)?.peak_reserved_bytes.unwrap_or(0);
            let there = bench.replayed(&recipe("leak-cycle", &[])?, CACHING, Some(fixed))?.0;
            finding.figure("peak with garbage", Size(peak));
            finding.figure("memory of the program without cycles", Size(fixed));
            finding.figure("ends in an OOM there (1: yes)", Count((there.ooms > Some(0)).into()));
            Ok(())
        }),
    },
    Claim {
        id: "persistent",
        statement: "Long-lived dicts, lists, globals and unbounded caches keep tensors",
        published: "linear growth",
        lesson: "Every entry stays. A limit on the number of entries, or keeping them on the host, fixes it.",
        command: "oomph leaks --each leak-cache leak-cache-fixed leak-cache-cpu-fixed leak-intermediates",
        test: AnyDevice(|bench, finding| {
            check_leak(bench, finding, "leak-cache", None, "an unbounded cache leaks", true)?;
            let bounded = slope(bench, finding, "leak-cache-fixed", &[("steps", "48")], None)?;
            finding.check("a bounded one does not", bounded.verdict != Verdict::Leak);
            check_leak(bench, finding, "leak-intermediates", None, "an attribute that gathers tensors leaks", true)
        }),
    },
    Claim {
        id: "retain-graph",
        statement: "backward(retain_graph=True) in a loop leaks the graph",
        published: "leaks",
        lesson: "Only if the loss is kept too. When the variable is assigned again, the old graph is freed: one more graph, once.",
        command: "oomph leaks --each leak-retain-graph leak-retain-rebound leak-retain-twice",
        test: AnyDevice(|bench, finding| {
            let [kept, rebound, twice] = [growth::RETAINED_LOSS, growth::RETAINED_REBOUND, growth::RETAINED_TWICE];
            check_leak(bench, finding, "leak-retain-graph", kept, "with the loss kept it leaks", true)?;
            check_leak(bench, finding, "leak-retain-rebound", rebound, "with the loss bound anew it leaks", true)?;
            check_leak(bench, finding, "leak-retain-twice", twice, "two backward passes on one graph leak", true)
        }),
    },
    Claim {
        id: "zero-grad",
        statement: "Forgetting zero_grad makes memory rise step by step",
        published: "rises step by step",
        lesson: "Gradients are accumulated in place: one more set of gradients, once. Memory does not grow, but training is wrong.",
        command: "oomph leaks leak-no-zero-grad",
        test: AnyDevice(|bench, finding| {
            let growth = growth::NO_ZERO_GRAD;
            check_leak(bench, finding, "leak-no-zero-grad", growth, "memory rises step by step", true)
        }),
    },
    Claim {
        id: "pinned",
        statement: "pin_memory with many workers holds host memory and disturbs the GPU",
        published: "host memory; GPU disturbed",
        lesson: "Host memory grows with the workers; device memory does not. Copies from pinned memory are the fast ones.",
        command: "oomph replay loader-pinned --set workers=16 --strategy caching",
        test: AnyDevice(|bench, finding| {
            let mut held = Vec::new();
            for workers in ["0", "1", "4", "16"] {
                let program = recipe("loader-pinned", &[("workers", workers)])?;
                let pinned = trace::check(&program.workload().map_err(Box::new)?)?.host_peak.bytes;
                held.push((pinned, bench.memory(&program)?.peak_reserved_bytes.unwrap_or(0)));
                finding.figure(format!("pinned by {workers} workers"), Size(pinned));
            }
            let pageable = bench.memory(&recipe("loader-pinned-fixed", &[])?)?.peak_reserved_bytes.unwrap_or(0);
            let most = held.iter().map(|(_, reserved)| *reserved).max().unwrap_or(0);
            finding.figure("reserved on the device with pageable batches", Size(pageable));
            finding.figure("with pinned ones, at most", Size(most));
            finding.check("more workers hold more host memory", held.first() < held.last());
            finding.check("the device needs at least 1 % more", ratio(pageable, most).here >= 1.01);
            Ok(())
        }),
    },
    Claim {
        id: "hidden-data",
        statement: "Duplicated or prefetched batches and cached preprocessing cause OOM at small batch sizes",
        published: "OOM at small batches",
        lesson: "The input pipeline holds device memory that no batch size of the model explains.",
        command: "oomph replay loader-prefetched --strategy caching; oomph replay loader-prefetched-fixed --strategy caching",
        test: AnyDevice(|bench, finding| {
            for name in ["loader-prefetched", "loader-duplicated"] {
                let plain = recipe(name, &[])?;
                let fixed = bench.memory(&recipe(&format!("{name}-fixed"), &[])?)?;
                let more = bench.peak(&plain)?.saturating_sub(fixed.peak_allocated_bytes.unwrap_or(0));
                finding.figure(format!("{name}, held by the pipeline"), Size(more));
                let there = bench.replayed(&plain, CACHING, fixed.peak_reserved_bytes)?.0;
                let statement = format!("{name} runs out of memory where the fixed program does not");
                finding.check(statement, there.status == Status::Oom);
            }
            Ok(())
        }),
    },
    Claim {
        id: "churn",
        statement: "Many small tensors made and dropped in every iteration show as spikes",
        published: "spikes",
        lesson: "They show as calls: thousands of blocks that are freed within their step. Small tensors that are freed at once hardly \
                 change memory.",
        command: "oomph leaks churn --format csv",
        test: AnyDevice(|bench, finding| {
            let mut transient = Vec::new();
            let mut passing = Vec::new();
            for name in ["churn", "churn-fixed"] {
                let (observed, _) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                let (peak, blocks) = (last.transient_bytes.unwrap_or(0), last.passing_blocks.unwrap_or(0));
                finding.figure(format!("{name}, blocks freed within their step"), Count(blocks));
                finding.figure(format!("{name}, peak of a step above what it keeps"), Size(peak));
                transient.push(peak);
                passing.push(blocks);
            }
            finding.check("a step's peak is at least 1 % higher", ratio(transient[1], transient[0]).here >= 1.01);
            finding.check("a step makes at least a tenth more blocks", ratio(passing[1], passing[0]).here >= 1.1);
            Ok(())
        }),
    },
    Claim {
        id: "batch-first",
        statement: "Reducing the batch hides a leak and does not fix it",
        published: "the OOM comes later",
        lesson: "A smaller batch postpones the OOM; the slope stays the same.",
        command: "oomph leaks leak-cache --set steps=400 --set batch=1 --limit 12GiB",
        test: AnyDevice(|bench, finding| {
            let mut ends = Vec::new();
            for batch in ["8", "4"] {
                let program = recipe("leak-cache", &[("steps", "240"), ("batch", batch)])?;
                let (observed, found) = bench.growth(&program, CACHING, Some(14 * GIB))?;
                let end = observed.ran_out_at.unwrap_or(observed.steps.len());
                finding.figure(format!("batch {batch}, 14 GiB are used up in step"), Count(end as u64));
                finding.figure(format!("batch {batch}, grows by"), SizePerStep(found.bytes_per_step));
                ends.push((end, found));
            }
            finding.check("with half the batch the end comes later", ends[1].0 > ends[0].0);
            finding.check("with half the batch it still leaks", ends[1].1.verdict == Verdict::Leak);
            let (whole, half) = (ends[0].1.bytes_per_step, ends[1].1.bytes_per_step);
            finding.check("and as fast", (half / whole - 1.0).abs() < 0.01);
            Ok(())
        }),
    },
    Claim {
        id: "profile",
        statement: "A table of memory by operation (top ten) finds the culprit",
        published: "top ten",
        lesson: "What grows is named by the information about its blocks: call site, tag, or at least size.",
        command: "oomph leaks leak-outputs-detached --top 10",
        test: AnyDevice(|bench, finding| {
            for name in ["leak-outputs-detached", "leak-cache", "leak-outputs"] {
                let (_, found) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let top: f64 = found.growers.iter().take(10).map(|grower| grower.bytes_per_step).sum();
                let share = 100.0 * top / found.bytes_per_step.max(1.0);
                finding.figure(format!("{name}, growth that the first ten names explain"), Percent(share));
                finding.check(format!("they explain most of {name}"), share >= 50.0);
            }
            Ok(())
        }),
    },
    Claim {
        id: "snapshot",
        statement: "Snapshots over time show what grew",
        published: "two or more snapshots",
        lesson: "Three or more snapshots allow a regression, which tells growth from start-up; two give only a difference.",
        command: "oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle",
        test: AnyDevice(|bench, finding| {
            for (name, leaks) in [("leak-outputs-detached", true), ("leak-outputs-fixed", false)] {
                let (observed, whole) = bench.growth(&recipe(name, &[("steps", "12")])?, CACHING, None)?;
                // Snapshots at the end of every third step.
                let mut seen = observed.clone();
                seen.steps = observed.judged().iter().step_by(3).copied().collect();
                (seen.first_judged, seen.end_judged) = (0, seen.steps.len());
                let found = judge(&seen, None, &GrowthThreshold::default())?;
                finding
                    .figure(format!("{name}, {} snapshots", seen.steps.len()), SizePerStep(found.bytes_per_step / 3.0));
                finding.figure(format!("{name}, every step"), SizePerStep(whole.bytes_per_step));
                finding.check(
                    format!("snapshots of {name} show {}", if leaks { "that it grows" } else { "that nothing grows" }),
                    (found.verdict == Verdict::Leak) == leaks,
                );
            }
            Ok(())
        }),
    },
];

/// Notes what each step of a program adds.
fn slope(
    bench: &ClaimBench<'_>,
    finding: &mut ClaimFinding,
    name: &str,
    set: &[(&str, &str)],
    pytorch: Option<f64>,
) -> ClaimResult<leaks::Finding> {
    let found = bench.growth(&recipe(name, set)?, CACHING, None)?.1;
    finding.figure(name, Measured { here: found.bytes_per_step, pytorch }.map(SizePerStep));
    Ok(found)
}

/// Notes what each step of a program adds, and checks the statement that it leaks or does not. PyTorch's program leaks
/// where its steps add something.
fn check_leak(
    bench: &ClaimBench<'_>,
    finding: &mut ClaimFinding,
    name: &str,
    pytorch: impl Into<Option<f64>>,
    statement: &str,
    leaks: bool,
) -> ClaimResult<()> {
    let pytorch = pytorch.into();
    let found = slope(bench, finding, name, &[], pytorch)?;
    let is_leak = Measured { here: found.verdict == Verdict::Leak, pytorch: pytorch.map(|growth| growth > 0.0) };
    finding.check(statement, is_leak.map(|is_leak| is_leak == leaks));
    Ok(())
}
