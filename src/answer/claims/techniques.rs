//! Claims about memory-saving techniques: the table that articles print, techniques of one device, techniques of several
//! devices.

use super::{
    ARTICLES, Claim,
    ClaimTest::{AnyDevice, SimulatedOnly},
    FIGURES,
    bench::{
        CACHING, ClaimBench, ClaimResult, EXPANDABLE, MODEL, PytorchRun, SET_TO_NONE_CALLS, VARIABLE_LENGTH_ALLOCATED,
        VARIABLE_LENGTH_RESERVED, ZERO_FILL_CALLS, gpt_355m, model, recipe, resnet_50,
    },
    finding::{
        ClaimAmount::{Count, Percent, Size, Time, Times},
        ClaimFinding, Measured, ratio, reduction,
    },
};
use crate::{
    answer::{
        techniques::LINK_BYTES_PER_SECOND,
        trial::{DISTINCT, exchange_time, exchanged_bytes_per_step},
    },
    base::GIB,
    measure::{Status, lost_share},
    models::Recipe,
};

const SHARDED: &str = "reference-gpt-1.4b";

/// The table that articles print, on a model that was run in PyTorch, too.
pub(super) const TABLE: &[Claim] = &[
    Claim {
        id: "table-batch",
        source: FIGURES,
        statement: "Reducing the batch saves 10-40 % of memory",
        published: "10-40 %, scales with the reduction",
        lesson: "Half the batch takes away half of the activations and nothing of weights, gradients and optimizer states. \
                 Further halving saves more than 40 % where activations are most of the memory. It is half the work, too: \
                 the same samples take as long.",
        command: "oomph techniques --model reference-gpt-406m --technique half_batch",
        test: AnyDevice(|bench, finding| {
            let full = model(MODEL, "")?;
            let half =
                effect(bench, finding, "half the batch", &full.clone().with("batch", "4"), gpt_355m::HALF_BATCH)?;
            let quarter = effect(bench, finding, "a quarter of it", &full.with("batch", "2"), None)?;
            finding.check_range("half the batch saves", half.memory, 10.0..=40.0, " %");
            finding.check_range("a quarter of it saves", quarter.memory, 10.0..=40.0, " %");
            // Half the batch is half the work: only the time per sample says what it costs.
            if let Some(time) = half.time {
                finding.figure("half the batch, time of the same samples", time.map(|ratio| Times(2.0 * ratio)));
            }
            Ok(())
        }),
    },
    Claim {
        id: "table-amp",
        source: FIGURES,
        statement: "Mixed precision saves 25-35 % of memory and is 5-15 % faster",
        published: "about 25-35 %; about 5-15 % faster forward and backward",
        lesson: "The share of activations decides about memory. Matrix products on tensor cores are several times as fast \
                 as in single precision; with TF32 the gain is smaller.",
        command: "oomph techniques --model reference-gpt-406m --model resnet-50 --technique amp --technique tf32",
        test: AnyDevice(|bench, finding| {
            let amp = effect(bench, finding, MODEL, &model(MODEL, "amp")?, gpt_355m::AMP)?;
            finding.check_range("reference-gpt-406m saves", amp.memory, 25.0..=35.0, " %");
            if let Some(time) = amp.time {
                finding.check_range("its step takes", time.map(|ratio| 100.0 * ratio), 85.0..=95.0, " % of the time");
            }
            let images = bench.peak(&model("resnet-50", "")?)?;
            let images_amp = bench.peak(&model("resnet-50", "amp")?)?;
            let saved =
                reduction((images, resnet_50::BASE.peak_allocated), (images_amp, resnet_50::AMP.peak_allocated));
            finding.figure("resnet-50, memory saved", saved.map(Percent));
            finding.check_range("resnet-50 saves", saved, 25.0..=35.0, " %");
            Ok(())
        }),
    },
    Claim {
        id: "table-ckpt",
        source: FIGURES,
        statement: "Checkpointing saves 40-60 % of activation memory and makes an iteration 20-40 % slower",
        published: "40-60 % (of activation memory, deep layers); 20-40 % slower per iteration",
        lesson: "One more forward pass is a third of the arithmetic at most. It saves more of the activations than is \
                 published, and less of all memory: weights, gradients and optimizer states stay.",
        command: "oomph techniques --model reference-gpt-406m --technique ckpt",
        test: AnyDevice(|bench, finding| {
            let ckpt = effect(bench, finding, MODEL, &model(MODEL, "ckpt")?, gpt_355m::CHECKPOINTING)?;
            let saved = activations_saved(bench, finding, MODEL)?;
            finding.check_range("it saves", saved, 40.0..=60.0, " % of activations");
            if let Some(time) = ckpt.time {
                finding.check_range("a step is slower by", time.map(|ratio| 100.0 * (ratio - 1.0)), 20.0..=40.0, " %");
            }
            Ok(())
        }),
    },
    Claim {
        id: "table-accum",
        source: FIGURES,
        statement: "Accumulating gradients saves 0-15 % of memory, indirectly, at a longer time per step",
        published: "0-15 %, indirect; longer wall time per step",
        lesson: "Against the same batch in one piece it saves the activations of all micro-batches but one, which is much.",
        command: "oomph techniques --model reference-gpt-406m --technique accum4",
        test: AnyDevice(|bench, finding| {
            let program = model(MODEL, "accum4")?;
            let accum = effect(bench, finding, "four micro-batches", &program, gpt_355m::ACCUMULATION)?;
            finding.check_range("four micro-batches save", accum.memory, 0.0..=15.0, " %");
            if let Some(time) = accum.time {
                finding.check("a step takes longer", time.map(|ratio| ratio > 1.01));
            }
            Ok(())
        }),
    },
    Claim {
        id: "table-offload",
        source: FIGURES,
        statement: "Offloading to the CPU saves up to 30-50 % of a device's memory and increases latency significantly",
        published: "up to 30-50 % per device; significant latency increase",
        lesson: "Every activation goes over the bus twice, and that takes longer than computing it.",
        command: "oomph techniques --model reference-gpt-406m --technique offload",
        test: AnyDevice(|bench, finding| {
            let program = model(MODEL, "offload")?;
            let offload = effect(bench, finding, "activations offloaded", &program, gpt_355m::OFFLOADING)?;
            finding.check_range("it saves", offload.memory, 30.0..=50.0, " %");
            if let Some(time) = offload.time {
                finding.check("a step takes at least half as long again", time.map(|ratio| ratio >= 1.5));
            }
            Ok(())
        }),
    },
];

/// Techniques of one device.
pub(super) const ONE_DEVICE: &[Claim] = &[
    Claim {
        id: "fp16-30",
        source: FIGURES,
        statement: "Going from 32 to 16 bits cuts memory by about 30 %",
        published: "about 30 %",
        lesson: "Autocast keeps weights, gradients and optimizer states in 32 bits and saves on activations only; a model that \
                 is 16 bits throughout needs half.",
        command: "oomph techniques --model reference-gpt-406m --technique amp --technique bf16_model --technique bf16_master",
        test: AnyDevice(|bench, finding| {
            let base = bench.peak(&model(MODEL, "")?)?;
            for (name, techniques, pytorch) in [
                ("autocast", "amp", Some(gpt_355m::AMP.peak_allocated)),
                ("16-bit model", "bf16_model", None),
                ("16-bit model with 32-bit master weights", "bf16_master", None),
            ] {
                let changed = Measured { here: bench.peak(&model(MODEL, techniques)?)?, pytorch };
                let saved = reduction((base, gpt_355m::BASE.peak_allocated), changed);
                finding.figure(name, saved.map(Percent));
                finding.check_range(&format!("{name} saves"), saved, 25.0..=35.0, " %");
            }
            Ok(())
        }),
    },
    Claim {
        id: "ckpt-act",
        source: FIGURES,
        statement: "Checkpointing cuts activation memory by 40-60 %",
        published: "40-60 % of activations",
        lesson: "More than that, and the more the deeper the model: of the blocks only their inputs are left, and one block at a \
                 time. Activations of the head and the loss stay.",
        command: "oomph replay reference-gpt-406m --set techniques=sgd,ckpt --strategy caching --format json",
        test: AnyDevice(|bench, finding| {
            for name in ["reference-gpt-163m", MODEL, "reference-gpt-1.4b"] {
                let saved = activations_saved(bench, finding, name)?;
                finding.check_range(&format!("{name} saves"), saved, 40.0..=60.0, " % of them");
            }
            Ok(())
        }),
    },
    Claim {
        id: "accum-peak",
        source: "PyTorch forum, thread 180729: accumulation steps are expected to leave memory unchanged",
        statement: "k micro-batches cost no more memory than one of them",
        published: "as one micro-batch",
        lesson: "Gradients of earlier micro-batches are live in the passes of the next one: one set of gradients more than a \
                 micro-batch alone, where they are dropped in between.",
        command: "oomph techniques --model reference-gpt-406m --technique quarter_batch --technique accum4",
        test: AnyDevice(|bench, finding| {
            let full = bench.peak(&model(MODEL, "")?)?;
            let one = bench.peak(&model(MODEL, "")?.with("batch", "2"))?;
            let four = bench.peak(&model(MODEL, "accum4")?)?;
            finding.figure("one micro-batch of 2", Size(one));
            finding.figure("four of them", (Size(four), Size(gpt_355m::ACCUMULATION.peak_allocated)));
            finding.figure("the batch of 8 at once", (Size(full), Size(gpt_355m::BASE.peak_allocated)));
            finding.check("four take at most 2 % more than one", ratio(one, four).here <= 1.02);
            finding.check("four take less than the batch at once", four < full);
            Ok(())
        }),
    },
    Claim {
        id: "headroom",
        source: FIGURES,
        statement: "Fill a GPU to 80-85 %: the rest goes to the allocator and to fragmentation",
        published: "15-20 % of what nvidia-smi shows",
        lesson: "How much a program needs beside its blocks depends on how regular its requests are, and on the allocator: \
                 with expandable segments it is the context and little more.",
        command: "oomph replay variable-length --strategy caching --strategy caching:expandable_segments:True --strategy async",
        test: AnyDevice(|bench, finding| {
            for name in ["reference-gpt-163m", "resnet-50", "variable-length"] {
                for strategy in [CACHING, EXPANDABLE, "async"] {
                    let record = bench.replayed(&recipe(name, &[])?, strategy, None)?.0;
                    let used = record.peak_device_used_bytes.unwrap_or(0);
                    let lost = 100.0 * lost_share(record.peak_allocated_bytes.unwrap_or(0), used).unwrap_or(0.0);
                    finding.figure(format!("{name}, {strategy}"), Percent(lost));
                    finding
                        .check(format!("{name} under {strategy} needs at most 20 % beside its blocks"), lost <= 20.0);
                }
            }
            let truth = 100.0 * lost_share(VARIABLE_LENGTH_ALLOCATED, VARIABLE_LENGTH_RESERVED).unwrap_or(0.0);
            finding.pytorch_figure("recording varlen (other lengths), reserved beyond allocated", Percent(truth));
            Ok(())
        }),
    },
    Claim {
        id: "in-place",
        source: "PyTorch forum, thread 948, and articles: an in-place ReLU saves memory; the figure has no known first source",
        statement: "In-place operations cut peak memory by 5-10 % on convolutional networks",
        published: "5-10 % on CNNs",
        lesson: "What an activation writes over is needed for backward by the layer before it, or was about to be freed: the peak \
                 is elsewhere.",
        command: "oomph replay resnet-50 --set activation=separate --strategy caching",
        test: AnyDevice(|bench, finding| {
            let (base, in_place) = (bench.peak(&model(MODEL, "")?)?, bench.peak(&model(MODEL, "inplace")?)?);
            let saved = reduction((base, gpt_355m::BASE.peak_allocated), (in_place, gpt_355m::IN_PLACE.peak_allocated));
            finding.figure(MODEL, saved.map(Percent));
            let peak = |activation: &str| bench.peak(&model("resnet-50", "")?.with("activation", activation));
            let (separate, in_place) = (peak("separate")?, peak("in_place")?);
            let images = reduction((separate, resnet_50::SEPARATE), (in_place, resnet_50::IN_PLACE));
            finding.figure("resnet-50", images.map(Percent));
            finding.check_range("resnet-50 saves", images, 5.0..=10.0, " %");
            finding.check("reference-gpt-406m saves something", saved.here >= 1.0);
            Ok(())
        }),
    },
    Claim {
        id: "set-to-none",
        source: "PyTorch documentation, torch.optim.Optimizer.zero_grad: a lower memory footprint",
        statement: "zero_grad(set_to_none=True) reduces allocation pressure",
        published: "lower memory, fewer allocations",
        lesson: "The peak is lower, because gradients are not there in the forward pass; but they are allocated anew in every \
                 step.",
        command: "oomph techniques --model reference-gpt-406m --technique zero_fill",
        test: AnyDevice(|bench, finding| {
            let (none, zeros) = (bench.peak(&model(MODEL, "")?)?, bench.peak(&model(MODEL, "zero_fill")?)?);
            let saved = reduction((zeros, gpt_355m::ZERO_FILL.peak_allocated), (none, gpt_355m::BASE.peak_allocated));
            finding.figure("peak lower by", saved.map(Percent));
            let calls = |techniques: &str| {
                let record =
                    bench.memory(&recipe("reference-gpt-163m", &[("steps", "6"), ("techniques", techniques)])?)?;
                ClaimResult::Ok(record.allocs.unwrap_or(0) + record.frees.unwrap_or(0))
            };
            let (of_none, of_zeros) = (calls("")?, calls("zero_fill")?);
            let note = "calls of reference-gpt-163m in six steps";
            finding.figure(format!("{note}, set_to_none"), (Count(of_none), Count(SET_TO_NONE_CALLS)));
            finding.figure(format!("{note}, zeroed"), (Count(of_zeros), Count(ZERO_FILL_CALLS)));
            finding.check("the peak is lower", saved.map(|percent| percent >= 1.0));
            let less_often = (of_none < of_zeros, SET_TO_NONE_CALLS < ZERO_FILL_CALLS);
            finding.check("the allocator is called less often", less_often);
            Ok(())
        }),
    },
    Claim {
        id: "zero-grad-place",
        source: "detectron2, pull request 4905: zero_grad before forward",
        statement: "Where zero_grad is called matters for peak memory",
        published: "before forward, just before backward, or after the step",
        lesson: "All three places are the same where the peak comes later in the backward pass. Never calling it costs a set of \
                 gradients.",
        command: "oomph replay leak-no-zero-grad --set remedy=before_backward --strategy caching",
        test: AnyDevice(|bench, finding| {
            let mut peak = |name: &str, remedy: &str| {
                let peak = bench.peak(&recipe("leak-no-zero-grad", &[("remedy", remedy), ("batch", "8")])?)?;
                finding.figure(name, Size(peak));
                ClaimResult::Ok(peak)
            };
            let after = peak("after the step", "zero_grad")?;
            let before = ratio(after, peak("before forward", "before_forward")?);
            let late = ratio(after, peak("just before backward", "before_backward")?);
            peak("never", "none")?;
            let (late, before) = (late.here >= 1.01, before.here >= 1.01);
            finding.check("just before backward takes at least 1 % more than after the step", late);
            finding.check("before forward takes at least 1 % more than after the step", before);
            Ok(())
        }),
    },
    Claim {
        id: "cudnn-bench",
        source: "PyTorch forum, thread 58768: the first batch takes more with cudnn.benchmark",
        statement: "cuDNN's autotuning raises memory, because it tries several kernels and keeps the choice",
        published: "higher memory, faster steps",
        lesson: "The search needs the largest workspace of all kernels. Which kernels cuDNN tries is not known here: only \
                 PyTorch's own run shows it, and there the peak nearly doubles.",
        command: "oomph replay resnet-50 --set autotune=on --strategy caching",
        test: SimulatedOnly(|_, finding| {
            finding.pytorch_figure("without", Size(resnet_50::IN_PLACE));
            finding.pytorch_figure("with", Size(resnet_50::AUTOTUNED));
            let higher = ratio(resnet_50::IN_PLACE, resnet_50::AUTOTUNED).here >= 1.1;
            finding.pytorch_check("the peak is at least a tenth higher", higher);
            Ok(())
        }),
    },
    Claim {
        id: "safe-defaults",
        source: FIGURES,
        statement: "A modest batch, autocast and empty_cache at phase changes are stable on 8-24 GB in over 70 % of cases",
        published: "over 70 % of cases",
        lesson: "Whether a model fits is a matter of its weights first: 16 bytes for each are there before the first activation. \
                 16 cases are too few to tell 70 % from its neighbours; another choice of models gives another share.",
        command: "oomph threshold reference-gpt-406m --set techniques=amp,empty_cache:phase --set batch=4 --strategy caching",
        test: AnyDevice(|bench, finding| {
            let models = [
                ("reference-gpt-163m", "4"),
                ("reference-gpt-406m", "4"),
                ("reference-gpt-1.4b", "1"),
                ("resnet-50", "32"),
            ];
            let cards = [8, 12, 16, 24];
            let mut survivors = 0;
            for (name, batch) in models {
                let program = model(name, "amp,empty_cache:phase")?.with("batch", batch);
                let mut fits = 0;
                for card in cards {
                    let limit = bench.available_on(card * GIB)?;
                    let status = bench.replayed(&program, CACHING, Some(limit))?.0.status;
                    fits += u64::from(status == Status::Completed);
                }
                finding.figure(format!("{name} at batch {batch}, of four cards suffice"), Count(fits));
                survivors += fits;
            }
            let share = 100.0 * survivors as f64 / (models.len() * cards.len()) as f64;
            let (low, high) = interval_of_share(survivors, (models.len() * cards.len()) as u64);
            finding.figure("of all 16 cases", Percent(share));
            finding.figure("95 % interval of the share, from", Percent(low));
            finding.figure("95 % interval of the share, to", Percent(high));
            finding.check("all of the interval is over 70 %", low > 70.0);
            finding.check("a part of the interval is over 70 %", high > 70.0);
            Ok(())
        }),
    },
    Claim {
        id: "fix-speedup",
        source: FIGURES,
        statement: "Fixing a leak allows a larger batch and more than doubles training speed",
        published: "more than 2x",
        lesson: "The batch grows several times; but a GPU that is busy already gains little by that.",
        command: "oomph threshold leak-outputs --largest batch --card 24GiB; oomph threshold leak-outputs-fixed --largest batch --card 24GiB",
        // The batch is searched on the simulated device, the step is timed on the device of the test.
        test: AnyDevice(|bench, finding| {
            let mut speed = Vec::new();
            for name in ["leak-outputs", "leak-outputs-fixed"] {
                let program = recipe(name, &[("steps", "12")])?;
                let batch = bench.largest_batch(&program, 24 * GIB)?;
                finding.figure(format!("{name}, largest batch for 12 steps in 24 GiB"), Count(batch));
                let step = bench.step(&program.with("batch", &batch.max(1).to_string()))?;
                speed.push(step.map_or(0.0, |step| batch as f64 * 1e9 / step.0.max(1) as f64));
            }
            let gain = speed[1] / speed[0].max(f64::MIN_POSITIVE);
            finding.figure("sequences a second, fixed against leaking", Times(gain));
            finding.check("the fixed program trains more than twice as fast", gain > 2.0);
            Ok(())
        }),
    },
];

/// Techniques of several devices, and offloading.
pub(super) const SEVERAL_DEVICES: &[Claim] = &[
    Claim {
        id: "zero",
        source: "DeepSpeed documentation, ZeRO stages and offloading; the figure has no known first source",
        statement: "Sharding (ZeRO 1, 2, 3), model parallelism and offloading save 30-70 % of memory per GPU",
        published: "30-70 % less per GPU",
        lesson: "Of eight ranks each keeps an eighth of what is sharded: optimizer states are half of all, weights and gradients a \
                 quarter each; activations are only divided by model parallelism.",
        command: "oomph techniques --model reference-gpt-1.4b --technique zero1 --technique zero2 --technique zero3",
        test: AnyDevice(|bench, finding| {
            let base = bench.peak(&model(SHARDED, "")?)?;
            for (name, techniques) in [
                ("ZeRO 1", "zero1:8"),
                ("ZeRO 2", "zero2:8"),
                ("ZeRO 3", "zero3:8"),
                ("tensor parallel", "tensor_parallel:8"),
                ("pipeline", "pipeline:8"),
                ("activations offloaded", "offload"),
            ] {
                let program = model(SHARDED, techniques)?;
                let saved = reduction(base, bench.peak(&program)?);
                finding.figure(format!("{name}, saved"), saved.map(Percent));
                let sent = exchanged_bytes_per_step(&program.workload().map_err(Box::new)?)?;
                if sent > 0 {
                    finding.figure(format!("{name}, sent per step"), Size(sent));
                    let time = exchange_time(sent, LINK_BYTES_PER_SECOND);
                    finding.figure(format!("{name}, that takes (modelled at 450 GB/s)"), Time(time.0));
                }
                finding.check_range(&format!("{name} saves"), saved, 30.0..=70.0, " %");
            }
            Ok(())
        }),
    },
    Claim {
        id: "ddp-copy",
        source: ARTICLES,
        statement: "Data-parallel replicas multiply the footprint per device",
        published: "one copy more for every replica",
        lesson: "Every device has one copy, whatever their number; what comes on top are the buckets that gradients are exchanged \
                 in.",
        command: "oomph techniques --model reference-gpt-406m --technique ddp",
        test: AnyDevice(|bench, finding| {
            let peak = |techniques: &str| bench.peak(&model(MODEL, techniques)?);
            let (base, of_two, of_eight) = (peak("")?, peak("ddp:2")?, peak("ddp:8")?);
            let multiple = ratio(base, of_eight);
            finding.figure("a device of 2", ratio(base, of_two).map(Times));
            finding.figure("a device of 8", multiple.map(Times));
            finding.check("a device of 8 needs at least twice what one alone does", multiple.here >= 2.0);
            finding.check("a device of 8 needs at least 1 % more than one of 2", ratio(of_two, of_eight).here >= 1.01);
            Ok(())
        }),
    },
    Claim {
        id: "offload-8gb",
        source: "DeepSpeed tutorial on ZeRO-Offload: 10 to 13 billion parameters on one GPU; the 8 GB and the latency are from articles",
        statement: "Staged offload keeps a model of over 10 billion parameters below 8 GB per GPU at about twice the latency",
        published: "below 8 GB; about 2x",
        lesson: "Weights that come layer by layer need little memory; but with few tokens per step their transfer over the bus takes \
                 longer than their use.",
        command: "oomph techniques --model reference-gpt-13b --technique offload_params",
        test: SimulatedOnly(|bench, finding| {
            // The program without staging fits on no card: its times come from a simulated one that is large enough.
            let roomy = bench.simulated.with_room_for(512 * GIB);
            let (plain, staged) = (
                model("reference-gpt-13b", "bf16_model,ckpt")?,
                model("reference-gpt-13b", "bf16_model,ckpt,offload_params")?,
            );
            let used = |program: &Recipe| {
                let record = bench.replayed_on(&roomy, program, CACHING, None)?.0;
                ClaimResult::Ok(record.peak_device_used_bytes.unwrap_or(0))
            };
            let used_staged = used(&staged)?;
            finding.figure("13B in 16 bits with checkpoints", Size(used(&plain)?));
            finding.figure("the same, staged from the host", Size(used_staged));
            finding.check("it stays below 8 GB", used_staged < 8_000_000_000);
            if let Some((before, after)) = bench.step_on(&roomy, &plain)?.zip(bench.step_on(&roomy, &staged)?) {
                let slower = ratio(before.0, after.0);
                finding.figure("time of a step", slower.map(Times));
                finding.check("a step takes 1.5 to 2.5 times as long", (1.5..=2.5).contains(&slower.here));
            }
            Ok(())
        }),
    },
    Claim {
        id: "offload-sparse",
        source: ARTICLES,
        statement: "Offloading pays most for layers that are used sporadically (embeddings, experts)",
        published: "sporadically used layers",
        lesson: "What counts is how many bytes move for each that is saved: rows of an embedding are few; staging in all experts \
                 of a layer costs as much as staging in a dense one.",
        command: "oomph replay reference-gpt-moe-560m --set techniques=offload_params --strategy caching",
        test: SimulatedOnly(|bench, finding| {
            let dense = saved_per_time(bench, "reference-gpt-163m", "offload_params", finding)?;
            let embeddings = saved_per_time(bench, "reference-gpt-163m", "offload_component", finding)?;
            let experts = saved_per_time(bench, "reference-gpt-moe-560m", "offload_params", finding)?;
            finding.check("embeddings save more for each ms than dense layers", embeddings > DISTINCT * dense);
            finding.check("experts save more for each ms than dense layers", experts > DISTINCT * dense);
            Ok(())
        }),
    },
];

/// Wilson's interval of a share with 95 % confidence, in percent.
fn interval_of_share(hits: u64, cases: u64) -> (f64, f64) {
    let (cases, share, z) = (cases as f64, hits as f64 / cases as f64, 1.96_f64);
    let center = share + z * z / (2.0 * cases);
    let spread = z * (share * (1.0 - share) / cases + z * z / (4.0 * cases * cases)).sqrt();
    let scale = 100.0 / (1.0 + z * z / cases);
    (scale * (center - spread), scale * (center + spread))
}

/// What a technique changes.
struct TechniqueEffect {
    /// Memory that it saves, in percent.
    memory: Measured<f64>,
    /// How many times the base's time a step takes; nothing where memory runs out.
    time: Option<Measured<f64>>,
}

/// Compares memory and time of a changed program with the base, and a run of it in PyTorch with the base there.
fn effect(
    bench: &ClaimBench<'_>,
    finding: &mut ClaimFinding,
    name: &str,
    changed: &Recipe,
    pytorch: impl Into<Option<PytorchRun>>,
) -> ClaimResult<TechniqueEffect> {
    let (base, pytorch, pytorch_base) = (model(MODEL, "")?, pytorch.into(), gpt_355m::BASE);
    let of_base = (bench.peak(&base)?, pytorch_base.peak_allocated);
    let of_changed = Measured { here: bench.peak(changed)?, pytorch: pytorch.map(|run| run.peak_allocated) };
    let memory = reduction(of_base, of_changed);
    finding.figure(format!("{name}, memory saved"), memory.map(Percent));
    let time = bench.step(&base)?.zip(bench.step(changed)?).map(|(base, changed)| {
        let in_pytorch = pytorch.map(|run| run.step_ms / pytorch_base.step_ms);
        Measured { here: ratio(base.0, changed.0).here, pytorch: in_pytorch }
    });
    if let Some(time) = time {
        finding.figure(format!("{name}, time of a step"), time.map(Times));
    }
    Ok(TechniqueEffect { memory, time })
}

/// The share of activations at the peak that checkpoints save, in percent. Under SGD: AdamW's temporaries can be more than
/// the activations that checkpoints leave, and the peak would be elsewhere.
fn activations_saved(bench: &ClaimBench<'_>, finding: &mut ClaimFinding, name: &str) -> ClaimResult<Measured<f64>> {
    let activations = |techniques: &str| {
        ClaimResult::Ok(bench.memory(&model(name, techniques)?)?.at_peak_activation_bytes.unwrap_or(0))
    };
    let (base, ckpt) = (activations("sgd")?, activations("sgd,ckpt")?);
    let saved = reduction(base, ckpt);
    finding.figure(format!("{name}, activations at the peak"), Size(base));
    finding.figure(format!("{name}, with checkpoints"), Size(ckpt));
    finding.figure(format!("{name}, activations saved"), saved.map(Percent));
    Ok(saved)
}

/// Bytes that offloading saves for every nanosecond that it adds to a step.
fn saved_per_time(
    bench: &ClaimBench<'_>,
    name: &str,
    techniques: &str,
    finding: &mut ClaimFinding,
) -> ClaimResult<f64> {
    let program = |techniques: &str| -> ClaimResult<Recipe> {
        recipe(name, &[("steps", "3"), ("techniques", techniques), ("batch", "4")])
    };
    let (plain, offloaded) = (program("")?, program(techniques)?);
    let saved = bench.peak(&plain)?.saturating_sub(bench.peak(&offloaded)?);
    let added = bench.step(&plain)?.zip(bench.step(&offloaded)?).map_or(0, |(before, after)| after.since(before).0);
    finding.figure(format!("{name}, {techniques}, saved"), Size(saved));
    finding.figure(format!("{name}, {techniques}, added to a step"), Time(added));
    Ok(saved as f64 / added.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_cases_leave_a_wide_interval() {
        let (low, high) = interval_of_share(11, 16);
        assert!((low - 44.4).abs() < 0.1 && (high - 85.8).abs() < 0.1, "{low} {high}");
        let (low, high) = interval_of_share(1100, 1600);
        assert!(low > 66.0 && high < 71.1, "{low} {high}");
    }
}
