//! Packing problems with a known best layout, for tests.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Lifetimes, told_by};
use oomph_base::packing::BlockLifetime;

/// A rectangle of time and memory that is cut until there are enough pieces. The pieces fill it without a gap, so the best
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
