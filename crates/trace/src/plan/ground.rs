//! Takes apart what need not be packed together.
//!
//! A block that lives as long as everything around it can lie at the bottom: whatever was below it moves up by its size.
//! Without it the others may fall apart into groups that never meet, and each group starts over. Weights go that way, and
//! what is left of a training run is often one group a step.

use oomph_base::packing::BlockLifetime;

/// Deeper nests are left to the packing, which takes them well.
const DEEPEST: u32 = 32;

/// Blocks that have to be packed together, above what lies under them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Their places in the list, in order of allocation.
    pub(super) members: Vec<u32>,
    /// Where the ground is.
    pub(super) base: u64,
}

/// What lies on the ground, with its offset, and the groups above it, in order of time.
pub(super) fn clear_ground(blocks: &[BlockLifetime]) -> (Vec<(u32, u64)>, Vec<Group>) {
    let mut grounded = Vec::new();
    let mut groups = Vec::new();
    let mut open: Vec<(Group, u32)> = Vec::new();
    split((0..blocks.len() as u32).collect(), blocks, |members| open.push((Group { members, base: 0 }, 0)));
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
            grounded.push((block, base));
            base += blocks[block as usize].bytes;
        }
        split(others, blocks, |members| open.push((Group { members, base }, depth + 1)));
    }
    groups.sort_by_key(|group| group.members.first().copied());
    (grounded, groups)
}

/// Cuts a list of blocks, in order of their beginnings, wherever nobody is alive.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn life(begin: u32, end: u32, bytes: u64) -> BlockLifetime {
        BlockLifetime { begin, end, bytes }
    }

    #[test]
    fn weights_lie_at_the_bottom_and_every_step_starts_over() {
        let step =
            |at: u32| [life(at, at + 1, 1), life(at, at + 2, 2), life(at + 1, at + 3, 3), life(at + 2, at + 3, 4)];
        let mut blocks = vec![life(0, 9, 100), life(0, 9, 10)];
        blocks.extend([0, 3, 6].into_iter().flat_map(step));
        let (grounded, groups) = clear_ground(&blocks);
        assert_eq!(grounded, [(0, 0), (1, 100)]);
        let told: Vec<_> = groups.iter().map(|group| (group.members.clone(), group.base)).collect();
        assert_eq!(told, [(vec![2, 3, 4, 5], 110), (vec![6, 7, 8, 9], 110), (vec![10, 11, 12, 13], 110)]);
    }

    #[test]
    fn a_nest_is_grounded_from_the_outside_in() {
        let blocks = [life(0, 6, 1), life(0, 4, 2), life(1, 3, 4), life(4, 6, 8)];
        let (mut grounded, groups) = clear_ground(&blocks);
        grounded.sort_unstable();
        assert_eq!((grounded, groups), (vec![(0, 0), (1, 1), (2, 3), (3, 1)], vec![]));
    }
}
