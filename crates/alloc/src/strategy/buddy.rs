//! `buddy`: the binary buddy allocator.
//!
//! Blocks, regions and all pieces of regions are powers of two. A piece that is too large is halved
//! until it fits. A freed piece is joined with its buddy, the other half of the piece that both
//! were cut from, as long as the buddy is free and whole. The buddy's address is the piece's offset
//! in the region, exclusive-or its size, so the buddy is always a neighbour. Cutting and joining
//! take at most one step per power of two. The price is that a block is up to twice as large as the
//! request.
//!
//! Each stream has its own lists and regions. A request above the region size gets a region of its
//! own size, which is cut like any other later.

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{
        FreeLists, PerStream, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT, RegionTable,
        SizeClasses, TakenPiece,
    },
};
use crate::device::Device;
use oomph_base::StreamId;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "buddy",
    summary: "binary buddies: blocks are powers of two, halved and joined again",
    origin: "Knowlton: A fast storage allocator (1965); kernels, and GPU pools of many engines",
    differs: &["has lists and regions of its own for each stream; the original knows no streams"],
    parameters: &[Parameter::text(
        "region",
        "a power of two in bytes",
        "64MiB",
        "the least that is taken from the device: the highest order",
    )],
    variants: &["region:2MiB"],
    build,
};

/// The smallest block.
const QUANTUM: u64 = 512;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let region = parameters::read_amount(&ENTRY, parameters)?;
    if !region.is_power_of_two() || !(QUANTUM..REQUEST_LIMIT).contains(&region) {
        let reason = format!("'region': {region} bytes are not a power of two of at least {QUANTUM}");
        return Err(ENTRY.refused(reason));
    }
    Ok(Box::new(PoolStrategy::new(ENTRY.name, BuddyPolicy { region, free: PerStream::default() })))
}

/// Free pieces by order, one set per stream.
#[derive(Clone, Debug)]
struct BuddyPolicy {
    region: u64,
    free: PerStream<FreeLists<BuddyOrders>>,
}

/// One class per power of two.
#[derive(Clone, Debug)]
struct BuddyOrders;

impl SizeClasses for BuddyOrders {
    const COUNT: usize = (REQUEST_LIMIT.ilog2() - QUANTUM.ilog2()) as usize + 1;

    #[inline]
    fn class_of(size: u64) -> usize {
        (size.trailing_zeros() - QUANTUM.trailing_zeros()) as usize
    }
}

/// The buddy of a piece, if it is free and whole, and whether it is the upper half.
#[inline]
fn free_buddy(table: &RegionTable, slot: u32) -> Option<(u32, bool)> {
    let piece = &table[slot];
    let region = table.region(piece.region);
    if piece.size == region.bytes {
        return None;
    }
    let offset = piece.address - region.address;
    let upper = offset ^ piece.size > offset;
    let buddy = if upper { piece.next } else { piece.previous };
    table.free_piece(buddy).filter(|other| other.size == piece.size).map(|_| (buddy, upper))
}

impl PoolPolicy for BuddyPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < REQUEST_LIMIT).then(|| bytes.next_power_of_two().max(QUANTUM))
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, _: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let free = self.free.of(request.stream);
        let fits = free.first_from(BuddyOrders::class_of(request.size));
        let Some(slot) = fits.and_then(|order| free.head(order)) else { return Ok(None) };
        free.remove(table, slot);
        let mut size = table[slot].size;
        if size == request.size {
            return Ok(Some((slot, Outcome::Hit)));
        }
        while size > request.size {
            size /= 2;
            let upper_half = table.cut(slot, size);
            free.insert(table, upper_half);
        }
        Ok(Some((slot, Outcome::Split)))
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, mut slot: u32) {
        let free = self.free.of(table.owner(slot));
        while let Some((buddy, upper)) = free_buddy(table, slot) {
            free.remove(table, buddy);
            slot = if upper { slot } else { buddy };
            table.join_next(slot);
        }
        free.insert(table, slot);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        self.free.of(table.owner(slot)).remove(table, slot);
    }

    fn growth(&mut self, request: &PoolRequest, _: &Stats, attempt: u32) -> PoolGrowth {
        match attempt {
            0 => PoolGrowth::Ask(request.size.max(self.region)),
            1 if request.size < self.region => PoolGrowth::Ask(request.size),
            _ => PoolGrowth::End,
        }
    }

    fn largest_free(&self, _: &RegionTable, stream: StreamId) -> u64 {
        self.free.get(stream).and_then(FreeLists::last).map_or(0, |order| QUANTUM << order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{StrategySpec, pooled::PoolBench};
    use oomph_base::{GIB, KIB, MIB};

    #[test]
    fn a_region_is_halved_until_the_piece_fits() {
        let mut trial = PoolBench::new("buddy:region:1MiB", GIB);
        let places = [1, 100 * KIB, 513, 512, 512].map(|bytes| PoolBench::place(trial.alloc(bytes)));
        // Halves of 1 MiB, 512 KiB ... 1 KiB are left by the first; the others take the smallest
        // that serve.
        assert_eq!(places, [(0, 512), (128 * KIB, 128 * KIB), (KIB, KIB), (512, 512), (2 * KIB, 512)]);
        assert_eq!(trial.regions(), [MIB as i64]);
    }

    #[test]
    fn only_buddies_are_joined() {
        let mut trial = PoolBench::new("buddy:region:4KiB", GIB);
        let blocks = [0, 1, 2, 3].map(|_| trial.alloc(KIB));
        let largest = |trial: &PoolBench| trial.strategy.largest_free(StreamId::DEFAULT);
        // Second and third are neighbours, but halves of different halves.
        trial.free(blocks[1]);
        trial.free(blocks[2]);
        assert_eq!(largest(&trial), Some(KIB));
        trial.free(blocks[0]);
        assert_eq!(largest(&trial), Some(2 * KIB));
        trial.free(blocks[3]);
        assert_eq!(largest(&trial), Some(4 * KIB));
    }

    #[test]
    fn region_size_depends_on_request_and_device() {
        let mut trial = PoolBench::new("buddy:region:2MiB", 12 * MIB);
        assert_eq!(trial.alloc(5 * MIB).size, 8 * MIB);
        trial.alloc(MIB);
        trial.alloc(2 * MIB);
        assert_eq!(trial.regions(), [8, 2, 2].map(|mib| mib * MIB as i64));
        let mut poor = PoolBench::new("buddy", 12 * MIB);
        poor.alloc(MIB);
        assert_eq!(poor.regions(), [MIB as i64]);
    }

    #[test]
    fn a_region_that_is_no_power_of_two_is_refused() {
        assert!(StrategySpec::from("buddy:region:3MiB").check().is_err());
        assert!(StrategySpec::from("buddy:region:256").check().is_err());
    }
}
