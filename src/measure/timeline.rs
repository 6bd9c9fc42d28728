//! Memory over time in bounded space: long series are thinned by joining neighbours, and extremes are kept.

use serde::{Deserialize, Serialize};

use super::Levels;
use crate::{base::Nanos, replay::ReplayMoment, strategy::StrategyEvent};

/// A stretch of a series that can be joined with the one that follows it.
pub trait Join {
    /// How many stretches a series has at most.
    const MOST: usize;

    /// Takes in what came right after.
    fn join(&mut self, next: &Self);
}

/// Keeps at most a fixed number of stretches. Whenever they would be too many, neighbours are joined in pairs, so that
/// every stretch but the last covers the same number of items: one at first, then two, four, and so on.
#[derive(Clone, Debug)]
pub struct ThinnedSeries<T> {
    stretches: Vec<T>,
    most: usize,
    /// Items that a full stretch covers.
    stride: u64,
    /// Items that the last stretch covers.
    filled: u64,
}

impl<T: Join> Default for ThinnedSeries<T> {
    fn default() -> ThinnedSeries<T> {
        ThinnedSeries::new(T::MOST)
    }
}

impl<T: Join> ThinnedSeries<T> {
    /// An empty series of at most `most` stretches (at least two).
    #[must_use]
    pub fn new(most: usize) -> ThinnedSeries<T> {
        ThinnedSeries { stretches: Vec::new(), most: (most.max(2)).next_multiple_of(2), stride: 1, filled: 0 }
    }

    /// Adds an item at the end.
    #[inline]
    pub fn push(&mut self, item: T) {
        if self.filled < self.stride
            && let Some(last) = self.stretches.last_mut()
        {
            last.join(&item);
            self.filled += 1;
            return;
        }
        if self.stretches.len() == self.most {
            self.halve();
        }
        self.stretches.push(item);
        self.filled = 1;
    }

    /// The last stretch, to be brought up to date while it is still open.
    pub fn last_mut(&mut self) -> Option<&mut T> {
        self.stretches.last_mut()
    }

    /// The stretches in order.
    #[must_use]
    pub fn into_stretches(self) -> Vec<T> {
        self.stretches
    }

    /// Happens once for every doubling of the series.
    #[cold]
    fn halve(&mut self) {
        let mut stretches = std::mem::take(&mut self.stretches).into_iter();
        while let Some(mut first) = stretches.next() {
            if let Some(second) = stretches.next() {
                first.join(&second);
            }
            self.stretches.push(first);
        }
        self.stride *= 2;
    }
}

/// A timeline has at most this many points.
pub const MOST_POINTS: usize = 2048;
/// Retries and failed requests beyond this are only counted.
const MOST_INCIDENTS: usize = 1000;

/// The lowest and the highest value in a stretch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Lowest.
    pub min: u64,
    /// Highest.
    pub max: u64,
}

impl Span {
    const fn of(value: u64) -> Span {
        Span { min: value, max: value }
    }

    fn widen(&mut self, other: Span) {
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }
}

/// One event, or a stretch of events in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// Number of its first event, from 0.
    pub event: u64,
    /// When that was over, since the run began, on the device's clock.
    pub time_ns: u64,
    /// Bytes that the program has asked for and not given back: the same under every strategy, as long as none fails.
    #[serde(default)]
    pub live_bytes: Span,
    /// Bytes in blocks.
    pub allocated_bytes: Span,
    /// Bytes taken from the device.
    pub reserved_bytes: Span,
    /// What `nvidia-smi` would show; nothing where that is unknown.
    #[serde(default)]
    pub device_used_bytes: Option<Span>,
}

impl Join for Point {
    const MOST: usize = MOST_POINTS;

    fn join(&mut self, next: &Point) {
        self.live_bytes.widen(next.live_bytes);
        self.allocated_bytes.widen(next.allocated_bytes);
        self.reserved_bytes.widen(next.reserved_bytes);
        match (&mut self.device_used_bytes, next.device_used_bytes) {
            (Some(used), Some(next)) => used.widen(next),
            (used, next) => *used = used.or(next),
        }
    }
}

/// Something worth a mark on the time axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Number of the event.
    pub event: u64,
    /// When, since the run began.
    pub time_ns: u64,
    /// What.
    pub kind: IncidentKind,
}

/// What is worth a mark on the time axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IncidentKind {
    /// Cached memory was given back to make room.
    Retry,
    /// A request failed.
    OutOfMemory,
}

/// Memory over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// At most [`MOST_POINTS`], in order.
    pub points: Vec<Point>,
    /// Retries and failed requests, in order; a long list is cut.
    pub incidents: Vec<Incident>,
    /// How many were cut.
    pub incidents_left_out: u64,
}

/// Records memory over time.
#[derive(Debug, Default)]
pub(super) struct TimelineRecorder {
    began: Nanos,
    points: ThinnedSeries<Point>,
    marks: Timeline,
    /// The strategy retried during the present event.
    retried: bool,
}

impl TimelineRecorder {
    /// A recorder for a run that begins at `began` on the device's clock.
    pub(super) fn new(began: Nanos) -> TimelineRecorder {
        TimelineRecorder { began, ..TimelineRecorder::default() }
    }

    /// The result.
    pub(super) fn finish(self) -> Timeline {
        Timeline { points: self.points.into_stretches(), ..self.marks }
    }

    /// Something happened inside the strategy.
    pub(super) fn event(&mut self, event: StrategyEvent) {
        self.retried |= matches!(event, StrategyEvent::Retry { .. });
    }

    /// A request was served or failed.
    pub(super) fn answered(&mut self, now: &ReplayMoment<'_>, failed: bool) {
        if std::mem::take(&mut self.retried) {
            self.note(now, IncidentKind::Retry);
        }
        if failed {
            self.note(now, IncidentKind::OutOfMemory);
        }
    }

    fn note(&mut self, now: &ReplayMoment<'_>, kind: IncidentKind) {
        if self.marks.incidents.len() == MOST_INCIDENTS {
            self.marks.incidents_left_out += 1;
            return;
        }
        let time_ns = now.device.now().since(self.began).0;
        self.marks.incidents.push(Incident { event: now.index, time_ns, kind });
    }

    /// An event is over. Callers asked for `live` bytes in the blocks that they hold.
    pub(super) fn after(&mut self, now: &ReplayMoment<'_>, live: u64, levels: &Levels) {
        self.points.push(Point {
            event: now.index,
            time_ns: now.device.now().since(self.began).0,
            live_bytes: Span::of(live),
            allocated_bytes: Span::of(levels.allocated_bytes),
            reserved_bytes: Span::of(levels.reserved_bytes),
            device_used_bytes: levels.device_used_bytes.map(Span::of),
        });
    }
}

#[cfg(test)]
mod thin_tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Run(u64, u64);

    impl Join for Run {
        const MOST: usize = 8;

        fn join(&mut self, next: &Run) {
            assert_eq!(self.1 + 1, next.0, "only neighbours are joined");
            self.1 = next.1;
        }
    }

    #[test]
    fn stretches_cover_everything_once_in_equal_parts() {
        for count in [0, 1, 7, 8, 9, 1_000, 4_096] {
            let mut series = ThinnedSeries::default();
            (0..count).for_each(|item| series.push(Run(item, item)));
            let runs = series.into_stretches();
            assert!(runs.len() <= 8);
            assert_eq!(runs.iter().map(|run| run.1 - run.0 + 1).sum::<u64>(), count);
            let lengths: Vec<u64> = runs.iter().map(|run| run.1 - run.0 + 1).collect();
            if let Some((last, full)) = lengths.split_last() {
                assert!(full.iter().all(|length| length.is_power_of_two() && length >= last), "{lengths:?}");
                assert!(full.windows(2).all(|pair| pair[0] == pair[1]), "{lengths:?}");
            }
        }
    }
}

#[cfg(test)]
mod timeline_tests {
    use proptest::prelude::*;

    use super::*;

    fn point(event: u64, allocated: u64, reserved: u64) -> Point {
        Point {
            event,
            time_ns: event * 10,
            live_bytes: Span::of(allocated / 2),
            allocated_bytes: Span::of(allocated),
            reserved_bytes: Span::of(reserved),
            device_used_bytes: Some(Span::of(reserved + 7)),
        }
    }

    proptest! {
        #[test]
        fn thinning_keeps_the_extremes_of_every_stretch(
            levels in prop::collection::vec((0u64..1000, 0u64..1000), 1..400),
            most in 2usize..40,
        ) {
            let mut series = ThinnedSeries::new(most);
            for (event, &(allocated, reserved)) in levels.iter().enumerate() {
                series.push(point(event as u64, allocated, reserved));
            }
            let points = series.into_stretches();
            prop_assert!(points.len() <= most.next_multiple_of(2));
            for (place, point) in points.iter().enumerate() {
                let end = points.get(place + 1).map_or(levels.len(), |next| next.event as usize);
                let stretch = &levels[point.event as usize..end];
                prop_assert_eq!(point.allocated_bytes.min, stretch.iter().map(|level| level.0).min().unwrap());
                prop_assert_eq!(point.allocated_bytes.max, stretch.iter().map(|level| level.0).max().unwrap());
                prop_assert_eq!(point.reserved_bytes.max, stretch.iter().map(|level| level.1).max().unwrap());
                prop_assert_eq!(point.device_used_bytes.unwrap().max, point.reserved_bytes.max + 7);
                prop_assert_eq!(point.time_ns, point.event * 10);
            }
        }
    }
}
