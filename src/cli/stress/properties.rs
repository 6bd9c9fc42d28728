//! `oomph stress properties`.

use std::sync::atomic::Ordering;

use anyhow::anyhow;

use super::Common;
use crate::{
    cli::failure::{Failure, Outcome},
    stress::{
        PlannedFault,
        properties::{self, Programs},
    },
};

/// Plays random programs through strategies and watches all that they promise: blocks apart and large enough, by address
/// and by physical memory; no reuse while another stream works on a block; books, layout and events that agree; nothing
/// left on the device after a close. A third of the programs are played again on a driver that fails now and then.
///
/// The first program that breaks a promise is shrunk and saved. The same seed gives the same programs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress properties                                      every strategy, 200 programs each
  oomph stress properties --strategy caching --cases 20000 --seed 7
  oomph stress properties --all-variants --memory 64MiB        parameter sets as well, in less memory
  oomph stress properties --strategy caching --device cuda     on a real GPU
  oomph stress properties --strategy bfc --trace failing.oomph --fail cuMemFree:2
                                                               one trace again, with a driver call that fails")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// How many programs each strategy gets.
    #[arg(long, value_name = "N", default_value_t = 200)]
    cases: u64,
    /// Begin with this program.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "trace")]
    first_case: u64,
    /// With --trace: this driver call fails, such as cuMemFree:2 (the second) or cuMemAlloc:3:oom (out of memory); may be
    /// repeated.
    #[arg(long, value_name = "CALL:N[:oom]", requires = "trace")]
    fail: Vec<PlannedFault>,
}

pub fn run(args: &Args) -> Outcome {
    if args.cases == 0 {
        return Err(Failure::usage(anyhow!("--cases 0 leaves nothing to play")));
    }
    let programs = Programs { first: args.first_case, count: args.cases, seed: args.common.seed };
    match args.common.trace()? {
        Some(trace) => args.common.judge(|subject, _| properties::play(subject, &trace, &args.fail)),
        None => args
            .common
            .judge(|subject, stop| properties::properties(subject, &programs, &|| stop.load(Ordering::Relaxed))),
    }
}
