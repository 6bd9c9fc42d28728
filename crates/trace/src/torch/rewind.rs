//! Computes the memory before a recording from the memory at its end: undoes the entries, last first.
//!
//! Segments, and blocks that are live at the end, are exact. Of a block that was allocated before the recording and freed
//! in it, only the requested size is recorded; [`measure`] finds its size.

use std::collections::{BTreeMap, HashMap};

use super::{
    Action, DEFAULT_POOL, PoolKey, Segment, SegmentKind, SnapshotBlock, SnapshotBlockState, StackId, TraceEntry,
    parse::kind_by_size,
};
use oomph_base::{Address, BlockView, Layout, Progress, SegmentView, StreamId};
use oomph_pytorch::{AllocatorSettings, LARGE_BUFFER, MIN_BLOCK_SIZE, SMALL_SIZE};

/// The memory before the first entry of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InitialMemory {
    /// In address order. The requested size of a free block is 0.
    pub segments: Vec<Segment>,
    /// Live blocks whose size is an estimate.
    pub estimated: Vec<Address>,
    /// Live blocks outside all known segments.
    pub astray: Vec<(SnapshotBlock, StreamId)>,
}

impl InitialMemory {
    /// Blocks that were not free, with their streams.
    pub fn live(&self) -> impl Iterator<Item = (&SnapshotBlock, StreamId)> {
        let settled =
            self.segments.iter().flat_map(|segment| segment.blocks.iter().map(|block| (block, segment.stream)));
        let astray = self.astray.iter().map(|(block, stream)| (block, *stream));
        settled.filter(|(block, _)| block.state != SnapshotBlockState::Inactive).chain(astray)
    }

    /// The pools of the blocks of [`live`](InitialMemory::live), in the same order.
    pub(crate) fn live_pools(&self) -> impl Iterator<Item = PoolKey> {
        let settled = self.segments.iter().flat_map(|segment| {
            let live = segment.blocks.iter().filter(|block| block.state != SnapshotBlockState::Inactive);
            live.map(|_| segment.pool)
        });
        settled.chain(self.astray.iter().map(|_| DEFAULT_POOL))
    }

    /// The segments and their blocks, as allocators show them.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout { segments: self.segments.iter().map(segment_view).collect() }
    }
}

fn segment_view(segment: &Segment) -> SegmentView {
    let view = |block: &SnapshotBlock| BlockView {
        address: block.address,
        size: block.size,
        requested: block.requested_size,
        state: match block.state {
            SnapshotBlockState::Allocated => oomph_base::BlockState::Allocated,
            SnapshotBlockState::PendingFree => oomph_base::BlockState::Pending,
            SnapshotBlockState::Inactive => oomph_base::BlockState::Free,
        },
    };
    SegmentView {
        address: segment.address,
        bytes: segment.total_size,
        stream: segment.stream,
        pool: if segment.kind == SegmentKind::Large { "large" } else { "small" }.into(),
        pool_id: segment.pool,
        mapped: segment.expandable,
        alias: false,
        blocks: segment.blocks.iter().map(view).collect(),
    }
}

/// The memory at the end of a recording.
#[derive(Clone, Copy)]
pub(crate) struct RecordingEnd<'a> {
    pub(crate) device: u32,
    pub(crate) segments: &'a [Segment],
    pub(crate) settings: &'a AllocatorSettings,
    pub(crate) pools: &'a [(u64, u64)],
}

/// The memory before the entries, and the number of entries that contradict the memory after them.
pub(crate) fn rewind(end: &RecordingEnd<'_>, entries: &[TraceEntry], progress: &dyn Progress) -> (InitialMemory, u64) {
    let mut memory = RewoundMemory::new(end);
    for entry in progress.each("rewinding to the beginning", entries).rev() {
        memory.undo(entry);
    }
    memory.measure_blocks(entries, end.settings);
    let contradictions = memory.contradictions;
    (memory.settle(), contradictions)
}

/// A block that is not free.
#[derive(Clone, Copy)]
struct ActiveBlock {
    /// Unknown for blocks that were freed in the recording.
    size: Option<u64>,
    requested: u64,
    pending: bool,
    stream: StreamId,
    stack: StackId,
}

struct RewoundMemory<'a> {
    device: u32,
    pools: &'a [(u64, u64)],
    active: HashMap<u64, ActiveBlock>,
    /// Without blocks.
    segments: BTreeMap<u64, Segment>,
    estimated: Vec<Address>,
    /// Whether the kind of a mapped range was guessed.
    kinds_are_guessed: bool,
    contradictions: u64,
}

impl<'a> RewoundMemory<'a> {
    fn new(end: &RecordingEnd<'a>) -> RewoundMemory<'a> {
        let mut active = HashMap::new();
        let mut segments = BTreeMap::new();
        for segment in end.segments {
            for block in segment.blocks.iter().filter(|block| block.state != SnapshotBlockState::Inactive) {
                let pending = block.state == SnapshotBlockState::PendingFree;
                let (requested, stack) = (block.requested_size, block.stack);
                let block_now =
                    ActiveBlock { size: Some(block.size), requested, pending, stream: segment.stream, stack };
                active.insert(block.address.0, block_now);
            }
            segments.insert(segment.address.0, Segment { blocks: Vec::new(), ..segment.clone() });
        }
        RewoundMemory {
            device: end.device,
            pools: end.pools,
            active,
            segments,
            estimated: Vec::new(),
            kinds_are_guessed: false,
            contradictions: 0,
        }
    }

    fn undo(&mut self, entry: &TraceEntry) {
        let address = entry.address.0;
        let fits = match entry.action {
            Action::Alloc => {
                self.learn_kind(entry);
                self.active.remove(&address).is_some()
            }
            Action::FreeCompleted => {
                self.learn_kind(entry);
                self.revive(entry, true)
            }
            Action::FreeRequested => match self.active.get_mut(&address) {
                Some(block) => std::mem::replace(&mut block.pending, false),
                // In a threaded program the segments may be a few events ahead of the trace.
                None => {
                    self.revive(entry, false);
                    false
                }
            },
            Action::SegmentAlloc => {
                let known = self.segments.get(&address).is_some_and(|segment| segment.total_size == entry.size);
                if known {
                    self.segments.remove(&address);
                }
                known
            }
            Action::SegmentFree => {
                self.segments.insert(address, self.segment(entry, kind_by_size(entry.size), false)).is_none()
            }
            Action::SegmentMap => self.cut_out(address, entry.size),
            Action::SegmentUnmap => self.put_back(entry),
            Action::OutOfMemory | Action::Snapshot | Action::Annotate | Action::Unknown => true,
        };
        self.contradictions += u64::from(!fits);
    }

    /// Small and large requests do not share a mapped range, so one request tells its kind.
    fn learn_kind(&mut self, entry: &TraceEntry) {
        if self.kinds_are_guessed
            && let Some((_, run)) = self.segments.range_mut(..=entry.address.0).next_back()
            && run.expandable
            && entry.address.0 < run.end()
        {
            run.kind = if entry.size <= SMALL_SIZE { SegmentKind::Small } else { SegmentKind::Large };
        }
    }

    fn revive(&mut self, entry: &TraceEntry, pending: bool) -> bool {
        let (requested, stream, stack) = (entry.size, entry.stream, entry.stack);
        let block = ActiveBlock { size: None, requested, pending, stream, stack };
        self.active.insert(entry.address.0, block).is_none()
    }

    fn segment(&self, entry: &TraceEntry, kind: SegmentKind, expandable: bool) -> Segment {
        Segment {
            device: self.device,
            address: entry.address,
            total_size: entry.size,
            stream: entry.stream,
            kind,
            // Entries of older versions have no pool.
            pool: entry.pool_in(self.pools).unwrap_or(DEFAULT_POOL),
            expandable,
            stack: entry.stack,
            blocks: Vec::new(),
        }
    }

    /// Undoes a mapping: removes the range from the mapped ranges that cover it.
    ///
    /// Ranges that were put back with a guessed kind are not joined, so a mapping can lie in several of them.
    fn cut_out(&mut self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        let first = self.segments.range(..=address).next_back().map_or(address, |(&start, _)| start);
        let covering: Vec<Segment> = self.segments.range(first..end).map(|(_, run)| run.clone()).collect();
        let mut covered = address;
        for run in &covering {
            if !run.expandable || run.address.0 > covered {
                return false;
            }
            covered = run.end();
        }
        if covered < end {
            return false;
        }
        for run in covering {
            let start = run.address.0;
            self.segments.remove(&start);
            if start < address {
                self.segments.insert(start, Segment { total_size: address - start, ..run.clone() });
            }
            if end < run.end() {
                let rest = Segment { address: Address(end), total_size: run.end() - end, ..run };
                self.segments.insert(end, rest);
            }
        }
        true
    }

    /// Undoes an unmapping: joins the range with the mapped ranges beside it.
    fn put_back(&mut self, entry: &TraceEntry) -> bool {
        let (start, end) = (entry.address.0, entry.address.0.saturating_add(entry.size));
        let joins = |run: &&Segment| run.expandable && run.stream == entry.stream;
        let before = self.segments.range(..start).next_back().map(|(_, run)| run);
        let before = before.filter(joins).filter(|run| run.end() == start).cloned();
        let after = self.segments.get(&end).filter(joins).cloned();
        let after = after.filter(|run| before.as_ref().is_none_or(|before| before.kind == run.kind));
        let whole_end = match &after {
            Some(after) => {
                self.segments.remove(&end);
                after.end()
            }
            None => end,
        };
        // Small ranges grow by 2 MiB, large ones by 20 MiB: guess from the size; `learn_kind` corrects it.
        let kind = if entry.size.is_multiple_of(LARGE_BUFFER) { SegmentKind::Large } else { SegmentKind::Small };
        self.kinds_are_guessed |= before.is_none() && after.is_none();
        let after = after.map(|run| Segment { address: entry.address, ..run });
        let mut whole = before.or(after).unwrap_or_else(|| self.segment(entry, kind, true));
        whole.total_size = whole_end.saturating_sub(whole.address.0);
        let fits = !self.segments.contains_key(&start);
        self.segments.insert(whole.address.0, whole);
        fits
    }

    fn measure_blocks(&mut self, entries: &[TraceEntry], settings: &AllocatorSettings) {
        let mut blocks: Vec<(u64, ActiveBlock)> =
            self.active.iter().map(|(&address, &block)| (address, block)).collect();
        blocks.sort_unstable_by_key(|(address, _)| *address);
        let unmeasured = blocks.iter().enumerate().filter(|(_, (_, block))| block.size.is_none());
        let unmeasured = unmeasured.map(|(place, &(address, block))| {
            let segment = self.segments.range(..=address).next_back().map(|(_, segment)| segment);
            let neighbour = blocks.get(place + 1).map(|(next, _)| *next);
            let segment = segment.filter(|segment| address < segment.end());
            UnmeasuredBlock { address, requested: block.requested, neighbour, segment }
        });
        for found in measure(unmeasured, entries, settings) {
            if let Some(block) = self.active.get_mut(&found.address) {
                block.size = Some(found.size);
            }
            if !found.certain {
                self.estimated.push(Address(found.address));
            }
        }
    }

    /// Puts the blocks into their segments and fills the rest with free blocks.
    fn settle(self) -> InitialMemory {
        let mut segments: Vec<Segment> = self.segments.into_values().collect();
        let mut blocks: Vec<(u64, ActiveBlock)> = self.active.into_iter().collect();
        blocks.sort_unstable_by_key(|(address, _)| *address);
        let mut astray = Vec::new();
        let mut next = 0;
        for (address, active) in blocks {
            let size = active.size.unwrap_or(active.requested);
            let state = if active.pending { SnapshotBlockState::PendingFree } else { SnapshotBlockState::Allocated };
            let (requested_size, stack) = (active.requested, active.stack);
            let block = SnapshotBlock { address: Address(address), size, requested_size, state, stack };
            while next < segments.len() && segments[next].end() <= address {
                next += 1;
            }
            match segments.get_mut(next).filter(|segment| segment.address.0 <= address) {
                Some(segment) => segment.blocks.push(block),
                None => astray.push((block, active.stream)),
            }
        }
        for segment in &mut segments {
            fill(segment);
        }
        InitialMemory { segments, estimated: self.estimated, astray }
    }
}

fn fill(segment: &mut Segment) {
    let mut filled = Vec::with_capacity(segment.blocks.len() * 2 + 1);
    let mut at = segment.address.0;
    let free = |from: u64, to: u64| SnapshotBlock {
        address: Address(from),
        size: to - from,
        requested_size: 0,
        state: SnapshotBlockState::Inactive,
        stack: StackId::NONE,
    };
    for &block in &segment.blocks {
        if at < block.address.0 {
            filled.push(free(at, block.address.0));
        }
        at = block.address.0.saturating_add(block.size);
        filled.push(block);
    }
    if at < segment.end() {
        filled.push(free(at, segment.end()));
    }
    segment.blocks = filled;
}

/// A block of unknown size.
struct UnmeasuredBlock<'a> {
    address: u64,
    requested: u64,
    /// The address of the next block that is not free.
    neighbour: Option<u64>,
    /// Its segment, if known.
    segment: Option<&'a Segment>,
}

/// The size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MeasuredBlock {
    address: u64,
    size: u64,
    certain: bool,
}

/// Finds the sizes of blocks, in address order.
///
/// PyTorch splits a free block to the rounded request (`should_split`, `alloc_found_block`). In an ordinary large segment
/// it does not split off 1 MiB or less, nor split a block above `max_split_size`: the block is then larger than the
/// request. The free memory behind the block tells which case it was: it is never 1 MiB or less, and the first block
/// allocated there begins where it begins. If nothing is allocated there while the block lives, the size is an estimate.
fn measure<'a>(
    blocks: impl Iterator<Item = UnmeasuredBlock<'a>>,
    entries: &[TraceEntry],
    settings: &AllocatorSettings,
) -> Vec<MeasuredBlock> {
    let mut measured = Vec::new();
    let mut rests: Vec<SpaceBehind> = Vec::new();
    // Sizes are then not multiples of 512, and what is left of a free block can be too small to be a block.
    let keeps_sizes =
        settings.release.rules().one_division_keeps_size && settings.roundup_power2_divisions.contains(&1);
    for block in blocks {
        let address = block.address;
        let neighbour = block.neighbour.unwrap_or(u64::MAX);
        let space_end = block.segment.map_or(neighbour, |segment| segment.end().min(neighbour));
        let space = space_end.saturating_sub(address);
        let rounded = settings.round_size(block.requested);
        let is_ordinary = |segment: &Segment| segment.kind == SegmentKind::Large && !segment.expandable;
        let is_ordinary = block.segment.is_some_and(is_ordinary);
        let unsplit = match is_ordinary {
            true => SMALL_SIZE,
            false if keeps_sizes => MIN_BLOCK_SIZE - 1,
            false => 0,
        };
        let fills_segment = is_ordinary && rounded >= settings.max_split_size;
        let size = if fills_segment { space } else { rounded.min(space) };
        if unsplit > 0 && size < space {
            let (place, start) = (measured.len(), address + size);
            rests.push(SpaceBehind { place, block: address, start, end: space_end, unsplit });
        }
        measured.push(MeasuredBlock { address, size, certain: true });
    }
    look_behind(&rests, entries, &mut measured);
    measured
}

/// Memory that may belong to the block before it.
struct SpaceBehind {
    /// The index of that block.
    place: usize,
    block: u64,
    start: u64,
    end: u64,
    /// The most that is not split off.
    unsplit: u64,
}

/// Decides by the blocks that are allocated behind a block while it lives.
fn look_behind(rests: &[SpaceBehind], entries: &[TraceEntry], measured: &mut [MeasuredBlock]) {
    let mut starts: Vec<SpaceFinding> = vec![SpaceFinding::Nothing; rests.len()];
    for entry in entries {
        let address = entry.address.0;
        let place = rests.partition_point(|rest| rest.block <= address);
        let Some(place) = place.checked_sub(1).filter(|&place| starts[place] == SpaceFinding::Nothing) else {
            continue;
        };
        let rest = &rests[place];
        match entry.action {
            Action::FreeCompleted if rest.block == address => starts[place] = SpaceFinding::BlockIsGone,
            Action::Alloc if (rest.start..rest.end).contains(&address) => starts[place] = SpaceFinding::Start(address),
            _ => {}
        }
    }
    for (rest, found) in rests.iter().zip(starts) {
        let block = &mut measured[rest.place];
        match found {
            SpaceFinding::Start(address) => block.size = address - rest.block,
            _ if rest.end - rest.start <= rest.unsplit => block.size = rest.end - rest.block,
            _ => block.certain = false,
        }
    }
}

/// What the entries tell about the memory behind a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SpaceFinding {
    /// Nothing yet.
    Nothing,
    /// The address where it begins.
    Start(u64),
    /// The block was freed first.
    BlockIsGone,
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{MIB, NoProgress};

    fn rewound(entries: &[TraceEntry], segments: &[Segment]) -> (InitialMemory, u64) {
        rewind(
            &RecordingEnd { device: 0, segments, settings: &AllocatorSettings::default(), pools: &[] },
            entries,
            &NoProgress,
        )
    }

    fn entry(action: Action, address: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size, ..TraceEntry::default() }
    }

    #[test]
    fn a_block_freed_in_the_recording_was_there_before() {
        let segment_start = 32 * MIB;
        let entries = [
            entry(Action::FreeRequested, segment_start, 3_000_000),
            entry(Action::FreeCompleted, segment_start, 3_000_000),
            entry(Action::SegmentFree, segment_start, 20 * MIB),
        ];
        let (initial, contradictions) = rewound(&entries, &[]);
        assert_eq!(contradictions, 0);
        let [segment] = initial.segments.as_slice() else { panic!("{initial:?}") };
        assert_eq!((segment.address.0, segment.total_size), (segment_start, 20 * MIB));
        let sizes: Vec<u64> = segment.blocks.iter().map(|block| block.size).collect();
        assert_eq!(sizes, [3_000_320, 20 * MIB - 3_000_320]);
        assert_eq!(initial.estimated, [Address(segment_start)]);
    }

    #[test]
    fn a_small_unused_rest_belongs_to_the_block() {
        let (start, size) = (32 * MIB, 20 * MIB);
        let request = size - MIB / 2;
        let frees = [
            entry(Action::FreeRequested, start, request),
            entry(Action::FreeCompleted, start, request),
            entry(Action::SegmentFree, start, size),
        ];
        let (quiet, _) = rewound(&frees, &[]);
        assert_eq!(quiet.segments[0].blocks.len(), 1);

        let in_the_rest = start + request;
        let used = [
            entry(Action::Alloc, in_the_rest, 512),
            entry(Action::FreeRequested, in_the_rest, 512),
            entry(Action::FreeCompleted, in_the_rest, 512),
        ];
        let (busy, _) = rewound(&[&used[..], &frees[..]].concat(), &[]);
        assert_eq!(busy.segments[0].blocks.len(), 2);
    }

    #[test]
    fn mapped_runs_are_cut_and_joined() {
        let granule = 20 * MIB;
        let entries = [entry(Action::SegmentUnmap, granule, granule), entry(Action::SegmentMap, 4 * granule, granule)];
        let run = |address: u64, total_size: u64| Segment {
            device: 0,
            address: Address(address),
            total_size,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: true,
            stack: StackId::NONE,
            blocks: Vec::new(),
        };
        let last = [run(2 * granule, 4 * granule)];
        let (initial, contradictions) = rewound(&entries, &last);
        assert_eq!(contradictions, 0);
        let runs: Vec<_> = initial.segments.iter().map(|run| (run.address.0, run.total_size)).collect();
        assert_eq!(runs, [(granule, 3 * granule), (5 * granule, granule)]);
    }

    /// A range of 10 MiB can be small or large: its kind is guessed, so it is not joined. All pieces came from one mapping.
    #[test]
    fn a_range_that_was_unmapped_in_pieces_can_have_been_mapped_at_once() {
        let (start, middle) = (20 * MIB, 60 * MIB);
        let entries = [
            entry(Action::SegmentMap, start, 96 * MIB),
            entry(Action::SegmentUnmap, middle, 10 * MIB),
            entry(Action::SegmentUnmap, start, 40 * MIB),
            entry(Action::SegmentUnmap, middle + 10 * MIB, 46 * MIB),
        ];
        let (initial, contradictions) = rewound(&entries, &[]);
        assert_eq!((initial.segments.len(), contradictions), (0, 0));

        assert_eq!(rewound(&entries[..3], &[]).1, 1, "the last 46 MiB are not covered");
    }
}

#[cfg(test)]
mod block_sizes_tests {
    use super::*;
    use crate::torch::StackId;
    use oomph_base::{Address, MIB, StreamId};

    fn entry(action: Action, address: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size: 2 * MIB, ..TraceEntry::default() }
    }

    /// What is found out about a block of 30 MiB and a bit at the start of a segment of 40 MiB.
    fn measured(entries: &[TraceEntry], neighbour: Option<u64>, max_split_size: u64) -> (u64, bool) {
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 40 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::NONE,
            blocks: Vec::new(),
        };
        let block = UnmeasuredBlock { address: MIB, requested: 30 * MIB + 1, neighbour, segment: Some(&segment) };
        let settings = AllocatorSettings { max_split_size, ..AllocatorSettings::default() };
        let [found] = measure([block].into_iter(), entries, &settings)[..] else { panic!("one block") };
        (found.size, found.certain)
    }

    const ROUNDED: u64 = 30 * MIB + 512;

    #[test]
    fn the_first_block_behind_tells_where_a_block_ends() {
        use Action::{Alloc, FreeCompleted};
        let (far, unlimited) = (Some(39 * MIB), u64::MAX);
        assert_eq!(measured(&[], far, unlimited), (ROUNDED, false));
        let half = MIB + ROUNDED + MIB / 2;
        let entries = [entry(Alloc, half), entry(Alloc, half - 512), entry(FreeCompleted, MIB)];
        assert_eq!(measured(&entries, far, unlimited), (ROUNDED + MIB / 2, true));
        let too_late = [entry(FreeCompleted, MIB), entry(Alloc, half)];
        assert_eq!(measured(&too_late, far, unlimited), (ROUNDED, false));
    }

    /// Up to 2.3, blocks of one division have the size of their request.
    #[test]
    fn rest_below_512_bytes_belongs_to_the_block() {
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 2 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Small,
            pool: (0, 0),
            expandable: true,
            stack: StackId::NONE,
            blocks: Vec::new(),
        };
        let of_release = |minor| {
            let settings = AllocatorSettings::of_release(oomph_pytorch::Release::new(minor));
            let settings = settings.updated("roundup_power2_divisions:1").unwrap();
            let neighbour = Some(MIB + 1400);
            let block = UnmeasuredBlock { address: MIB, requested: 1000, neighbour, segment: Some(&segment) };
            measure([block].into_iter(), &[], &settings)[0].size
        };
        assert_eq!((of_release(3), of_release(4)), (1400, 1024));
    }

    #[test]
    fn memory_that_is_not_split_off_belongs_to_the_block() {
        let near = Some(MIB + ROUNDED + MIB);
        assert_eq!(measured(&[], near, u64::MAX), (ROUNDED + MIB, true));
        assert_eq!(measured(&[], Some(MIB + ROUNDED), u64::MAX), (ROUNDED, true));
        assert_eq!(measured(&[], None, 30 * MIB), (40 * MIB, true));
    }
}
