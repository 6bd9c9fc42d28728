//! Wall-clock times of cases that are marked timed and run alone. These numbers differ from run to run, so they go to
//! `timings.csv` and nowhere else.
//!
//! Throughput comes from passes without an observer. Percentiles come from one more pass in which some operations are
//! timed. Reading the clock costs as much as a cache hit, so that pass is slower; the cost of reading the clock is
//! measured and stated beside the percentiles, which still contain it.
//!
//! Passes of one process are not independent: they share its heap, its addresses and the state of the machine. So a case
//! is timed in rounds, each in a new process, and [`TimingRecord::of_rounds`] makes one row of them. The figure of a
//! round is its fastest pass: other work on the machine only ever makes a pass slower. Where one thread computes and waits
//! for nothing, on a simulated device, that is the CPU time of the thread: it leaves out the time in which the system lets
//! others run. Before every pass a fixed piece of work is timed too, which says how fast the machine itself was.
//!
//! In [`time`] one thread uses the strategy alone. In [`time_threads`] several threads, each with a copy of the trace,
//! share one strategy and its device under one lock, as in PyTorch. Every thread runs the same loop on its own view
//! ([`LockedStrategy::share`]). What a thread measures stays on its own stack until all have ended, so that threads meet only at
//! the lock.

use std::{
    collections::BTreeMap,
    hint::black_box,
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
    device::{Device, DeviceClock},
    replay::{
        self, FailedRequest, LiveBlock, Observer, OpenedAllocator, ReplayError, ReplayMoment, ReplayOutcome, replay,
    },
    strategy::{
        Context, EventSink, Freed, Outcome, Silent, Strategy,
        wrap::{LockedStrategy, RelayedFrees},
    },
    trace::{Op, Source, Trace, TraceError},
};

/// How often the clock is read to find out what reading it costs.
const TIMER_READINGS: usize = 1001;

oomph_base::named_enum! {
    /// How the threads of a timing share the strategy.
    #[derive(Default)]
    pub enum ThreadSharing {
        /// One strategy behind one lock; each thread frees its own blocks.
        #[default]
        Locked = "locked",
        /// The same, and every block is freed by the next thread, as in the benchmarks larson and xmalloc-test.
        Relayed = "relayed",
        /// A strategy and a device for each thread, without a lock: what a shared lock costs is the difference.
        Own = "own",
    }
}

impl ThreadSharing {
    /// Whether this is what a suite gets that says nothing.
    pub(crate) fn is_default(&self) -> bool {
        *self == ThreadSharing::default()
    }
}

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
    /// Threads, each with a copy of the trace; empty where one thread had the strategy for itself, without a lock.
    pub threads: Option<u16>,
    /// How the threads shared the strategy; empty without threads.
    pub sharing: Option<ThreadSharing>,
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
    /// Processes that the passes ran in, one after the other; empty in rows of an older oomph.
    pub rounds: Option<u32>,
    /// The fastest pass of each round, in CPU time where one thread runs on a simulated device, with spaces between. See
    /// [`rounds_ns`](TimingRecord::rounds_ns).
    pub round_ns: String,
    /// How long the fixed piece of work took before each pass, with spaces between.
    pub reference_ns: String,
    /// Standard deviation of the rounds as a share of their mean; empty with one round.
    #[serde(serialize_with = "digits::optional")]
    pub round_spread_share: Option<f64>,

    /// The commit of the program that measured the row; set by run folders.
    pub commit: String,
    /// The device on which the row was measured, as it calls itself; set by run folders.
    pub device_name: String,
    /// When the process that measured the row began; set by run folders, and not on a simulated device.
    pub run_started: String,
}

/// How many passes a round has: at least some, and more of them while they are short.
#[derive(Clone, Copy, Debug)]
pub struct PassBudget {
    /// At least so many.
    pub least: u32,
    /// At most so many.
    pub most: u32,
    /// No more than the least number once all passes together took this long.
    pub enough: Nanos,
}

impl PassBudget {
    /// Exactly this number, at least one.
    pub const fn exactly(passes: u32) -> PassBudget {
        PassBudget { least: passes, most: passes, enough: Nanos(0) }
    }

    /// Passes and the reference before each of them, until the budget is spent.
    fn spend(self, mut pass: impl FnMut() -> Result<Pass, ReplayError>) -> Result<(Vec<Pass>, Vec<u64>), ReplayError> {
        let (mut passes, mut references, mut taken) = (Vec::new(), Vec::new(), 0);
        loop {
            let done = passes.len() as u32;
            if done >= self.most.max(1) || (done >= self.least.max(1) && taken >= self.enough.0) {
                return Ok((passes, references));
            }
            references.push(reference_work().0);
            let one = pass()?;
            taken += one.wall.0;
            passes.push(one);
        }
    }
}

/// Says when the next pass begins: it gets the time of the last one, and returns whether there is another.
pub type PassTurn<'a> = &'a mut dyn FnMut(Option<Nanos>) -> bool;

/// Times a case pass by pass, whenever it is its turn. The first pass is not reported: it fills caches.
pub fn time_in_turns(
    source: &dyn Source,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    turn: PassTurn<'_>,
) -> Result<(), ReplayError> {
    in_turns(|| pass(source, make()?, options, &mut Silent), turn)
}

/// The same with a thread for each of the `copies`.
pub fn time_threads_in_turns(
    copies: &[Trace],
    sharing: ThreadSharing,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    turn: PassTurn<'_>,
) -> Result<(), ReplayError> {
    in_turns(|| Ok(threads_pass(copies, sharing, &mut make, options, |_| Silent)?.0), turn)
}

fn in_turns(mut pass: impl FnMut() -> Result<Pass, ReplayError>, turn: PassTurn<'_>) -> Result<(), ReplayError> {
    pass()?;
    let mut last = None;
    while turn(last) {
        last = Some(pass()?.busy);
    }
    Ok(())
}

/// Operations of the reference: about a tenth of a millisecond.
const REFERENCE_STEPS: u64 = 2_000;

/// Times a fixed piece of work: searches, insertions and removals in a tree of about 1,000 entries, as allocators do
/// them. It uses no code of a strategy, so its time changes with the machine only.
fn reference_work() -> Nanos {
    let stopwatch = Stopwatch::start(true);
    let (mut tree, mut state) = (BTreeMap::new(), 1_u64);
    for step in 0..REFERENCE_STEPS {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = state >> 54;
        if tree.remove(&key).is_none() {
            tree.insert(key, step);
        }
    }
    black_box(&tree);
    stopwatch.busy()
}

/// Times a case: passes without an observer (at least one), then a sampled one, each on a fresh strategy and
/// device from `make`. A source in memory keeps the cost of generating or parsing out of the figures.
pub fn time(
    label: &CaseLabel,
    source: &dyn Source,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    budget: PassBudget,
) -> Result<TimingRecord, ReplayError> {
    let round = budget.spend(|| pass(source, make()?, options, &mut Silent))?;
    let mut sampler = LatencySampler::default();
    pass(source, make()?, options, &mut sampler)?;
    Ok(TimingRecord::new(label, None, round, &sampler))
}

impl TimingRecord {
    /// The time of every unobserved pass, in order; empty if unknown.
    #[must_use]
    pub fn passes_ns(&self) -> Vec<u64> {
        numbers(&self.pass_ns)
    }

    /// The fastest pass of every round, in order. A row of an older oomph has one round: its passes ran in one process.
    #[must_use]
    pub fn rounds_ns(&self) -> Vec<u64> {
        match self.rounds {
            Some(_) => numbers(&self.round_ns),
            None => self.passes_ns().into_iter().min().into_iter().collect(),
        }
    }

    /// The time of the reference before every pass, in order; empty in a row of an older oomph.
    #[must_use]
    pub fn references_ns(&self) -> Vec<u64> {
        numbers(&self.reference_ns)
    }

    /// One row from the rows of rounds of the same case, at least one. Percentiles are those of the first round.
    #[must_use]
    pub fn of_rounds(rounds: Vec<TimingRecord>) -> Option<TimingRecord> {
        let of_all = |of: fn(&TimingRecord) -> Vec<u64>| rounds.iter().flat_map(of).collect::<Vec<u64>>();
        let (mut passes, fastest) = (of_all(TimingRecord::passes_ns), of_all(TimingRecord::rounds_ns));
        let references = of_all(TimingRecord::references_ns);
        let mut whole = rounds.into_iter().next()?;
        whole.pass_ns = joined(&passes);
        whole.passes = passes.len() as u32;
        passes.sort_unstable();
        let (Some(&min), Some(&median), Some(&max)) = (passes.first(), passes.get(passes.len() / 2), passes.last())
        else {
            return Some(whole);
        };
        (whole.pass_min_ns, whole.pass_median_ns, whole.pass_max_ns) = (min, median, max);
        whole.set_rates();
        whole.rounds = Some(fastest.len() as u32);
        whole.round_ns = joined(&fastest);
        whole.reference_ns = joined(&references);
        whole.round_spread_share = spread_share(&fastest);
        Some(whole)
    }

    /// Operations per second and time per operation, from the median pass.
    fn set_rates(&mut self) {
        let (wall, operations) = (self.pass_median_ns.max(1) as f64, self.operations as f64);
        self.operations_per_second = operations * 1e9 / wall;
        self.ns_per_operation = wall * f64::from(self.threads.unwrap_or(1)) / operations.max(1.0);
    }

    /// The row of a case, from its passes (at least one) with the reference, and what was sampled.
    fn new(
        label: &CaseLabel,
        threads: Option<(u16, ThreadSharing)>,
        (mut unwatched, references): (Vec<Pass>, Vec<u64>),
        sampler: &LatencySampler,
    ) -> TimingRecord {
        let pass_ns: Vec<u64> = unwatched.iter().map(|pass| pass.wall.0).collect();
        unwatched.sort_by_key(|pass| pass.wall);
        let median = unwatched[unwatched.len() / 2];
        let quantile = |durations: &Durations, share| durations.quantile(share).map(|time: Nanos| time.0);
        let mut record = TimingRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            threads: threads.map(|(count, _)| count),
            sharing: threads.map(|(_, sharing)| sharing),
            clock: Some(DeviceClock::Wall),
            passes: unwatched.len() as u32,
            events: median.events,
            operations: median.operations,
            ooms: median.ooms,
            pass_min_ns: unwatched[0].wall.0,
            pass_median_ns: median.wall.0,
            pass_max_ns: unwatched[unwatched.len() - 1].wall.0,
            pass_ns: joined(&pass_ns),
            operations_per_second: 0.0,
            ns_per_operation: 0.0,
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
            rounds: Some(1),
            round_ns: unwatched.iter().map(|pass| pass.busy.0).min().unwrap_or(0).to_string(),
            reference_ns: joined(&references),
            round_spread_share: None,
            ..TimingRecord::default()
        };
        record.set_rates();
        record
    }
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

fn joined(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

/// The standard deviation as a share of the mean; `None` for fewer than two numbers.
fn spread_share(times: &[u64]) -> Option<f64> {
    let count = times.len() as f64;
    let mean = times.iter().sum::<u64>() as f64 / count;
    let squares: f64 = times.iter().map(|&time| (time as f64 - mean).powi(2)).sum();
    (times.len() > 1 && mean > 0.0).then(|| (squares / (count - 1.0)).sqrt() / mean)
}

/// One pass, by one thread or by several.
#[derive(Clone, Copy)]
struct Pass {
    wall: Nanos,
    /// CPU time, or the same.
    busy: Nanos,
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
    // A real device is waited for.
    let stopwatch = Stopwatch::start(opened.device.props().clock == DeviceClock::Virtual);
    let replayed = opened.replay(source, options, observer)?;
    let (busy, wall) = (stopwatch.busy(), elapsed(stopwatch.began));
    let stats = opened.strategy.stats();
    let operations = stats.allocs + stats.frees;
    opened.close(replayed.events, &mut Silent)?;
    Ok(Pass { wall, busy, events: replayed.events, ooms: replayed.ooms, operations })
}

/// Both clocks since a moment.
struct Stopwatch {
    began: Instant,
    thread_time: Option<Nanos>,
}

impl Stopwatch {
    /// Without `computes`, wall-clock time is all there is.
    fn start(computes: bool) -> Stopwatch {
        Stopwatch { thread_time: if computes { thread_time() } else { None }, began: Instant::now() }
    }

    /// CPU time of this thread, or else wall-clock time.
    fn busy(&self) -> Nanos {
        match (self.thread_time, thread_time()) {
            (Some(began), Some(now)) => Nanos(now.0.saturating_sub(began.0)),
            _ => elapsed(self.began),
        }
    }
}

/// CPU time of this thread so far, where the system tells.
#[cfg(unix)]
fn thread_time() -> Option<Nanos> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Some(Nanos(u64::try_from(time.tv_sec).ok()? * 1_000_000_000 + u64::try_from(time.tv_nsec).ok()?))
}

#[cfg(not(unix))]
fn thread_time() -> Option<Nanos> {
    None
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
    sharing: ThreadSharing,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    budget: PassBudget,
) -> Result<TimingRecord, ReplayError> {
    let round = budget.spend(|| Ok(threads_pass(copies, sharing, &mut make, options, |_| Silent)?.0))?;
    let (_, samplers) = threads_pass(copies, sharing, &mut make, options, LatencySampler::numbered)?;
    let mut sampler = LatencySampler::default();
    samplers.iter().for_each(|one| sampler.absorb(one));
    Ok(TimingRecord::new(label, Some((copies.len() as u16, sharing)), round, &sampler))
}

/// One thread's part of a pass.
struct ThreadRun<O> {
    began: Instant,
    ended: Instant,
    replayed: ReplayOutcome,
    observer: O,
}

impl<O: Observer> ThreadRun<O> {
    fn new(
        copy: &Trace,
        strategy: &mut dyn Strategy,
        device: &mut dyn Device,
        options: &replay::ReplayOptions<'_>,
        mut observer: O,
    ) -> Result<ThreadRun<O>, ReplayError> {
        let began = Instant::now();
        let replayed = replay(copy, strategy, device, options, &mut observer)?;
        Ok(ThreadRun { began, ended: Instant::now(), replayed, observer })
    }
}

/// One pass of all threads, and those who watched it.
fn threads_pass<O: Observer + Send>(
    copies: &[Trace],
    sharing: ThreadSharing,
    make: &mut dyn FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> Result<(Pass, Vec<O>), ReplayError> {
    let (runs, operations) = match sharing {
        ThreadSharing::Own => separate_runs(copies, make, options, observer)?,
        ThreadSharing::Locked => shared_runs(copies, false, make()?, options, observer)?,
        ThreadSharing::Relayed => shared_runs(copies, true, make()?, options, observer)?,
    };
    let (first, last) = (runs.iter().map(|run| run.began).min(), runs.iter().map(|run| run.ended).max());
    let wall = first.zip(last).map(|(first, last)| elapsed_between(first, last)).unwrap_or_default();
    let pass = Pass {
        wall,
        busy: wall,
        events: runs.iter().map(|run| run.replayed.events).sum(),
        ooms: runs.iter().map(|run| run.replayed.ooms).sum(),
        operations,
    };
    Ok((pass, runs.into_iter().map(|run| run.observer).collect()))
}

/// What all threads did, and the operations in all.
type ThreadRuns<O> = Result<(Vec<ThreadRun<O>>, u64), ReplayError>;

/// Closes a strategy and counts its operations.
fn close(strategy: &mut dyn Strategy, cx: &mut Context<'_>) -> Result<u64, ReplayError> {
    let stats = strategy.stats();
    let operations = stats.allocs + stats.frees;
    strategy.close(cx).map_err(|source| ReplayError::Strategy { event: operations, source })?;
    Ok(operations)
}

/// All threads use one strategy behind a lock. With `relays` each block is freed by the next thread.
fn shared_runs<O: Observer + Send>(
    copies: &[Trace],
    relays: bool,
    OpenedAllocator { strategy, mut device, .. }: OpenedAllocator,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> ThreadRuns<O> {
    // All threads use the same streams: they are made once, and before the clock starts.
    let streams = copies.iter().map(|copy| copy.tables.streams()).max_by_key(|streams| streams.len());
    let known_as = streams.and_then(|streams| streams.get(1..)).unwrap_or_default();
    for &handle in known_as {
        device.stream_create(handle).map_err(|source| ReplayError::Device { event: 0, source })?;
    }
    let locked = LockedStrategy::new(strategy, device, Silent);
    let (views, devices): (Vec<_>, Vec<_>) = copies.iter().map(|_| locked.share(known_as.len() as u16)).unzip();
    let parts = copies.iter().zip(devices).zip((0..).map(observer));
    let runs = if relays {
        let parts = parts.zip(RelayedFrees::ring(views));
        run_together(parts.map(|(((copy, mut device), observer), mut view)| {
            move || {
                let mut run = ThreadRun::new(copy, &mut view, &mut device, options, observer)?;
                let finished = view.finish(&mut Context { device: &mut device, sink: &mut Silent });
                finished.map_err(|source| ReplayError::Strategy { event: run.replayed.events, source })?;
                run.ended = Instant::now();
                Ok(run)
            }
        }))?
    } else {
        run_together(parts.zip(views).map(|(((copy, mut device), observer), mut view)| {
            move || ThreadRun::new(copy, &mut view, &mut device, options, observer)
        }))?
    };
    let operations = locked.with(|strategy, cx| close(&mut **strategy, cx))?;
    Ok((runs, operations))
}

/// Each thread uses a strategy and a device of its own.
fn separate_runs<O: Observer + Send>(
    copies: &[Trace],
    make: &mut dyn FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    observer: impl Fn(u64) -> O,
) -> ThreadRuns<O> {
    let mut opened = copies.iter().map(|_| make()).collect::<Result<Vec<OpenedAllocator>, ReplayError>>()?;
    let parts = copies.iter().zip(&mut opened).zip((0..).map(observer));
    let runs = run_together(parts.map(|((copy, own), observer)| {
        move || ThreadRun::new(copy, &mut *own.strategy, &mut *own.device, options, observer)
    }))?;
    let mut operations = 0;
    for OpenedAllocator { strategy, device, .. } in &mut opened {
        operations += close(&mut **strategy, &mut Context { device: &mut **device, sink: &mut Silent })?;
    }
    Ok((runs, operations))
}

/// Starts a thread for each job, lets all go at once and waits for the last.
fn run_together<T: Send>(
    jobs: impl Iterator<Item: FnOnce() -> Result<T, ReplayError> + Send>,
) -> Result<Vec<T>, ReplayError> {
    let (gate, waiting) = (RwLock::new(()), AtomicUsize::new(0));
    thread::scope(|scope| {
        // Closed by a guard, so that it opens on every way out: a thread that could not be started, or a panic here,
        // must not leave the others waiting for ever.
        let closed = gate.write();
        let mut threads = Vec::new();
        for job in jobs {
            let (gate, waiting) = (&gate, &waiting);
            threads.push(scope.spawn(move || {
                waiting.fetch_add(1, Ordering::Relaxed);
                drop(gate.read());
                job()
            }));
        }
        while waiting.load(Ordering::Relaxed) < threads.len() {
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
        let budget = PassBudget::exactly(3);
        let record = time(&label, &builder.finish("w"), make, &replay::ReplayOptions::default(), budget).unwrap();
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
        assert_eq!((record.rounds, record.rounds_ns().len()), (Some(1), 1));
        assert_eq!(record.references_ns().len(), 3, "one before each pass");
    }

    #[test]
    fn short_passes_are_repeated_within_the_budget() {
        let passes_of = |wall_ns: u64, budget: PassBudget| {
            let one = Pass { wall: Nanos(wall_ns), busy: Nanos(wall_ns), events: 1, ooms: 0, operations: 1 };
            budget.spend(|| Ok(one)).unwrap().0.len()
        };
        let budget = PassBudget { least: 5, most: 40, enough: Nanos(1000) };
        assert_eq!([1, 100, 500].map(|wall_ns| passes_of(wall_ns, budget)), [40, 10, 5]);
        assert_eq!(passes_of(1, PassBudget::exactly(0)), 1, "at least one");
    }

    #[test]
    fn rounds_become_one_row() {
        let round = |passes: &[u64], reference: u64| TimingRecord {
            pass_ns: joined(passes),
            operations: 1000,
            rounds: Some(1),
            round_ns: passes.iter().min().unwrap().to_string(),
            reference_ns: reference.to_string(),
            alloc_p50_ns: Some(reference),
            ..TimingRecord::default()
        };
        let whole = TimingRecord::of_rounds(vec![round(&[300, 100], 7), round(&[200, 500, 400], 8)]).unwrap();
        assert_eq!((whole.passes, whole.pass_min_ns, whole.pass_median_ns, whole.pass_max_ns), (5, 100, 300, 500));
        assert_eq!((whole.rounds, whole.rounds_ns(), whole.references_ns()), (Some(2), vec![100, 200], vec![7, 8]));
        assert!((whole.round_spread_share.unwrap() - 50.0 * 2.0_f64.sqrt() / 150.0).abs() < 1e-12);
        assert_eq!((whole.ns_per_operation, whole.alloc_p50_ns), (0.3, Some(7)));
        let older = TimingRecord { pass_ns: "9 8".to_owned(), ..TimingRecord::default() };
        assert_eq!(older.rounds_ns(), [8], "passes of one process are one round");
    }

    #[test]
    fn error_in_a_pass_is_returned() {
        let mut builder = TraceBuilder::new();
        builder.device_sync();
        let (options, budget) = (replay::ReplayOptions::default(), PassBudget::exactly(1));
        let outcome = time(&CaseLabel::default(), &builder.finish("w"), fresh, &options, budget);
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
    fn every_kind_of_sharing_does_the_same_work() {
        let (label, copies) = (CaseLabel::default(), copies(3));
        for sharing in ThreadSharing::ALL {
            let made = std::cell::Cell::new(0);
            let make = || {
                made.set(made.get() + 1);
                fresh()
            };
            let options = replay::ReplayOptions::default();
            let record = time_threads(&label, &copies, sharing, make, &options, PassBudget::exactly(2)).unwrap();
            assert_eq!((record.threads, record.sharing), (Some(3), Some(sharing)));
            assert_eq!((record.events, record.operations, record.ooms), (3000, 3000, 0), "{sharing}");
            let passes = made.get() / if sharing == ThreadSharing::Own { 3 } else { 1 };
            assert!(passes >= 3 && made.get() % passes == 0, "{sharing}: {}", made.get());
        }
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
        let budget = PassBudget::exactly(3);
        let record =
            time_threads(&label, &copies, ThreadSharing::Locked, make, &replay::ReplayOptions::default(), budget)
                .unwrap();
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
        let (options, budget) = (replay::ReplayOptions::default(), PassBudget::exactly(1));
        let outcome = time_threads(&CaseLabel::default(), &copies, ThreadSharing::Locked, fresh, &options, budget);
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
        let copies = copies(3);
        for sharing in ThreadSharing::ALL {
            let by_all = AtomicUsize::new(0);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let fuse = |number| Fuse { lit: number == 1, seen: 0, by_all: &by_all };
                let options = replay::ReplayOptions::default();
                threads_pass(&copies, sharing, &mut fresh, &options, fuse).map(|(pass, _)| pass.events)
            }));
            assert!(outcome.is_err(), "the panic is passed on");
            assert_eq!(by_all.into_inner(), 2 * 1000 + 3, "{sharing}: the others ran to their end");
        }
    }
}
