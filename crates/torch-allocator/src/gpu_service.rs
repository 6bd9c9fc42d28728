//! The allocator of one GPU.

use std::fmt;

use super::{GpuStatistics, ServiceError, ServiceSettings, pools::Arenas};
use oomph_alloc::device::{Device, DeviceSpec, cuda, wrap::capped};
use oomph_alloc::strategy::{Attempt, Caller, Context, Control, Request, Setup, Silent, StrategyError};
use oomph_base::{Address, SiteId, StreamId, ThreadId};

/// A strategy over one GPU, for callers that pass pointers and stream handles.
pub(crate) struct GpuService {
    number: i32,
    arenas: Arenas,
    device: Box<dyn Device>,
    /// The driver handles of the program's streams, by our stream number.
    streams: Vec<u64>,
    /// Whether this is a real GPU: then the program's own context must be current again after each
    /// call.
    is_real: bool,
}

impl GpuService {
    pub(crate) fn open(number: i32, settings: &ServiceSettings) -> Result<GpuService, ServiceError> {
        let is_real = settings.simulated.is_none();
        let _guard = is_real.then(cuda::keep_context);
        let spec: DeviceSpec = match &settings.simulated {
            Some(spec) => spec.clone(),
            None => format!("cuda:{number}").parse()?,
        };
        let device = capped(spec.open_as_guest()?, settings.limit);
        let (spec, props, limit) = (settings.strategy.clone(), device.props().clone(), settings.limit);
        let build = move || Ok(spec.build(&Setup { props: &props, limit })?);
        let strategy = build()?;
        strategy.requires().check(device.props())?;
        let streams = vec![device.stream_handle(StreamId::DEFAULT)];
        Ok(GpuService { number, arenas: Arenas::new(strategy, Box::new(build)), device, streams, is_real })
    }

    pub(crate) fn alloc(&mut self, bytes: u64, stream: u64) -> Result<Option<Address>, ServiceError> {
        let request = Request { bytes, stream: self.stream(stream)?, thread: ThreadId(0), site: SiteId(0) };
        let _guard = self.is_real.then(cuda::keep_context);
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        Ok(match self.arenas.alloc(&mut cx, &request, &self.streams)? {
            Attempt::Served(block, _) => Some(block.address),
            Attempt::OutOfMemory(_) => None,
        })
    }

    pub(crate) fn free(&mut self, address: Address, stream: u64) -> Result<(), ServiceError> {
        let caller = Caller { stream: self.stream(stream)?, thread: ThreadId(0) };
        match self.with_arenas(|arenas, cx| arenas.free(cx, address, caller)) {
            Ok(()) => Ok(()),
            Err(StrategyError::UnknownBlock { .. }) => Err(ServiceError::Unknown(address)),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the block is on this GPU.
    pub(crate) fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, ServiceError> {
        let stream = self.stream(stream)?;
        match self.with_arenas(|arenas, cx| arenas.used_on(cx, address, stream)) {
            Ok(()) => Ok(true),
            Err(StrategyError::UnknownBlock { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn trim(&mut self) -> Result<(), ServiceError> {
        Ok(self.with_arenas(|arenas, cx| arenas.trim(cx))?)
    }

    pub(crate) fn memory_fraction(&mut self, fraction: f64) -> Result<(), ServiceError> {
        Ok(self.with_arenas(|arenas, cx| arenas.control(cx, &Control::Fraction(fraction)))?)
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.arenas.stats().current.reserved
    }

    pub(crate) fn statistics(&self) -> GpuStatistics {
        GpuStatistics {
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
        call(&mut self.arenas, &mut Context { device: &mut *self.device, sink: &mut Silent })
    }

    /// Our number of a stream. A program has few streams: a linear search is faster than hashing.
    fn stream(&mut self, handle: u64) -> Result<StreamId, ServiceError> {
        if let Some(place) = self.streams.iter().position(|&known| known == handle) {
            return Ok(StreamId(place as u16));
        }
        let stream = self.device.stream_create(handle).map_err(StrategyError::from)?;
        self.streams.push(handle);
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
