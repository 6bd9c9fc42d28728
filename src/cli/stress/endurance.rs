//! What `integrity` and `soak` have in common: how long they go on, the file that adds up over slices, and the table.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};

use super::{Common, evidence};
use crate::{
    base::{Bytes, GIB, parallel_map},
    cli::{
        VERSION, exit,
        failure::{Failure, Outcome},
        interrupt, progress,
    },
    report::Endurance,
    stress::{Ledger, Outcome as Endured, Sizes, Slice, Subject, SubjectError, Tally, TimeShare, Until},
    suite::CaseTimeout,
};

/// Memory on a real device if nobody says.
const REAL_MEMORY: Bytes = Bytes(8 * GIB);

/// How many, how long, and what is added to.
#[derive(Clone, Debug, clap::Args)]
pub struct EnduranceOptions {
    /// End after so many blocks of each strategy.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub stress_count: Option<u64>,
    /// End after so much time in all, such as 60s or 1h, which strategies share evenly [default: 30s without a count].
    #[arg(long, value_name = "TIME")]
    pub stress_duration: Option<CaseTimeout>,
    /// Host threads. On the simulated device they take turns by the seed; on a real one they are real.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Streams, the default one among them.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub streams: u16,
    /// Sizes of blocks: `small` (many blocks), `mixed`, `large` (many bytes), or a range such as 512..2MiB.
    #[arg(long, value_name = "SIZES", default_value = "mixed")]
    pub sizes: Sizes,
    /// A JSON file to which this slice is added. Every slice throws other dice; the table is of all slices together.
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
}

/// How long it goes on without a count or a duration.
const DEFAULT_DURATION: Duration = Duration::from_secs(30);

impl EnduranceOptions {
    /// Lets every subject endure `stress` with a seed, adds it up, and concludes.
    pub fn endure(
        &self,
        kind: &'static str,
        common: &Common,
        stress: impl Fn(&Subject, u64, &Until<'_>, &mut dyn FnMut(&Tally)) -> Result<Endured, SubjectError> + Sync,
    ) -> Outcome {
        let common = &self.with_memory(common)?;
        let subjects = common.subjects()?;
        let mut ledger = self.ledger(kind)?;
        let seed = ledger.next_seed(common.seed);
        let stop = interrupt::flag(interrupt::Running::Replay)?;
        let jobs = Common::jobs(&subjects);
        let duration = match (self.stress_count, self.stress_duration) {
            (Some(_), None) => None,
            (_, given) => Some(given.map_or(DEFAULT_DURATION, CaseTimeout::duration)),
        };
        let time = duration.map(|duration| TimeShare::new(duration, subjects.len(), jobs));
        let (begin, lost) = (Instant::now(), AtomicBool::new(false));
        let bar = progress::of_cases(subjects.len(), 0);
        let outcomes = parallel_map(&subjects, jobs, |subject| {
            let end = time.as_ref().map(TimeShare::next_end);
            let over = || stop.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end);
            let outcome = if lost.load(Ordering::Relaxed) {
                Ok(Endured { skipped: Some("the GPU is lost to this process".to_owned()), ..Endured::default() })
            } else {
                let until = Until { blocks: self.stress_count, over: &over };
                stress(subject, seed, &until, &mut |tally| bar.set_message(told(subject, tally)))
            };
            if outcome.as_ref().is_ok_and(|outcome| outcome.lost_context) {
                lost.store(true, Ordering::Relaxed);
            }
            bar.inc(1);
            outcome
        });
        bar.finish_and_clear();
        let mut saved = Vec::new();
        let mut failed = false;
        for (subject, outcome) in subjects.iter().zip(outcomes) {
            let (outcome, strategy) = (outcome.map_err(Failure::usage)?, subject.strategy.to_string());
            ledger.add(&strategy, &outcome);
            failed |= !outcome.failures.is_empty();
            if let Some(failure) = outcome.failures.first() {
                saved.push((strategy, evidence::of(failure, common)?));
            }
        }
        ledger.slices.push(self.slice(common, &subjects, seed, begin.elapsed())?);
        self.save(&ledger)?;
        let rows = ledger.rows(&saved);
        common.format.print(&Endurance { ledger: &ledger, rows: &rows })?;
        Ok(match (failed, stop.load(Ordering::Relaxed)) {
            (true, _) => exit::STRESS_FAILED,
            (false, true) => exit::INTERRUPTED,
            (false, false) => exit::OK,
        })
    }

    /// A real device has room for more than the simulated one needs.
    fn with_memory(&self, common: &Common) -> Result<Common, Failure> {
        let simulated = common.subjects()?.iter().all(|subject| subject.device.is_simulated());
        let memory = if simulated || common.memory != Common::MEMORY { common.memory } else { REAL_MEMORY };
        Ok(Common { memory, ..common.clone() })
    }

    /// What earlier slices came to.
    fn ledger(&self, kind: &str) -> Result<Ledger, Failure> {
        let Some(path) = &self.state else { return Ok(Ledger::new(kind)) };
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ledger::new(kind)),
            read => read.with_context(|| format!("{} cannot be read", path.display())).map_err(Failure::usage)?,
        };
        let refused = |reason: String| Failure::usage(anyhow!("{} cannot be added to: {reason}", path.display()));
        let ledger: Ledger = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
        ledger.check(kind).map_err(refused)?;
        Ok(ledger)
    }

    fn slice(&self, common: &Common, subjects: &[Subject], seed: u64, wall: Duration) -> Result<Slice, Failure> {
        let device = match subjects.first() {
            Some(subject) => subject.device.device_name().map_err(Failure::device)?,
            None => String::new(),
        };
        Ok(Slice {
            device,
            version: VERSION.to_owned(),
            seed,
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.to_string(),
            memory_bytes: common.memory.0,
            wall_ns: wall.as_nanos() as u64,
        })
    }

    /// Written beside and put in place: an end in the middle must not cost earlier slices.
    fn save(&self, ledger: &Ledger) -> Result<(), Failure> {
        let Some(path) = &self.state else { return Ok(()) };
        let beside = path.with_extension("json.new");
        let write = |beside: &Path| -> io::Result<()> {
            fs::write(beside, format!("{}\n", serde_json::to_string_pretty(ledger)?))?;
            fs::rename(beside, path)
        };
        Ok(write(&beside).with_context(|| format!("{} cannot be written", path.display()))?)
    }
}

/// How far a strategy has got.
fn told(subject: &Subject, tally: &Tally) -> String {
    let Tally { blocks, compared_bytes, damaged, .. } = *tally;
    let rate = Bytes(tally.each_second(compared_bytes) as u64);
    format!(
        "{}: {blocks} blocks ({:.0}/s), {} verified ({rate}/s), {damaged} damaged",
        subject.strategy,
        tally.each_second(blocks),
        Bytes(compared_bytes),
    )
}
