//! Slabs: blocks of the page heap that are cut into small blocks.
//!
//! A slab belongs to the stream that made it. Empty ones stay on the shelf of small blocks, where the next small request
//! finds them, until the page heap needs room.

use super::{
    Oomph,
    blocks::{Record, State},
};

impl Oomph {
    /// Makes a slab of a free block of the page heap that is on no shelf; returns the small block that fills it, on no
    /// shelf either.
    pub(super) fn make_slab(&mut self, slot: u32) -> u32 {
        let bytes = self.settings.slab_bytes;
        if self.blocks[slot].size > bytes {
            let rest = self.blocks.split(slot, bytes);
            self.shelve(rest);
        }
        let slab = &mut self.blocks[slot];
        slab.state = State::Slab;
        let whole = Record::lone(slab.address, slab.size, slot, slab.stream, State::Free);
        self.counters.slabs_made += 1;
        self.blocks.insert(whole)
    }

    /// Gives every empty slab back to the page heap; says whether there was one.
    pub(super) fn return_empty_slabs(&mut self) -> bool {
        let before = self.counters.slabs_returned;
        for stream in 0..self.homes.len() {
            while let Some(whole) = self.homes[stream].small.find_any(&self.blocks, self.settings.slab_bytes) {
                self.homes[stream].small.remove(&mut self.blocks, whole);
                let slab = self.blocks[whole].slab;
                self.blocks.remove(whole);
                self.free_block(slab);
                self.counters.slabs_returned += 1;
            }
        }
        self.counters.slabs_returned > before
    }
}
