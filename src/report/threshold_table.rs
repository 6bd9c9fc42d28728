//! The tables of thresholds and of largest values that fit; and the same rows as CSV and JSON.

use comfy_table::{Cell, ContentArrangement, Table, presets};
use serde_json::{Value, json};

use super::{
    ReportError, rows,
    table::{dress_for_terminal, headed},
};
use crate::{
    answer::threshold::{Cap, LargestRecord, ThresholdDetail, ThresholdRecord, ThresholdStatus},
    base::Bytes,
    measure::SCHEMA,
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
const LARGEST_HEADINGS: [&str; 7] =
    ["source", "strategy", "memory", "left for\nthe strategy", "largest", "peak\nreserved", "stable"];

/// For which medium a table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A terminal of so many columns, or a pipe.
    Terminal(Option<u16>),
    /// A document.
    Markdown,
}

/// The table of thresholds, with what is to be said about single rows below it.
#[must_use]
pub fn thresholds(details: &[ThresholdDetail], medium: Medium) -> String {
    let mut table = table(&HEADINGS, medium);
    let mut group = String::new();
    for detail in details {
        let record = &detail.record;
        let heading = if record.workload == group { String::new() } else { record.workload.clone() };
        group.clone_from(&record.workload);
        table.add_row(row(heading, record));
    }
    let records = details.iter().map(|detail| &detail.record);
    let legend = format!(
        "Memory needed: the strategy's own, in whole pages. Smallest device: with the context and libraries.\n{}",
        legend(records.map(|record| (record.cap, record.repeat)))
    );
    with_notes(&table, &legend, details.iter().flat_map(notes), medium)
}

/// The table of largest values, with what is to be said about single rows below it.
#[must_use]
pub fn largest(records: &[LargestRecord], medium: Medium) -> String {
    let mut table = table(&LARGEST_HEADINGS, medium);
    let mut group = (String::new(), String::new());
    for record in records {
        let key = (record.workload.clone(), record.strategy.clone());
        let workload = if key.0 == group.0 { String::new() } else { key.0.clone() };
        let strategy = if key == group { String::new() } else { key.1.clone() };
        group = key;
        table.add_row(largest_row(workload, strategy, record));
    }
    let legend = format!(
        "Memory is a whole device's: the context and libraries take their part of it.\n{}",
        legend(records.iter().map(|record| (record.cap, record.repeat)))
    );
    with_notes(&table, &legend, records.iter().filter_map(largest_note), medium)
}

/// All columns, as in `thresholds.csv`.
pub fn thresholds_csv(details: &[ThresholdDetail]) -> Result<String, ReportError> {
    let records: Vec<ThresholdRecord> = details.iter().map(|detail| detail.record.clone()).collect();
    Ok(String::from_utf8_lossy(&rows::to_csv(&records)?).into_owned())
}

/// `{"schema": 1, "rows": [...]}` with all columns, every cap that was tried, and the failure right below.
#[must_use]
pub fn thresholds_json(details: &[ThresholdDetail]) -> String {
    format!("{:#}\n", json!({ "schema": SCHEMA, "rows": details }))
}

/// All columns.
pub fn largest_csv(records: &[LargestRecord]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(records)?).into_owned())
}

/// `{"schema": 1, "rows": [...]}` with all columns and every value that was tried.
#[must_use]
pub fn largest_json(records: &[LargestRecord]) -> String {
    let rows: Vec<Value> = records
        .iter()
        .map(|record| {
            let mut row = json!(record);
            let tried = record.tried.iter().map(|(value, fits)| json!({ "value": value, "fits": fits }));
            row["tried"] = tried.collect();
            row
        })
        .collect();
    format!("{:#}\n", json!({ "schema": SCHEMA, "rows": rows }))
}

pub(super) fn table(headings: &[&str], medium: Medium) -> Table {
    match medium {
        Medium::Terminal(width) => {
            let mut table = headed(headings);
            dress_for_terminal(&mut table, width);
            table
        }
        Medium::Markdown => {
            let mut table = headed(&headings.iter().map(|heading| heading.replace('\n', " ")).collect::<Vec<_>>());
            table.load_style(presets::ASCII_MARKDOWN);
            table.set_content_arrangement(ContentArrangement::Disabled);
            table
        }
    }
}

pub(super) fn with_notes(table: &Table, legend: &str, notes: impl Iterator<Item = String>, medium: Medium) -> String {
    let notes: Vec<String> = notes.collect();
    let (gap, bullet) = if medium == Medium::Markdown { ("\n", "- ") } else { ("", "") };
    let mut text = format!("{}\n{gap}{legend}\n", table.trim_fmt());
    if !notes.is_empty() {
        text.push_str(&format!(
            "\n{}\n",
            notes.iter().map(|note| format!("{bullet}{note}")).collect::<Vec<_>>().join("\n")
        ));
    }
    text
}

/// Who caps, and how often everything ran, where all rows agree about it.
fn legend(mut settings: impl Iterator<Item = (Cap, u32)>) -> String {
    let Some((cap, repeat)) = settings.next() else { return String::new() };
    let capped = match cap {
        Cap::Allocator => {
            "The cap is the allocator's own limit (PyTorch's memory fraction), or the device's where it has none"
        }
        Cap::Device => "The cap is the device's: the driver refuses",
    };
    match repeat {
        1 => format!("{capped}; one round."),
        repeat => format!("{capped}; {repeat} rounds back to back."),
    }
}

fn row(heading: String, record: &ThresholdRecord) -> Vec<Cell> {
    let amount = |bytes: Option<u64>| bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
    let needed = match record.status {
        ThresholdStatus::Found => in_mebibytes(record.threshold_bytes),
        ThresholdStatus::NeverFits => "never fits".to_owned(),
        ThresholdStatus::Skipped => "skipped".to_owned(),
        ThresholdStatus::Interrupted => "interrupted".to_owned(),
        ThresholdStatus::Error => "error".to_owned(),
    };
    [
        heading,
        record.strategy.clone(),
        needed,
        in_mebibytes(record.device_bytes),
        amount(record.live_peak_bytes),
        record.lost_share.map_or_else(String::new, |share| format!("{:.1} %", share * 100.0)),
        amount(record.uncapped_held_bytes),
        steadiness(record.stable),
    ]
    .map(Cell::new_owned)
    .into()
}

/// To the page: rounding to three digits would hide what the search found.
pub(super) fn in_mebibytes(bytes: Option<u64>) -> String {
    let Some(bytes) = bytes else { return String::new() };
    let digits = bytes.div_ceil(1 << 20).to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{grouped} MiB")
}

fn steadiness(stable: Option<bool>) -> String {
    match stable {
        Some(true) => "yes".to_owned(),
        Some(false) => "NO".to_owned(),
        None => String::new(),
    }
}

fn notes(detail: &ThresholdDetail) -> Vec<String> {
    let record = &detail.record;
    let mut notes = Vec::new();
    if record.stable == Some(false)
        && let (Some(fit), Some(failure)) = (record.lowest_fit_bytes, record.first_failure_above_bytes)
    {
        notes.push(format!(
            "not monotone: it fits in {} and fails in {}; from the threshold on everything tried fits",
            in_mebibytes(Some(fit)),
            in_mebibytes(Some(failure)),
        ));
    }
    if let Some(failure) = &detail.failure {
        let place = match (record.status, record.oom_round) {
            (ThresholdStatus::Found, Some(round)) if record.repeat > 1 => {
                format!("a page less fails in round {round},")
            }
            (ThresholdStatus::Found, _) => "a page less fails at".to_owned(),
            _ => "fails at".to_owned(),
        };
        let right_below = detail.tried.iter().rev().find(|probe| Some(probe.limit_bytes) < record.threshold_bytes);
        let event = right_below.and_then(|probe| probe.failed_event).unwrap_or(failure.event);
        notes.push(format!("{place} event {event}: {}", failure.in_words()));
    }
    match (&record.real_device, record.confirmed) {
        (Some(device), Some(true)) => {
            notes.push(format!("confirmed on {device}: completes with a page more, runs out with a page less"));
        }
        (Some(_), Some(false)) => notes.push(format!("NOT confirmed: {}", record.reason)),
        _ if !record.reason.is_empty() => notes.push(record.reason.clone()),
        _ => {}
    }
    notes.into_iter().map(|note| format!("{}/{}: {note}", record.workload, record.strategy)).collect()
}

fn largest_row(workload: String, strategy: String, record: &LargestRecord) -> Vec<Cell> {
    let largest = match (record.largest, record.status) {
        (Some(value), _) => format!("{} = {value}", record.parameter),
        (None, ThresholdStatus::NeverFits) => "never fits".to_owned(),
        (None, _) => "-".to_owned(),
    };
    [
        workload,
        strategy,
        Bytes(record.memory_bytes).to_string(),
        Bytes(record.limit_bytes).to_string(),
        largest,
        record.peak_reserved_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string()),
        steadiness(record.stable),
    ]
    .map(Cell::new_owned)
    .into()
}

fn largest_note(record: &LargestRecord) -> Option<String> {
    let about = format!("{}/{} in {}", record.workload, record.strategy, Bytes(record.memory_bytes));
    match (record.stable, record.highest_fit, record.first_failure_below) {
        (Some(false), Some(fit), Some(failure)) => {
            Some(format!("{about}: not monotone: {fit} fits and {failure} does not"))
        }
        _ if !record.reason.is_empty() => Some(format!("{about}: {}", record.reason)),
        _ => None,
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
            threshold_bytes: Some(bytes),
            overhead_bytes: Some(600 * MIB),
            device_bytes: Some(bytes + 600 * MIB),
            live_peak_bytes: Some(1000 * MIB),
            uncapped_held_bytes: Some(2 * bytes),
            lost_share: Some(0.25),
            stable: Some(true),
            ..ThresholdRecord::default()
        };
        ThresholdDetail { record, ..ThresholdDetail::default() }
    }

    #[test]
    fn the_table_says_both_memories_and_what_contradicts() {
        let mut unstable = found("caching", 1334 * MIB);
        unstable.record.stable = Some(false);
        unstable.record.lowest_fit_bytes = Some(1100 * MIB);
        unstable.record.first_failure_above_bytes = Some(1332 * MIB);
        let mut missed = found("direct", 1002 * MIB);
        (missed.record.real_device, missed.record.confirmed) = (Some("cuda".to_owned()), Some(false));
        missed.record.reason = "cuda: completed with 1000 MiB, oom foretold".to_owned();
        insta::assert_snapshot!(thresholds(&[unstable, missed], Medium::Terminal(None)), @"
        ────────────────────────────────────────────────────────────────────────────────────────
         source      strategy      memory    smallest      peak of     lost    without   stable
                                   needed      device   live bytes             a limit
        ════════════════════════════════════════════════════════════════════════════════════════
         saw-tooth   caching    1,334 MiB   1,934 MiB     1000 MiB   25.0 %   2.61 GiB       NO
                     direct     1,002 MiB   1,602 MiB     1000 MiB   25.0 %   1.96 GiB      yes
        ────────────────────────────────────────────────────────────────────────────────────────
        Memory needed: the strategy's own, in whole pages. Smallest device: with the context and libraries.
        The cap is the allocator's own limit (PyTorch's memory fraction), or the device's where it has none; 3 rounds back to back.

        saw-tooth/caching: not monotone: it fits in 1,100 MiB and fails in 1,332 MiB; from the threshold on everything tried fits
        saw-tooth/direct: NOT confirmed: cuda: completed with 1000 MiB, oom foretold
        ");
    }

    #[test]
    fn rows_keep_base_units_and_json_has_what_was_tried() {
        let csv = thresholds_csv(&[found("caching", 4 * MIB)]).unwrap();
        assert!(csv.lines().next().unwrap().contains(",threshold_bytes,overhead_bytes,device_bytes,"), "{csv}");
        let value: Value = serde_json::from_str(&thresholds_json(&[found("caching", 4 * MIB)])).unwrap();
        assert_eq!(value["rows"][0]["threshold_bytes"], 4 * MIB);
        assert!(value["rows"][0]["tried"].is_array());
        let record = LargestRecord { tried: vec![(1, true), (2, false)], ..LargestRecord::default() };
        let value: Value = serde_json::from_str(&largest_json(&[record])).unwrap();
        assert_eq!(value["rows"][0]["tried"][1], json!({ "value": 2, "fits": false }));
    }

    #[test]
    fn amounts_are_exact_to_the_mebibyte() {
        assert_eq!(in_mebibytes(Some(1_234_567 * MIB)), "1,234,567 MiB");
        assert_eq!(in_mebibytes(Some(2 * MIB)), "2 MiB");
    }
}
