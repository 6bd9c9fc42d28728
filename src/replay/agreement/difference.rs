//! Where two runs part, with both views and the place in the trace.

use std::fmt;

use super::Decision;
use crate::{
    replay::ReplayMoment,
    trace::{MarkKind, Op},
};

/// The first thing in which a run on scripted answers differs from the run that the answers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Where in the trace.
    pub place: Place,
    /// What was decided on the device from there to the end of the event.
    pub on_device: Vec<Decision>,
    /// What was decided on the same answers instead.
    pub on_script: Vec<Decision>,
    /// What else there is to say: a call of the driver that was not made before.
    pub complaint: Option<String>,
}

/// A place in a trace, as people look for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The event and its number, from 0; nothing after the last one, when memory is given back.
    pub event: Option<(u64, Op)>,
    /// The step, if the trace marks steps.
    pub step: Option<u32>,
    /// The phase, if the trace marks phases.
    pub phase: Option<String>,
}

impl Place {
    /// Goes on to the next event.
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

impl fmt::Display for Place {
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

/// How many decisions are spelt out.
const SHOWN: usize = 3;

impl Difference {
    /// Two views of one event, without what they begin with in common.
    pub(super) fn new(
        place: Place,
        on_device: &[Decision],
        on_script: &[Decision],
        complaint: Option<String>,
    ) -> Difference {
        let in_common = on_device.iter().zip(on_script).take_while(|(device, script)| device == script).count();
        Difference {
            place,
            on_device: on_device[in_common..].to_vec(),
            on_script: on_script[in_common..].to_vec(),
            complaint,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { place, on_device, on_script, complaint } = self;
        write!(f, "{place}: the device's run {}; on the same answers {}", Listed(on_device), Listed(on_script))?;
        complaint.iter().try_for_each(|complaint| write!(f, " ({complaint})"))
    }
}

struct Listed<'a>(&'a [Decision]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("does nothing more");
        }
        for (place, decision) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{decision}", if place > 0 { ", " } else { "" })?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => write!(f, " and {more} more"),
            _ => Ok(()),
        }
    }
}
