//! The verdicts of `stress`: a table, what broke below it, and the same rows as CSV and JSON.

use comfy_table::Cell;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{measure::SCHEMA, stress::VerdictRow};

const HEADINGS: [&str; 8] =
    ["kind", "strategy", "verdict", "trials", "events", "requests\nserved", "out of\nmemory", "driver\ncalls"];

/// One line a strategy and kind of stress; what broke, and how to see it again, below.
#[must_use]
pub fn verdicts(rows: &[VerdictRow], medium: Medium) -> String {
    let mut table = table(&HEADINGS, medium);
    let mut last = None;
    for row in rows {
        let whose = Some((&row.kind, &row.strategy));
        // Of several failures the first stands in the table, and all below it.
        if whose == last {
            continue;
        }
        last = whose;
        let numbers = [row.trials, row.events, row.served, row.ooms, row.driver_calls].map(|number| number.to_string());
        let words = [&row.kind, &row.strategy, &row.verdict].into_iter().cloned();
        table.add_row(words.chain(numbers).map(Cell::new_owned).collect::<Vec<_>>());
    }
    with_notes(&table, &legend(rows), rows.iter().filter_map(note), medium)
}

/// One line a strategy, one column a kind of stress: the verdict and how often something was tried.
#[must_use]
pub fn verdict_matrix(rows: &[VerdictRow], medium: Medium) -> String {
    let (mut kinds, mut strategies): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for row in rows {
        add_new(&mut kinds, &row.kind);
        add_new(&mut strategies, &row.strategy);
    }
    let headings: Vec<&str> = std::iter::once("strategy").chain(kinds.iter().copied()).collect();
    let mut table = table(&headings, medium);
    for strategy in strategies {
        let cells = kinds.iter().map(|kind| {
            let row = rows.iter().find(|row| row.strategy == strategy && row.kind == *kind);
            row.map_or_else(String::new, |row| format!("{} {}", row.verdict, row.trials))
        });
        table.add_row(std::iter::once(strategy.to_owned()).chain(cells).map(Cell::new_owned).collect::<Vec<_>>());
    }
    let legend = format!("A number says how often something was tried in the time given. {}", legend(rows));
    with_notes(&table, &legend, rows.iter().filter_map(note), medium)
}

fn add_new<'a>(names: &mut Vec<&'a str>, name: &'a str) {
    if !names.contains(&name) {
        names.push(name);
    }
}

fn legend(rows: &[VerdictRow]) -> String {
    match rows.iter().filter(|row| row.verdict == "failed").count() {
        0 => "No promise was broken. Running out of memory is a result, not a failure.".to_owned(),
        1 => "A promise was broken:".to_owned(),
        many => format!("{many} promises were broken:"),
    }
}

/// `{"schema": 1, "rows": [...]}`.
#[must_use]
pub fn verdicts_json(rows: &[VerdictRow]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": rows }))
}

/// The same rows, comma-separated.
pub fn verdicts_csv(verdicts: &[VerdictRow]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(verdicts)?).into_owned())
}

fn note(row: &VerdictRow) -> Option<String> {
    let VerdictRow { kind, strategy, verdict, detail, trace, trace_events, repeat, .. } = row;
    if detail.is_empty() {
        return None;
    }
    let mut note = format!("{verdict}: {strategy}: {kind}: {detail}");
    if !trace.is_empty() {
        let plural = if *trace_events == 1 { "" } else { "s" };
        note.push_str(&format!("\n  trace: {trace} ({trace_events} event{plural})"));
    }
    if !repeat.is_empty() {
        note.push_str(&format!("\n  again: {repeat}"));
    }
    Some(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<VerdictRow> {
        let passed = VerdictRow {
            kind: "properties".to_owned(),
            strategy: "caching".to_owned(),
            verdict: "passed".to_owned(),
            trials: 100,
            events: 9_000,
            served: 4_000,
            ooms: 12,
            driver_calls: 5_000,
            ..VerdictRow::default()
        };
        let failed = VerdictRow {
            strategy: "broken".to_owned(),
            verdict: "failed".to_owned(),
            detail: "overlap: two blocks at once".to_owned(),
            trace: "stress-failures/properties-broken.oomph".to_owned(),
            trace_events: 3,
            repeat: "oomph stress properties --trace stress-failures/properties-broken.oomph --strategy broken"
                .to_owned(),
            ..passed.clone()
        };
        vec![passed, failed.clone(), VerdictRow { detail: "books: one too many".to_owned(), ..failed }]
    }

    #[test]
    fn a_strategy_has_one_line_and_each_failure_its_command() {
        let text = verdicts(&sample(), Medium::Terminal(None));
        assert_eq!(text.lines().filter(|line| line.contains(" broken ")).count(), 1, "{text}");
        assert_eq!(text.matches("again: oomph stress").count(), 2, "{text}");
        assert!(text.contains("2 promises were broken:") && text.contains("broken.oomph (3 events)"), "{text}");
        assert!(verdicts(&sample()[..1], Medium::Markdown).contains("No promise was broken"));
    }

    #[test]
    fn a_matrix_has_a_line_a_strategy_and_a_column_a_kind() {
        let mut rows = sample();
        rows.push(VerdictRow { kind: "faults".to_owned(), trials: 7, ..rows[0].clone() });
        let text = verdict_matrix(&rows, Medium::Markdown);
        assert!(text.contains("| strategy | properties |   faults |"), "{text}");
        assert!(text.contains("| caching  | passed 100 | passed 7 |"), "{text}");
        assert!(text.contains("| broken   | failed 100 |          |"), "{text}");
    }

    #[test]
    fn csv_and_json_have_every_row() {
        let text = verdicts_csv(&sample()).unwrap();
        let read: Vec<VerdictRow> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, sample());
        let value: serde_json::Value = serde_json::from_str(&verdicts_json(&sample())).unwrap();
        assert_eq!((&value["schema"], &value["rows"][1]["verdict"]), (&1.into(), &"failed".into()));
    }
}
