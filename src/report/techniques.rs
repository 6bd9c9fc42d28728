//! Memory-saving techniques: the comparison table and `techniques.md`.

use super::{
    Medium,
    folder::FolderRecord,
    render::{RenderRow, TextTable, maybe_bytes, said},
};
use crate::{
    answer::techniques::{AdvisedTechnique, BASE, CardFit, NoAdvice, TechniqueAdvice, TechniqueRecord, row_id},
    base::{Bytes, Nanos},
    measure::Status,
    models::NumericEffect,
};

const HEADINGS: [&str; 11] = [
    "model",
    "technique",
    "numerics",
    "peak\nallocated",
    "memory\nreduction",
    "peak\nreserved",
    "expandable\nsegments",
    "step",
    "time\nratio",
    "largest batch in\n8/12/16/24/80/141 GiB",
    "samples/s\nin 24 GiB",
];
/// The columns that a narrow terminal loses first, by place.
const DISPENSABLE: [usize; 5] = [6, 5, 7, 10, 3];
const PAGE_HEADINGS: [&str; 8] = [
    "technique",
    "numerics",
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
        let mut headings = HEADINGS;
        let last = throughput_heading(rows);
        headings[HEADINGS.len() - 1] = &last;
        let mut table = TextTable::new(&headings, medium).with_numbers(3..).with_groups();
        let mut model = "";
        for record in rows {
            table.row([
                if record.model == model { String::new() } else { record.model.clone() },
                technique(record),
                numerics(record).to_owned(),
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
        table.fit(&DISPENSABLE);
        let legend = legend(rows, |place| table.shows(place));
        table.finish(&legend, notes(rows))
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

    fn failure(&self) -> Option<&str> {
        (self.status == Status::Error).then_some(self.reason.as_str())
    }

    /// One section per model, with published figures beside measured ones.
    fn page(records: &[TechniqueRecord]) -> String {
        let mut page = "# Memory-saving techniques, measured\n".to_owned();
        for of_model in records.chunk_by(|a, b| a.model == b.model) {
            let is_base = |record: &&TechniqueRecord| record.technique == BASE && record.status == Status::Completed;
            let base = of_model.iter().find(is_base);
            let settings = match of_model[0].base_settings.as_str() {
                "" => String::new(),
                settings => format!(", base {settings}"),
            };
            let title = match base {
                Some(base) => format!(
                    "{}{settings}: batch {}, {} allocated, {} per step",
                    base.model,
                    base.batch,
                    maybe_bytes(base.peak_allocated_bytes),
                    base.step_ns.map_or_else(|| "unknown time".to_owned(), |step| Nanos(step).to_string()),
                ),
                None => format!("{}{settings}", of_model[0].model),
            };
            let mut table = TextTable::new(&PAGE_HEADINGS, Medium::Markdown);
            for record in of_model {
                table.row([
                    record.title.clone(),
                    numerics(record).to_owned(),
                    reduction(record),
                    record.published_memory.clone(),
                    impact(record),
                    record.published_performance.clone(),
                    batches(record),
                    record.best_use.clone(),
                ]);
            }
            page.push_str(&format!("\n## {title}\n\n{}", table.finish(&legend(of_model, |_| true), notes(of_model))));
        }
        page
    }
}

/// Which techniques to use on a card. The sentence that names a technique says what it does to the numbers.
pub fn technique_advice(advice: &TechniqueAdvice<'_>, memory_bytes: u64) -> String {
    let first = &advice.first.row.record;
    let alone = if first.base_settings.is_empty() {
        "without any technique".to_owned()
    } else {
        format!("{} alone", first.base_settings)
    };
    let mut words = if first.technique == BASE {
        let verdict = match advice.first.fit.batch < advice.batch {
            true => {
                format!("none of these techniques keeps both the numerics and the model's batch of {}", advice.batch)
            }
            false => "no technique is needed".to_owned(),
        };
        format!("On a card of {}, {verdict}: {alone}, {}.", Bytes(memory_bytes), fits(&advice.first, advice.batch))
    } else {
        let base = match advice.base {
            Some(CardFit { batch, per_second, .. }) => format!("{alone}, batch {batch} fits{}", speed(per_second)),
            None => format!("{alone}, not even batch 1 fits"),
        };
        format!("On a card of {}, {}; {base}.", Bytes(memory_bytes), sentence("use", &advice.first, advice.batch))
    };
    for other in &advice.others {
        let is_faster = other.fit.per_second > advice.first.fit.per_second;
        let lead = if is_faster { "Faster:" } else { "With the whole batch:" };
        words.push_str(&format!(" {}.", sentence(lead, other, advice.batch)));
    }
    if !first.per_second_gpu.is_empty() {
        words.push_str(&format!(
            " Samples/s are those of an {} with {}: another GPU of that size has its own speed.",
            first.per_second_gpu,
            Bytes(memory_bytes)
        ));
    }
    words
}

/// Why there is no recommendation, in one sentence.
pub fn no_technique_advice(reason: NoAdvice, memory_bytes: u64) -> String {
    let card = Bytes(memory_bytes);
    match reason {
        NoAdvice::NothingFits => format!("No technique makes it fit on a card of {card}."),
        NoAdvice::NotComputed => format!(
            "No recommendation for a card of {card}: the rows of the folder have no batch for that size. Compute them in a new \
             folder."
        ),
    }
}

fn sentence(lead: &str, advised: &AdvisedTechnique<'_>, batch: u64) -> String {
    let record = &advised.row.record;
    let beside =
        if record.base_settings.is_empty() { String::new() } else { format!(" with {}", record.base_settings) };
    let (technique, title, numerics) = (&record.technique, &record.title, advised.numerics());
    format!("{lead} `{technique}`{beside} ({title}), which {numerics}: {}", fits(advised, batch))
}

/// The largest batch. A smaller one than the model's changes the training, too.
fn fits(advised: &AdvisedTechnique<'_>, batch: u64) -> String {
    let CardFit { batch: largest, per_second, .. } = advised.fit;
    let smaller = match largest < batch {
        true => format!(" (less than the model's {batch}, which can change the training result)"),
        false => String::new(),
    };
    format!("batch {largest} fits{smaller}{}", speed(per_second))
}

fn speed(per_second: Option<f64>) -> String {
    per_second.map_or_else(String::new, |rate| format!(", {rate:.1} samples/s"))
}

/// The technique's name, and what the base is.
fn technique(record: &TechniqueRecord) -> String {
    let is_set = record.technique == BASE && !record.base_settings.is_empty();
    if is_set { format!("{}: {}", record.technique, record.base_settings) } else { record.technique.clone() }
}

/// What a technique does to the numbers of the training, in one word.
pub(super) fn numerics(record: &TechniqueRecord) -> &'static str {
    match record.numerics {
        None => "",
        Some(NumericEffect::Same) => "same",
        Some(NumericEffect::Rounding) => "rounding",
        Some(NumericEffect::Training) => "training",
    }
}

/// What a technique does to the numbers, behind a sentence about it; empty where it keeps them.
pub(super) fn changed_numerics(record: &TechniqueRecord) -> String {
    let changed = record.numerics.filter(|effect| *effect != NumericEffect::Same);
    changed.map_or_else(String::new, |effect| format!(", and {effect}"))
}

/// Names the GPU whose speed is shown.
fn throughput_heading(records: &[TechniqueRecord]) -> String {
    let heading = HEADINGS[HEADINGS.len() - 1];
    match throughput_gpu(records) {
        Some(gpu) => {
            format!("{} samples/s\nin 24 GiB", gpu.trim_start_matches("NVIDIA ").trim_end_matches(" (simulated)"))
        }
        None => heading.to_owned(),
    }
}

fn throughput_gpu(records: &[TechniqueRecord]) -> Option<&str> {
    records.iter().map(|record| record.per_second_gpu.as_str()).find(|gpu| !gpu.is_empty())
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
    let share = record.allocated_reduction_share;
    share.map_or_else(|| absence(record).to_owned(), |share| format!("{:.1} %", share * 100.0 + 0.0))
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
    match record.modelled_exchange_ns.unwrap_or(0) {
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

/// What the columns mean that are shown.
fn legend(records: &[TechniqueRecord], shows: impl Fn(usize) -> bool) -> String {
    let speed = throughput_gpu(records).map(|gpu| {
        format!("Samples/s are those of an {gpu} with that memory: another GPU of that size has its own speed.")
    });
    let has_batches = records.iter().any(|record| record.largest_batch_24gib.is_some());
    said(&[
        (true, "Reduction: of peak allocated memory compared with the base."),
        (shows(7) || shows(8), "Steps are timed under `caching`."),
        (true, "Batch: whole sequences per step."),
        (
            has_batches && shows(10),
            "Largest batches (context and libraries included) and their samples/s are simulated.",
        ),
        (has_batches && !shows(10), "Largest batches (context and libraries included) are simulated."),
        (speed.is_some() && shows(10), speed.as_deref().unwrap_or_default()),
        (
            records.iter().any(|record| record.numerics.is_some()),
            "Numerics, compared with the base: `same` number formats and updates; `rounding`: fewer bits on the way, 32-bit \
             weights and optimizer states; `training`: can change the training result.",
        ),
        (
            records.iter().any(|record| record.exchanged_bytes_per_step > Some(0)),
            "Times exclude communication between ranks, which is modelled and shown separately.",
        ),
    ])
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
    let (memory, batch) = (Bytes(record.confirmed_card_bytes?), record.confirmed_batch?);
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
    use crate::answer::techniques::{TechniqueRow, advise};

    fn record(technique: &str, percent: f64, ratio: f64) -> TechniqueRecord {
        TechniqueRecord {
            model: "gpt".to_owned(),
            technique: technique.to_owned(),
            title: technique.to_owned(),
            status: Status::Completed,
            batch: 8,
            peak_allocated_bytes: Some(1 << 30),
            allocated_reduction_share: Some(percent / 100.0),
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

    fn advised(technique: &str, numerics: NumericEffect, batch: u64, per_second: f64) -> TechniqueRow {
        let fit = CardFit { memory_bytes: 40 << 30, batch, per_second: Some(per_second) };
        let record = TechniqueRecord {
            title: "Title".to_owned(),
            numerics: Some(numerics),
            per_second_gpu: "NVIDIA H200 (simulated)".to_owned(),
            ..record(technique, 0.0, 1.0)
        };
        TechniqueRow { record, fits: vec![fit] }
    }

    #[test]
    fn sentence_says_what_changes_and_whose_speed_it_is() {
        let mut rows = [
            advised("base", NumericEffect::Same, 4, 20.0),
            advised("ckpt", NumericEffect::Same, 30, 16.0),
            advised("bf16_model", NumericEffect::Training, 64, 304.6),
        ];
        let words = |rows: &[TechniqueRow]| technique_advice(&advise(rows, 40 << 30).unwrap(), 40 << 30);
        let speed = "Samples/s are those of an NVIDIA H200 (simulated) with 40.0 GiB: another GPU of that size has its own speed.";
        assert_eq!(
            words(&rows),
            format!(
                "On a card of 40.0 GiB, use `ckpt` (Title), which keeps the numerics: batch 30 fits, 16.0 samples/s; without \
                 any technique, batch 4 fits, 20.0 samples/s. Faster: `bf16_model` (Title), which can change the training \
                 result: batch 64 fits, 304.6 samples/s. {speed}"
            )
        );
        rows.iter_mut().for_each(|row| row.record.base_settings = "amp".to_owned());
        assert_eq!(
            words(&rows[..1]),
            format!(
                "On a card of 40.0 GiB, none of these techniques keeps both the numerics and the model's batch of 8: amp \
                 alone, batch 4 fits (less than the model's 8, which can change the training result), 20.0 samples/s. {speed}"
            )
        );
        rows[0].fits[0].batch = 9;
        let enough = words(&rows[..1]);
        assert!(enough.contains("no technique is needed: amp alone, batch 9 fits, 20.0 samples/s."), "{enough}");
        rows[0].fits[0].batch = 4;
        assert!(words(&rows).contains("use `ckpt` with amp (Title), which keeps the numerics"), "{}", words(&rows));
        let table = [rows[0].record.clone()].text(Medium::PIPE);
        for part in ["base: amp", "H200 samples/s", "another GPU of that size has its own speed"] {
            assert!(table.contains(part), "{table}");
        }
        assert!(TechniqueRecord::page(&[rows[0].record.clone()]).contains("## gpt, base amp: batch 8"));
    }

    #[test]
    fn base_of_the_page_is_the_base() {
        let mut quick = record("tf32", 0.0, 0.4);
        quick.batch = 9;
        let page = TechniqueRecord::page(&[quick]);
        assert!(page.contains("## gpt\n"), "{page}");
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
        (confirmed.confirmed_card_bytes, confirmed.confirmed_batch) = (Some(24 << 30), Some(12));
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
        (large.step_ns, large.step_ratio, large.allocated_reduction_share) = (None, None, None);
        let text = [large].text(Medium::PIPE);
        assert!(text.contains("out of memory") && text.contains("gpt, base: does not fit"), "{text}");
    }
}
