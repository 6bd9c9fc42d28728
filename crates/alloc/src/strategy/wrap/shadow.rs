//! What [`CheckedStrategy`](super::CheckedStrategy) expects of a strategy, from requests, results,
//! events and device calls alone.

use std::collections::BTreeMap;

use super::checked::{ViolationLog, rules};
use crate::device::{
    Device, PhysicalId,
    wrap::{DriverAnswer, DriverCall, Interceptor},
};
use crate::strategy::{ALIGNMENT, Block, Freed, Stats, StrategyError, StrategyEvent, Usage};
use oomph_base::Address;

/// The counters and blocks that a strategy should have.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpectedState {
    /// Live blocks and blocks that wait for a stream, by address.
    pub(super) held: BTreeMap<Address, ExpectedBlock>,
    /// Without segments, and without peaks of reserved memory.
    pub(super) stats: Stats,
    /// Failures reported by events.
    ooms_reported: u64,
    /// Whether an event reported that memory was taken.
    takes_memory: bool,
    /// Whether the live blocks are unknown, after a close that failed half-way.
    pub(super) unknown: bool,
    pub(super) log: ViolationLog,
}

/// A block that is live, or freed and waiting for a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedBlock {
    pub(super) block: Block,
    pub(super) requested: u64,
    pub(super) pending: bool,
}

impl ExpectedState {
    /// The strategy is as new. The violations stay.
    pub(super) fn reset(&mut self) {
        *self = ExpectedState { log: std::mem::take(&mut self.log), ..ExpectedState::default() };
    }

    /// A block was handed out for a request of `requested` bytes.
    pub(super) fn served(&mut self, block: Block, requested: u64) {
        let Block { address, size, .. } = block;
        self.log.expect(requested > 0, rules::SIZE, || "a request for zero bytes was served".to_owned());
        self.log.expect(size >= requested, rules::SIZE, || {
            format!("{size} bytes at {address} for a request of {requested}")
        });
        self.log.expect(address != Address::NULL && address.0 % ALIGNMENT == 0, rules::ALIGNMENT, || {
            format!("a block at {address}, which is not a multiple of {ALIGNMENT}")
        });
        if let Some(other) = self.overlapping(address, size) {
            let state = if other.pending { "waits for a stream" } else { "is live" };
            self.log.add(
                rules::OVERLAP,
                format!(
                    "{size} bytes at {address} overlap {} bytes at {}, which {state}",
                    other.block.size, other.block.address
                ),
            );
        }
        self.held.insert(address, ExpectedBlock { block, requested, pending: false });
        self.stats.on_alloc(requested, size);
    }

    /// A live block was freed.
    pub(super) fn freed(&mut self, block: &Block, freed: Freed) {
        if let Some(held) = self.held.get_mut(&block.address) {
            self.stats.on_free(held.block.size);
            held.pending = true;
        }
        if freed == Freed::Now {
            self.reusable(block.address);
        }
    }

    /// Checks the answer to a call with a handle; `was_live` is the state before the call.
    pub(super) fn check_handle(&mut self, block: &Block, was_live: bool, error: Option<&StrategyError>) {
        if self.unknown {
            return;
        }
        let refused = matches!(error, Some(StrategyError::UnknownBlock { .. }));
        let address = block.address;
        self.log.expect(!(was_live && refused), rules::HANDLE, || format!("the live block at {address} was refused"));
        self.log.expect(was_live || refused, rules::HANDLE, || {
            format!("a stale or foreign handle for {address} was not refused")
        });
    }

    /// An event arrived.
    pub(super) fn on_event(&mut self, event: StrategyEvent) {
        let reserved = &mut self.stats.current.reserved;
        match event {
            StrategyEvent::SegmentAlloc { bytes, .. } | StrategyEvent::SegmentMap { bytes, .. } => {
                self.takes_memory = true;
                *reserved = reserved.saturating_add(bytes);
            }
            StrategyEvent::SegmentFree { bytes, .. } | StrategyEvent::SegmentUnmap { bytes, .. } => {
                *reserved = reserved.saturating_sub(bytes);
            }
            StrategyEvent::FreeCompleted { address, requested, .. } => {
                let known = self.held.get(&address).is_some_and(|held| held.pending && held.requested == requested);
                self.log.expect(known || self.unknown, rules::EVENTS, || {
                    format!("a free of {requested} bytes at {address} completed without a pending free")
                });
                if known {
                    self.reusable(address);
                }
            }
            StrategyEvent::OutOfMemory { .. } => self.ooms_reported += 1,
            StrategyEvent::Retry { .. } => {}
        }
    }

    /// Compares with the strategy's counters.
    pub(super) fn compare(&mut self, stats: &Stats, device_held: u64) {
        if self.unknown {
            return;
        }
        let Usage { requested, allocated, active, reserved } = stats.current;
        let mut agree = |name: &str, theirs: u64, ours: u64| {
            self.log.expect(theirs == ours, rules::BOOKS, || format!("{name} is {theirs}, should be {ours}"));
        };
        let expected = &self.stats;
        agree("requested", requested, expected.current.requested);
        agree("allocated", allocated, expected.current.allocated);
        agree("active", active, expected.current.active);
        agree("live_blocks", stats.live_blocks, expected.live_blocks);
        agree("allocs", stats.allocs, expected.allocs);
        agree("frees", stats.frees, expected.frees);
        agree("ooms", stats.ooms, expected.ooms);
        self.log.expect(self.ooms_reported == expected.ooms, rules::EVENTS, || {
            format!("{} failures were reported, {} happened", self.ooms_reported, expected.ooms)
        });
        self.log.expect(allocated <= active, rules::BOOKS, || {
            format!("live blocks have {allocated} bytes, but only {active} are counted as active")
        });
        self.log.expect(active <= reserved, rules::BOOKS, || {
            format!(
                "blocks in use have {active} bytes, but only {reserved} are reserved: memory was given back while blocks \
                 are in it, or two blocks share it"
            )
        });
        let peaks = [
            (stats.peak.requested, requested),
            (stats.peak.allocated, allocated),
            (stats.peak.active, active),
            (stats.peak.reserved, reserved),
            (stats.peak_segments, stats.segments),
        ];
        self.log.expect(peaks.iter().all(|(peak, now)| peak >= now), rules::BOOKS, || {
            let wrong = peaks.iter().find(|(peak, now)| peak < now).copied().unwrap_or_default();
            format!("a peak of {} is below the current value of {}", wrong.0, wrong.1)
        });
        // A strategy that neither reports nor counts a segment takes no memory (`null`).
        if self.takes_memory || stats.segments > 0 {
            self.log.expect(reserved == expected.current.reserved, rules::EVENTS, || {
                format!("reserved is {reserved}, events sum to {}", expected.current.reserved)
            });
            self.log.expect(reserved <= device_held, rules::BOOKS, || {
                format!("reserved is {reserved}, the device holds {device_held}")
            });
        }
    }

    /// Whether the handle belongs to a live block.
    pub(super) fn is_live(&self, block: &Block) -> bool {
        self.held.get(&block.address).is_some_and(|held| {
            !held.pending && held.block.slot == block.slot && held.block.generation == block.generation
        })
    }

    fn reusable(&mut self, address: Address) {
        if let Some(held) = self.held.remove(&address) {
            self.stats.on_reusable(held.requested, held.block.size);
        }
    }

    fn overlapping(&self, address: Address, size: u64) -> Option<ExpectedBlock> {
        let end = address.0.saturating_add(size);
        let (_, last) = self.held.range(..Address(end)).next_back()?;
        let last_end = last.block.address.0.saturating_add(last.block.size);
        (last_end > address.0).then_some(*last)
    }
}

/// Mappings, and the physical memory of each block.
///
/// Two addresses may map the same physical memory, so blocks with disjoint addresses can still
/// overlap. Mappings are learned from the device calls, not from the strategy. Memory that was
/// allocated whole has one address and is ignored.
#[derive(Clone, Debug, Default)]
pub(super) struct PhysicalBacking {
    mapped: BTreeMap<Address, (u64, PhysicalId)>,
    /// By physical memory and offset in it.
    held: BTreeMap<(PhysicalId, u64), HeldExtent>,
    /// The keys in `held` of each block.
    extents: BTreeMap<Address, Vec<(PhysicalId, u64)>>,
}

#[derive(Clone, Copy, Debug)]
struct HeldExtent {
    end: u64,
    block: Address,
}

impl PhysicalBacking {
    /// A block was handed out. Returns the address of another block that holds part of its physical
    /// memory.
    pub(super) fn occupy(&mut self, block: &Block) -> Option<Address> {
        let end = block.address.0.saturating_add(block.size);
        let from = self.mapped.range(..=block.address).next_back().map_or(block.address, |(&start, _)| start);
        let mut other = None;
        let mut extents = Vec::new();
        for (&Address(start), &(bytes, physical)) in self.mapped.range(from..Address(end)) {
            let (low, high) = (block.address.0.max(start), end.min(start + bytes));
            if low >= high {
                continue;
            }
            let (offset, end) = (low - start, high - start);
            let before = self.held.range(..(physical, end)).next_back();
            other = before
                .filter(|((of, _), held)| *of == physical && held.end > offset)
                .map(|(_, held)| held.block)
                .or(other);
            self.held.insert((physical, offset), HeldExtent { end, block: block.address });
            extents.push((physical, offset));
        }
        if !extents.is_empty() {
            self.extents.insert(block.address, extents);
        }
        other
    }

    /// A block was freed.
    pub(super) fn vacate(&mut self, block: Address) {
        for extent in self.extents.remove(&block).unwrap_or_default() {
            if self.held.get(&extent).is_some_and(|held| held.block == block) {
                self.held.remove(&extent);
            }
        }
    }

    /// All blocks were freed; mappings stay.
    pub(super) fn vacate_all(&mut self) {
        self.held.clear();
        self.extents.clear();
    }
}

impl Interceptor for &mut PhysicalBacking {
    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, _: &D) {
        match *call {
            DriverCall::Map { address, bytes, physical } if answer.is_ok() => {
                self.mapped.insert(address, (bytes, physical));
            }
            DriverCall::Unmap { address, bytes } if answer.is_ok() => {
                let end = address.offset(bytes);
                while let Some((&start, _)) = self.mapped.range(address..end).next() {
                    self.mapped.remove(&start);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::wrap::InterceptedDevice;
    use crate::strategy::test_device::simulated;
    use oomph_base::MIB;

    fn block(address: Address, size: u64) -> Block {
        Block { address, size, slot: 0, generation: 0 }
    }

    #[test]
    fn blocks_that_share_a_chunk_overlap() {
        let mut backing = PhysicalBacking::default();
        let mut sim = simulated(64 * MIB);
        let mut device = InterceptedDevice::new(&mut *sim, &mut backing);
        let memory = device.virtual_memory().unwrap();
        let chunks = [0, 1].map(|_| memory.create(2 * MIB).unwrap());
        let (first, second) = (memory.reserve(4 * MIB).unwrap(), memory.reserve(2 * MIB).unwrap());
        memory.map(first, 2 * MIB, chunks[0]).unwrap();
        memory.map(first.offset(2 * MIB), 2 * MIB, chunks[1]).unwrap();
        memory.map(second, 2 * MIB, chunks[1]).unwrap();

        let low = block(first.offset(MIB), 2 * MIB);
        assert_eq!(backing.occupy(&low), None);
        assert_eq!(backing.occupy(&block(second.offset(MIB), MIB)), None, "the other half of the chunk");
        backing.vacate(second.offset(MIB));
        assert_eq!(backing.occupy(&block(second.offset(MIB / 2), MIB)), Some(low.address));
        backing.vacate(second.offset(MIB / 2));
        backing.vacate(low.address);
        assert_eq!(backing.occupy(&block(second, 2 * MIB)), None);

        let mut device = InterceptedDevice::new(&mut *sim, &mut backing);
        device.virtual_memory().unwrap().unmap(first, 4 * MIB).unwrap();
        assert_eq!(backing.occupy(&block(first, 4 * MIB)), None, "nothing is mapped there");
    }
}
