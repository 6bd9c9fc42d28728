//! Claims about techniques of several devices, and about offloading.

use super::{
    Claim, Group,
    bench::{Bench, ClaimResult, model, recipe},
    finding::{Amount, Finding, ratio, reduction},
};
use crate::{
    answer::techniques::{LINK_BYTES_PER_SECOND, exchange},
    base::GIB,
    models::Recipe,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "zero",
        group: Group::Techniques,
        statement: "Sharding (ZeRO 1, 2, 3), model parallelism and offloading save 30-70 % of memory per GPU",
        published: "30-70 % less per GPU",
        lesson: "Of eight ranks each keeps an eighth of what is sharded: optimizer states are half of all, weights and gradients a \
                 quarter each; activations are only divided by model parallelism.",
        command: "oomph techniques --model gpt-1.3b --technique zero1 --technique zero2 --technique zero3",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.memory(&model(SHARDED, "")?)?.peak_allocated_bytes;
            for (name, techniques) in [
                ("ZeRO 1", "zero1:8"),
                ("ZeRO 2", "zero2:8"),
                ("ZeRO 3", "zero3:8"),
                ("tensor parallel", "tensor_parallel:8"),
                ("pipeline", "pipeline:8"),
                ("activations offloaded", "offload"),
            ] {
                let program = model(SHARDED, techniques)?;
                let saved = reduction(base, bench.memory(&program)?.peak_allocated_bytes);
                finding.figure(format!("{name}, saved"), Amount::Percent(saved));
                let sent = exchange::bytes_per_step(&program.workload().map_err(Box::new)?)?;
                if sent > 0 {
                    finding.figure(format!("{name}, sent a step"), Amount::Size(sent));
                    let time = exchange::time(sent, LINK_BYTES_PER_SECOND);
                    finding.figure(format!("{name}, that takes (modelled at 450 GB/s)"), Amount::Time(time.0));
                }
                finding.check_range(&format!("{name} saves"), (saved, None), 30.0..=70.0, " %");
            }
            Ok(finding)
        },
    },
    Claim {
        id: "ddp-copy",
        group: Group::Techniques,
        statement: "Data-parallel replicas multiply the footprint per device",
        published: "one copy more for every replica",
        lesson: "Every device has one copy, whatever their number; what comes on top are the buckets that gradients are exchanged \
                 in.",
        command: "oomph techniques --model gpt-355m --technique ddp",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.memory(&model("gpt-355m", "")?)?.peak_allocated_bytes;
            let of_two = bench.memory(&model("gpt-355m", "ddp:2")?)?.peak_allocated_bytes;
            let of_eight = bench.memory(&model("gpt-355m", "ddp:8")?)?.peak_allocated_bytes;
            finding.figure("a device of 2", Amount::Times(ratio(base, of_two)));
            finding.figure("a device of 8", Amount::Times(ratio(base, of_eight)));
            finding.check("a device of 8 needs at least twice what one alone does", ratio(base, of_eight) >= 2.0);
            finding.check("a device of 8 needs at least 1 % more than one of 2", ratio(of_two, of_eight) >= 1.01);
            Ok(finding)
        },
    },
    Claim {
        id: "offload-8gb",
        group: Group::Techniques,
        statement: "Staged offload keeps a model of over 10 billion parameters below 8 GB per GPU at about twice the latency",
        published: "below 8 GB; about 2x",
        lesson: "Weights that come layer by layer need little room; but with few tokens in a step their way over the bus takes \
                 longer than their use.",
        command: "oomph techniques --model gpt-13b --technique offload_params",
        on_gpu: false,
        test: |bench| {
            let mut finding = Finding::default();
            // The program without staging fits on no card: its times come from a simulated one that is large enough.
            let roomy = bench.simulated.with_room_for(512 * GIB);
            let (plain, staged) = ("bf16_model,ckpt", "bf16_model,ckpt,offload_params");
            let used = |techniques: &str| {
                let program = model("gpt-13b", techniques)?;
                ClaimResult::Ok(
                    bench.replayed_on(&roomy, &program, "caching", None)?.0.peak_device_used_bytes.unwrap_or(0),
                )
            };
            let step = |techniques: &str| bench.step_on(&roomy, &model("gpt-13b", techniques)?);
            let (used_plain, used_staged) = (used(plain)?, used(staged)?);
            finding.figure("13B in 16 bits with checkpoints", Amount::Size(used_plain));
            finding.figure("the same, staged from the host", Amount::Size(used_staged));
            finding.check("it stays below 8 GB", used_staged < 8_000_000_000);
            if let Some((before, after)) = step(plain)?.zip(step(staged)?) {
                let slower = ratio(before.0, after.0);
                finding.figure("time of a step", Amount::Times(slower));
                finding.check("a step takes 1.5 to 2.5 times as long", (1.5..=2.5).contains(&slower));
            }
            Ok(finding)
        },
    },
    Claim {
        id: "offload-sparse",
        group: Group::Techniques,
        statement: "Offloading pays most for layers that are used sporadically (embeddings, experts)",
        published: "sporadically used layers",
        lesson: "What counts is how many bytes move for each that is saved: rows of an embedding are few; staging in all experts \
                 of a layer is as dear as staging in a dense one.",
        command: "oomph replay gpt-moe-8x124m --set techniques=offload_params --strategy caching",
        on_gpu: false,
        test: |bench| {
            let mut finding = Finding::default();
            let dense = saved_per_time(bench, "gpt-124m", "offload_params", &mut finding)?;
            let embeddings = saved_per_time(bench, "gpt-124m", "offload_component", &mut finding)?;
            let experts = saved_per_time(bench, "gpt-moe-8x124m", "offload_params", &mut finding)?;
            finding.check("embeddings save more for each ms than dense layers", embeddings > DISTINCT * dense);
            finding.check("experts save more for each ms than dense layers", experts > DISTINCT * dense);
            Ok(finding)
        },
    },
];

const SHARDED: &str = "gpt-1.3b";
/// Simulated times are right to 15 % (`tests/techniques_truth.rs`): what differs by less is not told apart.
const DISTINCT: f64 = 1.15;

/// Bytes that offloading saves for every nanosecond that it adds to a step.
fn saved_per_time(bench: &Bench<'_>, name: &str, techniques: &str, finding: &mut Finding) -> ClaimResult<f64> {
    let program = |techniques: &str| -> ClaimResult<Recipe> {
        recipe(name, &[("steps", "3"), ("techniques", techniques), ("batch", "4")])
    };
    let peak = |program: &Recipe| {
        ClaimResult::Ok(bench.replayed_on(bench.simulated, program, "caching", None)?.0.peak_allocated_bytes)
    };
    let (plain, offloaded) = (program("")?, program(techniques)?);
    let saved = peak(&plain)?.saturating_sub(peak(&offloaded)?);
    let step = |program: &Recipe| bench.step_on(bench.simulated, program);
    let added = step(&plain)?.zip(step(&offloaded)?).map_or(0, |(before, after)| after.since(before).0);
    finding.figure(format!("{name}, {techniques}, saved"), Amount::Size(saved));
    finding.figure(format!("{name}, {techniques}, added to a step"), Amount::Time(added));
    Ok(saved as f64 / added.max(1) as f64)
}
