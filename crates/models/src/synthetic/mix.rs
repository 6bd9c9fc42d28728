//! Patterns for timing an allocator: one hot block, and random replacements on one or several streams.
//!
//! Nothing is live at the end of any of them.

use std::sync::Arc;

use super::{alloc, items_of_part, mark_part, open_streams};
use crate::{GeneratorEntry, Parameter, Parameters, SeededRandom, WorkloadError, generator::in_parts};
use oomph_base::{GIB, Nanos, TagId, Work};
use oomph_trace::{BlockSlot, TraceBuilder};

/// Requests written at a time.
const PART: u64 = 1024;
/// Requests between two waits of the host: few enough that no stream's queue runs full.
const STREAMS_PART: u64 = 512;

/// After the first pair a cache serves every request from the block that it holds. What is timed is the shortest path
/// through an allocator.
pub(crate) const HOT_PAIR: GeneratorEntry = GeneratorEntry {
    name: "hot_pair",
    summary: "allocates one block and frees it, again and again: the shortest path through an allocator",
    seeded: false,
    parameters: &[
        Parameter::count("pairs", 1..=100_000_000, "200000", "pairs of one allocation and one free"),
        Parameter::size("bytes", 1..=64 * GIB, "4KiB", "size of the block"),
    ],
    build: |parameters| {
        let (pairs, bytes) = (u64::from(parameters.count("pairs")?), parameters.size("bytes")?);
        Ok(in_parts(pairs.div_ceil(PART), move |_| {
            move |part, trace: &mut TraceBuilder| {
                mark_part(trace, part, "pairs", "part");
                for _ in items_of_part(part, PART, pairs) {
                    let block = alloc(trace, bytes);
                    trace.free(block);
                }
            }
        }))
    },
    count_weights: None,
};

/// A fixed number of places; each step replaces the block in a random place by a block of a random size.
///
/// PyTorch's and RMM's allocators were timed with the same pattern, so the numbers can be compared.
pub(crate) const MIX: GeneratorEntry = GeneratorEntry {
    name: "mix",
    summary: "replaces a random live block by one of a random size, sizes even over powers of two",
    seeded: true,
    parameters: &[
        Parameter::count("live", 1..=10_000_000, "10000", "most live blocks"),
        Parameter::count("operations", 1..=1_000_000_000, "400000", "blocks that are allocated"),
        Parameter::size("min_bytes", 1..=64 * GIB, "512B", "smallest block"),
        Parameter::size("max_bytes", 1..=64 * GIB, "4MiB", "largest block"),
    ],
    build: |parameters| {
        let (settings, operations) = (MixSettings::read(parameters)?, u64::from(parameters.count("operations")?));
        let parts = operations.div_ceil(PART);
        Ok(in_parts(parts + 1, move |random| {
            let mut mix = settings.begin(random);
            move |part, trace: &mut TraceBuilder| {
                if u64::from(part) == parts {
                    mix.free_all(trace);
                    return;
                }
                mark_part(trace, part, "mix", "part");
                for _ in items_of_part(part, PART, operations) {
                    let bytes = mix.random_size();
                    let place = mix.vacate_random_place(trace);
                    mix.places[place] = Some(alloc(trace, bytes));
                }
            }
        }))
    },
    count_weights: None,
};

/// Every block is followed by a kernel on its stream, so that streams are busy while the host runs ahead. A share of the
/// blocks crosses over to another stream: an event orders the two, `record_stream` notes the use, and that stream runs a
/// kernel too. The memory of such a block must not be reused before the other stream is done. The host waits for all
/// streams after every part. With one stream nothing can cross over.
pub(crate) const STREAM_MIX: GeneratorEntry = GeneratorEntry {
    name: "stream_mix",
    summary: "the mix on several streams: a kernel behind every block, some blocks cross over with record_stream",
    seeded: true,
    parameters: &[
        Parameter::count("streams", 1..=256, "4", "streams, the default stream included"),
        Parameter::count("live", 1..=10_000_000, "1000", "most live blocks"),
        Parameter::count("operations", 1..=1_000_000_000, "20000", "blocks that are allocated"),
        Parameter::size("min_bytes", 1..=64 * GIB, "512B", "smallest block"),
        Parameter::size("max_bytes", 1..=64 * GIB, "4MiB", "largest block"),
        Parameter::number("crossing", 0.0..=1.0, "0.2", "share of the blocks that are used on a second stream"),
        Parameter::count("kernel_us", 0..=60_000_000, "8", "run time of the kernel behind a block, in microseconds"),
    ],
    build: |parameters| {
        let (settings, operations) = (MixSettings::read(parameters)?, u64::from(parameters.count("operations")?));
        let (stream_count, crossing) = (parameters.count("streams")? as usize, parameters.number("crossing")?);
        let kernel = Work::Spin { nanos: Nanos(u64::from(parameters.count("kernel_us")?) * 1000) };
        let parts = operations.div_ceil(STREAMS_PART);
        Ok(in_parts(parts + 1, move |random| {
            let (mut mix, mut streams, mut crossings) = (settings.begin(random), Vec::new(), Vec::new());
            move |part, trace: &mut TraceBuilder| {
                open_streams(&mut streams, stream_count, trace);
                // The event that is recorded on each stream when one of its blocks crosses over.
                crossings.resize_with(streams.len(), || trace.new_event());
                if u64::from(part) < parts {
                    mark_part(trace, part, "mix", "part");
                } else {
                    mix.free_all(trace);
                }
                for _ in items_of_part(part, STREAMS_PART, operations) {
                    let place = mix.vacate_random_place(trace);
                    let bytes = mix.random_size();
                    let own = mix.random.index(streams.len());
                    let block = trace.alloc(bytes, streams[own], TagId(0));
                    trace.work(kernel, streams[own], &[]);
                    if streams.len() > 1 && mix.random.chance(crossing) {
                        let other = streams[(own + 1 + mix.random.index(streams.len() - 1)) % streams.len()];
                        trace.event_record(crossings[own], streams[own]);
                        trace.event_wait(crossings[own], other);
                        trace.use_on(block, other);
                        trace.work(kernel, other, &[]);
                    }
                    mix.places[place] = Some(block);
                }
                trace.device_sync();
            }
        }))
    },
    count_weights: None,
};

/// `least` and every following 64th of an octave up to `most`.
fn sizes_even_over_octaves(least: u64, most: u64) -> Arc<[u64]> {
    // A grid instead of a logarithm, whose last bit differs between machines. Square roots of two and their products
    // are exact to the last bit everywhere.
    let step = (0..6).fold(2.0_f64, |root, _| root.sqrt());
    let octave: Vec<f64> = std::iter::successors(Some(1.0), |size| Some(size * step)).take(64).collect();
    (0..64)
        .flat_map(|doublings| octave.iter().map(move |part| (least as f64 * part * 2_f64.powi(doublings)) as u64))
        .take_while(|&bytes| bytes <= most)
        .collect()
}

/// The sizes of a mix and the number of its places.
struct MixSettings {
    sizes: Arc<[u64]>,
    live: usize,
}

impl MixSettings {
    fn read(parameters: &Parameters<'_>) -> Result<MixSettings, WorkloadError> {
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let sizes = sizes_even_over_octaves(min_bytes, max_bytes);
        Ok(MixSettings { sizes, live: parameters.count("live")? as usize })
    }

    fn begin(&self, random: SeededRandom) -> Mix {
        Mix { random, sizes: self.sizes.clone(), places: vec![None; self.live] }
    }
}

struct Mix {
    random: SeededRandom,
    sizes: Arc<[u64]>,
    places: Vec<Option<BlockSlot>>,
}

impl Mix {
    fn random_size(&mut self) -> u64 {
        self.sizes[self.random.index(self.sizes.len())]
    }

    /// A random place, after freeing the block in it.
    fn vacate_random_place(&mut self, trace: &mut TraceBuilder) -> usize {
        let place = self.random.index(self.places.len());
        if let Some(block) = self.places[place].take() {
            trace.free(block);
        }
        place
    }

    fn free_all(&mut self, trace: &mut TraceBuilder) {
        self.places.iter().flatten().for_each(|block| trace.free(*block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;
    use oomph_base::MIB;
    use oomph_trace::{OpKind, check};

    #[test]
    fn sizes_are_even_over_powers_of_two() {
        let sizes = sizes_even_over_octaves(512, 4 * MIB);
        assert_eq!((sizes[0], sizes[64], sizes[sizes.len() - 1]), (512, 1024, 4 * MIB));
        assert_eq!(sizes.len(), 13 * 64 + 1);
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn a_fifth_of_the_blocks_crosses_over() {
        let summary = check(&Recipe::named("stream-mix-4").unwrap().workload().unwrap()).unwrap();
        assert_eq!(summary.streams, 4);
        let blocks = summary.count(OpKind::Alloc);
        assert_eq!((blocks, summary.count(OpKind::Free)), (20_000, 20_000));
        let crossings = summary.count(OpKind::Use);
        assert!((3_600..4_400).contains(&crossings), "{crossings}");
        for kind in [OpKind::EventRecord, OpKind::EventWait] {
            assert_eq!(summary.count(kind), crossings, "{kind:?}");
        }
        assert_eq!(summary.count(OpKind::Work), blocks + crossings);
    }

    #[test]
    fn nothing_crosses_over_on_one_stream() {
        let summary = check(&Recipe::named("stream-mix-1").unwrap().workload().unwrap()).unwrap();
        assert_eq!((summary.streams, summary.count(OpKind::Use)), (1, 0));
        assert_eq!(summary.count(OpKind::Work), summary.count(OpKind::Alloc));
    }
}
