//! Holds the model's memory and counters at the end against what the recording says.

use std::fmt;

use super::{Counters, Divergence, beginning::Start};
use crate::{
    base::{Address, StreamId},
    strategy::{BlockState, Layout, Strategy},
    trace::torch::{self, Action, Recording, Segment, SegmentKind},
};

/// A segment or block as both sides can describe it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Piece {
    /// Memory from the driver, or one mapped run.
    Segment {
        /// Start.
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
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// What its present or last owner asked for.
        requested: u64,
        /// Whether it can be handed out.
        state: BlockState,
    },
}

impl Piece {
    /// Whether the two are one free block, of whose last owner the model knows nothing.
    fn is_free_since_before(&self, modelled: &Piece) -> bool {
        match (self, modelled) {
            (Piece::Block { address, bytes, state: BlockState::Free, .. }, Piece::Block { requested: 0, .. }) => {
                let (address, bytes) = (*address, *bytes);
                *modelled == Piece::Block { address, bytes, requested: 0, state: BlockState::Free }
            }
            _ => false,
        }
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Piece::Segment { address, bytes, stream, large, pool, expandable } => {
                let size = if *large { "large" } else { "small" };
                let expandable = if *expandable { " expandable" } else { "" };
                write!(f, "{size}{expandable} segment of {bytes} bytes at {address} on stream {stream}")?;
                if *pool == (0, 0) { Ok(()) } else { write!(f, " in pool {pool:?}") }
            }
            Piece::Block { address, bytes, requested, state } => {
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

/// The memory of a recording, in address order.
pub(super) fn recorded_memory(segments: &[Segment]) -> Vec<Piece> {
    let mut ordered: Vec<&Segment> = segments.iter().collect();
    ordered.sort_by_key(|segment| segment.address);
    let mut pieces = Vec::new();
    for segment in ordered {
        pieces.push(Piece::Segment {
            address: segment.address,
            bytes: segment.total_size,
            stream: segment.stream,
            large: segment.kind == SegmentKind::Large,
            pool: segment.pool,
            expandable: segment.expandable,
        });
        pieces.extend(segment.blocks.iter().map(|block| Piece::Block {
            address: block.address,
            bytes: block.size,
            requested: block.requested_size,
            state: match block.state {
                torch::BlockState::Allocated => BlockState::Allocated,
                torch::BlockState::PendingFree => BlockState::Pending,
                torch::BlockState::Inactive => BlockState::Free,
            },
        }));
    }
    pieces
}

/// The memory of the model, in address order.
fn modelled_memory(layout: &Layout) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for segment in &layout.segments {
        pieces.push(Piece::Segment {
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            large: segment.pool == "large",
            pool: segment.pool_id,
            expandable: segment.mapped,
        });
        pieces.extend(segment.blocks.iter().map(|block| Piece::Block {
            address: block.address,
            bytes: block.size,
            requested: block.requested,
            state: block.state,
        }));
    }
    pieces
}

/// Compares what there is at the end, and PyTorch's counters where they are known. Of a recording that began in the middle
/// the counters over its whole time are not: peaks, retries and failures may lie before it.
pub(super) fn compare(
    model: &dyn Strategy,
    recording: &Recording,
    start: &Start,
    counters: &Counters,
) -> Result<(), Divergence> {
    let segments = &recording.final_segments;
    let began_late = start.told().is_some();
    let recorded = recorded_memory(segments);
    let modelled = modelled_memory(&model.layout().unwrap_or_default());
    let same = |(recorded, modelled): &(&Piece, &Piece)| {
        recorded == modelled || began_late && recorded.is_free_since_before(modelled)
    };
    let place = recorded.iter().zip(&modelled).take_while(same).count();
    if place < recorded.len().max(modelled.len()) {
        let (recorded, modelled) = (recorded.get(place).cloned(), modelled.get(place).cloned());
        return Err(Divergence::Memory { recorded, modelled });
    }
    let entries = recording.witnessed[start.entry..].iter();
    let recorded_ooms = entries.filter(|entry| entry.action == Action::OutOfMemory).count() as u64;
    let over_time = |counter: Option<u64>| counter.filter(|_| !began_late);
    let stats = model.stats();
    let details = model.details();
    let detail = |name: &str| details.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value);
    let sum = |of: fn(&Segment) -> u64| Some(segments.iter().map(of).sum());
    let figures = [
        ("allocated at the end", sum(Segment::allocated_size), stats.current.allocated),
        ("reserved at the end", sum(|segment| segment.total_size), stats.current.reserved),
        ("out of memory", Some(recorded_ooms), stats.ooms),
        ("peak allocated", over_time(counters.peak_allocated), stats.peak.allocated),
        ("peak reserved", over_time(counters.peak_reserved), stats.peak.reserved),
        ("num_alloc_retries", over_time(counters.alloc_retries), stats.retries),
        ("num_ooms", over_time(counters.ooms), stats.ooms),
        ("segments at the end", counters.final_segments, detail("segment.all.current")),
        ("inactive split bytes at the end", counters.final_inactive_split, detail("inactive_split_bytes.all.current")),
    ];
    for (what, recorded, modelled) in figures {
        if let Some(recorded) = recorded.filter(|&recorded| recorded != modelled) {
            return Err(Divergence::Figure { what, recorded, modelled });
        }
    }
    Ok(())
}
