//! Local search: lays blocks out under a ceiling a little below the best layout so far, and moves whatever hits the
//! ceiling further to the front of the order until everything fits, or the budget is spent.
//!
//! Moving a block leaves the order before its new place as it was, so only what comes after is laid out again.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use oomph_base::packing::{BlockLifetime, BlockPlacer, GapChoice, PackingBudget, PlacementOutcome};

/// The same for every trace: a plan is no matter of luck.
const SEED: u64 = 7;
/// About what taking a block down costs.
const STEPS_OF_REMOVAL: u64 = 16;
/// How many parts of the way down to the target each ceiling takes at once.
const BITE: u64 = 8;

/// A layout that is lower than `height`, if one is found. Stops at `target`, which is low enough.
pub(super) fn improve(
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
                best = Some((placer.offsets().to_vec(), lowest));
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

/// A place before `from`: near ones as likely as far ones at every scale. None where there is no place.
fn further_to_the_front(from: usize, dice: &mut ChaCha8Rng) -> Option<usize> {
    let scales = (from as u64).checked_ilog2()? + 1;
    let scale = dice.next_u64() % u64::from(scales);
    let reach = (2_u64 << scale).min(from as u64);
    Some(from - 1 - (dice.next_u64() % reach) as usize)
}
