//! What strategies held out under `stress integrity` and `stress soak`: tables, and the same rows as CSV and JSON.

use comfy_table::Cell;
use serde_json::json;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{
    base::Bytes,
    measure::SCHEMA,
    stress::{AccountRow, Ledger},
};

const HEADINGS: [&str; 9] = [
    "strategy",
    "verdict",
    "blocks\nverified",
    "bytes\nverified",
    "damaged",
    "on another\nstream",
    "out of\nmemory",
    "blocks\na second",
    "bytes\na second",
];

const SOAK_HEADINGS: [&str; 10] = [
    "strategy",
    "verdict",
    "blocks\nverified",
    "damaged",
    "violations",
    "faults",
    "out of\nmemory",
    "requested\nleast",
    "mean",
    "idle of\nreserved",
];

/// One line a strategy, all slices together; what broke, and how to see it again, below.
#[must_use]
pub fn endurance(ledger: &Ledger, rows: &[AccountRow], medium: Medium) -> String {
    let is_soak = rows.iter().any(|row| row.samples > 0) && ledger.kind == "soak";
    let mut table = table(if is_soak { &SOAK_HEADINGS } else { &HEADINGS }, medium);
    for row in rows {
        let cells = if is_soak { soak_cells(row, ledger) } else { cells(row) };
        table.add_row(cells.into_iter().map(Cell::new_owned).collect::<Vec<_>>());
    }
    with_notes(&table, &legend(ledger), rows.iter().filter_map(note), medium)
}

fn cells(row: &AccountRow) -> Vec<String> {
    let a_second = |count: u64| if row.wall_ns == 0 { 0.0 } else { count as f64 * 1e9 / row.wall_ns as f64 };
    vec![
        row.strategy.clone(),
        row.verdict.clone(),
        row.blocks.to_string(),
        Bytes(row.compared_bytes).to_string(),
        row.damaged.to_string(),
        row.crossings.to_string(),
        row.ooms.to_string(),
        format!("{:.0}", a_second(row.blocks)),
        Bytes(a_second(row.compared_bytes) as u64).to_string(),
    ]
}

fn soak_cells(row: &AccountRow, ledger: &Ledger) -> Vec<String> {
    let memory = ledger.slices.last().map_or(0, |slice| slice.memory_bytes).max(1);
    let of_memory = |bytes: u64| format!("{:.1} %", bytes as f64 * 100.0 / memory as f64);
    vec![
        row.strategy.clone(),
        row.verdict.clone(),
        row.blocks.to_string(),
        row.damaged.to_string(),
        row.violations.to_string(),
        row.faults.to_string(),
        row.ooms.to_string(),
        of_memory(row.requested_min_bytes),
        of_memory(row.requested_mean_bytes),
        format!("{:.1} %", row.idle_mean_ppm as f64 / 1e4),
    ]
}

fn legend(ledger: &Ledger) -> String {
    let total = ledger.total();
    let slices = match ledger.slices.len() {
        1 => "one slice".to_owned(),
        many => format!("{many} slices"),
    };
    format!(
        "In {slices}: {} blocks and {} verified, {} damaged. Running out of memory is a result, not a failure.",
        total.blocks,
        Bytes(total.compared_bytes),
        total.damaged
    )
}

fn note(row: &AccountRow) -> Option<String> {
    if row.detail.is_empty() || row.verdict == "passed" {
        return None;
    }
    let AccountRow { verdict, strategy, kind, detail, trace, trace_events, repeat, .. } = row;
    let mut note = format!("{verdict}: {strategy}: {kind}: {detail}");
    if !trace.is_empty() {
        note.push_str(&format!("\n  trace: {trace} ({trace_events} events)"));
    }
    if !repeat.is_empty() {
        note.push_str(&format!("\n  again: {repeat}"));
    }
    Some(note)
}

/// `{"schema": 1, "rows": [...], "total": {...}}`.
#[must_use]
pub fn endurance_json(ledger: &Ledger, rows: &[AccountRow]) -> String {
    format!("{:#}\n", json!({ "schema": SCHEMA, "rows": rows, "slices": ledger.slices, "total": ledger.total() }))
}

/// The same rows, comma-separated.
pub fn endurance_csv(accounts: &[AccountRow]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(accounts)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stress::{Account, Evidence, Levels, Slice, Tally};

    fn ledger(kind: &str) -> Ledger {
        let mut ledger = Ledger::new(kind);
        ledger.slices.push(Slice { memory_bytes: 1 << 30, ..Slice::default() });
        let tally = Tally { blocks: 2_000, compared_bytes: 4 << 30, wall_ns: 2_000_000_000, ..Tally::default() };
        let levels = Levels { samples: 1, requested_mean_bytes: 1 << 29, idle_mean_ppm: 80_000, ..Levels::default() };
        let passed = Account { strategy: "caching".to_owned(), slices: 1, tally, levels, ..Account::default() };
        let broken = Account {
            strategy: "broken".to_owned(),
            slices: 1,
            failures: vec!["block 3 has lost its contents at byte 0".to_owned()],
            ..Account::default()
        };
        ledger.strategies = vec![passed, broken];
        ledger
    }

    #[test]
    fn rates_stand_beside_what_was_verified_and_what_broke_below() {
        let ledger = ledger("integrity");
        let evidence = Evidence { trace: "a.oomph".to_owned(), trace_events: 4, repeat: "oomph stress".to_owned() };
        let rows = ledger.rows(&[("broken".to_owned(), evidence)]);
        let text = endurance(&ledger, &rows, Medium::Terminal(None));
        assert!(text.contains("2000") && text.contains("1000") && text.contains("2.00 GiB"), "{text}");
        assert!(text.contains("failed: broken: integrity: block 3"), "{text}");
        assert!(text.contains("trace: a.oomph (4 events)\n  again: oomph stress"), "{text}");
        assert!(text.contains("In one slice: 2000 blocks and 4.00 GiB verified"), "{text}");
        let csv = endurance_csv(&rows).unwrap();
        assert!(csv.starts_with("kind,strategy,verdict,slices,blocks,") && csv.lines().count() == 3, "{csv}");
        assert!(endurance_json(&ledger, &rows).contains("\"compared_bytes\": 4294967296"));
    }

    #[test]
    fn a_soak_tells_how_full_memory_was() {
        let ledger = ledger("soak");
        let text = endurance(&ledger, &ledger.rows(&[]), Medium::Markdown);
        assert!(text.contains("50.0 %") && text.contains("8.0 %"), "{text}");
    }
}
