//! `fixed`: RMM's fixed-size resource: blocks of one size, and no request above it.
//!
//! Memory is taken from the device many blocks at a time; nothing is cut or joined afterwards. The first such chunk is
//! the default stream's, as RMM takes it before any stream is known. What a request does not use of its block is lost,
//! which the books show as allocated beyond requested.

use super::{amount::multiple_of_quantum, equal_blocks::EqualBlocks};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Outcome, Parameter, Setup, SpecError, Stats, StrategyEntry, parameters,
    pooled::{Ground, Growth, Need, Policy, Pooled, Region},
};
use oomph_base::{MIB, StreamId};

/// The registry's line.
pub(in crate::strategy) const ENTRY: StrategyEntry = StrategyEntry {
    name: "fixed",
    summary: "RMM's fixed-size blocks: constant time, and nothing above the block size",
    origin: "RMM 26.10, fixed_size_memory_resource",
    parameters: &[
        Parameter { name: BLOCK, values: "an amount of memory", default: "1MiB", help: "the size of every block" },
        BLOCKS_PARAMETER,
    ],
    variants: &["block:48MiB,blocks:1", "block:256KiB,blocks:32"],
    build,
};

const BLOCK: &str = "block";
pub(super) const BLOCKS: &str = "blocks";
/// RMM's `blocks_to_preallocate`.
pub(super) const DEFAULT_BLOCKS: u64 = 128;

pub(super) const BLOCKS_PARAMETER: Parameter = Parameter {
    name: BLOCKS,
    values: "a number",
    default: "128",
    help: "how many blocks are taken from the device at a time",
};

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let (mut block, mut blocks) = (MIB, DEFAULT_BLOCKS);
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            BLOCK => block = multiple_of_quantum(&setting)?,
            _ => blocks = setting.number()?,
        }
        Ok(())
    })?;
    let chunk =
        chunk_bytes(block, blocks).map_err(|reason| SpecError::BadParameters { strategy: ENTRY.name, reason })?;
    Ok(Box::new(Pooled::new(Fixed::new(block, chunk))))
}

/// How much memory so many blocks are.
pub(super) fn chunk_bytes(block: u64, blocks: u64) -> Result<u64, String> {
    let bytes = block.checked_mul(blocks).filter(|&bytes| bytes > 0 && bytes < super::ABSURD);
    bytes.ok_or_else(|| format!("{blocks} blocks of {block} bytes cannot be taken at a time"))
}

/// Blocks of one size.
#[derive(Clone, Debug)]
struct Fixed {
    blocks: EqualBlocks,
    /// What is taken from the device at a time.
    chunk: u64,
    /// Whether nothing is held yet.
    first: bool,
}

impl Fixed {
    fn new(block: u64, chunk: u64) -> Fixed {
        Fixed { blocks: EqualBlocks::new(block), chunk, first: true }
    }
}

impl Policy for Fixed {
    const GOES_TO_ITS_FREER: bool = true;

    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes <= self.blocks.size).then_some(self.blocks.size)
    }

    fn begin(&mut self, _: &mut dyn Device) -> Result<(), DeviceError> {
        self.first = true;
        Ok(())
    }

    #[inline]
    fn take(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        Ok(self.blocks.take(ground, device, need.stream)?.map(|slot| (slot, Outcome::Hit)))
    }

    #[inline]
    fn keep(&mut self, ground: &mut Ground, slot: u32) {
        self.blocks.keep(ground, slot);
    }

    fn welcome(&mut self, ground: &mut Ground, slot: u32, need: &Need) {
        let first = std::mem::replace(&mut self.first, false);
        let stream = if first { StreamId::DEFAULT } else { need.stream };
        self.blocks.adopt(ground, slot, stream, 0, true);
    }

    fn forget(&mut self, ground: &mut Ground, slot: u32) {
        self.blocks.forget(ground, slot);
    }

    fn growth(&mut self, _: &Need, _: &Stats, attempt: u32) -> Growth {
        if attempt == 0 { Growth::Ask(self.chunk) } else { Growth::End }
    }

    fn largest_free(&self, _: &Ground, _: StreamId) -> u64 {
        if self.blocks.is_empty() { 0 } else { self.blocks.size }
    }

    fn pool_name(&self, _: &Region) -> &'static str {
        "fixed"
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.blocks.close(device)
    }

    fn renewed(&self) -> Fixed {
        Fixed::new(self.blocks.size, self.chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::worked::Worked, *};
    use crate::device::CallKind;
    use crate::strategy::Refusal;
    use oomph_base::KIB;

    const FOUR: &str = "fixed:block:1KiB,blocks:4";

    #[test]
    fn a_chunk_at_a_time_is_taken_and_the_longest_free_block_serves() {
        let mut fixed = Worked::new(FOUR, MIB);
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
    fn the_first_chunk_is_the_default_streams_and_the_next_the_askers() {
        let mut fixed = Worked::new(FOUR, MIB);
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
        let mut fixed = Worked::new(FOUR, 4 * KIB - 256);
        assert_eq!(fixed.ask(256, 0), Err(Refusal::Device));
    }
}
