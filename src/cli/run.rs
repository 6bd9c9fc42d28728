//! `oomph run`.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{
    environment, exit,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format, WorkerOptions},
    output, progress, run_thresholds, threshold,
};
use crate::{
    answer::threshold::ThresholdStatus,
    device::DeviceSpec,
    measure::Status,
    report::{self, ReportError, RunFolder},
    suite::{self, Case, CaseOutcome, CaseRunner, CaseSettings, Filter, Progress, SuiteFile, SuiteKind},
};

/// Runs suites case by case: progress while it works, one table at the end, and a folder with the CSVs. Rows are
/// written after every case; Ctrl-C finishes the running cases and keeps what is there, `--resume` goes on from it.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Suites by name (see `oomph list suites`) or path; without any, `quick`.
    #[arg(value_name = "SUITE")]
    suites: Vec<String>,
    /// Run only cases whose id contains this, or matches it as a whole where it has a `*`; may be repeated.
    #[arg(long, short, value_name = "PATTERN")]
    filter: Vec<String>,
    /// Leave out cases whose id contains or matches this; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,
    /// Patterns must equal the whole id.
    #[arg(long)]
    exact: bool,
    /// Print the cases that would run, and run none.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    device: DeviceOptions,
    /// One seed for all cases, instead of those in the suite.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    workers: WorkerOptions,
    /// How many simulated cases run side by side [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Where the run's folder goes [default: results/local/TIME-SUITE].
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Go on with an interrupted run: cases that its folder holds are not run again.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: Args) -> Outcome {
    let names = if args.suites.is_empty() { vec!["quick".to_owned()] } else { args.suites.clone() };
    let suites: Vec<SuiteFile> =
        names.iter().map(|name| SuiteFile::load(name)).collect::<Result<_, _>>().map_err(Failure::usage)?;
    let device = args.device.spec()?;
    let cases = select(&args, &suites, &device)?;
    let ids: Vec<String> = cases.iter().map(|case| case.label.case_id()).collect();
    let asks_for_threshold =
        |case: &Case| suites.iter().any(|suite| suite.name == case.label.suite && suite.kind == SuiteKind::Threshold);
    if args.list {
        output::say(&ids.join("\n"))?;
        return Ok(exit::OK);
    }

    let runner = args.workers.runner(&cases, None)?;
    let environment = environment::describe(&device, args.seed.unwrap_or(suites[0].seeds[0]))?;
    let folder = match (&args.resume, &args.output) {
        (Some(path), _) => RunFolder::resume(path, &environment, &ids),
        (None, Some(path)) => RunFolder::create(path, &environment),
        (None, None) => RunFolder::create(&environment::new_run_folder(&names), &environment),
    }
    .map_err(Failure::usage)?;
    let stop = interrupt::flag(interrupt::Running::Cases)?;
    let (searched, measured): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(asks_for_threshold);
    run_cases(&args, &folder, measured, &runner, &stop)?;
    let jobs = args.jobs.unwrap_or_else(suite::all_cores);
    let thresholds = match searched.is_empty() {
        true => None,
        false => Some(run_thresholds::run(&searched, &folder, &runner, jobs, &stop)?),
    };

    let base = &suites[0].base;
    let records = folder.finish(&ids, base)?;
    let details = thresholds.map(|files| files.finish(&ids)).transpose()?.unwrap_or_default();
    if details.is_empty() || !records.is_empty() {
        output::say(&args.format.records(&records)?)?;
    }
    if !details.is_empty() {
        output::say(&threshold::formatted(&details, args.format)?)?;
    }
    if args.format == Format::Table {
        let timings = report::read_timings(folder.path())?;
        if !timings.is_empty() {
            output::say(&format!("\n{}", report::timings(&timings, output::terminal_width())))?;
        }
        output::say(&format!("\nresults: {}", folder.path().display()))?;
    }
    let answered = details.iter().filter(|detail| detail.record.status != ThresholdStatus::Interrupted).count();
    let ended = records.iter().filter(|record| record.status != Status::Interrupted).count() + answered;
    if ended < ids.len() {
        output::complain(&format!(
            "interrupted after {} of {} cases; go on with: oomph run {} --resume {}",
            ended,
            ids.len(),
            names.join(" "),
            folder.path().display()
        ));
        return Ok(exit::INTERRUPTED);
    }
    Ok(match output::complain_of_failures(&records) {
        exit::OK => threshold::exit_code(&details, &stop),
        failed => failed,
    })
}

/// Runs what the folder does not hold yet, and writes every case down as soon as it is done.
fn run_cases(
    args: &Args,
    folder: &RunFolder,
    cases: Vec<Case>,
    runner: &dyn CaseRunner,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let (total, done) = (cases.len(), folder.completed_cases());
    let remaining: Vec<Case> = cases.into_iter().filter(|case| !done.contains(&case.label.case_id())).collect();
    let bar = progress::of_cases(total, total - remaining.len());
    let mut trouble = Ok(());
    let jobs = args.jobs.unwrap_or_else(suite::all_cores);
    suite::run(&remaining, runner, jobs, stop, |progress| match progress {
        Progress::Started(case) => bar.set_message(case.label.case_id()),
        Progress::Finished(_, outcome) => {
            bar.inc(1);
            if trouble.is_ok() {
                trouble = write_down(folder, &outcome);
                // Without a place for results there is no point in going on.
                if trouble.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        }
    });
    bar.finish_and_clear();
    Ok(trouble?)
}

fn write_down(folder: &RunFolder, outcome: &CaseOutcome) -> Result<(), ReportError> {
    for timing in &outcome.timings {
        folder.append_timing(timing)?;
    }
    folder.append(&outcome.record, &outcome.detail)
}

/// The cases of all suites that pass the filters.
fn select(args: &Args, suites: &[SuiteFile], device: &DeviceSpec) -> Result<Vec<Case>, Failure> {
    let settings = CaseSettings {
        device: device.clone(),
        limit: args.device.limit.map(|limit| limit.0),
        seed: args.seed,
        timeout: args.workers.case_timeout,
    };
    let filter = Filter { only: args.filter.clone(), skip: args.skip.clone(), exact: args.exact };
    let mut cases = Vec::new();
    for suite in suites {
        cases.extend(suite.cases(&settings).map_err(Failure::usage)?);
    }
    let all = cases.len();
    cases.retain(|case| filter.takes(&case.label.case_id()));
    if cases.is_empty() {
        return Err(Failure::nothing_selected(anyhow!(
            "none of the {all} cases passes the filters; `oomph run --list` shows their ids"
        )));
    }
    Ok(cases)
}
