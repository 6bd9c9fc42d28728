//! What became of published claims: the table, a block for each, and the same rows as CSV and JSON.

use std::fmt::Write as _;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{
    answer::claims::{ClaimRecord, Verdict},
    measure::SCHEMA,
};

const HEADINGS: [&str; 5] = ["id", "claim", "published", "verdict", "what really happens"];
const PAGE_HEADINGS: [&str; 7] =
    ["claim", "published", "measured, simulated", "measured, GPU", "PyTorch 2.11 on an H200", "verdict", "workload"];
const LEGEND: &str = "A claim is cut into things that can be checked: if all hold it is confirmed, if none does it is \
                      refuted, otherwise it depends.";

/// Every claim in a line or two.
#[must_use]
pub fn claims(records: &[ClaimRecord], medium: Medium) -> String {
    let mut table = table(&HEADINGS, medium);
    for record in records {
        let verdict = record.verdict.name();
        table.add_row([&record.id, &record.claim, &record.published, verdict, &record.lesson]);
    }
    with_notes(&table, &format!("{}\n{LEGEND}", tally(records)), std::iter::empty(), medium)
}

/// Everything about some claims, for people: a block each.
#[must_use]
pub fn claims_in_full(records: &[ClaimRecord]) -> String {
    let blocks: Vec<String> = records.iter().map(block).collect();
    format!("{}\n{LEGEND}\n", blocks.join("\n"))
}

/// A page of markdown: a table a group, and what really happens below it.
#[must_use]
pub fn claims_page(records: &[ClaimRecord]) -> String {
    let mut page = format!("# What is published about GPU memory, measured\n\n{} {LEGEND}\n", tally(records));
    for of_group in records.chunk_by(|a, b| a.group == b.group) {
        let mut table = table(&PAGE_HEADINGS, Medium::Markdown);
        for record in of_group {
            let workload =
                if record.command.is_empty() { String::new() } else { format!("`{}`", cell(&record.command)) };
            table.add_row([
                format!("**{}**: {}", record.id, cell(&record.claim)),
                cell(&record.published),
                cell(&record.simulated),
                cell(&record.on_device),
                cell(&record.pytorch),
                record.verdict.name().to_owned(),
                workload,
            ]);
        }
        let _ = write!(page, "\n## {}\n\n{}\n\n", of_group[0].group.title(), table.trim_fmt());
        for record in of_group {
            let _ = writeln!(page, "- **{}**: {}{}", record.id, record.lesson, checked(record));
        }
    }
    page
}

/// All columns, as in `claims.csv`.
pub fn claims_csv(records: &[ClaimRecord]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(records)?).into_owned())
}

/// `{"schema": 1, "rows": [...]}` with all columns.
#[must_use]
pub fn claims_json(records: &[ClaimRecord]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": records }))
}

/// How many of which verdict.
fn tally(records: &[ClaimRecord]) -> String {
    let count = |verdict| records.iter().filter(|record| record.verdict == verdict).count();
    let counted = [Verdict::Confirmed, Verdict::Depends, Verdict::Refuted, Verdict::NotMeasurable]
        .map(|verdict| format!("{} {}", count(verdict), verdict.name()));
    format!("{} claims: {}.", records.len(), counted.join(", "))
}

fn block(record: &ClaimRecord) -> String {
    let mut text = format!("{}: {}\n  verdict:    {}\n", record.id, record.claim, record.verdict.name());
    for (name, value) in [
        ("published", &record.published),
        ("simulated", &record.simulated),
        ("on the GPU", &record.on_device),
        ("PyTorch", &record.pytorch),
        ("holds", &record.holds),
        ("does not", &record.fails),
        ("happens", &record.lesson),
        ("see", &record.command),
    ] {
        if !value.is_empty() {
            let _ = writeln!(text, "  {:<11} {value}", format!("{name}:"));
        }
    }
    text
}

fn checked(record: &ClaimRecord) -> String {
    let part = |name: &str, text: &str| if text.is_empty() { String::new() } else { format!(" {name}: {text}.") };
    part("Holds", &record.holds) + &part("Does not hold", &record.fails)
}

/// Text that does not end a cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, verdict: Verdict) -> ClaimRecord {
        ClaimRecord {
            id: id.to_owned(),
            claim: "It | leaks".to_owned(),
            simulated: "growth: 3 MiB".to_owned(),
            pytorch: "growth: 4 MiB".to_owned(),
            verdict,
            fails: "it grows".to_owned(),
            lesson: "It does not.".to_owned(),
            command: "oomph leaks x".to_owned(),
            ..ClaimRecord::default()
        }
    }

    #[test]
    fn the_table_counts_verdicts() {
        let records = [record("a", Verdict::Refuted), record("b", Verdict::Refuted), record("c", Verdict::Confirmed)];
        let text = claims(&records, Medium::Terminal(None));
        assert!(text.contains("3 claims: 1 confirmed, 0 depends, 2 refuted, 0 not measurable here."), "{text}");
    }

    #[test]
    fn a_block_leaves_out_what_there_is_none_of() {
        let text = claims_in_full(&[record("a", Verdict::Refuted)]);
        for words in ["a: It | leaks", "verdict:    refuted", "PyTorch:    growth: 4 MiB", "does not:   it grows"] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        assert!(!text.contains("on the GPU") && !text.contains("holds:"), "{text}");
    }

    #[test]
    fn the_page_keeps_its_columns_whatever_a_claim_says() {
        let page = claims_page(&[record("a", Verdict::Refuted)]);
        let row = page.lines().find(|line| line.starts_with("| **a**")).unwrap();
        assert_eq!(row.replace("\\|", "").matches('|').count(), PAGE_HEADINGS.len() + 1, "{row}");
        assert!(page.contains("- **a**: It does not. Does not hold: it grows."), "{page}");
    }
}
