//! The counters that every strategy keeps.

use serde::{Deserialize, Serialize};

/// Memory in use, by the four common definitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Requested bytes of blocks that are not yet reusable.
    pub requested: u64,
    /// Bytes of blocks that are not freed: `torch.cuda.memory_allocated`.
    pub allocated: u64,
    /// Allocated bytes, and bytes that are freed and wait for a stream.
    pub active: u64,
    /// Bytes taken from the device: `torch.cuda.memory_reserved`.
    pub reserved: u64,
}

impl Usage {
    /// Combines each value with that of another.
    #[must_use]
    pub(super) fn with(&self, other: &Usage, combine: impl Fn(u64, u64) -> u64) -> Usage {
        Usage {
            requested: combine(self.requested, other.requested),
            allocated: combine(self.allocated, other.allocated),
            active: combine(self.active, other.active),
            reserved: combine(self.reserved, other.reserved),
        }
    }
}

/// The counters of a strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Current values.
    pub current: Usage,
    /// The peak of each value on its own.
    pub peak: Usage,
    /// Blocks handed out and not freed.
    pub live_blocks: u64,
    /// Segments held.
    pub segments: u64,
    /// The peak of `segments`.
    pub peak_segments: u64,
    /// Allocations served.
    pub allocs: u64,
    /// Frees accepted.
    pub frees: u64,
    /// Requests before which cached memory was released.
    pub retries: u64,
    /// Failed requests, except those of an impossible size
    /// ([`Refusal::Size`](super::Refusal::Size)).
    pub ooms: u64,
    /// Memory that the device does not account for.
    pub off_books: OffBooks,
}

/// Memory that a strategy did not take through its [`Context`](super::Context): a plugin calls the
/// driver itself. One byte, because counters are copied at every event, and up to 128 bytes are
/// copied without a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffBooks {
    /// There is none.
    #[default]
    Nothing,
    /// All that it has reserved.
    AllReserved,
    /// The amount is unknown.
    Unknown,
}

const _: () = assert!(size_of::<Stats>() <= 128, "larger counters are copied by a call, at every event");

impl Stats {
    /// The counters that differ from others, each as `name: this instead of that`.
    #[must_use]
    pub fn differences(&self, others: &Stats) -> Vec<String> {
        let counters = |stats: &Stats| {
            let Usage { requested, allocated, active, reserved } = stats.current;
            let peak = stats.peak;
            [
                ("requested", requested),
                ("allocated", allocated),
                ("active", active),
                ("reserved", reserved),
                ("peak requested", peak.requested),
                ("peak allocated", peak.allocated),
                ("peak active", peak.active),
                ("peak reserved", peak.reserved),
                ("live blocks", stats.live_blocks),
                ("segments", stats.segments),
                ("peak segments", stats.peak_segments),
                ("allocs", stats.allocs),
                ("frees", stats.frees),
                ("retries", stats.retries),
                ("ooms", stats.ooms),
            ]
        };
        let pairs = counters(self).into_iter().zip(counters(others));
        pairs
            .filter(|((_, this), (_, that))| this != that)
            .map(|((name, this), (_, that))| format!("{name}: {this} instead of {that}"))
            .collect()
    }

    /// Adds the counters of another part. Peaks are those of the sums that were seen.
    pub fn add(&mut self, part: &Stats) {
        for (sum, value) in [
            (&mut self.current.requested, part.current.requested),
            (&mut self.current.allocated, part.current.allocated),
            (&mut self.current.active, part.current.active),
            (&mut self.current.reserved, part.current.reserved),
            (&mut self.live_blocks, part.live_blocks),
            (&mut self.segments, part.segments),
            (&mut self.allocs, part.allocs),
            (&mut self.frees, part.frees),
            (&mut self.retries, part.retries),
            (&mut self.ooms, part.ooms),
        ] {
            *sum += value;
        }
        keep_highest(&mut self.peak.requested, self.current.requested);
        keep_highest(&mut self.peak.allocated, self.current.allocated);
        keep_highest(&mut self.peak.active, self.current.active);
        keep_highest(&mut self.peak.reserved, self.current.reserved);
        keep_highest(&mut self.peak_segments, self.segments);
        if part.off_books != OffBooks::Nothing {
            self.off_books = part.off_books;
        }
    }

    /// A block of `size` bytes was handed out for a request of `requested`.
    #[inline]
    pub fn on_alloc(&mut self, requested: u64, size: u64) {
        self.allocs += 1;
        self.live_blocks += 1;
        self.current.requested += requested;
        self.current.allocated += size;
        self.current.active += size;
        keep_highest(&mut self.peak.requested, self.current.requested);
        keep_highest(&mut self.peak.allocated, self.current.allocated);
        keep_highest(&mut self.peak.active, self.current.active);
    }

    /// A block was freed.
    #[inline]
    pub fn on_free(&mut self, size: u64) {
        self.frees += 1;
        self.live_blocks -= 1;
        self.current.allocated -= size;
    }

    /// A freed block became reusable.
    #[inline]
    pub fn on_reusable(&mut self, requested: u64, size: u64) {
        self.current.requested -= requested;
        self.current.active -= size;
    }

    /// Memory was taken from the device, as `segments` new segments.
    #[inline]
    pub fn on_reserve(&mut self, bytes: u64, segments: u64) {
        self.current.reserved += bytes;
        self.segments += segments;
        keep_highest(&mut self.peak.reserved, self.current.reserved);
        keep_highest(&mut self.peak_segments, self.segments);
    }

    /// Memory was released to the device.
    #[inline]
    pub fn on_release(&mut self, bytes: u64, segments: u64) {
        self.current.reserved -= bytes;
        self.segments -= segments;
    }
}

/// Raises a peak. A branch instead of a maximum: new peaks are rare, and without one nothing is
/// written.
#[inline]
pub(super) fn keep_highest(peak: &mut u64, value: u64) {
    if value > *peak {
        *peak = value;
    }
}
