//! Exhaustive search for a layout below a ceiling.
//!
//! Every layout can be pushed down until each block rests on the bottom or on another block. If blocks are placed from
//! the lowest to the highest, each rests on the highest of its neighbours placed before. So it is enough to try, at every
//! step, the blocks in order of the offsets at which they rest. Groups that do not overlap in time are searched
//! separately.
//!
//! Three rules cut the search.
//! - A block that was refuted at its rest must rest on a block that is not placed yet. Its lowest possible offset is the
//!   lowest possible end of those neighbours. The rule is applied until nothing rises any more.
//! - A section is full if its remaining blocks, each placed as low as possible, end above the ceiling.
//! - A conflict is a set of blocks that are not placed yet and that have no layout above their lowest possible offsets.
//!   If the block placed last raised none of them, its other offsets need not be tried.

use oomph_base::packing::{BlockLifetime, PackingBudget};

/// The limit of the search: the recursion is as deep as the number of blocks.
pub(crate) const MOST_BLOCKS: usize = 1000;

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SearchOutcome {
    /// A layout, by its offsets.
    Found(Vec<u64>),
    /// No layout exists.
    Nothing,
    /// The budget is spent.
    Spent,
}

/// Why a part of the search ended without a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SearchEnd {
    /// There is none: [`ExactSearcher::conflict`] are blocks that do not fit.
    Conflict,
    /// The budget is spent.
    Spent,
}

/// A value to restore after a wrong choice.
enum SearchChange {
    Placed(u32),
    Rest(u32, u64),
    Low(u32, u64),
    Refuted(u32, u32),
}

/// What is known of a section while the lowest possible offsets are computed.
#[derive(Clone, Copy)]
struct SectionFill {
    /// The end of the remaining blocks, each placed as low as possible.
    end: u64,
    /// The lowest possible end of a remaining block, and that block.
    first_end: u64,
    first: u32,
    /// The lowest possible end of the others.
    second_end: u64,
}

const EMPTY: SectionFill = SectionFill { end: 0, first_end: u64::MAX, first: 0, second_end: u64::MAX };

/// Searches for layouts of the same blocks, with any order and ceiling.
pub(crate) struct ExactSearcher {
    /// The lifetimes, in sections that all differ in their live blocks.
    blocks: Vec<BlockLifetime>,
    /// The blocks that overlap each block in time.
    neighbours: Vec<Vec<u32>>,
    /// The position of each block in the order.
    ranks: Vec<u32>,
    ceiling: u64,
    budget: PackingBudget,
    placed: Vec<bool>,
    /// The offset of a placed block; where another rests on the placed blocks.
    rests: Vec<u64>,
    /// The lowest possible offset. Above the rest if the block was refuted there.
    lows: Vec<u64>,
    /// For a refuted block: the conflict at its rest, as an index of `proofs`.
    refuted_by: Vec<u32>,
    proofs: Vec<BlockSet>,
    /// The blocks that do not fit, after [`SearchEnd::Conflict`].
    conflict: BlockSet,
    fills: Vec<SectionFill>,
    changes: Vec<SearchChange>,
}

impl ExactSearcher {
    /// The blocks are in order of their beginnings.
    pub(crate) fn new(blocks: &[BlockLifetime]) -> ExactSearcher {
        let blocks = with_least_sections(blocks);
        let neighbours = |place: usize| {
            let others = blocks.iter().enumerate();
            let met = others.filter(|&(other, life)| other != place && life.meets(&blocks[place]));
            met.map(|(other, _)| other as u32).collect()
        };
        let sections = blocks.iter().map(|block| block.end).max().unwrap_or(0);
        ExactSearcher {
            neighbours: (0..blocks.len()).map(neighbours).collect(),
            ranks: vec![0; blocks.len()],
            ceiling: 0,
            budget: PackingBudget::of_steps(0),
            placed: vec![false; blocks.len()],
            rests: vec![0; blocks.len()],
            lows: vec![0; blocks.len()],
            refuted_by: vec![0; blocks.len()],
            proofs: Vec::new(),
            conflict: BlockSet::of(blocks.len()),
            fills: vec![EMPTY; sections as usize],
            changes: Vec::new(),
            blocks,
        }
    }

    /// The steps of a look at every section of every block.
    pub(crate) fn steps_of_a_pass(&self) -> u64 {
        self.blocks.iter().map(sections_of).sum::<u64>() + self.blocks.len() as u64
    }

    /// Searches for a layout that is not higher than the ceiling. Of blocks that rest at the same offset, those that
    /// come first in `order` are tried first.
    pub(crate) fn search(&mut self, order: &[u32], ceiling: u64, budget: &mut PackingBudget) -> SearchOutcome {
        for (rank, &block) in order.iter().enumerate() {
            self.ranks[block as usize] = rank as u32;
        }
        (self.ceiling, self.budget) = (ceiling, *budget);
        let all: Vec<u32> = (0..self.blocks.len() as u32).collect();
        let ended = self.place_groups(&all);
        *budget = self.budget;
        let outcome = match ended {
            Ok(()) => SearchOutcome::Found(self.rests.clone()),
            Err(SearchEnd::Conflict) => SearchOutcome::Nothing,
            Err(SearchEnd::Spent) => SearchOutcome::Spent,
        };
        self.undo(0);
        self.proofs.clear();
        outcome
    }

    /// Places blocks, in order of their beginnings, group by group.
    fn place_groups(&mut self, rest: &[u32]) -> Result<(), SearchEnd> {
        let mut groups: Vec<&[u32]> = rest.chunk_by(meets_those_before(&self.blocks)).collect();
        if groups.len() > 1 {
            for group in &groups {
                self.raise(group)?;
            }
            // A conflict in a small group is found sooner.
            groups.sort_by_key(|group| group.len());
        }
        groups.into_iter().try_for_each(|group| self.place_group(group))
    }

    /// Places the blocks of a group, or restores everything.
    fn place_group(&mut self, group: &[u32]) -> Result<(), SearchEnd> {
        let (changes, proofs) = (self.changes.len(), self.proofs.len());
        let ended = self.try_in_order(group);
        if ended == Err(SearchEnd::Conflict) {
            self.undo(changes);
            self.proofs.truncate(proofs);
        }
        ended
    }

    fn try_in_order(&mut self, group: &[u32]) -> Result<(), SearchEnd> {
        let mut order = self.raise(group)?;
        if group.len() == 1 {
            return Ok(());
        }
        loop {
            let block = self.next_to_try(group, &order)?;
            let changes = self.changes.len();
            self.place(block);
            let rest: Vec<u32> = group.iter().copied().filter(|&other| other != block).collect();
            match self.place_groups(&rest) {
                Err(SearchEnd::Conflict) => self.undo(changes),
                ended => return ended,
            }
            let end = self.rests[block as usize] + self.blocks[block as usize].bytes;
            let mut raised = self.neighbours[block as usize].iter().filter(|&&other| self.lows[other as usize] < end);
            if !raised.any(|&other| self.conflict.contains(other)) {
                return Err(self.conflict_closed());
            }
            self.refute(block, group);
            order = self.raise(group)?;
        }
    }

    /// The lowest block that was not refuted.
    fn next_to_try(&mut self, group: &[u32], order: &[u32]) -> Result<u32, SearchEnd> {
        let end_at_rest = |&block: &u32| self.rests[block as usize] + self.blocks[block as usize].bytes;
        let Some(lowest) = group.iter().copied().min_by_key(end_at_rest) else {
            return Err(SearchEnd::Conflict);
        };
        let next = order.iter().copied().find(|&block| !self.is_refuted(block));
        // If all others are above the end of a block at its rest, it could lie there; but it was refuted there.
        match next.filter(|&next| self.rests[next as usize] < end_at_rest(&lowest)) {
            Some(next) => Ok(next),
            None => Err(self.conflict_of([lowest])),
        }
    }

    fn is_refuted(&self, block: u32) -> bool {
        self.rests[block as usize] < self.lows[block as usize]
    }

    /// Raises the lowest possible offsets in a group. Returns its blocks in their order: by these offsets, then by
    /// rank.
    fn raise(&mut self, group: &[u32]) -> Result<Vec<u32>, SearchEnd> {
        let begin = group.iter().map(|&block| self.blocks[block as usize].begin).min().unwrap_or(0) as usize;
        let end = group.iter().map(|&block| self.blocks[block as usize].end).max().unwrap_or(0) as usize;
        let mut order = group.to_vec();
        loop {
            order.sort_unstable_by_key(|&block| (self.lows[block as usize], self.ranks[block as usize]));
            self.fills[begin..end].fill(EMPTY);
            self.fill_sections(&order)?;
            let mut any = false;
            for &block in group {
                any |= self.is_refuted(block) && self.raise_refuted(block)?;
            }
            if !any {
                return Ok(order);
            }
        }
    }

    /// Stacks the blocks in every section, each as low as possible.
    fn fill_sections(&mut self, order: &[u32]) -> Result<(), SearchEnd> {
        for (index, &block) in order.iter().enumerate() {
            let life = self.blocks[block as usize];
            if !self.budget.spend(sections_of(&life) + 1) {
                return Err(SearchEnd::Spent);
            }
            let low = self.lows[block as usize];
            let end = low + life.bytes;
            let mut highest = 0;
            for fill in &mut self.fills[life.begin as usize..life.end as usize] {
                fill.end = fill.end.max(low) + life.bytes;
                highest = highest.max(fill.end);
                if end < fill.first_end {
                    (fill.second_end, fill.first_end, fill.first) = (fill.first_end, end, block);
                } else {
                    fill.second_end = fill.second_end.min(end);
                }
            }
            if highest > self.ceiling {
                return Err(self.conflict_in_section(&order[..=index]));
            }
        }
        Ok(())
    }

    /// The conflict in a section that the last of these blocks fills to above the ceiling.
    fn conflict_in_section(&mut self, order: &[u32]) -> SearchEnd {
        let last = order.last().map(|&block| self.blocks[block as usize]);
        let mut sections = last.map_or(0..0, |life| life.begin..life.end);
        let full = sections.find(|&section| self.fills[section as usize].end > self.ceiling).unwrap_or(0);
        let (mut end, mut stack) = (0, Vec::new());
        for &block in order {
            let (life, low) = (&self.blocks[block as usize], self.lows[block as usize]);
            if !(life.begin..life.end).contains(&full) {
                continue;
            }
            // Blocks below a gap do not matter.
            if low >= end {
                stack.clear();
                end = low;
            }
            end += life.bytes;
            stack.push(block);
        }
        self.conflict_of(stack)
    }

    /// Raises a refuted block to the lowest possible end of a neighbour. Returns whether it rose.
    fn raise_refuted(&mut self, block: u32) -> Result<bool, SearchEnd> {
        let life = self.blocks[block as usize];
        self.budget.spend(sections_of(&life));
        let fills = &self.fills[life.begin as usize..life.end as usize];
        let ends = fills.iter().map(|fill| if fill.first == block { fill.second_end } else { fill.first_end });
        let lowest = ends.min().unwrap_or(u64::MAX);
        if lowest == u64::MAX {
            return Err(self.conflict_of([block]));
        }
        let rises = lowest > self.lows[block as usize];
        if rises {
            self.set_low(block, lowest);
        }
        Ok(rises)
    }

    /// Notes that a block cannot lie at its rest: the conflict says why.
    fn refute(&mut self, block: u32, group: &[u32]) {
        let at_rest = |other: u32| (self.blocks[other as usize], self.rests[other as usize], self.lows[other as usize]);
        // Equal blocks are interchangeable.
        let equals: Vec<u32> = group.iter().copied().filter(|&other| at_rest(other) == at_rest(block)).collect();
        if equals.len() > 1 {
            equals.iter().for_each(|&other| self.conflict.insert(other));
        }
        let proof = self.proofs.len() as u32;
        self.proofs.push(self.conflict.clone());
        for other in equals {
            self.set_low(other, self.lows[other as usize] + 1);
            self.changes.push(SearchChange::Refuted(other, self.refuted_by[other as usize]));
            self.refuted_by[other as usize] = proof;
        }
    }

    /// The conflict of these blocks.
    fn conflict_of(&mut self, blocks: impl IntoIterator<Item = u32>) -> SearchEnd {
        self.conflict.clear();
        for block in blocks {
            self.conflict.insert(block);
        }
        self.conflict_closed()
    }

    /// Adds to the conflict why its refuted blocks are as high as they are.
    fn conflict_closed(&mut self) -> SearchEnd {
        let mut open: Vec<u32> = self.conflict.members().collect();
        while let Some(block) = open.pop() {
            if self.is_refuted(block) {
                let proof = &self.proofs[self.refuted_by[block as usize] as usize];
                self.conflict.extend(proof, &mut open);
            }
        }
        SearchEnd::Conflict
    }

    fn set_low(&mut self, block: u32, low: u64) {
        self.changes.push(SearchChange::Low(block, self.lows[block as usize]));
        self.lows[block as usize] = low;
    }

    /// Places a block where it rests.
    fn place(&mut self, block: u32) {
        let end = self.rests[block as usize] + self.blocks[block as usize].bytes;
        self.placed[block as usize] = true;
        self.changes.push(SearchChange::Placed(block));
        for &other in &self.neighbours[block as usize] {
            let (rest, low) = (&mut self.rests[other as usize], &mut self.lows[other as usize]);
            if self.placed[other as usize] {
                continue;
            }
            if *rest < end {
                self.changes.push(SearchChange::Rest(other, *rest));
                *rest = end;
            }
            if *low < end {
                self.changes.push(SearchChange::Low(other, *low));
                *low = end;
            }
        }
    }

    fn undo(&mut self, mark: usize) {
        for change in self.changes.drain(mark..).rev() {
            match change {
                SearchChange::Placed(block) => self.placed[block as usize] = false,
                SearchChange::Rest(block, rest) => self.rests[block as usize] = rest,
                SearchChange::Low(block, low) => self.lows[block as usize] = low,
                SearchChange::Refuted(block, proof) => self.refuted_by[block as usize] = proof,
            }
        }
    }
}

fn sections_of(life: &BlockLifetime) -> u64 {
    u64::from(life.end - life.begin)
}

/// Whether the next block, in order of beginnings, meets one of the blocks before it.
fn meets_those_before(blocks: &[BlockLifetime]) -> impl FnMut(&u32, &u32) -> bool + '_ {
    let mut end = 0;
    move |&before, &next| {
        end = end.max(blocks[before as usize].end);
        blocks[next as usize].begin < end
    }
}

/// The same lifetimes in as few sections as possible: a new one begins only where a block begins after another ended.
fn with_least_sections(blocks: &[BlockLifetime]) -> Vec<BlockLifetime> {
    // Ends come before the beginnings of the same time.
    let begins = blocks.iter().enumerate().map(|(block, life)| (life.begin, true, block));
    let ends = blocks.iter().enumerate().map(|(block, life)| (life.end, false, block));
    let mut moments: Vec<(u32, bool, usize)> = begins.chain(ends).collect();
    moments.sort_unstable();
    let mut lives = blocks.to_vec();
    let (mut section, mut ended) = (0, false);
    for (_, begins, block) in moments {
        if begins {
            section += u32::from(ended);
            ended = false;
            lives[block].begin = section;
        } else {
            ended = true;
            lives[block].end = section + 1;
        }
    }
    lives
}

/// A set of blocks.
#[derive(Clone, Debug)]
struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    /// The empty set, with room for this many blocks.
    fn of(blocks: usize) -> BlockSet {
        BlockSet { words: vec![0; blocks.div_ceil(64)] }
    }

    fn clear(&mut self) {
        self.words.fill(0);
    }

    fn insert(&mut self, block: u32) {
        self.words[block as usize / 64] |= 1 << (block % 64);
    }

    fn contains(&self, block: u32) -> bool {
        self.words[block as usize / 64] >> (block % 64) & 1 == 1
    }

    fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| bits(word, index))
    }

    /// Adds the members of another set, and tells which are new.
    fn extend(&mut self, others: &BlockSet, new: &mut Vec<u32>) {
        for (index, (word, &other)) in self.words.iter_mut().zip(&others.words).enumerate() {
            new.extend(bits(other & !*word, index));
            *word |= other;
        }
    }
}

/// The blocks of a word of a set.
fn bits(mut word: u64, index: usize) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(index as u32 * 64 + bit)
    })
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
        within(blocks, ceiling, 50_000_000)
    }

    fn within(blocks: &[BlockLifetime], ceiling: u64, steps: u64) -> SearchOutcome {
        let order = PlacementOrder::Area.of(blocks);
        ExactSearcher::new(blocks).search(&order, ceiling, &mut PackingBudget::of_steps(steps))
    }

    #[test]
    fn a_cut_rectangle_is_packed_again() {
        for seed in 0..8 {
            let puzzle = cut_rectangle(seed, 40, 100_000);
            assert!(is_packed(&puzzle.blocks, 100_000), "seed {seed}");
            assert_eq!(found(&puzzle.blocks, 99_999), SearchOutcome::Nothing, "seed {seed}");
        }
    }

    #[test]
    fn recursion_fits_into_a_small_stack() {
        // All are live at once, so each is a level of its own. A thread has 2 MiB by default.
        let blocks: Vec<BlockLifetime> = (0..MOST_BLOCKS as u64).map(|block| life(0, 1, 1 + block)).collect();
        let height = peak_live_bytes(&blocks);
        let search = move || assert!(is_packed(&blocks, height));
        std::thread::Builder::new().stack_size(1 << 21).spawn(search).unwrap().join().unwrap();
    }

    #[test]
    fn sections_without_a_block_of_their_own_are_left_out() {
        let lives = [life(2, 9, 1), life(4, 5, 1), life(7, 20, 1), life(20, 21, 1)];
        let told: Vec<_> = with_least_sections(&lives).iter().map(|life| (life.begin, life.end)).collect();
        assert_eq!(told, [(0, 2), (0, 1), (1, 2), (2, 3)]);
    }

    #[test]
    fn a_budget_ends_the_search() {
        let puzzle = cut_rectangle(1, 40, 100_000);
        assert_eq!(within(&puzzle.blocks, 100_000, 100), SearchOutcome::Spent);
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

    /// Whether a layout is found; it is valid and not higher than the ceiling.
    fn is_packed(blocks: &[BlockLifetime], ceiling: u64) -> bool {
        let SearchOutcome::Found(offsets) = found(blocks, ceiling) else {
            return false;
        };
        let end = |block: usize| offsets[block] + blocks[block].bytes;
        let apart = |a: usize, b: usize| !blocks[a].meets(&blocks[b]) || end(a) <= offsets[b] || end(b) <= offsets[a];
        (0..blocks.len()).all(|block| end(block) <= ceiling && (0..block).all(|other| apart(block, other)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]

        #[test]
        fn it_finds_what_trying_every_order_finds(lives in vec((0..6_u32, 1..5_u32, 1..6_u64), 1..7)) {
            let mut blocks: Vec<_> = lives.iter().map(|&(begin, length, bytes)| life(begin, begin + length, bytes)).collect();
            blocks.sort_by_key(|block| block.begin);
            let lowest = lowest(&blocks);
            prop_assert!(lowest >= peak_live_bytes(&blocks));
            prop_assert!(is_packed(&blocks, lowest));
            prop_assert_eq!(found(&blocks, lowest - 1), SearchOutcome::Nothing);
        }

        /// Without some of its pieces, or with smaller ones, a cut rectangle is still no higher. In a random order the
        /// search must often turn back.
        #[test]
        fn no_layout_is_overlooked(
            seed in 0..10_000_u64,
            height in 8..200_u64,
            changes in vec(prop_oneof![6 => Just(0_u64), 1 => Just(u64::MAX), 1 => 1..4_u64], 8..40),
        ) {
            let puzzle = cut_rectangle(seed, changes.len(), height);
            let smaller = puzzle.blocks.iter().zip(changes).filter(|(block, by)| block.bytes > *by);
            let blocks: Vec<_> = smaller.map(|(block, by)| life(block.begin, block.end, block.bytes - by)).collect();
            let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
            order.sort_by_key(|&block| u64::from(block + 1).wrapping_mul(seed * 2 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40);
            let found = ExactSearcher::new(&blocks).search(&order, height, &mut PackingBudget::of_steps(1_000_000));
            prop_assert_ne!(found, SearchOutcome::Nothing);
        }
    }
}
