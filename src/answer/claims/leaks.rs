//! Claims about leaks: what holds on to memory, how that shows, and how to find it.

use super::{
    ARTICLES, Claim,
    ClaimTest::AnyDevice,
    bench::{
        CACHING, ClaimBench, ClaimResult, GARBAGE_PENDING, VALIDATION_NO_GRAD, VALIDATION_WITH_GRAPH, growth, model,
        recipe,
    },
    finding::{
        ClaimAmount::{Count, Size, SizePerStep, Times},
        ClaimFinding, Measured, ratio, reduction,
    },
};
use crate::{
    answer::{
        leaks::{self, Verdict},
        trial::DISTINCT,
    },
    trace,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "gc-step",
        source: ARTICLES,
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
        id: "outputs-list",
        source: "PyTorch documentation, FAQ on history that accumulates: detach the variable",
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
        source: ARTICLES,
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
        source: "PyTorch documentation, torch.no_grad: less memory",
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
        source: "PyTorch blog, Understanding GPU Memory 2: reference cycles",
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
        id: "retain-graph",
        source: ARTICLES,
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
        source: ARTICLES,
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
        source: ARTICLES,
        statement: "pin_memory with many workers holds host memory and disturbs the GPU",
        published: "host memory; GPU disturbed",
        lesson: "Host memory grows with the workers; the device needs no more memory, and a step takes no longer. Copies from \
                 pinned memory are the fast ones.",
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
            let step = |workers: &str| bench.step(&recipe("loader-pinned", &[("workers", workers)])?);
            if let Some((one, many)) = step("1")?.zip(step("16")?) {
                let longer = ratio(one.0, many.0);
                finding.figure("a step with 16 workers, against one", longer.map(Times));
                finding.check("a step with 16 workers takes longer than with one", longer.here >= DISTINCT);
            }
            Ok(())
        }),
    },
    Claim {
        id: "churn",
        source: ARTICLES,
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
