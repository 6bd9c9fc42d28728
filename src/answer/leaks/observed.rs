//! How memory stood step by step, from wherever that is known.

use super::{
    LeakError,
    growers::{self, Grower},
    ledger::{StepLedger, StepUse},
    snapshots,
    steps::{Steps, StepsFrom},
};
use crate::{
    device::Device,
    replay::{Options, OutOfMemory, replay},
    strategy::{Context, Silent, Strategy},
    trace::{Source, torch::Recording},
};

/// How memory stood in every step, and who held it.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// What to call it.
    pub name: String,
    /// How steps were found.
    pub steps_from: StepsFrom,
    /// Every step.
    pub steps: Vec<StepUse>,
    /// The first of them that is judged: start-up is not.
    pub first_judged: usize,
    /// The end of those that are judged: a step in which memory ran out is not.
    pub end_judged: usize,
    /// The step in which memory ran out.
    pub ran_out_at: Option<usize>,
    /// How much memory there is.
    pub capacity: Option<u64>,
    /// Number of the event that each step begins with, and of the end.
    starts: Vec<u64>,
}

/// Where a source is replayed.
pub struct Place<'a> {
    /// A fresh strategy.
    pub strategy: &'a mut dyn Strategy,
    /// A fresh device.
    pub device: &'a mut dyn Device,
    /// How much of it may be held, where that is limited.
    pub limit: Option<u64>,
}

impl Observed {
    /// Replays a source step by step. Steps begin at `phase`, where one is named.
    pub fn of_source(
        source: &dyn Source,
        place: Place<'_>,
        phase: Option<&str>,
        options: &Options<'_>,
    ) -> Result<Observed, LeakError> {
        let Place { strategy, device, limit } = place;
        let found = Steps::find(source, phase)?;
        let props = device.props();
        let capacity = limit.unwrap_or_else(|| props.total_bytes.saturating_sub(props.context_bytes));
        let mut ledger = StepLedger::new(&found);
        let replayed = replay(source, strategy, device, options, &mut ledger)?;
        let steps = ledger.finish(strategy);
        strategy.close(&mut Context { device, sink: &mut Silent })?;
        let ran_out_at = replayed.first_oom.map(|OutOfMemory { event, .. }| found.step_of(event).unwrap_or(0));
        let mut starts = found.starts;
        starts.truncate(steps.len());
        starts.push(replayed.events);
        Ok(Observed {
            name: source.name().to_owned(),
            steps_from: found.from,
            first_judged: 1.min(steps.len()),
            end_judged: ran_out_at.map_or(steps.len(), |step| step.min(steps.len())),
            steps,
            ran_out_at,
            capacity: Some(capacity),
            starts,
        })
    }

    /// Takes every snapshot as one step.
    #[must_use]
    pub fn of_snapshots(recordings: &[Recording]) -> Observed {
        let steps: Vec<StepUse> =
            recordings.iter().zip(0..).map(|(recording, number)| snapshots::level(recording, number)).collect();
        let names: Vec<&str> = recordings.iter().map(|recording| recording.trace.name.as_str()).collect();
        Observed {
            name: match names.as_slice() {
                [first, .., last] => format!("{first} .. {last}"),
                names => names.concat(),
            },
            steps_from: StepsFrom::Snapshots,
            first_judged: 0,
            end_judged: steps.len(),
            steps,
            ran_out_at: None,
            capacity: None,
            starts: Vec::new(),
        }
    }

    /// The steps that count.
    #[must_use]
    pub fn judged(&self) -> &[StepUse] {
        &self.steps[self.first_judged.min(self.end_judged)..self.end_judged]
    }

    /// Who grew in a source from the beginning of the step `first` to the end of the judged steps.
    pub fn growers(&self, source: &dyn Source, first: usize) -> Result<Vec<Grower>, LeakError> {
        let (Some(&before), Some(&after)) = (self.starts.get(first), self.starts.get(self.end_judged)) else {
            return Ok(Vec::new());
        };
        let (before, after) = growers::inventories(source, before, after)?;
        Ok(growers::growers(&before, &after, self.end_judged - first))
    }
}
