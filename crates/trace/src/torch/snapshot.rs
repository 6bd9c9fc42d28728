//! The model of a PyTorch memory snapshot: what `torch.cuda.memory._snapshot()` returns, with its call stacks.
//!
//! `parse` reads it, `write` writes it, `recording` makes a trace of it. It knows neither pickles nor traces.

use std::{
    fmt::{self, Write as _},
    sync::Arc,
};

use serde::Serialize;

use crate::interner::Interner;
use oomph_base::{Address, FileText, StreamId};
use oomph_pytorch::RecordedSettings;

use super::RecordedRelease;

/// A memory snapshot.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The memory at the end, of all devices, in the order of the file.
    pub segments: Vec<Segment>,
    /// The entries of each device, oldest first.
    pub traces: Vec<Vec<TraceEntry>>,
    /// The settings of the allocator that are in the file.
    pub settings: RecordedSettings,
    /// Annotations of the program.
    pub annotations: Vec<Annotation>,
    /// Call stacks of entries, segments and blocks.
    pub stacks: Stacks,
    /// Stream handles, by number; the first is the default stream.
    pub streams: Vec<u64>,
    /// Private pools of entries, by number.
    pub pools: Vec<(u64, u64)>,
    /// Notes of entries, by number; the first is empty.
    pub notes: Vec<EntryNote>,
    /// Page-locked memory of the host.
    pub host: HostMemory,
    /// The release of PyTorch that wrote it.
    pub release: RecordedRelease,
    /// Where the settings come from.
    pub settings_from: SettingsOrigin,
    /// What the file does not contain, one sentence each.
    pub missing: Vec<String>,
    /// What its release does not write yet, one sentence each.
    pub not_yet: Vec<String>,
}

/// Where the settings of a recording come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SettingsOrigin {
    /// The file.
    #[default]
    File,
    /// The user.
    Given,
    /// Nothing names them: PyTorch's defaults are assumed.
    Unknown,
}

/// One recorded action of the allocator. 40 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceEntry {
    /// The address; for [`Action::OutOfMemory`] see [`device_free`](TraceEntry::device_free).
    pub address: Address,
    /// Bytes: of the request for allocations and frees, of the rounded request for out of memory, of the segment for segments.
    pub size: u64,
    /// Microseconds since 1970; 0 where the file has no times.
    pub time_us: u64,
    /// The call stack.
    pub stack: StackId,
    /// Compile region and user metadata, a number in [`Snapshot::notes`].
    pub note: u32,
    /// The private pool, a number in [`Snapshot::pools`]; older files do not have it.
    pub pool: Option<u16>,
    /// On which stream.
    pub stream: StreamId,
    /// What happened.
    pub action: Action,
}

impl TraceEntry {
    /// The pool of the entry, from the pools of its snapshot by number.
    pub(crate) fn pool_in(&self, pools: &[(u64, u64)]) -> Option<(u64, u64)> {
        self.pool.and_then(|pool| pools.get(pool as usize).copied())
    }

    /// The free memory that the driver reported when memory ran out.
    #[must_use]
    pub fn device_free(&self) -> Option<u64> {
        (self.action == Action::OutOfMemory).then_some(self.address.0)
    }
}

/// An action of the allocator (`TraceEntry::Action` in PyTorch).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A block was allocated.
    Alloc,
    /// The program freed a block.
    FreeRequested,
    /// A freed block became reusable.
    FreeCompleted,
    /// A segment was allocated from the driver.
    SegmentAlloc,
    /// A segment is returned to the driver.
    SegmentFree,
    /// Memory was mapped into an expandable segment.
    SegmentMap,
    /// Memory was unmapped from an expandable segment.
    SegmentUnmap,
    /// A request failed.
    OutOfMemory,
    /// A snapshot was taken; the size is that of all active blocks.
    Snapshot,
    /// An annotation.
    Annotate,
    /// An action of a later PyTorch.
    #[default]
    Unknown,
}

impl Action {
    /// Whether memory goes back to the device.
    #[must_use]
    pub fn is_release(self) -> bool {
        matches!(self, Action::SegmentFree | Action::SegmentUnmap)
    }
}

/// The texts of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryNote {
    /// The region of compiled code; `N/A` elsewhere.
    pub compile_context: Arc<str>,
    /// The metadata that the user set.
    pub user_metadata: Arc<str>,
    /// The metadata that the allocator set.
    pub internal_metadata: Arc<str>,
}

/// Memory from the driver: one `cudaMalloc`, or one contiguous mapped range of an expandable segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device.
    pub device: u32,
    /// Start.
    pub address: Address,
    /// Bytes.
    pub total_size: u64,
    /// Whose it is.
    pub stream: StreamId,
    /// The free list of its blocks.
    pub kind: SegmentKind,
    /// The private pool; (0, 0) is the default.
    pub pool: (u64, u64),
    /// Whether it is a range of an expandable segment.
    pub expandable: bool,
    /// The call stack of the request that created it.
    pub stack: StackId,
    /// Its blocks, in address order, without gaps.
    pub blocks: Vec<SnapshotBlock>,
}

impl Segment {
    /// Bytes in blocks that the program has allocated.
    #[must_use]
    pub fn allocated_size(&self) -> u64 {
        self.sum(|block| block.state == SnapshotBlockState::Allocated, |block| block.size)
    }

    /// Bytes in blocks that cannot be reused yet.
    #[must_use]
    pub fn active_size(&self) -> u64 {
        self.sum(|block| block.state != SnapshotBlockState::Inactive, |block| block.size)
    }

    /// Requested bytes in blocks that cannot be reused yet.
    #[must_use]
    pub fn requested_size(&self) -> u64 {
        self.sum(|block| block.state != SnapshotBlockState::Inactive, |block| block.requested_size)
    }

    /// The address after the last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.address.0.saturating_add(self.total_size)
    }

    fn sum(&self, of: impl Fn(&SnapshotBlock) -> bool, what: impl Fn(&SnapshotBlock) -> u64) -> u64 {
        self.blocks.iter().filter(|block| of(block)).fold(0, |sum: u64, block| sum.saturating_add(what(block)))
    }
}

/// The kind of a segment. Requests of up to 1 MiB (`kSmallSize`) use small segments, others large ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// 2 MiB segments.
    Small,
    /// All other segments.
    Large,
}

/// A block in a segment. 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotBlock {
    /// Start.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// The requested size; in a free block, that of an earlier request.
    pub requested_size: u64,
    /// Whose it is.
    pub state: SnapshotBlockState,
    /// The call stack of the request.
    pub stack: StackId,
}

/// The state of a block in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SnapshotBlockState {
    /// Allocated by the program.
    Allocated,
    /// Freed, while another stream may still use it.
    PendingFree,
    /// Free.
    Inactive,
}

/// The beginning or end of an annotated range of the program (`record_function`, optimizer steps).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The name of the range.
    pub name: FileText,
    /// Whether the range begins or ends.
    pub stage: AnnotationEdge,
    /// The device, if the file has it.
    pub device: Option<u32>,
    /// Microseconds since 1970.
    pub time_us: u64,
}

/// The beginning or the end of an annotated range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnotationEdge {
    /// The beginning.
    Start,
    /// The end.
    End,
}

// Call stacks, each kept once however many entries and blocks share it.

/// The number of a stack in [`Stacks`]; 0 is "not recorded".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack was recorded.
    pub const NONE: StackId = StackId(0);
}

/// The end of the name of a folder with installed packages: `site-packages`, `dist-packages`.
const PACKAGES: &str = "-packages/";

/// One frame of a call stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StackFrame {
    /// The source file; `??` where the C++ unwinder does not know it.
    pub filename: Arc<str>,
    /// The line in it.
    pub line: u32,
    /// The function.
    pub name: Arc<str>,
}

impl StackFrame {
    fn is_python(&self) -> bool {
        self.filename.ends_with(".py") || self.filename.starts_with('<')
    }

    /// Whether it belongs to an installed package or to Python itself.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        self.filename.contains(PACKAGES) || self.filename.contains("/lib/python") || self.filename.starts_with('<')
    }
}

impl fmt::Display for StackFrame {
    /// `file:line function`, without the folder of installed packages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let filename = self.filename.rsplit_once(PACKAGES).map_or(&*self.filename, |(_, within)| within);
        write!(f, "{filename}:{} {}", self.line, self.name)
    }
}

/// A longer call site is cut. The names of C++ templates can be very long.
const LONGEST_SITE: usize = 4 << 10;

/// The first [`LONGEST_SITE`] bytes of what is written.
#[derive(Default)]
struct ClippedText {
    text: String,
    is_cut: bool,
}

impl fmt::Write for ClippedText {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let room = LONGEST_SITE - self.text.len();
        if !self.is_cut {
            let end = (0..=room.min(more.len())).rev().find(|&place| more.is_char_boundary(place)).unwrap_or(0);
            self.text.push_str(&more[..end]);
            self.is_cut = end < more.len();
        }
        Ok(())
    }
}

/// Every distinct call stack of a snapshot, and every distinct frame.
#[derive(Clone, Debug)]
pub struct Stacks {
    frames: Interner<StackFrame>,
    /// The numbers of the frames, innermost first. Number 0 is the empty stack.
    stacks: Interner<Vec<u32>>,
}

impl Default for Stacks {
    fn default() -> Self {
        Stacks { frames: Interner::default(), stacks: Interner::starting_with(Vec::new()) }
    }
}

impl Stacks {
    /// The number of a frame.
    pub fn intern_frame(&mut self, frame: StackFrame) -> u32 {
        self.frames.intern(&frame)
    }

    /// The number of a stack, given by the numbers of its frames, innermost first.
    pub fn intern(&mut self, frames: &[u32]) -> StackId {
        StackId(self.stacks.intern(frames))
    }

    /// The number of stacks, with "not recorded".
    #[must_use]
    pub fn count(&self) -> usize {
        self.stacks.items().len()
    }

    /// The numbers of the frames of a stack, innermost first.
    #[must_use]
    pub fn members(&self, stack: StackId) -> &[u32] {
        self.stacks.items().get(stack.0 as usize).map_or(&[], |frames| frames)
    }

    /// Every distinct frame, by number.
    #[must_use]
    pub fn all_frames(&self) -> &[StackFrame] {
        self.frames.items()
    }

    /// The frames of a stack, innermost first.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = &StackFrame> {
        self.members(stack).iter().map(|&frame| &self.frames.items()[frame as usize])
    }

    /// The Python frames of a stack, outermost first; all frames if none is of Python.
    pub fn shown_frames(&self, stack: StackId) -> impl Iterator<Item = &StackFrame> {
        let only_python = self.frames(stack).any(StackFrame::is_python);
        let frames = self.members(stack).iter().rev().map(|&frame| &self.frames.items()[frame as usize]);
        frames.filter(move |frame| !only_python || frame.is_python())
    }

    /// The call site as `file:line function`: the innermost Python frame, or the innermost frame of all. If it is in an
    /// installed package, also the innermost frame of the program itself, which its author can change. At most
    /// `LONGEST_SITE` bytes.
    #[must_use]
    pub fn site(&self, stack: StackId) -> Option<String> {
        let frame = self.frames(stack).find(|frame| frame.is_python()).or_else(|| self.frames(stack).next())?;
        let own = self.frames(stack).find(|frame| frame.is_python() && !frame.is_installed());
        let mut site = ClippedText::default();
        // The writer cannot fail.
        let _ = match own.filter(|_| frame.is_installed()) {
            Some(own) => write!(site, "{frame} from {own}"),
            None => write!(site, "{frame}"),
        };
        Some(site.text)
    }
}

/// The page-locked memory of a process: `host_segments` and `host_traces`, from 2.14 on. PyTorch records it if asked
/// (`_record_memory_history(record_pinned_host_memory=True)`). It is shown, not replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// What there is at the end.
    pub segments: Vec<HostSegment>,
    /// What happened, oldest first.
    pub entries: Vec<TraceEntry>,
}

/// One buffer. The host allocator does not split them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSegment {
    /// Start.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Whether the program has it.
    pub state: SnapshotBlockState,
}

/// How much page-locked memory a program used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PinnedUsage {
    /// Recorded requests.
    pub requests: u64,
    /// Buffers at the end.
    pub buffers: u64,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// The bytes of those that the program has.
    pub allocated_bytes: u64,
    /// The most that the program had at one time.
    pub peak_allocated_bytes: u64,
    /// The most that all buffers had at one time.
    pub peak_reserved_bytes: u64,
}

impl HostMemory {
    /// How much there was; `None` if nothing was recorded. Follows the entries from the end to the beginning: the memory at
    /// the end is known.
    #[must_use]
    pub fn usage(&self) -> Option<PinnedUsage> {
        if self.segments.is_empty() && self.entries.is_empty() {
            return None;
        }
        let sum = |of: fn(&&HostSegment) -> bool| {
            self.segments.iter().filter(of).fold(0_u64, |sum, segment| sum.saturating_add(segment.size))
        };
        let (reserved_bytes, allocated_bytes) =
            (sum(|_| true), sum(|segment| segment.state == SnapshotBlockState::Allocated));
        let mut usage = PinnedUsage {
            requests: self.entries.iter().filter(|entry| entry.action == Action::Alloc).count() as u64,
            buffers: self.segments.len() as u64,
            reserved_bytes,
            allocated_bytes,
            peak_allocated_bytes: allocated_bytes,
            peak_reserved_bytes: reserved_bytes,
        };
        let (mut reserved, mut allocated) = (reserved_bytes, allocated_bytes);
        for entry in self.entries.iter().rev() {
            match entry.action {
                Action::Alloc => allocated = allocated.saturating_sub(entry.size),
                Action::FreeRequested => allocated = allocated.saturating_add(entry.size),
                Action::SegmentAlloc => reserved = reserved.saturating_sub(entry.size),
                Action::SegmentFree => reserved = reserved.saturating_add(entry.size),
                _ => {}
            }
            usage.peak_allocated_bytes = usage.peak_allocated_bytes.max(allocated);
            usage.peak_reserved_bytes = usage.peak_reserved_bytes.max(reserved);
        }
        Some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Recordings have millions of entries, so their size matters.
    #[test]
    fn an_entry_takes_40_bytes() {
        assert_eq!(size_of::<TraceEntry>(), 40);
    }

    #[test]
    fn the_site_is_the_innermost_python_frame() {
        let mut stacks = Stacks::default();
        let frame = |filename: &str, name: &str| StackFrame { filename: filename.into(), line: 7, name: name.into() };
        let unwound = stacks.intern_frame(frame("??", "c10::malloc"));
        let forward = stacks.intern_frame(frame("model.py", "forward"));
        let main = stacks.intern_frame(frame("train.py", "main"));
        let stack = stacks.intern(&[unwound, forward, main]);
        assert_eq!(stacks.site(stack).as_deref(), Some("model.py:7 forward"));
        let native_only = stacks.intern(&[unwound]);
        assert_eq!(stacks.site(native_only).as_deref(), Some("??:7 c10::malloc"));
        let shown = |stack| stacks.shown_frames(stack).map(StackFrame::to_string).collect::<Vec<_>>();
        assert_eq!(shown(stack), ["train.py:7 main", "model.py:7 forward"]);
        assert_eq!(shown(native_only), ["??:7 c10::malloc"]);
        assert_eq!(stacks.site(StackId::NONE), None);
        assert_eq!(stacks.intern(&[unwound, forward, main]), stack);
    }

    #[test]
    fn a_long_site_is_cut() {
        let mut stacks = Stacks::default();
        let name = "é".repeat(LONGEST_SITE);
        let frame = stacks.intern_frame(StackFrame { filename: "a.py".into(), line: 7, name: name.as_str().into() });
        let stack = stacks.intern(&[frame]);
        let site = stacks.site(stack).unwrap();
        assert!(site.starts_with("a.py:7 éé") && site.ends_with('é'), "{site}");
        assert!((LONGEST_SITE - 1..=LONGEST_SITE).contains(&site.len()), "{}", site.len());
    }

    #[test]
    fn the_call_site_names_the_program_too() {
        let mut stacks = Stacks::default();
        let mut frame =
            |filename: &str| stacks.intern_frame(StackFrame { filename: filename.into(), line: 7, name: "f".into() });
        let linear = frame("/opt/venv/lib/python3.12/site-packages/torch/nn/linear.py");
        let (runpy, compiled) = (frame("/usr/lib/python3.12/runpy.py"), frame("<string>"));
        let (model, main) = (frame("/home/me/model.py"), frame("/home/me/train.py"));
        let mut site = |frames: &[u32]| {
            let stack = stacks.intern(frames);
            stacks.site(stack).unwrap()
        };
        assert_eq!(site(&[linear, model, main, runpy]), "torch/nn/linear.py:7 f from /home/me/model.py:7 f");
        assert_eq!(site(&[compiled, main]), "<string>:7 f from /home/me/train.py:7 f");
        assert_eq!(site(&[model, linear, main]), "/home/me/model.py:7 f");
        assert_eq!(site(&[linear, runpy]), "torch/nn/linear.py:7 f");
    }

    #[test]
    fn peak_is_found_from_the_end() {
        let entry = |action, size| TraceEntry { action, size, ..TraceEntry::default() };
        let segment = |address, size, state| HostSegment { address: Address(address), size, state };
        let host = HostMemory {
            segments: vec![segment(1, 32, SnapshotBlockState::Allocated), segment(2, 64, SnapshotBlockState::Inactive)],
            entries: vec![
                entry(Action::SegmentAlloc, 64),
                entry(Action::Alloc, 64),
                entry(Action::FreeRequested, 64),
                entry(Action::FreeCompleted, 64),
                entry(Action::FreeRequested, 8),
                entry(Action::SegmentFree, 8),
            ],
        };
        let usage = host.usage().unwrap();
        assert_eq!((usage.buffers, usage.requests), (2, 1));
        assert_eq!((usage.allocated_bytes, usage.reserved_bytes), (32, 96));
        assert_eq!((usage.peak_allocated_bytes, usage.peak_reserved_bytes), (32 + 8 + 64, 96 + 8));
        assert_eq!(HostMemory::default().usage(), None);
    }
}
