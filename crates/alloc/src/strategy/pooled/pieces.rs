//! Pieces of device memory that lie side by side, and the regions that they were cut from.
//!
//! Pieces live in one table and know their neighbours by 32-bit slots; a piece fills one cache
//! line. A piece keeps its slot when its end is cut off and when its next neighbour joins it, so
//! the first piece of a region never changes. The table knows which pieces are free. The order in
//! which free pieces are searched belongs to the strategy, for which every piece has two links and
//! a note.

use std::ops::{Deref, DerefMut, Index, IndexMut};

use crate::device::{Device, DeviceError};
use crate::strategy::{
    Block, BlockState, BlockView, Context, Layout, SegmentView, Stats, StrategyError, StrategyEvent,
    deferred::{DeferredFrees, Patience, StreamUses},
};
use oomph_base::{Address, StreamId};

/// No piece, no region, no stream uses.
pub(crate) const NONE: u32 = u32::MAX;

/// What a slot of a [`PieceTable`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceState {
    /// Nothing: the slot can be reused.
    Vacant,
    /// Memory that can be handed out.
    Free,
    /// Memory that a caller holds.
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
    /// Addresses without memory.
    Unmapped,
    /// Cut into small blocks, which are pieces of their own.
    Slab,
    /// In use under the addresses of a stitched range.
    Lent,
}

/// A piece of memory. Aligned, because a plain vector would lay every piece across two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct MemoryPiece {
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// What its present or last owner asked for.
    pub(crate) requested: u64,
    /// Neighbours by address. In a vacant slot `next` is the next vacant one.
    pub(crate) previous: u32,
    pub(crate) next: u32,
    /// The region or arena it belongs to.
    pub(crate) region: u32,
    /// For the strategy: a position in a list of free pieces, a time, or the number of a request.
    pub(crate) links: [u32; 2],
    /// For the strategy: a size class, an order, an arena, a slab, an expandable segment.
    pub(crate) note: u32,
    /// Its entry among the stream uses, or [`NONE`].
    pub(crate) uses: u32,
    pub(crate) generation: u32,
    /// The stream that used it last: before it serves another stream, that one must wait.
    pub(crate) stream: StreamId,
    pub(crate) state: PieceState,
}

impl MemoryPiece {
    /// A free piece without neighbours.
    pub(crate) fn new(address: u64, size: u64, stream: StreamId) -> MemoryPiece {
        MemoryPiece {
            address,
            size,
            requested: 0,
            previous: NONE,
            next: NONE,
            region: NONE,
            links: [NONE; 2],
            note: 0,
            uses: NONE,
            generation: 0,
            stream,
            state: PieceState::Free,
        }
    }

    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Whether other streams use it as well.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.uses != NONE
    }

    /// Becomes the first of the vacant slots.
    #[inline]
    pub(in crate::strategy) fn vacate(&mut self, vacant: &mut u32, slot: u32) {
        self.state = PieceState::Vacant;
        self.next = std::mem::replace(vacant, slot);
    }

    pub(crate) fn view(&self) -> BlockView {
        let state = match self.state {
            PieceState::Allocated => BlockState::Allocated,
            PieceState::Pending => BlockState::Pending,
            PieceState::Lent => BlockState::Lent,
            PieceState::Free | PieceState::Vacant | PieceState::Unmapped | PieceState::Slab => BlockState::Free,
        };
        BlockView { address: Address(self.address), size: self.size, requested: self.requested, state }
    }
}

/// All pieces of one strategy, and the streams that use them.
#[derive(Clone, Debug)]
pub(crate) struct PieceTable {
    pub(in crate::strategy) pieces: Vec<MemoryPiece>,
    /// The vacant slot to use next, or [`NONE`].
    pub(in crate::strategy) vacant: u32,
    uses: StreamUses,
    /// Freed pieces that other streams still use.
    pub(crate) deferred: DeferredFrees<u32>,
}

impl Default for PieceTable {
    fn default() -> Self {
        let (uses, deferred) = (StreamUses::default(), DeferredFrees::default());
        PieceTable { pieces: Vec::new(), vacant: NONE, uses, deferred }
    }
}

impl Index<u32> for PieceTable {
    type Output = MemoryPiece;
    #[inline]
    fn index(&self, slot: u32) -> &MemoryPiece {
        &self.pieces[slot as usize]
    }
}

impl IndexMut<u32> for PieceTable {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut MemoryPiece {
        &mut self.pieces[slot as usize]
    }
}

impl PieceTable {
    /// The piece in a slot, if there is such a slot.
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&MemoryPiece> {
        self.pieces.get(slot as usize)
    }

    /// The piece in a slot, if there is one and it is free.
    #[inline]
    pub(crate) fn free_piece(&self, slot: u32) -> Option<&MemoryPiece> {
        self.get(slot).filter(|piece| piece.state == PieceState::Free)
    }

    /// The live piece that a handle stands for.
    #[inline]
    pub(crate) fn live(&self, block: &Block) -> Result<&MemoryPiece, StrategyError> {
        match self.get(block.slot) {
            Some(piece)
                if piece.generation == block.generation
                    && piece.state == PieceState::Allocated
                    && piece.address == block.address.0 =>
            {
                Ok(piece)
            }
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// Every slot in use, in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &MemoryPiece)> {
        (0u32..).zip(&self.pieces).filter(|(_, piece)| piece.state != PieceState::Vacant)
    }

    /// A piece and all after it, in address order.
    pub(crate) fn chain(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((first != NONE).then_some(first), |&slot| Some(self[slot].next).filter(|&at| at != NONE))
    }

    /// Gives a piece a slot. Generations continue over all pieces of a slot.
    pub(crate) fn insert(&mut self, piece: MemoryPiece) -> u32 {
        let slot = self.take_slot();
        let generation = self[slot].generation;
        self[slot] = MemoryPiece { generation, ..piece };
        slot
    }

    /// Vacates a slot; its neighbours must no longer point to it.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        self.pieces[slot as usize].vacate(&mut self.vacant, slot);
    }

    /// Cuts a piece after `bytes`. It keeps the front; the slot of the rest, in the same state, is
    /// returned. Written field by field: to move a record that was just written stalls the
    /// processor.
    #[inline]
    pub(crate) fn cut(&mut self, slot: u32, bytes: u64) -> u32 {
        let rest = self.take_slot();
        let pieces = self.pieces.as_mut_slice();
        let front = &mut pieces[slot as usize];
        let (address, size, next) = (front.address + bytes, front.size - bytes, front.next);
        let (region, note, stream, state) = (front.region, front.note, front.stream, front.state);
        front.size = bytes;
        front.next = rest;
        let back = &mut pieces[rest as usize];
        back.address = address;
        back.size = size;
        back.requested = 0;
        back.previous = slot;
        back.next = next;
        back.region = region;
        back.note = note;
        back.uses = NONE;
        back.stream = stream;
        back.state = state;
        if let Some(next) = pieces.get_mut(next as usize) {
            next.previous = rest;
        }
        rest
    }

    /// Adds the next piece to this one; its slot becomes vacant.
    #[inline]
    pub(crate) fn join_next(&mut self, slot: u32) {
        let pieces = self.pieces.as_mut_slice();
        let joined = pieces[slot as usize].next;
        let gone = &mut pieces[joined as usize];
        let (size, next) = (gone.size, gone.next);
        gone.vacate(&mut self.vacant, joined);
        let piece = &mut pieces[slot as usize];
        piece.size += size;
        piece.next = next;
        if let Some(next) = pieces.get_mut(next as usize) {
            next.previous = slot;
        }
    }

    /// Joins a piece with those of its free neighbours that `joins` accepts, after calling
    /// `take_out` for each. Returns the slot of the whole.
    #[inline(always)]
    pub(crate) fn join_free(
        &mut self,
        slot: u32,
        joins: impl Fn(&MemoryPiece) -> bool,
        mut take_out: impl FnMut(&mut PieceTable, u32),
    ) -> u32 {
        let MemoryPiece { previous, next, .. } = self[slot];
        if self.free_piece(next).is_some_and(&joins) {
            take_out(self, next);
            self.join_next(slot);
        }
        if self.free_piece(previous).is_some_and(&joins) {
            take_out(self, previous);
            self.join_next(previous);
            return previous;
        }
        slot
    }

    /// Hands a piece out: the handle for its new owner.
    #[inline]
    pub(crate) fn occupy(&mut self, slot: u32, requested: u64) -> Block {
        let piece = &mut self.pieces[slot as usize];
        piece.state = PieceState::Allocated;
        piece.requested = requested;
        piece.generation = piece.generation.wrapping_add(1);
        Block { address: Address(piece.address), size: piece.size, slot, generation: piece.generation }
    }

    /// Notes that another stream uses a block; `capturing` says whether a stream is being captured.
    pub(crate) fn note_use(&mut self, block: &Block, stream: StreamId, capturing: bool) -> Result<(), StrategyError> {
        let piece = self.live(block)?;
        if piece.stream == stream {
            return Ok(());
        }
        if piece.uses == NONE {
            self[block.slot].uses = self.uses.add();
        }
        self.uses.record(self[block.slot].uses, stream, capturing);
        Ok(())
    }

    /// The other streams that use a piece.
    pub(crate) fn users(&self, slot: u32) -> &[StreamId] {
        self.uses.streams(self[slot].uses)
    }

    /// Forgets which other streams use a piece.
    pub(crate) fn forget_uses(&mut self, slot: u32) {
        let entry = std::mem::replace(&mut self[slot].uses, NONE);
        if entry != NONE {
            self.uses.remove(entry);
        }
    }

    /// Drops the uses that were noted during a capture. Returns whether others are left.
    pub(crate) fn end_capture(&mut self, slot: u32) -> bool {
        let uses = self[slot].uses;
        self.uses.end_capture(uses);
        !self.uses.streams(uses).is_empty()
    }

    /// Frees a piece that other streams use: it waits for them.
    pub(crate) fn free_later(&mut self, device: &mut dyn Device, slot: u32) -> Result<(), DeviceError> {
        self.deferred.hold(device, slot, self.uses.streams(self[slot].uses))?;
        self.forget_uses(slot);
        self[slot].state = PieceState::Pending;
        Ok(())
    }

    /// The freed pieces whose streams are done, and the error that stopped the search for more.
    pub(crate) fn completed(
        &mut self,
        device: &mut dyn Device,
        patience: Patience,
    ) -> (Vec<u32>, Result<(), DeviceError>) {
        let mut completed = Vec::new();
        let result = self.deferred.release(device, patience, &mut completed);
        (completed, result)
    }

    /// Waits for the streams of the wanted pieces that were freed. Returns those, and the error that stopped it.
    pub(crate) fn completed_of(
        &mut self,
        device: &mut dyn Device,
        wanted: impl Fn(&MemoryPiece) -> bool,
    ) -> (Vec<u32>, Result<(), DeviceError>) {
        let mut completed = Vec::new();
        let pieces = &self.pieces;
        let result = self.deferred.release_wanted(device, |slot| wanted(&pieces[slot as usize]), &mut completed);
        (completed, result)
    }

    /// Reports and counts that a pending piece can be reused.
    pub(crate) fn report_completed(&self, cx: &mut Context<'_>, stats: &mut Stats, slot: u32) {
        let MemoryPiece { address, size, requested, stream, .. } = self[slot];
        cx.sink.event(StrategyEvent::FreeCompleted { address: Address(address), requested, stream });
        stats.on_reusable(requested, size);
    }

    /// A slot for a new piece. The last piece of that slot is still in it.
    #[inline]
    pub(in crate::strategy) fn take_slot(&mut self) -> u32 {
        match self.pieces.get(self.vacant as usize) {
            Some(piece) => std::mem::replace(&mut self.vacant, piece.next),
            None => self.add_slot(),
        }
    }

    #[cold]
    fn add_slot(&mut self) -> u32 {
        self.pieces.push(MemoryPiece::new(0, 0, StreamId::DEFAULT));
        (self.pieces.len() - 1) as u32
    }
}

/// One allocation from the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRegion {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The stream for which it was taken.
    pub(crate) stream: StreamId,
    /// The piece at its start, or [`NONE`] if the region has gone.
    first: u32,
    /// Pieces that are allocated or pending.
    pub(super) occupied: u32,
}

/// Regions and their pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegionTable {
    pieces: PieceTable,
    regions: Vec<DeviceRegion>,
    vacant_regions: Vec<u32>,
}

/// A table of regions is used like the table of their pieces.
impl Deref for RegionTable {
    type Target = PieceTable;
    #[inline]
    fn deref(&self) -> &PieceTable {
        &self.pieces
    }
}

impl DerefMut for RegionTable {
    #[inline]
    fn deref_mut(&mut self) -> &mut PieceTable {
        &mut self.pieces
    }
}

impl RegionTable {
    /// A new region, one free piece, whose slot is returned.
    pub(super) fn add_region(&mut self, address: Address, bytes: u64, stream: StreamId) -> u32 {
        let number = self.vacant_regions.pop().unwrap_or(self.regions.len() as u32);
        let piece = MemoryPiece { region: number, ..MemoryPiece::new(address.0, bytes, stream) };
        let first = self.pieces.insert(piece);
        let region = DeviceRegion { address: address.0, bytes, stream, first, occupied: 0 };
        match self.regions.get_mut(number as usize) {
            Some(vacant) => *vacant = region,
            None => self.regions.push(region),
        }
        first
    }

    /// Forgets a region and its pieces. The policy must no longer know any of them.
    pub(super) fn remove_region(&mut self, region: u32) {
        let mut slot = std::mem::replace(&mut self.regions[region as usize].first, NONE);
        while slot != NONE {
            let next = self[slot].next;
            self.pieces.remove(slot);
            slot = next;
        }
        self.vacant_regions.push(region);
    }

    /// The region of that number.
    #[inline]
    pub(crate) fn region(&self, region: u32) -> &DeviceRegion {
        &self.regions[region as usize]
    }

    /// The stream for which the region of a piece was taken.
    #[inline]
    pub(crate) fn owner(&self, slot: u32) -> StreamId {
        self.region(self[slot].region).stream
    }

    /// The numbers of all regions, not in address order.
    pub(crate) fn regions(&self) -> Vec<u32> {
        let present = (0u32..).zip(&self.regions).filter(|(_, region)| region.first != NONE);
        present.map(|(number, _)| number).collect()
    }

    /// The slots of a region's pieces, in address order.
    pub(crate) fn pieces_of(&self, region: u32) -> impl Iterator<Item = u32> + '_ {
        self.pieces.chain(self.regions[region as usize].first)
    }

    /// Hands a free piece out.
    #[inline]
    pub(super) fn hand_out(&mut self, slot: u32, requested: u64, stream: StreamId) -> Block {
        self[slot].stream = stream;
        self.regions[self.pieces[slot].region as usize].occupied += 1;
        self.pieces.occupy(slot, requested)
    }

    /// Makes an allocated or pending piece free.
    #[inline]
    pub(super) fn vacate(&mut self, slot: u32) {
        let piece = &mut self.pieces[slot];
        piece.state = PieceState::Free;
        self.regions[piece.region as usize].occupied -= 1;
    }

    /// Everything, in address order. `pool` names the part of the strategy that a region belongs
    /// to.
    pub(super) fn layout(&self, pool: impl Fn(&DeviceRegion) -> &'static str) -> Layout {
        let view = |number| {
            let region = self.region(number);
            let blocks = self.pieces_of(number).map(|slot| self[slot].view()).collect();
            SegmentView::new(Address(region.address), region.bytes, region.stream, pool(region), blocks)
        };
        Layout::of(self.regions().into_iter().map(view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_fills_one_cache_line() {
        assert_eq!((size_of::<MemoryPiece>(), align_of::<MemoryPiece>()), (64, 64));
    }

    #[test]
    fn a_cut_piece_can_be_joined_again() {
        let mut table = RegionTable::default();
        let first = table.add_region(Address(4096), 1000, StreamId(3));
        let second = table.cut(first, 300);
        let third = table.cut(second, 300);
        let sizes = |table: &RegionTable| table.pieces_of(0).map(|slot| table[slot].size).collect::<Vec<_>>();
        assert_eq!(sizes(&table), [300, 300, 400]);
        assert_eq!((table[third].address, table[third].previous, table[third].next), (4696, second, NONE));
        assert_eq!((table[third].stream, table[third].state), (StreamId(3), PieceState::Free));
        table.join_next(first);
        assert_eq!((sizes(&table), table[third].previous), (vec![600, 400], first));
        table.join_next(first);
        assert_eq!((sizes(&table), table[first].end()), (vec![1000], 5096));
        assert_eq!(table.iter().count(), 1);
        assert_eq!(table.layout(|_| "all").segments[0].stream, StreamId(3));
    }

    #[test]
    fn slots_and_regions_are_reused_and_stale_handles_refused() {
        let mut table = RegionTable::default();
        let slot = table.add_region(Address(4096), 512, StreamId(0));
        let old = table.hand_out(slot, 500, StreamId(0));
        assert_eq!(table.live(&old).map(|piece| piece.requested), Ok(500));
        table.vacate(slot);
        table.remove_region(0);
        assert_eq!(table.regions(), []);
        let again = table.add_region(Address(4096), 512, StreamId(0));
        let new = table.hand_out(again, 500, StreamId(0));
        assert_eq!((again, new.address), (slot, old.address));
        assert!(table.live(&old).is_err() && table.live(&new).is_ok());
    }
}
