//! cuBLAS: the few functions that matrix products need, declared here so that any version since 11
//! works.
//!
//! The library is loaded once per process and a handle made once per GPU, like its context; both
//! stay. What is multiplied is decided in `products`.

use std::{
    ffi::{c_int, c_longlong, c_void},
    ptr,
    sync::OnceLock,
};

use cudarc::driver::sys;

use super::library;
use oomph_base::{Dtype, ProductRole};

/// The call that makes a handle.
const CREATE: &str = "cublasCreate";

type BlasStatus = c_int;
type RawHandle = *mut c_void;

const SUCCESS: BlasStatus = 0;
const NOT_INITIALIZED: BlasStatus = 1;
const ALLOC_FAILED: BlasStatus = 3;

/// Values of `cublasOperation_t`, `cudaDataType_t`, `cublasComputeType_t` and `cublasGemmAlgo_t`.
const AS_IT_IS: c_int = 0;
const TRANSPOSED: c_int = 1;
const REAL_32: c_int = 0;
const REAL_16: c_int = 2;
const REAL_BRAIN_16: c_int = 14;
const COMPUTE_32: c_int = 68;
const COMPUTE_32_FAST_TF32: c_int = 77;
const DEFAULT_ALGORITHM: c_int = -1;

type Create = unsafe extern "C" fn(*mut RawHandle) -> BlasStatus;
type GetProperty = unsafe extern "C" fn(c_int, *mut c_int) -> BlasStatus;
type SetStream = unsafe extern "C" fn(RawHandle, sys::CUstream) -> BlasStatus;
type SetWorkspace = unsafe extern "C" fn(RawHandle, *mut c_void, usize) -> BlasStatus;
type GemmStridedBatched = unsafe extern "C" fn(
    RawHandle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_longlong,
    c_int,
    c_int,
    c_int,
) -> BlasStatus;

/// The loaded library.
#[derive(Debug)]
pub(super) struct BlasLibrary {
    create: Create,
    set_stream: SetStream,
    set_workspace: SetWorkspace,
    gemm_strided_batched: GemmStridedBatched,
    /// Such as `12.9.1`.
    pub(super) version: String,
    /// The file it came from.
    pub(super) place: String,
}

/// The library, loaded at the first call; the error is the reason.
pub(super) fn blas() -> Result<&'static BlasLibrary, String> {
    static BLAS: OnceLock<Result<BlasLibrary, String>> = OnceLock::new();
    BLAS.get_or_init(|| BlasLibrary::load(library::version().map(|(major, _)| major))).as_ref().map_err(String::clone)
}

impl BlasLibrary {
    fn load(newest_major: Option<u32>) -> Result<BlasLibrary, String> {
        let library::ToolkitLibrary { library, place } = library::load_toolkit("cublas", newest_major)?;
        // It stays loaded for the life of the process, because the functions are used until then.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let lacks = |symbol: &str| format!("{place} has no {symbol}: it is too old");
        macro_rules! function {
            ($type:ty, $name:literal) => {{
                // SAFETY: the type is the function's, which has not changed since version 11.
                let found = unsafe { library.get::<$type>($name) };
                *found.map_err(|_| lacks($name))?
            }};
        }
        let property: GetProperty = function!(GetProperty, "cublasGetProperty");
        Ok(BlasLibrary {
            create: function!(Create, "cublasCreate_v2"),
            set_stream: function!(SetStream, "cublasSetStream_v2"),
            set_workspace: function!(SetWorkspace, "cublasSetWorkspace_v2"),
            gemm_strided_batched: function!(GemmStridedBatched, "cublasGemmStridedBatchedEx"),
            version: version(property),
            place,
        })
    }
}

/// A handle in the current context.
pub(super) fn handle() -> Result<BlasHandle, BlasError> {
    let blas = blas().map_err(|_| BlasError::NO_HANDLE)?;
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a live handle; a context is current.
    check(CREATE, unsafe { (blas.create)(&raw mut raw) })?;
    Ok(BlasHandle { blas, raw })
}

/// The three parts of the version, read one by one, which needs no handle.
fn version(property: GetProperty) -> String {
    let parts = [0, 1, 2].map(|which| {
        let mut part = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { property(which, &raw mut part) };
        part.to_string()
    });
    parts.join(".")
}

/// cuBLAS in one context.
#[derive(Debug)]
pub(super) struct BlasHandle {
    blas: &'static BlasLibrary,
    raw: RawHandle,
}

// SAFETY: a handle may be used from any thread on which its context is current, by one at a time:
// it lies behind a lock.
unsafe impl Send for BlasHandle {}

/// One matrix in device memory and the step from one of a batch to the next, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) address: u64,
    pub(super) step: i64,
}

/// `batch` products of an `m x k` matrix with the transposed of an `n x k` matrix, all of them row
/// by row in memory: the layout that a linear layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlasProduct {
    pub(super) m: i32,
    pub(super) n: i32,
    pub(super) k: i32,
    pub(super) batch: i32,
    pub(super) dtype: Dtype,
    pub(super) role: ProductRole,
    pub(super) left: Matrix,
    pub(super) right: Matrix,
    pub(super) result: Matrix,
}

/// An error of cuBLAS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlasError {
    call: &'static str,
    status: BlasStatus,
}

impl BlasError {
    /// There is no handle yet.
    pub(super) const NO_HANDLE: BlasError = BlasError { call: CREATE, status: NOT_INITIALIZED };

    /// Whether memory was short.
    pub(super) fn is_out_of_memory(self) -> bool {
        self.status == ALLOC_FAILED
    }

    /// Whether the handle could not be made.
    pub(super) fn concerns_the_handle(self) -> bool {
        self.call == CREATE
    }
}

impl std::fmt::Display for BlasError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match name(self.status) {
            Some(name) => write!(f, "{} says CUBLAS_STATUS_{name}", self.call),
            None => write!(f, "{} says {}", self.call, self.status),
        }
    }
}

impl BlasHandle {
    /// Queues a product on a stream of the handle's context, which is current. The workspace
    /// belongs to that stream.
    pub(super) fn multiply(
        &self,
        stream: sys::CUstream,
        workspace: (u64, u64),
        product: &BlasProduct,
    ) -> Result<(), BlasError> {
        let BlasProduct { m, n, k, batch, dtype, role, left, right, result } = *product;
        let (numbers, arithmetic) = match dtype {
            Dtype::F32 => (REAL_32, COMPUTE_32),
            Dtype::Tf32 => (REAL_32, COMPUTE_32_FAST_TF32),
            Dtype::Bf16 => (REAL_BRAIN_16, COMPUTE_32),
            Dtype::F16 => (REAL_16, COMPUTE_32),
        };
        let (one, zero) = (1f32, 0f32);
        let [one, zero] = [&raw const one, &raw const zero].map(|scale| scale.cast::<c_void>());
        let [left_at, right_at, result_at] =
            [left, right, result].map(|matrix| ptr::without_provenance_mut::<c_void>(matrix.address as usize));
        // SAFETY: the stream is live, and so is the workspace until the context was waited for.
        let (on_stream, with_workspace) = unsafe {
            (
                (self.blas.set_stream)(self.raw, stream),
                (self.blas.set_workspace)(
                    self.raw,
                    ptr::without_provenance_mut(workspace.0 as usize),
                    workspace.1 as usize,
                ),
            )
        };
        check("cublasSetStream", on_stream)?;
        check("cublasSetWorkspace", with_workspace)?;
        // The library takes matrices column by column: rows of one are columns of the other, and
        // the factors change places.
        let [left_row, right_row] = role.row_lengths(m, n, k);
        let [turn_left, turn_right] = match role {
            ProductRole::Output => [AS_IT_IS, TRANSPOSED],
            ProductRole::InputGradient => [AS_IT_IS, AS_IT_IS],
            ProductRole::WeightGradient => [TRANSPOSED, AS_IT_IS],
        };
        // SAFETY: all matrices of the batch are live and as long as their shapes say: the caller
        // ensures that. The scales are read before the call returns.
        check("cublasGemmStridedBatchedEx", unsafe {
            (self.blas.gemm_strided_batched)(
                self.raw,
                turn_right,
                turn_left,
                n,
                m,
                k,
                one,
                right_at,
                numbers,
                right_row,
                right.step,
                left_at,
                numbers,
                left_row,
                left.step,
                zero,
                result_at,
                numbers,
                n,
                result.step,
                batch,
                arithmetic,
                DEFAULT_ALGORITHM,
            )
        })
    }
}

fn check(call: &'static str, status: BlasStatus) -> Result<(), BlasError> {
    if status == SUCCESS { Ok(()) } else { Err(BlasError { call, status }) }
}

/// The library's name for a status, without asking it.
fn name(status: BlasStatus) -> Option<&'static str> {
    Some(match status {
        NOT_INITIALIZED => "NOT_INITIALIZED",
        ALLOC_FAILED => "ALLOC_FAILED",
        7 => "INVALID_VALUE",
        8 => "ARCH_MISMATCH",
        11 => "MAPPING_ERROR",
        13 => "EXECUTION_FAILED",
        14 => "INTERNAL_ERROR",
        15 => "NOT_SUPPORTED",
        16 => "LICENSE_ERROR",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_named_and_unknown_ones_numbered() {
        let said = |status| check(CREATE, status).unwrap_err();
        assert_eq!(said(1).to_string(), "cublasCreate says CUBLAS_STATUS_NOT_INITIALIZED");
        assert_eq!(said(99).to_string(), "cublasCreate says 99");
        assert!(said(3).is_out_of_memory() && !said(13).is_out_of_memory());
        assert_eq!(check(CREATE, 0), Ok(()));
    }

    #[test]
    fn the_library_is_loaded_or_the_reason_is_given() {
        match blas() {
            Ok(found) => assert_eq!(found.version.split('.').count(), 3, "{found:?}"),
            Err(reason) => assert!(reason.contains("libcublas"), "{reason}"),
        }
    }
}
