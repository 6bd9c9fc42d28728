//! `oomph stress faults`.

use std::sync::{Mutex, PoisonError, atomic::Ordering};

use super::Common;
use crate::{
    cli::{failure::Outcome, output},
    stress::faults::{self, Affliction, Faults},
};

/// Lets the driver fail, at every call that a strategy makes: a few stories lead it through growth, reuse, release and
/// retry, mapping, events and trims, and for every driver call of theirs one run is played in which that call fails, one
/// in which it is the first of three, and one in which memory has run out. Another process takes the free memory for a
/// while; events never complete; requests go to the last page of the device.
///
/// After each: nothing leaked, every live block can still be freed, and the same story played again ends as on a new
/// strategy. Where a story makes more than 300 driver calls, the first 100 of each kind and 50 others fail.
///
/// What breaks a strategy is shrunk, saved, and printed with the fault that shows it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress faults                                        every strategy, every call
  oomph stress faults --strategy caching:expandable_segments:True
  oomph stress faults --strategy bfc --trace failing.oomph --fault cuMemFree:2
  oomph stress faults --strategy oomph --device cuda --memory 96MiB

Faults:
  cuMemCreate:3       the third such call of the strategy fails
  cuMemCreate:3:oom   it says that memory has run out
  cuMemMap:3+4        four such calls fail, from the third on
  any:17+3            three calls of any kind, from the 17th on
  taken:12+20         another process has all free memory, from the strategy's 12th call on, for 20 of them
  stuck:5             from the strategy's fifth call on no event completes, and waiting times out")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// Only this fault, such as cuMemCreate:3; may be repeated.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<Affliction>,
}

pub fn run(args: &Args) -> Outcome {
    let what = Faults {
        stories: args.common.trace()?.into_iter().collect(),
        afflictions: args.fault.clone(),
        seed: args.common.seed,
    };
    let left_out = Mutex::new(0);
    let outcome = args.common.judge(|subject, stop| {
        let faulted = faults::faults(subject, &what, &|| stop.load(Ordering::Relaxed));
        *left_out.lock().unwrap_or_else(PoisonError::into_inner) += faulted.left_out;
        faulted.verdict
    })?;
    match left_out.into_inner().unwrap_or_else(PoisonError::into_inner) {
        0 => {}
        turns => output::complain(&format!("note: of long stories a sample was taken, {turns} turns were left out")),
    }
    Ok(outcome)
}
