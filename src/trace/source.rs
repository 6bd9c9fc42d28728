//! Where events come from: anything that can be opened again and read in chunks.

use super::{Event, Tables, TraceError};

/// How many events a chunk holds at most: 128 KiB, so that it stays in the second-level cache.
pub const CHUNK_EVENTS: usize = 4096;

/// A trace that can be read any number of times: a file, a generator, a recording.
///
/// Bisection, repeats and streaming are the same thing: open it again. Every opening gives the same events.
pub trait Source: Send + Sync {
    /// What to call it in tables.
    fn name(&self) -> &str;

    /// What is known before reading.
    fn info(&self) -> SourceInfo {
        SourceInfo::default()
    }

    /// Starts to read from the beginning.
    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError>;
}

/// What is known about a source before reading it; used for progress and for sizing tables, never for truth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceInfo {
    /// How many events there are.
    pub events: Option<u64>,
}

/// A position in a source.
pub trait EventReader: Send {
    /// Replaces the content of `chunk` by the next events, at most [`CHUNK_EVENTS`]; leaves it empty at the end.
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError>;

    /// The side tables, complete for all events read so far.
    fn tables(&self) -> &Tables;
}

/// A whole trace in memory.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What to call it.
    pub name: String,
    /// What happened.
    pub events: Vec<Event>,
    /// What the events refer to.
    pub tables: Tables,
}
