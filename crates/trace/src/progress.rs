//! A source that reports how far its readers are, once per chunk, so that loops over events need not.

use std::{
    ops::Deref,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Event, EventReader, InitialLayout, Source, SourceInfo, Tables, TraceError};
use oomph_base::Progress;

/// The progress total of one reading of a source: tenths of a percent.
pub const PROGRESS_PER_READING: u64 = 1000;

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

    fn info(&self) -> SourceInfo {
        self.source.info()
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        self.source.initial_layout()
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        let reader = self.source.open()?;
        let one_less = |readings: u64| readings.checked_sub(1);
        // A reading more than was announced is not part of the stage.
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
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        self.report();
        self.reader.read(chunk)
    }

    fn tables(&self) -> &Tables {
        self.reader.tables()
    }

    fn share_read(&self) -> Option<f64> {
        self.reader.share_read()
    }

    fn lend<'a>(&'a mut self, chunk: &'a mut Vec<Event>) -> Result<(&'a [Event], &'a Tables), TraceError> {
        self.report();
        self.reader.lend(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CHUNK_EVENTS, Op, Trace};
    use oomph_base::{NoProgress, ProgressLog};

    fn long() -> Box<dyn Source> {
        let events = (0..10 * CHUNK_EVENTS as u64).map(|nanos| Event::of(Op::Idle { nanos })).collect();
        Box::new(Trace { name: "long".to_owned(), events, tables: Tables::default() })
    }

    fn done(log: &ProgressLog) -> u64 {
        log.stages().last().unwrap().2
    }

    #[test]
    fn a_reading_is_told_as_far_as_it_has_come() {
        let log = ProgressLog::default();
        let source = ProgressSource::stage(long(), &log, "playing", 2);
        assert_eq!(log.stages(), [("playing".to_owned(), 2000, 0)]);
        let (mut reader, mut chunk) = (source.open().unwrap(), Vec::new());
        for number in 0..5 {
            assert_eq!(done(&log), number.max(1) * 100 - 100, "what is read is not yet done with");
            reader.lend(&mut chunk).unwrap();
        }
        drop(reader);
        assert_eq!(done(&log), 1000, "one that ends early counts as a whole one");
        assert_eq!(Trace::read(&source).unwrap().events.len(), 10 * CHUNK_EVENTS);
        assert_eq!(done(&log), 2000);
        Trace::read(&source).unwrap();
        assert_eq!(done(&log), 2000, "nobody expected a third");
    }

    #[test]
    fn readings_that_never_come_count_in_the_end() {
        let log = ProgressLog::default();
        drop(ProgressSource::stage(long(), &log, "playing", 3));
        assert_eq!(done(&log), 3000);
    }

    #[test]
    fn what_is_watched_reads_the_same() {
        let watched = ProgressSource::within(long(), &NoProgress, 1);
        assert_eq!(Trace::read(&watched).unwrap().events, Trace::read(&*long()).unwrap().events);
        assert_eq!((watched.name(), watched.info()), ("long", long().info()));
    }
}
