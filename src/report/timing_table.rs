//! The table of wall-clock times.

use comfy_table::Cell;

use super::table::{dress_for_terminal, headed};
use crate::measure::TimingRecord;

const HEADINGS: [&str; 8] =
    ["workload", "strategy", "per event", "events/s", "alloc p50", "alloc p99", "free p50", "free p99"];

/// The times for a terminal of `width` columns, grouped by workload in order of first appearance.
#[must_use]
pub fn timings(records: &[TimingRecord], width: Option<u16>) -> String {
    let mut table = headed(&HEADINGS);
    dress_for_terminal(&mut table, width);
    let mut workload = "";
    for record in records {
        let heading = if record.workload == workload { "" } else { &record.workload };
        workload = &record.workload;
        table.add_row(row(heading, record));
    }
    let timer = records.iter().map(|record| record.timer_ns).max().unwrap_or(0);
    format!(
        "{}\nWall clock. Per event: median pass, nobody watching. Percentiles: a second pass that times one operation in \
         {}; each contains about {timer} ns of reading the clock.\n",
        table.trim_fmt(),
        records.first().map_or(0, |record| record.sampled_one_in),
    )
}

fn row(heading: &str, record: &TimingRecord) -> Vec<Cell> {
    let per_event = record.pass_median_ns as f64 / record.events.max(1) as f64;
    let shown = |time: Option<u64>| time.map_or_else(String::new, |time| format!("{time} ns"));
    [
        heading.to_owned(),
        record.strategy.clone(),
        format!("{per_event:.1} ns"),
        format!("{:.1} M", 1e3 / per_event),
        shown(record.alloc_p50_ns),
        shown(record.alloc_p99_ns),
        shown(record.free_p50_ns),
        shown(record.free_p99_ns),
    ]
    .into_iter()
    .map(Cell::new_owned)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_per_event_and_grouped_by_workload() {
        let record = TimingRecord {
            workload: "hot".to_owned(),
            strategy: "null".to_owned(),
            events: 1000,
            pass_median_ns: 5000,
            sampled_one_in: 16,
            timer_ns: 20,
            alloc_p50_ns: Some(25),
            ..TimingRecord::default()
        };
        let shown = timings(&[record.clone(), TimingRecord { strategy: "caching".to_owned(), ..record }], None);
        assert!(shown.contains("5.0 ns") && shown.contains("200.0 M") && shown.contains("25 ns"), "{shown}");
        assert_eq!(shown.matches("hot").count(), 1, "{shown}");
        assert!(shown.contains("about 20 ns of reading the clock"), "{shown}");
    }
}
