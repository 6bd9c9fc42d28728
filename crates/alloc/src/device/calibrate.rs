//! Measures a device: the cost of every driver call by size, the duration of work by kind and size, how memory that was given
//! back is cleared, and the memory that is taken before a program allocates anything.
//!
//! `doctor --calibrate` calls this; the result is a profile of the simulated device. Everything
//! goes through [`Device`], so a simulated device can be measured too and must yield its own
//! profile.

use std::{thread, time::Duration};

use super::{
    CallKind, Device, DeviceClock, DeviceError, MemoryInfo, PoolId, PoolSettings, PoolUsage,
    cuda::Footprint,
    sim::{ClearingRates, Cost, CostCondition, Profile, ProfileFile, Rates, WorkTime},
    wrap::{DriverCall, ReplyValue, value_of},
};
use oomph_base::{Address, Dtype, GIB, KIB, MIB, Nanos, ProductRole, StreamId, Work, round_up};
use oomph_driver::RANGE_BYTES;

/// What was measured on a device.
#[derive(Clone, Debug)]
pub struct Calibration {
    costs: Vec<Cost>,
    work: Vec<WorkTime>,
    rates: Rates,
    clearing: Option<ClearingRates>,
    launch_queue: usize,
}

/// Whether matrix products run on a device, or are replaced by waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductSupport {
    /// They run, and are measured.
    Real,
    /// They do not run; the rates of a built-in profile are used.
    Replaced,
}

/// Kind, condition, size and cost of a call.
type CallSample = (CallKind, CostCondition, u64, Nanos);

/// Measures a device that is otherwise idle. Everything is given back except a few streams.
pub fn calibrate(device: &mut dyn Device, products: ProductSupport) -> Result<Calibration, DeviceError> {
    let room = device.memory_info()?.free / 4;
    let costs = measure_calls(device, room)?;
    let work = measure_work(device, room, products)?;
    let rates = rates(device, &work)?;
    let clearing = clearing(device, room)?;
    let launch_queue = launch_queue(device)?;
    Ok(Calibration { costs, work, rates, clearing, launch_queue })
}

impl Calibration {
    /// The profile of the measured device. Where products did not run, their rates are those of a
    /// built-in profile.
    #[must_use]
    pub fn into_profile(
        self,
        name: &str,
        driver: Option<String>,
        footprint: Footprint,
        device: &dyn Device,
    ) -> ProfileFile {
        let props = device.props();
        ProfileFile {
            name: name.to_owned(),
            vendor_name: props.name.clone(),
            driver,
            total_bytes: props.total_bytes,
            context_bytes: props.context_bytes,
            library_bytes: footprint.library_bytes,
            workspace_bytes: Some(footprint.workspace_bytes),
            kernel_bytes: Some(footprint.kernel_bytes),
            page_bytes: props.page_bytes,
            granularity_bytes: props.granularity_bytes,
            small_allocations_per_page: None,
            launch_queue: self.launch_queue,
            rates: self.rates,
            clearing: self.clearing,
            work: self.work,
            cost: self.costs,
        }
    }
}

const STREAM: StreamId = StreamId::DEFAULT;
/// Sizes at which calls about memory are measured.
const SIZES: [u64; 9] = [512, 64 * KIB, MIB, 2 * MIB, 20 * MIB, 128 * MIB, 512 * MIB, 2 * GIB, 8 * GIB];
/// Sizes of blocks that share a page.
const SHARED_SIZES: [u64; 2] = [512, 64 * KIB];
/// Page-locked memory is slow to make, and host memory is shared with other programs.
const MOST_HOST_BYTES: u64 = 128 * MIB;
/// What the host works on between two calls, in bytes. Calls then cost what they cost in replays on an H200: about 1.4
/// times as much as in a loop where they enter the kernel (access to 2 MiB 29 us, not 20), twice as much where they do
/// not. From 512 KiB to 1.5 MiB they cost the same; 2 MiB displace all of the processor's second cache, and calls cost
/// three times as much.
const WORKING_SET: usize = 768 << 10;
/// How often everything is measured, so that a busy moment of the machine does not decide.
const PASSES_OF_CALLS: usize = 3;
/// How often a call is measured in a pass; the largest sizes less often.
const CALL_SAMPLES: usize = 35;
const SAMPLES_OF_LARGE: usize = 5;
/// How often a pool is trimmed, which is slow for large ones.
const TRIMS: usize = 3;
/// Streams live as long as the device, so only a few are made.
const STREAMS: usize = 3;

/// Measures every call at every size up to `room`. Everything is given back except a few streams.
fn measure_calls(device: &mut dyn Device, room: u64) -> Result<Vec<Cost>, DeviceError> {
    let sizes: Vec<u64> = SIZES.into_iter().filter(|&bytes| bytes <= room).collect();
    let mut meter = CallMeter::new(device);
    // Some allocators take half of the memory at once. It comes first: later it would wait until the driver has cleared
    // what was freed.
    let half = 2 * room / GIB * GIB;
    if half > 0 {
        // The first call of a process takes longer.
        let address = meter.device.alloc(MIB)?;
        meter.device.free(address)?;
        meter.take_and_give_back(&[half])?;
    }
    for _ in 0..PASSES_OF_CALLS {
        meter.plain_memory(&sizes, room)?;
        meter.virtual_memory(&sizes)?;
        meter.pools(&sizes)?;
        meter.pinned_host(&sizes)?;
        meter.streams_and_events()?;
    }
    Ok(meter.costs())
}

/// Makes calls and records their costs from the device's ledger.
struct CallMeter<'a> {
    device: &'a mut dyn Device,
    samples: Vec<CallSample>,
    /// What the host reads and writes between two calls.
    working_set: Vec<u64>,
}

impl CallMeter<'_> {
    fn new(device: &mut dyn Device) -> CallMeter<'_> {
        CallMeter { device, samples: Vec::new(), working_set: vec![0; WORKING_SET / size_of::<u64>()] }
    }

    /// Makes a call whose cost belongs to `bytes`.
    fn time<T: ReplyValue>(&mut self, bytes: u64, call: DriverCall) -> Result<T, DeviceError> {
        self.time_under(CostCondition::Usual, bytes, call)
    }

    /// Makes a call whose cost belongs to a condition and to `bytes`.
    fn time_under<T: ReplyValue>(
        &mut self,
        condition: CostCondition,
        bytes: u64,
        call: DriverCall,
    ) -> Result<T, DeviceError> {
        self.work_on_host();
        let kind = call.kind();
        let before = self.device.ledger().of(kind).time;
        let value = value_of(kind, call.make(&mut *self.device))?;
        self.samples.push((kind, condition, bytes, self.device.ledger().of(kind).time.since(before)));
        Ok(value)
    }

    /// Between two calls a program works on its own memory, which leaves the driver's code and data out of the caches of
    /// the processor.
    fn work_on_host(&mut self) {
        for number in &mut self.working_set {
            *number = number.wrapping_add(1);
        }
        std::hint::black_box(&mut self.working_set);
    }

    /// Blocks of at least a page are kept while others are allocated, as programs take memory. Where each allocation of
    /// 1 GiB follows the free of another, an H200 needs 1.1 to 4.5 times as much time.
    fn plain_memory(&mut self, sizes: &[u64], room: u64) -> Result<(), DeviceError> {
        let page = self.device.props().page_bytes;
        let (small, others): (Vec<u64>, Vec<u64>) = sizes.iter().partition(|&&bytes| bytes < page);
        let (medium, large): (Vec<u64>, Vec<u64>) = others.into_iter().partition(|&bytes| bytes < GIB);
        for bytes in small {
            for _ in 0..CALL_SAMPLES {
                self.take_and_give_back(&[bytes])?;
            }
        }
        for bytes in medium {
            self.take_and_give_back(&vec![bytes; CALL_SAMPLES.min((room / bytes) as usize)])?;
        }
        for _ in 0..SAMPLES_OF_LARGE {
            self.take_and_give_back(&large)?;
        }
        // A block that stays shares its page with the others.
        let neighbour = self.device.alloc(SHARED_SIZES[0])?;
        for bytes in SHARED_SIZES {
            for _ in 0..CALL_SAMPLES {
                let address = self.time_under(CostCondition::SharedPage, bytes, DriverCall::Alloc { bytes })?;
                self.time_under::<()>(CostCondition::SharedPage, bytes, DriverCall::Free { address })?;
            }
        }
        self.device.free(neighbour)?;
        for _ in 0..CALL_SAMPLES {
            self.time::<MemoryInfo>(0, DriverCall::MemoryInfo {})?;
        }
        Ok(())
    }

    /// Allocates blocks of these sizes, and then frees them.
    fn take_and_give_back(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        let mut blocks = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            blocks.push((bytes, self.time(bytes, DriverCall::Alloc { bytes })?));
        }
        for (bytes, address) in blocks {
            self.time::<()>(bytes, DriverCall::Free { address })?;
        }
        Ok(())
    }

    fn virtual_memory(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        if self.device.virtual_memory().is_err() {
            return Ok(());
        }
        let granularity = self.device.props().granularity_bytes;
        for &bytes in sizes.iter().filter(|bytes| bytes.is_multiple_of(granularity)) {
            for _ in 0..rounds(bytes) {
                let address = self.time(bytes, DriverCall::Reserve { bytes })?;
                let physical = self.time(bytes, DriverCall::Create { bytes })?;
                self.time::<()>(bytes, DriverCall::Map { address, bytes, physical })?;
                self.time::<()>(bytes, DriverCall::SetAccess { address, bytes })?;
                self.time::<()>(bytes, DriverCall::Unmap { address, bytes })?;
                self.time::<()>(bytes, DriverCall::Release { physical })?;
                self.time::<()>(bytes, DriverCall::AddressFree { address, bytes })?;
            }
        }
        // What an expandable segment reserves: total memory plus an eighth.
        let total = self.device.props().total_bytes;
        let bytes = round_up(total.saturating_add(total / 8), granularity.max(1));
        for _ in 0..SAMPLES_OF_LARGE {
            let address = self.time(bytes, DriverCall::Reserve { bytes })?;
            self.time::<()>(bytes, DriverCall::AddressFree { address, bytes })?;
        }
        Ok(())
    }

    /// Allocations from a pool that already has the memory, as in the middle of a run, and from one that has none.
    fn pools(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        if self.device.stream_ordered_pools().is_err() {
            return Ok(());
        }
        let settings = PoolSettings { release_threshold: u64::MAX, ..PoolSettings::DRIVER_DEFAULT };
        for &bytes in sizes {
            let pool = self.time(0, DriverCall::PoolCreate { max_bytes: None })?;
            self.time::<()>(0, DriverCall::PoolConfigure { pool, settings })?;
            self.fill_pool(pool, bytes)?;
            for _ in 0..CALL_SAMPLES {
                let address = self.time(bytes, DriverCall::AllocAsync { pool, bytes, stream: STREAM })?;
                self.time::<()>(bytes, DriverCall::FreeAsync { address, stream: STREAM })?;
                self.time::<PoolUsage>(0, DriverCall::PoolUsage { pool })?;
            }
            for _ in 0..TRIMS {
                self.device.synchronize()?;
                // A pool takes more than was requested, and gives that back.
                let held = self.device.stream_ordered_pools()?.pool_usage(pool)?.reserved;
                self.time::<()>(held, DriverCall::PoolTrim { pool, keep_bytes: 0 })?;
                self.fill_pool(pool, bytes)?;
            }
            self.device.synchronize()?;
            self.time::<()>(0, DriverCall::PoolDestroy { pool })?;
        }
        Ok(())
    }

    /// Makes an empty pool take memory from the device.
    fn fill_pool(&mut self, pool: PoolId, bytes: u64) -> Result<(), DeviceError> {
        // A pool takes whole ranges from the device. The smallest one has every size below it.
        let grown = round_up(bytes, RANGE_BYTES);
        let alloc = DriverCall::AllocAsync { pool, bytes, stream: STREAM };
        let address = self.time_under(CostCondition::PoolGrows, grown, alloc)?;
        self.device.stream_ordered_pools()?.free_async(address, STREAM)
    }

    fn pinned_host(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        for &bytes in sizes.iter().filter(|&&bytes| bytes <= MOST_HOST_BYTES) {
            for _ in 0..SAMPLES_OF_LARGE {
                let Ok(host) = self.device.pinned_host() else { return Ok(()) };
                // The first use of a size is not measured.
                let first = host.host_alloc(bytes)?;
                host.host_free(first)?;
                let address = self.time(bytes, DriverCall::HostAlloc { bytes })?;
                self.time::<()>(bytes, DriverCall::HostFree { address })?;
            }
        }
        Ok(())
    }

    /// Calls that many allocators make with every free, one soon after the other, so that caches keep them.
    fn streams_and_events(&mut self) -> Result<(), DeviceError> {
        let working_set = std::mem::take(&mut self.working_set);
        for _ in 0..STREAMS {
            self.time::<(StreamId, u64)>(0, DriverCall::StreamCreate { known_as: 0 })?;
        }
        for _ in 0..CALL_SAMPLES {
            let event = self.time(0, DriverCall::EventCreate {})?;
            self.time::<()>(0, DriverCall::EventRecord { event, stream: STREAM })?;
            self.time::<()>(0, DriverCall::StreamWaitEvent { stream: StreamId(1), event })?;
            self.device.synchronize()?;
            self.time::<bool>(0, DriverCall::EventQuery { event })?;
            self.time::<()>(0, DriverCall::EventSynchronize { event })?;
            self.time::<()>(0, DriverCall::StreamSynchronize { stream: STREAM })?;
            self.time::<()>(0, DriverCall::Synchronize {})?;
            self.time::<()>(0, DriverCall::EventDestroy { event })?;
            if self.device.compute().is_ok() {
                let work = Work::Spin { nanos: Nanos::ZERO };
                self.time::<()>(0, DriverCall::Launch { stream: STREAM, work, operands: Vec::new() })?;
            }
        }
        self.working_set = working_set;
        Ok(())
    }

    /// Median and 99th percentile of every call and size.
    fn costs(&mut self) -> Vec<Cost> {
        self.samples.sort_unstable();
        let groups = self.samples.chunk_by(|a, b| (a.0, a.1, a.2) == (b.0, b.1, b.2));
        let microseconds = |sample: &CallSample| sample.3.0 as f64 / 1e3;
        groups
            .map(|group| Cost {
                call: format!("{} {}", group[0].0.name(), group[0].1.words()).trim_end().to_owned(),
                bytes: group[0].2,
                median_us: microseconds(&group[group.len() / 2]),
                p99_us: Some(microseconds(&group[(group.len() * 99 / 100).min(group.len() - 1)])),
            })
            .collect()
    }
}

/// The largest sizes are measured less often.
fn rounds(bytes: u64) -> usize {
    if bytes < GIB { CALL_SAMPLES } else { SAMPLES_OF_LARGE }
}

/// Sides of square products.
const SQUARES: [u32; 6] = [256, 512, 1024, 2048, 4096, 8192];
/// `m x n x k` of a transformer's layers, forward and backward; the last ones with the few rows of a micro-batch.
const LAYERS: [(u32, u32, u32); 11] = [
    (8192, 1024, 1024),
    (8192, 4096, 1024),
    (8192, 1024, 4096),
    (1024, 4096, 8192),
    (2048, 3072, 1024),
    (2048, 1024, 1024),
    (2048, 4096, 1024),
    (2048, 1024, 4096),
    (1024, 3072, 1024),
    (1024, 4096, 1024),
    (1024, 1024, 4096),
];
/// The same for a vocabulary with unaligned rows, in every role.
const RAGGED: [(ProductRole, u32, u32, u32); 9] = [
    (ProductRole::Output, 1024, 50_257, 1024),
    (ProductRole::Output, 2048, 50_257, 1024),
    (ProductRole::Output, 8192, 50_257, 1024),
    (ProductRole::InputGradient, 1024, 1024, 50_257),
    (ProductRole::InputGradient, 2048, 1024, 50_257),
    (ProductRole::InputGradient, 8192, 1024, 50_257),
    (ProductRole::WeightGradient, 50_257, 1024, 1024),
    (ProductRole::WeightGradient, 50_257, 1024, 2048),
    (ProductRole::WeightGradient, 50_257, 1024, 8192),
];
/// Pairs of channels, and numbers of pixels, of convolutions as products.
const CHANNELS: [(u32, u32); 4] = [(64, 64), (64, 1024), (256, 256), (256, 4096)];
const PIXELS: [u32; 3] = [4096, 65_536, 262_144];
/// The same of a first layer, which sees 7 x 7 pixels of three colours.
const FIRST_CHANNELS: (u32, u32) = (64, 3 * 7 * 7);
const FIRST_PIXELS: [u32; 2] = [262_144, 1_048_576];
/// Batch, heads, tokens and width of a head.
const ATTENTIONS: [(u32, u32, u32, u32); 6] =
    [(1, 16, 256, 64), (1, 16, 1024, 64), (2, 16, 1024, 64), (8, 16, 1024, 64), (2, 16, 4096, 64), (4, 32, 2048, 128)];
/// Traffic of passes over memory.
const PASSES: [u64; 11] =
    [64 * KIB, MIB, 8 * MIB, 24 * MIB, 48 * MIB, 96 * MIB, 192 * MIB, 384 * MIB, 768 * MIB, 1536 * MIB, 3 * GIB];
/// Sizes of copies.
const COPIES: [u64; 5] = [4 * KIB, 128 * KIB, MIB, 16 * MIB, 256 * MIB];

/// Work runs for about this long before it is measured, and at most this often: in a training the device is never idle, and
/// large products then run at a lower clock.
const WARM_UP: Nanos = Nanos(100_000_000);
const MOST_WARM_UP: u64 = 2000;
/// One sample repeats a piece of work for about this long, and at most this often.
const SAMPLE: Nanos = Nanos(2_000_000);
const MOST_ROUNDS: u64 = 100;
/// The number of samples; fewer for long work.
const WORK_SAMPLES: usize = 21;
const SAMPLES_OF_LONG: usize = 7;
const LONG: Nanos = Nanos(10_000_000);
/// Work is repeated on copies of its operands that have this many bytes together, or as many copies as the next number
/// says: in a program, other work comes between, so that operands are no longer in the cache. An H200's cache has 50 MiB.
const UNCACHED_BYTES: u64 = 256 * MIB;
const MOST_COPIES: u64 = 64;
/// The number of small kernels that are queued to measure one.
const KERNELS: u32 = 200;

/// Measures all work whose operands fit into `room`. Everything is given back.
fn measure_work(device: &mut dyn Device, room: u64, products: ProductSupport) -> Result<Vec<WorkTime>, DeviceError> {
    let mut times = Vec::new();
    if device.compute().is_err() {
        return Ok(times);
    }
    let multiplied = match products {
        ProductSupport::Real => multiplications(),
        ProductSupport::Replaced => Vec::new(),
    };
    for work in multiplied.into_iter().chain(movements()) {
        let sizes = operand_bytes(&work);
        if sizes.iter().sum::<u64>() > room {
            continue;
        }
        let copies = UNCACHED_BYTES.min(room).div_ceil(sizes.iter().sum::<u64>().max(1)).min(MOST_COPIES);
        let mut operands: Vec<Operands> = Vec::new();
        for _ in 0..copies {
            let one = sizes.iter().map(|&bytes| Ok((device.alloc(bytes)?, bytes)));
            operands.push(one.collect::<Result<_, DeviceError>>()?);
        }
        // Fresh memory is often all zeros, which are multiplied faster than other numbers.
        for &operand in operands.iter().flatten() {
            launch(device, &Work::CopyIn { bytes: operand.1, pinned: true }, &[operand])?;
        }
        times.push(time(device, work, &operands)?);
        for (address, _) in operands.into_iter().flatten() {
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
        aligned.chain(RAGGED).chain(convolutions())
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

/// The products that stand for convolutions: the output, the gradient of the input, and that of the filter.
fn convolutions() -> impl Iterator<Item = (ProductRole, u32, u32, u32)> {
    let layers = CHANNELS.into_iter().flat_map(|channels| PIXELS.map(|pixels| (channels, pixels)));
    let passes = layers.flat_map(|((a, b), pixels)| {
        let input_gradient = (a != b).then_some((pixels, b, a));
        [Some((pixels, a, b)), input_gradient, Some((a, b, pixels))].into_iter().flatten()
    });
    // The gradient of the images is not computed.
    let (a, b) = FIRST_CHANNELS;
    let first = FIRST_PIXELS.into_iter().flat_map(move |pixels| [(pixels, a, b), (a, b, pixels)]);
    passes.chain(first).map(|(m, n, k)| (ProductRole::Output, m, n, k))
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

/// The blocks that a piece of work reads and writes.
type Operands = Vec<(Address, u64)>;

/// The sizes of the blocks that a piece of work reads and writes, the result last.
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
        // Like an addition: two blocks are read and one is written.
        Work::Elementwise { bytes } => vec![bytes / 3; 3],
        Work::Reduction { bytes } => vec![bytes, 512],
        Work::CopyIn { bytes, .. } | Work::CopyOut { bytes, .. } => vec![bytes],
        Work::Spin { .. } => Vec::new(),
    }
}

fn launch(device: &mut dyn Device, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
    device.compute()?.launch(STREAM, work, operands)
}

/// How long a piece of work takes when it is repeated.
fn time(device: &mut dyn Device, work: Work, operands: &[Operands]) -> Result<WorkTime, DeviceError> {
    // The first runs warm up: libraries load their kernels, staging memory is made.
    repeat(device, &work, operands, 1)?;
    let once = repeat(device, &work, operands, 1)?;
    repeat(device, &work, operands, (WARM_UP.0 / once.0.max(1)).min(MOST_WARM_UP))?;
    let rounds = (SAMPLE.0 / once.0.max(1)).clamp(1, MOST_ROUNDS);
    let count = if once > LONG { SAMPLES_OF_LONG } else { WORK_SAMPLES };
    let mut samples = (0..count).map(|_| repeat(device, &work, operands, rounds)).collect::<Result<Vec<Nanos>, _>>()?;
    samples.sort_unstable();
    let microseconds = |place: usize| samples[place].0 as f64 / rounds as f64 / 1e3;
    Ok(WorkTime {
        median_us: microseconds(count / 2),
        p99_us: Some(microseconds((count * 99 / 100).min(count - 1))),
        work,
    })
}

/// How long that many rounds take, from an idle device to an idle device. Copies of the operands take turns.
fn repeat(device: &mut dyn Device, work: &Work, copies: &[Operands], rounds: u64) -> Result<Nanos, DeviceError> {
    device.synchronize()?;
    let begin = device.now();
    for operands in copies.iter().cycle().take(rounds as usize) {
        launch(device, work, operands)?;
    }
    device.synchronize()?;
    Ok(device.now().since(begin))
}

/// The general speed of the device: the fastest of each kind. What was not measured is taken from
/// an H200.
fn rates(device: &mut dyn Device, times: &[WorkTime]) -> Result<Rates, DeviceError> {
    let known = Profile::h200().rates;
    let fastest = |otherwise: f64, is_it: fn(&Work) -> bool| {
        times.iter().filter(|time| is_it(&time.work)).map(WorkTime::per_ns).reduce(f64::max).unwrap_or(otherwise)
    };
    // The longest pass, because short ones stay in the cache.
    let longest = times.iter().rfind(|time| matches!(time.work, Work::Elementwise { .. }));
    Ok(Rates {
        f32_flops_per_ns: fastest(known.f32_flops_per_ns, |work| matches!(work, Work::Gemm { dtype: Dtype::F32, .. })),
        tf32_flops_per_ns: fastest(known.tf32_flops_per_ns, |work| {
            matches!(work, Work::Gemm { dtype: Dtype::Tf32, .. })
        }),
        half_flops_per_ns: fastest(known.half_flops_per_ns, |work| {
            matches!(work, Work::Gemm { dtype: Dtype::Bf16, .. })
        }),
        memory_bytes_per_ns: longest.map_or(known.memory_bytes_per_ns, WorkTime::per_ns),
        pinned_copy_in_bytes_per_ns: fastest(known.pinned_copy_in_bytes_per_ns, |work| {
            matches!(work, Work::CopyIn { pinned: true, .. })
        }),
        pinned_copy_out_bytes_per_ns: fastest(known.pinned_copy_out_bytes_per_ns, |work| {
            matches!(work, Work::CopyOut { pinned: true, .. })
        }),
        pageable_copy_in_bytes_per_ns: fastest(known.pageable_copy_in_bytes_per_ns, |work| {
            matches!(work, Work::CopyIn { pinned: false, .. })
        }),
        pageable_copy_out_bytes_per_ns: fastest(known.pageable_copy_out_bytes_per_ns, |work| {
            matches!(work, Work::CopyOut { pinned: false, .. })
        }),
        kernel_floor: kernel_floor(device)?.unwrap_or(known.kernel_floor),
    })
}

/// What the smallest kernel takes when many are queued.
fn kernel_floor(device: &mut dyn Device) -> Result<Option<Nanos>, DeviceError> {
    if device.compute().is_err() {
        return Ok(None);
    }
    let operand = [vec![(device.alloc(512)?, 512)]];
    let time = repeat(device, &Work::Elementwise { bytes: 512 }, &operand, KERNELS.into())?;
    device.free(operand[0][0].0)?;
    Ok(Some(Nanos(time.0 / u64::from(KERNELS))))
}

/// Memory is given back in blocks of this size.
const GIVEN_BACK: u64 = 64 * MIB;
/// With fewer blocks, clearing is too short to be measured.
const LEAST_GIVEN_BACK: u64 = 64;
/// What is copied while the driver clears memory.
const COPIED: u64 = 32 * MIB;
/// A short copy, by which the end of the clearing is found, and how many of them are tried at most.
const SHORT_COPY: u64 = 4 * MIB;
const MOST_SHORT_COPIES: usize = 1_000;
/// A copy is slow when it takes more than this percentage of its time at rest.
const SLOW_PERCENT: u64 = 150;
/// After this time all memory is cleared.
const CLEARED: Nanos = Nanos(500_000_000);
const PASSES_OF_CLEARING: usize = 5;

/// How fast the driver clears memory that was given back, and how fast copies from the host are meanwhile. `None` where that
/// cannot be seen: the device has little memory, or copies are not slower.
fn clearing(device: &mut dyn Device, room: u64) -> Result<Option<ClearingRates>, DeviceError> {
    let blocks = room / GIVEN_BACK;
    if device.compute().is_err() || blocks < LEAST_GIVEN_BACK {
        return Ok(None);
    }
    let target = device.alloc(COPIED)?;
    let copy = |device: &mut dyn Device, bytes: u64, pinned: bool| {
        repeat(device, &Work::CopyIn { bytes, pinned }, &[vec![(target, bytes)]], 1)
    };
    let mut at_rest = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..PASSES_OF_CLEARING {
        // As after `give_back`: the host has done nothing for a while, and copies take longer than one after the other.
        for (times, (bytes, pinned)) in at_rest.iter_mut().zip([(COPIED, true), (COPIED, false), (SHORT_COPY, false)]) {
            wait(device, CLEARED);
            times.push(copy(device, bytes, pinned)?);
        }
    }
    let [pinned_at_rest, pageable_at_rest, short_at_rest] = at_rest.map(median);
    let mut times = Vec::new();
    for _ in 0..PASSES_OF_CLEARING {
        let begin = give_back(device, blocks)?;
        let given_back = device.now().since(begin);
        let mut copies = Vec::new();
        while copies.len() < MOST_SHORT_COPIES && copies.last().is_none_or(|&took| is_slow(took, short_at_rest)) {
            copies.push(copy(device, SHORT_COPY, false)?);
        }
        if copies.len() == MOST_SHORT_COPIES {
            device.free(target)?;
            return Ok(None);
        }
        times.push(given_back + slow_part(&copies, short_at_rest));
    }
    let cleared_after = median(times);
    let mut slow = [Vec::new(), Vec::new()];
    for _ in 0..PASSES_OF_CLEARING {
        for (times, (pinned, at_rest)) in slow.iter_mut().zip([(true, pinned_at_rest), (false, pageable_at_rest)]) {
            let begin = give_back(device, blocks)?;
            let left = cleared_after.since(device.now().since(begin));
            times.push(slow_time(copy(device, COPIED, pinned)?, at_rest, left));
        }
    }
    device.free(target)?;
    let [pinned, pageable] = slow.map(median);
    let per_ns = |bytes: u64, time: Nanos| bytes as f64 / time.0.max(1) as f64;
    Ok(is_slow(pageable, pageable_at_rest).then(|| ClearingRates {
        bytes_per_ns: per_ns(blocks * GIVEN_BACK, cleared_after),
        pinned_copy_in_bytes_per_ns: per_ns(COPIED, pinned),
        pageable_copy_in_bytes_per_ns: per_ns(COPIED, pageable),
    }))
}

fn is_slow(took: Nanos, at_rest: Nanos) -> bool {
    took.0 * 100 > at_rest.0 * SLOW_PERCENT
}

/// For how long copies of one size, one after the other, were slow: the clearing ended during one of them.
fn slow_part(copies: &[Nanos], at_rest: Nanos) -> Nanos {
    let slowest = copies.iter().max().map_or(at_rest, |&took| took.max(at_rest));
    // Of each, the part that was as slow as all of the slowest.
    let slowed_by = 1.0 - at_rest.0 as f64 / slowest.0.max(1) as f64;
    let part = |took: &Nanos| if slowed_by > 0.0 { took.since(at_rest).0 as f64 / slowed_by } else { 0.0 };
    Nanos(copies.iter().map(part).sum::<f64>() as u64)
}

/// How long a copy takes while memory is being cleared, from the time of one during which the clearing ended after `left`.
fn slow_time(took: Nanos, at_rest: Nanos, left: Nanos) -> Nanos {
    if took <= left {
        return took;
    }
    let copied_slowly = 1.0 - took.since(left).0 as f64 / at_rest.0.max(1) as f64;
    if copied_slowly > 0.0 { Nanos((left.0 as f64 / copied_slowly) as u64).max(at_rest) } else { at_rest }
}

fn median(mut times: Vec<Nanos>) -> Nanos {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Gives that many blocks back, when all other memory is cleared. Returns when that began.
fn give_back(device: &mut dyn Device, blocks: u64) -> Result<Nanos, DeviceError> {
    let blocks = (0..blocks).map(|_| device.alloc(GIVEN_BACK)).collect::<Result<Vec<Address>, _>>()?;
    for &block in &blocks {
        launch(device, &Work::Elementwise { bytes: GIVEN_BACK }, &[(block, GIVEN_BACK)])?;
    }
    device.synchronize()?;
    wait(device, CLEARED);
    let begin = device.now();
    for block in blocks {
        device.free(block)?;
    }
    Ok(begin)
}

/// The host does nothing for a while.
fn wait(device: &mut dyn Device, time: Nanos) {
    match device.props().clock {
        DeviceClock::Virtual => device.elapse(time),
        DeviceClock::Wall => thread::sleep(Duration::from_nanos(time.0)),
    }
}

/// How long the work lasts behind which others are queued.
const BLOCKING_WORK: Nanos = Nanos(100_000_000);
/// A launch that takes longer than this waited for a full queue.
const BLOCKED: Nanos = Nanos(10_000_000);
/// More than any queue is expected to hold.
const MOST_QUEUED: usize = 16_384;

/// How many pieces of work a stream holds before the host waits.
fn launch_queue(device: &mut dyn Device) -> Result<usize, DeviceError> {
    if device.compute().is_err() {
        return Ok(Profile::h200().launch_queue);
    }
    device.synchronize()?;
    launch(device, &Work::Spin { nanos: BLOCKING_WORK }, &[])?;
    for queued in 1..MOST_QUEUED {
        let begin = device.now();
        launch(device, &Work::Spin { nanos: Nanos::ZERO }, &[])?;
        if device.now().since(begin) > BLOCKED {
            device.synchronize()?;
            return Ok(queued);
        }
    }
    device.synchronize()?;
    Ok(MOST_QUEUED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::SimDevice;

    fn calibrated(profile: Profile, products: ProductSupport) -> Calibration {
        let mut device = SimDevice::new(profile).unwrap();
        let calibration = calibrate(&mut device, products).unwrap();
        assert_eq!(device.held_bytes(), 0, "everything is given back");
        calibration
    }

    fn clearing_rates(of: ClearingRates) -> [f64; 3] {
        [of.bytes_per_ns, of.pinned_copy_in_bytes_per_ns, of.pageable_copy_in_bytes_per_ns]
    }

    #[test]
    fn a_simulated_device_is_measured_as_it_was_made() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), ProductSupport::Real);
        for cost in &calibration.costs {
            let (name, words) = cost.call.split_once(' ').unwrap_or((&cost.call, ""));
            let kind = CallKind::named(name).unwrap();
            let condition = CostCondition::ALL.into_iter().find(|condition| condition.words() == words).unwrap();
            let made = made.costs.cost_under(condition, kind, cost.bytes).0;
            let nanos = (cost.median_us * 1e3).round() as u64;
            assert_eq!(nanos, made, "{cost:?}");
        }
        assert_eq!(calibration.launch_queue, made.launch_queue);
        let [found, made_with] =
            [calibration.clearing, made.clearing].map(|clearing| clearing_rates(clearing.unwrap()));
        for (found, made) in found.into_iter().zip(made_with) {
            assert!((found / made - 1.0).abs() < 0.1, "{found} bytes per ns cleared or copied, made with {made}");
        }
        let launch_us = made.costs.cost(CallKind::Launch, 0).0 as f64 / 1e3;
        for time in &calibration.work {
            // Many small kernels are queued no faster than they can be launched. A copy of pageable memory is not queued.
            let is_queued =
                !matches!(time.work, Work::CopyIn { pinned: false, .. } | Work::CopyOut { pinned: false, .. });
            let expected = (made.duration(&time.work).0 as f64 / 1e3).max(if is_queued { launch_us } else { 0.0 });
            assert!((time.median_us / expected - 1.0).abs() < 0.05, "{time:?}, made to take {expected} us");
        }
    }

    #[test]
    fn a_profile_that_was_measured_predicts_what_was_measured() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), ProductSupport::Real);
        let device = SimDevice::new(made).unwrap();
        let file = calibration.clone().into_profile("again", None, Footprint::default(), &device);
        let again = ProfileFile::parse(&file.to_toml().unwrap()).unwrap();
        for time in &calibration.work {
            let predicted = again.duration(&time.work).0 as f64 / 1e3;
            assert!((predicted / time.median_us - 1.0).abs() < 0.1, "{time:?}, predicted {predicted}");
        }
    }

    #[test]
    fn a_small_device_is_measured_within_its_memory() {
        for total_bytes in [768 * MIB, GIB, 3 * GIB, 24 * GIB] {
            let calibration = calibrated(Profile { total_bytes, ..Profile::h200() }, ProductSupport::Real);
            assert!(calibration.costs.iter().any(|cost| cost.call == "cuMemAlloc"), "{total_bytes}");
            assert_eq!(calibration.clearing.is_some(), total_bytes == 24 * GIB, "{total_bytes}");
            let Some(found) = calibration.clearing else { continue };
            for (found, made) in
                clearing_rates(found).into_iter().zip(clearing_rates(Profile::h200().clearing.unwrap()))
            {
                assert!((found / made - 1.0).abs() < 0.15, "{found} bytes per ns cleared or copied, made with {made}");
            }
        }
    }

    #[test]
    fn products_that_do_not_run_are_not_measured() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), ProductSupport::Replaced);
        assert!(calibration.work.iter().all(|time| time.work.flops() == 0.0));
        assert!(!calibration.work.is_empty());
        assert_eq!(calibration.rates.half_flops_per_ns, made.rates.half_flops_per_ns);
    }
}
