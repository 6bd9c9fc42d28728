//! The counters that every strategy keeps.

use serde::{Deserialize, Serialize};

/// Bytes and blocks, in the four senses that people mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// What callers asked for, in blocks not yet reusable.
    pub requested: u64,
    /// Blocks handed out and not freed: `torch.cuda.memory_allocated`.
    pub allocated: u64,
    /// Allocated, or freed and still waiting for a stream.
    pub active: u64,
    /// Taken from the device: `torch.cuda.memory_reserved`.
    pub reserved: u64,
}

/// The books of a strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Now.
    pub current: Usage,
    /// At most so far, each on its own.
    pub peak: Usage,
    /// Blocks handed out and not freed.
    pub live_blocks: u64,
    /// Separate pieces of memory taken from the device.
    pub segments: u64,
    /// At most so far.
    pub peak_segments: u64,
    /// Allocations served.
    pub allocs: u64,
    /// Frees taken.
    pub frees: u64,
    /// Requests that needed cached memory to be given back first.
    pub retries: u64,
    /// Requests that failed, those of an impossible size ([`Refusal::Size`](super::Refusal::Size)) left out.
    pub ooms: u64,
    /// Memory that it holds and the device's books do not have.
    pub off_books: OffBooks,
}

/// Memory that a strategy has from somebody else than the device that it is called with: a plugin calls the driver itself.
/// One byte, because books are copied at every event, and with 128 bytes no call is needed for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffBooks {
    /// There is none.
    #[default]
    Nothing,
    /// All that it has reserved.
    AllReserved,
    /// Nobody can tell how much.
    Unknown,
}

const _: () = assert!(size_of::<Stats>() <= 128, "larger books are copied by a call, at every event");

impl Stats {
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

    /// The caller gave a block back.
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

    /// Memory was taken from the device. `segments` is how many separate pieces it adds.
    #[inline]
    pub fn on_reserve(&mut self, bytes: u64, segments: u64) {
        self.current.reserved += bytes;
        self.segments += segments;
        keep_highest(&mut self.peak.reserved, self.current.reserved);
        keep_highest(&mut self.peak_segments, self.segments);
    }

    /// Memory went back to the device.
    #[inline]
    pub fn on_release(&mut self, bytes: u64, segments: u64) {
        self.current.reserved -= bytes;
        self.segments -= segments;
    }
}

/// Raises a peak to a value above it. A branch rather than a maximum: new peaks are rare, and then nothing is written.
#[inline]
pub(super) fn keep_highest(peak: &mut u64, value: u64) {
    if value > *peak {
        *peak = value;
    }
}
