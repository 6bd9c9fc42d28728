//! Traces of GPU memory allocations: events, sources, file formats, lower bounds and packings.
//!
//! A trace is a list of [`Event`]s with the [`Tables`] that they refer to by number. A [`Source`] can be read any
//! number of times: a [`Trace`] in memory, a generator, or a file that [`open`] recognises. [`check`] checks a trace and
//! summarises it, and [`write()`] saves it in the native text format. This crate knows no devices and no strategies.
//!
//! An event takes 32 bytes in memory.

#[cfg(any(test, feature = "testing"))]
pub mod arbitrary;
mod builder;
mod check;
mod event;
mod file;
mod formats;
mod interner;
mod memory_budget;
pub mod minimalloc;
mod native;
pub mod plan;
mod pointer_log;
pub mod rmm;
mod source;
pub mod stalloc;
mod summary;
pub mod torch;
pub mod umpire;

pub use oomph_pytorch::InitialLayout;

pub use builder::{BEFORE_RECORDING, TraceBuilder, failed_when_recorded};
pub use check::{MemoryKind, TraceChecker, TracedBlock, check, for_each_checked_event};
pub use event::{
    BlockSlot, Category, CollectiveKind, Event, LabelId, MarkKind, NO_OPERAND, Op, OpKind, ShapeId, TableFull, Tables,
    Tag, TraceEventId,
};
pub use formats::{FORMATS, open, recognise, save, write, write_to};
pub use memory_budget::OutOfBudget;
pub use native::NAME as NATIVE;
pub use source::{
    CHUNK_EVENTS, EventReader, PROGRESS_PER_READING, ProgressSource, Source, Trace, TraceError, TraceFormat,
    WriteError, for_each_event,
};
pub use summary::{FailedRequests, HistogramBucket, MemoryPeak, PowerHistogram, TraceSummary};
