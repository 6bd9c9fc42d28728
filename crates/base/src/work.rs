//! Work that a stream can run, described by its shape.

use serde::{Deserialize, Serialize};

use super::Nanos;

/// The number format of a matrix product or an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// Single precision rounded to 10 mantissa bits inside the product.
    Tf32,
    /// Brain float.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// What a matrix product computes in a layer. This decides the memory layout of its factors; the result is row-major.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductRole {
    /// The output of the layer: both factors are stored in rows of length `k`.
    #[default]
    Output,
    /// The gradient of its input: the right factor, the weight, is stored in rows of length `n`.
    InputGradient,
    /// The gradient of its weight: the factors are stored in rows of lengths `m` and `n`.
    WeightGradient,
}

impl ProductRole {
    /// Every role.
    pub const ALL: [ProductRole; 3] = [ProductRole::Output, ProductRole::InputGradient, ProductRole::WeightGradient];

    /// The row lengths of the left and of the right factor.
    #[must_use]
    pub const fn row_lengths<N: Copy>(self, m: N, n: N, k: N) -> [N; 2] {
        match self {
            ProductRole::Output => [k, k],
            ProductRole::InputGradient => [k, n],
            ProductRole::WeightGradient => [m, n],
        }
    }

    fn is_output(&self) -> bool {
        *self == ProductRole::Output
    }
}

/// One piece of device work, described by its shape. A device with compute runs or times it; other devices ignore it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Work {
    /// Keeps the stream busy for a time.
    Spin {
        /// How long.
        nanos: Nanos,
    },
    /// `batch` products of an `m x k` by a `k x n` matrix.
    Gemm {
        /// Rows of the result.
        m: u32,
        /// Columns of the result.
        n: u32,
        /// Length of each dot product.
        k: u32,
        /// How many independent products.
        batch: u32,
        /// Number format.
        dtype: Dtype,
        /// The layout of the factors.
        #[serde(default, skip_serializing_if = "ProductRole::is_output")]
        role: ProductRole,
    },
    /// Reads and writes `bytes` in total, with little arithmetic.
    Elementwise {
        /// Traffic to and from memory.
        bytes: u64,
    },
    /// Reads `bytes` and writes little.
    Reduction {
        /// Bytes read.
        bytes: u64,
    },
    /// Scaled dot-product attention.
    Attention {
        /// Sequences.
        batch: u32,
        /// Heads per sequence.
        heads: u32,
        /// Query tokens.
        queries: u32,
        /// Key and value tokens.
        keys: u32,
        /// Width of one head.
        head_width: u32,
        /// Number format.
        dtype: Dtype,
        /// The backward pass, which takes about 2.5 times the work of the forward pass.
        backward: bool,
        /// A token attends only to those before it, which halves the work.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        causal: bool,
    },
    /// A copy from host memory.
    CopyIn {
        /// Bytes copied.
        bytes: u64,
        /// From pinned memory, which is several times faster.
        pinned: bool,
    },
    /// A copy to host memory.
    CopyOut {
        /// Bytes copied.
        bytes: u64,
        /// To pinned memory.
        pinned: bool,
    },
}

impl Work {
    /// Floating-point operations of matrix products and attention; 0 for other work.
    #[must_use]
    pub fn flops(&self) -> f64 {
        match *self {
            Work::Gemm { m, n, k, batch, .. } => {
                let [m, n, k, batch] = [m, n, k, batch].map(f64::from);
                2.0 * m * n * k * batch
            }
            Work::Attention { batch, heads, queries, keys, head_width, backward, causal, .. } => {
                let seen = if causal { keys.div_ceil(2) } else { keys };
                let [batch, heads, queries, seen, head_width] =
                    [batch, heads, queries, seen, head_width].map(f64::from);
                let products = if backward { 5.0 } else { 2.0 };
                2.0 * queries * head_width * seen * batch * heads * products
            }
            _ => 0.0,
        }
    }

    /// Bytes moved to and from device memory, or between device and host.
    #[must_use]
    pub fn traffic_bytes(&self) -> f64 {
        match *self {
            Work::Spin { .. } => 0.0,
            Work::Gemm { m, n, k, batch, dtype, .. } => {
                let [m, n, k, batch] = [m, n, k, batch].map(f64::from);
                (m * k + k * n + m * n) * batch * dtype.bytes() as f64
            }
            Work::Attention { batch, heads, queries, keys, head_width, dtype, backward, .. } => {
                let [batch, heads, tokens, head_width] =
                    [batch, heads, queries.saturating_add(keys), head_width].map(f64::from);
                let passes = if backward { 2.5 } else { 1.0 };
                2.0 * batch * heads * head_width * tokens * dtype.bytes() as f64 * passes
            }
            Work::Elementwise { bytes }
            | Work::Reduction { bytes }
            | Work::CopyIn { bytes, .. }
            | Work::CopyOut { bytes, .. } => bytes as f64,
        }
    }
}

impl Dtype {
    /// Every number format.
    pub const ALL: [Dtype; 4] = [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16];

    /// The common name: `fp32`, `tf32`, `bf16`, `fp16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "fp32",
            Dtype::Tf32 => "tf32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "fp16",
        }
    }

    /// Bytes of one number in memory.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F32 | Dtype::Tf32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_without_a_mask_keeps_its_old_form() {
        let text = r#"{"kind":"attention","batch":1,"heads":2,"queries":3,"keys":3,"head_width":4,"dtype":"f32","backward":false}"#;
        let attention: Work = serde_json::from_str(text).unwrap();
        assert!(matches!(attention, Work::Attention { causal: false, .. }));
        assert_eq!(serde_json::to_string(&attention).unwrap(), text);
    }
}
