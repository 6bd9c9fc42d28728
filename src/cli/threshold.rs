//! `oomph threshold`, and the cases of `oomph run` that ask for a threshold.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult, StopPolicy},
    options::{DeviceOptions, Format, WorkerOptions},
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
            ThresholdQuestion, ThresholdStatus, case_threshold,
        },
    },
    base::{Bytes, Progress},
    device::DeviceSpec,
    measure::CaseLabel,
    replay::LimitEnforcer,
    report::{RunFolder, ThresholdFiles},
    strategy::StrategySpec,
    suite::{self, Case, CaseRunner, RankFile},
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
  oomph threshold training --largest batch --memory 8GiB,12GiB,16GiB,24GiB,80GiB
  oomph threshold gpt-355m --set techniques=amp,ckpt --largest context --memory 24GiB
  oomph threshold gpt-124m --largest width --step 96 --memory 24GiB
  oomph threshold training --strategy caching --device cuda

An answer must hold for several rounds back to back (--repeat), because some patterns fail only in the third round.
Limits around it are tried too (--probes), because some patterns fit in less memory and fail in more: `stable` means that
none of them does. From the memory needed on, every limit that was tried fits.

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
    /// The simulated GPU to search on: `sim` (an H200), `sim:SIZE` or `sim:PROFILE`; or `cuda[:N]`,
    /// to search on `sim` and confirm the answer on that GPU.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: String,
    /// What enforces the limit.
    #[arg(long, value_enum, default_value_t)]
    cap: LimitEnforcer,
    /// How many times the pattern must complete, back to back in one allocator.
    #[arg(long, value_name = "K", default_value_t = REPEATS, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// How many limits around the answer are tried.
    #[arg(long, value_name = "N", default_value_t = PROBES_AROUND, value_parser = clap::value_parser!(u32).range(..=4096))]
    probes: u32,
    /// Find the largest value of this workload parameter that fits in --memory, such as batch,
    /// context or layers.
    #[arg(long, value_name = "PARAMETER", requires = "memory")]
    largest: Option<String>,
    /// The memory of the whole card, context and libraries included; one or more, such as
    /// 8GiB,24GiB.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', requires = "largest")]
    memory: Vec<Bytes>,
    /// Try multiples of this only.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "largest", value_parser = clap::value_parser!(u32).range(1..))]
    step: u32,
    #[command(flatten)]
    workers: WorkerOptions,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: Args) -> CommandResult {
    let device = device(&args)?;
    let reason = "a plugin calls the driver itself, so its memory cannot be limited";
    let strategies = strategies_without_plugins(&args.strategy, reason)?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    match &args.largest {
        Some(parameter) => largest(&args, parameter, &device, &strategies, &stop),
        None => smallest(&args, &device, &strategies, &stop),
    }
}

/// The device of the search, or the one that confirms it.
fn device(args: &Args) -> Result<DeviceSpec, CommandError> {
    let spec = DeviceOptions { device: args.device.clone(), limit: None }.spec()?;
    if !spec.is_simulated() && args.largest.is_some() {
        return Err(CommandError::usage(anyhow!(
            "--largest searches on a simulated device; leave out --device {spec}"
        )));
    }
    if !spec.is_simulated() && args.cap == LimitEnforcer::Device {
        return Err(CommandError::usage(anyhow!(
            "on a real device the allocator enforces the limit; leave out --cap device"
        )));
    }
    Ok(spec)
}

fn smallest(args: &Args, device: &DeviceSpec, strategies: &[StrategySpec], stop: &AtomicBool) -> CommandResult {
    if let Some(files) = ranks::files(std::slice::from_ref(&args.source.source))? {
        return for_ranks(args, &files, device, strategies, stop);
    }
    let stages = Stages::of(&args.source.source);
    let details = details(args, &args.source, device, strategies, suite::all_cores(), stop, &stages)?;
    stages.finish();
    args.format.print(&details)?;
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
    let code = ranks::tell("memory needed", &answers, args.format, |details: &Vec<ThresholdDetail>| {
        let peak_bytes = details.iter().filter_map(|detail| detail.record.live_peak_bytes).max();
        let needed = details.iter().filter_map(|detail| detail.record.threshold_bytes).max();
        let answers = details.iter().map(|detail| {
            let answer = match (detail.record.threshold_bytes, detail.record.status) {
                (Some(bytes), _) => Bytes(bytes).to_string(),
                (None, ThresholdStatus::Skipped) => "skipped".to_owned(),
                (None, ThresholdStatus::Error) => "failed".to_owned(),
                (None, _) => "never fits".to_owned(),
            };
            format!("{} {answer}", detail.record.strategy)
        });
        RankRow {
            peak_bytes,
            figure_bytes: needed.or(peak_bytes),
            severity: details.iter().any(|detail| detail.record.status != ThresholdStatus::Found).into(),
            verdict: answers.collect::<Vec<_>>().join(", "),
            ..RankRow::default()
        }
    })?;
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
            cap: args.cap,
            around: args.probes,
            jobs,
            stop: Some(stop),
            progress,
            ..ThresholdQuestion::new(&trace, strategy, device)
        };
        details.push(case_threshold(&case, &question, &runner));
    }
    Ok(details)
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
            origin.name
        )));
    };
    let recipe = origin.set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value)).seed(origin.seed);
    let mut records: Vec<LargestRecord> = Vec::new();
    let stages = Stages::of(&origin.name);
    for strategy in strategies {
        for memory in &args.memory {
            let question = LargestQuestion {
                step: args.step,
                cap: args.cap,
                repeat: args.repeat,
                around: args.probes,
                jobs: suite::all_cores(),
                stop: Some(stop),
                progress: &stages,
                ..LargestQuestion::new(&recipe, parameter, memory.0, strategy, device)
            };
            match threshold::largest(&question) {
                Ok(record) => records.push(record),
                Err(ThresholdError::Interrupted) => return Ok(exit::INTERRUPTED),
                Err(error @ (ThresholdError::NoSuchParameter { .. } | ThresholdError::Workload(_))) => {
                    return Err(CommandError::usage(error));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    stages.finish();
    args.format.print(&records)?;
    Ok(exit::OK)
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
    let mut files = ThresholdFiles::open(folder.path())?;
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
        let trace = match &last {
            Some((other, trace)) if other.origin == case.origin => Arc::clone(trace),
            _ => Arc::new(Trace::read(&*case.source)?),
        };
        let question = ThresholdQuestion::new(&trace, &case.strategy, &case.device);
        let detail = case_threshold(case, &ThresholdQuestion { jobs, stop: Some(stop), ..question }, runner);
        if !detail.record.reason.is_empty() {
            output::complain(&format!("{}: {}", detail.record.case_id, detail.record.reason));
        }
        files.append(detail)?;
        last = Some((case, trace));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(files)
}
