//! Live blocks by slot, for strategies whose blocks are independent: [`null`](super::null),
//! [`direct`](super::direct), plugins.
//!
//! A slot is reused when its block is freed. Its generation then counts up, so that stale handles
//! are detected.

use super::{Block, StrategyError};
use oomph_base::Address;

/// The end of the list of vacant slots.
const NO_SLOT: u32 = u32::MAX;

/// Puts an item into the first empty place of a list, or at its end; returns the place.
pub(super) fn insert_first_free<T>(places: &mut Vec<Option<T>>, item: T) -> u32 {
    let place = places.iter().position(Option::is_none).unwrap_or_else(|| {
        places.push(None);
        places.len() - 1
    });
    places[place] = Some(item);
    place as u32
}

/// A table of live blocks, each with a note of the strategy.
#[derive(Clone, Debug)]
pub struct Slots<N> {
    slots: Vec<SlotEntry<N>>,
    /// The vacant slot to use next; vacant slots form a list.
    vacant: u32,
}

#[derive(Clone, Copy, Debug)]
struct SlotEntry<N> {
    /// [`Address::NULL`] while the slot is vacant.
    address: Address,
    size: u64,
    generation: u32,
    next_vacant: u32,
    note: N,
}

impl<N> SlotEntry<N> {
    #[inline]
    fn holds(&self, block: &Block) -> bool {
        self.generation == block.generation && self.address == block.address && block.address != Address::NULL
    }
}

impl<N> Default for Slots<N> {
    fn default() -> Self {
        Slots { slots: Vec::new(), vacant: NO_SLOT }
    }
}

impl<N: Copy> Slots<N> {
    /// Adds a block and returns its handle. `address` is not null.
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

    /// Adds a vacant slot. Returns nothing, so that the handle in `insert` stays in registers.
    #[cold]
    fn add_vacant(&mut self, note: N) {
        // Host memory is exhausted long before four billion live blocks.
        self.vacant = self.slots.len() as u32;
        self.slots.push(SlotEntry { address: Address::NULL, size: 0, generation: 0, next_vacant: NO_SLOT, note });
    }

    /// Size and note of a live block; an error if the handle is stale or foreign.
    #[inline]
    pub fn get(&self, block: &Block) -> Result<(u64, N), StrategyError> {
        match self.slots.get(block.slot as usize) {
            Some(slot) if slot.holds(block) => Ok((slot.size, slot.note)),
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// Removes a live block; an error without any change if the handle is stale or foreign.
    #[inline]
    pub fn remove(&mut self, block: &Block) -> Result<(u64, N), StrategyError> {
        match self.slots.get_mut(block.slot as usize) {
            Some(slot) if slot.holds(block) => {
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
    fn stale_handle_is_refused() {
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
    fn foreign_handle_is_refused() {
        let mut slots = Slots::default();
        let block = slots.insert(Address(256), 1, ());
        assert!(slots.get(&Block { address: Address(512), ..block }).is_err());
        assert!(slots.get(&Block { slot: 9, ..block }).is_err());
        slots.remove(&block).unwrap();
        assert!(slots.get(&Block { address: Address::NULL, generation: 1, ..block }).is_err());
    }
}
