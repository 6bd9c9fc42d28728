//! Where `cuMemAlloc` puts things.
//!
//! The rule was read off recordings of the real driver on an H200: address space is taken in ranges of whole 32 MiB,
//! aligned to 32 MiB, at the highest free place, so downwards. An allocation goes into the newest range that still has
//! room, at its lowest free offset; only otherwise a new range is made. A range goes back with its last allocation.
//! Allocators break ties by address, so this decides which block they reuse.
//!
//! Allocations below one page share pages, in units of 512 bytes. Nothing was recorded about their order; they follow
//! the same rule one level down, with pages in the role of ranges.

use std::collections::HashMap;

use super::{
    extents::{Extents, Place},
    holes::Holes,
};
use oomph_base::{Address, GIB, MIB};

/// Address space is taken in multiples of this.
pub(super) const RANGE_BYTES: u64 = 32 * MIB;
/// The unit in which small allocations share a page.
pub(super) const SHARE_BYTES: u64 = 512;
/// Below this address `cuMemAlloc` puts nothing; reserved and pinned addresses are there.
pub(super) const LOWEST: u64 = 96 * 1024 * GIB;
/// The first range ends here.
const END: u64 = 127 * 1024 * GIB;

/// The addresses of all live `cuMemAlloc` allocations.
#[derive(Clone, Debug)]
pub(super) struct AddressSpace {
    page_bytes: u64,
    /// In units of [`RANGE_BYTES`].
    unused: Holes,
    /// In units of pages.
    ranges: Extents<u64>,
    /// In units of [`SHARE_BYTES`].
    shared_pages: Extents<PageOrigin>,
    live: HashMap<Address, Allocation>,
}

/// Where a shared page lies.
#[derive(Clone, Copy, Debug)]
struct PageOrigin {
    address: u64,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    bytes: u64,
    place: Place,
    footing: Footing,
}

/// What an allocation stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Footing {
    /// Part of a page, in [`SHARE_BYTES`].
    Shared(u64),
    /// Pages of its own.
    Pages(u64),
}

/// What freeing an allocation brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vacated {
    /// How large the allocation was.
    pub(super) bytes: u64,
    /// Pages that nobody uses any more.
    pub(super) pages: u64,
}

impl AddressSpace {
    pub(super) fn new(page_bytes: u64) -> AddressSpace {
        AddressSpace {
            page_bytes,
            unused: Holes::new(LOWEST / RANGE_BYTES, (END - LOWEST) / RANGE_BYTES),
            ranges: Extents::default(),
            shared_pages: Extents::default(),
            live: HashMap::new(),
        }
    }

    /// How many pages an allocation of this size would add.
    pub(super) fn growth_pages(&self, bytes: u64) -> u64 {
        match self.footing(bytes) {
            Footing::Shared(units) => u64::from(!self.shared_pages.has_room(units)),
            Footing::Pages(pages) => pages,
        }
    }

    /// Finds an address, or `None` where the address space is full. Physical memory is the caller's business.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<Address> {
        let footing = self.footing(bytes);
        let (place, address) = match footing {
            Footing::Shared(units) => self.place_in_shared_page(units)?,
            Footing::Pages(pages) => self.place_pages(pages)?,
        };
        let address = Address(address);
        self.live.insert(address, Allocation { bytes, place, footing });
        Some(address)
    }

    /// Takes an allocation back, or `None` where there is none at that address.
    pub(super) fn free(&mut self, address: Address) -> Option<Vacated> {
        let Allocation { bytes, place, footing } = self.live.remove(&address)?;
        let pages = match footing {
            Footing::Shared(units) => match self.shared_pages.give_back(place, units) {
                Some((page, _)) => {
                    self.give_pages_back(page.place, 1);
                    1
                }
                None => 0,
            },
            Footing::Pages(pages) => {
                self.give_pages_back(place, pages);
                pages
            }
        };
        Some(Vacated { bytes, pages })
    }

    fn footing(&self, bytes: u64) -> Footing {
        if bytes < self.page_bytes {
            Footing::Shared(bytes.div_ceil(SHARE_BYTES))
        } else {
            Footing::Pages(bytes.div_ceil(self.page_bytes))
        }
    }

    fn place_in_shared_page(&mut self, units: u64) -> Option<(Place, u64)> {
        let (place, page) = match self.shared_pages.place(units) {
            Some(found) => found,
            None => {
                let (place, address) = self.place_pages(1)?;
                let page = PageOrigin { address, place };
                (self.shared_pages.open(page, self.page_bytes / SHARE_BYTES, units), page)
            }
        };
        Some((place, page.address + place.offset * SHARE_BYTES))
    }

    fn place_pages(&mut self, pages: u64) -> Option<(Place, u64)> {
        let (place, first_range) = match self.ranges.place(pages) {
            Some(found) => found,
            None => {
                let ranges = pages.checked_mul(self.page_bytes)?.div_ceil(RANGE_BYTES);
                let first_range = self.unused.take_highest(ranges)?;
                (self.ranges.open(first_range, ranges * RANGE_BYTES / self.page_bytes, pages), first_range)
            }
        };
        Some((place, first_range * RANGE_BYTES + place.offset * self.page_bytes))
    }

    fn give_pages_back(&mut self, place: Place, pages: u64) {
        if let Some((first_range, length)) = self.ranges.give_back(place, pages) {
            self.unused.give_back(first_range, length * self.page_bytes / RANGE_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: u64 = END - RANGE_BYTES;

    fn space() -> AddressSpace {
        AddressSpace::new(2 * MIB)
    }

    #[test]
    fn ranges_grow_downwards_and_a_small_segment_sits_in_the_tail_of_the_last() {
        let mut space = space();
        assert_eq!(space.allocate(20 * MIB), Some(Address(TOP)));
        assert_eq!(space.allocate(20 * MIB), Some(Address(TOP - RANGE_BYTES)));
        assert_eq!(space.allocate(2 * MIB), Some(Address(TOP - RANGE_BYTES + 20 * MIB)));
        assert_eq!(space.allocate(10 * MIB), Some(Address(TOP - RANGE_BYTES + 22 * MIB)));
        assert_eq!(space.allocate(12 * MIB), Some(Address(TOP + 20 * MIB)), "the newest has no room, the older has");
        assert_eq!(space.allocate(100 * MIB), Some(Address(TOP - 5 * RANGE_BYTES)));
    }

    #[test]
    fn a_recorded_program_gets_the_addresses_that_the_driver_gave_it() {
        // The first segments of a random program on an H200: size, number of the 32 MiB range and offset, in MiB.
        let recorded = [
            (16, 0x65, 6),
            (2, 0x65, 22),
            (16, 0x64, 0),
            (26, 0x63, 0),
            (110, 0x5f, 0),
            (108, 0x5b, 0),
            (2, 0x5e, 12),
            (130, 0x56, 0),
            (2, 0x5a, 2),
            (184, 0x50, 0),
            (20, 0x5a, 4),
            (26, 0x4f, 0),
            (232, 0x47, 0),
            (338, 0x3c, 0),
            (2, 0x46, 18),
            (32, 0x3b, 0),
            (244, 0x33, 0),
        ];
        let mut space = space();
        space.allocate(6 * MIB);
        for (megabytes, range, offset) in recorded {
            let expected = TOP - (0x65 - range) * RANGE_BYTES + offset * MIB;
            assert_eq!(space.allocate(megabytes * MIB), Some(Address(expected)), "{megabytes} MiB");
        }
    }

    #[test]
    fn the_lowest_offset_of_the_newest_range_is_taken_first() {
        let mut space = space();
        let blocks: Vec<Address> = (0..4).filter_map(|_| space.allocate(8 * MIB)).collect();
        assert!(space.free(blocks[2]).is_some() && space.free(blocks[0]).is_some());
        assert_eq!(space.allocate(4 * MIB), Some(blocks[0]));
        assert_eq!(space.allocate(8 * MIB), Some(blocks[2]));
    }

    #[test]
    fn a_range_goes_back_with_its_last_segment_and_the_highest_hole_is_used_again() {
        let mut space = space();
        let blocks: Vec<Address> = (0..3).filter_map(|_| space.allocate(32 * MIB)).collect();
        assert!(space.free(blocks[0]).is_some() && space.free(blocks[1]).is_some());
        assert_eq!(space.allocate(32 * MIB), Some(blocks[0]));
        assert_eq!(space.allocate(64 * MIB), Some(Address(TOP - 4 * RANGE_BYTES)));
        assert_eq!(space.allocate(32 * MIB), Some(blocks[1]));
    }

    #[test]
    fn small_allocations_share_a_page_and_large_ones_take_whole_pages() {
        let mut space = space();
        assert_eq!(space.growth_pages(3 * MIB), 2);
        assert_eq!(space.growth_pages(20 * MIB + 512), 11);
        assert_eq!(space.growth_pages(2 * MIB), 1);
        let grown = |space: &mut AddressSpace, bytes| {
            let pages = space.growth_pages(bytes);
            space.allocate(bytes);
            pages
        };
        assert_eq!((0..4096).map(|_| grown(&mut space, 512)).sum::<u64>(), 1);
        assert_eq!(grown(&mut space, 1), 1, "the page is full");
        let mut space = self::space();
        assert_eq!((0..4).map(|_| grown(&mut space, MIB)).collect::<Vec<_>>(), [1, 0, 1, 0]);
    }

    #[test]
    fn a_shared_page_goes_back_with_its_last_allocation() {
        let mut space = space();
        let [Some(first), Some(second)] = [space.allocate(MIB), space.allocate(MIB)] else { panic!("there is room") };
        assert_eq!(space.free(first), Some(Vacated { bytes: MIB, pages: 0 }));
        assert_eq!(space.free(second), Some(Vacated { bytes: MIB, pages: 1 }));
        assert_eq!(space.free(second), None);
    }
}
