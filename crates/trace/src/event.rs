//! One event of a trace.

use serde::{Deserialize, Serialize};

use super::{LabelId, ShapeId};
use oomph_base::{Nanos, SiteId, StreamId, TagId, ThreadId};

/// A dense, recycled number of a live block. On disk ids are unique; in memory a slot is free again after the free,
/// so that tables follow the number of live blocks and not the length of the trace. Slots hold only in the trace's total
/// order: whoever interleaves threads anew must do so before slots are given.
pub type BlockSlot = u32;

/// A dense number of a recorded event inside a trace.
pub type TraceEventId = u32;

/// Fills the unused places of [`Op::Work`]'s operands.
pub const NO_OPERAND: BlockSlot = BlockSlot::MAX;

/// What happened, who did it, and how long after the event before it. 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub op: Op,
    /// Nanoseconds since the event before; longer pauses than 4.29 s are [`Op::Idle`].
    pub delta_ns: u32,
    /// Which host thread did it.
    pub thread: ThreadId,
}

impl Event {
    /// An event of the first thread, right after the one before.
    #[must_use]
    pub const fn of(op: Op) -> Event {
        Event { op, delta_ns: 0, thread: ThreadId(0) }
    }

    /// Time since the event before.
    #[must_use]
    pub const fn delta(&self) -> Nanos {
        Nanos(self.delta_ns as u64)
    }
}

/// The kinds of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Device memory is asked for.
    Alloc {
        /// The slot that the block lives in until it is freed.
        slot: BlockSlot,
        /// Bytes asked for; never zero.
        bytes: u64,
        /// On which stream it will be used.
        stream: StreamId,
        /// Category and layer.
        tag: TagId,
        /// Call site.
        site: SiteId,
    },
    /// Device memory is given back.
    Free {
        /// Which block.
        slot: BlockSlot,
        /// On which stream the free is ordered; PyTorch always uses the block's own.
        stream: StreamId,
    },
    /// A block is also used on another stream (PyTorch's `record_stream`).
    Use {
        /// Which block.
        slot: BlockSlot,
        /// The other stream.
        stream: StreamId,
    },
    /// An event is put behind the work queued on a stream so far.
    EventRecord {
        /// Which event; recording it again replaces the earlier recording.
        event: TraceEventId,
        /// Which stream.
        stream: StreamId,
    },
    /// Later work of a stream waits for an event.
    EventWait {
        /// Which event.
        event: TraceEventId,
        /// Which stream waits.
        stream: StreamId,
    },
    /// The host waits for one stream.
    StreamSync {
        /// Which stream.
        stream: StreamId,
    },
    /// The host waits for all streams.
    DeviceSync,
    /// Cached memory is given back (PyTorch's `empty_cache`).
    EmptyCache,
    /// A place in the story.
    Mark {
        /// What begins here.
        kind: MarkKind,
        /// Its name.
        label: LabelId,
        /// Its number.
        index: u32,
    },
    /// Work is queued on a stream.
    Work {
        /// What work, by shape.
        shape: ShapeId,
        /// Where.
        stream: StreamId,
        /// Blocks read and written, the result last, then [`NO_OPERAND`].
        operands: [BlockSlot; 4],
    },
    /// Pinned host memory is asked for. Shares the slots of device blocks.
    HostAlloc {
        /// The slot that the buffer lives in until it is freed.
        slot: BlockSlot,
        /// Bytes asked for; never zero.
        bytes: u64,
    },
    /// Pinned host memory is given back.
    HostFree {
        /// Which buffer.
        slot: BlockSlot,
    },
    /// The host does something else.
    Idle {
        /// For how long.
        nanos: u64,
    },
    /// Ranks exchange data.
    Collective {
        /// How.
        kind: CollectiveKind,
        /// Bytes that this rank contributes.
        bytes: u64,
        /// How many ranks take part.
        ranks: u16,
        /// On which stream.
        stream: StreamId,
    },
}

impl Op {
    /// Its kind, for counting and naming.
    #[must_use]
    pub const fn kind(&self) -> OpKind {
        match self {
            Op::Alloc { .. } => OpKind::Alloc,
            Op::Free { .. } => OpKind::Free,
            Op::Use { .. } => OpKind::Use,
            Op::EventRecord { .. } => OpKind::EventRecord,
            Op::EventWait { .. } => OpKind::EventWait,
            Op::StreamSync { .. } => OpKind::StreamSync,
            Op::DeviceSync => OpKind::DeviceSync,
            Op::EmptyCache => OpKind::EmptyCache,
            Op::Mark { .. } => OpKind::Mark,
            Op::Work { .. } => OpKind::Work,
            Op::HostAlloc { .. } => OpKind::HostAlloc,
            Op::HostFree { .. } => OpKind::HostFree,
            Op::Idle { .. } => OpKind::Idle,
            Op::Collective { .. } => OpKind::Collective,
        }
    }
}

/// An [`Op`] without its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is explained at the variant of Op that bears its name")]
pub enum OpKind {
    Alloc,
    Free,
    Use,
    EventRecord,
    EventWait,
    StreamSync,
    DeviceSync,
    EmptyCache,
    Mark,
    Work,
    HostAlloc,
    HostFree,
    Idle,
    Collective,
}

impl OpKind {
    /// Every kind, in the order of [`Op`].
    pub const ALL: [OpKind; 14] = [
        OpKind::Alloc,
        OpKind::Free,
        OpKind::Use,
        OpKind::EventRecord,
        OpKind::EventWait,
        OpKind::StreamSync,
        OpKind::DeviceSync,
        OpKind::EmptyCache,
        OpKind::Mark,
        OpKind::Work,
        OpKind::HostAlloc,
        OpKind::HostFree,
        OpKind::Idle,
        OpKind::Collective,
    ];

    /// Its name in files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Alloc => "alloc",
            OpKind::Free => "free",
            OpKind::Use => "use",
            OpKind::EventRecord => "event_record",
            OpKind::EventWait => "event_wait",
            OpKind::StreamSync => "stream_sync",
            OpKind::DeviceSync => "device_sync",
            OpKind::EmptyCache => "empty_cache",
            OpKind::Mark => "mark",
            OpKind::Work => "work",
            OpKind::HostAlloc => "host_alloc",
            OpKind::HostFree => "host_free",
            OpKind::Idle => "idle",
            OpKind::Collective => "collective",
        }
    }
}

/// What begins at a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// A named part of the run, such as `train` or `forward`.
    Phase,
    /// A training step, or one turn of whatever the workload repeats.
    Step,
    /// A micro-batch within a step.
    MicroBatch,
}

impl MarkKind {
    /// Every kind of mark.
    pub const ALL: [MarkKind; 3] = [MarkKind::Phase, MarkKind::Step, MarkKind::MicroBatch];

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            MarkKind::Phase => "phase",
            MarkKind::Step => "step",
            MarkKind::MicroBatch => "micro_batch",
        }
    }
}

/// How ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Sum over ranks, result everywhere.
    AllReduce,
    /// Everyone gets everyone's part.
    AllGather,
    /// Sum over ranks, each keeps its part.
    ReduceScatter,
    /// One sends, all receive.
    Broadcast,
}

impl CollectiveKind {
    /// Every kind of exchange.
    pub const ALL: [CollectiveKind; 4] = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::Broadcast,
    ];

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::Broadcast => "broadcast",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replay reads events by the million: their size is a promise.
    #[test]
    fn an_event_takes_32_bytes() {
        assert_eq!(size_of::<Event>(), 32);
    }
}
