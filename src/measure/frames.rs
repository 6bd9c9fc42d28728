//! Pictures of memory over time: which blocks lie in which segment, what they are for and how old they are.
//!
//! A picture is taken at the allocated peak, at the first failed request, at the end, and at regular distances in
//! between. Pictures are for looking at: what is too small to be seen is joined with its neighbours, so that twenty of
//! them take little room beside a timeline. The exact memory is in the layouts of a case file.

use serde::{Deserialize, Serialize};

use crate::{
    base::{Address, TagId},
    replay::{LiveBlock, ReplayMoment},
    strategy::{BlockState, Layout, Strategy},
    trace::{Category, Op, Tag},
};

/// Pictures at regular distances. Those of the peak, the failure and the end are additional.
const MOST_REGULAR: usize = 16;
/// The first distance between them, in events; it doubles whenever there are too many.
const FIRST_DISTANCE: u64 = 32;
/// With more live blocks than this, no picture is taken: it would take longer than the run.
const MOST_BLOCKS: u64 = 20_000;
/// Anything smaller than this part of all memory is joined with its neighbours.
const SMALLEST_PART: u64 = 4096;
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
    /// In address order.
    pub segments: Vec<FrameSegment>,
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

/// A block, or several neighbours that are too small to be seen; state and category are then those of the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(u64, u8, u8, Option<u64>)", from = "(u64, u8, u8, Option<u64>)")]
pub struct FrameBlock {
    /// Their size.
    pub bytes: u64,
    /// Whether they can be handed out.
    pub state: BlockState,
    /// What they are for, or were.
    pub category: Category,
    /// The event that asked for them; of joined blocks the latest.
    pub born: Option<u64>,
}

/// The states in the order of their numbers in files.
const STATES: [BlockState; 4] = [BlockState::Allocated, BlockState::Pending, BlockState::Lent, BlockState::Free];

impl FrameBlock {
    /// Numbers for what a word would say: there are thousands of them in a file.
    #[must_use]
    pub fn codes(&self) -> (u8, u8) {
        let state = STATES.iter().position(|&state| state == self.state);
        let category = Category::ALL.iter().position(|&category| category == self.category);
        (state.unwrap_or(0) as u8, category.unwrap_or(0) as u8)
    }
}

impl From<FrameBlock> for (u64, u8, u8, Option<u64>) {
    fn from(block: FrameBlock) -> Self {
        let (state, category) = block.codes();
        (block.bytes, state, category, block.born)
    }
}

impl From<(u64, u8, u8, Option<u64>)> for FrameBlock {
    fn from((bytes, state, category, born): (u64, u8, u8, Option<u64>)) -> Self {
        let state = STATES.get(usize::from(state)).copied().unwrap_or(BlockState::Free);
        let category = Category::ALL.get(usize::from(category)).copied().unwrap_or_default();
        FrameBlock { bytes, state, category, born }
    }
}

impl LayoutFrame {
    /// Bytes in blocks of this state.
    #[must_use]
    pub fn bytes_in(&self, state: BlockState) -> u64 {
        self.blocks().filter(|block| block.state == state).map(|block| block.bytes).sum()
    }

    /// All blocks in address order.
    pub fn blocks(&self) -> impl Iterator<Item = &FrameBlock> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }
}

/// The block that was last served in a slot of the trace.
#[derive(Clone, Copy, Debug)]
struct SlotOwner {
    address: Address,
    born: u64,
    tag: TagId,
}

/// Takes the pictures of a run.
#[derive(Debug, Default)]
pub(super) struct FrameRecorder {
    /// By slot. Freed blocks stay: a later owner of the same address has a later birth.
    residents: Vec<SlotOwner>,
    tags: Vec<Tag>,
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
    /// All pictures in order of their events.
    pub(super) fn finish(mut self, strategy: &dyn Strategy) -> Vec<LayoutFrame> {
        let end = self.picture(self.last_event, Occasion::End, strategy);
        let mut frames = self.regular;
        frames.extend(self.peak.map(|(_, frame)| frame));
        frames.extend(self.at_oom);
        frames.extend(end);
        frames.sort_by_key(|frame| (frame.event, frame.occasion));
        frames
    }

    fn picture(&mut self, event: u64, occasion: Occasion, strategy: &dyn Strategy) -> Option<LayoutFrame> {
        if self.blind || strategy.stats().live_blocks > MOST_BLOCKS {
            return None;
        }
        let Some(layout) = strategy.layout() else {
            self.blind = true;
            return None;
        };
        Some(self.frame(event, occasion, &layout))
    }

    fn frame(&self, event: u64, occasion: Occasion, layout: &Layout) -> LayoutFrame {
        let mut residents = self.residents.clone();
        residents.sort_unstable_by_key(|resident| (resident.address, resident.born));
        let category =
            |resident: &SlotOwner| self.tags.get(resident.tag.index()).map_or(Category::Unknown, |t| t.category);
        let views = || layout.segments.iter().filter(|segment| !segment.alias);
        let smallest = views().map(|segment| segment.bytes).sum::<u64>() / SMALLEST_PART;
        let mut segments: Vec<FrameSegment> = Vec::new();
        let mut open_bytes = 0;
        for view in views() {
            let blocks = view.blocks.iter().map(|block| {
                let after = residents.partition_point(|resident| resident.address <= block.address);
                let resident = residents[..after].last().filter(|resident| resident.address == block.address);
                let resident = resident.filter(|_| block.state != BlockState::Free);
                FrameBlock {
                    bytes: block.size,
                    state: block.state,
                    category: resident.map_or(Category::Unknown, category),
                    born: resident.map(|resident| resident.born),
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
            segment.blocks = joined(&segment.blocks, smallest);
        }
        LayoutFrame { event, occasion, segments }
    }

    /// Remembers which block is in a slot of the trace.
    pub(super) fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock) {
        let Op::Alloc { slot, .. } = now.event.op else { return };
        let resident = SlotOwner { address: live.block.address, born: live.born, tag: live.tag };
        let place = slot as usize;
        if place >= self.residents.len() {
            self.residents.resize(place + 1, SlotOwner { address: Address::NULL, born: 0, tag: TagId(0) });
        }
        self.residents[place] = resident;
        if live.tag.index() >= self.tags.len() {
            self.tags = now.tables.tags().to_vec();
        }
    }

    /// A request failed.
    pub(super) fn out_of_memory(&mut self, now: &ReplayMoment<'_>) {
        if self.at_oom.is_none() {
            self.at_oom = self.picture(now.index, Occasion::OutOfMemory, now.strategy);
        }
    }

    /// An event is over.
    pub(super) fn after(&mut self, now: &ReplayMoment<'_>) {
        self.last_event = now.index;
        self.credit += 1;
        if now.index >= self.next.max(FIRST_DISTANCE) {
            self.take_regular(now.index, now.strategy);
        }
    }

    /// Pictures the allocated peak of `bytes`, which `event` reached, where it is worth its time.
    #[cold]
    pub(super) fn take_peak(&mut self, event: u64, bytes: u64, strategy: &dyn Strategy) {
        let pictured = self.peak.as_ref().map_or(0, |(bytes, _)| *bytes);
        let cost = strategy.stats().live_blocks.max(1) * EVENTS_PER_BLOCK;
        if self.credit < cost && bytes < pictured + pictured / WORTHWHILE_RISE {
            return;
        }
        self.credit = self.credit.saturating_sub(cost);
        if let Some(frame) = self.picture(event, Occasion::Peak, strategy) {
            self.peak = Some((bytes, frame));
        }
    }

    #[cold]
    fn take_regular(&mut self, event: u64, strategy: &dyn Strategy) {
        self.next = event + (FIRST_DISTANCE << self.doublings);
        let Some(frame) = self.picture(event, Occasion::Regular, strategy) else { return };
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

/// Neighbours that are smaller than `smallest` together count as one block.
fn joined(blocks: &[FrameBlock], smallest: u64) -> Vec<FrameBlock> {
    let mut out: Vec<FrameBlock> = Vec::new();
    let mut largest = 0;
    for block in blocks {
        match out.last_mut() {
            Some(last) if last.bytes + block.bytes < smallest => {
                if block.bytes > largest {
                    (largest, last.state, last.category) = (block.bytes, block.state, block.category);
                }
                last.bytes += block.bytes;
                last.born = last.born.max(block.born);
            }
            _ => {
                largest = block.bytes;
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
        base::{KIB, StreamId},
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
        assert_eq!(peak.bytes_in(BlockState::Allocated), 8 * KIB);
        assert!(frames[1].bytes_in(BlockState::Free) > 0, "what was given back is free at the end");
    }

    #[test]
    fn a_failed_request_is_pictured_as_it_failed() {
        let mut builder = TraceBuilder::new();
        builder.alloc(6 * KIB, StreamId::DEFAULT, TagId(0));
        builder.alloc(20 * KIB, StreamId::DEFAULT, TagId(0));
        let frames = detail(builder, 8 * KIB).frames;
        let failed = frames.iter().find(|frame| frame.occasion == Occasion::OutOfMemory).unwrap();
        assert_eq!((failed.event, failed.bytes_in(BlockState::Allocated)), (1, 6 * KIB));
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
        let block = |bytes, state| FrameBlock { bytes, state, category: Category::Unknown, born: None };
        let many: Vec<FrameBlock> = (0..100)
            .map(|place| block(10, if place % 2 == 0 { BlockState::Allocated } else { BlockState::Free }))
            .chain([block(500, BlockState::Allocated)])
            .collect();
        let few = joined(&many, 101);
        assert_eq!(few.len(), 11);
        assert_eq!(few.iter().map(|block| block.bytes).sum::<u64>(), 1500);
        assert_eq!(joined(&many, 0), many);
    }

    #[test]
    fn block_round_trips_as_four_numbers() {
        let block = FrameBlock { bytes: 512, state: BlockState::Pending, category: Category::Optimizer, born: Some(7) };
        let text = serde_json::to_string(&block).unwrap();
        assert_eq!(text, "[512,1,2,7]");
        assert_eq!(serde_json::from_str::<FrameBlock>(&text).unwrap(), block);
    }
}
