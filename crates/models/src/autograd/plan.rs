//! What is trained, how: the model's shape, its number formats and the techniques, asked by everything else here.

use super::{precision::Precision, shape::Shape, technique::Techniques};
use crate::{Parameters, WorkloadError};

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) shape: Shape,
    pub(super) precision: Precision,
    pub(super) techniques: Techniques,
}

impl Plan {
    /// Reads all parameters and refuses what cannot be.
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<Plan, WorkloadError> {
        let shape = Shape::read(parameters)?;
        let (precision, techniques) = Techniques::read(parameters)?;
        let plan = Plan { shape, precision, techniques };
        plan.check().map_err(|reason| parameters.refuse(reason))?;
        Ok(plan)
    }

    /// Sequences of one micro-batch.
    pub(super) fn micro_batch(&self) -> u32 {
        self.shape.batch / self.techniques.micro_batches
    }

    /// Blocks on this rank.
    pub(super) fn local_layers(&self) -> u32 {
        self.shape.layers / self.techniques.pipeline_stages
    }

    /// Attention heads on this rank.
    pub(super) fn local_heads(&self) -> u32 {
        self.shape.heads / self.techniques.tensor_ranks
    }

    /// Numbers per token in this rank's heads.
    pub(super) fn local_width(&self) -> u32 {
        self.shape.width / self.techniques.tensor_ranks
    }

    /// Rows of the token table and columns of the output head on this rank.
    pub(super) fn local_vocabulary(&self) -> u32 {
        self.shape.vocabulary.div_ceil(self.techniques.tensor_ranks)
    }

    /// Whether this rank has the output head: the first stage of a pipeline has not.
    pub(super) fn has_ending(&self) -> bool {
        self.techniques.pipeline_stages == 1
    }

    /// Whether the parts of model and batch come out even.
    pub(super) fn check(&self) -> Result<(), String> {
        let (shape, techniques) = (&self.shape, &self.techniques);
        let divides = |parts: u32, whole: u32, what: &str, of: &str| {
            if whole.is_multiple_of(parts) { Ok(()) } else { Err(format!("{parts} {what} do not divide {whole} {of}")) }
        };
        divides(techniques.micro_batches, shape.batch, "micro-batches", "sequences")?;
        divides(techniques.tensor_ranks, shape.heads, "ranks of tensor_parallel", "heads")?;
        divides(techniques.pipeline_stages, shape.layers, "stages of pipeline", "layers")
    }
}
