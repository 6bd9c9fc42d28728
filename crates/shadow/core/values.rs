//! Values that are known although nothing is computed: what the program copied in.
//!
//! A copy from the host of up to `keep` bytes is remembered by address. Copies on the device, fills and collectives carry
//! values on. A value dies when something else is written there: a larger copy, a kernel that gets its address (see
//! `launch`), or when the memory is freed. PyTorch reuses addresses without telling the driver, so a kernel is the only
//! sign of reuse.
//!
//! The result of an exchange between processes is known later: it is pending until it is read ([`settle`]).

use std::{collections::BTreeMap, sync::Arc};

use crate::state;

/// A value that is not there yet.
pub trait PendingValue: Send + Sync {
    /// Waits for it; `None` if it is not known.
    fn wait(&self) -> Option<Vec<u8>>;
}

/// Waits for the pending values in a range. The books must not be locked.
pub fn settle(address: u64, bytes: u64) {
    loop {
        let Some((serial, pending)) = state::lock().values.pending_in(address, bytes) else { return };
        let value = pending.wait();
        state::lock().values.settle(serial, value.as_deref());
    }
}

/// More than this is not remembered in all; then the oldest half goes.
const MAX_TOTAL_BYTES: usize = 64 << 20;

/// Known bytes by address; pieces do not overlap.
#[derive(Default)]
pub struct KeptValues {
    pieces: BTreeMap<u64, Piece>,
    total: usize,
    last_serial: u64,
    /// Pieces whose bytes are not there yet, by serial: where they begin, and how to get them.
    pending: BTreeMap<u64, (u64, Arc<dyn PendingValue>)>,
}

/// The length of a write that is not known.
pub const UNKNOWN_LENGTH: u64 = 0;

/// When so many values are pending, those that were overwritten are dropped.
const MANY_PENDING: usize = 1 << 12;

struct Piece {
    bytes: Vec<u8>,
    serial: u64,
}

impl KeptValues {
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Start of the known piece that contains an address.
    pub fn piece_at(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, piece) = self.pieces.range(..=address).next_back()?;
        (address < start + piece.bytes.len() as u64).then_some((start, piece.bytes.len() as u64))
    }

    /// Remembers bytes in the place of what was there.
    pub fn put(&mut self, address: u64, bytes: Vec<u8>) {
        self.forget(address, bytes.len() as u64);
        self.last_serial += 1;
        self.insert(address, bytes, self.last_serial);
        if self.total > MAX_TOTAL_BYTES {
            self.drop_oldest_half();
        }
    }

    /// Remembers that bytes will be there.
    pub fn put_pending(&mut self, address: u64, bytes: u64, pending: Arc<dyn PendingValue>) {
        if self.pending.len() >= MANY_PENDING {
            let live: std::collections::BTreeSet<u64> = self.pieces.values().map(|piece| piece.serial).collect();
            self.pending.retain(|serial, _| live.contains(serial));
        }
        self.put(address, vec![0; bytes as usize]);
        self.pending.insert(self.last_serial, (address, pending));
    }

    /// The first pending value in a range, with its serial.
    fn pending_in(&self, address: u64, bytes: u64) -> Option<(u64, Arc<dyn PendingValue>)> {
        if self.pending.is_empty() {
            return None;
        }
        let first = self.piece_at(address).map_or(address, |(start, _)| start);
        let mut pieces = self.pieces.range(first..address.saturating_add(bytes)).map(|(_, piece)| piece.serial);
        pieces.find_map(|serial| Some((serial, self.pending.get(&serial)?.1.clone())))
    }

    /// A pending value came, or it is not known. Where it was overwritten in the meantime, it stays so.
    fn settle(&mut self, serial: u64, value: Option<&[u8]>) {
        let Some((address, _)) = self.pending.remove(&serial) else { return };
        let places = self.pieces.iter().filter(|(_, piece)| piece.serial == serial);
        let places: Vec<(u64, usize)> = places.map(|(&start, piece)| (start, piece.bytes.len())).collect();
        for (start, length) in places {
            let offset = (start - address) as usize;
            match (value.and_then(|value| value.get(offset..offset + length)), self.pieces.get_mut(&start)) {
                (Some(value), Some(piece)) => piece.bytes.copy_from_slice(value),
                _ => self.forget(start, length as u64),
            }
        }
    }

    /// Forgets what a write of at least these bytes may overwrite: all pieces that it meets, as a whole. A write of unknown
    /// length (`UNKNOWN_LENGTH`) meets all pieces that lie one behind the other without a gap.
    pub fn forget_from(&mut self, address: u64, bytes: u64) {
        let (first, mut last) =
            self.piece_at(address).map_or((address, address + 1), |(start, length)| (start, start + length));
        if bytes == UNKNOWN_LENGTH {
            while let Some(piece) = self.pieces.get(&last) {
                last += piece.bytes.len() as u64;
            }
        } else {
            last = address.saturating_add(bytes);
        }
        while let Some((start, length)) =
            self.pieces.range(first..last).next().map(|(&start, piece)| (start, piece.bytes.len() as u64))
        {
            self.forget(start, length);
        }
    }

    /// Forgets a range; what lies around it stays.
    pub fn forget(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        while let Some((&start, piece)) = self.pieces.range(..end).next_back() {
            let piece_end = start + piece.bytes.len() as u64;
            if piece_end <= address {
                break;
            }
            let Some(Piece { bytes: mut left, serial }) = self.pieces.remove(&start) else { break };
            self.total -= left.len();
            if piece_end > end {
                let right = left.split_off((end - start) as usize);
                self.insert(end, right, serial);
            }
            if start < address {
                left.truncate((address - start) as usize);
                self.insert(start, left, serial);
            }
        }
    }

    /// The bytes of a range, where all of them are known.
    pub fn get(&self, address: u64, bytes: u64) -> Option<Vec<u8>> {
        let mut found = Vec::with_capacity(bytes as usize);
        while (found.len() as u64) < bytes {
            let at = address + found.len() as u64;
            let (&start, piece) = self.pieces.range(..=at).next_back()?;
            let rest = piece.bytes.get((at - start) as usize..)?;
            if rest.is_empty() || self.pending.contains_key(&piece.serial) {
                return None;
            }
            found.extend_from_slice(&rest[..rest.len().min((bytes - found.len() as u64) as usize)]);
        }
        Some(found)
    }

    /// A copy on the device: the target knows what the source knew.
    pub fn carry(&mut self, target: u64, source: u64, bytes: u64, keep: u64) {
        match if bytes <= keep { self.get(source, bytes) } else { None } {
            Some(known) => self.put(target, known),
            None => self.forget(target, bytes),
        }
    }

    fn insert(&mut self, address: u64, bytes: Vec<u8>, serial: u64) {
        if !bytes.is_empty() {
            self.total += bytes.len();
            self.pieces.insert(address, Piece { bytes, serial });
        }
    }

    fn drop_oldest_half(&mut self) {
        let mut serials: Vec<u64> = self.pieces.values().map(|piece| piece.serial).collect();
        serials.sort_unstable();
        let middle = serials[serials.len() / 2];
        self.pieces.retain(|_, piece| piece.serial > middle);
        self.total = self.pieces.values().map(|piece| piece.bytes.len()).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_write_replaces_only_its_range() {
        let mut values = KeptValues::default();
        values.put(100, vec![1, 2, 3, 4, 5, 6]);
        values.put(102, vec![9, 9]);
        assert_eq!(values.get(100, 6), Some(vec![1, 2, 9, 9, 5, 6]));
        values.forget(103, 1);
        assert_eq!((values.get(100, 3), values.get(102, 2)), (Some(vec![1, 2, 9]), None));
        values.forget(0, 1000);
        assert!(values.is_empty() && values.total == 0);
    }

    #[test]
    fn copies_carry_values_and_unknown_sources_erase_the_target() {
        let mut values = KeptValues::default();
        values.put(100, vec![1, 2, 3, 4]);
        values.carry(200, 101, 2, 64);
        assert_eq!(values.get(200, 2), Some(vec![2, 3]));
        values.carry(200, 500, 1, 64);
        assert_eq!((values.get(200, 1), values.get(201, 1)), (None, Some(vec![3])));
        values.carry(100, 201, 4, 2);
        assert_eq!(values.get(100, 1), None, "larger than what is kept");
    }

    #[test]
    fn a_write_ends_every_piece_that_it_meets() {
        let mut values = KeptValues::default();
        for start in [100, 104, 120] {
            values.put(start, vec![1; 4]);
        }
        values.forget_from(102, 6);
        assert_eq!([100, 104, 120].map(|start| values.get(start, 1).is_some()), [false, false, true]);
        values.forget_from(90, 40);
        assert!(values.is_empty());
    }

    #[test]
    fn pending_values_come_where_they_were_not_overwritten() {
        struct Later;
        impl PendingValue for Later {
            fn wait(&self) -> Option<Vec<u8>> {
                Some(vec![1, 2, 3, 4])
            }
        }
        let mut values = KeptValues::default();
        values.put_pending(100, 4, Arc::new(Later));
        values.put(101, vec![9]);
        assert_eq!((values.get(100, 1), values.get(101, 1)), (None, Some(vec![9])));
        assert!(values.pending_in(101, 1).is_none());
        let (serial, pending) = values.pending_in(101, 2).unwrap();
        values.settle(serial, pending.wait().as_deref());
        assert_eq!(values.get(100, 4), Some(vec![1, 9, 3, 4]));
        values.put_pending(100, 4, Arc::new(Later));
        let (serial, _) = values.pending_in(103, 1).unwrap();
        values.settle(serial, None);
        assert!(values.is_empty() && values.pending.is_empty());
    }

    #[test]
    fn the_oldest_go_first() {
        let mut values = KeptValues::default();
        for index in 0..1100u64 {
            values.put(index << 20, vec![index as u8; 64 << 10]);
        }
        assert!(values.total <= MAX_TOTAL_BYTES);
        assert!(values.get(0, 1).is_none() && values.get(1099 << 20, 65_536).is_some());
    }
}
