//! The largest value of a generator's parameter with which its workload completes in a given memory.

use std::sync::atomic::AtomicBool;

use super::{
    LargestRecord, LimitTrials, PROBES_AROUND, Probe, REPEATS, Stability, ThresholdError, ThresholdStatus,
    memory::{PlaceSearch, in_words, overhead},
    status_of,
};
use crate::{
    base::{NoProgress, Progress, nearest},
    device::DeviceSpec,
    measure::{SCHEMA, on_one_line},
    models::{ParameterValues, Recipe},
    replay::{LimitEnforcer, Replay, ReplayOptions},
    strategy::StrategySpec,
    trace::Source,
};

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct LargestQuestion<'a> {
    /// The workload, with everything set but the one parameter.
    pub recipe: &'a Recipe,
    /// Which parameter: one that counts something, such as `batch`, `context` or `layers`.
    pub parameter: &'a str,
    /// Values are multiples of this, for parameters that others must divide.
    pub step: u32,
    /// The memory of the whole card: context and libraries take their part.
    pub memory_bytes: u64,
    /// What the process may take of it, if that is limited.
    pub limit_bytes: Option<u64>,
    /// Under which strategy.
    pub strategy: &'a StrategySpec,
    /// The simulated device, given that much memory where it has less.
    pub device: &'a DeviceSpec,
    /// Who refuses requests beyond the limit.
    pub cap: LimitEnforcer,
    /// How often it must complete, back to back.
    pub repeat: u32,
    /// How many values around the largest are tried.
    pub around: u32,
    /// Where the search begins: near the answer it takes a few probes. Without it, at the smallest value.
    pub guess: Option<u64>,
    /// How many replays run side by side.
    pub jobs: usize,
    /// Set from outside to give up.
    pub stop: Option<&'a AtomicBool>,
    /// Reports what is tried, and how far that is.
    pub progress: &'a dyn Progress,
}

impl<'a> LargestQuestion<'a> {
    /// The usual question on one core: three rounds, sixteen probes around.
    #[must_use]
    pub fn new(
        recipe: &'a Recipe,
        parameter: &'a str,
        memory_bytes: u64,
        strategy: &'a StrategySpec,
        device: &'a DeviceSpec,
    ) -> LargestQuestion<'a> {
        LargestQuestion {
            recipe,
            parameter,
            step: 1,
            memory_bytes,
            limit_bytes: None,
            strategy,
            device,
            cap: LimitEnforcer::default(),
            repeat: REPEATS,
            around: PROBES_AROUND,
            guess: None,
            jobs: 1,
            stop: None,
            progress: &NoProgress,
        }
    }

    /// What the parameter may be.
    fn values(&self) -> Result<(u64, u64), ThresholdError> {
        let entry = self.recipe.generator;
        let counts = || entry.parameters.iter().filter(|known| matches!(known.values, ParameterValues::Count { .. }));
        let found = counts().find(|known| known.name == self.parameter).map(|known| known.values);
        let Some(ParameterValues::Count { least, most }) = found else {
            return Err(ThresholdError::NoSuchParameter {
                generator: entry.name,
                name: self.parameter.to_owned(),
                suggestion: nearest(self.parameter, counts().map(|known| known.name)),
            });
        };
        Ok((u64::from(least), u64::from(most)))
    }
}

/// Searches for the largest value that fits: away from the guess in doubling strides, up from one that fits and down from
/// one that does not, then between the last two.
///
/// ```
/// use oomph::answer::threshold::{LargestQuestion, largest};
/// use oomph::{device::DeviceSpec, strategy::StrategySpec, models::Recipe};
/// let recipe = Recipe::named("checkerboard")?.with("rounds", "1");
/// let (strategy, device): (_, DeviceSpec) = (StrategySpec::from("direct"), "sim".parse()?);
/// let found = largest(&LargestQuestion::new(&recipe, "blocks", 2 << 30, &strategy, &device))?;
/// assert!(found.largest.is_some_and(|blocks| blocks > 100));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn largest(question: &LargestQuestion<'_>) -> Result<LargestRecord, ThresholdError> {
    let (least, most) = question.values()?;
    let step = u64::from(question.step.max(1));
    let first = least.next_multiple_of(step);
    // Places count up from the hardest, the largest value, to the easiest.
    let last_place = most.saturating_sub(first) / step;
    let value_at = |place: u64| first + last_place.saturating_sub(place) * step;
    let device = question.device.with_room_for(question.memory_bytes);
    let mut record = unanswered(question, &device)?;
    let limit_bytes = record.limit_bytes;
    let trial = |place: u64| -> Result<Probe, ThresholdError> {
        let recipe = question.recipe.clone().with(question.parameter, &value_at(place).to_string());
        let workload = recipe.workload().map_err(Box::new)?;
        let options = ReplayOptions { repeat: question.repeat, stop: question.stop, ..ReplayOptions::default() };
        let replay = Replay::new(&workload)
            .strategy(question.strategy.clone())
            .device(device.clone())
            .enforced_by(question.cap)
            .options(options);
        LimitTrials { replay, progress: question.progress }.probe(limit_bytes)
    };
    let announce = |places: &[u64], before: usize| {
        let values = in_words(places, |place| value_at(place).to_string());
        question.progress.begin_stage(
            &format!("{}: try {}, {} {values}", question.strategy, before + 1, question.parameter),
            LimitTrials::parts(question.repeat).saturating_mul(places.len() as u64),
        );
    };
    let mut search = PlaceSearch::new(&trial, question.jobs, last_place, &announce);
    let guessed =
        question.guess.map_or(last_place, |guess| last_place - (guess.saturating_sub(first) / step).min(last_place));
    let found = approach(&mut search, guessed, last_place, question.around)?;
    let tried = search.tried;
    record.status = if found.is_some() { ThresholdStatus::Found } else { ThresholdStatus::NeverFits };
    if found.is_none() {
        record.reason = format!("not even {} = {first} fits", question.parameter);
    }
    record.largest = found.map(value_at);
    record.peak_reserved_bytes = found.and_then(|place| tried.get(&place)).map(|probe| probe.peak_reserved_bytes);
    let stability = Stability::of(tried.iter().map(|(&place, probe)| (place, probe.fits)));
    record.stable = found.map(|_| stability.stable);
    record.highest_fit = stability.lowest_fit.map(value_at);
    record.first_failure_below = stability.first_failure_above.map(value_at);
    record.probes = tried.len() as u64;
    record.tried = tried.into_iter().rev().map(|(place, probe)| (value_at(place), probe.fits)).collect();
    Ok(record)
}

/// The answer to a question whose search failed.
pub fn failed_largest(question: &LargestQuestion<'_>, error: &ThresholdError) -> Result<LargestRecord, ThresholdError> {
    let record = unanswered(question, &question.device.with_room_for(question.memory_bytes))?;
    Ok(LargestRecord { status: status_of(error), reason: on_one_line(&error.to_string()), ..record })
}

/// The row of a question, without an answer.
fn unanswered(question: &LargestQuestion<'_>, device: &DeviceSpec) -> Result<LargestRecord, ThresholdError> {
    let overhead_bytes = overhead(device)?;
    let page_bytes = device.open()?.props().page_bytes;
    let room_bytes = question.memory_bytes.saturating_sub(overhead_bytes) / page_bytes * page_bytes;
    Ok(LargestRecord {
        schema: SCHEMA,
        workload: question.recipe.clone().workload().map_err(Box::new)?.name().to_owned(),
        strategy: question.strategy.to_string(),
        release: question.strategy.release(),
        device: question.device.to_string(),
        repeat: question.repeat,
        limit_enforcer: question.cap,
        parameter: question.parameter.to_owned(),
        card_bytes: question.memory_bytes,
        overhead_bytes,
        limit_bytes: question.limit_bytes.map_or(room_bytes, |limit| limit.min(room_bytes)),
        ..LargestRecord::default()
    })
}

/// From a guess to the largest value that fits; `None` where not even the smallest does.
fn approach(
    search: &mut PlaceSearch<'_>,
    guessed: u64,
    last_place: u64,
    around: u32,
) -> Result<Option<u64>, ThresholdError> {
    let (mut edge, mut stride) = (guessed, 1);
    let fits = search.fits(guessed)?;
    // From what fits towards larger values, which are lower places; from what does not towards smaller ones.
    loop {
        match (fits, edge) {
            (true, 0) => return Ok(Some(0)),
            (false, edge) if edge == last_place => return Ok(None),
            _ => {}
        }
        let place = if fits { guessed.saturating_sub(stride) } else { guessed.saturating_add(stride).min(last_place) };
        if search.fits(place)? != fits {
            let (fails, fits) = if fits { (place, edge) } else { (edge, place) };
            return search.settle(fails, fits, around).map(Some);
        }
        edge = place;
        stride *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    fn find(name: &str, parameter: &str, memory: u64, change: impl Fn(&mut LargestQuestion<'_>)) -> LargestRecord {
        let recipe = Recipe::named(name).unwrap().with("steps", "1").seed(1);
        let (strategy, device) = (StrategySpec::from("caching"), "sim".parse().unwrap());
        let mut question = LargestQuestion::new(&recipe, parameter, memory, &strategy, &device);
        (question.repeat, question.jobs) = (1, 2);
        change(&mut question);
        largest(&question).unwrap()
    }

    #[test]
    fn the_largest_fits_and_the_next_does_not() {
        let found = find("training", "batch", 8 * GIB, |_| ());
        let batch = found.largest.unwrap();
        assert!((2..64).contains(&batch), "{batch}");
        assert!(found.tried.contains(&(batch, true)) && found.tried.contains(&(batch + 1, false)), "{:?}", found.tried);
        assert!(found.limit_bytes < 8 * GIB - 500 * (1 << 20), "context and libraries have their part");
        assert!(found.peak_reserved_bytes.unwrap() <= found.limit_bytes);
    }

    #[test]
    fn a_guess_changes_how_long_it_takes_and_not_the_answer() {
        let find = |memory, guess| {
            find("training", "batch", memory, |question| (question.around, question.guess) = (0, guess))
        };
        let unguided = find(24 * GIB, None);
        let batch = unguided.largest.unwrap();
        for guess in [1, 2, batch - 3, batch, batch + 1, batch + 7, 100_000, u64::MAX] {
            assert_eq!(find(24 * GIB, Some(guess)).largest, Some(batch), "from {guess}");
        }
        assert!(find(24 * GIB, Some(batch)).probes == 2 && unguided.probes > 4, "{}", unguided.probes);
        assert_eq!(find(GIB, Some(9)).status, ThresholdStatus::NeverFits);
    }

    #[test]
    fn more_memory_holds_more_even_more_than_the_device_has() {
        let batch = |memory| find("training", "batch", memory, |question| question.around = 2).largest.unwrap();
        assert!(batch(8 * GIB) < batch(16 * GIB));
        assert!(batch(140 * GIB) < batch(160 * GIB));
    }

    #[test]
    fn values_go_in_steps_where_others_must_divide_them() {
        let found = find("training", "width", 24 * GIB, |question| (question.step, question.around) = (96, 2));
        assert!(found.largest.unwrap().is_multiple_of(96) && found.largest.unwrap() >= 768);
        assert!(found.tried.iter().all(|(value, _)| value.is_multiple_of(96)));
    }

    #[test]
    fn a_memory_in_which_nothing_fits_is_an_answer() {
        let found = find("training", "batch", GIB, |_| ());
        assert_eq!((found.status, found.largest, found.probes), (ThresholdStatus::NeverFits, None, 1));
        assert_eq!(found.reason, "not even batch = 1 fits");
    }

    #[test]
    fn non_count_parameter_is_refused_with_suggestion() {
        let recipe = Recipe::named("training").unwrap();
        let (strategy, device) = (StrategySpec::from("caching"), "sim".parse().unwrap());
        let refused = |name| largest(&LargestQuestion::new(&recipe, name, GIB, &strategy, &device)).unwrap_err();
        let message = refused("batches").to_string();
        assert_eq!(message, "generator 'transformer' has no whole-number parameter 'batches'; did you mean 'batch'?");
        assert!(matches!(refused("techniques"), ThresholdError::NoSuchParameter { .. }), "words count nothing");
    }
}
