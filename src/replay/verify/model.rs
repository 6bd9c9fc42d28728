//! The model of the verifier: PyTorch's allocator over a driver whose answers come from the recording.

use super::{
    ObservedAction,
    call::{CallEntries, CallReading},
    pools::UNRECORDED_POOL,
    start::range_start,
};
use crate::{
    base::{Address, SiteId, StreamId, ThreadId},
    device::{
        CallKind, Device, DeviceProps,
        wrap::{CallFailure, DriverCall, DriverReply, FaultPlan, FaultyDevice, ScriptOrder, ScriptedDevice},
    },
    pytorch::AllocatorSettings,
    replay::PoolScopes,
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, Layout, Request, Setup, Strategy, StrategyError,
        StrategyEvent, caching::Caching,
    },
    trace::torch::{Action, DEFAULT_POOL, PoolKey, TraceEntry},
};

/// The pool of a scope in which no request succeeded.
pub(super) const UNKNOWN_SCOPE: PoolKey = (UNRECORDED_POOL, u64::MAX);
/// The pool of a capture that goes on beside a request of the default pool.
const OTHER_CAPTURE: PoolKey = (UNRECORDED_POOL, u64::MAX - 1);
/// A stream of no request.
const NO_STREAM: StreamId = StreamId(u16::MAX);

/// Pools that the program gave up before a call.
#[derive(Clone, Debug)]
pub(super) struct GivenUp<'p> {
    pub(super) pools: &'p [PoolKey],
    /// What else is assumed of PyTorch's table of pools without users: its least number of slots, and the order in which
    /// pools came into it.
    pub(super) table: Option<(usize, Vec<PoolKey>)>,
}

/// Allocator and driver. A copy can be tried and thrown away.
#[derive(Clone, Debug)]
pub(super) struct AllocatorModel {
    pub(super) caching: Caching,
    device: ScriptedDevice,
    scopes: PoolScopes,
}

/// The model's actions in one call.
#[derive(Debug, Default)]
pub(super) struct ModelActions {
    events: Vec<StrategyEvent>,
    /// In the order in which PyTorch would have recorded them.
    pub(super) seen: Vec<ObservedAction>,
    /// The error that stopped it.
    pub(super) complaint: Option<String>,
}

impl ModelActions {
    fn clear(&mut self) {
        self.events.clear();
        self.seen.clear();
        self.complaint = None;
    }

    fn take_events(&mut self) {
        self.seen.extend(self.events.drain(..).filter_map(|event| ObservedAction::of_event(&event)));
    }
}

impl AllocatorModel {
    pub(super) fn new(
        settings: AllocatorSettings,
        setup: &Setup<'_>,
        streams: &[u64],
    ) -> Result<AllocatorModel, StrategyError> {
        let props: DeviceProps = setup.props.clone();
        let mut device = ScriptedDevice::new(props, ScriptOrder::Loose);
        for &handle in streams.iter().skip(1) {
            device.stream_create(handle)?;
        }
        Ok(AllocatorModel { caching: Caching::new(settings, setup), device, scopes: PoolScopes::default() })
    }

    /// Takes over the memory from before a recording, at the same addresses. Returns the blocks that are not free, in
    /// order. The allocator requests ordinary segments from the highest address down.
    pub(super) fn adopt(&mut self, layout: &Layout, entries: &[TraceEntry]) -> Result<Vec<Block>, StrategyError> {
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

    /// Prepares the driver's answers for the memory that a call takes. `next_range` is where the next range of addresses
    /// begins if the call does not say.
    pub(super) fn script(&mut self, call: &CallEntries, next_range: Option<Address>) {
        self.device.clear_script();
        for seen in call.seen.iter().filter(|seen| seen.action == Action::SegmentAlloc) {
            self.device.expect(DriverCall::Alloc { bytes: seen.bytes }, Ok(DriverReply::Address(seen.address)));
        }
        let first_map = call.seen.iter().find(|seen| seen.action == Action::SegmentMap);
        if let Some(base) = first_map.map(|seen| seen.address).or(next_range) {
            self.device.expect_any(CallKind::AddressReserve, Ok(DriverReply::Address(base)));
        }
    }

    /// Carries out a call that ends in a request, read in one way. `waiting`: the streams of the frees that it completes.
    pub(super) fn request(
        &mut self,
        call: &CallEntries,
        pool: PoolKey,
        reading: CallReading,
        waiting: impl Iterator<Item = StreamId>,
        actions: &mut ModelActions,
    ) -> Option<Block> {
        actions.clear();
        if reading.empty_cache && !self.empty_cache_into(actions) {
            return None;
        }
        for stream in waiting.take(reading.polled) {
            self.device.set_busy(stream, false);
        }
        if let Err(error) = self.use_pool(pool) {
            actions.complaint = Some(error.to_string());
            return None;
        }
        if reading.captures
            && let Err(error) = self.capture(pool, true)
        {
            actions.complaint = Some(error.to_string());
            return None;
        }
        let last = call.seen.last()?;
        let request = Request { bytes: last.bytes, stream: last.stream, thread: ThreadId(0), site: SiteId(0) };
        let attempt = match reading.refusals {
            0 => {
                let mut cx = Context { device: &mut self.device, sink: &mut actions.events };
                self.caching.alloc(&mut cx, &request)
            }
            refusals => {
                let expandable = self.caching.settings().expandable_segments;
                let granule = self.caching.settings().large_segment_size;
                let kind = if expandable { CallKind::MemCreate } else { CallKind::MemAlloc };
                let refused = call.refused_calls(refusals, granule).into_iter();
                let plan = refused
                    .fold(FaultPlan::none(), |plan, call| plan.fail_nth(Some(kind), call, CallFailure::OutOfMemory));
                let mut device = FaultyDevice::with(plan, &mut self.device);
                let mut cx = Context { device: &mut device, sink: &mut actions.events };
                self.caching.alloc(&mut cx, &request)
            }
        };
        actions.take_events();
        let attempt = match reading.captures {
            true => attempt.and_then(|attempt| self.capture(pool, false).map(|()| attempt)),
            false => attempt,
        };
        match attempt {
            Ok(Attempt::Served(block, _)) => {
                let action = Action::Alloc;
                actions.seen.push(ObservedAction {
                    action,
                    address: block.address,
                    bytes: last.bytes,
                    stream: last.stream,
                });
                Some(block)
            }
            Ok(Attempt::OutOfMemory(_)) => None,
            Err(error) => {
                actions.complaint = Some(error.to_string());
                None
            }
        }
    }

    /// The program calls `empty_cache`.
    pub(super) fn empty_cache(&mut self, actions: &mut ModelActions) {
        actions.clear();
        self.empty_cache_into(actions);
    }

    fn empty_cache_into(&mut self, actions: &mut ModelActions) -> bool {
        let closed = self.use_pool(DEFAULT_POOL);
        let mut cx = Context { device: &mut self.device, sink: &mut actions.events };
        let result = closed.and_then(|()| self.caching.trim(&mut cx));
        actions.take_events();
        actions.complaint = result.err().map(|error| error.to_string());
        actions.complaint.is_none()
    }

    /// The program frees a block. With a stream, the block waits until that stream is idle.
    pub(super) fn free(
        &mut self,
        block: Block,
        stream: StreamId,
        waits_for: Option<StreamId>,
    ) -> Result<Freed, StrategyError> {
        if waits_for.is_some() {
            // While requests use a private pool, the allocator forgets uses on other streams.
            self.use_pool(DEFAULT_POOL)?;
        }
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

    /// Requests use a pool from now on.
    fn use_pool(&mut self, pool: PoolKey) -> Result<(), StrategyError> {
        let mut nothing: Vec<StrategyEvent> = Vec::new();
        let mut cx = Context { device: &mut self.device, sink: &mut nothing };
        self.scopes.enter(&mut self.caching, &mut cx, pool)
    }

    /// A capture begins or ends. Up to 2.12 the scope of any pool is one.
    fn capture(&mut self, pool: PoolKey, begins: bool) -> Result<(), StrategyError> {
        let mut nothing: Vec<StrategyEvent> = Vec::new();
        let mut cx = Context { device: &mut self.device, sink: &mut nothing };
        let control = if begins { Control::CaptureBegin } else { Control::CaptureEnd };
        self.caching.control(&mut cx, &control)?;
        let needs_scope = pool == DEFAULT_POOL && !self.caching.settings().release.rules().pools.scope_is_no_capture;
        let pool = OTHER_CAPTURE;
        match (needs_scope, begins) {
            (false, _) => Ok(()),
            (true, true) => self.caching.control(&mut cx, &Control::PoolBegin { pool, stream: Some(NO_STREAM) }),
            (true, false) => self.caching.control(&mut cx, &Control::PoolEnd { pool }),
        }
    }

    /// The program gives up pools.
    pub(super) fn give_up(&mut self, given_up: &GivenUp<'_>) {
        for &pool in given_up.pools {
            let mut nothing: Vec<StrategyEvent> = Vec::new();
            let mut cx = Context { device: &mut self.device, sink: &mut nothing };
            // A pool that cannot be given up shows in what is released.
            let _ = self.scopes.release(&mut self.caching, &mut cx, pool, false);
        }
        if let Some((slots, order)) = &given_up.table {
            self.caching.assume_unused_pools(*slots, order);
        }
    }

    /// The program deletes a `MemPool`, or releases the memory of one that it gave up before.
    pub(super) fn trim_pool(&mut self, pool: PoolKey, gives_up: bool, actions: &mut ModelActions) {
        actions.clear();
        let mut cx = Context { device: &mut self.device, sink: &mut actions.events };
        let result = match gives_up {
            true => self.scopes.release(&mut self.caching, &mut cx, pool, true),
            false => self.caching.control(&mut cx, &Control::PoolTrim { pool }),
        };
        actions.take_events();
        actions.complaint = result.err().map(|error| error.to_string());
    }

    /// The program calls `empty_cache` during a capture.
    pub(super) fn empty_cache_in_scope(&mut self, actions: &mut ModelActions) {
        actions.clear();
        let opened = self.use_pool(UNKNOWN_SCOPE);
        let mut cx = Context { device: &mut self.device, sink: &mut actions.events };
        let result = opened.and_then(|()| self.caching.trim(&mut cx));
        actions.take_events();
        actions.complaint = result.err().map(|error| error.to_string());
    }

    /// Marks a stream as idle.
    pub(super) fn set_idle(&mut self, stream: StreamId) {
        self.device.set_busy(stream, false);
    }
}
