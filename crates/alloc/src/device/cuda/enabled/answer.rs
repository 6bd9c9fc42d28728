//! The driver's answers in the device's own words. Converted at once: the bindings' error type asks the driver for its
//! text when it is printed, which may be long after.

use cudarc::driver::sys::CUresult;

use crate::device::{CallKind, DeviceError};

/// What a code means for the caller; `requested` is how much memory the call asked for.
pub(super) fn result(call: CallKind, requested: u64, code: CUresult) -> Result<(), DeviceError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { call, requested }),
        CUresult::CUDA_ERROR_INVALID_VALUE => Err(invalid(call, "CUDA_ERROR_INVALID_VALUE")),
        code => Err(DeviceError::Driver { call, name: format!("{code:?}") }),
    }
}

/// A broken rule.
pub(super) fn invalid(call: CallKind, reason: impl Into<String>) -> DeviceError {
    DeviceError::InvalidValue { call, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_told_apart_and_named_without_asking_the_driver() {
        let answer = |code| result(CallKind::MemAlloc, 512, code);
        assert_eq!(answer(CUresult::CUDA_SUCCESS), Ok(()));
        assert!(answer(CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap_err().is_out_of_memory());
        let sticky = answer(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).unwrap_err();
        assert_eq!(sticky.to_string(), "cuMemAlloc: CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost");
        let lasting = answer(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS).unwrap_err();
        let passing = answer(CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap_err();
        assert!(sticky.loses_context() && lasting.loses_context() && !passing.loses_context());
    }
}
