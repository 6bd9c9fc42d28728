//! Compares the results of `caching` and the oracle, as far as they are comparable.

use std::collections::BTreeSet;

use super::{
    oracle::Answer,
    ours,
    program::{Call, Program},
};

/// The result of a comparison.
#[derive(Debug)]
pub enum Verdict {
    Alike,
    /// PyTorch frees or drops memory in use, so the results are not comparable.
    SetAside,
    /// The first line that differs.
    Differs(String),
}

/// Runs the program here and compares it with the oracle's answer.
pub fn compare(program: &Program, theirs: &Answer) -> Verdict {
    let ours = ours::run(program);
    if ours.spoilt_at.is_some() {
        return Verdict::SetAside;
    }
    if !theirs.finished {
        return Verdict::Differs("the real allocator crashed".to_owned());
    }
    let order = Order::of(program);
    let (ours, theirs) = (order.normal(ours.lines), order.normal(theirs.lines.clone()));
    let longest = ours.len().max(theirs.len());
    let first = (0..longest).find(|&place| ours.get(place) != theirs.get(place));
    match first {
        None => Verdict::Alike,
        Some(place) => {
            let shown = |lines: &[String]| lines.get(place).cloned().unwrap_or_else(|| "nothing".to_owned());
            let before = if place > 0 { theirs[place - 1].as_str() } else { "the start" };
            Verdict::Differs(format!("after '{before}'\nPyTorch: {}\nours:    {}", shown(&theirs), shown(&ours)))
        }
    }
}

/// The orders that depend on a hash table in PyTorch for this program.
struct Order {
    /// Completions of frees in one pass.
    completions_open: bool,
}

impl Order {
    fn of(program: &Program) -> Order {
        let mut streams = BTreeSet::new();
        let mut pools = BTreeSet::new();
        let mut captures = false;
        for call in &program.calls {
            match call {
                Call::UsedOn { stream, .. } => {
                    streams.insert(*stream);
                }
                Call::PoolBegin { pool, .. } | Call::PoolRetain { pool, .. } => {
                    pools.insert(*pool);
                }
                Call::CaptureBegin => captures = true,
                _ => {}
            }
        }
        Order { completions_open: streams.len() > 1 || (!streams.is_empty() && (captures || !pools.is_empty())) }
    }

    /// Sorts lines without a defined order, and removes values that depend on it: the stale request
    /// of a free block, and how often free blocks briefly shared their segment.
    fn normal(&self, mut lines: Vec<String>) -> Vec<String> {
        for line in &mut lines {
            // A counter that a change of settings drove below zero is shown as zero by `caching`.
            if line.starts_with("stat oversize_") && line.contains(" -") {
                let name = line.split(" -").next().unwrap_or_default();
                *line = format!("{name} 0");
            }
        }
        if self.completions_open {
            sort_runs(&mut lines, &["free_completed"]);
            // Two neighbours freed together are briefly two free blocks, or never, depending on the
            // order.
            let passing = |line: &String| line.starts_with("stat inactive_split") && !line.contains(".current ");
            lines.retain(|line| !passing(line));
            for line in lines.iter_mut().filter(|line| line.starts_with("segment ")) {
                let blank = |word: &str| match word.split_once(":free:") {
                    Some((block, _)) => format!("{block}:free:?"),
                    None => word.to_owned(),
                };
                *line = line.split(' ').map(blank).collect::<Vec<String>>().join(" ");
            }
        }
        lines
    }
}

/// Sorts every run of consecutive lines that start with one of these words.
fn sort_runs(lines: &mut [String], words: &[&str]) {
    let belongs = |line: &String| words.contains(&line.split(' ').next().unwrap_or_default());
    for run in lines.chunk_by_mut(|a, b| belongs(a) && belongs(b)) {
        run.sort_unstable();
    }
}
