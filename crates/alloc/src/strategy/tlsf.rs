//! `tlsf`: two-level segregated fit, the constant-time allocator of real-time systems.
//!
//! Free pieces are in lists by size class: a power of two, divided linearly into [`STEPS`] steps. A
//! request is looked up at the next class boundary, where every piece fits, and two levels of
//! bitmaps find the first list from there on in a few instructions. The pieces of the request's own
//! class are skipped, which costs at most one step in [`STEPS`], three percent. A piece is cut to
//! size and joined with its free neighbours at once. The original keeps a header in front of each
//! block; here headers are on the host.
//!
//! Each stream has its own lists and regions.

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{
        FreeLists, PerStream, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT, RegionTable,
        SizeClasses, TakenPiece,
    },
};
use crate::device::Device;
use oomph_base::{StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "tlsf",
    summary: "two-level segregated fit: good fit in constant time, headers on the host",
    origin: "Masmano, Ripoll, Crespo, Real: TLSF (2004); used by game engines and real-time systems",
    differs: &[
        "keeps headers on the host; the original keeps one in front of each block",
        "has lists and regions of its own for each stream; the original knows no streams",
    ],
    parameters: &[Parameter::text("region", "an amount of memory", "20MiB", "the least that is taken from the device")],
    variants: &["region:2MiB"],
    build,
};

/// Sizes are multiples of this.
const QUANTUM: u64 = 512;
/// Every power of two is divided into this many steps.
const STEPS: usize = 1 << STEP_BITS;
const STEP_BITS: u32 = 5;
/// Sizes below this have one class per [`QUANTUM`].
const LINEAR: u64 = QUANTUM << STEP_BITS;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let region = parameters::read_amount(&ENTRY, parameters)?;
    Ok(Box::new(PoolStrategy::new(ENTRY.name, TlsfPolicy { region, free: PerStream::default() })))
}

/// Free pieces by class, one set per stream.
#[derive(Clone, Debug)]
struct TlsfPolicy {
    region: u64,
    free: PerStream<FreeLists<TlsfClasses>>,
}

/// [`STEPS`] classes per power of two. Sizes below [`LINEAR`] have one class per [`QUANTUM`].
#[derive(Clone, Debug)]
struct TlsfClasses;

impl SizeClasses for TlsfClasses {
    const COUNT: usize = ((REQUEST_LIMIT.ilog2() - LINEAR.ilog2()) as usize + 1) * STEPS;

    #[inline]
    fn class_of(size: u64) -> usize {
        if size < LINEAR {
            return (size / QUANTUM) as usize;
        }
        let power = size.ilog2();
        let step = (size >> (power - STEP_BITS)) as usize & (STEPS - 1);
        ((power - LINEAR.ilog2()) as usize + 1) * STEPS + step
    }
}

/// The smallest size of a class.
fn class_floor(class: usize) -> u64 {
    match (class / STEPS, class % STEPS) {
        (0, step) => step as u64 * QUANTUM,
        (level, step) => ((STEPS + step) as u64 * QUANTUM) << (level - 1),
    }
}

/// The lowest class boundary at which every piece fits the request.
#[inline]
fn lookup_size(size: u64) -> u64 {
    if size < LINEAR { size } else { round_up(size, 1 << (size.ilog2() - STEP_BITS)) }
}

impl PoolPolicy for TlsfPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < REQUEST_LIMIT).then(|| round_up(bytes, QUANTUM))
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, _: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let free = self.free.of(request.stream);
        let fits = free.first_from(TlsfClasses::class_of(lookup_size(request.size)));
        let Some(slot) = fits.and_then(|class| free.head(class)) else { return Ok(None) };
        free.remove(table, slot);
        if table[slot].size == request.size {
            return Ok(Some((slot, Outcome::Hit)));
        }
        let rest = table.cut(slot, request.size);
        free.insert(table, rest);
        Ok(Some((slot, Outcome::Split)))
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        let free = self.free.of(table.owner(slot));
        let joined = table.join_free(slot, |_| true, |pieces, gone| free.remove(pieces, gone));
        free.insert(table, joined);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        self.free.of(table.owner(slot)).remove(table, slot);
    }

    fn growth(&mut self, request: &PoolRequest, _: &Stats, attempt: u32) -> PoolGrowth {
        // A class boundary, so that the same lookup finds the new piece.
        let least = lookup_size(request.size);
        match attempt {
            0 => PoolGrowth::Ask(least.max(self.region)),
            1 if least < self.region => PoolGrowth::Ask(least),
            _ => PoolGrowth::End,
        }
    }

    fn largest_free(&self, _: &RegionTable, stream: StreamId) -> u64 {
        self.free.get(stream).and_then(FreeLists::last).map_or(0, class_floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{KIB, MIB};

    #[test]
    fn classes_are_exact_below_and_one_step_wide_above() {
        let level = |level: usize, step: usize| level * STEPS + step;
        assert_eq!(TlsfClasses::class_of(512), 1);
        assert_eq!(TlsfClasses::class_of(LINEAR - 512), 31);
        assert_eq!(TlsfClasses::class_of(LINEAR), level(1, 0));
        assert_eq!(TlsfClasses::class_of(LINEAR + 511), level(1, 0));
        assert_eq!(TlsfClasses::class_of(2 * LINEAR - 512), level(1, 31));
        assert_eq!(TlsfClasses::class_of(2 * LINEAR), level(2, 0));
        assert_eq!(TlsfClasses::class_of(REQUEST_LIMIT - 1), TlsfClasses::COUNT - 1);
    }

    #[test]
    fn every_piece_of_the_lookup_class_fits() {
        for size in (1..4000).map(|n| n * QUANTUM).chain([MIB + 512, 100 * MIB + 512, REQUEST_LIMIT - 512]) {
            let floor = class_floor(TlsfClasses::class_of(lookup_size(size)));
            assert!(floor >= size, "{size}: the class begins at {floor}");
            assert!(floor - size <= size / STEPS as u64, "{size}: the class begins at {floor}");
        }
        assert_eq!(lookup_size(16 * KIB + 512), 16 * KIB + 512);
        assert_eq!(lookup_size(32 * KIB + 512), 33 * KIB);
    }
}
