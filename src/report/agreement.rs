//! The agreement between a device and the simulated one (`oomph verify --on`).

use super::{
    Medium,
    render::{RenderRow, TextTable, distinct, maybe_bytes},
};
use crate::{
    base::Bytes,
    measure::{AgreementRecord, agreement::AgreementFinding},
};

const HEADINGS: [&str; 8] = [
    "source",
    "strategy",
    "events",
    "same\ndecisions",
    "peak\nreserved",
    "simulated,\nfree-running",
    "reserved\ndiffers by",
    "used\ndiffers by",
];
const LEGEND: &str = "\
Same decisions: events at which a second run, given the logged answers of the driver, decided the same.
Free-running: simulated without those answers; addresses and kernel times may break ties differently. + = more than on \
the device.";

impl RenderRow for AgreementRecord {
    /// Grouped by source in order of appearance, with notes on single rows and a summary.
    fn text(rows: &[AgreementRecord], medium: Medium) -> String {
        let mut table = TextTable::new(&HEADINGS, medium).with_groups();
        let mut group = String::new();
        for record in rows {
            let title = title(record);
            table.row(row(if title == group { String::new() } else { title.clone() }, record));
            group = title;
        }
        table.fit(&[2, 7, 4]);
        let notes = rows.iter().filter_map(note).chain(unscripted(rows));
        format!("{}\n{}\n", table.finish(LEGEND, notes), summary(rows))
    }
}

fn title(record: &AgreementRecord) -> String {
    match record.limit_bytes {
        Some(limit) => format!("{} <= {}", record.workload, Bytes(limit)),
        None => record.workload.clone(),
    }
}

fn row(heading: String, record: &AgreementRecord) -> Vec<String> {
    let mut cells = vec![heading, record.strategy.clone()];
    let measured = [
        record.events.map_or_else(String::new, |events| events.to_string()),
        record.events_agreed_share.map_or_else(|| "-".to_owned(), share),
        maybe_bytes(record.peak_reserved_bytes),
        maybe_bytes(record.simulated_peak_reserved_bytes),
        record.peak_reserved_difference_share.map_or_else(|| "-".to_owned(), signed),
        record.peak_active_difference_share.map_or_else(|| "-".to_owned(), signed),
    ];
    match record.finding {
        AgreementFinding::Agrees | AgreementFinding::Differs | AgreementFinding::Unscripted => cells.extend(measured),
        other => cells.push(other.to_string()),
    }
    cells.resize(HEADINGS.len(), String::new());
    cells
}

/// A share of events; 100 % means all of them.
fn share(share: f64) -> String {
    let percent = share * 100.0;
    if percent < 100.0 { format!("{:.3} %", (percent * 1000.0).floor() / 1000.0) } else { "100 %".to_owned() }
}

/// A difference; `0 %` means none.
fn signed(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0 %".to_owned(),
        small if small.abs() < 0.01 => format!("{small:+.4} %"),
        other => format!("{other:+.2} %"),
    }
}

fn note(record: &AgreementRecord) -> Option<String> {
    let id = &record.case_id;
    match (record.finding, &record.first_difference) {
        (AgreementFinding::Differs, Some(difference)) => Some(format!("{id} differs at {difference}")),
        (AgreementFinding::Skipped, _) => Some(format!("{id}: skipped: {}", record.reason)),
        (AgreementFinding::Failed, _) => Some(format!("{id}: failed: {}", record.reason)),
        _ => None,
    }
}

/// Why some rows have no share of same decisions.
fn unscripted(records: &[AgreementRecord]) -> Option<String> {
    let unscripted = records.iter().filter(|record| record.finding == AgreementFinding::Unscripted);
    let strategies = distinct(unscripted.map(|record| record.strategy.as_str()));
    (!strategies.is_empty())
        .then(|| format!("{}: the driver's pool decides, so only peaks can be compared.", strategies.join(", ")))
}

fn summary(records: &[AgreementRecord]) -> String {
    let scripted: Vec<_> = records.iter().filter(|record| record.events_agreed.is_some()).collect();
    let mut parts = vec![format!("{} cases", records.len())];
    if !scripted.is_empty() {
        let events: u64 = scripted.iter().filter_map(|record| record.events).sum();
        let agreed: u64 = scripted.iter().filter_map(|record| record.events_agreed).sum();
        let part = share(agreed as f64 / events.max(1) as f64);
        parts.push(format!("{agreed} of {events} events decided the same ({part})"));
    }
    let differences: Vec<_> =
        records.iter().filter_map(|record| Some((record.peak_reserved_difference_share?, record))).collect();
    if let Some((largest, record)) = differences.iter().max_by(|(a, _), (b, _)| a.abs().total_cmp(&b.abs())) {
        let equal = differences.iter().filter(|(difference, _)| *difference == 0.0).count();
        let count = differences.len();
        let mut free = format!("free-running peak reserved the same to the byte in {equal} of {count}");
        if *largest != 0.0 {
            let sum: f64 = differences.iter().map(|(difference, _)| difference.abs()).sum();
            let average = 100.0 * sum / count as f64;
            free.push_str(&format!(", {average:.2} % off on average"));
            free.push_str(&format!(", at most {} ({})", signed(*largest), record.case_id));
        }
        parts.push(free);
    }
    for (finding, name) in [
        (AgreementFinding::Differs, "differing"),
        (AgreementFinding::Skipped, "skipped"),
        (AgreementFinding::Failed, "failed"),
    ] {
        let count = records.iter().filter(|record| record.finding == finding).count();
        parts.extend((count > 0).then(|| format!("{count} {name}")));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::{super::Render, *};
    use crate::{
        base::MIB,
        measure::{CaseLabel, SCHEMA, digits::six_digits},
    };

    fn record(
        source: &str,
        strategy: &str,
        finding: AgreementFinding,
        agreed: Option<u64>,
        simulated: u64,
    ) -> AgreementRecord {
        let label = CaseLabel {
            suite: "verify".to_owned(),
            workload: source.to_owned(),
            strategy: strategy.to_owned(),
            device: "cuda".to_owned(),
            seed: 1,
            ..CaseLabel::default()
        };
        AgreementRecord {
            events: Some(3000),
            events_agreed: agreed,
            events_agreed_share: agreed.map(|agreed| six_digits(agreed as f64 / 3000.0)),
            peak_reserved_bytes: Some(100 * MIB),
            simulated_peak_reserved_bytes: Some(simulated * MIB),
            peak_reserved_difference_share: Some((simulated as f64 - 100.0) / 100.0),
            peak_active_difference_share: Some(0.00001),
            ..AgreementRecord::unmeasured(&label, "sim", finding, "because")
        }
    }

    fn sample() -> Vec<AgreementRecord> {
        let mut differing = record("training", "caching", AgreementFinding::Differs, Some(2999), 102);
        differing.first_difference = Some("event 17, free: this; that".to_owned());
        let mut skipped = record("streams", "caching:expandable_segments:True", AgreementFinding::Skipped, None, 100);
        skipped.peak_reserved_difference_share = None;
        vec![
            record("training", "direct", AgreementFinding::Agrees, Some(3000), 100),
            differing,
            record("training", "async", AgreementFinding::Unscripted, None, 97),
            skipped,
        ]
    }

    #[test]
    fn table_shows_shares_and_differences() {
        insta::assert_snapshot!(sample().text(Medium::PIPE), @"
        ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         source     strategy                            events        same       peak     simulated,     reserved         used
                                                                 decisions   reserved   free-running   differs by   differs by
        ═══════════════════════════════════════════════════════════════════════════════════════════════════════════════════════
         training   direct                                3000       100 %    100 MiB        100 MiB          0 %    +0.0010 %
                    caching                               3000    99.966 %    100 MiB        102 MiB      +2.00 %    +0.0010 %
                    async                                 3000           -    100 MiB       97.0 MiB      -3.00 %    +0.0010 %
         streams    caching:expandable_segments:True   skipped
        ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
        Same decisions: events at which a second run, given the logged answers of the driver, decided the same.
        Free-running: simulated without those answers; addresses and kernel times may break ties differently. + = more than on the device.

        verify/training/caching@cuda#1 differs at event 17, free: this; that
        verify/streams/caching:expandable_segments:True@cuda#1: skipped: because
        async: the driver's pool decides, so only peaks can be compared.

        4 cases; 5999 of 6000 events decided the same (99.983 %); free-running peak reserved the same to the byte in 1 of 3, 1.67 % off on average, at most -3.00 % (verify/training/async@cuda#1); 1 differing; 1 skipped
        ");
    }

    #[test]
    fn single_event_is_not_rounded_away() {
        assert_eq!((share(1.0).as_str(), share(0.999_999_99).as_str()), ("100 %", "99.999 %"));
        assert_eq!((signed(0.0).as_str(), signed(-0.000_004).as_str()), ("0 %", "-0.0004 %"));
    }

    #[test]
    fn csv_and_json_have_all_columns() {
        let value = sample().json();
        assert_eq!((&value["schema"], &value["rows"][0]["peak_reserved_bytes"]), (&SCHEMA.into(), &(100 * MIB).into()));
        let text = sample().csv().unwrap();
        let read: Vec<AgreementRecord> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, sample());
    }
}
