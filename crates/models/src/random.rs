//! Random numbers that are the same on every machine and in every release.
//!
//! The ChaCha cipher is value-stable by promise. Every distribution is made here from its raw numbers, because those of
//! the `rand` crate may change between releases and a seed must mean the same trace for years.

use oomph_base::fnv1a;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A seeded source of random numbers.
#[derive(Clone, Debug)]
pub struct SeededRandom(ChaCha8Rng);

impl SeededRandom {
    /// SeededRandom for a seed and a name: the same seed throws differently in workloads of different names.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> SeededRandom {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&fnv1a(name.as_bytes()).to_le_bytes());
        SeededRandom(ChaCha8Rng::from_seed(key))
    }

    /// The generator itself, for code that draws in its own way.
    #[must_use]
    pub fn into_rng(self) -> ChaCha8Rng {
        self.0
    }

    /// A whole number from `least` to `most`, both included, all equally likely.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        let span = u128::from(most.saturating_sub(least)) + 1;
        least + ((u128::from(self.0.next_u64()) * span) >> 64) as u64
    }

    /// A position in a list of `length` items; 0 in an empty one.
    pub fn index(&mut self, length: usize) -> usize {
        self.between(0, (length as u64).saturating_sub(1)) as usize
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        // 53 random bits: as many as a double holds.
        ((self.0.next_u64() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}

/// A power law from `least` to `most`: the chance to reach twice a size is `2^-exponent`, whatever the size.
///
/// Drawn octave by octave, because the last bit of a logarithm differs between machines. It is exactly Pareto's law at
/// the octave borders and even within each octave; values beyond `most` fall into the last octave.
#[derive(Clone, Copy, Debug)]
pub struct PowerLaw {
    least: u64,
    most: u64,
    doubling: f64,
}

impl PowerLaw {
    /// The law with this tail exponent. `least` must not be zero.
    #[must_use]
    pub fn new(least: u64, most: u64, exponent: f64) -> PowerLaw {
        PowerLaw { least, most, doubling: (-exponent).exp2() }
    }

    /// Draws one value.
    pub fn draw(&self, random: &mut SeededRandom) -> u64 {
        let mut low = self.least;
        while low <= self.most / 2 && random.chance(self.doubling) {
            low *= 2;
        }
        random.between(low, low.saturating_mul(2).saturating_sub(1).min(self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds in published results must stay comparable: a change here changes every trace.
    #[test]
    fn values_of_a_seed_never_change() {
        let mut random = SeededRandom::new(1, "random");
        let drawn: Vec<u64> = (0..4).map(|_| random.between(1, 1000)).collect();
        assert_eq!(drawn, [119, 502, 641, 275]);
    }

    #[test]
    fn seed_and_name_both_matter() {
        let first = |seed, name| SeededRandom::new(seed, name).between(0, u64::MAX);
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_ne!(first(1, "a"), first(1, "b"));
    }

    #[test]
    fn range_is_covered_evenly() {
        let mut random = SeededRandom::new(0, "");
        let mut seen = [0_u32; 6];
        for _ in 0..6000 {
            seen[random.between(5, 10) as usize - 5] += 1;
        }
        assert!(seen.iter().all(|&count| (850..1150).contains(&count)), "{seen:?}");
        assert_eq!(random.between(7, 7), 7);
        assert_eq!(random.index(0), 0);
    }

    #[test]
    fn power_law_halves_at_every_octave() {
        let (law, mut random) = (PowerLaw::new(16, 1 << 20, 1.0), SeededRandom::new(0, ""));
        let drawn: Vec<u64> = (0..40_000).map(|_| law.draw(&mut random)).collect();
        for octave in 0..6 {
            let reached = drawn.iter().filter(|&&value| value >= 16 << octave).count() as f64;
            let expected = 40_000.0 / f64::from(1 << octave);
            assert!((reached / expected - 1.0).abs() < 0.1, "octave {octave}: {reached} instead of {expected}");
        }
        assert!(drawn.iter().all(|value| (16..=1 << 20).contains(value)));
    }
}
