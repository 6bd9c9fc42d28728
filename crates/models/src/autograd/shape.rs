//! The shape of the model and of its batches.

use crate::{Parameter, Parameters, WorkloadError};

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

pub(super) const VALIDATE_EVERY: Parameter =
    Parameter::count("validate_every", 0..=1_000_000, "0", "training steps between two validations; 0: none");
pub(super) const VALIDATION_PASSES: Parameter =
    Parameter::count("validation_passes", 1..=1_000_000, "4", "batches of a validation");
pub(super) const VALIDATION_LENGTH: Parameter =
    Parameter::count("validation_length", 0..=MOST_TOKENS, "0", "length of their sequences; 0: as in training");

pub(super) const EXPERTS: Parameter =
    Parameter::count("experts", 1..=1 << 10, "1", "experts of a block, each an MLP; 1: one MLP for all tokens");
pub(super) const CHOSEN_EXPERTS: Parameter =
    Parameter::count("chosen_experts", 1..=64, "2", "experts that each token goes to, where there are several");
pub(super) const IMBALANCE: Parameter =
    Parameter::number("imbalance", 0.0..=1.0, "0.5", "how far the experts' shares of tokens stray from even ones");

/// How tokens are shared among experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    pub(super) experts: u32,
    pub(super) chosen: u32,
    pub(super) imbalance: f64,
}

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
    /// Nothing where every block has one MLP.
    pub(super) mixture: Option<Mixture>,
}

impl Shape {
    /// Reads the parameters that are declared above.
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<Shape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (context, min_length) = (count(&CONTEXT)?, count(&MIN_LENGTH)?);
        let shape = Shape::read_model(parameters, context, count(&BATCH)?)?;
        if min_length > context {
            return Err(parameters.refuse(format!("min_length ({min_length}) must not exceed the context ({context})")));
        }
        let mixture = read_mixture(parameters)?;
        Ok(Shape { min_length: if min_length == 0 { context } else { min_length }, mixture, ..shape })
    }

    /// Reads the model's own parameters, for sequences of one length.
    pub(super) fn read_model(parameters: &Parameters<'_>, context: u32, batch: u32) -> Result<Shape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (width, heads) = (count(&WIDTH)?, count(&HEADS)?);
        if !width.is_multiple_of(heads) {
            return Err(parameters.refuse(format!("{heads} heads do not divide a width of {width}")));
        }
        let (layers, vocabulary) = (count(&LAYERS)?, count(&VOCABULARY)?);
        Ok(Shape { layers, width, heads, vocabulary, context, batch, min_length: context, mixture: None })
    }

    /// What a network of images has of a shape: a batch, and classes in place of tokens.
    pub(super) fn of_images(batch: u32, classes: u32) -> Shape {
        Shape { layers: 1, width: 1, heads: 1, vocabulary: classes, context: 1, batch, min_length: 1, mixture: None }
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

fn read_mixture(parameters: &Parameters<'_>) -> Result<Option<Mixture>, WorkloadError> {
    let (experts, chosen) = (parameters.count(EXPERTS.name)?, parameters.count(CHOSEN_EXPERTS.name)?);
    let imbalance = parameters.number(IMBALANCE.name)?;
    if experts == 1 {
        return Ok(None);
    }
    if chosen > experts {
        return Err(parameters.refuse(format!("chosen_experts ({chosen}) must not exceed experts ({experts})")));
    }
    Ok(Some(Mixture { experts, chosen, imbalance }))
}
