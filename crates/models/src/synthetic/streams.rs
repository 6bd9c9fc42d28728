//! A producer and consumers on several streams, as in a training loop with side streams.
//!
//! The default stream makes a batch for every side stream. An event orders the two, `record_stream` notes that the batch
//! is used there, and the consumer allocates scratch memory of its own. The host runs ahead: it frees a batch on the
//! default stream as soon as the next few are queued, so the allocator must not reuse the memory before the side stream
//! is done. Every `sync_every` rounds the host waits for all streams. Nothing is live at the end.

use std::collections::VecDeque;

use super::{mark_part, open_streams};
use crate::{GeneratorEntry, Parameter, generator::in_parts};
use oomph_base::{GIB, Nanos, StreamId, Work};
use oomph_trace::{BlockSlot, Category, TraceBuilder};

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
        let most_held = in_flight as usize * side_streams as usize;
        // The traffic of the largest batch, whatever the size of a batch: one shape of work per size would let the tables
        // of a long trace grow without bound.
        let traffic = Work::Elementwise { bytes: max_bytes };
        Ok(in_parts(u64::from(rounds) + 1, move |mut random| {
            let (mut streams, mut ready, mut held) = (Vec::new(), Vec::new(), VecDeque::new());
            move |round, trace: &mut TraceBuilder| {
                open_streams(&mut streams, side_streams as usize + 1, trace);
                // The event that is recorded on the default stream when a batch for a consumer is made.
                ready.resize_with(streams.len() - 1, || trace.new_event());
                if round == rounds {
                    free_oldest(&mut held, 0, trace);
                    trace.device_sync();
                    return;
                }
                mark_part(trace, round, "pipeline", "round");
                for (&consumer, &ready) in streams[1..].iter().zip(&ready) {
                    let bytes = random.between(min_bytes, max_bytes);
                    let (input, scratch) = (trace.tag(Category::Input, None), trace.tag(Category::Temporary, None));
                    let batch = trace.alloc(bytes, StreamId::DEFAULT, input);
                    trace.work(traffic, StreamId::DEFAULT, &[batch]);
                    trace.event_record(ready, StreamId::DEFAULT);
                    trace.event_wait(ready, consumer);
                    trace.use_on(batch, consumer);
                    let scratch = trace.alloc((bytes / 2).max(1), consumer, scratch);
                    trace.work(Work::Spin { nanos: busy }, consumer, &[]);
                    trace.work(traffic, consumer, &[batch, scratch]);
                    trace.free(scratch);
                    held.push_back(batch);
                    free_oldest(&mut held, most_held, trace);
                }
                if (round + 1).is_multiple_of(sync_every) {
                    trace.device_sync();
                }
            }
        }))
    },
    count_weights: None,
};

fn free_oldest(held: &mut VecDeque<BlockSlot>, keep: usize, trace: &mut TraceBuilder) {
    let excess = held.len().saturating_sub(keep);
    held.drain(..excess).for_each(|batch| trace.free(batch));
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
