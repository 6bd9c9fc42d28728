//! The words of a snapshot. They get the first text numbers of a pickle, so that words are compared by number.

use super::{
    pickle::{PickleValue, TextId},
    snapshot::Action,
};

macro_rules! words {
    ($($name:ident = $text:literal,)*) => {
        /// A key or a constant text of a snapshot.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub(crate) enum SnapshotWord { $($name),* }

        impl SnapshotWord {
            /// All words, in the order of their numbers.
            pub(crate) const TEXTS: &'static [&'static str] = &[$($text),*];
            const ALL: &'static [SnapshotWord] = &[$(SnapshotWord::$name),*];
        }
    };
}

words! {
    Action = "action", Addr = "addr", Size = "size", Stream = "stream", TimeUs = "time_us", Frames = "frames",
    DeviceFree = "device_free", CompileContext = "compile_context", UserMetadata = "user_metadata", PoolId = "pool_id",
    Alloc = "alloc", FreeRequested = "free_requested", FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc", SegmentFree = "segment_free", SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap", Oom = "oom", Snapshot = "snapshot", Annotate = "annotate",
    Segments = "segments", DeviceTraces = "device_traces", AllocatorSettings = "allocator_settings",
    ExternalAnnotations = "external_annotations", Device = "device", Address = "address", TotalSize = "total_size",
    AllocatedSize = "allocated_size", ActiveSize = "active_size", RequestedSize = "requested_size",
    SegmentType = "segment_type", SegmentPoolId = "segment_pool_id", IsExpandable = "is_expandable", Blocks = "blocks",
    State = "state", ActiveAllocated = "active_allocated", ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free", Inactive = "inactive", Small = "small", Large = "large",
    History = "history", RealSize = "real_size", Filename = "filename", Line = "line", Name = "name", Stage = "stage",
    GraphReuse = "graph_capture_record_stream_reuse", MaxRoundThreshold = "max_round_threshold",
    MaxCachedSize = "max_cached_size", HostSegments = "host_segments", HostTraces = "host_traces",
    InternalMetadata = "internal_metadata", ForwardFrames = "forward_frames",
    Start = "START", End = "END", NotApplicable = "N/A", Nothing = "",
}

impl SnapshotWord {
    /// The word with this text, if it is one.
    pub(crate) fn of(text: TextId) -> Option<SnapshotWord> {
        SnapshotWord::ALL.get(text.0 as usize).copied()
    }

    pub(crate) const fn id(self) -> TextId {
        TextId(self as u32)
    }

    pub(crate) const fn text(self) -> &'static str {
        SnapshotWord::TEXTS[self as usize]
    }

    pub(crate) fn is(self, value: PickleValue) -> bool {
        value == PickleValue::Text(self.id())
    }

    /// The action with this name.
    pub(crate) fn action(text: TextId) -> Action {
        ACTIONS.iter().find(|(_, word)| word.id() == text).map_or(Action::Unknown, |&(action, _)| action)
    }
}

pub(crate) const ACTIONS: [(Action, SnapshotWord); 10] = [
    (Action::Alloc, SnapshotWord::Alloc),
    (Action::FreeRequested, SnapshotWord::FreeRequested),
    (Action::FreeCompleted, SnapshotWord::FreeCompleted),
    (Action::SegmentAlloc, SnapshotWord::SegmentAlloc),
    (Action::SegmentFree, SnapshotWord::SegmentFree),
    (Action::SegmentMap, SnapshotWord::SegmentMap),
    (Action::SegmentUnmap, SnapshotWord::SegmentUnmap),
    (Action::OutOfMemory, SnapshotWord::Oom),
    (Action::Snapshot, SnapshotWord::Snapshot),
    (Action::Annotate, SnapshotWord::Annotate),
];

impl Action {
    pub(crate) fn word(self) -> Option<SnapshotWord> {
        ACTIONS.iter().find(|(action, _)| *action == self).map(|&(_, word)| word)
    }

    /// PyTorch's name of the action.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.word().map_or("unknown", SnapshotWord::text)
    }
}
