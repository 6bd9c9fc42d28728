//! Claims about techniques of one device.

use super::{
    Claim, Group,
    bench::{CACHING, ClaimResult, EXPANDABLE, model, recipe},
    finding::{Amount, Finding, ratio, reduction},
    pytorch::{
        SET_TO_NONE_ACTIONS, VARIABLE_LENGTH_ALLOCATED, VARIABLE_LENGTH_RESERVED, ZERO_FILL_ACTIONS, gpt_355m,
        resnet_50,
    },
};
use crate::{
    base::GIB,
    measure::{Status, lost_share},
};

const MODEL: &str = "gpt-355m";

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "fp16-30",
        group: Group::Techniques,
        statement: "Going from 32 to 16 bits cuts memory by about 30 %",
        published: "about 30 %",
        lesson: "Autocast keeps weights, gradients and optimizer states in 32 bits and saves on activations only; a model that \
                 is 16 bits throughout needs half.",
        command: "oomph techniques --model gpt-355m --technique amp --technique bf16_model --technique bf16_master",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.memory(&model(MODEL, "")?)?.peak_allocated_bytes;
            let truth = reduction(gpt_355m::BASE.peak_allocated, gpt_355m::AMP.peak_allocated);
            for (name, techniques, pytorch) in [
                ("autocast", "amp", Some(truth)),
                ("16-bit model", "bf16_model", None),
                ("16-bit model with 32-bit master weights", "bf16_model,master_weights", None),
            ] {
                let saved = reduction(base, bench.memory(&model(MODEL, techniques)?)?.peak_allocated_bytes);
                match pytorch {
                    Some(truth) => finding.beside(name, Amount::Percent(saved), Amount::Percent(truth)),
                    None => finding.figure(name, Amount::Percent(saved)),
                }
                finding.check_range(&format!("{name} saves"), (saved, pytorch), 25.0..=35.0, " %");
            }
            Ok(finding)
        },
    },
    Claim {
        id: "ckpt-act",
        group: Group::Techniques,
        statement: "Checkpointing cuts activation memory by 40-60 %",
        published: "40-60 % of activations",
        lesson: "More than that, and the more the deeper the model: of the blocks only their inputs are left, and one block at a \
                 time. Activations of the head and the loss stay.",
        command: "oomph replay gpt-355m --set techniques=sgd,ckpt --strategy caching --format json",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for name in ["gpt-124m", MODEL, "gpt-1.3b"] {
                // AdamW's temporaries can be more than the activations that checkpoints leave: the peak would be elsewhere.
                let base = bench.memory(&model(name, "sgd")?)?.at_peak_activation_bytes;
                let ckpt = bench.memory(&model(name, "sgd,ckpt")?)?.at_peak_activation_bytes;
                let saved = reduction(base, ckpt);
                finding.figure(format!("{name}, activations at the peak"), Amount::Size(base));
                finding.figure(format!("{name}, with checkpoints"), Amount::Size(ckpt));
                finding.figure(format!("{name}, saved"), Amount::Percent(saved));
                finding.check_range(&format!("{name} saves"), (saved, None), 40.0..=60.0, " % of them");
            }
            Ok(finding)
        },
    },
    Claim {
        id: "accum-peak",
        group: Group::Techniques,
        statement: "k micro-batches cost no more memory than one of them",
        published: "as one micro-batch",
        lesson: "Gradients of earlier micro-batches are alive in the next one's passes: one set of gradients more than a \
                 micro-batch alone, where they are dropped in between.",
        command: "oomph techniques --model gpt-355m --technique quarter_batch --technique accum4",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let full = bench.memory(&model(MODEL, "")?)?.peak_allocated_bytes;
            let one = bench.memory(&model(MODEL, "")?.with("batch", "2"))?.peak_allocated_bytes;
            let four = bench.memory(&model(MODEL, "accum4")?)?.peak_allocated_bytes;
            finding.figure("one micro-batch of 2", Amount::Size(one));
            finding.beside("four of them", Amount::Size(four), Amount::Size(gpt_355m::ACCUMULATION.peak_allocated));
            finding.beside("the batch of 8 at once", Amount::Size(full), Amount::Size(gpt_355m::BASE.peak_allocated));
            finding.check("four take at most 2 % more than one", ratio(one, four) <= 1.02);
            finding.check("four take less than the batch at once", four < full);
            Ok(finding)
        },
    },
    Claim {
        id: "headroom",
        group: Group::Techniques,
        statement: "Fill a GPU to 80-85 %: the rest goes to the allocator and to fragmentation",
        published: "15-20 % of what nvidia-smi shows",
        lesson: "How much a program needs beside its blocks depends on how regular its requests are, and on the allocator: \
                 with expandable segments it is the context and little more.",
        command: "oomph replay variable-length --strategy caching --strategy caching:expandable_segments:True --strategy async",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for name in ["gpt-124m", "resnet-50", "variable-length"] {
                for strategy in [CACHING, EXPANDABLE, "async"] {
                    let record = bench.replayed(&recipe(name, &[])?, strategy, None)?.0;
                    let used = record.peak_device_used_bytes.unwrap_or(0);
                    let lost = 100.0 * lost_share(record.peak_allocated_bytes, used).unwrap_or(0.0);
                    finding.figure(format!("{name}, {strategy}"), Amount::Percent(lost));
                    finding
                        .check(format!("{name} under {strategy} needs at most 20 % beside its blocks"), lost <= 20.0);
                }
            }
            let truth = 100.0 * lost_share(VARIABLE_LENGTH_ALLOCATED, VARIABLE_LENGTH_RESERVED).unwrap_or(0.0);
            let here = bench.memory(&recipe("variable-length", &[])?)?;
            let gap = 100.0 * here.peak_gap_share.unwrap_or(0.0);
            finding.beside("variable-length, reserved beyond allocated", Amount::Percent(gap), Amount::Percent(truth));
            Ok(finding)
        },
    },
    Claim {
        id: "in-place",
        group: Group::Techniques,
        statement: "In-place operations cut peak memory by 5-10 % on convolutional networks",
        published: "5-10 % on CNNs",
        lesson: "What an activation writes over is needed for backward by the layer before it, or was about to be freed: the peak \
                 is elsewhere.",
        command: "oomph replay resnet-50 --set activation=separate --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.memory(&model(MODEL, "")?)?.peak_allocated_bytes;
            let saved = reduction(base, bench.memory(&model(MODEL, "inplace")?)?.peak_allocated_bytes);
            let truth = reduction(gpt_355m::BASE.peak_allocated, gpt_355m::IN_PLACE.peak_allocated);
            finding.beside(MODEL, Amount::Percent(saved), Amount::Percent(truth));
            let peak = |activation: &str| {
                ClaimResult::Ok(
                    bench.memory(&model("resnet-50", "")?.with("activation", activation))?.peak_allocated_bytes,
                )
            };
            let images = reduction(peak("separate")?, peak("in_place")?);
            let truth = reduction(resnet_50::SEPARATE, resnet_50::IN_PLACE);
            finding.beside("resnet-50", Amount::Percent(images), Amount::Percent(truth));
            finding.check_range("resnet-50 saves", (images, Some(truth)), 5.0..=10.0, " %");
            finding.check("gpt-355m saves something", saved >= 1.0);
            Ok(finding)
        },
    },
    Claim {
        id: "copies",
        group: Group::Techniques,
        statement: "`x = x + y` makes a temporary that `x.add_(y)` does not",
        published: "one tensor more at the peak",
        lesson: "The new tensor is there before the old one goes: one tensor more at the peak, none afterwards.",
        command: "oomph replay add-copies --strategy caching; oomph replay add-in-place --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let copies = bench.memory(&recipe("add-copies", &[])?)?;
            let in_place = bench.memory(&recipe("add-in-place", &[])?)?;
            let more = copies.peak_allocated_bytes.saturating_sub(in_place.peak_allocated_bytes);
            let kept = copies.final_allocated_bytes.saturating_sub(in_place.final_allocated_bytes);
            finding.figure("x = x + y, peak", Amount::Size(copies.peak_allocated_bytes));
            finding.figure("x.add_(y), peak", Amount::Size(in_place.peak_allocated_bytes));
            finding.check("the peak is higher by a whole tensor of 512 MiB", more >= 511 << 20);
            finding.check("nothing of it stays", kept == 0);
            Ok(finding)
        },
    },
    Claim {
        id: "set-to-none",
        group: Group::Techniques,
        statement: "zero_grad(set_to_none=True) reduces allocation pressure",
        published: "lower memory, fewer allocations",
        lesson: "The peak is lower, because gradients are not there in the forward pass; but they are allocated anew in every \
                 step.",
        command: "oomph techniques --model gpt-355m --technique zero_fill",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (none, zeros) = (bench.memory(&model(MODEL, "")?)?, bench.memory(&model(MODEL, "zero_fill")?)?);
            let saved = reduction(zeros.peak_allocated_bytes, none.peak_allocated_bytes);
            let truth = reduction(gpt_355m::ZERO_FILL.peak_allocated, gpt_355m::BASE.peak_allocated);
            finding.beside("peak lower by", Amount::Percent(saved), Amount::Percent(truth));
            let calls = |techniques: &str| {
                let six = recipe("gpt-124m", &[("steps", "6"), ("techniques", techniques)])?;
                let record = bench.memory(&six)?;
                ClaimResult::Ok(record.allocs + record.frees)
            };
            let (of_none, of_zeros) = (calls("")?, calls("zero_fill")?);
            let note = "calls of gpt-124m in six steps";
            finding.beside(format!("{note}, set_to_none"), Amount::Count(of_none), Amount::Count(SET_TO_NONE_ACTIONS));
            finding.beside(format!("{note}, zeroed"), Amount::Count(of_zeros), Amount::Count(ZERO_FILL_ACTIONS));
            finding.check_beside("the peak is lower", saved >= 1.0, truth >= 1.0);
            let less_often = SET_TO_NONE_ACTIONS < ZERO_FILL_ACTIONS;
            finding.check_beside("the allocator is called less often", of_none < of_zeros, less_often);
            Ok(finding)
        },
    },
    Claim {
        id: "zero-grad-place",
        group: Group::Techniques,
        statement: "Where zero_grad is called matters for peak memory",
        published: "before forward, just before backward, or after the step",
        lesson: "All three places are the same where the peak comes later in the backward pass. Never calling it costs a set of \
                 gradients.",
        command: "oomph replay leak-no-zero-grad --set remedy=before_backward --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let peak = |remedy: &str| {
                let program = recipe("leak-no-zero-grad", &[("remedy", remedy), ("batch", "8")])?;
                ClaimResult::Ok(bench.memory(&program)?.peak_allocated_bytes)
            };
            let (after, before) = (peak("zero_grad")?, peak("before_forward")?);
            let (late, never) = (peak("before_backward")?, peak("none")?);
            finding.figure("after the step", Amount::Size(after));
            finding.figure("before forward", Amount::Size(before));
            finding.figure("just before backward", Amount::Size(late));
            finding.figure("never", Amount::Size(never));
            finding
                .check("just before backward takes at least 1 % more than after the step", ratio(after, late) >= 1.01);
            finding.check("before forward takes at least 1 % more than after the step", ratio(after, before) >= 1.01);
            Ok(finding)
        },
    },
    Claim {
        id: "cudnn-bench",
        group: Group::Techniques,
        statement: "cuDNN's autotuning raises memory, because it tries several kernels and keeps the choice",
        published: "higher memory, faster steps",
        lesson: "Trying needs the workspace of the hungriest kernel. Which kernels cuDNN tries is not known here, so that the \
                 simulated peak is too low: PyTorch's doubles.",
        command: "oomph replay resnet-50 --set autotune=on --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let plain = bench.memory(&model("resnet-50", "")?)?.peak_allocated_bytes;
            let tuned = bench.memory(&model("resnet-50", "")?.with("autotune", "on"))?.peak_allocated_bytes;
            finding.beside("without", Amount::Size(plain), Amount::Size(resnet_50::IN_PLACE));
            finding.beside("with", Amount::Size(tuned), Amount::Size(resnet_50::AUTOTUNED));
            let truth = ratio(resnet_50::IN_PLACE, resnet_50::AUTOTUNED);
            finding.check_beside("the peak is at least a tenth higher", ratio(plain, tuned) >= 1.1, truth >= 1.1);
            Ok(finding)
        },
    },
    Claim {
        id: "safe-defaults",
        group: Group::Techniques,
        statement: "A modest batch, autocast and empty_cache at phase changes are stable on 8-24 GB in over 70 % of cases",
        published: "over 70 % of cases",
        lesson: "Whether a model fits is a matter of its weights first: 16 bytes for each are there before the first activation. \
                 Of 16 cases one decides here; another choice of models gives another share.",
        command: "oomph threshold gpt-355m --set techniques=amp,empty_cache:phase --set batch=4 --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let models = [("gpt-124m", "4"), ("gpt-355m", "4"), ("gpt-1.3b", "1"), ("resnet-50", "32")];
            let cards = [8, 12, 16, 24];
            let mut survivors = 0;
            for (name, batch) in models {
                let program = model(name, "amp,empty_cache:phase")?.with("batch", batch);
                let mut fits = 0;
                for card in cards {
                    let limit = bench.room_in(card * GIB)?;
                    let status = bench.replayed(&program, CACHING, Some(limit))?.0.status;
                    fits += u64::from(status == Status::Completed);
                }
                finding.figure(format!("{name} at batch {batch}, of four cards suffice"), Amount::Count(fits));
                survivors += fits;
            }
            let share = 100.0 * survivors as f64 / (models.len() * cards.len()) as f64;
            finding.figure("of all 16 cases", Amount::Percent(share));
            finding.check("over 70 % of all cases survive", share > 70.0);
            Ok(finding)
        },
    },
    Claim {
        id: "fix-speedup",
        group: Group::Techniques,
        statement: "Fixing a leak allows a larger batch and more than doubles training speed",
        published: "more than 2x",
        lesson: "The batch grows several times; but a GPU that is busy already gains little by that.",
        command: "oomph threshold leak-outputs --largest batch --memory 24GiB; oomph threshold leak-outputs-fixed --largest batch --memory 24GiB",
        on_gpu: false,
        test: |bench| {
            let mut finding = Finding::default();
            let mut speed = Vec::new();
            for name in ["leak-outputs", "leak-outputs-fixed"] {
                let program = recipe(name, &[("steps", "12")])?;
                let batch = bench.largest_batch(&program, 24 * GIB)?;
                finding.figure(format!("{name}, largest batch for 12 steps in 24 GiB"), Amount::Count(batch));
                let step = bench.step_on(bench.simulated, &program.with("batch", &batch.max(1).to_string()))?;
                speed.push(step.map_or(0.0, |step| batch as f64 * 1e9 / step.0.max(1) as f64));
            }
            let gain = speed[1] / speed[0].max(f64::MIN_POSITIVE);
            finding.figure("sequences a second, fixed against leaking", Amount::Times(gain));
            finding.check("the fixed program trains more than twice as fast", gain > 2.0);
            Ok(finding)
        },
    },
];
