//! Logs that identify blocks by pointer: what the readers of RMM, STAlloc and Umpire logs share.
//!
//! A reader turns each line into a step, and the whole log becomes a trace. Blocks that are freed without an allocation
//! existed before the log began: they are allocated first. Calls that cannot be replayed are left out.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use super::{
    BEFORE_RECORDING, MarkKind, Trace, TraceBuilder, TraceError, builder::add_failed_request, file::LineReader,
    interner::Interner, memory_budget::MemoryBudget,
};
use oomph_base::{Nanos, SiteId, StreamId, TagId, ThreadId, escaped};

/// A pointer or handle: `0x7f..`, `(nil)`, or decimal.
pub(crate) fn parse_handle(text: &str) -> Option<u64> {
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
pub(crate) enum LogStep {
    Alloc {
        pointer: u64,
        bytes: u64,
        stream: StreamId,
        site: SiteId,
    },
    /// `bytes` is 0 where the log has no size.
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
struct TimedStep {
    elapsed: Nanos,
    thread: ThreadId,
    step: LogStep,
}

/// A log while it is read.
pub(crate) struct PointerLog {
    steps: Vec<TimedStep>,
    labels: Interner<String>,
    /// Numbers streams, threads and call sites.
    pub(crate) builder: TraceBuilder,
    budget: MemoryBudget,
}

impl PointerLog {
    /// A log of the file at `path`, whose size bounds the memory.
    pub(crate) fn new(path: &Path) -> PointerLog {
        PointerLog {
            steps: Vec::new(),
            labels: Interner::default(),
            builder: TraceBuilder::new(),
            budget: MemoryBudget::for_log(path),
        }
    }

    pub(crate) fn push(
        &mut self,
        elapsed: Nanos,
        thread: ThreadId,
        step: LogStep,
        at: &LineReader<'_>,
    ) -> Result<(), TraceError> {
        let step = TimedStep { elapsed, thread, step };
        self.budget.push(&mut self.steps, step).map_err(|spent| at.syntax_error(spent))
    }

    pub(crate) fn label(&mut self, label: &str, at: &LineReader<'_>) -> Result<u32, TraceError> {
        let known = self.labels.items().len();
        let number = self.labels.intern(label);
        if self.labels.items().len() > known {
            self.charge(label, at)?;
        }
        Ok(number)
    }

    /// Charges the memory of a text, here and in the tables.
    pub(crate) fn charge(&mut self, text: &str, at: &LineReader<'_>) -> Result<(), TraceError> {
        self.budget.charge(4 * text.len() + 256).map_err(|spent| at.syntax_error(spent))
    }

    pub(crate) fn into_trace(mut self, name: &str) -> Trace {
        let before = self.blocks_before();
        let mut live = HashMap::new();
        if !before.is_empty() {
            self.builder.mark(MarkKind::Phase, BEFORE_RECORDING, 0);
            for (pointer, bytes, stream) in before {
                // A block of unknown size cannot be requested.
                if bytes > 0 {
                    live.insert(pointer, self.builder.alloc(bytes, stream, TagId(0)));
                }
            }
            self.builder.mark(MarkKind::Phase, "", 0);
        }
        for TimedStep { elapsed, thread, step } in self.steps {
            self.builder.elapse(elapsed);
            self.builder.set_thread(thread);
            match step {
                // Calls without effect: zero bytes, or a null pointer.
                LogStep::Alloc { bytes: 0, .. }
                | LogStep::Failed { bytes: 0, .. }
                | LogStep::Free { pointer: 0, .. } => {}
                // If the pointer is still in use, the log misses a free: the earlier block is never freed.
                LogStep::Alloc { pointer, bytes, stream, site } => {
                    live.insert(pointer, self.builder.alloc_at(bytes, stream, TagId(0), site));
                }
                LogStep::Free { pointer, stream, .. } => {
                    if let Some(slot) = live.remove(&pointer) {
                        self.builder.free_on(slot, stream);
                    }
                }
                LogStep::Failed { bytes, stream } => add_failed_request(&mut self.builder, bytes, stream, None),
                LogStep::Mark { kind, label, index } => {
                    self.builder.mark(kind, &self.labels.items()[label as usize], index);
                }
            }
        }
        self.builder.finish(name)
    }

    /// Pointer, size and stream of the blocks whose first step is a free.
    fn blocks_before(&self) -> Vec<(u64, u64, StreamId)> {
        let mut before = Vec::new();
        let mut seen = HashSet::new();
        for timed in &self.steps {
            match timed.step {
                LogStep::Alloc { pointer, bytes, .. } if bytes > 0 => drop(seen.insert(pointer)),
                LogStep::Free { pointer, bytes, stream } if pointer != 0 && seen.insert(pointer) => {
                    before.push((pointer, bytes, stream));
                }
                _ => {}
            }
        }
        before
    }
}

/// The name of a trace that is read from this file.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| escaped(&name.to_string_lossy()).into_owned())
}
