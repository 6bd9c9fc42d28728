//! Which settings to recommend.
//!
//! Of the settings that complete in the memory there is (of all, where none does or nobody said how much there is) those
//! count that need at most [`least_gain`] more than the least. Of these the simplest is taken:
//!
//! 1. what the program has now, for nothing is to be changed then;
//! 2. the fewest settings, a change of the backend counting for three more;
//! 3. the least memory, then the least time in the driver, then the order of the grid.
//!
//! Other allocators are never recommended: no line of PyTorch's brings them.

use super::{AdviceRow, grid::Candidate};
use crate::base::MIB;

/// Less than this share of what is needed now is not worth a change.
const LEAST_SHARE: f64 = 0.01;

/// Less than this is not worth a change either.
const LEAST_BYTES: u64 = 64 * MIB;

/// The difference from which on less memory is worth a change, for a program that needs so much now.
#[must_use]
pub fn least_gain(needed_bytes: u64) -> u64 {
    LEAST_BYTES.max((needed_bytes as f64 * LEAST_SHARE) as u64)
}

/// The number of the row to recommend: `current` itself where nothing is worth a change.
#[must_use]
pub fn choose(rows: &[AdviceRow], current: usize) -> usize {
    let eligible = |row: &&(usize, &AdviceRow)| row.1.settings.is_some() && row.1.needed_bytes.is_some();
    let numbered: Vec<(usize, &AdviceRow)> = rows.iter().enumerate().collect();
    let any_fits = numbered.iter().filter(eligible).any(|(_, row)| row.fits == Some(true));
    let in_question =
        || numbered.iter().filter(eligible).filter(|(_, row)| !any_fits || row.fits == Some(true)).copied();
    let Some(least) = in_question().filter_map(|(_, row)| row.needed_bytes).min() else { return current };
    let needed_now = rows.get(current).and_then(|row| row.needed_bytes).unwrap_or(least);
    let most = least.saturating_add(least_gain(needed_now));
    in_question()
        .filter(|(_, row)| row.needed_bytes.is_some_and(|bytes| bytes <= most))
        .min_by_key(|&(number, row)| {
            let settings = row.settings.as_deref().unwrap_or_default();
            (number != current, Candidate::effort(settings), row.needed_bytes, row.driver_ns, number)
        })
        .map_or(current, |(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    fn row(settings: &str, needed_mib: u64) -> AdviceRow {
        AdviceRow { settings: Some(settings.to_owned()), needed_bytes: Some(needed_mib * MIB), ..AdviceRow::default() }
    }

    #[test]
    fn a_saving_that_is_too_small_changes_nothing() {
        let rows = [row("", 1000), row("expandable_segments:True", 940)];
        assert_eq!(choose(&rows, 0), 0, "60 MiB are less than 64");
        let rows = [row("", 100_000), row("expandable_segments:True", 99_100)];
        assert_eq!(choose(&rows, 0), 0, "900 MiB are less than a hundredth");
        let rows = [row("", 1000), row("expandable_segments:True", 930)];
        assert_eq!(choose(&rows, 0), 1);
        assert_eq!((least_gain(GIB), least_gain(100 * GIB)), (64 * MIB, GIB));
    }

    #[test]
    fn among_equals_the_simpler_is_taken() {
        let rows = [
            row("", 2000),
            row("backend:cudaMallocAsync", 990),
            row("expandable_segments:True,roundup_power2_divisions:8", 980),
            row("max_split_size_mb:64", 1020),
            row("expandable_segments:True", 1010),
        ];
        assert_eq!(choose(&rows, 0), 4, "fewest settings, and then the least memory");
    }

    #[test]
    fn what_the_program_has_now_is_kept_where_it_is_as_good() {
        let rows = [row("max_split_size_mb:64,garbage_collection_threshold:0.8", 1010), row("", 1000)];
        assert_eq!((choose(&rows, 0), choose(&rows, 1)), (0, 1));
    }

    #[test]
    fn what_fits_goes_before_what_needs_less_elsewhere() {
        let mut rows = [row("", 2000), row("expandable_segments:True", 1000), row("max_split_size_mb:64", 1500)];
        (rows[0].fits, rows[1].fits, rows[2].fits) = (Some(false), Some(false), Some(true));
        assert_eq!(choose(&rows, 0), 2, "a fit that is not monotone");
        rows[2].fits = Some(false);
        assert_eq!(choose(&rows, 0), 1, "where nothing fits, what comes nearest");
    }

    #[test]
    fn other_allocators_are_not_one_line_to_paste() {
        let other = AdviceRow { needed_bytes: Some(GIB), ..AdviceRow::default() };
        assert_eq!(choose(&[row("", 2048), other], 0), 0);
    }

    #[test]
    fn where_nothing_could_be_tried_nothing_is_changed() {
        assert_eq!(choose(&[AdviceRow::default(), AdviceRow::default()], 1), 1);
    }
}
