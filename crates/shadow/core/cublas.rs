//! cuBLAS and cuBLASLt: handles with a stream, versions, and how long a product takes.
//!
//! PyTorch keeps one workspace per handle and stream, so every call of `cublasCreate` gives a handle of its own.

use crate::{
    arguments::{In, Out, new_handle},
    card::card,
    launch, streams,
};

/// Status codes of cuBLAS.
const SUCCESS: i32 = 0;
const INVALID_VALUE: i32 = 7;

/// Operations per nanosecond of an H200: the simulated device's profile (`f32`, `tf32`, half).
const F32_OPS: u64 = 50_000;
const HALF_OPS: u64 = 600_000;

fn set_stream(handle: u64, stream: u64) -> i32 {
    streams::set_library_stream(handle, stream);
    SUCCESS
}

/// `cudaDataType` 0 and 1 are float and double; the small ones are 2, 14 and above.
fn rate(data_type: i32) -> u64 {
    if matches!(data_type, 0 | 1 | 4 | 5) { F32_OPS } else { HALF_OPS }
}

fn product(stream: u64, sizes: [i64; 4], rate: u64, output: u64) -> i32 {
    let operations = sizes.iter().map(|&length| length.max(1) as u64).fold(2u64, u64::saturating_mul);
    launch::library_work(stream, "cublas product", streams::KERNEL_FLOOR_NANOS.max(operations / rate), output);
    SUCCESS
}

/// A matrix layout: type, rows, columns. Kept in the handle's own memory.
fn create_layout(layout: Out<u64>, data_type: i32, rows: u64, columns: u64) -> i32 {
    layout.set(Box::into_raw(Box::new([data_type as u64, rows, columns, 1])) as u64);
    SUCCESS
}

/// `cublasLtMatmulHeuristicResult_t`: an algorithm of 64 bytes, its workspace, its state, waves, reserved.
const HEURISTIC_BYTES: usize = 96;

/// `libraryPropertyType`: major, minor, patch. cuBLAS counts 13.1.0 as 130100.
fn property(number: i32, version: i32) -> i32 {
    match number {
        0 => version / 10_000,
        1 => version / 100 % 100,
        _ => version % 100,
    }
}

macro_rules! products {
    ($($name:ident, $strided:ident, $rate:expr;)+) => {
        cuda_functions! {
            fn cublasCreate_v2(handle: Out<u64>) -> i32 { handle.set(new_handle(1)); SUCCESS }
            fn cublasSetStream_v2(handle: u64, stream: u64) -> i32 { set_stream(handle, stream) }
            fn cublasGetStream_v2(handle: u64, stream: Out<u64>) -> i32 { stream.set(streams::of_library(handle)); SUCCESS }
            fn cublasGetVersion_v2(_handle: u64, version: Out<i32>) -> i32 { version.set(card().cublas); SUCCESS }
            fn cublasGetProperty(number: i32, value: Out<i32>) -> i32 { value.set(property(number, card().cublas)); SUCCESS }
            fn cublasGetCudartVersion() -> u64 { card().cuda as u64 }
            fn cublasGemmEx(handle: u64, _a: i32, _b: i32, m: i32, n: i32, k: i32, _alpha: u64, _x: u64, data_type: i32, _lx: i32, _y: u64, _ty: i32, _ly: i32, _beta: u64, output: u64) -> i32 {
                product(streams::of_library(handle), [m.into(), n.into(), k.into(), 1], rate(data_type), output)
            }
            fn cublasGemmStridedBatchedEx(handle: u64, _a: i32, _b: i32, m: i32, n: i32, k: i32, _alpha: u64, _x: u64, data_type: i32, _lx: i32, _sx: i64, _y: u64, _ty: i32, _ly: i32, _sy: i64, _beta: u64, output: u64, _tz: i32, _lz: i32, _sz: i64, batch: i32) -> i32 {
                product(streams::of_library(handle), [m.into(), n.into(), k.into(), batch.into()], rate(data_type), output)
            }
            fn cublasLtCreate(handle: Out<u64>) -> i32 { handle.set(new_handle(2)); SUCCESS }
            fn cublasLtGetVersion() -> u64 { card().cublas as u64 }
            fn cublasLtGetCudartVersion() -> u64 { card().cuda as u64 }
            fn cublasLtGetProperty(number: i32, value: Out<i32>) -> i32 { value.set(property(number, card().cublas)); SUCCESS }
            fn cublasLtMatrixLayoutCreate(layout: Out<u64>, data_type: i32, rows: u64, columns: u64, _leading: i64) -> i32 { create_layout(layout, data_type, rows, columns) }
            fn cublasLtMatmulAlgoGetHeuristic(_handle: u64, _operation: u64, _a: u64, _b: u64, _c: u64, _d: u64, _preference: u64, wanted: i32, results: Out<[u8; HEURISTIC_BYTES]>, found: Out<i32>) -> i32 {
                found.set(i32::from(wanted > 0));
                if wanted <= 0 { return INVALID_VALUE; }
                // One algorithm that needs no workspace: PyTorch gives its own, whatever the algorithm asks for.
                results.set([0; HEURISTIC_BYTES]);
                SUCCESS
            }
            fn cublasLtMatmul(_handle: u64, _operation: u64, _alpha: u64, _a: u64, layout_a: In<u64>, _b: u64, _layout_b: u64, _beta: u64, _c: u64, _layout_c: u64, output: u64, layout_d: In<u64>, _algorithm: u64, _workspace: u64, _bytes: u64, stream: u64) -> i32 {
                let word = |layout: In<u64>, index: usize| layout.get_at(index).unwrap_or(1).max(1) as i64;
                let (rows, columns) = (word(layout_d, 1), word(layout_d, 2));
                let inner = word(layout_a, 1).saturating_mul(word(layout_a, 2)) / rows;
                product(stream, [rows, columns, inner, 1], rate(layout_a.get().unwrap_or(0) as i32), output)
            }
            $(
                fn $name(handle: u64, _a: i32, _b: i32, m: i32, n: i32, k: i32, _alpha: u64, _x: u64, _lx: i32, _y: u64, _ly: i32, _beta: u64, output: u64) -> i32 {
                    product(streams::of_library(handle), [m.into(), n.into(), k.into(), 1], $rate, output)
                }
                fn $strided(handle: u64, _a: i32, _b: i32, m: i32, n: i32, k: i32, _alpha: u64, _x: u64, _lx: i32, _sx: i64, _y: u64, _ly: i32, _sy: i64, _beta: u64, output: u64, _lz: i32, _sz: i64, batch: i32) -> i32 {
                    product(streams::of_library(handle), [m.into(), n.into(), k.into(), batch.into()], $rate, output)
                }
            )+
        }
    };
}

products! {
    cublasSgemm_v2, cublasSgemmStridedBatched, F32_OPS;
    cublasDgemm_v2, cublasDgemmStridedBatched, F32_OPS;
    cublasHgemm, cublasHgemmStridedBatched, HALF_OPS;
    cublasCgemm_v2, cublasCgemmStridedBatched, F32_OPS / 4;
    cublasZgemm_v2, cublasZgemmStridedBatched, F32_OPS / 4;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_is_its_own_and_keeps_its_stream() {
        let (mut first, mut second, mut stream) = (0, 0, 9);
        cublasCreate_v2(Out(&raw mut first));
        cublasCreate_v2(Out(&raw mut second));
        assert!(first != second && first != 0);
        set_stream(first, 77);
        cublasGetStream_v2(first, Out(&raw mut stream));
        assert_eq!((stream, streams::of_library(second)), (77, 0));
        assert_eq!((property(0, 130_100), property(1, 130_100), property(2, 130_100)), (13, 1, 0));
    }
}
