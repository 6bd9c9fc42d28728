//! Wall-clock times of cases that are marked timed and run alone. These numbers differ from run to run, so they go to
//! `timings.csv` and nowhere else.
//!
//! Throughput comes from passes without an observer. Percentiles come from one more pass in which some operations are
//! timed. Reading the clock costs as much as a cache hit, so that pass is slower; the cost of reading the clock is
//! measured and stated beside the percentiles, which still contain it.
//!
//! In [`time`] one thread uses the strategy alone. In [`time_threads`] several threads, each with a copy of the trace,
//! share one strategy and its device under one lock, as in PyTorch. Every thread runs the same loop on its own view
//! ([`LockedStrategy::share`]). What a thread measures stays on its own stack until all have ended, so that threads meet only at
//! the lock.

use std::{
    panic::resume_unwind,
    sync::{
        Arc, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{CaseLabel, SCHEMA, digits, latency::Durations};
use crate::{
    base::{Nanos, ThreadId},
    device::DeviceClock,
    replay::{
        self, FailedRequest, LiveBlock, Observer, OpenedAllocator, ReplayError, ReplayMoment, ReplayOutcome, replay,
    },
    strategy::{EventSink, Freed, Outcome, Silent, Strategy, wrap::LockedStrategy},
    trace::{Op, Source, Trace, TraceError},
};

/// How often the clock is read to find out what reading it costs.
const TIMER_READINGS: usize = 1001;

/// One row of `timings.csv`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimingRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// See [`CaseLabel::suite`].
    pub suite: String,
    /// See [`CaseLabel::workload`].
    pub workload: String,
    /// See [`CaseLabel::strategy`].
    pub strategy: String,
    /// See [`CaseLabel::device`].
    pub device: String,
    /// Threads that shared the strategy under one lock, each with a copy of the trace; empty where one thread had it
    /// for itself, without that lock.
    pub threads: Option<u16>,
    /// Always the wall clock.
    pub clock: Option<DeviceClock>,
    /// Passes without an observer.
    pub passes: u32,
    /// Events of one pass, those of all threads together.
    pub events: u64,
    /// Allocations served and blocks given back in one pass, by all threads together.
    pub operations: u64,
    /// Requests that failed in one pass.
    pub ooms: u64,
    /// The fastest pass.
    pub pass_min_ns: u64,
    /// The median pass.
    pub pass_median_ns: u64,
    /// The slowest pass.
    pub pass_max_ns: u64,
    /// Every pass, in the order they ran, with spaces between: what `compare` tests. See
    /// [`passes_ns`](TimingRecord::passes_ns).
    pub pass_ns: String,
    /// In the median pass, all threads together; reading the source is part of it.
    #[serde(serialize_with = "digits::required")]
    pub operations_per_second: f64,
    /// What an operation takes from the side of the thread that asks for it, waiting for the lock included: the median
    /// pass times the number of threads, divided by the operations.
    #[serde(serialize_with = "digits::required")]
    pub ns_per_operation: f64,
    /// One operation in this many was timed in the sampled pass.
    pub sampled_one_in: u32,
    /// What the percentiles contain of reading the clock.
    pub timer_ns: u64,
    /// Timed requests.
    pub alloc_samples: u64,
    /// Median.
    pub alloc_p50_ns: Option<u64>,
    /// 90th percentile.
    pub alloc_p90_ns: Option<u64>,
    /// 99th percentile.
    pub alloc_p99_ns: Option<u64>,
    /// 99.9th percentile.
    pub alloc_p999_ns: Option<u64>,
    /// Longest.
    pub alloc_max_ns: Option<u64>,
    /// Timed frees.
    pub free_samples: u64,
    /// Median.
    pub free_p50_ns: Option<u64>,
    /// 90th percentile.
    pub free_p90_ns: Option<u64>,
    /// 99th percentile.
    pub free_p99_ns: Option<u64>,
    /// 99.9th percentile.
    pub free_p999_ns: Option<u64>,
    /// Longest.
    pub free_max_ns: Option<u64>,
}

/// Times a case: `passes` passes without an observer (at least one), then a sampled one, each on a fresh strategy and
/// device from `make`. A source in memory keeps the cost of generating or parsing out of the figures.
pub fn time(
    label: &CaseLabel,
    source: &dyn Source,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    passes: u32,
) -> Result<TimingRecord, ReplayError> {
    let mut unwatched = Vec::new();
    for _ in 0..passes.max(1) {
        unwatched.push(pass(source, make()?, options, &mut Silent)?);
    }
    let mut sampler = LatencySampler::default();
    pass(source, make()?, options, &mut sampler)?;
    Ok(TimingRecord::new(label, None, unwatched, &sampler))
}

impl TimingRecord {
    /// The time of every unobserved pass, in order; empty if unknown.
    #[must_use]
    pub fn passes_ns(&self) -> Vec<u64> {
        self.pass_ns.split_whitespace().filter_map(|pass| pass.parse().ok()).collect()
    }

    /// The row of a case, from its passes (at least one) and what was sampled.
    fn new(
        label: &CaseLabel,
        threads: Option<u16>,
        mut unwatched: Vec<Pass>,
        sampler: &LatencySampler,
    ) -> TimingRecord {
        let pass_ns: Vec<String> = unwatched.iter().map(|pass| pass.wall.0.to_string()).collect();
        unwatched.sort_by_key(|pass| pass.wall);
        let median = unwatched[unwatched.len() / 2];
        let (wall, operations) = (median.wall.0.max(1) as f64, median.operations as f64);
        let quantile = |durations: &Durations, share| durations.quantile(share).map(|time: Nanos| time.0);
        TimingRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            threads,
            clock: Some(DeviceClock::Wall),
            passes: unwatched.len() as u32,
            events: median.events,
            operations: median.operations,
            ooms: median.ooms,
            pass_min_ns: unwatched[0].wall.0,
            pass_median_ns: median.wall.0,
            pass_max_ns: unwatched[unwatched.len() - 1].wall.0,
            pass_ns: pass_ns.join(" "),
            operations_per_second: operations * 1e9 / wall,
            ns_per_operation: wall * f64::from(threads.unwrap_or(1)) / operations.max(1.0),
            sampled_one_in: SAMPLED_ONE_IN,
            timer_ns: timer_cost().0,
            alloc_samples: sampler.allocs.count(),
            alloc_p50_ns: quantile(&sampler.allocs, 0.5),
            alloc_p90_ns: quantile(&sampler.allocs, 0.9),
            alloc_p99_ns: quantile(&sampler.allocs, 0.99),
            alloc_p999_ns: quantile(&sampler.allocs, 0.999),
            alloc_max_ns: sampler.allocs.max().map(|time| time.0),
            free_samples: sampler.frees.count(),
            free_p50_ns: quantile(&sampler.frees, 0.5),
            free_p90_ns: quantile(&sampler.frees, 0.9),
            free_p99_ns: quantile(&sampler.frees, 0.99),
            free_p999_ns: quantile(&sampler.frees, 0.999),
            free_max_ns: sampler.frees.max().map(|time| time.0),
        }
    }
}

/// One pass, by one thread or by several.
#[derive(Clone, Copy)]
struct Pass {
    wall: Nanos,
    events: u64,
    ooms: u64,
    operations: u64,
}

fn pass<O: Observer>(
    source: &dyn Source,
    mut opened: OpenedAllocator,
    options: &replay::ReplayOptions<'_>,
    observer: &mut O,
) -> Result<Pass, ReplayError> {
    let began = Instant::now();
    let replayed = opened.replay(source, options, observer)?;
    let wall = elapsed(began);
    let stats = opened.strategy.stats();
    let operations = stats.allocs + stats.frees;
    opened.close(replayed.events, &mut Silent)?;
    Ok(Pass { wall, events: replayed.events, ooms: replayed.ooms, operations })
}

fn elapsed(since: Instant) -> Nanos {
    elapsed_between(since, Instant::now())
}

fn elapsed_between(begin: Instant, end: Instant) -> Nanos {
    Nanos(u64::try_from(end.saturating_duration_since(begin).as_nanos()).unwrap_or(u64::MAX))
}

/// The median of what two readings of the clock in a row show.
fn timer_cost() -> Nanos {
    let mut readings: Vec<Nanos> = (0..TIMER_READINGS).map(|_| elapsed(Instant::now())).collect();
    readings.sort_unstable();
    readings[TIMER_READINGS / 2]
}

/// One operation in this many is timed, on average.
pub const SAMPLED_ONE_IN: u32 = 16;

/// Times some operations. The gaps between them are irregular, so that a workload with a period of its own is not met
/// at the same place every time.
#[derive(Default)]
struct LatencySampler {
    gap: u32,
    state: u64,
    began: Option<Instant>,
    allocs: Durations,
    frees: Durations,
}

impl LatencySampler {
    /// Its neighbours' samples are not met at the same operations: every number gives other gaps.
    fn numbered(number: u64) -> LatencySampler {
        LatencySampler { state: number, ..LatencySampler::default() }
    }

    /// Adds what another sampler saw.
    fn absorb(&mut self, other: &LatencySampler) {
        self.allocs.absorb(&other.allocs);
        self.frees.absorb(&other.frees);
    }

    /// Between 1 and twice the average, from a linear congruential generator: cheap, and fair enough here.
    fn next_gap(&mut self) -> u32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (self.state >> 33) as u32 % (2 * SAMPLED_ONE_IN - 1)
    }
}

impl EventSink for LatencySampler {}

impl Observer for LatencySampler {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        if !matches!(now.event.op, Op::Alloc { .. } | Op::Free { .. }) {
            return;
        }
        if self.gap == 0 {
            self.gap = self.next_gap();
            self.began = Some(Instant::now());
        }
        self.gap -= 1;
    }

    fn served(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, _: &FailedRequest) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, _: Freed) {
        if let Some(began) = self.began.take() {
            self.frees.note(elapsed(began));
        }
    }

    fn after(&mut self, _: &ReplayMoment<'_>) {
        // A free whose block was never served: nothing happened that could be timed.
        self.began = None;
    }
}

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

/// Times a case as [`time`] does, with a thread for each of the `copies`. A pass lasts from the moment at
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
    let (_, samplers) = shared_pass(copies, make()?, options, LatencySampler::numbered)?;
    let mut sampler = LatencySampler::default();
    samplers.iter().for_each(|one| sampler.absorb(one));
    Ok(TimingRecord::new(label, Some(copies.len() as u16), unwatched, &sampler))
}

/// One thread's part of a pass.
struct ThreadRun<O> {
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
    let locked = LockedStrategy::new(strategy, device, Silent);
    let runs = run_all(copies, &locked, known_as.len() as u16, options, observer)?;

    let (first, last) = (runs.iter().map(|run| run.began).min(), runs.iter().map(|run| run.ended).max());
    let stats = locked.with(|strategy, _| strategy.stats());
    let pass = Pass {
        wall: first.zip(last).map(|(first, last)| elapsed_between(first, last)).unwrap_or_default(),
        events: runs.iter().map(|run| run.replayed.events).sum(),
        ooms: runs.iter().map(|run| run.replayed.ooms).sum(),
        operations: stats.allocs + stats.frees,
    };
    locked
        .with(|strategy, cx| strategy.close(cx))
        .map_err(|source| ReplayError::Strategy { event: pass.events, source })?;
    Ok((pass, runs.into_iter().map(|run| run.observer).collect()))
}

/// Starts a thread for each copy, lets all go at once and waits for the last.
fn run_all<S: Strategy, O: Observer + Send>(
    copies: &[Trace],
    locked: &LockedStrategy<S, Silent>,
    streams: u16,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> Result<Vec<ThreadRun<O>>, ReplayError> {
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
                Ok(ThreadRun { began, ended: Instant::now(), replayed, observer })
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
    use super::*;
    use crate::{
        base::{KIB, StreamId, TagId},
        measure::fixture::{TinyStrategy, tiny_device},
        trace::TraceBuilder,
    };

    fn fresh() -> Result<OpenedAllocator, ReplayError> {
        let (strategy, device) = (Box::new(TinyStrategy::default()), Box::new(tiny_device(64 * KIB)));
        Ok(OpenedAllocator { strategy, device, limit: None })
    }

    #[test]
    fn passes_use_new_strategies_and_sample_times() {
        let mut builder = TraceBuilder::new();
        for _ in 0..500 {
            let block = builder.alloc(100, StreamId::DEFAULT, TagId(0));
            builder.free(block);
        }
        let mut made = 0;
        let make = || {
            made += 1;
            fresh()
        };
        let label = CaseLabel { workload: "w".to_owned(), ..CaseLabel::default() };
        let record = time(&label, &builder.finish("w"), make, &replay::ReplayOptions::default(), 3).unwrap();
        assert_eq!(made, 4, "three passes for throughput, one for percentiles");
        assert_eq!((record.events, record.operations, record.ooms), (1000, 1000, 0));
        assert!(record.pass_min_ns <= record.pass_median_ns && record.pass_median_ns <= record.pass_max_ns);
        let samples = record.alloc_samples + record.free_samples;
        let expected = 1000 / u64::from(SAMPLED_ONE_IN);
        assert!((expected / 2..=expected * 2).contains(&samples), "{samples}");
        assert!(record.alloc_p50_ns <= record.alloc_p99_ns && record.alloc_p99_ns <= record.alloc_max_ns);
        assert_eq!(record.clock, Some(DeviceClock::Wall));
        let mut passes = record.passes_ns();
        passes.sort_unstable();
        assert_eq!(passes.len(), 3);
        assert_eq!((passes[0], passes[1], passes[2]), (record.pass_min_ns, record.pass_median_ns, record.pass_max_ns));
    }

    #[test]
    fn error_in_a_pass_is_returned() {
        let mut builder = TraceBuilder::new();
        builder.device_sync();
        let outcome = time(&CaseLabel::default(), &builder.finish("w"), fresh, &replay::ReplayOptions::default(), 1);
        assert!(matches!(outcome, Err(ReplayError::Device { event: 0, .. })), "{outcome:?}");
    }
}

#[cfg(test)]
mod threads_tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{
        base::{KIB, StreamId, TagId},
        measure::fixture::{TinyStrategy, tiny_device},
        replay::ReplayMoment,
        strategy::EventSink,
        trace::TraceBuilder,
    };

    fn fresh() -> Result<OpenedAllocator, ReplayError> {
        let (strategy, device) = (Box::new(TinyStrategy::default()), Box::new(tiny_device(64 * KIB)));
        Ok(OpenedAllocator { strategy, device, limit: None })
    }

    fn copies(threads: usize) -> Vec<Trace> {
        let mut builder = TraceBuilder::new();
        for _ in 0..500 {
            let block = builder.alloc(100, StreamId::DEFAULT, TagId(0));
            builder.free(block);
        }
        let copy: Arc<dyn Source> = Arc::new(builder.finish("w"));
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
        let sampled = 4000 / u64::from(SAMPLED_ONE_IN);
        assert!((sampled / 2..=sampled * 2).contains(&samples), "{samples}");
        assert!(record.alloc_p50_ns <= record.alloc_p999_ns && record.alloc_p999_ns <= record.alloc_max_ns);
    }

    #[test]
    fn thread_error_is_returned_after_all_end() {
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
