//! `oomph replay`. With `--release A,B` it prints one table with the program under the rules of each release.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::anyhow;

use super::{
    environment,
    exit::{self, CommandError, CommandResult, StopPolicy},
    export::{self, ExportOptions},
    options::{DeviceOptions, Format, NeedsOptions, WorkerOptions},
    output,
    progress::Stages,
    source::{self, RecordedProgram, SourceSettings, source_argument},
};
use crate::{
    answer::releases::{ReleaseRow, compare_releases},
    base::{Progress, text_path},
    device::DeviceSpec,
    measure::{
        CaseDetail, CaseLabel, CaseRecord, Status, TimingRecord,
        lifetimes::{EVERY_LIFE, MOST_LIVES},
    },
    pytorch::Release,
    replay::{OnOutOfMemory, Pace},
    report::{
        self,
        html::{DetailStore, PageRun},
        plot::{self, LevelLine},
    },
    strategy::StrategySpec,
    suite::{self, Case, CaseProgress, SourceSpec, WithNeeds},
    trace::{self, PROGRESS_PER_READING, ProgressSource, Source},
};

/// Runs workloads or traces under each strategy, on a fresh device, and compares the results.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph replay checkerboard
  oomph replay leak-cache leak-cache-fixed --strategy caching      a program beside its repaired twin
  oomph replay training --set batch=16 --strategy caching --strategy direct --limit 24GiB
  oomph replay steps.oomph.gz --strategy caching:max_split_size_mb:128,garbage_collection_threshold:0.8
  oomph replay snapshot.pickle --strategy caching --limit 12GiB --repeat 3
  oomph replay training --strategy caching --export-snapshot training.pickle
  oomph replay variable-length --pack --waterfall
  oomph replay variable-length --limit 6GiB --export-html why.html
  oomph replay mix-1000 --strategy caching --strategy address:caching --threads 1,4,16
  oomph replay reference-gpt-163m --strategy caching --strategy plugin:./my_allocator.so,alloc:my_alloc,free:my_free
  PYTORCH_ALLOC_CONF=expandable_segments:True oomph replay training --strategy caching:env
  oomph replay snapshot.pickle --strategy caching:recorded
  oomph replay snapshot.pickle --strategy caching:release:2.13,expandable_segments:True
  oomph replay snapshot.pickle --release 2.11,2.15                 what changes from one PyTorch to another

`caching:recorded` is PyTorch's allocator with the settings of the recording. A PyTorch snapshot is replayed under the
memory limit of its program, if the recording implies one; --limit sets another.

`caching` follows the release of PyTorch that wrote a snapshot, and 2.11 elsewhere. With several releases after --release, one
table shows peaks, OOMs, and how many requests get another address than under the first release.")]
pub struct Args {
    /// A workload (see `oomph list workloads`), a workload TOML, or a trace file in any known
    /// format; several are compared in one table.
    #[arg(value_name = "SOURCE", required = true, value_parser = source_argument())]
    sources: Vec<String>,
    #[command(flatten)]
    settings: SourceSettings,
    /// A strategy with its parameters, such as caching:expandable_segments:True; may be repeated.
    /// `caching:env` takes the settings from PYTORCH_CUDA_ALLOC_CONF or, if that is not set, PYTORCH_ALLOC_CONF;
    /// `caching:recorded` those of the recording. [default: direct, caching and
    /// caching:expandable_segments:True; for a recording also caching:recorded]
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    strategy: Vec<String>,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    workers: WorkerOptions,
    #[command(flatten)]
    needs: NeedsOptions,
    #[command(flatten)]
    exports: ExportOptions,
    /// Run the whole pattern this many times, back to back: some fail only in the third round.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// When memory runs out, skip the request and continue instead of stopping.
    #[arg(long)]
    skip_oom: bool,
    /// Keep the recorded times between events on the device's clock.
    #[arg(long)]
    paced: bool,
    /// Also measure wall-clock times, alone and with these numbers of threads, such as 1,4,16.
    /// Threads share the strategy under one lock, each with its own copy of the pattern.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Write the replay as a PyTorch memory snapshot, for pytorch.org/memory_viz; needs exactly one
    /// SOURCE and one --strategy.
    #[arg(long, value_name = "FILE.pickle")]
    export_snapshot: Option<PathBuf>,
}

pub fn run(args: Args) -> CommandResult {
    check_export(&args)?;
    if !args.threads.is_empty() && args.format != Format::Table {
        return Err(CommandError::usage(anyhow!(
            "--threads prints its times as a table only; `oomph run` writes them to timings.csv"
        )));
    }
    let compares = args.settings.given.release.len() > 1;
    if compares && (!args.threads.is_empty() || args.exports.is_asked() || args.export_snapshot.is_some()) {
        let message = "several releases are compared in one table: leave out --threads and --export-...; --format writes CSV and JSON";
        return Err(CommandError::usage(anyhow!(message)));
    }
    let device = args.device.spec()?;
    let opened = open_sources(&args)?;
    let stages = Stages::of(&args.title());
    let cases = cases(&args, &device, &opened, &stages)?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    if compares {
        return run_releases(&cases, args.format, &stages, &stop);
    }
    let runner = args.workers.runner(&cases, Some(&stop))?;
    let mut records: Vec<Option<CaseRecord>> = vec![None; cases.len()];
    let mut details: Vec<Option<CaseDetail>> = vec![None; cases.len()];
    let mut timings = Vec::new();
    let mut worker_failed = false;
    let with_needs = WithNeeds::new(&runner, args.needs.pack_within());
    suite::run(&cases, &with_needs, suite::all_cores(), &stop, |progress| match progress {
        CaseProgress::Started(case) => stages.note(&format!("replaying {}", args.name_of(&case.label))),
        CaseProgress::Finished(case, outcome) => {
            // The progress of a worker process is known when it has finished.
            if runner.isolation.isolates(case) {
                stages.advance(u64::from(args.repeat) * PROGRESS_PER_READING);
            }
            if let Some(place) = cases.iter().position(|other| std::ptr::eq(other, case)) {
                worker_failed |= outcome.worker_failed;
                records[place] = Some(outcome.record);
                details[place] = Some(outcome.detail);
                timings.extend(outcome.timings);
            }
        }
    });
    let records: Vec<CaseRecord> = records.into_iter().flatten().collect();
    let exported = export(&args, &cases, &records, &stop, &stages);
    stages.finish();
    if !worker_failed && let Some(reason) = unreadable_source(&records, &opened) {
        return Err(CommandError::usage(anyhow!("{reason}")));
    }
    for source in &opened {
        if let Some(note) = source.program.as_ref().and_then(|program| program.note(&args.device)) {
            let subject = if args.sources.len() > 1 { format!("{}: ", source.label) } else { String::new() };
            output::complain(&format!("note: {subject}{note}"));
        }
    }
    args.format.print(&records)?;
    let details: Vec<CaseDetail> = details.into_iter().flatten().collect();
    if args.format == Format::Table {
        output::say(&over_time(&args, &opened, &records, &details))?;
    }
    if let Some(waterfall) = args.needs.waterfall(&records, args.format) {
        output::say(&waterfall)?;
    }
    if !timings.is_empty() {
        output::say(&format!("\n{}", report::timings(&timings, output::medium())))?;
    }
    args.exports.write(&records, || page_data(&args, &device, &records, timings, details))?;
    if let Some(written) = exported? {
        output::complain(&written);
    }
    Ok(if stop.load(Ordering::Relaxed) { exit::INTERRUPTED } else { output::complain_of_failures(&records) })
}

impl Args {
    /// All sources, where they need one name.
    fn title(&self) -> String {
        match &self.sources[..] {
            [source] => text_path(source).display().to_string(),
            sources => format!("{} sources", sources.len()),
        }
    }

    /// A case among the others: sources differ where there are several.
    fn name_of(&self, label: &CaseLabel) -> String {
        if self.sources.len() > 1 { format!("{}, {}", label.workload, label.strategy) } else { label.strategy.clone() }
    }
}

/// A source and what it is replayed under.
struct ReplaySource {
    origin: SourceSpec,
    source: Arc<dyn Source>,
    program: Option<RecordedProgram>,
    strategies: Vec<StrategySpec>,
    /// The releases to replay it under, if users name them.
    releases: Vec<Release>,
    /// Its name in tables: as typed, where the names of several files are the same.
    label: String,
}

/// Opens all sources. Each gets the strategies as typed, or the usual ones for it.
fn open_sources(args: &Args) -> Result<Vec<ReplaySource>, CommandError> {
    let mut opened: Vec<ReplaySource> = Vec::new();
    for typed in &args.sources {
        if opened.iter().any(|other| other.origin.name == *typed) {
            let typed = text_path(typed);
            let message = format!("'{}' is given twice; --repeat runs a source several times", typed.display());
            return Err(CommandError::usage(anyhow!(message)));
        }
        let mut options = args.settings.of(typed);
        // One release is the one that wrote a snapshot. Otherwise they are rules to replay under.
        let named = SourceSpec { name: typed.clone(), ..SourceSpec::default() };
        let releases = match args.settings.given.release[..] {
            [_] if named.is_snapshot().map_err(CommandError::usage)? => Vec::new(),
            _ => std::mem::take(&mut options.settings.given.release),
        };
        let origin = options.spec()?;
        let (source, program) = options.open_with_program(&Stages::of(typed))?;
        let label = source.name().to_owned();
        opened.push(ReplaySource {
            origin,
            source: Arc::from(source),
            program,
            strategies: Vec::new(),
            label,
            releases,
        });
    }
    // Resolved once: `caching:env` reports what it found.
    let typed = source::resolved_strategies(&args.strategy)?;
    let names: Vec<String> = opened.iter().map(|source| source.label.clone()).collect();
    for source in &mut opened {
        let specs = source::strategies_of_recording(&typed, &source.origin.shown(), source.program.as_ref())?;
        source.strategies = strategies_at(specs, &source.releases, &args.strategy)?;
        if names.iter().filter(|name| **name == source.label).count() > 1 {
            source.label = source.origin.shown();
        }
    }
    Ok(opened)
}

/// Why a source cannot be read. That fails in the same way under every strategy: one error, no table. Anything else that
/// fails under every strategy is a failure of the cases, of which there may be only one.
fn unreadable_source<'a>(records: &'a [CaseRecord], sources: &[ReplaySource]) -> Option<&'a str> {
    let first = records.first()?;
    let is_same = |record: &CaseRecord| record.status == Status::Error && record.reason == first.reason;
    let is_unreadable = |replayed: &ReplaySource| trace::check(&*replayed.source).is_err();
    (records.iter().all(is_same) && sources.iter().any(is_unreadable)).then_some(&first.reason)
}

/// Reserved memory over time, one line per case. The cases of a source share an axis: a case that ran out of memory has a
/// shorter line.
fn over_time(args: &Args, opened: &[ReplaySource], records: &[CaseRecord], details: &[CaseDetail]) -> String {
    let mut text = String::new();
    for source in opened {
        let events = |detail: &CaseDetail| {
            let record = records.iter().find(|record| record.case_id == detail.case_id);
            record.and_then(|record| record.oom_event.filter(|_| record.status == Status::Oom).or(record.events))
        };
        let is_drawn = |detail: &&CaseDetail| detail.label.workload == source.label && detail.timeline.points.len() > 1;
        let drawn: Vec<&CaseDetail> = details.iter().filter(is_drawn).collect();
        // The length of a generated workload is not counted here: that could take longer than the replay.
        let whole = source.source.events();
        let whole = whole.map(|events| events * u64::from(args.repeat));
        let whole = drawn.iter().filter_map(|detail| events(detail)).chain(whole).max().unwrap_or(0).max(1);
        let line = |detail: &&CaseDetail| LevelLine {
            name: detail.label.strategy.clone(),
            levels: detail
                .timeline
                .points
                .iter()
                .map(|point| point.reserved_bytes)
                .map(|of| (of.min, of.max))
                .collect(),
            share: events(detail).map_or(1.0, |events| events as f64 / whole as f64),
        };
        let lines: Vec<LevelLine> = drawn.iter().map(line).collect();
        if !lines.is_empty() {
            let of_source = if opened.len() > 1 { format!(" of {}", source.label) } else { String::new() };
            text.push_str(&format!("\nreserved over events{of_source}\n{}", plot::lines(&lines, output::terminal())));
        }
    }
    text
}

/// This replay as a run, for the page.
fn page_data(
    args: &Args,
    device: &DeviceSpec,
    records: &[CaseRecord],
    timings: Vec<TimingRecord>,
    details: Vec<CaseDetail>,
) -> Result<PageRun, CommandError> {
    Ok(PageRun {
        name: match &args.sources[..] {
            [_] => records.first().map_or_else(String::new, |record| record.workload.clone()),
            _ => args.title(),
        },
        environment: environment::describe(device, args.settings.seed)?,
        records: records.to_vec(),
        timings,
        details: DetailStore::Held(details.into_iter().map(|detail| (detail.case_id.clone(), detail)).collect()),
        ..PageRun::default()
    })
}

/// Recordings are not overwritten. A snapshot shows one run of one strategy.
fn check_export(args: &Args) -> Result<(), CommandError> {
    args.exports.check()?;
    if args.exports.force && !args.exports.is_asked() && args.export_snapshot.is_none() {
        return Err(CommandError::usage(anyhow!(
            "--force overwrites files of --export-snapshot and the other exports; there is none"
        )));
    }
    let Some(path) = &args.export_snapshot else { return Ok(()) };
    if args.sources.len() != 1 {
        let count = args.sources.len();
        return Err(CommandError::usage(anyhow!("--export-snapshot needs exactly one SOURCE; there are {count}")));
    }
    if args.strategy.len() != 1 {
        let count = args.strategy.len();
        return Err(CommandError::usage(anyhow!("--export-snapshot needs exactly one --strategy; there are {count}")));
    }
    if args.repeat > 1 {
        return Err(CommandError::usage(anyhow!("--export-snapshot shows one round: leave out --repeat")));
    }
    export::check_overwriting(path, args.exports.force)
}

/// Replays the case once more and writes its snapshot, if that is wanted and the case can run.
fn export(
    args: &Args,
    cases: &[Case],
    records: &[CaseRecord],
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Option<String>, CommandError> {
    let (Some(path), [case], [record]) = (&args.export_snapshot, cases, records) else { return Ok(None) };
    if !matches!(record.status, Status::Completed | Status::Oom) {
        return Ok(None);
    }
    let witnessed = export::witnessed(&case.replay(Some(stop)))?;
    if witnessed.replayed.interrupted {
        return Ok(None);
    }
    export::save(&witnessed, path, progress).map(Some)
}

/// One case per source and strategy. The stage of the replays begins.
fn cases(
    args: &Args,
    device: &DeviceSpec,
    sources: &[ReplaySource],
    stages: &Stages,
) -> Result<Vec<Case>, CommandError> {
    let readings_for_needs = 1 + u64::from(args.needs.pack);
    let exported = u64::from(args.export_snapshot.is_some());
    let readings =
        |source: &ReplaySource| source.strategies.len() as u64 * u64::from(args.repeat) + exported + readings_for_needs;
    stages.begin_stage("replaying", sources.iter().map(readings).sum::<u64>().saturating_mul(PROGRESS_PER_READING));
    let mut cases = Vec::new();
    for replayed in sources {
        let source = ProgressSource::within(Arc::clone(&replayed.source), stages.clone(), readings(replayed));
        cases.extend(cases_of(args, device, replayed, &(Arc::new(source) as Arc<dyn Source>))?);
    }
    Ok(cases)
}

/// One case per strategy, under the limit of the recorded program if there is no other.
fn cases_of(
    args: &Args,
    device: &DeviceSpec,
    replayed: &ReplaySource,
    source: &Arc<dyn Source>,
) -> Result<Vec<Case>, CommandError> {
    let program = replayed.program.as_ref();
    let recorded = program.and_then(|program| program.limit(&args.device));
    let limit = args.device.limit_bytes()?.or(recorded.map(|limit| limit.bytes));
    // The recorded program survived its failures.
    let is_replaced =
        args.device.limit.is_some() || (recorded.is_none() && program.is_some_and(|known| known.limit.is_some()));
    let survives = !is_replaced && program.is_some_and(|program| program.failures > 0 && !program.died);
    let case = |strategy: &StrategySpec| {
        let label = CaseLabel {
            suite: "replay".to_owned(),
            workload: replayed.label.clone(),
            strategy: strategy.to_string(),
            device: device.to_string(),
            limit,
            seed: args.settings.seed,
            repeat: args.repeat,
        };
        Case {
            origin: replayed.origin.clone(),
            on_out_of_memory: if args.skip_oom || survives { OnOutOfMemory::Skip } else { OnOutOfMemory::Stop },
            pace: if args.paced { Pace::Recorded } else { Pace::Flat },
            timed: !args.threads.is_empty(),
            threads: args.threads.clone(),
            most_lives: if args.exports.wants_page() { EVERY_LIFE } else { MOST_LIVES },
            timeout: args.workers.case_timeout,
            ..Case::new(label, Arc::clone(source), strategy.clone(), device.clone())
        }
    };
    Ok(replayed.strategies.iter().map(case).collect())
}

/// The strategies as of these releases, where they model PyTorch's allocator. With several releases, only those stay.
fn strategies_at(
    specs: Vec<StrategySpec>,
    releases: &[Release],
    typed: &[String],
) -> Result<Vec<StrategySpec>, CommandError> {
    if releases.is_empty() {
        return Ok(specs);
    }
    if let Some(named) = typed.iter().find(|text| StrategySpec::from(text.as_str()).names_release()) {
        let message = format!("'{named}' names a release, and so does --release: leave out one of them");
        return Err(CommandError::usage(anyhow!(message)));
    }
    let mut at_releases: Vec<StrategySpec> = Vec::new();
    for spec in specs.iter().filter(|spec| releases.len() == 1 || spec.release().is_some()) {
        for release in releases {
            let spec = spec.at_release(*release);
            spec.check().map_err(CommandError::usage)?;
            if !at_releases.contains(&spec) {
                at_releases.push(spec);
            }
        }
    }
    if at_releases.is_empty() {
        let message =
            "--release compares releases of PyTorch's allocator: choose --strategy caching, with settings or without";
        return Err(CommandError::usage(anyhow!(message)));
    }
    Ok(at_releases)
}

/// Replays all cases, those of one program and strategy together, and prints the table.
fn run_releases(cases: &[Case], format: Format, stages: &Stages, stop: &AtomicBool) -> CommandResult {
    let is_same = |one: &Case, other: &Case| {
        let unnamed = |case: &Case| case.strategy.at_release(Release::DEFAULT);
        one.label.workload == other.label.workload && unnamed(one) == unnamed(other)
    };
    let rows: Vec<ReleaseRow> = cases.chunk_by(is_same).flat_map(|group| compare_releases(group, stop)).collect();
    stages.finish();
    format.print(&rows)?;
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    let failed = rows.iter().filter(|row| row.status == Status::Error);
    Ok(output::complain_of(failed.map(|row| (format!("{}/{}", row.workload, row.strategy), row.reason.clone()))))
}
