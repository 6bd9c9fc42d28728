//! Where the requests for one GPU are served, one at a time.

use std::fmt;

use super::{DeskStatistics, ServeError, Settings, settings::Memory};
use oomph_alloc::device::{Device, cuda, wrap::capped};
use oomph_alloc::strategy::{
    Attempt, Caller, Context, Control, Request, Setup, Silent, Strategy, StrategyError, wrap::Addressed,
};
use oomph_base::{Address, SiteId, StreamId, ThreadId};

/// A strategy over one GPU, for callers who know pointers and stream handles.
pub(super) struct Desk {
    number: i32,
    strategy: Addressed<Box<dyn Strategy>>,
    device: Box<dyn Device>,
    /// The handles of the program's streams, by our numbers.
    streams: Vec<u64>,
    /// Whether the program's threads have contexts that must be current again afterwards.
    is_real: bool,
}

impl Desk {
    pub(super) fn open(number: i32, settings: &Settings) -> Result<Desk, ServeError> {
        let is_real = settings.memory == Memory::Cuda;
        let _visit = is_real.then(cuda::visit);
        let device = capped(settings.memory.numbered(number)?.open_as_guest()?, settings.limit);
        let strategy = settings.strategy.build(&Setup { props: device.props(), limit: settings.limit })?;
        strategy.requires().check(device.props())?;
        let streams = vec![device.stream_handle(StreamId::DEFAULT)];
        Ok(Desk { number, strategy: Addressed::new(strategy), device, streams, is_real })
    }

    pub(super) fn alloc(&mut self, bytes: u64, stream: u64) -> Result<Option<Address>, ServeError> {
        let _visit = self.visit();
        let request = Request { bytes, stream: self.stream(stream)?, thread: ThreadId(0), site: SiteId(0) };
        let attempt = self.strategy.alloc(&mut Context { device: &mut *self.device, sink: &mut Silent }, &request)?;
        Ok(match attempt {
            Attempt::Served(block, _) => Some(block.address),
            Attempt::OutOfMemory(_) => None,
        })
    }

    pub(super) fn free(&mut self, address: Address, stream: u64) -> Result<(), ServeError> {
        let _visit = self.visit();
        let caller = Caller { stream: self.stream(stream)?, thread: ThreadId(0) };
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.strategy.free_by_address(&mut cx, address, caller) {
            Ok(_) => Ok(()),
            Err(StrategyError::UnknownBlock { .. }) => Err(ServeError::Unknown(address)),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the block is one of this GPU's.
    pub(super) fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, ServeError> {
        let _visit = self.visit();
        let stream = self.stream(stream)?;
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.strategy.used_on_by_address(&mut cx, address, stream) {
            Ok(()) => Ok(true),
            Err(StrategyError::UnknownBlock { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn trim(&mut self) -> Result<(), ServeError> {
        let _visit = self.visit();
        Ok(self.strategy.trim(&mut Context { device: &mut *self.device, sink: &mut Silent })?)
    }

    pub(super) fn memory_fraction(&mut self, fraction: f64) -> Result<(), ServeError> {
        let _visit = self.visit();
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        Ok(self.strategy.control(&mut cx, &Control::Fraction(fraction))?)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.strategy.stats().current.reserved
    }

    pub(super) fn statistics(&self) -> DeskStatistics {
        DeskStatistics {
            device: self.number,
            name: self.device.props().name.clone(),
            streams: self.streams.len() as u64,
            stats: self.strategy.stats(),
            driver_calls: self.device.calls().count,
            details: self.strategy.details().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        }
    }

    fn visit(&self) -> Option<cuda::Visit> {
        self.is_real.then(cuda::visit)
    }

    /// Our number of a stream. The few that a program has are found faster by looking at each than by hashing.
    fn stream(&mut self, handle: u64) -> Result<StreamId, ServeError> {
        if let Some(place) = self.streams.iter().position(|&known| known == handle) {
            return Ok(StreamId(place as u16));
        }
        let stream = self.device.stream_create(handle).map_err(StrategyError::from)?;
        self.streams.push(handle);
        Ok(stream)
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("number", &self.number).field("streams", &self.streams).finish_non_exhaustive()
    }
}
