//! Why a driver call failed, and whether anything can be done with the device afterwards.

use super::CallKind;

/// Why a driver call failed. Running out of memory is told apart because strategies act on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has not got that much left.
    #[error("{call}: out of memory, {requested} bytes asked for")]
    OutOfMemory {
        /// Which call.
        call: CallKind,
        /// How much it asked for.
        requested: u64,
    },
    /// The call broke one of the driver's rules.
    #[error("{call}: invalid value: {reason}")]
    InvalidValue {
        /// Which call.
        call: CallKind,
        /// Which rule.
        reason: String,
    },
    /// The device has no such ability.
    #[error("this device has no {capability}")]
    Unsupported {
        /// The missing ability, in words.
        capability: &'static str,
    },
    /// Anything else the driver may answer, by its name.
    #[error("{call}: {name}{}", if is_sticky(name) { ": the context is lost" } else { "" })]
    Driver {
        /// Which call.
        call: CallKind,
        /// The driver's name for the error.
        name: String,
    },
}

impl DeviceError {
    /// Whether a smaller request, or the same one after a release, could succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DeviceError::OutOfMemory { .. })
    }

    /// Whether the context is gone, with all memory, streams and events in it: every later call of this process on this
    /// device gives the same error, and only a new process can use the device again.
    ///
    /// ```
    /// use oomph_alloc::device::{CallKind, DeviceError};
    /// let error = |name: &str| DeviceError::Driver { call: CallKind::MemFree, name: name.to_owned() };
    /// let lost = error("CUDA_ERROR_ILLEGAL_ADDRESS");
    /// assert!(lost.loses_context() && !error("CUDA_ERROR_NOT_SUPPORTED").loses_context());
    /// assert_eq!(lost.to_string(), "cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost");
    /// ```
    #[must_use]
    pub fn loses_context(&self) -> bool {
        matches!(self, DeviceError::Driver { name, .. } if is_sticky(name))
    }
}

/// The errors after which, as the driver's manual has it, the process must be ended and started anew to use CUDA; and
/// those that say that the context or the driver itself is no more. Kernels raise most of them, so they appear at some
/// later call that has nothing to do with the cause.
const STICKY: [&str; 17] = [
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
];

fn is_sticky(name: &str) -> bool {
    STICKY.contains(&name)
}
