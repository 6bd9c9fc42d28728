//! The contents of memory: which pattern was written where, byte by byte, and when.
//!
//! Contents belong to physical memory. They are seen at every address where it is mapped, move with
//! it when it is mapped elsewhere, and are lost when it is given back. Fills and comparisons happen
//! when their stream reaches them, so one that is queued on a busy stream sees what the memory has
//! become by then. A fill writes at its start and a comparison reads at its end: two that overlap
//! in time meet in the worst way.
//!
//! If no contents are requested, two tables stay empty and cost nothing.

use std::collections::BTreeMap;

use super::{SimDevice, pools::PoolSpace, virtual_memory::SimVirtualSpace};
use crate::device::{
    CallKind, Damage, DeviceError, LONGEST_PATTERN_BYTES, PatternPlace, Patterned, Patterns, PhysicalId, Verified,
};
use oomph_base::{Address, Nanos, StreamId, Work};
use oomph_driver::LOWEST;

/// A piece of physical memory: `cuMemCreate` memory by its handle, all other by its only address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PhysicalRegion {
    Addressed,
    Created(PhysicalId),
}

/// Consecutive bytes of one pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PatternExtent {
    end: u64,
    /// The place of its first byte in the pattern.
    first: PatternPlace,
}

impl PatternExtent {
    /// The part from a later address on.
    fn from(self, start: u64, later: u64) -> PatternExtent {
        let first = PatternPlace { offset: self.first.offset + (later - start), ..self.first };
        PatternExtent { first, ..self }
    }
}

/// What is done to contents. At the same time, what ends comes before what starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ContentsAction {
    Comparison,
    Fill,
}

/// PatternPlace and queued patterns.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    /// By their start.
    extents: BTreeMap<(PhysicalRegion, u64), PatternExtent>,
    /// By their time; the number keeps the order in which they were queued.
    queued: BTreeMap<(Nanos, ContentsAction, u64), Vec<Patterned>>,
    last_queued: u64,
    verified: Verified,
}

/// A part of a block in one region, or in none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionSpan {
    region: Option<(PhysicalRegion, u64)>,
    bytes: u64,
}

impl Contents {
    fn queue(&mut self, moment: Nanos, action: ContentsAction, blocks: &[Patterned]) {
        self.last_queued += 1;
        self.queued.insert((moment, action, self.last_queued), blocks.to_vec());
    }

    /// Whether there are no contents to lose.
    pub(super) fn are_unknown(&self) -> bool {
        self.extents.is_empty() && self.queued.is_empty()
    }

    /// Carries out everything that is due by `moment`.
    fn settle(&mut self, moment: Nanos, locations: &MemoryLocations<'_>) {
        while let Some(entry) = self.queued.first_entry()
            && entry.key().0 <= moment
        {
            let ((_, action, _), blocks) = entry.remove_entry();
            for block in blocks {
                let damage = match action {
                    ContentsAction::Fill => self.fill(&block, locations),
                    ContentsAction::Comparison => self.compare(&block, locations),
                };
                self.verified.damaged.extend(damage);
            }
        }
    }

    /// Writes a block's pattern; a part without memory counts as damage.
    fn fill(&mut self, block: &Patterned, locations: &MemoryLocations<'_>) -> Option<Damage> {
        let mut damage = None;
        let mut offset = 0;
        for span in locations.of(block) {
            match span.region {
                Some((region, start)) => {
                    self.forget(region, start, span.bytes);
                    let first = PatternPlace { key: block.key, offset };
                    self.extents.insert((region, start), PatternExtent { end: start + span.bytes, first });
                }
                None => {
                    damage.get_or_insert(Damage { key: block.key, offset, found: None });
                }
            }
            offset += span.bytes;
        }
        damage
    }

    /// Compares a block with its pattern.
    fn compare(&mut self, block: &Patterned, locations: &MemoryLocations<'_>) -> Option<Damage> {
        self.verified.blocks += 1;
        self.verified.bytes += block.bytes;
        let mut offset = 0;
        for span in locations.of(block) {
            let Some((region, start)) = span.region else {
                return Some(Damage { key: block.key, offset, found: None });
            };
            let expected = PatternPlace { key: block.key, offset };
            if let Some((wrong, found)) = self.first_wrong(region, start, span.bytes, expected) {
                return Some(Damage { key: block.key, offset: offset + wrong, found });
            }
            offset += span.bytes;
        }
        None
    }

    /// The first byte of a span that differs from the expected one, and what it is.
    fn first_wrong(
        &self,
        region: PhysicalRegion,
        start: u64,
        bytes: u64,
        expected: PatternPlace,
    ) -> Option<(u64, Option<PatternPlace>)> {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let before = self.extents.range(..=(region, at)).next_back();
            let Some((&(_, from), extent)) = before.filter(|((on, _), extent)| *on == region && extent.end > at) else {
                return Some((at - start, None));
            };
            let found = extent.from(from, at).first;
            if found != (PatternPlace { offset: expected.offset + (at - start), ..expected }) {
                return Some((at - start, Some(found)));
            }
            at = extent.end;
        }
        None
    }

    /// Forgets the contents of a span.
    pub(super) fn forget(&mut self, region: PhysicalRegion, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((&(on, from), &extent)) = self.extents.range(..(region, start)).next_back()
            && on == region
            && extent.end > start
        {
            self.extents.insert((region, from), PatternExtent { end: start, ..extent });
            if extent.end > end {
                self.extents.insert((region, end), extent.from(from, end));
            }
        }
        while let Some((&(on, from), &extent)) = self.extents.range((region, start)..(region, end)).next() {
            self.extents.remove(&(on, from));
            if extent.end > end {
                self.extents.insert((region, end), extent.from(from, end));
            }
        }
    }
}

/// Which memory is at which address, at one moment.
struct MemoryLocations<'a> {
    mapped: &'a SimVirtualSpace,
    pools: &'a PoolSpace,
}

impl MemoryLocations<'_> {
    /// The stretches of a block, in order.
    fn of(&self, block: &Patterned) -> impl Iterator<Item = RegionSpan> {
        let (mut at, end) = (block.address.0, block.address.0.saturating_add(block.bytes));
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|&left| left > 0)?;
            let span = self.at(at);
            let span = RegionSpan { bytes: span.bytes.min(left), ..span };
            at += span.bytes;
            Some(span)
        })
    }

    /// The region at an address, and how many bytes of it follow.
    fn at(&self, address: u64) -> RegionSpan {
        if let Some((physical, offset, bytes)) = self.mapped.table.physical_at(Address(address)) {
            return RegionSpan { region: Some((PhysicalRegion::Created(physical), offset)), bytes };
        }
        if let Some(bytes) = self.pools.chunk_at(address) {
            return RegionSpan { region: Some((PhysicalRegion::Addressed, address)), bytes };
        }
        if address >= LOWEST {
            return RegionSpan { region: Some((PhysicalRegion::Addressed, address)), bytes: u64::MAX - address };
        }
        RegionSpan { region: None, bytes: self.mapped.unmapped_bytes_at(address) }
    }
}

impl SimDevice {
    /// Carries out every fill and comparison that is due by `moment`. To be called before mappings
    /// change.
    pub(super) fn settle_contents(&mut self, moment: Nanos) {
        if !self.contents.queued.is_empty() {
            self.contents.settle(moment, &MemoryLocations { mapped: &self.virtual_space, pools: &self.pools });
        }
    }

    /// Forgets the contents at addresses of memory that is never mapped elsewhere.
    pub(super) fn forget_contents(&mut self, address: Address, bytes: u64) {
        if !self.contents.are_unknown() {
            self.contents.forget(PhysicalRegion::Addressed, address.0, bytes);
        }
    }

    /// Queues one launch over many blocks.
    fn queue_contents(
        &mut self,
        stream: StreamId,
        action: ContentsAction,
        blocks: &[Patterned],
    ) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let refusal = match self.clocks.stream_ready(stream) {
            Err(unknown) => Some(unknown.to_string()),
            Ok(_) => blocks.iter().find_map(refusal),
        };
        self.conclude_checked(call, 0, refusal.map_or(Ok(()), Err))?;
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        let time = self.profile.duration(&Work::Elementwise { bytes });
        let busy_until = |device: &SimDevice| device.clocks.stream_ready(stream).unwrap_or_default();
        let starts = busy_until(self).max(self.clocks.now());
        let queued = self.clocks.run(stream, time);
        let moment = match action {
            ContentsAction::Fill => starts,
            ContentsAction::Comparison => busy_until(self),
        };
        self.contents.queue(moment, action, blocks);
        self.settle_contents(self.clocks.now());
        queued.map_err(|unknown| DeviceError::InvalidValue { call, reason: unknown.to_string() })
    }
}

/// The reason why a block cannot hold a pattern.
fn refusal(block: &Patterned) -> Option<String> {
    let &Patterned { address, bytes, .. } = block;
    let holds = address.0.is_multiple_of(16) && (1..=LONGEST_PATTERN_BYTES).contains(&bytes);
    (!holds).then(|| format!("{bytes} bytes at {address} cannot hold a pattern"))
}

impl Patterns for SimDevice {
    /// The addresses are resolved when the stream reaches the fill: only then is it known what is
    /// mapped there.
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_contents(stream, ContentsAction::Fill, blocks)
    }

    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_contents(stream, ContentsAction::Comparison, blocks)
    }

    fn verified(&mut self) -> Result<Verified, DeviceError> {
        self.settle_contents(self.clocks.now());
        Ok(std::mem::take(&mut self.contents.verified))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        Compute, Device, PoolSettings, StreamOrderedPools, VirtualMemory,
        sim::{SimConfig, SimDevice},
    };
    use oomph_base::MIB;

    const MAIN: StreamId = StreamId(0);
    const SIDE: StreamId = StreamId(1);

    fn device() -> SimDevice {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        device.stream_create(0).unwrap();
        device
    }

    fn block(address: Address, bytes: u64, key: u32) -> Patterned {
        Patterned { address, bytes, key }
    }

    fn spin(device: &mut SimDevice, stream: StreamId) {
        device.launch(stream, &Work::Spin { nanos: Nanos(1_000_000) }, &[]).unwrap();
    }

    /// What is damaged once all streams are done.
    fn damaged(device: &mut SimDevice) -> Vec<Damage> {
        device.synchronize().unwrap();
        device.verified().unwrap().damaged
    }

    #[test]
    fn written_patterns_are_found_and_comparisons_counted() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let blocks = [block(address, 1001, 1), block(address.offset(1008), MIB, 2)];
        device.fill_blocks(MAIN, &blocks).unwrap();
        device.verify_blocks(MAIN, &blocks).unwrap();
        assert_eq!(device.verified().unwrap().blocks, 0, "the stream has not got there");
        device.synchronize().unwrap();
        assert_eq!(device.verified().unwrap(), Verified { blocks: 2, bytes: MIB + 1001, damaged: vec![] });
        assert_eq!(device.verified().unwrap(), Verified::default(), "told once");
    }

    #[test]
    fn overlap_is_found_at_its_first_byte() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (first, second) = (block(address, 4096, 1), block(address.offset(4080), 4096, 2));
        device.fill_blocks(MAIN, &[first, second]).unwrap();
        device.verify_blocks(MAIN, &[first, second]).unwrap();
        let found = Some(PatternPlace { key: 2, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 4080, found }]);
        // The other way round, what remains of the second is cut in two by a third.
        let third = block(address.offset(5008), 16, 3);
        device.fill_blocks(MAIN, &[third]).unwrap();
        device.verify_blocks(MAIN, &[block(address, 4080, 1), second, third]).unwrap();
        let found = Some(PatternPlace { key: 3, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 2, offset: 928, found }]);
        device.verify_blocks(MAIN, &[block(address.offset(5024), 16, 2)]).unwrap();
        let rest = damaged(&mut device);
        assert_eq!(rest[0].found, Some(PatternPlace { key: 2, offset: 944 }), "the rest knows which part it is");
    }

    #[test]
    fn a_fill_on_a_busy_stream_lands_late() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (early, late) = (block(address, 512, 1), block(address, 512, 2));
        spin(&mut device, SIDE);
        device.fill_blocks(SIDE, &[late]).unwrap();
        device.fill_blocks(MAIN, &[early]).unwrap();
        device.verify_blocks(MAIN, &[early]).unwrap();
        device.stream_synchronize(MAIN).unwrap();
        assert_eq!(device.verified().unwrap().damaged, [], "the other stream is not there yet");
        device.stream_synchronize(SIDE).unwrap();
        device.verify_blocks(MAIN, &[early]).unwrap();
        assert_eq!(damaged(&mut device)[0].found, Some(PatternPlace { key: 2, offset: 0 }));
    }

    #[test]
    fn a_comparison_on_a_busy_stream_sees_later_writes() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (old, new) = (block(address, 512, 1), block(address, 512, 2));
        device.fill_blocks(MAIN, &[old]).unwrap();
        device.stream_synchronize(MAIN).unwrap();
        spin(&mut device, SIDE);
        device.verify_blocks(SIDE, &[old]).unwrap();
        device.fill_blocks(MAIN, &[new]).unwrap();
        assert_eq!(damaged(&mut device)[0].key, 1);

        // An event orders the two.
        device.fill_blocks(MAIN, &[old]).unwrap();
        device.stream_synchronize(MAIN).unwrap();
        spin(&mut device, SIDE);
        device.verify_blocks(SIDE, &[old]).unwrap();
        let event = device.event_create().unwrap();
        device.event_record(event, SIDE).unwrap();
        device.stream_wait_event(MAIN, event).unwrap();
        device.fill_blocks(MAIN, &[new]).unwrap();
        assert_eq!(damaged(&mut device), []);
    }

    #[test]
    fn contents_move_with_physical_memory() {
        let mut device = device();
        let (first, second) = (device.reserve(4 * MIB).unwrap(), device.reserve(4 * MIB).unwrap());
        let pieces = [0, 1].map(|_| device.create(2 * MIB).unwrap());
        for (place, piece) in (0..).zip(pieces) {
            device.map(first.offset(place * 2 * MIB), 2 * MIB, piece).unwrap();
        }
        let across = block(first.offset(MIB), 2 * MIB, 1);
        device.fill_blocks(MAIN, &[across]).unwrap();
        device.synchronize().unwrap();
        // The second piece is seen at another address as well, and a write there is a write here.
        device.map(second, 2 * MIB, pieces[1]).unwrap();
        device.verify_blocks(MAIN, &[across]).unwrap();
        assert_eq!(damaged(&mut device), []);
        device.fill_blocks(MAIN, &[block(second.offset(512), 512, 2)]).unwrap();
        device.verify_blocks(MAIN, &[across]).unwrap();
        let found = Some(PatternPlace { key: 2, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: MIB + 512, found }]);

        // Mapped elsewhere, each piece brings its contents along.
        device.unmap(first, 4 * MIB).unwrap();
        device.map(second.offset(2 * MIB), 2 * MIB, pieces[0]).unwrap();
        device.verify_blocks(MAIN, &[across]).unwrap();
        assert_eq!(damaged(&mut device)[0].found, None, "nothing is mapped there any more");
        device.verify_blocks(MAIN, &[block(second.offset(3 * MIB), MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), []);
    }

    #[test]
    fn freed_memory_loses_its_contents() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        device.fill_blocks(MAIN, &[block(address, 4 * MIB, 1)]).unwrap();
        device.free(address).unwrap();
        assert_eq!(device.alloc(4 * MIB).unwrap(), address);
        device.verify_blocks(MAIN, &[block(address, 4 * MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }]);

        let range = device.reserve(2 * MIB).unwrap();
        let remapped = |device: &mut SimDevice, keep: bool| {
            let piece = device.create(2 * MIB).unwrap();
            device.map(range, 2 * MIB, piece).unwrap();
            device.fill_blocks(MAIN, &[block(range, 512, 2)]).unwrap();
            device.synchronize().unwrap();
            device.unmap(range, 2 * MIB).unwrap();
            let piece = if keep {
                piece
            } else {
                device.release(piece).unwrap();
                device.create(2 * MIB).unwrap()
            };
            device.map(range, 2 * MIB, piece).unwrap();
            device.verify_blocks(MAIN, &[block(range, 512, 2)]).unwrap();
            let found = damaged(device);
            device.unmap(range, 2 * MIB).unwrap();
            device.release(piece).unwrap();
            found
        };
        assert_eq!(remapped(&mut device, true), []);
        assert_eq!(remapped(&mut device, false), [Damage { key: 2, offset: 0, found: None }]);
        device.free(address).unwrap();
        assert!(device.contents.are_unknown(), "nothing is kept about memory that is gone: {:?}", device.contents);
    }

    #[test]
    fn pool_memory_keeps_its_contents_until_trimmed() {
        let mut device = device();
        let pool = device.pool_create(None).unwrap();
        let settings = PoolSettings {
            release_threshold: u64::MAX,
            follow_event_dependencies: false,
            allow_opportunistic: false,
            allow_internal_dependencies: false,
        };
        device.pool_configure(pool, settings).unwrap();
        let address = device.alloc_async(pool, MIB, MAIN).unwrap();
        device.fill_blocks(MAIN, &[block(address, MIB, 1)]).unwrap();
        device.verify_blocks(MAIN, &[block(address, MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), []);
        device.free_async(address, MAIN).unwrap();
        device.synchronize().unwrap();
        device.pool_trim(pool, 0).unwrap();
        device.verify_blocks(MAIN, &[block(address, MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }]);
    }

    #[test]
    fn blocks_that_cannot_hold_a_pattern_are_refused() {
        let mut device = device();
        let address = device.alloc(MIB).unwrap();
        assert!(device.fill_blocks(MAIN, &[block(address.offset(8), 512, 1)]).is_err());
        assert!(device.fill_blocks(MAIN, &[block(address, 0, 1)]).is_err());
        assert!(device.fill_blocks(StreamId(9), &[block(address, 512, 1)]).is_err());
        device.fill_blocks(MAIN, &[block(Address(4096), 512, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }], "a write into nothing");
    }
}
