//! Which settings of PyTorch's allocator a program should use, and what they save.
//!
//! [`advise`] replays a trace under every setting of a [grid](SETTINGS) and under the other allocators, searches the
//! smallest memory in which each completes, and [chooses](choice) the simplest settings that need about the least. If no
//! setting helps, it says [why](AdviceReason). This module knows no files and prints nothing.
//!
//! The memory is found as by [`threshold`](super::threshold). If the program may use a share of the device
//! ([`AvailableMemory::Limit`]), the allocator itself refuses more; on a card that is too small ([`AvailableMemory::Card`]) the driver does, and
//! then `garbage_collection_threshold` has no effect, as in PyTorch.

pub mod choice;
mod confidence;
mod reason;

pub use choice::{SETTINGS, SettingsCandidate, candidates};
pub use confidence::{CheckedPredictions, Confidence, checked_keys, checked_predictions};
pub use reason::AdviceReason;

use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::{
    answer::threshold::{
        LimitTrials, PROBES_AROUND, Threshold, ThresholdError, ThresholdQuestion, ThresholdStatus, live_peak, overhead,
        status_of, threshold,
    },
    base::{Bytes, NoProgress, Progress, parallel_map},
    device::DeviceSpec,
    measure::{CaseDetail, CaseLabel, CaseRecord, OomReport, SCHEMA, measure_replay},
    pytorch::{Release, ReleaseSpan, export_line, variable_note},
    replay::{LimitEnforcer, Replay, ReplayOptions},
    strategy::StrategySpec,
    trace::{
        Trace,
        torch::{FinalOom, HistoryGap, MemoryRefuser, ProcessLimit, RecordedLimit, RecordedRelease},
    },
};

/// How much memory there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AvailableMemory {
    /// The size of a card in bytes. The context and the libraries take their part of it.
    Card(u64),
    /// Bytes that the driver has for the allocator on a card.
    OfCard(u64),
    /// Bytes that the program may reserve: PyTorch's memory fraction.
    Limit(u64),
    /// The same, known only as a range.
    LimitWithin(ProcessLimit),
}

impl AvailableMemory {
    /// The memory that a recorded program had.
    #[must_use]
    pub fn of_recording(limit: &RecordedLimit) -> AvailableMemory {
        match limit.refused_by {
            MemoryRefuser::Device => AvailableMemory::OfCard(limit.bytes),
            _ if limit.inferred && limit.fraction.is_none() => AvailableMemory::LimitWithin(limit.range),
            _ => AvailableMemory::Limit(limit.bytes),
        }
    }
}

/// What is asked.
#[derive(Clone, Copy)]
pub struct AdviceQuestion<'a> {
    /// What the program does.
    pub trace: &'a Trace,
    /// The settings that it has now, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub current: &'a str,
    /// The simulated device.
    pub device: &'a DeviceSpec,
    /// How much memory there is, where that is known.
    pub room: Option<AvailableMemory>,
    /// How the recording ends, if it does because memory ran out.
    pub dead_end: Option<&'a FinalOom>,
    /// The limit under which the recording was made, if one is known.
    pub recorded_limit: Option<&'a RecordedLimit>,
    /// The release of PyTorch, as far as the recording tells it.
    pub release: Option<&'a RecordedRelease>,
    /// How often the trace must complete, back to back.
    pub repeat: u32,
    /// How many replays run side by side.
    pub jobs: usize,
    /// Set from outside to give up.
    pub stop: Option<&'a AtomicBool>,
    /// Reports what is tried, and how far that is.
    pub progress: &'a dyn Progress,
}

impl<'a> AdviceQuestion<'a> {
    /// The usual question on one core: a recording is many steps already, so that one round will do.
    #[must_use]
    pub fn new(trace: &'a Trace, current: &'a str, device: &'a DeviceSpec) -> AdviceQuestion<'a> {
        AdviceQuestion {
            trace,
            current,
            device,
            room: None,
            dead_end: None,
            recorded_limit: None,
            release: None,
            repeat: 1,
            jobs: 1,
            stop: None,
            progress: &NoProgress,
        }
    }

    /// What the allocator may hold; of a range, the least.
    fn limit_bytes(&self) -> Result<Option<u64>, ThresholdError> {
        Ok(match self.room {
            Some(AvailableMemory::Card(bytes)) => {
                let overhead = overhead(self.device)?;
                let left = bytes.checked_sub(overhead).filter(|left| *left > 0);
                Some(left.ok_or(ThresholdError::NoRoom { card: Bytes(bytes), overhead: Bytes(overhead) })?)
            }
            Some(AvailableMemory::OfCard(bytes) | AvailableMemory::Limit(bytes)) => Some(bytes),
            Some(AvailableMemory::LimitWithin(range)) => Some(range.at_least_bytes),
            None => None,
        })
    }

    /// The release whose rules are used.
    fn release_rules(&self) -> Release {
        self.release.map_or(Release::DEFAULT, RecordedRelease::assumed)
    }

    /// The releases that the recording may be of.
    fn release_span(&self) -> Option<ReleaseSpan> {
        self.release.and_then(RecordedRelease::known_span)
    }

    /// Who refuses requests beyond the memory.
    fn enforcer(&self) -> LimitEnforcer {
        match self.room {
            Some(AvailableMemory::Card(_) | AvailableMemory::OfCard(_)) => LimitEnforcer::Device,
            Some(AvailableMemory::Limit(_) | AvailableMemory::LimitWithin(_)) | None => LimitEnforcer::Allocator,
        }
    }
}

/// What one candidate needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdviceRow {
    /// What `PYTORCH_CUDA_ALLOC_CONF` would be; `None` for an allocator that no line of PyTorch's brings.
    pub settings: Option<String>,
    /// The strategy that was replayed.
    pub strategy: String,
    /// The release of PyTorch whose allocator the strategy is; empty for other strategies.
    pub release: Option<Release>,
    /// Whether the program has these settings now.
    pub current: bool,
    /// Whether they are recommended.
    pub recommended: bool,
    /// Whether they come closest, where nothing completes in the memory that there is.
    pub closest: bool,
    /// How the search ended.
    pub status: ThresholdStatus,
    /// The smallest memory in which the trace completes, of the allocator's own.
    pub needed_bytes: Option<u64>,
    /// The same with the context and the libraries: the smallest card.
    pub needed_card_bytes: Option<u64>,
    /// What is reserved where nothing limits it: `torch.cuda.max_memory_reserved`.
    pub uncapped_reserved_bytes: Option<u64>,
    /// How often cached memory is given back to get by with [`needed_bytes`](AdviceRow::needed_bytes).
    pub retries_at_needed: Option<u64>,
    /// Whether all amounts that were tried around agree; only known of the current and the recommended settings.
    pub stable: Option<bool>,
    /// Whether the trace completes in the memory that there is; unknown without a limit, and if it depends on the limit.
    pub fits: Option<bool>,
    /// Whether that depends on where in its range the limit is: it completes from
    /// [`needed_bytes`](AdviceRow::needed_bytes) on.
    pub depends_on_limit: bool,
    /// Time in driver calls, launches left out: with the memory that there is, or with the whole device. Nothing is said of
    /// what does not complete.
    pub driver_without_launches_ns: Option<u64>,
    /// Why it could not be tried.
    pub reason: String,
}

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Advice {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What it is about.
    pub source: String,
    /// The settings that the program has now; empty for the defaults.
    pub current: String,
    /// The settings to use; those it has now where nothing is worth a change.
    pub recommended: String,
    /// Whether that is a change.
    pub changes: bool,
    /// What to paste into a shell, where there is something to change.
    pub export: Option<String>,
    /// Which name of the variable is for which release of PyTorch.
    pub export_note: Option<String>,
    /// The settings that come closest, where nothing completes in the memory that there is and they are other settings.
    pub closest: Option<String>,
    /// What is reserved with the current settings where nothing limits it: `torch.cuda.max_memory_reserved`.
    pub uncapped_reserved_now_bytes: Option<u64>,
    /// The same with the recommended or closest settings.
    pub uncapped_reserved_bytes: Option<u64>,
    /// The least memory with the current settings.
    pub needed_now_bytes: Option<u64>,
    /// The least memory with the recommended or closest ones.
    pub needed_bytes: Option<u64>,
    /// The difference.
    pub saved_bytes: u64,
    /// What the context and the libraries take beside it.
    pub overhead_bytes: u64,
    /// The most bytes alive at one time: no allocator needs less.
    pub live_peak_bytes: u64,
    /// The release of PyTorch that made the recording, and how it is known.
    pub release: Option<String>,
    /// Why nothing can be said: the recording has no history, or too little. Nothing was tried then.
    pub history_gap: Option<HistoryGap>,
    /// Where the recording ends because memory ran out: nothing is known of what follows.
    pub dead_end: Option<FinalOom>,
    /// The limit under which the recording was made, if one is known.
    pub recorded_limit: Option<RecordedLimit>,
    /// What the allocator may hold of the memory there is; of a range, the least.
    pub limit_bytes: Option<u64>,
    /// Whether the current settings suffice there.
    pub fits_now: Option<bool>,
    /// Whether the recommended or closest ones do.
    pub fits: Option<bool>,
    /// Whether that depends on where in its range the limit is: they do from `needed_bytes` on.
    pub depends_on_limit: bool,
    /// Time in driver calls with the current settings.
    pub driver_without_launches_now_ns: Option<u64>,
    /// With the recommended ones.
    pub driver_without_launches_ns: Option<u64>,
    /// How exactly the model reproduces the recorded run.
    pub confidence: Confidence,
    /// How often predictions for the recommended or closest settings were compared with real runs.
    pub predictions: CheckedPredictions,
    /// Why settings do not help, or only for a while; empty where they do.
    pub reasons: Vec<AdviceReason>,
    /// The first request that fails: with the recommended settings, in the memory there is or a page below their need.
    pub failure: Option<OomReport>,
    /// Everything that was tried, least memory first.
    pub tried: Vec<AdviceRow>,
}

/// Tries everything and recommends.
///
/// ```
/// use oomph::answer::advise::{AdviceQuestion, advise};
/// use oomph::{device::DeviceSpec, trace::TraceBuilder, base::{StreamId, TagId}};
/// let mut builder = TraceBuilder::new();
/// let block = builder.alloc(30 << 20, StreamId::DEFAULT, TagId(0));
/// builder.free(block);
/// let (trace, device): (_, DeviceSpec) = (builder.finish("one block"), "sim".parse()?);
/// let advice = advise(&AdviceQuestion::new(&trace, "", &device))?;
/// assert_eq!((advice.changes, advice.saved_bytes), (false, 0));
/// assert!(advice.tried.len() > 30);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn advise(question: &AdviceQuestion<'_>) -> Result<Advice, ThresholdError> {
    // A card without room for anything must not cost a search.
    question.limit_bytes()?;
    let mut rows = question.try_all(&candidates(question.current, question.release_rules()))?;
    let is_current = |row: &AdviceRow| row.settings.as_deref() == Some(question.current);
    let current = rows.iter().position(is_current).unwrap_or_default();
    let chosen = choice::choose(&rows, current);
    for number in std::collections::BTreeSet::from([current, chosen]) {
        if rows[number].needed_bytes.is_some() {
            question.settle(&mut rows[number])?;
        }
    }
    let is_enough = question.is_enough(&rows[chosen]);
    let changes = is_enough && chosen != current;
    rows[current].current = true;
    rows[chosen].recommended = is_enough;
    rows[chosen].closest = !is_enough;
    let (now, then) = (rows[current].clone(), rows[chosen].clone());
    let settings = then.settings.clone().unwrap_or_default();
    let mut advice = Advice {
        schema: SCHEMA,
        source: question.trace.name.clone(),
        current: question.current.to_owned(),
        changes,
        export: changes.then(|| export_line(&settings, question.release_span())),
        export_note: changes.then(|| variable_note(question.release_span()).to_owned()),
        closest: (!is_enough && chosen != current).then(|| settings.clone()),
        predictions: checked_predictions(&settings),
        recommended: if changes { settings } else { question.current.to_owned() },
        uncapped_reserved_now_bytes: now.uncapped_reserved_bytes,
        uncapped_reserved_bytes: then.uncapped_reserved_bytes,
        needed_now_bytes: now.needed_bytes,
        needed_bytes: then.needed_bytes,
        saved_bytes: now.needed_bytes.zip(then.needed_bytes).map_or(0, |(now, then)| now.saturating_sub(then)),
        overhead_bytes: overhead(question.device)?,
        live_peak_bytes: live_peak(question.trace),
        release: question.release.map(RecordedRelease::to_string),
        dead_end: question.dead_end.cloned(),
        recorded_limit: question.recorded_limit.cloned(),
        limit_bytes: question.limit_bytes()?,
        fits_now: now.fits,
        fits: then.fits,
        depends_on_limit: then.depends_on_limit,
        driver_without_launches_now_ns: now.driver_without_launches_ns,
        driver_without_launches_ns: then.driver_without_launches_ns,
        ..Advice::default()
    };
    explain(question, &then, &mut advice)?;
    if let Some(leak) = question.leak(&now.strategy)? {
        advice.reasons.insert(0, leak);
    }
    rows.sort_by_key(|row| row.needed_bytes.unwrap_or(u64::MAX));
    advice.tried = rows;
    Ok(advice)
}

/// Says why, where the recommended settings do not suffice or are those that the program has.
fn explain(question: &AdviceQuestion<'_>, then: &AdviceRow, advice: &mut Advice) -> Result<(), ThresholdError> {
    let below_need = advice.needed_bytes.map(|bytes| bytes.saturating_sub(1));
    let memory_bytes = match advice.limit_bytes {
        Some(limit) if advice.fits == Some(false) => Some(limit),
        _ => below_need,
    };
    let Some(memory_bytes) = memory_bytes else { return Ok(()) };
    advice.failure = question.failure(then, memory_bytes)?;
    let is_kept = !advice.changes && !advice.depends_on_limit;
    if advice.fits == Some(false) || (advice.fits.is_none() && is_kept) {
        advice.reasons = reason::obstacles(advice, memory_bytes, advice.failure.as_ref());
    }
    Ok(())
}

impl AdviceQuestion<'_> {
    /// Whether a candidate completes in the memory that there is, or may do so if the limit is not known.
    fn is_enough(&self, row: &AdviceRow) -> bool {
        let may_reach = |needed| self.recorded_limit.is_none_or(|limit| limit.may_reach(needed));
        match row.fits {
            Some(fits) => fits,
            None => !row.depends_on_limit || row.needed_bytes.is_some_and(may_reach),
        }
    }

    /// The row of every candidate, in their order.
    fn try_all(&self, candidates: &[SettingsCandidate]) -> Result<Vec<AdviceRow>, ThresholdError> {
        self.progress.begin_stage(&format!("trying {} settings", candidates.len()), candidates.len() as u64);
        let rows = parallel_map(candidates, self.jobs, |candidate| {
            let row = self.row(candidate);
            self.progress.advance(1);
            row
        });
        rows.into_iter().collect()
    }

    /// What one candidate needs. A candidate that cannot be tried is a row with a reason; an interruption is an error.
    fn row(&self, candidate: &SettingsCandidate) -> Result<AdviceRow, ThresholdError> {
        let mut row = AdviceRow {
            settings: candidate.settings.clone(),
            strategy: candidate.strategy.to_string(),
            release: candidate.strategy.release(),
            ..AdviceRow::default()
        };
        let tried =
            threshold(&ThresholdQuestion { jobs: 1, around: 0, ..self.threshold_question(&candidate.strategy) })
                .and_then(|found| Ok((found, self.under_limit(&candidate.strategy)?)));
        match tried {
            Ok((found, limited)) => {
                row.note(&found);
                if let Some(tried) = limited {
                    row.fits = Some(tried.fits).filter(|_| !tried.depends_on_limit);
                    row.depends_on_limit = tried.depends_on_limit;
                    row.driver_without_launches_ns = tried.driver_without_launches_ns;
                }
            }
            Err(ThresholdError::Interrupted) => return Err(ThresholdError::Interrupted),
            Err(error) => {
                row.status = status_of(&error);
                row.reason = error.to_string();
            }
        }
        Ok(row)
    }

    /// Searches the need of a row again with amounts around it, on all threads, and writes it down.
    fn settle(&self, row: &mut AdviceRow) -> Result<(), ThresholdError> {
        let strategy = StrategySpec::from(row.strategy.as_str());
        let found = threshold(&ThresholdQuestion {
            jobs: self.jobs,
            around: PROBES_AROUND,
            progress: self.progress,
            ..self.threshold_question(&strategy)
        })?;
        let driver_without_launches_ns = row.driver_without_launches_ns;
        row.note(&found);
        row.driver_without_launches_ns = driver_without_launches_ns;
        row.stable = Some(found.stability().stable);
        Ok(())
    }

    /// Memory over time in the memory that there is: with the current settings, and with the recommended or closest ones if
    /// those are others.
    pub fn over_time(&self, advice: &Advice) -> Result<Vec<(CaseRecord, CaseDetail)>, ThresholdError> {
        let is_other = |row: &&AdviceRow| (row.recommended || row.closest) && !row.current;
        let now = advice.tried.iter().find(|row| row.current);
        let then = advice.tried.iter().find(is_other);
        // Within a range, the recommended settings complete from their need on.
        let limit = if advice.depends_on_limit { advice.needed_bytes } else { advice.limit_bytes };
        let mut measured = Vec::new();
        for row in now.into_iter().chain(then) {
            self.progress.begin_stage("measuring memory over time", 0);
            let spec = StrategySpec::from(row.strategy.as_str());
            let label = CaseLabel {
                suite: "advise".to_owned(),
                workload: advice.source.clone(),
                strategy: match (row.current, row.closest) {
                    (true, _) => format!("now: {}", row.shown()),
                    (false, true) => format!("closest: {}", row.shown()),
                    (false, false) => format!("fix: {}", row.shown()),
                },
                device: self.device.to_string(),
                ..CaseLabel::default()
            };
            let replay = self.rehearsal(&spec, &NoProgress).replay.limit(limit);
            measured.push(measure_replay(label, &replay)?);
        }
        Ok(measured)
    }

    /// The first request that fails with `limit` bytes.
    fn failure(&self, row: &AdviceRow, limit: u64) -> Result<Option<OomReport>, ThresholdError> {
        self.progress.begin_stage("seeing what fails", LimitTrials::parts(self.repeat));
        self.rehearsal(&StrategySpec::from(row.strategy.as_str()), self.progress).explain(limit)
    }

    /// Whether it completes with the memory there is, and what it then spends in the driver.
    fn under_limit(&self, strategy: &StrategySpec) -> Result<Option<FitInMemory>, ThresholdError> {
        let Some(limit) = self.limit_bytes()? else { return Ok(None) };
        let trials = self.rehearsal(strategy, &NoProgress);
        let mut probe = trials.probe(limit)?;
        let mut depends_on_limit = false;
        if let Some(AvailableMemory::LimitWithin(range)) = self.room
            && !probe.fits
        {
            probe = trials.probe(range.below_bytes - 1)?;
            depends_on_limit = probe.fits;
        }
        let driver_without_launches_ns = probe.fits.then_some(probe.driver_without_launches_ns);
        Ok(Some(FitInMemory { fits: probe.fits, depends_on_limit, driver_without_launches_ns }))
    }

    fn threshold_question<'a>(&'a self, strategy: &'a StrategySpec) -> ThresholdQuestion<'a> {
        ThresholdQuestion {
            cap: self.enforcer(),
            repeat: self.repeat,
            stop: self.stop,
            ..ThresholdQuestion::new(self.trace, strategy, self.device)
        }
    }

    fn rehearsal<'a>(&'a self, strategy: &StrategySpec, progress: &'a dyn Progress) -> LimitTrials<'a> {
        let options = ReplayOptions { repeat: self.repeat, stop: self.stop, ..ReplayOptions::default() };
        let replay = Replay::new(self.trace)
            .strategy(strategy.clone())
            .device(self.device.clone())
            .enforced_by(self.enforcer())
            .options(options);
        LimitTrials { replay, progress }
    }
}

/// Whether a candidate completes in the memory that there is.
struct FitInMemory {
    fits: bool,
    depends_on_limit: bool,
    /// Time in the driver, if it completes.
    driver_without_launches_ns: Option<u64>,
}

impl AdviceRow {
    /// The candidate in a table or a legend.
    #[must_use]
    pub fn shown(&self) -> String {
        match self.settings.as_deref() {
            Some("") => "(defaults)".to_owned(),
            Some(settings) => settings.to_owned(),
            None => format!("another allocator: {}", self.strategy),
        }
    }

    fn note(&mut self, found: &Threshold) {
        self.status = match found.needed_bytes {
            Some(_) => ThresholdStatus::Found,
            None => ThresholdStatus::NeverFits,
        };
        self.needed_bytes = found.needed_bytes;
        self.needed_card_bytes = found.device_bytes();
        self.uncapped_reserved_bytes = Some(found.uncapped_reserved_bytes);
        self.driver_without_launches_ns = Some(found.uncapped_driver_ns);
        self.retries_at_needed = found.at_threshold().map(|probe| probe.retries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{GIB, MIB, StreamId, TagId},
        models::Recipe,
        trace::TraceBuilder,
    };

    fn ask(trace: &Trace, change: impl Fn(&mut AdviceQuestion<'_>)) -> Advice {
        let device = "sim".parse().unwrap();
        let mut question = AdviceQuestion { jobs: 2, ..AdviceQuestion::new(trace, "", &device) };
        change(&mut question);
        advise(&question).unwrap()
    }

    fn workload(name: &str, set: &[(&str, &str)]) -> Trace {
        let recipe = set.iter().fold(Recipe::named(name).unwrap(), |recipe, (key, value)| recipe.with(key, value));
        Trace::read(&recipe.workload().unwrap()).unwrap()
    }

    /// Blocks that leave a rest of every segment behind, too small for the larger ones that follow; in one range the rests
    /// lie side by side.
    fn growing() -> Trace {
        let mut builder = TraceBuilder::new();
        let passing: Vec<_> = (0..120).map(|_| builder.alloc(12 * MIB, StreamId::DEFAULT, TagId(0))).collect();
        for block in passing {
            builder.free(block);
            builder.alloc(7 * MIB, StreamId::DEFAULT, TagId(0));
        }
        for _ in 0..80 {
            builder.alloc(14 * MIB, StreamId::DEFAULT, TagId(0));
        }
        builder.finish("growing")
    }

    #[test]
    fn growing_requests_ask_for_expandable_segments() {
        let advice = ask(&growing(), |_| ());
        assert_eq!(advice.recommended, "expandable_segments:True");
        assert_eq!(advice.export.as_deref(), Some("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"));
        assert_eq!(advice.saved_bytes, advice.needed_now_bytes.unwrap() - advice.needed_bytes.unwrap());
        assert!(advice.saved_bytes > 64 * MIB && advice.reasons.is_empty(), "{:?}", advice.reasons);
        assert_eq!(advice.tried.iter().filter(|row| row.recommended).count(), 1);
        assert!(advice.tried.iter().filter(|row| row.current || row.recommended).all(|row| row.stable.is_some()));
        assert!(advice.tried.iter().any(|row| row.settings.is_none() && row.strategy == "bfc"));
        assert!(advice.tried.is_sorted_by_key(|row| row.needed_bytes.unwrap_or(u64::MAX)));
    }

    #[test]
    fn best_settings_are_kept() {
        let advice = ask(&growing(), |question| question.current = "expandable_segments:True");
        assert_eq!((advice.changes, advice.export.as_ref(), advice.saved_bytes), (false, None, 0));
        assert!(!advice.reasons.is_empty(), "it says why there is nothing to gain");
    }

    #[test]
    fn what_there_is_decides_who_fits() {
        let need = ask(&growing(), |_| ()).needed_bytes.unwrap();
        let advice = ask(&growing(), |question| question.room = Some(AvailableMemory::Limit(need)));
        assert_eq!((advice.fits_now, advice.fits, advice.limit_bytes), (Some(false), Some(true), Some(need)));
        assert!(
            advice.driver_without_launches_now_ns.is_none() && advice.driver_without_launches_ns.is_some(),
            "half a run has no cost to compare"
        );
        let advice = ask(&growing(), |question| question.room = Some(AvailableMemory::Limit(need - 2 * MIB)));
        assert_eq!(advice.fits, Some(false));
        assert!(!advice.reasons.is_empty() && advice.failure.is_some());
        assert_eq!((advice.changes, &*advice.recommended, advice.export.as_deref()), (false, "", None));
        assert_eq!(advice.closest.as_deref(), Some("expandable_segments:True"));
        assert!(advice.tried.iter().all(|row| !row.recommended) && advice.tried.iter().any(|row| row.closest));
        let advice = ask(&growing(), |question| question.room = Some(AvailableMemory::Card(8 * GIB)));
        assert_eq!(advice.limit_bytes, Some(8 * GIB - advice.overhead_bytes));
        assert_eq!(advice.fits, Some(true));
    }

    #[test]
    fn range_of_limits_gives_a_condition() {
        let need = ask(&growing(), |_| ()).needed_bytes.unwrap();
        let within = |from: u64, below: u64| {
            let range = ProcessLimit { at_least_bytes: from, below_bytes: below };
            ask(&growing(), |question| question.room = Some(AvailableMemory::LimitWithin(range)))
        };
        let advice = within(need - 20 * MIB, need + 20 * MIB);
        assert_eq!((advice.fits, advice.depends_on_limit, advice.needed_bytes), (None, true, Some(need)));
        assert_eq!((advice.changes, &*advice.recommended), (true, "expandable_segments:True"));
        let range = ProcessLimit { at_least_bytes: need - 20 * MIB, below_bytes: need + 20 * MIB };
        // A hundredth is a little less than the need, and the next thousandth is beyond the range.
        let device_bytes = 100 * (need - MIB);
        let inferred = RecordedLimit { range, inferred: true, device_bytes, ..RecordedLimit::given(need) };
        let device = "sim".parse().unwrap();
        let trace = growing();
        let unlikely = advise(&AdviceQuestion {
            room: Some(AvailableMemory::LimitWithin(range)),
            recorded_limit: Some(&inferred),
            ..AdviceQuestion::new(&trace, "", &device)
        });
        let unlikely = unlikely.unwrap();
        assert_eq!((unlikely.changes, unlikely.depends_on_limit), (false, true), "the round fraction is too little");
        assert_eq!(unlikely.closest.as_deref(), Some("expandable_segments:True"));
        let advice = within(need, need + 20 * MIB);
        assert_eq!((advice.fits, advice.depends_on_limit), (Some(true), false));
        let advice = within(need - 20 * MIB, need - 10 * MIB);
        assert_eq!((advice.fits, advice.depends_on_limit, advice.changes), (Some(false), false, false));
    }

    #[test]
    fn exhaustion_names_a_dominant_request() {
        let mut builder = TraceBuilder::new();
        builder.alloc(4 * GIB, StreamId::DEFAULT, TagId(0));
        builder.alloc(4 * GIB, StreamId::DEFAULT, TagId(0));
        let advice = ask(&builder.finish("two"), |question| question.room = Some(AvailableMemory::Limit(6 * GIB)));
        assert_eq!((advice.changes, advice.fits), (false, Some(false)));
        assert!(
            matches!(advice.reasons[0], AdviceReason::Exhaustion { live_peak_bytes } if live_peak_bytes == 8 * GIB)
        );
        assert!(
            matches!(advice.reasons[1], AdviceReason::LargeRequest { requested_bytes, .. } if requested_bytes == 4 * GIB)
        );
    }

    #[test]
    fn memory_of_a_side_stream_is_named() {
        let mut builder = TraceBuilder::new();
        let side = builder.new_stream().unwrap();
        let large = builder.alloc(2048 * MIB, side, TagId(0));
        builder.free(large);
        builder.alloc(640 * MIB, side, TagId(0));
        builder.alloc(960 * MIB, StreamId::DEFAULT, TagId(0));
        let (trace, device) = (builder.finish("side"), "sim".parse().unwrap());
        let row = AdviceRow { strategy: "caching".to_owned(), ..AdviceRow::default() };
        let failure = AdviceQuestion::new(&trace, "", &device).failure(&row, 2048 * MIB).unwrap();
        let reasons = reason::obstacles(&Advice::default(), 2048 * MIB, failure.as_ref());
        let stranded = AdviceReason::SideStream { stranded_bytes: 1408 * MIB, requested_bytes: 960 * MIB };
        assert!(reasons.contains(&stranded), "{reasons:?}");
    }

    #[test]
    fn a_leak_comes_first() {
        let trace = workload("leak-cache", &[("layers", "1"), ("steps", "10")]);
        let advice = ask(&trace, |_| ());
        assert!(
            matches!(&advice.reasons[..], [AdviceReason::Leak { bytes_per_step, .. }, ..] if *bytes_per_step > 6e7)
        );
    }

    #[test]
    fn one_forward_pass_is_no_leak() {
        let mut builder = TraceBuilder::new();
        for number in 1..=400 {
            builder.alloc(MIB + number * 512, StreamId::DEFAULT, TagId(0));
        }
        let advice = ask(&builder.finish("forward"), |_| ());
        assert!(
            !advice.reasons.iter().any(|reason| matches!(reason, AdviceReason::Leak { .. })),
            "{:?}",
            advice.reasons
        );
    }

    #[test]
    fn advice_can_be_given_up() {
        let (stop, trace, device) = (AtomicBool::new(true), growing(), "sim".parse().unwrap());
        let question = AdviceQuestion { stop: Some(&stop), ..AdviceQuestion::new(&trace, "", &device) };
        assert!(matches!(advise(&question), Err(ThresholdError::Interrupted)));
    }
}
