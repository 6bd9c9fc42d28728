//! `stress properties`: random programs against a strategy, with every promise checked at every
//! call. A third of the programs are played again on a driver that fails now and then.
//!
//! The first program that breaks a promise is shrunk together with its faults, and reported. A
//! program has one style (sizes of blocks, share of the memory that it fills, number of streams and
//! threads, how busy they are), so that programs reach every corner of an allocator and not only
//! the average case. The same seed and number give the same program.

use super::{CheckedRun, StressBudget, StressFailure, StressKind, StressTarget, StressVerdict, TargetError, shrink};
use crate::{
    base::{GIB, KIB, MIB, Nanos, StreamId, TagId, ThreadId, Work},
    device::{
        CallKind, CallLedger,
        wrap::{CallFailure, FaultPlan, FaultSpec},
    },
    models::SeededRandom,
    stress::checked_run::HANG,
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder, TraceEventId},
};

/// The name of this kind of stress.
const KIND: &str = "properties";

/// Its part in `stress all`: programs until the time is up.
pub(super) const STRESS: StressKind = StressKind {
    name: KIND,
    applies: |_| true,
    judge: |target, seed, budget| properties(target, &ProgramRange { first: 0, count: u64::MAX, seed }, budget),
};

/// One program in this many is played again with faults.
const ONE_WITH_FAULTS_IN: u64 = 3;
/// The most faults per program: fewer than the tries that a call gets.
const MOST_FAULTS: u64 = 3;
/// Memory unless the target sets it: little, so that it runs out.
const MEMORY_BYTES: u64 = 256 * MIB;
/// More memory, for some programs.
const LARGE_MEMORY_BYTES: u64 = 8 * GIB;
/// About as much as the largest cards have.
const LARGEST_MEMORY_BYTES: u64 = 120 * GIB;
/// Every so many programs one is long, because some faults show only after thousands of calls; one has many streams; and
/// one has many small blocks.
const ONE_SPECIAL_IN: u64 = 16;
/// The streams of a program with many: more than most tables of streams begin with.
const MANY_STREAMS: usize = 9;
/// How many blocks of a program with many are live: more than 8 bits can count.
const MANY_BLOCKS: u64 = 600;
/// How many smaller traces are tried after a failure, on a simulated and on a real device, which is
/// slower.
const SHRINKS: (usize, usize) = (5_000, 300);
/// How many earlier calls are tried for a fault.
const MOST_EARLIER_CALLS: usize = 32;

/// Which programs are played.
#[derive(Clone, Copy, Debug)]
pub struct ProgramRange {
    /// The number of the first one.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The seed of all of them.
    pub seed: u64,
}

/// Plays programs until one breaks a promise, all are played, or the time is up.
pub fn properties(target: &StressTarget, programs: &ProgramRange, budget: &StressBudget<'_>) -> StressVerdict {
    let mut verdict = StressVerdict::new(KIND, &target.strategy);
    for number in programs.first..programs.first.saturating_add(programs.count) {
        if budget.search_is_over() {
            break;
        }
        let target = &in_memory_of(target, number);
        let program = random_program(programs.seed, number, target.memory_bytes.unwrap_or(MEMORY_BYTES));
        let Some(run) = play_and_count(target, &program, &[], &mut verdict, budget) else { return verdict };
        if number % ONE_WITH_FAULTS_IN == ONE_WITH_FAULTS_IN - 1 {
            let mut random = SeededRandom::new(programs.seed, &format!("properties faults {number}"));
            let faults = faults_among(&run.calls, target.is_plugin(), &mut random);
            if play_and_count(target, &program, &faults, &mut verdict, budget).is_none() {
                return verdict;
            }
        }
    }
    if verdict.row.served == 0 && verdict.row.ooms > 0 {
        let detail = format!("none of {} requests was served", verdict.row.ooms);
        verdict.failures.push(target.failure(KIND, detail));
    }
    verdict
}

/// Some programs are played in much more memory, where sizes no longer fit into 32 bits. It costs nothing: the memory is
/// simulated.
fn in_memory_of(target: &StressTarget, number: u64) -> StressTarget {
    let memory_bytes = match number % 8 {
        3 if target.varies_memory => Some(LARGE_MEMORY_BYTES),
        7 if target.varies_memory => Some(LARGEST_MEMORY_BYTES),
        _ => target.memory_bytes,
    };
    StressTarget { memory_bytes, ..target.clone() }
}

/// Plays one trace.
pub fn play(target: &StressTarget, trace: &Trace, faults: &[FaultSpec], budget: &StressBudget<'_>) -> StressVerdict {
    let mut verdict = StressVerdict::new(KIND, &target.strategy);
    play_and_count(target, trace, faults, &mut verdict, budget);
    verdict
}

/// Plays a trace and adds the result to the verdict; `None` if nothing more is to be tried.
fn play_and_count(
    target: &StressTarget,
    trace: &Trace,
    faults: &[FaultSpec],
    verdict: &mut StressVerdict,
    budget: &StressBudget<'_>,
) -> Option<CheckedRun> {
    match run(target, trace, faults) {
        Ok(run) => {
            verdict.count(&run);
            let Some(broke) = run.broke() else { return Some(run) };
            let finding = run.findings.first().map(|finding| finding.detail.clone());
            let finding = (broke, finding.unwrap_or_default());
            verdict.failures.push(smallest(target, trace, faults, finding, budget));
            None
        }
        Err(error) => {
            verdict.skipped = Some(error.to_string());
            None
        }
    }
}

fn run(target: &StressTarget, trace: &Trace, faults: &[FaultSpec]) -> Result<CheckedRun, TargetError> {
    CheckedRun::of(target, trace, faults.iter().fold(FaultPlan::none(), |plan, fault| plan.with(*fault)))
}

/// The smallest trace, with the fewest faults, that breaks the same promise.
fn smallest(
    target: &StressTarget,
    trace: &Trace,
    faults: &[FaultSpec],
    (broke, found): (&'static str, String),
    budget: &StressBudget<'_>,
) -> StressFailure {
    let memory = target.memory_bytes.filter(|_| target.varies_memory);
    let failure = |trace: &Trace, faults: &[FaultSpec], detail: String| StressFailure {
        trace: Some(trace.clone()),
        conditions: faults
            .iter()
            .map(|fault| format!("--fail {fault}"))
            .chain(memory.map(|memory| format!("--limit {}", memory)))
            .collect(),
        ..target.failure(KIND, detail)
    };
    // Every run of a strategy of our own that hangs would leave a thread behind.
    if broke == HANG && !target.is_plugin() {
        return failure(trace, faults, found);
    }
    // Shrinking a trace that hangs tries many that hang.
    let tried = if broke == HANG { target.with_short_timeout() } else { target.clone() };
    let (small, fewer) = shrunk(&tried, trace, faults, broke, budget);
    match detail(target, &small, &fewer) {
        // With the shorter time-out a slow trace may have looked like one that hangs.
        None => failure(trace, faults, found),
        Some(detail) => failure(&small, &fewer, detail),
    }
}

/// Makes a trace and its faults smaller as long as the same promise is broken.
fn shrunk(
    target: &StressTarget,
    trace: &Trace,
    faults: &[FaultSpec],
    broke: &'static str,
    budget: &StressBudget<'_>,
) -> (Trace, Vec<FaultSpec>) {
    let over = || budget.is_over();
    let breaks =
        |trace: &Trace, faults: &[FaultSpec]| run(target, trace, faults).is_ok_and(|run| run.broke() == Some(broke));
    let mut faults = faults.to_vec();
    for place in (0..faults.len()).rev() {
        let mut fewer = faults.clone();
        fewer.remove(place);
        if breaks(trace, &fewer) {
            faults = fewer;
        }
    }
    let most_tries = if target.device.is_simulated() { SHRINKS.0 } else { SHRINKS.1 };
    let mut small = shrink(trace, &mut |trace| breaks(trace, &faults), most_tries, &over);
    // The earlier a call fails, the fewer events have to come before it.
    for place in 0..faults.len() {
        let earlier = (1..faults[place].first()).take(MOST_EARLIER_CALLS).map(|first| {
            let mut earlier = faults.clone();
            earlier[place] = faults[place].moved_to(first);
            earlier
        });
        if let Some(earlier) = earlier.into_iter().find(|earlier| !over() && breaks(&small, earlier)) {
            faults = earlier;
            small = shrink(&small, &mut |trace| breaks(trace, &faults), most_tries, &over);
        }
    }
    (small, faults)
}

/// What a trace breaks, as a sentence.
fn detail(target: &StressTarget, trace: &Trace, faults: &[FaultSpec]) -> Option<String> {
    let run = run(target, trace, faults).ok()?;
    let finding = run.findings.first()?;
    Some(match run.at_event {
        Some(event) => format!("event {event}: {}", finding.detail),
        None => finding.detail.clone(),
    })
}

/// Whether a call takes memory, so that it may report that there is none.
fn takes_memory(call: CallKind) -> bool {
    matches!(call, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync)
}

/// Chooses some of the calls that were made to fail in the next run. The functions of a plugin cannot report an error, so
/// that only memory runs out for one.
fn faults_among(calls: &CallLedger, is_plugin: bool, random: &mut SeededRandom) -> Vec<FaultSpec> {
    let made = calls.iter().map(|(call, tally)| (call, tally.count));
    let made: Vec<(CallKind, u64)> = made.filter(|&(call, _)| !is_plugin || takes_memory(call)).collect();
    if made.is_empty() {
        return Vec::new();
    }
    let mut faults: Vec<(CallKind, u64, bool)> = (0..random.between(1, MOST_FAULTS))
        .map(|_| {
            let (call, count) = made[random.index(made.len())];
            (call, random.between(1, count), takes_memory(call) && (is_plugin || random.chance(0.5)))
        })
        .collect();
    faults.sort_unstable();
    faults.dedup();
    let fault = |(call, n, out_of_memory)| {
        FaultSpec::once(call, n, if out_of_memory { CallFailure::OutOfMemory } else { CallFailure::UNKNOWN })
    };
    faults.into_iter().map(fault).collect()
}

/// Sizes at which allocators often change their behaviour. One style requests only sizes around
/// them.
const BORDERS: [u64; 9] = [256, 512, 4 * KIB, 64 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB];

/// The sizes of a program's blocks.
#[derive(Clone, Debug)]
enum SizeStyle {
    /// Up to a few KiB.
    Small,
    /// Every order of magnitude equally likely.
    Magnitudes,
    /// At [`BORDERS`], and one byte below and above.
    Borders,
    /// 1 MiB and more.
    Large,
    /// A few sizes repeated, as in training.
    Few(Vec<u64>),
}

impl SizeStyle {
    fn random(random: &mut SeededRandom, most: u64) -> SizeStyle {
        match random.between(0, 4) {
            0 => SizeStyle::Small,
            1 => SizeStyle::Magnitudes,
            2 => SizeStyle::Borders,
            3 => SizeStyle::Large,
            _ => SizeStyle::Few((0..random.between(2, 5)).map(|_| SizeStyle::Magnitudes.draw(random, most)).collect()),
        }
    }

    fn draw(&self, random: &mut SeededRandom, most: u64) -> u64 {
        let bytes = match self {
            SizeStyle::Small => random.between(1, 8 * KIB),
            SizeStyle::Magnitudes => {
                let low = 1 << random.between(0, u64::from(most.ilog2()));
                random.between(low, 2 * low - 1)
            }
            SizeStyle::Borders => BORDERS[random.index(BORDERS.len())] + random.between(0, 2) - 1,
            SizeStyle::Large => random.between(MIB, (most).max(2 * MIB)),
            SizeStyle::Few(sizes) => sizes[random.index(sizes.len())],
        };
        bytes.clamp(1, most)
    }
}

/// The program of this seed and number for this much memory.
fn random_program(seed: u64, number: u64, memory_bytes: u64) -> Trace {
    let mut random = SeededRandom::new(seed, &format!("properties {number}"));
    let mut writer = ProgramWriter::new(&mut random, memory_bytes.max(MIB));
    let events = match number % ONE_SPECIAL_IN {
        9 | 13 => random.between(2_000, 4_000),
        _ => random.between(10, 160),
    };
    match number % ONE_SPECIAL_IN {
        5 => writer.use_many_streams(),
        13 => writer.count_small_blocks(),
        _ => {}
    }
    for _ in 0..events {
        writer.next(&mut random);
    }
    if random.chance(0.5) {
        writer.wind_down(&mut random);
    }
    writer.trace.finish(&format!("properties seed {seed} program {number}"))
}

/// A program that fills a third of the memory, frees everything and waits: it can be played again and again. In every
/// second one memory runs out on the way: what a failed request leaves behind adds up.
pub(super) fn repeatable_program(seed: u64, number: u64, memory_bytes: u64) -> Trace {
    let mut random = SeededRandom::new(seed, &format!("history {number}"));
    let mut writer = ProgramWriter::new(&mut random, memory_bytes.max(MIB));
    (writer.fill, writer.most) = (memory_bytes / 3, memory_bytes / 16);
    for event in 0..REPEATABLE_EVENTS {
        writer.next(&mut random);
        if number % 2 == 1 && event % (REPEATABLE_EVENTS / 4) == 0 {
            let too_large = writer.trace.alloc(memory_bytes, StreamId::DEFAULT, TagId(0));
            writer.trace.free(too_large);
        }
    }
    writer.free_all(&mut random);
    while let Some(slot) = writer.host.pop() {
        writer.trace.host_free(slot);
    }
    writer.trace.device_sync();
    writer.trace.finish(&format!("history seed {seed} program {number}"))
}

/// Events of a repeatable program before everything is freed.
const REPEATABLE_EVENTS: u64 = 240;

/// Writes a program of one style.
struct ProgramWriter {
    trace: TraceBuilder,
    sizes: SizeStyle,
    /// The largest request.
    most: u64,
    /// How many bytes are to be live.
    fill: u64,
    streams: Vec<StreamId>,
    threads: u16,
    /// Percent of the events that keep a stream busy or use blocks on it.
    busy: u64,
    /// Percent of the events that trim, begin steps or synchronise.
    breaks: u64,
    /// Whether the cache is emptied whenever the number of live blocks is a power of two.
    trims_at_powers: bool,
    live: Vec<(BlockSlot, u64, StreamId)>,
    live_bytes: u64,
    host: Vec<BlockSlot>,
    recorded: Vec<TraceEventId>,
    steps: u32,
}

impl ProgramWriter {
    fn new(random: &mut SeededRandom, memory: u64) -> ProgramWriter {
        let most = memory / [2, 4, 8, 16][random.index(4)];
        let mut trace = TraceBuilder::new();
        let mut streams = vec![StreamId::DEFAULT];
        for _ in 0..[0, 0, 1, 2, 3][random.index(5)] {
            streams.extend(trace.new_stream());
        }
        ProgramWriter {
            trace,
            sizes: SizeStyle::random(random, most),
            most,
            // From a small part of the memory to more than all of it.
            fill: memory / 100 * [5, 30, 70, 95, 110][random.index(5)],
            streams,
            threads: [1, 1, 1, 2, 4][random.index(5)],
            busy: [0, 10, 30][random.index(3)],
            breaks: [0, 4, 12][random.index(3)],
            trims_at_powers: false,
            live: Vec::new(),
            live_bytes: 0,
            host: Vec::new(),
            recorded: Vec::new(),
            steps: 0,
        }
    }

    fn use_many_streams(&mut self) {
        while self.streams.len() < MANY_STREAMS {
            self.streams.extend(self.trace.new_stream());
        }
    }

    /// Blocks of one size on one stream, so that an allocator has them in one place and counts all of them.
    fn count_small_blocks(&mut self) {
        const BYTES: u64 = 512;
        self.streams.truncate(1);
        (self.sizes, self.fill, self.trims_at_powers) = (SizeStyle::Few(vec![BYTES]), MANY_BLOCKS * BYTES, true);
    }

    fn next(&mut self, random: &mut SeededRandom) {
        self.trace.set_thread(ThreadId(random.between(0, u64::from(self.threads) - 1) as u16));
        if random.chance(0.2) {
            self.trace.elapse(Nanos(random.between(1, 200_000)));
        }
        let kind = random.between(0, 99);
        if kind < self.busy {
            self.work(random);
        } else if kind < self.busy + self.breaks {
            self.pause(random);
        } else if self.live_bytes < self.fill && (self.live.is_empty() || random.chance(0.6)) {
            self.alloc(random);
        } else if random.chance(0.8) {
            self.free(random);
        } else {
            // Sometimes beyond the target, so that memory runs out.
            self.alloc(random);
        }
        if self.trims_at_powers && self.live.len().is_power_of_two() {
            self.trace.empty_cache();
        }
    }

    fn alloc(&mut self, random: &mut SeededRandom) {
        let bytes = self.sizes.draw(random, self.most);
        let stream = self.stream(random);
        let slot = self.trace.alloc(bytes, stream, TagId(0));
        self.live.push((slot, bytes, stream));
        self.live_bytes += bytes;
    }

    fn free(&mut self, random: &mut SeededRandom) {
        if self.live.is_empty() {
            return;
        }
        // The newest block in half of the cases, because stacks are common.
        let place = if random.chance(0.5) { self.live.len() - 1 } else { random.index(self.live.len()) };
        let (slot, bytes, home) = self.live.remove(place);
        self.live_bytes -= bytes;
        let elsewhere = self.stream(random);
        if elsewhere != home && random.chance(0.2) {
            // The program must order a free on another stream.
            let event = self.event(random);
            self.trace.event_record(event, home);
            self.trace.event_wait(event, elsewhere);
            self.trace.free_on(slot, elsewhere);
        } else {
            self.trace.free(slot);
        }
    }

    /// Keeps a stream busy, often with a block of another stream.
    fn work(&mut self, random: &mut SeededRandom) {
        let stream = self.stream(random);
        if !self.live.is_empty() && random.chance(0.7) {
            let (slot, _, home) = self.live[random.index(self.live.len())];
            if stream != home {
                self.trace.use_on(slot, stream);
            }
        }
        let most = if random.chance(0.1) { 100_000_000 } else { 2_000_000 };
        let spin = Work::Spin { nanos: Nanos(random.between(1_000, most)) };
        self.trace.work(spin, stream, &[]);
        if random.chance(0.1) {
            let (event, waiting) = (self.event(random), self.stream(random));
            self.trace.event_record(event, stream);
            self.trace.event_wait(event, waiting);
        }
    }

    fn pause(&mut self, random: &mut SeededRandom) {
        match random.between(0, 9) {
            0..=2 => self.trace.empty_cache(),
            3..=4 => {
                self.trace.mark(MarkKind::Step, "", self.steps);
                self.steps += 1;
            }
            5..=6 => {
                let stream = self.stream(random);
                self.trace.stream_sync(stream);
            }
            7 => self.trace.device_sync(),
            8 => self.host.push(self.trace.host_alloc(random.between(1, MIB))),
            _ => {
                if let Some(slot) = self.host.pop() {
                    self.trace.host_free(slot);
                }
            }
        }
    }

    /// Frees all blocks in random order.
    fn free_all(&mut self, random: &mut SeededRandom) {
        while !self.live.is_empty() {
            let (slot, ..) = self.live.swap_remove(random.index(self.live.len()));
            self.trace.free(slot);
        }
    }

    /// Frees all blocks, and then the cache.
    fn wind_down(&mut self, random: &mut SeededRandom) {
        self.free_all(random);
        if random.chance(0.5) {
            self.trace.device_sync();
        }
        self.trace.empty_cache();
        if random.chance(0.5) {
            let bytes = self.sizes.draw(random, self.most);
            self.trace.alloc(bytes, StreamId::DEFAULT, TagId(0));
        }
    }

    fn stream(&self, random: &mut SeededRandom) -> StreamId {
        self.streams[random.index(self.streams.len())]
    }

    fn event(&mut self, random: &mut SeededRandom) -> TraceEventId {
        if self.recorded.len() < 4 {
            self.recorded.push(self.trace.new_event());
        }
        self.recorded[random.index(self.recorded.len())]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        strategy::flawed::Flaw,
        trace::{Op, check},
    };

    fn target(strategy: &str) -> StressTarget {
        StressTarget::simulated(strategy, MEMORY_BYTES)
    }

    fn judged(strategy: &str, count: u64) -> StressVerdict {
        properties(&target(strategy), &ProgramRange { first: 0, count, seed: 1 }, &StressBudget::unlimited(&|| false))
    }

    /// What each flaw breaks, and the most events of its smallest trace. Programs that use an
    /// allocator correctly do not find the other flaws: forged handles, requests for 0 bytes,
    /// copies.
    const SEEDED: [(Flaw, &str, usize); 19] = [
        (Flaw::OverlappingSplit, "layout", 1),
        (Flaw::Misaligned, "alignment", 1),
        // It shows at every seventh free.
        (Flaw::LostAccounting, "books", 14),
        (Flaw::EarlyReuse, "was handed to stream", 5),
        (Flaw::StreamsMixed, "was handed to stream", 4),
        (Flaw::LeakOnClose, "after a close", 1),
        (Flaw::KeepsCache, "trimmed", 3),
        (Flaw::BooksTooEarly, "reserved", 1),
        (Flaw::ForgetsOnFailure, "no live block", 3),
        (Flaw::SilentSegments, "events", 1),
        (Flaw::FailsOnExhaustion, "out of memory", 1),
        (Flaw::BoastsOfLargestFree, "in one piece", 0),
        (Flaw::Panics, "panicked", 1),
        (Flaw::LostCoalesce, "layout", 2),
        (Flaw::LeakOnRetry, "trimmed", 2),
        (Flaw::DoubleHandOutAfterTrim, "layout", 2),
        (Flaw::RoundsDown, "size", 1),
        (Flaw::LosesSegmentOnFailure, "device still holds", 1),
        (Flaw::RemembersClose, "after a close the same program ends with other counters: reserved", 1),
    ];

    #[test]
    fn every_flaw_is_found_and_shrunk() {
        for (flaw, says, most_events) in SEEDED {
            let verdict = judged(&format!("flawed:{flaw:?}"), 60);
            let [failure] = &verdict.failures[..] else { panic!("{flaw:?}: {verdict:?}") };
            let events = &failure.trace.as_ref().unwrap().events;
            println!(
                "{flaw:?}: run {}, {} events: {failure} {:?}",
                verdict.row.trials,
                events.len(),
                failure.conditions
            );
            assert!(failure.detail.contains(says), "{flaw:?}: {failure}");
            assert!(events.len() <= most_events, "{flaw:?}: {failure}: {events:?}");
        }
    }

    /// Free chunks that fitted into no gap were once held back until memory "ran out".
    #[test]
    fn regression_held_back_chunks() {
        let once = ProgramRange { first: 360, count: 1, seed: 1 };
        assert_eq!(properties(&target("oomph"), &once, &StressBudget::unlimited(&|| false)).word(), "passed");
    }

    #[test]
    fn flawless_allocator_passes() {
        let verdict = judged("flawed:None", 60);
        assert_eq!((verdict.word(), verdict.row.trials), ("passed", 80), "{:?}", verdict.failures);
    }

    #[test]
    fn saved_failure_is_reproduced() {
        let failure = judged("flawed:ForgetsOnFailure", 60).failures.remove(0);
        let faults: Vec<FaultSpec> =
            failure.conditions.iter().map(|option| option.strip_prefix("--fail ").unwrap().parse().unwrap()).collect();
        let again = play(
            &target("flawed:ForgetsOnFailure"),
            failure.trace.as_ref().unwrap(),
            &faults,
            &StressBudget::unlimited(&|| false),
        );
        assert_eq!(again.failures[0].detail, failure.detail);
    }

    #[test]
    fn same_seed_gives_the_same_verdict() {
        let numbers = |verdict: StressVerdict| {
            (verdict.row.trials, verdict.row.events, verdict.row.ooms, verdict.row.driver_calls)
        };
        assert_eq!(numbers(judged("caching", 12)), numbers(judged("caching", 12)));
    }

    #[test]
    fn stop_and_unknown_strategy() {
        let programs = ProgramRange { first: 0, count: 10, seed: 1 };
        assert_eq!(properties(&target("caching"), &programs, &StressBudget::unlimited(&|| true)).row.trials, 0);
        let verdict = judged("no such strategy", 10);
        assert!(verdict.skipped.is_some_and(|reason| reason.contains("unknown strategy")));
    }

    #[test]
    fn programs_are_valid_and_request_at_most_half() {
        for number in 0..300 {
            for memory in [1, 20 * MIB, MEMORY_BYTES] {
                let program = random_program(7, number, memory);
                check(&program).unwrap();
                let most = program.events.iter().filter_map(|event| match event.op {
                    Op::Alloc { bytes, .. } => Some(bytes),
                    _ => None,
                });
                assert!(most.max() <= Some(memory.max(MIB) / 2), "{number}");
            }
        }
    }

    #[test]
    fn program_is_determined_by_seed_and_number() {
        assert_eq!(random_program(1, 2, MEMORY_BYTES).events, random_program(1, 2, MEMORY_BYTES).events);
        let different: BTreeSet<usize> =
            (0..20).map(|number| random_program(1, number, MEMORY_BYTES).events.len()).collect();
        assert!(different.len() > 10);
        assert_ne!(random_program(1, 2, MEMORY_BYTES).events, random_program(2, 2, MEMORY_BYTES).events);
    }

    #[test]
    fn programs_cover_all_operations() {
        let mut kinds = BTreeSet::new();
        let (mut streams, mut threads) = (0, 0);
        for number in 0..100 {
            let program = random_program(1, number, MEMORY_BYTES);
            kinds.extend(program.events.iter().map(|event| event.op.kind()));
            streams = streams.max(program.tables.streams().len());
            threads = threads.max(program.tables.threads().len());
        }
        // Collectives and idle time do not concern an allocator.
        assert_eq!((kinds.len(), streams, threads), (12, MANY_STREAMS, 4), "{kinds:?}");
    }
}
