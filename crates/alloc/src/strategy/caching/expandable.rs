//! Expandable segments: long ranges of addresses into which physical memory is mapped in granules.
//!
//! A range belongs to one arena. It starts as one unmapped block and is split and merged like any
//! segment.

use std::collections::BTreeMap;

use super::{Caching, NewBlock};
use crate::device::{Device, DeviceError, PhysicalId};
use crate::strategy::{
    Context, Refusal, StrategyError, StrategyEvent,
    leftovers::{Leftover, MappingLeftovers},
    pooled::{MemoryPiece, NONE, PieceState},
    slots::insert_first_free,
    unless_out_of_memory,
};
use oomph_base::{Address, StreamId, round_up};
use oomph_pytorch::SMALL_BUFFER;

/// One reserved range of addresses (`ExpandableSegment`).
#[derive(Clone, Debug)]
struct ExpandableRange {
    base: u64,
    bytes: u64,
    granule: u64,
    stream: StreamId,
    /// The physical memory behind each granule.
    physical: Vec<Option<PhysicalId>>,
}

impl ExpandableRange {
    fn is_mapped(&self, granule: Option<usize>) -> bool {
        granule.and_then(|granule| self.physical.get(granule)).is_some_and(Option::is_some)
    }

    /// How many of the granules on either side of `first..end` are mapped.
    fn mapped_neighbours(&self, first: usize, end: usize) -> u64 {
        u64::from(self.is_mapped(first.checked_sub(1))) + u64::from(self.is_mapped(Some(end)))
    }

    fn address(&self, granule: usize) -> Address {
        Address(self.base + granule as u64 * self.granule)
    }
}

/// All ranges, and memory that a failed driver call left behind.
#[derive(Clone, Debug, Default)]
pub(super) struct RangeTable {
    ranges: Vec<Option<ExpandableRange>>,
    leftovers: MappingLeftovers,
}

impl RangeTable {
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.iter().all(Option::is_none)
    }

    /// Maps physical memory into the granules `first..end` (`ExpandableSegment::map`). Returns
    /// `false` if the device has no more.
    fn map(&mut self, device: &mut dyn Device, number: u32, first: usize, end: usize) -> Result<bool, DeviceError> {
        self.leftovers.clear(device)?;
        let Some(Some(range)) = self.ranges.get_mut(number as usize) else { return Ok(false) };
        let created = self.leftovers.create(device, (end - first) as u64, range.granule);
        let Some(chunks) = unless_out_of_memory(created)? else { return Ok(false) };
        let sized = chunks.iter().map(|&physical| (physical, range.granule));
        let beneath = chunks.iter().rev().map(|&physical| Leftover::Physical(physical));
        self.leftovers.map(device, range.address(first), sized, beneath)?;
        if range.physical.len() < end {
            range.physical.resize(end, None);
        }
        for (physical, granule) in chunks.into_iter().zip(first..end) {
            range.physical[granule] = Some(physical);
        }
        Ok(true)
    }

    /// Unmaps the granules `first..end` (`ExpandableSegment::unmap`). Returns the end of the
    /// unmapped part, and the error that stopped it.
    fn unmap(
        &mut self,
        device: &mut dyn Device,
        number: u32,
        first: usize,
        end: usize,
    ) -> (usize, Result<(), DeviceError>) {
        let Some(Some(range)) = self.ranges.get_mut(number as usize) else { return (first, Ok(())) };
        for granule in first..end {
            let Some(physical) = range.physical[granule] else { continue };
            let (address, bytes) = (range.address(granule), range.granule);
            if let Err(error) = device.virtual_memory().and_then(|memory| memory.unmap(address, bytes)) {
                return (granule, Err(error));
            }
            range.physical[granule] = None;
            self.leftovers.push(Leftover::Physical(physical));
            if let Err(error) = self.leftovers.clear(device) {
                return (granule + 1, Err(error));
            }
        }
        (end, Ok(()))
    }
}

impl Caching {
    /// Finds or maps space for a request in the arena's ranges (`try_allocate_expandable_block`).
    /// What was mapped before the device ran out stays mapped.
    pub(super) fn grow_expandable(
        &mut self,
        cx: &mut Context<'_>,
        arena: u32,
        rounded: u64,
    ) -> Result<NewBlock, StrategyError> {
        let mut slot = match self.find_space(arena, rounded) {
            Some(slot) => slot,
            None => self.reserve_range(cx, arena)?,
        };
        if self.settings.range_reserve.is_some() && self.is_too_short(slot, rounded) {
            self.release_range(cx, slot)?;
            return Ok(Err(Refusal::Size));
        }
        if self.blocks[slot].state == PieceState::Unmapped {
            let bytes = rounded.min(self.blocks[slot].size);
            if !self.map_block(cx, slot, bytes)? {
                return Ok(Err(Refusal::Device));
            }
        }
        while self.blocks[slot].size < rounded {
            let next = self.blocks[slot].next;
            if next == NONE {
                // The request is larger than the whole range.
                return Ok(Err(Refusal::Size));
            }
            let bytes = (rounded - self.blocks[slot].size).min(self.blocks[next].size);
            if !self.map_block(cx, next, bytes)? {
                return Ok(Err(Refusal::Device));
            }
            slot = next;
        }
        let block = &self.blocks[slot];
        self.pools.arenas[arena as usize].free.remove(block.entry(slot));
        let pool = self.pools.arenas[arena as usize].pool();
        self.pools.pools[pool as usize].segments += 1;
        Ok(Ok(slot))
    }

    /// The lowest place where adjacent free and unmapped blocks suffice (`find_expandable_block`).
    fn find_space(&self, arena: u32, rounded: u64) -> Option<u32> {
        let usable =
            |slot: u32| slot != NONE && matches!(self.blocks[slot].state, PieceState::Free | PieceState::Unmapped);
        self.pools.arenas[arena as usize].unmapped.slots().find_map(|slot| {
            let previous = self.blocks[slot].previous;
            let start = if usable(previous) { previous } else { slot };
            let (mut bytes, mut here) = (0, start);
            while bytes < rounded && usable(here) {
                bytes += self.blocks[here].size;
                here = self.blocks[here].next;
            }
            (bytes >= rounded).then_some(start)
        })
    }

    /// Whether a block is a whole range without memory that cannot hold a request.
    fn is_too_short(&self, slot: u32, rounded: u64) -> bool {
        let block = &self.blocks[slot];
        block.state == PieceState::Unmapped && !block.is_split() && block.size < rounded
    }

    /// Reserves a range for an arena: nine eighths of the device's memory, all of it unmapped (the
    /// constructor of `ExpandableSegment`).
    pub(super) fn reserve_range(&mut self, cx: &mut Context<'_>, arena: u32) -> Result<u32, StrategyError> {
        let owner = &self.pools.arenas[arena as usize];
        cx.expect_stream(owner.stream)?;
        let ((bytes, granule), stream) = (self.range_size(owner.is_large()), owner.stream);
        let base = cx.device.virtual_memory()?.reserve(bytes)?.0;
        let range = ExpandableRange { base, bytes, granule, stream, physical: Vec::new() };
        let range = insert_first_free(&mut self.ranges.ranges, range);
        let (region, state) = (arena, PieceState::Unmapped);
        let links = [NONE, self.numbers.of_segment()];
        let unmapped = MemoryPiece { region, note: range, state, links, ..MemoryPiece::new(base, bytes, stream) };
        let slot = self.blocks.insert(unmapped);
        self.pools.arenas[arena as usize].unmapped.insert(base, slot);
        Ok(slot)
    }

    /// The size of a range and of its granules.
    pub(super) fn range_size(&self, large: bool) -> (u64, u64) {
        let granule = if large { self.settings.large_segment_size } else { SMALL_BUFFER };
        let total = self.device_bytes;
        let whole = total + total / 8;
        let bytes = self.settings.range_reserve.map_or(whole, |reserve| reserve.bytes(total).min(whole));
        (round_up(bytes, granule), granule)
    }

    /// Maps the start of an unmapped block, in whole granules (`map_block`). Returns `false` if the
    /// device has no more.
    pub(super) fn map_block(&mut self, cx: &mut Context<'_>, slot: u32, bytes: u64) -> Result<bool, StrategyError> {
        let block = &self.blocks[slot];
        let MemoryPiece { address, note: number, size: whole, .. } = *block;
        let arena = block.arena();
        let Some(Some(range)) = self.ranges.ranges.get(number as usize) else { return Ok(false) };
        let first = ((address - range.base) / range.granule) as usize;
        let mapped = round_up(bytes, range.granule);
        let end = first + (mapped / range.granule) as usize;
        let neighbours = range.mapped_neighbours(first, end);
        if !self.ranges.map(cx.device, number, first, end)? {
            return Ok(false);
        }
        let owner = &mut self.pools.arenas[arena];
        owner.unmapped.remove(address);
        if mapped < whole {
            let number = self.numbers.of_part(self.blocks[slot].number());
            let rest = self.blocks[slot].sibling(address + mapped, whole - mapped, PieceState::Unmapped, number);
            let rest = self.blocks.insert_after(slot, rest);
            owner.unmapped.insert(address + mapped, rest);
            self.blocks[slot].size = mapped;
        }
        let now = owner.clock;
        let merged = self.blocks.merge(slot, PieceState::Free, now, |gone| owner.free.remove(gone));
        owner.free.insert(merged.entry);
        self.reserved += mapped;
        self.statistics.on_map(owner.is_large(), mapped, neighbours);
        let stream = owner.stream;
        cx.sink.event(StrategyEvent::SegmentMap { address: Address(address), bytes: mapped, stream });
        Ok(true)
    }

    /// Unmaps the whole granules of a free block (`unmap_block`). If its range is then unmapped
    /// from end to end, the addresses are released too (`release_expandable_segment`).
    pub(super) fn unmap_block(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let block = &self.blocks[slot];
        let (address, end, number) = (block.address, block.end(), block.note);
        let Some(Some(range)) = self.ranges.ranges.get(number as usize) else { return Ok(()) };
        let (base, granule) = (range.base, range.granule);
        let first = (address - base).div_ceil(granule) as usize;
        let last = ((end - base) / granule) as usize;
        if first < last {
            cx.device.stream_synchronize(range.stream)?;
            let (reached, result) = self.ranges.unmap(cx.device, number, first, last);
            if first < reached {
                let low = base + first as u64 * granule;
                let high = base + reached as u64 * granule;
                self.record_unmapped(cx, slot, low, high);
            }
            result?;
        }
        if self.blocks[slot].state == PieceState::Unmapped && !self.blocks[slot].is_split() {
            self.release_range(cx, slot)?;
        }
        Ok(())
    }

    /// Records the part `low..high` of a free block as unmapped; the parts on either side stay
    /// free.
    fn record_unmapped(&mut self, cx: &mut Context<'_>, slot: u32, low: u64, high: u64) {
        let block = self.blocks[slot];
        let (address, end, number, arena) = (block.address, block.end(), block.note, block.arena());
        self.pools.arenas[arena].free.remove(block.entry(slot));
        if address < low {
            let number = self.numbers.of_part(block.number());
            let head = block.sibling(address, low - address, PieceState::Free, number);
            let head = self.blocks.insert_before(slot, head);
            self.add_free(head);
        }
        if high < end {
            let number = self.numbers.of_part(block.number());
            let tail = self.blocks.insert_after(slot, block.sibling(high, end - high, PieceState::Free, number));
            self.add_free(tail);
        }
        let block = &mut self.blocks[slot];
        (block.address, block.size) = (low, high - low);
        let owner = &mut self.pools.arenas[arena];
        for neighbour in [block.previous, block.next].into_iter().filter_map(|slot| self.blocks.get(slot)) {
            if neighbour.state == PieceState::Unmapped {
                owner.unmapped.remove(neighbour.address);
            }
        }
        self.blocks.merge(slot, PieceState::Unmapped, owner.clock, |_| {});
        owner.unmapped.insert(self.blocks[slot].address, slot);
        let (large, stream, pool) = (owner.is_large(), owner.stream, owner.pool());
        self.reserved -= high - low;
        self.count_segment_gone(pool);
        if let Some(Some(range)) = self.ranges.ranges.get(number as usize) {
            let granule = |address: u64| ((address - range.base) / range.granule) as usize;
            self.statistics.on_unmap(large, high - low, range.mapped_neighbours(granule(low), granule(high)));
        }
        cx.sink.event(StrategyEvent::SegmentUnmap { address: Address(low), bytes: high - low, stream });
    }

    /// Adds a free block to its arena.
    fn add_free(&mut self, slot: u32) {
        let block = &mut self.blocks[slot];
        let owner = &mut self.pools.arenas[block.arena()];
        block.set_freed_at(owner.clock);
        owner.free.insert(block.entry(slot));
    }

    /// Releases the addresses of a range that consists of one unmapped block.
    pub(super) fn release_range(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let block = &self.blocks[slot];
        let (number, arena, address) = (block.note, block.arena(), block.address);
        if let Some(place) = self.ranges.ranges.get_mut(number as usize)
            && let Some(range) = place
        {
            cx.device.virtual_memory()?.address_free(Address(range.base), range.bytes)?;
            *place = None;
        }
        self.pools.arenas[arena].unmapped.remove(address);
        self.blocks.forget_uses(slot);
        self.blocks.remove(slot);
        Ok(())
    }

    /// Releases what an earlier failed call left behind.
    pub(super) fn release_stranded(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(self.ranges.leftovers.clear(cx.device)?)
    }
}

/// The unmapped parts of an arena's ranges, by start, with their slots.
///
/// The search for a free block must know whether unmapped addresses follow it. Until memory is
/// released, an arena has a single unmapped part, the end of its range. Its start is cached:
/// one comparison avoids loading the records of the block and its neighbour.
#[derive(Clone, Debug, Default)]
pub(super) struct UnmappedParts {
    /// The start of the first part, or zero, where no block ends.
    first: u64,
    /// Whether there are several parts.
    several: bool,
    parts: BTreeMap<u64, u32>,
}

impl UnmappedParts {
    /// Whether a part may start here; `false` is certain.
    #[inline]
    pub(super) fn may_start_at(&self, address: u64) -> bool {
        (self.first == address) | self.several
    }

    pub(super) fn insert(&mut self, start: u64, slot: u32) {
        self.parts.insert(start, slot);
        self.update();
    }

    pub(super) fn remove(&mut self, start: u64) {
        self.parts.remove(&start);
        self.update();
    }

    /// The slots of all parts, by ascending address.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.parts.values().copied()
    }

    fn update(&mut self) {
        self.first = self.parts.first_key_value().map_or(0, |(&start, _)| start);
        self.several = self.parts.len() > 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_unmapped_part_is_known_exactly() {
        let mut unmapped = UnmappedParts::default();
        assert!(!unmapped.may_start_at(4096));
        unmapped.insert(4096, 1);
        assert!(unmapped.may_start_at(4096) && !unmapped.may_start_at(8192));
        unmapped.insert(8192, 2);
        assert!(unmapped.may_start_at(4096) && unmapped.may_start_at(8192));
        assert_eq!(unmapped.slots().collect::<Vec<_>>(), [1, 2]);
        unmapped.remove(4096);
        assert!(unmapped.may_start_at(8192) && !unmapped.may_start_at(4096));
        unmapped.remove(8192);
        assert!(!unmapped.may_start_at(8192));
    }
}
