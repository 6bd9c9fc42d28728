//! Where a recording is taken up that began in the middle: behind the call that was under way, with the memory that was
//! there then.

use crate::{
    strategy::{
        BlockState, BlockView, Layout, SegmentView,
        caching::{Settings, SharedRange},
    },
    trace::torch::{self, Action, Entry, Initial, Recording, SegmentKind},
    unit::{Address, MIB},
};

/// What was there when a recording began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Beginning {
    /// Blocks that were not free.
    pub blocks: usize,
    /// Segments, or mapped runs.
    pub segments: usize,
    /// Entries of a call that was under way. They are not compared: what it did before is not recorded.
    pub entries_passed_over: usize,
}

/// The memory from which a recording is re-lived.
pub(super) struct Start {
    /// The first entry that is compared.
    pub(super) entry: usize,
    pub(super) memory: Initial,
    pub(super) layout: Layout,
}

impl Start {
    /// Of any recording: one that has it all starts with nothing, at its first entry.
    pub(super) fn of(recording: &Recording) -> Start {
        let nothing_before = recording.initial.segments.is_empty() && recording.initial.astray.is_empty();
        let entry = if nothing_before { 0 } else { first_whole_call(&recording.witnessed) };
        let memory = if entry == 0 { recording.initial.clone() } else { recording.memory_before(entry) };
        let layout = Layout { segments: memory.segments.iter().map(segment_view).collect() };
        Start { entry, memory, layout }
    }

    /// What there is to say about it, if the recording began in the middle.
    pub(super) fn told(&self) -> Option<Beginning> {
        let began_late = self.entry > 0 || !self.layout.segments.is_empty();
        began_late.then(|| Beginning {
            blocks: self.memory.live().count(),
            segments: self.layout.segments.len(),
            entries_passed_over: self.entry,
        })
    }

    /// What else may be the reason if the model does something else: a sentence each.
    pub(super) fn doubts(&self, settings: &Settings, limit: Option<u64>) -> Vec<String> {
        let mut doubts = Vec::new();
        let estimated = self.memory.estimated.len();
        if estimated > 0 {
            doubts.push(format!("it began in the middle: the size of {estimated} blocks from before is an estimate"));
        }
        let collects = settings.garbage_collection_threshold > 0.0;
        if collects && limit.is_some() && !self.layout.segments.is_empty() {
            doubts.push("it began in the middle: how old cached blocks were, garbage collection knew".to_owned());
        }
        doubts
    }

    /// Blocks that wait for streams, in the order of the layout.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Address> {
        let pending = self.layout.blocks().filter(|block| block.state == BlockState::Pending);
        pending.map(|block| block.address)
    }
}

/// A free is a call from its first entry on, and a request is over with its last.
fn first_whole_call(entries: &[Entry]) -> usize {
    let mut numbered = entries.iter().enumerate();
    let start = numbered.find_map(|(index, entry)| match entry.action {
        Action::FreeRequested => Some(index),
        Action::Alloc | Action::OutOfMemory => Some(index + 1),
        _ => None,
    });
    start.unwrap_or(entries.len())
}

fn segment_view(segment: &torch::Segment) -> SegmentView {
    let state = |state: torch::BlockState| match state {
        torch::BlockState::Allocated => BlockState::Allocated,
        torch::BlockState::PendingFree => BlockState::Pending,
        torch::BlockState::Inactive => BlockState::Free,
    };
    let view = |block: &torch::Block| BlockView {
        address: block.address,
        size: block.size,
        requested: block.requested_size,
        state: state(block.state),
    };
    SegmentView {
        address: segment.address,
        bytes: segment.total_size,
        stream: segment.stream,
        pool: if segment.kind == SegmentKind::Large { "large" } else { "small" }.into(),
        pool_id: segment.pool,
        mapped: segment.expandable,
        alias: false,
        blocks: segment.blocks.iter().map(view).collect(),
    }
}

/// Small requests map so much at a time, and no others do.
const SMALL_MAPPING: u64 = 2 * MIB;

/// Where the addresses of a range begin: at its lowest run, or lower where something is mapped later on. Whatever else
/// may lie below is never used, and nobody can tell.
pub(super) fn range_start(range: &SharedRange, segments: &[SegmentView], entries: &[Entry]) -> Address {
    let runs = || range.runs.iter().map(|&run| &segments[run]);
    let Some(first) = runs().next() else { return Address::NULL };
    let mut low = first.address.0;
    let mut high = runs().map(|run| run.address.0.saturating_add(run.bytes)).max().unwrap_or(low);
    let mut mapped: u64 = runs().map(|run| run.bytes).sum();
    for entry in entries.iter().filter(|entry| entry.stream == first.stream) {
        let (start, end) = (entry.address.0, entry.address.0.saturating_add(entry.size));
        match entry.action {
            Action::SegmentMap => {
                let of_its_kind = (entry.size == SMALL_MAPPING) == (range.granule == SMALL_MAPPING);
                let in_step = low.abs_diff(start).is_multiple_of(range.granule);
                if of_its_kind && in_step && high.max(end) - low.min(start) <= range.bytes {
                    (low, high) = (low.min(start), high.max(end));
                    mapped += entry.size;
                }
            }
            Action::SegmentUnmap if (low..high).contains(&start) => {
                mapped = mapped.saturating_sub(entry.size);
                if mapped == 0 {
                    // The addresses went back too: what is mapped from here on lies in another range.
                    break;
                }
            }
            _ => {}
        }
    }
    Address(low)
}
