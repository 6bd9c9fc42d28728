//! How long the sequences of each step are: given, random, or all as long as the context.

use std::sync::Arc;

use super::shape::Shape;
use crate::{Parameters, SeededRandom, WorkloadError};

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Lengths {
    shape: Shape,
    /// In turn; where there are none, the context's or random ones.
    given: Arc<[u32]>,
}

impl Lengths {
    /// Reads the lengths that are given for this shape, if any.
    pub(super) fn read(shape: Shape, parameters: &Parameters<'_>) -> Result<Lengths, WorkloadError> {
        Ok(Lengths { shape, given: shape.read_lengths(parameters)?.into() })
    }

    /// The length of a step's sequences.
    pub(super) fn of_step(&self, step: u32, random: &mut SeededRandom) -> u32 {
        if let Some(turn) = step.checked_rem(self.given.len() as u32) {
            self.given[turn as usize]
        } else if self.shape.is_variable() {
            random.between(self.shape.min_length.into(), self.shape.context.into()) as u32
        } else {
            self.shape.context
        }
    }
}
