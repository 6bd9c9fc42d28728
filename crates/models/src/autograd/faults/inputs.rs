//! Faults around the inputs: caches without a bound, loaders, many small tensors, and loading a model twice.

use std::collections::VecDeque;

use super::{FaultProgram, FaultSettings, TrainingFault, keep_forever};
use crate::autograd::{graph::Tensor, trainer::Trainer};
use oomph_base::Work;
use oomph_trace::{Category, MarkKind};

/// Batches that every worker has ready, as in PyTorch's DataLoader (`prefetch_factor`).
const READY_PER_WORKER: u32 = 2;
/// Sizes of the small tensors of `churn`.
const CHURN_BYTES: (u64, u64) = (4, 64 << 10);

/// A global dictionary of the features of every batch, on the device.
pub(crate) const CACHE: TrainingFault = TrainingFault {
    name: "cache",
    programs: &[
        ("none", |settings| cached_features(settings, usize::MAX)),
        ("bounded", |settings| cached_features(settings, settings.entries as usize)),
        ("cpu", |settings| {
            let bytes = settings.kept_bytes;
            FaultProgram::training(move |trainer, _, batch| {
                let features = trainer.derive(batch.input, bytes, Category::Input);
                trainer.move_to_host(features);
            })
        }),
    ],
};

fn cached_features(settings: &FaultSettings, most: usize) -> FaultProgram {
    let (bytes, mut features) = (settings.kept_bytes, VecDeque::new());
    FaultProgram::training(move |trainer, _, batch| {
        features.push_back(trainer.derive(batch.input, bytes, Category::Input));
        if features.len() > most
            && let Some(oldest) = features.pop_front()
        {
            trainer.machine.release(oldest);
        }
    })
}

/// Preprocessing leaves a tensor behind once per epoch: too little to see from step to step.
pub(crate) const SLOW_LEAK: TrainingFault = TrainingFault {
    name: "slow_leak",
    programs: &[
        ("none", |settings| preprocessing(settings, |_, statistics| keep_forever(statistics))),
        ("release", |settings| preprocessing(settings, |trainer, statistics| trainer.machine.release(statistics))),
    ],
};

fn preprocessing(settings: &FaultSettings, after_use: fn(&mut Trainer, Tensor)) -> FaultProgram {
    let FaultSettings { kept_bytes, epoch_steps, .. } = *settings;
    FaultProgram::new(move |trainer, step| {
        if step.step.is_multiple_of(epoch_steps) {
            trainer.mark(MarkKind::Phase, "epoch", step.step / epoch_steps);
            let statistics = trainer.machine.copy_in(kept_bytes, Category::Input);
            after_use(trainer, statistics);
        }
        trainer.train(step, |_, _| {});
    })
}

/// `pin_memory=True` with many workers: host memory that cannot be swapped out, and no device memory.
pub(crate) const PINNED_LOADER: TrainingFault = TrainingFault {
    name: "pinned_loader",
    programs: &[
        // Workers keep pinned buffers filled; without workers the program pins each batch itself.
        ("none", |settings| {
            let (bytes, mut ready) = (settings.input_bytes, VecDeque::new());
            let most = (settings.workers * READY_PER_WORKER).max(1) as usize;
            FaultProgram::new(move |trainer, step| {
                trainer.mark(MarkKind::Phase, "input", step.step);
                while ready.len() < most {
                    ready.push_back(trainer.machine.take_host_buffer(bytes));
                }
                let Some(buffer) = ready.pop_front() else { return };
                let input = trainer.machine.alloc(bytes, Category::Input);
                trainer.machine.work(Work::CopyIn { bytes, pinned: true }, [input]);
                trainer.train(step, |_, _| {});
                trainer.machine.release(input);
                trainer.machine.return_host_buffer(buffer, bytes);
            })
        }),
        ("pageable", input_on_demand),
    ],
};

/// Batches are copied to the device ahead of their steps.
pub(crate) const PREFETCHED_BATCHES: TrainingFault = TrainingFault {
    name: "prefetched_batches",
    programs: &[
        ("none", |settings| {
            let FaultSettings { input_bytes, batches, .. } = *settings;
            let mut ready = VecDeque::new();
            FaultProgram::new(move |trainer, step| {
                trainer.mark(MarkKind::Phase, "input", step.step);
                // The batch of this step, and those of the steps to come.
                while ready.len() <= batches as usize {
                    ready.push_back(trainer.machine.copy_in(input_bytes, Category::Input));
                }
                trainer.train(step, |_, _| {});
                if let Some(used) = ready.pop_front() {
                    trainer.machine.release(used);
                }
            })
        }),
        ("on_demand", input_on_demand),
    ],
};

/// Every transformation of a batch makes a copy, and all of them are live until the next batch.
pub(crate) const DUPLICATED_BATCHES: TrainingFault = TrainingFault {
    name: "duplicated_batches",
    programs: &[
        ("none", |settings| {
            let FaultSettings { input_bytes, batches, .. } = *settings;
            let mut held = Vec::new();
            FaultProgram::new(move |trainer, step| {
                trainer.mark(MarkKind::Phase, "input", step.step);
                let mut latest = trainer.machine.copy_in(input_bytes, Category::Input);
                let mut copies = vec![latest];
                for _ in 0..batches {
                    latest = trainer.derive(latest, input_bytes, Category::Input);
                    copies.push(latest);
                }
                for before in std::mem::replace(&mut held, copies) {
                    trainer.machine.release(before);
                }
                trainer.train(step, |_, _| {});
            })
        }),
        ("one_copy", input_on_demand),
    ],
};

/// One batch at a time: the old one is released when the new one is there.
fn input_on_demand(settings: &FaultSettings) -> FaultProgram {
    let (bytes, mut held) = (settings.input_bytes, None);
    FaultProgram::new(move |trainer, step| {
        trainer.mark(MarkKind::Phase, "input", step.step);
        let input = trainer.machine.copy_in(bytes, Category::Input);
        trainer.rebind(&mut held, input);
        trainer.train(step, |_, _| {});
    })
}

/// A metric that is computed number by number on the device: many small tensors in every step, and none stays.
pub(crate) const CHURN: TrainingFault = TrainingFault {
    name: "churn",
    programs: &[("none", |settings| metrics(settings, false)), ("batched", |settings| metrics(settings, true))],
};

fn metrics(settings: &FaultSettings, in_one_tensor: bool) -> FaultProgram {
    let count = settings.tensors;
    FaultProgram::new(move |trainer, step| {
        let sizes = (0..count).map(|_| step.random.between(CHURN_BYTES.0, CHURN_BYTES.1));
        let sizes: Vec<u64> = if in_one_tensor { vec![sizes.sum()] } else { sizes.collect() };
        trainer.mark(MarkKind::Phase, "metrics", step.step);
        let made: Vec<Tensor> = sizes
            .into_iter()
            .map(|bytes| {
                let tensor = trainer.machine.temporary(bytes);
                trainer.machine.elementwise(bytes, [tensor]);
                tensor
            })
            .collect();
        made.into_iter().for_each(|tensor| trainer.machine.release(tensor));
        trainer.train(step, |_, _| {});
    })
}

/// `state = torch.load(file, map_location="cuda")`: the weights are on the device twice, in the file's dictionary and in
/// the model, as long as the dictionary has a name.
pub(crate) const LOADED_TWICE: TrainingFault = TrainingFault {
    name: "loaded_twice",
    programs: &[
        ("none", |_| FaultProgram { load: |trainer| keep_forever(load_dictionary(trainer)), ..FaultProgram::plain() }),
        ("del", |_| FaultProgram {
            load: |trainer| {
                let dictionary = load_dictionary(trainer);
                dictionary.into_iter().for_each(|copy| trainer.machine.release(copy));
            },
            ..FaultProgram::plain()
        }),
        ("cpu", |_| FaultProgram::plain()),
    ],
};

/// Loads the model from a dictionary on the device.
fn load_dictionary(trainer: &mut Trainer) -> Vec<Tensor> {
    trainer.machine.load();
    trainer.mark(MarkKind::Phase, "load_state", 0);
    let mut dictionary = Vec::new();
    let machine = &mut trainer.machine;
    for weight in 0..machine.weights.len() {
        if let Some(tensor) = machine.weights[weight].resident() {
            machine.layer = machine.weights[weight].layer;
            let bytes = machine.bytes(tensor);
            let copy = machine.copy_in(bytes, Category::Parameter);
            machine.elementwise(2 * bytes, [copy, tensor]);
            dictionary.push(copy);
        }
    }
    machine.layer = None;
    dictionary
}
