//! What is in memory: who wrote what where, byte by byte, and when.
//!
//! Contents belong to physical memory. They are seen through every address that it is mapped at, move with it when it is
//! mapped elsewhere, and are gone when it goes back to the device. Fills and comparisons happen when their stream gets to
//! them, so that one which is queued on a busy stream meets whatever the memory has become by then. A fill has begun to
//! write when it starts, and a comparison goes on reading until it ends: two that overlap in time meet in the worst way.
//!
//! A device whose contents nobody asks for keeps two empty tables and looks at neither.

use std::collections::BTreeMap;

use super::{SimDevice, address_space::LOWEST, compute, pools::PoolSpace, virtual_memory::VirtualSpace};
use crate::device::{
    CallKind, Damage, DeviceError, LONGEST_PATTERN_BYTES, Patterned, Patterns, PhysicalId, Verified, Written,
};
use oomph_base::{Address, Nanos, StreamId, Work};

/// Which memory: what was made for mapping, by its handle; all other by its only address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ground {
    Addressed,
    Physical(PhysicalId),
}

/// Bytes of one pattern that lie in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    end: u64,
    /// What its first byte is.
    first: Written,
}

impl Extent {
    /// The same bytes from a later place on.
    fn from(self, start: u64, later: u64) -> Extent {
        let first = Written { offset: self.first.offset + (later - start), ..self.first };
        Extent { first, ..self }
    }
}

/// Which of two things comes first that happen at the same moment: what ends then, or what starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Comparison,
    Fill,
}

/// What was written, and what is queued.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    /// By where they start.
    extents: BTreeMap<(Ground, u64), Extent>,
    /// By when they happen; the number keeps the order in which they were queued.
    queued: BTreeMap<(Nanos, Turn, u64), Vec<Patterned>>,
    last_queued: u64,
    verified: Verified,
}

/// A part of a block on one ground, or on none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    ground: Option<(Ground, u64)>,
    bytes: u64,
}

impl Contents {
    fn queue(&mut self, moment: Nanos, turn: Turn, blocks: &[Patterned]) {
        self.last_queued += 1;
        self.queued.insert((moment, turn, self.last_queued), blocks.to_vec());
    }

    /// Whether there is nothing to lose.
    pub(super) fn are_unknown(&self) -> bool {
        self.extents.is_empty() && self.queued.is_empty()
    }

    /// Lets everything happen that is due by `moment`.
    fn settle(&mut self, moment: Nanos, whereabouts: &Whereabouts<'_>) {
        while let Some(entry) = self.queued.first_entry()
            && entry.key().0 <= moment
        {
            let ((_, turn, _), blocks) = entry.remove_entry();
            for block in blocks {
                let damage = match turn {
                    Turn::Fill => self.fill(&block, whereabouts),
                    Turn::Comparison => self.compare(&block, whereabouts),
                };
                self.verified.damaged.extend(damage);
            }
        }
    }

    /// Writes a block's pattern; a part that lies nowhere is damage done.
    fn fill(&mut self, block: &Patterned, whereabouts: &Whereabouts<'_>) -> Option<Damage> {
        let mut damage = None;
        let mut offset = 0;
        for stretch in whereabouts.of(block) {
            match stretch.ground {
                Some((ground, start)) => {
                    self.forget(ground, start, stretch.bytes);
                    let first = Written { key: block.key, offset };
                    self.extents.insert((ground, start), Extent { end: start + stretch.bytes, first });
                }
                None => {
                    damage.get_or_insert(Damage { key: block.key, offset, found: None });
                }
            }
            offset += stretch.bytes;
        }
        damage
    }

    /// Looks a block over.
    fn compare(&mut self, block: &Patterned, whereabouts: &Whereabouts<'_>) -> Option<Damage> {
        self.verified.blocks += 1;
        self.verified.bytes += block.bytes;
        let mut offset = 0;
        for stretch in whereabouts.of(block) {
            let Some((ground, start)) = stretch.ground else {
                return Some(Damage { key: block.key, offset, found: None });
            };
            let expected = Written { key: block.key, offset };
            if let Some((wrong, found)) = self.first_wrong(ground, start, stretch.bytes, expected) {
                return Some(Damage { key: block.key, offset: offset + wrong, found });
            }
            offset += stretch.bytes;
        }
        None
    }

    /// The first byte of a stretch that is not the expected one, and which it is.
    fn first_wrong(&self, ground: Ground, start: u64, bytes: u64, expected: Written) -> Option<(u64, Option<Written>)> {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let before = self.extents.range(..=(ground, at)).next_back();
            let Some((&(_, from), extent)) = before.filter(|((on, _), extent)| *on == ground && extent.end > at) else {
                return Some((at - start, None));
            };
            let found = extent.from(from, at).first;
            if found != (Written { offset: expected.offset + (at - start), ..expected }) {
                return Some((at - start, Some(found)));
            }
            at = extent.end;
        }
        None
    }

    /// What was in a stretch is gone.
    pub(super) fn forget(&mut self, ground: Ground, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((&(on, from), &extent)) = self.extents.range(..(ground, start)).next_back()
            && on == ground
            && extent.end > start
        {
            self.extents.insert((ground, from), Extent { end: start, ..extent });
            if extent.end > end {
                self.extents.insert((ground, end), extent.from(from, end));
            }
        }
        while let Some((&(on, from), &extent)) = self.extents.range((ground, start)..(ground, end)).next() {
            self.extents.remove(&(on, from));
            if extent.end > end {
                self.extents.insert((ground, end), extent.from(from, end));
            }
        }
    }
}

/// What lies where at one moment.
struct Whereabouts<'a> {
    mapped: &'a VirtualSpace,
    pools: &'a PoolSpace,
}

impl Whereabouts<'_> {
    /// The stretches of a block, in order.
    fn of(&self, block: &Patterned) -> impl Iterator<Item = Stretch> {
        let (mut at, end) = (block.address.0, block.address.0.saturating_add(block.bytes));
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|&left| left > 0)?;
            let stretch = self.at(at);
            let stretch = Stretch { bytes: stretch.bytes.min(left), ..stretch };
            at += stretch.bytes;
            Some(stretch)
        })
    }

    /// What is at an address, and how far on it goes.
    fn at(&self, address: u64) -> Stretch {
        if let Some((physical, offset, bytes)) = self.mapped.physical_at(address) {
            return Stretch { ground: Some((Ground::Physical(physical), offset)), bytes };
        }
        if let Some(bytes) = self.pools.chunk_at(address) {
            return Stretch { ground: Some((Ground::Addressed, address)), bytes };
        }
        if address >= LOWEST {
            return Stretch { ground: Some((Ground::Addressed, address)), bytes: u64::MAX - address };
        }
        Stretch { ground: None, bytes: self.mapped.unmapped_bytes_at(address) }
    }
}

impl SimDevice {
    /// Lets every fill and comparison happen that is due by `moment`. What changes what lies where comes after this.
    pub(super) fn settle_contents(&mut self, moment: Nanos) {
        if !self.contents.queued.is_empty() {
            self.contents.settle(moment, &Whereabouts { mapped: &self.virtual_space, pools: &self.pools });
        }
    }

    /// What was at some addresses of memory that is never mapped elsewhere is gone.
    pub(super) fn forget_contents(&mut self, address: Address, bytes: u64) {
        if !self.contents.are_unknown() {
            self.contents.forget(Ground::Addressed, address.0, bytes);
        }
    }

    /// Queues one launch over many blocks.
    fn queue_contents(&mut self, stream: StreamId, turn: Turn, blocks: &[Patterned]) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let refusal = match self.clocks.stream_ready(stream) {
            Err(unknown) => Some(unknown.to_string()),
            Ok(_) => blocks.iter().find_map(refusal),
        };
        self.conclude_checked(call, 0, refusal.map_or(Ok(()), Err))?;
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        let time = compute::duration(&self.rates, &self.work, &Work::Elementwise { bytes });
        let busy_until = |device: &SimDevice| device.clocks.stream_ready(stream).unwrap_or_default();
        let starts = busy_until(self).max(self.clocks.now());
        let queued = self.clocks.run(stream, time);
        let moment = match turn {
            Turn::Fill => starts,
            Turn::Comparison => busy_until(self),
        };
        self.contents.queue(moment, turn, blocks);
        self.settle_contents(self.clocks.now());
        queued.map_err(|unknown| DeviceError::InvalidValue { call, reason: unknown.to_string() })
    }
}

/// Why a block cannot hold a pattern, if it cannot.
fn refusal(block: &Patterned) -> Option<String> {
    let &Patterned { address, bytes, .. } = block;
    let holds = address.0.is_multiple_of(16) && (1..=LONGEST_PATTERN_BYTES).contains(&bytes);
    (!holds).then(|| format!("{bytes} bytes at {address} cannot hold a pattern"))
}

impl Patterns for SimDevice {
    /// Whether the addresses mean anything shows when the stream gets there: only then is it known what they are.
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_contents(stream, Turn::Fill, blocks)
    }

    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_contents(stream, Turn::Comparison, blocks)
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

    const HOME: StreamId = StreamId(0);
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
    fn what_was_written_is_found_again_and_every_comparison_is_counted() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let blocks = [block(address, 1001, 1), block(address.offset(1008), MIB, 2)];
        device.fill_blocks(HOME, &blocks).unwrap();
        device.verify_blocks(HOME, &blocks).unwrap();
        assert_eq!(device.verified().unwrap().blocks, 0, "the stream has not got there");
        device.synchronize().unwrap();
        assert_eq!(device.verified().unwrap(), Verified { blocks: 2, bytes: MIB + 1001, damaged: vec![] });
        assert_eq!(device.verified().unwrap(), Verified::default(), "told once");
    }

    #[test]
    fn overlap_shows_at_its_first_byte_and_names_the_intruder() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (first, second) = (block(address, 4096, 1), block(address.offset(4080), 4096, 2));
        device.fill_blocks(HOME, &[first, second]).unwrap();
        device.verify_blocks(HOME, &[first, second]).unwrap();
        let found = Some(Written { key: 2, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 4080, found }]);
        // The other way round, what remains of the second is cut in two by a third.
        let third = block(address.offset(5008), 16, 3);
        device.fill_blocks(HOME, &[third]).unwrap();
        device.verify_blocks(HOME, &[block(address, 4080, 1), second, third]).unwrap();
        let found = Some(Written { key: 3, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 2, offset: 928, found }]);
        device.verify_blocks(HOME, &[block(address.offset(5024), 16, 2)]).unwrap();
        let rest = damaged(&mut device);
        assert_eq!(rest[0].found, Some(Written { key: 2, offset: 944 }), "the rest knows which part it is");
    }

    #[test]
    fn a_fill_on_a_busy_stream_lands_late() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (early, late) = (block(address, 512, 1), block(address, 512, 2));
        spin(&mut device, SIDE);
        device.fill_blocks(SIDE, &[late]).unwrap();
        device.fill_blocks(HOME, &[early]).unwrap();
        device.verify_blocks(HOME, &[early]).unwrap();
        device.stream_synchronize(HOME).unwrap();
        assert_eq!(device.verified().unwrap().damaged, [], "the other stream is not there yet");
        device.stream_synchronize(SIDE).unwrap();
        device.verify_blocks(HOME, &[early]).unwrap();
        assert_eq!(damaged(&mut device)[0].found, Some(Written { key: 2, offset: 0 }));
    }

    #[test]
    fn a_comparison_on_a_busy_stream_sees_what_came_in_between() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        let (old, new) = (block(address, 512, 1), block(address, 512, 2));
        device.fill_blocks(HOME, &[old]).unwrap();
        device.stream_synchronize(HOME).unwrap();
        spin(&mut device, SIDE);
        device.verify_blocks(SIDE, &[old]).unwrap();
        device.fill_blocks(HOME, &[new]).unwrap();
        assert_eq!(damaged(&mut device)[0].key, 1);

        // Behind an event there is no such thing.
        device.fill_blocks(HOME, &[old]).unwrap();
        device.stream_synchronize(HOME).unwrap();
        spin(&mut device, SIDE);
        device.verify_blocks(SIDE, &[old]).unwrap();
        let event = device.event_create().unwrap();
        device.event_record(event, SIDE).unwrap();
        device.stream_wait_event(HOME, event).unwrap();
        device.fill_blocks(HOME, &[new]).unwrap();
        assert_eq!(damaged(&mut device), []);
    }

    #[test]
    fn contents_move_with_physical_memory_and_show_at_every_address_of_it() {
        let mut device = device();
        let (first, second) = (device.reserve(4 * MIB).unwrap(), device.reserve(4 * MIB).unwrap());
        let pieces = [0, 1].map(|_| device.create(2 * MIB).unwrap());
        for (place, piece) in (0..).zip(pieces) {
            device.map(first.offset(place * 2 * MIB), 2 * MIB, piece).unwrap();
        }
        let across = block(first.offset(MIB), 2 * MIB, 1);
        device.fill_blocks(HOME, &[across]).unwrap();
        device.synchronize().unwrap();
        // The second piece is seen at another address as well, and a write there is a write here.
        device.map(second, 2 * MIB, pieces[1]).unwrap();
        device.verify_blocks(HOME, &[across]).unwrap();
        assert_eq!(damaged(&mut device), []);
        device.fill_blocks(HOME, &[block(second.offset(512), 512, 2)]).unwrap();
        device.verify_blocks(HOME, &[across]).unwrap();
        let found = Some(Written { key: 2, offset: 0 });
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: MIB + 512, found }]);

        // Mapped elsewhere, each piece brings its contents along.
        device.unmap(first, 4 * MIB).unwrap();
        device.map(second.offset(2 * MIB), 2 * MIB, pieces[0]).unwrap();
        device.verify_blocks(HOME, &[across]).unwrap();
        assert_eq!(damaged(&mut device)[0].found, None, "nothing is mapped there any more");
        device.verify_blocks(HOME, &[block(second.offset(3 * MIB), MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), []);
    }

    #[test]
    fn memory_that_was_given_back_has_lost_its_contents() {
        let mut device = device();
        let address = device.alloc(4 * MIB).unwrap();
        device.fill_blocks(HOME, &[block(address, 4 * MIB, 1)]).unwrap();
        device.free(address).unwrap();
        assert_eq!(device.alloc(4 * MIB).unwrap(), address);
        device.verify_blocks(HOME, &[block(address, 4 * MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }]);

        let range = device.reserve(2 * MIB).unwrap();
        let remapped = |device: &mut SimDevice, keep: bool| {
            let piece = device.create(2 * MIB).unwrap();
            device.map(range, 2 * MIB, piece).unwrap();
            device.fill_blocks(HOME, &[block(range, 512, 2)]).unwrap();
            device.synchronize().unwrap();
            device.unmap(range, 2 * MIB).unwrap();
            let piece = if keep {
                piece
            } else {
                device.release(piece).unwrap();
                device.create(2 * MIB).unwrap()
            };
            device.map(range, 2 * MIB, piece).unwrap();
            device.verify_blocks(HOME, &[block(range, 512, 2)]).unwrap();
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
    fn memory_of_a_pool_keeps_its_contents_until_its_chunk_goes_back() {
        let mut device = device();
        let pool = device.pool_create(None).unwrap();
        let settings = PoolSettings {
            release_threshold: u64::MAX,
            follow_event_dependencies: false,
            allow_opportunistic: false,
            allow_internal_dependencies: false,
        };
        device.pool_configure(pool, settings).unwrap();
        let address = device.alloc_async(pool, MIB, HOME).unwrap();
        device.fill_blocks(HOME, &[block(address, MIB, 1)]).unwrap();
        device.verify_blocks(HOME, &[block(address, MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), []);
        device.free_async(address, HOME).unwrap();
        device.synchronize().unwrap();
        device.pool_trim(pool, 0).unwrap();
        device.verify_blocks(HOME, &[block(address, MIB, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }]);
    }

    #[test]
    fn what_cannot_hold_a_pattern_is_refused() {
        let mut device = device();
        let address = device.alloc(MIB).unwrap();
        assert!(device.fill_blocks(HOME, &[block(address.offset(8), 512, 1)]).is_err());
        assert!(device.fill_blocks(HOME, &[block(address, 0, 1)]).is_err());
        assert!(device.fill_blocks(StreamId(9), &[block(address, 512, 1)]).is_err());
        device.fill_blocks(HOME, &[block(Address(4096), 512, 1)]).unwrap();
        assert_eq!(damaged(&mut device), [Damage { key: 1, offset: 0, found: None }], "a write into nothing");
    }
}
