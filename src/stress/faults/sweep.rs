//! Which afflictions a story is played under: all that its clean run leaves room for, or a sample of them.

use std::num::NonZeroU64;

use rand::seq::index;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use super::{
    affliction::{Affliction, Manner},
    hindrance::Tallies,
};
use crate::device::CallKind;

/// A story with no more driver calls than this is played under every affliction there is.
const FEW_CALLS: u64 = 300;
/// Where there are more, all turns up to this one are taken ...
const FIRST_TURNS: u64 = 100;
/// ... and of the later ones this many.
const SAMPLED_TURNS: usize = 50;
/// How many calls fail in a row, of one kind or of any: a call, what undoes it, and what is tried next. One less than the
/// tries that a program gives a call.
const IN_A_ROW: NonZeroU64 = NonZeroU64::MIN.saturating_add(2);
/// At how many moments of a story its memory is taken, and its events get stuck.
const MOMENTS: u64 = 8;

/// Afflictions to try, and how many were left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Sweep {
    pub(super) afflictions: Vec<Affliction>,
    pub(super) left_out: u64,
}

impl Sweep {
    /// What can befall a run that made these driver calls in so many calls of the strategy's own.
    pub(super) fn of(asked: &Tallies, moments: u64, seed: u64) -> Sweep {
        let mut sweep = Sweep::default();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let all = asked.total() <= FEW_CALLS;
        for (kind, count) in asked.iter() {
            let turns = turns(count, all, &mut random);
            sweep.add(&turns, count, |turn| Affliction::once(kind, turn, Manner::Error));
            sweep.add(&turns, count, |first| Affliction::Calls {
                kind: Some(kind),
                first,
                count: IN_A_ROW,
                manner: Manner::Error,
            });
            if may_run_out(kind) {
                sweep.add(&turns, count, |turn| Affliction::once(kind, turn, Manner::OutOfMemory));
            }
        }
        let total = asked.total();
        let turns = turns(total, all, &mut random);
        let any = |first| Affliction::Calls { kind: None, first, count: IN_A_ROW, manner: Manner::Error };
        sweep.add(&turns, total, any);
        let step = moments.div_ceil(MOMENTS).max(1);
        let while_taken = NonZeroU64::new(moments / 4).unwrap_or(NonZeroU64::MIN);
        for first in (1..=moments).step_by(step as usize) {
            sweep.afflictions.push(Affliction::MemoryTaken { first, count: while_taken });
            sweep.afflictions.push(Affliction::Stuck { first });
        }
        sweep
    }

    fn add(&mut self, turns: &[u64], of: u64, affliction: impl Fn(u64) -> Affliction) {
        self.afflictions.extend(turns.iter().map(|&turn| affliction(turn)));
        self.left_out += of - turns.len() as u64;
    }
}

/// The turns to take, ascending.
fn turns(count: u64, all: bool, random: &mut ChaCha8Rng) -> Vec<u64> {
    if all || count <= FIRST_TURNS {
        return (1..=count).collect();
    }
    let later = (count - FIRST_TURNS) as usize;
    let mut sampled = index::sample(random, later, SAMPLED_TURNS.min(later)).into_vec();
    sampled.sort_unstable();
    (1..=FIRST_TURNS).chain(sampled.into_iter().map(|place| FIRST_TURNS + 1 + place as u64)).collect()
}

/// Whether a call of this kind may find that memory, or address space, has run out.
const fn may_run_out(kind: CallKind) -> bool {
    matches!(kind, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync | CallKind::AddressReserve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_few_turns_all_are_taken_and_of_many_the_first_and_a_sample() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        assert!(turns(200, true, &mut random).into_iter().eq(1..=200));
        assert!(turns(90, false, &mut random).into_iter().eq(1..=90));
        let many = turns(1_000, false, &mut random);
        assert!(many.iter().copied().take(100).eq(1..=100));
        assert_eq!(many.len(), 150);
        assert!(many.is_sorted() && many.iter().all(|&turn| turn <= 1_000));
        assert_eq!(
            many,
            turns(1_000, false, &mut {
                let mut same = ChaCha8Rng::seed_from_u64(7);
                turns(200, true, &mut same);
                same
            })
        );
    }
}
