//! Where `cuMemAlloc` places memory, and where addresses are reserved.
//!
//! The rule of `cuMemAlloc` was derived from recordings of the driver on an H200: address space is
//! taken in ranges of whole 32 MiB, aligned to 32 MiB, at the highest free place, so downwards. An
//! allocation goes into the newest range with room, at its lowest free offset; otherwise a new
//! range is made. A range is given back with its last allocation. Allocators break ties by address,
//! so this decides which block they reuse.
//!
//! Allocations below one page share pages, in units of 512 bytes. Their order was not recorded;
//! they follow the same rule one level down, with pages in the role of ranges.

use std::collections::HashMap;

use super::placement::{ExtentPlace, FilledExtents, FreeRanges};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Address space is taken in multiples of this.
pub const RANGE_BYTES: u64 = 32 * MIB;
/// The unit in which small allocations share a page.
pub const SHARE_BYTES: u64 = 512;
/// Below this address `cuMemAlloc` puts nothing; reserved and pinned addresses are there.
pub const LOWEST: u64 = 96 * TIB;
/// The first range ends here.
pub const END: u64 = 127 * TIB;

/// What is left free in the ranges that the context of a new process fills partly, the older range
/// first. Recorded on an H200 with driver 580.159.04. Most of PyTorch's recordings show the same; in
/// some processes one range has 26 MiB left.
pub const CONTEXT_FREE_BYTES: [u64; 2] = [24 * MIB, 2 * MIB];
/// The length of the newer of them. The context gives its 414 MiB back while the first kernels run: in
/// recordings of PyTorch on the same H200, later segments lie there from its start upwards. The cause
/// is not known. Random numbers are made before, and after the first element-wise kernel or kernel of a
/// library it has happened.
const NEWER_CONTEXT_RANGE_BYTES: u64 = 13 * RANGE_BYTES;

/// Decides where pages are placed.
pub trait PagePlacement {
    /// Finds a place for some pages: what [`give_back`](PagePlacement::give_back) needs, and the first page.
    fn place(&mut self, pages: u64) -> Option<(ExtentPlace, u64)>;

    /// Gives pages back, the first of which is `first`.
    fn give_back(&mut self, place: ExtentPlace, first: u64, pages: u64);
}

/// The addresses of all live `cuMemAlloc` allocations.
#[derive(Clone, Debug)]
pub struct AddressSpace<Places = RangePlaces> {
    page_bytes: u64,
    places: Places,
    /// In units of [`SHARE_BYTES`].
    shared_pages: FilledExtents<PageOrigin>,
    live: HashMap<u64, PlacedAllocation>,
}

/// The rule of a new process: ranges of [`RANGE_BYTES`] that are filled.
#[derive(Clone, Debug)]
pub struct RangePlaces {
    range_pages: u64,
    /// In units of [`RANGE_BYTES`].
    unused: FreeRanges,
    /// In units of pages.
    ranges: FilledExtents<u64>,
    /// What the context has in its newer range, until it gives it back: place and pages.
    context: Option<(ExtentPlace, u64)>,
}

impl RangePlaces {
    /// The ranges of a new process between two addresses, multiples of [`RANGE_BYTES`].
    pub fn new(lowest: u64, end: u64, page_bytes: u64) -> RangePlaces {
        let mut places = RangePlaces::empty(lowest, end, page_bytes);
        for (length, free) in [RANGE_BYTES, NEWER_CONTEXT_RANGE_BYTES].into_iter().zip(CONTEXT_FREE_BYTES) {
            let used = (length - free) / page_bytes;
            if let Some(range) = places.unused.take_highest(length / RANGE_BYTES) {
                places.context = Some((places.ranges.open(range, length / page_bytes, used), used));
            }
        }
        places
    }

    fn empty(lowest: u64, end: u64, page_bytes: u64) -> RangePlaces {
        RangePlaces {
            range_pages: RANGE_BYTES / page_bytes,
            unused: FreeRanges::new(lowest / RANGE_BYTES, (end - lowest) / RANGE_BYTES),
            ranges: FilledExtents::default(),
            context: None,
        }
    }
}

impl PagePlacement for RangePlaces {
    fn place(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        let (place, first_range) = match self.ranges.place(pages) {
            Some(found) => found,
            None => {
                let ranges = pages.div_ceil(self.range_pages);
                let first_range = self.unused.take_highest(ranges)?;
                (self.ranges.open(first_range, ranges * self.range_pages, pages), first_range)
            }
        };
        Some((place, first_range * self.range_pages + place.offset))
    }

    fn give_back(&mut self, place: ExtentPlace, _first: u64, pages: u64) {
        if let Some((first_range, length)) = self.ranges.give_back(place, pages) {
            self.unused.give_back(first_range, length / self.range_pages);
        }
    }
}

/// Where a shared page lies.
#[derive(Clone, Copy, Debug, Default)]
struct PageOrigin {
    address: u64,
    place: ExtentPlace,
}

#[derive(Clone, Copy, Debug)]
struct PlacedAllocation {
    bytes: u64,
    place: ExtentPlace,
    page_use: PageUse,
}

/// Which pages an allocation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageUse {
    /// Part of a page, in [`SHARE_BYTES`].
    Shared(u64),
    /// Pages of its own.
    Pages(u64),
}

/// What freeing an allocation gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedAllocation {
    /// The size of the allocation.
    pub bytes: u64,
    /// Pages that are no longer used.
    pub pages: u64,
}

impl AddressSpace {
    /// The address space of a new process.
    pub fn new(page_bytes: u64) -> AddressSpace {
        AddressSpace::between(LOWEST, END, page_bytes)
    }

    /// The same between two addresses, multiples of [`RANGE_BYTES`].
    pub fn between(lowest: u64, end: u64, page_bytes: u64) -> AddressSpace {
        AddressSpace::placing(RangePlaces::new(lowest, end, page_bytes), page_bytes)
    }

    /// An element-wise kernel or one of a library runs: with the first one the context gives back what it
    /// has in its newer range.
    pub fn kernels_run(&mut self) {
        if let Some((place, pages)) = self.places.context.take() {
            self.places.give_back(place, 0, pages);
        }
    }
}

impl<Places: PagePlacement> AddressSpace<Places> {
    /// An address space without allocations whose pages are placed by another rule.
    pub fn placing(places: Places, page_bytes: u64) -> AddressSpace<Places> {
        AddressSpace { page_bytes, places, shared_pages: FilledExtents::default(), live: HashMap::new() }
    }

    /// How many pages an allocation of this size would add.
    pub fn growth_pages(&self, bytes: u64) -> u64 {
        match self.page_use(bytes) {
            PageUse::Shared(units) => u64::from(!self.shared_pages.has_room(units)),
            PageUse::Pages(pages) => pages,
        }
    }

    /// Finds an address, or `None` where the address space is full. The caller counts physical
    /// memory.
    pub fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let page_use = self.page_use(bytes);
        let (place, address) = match page_use {
            PageUse::Shared(units) => self.place_in_shared_page(units)?,
            PageUse::Pages(pages) => self.place_pages(pages)?,
        };
        self.live.insert(address, PlacedAllocation { bytes, place, page_use });
        Some(address)
    }

    /// Frees an allocation; `None` where none starts at that address.
    pub fn free(&mut self, address: u64) -> Option<FreedAllocation> {
        let PlacedAllocation { bytes, place, page_use } = self.live.remove(&address)?;
        let pages = match page_use {
            PageUse::Shared(units) => match self.shared_pages.give_back(place, units) {
                Some((page, _)) => {
                    self.places.give_back(page.place, page.address / self.page_bytes, 1);
                    1
                }
                None => 0,
            },
            PageUse::Pages(pages) => {
                self.places.give_back(place, address / self.page_bytes, pages);
                pages
            }
        };
        Some(FreedAllocation { bytes, pages })
    }

    fn page_use(&self, bytes: u64) -> PageUse {
        if bytes < self.page_bytes {
            PageUse::Shared(bytes.div_ceil(SHARE_BYTES))
        } else {
            PageUse::Pages(bytes.div_ceil(self.page_bytes))
        }
    }

    fn place_in_shared_page(&mut self, units: u64) -> Option<(ExtentPlace, u64)> {
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

    fn place_pages(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        let (place, first) = self.places.place(pages)?;
        Some((place, first.checked_mul(self.page_bytes)?))
    }
}

/// The first reserved range starts here.
pub const FIRST_RESERVED: u64 = 0x3_0200_0000;

/// Where `cuMemAddressReserve` and the chunks of stream-ordered pools are placed.
///
/// Reserved ranges start at the address that the real driver gives first (an H200 with driver 580.159.04), and each follows
/// the one before it in steps of 32 MiB. Addresses that were given back are used again, the lowest fitting place first.
#[derive(Clone, Debug)]
pub struct ReservedSpace {
    /// In units of [`RANGE_BYTES`].
    unused: FreeRanges,
}

impl ReservedSpace {
    /// All addresses from [`FIRST_RESERVED`] to `end` are free.
    pub fn new(end: u64) -> ReservedSpace {
        ReservedSpace { unused: FreeRanges::new(FIRST_RESERVED / RANGE_BYTES, (end - FIRST_RESERVED) / RANGE_BYTES) }
    }

    /// Takes addresses, or `None` where there is no room.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        self.unused.take_lowest(bytes.div_ceil(RANGE_BYTES)).map(|range| range * RANGE_BYTES)
    }

    /// Gives back what [`take`](ReservedSpace::take) took.
    pub fn give_back(&mut self, start: u64, bytes: u64) {
        self.unused.give_back(start / RANGE_BYTES, bytes.div_ceil(RANGE_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: u64 = END - RANGE_BYTES;

    fn space() -> AddressSpace {
        AddressSpace::placing(RangePlaces::empty(LOWEST, END, 2 * MIB), 2 * MIB)
    }

    #[test]
    fn a_new_process_fills_the_ranges_of_its_context_first() {
        let mut space = AddressSpace::new(2 * MIB);
        assert_eq!(space.allocate(2 * MIB), Some(TOP - RANGE_BYTES + 30 * MIB), "the end of a range of 416 MiB");
        assert_eq!(space.allocate(20 * MIB), Some(TOP + 8 * MIB));
        assert_eq!(space.allocate(2 * MIB), Some(TOP + 28 * MIB));
        assert_eq!(space.allocate(20 * MIB), Some(TOP - 14 * RANGE_BYTES));
        // As the segments of a ResNet-18 on an H200: from the start of what the context gave back, upwards.
        space.kernels_run();
        space.kernels_run();
        let start = TOP - 13 * RANGE_BYTES;
        assert_eq!(space.allocate(26 * MIB), Some(start));
        assert_eq!(space.allocate(50 * MIB), Some(start + 26 * MIB));
        assert_eq!(space.allocate(26 * MIB), Some(start + 76 * MIB));
        assert_eq!(space.allocate(12 * MIB), Some(TOP - 14 * RANGE_BYTES + 20 * MIB), "the newest range has room");
    }

    #[test]
    fn ranges_grow_down_and_tails_are_filled() {
        let mut space = space();
        assert_eq!(space.allocate(20 * MIB), Some(TOP));
        assert_eq!(space.allocate(20 * MIB), Some(TOP - RANGE_BYTES));
        assert_eq!(space.allocate(2 * MIB), Some(TOP - RANGE_BYTES + 20 * MIB));
        assert_eq!(space.allocate(10 * MIB), Some(TOP - RANGE_BYTES + 22 * MIB));
        assert_eq!(space.allocate(12 * MIB), Some(TOP + 20 * MIB), "the newest has no room, the older has");
        assert_eq!(space.allocate(100 * MIB), Some(TOP - 5 * RANGE_BYTES));
    }

    #[test]
    fn recorded_addresses_are_reproduced() {
        // The first segments of a random program on an H200: size, number of the 32 MiB range and
        // offset, in MiB.
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
            assert_eq!(space.allocate(megabytes * MIB), Some(expected), "{megabytes} MiB");
        }
    }

    #[test]
    fn the_lowest_offset_of_the_newest_range_is_taken_first() {
        let mut space = space();
        let blocks: Vec<u64> = (0..4).filter_map(|_| space.allocate(8 * MIB)).collect();
        assert!(space.free(blocks[2]).is_some() && space.free(blocks[0]).is_some());
        assert_eq!(space.allocate(4 * MIB), Some(blocks[0]));
        assert_eq!(space.allocate(8 * MIB), Some(blocks[2]));
    }

    #[test]
    fn empty_ranges_are_given_back_and_reused() {
        let mut space = space();
        let blocks: Vec<u64> = (0..3).filter_map(|_| space.allocate(32 * MIB)).collect();
        assert!(space.free(blocks[0]).is_some() && space.free(blocks[1]).is_some());
        assert_eq!(space.allocate(32 * MIB), Some(blocks[0]));
        assert_eq!(space.allocate(64 * MIB), Some(TOP - 4 * RANGE_BYTES));
        assert_eq!(space.allocate(32 * MIB), Some(blocks[1]));
    }

    #[test]
    fn small_allocations_share_a_page() {
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
        assert_eq!(space.free(first), Some(FreedAllocation { bytes: MIB, pages: 0 }));
        assert_eq!(space.free(second), Some(FreedAllocation { bytes: MIB, pages: 1 }));
        assert_eq!(space.free(second), None);
    }

    #[test]
    fn ranges_follow_each_other_and_the_lowest_hole_is_reused() {
        let mut space = ReservedSpace::new(1 << 40);
        let first = space.take(33 << 20).unwrap();
        let second = space.take(1).unwrap();
        assert_eq!((first, second), (FIRST_RESERVED, FIRST_RESERVED + 2 * RANGE_BYTES));
        space.give_back(first, 33 << 20);
        assert_eq!(space.take(RANGE_BYTES), Some(first));
        assert_eq!(space.take(1 << 40), None);
    }
}
