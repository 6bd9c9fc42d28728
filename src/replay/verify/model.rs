//! The model beside a recording: PyTorch's allocator over a driver whose answers come from the recording.

use super::{
    Sighting,
    beginning::range_start,
    stretch::{Reading, Stretch},
};
use crate::{
    base::{Address, SiteId, StreamId, ThreadId},
    device::{
        CallKind, Device, DeviceProps,
        wrap::{CallFailure, DriverCall, DriverReply, FaultPlan, FaultyDevice, ScriptOrder, ScriptedDevice},
    },
    pytorch::AllocatorSettings,
    strategy::{
        Attempt, Block, Caller, Context, Freed, Layout, Request, Setup, Strategy, StrategyError, StrategyEvent,
        caching::Caching,
    },
    trace::torch::{Action, Entry},
};

/// Allocator and driver. A copy can be tried and thrown away.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) caching: Caching,
    device: ScriptedDevice,
}

/// What the model did in one call.
#[derive(Debug, Default)]
pub(super) struct Deeds {
    events: Vec<StrategyEvent>,
    /// In the order in which PyTorch would have recorded it.
    pub(super) seen: Vec<Sighting>,
    /// Why it could not go on.
    pub(super) complaint: Option<String>,
}

impl Deeds {
    fn clear(&mut self) {
        self.events.clear();
        self.seen.clear();
        self.complaint = None;
    }

    fn take_events(&mut self) {
        self.seen.extend(self.events.drain(..).filter_map(|event| Sighting::of_event(&event)));
    }
}

impl Model {
    pub(super) fn new(settings: AllocatorSettings, setup: &Setup<'_>, streams: &[u64]) -> Result<Model, StrategyError> {
        let props: DeviceProps = setup.props.clone();
        let mut device = ScriptedDevice::new(props, ScriptOrder::Loose);
        for &handle in streams.iter().skip(1) {
            device.stream_create(handle)?;
        }
        Ok(Model { caching: Caching::new(settings, setup), device })
    }

    /// Takes over what was there before a recording, where it was. Gives the blocks that are not free, in order. The
    /// allocator asks for ordinary segments from the highest address down.
    pub(super) fn adopt(&mut self, layout: &Layout, entries: &[Entry]) -> Result<Vec<Block>, StrategyError> {
        for range in self.caching.shared_ranges(layout) {
            let start = range_start(&range, &layout.segments, entries);
            self.device.expect_any(CallKind::AddressReserve, Ok(DriverReply::Address(start)));
        }
        for segment in layout.segments.iter().rev().filter(|segment| !segment.mapped) {
            self.device.expect(DriverCall::Alloc { bytes: segment.bytes }, Ok(DriverReply::Address(segment.address)));
        }
        let mut nothing: Vec<StrategyEvent> = Vec::new();
        let mut cx = Context { device: &mut self.device, sink: &mut nothing };
        self.caching.load_layout(&mut cx, layout)
    }

    /// Writes down where the driver puts what a stretch takes. `next_range` is where the next range of addresses begins
    /// if the stretch does not tell.
    pub(super) fn script(&mut self, stretch: &Stretch, next_range: Option<Address>) {
        self.device.clear_script();
        for seen in stretch.seen.iter().filter(|seen| seen.action == Action::SegmentAlloc) {
            self.device.expect(DriverCall::Alloc { bytes: seen.bytes }, Ok(DriverReply::Address(seen.address)));
        }
        let first_map = stretch.seen.iter().find(|seen| seen.action == Action::SegmentMap);
        if let Some(base) = first_map.map(|seen| seen.address).or(next_range) {
            self.device.expect_any(CallKind::AddressReserve, Ok(DriverReply::Address(base)));
        }
    }

    /// Carries out a stretch that ends in a request, read in one way. `waiting` are the streams of the frees that it
    /// completes.
    pub(super) fn request(
        &mut self,
        stretch: &Stretch,
        reading: Reading,
        waiting: impl Iterator<Item = StreamId>,
        deeds: &mut Deeds,
    ) -> Option<Block> {
        deeds.clear();
        if reading.empty_cache && !self.empty_cache_into(deeds) {
            return None;
        }
        for stream in waiting.take(reading.polled) {
            self.device.set_busy(stream, false);
        }
        let last = stretch.seen.last()?;
        let request = Request { bytes: last.bytes, stream: last.stream, thread: ThreadId(0), site: SiteId(0) };
        let attempt = match reading.refusals {
            0 => {
                let mut cx = Context { device: &mut self.device, sink: &mut deeds.events };
                self.caching.alloc(&mut cx, &request)
            }
            refusals => {
                let expandable = self.caching.settings().expandable_segments;
                let granule = self.caching.settings().large_segment_size;
                let kind = if expandable { CallKind::MemCreate } else { CallKind::MemAlloc };
                let refused = stretch.refused_calls(refusals, granule).into_iter();
                let plan = refused
                    .fold(FaultPlan::none(), |plan, call| plan.fail_nth(Some(kind), call, CallFailure::OutOfMemory));
                let mut device = FaultyDevice::with(plan, &mut self.device);
                let mut cx = Context { device: &mut device, sink: &mut deeds.events };
                self.caching.alloc(&mut cx, &request)
            }
        };
        deeds.take_events();
        match attempt {
            Ok(Attempt::Served(block, _)) => {
                let action = Action::Alloc;
                deeds.seen.push(Sighting { action, address: block.address, bytes: last.bytes, stream: last.stream });
                Some(block)
            }
            Ok(Attempt::OutOfMemory(_)) => None,
            Err(error) => {
                deeds.complaint = Some(error.to_string());
                None
            }
        }
    }

    /// The program gives its cache back.
    pub(super) fn empty_cache(&mut self, deeds: &mut Deeds) {
        deeds.clear();
        self.empty_cache_into(deeds);
    }

    fn empty_cache_into(&mut self, deeds: &mut Deeds) -> bool {
        let mut cx = Context { device: &mut self.device, sink: &mut deeds.events };
        let result = self.caching.trim(&mut cx);
        deeds.take_events();
        deeds.complaint = result.err().map(|error| error.to_string());
        deeds.complaint.is_none()
    }

    /// The program frees a block. With a stream, the block waits until that stream is idle.
    pub(super) fn free(
        &mut self,
        block: Block,
        stream: StreamId,
        waits_for: Option<StreamId>,
    ) -> Result<Freed, StrategyError> {
        let mut nothing: Vec<StrategyEvent> = Vec::new();
        let mut cx = Context { device: &mut self.device, sink: &mut nothing };
        if let Some(lane) = waits_for {
            self.caching.used_on(&mut cx, &block, lane)?;
        }
        let freed = self.caching.free(&mut cx, block, Caller { stream, thread: ThreadId(0) })?;
        if let Some(lane) = waits_for {
            self.device.set_busy(lane, true);
        }
        Ok(freed)
    }

    /// Forgets that a stream was busy.
    pub(super) fn set_idle(&mut self, stream: StreamId) {
        self.device.set_busy(stream, false);
    }
}
