//! How memory stood step by step, from wherever that is known.

use super::{
    LeakError,
    growers::{self, Grower},
    ledger::{StepLedger, StepUse},
    snapshots,
    steps::{Steps, StepsFrom},
};
use crate::{
    replay::{FailedRequest, OpenedAllocator, Replay, replay as run},
    strategy::{Context, Silent},
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

impl Observed {
    /// Runs a replay step by step. Steps begin at `phase`, where one is named.
    pub fn of_replay(replay: &Replay<'_>, phase: Option<&str>) -> Result<Observed, LeakError> {
        let source = replay.source;
        let OpenedAllocator { mut strategy, mut device, limit } = replay.open()?;
        let found = Steps::find(source, phase)?;
        let props = device.props();
        let all = props.total_bytes.saturating_sub(props.context_bytes);
        let capacity = replay.limit.or(limit).unwrap_or(all);
        let mut ledger = StepLedger::new(&found);
        let replayed = run(source, &mut *strategy, &mut *device, &replay.options, &mut ledger)?;
        let steps = ledger.finish(&*strategy);
        strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
        let ran_out_at = replayed.first_oom.map(|FailedRequest { event, .. }| found.step_of(event).unwrap_or(0));
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
