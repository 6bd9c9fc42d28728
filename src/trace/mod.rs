//! A story of allocation events: the only thing that a workload makes and that replay eats.
//!
//! [`Event`] is the model in memory, [`Tables`] hold what events refer to by number, a [`Source`] can be read any
//! number of times in chunks. This room knows no device and no strategy.

mod builder;
mod error;
mod event;
mod source;
mod tables;
pub mod torch;

pub use builder::TraceBuilder;
pub use error::TraceError;
pub use event::{BlockSlot, CollectiveKind, Event, MarkKind, NO_OPERAND, Op, TraceEventId};
pub use source::{CHUNK_EVENTS, EventReader, Source, SourceInfo, Trace};
pub use tables::{Category, LabelId, ShapeId, TableFull, Tables, Tag};
