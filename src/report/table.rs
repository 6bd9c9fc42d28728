//! The table that people look at first, for the terminal and as markdown; and the same rows as CSV and JSON.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

use super::{
    ReportError,
    narrow::fit,
    rows,
    scenario::{groups, is_contender, title},
    summary::explanations,
};
use crate::{
    base::{Bytes, Nanos},
    measure::{CaseRecord, SCHEMA, Status},
};

/// Two words are two lines, so that columns are as narrow as their numbers; markdown puts them on one.
const HEADINGS: [&str; 9] = [
    "workload",
    "strategy",
    "peak\nallocated",
    "peak\nreserved",
    "device\nused",
    "fragmen-\ntation",
    "out of\nmemory",
    "driver\ncalls",
    "driver\ntime",
];
/// Columns from here on hold numbers.
const FIRST_NUMBER: usize = 2;
/// What can best be missed where a terminal is narrow, by place.
const DISPENSABLE: [usize; 4] = [7, 8, 2, 5];
const LEGEND: &str = "Fragmentation is 1 - peak allocated / peak reserved.";
const LEGEND_OF_THE_STAR: &str = "Whoever took least of the device, whole pages and context included, is marked *. ";

/// The table for a terminal of `width` columns; as wide as it needs to be where that is `None`.
#[must_use]
pub fn terminal(records: &[CaseRecord], width: Option<u16>) -> String {
    let mut table = table(records, &HEADINGS.map(str::to_owned));
    dress_for_terminal(&mut table, width);
    let left_out = fit(&mut table, width, &DISPENSABLE).map_or_else(String::new, |said| format!(" {said}"));
    let mut text = format!("{}\n{}{left_out}\n", table.trim_fmt(), legend(records));
    // What went wrong is said as an error by whoever prints this; the rest belongs to the table.
    let sound = records.iter().filter(|record| record.status != Status::Error);
    let explained: Vec<String> = explanations(sound).collect();
    if !explained.is_empty() {
        text.push_str(&format!("\n{}\n", explained.join("\n")));
    }
    text
}

/// The table as markdown.
#[must_use]
pub fn markdown(records: &[CaseRecord]) -> String {
    let mut table = table(records, &HEADINGS.map(|heading| heading.replace("-\n", "").replace('\n', " ")));
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Disabled);
    format!("{}\n\n{}\n", table.trim_fmt(), legend(records))
}

/// All columns, as in `runs.csv`.
pub fn csv(records: &[CaseRecord]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(records)?).into_owned())
}

/// `{"schema": 1, "rows": [...]}` with all columns in base units.
#[must_use]
pub fn json(records: &[CaseRecord]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": records }))
}

/// The star is explained where there is one.
fn legend(records: &[CaseRecord]) -> String {
    let has_star = groups(records).iter().any(|group| group.least_used().is_some());
    format!("{}{LEGEND}", if has_star { LEGEND_OF_THE_STAR } else { "" })
}

/// Lines above and below, none between rows, and no wider than the terminal.
pub(super) fn dress_for_terminal(table: &mut Table, width: Option<u16>) {
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.style_mut().row_separator = comfy_table::LineStyle::none();
    match width {
        Some(width) => table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width),
        None => table.set_content_arrangement(ContentArrangement::Disabled),
    };
}

/// A table without rows: names on the left, numbers on the right.
pub(super) fn headed(headings: &[impl ToString]) -> Table {
    let mut table = Table::new();
    table.force_no_tty();
    table.set_header(headings.iter().map(ToString::to_string));
    for column in table.column_iter_mut().skip(FIRST_NUMBER) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn table(records: &[CaseRecord], headings: &[String]) -> Table {
    let mut table = headed(headings);
    let groups = groups(records);
    for group in &groups {
        let least = group.least_used();
        let mut heading = title(&group.scenario, &groups);
        for record in &group.records {
            let best = is_contender(record) && least == Some(record.peak_device_used_bytes);
            table.add_row(row(std::mem::take(&mut heading), record, best));
        }
    }
    table
}

fn row(heading: String, record: &CaseRecord, best: bool) -> Vec<Cell> {
    let mut cells = vec![heading, record.strategy.clone()];
    if record.clock.is_some() {
        // The star has a place of its own, so that the digits stay under each other.
        let star = if best { "*" } else { " " };
        cells.extend([
            Bytes(record.peak_allocated_bytes).to_string(),
            Bytes(record.peak_reserved_bytes).to_string(),
            format!("{} {star}", known_bytes(record.peak_device_used_bytes)),
            record.peak_gap_share.map_or_else(String::new, |share| format!("{:.1} %", share * 100.0)),
            verdict(record),
            record.driver_calls.to_string(),
            Nanos(record.driver_ns).to_string(),
        ]);
    } else {
        cells.extend(["", "", "", "", &verdict(record), "", ""].map(str::to_owned));
    }
    cells.into_iter().map(Cell::new_owned).collect()
}

/// An amount that is 0 only where nobody knows it.
pub(super) fn known_bytes(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { Bytes(bytes).to_string() }
}

/// Whether memory ran out, and where.
fn verdict(record: &CaseRecord) -> String {
    match record.status {
        Status::Completed => "no".to_owned(),
        Status::Oom => match (record.oom_step, record.oom_event) {
            (Some(step), _) => format!("step {step}"),
            (None, Some(event)) => format!("event {event}"),
            (None, None) => "yes".to_owned(),
        },
        Status::Skipped | Status::Interrupted | Status::Error => record.status.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, device::Clock, measure::CaseLabel, replay::Cause};

    fn record(workload: &str, strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let measured = status != Status::Skipped;
        CaseRecord {
            clock: measured.then_some(Clock::Virtual),
            peak_allocated_bytes: 30 * MIB,
            peak_reserved_bytes: reserved,
            peak_device_used_bytes: reserved + MIB,
            peak_gap_share: crate::measure::lost_share(30 * MIB, reserved),
            oom_event: (status == Status::Oom).then_some(17),
            oom_requested_bytes: (status == Status::Oom).then_some(8 * MIB),
            oom_free_bytes: (status == Status::Oom).then_some(9 * MIB),
            oom_cause: (status == Status::Oom).then_some(Cause::Fragmentation),
            driver_calls: 4,
            driver_alloc_calls: 2,
            driver_ns: 1_234_000,
            ..CaseRecord::unmeasured(&label, status, "because")
        }
    }

    fn sample() -> Vec<CaseRecord> {
        vec![
            record("saw-tooth", "caching", Status::Completed, 40 * MIB),
            record("saw-tooth", "direct", Status::Completed, 32 * MIB),
            record("checkerboard", "caching", Status::Oom, 64 * MIB),
            record("checkerboard", "pools", Status::Skipped, 0),
        ]
    }

    #[test]
    fn the_terminal_table_groups_by_workload_and_marks_the_least_memory() {
        insta::assert_snapshot!(terminal(&sample(), None), @"
        ──────────────────────────────────────────────────────────────────────────────────────────────────────
         workload       strategy        peak       peak       device   fragmen-     out of   driver    driver
                                   allocated   reserved         used     tation     memory    calls      time
        ══════════════════════════════════════════════════════════════════════════════════════════════════════
         saw-tooth      caching     30.0 MiB   40.0 MiB   41.0 MiB       25.0 %         no        4   1.23 ms
                        direct      30.0 MiB   32.0 MiB   33.0 MiB *      6.2 %         no        4   1.23 ms
         checkerboard   caching     30.0 MiB   64.0 MiB   65.0 MiB       53.1 %   event 17        4   1.23 ms
                        pools                                                      skipped
        ──────────────────────────────────────────────────────────────────────────────────────────────────────
        Whoever took least of the device, whole pages and context included, is marked *. Fragmentation is 1 - peak allocated / peak reserved.

        /checkerboard/caching@#0: out of memory at event 17: 8.00 MiB asked for, 9.00 MiB free in all (fragmentation); because
        /checkerboard/pools@#0: skipped: because
        ");
    }

    #[test]
    fn the_markdown_table_has_the_same_cells() {
        insta::assert_snapshot!(markdown(&sample()), @"
        | workload     | strategy | peak allocated | peak reserved | device used | fragmentation | out of memory | driver calls | driver time |
        |--------------|----------|----------------|---------------|-------------|---------------|---------------|--------------|-------------|
        | saw-tooth    | caching  |       30.0 MiB |      40.0 MiB |  41.0 MiB   |        25.0 % |            no |            4 |     1.23 ms |
        |              | direct   |       30.0 MiB |      32.0 MiB |  33.0 MiB * |         6.2 % |            no |            4 |     1.23 ms |
        | checkerboard | caching  |       30.0 MiB |      64.0 MiB |  65.0 MiB   |        53.1 % |      event 17 |            4 |     1.23 ms |
        |              | pools    |                |               |             |               |       skipped |              |             |

        Whoever took least of the device, whole pages and context included, is marked *. Fragmentation is 1 - peak allocated / peak reserved.
        ");
    }

    #[test]
    fn a_narrow_terminal_gets_a_narrow_table() {
        let text = terminal(&sample(), Some(80));
        let table = text.lines().take_while(|line| !line.contains(LEGEND));
        assert!(table.clone().count() > 4);
        assert!(table.clone().all(|line| line.chars().count() <= 80), "{text}");
        for whole in ["workload", "checkerboard", "40.0 MiB", "event 17"] {
            assert!(text.contains(whole), "{whole} is not in one piece:\n{text}");
        }
        assert!(text.contains("Left out of a narrow table: peak allocated, driver calls, driver time."), "{text}");
    }

    #[test]
    fn json_has_a_schema_and_base_units() {
        let value: serde_json::Value = serde_json::from_str(&json(&sample())).unwrap();
        assert_eq!(value["schema"], 1);
        assert_eq!(value["rows"][1]["peak_reserved_bytes"], 32 * MIB);
        assert_eq!(value["rows"][3]["status"], "skipped");
    }

    #[test]
    fn csv_is_what_runs_csv_holds() {
        let text = csv(&sample()).unwrap();
        let read: Vec<CaseRecord> =
            ::csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, sample());
    }
}
