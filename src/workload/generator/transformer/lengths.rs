//! How long the sequences of each batch are: all alike, as given, or at random.

use std::sync::Arc;

use super::shape::{MOST_TOKENS, Shape};
use crate::workload::{Dice, Parameter, Parameters, WorkloadError};

pub(super) const MIN_LENGTH: Parameter = Parameter::count(
    "min_length",
    0..=MOST_TOKENS,
    "0",
    "shortest sequence of batches whose length is random up to the context; 0: all have the context's length",
);

pub(super) const LENGTHS: Parameter = Parameter::words(
    "lengths",
    "512,1024",
    "",
    "lengths of the sequences of each batch, in turn; none: the context's, or random from min_length",
);

/// Where lengths come from.
#[derive(Clone, Debug)]
pub(super) enum Lengths {
    /// All alike.
    Fixed(u32),
    /// These, in turn.
    Given(Arc<[u32]>),
    /// Even between the two, both included.
    Random(u32, u32),
}

impl Lengths {
    /// Reads the parameters that are declared above.
    pub(super) fn read(parameters: &Parameters<'_>, shape: &Shape) -> Result<Lengths, WorkloadError> {
        let context = shape.context;
        let length = |word: String| {
            word.parse().ok().filter(|length| (1..=context).contains(length)).ok_or_else(|| {
                let reason = format!("'{word}' among lengths is no whole number from 1 to the context ({context})");
                parameters.refuse(reason)
            })
        };
        let given: Arc<[u32]> = parameters.words(LENGTHS.name)?.into_iter().map(length).collect::<Result<_, _>>()?;
        let least = parameters.count(MIN_LENGTH.name)?;
        if least > context {
            return Err(parameters.refuse(format!("min_length ({least}) must not exceed the context ({context})")));
        }
        Ok(match least {
            _ if !given.is_empty() => Lengths::Given(given),
            0 => Lengths::Fixed(context),
            least => Lengths::Random(least, context),
        })
    }

    /// The length of the batch of this number.
    pub(super) fn of_batch(&self, batch: u64, dice: &mut Dice) -> u32 {
        match self {
            Lengths::Fixed(length) => *length,
            Lengths::Given(lengths) => lengths[(batch % lengths.len() as u64) as usize],
            Lengths::Random(least, most) => dice.between((*least).into(), (*most).into()) as u32,
        }
    }
}
