//! Several threads, each with a copy of the trace, share one strategy and its device under one lock: the convention of
//! PyTorch's allocator, and the only way to share a strategy that knows nothing of threads.
//!
//! Every thread drives a view of its own with the same loop as a single one ([`Locked::share`]). What a thread notes
//! lies on its own stack and is put together after the last has ended, so that threads meet nowhere but at the lock.

use std::{
    panic::resume_unwind,
    sync::{
        Arc, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use super::{Pass, TimingRecord, elapsed_between, sampler::Sampler};
use crate::{
    base::ThreadId,
    measure::CaseLabel,
    replay::{self, Observer, OpenedAllocator, ReplayError, ReplayOutcome, replay},
    strategy::{Silent, Strategy, wrap::Locked},
    trace::{Source, Trace, TraceError},
};

/// Reads what each thread will do into memory, and gives every copy its thread.
pub fn copies_for_threads(sources: &[Arc<dyn Source>]) -> Result<Vec<Trace>, TraceError> {
    (0..)
        .zip(sources)
        .map(|(thread, source)| {
            let mut copy = Trace::read(&**source)?;
            copy.events.iter_mut().for_each(|event| event.thread = ThreadId(thread));
            Ok(copy)
        })
        .collect()
}

/// Times a case as [`time`](super::time) does, with a thread for each of the `copies`. A pass lasts from the moment at
/// which the first thread begins until the last has ended.
pub fn time_threads(
    label: &CaseLabel,
    copies: &[Trace],
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    passes: u32,
) -> Result<TimingRecord, ReplayError> {
    let mut unwatched = Vec::new();
    for _ in 0..passes.max(1) {
        unwatched.push(shared_pass(copies, make()?, options, |_| Silent)?.0);
    }
    let (_, samplers) = shared_pass(copies, make()?, options, Sampler::numbered)?;
    let mut sampler = Sampler::default();
    samplers.iter().for_each(|one| sampler.absorb(one));
    Ok(TimingRecord::new(label, Some(copies.len() as u16), unwatched, &sampler))
}

/// One thread's part of a pass.
struct Run<O> {
    began: Instant,
    ended: Instant,
    replayed: ReplayOutcome,
    observer: O,
}

/// One pass of all threads, and those who watched it.
fn shared_pass<O: Observer + Send>(
    copies: &[Trace],
    OpenedAllocator { strategy, mut device, .. }: OpenedAllocator,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> Result<(Pass, Vec<O>), ReplayError> {
    // All threads use the same streams: they are made once, and before the clock starts.
    let streams = copies.iter().map(|copy| copy.tables.streams()).max_by_key(|streams| streams.len());
    let known_as = streams.and_then(|streams| streams.get(1..)).unwrap_or_default();
    for &handle in known_as {
        device.stream_create(handle).map_err(|source| ReplayError::Device { event: 0, source })?;
    }
    let locked = Locked::new(strategy, device, Silent);
    let runs = run_all(copies, &locked, known_as.len() as u16, options, observer)?;

    let (first, last) = (runs.iter().map(|run| run.began).min(), runs.iter().map(|run| run.ended).max());
    let stats = locked.stats();
    let pass = Pass {
        wall: first.zip(last).map(|(first, last)| elapsed_between(first, last)).unwrap_or_default(),
        events: runs.iter().map(|run| run.replayed.events).sum(),
        ooms: runs.iter().map(|run| run.replayed.ooms).sum(),
        operations: stats.allocs + stats.frees,
    };
    locked.close().map_err(|source| ReplayError::Strategy { event: pass.events, source })?;
    Ok((pass, runs.into_iter().map(|run| run.observer).collect()))
}

/// Starts a thread for each copy, lets all go at once and waits for the last.
fn run_all<S: Strategy, O: Observer + Send>(
    copies: &[Trace],
    locked: &Locked<S, Silent>,
    streams: u16,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> Result<Vec<Run<O>>, ReplayError> {
    let (gate, waiting) = (RwLock::new(()), AtomicUsize::new(0));
    thread::scope(|scope| {
        // Closed by a guard, so that it opens on every way out: a thread that could not be started, or a panic here,
        // must not leave the others waiting for ever.
        let closed = gate.write();
        let mut threads = Vec::new();
        for (number, copy) in (0..).zip(copies) {
            let (mut strategy, mut device) = locked.share(streams);
            let mut observer = observer(number);
            let (gate, waiting) = (&gate, &waiting);
            threads.push(scope.spawn(move || {
                waiting.fetch_add(1, Ordering::Relaxed);
                drop(gate.read());
                let began = Instant::now();
                let replayed = replay(copy, &mut strategy, &mut device, options, &mut observer)?;
                Ok(Run { began, ended: Instant::now(), replayed, observer })
            }));
        }
        while waiting.load(Ordering::Relaxed) < copies.len() {
            thread::yield_now();
        }
        drop(closed);
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{
        base::{KIB, StreamId, TagId},
        measure::fixture::{Catalog, TinyDevice},
        replay::ReplayMoment,
        strategy::EventSink,
        trace::TraceBuilder,
    };

    fn fresh() -> Result<OpenedAllocator, ReplayError> {
        let (strategy, device) = (Box::new(Catalog::default()), Box::new(TinyDevice::new(64 * KIB)));
        Ok(OpenedAllocator { strategy, device, limit: None })
    }

    fn copies(threads: usize) -> Vec<Trace> {
        let mut story = TraceBuilder::new();
        for _ in 0..500 {
            let block = story.alloc(100, StreamId::DEFAULT, TagId(0));
            story.free(block);
        }
        let copy: Arc<dyn Source> = Arc::new(story.finish("w"));
        copies_for_threads(&vec![copy; threads]).unwrap()
    }

    #[test]
    fn every_thread_runs_its_own_copy_through_one_strategy() {
        let mut made = 0;
        let make = || {
            made += 1;
            fresh()
        };
        let label = CaseLabel { workload: "w".to_owned(), ..CaseLabel::default() };
        let copies = copies(4);
        assert!(copies[3].events.iter().all(|event| event.thread == ThreadId(3)));
        let record = time_threads(&label, &copies, make, &replay::ReplayOptions::default(), 3).unwrap();
        assert_eq!(made, 4, "three passes for throughput, one for percentiles");
        assert_eq!((record.threads, record.passes), (Some(4), 3));
        assert_eq!((record.events, record.operations, record.ooms), (4000, 4000, 0));
        let expected = record.pass_median_ns.max(1) as f64 * 4.0 / 4000.0;
        assert!((record.ns_per_operation - expected).abs() < 1e-6, "{} {expected}", record.ns_per_operation);
        let samples = record.alloc_samples + record.free_samples;
        let sampled = 4000 / u64::from(super::super::SAMPLED_ONE_IN);
        assert!((sampled / 2..=sampled * 2).contains(&samples), "{samples}");
        assert!(record.alloc_p50_ns <= record.alloc_p999_ns && record.alloc_p999_ns <= record.alloc_max_ns);
    }

    #[test]
    fn what_breaks_in_one_thread_is_returned_after_all_have_ended() {
        let mut broken = TraceBuilder::new();
        broken.device_sync();
        let mut copies = copies(2);
        copies.push(broken.finish("w"));
        let outcome = time_threads(&CaseLabel::default(), &copies, fresh, &replay::ReplayOptions::default(), 1);
        assert!(matches!(outcome, Err(ReplayError::Device { event: 0, .. })), "{outcome:?}");
    }

    /// Panics at its third event where it is told to; counts the events of the others.
    struct Fuse<'a> {
        lit: bool,
        seen: u32,
        by_all: &'a AtomicUsize,
    }

    impl EventSink for Fuse<'_> {}

    impl Observer for Fuse<'_> {
        fn after(&mut self, _: &ReplayMoment<'_>) {
            self.seen += 1;
            self.by_all.fetch_add(1, Ordering::Relaxed);
            assert!(!self.lit || self.seen < 3, "a panic in one thread");
        }
    }

    #[test]
    fn a_panic_in_one_thread_does_not_hang_the_others() {
        let (copies, by_all) = (copies(3), AtomicUsize::new(0));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let fuse = |number| Fuse { lit: number == 1, seen: 0, by_all: &by_all };
            shared_pass(&copies, fresh().unwrap(), &replay::ReplayOptions::default(), fuse).map(|(pass, _)| pass.events)
        }));
        assert!(outcome.is_err(), "the panic is passed on");
        assert_eq!(by_all.into_inner(), 2 * 1000 + 3, "the others ran to their end");
    }
}
