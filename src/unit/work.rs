//! What a stream can be kept busy with.

use serde::{Deserialize, Serialize};

use super::Nanos;

/// The number format that a matrix product or an attention runs in.
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

/// One piece of device work, by shape. A device with compute runs or times it; any other ignores it.
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
    },
    /// Reads and writes `bytes` in all, with next to no arithmetic.
    Elementwise {
        /// Traffic to and from memory.
        bytes: u64,
    },
    /// Reads `bytes` and writes next to nothing.
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
        /// The backward pass does about two and a half times the forward's work.
        backward: bool,
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
