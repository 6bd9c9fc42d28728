//! `oomph run`.

pub mod shared;

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;
pub use shared::{Args, DEFAULT_SUITE};
use shared::{RunShare, print_place, write_page};

use super::{
    claims, compare, environment,
    exit::{self, CommandError, CommandResult, StopPolicy},
    options::Format,
    output, progress, techniques, threshold,
};
use crate::{
    answer::threshold::{ThresholdDetail, ThresholdStatus, WithThresholds},
    base::text_path,
    device::{DeviceFleet, DeviceSpec},
    measure::{CaseRecord, Status},
    models::Recipe,
    report::{self, BoundRow, ReportError, RunFolder, html},
    suite::{
        self, Case, CaseFingerprint, CaseOutcome, CaseProgress, CaseRunner, CaseSettings, Isolation, SuiteFile,
        SuiteKind, WithNeeds,
    },
    trace,
};

/// Who measures the figures of a case, and who its wall-clock times.
struct Runners<'a> {
    figures: &'a dyn CaseRunner,
    times: &'a dyn CaseRunner,
}

/// A run with its cases selected and its folder open.
struct PreparedRun {
    fleet: DeviceFleet,
    cases: Vec<Case>,
    /// The ids of the cases, in order.
    ids: Vec<String>,
    share: RunShare,
    folder: RunFolder,
    /// What it is compared with.
    baseline: Option<compare::Baseline>,
    /// Where the run is kept as a baseline.
    kept: Option<PathBuf>,
}

pub fn run(args: Args) -> CommandResult {
    let mut suites = load_all(&args.suite_names())?;
    let added = args.added_strategies()?;
    if let Some(own) = suites.iter().find(|suite| suite.kind.has_own_table()) {
        if !added.is_empty() {
            let message = format!("suite '{}' chooses its strategies itself: no --strategy", own.name);
            return Err(CommandError::usage(anyhow!(message)));
        }
        return run_own_table(&args, own, suites.len());
    }
    suites.iter_mut().for_each(|suite| suite.add_strategies(&added));
    // First, because a batch system may stop the job while cases are being generated.
    let stop = exit::stop_flag(StopPolicy::AfterRunningCases)?;
    let Some(mut run) = prepare(&args, &suites)? else { return Ok(exit::OK) };
    let runner = args.workers.runner(&run.cases, None)?;
    let asks_for_threshold =
        |case: &Case| suites.iter().any(|suite| suite.name == case.label.suite && suite.kind == SuiteKind::Threshold);
    let (searched, measured) = std::mem::take(&mut run.cases).into_iter().partition(asks_for_threshold);
    let with_needs = WithNeeds::new(&runner, args.needs.pack_within());
    let is_searched =
        |case: &Case| suites.iter().any(|suite| suite.name == case.label.suite && args.searches_need(suite));
    let with_thresholds = WithThresholds::new(&with_needs, &is_searched);
    let timer: &dyn CaseRunner = match args.workers.isolate {
        Isolation::Never => &runner.here,
        Isolation::Auto | Isolation::Always => &runner.worker,
    };
    run_cases(&args, &run, measured, Runners { figures: &with_thresholds, times: timer }, &stop)?;
    let thresholds = match searched {
        none if none.is_empty() => None,
        searched => Some(threshold::run_cases(&searched, &run.folder, &runner, args.jobs(), &stop)?),
    };
    let records = run.folder.finish(&run.ids, &suites[0].base)?;
    let details = thresholds.map(|files| files.finish(&run.ids)).transpose()?.unwrap_or_default();
    print(&args, &run.folder, &records, &details)?;
    conclude(&args, &run, &records, &details)
}

/// The suites. Their names tell their cases apart.
fn load_all(names: &[String]) -> Result<Vec<SuiteFile>, CommandError> {
    let suites: Vec<SuiteFile> = names.iter().map(|name| load(name)).collect::<Result<_, _>>()?;
    for (place, suite) in suites.iter().enumerate() {
        if let Some(first) = suites[..place].iter().position(|other| other.name == suite.name) {
            let (one, other) = (&names[first], &names[place]);
            return Err(CommandError::usage(match one == other {
                true => anyhow!("suite '{one}' is given twice"),
                false => anyhow!(
                    "'{one}' and '{other}' are two suites called '{}', so their cases would have the same ids: rename one \
                     of the files",
                    suite.name
                ),
            }));
        }
    }
    Ok(suites)
}

/// A suite. The error for the name of a workload or a recording says what to do with it.
fn load(name: &str) -> Result<SuiteFile, CommandError> {
    SuiteFile::load(name).map_err(|error| {
        let path = &*text_path(name);
        let is_recipe = path.extension().is_some_and(|ending| ending == "toml") && Recipe::from_file(path).is_ok();
        match is_recipe || Recipe::named(name).is_ok() || trace::recognise(path).is_ok() {
            true => CommandError::usage(anyhow!(
                "'{0}' is a workload or trace, not a suite; run it with `oomph replay {0}`",
                path.display()
            )),
            false => CommandError::usage(error),
        }
    })
}

/// Selects the cases and opens the folder; `None` if the cases were only listed.
fn prepare(args: &Args, suites: &[SuiteFile]) -> Result<Option<PreparedRun>, CommandError> {
    // A wrong name or a damaged file must not cost a run.
    let baseline = args.baseline.as_deref().map(compare::Baseline::read).transpose()?;
    let kept = args.save_baseline.as_deref().map(compare::baseline_folder).transpose()?;
    let fleet = match suites.iter().find(|suite| suite.kind == SuiteKind::Threshold) {
        Some(suite) => args.one_device(suite)?.into(),
        None => args.device.choice.fleet()?,
    };
    let device = fleet.any();
    let mut cases = select(args, suites, &device)?;
    let all_ids: Vec<String> = cases.iter().map(|case| case.label.case_id()).collect();
    let mut share = RunShare::new(args, &all_ids);
    if args.list {
        output::say(&share.of(all_ids).join("\n"))?;
        return Ok(None);
    }
    args.workers.check()?;
    args.exports.check()?;
    let ids = all_ids.iter().map(String::as_str);
    let contents: HashMap<&str, CaseFingerprint> = ids.zip(suite::fingerprints(&cases)).collect();
    share.note_contents(|case_id| contents.get(case_id).cloned().unwrap_or_default());
    cases.retain(|case| share.has(&case.label.case_id()));
    let ids = share.of(all_ids);
    let environment = environment::describe(&device, args.seed.unwrap_or(suites[0].seeds[0]))?;
    let environment = share.in_environment(environment, args.settings(suites)?);
    let place = share.place(args)?;
    let folder = match args.resume {
        Some(_) => RunFolder::resume(&place, &environment, share.plan()),
        None => RunFolder::create(&place, &environment, share.plan()),
    };
    let folder = folder.map_err(CommandError::usage)?;
    Ok(Some(PreparedRun { fleet, cases, ids, share, folder, baseline, kept }))
}

/// The cases of all suites that pass the filters.
fn select(args: &Args, suites: &[SuiteFile], device: &DeviceSpec) -> Result<Vec<Case>, CommandError> {
    let settings = CaseSettings {
        device: device.clone(),
        limit: args.device.limit,
        seed: args.seed,
        timeout: args.workers.case_timeout,
    };
    let filter = args.filter();
    let mut cases = Vec::new();
    for suite in suites {
        cases.extend(suite.cases(&settings).map_err(CommandError::usage)?);
        note_absent_files(suite);
    }
    let all = cases.len();
    cases.retain(|case| filter.takes(&case.label.case_id()));
    if cases.is_empty() {
        return Err(CommandError::nothing_selected(anyhow!(
            "none of the {all} cases passes the filters; `oomph run --list` shows their ids"
        )));
    }
    cases.iter().flat_map(|case| case.origin.notes()).for_each(|note| output::complain_once(&note));
    Ok(cases)
}

/// Names the files of a suite that are not here.
pub(super) fn note_absent_files(suite: &SuiteFile) {
    for pattern in suite.absent_files() {
        output::complain(&format!(
            "note: suite '{}' runs without '{pattern}', which does not exist here; recordings are in the repository, not \
             in the binary",
            suite.name
        ));
    }
}

/// A suite with a table of its own also has a folder of its own.
fn run_own_table(args: &Args, suite: &SuiteFile, suites: usize) -> CommandResult {
    let alone = format!("suite '{}' has a table of its own", suite.name);
    if suites > 1 {
        return Err(CommandError::usage(anyhow!("{alone}: run it by itself")));
    }
    if args.device.limit.is_some() || args.seed.is_some() {
        return Err(CommandError::usage(anyhow!("{alone} and chooses limits and seeds itself: no --limit, no --seed")));
    }
    if args.workers.case_timeout.is_some() {
        return Err(CommandError::usage(anyhow!("{alone}, and its rows have no time-out: no --case-timeout")));
    }
    if args.exports.is_asked() {
        return Err(CommandError::usage(anyhow!("{alone}; its files are in its folder: no --export-...")));
    }
    match suite.kind {
        SuiteKind::Claims => claims::run_suite(args, suite),
        _ => techniques::run_suite(args, suite),
    }
}

/// Runs the cases that the folder does not hold yet, and writes every case when it is done.
fn run_cases(
    args: &Args,
    run: &PreparedRun,
    cases: Vec<Case>,
    runners: Runners<'_>,
    stop: &AtomicBool,
) -> Result<(), CommandError> {
    let (total, done) = (cases.len(), run.folder.completed_cases());
    let mut remaining: Vec<Case> = cases.into_iter().filter(|case| !done.contains(&case.label.case_id())).collect();
    let bar = progress::of_cases(total, total - remaining.len());
    // Figures do not depend on other work of the machine, so those of timed cases are measured in parallel too. Such a
    // case is written when it has its times: `--resume` would not run it again.
    let timed: BTreeSet<String> = remaining.iter().filter(|case| case.timed).map(|case| case.label.case_id()).collect();
    remaining.iter_mut().for_each(|case| case.timed = false);
    let mut measured: Vec<(Case, CaseOutcome)> = Vec::new();
    let mut written = Ok(());
    let listener = |progress: CaseProgress<'_>| match progress {
        CaseProgress::Started(case) => bar.set_message(case.label.case_id()),
        CaseProgress::Finished(case, outcome) if timed.contains(&case.label.case_id()) => {
            measured.push((case.clone(), *outcome));
        }
        CaseProgress::Finished(_, outcome) => {
            bar.inc(1);
            if written.is_ok() {
                written = write_case(&run.folder, &outcome);
                // Results that cannot be written are not worth waiting for.
                if written.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    match run.fleet.is_shared() {
        true => suite::run_on(run.fleet.members(), &remaining, runners.figures, stop, listener),
        false => suite::run(&remaining, runners.figures, args.jobs(), stop, listener),
    }
    written?;
    let announce = |round: u32, case: &Case| {
        bar.set_message(format!("round {} of {}: {}", round + 1, args.rounds(), case.label.case_id()));
    };
    // All rounds of a case run on one device.
    if let (true, Some(device)) = (run.fleet.is_shared(), run.fleet.members().first()) {
        measured.iter_mut().for_each(|(case, _)| case.device = device.clone());
    }
    for outcome in with_times(measured, runners.times, args.rounds(), stop, announce) {
        write_case(&run.folder, &outcome)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Adds wall-clock times to the cases that can be timed. If `stop` is set before all rounds are done, the cases are left
/// out.
fn with_times(
    measured: Vec<(Case, CaseOutcome)>,
    runner: &dyn CaseRunner,
    rounds: u32,
    stop: &AtomicBool,
    announce: impl FnMut(u32, &Case),
) -> Vec<CaseOutcome> {
    let runs_to_an_end = |status| matches!(status, Status::Completed | Status::Oom);
    let (timed, mut all): (Vec<_>, Vec<_>) =
        measured.into_iter().partition(|(_, outcome)| runs_to_an_end(outcome.record.status));
    let cases: Vec<Case> = timed.iter().map(|(case, _)| case.clone()).collect();
    let times = suite::time_in_rounds(&cases, runner, rounds, stop, announce);
    for ((case, mut outcome), times) in timed.into_iter().zip(times) {
        match times {
            Some(Ok(timings)) => outcome.timings = timings,
            Some(Err(reason)) => {
                outcome.record.status = Status::Error;
                outcome.record.reason = format!("the case was measured, but not timed: {reason}");
            }
            None => continue,
        }
        all.push((case, outcome));
    }
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

fn write_case(folder: &RunFolder, outcome: &CaseOutcome) -> Result<(), ReportError> {
    for timing in &outcome.timings {
        folder.append_timing(timing)?;
    }
    folder.append(&outcome.record, &outcome.detail)
}

fn print(
    args: &Args,
    folder: &RunFolder,
    records: &[CaseRecord],
    details: &Vec<ThresholdDetail>,
) -> Result<(), CommandError> {
    let page = write_page(folder.path())?;
    args.exports.write(records, || Ok(html::PageRun::of_folder(folder.path())?))?;
    if details.is_empty() || !records.is_empty() {
        args.format.print(records)?;
    }
    if let Some(waterfall) = args.needs.waterfall(records, args.format) {
        output::say(&waterfall)?;
    }
    if let (Some(bounds), Format::Table) = (bounds(records), args.format) {
        output::say("")?;
        args.format.print(&bounds)?;
    }
    if !details.is_empty() {
        args.format.print(details)?;
    }
    if args.format == Format::Table {
        let timings = report::read_timings(folder.path())?;
        if !timings.is_empty() {
            output::say(&format!("\n{}", report::timings(&timings, output::medium())))?;
        }
    }
    print_place(folder.path(), &page, args.format)
}

/// What strategies reserve over all workloads; `None` with one strategy or one workload, which the table of cases shows.
fn bounds(records: &[CaseRecord]) -> Option<Vec<BoundRow>> {
    let differ = |of: fn(&CaseRecord) -> &String| records.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]));
    let several = differ(|record| &record.workload) && differ(|record| &record.strategy);
    several.then(|| report::bounds(records)).filter(|rows| !rows.is_empty())
}

/// Reports interruptions, failures and regressions, keeps the baseline, and returns the exit code.
fn conclude(args: &Args, run: &PreparedRun, records: &[CaseRecord], details: &[ThresholdDetail]) -> CommandResult {
    let answered = details.iter().map(|detail| &detail.record);
    let answered =
        answered.filter(|record| record.status != ThresholdStatus::Interrupted).map(|record| &record.case_id);
    let measured = records.iter().filter(|record| record.status != Status::Interrupted).map(|record| &record.case_id);
    // A folder may also hold cases of earlier filters.
    let held: BTreeSet<&String> = measured.chain(answered).collect();
    let ended = run.ids.iter().filter(|id| held.contains(id)).count();
    let folder = run.folder.path();
    if ended < run.ids.len() {
        output::complain(&format!(
            "interrupted after {ended} of {} cases; continue with: {}",
            run.ids.len(),
            run.share.resume_command(folder)
        ));
        return Ok(exit::INTERRUPTED);
    }
    let failures = match output::complain_of_failures(records) {
        exit::OK => threshold::exit_code(details),
        failed => failed,
    };
    let regressions = match &run.baseline {
        Some(baseline) => baseline.compare(folder, &args.tolerance)?,
        None => exit::OK,
    };
    if let Some(place) = &run.kept {
        report::copy_run(folder, place).map_err(CommandError::usage)?;
        output::complain(&format!("kept as baseline: {}", place.display()));
    }
    Ok(if failures == exit::OK { regressions } else { failures })
}
