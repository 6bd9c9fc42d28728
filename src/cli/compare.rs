//! `oomph compare`, and the comparison of `run --baseline`.

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;
use clap::ValueEnum;
use indicatif::ProgressBar;

use super::{
    WORKER,
    exit::{self, CommandError, CommandResult, StopPolicy},
    options::{DeviceOptions, Format},
    output, progress,
    source::{path_argument, strategy},
};
use crate::{
    answer::{
        compare::{CompareError, Comparison, Run, Tolerance, by_effect, compare},
        times::{self, TimeTolerance},
    },
    base::{escaped, text_path},
    measure::Status,
    report::{Render, StoredRun},
    suite::{
        self, Case, CaseFilter, CaseProgress, CaseSettings, SuiteFile, SuiteKind, TurnTimes, WorkerProcess,
        worker::CasePair,
    },
};

/// Compares two runs of the same cases.
///
/// Columns that do not depend on a real clock must be equal to the byte, or to --tolerance. Wall-clock
/// times (cases marked `timed`) are compared by their rounds; what cannot be told from the noise of the
/// machine is said. Simulated and real clocks are never compared. Columns of runs with an older schema
/// are converted.
///
/// With --suite, OLD and NEW are two oomph programs or two strategies. Both run the suite now and take
/// turns pass by pass, so that other work on the machine hits both: this finds much smaller changes of
/// times than two folders do.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The folder of the old run, or the name of a saved baseline; with --suite an oomph program or
    /// a strategy.
    #[arg(value_name = "OLD", value_parser = path_argument())]
    old: String,
    /// The folder of the new run, or the name of a saved baseline; with --suite an oomph program or
    /// a strategy.
    #[arg(value_name = "NEW", value_parser = path_argument())]
    new: String,
    /// Let OLD and NEW run this suite in turns; may be repeated.
    #[arg(long, value_name = "SUITE", value_parser = path_argument())]
    suite: Vec<String>,
    #[command(flatten)]
    turns: TurnOptions,
    #[command(flatten)]
    tolerance: ToleranceOptions,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json]))]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  oomph compare results/local/yesterday results/local/today
  oomph run quick --save-baseline main              keep this run under a name
  oomph run quick --baseline main                   run, and compare with it
  oomph compare main results/local/today --fail-on change --format json
  oomph compare ./oomph-main ./oomph-mine --suite throughput --filter hot-4k
  oomph compare plugin:./old.so plugin:./new.so --suite throughput --filter mix-1000";

/// What OLD and NEW run in turns.
#[derive(Debug, clap::Args)]
struct TurnOptions {
    /// With --suite: run only cases whose id contains or matches this; may be repeated.
    #[arg(long, short, value_name = "PATTERN", requires = "suite")]
    filter: Vec<String>,
    /// With --suite: leave out cases whose id contains or matches this; may be repeated.
    #[arg(long, value_name = "PATTERN", requires = "suite")]
    skip: Vec<String>,
    /// With --suite: how often each case is timed, each time in new processes [default: at least 12, and up to 60 while
    /// a slowdown of 5 % would not be found].
    #[arg(long, value_name = "N", requires = "suite", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    #[command(flatten)]
    device: DeviceOptions,
}

/// Which differences count.
#[derive(Debug, clap::Args)]
pub struct ToleranceOptions {
    /// Columns must differ by more than this share to count, such as 0.01.
    #[arg(long = "tolerance", value_name = "SHARE", default_value_t = 0.0)]
    columns: f64,
    /// Times must differ by more than this share to count.
    #[arg(long, value_name = "SHARE", default_value_t = TimeTolerance::default().noise_threshold)]
    noise_threshold: f64,
    /// And the p-value, adjusted for the number of rows, must be below this [default: 0.01]. One that the rounds cannot
    /// reach is an error.
    #[arg(long, value_name = "P")]
    significance: Option<f64>,
    /// Which differences end with exit code 102.
    #[arg(long, value_enum, default_value_t)]
    fail_on: FailOn,
}

impl Default for ToleranceOptions {
    fn default() -> Self {
        let TimeTolerance { noise_threshold, .. } = TimeTolerance::default();
        ToleranceOptions { columns: 0.0, noise_threshold, significance: None, fail_on: FailOn::default() }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// Something got worse.
    #[default]
    Regression,
    /// Anything that must be equal is not, or a time changed.
    Change,
    /// None.
    Never,
}

impl ToleranceOptions {
    fn tolerance(&self) -> Result<Tolerance, CommandError> {
        let ToleranceOptions { columns, noise_threshold, significance, .. } = *self;
        let is_share = |share: f64| !share.is_nan() && share >= 0.0;
        if !(0.0..=1.0).contains(&significance.unwrap_or(0.0)) || !is_share(noise_threshold) || !is_share(columns) {
            return Err(CommandError::usage(anyhow!(
                "--significance must be from 0 to 1, --noise-threshold and --tolerance at least 0"
            )));
        }
        let times = TimeTolerance {
            significance: significance.unwrap_or(TimeTolerance::default().significance),
            noise_threshold,
        };
        Ok(Tolerance { columns, times, demands_times: significance.is_some() })
    }

    fn code(&self, comparison: &Comparison) -> u8 {
        let fails = match self.fail_on {
            FailOn::Regression => comparison.has_regressions(),
            FailOn::Change => comparison.has_changes(),
            FailOn::Never => false,
        };
        if fails { exit::REGRESSION } else { exit::OK }
    }
}

pub fn run(args: Args) -> CommandResult {
    if !args.suite.is_empty() {
        return run_in_turns(&args);
    }
    let [old, new] = [&args.old, &args.new].map(|name| stored(&folder(name)?));
    let (old, new) = (old?, new?);
    let gaps = complain_of_gaps(&old) + complain_of_gaps(&new);
    let comparison = compared(&in_memory(old), &in_memory(new), &args.tolerance)?;
    args.format.print(&comparison)?;
    Ok(match args.tolerance.code(&comparison) {
        exit::OK if gaps > 0 && args.tolerance.fail_on != FailOn::Never => exit::NOT_WHOLE,
        code => code,
    })
}

/// A run to compare another one with, read and checked before that one begins.
pub struct Baseline {
    name: String,
    run: Run,
}

impl Baseline {
    /// Reads a baseline by its name or folder. One with missing rows is refused.
    pub fn read(name: &str) -> Result<Baseline, CommandError> {
        let stored = stored(&folder(name)?)?;
        if complain_of_gaps(&stored) > 0 {
            return Err(CommandError::usage(anyhow!(
                "the baseline '{name}' is not a complete run; keep another one with --save-baseline, or compare with \
                 `oomph compare` after the run"
            )));
        }
        Ok(Baseline { name: name.to_owned(), run: in_memory(stored) })
    }

    /// Compares a run with it. Prints to standard error, so that JSON output stays valid.
    pub fn compare(&self, run: &Path, tolerance: &ToleranceOptions) -> CommandResult {
        let comparison = compared(&self.run, &in_memory(stored(run)?), tolerance)?;
        output::complain(&format!("compared with {}:", self.name));
        output::complain(comparison.text(output::medium()).trim_end());
        Ok(tolerance.code(&comparison))
    }
}

/// The folder of a baseline.
pub fn baseline_folder(name: &str) -> Result<PathBuf, CommandError> {
    let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
    if !is_name {
        return Err(CommandError::usage(anyhow!("'{name}' is not a valid baseline name: no slashes, no leading dot")));
    }
    Ok(Path::new("results/local/baselines").join(name))
}

/// The folder of a run, by path or by the name of a baseline.
pub fn folder(text: &str) -> Result<PathBuf, CommandError> {
    let path = text_path(text);
    if path.is_dir() {
        return Ok(path);
    }
    match baseline_folder(text) {
        Ok(saved) if saved.is_dir() => Ok(saved),
        _ => {
            let hint = match path.is_file() {
                true => "; for two programs, say with --suite what they run",
                false => "",
            };
            let shown = path.display();
            Err(CommandError::usage(anyhow!("'{shown}' is neither the folder of a run nor a saved baseline{hint}")))
        }
    }
}

fn compared(old: &Run, new: &Run, tolerance: &ToleranceOptions) -> Result<Comparison, CommandError> {
    compare(old, new, &tolerance.tolerance()?).map_err(|error| match error {
        CompareError::NothingInCommon { .. } => CommandError::nothing_selected(error),
        CompareError::Clocks { .. } | CompareError::Rounds(_) => CommandError::usage(error),
    })
}

/// One of two that run a suite in turns.
enum Side {
    /// An oomph program.
    Program(PathBuf),
    /// A strategy of this program.
    Strategy(String),
}

impl Side {
    fn of(text: &str) -> Result<Side, CommandError> {
        let path = text_path(text);
        if path.is_file() {
            // A bare name would be searched in PATH.
            return Ok(Side::Program(path.canonicalize()?));
        }
        let refused = |error: CommandError| error.context(&format!("'{}' is not a program", path.display()));
        Ok(Side::Strategy(strategy(text).map_err(refused)?.to_string()))
    }

    /// The suite that this side runs.
    fn suite(&self, suite: SuiteFile) -> SuiteFile {
        match self {
            Side::Program(_) => suite,
            Side::Strategy(strategy) => suite.with_only(strategy),
        }
    }

    fn worker<'a>(&self, stop: &'a AtomicBool) -> Result<WorkerProcess<'a>, CommandError> {
        let program = match self {
            Side::Program(program) => program.clone(),
            Side::Strategy(_) => env::current_exe()?,
        };
        Ok(WorkerProcess { program, arguments: vec![WORKER.into()], stop: Some(stop) })
    }
}

/// Runs the suites with both sides and compares them.
fn run_in_turns(args: &Args) -> CommandResult {
    let tolerance = args.tolerance.tolerance()?;
    let sides = [Side::of(&args.old)?, Side::of(&args.new)?];
    if let [Side::Program(_), Side::Strategy(_)] | [Side::Strategy(_), Side::Program(_)] = sides {
        return Err(CommandError::usage(anyhow!("compare two programs, or two strategies")));
    }
    let stop = exit::stop_flag(StopPolicy::AfterRunningCases)?;
    let cases = turn_cases(args, &sides)?;
    let workers = [sides[0].worker(&stop)?, sides[1].worker(&stop)?];
    let bar = progress::of_cases(2 * cases.len(), 0);
    let [old, new] = [0, 1].map(|side| figures(&cases, side, &workers[side], &stop, &bar));
    let figures_failed = [&old, &new].map(|run| output::complain_of_failures(&run.records));
    if [&old, &new].iter().any(|run| run.records.iter().all(|record| record.status == Status::Error)) {
        bar.finish_and_clear();
        return Ok(figures_failed.into_iter().find(|code| *code != exit::OK).unwrap_or(exit::OK));
    }
    let timed: Vec<CasePair> = cases.into_iter().filter(|(case, _)| case.timed).collect();
    let rounds = turn_rounds(args, &timed, &tolerance.times)?;
    let announce = |round: u32, case: &Case| {
        bar.set_message(format!("round {} of {} to {}: {}", round + 1, rounds.0, rounds.1, case.label.case_id()));
    };
    let enough = |times: &[TurnTimes]| times::largest_findable(times, &tolerance.times) <= times::FINDABLE_GOAL;
    let measured = suite::worker::take_turns(&timed, [&workers[0], &workers[1]], rounds, announce, enough);
    bar.finish_and_clear();
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    let failed = measured.iter().filter_map(|times| Some((times.case_id.clone(), times.failure.clone()?)));
    let failures = [figures_failed[0], figures_failed[1], output::complain_of(failed)];
    let mut comparison = compared(&old, &new, &args.tolerance)?;
    let judged: Vec<TurnTimes> = measured.into_iter().filter(|times| times.failure.is_none()).collect();
    let (cases, together) = times::judge_turns(&judged, &tolerance.times).map_err(CommandError::usage)?;
    (comparison.times, comparison.times_together) = (by_effect(cases), together);
    comparison.took_turns = true;
    args.format.print(&comparison)?;
    Ok(failures.into_iter().find(|code| *code != exit::OK).unwrap_or_else(|| args.tolerance.code(&comparison)))
}

/// The cases of both sides. Those of two strategies have the names of the new one, so that their rows are compared.
fn turn_cases(args: &Args, sides: &[Side; 2]) -> Result<Vec<CasePair>, CommandError> {
    let TurnOptions { filter, skip, device, .. } = &args.turns;
    let settings = CaseSettings { device: device.spec()?, limit: device.limit, seed: None, timeout: None };
    let filter = CaseFilter { only: filter.clone(), skip: skip.clone(), exact: false };
    let mut pairs: Vec<CasePair> = Vec::new();
    for name in &args.suite {
        let suite = SuiteFile::load(name).map_err(CommandError::usage)?;
        if suite.kind != SuiteKind::Run {
            return Err(CommandError::usage(anyhow!("suite '{}' has another kind of cases", suite.name)));
        }
        let of = |side: &Side| side.suite(suite.clone()).cases(&settings).map_err(CommandError::usage);
        for (old, new) in of(&sides[0])?.into_iter().zip(of(&sides[1])?) {
            pairs.push((Case { label: new.label.clone(), ..old }, new));
        }
    }
    pairs.retain(|(_, case)| filter.takes(&case.label.case_id()));
    match pairs.is_empty() {
        true => Err(CommandError::nothing_selected(anyhow!("no case passes the filters"))),
        false => Ok(pairs),
    }
}

/// The figures of one side, which do not depend on what else the machine does.
fn figures(cases: &[CasePair], side: usize, worker: &WorkerProcess<'_>, stop: &AtomicBool, bar: &ProgressBar) -> Run {
    let of_side = |pair: &CasePair| if side == 0 { pair.0.clone() } else { pair.1.clone() };
    let cases: Vec<Case> = cases.iter().map(|pair| Case { timed: false, ..of_side(pair) }).collect();
    let mut records = Vec::new();
    suite::run(&cases, worker, suite::all_cores(), stop, |progress| match progress {
        CaseProgress::Started(case) => bar.set_message(case.label.case_id()),
        CaseProgress::Finished(_, outcome) => {
            bar.inc(1);
            records.push(outcome.record);
        }
    });
    Run { name: worker.program.display().to_string(), records, ..Run::default() }
}

/// The fewest and the most rounds.
fn turn_rounds(args: &Args, timed: &[CasePair], tolerance: &TimeTolerance) -> Result<(u32, u32), CommandError> {
    let rows = timed.iter().map(|(_, case)| 1 + case.threads.len()).sum();
    let strategies: BTreeSet<&String> = timed.iter().map(|(_, case)| &case.label.strategy).collect();
    let needed = times::rounds_for_turns(rows, strategies.len(), tolerance.significance) as u32;
    match args.turns.rounds {
        Some(rounds) if rounds < needed => Err(CommandError::usage(anyhow!(
            "a significance of {} cannot be reached with {rounds} rounds and {rows} rows of times: at least {needed} \
             rounds are needed, or a larger --significance",
            tolerance.significance
        ))),
        Some(rounds) => Ok((rounds, rounds)),
        None => Ok((needed.max(LEAST_TURN_ROUNDS), needed.max(MOST_TURN_ROUNDS))),
    }
}

/// Rounds of programs that take turns.
const LEAST_TURN_ROUNDS: u32 = 12;
const MOST_TURN_ROUNDS: u32 = 60;

/// Reads the folder of a run.
fn stored(folder: &Path) -> Result<StoredRun, CommandError> {
    let run = StoredRun::read(folder).map_err(CommandError::usage)?;
    run.environment.schema_note(folder).iter().for_each(|note| output::complain(note));
    Ok(run)
}

/// Says what is missing in a run, and counts it.
fn complain_of_gaps(run: &StoredRun) -> usize {
    let gaps = run.gaps();
    gaps.iter().for_each(|gap| output::complain(&format!("{}: {gap}", run.path.display())));
    gaps.len()
}

fn in_memory(run: StoredRun) -> Run {
    let StoredRun { path, environment, records, timings, .. } = run;
    // Times of different processors, or different numbers of them, cannot be compared.
    let (processor, device) = (escaped(&environment.machine), escaped(&environment.device_name));
    let machine = format!("{processor}, {} CPUs, {device}", environment.cpus);
    Run { name: path.display().to_string(), machine, records, timings }
}
