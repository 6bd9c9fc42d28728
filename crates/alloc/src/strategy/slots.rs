//! Live blocks by slot, for strategies whose blocks are independent of each other.
//!
//! A slot is reused as soon as its block is gone; its generation then counts on, so that a handle from before is
//! told apart from the present tenant's. [`null`](super::null), [`direct`](super::direct) and plugins keep their blocks here.

use super::{Block, StrategyError};
use oomph_base::Address;

/// Ends the chain of vacant slots.
const NO_SLOT: u32 = u32::MAX;

/// A table of live blocks, each with a note of its owner's.
#[derive(Clone, Debug)]
pub struct Slots<N> {
    slots: Vec<Slot<N>>,
    /// The vacant slot to use next; each names the one after it.
    vacant: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot<N> {
    /// [`Address::NULL`] while the slot is vacant.
    address: Address,
    size: u64,
    generation: u32,
    next_vacant: u32,
    note: N,
}

impl<N> Slot<N> {
    #[inline]
    fn is_home_of(&self, block: &Block) -> bool {
        self.generation == block.generation && self.address == block.address && block.address != Address::NULL
    }
}

impl<N> Default for Slots<N> {
    fn default() -> Self {
        Slots { slots: Vec::new(), vacant: NO_SLOT }
    }
}

impl<N: Copy> Slots<N> {
    /// Takes a block in and makes the handle for it. `address` is not null.
    #[inline]
    pub fn insert(&mut self, address: Address, size: u64, note: N) -> Block {
        if self.vacant as usize >= self.slots.len() {
            self.add_vacant(note);
        }
        let number = self.vacant;
        let slot = &mut self.slots[number as usize];
        self.vacant = slot.next_vacant;
        slot.address = address;
        slot.size = size;
        slot.note = note;
        Block { address, size, slot: number, generation: slot.generation }
    }

    /// One more slot, to be used next. It returns nothing, so that the handle that `insert` makes stays in registers.
    #[cold]
    fn add_vacant(&mut self, note: N) {
        // Host memory ends long before four billion live blocks.
        self.vacant = self.slots.len() as u32;
        self.slots.push(Slot { address: Address::NULL, size: 0, generation: 0, next_vacant: NO_SLOT, note });
    }

    /// Size and note of a live block; an error if the handle is stale or foreign.
    #[inline]
    pub fn get(&self, block: &Block) -> Result<(u64, N), StrategyError> {
        match self.slots.get(block.slot as usize) {
            Some(slot) if slot.is_home_of(block) => Ok((slot.size, slot.note)),
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// Takes a live block out; an error, and nothing changed, if the handle is stale or foreign.
    #[inline]
    pub fn remove(&mut self, block: &Block) -> Result<(u64, N), StrategyError> {
        match self.slots.get_mut(block.slot as usize) {
            Some(slot) if slot.is_home_of(block) => {
                slot.address = Address::NULL;
                slot.generation = slot.generation.wrapping_add(1);
                slot.next_vacant = self.vacant;
                self.vacant = block.slot;
                Ok((slot.size, slot.note))
            }
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// The live blocks and their notes, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (Block, N)> + '_ {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.address != Address::NULL).map(|(number, slot)| {
            let block = Block { address: slot.address, size: slot.size, slot: number, generation: slot.generation };
            (block, slot.note)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_told_from_the_present_tenant() {
        let mut slots = Slots::default();
        let first = slots.insert(Address(256), 1, 'a');
        assert_eq!(slots.remove(&first), Ok((1, 'a')));
        let second = slots.insert(Address(256), 2, 'b');
        assert_eq!((first.slot, first.address), (second.slot, second.address));
        assert!(slots.remove(&first).is_err());
        assert!(slots.get(&first).is_err());
        assert_eq!(slots.get(&second), Ok((2, 'b')));
        assert_eq!(slots.iter().collect::<Vec<_>>(), [(second, 'b')]);
    }

    #[test]
    fn a_handle_that_was_never_handed_out_is_refused() {
        let mut slots = Slots::default();
        let block = slots.insert(Address(256), 1, ());
        assert!(slots.get(&Block { address: Address(512), ..block }).is_err());
        assert!(slots.get(&Block { slot: 9, ..block }).is_err());
        slots.remove(&block).unwrap();
        assert!(slots.get(&Block { address: Address::NULL, generation: 1, ..block }).is_err());
    }
}
