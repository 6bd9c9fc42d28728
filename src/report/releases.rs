//! One program under several releases of PyTorch, side by side.

use super::render::{Medium, RenderRow, TextTable, maybe_bytes};
use crate::answer::releases::ReleaseRow;

const HEADINGS: [&str; 9] = [
    "source",
    "strategy",
    "release",
    "peak\nallocated",
    "peak\nreserved",
    "OOMs",
    "retries",
    "requests",
    "at another\naddress",
];

const LEGEND: &str = "At another address: requests whose block is not where it is under the first release, or which only one of the \
                      two serves. A CUDA graph is recorded again where its addresses change.";

impl RenderRow for ReleaseRow {
    fn text(rows: &[ReleaseRow], medium: Medium) -> String {
        let mut table = TextTable::new(&HEADINGS, medium).with_groups();
        let mut group = ("", "");
        for row in rows {
            let key = (row.workload.as_str(), row.strategy.as_str());
            let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
            let is_first = key != group;
            table.row([
                if key.0 == group.0 { String::new() } else { key.0.to_owned() },
                if is_first { key.1.to_owned() } else { String::new() },
                row.release.map_or_else(String::new, |release| release.to_string()),
                maybe_bytes(row.peak_allocated_bytes),
                maybe_bytes(row.peak_reserved_bytes),
                count(row.ooms),
                count(row.retries),
                count(row.requests),
                if is_first { String::new() } else { moved(row) },
            ]);
            group = key;
        }
        table.fit(&[7, 6, 3]);
        let notes = rows.iter().filter(|row| !row.reason.is_empty());
        table.finish(LEGEND, notes.map(|row| format!("{}/{}: {}", row.workload, row.strategy, row.reason)))
    }
}

/// Number and share of the requests at another address.
fn moved(row: &ReleaseRow) -> String {
    match (row.moved_requests, row.requests) {
        (Some(moved), Some(requests)) if requests > 0 => {
            format!("{moved} ({:.1} %)", 100.0 * moved as f64 / requests as f64)
        }
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{measure::Status, pytorch::Release};

    #[test]
    fn first_release_has_nothing_to_be_compared_with() {
        let row = |minor, moved| ReleaseRow {
            workload: "w".to_owned(),
            strategy: "caching".to_owned(),
            release: Some(Release::new(minor)),
            status: Status::Completed,
            requests: Some(400),
            moved_requests: Some(moved),
            ..ReleaseRow::default()
        };
        let text = ReleaseRow::text(&[row(11, 0), row(15, 5)], Medium::PIPE);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("400")).collect();
        assert!(lines[0].contains("caching") && lines[0].contains("2.11") && !lines[0].contains('%'), "{text}");
        assert!(!lines[1].contains("caching") && lines[1].contains("2.15") && lines[1].contains("5 (1.2 %)"), "{text}");
    }
}
