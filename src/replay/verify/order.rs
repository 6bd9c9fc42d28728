//! The order in which the segments from before a recording were created.
//!
//! From 2.12 on it decides between free blocks of one size (`BlockComparatorSize`), and no snapshot contains it. Drivers
//! mostly hand out descending addresses, so that order is tried first, then the ascending one. Where the model takes a block
//! of one segment and PyTorch took one of another, the other segment is older: that is learned.

use super::{Divergence, ObservedAction, start::StartState};
use crate::{base::Address, pytorch::TieOrder, strategy::SegmentView, trace::torch::Action};

/// What is known about the order.
pub(super) struct CreationOrder {
    /// Whether it matters.
    matters: bool,
    /// The start of a segment, and that of a younger one.
    pairs: Vec<(Address, Address)>,
}

impl CreationOrder {
    pub(super) fn of(start: &StartState, ties: TieOrder) -> CreationOrder {
        let ordinary = start.layout.segments.iter().filter(|segment| !segment.mapped).count();
        CreationOrder { matters: ties != TieOrder::Address && ordinary > 1, pairs: Vec::new() }
    }

    /// A possible reason for a divergence.
    pub(super) fn doubt(&self, start: &StartState) -> Option<String> {
        let ordinary = start.layout.segments.iter().filter(|segment| !segment.mapped).count();
        self.matters.then(|| {
            format!(
                "it began in the middle: the order in which {ordinary} segments were created before is unknown, and decides \
                 between free blocks of one size"
            )
        })
    }

    /// Learns from a divergence, and puts the segments of the start in the new order. Returns whether there was something
    /// to learn.
    pub(super) fn learn(&mut self, divergence: &Divergence, start: &mut StartState) -> bool {
        let Divergence::Entries { recorded, modelled, .. } = divergence else { return false };
        let (Some(recorded), Some(modelled)) = (recorded.first(), modelled.first()) else { return false };
        if !self.matters || !are_alternatives(recorded, modelled) {
            return false;
        }
        let segment = |at: Address| {
            let holds = |segment: &&SegmentView| (0..segment.bytes).contains(&at.0.wrapping_sub(segment.address.0));
            let found = start.layout.segments.iter().find(holds);
            found.filter(|segment| !segment.mapped).map(|segment| segment.address)
        };
        let (Some(older), Some(younger)) = (segment(recorded.address), segment(modelled.address)) else { return false };
        if older == younger || self.pairs.contains(&(older, younger)) {
            return false;
        }
        self.pairs.push((older, younger));
        self.arrange(start)
    }

    /// Puts the segments in an order that fits all pairs: that of descending or ascending addresses, whichever fits more of
    /// them, with the older segment of each pair first. Returns whether there is one.
    fn arrange(&self, start: &mut StartState) -> bool {
        let descending = self.pairs.iter().filter(|(older, younger)| older > younger).count();
        let mut waiting: Vec<Address> =
            start.layout.segments.iter().filter(|segment| !segment.mapped).map(|segment| segment.address).collect();
        waiting.sort_unstable();
        if 2 * descending >= self.pairs.len() {
            waiting.reverse();
        }
        let mut created: Vec<Address> = Vec::with_capacity(waiting.len());
        while !waiting.is_empty() {
            let is_free = |address: &Address| {
                !self.pairs.iter().any(|(older, younger)| younger == address && waiting.contains(older))
            };
            let Some(place) = waiting.iter().position(is_free) else { return false };
            created.push(waiting.remove(place));
        }
        // The model creates ordinary segments from the last one to the first one.
        let rank = |address: Address, mapped: bool| match mapped {
            true => None,
            false => created.iter().rev().position(|&other| other == address),
        };
        start.layout.segments.sort_by_key(|segment| rank(segment.address, segment.mapped));
        start.memory.segments.sort_by_key(|segment| rank(segment.address, segment.expandable));
        true
    }
}

/// Whether two actions differ in the block that they take.
fn are_alternatives(recorded: &ObservedAction, modelled: &ObservedAction) -> bool {
    let takes = matches!(recorded.action, Action::Alloc | Action::SegmentFree);
    takes
        && recorded.action == modelled.action
        && recorded.bytes == modelled.bytes
        && recorded.stream == modelled.stream
        && recorded.address != modelled.address
}
