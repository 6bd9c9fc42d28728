//! Stretches of memory that are filled piece by piece: into the newest with room, at its lowest free place.

use super::{holes::Holes, newest_fit::NewestFit};

/// Where a piece lies: in which extent, at which unit of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) extent: usize,
    pub(super) offset: u64,
}

/// Extents of any length, each with a note of where it came from.
#[derive(Clone, Debug)]
pub(super) struct Extents<Origin> {
    extents: Vec<Option<Extent<Origin>>>,
    vacant: Vec<usize>,
    newest: NewestFit,
}

#[derive(Clone, Debug)]
struct Extent<Origin> {
    origin: Origin,
    length: u64,
    holes: Holes,
}

impl<Origin> Default for Extents<Origin> {
    fn default() -> Self {
        Extents { extents: Vec::new(), vacant: Vec::new(), newest: NewestFit::default() }
    }
}

impl<Origin: Copy> Extents<Origin> {
    /// Whether a piece of that length fits somewhere.
    pub(super) fn has_room(&self, length: u64) -> bool {
        self.newest.newest(length).is_some()
    }

    /// Puts a piece into the newest extent with room, at its lowest free place.
    pub(super) fn place(&mut self, length: u64) -> Option<(Place, Origin)> {
        let id = self.newest.newest(length)?;
        let extent = self.extents.get_mut(id)?.as_mut()?;
        let offset = extent.holes.take_lowest(length)?;
        self.newest.set(id, extent.holes.largest());
        Some((Place { extent: id, offset }, extent.origin))
    }

    /// Adds an extent, from now on the newest, and puts a first piece at its start. `first` must fit in `length`.
    pub(super) fn open(&mut self, origin: Origin, length: u64, first: u64) -> Place {
        let mut holes = Holes::new(0, length);
        let offset = holes.take_lowest(first).unwrap_or(0);
        let room = holes.largest();
        let extent = Some(Extent { origin, length, holes });
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
        Place { extent: id, offset }
    }

    /// Takes a piece out. If its extent is now empty, the extent goes, and its origin and length are returned.
    pub(super) fn give_back(&mut self, place: Place, length: u64) -> Option<(Origin, u64)> {
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
