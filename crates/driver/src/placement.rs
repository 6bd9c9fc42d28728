//! Where things are placed in lines of units: free ranges ([`FreeRanges`]), and extents that are
//! filled piece by piece ([`FilledExtents`]). The address space, its ranges, shared pages, reserved
//! and pinned addresses are such lines; the owner chooses the unit.

use std::collections::{BTreeMap, BTreeSet};

/// The free ranges of a line; no two of them touch.
#[derive(Clone, Debug)]
pub struct FreeRanges {
    lengths: BTreeMap<u64, u64>,
    /// The same ranges as (length, start): finding a fit takes one step per distinct length, not
    /// per range.
    by_length: BTreeSet<(u64, u64)>,
}

impl FreeRanges {
    /// A line of `length` units from `start`, all free.
    pub fn new(start: u64, length: u64) -> FreeRanges {
        let mut holes = FreeRanges { lengths: BTreeMap::new(), by_length: BTreeSet::new() };
        holes.insert(start, length);
        holes
    }

    /// The length of the largest free range.
    pub fn largest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    /// The lowest place where `length` units fit.
    pub fn lowest(&self, length: u64) -> Option<u64> {
        self.lowest_fit(length).map(|(start, _)| start)
    }

    /// The highest place where `length` units fit.
    pub fn highest(&self, length: u64) -> Option<u64> {
        self.highest_fit(length).map(|(start, hole)| start + hole - length)
    }

    /// Takes `length` units at the lowest place where they fit, and returns where.
    pub fn take_lowest(&mut self, length: u64) -> Option<u64> {
        let (start, hole) = self.lowest_fit(length)?;
        self.remove(start, hole);
        self.insert(start + length, hole - length);
        Some(start)
    }

    /// Takes `length` units at the highest place where they fit, and returns where.
    pub fn take_highest(&mut self, length: u64) -> Option<u64> {
        let (start, hole) = self.highest_fit(length)?;
        self.remove(start, hole);
        self.insert(start, hole - length);
        Some(start + hole - length)
    }

    /// The lowest free range with at least `length` units, and its length.
    fn lowest_fit(&self, length: u64) -> Option<(u64, u64)> {
        let mut lowest: Option<(u64, u64)> = None;
        let mut at_least = length;
        while let Some(&(hole, start)) = self.by_length.range((at_least, 0)..).next() {
            if lowest.is_none_or(|(other, _)| start < other) {
                lowest = Some((start, hole));
            }
            at_least = hole + 1;
        }
        lowest
    }

    /// The highest free range with at least `length` units, and its length.
    fn highest_fit(&self, length: u64) -> Option<(u64, u64)> {
        let mut highest: Option<(u64, u64)> = None;
        let mut at_least = length;
        while let Some(&(hole, _)) = self.by_length.range((at_least, 0)..).next() {
            let last_of_this_length = self.by_length.range(..=(hole, u64::MAX)).next_back();
            if let Some(&(_, start)) = last_of_this_length
                && highest.is_none_or(|(other, _)| start > other)
            {
                highest = Some((start, hole));
            }
            at_least = hole + 1;
        }
        highest
    }

    /// Takes `length` units from `start`; false, and nothing taken, where not all of them are free.
    pub fn take_at(&mut self, start: u64, length: u64) -> bool {
        let Some((&first, &hole)) = self.lengths.range(..=start).next_back() else { return false };
        if first + hole < start + length {
            return false;
        }
        self.remove(first, hole);
        self.insert(first, start - first);
        self.insert(start + length, first + hole - start - length);
        true
    }

    /// Takes all units from `start` to `end` that are free.
    pub fn take_all(&mut self, start: u64, end: u64) {
        while let Some((&first, &hole)) = self.lengths.range(..end).next_back()
            && first + hole > start
        {
            self.remove(first, hole);
            self.insert(first, start.saturating_sub(first));
            self.insert(end, (first + hole).saturating_sub(end));
        }
    }

    /// Gives `length` units from `start` back. They must have been taken.
    pub fn give_back(&mut self, start: u64, length: u64) {
        let (mut first, mut end) = (start, start + length);
        if let Some((&before, &hole)) = self.lengths.range(..start).next_back()
            && before + hole == start
        {
            self.remove(before, hole);
            first = before;
        }
        if let Some(&hole) = self.lengths.get(&end) {
            self.remove(end, hole);
            end += hole;
        }
        self.insert(first, end - first);
    }

    fn insert(&mut self, start: u64, length: u64) {
        if length > 0 {
            self.lengths.insert(start, length);
            self.by_length.insert((length, start));
        }
    }

    fn remove(&mut self, start: u64, length: u64) {
        self.lengths.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

/// Finds the newest of many owners that still has room, in logarithmic time: owners in order of
/// arrival, each with some room, as a tree of maxima.
///
/// Owners are small numbers that may be used again after [`remove`](NewestFit::remove).
#[derive(Clone, Debug, Default)]
struct NewestFit {
    /// Position 1 is the root, the children of `i` are `2i` and `2i + 1`, the second half are the
    /// leaves.
    rooms: Vec<u64>,
    /// The owner at each leaf, in order of arrival.
    owners: Vec<Option<usize>>,
    /// The leaf of each owner.
    leaf_of: Vec<usize>,
}

impl NewestFit {
    /// Adds an owner, from now on the newest.
    fn add(&mut self, owner: usize, room: u64) {
        if self.owners.len() == self.rooms.len() / 2 {
            self.rebuild();
        }
        if owner >= self.leaf_of.len() {
            self.leaf_of.resize(owner + 1, 0);
        }
        self.leaf_of[owner] = self.owners.len();
        self.owners.push(Some(owner));
        self.set(owner, room);
    }

    /// Sets the room of an owner.
    fn set(&mut self, owner: usize, room: u64) {
        let mut position = self.rooms.len() / 2 + self.leaf_of[owner];
        self.rooms[position] = room;
        while position > 1 {
            position /= 2;
            let largest = self.rooms[2 * position].max(self.rooms[2 * position + 1]);
            if self.rooms[position] == largest {
                break;
            }
            self.rooms[position] = largest;
        }
    }

    /// Removes an owner.
    fn remove(&mut self, owner: usize) {
        self.set(owner, 0);
        self.owners[self.leaf_of[owner]] = None;
        while self.owners.last() == Some(&None) {
            self.owners.pop();
        }
    }

    /// The newest owner with at least that much room, which must not be zero.
    fn newest(&self, room: u64) -> Option<usize> {
        if self.rooms.get(1).is_none_or(|&largest| largest < room) {
            return None;
        }
        let leaves = self.rooms.len() / 2;
        let mut position = 1;
        while position < leaves {
            let newer = 2 * position + 1;
            position = if self.rooms[newer] >= room { newer } else { newer - 1 };
        }
        self.owners[position - leaves]
    }

    /// Removes the leaves of owners that are gone, and makes room for as many as are left.
    fn rebuild(&mut self) {
        let leaves = self.rooms.len() / 2;
        let present: Vec<(usize, u64)> = self
            .owners
            .iter()
            .enumerate()
            .filter_map(|(leaf, owner)| owner.map(|owner| (owner, self.rooms[leaves + leaf])))
            .collect();
        self.rooms = vec![0; 2 * (2 * present.len()).next_power_of_two().max(16)];
        self.owners.clear();
        for (owner, room) in present {
            self.leaf_of[owner] = self.owners.len();
            self.owners.push(Some(owner));
            self.set(owner, room);
        }
    }
}

/// Where a piece lies: the extent and the unit in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtentPlace {
    /// Which extent.
    pub extent: usize,
    /// Which unit of it.
    pub offset: u64,
}

/// Extents that are filled piece by piece: into the newest with room, at its lowest free place.
/// `Origin` is what the owner keeps about each.
#[derive(Clone, Debug, Default)]
pub struct FilledExtents<Origin> {
    extents: Vec<Option<FilledExtent<Origin>>>,
    vacant: Vec<usize>,
    newest: NewestFit,
}

#[derive(Clone, Debug)]
struct FilledExtent<Origin> {
    origin: Origin,
    length: u64,
    holes: FreeRanges,
}

impl<Origin: Copy> FilledExtents<Origin> {
    /// Whether a piece of that length fits somewhere.
    pub fn has_room(&self, length: u64) -> bool {
        self.newest.newest(length).is_some()
    }

    /// Puts a piece into the newest extent with room, at its lowest free place.
    pub fn place(&mut self, length: u64) -> Option<(ExtentPlace, Origin)> {
        let id = self.newest.newest(length)?;
        let extent = self.extents.get_mut(id)?.as_mut()?;
        let offset = extent.holes.take_lowest(length)?;
        self.newest.set(id, extent.holes.largest());
        Some((ExtentPlace { extent: id, offset }, extent.origin))
    }

    /// Adds an extent, from now on the newest, and puts a first piece at its start. `first` must
    /// fit in `length`.
    pub fn open(&mut self, origin: Origin, length: u64, first: u64) -> ExtentPlace {
        let mut holes = FreeRanges::new(0, length);
        let offset = holes.take_lowest(first).unwrap_or(0);
        let room = holes.largest();
        let extent = Some(FilledExtent { origin, length, holes });
        let id = match self.vacant.pop() {
            Some(id) => {
                self.extents[id] = extent;
                id
            }
            None => {
                self.extents.push(extent);
                self.extents.len() - 1
            }
        };
        self.newest.add(id, room);
        ExtentPlace { extent: id, offset }
    }

    /// Where [`place`](FilledExtents::place) would put a piece of that length.
    pub fn next_place(&self, length: u64) -> Option<(ExtentPlace, Origin)> {
        let id = self.newest.newest(length)?;
        let extent = self.extents.get(id)?.as_ref()?;
        Some((ExtentPlace { extent: id, offset: extent.holes.lowest(length)? }, extent.origin))
    }

    /// The newest extent with room for a piece of that length.
    pub fn newest_with_room(&self, length: u64) -> Option<usize> {
        self.newest.newest(length)
    }

    /// Puts a piece at a place of an extent; `None` where that place is not free.
    pub fn place_at(&mut self, id: usize, offset: u64, length: u64) -> Option<ExtentPlace> {
        let extent = self.extents.get_mut(id)?.as_mut()?;
        let fits = offset + length <= extent.length && extent.holes.take_at(offset, length);
        self.newest.set(id, extent.holes.largest());
        fits.then_some(ExtentPlace { extent: id, offset })
    }

    /// Adds free units at the end of an extent.
    pub fn lengthen(&mut self, id: usize, by: u64) {
        if let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) {
            extent.holes.give_back(extent.length, by);
            extent.length += by;
            self.newest.set(id, extent.holes.largest());
        }
    }

    /// Takes all that is free in an extent, for memory that is not modelled.
    pub fn fill_up(&mut self, id: usize) {
        if let Some(extent) = self.extents.get_mut(id).and_then(Option::as_mut) {
            extent.holes = FreeRanges::new(0, 0);
            self.newest.set(id, 0);
        }
    }

    /// Takes a piece out. If its extent is now empty, the extent goes, and its origin and length
    /// are returned.
    pub fn give_back(&mut self, place: ExtentPlace, length: u64) -> Option<(Origin, u64)> {
        let slot = self.extents.get_mut(place.extent)?;
        let extent = slot.as_mut()?;
        extent.holes.give_back(place.offset, length);
        let room = extent.holes.largest();
        if room < extent.length {
            self.newest.set(place.extent, room);
            return None;
        }
        let gone = (extent.origin, extent.length);
        *slot = None;
        self.newest.remove(place.extent);
        self.vacant.push(place.extent);
        Some(gone)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lowest_and_highest_fit() {
        let mut holes = FreeRanges::new(0, 100);
        assert_eq!(holes.take_lowest(10), Some(0));
        assert_eq!(holes.take_highest(10), Some(90));
        assert_eq!(holes.take_lowest(80), Some(10));
        assert_eq!(holes.take_lowest(1), None);
        holes.give_back(0, 10);
        holes.give_back(20, 5);
        holes.give_back(40, 5);
        assert_eq!(holes.take_highest(5), Some(40));
        assert_eq!(holes.take_highest(6), Some(4));
        assert_eq!(holes.take_lowest(5), Some(20));
    }

    #[test]
    fn neighbouring_ranges_are_merged() {
        let mut holes = FreeRanges::new(0, 30);
        assert_eq!(holes.take_lowest(30), Some(0));
        holes.give_back(0, 10);
        holes.give_back(20, 10);
        assert_eq!(holes.largest(), 10);
        holes.give_back(10, 10);
        assert_eq!(holes.largest(), 30);
        assert_eq!(holes.take_lowest(30), Some(0));
    }

    #[test]
    fn the_newest_with_room_wins() {
        let mut fit = NewestFit::default();
        for (owner, room) in [(0, 9), (1, 3), (2, 5)] {
            fit.add(owner, room);
        }
        assert_eq!(fit.newest(4), Some(2));
        fit.set(2, 1);
        assert_eq!((fit.newest(1), fit.newest(2), fit.newest(4), fit.newest(10)), (Some(2), Some(1), Some(0), None));
        fit.remove(2);
        assert_eq!(fit.newest(1), Some(1));
    }

    #[test]
    fn places_can_be_chosen() {
        let mut holes = FreeRanges::new(0, 100);
        assert!(holes.take_at(40, 10) && !holes.take_at(45, 10) && !holes.take_at(35, 6) && !holes.take_at(95, 6));
        assert_eq!((holes.take_lowest(51), holes.take_highest(50)), (None, Some(50)));
        let mut holes = FreeRanges::new(0, 40);
        assert!(holes.take_at(10, 5));
        holes.take_all(8, 30);
        assert_eq!((holes.take_highest(10), holes.take_highest(8), holes.largest()), (Some(30), Some(0), 0));

        let mut extents = FilledExtents::default();
        let place = extents.open(7, 16, 4);
        assert_eq!(extents.place_at(place.extent, 10, 4), Some(ExtentPlace { extent: place.extent, offset: 10 }));
        assert_eq!(extents.place_at(place.extent, 13, 1), None);
        assert_eq!(extents.place_at(place.extent, 14, 4), None, "it ends before");
        extents.lengthen(place.extent, 16);
        assert!(extents.place_at(place.extent, 14, 4).is_some());
        extents.fill_up(place.extent);
        assert!(!extents.has_room(1));
        assert_eq!(extents.give_back(ExtentPlace { extent: place.extent, offset: 10 }, 4), None);
        assert!(extents.has_room(4));
    }

    proptest! {
        #[test]
        fn newest_fit_agrees_with_a_list_searched_from_the_back(steps in prop::collection::vec((0u8..4, 0usize..20, 1u64..9), 1..400)) {
            let mut fit = NewestFit::default();
            let mut list: Vec<(usize, u64)> = Vec::new();
            for (what, owner, room) in steps {
                let place = list.iter().position(|&(other, _)| other == owner);
                match (what, place) {
                    (0 | 1, None) => { fit.add(owner, room); list.push((owner, room)); }
                    (1, Some(place)) => { fit.set(owner, room); list[place].1 = room; }
                    (2, Some(place)) => { fit.remove(owner); list.remove(place); }
                    _ => {}
                }
                let expected = list.iter().rev().find(|&&(_, other)| other >= room).map(|&(owner, _)| owner);
                prop_assert_eq!(fit.newest(room), expected);
            }
        }
    }
}
