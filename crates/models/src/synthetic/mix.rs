//! Patterns for timing an allocator: one hot block, and random replacements on one or several streams.
//!
//! Nothing is live at the end of any of them.

use std::sync::Arc;

use super::{alloc, open_streams};
use crate::{
    Generator, GeneratorEntry, Parameter, SeededRandom,
    generator::{part_size, start, to_u32},
};
use oomph_base::{GIB, Nanos, StreamId, TagId, Work};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder, TraceEventId};

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
        Ok(start(move |_| HotPair { pairs, bytes }))
    },
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
        let (live, operations) = (parameters.count("live")?, parameters.count("operations")?.into());
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let sizes = sizes_even_over_octaves(min_bytes, max_bytes);
        Ok(start(move |random| Mix { random, sizes: sizes.clone(), operations, places: vec![None; live as usize] }))
    },
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
        let (stream_count, live) = (parameters.count("streams")? as usize, parameters.count("live")?);
        let (operations, crossing) = (parameters.count("operations")?.into(), parameters.number("crossing")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let sizes = sizes_even_over_octaves(min_bytes, max_bytes);
        let kernel = Work::Spin { nanos: Nanos(u64::from(parameters.count("kernel_us")?) * 1000) };
        Ok(start(move |random| StreamMix {
            mix: Mix { random, sizes: sizes.clone(), operations, places: vec![None; live as usize] },
            kernel,
            crossing,
            stream_count,
            streams: Vec::new(),
        }))
    },
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

struct HotPair {
    pairs: u64,
    bytes: u64,
}

impl Generator for HotPair {
    fn parts_left(&self, written: u64) -> u64 {
        self.pairs.div_ceil(PART) - written
    }

    fn write_part(&mut self, part: u64, trace: &mut TraceBuilder) {
        if part == 0 {
            trace.mark(MarkKind::Phase, "pairs", 0);
        }
        trace.mark(MarkKind::Step, "part", to_u32(part));
        for _ in 0..part_size(self.pairs, PART, part) {
            let block = alloc(trace, self.bytes);
            trace.free(block);
        }
    }
}

struct Mix {
    random: SeededRandom,
    sizes: Arc<[u64]>,
    operations: u64,
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
}

impl Generator for Mix {
    fn parts_left(&self, written: u64) -> u64 {
        self.operations.div_ceil(PART) - written
    }

    fn write_part(&mut self, part: u64, trace: &mut TraceBuilder) {
        if part == 0 {
            trace.mark(MarkKind::Phase, "mix", 0);
        }
        trace.mark(MarkKind::Step, "part", to_u32(part));
        for _ in 0..part_size(self.operations, PART, part) {
            let bytes = self.random_size();
            let place = self.vacate_random_place(trace);
            self.places[place] = Some(alloc(trace, bytes));
        }
    }

    fn finish(&mut self, trace: &mut TraceBuilder) {
        self.places.iter().flatten().for_each(|block| trace.free(*block));
    }
}

struct StreamMix {
    mix: Mix,
    kernel: Work,
    crossing: f64,
    stream_count: usize,
    /// Every stream with the event that is recorded on it when one of its blocks crosses over.
    streams: Vec<(StreamId, TraceEventId)>,
}

impl StreamMix {
    fn replace_one(&mut self, trace: &mut TraceBuilder) {
        let place = self.mix.vacate_random_place(trace);
        let bytes = self.mix.random_size();
        let random = &mut self.mix.random;
        let own = random.index(self.streams.len());
        let (stream, written) = self.streams[own];
        let block = trace.alloc(bytes, stream, TagId(0));
        trace.work(self.kernel, stream, &[]);
        if self.streams.len() > 1 && random.chance(self.crossing) {
            let other = (own + 1 + random.index(self.streams.len() - 1)) % self.streams.len();
            let (other, _) = self.streams[other];
            trace.event_record(written, stream);
            trace.event_wait(written, other);
            trace.use_on(block, other);
            trace.work(self.kernel, other, &[]);
        }
        self.mix.places[place] = Some(block);
    }
}

impl Generator for StreamMix {
    fn parts_left(&self, written: u64) -> u64 {
        self.mix.operations.div_ceil(STREAMS_PART) - written
    }

    fn write_part(&mut self, part: u64, trace: &mut TraceBuilder) {
        if part == 0 {
            trace.mark(MarkKind::Phase, "mix", 0);
            let mut streams = Vec::new();
            open_streams(&mut streams, self.stream_count, trace);
            self.streams = streams.into_iter().map(|stream| (stream, trace.new_event())).collect();
        }
        trace.mark(MarkKind::Step, "part", to_u32(part));
        for _ in 0..part_size(self.mix.operations, STREAMS_PART, part) {
            self.replace_one(trace);
        }
        trace.device_sync();
    }

    fn finish(&mut self, trace: &mut TraceBuilder) {
        self.mix.finish(trace);
        trace.device_sync();
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
