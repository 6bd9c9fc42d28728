//! Which superblocks an arena's region is divided into, and whose they are.
//!
//! A superblock is a run of neighbouring pieces that bear its number. Its first piece keeps its slot for as long as the
//! superblock lasts. This module knows no free lists and no device.

use crate::strategy::pooled::{Ground, NONE, State};

/// Whom a superblock belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner(u32);

impl Owner {
    /// The arena from which the others take.
    pub(super) const GLOBAL: Owner = Owner(0);

    /// The arena of a stream or thread, by number.
    pub(super) fn arena(number: usize) -> Owner {
        Owner(number as u32 + 1)
    }

    /// The position in a table of all owners.
    #[inline]
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Superblock {
    /// Its first piece, or [`NONE`] if it is no more.
    first: u32,
    bytes: u64,
    owner: Owner,
}

/// All superblocks by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Superblocks {
    superblocks: Vec<Superblock>,
    vacant: Vec<u32>,
}

impl Superblocks {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.superblocks.len() - self.vacant.len()
    }

    /// Makes a free piece a superblock of the global arena.
    pub(super) fn add(&mut self, ground: &mut Ground, first: u32) {
        let superblock = Superblock { first, bytes: ground[first].size, owner: Owner::GLOBAL };
        let number = match self.vacant.pop() {
            Some(number) => {
                self.superblocks[number as usize] = superblock;
                number
            }
            None => {
                self.superblocks.push(superblock);
                (self.superblocks.len() - 1) as u32
            }
        };
        ground[first].note = number;
    }

    #[inline]
    pub(super) fn owner(&self, number: u32) -> Owner {
        self.superblocks[number as usize].owner
    }

    pub(super) fn give_to(&mut self, number: u32, owner: Owner) {
        self.superblocks[number as usize].owner = owner;
    }

    #[inline]
    pub(super) fn bytes(&self, number: u32) -> u64 {
        self.superblocks[number as usize].bytes
    }

    /// Its first piece, if nothing of it is in use: then that is all of it.
    #[inline]
    pub(super) fn empty(&self, ground: &Ground, number: u32) -> Option<u32> {
        let Superblock { first, bytes, .. } = self.superblocks[number as usize];
        ground.free_piece(first).filter(|piece| piece.size == bytes).map(|_| first)
    }

    /// The first piece of an empty superblock of the global arena that holds this piece.
    pub(super) fn empty_around(&self, ground: &Ground, slot: u32) -> Option<u32> {
        let number = ground.free_piece(slot)?.note;
        if self.owner(number) == Owner::GLOBAL { self.empty(ground, number) } else { None }
    }

    /// Cuts an empty superblock. The rest, a superblock of the global arena, is returned by its only piece.
    pub(super) fn split(&mut self, ground: &mut Ground, number: u32, bytes: u64) -> u32 {
        let superblock = &mut self.superblocks[number as usize];
        superblock.bytes = bytes;
        let rest = ground.cut(superblock.first, bytes);
        self.add(ground, rest);
        rest
    }

    /// Adds the superblock of the next piece to that of this one; both are empty.
    pub(super) fn join_next(&mut self, ground: &mut Ground, slot: u32) {
        let (number, next) = (ground[slot].note, ground[ground[slot].next].note);
        let gone = &mut self.superblocks[next as usize];
        gone.first = NONE;
        let bytes = gone.bytes;
        self.superblocks[number as usize].bytes += bytes;
        self.vacant.push(next);
        ground.join_next(slot);
    }

    /// The superblocks that belong to streams and threads.
    pub(super) fn handed_out(&self) -> Vec<u32> {
        let out = |superblock: &Superblock| superblock.first != NONE && superblock.owner != Owner::GLOBAL;
        (0u32..).zip(&self.superblocks).filter(|(_, superblock)| out(superblock)).map(|(number, _)| number).collect()
    }

    /// The free pieces of a superblock.
    pub(super) fn free_pieces(&self, ground: &Ground, number: u32) -> Vec<u32> {
        let first = Some(self.superblocks[number as usize].first);
        let next = |&slot: &u32| Some(ground[slot].next).filter(|&next| next != NONE && ground[next].note == number);
        std::iter::successors(first, next).filter(|&slot| ground[slot].state == State::Free).collect()
    }
}
