//! Producer and consumers on several streams, as a training loop with side streams does it.
//!
//! The default stream makes a batch for every side stream; an event orders the two, the batch is noted as used there
//! (`record_stream`), and the consumer takes scratch memory of its own. The host runs ahead: a batch is freed on the
//! default stream as soon as the next few are queued, however far its consumer is, so whoever reuses its memory must
//! wait for the side stream. Every `sync_every` rounds the host waits for all. Nothing lives at the end.

use std::collections::VecDeque;

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter};
use oomph_base::{GIB, Nanos, StreamId, Work};
use oomph_trace::{BlockSlot, Category, MarkKind, TraceBuilder, TraceEventId};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "streams",
    summary: "a producer and consumers on side streams, with record_stream and events",
    seeded: true,
    parameters: &[
        Parameter::count("rounds", 1..=100_000_000, "400", "how many batches each side stream consumes"),
        Parameter::count("side_streams", 1..=256, "2", "how many streams consume"),
        Parameter::size("min_bytes", 1..=64 * GIB, "32MiB", "smallest batch"),
        Parameter::size("max_bytes", 1..=64 * GIB, "256MiB", "largest batch"),
        Parameter::count("in_flight", 0..=10_000, "2", "rounds that the producer holds on to a batch"),
        Parameter::count("consumer_us", 0..=60_000_000, "400", "how long a consumer works on a batch, in microseconds"),
        Parameter::count("sync_every", 1..=1_000_000, "16", "rounds between two waits of the host"),
    ],
    build: |parameters| {
        let (rounds, side_streams) = (parameters.count("rounds")?, parameters.count("side_streams")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (in_flight, sync_every) = (parameters.count("in_flight")?, parameters.count("sync_every")?);
        let busy = Nanos(u64::from(parameters.count("consumer_us")?) * 1000);
        Ok(start(move |dice| Streams {
            dice,
            rounds,
            side_streams,
            min_bytes,
            max_bytes,
            in_flight: in_flight as usize * side_streams as usize,
            busy,
            sync_every,
            round: 0,
            consumers: Vec::new(),
            held: VecDeque::new(),
        }))
    },
};

struct Streams {
    dice: Dice,
    rounds: u32,
    side_streams: u32,
    min_bytes: u64,
    max_bytes: u64,
    /// Batches that the producer holds on to.
    in_flight: usize,
    busy: Nanos,
    sync_every: u32,
    round: u32,
    consumers: Vec<Consumer>,
    held: VecDeque<BlockSlot>,
}

#[derive(Clone, Copy)]
struct Consumer {
    stream: StreamId,
    /// Recorded on the default stream when a batch for this consumer is made.
    ready: TraceEventId,
}

impl Streams {
    fn produce_and_consume(&mut self, consumer: Consumer, story: &mut TraceBuilder) {
        let bytes = self.dice.between(self.min_bytes, self.max_bytes);
        // The traffic of the largest batch, whatever the size of this one: a shape for every size would let the tables
        // of a long story grow without end.
        let traffic = Work::Elementwise { bytes: self.max_bytes };
        let (input, scratch_tag) = (story.tag(Category::Input, None), story.tag(Category::Temporary, None));
        let batch = story.alloc(bytes, StreamId::DEFAULT, input);
        story.work(traffic, StreamId::DEFAULT, &[batch]);
        story.event_record(consumer.ready, StreamId::DEFAULT);

        story.event_wait(consumer.ready, consumer.stream);
        story.use_on(batch, consumer.stream);
        let scratch = story.alloc((bytes / 2).max(1), consumer.stream, scratch_tag);
        story.work(Work::Spin { nanos: self.busy }, consumer.stream, &[]);
        story.work(traffic, consumer.stream, &[batch, scratch]);
        story.free(scratch);
        self.held.push_back(batch);
    }

    fn let_go(&mut self, keep: usize, story: &mut TraceBuilder) {
        while self.held.len() > keep {
            if let Some(batch) = self.held.pop_front() {
                story.free(batch);
            }
        }
    }
}

impl Generator for Streams {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.round == self.rounds {
            return false;
        }
        if self.round == 0 {
            story.mark(MarkKind::Phase, "pipeline", 0);
            // At most 256, of the 65,536 that a story can hold.
            while self.consumers.len() < self.side_streams as usize
                && let Ok(stream) = story.new_stream()
            {
                let ready = story.new_event();
                self.consumers.push(Consumer { stream, ready });
            }
        }
        story.mark(MarkKind::Step, "round", self.round);
        for place in 0..self.consumers.len() {
            self.produce_and_consume(self.consumers[place], story);
            self.let_go(self.in_flight, story);
        }
        self.round += 1;
        if self.round.is_multiple_of(self.sync_every) {
            story.device_sync();
        }
        if self.round == self.rounds {
            self.let_go(0, story);
            story.device_sync();
        }
        true
    }

    fn left(&self) -> u64 {
        (self.rounds - self.round).into()
    }
}

#[cfg(test)]
mod tests {
    use crate::Recipe;
    use oomph_trace::{OpKind, check};

    #[test]
    fn every_batch_crosses_to_its_consumer_behind_an_event() {
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
