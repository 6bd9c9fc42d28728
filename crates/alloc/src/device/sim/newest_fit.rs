//! The newest of many places that still has room, in logarithmic time.

/// Owners in order of arrival, each with some room, as a tree of maxima.
///
/// Owners are small numbers that may be used again after [`remove`](NewestFit::remove).
#[derive(Clone, Debug, Default)]
pub(super) struct NewestFit {
    /// Position 1 is the root, the children of `i` are `2i` and `2i + 1`, the second half are the leaves.
    rooms: Vec<u64>,
    /// Which owner sits at a leaf, in order of arrival.
    owners: Vec<Option<usize>>,
    /// At which leaf an owner sits.
    leaf_of: Vec<usize>,
}

impl NewestFit {
    /// A new owner, from now on the newest.
    pub(super) fn add(&mut self, owner: usize, room: u64) {
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

    /// An owner's room has changed.
    pub(super) fn set(&mut self, owner: usize, room: u64) {
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

    /// An owner goes away.
    pub(super) fn remove(&mut self, owner: usize) {
        self.set(owner, 0);
        self.owners[self.leaf_of[owner]] = None;
        while self.owners.last() == Some(&None) {
            self.owners.pop();
        }
    }

    /// The newest owner with at least that much room, which must not be zero.
    pub(super) fn newest(&self, room: u64) -> Option<usize> {
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

    /// Closes up the leaves of owners that are gone, and makes room for as many as are left.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_newest_with_room_wins_not_the_roomiest() {
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

    proptest! {
        #[test]
        fn it_agrees_with_a_list_searched_from_the_back(steps in prop::collection::vec((0u8..4, 0usize..20, 1u64..9), 1..400)) {
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
