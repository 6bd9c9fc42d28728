//! Exhaustive search for a layout below a ceiling.
//!
//! Every layout can be pushed down until each block rests on the bottom or on another block. If blocks are placed from
//! the lowest to the highest, each rests on the highest of its neighbours placed before. So it is enough to try, at every
//! step, the blocks whose offset is not below that of the previous block, and to stop where a section cannot hold the
//! remaining blocks. Groups that do not overlap in time are searched separately.

use oomph_base::packing::{BlockLifetime, PackingBudget, live_bytes_over_time};

/// The limit of the search: the recursion is as deep as the number of blocks.
pub(crate) const MOST_BLOCKS: usize = 1000;

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SearchOutcome<Layout = Vec<u64>> {
    /// A layout, by its offsets.
    Found(Layout),
    /// No layout exists.
    Nothing,
    /// The budget is spent.
    Spent,
}

/// Searches for a layout that is not higher than the ceiling. Of blocks with equal offsets, those that come first in
/// `order` are tried first.
pub(crate) fn search(
    blocks: &[BlockLifetime],
    order: &[u32],
    ceiling: u64,
    budget: &mut PackingBudget,
) -> SearchOutcome {
    let mut search = ExactSearcher::new(blocks, order, ceiling);
    let all: Vec<u32> = (0..blocks.len() as u32).collect();
    match search.groups(&all, (0, None), budget) {
        SearchOutcome::Found(()) => SearchOutcome::Found(search.offsets),
        SearchOutcome::Nothing => SearchOutcome::Nothing,
        SearchOutcome::Spent => SearchOutcome::Spent,
    }
}

/// Offset and number of the block placed last.
type LastPlaced = (u64, Option<u32>);

/// A change to undo after a wrong choice.
enum SearchChange {
    Placed(u32),
    Raised(u32, u64),
}

struct ExactSearcher<'a> {
    blocks: &'a [BlockLifetime],
    /// The blocks that overlap each block in time.
    neighbours: Vec<Vec<u32>>,
    /// The position of each block in the order.
    ranks: Vec<u32>,
    ceiling: u64,
    placed: Vec<bool>,
    /// The offset of a placed block, or the lowest possible offset of another.
    offsets: Vec<u64>,
    /// Bytes of each section that are not yet placed.
    loads: Vec<u64>,
    /// The lowest possible offset in each section, within one step.
    floors: Vec<u64>,
    changes: Vec<SearchChange>,
}

impl<'a> ExactSearcher<'a> {
    fn new(blocks: &'a [BlockLifetime], order: &[u32], ceiling: u64) -> ExactSearcher<'a> {
        let neighbours = |place: usize| {
            let others = blocks.iter().enumerate();
            let met = others.filter(move |&(other, life)| other != place && life.meets(&blocks[place]));
            met.map(|(other, _)| other as u32)
        };
        let mut ranks = vec![0; blocks.len()];
        for (rank, &block) in order.iter().enumerate() {
            ranks[block as usize] = rank as u32;
        }
        let loads = live_bytes_over_time(blocks);
        ExactSearcher {
            blocks,
            neighbours: (0..blocks.len()).map(|place| neighbours(place).collect()).collect(),
            ranks,
            ceiling,
            placed: vec![false; blocks.len()],
            offsets: vec![0; blocks.len()],
            floors: vec![0; loads.len()],
            loads,
            changes: Vec::new(),
        }
    }

    /// Places blocks, in order of their beginnings, group by group.
    fn groups(&mut self, mut rest: &[u32], last: LastPlaced, budget: &mut PackingBudget) -> SearchOutcome<()> {
        while let Some(&first) = rest.first() {
            let mut end = self.blocks[first as usize].end;
            let size = rest.iter().position(|&block| {
                let life = &self.blocks[block as usize];
                let apart = life.begin >= end;
                end = end.max(life.end);
                apart
            });
            let (group, others) = rest.split_at(size.unwrap_or(rest.len()));
            let answer = self.group(group, last, budget);
            if answer != SearchOutcome::Found(()) {
                return answer;
            }
            rest = others;
        }
        SearchOutcome::Found(())
    }

    fn group(&mut self, group: &[u32], last: LastPlaced, budget: &mut PackingBudget) -> SearchOutcome<()> {
        if !budget.spend(self.cost(group)) {
            return SearchOutcome::Spent;
        }
        if !self.has_room(group, last.0) {
            return SearchOutcome::Nothing;
        }
        let mut tried: Option<(&BlockLifetime, u64)> = None;
        for block in self.candidates(group, last) {
            let resting = (&self.blocks[block as usize], self.offsets[block as usize]);
            // Equal blocks are interchangeable.
            if tried == Some(resting) {
                continue;
            }
            tried = Some(resting);
            let mark = self.changes.len();
            self.place(block);
            let rest: Vec<u32> = group.iter().copied().filter(|&other| other != block).collect();
            match self.groups(&rest, (resting.1, Some(block)), budget) {
                SearchOutcome::Nothing => self.undo(mark),
                answer => return answer,
            }
        }
        SearchOutcome::Nothing
    }

    fn cost(&self, group: &[u32]) -> u64 {
        let sections = |&block: &u32| u64::from(self.blocks[block as usize].end - self.blocks[block as usize].begin);
        group.iter().map(sections).sum::<u64>() + group.len() as u64
    }

    /// Whether every section could hold the remaining blocks without gaps.
    fn has_room(&mut self, group: &[u32], last: u64) -> bool {
        let begin = group.iter().map(|&block| self.blocks[block as usize].begin).min().unwrap_or(0) as usize;
        let end = group.iter().map(|&block| self.blocks[block as usize].end).max().unwrap_or(0) as usize;
        self.floors[begin..end].fill(u64::MAX);
        for &block in group {
            let life = &self.blocks[block as usize];
            let offset = self.offsets[block as usize].max(last);
            if offset + life.bytes > self.ceiling {
                return false;
            }
            for floor in &mut self.floors[life.begin as usize..life.end as usize] {
                *floor = (*floor).min(offset);
            }
        }
        let sections = self.floors[begin..end].iter().zip(&self.loads[begin..end]);
        sections.into_iter().all(|(&floor, &load)| load == 0 || floor.saturating_add(load) <= self.ceiling)
    }

    /// The blocks that can be placed next, the most promising first.
    fn candidates(&self, group: &[u32], (last, teller): LastPlaced) -> Vec<u32> {
        let offset = |block: u32| self.offsets[block as usize];
        // A block that fits completely below another is placed before it.
        let tops = group.iter().map(|&block| offset(block).max(last) + self.blocks[block as usize].bytes);
        let lowest_top = tops.min().unwrap_or(0);
        let follows = |&block: &u32| (offset(block), Some(block)) > (last, teller) || teller.is_none();
        let mut candidates: Vec<u32> =
            group.iter().copied().filter(follows).filter(|&block| offset(block) < lowest_top).collect();
        candidates.sort_unstable_by_key(|&block| (offset(block), self.ranks[block as usize]));
        candidates
    }

    fn place(&mut self, block: u32) {
        let life = self.blocks[block as usize];
        let top = self.offsets[block as usize] + life.bytes;
        self.placed[block as usize] = true;
        self.changes.push(SearchChange::Placed(block));
        for load in &mut self.loads[life.begin as usize..life.end as usize] {
            *load -= life.bytes;
        }
        for &other in &self.neighbours[block as usize] {
            let offset = &mut self.offsets[other as usize];
            if !self.placed[other as usize] && *offset < top {
                self.changes.push(SearchChange::Raised(other, *offset));
                *offset = top;
            }
        }
    }

    fn undo(&mut self, mark: usize) {
        for change in self.changes.drain(mark..).rev() {
            match change {
                SearchChange::Raised(block, offset) => self.offsets[block as usize] = offset,
                SearchChange::Placed(block) => {
                    let life = self.blocks[block as usize];
                    self.placed[block as usize] = false;
                    for load in &mut self.loads[life.begin as usize..life.end as usize] {
                        *load += life.bytes;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::{collection::vec, prelude::*};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::plan::{Lifetimes, told_by};
    use oomph_base::packing::{PlacementOrder, peak_live_bytes};

    /// A packing problem with a known best layout: a rectangle of time and memory that is cut until there are enough pieces. The pieces fill it without a gap, so the best
    /// layout is as high as the bound.
    pub(crate) fn cut_rectangle(seed: u64, pieces: usize, height: u64) -> Lifetimes {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut below = |most: u64| dice.next_u64() % most;
        let mut cut = vec![BlockLifetime { begin: 0, end: 4 * pieces as u32, bytes: height }];
        while cut.len() < pieces {
            let place = below(cut.len() as u64) as usize;
            let piece = cut[place];
            let length = u64::from(piece.end - piece.begin);
            if below(2) == 0 && length > 1 {
                let middle = piece.begin + 1 + below(length - 1) as u32;
                cut[place].end = middle;
                cut.push(BlockLifetime { begin: middle, ..piece });
            } else if piece.bytes > 1 {
                let lower = 1 + below(piece.bytes - 1);
                cut[place].bytes = lower;
                cut.push(BlockLifetime { bytes: piece.bytes - lower, ..piece });
            }
        }
        cut.sort_by_key(|piece| (piece.begin, piece.end, piece.bytes));
        told_by(cut)
    }

    fn life(begin: u32, end: u32, bytes: u64) -> BlockLifetime {
        BlockLifetime { begin, end, bytes }
    }

    fn found(blocks: &[BlockLifetime], ceiling: u64) -> SearchOutcome {
        search(blocks, &PlacementOrder::Area.of(blocks), ceiling, &mut PackingBudget::of_steps(50_000_000))
    }

    #[test]
    fn a_cut_rectangle_is_packed_again() {
        for seed in 0..8 {
            let puzzle = cut_rectangle(seed, 40, 100_000);
            assert!(matches!(found(&puzzle.blocks, 100_000), SearchOutcome::Found(_)), "seed {seed}");
            assert_eq!(found(&puzzle.blocks, 99_999), SearchOutcome::Nothing, "seed {seed}");
        }
    }

    #[test]
    fn a_budget_ends_the_search() {
        let puzzle = cut_rectangle(1, 40, 100_000);
        let order = PlacementOrder::Area.of(&puzzle.blocks);
        assert_eq!(search(&puzzle.blocks, &order, 100_000, &mut PackingBudget::of_steps(100)), SearchOutcome::Spent);
    }

    /// The height of the lowest layout, by trying first fit in every order: some order always gives it.
    fn lowest(blocks: &[BlockLifetime]) -> u64 {
        fn place_rest(blocks: &[BlockLifetime], placed: &mut Vec<(usize, u64)>, height: u64, lowest: &mut u64) {
            if placed.len() == blocks.len() {
                *lowest = (*lowest).min(height);
            }
            for next in 0..blocks.len() {
                if placed.iter().any(|&(block, _)| block == next) {
                    continue;
                }
                let mut met: Vec<_> = placed.iter().filter(|(block, _)| blocks[*block].meets(&blocks[next])).collect();
                met.sort_by_key(|(_, offset)| *offset);
                let mut floor = 0;
                for &&(block, offset) in &met {
                    if offset < floor + blocks[next].bytes {
                        floor = floor.max(offset + blocks[block].bytes);
                    }
                }
                placed.push((next, floor));
                place_rest(blocks, placed, height.max(floor + blocks[next].bytes), lowest);
                placed.pop();
            }
        }
        let mut lowest = u64::MAX;
        place_rest(blocks, &mut Vec::new(), 0, &mut lowest);
        lowest
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn it_finds_what_trying_every_order_finds(lives in vec((0..6_u32, 1..5_u32, 1..6_u64), 1..7)) {
            let mut blocks: Vec<_> = lives.iter().map(|&(begin, length, bytes)| life(begin, begin + length, bytes)).collect();
            blocks.sort_by_key(|block| block.begin);
            let lowest = lowest(&blocks);
            prop_assert!(lowest >= peak_live_bytes(&blocks));
            prop_assert!(matches!(found(&blocks, lowest), SearchOutcome::Found(_)));
            prop_assert_eq!(found(&blocks, lowest - 1), SearchOutcome::Nothing);
        }
    }
}
