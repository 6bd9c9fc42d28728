//! What an allocator was seen to do, in a form in which a recording and the model can be held against each other.

use std::fmt;

use crate::{
    base::{Address, StreamId},
    strategy::StrategyEvent,
    trace::torch::{Action, Entry},
};

/// One action: everything of a recorded entry that a model can foretell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Sighting {
    /// What happened.
    #[serde(serialize_with = "name_of")]
    pub action: Action,
    /// Where; zero for a request that failed.
    pub address: Address,
    /// How many bytes: the request, rounded where it failed, or whole segments.
    pub bytes: u64,
    /// On which stream.
    pub stream: StreamId,
}

fn name_of<S: serde::Serializer>(action: &Action, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(action.name())
}

impl Sighting {
    /// What an entry tells. What the driver says is free when a request fails is its own affair, and left out.
    pub(super) fn of(entry: &Entry) -> Sighting {
        let address = if entry.action == Action::OutOfMemory { Address::NULL } else { entry.address };
        Sighting { action: entry.action, address, bytes: entry.size, stream: entry.stream }
    }

    /// What an event tells; nothing where PyTorch would record nothing.
    pub(super) fn of_event(event: &StrategyEvent) -> Option<Sighting> {
        let (action, address, bytes, stream) = match *event {
            StrategyEvent::SegmentAlloc { address, bytes, stream } => (Action::SegmentAlloc, address, bytes, stream),
            StrategyEvent::SegmentFree { address, bytes, stream } => (Action::SegmentFree, address, bytes, stream),
            StrategyEvent::SegmentMap { address, bytes, stream } => (Action::SegmentMap, address, bytes, stream),
            StrategyEvent::SegmentUnmap { address, bytes, stream } => (Action::SegmentUnmap, address, bytes, stream),
            StrategyEvent::FreeCompleted { address, requested, stream } => {
                (Action::FreeCompleted, address, requested, stream)
            }
            StrategyEvent::OutOfMemory { rounded, stream, .. } => (Action::OutOfMemory, Address::NULL, rounded, stream),
            StrategyEvent::Retry { .. } => return None,
        };
        Some(Sighting { action, address, bytes, stream })
    }
}

impl fmt::Display for Sighting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} bytes", self.action.name(), self.bytes)?;
        if self.address != Address::NULL {
            write!(f, " at {}", self.address)?;
        }
        write!(f, " on stream {}", self.stream)
    }
}
