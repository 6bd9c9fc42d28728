//! Checks whether a strategy keeps its contract.
//!
//! The wrapper keeps its own counters ([`ExpectedState`]) from requests, results and events alone,
//! and compares them with the strategy's after every call. Violations are collected. The strategy's
//! answers are passed on unchanged, so that a checked run makes the same decisions as an unchecked
//! one.

use std::fmt;

use super::shadow::{ExpectedState, PhysicalBacking};
use crate::device::wrap::InterceptedDevice;
use crate::strategy::{
    Attempt, Block, BlockState, BlockView, Caller, Context, Control, EventSink, Freed, InitialLayout, Layout, Refusal,
    Request, SegmentView, Stats, Strategy, StrategyError, StrategyEvent,
};
use oomph_base::{Address, StreamId};

/// Further violations are only counted: one wrong counter would otherwise be reported at every
/// call.
const MOST_KEPT: usize = 64;

/// A strategy whose contract is checked.
#[derive(Clone, Debug)]
pub struct CheckedStrategy<S> {
    inner: S,
    shadow: ExpectedState,
    backing: PhysicalBacking,
    /// How many of the allocator's own flaws are in the log.
    flaws: usize,
}

/// The rules of the contract, by their names in findings.
pub mod rules {
    /// Live blocks and blocks that wait for a stream do not overlap, neither by address nor by
    /// physical memory.
    pub const OVERLAP: &str = "overlap";
    /// Every block starts at a multiple of [`ALIGNMENT`](crate::strategy::ALIGNMENT).
    pub const ALIGNMENT: &str = "alignment";
    /// A block is at least as large as its request, and a request of zero bytes is refused.
    pub const SIZE: &str = "size";
    /// Live blocks can be freed and used; all other handles are refused.
    pub const HANDLE: &str = "handle";
    /// The strategy's counters agree with what it did.
    pub const BOOKS: &str = "books";
    /// Segments and blocks tile memory and sum to the counters.
    pub const LAYOUT: &str = "layout";
    /// Events report segments taken and released, delayed frees once each, and failures.
    pub const EVENTS: &str = "events";
    /// After a close the strategy is as new.
    pub const CLOSE: &str = "close";
}

/// A violation of the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceFinding {
    /// The rule, or the check that found it.
    pub check: &'static str,
    /// What happened.
    pub detail: String,
}

impl fmt::Display for ConformanceFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.detail)
    }
}

/// The violations so far, and the number of the current call.
#[derive(Clone, Debug, Default)]
pub(super) struct ViolationLog {
    call: u64,
    kept: Vec<ConformanceFinding>,
    count: u64,
}

impl ViolationLog {
    /// Records a violation.
    #[cold]
    pub(super) fn add(&mut self, rule: &'static str, detail: String) {
        self.count += 1;
        if self.kept.len() < MOST_KEPT {
            let detail = format!("call {}: {rule}: {detail}", self.call);
            self.kept.push(ConformanceFinding { check: rule, detail });
        }
    }

    /// Records a violation unless `holds`.
    pub(super) fn expect(&mut self, holds: bool, rule: &'static str, detail: impl FnOnce() -> String) {
        if !holds {
            self.add(rule, detail());
        }
    }
}

impl<S: Strategy> CheckedStrategy<S> {
    /// Checks `inner`, which has no live blocks yet.
    pub fn new(inner: S) -> Self {
        CheckedStrategy { inner, shadow: ExpectedState::default(), backing: PhysicalBacking::default(), flaws: 0 }
    }

    /// The first violations, oldest first. Each begins with the number of the call to the strategy.
    pub fn violations(&self) -> &[ConformanceFinding] {
        &self.shadow.log.kept
    }

    /// The number of violations, including those that were not kept.
    pub fn violation_count(&self) -> u64 {
        self.shadow.log.count
    }

    /// Whether the live blocks are known. They are not after a close that failed half-way.
    pub fn is_sound(&self) -> bool {
        !self.shadow.unknown
    }

    /// Compares the strategy's layout with the counters, block by block. Slow.
    pub fn audit(&mut self) {
        if !self.shadow.unknown {
            audit_layout(&self.inner, &mut self.shadow);
        }
    }

    /// [`Strategy::fork`] with a concrete type.
    pub fn fork_checked(&self) -> Option<CheckedStrategy<Box<dyn Strategy>>> {
        let (shadow, backing) = (self.shadow.clone(), self.backing.clone());
        Some(CheckedStrategy { inner: self.inner.fork()?, shadow, backing, flaws: self.flaws })
    }

    /// Makes one call with a listener in front of the event sink and one in front of the device.
    fn observe<R>(&mut self, cx: &mut Context<'_>, call: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        self.shadow.log.call += 1;
        let mut freed = Vec::new();
        let mut listener = CheckedSink { shadow: &mut self.shadow, freed: &mut freed, outer: cx.sink };
        let mut device = InterceptedDevice::new(&mut *cx.device, &mut self.backing);
        let result = call(&mut self.inner, &mut Context { device: &mut device, sink: &mut listener });
        freed.into_iter().for_each(|block| self.backing.vacate(block));
        for ConformanceFinding { check, detail } in self.inner.flaws().into_iter().skip(self.flaws) {
            self.shadow.log.add(check, detail);
            self.flaws += 1;
        }
        result
    }

    /// Makes one call, passes the result to `judge` and compares the counters.
    fn check<R>(
        &mut self,
        cx: &mut Context<'_>,
        call: impl FnOnce(&mut S, &mut Context<'_>) -> Result<R, StrategyError>,
        judge: impl FnOnce(&mut Self, &Result<R, StrategyError>),
    ) -> Result<R, StrategyError> {
        let result = self.observe(cx, call);
        judge(self, &result);
        let stats = self.inner.stats();
        if matches!(result, Err(StrategyError::Device(_))) {
            // An announced release may not have happened, so the strategy's value is accepted.
            self.shadow.stats.current.reserved = stats.current.reserved;
        }
        self.shadow.compare(&stats, cx.device.held_bytes());
        result
    }

    /// A block was handed out for a request of `bytes`.
    fn on_served(&mut self, block: Block, bytes: u64) {
        self.shadow.served(block, bytes);
        if let Some(other) = self.backing.occupy(&block) {
            let detail = format!("physical memory of the block at {} is that of the one at {other}", block.address);
            self.shadow.log.add(rules::OVERLAP, detail);
        }
    }
}

impl<S: Strategy> Strategy for CheckedStrategy<S> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let call = |inner: &mut S, cx: &mut Context<'_>| inner.alloc(cx, request);
        self.check(cx, call, |this, result| match result {
            Ok(Attempt::Served(block, _)) => this.on_served(*block, request.bytes),
            Ok(Attempt::OutOfMemory(shortage)) => {
                this.shadow.stats.ooms += u64::from(shortage.refused_by != Refusal::Size);
            }
            Err(StrategyError::UnknownBlock { .. }) => {
                this.shadow.log.add(rules::HANDLE, "an alloc answered that a block is unknown".to_owned());
            }
            Err(error) => {
                let refused = *error == StrategyError::ZeroBytes;
                this.shadow.log.expect(refused == (request.bytes == 0), rules::SIZE, || {
                    format!("a request for {} bytes answered '{error}'", request.bytes)
                });
            }
        })
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let was_live = self.shadow.is_live(&block);
        let call = |inner: &mut S, cx: &mut Context<'_>| inner.free(cx, block, caller);
        self.check(cx, call, |this, result| {
            this.shadow.check_handle(&block, was_live, result.as_ref().err());
            if let Ok(freed) = *result
                && was_live
            {
                this.shadow.freed(&block, freed);
                if freed == Freed::Now {
                    this.backing.vacate(block.address);
                }
            }
        })
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let is_live = self.shadow.is_live(block);
        let call = |inner: &mut S, cx: &mut Context<'_>| inner.used_on(cx, block, stream);
        self.check(cx, call, |this, result| this.shadow.check_handle(block, is_live, result.as_ref().err()))
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.check(cx, |inner, cx| inner.control(cx, command), |_, _| {})
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        let call = |inner: &mut S, cx: &mut Context<'_>| inner.resume_from(cx, initial);
        self.check(cx, call, |this, result| {
            let requested = initial.layout.blocks().filter(|block| block.state != BlockState::Free);
            for (block, view) in result.iter().flatten().flatten().zip(requested) {
                this.on_served(*block, view.requested);
            }
        })
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.check(cx, |inner, cx| inner.trim(cx), |_, _| {})
    }

    /// After a close that failed half-way the live blocks are unknown: nothing is checked until a
    /// close succeeds.
    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.shadow.unknown = true;
        let result = self.observe(cx, |inner, cx| inner.close(cx));
        if result.is_ok() {
            self.shadow.reset();
            self.backing.vacate_all();
            let stats = self.inner.stats();
            self.shadow.log.expect(stats == Stats::default(), rules::CLOSE, || {
                let left = stats.differences(&Stats::default()).join(", ");
                format!("after a close the counters are not those of a new strategy: {left}")
            });
        }
        result
    }

    forward!(self => self.inner; views);

    /// The copy is checked as well and keeps the violations so far.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.fork_checked()?))
    }
}

/// Observes events before they reach the sink.
struct CheckedSink<'a> {
    shadow: &'a mut ExpectedState,
    /// Blocks whose delayed free has completed.
    freed: &'a mut Vec<Address>,
    outer: &'a mut dyn EventSink,
}

impl EventSink for CheckedSink<'_> {
    fn event(&mut self, event: StrategyEvent) {
        self.shadow.on_event(event);
        if let StrategyEvent::FreeCompleted { address, .. } = event {
            self.freed.push(address);
        }
        self.outer.event(event);
    }
}

/// Compares a strategy's layout with its counters and with what callers hold. A strategy without a
/// layout is not checked.
fn audit_layout(strategy: &dyn Strategy, shadow: &mut ExpectedState) {
    let Some(layout) = strategy.layout() else { return };
    check_tiling(&layout, &mut shadow.log);
    check_sums(strategy, &layout, &mut shadow.log);
    check_holdings(&layout, shadow);
}

/// Segments are in order and do not overlap; the blocks of each fill it without gaps.
fn check_tiling(layout: &Layout, violations: &mut ViolationLog) {
    let real: Vec<&SegmentView> = layout.segments.iter().filter(|segment| !segment.alias).collect();
    for pair in real.windows(2) {
        let end = pair[0].address.offset(pair[0].bytes);
        violations.expect(end <= pair[1].address, rules::LAYOUT, || {
            format!("the segment at {} ends at {end}, the next begins at {}", pair[0].address, pair[1].address)
        });
    }
    for segment in &layout.segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            violations.expect(block.address == at && block.size > 0, rules::LAYOUT, || {
                format!(
                    "in the segment at {}: {} bytes at {}, expected at {at}",
                    segment.address, block.size, block.address
                )
            });
            at = block.address.offset(block.size);
        }
        let end = segment.address.offset(segment.bytes);
        violations.expect(at == end, rules::LAYOUT, || {
            format!("the blocks of the segment at {} end at {at}, it ends at {end}", segment.address)
        });
    }
}

/// Segments sum to reserved, blocks to allocated and active.
fn check_sums(strategy: &dyn Strategy, layout: &Layout, violations: &mut ViolationLog) {
    let stats = strategy.stats();
    let real = || layout.segments.iter().filter(|segment| !segment.alias);
    let in_state = |state| layout.blocks().filter(|block| block.state == state).map(|block| block.size).sum::<u64>();
    let allocated = in_state(BlockState::Allocated);
    let mut agree = |name: &str, layout: u64, books: u64| {
        violations.expect(layout == books, rules::LAYOUT, || {
            format!("{name}: {layout} in the layout, {books} in the counters")
        });
    };
    agree("reserved", real().map(|segment| segment.bytes).sum(), stats.current.reserved);
    agree("allocated", allocated, stats.current.allocated);
    agree("active", allocated + in_state(BlockState::Pending), stats.current.active);
    // Strategies may count mapped memory as they like.
    if real().all(|segment| !segment.mapped) {
        agree("segments", real().count() as u64, stats.segments);
    }
    let in_aliases = layout.segments.iter().filter(|segment| segment.alias).flat_map(|segment| &segment.blocks);
    let shown: u64 = in_aliases.filter(|block| is_in_use(block)).map(|block| block.size).sum();
    let lent = in_state(BlockState::Lent);
    violations.expect(lent == shown, rules::LAYOUT, || {
        format!("{lent} bytes are lent, {shown} are in use under other addresses")
    });
    let free = in_state(BlockState::Free);
    for stream in layout.segments.iter().map(|segment| segment.stream).chain([StreamId::DEFAULT]) {
        let largest = strategy.largest_free(stream).unwrap_or(0);
        violations.expect(largest <= free, rules::LAYOUT, || {
            format!("{largest} bytes should be free in one piece for stream {stream}, {free} are free in all")
        });
    }
}

/// The blocks in use in the layout are those that callers hold.
fn check_holdings(layout: &Layout, shadow: &mut ExpectedState) {
    let in_use = layout.blocks().filter(|block| is_in_use(block));
    let theirs = in_use.map(|block| (block.address, block.size, block.requested, block.state));
    let ours = shadow.held.values().map(|held| {
        let state = if held.pending { BlockState::Pending } else { BlockState::Allocated };
        (held.block.address, held.block.size, held.requested, state)
    });
    let (mut theirs, ours): (Vec<_>, Vec<_>) = (theirs.collect(), ours.collect());
    theirs.sort_unstable_by_key(|&(address, ..)| address);
    let differs = (0..theirs.len().max(ours.len())).find(|&place| theirs.get(place) != ours.get(place));
    if let Some(place) = differs {
        let (their, our) = (theirs.get(place), ours.get(place));
        shadow.log.add(rules::LAYOUT, format!("the layout has {their:?} where callers hold {our:?}"));
    }
}

fn is_in_use(block: &BlockView) -> bool {
    matches!(block.state, BlockState::Allocated | BlockState::Pending)
}
