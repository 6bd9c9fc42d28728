//! `oomph stress all`.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use super::Common;
use crate::{
    base::parallel_map,
    cli::{failure::Outcome, interrupt, progress},
    stress::{KINDS, KindOfStress, Subject, TimeShare, Verdict},
};

/// Puts every strategy under every kind of stress that needs no question of its own, in the time given, and prints one
/// table of verdicts.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress all                        every strategy, a minute in all: made for CI
  oomph stress all --seconds 600 --all-variants
  oomph stress all --strategy caching --format json

Time is shared out among strategies and kinds; what one does not need goes to the others. How far programs get depends on
the machine, but not what they are: a failure has its trace and its command, and shows again everywhere.")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// How long it may take in all.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

pub fn run(args: &Args) -> Outcome {
    let subjects = args.common.subjects()?;
    let stop = interrupt::flag(interrupt::Running::Replay)?;
    let pieces: Vec<(&Subject, &KindOfStress)> =
        KINDS.iter().rev().flat_map(|kind| subjects.iter().map(move |subject| (subject, kind))).collect();
    let jobs = Common::jobs(&subjects);
    let time = TimeShare::new(Duration::from_secs(args.seconds), pieces.len(), jobs);
    let bar = progress::of_cases(pieces.len(), 0);
    let mut verdicts: Vec<Verdict> = parallel_map(&pieces, jobs, |(subject, kind)| {
        bar.set_message(format!("{} {}", kind.name, subject.strategy));
        let end = time.next_end();
        let over = || stop.load(Ordering::Relaxed) || Instant::now() >= end;
        let mut verdict = (kind.judge)(subject, args.common.seed, &over);
        if verdict.trials == 0 && verdict.failures.is_empty() {
            verdict.skipped.get_or_insert_with(|| "there was no time left for it".to_owned());
        }
        bar.inc(1);
        verdict
    });
    bar.finish_and_clear();
    // Stable, so that strategies keep their order.
    verdicts.sort_by_key(|verdict| KINDS.iter().position(|kind| kind.name == verdict.kind));
    args.common.conclude_as_matrix(&verdicts, &stop)
}
