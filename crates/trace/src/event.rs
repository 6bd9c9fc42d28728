//! The events of a trace, and the tables that they refer to by number: tags, call sites, shapes of work, labels, streams
//! and threads.

use serde::{Deserialize, Serialize};

use crate::interner::{Interner, TextInterner};
use oomph_base::{FileText, Nanos, SiteId, StreamId, TagId, ThreadId, Work};

/// The number of a live block. Numbers are dense and reused after a free, so that tables are as long as the number of live
/// blocks, not as the trace. Block ids in files are unique.
///
/// Slots depend on the order of events: code that interleaves threads must do so before it assigns slots.
pub type BlockSlot = u32;

/// A dense number of a recorded event inside a trace.
pub type TraceEventId = u32;

/// Fills the unused places of [`Op::Work`]'s operands.
pub const NO_OPERAND: BlockSlot = BlockSlot::MAX;

/// What happened, on which thread, and how long after the previous event. 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub op: Op,
    /// Nanoseconds since the previous event. A pause of more than 4.29 s is an [`Op::Idle`].
    pub delta_ns: u32,
    /// The host thread.
    pub thread: ThreadId,
}

impl Event {
    /// An event of the main thread, immediately after the previous one.
    #[must_use]
    pub const fn of(op: Op) -> Event {
        Event { op, delta_ns: 0, thread: ThreadId(0) }
    }

    /// Time since the previous event.
    #[must_use]
    pub const fn delta(&self) -> Nanos {
        Nanos(self.delta_ns as u64)
    }
}

/// The kinds of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A request for device memory.
    Alloc {
        /// The slot of the block until it is freed.
        slot: BlockSlot,
        /// Requested bytes; never zero.
        bytes: u64,
        /// The stream that will use it.
        stream: StreamId,
        /// Category and layer.
        tag: TagId,
        /// Call site.
        site: SiteId,
    },
    /// A free of device memory.
    Free {
        /// Which block.
        slot: BlockSlot,
        /// The stream in whose order the free happens; PyTorch always uses the block's own.
        stream: StreamId,
    },
    /// A block is also used on another stream (PyTorch's `record_stream`).
    Use {
        /// Which block.
        slot: BlockSlot,
        /// The other stream.
        stream: StreamId,
    },
    /// A stream event is recorded behind the work queued so far (`cudaEventRecord`).
    EventRecord {
        /// Which event; recording it again replaces the earlier recording.
        event: TraceEventId,
        /// Which stream.
        stream: StreamId,
    },
    /// Later work of a stream waits for a stream event (`cudaStreamWaitEvent`).
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
    /// The allocator returns cached memory to the driver (PyTorch's `empty_cache`).
    EmptyCache,
    /// Requests from here on use a pool of memory: a private one (`torch.cuda.use_mem_pool`, the capture of a CUDA graph),
    /// or again the default pool `(0, 0)`. Frees return memory to the pool of their block.
    UsePool {
        /// PyTorch's number of the pool (`MempoolId_t`).
        pool: (u64, u64),
    },
    /// The program gives up a private pool. Its free memory may go back to the driver, its live blocks stay.
    ReleasePool {
        /// Which pool.
        pool: (u64, u64),
        /// Whether its free memory goes back at once, as when a `MemPool` is deleted. Otherwise it goes back with the next
        /// [`EmptyCache`](Op::EmptyCache), or when memory runs out.
        trims: bool,
    },
    /// A named place in the program.
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
    /// A request for pinned host memory. Its slots are shared with device blocks.
    HostAlloc {
        /// The slot of the buffer until it is freed.
        slot: BlockSlot,
        /// Requested bytes; never zero.
        bytes: u64,
    },
    /// A free of pinned host memory.
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
    /// The kind of this operation.
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
            Op::UsePool { .. } => OpKind::UsePool,
            Op::ReleasePool { .. } => OpKind::ReleasePool,
            Op::Mark { .. } => OpKind::Mark,
            Op::Work { .. } => OpKind::Work,
            Op::HostAlloc { .. } => OpKind::HostAlloc,
            Op::HostFree { .. } => OpKind::HostFree,
            Op::Idle { .. } => OpKind::Idle,
            Op::Collective { .. } => OpKind::Collective,
        }
    }
}

oomph_base::named_enum! {
    /// An [`Op`] without its operands.
    #[expect(missing_docs, reason = "documented at the variant of Op with the same name")]
    pub enum OpKind {
        Alloc = "alloc",
        Free = "free",
        Use = "use",
        EventRecord = "event_record",
        EventWait = "event_wait",
        StreamSync = "stream_sync",
        DeviceSync = "device_sync",
        EmptyCache = "empty_cache",
        UsePool = "use_pool",
        ReleasePool = "release_pool",
        Mark = "mark",
        Work = "work",
        HostAlloc = "host_alloc",
        HostFree = "host_free",
        Idle = "idle",
        Collective = "collective",
    }
}

oomph_base::named_enum! {
    /// What begins at a mark.
    pub enum MarkKind {
        /// A named part of the run, such as `train` or `forward`.
        Phase = "phase",
        /// A training step, or one repetition of the workload's cycle.
        Step = "step",
        /// A micro-batch within a step.
        MicroBatch = "micro_batch",
    }
}

oomph_base::named_enum! {
    /// A collective operation.
    pub enum CollectiveKind {
        /// The sum over all ranks; every rank gets the result.
        AllReduce = "all_reduce",
        /// Every rank gets the parts of all ranks.
        AllGather = "all_gather",
        /// The sum over all ranks; every rank keeps its part.
        ReduceScatter = "reduce_scatter",
        /// One rank sends to all.
        Broadcast = "broadcast",
    }
}

/// A number in [`Tables::shapes`].
pub type ShapeId = u32;
/// A number in [`Tables::labels`].
pub type LabelId = u32;

oomph_base::named_enum! {
    /// What a block is for.
    #[derive(Default)]
    pub enum Category {
        /// Weights.
        Parameter = "parameter",
        /// Gradients of weights.
        Gradient = "gradient",
        /// Optimizer state.
        Optimizer = "optimizer",
        /// Saved for the backward pass.
        Activation = "activation",
        /// Freed at the end of the operation, or soon after.
        Temporary = "temporary",
        /// Scratch memory of a library.
        Workspace = "workspace",
        /// Input batches.
        Input = "input",
        /// Not known.
        #[default]
        Unknown = "unknown",
        /// Kept for later requests, such as keys and values of attention. This and the next are last: files have the numbers
        /// of the others.
        Cache = "cache",
        /// Scores of classes or tokens, their copies in other formats, and the gradients of both.
        Logits = "logits",
    }
}

/// Category and layer of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tag {
    /// What it is for.
    pub category: Category,
    /// Which layer it belongs to, if any.
    pub layer: Option<u16>,
}

/// The tables of a trace. Entry 0 of tags, sites and labels is "none"; entry 0 of streams is the default stream; entry 0 of
/// threads is the main thread.
///
/// Tables only grow: a reader may add entries while it reads, and numbers stay valid.
#[derive(Clone, Debug)]
pub struct Tables {
    tags: Interner<Tag>,
    sites: TextInterner,
    labels: TextInterner,
    shapes: Interner<Work>,
    streams: Interner<u64>,
    threads: Interner<u64>,
}

impl Default for Tables {
    fn default() -> Self {
        Tables {
            tags: Interner::starting_with(Tag::default()),
            sites: TextInterner::default(),
            labels: TextInterner::default(),
            shapes: Interner::default(),
            streams: Interner::starting_with(0),
            threads: Interner::starting_with(0),
        }
    }
}

/// The entries of tables, by their numbers.
macro_rules! getters {
    ($($(#[$doc:meta])* $table:ident: $entry:ty;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $table(&self) -> &[$entry] {
            self.$table.items()
        }
    )*};
}

impl Tables {
    /// The number of a tag.
    pub fn intern_tag(&mut self, tag: Tag) -> TagId {
        TagId(self.tags.intern(&tag))
    }

    /// The number of a call site.
    pub fn intern_site(&mut self, site: &str) -> SiteId {
        SiteId(self.sites.intern(site))
    }

    /// The number of a label.
    pub fn intern_label(&mut self, label: &str) -> LabelId {
        self.labels.intern(label)
    }

    /// The number of a shape of work.
    pub fn intern_shape(&mut self, shape: Work) -> ShapeId {
        self.shapes.intern(&shape)
    }

    /// The number of the stream with this handle in the traced program.
    pub fn intern_stream(&mut self, handle: u64) -> Result<StreamId, TableFull> {
        u16::try_from(self.streams.intern(&handle)).map(StreamId).map_err(|_| TableFull("streams"))
    }

    /// The number of the thread with this handle in the traced program.
    pub fn intern_thread(&mut self, handle: u64) -> Result<ThreadId, TableFull> {
        u16::try_from(self.threads.intern(&handle)).map(ThreadId).map_err(|_| TableFull("threads"))
    }

    getters! {
        /// Tags by number.
        tags: Tag;
        /// Call sites by number.
        sites: FileText;
        /// Labels by number.
        labels: FileText;
        /// Shapes of work by number.
        shapes: Work;
        /// Stream handles of the traced program, by number.
        streams: u64;
        /// Thread handles of the traced program, by number.
        threads: u64;
    }
}

/// A trace with more than 65,536 streams or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than 65,536 {0} in one trace")]
pub struct TableFull(pub &'static str);

#[cfg(test)]
mod tests {
    use super::*;

    // Replays read millions of events, so their size matters.
    #[test]
    fn an_event_takes_32_bytes() {
        assert_eq!(size_of::<Event>(), 32);
    }
}
