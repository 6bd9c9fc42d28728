//! How many times as long one thing takes as another, and how sure that is.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::base::Nanos;

/// How often both are drawn again.
const RESAMPLINGS: usize = 1000;
/// The same draws every time: a table must not change by itself.
const SEED: u64 = 7;

/// A ratio and the interval in which 95 of 100 resamplings lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratio {
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// The ratio of the medians; `None` where one of them has no samples or takes no time.
pub(super) fn of_medians(times: &[Nanos], base: &[Nanos]) -> Option<Ratio> {
    let ratio = |times: &[Nanos], base: &[Nanos]| {
        let base = median(base)?;
        (base > 0.0).then_some(median(times)? / base)
    };
    let value = ratio(times, base)?;
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mut drawn: Vec<f64> =
        (0..RESAMPLINGS).filter_map(|_| ratio(&redrawn(times, &mut random), &redrawn(base, &mut random))).collect();
    drawn.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| drawn.get((drawn.len() as f64 * share) as usize).copied();
    Some(Ratio { value, low: at(0.025)?.min(value), high: at(0.975)?.max(value) })
}

fn redrawn(times: &[Nanos], random: &mut impl Rng) -> Vec<Nanos> {
    (0..times.len()).map(|_| times[random.random_range(0..times.len())]).collect()
}

fn median(times: &[Nanos]) -> Option<f64> {
    let mut sorted: Vec<u64> = times.iter().map(|time| time.0).collect();
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle] as f64),
        _ => Some((sorted[middle - 1] as f64 + sorted[middle] as f64) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(times: &[u64]) -> Vec<Nanos> {
        times.iter().copied().map(Nanos).collect()
    }

    #[test]
    fn what_never_varies_is_sure() {
        let ratio = of_medians(&nanos(&[30, 30, 30]), &nanos(&[20, 20])).unwrap();
        assert_eq!(ratio, Ratio { value: 1.5, low: 1.5, high: 1.5 });
    }

    #[test]
    fn what_varies_has_an_interval_around_its_value() {
        let ratio = of_medians(&nanos(&[95, 100, 105, 110, 90]), &nanos(&[50, 52, 48, 51, 49])).unwrap();
        assert!(ratio.low < ratio.value && ratio.value < ratio.high, "{ratio:?}");
        assert!((1.7..2.0).contains(&ratio.low) && (2.0..2.3).contains(&ratio.high), "{ratio:?}");
    }

    #[test]
    fn nothing_is_no_ratio() {
        assert_eq!(of_medians(&[], &nanos(&[1])), None);
        assert_eq!(of_medians(&nanos(&[1]), &[]), None);
        assert_eq!(of_medians(&nanos(&[1]), &nanos(&[0])), None);
    }
}
