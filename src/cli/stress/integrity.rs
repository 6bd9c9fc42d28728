//! `oomph stress integrity`.

use super::{Common, endurance::EnduranceOptions};
use crate::{cli::failure::Outcome, stress::Integrity};

/// Fills every block with a pattern of its own on its stream and looks whether it is still there: before the block is
/// given back, on other streams that use it, and after cached memory was given back. Memory that overlaps, that is reused
/// before all streams are done with it, or that is lost when it is mapped elsewhere shows, whatever a strategy says about
/// itself.
///
/// On the simulated device threads take turns by the seed, and what fails is shrunk to a minimal trace. On a real one
/// threads are real, share the strategy under one lock, and one launch checks many blocks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress integrity                                       every strategy, 30 seconds in all
  oomph stress integrity --strategy caching --stress-count 1000000
  oomph stress integrity --device cuda --threads 16 --streams 8 --stress-duration 8m --state integrity.json
                                                               a slice on a GPU; again for the next one
  oomph stress integrity --device cuda --sizes small --memory 32GiB --stress-duration 60s
  oomph stress integrity --strategy bfc --trace failing.oomph  one trace again")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    endurance: EnduranceOptions,
}

pub fn run(args: &Args) -> Outcome {
    let EnduranceOptions { threads, streams, sizes, .. } = args.endurance;
    let trace = args.common.trace()?;
    args.endurance.endure("integrity", &args.common, |subject, seed, until, progress| {
        let integrity = Integrity { subject: subject.clone(), threads, streams, sizes, seed };
        match &trace {
            Some(trace) => integrity.play(trace, until),
            None => integrity.run(until, progress),
        }
    })
}
