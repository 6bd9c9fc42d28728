//! What became of misused strategies: one line a misuse, one column a strategy; the same rows as CSV and JSON.

use comfy_table::Cell;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{measure::SCHEMA, stress::misuse::MisuseRow};

const LEGEND: &str = "\
d  detected: refused with an error or a result      h  harmless: accepted, and nothing came of it
X  corrupts: the strategy or others are damaged     -  not applicable
Two letters: the block was named by its handle / by its address alone.";

/// One strategy is told in full, several in a matrix.
#[must_use]
pub fn misuses(rows: &[MisuseRow], medium: Medium) -> String {
    let strategies = distinct(rows.iter().map(|row| row.strategy.as_str()));
    match strategies.as_slice() {
        [_] => in_full(rows, medium),
        several => matrix(rows, several, medium),
    }
}

/// `{"schema": 1, "rows": [...]}`.
#[must_use]
pub fn misuses_json(rows: &[MisuseRow]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": rows }))
}

/// The same rows, comma-separated.
pub fn misuses_csv(misuses: &[MisuseRow]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(misuses)?).into_owned())
}

fn in_full(rows: &[MisuseRow], medium: Medium) -> String {
    let mut table = table(&["misuse", "by", "consequence", "detail"], medium);
    for MisuseRow { misuse, door, consequence, detail, .. } in rows {
        table.add_row([misuse, door, consequence, detail].map(|text| Cell::new_owned(text.clone())));
    }
    let whose = rows.first().map(|row| format!("Strategy {}.", row.strategy)).unwrap_or_default();
    with_notes(&table, &whose, std::iter::empty(), medium)
}

fn matrix(rows: &[MisuseRow], strategies: &[&str], medium: Medium) -> String {
    let headings: Vec<&str> = std::iter::once("misuse").chain(strategies.iter().copied()).collect();
    let mut table = table(&headings, medium);
    for misuse in distinct(rows.iter().map(|row| row.misuse.as_str())) {
        let letters = strategies.iter().map(|&strategy| {
            let mut letters: Vec<&str> = rows
                .iter()
                .filter(|row| row.misuse == misuse && row.strategy == strategy)
                .map(|row| letter(&row.consequence))
                .collect();
            letters.dedup();
            letters.join("/")
        });
        table.add_row(std::iter::once(misuse.to_owned()).chain(letters).map(Cell::new_owned).collect::<Vec<_>>());
    }
    let damage = rows
        .iter()
        .filter(|row| row.consequence == "corrupts")
        .map(|row| format!("corrupts: {}: {} by {}: {}", row.strategy, row.misuse, row.door, row.detail));
    with_notes(&table, LEGEND, damage, medium)
}

fn letter(consequence: &str) -> &'static str {
    match consequence {
        "detected" => "d",
        "harmless" => "h",
        "corrupts" => "X",
        _ => "-",
    }
}

/// Each once, in the order in which they come.
fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(strategy: &str, door: &str, consequence: &str) -> MisuseRow {
        MisuseRow {
            strategy: strategy.to_owned(),
            misuse: "double-free".to_owned(),
            door: door.to_owned(),
            consequence: consequence.to_owned(),
            detail: "in its own words".to_owned(),
        }
    }

    #[test]
    fn several_strategies_are_a_matrix_and_damage_is_told_in_words() {
        let rows = [
            row("good", "handle", "detected"),
            row("good", "address", "detected"),
            row("bad", "handle", "harmless"),
            row("bad", "address", "corrupts"),
        ];
        let text = misuses(&rows, Medium::Terminal(None));
        let line = text.lines().find(|line| line.contains("double-free")).unwrap();
        assert_eq!(line.split_whitespace().filter(|word| word.len() <= 3).collect::<Vec<_>>(), ["d", "h/X"], "{text}");
        assert!(text.contains("corrupts: bad: double-free by address: in its own words"), "{text}");
    }

    #[test]
    fn one_strategy_is_told_in_full() {
        let text = misuses(&[row("good", "handle", "detected")], Medium::Markdown);
        assert!(text.contains("in its own words") && text.contains("Strategy good."), "{text}");
    }

    #[test]
    fn csv_and_json_have_every_row() {
        let rows = [row("good", "handle", "detected"), row("bad", "address", "corrupts")];
        let text = misuses_csv(&rows).unwrap();
        let read: Vec<MisuseRow> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, rows);
        let value: serde_json::Value = serde_json::from_str(&misuses_json(&rows)).unwrap();
        assert_eq!((&value["schema"], &value["rows"][1]["consequence"]), (&1.into(), &"corrupts".into()));
    }
}
