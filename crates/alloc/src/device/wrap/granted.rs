//! What a scripted device has granted: enough of the books to tell how much memory is held.
//!
//! No rule is checked here. Whoever wrote the script has already judged the calls in it.

use std::collections::BTreeMap;

use super::exchange::{Answer, Call, Reply};
use crate::device::PhysicalId;
use oomph_base::{Address, round_up};

/// Memory handed out, in whole pages. Small allocations do not share pages here.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    page_bytes: u64,
    held: u64,
    allocations: BTreeMap<Address, u64>,
    pieces: BTreeMap<PhysicalId, Piece>,
    mapped: BTreeMap<Address, PhysicalId>,
    last_piece: u64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    /// The handle, while it is not released, and every mapping.
    references: u32,
}

impl Granted {
    pub(super) fn new(page_bytes: u64) -> Granted {
        Granted {
            page_bytes,
            held: 0,
            allocations: BTreeMap::new(),
            pieces: BTreeMap::new(),
            mapped: BTreeMap::new(),
            last_piece: 0,
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn growth(&self, bytes: u64) -> u64 {
        round_up(bytes, self.page_bytes)
    }

    /// A handle that no piece has had.
    pub(super) fn next_piece(&self) -> PhysicalId {
        PhysicalId(self.last_piece + 1)
    }

    /// Takes note of a call that was answered.
    pub(super) fn note(&mut self, call: &Call, answer: &Answer) {
        match (call, answer) {
            (&Call::Alloc { bytes }, &Ok(Reply::Address(address))) => {
                let growth = self.growth(bytes);
                self.held += growth;
                self.allocations.insert(address, growth);
            }
            (Call::Free { address }, Ok(_)) => self.held -= self.allocations.remove(address).unwrap_or(0),
            (&Call::Create { bytes }, &Ok(Reply::Physical(physical))) => {
                self.held += bytes;
                self.last_piece = self.last_piece.max(physical.0);
                self.pieces.insert(physical, Piece { bytes, references: 1 });
            }
            (&Call::Release { physical }, Ok(_)) => self.drop_reference(physical),
            (&Call::Map { address, physical, .. }, Ok(_)) => {
                if let Some(piece) = self.pieces.get_mut(&physical) {
                    piece.references += 1;
                    self.mapped.insert(address, physical);
                }
            }
            (&Call::Unmap { address, bytes }, Ok(_)) => {
                let end = Address(address.0.saturating_add(bytes));
                while let Some((&start, &physical)) = self.mapped.range(address..end).next() {
                    self.mapped.remove(&start);
                    self.drop_reference(physical);
                }
            }
            _ => {}
        }
    }

    fn drop_reference(&mut self, physical: PhysicalId) {
        if let Some(piece) = self.pieces.get_mut(&physical) {
            piece.references -= 1;
            if piece.references == 0 {
                self.held -= piece.bytes;
                self.pieces.remove(&physical);
            }
        }
    }
}
