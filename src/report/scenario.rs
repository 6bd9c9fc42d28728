//! Cases that may be compared: same workload, device and limit, different strategies. Writes
//! `comparison.csv`.

use std::collections::HashMap;

use serde::Serialize;

use super::{ReportError, rows};
use crate::{
    base::Bytes,
    measure::{CaseRecord, SCHEMA, Status, digits},
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::DeviceClock, measure::CaseLabel};

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
