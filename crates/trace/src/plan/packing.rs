//! A layout: an offset for every block, and what is known about it.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::Lifetimes;
use oomph_base::packing::PlacementOrder;

/// How a layout was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Each block in the lowest gap, in this order.
    FirstFit(PlacementOrder),
    /// Each block in the narrowest gap, in this order.
    BestFit(PlacementOrder),
    /// An order changed until it fitted.
    LocalSearch,
    /// All layouts that matter were tried.
    ExactSearch,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::FirstFit(order) => write!(f, "first fit by {}", order.name()),
            Method::BestFit(order) => write!(f, "best fit by {}", order.name()),
            Method::LocalSearch => f.write_str("local search"),
            Method::ExactSearch => f.write_str("exact search"),
        }
    }
}

/// A layout of all blocks of a trace in one stretch of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Where each block lies, in order of allocation.
    pub offsets: Vec<u64>,
    /// Where the highest block ends.
    pub height_bytes: u64,
    /// The largest sum of bytes alive at one time.
    pub bound_bytes: u64,
    /// No layout is lower than this, as far as it was proven: the bound, or more where all lower layouts were tried.
    pub proven_bytes: u64,
    /// How the part of the layout that reaches highest was found.
    pub method: Method,
}

/// A block of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedBlock {
    /// Its bytes, in whole grains.
    pub bytes: u64,
    /// Where it lies.
    pub offset: u64,
}

/// Two blocks that lie on one another while both are alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("blocks {first} and {second} lie on one another while both are alive")]
pub struct Overlap {
    /// One of them, by order of allocation.
    pub first: usize,
    /// The other.
    pub second: usize,
}

impl Packing {
    /// Whether no layout can be lower.
    #[must_use]
    pub const fn is_optimal(&self) -> bool {
        self.height_bytes == self.proven_bytes
    }

    /// How much higher than the bound it is, as a share of the bound: 0.01 is one percent.
    #[must_use]
    pub fn over_bound(&self) -> f64 {
        if self.bound_bytes == 0 { 0.0 } else { self.height_bytes as f64 / self.bound_bytes as f64 - 1.0 }
    }

    /// The plan for whoever carries it out: the blocks in order of allocation.
    #[must_use]
    pub fn plan(&self, lifetimes: &Lifetimes) -> Vec<PlannedBlock> {
        let blocks = lifetimes.blocks().iter().zip(&self.offsets);
        blocks.map(|(life, &offset)| PlannedBlock { bytes: life.bytes, offset }).collect()
    }

    /// Makes sure that no two blocks lie on one another, by letting them come and go once.
    pub fn check(&self, lifetimes: &Lifetimes) -> Result<(), Overlap> {
        let blocks = lifetimes.blocks();
        let mut ends: Vec<u32> = (0..blocks.len() as u32).collect();
        ends.sort_by_key(|&block| blocks[block as usize].end);
        let mut ends = ends.into_iter().peekable();
        // Live blocks by offset.
        let mut live: BTreeMap<u64, usize> = BTreeMap::new();
        for (second, life) in blocks.iter().enumerate() {
            while let Some(gone) = ends.next_if(|&block| blocks[block as usize].end <= life.begin) {
                live.remove(&self.offsets[gone as usize]);
            }
            let offset = self.offsets[second];
            let below = live.range(..=offset).next_back();
            if let Some((&below, &first)) = below
                && below + blocks[first].bytes > offset
            {
                return Err(Overlap { first, second });
            }
            if let Some((_, &first)) = live.range(offset..offset + life.bytes).next() {
                return Err(Overlap { first, second });
            }
            live.insert(offset, second);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TraceBuilder;
    use oomph_base::{StreamId, TagId};

    /// Two blocks that meet, and a third that meets only the second.
    fn lifetimes() -> Lifetimes {
        let mut story = TraceBuilder::new();
        let first = story.alloc(512, StreamId::DEFAULT, TagId(0));
        story.alloc(1024, StreamId::DEFAULT, TagId(0));
        story.free(first);
        story.alloc(512, StreamId::DEFAULT, TagId(0));
        Lifetimes::read(&story.finish("three"), 512).unwrap()
    }

    fn judge(offsets: [u64; 3]) -> Result<(), (usize, usize)> {
        let packing = Packing {
            offsets: offsets.to_vec(),
            height_bytes: 0,
            bound_bytes: 0,
            proven_bytes: 0,
            method: Method::LocalSearch,
        };
        packing.check(&lifetimes()).map_err(|overlap| (overlap.first, overlap.second))
    }

    #[test]
    fn blocks_may_share_an_address_only_when_they_never_meet() {
        assert_eq!(judge([0, 512, 0]), Ok(()));
        assert_eq!(judge([0, 511, 0]), Err((0, 1)));
        assert_eq!(judge([512, 0, 1024]), Err((0, 1)));
        assert_eq!(judge([0, 512, 512]), Err((1, 2)));
        assert_eq!(judge([0, 512, 1000]), Err((1, 2)));
        assert_eq!(judge([0, 512, 1536]), Ok(()));
    }

    #[test]
    fn a_plan_is_in_order_of_allocation() {
        let packing = super::super::pack(&lifetimes(), super::super::PackingBudget::QUICK);
        let plan = packing.plan(&lifetimes());
        assert_eq!(plan.iter().map(|block| block.bytes).collect::<Vec<_>>(), [512, 1024, 512]);
        assert_eq!(plan[0].offset, plan[2].offset);
        assert_eq!((packing.height_bytes, packing.over_bound(), packing.is_optimal()), (1536, 0.0, true));
    }
}
