//! Cases that may be compared: same workload, device and limit, different strategies. Writes
//! `comparison.csv`.

use serde::Serialize;

use super::{ReportError, render::distinct, rows};
use crate::{
    base::Bytes,
    measure::{CaseRecord, Status},
};

/// Everything that must be equal before two strategies may be compared. Simulated and real devices
/// have different names, so times of different clocks are never compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
    let memory_calls = record.driver_alloc_calls + record.driver_mapping_calls + record.driver_pool_calls;
    record.status == Status::Completed && memory_calls > 0
}

/// The records by scenario, both in order of first appearance.
pub(super) fn groups(records: &[CaseRecord]) -> Vec<CaseGroup<'_>> {
    let mut groups: Vec<CaseGroup<'_>> = Vec::new();
    for record in records {
        let scenario = CaseScenario::of(record);
        match groups.iter_mut().find(|group| group.scenario == scenario) {
            Some(group) => group.records.push(record),
            None => groups.push(CaseGroup { scenario, records: vec![record] }),
        }
    }
    groups
}

/// The strategies in order of first appearance.
pub(super) fn strategies(records: &[CaseRecord]) -> Vec<&str> {
    distinct(records.iter().map(|record| record.strategy.as_str()))
}

/// The workload's name and every property in which this scenario differs from others.
pub(super) fn title(scenario: &CaseScenario<'_>, all: &[CaseGroup<'_>]) -> String {
    let differs = |differs: fn(&CaseScenario<'_>, &CaseScenario<'_>) -> bool| {
        all.iter().any(|group| differs(&group.scenario, scenario))
    };
    let mut title = scenario.workload.to_owned();
    if differs(|a, b| a.suite != b.suite) {
        title = format!("{}/{title}", scenario.suite);
    }
    if differs(|a, b| a.device != b.device) {
        title.push_str(&format!(" @{}", scenario.device));
    }
    if let Some(limit) = scenario.limit_bytes
        && differs(|a, b| a.limit_bytes != b.limit_bytes)
    {
        title.push_str(&format!(" <= {}", Bytes(limit)));
    }
    if differs(|a, b| a.seed != b.seed) {
        title.push_str(&format!(" #{}", scenario.seed));
    }
    if differs(|a, b| a.repeat != b.repeat) {
        title.push_str(&format!(" x{}", scenario.repeat));
    }
    title
}

/// A column of `runs.csv` that is compared.
struct Metric {
    name: &'static str,
    of: fn(&CaseRecord) -> Option<f64>,
}

const METRICS: &[Metric] = &[
    Metric { name: "ooms", of: |record| Some(record.ooms as f64) },
    Metric { name: "peak_allocated_bytes", of: |record| Some(record.peak_allocated_bytes as f64) },
    Metric { name: "peak_reserved_bytes", of: |record| Some(record.peak_reserved_bytes as f64) },
    Metric { name: "peak_device_used_bytes", of: |record| record.peak_device_used_bytes.map(|bytes| bytes as f64) },
    Metric { name: "internal_fragmentation", of: |record| record.internal_fragmentation },
    Metric { name: "external_fragmentation", of: |record| record.external_fragmentation },
    Metric { name: "peak_gap_share", of: |record| record.peak_gap_share },
    Metric { name: "peak_segments", of: |record| Some(record.peak_segments as f64) },
    Metric { name: "retries", of: |record| Some(record.retries as f64) },
    Metric { name: "driver_calls", of: |record| Some(record.driver_calls as f64) },
    Metric { name: "driver_ns", of: |record| Some(record.driver_ns as f64) },
];

/// `comparison.csv`: one line per workload and metric, one column per strategy, and ratios to a base
/// strategy. A cell is empty where the case did not run. A ratio is also empty where one of the two
/// ran out of memory: figures of half a run cannot be compared.
pub(super) fn comparison_csv(records: &[CaseRecord], base: &str) -> Result<String, ReportError> {
    let strategies = strategies(records);
    let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
    let identity = ["suite", "workload", "device", "limit_bytes", "seed", "repeat", "metric", "base"];
    let ratios: Vec<String> = strategies.iter().map(|name| format!("ratio_{name}")).collect();
    writer.serialize((identity, &strategies, ratios))?;
    for group in groups(records) {
        let cases: Vec<Option<&CaseRecord>> = strategies.iter().map(|name| case(&group, name)).collect();
        let base_case = case(&group, base);
        let statuses: Vec<&str> = cases.iter().map(|case| case.map_or("", |case| case.status.name())).collect();
        writer.serialize((&group.scenario, "status", base, statuses, vec![""; strategies.len()]))?;
        for metric in METRICS {
            let value = |case: &CaseRecord| case.clock.and_then(|_| (metric.of)(case));
            let values: Vec<Option<String>> =
                cases.iter().map(|case| case.and_then(value).map(|value| value.to_string())).collect();
            let ratio = |case: &Option<&CaseRecord>| ratio((*case)?, base_case?, metric);
            let ratios: Vec<Option<String>> =
                cases.iter().map(|case| ratio(case).map(|ratio| format!("{ratio:.4}"))).collect();
            writer.serialize((&group.scenario, metric.name, base, values, ratios))?;
        }
    }
    rows::written(writer)
}

fn case<'a>(group: &CaseGroup<'a>, strategy: &str) -> Option<&'a CaseRecord> {
    group.records.iter().find(|record| record.strategy == strategy).copied()
}

fn ratio(case: &CaseRecord, base: &CaseRecord, metric: &Metric) -> Option<f64> {
    let comparable = |record: &CaseRecord| record.status == Status::Completed;
    let (value, unit) = ((metric.of)(case)?, (metric.of)(base)?);
    (comparable(case) && comparable(base) && case.clock == base.clock && unit != 0.0).then(|| value / unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::DeviceClock, measure::CaseLabel};

    fn record(workload: &str, strategy: &str, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, Status::Completed, "");
        CaseRecord { peak_device_used_bytes: Some(reserved), driver_alloc_calls: 1, ..record }
    }

    #[test]
    fn least_needs_completed_cases_with_memory() {
        let mut records = vec![record("w", "a", 10), record("w", "b", 8), record("w", "c", 3), record("w", "null", 1)];
        records[2].status = Status::Oom;
        records[3].driver_alloc_calls = 0;
        records[3].driver_event_calls = 7;
        assert_eq!(groups(&records)[0].least_used(), Some(8));
        assert_eq!(groups(&records[1..])[0].least_used(), None, "one case cannot be compared");
    }

    #[test]
    fn title_names_differences_only() {
        let mut records = vec![record("v", "a", 1), record("w", "a", 1)];
        let titles = |records: &[CaseRecord]| {
            let all = groups(records);
            all.iter().map(|group| title(&group.scenario, &all)).collect::<Vec<_>>()
        };
        assert_eq!(titles(&records), ["v", "w"]);
        records[1] = CaseRecord { limit_bytes: Some(1 << 30), seed: 4, ..record("v", "a", 1) };
        assert_eq!(titles(&records), ["v #0", "v <= 1.00 GiB #4"]);
    }

    fn compared(strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: "w".to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, status, "");
        CaseRecord { peak_reserved_bytes: reserved, clock: Some(DeviceClock::Virtual), ..record }
    }

    #[test]
    fn ratios_need_completed_cases() {
        let mut records = vec![
            compared("caching", Status::Completed, 200),
            compared("direct", Status::Completed, 150),
            compared("slab", Status::Oom, 120),
            compared("pools", Status::Skipped, 0),
        ];
        records[3].clock = None;
        let text = comparison_csv(&records, "caching").unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "suite,workload,device,limit_bytes,seed,repeat,metric,base,caching,direct,slab,pools,\
             ratio_caching,ratio_direct,ratio_slab,ratio_pools"
        );
        assert_eq!(lines[1], ",w,,,0,1,status,caching,completed,completed,oom,skipped,,,,");
        let reserved = lines.iter().find(|line| line.contains("peak_reserved_bytes")).unwrap();
        assert_eq!(*reserved, ",w,,,0,1,peak_reserved_bytes,caching,200,150,120,,1.0000,0.7500,,");
        assert_eq!(lines.len(), 2 + METRICS.len());
    }

    #[test]
    fn unknown_base_has_no_ratios() {
        let text = comparison_csv(&[compared("direct", Status::Completed, 150)], "caching").unwrap();
        let reserved = text.lines().find(|line| line.contains("peak_reserved_bytes")).unwrap();
        assert!(reserved.ends_with(",150,"), "{reserved}");
    }
}
