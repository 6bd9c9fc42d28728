//! `oomph stress adversary --search`: traces that hurt one strategy.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{Common, adversary::Args, common::owners_of_memory, evidence};
use crate::{
    cli::shell::quoted,
    cli::{
        environment, exit,
        failure::{Failure, Outcome},
        interrupt,
        options::Format,
        output, progress,
    },
    device::DeviceSpec,
    report::{self, Medium},
    strategy::StrategySpec,
    stress::{
        Subject,
        adversary::{Contest, Find, FoundRow, Quest},
    },
};

/// Whose traces are looked for if nobody says: what most people run.
const USUAL: &str = "caching";
/// How many smaller traces are tried for the one that was found.
const SHRINKING_TRIES: usize = 20_000;

/// How long to search, and for what.
#[derive(Debug, clap::Args)]
pub struct SearchOptions {
    /// How many programs are tried for each strategy.
    #[arg(long, value_name = "N", default_value_t = 2000, requires = "search", value_parser = clap::value_parser!(u32).range(1..))]
    tries: u32,
    /// Seed of the search: the same seed finds the same trace.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "search")]
    seed: u64,
    /// Look for what is bad for the strategy and good for this one.
    #[arg(long, value_name = "NAME[:PARAMETERS]", requires = "search")]
    against: Option<String>,
    /// On how many streams blocks may be.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "search", value_parser = clap::value_parser!(u16).range(1..=16))]
    streams: u16,
}

pub fn run(args: &Args, contest: Contest) -> Outcome {
    let device = args.device()?;
    let victims = if args.strategy.is_empty() { vec![USUAL.to_owned()] } else { args.strategy.clone() };
    let victims: Vec<Subject> = victims.iter().map(|text| subject(args, text, &device)).collect::<Result<_, _>>()?;
    let rival = args.options.against.as_ref().map(|text| subject(args, text, &device)).transpose()?;
    let stop = interrupt::flag(interrupt::Running::Replay)?;
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    for victim in &victims {
        let quest = Quest {
            subject: victim.clone(),
            rival: rival.clone(),
            contest,
            streams: args.options.streams,
            tries: args.options.tries,
            seed: args.options.seed,
        };
        let Some(find) = search(&quest, &stop)? else { break };
        let path = save(args, &find, victim)?;
        rows.extend(serve_to_all(args, &find, victim, rival.as_ref(), &path)?);
        notes.push(note(args, &find, victim, &path));
    }
    output::say(&match args.format {
        Format::Table => report::found(&rows, notes.into_iter(), Medium::Terminal(output::terminal_width())),
        Format::Markdown => report::found(&rows, notes.into_iter(), Medium::Markdown),
        Format::Json => report::found_json(&rows),
        Format::Csv => report::found_csv(&rows)?,
    })?;
    Ok(if stop.load(Ordering::Relaxed) { exit::INTERRUPTED } else { exit::OK })
}

fn subject(args: &Args, text: &str, device: &DeviceSpec) -> Result<Subject, Failure> {
    let (strategy, note) = environment::resolve_settings(StrategySpec::from(text));
    strategy.check().map_err(Failure::usage)?;
    if let Some(note) = note {
        output::complain(&note);
    }
    Ok(Subject { strategy, device: device.clone(), memory_bytes: args.memory.map(|bytes| bytes.0) })
}

/// The worst program, as small as it gets.
fn search(quest: &Quest, stop: &AtomicBool) -> Result<Option<Find>, Failure> {
    let bar = progress::of_tries(quest.tries);
    let found = quest.search(stop, |number, find| {
        bar.set_position(number.into());
        bar.set_message(format!("{}: {:.3} at try {}", quest.subject.strategy, find.badness, find.found_at));
    });
    let small = found.map(|found| {
        found.map(|found| {
            bar.set_message(format!("{}: {:.3}, shrinking", quest.subject.strategy, found.badness));
            quest.shrink(&found, SHRINKING_TRIES, stop)
        })
    });
    bar.finish_and_clear();
    small.map_err(|error| Failure::from(anyhow!("{}: {error}", quest.subject.strategy)))
}

fn save(args: &Args, find: &Find, victim: &Subject) -> Result<PathBuf, Failure> {
    let folder = args.save.clone().unwrap_or_else(|| Common::SAVE.into());
    Ok(evidence::save(&find.trace, &folder, "adversary", &victim.strategy.to_string())?)
}

/// What everybody takes for the trace: its victim first, then its rival, then all others.
fn serve_to_all(
    args: &Args,
    find: &Find,
    victim: &Subject,
    rival: Option<&Subject>,
    path: &Path,
) -> Result<Vec<FoundRow>, Failure> {
    let mut subjects: Vec<Subject> = std::iter::once(victim).chain(rival).cloned().collect();
    for entry in owners_of_memory() {
        let other = subject(args, entry.name, &victim.device)?;
        if subjects.iter().all(|subject| subject.strategy != other.strategy) {
            subjects.push(other);
        }
    }
    let made_for = victim.strategy.to_string();
    let rows = subjects.iter().map(|subject| FoundRow::of(find, &made_for, subject, &path.to_string_lossy()));
    let rows: Result<Vec<Option<FoundRow>>, _> = rows.collect();
    Ok(rows?.into_iter().flatten().collect())
}

fn note(args: &Args, find: &Find, victim: &Subject, path: &Path) -> String {
    let mut same = format!("{} --strategy {}", quoted(&path.to_string_lossy()), quoted(&victim.strategy.to_string()));
    let measured_by = if args.options.against.is_some() { ", or what its rival reserves" } else { "" };
    if !victim.device.is_simulated() {
        same.push_str(&format!(" --device {}", victim.device));
    }
    format!(
        "{}: {:.3} times the budget of live memory{measured_by}, found at try {} of {}\n  trace: {} ({} events)\n  \
         again: oomph replay {same}\n  needs: oomph threshold {same}",
        victim.strategy,
        find.badness,
        find.found_at,
        args.options.tries,
        path.display(),
        find.trace.events.len(),
    )
}
