//! `comparison.csv`: one line a workload and metric, one column a strategy, and each as a ratio to a base strategy.

use super::{
    ReportError,
    scenario::{Group, groups, strategies},
};
use crate::measure::{CaseRecord, Status};

/// A column of `runs.csv` that is worth comparing.
struct Metric {
    name: &'static str,
    of: fn(&CaseRecord) -> Option<f64>,
}

const METRICS: &[Metric] = &[
    Metric { name: "ooms", of: |record| Some(record.ooms as f64) },
    Metric { name: "peak_allocated_bytes", of: |record| Some(record.peak_allocated_bytes as f64) },
    Metric { name: "peak_reserved_bytes", of: |record| Some(record.peak_reserved_bytes as f64) },
    Metric { name: "peak_device_used_bytes", of: |record| record.known_device_used_bytes().map(|bytes| bytes as f64) },
    Metric { name: "internal_fragmentation", of: |record| record.internal_fragmentation },
    Metric { name: "external_fragmentation", of: |record| record.external_fragmentation },
    Metric { name: "peak_gap_share", of: |record| record.peak_gap_share },
    Metric { name: "peak_segments", of: |record| Some(record.peak_segments as f64) },
    Metric { name: "retries", of: |record| Some(record.retries as f64) },
    Metric { name: "driver_calls", of: |record| Some(record.driver_calls as f64) },
    Metric { name: "driver_ns", of: |record| Some(record.driver_ns as f64) },
];

/// The whole file. A cell is empty where the case did not run; a ratio also where either of the two ran out of memory,
/// because figures of half a run compare with nothing.
pub(super) fn csv(records: &[CaseRecord], base: &str) -> Result<String, ReportError> {
    let strategies = strategies(records);
    let mut writer = csv::Writer::from_writer(Vec::new());
    let identity = ["suite", "workload", "device", "limit_bytes", "seed", "repeat", "metric", "base"];
    writer.write_record(
        identity
            .iter()
            .map(|&name| name.to_owned())
            .chain(strategies.iter().map(|&name| name.to_owned()))
            .chain(strategies.iter().map(|name| format!("ratio_{name}"))),
    )?;
    for group in groups(records) {
        let cases: Vec<Option<&CaseRecord>> = strategies.iter().map(|name| case(&group, name)).collect();
        let base_case = case(&group, base);
        let statuses = cases.iter().map(|case| case.map_or(String::new(), |case| case.status.name().to_owned()));
        let no_ratios = strategies.iter().map(|_| String::new());
        writer.write_record(line(&group, "status", base, statuses.chain(no_ratios)))?;
        for metric in METRICS {
            let value = |case: &CaseRecord| case.clock.and_then(|_| (metric.of)(case));
            let values = cases.iter().map(|case| case.and_then(value).map_or(String::new(), |value| value.to_string()));
            let ratios = cases.iter().map(|case| {
                let ratio = case.zip(base_case).and_then(|(case, base)| ratio(case, base, metric));
                ratio.map_or(String::new(), |ratio| format!("{ratio:.4}"))
            });
            writer.write_record(line(&group, metric.name, base, values.chain(ratios)))?;
        }
    }
    let bytes = writer.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn case<'a>(group: &Group<'a>, strategy: &str) -> Option<&'a CaseRecord> {
    group.records.iter().find(|record| record.strategy == strategy).copied()
}

fn ratio(case: &CaseRecord, base: &CaseRecord, metric: &Metric) -> Option<f64> {
    let comparable = |record: &CaseRecord| record.status == Status::Completed;
    let (value, unit) = ((metric.of)(case)?, (metric.of)(base)?);
    (comparable(case) && comparable(base) && case.clock == base.clock && unit != 0.0).then(|| value / unit)
}

fn line<'a>(
    group: &'a Group<'_>,
    metric: &'a str,
    base: &'a str,
    cells: impl Iterator<Item = String> + 'a,
) -> impl Iterator<Item = String> + 'a {
    let scenario = &group.scenario;
    [
        scenario.suite.to_owned(),
        scenario.workload.to_owned(),
        scenario.device.to_owned(),
        scenario.limit_bytes.map_or(String::new(), |limit| limit.to_string()),
        scenario.seed.to_string(),
        scenario.repeat.to_string(),
        metric.to_owned(),
        base.to_owned(),
    ]
    .into_iter()
    .chain(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::Clock, measure::CaseLabel};

    fn record(strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: "w".to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, status, "");
        CaseRecord { peak_reserved_bytes: reserved, clock: Some(Clock::Virtual), ..record }
    }

    #[test]
    fn ratios_stand_only_between_completed_cases() {
        let mut records = vec![
            record("caching", Status::Completed, 200),
            record("direct", Status::Completed, 150),
            record("slab", Status::Oom, 120),
            record("pools", Status::Skipped, 0),
        ];
        records[3].clock = None;
        let text = csv(&records, "caching").unwrap();
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
    fn an_unknown_base_leaves_the_ratios_empty() {
        let text = csv(&[record("direct", Status::Completed, 150)], "caching").unwrap();
        let reserved = text.lines().find(|line| line.contains("peak_reserved_bytes")).unwrap();
        assert!(reserved.ends_with(",150,"), "{reserved}");
    }
}
