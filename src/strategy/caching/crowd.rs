//! The free blocks of one size beyond the lowest, which waits in the bin itself.
//!
//! A few are kept as they come: looking at all of them is quicker than keeping them in order. Many are kept in an
//! ordered map.

use std::{collections::BTreeMap, hint::select_unpredictable};

/// A crowd of more than this is kept in order.
const FEW: usize = 32;

/// Addresses and slots of blocks of one size.
#[derive(Clone, Debug)]
pub(super) enum Crowd {
    /// In no order. Kept when it runs empty, for its memory.
    Few(Vec<(u64, u32)>),
    Many(BTreeMap<u64, u32>),
}

impl Default for Crowd {
    fn default() -> Self {
        Crowd::Few(Vec::new())
    }
}

impl Crowd {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Crowd::Few(blocks) => blocks.is_empty(),
            Crowd::Many(blocks) => blocks.is_empty(),
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, address: u64, slot: u32) {
        match self {
            Crowd::Few(blocks) if blocks.len() < FEW => blocks.push((address, slot)),
            Crowd::Few(blocks) => {
                let mut many: BTreeMap<u64, u32> = blocks.drain(..).collect();
                many.insert(address, slot);
                *self = Crowd::Many(many);
            }
            Crowd::Many(blocks) => {
                blocks.insert(address, slot);
            }
        }
    }

    /// Removes a block that is in here.
    #[inline]
    pub(super) fn remove(&mut self, address: u64) {
        match self {
            Crowd::Few(blocks) => {
                let places = blocks.iter().enumerate();
                let place = places.fold(usize::MAX, |found, (place, &(other, _))| {
                    select_unpredictable(other == address, place, found)
                });
                if place < blocks.len() {
                    blocks.swap_remove(place);
                }
            }
            Crowd::Many(blocks) => {
                blocks.remove(&address);
                self.thin_out();
            }
        }
    }

    /// Removes the block with the lowest address.
    #[inline]
    pub(super) fn take_lowest(&mut self) -> Option<(u64, u32)> {
        match self {
            Crowd::Few(blocks) => {
                let place = place_of_lowest(blocks)?;
                Some(blocks.swap_remove(place))
            }
            Crowd::Many(blocks) => {
                let lowest = blocks.pop_first();
                self.thin_out();
                lowest
            }
        }
    }

    /// Goes back to few long before there are few, so that a crowd at the border does not change form at every turn.
    fn thin_out(&mut self) {
        if let Crowd::Many(blocks) = self
            && blocks.len() <= FEW / 4
        {
            *self = Crowd::Few(std::mem::take(blocks).into_iter().collect());
        }
    }

    /// The lowest block above an address.
    pub(super) fn above(&self, address: u64) -> Option<(u64, u32)> {
        match self {
            Crowd::Few(blocks) => blocks.iter().copied().filter(|&(other, _)| other > address).min(),
            Crowd::Many(blocks) => blocks.range(address + 1..).next().map(|(&address, &slot)| (address, slot)),
        }
    }

    /// The highest block below an address.
    pub(super) fn below(&self, address: u64) -> Option<(u64, u32)> {
        match self {
            Crowd::Few(blocks) => blocks.iter().copied().filter(|&(other, _)| other < address).max(),
            Crowd::Many(blocks) => blocks.range(..address).next_back().map(|(&address, &slot)| (address, slot)),
        }
    }
}

/// Without branches: which of a few random addresses is the lowest cannot be guessed.
#[inline]
fn place_of_lowest(blocks: &[(u64, u32)]) -> Option<usize> {
    let mut lowest = (blocks.first()?.0, 0);
    for (place, &(address, _)) in blocks.iter().enumerate() {
        lowest = select_unpredictable(address < lowest.0, (address, place), lowest);
    }
    Some(lowest.1)
}
