//! Thresholds and largest values that fit: tables, and the files of a run's folder.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Medium, Render, ReportError, RunFolder, checksum,
    plot::bars,
    render::{Places, TextTable, in_mebibytes, maybe_bytes, said},
    rows::{self, RowOrigin},
};
use crate::{
    answer::threshold::{LargestRecord, ThresholdDetail, ThresholdRecord, ThresholdStatus},
    base::Bytes,
    measure::SCHEMA,
    replay::LimitEnforcer,
};

const HEADINGS: [&str; 8] = [
    "source",
    "strategy",
    "memory\nneeded",
    "smallest\ndevice",
    "peak of\nlive bytes",
    "lost",
    "without\na limit",
    "stable",
];

impl Render for [ThresholdDetail] {
    type Row = ThresholdDetail;

    /// With every limit that was tried and the failure right below the threshold.
    fn rows(&self) -> &[ThresholdDetail] {
        self
    }

    /// The columns of `thresholds.csv`.
    fn csv(&self) -> Result<String, ReportError> {
        let records: Vec<ThresholdRecord> = self.iter().map(|detail| detail.record.clone()).collect();
        rows::to_csv(&records)
    }

    fn text(&self, medium: Medium) -> String {
        let mut table = TextTable::new(&HEADINGS, medium).with_groups();
        let mut group = "";
        for ThresholdDetail { record, .. } in self {
            table.row([
                if record.workload == group { String::new() } else { record.workload.clone() },
                record.strategy.clone(),
                needed(record),
                in_mebibytes(record.needed_card_bytes),
                maybe_bytes(record.live_peak_bytes),
                record.lost_share.map_or_else(String::new, |share| format!("{:.1} %", share * 100.0)),
                maybe_bytes(record.uncapped_held_bytes),
                yes_or_no(record.stable),
            ]);
            group = &record.workload;
        }
        table.fit(&[6, 4, 3]);
        let columns = said(&[
            (true, "Memory needed: what the strategy itself reserves, in whole pages."),
            (table.shows(3), "Smallest device: with context and libraries."),
        ]);
        let caps = cap_legend(self.iter().map(|detail| (detail.record.limit_enforcer, detail.record.repeat)));
        let legend = format!("{columns}\n{caps}");
        table.finish(&legend, self.iter().flat_map(notes)) + &picture(self, medium)
    }
}

pub(super) fn needed(record: &ThresholdRecord) -> String {
    match record.status {
        ThresholdStatus::Found => in_mebibytes(record.needed_bytes),
        other => status_words(other),
    }
}

/// The outcome of a search in words.
pub(super) fn status_words(status: ThresholdStatus) -> String {
    status.name().replace('_', " ")
}

/// The memory needed as bars.
fn picture(details: &[ThresholdDetail], medium: Medium) -> String {
    let record = |detail: &ThresholdDetail| {
        let ThresholdRecord { strategy, needed_bytes, live_peak_bytes, .. } = &detail.record;
        Some((strategy.clone(), (*needed_bytes)?, *live_peak_bytes))
    };
    let found: Vec<(String, u64, Option<u64>)> = details.iter().filter_map(record).collect();
    match medium {
        Medium::Terminal(terminal) if !found.is_empty() => {
            format!("\nmemory needed (solid = live bytes)\n{}", bars(&found, terminal))
        }
        _ => String::new(),
    }
}

const LARGEST_HEADINGS: [&str; 7] =
    ["source", "strategy", "memory", "left for\nthe strategy", "largest", "peak\nreserved", "stable"];

impl Render for [LargestRecord] {
    type Row = LargestRecord;

    fn rows(&self) -> &[LargestRecord] {
        self
    }

    fn csv(&self) -> Result<String, ReportError> {
        rows::to_csv(self)
    }

    /// With every value that was tried, which the record itself does not serialize.
    fn json(&self) -> Value {
        let row = |record: &LargestRecord| {
            let mut row = json!(record);
            let tried = record.tried.iter().map(|(value, fits)| json!({ "value": value, "fits": fits }));
            row["tried"] = tried.collect();
            row
        };
        json!({ "schema": SCHEMA, "rows": self.iter().map(row).collect::<Vec<Value>>() })
    }

    fn text(&self, medium: Medium) -> String {
        let mut table = TextTable::new(&LARGEST_HEADINGS, medium).with_groups();
        let mut group = ("", "");
        for record in self {
            let key = (record.workload.as_str(), record.strategy.as_str());
            let largest = match (record.largest, record.status) {
                (Some(value), _) => format!("{} = {value}", record.parameter),
                (None, ThresholdStatus::NeverFits) => "never fits".to_owned(),
                (None, _) => "-".to_owned(),
            };
            table.row([
                if key.0 == group.0 { String::new() } else { key.0.to_owned() },
                if key == group { String::new() } else { key.1.to_owned() },
                Bytes(record.card_bytes).to_string(),
                Bytes(record.limit_bytes).to_string(),
                largest,
                maybe_bytes(record.peak_reserved_bytes),
                yes_or_no(record.stable),
            ]);
            group = key;
        }
        table.fit(&[5, 3]);
        let legend = format!(
            "Memory: that of the whole card, including context and libraries.\n{}",
            cap_legend(self.iter().map(|record| (record.limit_enforcer, record.repeat)))
        );
        table.finish(&legend, self.iter().filter_map(largest_note))
    }
}

/// What enforces the limit, and how often every trace ran.
pub(super) fn cap_legend(mut settings: impl Iterator<Item = (LimitEnforcer, u32)>) -> String {
    let Some((cap, repeat)) = settings.next() else { return String::new() };
    let capped = match cap {
        LimitEnforcer::Allocator => {
            "The limit is enforced by the allocator (PyTorch's memory fraction), or by the device if it has no limit"
        }
        LimitEnforcer::Device => "The limit is enforced by the device: the driver refuses",
    };
    match repeat {
        1 => format!("{capped}; 1 round."),
        repeat => format!("{capped}; {repeat} rounds back to back."),
    }
}

fn yes_or_no(stable: Option<bool>) -> String {
    stable.map_or("", |stable| if stable { "yes" } else { "NO" }).to_owned()
}

pub(super) fn notes(detail: &ThresholdDetail) -> Vec<String> {
    let record = &detail.record;
    let mut notes = Vec::new();
    if record.stable == Some(false)
        && let (Some(fit), Some(failure)) = (record.lowest_fit_bytes, record.first_failure_above_bytes)
    {
        notes.push(format!(
            "not monotone: it fits in {} but fails in {}; from the threshold on, everything tried fits",
            in_mebibytes(Some(fit)),
            in_mebibytes(Some(failure)),
        ));
    }
    if let Some(failure) = &detail.failure {
        let place = match (record.status, record.oom_round) {
            (ThresholdStatus::Found, Some(round)) if record.repeat > 1 => {
                format!("one page less fails in round {round},")
            }
            (ThresholdStatus::Found, _) => "one page less fails at".to_owned(),
            _ => "fails at".to_owned(),
        };
        let right_below = detail.tried.iter().rev().find(|probe| Some(probe.limit_bytes) < record.needed_bytes);
        let event = right_below.and_then(|probe| probe.failed_event).unwrap_or(failure.event);
        notes.push(format!("{place} event {event}: {}", failure.in_words()));
    }
    match (&record.real_device, record.confirmed) {
        (Some(device), Some(true)) => {
            notes.push(format!("confirmed on {device}: completes with one page more, runs out with one page less"));
        }
        (Some(_), Some(false)) => notes.push(format!("NOT confirmed: {}", record.reason)),
        _ if !record.reason.is_empty() => notes.push(record.reason.clone()),
        _ => {}
    }
    notes.into_iter().map(|note| format!("{}/{}: {note}", record.workload, record.strategy)).collect()
}

fn largest_note(record: &LargestRecord) -> Option<String> {
    let memory = match record.limit_enforcer {
        LimitEnforcer::Allocator => format!("under a limit of {}", Bytes(record.limit_bytes)),
        LimitEnforcer::Device => format!("on a card of {}", Bytes(record.card_bytes)),
    };
    let about = format!("{}/{} {memory}", record.workload, record.strategy);
    match (record.stable, record.highest_fit, record.first_failure_below) {
        (Some(false), Some(fit), Some(failure)) => {
            Some(format!("{about}: not monotone: {fit} fits but {failure} does not"))
        }
        _ if !record.reason.is_empty() => Some(format!("{about}: {}", record.reason)),
        _ => None,
    }
}

/// `thresholds.csv` and `thresholds.json` of a run's folder. Both are written anew after every case:
/// there are few rows, and each takes a search.
#[derive(Debug)]
pub struct ThresholdFiles {
    folder: PathBuf,
    details: Vec<ThresholdDetail>,
    /// The origin of the rows that are added; empty where none are.
    origin: RowOrigin,
}

/// `thresholds.json`.
#[derive(Deserialize)]
struct ThresholdDocument {
    rows: Vec<ThresholdDetail>,
}

impl ThresholdFiles {
    /// The files of a folder, without cases that were interrupted or failed: they are searched
    /// again.
    pub fn open(folder: &Path) -> Result<ThresholdFiles, ReportError> {
        let mut details = ThresholdFiles::read(folder)?;
        let is_open = |status| matches!(status, ThresholdStatus::Interrupted | ThresholdStatus::Error);
        details.retain(|detail| !is_open(detail.record.status));
        Ok(ThresholdFiles::with(folder, details))
    }

    /// The same for a run that continues or begins: rows that are added get its origin.
    pub fn of_run(folder: &RunFolder) -> Result<ThresholdFiles, ReportError> {
        Ok(ThresholdFiles { origin: folder.origin().clone(), ..ThresholdFiles::open(folder.path())? })
    }

    /// The files of a folder, with these answers.
    pub(super) fn with(folder: &Path, details: Vec<ThresholdDetail>) -> ThresholdFiles {
        ThresholdFiles { folder: folder.to_owned(), details, origin: RowOrigin::default() }
    }

    /// What a folder holds, finished or not.
    pub(super) fn read(folder: &Path) -> Result<Vec<ThresholdDetail>, ReportError> {
        let path = folder.join("thresholds.json");
        if !path.is_file() {
            return Ok(Vec::new());
        }
        let (document, _): (ThresholdDocument, bool) = checksum::read_document(&path)?;
        Ok(document.rows)
    }

    /// The ids of the cases that have an answer.
    pub fn completed_cases(&self) -> BTreeSet<String> {
        self.details.iter().map(|detail| detail.record.case_id.clone()).collect()
    }

    /// Adds an answer.
    pub fn append(&mut self, mut detail: ThresholdDetail) -> Result<(), ReportError> {
        detail.record = self.origin.stamped(detail.record);
        self.details.push(detail);
        self.write()
    }

    /// Sorts the rows by `case_ids`, adds their table to `summary.md` and returns them.
    pub fn finish(mut self, case_ids: &[String]) -> Result<Vec<ThresholdDetail>, ReportError> {
        let places = Places::of(case_ids.iter().map(String::as_str));
        self.details.sort_by_key(|detail| places.get(&detail.record.case_id));
        self.write()?;
        let path = self.folder.join("summary.md");
        let page = fs::read_to_string(&path).map_err(ReportError::io(&path))?;
        rows::save(&path, format!("{page}\n## Thresholds\n\n{}", self.details.text(Medium::Markdown)))?;
        Ok(self.details)
    }

    fn write(&self) -> Result<(), ReportError> {
        let path = self.folder.join("thresholds.json");
        rows::save(&path, checksum::sealed(&path, &self.details.json())?)?;
        let records: Vec<ThresholdRecord> = self.details.iter().map(|detail| detail.record.clone()).collect();
        rows::save(&self.folder.join("thresholds.csv"), rows::to_checked_csv(&records)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::MIB;

    fn found(strategy: &str, bytes: u64) -> ThresholdDetail {
        let record = ThresholdRecord {
            schema: SCHEMA,
            workload: "saw-tooth".to_owned(),
            strategy: strategy.to_owned(),
            status: ThresholdStatus::Found,
            repeat: 3,
            needed_bytes: Some(bytes),
            overhead_bytes: Some(600 * MIB),
            needed_card_bytes: Some(bytes + 600 * MIB),
            live_peak_bytes: Some(1000 * MIB),
            uncapped_held_bytes: Some(2 * bytes),
            lost_share: Some(0.25),
            stable: Some(true),
            ..ThresholdRecord::default()
        };
        ThresholdDetail { record, ..ThresholdDetail::default() }
    }

    #[test]
    fn table_shows_both_memories_and_contradictions() {
        let mut unstable = found("caching", 1334 * MIB);
        unstable.record.stable = Some(false);
        unstable.record.lowest_fit_bytes = Some(1100 * MIB);
        unstable.record.first_failure_above_bytes = Some(1332 * MIB);
        let mut missed = found("direct", 1002 * MIB);
        (missed.record.real_device, missed.record.confirmed) = (Some("cuda".to_owned()), Some(false));
        missed.record.reason = "cuda: completed with 1000 MiB, oom expected".to_owned();
        insta::assert_snapshot!([unstable, missed].text(Medium::PIPE), @"
        ────────────────────────────────────────────────────────────────────────────────────────
         source      strategy      memory    smallest      peak of     lost    without   stable
                                   needed      device   live bytes             a limit
        ════════════════════════════════════════════════════════════════════════════════════════
         saw-tooth   caching    1,334 MiB   1,934 MiB     1000 MiB   25.0 %   2.61 GiB       NO
                     direct     1,002 MiB   1,602 MiB     1000 MiB   25.0 %   1.96 GiB      yes
        ────────────────────────────────────────────────────────────────────────────────────────
        Memory needed: what the strategy itself reserves, in whole pages. Smallest device: with context and libraries.
        The limit is enforced by the allocator (PyTorch's memory fraction), or by the device if it has no limit; 3 rounds back to back.

        saw-tooth/caching: not monotone: it fits in 1,100 MiB but fails in 1,332 MiB; from the threshold on, everything tried fits
        saw-tooth/direct: NOT confirmed: cuda: completed with 1000 MiB, oom expected

        memory needed (solid = live bytes)
        caching  ############################################################....................   1.30 GiB
        direct   ############################################################                       1002 MiB
        ");
    }

    #[test]
    fn json_has_every_value_tried() {
        let csv = [found("caching", 4 * MIB)].csv().unwrap();
        assert!(csv.lines().next().unwrap().contains(",needed_bytes,overhead_bytes,needed_card_bytes,"), "{csv}");
        let value = [found("caching", 4 * MIB)].json();
        assert_eq!(value["rows"][0]["needed_bytes"], 4 * MIB);
        assert!(value["rows"][0]["tried"].is_array());
        let record = LargestRecord { tried: vec![(1, true), (2, false)], ..LargestRecord::default() };
        let value = [record].json();
        assert_eq!(value["rows"][0]["tried"][1], json!({ "value": 2, "fits": false }));
    }

    fn detail(case_id: &str, status: ThresholdStatus) -> ThresholdDetail {
        let record = ThresholdRecord { case_id: case_id.to_owned(), status, ..ThresholdRecord::default() };
        ThresholdDetail { record, ..ThresholdDetail::default() }
    }

    #[test]
    fn failed_cases_are_searched_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = ThresholdFiles::open(folder.path()).unwrap();
        for (id, status) in
            [("b", ThresholdStatus::Found), ("c", ThresholdStatus::Error), ("d", ThresholdStatus::Interrupted)]
        {
            files.append(detail(id, status)).unwrap();
        }
        let mut again = ThresholdFiles::open(folder.path()).unwrap();
        assert_eq!(again.completed_cases().into_iter().collect::<Vec<_>>(), ["b"]);
        again.append(detail("a", ThresholdStatus::NeverFits)).unwrap();
        fs::write(folder.path().join("summary.md"), "# Run\n").unwrap();
        let details = again.finish(&["a".to_owned(), "b".to_owned()]).unwrap();
        let ids: Vec<&str> = details.iter().map(|detail| detail.record.case_id.as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
        let csv = fs::read_to_string(folder.path().join("thresholds.csv")).unwrap();
        assert_eq!(csv.lines().count(), 3);
        assert!(fs::read_to_string(folder.path().join("summary.md")).unwrap().contains("## Thresholds\n\n| source"));
    }
}
