//! Published claims and their verdicts: the table, one claim in full, and `claims.md`.

use std::fmt::Write as _;

use super::{
    Medium, Render, ReportError,
    folder::FolderRecord,
    render::{TextTable, counted},
    rows,
};
use crate::answer::claims::{ClaimRecord, ClaimVerdict};

const HEADINGS: [&str; 5] = ["id", "claim", "published", "verdict", "what really happens"];
const PAGE_HEADINGS: [&str; 8] = [
    "claim",
    "published",
    "source",
    "measured, simulated",
    "measured, GPU",
    "PyTorch 2.11 on an H200",
    "verdict (who decided how many checks)",
    "workload",
];
const LEGEND: &str = "A claim consists of statements that can be checked. It is confirmed if all of them hold, refuted if \
                      none holds, and depends otherwise.";

/// Claims as text: in a table or in full.
pub struct ClaimReport<'a> {
    /// The claims.
    pub records: &'a [ClaimRecord],
    /// Whether a terminal gets everything about each claim instead of a table.
    pub in_full: bool,
}

impl Render for ClaimReport<'_> {
    type Row = ClaimRecord;

    fn rows(&self) -> &[ClaimRecord] {
        self.records
    }

    /// The columns of `claims.csv`.
    fn csv(&self) -> Result<String, ReportError> {
        rows::to_csv(self.records)
    }

    fn text(&self, medium: Medium) -> String {
        match medium {
            Medium::Markdown => ClaimRecord::page(self.records),
            Medium::Terminal(_) if self.in_full => {
                let blocks: Vec<String> = self.records.iter().map(block).collect();
                format!("{}\n{LEGEND}\n", blocks.join("\n"))
            }
            Medium::Terminal(_) => {
                let mut table = TextTable::new(&HEADINGS, medium).with_numbers(HEADINGS.len()..);
                for record in self.records {
                    table.row([&record.id, &record.claim, &record.published, record.verdict.name(), &record.lesson]);
                }
                // What is published is in the words of the claim.
                table.fit(&[2]);
                table.finish(&format!("{}\n{LEGEND}", tally(self.records)), [])
            }
        }
    }
}

impl FolderRecord for ClaimRecord {
    const NAME: &'static str = "claims";

    fn id(&self) -> String {
        self.id.clone()
    }

    /// One table per group, with what really happens below it.
    fn page(records: &[ClaimRecord]) -> String {
        let mut page = format!("# What is published about GPU memory, measured\n\n{} {LEGEND}\n", tally(records));
        for of_group in records.chunk_by(|a, b| a.group == b.group) {
            let mut table = TextTable::new(&PAGE_HEADINGS, Medium::Markdown);
            for record in of_group {
                table.row([
                    format!("**{}**: {}", record.id, record.claim),
                    record.published.clone(),
                    record.stated_by.clone(),
                    record.simulated.clone(),
                    record.on_device.clone(),
                    record.pytorch.clone(),
                    verdict(record),
                    if record.command.is_empty() { String::new() } else { format!("`{}`", record.command) },
                ]);
            }
            let _ = write!(page, "\n## {}\n\n{}\n", of_group[0].group.title(), table.finish("", []));
            for record in of_group {
                let _ = writeln!(page, "- **{}**: {}{}", record.id, record.lesson, checks(record));
            }
        }
        page
    }
}

fn tally(records: &[ClaimRecord]) -> String {
    let count = |verdict| records.iter().filter(|record| record.verdict == verdict).count();
    let verdicts = [ClaimVerdict::Confirmed, ClaimVerdict::Depends, ClaimVerdict::Refuted, ClaimVerdict::NotMeasurable]
        .map(|verdict| format!("{} {}", count(verdict), verdict.name()));
    format!("{}: {}.", counted(records.len(), "claim", "claims"), verdicts.join(", "))
}

/// The verdict, and which measurements decided it.
fn verdict(record: &ClaimRecord) -> String {
    match record.decided_by.as_str() {
        "" => record.verdict.name().to_owned(),
        decided_by => format!("{} ({decided_by})", record.verdict.name()),
    }
}

fn block(record: &ClaimRecord) -> String {
    let mut text = format!("{}: {}\n  verdict:    {}\n", record.id, record.claim, verdict(record));
    for (name, value) in [
        ("published", &record.published),
        ("source", &record.stated_by),
        ("simulated", &record.simulated),
        ("on the GPU", &record.on_device),
        ("PyTorch", &record.pytorch),
        ("holds", &record.holds),
        ("does not", &record.fails),
        ("differs", &record.differs_from_pytorch),
        ("happens", &record.lesson),
        ("see", &record.command),
    ] {
        if !value.is_empty() {
            let _ = writeln!(text, "  {:<11} {value}", format!("{name}:"));
        }
    }
    text
}

fn checks(record: &ClaimRecord) -> String {
    let part = |name: &str, text: &str| if text.is_empty() { String::new() } else { format!(" {name}: {text}.") };
    part("Holds", &record.holds)
        + &part("Does not hold", &record.fails)
        + &part("Differs from PyTorch, which decides", &record.differs_from_pytorch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, verdict: ClaimVerdict) -> ClaimRecord {
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
    fn table_counts_verdicts() {
        let records = [
            record("a", ClaimVerdict::Refuted),
            record("b", ClaimVerdict::Refuted),
            record("c", ClaimVerdict::Confirmed),
        ];
        let text = ClaimReport { records: &records, in_full: false }.text(Medium::PIPE);
        assert!(text.contains("3 claims: 1 confirmed, 0 depends, 2 refuted, 0 not measurable here."), "{text}");
    }

    #[test]
    fn full_claim_leaves_out_empty_fields() {
        let records = [record("a", ClaimVerdict::Refuted)];
        let text = ClaimReport { records: &records, in_full: true }.text(Medium::PIPE);
        for words in ["a: It | leaks", "verdict:    refuted", "PyTorch:    growth: 4 MiB", "does not:   it grows"] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        assert!(!text.contains("on the GPU") && !text.contains("holds:"), "{text}");
    }

    #[test]
    fn pipe_in_a_claim_keeps_page_columns() {
        let page = ClaimRecord::page(&[record("a", ClaimVerdict::Refuted)]);
        let row = page.lines().find(|line| line.starts_with("| **a**")).unwrap();
        assert_eq!(row.replace("\\|", "").matches('|').count(), PAGE_HEADINGS.len() + 1, "{row}");
        assert!(page.contains("- **a**: It does not. Does not hold: it grows."), "{page}");
    }
}
