//! `oomph threshold`, and the cases of `oomph run` that ask for a threshold.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult, StopPolicy},
    export::{self, JsonExport, PageExport},
    options::{DeviceChoice, Format, WorkerOptions},
    output,
    progress::{self, Stages},
    ranks,
    source::{DEFAULT_STRATEGIES, SourceOptions, strategies_without_plugins},
};
use crate::{
    answer::{
        ranks::RankRow,
        threshold::{
            self, LargestQuestion, LargestRecord, PROBES_AROUND, REPEATS, ThresholdDetail, ThresholdError,
            ThresholdQuestion, ThresholdStatus, case_threshold, failed_largest, failed_threshold,
        },
    },
    base::{Bytes, MemoryLimit, Progress},
    device::{Card, DeviceSpec},
    measure::CaseLabel,
    plugin,
    replay::LimitEnforcer,
    report::{
        RunFolder, ThresholdFiles,
        html::{self, PageRun},
    },
    strategy::StrategySpec,
    suite::{self, Case, CaseDeadline, CaseRunner, RankFile, StoppableSource},
    trace::{ProgressSource, Trace},
};

/// Finds the smallest memory in which a workload or trace completes, per strategy and to 2 MiB, by
/// replaying it on the simulated GPU; or the largest batch, sequence length or layer count that
/// fits in a memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph threshold snapshot.pickle
  oomph threshold snapshots/ --strategy caching           all ranks of a distributed program: a folder, or 'run-*.pickle'
  oomph threshold variable-length --strategy caching --strategy caching:expandable_segments:True
  oomph threshold training --set batch=16 --repeat 1 --format json
  oomph threshold training --smallest card                the smallest card instead of the smallest limit
  oomph threshold training --largest batch --card 8GiB,12GiB,16GiB,24GiB,80GiB
  oomph threshold training --largest batch --limit 0.5    in half of the device
  oomph threshold reference-gpt-406m --set techniques=amp,ckpt --largest context --card 24GiB
  oomph threshold reference-gpt-163m --largest width --step 96 --card 24GiB
  oomph threshold training --strategy caching --device cuda

An answer must hold for several rounds back to back (--repeat), because some patterns fail only in the third round.
Limits around it are tried too (--probes), because some patterns fit in less memory and fail in more: `stable` means that
none of them does. From the memory needed on, every limit that was tried fits.

--card is what the device has, context and libraries included; the driver refuses more. --limit is what the process may
take; the allocator refuses more. Without --largest, --card names the simulated GPU to search on, and --smallest says
which of the two is searched.

`Memory needed` is what the strategy itself reserves; compare it with torch.cuda.max_memory_reserved. `Smallest device`
adds the driver's context and the libraries; compare it with the card. A recording's own memory limit is ignored.

With --device cuda the search is still simulated. The GPU then runs the pattern with 2 MiB more, which must complete, and
with 2 MiB less, which must not. Exit code 100 if it disagrees.")]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// A strategy with its parameters, such as caching:expandable_segments:True; may be repeated.
    #[arg(long, short, value_name = "NAME[:PARAMETERS]", default_values = DEFAULT_STRATEGIES)]
    strategy: Vec<String>,
    /// `sim`, to search on the simulated GPU; or `cuda[:N]`, to confirm the answer on that GPU.
    #[arg(long, value_name = "DEVICE", default_value = DeviceChoice::DEFAULT)]
    device: String,
    /// What the device has, context and libraries included: a size such as 24GiB (otherwise it is an H200), or a card by
    /// its name or profile file. With --largest one or more, such as 8GiB,24GiB. [default: h200]
    #[arg(long, value_name = "SIZE|NAME,..", value_delimiter = ',')]
    card: Vec<Card>,
    /// With --largest, what the process may take: one or more sizes, or fractions of the device such as 0.5 or 50%.
    #[arg(long, value_name = "SIZE|FRACTION,..", value_delimiter = ',')]
    limit: Vec<MemoryLimit>,
    /// What is searched [default: limit].
    #[arg(long, value_enum, value_name = "MEMORY")]
    smallest: Option<SearchedMemory>,
    /// How many times the pattern must complete, back to back in one allocator.
    #[arg(long, value_name = "K", default_value_t = REPEATS, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// How many limits around the answer are tried.
    #[arg(long, value_name = "N", default_value_t = PROBES_AROUND, value_parser = clap::value_parser!(u32).range(..=4096))]
    probes: u32,
    /// Find the largest value of this workload parameter that fits in --card or --limit, such as batch,
    /// context or layers.
    #[arg(long, value_name = "PARAMETER")]
    largest: Option<String>,
    /// Try multiples of this only.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "largest", value_parser = clap::value_parser!(u32).range(1..))]
    step: u32,
    #[command(flatten)]
    workers: WorkerOptions,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    page: PageExport,
}

/// The memory whose smallest amount is searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum SearchedMemory {
    /// What the process may take: the allocator knows it and refuses more.
    #[default]
    Limit,
    /// What the card has for the allocator: the driver refuses more.
    Card,
}

impl SearchedMemory {
    fn enforcer(self) -> LimitEnforcer {
        match self {
            SearchedMemory::Limit => LimitEnforcer::Allocator,
            SearchedMemory::Card => LimitEnforcer::Device,
        }
    }
}

pub fn run(args: Args) -> CommandResult {
    args.page.check()?;
    if args.largest.is_some() && args.page.is_asked() {
        let message = "--export-html shows the smallest memory: leave out --largest; --format writes CSV and JSON";
        return Err(CommandError::usage(anyhow!(message)));
    }
    let device = device(&args)?;
    args.workers.check()?;
    let strategies = strategies_without_plugins(&args.strategy, &ThresholdError::Plugin.to_string())?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    match &args.largest {
        Some(parameter) => largest(&args, parameter, &device, &strategies, &stop),
        None => smallest(&args, &device, &strategies, &stop),
    }
}

/// The device of the search, or the one that confirms it.
fn device(args: &Args) -> Result<DeviceSpec, CommandError> {
    // With --largest, every card is tried on a device of its own.
    let card = match (&args.largest, &args.card[..]) {
        (Some(_), _) | (None, []) => None,
        (None, [card]) => Some(card.clone()),
        (None, _) => {
            return Err(CommandError::usage(anyhow!(
                "the search uses one --card; with --largest there may be several"
            )));
        }
    };
    if args.largest.is_none() && !args.limit.is_empty() {
        return Err(CommandError::usage(anyhow!(
            "without --largest, the smallest limit is what is searched: leave out --limit; `oomph replay` and `oomph \
             advise` answer for one limit"
        )));
    }
    let spec = DeviceChoice { device: args.device.clone(), card }.spec()?;
    if !spec.is_simulated() && args.largest.is_some() {
        return Err(CommandError::usage(anyhow!(
            "--largest searches on a simulated device; leave out --device {spec}"
        )));
    }
    if !spec.is_simulated() && args.smallest == Some(SearchedMemory::Card) {
        return Err(CommandError::usage(anyhow!(
            "on a real device the allocator enforces the limit; leave out --smallest card"
        )));
    }
    Ok(spec)
}

fn smallest(args: &Args, device: &DeviceSpec, strategies: &[StrategySpec], stop: &AtomicBool) -> CommandResult {
    if let Some(files) = ranks::files(std::slice::from_ref(&args.source.source))? {
        args.page.check_one_rank()?;
        return for_ranks(args, &files, device, strategies, stop);
    }
    let stages = Stages::of(&args.source.source);
    let details = details(args, &args.source, device, strategies, suite::all_cores(), stop, &stages)?;
    stages.finish();
    args.format.print(&details)?;
    args.page.write(|| {
        let name = details.first().map_or(args.source.source.as_str(), |detail| &detail.record.workload);
        let run = export::page_run(&format!("threshold {name}"), device, args.source.settings.seed, Vec::new())?;
        let thresholds = details.iter().map(|detail| detail.record.clone()).collect();
        Ok(html::threshold_page(&details, device.total_bytes()?, PageRun { thresholds, ..run })?)
    })?;
    Ok(if stop.load(Ordering::Relaxed) { exit::INTERRUPTED } else { exit_code(&details) })
}

/// One answer for all ranks: every rank has its own card, and the one that needs most decides.
fn for_ranks(
    args: &Args,
    files: &[RankFile],
    device: &DeviceSpec,
    strategies: &[StrategySpec],
    stop: &AtomicBool,
) -> CommandResult {
    if !device.is_simulated() {
        return Err(CommandError::usage(anyhow!("the search for ranks is simulated; leave out --device {device}")));
    }
    let jobs = ranks::jobs_of_each(files);
    let answers = ranks::ask(files, |name, progress| {
        details(args, &args.source.settings.of(name), device, strategies, jobs, stop, progress)
    });
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    let code = ranks::tell(
        "memory needed",
        &answers,
        (args.format, &JsonExport::default()),
        |details: &Vec<ThresholdDetail>| {
            let live_peak_bytes = details.iter().filter_map(|detail| detail.record.live_peak_bytes).max();
            let needed = details.iter().filter_map(|detail| detail.record.needed_bytes).max();
            let answers = details.iter().map(|detail| {
                let answer = match (detail.record.needed_bytes, detail.record.status) {
                    (Some(bytes), _) => Bytes(bytes).to_string(),
                    (None, ThresholdStatus::Skipped) => "skipped".to_owned(),
                    (None, ThresholdStatus::Error) => "failed".to_owned(),
                    (None, _) => "never fits".to_owned(),
                };
                format!("{} {answer}", detail.record.strategy)
            });
            RankRow {
                live_peak_bytes,
                figure_bytes: needed.or(live_peak_bytes),
                severity: details.iter().any(|detail| detail.record.status != ThresholdStatus::Found).into(),
                verdict: answers.collect::<Vec<_>>().join(", "),
                ..RankRow::default()
            }
        },
    )?;
    let codes = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).map(|details| exit_code(details));
    Ok(codes.fold(code, |worst, code| if worst == exit::OK { code } else { worst }))
}

/// The thresholds of one source.
fn details(
    args: &Args,
    source: &SourceOptions,
    device: &DeviceSpec,
    strategies: &[StrategySpec],
    jobs: usize,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Vec<ThresholdDetail>, CommandError> {
    let origin = source.spec()?;
    let opened = origin.open(progress).map_err(CommandError::usage)?;
    let trace = Trace::read(&ProgressSource::stage(opened, progress, "reading", 1)).map_err(CommandError::usage)?;
    let trace = Arc::new(trace);
    let mut details = Vec::new();
    for strategy in strategies {
        let label = CaseLabel {
            suite: "threshold".to_owned(),
            workload: trace.name.clone(),
            strategy: strategy.to_string(),
            device: device.to_string(),
            limit: None,
            seed: args.source.settings.seed,
            repeat: args.repeat,
        };
        let case = Case::new(label, trace.clone(), strategy.clone(), device.clone());
        let case = Case { origin: origin.clone(), timeout: args.workers.case_timeout, ..case };
        let runner = args.workers.runner(std::slice::from_ref(&case), Some(stop))?;
        let question = ThresholdQuestion {
            cap: args.smallest.unwrap_or_default().enforcer(),
            around: args.probes,
            jobs,
            progress,
            ..ThresholdQuestion::new(&trace, strategy, device)
        };
        let deadline = CaseDeadline::begin(case.timeout);
        details.push(search(&case, question, &runner, stop, &deadline));
    }
    Ok(details)
}

/// The threshold of a case, or the error that it took too long.
fn search(
    case: &Case,
    question: ThresholdQuestion<'_>,
    runner: &dyn CaseRunner,
    stop: &AtomicBool,
    deadline: &CaseDeadline,
) -> ThresholdDetail {
    let detail =
        deadline.run(stop, |stop| case_threshold(case, &ThresholdQuestion { stop: Some(stop), ..question }, runner));
    match deadline.passed() {
        Some(timeout) if detail.record.status == ThresholdStatus::Interrupted && !stop.load(Ordering::Relaxed) => {
            failed_threshold(case, question.cap, ThresholdError::TimedOut(timeout))
        }
        _ => detail,
    }
}

/// The exit code of some answers.
pub fn exit_code(details: &[ThresholdDetail]) -> u8 {
    let any = |is: fn(&ThresholdDetail) -> bool| details.iter().any(is);
    if any(|detail| detail.record.status == ThresholdStatus::Error) {
        exit::CASES_FAILED
    } else if any(|detail| detail.record.confirmed == Some(false)) {
        exit::NOT_EXACT
    } else {
        exit::OK
    }
}

/// Names the cases whose threshold could not be searched, and returns the exit code.
pub fn complain_of_failures(details: &[ThresholdDetail]) -> u8 {
    let failed = details.iter().map(|detail| &detail.record).filter(|record| record.status == ThresholdStatus::Error);
    match output::complain_of(failed.map(|record| (record.case_id.clone(), record.reason.clone()))) {
        exit::OK => exit_code(details),
        code => code,
    }
}

/// A memory in which the largest value is searched.
struct GivenMemory {
    device: DeviceSpec,
    card_bytes: u64,
    limit_bytes: Option<u64>,
}

impl GivenMemory {
    /// Every card under every limit. `device` has the card if none is given.
    fn all(args: &Args, device: &DeviceSpec) -> Result<Vec<GivenMemory>, CommandError> {
        if args.card.is_empty() && args.limit.is_empty() {
            let missing = "--largest needs --card (what the device has) or --limit (what the process may take)";
            return Err(CommandError::usage(anyhow!(missing)));
        }
        let cards = match &args.card[..] {
            [] => vec![(device.clone(), device.total_bytes()?)],
            cards => cards.iter().map(|card| (card.device_for_search(), card.total_bytes())).collect(),
        };
        let limits: Vec<Option<MemoryLimit>> = match &args.limit[..] {
            [] => vec![None],
            limits => limits.iter().copied().map(Some).collect(),
        };
        let under_limits = |(device, card_bytes): &(DeviceSpec, u64)| {
            let memory = |limit: &Option<MemoryLimit>| GivenMemory {
                device: device.clone(),
                card_bytes: *card_bytes,
                limit_bytes: limit.and_then(|limit| limit.resolve(*card_bytes)),
            };
            limits.iter().map(memory).collect::<Vec<_>>()
        };
        Ok(cards.iter().flat_map(under_limits).collect())
    }
}

fn largest(
    args: &Args,
    parameter: &str,
    device: &DeviceSpec,
    strategies: &[StrategySpec],
    stop: &AtomicBool,
) -> CommandResult {
    let origin = args.source.spec()?;
    let Some(recipe) = origin.recipe().map_err(CommandError::usage)? else {
        return Err(CommandError::usage(anyhow!(
            "--largest changes a parameter of a workload; '{}' is a trace file",
            origin.shown()
        )));
    };
    let recipe = origin.set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value)).seed(origin.seed);
    if args.smallest.is_some() {
        output::complain("note: --smallest has no effect with --largest: --card or --limit says which memory it is");
    }
    let memories = GivenMemory::all(args, device)?;
    let mut records: Vec<LargestRecord> = Vec::new();
    let stages = Stages::of(&origin.name);
    for strategy in strategies {
        for memory in &memories {
            let question = LargestQuestion {
                step: args.step,
                limit_bytes: memory.limit_bytes,
                cap: if memory.limit_bytes.is_some() { LimitEnforcer::Allocator } else { LimitEnforcer::Device },
                repeat: args.repeat,
                around: args.probes,
                jobs: suite::all_cores(),
                progress: &stages,
                ..LargestQuestion::new(&recipe, parameter, memory.card_bytes, strategy, &memory.device)
            };
            let deadline = CaseDeadline::begin(args.workers.case_timeout);
            let search = |stop: &AtomicBool| threshold::largest(&LargestQuestion { stop: Some(stop), ..question });
            match (deadline.run(stop, search), deadline.passed()) {
                (Ok(record), _) => records.push(record),
                (Err(ThresholdError::Interrupted), Some(timeout)) if !stop.load(Ordering::Relaxed) => {
                    records.push(failed_largest(&question, &ThresholdError::TimedOut(timeout))?);
                }
                (Err(ThresholdError::Interrupted), _) => return Ok(exit::INTERRUPTED),
                (Err(error @ (ThresholdError::NoSuchParameter { .. } | ThresholdError::Workload(_))), _) => {
                    return Err(CommandError::usage(error));
                }
                (Err(error), _) => return Err(error.into()),
            }
        }
    }
    stages.finish();
    args.format.print(&records)?;
    let failed = records.iter().any(|record| record.status == ThresholdStatus::Error);
    Ok(if failed { exit::CASES_FAILED } else { exit::OK })
}

/// Searches the thresholds that the folder does not hold yet, one case after the other with all
/// cores, and writes every answer at once.
pub fn run_cases(
    cases: &[Case],
    folder: &RunFolder,
    runner: &dyn CaseRunner,
    jobs: usize,
    stop: &AtomicBool,
) -> Result<ThresholdFiles, CommandError> {
    let mut files = ThresholdFiles::of_run(folder)?;
    let done = files.completed_cases();
    let remaining: Vec<&Case> = cases.iter().filter(|case| !done.contains(&case.label.case_id())).collect();
    let bar = progress::of_cases(cases.len(), cases.len() - remaining.len());
    // Cases of one workload follow each other, so it is read once.
    let mut last: Option<(&Case, Arc<Trace>)> = None;
    for case in remaining {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        bar.set_message(case.label.case_id());
        let deadline = CaseDeadline::begin(case.timeout);
        let read = match last.take() {
            Some((other, trace)) if other.origin == case.origin => Ok(trace),
            _ => read_trace(case, stop, &deadline).map(Arc::new),
        };
        let detail = match read {
            Ok(trace) => {
                let question =
                    ThresholdQuestion { jobs, ..ThresholdQuestion::new(&trace, &case.strategy, &case.device) };
                let detail = search(case, question, runner, stop, &deadline);
                last = Some((case, trace));
                detail
            }
            Err(error) => failed_threshold(case, LimitEnforcer::default(), error),
        };
        if !detail.record.reason.is_empty() {
            output::complain(&format!("{}: {}", detail.record.case_id, detail.record.reason));
        }
        files.append(detail)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(files)
}

/// Reads the source of a case.
fn read_trace(case: &Case, stop: &AtomicBool, deadline: &CaseDeadline) -> Result<Trace, ThresholdError> {
    if plugin::is_plugin(&case.strategy) {
        return Err(ThresholdError::Plugin);
    }
    let read = deadline.run(stop, |stop| Trace::read(&StoppableSource { source: &*case.source, stop }));
    match deadline.passed() {
        _ if stop.load(Ordering::Relaxed) => Err(ThresholdError::Interrupted),
        Some(timeout) => Err(ThresholdError::TimedOut(timeout)),
        None => Ok(read?),
    }
}
