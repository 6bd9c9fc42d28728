//! What all kinds of stress share: options, running targets, saving failures, printing verdicts,
//! exit codes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use indicatif::ProgressBar;

use crate::{
    base::{Bytes, MIB, MemoryLimit, parallel_map},
    cli::{
        environment::{self, unused_path},
        exit::{self, CommandError, CommandResult, StopPolicy},
        options::{DeviceChoice, Format},
        output,
        progress::{self, Stages},
    },
    device::DeviceSpec,
    plugin,
    report::quoted,
    strategy::{STRATEGIES, StrategyEntry, StrategySpec},
    stress::{FailureEvidence, StressBudget, StressFailure, StressTarget, StressVerdict, VerdictRow},
    suite,
    trace::{self, ProgressSource, Trace, TraceError},
};

/// Strategies without memory of their own.
const WITHOUT_MEMORY: [&str; 2] = ["null", "address"];

/// Every strategy that can be tested.
pub fn strategies_with_memory() -> impl Iterator<Item = &'static StrategyEntry> {
    STRATEGIES.iter().filter(|entry| !WITHOUT_MEMORY.contains(&entry.name))
}

/// The strategies, the device, and where failures are saved.
#[derive(Clone, Debug, clap::Args)]
pub struct StressOptions {
    /// A strategy with its parameters, such as caching:expandable_segments:True, or your own
    /// allocator by its file, plugin:./my_allocator.so; may be repeated [default: every strategy
    /// that owns memory].
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    pub strategy: Vec<String>,
    /// Also test further parameter sets of the default strategies.
    #[arg(long, conflicts_with = "strategy")]
    pub all_variants: bool,
    #[command(flatten)]
    pub device: DeviceChoice,
    /// The seed of the random programs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// What a strategy may take: a size such as 1GiB, or a fraction of the device such as 0.5 or 50%. [default: 256MiB;
    /// 8GiB for integrity and soak on a real device]
    #[arg(long, value_name = "SIZE|FRACTION")]
    pub limit: Option<MemoryLimit>,
    /// Play this trace instead of generated programs.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The folder for failing traces.
    #[arg(long, value_name = "DIR", default_value = StressOptions::SAVE)]
    pub save: PathBuf,
    /// The output format.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

impl StressOptions {
    /// The default limit: little, so that it runs out.
    const LIMIT: MemoryLimit = MemoryLimit::Size(Bytes(256 * MIB));
    /// The default folder for failing traces.
    pub const SAVE: &'static str = "stress-failures";

    /// All targets to test.
    pub fn targets(&self) -> Result<Vec<StressTarget>, CommandError> {
        let device = self.device.spec()?;
        let memory_bytes = Some(self.memory_bytes(&device)?);
        let varies_memory = self.limit.is_none() && device.is_simulated();
        let target = |strategy| StressTarget { strategy, device: device.clone(), memory_bytes, varies_memory };
        Ok(self.strategies()?.into_iter().map(target).collect())
    }

    /// What a strategy may take of the device; all of it without a limit.
    pub fn memory_bytes(&self, device: &DeviceSpec) -> Result<u64, CommandError> {
        let limit = device.limit_bytes(self.limit.unwrap_or(StressOptions::LIMIT))?;
        limit.map_or_else(|| Ok(device.total_bytes()?), Ok)
    }

    /// The trace to play, if one was named.
    pub fn trace(&self) -> Result<Option<Trace>, CommandError> {
        let Some(path) = &self.trace else { return Ok(None) };
        let stages = Stages::of(&path.to_string_lossy());
        let source = trace::open(path, &stages).map_err(CommandError::usage)?;
        let trace =
            Trace::read(&ProgressSource::stage(source, &stages, "reading it", 1)).map_err(CommandError::usage)?;
        trace::check(&ProgressSource::stage(&trace, &stages, "checking it", 1)).map_err(CommandError::usage)?;
        Ok(Some(trace))
    }

    /// Tests every target, in parallel on simulated devices. `test` should end soon after its budget
    /// is over.
    pub fn test<R: Send>(
        &self,
        test: impl Fn(&StressTarget, &StressBudget<'_>) -> R + Sync,
    ) -> Result<(Vec<R>, Arc<AtomicBool>), CommandError> {
        let targets = self.targets()?;
        let stop = exit::stop_flag(StopPolicy::AtOnce)?;
        let results =
            test_targets(&targets, |target| test(target, &StressBudget::unlimited(&|| stop.load(Ordering::Relaxed))));
        Ok((results, stop))
    }

    /// Saves failures, prints the verdicts and returns the exit code.
    pub fn conclude(&self, verdicts: &[StressVerdict], stop: &AtomicBool) -> CommandResult {
        self.format.print(&self.rows(verdicts)?)?;
        Ok(exit_code_of(verdicts, stop))
    }

    /// Saves failures, and returns the rows of the verdicts.
    pub fn rows(&self, verdicts: &[StressVerdict]) -> Result<Vec<VerdictRow>, CommandError> {
        let mut rows = Vec::new();
        for verdict in verdicts {
            let evidence: Result<Vec<_>, _> =
                verdict.failures.iter().map(|failure| save_failure(failure, self)).collect();
            rows.extend(verdict.rows(&evidence?));
        }
        Ok(rows)
    }

    /// Like `conclude`, for a kind that has printed its own table: prints only the failures.
    pub fn report_failures(&self, verdicts: &[StressVerdict], stop: &AtomicBool) -> CommandResult {
        for failure in verdicts.iter().flat_map(|verdict| &verdict.failures) {
            output::complain(&format!("failed: {failure}\n  again: {}", save_failure(failure, self)?.command));
        }
        Ok(exit_code_of(verdicts, stop))
    }

    fn strategies(&self) -> Result<Vec<StrategySpec>, CommandError> {
        if self.strategy.is_empty() {
            let entries = strategies_with_memory();
            let how_many = if self.all_variants { usize::MAX } else { 1 };
            return Ok(entries.flat_map(|entry| entry.specs().take(how_many)).collect());
        }
        let mut strategies = Vec::new();
        for text in &self.strategy {
            let (strategy, note) = environment::resolve_settings(StrategySpec::from(text.as_str()));
            plugin::check(&strategy).map_err(CommandError::usage)?;
            if let Some(note) = note {
                output::complain(&note);
            }
            strategies.push(strategy);
        }
        Ok(strategies)
    }
}

/// How many targets are tested at once: only one on a real device.
pub fn jobs(targets: &[StressTarget]) -> usize {
    let simulated = targets.iter().all(|target| target.device.is_simulated());
    if simulated { suite::all_cores() } else { 1 }
}

/// Tests targets with a progress bar that names them.
pub fn test_targets<R: Send>(targets: &[StressTarget], test: impl Fn(&StressTarget) -> R + Sync) -> Vec<R> {
    with_progress(targets, jobs(targets), |target, bar| {
        bar.set_message(target.strategy.to_string());
        test(target)
    })
}

/// Runs jobs, `parallel` at once, with a progress bar.
pub fn with_progress<T: Sync, R: Send>(
    jobs: &[T],
    parallel: usize,
    run: impl Fn(&T, &ProgressBar) -> R + Sync,
) -> Vec<R> {
    let bar = progress::of_cases(jobs.len(), 0);
    let results = parallel_map(jobs, parallel, |job| {
        let result = run(job, &bar);
        bar.inc(1);
        result
    });
    bar.finish_and_clear();
    results
}

/// The exit code after these verdicts.
pub fn exit_code_of(verdicts: &[StressVerdict], stop: &AtomicBool) -> u8 {
    exit_code(verdicts.iter().any(|verdict| !verdict.failures.is_empty()), stop)
}

/// The exit code after failures, an interruption or neither.
pub fn exit_code(failed: bool, stop: &AtomicBool) -> u8 {
    match (failed, stop.load(Ordering::Relaxed)) {
        (true, _) => exit::STRESS_FAILED,
        (false, true) => exit::INTERRUPTED,
        (false, false) => exit::OK,
    }
}

/// Saves the failure's trace and returns the command that reproduces it.
pub fn save_failure(failure: &StressFailure, options: &StressOptions) -> Result<FailureEvidence, TraceError> {
    let Some(found) = &failure.trace else {
        return Ok(FailureEvidence { command: command(failure, options, None), ..FailureEvidence::default() });
    };
    let path = save_trace(found, &options.save, failure.found_by, &failure.strategy)?;
    let command = command(failure, options, Some(&path));
    Ok(FailureEvidence { trace: path.display().to_string(), trace_events: found.events.len() as u64, command })
}

/// Writes a trace to the folder, named after the kind of stress and the strategy, without
/// overwriting files.
pub fn save_trace(found: &Trace, folder: &Path, found_by: &str, strategy: &str) -> Result<PathBuf, TraceError> {
    fs::create_dir_all(folder).map_err(|source| TraceError::Io { path: folder.to_owned(), source })?;
    let path = unused_path(folder, &format!("{found_by}-{}", file_name_part(strategy)), ".oomph");
    trace::write(found, &path)?;
    Ok(path)
}

fn command(failure: &StressFailure, options: &StressOptions, trace: Option<&Path>) -> String {
    let mut words = vec!["oomph".to_owned(), "stress".to_owned(), failure.found_by.to_owned()];
    let mut add = |option: &str, value: &str| words.extend([option.to_owned(), quoted(value)]);
    match trace {
        Some(path) => add("--trace", &path.to_string_lossy()),
        None => add("--seed", &options.seed.to_string()),
    }
    add("--strategy", &failure.strategy);
    let DeviceChoice { device, card } = &options.device;
    if device != DeviceChoice::DEFAULT {
        add("--device", device);
    }
    if let Some(card) = card {
        add("--card", &card.to_string());
    }
    if let Some(limit) = options.limit {
        add("--limit", &limit.to_string());
    }
    words.extend(failure.conditions.iter().cloned());
    words.join(" ")
}

/// A strategy's name as part of a file name.
fn file_name_part(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;
    use crate::{
        base::{GIB, NoProgress, StreamId, TagId},
        stress::properties::{ProgramRange, properties},
        trace::TraceBuilder,
    };

    /// The options without any argument.
    fn options() -> StressOptions {
        let command = StressOptions::augment_args(clap::Command::new("stress"));
        StressOptions::from_arg_matches(&command.get_matches_from(["stress"])).unwrap()
    }

    #[test]
    fn all_strategies_with_memory_by_default() {
        let targets = options().targets().unwrap();
        assert_eq!(targets.len(), STRATEGIES.len() - WITHOUT_MEMORY.len());
        let all = StressOptions { all_variants: true, ..options() }.targets().unwrap();
        assert!(all.len() > targets.len());
        assert!(all.iter().all(|target| target.memory_bytes == Some(256 * MIB)));
    }

    #[test]
    fn failures_are_saved_with_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        let options = StressOptions { save: folder.path().to_owned(), format: Format::Csv, ..options() };
        let target = StressTarget::simulated("flawed:RoundsDown", 256 * MIB);
        let verdict =
            properties(&target, &ProgramRange { first: 0, count: 9, seed: 1 }, &StressBudget::unlimited(&|| false));
        let stop = AtomicBool::new(false);
        assert_eq!(options.conclude(&[verdict], &stop).unwrap(), exit::STRESS_FAILED);
        assert!(folder.path().join("properties-flawed_RoundsDown.oomph").exists());
        let fine = StressVerdict::new("properties", "caching");
        assert_eq!(options.conclude(std::slice::from_ref(&fine), &stop).unwrap(), exit::OK);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(options.conclude(&[fine], &stop).unwrap(), exit::INTERRUPTED);
    }

    #[test]
    fn unknown_strategy_is_refused() {
        let options = StressOptions { strategy: vec!["cachin".to_owned()], ..options() };
        assert!(options.targets().unwrap_err().to_string().contains("did you mean 'caching'"));
    }

    fn failure(strategy: &str) -> StressFailure {
        let mut trace = TraceBuilder::new();
        trace.alloc(512, StreamId::DEFAULT, TagId(0));
        StressFailure {
            found_by: "properties",
            strategy: strategy.to_owned(),
            detail: "overlap".to_owned(),
            trace: Some(trace.finish("found")),
            conditions: vec!["--fail cuMemAlloc:2".to_owned()],
        }
    }

    #[test]
    fn failures_do_not_overwrite_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let save = folder.path().join("new folder");
        let options = StressOptions { save: save.clone(), limit: Some(MemoryLimit::Size(Bytes(GIB))), ..options() };
        let failure = failure("caching:roundup_power2_divisions:[256:1,>:4]");
        let evidence = save_failure(&failure, &options).unwrap();
        let file = save.join("properties-caching_roundup_power2_divisions__256_1___4_.oomph");
        assert_eq!((evidence.trace.as_str(), evidence.trace_events), (&*file.to_string_lossy(), 1));
        assert_eq!(Trace::read(&*trace::open(&file, &NoProgress).unwrap()).unwrap().events.len(), 1);
        assert_eq!(
            evidence.command,
            format!(
                "oomph stress properties --trace '{}' --strategy 'caching:roundup_power2_divisions:[256:1,>:4]' \
                 --limit 1024MiB --fail cuMemAlloc:2",
                file.display()
            )
        );
        assert_ne!(save_failure(&failure, &options).unwrap().trace, evidence.trace);
    }
}
