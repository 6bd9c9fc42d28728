//! Free stretches of a line of units: where something fits, lowest or highest place first.
//!
//! Everything that hands out places in the simulated device (the address space, its ranges, shared pages, reserved
//! and pinned addresses) is such a line. The unit is the owner's business.

use std::collections::{BTreeMap, BTreeSet};

/// The free stretches of a line, none of them touching another.
#[derive(Clone, Debug)]
pub(super) struct Holes {
    lengths: BTreeMap<u64, u64>,
    /// The same holes as (length, start): finding a fit then costs one look per distinct length, not per hole.
    by_length: BTreeSet<(u64, u64)>,
}

impl Holes {
    /// A line of `length` units from `start`, all free.
    pub(super) fn new(start: u64, length: u64) -> Holes {
        let mut holes = Holes { lengths: BTreeMap::new(), by_length: BTreeSet::new() };
        holes.insert(start, length);
        holes
    }

    /// The length of the largest hole.
    pub(super) fn largest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Takes `length` units at the lowest place where they fit, and says where.
    pub(super) fn take_lowest(&mut self, length: u64) -> Option<u64> {
        let mut lowest: Option<(u64, u64)> = None;
        let mut at_least = length;
        while let Some(&(hole, start)) = self.by_length.range((at_least, 0)..).next() {
            if lowest.is_none_or(|(other, _)| start < other) {
                lowest = Some((start, hole));
            }
            at_least = hole + 1;
        }
        let (start, hole) = lowest?;
        self.remove(start, hole);
        self.insert(start + length, hole - length);
        Some(start)
    }

    /// Takes `length` units at the highest place where they fit, and says where.
    pub(super) fn take_highest(&mut self, length: u64) -> Option<u64> {
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
        let (start, hole) = highest?;
        self.remove(start, hole);
        self.insert(start, hole - length);
        Some(start + hole - length)
    }

    /// Gives `length` units from `start` back. They must have been taken.
    pub(super) fn give_back(&mut self, start: u64, length: u64) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_and_the_highest_fitting_place_are_found() {
        let mut holes = Holes::new(0, 100);
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
    fn neighbouring_holes_become_one() {
        let mut holes = Holes::new(0, 30);
        assert_eq!(holes.take_lowest(30), Some(0));
        holes.give_back(0, 10);
        holes.give_back(20, 10);
        assert_eq!(holes.largest(), 10);
        holes.give_back(10, 10);
        assert_eq!(holes.largest(), 30);
        assert_eq!(holes.take_lowest(30), Some(0));
    }
}
