//! Memory levels at one moment, and the highest levels of a run, per step and per phase.

use serde::{Deserialize, Serialize};

use super::{
    digits::six_digits,
    timeline::{Join, ThinnedSeries},
};
use crate::{
    base::{FileText, StreamId},
    device::Device,
    replay::ReplayMoment,
    strategy::{OffBooks, Stats, Usage},
    trace::{LabelId, MarkKind},
};

/// How much memory is in use, in the five senses that people mean; see [`measure`](super).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Levels {
    /// What callers asked for, in blocks not yet reusable.
    pub requested_bytes: u64,
    /// Blocks in callers' hands.
    pub allocated_bytes: u64,
    /// These, and blocks that wait for a stream.
    pub active_bytes: u64,
    /// Taken from the device.
    pub reserved_bytes: u64,
    /// What `nvidia-smi` would show. Unknown for a plugin on a simulated device that does not report it.
    #[serde(default)]
    pub device_used_bytes: Option<u64>,
}

impl Levels {
    /// The books of a strategy and of its device.
    #[must_use]
    pub fn new(stats: &Stats, device: &dyn Device) -> Levels {
        let usage = &stats.current;
        let used = device.overhead_bytes().saturating_add(device.held_bytes());
        Levels {
            requested_bytes: usage.requested,
            allocated_bytes: usage.allocated,
            active_bytes: usage.active,
            reserved_bytes: usage.reserved,
            device_used_bytes: match stats.off_books {
                OffBooks::Nothing => Some(used),
                OffBooks::AllReserved => Some(used.saturating_add(usage.reserved)),
                OffBooks::Unknown => None,
            },
        }
    }

    /// Each level's maximum on its own.
    pub fn raise(&mut self, other: &Levels) {
        self.requested_bytes = self.requested_bytes.max(other.requested_bytes);
        self.allocated_bytes = self.allocated_bytes.max(other.allocated_bytes);
        self.active_bytes = self.active_bytes.max(other.active_bytes);
        self.reserved_bytes = self.reserved_bytes.max(other.reserved_bytes);
        self.device_used_bytes = self.device_used_bytes.max(other.device_used_bytes);
    }
}

/// `1 - useful / whole`: the share of `whole` that is lost, with six digits. Nothing is lost of nothing: `None`.
///
/// ```
/// use oomph::measure::lost_share;
/// assert_eq!(lost_share(3, 4), Some(0.25));
/// assert_eq!(lost_share(0, 0), None);
/// ```
#[must_use]
pub fn lost_share(useful: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| six_digits(1.0 - useful as f64 / whole as f64))
}

/// The highest levels of one step, or of several in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPeak {
    /// The step's number.
    pub first_step: u32,
    /// The same, unless a long run made it necessary to join steps.
    pub last_step: u32,
    /// Number of the event that marks its beginning.
    pub event: u64,
    /// Each level's maximum.
    pub peak: Levels,
    /// The lowest value of `allocated`: what the step keeps.
    pub lowest_allocated_bytes: u64,
}

impl Join for StepPeak {
    const MOST: usize = 4096;

    fn join(&mut self, next: &StepPeak) {
        self.last_step = next.last_step;
        self.peak.raise(&next.peak);
        self.lowest_allocated_bytes = self.lowest_allocated_bytes.min(next.lowest_allocated_bytes);
    }
}

/// The highest levels of all phases of one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhasePeak {
    /// The phase's name.
    pub phase: FileText,
    /// How often it began.
    pub times: u64,
    /// Each level's maximum.
    pub peak: Levels,
}

/// How memory stood when `allocated` was highest for the first time.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocatedPeak {
    /// Number of the event that brought it there.
    pub(super) event: u64,
    /// What callers had asked for in the blocks that they held.
    pub(super) requested: u64,
    /// The books then.
    pub(super) usage: Usage,
    /// On which stream the last request came.
    pub(super) stream: StreamId,
    /// The largest cached piece for that stream, once it was asked for.
    pub(super) largest_free: Option<u64>,
}

/// Keeps the highest levels.
///
/// Levels are read after every event. A level that rises and falls within one event is seen where it is the
/// highest so far, because strategies keep such peaks in their own books; `device_used` has no such books.
#[derive(Debug, Default)]
pub(super) struct PeakRecorder {
    pub(super) device_used: Option<u64>,
    pub(super) allocated: Option<AllocatedPeak>,
    /// The allocated peak is new and its memory not yet looked at.
    unread: bool,
    /// The event of the reserved peak, and the books then.
    pub(super) reserved: Option<(u64, Usage)>,
    /// The strategy's own peaks, as last seen.
    books: Usage,
    steps: ThinnedSeries<StepPeak>,
    phases: Vec<(LabelId, PhasePeak)>,
    phase: Option<usize>,
}

impl PeakRecorder {
    /// The peaks by step, and by phase in order of first appearance.
    pub(super) fn into_parts(self) -> (Vec<StepPeak>, Vec<PhasePeak>) {
        (self.steps.into_stretches(), self.phases.into_iter().map(|(_, peak)| peak).collect())
    }

    /// The allocated peak, if it is new since the last call.
    #[inline]
    pub(super) fn take_unread(&mut self) -> Option<&mut AllocatedPeak> {
        if std::mem::take(&mut self.unread) { self.allocated.as_mut() } else { None }
    }

    /// A step or a phase begins.
    pub(super) fn begin(&mut self, now: &ReplayMoment<'_>, kind: MarkKind, label: LabelId, index: u32) {
        let peak = Levels::new(&now.strategy.stats(), now.device);
        match kind {
            MarkKind::Step => self.steps.push(StepPeak {
                first_step: index,
                last_step: index,
                event: now.index,
                peak,
                lowest_allocated_bytes: peak.allocated_bytes,
            }),
            MarkKind::Phase => {
                let known = self.phases.iter().position(|(known, _)| *known == label);
                let place = known.unwrap_or_else(|| {
                    let phase = now.tables.labels().get(label as usize).cloned().unwrap_or_default();
                    self.phases.push((label, PhasePeak { phase, times: 0, peak }));
                    self.phases.len() - 1
                });
                self.phases[place].1.times += 1;
                self.phase = Some(place);
            }
            MarkKind::MicroBatch => {}
        }
    }

    /// A request was served. Callers asked for `requested` bytes in the blocks that they hold.
    pub(super) fn served(&mut self, now: &ReplayMoment<'_>, stream: StreamId, requested: u64) {
        let usage = now.strategy.stats().current;
        if self.allocated.is_none_or(|peak| usage.allocated > peak.usage.allocated) {
            self.unread = true;
            self.allocated = Some(AllocatedPeak { event: now.index, requested, usage, stream, largest_free: None });
        }
    }

    /// An event is over, and memory stands at these levels.
    pub(super) fn after(&mut self, event: u64, stats: &Stats, mut levels: Levels) {
        if stats.peak.reserved > self.books.reserved {
            levels.reserved_bytes = stats.peak.reserved;
            self.reserved = Some((event, Usage { reserved: stats.peak.reserved, ..stats.current }));
        }
        if stats.peak.active > self.books.active {
            levels.active_bytes = stats.peak.active;
        }
        self.books = stats.peak;
        self.device_used = self.device_used.max(levels.device_used_bytes);
        if let Some(step) = self.steps.last_mut() {
            step.peak.raise(&levels);
            step.lowest_allocated_bytes = step.lowest_allocated_bytes.min(levels.allocated_bytes);
        }
        if let Some(phase) = self.phase {
            self.phases[phase].1.peak.raise(&levels);
        }
    }
}
