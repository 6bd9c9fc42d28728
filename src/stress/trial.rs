//! One trace played through one strategy, with everything that it promises looked at on the way.
//!
//! The strategy runs under [`Watch`]: blocks, handles, books, events, physical memory and early reuse are compared
//! at every call, layout and books every few events. After the trace it is closed, live blocks or not, and the device
//! must hold nothing. Running out of memory is no finding, a panic is. Every kind of stress that plays traces calls this;
//! it knows nothing of where they come from.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use super::{Subject, SubjectError, player::Player};
use crate::{
    device::{
        CallLedger, Device, MissingCapabilities,
        wrap::{FaultPlan, FaultyDevice},
    },
    strategy::{
        Strategy,
        conformance::{Finding, Watch},
    },
    trace::Trace,
};

/// However long a trace, its layout is compared with the books about this often: that is slow.
const AUDITS: u64 = 512;

/// Under which conditions a trace is played.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// Driver calls that fail.
    pub faults: FaultPlan,
    /// After how many events layout and books are compared; 0 for a number that suits the trace's length.
    pub audit_every: u64,
}

/// What a trial came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// Broken promises, the first one first. The trace is not played on after one.
    pub findings: Vec<Finding>,
    /// The event after which the first of them was seen; `None` where it was before the first or at the close.
    pub at_event: Option<u64>,
    /// Events played.
    pub events: u64,
    /// Requests that were served.
    pub served: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Driver calls, failed ones included.
    pub calls: CallLedger,
    /// Driver errors that came through the strategy.
    pub driver_errors: u64,
}

/// Why a trial cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// There is no such subject.
    #[error(transparent)]
    Subject(#[from] SubjectError),
    /// The device lacks something.
    #[error(transparent)]
    Missing(#[from] MissingCapabilities),
}

impl Trial {
    /// Plays a trace through the subject's strategy on a fresh device. The trace must hold together
    /// ([`check`](crate::trace::check)).
    pub fn of(subject: &Subject, trace: &Trace, conditions: &Conditions) -> Result<Trial, TrialError> {
        let device = subject.open_device()?;
        let strategy = subject.build(device.props()).map_err(SubjectError::from)?;
        strategy.requires().check(device.props())?;
        let device: Box<dyn Device> = Box::new(FaultyDevice::with(conditions.faults.clone(), device));
        let watch = Watch::new(strategy, device, trace.tables.streams().get(1..).unwrap_or_default());
        let audit_every = match conditions.audit_every {
            0 => (trace.events.len() as u64).div_ceil(AUDITS).max(1),
            chosen => chosen,
        };
        Ok(Player::new(watch, conditions.faults != FaultPlan::none()).play(trace, audit_every))
    }

    /// What was broken first, in a word: shrinking a trace must not end at another fault than it began with.
    #[must_use]
    pub fn broke(&self) -> Option<&'static str> {
        self.findings.first().map(|finding| finding.part)
    }
}

thread_local! {
    static ON_TRIAL: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread plays a trial at the moment: a panic is then a finding, and nobody need be told of it otherwise.
#[must_use]
pub fn is_on_trial() -> bool {
    ON_TRIAL.get()
}

/// Plays something that may panic.
pub(super) fn on_trial<T>(play: impl FnOnce() -> T) -> thread::Result<T> {
    ON_TRIAL.set(true);
    let result = catch_unwind(AssertUnwindSafe(play));
    ON_TRIAL.set(false);
    result
}

/// The words of a panic.
pub(super) fn panicked(payload: &(dyn Any + Send)) -> String {
    let said = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", said.unwrap_or("without words"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, MIB, StreamId, TagId},
        strategy::StrategySpec,
        stress::PlannedFault,
        trace::TraceBuilder,
    };

    fn subject(strategy: &str, memory_bytes: u64) -> Subject {
        let device = "sim".parse().unwrap();
        Subject { strategy: StrategySpec::from(strategy), device, memory_bytes: Some(memory_bytes) }
    }

    /// Three blocks of 10 MiB, the first freed on the way, the last one alive at the end.
    fn three_blocks() -> Trace {
        let mut story = TraceBuilder::new();
        let blocks = [(); 3].map(|()| story.alloc(10 * MIB, StreamId::DEFAULT, TagId(0)));
        story.free(blocks[0]);
        story.free(blocks[1]);
        story.empty_cache();
        story.finish("three blocks")
    }

    fn tried(strategy: &str, memory_bytes: u64, faults: &[PlannedFault]) -> Trial {
        let conditions = Conditions { faults: PlannedFault::plan(faults), audit_every: 1 };
        Trial::of(&subject(strategy, memory_bytes), &three_blocks(), &conditions).unwrap()
    }

    #[test]
    fn what_happened_is_counted_and_running_out_is_no_finding() {
        let roomy = tried("direct", 64 * MIB, &[]);
        assert_eq!((roomy.events, roomy.served, roomy.ooms, roomy.broke()), (6, 3, 0, None));
        assert!(roomy.calls.total().count >= 6);
        let tight = tried("direct", 24 * MIB, &[]);
        assert_eq!((tight.events, tight.served, tight.ooms, tight.broke()), (6, 2, 1, None));
    }

    #[test]
    fn a_trace_is_not_played_on_after_a_finding() {
        let trial = tried("flawed:KeepsCache", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (None, None), "a block is alive at the trim");
        let trial = tried("flawed:DoubleHandOutAfterTrim", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("layout"), Some(5)));
        let trial = tried("flawed:RoundsDown", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.events), (None, 6), "10 MiB are round");
    }

    #[test]
    fn a_panic_is_a_finding_at_the_event_that_panicked() {
        let trial = tried("flawed:Panics", 24 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("panic"), Some(2)));
        assert_eq!(trial.findings[0].detail, "panicked: out of memory");
        assert!(!is_on_trial());
    }

    #[test]
    fn a_flaw_that_needs_no_event_is_seen_without_one() {
        let nothing = TraceBuilder::new().finish("nothing");
        let trial = Trial::of(&subject("flawed:BoastsOfLargestFree", MIB), &nothing, &Conditions::default()).unwrap();
        assert_eq!((trial.broke(), trial.at_event), (Some("layout"), None));
    }

    #[test]
    fn errors_that_are_injected_are_forgiven_and_others_are_not() {
        let fault = "cuMemAlloc:2".parse().unwrap();
        let trial = tried("direct", 64 * MIB, &[fault]);
        assert_eq!((trial.broke(), trial.served, trial.driver_errors), (None, 3, 1), "the call was made again");
        let trial = tried("flawed:FailsOnExhaustion", 24 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("error"), Some(2)));
    }

    #[test]
    fn what_the_program_takes_itself_is_given_back() {
        let mut story = TraceBuilder::new();
        let stream = story.new_stream().unwrap();
        let event = story.new_event();
        story.host_alloc(KIB);
        story.event_record(event, stream);
        story.event_wait(event, StreamId::DEFAULT);
        let trial = Trial::of(&subject("direct", MIB), &story.finish("own"), &Conditions::default()).unwrap();
        assert_eq!((trial.broke(), trial.events), (None, 3));
    }
}
