//! Pictures of memory over time: which blocks lie in which segment, what they are for and how old they are.
//!
//! A picture is taken at the allocated peak, at the first failed request, at the end, and at regular distances in
//! between. Pictures are for looking at: what is too small to be seen is joined with its neighbours, so that twenty of
//! them take little room beside a timeline. Sums are counted before anything is joined ([`FrameSums`]), and a joined
//! block says how much of it is free. The exact memory is in the layouts of a case file.

use serde::{Deserialize, Serialize};

use super::lifetimes::SlotOwners;
use crate::{
    base::SiteId,
    replay::ReplayMoment,
    strategy::{BlockState, Layout, Strategy},
    trace::Category,
};

/// Pictures at regular distances. Those of the peak, the failure and the end are additional.
const MOST_REGULAR: usize = 16;
/// The first distance between them, in events; it doubles whenever there are too many.
const FIRST_DISTANCE: u64 = 32;
/// With more live blocks than this, no picture is taken: it would take longer than the run.
const MOST_BLOCKS: u64 = 20_000;
/// Blocks in use that are smaller than this part of all memory are joined with their neighbours.
const SMALLEST_PART: u64 = 4096;
/// Free memory that is smaller than this part of all memory is joined with blocks in use: less than a pixel of a map.
const SMALLEST_HOLE: u64 = 32_768;
/// A peak that is higher by less than this part is worth a new picture only where there is time for it.
const WORTHWHILE_RISE: u64 = 64;

/// A picture of a peak costs this many events per block, so that pictures take a small part of a run's time.
const EVENTS_PER_BLOCK: u64 = 8;

/// Why a picture was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Occasion {
    /// At a regular distance.
    Regular,
    /// `allocated` was at its highest; or within a 64th of it, in runs that have no time for more pictures.
    Peak,
    /// A request had failed for the first time.
    OutOfMemory,
    /// The replay was over.
    End,
}

/// Memory at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutFrame {
    /// Number of the event after which, or at the peak before which, memory lay like this.
    pub event: u64,
    /// Why it was taken.
    pub occasion: Occasion,
    /// Counted before small blocks were joined. Older files do not have them.
    #[serde(default)]
    pub sums: Option<FrameSums>,
    /// In address order.
    pub segments: Vec<FrameSegment>,
}

/// What lies in memory at one moment, to the byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameSums {
    /// In blocks that callers hold.
    pub allocated: u64,
    /// In blocks that wait for a stream.
    pub pending: u64,
    /// In blocks that were lent to another view of memory.
    pub lent: u64,
    /// In free blocks: the holes.
    pub free: u64,
    /// How many free blocks there are.
    pub holes: u64,
    /// How many of them are whole segments.
    pub whole_segments: u64,
    /// The largest free block.
    pub largest_hole: u64,
    /// How many segments there are.
    pub segments: u64,
}

impl FrameSums {
    fn add(&mut self, state: BlockState, bytes: u64) {
        match state {
            BlockState::Allocated => self.allocated += bytes,
            BlockState::Pending => self.pending += bytes,
            BlockState::Lent => self.lent += bytes,
            BlockState::Free => {
                self.free += bytes;
                self.holes += 1;
                self.largest_hole = self.largest_hole.max(bytes);
            }
        }
    }

    fn of(layout: &Layout) -> FrameSums {
        let mut sums = FrameSums::default();
        for segment in layout.segments.iter().filter(|segment| !segment.alias) {
            sums.segments += 1;
            segment.blocks.iter().for_each(|block| sums.add(block.state, block.size));
            let is_free = matches!(&segment.blocks[..], [only] if only.state == BlockState::Free);
            sums.whole_segments += u64::from(is_free);
        }
        sums
    }
}

/// One piece of memory taken from the device, or several small ones in a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameSegment {
    /// How many there are.
    pub pieces: u32,
    /// Their stream.
    pub stream: u16,
    /// The strategy's name for the part they belong to.
    pub pool: String,
    /// What is in them, in address order.
    pub blocks: Vec<FrameBlock>,
}

/// A block, or several neighbours that are too small to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<Option<u64>>", from = "Vec<Option<u64>>")]
pub struct FrameBlock {
    /// Their size.
    pub bytes: u64,
    /// Whether they can be handed out. Of joined blocks that of the largest; free only if all are.
    pub state: BlockState,
    /// What they are for, or were; of joined blocks that of the largest in use.
    pub category: Category,
    /// The event that asked for them; of joined blocks the latest.
    pub born: Option<u64>,
    /// The place of their call site in [`CaseDetail::sites`](super::CaseDetail::sites); of joined blocks that of the
    /// largest in use.
    pub site: Option<u32>,
    /// How many blocks are joined.
    pub blocks: u32,
    /// How many of them are free.
    pub holes: u32,
    /// The bytes in those.
    pub free: u64,
}

/// The states in the order of their numbers in files.
const STATES: [BlockState; 4] = [BlockState::Allocated, BlockState::Pending, BlockState::Lent, BlockState::Free];

impl FrameBlock {
    /// A block on its own.
    #[must_use]
    pub fn one(bytes: u64, state: BlockState, category: Category, born: Option<u64>) -> FrameBlock {
        let is_free = state == BlockState::Free;
        let (holes, free) = (u32::from(is_free), if is_free { bytes } else { 0 });
        FrameBlock { bytes, state, category, born, site: None, blocks: 1, holes, free }
    }

    /// Numbers for what a word would say: there are thousands of them in a file.
    #[must_use]
    pub fn codes(&self) -> (u8, u8) {
        let state = STATES.iter().position(|&state| state == self.state);
        let category = Category::ALL.iter().position(|&category| category == self.category);
        (state.unwrap_or(0) as u8, category.unwrap_or(0) as u8)
    }
}

/// Four numbers; five with a call site; eight for joined blocks.
impl From<FrameBlock> for Vec<Option<u64>> {
    fn from(block: FrameBlock) -> Self {
        let (state, category) = block.codes();
        let mut numbers = vec![Some(block.bytes), Some(state.into()), Some(category.into()), block.born];
        if block.site.is_some() || block.blocks > 1 {
            numbers.push(block.site.map(u64::from));
        }
        if block.blocks > 1 {
            numbers.extend([Some(block.blocks.into()), Some(block.holes.into()), Some(block.free)]);
        }
        numbers
    }
}

impl From<Vec<Option<u64>>> for FrameBlock {
    fn from(numbers: Vec<Option<u64>>) -> FrameBlock {
        let number = |place: usize| numbers.get(place).copied().flatten();
        let state = number(1).and_then(|code| STATES.get(usize::try_from(code).ok()?).copied());
        let category = number(2).and_then(|code| Category::ALL.get(usize::try_from(code).ok()?).copied());
        let bytes = number(0).unwrap_or(0);
        let one = FrameBlock::one(bytes, state.unwrap_or(BlockState::Free), category.unwrap_or_default(), number(3));
        let small = |place: usize| number(place).and_then(|number| u32::try_from(number).ok());
        FrameBlock {
            site: small(4),
            blocks: small(5).unwrap_or(one.blocks),
            holes: small(6).unwrap_or(one.holes),
            free: number(7).unwrap_or(one.free),
            ..one
        }
    }
}

impl LayoutFrame {
    /// To the byte, or for older files as exact as the joined blocks are.
    #[must_use]
    pub fn sums(&self) -> FrameSums {
        self.sums.unwrap_or_else(|| {
            let mut sums = FrameSums::default();
            self.blocks().for_each(|block| sums.add(block.state, block.bytes));
            sums.segments = self.segments.iter().map(|segment| u64::from(segment.pieces)).sum();
            sums
        })
    }

    /// All blocks in address order.
    pub fn blocks(&self) -> impl Iterator<Item = &FrameBlock> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }

    /// The call sites of all blocks.
    pub(super) fn sites(&mut self) -> impl Iterator<Item = &mut Option<u32>> {
        self.segments.iter_mut().flat_map(|segment| &mut segment.blocks).map(|block| &mut block.site)
    }
}

/// Takes the pictures of a run.
#[derive(Debug, Default)]
pub(super) struct FrameRecorder {
    regular: Vec<LayoutFrame>,
    /// How many times the distance between regular pictures was doubled.
    doublings: u32,
    /// The event of the next regular picture, but for the first.
    next: u64,
    peak: Option<(u64, LayoutFrame)>,
    at_oom: Option<LayoutFrame>,
    /// Events not yet spent on pictures of peaks.
    credit: u64,
    last_event: u64,
    /// The strategy shows no layout.
    blind: bool,
}

impl FrameRecorder {
    /// All pictures in order of their events. Sites are numbers of the trace.
    pub(super) fn finish(mut self, strategy: &dyn Strategy, owners: &SlotOwners) -> Vec<LayoutFrame> {
        let end = self.picture(self.last_event, Occasion::End, strategy, owners);
        let mut frames = self.regular;
        frames.extend(self.peak.map(|(_, frame)| frame));
        frames.extend(self.at_oom);
        frames.extend(end);
        frames.sort_by_key(|frame| (frame.event, frame.occasion));
        frames
    }

    fn picture(
        &mut self,
        event: u64,
        occasion: Occasion,
        strategy: &dyn Strategy,
        owners: &SlotOwners,
    ) -> Option<LayoutFrame> {
        if self.blind || strategy.stats().live_blocks > MOST_BLOCKS {
            return None;
        }
        let Some(layout) = strategy.layout() else {
            self.blind = true;
            return None;
        };
        Some(frame(event, occasion, &layout, owners))
    }

    /// A request failed.
    pub(super) fn out_of_memory(&mut self, now: &ReplayMoment<'_>, owners: &SlotOwners) {
        if self.at_oom.is_none() {
            self.at_oom = self.picture(now.index, Occasion::OutOfMemory, now.strategy, owners);
        }
    }

    /// An event is over.
    pub(super) fn after(&mut self, now: &ReplayMoment<'_>, owners: &SlotOwners) {
        self.last_event = now.index;
        self.credit += 1;
        if now.index >= self.next.max(FIRST_DISTANCE) {
            self.take_regular(now.index, now.strategy, owners);
        }
    }

    /// Pictures the allocated peak of `bytes`, which `event` reached, where it is worth its time.
    #[cold]
    pub(super) fn take_peak(&mut self, event: u64, bytes: u64, strategy: &dyn Strategy, owners: &SlotOwners) {
        let pictured = self.peak.as_ref().map_or(0, |(bytes, _)| *bytes);
        let cost = strategy.stats().live_blocks.max(1) * EVENTS_PER_BLOCK;
        if self.credit < cost && bytes < pictured + pictured / WORTHWHILE_RISE {
            return;
        }
        self.credit = self.credit.saturating_sub(cost);
        if let Some(frame) = self.picture(event, Occasion::Peak, strategy, owners) {
            self.peak = Some((bytes, frame));
        }
    }

    #[cold]
    fn take_regular(&mut self, event: u64, strategy: &dyn Strategy, owners: &SlotOwners) {
        self.next = event + (FIRST_DISTANCE << self.doublings);
        let Some(frame) = self.picture(event, Occasion::Regular, strategy, owners) else { return };
        self.regular.push(frame);
        if self.regular.len() > MOST_REGULAR {
            let mut place = 0;
            self.regular.retain(|_| {
                place += 1;
                place % 2 == 0
            });
            self.doublings += 1;
            self.next = event + (FIRST_DISTANCE << self.doublings);
        }
    }
}

/// Memory as it is now.
fn frame(event: u64, occasion: Occasion, layout: &Layout, slots: &SlotOwners) -> LayoutFrame {
    let mut owners = slots.owners.clone();
    owners.sort_unstable_by_key(|owner| (owner.address, owner.born));
    let views = || layout.segments.iter().filter(|segment| !segment.alias);
    let total = views().map(|segment| segment.bytes).sum::<u64>();
    let smallest = total / SMALLEST_PART;
    let mut segments: Vec<FrameSegment> = Vec::new();
    let mut open_bytes = 0;
    for view in views() {
        let blocks = view.blocks.iter().map(|block| {
            let after = owners.partition_point(|owner| owner.address <= block.address);
            let owner = owners[..after].last().filter(|owner| owner.address == block.address);
            let owner = owner.filter(|_| block.state != BlockState::Free);
            let category = owner.map_or(Category::Unknown, |owner| slots.category(owner.tag));
            let site = owner.map(|owner| owner.site).filter(|&site| site != SiteId(0));
            FrameBlock {
                site: site.map(|site| site.index() as u32),
                ..FrameBlock::one(block.size, block.state, category, owner.map(|owner| owner.born))
            }
        });
        let neighbour = segments.last_mut().filter(|last| {
            last.stream == view.stream.0 && last.pool == view.pool && open_bytes + view.bytes < smallest
        });
        match neighbour {
            Some(last) => {
                open_bytes += view.bytes;
                last.pieces += 1;
                last.blocks.extend(blocks);
            }
            None => {
                open_bytes = view.bytes;
                let (stream, pool) = (view.stream.0, view.pool.to_string());
                segments.push(FrameSegment { pieces: 1, stream, pool, blocks: blocks.collect() });
            }
        }
    }
    for segment in &mut segments {
        segment.blocks = joined(&segment.blocks, smallest, total / SMALLEST_HOLE);
    }
    LayoutFrame { event, occasion, sums: Some(FrameSums::of(layout)), segments }
}

/// Neighbours that are smaller than `smallest` together count as one block. Free memory of at least `least_hole` bytes
/// stays on its own.
fn joined(blocks: &[FrameBlock], smallest: u64, least_hole: u64) -> Vec<FrameBlock> {
    let mut out: Vec<FrameBlock> = Vec::new();
    // The largest block in use of the last one.
    let mut largest = 0;
    let stands_alone = |block: &FrameBlock| block.state == BlockState::Free && block.bytes >= least_hole;
    for block in blocks {
        let used = block.bytes - block.free;
        match out.last_mut() {
            Some(last) if last.bytes + block.bytes < smallest && !stands_alone(last) && !stands_alone(block) => {
                if used > largest {
                    largest = used;
                    (last.state, last.category, last.site) = (block.state, block.category, block.site);
                }
                last.bytes += block.bytes;
                last.born = last.born.max(block.born);
                last.blocks += block.blocks;
                last.holes += block.holes;
                last.free += block.free;
            }
            _ => {
                largest = used;
                out.push(*block);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, StreamId, TagId},
        measure::{
            CaseDetail, CaseLabel,
            fixture::{TinyStrategy, tiny_device},
            measure,
        },
        replay::ReplayOptions,
        trace::TraceBuilder,
    };

    fn detail(builder: TraceBuilder, capacity: u64) -> CaseDetail {
        let mut device = tiny_device(capacity);
        measure(
            &CaseLabel::default(),
            &builder.finish("builder"),
            &mut TinyStrategy::default(),
            &mut device,
            &ReplayOptions::default(),
        )
        .1
    }

    fn occasions(frames: &[LayoutFrame]) -> Vec<(u64, Occasion)> {
        frames.iter().map(|frame| (frame.event, frame.occasion)).collect()
    }

    #[test]
    fn peak_frame_has_purpose_and_age_of_blocks() {
        let mut builder = TraceBuilder::new();
        let weights = builder.tag(Category::Parameter, None);
        let inputs = builder.tag(Category::Input, None);
        let first = builder.alloc(2 * KIB, StreamId::DEFAULT, weights);
        let second = builder.alloc(6 * KIB, StreamId::DEFAULT, inputs);
        builder.free(second);
        builder.alloc(KIB, StreamId::DEFAULT, inputs);
        builder.free(first);
        let frames = detail(builder, 64 * KIB).frames;
        assert_eq!(occasions(&frames), [(1, Occasion::Peak), (4, Occasion::End)]);
        let peak = &frames[0];
        let blocks: Vec<_> = peak.blocks().map(|block| (block.bytes, block.category, block.born)).collect();
        assert_eq!(blocks, [(2 * KIB, Category::Parameter, Some(0)), (6 * KIB, Category::Input, Some(1))]);
        assert_eq!(peak.sums().allocated, 8 * KIB);
        assert!(frames[1].sums().free > 0, "what was given back is free at the end");
    }

    #[test]
    fn a_failed_request_is_pictured_as_it_failed() {
        let mut builder = TraceBuilder::new();
        builder.alloc(6 * KIB, StreamId::DEFAULT, TagId(0));
        builder.alloc(20 * KIB, StreamId::DEFAULT, TagId(0));
        let frames = detail(builder, 8 * KIB).frames;
        let failed = frames.iter().find(|frame| frame.occasion == Occasion::OutOfMemory).unwrap();
        assert_eq!((failed.event, failed.sums().allocated), (1, 6 * KIB));
    }

    #[test]
    fn long_run_keeps_a_bounded_number_of_frames() {
        let mut builder = TraceBuilder::new();
        for _ in 0..5000 {
            let block = builder.alloc(KIB, StreamId::DEFAULT, TagId(0));
            builder.free(block);
        }
        let frames = detail(builder, 64 * KIB).frames;
        assert!((MOST_REGULAR / 2..=MOST_REGULAR + 3).contains(&frames.len()), "{}", frames.len());
        let regular: Vec<u64> =
            frames.iter().filter(|frame| frame.occasion == Occasion::Regular).map(|frame| frame.event).collect();
        assert!(regular.windows(2).all(|pair| pair[1] > pair[0]), "{regular:?}");
        assert!(*regular.last().unwrap() > 8000, "{regular:?}");
    }

    #[test]
    fn small_blocks_are_merged_without_loss() {
        let block = |bytes, state| FrameBlock::one(bytes, state, Category::Unknown, None);
        let many: Vec<FrameBlock> = (0..100)
            .map(|place| block(10, if place % 2 == 0 { BlockState::Allocated } else { BlockState::Free }))
            .chain([block(500, BlockState::Allocated)])
            .collect();
        let few = joined(&many, 101, 11);
        assert_eq!(few.len(), 11);
        assert_eq!(few.iter().map(|block| block.bytes).sum::<u64>(), 1500);
        assert_eq!(few.iter().map(|block| block.free).sum::<u64>(), 500, "joined blocks say how much of them is free");
        assert_eq!((few[0].blocks, few[0].holes, few[0].state), (10, 5, BlockState::Allocated));
        assert_eq!(joined(&many, 0, 0), many);
        assert_eq!(joined(&many, 101, 10), many, "a hole that can be seen is not joined");
    }

    #[test]
    fn sums_are_those_of_all_blocks() {
        let mut builder = TraceBuilder::new();
        let blocks: Vec<_> = (0..40).map(|_| builder.alloc(KIB, StreamId::DEFAULT, TagId(0))).collect();
        builder.alloc(400 * KIB * KIB, StreamId::DEFAULT, TagId(0));
        blocks.into_iter().step_by(2).for_each(|block| builder.free(block));
        builder.alloc(500 * KIB * KIB, StreamId::DEFAULT, TagId(0));
        let detail = detail(builder, 800 * KIB * KIB);
        let at_oom = detail.frames.iter().find(|frame| frame.occasion == Occasion::OutOfMemory).unwrap();
        let (sums, report) = (at_oom.sums(), &detail.ooms[0]);
        assert_eq!(sums.free, report.cached_free_bytes);
        assert_eq!(Some(sums.largest_hole), report.largest_free_bytes);
        // The tiny strategy gives its free segments back before it fails.
        assert_eq!((sums.holes, sums.segments, sums.allocated), (0, 21, 400 * KIB * KIB + 20 * KIB));
        let end = &detail.frames[0];
        assert!(end.blocks().count() < 41, "small blocks are joined in the picture");
        let drawn: u64 = at_oom.blocks().map(|block| block.bytes).sum();
        assert_eq!(drawn, sums.allocated + sums.free, "and nothing is lost");
    }

    #[test]
    fn blocks_round_trip_as_numbers() {
        let block = FrameBlock::one(512, BlockState::Pending, Category::Optimizer, Some(7));
        let sited = FrameBlock { site: Some(3), ..block };
        let several = FrameBlock { blocks: 4, holes: 1, free: 100, ..block };
        for (block, written) in
            [(block, "[512,1,2,7]"), (sited, "[512,1,2,7,3]"), (several, "[512,1,2,7,null,4,1,100]")]
        {
            let text = serde_json::to_string(&block).unwrap();
            assert_eq!(text, written);
            assert_eq!(serde_json::from_str::<FrameBlock>(&text).unwrap(), block);
        }
    }
}
