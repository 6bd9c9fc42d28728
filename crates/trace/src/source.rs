//! Where events come from: anything that can be opened again and read in chunks.

use super::{Event, InitialLayout, Tables, TraceError};

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

    /// The memory before the first event, where the trace begins in the middle of a program and the
    /// memory is known. Such a trace first requests the blocks that are live in it, in its order.
    fn initial_layout(&self) -> Option<InitialLayout>;

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

    /// How much of the source has been read, from 0 to 1, where that can be known before the end; for progress, never for
    /// truth.
    fn share_read(&self) -> Option<f64> {
        None
    }

    /// The next events and the side tables, for those who only look: a reader that has the events in memory lends them
    /// where they lie, any other puts them into `chunk`. Empty at the end.
    fn lend<'a>(&'a mut self, chunk: &'a mut Vec<Event>) -> Result<(&'a [Event], &'a Tables), TraceError> {
        self.read(chunk)?;
        Ok((chunk, self.tables()))
    }
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

impl Trace {
    /// Reads a whole source into memory: 32 bytes an event.
    ///
    /// ```
    /// use oomph_trace::{Trace, TraceBuilder};
    /// use oomph_base::{StreamId, TagId};
    /// let mut story = TraceBuilder::new();
    /// let block = story.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
    /// story.free(block);
    /// let trace = story.finish("tiny");
    /// assert_eq!(Trace::read(&trace)?.events, trace.events);
    /// # Ok::<(), oomph_trace::TraceError>(())
    /// ```
    pub fn read(source: &dyn Source) -> Result<Trace, TraceError> {
        let mut reader = source.open()?;
        let mut events = Vec::new();
        let mut chunk = Vec::with_capacity(CHUNK_EVENTS);
        loop {
            reader.read(&mut chunk)?;
            if chunk.is_empty() {
                break;
            }
            events.extend_from_slice(&chunk);
        }
        Ok(Trace { name: source.name().to_owned(), events, tables: reader.tables().clone() })
    }
}

impl Source for Trace {
    fn name(&self) -> &str {
        &self.name
    }

    fn info(&self) -> SourceInfo {
        SourceInfo { events: Some(self.events.len() as u64) }
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        None
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        Ok(Box::new(TraceReader { unread: &self.events, events: self.events.len(), tables: &self.tables }))
    }
}

/// A position in a trace in memory.
struct TraceReader<'a> {
    unread: &'a [Event],
    /// How many there are, read or not.
    events: usize,
    tables: &'a Tables,
}

impl<'t> TraceReader<'t> {
    fn next(&mut self) -> &'t [Event] {
        let (next, unread) = self.unread.split_at(self.unread.len().min(CHUNK_EVENTS));
        self.unread = unread;
        next
    }
}

impl EventReader for TraceReader<'_> {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        chunk.clear();
        chunk.extend_from_slice(self.next());
        Ok(())
    }

    fn tables(&self) -> &Tables {
        self.tables
    }

    fn share_read(&self) -> Option<f64> {
        Some(1.0 - self.unread.len() as f64 / self.events.max(1) as f64)
    }

    fn lend<'a>(&'a mut self, _: &'a mut Vec<Event>) -> Result<(&'a [Event], &'a Tables), TraceError> {
        Ok((self.next(), self.tables))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    #[test]
    fn a_trace_in_memory_is_read_in_chunks_as_often_as_one_likes() {
        let events = (0..2 * CHUNK_EVENTS as u64 + 1).map(|nanos| Event::of(Op::Idle { nanos })).collect();
        let trace = Trace { name: "long".to_owned(), events, tables: Tables::default() };
        for _ in 0..2 {
            let mut reader = trace.open().unwrap();
            let mut chunk = Vec::new();
            let mut sizes = Vec::new();
            loop {
                reader.read(&mut chunk).unwrap();
                sizes.push(chunk.len());
                if chunk.is_empty() {
                    break;
                }
            }
            assert_eq!(sizes, [CHUNK_EVENTS, CHUNK_EVENTS, 1, 0]);
            let mut reader = trace.open().unwrap();
            let mut lent = Vec::new();
            while let (events @ [_, ..], _) = reader.lend(&mut chunk).unwrap() {
                lent.extend_from_slice(events);
            }
            assert_eq!(lent, trace.events, "what is lent is what would be read");
        }
        assert_eq!(Trace::read(&trace).unwrap().events, trace.events);
        assert_eq!(trace.info().events, Some(trace.events.len() as u64));
    }
}
