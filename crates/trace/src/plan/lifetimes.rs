//! When each block of a trace lives, in as few moments as tell it.

use super::PlanError;
use crate::{CHUNK_EVENTS, Checker, Op, Place, Source};
use oomph_base::{
    packing::{BlockLifetime, peak_live_bytes},
    round_up,
};

/// The blocks of a trace in order of allocation.
///
/// Time is counted in sections: a run of allocs and the run of frees after it. All blocks of a section are alive between
/// the two, so two blocks meet in a section exactly if they meet in the trace, and there are at most as many sections as
/// blocks. A free takes effect at once, whatever its stream: a plan knows the order of events, and whoever carries it out
/// has to wait for streams where the order alone does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lifetimes {
    blocks: Vec<BlockLifetime>,
    sections: u32,
}

impl Lifetimes {
    /// Reads a source, with sizes rounded up to whole grains. Blocks that are never freed live to the end.
    pub fn read(source: &dyn Source, grain: u64) -> Result<Lifetimes, PlanError> {
        let mut reader = source.open()?;
        let mut checker = Checker::new();
        let mut chunk = Vec::with_capacity(CHUNK_EVENTS);
        let mut story = Reading::default();
        loop {
            let (events, tables) = reader.lend(&mut chunk)?;
            if events.is_empty() {
                return Ok(story.finish());
            }
            for event in events {
                let resident = checker.check(event, tables)?;
                match (event.op, resident) {
                    (Op::Alloc { slot, bytes, .. }, _) => story.alloc(slot as usize, round_up(bytes, grain))?,
                    (Op::Free { slot, .. }, Some(block)) if block.place == Place::Device => story.free(slot as usize),
                    _ => {}
                }
            }
        }
    }

    /// The blocks, in order of allocation.
    #[must_use]
    pub fn blocks(&self) -> &[BlockLifetime] {
        &self.blocks
    }

    /// How many sections there are.
    #[must_use]
    pub const fn sections(&self) -> u32 {
        self.sections
    }

    /// The largest sum of bytes alive in one section: no layout is lower.
    #[must_use]
    pub fn bound_bytes(&self) -> u64 {
        peak_live_bytes(&self.blocks)
    }
}

/// Lifetimes in the making.
#[derive(Default)]
struct Reading {
    blocks: Vec<BlockLifetime>,
    /// Which block lives in each slot of the trace.
    tenants: Vec<u32>,
    section: u32,
    frees_began: bool,
    total: u64,
}

impl Reading {
    fn alloc(&mut self, slot: usize, bytes: u64) -> Result<(), PlanError> {
        if self.frees_began {
            self.section += 1;
            self.frees_began = false;
        }
        self.total = self.total.checked_add(bytes).filter(|&sum| sum <= i64::MAX as u64).ok_or(PlanError::TooMuch)?;
        if slot >= self.tenants.len() {
            self.tenants.resize(slot + 1, 0);
        }
        self.tenants[slot] = u32::try_from(self.blocks.len()).map_err(|_| PlanError::TooMany)?;
        self.blocks.push(BlockLifetime { begin: self.section, end: u32::MAX, bytes });
        Ok(())
    }

    fn free(&mut self, slot: usize) {
        self.frees_began = true;
        self.blocks[self.tenants[slot] as usize].end = self.section + 1;
    }

    fn finish(mut self) -> Lifetimes {
        let sections = if self.blocks.is_empty() { 0 } else { self.section + 1 };
        for block in &mut self.blocks {
            block.end = block.end.min(sections);
        }
        Lifetimes { blocks: self.blocks, sections }
    }
}

/// Lifetimes that come from no trace, in order of their beginnings.
#[cfg(test)]
pub(super) fn told_by(blocks: Vec<BlockLifetime>) -> Lifetimes {
    let sections = blocks.iter().map(|block| block.end).max().unwrap_or(0);
    Lifetimes { blocks, sections }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::Bound;
    use crate::{TraceBuilder, arbitrary::traces};
    use oomph_base::{StreamId, TagId};

    #[test]
    fn a_section_ends_where_allocs_follow_frees() {
        let mut story = TraceBuilder::new();
        let mut alloc = |bytes| story.alloc(bytes, StreamId::DEFAULT, TagId(0));
        let (first, second) = (alloc(1), alloc(513));
        story.free(first);
        let third = story.alloc(2, StreamId::DEFAULT, TagId(0));
        story.free(third);
        story.free(second);
        story.alloc(3, StreamId::DEFAULT, TagId(0));
        let lifetimes = Lifetimes::read(&story.finish("sections"), 512).unwrap();
        let told: Vec<_> = lifetimes.blocks().iter().map(|block| (block.begin, block.end, block.bytes)).collect();
        assert_eq!(told, [(0, 1, 512), (0, 2, 1024), (1, 2, 512), (2, 3, 512)]);
        assert_eq!((lifetimes.sections(), lifetimes.bound_bytes()), (3, 1536));
    }

    #[test]
    fn more_bytes_than_addresses_are_refused() {
        let mut story = TraceBuilder::new();
        for _ in 0..2 {
            story.alloc(1 << 62, StreamId::DEFAULT, TagId(0));
        }
        let refusal = Lifetimes::read(&story.finish("huge"), 512).unwrap_err().to_string();
        assert_eq!(refusal, "the requests of this trace add up to more than 8 EiB: too much to be laid out");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn sections_keep_the_bound(trace in traces(80)) {
            if let Ok(lifetimes) = Lifetimes::read(&trace, 512) {
                prop_assert_eq!(lifetimes.bound_bytes(), Bound::of(&trace, 512).unwrap().rounded_bytes);
            }
        }
    }
}
