//! The decisions of a strategy in a form that can be compared, and the first difference between two runs.

use std::fmt;

use crate::{
    base::{Address, FileText},
    replay::{ReplayMoment, list_of, verify::ObservedAction},
    strategy::{Freed, Outcome, Refusal, Shortage, StrategyEvent},
    trace::{MarkKind, Op},
};

/// One decision of a strategy. Everything in it follows from the calls and from what the driver answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A request was served.
    Served {
        /// Where.
        address: Address,
        /// With how much.
        size: u64,
        /// How the block was found.
        outcome: Outcome,
    },
    /// A request failed.
    Failed(Shortage),
    /// A block was given back.
    Freed(Freed),
    /// What happened inside.
    Inside(StrategyEvent),
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Served { address, size, outcome } => {
                let how = match outcome {
                    Outcome::Hit => "from the cache",
                    Outcome::Split => "cut from a larger block",
                    Outcome::NewSegment => "with new memory",
                    Outcome::ReleaseAndRetry => "with new memory after a release",
                };
                write!(f, "serves {size} bytes at {address} {how}")
            }
            Decision::Failed(Shortage { rounded, asked, refused_by, device_free }) => {
                let who = match refused_by {
                    Refusal::Device => "the device",
                    Refusal::Limit => "the limit",
                    Refusal::Size => "the size itself",
                };
                write!(f, "fails for {rounded} bytes, {asked} asked for, refused by {who}")?;
                device_free.iter().try_for_each(|free| write!(f, " with {free} free"))
            }
            Decision::Freed(Freed::Now) => f.write_str("frees the block at once"),
            Decision::Freed(Freed::Later) => f.write_str("frees the block later"),
            Decision::Inside(StrategyEvent::Retry { rounded }) => write!(f, "tries again for {rounded} bytes"),
            Decision::Inside(event) => ObservedAction::of_event(event).iter().try_for_each(|action| action.fmt(f)),
        }
    }
}

/// The first thing in which a run on scripted answers differs from the run that the answers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDifference {
    /// Where in the trace.
    pub place: TracePlace,
    /// What was decided on the device from there to the end of the event.
    pub on_device: Vec<Decision>,
    /// What was decided on the same answers instead.
    pub on_script: Vec<Decision>,
    /// What else there is to say: a call of the driver that was not made before.
    pub complaint: Option<String>,
}

/// A place in a trace, as people look for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TracePlace {
    /// The event and its number, from 0; nothing after the last one, when memory is given back.
    pub event: Option<(u64, Op)>,
    /// The step, if the trace marks steps.
    pub step: Option<u32>,
    /// The phase, if the trace marks phases.
    pub phase: Option<FileText>,
}

impl TracePlace {
    /// Moves to the next event.
    pub(super) fn reach(&mut self, now: &ReplayMoment<'_>) {
        self.event = Some((now.index, now.event.op));
        match now.event.op {
            Op::Mark { kind: MarkKind::Step, index, .. } => self.step = Some(index),
            Op::Mark { kind: MarkKind::Phase, label, .. } => {
                self.phase = now.tables.labels().get(label as usize).cloned();
            }
            _ => {}
        }
    }
}

impl fmt::Display for TracePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((number, op)) = self.event else { return f.write_str("after the last event") };
        write!(f, "event {number}, {}", op.kind().name())?;
        match op {
            Op::Alloc { bytes, stream, .. } => write!(f, " of {bytes} bytes on stream {stream}")?,
            Op::Free { stream, .. } | Op::Use { stream, .. } | Op::Work { stream, .. } => {
                write!(f, " on stream {stream}")?;
            }
            _ => {}
        }
        self.step.iter().try_for_each(|step| write!(f, " in step {step}"))?;
        match &self.phase {
            Some(phase) if !phase.is_empty() => write!(f, ", {phase}"),
            _ => Ok(()),
        }
    }
}

fn listed(decisions: &[Decision]) -> String {
    list_of(decisions, 3, ", ", "does nothing more")
}

impl RunDifference {
    /// Two views of one event, without what they begin with in common.
    pub(super) fn new(
        place: TracePlace,
        on_device: &[Decision],
        on_script: &[Decision],
        complaint: Option<String>,
    ) -> RunDifference {
        let in_common = on_device.iter().zip(on_script).take_while(|(device, script)| device == script).count();
        RunDifference {
            place,
            on_device: on_device[in_common..].to_vec(),
            on_script: on_script[in_common..].to_vec(),
            complaint,
        }
    }
}

impl fmt::Display for RunDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunDifference { place, on_device, on_script, complaint } = self;
        write!(f, "{place}: the device's run {}; on the same answers {}", listed(on_device), listed(on_script))?;
        complaint.iter().try_for_each(|complaint| write!(f, " ({complaint})"))
    }
}
