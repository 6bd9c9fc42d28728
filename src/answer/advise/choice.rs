//! What is tried, and which settings are recommended.
//!
//! Candidates are the settings that complete in the available memory; if there are none, those that complete in part of
//! the range in which the limit is known to be; if there are none either, all settings. If the memory is unknown,
//! candidates are all settings that do not reserve more than the current ones; others release their memory only under a
//! limit. Of the candidates, only those count that need at most [`least_gain`] more than the least. The simplest of them is
//! chosen:
//!
//! 1. the current settings, because nothing has to be changed then;
//! 2. the fewest settings, where a change of the backend counts as three more;
//! 3. the least memory, then the least time in the driver, then the order of the grid.
//!
//! Other allocators are never recommended: they cannot be selected through `PYTORCH_CUDA_ALLOC_CONF`.

use super::AdviceRow;
use crate::{
    base::MIB,
    pytorch::Release,
    strategy::{STRATEGIES, StrategySpec},
};

/// The settings, simplest first. Among equally simple ones, those that are recommended most often come first.
pub const SETTINGS: &[&str] = &[
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "max_split_size_mb:1024",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0.9",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "backend:cudaMallocAsync",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "expandable_segments:True,roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,roundup_power2_divisions:16",
    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "expandable_segments:True,max_split_size_mb:128",
    "expandable_segments:True,max_split_size_mb:512",
    "expandable_segments:True,garbage_collection_threshold:0.8",
    "expandable_segments:True,large_segment_size_mb:64",
    "max_split_size_mb:64,garbage_collection_threshold:0.8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
    "max_split_size_mb:256,garbage_collection_threshold:0.8",
    "max_split_size_mb:512,garbage_collection_threshold:0.8",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "max_split_size_mb:512,roundup_power2_divisions:8",
    "roundup_power2_divisions:8,garbage_collection_threshold:0.8",
    "expandable_segments:True,roundup_power2_divisions:8,garbage_collection_threshold:0.8",
    "max_split_size_mb:128,roundup_power2_divisions:8,garbage_collection_threshold:0.8",
];

/// How PyTorch's settings name the driver's own pool.
const ASYNC_BACKEND: &str = "backend:cudaMallocAsync";

/// What changing to another backend counts for, in settings: no recording of that backend has tested the model.
const EFFORT_OF_BACKEND: usize = 3;

/// Strategies that are not compared: they hand out no memory, serve one size only, or are PyTorch's under another name.
const LEFT_OUT: &[&str] = &["null", "fixed", "address", "caching", "async"];

/// Settings or an allocator to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsCandidate {
    /// What `PYTORCH_CUDA_ALLOC_CONF` would be; `None` for an allocator that it cannot select.
    pub settings: Option<String>,
    /// The strategy that stands for it.
    pub strategy: StrategySpec,
}

impl SettingsCandidate {
    /// PyTorch's allocator with these settings.
    #[must_use]
    pub fn with_settings(settings: &str) -> SettingsCandidate {
        let strategy = match settings.contains(ASYNC_BACKEND) {
            true => StrategySpec::from("async"),
            false => StrategySpec { name: "caching".to_owned(), parameters: settings.to_owned() },
        };
        SettingsCandidate { settings: Some(settings.to_owned()), strategy }
    }

    /// How much a reader of the line must understand: the number of settings.
    #[must_use]
    pub fn effort(settings: &str) -> usize {
        // A list such as [256:1,512:2] is one value.
        let mut depth = 0_i32;
        let separators = settings.chars().filter(|&c| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            c == ',' && depth == 0
        });
        let count = if settings.is_empty() { 0 } else { 1 + separators.count() };
        if settings.contains(ASYNC_BACKEND) { count + EFFORT_OF_BACKEND } else { count }
    }
}

/// Everything that is tried for a program that runs with the `current` settings: these first where they are not among
/// [`SETTINGS`]. Settings that the release does not have are left out.
#[must_use]
pub fn candidates(current: &str, release: Release) -> Vec<SettingsCandidate> {
    let own = (!SETTINGS.contains(&current)).then_some(current);
    let settings = own.into_iter().chain(SETTINGS.iter().copied()).map(SettingsCandidate::with_settings);
    let settings = settings
        .map(|candidate| SettingsCandidate { strategy: candidate.strategy.of_release(release), ..candidate })
        .filter(|candidate| candidate.settings.as_deref() == Some(current) || candidate.strategy.check().is_ok());
    let others = STRATEGIES
        .iter()
        .filter(|entry| !LEFT_OUT.contains(&entry.name))
        .map(|entry| SettingsCandidate { settings: None, strategy: StrategySpec::from(entry.name) });
    settings.chain(others).collect()
}

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
    let unlimited = rows.iter().all(|row| row.fits.is_none() && !row.depends_on_limit);
    let reserved_now = rows.get(current).and_then(|row| row.uncapped_reserved_bytes).unwrap_or(u64::MAX);
    let most_reserved = reserved_now.saturating_add(least_gain(reserved_now));
    let eligible = |row: &&(usize, &AdviceRow)| {
        let rises = unlimited && row.1.uncapped_reserved_bytes.is_some_and(|bytes| bytes > most_reserved);
        row.1.settings.is_some() && row.1.needed_bytes.is_some() && !rises
    };
    let numbered: Vec<(usize, &AdviceRow)> = rows.iter().enumerate().collect();
    let fit = |row: &AdviceRow| (row.fits == Some(true), row.depends_on_limit);
    let best_fit = numbered.iter().filter(eligible).map(|(_, row)| fit(row)).max();
    let in_question = || numbered.iter().filter(eligible).filter(|(_, row)| Some(fit(row)) == best_fit).copied();
    let Some(least) = in_question().filter_map(|(_, row)| row.needed_bytes).min() else { return current };
    let needed_now = rows.get(current).and_then(|row| row.needed_bytes).unwrap_or(least);
    let most = least.saturating_add(least_gain(needed_now));
    in_question()
        .filter(|(_, row)| row.needed_bytes.is_some_and(|bytes| bytes <= most))
        .min_by_key(|&(number, row)| {
            let settings = row.settings.as_deref().unwrap_or_default();
            (
                number != current,
                SettingsCandidate::effort(settings),
                row.needed_bytes,
                row.driver_without_launches_ns,
                number,
            )
        })
        .map_or(current, |(number, _)| number)
}

#[cfg(test)]
mod grid_tests {
    use super::*;
    use crate::suite::{NameSelection, SuiteFile};

    #[test]
    fn thirty_distinct_settings_are_valid() {
        let tried = candidates("", Release::DEFAULT);
        let settings: Vec<&str> = tried.iter().filter_map(|candidate| candidate.settings.as_deref()).collect();
        assert!(settings.len() >= 30, "{}", settings.len());
        for candidate in &tried {
            candidate.strategy.check().unwrap();
        }
        let distinct: std::collections::BTreeSet<&str> = settings.iter().copied().collect();
        assert_eq!(distinct.len(), settings.len());
    }

    #[test]
    fn the_suite_of_settings_runs_the_same_grid() {
        let suite = SuiteFile::load("settings").unwrap();
        let NameSelection::Names(names) = &suite.group[0].strategies else { panic!("a list") };
        let specs: Vec<StrategySpec> = names.iter().map(|name| StrategySpec::from(name.as_str())).collect();
        let tried: Vec<StrategySpec> =
            SETTINGS.iter().map(|settings| SettingsCandidate::with_settings(settings).strategy).collect();
        assert_eq!(specs, tried);
    }

    #[test]
    fn simpler_settings_come_first() {
        let native = SETTINGS.iter().filter(|text| !text.contains("backend"));
        let efforts: Vec<usize> = native.map(|text| SettingsCandidate::effort(text)).collect();
        assert!(efforts.is_sorted(), "{efforts:?}");
        assert_eq!(efforts.first(), Some(&0));
    }

    #[test]
    fn a_list_of_divisions_is_one_setting() {
        let list = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        assert_eq!((SettingsCandidate::effort(list), SettingsCandidate::effort("")), (2, 0));
    }

    #[test]
    fn unknown_settings_are_tried() {
        let tried = candidates("max_split_size_mb:77", Release::DEFAULT);
        assert_eq!(tried[0], SettingsCandidate::with_settings("max_split_size_mb:77"));
        assert_eq!(tried.len(), candidates("", Release::DEFAULT).len() + 1);
    }

    #[test]
    fn the_other_backend_is_the_drivers_pool() {
        assert_eq!(SettingsCandidate::with_settings("backend:cudaMallocAsync").strategy, StrategySpec::from("async"));
    }
}

#[cfg(test)]
mod choice_tests {
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
    fn current_settings_win_ties() {
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
    fn without_a_limit_reserved_memory_must_not_rise() {
        let reserves = |settings: &str, needed_mib, reserved: u64| AdviceRow {
            uncapped_reserved_bytes: Some(reserved),
            ..row(settings, needed_mib)
        };
        let mut rows = [reserves("", 6000, 7 * GIB), reserves("max_split_size_mb:64", 5000, 13 * GIB)];
        assert_eq!(choose(&rows, 0), 0);
        (rows[0].fits, rows[1].fits) = (Some(false), Some(true));
        assert_eq!(choose(&rows, 0), 1, "a limit makes PyTorch release the rest");
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
