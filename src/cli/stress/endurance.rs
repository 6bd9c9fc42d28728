//! `oomph stress integrity` and `oomph stress soak`: their duration, the state file in which runs
//! add up, and the table.

use std::{
    io,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};

use super::{
    StressOptions,
    common::{exit_code, jobs, save_failure, with_progress},
};
use crate::{
    base::{Bytes, GIB, MemoryLimit, escaped, read_text_file},
    cli::{
        VERSION,
        exit::{self, CommandError, CommandResult, StopPolicy},
    },
    report::{self, Endurance},
    stress::{
        BlockSizes, EnduranceOutcome, EnduranceTest, IntegrityCounts, StopCondition, StressBudget, StressSlice,
        StressState, StressTarget, TargetError, TimeShare,
    },
    suite::CaseTimeout,
};

/// The default limit on a real device.
const REAL_LIMIT: MemoryLimit = MemoryLimit::Size(Bytes(8 * GIB));

/// Fills every block with its own pattern on its stream and compares it before the block is freed,
/// on other streams that use it, and after cached memory was released. This finds memory that
/// overlaps, that is reused before all streams are done with it, or that is lost when it is mapped
/// elsewhere, independently of what a strategy reports.
///
/// On the simulated device the seed decides the order of the threads, and a failing program is
/// shrunk to a minimal trace. On a real device threads are real and share the strategy under one
/// lock, and one launch checks many blocks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress integrity                                       every strategy, 30 seconds in all
  oomph stress integrity --strategy caching --stress-count 1000000
  oomph stress integrity --device cuda --threads 16 --streams 8 --stress-duration 8m --state integrity.json
                                                               a slice on a GPU; repeat it for the next
  oomph stress integrity --device cuda --sizes small --limit 32GiB --stress-duration 60s
  oomph stress integrity --strategy bfc --trace failing.oomph  one trace")]
pub struct IntegrityArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    #[command(flatten)]
    endurance: EnduranceOptions,
}

/// Runs one program after another in memory that is nearly full, on a driver whose calls fail now
/// and then. Contents are checked as by `stress integrity`, and the strategy's other promises too.
/// The table says how full memory was, how much of it was idle, and how many calls were made to
/// fail.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress soak                                            every strategy, 30 seconds in all
  oomph stress soak --strategy oomph --stress-duration 1h --state soak.json
  oomph stress soak --device cuda --streams 8 --stress-duration 5m --state soak.json
  oomph stress soak --fault-one-in 0                           on a driver that never fails")]
pub struct SoakArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    #[command(flatten)]
    endurance: EnduranceOptions,
    /// One driver call in this many is made to fail; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 500)]
    fault_one_in: u64,
}

impl IntegrityArgs {
    pub(super) fn run(&self) -> CommandResult {
        let trace = self.options.trace()?;
        self.endurance.run("integrity", &self.options, |test, until, progress| match &trace {
            Some(trace) => test.play(trace, until),
            None => test.run(until, progress),
        })
    }
}

impl SoakArgs {
    pub(super) fn run(&self) -> CommandResult {
        if self.options.trace.is_some() {
            return Err(CommandError::usage(anyhow!(
                "a soak plays its own programs; use `oomph stress integrity --trace FILE` for one trace"
            )));
        }
        self.endurance.run("soak", &self.options, |test, until, progress| test.soak(self.fault_one_in, until, progress))
    }
}

/// Duration, size and state file of a test.
#[derive(Clone, Debug, clap::Args)]
pub struct EnduranceOptions {
    /// End after this many blocks of each strategy.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub stress_count: Option<u64>,
    /// End after this time in all, such as 60s or 1h, shared evenly among strategies [default: 30s
    /// without a count].
    #[arg(long, value_name = "TIME")]
    pub stress_duration: Option<CaseTimeout>,
    /// Host threads. On the simulated device the seed decides their order; on a real device they
    /// are real.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Streams, the default one among them.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub streams: u16,
    /// Sizes of blocks: `small` (many blocks), `mixed`, `large` (many bytes), or a range such as
    /// 512..2MiB.
    #[arg(long, value_name = "SIZES", default_value = "mixed")]
    pub sizes: BlockSizes,
    /// A JSON file to which this run is added as a slice. Every slice has another seed; the table
    /// is of all slices.
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
}

/// The duration without a count.
const DEFAULT_DURATION: Duration = Duration::from_secs(30);

impl EnduranceOptions {
    /// Runs `stress` on every target, adds the results to the state, and concludes.
    fn run(
        &self,
        kind: &'static str,
        options: &StressOptions,
        stress: impl Fn(
            &EnduranceTest,
            &StopCondition<'_>,
            &mut dyn FnMut(&IntegrityCounts),
        ) -> Result<EnduranceOutcome, TargetError>
        + Sync,
    ) -> CommandResult {
        let options = &self.with_limit(options)?;
        let targets = options.targets()?;
        let mut state = self.load_state(kind)?;
        let seed = state.next_seed(options.seed);
        let stop = exit::stop_flag(StopPolicy::AtOnce)?;
        let jobs = jobs(&targets);
        let duration = match (self.stress_count, self.stress_duration) {
            (Some(_), None) => None,
            (_, given) => Some(given.map_or(DEFAULT_DURATION, CaseTimeout::duration)),
        };
        let time = duration.map(|duration| TimeShare::new(duration, targets.len(), jobs));
        let (begin, lost) = (Instant::now(), AtomicBool::new(false));
        let outcomes = with_progress(&targets, jobs, |target, bar| {
            let end = time.as_ref().map(TimeShare::next_end);
            let interrupted = || stop.load(Ordering::Relaxed);
            let budget = match end {
                Some(end) => StressBudget::until(&interrupted, end),
                None => StressBudget::unlimited(&interrupted),
            };
            let outcome = if lost.load(Ordering::Relaxed) {
                Ok(EnduranceOutcome::skipped("this process can no longer use the GPU"))
            } else {
                let until = StopCondition { blocks: self.stress_count, budget };
                let (threads, streams, sizes) = (self.threads, self.streams, self.sizes);
                let test = EnduranceTest { target: target.clone(), threads, streams, sizes, seed };
                match stress(&test, &until, &mut |counts| bar.set_message(progress_text(target, counts))) {
                    Err(error) if error.is_skip() => Ok(EnduranceOutcome::skipped(error)),
                    outcome => outcome,
                }
            };
            if outcome.as_ref().is_ok_and(|outcome| outcome.lost_context) {
                lost.store(true, Ordering::Relaxed);
            }
            outcome
        });
        let mut saved = Vec::new();
        let mut failed = false;
        for (target, outcome) in targets.iter().zip(outcomes) {
            let (outcome, strategy) = (outcome.map_err(CommandError::usage)?, target.strategy.to_string());
            state.add(&strategy, &outcome);
            failed |= !outcome.failures.is_empty();
            if let Some(failure) = outcome.failures.first() {
                saved.push((strategy, save_failure(failure, options)?));
            }
        }
        let device = targets.first().map(|target| target.device.device_name()).transpose();
        state.slices.push(StressSlice {
            device: device.map_err(CommandError::device)?.unwrap_or_default(),
            version: VERSION.to_owned(),
            seed,
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.to_string(),
            memory_bytes: options.memory_bytes(&options.device.spec()?)?,
            wall_ns: begin.elapsed().as_nanos() as u64,
        });
        self.save_state(&state)?;
        let rows = state.rows(&saved);
        options.format.print(&Endurance { state: &state, rows: &rows })?;
        Ok(exit_code(failed, &stop))
    }

    /// Uses more memory by default on a real device.
    fn with_limit(&self, options: &StressOptions) -> Result<StressOptions, CommandError> {
        let is_simulated = options.device.spec()?.is_simulated();
        let limit = options.limit.or((!is_simulated).then_some(REAL_LIMIT));
        Ok(StressOptions { limit, ..options.clone() })
    }

    /// The state with all earlier slices.
    fn load_state(&self, kind: &str) -> Result<StressState, CommandError> {
        let Some(path) = &self.state else { return Ok(StressState::new(kind)) };
        let text = match read_text_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(StressState::new(kind)),
            read => read.with_context(|| format!("{} cannot be read", path.display())).map_err(CommandError::usage)?,
        };
        let refused = |reason: String| CommandError::usage(anyhow!("{} cannot be added to: {reason}", path.display()));
        let state: StressState =
            serde_json::from_str(&text).map_err(|error| refused(escaped(&error.to_string()).into_owned()))?;
        state.check(kind).map_err(refused)?;
        Ok(state)
    }

    /// Writes the state whole or not at all, so that an interruption cannot lose earlier slices.
    fn save_state(&self, state: &StressState) -> Result<(), CommandError> {
        let Some(path) = &self.state else { return Ok(()) };
        Ok(report::save(path, format!("{}\n", serde_json::to_string_pretty(state)?))?)
    }
}

/// The message of the progress bar.
fn progress_text(target: &StressTarget, counts: &IntegrityCounts) -> String {
    let IntegrityCounts { blocks, compared_bytes, damaged, .. } = *counts;
    let rate = Bytes(counts.per_second(compared_bytes) as u64);
    format!(
        "{}: {blocks} blocks ({:.0}/s), {} verified ({rate}/s), {damaged} damaged",
        target.strategy,
        counts.per_second(blocks),
        Bytes(compared_bytes),
    )
}
