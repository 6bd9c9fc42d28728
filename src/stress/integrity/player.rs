//! Plays a trace and checks the contents of its blocks, and nothing else.
//!
//! A block is filled on its own stream after the request, compared on every other stream that uses
//! it, and compared on its own stream before the free; after a trim all live blocks are compared.
//! All of this is queued and not waited for. Any trace can be played: where a block is used on
//! another stream, the order that the fill needs is established here.

use crate::{
    base::{EventId, Nanos, SiteId, StreamId, ThreadId},
    device::{Damage, Device, DeviceClock, DeviceError, LONGEST_PATTERN_BYTES, Patterned, Patterns},
    replay::{PoolScopes, TraceEvents},
    strategy::{Attempt, Block, Caller, Context, Control, Request, Silent, Strategy, StrategyError},
    stress::state::{IntegrityCounts, MemoryLevels},
    trace::{BlockSlot, Event, MarkKind, Op, Tables, Trace, TraceEventId},
};

/// How often results of comparisons are fetched from a real device, in events.
const EVENTS_BETWEEN_RESULTS: u64 = 64;

/// A strategy, its device, and the expected contents of its blocks.
pub(in crate::stress) struct PatternPlayer<S> {
    pub(in crate::stress) strategy: S,
    pub(in crate::stress) device: Box<dyn Device>,
    /// How often a call is tried that fails with a driver error.
    tries: u32,
    blocks: Vec<Option<PatternedBlock>>,
    events: TraceEvents,
    pools: PoolScopes,
    /// The number of streams on the device.
    streams: usize,
    /// The event that orders one stream behind another.
    order: Option<EventId>,
    last_key: u32,
    played: u64,
    in_steps: bool,
    pub(in crate::stress) levels: MemoryLevels,
    pub(in crate::stress) counts: IntegrityCounts,
    pub(in crate::stress) damaged: Vec<Damage>,
    /// The largest request that was served.
    pub(in crate::stress) largest_served: u64,
}

/// A live block.
#[derive(Clone, Copy, Debug)]
struct PatternedBlock {
    block: Block,
    stream: StreamId,
    thread: ThreadId,
    contents: Patterned,
}

impl<S: Strategy> PatternPlayer<S> {
    /// Calls that fail with a driver error are made up to `tries` times.
    pub(in crate::stress) fn new(strategy: S, device: Box<dyn Device>, tries: u32) -> PatternPlayer<S> {
        PatternPlayer {
            strategy,
            device,
            tries,
            blocks: Vec::new(),
            events: TraceEvents::default(),
            pools: PoolScopes::default(),
            streams: 1,
            order: None,
            last_key: 0,
            played: 0,
            in_steps: false,
            levels: MemoryLevels::default(),
            counts: IntegrityCounts::default(),
            damaged: Vec::new(),
            largest_served: 0,
        }
    }

    /// Whether the largest request that was served cannot be served again, although all blocks were freed and nothing
    /// works. Injected faults decide nothing here: with them a request may fail for good.
    pub(in crate::stress) fn cannot_serve_again(&mut self) -> Result<bool, StrategyError> {
        if self.largest_served == 0 || self.tries > 1 {
            return Ok(false);
        }
        let request =
            Request { bytes: self.largest_served, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        match self.with_retries(|strategy, cx| strategy.alloc(cx, &request))? {
            Attempt::Served(block, _) => {
                self.with_retries(|strategy, cx| strategy.free(cx, block, Caller::default()))?;
                Ok(false)
            }
            Attempt::OutOfMemory(_) => Ok(true),
        }
    }

    /// Plays a trace until its end, until damage is found or until `over` returns true. Live blocks
    /// are not freed.
    pub(in crate::stress) fn play(&mut self, trace: &Trace, over: &dyn Fn() -> bool) -> Result<(), StrategyError> {
        while let Some(&known_as) = trace.tables.streams().get(self.streams) {
            self.on_device(|device| device.stream_create(known_as))?;
            self.streams += 1;
        }
        self.in_steps = false;
        let fetches_always = self.device.props().clock == DeviceClock::Virtual;
        for event in &trace.events {
            if over() {
                break;
            }
            self.event(event, &trace.tables)?;
            self.played += 1;
            if fetches_always || self.played.is_multiple_of(EVENTS_BETWEEN_RESULTS) {
                self.fetch_results()?;
                if !self.damaged.is_empty() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Compares and frees all live blocks, and waits for all comparisons.
    pub(in crate::stress) fn free_all(&mut self) -> Result<(), StrategyError> {
        for slot in 0..self.blocks.len() {
            let Some(live) = self.blocks[slot] else { continue };
            self.free(slot as BlockSlot, Caller { stream: live.stream, thread: live.thread })?;
        }
        self.on_device(|device| device.synchronize())?;
        self.fetch_results()
    }

    /// Destroys the program's own events and closes the strategy.
    pub(in crate::stress) fn close(&mut self) -> Result<(), StrategyError> {
        for event in self.events.take().chain(self.order.take()) {
            self.on_device(|device| device.event_destroy(event))?;
        }
        self.with_retries(|strategy, cx| strategy.close(cx))
    }

    fn event(&mut self, event: &Event, tables: &Tables) -> Result<(), StrategyError> {
        self.device.elapse(event.delta());
        match event.op {
            Op::Alloc { slot, bytes, stream, site, .. } => {
                self.alloc(slot, &Request { bytes, stream, thread: event.thread, site })
            }
            Op::Free { slot, stream } => self.free(slot, Caller { stream, thread: event.thread }),
            Op::Use { slot, stream } => self.use_on(slot, stream),
            Op::EmptyCache => self.trim(),
            Op::UsePool { pool } => {
                let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
                self.pools.enter(&mut self.strategy, &mut cx, pool)
            }
            Op::ReleasePool { pool, trims } => {
                let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
                self.pools.release(&mut self.strategy, &mut cx, pool, trims)
            }
            Op::Mark { kind: MarkKind::Step, index, .. } => {
                self.in_steps = true;
                self.with_retries(|strategy, cx| strategy.control(cx, &Control::StepBegins(index)))
            }
            Op::EventRecord { event, stream } => {
                let event = self.device_event(event)?;
                self.on_device(|device| device.event_record(event, stream))
            }
            Op::EventWait { event, stream } => {
                let event = self.device_event(event)?;
                self.on_device(|device| device.stream_wait_event(stream, event))
            }
            Op::StreamSync { stream } => self.on_device(|device| device.stream_synchronize(stream)),
            Op::DeviceSync => self.on_device(|device| device.synchronize()),
            // Without operands, because it would overwrite the pattern.
            Op::Work { shape, stream, .. } => match tables.shapes().get(shape as usize) {
                Some(work) => self.on_device(|device| match device.compute() {
                    Ok(compute) => compute.launch(stream, work, &[]),
                    Err(_) => Ok(()),
                }),
                None => Ok(()),
            },
            Op::Idle { nanos } => {
                self.device.elapse(Nanos(nanos));
                Ok(())
            }
            Op::Mark { kind: MarkKind::Phase, .. } => {
                self.in_steps = false;
                Ok(())
            }
            Op::Mark { .. } | Op::HostAlloc { .. } | Op::HostFree { .. } | Op::Collective { .. } => Ok(()),
        }
    }

    fn alloc(&mut self, slot: BlockSlot, request: &Request) -> Result<(), StrategyError> {
        let slot = slot as usize;
        if slot >= self.blocks.len() {
            self.blocks.resize(slot + 1, None);
        }
        self.blocks[slot] = None;
        if self.in_steps {
            self.levels.sample(&self.strategy.stats().current);
        }
        let block = match self.with_retries(|strategy, cx| strategy.alloc(cx, request)) {
            Ok(Attempt::Served(block, _)) => block,
            Ok(Attempt::OutOfMemory(_)) => {
                self.counts.ooms += 1;
                return Ok(());
            }
            // With injected faults a request may fail for good.
            Err(StrategyError::Device(error)) if self.tries > 1 && !error.loses_context() => return Ok(()),
            Err(error) => return Err(error),
        };
        self.largest_served = self.largest_served.max(request.bytes);
        // 0 is not a valid key.
        self.last_key = self.last_key.checked_add(1).unwrap_or(1);
        let bytes = request.bytes.min(LONGEST_PATTERN_BYTES);
        let contents = Patterned { address: block.address, bytes, key: self.last_key };
        self.blocks[slot] = Some(PatternedBlock { block, stream: request.stream, thread: request.thread, contents });
        self.with_patterns(|patterns| patterns.fill_blocks(request.stream, &[contents]))
    }

    fn free(&mut self, slot: BlockSlot, caller: Caller) -> Result<(), StrategyError> {
        let Some(live) = self.blocks.get(slot as usize).copied().flatten() else { return Ok(()) };
        self.with_patterns(|patterns| patterns.verify_blocks(live.stream, &[live.contents]))?;
        // The program must order a free on another stream behind the block's own stream.
        self.order_behind(live.stream, caller.stream)?;
        self.with_retries(|strategy, cx| strategy.free(cx, live.block, caller))?;
        self.blocks[slot as usize] = None;
        self.counts.blocks += 1;
        self.counts.handovers += u64::from(live.thread != caller.thread);
        Ok(())
    }

    fn use_on(&mut self, slot: BlockSlot, stream: StreamId) -> Result<(), StrategyError> {
        let Some(live) = self.blocks.get(slot as usize).copied().flatten() else { return Ok(()) };
        self.with_retries(|strategy, cx| strategy.used_on(cx, &live.block, stream))?;
        self.order_behind(live.stream, stream)?;
        self.with_patterns(|patterns| patterns.verify_blocks(stream, &[live.contents]))?;
        self.counts.crossings += 1;
        Ok(())
    }

    fn trim(&mut self) -> Result<(), StrategyError> {
        self.with_retries(|strategy, cx| strategy.trim(cx))?;
        self.counts.trims += 1;
        for stream in (0..self.streams).map(|number| StreamId(number as u16)) {
            let live = self.blocks.iter().flatten().filter(|live| live.stream == stream);
            let live: Vec<Patterned> = live.map(|live| live.contents).collect();
            if !live.is_empty() {
                self.with_patterns(|patterns| patterns.verify_blocks(stream, &live))?;
            }
        }
        Ok(())
    }

    /// Makes later work of `stream` wait for what is queued on `before` now.
    fn order_behind(&mut self, before: StreamId, stream: StreamId) -> Result<(), StrategyError> {
        if before == stream {
            return Ok(());
        }
        let event = match self.order {
            Some(event) => event,
            None => *self.order.insert(retried(self.tries, || Ok(self.device.event_create()?))?),
        };
        self.on_device(|device| device.event_record(event, before))?;
        self.on_device(|device| device.stream_wait_event(stream, event))
    }

    fn device_event(&mut self, event: TraceEventId) -> Result<EventId, StrategyError> {
        self.events.get_or_make(event, || retried(self.tries, || Ok(self.device.event_create()?)))
    }

    /// Fetches the results of comparisons.
    fn fetch_results(&mut self) -> Result<(), StrategyError> {
        let Ok(patterns) = self.device.patterns() else { return Ok(()) };
        let verified = patterns.verified()?;
        self.counts.comparisons += verified.blocks;
        self.counts.compared_bytes += verified.bytes;
        self.counts.damaged += verified.damaged.len() as u64;
        self.damaged.extend(verified.damaged);
        Ok(())
    }

    fn with_patterns(
        &mut self,
        mut call: impl FnMut(&mut dyn Patterns) -> Result<(), DeviceError>,
    ) -> Result<(), StrategyError> {
        self.on_device(|device| call(device.patterns()?))
    }

    fn on_device<R>(
        &mut self,
        mut call: impl FnMut(&mut dyn Device) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        retried(self.tries, || Ok(call(&mut *self.device)?))
    }

    fn with_retries<R>(
        &mut self,
        mut call: impl FnMut(&mut S, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let (strategy, device) = (&mut self.strategy, &mut *self.device);
        retried(self.tries, || call(strategy, &mut Context { device, sink: &mut Silent }))
    }
}

/// Repeats a call that fails with a driver error, unless the context is lost.
fn retried<R>(tries: u32, mut call: impl FnMut() -> Result<R, StrategyError>) -> Result<R, StrategyError> {
    for _ in 1..tries {
        match call() {
            Err(StrategyError::Device(error)) if !error.loses_context() => {}
            other => return other,
        }
    }
    call()
}
