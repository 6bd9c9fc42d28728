//! `oomph run`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{
    compare::{self, ToleranceOptions},
    environment, exit,
    export_tables::ExportOptions,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format, NeedsOptions, WorkerOptions},
    output, progress, run_claims,
    run_partition::{Part, Share},
    run_techniques, run_thresholds, threshold,
};
use crate::{
    answer::threshold::ThresholdStatus,
    device::{DeviceSpec, Fleet},
    measure::Status,
    models::Recipe,
    report::{self, Environment, ReportError, RunFolder, RunSettings, html},
    suite::{
        self, Case, CaseOutcome, CaseProgress, CaseRunner, CaseSettings, Filter, Partition, SuiteFile, SuiteKind,
        WithNeeds,
    },
    trace,
};

/// Runs suites case by case: progress while it works, one table at the end, and a folder with the CSVs. Rows are
/// written after every case; Ctrl-C finishes the running cases and keeps what is there, `--resume` goes on from it.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Suites by name (see `oomph list suites`) or path; without any, `quick`.
    #[arg(value_name = "SUITE")]
    pub(super) suites: Vec<String>,
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
    pub(super) list: bool,
    #[command(flatten)]
    pub(super) device: DeviceOptions,
    /// One seed for all cases, instead of those in the suite.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    workers: WorkerOptions,
    #[command(flatten)]
    needs: NeedsOptions,
    #[command(flatten)]
    exports: ExportOptions,
    /// How many simulated cases run side by side [default: all cores].
    #[arg(long, short, value_name = "N")]
    pub(super) jobs: Option<usize>,
    /// Where the run's folder goes [default: results/local/TIME-SUITE].
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    pub(super) output: Option<PathBuf>,
    /// Go on with an interrupted run: cases that its folder holds are not run again.
    #[arg(long, value_name = "DIR")]
    pub(super) resume: Option<PathBuf>,
    /// Run one part of the cases, to share a run among machines: `slice:2/4` takes every fourth case from the second on,
    /// `hash:2/4` deals by case id, `slurm` takes the part of this task of a job array. `oomph report` merges the folders.
    #[arg(long, value_name = "PART", conflicts_with_all = ["save_baseline", "baseline"])]
    partition: Option<Part>,
    /// Keep this run under a name, to compare others with.
    #[arg(long, value_name = "NAME")]
    save_baseline: Option<String>,
    /// Compare with a run that was kept under this name, or with a run's folder: exit code 102 if something got worse.
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    #[command(flatten)]
    tolerance: ToleranceOptions,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: Format,
}

impl Args {
    /// Which cases are wanted.
    pub(super) fn filter(&self) -> Filter {
        Filter { only: self.filter.clone(), skip: self.skip.clone(), exact: self.exact }
    }

    /// Which part of the cases is wanted.
    pub(super) fn partition(&self) -> Result<Option<Partition>, Failure> {
        self.partition.map(Part::resolve).transpose()
    }

    /// What the results say about what was asked for.
    pub(super) fn settings(&self, suites: &[SuiteFile]) -> RunSettings {
        RunSettings {
            suites: suites.iter().map(|suite| suite.name.clone()).collect(),
            only: self.filter.clone(),
            skip: self.skip.clone(),
            exact: self.exact,
            limit_bytes: self.device.limit.map(|limit| limit.0),
            seed: self.seed,
            case_timeout: self.workers.case_timeout.map(|timeout| timeout.to_string()),
            pack: self.needs.pack,
            base: suites.first().map_or_else(String::new, |suite| suite.base.clone()),
            contents: None,
        }
    }

    /// The device of a suite that works out its answers on a single one.
    pub(super) fn one_device(&self, suite: &SuiteFile) -> Result<DeviceSpec, Failure> {
        self.device.spec().map_err(|failure| failure.context(&format!("suite '{}'", suite.name)))
    }
}

/// A suite; whoever names a workload or a recording is told what to do with it.
fn suite_of(name: &str) -> Result<SuiteFile, Failure> {
    SuiteFile::load(name).map_err(|error| {
        let path = Path::new(name);
        let is_recipe = path.extension().is_some_and(|ending| ending == "toml") && Recipe::from_file(path).is_ok();
        match is_recipe || Recipe::named(name).is_ok() || trace::recognise(path).is_ok() {
            true => Failure::usage(anyhow!("'{name}' is no suite but a single pattern: `oomph replay {name}` runs it")),
            false => Failure::usage(error),
        }
    })
}

pub fn run(args: Args) -> Outcome {
    let names = if args.suites.is_empty() { vec!["quick".to_owned()] } else { args.suites.clone() };
    let suites: Vec<SuiteFile> = names.iter().map(|name| suite_of(name)).collect::<Result<_, _>>()?;
    if let Some(own) = suites.iter().find(|suite| suite.kind.has_own_table()) {
        return run_own_table(&args, own, suites.len());
    }
    // From the start, because a batch system may want its node back while cases are still being made up.
    let stop = interrupt::flag(interrupt::Running::Cases)?;
    // A name that is wrong must not cost a run.
    args.baseline.as_deref().map(compare::folder).transpose()?;
    let kept = args.save_baseline.as_deref().map(compare::baseline_folder).transpose()?;
    let fleet = match suites.iter().find(|suite| suite.kind == SuiteKind::Threshold) {
        Some(suite) => args.one_device(suite)?.into(),
        None => args.device.fleet()?,
    };
    let device = fleet.any();
    let mut cases = select(&args, &suites, &device)?;
    let contents = args.partition.is_some().then(|| suite::contents(&cases));
    let all_ids: Vec<String> = cases.iter().map(|case| case.label.case_id()).collect();
    let share = Share::new(args.partition()?, &all_ids);
    cases.retain(|case| share.has(&case.label.case_id()));
    let ids = share.of(all_ids);
    let asks_for_threshold =
        |case: &Case| suites.iter().any(|suite| suite.name == case.label.suite && suite.kind == SuiteKind::Threshold);
    if args.list {
        output::say(&ids.join("\n"))?;
        return Ok(exit::OK);
    }

    let runner = args.workers.runner(&cases, None)?;
    let environment = share.in_environment(Environment {
        settings: Some(RunSettings { contents, ..args.settings(&suites) }),
        ..environment::describe(&device, args.seed.unwrap_or(suites[0].seeds[0]))?
    });
    let place = share.place(&args);
    let folder = share.open(&args, &place, || match args.resume {
        Some(_) => RunFolder::resume(&place, &environment, &ids),
        None => RunFolder::create(&place, &environment),
    });
    let folder = folder.map_err(Failure::usage)?;
    let (searched, measured): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(asks_for_threshold);
    let with_needs = WithNeeds::new(&runner, args.needs.pack_within());
    run_cases(&args, &fleet, &folder, measured, &with_needs, &stop)?;
    let jobs = args.jobs.unwrap_or_else(suite::all_cores);
    let thresholds = match searched.is_empty() {
        true => None,
        false => Some(run_thresholds::run(&searched, &folder, &runner, jobs, &stop)?),
    };

    let base = &suites[0].base;
    let records = folder.finish(&ids, base)?;
    let details = thresholds.map(|files| files.finish(&ids)).transpose()?.unwrap_or_default();
    let page = write_page(folder.path())?;
    args.exports.write(&records, || Ok(html::Run::of_folder(folder.path())?))?;
    if details.is_empty() || !records.is_empty() {
        args.format.print(&records)?;
    }
    if let Some(waterfall) = args.needs.waterfall(&records, args.format) {
        output::say(&waterfall)?;
    }
    if !details.is_empty() {
        args.format.print(&details)?;
    }
    if args.format == Format::Table {
        let timings = report::read_timings(folder.path())?;
        if !timings.is_empty() {
            output::say(&format!("\n{}", report::timings(&timings, output::medium())))?;
        }
        output::say(&format!("\nresults: {}\nreport:  {}", folder.path().display(), page.display()))?;
    }
    let answered = details.iter().map(|detail| &detail.record);
    let answered =
        answered.filter(|record| record.status != ThresholdStatus::Interrupted).map(|record| &record.case_id);
    let measured = records.iter().filter(|record| record.status != Status::Interrupted).map(|record| &record.case_id);
    // A folder may hold answers of earlier filters beside those that were asked for now.
    let held: BTreeSet<&String> = measured.chain(answered).collect();
    let ended = ids.iter().filter(|id| held.contains(id)).count();
    if ended < ids.len() {
        output::complain(&format!(
            "interrupted after {ended} of {} cases; go on with: {}",
            ids.len(),
            share.again(folder.path())
        ));
        return Ok(exit::INTERRUPTED);
    }
    let failures = match output::complain_of_failures(&records) {
        exit::OK => threshold::exit_code(&details),
        failed => failed,
    };
    let regressions = match &args.baseline {
        Some(baseline) => compare::with_baseline(baseline, folder.path(), &args.tolerance)?,
        None => exit::OK,
    };
    if let Some(place) = kept {
        report::copy_run(folder.path(), &place).map_err(Failure::usage)?;
        output::complain(&format!("kept as baseline: {}", place.display()));
    }
    Ok(if failures == exit::OK { regressions } else { failures })
}

/// Writes the page of a run into its folder.
pub(super) fn write_page(folder: &Path) -> Result<PathBuf, Failure> {
    let place = folder.join("report.html");
    html::write_page(&[folder.to_owned()], &[], &place)?;
    Ok(place)
}

/// A suite whose table is its own has a folder of its own too.
fn run_own_table(args: &Args, suite: &SuiteFile, suites: usize) -> Outcome {
    let alone = format!("suite '{}' has a table of its own", suite.name);
    if suites > 1 {
        return Err(Failure::usage(anyhow!("{alone}: run it by itself")));
    }
    if args.device.limit.is_some() || args.seed.is_some() {
        return Err(Failure::usage(anyhow!("{alone}, and chooses limits and seeds itself: no --limit, no --seed")));
    }
    if args.exports.is_asked() {
        return Err(Failure::usage(anyhow!("{alone}, whose files are in its folder: no --export-...")));
    }
    match suite.kind {
        SuiteKind::Claims => run_claims::run(args, suite),
        _ => run_techniques::run(args, suite),
    }
}

/// Runs what the folder does not hold yet, and writes every case down as soon as it is done.
fn run_cases(
    args: &Args,
    fleet: &Fleet,
    folder: &RunFolder,
    cases: Vec<Case>,
    runner: &dyn CaseRunner,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let (total, done) = (cases.len(), folder.completed_cases());
    let remaining: Vec<Case> = cases.into_iter().filter(|case| !done.contains(&case.label.case_id())).collect();
    let bar = progress::of_cases(total, total - remaining.len());
    let mut trouble = Ok(());
    let listener = |progress: CaseProgress<'_>| match progress {
        CaseProgress::Started(case) => bar.set_message(case.label.case_id()),
        CaseProgress::Finished(_, outcome) => {
            bar.inc(1);
            if trouble.is_ok() {
                trouble = write_down(folder, &outcome);
                // Without a place for results there is no point in going on.
                if trouble.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    match fleet.is_shared() {
        true => suite::run_on(fleet.members(), &remaining, runner, stop, listener),
        false => suite::run(&remaining, runner, args.jobs.unwrap_or_else(suite::all_cores), stop, listener),
    }
    bar.finish_and_clear();
    Ok(trouble?)
}

fn write_down(folder: &RunFolder, outcome: &CaseOutcome) -> Result<(), ReportError> {
    for timing in &outcome.timings {
        folder.append_timing(timing)?;
    }
    folder.append(&outcome.record, &outcome.detail)
}

/// Says which cases of a suite are left out because their files are elsewhere.
pub(super) fn note_absent_files(suite: &SuiteFile) {
    for pattern in suite.absent_files() {
        output::complain(&format!(
            "note: suite '{}' goes without '{pattern}', which is not to be seen from here; recordings are in the repository \
             and not in the binary",
            suite.name
        ));
    }
}

/// The cases of all suites that pass the filters.
fn select(args: &Args, suites: &[SuiteFile], device: &DeviceSpec) -> Result<Vec<Case>, Failure> {
    let settings = CaseSettings {
        device: device.clone(),
        limit: args.device.limit.map(|limit| limit.0),
        seed: args.seed,
        timeout: args.workers.case_timeout,
    };
    let filter = args.filter();
    let mut cases = Vec::new();
    for suite in suites {
        cases.extend(suite.cases(&settings).map_err(Failure::usage)?);
        note_absent_files(suite);
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
