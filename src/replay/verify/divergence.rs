//! Where the model and a recording part: single actions, and pieces of the memory at the end.

use std::fmt;

use crate::{
    base::{Address, Bytes, StreamId},
    replay::list_of,
    strategy::{BlockState, StrategyEvent},
    trace::torch::{Action, TraceEntry},
};

/// One action: everything of a recorded entry that a model can foretell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ObservedAction {
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

impl ObservedAction {
    /// What an entry tells. What the driver says is free when a request fails is its own affair, and left out.
    pub(super) fn of(entry: &TraceEntry) -> ObservedAction {
        let address = if entry.action == Action::OutOfMemory { Address::NULL } else { entry.address };
        ObservedAction { action: entry.action, address, bytes: entry.size, stream: entry.stream }
    }

    /// What an event tells; nothing where PyTorch would record nothing.
    pub(crate) fn of_event(event: &StrategyEvent) -> Option<ObservedAction> {
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
        Some(ObservedAction { action, address, bytes, stream })
    }
}

impl fmt::Display for ObservedAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} bytes", self.action.name(), self.bytes)?;
        if self.address != Address::NULL {
            write!(f, " at {}", self.address)?;
        }
        write!(f, " on stream {}", self.stream)
    }
}

/// The first thing that the two do not agree on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "in", rename_all = "snake_case")]
pub enum Divergence {
    /// What happened in one call of the program.
    Entries {
        /// The first entry that differs, from 0.
        entry: usize,
        /// What was recorded from there to the end of the call.
        recorded: Vec<ObservedAction>,
        /// What the model did instead.
        modelled: Vec<ObservedAction>,
        /// What else the model has to say.
        complaint: Option<String>,
    },
    /// The memory at the end.
    Memory {
        /// What was recorded; nothing where there was no more.
        recorded: Option<LayoutPiece>,
        /// What the model has instead.
        modelled: Option<LayoutPiece>,
    },
    /// A figure.
    Figure {
        /// Which.
        what: &'static str,
        /// PyTorch's.
        recorded: u64,
        /// The model's.
        modelled: u64,
    },
}

fn listed(actions: &[ObservedAction]) -> String {
    list_of(actions, 4, ", then ", "nothing")
}

fn piece(piece: &Option<LayoutPiece>) -> String {
    piece.as_ref().map_or_else(|| "nothing".to_owned(), ToString::to_string)
}

impl Divergence {
    /// Two views of one call that starts at an entry, without what they have in common.
    pub(super) fn entries(
        start: usize,
        mut recorded: Vec<ObservedAction>,
        mut modelled: Vec<ObservedAction>,
        complaint: Option<String>,
    ) -> Divergence {
        let in_common = recorded.iter().zip(&modelled).take_while(|(a, b)| a == b).count();
        recorded.drain(..in_common);
        modelled.drain(..in_common);
        Divergence::Entries { entry: start + in_common, recorded, modelled, complaint }
    }
}

impl Divergence {
    /// The difference for a user of the program: amounts, without addresses.
    #[must_use]
    pub fn in_words(&self) -> String {
        match self {
            Divergence::Entries { entry, recorded, modelled, .. } => {
                let (recorded, modelled) = (amounts(recorded), amounts(modelled));
                if recorded == modelled {
                    format!("entry {entry}: PyTorch used other blocks than the model")
                } else {
                    format!("entry {entry}: PyTorch {recorded}, the model {modelled}")
                }
            }
            Divergence::Memory { .. } => "the memory at the end has other blocks than in the model".to_owned(),
            Divergence::Figure { what, recorded, modelled } => {
                format!("{what}: {recorded} in PyTorch, {modelled} in the model")
            }
        }
    }
}

/// What actions did to reserved memory, and whether the request was served.
fn amounts(actions: &[ObservedAction]) -> String {
    let sum = |kinds: [Action; 2]| {
        let bytes = actions.iter().filter(|seen| kinds.contains(&seen.action)).map(|seen| seen.bytes);
        bytes.fold(0_u64, u64::saturating_add)
    };
    let mut words = Vec::new();
    for (verb, bytes) in [
        ("released", sum([Action::SegmentFree, Action::SegmentUnmap])),
        ("reserved", sum([Action::SegmentAlloc, Action::SegmentMap])),
    ] {
        words.extend((bytes > 0).then(|| format!("{verb} {}", Bytes(bytes))));
    }
    let ran_out = actions.iter().any(|seen| seen.action == Action::OutOfMemory);
    words.extend(ran_out.then(|| "ran out of memory".to_owned()));
    if words.is_empty() { "reserved and released nothing".to_owned() } else { words.join(" and ") }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Divergence::Entries { entry, recorded, modelled, complaint } => {
                write!(f, "entry {entry}: recorded {}; model {}", listed(recorded), listed(modelled))?;
                complaint.iter().try_for_each(|complaint| write!(f, " ({complaint})"))
            }
            Divergence::Memory { recorded, modelled } => {
                write!(f, "memory at the end: recorded {}; model {}", piece(recorded), piece(modelled))
            }
            Divergence::Figure { what, recorded, modelled } => {
                write!(f, "{what}: recorded {recorded}; model {modelled}")
            }
        }
    }
}

/// A segment or block as both sides can describe it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LayoutPiece {
    /// Memory from the driver, or one mapped run.
    Segment {
        /// StartState.
        address: Address,
        /// Size.
        bytes: u64,
        /// Whose it is.
        stream: StreamId,
        /// Whether it serves large requests.
        large: bool,
        /// Its private pool.
        pool: (u64, u64),
        /// Whether it is mapped piece by piece.
        expandable: bool,
    },
    /// A part of it.
    Block {
        /// StartState.
        address: Address,
        /// Size.
        bytes: u64,
        /// What its present or last owner asked for.
        requested: u64,
        /// Whether it can be handed out.
        state: BlockState,
    },
}

impl LayoutPiece {
    /// Whether the two are one free block, of whose last owner the model knows nothing.
    pub(super) fn is_free_since_before(&self, modelled: &LayoutPiece) -> bool {
        match (self, modelled) {
            (
                LayoutPiece::Block { address, bytes, state: BlockState::Free, .. },
                LayoutPiece::Block { requested: 0, .. },
            ) => {
                let (address, bytes) = (*address, *bytes);
                *modelled == LayoutPiece::Block { address, bytes, requested: 0, state: BlockState::Free }
            }
            _ => false,
        }
    }
}

impl fmt::Display for LayoutPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayoutPiece::Segment { address, bytes, stream, large, pool, expandable } => {
                let size = if *large { "large" } else { "small" };
                let expandable = if *expandable { " expandable" } else { "" };
                write!(f, "{size}{expandable} segment of {bytes} bytes at {address} on stream {stream}")?;
                if *pool == (0, 0) { Ok(()) } else { write!(f, " in pool {pool:?}") }
            }
            LayoutPiece::Block { address, bytes, requested, state } => {
                let state = match state {
                    BlockState::Allocated => "allocated",
                    BlockState::Pending => "waiting",
                    BlockState::Lent => "lent",
                    BlockState::Free => "free",
                };
                write!(f, "{state} block of {bytes} bytes ({requested} requested) at {address}")
            }
        }
    }
}
