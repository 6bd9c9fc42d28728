//! The comparison table of memory-saving techniques; and the same rows as CSV and JSON.

use comfy_table::Cell;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{
    answer::techniques::{Advice, TechniqueRecord},
    base::{Bytes, Nanos},
    measure::{SCHEMA, Status},
};

const HEADINGS: [&str; 10] = [
    "model",
    "technique",
    "peak\nallocated",
    "memory\nreduction",
    "peak\nreserved",
    "expandable\nsegments",
    "step",
    "time\nratio",
    "largest batch in\n8/12/16/24/80/141 GiB",
    "a second\nin 24 GiB",
];
const SHORT_HEADINGS: [&str; 7] = [
    "technique",
    "memory reduction",
    "published",
    "performance impact",
    "published",
    "largest batch in 8/12/16/24/80/141 GiB",
    "best use",
];

/// All that people compare, a model below the other.
#[must_use]
pub fn techniques(records: &[TechniqueRecord], medium: Medium) -> String {
    let mut table = table(&HEADINGS, medium);
    let mut model = "";
    for record in records {
        let heading = if record.model == model { String::new() } else { record.model.clone() };
        model = &record.model;
        table.add_row(row(heading, record));
    }
    with_notes(&table, &legend(records), notes(records), medium)
}

/// The table that articles print, with what they print beside what was measured: a page of markdown, a section a model.
#[must_use]
pub fn techniques_page(records: &[TechniqueRecord]) -> String {
    let mut page = "# Memory-saving techniques, measured\n".to_owned();
    for of_model in records.chunk_by(|a, b| a.model == b.model) {
        let base = of_model.iter().find(|record| record.reduction_percent == Some(0.0) && record.is_measured());
        let title = match base {
            Some(base) => format!(
                "{}: batch {}, {} allocated, {} a step",
                base.model,
                base.batch,
                Bytes(base.peak_allocated_bytes.unwrap_or(0)),
                base.step_ns.map_or_else(|| "no time for".to_owned(), |step| Nanos(step).to_string()),
            ),
            None => of_model[0].model.clone(),
        };
        let mut table = table(&SHORT_HEADINGS, Medium::Markdown);
        for record in of_model {
            table.add_row([
                record.title.clone(),
                reduction(record),
                record.published_memory.clone(),
                impact(record),
                record.published_performance.clone(),
                batches(record),
                record.best_use.clone(),
            ]);
        }
        let notes = notes(of_model);
        page.push_str(&format!("\n## {title}\n\n{}", with_notes(&table, &legend(of_model), notes, Medium::Markdown)));
    }
    page
}

/// All columns, as in `techniques.csv`.
pub fn techniques_csv(records: &[TechniqueRecord]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(records)?).into_owned())
}

/// `{"schema": 1, "rows": [...]}` with all columns in base units.
#[must_use]
pub fn techniques_json(records: &[TechniqueRecord]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": records }))
}

/// What to take for a card, in a sentence.
#[must_use]
pub fn technique_advice(advice: &Advice<'_>, memory_bytes: u64) -> String {
    let best = &advice.best.record;
    let speed = |per_second: Option<f64>| per_second.map_or_else(String::new, |rate| format!(", {rate:.1} a second"));
    let base = match advice.base {
        Some(base) => format!("without any technique batch {} fits{}", base.batch, speed(base.per_second)),
        None => "without any technique not even one sequence fits".to_owned(),
    };
    format!(
        "In {} take `{}` ({}): batch {} fits{}; {base}.",
        Bytes(memory_bytes),
        best.technique,
        best.title,
        advice.fit.batch,
        speed(advice.fit.per_second),
    )
}

fn row(heading: String, record: &TechniqueRecord) -> Vec<Cell> {
    let bytes = |value: Option<u64>| value.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
    let cells = [
        heading,
        record.technique.clone(),
        bytes(record.peak_allocated_bytes),
        reduction(record),
        bytes(record.peak_reserved_bytes),
        bytes(record.expandable_peak_reserved_bytes),
        record.step_ns.map_or_else(|| absence(record).to_owned(), |step| Nanos(step).to_string()),
        ratio(record),
        batches(record),
        record.per_second_24gib.map_or_else(String::new, |rate| format!("{rate:.1}")),
    ];
    cells.into_iter().map(Cell::new).collect()
}

/// What stands where no time does.
fn absence(record: &TechniqueRecord) -> &'static str {
    match record.status {
        Status::Oom => "out of memory",
        Status::Skipped => "not known here",
        _ => "",
    }
}

fn reduction(record: &TechniqueRecord) -> String {
    // A negative zero is a zero.
    record.reduction_percent.map_or_else(|| absence(record).to_owned(), |percent| format!("{:.1} %", percent + 0.0))
}

fn ratio(record: &TechniqueRecord) -> String {
    let Some(ratio) = record.step_ratio else { return String::new() };
    match (record.step_ratio_low, record.step_ratio_high) {
        // On a virtual clock all steps are alike: there is no interval to speak of.
        (Some(low), Some(high)) if high - low >= 0.0005 => format!("{ratio:.3} ({low:.3}-{high:.3})"),
        _ => format!("{ratio:.3}"),
    }
}

fn impact(record: &TechniqueRecord) -> String {
    let Some(ratio) = record.step_ratio else { return absence(record).to_owned() };
    let words = match ratio {
        _ if ratio < 0.995 => format!("{:.2}x faster", 1.0 / ratio),
        _ if ratio > 1.005 => format!("{:.0} % slower", 100.0 * (ratio - 1.0)),
        _ => "none".to_owned(),
    };
    match record.modelled_exchange_ns {
        0 => words,
        exchange => format!("{words}, and {} of exchange", Nanos(exchange)),
    }
}

fn batches(record: &TechniqueRecord) -> String {
    let cells = [
        record.largest_batch_8gib,
        record.largest_batch_12gib,
        record.largest_batch_16gib,
        record.largest_batch_24gib,
        record.largest_batch_80gib,
        record.largest_batch_141gib,
    ];
    if cells.iter().all(Option::is_none) {
        return String::new();
    }
    let shown = cells.map(|batch| match batch {
        None => "?".to_owned(),
        Some(0) => "-".to_owned(),
        Some(batch) => batch.to_string(),
    });
    shown.join("/")
}

fn legend(records: &[TechniqueRecord]) -> String {
    let mut legend =
        "Reduction of peak allocated memory, and steps timed, under `caching`, against the base; a batch is \
                      whole sequences a step."
            .to_owned();
    if records.iter().any(|record| record.largest_batch_24gib.is_some()) {
        legend.push_str(" What fits in a card, context and libraries included, and its speed are simulated.");
    }
    if records.iter().any(|record| record.exchanged_bytes_per_step > 0) {
        legend.push_str(" Times leave out what ranks exchange: that is modelled at the rate of the link, and marked.");
    }
    legend
}

fn notes(records: &[TechniqueRecord]) -> impl Iterator<Item = String> + '_ {
    records.iter().flat_map(|record| {
        let reason = (!record.reason.is_empty()).then(|| record.reason.clone());
        let words = reason.into_iter().chain(confirmation(record));
        words.map(|words| format!("{}, {}: {words}", record.model, record.technique))
    })
}

/// How the batch that was found for a card did on the device.
fn confirmation(record: &TechniqueRecord) -> Option<String> {
    let (memory, batch) = (Bytes(record.confirmed_memory_bytes?), record.confirmed_batch?);
    Some(match (record.confirmed_per_second, record.confirmed_simulated_per_second) {
        (Some(seen), Some(simulated)) => {
            format!("batch {batch} ran on the device in {memory}: {seen:.2} a second, {simulated:.2} simulated")
        }
        (Some(seen), None) => format!("batch {batch} ran on the device in {memory}: {seen:.2} a second"),
        (None, _) => format!("batch {batch} did not fit in {memory} on the device"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(technique: &str, percent: f64, ratio: f64) -> TechniqueRecord {
        TechniqueRecord {
            model: "gpt".to_owned(),
            technique: technique.to_owned(),
            title: technique.to_owned(),
            status: Status::Completed,
            batch: 8,
            peak_allocated_bytes: Some(1 << 30),
            reduction_percent: Some(percent),
            step_ns: Some(1_000_000),
            step_ratio: Some(ratio),
            largest_batch_8gib: Some(0),
            largest_batch_24gib: Some(12),
            ..TechniqueRecord::default()
        }
    }

    #[test]
    fn the_page_says_measured_and_published_side_by_side() {
        let mut amp = record("amp", 21.2, 0.2);
        amp.published_memory = "about 25-35 %".to_owned();
        let page = techniques_page(&[record("base", 0.0, 1.0), amp, record("ckpt", 45.0, 1.2)]);
        assert!(page.contains("## gpt: batch 8, 1.00 GiB allocated, 1.00 ms a step"), "{page}");
        let row = page.lines().find(|line| line.starts_with("| amp")).unwrap();
        for cell in ["21.2 %", "about 25-35 %", "5.00x faster", "-/?/?/12/?/?"] {
            assert!(row.contains(cell), "{row}");
        }
        assert!(page.lines().any(|line| line.starts_with("| ckpt") && line.contains("20 % slower")), "{page}");
    }

    #[test]
    fn an_interval_is_shown_where_times_vary() {
        let mut varied = record("amp", 1.0, 0.5);
        (varied.step_ratio_low, varied.step_ratio_high) = (Some(0.49), Some(0.51));
        assert_eq!(ratio(&varied), "0.500 (0.490-0.510)");
        (varied.step_ratio_low, varied.step_ratio_high) = (Some(0.5), Some(0.5));
        assert_eq!(ratio(&varied), "0.500");
    }

    #[test]
    fn a_batch_that_was_put_to_the_device_is_told_with_its_speed() {
        let mut confirmed = record("amp", 21.0, 0.2);
        (confirmed.confirmed_memory_bytes, confirmed.confirmed_batch) = (Some(24 << 30), Some(12));
        assert_eq!(confirmation(&confirmed).unwrap(), "batch 12 did not fit in 24.0 GiB on the device");
        (confirmed.confirmed_per_second, confirmed.confirmed_simulated_per_second) = (Some(100.0), Some(101.5));
        let text = techniques(&[confirmed], Medium::Terminal(None));
        assert!(text.contains("batch 12 ran on the device in 24.0 GiB: 100.00 a second, 101.50 simulated"), "{text}");
    }

    #[test]
    fn what_did_not_fit_is_said_and_explained() {
        let mut large = record("base", 0.0, 1.0);
        large.status = Status::Oom;
        large.reason = "does not fit".to_owned();
        (large.step_ns, large.step_ratio, large.reduction_percent) = (None, None, None);
        let text = techniques(&[large], Medium::Terminal(None));
        assert!(text.contains("out of memory") && text.contains("gpt, base: does not fit"), "{text}");
    }
}
