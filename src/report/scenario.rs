//! Cases that may be compared: same workload, device and limit, different strategies. Writes
//! `comparison.csv`, and `bounds.csv`: what strategies need and take over all workloads.

use std::collections::{BTreeMap, HashMap, HashSet};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::{
    Medium, ReportError,
    render::{RenderRow, TextTable, distinct, said},
    rows,
};
use crate::{
    base::{Bytes, Nanos},
    measure::{CaseRecord, SCHEMA, Split, Status, digits},
    models::Recipe,
    pytorch::Release,
    strategy::StrategySpec,
};

/// Everything that must be equal before two strategies may be compared. Simulated and real devices
/// have different names, so times of different clocks are never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CaseScenario<'a> {
    pub(super) suite: &'a str,
    pub(super) workload: &'a str,
    pub(super) device: &'a str,
    pub(super) limit_bytes: Option<u64>,
    pub(super) seed: u64,
    pub(super) repeat: u32,
}

impl<'a> CaseScenario<'a> {
    fn of(record: &'a CaseRecord) -> CaseScenario<'a> {
        CaseScenario {
            suite: &record.suite,
            workload: &record.workload,
            device: &record.device,
            limit_bytes: record.limit_bytes,
            seed: record.seed,
            repeat: record.repeat,
        }
    }
}

/// The cases of one scenario.
pub(super) struct CaseGroup<'a> {
    pub(super) scenario: CaseScenario<'a>,
    pub(super) records: Vec<&'a CaseRecord>,
}

impl<'a> CaseGroup<'a> {
    /// The cases that take part in rankings.
    pub(super) fn contenders(&self) -> impl Iterator<Item = &'a CaseRecord> {
        self.records.iter().copied().filter(|record| is_contender(record))
    }

    /// Whether memory is compared by what cases need: where that is known of all contenders. Otherwise it is compared by
    /// what they use.
    pub(super) fn is_by_need(&self) -> bool {
        self.contenders().next().is_some() && self.contenders().all(|record| record.needed_bytes.is_some())
    }

    /// What a case is compared by.
    pub(super) fn compared_bytes(&self, record: &CaseRecord) -> Option<u64> {
        if self.is_by_need() { record.needed_bytes } else { record.peak_device_used_bytes }
    }

    /// The lowest memory of the contenders; `None` with fewer than two.
    pub(super) fn least_bytes(&self) -> Option<u64> {
        let known = || self.contenders().filter_map(|record| self.compared_bytes(record));
        if known().count() < 2 { None } else { known().min() }
    }
}

/// Whether a case takes part in rankings: it completed with memory from the device, and its strategy does not take a
/// fixed part of the device.
pub(super) fn is_contender(record: &CaseRecord) -> bool {
    takes_memory(record) && !StrategySpec::from(record.strategy.as_str()).takes_fixed_part()
}

/// Whether a case completed with memory from the device. The strategy `null` takes none.
pub(super) fn takes_memory(record: &CaseRecord) -> bool {
    let calls = [record.driver_alloc_calls, record.driver_mapping_calls, record.driver_pool_calls];
    record.status == Status::Completed && calls.iter().any(|calls| *calls > Some(0))
}

/// The records by scenario, both in order of first appearance.
pub(super) fn groups(records: &[CaseRecord]) -> Vec<CaseGroup<'_>> {
    let mut groups: Vec<CaseGroup<'_>> = Vec::new();
    let mut places: HashMap<CaseScenario<'_>, usize> = HashMap::new();
    for record in records {
        let scenario = CaseScenario::of(record);
        let place = *places.entry(scenario).or_insert_with(|| {
            groups.push(CaseGroup { scenario, records: Vec::new() });
            groups.len() - 1
        });
        groups[place].records.push(record);
    }
    groups
}

/// One title per group: the workload's name and every property in which the groups differ.
pub(super) fn titles(groups: &[CaseGroup<'_>]) -> Vec<String> {
    let differ = |differ: fn(&CaseScenario<'_>, &CaseScenario<'_>) -> bool| {
        groups.windows(2).any(|pair| differ(&pair[0].scenario, &pair[1].scenario))
    };
    let suites = differ(|a, b| a.suite != b.suite);
    let devices = differ(|a, b| a.device != b.device);
    let limits = differ(|a, b| a.limit_bytes != b.limit_bytes);
    let seeds = differ(|a, b| a.seed != b.seed);
    let repeats = differ(|a, b| a.repeat != b.repeat);
    let title = |CaseGroup { scenario, .. }: &CaseGroup<'_>| {
        let mut title = scenario.workload.to_owned();
        if suites {
            title = format!("{}/{title}", scenario.suite);
        }
        if devices {
            title.push_str(&format!(" @{}", scenario.device));
        }
        if let (Some(limit), true) = (scenario.limit_bytes, limits) {
            title.push_str(&format!(" <= {}", Bytes(limit)));
        }
        if seeds {
            title.push_str(&format!(" #{}", scenario.seed));
        }
        if repeats {
            title.push_str(&format!(" x{}", scenario.repeat));
        }
        title
    };
    groups.iter().map(title).collect()
}

/// One row of `comparison.csv`: a case, and its figures as ratios to those of the base strategy.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct ComparisonRow {
    schema: u32,
    suite: String,
    workload: String,
    device: String,
    limit_bytes: Option<u64>,
    seed: u64,
    repeat: u32,
    base: String,
    strategy: String,
    release: Option<Release>,
    status: Status,
    ooms: Option<u64>,
    family: Option<String>,
    split: Option<Split>,
    needed_bytes: Option<u64>,
    #[serde(serialize_with = "digits::optional")]
    need_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    appetite_ratio: Option<f64>,
    peak_allocated_bytes: Option<u64>,
    peak_allocated_ratio: Option<f64>,
    peak_reserved_bytes: Option<u64>,
    peak_reserved_ratio: Option<f64>,
    peak_device_used_bytes: Option<u64>,
    peak_device_used_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    internal_fragmentation_share: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    external_fragmentation_share: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    fragmentation_share: Option<f64>,
    peak_segments: Option<u64>,
    peak_segments_ratio: Option<f64>,
    retries: Option<u64>,
    driver_calls: Option<u64>,
    driver_calls_ratio: Option<f64>,
    driver_ns: Option<u64>,
    driver_time_ratio: Option<f64>,
    elapsed_ns: Option<u64>,
    elapsed_time_ratio: Option<f64>,
}

impl ComparisonRow {
    /// A ratio is empty where one of the two did not complete: figures of half a run cannot be compared.
    fn new(record: &CaseRecord, base: &str, base_case: Option<&CaseRecord>) -> ComparisonRow {
        let comparable = |one: &CaseRecord| one.status == Status::Completed && one.clock == record.clock;
        let base_case = base_case.filter(|case| comparable(case) && comparable(record));
        let ratio = |of: fn(&CaseRecord) -> Option<u64>| {
            let unit = of(base_case?).filter(|unit| *unit > 0)?;
            Some(digits::six_digits(of(record)? as f64 / unit as f64))
        };
        ComparisonRow {
            schema: SCHEMA,
            suite: record.suite.clone(),
            workload: record.workload.clone(),
            device: record.device.clone(),
            limit_bytes: record.limit_bytes,
            seed: record.seed,
            repeat: record.repeat,
            base: base.to_owned(),
            strategy: record.strategy.clone(),
            release: record.release,
            status: record.status,
            ooms: record.ooms,
            family: record.family.clone(),
            split: record.split,
            needed_bytes: record.needed_bytes,
            need_ratio: record.need_ratio(),
            appetite_ratio: record.appetite_ratio(),
            peak_allocated_bytes: record.peak_allocated_bytes,
            peak_allocated_ratio: ratio(|case| case.peak_allocated_bytes),
            peak_reserved_bytes: record.peak_reserved_bytes,
            peak_reserved_ratio: ratio(|case| case.peak_reserved_bytes),
            peak_device_used_bytes: record.peak_device_used_bytes,
            peak_device_used_ratio: ratio(|case| case.peak_device_used_bytes),
            internal_fragmentation_share: record.internal_fragmentation_share,
            external_fragmentation_share: record.external_fragmentation_share,
            fragmentation_share: record.fragmentation_share,
            peak_segments: record.peak_segments,
            peak_segments_ratio: ratio(|case| case.peak_segments),
            retries: record.retries,
            driver_calls: record.driver_calls,
            driver_calls_ratio: ratio(|case| case.driver_calls),
            driver_ns: record.driver_ns,
            driver_time_ratio: ratio(|case| case.driver_ns),
            elapsed_ns: record.elapsed_ns,
            elapsed_time_ratio: ratio(|case| case.elapsed_ns),
        }
    }
}

/// `comparison.csv`: the cases of each scenario together, with ratios to a base strategy.
pub(crate) fn comparison_csv(records: &[CaseRecord], base: &str) -> Result<String, ReportError> {
    let mut compared = Vec::new();
    for group in groups(records) {
        let base_case = group.records.iter().find(|record| record.strategy == base).copied();
        compared.extend(group.records.iter().map(|record| ComparisonRow::new(record, base, base_case)));
    }
    rows::to_csv(&compared)
}

/// The median over families of a figure, its 95 % interval, and the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct FamilyFigures {
    pub(super) median: Option<f64>,
    /// By bootstrap over families.
    pub(super) interval: Option<(f64, f64)>,
    pub(super) p90: Option<f64>,
}

/// One row of `bounds.csv`: what a strategy needs and takes as a multiple of the bound (`live_peak_rounded_bytes`). It is
/// of all families, of those of a split, or of those of a generator.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BoundRow {
    schema: u32,
    /// The strategy.
    pub strategy: String,
    /// The split; `None` stands for both.
    pub split: Option<Split>,
    /// The generator of the workloads, `recorded` for trace files; `None` stands for all.
    pub generator: Option<String>,
    pub(super) families: u64,
    pub(super) patterns: u64,
    pub(super) cases: u64,
    pub(super) completed_cases: u64,
    /// What suffices, where that was searched.
    #[serde(serialize_with = "digits::optional")]
    pub median_need_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) median_need_low_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) median_need_high_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) p90_need_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) worst_need_ratio: Option<f64>,
    worst_need_workload: Option<String>,
    /// What is taken where nothing limits it. Of completed cases, as the other ratios: a case that ended early reserved
    /// less than its trace needs.
    #[serde(serialize_with = "digits::optional")]
    pub median_appetite_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) median_appetite_low_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) median_appetite_high_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) p90_appetite_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) worst_appetite_ratio: Option<f64>,
    worst_appetite_workload: Option<String>,
    /// The sums over families of their medians.
    pub(super) driver_ns: Option<u64>,
    elapsed_ns: Option<u64>,
}

/// The generator of trace files.
const RECORDED: &str = "recorded";

/// The middle value, or the mean of the two in the middle.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// How often families are drawn for an interval.
const RESAMPLES: usize = 1000;
/// The numbers that the draws begin with: the same rows give the same interval.
const BOOTSTRAP_SEED: u64 = 95;

/// The 95 % interval of the median by the percentile bootstrap; `None` with fewer than two values.
fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    if values.len() < 2 {
        return None;
    }
    let mut dice = ChaCha8Rng::seed_from_u64(BOOTSTRAP_SEED);
    let mut drawn = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            drawn.iter_mut().for_each(|value| *value = values[dice.random_range(0..values.len())]);
            median(&mut drawn)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Some((medians[RESAMPLES * 25 / 1000], medians[RESAMPLES * 975 / 1000 - 1]))
}

/// The different patterns of one family: cases of one strategy.
type FamilyCases<'a> = Vec<&'a CaseRecord>;

/// Cases by family. A pattern that is there already, by its requests, is left out.
fn by_family<'a>(cases: &[&'a CaseRecord]) -> BTreeMap<&'a str, FamilyCases<'a>> {
    let mut families: BTreeMap<&str, FamilyCases<'a>> = BTreeMap::new();
    let mut seen: HashSet<(&str, u32)> = HashSet::new();
    for record in cases {
        let is_new = record.requests_hash.as_deref().is_none_or(|hash| seen.insert((hash, record.repeat)));
        if is_new {
            families.entry(family(record)).or_default().push(record);
        }
    }
    families
}

/// The family of a case. A row without one is of an older release, and is a family of its own.
fn family(record: &CaseRecord) -> &str {
    let own_name = || record.workload.split('[').next().unwrap_or(&record.workload);
    record.family.as_deref().unwrap_or_else(own_name)
}

/// The medians of the families that have the figure.
fn family_medians(families: &BTreeMap<&str, FamilyCases<'_>>, figure: impl Fn(&CaseRecord) -> Option<f64>) -> Vec<f64> {
    let of_family = |cases: &FamilyCases<'_>| {
        let mut values: Vec<f64> = cases.iter().filter_map(|record| figure(record)).collect();
        median(&mut values)
    };
    families.values().filter_map(of_family).collect()
}

impl FamilyFigures {
    pub(super) fn of(mut medians: Vec<f64>) -> FamilyFigures {
        let interval = median_interval(&medians);
        let median = median(&mut medians);
        // The nearest rank: a value that a family has.
        let rank = (0.9 * medians.len() as f64).ceil() as usize;
        FamilyFigures { median, interval, p90: medians.get(rank.saturating_sub(1)).copied() }
    }
}

/// The worst of all patterns, and its workload: medians of families would hide it.
fn worst(cases: &[&CaseRecord], figure: fn(&CaseRecord) -> Option<f64>) -> (Option<f64>, Option<String>) {
    let known = cases.iter().filter_map(|record| Some((figure(record)?, record)));
    let worst = known.max_by(|one, other| one.0.total_cmp(&other.0));
    worst.map_or((None, None), |(ratio, record)| (Some(ratio), Some(record.workload.clone())))
}

impl BoundRow {
    fn new(strategy: &str, split: Option<Split>, generator: Option<&str>, cases: &[&CaseRecord]) -> BoundRow {
        let families = by_family(cases);
        let need = FamilyFigures::of(family_medians(&families, CaseRecord::need_ratio));
        let appetite = FamilyFigures::of(family_medians(&families, CaseRecord::appetite_ratio));
        let (worst_need_ratio, worst_need_workload) = worst(cases, CaseRecord::need_ratio);
        let (worst_appetite_ratio, worst_appetite_workload) = worst(cases, CaseRecord::appetite_ratio);
        let sum = |of: fn(&CaseRecord) -> Option<u64>| {
            let is_known = cases.iter().all(|record| of(record).is_some());
            is_known.then(|| {
                let medians = family_medians(&families, |record| of(record).map(|time| time as f64));
                medians.into_iter().map(|time| time.round() as u64).sum()
            })
        };
        BoundRow {
            schema: SCHEMA,
            strategy: strategy.to_owned(),
            split,
            generator: generator.map(str::to_owned),
            families: families.len() as u64,
            patterns: families.values().map(|cases| cases.len() as u64).sum(),
            cases: cases.len() as u64,
            completed_cases: cases.iter().filter(|record| record.status == Status::Completed).count() as u64,
            median_need_ratio: need.median,
            median_need_low_ratio: need.interval.map(|interval| interval.0),
            median_need_high_ratio: need.interval.map(|interval| interval.1),
            p90_need_ratio: need.p90,
            worst_need_ratio,
            worst_need_workload,
            median_appetite_ratio: appetite.median,
            median_appetite_low_ratio: appetite.interval.map(|interval| interval.0),
            median_appetite_high_ratio: appetite.interval.map(|interval| interval.1),
            p90_appetite_ratio: appetite.p90,
            worst_appetite_ratio,
            worst_appetite_workload,
            driver_ns: sum(|record| record.driver_ns),
            elapsed_ns: sum(|record| record.elapsed_ns),
        }
    }

    /// Whether it is of all families.
    pub(super) fn is_of_all(&self) -> bool {
        self.split.is_none() && self.generator.is_none()
    }

    /// What suffices over families, or what is taken.
    pub(super) fn figures(&self, of_need: bool) -> FamilyFigures {
        let (median, low, high, p90) = match of_need {
            true => {
                (self.median_need_ratio, self.median_need_low_ratio, self.median_need_high_ratio, self.p90_need_ratio)
            }
            false => (
                self.median_appetite_ratio,
                self.median_appetite_low_ratio,
                self.median_appetite_high_ratio,
                self.p90_appetite_ratio,
            ),
        };
        FamilyFigures { median, interval: low.zip(high), p90 }
    }

    /// The worst of all patterns by what suffices, or by what is taken, and its workload.
    pub(super) fn worst(&self, of_need: bool) -> (Option<f64>, Option<&str>) {
        match of_need {
            true => (self.worst_need_ratio, self.worst_need_workload.as_deref()),
            false => (self.worst_appetite_ratio, self.worst_appetite_workload.as_deref()),
        }
    }

    /// The order of strategies: what they need, or take where need is not known. Those that take a fixed part of the
    /// device are not ranked, and come last.
    fn rank(&self) -> (bool, f64) {
        let ratio = self.median_need_ratio.or(self.median_appetite_ratio).unwrap_or(f64::INFINITY);
        (StrategySpec::from(self.strategy.as_str()).takes_fixed_part(), ratio)
    }

    /// The median need, or the appetite where that is not known.
    fn median_ratio(&self) -> Option<f64> {
        self.median_need_ratio.or(self.median_appetite_ratio)
    }
}

/// Whether a row says what a strategy takes from the device for the whole of a pattern, or failed to.
pub(super) fn is_bounded(record: &CaseRecord) -> bool {
    let is_measured = record.status != Status::Completed || takes_memory(record);
    is_measured && record.limit_bytes.is_none() && record.live_peak_rounded_bytes > Some(0)
}

/// What strategies need and take as a multiple of the bound, a family counted once: over all families, the least need
/// first, then by split where there are both, then by generator. Simulated and real devices are not mixed: rows of the
/// clock of the first case only. Cases under a limit answer another question and are left out.
#[must_use]
pub fn bounds(records: &[CaseRecord]) -> Vec<BoundRow> {
    let clock = records.iter().find_map(|record| record.clock);
    let is_counted = |record: &&CaseRecord| record.clock.is_some() && record.clock == clock && is_bounded(record);
    let mut strategies: BTreeMap<&str, Vec<&CaseRecord>> = BTreeMap::new();
    for record in records.iter().filter(is_counted) {
        strategies.entry(&record.strategy).or_default().push(record);
    }
    let of_all = |(name, cases): (&&str, &Vec<&CaseRecord>)| BoundRow::new(name, None, None, cases);
    let mut rows: Vec<BoundRow> = strategies.iter().map(of_all).collect();
    rows.sort_by(|one, other| {
        let ((one_fixed, one), (other_fixed, other)) = (one.rank(), other.rank());
        one_fixed.cmp(&other_fixed).then(one.total_cmp(&other))
    });
    let ranked: Vec<String> = rows.iter().map(|row| row.strategy.clone()).collect();
    let splits: HashSet<Option<Split>> = strategies.values().flatten().map(|record| record.split).collect();
    let splits = Split::ALL.into_iter().filter(|split| splits.len() > 1 && splits.contains(&Some(*split)));
    for split in splits {
        let is_in = |record: &&&CaseRecord| record.split == Some(split);
        rows.extend(ranked.iter().map(|strategy| {
            let cases: Vec<&CaseRecord> = strategies[&**strategy].iter().filter(is_in).copied().collect();
            BoundRow::new(strategy, Some(split), None, &cases)
        }));
    }
    let mut generators: HashMap<&str, String> = HashMap::new();
    for strategy in &ranked {
        let mut by_generator: BTreeMap<String, Vec<&CaseRecord>> = BTreeMap::new();
        for record in &strategies[&**strategy] {
            let generator = generators.entry(&record.workload).or_insert_with(|| generator(&record.workload));
            by_generator.entry(generator.clone()).or_default().push(record);
        }
        let row = |(name, cases): (&String, &Vec<&CaseRecord>)| BoundRow::new(strategy, None, Some(name), cases);
        rows.extend(by_generator.iter().map(row));
    }
    rows
}

/// The generator of a workload by its name, which may have parameters: `random[rounds=5]`.
fn generator(workload: &str) -> String {
    let name = workload.split('[').next().unwrap_or(workload);
    Recipe::named(name).map_or_else(|_| RECORDED.to_owned(), |recipe| recipe.generator.name.to_owned())
}

const NEED_LEGEND: &str = "Need: the least memory in which a case completes.";
const APPETITE_LEGEND: &str = "Appetite: peak reserved memory without a limit.";
const BOTH_LEGEND: &str = "Both as multiples of the bound (the most bytes alive at one time, in blocks of 512 B), of \
                           completed cases.";
const ONE_LEGEND: &str = "It is a multiple of the bound (the most bytes alive at one time, in blocks of 512 B), of completed \
                          cases.";
const FAMILY_LEGEND: &str = "A family of variants of one program counts once, by the median of its patterns; in brackets: \
                             95 % interval of the median over families (bootstrap).";
const WORST_LEGEND: &str = "Worst: of all patterns.";
const DRIVER_LEGEND: &str = "Driver time: sum over families.";
const FIXED_LEGEND: &str = "Strategies that take a fixed part of the device are last and not ranked.";

fn ratio_text(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"))
}

/// A median with its interval.
fn median_text(median: Option<f64>, low: Option<f64>, high: Option<f64>) -> String {
    match (median, low, high) {
        (Some(median), Some(low), Some(high)) => format!("{median:.3} [{low:.3}, {high:.3}]"),
        _ => ratio_text(median),
    }
}

impl RenderRow for BoundRow {
    /// The strategies, and below them their medians by split and by generator where there are several.
    fn text(rows: &[BoundRow], medium: Medium) -> String {
        let has_need = rows.iter().any(|row| row.median_need_ratio.is_some());
        let of_all = || rows.iter().filter(|row| row.is_of_all());
        let mut headings = vec!["strategy", "fami-\nlies", "completed"];
        if has_need {
            headings.extend(["need\nmedian", "need\n90th perc.", "need\nworst"]);
        }
        headings.extend([
            "appetite\nmedian",
            "appetite\n90th perc.",
            "appetite\nworst",
            "driver\ntime",
            "worst workload",
        ]);
        let last = headings.len() - 1;
        let mut table = TextTable::new(&headings, medium).with_numbers(1..last);
        for row in of_all() {
            let completed = format!("{} of {}", row.completed_cases, row.cases);
            let mut cells = vec![row.strategy.clone(), row.families.to_string(), completed];
            if has_need {
                cells.extend([
                    median_text(row.median_need_ratio, row.median_need_low_ratio, row.median_need_high_ratio),
                    ratio_text(row.p90_need_ratio),
                    ratio_text(row.worst_need_ratio),
                ]);
            }
            let low_and_high = (row.median_appetite_low_ratio, row.median_appetite_high_ratio);
            let worst = row.worst_need_workload.as_ref().or(row.worst_appetite_workload.as_ref());
            cells.extend([
                median_text(row.median_appetite_ratio, low_and_high.0, low_and_high.1),
                ratio_text(row.p90_appetite_ratio),
                ratio_text(row.worst_appetite_ratio),
                row.driver_ns.map_or_else(String::new, |time| Nanos(time).to_string()),
                worst.cloned().unwrap_or_default(),
            ]);
            table.row(cells);
        }
        // With both figures, the appetite goes before the need.
        let appetite = if has_need { vec![last - 2, last - 4] } else { Vec::new() };
        table.fit(&[vec![last, last - 1, 2, last - 3, 1], appetite].concat());
        let shows_appetite = (last - 4..last - 1).any(|place| table.shows(place));
        let legend = said(&[
            (has_need, NEED_LEGEND),
            (shows_appetite, APPETITE_LEGEND),
            (has_need && shows_appetite, BOTH_LEGEND),
            (!(has_need && shows_appetite), ONE_LEGEND),
            (true, FAMILY_LEGEND),
            (has_need || table.shows(last - 2), WORST_LEGEND),
            (table.shows(last - 1), DRIVER_LEGEND),
            (of_all().any(|row| row.rank().0), FIXED_LEGEND),
        ]);
        let mut text = table.finish(&legend, []);
        text.push_str(&parts_table(rows, medium, "split", |row| row.split.map(Split::name)));
        text.push_str(&parts_table(rows, medium, "generator", |row| row.generator.as_deref()));
        text
    }
}

/// The medians of every strategy by a part of the families; nothing with fewer than two parts.
fn parts_table(rows: &[BoundRow], medium: Medium, what: &str, part: impl Fn(&BoundRow) -> Option<&str>) -> String {
    let parts = distinct(rows.iter().filter_map(&part));
    if parts.len() < 2 {
        return String::new();
    }
    let mut medians: HashMap<(&str, &str), Option<f64>> = HashMap::new();
    for row in rows {
        if let Some(part) = part(row) {
            medians.insert((&row.strategy, part), row.median_ratio());
        }
    }
    let headings: Vec<&str> = ["strategy"].into_iter().chain(parts.iter().copied()).collect();
    let mut table = TextTable::new(&headings, medium).with_numbers(1..).in_panels();
    for row in rows.iter().filter(|row| row.is_of_all()) {
        let of_part = |part: &&str| ratio_text(medians.get(&(&*row.strategy, *part)).copied().flatten());
        table.row([row.strategy.clone()].into_iter().chain(parts.iter().map(of_part)));
    }
    let figure = if rows.iter().any(|row| row.median_need_ratio.is_some()) { "need" } else { "appetite" };
    let meaning = match what {
        "split" => " Settings of strategies were chosen on train, and not on test.",
        _ => "",
    };
    format!("\n{}", table.finish(&format!("Median {figure} by {what}.{meaning}"), []))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::DeviceClock, measure::CaseLabel};

    fn bounded(workload: &str, strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let record = CaseRecord { status, peak_reserved_bytes: Some(reserved), ..record(workload, strategy, 1) };
        CaseRecord {
            live_peak_rounded_bytes: Some(100),
            driver_ns: Some(5),
            clock: Some(DeviceClock::Virtual),
            ..record
        }
    }

    #[test]
    fn strategies_are_ranked_over_the_bound() {
        let completed = Status::Completed;
        let mut records: Vec<CaseRecord> =
            (0..10).map(|case| bounded(&format!("random[seed={case}]"), "tlsf", completed, 110 + case * 10)).collect();
        records.push(bounded("a.pickle", "tlsf", completed, 400));
        records.push(bounded("random", "direct", completed, 100));
        records.push(bounded("a.pickle", "direct", Status::Oom, 20));
        records.push(bounded("random", "null", completed, 0));
        records.last_mut().unwrap().driver_alloc_calls = Some(0);
        records.push(CaseRecord { limit_bytes: Some(1), ..bounded("random", "direct", completed, 900) });
        let rows = bounds(&records);
        let shown: Vec<_> = rows
            .iter()
            .map(|row| {
                let generator = row.generator.as_deref().unwrap_or("");
                (&*row.strategy, generator, row.cases, row.completed_cases, row.median_appetite_ratio)
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("direct", "", 2, 1, Some(1.0)),
                ("tlsf", "", 11, 11, Some(2.775)),
                ("direct", "random", 1, 1, Some(1.0)),
                ("direct", "recorded", 1, 0, None),
                ("tlsf", "random", 10, 10, Some(1.55)),
                ("tlsf", "recorded", 1, 1, Some(4.0)),
            ]
        );
        assert_eq!((rows[1].families, rows[1].worst_appetite_ratio), (2, Some(4.0)));
        assert_eq!((rows[1].worst_appetite_workload.as_deref(), rows[1].driver_ns), (Some("a.pickle"), Some(10)));
        let text = BoundRow::text(&rows, Medium::PIPE);
        assert!(text.contains("1 of 2") && text.contains("Median appetite by generator"), "{text}");
        assert!(!text.contains("Need:"), "{text}");
    }

    fn member(name: &str, family: &str, split: Split, need: u64) -> CaseRecord {
        CaseRecord {
            family: Some(family.to_owned()),
            split: Some(split),
            needed_bytes: Some(need << 20),
            requests_hash: Some(name.to_owned()),
            live_peak_rounded_bytes: Some(100 << 20),
            ..bounded(name, "tlsf", Status::Completed, (2 * need) << 20)
        }
    }

    #[test]
    fn family_counts_once_and_the_same_requests_once() {
        let mut records: Vec<CaseRecord> =
            (0..18).map(|case| member(&format!("varlen{case}"), "varlen", Split::Train, 300)).collect();
        records.push(member("plain", "plain", Split::Train, 100));
        records.push(member("new", "new", Split::Test, 120));
        records.push(member("twin", "plain", Split::Train, 200));
        records
            .push(CaseRecord { requests_hash: Some("twin".to_owned()), ..member("copy", "plain", Split::Train, 200) });
        let rows = bounds(&records);
        let all = &rows[0];
        assert_eq!((all.families, all.patterns, all.cases), (3, 21, 22));
        assert_eq!(all.median_need_ratio, Some(1.5), "families: 3, (1 + 2) / 2 and 1.2; the copy does not count");
        assert_eq!((all.worst_need_ratio, all.median_appetite_ratio), (Some(3.0), Some(3.0)));
        let of_split = |split| rows.iter().find(|row| row.split == Some(split)).unwrap().median_need_ratio;
        assert_eq!((of_split(Split::Train), of_split(Split::Test)), (Some(2.25), Some(1.2)));
        let text = BoundRow::text(&rows, Medium::PIPE);
        assert!(text.contains("Median need by split") && text.contains("Need: the least memory"), "{text}");
    }

    #[test]
    fn interval_holds_the_median_and_repeats() {
        let values: Vec<f64> = (0..40).map(|value| 1.0 + f64::from(value) / 100.0).collect();
        let (low, high) = median_interval(&values).unwrap();
        assert!(low < 1.195 && 1.195 < high && high - low < 0.2 && high - low > 0.02, "{low} {high}");
        assert_eq!(median_interval(&values), Some((low, high)));
        assert_eq!((median_interval(&[1.0]), median_interval(&[2.0, 2.0])), (None, Some((2.0, 2.0))));
        // The true median is in about 95 of 100 intervals of samples of it.
        let mut dice = ChaCha8Rng::seed_from_u64(1);
        let covered = (0..200).filter(|_| {
            let sample: Vec<f64> = (0..60).map(|_| dice.random::<f64>()).collect();
            median_interval(&sample).is_some_and(|(low, high)| low <= 0.5 && 0.5 <= high)
        });
        let covered = covered.count();
        assert!((180..=199).contains(&covered), "{covered} of 200");
    }

    #[test]
    fn fixed_parts_of_the_device_are_not_ranked() {
        let records = [
            bounded("random", "tlsf", Status::Completed, 110),
            bounded("random", "arena", Status::Completed, 100),
            bounded("random", "caching", Status::Completed, 120),
        ];
        let rows = bounds(&records);
        let order: Vec<&str> = rows.iter().filter(|row| row.is_of_all()).map(|row| &*row.strategy).collect();
        assert_eq!(order, ["tlsf", "caching", "arena"]);
        assert!(BoundRow::text(&rows, Medium::PIPE).contains("take a fixed part"));
        assert!(!is_contender(&records[1]) && takes_memory(&records[1]));
    }

    fn record(workload: &str, strategy: &str, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, Status::Completed, "");
        CaseRecord { peak_device_used_bytes: Some(reserved), driver_alloc_calls: Some(1), ..record }
    }

    #[test]
    fn least_memory_is_of_completed_cases() {
        let mut records = vec![record("w", "a", 10), record("w", "b", 8), record("w", "c", 3), record("w", "null", 1)];
        records[2].status = Status::Oom;
        records[3].driver_alloc_calls = Some(0);
        records[3].driver_event_calls = Some(7);
        assert_eq!(groups(&records)[0].least_bytes(), Some(8));
        assert_eq!(groups(&records[1..])[0].least_bytes(), None, "one case cannot be compared");
        records[0].needed_bytes = Some(6);
        assert_eq!(groups(&records)[0].least_bytes(), Some(8), "the need of b is not known");
        records[1].needed_bytes = Some(7);
        assert_eq!(groups(&records)[0].least_bytes(), Some(6), "a takes more and needs less");
    }

    #[test]
    fn title_names_differences_only() {
        let mut records = vec![record("v", "a", 1), record("w", "a", 1)];
        assert_eq!(titles(&groups(&records)), ["v", "w"]);
        records[1] = CaseRecord { limit_bytes: Some(1 << 30), seed: 4, ..record("v", "a", 1) };
        assert_eq!(titles(&groups(&records)), ["v #0", "v <= 1.00 GiB #4"]);
    }

    fn compared(strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: "w".to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, status, "");
        CaseRecord { peak_reserved_bytes: Some(reserved), clock: Some(DeviceClock::Virtual), ..record }
    }

    /// The cells of `column`, one per case.
    fn column(text: &str, column: &str) -> Vec<String> {
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let place = reader.headers().unwrap().iter().position(|name| name == column).unwrap();
        reader.records().map(|row| row.unwrap()[place].to_owned()).collect()
    }

    #[test]
    fn ratios_need_completed_cases() {
        let records = vec![
            compared("caching", Status::Completed, 300),
            compared("direct", Status::Completed, 100),
            compared("slab", Status::Oom, 120),
            CaseRecord { clock: None, peak_reserved_bytes: None, ..compared("pools", Status::Skipped, 0) },
        ];
        let text = comparison_csv(&records, "caching").unwrap();
        assert_eq!(column(&text, "strategy"), ["caching", "direct", "slab", "pools"]);
        assert_eq!(column(&text, "status"), ["completed", "completed", "oom", "skipped"]);
        assert_eq!(column(&text, "peak_reserved_bytes"), ["300", "100", "120", ""]);
        assert_eq!(column(&text, "peak_reserved_ratio"), ["1.0", "0.333333", "", ""]);
    }

    #[test]
    fn unknown_base_has_no_ratios() {
        let text = comparison_csv(&[compared("direct", Status::Completed, 150)], "caching").unwrap();
        assert_eq!(column(&text, "peak_reserved_bytes"), ["150"]);
        assert_eq!(column(&text, "peak_reserved_ratio"), [""]);
    }
}
