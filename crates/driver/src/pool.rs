//! A stream-ordered memory pool: a simple model of the driver's own allocator.
//!
//! How the real one works is not documented; this model follows the documented rules of `cudaMemPoolReuse*`. A request is
//! served from the smallest free piece that is large enough and that the stream may use:
//!
//! 1. what the same stream freed, and, with opportunistic reuse, what is no longer in use on the
//!    device;
//! 2. what another stream freed, where events are followed and the stream already waits for that
//!    moment;
//! 3. the same without such a wait, where the driver may make the stream wait (internal
//!    dependencies);
//! 4. a new chunk of whole 32 MiB, in a multiple of the page size where there is no room for 32 MiB. The owner makes it.
//!
//! Whether an event orders two streams follows from their clocks: a stream that cannot start before
//! a moment is ordered after it. Adjacent chunks are one piece of memory. Times are nanoseconds, streams any numbers.

use std::collections::{BTreeMap, BTreeSet};

/// Which memory a stream may reuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// Memory that another stream freed before a moment this stream waits for (`cudaMemPoolReuseFollowEventDependencies`).
    pub follow_event_dependencies: bool,
    /// Memory whose free has happened on the device (`cudaMemPoolReuseAllowOpportunistic`).
    pub allow_opportunistic: bool,
    /// Memory of another stream, for which the driver makes this stream wait (`cudaMemPoolReuseAllowInternalDependencies`).
    pub allow_internal_dependencies: bool,
}

impl PoolRules {
    /// The driver's defaults.
    pub const DRIVER_DEFAULT: PoolRules =
        PoolRules { follow_event_dependencies: true, allow_opportunistic: true, allow_internal_dependencies: true };
}

/// The chunks of a pool and what is free in them.
#[derive(Clone, Debug, Default)]
pub struct OrderedPool {
    /// Length by start.
    chunks: BTreeMap<u64, u64>,
    free: FreePieces,
}

impl OrderedPool {
    /// A free piece that `stream` may use, and until when the stream must wait for it. The stream's queued work ends at
    /// `starts`.
    pub fn find(
        &mut self,
        rules: PoolRules,
        bytes: u64,
        stream: u64,
        starts: u64,
        now: u64,
    ) -> Option<(FreePiece, u64)> {
        if rules.allow_opportunistic {
            self.free.settle(now);
        }
        if let Some(piece) = self.free.best_for(bytes, stream) {
            return Some((piece, 0));
        }
        let others = self.free.best_of_others(bytes, starts);
        if let Some(piece) = others.filter(|_| rules.follow_event_dependencies) {
            return Some((piece, 0));
        }
        let soonest = self.free.soonest_of_others(bytes).filter(|_| rules.allow_internal_dependencies)?;
        Some((soonest, soonest.ready))
    }

    /// The smallest free piece for a stream, without waiting.
    pub fn best_for(&self, bytes: u64, stream: u64) -> Option<FreePiece> {
        self.free.best_for(bytes, stream)
    }

    /// Takes `bytes` from the start of a free piece.
    pub fn take(&mut self, piece: FreePiece, bytes: u64) -> u64 {
        self.free.remove(piece.start);
        if piece.bytes > bytes {
            self.free.add(FreePiece { start: piece.start + bytes, bytes: piece.bytes - bytes, ..piece });
        }
        piece.start
    }

    /// A stream frees a piece; on the device that happens at `ready`.
    pub fn give_back(&mut self, start: u64, bytes: u64, stream: u64, ready: u64) {
        self.free.add(FreePiece { start, bytes, freed_on: Some(stream), ready });
    }

    /// Adds a chunk, all of it free.
    pub fn add_chunk(&mut self, start: u64, bytes: u64) {
        self.chunks.insert(start, bytes);
        self.free.add(FreePiece { start, bytes, freed_on: None, ready: 0 });
    }

    /// Removes the highest chunk in which nothing is in use at that moment.
    pub fn remove_idle_chunk(&mut self, moment: u64) -> Option<(u64, u64)> {
        let idle = |&(&start, &bytes): &(&u64, &u64)| self.free.are_all(start, bytes, moment);
        let (start, bytes) = self.chunks.iter().rev().find(idle).map(|(&start, &bytes)| (start, bytes))?;
        self.free.remove_all(start, bytes);
        self.chunks.remove(&start);
        Some((start, bytes))
    }

    /// How many bytes from an address on lie in one chunk, if it lies in any.
    pub fn chunk_at(&self, address: u64) -> Option<u64> {
        let (start, bytes) = self.chunks.range(..=address).next_back()?;
        (start + bytes).checked_sub(address).filter(|&left| left > 0)
    }
}

/// A free piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreePiece {
    /// Where it begins.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
    /// The stream that freed it; `None` once the free has happened on the device.
    pub freed_on: Option<u64>,
    /// When the free happens on the device.
    pub ready: u64,
}

/// Free pieces. Neighbours of the same owner are one piece.
#[derive(Clone, Debug, Default)]
struct FreePieces {
    by_start: BTreeMap<u64, FreePiece>,
    /// (owner, size, start): the best fit for an owner is the next entry.
    by_size: BTreeSet<(Option<u64>, u64, u64)>,
    /// (moment, start) of the pieces that have an owner.
    owned: BTreeSet<(u64, u64)>,
}

impl FreePieces {
    /// Adds a piece and merges it with neighbours of the same owner; the whole is free when the
    /// last part is.
    fn add(&mut self, mut piece: FreePiece) {
        let before = self.by_start.range(..piece.start).next_back().map(|(_, &before)| before);
        if let Some(before) = before
            && before.start + before.bytes == piece.start
            && before.freed_on == piece.freed_on
        {
            self.remove(before.start);
            piece = FreePiece { start: before.start, bytes: before.bytes + piece.bytes, ..piece };
            piece.ready = piece.ready.max(before.ready);
        }
        if let Some(&after) = self.by_start.get(&(piece.start + piece.bytes))
            && after.freed_on == piece.freed_on
        {
            self.remove(after.start);
            piece.bytes += after.bytes;
            piece.ready = piece.ready.max(after.ready);
        }
        self.by_start.insert(piece.start, piece);
        self.by_size.insert((piece.freed_on, piece.bytes, piece.start));
        if piece.freed_on.is_some() {
            self.owned.insert((piece.ready, piece.start));
        }
    }

    /// Removes the piece at an address.
    fn remove(&mut self, start: u64) {
        if let Some(piece) = self.by_start.remove(&start) {
            self.by_size.remove(&(piece.freed_on, piece.bytes, start));
            self.owned.remove(&(piece.ready, start));
        }
    }

    /// Pieces whose free has happened on the device lose their owner.
    fn settle(&mut self, now: u64) {
        while let Some(&(ready, start)) = self.owned.first()
            && ready <= now
            && let Some(&piece) = self.by_start.get(&start)
        {
            self.remove(start);
            self.add(FreePiece { freed_on: None, ..piece });
        }
    }

    /// The smallest piece that is large enough, among those of the stream and those without an
    /// owner.
    fn best_for(&self, bytes: u64, stream: u64) -> Option<FreePiece> {
        let best = |owner| self.by_size.range((owner, bytes, 0)..).next().filter(|&&(of, ..)| of == owner);
        let own = best(Some(stream));
        let unowned = best(None);
        let (_, _, start) = [own, unowned].into_iter().flatten().min_by_key(|&&(_, size, _)| size)?;
        self.by_start.get(start).copied()
    }

    /// The smallest piece that is large enough and free on the device by `moment`, from any stream.
    fn best_of_others(&self, bytes: u64, moment: u64) -> Option<FreePiece> {
        self.large_enough(bytes).take_while(|piece| piece.ready <= moment).min_by_key(|piece| piece.bytes)
    }

    /// The piece that is large enough and free on the device first.
    fn soonest_of_others(&self, bytes: u64) -> Option<FreePiece> {
        self.large_enough(bytes).next()
    }

    /// Whether all of a range is free on the device by `moment`.
    fn are_all(&self, start: u64, bytes: u64, moment: u64) -> bool {
        let mut at = start;
        while at < start + bytes {
            let Some((_, piece)) = self.by_start.range(..=at).next_back() else { return false };
            if piece.start + piece.bytes <= at || piece.ready > moment {
                return false;
            }
            at = piece.start + piece.bytes;
        }
        true
    }

    /// Removes a range that is free throughout; what lies beyond it on either side stays.
    fn remove_all(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        while let Some((_, &piece)) = self.by_start.range(..end).next_back()
            && piece.start + piece.bytes > start
        {
            self.remove(piece.start);
            if piece.start + piece.bytes > end {
                self.add(FreePiece { start: end, bytes: piece.start + piece.bytes - end, ..piece });
            }
            if piece.start < start {
                self.add(FreePiece { bytes: start - piece.start, ..piece });
            }
        }
    }

    /// Owned pieces of at least that size, the soonest free first.
    fn large_enough(&self, bytes: u64) -> impl Iterator<Item = FreePiece> + '_ {
        let pieces = self.owned.iter().filter_map(|(_, start)| self.by_start.get(start).copied());
        pieces.filter(move |piece| piece.bytes >= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(start: u64, bytes: u64, freed_on: Option<u64>, ready: u64) -> FreePiece {
        FreePiece { start, bytes, freed_on, ready }
    }

    #[test]
    fn neighbours_of_one_owner_are_merged() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 10, Some(1), 5));
        pieces.add(piece(20, 10, Some(1), 9));
        pieces.add(piece(30, 10, Some(2), 1));
        pieces.add(piece(10, 10, Some(1), 2));
        assert_eq!(pieces.best_for(30, 1), Some(piece(0, 30, Some(1), 9)));
        assert_eq!(pieces.best_for(31, 1), None);
        pieces.settle(9);
        assert_eq!(pieces.best_for(40, 7), Some(piece(0, 40, None, 9)));
    }

    #[test]
    fn the_smallest_fit_wins() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 50, Some(1), 5));
        pieces.add(piece(100, 20, None, 0));
        pieces.add(piece(200, 30, Some(2), 9));
        assert_eq!(pieces.best_for(20, 1).unwrap().start, 100);
        assert_eq!(pieces.best_for(21, 1).unwrap().start, 0);
        assert_eq!(pieces.best_of_others(25, 9).unwrap().start, 200);
        assert_eq!(pieces.best_of_others(25, 5).unwrap().start, 0);
        assert_eq!(pieces.soonest_of_others(25).unwrap().start, 0);
    }

    #[test]
    fn a_range_is_removed_from_larger_pieces() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 100, None, 0));
        assert!(pieces.are_all(20, 50, 0) && !pieces.are_all(60, 50, 0));
        pieces.remove_all(20, 50);
        assert_eq!(pieces.best_for(1, 0), Some(piece(0, 20, None, 0)));
        assert_eq!(pieces.best_for(21, 0), Some(piece(70, 30, None, 0)));
    }
}
