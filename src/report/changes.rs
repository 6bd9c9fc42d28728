//! The differences that `oomph compare` finds between two runs.

use std::fmt::Write as _;

use serde_json::Value;

use super::{Medium, Render, render::TextTable};
use crate::{
    answer::compare::{ChangeDirection, ColumnChange, Comparison, TimeChange, TimeVerdict},
    base::{Bytes, Nanos, escaped},
};

/// More lines of one kind are counted, not shown.
const MOST_LINES: usize = 40;

impl Render for Comparison {
    type Row = Comparison;

    /// One row that holds everything.
    fn rows(&self) -> &[Comparison] {
        std::slice::from_ref(self)
    }

    /// What got worse first, and a summary in the last line.
    fn text(&self, medium: Medium) -> String {
        let mut out = String::new();
        for (title, direction) in [
            ("worse", ChangeDirection::Worse),
            ("better", ChangeDirection::Better),
            ("different", ChangeDirection::Different),
        ] {
            let lines: Vec<_> = self.changes.iter().filter(|c| c.direction == direction).map(change_cells).collect();
            section(&mut out, title, &["case", "column", "old", "new", "ratio"], lines, medium);
        }
        let headings = ["case", "threads", "old median", "new median", "ratio", "p", "effect"];
        for (title, verdict) in [("slower", TimeVerdict::Slower), ("faster", TimeVerdict::Faster)] {
            let lines: Vec<_> = self.times.iter().filter(|time| time.verdict == verdict).map(time_cells).collect();
            section(&mut out, title, &headings, lines, medium);
        }
        for (words, cases) in [("only in the old run", &self.gone), ("only in the new run", &self.added)] {
            if !cases.is_empty() {
                let names: Vec<_> = cases.iter().map(|case_id| escaped(case_id)).collect();
                let _ = writeln!(out, "{words}: {}", names.join(", "));
            }
        }
        if let Some(reason) = &self.times_left_out {
            let _ = writeln!(out, "{}", escaped(reason));
        }
        out + &summary(self)
    }
}

fn section(out: &mut String, title: &str, headings: &[&str], lines: Vec<Vec<String>>, medium: Medium) {
    if lines.is_empty() {
        return;
    }
    let left_out = lines.len().saturating_sub(MOST_LINES);
    let mut table = TextTable::new(headings, medium);
    lines.into_iter().take(MOST_LINES).for_each(|line| table.row(line));
    let _ = write!(out, "{title}:\n{}", table.finish("", []));
    if left_out > 0 {
        let _ = writeln!(out, "and {left_out} more; --format json shows all");
    }
}

fn change_cells(change: &ColumnChange) -> Vec<String> {
    vec![
        change.case_id.clone(),
        change.column.clone(),
        shown(&change.column, &change.old),
        shown(&change.column, &change.new),
        change.ratio().map_or_else(String::new, |ratio| format!("{ratio:.3}")),
    ]
}

fn time_cells(time: &TimeChange) -> Vec<String> {
    let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.3}"));
    vec![
        time.case_id.clone(),
        time.threads.map_or_else(String::new, |threads| threads.to_string()),
        Nanos(time.old_median_ns).to_string(),
        Nanos(time.new_median_ns).to_string(),
        format!("{:.3}", time.ratio),
        number(time.p_value),
        number(time.rank_biserial),
    ]
}

/// A value in exact numbers and in units.
fn shown(column: &str, value: &Value) -> String {
    match (value, value.as_u64()) {
        (Value::Null, _) => "-".to_owned(),
        (Value::String(text), _) => text.clone(),
        (_, Some(bytes)) if column.ends_with("_bytes") => format!("{bytes} ({})", Bytes(bytes)),
        (_, Some(nanos)) if column.ends_with("_ns") => format!("{nanos} ({})", Nanos(nanos)),
        (value, _) => value.to_string(),
    }
}

fn summary(comparison: &Comparison) -> String {
    let count = |direction| comparison.changes.iter().filter(|change| change.direction == direction).count();
    let times = |verdict| comparison.times.iter().filter(|time| time.verdict == verdict).count();
    let (slower, faster, noise) = (times(TimeVerdict::Slower), times(TimeVerdict::Faster), times(TimeVerdict::Noise));
    let timed = match comparison.times.len() {
        0 => String::new(),
        _ => format!("; times: {slower} slower, {faster} faster, {noise} within noise"),
    };
    match (comparison.changes.len(), timed.as_str()) {
        (0, timed) => format!("{} cases compared: all deterministic columns are equal{timed}\n", comparison.compared),
        _ => format!(
            "{} cases compared: {} columns worse, {} better, {} different{timed}\n",
            comparison.compared,
            count(ChangeDirection::Worse),
            count(ChangeDirection::Better),
            count(ChangeDirection::Different),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worse_comes_first_and_equal_runs_are_one_line() {
        let equal = Comparison { compared: 3, ..Comparison::default() };
        assert_eq!(equal.text(Medium::PIPE), "3 cases compared: all deterministic columns are equal\n");
        let change = |column: &str, direction| ColumnChange {
            case_id: "quick/w".to_owned(),
            column: column.to_owned(),
            old: 1_048_576.into(),
            new: 2_097_152.into(),
            direction,
        };
        let found = Comparison {
            compared: 3,
            changes: vec![
                change("hits", ChangeDirection::Different),
                change("peak_reserved_bytes", ChangeDirection::Worse),
            ],
            gone: vec!["quick/v".to_owned()],
            ..Comparison::default()
        };
        let text = found.text(Medium::PIPE);
        assert!(text.find("worse:").unwrap() < text.find("different:").unwrap(), "{text}");
        for words in ["1048576 (1.00 MiB)", "2.000", "only in the old run: quick/v", "1 columns worse, 0 better"] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
    }
}
