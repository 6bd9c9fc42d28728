//! Number formats: what weights, activations and products are kept in.

use oomph_base::Dtype;

/// How wide a number is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Number {
    /// 16 bits, bf16 or fp16.
    Half,
    /// 32 bits.
    Single,
}

impl Number {
    /// Bytes of one.
    pub(super) const fn bytes(self) -> u64 {
        match self {
            Number::Half => 2,
            Number::Single => 4,
        }
    }
}

/// Which 16-bit format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HalfFormat {
    Brain,
    /// Needs a loss scale, for its range is small.
    Ieee,
}

/// Which format is used where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// Single precision throughout.
    Single {
        /// Whether products are rounded to tf32 inside; memory is the same.
        tf32: bool,
    },
    /// Weights in single precision, cast for every product (`torch.autocast`).
    Autocast(HalfFormat),
    /// Weights and everything else in 16 bits.
    HalfModel {
        /// Whether the optimizer keeps single-precision weights and means beside them.
        master_weights: bool,
    },
}

impl Precision {
    /// What weights and their gradients are kept in.
    pub(super) fn of_weights(self) -> Number {
        match self {
            Precision::HalfModel { .. } => Number::Half,
            Precision::Single { .. } | Precision::Autocast(_) => Number::Single,
        }
    }

    /// Whether products cast their operands first.
    pub(super) fn is_autocast(self) -> bool {
        matches!(self, Precision::Autocast(_))
    }

    /// Whether the loss is scaled before backward.
    pub(super) fn scales_loss(self) -> bool {
        self == Precision::Autocast(HalfFormat::Ieee)
    }

    /// The format that attention over such numbers runs in: its kernels for single precision know no tf32.
    pub(super) fn of_attention(self, number: Number) -> Dtype {
        match number {
            Number::Single => Dtype::F32,
            Number::Half => self.of_products(number),
        }
    }

    /// The format that a product of such numbers runs in.
    pub(super) fn of_products(self, number: Number) -> Dtype {
        match (number, self) {
            (Number::Single, Precision::Single { tf32: true }) => Dtype::Tf32,
            (Number::Single, _) => Dtype::F32,
            (Number::Half, Precision::Autocast(HalfFormat::Ieee)) => Dtype::F16,
            (Number::Half, _) => Dtype::Bf16,
        }
    }
}
