//! Values that are known although nothing is computed: what the program copied in.
//!
//! A copy from the host of up to `keep` bytes is remembered by address. Copies on the device, fills and collectives carry
//! values on. A value dies when something else is written there: a larger copy, a kernel that gets its address (see
//! `launch`), or when the memory is freed. PyTorch reuses addresses without telling the driver, so a kernel is the only
//! sign of reuse.

use std::collections::BTreeMap;

/// More than this is not remembered in all; then the oldest half goes.
const MAX_TOTAL_BYTES: usize = 64 << 20;

/// Known bytes by address; pieces do not overlap.
#[derive(Default)]
pub struct KeptValues {
    pieces: BTreeMap<u64, Piece>,
    total: usize,
    last_serial: u64,
}

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
            if rest.is_empty() {
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
    fn the_oldest_go_first() {
        let mut values = KeptValues::default();
        for index in 0..1100u64 {
            values.put(index << 20, vec![index as u8; 64 << 10]);
        }
        assert!(values.total <= MAX_TOTAL_BYTES);
        assert!(values.get(0, 1).is_none() && values.get(1099 << 20, 65_536).is_some());
    }
}
