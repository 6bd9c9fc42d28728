//! Error codes and their texts.

use std::cell::Cell;

use crate::arguments::Out;

/// `cudaSuccess` and `CUDA_SUCCESS`.
pub const SUCCESS: i32 = 0;
/// `cudaErrorInvalidValue`, `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: i32 = 1;
/// `cudaErrorMemoryAllocation`, `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: i32 = 2;
/// `cudaErrorInvalidDevice`, `CUDA_ERROR_INVALID_DEVICE`.
pub const INVALID_DEVICE: i32 = 101;
/// `cudaErrorSymbolNotFound`, `CUDA_ERROR_NOT_FOUND`.
pub const NOT_FOUND: i32 = 500;
/// `cudaErrorNotReady`, `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: i32 = 600;
/// `cudaErrorNotSupported`, `CUDA_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: i32 = 801;
/// `cudaErrorStreamCaptureUnsupported`.
pub const CAPTURE_UNSUPPORTED: i32 = 900;
/// `cudaErrorStreamCaptureInvalidated`.
pub const CAPTURE_INVALIDATED: i32 = 901;
/// `cudaErrorStreamCaptureIsolation`.
pub const CAPTURE_ISOLATION: i32 = 905;

/// Code, name in the runtime, name in the driver, text. All end with a zero byte: they are given out as C texts.
const TEXTS: &[(i32, &str, &str, &str)] = &[
    (SUCCESS, "cudaSuccess\0", "CUDA_SUCCESS\0", "no error\0"),
    (INVALID_VALUE, "cudaErrorInvalidValue\0", "CUDA_ERROR_INVALID_VALUE\0", "invalid argument\0"),
    (OUT_OF_MEMORY, "cudaErrorMemoryAllocation\0", "CUDA_ERROR_OUT_OF_MEMORY\0", "out of memory\0"),
    (INVALID_DEVICE, "cudaErrorInvalidDevice\0", "CUDA_ERROR_INVALID_DEVICE\0", "invalid device ordinal\0"),
    (NOT_FOUND, "cudaErrorSymbolNotFound\0", "CUDA_ERROR_NOT_FOUND\0", "named symbol not found\0"),
    (NOT_READY, "cudaErrorNotReady\0", "CUDA_ERROR_NOT_READY\0", "device not ready\0"),
    (NOT_SUPPORTED, "cudaErrorNotSupported\0", "CUDA_ERROR_NOT_SUPPORTED\0", "operation not supported\0"),
    (
        704,
        "cudaErrorPeerAccessAlreadyEnabled\0",
        "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED\0",
        "peer access is already enabled\0",
    ),
    (
        CAPTURE_UNSUPPORTED,
        "cudaErrorStreamCaptureUnsupported\0",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED\0",
        "operation not permitted when stream is capturing\0",
    ),
    (
        CAPTURE_INVALIDATED,
        "cudaErrorStreamCaptureInvalidated\0",
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED\0",
        "operation failed due to a previous error during capture\0",
    ),
    (
        CAPTURE_ISOLATION,
        "cudaErrorStreamCaptureIsolation\0",
        "CUDA_ERROR_STREAM_CAPTURE_ISOLATION\0",
        "dependency created on uncaptured work in another stream\0",
    ),
];
const UNKNOWN: (i32, &str, &str, &str) = (999, "cudaErrorUnknown\0", "CUDA_ERROR_UNKNOWN\0", "unknown error\0");

fn texts(code: i32) -> &'static (i32, &'static str, &'static str, &'static str) {
    TEXTS.iter().find(|entry| entry.0 == code).unwrap_or(&UNKNOWN)
}

thread_local! {
    static LAST: Cell<i32> = const { Cell::new(SUCCESS) };
}

/// Remembers an error of the runtime for `cudaGetLastError`, and returns it. `cudaErrorNotReady` is a real answer and is
/// remembered too, as the runtime does.
pub fn conclude(code: i32) -> i32 {
    if code != SUCCESS {
        LAST.set(code);
    }
    code
}

cuda_functions! {
    fn cudaGetLastError() -> i32 {
        LAST.replace(SUCCESS)
    }
    fn cudaPeekAtLastError() -> i32 {
        LAST.get()
    }
    fn cudaGetErrorString(code: i32) -> *const u8 {
        texts(code).3.as_ptr()
    }
    fn cudaGetErrorName(code: i32) -> *const u8 {
        texts(code).1.as_ptr()
    }
    fn cuGetErrorString(code: i32, text: Out<u64>) -> i32 {
        text.set(texts(code).3.as_ptr() as u64);
        SUCCESS
    }
    fn cuGetErrorName(code: i32, text: Out<u64>) -> i32 {
        text.set(texts(code).2.as_ptr() as u64);
        SUCCESS
    }
}
