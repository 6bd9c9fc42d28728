//! Tries one method after the other, cheap ones first, until a layout is as low as it can be or the budget is spent.

use super::{
    Lifetimes, Method, Packing,
    exact::{self, Found},
    ground::{Group, clear_ground},
    improve::improve,
    online::place_online,
};
use oomph_base::packing::{
    BlockLifetime, BlockPlacer, GapChoice, PackingBudget, PlacementOrder, PlacementOutcome, peak_live_bytes,
};

/// Lays the blocks of a trace out in one stretch of memory, as low as the budget allows. The same lifetimes and budget
/// give the same layout everywhere.
#[must_use]
pub fn pack(lifetimes: &Lifetimes, mut budget: PackingBudget) -> Packing {
    let blocks = lifetimes.blocks();
    let bound_bytes = lifetimes.bound_bytes();
    let (grounded, mut groups) = clear_ground(blocks);
    let mut packing = Packing {
        offsets: vec![0; blocks.len()],
        height_bytes: 0,
        bound_bytes,
        proven_bytes: bound_bytes,
        method: Method::FirstFit(PlacementOrder::Birth),
    };
    for (block, offset) in grounded {
        packing.offsets[block as usize] = offset;
        packing.height_bytes = packing.height_bytes.max(offset + blocks[block as usize].bytes);
    }
    let mut waiting: usize = groups.iter().map(|group| group.members.len()).sum();
    // The group that decides the height comes first: once it is packed, the others need not be lower.
    groups.sort_by_key(|group| std::cmp::Reverse(group.base + bound_bytes_of(group, blocks)));
    for group in &groups {
        let members: Vec<BlockLifetime> = group.members.iter().map(|&block| blocks[block as usize]).collect();
        let enough = packing.proven_bytes.saturating_sub(group.base);
        let share = budget.portion(members.len(), waiting);
        waiting -= members.len();
        let mut part = Part::of(&members, enough, share);
        part.lower();
        budget.spend(share.steps() - part.budget.steps());
        for (&block, offset) in group.members.iter().zip(&part.offsets) {
            packing.offsets[block as usize] = group.base + offset;
        }
        packing.proven_bytes = packing.proven_bytes.max(group.base + part.proven);
        if group.base + part.height > packing.height_bytes {
            packing.height_bytes = group.base + part.height;
            packing.method = part.method;
        }
    }
    debug_assert_eq!(packing.check(lifetimes), Ok(()), "blocks lie on one another");
    packing
}

fn bound_bytes_of(group: &Group, blocks: &[BlockLifetime]) -> u64 {
    let members: Vec<BlockLifetime> = group.members.iter().map(|&block| blocks[block as usize]).collect();
    peak_live_bytes(&rebased(&members))
}

/// The same lifetimes, counted from the section in which the first begins.
fn rebased(blocks: &[BlockLifetime]) -> Vec<BlockLifetime> {
    let first = blocks.iter().map(|block| block.begin).min().unwrap_or(0);
    blocks.iter().map(|block| BlockLifetime { begin: block.begin - first, end: block.end - first, ..*block }).collect()
}

/// Blocks that are packed together, and their lowest layout so far.
struct Part {
    blocks: Vec<BlockLifetime>,
    offsets: Vec<u64>,
    height: u64,
    /// No layout is lower.
    proven: u64,
    /// A layout of this height need not be lowered.
    enough: u64,
    method: Method,
    budget: PackingBudget,
}

impl Part {
    /// The layout that costs next to nothing.
    fn of(members: &[BlockLifetime], enough: u64, budget: PackingBudget) -> Part {
        let blocks = rebased(members);
        let proven = peak_live_bytes(&blocks);
        let method = Method::FirstFit(PlacementOrder::Birth);
        let mut part =
            Part { offsets: Vec::new(), height: u64::MAX, proven, enough: enough.max(proven), method, budget, blocks };
        part.take(place_online(&part.blocks, GapChoice::Lowest), method);
        part
    }

    /// Keeps a layout if it is the lowest.
    fn take(&mut self, offsets: Vec<u64>, method: Method) {
        let tops = self.blocks.iter().zip(&offsets).map(|(block, offset)| offset + block.bytes);
        let height = tops.max().unwrap_or(0);
        if height < self.height {
            (self.offsets, self.height, self.method) = (offsets, height, method);
        }
    }

    fn is_low_enough(&self) -> bool {
        self.height <= self.enough || self.budget.steps() == 0
    }

    fn lower(&mut self) {
        if !self.is_low_enough() {
            self.take(place_online(&self.blocks, GapChoice::Narrowest), Method::BestFit(PlacementOrder::Birth));
        }
        self.by_orders();
        if self.blocks.len() <= exact::MOST_BLOCKS {
            self.by_search();
        }
        self.by_changes();
    }

    fn by_orders(&mut self) {
        if self.is_low_enough() {
            return;
        }
        let blocks = std::mem::take(&mut self.blocks);
        let mut placer = BlockPlacer::new(&blocks);
        let mut layouts = Vec::new();
        let mut lowest = self.height;
        for order in PlacementOrder::OFFLINE {
            let list = order.of(&blocks);
            for (fit, method) in
                [(GapChoice::Lowest, Method::FirstFit(order)), (GapChoice::Narrowest, Method::BestFit(order))]
            {
                placer.clear();
                if lowest > self.enough
                    && placer.place_all(&list, fit, lowest - 1, &mut self.budget) == PlacementOutcome::Done
                {
                    lowest = placer.height();
                    layouts.push((placer.offsets().to_vec(), method));
                }
            }
        }
        self.blocks = blocks;
        for (offsets, method) in layouts {
            self.take(offsets, method);
        }
    }

    /// Halves the distance between what is proven and what is reached, until they meet.
    fn by_search(&mut self) {
        let grain = self.blocks.iter().fold(0, |grain, block| greatest_common_divisor(grain, block.bytes)).max(1);
        let mut ceiling = self.enough;
        while !self.is_low_enough() {
            let mut share = self.budget.portion(1, 2);
            let before = share.steps();
            let found = search_in_turns(&self.blocks, ceiling, &mut share);
            self.budget.spend(before - share.steps());
            match found {
                Found::Layout(offsets) => self.take(offsets, Method::ExactSearch),
                Found::Nothing => {
                    self.proven = ceiling / grain * grain + grain;
                    self.enough = self.enough.max(self.proven);
                }
                Found::Spent => break,
            }
            ceiling = self.proven + (self.height - self.proven) / 2 / grain * grain;
        }
    }

    /// Starts from every order in turn, with more patience every time.
    fn by_changes(&mut self) {
        let starts: Vec<Vec<u32>> = PlacementOrder::OFFLINE.iter().map(|order| order.of(&self.blocks)).collect();
        for part in (1..=4).rev() {
            for start in &starts {
                if self.is_low_enough() {
                    return;
                }
                let mut share = self.budget.portion(1, part * starts.len());
                let before = share.steps();
                let lower = improve(&self.blocks, start, self.height, self.enough, &mut share);
                self.budget.spend(before - share.steps());
                if let Some((offsets, _)) = lower {
                    self.take(offsets, Method::LocalSearch);
                }
            }
        }
    }
}

/// Searches with one order of candidates after the other: where one is lost for years another finds at once.
fn search_in_turns(blocks: &[BlockLifetime], ceiling: u64, budget: &mut PackingBudget) -> Found {
    const TURNS: [PlacementOrder; 4] =
        [PlacementOrder::Area, PlacementOrder::Crowd, PlacementOrder::CrowdLifetime, PlacementOrder::Lifetime];
    let mut patience = 1_000_000;
    while budget.steps() > 0 {
        for order in TURNS {
            let mut share = PackingBudget::of_steps(budget.steps().min(patience));
            let before = share.steps();
            let found = exact::search(blocks, &order.of(blocks), ceiling, &mut share);
            budget.spend(before - share.steps());
            if found != Found::Spent {
                return found;
            }
        }
        patience *= 4;
    }
    Found::Spent
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::puzzles::cut_rectangle;
    use crate::{Trace, arbitrary::traces};

    #[test]
    fn small_puzzles_are_solved_and_the_solution_is_known_to_be_the_best() {
        for seed in 100..103 {
            let puzzle = cut_rectangle(seed, 40, 1 << 20);
            let packing = pack(&puzzle, PackingBudget::QUICK);
            packing.check(&puzzle).unwrap();
            assert_eq!(
                (packing.height_bytes, packing.is_optimal()),
                (1 << 20, true),
                "seed {seed}: {}",
                packing.method
            );
        }
    }

    #[test]
    fn whatever_the_budget_every_block_has_its_place() {
        let puzzle = cut_rectangle(5, 300, 1 << 20);
        let heights: Vec<u64> = [0, 100_000, 1_000_000, 10_000_000]
            .into_iter()
            .map(|steps| {
                let packing = pack(&puzzle, PackingBudget::of_steps(steps));
                packing.check(&puzzle).unwrap();
                assert_eq!(
                    packing,
                    pack(&puzzle, PackingBudget::of_steps(steps)),
                    "the same budget gives the same layout"
                );
                packing.height_bytes
            })
            .collect();
        assert!(heights[3] < heights[0], "{heights:?}");
        assert!(heights[3] >= 1 << 20);
    }

    #[test]
    fn nothing_needs_nothing() {
        let lifetimes = Lifetimes::read(&Trace::default(), 512).unwrap();
        let packing = pack(&lifetimes, PackingBudget::QUICK);
        assert_eq!((packing.height_bytes, packing.offsets.len(), packing.is_optimal()), (0, 0, true));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn no_two_blocks_lie_on_one_another_and_no_proof_is_false(trace in traces(120), steps in 0..200_000_u64) {
            if let Ok(lifetimes) = Lifetimes::read(&trace, 512) {
                let packing = pack(&lifetimes, PackingBudget::of_steps(steps));
                prop_assert_eq!(packing.check(&lifetimes), Ok(()));
                let tops = lifetimes.blocks().iter().zip(&packing.offsets).map(|(life, offset)| life.bytes + offset);
                prop_assert_eq!(packing.height_bytes, tops.max().unwrap_or(0));
                prop_assert!(packing.bound_bytes <= packing.proven_bytes && packing.proven_bytes <= packing.height_bytes);
                let better = pack(&lifetimes, PackingBudget::of_steps(steps * 4));
                prop_assert!(packing.proven_bytes <= better.height_bytes, "a layout below what was proven");
            }
        }
    }
}
