//! The free memory of a pool: pieces by place, by size and owner, and by the moment at which they are free for all.

use std::collections::{BTreeMap, BTreeSet};

use oomph_base::{Nanos, StreamId};

/// A free piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// The stream that freed it; nobody's once that is long enough ago.
    pub(super) freed_on: Option<StreamId>,
    /// When the free happens on the device.
    pub(super) ready: Nanos,
}

/// Free pieces. Neighbours of the same owner are one piece.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    by_start: BTreeMap<u64, Piece>,
    /// (owner, size, start): the best fit for an owner is the next entry.
    by_size: BTreeSet<(Option<StreamId>, u64, u64)>,
    /// (moment, start) of the pieces that have an owner.
    owned: BTreeSet<(Nanos, u64)>,
}

impl Pieces {
    /// Adds a piece and joins it with neighbours of the same owner; the whole is free when the last part is.
    pub(super) fn add(&mut self, mut piece: Piece) {
        let before = self.by_start.range(..piece.start).next_back().map(|(_, &before)| before);
        if let Some(before) = before
            && before.start + before.bytes == piece.start
            && before.freed_on == piece.freed_on
        {
            self.remove(before.start);
            piece = Piece { start: before.start, bytes: before.bytes + piece.bytes, ..piece };
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

    /// Takes the piece at that place out.
    pub(super) fn remove(&mut self, start: u64) {
        if let Some(piece) = self.by_start.remove(&start) {
            self.by_size.remove(&(piece.freed_on, piece.bytes, start));
            self.owned.remove(&(piece.ready, start));
        }
    }

    /// What is free on the device by now belongs to nobody.
    pub(super) fn settle(&mut self, now: Nanos) {
        while let Some(&(ready, start)) = self.owned.first()
            && ready <= now
            && let Some(&piece) = self.by_start.get(&start)
        {
            self.remove(start);
            self.add(Piece { freed_on: None, ..piece });
        }
    }

    /// The smallest piece that is large enough among those of the stream and of nobody.
    pub(super) fn best_for(&self, bytes: u64, stream: StreamId) -> Option<Piece> {
        let best = |owner| self.by_size.range((owner, bytes, 0)..).next().filter(|&&(of, ..)| of == owner);
        let own = best(Some(stream));
        let nobodys = best(None);
        let (_, _, start) = [own, nobodys].into_iter().flatten().min_by_key(|&&(_, size, _)| size)?;
        self.by_start.get(start).copied()
    }

    /// The smallest piece that is large enough and free for all before `moment`, whoever freed it.
    pub(super) fn best_of_others(&self, bytes: u64, moment: Nanos) -> Option<Piece> {
        self.large_enough(bytes).take_while(|piece| piece.ready <= moment).min_by_key(|piece| piece.bytes)
    }

    /// The piece that is large enough and free for all first.
    pub(super) fn soonest_of_others(&self, bytes: u64) -> Option<Piece> {
        self.large_enough(bytes).next()
    }

    /// Whether a range is free throughout, and nobody uses it after `moment`.
    pub(super) fn are_all(&self, start: u64, bytes: u64, moment: Nanos) -> bool {
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

    /// Takes a range out that is free throughout; what lies beyond it on either side stays.
    pub(super) fn remove_all(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        while let Some((_, &piece)) = self.by_start.range(..end).next_back()
            && piece.start + piece.bytes > start
        {
            self.remove(piece.start);
            if piece.start + piece.bytes > end {
                self.add(Piece { start: end, bytes: piece.start + piece.bytes - end, ..piece });
            }
            if piece.start < start {
                self.add(Piece { bytes: start - piece.start, ..piece });
            }
        }
    }

    /// Owned pieces of at least that size, the soonest free first.
    fn large_enough(&self, bytes: u64) -> impl Iterator<Item = Piece> + '_ {
        let pieces = self.owned.iter().filter_map(|(_, start)| self.by_start.get(start).copied());
        pieces.filter(move |piece| piece.bytes >= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(start: u64, bytes: u64, freed_on: Option<u16>, ready: u64) -> Piece {
        Piece { start, bytes, freed_on: freed_on.map(StreamId), ready: Nanos(ready) }
    }

    #[test]
    fn neighbours_of_one_owner_are_joined_and_others_are_not() {
        let mut pieces = Pieces::default();
        pieces.add(piece(0, 10, Some(1), 5));
        pieces.add(piece(20, 10, Some(1), 9));
        pieces.add(piece(30, 10, Some(2), 1));
        pieces.add(piece(10, 10, Some(1), 2));
        assert_eq!(pieces.best_for(30, StreamId(1)), Some(piece(0, 30, Some(1), 9)));
        assert_eq!(pieces.best_for(31, StreamId(1)), None);
        pieces.settle(Nanos(9));
        assert_eq!(pieces.best_for(40, StreamId(7)), Some(piece(0, 40, None, 9)));
    }

    #[test]
    fn the_smallest_fit_wins_and_the_soonest_for_strangers() {
        let mut pieces = Pieces::default();
        pieces.add(piece(0, 50, Some(1), 5));
        pieces.add(piece(100, 20, None, 0));
        pieces.add(piece(200, 30, Some(2), 9));
        assert_eq!(pieces.best_for(20, StreamId(1)).unwrap().start, 100);
        assert_eq!(pieces.best_for(21, StreamId(1)).unwrap().start, 0);
        assert_eq!(pieces.best_of_others(25, Nanos(9)).unwrap().start, 200);
        assert_eq!(pieces.best_of_others(25, Nanos(5)).unwrap().start, 0);
        assert_eq!(pieces.soonest_of_others(25).unwrap().start, 0);
    }

    #[test]
    fn a_range_is_cut_out_of_larger_pieces() {
        let mut pieces = Pieces::default();
        pieces.add(piece(0, 100, None, 0));
        assert!(pieces.are_all(20, 50, Nanos(0)) && !pieces.are_all(60, 50, Nanos(0)));
        pieces.remove_all(20, 50);
        assert_eq!(pieces.best_for(1, StreamId(0)), Some(piece(0, 20, None, 0)));
        assert_eq!(pieces.best_for(21, StreamId(0)), Some(piece(70, 30, None, 0)));
    }
}
