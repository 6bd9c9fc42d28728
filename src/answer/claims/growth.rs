//! Claims about what else fills memory, and how to find it.

use super::{
    Claim, Group,
    bench::{CACHING, pinned_peak, recipe},
    finding::{Amount, Finding, ratio},
};
use crate::{
    answer::leaks::{Bar, Verdict, judge},
    base::GIB,
    measure::Status,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "pinned",
        group: Group::Leaks,
        statement: "pin_memory with many workers holds host memory and disturbs the GPU",
        published: "host memory; GPU disturbed",
        lesson: "Host memory grows with the workers. The device's memory does not know of them, and pinned copies are the fast ones.",
        command: "oomph replay loader-pinned --set workers=16 --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let mut held = Vec::new();
            for workers in ["0", "1", "4", "16"] {
                let program = recipe("loader-pinned", &[("workers", workers)])?;
                let pinned = pinned_peak(&program)?;
                held.push((pinned, bench.memory(&program)?.peak_reserved_bytes));
                finding.figure(format!("pinned by {workers} workers"), Amount::Size(pinned));
            }
            let pageable = bench.memory(&recipe("loader-pinned-fixed", &[])?)?.peak_reserved_bytes;
            let most = held.iter().map(|(_, reserved)| *reserved).max().unwrap_or(0);
            finding.figure("reserved on the device with pageable batches", Amount::Size(pageable));
            finding.figure("with pinned ones, at most", Amount::Size(most));
            finding.check("more workers hold more host memory", held.first() < held.last());
            finding.check("the device needs at least 1 % more", ratio(pageable, most) >= 1.01);
            Ok(finding)
        },
    },
    Claim {
        id: "hidden-data",
        group: Group::Leaks,
        statement: "Duplicated or prefetched batches and cached preprocessing cause OOM at small batch sizes",
        published: "OOM at small batches",
        lesson: "The input pipeline holds device memory that no batch size of the model explains.",
        command: "oomph replay loader-prefetched --strategy caching; oomph replay loader-prefetched-fixed --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for name in ["loader-prefetched", "loader-duplicated"] {
                let plain = bench.memory(&recipe(name, &[])?)?;
                let fixed = bench.memory(&recipe(&format!("{name}-fixed"), &[])?)?;
                let more = plain.peak_allocated_bytes.saturating_sub(fixed.peak_allocated_bytes);
                finding.figure(format!("{name}, held by the pipeline"), Amount::Size(more));
                let there = bench.replayed(&recipe(name, &[])?, CACHING, Some(fixed.peak_reserved_bytes))?.0;
                finding
                    .check(format!("{name} runs out of memory where its twin does not"), there.status == Status::Oom);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "churn",
        group: Group::Leaks,
        statement: "Many small tensors made and dropped in every iteration show as spikes",
        published: "spikes",
        lesson: "They show as calls: thousands of blocks that live and die within a step. Small tensors that die at once hardly move \
                 memory.",
        command: "oomph leaks churn --format csv",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let mut transient = Vec::new();
            let mut passing = Vec::new();
            for name in ["churn", "churn-fixed"] {
                let (observed, _) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                finding
                    .figure(format!("{name}, blocks born and dead within a step"), Amount::Count(last.passing_blocks));
                finding
                    .figure(format!("{name}, peak of a step above what it keeps"), Amount::Size(last.transient_bytes));
                transient.push(last.transient_bytes);
                passing.push(last.passing_blocks);
            }
            finding.check("a step's peak is at least 1 % higher", ratio(transient[1], transient[0]) >= 1.01);
            finding.check("a step makes at least a tenth more blocks", ratio(passing[1], passing[0]) >= 1.1);
            Ok(finding)
        },
    },
    Claim {
        id: "batch-first",
        group: Group::Leaks,
        statement: "Reducing the batch hides a leak and does not fix it",
        published: "the OOM comes later",
        lesson: "The end moves, the slope stays.",
        command: "oomph leaks leak-cache --set steps=400 --set batch=1 --limit 12GiB",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let mut ends = Vec::new();
            for batch in ["8", "4"] {
                let program = recipe("leak-cache", &[("steps", "240"), ("batch", batch)])?;
                let (observed, found) = bench.growth(&program, CACHING, Some(14 * GIB))?;
                let end = observed.ran_out_at.unwrap_or(observed.steps.len());
                finding.figure(format!("batch {batch}, 14 GiB are used up in step"), Amount::Count(end as u64));
                finding.figure(format!("batch {batch}, grows by"), Amount::SizePerStep(found.bytes_per_step));
                ends.push((end, found));
            }
            finding.check("with half the batch the end comes later", ends[1].0 > ends[0].0);
            finding.check("with half the batch it still leaks", ends[1].1.verdict == Verdict::Leak);
            let (whole, half) = (ends[0].1.bytes_per_step, ends[1].1.bytes_per_step);
            finding.check("and as fast", (half / whole - 1.0).abs() < 0.01);
            Ok(finding)
        },
    },
    Claim {
        id: "profile",
        group: Group::Leaks,
        statement: "A table of memory by operation (top ten) finds the culprit",
        published: "top ten",
        lesson: "Who grows is named by what the program says about its blocks: call site, tag, or at least size.",
        command: "oomph leaks leak-outputs-detached --top 10",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for name in ["leak-outputs-detached", "leak-cache", "leak-outputs"] {
                let (_, found) = bench.growth(&recipe(name, &[])?, CACHING, None)?;
                let top: f64 = found.growers.iter().take(10).map(|grower| grower.bytes_per_step).sum();
                let share = 100.0 * top / found.bytes_per_step.max(1.0);
                finding.figure(format!("{name}, growth that the first ten names explain"), Amount::Percent(share));
                finding.check(format!("they explain most of {name}"), share >= 50.0);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "snapshot",
        group: Group::Leaks,
        statement: "Snapshots over time show what grew",
        published: "two or more snapshots",
        lesson: "From three on a line can be drawn through them, and growth told from start-up; two are a difference.",
        command: "oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for (name, leaks) in [("leak-outputs-detached", true), ("leak-outputs-fixed", false)] {
                let (observed, whole) = bench.growth(&recipe(name, &[("steps", "12")])?, CACHING, None)?;
                // As if somebody had looked at the end of every third step.
                let mut seen = observed.clone();
                seen.steps = observed.judged().iter().step_by(3).copied().collect();
                (seen.first_judged, seen.end_judged) = (0, seen.steps.len());
                let found = judge(&seen, None, &Bar::default())?;
                finding.figure(
                    format!("{name}, {} snapshots", seen.steps.len()),
                    Amount::SizePerStep(found.bytes_per_step / 3.0),
                );
                finding.figure(format!("{name}, every step"), Amount::SizePerStep(whole.bytes_per_step));
                finding.check(
                    format!("snapshots of {name} show {}", if leaks { "that it grows" } else { "that nothing grows" }),
                    (found.verdict == Verdict::Leak) == leaks,
                );
            }
            Ok(finding)
        },
    },
];
