//! Cases that may be compared: same workload, device and limit, different strategies. Writes
//! `comparison.csv`, and `bounds.csv`: what strategies reserve over all workloads.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{
    Medium, ReportError,
    render::{RenderRow, TextTable, distinct},
    rows,
};
use crate::{
    base::{Bytes, Nanos},
    measure::{CaseRecord, SCHEMA, Status, digits},
    models::Recipe,
    pytorch::Release,
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

impl CaseGroup<'_> {
    /// The lowest device memory use of the strategies that completed; `None` with fewer than two.
    pub(super) fn least_used(&self) -> Option<u64> {
        let contenders = || self.records.iter().filter(|record| is_contender(record));
        let known = || contenders().filter_map(|record| record.peak_device_used_bytes);
        if known().count() < 2 { None } else { known().min() }
    }
}

/// Whether a case takes part in rankings: it completed, with memory from the device. The strategy
/// `null` takes none.
pub(super) fn is_contender(record: &CaseRecord) -> bool {
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

/// One row of `bounds.csv`: what a strategy reserves as a multiple of the bound (`live_peak_rounded_bytes`), over all
/// workloads or over those of one family.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BoundRow {
    schema: u32,
    /// The strategy.
    pub strategy: String,
    /// The generator of the workloads, `recorded` for trace files; `None` stands for all.
    pub family: Option<String>,
    cases: u64,
    pub(super) completed_cases: u64,
    /// Over completed cases, as the other ratios: a case that ended early reserved less than its trace needs.
    #[serde(serialize_with = "digits::optional")]
    pub median_over_bound_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) p90_over_bound_ratio: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    pub(super) worst_over_bound_ratio: Option<f64>,
    worst_workload: Option<String>,
    driver_ns: Option<u64>,
}

/// The family of trace files.
const RECORDED: &str = "recorded";

/// A case in the table: its workload, and what it reserved as a multiple of the bound if it completed.
struct BoundCase<'a> {
    record: &'a CaseRecord,
    ratio: Option<f64>,
}

impl<'a> BoundCase<'a> {
    /// `None` for a case that did not run, or that takes no memory from the device.
    fn of(record: &'a CaseRecord) -> Option<BoundCase<'a>> {
        let takes_memory = record.status != Status::Completed || is_contender(record);
        let bound = record.live_peak_rounded_bytes.filter(|bound| *bound > 0 && takes_memory)?;
        let completed = (record.status == Status::Completed).then_some(record.peak_reserved_bytes).flatten();
        Some(BoundCase { record, ratio: completed.map(|reserved| reserved as f64 / bound as f64) })
    }
}

impl BoundRow {
    fn new(strategy: &str, family: Option<&str>, cases: &[&BoundCase<'_>]) -> BoundRow {
        let mut completed: Vec<(f64, &CaseRecord)> =
            cases.iter().filter_map(|case| Some((case.ratio?, case.record))).collect();
        completed.sort_by(|one, other| one.0.total_cmp(&other.0));
        // The nearest rank: a value that a case has.
        let at = |share: f64| {
            let rank = (share * completed.len() as f64).ceil() as usize;
            completed.get(rank.saturating_sub(1)).map(|(ratio, _)| *ratio)
        };
        BoundRow {
            schema: SCHEMA,
            strategy: strategy.to_owned(),
            family: family.map(str::to_owned),
            cases: cases.len() as u64,
            completed_cases: completed.len() as u64,
            median_over_bound_ratio: at(0.5),
            p90_over_bound_ratio: at(0.9),
            worst_over_bound_ratio: at(1.0),
            worst_workload: completed.last().map(|(_, record)| record.workload.clone()),
            driver_ns: cases.iter().map(|case| case.record.driver_ns).sum(),
        }
    }
}

/// What strategies reserve as a multiple of the bound: over all workloads, the least median first, then by family.
/// Simulated and real devices are not mixed: rows of the clock of the first case only.
#[must_use]
pub fn bounds(records: &[CaseRecord]) -> Vec<BoundRow> {
    let clock = records.iter().find_map(|record| record.clock);
    let cases: Vec<BoundCase<'_>> = records
        .iter()
        .filter(|record| record.clock.is_some() && record.clock == clock)
        .filter_map(BoundCase::of)
        .collect();
    let mut families: HashMap<&str, String> = HashMap::new();
    for case in &cases {
        families.entry(&case.record.workload).or_insert_with(|| family(&case.record.workload));
    }
    let mut strategies: BTreeMap<&str, Vec<&BoundCase<'_>>> = BTreeMap::new();
    for case in &cases {
        strategies.entry(&case.record.strategy).or_default().push(case);
    }
    let mut rows: Vec<BoundRow> = strategies.iter().map(|(name, cases)| BoundRow::new(name, None, cases)).collect();
    let key = |row: &BoundRow| row.median_over_bound_ratio.unwrap_or(f64::INFINITY);
    rows.sort_by(|one, other| key(one).total_cmp(&key(other)));
    for place in 0..rows.len() {
        let strategy = rows[place].strategy.clone();
        let mut by_family: BTreeMap<&str, Vec<&BoundCase<'_>>> = BTreeMap::new();
        for case in &strategies[strategy.as_str()] {
            by_family.entry(&families[case.record.workload.as_str()]).or_default().push(case);
        }
        rows.extend(by_family.iter().map(|(family, cases)| BoundRow::new(&strategy, Some(family), cases)));
    }
    rows
}

/// The family of a workload by its name, which may have parameters: `random[rounds=5]`.
fn family(workload: &str) -> String {
    let name = workload.split('[').next().unwrap_or(workload);
    Recipe::named(name).map_or_else(|_| RECORDED.to_owned(), |recipe| recipe.generator.name.to_owned())
}

const BOUND_LEGEND: &str = "Peak reserved memory as a multiple of the bound (the most bytes alive at one time, in blocks \
                            of 512 B), over completed cases; driver time of all cases.";

impl RenderRow for BoundRow {
    /// The strategies, and below them their medians by family where there are several.
    fn text(rows: &[BoundRow], medium: Medium) -> String {
        let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
        let headings =
            ["strategy", "completed", "median", "90th\npercentile", "worst", "driver\ntime", "worst workload"];
        let mut table = TextTable::new(&headings, medium).with_numbers(1..6);
        for row in rows.iter().filter(|row| row.family.is_none()) {
            table.row([
                row.strategy.clone(),
                format!("{} of {}", row.completed_cases, row.cases),
                ratio(row.median_over_bound_ratio),
                ratio(row.p90_over_bound_ratio),
                ratio(row.worst_over_bound_ratio),
                row.driver_ns.map_or_else(String::new, |time| Nanos(time).to_string()),
                row.worst_workload.clone().unwrap_or_default(),
            ]);
        }
        let hidden = table.fit(&[6, 5, 1]).map_or_else(String::new, |hidden| format!(" {hidden}"));
        let mut text = table.finish(&format!("{BOUND_LEGEND}{hidden}"), []);
        let families = distinct(rows.iter().filter_map(|row| row.family.as_deref()));
        if families.len() > 1 {
            let mut medians: HashMap<(&str, &str), Option<f64>> = HashMap::new();
            for row in rows {
                if let Some(family) = &row.family {
                    medians.insert((&row.strategy, family), row.median_over_bound_ratio);
                }
            }
            let headings: Vec<&str> = ["strategy"].into_iter().chain(families.iter().copied()).collect();
            let mut table = TextTable::new(&headings, medium).with_numbers(1..);
            for row in rows.iter().filter(|row| row.family.is_none()) {
                let of_family = |family: &&str| ratio(medians.get(&(&*row.strategy, *family)).copied().flatten());
                table.row([row.strategy.clone()].into_iter().chain(families.iter().map(of_family)));
            }
            let last_first: Vec<usize> = (1..headings.len()).rev().collect();
            let hidden = table.fit(&last_first).map_or_else(String::new, |hidden| format!(" {hidden}"));
            text.push_str(&format!("\n{}", table.finish(&format!("Medians by family of workloads.{hidden}"), [])));
        }
        text
    }
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
        let rows = bounds(&records);
        let shown: Vec<_> = rows
            .iter()
            .map(|row| {
                let family = row.family.as_deref().unwrap_or("");
                (&*row.strategy, family, row.cases, row.completed_cases, row.median_over_bound_ratio)
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("direct", "", 2, 1, Some(1.0)),
                ("tlsf", "", 11, 11, Some(1.6)),
                ("direct", "random", 1, 1, Some(1.0)),
                ("direct", "recorded", 1, 0, None),
                ("tlsf", "random", 10, 10, Some(1.5)),
                ("tlsf", "recorded", 1, 1, Some(4.0)),
            ]
        );
        assert_eq!((rows[1].p90_over_bound_ratio, rows[1].worst_over_bound_ratio), (Some(2.0), Some(4.0)));
        assert_eq!((rows[1].worst_workload.as_deref(), rows[1].driver_ns), (Some("a.pickle"), Some(55)));
        let text = BoundRow::text(&rows, Medium::PIPE);
        assert!(text.contains("1 of 2") && text.contains("Medians by family"), "{text}");
    }

    fn record(workload: &str, strategy: &str, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, Status::Completed, "");
        CaseRecord { peak_device_used_bytes: Some(reserved), driver_alloc_calls: Some(1), ..record }
    }

    #[test]
    fn least_needs_completed_cases_with_memory() {
        let mut records = vec![record("w", "a", 10), record("w", "b", 8), record("w", "c", 3), record("w", "null", 1)];
        records[2].status = Status::Oom;
        records[3].driver_alloc_calls = Some(0);
        records[3].driver_event_calls = Some(7);
        assert_eq!(groups(&records)[0].least_used(), Some(8));
        assert_eq!(groups(&records[1..])[0].least_used(), None, "one case cannot be compared");
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
