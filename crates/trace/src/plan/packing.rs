//! Packs the blocks of a trace: tries cheap methods first, until the layout is optimal or the budget is spent.

#[cfg(any(test, feature = "testing"))]
use std::collections::BTreeMap;
use std::fmt;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::{
    Lifetimes,
    exact::{self, ExactSearcher, SearchOutcome},
};
use oomph_base::packing::{
    BlockLifetime, BlockPlacer, GapChoice, PackingBudget, PlacementOrder, PlacementOutcome, find_gap, peak_live_bytes,
};

/// The method that found a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PackingMethod {
    /// Each block in the lowest gap, in this order.
    FirstFit(PlacementOrder),
    /// Each block in the narrowest gap, in this order.
    BestFit(PlacementOrder),
    /// An order that was changed until the blocks fitted.
    LocalSearch,
    /// An exhaustive search.
    ExactSearch,
}

impl fmt::Display for PackingMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackingMethod::FirstFit(order) => write!(f, "first fit by {}", order.name()),
            PackingMethod::BestFit(order) => write!(f, "best fit by {}", order.name()),
            PackingMethod::LocalSearch => f.write_str("local search"),
            PackingMethod::ExactSearch => f.write_str("exact search"),
        }
    }
}

/// A layout of all blocks of a trace in one range of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The offset of each block, in order of allocation.
    pub offsets: Vec<u64>,
    /// The end of the highest block.
    pub height_bytes: u64,
    /// The peak of live bytes.
    pub bound_bytes: u64,
    /// The proven lower limit of any layout: the bound, or more after an exhaustive search.
    pub proven_bytes: u64,
    /// The method that placed the highest part.
    pub method: PackingMethod,
}

impl Packing {
    /// Whether the layout is proven to be the lowest.
    #[must_use]
    pub const fn is_optimal(&self) -> bool {
        self.height_bytes == self.proven_bytes
    }

    /// The excess over the bound, as a share of the bound: 0.01 is one percent.
    #[must_use]
    pub fn over_bound(&self) -> f64 {
        if self.bound_bytes == 0 { 0.0 } else { self.height_bytes as f64 / self.bound_bytes as f64 - 1.0 }
    }
}

#[cfg(any(test, feature = "testing"))]
/// Two live blocks that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("blocks {first} and {second} lie on one another while both are alive")]
pub struct PackingOverlap {
    /// The first block, by order of allocation.
    pub first: usize,
    /// The second block.
    pub second: usize,
}

#[cfg(any(test, feature = "testing"))]
impl Packing {
    /// Checks that no two live blocks overlap.
    pub fn check(&self, lifetimes: &Lifetimes) -> Result<(), PackingOverlap> {
        let blocks = &lifetimes.blocks;
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
                return Err(PackingOverlap { first, second });
            }
            if let Some((_, &first)) = live.range(offset..offset + life.bytes).next() {
                return Err(PackingOverlap { first, second });
            }
            live.insert(offset, second);
        }
        Ok(())
    }
}

/// Packs the blocks of a trace into one range of memory, as low as the budget allows. The same lifetimes and budget
/// give the same layout on every machine.
#[must_use]
pub fn pack(lifetimes: &Lifetimes, mut budget: PackingBudget) -> Packing {
    let blocks = &lifetimes.blocks;
    let bound_bytes = lifetimes.bound_bytes();
    let (at_bottom, mut groups) = split_groups(blocks);
    let mut packing = Packing {
        offsets: vec![0; blocks.len()],
        height_bytes: 0,
        bound_bytes,
        proven_bytes: bound_bytes,
        method: PackingMethod::FirstFit(PlacementOrder::Birth),
    };
    for (block, offset) in at_bottom {
        packing.offsets[block as usize] = offset;
        packing.height_bytes = packing.height_bytes.max(offset + blocks[block as usize].bytes);
    }
    let mut waiting: usize = groups.iter().map(|group| group.members.len()).sum();
    // The group with the largest bound comes first: the others need not be lower than its height.
    groups.sort_by_key(|group| std::cmp::Reverse(group.base + bound_bytes_of(group, blocks)));
    for group in &groups {
        let members: Vec<BlockLifetime> = group.members.iter().map(|&block| blocks[block as usize]).collect();
        let enough = packing.proven_bytes.saturating_sub(group.base);
        let share = budget.portion(members.len(), waiting);
        waiting -= members.len();
        let mut part = GroupPacking::of(&members, enough, share);
        part.lower();
        budget.spend(share.steps - part.budget.steps);
        for (&block, offset) in group.members.iter().zip(&part.offsets) {
            packing.offsets[block as usize] = group.base + offset;
        }
        packing.proven_bytes = packing.proven_bytes.max(group.base + part.proven);
        if group.base + part.height > packing.height_bytes {
            packing.height_bytes = group.base + part.height;
            packing.method = part.method;
        }
    }
    #[cfg(any(test, feature = "testing"))]
    assert_eq!(packing.check(lifetimes), Ok(()), "blocks lie on one another");
    packing
}

fn bound_bytes_of(group: &BlockGroup, blocks: &[BlockLifetime]) -> u64 {
    let members: Vec<BlockLifetime> = group.members.iter().map(|&block| blocks[block as usize]).collect();
    peak_live_bytes(&rebased(&members))
}

/// The same lifetimes, with the first section as time 0.
fn rebased(blocks: &[BlockLifetime]) -> Vec<BlockLifetime> {
    let first = blocks.iter().map(|block| block.begin).min().unwrap_or(0);
    blocks.iter().map(|block| BlockLifetime { begin: block.begin - first, end: block.end - first, ..*block }).collect()
}

/// Blocks that are packed together, and their lowest layout so far.
struct GroupPacking {
    blocks: Vec<BlockLifetime>,
    offsets: Vec<u64>,
    height: u64,
    /// The proven lower limit.
    proven: u64,
    /// A layout of this height is low enough.
    enough: u64,
    method: PackingMethod,
    budget: PackingBudget,
}

impl GroupPacking {
    /// The cheapest layout.
    fn of(members: &[BlockLifetime], enough: u64, budget: PackingBudget) -> GroupPacking {
        let blocks = rebased(members);
        let proven = peak_live_bytes(&blocks);
        let method = PackingMethod::FirstFit(PlacementOrder::Birth);
        let mut part = GroupPacking {
            offsets: Vec::new(),
            height: u64::MAX,
            proven,
            enough: enough.max(proven),
            method,
            budget,
            blocks,
        };
        part.take(place_online(&part.blocks, GapChoice::Lowest), method);
        part
    }

    /// Keeps a layout if it is the lowest.
    fn take(&mut self, offsets: Vec<u64>, method: PackingMethod) {
        let tops = self.blocks.iter().zip(&offsets).map(|(block, offset)| offset + block.bytes);
        let height = tops.max().unwrap_or(0);
        if height < self.height {
            (self.offsets, self.height, self.method) = (offsets, height, method);
        }
    }

    fn is_low_enough(&self) -> bool {
        self.height <= self.enough || self.budget.steps == 0
    }

    fn lower(&mut self) {
        if !self.is_low_enough() {
            self.take(place_online(&self.blocks, GapChoice::Narrowest), PackingMethod::BestFit(PlacementOrder::Birth));
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
            for (fit, method) in [
                (GapChoice::Lowest, PackingMethod::FirstFit(order)),
                (GapChoice::Narrowest, PackingMethod::BestFit(order)),
            ] {
                placer.clear();
                if lowest > self.enough
                    && placer.place_all(&list, fit, lowest - 1, &mut self.budget) == PlacementOutcome::Done
                {
                    lowest = placer.height();
                    layouts.push((placer.offsets.clone(), method));
                }
            }
        }
        self.blocks = blocks;
        for (offsets, method) in layouts {
            self.take(offsets, method);
        }
    }

    /// Searches at the bound, then bisects between the highest ceiling without a layout and the height reached.
    fn by_search(&mut self) {
        if self.is_low_enough() {
            return;
        }
        let grain = self.blocks.iter().fold(0, |grain, block| greatest_common_divisor(grain, block.bytes)).max(1);
        let kept = self.budget.portion(1, KEPT_FROM_SEARCH).steps;
        let mut searcher = ExactSearcher::new(&self.blocks);
        let (mut ceiling, mut missed) = (self.enough, self.enough);
        while !self.is_low_enough() && ceiling < self.height && self.budget.steps > kept {
            let mut share = self.budget.portion(1, 2);
            let before = share.steps;
            let found = search_in_turns(&mut searcher, &self.blocks, ceiling, &mut share);
            self.budget.spend(before - share.steps);
            match found {
                SearchOutcome::Found(offsets) => self.take(offsets, PackingMethod::ExactSearch),
                SearchOutcome::Nothing => {
                    missed = ceiling;
                    self.proven = ceiling / grain * grain + grain;
                    self.enough = self.enough.max(self.proven);
                }
                SearchOutcome::Spent => missed = ceiling,
            }
            ceiling = missed + ((self.height - missed) / 2 / grain).max(1) * grain;
        }
    }

    /// Local search from every order, with a growing budget.
    fn by_changes(&mut self) {
        let starts: Vec<Vec<u32>> = PlacementOrder::OFFLINE.iter().map(|order| order.of(&self.blocks)).collect();
        for part in (1..=4).rev() {
            for start in &starts {
                if self.is_low_enough() {
                    return;
                }
                let mut share = self.budget.portion(1, part * starts.len());
                let before = share.steps;
                let lower = improve(&self.blocks, start, self.height, self.enough, &mut share);
                self.budget.spend(before - share.steps);
                if let Some((offsets, _)) = lower {
                    self.take(offsets, PackingMethod::LocalSearch);
                }
            }
        }
    }
}

/// Local search gets at least this part of the budget.
const KEPT_FROM_SEARCH: usize = 16;
/// The first searches may look at all blocks this often.
const PASSES: u64 = 1000;

/// Searches with several orders in turn, each with a limit of its own: one order may succeed at once where another does
/// not end. After the first turn, the orders are changed a little.
fn search_in_turns(
    searcher: &mut ExactSearcher,
    blocks: &[BlockLifetime],
    ceiling: u64,
    budget: &mut PackingBudget,
) -> SearchOutcome {
    const TURNS: [PlacementOrder; 4] =
        [PlacementOrder::Area, PlacementOrder::Crowd, PlacementOrder::CrowdLifetime, PlacementOrder::Lifetime];
    let mut dice = ChaCha8Rng::seed_from_u64(SEED);
    let orders = TURNS.map(|order| order.of(blocks));
    let patience = PASSES * searcher.steps_of_a_pass();
    let mut turn = 0;
    while budget.steps > 0 {
        turn += 1;
        for order in &orders {
            let changed = if turn == 1 { order.clone() } else { nearly(order, &mut dice) };
            let mut share = PackingBudget::of_steps(budget.steps.min(patience.saturating_mul(restart_length(turn))));
            let before = share.steps;
            let found = searcher.search(&changed, ceiling, &mut share);
            budget.spend(before - share.steps);
            if found != SearchOutcome::Spent {
                return found;
            }
        }
    }
    SearchOutcome::Spent
}

/// The same order, except that no block passes another that is more than a seventh of the list behind it.
fn nearly(order: &[u32], dice: &mut ChaCha8Rng) -> Vec<u32> {
    let reach = order.len() as u64 / 7 + 1;
    let mut keyed: Vec<(u64, u32)> =
        order.iter().enumerate().map(|(place, &block)| (place as u64 + dice.next_u64() % reach, block)).collect();
    keyed.sort_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, block)| block).collect()
}

/// The sequence 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..., from turn 1: of restarts whose best length is unknown, it wastes
/// little at any length (Luby, Sinclair and Zuckerman, 1993).
fn restart_length(turn: u64) -> u64 {
    let above = (turn + 1).next_power_of_two();
    if above == turn + 1 { above / 2 } else { restart_length(turn + 1 - above / 2) }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Deeper nests are packed as one group.
const DEEPEST: u32 = 32;

/// Blocks that must be packed together, above a base.
#[derive(Debug, PartialEq, Eq)]
struct BlockGroup {
    /// Indices of the blocks, in order of allocation.
    members: Vec<u32>,
    /// The offset of the base.
    base: u64,
}

/// Places the blocks that can lie at the bottom, and splits the others into groups that can be packed separately.
///
/// A block that lives as long as everything around it can lie at the bottom without loss. Without it, the others may
/// split into groups that never overlap in time. In a training run these blocks are the weights, and the rest is often
/// one group per step.
fn split_groups(blocks: &[BlockLifetime]) -> (Vec<(u32, u64)>, Vec<BlockGroup>) {
    let mut at_bottom = Vec::new();
    let mut groups = Vec::new();
    let mut open: Vec<(BlockGroup, u32)> = Vec::new();
    split((0..blocks.len() as u32).collect(), blocks, |members| open.push((BlockGroup { members, base: 0 }, 0)));
    while let Some((group, depth)) = open.pop() {
        let lives = || group.members.iter().map(|&block| &blocks[block as usize]);
        let begin = lives().map(|life| life.begin).min().unwrap_or(0);
        let end = lives().map(|life| life.end).max().unwrap_or(0);
        let spans = |block: &u32| {
            let life = &blocks[*block as usize];
            (life.begin, life.end) == (begin, end)
        };
        let (lasting, others): (Vec<u32>, Vec<u32>) = group.members.iter().partition(|block| spans(block));
        if lasting.is_empty() || depth == DEEPEST {
            groups.push(group);
            continue;
        }
        let mut base = group.base;
        for block in lasting {
            at_bottom.push((block, base));
            base += blocks[block as usize].bytes;
        }
        split(others, blocks, |members| open.push((BlockGroup { members, base }, depth + 1)));
    }
    groups.sort_by_key(|group| group.members.first().copied());
    (at_bottom, groups)
}

/// Splits a list of blocks, in order of their beginnings, at times without live blocks.
fn split(members: Vec<u32>, blocks: &[BlockLifetime], mut take: impl FnMut(Vec<u32>)) {
    let mut group: Vec<u32> = Vec::new();
    let mut end = 0;
    for block in members {
        let life = &blocks[block as usize];
        if life.begin >= end && !group.is_empty() {
            take(std::mem::take(&mut group));
        }
        end = end.max(life.end);
        group.push(block);
    }
    if !group.is_empty() {
        take(group);
    }
}

/// Fixed, so that a layout is reproducible.
const SEED: u64 = 7;
/// The approximate cost of removing a block.
const STEPS_OF_REMOVAL: u64 = 16;
/// Each new ceiling is this fraction of the distance to the target lower.
const BITE: u64 = 8;

/// Local search for a layout lower than `height`. Stops at `target`.
///
/// It places blocks under a ceiling slightly below the best height, and moves a block that hits the ceiling towards the
/// front of the order. The order before its new position is unchanged, so only the blocks behind it are placed again.
fn improve(
    blocks: &[BlockLifetime],
    start: &[u32],
    height: u64,
    target: u64,
    budget: &mut PackingBudget,
) -> Option<(Vec<u64>, u64)> {
    let mut dice = ChaCha8Rng::seed_from_u64(SEED);
    let mut order = start.to_vec();
    let mut best: Option<(Vec<u64>, u64)> = None;
    let mut placer = BlockPlacer::new(blocks);
    let mut placed = 0;
    let mut lowest = height;
    while lowest > target {
        let ceiling = lowest - (lowest - target).div_ceil(BITE);
        match placer.place_all(&order[placed..], GapChoice::Lowest, ceiling, budget) {
            PlacementOutcome::Done => {
                lowest = placer.height();
                best = Some((placer.offsets.clone(), lowest));
                placer.clear();
                placed = 0;
            }
            PlacementOutcome::Ceiling(place) => {
                let from = placed + place;
                let to = further_to_the_front(from, &mut dice)?;
                for &block in &order[to..from] {
                    placer.remove(block as usize);
                }
                order[to..=from].rotate_right(1);
                placed = to;
                budget.spend((from - to) as u64 * STEPS_OF_REMOVAL);
            }
            PlacementOutcome::Spent => break,
        }
    }
    best
}

/// A random position before `from`, with all distance scales equally likely. `None` if there is no such position.
fn further_to_the_front(from: usize, dice: &mut ChaCha8Rng) -> Option<usize> {
    let scales = (from as u64).checked_ilog2()? + 1;
    let scale = dice.next_u64() % u64::from(scales);
    let reach = (2_u64 << scale).min(from as u64);
    Some(from - 1 - (dice.next_u64() % reach) as usize)
}

/// A live block.
struct PlacedBlock {
    offset: u64,
    top: u64,
    end: u32,
}

/// Places each block when it is allocated, without knowledge of the future, as an allocator with one unlimited segment
/// does. It looks at live blocks only, so it works for traces of any length.
fn place_online(blocks: &[BlockLifetime], choice: GapChoice) -> Vec<u64> {
    // By offset.
    let mut live: Vec<PlacedBlock> = Vec::new();
    let mut section = 0;
    let mut offsets = Vec::with_capacity(blocks.len());
    for block in blocks {
        if block.begin > section {
            section = block.begin;
            live.retain(|other| other.end > section);
        }
        let offset = find_gap(live.iter().map(|other| (other.offset, other.top)), block.bytes, choice);
        let index = live.partition_point(|other| other.offset < offset);
        live.insert(index, PlacedBlock { offset, top: offset + block.bytes, end: block.end });
        offsets.push(offset);
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TraceBuilder;
    use oomph_base::{StreamId, TagId};

    /// Two blocks that meet, and a third that meets only the second.
    fn lifetimes() -> Lifetimes {
        let mut builder = TraceBuilder::new();
        let first = builder.alloc(512, StreamId::DEFAULT, TagId(0));
        builder.alloc(1024, StreamId::DEFAULT, TagId(0));
        builder.free(first);
        builder.alloc(512, StreamId::DEFAULT, TagId(0));
        Lifetimes::read(&builder.finish("three"), 512).unwrap()
    }

    fn judge(offsets: [u64; 3]) -> Result<(), (usize, usize)> {
        let packing = Packing {
            offsets: offsets.to_vec(),
            height_bytes: 0,
            bound_bytes: 0,
            proven_bytes: 0,
            method: PackingMethod::LocalSearch,
        };
        packing.check(&lifetimes()).map_err(|overlap| (overlap.first, overlap.second))
    }

    #[test]
    fn overlapping_live_blocks_are_found() {
        assert_eq!(judge([0, 512, 0]), Ok(()));
        assert_eq!(judge([0, 511, 0]), Err((0, 1)));
        assert_eq!(judge([512, 0, 1024]), Err((0, 1)));
        assert_eq!(judge([0, 512, 512]), Err((1, 2)));
        assert_eq!(judge([0, 512, 1000]), Err((1, 2)));
        assert_eq!(judge([0, 512, 1536]), Ok(()));
    }

    #[test]
    fn a_small_packing_is_optimal() {
        let packing = pack(&lifetimes(), PackingBudget::QUICK);
        assert_eq!(packing.offsets[0], packing.offsets[2]);
        assert_eq!((packing.height_bytes, packing.over_bound(), packing.is_optimal()), (1536, 0.0, true));
    }
}

#[cfg(test)]
mod pack_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::{exact::tests::cut_rectangle, told_by};
    use crate::{Trace, arbitrary::traces};

    #[test]
    fn restarts_double_rarely() {
        let lengths: Vec<u64> = (1..=15).map(restart_length).collect();
        assert_eq!(lengths, [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]);
    }

    #[test]
    fn changed_orders_are_nearly_the_same() {
        let order: Vec<u32> = (0..70).rev().collect();
        let changed = nearly(&order, &mut ChaCha8Rng::seed_from_u64(1));
        assert_ne!(changed, order);
        let mut moves: Vec<(u32, u64)> = changed
            .iter()
            .enumerate()
            .map(|(place, &block)| (block, (69 - u64::from(block)).abs_diff(place as u64)))
            .collect();
        moves.sort_unstable();
        assert!(moves.iter().all(|&(_, far)| far <= 10), "{moves:?}");
        assert!(moves.iter().map(|&(block, _)| block).eq(0..70));
    }

    #[test]
    fn a_lowest_layout_above_the_bound_is_proven() {
        // At most 6 bytes are live, but every layout has 7.
        let lives = [(0, 1, 3), (0, 2, 3), (1, 3, 1), (1, 4, 1), (2, 4, 2), (3, 6, 3), (4, 7, 3)];
        let puzzle = told_by(lives.map(|(begin, end, bytes)| BlockLifetime { begin, end, bytes }).to_vec());
        let packing = pack(&puzzle, PackingBudget::QUICK);
        assert_eq!((packing.bound_bytes, packing.proven_bytes, packing.height_bytes), (6, 7, 7));
    }

    #[test]
    fn large_puzzles_are_solved_optimally() {
        for (seed, pieces) in [(1, 100), (2, 150), (3, 200)] {
            let puzzle = cut_rectangle(seed, pieces, 1 << 20);
            let packing = pack(&puzzle, PackingBudget::QUICK);
            assert_eq!(packing.height_bytes, 1 << 20, "seed {seed}, {pieces} pieces: {}", packing.method);
        }
    }

    #[test]
    fn small_puzzles_are_solved_optimally() {
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
    fn any_budget_gives_a_complete_layout() {
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
        fn packings_are_valid_and_proofs_hold(trace in traces(120), steps in 0..200_000_u64) {
            if let Ok(lifetimes) = Lifetimes::read(&trace, 512) {
                let packing = pack(&lifetimes, PackingBudget::of_steps(steps));
                prop_assert_eq!(packing.check(&lifetimes), Ok(()));
                let tops = lifetimes.blocks.iter().zip(&packing.offsets).map(|(life, offset)| life.bytes + offset);
                prop_assert_eq!(packing.height_bytes, tops.max().unwrap_or(0));
                prop_assert!(packing.bound_bytes <= packing.proven_bytes && packing.proven_bytes <= packing.height_bytes);
                let better = pack(&lifetimes, PackingBudget::of_steps(steps * 4));
                prop_assert!(packing.proven_bytes <= better.height_bytes, "a layout below what was proven");
            }
        }
    }
}

#[cfg(test)]
mod ground_tests {
    use super::*;

    fn life(begin: u32, end: u32, bytes: u64) -> BlockLifetime {
        BlockLifetime { begin, end, bytes }
    }

    #[test]
    fn weights_are_placed_at_the_bottom() {
        let step =
            |at: u32| [life(at, at + 1, 1), life(at, at + 2, 2), life(at + 1, at + 3, 3), life(at + 2, at + 3, 4)];
        let mut blocks = vec![life(0, 9, 100), life(0, 9, 10)];
        blocks.extend([0, 3, 6].into_iter().flat_map(step));
        let (at_bottom, groups) = split_groups(&blocks);
        assert_eq!(at_bottom, [(0, 0), (1, 100)]);
        let told: Vec<_> = groups.iter().map(|group| (group.members.clone(), group.base)).collect();
        assert_eq!(told, [(vec![2, 3, 4, 5], 110), (vec![6, 7, 8, 9], 110), (vec![10, 11, 12, 13], 110)]);
    }

    #[test]
    fn a_nest_is_grounded_from_the_outside_in() {
        let blocks = [life(0, 6, 1), life(0, 4, 2), life(1, 3, 4), life(4, 6, 8)];
        let (mut at_bottom, groups) = split_groups(&blocks);
        at_bottom.sort_unstable();
        assert_eq!((at_bottom, groups), (vec![(0, 0), (1, 1), (2, 3), (3, 1)], vec![]));
    }
}
