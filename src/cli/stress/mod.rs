//! `oomph stress`: the kinds of stress, and running them in a process that a plugin may take down.
//!
//! A kind turns its arguments into what `crate::stress` works with and passes the verdicts to
//! [`StressOptions::conclude`], which saves failures, prints the table and decides the exit code.

mod adversary;
mod checks;
mod common;
mod endurance;

pub use common::StressOptions;

use std::{env, panic, process::Command};

#[cfg(unix)]
use super::worker::plugin_host;
use super::{
    exit::{self, CommandError, CommandResult, on_signals},
    options::DeviceChoice,
    output,
};
use crate::{base::exit_description, plugin, strategy::StrategySpec, stress::is_under_test};

/// Tests whether allocators are correct.
///
/// Every kind plays programs through strategies and checks what they promise. A failing program is
/// shrunk to a minimal trace, saved, and printed with the command that reproduces it. Exit code 106
/// if there is a failure.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress all --seconds 120                              every strategy under every kind
  oomph stress integrity                                      do blocks keep their contents?
  oomph stress properties                                     every strategy, random programs
  oomph stress properties --strategy caching --cases 10000    one strategy, for longer
  oomph stress properties --strategy plugin:./my_allocator.so an allocator of your own
  oomph stress properties --strategy bfc --trace failing.oomph --fail cuMemFree:2
  oomph stress history --strategy bfc                         the same program, 512 times: does it leak?
  oomph stress threads --strategy plugin:./my_allocator.so    calls from eight threads at once
  oomph stress faults --strategy bfc                          every driver call fails once
  oomph stress misuse                                         double frees and other misuse
  oomph stress adversary                                      the most memory that each needs
  oomph stress soak --stress-duration 1h --state soak.json    for hours, in runs that add up")]
pub struct Args {
    #[command(subcommand)]
    kind: Kind,
    /// Set in the second process in which plugins are tested.
    #[arg(long = SECOND_PROCESS, hide = true, global = true)]
    in_this_process: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Kind {
    /// All kinds that need no further arguments, within a given time.
    All(checks::AllArgs),
    /// Contents of blocks: every block is filled and compared, from many threads and streams.
    Integrity(endurance::IntegrityArgs),
    /// Random programs, some on a driver that fails now and then; all promises of a strategy are
    /// checked.
    Properties(checks::PropertiesArgs),
    /// The same program again and again: leaks, and faults that need a long history.
    History(checks::HistoryArgs),
    /// A plugin called from several threads at once.
    Threads(checks::ThreadsArgs),
    /// Every driver call fails in turn, another process takes memory, events never complete.
    Faults(checks::FaultsArgs),
    /// Programs that break the rules: double frees, foreign pointers, absurd sizes.
    Misuse(checks::MisuseArgs),
    /// The worst case within a budget of live memory: how much memory each strategy needs, beside
    /// the theoretical bound.
    Adversary(adversary::AdversaryArgs),
    /// A long program in memory that is nearly full, on a driver that fails now and then.
    Soak(endurance::SoakArgs),
}

impl Kind {
    /// The strategies and the device that were named.
    fn target(&self) -> (&[String], &DeviceChoice) {
        let options = match self {
            Kind::All(args) => &args.options,
            Kind::Integrity(args) => &args.options,
            Kind::Properties(args) => &args.options,
            Kind::History(args) => &args.options,
            Kind::Threads(args) => &args.options,
            Kind::Faults(args) => &args.options,
            Kind::Misuse(args) => &args.options,
            Kind::Soak(args) => &args.options,
            Kind::Adversary(args) => return (&args.strategy, &args.device),
        };
        (&options.strategy, &options.device)
    }
}

pub fn run(args: Args) -> CommandResult {
    let (strategies, device) = args.kind.target();
    if !args.in_this_process && needs_second_process(strategies, device)? {
        return run_in_second_process();
    }
    silence_panics_under_test();
    match args.kind {
        Kind::All(args) => args.run(),
        Kind::Integrity(args) => args.run(),
        Kind::Properties(args) => args.run(),
        Kind::History(args) => args.run(),
        Kind::Threads(args) => args.run(),
        Kind::Faults(args) => args.run(),
        Kind::Misuse(args) => args.run(),
        Kind::Adversary(args) => args.run(),
        Kind::Soak(args) => args.run(),
    }
}

/// A strategy that panics under test is a finding, thousands of times while its trace shrinks.
/// Other panics are printed.
fn silence_panics_under_test() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_under_test() {
            print(info);
        }
    }));
}

/// The option that marks the second process.
pub const SECOND_PROCESS: &str = "in-this-process";

/// Whether one of the strategies might end this process. On the simulated device plugins are served
/// by other processes; on a real one they cannot be.
fn needs_second_process(strategies: &[String], device: &DeviceChoice) -> Result<bool, CommandError> {
    if !strategies.iter().any(|strategy| plugin::is_plugin(&StrategySpec::from(strategy.as_str()))) {
        return Ok(false);
    }
    let device = device.spec()?;
    #[cfg(unix)]
    if device.is_simulated() {
        plugin_host::offer()?;
        return Ok(false);
    }
    Ok(true)
}

/// Runs the same command in a second process and returns its exit code. If it dies, that is a
/// failure of the plugin.
fn run_in_second_process() -> CommandResult {
    // Ctrl-C reaches both processes. The second one ends in order, and this one must return its
    // exit code.
    on_signals(|| {})?;
    let program = env::current_exe().map_err(CommandError::usage)?;
    let status = Command::new(program).args(env::args_os().skip(1)).arg(format!("--{SECOND_PROCESS}")).status()?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(code),
        None => {
            output::complain(&format!("failed: a plugin ended its process, which {}", exit_description(status)));
            Ok(exit::STRESS_FAILED)
        }
    }
}
