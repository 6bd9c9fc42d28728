//! The differences that `oomph compare` finds between two runs.

use std::fmt::Write as _;

use serde_json::Value;

use super::{
    Medium, Render,
    render::{TextTable, counted},
};
use crate::{
    answer::{
        compare::{ChangeDirection, ColumnBalance, ColumnChange, Comparison},
        times::{FINDABLE_GOAL, TimeChange, TimeVerdict},
    },
    base::{Bytes, Nanos, escaped},
};

/// More lines of one kind are counted, not shown: those with the largest effect come first.
const MOST_LINES: usize = 12;

impl Render for Comparison {
    type Row = Comparison;

    /// One row that holds everything.
    fn rows(&self) -> &[Comparison] {
        std::slice::from_ref(self)
    }

    /// What got worse first, then what all cases together say, and a summary in the last line.
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
        let headings = ["case", "threads", "old median", "new median", "ratio", "interval", "p", "findable"];
        for (title, verdict) in [("slower", TimeVerdict::Slower), ("faster", TimeVerdict::Faster)] {
            let lines: Vec<_> = self.times.iter().filter(|time| time.verdict == verdict).map(time_cells).collect();
            section(&mut out, title, &headings, lines, medium);
        }
        let lines: Vec<_> = self.balance.iter().map(balance_cells).collect();
        section(&mut out, "on balance", &["column", "geometric mean", "better", "worse", "equal"], lines, medium);
        let lines: Vec<_> = self.times_together.iter().map(together_cells).collect();
        section(&mut out, "times on balance", &["cases", "", "ratio", "interval", "p", "verdict"], lines, medium);
        out.push_str(&only_in_one(&self.gone, &self.added));
        out.push_str(&noise(&self.times, self.took_turns));
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
    if headings[0] == "case" {
        table = table.with_groups();
    }
    lines.into_iter().take(MOST_LINES).for_each(|line| table.row(line));
    // Of a time, the verdict follows from the interval.
    if headings.len() > 6 {
        table.fit(&[7, 6, 1, 2]);
    }
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

fn balance_cells(balance: &ColumnBalance) -> Vec<String> {
    vec![
        balance.column.clone(),
        format!("{:.3}", balance.mean_ratio),
        balance.better.to_string(),
        balance.worse.to_string(),
        balance.equal.to_string(),
    ]
}

fn together_cells(time: &TimeChange) -> Vec<String> {
    let verdict = match time.verdict {
        TimeVerdict::Slower => "slower",
        TimeVerdict::Faster => "faster",
        TimeVerdict::Noise => "within noise",
        TimeVerdict::Unclear => "cannot tell",
    };
    let ratio = format!("{:.3}", time.ratio);
    vec![time.case_id.clone(), String::new(), ratio, interval(time), p_value(time), verdict.to_owned()]
}

/// The cases of one run only, in one line.
fn only_in_one(gone: &[String], added: &[String]) -> String {
    let part = |cases: &[String], run: &str| {
        let first = cases.first()?;
        let more = if cases.len() > 1 { ", .." } else { "" };
        Some(format!("{} in the {run} run ({}{more})", counted(cases.len(), "case", "cases"), escaped(first)))
    };
    let parts: Vec<String> = [part(gone, "old"), part(added, "new")].into_iter().flatten().collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("only in one run: {}; --format json lists all\n", parts.join(", ")),
    }
}

/// What the noise of the machine hides.
fn noise(times: &[TimeChange], took_turns: bool) -> String {
    let mut hidden: Vec<f64> =
        times.iter().filter(|time| time.verdict == TimeVerdict::Unclear).map(|time| time.findable_share).collect();
    hidden.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (hidden.first(), hidden.last()) else { return String::new() };
    let range = match (percent(*least), percent(*most)) {
        (least, most) if least == most => most,
        (least, most) => format!("{least} to {most}"),
    };
    let remedy = match took_turns {
        true => "More --rounds help.",
        false => "`oomph compare OLD_PROGRAM NEW_PROGRAM --suite SUITE` lets both take turns, so that noise hits both.",
    };
    format!(
        "cannot tell: in {} of {} the machine was too noisy to find a slowdown of {}; the smallest that could be found is \
         {range}. {remedy}\n",
        hidden.len(),
        counted(times.len(), "time", "times"),
        percent(FINDABLE_GOAL)
    )
}

fn percent(share: f64) -> String {
    if share > 10.0 { "over 1000 %".to_owned() } else { format!("{:.0} %", share * 100.0) }
}

fn interval(time: &TimeChange) -> String {
    format!("{:.3} to {:.3}", time.low_ratio, time.high_ratio)
}

fn p_value(time: &TimeChange) -> String {
    time.adjusted_p_value.map_or_else(|| "-".to_owned(), |p_value| format!("{p_value:.2e}"))
}

fn time_cells(time: &TimeChange) -> Vec<String> {
    vec![
        time.case_id.clone(),
        time.threads.map_or_else(String::new, |threads| threads.to_string()),
        Nanos(time.old_median_ns).to_string(),
        Nanos(time.new_median_ns).to_string(),
        format!("{:.3}", time.ratio),
        interval(time),
        p_value(time),
        percent(time.findable_share),
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
    let mut timed = match comparison.within_tolerance {
        0 => String::new(),
        equal => format!("; {equal} columns within the tolerance"),
    };
    if !comparison.times.is_empty() {
        let unclear = times(TimeVerdict::Unclear);
        timed.push_str(&format!(
            "; times: {slower} slower, {faster} faster, {noise} within noise, {unclear} cannot tell"
        ));
    }
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
    use crate::report::{Glyphs, Terminal};

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
        for words in [
            "1048576 (1.00 MiB)",
            "2.000",
            "only in one run: 1 case in the old run (quick/v)",
            "1 columns worse, 0 better",
        ] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
    }

    #[test]
    fn long_names_of_cases_fit_a_terminal() {
        let change = ColumnChange {
            case_id: "strategies/variable-length/caching:expandable_segments:True@sim<=6GiB#1".to_owned(),
            column: "peak_device_used_bytes".to_owned(),
            old: 123_456_789_012_u64.into(),
            new: 223_456_789_012_u64.into(),
            direction: ChangeDirection::Worse,
        };
        let found = Comparison { compared: 3, changes: vec![change], ..Comparison::default() };
        let text = found.text(Medium::Terminal(Terminal { width: Some(80), glyphs: Glyphs::Lines }));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for part in ["expandable_segments:", "peak_device_used_bytes", "(115 GiB)", "1.810"] {
            assert!(text.contains(part), "'{part}' is not in one piece:\n{text}");
        }
    }
}
