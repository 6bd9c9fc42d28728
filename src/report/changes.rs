//! What `compare` found: for people and as JSON.

use std::fmt::Write as _;

use comfy_table::Cell;
use serde_json::Value;

use super::table::{dress_for_terminal, headed};
use crate::{
    answer::compare::{Change, Comparison, Direction, TimeChange, TimeVerdict},
    base::{Bytes, Nanos},
    measure::SCHEMA,
};

/// More lines than this of one kind are counted and not shown.
const MOST_LINES: usize = 40;

/// The differences, what got worse first, and one line that sums them up.
#[must_use]
pub fn changes(comparison: &Comparison, width: Option<u16>) -> String {
    let mut out = String::new();
    for (title, direction) in
        [("worse", Direction::Worse), ("better", Direction::Better), ("different", Direction::Different)]
    {
        let lines: Vec<Vec<Cell>> =
            comparison.changes.iter().filter(|change| change.direction == direction).map(changed).collect();
        section(&mut out, title, &["case", "column", "old", "new", "ratio"], lines, width);
    }
    for (title, verdict) in [("slower", TimeVerdict::Slower), ("faster", TimeVerdict::Faster)] {
        let lines: Vec<Vec<Cell>> = comparison.times.iter().filter(|time| time.verdict == verdict).map(timed).collect();
        section(
            &mut out,
            title,
            &["case", "threads", "old median", "new median", "ratio", "p", "effect"],
            lines,
            width,
        );
    }
    for (words, cases) in [("only in the old run", &comparison.gone), ("only in the new run", &comparison.added)] {
        if !cases.is_empty() {
            let _ = writeln!(out, "{words}: {}", cases.join(", "));
        }
    }
    if let Some(reason) = &comparison.times_left_out {
        let _ = writeln!(out, "{reason}");
    }
    out.push_str(&in_sum(comparison));
    out
}

/// `{"schema": 1, "rows": [...]}`, one row that holds everything.
#[must_use]
pub fn changes_json(comparison: &Comparison) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": [comparison] }))
}

fn section(out: &mut String, title: &str, headings: &[&str], lines: Vec<Vec<Cell>>, width: Option<u16>) {
    if lines.is_empty() {
        return;
    }
    let left_out = lines.len().saturating_sub(MOST_LINES);
    let mut table = headed(headings);
    dress_for_terminal(&mut table, width);
    table.add_rows(lines.into_iter().take(MOST_LINES));
    let _ = writeln!(out, "{title}:\n{}", table.trim_fmt());
    if left_out > 0 {
        let _ = writeln!(out, "and {left_out} more; --format json has them all");
    }
}

fn changed(change: &Change) -> Vec<Cell> {
    let ratio = change.ratio().map_or_else(String::new, |ratio| format!("{ratio:.3}"));
    [
        change.case_id.clone(),
        change.column.clone(),
        shown(&change.column, &change.old),
        shown(&change.column, &change.new),
        ratio,
    ]
    .into_iter()
    .map(Cell::new_owned)
    .collect()
}

fn timed(time: &TimeChange) -> Vec<Cell> {
    let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.3}"));
    [
        time.case_id.clone(),
        time.threads.map_or_else(String::new, |threads| threads.to_string()),
        Nanos(time.old_median_ns).to_string(),
        Nanos(time.new_median_ns).to_string(),
        format!("{:.3}", time.ratio),
        number(time.p_value),
        number(time.rank_biserial),
    ]
    .into_iter()
    .map(Cell::new_owned)
    .collect()
}

/// Amounts in units where they still differ; exact numbers are in the JSON.
fn shown(column: &str, value: &Value) -> String {
    match (value, value.as_u64()) {
        (Value::Null, _) => "-".to_owned(),
        (Value::String(text), _) => text.clone(),
        (_, Some(bytes)) if column.ends_with("_bytes") => format!("{bytes} ({})", Bytes(bytes)),
        (_, Some(nanos)) if column.ends_with("_ns") => format!("{nanos} ({})", Nanos(nanos)),
        (value, _) => value.to_string(),
    }
}

fn in_sum(comparison: &Comparison) -> String {
    let count = |direction| comparison.changes.iter().filter(|change| change.direction == direction).count();
    let times = |verdict| comparison.times.iter().filter(|time| time.verdict == verdict).count();
    let (slower, faster, noise) = (times(TimeVerdict::Slower), times(TimeVerdict::Faster), times(TimeVerdict::Noise));
    let timed = match comparison.times.len() {
        0 => String::new(),
        _ => format!("; times: {slower} slower, {faster} faster, {noise} within noise"),
    };
    match (comparison.changes.len(), timed.as_str()) {
        (0, timed) => format!("{} cases compared: equal in every column that must be{timed}\n", comparison.compared),
        _ => format!(
            "{} cases compared: {} columns worse, {} better, {} different{timed}\n",
            comparison.compared,
            count(Direction::Worse),
            count(Direction::Better),
            count(Direction::Different),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_got_worse_comes_first_and_equal_runs_are_one_line() {
        let equal = Comparison { compared: 3, ..Comparison::default() };
        assert_eq!(changes(&equal, None), "3 cases compared: equal in every column that must be\n");
        let change = |column: &str, direction| Change {
            case_id: "quick/w".to_owned(),
            column: column.to_owned(),
            old: 1_048_576.into(),
            new: 2_097_152.into(),
            direction,
        };
        let found = Comparison {
            compared: 3,
            changes: vec![change("hits", Direction::Different), change("peak_reserved_bytes", Direction::Worse)],
            gone: vec!["quick/v".to_owned()],
            ..Comparison::default()
        };
        let text = changes(&found, None);
        assert!(text.find("worse:").unwrap() < text.find("different:").unwrap(), "{text}");
        for words in ["1048576 (1.00 MiB)", "2.000", "only in the old run: quick/v", "1 columns worse, 0 better"] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
    }
}
