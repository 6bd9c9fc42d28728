//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`): read, written, and made into traces.
//!
//! [`Snapshot`] is the model of the file. [`Recording`] is what a replay needs of one device: the story, what was
//! witnessed, the memory before and after, and an account of what the file cannot tell.

mod block_sizes;
mod collect;
mod dead_end;
mod keys;
mod own_limit;
mod parse;
#[cfg(test)]
mod parse_tests;
pub(crate) mod pickle;
mod recording;
mod rewind;
mod snapshot;
mod stacks;
mod story;
mod write;

pub use oomph_pytorch::{RecordedSettings, RecordedValue};

pub use dead_end::{DeadEnd, Holder};
pub use own_limit::OwnLimit;
pub use parse::SnapshotError;
pub use pickle::{Fault, PickleError, Spent};
pub use recording::{Gaps, Recording, RecordingError};
pub use rewind::Initial;
pub use snapshot::{Action, Annotation, Block, BlockState, Entry, Note, Segment, SegmentKind, Snapshot, Stage};
pub use stacks::{Frame, StackId, Stacks};

use std::path::Path;

use super::{Format, TraceError, file, pointer_log::name_of};
use oomph_base::Watch;

/// What the format is called.
pub const NAME: &str = "torch";

/// How a snapshot is recognised and opened. Of several devices the first is taken; [`Recording::open`] has the choice.
pub(super) const FORMAT: Format = Format {
    name: NAME,
    about: "PyTorch memory snapshot (torch.cuda.memory._dump_snapshot)",
    // PROTO and a protocol that exists.
    recognises: |head| matches!(head, [0x80, 0..=5, ..]),
    open: |path, watch| Ok(Box::new(Recording::open_watched(path, None, watch)?.trace)),
};

impl Snapshot {
    /// Reads a snapshot file, compressed or not.
    pub fn open(path: impl AsRef<Path>) -> Result<Snapshot, TraceError> {
        Snapshot::open_watched(path, Watch::NOBODY)
    }

    /// The same, with somebody who is told how far it is.
    pub fn open_watched(path: impl AsRef<Path>, watch: Watch<'_>) -> Result<Snapshot, TraceError> {
        let path = path.as_ref();
        Snapshot::read(file::open_watched(path, watch)?).map_err(|error| match error {
            SnapshotError::Pickle(PickleError { fault: Fault::Io(error), .. }) => file::read_failed(path, error),
            error => TraceError::Format { path: path.to_owned(), reason: error.to_string() },
        })
    }
}

impl Recording {
    /// Reads a snapshot file and tells what happened on one device; without a number on the first that something is
    /// known about.
    pub fn open(path: impl AsRef<Path>, device: Option<u32>) -> Result<Recording, TraceError> {
        Recording::open_watched(path, device, Watch::NOBODY)
    }

    /// The same, with somebody who is told how far it is.
    pub fn open_watched(
        path: impl AsRef<Path>,
        device: Option<u32>,
        watch: Watch<'_>,
    ) -> Result<Recording, TraceError> {
        let path = path.as_ref();
        let refused = |error: RecordingError| TraceError::Format { path: path.to_owned(), reason: error.to_string() };
        Snapshot::open_watched(path, watch)?.into_recording_watched(&name_of(path), device, watch).map_err(refused)
    }
}
