//! What outlives its use: caches without a bound, and a little that preprocessing forgets.

use std::collections::VecDeque;

use super::{
    super::{machine::Tensor, trainer::Trainer},
    Fault, Program, Settings, Turn,
};
use oomph_trace::{Category, MarkKind};

/// A global dictionary of the features of every batch, on the device.
pub(super) const CACHE: Fault = Fault {
    name: "cache",
    programs: &[
        ("none", |settings| Box::new(Cache::new(settings, Bound::Endless))),
        ("bounded", |settings| Box::new(Cache::new(settings, Bound::Entries(settings.entries)))),
        ("cpu", |settings| Box::new(Cache::new(settings, Bound::OnHost))),
    ],
};

/// Preprocessing leaves a tensor behind once an epoch: too little to see from step to step.
pub(super) const SLOW_LEAK: Fault = Fault {
    name: "slow_leak",
    programs: &[
        ("none", |settings| Box::new(Preprocessing::new(settings, true))),
        ("release", |settings| Box::new(Preprocessing::new(settings, false))),
    ],
};

/// How many features stay on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    Endless,
    Entries(u32),
    OnHost,
}

struct Cache {
    bytes: u64,
    bound: Bound,
    features: VecDeque<Tensor>,
}

impl Cache {
    fn new(settings: &Settings, bound: Bound) -> Cache {
        Cache { bytes: settings.kept_bytes, bound, features: VecDeque::new() }
    }
}

impl Program for Cache {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, batch| {
            let features = trainer.derive(batch, self.bytes, Category::Input);
            if self.bound == Bound::OnHost {
                trainer.take_to_host(features);
                return;
            }
            self.features.push_back(features);
            if let Bound::Entries(most) = self.bound
                && self.features.len() > most as usize
                && let Some(oldest) = self.features.pop_front()
            {
                trainer.release(oldest);
            }
        });
    }
}

struct Preprocessing {
    bytes: u64,
    epoch_steps: u32,
    forgets: bool,
    forgotten: Vec<Tensor>,
}

impl Preprocessing {
    fn new(settings: &Settings, forgets: bool) -> Preprocessing {
        let Settings { kept_bytes, epoch_steps, .. } = *settings;
        Preprocessing { bytes: kept_bytes, epoch_steps, forgets, forgotten: Vec::new() }
    }
}

impl Program for Preprocessing {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        if turn.step.is_multiple_of(self.epoch_steps) {
            trainer.mark(MarkKind::Phase, "epoch", turn.step / self.epoch_steps);
            let statistics = trainer.machine.copy_in(self.bytes, Category::Input);
            if self.forgets {
                self.forgotten.push(statistics);
            } else {
                trainer.release(statistics);
            }
        }
        trainer.train(turn, |_, _| {});
    }
}
