//! Claims about leaks: what holds on to memory, how that shows, and how to find it.

use super::{
    Claim,
    bench::{CACHING, ClaimBench, ClaimResult, model, pinned_peak, recipe},
    finding::{
        ClaimAmount::{Count, Percent, Size, SizePerStep},
        ClaimFinding, ratio, reduction,
    },
    pytorch::{GARBAGE_PENDING, VALIDATION_NO_GRAD, VALIDATION_WITH_GRAPH, growth},
};
use crate::{
    answer::leaks::{self, GrowthThreshold, Verdict, judge},
    base::GIB,
    measure::Status,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "gc-step",
        statement: "gc.collect in the loop lowers memory",
        published: "lower memory",
        lesson: "It frees reference cycles and nothing else. A loop without cycles gains nothing and pays for the call.",
        command: "oomph replay leak-cycle-collected-fixed --strategy caching; oomph replay gpt-124m --set techniques=gc --strategy caching",
        on_gpu: true,
        test: |bench, finding| {
            let peak = |program| ClaimResult::Ok(bench.memory(&program)?.peak_allocated_bytes);
            let plain = (peak(model("gpt-124m", "")?)?, peak(model("gpt-124m", "gc")?)?);
            let cycles = (peak(recipe("leak-cycle", &[])?)?, peak(recipe("leak-cycle-collected-fixed", &[])?)?);
            finding.figure("without cycles, peak lower by", Size(plain.0.saturating_sub(plain.1)));
            finding.figure("with cycles, peak lower by", Size(cycles.0.saturating_sub(cycles.1)));
            finding.check("a loop without cycles needs less", plain.1 < plain.0);
            finding.check("a loop with cycles needs less", cycles.1 < cycles.0);
            Ok(())
        },
    },
    Claim {
        id: "leak-sign",
        statement: "A leak shows as a steady rise of allocated memory that empty_cache does not bring down",
        published: "steady rise",
        lesson: "empty_cache never changes allocated memory, so a rise of allocated memory is a leak whether it is called or not.",
        command: "oomph leaks leak-outputs --set techniques=empty_cache",
        on_gpu: true,
        test: |bench, finding| {
            let plain = slope(bench, "leak-outputs", &[], finding, None)?;
            let emptied = bench.growth(&recipe("leak-outputs", &[("techniques", "empty_cache")])?, CACHING, None)?.1;
            finding.figure("with empty_cache after every step", SizePerStep(emptied.bytes_per_step));
            finding.check("what is allocated rises", plain.verdict == Verdict::Leak);
            let same = (emptied.bytes_per_step / plain.bytes_per_step - 1.0).abs() < 0.01;
            finding.check("and as fast with empty_cache", same);
            Ok(())
        },
    },
    Claim {
        id: "slow-leak",
        statement: "Leaks in pre-processing raise residency by 15-20 % over 100 epochs",
        published: "15-20 % over 100 epochs",
        lesson: "A single step does not show it; a regression over all steps does.",
        command: "oomph leaks leak-slow",
        on_gpu: true,
        test: |bench, finding| {
            let (observed, found) = bench.growth(&recipe("leak-slow", &[])?, CACHING, None)?;
            let kept = |step: Option<&leaks::StepUse>| step.map_or(0, |step| step.kept_bytes);
            let (first, last) = (kept(observed.judged().first()), kept(observed.judged().last()));
            let grown = -reduction(first, last);
            finding.figure("what is kept grows by", Percent(grown));
            finding.figure("which is", SizePerStep(found.bytes_per_step));
            finding.check("the detector sees it", found.verdict == Verdict::Leak);
            finding.check_range("it raises residency by", (grown, None), 15.0..=20.0, " %");
            Ok(())
        },
    },
    Claim {
        id: "outputs-list",
        statement: "Appending model outputs to a list leaks; detaching them fixes it",
        published: "detach() is the fix",
        lesson: "Detached outputs are still tensors: the graph is freed, but the outputs stay, and so does the leak. Move them to the \
                 host or reduce them at once.",
        command: "oomph leaks --each leak-outputs leak-outputs-detached leak-outputs-cpu leak-outputs-fixed",
        on_gpu: true,
        test: |bench, finding| {
            let graph = slope(bench, "leak-outputs", &[], finding, Some(growth::OUTPUTS))?;
            let detached = slope(bench, "leak-outputs-detached", &[], finding, Some(growth::OUTPUTS_DETACHED))?;
            let on_cpu = slope(bench, "leak-outputs-cpu", &[], finding, Some(growth::OUTPUTS_ON_CPU))?;
            let consumed = slope(bench, "leak-outputs-fixed", &[], finding, None)?;
            finding.check_beside("appending leaks", graph.verdict == Verdict::Leak, growth::OUTPUTS > 0.0);
            let truth = growth::OUTPUTS_DETACHED <= 0.0;
            finding.check_beside("detached it does not", detached.verdict != Verdict::Leak, truth);
            let truth = growth::OUTPUTS_ON_CPU <= 0.0;
            finding.check_beside("moved to the CPU it does not", on_cpu.verdict != Verdict::Leak, truth);
            finding.check("used up at once it does not", consumed.verdict != Verdict::Leak);
            Ok(())
        },
    },
    Claim {
        id: "val-accumulate",
        statement: "Keeping the outputs of validation batches on the GPU leaks step by step",
        published: "growth with every batch",
        lesson: "Without the graph a third of the memory remains: the outputs themselves.",
        command: "oomph leaks --each val-keep-outputs val-keep-no-grad val-keep-outputs-fixed",
        on_gpu: true,
        test: |bench, finding| {
            let truth = Some(growth::VALIDATION_OUTPUTS);
            let graph = slope(bench, "val-keep-outputs", &[], finding, truth)?;
            let truth = Some(growth::VALIDATION_OUTPUTS_NO_GRAD);
            let no_grad = slope(bench, "val-keep-no-grad", &[], finding, truth)?;
            let truth = growth::VALIDATION_OUTPUTS > 0.0;
            finding.check_beside("with a graph it leaks", graph.verdict == Verdict::Leak, truth);
            let truth = growth::VALIDATION_OUTPUTS_NO_GRAD > 0.0;
            finding.check_beside("under no_grad it leaks", no_grad.verdict == Verdict::Leak, truth);
            Ok(())
        },
    },
    Claim {
        id: "no-grad-val",
        statement: "Validation inside no_grad avoids storage for gradients",
        published: "lower memory",
        lesson: "No graph is stored, so the peak is less than half; but a graph that is dropped every time is not a leak.",
        command: "oomph replay val-with-grad --strategy caching; oomph replay val-with-grad-fixed --strategy caching",
        on_gpu: true,
        test: |bench, finding| {
            let graph = bench.memory(&recipe("val-with-grad", &[])?)?.peak_allocated_bytes;
            let none = bench.memory(&recipe("val-with-grad-fixed", &[])?)?.peak_allocated_bytes;
            finding.beside("peak with a graph", Size(graph), Size(VALIDATION_WITH_GRAPH));
            finding.beside("peak without", Size(none), Size(VALIDATION_NO_GRAD));
            let truth = reduction(VALIDATION_WITH_GRAPH, VALIDATION_NO_GRAD) >= 10.0;
            finding.check_beside("the peak is at least a tenth lower", reduction(graph, none) >= 10.0, truth);
            Ok(())
        },
    },
    Claim {
        id: "cycle",
        statement: "Circular references keep tensors until the garbage collector runs (elsewhere: for ever)",
        published: "until collected; elsewhere never freed",
        lesson: "A saw-tooth: the collector counts objects and not bytes, so much memory can wait for it, and an OOM can occur \
                 before it runs. Weak references and broken links need no collector.",
        command: "oomph leaks --each leak-cycle leak-cycle-fixed leak-cycle-broken-fixed leak-cycle-collected-fixed",
        on_gpu: true,
        test: |bench, finding| {
            let (observed, found) = bench.growth(&recipe("leak-cycle", &[])?, CACHING, None)?;
            let allocated = || observed.steps.iter().map(|step| step.allocated_bytes);
            let pending = allocated().max().unwrap_or(0) - allocated().min().unwrap_or(0);
            finding.beside("waiting for the collector at most", Size(pending), Size(GARBAGE_PENDING));
            finding.check_beside("tensors outlive their step", pending > 0, GARBAGE_PENDING > 0);
            finding.check("they are freed when the collector runs", found.saw_tooth && found.collected_bytes > 0);
            finding.check("they are never freed", found.verdict == Verdict::Leak);
            // Room for the loop and not for all the garbage that waits.
            let peak = observed.steps.iter().map(|step| step.peak_allocated_bytes).max().unwrap_or(0);
            let fixed = bench.memory(&recipe("leak-cycle-fixed", &[])?)?.peak_reserved_bytes;
            let died = |name: &str| {
                let record = bench.replayed(&recipe(name, &[])?, CACHING, Some(fixed))?.0;
                ClaimResult::Ok(record.ooms > 0)
            };
            finding.figure("peak with garbage", Size(peak));
            finding.figure("memory of the program without cycles", Size(fixed));
            let count = u64::from(died("leak-cycle")?);
            finding.figure("ends in an OOM there (1: yes)", Count(count));
            Ok(())
        },
    },
    Claim {
        id: "persistent",
        statement: "Long-lived dicts, lists, globals and unbounded caches keep tensors",
        published: "linear growth",
        lesson: "Every entry stays. A limit on the number of entries, or keeping them on the host, fixes it.",
        command: "oomph leaks --each leak-cache leak-cache-fixed leak-cache-cpu-fixed leak-intermediates",
        on_gpu: true,
        test: |bench, finding| {
            let cache = slope(bench, "leak-cache", &[], finding, None)?;
            let bounded = slope(bench, "leak-cache-fixed", &[("steps", "48")], finding, None)?;
            let kept = slope(bench, "leak-intermediates", &[], finding, None)?;
            finding.check("an unbounded cache leaks", cache.verdict == Verdict::Leak);
            finding.check("a bounded one does not", bounded.verdict != Verdict::Leak);
            finding.check("an attribute that gathers tensors leaks", kept.verdict == Verdict::Leak);
            Ok(())
        },
    },
    Claim {
        id: "retain-graph",
        statement: "backward(retain_graph=True) in a loop leaks the graph",
        published: "leaks",
        lesson: "Only if the loss is kept too. When the variable is assigned again, the old graph is freed: one more graph, once.",
        command: "oomph leaks --each leak-retain-graph leak-retain-rebound leak-retain-twice",
        on_gpu: true,
        test: |bench, finding| {
            let kept = slope(bench, "leak-retain-graph", &[], finding, Some(growth::RETAINED_LOSS))?;
            let rebound = slope(bench, "leak-retain-rebound", &[], finding, Some(growth::RETAINED_REBOUND))?;
            let twice = slope(bench, "leak-retain-twice", &[], finding, Some(growth::RETAINED_TWICE))?;
            let truth = growth::RETAINED_LOSS > 0.0;
            finding.check_beside("with the loss kept it leaks", kept.verdict == Verdict::Leak, truth);
            let truth = growth::RETAINED_REBOUND > 0.0;
            finding.check_beside("with the loss bound anew it leaks", rebound.verdict == Verdict::Leak, truth);
            let truth = growth::RETAINED_TWICE > 0.0;
            finding.check_beside("two backward passes on one graph leak", twice.verdict == Verdict::Leak, truth);
            Ok(())
        },
    },
    Claim {
        id: "zero-grad",
        statement: "Forgetting zero_grad makes memory rise step by step",
        published: "rises step by step",
        lesson: "Gradients are accumulated in place: one more set of gradients, once. Memory does not grow, but training is wrong.",
        command: "oomph leaks leak-no-zero-grad",
        on_gpu: true,
        test: |bench, finding| {
            let found = slope(bench, "leak-no-zero-grad", &[], finding, Some(growth::NO_ZERO_GRAD))?;
            let truth = growth::NO_ZERO_GRAD > 0.0;
            finding.check_beside("memory rises step by step", found.verdict == Verdict::Leak, truth);
            Ok(())
        },
    },
    Claim {
        id: "pinned",
        statement: "pin_memory with many workers holds host memory and disturbs the GPU",
        published: "host memory; GPU disturbed",
        lesson: "Host memory grows with the workers; device memory does not. Copies from pinned memory are the fast ones.",
        command: "oomph replay loader-pinned --set workers=16 --strategy caching",
        on_gpu: true,
        test: |bench, finding| {
            let mut held = Vec::new();
            for workers in ["0", "1", "4", "16"] {
                let program = recipe("loader-pinned", &[("workers", workers)])?;
                let pinned = pinned_peak(&program)?;
                held.push((pinned, bench.memory(&program)?.peak_reserved_bytes));
                finding.figure(format!("pinned by {workers} workers"), Size(pinned));
            }
            let pageable = bench.memory(&recipe("loader-pinned-fixed", &[])?)?.peak_reserved_bytes;
            let most = held.iter().map(|(_, reserved)| *reserved).max().unwrap_or(0);
            finding.figure("reserved on the device with pageable batches", Size(pageable));
            finding.figure("with pinned ones, at most", Size(most));
            finding.check("more workers hold more host memory", held.first() < held.last());
            finding.check("the device needs at least 1 % more", ratio(pageable, most) >= 1.01);
            Ok(())
        },
    },
    Claim {
        id: "hidden-data",
        statement: "Duplicated or prefetched batches and cached preprocessing cause OOM at small batch sizes",
        published: "OOM at small batches",
        lesson: "The input pipeline holds device memory that no batch size of the model explains.",
        command: "oomph replay loader-prefetched --strategy caching; oomph replay loader-prefetched-fixed --strategy caching",
        on_gpu: true,
        test: |bench, finding| {
            for name in ["loader-prefetched", "loader-duplicated"] {
                let plain = bench.memory(&recipe(name, &[])?)?;
                let fixed = bench.memory(&recipe(&format!("{name}-fixed"), &[])?)?;
                let more = plain.peak_allocated_bytes.saturating_sub(fixed.peak_allocated_bytes);
                finding.figure(format!("{name}, held by the pipeline"), Size(more));
                let there = bench.replayed(&recipe(name, &[])?, CACHING, Some(fixed.peak_reserved_bytes))?.0;
                finding.check(
                    format!("{name} runs out of memory where the fixed program does not"),
                    there.status == Status::Oom,
                );
            }
            Ok(())
        },
    },
    Claim {
        id: "churn",
        statement: "Many small tensors made and dropped in every iteration show as spikes",
        published: "spikes",
        lesson: "They show as calls: thousands of blocks that are freed within their step. Small tensors that are freed at once hardly \
                 change memory.",
        command: "oomph leaks churn --format csv",
        on_gpu: true,
        test: |bench, finding| {
            let mut transient = Vec::new();
            let mut passing = Vec::new();
            for name in ["churn", "churn-fixed"] {
                let (observed, _) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                finding.figure(format!("{name}, blocks freed within their step"), Count(last.passing_blocks));
                finding.figure(format!("{name}, peak of a step above what it keeps"), Size(last.transient_bytes));
                transient.push(last.transient_bytes);
                passing.push(last.passing_blocks);
            }
            finding.check("a step's peak is at least 1 % higher", ratio(transient[1], transient[0]) >= 1.01);
            finding.check("a step makes at least a tenth more blocks", ratio(passing[1], passing[0]) >= 1.1);
            Ok(())
        },
    },
    Claim {
        id: "batch-first",
        statement: "Reducing the batch hides a leak and does not fix it",
        published: "the OOM comes later",
        lesson: "A smaller batch postpones the OOM; the slope stays the same.",
        command: "oomph leaks leak-cache --set steps=400 --set batch=1 --limit 12GiB",
        on_gpu: true,
        test: |bench, finding| {
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
        },
    },
    Claim {
        id: "profile",
        statement: "A table of memory by operation (top ten) finds the culprit",
        published: "top ten",
        lesson: "What grows is named by the information about its blocks: call site, tag, or at least size.",
        command: "oomph leaks leak-outputs-detached --top 10",
        on_gpu: true,
        test: |bench, finding| {
            for name in ["leak-outputs-detached", "leak-cache", "leak-outputs"] {
                let (_, found) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let top: f64 = found.growers.iter().take(10).map(|grower| grower.bytes_per_step).sum();
                let share = 100.0 * top / found.bytes_per_step.max(1.0);
                finding.figure(format!("{name}, growth that the first ten names explain"), Percent(share));
                finding.check(format!("they explain most of {name}"), share >= 50.0);
            }
            Ok(())
        },
    },
    Claim {
        id: "snapshot",
        statement: "Snapshots over time show what grew",
        published: "two or more snapshots",
        lesson: "Three or more snapshots allow a regression, which tells growth from start-up; two give only a difference.",
        command: "oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle",
        on_gpu: true,
        test: |bench, finding| {
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
        },
    },
];

/// Notes what each step of a program adds.
pub(super) fn slope(
    bench: &ClaimBench<'_>,
    name: &str,
    set: &[(&str, &str)],
    finding: &mut ClaimFinding,
    pytorch: Option<f64>,
) -> ClaimResult<leaks::Finding> {
    let found = bench.growth(&recipe(name, set)?, CACHING, None)?.1;
    let here = SizePerStep(found.bytes_per_step);
    match pytorch {
        Some(truth) => finding.beside(name, here, SizePerStep(truth)),
        None => finding.figure(name, here),
    }
    Ok(found)
}
