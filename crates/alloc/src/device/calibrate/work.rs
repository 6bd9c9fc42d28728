//! How long work takes: matrix products and attention by format and shape, passes over memory and copies by size.

use super::Products;
use crate::device::{
    Device, DeviceError,
    sim::{Profile, Rates, WorkTime},
};
use oomph_base::{Address, Dtype, GIB, KIB, MIB, Nanos, ProductRole, StreamId, Work};

/// Sides of square products.
const SQUARES: [u32; 6] = [256, 512, 1024, 2048, 4096, 8192];
/// `m x n x k` of a transformer's layers, forward and backward.
const LAYERS: [(u32, u32, u32); 5] =
    [(8192, 1024, 1024), (8192, 4096, 1024), (8192, 1024, 4096), (1024, 4096, 8192), (2048, 3072, 1024)];
/// The same for the output over a vocabulary that no kernel likes, whatever it is multiplied for.
const RAGGED: [(ProductRole, u32, u32, u32); 6] = [
    (ProductRole::Output, 2048, 50_257, 1024),
    (ProductRole::Output, 8192, 50_257, 1024),
    (ProductRole::InputGradient, 2048, 1024, 50_257),
    (ProductRole::InputGradient, 8192, 1024, 50_257),
    (ProductRole::WeightGradient, 50_257, 1024, 2048),
    (ProductRole::WeightGradient, 50_257, 1024, 8192),
];
/// Batch, heads, tokens and width of a head.
const ATTENTIONS: [(u32, u32, u32, u32); 4] =
    [(2, 16, 1024, 64), (8, 16, 1024, 64), (2, 16, 4096, 64), (4, 32, 2048, 128)];
/// Traffic of passes over memory.
const PASSES: [u64; 6] = [64 * KIB, MIB, 16 * MIB, 96 * MIB, GIB, 3 * GIB];
/// Sizes of copies.
const COPIES: [u64; 3] = [MIB, 16 * MIB, 256 * MIB];

/// One sample runs a piece of work again and again for about so long, and at most so often.
const SAMPLE: Nanos = Nanos(2_000_000);
const MOST_ROUNDS: u64 = 100;
/// How many samples are taken; of long work fewer.
const SAMPLES: usize = 21;
const SAMPLES_OF_LONG: usize = 7;
const LONG: Nanos = Nanos(10_000_000);
/// How many small kernels are queued to see how long one takes.
const KERNELS: u32 = 200;

const STREAM: StreamId = StreamId::DEFAULT;

/// Measures every piece of work whose operands fit into `room`. Everything is given back.
pub(super) fn measure(device: &mut dyn Device, room: u64, products: Products) -> Result<Vec<WorkTime>, DeviceError> {
    let mut times = Vec::new();
    if device.compute().is_none() {
        return Ok(times);
    }
    let multiplied = match products {
        Products::Real => multiplications(),
        Products::StoodInFor => Vec::new(),
    };
    for work in multiplied.into_iter().chain(movements()) {
        let sizes = operand_bytes(&work);
        if sizes.iter().sum::<u64>() > room {
            continue;
        }
        let operands: Vec<(Address, u64)> =
            sizes.into_iter().map(|bytes| Ok((device.alloc(bytes)?, bytes))).collect::<Result<_, DeviceError>>()?;
        // Fresh memory is often all zeros, which are multiplied faster than numbers are.
        for operand in &operands {
            launch(device, &Work::CopyIn { bytes: operand.1, pinned: true }, &[*operand])?;
        }
        times.push(time(device, work, &operands)?);
        for (address, _) in operands {
            device.free(address)?;
        }
    }
    Ok(times)
}

/// Products and attention in every format.
fn multiplications() -> Vec<Work> {
    let squares = SQUARES.map(|side| (side, side, side));
    let shapes = || {
        let aligned = squares.iter().chain(&LAYERS).map(|&(m, n, k)| (ProductRole::Output, m, n, k));
        aligned.chain(RAGGED)
    };
    let products = Dtype::ALL
        .into_iter()
        .flat_map(|dtype| shapes().map(move |(role, m, n, k)| Work::Gemm { m, n, k, batch: 1, dtype, role }));
    let attentions = Dtype::ALL.into_iter().flat_map(|dtype| {
        let ways = ATTENTIONS.into_iter().flat_map(|shape| [(shape, false), (shape, true)]);
        ways.map(move |((batch, heads, tokens, head_width), backward)| Work::Attention {
            batch,
            heads,
            queries: tokens,
            keys: tokens,
            head_width,
            dtype,
            backward,
            causal: true,
        })
    });
    products.chain(attentions).collect()
}

/// Passes over memory and copies.
fn movements() -> Vec<Work> {
    let passes = PASSES.into_iter().flat_map(|bytes| [Work::Elementwise { bytes }, Work::Reduction { bytes }]);
    let copies = COPIES.into_iter().flat_map(|bytes| {
        [true, false]
            .into_iter()
            .flat_map(move |pinned| [Work::CopyIn { bytes, pinned }, Work::CopyOut { bytes, pinned }])
    });
    passes.chain(copies).collect()
}

/// How long the blocks are that a piece of work reads and writes, the result last.
fn operand_bytes(work: &Work) -> Vec<u64> {
    match *work {
        Work::Gemm { m, n, k, batch, dtype, .. } => {
            let [m, n, k, batch] = [m, n, k, batch].map(u64::from);
            [m * k, n * k, m * n].map(|numbers| numbers * batch * dtype.bytes()).to_vec()
        }
        Work::Attention { batch, heads, queries, head_width, dtype, .. } => {
            let rows = [batch, heads, queries, head_width].map(u64::from).iter().product::<u64>() * dtype.bytes();
            vec![3 * rows, 3 * rows]
        }
        // As an addition has them: two that are read and one that is written.
        Work::Elementwise { bytes } => vec![bytes / 3; 3],
        Work::Reduction { bytes } => vec![bytes, 512],
        Work::CopyIn { bytes, .. } | Work::CopyOut { bytes, .. } => vec![bytes],
        Work::Spin { .. } => Vec::new(),
    }
}

fn launch(device: &mut dyn Device, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
    match device.compute() {
        Some(compute) => compute.launch(STREAM, work, operands),
        None => Ok(()),
    }
}

/// How long a piece of work takes when it is run again and again.
fn time(device: &mut dyn Device, work: Work, operands: &[(Address, u64)]) -> Result<WorkTime, DeviceError> {
    // The first run warms up: libraries load their kernels, staging memory is made, pages are touched.
    repeat(device, &work, operands, 1)?;
    let once = repeat(device, &work, operands, 1)?;
    let rounds = (SAMPLE.0 / once.0.max(1)).clamp(1, MOST_ROUNDS);
    let count = if once > LONG { SAMPLES_OF_LONG } else { SAMPLES };
    let mut samples = (0..count).map(|_| repeat(device, &work, operands, rounds)).collect::<Result<Vec<Nanos>, _>>()?;
    samples.sort_unstable();
    let microseconds = |place: usize| samples[place].0 as f64 / rounds as f64 / 1e3;
    Ok(WorkTime {
        median_us: microseconds(count / 2),
        p99_us: Some(microseconds((count * 99 / 100).min(count - 1))),
        work,
    })
}

/// How long so many rounds take, from an idle device to an idle device.
fn repeat(
    device: &mut dyn Device,
    work: &Work,
    operands: &[(Address, u64)],
    rounds: u64,
) -> Result<Nanos, DeviceError> {
    device.synchronize()?;
    let begin = device.now();
    for _ in 0..rounds {
        launch(device, work, operands)?;
    }
    device.synchronize()?;
    Ok(device.now().since(begin))
}

/// How fast the device is in general: the fastest of each kind. What was not measured is an H200's.
pub(super) fn rates(device: &mut dyn Device, times: &[WorkTime]) -> Result<Rates, DeviceError> {
    let known = Profile::h200().rates;
    let fastest = |otherwise: f64, is_it: &dyn Fn(&Work) -> bool| {
        let speeds = times.iter().filter(|time| is_it(&time.work)).map(WorkTime::per_ns);
        speeds
            .fold(None, |best: Option<f64>, speed| Some(best.map_or(speed, |best| best.max(speed))))
            .unwrap_or(otherwise)
    };
    let product = |otherwise, wanted: Dtype| {
        fastest(otherwise, &|work| matches!(work, Work::Gemm { dtype, .. } if *dtype == wanted))
    };
    // The longest pass, because shorter ones stay in the cache.
    let longest = times.iter().rfind(|time| matches!(time.work, Work::Elementwise { .. }));
    let copied_in = |otherwise, wanted: bool| {
        fastest(otherwise, &|work| matches!(work, Work::CopyIn { pinned, .. } if *pinned == wanted))
    };
    let copied_out = |otherwise, wanted: bool| {
        fastest(otherwise, &|work| matches!(work, Work::CopyOut { pinned, .. } if *pinned == wanted))
    };
    Ok(Rates {
        f32_flops_per_ns: product(known.f32_flops_per_ns, Dtype::F32),
        tf32_flops_per_ns: product(known.tf32_flops_per_ns, Dtype::Tf32),
        half_flops_per_ns: product(known.half_flops_per_ns, Dtype::Bf16),
        memory_bytes_per_ns: longest.map_or(known.memory_bytes_per_ns, WorkTime::per_ns),
        pinned_copy_in_bytes_per_ns: copied_in(known.pinned_copy_in_bytes_per_ns, true),
        pinned_copy_out_bytes_per_ns: copied_out(known.pinned_copy_out_bytes_per_ns, true),
        pageable_copy_in_bytes_per_ns: copied_in(known.pageable_copy_in_bytes_per_ns, false),
        pageable_copy_out_bytes_per_ns: copied_out(known.pageable_copy_out_bytes_per_ns, false),
        kernel_floor: kernel_floor(device)?.unwrap_or(known.kernel_floor),
    })
}

/// What the smallest kernel takes when many are queued.
fn kernel_floor(device: &mut dyn Device) -> Result<Option<Nanos>, DeviceError> {
    if device.compute().is_none() {
        return Ok(None);
    }
    let operand = [(device.alloc(512)?, 512)];
    let time = repeat(device, &Work::Elementwise { bytes: 512 }, &operand, KERNELS.into())?;
    device.free(operand[0].0)?;
    Ok(Some(Nanos(time.0 / u64::from(KERNELS))))
}
