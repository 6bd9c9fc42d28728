//! One event of a trace.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use oomph_base::{Nanos, SiteId, StreamId, TagId, ThreadId, Work};

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

// What events refer to by number: tags, call sites, shapes of work, labels, stream handles.

/// A number in [`Tables::shapes`].
pub type ShapeId = u32;
/// A number in [`Tables::labels`].
pub type LabelId = u32;

/// What a block is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Not known.
    #[default]
    Unknown,
    /// Weights.
    Parameter,
    /// Gradients of weights.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// Saved for the backward pass.
    Activation,
    /// Gone by the end of the operation, or soon after.
    Temporary,
    /// Scratch memory of a library.
    Workspace,
    /// Input batches.
    Input,
}

impl Category {
    /// Every category, in the order in which reports show them.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::Gradient,
        Category::Optimizer,
        Category::Activation,
        Category::Temporary,
        Category::Workspace,
        Category::Input,
        Category::Unknown,
    ];

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Category::Unknown => "unknown",
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::Optimizer => "optimizer",
            Category::Activation => "activation",
            Category::Temporary => "temporary",
            Category::Workspace => "workspace",
            Category::Input => "input",
        }
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

/// The side tables of a trace. Entry 0 of tags, sites and labels is "none"; entry 0 of streams is
/// the default stream, entry 0 of threads the main thread.
///
/// Tables only grow: a reader may add entries while it reads, and numbers already given stay valid.
#[derive(Clone, Debug)]
pub struct Tables {
    tags: Interned<Tag>,
    sites: Interned<String>,
    labels: Interned<String>,
    shapes: Interned<Work>,
    streams: Interned<u64>,
    threads: Interned<u64>,
}

impl Default for Tables {
    fn default() -> Self {
        let mut tables = Tables {
            tags: Interned::default(),
            sites: Interned::default(),
            labels: Interned::default(),
            shapes: Interned::default(),
            streams: Interned::default(),
            threads: Interned::default(),
        };
        tables.tags.intern(Tag::default());
        tables.sites.intern(String::new());
        tables.labels.intern(String::new());
        tables.streams.intern(0);
        tables.threads.intern(0);
        tables
    }
}

impl Tables {
    /// The number of a tag.
    pub fn intern_tag(&mut self, tag: Tag) -> TagId {
        TagId(self.tags.intern(tag))
    }

    /// The number of a call site.
    pub fn intern_site(&mut self, site: &str) -> SiteId {
        SiteId(self.sites.intern_str(site))
    }

    /// The number of a label.
    pub fn intern_label(&mut self, label: &str) -> LabelId {
        self.labels.intern_str(label)
    }

    /// The number of a shape of work.
    pub fn intern_shape(&mut self, shape: Work) -> ShapeId {
        self.shapes.intern(shape)
    }

    /// The number of the stream that its program knew by this handle.
    pub fn intern_stream(&mut self, handle: u64) -> Result<StreamId, TableFull> {
        u16::try_from(self.streams.intern(handle)).map(StreamId).map_err(|_| TableFull("streams"))
    }

    /// The number of the thread that its program knew by this handle.
    pub fn intern_thread(&mut self, handle: u64) -> Result<ThreadId, TableFull> {
        u16::try_from(self.threads.intern(handle)).map(ThreadId).map_err(|_| TableFull("threads"))
    }

    /// Tags by number.
    #[must_use]
    pub fn tags(&self) -> &[Tag] {
        &self.tags.items
    }

    /// Call sites by number.
    #[must_use]
    pub fn sites(&self) -> &[String] {
        &self.sites.items
    }

    /// Labels by number.
    #[must_use]
    pub fn labels(&self) -> &[String] {
        &self.labels.items
    }

    /// Shapes of work by number.
    #[must_use]
    pub fn shapes(&self) -> &[Work] {
        &self.shapes.items
    }

    /// The handles that the traced program knew its streams by, by number.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams.items
    }

    /// The handles that the traced program knew its threads by, by number.
    #[must_use]
    pub fn threads(&self) -> &[u64] {
        &self.threads.items
    }
}

/// A trace with more than 65,536 streams or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than 65,536 {0} in one trace")]
pub struct TableFull(pub &'static str);

#[derive(Clone, Debug)]
struct Interned<T> {
    items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T> Default for Interned<T> {
    fn default() -> Self {
        Interned { items: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Interned<T> {
    fn intern(&mut self, item: T) -> u32 {
        if let Some(&number) = self.numbers.get(&item) {
            return number;
        }
        let number = self.items.len() as u32;
        self.items.push(item.clone());
        self.numbers.insert(item, number);
        number
    }
}

impl Interned<String> {
    /// Like `intern`, without making a `String` for a text that is known already.
    fn intern_str(&mut self, text: &str) -> u32 {
        match self.numbers.get(text) {
            Some(&number) => number,
            None => self.intern(text.to_owned()),
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
