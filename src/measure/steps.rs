//! How long the steps of a workload take, as a program measures it that waits for the device around each.

use crate::{
    base::Nanos,
    device::Device,
    replay::{self, Observer, ReplayError, ReplayMoment, ReplayOutcome, replay},
    strategy::{EventSink, Strategy},
    trace::{MarkKind, Op, Source},
};

/// The steps that are left out where a typical one is asked for: in these memory is taken for the first time, optimizer
/// states are made and libraries are loaded.
pub const WARM_UP: usize = 2;

/// The time of every step, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// From one step's beginning to the next one's.
    pub steps: Vec<Nanos>,
}

impl StepTimes {
    /// The steps after the warm-up; all of them where there are no more than that.
    #[must_use]
    pub fn settled(&self) -> &[Nanos] {
        self.steps.get(WARM_UP..).filter(|rest| !rest.is_empty()).unwrap_or(&self.steps)
    }

    /// The middle one of the settled steps, the later of two.
    #[must_use]
    pub fn median(&self) -> Option<Nanos> {
        let mut settled = self.settled().to_vec();
        settled.sort_unstable();
        settled.get(settled.len() / 2).copied()
    }
}

/// Replays `source` and times its steps, with nothing else measured. The strategy is not closed.
pub fn time_steps(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &replay::ReplayOptions<'_>,
) -> Result<(StepTimes, ReplayOutcome), ReplayError> {
    let mut clock = StepClock::default();
    let options = replay::ReplayOptions { await_steps: true, ..*options };
    let replayed = replay(source, strategy, device, &options, &mut clock)?;
    clock.begun.push(device.now());
    let steps = clock.begun.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    Ok((StepTimes { steps }, replayed))
}

/// Notes when steps begin.
#[derive(Default)]
struct StepClock {
    begun: Vec<Nanos>,
}

impl Observer for StepClock {
    fn after(&mut self, now: &ReplayMoment<'_>) {
        if matches!(now.event.op, Op::Mark { kind: MarkKind::Step, .. }) {
            self.begun.push(now.device.now());
        }
    }
}

impl EventSink for StepClock {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::DeviceSpec,
        models::Recipe,
        strategy::{Setup, StrategySpec},
    };

    fn steps_of(set: &[(&str, &str)]) -> StepTimes {
        let recipe =
            set.iter().fold(Recipe::named("reference-gpt-163m").unwrap(), |recipe, (key, text)| recipe.with(key, text));
        let workload = recipe.workload().unwrap();
        let mut device = "sim".parse::<DeviceSpec>().unwrap().open().unwrap();
        let setup = Setup { props: device.props(), limit: None };
        let mut strategy = StrategySpec::from("caching").build(&setup).unwrap();
        time_steps(&workload, &mut *strategy, &mut *device, &replay::ReplayOptions::default()).unwrap().0
    }

    #[test]
    fn a_step_lasts_until_its_work_is_done() {
        let base = steps_of(&[("steps", "4")]);
        assert_eq!(base.steps.len(), 4);
        let half = steps_of(&[("steps", "4"), ("batch", "4")]);
        let ratio = half.median().unwrap().0 as f64 / base.median().unwrap().0 as f64;
        assert!((0.45..0.75).contains(&ratio), "half the batch takes {ratio} of the time");
    }

    #[test]
    fn warm_up_counts_only_where_there_is_nothing_else() {
        let times = |nanos: &[u64]| StepTimes { steps: nanos.iter().copied().map(Nanos).collect() };
        assert_eq!(times(&[90, 50, 10, 30, 20]).median(), Some(Nanos(20)));
        assert_eq!(times(&[90, 50]).median(), Some(Nanos(90)));
        assert_eq!(times(&[]).median(), None);
    }
}
