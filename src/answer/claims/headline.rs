//! The table of memory-saving techniques that articles print: five rows, on the model that was run in PyTorch too.

use super::{
    Claim, Group,
    bench::{Costs, model},
    finding::{Amount, Finding, ratio, reduction},
    pytorch::{Run, gpt_355m, resnet_50},
};

const MODEL: &str = "gpt-355m";

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "table-batch",
        group: Group::Table,
        statement: "Reducing the batch saves 10-40 % of memory",
        published: "10-40 %, scales with the reduction",
        lesson: "Half the batch takes away half of the activations and nothing of weights, gradients and optimizer states.",
        command: "oomph techniques --model gpt-355m --technique half_batch",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.costs(&model(MODEL, "")?)?;
            let half = bench.costs(&model(MODEL, "")?.with("batch", "4"))?;
            let quarter = bench.costs(&model(MODEL, "")?.with("batch", "2"))?;
            let saved =
                compare(&mut finding, "half the batch", &base, &half, Some((gpt_355m::BASE, gpt_355m::HALF_BATCH)));
            let saved_by_quarter = compare(&mut finding, "a quarter of it", &base, &quarter, None);
            finding.check_range("half the batch saves", saved.memory, 10.0..=40.0, " %");
            finding.check("a quarter of it saves more than half of it", saved_by_quarter.memory > saved.memory);
            Ok(finding)
        },
    },
    Claim {
        id: "table-amp",
        group: Group::Table,
        statement: "Mixed precision saves 25-35 % of memory and is 5-15 % faster",
        published: "about 25-35 %; about 5-15 % faster forward and backward",
        lesson: "The share of activations decides about memory. Matrix products on tensor cores are several times as fast \
                 as in single precision; who uses TF32 already wins less.",
        command: "oomph techniques --model gpt-355m --model resnet-50 --technique amp --technique tf32",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.costs(&model(MODEL, "")?)?;
            let amp = bench.costs(&model(MODEL, "amp")?)?;
            let change = compare(&mut finding, "gpt-355m", &base, &amp, Some((gpt_355m::BASE, gpt_355m::AMP)));
            finding.check_range("gpt-355m saves", change.memory, 25.0..=35.0, " %");
            if let Some(time) = change.time {
                finding.check_range("its step takes", 100.0 * time, 85.0..=95.0, " % of the time");
            }
            let images = bench.memory(&model("resnet-50", "")?)?.peak_allocated_bytes;
            let images_amp = bench.memory(&model("resnet-50", "amp")?)?.peak_allocated_bytes;
            let saved = reduction(images, images_amp);
            let pytorch = reduction(resnet_50::BASE.peak_allocated, resnet_50::AMP.peak_allocated);
            finding.beside("resnet-50, memory saved", Amount::Percent(saved), Amount::Percent(pytorch));
            finding.check_range("resnet-50 saves", saved, 25.0..=35.0, " %");
            Ok(finding)
        },
    },
    Claim {
        id: "table-ckpt",
        group: Group::Table,
        statement: "Checkpointing saves 40-60 % and makes an iteration 20-40 % slower",
        published: "40-60 % (of activation memory, deep layers); 20-40 % slower per iteration",
        lesson: "One more forward pass is a third of the arithmetic at most; what it saves of all memory is as large as the \
                 share of activations. See ckpt-act for activations alone.",
        command: "oomph techniques --model gpt-355m --technique ckpt",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (base, ckpt) = (bench.costs(&model(MODEL, "")?)?, bench.costs(&model(MODEL, "ckpt")?)?);
            let change =
                compare(&mut finding, "gpt-355m", &base, &ckpt, Some((gpt_355m::BASE, gpt_355m::CHECKPOINTING)));
            finding.check_range("it saves", change.memory, 40.0..=60.0, " %");
            if let Some(time) = change.time {
                finding.check_range("a step is slower by", 100.0 * (time - 1.0), 20.0..=40.0, " %");
            }
            Ok(finding)
        },
    },
    Claim {
        id: "table-accum",
        group: Group::Table,
        statement: "Accumulating gradients saves 0-15 % of memory, indirectly, at a longer time per step",
        published: "0-15 %, indirect; longer wall time per step",
        lesson: "Against the same batch in one piece it saves the activations of all micro-batches but one, which is much.",
        command: "oomph techniques --model gpt-355m --technique accum4",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (base, accum) = (bench.costs(&model(MODEL, "")?)?, bench.costs(&model(MODEL, "accum4")?)?);
            let truth = Some((gpt_355m::BASE, gpt_355m::ACCUMULATION));
            let change = compare(&mut finding, "four micro-batches", &base, &accum, truth);
            finding.check_range("four micro-batches save", change.memory, 0.0..=15.0, " %");
            if let Some(time) = change.time {
                finding.check("a step takes longer", time > 1.01);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "table-offload",
        group: Group::Table,
        statement: "Offloading to the CPU saves up to 30-50 % of a device's memory and increases latency significantly",
        published: "up to 30-50 % per device; significant latency increase",
        lesson: "Every activation goes over the bus twice, and that takes longer than computing it.",
        command: "oomph techniques --model gpt-355m --technique offload",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (base, offload) = (bench.costs(&model(MODEL, "")?)?, bench.costs(&model(MODEL, "offload")?)?);
            let truth = Some((gpt_355m::BASE, gpt_355m::OFFLOADING));
            let change = compare(&mut finding, "activations offloaded", &base, &offload, truth);
            finding.check_range("it saves", change.memory, 30.0..=50.0, " %");
            if let Some(time) = change.time {
                finding.check("a step takes at least half as long again", time >= 1.5);
            }
            Ok(finding)
        },
    },
];

/// What a technique changes.
struct Change {
    /// Memory that it saves, in percent.
    memory: f64,
    /// How many times the base's time a step takes.
    time: Option<f64>,
}

/// Notes memory and time of a technique against the base, and the same of PyTorch.
fn compare(finding: &mut Finding, name: &str, base: &Costs, changed: &Costs, pytorch: Option<(Run, Run)>) -> Change {
    let memory = reduction(base.peak_allocated, changed.peak_allocated);
    let time = base.step.zip(changed.step).map(|(base, changed)| ratio(base.0, changed.0));
    let (memory_name, time_name) = (format!("{name}, memory saved"), format!("{name}, time of a step"));
    match pytorch {
        Some((base, run)) => {
            let saved = Amount::Percent(reduction(base.peak_allocated, run.peak_allocated));
            finding.beside(memory_name, Amount::Percent(memory), saved);
            if let Some(time) = time {
                finding.beside(time_name, Amount::Times(time), Amount::Times(run.step_ms / base.step_ms));
            }
        }
        None => {
            finding.figure(memory_name, Amount::Percent(memory));
            if let Some(time) = time {
                finding.figure(time_name, Amount::Times(time));
            }
        }
    }
    Change { memory, time }
}
