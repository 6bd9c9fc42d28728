//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`): read, written, and made into traces.
//!
//! [`Snapshot`] is the model of the file. [`Recording`] is what a replay needs of one device: the story, what was
//! witnessed, the memory before and after, and an account of what the file cannot tell.

mod collect;
mod keys;
mod parse;
pub(in crate::trace) mod pickle;
mod snapshot;
mod stacks;

pub use parse::SnapshotError;
pub use pickle::{Fault, PickleError, Spent};
pub use snapshot::{
    Action, Annotation, Block, BlockState, Entry, Note, Segment, SegmentKind, Setting, Settings, Snapshot, Stage,
};
pub use stacks::{Frame, StackId, Stacks};
