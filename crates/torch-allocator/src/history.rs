//! What is seen of the allocator while the program runs: counters as PyTorch has them, a history of
//! events, and the Python stacks of requests.
//!
//! `python/oomph/allocator_stats.py` makes PyTorch's statistics and snapshots of it.

use std::{
    collections::{HashMap, VecDeque},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::comparison::Comparison;
use oomph_alloc::strategy::{BlockState, EventSink, Freed, Layout, Stats, StrategyEvent};
use oomph_base::{Address, StreamId};

/// How many values [`Watch::values`] has.
pub(crate) const VALUES: usize = 4 * METRICS + 4;
/// Bytes allocated, active, requested and reserved; blocks allocated and active; segments.
const METRICS: usize = 7;

/// A call stack, by its number in [`StackTable`]; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StackId(u32);

/// What is kept about one GPU. It receives the events of its strategy.
pub(crate) struct Watch {
    /// Who makes the present request.
    pub(crate) caller: StackId,
    /// The same requests under PyTorch's allocator.
    pub(crate) comparison: Comparison,
    counters: Counters,
    history: Option<History>,
    /// The events of the present call, while a history is kept.
    events: Vec<StrategyEvent>,
}

/// Which history is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HistorySettings {
    /// Whether events are kept, and not only the stacks of live blocks.
    pub(crate) events: bool,
    /// How many events are kept: the newest.
    pub(crate) most: usize,
}

/// What [`Stats`] does not count, and what can be reset.
#[derive(Debug, Default)]
struct Counters {
    /// Ever handed out, by metric.
    given: [u64; METRICS],
    /// Freed blocks that wait for a stream.
    pending: u64,
    /// Driver calls that took memory, and that released it.
    device_calls: [u64; 2],
    /// After the last call.
    current: [u64; METRICS],
    /// Highest values after a call since the peaks were reset.
    peaks: [u64; METRICS],
    /// The strategy's own peaks when they were reset. A higher one is newer, and is exact.
    peaks_at_reset: [u64; METRICS],
    /// What `totals` returned when the totals were reset.
    totals_at_reset: Totals,
}

/// What PyTorch calls accumulated: by metric, and the four numbers of calls.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    given: [u64; METRICS],
    taken: [u64; METRICS],
    numbers: [u64; 4],
}

impl Counters {
    fn current(&self, stats: &Stats) -> [u64; METRICS] {
        let now = stats.current;
        let active_blocks = stats.live_blocks + self.pending;
        [now.allocated, now.active, now.requested, now.reserved, stats.live_blocks, active_blocks, stats.segments]
    }

    /// After a call that served a request of this size with a block of that size, or another call.
    fn update(&mut self, stats: &Stats, served: Option<(u64, u64)>) {
        let current = self.current(stats);
        if let Some((requested, size)) = served {
            for (given, amount) in self.given.iter_mut().zip([size, size, requested, 0, 1, 1, 0]) {
                *given += amount;
            }
        }
        for metric in [3, 6] {
            self.given[metric] += current[metric].saturating_sub(self.current[metric]);
        }
        for (peak, &value) in self.peaks.iter_mut().zip(&current) {
            *peak = value.max(*peak);
        }
        self.current = current;
    }

    fn peaks(&self, stats: &Stats) -> [u64; METRICS] {
        let mut peaks = self.peaks;
        for ((peak, own), at_reset) in peaks.iter_mut().zip(own_peaks(stats)).zip(self.peaks_at_reset) {
            *peak = if own > at_reset { own } else { *peak };
        }
        peaks
    }

    fn totals(&self, stats: &Stats) -> Totals {
        let current = self.current(stats);
        let mut taken = self.given;
        for (taken, current) in taken.iter_mut().zip(current) {
            *taken = taken.saturating_sub(current);
        }
        let [maps, unmaps] = self.device_calls;
        Totals { given: self.given, taken, numbers: [stats.retries, stats.ooms, maps, unmaps] }
    }
}

/// The peaks that a strategy knows; it does not count the peak of blocks.
fn own_peaks(stats: &Stats) -> [u64; METRICS] {
    let peak = stats.peak;
    [peak.allocated, peak.active, peak.requested, peak.reserved, 0, 0, stats.peak_segments]
}

impl Watch {
    pub(crate) fn new(comparison: Comparison, history: Option<HistorySettings>) -> Watch {
        Watch {
            caller: StackId::default(),
            comparison,
            counters: Counters::default(),
            history: history.map(History::new),
            events: Vec::new(),
        }
    }

    /// A request was served with a block of `size` bytes.
    #[inline]
    pub(crate) fn served(&mut self, stats: &Stats, address: Address, size: u64, bytes: u64, stream: StreamId) {
        self.counters.update(stats, Some((bytes, size)));
        self.comparison.alloc(address, bytes, stream);
        if let Some(history) = &mut self.history {
            history.served(&mut self.events, address, bytes, stream, self.caller);
        }
    }

    /// A request failed. `free` is what the device has left, where the strategy did not ask.
    pub(crate) fn failed(&mut self, stats: &Stats, free: u64) {
        self.counters.update(stats, None);
        if let Some(history) = &mut self.history {
            history.free = free;
            history.take(&mut self.events, self.caller);
        }
    }

    /// A block of a request for `bytes` was freed.
    #[inline]
    pub(crate) fn freed(&mut self, stats: &Stats, address: Address, bytes: u64, stream: StreamId, freed: Freed) {
        self.counters.pending += u64::from(freed == Freed::Later);
        self.counters.update(stats, None);
        self.comparison.free(address);
        if let Some(history) = &mut self.history {
            history.freed(&mut self.events, address, bytes, stream, freed);
        }
    }

    /// Any other call has ended.
    pub(crate) fn called(&mut self, stats: &Stats) {
        self.counters.update(stats, None);
        if let Some(history) = &mut self.history {
            history.take(&mut self.events, StackId::default());
        }
    }

    /// For each metric the current value, its peak, and the sums of what was handed out and taken
    /// back. Then retries, failed requests, and driver calls that took and that released memory.
    pub(crate) fn values(&self, stats: &Stats) -> [u64; VALUES] {
        let counters = &self.counters;
        let (current, peaks) = (counters.current(stats), counters.peaks(stats));
        let (now, then) = (counters.totals(stats), counters.totals_at_reset);
        let mut values = [0; VALUES];
        for metric in 0..METRICS {
            values[4 * metric] = current[metric];
            values[4 * metric + 1] = peaks[metric];
            values[4 * metric + 2] = now.given[metric].saturating_sub(then.given[metric]);
            values[4 * metric + 3] = now.taken[metric].saturating_sub(then.taken[metric]);
        }
        for (place, number) in now.numbers.into_iter().enumerate() {
            values[4 * METRICS + place] = number.saturating_sub(then.numbers[place]);
        }
        values
    }

    /// From now on, peaks are those since now.
    pub(crate) fn reset_peaks(&mut self, stats: &Stats) {
        self.counters.peaks = self.counters.current(stats);
        self.counters.peaks_at_reset = own_peaks(stats);
    }

    /// From now on, sums are those since now.
    pub(crate) fn reset_totals(&mut self, stats: &Stats) {
        self.counters.totals_at_reset = self.counters.totals(stats);
    }

    /// Begins a history, changes the one that is kept, or ends it.
    pub(crate) fn record(&mut self, settings: Option<HistorySettings>, clear: bool) {
        match (settings, &mut self.history) {
            (Some(settings), Some(history)) => history.change(settings, clear),
            (Some(settings), None) => self.history = Some(History::new(settings)),
            // What was recorded stays until the next recording, as in PyTorch.
            (None, Some(history)) => history.is_on = false,
            (None, None) => {}
        }
    }

    /// Everything that is known of this GPU.
    pub(crate) fn snapshot(&self, device: i32, streams: &[u64], layout: Option<&Layout>, events: bool) -> GpuSnapshot {
        let handle = |stream: StreamId| streams.get(stream.index()).copied().unwrap_or(0);
        let history = self.history.as_ref();
        let entries = history.filter(|_| events).map(|history| history.entries.iter());
        let entries = entries
            .into_iter()
            .flatten()
            .map(|entry| (entry.action, entry.address, entry.size, handle(entry.stream), entry.time_us, entry.stack.0));
        let segments = layout.into_iter().flat_map(|layout| &layout.segments);
        let owner = |address: &Address| history.and_then(|history| history.owners.get(&address.0));
        let segments = segments.map(|segment| SnapshotSegment {
            address: segment.address.0,
            total_size: segment.bytes,
            stream: handle(segment.stream),
            is_small: segment.pool == "small",
            pool_id: segment.pool_id,
            is_expandable: segment.mapped,
            blocks: segment
                .blocks
                .iter()
                .map(|block| {
                    let state = match block.state {
                        BlockState::Allocated => "active_allocated",
                        BlockState::Pending => "active_pending_free",
                        // A block of another segment stands for lent memory.
                        BlockState::Free | BlockState::Lent => "inactive",
                    };
                    let stack = owner(&block.address).copied().unwrap_or_default();
                    (block.address.0, block.size, block.requested, state, stack.0)
                })
                .collect(),
        });
        GpuSnapshot {
            device,
            segments: segments.collect(),
            entries: entries.collect(),
            dropped: history.map_or(0, |history| history.dropped),
        }
    }
}

impl EventSink for Watch {
    fn event(&mut self, event: StrategyEvent) {
        match event {
            StrategyEvent::SegmentAlloc { .. } | StrategyEvent::SegmentMap { .. } => self.counters.device_calls[0] += 1,
            StrategyEvent::SegmentFree { .. } | StrategyEvent::SegmentUnmap { .. } => {
                self.counters.device_calls[1] += 1;
            }
            StrategyEvent::FreeCompleted { .. } => {
                self.counters.pending = self.counters.pending.saturating_sub(1);
            }
            StrategyEvent::Retry { .. } | StrategyEvent::OutOfMemory { .. } => {}
        }
        if self.history.is_some() {
            self.events.push(event);
        }
    }
}

/// The newest events of one GPU.
#[derive(Debug)]
struct History {
    is_on: bool,
    settings: HistorySettings,
    entries: VecDeque<HistoryEntry>,
    /// Events that were replaced by newer ones.
    dropped: u64,
    /// Who requested each block that is not reusable yet.
    owners: HashMap<u64, StackId>,
    /// Free memory when a request failed.
    free: u64,
}

#[derive(Clone, Copy, Debug)]
struct HistoryEntry {
    action: &'static str,
    address: u64,
    size: u64,
    time_us: u64,
    stream: StreamId,
    stack: StackId,
}

impl History {
    fn new(settings: HistorySettings) -> History {
        let entries = VecDeque::new();
        History { is_on: true, settings, entries, dropped: 0, owners: HashMap::new(), free: 0 }
    }

    fn change(&mut self, settings: HistorySettings, clear: bool) {
        self.is_on = true;
        self.settings = settings;
        if clear {
            self.entries.clear();
            self.dropped = 0;
        }
        self.shorten();
    }

    fn served(
        &mut self,
        events: &mut Vec<StrategyEvent>,
        address: Address,
        bytes: u64,
        stream: StreamId,
        stack: StackId,
    ) {
        self.take(events, stack);
        if self.is_on {
            self.owners.insert(address.0, stack);
            self.push("alloc", address.0, bytes, stream, stack);
        }
    }

    fn freed(&mut self, events: &mut Vec<StrategyEvent>, address: Address, bytes: u64, stream: StreamId, freed: Freed) {
        let stack = self.owners.get(&address.0).copied().unwrap_or_default();
        self.push("free_requested", address.0, bytes, stream, stack);
        if freed == Freed::Now {
            self.owners.remove(&address.0);
            self.push("free_completed", address.0, bytes, stream, stack);
        }
        self.take(events, StackId::default());
    }

    /// Keeps the events of a call that has ended. Its caller is `stack`.
    fn take(&mut self, events: &mut Vec<StrategyEvent>, stack: StackId) {
        for event in events.drain(..) {
            match event {
                StrategyEvent::SegmentAlloc { address, bytes, stream } => {
                    self.push("segment_alloc", address.0, bytes, stream, stack);
                }
                StrategyEvent::SegmentFree { address, bytes, stream } => {
                    self.push("segment_free", address.0, bytes, stream, stack);
                }
                StrategyEvent::SegmentMap { address, bytes, stream } => {
                    self.push("segment_map", address.0, bytes, stream, stack);
                }
                StrategyEvent::SegmentUnmap { address, bytes, stream } => {
                    self.push("segment_unmap", address.0, bytes, stream, stack);
                }
                StrategyEvent::FreeCompleted { address, requested, stream } => {
                    let owner = self.owners.remove(&address.0).unwrap_or_default();
                    self.push("free_completed", address.0, requested, stream, owner);
                }
                StrategyEvent::OutOfMemory { rounded, stream, device_free } => {
                    // PyTorch has the free memory in the place of the address.
                    self.push("oom", device_free.unwrap_or(self.free), rounded, stream, stack);
                }
                StrategyEvent::Retry { .. } => {}
            }
        }
    }

    fn push(&mut self, action: &'static str, address: u64, size: u64, stream: StreamId, stack: StackId) {
        if !self.is_on || !self.settings.events {
            return;
        }
        let time_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        self.entries.push_back(HistoryEntry { action, address, size, time_us, stream, stack });
        self.shorten();
    }

    fn shorten(&mut self) {
        while self.entries.len() > self.settings.most {
            self.entries.pop_front();
            self.dropped += 1;
        }
    }
}

/// One GPU in a snapshot.
#[derive(Debug, Serialize)]
pub(crate) struct GpuSnapshot {
    device: i32,
    segments: Vec<SnapshotSegment>,
    /// Action, address, size, stream, microseconds since 1970, stack.
    entries: Vec<(&'static str, u64, u64, u64, u64, u32)>,
    dropped: u64,
}

#[derive(Debug, Serialize)]
struct SnapshotSegment {
    address: u64,
    total_size: u64,
    stream: u64,
    is_small: bool,
    pool_id: (u64, u64),
    is_expandable: bool,
    /// Address, size, requested size, state, stack.
    blocks: Vec<(u64, u64, u64, &'static str, u32)>,
}

/// Python stacks, each kept once.
#[derive(Debug, Default)]
pub(crate) struct StackTable {
    frames: HashMap<FrameKey, u32>,
    stacks: HashMap<Vec<u32>, u32>,
    texts: StackTexts,
}

/// The stacks as lists of frames, and the frames as file, line and function. Stack 0 is empty.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct StackTexts {
    stacks: Vec<Vec<u32>>,
    frames: Vec<(String, i32, String)>,
    /// Requests of threads without Python code, such as those of autograd.
    without_stack: u64,
}

/// A code object, and a place in it. The table owns a reference to the object, so that no other
/// gets its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameKey {
    code: usize,
    place: i32,
}

impl StackTable {
    /// The number of a stack. `describe` is called for each frame that is new.
    fn intern(&mut self, keys: &[FrameKey], mut describe: impl FnMut(FrameKey) -> (String, i32, String)) -> StackId {
        if keys.is_empty() {
            return self.none();
        }
        let frames: Vec<u32> = keys
            .iter()
            .map(|&key| {
                *self.frames.entry(key).or_insert_with(|| {
                    self.texts.frames.push(describe(key));
                    self.texts.frames.len() as u32 - 1
                })
            })
            .collect();
        if let Some(&stack) = self.stacks.get(&frames[..]) {
            return StackId(stack);
        }
        if self.texts.stacks.is_empty() {
            self.texts.stacks.push(Vec::new());
        }
        let stack = self.texts.stacks.len() as u32;
        self.texts.stacks.push(frames.clone());
        self.stacks.insert(frames, stack);
        StackId(stack)
    }

    /// Counts a request without a stack.
    fn none(&mut self) -> StackId {
        self.texts.without_stack += 1;
        StackId::default()
    }

    /// The stacks so far.
    pub(crate) fn texts(&self) -> StackTexts {
        self.texts.clone()
    }
}

pub(crate) use python::capture;

mod python {
    //! The Python stack of the calling thread.
    //!
    //! PyTorch's functions release the interpreter's lock (GIL) before they allocate, so the lock is
    //! taken here, as PyTorch's own recorder does. A caller must hold no lock of this library: the
    //! thread that has the GIL may wait for it. A thread that Python does not know has no Python
    //! frames, and does not wait.
    #![expect(unsafe_code, reason = "Python's functions are found and called by name")]

    use std::{
        ffi::{CStr, c_char, c_int, c_void},
        ptr, slice,
        sync::{Mutex, OnceLock},
    };

    use super::{FrameKey, StackId, StackTable};
    use crate::lock;

    type Object = *mut c_void;

    /// The functions of the interpreter in this process. They are found by name: the library is also
    /// loaded by programs without Python.
    struct Interpreter {
        is_initialized: unsafe extern "C" fn() -> c_int,
        is_finalizing: unsafe extern "C" fn() -> c_int,
        this_thread: unsafe extern "C" fn() -> Object,
        ensure: unsafe extern "C" fn() -> c_int,
        release: unsafe extern "C" fn(c_int),
        frame: unsafe extern "C" fn() -> Object,
        back: unsafe extern "C" fn(Object) -> Object,
        code: unsafe extern "C" fn(Object) -> Object,
        line: unsafe extern "C" fn(Object) -> c_int,
        /// Since Python 3.11.
        last_instruction: Option<unsafe extern "C" fn(Object) -> c_int>,
        line_of: unsafe extern "C" fn(Object, c_int) -> c_int,
        attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
        utf8: unsafe extern "C" fn(Object, *mut isize) -> *const c_char,
        clear_error: unsafe extern "C" fn(),
        retain: unsafe extern "C" fn(Object),
        drop: unsafe extern "C" fn(Object),
    }

    /// The function of this name; `F` must be its type.
    unsafe fn find<F: Copy>(name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the name ends with a zero.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        // SAFETY: a function pointer has the size of an address; its type is the caller's promise.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }

    impl Interpreter {
        fn loaded() -> Option<&'static Interpreter> {
            static FOUND: OnceLock<Option<Interpreter>> = OnceLock::new();
            FOUND.get_or_init(Interpreter::find).as_ref()
        }

        fn find() -> Option<Interpreter> {
            // SAFETY: these are the types in Python's headers, from 3.9 on.
            unsafe {
                Some(Interpreter {
                    is_initialized: find(c"Py_IsInitialized")?,
                    is_finalizing: find(c"Py_IsFinalizing").or_else(|| find(c"_Py_IsFinalizing"))?,
                    this_thread: find(c"PyGILState_GetThisThreadState")?,
                    ensure: find(c"PyGILState_Ensure")?,
                    release: find(c"PyGILState_Release")?,
                    frame: find(c"PyEval_GetFrame")?,
                    back: find(c"PyFrame_GetBack")?,
                    code: find(c"PyFrame_GetCode")?,
                    line: find(c"PyFrame_GetLineNumber")?,
                    last_instruction: find(c"PyFrame_GetLasti"),
                    line_of: find(c"PyCode_Addr2Line")?,
                    attribute: find(c"PyObject_GetAttrString")?,
                    utf8: find(c"PyUnicode_AsUTF8AndSize")?,
                    clear_error: find(c"PyErr_Clear")?,
                    retain: find(c"Py_IncRef")?,
                    drop: find(c"Py_DecRef")?,
                })
            }
        }

        /// The frames of this thread, innermost first. Each key owns a reference to its code object.
        ///
        /// # Safety
        /// This thread has the GIL.
        unsafe fn frames(&self) -> Vec<FrameKey> {
            let mut frames = Vec::with_capacity(64);
            // SAFETY: the frame is borrowed from the thread, so it is retained; those that `back`
            // returns are owned, and each is dropped after its use.
            unsafe {
                let mut frame = (self.frame)();
                if !frame.is_null() {
                    (self.retain)(frame);
                }
                while !frame.is_null() {
                    let place = self.last_instruction.map_or_else(|| (self.line)(frame), |last| last(frame));
                    frames.push(FrameKey { code: (self.code)(frame).expose_provenance(), place });
                    let back = (self.back)(frame);
                    (self.drop)(frame);
                    frame = back;
                }
            }
            frames
        }

        /// File, line and function of a frame.
        ///
        /// # Safety
        /// This thread has the GIL, and the code object exists.
        unsafe fn describe(&self, key: FrameKey) -> (String, i32, String) {
            let code: Object = ptr::with_exposed_provenance_mut(key.code);
            // SAFETY: as for this function.
            unsafe {
                let line = if self.last_instruction.is_some() { (self.line_of)(code, key.place) } else { key.place };
                (self.text(code, c"co_filename"), line, self.text(code, c"co_name"))
            }
        }

        /// An attribute that is a text; empty if it cannot be had.
        ///
        /// # Safety
        /// This thread has the GIL, and the object exists.
        unsafe fn text(&self, object: Object, name: &CStr) -> String {
            // SAFETY: the attribute is owned until it is dropped, and its text lives as long.
            unsafe {
                let value = (self.attribute)(object, name.as_ptr());
                let mut length = 0;
                let start = if value.is_null() { ptr::null() } else { (self.utf8)(value, &raw mut length) };
                let text = if start.is_null() {
                    (self.clear_error)();
                    String::new()
                } else {
                    String::from_utf8_lossy(slice::from_raw_parts(start.cast(), length.unsigned_abs())).into_owned()
                };
                if !value.is_null() {
                    (self.drop)(value);
                }
                text
            }
        }
    }

    /// The Python stack of this thread; none where it runs no Python code. No lock may be held.
    pub(crate) fn capture(table: &Mutex<StackTable>) -> StackId {
        let Some(python) = Interpreter::loaded() else { return StackId::default() };
        // SAFETY: these may be called at any time, by any thread.
        let is_usable = unsafe {
            (python.is_initialized)() != 0 && (python.is_finalizing)() == 0 && !(python.this_thread)().is_null()
        };
        if !is_usable {
            return lock(table).none();
        }
        // SAFETY: the thread is known to Python, which runs; the GIL is released below. The walk calls
        // no code that unwinds.
        unsafe {
            let state = (python.ensure)();
            // The table is locked after the walk, which may run the garbage collector, and that may
            // run Python code that allocates.
            let frames = python.frames();
            let mut table = lock(table);
            let known = table.frames.len();
            let mut is_new = Vec::new();
            let stack = table.intern(&frames, |key| {
                is_new.push(key);
                python.describe(key)
            });
            debug_assert_eq!(table.frames.len(), known + is_new.len());
            drop(table);
            for key in frames {
                // The table keeps one reference for each new key.
                match is_new.iter().position(|&new| new == key) {
                    Some(place) => {
                        is_new.swap_remove(place);
                    }
                    None => (python.drop)(ptr::with_exposed_provenance_mut(key.code)),
                }
            }
            (python.release)(state);
            stack
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_kept_once() {
        let mut table = StackTable::default();
        let key = |code, place| FrameKey { code, place };
        let mut described = 0;
        let mut intern = |keys: &[FrameKey]| {
            table.intern(keys, |key| {
                described += 1;
                (format!("file{}", key.code), key.place, "f".to_owned())
            })
        };
        let stacks = [
            intern(&[key(1, 4), key(2, 8)]),
            intern(&[key(1, 6), key(2, 8)]),
            intern(&[key(1, 4), key(2, 8)]),
            intern(&[]),
        ];
        assert_eq!(stacks.map(|stack| stack.0), [1, 2, 1, 0]);
        assert_eq!(described, 3);
        let texts = table.texts();
        assert_eq!(texts.stacks, [vec![], vec![0, 1], vec![2, 1]]);
        assert_eq!((texts.frames[2].0.as_str(), texts.frames[2].1, texts.without_stack), ("file1", 6, 1));
    }
}
