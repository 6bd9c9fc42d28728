//! The table of wall-clock times.

use comfy_table::Cell;

use super::table::{dress_for_terminal, headed};
use crate::measure::TimingRecord;

const HEADINGS: [&str; 7] = [
    "workload",
    "strategy",
    "threads",
    "per event",
    "events/s",
    "alloc ns\np50 / p99 / p99.9",
    "free ns\np50 / p99 / p99.9",
];

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
    let sampled_one_in = records.first().map_or(0, |record| record.sampled_one_in);
    let mut shown = format!(
        "{}\nWall clock. Per event: median pass, nobody watching. Percentiles: a second pass that times one operation in \
         {sampled_one_in}; each contains about {timer} ns of reading the clock.\n",
        table.trim_fmt(),
    );
    if records.iter().any(|record| record.threads.is_some()) {
        shown.push_str(
            "Threads share the strategy under one lock, each with its own copy of the workload: per event is what a thread \
             takes, waiting included; events/s are those of all threads.\n",
        );
    }
    shown
}

fn row(heading: &str, record: &TimingRecord) -> Vec<Cell> {
    let between_events = record.pass_median_ns as f64 / record.events.max(1) as f64;
    let per_event = between_events * f64::from(record.threads.unwrap_or(1));
    let percentiles = |times: [Option<u64>; 3]| {
        times.map(|time| time.map_or_else(|| "-".to_owned(), |time| time.to_string())).join(" / ")
    };
    [
        heading.to_owned(),
        record.strategy.clone(),
        record.threads.map_or_else(String::new, |threads| threads.to_string()),
        format!("{per_event:.1} ns"),
        format!("{:.1} M", 1e3 / between_events),
        percentiles([record.alloc_p50_ns, record.alloc_p99_ns, record.alloc_p999_ns]),
        percentiles([record.free_p50_ns, record.free_p99_ns, record.free_p999_ns]),
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
        assert!(shown.contains("5.0 ns") && shown.contains("200.0 M") && shown.contains("25 / - / -"), "{shown}");
        assert_eq!(shown.matches("hot").count(), 1, "{shown}");
        assert!(shown.contains("about 20 ns of reading the clock"), "{shown}");
        assert!(!shown.contains("under one lock"), "{shown}");
    }

    #[test]
    fn an_event_of_one_thread_takes_as_long_as_all_threads_make_it_wait() {
        let record = TimingRecord { events: 1000, pass_median_ns: 5000, threads: Some(8), ..TimingRecord::default() };
        let shown = timings(&[record], None);
        assert!(shown.contains("40.0 ns") && shown.contains("200.0 M") && shown.contains("under one lock"), "{shown}");
    }
}
