//! Trying everything that there is to try, side by side.

use super::{AdviceQuestion, AdviceRow, grid::Candidate};
use crate::{
    answer::threshold::{
        PROBES_AROUND, Rehearsal, Threshold, ThresholdError, ThresholdQuestion, ThresholdStatus, status_of, threshold,
    },
    base::{NoProgress, Progress, parallel_map},
    measure::OomReport,
    replay::{Replay, ReplayOptions},
    strategy::StrategySpec,
};

impl AdviceQuestion<'_> {
    /// The row of every candidate, in their order.
    pub(super) fn try_all(&self, candidates: &[Candidate]) -> Result<Vec<AdviceRow>, ThresholdError> {
        self.progress.begin_stage(&format!("trying {} settings", candidates.len()), candidates.len() as u64);
        let rows = parallel_map(candidates, self.jobs, |candidate| {
            let row = self.row(candidate);
            self.progress.advance(1);
            row
        });
        rows.into_iter().collect()
    }

    /// What one candidate needs; that it cannot be tried is an answer, that somebody stopped us is not.
    fn row(&self, candidate: &Candidate) -> Result<AdviceRow, ThresholdError> {
        let mut row = AdviceRow {
            settings: candidate.settings.clone(),
            strategy: candidate.strategy.to_string(),
            ..AdviceRow::default()
        };
        let tried =
            threshold(&ThresholdQuestion { jobs: 1, around: 0, ..self.threshold_question(&candidate.strategy) })
                .and_then(|found| Ok((found, self.under_limit(&candidate.strategy)?)));
        match tried {
            Ok((found, limited)) => {
                row.note(&found);
                if let Some((fits, driver_ns)) = limited {
                    (row.fits, row.driver_ns) = (Some(fits), fits.then_some(driver_ns));
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
    pub(super) fn settle(&self, row: &mut AdviceRow) -> Result<(), ThresholdError> {
        let strategy = StrategySpec::from(row.strategy.as_str());
        let found = threshold(&ThresholdQuestion {
            jobs: self.jobs,
            around: PROBES_AROUND,
            progress: self.progress,
            ..self.threshold_question(&strategy)
        })?;
        let driver_ns = row.driver_ns;
        row.note(&found);
        row.driver_ns = driver_ns;
        row.stable = Some(found.stability().stable);
        Ok(())
    }

    /// The first request that fails with `limit` bytes.
    pub(super) fn failure(&self, row: &AdviceRow, limit: u64) -> Result<Option<OomReport>, ThresholdError> {
        self.progress.begin_stage("seeing what fails", Rehearsal::parts(self.repeat));
        self.rehearsal(&StrategySpec::from(row.strategy.as_str()), self.progress).explain(limit)
    }

    /// Whether it completes with the memory there is, and what it then spends in the driver.
    fn under_limit(&self, strategy: &StrategySpec) -> Result<Option<(bool, u64)>, ThresholdError> {
        let Some(limit) = self.limit_bytes()? else { return Ok(None) };
        let probe = self.rehearsal(strategy, &NoProgress).probe(limit)?;
        Ok(Some((probe.fits, probe.driver_ns)))
    }

    fn threshold_question<'a>(&'a self, strategy: &'a StrategySpec) -> ThresholdQuestion<'a> {
        ThresholdQuestion {
            cap: self.enforcer(),
            repeat: self.repeat,
            stop: self.stop,
            ..ThresholdQuestion::new(self.trace, strategy, self.device)
        }
    }

    fn rehearsal<'a>(&'a self, strategy: &StrategySpec, progress: &'a dyn Progress) -> Rehearsal<'a> {
        let options = ReplayOptions { repeat: self.repeat, stop: self.stop, ..ReplayOptions::default() };
        let replay = Replay::new(self.trace)
            .strategy(strategy.clone())
            .device(self.device.clone())
            .enforced_by(self.enforcer())
            .options(options);
        Rehearsal { replay, progress }
    }
}

impl AdviceRow {
    fn note(&mut self, found: &Threshold) {
        self.status = match found.threshold_bytes {
            Some(_) => ThresholdStatus::Found,
            None => ThresholdStatus::NeverFits,
        };
        self.needed_bytes = found.threshold_bytes;
        self.device_bytes = found.device_bytes();
        self.uncapped_reserved_bytes = Some(found.uncapped_reserved_bytes);
        self.driver_ns = Some(found.uncapped_driver_ns);
        self.retries_at_need = found.at_threshold().map(|probe| probe.retries);
    }
}
