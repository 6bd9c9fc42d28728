//! Where verification of a recording starts. If the recording began in the middle, it starts after the first incomplete
//! call, with the memory of that moment.
//!
//! The order in which the segments from before were created is unknown. From 2.12 on it decides between free blocks of one
//! size (`BlockComparatorSize`), and no snapshot contains it. Drivers mostly hand out descending addresses, so that order is
//! tried first, then the ascending one. Where the model takes a block of one segment and PyTorch took one of another, the
//! other segment is older: that is learned.

use super::{Divergence, ObservedAction, pools::PoolGuess};
use crate::{
    base::Address,
    pytorch::{AllocatorSettings, MIN_BLOCK_SIZE, SMALL_BUFFER, SMALL_SIZE, TieOrder},
    strategy::{
        BlockState, BlockView, Layout, SegmentView, Strategy,
        caching::{Caching, SharedRange},
    },
    trace::torch::{Action, InitialMemory, Recording, TraceEntry},
};

/// What was there when a recording began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Beginning {
    /// Blocks that were not free.
    pub blocks: usize,
    /// Segments, or mapped runs.
    pub segments: usize,
    /// Entries of a call that was under way. They are not compared: what it did before is not recorded.
    pub entries_passed_over: usize,
}

/// The memory from which a recording is verified.
pub(super) struct StartState {
    /// The first entry that is compared.
    pub(super) entry: usize,
    pub(super) memory: InitialMemory,
    pub(super) layout: Layout,
}

impl StartState {
    /// For any recording. A complete one starts with nothing, at its first entry.
    pub(super) fn of(recording: &Recording, pools: &PoolGuess<'_>) -> StartState {
        let nothing_before = recording.initial.segments.is_empty() && recording.initial.astray.is_empty();
        let entry = if nothing_before { 0 } else { first_whole_call(&recording.witnessed) };
        let memory = if entry == 0 { recording.initial.clone() } else { recording.memory_before(entry) };
        let layout = memory.layout();
        let mut start = StartState { entry, memory, layout };
        start.take_pools(pools);
        start
    }

    /// Takes over the assumed pools of its segments.
    pub(super) fn take_pools(&mut self, pools: &PoolGuess<'_>) {
        pools.set_pools(self.entry, &mut self.layout.segments);
    }

    /// The memory at the start, if the recording began in the middle.
    pub(super) fn beginning(&self) -> Option<Beginning> {
        let began_late = self.entry > 0 || !self.layout.segments.is_empty();
        began_late.then(|| Beginning {
            blocks: self.memory.live().count(),
            segments: self.layout.segments.len(),
            entries_passed_over: self.entry,
        })
    }

    /// Other possible reasons for a divergence, one sentence each.
    pub(super) fn doubts(&self, settings: &AllocatorSettings, limit: Option<u64>) -> Vec<String> {
        let mut doubts = Vec::new();
        let estimated = self.memory.estimated.len();
        if estimated > 0 {
            doubts.push(format!("it began in the middle: the size of {estimated} blocks from before is an estimate"));
        }
        let collects = settings.garbage_collection_threshold > 0.0;
        if collects && limit.is_some() && !self.layout.segments.is_empty() {
            doubts.push(
                "it began in the middle: garbage collection depends on the age of cached blocks, which is unknown"
                    .to_owned(),
            );
        }
        doubts
    }

    /// Corrects an estimate that caused a divergence. If the model put a request right behind a block of estimated size and
    /// PyTorch did not, the block is larger than estimated, so that the rest was too small. Returns whether there was
    /// something to correct.
    ///
    /// Nothing is allocated behind such a block while it lives. So the estimate can only be too small, and everything that
    /// agreed before still agrees with a larger one.
    pub(super) fn mend(&mut self, divergence: &Divergence, model: &Caching) -> bool {
        let Divergence::Entries { modelled, .. } = divergence else { return false };
        let Some(put) = modelled.last().filter(|seen| seen.action == Action::Alloc) else { return false };
        let too_little = model.settings().round_size(put.bytes);
        let room = room_at(put.address, &model.layout().unwrap_or_default());
        let more = (room + MIN_BLOCK_SIZE).saturating_sub(too_little);
        let blocks = self.layout.segments.iter_mut().find_map(|segment| {
            let ends_there = |block: &BlockView| block.address.0 + block.size == put.address.0;
            segment.blocks.iter().position(ends_there).map(|place| &mut segment.blocks[place..])
        });
        let Some([block, behind, ..]) = blocks else { return false };
        let estimate = self.memory.live().find(|(was, _)| was.address == block.address).map_or(0, |(was, _)| was.size);
        let can_be = self.memory.estimated.binary_search(&block.address).is_ok()
            && behind.state == BlockState::Free
            && more < behind.size
            && (block.size + more).saturating_sub(estimate) <= SMALL_SIZE;
        if can_be && more > 0 {
            block.size += more;
            behind.address.0 += more;
            behind.size -= more;
        }
        can_be && more > 0
    }

    /// Blocks whose size is no longer the estimate, and the size.
    pub(super) fn mended(&self) -> impl Iterator<Item = (Address, u64)> {
        let estimates = self.memory.segments.iter().flat_map(|segment| &segment.blocks);
        let mended = self.layout.blocks().zip(estimates).filter(|(block, estimate)| block.size > estimate.size);
        mended.map(|(block, _)| (block.address, block.size))
    }

    /// Blocks that wait for streams, in the order of the layout.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Address> {
        let pending = self.layout.blocks().filter(|block| block.state == BlockState::Pending);
        pending.map(|block| block.address)
    }
}

/// A free is a call from its first entry on, and a request is over with its last.
fn first_whole_call(entries: &[TraceEntry]) -> usize {
    let mut numbered = entries.iter().enumerate();
    let start = numbered.find_map(|(index, entry)| match entry.action {
        Action::FreeRequested => Some(index),
        Action::Alloc | Action::OutOfMemory => Some(index + 1),
        _ => None,
    });
    start.unwrap_or(entries.len())
}

/// How much room there was at an address before the model put something there, if it did already.
fn room_at(address: Address, layout: &Layout) -> u64 {
    let segment = layout
        .segments
        .iter()
        .find(|segment| (0..segment.bytes).contains(&(address.0.wrapping_sub(segment.address.0))));
    let Some(segment) = segment else { return 0 };
    let place = segment.blocks.partition_point(|block| block.address < address);
    match segment.blocks.get(place..).unwrap_or_default() {
        [put, rest, ..] if put.state == BlockState::Allocated && rest.state == BlockState::Free => put.size + rest.size,
        [here, ..] => here.size,
        [] => 0,
    }
}

/// Where the addresses of a range begin: at its lowest run, or lower where something is mapped later on. Whatever else
/// may lie below is never used, so it does not matter.
pub(super) fn range_start(range: &SharedRange, segments: &[SegmentView], entries: &[TraceEntry]) -> Address {
    let runs = || range.runs.iter().map(|&run| &segments[run]);
    let Some(first) = runs().next() else { return Address::NULL };
    let mut low = first.address.0;
    let mut high = runs().map(|run| run.address.0.saturating_add(run.bytes)).max().unwrap_or(low);
    let mut mapped = runs().map(|run| run.bytes).fold(0, u64::saturating_add);
    for entry in entries.iter().filter(|entry| entry.stream == first.stream) {
        let (start, end) = (entry.address.0, entry.address.0.saturating_add(entry.size));
        match entry.action {
            Action::SegmentMap => {
                let of_its_kind = (entry.size == SMALL_BUFFER) == (range.granule == SMALL_BUFFER);
                let in_step = low.abs_diff(start).is_multiple_of(range.granule);
                if of_its_kind && in_step && high.max(end) - low.min(start) <= range.bytes {
                    (low, high) = (low.min(start), high.max(end));
                    mapped = mapped.saturating_add(entry.size);
                }
            }
            Action::SegmentUnmap if (low..high).contains(&start) => {
                mapped = mapped.saturating_sub(entry.size);
                if mapped == 0 {
                    // The addresses went back too: what is mapped from here on lies in another range.
                    break;
                }
            }
            _ => {}
        }
    }
    Address(low)
}

/// What is known about the order in which the segments from before a recording were created.
pub(super) struct CreationOrder {
    /// Whether it matters.
    matters: bool,
    /// The start of a segment, and that of a younger one.
    pairs: Vec<(Address, Address)>,
}

impl CreationOrder {
    pub(super) fn of(start: &StartState, ties: TieOrder) -> CreationOrder {
        let ordinary = start.layout.segments.iter().filter(|segment| !segment.mapped).count();
        CreationOrder { matters: ties != TieOrder::Address && ordinary > 1, pairs: Vec::new() }
    }

    /// A possible reason for a divergence.
    pub(super) fn doubt(&self, start: &StartState) -> Option<String> {
        let ordinary = start.layout.segments.iter().filter(|segment| !segment.mapped).count();
        self.matters.then(|| {
            format!(
                "it began in the middle: the order in which {ordinary} segments were created before is unknown, and decides \
                 between free blocks of one size"
            )
        })
    }

    /// Learns from a divergence, and puts the segments of the start in the new order. Returns whether there was something
    /// to learn.
    pub(super) fn learn(&mut self, divergence: &Divergence, start: &mut StartState) -> bool {
        let Divergence::Entries { recorded, modelled, .. } = divergence else { return false };
        let (Some(recorded), Some(modelled)) = (recorded.first(), modelled.first()) else { return false };
        if !self.matters || !are_alternatives(recorded, modelled) {
            return false;
        }
        let segment = |at: Address| {
            let holds = |segment: &&SegmentView| (0..segment.bytes).contains(&at.0.wrapping_sub(segment.address.0));
            let found = start.layout.segments.iter().find(holds);
            found.filter(|segment| !segment.mapped).map(|segment| segment.address)
        };
        let (Some(older), Some(younger)) = (segment(recorded.address), segment(modelled.address)) else { return false };
        if older == younger || self.pairs.contains(&(older, younger)) {
            return false;
        }
        self.pairs.push((older, younger));
        self.arrange(start)
    }

    /// Puts the segments in an order that fits all pairs: that of descending or ascending addresses, whichever fits more of
    /// them, with the older segment of each pair first. Returns whether there is one.
    fn arrange(&self, start: &mut StartState) -> bool {
        let descending = self.pairs.iter().filter(|(older, younger)| older > younger).count();
        let mut waiting: Vec<Address> =
            start.layout.segments.iter().filter(|segment| !segment.mapped).map(|segment| segment.address).collect();
        waiting.sort_unstable();
        if 2 * descending >= self.pairs.len() {
            waiting.reverse();
        }
        let mut created: Vec<Address> = Vec::with_capacity(waiting.len());
        while !waiting.is_empty() {
            let is_free = |address: &Address| {
                !self.pairs.iter().any(|(older, younger)| younger == address && waiting.contains(older))
            };
            let Some(place) = waiting.iter().position(is_free) else { return false };
            created.push(waiting.remove(place));
        }
        // The model creates ordinary segments from the last one to the first one.
        let rank = |address: Address, mapped: bool| match mapped {
            true => None,
            false => created.iter().rev().position(|&other| other == address),
        };
        start.layout.segments.sort_by_key(|segment| rank(segment.address, segment.mapped));
        start.memory.segments.sort_by_key(|segment| rank(segment.address, segment.expandable));
        true
    }
}

/// Whether two actions differ in the block that they take.
fn are_alternatives(recorded: &ObservedAction, modelled: &ObservedAction) -> bool {
    let takes = matches!(recorded.action, Action::Alloc | Action::SegmentFree);
    takes
        && recorded.action == modelled.action
        && recorded.bytes == modelled.bytes
        && recorded.stream == modelled.stream
        && recorded.address != modelled.address
}
