//! Runs a case on a device, and at the same time on the answers that the device's driver gave. All decisions must be
//! the same, event by event.
//!
//! If they are, a run follows from the strategy's code and the driver's answers alone (addresses, whether events are
//! done, what fails), and a simulated run can differ only where its driver answers differently. `oomph verify --on`
//! uses this. It says nothing about how good a simulated driver is: that takes a [free run](perform) on one.

mod decision;
mod transcript;

pub use decision::{Decision, RunDifference, TracePlace};

use std::{panic::resume_unwind, thread};

use self::transcript::{TranscriptReader, transcript};
use super::{
    FailedRequest, LiveBlock, Observer, OnOutOfMemory, ReplayError, ReplayMoment, ReplayOptions, ReplayOutcome, replay,
};
use crate::{
    device::{
        Device, DeviceProps,
        wrap::{DriverCall, InterceptedDevice, ScriptedDevice},
    },
    strategy::{Context, EventSink, Freed, Outcome, Stats, Strategy, StrategyEvent},
    trace::Source,
};

/// What a run on a device left behind, and how far a second run on the same answers agrees with it.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// The run on the device.
    pub performance: CompletedRun,
    /// Events at which both runs decided the same.
    pub agreed: u64,
    /// The first difference, be it at an event or afterwards, when memory is given back.
    pub difference: Option<RunDifference>,
}

/// What a run left behind.
#[derive(Clone, Debug)]
pub struct CompletedRun {
    /// What was carried out.
    pub replayed: ReplayOutcome,
    /// The books when the cache had been emptied.
    pub stats: Stats,
    /// The strategy's own counters at that moment.
    pub details: Vec<(&'static str, u64)>,
}

/// Runs `source` on `device`, and at the same time on the driver's answers with the second strategy, which must be of
/// the same kind as the first and fresh like it.
///
/// Requests that fail are left out ([`OnOutOfMemory::Skip`]), because a run that ends with the first one proves less.
/// The error is that of the run on the device. A run that was interrupted agrees as far as it got, if at all.
///
/// ```
/// use oomph::device::{Device, sim::{SimConfig, SimDevice}};
/// use oomph::replay::{ReplayOptions, agreement::agree};
/// use oomph::strategy::{Setup, StrategySpec};
/// use oomph::trace::TraceBuilder;
/// use oomph::base::{StreamId, TagId};
/// let mut builder = TraceBuilder::new();
/// let block = builder.alloc(3 << 20, StreamId::DEFAULT, TagId(0));
/// builder.free(block);
/// let mut device = SimDevice::new(SimConfig::default())?;
/// let caching = || StrategySpec::from("caching").build(&Setup { props: device.props(), limit: None });
/// let pair = [caching()?, caching()?];
/// let agreement = agree(&builder.finish("tiny"), pair, &mut device, &ReplayOptions::default())?;
/// assert_eq!((agreement.agreed, agreement.difference), (2, None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn agree(
    source: &dyn Source,
    pair: [Box<dyn Strategy>; 2],
    device: &mut dyn Device,
    options: &ReplayOptions<'_>,
) -> Result<Agreement, ReplayError> {
    let [mut first, mut second] = pair;
    let (writer, reader) = transcript();
    let props = device.props().clone();
    let (performance, comparison) = thread::scope(|scope| {
        let comparison = scope.spawn(|| compare(source, &mut *second, props, reader, options));
        // The transcript is complete when both writers are gone.
        let mut intercepted = InterceptedDevice::new(device, writer.clone());
        let performance = perform(source, &mut *first, &mut intercepted, options, &mut DecisionObserver(writer));
        drop(intercepted);
        (performance, comparison.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let performance = performance?;
    let (DecisionChecker { agreed, difference, .. }, stats) = comparison;
    let difference = difference.or_else(|| {
        let stats = stats.filter(|stats| *stats != performance.stats)?;
        let complaint = format!("the books at the end are {:?}, then {stats:?}", performance.stats);
        Some(RunDifference::new(TracePlace::default(), &[], &[], Some(complaint)))
    });
    Ok(Agreement { performance, agreed, difference })
}

/// Runs `source` to its end and gives everything back. Requests that fail are left out.
///
/// The cache is emptied before the books are read, which also makes a strategy that leaves memory to the driver ask
/// once more how much that was.
pub fn perform<O: Observer>(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &ReplayOptions<'_>,
    observer: &mut O,
) -> Result<CompletedRun, ReplayError> {
    let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..*options };
    let replayed = replay(source, strategy, device, &options, observer)?;
    let failed = |source| ReplayError::Strategy { event: replayed.events, source };
    strategy.trim(&mut Context { device: &mut *device, sink: &mut *observer }).map_err(failed)?;
    let performance = CompletedRun { replayed, stats: strategy.stats(), details: strategy.details() };
    strategy.close(&mut Context { device, sink: observer }).map_err(failed)?;
    Ok(performance)
}

/// Receives the decisions of a run, event by event.
trait DecisionSink {
    fn event_begins(&mut self, _now: &ReplayMoment<'_>) {}
    fn decision(&mut self, decision: Decision);
    fn event_ends(&mut self);
}

/// Passes the decisions of a replay to a [`DecisionSink`].
struct DecisionObserver<S>(S);

impl<S: DecisionSink> EventSink for DecisionObserver<S> {
    fn event(&mut self, event: StrategyEvent) {
        self.0.decision(Decision::Inside(event));
    }
}

impl<S: DecisionSink> Observer for DecisionObserver<S> {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        self.0.event_begins(now);
    }

    fn served(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, outcome: Outcome) {
        self.0.decision(Decision::Served { address: live.block.address, size: live.block.size, outcome });
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, freed: Freed) {
        self.0.decision(Decision::Freed(freed));
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, report: &FailedRequest) {
        self.0.decision(Decision::Failed(report.shortage));
    }

    fn after(&mut self, _: &ReplayMoment<'_>) {
        self.0.event_ends();
    }
}

/// The run on the transcript's answers, and its books if it came to its end. It is not stopped from outside: it ends
/// when the transcript does.
fn compare(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    props: DeviceProps,
    reader: TranscriptReader,
    options: &ReplayOptions<'_>,
) -> (DecisionChecker, Option<Stats>) {
    let answers = reader.clone();
    let mut device = ScriptedDevice::following(props, move || answers.exchanges());
    let mut observer = DecisionObserver(DecisionChecker::new(reader));
    let options = ReplayOptions { stop: None, ..*options };
    let performance = perform(source, strategy, &mut device, &options, &mut observer);
    let complaint = match (&performance, device.mismatch()) {
        (_, Some(mismatch)) => Some(mismatch.to_string()),
        (Err(error), None) => Some(error.to_string()),
        (Ok(_), None) => device.next_expected().map(|call: &DriverCall| format!("nothing calls for {call:?}")),
    };
    let mut checker = observer.0;
    checker.conclude(performance.is_ok(), complaint);
    (checker, performance.ok().map(|performance| performance.stats))
}

/// Compares every decision with the transcript.
struct DecisionChecker {
    reader: TranscriptReader,
    place: TracePlace,
    /// Of the present event.
    decisions: Vec<Decision>,
    /// What the transcript says of it.
    expected: Vec<Decision>,
    /// Events at which the two runs decided the same.
    agreed: u64,
    /// The first difference.
    difference: Option<RunDifference>,
}

impl DecisionChecker {
    fn new(reader: TranscriptReader) -> DecisionChecker {
        DecisionChecker {
            reader,
            place: TracePlace::default(),
            decisions: Vec::new(),
            expected: Vec::new(),
            agreed: 0,
            difference: None,
        }
    }

    /// After the last event, or in the middle of the one that could not be carried out.
    fn conclude(&mut self, finished: bool, complaint: Option<String>) {
        let goes_on = self.reader.next_event(&mut self.expected);
        if finished || !goes_on {
            self.place = TracePlace::default();
        }
        let complaint = complaint.or((finished && goes_on).then(|| "the device's run had more events".to_owned()));
        if complaint.is_some() || self.decisions != self.expected {
            self.note_difference(complaint);
        }
    }

    fn note_difference(&mut self, complaint: Option<String>) {
        if self.difference.is_none() {
            let place = self.place.clone();
            self.difference = Some(RunDifference::new(place, &self.expected, &self.decisions, complaint));
        }
    }
}

impl DecisionSink for DecisionChecker {
    fn event_begins(&mut self, now: &ReplayMoment<'_>) {
        self.place.reach(now);
    }

    fn decision(&mut self, decision: Decision) {
        self.decisions.push(decision);
    }

    fn event_ends(&mut self) {
        let told = self.reader.next_event(&mut self.expected);
        if told && self.decisions == self.expected {
            self.agreed += 1;
        } else {
            let complaint = (!told).then(|| "the device's run had already ended".to_owned());
            self.note_difference(complaint);
        }
        self.decisions.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        base::{GIB, MIB, Nanos, StreamId, TagId, Work},
        device::{
            CallKind,
            sim::{SimConfig, SimDevice},
            wrap::{CallFailure, DriverAnswer, DriverReply, FaultPlan, FaultyDevice, Interceptor, LimitedDevice},
        },
        strategy::{STRATEGIES, Setup, Strategy, StrategySpec},
        trace::{MarkKind, Trace, TraceBuilder, arbitrary},
    };

    fn simulated() -> Box<dyn Device> {
        Box::new(SimDevice::new(SimConfig::default()).unwrap())
    }

    fn build(spec: &str, device: &dyn Device) -> Box<dyn Strategy> {
        StrategySpec::from(spec).build(&Setup { props: device.props(), limit: None }).unwrap()
    }

    fn agree_on(source: &Trace, first: &str, second: &str, mut device: Box<dyn Device>) -> Agreement {
        let pair = [build(first, &*device), build(second, &*device)];
        agree(source, pair, &mut *device, &ReplayOptions::default()).unwrap()
    }

    /// Two streams, deferred frees, marks, and blocks that are cut from larger ones.
    fn builder() -> Trace {
        let mut builder = TraceBuilder::new();
        let side = builder.new_stream().unwrap();
        for step in 0..20 {
            builder.mark(MarkKind::Step, "", step);
            builder.mark(MarkKind::Phase, "forward", 0);
            let shared = builder.alloc(3 * MIB + u64::from(step), StreamId::DEFAULT, TagId(0));
            builder.use_on(shared, side);
            builder.work(Work::Spin { nanos: Nanos(300_000) }, side, &[shared]);
            builder.free(shared);
            let large = builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0));
            let small = builder.alloc(700, side, TagId(0));
            builder.free(large);
            builder.free(small);
        }
        builder.finish("builder")
    }

    #[test]
    fn every_strategy_decides_the_same_on_the_same_answers() {
        for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
            let spec = spec.to_string();
            for limit in [GIB, 48 * MIB] {
                let agreement = agree_on(&builder(), &spec, &spec, Box::new(LimitedDevice::to(limit, simulated())));
                assert_eq!(agreement.difference, None, "{spec} in {limit} bytes");
                assert_eq!((agreement.agreed, agreement.performance.replayed.events), (200, 200), "{spec}");
            }
        }
    }

    #[test]
    fn failures_of_the_driver_are_answers_too() {
        let plan = FaultPlan::none().fail_every(Some(CallKind::MemAlloc), 3, CallFailure::OutOfMemory);
        for spec in ["direct", "caching"] {
            let device = Box::new(FaultyDevice::with(plan.clone(), simulated()));
            let agreement = agree_on(&builder(), spec, spec, device);
            assert_eq!(agreement.difference, None, "{spec}");
            let stats = agreement.performance.stats;
            assert!(stats.ooms + stats.retries > 0, "{spec}: the failures were noticed: {stats:?}");
        }
    }

    #[test]
    fn first_different_decision_is_found() {
        let agreement = agree_on(&builder(), "caching", "caching:large_segment_size_mb:40", simulated());
        let difference = agreement.difference.unwrap();
        assert_eq!(difference.place.event.map(|(number, _)| number), Some(2));
        assert_eq!(agreement.agreed, 2);
        let words = difference.to_string();
        for word in ["event 2, alloc of 3145728 bytes on stream 0 in step 0, forward", "Alloc { bytes: 41943040 }"] {
            assert!(words.contains(word), "{words}");
        }
    }

    #[test]
    fn different_block_choice_is_found() {
        let mut builder = TraceBuilder::new();
        // The two round this size differently, and both find room for it in one segment.
        let block = builder.alloc(1025 * 1024, StreamId::DEFAULT, TagId(0));
        builder.free(block);
        let agreement = agree_on(&builder.finish("two"), "caching", "caching:roundup_power2_divisions:4", simulated());
        assert_eq!(agreement.agreed, 1, "the free is the same");
        let words = agreement.difference.unwrap().to_string();
        assert!(words.contains("serves 1049600 bytes") && words.contains("serves 1310720 bytes"), "{words}");
    }

    /// Tells the strategy something else than the transcript.
    struct Liar {
        answers: u64,
        lie_at: u64,
    }

    impl Interceptor for Liar {
        fn after<D: Device + ?Sized>(&mut self, _: &DriverCall, answer: &mut DriverAnswer, _: &D) {
            if let Ok(DriverReply::Ready(ready)) = answer {
                self.answers += 1;
                *ready ^= self.answers == self.lie_at;
            }
        }
    }

    #[test]
    fn a_single_answer_that_was_tampered_with_is_seen() {
        let (source, options) = (builder(), ReplayOptions::default());
        for lie_at in [1, 5, 17] {
            let device = simulated();
            let [mut first, mut second] = [build("caching", &*device), build("caching", &*device)];
            let props = device.props().clone();
            let (writer, reader) = transcript();
            let honest = InterceptedDevice::new(device, writer.clone());
            let mut device = InterceptedDevice::new(Box::new(honest), Liar { answers: 0, lie_at });
            perform(&source, &mut *first, &mut device, &options, &mut DecisionObserver(writer)).unwrap();
            assert!(device.interceptor.answers >= lie_at, "fewer answers than the lie needs");
            drop(device);
            let (comparison, _) = compare(&source, &mut *second, props, reader, &options);
            assert!(comparison.difference.is_some(), "lie {lie_at}");
            assert!(comparison.agreed < 200);
        }
    }

    #[test]
    fn a_call_that_is_left_out_at_the_end_is_seen() {
        let (source, options) = (builder(), ReplayOptions::default());
        let device = simulated();
        let [mut first, mut second] = [build("caching", &*device), build("caching", &*device)];
        let props = device.props().clone();
        let (writer, reader) = transcript();
        let mut device = InterceptedDevice::new(device, writer.clone());
        perform(&source, &mut *first, &mut device, &options, &mut DecisionObserver(writer)).unwrap();
        device.synchronize().unwrap();
        drop(device);
        let (comparison, _) = compare(&source, &mut *second, props, reader, &options);
        let words = comparison.difference.unwrap().to_string();
        assert_eq!(comparison.agreed, 200);
        assert!(
            words.starts_with("after the last event") && words.contains("nothing calls for Synchronize"),
            "{words}"
        );
    }

    proptest! {
        #[test]
        fn any_story_is_decided_the_same_twice(
            builder in arbitrary::traces(150),
            spec in prop::sample::select(vec!["direct", "caching", "caching:expandable_segments:True", "async"]),
            limit in prop::option::of(1u64..2000),
        ) {
            let mut device = simulated();
            if let Some(limit) = limit {
                device = Box::new(LimitedDevice::to(limit * MIB, device));
            }
            let pair = [build(spec, &*device), build(spec, &*device)];
            // Pinned memory that is not there ends a replay; nothing is to be compared then.
            if let Ok(agreement) = agree(&builder, pair, &mut *device, &ReplayOptions::default()) {
                prop_assert_eq!(agreement.difference, None);
                prop_assert_eq!(agreement.agreed, agreement.performance.replayed.events);
                prop_assert_eq!(device.held_bytes(), 0);
            }
        }
    }
}
