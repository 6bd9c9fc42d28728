//! The shape of the model and of its batches.

use crate::workload::{Parameter, Parameters, WorkloadError};

/// The longest sequence; with the largest batch, all tokens of a step still fit the shapes of work.
const MOST_TOKENS: u32 = 1 << 18;

pub(super) const STEPS: Parameter = Parameter::count("steps", 1..=100_000_000, "6", "training steps");
pub(super) const LAYERS: Parameter = Parameter::count("layers", 1..=10_000, "12", "decoder blocks");
pub(super) const WIDTH: Parameter = Parameter::count("width", 1..=1 << 16, "768", "numbers per token");
pub(super) const HEADS: Parameter =
    Parameter::count("heads", 1..=1 << 10, "12", "attention heads; must divide the width");
pub(super) const VOCABULARY: Parameter = Parameter::count("vocab", 1..=1 << 20, "50257", "different tokens");
pub(super) const CONTEXT: Parameter =
    Parameter::count("context", 1..=MOST_TOKENS, "1024", "longest sequence, in tokens");
pub(super) const BATCH: Parameter = Parameter::count("batch", 1..=1 << 12, "8", "sequences per step");
pub(super) const MIN_LENGTH: Parameter = Parameter::count(
    "min_length",
    0..=MOST_TOKENS,
    "0",
    "shortest sequence of steps whose length is random up to the context; 0: every step has the context's length",
);

pub(super) const LENGTHS: Parameter = Parameter::words(
    "lengths",
    "512,1024",
    "",
    "lengths of the sequences of each step, in turn; empty: the context's, or random from min_length",
);

/// See the [module](self).
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layers: u32,
    pub(super) width: u32,
    pub(super) heads: u32,
    pub(super) vocabulary: u32,
    pub(super) context: u32,
    pub(super) batch: u32,
    /// The shortest sequence; equal to the context where all are of one length.
    pub(super) min_length: u32,
}

impl Shape {
    /// Reads the parameters that are declared above.
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<Shape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (width, heads, context) = (count(&WIDTH)?, count(&HEADS)?, count(&CONTEXT)?);
        if !width.is_multiple_of(heads) {
            return Err(parameters.refuse(format!("{heads} heads do not divide a width of {width}")));
        }
        let min_length = count(&MIN_LENGTH)?;
        if min_length > context {
            return Err(parameters.refuse(format!("min_length ({min_length}) must not exceed the context ({context})")));
        }
        Ok(Shape {
            layers: count(&LAYERS)?,
            width,
            heads,
            vocabulary: count(&VOCABULARY)?,
            context,
            batch: count(&BATCH)?,
            min_length: if min_length == 0 { context } else { min_length },
        })
    }

    /// The lengths that steps have in turn, if they are given.
    pub(super) fn read_lengths(&self, parameters: &Parameters<'_>) -> Result<Vec<u32>, WorkloadError> {
        let length = |word: String| {
            word.parse().ok().filter(|length| (1..=self.context).contains(length)).ok_or_else(|| {
                parameters.refuse(format!(
                    "'{word}' among lengths is no whole number from 1 to the context ({})",
                    self.context
                ))
            })
        };
        parameters.words(LENGTHS.name)?.into_iter().map(length).collect()
    }

    /// Width of one attention head.
    pub(super) fn head_width(&self) -> u32 {
        self.width / self.heads
    }

    /// Whether the length changes from step to step.
    pub(super) fn is_variable(&self) -> bool {
        self.min_length < self.context
    }
}
