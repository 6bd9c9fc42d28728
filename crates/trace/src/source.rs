//! Sources of events: anything that can be opened again and read in chunks, with or without progress reports.

use std::{
    io,
    ops::Deref,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Event, InitialLayout, Op, Tables};
use oomph_base::{PlacementCall, Progress, escaped};

/// How many events a chunk holds at most: 128 KiB, so that it stays in the second-level cache.
pub const CHUNK_EVENTS: usize = 4096;

/// A trace that can be read any number of times: a file, a generator, a recording. Every reading gives the same events.
pub trait Source: Send + Sync {
    /// The name in tables.
    fn name(&self) -> &str;

    /// The number of events, where it is known without reading.
    fn events(&self) -> Option<u64> {
        None
    }

    /// The memory before the first event, where the trace begins in the middle of a program and the
    /// memory is known. Such a trace first requests the blocks that are live in it, in its order.
    fn initial_layout(&self) -> Option<InitialLayout> {
        None
    }

    /// Whether requests use private pools ([`Op::UsePool`](crate::Op::UsePool)). Reads the events, unless it is known
    /// without.
    fn uses_pools(&self) -> Result<bool, TraceError> {
        Ok(false)
    }

    /// Where the driver placed the ordinary segments of a recorded program, in the order of its calls; nothing where it
    /// is not known.
    fn placements(&self) -> Arc<[PlacementCall]> {
        Arc::default()
    }

    /// Opens a reader at the first event.
    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError>;
}

/// A position in a source.
pub trait EventReader: Send {
    /// The next events, at most [`CHUNK_EVENTS`], and the tables; no events at the end.
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError>;

    /// The tables, complete for all events read so far.
    fn tables(&self) -> &Tables;

    /// The share of the source that has been read, from 0 to 1, where it is known. For progress reports only.
    fn share_read(&self) -> Option<f64> {
        None
    }
}

/// Reads a source from beginning to end and calls `visit` with every event and the tables.
pub fn for_each_event<E: From<TraceError>>(
    source: &dyn Source,
    mut visit: impl FnMut(&Event, &Tables) -> Result<(), E>,
) -> Result<(), E> {
    let mut reader = source.open()?;
    while let (events @ [_, ..], tables) = reader.next_chunk()? {
        for event in events {
            visit(event, tables)?;
        }
    }
    Ok(())
}

/// A whole trace in memory.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The name in tables.
    pub name: String,
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// The tables that the events refer to.
    pub tables: Tables,
    /// See [`Source::placements`].
    pub placements: Arc<[PlacementCall]>,
}

impl Trace {
    /// Reads a whole source into memory: 32 bytes per event.
    ///
    /// ```
    /// use oomph_trace::{Trace, TraceBuilder};
    /// use oomph_base::{StreamId, TagId};
    /// let mut builder = TraceBuilder::new();
    /// let block = builder.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
    /// builder.free(block);
    /// let trace = builder.finish("tiny");
    /// assert_eq!(Trace::read(&trace)?.events, trace.events);
    /// # Ok::<(), oomph_trace::TraceError>(())
    /// ```
    pub fn read(source: &dyn Source) -> Result<Trace, TraceError> {
        let (mut reader, mut events) = (source.open()?, Vec::new());
        while let (some @ [_, ..], _) = reader.next_chunk()? {
            events.extend_from_slice(some);
        }
        let tables = reader.tables().clone();
        Ok(Trace { name: source.name().to_owned(), events, tables, placements: source.placements() })
    }
}

impl Source for Trace {
    fn name(&self) -> &str {
        &self.name
    }

    fn uses_pools(&self) -> Result<bool, TraceError> {
        Ok(self.events.iter().any(|event| matches!(event.op, Op::UsePool { .. })))
    }

    fn events(&self) -> Option<u64> {
        Some(self.events.len() as u64)
    }

    fn placements(&self) -> Arc<[PlacementCall]> {
        Arc::clone(&self.placements)
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        Ok(Box::new(TraceReader { unread: &self.events, events: self.events.len(), tables: &self.tables }))
    }
}

/// A position in a trace in memory.
struct TraceReader<'a> {
    unread: &'a [Event],
    /// The number of all events.
    events: usize,
    tables: &'a Tables,
}

impl EventReader for TraceReader<'_> {
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError> {
        let (next, unread) = self.unread.split_at(self.unread.len().min(CHUNK_EVENTS));
        self.unread = unread;
        Ok((next, self.tables))
    }

    fn tables(&self) -> &Tables {
        self.tables
    }

    fn share_read(&self) -> Option<f64> {
        Some(1.0 - self.unread.len() as f64 / self.events.max(1) as f64)
    }
}

/// A trace that cannot be read or written, or that contradicts itself.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file system reported an error.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A line that cannot be parsed.
    #[error("{path}:{line}: {}", escaped(reason))]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// Why.
        reason: String,
    },
    /// A file in an unknown format or version.
    #[error("{path}: {}", escaped(reason))]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// An event that contradicts those before it.
    #[error("event {index}: {}", escaped(reason))]
    Contradiction {
        /// The event, from 0.
        index: u64,
        /// What is wrong with it.
        reason: String,
    },
}

/// The progress total of one reading of a source: tenths of a percent.
pub const PROGRESS_PER_READING: u64 = 1000;

/// A trace that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The file system reported an error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

type OpenedSource = Result<Box<dyn Source>, TraceError>;

/// A format of trace files.
pub struct TraceFormat {
    /// Its name.
    pub name: &'static str,
    /// One line for lists.
    pub about: &'static str,
    /// Whether a file has this format, by its first bytes after decompression.
    pub(crate) recognises: fn(head: &[u8]) -> bool,
    /// Opens a file, and reports progress where the whole file is read.
    pub(crate) open: fn(path: &Path, progress: &dyn Progress) -> OpenedSource,
}

/// A source that is read a known number of times. Every reading counts the same.
///
/// A reader that is dropped early counts as a complete reading. Readings that were never opened count when the source is
/// dropped.
pub struct ProgressSource<S, P: Progress> {
    source: S,
    progress: P,
    readings: AtomicU64,
}

impl<S, P: Progress> ProgressSource<S, P> {
    /// Begins a stage that reads `source` `readings` times.
    pub fn stage(source: S, progress: P, stage: &str, readings: u64) -> ProgressSource<S, P> {
        progress.begin_stage(stage, readings.saturating_mul(PROGRESS_PER_READING));
        ProgressSource::within(source, progress, readings)
    }

    /// Reads `source` `readings` times within a stage that has begun.
    pub fn within(source: S, progress: P, readings: u64) -> ProgressSource<S, P> {
        ProgressSource { source, progress, readings: AtomicU64::new(readings) }
    }
}

impl<S, P: Progress> Drop for ProgressSource<S, P> {
    fn drop(&mut self) {
        self.progress.advance(self.readings.get_mut().saturating_mul(PROGRESS_PER_READING));
    }
}

impl<S, P> Source for ProgressSource<S, P>
where
    S: Deref<Target: Source> + Send + Sync,
    P: Progress + Send,
{
    fn name(&self) -> &str {
        self.source.name()
    }

    fn events(&self) -> Option<u64> {
        self.source.events()
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        self.source.initial_layout()
    }

    fn uses_pools(&self) -> Result<bool, TraceError> {
        self.source.uses_pools()
    }

    fn placements(&self) -> Arc<[PlacementCall]> {
        self.source.placements()
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        let reader = self.source.open()?;
        let one_less = |readings: u64| readings.checked_sub(1);
        // A reading beyond the announced ones is not part of the stage.
        let counts = self.readings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        Ok(Box::new(ProgressReader {
            reader,
            progress: &self.progress,
            left: if counts { PROGRESS_PER_READING } else { 0 },
        }))
    }
}

struct ProgressReader<'a, P: Progress> {
    reader: Box<dyn EventReader + 'a>,
    progress: &'a P,
    /// What was not reported yet.
    left: u64,
}

impl<P: Progress> ProgressReader<'_, P> {
    /// Reports what was read before this call: the caller is done with it now.
    fn report(&mut self) {
        let Some(share) = self.reader.share_read() else { return };
        let read = (share * PROGRESS_PER_READING as f64).round() as u64;
        let ahead = PROGRESS_PER_READING.saturating_sub(read);
        if ahead < self.left {
            self.progress.advance(self.left - ahead);
            self.left = ahead;
        }
    }
}

impl<P: Progress> Drop for ProgressReader<'_, P> {
    fn drop(&mut self) {
        self.progress.advance(self.left);
    }
}

impl<P: Progress + Send> EventReader for ProgressReader<'_, P> {
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError> {
        self.report();
        self.reader.next_chunk()
    }

    fn tables(&self) -> &Tables {
        self.reader.tables()
    }

    fn share_read(&self) -> Option<f64> {
        self.reader.share_read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    #[test]
    fn a_trace_is_read_in_chunks_repeatedly() {
        let events = (0..2 * CHUNK_EVENTS as u64 + 1).map(|nanos| Event::of(Op::Idle { nanos })).collect();
        let trace = Trace { name: "long".to_owned(), events, ..Trace::default() };
        for _ in 0..2 {
            let mut reader = trace.open().unwrap();
            let sizes = [(); 4].map(|()| reader.next_chunk().unwrap().0.len());
            assert_eq!(sizes, [CHUNK_EVENTS, CHUNK_EVENTS, 1, 0]);
        }
        assert_eq!(Trace::read(&trace).unwrap().events, trace.events);
        assert_eq!(trace.events(), Some(trace.events.len() as u64));
    }
}

#[cfg(test)]
mod progress_tests {
    use super::*;
    use crate::{CHUNK_EVENTS, Op, Trace};
    use oomph_base::{NoProgress, ProgressLog};

    #[test]
    fn reasons_cannot_forge_lines() {
        let (path, reason) = (PathBuf::from("a"), "unknown word `x\nerror: forged`".to_owned());
        for error in [
            TraceError::Syntax { path: path.clone(), line: 3, reason: reason.clone() },
            TraceError::Format { path, reason: reason.clone() },
            TraceError::Contradiction { index: 7, reason },
        ] {
            assert!(error.to_string().ends_with(r"unknown word `x\nerror: forged`"), "{error}");
        }
    }

    fn long() -> Box<dyn Source> {
        let events = (0..10 * CHUNK_EVENTS as u64).map(|nanos| Event::of(Op::Idle { nanos })).collect();
        Box::new(Trace { name: "long".to_owned(), events, ..Trace::default() })
    }

    fn done(log: &ProgressLog) -> u64 {
        log.stages().last().unwrap().2
    }

    #[test]
    fn progress_follows_the_reader() {
        let log = ProgressLog::default();
        let source = ProgressSource::stage(long(), &log, "playing", 2);
        assert_eq!(log.stages(), [("playing".to_owned(), 2000, 0)]);
        let mut reader = source.open().unwrap();
        for number in 0..5 {
            assert_eq!(done(&log), number.max(1) * 100 - 100, "a chunk counts when the next one is read");
            reader.next_chunk().unwrap();
        }
        drop(reader);
        assert_eq!(done(&log), 1000, "a reading that ends early counts in full");
        assert_eq!(Trace::read(&source).unwrap().events.len(), 10 * CHUNK_EVENTS);
        assert_eq!(done(&log), 2000);
        Trace::read(&source).unwrap();
        assert_eq!(done(&log), 2000, "a third reading was not announced");
    }

    #[test]
    fn missing_readings_count_on_drop() {
        let log = ProgressLog::default();
        drop(ProgressSource::stage(long(), &log, "playing", 3));
        assert_eq!(done(&log), 3000);
    }

    #[test]
    fn progress_changes_no_events() {
        let watched = ProgressSource::within(long(), &NoProgress, 1);
        assert_eq!(Trace::read(&watched).unwrap().events, Trace::read(&*long()).unwrap().events);
        assert_eq!((watched.name(), watched.events()), ("long", long().events()));
    }
}
