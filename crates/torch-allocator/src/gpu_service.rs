//! The allocator of one GPU.

use std::fmt;

use super::{
    GpuStatistics, ServiceError, ServiceSettings,
    comparison::Comparison,
    history::{GpuSnapshot, HistorySettings, Watch},
    pools::{Arenas, PoolKey, RouteFilter},
};
use oomph_alloc::device::{
    Device, DeviceSpec, cuda,
    wrap::{FaultPlan, FaultyDevice, LimitedDevice},
};
use oomph_alloc::strategy::{Attempt, Caller, Context, Control, Request, Setup, StrategyError};
use oomph_base::{Address, SiteId, StreamId, ThreadId};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

/// A free that must be repeated.
#[derive(Clone, Copy, Debug)]
struct UnfinishedFree {
    address: Address,
    bytes: u64,
    /// The driver handle of the stream.
    stream: u64,
}

/// A strategy over one GPU, for callers that pass pointers and stream handles.
pub(crate) struct GpuService {
    number: i32,
    arenas: Arenas,
    device: LimitedDevice<Box<dyn Device>>,
    /// Frees that a driver error stopped: PyTorch does not repeat them.
    unfinished: Vec<UnfinishedFree>,
    /// The most bytes to hold, as the environment says.
    limit: Option<u64>,
    /// The most to hold as a fraction of the GPU, as the program says.
    fraction: f64,
    /// The driver handles of the program's streams, by our stream number.
    streams: Vec<u64>,
    /// Whether this is a real GPU: then the program's own context must be current again after each
    /// call.
    is_real: bool,
    /// Statistics and history.
    pub(crate) watch: Watch,
}

impl GpuService {
    pub(crate) fn open(
        number: i32,
        settings: &ServiceSettings,
        history: Option<HistorySettings>,
    ) -> Result<GpuService, ServiceError> {
        let is_real = settings.simulated.is_none();
        let _guard = is_real.then(cuda::keep_context);
        let spec: DeviceSpec = match &settings.simulated {
            Some(spec) => spec.clone(),
            None => format!("cuda:{number}").parse()?,
        };
        let mut device = spec.open_as_guest()?;
        if settings.faults.one_in > 0 {
            let mut random = ChaCha8Rng::seed_from_u64(settings.faults.seed);
            random.set_stream(number as u64);
            let plan = FaultPlan::none().fail_one_in(settings.faults.one_in, random);
            device = Box::new(FaultyDevice::with(plan, device));
        }
        let mut device = LimitedDevice::to(settings.limit.unwrap_or(u64::MAX), device);
        let (spec, props, limit) = (settings.strategy.clone(), device.props().clone(), settings.limit);
        let build = move || Ok(spec.build(&Setup { props: &props, limit })?);
        let strategy = build()?;
        strategy.requires().check(device.props())?;
        let streams = vec![device.stream_handle(StreamId::DEFAULT)];
        let free = device.memory_info().map_or(device.props().total_bytes, |info| info.free);
        let watch = Watch::new(Comparison::new(settings, device.props(), free), history);
        let arenas = Arenas::new(strategy, Box::new(build));
        let unfinished = Vec::new();
        Ok(GpuService { number, arenas, device, unfinished, limit, fraction: 1.0, streams, is_real, watch })
    }

    /// Its device number.
    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    pub(crate) fn alloc(&mut self, bytes: u64, stream: u64) -> Result<Option<Address>, ServiceError> {
        self.finish_frees();
        let request = Request { bytes, stream: self.stream(stream)?, thread: ThreadId(0), site: SiteId(0) };
        let _guard = self.is_real.then(cuda::keep_context);
        let mut cx = Context { device: &mut self.device, sink: &mut self.watch };
        Ok(match self.arenas.alloc(&mut cx, &request, &self.streams)? {
            Attempt::Served(block, _) => {
                self.watch.served(&self.arenas.stats(), block.address, block.size, bytes, request.stream);
                Some(block.address)
            }
            Attempt::OutOfMemory(_) => {
                let (_, free) = self.memory();
                self.watch.failed(&self.arenas.stats(), free);
                None
            }
        })
    }

    /// Frees a block of a request for `bytes`, which are known to the caller. A free that a driver error stops is repeated later.
    pub(crate) fn free(&mut self, address: Address, bytes: u64, stream: u64) -> Result<(), ServiceError> {
        let free = UnfinishedFree { address, bytes, stream };
        let freed = self.try_free(free);
        if !matches!(freed, Ok(()) | Err(ServiceError::Unknown(_))) {
            self.unfinished.push(free);
        }
        freed
    }

    fn try_free(&mut self, free: UnfinishedFree) -> Result<(), ServiceError> {
        let UnfinishedFree { address, bytes, stream } = free;
        let caller = Caller { stream: self.stream(stream)?, thread: ThreadId(0) };
        match self.with_arenas(|arenas, cx| arenas.free(cx, address, caller)) {
            Ok(freed) => {
                self.watch.freed(&self.arenas.stats(), address, bytes, caller.stream, freed);
                Ok(())
            }
            Err(StrategyError::UnknownBlock { .. }) => Err(ServiceError::Unknown(address)),
            Err(error) => Err(error.into()),
        }
    }

    /// Repeats the frees that a driver error stopped.
    #[inline]
    fn finish_frees(&mut self) {
        if !self.unfinished.is_empty() {
            for free in std::mem::take(&mut self.unfinished) {
                if self.try_free(free).is_err() {
                    self.unfinished.push(free);
                }
            }
        }
    }

    /// Whether the block is on this GPU.
    pub(crate) fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, ServiceError> {
        let stream = self.stream(stream)?;
        match self.with_arenas(|arenas, cx| arenas.used_on(cx, address, stream)) {
            Ok(()) => {
                self.watch.comparison.used_on(address, stream);
                Ok(true)
            }
            Err(StrategyError::UnknownBlock { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets another GPU read and write the memory of this one. PyTorch opens memory of `cuMemAlloc` itself.
    pub(crate) fn allow_peer(&mut self, other: i32) -> Result<(), ServiceError> {
        let ordinal = u32::try_from(other).map_err(|_| ServiceError::NoDevice(other))?;
        let _guard = self.is_real.then(cuda::keep_context);
        match self.device.virtual_memory() {
            Ok(memory) => Ok(memory.allow_peer(ordinal).map_err(StrategyError::from)?),
            Err(_) => Ok(()),
        }
    }

    pub(crate) fn trim(&mut self) -> Result<(), ServiceError> {
        self.finish_frees();
        self.with_arenas(|arenas, cx| arenas.trim(cx))?;
        self.watch.comparison.trim();
        self.watch.called(&self.arenas.stats());
        Ok(())
    }

    pub(crate) fn memory_fraction(&mut self, fraction: f64) -> Result<(), ServiceError> {
        if fraction < 1.0 {
            self.watch.comparison.give_up("the program set a memory fraction");
        }
        self.with_arenas(|arenas, cx| arenas.control(cx, &Control::Fraction(fraction)))?;
        // Not every strategy has a limit of its own.
        self.fraction = fraction;
        self.device.set_cap(self.cap().unwrap_or(u64::MAX));
        Ok(())
    }

    /// The most bytes to hold, by the environment and the program.
    pub(crate) fn cap(&self) -> Option<u64> {
        let total = self.device.props().total_bytes;
        let part = (self.fraction < 1.0).then_some((total as f64 * self.fraction) as u64);
        self.limit.into_iter().chain(part).min()
    }

    /// PyTorch's `beginAllocateToPool`.
    pub(crate) fn begin_pool(&mut self, key: PoolKey, filter: RouteFilter) -> Result<(), ServiceError> {
        // Which blocks of the caching allocator's pools become free, and when, depends on the captures.
        self.watch.comparison.give_up("the program captured CUDA graphs");
        self.with_arenas(|arenas, cx| arenas.begin_pool(cx, key, filter))
    }

    /// The values of [`Watch::values`].
    pub(crate) fn values(&self) -> [u64; super::history::VALUES] {
        self.watch.values(&self.arenas.stats())
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.watch.reset_peaks(&self.arenas.stats());
    }

    pub(crate) fn reset_totals(&mut self) {
        self.watch.reset_totals(&self.arenas.stats());
    }

    /// Memory of the GPU, and what of it is free now: the limit of this process does not count.
    pub(crate) fn memory(&mut self) -> (u64, u64) {
        let _guard = self.is_real.then(cuda::keep_context);
        let gpu = &mut self.device.device;
        let free = gpu.memory_info().map_or_else(|_| gpu.free_bytes(), |info| info.free);
        (gpu.props().total_bytes, free)
    }

    pub(crate) fn snapshot(&self, events: bool) -> GpuSnapshot {
        self.watch.snapshot(self.number, &self.streams, self.arenas.layout().as_ref(), events)
    }

    /// Bytes reserved, and bytes in blocks.
    pub(crate) fn held(&self) -> (u64, u64) {
        let current = self.arenas.stats().current;
        (current.reserved, current.allocated)
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.arenas.stats().current.reserved
    }

    pub(crate) fn statistics(&mut self) -> GpuStatistics {
        GpuStatistics {
            native: self.watch.comparison.verdict(),
            device: self.number,
            name: self.device.props().name.clone(),
            streams: self.streams.len() as u64,
            stats: self.arenas.stats(),
            driver_calls: self.device.calls().count,
            details: self
                .arenas
                .default_pool()
                .details()
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        }
    }

    /// Calls the strategies. On a real GPU the program's own context is current again afterwards.
    pub(crate) fn with_arenas<T>(&mut self, call: impl FnOnce(&mut Arenas, &mut Context<'_>) -> T) -> T {
        let _guard = self.is_real.then(cuda::keep_context);
        call(&mut self.arenas, &mut Context { device: &mut self.device, sink: &mut self.watch })
    }

    /// Our number of a stream. A program has few streams: a linear search is faster than hashing.
    fn stream(&mut self, handle: u64) -> Result<StreamId, ServiceError> {
        if let Some(place) = self.streams.iter().position(|&known| known == handle) {
            return Ok(StreamId(place as u16));
        }
        let stream = self.device.stream_create(handle).map_err(StrategyError::from)?;
        self.streams.push(handle);
        self.watch.comparison.new_stream(handle);
        Ok(stream)
    }
}

impl fmt::Debug for GpuService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuService")
            .field("number", &self.number)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}
