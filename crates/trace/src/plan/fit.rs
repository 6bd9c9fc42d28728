//! Places blocks one by one, in any order, into the gaps between those that are there already.
//!
//! The blocks stay in order of allocation and only an index over their ends says who is placed: those that meet a block
//! began before its end, which is a prefix, and end after its beginning, which the index finds without looking at the
//! others. A placement therefore costs as many steps as it has placed neighbours, and not as there are blocks.

use super::{budget::Budget, lifetimes::Lifetime};

/// Which gap a block goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest in which it fits.
    First,
    /// The narrowest in which it fits.
    Best,
}

/// So many blocks share an entry of the lower index, and so many entries one of the upper.
const FAN: usize = 32;

/// How placing a list of blocks ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placing {
    /// All are placed.
    Done,
    /// The block at this place of the list would have risen above the ceiling; it and all after it are not placed.
    Ceiling(usize),
    /// The budget is spent.
    Spent,
}

/// Blocks of which some are placed.
pub(super) struct Shelf<'a> {
    blocks: &'a [Lifetime],
    offsets: Vec<u64>,
    /// Where a placed block ends; 0 where it is not placed.
    ends: Vec<u32>,
    /// The latest end of every [`FAN`] blocks, and of every [`FAN`] of these.
    group_ends: Vec<u32>,
    supergroup_ends: Vec<u32>,
    /// How many blocks begin before the end of each block.
    prefixes: Vec<u32>,
    /// Offset and top of the placed neighbours of one block.
    neighbours: Vec<(u64, u64)>,
    /// How many entries had to be looked at to find them.
    looked_at: usize,
}

impl<'a> Shelf<'a> {
    /// An empty shelf. The blocks are in order of their beginnings.
    pub(super) fn new(blocks: &'a [Lifetime]) -> Shelf<'a> {
        let groups = blocks.len().div_ceil(FAN);
        let began_before = |end| blocks.partition_point(|other| other.begin < end) as u32;
        Shelf {
            blocks,
            offsets: vec![0; blocks.len()],
            ends: vec![0; blocks.len()],
            group_ends: vec![0; groups],
            supergroup_ends: vec![0; groups.div_ceil(FAN)],
            prefixes: blocks.iter().map(|block| began_before(block.end)).collect(),
            neighbours: Vec::new(),
            looked_at: 0,
        }
    }

    /// Takes all blocks down.
    pub(super) fn clear(&mut self) {
        self.ends.fill(0);
        self.group_ends.fill(0);
        self.supergroup_ends.fill(0);
    }

    /// Where the blocks are.
    pub(super) fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The highest top of all placed blocks.
    pub(super) fn height(&self) -> u64 {
        let placed = self.blocks.iter().zip(&self.offsets).zip(&self.ends).filter(|(_, end)| **end > 0);
        placed.map(|((block, offset), _)| offset + block.bytes).max().unwrap_or(0)
    }

    /// Places the blocks of a list, in its order, none of them above the ceiling.
    pub(super) fn place_all(&mut self, order: &[u32], fit: Fit, ceiling: u64, budget: &mut Budget) -> Placing {
        for (place, &block) in order.iter().enumerate() {
            let offset = self.find(block as usize, fit);
            let sorted = self.neighbours.len() as u64 + 1;
            if !budget.spend(self.looked_at as u64 + sorted * u64::from(sorted.ilog2() + 1)) {
                return Placing::Spent;
            }
            if offset + self.blocks[block as usize].bytes > ceiling {
                return Placing::Ceiling(place);
            }
            self.place(block as usize, offset);
        }
        Placing::Done
    }

    /// Puts a block where it was found to fit.
    fn place(&mut self, block: usize, offset: u64) {
        let end = self.blocks[block].end;
        self.offsets[block] = offset;
        self.ends[block] = end;
        let (group, supergroup) = (block / FAN, block / FAN / FAN);
        self.group_ends[group] = self.group_ends[group].max(end);
        self.supergroup_ends[supergroup] = self.supergroup_ends[supergroup].max(end);
    }

    /// Takes a block down.
    pub(super) fn remove(&mut self, block: usize) {
        let end = std::mem::take(&mut self.ends[block]);
        let (group, supergroup) = (block / FAN, block / FAN / FAN);
        if self.group_ends[group] == end {
            self.group_ends[group] = latest(&self.ends, group);
            if self.supergroup_ends[supergroup] == end {
                self.supergroup_ends[supergroup] = latest(&self.group_ends, supergroup);
            }
        }
    }

    /// The offset for a block among those that are placed.
    fn find(&mut self, block: usize, fit: Fit) -> u64 {
        self.gather(block);
        let bytes = self.blocks[block].bytes;
        let mut floor = 0;
        let mut narrowest: Option<(u64, u64)> = None;
        for &(offset, top) in &self.neighbours {
            if offset >= floor && offset - floor >= bytes {
                match fit {
                    Fit::First => return floor,
                    Fit::Best => {
                        let gap = (offset - floor, floor);
                        narrowest = Some(narrowest.map_or(gap, |least| least.min(gap)));
                    }
                }
            }
            floor = floor.max(top);
        }
        narrowest.map_or(floor, |(_, offset)| offset)
    }

    /// Collects the placed blocks that meet this one, lowest first.
    fn gather(&mut self, block: usize) {
        self.neighbours.clear();
        let begin = self.blocks[block].begin;
        let prefix = self.prefixes[block] as usize;
        let supergroups = &self.supergroup_ends[..prefix.div_ceil(FAN * FAN)];
        self.looked_at = supergroups.len();
        for (supergroup, &latest) in supergroups.iter().enumerate() {
            if latest <= begin {
                continue;
            }
            let groups = supergroup * FAN..((supergroup + 1) * FAN).min(prefix.div_ceil(FAN));
            self.looked_at += groups.len();
            for group in groups {
                if self.group_ends[group] <= begin {
                    continue;
                }
                let members = group * FAN..((group + 1) * FAN).min(prefix);
                self.looked_at += members.len();
                for other in members {
                    if self.ends[other] > begin {
                        let offset = self.offsets[other];
                        self.neighbours.push((offset, offset + self.blocks[other].bytes));
                    }
                }
            }
        }
        self.neighbours.sort_unstable();
    }
}

/// The latest of the ends that an entry of an index stands for.
fn latest(ends: &[u32], entry: usize) -> u32 {
    let members = &ends[entry * FAN..((entry + 1) * FAN).min(ends.len())];
    members.iter().copied().max().unwrap_or(0)
}
