//! Patterns of sizes and lifetimes: random, power laws, repeated rounds, a saw-tooth, a checkerboard.
//!
//! Nothing is live at the end of any of them.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{alloc, items_of_part, mark_part, open_streams};
use crate::{GeneratorEntry, Parameter, PowerLaw, SeededRandom, generator::in_parts};
use oomph_base::{Bytes, GIB, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

/// RMM's random-allocations benchmark.
///
/// With `n` allocations there are `2n` steps. Each draws a size. It allocates with a chance of 73 % if fewer than `n`
/// allocations were made and the live bytes stay below the limit; otherwise it frees a random live block. Without a live
/// block it always allocates. So there are exactly `n` allocations and `n` frees. RMM turns a failed allocation into a
/// free; here the replay decides what a failure does.
pub(crate) const RANDOM: GeneratorEntry = GeneratorEntry {
    name: "random",
    summary: "random sizes allocated and freed in random order (RMM's benchmark)",
    seeded: true,
    parameters: &[
        Parameter::count("allocations", 1..=1_000_000_000, "10000", "blocks that are allocated"),
        Parameter::size("max_bytes", 1..=1024 * GIB, "64MiB", "sizes are even from 1 byte to this"),
        Parameter::size("live_limit", 1..=1024 * GIB, "16000MiB", "no allocation that would bring the live bytes here"),
    ],
    build: |parameters| {
        /// RMM's constant.
        const CHANCE_TO_ALLOCATE: f64 = 0.73;
        /// RMM has no steps; these are for timelines.
        const STEPS_PER_MARK: u64 = 1000;
        let (allocations, max_bytes) = (u64::from(parameters.count("allocations")?), parameters.size("max_bytes")?);
        let live_limit = parameters.size("live_limit")?;
        if max_bytes >= live_limit {
            return Err(parameters.refuse(format!(
                "max_bytes ({}) must be below live_limit ({})",
                Bytes(max_bytes),
                Bytes(live_limit)
            )));
        }
        let steps = 2 * allocations;
        Ok(in_parts(steps.div_ceil(STEPS_PER_MARK), move |mut random| {
            let (mut live, mut allocated) = (RandomLiveSet::default(), 0);
            move |part, trace: &mut TraceBuilder| {
                mark_part(trace, part, "random", "steps");
                for _ in items_of_part(part, STEPS_PER_MARK, steps) {
                    let bytes = random.between(1, max_bytes);
                    let allocates = live.blocks.is_empty()
                        || (random.chance(CHANCE_TO_ALLOCATE)
                            && allocated < allocations
                            && live.bytes + bytes < live_limit);
                    if allocates {
                        live.insert(alloc(trace, bytes), bytes);
                        allocated += 1;
                    } else {
                        live.free_random(&mut random, trace);
                    }
                }
            }
        }))
    },
    count_weights: None,
};

/// Most blocks are small and short-lived, a few are huge, a few stay. Lifetimes are counted in allocations.
///
/// The few long-lived blocks are scattered among the others, so a caching strategy can hardly ever return a segment.
pub(crate) const POWER_LAW: GeneratorEntry = GeneratorEntry {
    name: "power_law",
    summary: "many small, short-lived blocks, a few huge ones, a few that stay",
    seeded: true,
    parameters: &[
        Parameter::count("allocations", 1..=1_000_000_000, "10000", "blocks that are allocated"),
        Parameter::size("min_bytes", 1..=64 * GIB, "256KiB", "smallest size"),
        Parameter::size("max_bytes", 1..=64 * GIB, "1GiB", "largest size"),
        Parameter::number("size_exponent", 0.1..=8.0, "0.9", "tail exponent of sizes; smaller is heavier"),
        Parameter::count("min_lifetime", 1..=1_000_000, "16", "shortest lifetime, in allocations"),
        Parameter::count("max_lifetime", 1..=100_000_000, "8192", "longest lifetime, in allocations"),
        Parameter::number("lifetime_exponent", 0.1..=8.0, "0.8", "tail exponent of lifetimes; smaller is heavier"),
    ],
    build: |parameters| {
        const ALLOCATIONS_PER_MARK: u64 = 500;
        let allocations = u64::from(parameters.count("allocations")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (min_lifetime, max_lifetime) = parameters.count_range("min_lifetime", "max_lifetime")?;
        let sizes = PowerLaw::new(min_bytes, max_bytes, parameters.number("size_exponent")?);
        let exponent = parameters.number("lifetime_exponent")?;
        let lifetimes = PowerLaw::new(min_lifetime.into(), max_lifetime.into(), exponent);
        let parts = allocations.div_ceil(ALLOCATIONS_PER_MARK);
        Ok(in_parts(parts + 1, move |mut random| {
            let mut frees = DueFrees::default();
            move |part, trace: &mut TraceBuilder| {
                if u64::from(part) < parts {
                    mark_part(trace, part, "churn", "allocations");
                } else if !frees.0.is_empty() {
                    trace.mark(MarkKind::Phase, "drain", 0);
                    frees.until(u64::MAX, trace);
                }
                for now in items_of_part(part, ALLOCATIONS_PER_MARK, allocations) {
                    frees.until(now, trace);
                    let bytes = sizes.draw(&mut random);
                    let due = now + lifetimes.draw(&mut random);
                    frees.0.push(Reverse((due, alloc(trace, bytes))));
                }
            }
        }))
    },
    count_weights: None,
};

/// The same random requests in every round, with nothing live in between: a query that a data engine runs again.
///
/// Sizes follow a power law, in whole units. Before a block that would exceed the limit, random live blocks are freed
/// until it fits. At the end of a round all blocks are freed in random order. A strategy that served the first round can
/// serve every other one, unless memory that it cached earlier is in the way.
pub(crate) const ROUNDS: GeneratorEntry = GeneratorEntry {
    name: "rounds",
    summary: "the same random requests again and again, everything freed in between",
    seeded: true,
    parameters: &[
        Parameter::count("rounds", 1..=10_000_000, "3", "repetitions"),
        Parameter::count("allocations", 1..=10_000_000, "1000", "blocks per round"),
        Parameter::size("unit", 1..=GIB, "1MiB", "sizes are multiples of this"),
        Parameter::count("min_units", 1..=1 << 20, "1", "smallest block, in units"),
        Parameter::count("max_units", 1..=1 << 20, "256", "largest block, in units"),
        Parameter::number("size_exponent", 0.01..=8.0, "0.8", "tail exponent of sizes; smaller is heavier"),
        Parameter::size("live_limit", 1..=1024 * GIB, "16GiB", "most live bytes"),
        Parameter::number("churn", 0.0..=1.0, "0.3", "chance that a block is freed before the next allocation"),
        Parameter::count("streams", 1..=64, "1", "streams that blocks belong to, at random"),
    ],
    build: |parameters| {
        /// Blocks allocated at a time.
        const PART: u64 = 1024;
        let (min_units, max_units) = parameters.count_range("min_units", "max_units")?;
        let (unit, live_limit) = (parameters.size("unit")?, parameters.size("live_limit")?);
        let largest = unit * u64::from(max_units);
        if largest > live_limit {
            return Err(parameters.refuse(format!(
                "the largest block ({}) must not exceed live_limit ({})",
                Bytes(largest),
                Bytes(live_limit)
            )));
        }
        let sizes = PowerLaw::new(min_units.into(), max_units.into(), parameters.number("size_exponent")?);
        let (rounds, allocations) = (parameters.count("rounds")?, u64::from(parameters.count("allocations")?));
        let (churn, stream_count) = (parameters.number("churn")?, parameters.count("streams")? as usize);
        let parts_per_round = allocations.div_ceil(PART) as u32;
        Ok(in_parts(u64::from(rounds) * u64::from(parts_per_round), move |first_random| {
            let (mut random, mut streams, mut live) = (first_random.clone(), Vec::new(), RandomLiveSet::default());
            move |part, trace: &mut TraceBuilder| {
                let (round, part) = (part / parts_per_round, part % parts_per_round);
                open_streams(&mut streams, stream_count, trace);
                if part == 0 {
                    // Every round draws the same random numbers.
                    random = first_random.clone();
                    trace.mark(MarkKind::Step, "round", round);
                    trace.mark(MarkKind::Phase, "requests", round);
                }
                for _ in items_of_part(part, PART, allocations) {
                    if !live.blocks.is_empty() && random.chance(churn) {
                        live.free_random(&mut random, trace);
                    }
                    let bytes = unit * sizes.draw(&mut random);
                    while live.bytes + bytes > live_limit {
                        live.free_random(&mut random, trace);
                    }
                    let stream = streams[random.index(streams.len())];
                    live.insert(trace.alloc(bytes, stream, TagId(0)), bytes);
                }
                if part + 1 == parts_per_round {
                    trace.mark(MarkKind::Phase, "clear", round);
                    while !live.blocks.is_empty() {
                        live.free_random(&mut random, trace);
                    }
                }
            }
        }))
    },
    count_weights: None,
};

/// Memory ramps up in growing blocks, drops, and ramps up again.
///
/// Sizes vary a little from tooth to tooth, so that freed blocks almost fit and never quite. A few blocks outlive the
/// drop by one tooth and keep the memory around them from being returned.
pub(crate) const SAWTOOTH: GeneratorEntry = GeneratorEntry {
    name: "sawtooth",
    summary: "ramps up in growing blocks, drops, and starts again with slightly different sizes",
    seeded: true,
    parameters: &[
        Parameter::count("teeth", 1..=10_000_000, "20", "ramps, each followed by a drop"),
        Parameter::count("blocks", 1..=100_000, "256", "blocks per ramp"),
        Parameter::size("min_bytes", 1..=64 * GIB, "1MiB", "size of the first block of a ramp"),
        Parameter::size("max_bytes", 1..=64 * GIB, "32MiB", "size of the last block of a ramp"),
        Parameter::number("jitter", 0.0..=0.9, "0.1", "largest deviation of a size, as a part of the size"),
        Parameter::number("kept", 0.0..=0.9, "0.05", "chance of a block to outlive the drop by one tooth"),
    ],
    build: |parameters| {
        let (teeth, blocks) = (parameters.count("teeth")?, parameters.count("blocks")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (jitter, kept) = (parameters.number("jitter")?, parameters.number("kept")?);
        Ok(in_parts(teeth.into(), move |mut random| {
            let mut survivors = Vec::new();
            move |tooth, trace: &mut TraceBuilder| {
                trace.mark(MarkKind::Step, "tooth", tooth);
                trace.mark(MarkKind::Phase, "ramp", tooth);
                let allocate = |place: u32| {
                    let climbed = f64::from(place) / f64::from((blocks - 1).max(1));
                    let bytes = min_bytes as f64 + (max_bytes - min_bytes) as f64 * climbed;
                    let deviation = (bytes * jitter) as u64;
                    alloc(trace, random.between((bytes as u64 - deviation).max(1), bytes as u64 + deviation))
                };
                let ramp: Vec<BlockSlot> = (0..blocks).map(allocate).collect();
                trace.mark(MarkKind::Phase, "drop", tooth);
                survivors.drain(..).for_each(|slot| trace.free(slot));
                for slot in ramp {
                    if tooth + 1 < teeth && random.chance(kept) {
                        survivors.push(slot);
                    } else {
                        trace.free(slot);
                    }
                }
            }
        }))
    },
    count_weights: None,
};

/// Fills memory, frees every second block, allocates blocks of twice the size.
///
/// Every hole is half as large as the next request, so a strategy that cannot move or stitch memory must take new memory
/// although half of what it holds is free. With several doublings the survivors of every size stay, as in the known
/// lower bounds for such strategies. A round ends by freeing everything.
pub(crate) const CHECKERBOARD: GeneratorEntry = GeneratorEntry {
    name: "checkerboard",
    summary: "fills memory, frees every second block, allocates blocks twice as large",
    seeded: false,
    parameters: &[
        Parameter::count("rounds", 1..=1_000_000, "4", "repetitions"),
        Parameter::count("blocks", 4..=1_000_000, "1024", "blocks that fill the memory at first"),
        Parameter::size("block_bytes", 1..=64 * GIB, "4MiB", "size of the first blocks"),
        Parameter::count("doublings", 1..=9, "1", "doublings of the size within a round"),
    ],
    build: |parameters| {
        let (rounds, blocks) = (parameters.count("rounds")?, parameters.count("blocks")?);
        let (block_bytes, doublings) = (parameters.size("block_bytes")?, parameters.count("doublings")?);
        // Every doubling allocates a quarter as many blocks, in half the bytes.
        let needed = 1 << (2 * doublings);
        if blocks < needed {
            let reason = format!("{blocks} blocks are too few for {doublings} doublings, which need {needed}");
            return Err(parameters.refuse(reason));
        }
        let fill = move |trace: &mut TraceBuilder, doubling: u32| -> Vec<BlockSlot> {
            (0..blocks >> (2 * doubling)).map(|_| alloc(trace, block_bytes << doubling)).collect()
        };
        Ok(in_parts(rounds.into(), move |_| {
            move |round, trace: &mut TraceBuilder| {
                trace.mark(MarkKind::Step, "round", round);
                trace.mark(MarkKind::Phase, "fill", round);
                let mut survivors = Vec::new();
                let mut newest = fill(trace, 0);
                for doubling in 1..=doublings {
                    trace.mark(MarkKind::Phase, "punch", doubling);
                    for pair in newest.chunks(2) {
                        trace.free(pair[0]);
                        survivors.extend(pair.get(1));
                    }
                    trace.mark(MarkKind::Phase, "double", doubling);
                    newest = fill(trace, doubling);
                }
                trace.mark(MarkKind::Phase, "clear", round);
                survivors.into_iter().chain(newest).for_each(|slot| trace.free(slot));
            }
        }))
    },
    count_weights: None,
};

/// Live blocks, from which a random one can be freed.
#[derive(Default)]
struct RandomLiveSet {
    blocks: Vec<(BlockSlot, u64)>,
    bytes: u64,
}

impl RandomLiveSet {
    fn insert(&mut self, block: BlockSlot, bytes: u64) {
        self.blocks.push((block, bytes));
        self.bytes += bytes;
    }

    fn free_random(&mut self, random: &mut SeededRandom, trace: &mut TraceBuilder) {
        let (block, bytes) = self.blocks.swap_remove(random.index(self.blocks.len()));
        trace.free(block);
        self.bytes -= bytes;
    }
}

/// When each live block is freed, the next one on top.
#[derive(Default)]
struct DueFrees(BinaryHeap<Reverse<(u64, BlockSlot)>>);

impl DueFrees {
    fn until(&mut self, time: u64, trace: &mut TraceBuilder) {
        while let Some(&Reverse((due, slot))) = self.0.peek()
            && due <= time
        {
            self.0.pop();
            trace.free(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{MarkKind, Op, OpKind, Trace, check};

    #[test]
    fn rmm_benchmark_frees_all_and_keeps_its_limit() {
        let recipe = Recipe::named("random").unwrap();
        let recipe = recipe.with("allocations", "3000").with("max_bytes", "1MiB").with("live_limit", "100MiB");
        let summary = check(&recipe.workload().unwrap()).unwrap();
        assert_eq!((summary.count(OpKind::Alloc), summary.count(OpKind::Free)), (3000, 3000));
        assert_eq!(summary.live_bytes, 0);
        let peak = summary.peak.bytes;
        assert!((90 << 20..100 << 20).contains(&peak), "the limit is approached and kept: {peak}");
    }

    #[test]
    fn every_round_makes_the_same_requests() {
        let recipe = Recipe::named("museum-rmm-1969").unwrap().with("allocations", "1500").with("rounds", "3");
        let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
        let mut rounds: Vec<Vec<u64>> = Vec::new();
        for event in &trace.events {
            match event.op {
                Op::Mark { kind: MarkKind::Step, .. } => rounds.push(Vec::new()),
                Op::Alloc { bytes, .. } => rounds.last_mut().unwrap().push(bytes),
                _ => {}
            }
        }
        assert_eq!(rounds.len(), 3);
        assert_eq!(rounds[0].len(), 1500);
        assert!(rounds.iter().all(|round| *round == rounds[0]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn rounds_keep_their_limit_and_free_all(
            (rounds, allocations, streams) in (1..4_u32, 1..300_u32, 1..5_u32),
            (min_units, more_units, limit_units) in (1..10_u32, 0..50_u32, 0..200_u32),
            (churn, seed) in (0.0..1.0_f64, any::<u64>()),
        ) {
            let max_units = min_units + more_units;
            let limit = u64::from(max_units + limit_units) * 4096;
            let settings = [
                ("rounds", rounds.to_string()), ("allocations", allocations.to_string()), ("unit", "4096".to_owned()),
                ("min_units", min_units.to_string()), ("max_units", max_units.to_string()),
                ("live_limit", limit.to_string()), ("churn", churn.to_string()), ("streams", streams.to_string()),
            ];
            let recipe = Recipe::named("museum-rmm-2039").unwrap().seed(seed);
            let recipe = settings.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
            let summary = check(&recipe.workload().unwrap()).unwrap();
            prop_assert_eq!(summary.live_blocks, 0);
            prop_assert!(summary.peak.bytes <= limit);
            prop_assert_eq!(summary.count(OpKind::Alloc), u64::from(rounds * allocations));
            prop_assert!(summary.largest_request <= u64::from(max_units) * 4096);
        }
    }
}
