//! What is tried: settings of PyTorch's allocator, each one line to paste, and other allocators to compare with.

use crate::strategy::{STRATEGIES, StrategySpec};

/// The settings, simplest first. Those that are said to help most often come before their like.
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

/// What changing to another backend counts for, in settings: the model is not held against recordings of it.
const EFFORT_OF_BACKEND: usize = 3;

/// Those that are no other allocators to compare with: they hand out no memory, serve one size only, or are PyTorch's under
/// another name.
const LEFT_OUT: &[&str] = &["null", "fixed", "address", "caching", "async"];

/// Settings or an allocator to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What `PYTORCH_CUDA_ALLOC_CONF` would be; `None` for an allocator that no line of PyTorch's brings.
    pub settings: Option<String>,
    /// Who serves the requests then.
    pub strategy: StrategySpec,
}

impl Candidate {
    /// PyTorch's allocator with these settings.
    #[must_use]
    pub fn with_settings(settings: &str) -> Candidate {
        let strategy = match settings.contains(ASYNC_BACKEND) {
            true => StrategySpec::from("async"),
            false => StrategySpec { name: "caching".to_owned(), parameters: settings.to_owned() },
        };
        Candidate { settings: Some(settings.to_owned()), strategy }
    }

    /// How much there is to explain to whoever reads the line: the number of settings.
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
/// [`SETTINGS`].
#[must_use]
pub fn candidates(current: &str) -> Vec<Candidate> {
    let own = (!SETTINGS.contains(&current)).then_some(current);
    let settings = own.into_iter().chain(SETTINGS.iter().copied()).map(Candidate::with_settings);
    let others = STRATEGIES
        .iter()
        .filter(|entry| !LEFT_OUT.contains(&entry.name))
        .map(|entry| Candidate { settings: None, strategy: StrategySpec::from(entry.name) });
    settings.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{Selection, SuiteFile};

    #[test]
    fn there_are_at_least_thirty_settings_and_each_is_understood_and_written_once() {
        let tried = candidates("");
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
        let Selection::Names(names) = &suite.group[0].strategies else { panic!("a list") };
        let specs: Vec<StrategySpec> = names.iter().map(|name| StrategySpec::from(name.as_str())).collect();
        let tried: Vec<StrategySpec> =
            SETTINGS.iter().map(|settings| Candidate::with_settings(settings).strategy).collect();
        assert_eq!(specs, tried);
    }

    #[test]
    fn simpler_settings_come_first() {
        let native = SETTINGS.iter().filter(|text| !text.contains("backend"));
        let efforts: Vec<usize> = native.map(|text| Candidate::effort(text)).collect();
        assert!(efforts.is_sorted(), "{efforts:?}");
        assert_eq!(efforts.first(), Some(&0));
    }

    #[test]
    fn a_list_of_divisions_is_one_setting() {
        let list = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        assert_eq!((Candidate::effort(list), Candidate::effort("")), (2, 0));
    }

    #[test]
    fn settings_that_nobody_thought_of_are_tried_as_they_are() {
        let tried = candidates("max_split_size_mb:77");
        assert_eq!(tried[0], Candidate::with_settings("max_split_size_mb:77"));
        assert_eq!(tried.len(), candidates("").len() + 1);
    }

    #[test]
    fn the_other_backend_is_the_drivers_pool() {
        assert_eq!(Candidate::with_settings("backend:cudaMallocAsync").strategy, StrategySpec::from("async"));
    }
}
