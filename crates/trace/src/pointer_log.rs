//! Logs that name blocks by pointer (RMM, STAlloc, Umpire), line by line: what their readers share.
//!
//! A reader turns each line into a step; the whole log is then told as a trace. Blocks that are freed without having
//! been allocated were there before the log began, and come first. What does not fit is counted and said.

use std::{
    collections::HashMap,
    io::{self, BufRead, Read},
    path::Path,
};

use super::{
    MarkKind, TableFull, Trace, TraceBuilder, TraceError, builder::add_failed_request, file,
    memory_budget::MemoryBudget,
};
use oomph_base::{Nanos, SiteId, StreamId, TagId, ThreadId};

/// A trace from another tool's file, and what the file does not tell.
#[derive(Clone, Debug, Default)]
pub struct Imported {
    /// The story.
    pub trace: Trace,
    /// What is not known or left out, one sentence each.
    pub gaps: Vec<String>,
}

/// A file for another tool that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The file system said no.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// No line of these formats has more than a few hundred bytes.
const LONGEST_LINE: u64 = 1 << 20;

/// The lines of a text file, with their numbers.
pub(crate) struct Lines<'a> {
    input: &'a mut dyn BufRead,
    path: &'a Path,
    number: u64,
    line: Vec<u8>,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(input: &'a mut dyn BufRead, path: &'a Path) -> Lines<'a> {
        Lines { input, path, number: 0, line: Vec::new() }
    }

    /// The next line that is not blank, without the white space around it.
    pub(crate) fn next(&mut self) -> Result<Option<&str>, TraceError> {
        loop {
            self.line.clear();
            let mut limited = (&mut *self.input).take(LONGEST_LINE);
            let count =
                limited.read_until(b'\n', &mut self.line).map_err(|error| file::read_failed(self.path, error))?;
            if count == 0 {
                return Ok(None);
            }
            self.number += 1;
            if count as u64 == LONGEST_LINE && !self.line.ends_with(b"\n") {
                return Err(self.wrong("this line is longer than 1 MiB"));
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(self.line.trim_ascii()) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(self.wrong("this line is not text")),
        }
    }

    /// An error at the line that was read last.
    pub(crate) fn wrong(&self, reason: impl Into<String>) -> TraceError {
        TraceError::Syntax { path: self.path.to_owned(), line: self.number, reason: reason.into() }
    }
}

/// A pointer or handle: `0x7f..`, `(nil)`, or decimal.
pub(crate) fn handle(text: &str) -> Option<u64> {
    match text {
        "(nil)" | "nullptr" | "(null)" => Some(0),
        text => match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        },
    }
}

/// One line of a log.
#[derive(Clone, Copy)]
pub(crate) enum Step {
    Alloc {
        pointer: u64,
        bytes: u64,
        stream: StreamId,
        site: SiteId,
    },
    /// `bytes` is 0 where the log does not say.
    Free {
        pointer: u64,
        bytes: u64,
        stream: StreamId,
    },
    Failed {
        bytes: u64,
        stream: StreamId,
    },
    Mark {
        kind: MarkKind,
        label: u32,
        index: u32,
    },
}

#[derive(Clone, Copy)]
struct Timed {
    elapsed: Nanos,
    thread: ThreadId,
    step: Step,
}

/// A log as it is read.
pub(crate) struct PointerLog {
    steps: Vec<Timed>,
    labels: Vec<String>,
    label_numbers: HashMap<String, u32>,
    /// Gives numbers to streams, threads and call sites.
    pub(crate) story: TraceBuilder,
    budget: MemoryBudget,
}

impl PointerLog {
    pub(crate) fn new() -> PointerLog {
        PointerLog {
            steps: Vec::new(),
            labels: Vec::new(),
            label_numbers: HashMap::new(),
            story: TraceBuilder::new(),
            budget: MemoryBudget::DEFAULT,
        }
    }

    pub(crate) fn push(
        &mut self,
        elapsed: Nanos,
        thread: ThreadId,
        step: Step,
        at: &Lines<'_>,
    ) -> Result<(), TraceError> {
        self.budget.push(&mut self.steps, Timed { elapsed, thread, step }).map_err(|spent| at.wrong(spent.to_string()))
    }

    pub(crate) fn label(&mut self, label: &str, at: &Lines<'_>) -> Result<u32, TraceError> {
        if let Some(&known) = self.label_numbers.get(label) {
            return Ok(known);
        }
        self.charge(label, at)?;
        let number = self.labels.len() as u32;
        self.labels.push(label.to_owned());
        self.label_numbers.insert(label.to_owned(), number);
        Ok(number)
    }

    /// Pays for keeping a text, here and in the tables.
    pub(crate) fn charge(&mut self, text: &str, at: &Lines<'_>) -> Result<(), TraceError> {
        self.budget.charge(4 * text.len() + 256).map_err(|spent| at.wrong(spent.to_string()))
    }

    pub(crate) fn tell(mut self, name: &str) -> Imported {
        let mut gaps = Vec::new();
        let before = self.there_before();
        let mut live = HashMap::new();
        let mut sizeless: u64 = 0;
        if !before.is_empty() {
            gaps.push(format!("{} blocks are freed that were there before the log began", before.len()));
            self.story.mark(MarkKind::Phase, "before the recording", 0);
        }
        for (pointer, bytes, stream) in &before {
            match bytes {
                0 => sizeless += 1,
                &bytes => drop(live.insert(*pointer, self.story.alloc(bytes, *stream, TagId(0)))),
            }
        }
        if !before.is_empty() {
            self.story.mark(MarkKind::Phase, "", 0);
        }
        let (mut empty, mut twice, mut replaced) = (0_u64, 0_u64, 0_u64);
        for Timed { elapsed, thread, step } in self.steps {
            self.story.elapse(elapsed);
            self.story.set_thread(thread);
            match step {
                Step::Alloc { bytes: 0, .. } | Step::Failed { bytes: 0, .. } | Step::Free { pointer: 0, .. } => {
                    empty += 1
                }
                Step::Alloc { pointer, bytes, stream, site } => {
                    let slot = self.story.alloc_at(bytes, stream, TagId(0), site);
                    replaced += u64::from(live.insert(pointer, slot).is_some());
                }
                Step::Free { pointer, stream, .. } => match live.remove(&pointer) {
                    Some(slot) => self.story.free_on(slot, stream),
                    None => twice += 1,
                },
                Step::Failed { bytes, stream } => add_failed_request(&mut self.story, bytes, stream, None),
                Step::Mark { kind, label, index } => self.story.mark(kind, &self.labels[label as usize], index),
            }
        }
        let mut say = |count: u64, what: &str| {
            if count > 0 {
                gaps.push(format!("{count} {what}"));
            }
        };
        say(sizeless, "of them have no known size and are left out");
        say(empty, "calls for nothing (zero bytes or a null pointer) are left out");
        say(twice - twice.min(sizeless), "frees of blocks that nobody holds are left out");
        say(replaced, "allocs return a pointer that is still in use: the block before counts as never freed");
        Imported { trace: self.story.finish(name), gaps }
    }

    /// Blocks whose first step is a free.
    fn there_before(&self) -> Vec<(u64, u64, StreamId)> {
        let mut before = Vec::new();
        let mut seen = HashMap::new();
        for timed in &self.steps {
            match timed.step {
                Step::Alloc { pointer, bytes, .. } if bytes > 0 => drop(seen.insert(pointer, ())),
                Step::Free { pointer, bytes, stream } if pointer != 0 && !seen.contains_key(&pointer) => {
                    seen.insert(pointer, ());
                    before.push((pointer, bytes, stream));
                }
                _ => {}
            }
        }
        before
    }
}

/// What to call a trace that a file of this name holds.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// What too many streams or threads mean for a line.
pub(crate) fn full<'a>(at: &'a Lines<'_>) -> impl Fn(TableFull) -> TraceError + 'a {
    |full| at.wrong(full.to_string())
}
