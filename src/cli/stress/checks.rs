//! `oomph stress all`, `properties`, `faults` and `misuse`.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::anyhow;

use super::{
    StressOptions,
    common::{exit_code_of, jobs as parallel_jobs, with_progress},
};
use crate::{
    base::{did_you_mean_among, nearest},
    cli::{
        exit::{self, CommandError, CommandResult, StopPolicy},
        output,
    },
    device::wrap::FaultSpec,
    report::VerdictMatrix,
    stress::{
        KINDS, StressBudget, StressVerdict, TimeShare,
        concurrent::{self, ThreadsOptions},
        faults::{self, FaultOptions},
        history::{self, HistoryOptions},
        misuse::{self, MISUSES, Misuse},
        properties::{self, ProgramRange},
    },
};

/// Tests every strategy with every kind of stress that needs no further arguments, within the given
/// time, and prints one table of verdicts.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress all                        every strategy, two minutes in all: made for CI
  oomph stress all --seconds 600 --all-variants
  oomph stress all --strategy caching --format json

Time is shared among strategies and kinds; unused time goes to the others. How many programs are played depends on the
machine, but the programs do not: a failure has a trace and a command that reproduce it everywhere.")]
pub struct AllArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// The time for all tests together, in seconds.
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

impl AllArgs {
    pub(super) fn run(&self) -> CommandResult {
        let targets = self.options.targets()?;
        let stop = exit::stop_flag(StopPolicy::AtOnce)?;
        let jobs = KINDS
            .iter()
            .rev()
            .flat_map(|kind| targets.iter().enumerate().map(move |(place, target)| (place, target, kind)));
        let jobs: Vec<_> = jobs.filter(|(_, target, kind)| (kind.applies)(target)).collect();
        let parallel = parallel_jobs(&targets);
        let time = TimeShare::new(Duration::from_secs(self.seconds), jobs.len(), parallel);
        // A strategy that has failed needs no further search: the time goes to the others.
        let failed: Vec<AtomicBool> = targets.iter().map(|_| AtomicBool::new(false)).collect();
        let mut verdicts: Vec<StressVerdict> = with_progress(&jobs, parallel, |(place, target, kind), bar| {
            bar.set_message(format!("{} {}", kind.name, target.strategy));
            let end = time.next_end();
            let (interrupted, has_failed) =
                (|| stop.load(Ordering::Relaxed), || failed[*place].load(Ordering::Relaxed));
            let budget = StressBudget::until(&interrupted, end).search_until(&has_failed);
            let mut verdict = (kind.judge)(target, self.options.seed, &budget);
            if has_failed() && verdict.failures.is_empty() {
                verdict.skipped.get_or_insert_with(|| "not finished: another kind has found a failure".to_owned());
            }
            // One without a trace says less: others may still show it in a few events.
            let is_shown = verdict.failures.iter().any(|failure| failure.trace.is_some());
            failed[*place].fetch_or(is_shown, Ordering::Relaxed);
            if verdict.row.trials == 0 && verdict.failures.is_empty() {
                verdict.skipped.get_or_insert_with(|| "no time was left for it".to_owned());
            }
            verdict
        });
        // The sort is stable, so strategies keep their order.
        verdicts.sort_by_key(|verdict| KINDS.iter().position(|kind| kind.name == verdict.row.kind));
        self.options.format.print(&VerdictMatrix(&self.options.rows(&verdicts)?))?;
        Ok(exit_code_of(&verdicts, &stop))
    }
}

/// Plays random programs through strategies and checks all that they promise: blocks do not overlap
/// and are large enough, by address and by physical memory; no reuse while another stream works on
/// a block; statistics, layout and events agree; nothing is left on the device after a close. A
/// third of the programs are played again on a driver that fails now and then.
///
/// The first program that breaks a promise is shrunk and saved. The same seed gives the same
/// programs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress properties                                      every strategy, 200 programs each
  oomph stress properties --strategy caching --cases 20000 --seed 7
  oomph stress properties --all-variants --limit 64MiB         further parameter sets, in less memory
  oomph stress properties --strategy caching --device cuda     on a real GPU
  oomph stress properties --strategy bfc --trace failing.oomph --fail cuMemFree:2
                                                               one trace, with a driver call that fails")]
pub struct PropertiesArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// The number of programs per strategy.
    #[arg(long, value_name = "N", default_value_t = 200)]
    cases: u64,
    /// The number of the first program.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "trace")]
    first_case: u64,
    /// With --trace: this driver call fails, such as cuMemFree:2 (the second) or cuMemAlloc:3:oom
    /// (out of memory); may be repeated.
    #[arg(long, value_name = "CALL:N[:oom]", requires = "trace")]
    fail: Vec<FaultSpec>,
}

impl PropertiesArgs {
    pub(super) fn run(&self) -> CommandResult {
        if self.cases == 0 {
            return Err(CommandError::usage(anyhow!("--cases must be greater than 0")));
        }
        let programs = ProgramRange { first: self.first_case, count: self.cases, seed: self.options.seed };
        let trace = self.options.trace()?;
        let (verdicts, stop) = self.options.test(|target, budget| match &trace {
            Some(trace) => properties::play(target, trace, &self.fail, budget),
            None => properties::properties(target, &programs, budget),
        })?;
        self.options.conclude(&verdicts, &stop)
    }
}

/// Makes every driver call of a strategy fail: short programs lead it through growth, reuse,
/// release and retry, mapping, events and trims, and for every driver call there is one run in
/// which it fails, one in which it is the first of three that fail, and one in which it reports out
/// of memory. In further runs another process takes the free memory for a while, events never
/// complete, and requests reach the last page of the device.
///
/// After each run: nothing has leaked, every live block can still be freed, and the same program
/// ends as on a new strategy. If a program makes more than 300 driver calls, the first 100 of each
/// kind and 50 others fail.
///
/// A failing program is shrunk, saved, and printed with its fault.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress faults                                        every strategy, every call
  oomph stress faults --strategy caching:expandable_segments:True
  oomph stress faults --strategy bfc --trace failing.oomph --fault cuMemFree:2
  oomph stress faults --strategy oomph --device cuda --limit 96MiB

Faults:
  cuMemCreate:3       the strategy's third call of this kind fails
  cuMemCreate:3:oom   it reports out of memory
  cuMemMap:3+4        four calls of this kind fail, from the third on
  any:17+3            three calls of any kind fail, from the 17th on
  taken:12+20         another process holds all free memory during 20 calls of the strategy, from the 12th on
  stuck:5             from the fifth call of the strategy on no event completes, and waiting times out")]
pub struct FaultsArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// Only this fault, such as cuMemCreate:3; may be repeated.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<FaultSpec>,
}

impl FaultsArgs {
    pub(super) fn run(&self) -> CommandResult {
        let options = FaultOptions {
            programs: self.options.trace()?.into_iter().collect(),
            faults: self.fault.clone(),
            seed: self.options.seed,
        };
        let (reports, stop) = self.options.test(|target, budget| faults::faults(target, &options, budget))?;
        let left_out: u64 = reports.iter().map(|report| report.left_out).sum();
        let verdicts: Vec<StressVerdict> = reports.into_iter().map(|report| report.verdict).collect();
        let code = self.options.conclude(&verdicts, &stop)?;
        if left_out > 0 {
            output::complain(&format!("note: {left_out} calls of long programs were not made to fail"));
        }
        Ok(code)
    }
}

/// Plays the same program again and again on one strategy, and checks all that it promises at every call. The program
/// frees everything, so memory and events that keep growing are a leak, whatever the strategy reports.
///
/// A failing program is shrunk and saved; it fails again in as many rounds.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress history                                        every strategy, one program of 512 rounds
  oomph stress history --strategy plugin:./my_allocator.so --rounds 5000
  oomph stress history --strategy bfc --trace failing.oomph --rounds 64")]
pub struct HistoryArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// How often the program is repeated.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// The number of programs; each is played on a new strategy.
    #[arg(long, value_name = "N", default_value_t = 1)]
    cases: u64,
}

impl HistoryArgs {
    pub(super) fn run(&self) -> CommandResult {
        let trace = self.options.trace()?;
        let options = HistoryOptions { program: trace.as_ref(), rounds: self.rounds, programs: self.cases };
        let seed = self.options.seed;
        let (verdicts, stop) = self.options.test(|target, budget| history::history(target, seed, &options, budget))?;
        self.options.conclude(&verdicts, &stop)
    }
}

/// Calls a plugin from several threads at once, in its own process. Each thread requests and frees blocks, some of which
/// another thread requested. Live blocks must not overlap, and the process must not crash or hang.
///
/// Strategies of oomph are called by one thread at a time and are skipped.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress threads --strategy plugin:./my_allocator.so
  oomph stress threads --strategy plugin:./my_allocator.so --threads 32 --calls 100000 --processes 1

With ThreadSanitizer, which names the two places that race:
  g++ -g -O1 -fsanitize=thread -shared -fPIC my_allocator.cpp -o tsan.so
  LD_PRELOAD=$(gcc -print-file-name=libtsan.so) oomph stress threads --strategy plugin:./tsan.so --processes 1")]
pub struct ThreadsArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// Threads that call at once.
    #[arg(long, value_name = "N", default_value_t = ThreadsOptions::default().threads, value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: u64,
    /// Calls of each thread in a process.
    #[arg(long, value_name = "N", default_value_t = ThreadsOptions::default().calls, value_parser = clap::value_parser!(u64).range(1..))]
    calls: u64,
    /// Processes, each with a new plugin.
    #[arg(long, value_name = "N", default_value_t = ThreadsOptions::default().processes, value_parser = clap::value_parser!(u64).range(1..))]
    processes: u64,
}

impl ThreadsArgs {
    pub(super) fn run(&self) -> CommandResult {
        if self.options.trace.is_some() {
            return Err(CommandError::usage(anyhow!("threads play their own program and take no --trace")));
        }
        let ThreadsArgs { threads, calls, processes, .. } = *self;
        let options = ThreadsOptions { threads, calls, processes };
        let (verdicts, stop) = self.options.test(|target, budget| concurrent::threads(target, &options, budget))?;
        self.options.conclude(&verdicts, &stop)
    }
}

/// Misuses strategies as faulty programs do: blocks are freed twice, pointers belong to others,
/// streams do not exist, sizes overflow. Each misuse meets a fresh strategy; then an ordinary
/// program runs and everything is freed.
///
/// detected: refused with an error. harmless: accepted without damage. corrupts: statistics, blocks
/// or memory of others are damaged, or the strategy panics or hangs. Blocks are named by their
/// handle, and again by their address alone, as callers of a pluggable allocator name them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress misuse                                 every strategy, one letter per misuse
  oomph stress misuse --strategy caching              one strategy, with its messages
  oomph stress misuse --strategy bfc --misuse double-free --misuse size-overflow
  oomph stress misuse --list                          the misuses
  oomph stress misuse --all-variants --format csv     further parameter sets")]
pub struct MisuseArgs {
    #[command(flatten)]
    pub(super) options: StressOptions,
    /// Only this misuse; may be repeated.
    #[arg(long, value_name = "NAME")]
    misuse: Vec<String>,
    /// Print the misuses and exit.
    #[arg(long)]
    list: bool,
}

impl MisuseArgs {
    pub(super) fn run(&self) -> CommandResult {
        let chosen = chosen_misuses(&self.misuse)?;
        if self.list {
            let width = chosen.iter().map(|misuse| misuse.name.len()).max().unwrap_or(0);
            let line = |misuse: &&Misuse| format!("{:width$}  {}", misuse.name, misuse.summary);
            output::say(&chosen.iter().map(line).collect::<Vec<_>>().join("\n"))?;
            return Ok(exit::OK);
        }
        if self.options.trace.is_some() {
            return Err(CommandError::usage(anyhow!("misuse plays its own scenarios and takes no --trace")));
        }
        let (reports, stop) = self.options.test(|target, over| misuse::misuses(target, &chosen, over))?;
        let (verdicts, rows): (Vec<_>, Vec<_>) =
            reports.into_iter().map(|report| (report.verdict, report.rows)).unzip();
        self.options.format.print(&rows.concat())?;
        self.options.report_failures(&verdicts, &stop)
    }
}

fn chosen_misuses(names: &[String]) -> Result<Vec<&'static Misuse>, CommandError> {
    let all = || MISUSES.iter().map(|misuse| misuse.name);
    if let Some(unknown) = names.iter().find(|name| all().all(|known| known != name.as_str())) {
        let near = nearest(unknown, all());
        return Err(CommandError::usage(anyhow!(
            "unknown misuse '{unknown}'{}",
            did_you_mean_among(near.as_deref(), all())
        )));
    }
    Ok(MISUSES.iter().filter(|misuse| names.is_empty() || names.iter().any(|name| name == misuse.name)).collect())
}
