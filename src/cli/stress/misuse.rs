//! `oomph stress misuse`.

use std::sync::{Mutex, PoisonError, atomic::Ordering};

use anyhow::anyhow;

use super::Common;
use crate::{
    base::{did_you_mean_among, nearest},
    cli::{
        exit,
        failure::{Failure, Outcome},
        output,
    },
    stress::misuse::{self, MISUSES, Misuse, MisuseRow},
};

/// Misuses strategies as bad programs do: blocks freed twice, pointers that are not theirs, streams that do not exist,
/// sizes that overflow. Each misuse meets a fresh strategy; then an ordinary program runs and everything is given back.
///
/// detected: refused with an error or a result. harmless: accepted, and nothing came of it. corrupts: books, blocks or the
/// memory of others are damaged, or the strategy panics or hangs. Blocks are named by their handle, and once more by their
/// address alone, as callers of a pluggable allocator name them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress misuse                                 every strategy, one letter a misuse
  oomph stress misuse --strategy caching              one strategy, in its own words
  oomph stress misuse --strategy bfc --misuse double-free --misuse size-overflow
  oomph stress misuse --list                          what is tried
  oomph stress misuse --all-variants --format csv     parameter sets as well")]
pub struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// Only this misuse; may be repeated.
    #[arg(long, value_name = "NAME")]
    misuse: Vec<String>,
    /// Print the misuses and what they do, and try nothing.
    #[arg(long)]
    list: bool,
}

pub fn run(args: &Args) -> Outcome {
    let chosen = chosen(&args.misuse)?;
    if args.list {
        output::say(&list(&chosen))?;
        return Ok(exit::OK);
    }
    if args.common.trace.is_some() {
        return Err(Failure::usage(anyhow!("misuse has scenarios of its own: --trace means nothing to it")));
    }
    // Verdicts come side by side; the table is in the order of the subjects.
    let told: Mutex<Vec<MisuseRow>> = Mutex::default();
    let (verdicts, stop) = args.common.verdicts(|subject, stop| {
        let misused = misuse::misuses(subject, &chosen, &|| stop.load(Ordering::Relaxed));
        told.lock().unwrap_or_else(PoisonError::into_inner).extend(misused.rows);
        misused.verdict
    })?;
    let mut rows = told.into_inner().unwrap_or_else(PoisonError::into_inner);
    let place = |row: &MisuseRow| verdicts.iter().position(|verdict| verdict.strategy == row.strategy);
    rows.sort_by_key(place);
    args.common.format.print(&rows)?;
    args.common.complain_of(&verdicts, &stop)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Misuse>, Failure> {
    let all = || MISUSES.iter().map(|misuse| misuse.name);
    if let Some(unknown) = names.iter().find(|name| all().all(|known| known != name.as_str())) {
        let near = nearest(unknown, all());
        return Err(Failure::usage(anyhow!(
            "unknown misuse '{unknown}'{}",
            did_you_mean_among(near.as_deref(), all())
        )));
    }
    Ok(MISUSES.iter().filter(|misuse| names.is_empty() || names.iter().any(|name| name == misuse.name)).collect())
}

fn list(misuses: &[&Misuse]) -> String {
    let width = misuses.iter().map(|misuse| misuse.name.len()).max().unwrap_or(0);
    let line = |misuse: &&Misuse| format!("{:width$}  {}", misuse.name, misuse.summary);
    misuses.iter().map(line).collect::<Vec<_>>().join("\n")
}
