//! A source that tells somebody how far its readers are: once a chunk, so that the loops over events know nothing of it.
//!
//! The commands wrap what they read in it, and so does whoever replays a story many times to find an answer.

use std::{
    ops::Deref,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Event, EventReader, Source, SourceInfo, Tables, TraceError, torch::Recording};
use oomph_base::Watcher;

/// How many parts one reading of a source has: tenths of a percent.
pub const PARTS_OF_A_READING: u64 = 1000;

/// A source that is read a known number of times, each of which counts the same.
///
/// A reader that ends early, because memory ran out or enough was seen, counts as a whole one; so does one that was never
/// opened, once the source is dropped.
pub struct Watched<S, W: Watcher> {
    source: S,
    watcher: W,
    readings: AtomicU64,
}

impl<S, W: Watcher> Watched<S, W> {
    /// Begins the stage that reads `source` so many times.
    pub fn stage(source: S, watcher: W, stage: &str, readings: u64) -> Watched<S, W> {
        watcher.begins(stage, readings.saturating_mul(PARTS_OF_A_READING));
        Watched::within(source, watcher, readings)
    }

    /// Reads `source` so many times within a stage that has begun.
    pub fn within(source: S, watcher: W, readings: u64) -> Watched<S, W> {
        Watched { source, watcher, readings: AtomicU64::new(readings) }
    }
}

impl<S, W: Watcher> Drop for Watched<S, W> {
    fn drop(&mut self) {
        self.watcher.advances(self.readings.get_mut().saturating_mul(PARTS_OF_A_READING));
    }
}

impl<S, W> Source for Watched<S, W>
where
    S: Deref<Target: Source> + Send + Sync,
    W: Watcher + Send,
{
    fn name(&self) -> &str {
        self.source.name()
    }

    fn info(&self) -> SourceInfo {
        self.source.info()
    }

    fn begun_late(&self) -> Option<&Recording> {
        self.source.begun_late()
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        let reader = self.source.open()?;
        let one_less = |readings: u64| readings.checked_sub(1);
        // A reading more than was announced is not part of the stage.
        let counts = self.readings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        Ok(Box::new(WatchedReader {
            reader,
            watcher: &self.watcher,
            left: if counts { PARTS_OF_A_READING } else { 0 },
        }))
    }
}

struct WatchedReader<'a, W: Watcher> {
    reader: Box<dyn EventReader + 'a>,
    watcher: &'a W,
    /// Parts that were not told yet.
    left: u64,
}

impl<W: Watcher> WatchedReader<'_, W> {
    /// Tells what was read before and is done with now.
    fn tell(&mut self) {
        let Some(share) = self.reader.share_read() else { return };
        let read = (share * PARTS_OF_A_READING as f64).round() as u64;
        let ahead = PARTS_OF_A_READING.saturating_sub(read);
        if ahead < self.left {
            self.watcher.advances(self.left - ahead);
            self.left = ahead;
        }
    }
}

impl<W: Watcher> Drop for WatchedReader<'_, W> {
    fn drop(&mut self) {
        self.watcher.advances(self.left);
    }
}

impl<W: Watcher + Send> EventReader for WatchedReader<'_, W> {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        self.tell();
        self.reader.read(chunk)
    }

    fn tables(&self) -> &Tables {
        self.reader.tables()
    }

    fn share_read(&self) -> Option<f64> {
        self.reader.share_read()
    }

    fn lend<'a>(&'a mut self, chunk: &'a mut Vec<Event>) -> Result<(&'a [Event], &'a Tables), TraceError> {
        self.tell();
        self.reader.lend(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CHUNK_EVENTS, Op, Trace};
    use oomph_base::{Minutes, Watch};

    fn long() -> Box<dyn Source> {
        let events = (0..10 * CHUNK_EVENTS as u64).map(|nanos| Event::of(Op::Idle { nanos })).collect();
        Box::new(Trace { name: "long".to_owned(), events, tables: Tables::default() })
    }

    fn done(minutes: &Minutes) -> u64 {
        minutes.stages().last().unwrap().2
    }

    #[test]
    fn a_reading_is_told_as_far_as_it_has_come() {
        let minutes = Minutes::default();
        let source = Watched::stage(long(), Watch::by(&minutes), "playing", 2);
        assert_eq!(minutes.stages(), [("playing".to_owned(), 2000, 0)]);
        let (mut reader, mut chunk) = (source.open().unwrap(), Vec::new());
        for number in 0..5 {
            assert_eq!(done(&minutes), number.max(1) * 100 - 100, "what is read is not yet done with");
            reader.lend(&mut chunk).unwrap();
        }
        drop(reader);
        assert_eq!(done(&minutes), 1000, "one that ends early counts as a whole one");
        assert_eq!(Trace::read(&source).unwrap().events.len(), 10 * CHUNK_EVENTS);
        assert_eq!(done(&minutes), 2000);
        Trace::read(&source).unwrap();
        assert_eq!(done(&minutes), 2000, "nobody expected a third");
    }

    #[test]
    fn readings_that_never_come_count_in_the_end() {
        let minutes = Minutes::default();
        drop(Watched::stage(long(), Watch::by(&minutes), "playing", 3));
        assert_eq!(done(&minutes), 3000);
    }

    #[test]
    fn what_is_watched_reads_the_same() {
        let watched = Watched::within(long(), Watch::NOBODY, 1);
        assert_eq!(Trace::read(&watched).unwrap().events, Trace::read(&*long()).unwrap().events);
        assert_eq!((watched.name(), watched.info()), ("long", long().info()));
    }
}
