//! `oomph stress`: one file a kind.
//!
//! A kind turns its arguments into what the stress room works with and hands the verdicts to [`Common::conclude`], which
//! saves what broke, prints the table and decides the exit code.

mod adversary;
mod all;
mod common;
mod endurance;
mod evidence;
mod faults;
mod integrity;
mod isolated;
mod misuse;
mod properties;
mod soak;

pub use common::Common;

use std::panic;

use super::failure::Outcome;
use crate::stress::is_on_trial;

/// Tries to break allocators: is this one correct?
///
/// Every kind plays programs through strategies and watches what they promise. What breaks one is shrunk to a minimal
/// trace, saved, and printed with the command that shows it again. Exit code 106 if anything was found.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress all --seconds 60                               every strategy under every kind
  oomph stress integrity                                      do blocks keep their contents?
  oomph stress properties                                     every strategy, random programs
  oomph stress properties --strategy caching --cases 10000    one strategy, for longer
  oomph stress properties --strategy plugin:./my_allocator.so an allocator of your own
  oomph stress properties --strategy bfc --trace failing.oomph --fail cuMemFree:2
  oomph stress faults --strategy bfc                          every driver call of its fails once
  oomph stress misuse                                         what becomes of double frees and the like
  oomph stress adversary                                      how much memory each wastes at worst
  oomph stress soak --stress-duration 1h --state soak.json    for hours, in slices that add up")]
pub struct Args {
    #[command(subcommand)]
    kind: Kind,
    /// This is the process of its own in which plugins are put under stress.
    #[arg(long = isolated::OPTION, hide = true, global = true)]
    in_this_process: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Kind {
    /// Every kind below that needs no question of its own, in the time given.
    All(all::Args),
    /// Known contents: every block is filled and verified, from many threads and streams.
    Integrity(integrity::Args),
    /// Random programs, some on a driver that fails now and then; all that a strategy promises is watched.
    Properties(properties::Args),
    /// A driver that fails at every call in turn, memory that others take, events that never complete.
    Faults(faults::Args),
    /// Programs that break the rules: double frees, foreign pointers, absurd sizes; what becomes of each.
    Misuse(misuse::Args),
    /// Requests made up to hurt, within a budget of live memory: how much each takes at worst, and what theory says.
    Adversary(adversary::Args),
    /// A long program in memory that is nearly full, on a driver that fails now and then.
    Soak(soak::Args),
}

impl Kind {
    /// The strategies that were named.
    fn strategies(&self) -> &[String] {
        match self {
            Kind::All(args) => &args.common.strategy,
            Kind::Integrity(args) => &args.common.strategy,
            Kind::Properties(args) => &args.common.strategy,
            Kind::Faults(args) => &args.common.strategy,
            Kind::Misuse(args) => &args.common.strategy,
            Kind::Adversary(args) => &args.strategy,
            Kind::Soak(args) => &args.common.strategy,
        }
    }

    /// The device that was named.
    fn device(&self) -> &str {
        match self {
            Kind::All(args) => &args.common.device,
            Kind::Integrity(args) => &args.common.device,
            Kind::Properties(args) => &args.common.device,
            Kind::Faults(args) => &args.common.device,
            Kind::Misuse(args) => &args.common.device,
            Kind::Adversary(args) => &args.device,
            Kind::Soak(args) => &args.common.device,
        }
    }
}

pub fn run(args: Args) -> Outcome {
    if !args.in_this_process && isolated::is_needed(args.kind.strategies(), args.kind.device())? {
        return isolated::run_again();
    }
    keep_quiet_about_trials();
    match args.kind {
        Kind::All(args) => all::run(&args),
        Kind::Integrity(args) => integrity::run(&args),
        Kind::Properties(args) => properties::run(&args),
        Kind::Faults(args) => faults::run(&args),
        Kind::Misuse(args) => misuse::run(&args),
        Kind::Adversary(args) => adversary::run(&args),
        Kind::Soak(args) => soak::run(&args),
    }
}

/// A strategy that panics on trial is found out, thousands of times while its trace is shrunk; any other panic is told as
/// ever.
fn keep_quiet_about_trials() {
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |told| {
        if !is_on_trial() {
            tell(told);
        }
    }));
}
