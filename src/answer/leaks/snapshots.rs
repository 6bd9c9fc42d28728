//! Snapshots taken one after the other: how memory stood in each.

use std::collections::BTreeMap;

use super::{
    growers::{GrownBy, Holding, Inventory},
    ledger::StepUse,
};
use crate::trace::torch::{BlockState, Recording, StackId};

/// Memory at the end of a recording, as the snapshot itself says.
#[must_use]
pub fn level(recording: &Recording, number: usize) -> StepUse {
    let segments = &recording.final_segments;
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0_u64, u64::saturating_add);
    let allocated = sum(&mut segments.iter().map(|segment| segment.allocated_size()));
    let reserved = sum(&mut segments.iter().map(|segment| segment.total_size));
    let free = sum(&mut segments.iter().map(|segment| segment.total_size.saturating_sub(segment.active_size())));
    let whole = segments.iter().filter(|segment| segment.active_size() == 0);
    let releasable = sum(&mut whole.map(|segment| segment.total_size));
    StepUse {
        step: number,
        kept_bytes: allocated,
        allocated_bytes: allocated,
        peak_allocated_bytes: allocated,
        reserved_bytes: reserved,
        releasable_bytes: releasable,
        stuck_bytes: free.saturating_sub(releasable),
        ..StepUse::default()
    }
}

/// What is alive at the end of each recording: by call site where all of them have stacks, otherwise by size.
#[must_use]
pub fn inventories(recordings: &[Recording]) -> Vec<Inventory> {
    let has_stacks = |recording: &Recording| live(recording).any(|block| block.1 != StackId::NONE);
    let by = if recordings.iter().all(has_stacks) { GrownBy::Site } else { GrownBy::Size };
    recordings.iter().map(|recording| inventory(recording, by)).collect()
}

fn inventory(recording: &Recording, by: GrownBy) -> Inventory {
    let mut holdings: BTreeMap<String, Holding> = BTreeMap::new();
    for (bytes, stack) in live(recording) {
        let name = match by {
            GrownBy::Site => recording.stacks.site(stack).unwrap_or_else(|| "unknown site".to_owned()),
            GrownBy::Tag | GrownBy::Size => bytes.to_string(),
        };
        let holding = holdings.entry(name).or_default();
        holding.bytes = holding.bytes.saturating_add(bytes);
        holding.blocks += 1;
    }
    Inventory { by, holdings }
}

/// What was asked for, and where, of every block that the program holds.
fn live(recording: &Recording) -> impl Iterator<Item = (u64, StackId)> {
    recording
        .final_segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Allocated)
        .map(|block| (block.requested_size, block.stack))
}
