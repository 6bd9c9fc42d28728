//! `oomph stress`: one file a kind.
//!
//! A kind turns its arguments into what the stress room works with and hands the verdicts to [`Common::conclude`], which
//! saves what broke, prints the table and decides the exit code.

mod all;
mod common;
mod endurance;
mod evidence;
mod integrity;
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
  oomph stress properties --strategy bfc --trace failing.oomph --fail cuMemFree:2")]
pub struct Args {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Debug, clap::Subcommand)]
enum Kind {
    /// Every kind below that needs no question of its own, in the time given.
    All(all::Args),
    /// Known contents: every block is filled and verified, from many threads and streams.
    Integrity(integrity::Args),
    /// Random programs, some on a driver that fails now and then; all that a strategy promises is watched.
    Properties(properties::Args),
    /// A long program in memory that is nearly full, on a driver that fails now and then.
    Soak(soak::Args),
}

pub fn run(args: Args) -> Outcome {
    keep_quiet_about_trials();
    match args.kind {
        Kind::All(args) => all::run(&args),
        Kind::Integrity(args) => integrity::run(&args),
        Kind::Properties(args) => properties::run(&args),
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
