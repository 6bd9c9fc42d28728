//! The mix on several streams: blocks of random sizes come and go on random streams, with kernels in flight.
//!
//! Every block is followed by a kernel on its stream, so that streams are busy while the host runs ahead. A share of the
//! blocks crosses over to another stream: an event orders the two, the block is noted as used there (`record_stream`)
//! and that stream gets a kernel too. When such a block is freed, whoever reuses its memory must wait for whatever the
//! other stream is doing then. The host waits for all streams after every part. Nothing lives at the end.
//!
//! With one stream nothing can cross over, and what is left is the mix with a kernel behind each request.

use std::sync::Arc;

use super::{Generator, GeneratorEntry, mix::sizes_even_over_octaves, start};
use crate::{Dice, Parameter};
use oomph_base::{GIB, Nanos, StreamId, TagId, Work};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder, TraceEventId};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "stream_mix",
    summary: "the mix on several streams: a kernel behind every block, some blocks cross over with record_stream",
    seeded: true,
    parameters: &[
        Parameter::count("streams", 1..=256, "4", "how many streams, the default stream among them"),
        Parameter::count("live", 1..=10_000_000, "1000", "how many blocks live at most"),
        Parameter::count("operations", 1..=1_000_000_000, "20000", "how many blocks are asked for"),
        Parameter::size("min_bytes", 1..=64 * GIB, "512B", "smallest block"),
        Parameter::size("max_bytes", 1..=64 * GIB, "4MiB", "largest block"),
        Parameter::number("crossing", 0.0..=1.0, "0.2", "share of the blocks that are used on a second stream"),
        Parameter::count("kernel_us", 0..=60_000_000, "8", "how long the kernel behind a block runs, in microseconds"),
    ],
    build: |parameters| {
        let (streams, live) = (parameters.count("streams")?, parameters.count("live")?);
        let (operations, crossing) = (parameters.count("operations")?, parameters.number("crossing")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let sizes = sizes_even_over_octaves(min_bytes, max_bytes);
        let kernel = Work::Spin { nanos: Nanos(u64::from(parameters.count("kernel_us")?) * 1000) };
        Ok(start(move |dice| StreamMix {
            dice,
            sizes: sizes.clone(),
            kernel,
            crossing,
            stream_count: streams as usize,
            streams: Vec::new(),
            left: operations,
            places: vec![None; live as usize],
            part: 0,
        }))
    },
};

/// Blocks replaced between two waits of the host: few enough that no stream's queue runs full.
const PART: u32 = 512;

struct StreamMix {
    dice: Dice,
    sizes: Arc<[u64]>,
    kernel: Work,
    crossing: f64,
    stream_count: usize,
    streams: Vec<Lane>,
    left: u32,
    places: Vec<Option<BlockSlot>>,
    part: u32,
}

/// A stream, and the event that is recorded on it when one of its blocks crosses over.
#[derive(Clone, Copy)]
struct Lane {
    stream: StreamId,
    written: TraceEventId,
}

impl StreamMix {
    fn open_streams(&mut self, story: &mut TraceBuilder) {
        self.streams.push(Lane { stream: StreamId::DEFAULT, written: story.new_event() });
        // At most 256, of the 65,536 that a story can hold.
        while self.streams.len() < self.stream_count
            && let Ok(stream) = story.new_stream()
        {
            self.streams.push(Lane { stream, written: story.new_event() });
        }
    }

    fn replace_one(&mut self, story: &mut TraceBuilder) {
        let place = self.dice.index(self.places.len());
        if let Some(block) = self.places[place].take() {
            story.free(block);
        }
        let bytes = self.sizes[self.dice.index(self.sizes.len())];
        let home = self.dice.index(self.streams.len());
        let lane = self.streams[home];
        let block = story.alloc(bytes, lane.stream, TagId(0));
        story.work(self.kernel, lane.stream, &[]);
        if self.streams.len() > 1 && self.dice.chance(self.crossing) {
            let away = (home + 1 + self.dice.index(self.streams.len() - 1)) % self.streams.len();
            let other = self.streams[away].stream;
            story.event_record(lane.written, lane.stream);
            story.event_wait(lane.written, other);
            story.use_on(block, other);
            story.work(self.kernel, other, &[]);
        }
        self.places[place] = Some(block);
    }

    /// The end of the story. Returns whether there was anything left to write.
    fn free_all(&mut self, story: &mut TraceBuilder) -> bool {
        let places = std::mem::take(&mut self.places);
        for block in places.iter().flatten() {
            story.free(*block);
        }
        if !places.is_empty() {
            story.device_sync();
        }
        !places.is_empty()
    }
}

impl Generator for StreamMix {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        let blocks = self.left.min(PART);
        if blocks == 0 {
            return self.free_all(story);
        }
        if self.part == 0 {
            story.mark(MarkKind::Phase, "mix", 0);
            self.open_streams(story);
        }
        story.mark(MarkKind::Step, "part", self.part);
        self.part += 1;
        for _ in 0..blocks {
            self.replace_one(story);
        }
        story.device_sync();
        self.left -= blocks;
        true
    }

    fn left(&self) -> u64 {
        self.left.into()
    }
}

#[cfg(test)]
mod tests {
    use crate::Recipe;
    use oomph_trace::{OpKind, check};

    #[test]
    fn every_block_gets_a_kernel_and_a_fifth_crosses_over_behind_an_event() {
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
    fn on_one_stream_nothing_crosses_over() {
        let summary = check(&Recipe::named("stream-mix-1").unwrap().workload().unwrap()).unwrap();
        assert_eq!((summary.streams, summary.count(OpKind::Use)), (1, 0));
        assert_eq!(summary.count(OpKind::Work), summary.count(OpKind::Alloc));
    }
}
