//! The time-out of a case that runs in this process: its work polls a flag.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::CaseTimeout;
use crate::base::PlacementCall;
use crate::trace::{Event, EventReader, InitialLayout, Source, Tables, TraceError};

/// How often the flag of the caller is checked.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// When a case must have ended.
#[derive(Clone, Copy, Debug)]
pub struct CaseDeadline {
    timeout: Option<CaseTimeout>,
    began: Instant,
}

impl CaseDeadline {
    /// The time of a case begins. Without a time-out it never ends.
    pub fn begin(timeout: Option<CaseTimeout>) -> CaseDeadline {
        CaseDeadline { timeout, began: Instant::now() }
    }

    /// Works with a flag that is set when `stop` is set or the time is up.
    pub fn run<T>(&self, stop: &AtomicBool, work: impl FnOnce(&AtomicBool) -> T) -> T {
        let Some(timeout) = self.timeout else { return work(stop) };
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let (working, watched) = mpsc::channel::<()>();
            let ended = &ended;
            scope.spawn(move || {
                loop {
                    let left = timeout.duration().saturating_sub(self.began.elapsed());
                    if left.is_zero() || stop.load(Ordering::Relaxed) {
                        ended.store(true, Ordering::Relaxed);
                        return;
                    }
                    // Disconnected: the work is done.
                    if watched.recv_timeout(left.min(CHECK_EVERY)) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            });
            let done = work(ended);
            drop(working);
            done
        })
    }

    /// The time-out, if the time is up.
    pub fn passed(&self) -> Option<CaseTimeout> {
        self.timeout.filter(|timeout| self.began.elapsed() >= timeout.duration())
    }
}

/// A source whose reading fails once a flag is set.
pub struct StoppableSource<'a> {
    /// The source.
    pub source: &'a dyn Source,
    /// The flag.
    pub stop: &'a AtomicBool,
}

impl Source for StoppableSource<'_> {
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
        Ok(Box::new(StoppableReader { reader: self.source.open()?, source: self }))
    }
}

struct StoppableReader<'a> {
    reader: Box<dyn EventReader + 'a>,
    source: &'a StoppableSource<'a>,
}

impl EventReader for StoppableReader<'_> {
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError> {
        if self.source.stop.load(Ordering::Relaxed) {
            let reason = "reading was stopped".to_owned();
            return Err(TraceError::Format { path: self.source.name().into(), reason });
        }
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
    use crate::{suite::test_case, trace::Trace};

    /// Waits until the flag is set; the test hangs if it never is.
    fn wait(flag: &AtomicBool) {
        while !flag.load(Ordering::Relaxed) {
            thread::yield_now();
        }
    }

    #[test]
    fn flag_is_set_when_the_time_is_up() {
        let deadline = CaseDeadline::begin(Some("1ms".parse().unwrap()));
        let stop = AtomicBool::new(false);
        deadline.run(&stop, wait);
        assert!(deadline.passed().is_some() && !stop.load(Ordering::Relaxed));
    }

    #[test]
    fn flag_is_set_when_the_caller_stops() {
        let stop = AtomicBool::new(true);
        for timeout in [None, Some("1h".parse().unwrap())] {
            let deadline = CaseDeadline::begin(timeout);
            deadline.run(&stop, wait);
            assert!(deadline.passed().is_none());
        }
    }

    #[test]
    fn work_that_ends_in_time_is_not_stopped() {
        let deadline = CaseDeadline::begin(Some("1h".parse().unwrap()));
        assert!(!deadline.run(&AtomicBool::new(false), |flag| flag.load(Ordering::Relaxed)));
        assert!(deadline.passed().is_none());
    }

    #[test]
    fn stopped_source_is_not_read() {
        let case = test_case("checkerboard", "null");
        let read = |stop: bool| {
            Trace::read(&StoppableSource { source: &*case.source, stop: &AtomicBool::new(stop) }).map(|_| ())
        };
        assert!(read(false).is_ok() && read(true).is_err());
    }
}
