//! Claims about leaks: who holds on to memory, and how that shows.

use super::{
    Claim, Group,
    bench::{Bench, CACHING, ClaimResult, recipe},
    finding::{Amount, Finding, reduction},
    pytorch::{GARBAGE_PENDING, VALIDATION_NO_GRAD, VALIDATION_WITH_GRAPH, growth},
};
use crate::answer::leaks::{self, Verdict};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "leak-sign",
        group: Group::Leaks,
        statement: "A leak shows as a steady rise of allocated memory that empty_cache does not bring down",
        published: "steady rise",
        lesson: "empty_cache never changes what is allocated; so a rise of allocated memory is one whether it is called or not.",
        command: "oomph leaks leak-outputs --set techniques=empty_cache",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let plain = slope(bench, "leak-outputs", &[], &mut finding, None)?;
            let emptied = bench.growth(&recipe("leak-outputs", &[("techniques", "empty_cache")])?, CACHING, None)?.1;
            finding.figure("with empty_cache after every step", Amount::SizePerStep(emptied.bytes_per_step));
            finding.check("what is allocated rises", plain.verdict == Verdict::Leak);
            let same = (emptied.bytes_per_step / plain.bytes_per_step - 1.0).abs() < 0.01;
            finding.check("and as fast with empty_cache", same);
            Ok(finding)
        },
    },
    Claim {
        id: "slow-leak",
        group: Group::Leaks,
        statement: "Leaks in pre-processing raise residency by 15-20 % over 100 epochs",
        published: "15-20 % over 100 epochs",
        lesson: "No single step shows it; a line through all of them does.",
        command: "oomph leaks leak-slow",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (observed, found) = bench.growth(&recipe("leak-slow", &[])?, CACHING, None)?;
            let kept = |step: Option<&leaks::StepUse>| step.map_or(0, |step| step.kept_bytes);
            let (first, last) = (kept(observed.judged().first()), kept(observed.judged().last()));
            let grown = -reduction(first, last);
            finding.figure("what is kept grows by", Amount::Percent(grown));
            finding.figure("which is", Amount::SizePerStep(found.bytes_per_step));
            finding.check("the detector sees it", found.verdict == Verdict::Leak);
            finding.check_range("it raises residency by", grown, 15.0..=20.0, " %");
            Ok(finding)
        },
    },
    Claim {
        id: "outputs-list",
        group: Group::Leaks,
        statement: "Appending model outputs to a list leaks; detaching them fixes it",
        published: "detach() is the fix",
        lesson: "Detached outputs still are outputs: the graph goes, the tensors stay and the leak with them. Move them to the host \
                 or use them up at once.",
        command: "oomph leaks --each leak-outputs leak-outputs-detached leak-outputs-cpu leak-outputs-fixed",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let graph = slope(bench, "leak-outputs", &[], &mut finding, Some(growth::OUTPUTS))?;
            let detached = slope(bench, "leak-outputs-detached", &[], &mut finding, Some(growth::OUTPUTS_DETACHED))?;
            let on_cpu = slope(bench, "leak-outputs-cpu", &[], &mut finding, Some(growth::OUTPUTS_ON_CPU))?;
            let consumed = slope(bench, "leak-outputs-fixed", &[], &mut finding, None)?;
            finding.check("appending leaks", graph.verdict == Verdict::Leak);
            finding.check("detached it does not", detached.verdict != Verdict::Leak);
            finding.check("moved to the CPU it does not", on_cpu.verdict != Verdict::Leak);
            finding.check("used up at once it does not", consumed.verdict != Verdict::Leak);
            Ok(finding)
        },
    },
    Claim {
        id: "val-accumulate",
        group: Group::Leaks,
        statement: "Keeping the outputs of validation batches on the GPU leaks step by step",
        published: "growth with every batch",
        lesson: "Without a graph a third of it is left: the outputs themselves.",
        command: "oomph leaks --each val-keep-outputs val-keep-no-grad val-keep-outputs-fixed",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let truth = Some(growth::VALIDATION_OUTPUTS);
            let graph = slope(bench, "val-keep-outputs", &[], &mut finding, truth)?;
            let truth = Some(growth::VALIDATION_OUTPUTS_NO_GRAD);
            let no_grad = slope(bench, "val-keep-no-grad", &[], &mut finding, truth)?;
            finding.check("with a graph it leaks", graph.verdict == Verdict::Leak);
            finding.check("under no_grad it leaks", no_grad.verdict == Verdict::Leak);
            Ok(finding)
        },
    },
    Claim {
        id: "no-grad-val",
        group: Group::Leaks,
        statement: "Validation inside no_grad avoids storage for gradients",
        published: "lower memory",
        lesson: "No graph is stored, so the peak is less than half; but a graph that is dropped every time is no leak.",
        command: "oomph replay val-with-grad --strategy caching; oomph replay val-with-grad-fixed --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let graph = bench.memory(&recipe("val-with-grad", &[])?)?.peak_allocated_bytes;
            let none = bench.memory(&recipe("val-with-grad-fixed", &[])?)?.peak_allocated_bytes;
            finding.beside("peak with a graph", Amount::Size(graph), Amount::Size(VALIDATION_WITH_GRAPH));
            finding.beside("peak without", Amount::Size(none), Amount::Size(VALIDATION_NO_GRAD));
            finding.check("the peak is at least a tenth lower", reduction(graph, none) >= 10.0);
            Ok(finding)
        },
    },
    Claim {
        id: "cycle",
        group: Group::Leaks,
        statement: "Circular references keep tensors until the garbage collector runs (elsewhere: for ever)",
        published: "until collected; elsewhere never freed",
        lesson: "A saw-tooth: the collector counts objects and not bytes, so much memory can wait, and an OOM can come while it \
                 does. Weak references and broken links need no collector.",
        command: "oomph leaks --each leak-cycle leak-cycle-fixed leak-cycle-broken-fixed leak-cycle-collected-fixed",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (observed, found) = bench.growth(&recipe("leak-cycle", &[])?, CACHING, None)?;
            let allocated = || observed.steps.iter().map(|step| step.allocated_bytes);
            let pending = allocated().max().unwrap_or(0) - allocated().min().unwrap_or(0);
            finding.beside("waiting for the collector at most", Amount::Size(pending), Amount::Size(GARBAGE_PENDING));
            finding.check("tensors outlive their step", pending > 0);
            finding.check("they are freed when the collector runs", found.saw_tooth && found.collected_bytes > 0);
            finding.check("they are never freed", found.verdict == Verdict::Leak);
            // Room for the loop and not for all the garbage that waits.
            let peak = observed.steps.iter().map(|step| step.peak_allocated_bytes).max().unwrap_or(0);
            let fixed = bench.memory(&recipe("leak-cycle-fixed", &[])?)?.peak_reserved_bytes;
            let died = |name: &str| {
                let record = bench.replayed(&recipe(name, &[])?, CACHING, Some(fixed))?.0;
                ClaimResult::Ok(record.ooms > 0)
            };
            finding.figure("peak with garbage", Amount::Size(peak));
            finding.figure("memory that the twin without cycles needs", Amount::Size(fixed));
            let count = u64::from(died("leak-cycle")?);
            finding.figure("ends in an OOM there (1: yes)", Amount::Count(count));
            Ok(finding)
        },
    },
    Claim {
        id: "persistent",
        group: Group::Leaks,
        statement: "Long-lived dicts, lists, globals and unbounded caches keep tensors",
        published: "linear growth",
        lesson: "Every entry stays; a bound on their number, or keeping them on the host, ends it.",
        command: "oomph leaks --each leak-cache leak-cache-fixed leak-cache-cpu-fixed leak-intermediates",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let cache = slope(bench, "leak-cache", &[], &mut finding, None)?;
            let bounded = slope(bench, "leak-cache-fixed", &[], &mut finding, None)?;
            let kept = slope(bench, "leak-intermediates", &[], &mut finding, None)?;
            finding.check("an unbounded cache leaks", cache.verdict == Verdict::Leak);
            finding.check("a bounded one does not", bounded.verdict != Verdict::Leak);
            finding.check("an attribute that gathers tensors leaks", kept.verdict == Verdict::Leak);
            Ok(finding)
        },
    },
    Claim {
        id: "retain-graph",
        group: Group::Leaks,
        statement: "backward(retain_graph=True) in a loop leaks the graph",
        published: "leaks",
        lesson: "Only if the loss is kept too. A loss that is bound anew takes its graph along: one graph more, once.",
        command: "oomph leaks --each leak-retain-graph leak-retain-rebound leak-retain-twice",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let kept = slope(bench, "leak-retain-graph", &[], &mut finding, Some(growth::RETAINED_LOSS))?;
            let rebound = slope(bench, "leak-retain-rebound", &[], &mut finding, Some(growth::RETAINED_REBOUND))?;
            let twice = slope(bench, "leak-retain-twice", &[], &mut finding, Some(growth::RETAINED_TWICE))?;
            finding.check("with the loss kept it leaks", kept.verdict == Verdict::Leak);
            finding.check("with the loss bound anew it leaks", rebound.verdict == Verdict::Leak);
            finding.check("two backward passes on one graph leak", twice.verdict == Verdict::Leak);
            Ok(finding)
        },
    },
    Claim {
        id: "zero-grad",
        group: Group::Leaks,
        statement: "Forgetting zero_grad makes memory rise step by step",
        published: "rises step by step",
        lesson: "Gradients are added in place: one set more, once. What goes wrong is the training.",
        command: "oomph leaks leak-no-zero-grad",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let found = slope(bench, "leak-no-zero-grad", &[], &mut finding, Some(growth::NO_ZERO_GRAD))?;
            finding.check("memory rises step by step", found.verdict == Verdict::Leak);
            Ok(finding)
        },
    },
];

/// What a step of a program adds, noted.
pub(super) fn slope(
    bench: &Bench<'_>,
    name: &str,
    set: &[(&str, &str)],
    finding: &mut Finding,
    pytorch: Option<f64>,
) -> ClaimResult<leaks::Finding> {
    let found = bench.growth(&recipe(name, set)?, CACHING, None)?.1;
    let here = Amount::SizePerStep(found.bytes_per_step);
    match pytorch {
        Some(truth) => finding.beside(name, here, Amount::SizePerStep(truth)),
        None => finding.figure(name, here),
    }
    Ok(found)
}
