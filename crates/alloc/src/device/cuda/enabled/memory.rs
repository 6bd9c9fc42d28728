//! The books of plain allocations: what is live, and on which pages it lies.

use std::collections::{BTreeMap, HashMap};

use oomph_base::Address;

/// Live `cuMemAlloc` allocations. The driver lets small ones share a page, so pages are counted by who lies on them.
#[derive(Debug)]
pub(super) struct PlainMemory {
    page_bytes: u64,
    live: BTreeMap<Address, u64>,
    /// How many allocations begin or end on a page. The pages between belong to one alone.
    tenants: HashMap<u64, u32>,
    pages: u64,
}

impl PlainMemory {
    pub(super) fn new(page_bytes: u64) -> PlainMemory {
        PlainMemory { page_bytes, live: BTreeMap::new(), tenants: HashMap::new(), pages: 0 }
    }

    /// Bytes of all pages on which something lies.
    pub(super) fn held(&self) -> u64 {
        self.pages * self.page_bytes
    }

    /// Whether an allocation starts here.
    pub(super) fn has(&self, address: Address) -> bool {
        self.live.contains_key(&address)
    }

    /// Whether all of a range lies in one allocation.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        covered(&self.live, address, bytes)
    }

    /// Where live allocations start.
    pub(super) fn addresses(&self) -> impl Iterator<Item = Address> + '_ {
        self.live.keys().copied()
    }

    pub(super) fn insert(&mut self, address: Address, bytes: u64) {
        self.live.insert(address, bytes);
        let (first, last) = self.edges(address, bytes);
        self.pages += (last - first).saturating_sub(1);
        for &page in &[first, last][..1 + usize::from(first != last)] {
            let tenants = self.tenants.entry(page).or_default();
            *tenants += 1;
            self.pages += u64::from(*tenants == 1);
        }
    }

    pub(super) fn remove(&mut self, address: Address) {
        let Some(bytes) = self.live.remove(&address) else { return };
        let (first, last) = self.edges(address, bytes);
        self.pages -= (last - first).saturating_sub(1);
        for &page in &[first, last][..1 + usize::from(first != last)] {
            if let Some(tenants) = self.tenants.get_mut(&page) {
                *tenants -= 1;
                if *tenants == 0 {
                    self.tenants.remove(&page);
                    self.pages -= 1;
                }
            }
        }
    }

    fn edges(&self, address: Address, bytes: u64) -> (u64, u64) {
        (address.0 / self.page_bytes, (address.0 + bytes.max(1) - 1) / self.page_bytes)
    }
}

/// Whether all of a range lies in one of the pieces, given by start and length.
pub(super) fn covered(pieces: &BTreeMap<Address, u64>, address: Address, bytes: u64) -> bool {
    let Some(end) = address.0.checked_add(bytes) else { return false };
    pieces.range(..=address).next_back().is_some_and(|(start, length)| end <= start.0 + length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::MIB;

    const PAGE: u64 = 2 * MIB;

    #[test]
    fn small_allocations_share_a_page_and_the_last_one_gives_it_back() {
        let mut memory = PlainMemory::new(PAGE);
        let [first, second] = [Address(100 * PAGE), Address(100 * PAGE + 512)];
        memory.insert(first, 512);
        memory.insert(second, 512);
        assert_eq!(memory.held(), PAGE);
        memory.remove(first);
        assert_eq!(memory.held(), PAGE);
        memory.remove(second);
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn large_allocations_hold_every_page_they_touch() {
        let mut memory = PlainMemory::new(PAGE);
        memory.insert(Address(8 * PAGE), 5 * MIB);
        assert_eq!(memory.held(), 3 * PAGE);
        memory.insert(Address(11 * PAGE - 512), 512);
        assert_eq!(memory.held(), 3 * PAGE, "the rest of the last page is used");
        memory.remove(Address(8 * PAGE));
        assert_eq!(memory.held(), PAGE);
    }

    #[test]
    fn only_whole_ranges_inside_one_allocation_are_covered() {
        let mut memory = PlainMemory::new(PAGE);
        memory.insert(Address(PAGE), 1024);
        assert!(memory.covers(Address(PAGE), 1024) && memory.covers(Address(PAGE + 512), 512));
        assert!(!memory.covers(Address(PAGE + 512), 1024));
        assert!(!memory.covers(Address(512), 8) && !memory.covers(Address(u64::MAX), 8));
    }
}
