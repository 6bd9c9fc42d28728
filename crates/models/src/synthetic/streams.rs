//! A producer and consumers on several streams, as in a training loop with side streams.
//!
//! The default stream makes a batch for every side stream. An event orders the two, `record_stream` notes that the batch
//! is used there, and the consumer allocates scratch memory of its own. The host runs ahead: it frees a batch on the
//! default stream as soon as the next few are queued, so the allocator must not reuse the memory before the side stream
//! is done. Every `sync_every` rounds the host waits for all streams. Nothing is live at the end.

use std::collections::VecDeque;

use super::open_streams;
use crate::{
    Generator, GeneratorEntry, Parameter, SeededRandom,
    generator::{start, to_u32},
};
use oomph_base::{GIB, Nanos, StreamId, Work};
use oomph_trace::{BlockSlot, Category, MarkKind, TraceBuilder, TraceEventId};

pub(crate) const STREAMS: GeneratorEntry = GeneratorEntry {
    name: "streams",
    summary: "a producer and consumers on side streams, with record_stream and events",
    seeded: true,
    parameters: &[
        Parameter::count("rounds", 1..=100_000_000, "400", "batches that each side stream consumes"),
        Parameter::count("side_streams", 1..=256, "2", "streams that consume"),
        Parameter::size("min_bytes", 1..=64 * GIB, "32MiB", "smallest batch"),
        Parameter::size("max_bytes", 1..=64 * GIB, "256MiB", "largest batch"),
        Parameter::count("in_flight", 0..=10_000, "2", "rounds for which the producer keeps a batch"),
        Parameter::count(
            "consumer_us",
            0..=60_000_000,
            "400",
            "time that a consumer works on a batch, in microseconds",
        ),
        Parameter::count("sync_every", 1..=1_000_000, "16", "rounds between two waits of the host"),
    ],
    build: |parameters| {
        let (rounds, side_streams) = (parameters.count("rounds")?, parameters.count("side_streams")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (in_flight, sync_every) = (parameters.count("in_flight")?, parameters.count("sync_every")?);
        let busy = Nanos(u64::from(parameters.count("consumer_us")?) * 1000);
        Ok(start(move |random| ProducerConsumer {
            random,
            rounds,
            side_streams,
            min_bytes,
            max_bytes,
            in_flight: in_flight as usize * side_streams as usize,
            busy,
            sync_every,
            consumers: Vec::new(),
            held: VecDeque::new(),
        }))
    },
};

struct ProducerConsumer {
    random: SeededRandom,
    rounds: u32,
    side_streams: u32,
    min_bytes: u64,
    max_bytes: u64,
    /// Batches that the producer keeps.
    in_flight: usize,
    busy: Nanos,
    sync_every: u32,
    consumers: Vec<ConsumerStream>,
    held: VecDeque<BlockSlot>,
}

#[derive(Clone, Copy)]
struct ConsumerStream {
    stream: StreamId,
    /// Recorded on the default stream when a batch for this consumer is made.
    ready: TraceEventId,
}

impl ProducerConsumer {
    fn produce_and_consume(&mut self, consumer: ConsumerStream, trace: &mut TraceBuilder) {
        let bytes = self.random.between(self.min_bytes, self.max_bytes);
        // The traffic of the largest batch, whatever the size of this one: one shape of work per size would let the
        // tables of a long trace grow without bound.
        let traffic = Work::Elementwise { bytes: self.max_bytes };
        let (input, scratch_tag) = (trace.tag(Category::Input, None), trace.tag(Category::Temporary, None));
        let batch = trace.alloc(bytes, StreamId::DEFAULT, input);
        trace.work(traffic, StreamId::DEFAULT, &[batch]);
        trace.event_record(consumer.ready, StreamId::DEFAULT);

        trace.event_wait(consumer.ready, consumer.stream);
        trace.use_on(batch, consumer.stream);
        let scratch = trace.alloc((bytes / 2).max(1), consumer.stream, scratch_tag);
        trace.work(Work::Spin { nanos: self.busy }, consumer.stream, &[]);
        trace.work(traffic, consumer.stream, &[batch, scratch]);
        trace.free(scratch);
        self.held.push_back(batch);
    }

    fn free_oldest(&mut self, keep: usize, trace: &mut TraceBuilder) {
        let excess = self.held.len().saturating_sub(keep);
        self.held.drain(..excess).for_each(|batch| trace.free(batch));
    }
}

impl Generator for ProducerConsumer {
    fn parts_left(&self, written: u64) -> u64 {
        u64::from(self.rounds) - written
    }

    fn write_part(&mut self, round: u64, trace: &mut TraceBuilder) {
        if round == 0 {
            trace.mark(MarkKind::Phase, "pipeline", 0);
            let mut streams = Vec::new();
            open_streams(&mut streams, self.side_streams as usize + 1, trace);
            let consumer = |&stream: &StreamId| ConsumerStream { stream, ready: trace.new_event() };
            self.consumers = streams[1..].iter().map(consumer).collect();
        }
        trace.mark(MarkKind::Step, "round", to_u32(round));
        for place in 0..self.consumers.len() {
            self.produce_and_consume(self.consumers[place], trace);
            self.free_oldest(self.in_flight, trace);
        }
        if (round + 1).is_multiple_of(self.sync_every.into()) {
            trace.device_sync();
        }
    }

    fn finish(&mut self, trace: &mut TraceBuilder) {
        self.free_oldest(0, trace);
        trace.device_sync();
    }
}

#[cfg(test)]
mod tests {
    use crate::Recipe;
    use oomph_trace::{OpKind, check};

    #[test]
    fn every_batch_crosses_behind_an_event() {
        let recipe = Recipe::named("streams").unwrap().with("rounds", "100").with("side_streams", "3");
        let summary = check(&recipe.workload().unwrap()).unwrap();
        assert_eq!(summary.streams, 4);
        for (kind, count) in [
            (OpKind::Use, 300),
            (OpKind::EventRecord, 300),
            (OpKind::EventWait, 300),
            (OpKind::Alloc, 600),
            (OpKind::Free, 600),
        ] {
            assert_eq!(summary.count(kind), count, "{kind:?}");
        }
    }
}
