//! What the input pipeline holds: pinned buffers of loader workers, batches on the device before or beside their use.

use std::collections::VecDeque;

use super::{
    super::{machine::Tensor, trainer::Trainer},
    Fault, Program, Settings, Turn,
};
use oomph_base::Work;
use oomph_trace::{BlockSlot, Category, MarkKind};

/// Batches that every worker has ready, as PyTorch's loader has.
const READY_PER_WORKER: u32 = 2;

/// `pin_memory=True` with many workers: host memory that cannot be swapped, and none of the device's.
pub(super) const PINNED_LOADER: Fault = Fault {
    name: "pinned_loader",
    programs: &[
        ("none", |settings| Box::new(PinnedLoader { settings: *settings, ready: VecDeque::new() })),
        ("pageable", |settings| Box::new(OnDemand { bytes: settings.input_bytes, held: None })),
    ],
};

/// Batches brought to the device ahead of their steps.
pub(super) const PREFETCHED_BATCHES: Fault = Fault {
    name: "prefetched_batches",
    programs: &[
        ("none", |settings| Box::new(Prefetched { settings: *settings, ready: VecDeque::new() })),
        ("on_demand", |settings| Box::new(OnDemand { bytes: settings.input_bytes, held: None })),
    ],
};

/// Every transformation of a batch makes a copy, and all of them live until the next batch.
pub(super) const DUPLICATED_BATCHES: Fault = Fault {
    name: "duplicated_batches",
    programs: &[
        ("none", |settings| Box::new(Duplicated { settings: *settings, copies: Vec::new() })),
        ("one_copy", |settings| Box::new(OnDemand { bytes: settings.input_bytes, held: None })),
    ],
};

fn begin_input(trainer: &mut Trainer, turn: &Turn<'_>) {
    trainer.mark(MarkKind::Phase, "input", turn.step);
}

/// One batch at a time; the old one goes when the new one is there.
struct OnDemand {
    bytes: u64,
    held: Option<Tensor>,
}

impl Program for OnDemand {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        begin_input(trainer, turn);
        let input = trainer.machine.copy_in(self.bytes, Category::Input);
        if let Some(before) = self.held.replace(input) {
            trainer.release(before);
        }
        trainer.train(turn, |_, _| {});
    }
}

/// Workers keep pinned buffers filled; without workers the program pins each batch itself.
struct PinnedLoader {
    settings: Settings,
    ready: VecDeque<BlockSlot>,
}

impl Program for PinnedLoader {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        begin_input(trainer, turn);
        let bytes = self.settings.input_bytes;
        let most = (self.settings.workers * READY_PER_WORKER).max(1) as usize;
        while self.ready.len() < most {
            let buffer = trainer.machine.take_host_buffer(bytes);
            self.ready.push_back(buffer);
        }
        if let Some(buffer) = self.ready.pop_front() {
            let input = trainer.machine.alloc(bytes, Category::Input);
            trainer.machine.work(Work::CopyIn { bytes, pinned: true }, [input]);
            trainer.train(turn, |_, _| {});
            trainer.release(input);
            trainer.machine.return_host_buffer(buffer, bytes);
        }
    }
}

/// A queue of batches on the device.
struct Prefetched {
    settings: Settings,
    ready: VecDeque<Tensor>,
}

impl Program for Prefetched {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        begin_input(trainer, turn);
        // The batch of this step, and those of the steps to come.
        while self.ready.len() <= self.settings.batches as usize {
            self.ready.push_back(trainer.machine.copy_in(self.settings.input_bytes, Category::Input));
        }
        trainer.train(turn, |_, _| {});
        if let Some(used) = self.ready.pop_front() {
            trainer.release(used);
        }
    }
}

/// A batch and the copies made of it.
struct Duplicated {
    settings: Settings,
    copies: Vec<Tensor>,
}

impl Program for Duplicated {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        begin_input(trainer, turn);
        let bytes = self.settings.input_bytes;
        let mut latest = trainer.machine.copy_in(bytes, Category::Input);
        let mut copies = vec![latest];
        for _ in 0..self.settings.batches {
            latest = trainer.derive(latest, bytes, Category::Input);
            copies.push(latest);
        }
        for before in std::mem::replace(&mut self.copies, copies) {
            trainer.release(before);
        }
        trainer.train(turn, |_, _| {});
    }
}
