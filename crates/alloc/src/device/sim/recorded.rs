//! Where `cuMemAlloc` places memory in the replay of a recording whose addresses are known.
//!
//! As long as the calls are those of the recorded program, memory lies where it lay there. From the first other call on,
//! the rule of that program's driver goes on: the one of [`PlacementRule`] that explains most recorded addresses.
//!
//! A real process differs from a new one in its other memory: host memory and libraries take address space, so that new
//! ranges do not simply lie one below the other. The recording shows where ranges were made; later calls get the same
//! places in the same order.

use std::collections::{BTreeMap, HashMap};

use oomph_base::PlacementCall;
use oomph_driver::{CONTEXT_FREE_BYTES, END, ExtentPlace, FilledExtents, FreeRanges, LOWEST, RANGE_BYTES};

/// How a driver chooses addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlacementRule {
    /// In ranges of 32 MiB, as [`oomph_driver::RangePlaces`] describes.
    Ranges,
    /// One behind the other; if it reuses addresses, at the lowest place that was given back.
    Upwards { reuses: bool },
    /// One below the other; if it reuses addresses, at the highest place that was given back.
    Downwards { reuses: bool },
}

/// Of two rules that explain the same, the later counts.
const RULES: [PlacementRule; 5] = [
    PlacementRule::Downwards { reuses: false },
    PlacementRule::Upwards { reuses: false },
    PlacementRule::Downwards { reuses: true },
    PlacementRule::Upwards { reuses: true },
    PlacementRule::Ranges,
];

/// The address space of a recorded process, in pages.
#[derive(Clone, Debug)]
pub(super) struct RecordedSpace {
    /// What the program took, as (first page, number of pages).
    taken: Vec<(u64, u64)>,
    /// How many calls were the same so far; `None` after the first other one.
    followed: Option<usize>,
    places: RecordedPlaces,
}

#[derive(Clone, Debug)]
enum RecordedPlaces {
    Ranges(RecordedRanges),
    Row(AddressRow),
}

/// Memory in no range.
const NO_EXTENT: usize = usize::MAX;

/// One line of addresses without ranges.
#[derive(Clone, Debug)]
struct AddressRow {
    free: FreeRanges,
    upwards: bool,
    reuses: bool,
}

impl AddressRow {
    fn next(&self, pages: u64) -> Option<u64> {
        if self.upwards { self.free.lowest(pages) } else { self.free.highest(pages) }
    }

    fn take_at(&mut self, first: u64, pages: u64) -> Option<ExtentPlace> {
        self.free.take_at(first, pages).then_some(ExtentPlace { extent: NO_EXTENT, offset: first })
    }
}

/// A recorded call in pages. Released memory was taken before.
#[derive(Clone, Copy, Debug)]
enum PageCall {
    Taken { first: u64, pages: u64 },
    Released { first: u64 },
}

impl RecordedSpace {
    /// The address space of a process that made these calls. `None` without calls, and where they cannot be those of
    /// a driver with such pages.
    pub(super) fn new(page_bytes: u64, calls: &[PlacementCall]) -> Option<RecordedSpace> {
        let calls = in_pages(page_bytes, calls)?;
        let taken: Vec<(u64, u64)> = calls
            .iter()
            .filter_map(|call| match *call {
                PageCall::Taken { first, pages } => Some((first, pages)),
                PageCall::Released { .. } => None,
            })
            .collect();
        let explain = |rule| {
            let (explained, openings) = RecordedPlaces::of(rule, page_bytes, &taken)?.explain(page_bytes, &calls);
            Some((explained, rule, openings))
        };
        let (_, rule, openings) = RULES.into_iter().filter_map(explain).max_by_key(|(explained, ..)| *explained)?;
        let mut places = RecordedPlaces::of(rule, page_bytes, &taken)?;
        if let RecordedPlaces::Ranges(ranges) = &mut places {
            ranges.openings = openings;
        }
        Some(RecordedSpace { taken, followed: Some(0), places })
    }

    /// Finds a place for some pages, and the first of them.
    pub(super) fn place(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        if let Some(followed) = self.followed {
            if let Some(&(first, recorded)) = self.taken.get(followed)
                && recorded == pages
                && let Some(place) = self.places.take_at(first, pages)
            {
                self.followed = Some(followed + 1);
                return Some((place, first));
            }
            self.followed = None;
            if let RecordedPlaces::Ranges(ranges) = &mut self.places {
                ranges.openings.retain(|opening| opening.call >= followed);
            }
        }
        self.places.take(pages)
    }

    /// Gives pages back, the first of which is `first`.
    pub(super) fn give_back(&mut self, place: ExtentPlace, first: u64, pages: u64) {
        self.places.give_back(place, first, pages);
    }
}

/// The calls in pages, moved to the addresses of the simulated device if they lie elsewhere.
fn in_pages(page_bytes: u64, calls: &[PlacementCall]) -> Option<Vec<PageCall>> {
    let taken = || {
        calls.iter().filter_map(|call| match *call {
            PlacementCall::Taken { address, bytes } => Some((address.0, bytes)),
            PlacementCall::Released { .. } => None,
        })
    };
    let lowest = taken().map(|(address, _)| address).min()?;
    let end = taken().try_fold(0, |end, (address, bytes)| Some(address.checked_add(bytes)?.max(end)))?;
    let are_pages = taken()
        .all(|(address, bytes)| address.is_multiple_of(page_bytes) && bytes.is_multiple_of(page_bytes) && bytes > 0);
    // Half of the simulated addresses stays free for other calls.
    if !are_pages || end - lowest > (END - LOWEST) / 2 {
        return None;
    }
    let stays = lowest - lowest % RANGE_BYTES >= LOWEST + (END - LOWEST) / 2 && end <= MOST;
    let moved =
        |address: u64| if stays { address } else { address - lowest / RANGE_BYTES * RANGE_BYTES + (LOWEST + END) / 2 };
    let mut live = HashMap::new();
    let in_pages = |call: &PlacementCall| match *call {
        PlacementCall::Taken { address, bytes } => {
            let (first, pages) = (moved(address.0) / page_bytes, bytes / page_bytes);
            live.insert(first, pages);
            Some(PageCall::Taken { first, pages })
        }
        PlacementCall::Released { address } if address.0 < lowest => None,
        PlacementCall::Released { address } => {
            let first = moved(address.0) / page_bytes;
            live.remove(&first).map(|_| PageCall::Released { first })
        }
    };
    Some(calls.iter().filter_map(in_pages).collect())
}

/// No device address lies above this.
const MOST: u64 = 1 << 47;

impl RecordedPlaces {
    fn of(rule: PlacementRule, page_bytes: u64, taken: &[(u64, u64)]) -> Option<RecordedPlaces> {
        let lowest = LOWEST / page_bytes;
        let end = taken.iter().map(|&(first, pages)| first + pages).max()?;
        let start = taken.iter().map(|&(first, _)| first).min()?;
        Some(match rule {
            PlacementRule::Ranges => RecordedPlaces::Ranges(RecordedRanges::new(RANGE_BYTES / page_bytes, taken)?),
            PlacementRule::Downwards { reuses } => {
                let free = FreeRanges::new(lowest, end - lowest);
                RecordedPlaces::Row(AddressRow { free, upwards: false, reuses })
            }
            PlacementRule::Upwards { reuses } => {
                let free = FreeRanges::new(start, 2 * MOST / page_bytes - start);
                RecordedPlaces::Row(AddressRow { free, upwards: true, reuses })
            }
        })
    }

    /// Makes the recorded calls. Returns how many addresses the rule explains, and where ranges were made.
    fn explain(mut self, page_bytes: u64, calls: &[PageCall]) -> (usize, Vec<RangeOpening>) {
        let (mut explained, mut call) = (0, 0);
        let mut openings = Vec::new();
        let mut live: HashMap<u64, (ExtentPlace, u64)> = HashMap::new();
        for made in calls {
            match *made {
                PageCall::Taken { first, pages } => {
                    explained += usize::from(self.expects(pages, first));
                    if self.opens_range_at(first) {
                        openings.push(RangeOpening { call, pages, first: first * page_bytes / RANGE_BYTES });
                    }
                    if let Some(place) = self.take_at(first, pages) {
                        live.insert(first, (place, pages));
                    }
                    call += 1;
                }
                PageCall::Released { first } => {
                    if let Some((place, pages)) = live.remove(&first) {
                        self.give_back(place, first, pages);
                    }
                }
            }
        }
        (explained, openings)
    }

    /// Whether a range is made for pages at this place.
    fn opens_range_at(&self, first: u64) -> bool {
        match self {
            RecordedPlaces::Ranges(ranges) => {
                first.is_multiple_of(ranges.range_pages) && ranges.around(first).is_none()
            }
            RecordedPlaces::Row(_) => false,
        }
    }

    /// Whether the rule would place some pages there.
    fn expects(&self, pages: u64, first: u64) -> bool {
        match self {
            RecordedPlaces::Ranges(ranges) => ranges.expects(pages, first),
            RecordedPlaces::Row(row) => row.next(pages) == Some(first),
        }
    }

    fn take(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        match self {
            RecordedPlaces::Ranges(ranges) => ranges.take(pages),
            RecordedPlaces::Row(row) => {
                let first = row.next(pages)?;
                Some((row.take_at(first, pages)?, first))
            }
        }
    }

    fn take_at(&mut self, first: u64, pages: u64) -> Option<ExtentPlace> {
        match self {
            RecordedPlaces::Ranges(ranges) => ranges.take_at(first, pages),
            RecordedPlaces::Row(row) => row.take_at(first, pages),
        }
    }

    fn give_back(&mut self, place: ExtentPlace, first: u64, pages: u64) {
        match self {
            RecordedPlaces::Ranges(ranges) => ranges.give_back(place, first, pages),
            RecordedPlaces::Row(row) if row.reuses => row.free.give_back(first, pages),
            RecordedPlaces::Row(_) => {}
        }
    }
}

/// A range that the recorded process made for a call.
#[derive(Clone, Copy, Debug)]
struct RangeOpening {
    /// The number of the call.
    call: usize,
    /// What the call took.
    pages: u64,
    /// Its first unit of 32 MiB.
    first: u64,
}

/// Ranges of 32 MiB, of which some are not the program's own.
#[derive(Clone, Debug)]
struct RecordedRanges {
    range_pages: u64,
    /// What no one has used yet, below all ranges so far, and what the program gave back. In ranges.
    unused: FreeRanges,
    /// The lowest range so far.
    lowest_used: u64,
    /// In pages. What others have taken is never given back.
    extents: FilledExtents<u64>,
    /// The extents and their length in ranges, by the first range.
    by_range: BTreeMap<u64, (usize, u64)>,
    /// What the program holds, as first page and number of pages.
    held: BTreeMap<u64, u64>,
    /// Where the recorded process made ranges that were not used yet.
    openings: Vec<RangeOpening>,
}

impl RecordedRanges {
    fn new(range_pages: u64, taken: &[(u64, u64)]) -> Option<RecordedRanges> {
        let &(first, _) = taken.first()?;
        let lowest = LOWEST / RANGE_BYTES;
        let mut ranges = RecordedRanges {
            range_pages,
            unused: FreeRanges::new(lowest, first.div_ceil(range_pages) - lowest),
            lowest_used: first.div_ceil(range_pages),
            extents: FilledExtents::default(),
            by_range: BTreeMap::new(),
            held: BTreeMap::new(),
            openings: Vec::new(),
        };
        ranges.add_context(taken);
        Some(ranges)
    }

    /// The ranges of the context: those in which the first recorded place is where the context ends, or new ones above all
    /// others.
    fn add_context(&mut self, taken: &[(u64, u64)]) {
        let range_pages = self.range_pages;
        let mut lowest_in: BTreeMap<u64, u64> = BTreeMap::new();
        for &(first, _) in taken {
            let lowest = lowest_in.entry(first / range_pages).or_insert(first);
            *lowest = first.min(*lowest);
        }
        let highest = taken.iter().map(|&(first, pages)| (first + pages).div_ceil(range_pages)).max().unwrap_or(0);
        for (free, above) in CONTEXT_FREE_BYTES.into_iter().zip([highest + 1, highest]) {
            let used = range_pages - free * range_pages / RANGE_BYTES;
            let begins = |first: &u64| {
                first % range_pages == used
                    && lowest_in.get(&(first / range_pages)) == Some(first)
                    && !self.by_range.contains_key(&(first / range_pages))
            };
            let found = taken.iter().map(|&(first, _)| first).find(begins);
            let range = found.map_or(above, |first| first / range_pages);
            self.unused.take_all(range, range + 1);
            self.open(range, 1, used);
        }
    }

    /// Makes a range. Its first pages are taken.
    fn open(&mut self, first_range: u64, ranges: u64, taken: u64) -> usize {
        let extent = self.extents.open(first_range, ranges * self.range_pages, taken).extent;
        self.by_range.insert(first_range, (extent, ranges));
        extent
    }

    /// The range that contains a page: its extent, first range and length in ranges.
    fn around(&self, page: u64) -> Option<(usize, u64, u64)> {
        let range = page / self.range_pages;
        let (&first, &(extent, ranges)) = self.by_range.range(..=range).next_back()?;
        (range < first + ranges).then_some((extent, first, ranges))
    }

    /// Whether there is no range, and no memory outside ranges.
    fn is_vacant(&self, first: u64, ranges: u64) -> bool {
        let range_below = self.by_range.range(..first + ranges).next_back();
        let held_below = self.held.range(..(first + ranges) * self.range_pages).next_back();
        range_below.is_none_or(|(&other, &(_, length))| other + length <= first)
            && held_below.is_none_or(|(&other, &length)| other + length <= first * self.range_pages)
    }

    fn expects(&self, pages: u64, first: u64) -> bool {
        match self.extents.next_place(pages) {
            Some((place, start)) => start * self.range_pages + place.offset == first,
            None => first.is_multiple_of(self.range_pages) && self.around(first).is_none(),
        }
    }

    /// Takes pages that the recorded process took there. `None` where the program still holds some of them.
    fn take_at(&mut self, first: u64, pages: u64) -> Option<ExtentPlace> {
        let below = self.held.range(..first + pages).next_back();
        if below.is_some_and(|(&other, &length)| other + length > first) {
            return None;
        }
        let place = self.take_in_range(first, pages).unwrap_or_else(|| self.take_outside(first, pages));
        self.held.insert(first, pages);
        Some(place)
    }

    /// Takes pages that fit in no range as they are known: others have taken and given back memory there.
    fn take_outside(&mut self, first: u64, pages: u64) -> ExtentPlace {
        let (start, end) = (first / self.range_pages, (first + pages).div_ceil(self.range_pages));
        let from = self.around(first).map_or(start, |(_, range, _)| range);
        for &(extent, _) in self.by_range.range(from..end).map(|(_, range)| range) {
            self.extents.fill_up(extent);
        }
        self.use_up(start, end - start);
        ExtentPlace { extent: NO_EXTENT, offset: first }
    }

    fn take_in_range(&mut self, first: u64, pages: u64) -> Option<ExtentPlace> {
        let end_range = (first + pages).div_ceil(self.range_pages);
        if let Some((extent, start, ranges)) = self.around(first) {
            let end = start + ranges;
            if end < end_range {
                if !self.is_vacant(end, end_range - end) {
                    return None;
                }
                self.extents.lengthen(extent, (end_range - end) * self.range_pages);
                self.by_range.insert(start, (extent, end_range - start));
            }
            return self.extents.place_at(extent, first - start * self.range_pages, pages);
        }
        let (start, offset) = (first / self.range_pages, first % self.range_pages);
        if !self.is_vacant(start, end_range - start) {
            return None;
        }
        if offset == 0 {
            self.fill_with_room(pages);
        }
        self.use_up(start, end_range - start);
        let extent = self.open(start, end_range - start, offset + pages);
        Some(ExtentPlace { extent, offset })
    }

    /// The driver made a new range although some had room as far as is known: others have taken it.
    fn fill_with_room(&mut self, pages: u64) {
        while let Some(extent) = self.extents.newest_with_room(pages) {
            self.extents.fill_up(extent);
        }
    }

    /// Takes ranges from what is unused. What lies between them and the ranges above is not free, or the driver would
    /// have taken it.
    fn use_up(&mut self, first: u64, ranges: u64) {
        self.unused.take_all(first, first + ranges);
        if first < self.lowest_used {
            self.unused.take_all(first, self.lowest_used);
            self.lowest_used = first;
        }
    }

    /// Takes pages where the driver would.
    fn take(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        let (place, start) = match self.extents.place(pages) {
            Some(found) => found,
            None => self.take_new_range(pages)?,
        };
        let first = start * self.range_pages + place.offset;
        self.held.insert(first, pages);
        Some((place, first))
    }

    /// Makes a range at the highest free place: the next one that the recorded process made for as many pages, or what is
    /// unused.
    fn take_new_range(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        let ranges = pages.div_ceil(self.range_pages);
        let is_free = |opening: &RangeOpening| opening.pages == pages && self.is_vacant(opening.first, ranges);
        let recorded = self.openings.iter().position(is_free);
        let recorded = recorded.map(|found| self.openings.remove(found).first);
        let start = recorded.max(self.unused.highest(ranges))?;
        self.use_up(start, ranges);
        Some((ExtentPlace { extent: self.open(start, ranges, pages), offset: 0 }, start))
    }

    fn give_back(&mut self, place: ExtentPlace, first: u64, pages: u64) {
        self.held.remove(&first);
        if let Some((first, length)) = self.extents.give_back(place, pages) {
            self.by_range.remove(&first);
            self.unused.give_back(first, length / self.range_pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        Device,
        sim::{SimConfig, SimDevice},
    };
    use oomph_base::{Address, MIB};

    /// A multiple of 32 MiB within the addresses that stay as they are.
    const BASE: u64 = 126 << 40;

    fn taken(range: u64, offset_mib: u64, mib: u64) -> PlacementCall {
        PlacementCall::Taken { address: at(range, offset_mib), bytes: mib * MIB }
    }

    fn at(range: u64, offset_mib: u64) -> Address {
        Address(BASE + range * RANGE_BYTES + offset_mib * MIB)
    }

    fn device(calls: &[PlacementCall]) -> SimDevice {
        SimDevice::new(SimConfig::default()).unwrap().placing_as(calls)
    }

    /// The first segments of a real program: host memory above the first one was given back after it.
    fn with_host_memory() -> Vec<PlacementCall> {
        vec![
            taken(30, 0, 148),
            taken(60, 8, 20),
            taken(34, 20, 2),
            taken(50, 0, 20),
            taken(49, 0, 20),
            taken(29, 0, 20),
            taken(48, 0, 20),
            taken(20, 0, 148),
        ]
    }

    #[test]
    fn the_same_calls_get_the_recorded_addresses() {
        let calls = with_host_memory();
        let mut device = device(&calls);
        for call in calls {
            let PlacementCall::Taken { address, bytes } = call else { panic!("only taken") };
            assert_eq!(device.alloc(bytes).unwrap(), address);
        }
        assert_eq!(device.alloc(64 * MIB).unwrap(), at(18, 0), "below all that was recorded");
        assert_eq!(device.alloc(2 * MIB).unwrap(), at(24, 20), "in the newest range with room");
    }

    #[test]
    fn other_calls_get_the_ranges_that_the_process_made() {
        let mut device = device(&with_host_memory());
        assert_eq!(device.alloc(148 * MIB).unwrap(), at(30, 0));
        // From here on another program.
        assert_eq!(device.alloc(10 * MIB).unwrap(), at(34, 20), "in the newest range with room");
        assert_eq!(device.alloc(24 * MIB).unwrap(), at(60, 8), "the context has room");
        let ranges = [20, 22, 20, 20, 20].map(|mib| device.alloc(mib * MIB).unwrap());
        assert_eq!(ranges, [at(50, 0), at(29, 0), at(49, 0), at(48, 0), at(28, 0)]);
        assert_eq!(device.alloc(148 * MIB).unwrap(), at(23, 0), "below all others");
        assert_eq!(device.alloc(32 * MIB).unwrap(), at(22, 0));
        device.free(at(50, 0)).unwrap();
        assert_eq!(device.alloc(32 * MIB).unwrap(), at(50, 0), "given back, and the highest");
    }

    #[test]
    fn memory_that_is_still_held_is_not_placed_again() {
        let calls = [taken(5, 0, 30), PlacementCall::Released { address: at(5, 0) }, taken(5, 0, 30)];
        let mut device = device(&calls);
        let first = device.alloc(30 * MIB).unwrap();
        let second = device.alloc(30 * MIB).unwrap();
        assert_eq!((first, second), (at(5, 0), at(4, 0)), "a new range below");
        device.free(first).unwrap();
        device.free(second).unwrap();
        assert_eq!(device.held_bytes(), 0);
    }

    #[test]
    fn a_driver_that_goes_upwards_is_recognised() {
        let calls = [taken(3, 0, 2), taken(3, 2, 40), taken(4, 10, 20), taken(4, 30, 62)];
        let mut device = device(&calls);
        assert_eq!(device.alloc(2 * MIB).unwrap(), at(3, 0));
        assert_eq!(device.alloc(38 * MIB).unwrap(), at(3, 2), "another size from here on");
        assert_eq!(device.alloc(20 * MIB).unwrap(), at(4, 8));
        device.free(at(3, 2)).unwrap();
        assert_eq!(device.alloc(4 * MIB).unwrap(), at(3, 2), "the lowest place");
    }

    #[test]
    fn places_that_contradict_the_ranges_are_taken_as_recorded() {
        let mut calls = with_host_memory();
        // Others hold the first 16 MiB of a range, and give some of them back; and one range grows.
        calls.extend([taken(10, 16, 2), taken(10, 2, 4), PlacementCall::Released { address: at(10, 2) }]);
        calls.extend([taken(10, 2, 4), taken(60, 28, 40)]);
        let mut device = device(&calls);
        for call in calls {
            match call {
                PlacementCall::Taken { address, bytes } => assert_eq!(device.alloc(bytes).unwrap(), address),
                PlacementCall::Released { address } => device.free(address).unwrap(),
            }
        }
        assert_eq!(device.alloc(8 * MIB).unwrap(), at(24, 20));
    }

    #[test]
    fn a_driver_that_goes_downwards_is_recognised() {
        let calls = [taken(9, 30, 2), taken(8, 22, 40), taken(8, 2, 20), taken(6, 4, 62)];
        let mut device = device(&calls);
        assert_eq!(device.alloc(2 * MIB).unwrap(), at(9, 30));
        assert_eq!(device.alloc(38 * MIB).unwrap(), at(8, 24));
        assert_eq!(device.alloc(20 * MIB).unwrap(), at(8, 4));
    }

    #[test]
    fn low_addresses_keep_their_order_and_distances() {
        let low = |address: u64| PlacementCall::Taken { address: Address(address * MIB), bytes: 20 * MIB };
        let mut device = device(&[low(64), low(0), low(32)]);
        let places: Vec<u64> = (0..3).map(|_| device.alloc(20 * MIB).unwrap().0).collect();
        assert_eq!((places[0] - places[1], places[2] - places[1]), (64 * MIB, 32 * MIB));
        assert!(places[1] >= LOWEST);
    }

    #[test]
    fn impossible_addresses_are_ignored() {
        let plain = SimDevice::new(SimConfig::default()).unwrap().alloc(20 * MIB).unwrap();
        for calls in [
            vec![],
            vec![PlacementCall::Released { address: at(1, 0) }],
            vec![PlacementCall::Taken { address: Address(BASE + 512), bytes: 20 * MIB }],
            vec![PlacementCall::Taken { address: at(1, 0), bytes: 0 }],
            vec![PlacementCall::Taken { address: Address(u64::MAX - 2 * MIB + 1), bytes: 20 * MIB }],
            vec![taken(1, 0, 20), PlacementCall::Taken { address: Address(0), bytes: 2 * MIB }],
        ] {
            assert_eq!(device(&calls).alloc(20 * MIB).unwrap(), plain, "{calls:?}");
        }
    }
}
