//! Memory-saving techniques: the comparison table and `techniques.md`.

use super::{
    Medium,
    folder::FolderRecord,
    render::{RenderRow, TextTable, maybe_bytes},
};
use crate::{
    answer::techniques::{TechniqueAdvice, TechniqueRecord, row_id},
    base::{Bytes, Nanos},
    measure::Status,
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
    "samples/s\nin 24 GiB",
];
const PAGE_HEADINGS: [&str; 7] = [
    "technique",
    "memory reduction",
    "published",
    "performance impact",
    "published",
    "largest batch in 8/12/16/24/80/141 GiB",
    "best use",
];

impl RenderRow for TechniqueRecord {
    fn text(rows: &[TechniqueRecord], medium: Medium) -> String {
        if medium == Medium::Markdown {
            return TechniqueRecord::page(rows);
        }
        let mut table = TextTable::new(&HEADINGS, medium);
        let mut model = "";
        for record in rows {
            table.row([
                if record.model == model { String::new() } else { record.model.clone() },
                record.technique.clone(),
                maybe_bytes(record.peak_allocated_bytes),
                reduction(record),
                maybe_bytes(record.peak_reserved_bytes),
                maybe_bytes(record.expandable_peak_reserved_bytes),
                record.step_ns.map_or_else(|| absence(record).to_owned(), |step| Nanos(step).to_string()),
                ratio(record),
                batches(record),
                record.per_second_24gib.map_or_else(String::new, |rate| format!("{rate:.1}")),
            ]);
            model = &record.model;
        }
        table.finish(&legend(rows), notes(rows))
    }
}

impl FolderRecord for TechniqueRecord {
    const NAME: &'static str = "techniques";

    fn id(&self) -> String {
        row_id(&self.model, &self.technique)
    }

    fn is_final(&self) -> bool {
        self.status.is_final()
    }

    /// One section per model, with published figures beside measured ones.
    fn page(records: &[TechniqueRecord]) -> String {
        let mut page = "# Memory-saving techniques, measured\n".to_owned();
        for of_model in records.chunk_by(|a, b| a.model == b.model) {
            let is_base =
                |record: &&TechniqueRecord| record.reduction_percent == Some(0.0) && record.status == Status::Completed;
            let base = of_model.iter().find(is_base);
            let title = match base {
                Some(base) => format!(
                    "{}: batch {}, {} allocated, {} per step",
                    base.model,
                    base.batch,
                    maybe_bytes(base.peak_allocated_bytes),
                    base.step_ns.map_or_else(|| "unknown time".to_owned(), |step| Nanos(step).to_string()),
                ),
                None => of_model[0].model.clone(),
            };
            let mut table = TextTable::new(&PAGE_HEADINGS, Medium::Markdown);
            for record in of_model {
                table.row([
                    record.title.clone(),
                    reduction(record),
                    record.published_memory.clone(),
                    impact(record),
                    record.published_performance.clone(),
                    batches(record),
                    record.best_use.clone(),
                ]);
            }
            page.push_str(&format!("\n## {title}\n\n{}", table.finish(&legend(of_model), notes(of_model))));
        }
        page
    }
}

/// Which technique to use on a card, in one sentence.
pub fn technique_advice(advice: &TechniqueAdvice<'_>, memory_bytes: u64) -> String {
    let best = &advice.best.record;
    let speed = |per_second: Option<f64>| per_second.map_or_else(String::new, |rate| format!(", {rate:.1} samples/s"));
    let base = match advice.base {
        Some(base) => format!("without any technique, batch {} fits{}", base.batch, speed(base.per_second)),
        None => "without any technique, not even batch 1 fits".to_owned(),
    };
    format!(
        "On a card of {}, use `{}` ({}): batch {} fits{}; {base}.",
        Bytes(memory_bytes),
        best.technique,
        best.title,
        advice.fit.batch,
        speed(advice.fit.per_second),
    )
}

/// What a cell without a figure says.
fn absence(record: &TechniqueRecord) -> &'static str {
    match record.status {
        Status::Oom => "out of memory",
        Status::Skipped => "not applicable",
        _ => "",
    }
}

fn reduction(record: &TechniqueRecord) -> String {
    // Adding zero turns -0.0 into 0.0.
    record.reduction_percent.map_or_else(|| absence(record).to_owned(), |percent| format!("{:.1} %", percent + 0.0))
}

fn ratio(record: &TechniqueRecord) -> String {
    let Some(ratio) = record.step_ratio else { return String::new() };
    match (record.step_ratio_low, record.step_ratio_high) {
        // On a virtual clock all steps take the same time, so there is no interval.
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
        exchange => format!("{words}, plus {} of communication", Nanos(exchange)),
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
        "Reduction: of peak allocated memory compared with the base. Steps are timed under `caching`. Batch: \
                      whole sequences per step."
            .to_owned();
    if records.iter().any(|record| record.largest_batch_24gib.is_some()) {
        legend.push_str(" Largest batches (context and libraries included) and their samples/s are simulated.");
    }
    if records.iter().any(|record| record.exchanged_bytes_per_step > 0) {
        legend.push_str(" Times exclude communication between ranks, which is modelled and shown separately.");
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

/// How the batch found for a card ran on the device.
fn confirmation(record: &TechniqueRecord) -> Option<String> {
    let (memory, batch) = (Bytes(record.confirmed_memory_bytes?), record.confirmed_batch?);
    Some(match (record.confirmed_per_second, record.confirmed_simulated_per_second) {
        (Some(seen), Some(simulated)) => {
            format!("batch {batch} ran on the device in {memory}: {seen:.2} samples/s, {simulated:.2} simulated")
        }
        (Some(seen), None) => format!("batch {batch} ran on the device in {memory}: {seen:.2} samples/s"),
        (None, _) => format!("batch {batch} did not fit in {memory} on the device"),
    })
}

#[cfg(test)]
mod tests {
    use super::{super::Render, *};

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
    fn page_shows_measured_and_published() {
        let mut amp = record("amp", 21.2, 0.2);
        amp.published_memory = "about 25-35 %".to_owned();
        let page = TechniqueRecord::page(&[record("base", 0.0, 1.0), amp, record("ckpt", 45.0, 1.2)]);
        assert!(page.contains("## gpt: batch 8, 1.00 GiB allocated, 1.00 ms per step"), "{page}");
        let row = page.lines().find(|line| line.starts_with("| amp")).unwrap();
        for cell in ["21.2 %", "about 25-35 %", "5.00x faster", "-/?/?/12/?/?"] {
            assert!(row.contains(cell), "{row}");
        }
        assert!(page.lines().any(|line| line.starts_with("| ckpt") && line.contains("20 % slower")), "{page}");
    }

    #[test]
    fn interval_is_shown_where_times_vary() {
        let mut varied = record("amp", 1.0, 0.5);
        (varied.step_ratio_low, varied.step_ratio_high) = (Some(0.49), Some(0.51));
        assert_eq!(ratio(&varied), "0.500 (0.490-0.510)");
        (varied.step_ratio_low, varied.step_ratio_high) = (Some(0.5), Some(0.5));
        assert_eq!(ratio(&varied), "0.500");
    }

    #[test]
    fn confirmed_batch_shows_its_speed() {
        let mut confirmed = record("amp", 21.0, 0.2);
        (confirmed.confirmed_memory_bytes, confirmed.confirmed_batch) = (Some(24 << 30), Some(12));
        assert_eq!(confirmation(&confirmed).unwrap(), "batch 12 did not fit in 24.0 GiB on the device");
        (confirmed.confirmed_per_second, confirmed.confirmed_simulated_per_second) = (Some(100.0), Some(101.5));
        let text = [confirmed].text(Medium::PIPE);
        assert!(text.contains("batch 12 ran on the device in 24.0 GiB: 100.00 samples/s, 101.50 simulated"), "{text}");
    }

    #[test]
    fn out_of_memory_is_explained() {
        let mut large = record("base", 0.0, 1.0);
        large.status = Status::Oom;
        large.reason = "does not fit".to_owned();
        (large.step_ns, large.step_ratio, large.reduction_percent) = (None, None, None);
        let text = [large].text(Medium::PIPE);
        assert!(text.contains("out of memory") && text.contains("gpt, base: does not fit"), "{text}");
    }
}
