//! `oomph replay`.

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
    source::{self, RecordedProgram, SourceOptions},
};
use crate::{
    base::Progress,
    device::DeviceSpec,
    measure::{CaseDetail, CaseLabel, CaseRecord, Status, TimingRecord},
    replay::{OnOutOfMemory, Pace},
    report::{
        self,
        html::{DetailStore, PageRun},
        plot,
    },
    strategy::StrategySpec,
    suite::{self, Case, CaseProgress, SourceSpec, WithNeeds},
    trace::{PROGRESS_PER_READING, ProgressSource, Source},
};

/// Runs one workload or trace under each strategy, on a fresh device, and compares the results.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph replay checkerboard
  oomph replay training --set batch=16 --strategy caching --strategy direct --limit 24GiB
  oomph replay steps.oomph.gz --strategy caching:max_split_size_mb:128,garbage_collection_threshold:0.8
  oomph replay snapshot.pickle --strategy caching --limit 12GiB --repeat 3
  oomph replay training --strategy caching --export-snapshot training.pickle
  oomph replay variable-length --pack --waterfall
  oomph replay variable-length --limit 6GiB --export-html why.html
  oomph replay mix-1000 --strategy caching --strategy address:caching --threads 1,4,16
  oomph replay gpt-124m --strategy caching --strategy plugin:./my_allocator.so,alloc:my_alloc,free:my_free
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True oomph replay training --strategy caching:env
  oomph replay snapshot.pickle --strategy caching:recorded

`caching:recorded` is PyTorch's allocator with the settings of the recording. A PyTorch snapshot is replayed under the
memory limit of its program, if the recording implies one; --limit sets another.")]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// A strategy with its parameters, such as caching:expandable_segments:True; may be repeated.
    /// `caching:env` takes the settings from PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF,
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
    /// --strategy.
    #[arg(long, value_name = "FILE.pickle")]
    export_snapshot: Option<PathBuf>,
    /// Overwrite the file of --export-snapshot.
    #[arg(long, requires = "export_snapshot")]
    force: bool,
}

pub fn run(args: Args) -> CommandResult {
    check_export(&args)?;
    if !args.threads.is_empty() && args.format != Format::Table {
        return Err(CommandError::usage(anyhow!(
            "--threads prints its times as a table only; `oomph run` writes them to timings.csv"
        )));
    }
    let readings_for_needs = 1 + u64::from(args.needs.pack);
    let origin = args.source.spec()?;
    let stages = Stages::of(&args.source.source);
    let (source, program) = args.source.open_with_program(&stages)?;
    let strategies = source::strategies_of_recording(&args.strategy, program.as_ref())?;
    let passes = strategies.len() as u64 * u64::from(args.repeat) + u64::from(args.export_snapshot.is_some());
    let source = ProgressSource::stage(source, stages.clone(), "replaying", passes + readings_for_needs);
    let cases = cases(&args, &strategies, Arc::new(source), &origin, program.as_ref())?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    let runner = args.workers.runner(&cases, Some(&stop))?;
    let mut records: Vec<Option<CaseRecord>> = vec![None; cases.len()];
    let mut details: Vec<Option<CaseDetail>> = vec![None; cases.len()];
    let mut timings = Vec::new();
    let with_needs = WithNeeds::new(&runner, args.needs.pack_within());
    suite::run(&cases, &with_needs, suite::all_cores(), &stop, |progress| match progress {
        CaseProgress::Started(case) => stages.note(&format!("replaying under {}", case.label.strategy)),
        CaseProgress::Finished(case, outcome) => {
            // The progress of a worker process is known when it has finished.
            if runner.isolation.isolates(case) {
                stages.advance(u64::from(args.repeat) * PROGRESS_PER_READING);
            }
            if let Some(place) = cases.iter().position(|other| std::ptr::eq(other, case)) {
                records[place] = Some(outcome.record);
                details[place] = Some(outcome.detail);
                timings.extend(outcome.timings);
            }
        }
    });
    let records: Vec<CaseRecord> = records.into_iter().flatten().collect();
    let exported = export(&args, &cases, &records, &stop, &stages);
    stages.finish();
    // An unreadable source fails in the same way under every strategy: one error, no table.
    if let [first, rest @ ..] = &records[..]
        && first.status == Status::Error
        && rest.iter().all(|record| (record.status, &record.reason) == (first.status, &first.reason))
    {
        return Err(CommandError::usage(anyhow!("{}", first.reason)));
    }
    if let Some(note) = program.as_ref().and_then(|program| program.note(&args.device)) {
        output::complain(&format!("note: {note}"));
    }
    args.format.print(&records)?;
    let details: Vec<CaseDetail> = details.into_iter().flatten().collect();
    if args.format == Format::Table {
        output::say(&over_time(&details))?;
    }
    if let Some(waterfall) = args.needs.waterfall(&records, args.format) {
        output::say(&waterfall)?;
    }
    if !timings.is_empty() {
        output::say(&format!("\n{}", report::timings(&timings, output::medium())))?;
    }
    let device = args.device.spec()?;
    args.exports.write(&records, || page_data(&args, &device, &records, timings, details))?;
    if let Some(written) = exported? {
        output::complain(&written);
    }
    Ok(if stop.load(Ordering::Relaxed) { exit::INTERRUPTED } else { output::complain_of_failures(&records) })
}

/// Reserved memory over time, one line per strategy.
fn over_time(details: &[CaseDetail]) -> String {
    let levels = |detail: &CaseDetail| detail.timeline.points.iter().map(|point| point.reserved_bytes.max).collect();
    let drawn: Vec<(String, Vec<u64>)> = details
        .iter()
        .filter(|detail| detail.timeline.points.len() > 1)
        .map(|detail| (detail.label.strategy.clone(), levels(detail)))
        .collect();
    if drawn.is_empty() {
        return String::new();
    }
    format!("\nreserved over events\n{}", plot::lines(&drawn, output::terminal()))
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
        name: records.first().map_or_else(String::new, |record| record.workload.clone()),
        environment: environment::describe(device, args.source.settings.seed)?,
        records: records.to_vec(),
        timings,
        details: DetailStore::Held(details.into_iter().map(|detail| (detail.case_id.clone(), detail)).collect()),
        ..PageRun::default()
    })
}

/// A snapshot shows one run of one strategy.
fn check_export(args: &Args) -> Result<(), CommandError> {
    let Some(path) = &args.export_snapshot else { return Ok(()) };
    if args.strategy.len() != 1 {
        let count = args.strategy.len();
        return Err(CommandError::usage(anyhow!("--export-snapshot needs exactly one --strategy; there are {count}")));
    }
    if args.repeat > 1 {
        return Err(CommandError::usage(anyhow!("--export-snapshot shows one round: leave out --repeat")));
    }
    export::check_overwriting(path, args.force)
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

/// One case per strategy, under the limit of the recorded program if there is no other.
fn cases(
    args: &Args,
    strategies: &[StrategySpec],
    source: Arc<dyn Source>,
    origin: &SourceSpec,
    program: Option<&RecordedProgram>,
) -> Result<Vec<Case>, CommandError> {
    let device = args.device.spec()?;
    let recorded = program.and_then(|program| program.limit(&args.device));
    let limit = args.device.limit_bytes()?.or(recorded.map(|limit| limit.bytes));
    // The recorded program survived its failures.
    let is_replaced =
        args.device.limit.is_some() || (recorded.is_none() && program.is_some_and(|known| known.limit.is_some()));
    let survives = !is_replaced && program.is_some_and(|program| program.failures > 0 && !program.died);
    let case = |strategy: &StrategySpec| {
        let label = CaseLabel {
            suite: "replay".to_owned(),
            workload: source.name().to_owned(),
            strategy: strategy.to_string(),
            device: device.to_string(),
            limit,
            seed: args.source.settings.seed,
            repeat: args.repeat,
        };
        Case {
            origin: origin.clone(),
            on_out_of_memory: if args.skip_oom || survives { OnOutOfMemory::Skip } else { OnOutOfMemory::Stop },
            pace: if args.paced { Pace::Recorded } else { Pace::Flat },
            timed: !args.threads.is_empty(),
            threads: args.threads.clone(),
            timeout: args.workers.case_timeout,
            ..Case::new(label, Arc::clone(&source), strategy.clone(), device.clone())
        }
    };
    Ok(strategies.iter().map(case).collect())
}
