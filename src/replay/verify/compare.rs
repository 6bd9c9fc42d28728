//! Compares the model and a recording at the end: memory and counters.

use super::{Counters, Divergence, LayoutPiece, start::StartState};
use crate::{
    strategy::{Layout, Strategy},
    trace::torch::{Action, InitialMemory, Recording, Segment},
};

/// The segments of a layout, each followed by its blocks.
fn pieces(layout: &Layout) -> Vec<LayoutPiece> {
    let mut pieces = Vec::new();
    for segment in &layout.segments {
        pieces.push(LayoutPiece::Segment {
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            large: segment.pool == "large",
            pool: segment.pool_id,
            expandable: segment.mapped,
        });
        pieces.extend(segment.blocks.iter().map(|block| LayoutPiece::Block {
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
    start: &StartState,
    counters: &Counters,
) -> Result<(), Divergence> {
    let segments = &recording.final_segments;
    let began_late = start.beginning().is_some();
    let mut at_end = InitialMemory { segments: segments.clone(), ..InitialMemory::default() };
    at_end.segments.sort_by_key(|segment| segment.address);
    let recorded = pieces(&at_end.layout());
    let modelled = pieces(&model.layout().unwrap_or_default());
    let same = |(recorded, modelled): &(&LayoutPiece, &LayoutPiece)| {
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
