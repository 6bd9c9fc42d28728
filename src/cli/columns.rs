//! Tests that `docs/columns.md` describes every column of every CSV, and no other. Every header comes from the code that
//! writes the file.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Serialize, de::DeserializeOwned};

use super::verify::VerifyRow;
use crate::{
    answer::{
        claims::ClaimRecord,
        fits::FitRow,
        ranks::RankComparison,
        releases::ReleaseRow,
        techniques::TechniqueRecord,
        threshold::{LargestRecord, ThresholdRecord},
    },
    measure::{AgreementRecord, CaseRecord, TimingRecord},
    report::{
        AdviceReport, BoundRow, Endurance, LeakReport, PlannedCase, RankReport, Render, ReportError, comparison_csv,
        to_checked_csv, to_csv,
    },
    stress::{StressState, VerdictRow, adversary::AdversaryRow, misuse::MisuseRow},
};

const DICTIONARY: &str = include_str!("../../docs/columns.md");

/// One row of the dictionary.
#[derive(Debug)]
struct DocumentedColumn {
    section: &'static str,
    name: &'static str,
    unit: &'static str,
    meaning: &'static str,
}

fn dictionary() -> Vec<DocumentedColumn> {
    let mut section = "";
    let mut columns = Vec::new();
    for line in DICTIONARY.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading;
        } else if line.starts_with("| `") {
            let cells: Vec<&'static str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [names, unit, meaning, when_empty] = cells[..] else { panic!("four cells: {line}") };
            assert!(!meaning.is_empty() && !when_empty.is_empty(), "{line}");
            let names = names.split(", ").map(|name| name.trim_matches('`'));
            columns.extend(names.map(|name| DocumentedColumn { section, name, unit, meaning }));
        }
    }
    columns
}

/// Every kind of CSV: its section of the dictionary, and a file without rows.
fn files() -> Result<Vec<(&'static str, String)>, ReportError> {
    let ranks = RankComparison::gather("", Vec::new());
    let by_rank = RankReport::<LeakReport> { ranks: &ranks, answers: Vec::new() };
    Ok(vec![
        ("runs.csv", to_checked_csv::<CaseRecord>(&[])?),
        ("replay --release", Vec::<ReleaseRow>::new().csv()?),
        ("comparison.csv", comparison_csv(&[], "")?),
        ("bounds.csv", to_csv::<BoundRow>(&[])?),
        ("timings.csv", to_checked_csv::<TimingRecord>(&[])?),
        ("plan.csv", to_checked_csv::<PlannedCase>(&[])?),
        ("thresholds.csv", to_checked_csv::<ThresholdRecord>(&[])?),
        ("threshold --largest", Vec::<LargestRecord>::new().csv()?),
        ("fits", Vec::<FitRow>::new().csv()?),
        ("techniques.csv", to_checked_csv::<TechniqueRecord>(&[])?),
        ("claims.csv", to_checked_csv::<ClaimRecord>(&[])?),
        ("advise", AdviceReport { advices: Vec::new(), top: 0 }.csv()?),
        ("leaks", LeakReport { findings: Vec::new(), top: 0 }.csv()?),
        ("ranks", by_rank.csv()?),
        ("verify", Vec::<VerifyRow>::new().csv()?),
        ("verify --on", Vec::<AgreementRecord>::new().csv()?),
        ("stress", Vec::<VerdictRow>::new().csv()?),
        ("stress misuse", Vec::<MisuseRow>::new().csv()?),
        ("stress adversary", Vec::<AdversaryRow>::new().csv()?),
        ("stress integrity and soak", Endurance { state: &StressState::new(""), rows: &[] }.csv()?),
    ])
}

#[test]
fn dictionary_has_exactly_the_columns_that_are_written() {
    let documented = dictionary();
    let files = files().unwrap();
    let sections: Vec<&str> = DICTIONARY.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(sections, files.iter().map(|(section, _)| *section).collect::<Vec<_>>());
    for (section, text) in &files {
        assert_eq!(text.lines().count(), 1, "{section}: {text}");
        let mut written: Vec<&str> = text.trim_end().split(',').collect();
        let mut described: Vec<&str> =
            documented.iter().filter(|column| column.section == *section).map(|column| column.name).collect();
        written.sort_unstable();
        described.sort_unstable();
        let missing: Vec<_> = written.iter().filter(|name| !described.contains(name)).collect();
        let unknown: Vec<_> = described.iter().filter(|name| !written.contains(name)).collect();
        assert!(missing.is_empty(), "docs/columns.md, {section}: these columns are not described: {missing:?}");
        assert!(unknown.is_empty(), "docs/columns.md, {section}: no such columns: {unknown:?}");
        assert_eq!(written, described, "{section}: a column is described twice");
    }
}

/// Where CSV is written. A new place needs a line in [`files`] and a section in the dictionary.
#[test]
fn all_writers_of_csv_are_known() {
    fn visit(folder: &Path, found: &mut BTreeMap<String, usize>) {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                visit(&entry, found);
            } else if entry.extension().is_some_and(|ending| ending == "rs") && !entry.ends_with("cli/columns.rs") {
                let text = fs::read_to_string(&entry).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                for writer in ["impl RenderRow for ", "fn csv(&self)", "csv::Writer", "RowFile::write("] {
                    let count = code.matches(writer).count();
                    *found.entry(writer.to_owned()).or_default() += count;
                }
            }
        }
    }
    let mut found = BTreeMap::new();
    visit(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    let expected = [("RowFile::write(", 6), ("csv::Writer", 2), ("fn csv(&self)", 13), ("impl RenderRow for ", 9)];
    assert_eq!(found, expected.map(|(writer, count)| (writer.to_owned(), count)).into());
}

#[test]
fn a_name_has_one_unit_and_one_meaning() {
    let mut known: BTreeMap<&str, DocumentedColumn> = BTreeMap::new();
    for column in dictionary() {
        let name = column.name;
        for (ending, unit) in [("_bytes", "bytes"), ("_ns", "ns"), ("_share", "share"), ("_ratio", "ratio")] {
            let is_named = name.ends_with(ending) || is_named_otherwise(name, unit);
            assert_eq!(is_named, column.unit == unit, "{column:?}");
        }
        // What comes after the semicolon is about one file.
        let general = |column: &DocumentedColumn| column.meaning.split(';').next();
        if let Some(earlier) = known.get(name) {
            assert_eq!((earlier.unit, general(earlier)), (column.unit, general(&column)), "{earlier:?}, {column:?}");
        }
        known.insert(name, column);
    }
}

/// Names whose unit is not at their end.
fn is_named_otherwise(name: &str, unit: &str) -> bool {
    match unit {
        "ns" => name == "ns_per_operation",
        "ratio" => name.starts_with("step_ratio_"),
        _ => false,
    }
}

/// Checks every column that can be a number with many digits.
fn check_digits<T: Serialize + DeserializeOwned + Default>() {
    const MANY: &str = "1.2345678901e-1";
    let cells = |row: &T| {
        let text = to_csv(std::slice::from_ref(row)).unwrap();
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        (reader.headers().unwrap().clone(), reader.records().next().unwrap().unwrap())
    };
    let (header, defaults) = cells(&T::default());
    let mut numbers = 0;
    for place in 0..header.len() {
        let changed = defaults.iter().enumerate().map(|(cell, value)| if cell == place { MANY } else { value });
        let changed: csv::StringRecord = changed.collect();
        let Ok(row) = changed.deserialize::<T>(Some(&header)) else { continue };
        let written = &cells(&row).1[place];
        assert!(written == MANY || written == "0.123457", "{}: {written}", &header[place]);
        numbers += usize::from(written != MANY);
    }
    assert!(numbers > 0, "there is nothing to check");
}

#[test]
fn shares_and_ratios_have_six_digits() {
    check_digits::<CaseRecord>();
    check_digits::<TimingRecord>();
    check_digits::<ThresholdRecord>();
    check_digits::<TechniqueRecord>();
    check_digits::<AgreementRecord>();
    check_digits::<AdversaryRow>();
    let numbers = [1.0 / 3.0, -2.0e9 / 3.0, 1.0e-300 / 3.0, 0.0, 1.0].map(crate::measure::digits::six_digits);
    assert_eq!(numbers, [0.333333, -666_667_000.0, 3.33333e-301, 0.0, 1.0]);
}
