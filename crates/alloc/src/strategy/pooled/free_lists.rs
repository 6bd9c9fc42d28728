//! Lists of free pieces, linked through the pieces themselves, so that nothing is hashed, moved or
//! allocated.

use std::marker::PhantomData;

use super::{NONE, PieceTable};
use oomph_base::StreamId;

/// How sizes are divided into classes, one list each.
pub(crate) trait SizeClasses: Clone + Send + 'static {
    /// How many classes there are: at most 4,096.
    const COUNT: usize;

    /// The class of a size. A larger size is never in a lower class.
    fn class_of(size: u64) -> usize;
}

const WORD: usize = u64::BITS as usize;

/// The free pieces of one stream by size class. Two levels of bitmaps say which lists hold a piece,
/// so that a search takes constant time whatever the number of pieces. In a list the latest comes
/// first.
#[derive(Clone, Debug)]
pub(crate) struct FreeLists<C> {
    /// Which words of `occupied` are not zero.
    summary: u64,
    /// Which lists hold a piece.
    occupied: Box<[u64]>,
    /// The first piece of each list, or [`NONE`].
    heads: Box<[u32]>,
    classes: PhantomData<C>,
}

impl<C: SizeClasses> Default for FreeLists<C> {
    fn default() -> Self {
        FreeLists {
            summary: 0,
            occupied: vec![0; C::COUNT.div_ceil(WORD)].into(),
            heads: vec![NONE; C::COUNT].into(),
            classes: PhantomData,
        }
    }
}

impl<C: SizeClasses> FreeLists<C> {
    /// Adds a free piece.
    #[inline]
    pub(crate) fn insert(&mut self, pieces: &mut PieceTable, slot: u32) {
        let class = C::class_of(pieces[slot].size);
        let former = std::mem::replace(&mut self.heads[class], slot);
        if former == NONE {
            self.occupied[class / WORD] |= 1 << (class % WORD);
            self.summary |= 1 << (class / WORD);
        } else {
            pieces[former].links[0] = slot;
        }
        pieces[slot].links = [NONE, former];
    }

    /// Removes a piece that is in a list.
    #[inline]
    pub(crate) fn remove(&mut self, pieces: &mut PieceTable, slot: u32) {
        let [before, after] = pieces[slot].links;
        if after != NONE {
            pieces[after].links[0] = before;
        }
        if before != NONE {
            pieces[before].links[1] = after;
            return;
        }
        let class = C::class_of(pieces[slot].size);
        self.heads[class] = after;
        if after == NONE {
            let word = &mut self.occupied[class / WORD];
            *word &= !(1 << (class % WORD));
            if *word == 0 {
                self.summary &= !(1 << (class / WORD));
            }
        }
    }

    /// The first piece of a class.
    #[inline]
    pub(crate) fn head(&self, class: usize) -> Option<u32> {
        Some(self.heads[class]).filter(|&slot| slot != NONE)
    }

    /// The lowest class from this one on that holds a piece.
    #[inline]
    pub(crate) fn first_from(&self, class: usize) -> Option<usize> {
        let word = class / WORD;
        let rest = self.occupied.get(word)? & (u64::MAX << (class % WORD));
        if rest != 0 {
            return Some(word * WORD + rest.trailing_zeros() as usize);
        }
        // Two shifts, because a shift by 64 would be none.
        let words = self.summary & ((u64::MAX << word) << 1);
        let word = words.trailing_zeros() as usize;
        self.occupied.get(word).map(|rest| word * WORD + rest.trailing_zeros() as usize)
    }

    /// The highest class that holds a piece.
    pub(crate) fn last(&self) -> Option<usize> {
        let word = self.summary.checked_ilog2()? as usize;
        Some(word * WORD + self.occupied[word].ilog2() as usize)
    }

    /// The pieces of a class, the latest first.
    pub(crate) fn pieces_of<'a>(&'a self, pieces: &'a PieceTable, class: usize) -> impl Iterator<Item = u32> + 'a {
        let next = |&slot: &u32| Some(pieces[slot].links[1]).filter(|&slot| slot != NONE);
        std::iter::successors(self.head(class), next)
    }

    /// All pieces, in the order of their classes.
    pub(crate) fn iter<'a>(&'a self, pieces: &'a PieceTable) -> impl Iterator<Item = u32> + 'a {
        let classes = std::iter::successors(self.first_from(0), |&class| self.first_from(class + 1));
        classes.flat_map(|class| self.pieces_of(pieces, class))
    }
}

/// Free pieces in the order of their addresses, for memory in which a piece is looked up by its address: a sorted list,
/// because there are few.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeByAddress(Vec<(u64, u32)>);

impl FreeByAddress {
    /// Adds a free piece.
    #[inline]
    pub(crate) fn insert(&mut self, address: u64, slot: u32) {
        let place = self.0.partition_point(|&(other, _)| other < address);
        self.0.insert(place, (address, slot));
    }

    /// Removes the piece at an address, if there is one.
    #[inline]
    pub(crate) fn remove(&mut self, address: u64) {
        if let Ok(place) = self.0.binary_search_by_key(&address, |&(other, _)| other) {
            self.0.remove(place);
        }
    }

    /// The last piece that begins at an address or before it.
    #[inline]
    pub(crate) fn at_or_before(&self, address: u64) -> Option<u32> {
        let place = self.0.partition_point(|&(other, _)| other <= address);
        Some(self.0[place.checked_sub(1)?].1)
    }

    /// All pieces, by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().map(|&(_, slot)| slot)
    }
}

/// One value per stream, made when the stream is first seen.
#[derive(Clone, Debug)]
pub(crate) struct PerStream<T>(Vec<T>);

impl<T> Default for PerStream<T> {
    fn default() -> Self {
        PerStream(Vec::new())
    }
}

impl<T: Default> PerStream<T> {
    #[inline]
    pub(crate) fn get(&self, stream: StreamId) -> Option<&T> {
        self.0.get(stream.index())
    }

    /// The value of a stream, made where there is none.
    #[inline]
    pub(crate) fn of(&mut self, stream: StreamId) -> &mut T {
        if self.0.len() <= stream.index() {
            self.0.resize_with(stream.index() + 1, T::default);
        }
        &mut self.0[stream.index()]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, stream: StreamId) -> Option<&mut T> {
        self.0.get_mut(stream.index())
    }

    /// The values of all streams up to the last one seen.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, btree_map::Entry};

    use proptest::prelude::*;

    use super::{super::MemoryPiece, *};

    /// One class per size: three words of the bitmap.
    #[derive(Clone, Debug)]
    struct EverySize;

    impl SizeClasses for EverySize {
        const COUNT: usize = 192;

        fn class_of(size: u64) -> usize {
            size as usize
        }
    }

    proptest! {
        #[test]
        fn pieces_by_address_agree_with_a_map(steps in prop::collection::vec((any::<bool>(), 0..40u64), 1..200)) {
            let (mut pieces, mut map) = (FreeByAddress::default(), BTreeMap::new());
            for (number, (insert, address)) in (0..).zip(steps) {
                if !insert {
                    pieces.remove(address);
                    map.remove(&address);
                } else if let Entry::Vacant(place) = map.entry(address) {
                    pieces.insert(address, number);
                    place.insert(number);
                }
                prop_assert!(pieces.iter().eq(map.values().copied()));
                prop_assert_eq!(pieces.at_or_before(address), map.range(..=address).next_back().map(|(_, &slot)| slot));
            }
        }

        #[test]
        fn lists_agree_with_a_map(steps in prop::collection::vec((any::<bool>(), 0..192u64), 1..300)) {
            let (mut pieces, mut lists) = (PieceTable::default(), FreeLists::<EverySize>::default());
            let mut model: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            for (insert, size) in steps {
                if insert {
                    let slot = pieces.insert(MemoryPiece::new(0, size, StreamId(0)));
                    lists.insert(&mut pieces, slot);
                    model.entry(size).or_default().push(slot);
                } else if let Some(class) = lists.first_from(size as usize) {
                    // From the middle of the list.
                    let slots = model.get_mut(&(class as u64)).unwrap();
                    let slot = slots.remove(slots.len() / 2);
                    lists.remove(&mut pieces, slot);
                    pieces.remove(slot);
                    model.retain(|_, slots| !slots.is_empty());
                }
                prop_assert_eq!(lists.first_from(size as usize), model.range(size..).next().map(|(&size, _)| size as usize));
                prop_assert_eq!(lists.last(), model.keys().next_back().map(|&size| size as usize));
                let expected: Vec<u32> = model.values().flat_map(|slots| slots.iter().rev().copied()).collect();
                prop_assert_eq!(lists.iter(&pieces).collect::<Vec<_>>(), expected);
            }
        }
    }
}
