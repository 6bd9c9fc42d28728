//! Python's cyclic collector: it frees what only circular references still hold, and runs by the number of objects that
//! were made, whatever they weigh.
//!
//! So a few cycles with large tensors in them can fill a GPU long before it is due. The threshold is Python's; how many
//! objects a training step makes was fitted to one recording of a 12-layer GPT (three collections in eight steps). It
//! says how such a saw-tooth looks, not when the teeth of another program fall.

use super::machine::{Machine, Tensor};

/// The young generation is collected when it has grown by more objects than this.
const THRESHOLD: u32 = 700;
/// Young objects when the optimizer runs for the first time, cycles aside.
const BEFORE_FIRST_UPDATE: u32 = 420;
/// Objects of one weight's optimizer state.
const PER_STATE: u32 = 5;
/// Objects of one weight that live while the optimizer works on the whole list.
const PER_UPDATED_WEIGHT: u32 = 4;
/// What the first step leaves for good, after its state.
const LEFT_BY_FIRST_UPDATE: u32 = 72;
/// Objects of a cycle: what refers to itself, with its attributes, and the class that the loop makes for it.
const PER_CYCLE: u32 = 24;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Collector {
    /// Objects made since the last collection, less those that died by themselves.
    young: u32,
    /// Held by nothing but a cycle, the oldest first.
    garbage: Vec<Tensor>,
}

impl Default for Collector {
    fn default() -> Collector {
        Collector { young: BEFORE_FIRST_UPDATE, garbage: Vec::new() }
    }
}

impl Machine {
    /// Leaves a tensor to a cycle that nobody can reach any more.
    pub(super) fn leave_in_cycle(&mut self, tensor: Tensor) {
        self.collector.young += PER_CYCLE;
        self.collector.garbage.push(tensor);
    }

    /// The state of one more weight is being made.
    pub(super) fn collect_while_making_state(&mut self) {
        self.collector.young += PER_STATE;
        self.collect_if_due(0);
    }

    /// The optimizer holds the most objects of the whole step.
    pub(super) fn collect_while_updating(&mut self, weights: usize) {
        self.collect_if_due(PER_UPDATED_WEIGHT * weights as u32);
    }

    /// Once, after the step that made the state.
    pub(super) fn leave_objects_of_first_update(&mut self) {
        self.collector.young += LEFT_BY_FIRST_UPDATE;
    }

    /// Frees what cycles hold (`gc.collect()`).
    pub(super) fn collect_garbage(&mut self) {
        self.collector.young = 0;
        for tensor in std::mem::take(&mut self.collector.garbage) {
            self.release(tensor);
        }
    }

    /// Collects where the objects of the moment are too many. They survive it as old ones, so that their death takes
    /// nothing off the count of young ones.
    fn collect_if_due(&mut self, of_the_moment: u32) {
        if self.collector.young + of_the_moment > THRESHOLD {
            self.collect_garbage();
        }
    }
}
