//! `oomph stress soak`.

use super::{Common, endurance::EnduranceOptions};
use crate::{
    cli::failure::{Failure, Outcome},
    stress::Soak,
};

/// Lets one program after another run in memory that is nearly full, on a driver whose calls fail now and then. Contents
/// are verified as by `stress integrity`, and the strategy's contract is watched. The table tells what was held: how full
/// memory was, how much of it lay idle, how many calls failed on purpose.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress soak                                            every strategy, 30 seconds in all
  oomph stress soak --strategy oomph --stress-duration 1h --state soak.json
  oomph stress soak --device cuda --streams 8 --stress-duration 5m --state soak.json
  oomph stress soak --fault-one-in 0                           on a driver that never fails")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    endurance: EnduranceOptions,
    /// One driver call in so many fails on purpose; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 500)]
    fault_one_in: u64,
}

pub fn run(args: &Args) -> Outcome {
    if args.common.trace.is_some() {
        return Err(Failure::usage(anyhow::anyhow!(
            "a soak plays programs of its own; `oomph stress integrity --trace FILE` plays one trace"
        )));
    }
    let EnduranceOptions { threads, streams, sizes, .. } = args.endurance;
    let fault_one_in = args.fault_one_in;
    args.endurance.endure("soak", &args.common, |subject, seed, until, progress| {
        Soak { subject: subject.clone(), threads, streams, sizes, seed, fault_one_in }.run(until, progress)
    })
}
