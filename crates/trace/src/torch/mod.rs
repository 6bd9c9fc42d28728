//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`): reading, writing, and conversion to traces.
//!
//! [`Snapshot`] is the model of the file. [`Recording`] is what a replay needs of one device: the trace, the recorded
//! actions of the allocator, the memory before and after, and what is unknown.

mod collect;
mod keys;
mod oom;
mod parse;
#[cfg(test)]
mod parse_tests;
pub(crate) mod pickle;
mod pools;
mod recording;
mod release;
#[cfg(test)]
mod release_tests;
mod rewind;
mod snapshot;
mod to_trace;
mod write;

pub use oomph_pytorch::{RecordedSettings, RecordedValue};

pub use oom::{FinalOom, MemoryHolder, MemoryRefuser, ProcessLimit, RecordedLimit};
pub use parse::SnapshotError;
pub use pickle::{PickleError, PickleFault};
pub use pools::{DEFAULT_POOL, MemoryLife, MemoryLives, PoolKey, PoolRelease, PresentLives, RequestPools};
pub use recording::{GivenFacts, HistoryGap, Recording, RecordingError, RecordingGaps};
pub use release::{RecordedRelease, ReleaseContradiction};
pub use rewind::InitialMemory;
pub use snapshot::{
    Action, Annotation, AnnotationEdge, EntryNote, HostMemory, HostSegment, PinnedUsage, Segment, SegmentKind,
    SettingsOrigin, Snapshot, SnapshotBlock, SnapshotBlockState, StackFrame, StackId, Stacks, TraceEntry,
};

use std::path::Path;

use super::{TraceError, TraceFormat, file, memory_budget::MemoryBudget, pointer_log::name_of};
use oomph_base::Progress;

/// The name of the format.
pub const NAME: &str = "torch";

/// The snapshot format. It opens the first device; [`Recording::open`] opens any.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: NAME,
    about: "PyTorch memory snapshot (torch.cuda.memory._dump_snapshot)",
    // The opcode PROTO and a known protocol.
    recognises: |head| matches!(head, [0x80, 0..=5, ..]),
    open: |path, progress| Ok(Box::new(Recording::open(path, None, progress)?.trace)),
};

impl Snapshot {
    /// Reads a snapshot file, compressed or not.
    pub fn open(path: impl AsRef<Path>, progress: &dyn Progress) -> Result<Snapshot, TraceError> {
        let path = path.as_ref();
        Snapshot::read_within(file::open(path, progress)?, MemoryBudget::for_file(path)).map_err(|error| match error {
            SnapshotError::Pickle(PickleError { fault: PickleFault::Io(error), .. }) => file::read_failed(path, error),
            error => TraceError::Format { path: path.to_owned(), reason: error.to_string() },
        })
    }
}

impl Recording {
    /// Reads the recording of one device from a snapshot file; without a number, of the first device with
    /// data.
    pub fn open(path: impl AsRef<Path>, device: Option<u32>, progress: &dyn Progress) -> Result<Recording, TraceError> {
        Recording::open_given(path, device, &GivenFacts::default(), progress)
    }

    /// Like `open`, with what the user says about the recording.
    pub fn open_given(
        path: impl AsRef<Path>,
        device: Option<u32>,
        given: &GivenFacts,
        progress: &dyn Progress,
    ) -> Result<Recording, TraceError> {
        let path = path.as_ref();
        let refused = |error: RecordingError| TraceError::Format { path: path.to_owned(), reason: error.to_string() };
        let snapshot = Snapshot::open(path, progress)?.with_given(given).map_err(refused)?;
        snapshot.into_recording(&name_of(path), device, progress).map_err(refused)
    }
}
