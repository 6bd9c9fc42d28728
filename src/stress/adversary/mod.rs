//! How much memory a strategy needs in the worst case: Robson's adversary (`robson`) against a
//! strategy on a device.
//!
//! No way of placing blocks beats the bound of [`RobsonParameters`]. Remapping does, and virtual
//! memory remaps whole pages: the bytes keep their addresses, and free pages are mapped elsewhere.
//! A strategy that remaps every page needs about the live bytes; one that only returns whole
//! segments lies between.
//!
//! Two figures are measured. *Reserved* is what a strategy takes if there is plenty; most
//! strategies keep what they have and reach the bound. *Needed* is the least memory in which it
//! survives the same adversary.

mod robson;

pub use robson::{AdversaryHeap, RobsonParameters, RobsonParametersError, attack};

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
};

use serde::{Deserialize, Serialize};

use super::{StressTarget, TargetError};
use crate::{
    base::{Address, Bytes, MIB, SiteId, StreamId, TagId, ThreadId, round_up},
    device::{Device, default_limit},
    measure::digits,
    strategy::{
        Attempt, Block, Caller, Context, EventSink, Refusal, Request, Silent, Strategy, StrategyError, StrategyEvent,
    },
    trace::{BlockSlot, Trace, TraceBuilder},
};

/// In the parameters of a strategy, stands for the memory it is given:
/// `pool:initial:{memory},maximum:{memory}` is a pool on one region that never grows.
pub const MEMORY_PLACEHOLDER: &str = "{memory}";

/// Settings that theory applies to, tested beside the default ones: a single region, and pages that
/// are remapped.
pub const EXTRA_STRATEGIES: [&str; 7] = [
    "pool:initial:{memory},maximum:{memory}",
    "bfc:allow_growth:False,memory_limit:{memory}",
    "arena:size:{memory}",
    "tlsf:region:{memory}",
    "caching:expandable_segments:True",
    "stitch:fragLimit:2MiB",
    "oomph:smallest_chunk:2MiB,largest_chunk:2MiB",
];

/// Regions need not be whole pages, but the device counts whole pages.
const PAGE: u64 = 2 * MIB;
/// Up to this multiple of the live bytes a strategy counts as wasting nothing.
const NEARLY_ALL_USED: f64 = 1.1;
/// A need within this fraction of the bound counts as at the bound.
const AT_THE_BOUND: f64 = 0.01;

/// Why the adversary could not play to its end. Running out of memory is not among the reasons.
#[derive(Debug, thiserror::Error)]
pub enum AdversaryError {
    /// The strategy cannot run on this device.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// Stopped from outside.
    #[error("interrupted")]
    Interrupted,
}

impl StressTarget {
    /// Whether the strategy gets its memory as a parameter and takes it at once.
    fn has_one_region(&self) -> bool {
        self.strategy.parameters.contains(MEMORY_PLACEHOLDER)
    }

    /// The target with this much memory: a region of that size in place of [`MEMORY_PLACEHOLDER`], and
    /// a device that gives no more.
    pub fn with_memory(&self, bytes: Option<u64>) -> StressTarget {
        let mut target = self.clone();
        if let Some(bytes) = bytes {
            target.strategy.parameters = self.strategy.parameters.replace(MEMORY_PLACEHOLDER, &bytes.to_string());
            target.memory_bytes = Some(round_up(bytes, PAGE));
        }
        target
    }
}

/// What Robson's adversary did to one strategy: a row of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdversaryRow {
    /// The strategy as users type it.
    pub strategy: String,
    /// The device.
    pub device: String,
    /// The most bytes that were live.
    pub live_peak_bytes: u64,
    /// The largest block.
    pub largest_bytes: u64,
    /// The smallest block.
    pub unit_bytes: u64,
    /// What every allocator needs that never moves a block.
    pub robson_bound_bytes: u64,
    /// The peak of reserved memory with plenty available, including a region that the strategy
    /// chose itself.
    pub peak_reserved_bytes: Option<u64>,
    /// The end of the highest block, if all blocks lay on one line.
    pub extent_bytes: Option<u64>,
    /// The least memory in which the strategy survived: of all amounts tried, no smaller one
    /// sufficed.
    pub needed_bytes: Option<u64>,
    /// `needed_bytes` divided by `live_peak_bytes`.
    #[serde(serialize_with = "digits::optional")]
    pub needed_ratio: Option<f64>,
    /// The largest blocks that can explain this need: larger free pieces are returned or remapped.
    /// `None` at the bound, where there are no such pieces.
    pub fragmenting_bytes: Option<u64>,
    /// How the need compares with the bound.
    pub standing: BoundStanding,
    /// The number of runs.
    pub trials: u32,
    /// Why there are no figures, if so.
    pub reason: String,
}

/// Where a strategy stands between the live bytes and the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundStanding {
    /// It needs about the live bytes.
    NeedsWhatIsAlive,
    /// It needs less than the bound: free memory beside live blocks is returned or remapped if the
    /// piece is large enough.
    BelowTheBound,
    /// It needs the bound for allocators that never move a block.
    AtTheBound,
    /// It needs more than the bound.
    AboveTheBound,
    /// All available memory was not enough.
    RunsOut,
    /// It does not serve requests of these sizes.
    Refuses,
    /// It cannot run on this device.
    #[default]
    Skipped,
}

impl BoundStanding {
    fn of(needed: u64, parameters: &RobsonParameters) -> BoundStanding {
        let (needed, bound) = (needed as f64, parameters.bound_bytes() as f64);
        if needed <= parameters.live_bytes as f64 * NEARLY_ALL_USED {
            BoundStanding::NeedsWhatIsAlive
        } else if needed < bound * (1.0 - AT_THE_BOUND) {
            BoundStanding::BelowTheBound
        } else if needed <= bound * (1.0 + AT_THE_BOUND) {
            BoundStanding::AtTheBound
        } else {
            BoundStanding::AboveTheBound
        }
    }

    /// Whether the strategy uses free memory that lies between live blocks.
    const fn remaps(self) -> bool {
        matches!(self, BoundStanding::NeedsWhatIsAlive | BoundStanding::BelowTheBound)
    }

    /// The text in tables.
    pub const fn words(self) -> &'static str {
        match self {
            BoundStanding::NeedsWhatIsAlive => "needs the live bytes",
            BoundStanding::BelowTheBound => "below the bound",
            BoundStanding::AtTheBound => "at the bound",
            BoundStanding::AboveTheBound => "above the bound",
            BoundStanding::RunsOut => "runs out",
            BoundStanding::Refuses => "refuses",
            BoundStanding::Skipped => "skipped",
        }
    }
}

/// Plays the adversary with plenty of memory and then with less and less, until the least
/// sufficient and the largest insufficient amount are a page (with one region: a unit) apart. The
/// trace is that of the first run.
pub fn assess(
    parameters: &RobsonParameters,
    target: &StressTarget,
    stop: &AtomicBool,
) -> Result<(AdversaryRow, Option<Trace>), AdversaryError> {
    let plenty = parameters.bound_bytes() * 3 / 2;
    let target = &StressTarget { device: target.device.with_room_for(2 * plenty), ..target.clone() };
    let mut row = AdversaryRow {
        strategy: target.strategy.to_string(),
        device: target.device.to_string(),
        live_peak_bytes: parameters.live_bytes,
        largest_bytes: parameters.largest_bytes,
        unit_bytes: parameters.unit_bytes,
        robson_bound_bytes: parameters.bound_bytes(),
        ..AdversaryRow::default()
    };
    let device = target.with_memory(None).open_device()?;
    let most = target.memory_bytes.or_else(|| default_limit(&*device));
    let unit = parameters.unit_bytes;
    let (memory, step) = match target.has_one_region() {
        true => (Some(plenty.min(most.unwrap_or(u64::MAX)) / unit * unit), unit),
        false => (most, device.props().page_bytes),
    };
    drop(device);
    let mut runs = AdversaryRuns { parameters, target, stop, count: 0 };
    let first = match runs.run(memory) {
        Err(AdversaryError::Target(error @ TargetError::Missing(_))) => {
            row.reason = error.to_string();
            return Ok((row, None));
        }
        run => run?,
    };
    match first.ending {
        AdversaryEnding::Survived => {
            let needed = runs.least_memory(&first, memory, step)?;
            row.standing = BoundStanding::of(needed, parameters);
            row.peak_reserved_bytes = Some(first.peak_reserved_bytes);
            row.extent_bytes = first.extent_bytes;
            row.needed_bytes = Some(needed);
            row.needed_ratio = Some(needed as f64 / parameters.live_bytes as f64);
            row.fragmenting_bytes = row.standing.remaps().then(|| parameters.fragmenting_bytes(needed));
        }
        AdversaryEnding::RanOut { live_bytes, requested_bytes } => {
            row.standing = BoundStanding::RunsOut;
            row.reason = format!("no room for {} with {} live", Bytes(requested_bytes), Bytes(live_bytes));
        }
        AdversaryEnding::Refused { requested_bytes } => {
            row.standing = BoundStanding::Refuses;
            row.reason = format!("serves no requests of {}", Bytes(requested_bytes));
        }
    }
    row.trials = runs.count;
    Ok((row, Some(first.trace)))
}

/// Runs with different amounts of memory.
struct AdversaryRuns<'a> {
    parameters: &'a RobsonParameters,
    target: &'a StressTarget,
    stop: &'a AtomicBool,
    count: u32,
}

impl AdversaryRuns<'_> {
    fn run(&mut self, memory: Option<u64>) -> Result<AdversaryRun, AdversaryError> {
        self.count += 1;
        play(self.parameters, &self.target.with_memory(memory), self.stop)
    }

    fn survives(&mut self, memory: u64) -> Result<bool, AdversaryError> {
        Ok(self.run(Some(memory))?.ending == AdversaryEnding::Survived)
    }

    /// Bisects between the live bytes and what `first` used, which had plenty.
    fn least_memory(&mut self, first: &AdversaryRun, memory: Option<u64>, step: u64) -> Result<u64, AdversaryError> {
        let used = match first.extent_bytes {
            Some(extent) if self.target.has_one_region() => extent,
            _ => first.peak_held_bytes,
        };
        let (mut fails, mut enough) = (self.parameters.live_bytes / step, used.div_ceil(step));
        if self.survives(round_up(self.parameters.live_bytes, step))? {
            return Ok(round_up(self.parameters.live_bytes, step));
        }
        // With less memory a strategy may decide otherwise, and then what it used before may not
        // suffice.
        if !self.survives(enough * step)? {
            (fails, enough) = (enough, memory.unwrap_or(2 * used).div_ceil(step));
        }
        while enough.saturating_sub(fails) > 1 {
            let middle = fails + (enough - fails) / 2;
            if self.survives(middle * step)? {
                enough = middle;
            } else {
                fails = middle;
            }
        }
        Ok(enough * step)
    }
}

/// The result of one run of the adversary.
struct AdversaryRun {
    ending: AdversaryEnding,
    /// The peak of reserved memory in the strategy's statistics.
    peak_reserved_bytes: u64,
    /// The most that the device held, in whole pages.
    peak_held_bytes: u64,
    extent_bytes: Option<u64>,
    /// What the adversary did: replayed with the same strategy on a simulated device it gives the
    /// same result.
    trace: Trace,
}

/// How a run of the adversary ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdversaryEnding {
    /// The program ran to its end.
    Survived,
    /// Memory ran out.
    RanOut { live_bytes: u64, requested_bytes: u64 },
    /// The strategy serves no requests of this size.
    Refused { requested_bytes: u64 },
}

/// Plays the adversary against a target, and closes the strategy.
fn play(
    parameters: &RobsonParameters,
    target: &StressTarget,
    stop: &AtomicBool,
) -> Result<AdversaryRun, AdversaryError> {
    let (mut strategy, mut device) = target.open()?;
    let mut heap = RecordedHeap {
        strategy: &mut *strategy,
        device: &mut *device,
        stop,
        addresses: LinearAddresses::default(),
        trace: TraceBuilder::new(),
        live_bytes: 0,
        peak_held_bytes: 0,
        ending: AdversaryEnding::Survived,
    };
    attack(parameters, &mut heap)?;
    let RecordedHeap { addresses, trace, peak_held_bytes, ending, .. } = heap;
    let peak_reserved_bytes = strategy.stats().peak.reserved;
    strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
    let extent_bytes = addresses.extent();
    Ok(AdversaryRun { ending, peak_reserved_bytes, peak_held_bytes, extent_bytes, trace: trace.finish("robson") })
}

/// A strategy as the adversary sees it. Records the requests as a trace.
struct RecordedHeap<'a> {
    strategy: &'a mut dyn Strategy,
    device: &'a mut dyn Device,
    stop: &'a AtomicBool,
    addresses: LinearAddresses,
    trace: TraceBuilder,
    live_bytes: u64,
    peak_held_bytes: u64,
    ending: AdversaryEnding,
}

/// A block of a strategy.
struct RecordedBlock {
    block: Block,
    requested: u64,
    position: u64,
    slot: BlockSlot,
}

impl AdversaryHeap for RecordedHeap<'_> {
    type Block = RecordedBlock;
    type Error = AdversaryError;

    fn alloc(&mut self, bytes: u64) -> Result<Option<RecordedBlock>, AdversaryError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(AdversaryError::Interrupted);
        }
        let request = Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: self.device, sink: &mut self.addresses };
        let slot = self.trace.alloc(bytes, StreamId::DEFAULT, TagId(0));
        match self.strategy.alloc(&mut cx, &request)? {
            Attempt::Served(block, _) => {
                self.live_bytes += bytes;
                self.peak_held_bytes = self.peak_held_bytes.max(self.device.held_bytes());
                Ok(Some(RecordedBlock { block, requested: bytes, position: self.addresses.add(&block), slot }))
            }
            Attempt::OutOfMemory(shortage) => {
                self.ending = match shortage.refused_by {
                    Refusal::Size => AdversaryEnding::Refused { requested_bytes: bytes },
                    Refusal::Device | Refusal::Limit => {
                        AdversaryEnding::RanOut { live_bytes: self.live_bytes, requested_bytes: bytes }
                    }
                };
                Ok(None)
            }
        }
    }

    fn position(&self, block: &RecordedBlock) -> u64 {
        block.position
    }

    fn free(&mut self, block: RecordedBlock) -> Result<(), AdversaryError> {
        let mut cx = Context { device: self.device, sink: &mut self.addresses };
        self.strategy.free(&mut cx, block.block, Caller::default())?;
        self.live_bytes -= block.requested;
        self.trace.free(block.slot);
        Ok(())
    }
}

/// Gives every segment its position on one line, in the order of allocation, and every block the
/// position of its segment plus its offset there. Blocks in memory that is mapped page by page, or
/// that only the driver knows, keep their addresses.
///
/// The adversary therefore does not depend on where the driver puts segments, and does the same on
/// every device.
#[derive(Clone, Debug, Default)]
struct LinearAddresses {
    /// By address: size, and position on the line.
    segments: BTreeMap<u64, (u64, u64)>,
    end: u64,
    extent: u64,
    /// Whether some blocks lay outside of segments.
    incomplete: bool,
}

impl LinearAddresses {
    /// Adds a block and returns its position.
    fn add(&mut self, block: &Block) -> u64 {
        let address = block.address.0;
        let segment = self.segments.range(..=address).next_back();
        match segment.filter(|&(start, (bytes, _))| address - start < *bytes) {
            Some((start, (_, position))) => {
                let position = position + (address - start);
                self.extent = self.extent.max(position + block.size);
                position
            }
            None => {
                self.incomplete = true;
                address
            }
        }
    }

    /// From the start of the line to the end of the highest block so far; `None` if blocks lay
    /// outside of segments. A freed segment keeps its position, so this counts all memory that was
    /// ever used.
    fn extent(&self) -> Option<u64> {
        (!self.incomplete).then_some(self.extent)
    }
}

impl EventSink for LinearAddresses {
    fn event(&mut self, event: StrategyEvent) {
        match event {
            StrategyEvent::SegmentAlloc { address: Address(address), bytes, .. } => {
                self.segments.insert(address, (bytes, self.end));
                self.end += bytes;
            }
            StrategyEvent::SegmentFree { address, .. } => {
                self.segments.remove(&address.0);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::StrategySpec;
    use crate::{
        replay::{self, replay},
        strategy::Silent,
    };

    fn assessed(strategy: &str, parameters: &RobsonParameters) -> AdversaryRow {
        let strategy = StrategySpec::from(strategy);
        let target =
            StressTarget { strategy, device: "sim".parse().unwrap(), memory_bytes: None, varies_memory: false };
        assess(parameters, &target, &AtomicBool::new(false)).unwrap().0
    }

    fn units(live: u64, largest: u64) -> RobsonParameters {
        RobsonParameters::new(live * PAGE, largest * PAGE, PAGE).unwrap()
    }

    /// The theorem's figures, to the unit, from the strategies that it is about.
    #[test]
    fn single_region_needs_the_bound() {
        for (live, largest, bound) in [(1024, 16, 3057), (4096, 64, 16321)] {
            for strategy in [
                "pool:initial:{memory},maximum:{memory}",
                "bfc:allow_growth:False,memory_limit:{memory}",
                "arena:size:{memory}",
            ] {
                let seen = assessed(strategy, &units(live, largest));
                assert_eq!(seen.extent_bytes, Some(bound * PAGE), "{strategy}");
                assert_eq!(
                    (seen.needed_bytes, seen.standing),
                    (Some(bound * PAGE), BoundStanding::AtTheBound),
                    "{strategy}"
                );
            }
        }
    }

    #[test]
    fn unit_size_does_not_matter() {
        let parameters = RobsonParameters::new(1024 * 512, 16 * 512, 512).unwrap();
        let seen = assessed("pool:initial:{memory},maximum:{memory}", &parameters);
        assert_eq!(seen.needed_bytes, Some(3057 * 512));
    }

    #[test]
    fn buddy_reserves_a_multiple() {
        for (live, largest, times) in [(1024, 16, 3), (4096, 64, 4)] {
            let seen = assessed("buddy", &units(live, largest));
            assert_eq!(seen.peak_reserved_bytes, Some(times * live * PAGE));
        }
    }

    #[test]
    fn remapping_every_page_needs_the_live_bytes() {
        for strategy in ["direct", "stitch:fragLimit:2MiB", "planned", "oomph:smallest_chunk:2MiB,largest_chunk:2MiB"] {
            let seen = assessed(strategy, &units(512, 64));
            assert_eq!(seen.standing, BoundStanding::NeedsWhatIsAlive, "{seen:?}");
            assert!(seen.needed_bytes.unwrap() <= 520 * PAGE, "{seen:?}");
        }
    }

    /// Expandable segments are mapped in steps of 20 MiB, and the driver's pool grows by 32 MiB:
    /// smaller holes are lost.
    #[test]
    fn large_pages_are_fragmented_by_smaller_blocks() {
        let parameters = units(1024, 64);
        for (strategy, pieces) in [("caching:expandable_segments:True", 16 * MIB), ("async", 32 * MIB)] {
            let seen = assessed(strategy, &parameters);
            assert_eq!(seen.standing, BoundStanding::BelowTheBound, "{seen:?}");
            assert_eq!(seen.fragmenting_bytes, Some(pieces), "{seen:?}");
        }
    }

    #[test]
    fn refusals_and_running_out_are_reported() {
        let parameters = units(64, 8);
        let refused = assessed("fixed", &parameters);
        assert_eq!((refused.standing, refused.needed_bytes), (BoundStanding::Refuses, None));
        assert_eq!(refused.reason, "serves no requests of 2.00 MiB");
        let target = StressTarget {
            strategy: StrategySpec::from("tlsf"),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(100 * MIB),
            varies_memory: false,
        };
        let (short, trace) = assess(&parameters, &target, &AtomicBool::new(false)).unwrap();
        assert_eq!(
            (short.standing, short.reason.as_str()),
            (BoundStanding::RunsOut, "no room for 2.00 MiB with 100 MiB live")
        );
        assert_eq!(trace.unwrap().events.len(), 51);
        let stopped = assess(&parameters, &target, &AtomicBool::new(true));
        assert!(matches!(stopped, Err(AdversaryError::Interrupted)));
    }

    #[test]
    fn replayed_trace_reserves_the_same() {
        let (parameters, strategy) = (units(256, 32), StrategySpec::from("caching"));
        let target =
            StressTarget { strategy, device: "sim".parse().unwrap(), memory_bytes: None, varies_memory: false };
        let (seen, trace) = assess(&parameters, &target, &AtomicBool::new(false)).unwrap();
        let mut device = target.device.open().unwrap();
        let mut strategy = target.with_memory(None).build(device.props()).unwrap();
        replay(&trace.unwrap(), &mut *strategy, &mut *device, &replay::ReplayOptions::default(), &mut Silent).unwrap();
        let peak = strategy.stats().peak;
        assert_eq!(Some(peak.reserved), seen.peak_reserved_bytes);
        assert_eq!(peak.requested, parameters.live_bytes);
    }

    fn block(address: u64, size: u64) -> Block {
        Block { address: Address(address), size, slot: 0, generation: 0 }
    }

    fn allocated(address: u64, bytes: u64) -> StrategyEvent {
        StrategyEvent::SegmentAlloc { address: Address(address), bytes, stream: StreamId::DEFAULT }
    }

    #[test]
    fn segments_are_placed_in_order() {
        let mut addresses = LinearAddresses::default();
        addresses.event(allocated(9000, 1000));
        addresses.event(allocated(2000, 500));
        assert_eq!(addresses.add(&block(9000, 10)), 0);
        assert_eq!(addresses.add(&block(2400, 100)), 1400);
        assert_eq!(addresses.add(&block(9990, 10)), 990);
        assert_eq!(addresses.extent(), Some(1500));
    }

    #[test]
    fn freed_segments_keep_their_position() {
        let mut addresses = LinearAddresses::default();
        addresses.event(allocated(1000, 100));
        addresses.event(StrategyEvent::SegmentFree { address: Address(1000), bytes: 100, stream: StreamId::DEFAULT });
        addresses.event(allocated(1000, 50));
        assert_eq!((addresses.add(&block(1000, 50)), addresses.extent()), (100, Some(150)));
        assert_eq!((addresses.add(&block(1050, 50)), addresses.extent()), (1050, None));
    }
}
