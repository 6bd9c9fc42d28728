//! A story of allocation events: the only thing that a workload makes and that replay eats.
//!
//! [`Event`] is the model in memory, [`Tables`] hold what events refer to by number, a [`Source`] can be read any
//! number of times in chunks: a [`Trace`] in memory, a generator, or a file that [`open`] recognises. [`check`] says
//! whether a trace holds together and what is in it; [`write()`] saves it in the native text format (`native/mod.rs`
//! describes it). This room knows no device and no strategy.
//!
//! An event takes 32 bytes in memory.

#[cfg(any(test, feature = "testing"))]
pub mod arbitrary;
mod builder;
mod check;
mod compression;
mod error;
mod event;
mod failed;
mod file;
pub mod minimalloc;
mod native;
mod open;
pub mod plan;
mod pointer_log;
mod progress;
pub mod rmm;
mod source;
pub mod stalloc;
mod summary;
mod tables;
pub mod torch;
pub mod umpire;

pub use oomph_pytorch::InitialLayout;

pub use builder::TraceBuilder;
pub use check::{Checker, Place, Resident, check};
pub use error::TraceError;
pub use event::{BlockSlot, CollectiveKind, Event, MarkKind, NO_OPERAND, Op, OpKind, TraceEventId};
pub use failed::failed_when_recorded;
pub use native::NAME as NATIVE;
pub use open::{FORMATS, Format, open, recognise, save, write, write_to};
pub use pointer_log::{Imported, WriteError};
pub use progress::{PROGRESS_PER_READING, ProgressSource};
pub use source::{CHUNK_EVENTS, EventReader, Source, SourceInfo, Trace};
pub use summary::{Bucket, Peak, Powers, Summary};
pub use tables::{Category, LabelId, ShapeId, TableFull, Tables, Tag};
