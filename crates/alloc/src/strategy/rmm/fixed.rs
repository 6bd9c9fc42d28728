//! `fixed`: RMM's fixed-size resource: blocks of one size, and no request above it.
//!
//! Memory is taken from the device many blocks at a time; nothing is cut or joined afterwards. The
//! first such chunk belongs to the default stream, because RMM takes it before it knows any stream.
//! The part of a block that a request does not use is lost: it counts as allocated, not as
//! requested.

use std::collections::VecDeque;

use super::{
    EMPTY_CACHE, EMPTY_CACHE_PARAMETER, FIRST_REQUEST, LAZY_EVENTS, LAZY_EVENTS_PARAMETER, RECORD_STREAM, StreamLists,
    multiple_of_quantum,
};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Caller, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT, RegionTable, TakenPiece},
};
use oomph_base::{MIB, StreamId};

/// The registry's line.
pub(crate) const ENTRY: StrategyEntry = StrategyEntry {
    name: "fixed",
    summary: "RMM's fixed-size blocks: constant time, and nothing above the block size",
    origin: "RMM 26.10, fixed_size_memory_resource",
    differs: &[FIRST_REQUEST, RECORD_STREAM, EMPTY_QUEUES],
    parameters: &[
        Parameter::text("block", "an amount of memory", "1MiB", "the size of every block"),
        BLOCKS_PARAMETER,
        EMPTY_CACHE_PARAMETER,
        LAZY_EVENTS_PARAMETER,
    ],
    variants: &["block:48MiB,blocks:1", "block:256KiB,blocks:32,empty_cache:True,lazy_events:True"],
    build,
};

pub(super) const EMPTY_QUEUES: &str =
    "does not wait for streams whose queues of blocks are empty before it asks for more memory";

pub(super) const BLOCKS: &str = "blocks";
/// RMM's `blocks_to_preallocate`.
pub(super) const DEFAULT_BLOCKS: u64 = 128;

pub(super) const BLOCKS_PARAMETER: Parameter =
    Parameter::text(BLOCKS, "a number", "128", "how many blocks are taken from the device at a time");

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let (mut block, mut blocks, mut empty_cache, mut lazy_events) = (MIB, DEFAULT_BLOCKS, false, false);
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "block" => block = multiple_of_quantum(&setting)?,
            EMPTY_CACHE => empty_cache = setting.truth()?,
            LAZY_EVENTS => lazy_events = setting.truth()?,
            _ => blocks = setting.number()?,
        }
        Ok(())
    })?;
    let chunk = chunk_bytes(block, blocks).map_err(|reason| ENTRY.refused(reason))?;
    let policy = FixedPolicy { blocks: EqualBlocks::new(block, lazy_events), chunk, first: true, empty_cache };
    Ok(Box::new(PoolStrategy::new(ENTRY.name, policy)))
}

/// The size of a chunk of `blocks` blocks.
pub(super) fn chunk_bytes(block: u64, blocks: u64) -> Result<u64, String> {
    let bytes = block.checked_mul(blocks).filter(|&bytes| bytes > 0 && bytes < REQUEST_LIMIT);
    bytes.ok_or_else(|| format!("{blocks} blocks of {block} bytes cannot be taken at a time"))
}

/// Blocks of one size.
#[derive(Clone, Debug)]
struct FixedPolicy {
    blocks: EqualBlocks,
    /// The size of each device allocation.
    chunk: u64,
    /// Whether no chunk was taken yet.
    first: bool,
    empty_cache: bool,
}

impl PoolPolicy for FixedPolicy {
    const GOES_TO_FREEING_STREAM: bool = true;

    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes <= self.blocks.size).then_some(self.blocks.size)
    }

    fn begin(&mut self, _: &mut dyn Device) -> Result<(), DeviceError> {
        self.first = true;
        Ok(())
    }

    #[inline]
    fn take(&mut self, _: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        Ok(self.blocks.take(device, request.stream)?.map(|slot| (slot, Outcome::Hit)))
    }

    #[inline]
    fn before_free(
        &mut self,
        _: &RegionTable,
        device: &mut dyn Device,
        _: u32,
        caller: Caller,
    ) -> Result<(), DeviceError> {
        self.blocks.record_free(device, caller.stream)
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        self.blocks.keep(table, slot);
    }

    fn trims(&self) -> bool {
        self.empty_cache
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, request: &PoolRequest) {
        let first = std::mem::replace(&mut self.first, false);
        let stream = if first { StreamId::DEFAULT } else { request.stream };
        self.blocks.cut_into_blocks(table, slot, stream, 0, true);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        self.blocks.forget(table, slot);
    }

    fn growth(&mut self, _: &PoolRequest, _: &Stats, attempt: u32) -> PoolGrowth {
        if attempt == 0 { PoolGrowth::Ask(self.chunk) } else { PoolGrowth::End }
    }

    fn largest_free(&self, _: &RegionTable, _: StreamId) -> u64 {
        if self.blocks.is_empty() { 0 } else { self.blocks.size }
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.blocks.close(device)
    }
}

/// The free blocks of one size: a queue per stream, the oldest block first. The fixed-size resource
/// has one, the binning resource one per bin.
///
/// A request takes from its own stream's queue, else from the first other queue that has a block,
/// after a wait for that stream. RMM also waits for the streams of empty queues before it asks for
/// more memory. That is left out, because nothing is taken from them.
#[derive(Clone, Debug)]
pub(super) struct EqualBlocks {
    pub(super) size: u64,
    queues: StreamLists<VecDeque<u32>>,
}

impl EqualBlocks {
    pub(super) fn new(size: u64, lazy_events: bool) -> EqualBlocks {
        EqualBlocks { size, queues: StreamLists::new(lazy_events) }
    }

    /// Called before a stream frees a block.
    #[inline]
    pub(super) fn record_free(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        self.queues.record_free(device, stream)
    }

    /// Takes a block for a stream.
    #[inline]
    pub(super) fn take(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<Option<u32>, DeviceError> {
        match self.queues.get(stream).and_then(VecDeque::pop_front) {
            Some(slot) => Ok(Some(slot)),
            None => self.take_from_another(device, stream),
        }
    }

    #[cold]
    fn take_from_another(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<Option<u32>, DeviceError> {
        self.queues.get_or_make(stream);
        for owner in self.queues.others(stream) {
            if !self.queues.get_or_make(owner).is_empty() {
                self.queues.wait_for(device, stream, owner)?;
                return Ok(self.queues.get_or_make(owner).pop_front());
            }
        }
        Ok(None)
    }

    /// Cuts a piece into blocks that a stream may have without a wait. Other streams need not wait
    /// if the memory is new.
    pub(super) fn cut_into_blocks(
        &mut self,
        table: &mut RegionTable,
        slot: u32,
        stream: StreamId,
        note: u32,
        new: bool,
    ) {
        let queue = if new { self.queues.get_or_make(stream) } else { self.queues.used_by(stream) };
        let mut block = slot;
        loop {
            table[block].stream = stream;
            table[block].note = note;
            let rest = (table[block].size > self.size).then(|| table.cut(block, self.size));
            queue.push_back(block);
            match rest {
                Some(rest) => block = rest,
                None => break,
            }
        }
    }

    /// Keeps a block for the stream that freed it, which the piece names.
    #[inline]
    pub(super) fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        let stream = table[slot].stream;
        self.queues.freed_by(stream).push_back(slot);
    }

    /// Forgets a free block.
    pub(super) fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        let stream = table[slot].stream;
        self.queues.get_or_make(stream).retain(|&free| free != slot);
    }

    /// Whether no stream has a free block.
    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Gives the events back.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.queues.close(device)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::bench::RmmBench, *};
    use crate::device::CallKind;
    use crate::strategy::Refusal;
    use oomph_base::KIB;

    const FOUR: &str = "fixed:block:1KiB,blocks:4";

    #[test]
    fn chunks_grow_one_by_one_and_reuse_is_fifo() {
        let mut fixed = RmmBench::new(FOUR, MIB);
        assert_eq!([1, 512, 1000, 1024].map(|bytes| fixed.alloc(bytes, 0)), [0, 1, 2, 3].map(|n| n * KIB));
        assert_eq!(fixed.ask(1, 0), Ok((4 * KIB, Outcome::NewSegment)));
        assert_eq!(fixed.growth(), [4096, 4096]);
        fixed.free(2 * KIB, 0);
        fixed.free(0, 0);
        let next = [0; 5].map(|_| fixed.alloc(700, 0));
        assert_eq!(next, [5 * KIB, 6 * KIB, 7 * KIB, 2 * KIB, 0]);
        assert_eq!(fixed.ask(KIB + 1, 0), Err(Refusal::Size));
    }

    #[test]
    fn first_chunk_belongs_to_default_stream() {
        let mut fixed = RmmBench::new(FOUR, MIB);
        for block in 0..4 {
            assert_eq!(fixed.alloc(KIB, 1), block * KIB);
        }
        assert_eq!(fixed.alloc(KIB, 1), 4 * KIB);
        assert_eq!(fixed.calls(CallKind::StreamWaitEvent), 0);
        // Freed by stream 1: the default stream waits for it.
        fixed.free(0, 1);
        assert_eq!(fixed.alloc(KIB, 0), 5 * KIB);
        assert_eq!(fixed.calls(CallKind::StreamWaitEvent), 1);
    }

    #[test]
    fn a_refused_chunk_is_not_made_smaller() {
        let mut fixed = RmmBench::new(FOUR, 4 * KIB - 256);
        assert_eq!(fixed.ask(256, 0), Err(Refusal::Device));
    }
}
