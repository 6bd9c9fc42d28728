//! Regions of device memory, cut into neighbouring pieces: the ground on which pooling policies work.
//!
//! Pieces live in one slab and know their neighbours by 32-bit slots; a piece fills one cache line. A piece keeps its
//! slot when its end is cut off, and when a later neighbour joins it, so that the first piece of a region never
//! changes. Which pieces are free is written here; in which order free ones are looked at is the policy's affair, for
//! which every piece has two links and a note.

use std::ops::{Index, IndexMut};

use crate::strategy::{Block, BlockState, BlockView, Layout, SegmentView, StrategyError};
use oomph_base::{Address, StreamId};

/// No piece, no region, no stream uses.
pub(in crate::strategy) const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::strategy) enum State {
    /// Nothing: the slot waits for a new tenant.
    Vacant,
    /// Memory that can be handed out.
    Free,
    /// In a caller's hands.
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
}

/// A piece of a region.
#[derive(Clone, Copy, Debug)]
pub(in crate::strategy) struct Piece {
    pub(in crate::strategy) address: u64,
    pub(in crate::strategy) size: u64,
    /// What the present or last owner asked for.
    pub(in crate::strategy) requested: u64,
    /// Neighbours in the region, by address. In a vacant slot `next` is the next vacant one.
    pub(in crate::strategy) previous: u32,
    pub(in crate::strategy) next: u32,
    /// The region it belongs to.
    pub(in crate::strategy) region: u32,
    /// The policy's own: a place in a list of free pieces.
    pub(in crate::strategy) links: [u32; 2],
    /// The policy's own: a size class, an order, an arena.
    pub(in crate::strategy) note: u32,
    /// Its entry among the stream uses, or [`NONE`].
    pub(in crate::strategy) uses: u32,
    pub(in crate::strategy) generation: u32,
    /// On whose stream it was last used: who takes it for another must make that one wait.
    pub(in crate::strategy) stream: StreamId,
    pub(in crate::strategy) state: State,
}

/// One allocation from the device.
#[derive(Clone, Copy, Debug)]
pub(in crate::strategy) struct Region {
    pub(in crate::strategy) address: u64,
    pub(in crate::strategy) bytes: u64,
    /// For whom it was taken.
    pub(in crate::strategy) stream: StreamId,
    /// The piece at its start.
    pub(in crate::strategy) first: u32,
    /// Pieces that are allocated or pending.
    pub(in crate::strategy) occupied: u32,
}

impl Region {
    fn is_gone(&self) -> bool {
        self.first == NONE
    }
}

/// All regions and their pieces.
#[derive(Clone, Debug)]
pub(in crate::strategy) struct Ground {
    pieces: Vec<Piece>,
    vacant: u32,
    regions: Vec<Region>,
    vacant_regions: Vec<u32>,
}

impl Default for Ground {
    fn default() -> Self {
        Ground { pieces: Vec::new(), vacant: NONE, regions: Vec::new(), vacant_regions: Vec::new() }
    }
}

impl Index<u32> for Ground {
    type Output = Piece;
    #[inline]
    fn index(&self, slot: u32) -> &Piece {
        &self.pieces[slot as usize]
    }
}

impl IndexMut<u32> for Ground {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Piece {
        &mut self.pieces[slot as usize]
    }
}

impl Ground {
    /// A new region, one free piece, whose slot is returned.
    pub(super) fn add_region(&mut self, address: Address, bytes: u64, stream: StreamId) -> u32 {
        let first = self.settle();
        let region = Region { address: address.0, bytes, stream, first, occupied: 0 };
        let number = match self.vacant_regions.pop() {
            Some(number) => {
                self.regions[number as usize] = region;
                number
            }
            None => {
                self.regions.push(region);
                (self.regions.len() - 1) as u32
            }
        };
        let generation = self[first].generation;
        self[first] = Piece { generation, region: number, stream, ..Piece::lone(address.0, bytes) };
        first
    }

    /// Forgets a region and its pieces, of which the policy must no longer know any.
    pub(super) fn remove_region(&mut self, region: u32) {
        let mut slot = std::mem::replace(&mut self.regions[region as usize].first, NONE);
        while slot != NONE {
            let next = self[slot].next;
            self.vacate(slot);
            slot = next;
        }
        self.vacant_regions.push(region);
    }

    /// The region of that number.
    #[inline]
    pub(in crate::strategy) fn region(&self, region: u32) -> &Region {
        &self.regions[region as usize]
    }

    /// Every region's number, in no particular order of addresses.
    pub(in crate::strategy) fn regions(&self) -> impl Iterator<Item = u32> + use<> {
        let present: Vec<u32> =
            (0u32..).zip(&self.regions).filter(|(_, region)| !region.is_gone()).map(|(number, _)| number).collect();
        present.into_iter()
    }

    /// The slots of a region's pieces, in address order.
    pub(in crate::strategy) fn pieces_of(&self, region: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.regions[region as usize].first;
        std::iter::successors((first != NONE).then_some(first), |&slot| Some(self[slot].next).filter(|&at| at != NONE))
    }

    /// Cuts a piece after `bytes`. It keeps the front; the slot of the rest, which is free, is returned.
    #[inline]
    pub(in crate::strategy) fn cut(&mut self, slot: u32, bytes: u64) -> u32 {
        let rest = self.settle();
        let front = &mut self.pieces[slot as usize];
        let (address, size, next) = (front.address + bytes, front.size - bytes, front.next);
        let (region, stream, note) = (front.region, front.stream, front.note);
        front.size = bytes;
        front.next = rest;
        let back = &mut self.pieces[rest as usize];
        back.address = address;
        back.size = size;
        back.requested = 0;
        back.previous = slot;
        back.next = next;
        back.region = region;
        back.note = note;
        back.uses = NONE;
        back.stream = stream;
        back.state = State::Free;
        if let Some(next) = self.pieces.get_mut(next as usize) {
            next.previous = rest;
        }
        rest
    }

    /// Adds the next piece to this one; its slot becomes vacant.
    #[inline]
    pub(in crate::strategy) fn join_next(&mut self, slot: u32) {
        let gone = self[slot].next;
        let Piece { size, next, .. } = self[gone];
        let piece = &mut self[slot];
        piece.size += size;
        piece.next = next;
        if let Some(next) = self.pieces.get_mut(next as usize) {
            next.previous = slot;
        }
        self.vacate(gone);
    }

    /// The piece in that slot, if it is there and free.
    #[inline]
    pub(in crate::strategy) fn free_piece(&self, slot: u32) -> Option<&Piece> {
        self.pieces.get(slot as usize).filter(|piece| piece.state == State::Free)
    }

    /// The live piece that a handle stands for.
    #[inline]
    pub(super) fn live(&self, block: &Block) -> Result<&Piece, StrategyError> {
        match self.pieces.get(block.slot as usize) {
            Some(piece)
                if piece.generation == block.generation
                    && piece.state == State::Allocated
                    && piece.address == block.address.0 =>
            {
                Ok(piece)
            }
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// Makes a free piece a caller's.
    #[inline]
    pub(super) fn occupy(&mut self, slot: u32, requested: u64, stream: StreamId) -> Block {
        let piece = &mut self.pieces[slot as usize];
        piece.state = State::Allocated;
        piece.requested = requested;
        piece.stream = stream;
        self.regions[piece.region as usize].occupied += 1;
        Block { address: Address(piece.address), size: piece.size, slot, generation: piece.generation }
    }

    /// Makes a caller's piece free: handles to it are stale from now on.
    #[inline]
    pub(super) fn vacate_tenant(&mut self, slot: u32) {
        let piece = &mut self.pieces[slot as usize];
        piece.state = State::Free;
        piece.generation = piece.generation.wrapping_add(1);
        self.regions[piece.region as usize].occupied -= 1;
    }

    /// Everything, in address order. `pool` names the part of the strategy that a region belongs to.
    pub(super) fn layout(&self, pool: impl Fn(&Region) -> &'static str) -> Layout {
        let mut segments: Vec<SegmentView> = self
            .regions()
            .map(|number| {
                let region = self.region(number);
                SegmentView {
                    address: Address(region.address),
                    bytes: region.bytes,
                    stream: region.stream,
                    pool: pool(region).into(),
                    pool_id: (0, 0),
                    mapped: false,
                    alias: false,
                    blocks: self.pieces_of(number).map(|slot| self[slot].view()).collect(),
                }
            })
            .collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    /// A slot for a new tenant, whose predecessor's record is still in it.
    #[inline]
    fn settle(&mut self) -> u32 {
        match self.pieces.get(self.vacant as usize) {
            Some(piece) => std::mem::replace(&mut self.vacant, piece.next),
            None => self.add_slot(),
        }
    }

    #[cold]
    fn add_slot(&mut self) -> u32 {
        self.pieces.push(Piece { state: State::Vacant, ..Piece::lone(0, 0) });
        (self.pieces.len() - 1) as u32
    }

    #[inline]
    fn vacate(&mut self, slot: u32) {
        let piece = &mut self.pieces[slot as usize];
        piece.state = State::Vacant;
        piece.next = std::mem::replace(&mut self.vacant, slot);
    }
}

impl Piece {
    /// A free piece without neighbours.
    fn lone(address: u64, size: u64) -> Piece {
        Piece {
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
            stream: StreamId::DEFAULT,
            state: State::Free,
        }
    }

    fn view(&self) -> BlockView {
        let state = match self.state {
            State::Allocated => BlockState::Allocated,
            State::Pending => BlockState::Pending,
            State::Free | State::Vacant => BlockState::Free,
        };
        BlockView { address: Address(self.address), size: self.size, requested: self.requested, state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_fills_at_most_one_cache_line() {
        assert!(size_of::<Piece>() <= 64, "{}", size_of::<Piece>());
    }

    #[test]
    fn what_is_cut_can_be_joined_again() {
        let mut ground = Ground::default();
        let first = ground.add_region(Address(4096), 1000, StreamId(3));
        let second = ground.cut(first, 300);
        let third = ground.cut(second, 300);
        let sizes = |ground: &Ground| ground.pieces_of(0).map(|slot| ground[slot].size).collect::<Vec<_>>();
        assert_eq!(sizes(&ground), [300, 300, 400]);
        assert_eq!((ground[third].address, ground[third].previous, ground[third].next), (4696, second, NONE));
        ground.join_next(first);
        assert_eq!((sizes(&ground), ground[third].previous), (vec![600, 400], first));
        ground.join_next(first);
        assert_eq!(sizes(&ground), [1000]);
        assert_eq!(ground.layout(|_| "all").segments[0].stream, StreamId(3));
    }

    #[test]
    fn slots_and_regions_are_used_again_and_old_handles_refused() {
        let mut ground = Ground::default();
        let slot = ground.add_region(Address(4096), 512, StreamId(0));
        let old = ground.occupy(slot, 500, StreamId(0));
        assert_eq!(ground.live(&old).map(|piece| piece.requested), Ok(500));
        ground.vacate_tenant(slot);
        ground.remove_region(0);
        assert_eq!(ground.regions().count(), 0);
        let again = ground.add_region(Address(4096), 512, StreamId(0));
        let new = ground.occupy(again, 500, StreamId(0));
        assert_eq!((again, new.address), (slot, old.address));
        assert!(ground.live(&old).is_err() && ground.live(&new).is_ok());
    }
}
