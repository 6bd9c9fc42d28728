//! Work on a real GPU: products are correct, only the intended blocks are written, and times are
//! those of real work. Without a GPU or cuBLAS, each test prints why it is skipped and passes.
//!
//! On a GPU machine: `cargo test --release --test gpu compute:: -- --nocapture --test-threads 1`

#![cfg(feature = "cuda")]
use std::sync::MutexGuard;

use crate::one_gpu::{fill, gpu, wrong_words};
use oomph::{
    base::{Address, Dtype, GIB, MIB, Nanos, ProductRole, StreamId, Work},
    device::{
        Compute, Device, PinnedHost,
        cuda::{CudaDevice, matrix_library},
    },
};

const HOME: StreamId = StreamId::DEFAULT;

/// Like `gpu`, with cuBLAS loaded.
fn gpu_with_products() -> Option<(CudaDevice, MutexGuard<'static, ()>)> {
    let found = gpu()?;
    match matrix_library() {
        Ok(_) => Some(found),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

/// The bit pattern of a small integer in a number format.
fn encode(dtype: Dtype, number: u32) -> Vec<u8> {
    let single = (number as f32).to_bits();
    match dtype {
        Dtype::F32 | Dtype::Tf32 => single.to_le_bytes().to_vec(),
        Dtype::Bf16 => ((single >> 16) as u16).to_le_bytes().to_vec(),
        // Rebias the exponent and drop the last bits of the fraction, which are zero.
        Dtype::F16 => (((single - ((127 - 15) << 23)) >> 13) as u16).to_le_bytes().to_vec(),
    }
}

/// A block that holds these numbers.
fn block_of(device: &mut CudaDevice, dtype: Dtype, numbers: impl Iterator<Item = u32>) -> (Address, u64) {
    let bytes: Vec<u8> = numbers.flat_map(|number| encode(dtype, number)).collect();
    let address = device.alloc(bytes.len() as u64).unwrap();
    device.write(HOME, address, &bytes).unwrap();
    (address, bytes.len() as u64)
}

fn contents(device: &mut CudaDevice, (address, bytes): (Address, u64)) -> Vec<u8> {
    let mut seen = vec![0; bytes as usize];
    device.read(HOME, address, &mut seen).unwrap();
    seen
}

/// Duration of a piece of work from an idle device to an idle device, best of five.
fn duration(device: &mut CudaDevice, work: &Work, operands: &[(Address, u64)]) -> Nanos {
    let mut best = Nanos(u64::MAX);
    for _ in 0..6 {
        device.synchronize().unwrap();
        let begin = device.now();
        device.launch(HOME, work, operands).unwrap();
        device.synchronize().unwrap();
        best = best.min(device.now().since(begin));
    }
    best
}

#[test]
fn products_come_out_right_in_every_format() {
    let Some((mut device, _guard)) = gpu_with_products() else { return };
    // Row i of the left matrix is i % 3 + 1, column j of the right one is j % 2 + 1: each element
    // of the result is k times their product.
    let (m, n, k) = (48u32, 80u32, 64u32);
    let ways = Dtype::ALL.into_iter().flat_map(|dtype| ProductRole::ALL.map(|role| (dtype, role)));
    for (dtype, role, batch) in ways.flat_map(|(dtype, role)| [(dtype, role, 1), (dtype, role, 3)]) {
        let (of_row, of_column) = (|i: u32| i % 3 + 1, |j: u32| j % 2 + 1);
        let left = |place: u32| match role {
            ProductRole::WeightGradient => of_row(place % m),
            ProductRole::Output | ProductRole::InputGradient => of_row(place / k % m),
        };
        let right = |place: u32| match role {
            ProductRole::Output => of_column(place / k % n),
            ProductRole::InputGradient | ProductRole::WeightGradient => of_column(place % n),
        };
        let left = block_of(&mut device, dtype, (0..batch * m * k).map(left));
        let right = block_of(&mut device, dtype, (0..batch * n * k).map(right));
        let result = block_of(&mut device, dtype, (0..batch * m * n).map(|_| 7));
        device.launch(HOME, &Work::Gemm { m, n, k, batch, dtype, role }, &[left, right, result]).unwrap();
        let expected: Vec<u8> = (0..batch * m)
            .flat_map(|i| (0..n).flat_map(move |j| encode(dtype, k * of_row(i % m) * of_column(j))))
            .collect();
        assert!(contents(&mut device, result) == expected, "{} x {batch}, {role:?}", dtype.name());
        println!("{} x {batch}, {role:?}: right", dtype.name());
        for (address, _) in [left, right, result] {
            device.free(address).unwrap();
        }
    }
    assert_eq!(device.held_bytes(), 0);
}

#[test]
fn short_operands_are_untouched() {
    let Some((mut device, _guard)) = gpu_with_products() else { return };
    let bytes = 64 * 1024;
    let short = [1, 2, 3].map(|key| (device.alloc(bytes).unwrap(), key));
    for (address, key) in short {
        fill(&mut device, HOME, address, bytes, key);
    }
    let operands = short.map(|(address, _)| (address, bytes));
    for dtype in Dtype::ALL {
        device
            .launch(HOME, &Work::Gemm { m: 512, n: 512, k: 512, batch: 2, dtype, role: ProductRole::Output }, &operands)
            .unwrap();
        device
            .launch(HOME, &Work::Gemm { m: 512, n: 512, k: 512, batch: 1, dtype, role: ProductRole::Output }, &[])
            .unwrap();
    }
    // Larger than any scratch memory, so a substitute kernel runs.
    let huge = Work::Gemm { m: 1 << 17, n: 1 << 17, k: 8, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
    device.launch(HOME, &huge, &operands).unwrap();
    let imaginary = [(Address(1 << 40), GIB); 3];
    device
        .launch(
            HOME,
            &Work::Gemm { m: 64, n: 64, k: 64, batch: 1, dtype: Dtype::F32, role: ProductRole::Output },
            &imaginary,
        )
        .unwrap();
    for (address, key) in short {
        assert_eq!(wrong_words(&mut device, HOME, address, bytes, key), 0, "block {key}");
    }
}

#[test]
fn attention_writes_its_result_and_nothing_else() {
    let Some((mut device, _guard)) = gpu_with_products() else { return };
    let (batch, heads, tokens, head_width) = (2, 4, 256, 64);
    for dtype in Dtype::ALL {
        let rows = u64::from(batch * heads * tokens * head_width) * dtype.bytes();
        let input = (device.alloc(3 * rows).unwrap(), 3 * rows);
        // One allocation; attention gets the middle of it.
        let arena = device.alloc(rows + 2 * MIB).unwrap();
        let result = (arena.offset(MIB), rows);
        for backward in [false, true] {
            fill(&mut device, HOME, input.0, input.1, 5);
            fill(&mut device, HOME, arena, rows + 2 * MIB, 6);
            let attention = Work::Attention {
                batch,
                heads,
                queries: tokens,
                keys: tokens,
                head_width,
                dtype,
                backward,
                causal: true,
            };
            device.launch(HOME, &attention, &[input, result]).unwrap();
            assert_eq!(wrong_words(&mut device, HOME, input.0, input.1, 5), 0, "{}: the input changed", dtype.name());
            let changed = wrong_words(&mut device, HOME, arena, rows + 2 * MIB, 6);
            assert!(changed > 0 && changed <= rows / 8, "{}: {changed} words changed", dtype.name());
        }
        device.free(input.0).unwrap();
        device.free(arena).unwrap();
    }
}

#[test]
fn elementwise_work_writes_the_last_operand() {
    let Some((mut device, _guard)) = gpu() else { return };
    let bytes = 32 * MIB;
    let blocks = [1, 2, 3, 4].map(|key| (device.alloc(bytes).unwrap(), key));
    for (address, key) in blocks {
        fill(&mut device, HOME, address, bytes, key);
    }
    let operands = blocks.map(|(address, _)| (address, bytes));
    device.launch(HOME, &Work::Reduction { bytes: 3 * bytes }, &operands).unwrap();
    for (address, key) in blocks {
        assert_eq!(wrong_words(&mut device, HOME, address, bytes, key), 0, "a reduction changed block {key}");
    }
    device.launch(HOME, &Work::Elementwise { bytes: 4 * bytes }, &operands).unwrap();
    for (address, key) in &blocks[..3] {
        assert_eq!(wrong_words(&mut device, HOME, *address, bytes, *key), 0, "input {key} changed");
    }
    let (result, key) = blocks[3];
    let words = bytes / 8;
    assert!(
        wrong_words(&mut device, HOME, result, bytes, key) > words / 10 * 9,
        "less than 90 % of the result was written"
    );
    // All elements of the result have a moderate magnitude.
    for pair in contents(&mut device, (result, bytes)).chunks_exact(2) {
        assert_eq!(pair[1] & 0x7f, 0x3f);
    }
}

#[test]
fn copies_use_the_given_pinned_memory() {
    let Some((mut device, _guard)) = gpu() else { return };
    let bytes = 96 * MIB;
    let [source, target] = [0; 2].map(|_| device.alloc(bytes).unwrap());
    let host = device.host_alloc(bytes).unwrap();
    let side = device.stream_create(0).unwrap();
    fill(&mut device, HOME, source, bytes, 9);
    device.synchronize().unwrap();
    device.launch(side, &Work::CopyOut { bytes, pinned: true }, &[(source, bytes), (host, bytes)]).unwrap();
    device.launch(side, &Work::CopyIn { bytes, pinned: true }, &[(host, bytes), (target, bytes)]).unwrap();
    assert_eq!(wrong_words(&mut device, side, target, bytes, 9), 0);
    device.host_free(host).unwrap();
}

#[test]
fn first_product_takes_library_memory() {
    let Some((mut device, _guard)) = gpu_with_products() else { return };
    let bytes = 4 * MIB;
    let operands = [0; 3].map(|_| (device.alloc(bytes).unwrap(), bytes));
    let before = (device.held_bytes(), device.overhead_bytes());
    device
        .launch(
            HOME,
            &Work::Gemm { m: 1024, n: 1024, k: 1024, batch: 1, dtype: Dtype::F32, role: ProductRole::Output },
            &operands,
        )
        .unwrap();
    device.synchronize().unwrap();
    let taken = device.overhead_bytes() - before.1;
    println!("the first product took {} MiB besides its operands", taken / MIB);
    assert_eq!(device.held_bytes(), before.0);
    assert!((32 * MIB..GIB).contains(&taken), "{taken} bytes");
}

#[test]
fn work_takes_the_time_of_real_work() {
    let Some((mut device, _guard)) = gpu_with_products() else { return };
    let side = 4096u32;
    let bytes = u64::from(side) * u64::from(side) * 4;
    let operands = [0; 3].map(|_| (device.alloc(bytes).unwrap(), bytes));
    for operand in operands {
        device.launch(HOME, &Work::CopyIn { bytes, pinned: true }, &[operand]).unwrap();
    }
    let mut speeds = Vec::new();
    for dtype in Dtype::ALL {
        let work = Work::Gemm { m: side, n: side, k: side, batch: 1, dtype, role: ProductRole::Output };
        let time = duration(&mut device, &work, &operands);
        let teraflops = work.flops() / time.0 as f64 / 1e3;
        println!("{}: {time}, {teraflops:.0} TFLOP/s", dtype.name());
        // Loose bounds for any GPU of this decade.
        assert!((1.0..5_000.0).contains(&teraflops), "{}: {teraflops}", dtype.name());
        speeds.push(teraflops);
    }
    assert!(speeds[2] >= speeds[0], "bf16 is slower than fp32");
    let [whole, quarter] = [side, side / 4].map(|k| {
        let work = Work::Gemm { m: side, n: side, k, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        duration(&mut device, &work, &operands).0 as f64
    });
    assert!((2.0..8.0).contains(&(whole / quarter)), "a quarter of the work: {whole} and {quarter} ns");
    let traffic = Work::Elementwise { bytes: 3 * bytes };
    let per_ns = traffic.traffic_bytes() / duration(&mut device, &traffic, &operands).0 as f64;
    println!("elementwise: {per_ns:.0} GB/s");
    assert!((50.0..20_000.0).contains(&per_ns), "{per_ns} GB/s");
}
