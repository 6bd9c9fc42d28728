//! Whether a model fits on cards: a sentence, a table of the ways to use it, and where its memory goes.

use super::render::{Medium, RenderRow, TextTable, distinct, grouped, maybe_bytes};
use crate::{
    answer::fits::{FitRow, SERVER_PERCENT},
    base::Bytes,
};

const HEADINGS: [&str; 6] =
    ["way to use it", "peak\nallocated", "peak\nreserved", "fits", "largest\nbatch", "numerics"];
/// The columns that a narrow terminal does without.
const DISPENSABLE: [usize; 1] = [5];
/// Letters of the longest bar.
const BAR: u64 = 30;

impl RenderRow for FitRow {
    fn text(rows: &[FitRow], medium: Medium) -> String {
        let cards = distinct(rows.iter().map(|row| row.card.as_str()));
        let parts = cards.into_iter().map(|card| {
            let rows: Vec<&FitRow> = rows.iter().filter(|row| row.card == card).collect();
            on_one_card(&rows, medium)
        });
        parts.collect::<Vec<_>>().join("\n")
    }
}

fn on_one_card(rows: &[&FitRow], medium: Medium) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut table = TextTable::new(&HEADINGS, medium).with_numbers(1..5);
    for row in rows {
        table.row([
            row.way.clone(),
            maybe_bytes(row.peak_allocated_bytes),
            maybe_bytes(row.peak_reserved_bytes),
            match row.fits {
                Some(true) => "yes".to_owned(),
                Some(false) => "no".to_owned(),
                None => "?".to_owned(),
            },
            row.largest_batch.map_or_else(|| "-".to_owned(), |batch| batch.to_string()),
            row.numerics.map_or_else(String::new, |effect| effect.to_string()),
        ]);
    }
    table.fit(&DISPENSABLE);
    let table = table.finish(LEGEND, notes(rows));
    let trained: Vec<&FitRow> = rows.iter().copied().filter(|row| row.trains).collect();
    let parts = shown(&trained).map_or_else(String::new, by_category);
    format!("{}\n\n{table}\n{parts}", verdict(first, &trained))
}

/// Below the table.
pub(super) const LEGEND: &str = "Peaks with enough memory. On the card the allocator gives back cached memory before a \
                                 request fails, so a way may fit although it would reserve more.";

/// What is not known, and what the pools of servers hold.
pub(super) fn notes(rows: &[&FitRow]) -> Vec<String> {
    let unknown = rows.iter().filter(|row| row.fits.is_none());
    unknown.map(|row| format!("{}: {}", row.way, row.reason)).chain(rows.iter().filter_map(|row| pool(row))).collect()
}

/// The way to train whose memory is shown by category: the first that fits, or the one that takes the least.
pub(super) fn shown<'a>(trained: &[&'a FitRow]) -> Option<&'a FitRow> {
    trained.iter().find(|row| row.fits == Some(true)).or_else(|| least(trained)).copied()
}

/// What the pool of a server holds.
fn pool(row: &FitRow) -> Option<String> {
    let tokens = grouped(row.cache_tokens?);
    Some(format!(
        "{}: the pool holds keys and values of {tokens} tokens. It is what is left of {SERVER_PERCENT} % of the card, as \
         vLLM takes it; vLLM's own kernels and graphs are not modelled",
        row.way
    ))
}

/// The answer for training, in one or two lines.
pub(super) fn verdict(first: &FitRow, rows: &[&FitRow]) -> String {
    let weights = first.weights.map_or_else(String::new, |weights| format!(" ({} weights)", grouped(weights)));
    let size = match (first.batch, first.context) {
        (Some(batch), Some(context)) => format!(", batch {batch} of {context} tokens"),
        _ => String::new(),
    };
    let model = format!("{}{weights}{size}", first.model);
    let card = format!("{} ({} of it for PyTorch)", first.card, Bytes(first.available_bytes));
    let fitting: Vec<&&FitRow> = rows.iter().filter(|row| row.fits == Some(true)).collect();
    match fitting.first() {
        Some(row) => {
            let largest = row.largest_batch.map_or_else(String::new, |batch| format!(", batches up to {batch}"));
            format!("{model}: trains on {card}\n  with {}{largest}", row.way)
        }
        None => {
            let is_known = rows.iter().all(|row| row.fits.is_some());
            let claim = if is_known { "does not train" } else { "is not known to train" };
            let reason = match (smaller_batches(rows), least(rows)) {
                (Some(row), _) => {
                    format!("\n  smaller batches do: up to {} with {}", row.largest_batch.unwrap_or(0), row.way)
                }
                (None, Some(row)) => {
                    let bytes = maybe_bytes(row.peak_allocated_bytes);
                    format!("\n  the least is {}: {bytes} are allocated at once", row.way)
                }
                (None, None) => String::new(),
            };
            format!("{model}: {claim} on {card}{reason}")
        }
    }
}

/// The way with the largest batch that fits, the first of several.
fn smaller_batches<'a>(rows: &'a [&'a FitRow]) -> Option<&'a &'a FitRow> {
    let fitting = rows.iter().filter(|row| row.largest_batch > Some(0));
    fitting.rev().max_by_key(|row| row.largest_batch)
}

/// The way that takes the least.
fn least<'a, 'b>(rows: &'b [&'a FitRow]) -> Option<&'b &'a FitRow> {
    rows.iter().filter(|row| row.fits == Some(false)).min_by_key(|row| row.peak_allocated_bytes)
}

/// Where the memory of a way goes, without what takes nothing.
pub(super) fn categories(row: &FitRow) -> Vec<(&'static str, u64)> {
    let parts = [
        ("weights", row.weights_bytes),
        ("gradients", row.gradients_bytes),
        ("optimizer", row.optimizer_bytes),
        ("activations", row.activations_bytes),
        ("logits", row.logits_bytes),
        ("cache", row.cache_bytes),
        ("temporary", row.temporary_bytes),
        ("workspace", row.workspace_bytes),
    ];
    parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
}

/// The same with bars.
fn by_category(row: &FitRow) -> String {
    let parts = categories(row);
    let total: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    let longest = parts.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(1);
    let mut text = format!("at the allocated peak of {} ({})\n", row.way, Bytes(total));
    for (name, bytes) in parts {
        let bar = "#".repeat((bytes * BAR).div_ceil(longest) as usize);
        text.push_str(&format!("  {name:<12} {:>10}  {bar}\n", Bytes(bytes).to_string()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    fn row(way: &str, fits: Option<bool>, allocated: u64) -> FitRow {
        FitRow {
            model: "llama".to_owned(),
            weights: Some(8_030_261_248),
            card: "24GiB".to_owned(),
            available_bytes: 23 * GIB,
            way: way.to_owned(),
            trains: true,
            batch: Some(1),
            context: Some(2048),
            fits,
            reason: if fits.is_none() { "not modelled".to_owned() } else { String::new() },
            peak_allocated_bytes: Some(allocated),
            largest_batch: Some(3),
            weights_bytes: 8 * GIB,
            activations_bytes: 4 * GIB,
            ..FitRow::default()
        }
    }

    #[test]
    fn the_first_way_that_fits_is_the_answer() {
        let rows = [row("plain", Some(false), 90 * GIB), row("thrifty", Some(true), 20 * GIB), row("odd", None, 1)];
        let text = FitRow::text(&rows, Medium::PIPE);
        for line in [
            "llama (8,030,261,248 weights), batch 1 of 2048 tokens: trains on 24GiB (23.0 GiB of it for PyTorch)",
            "  with thrifty, batches up to 3",
            "odd: not modelled",
            "at the allocated peak of thrifty (12.0 GiB)",
            "  weights        8.00 GiB  ##############################",
            "  activations    4.00 GiB  ###############\n",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        let never = |way, allocated| FitRow { largest_batch: Some(0), ..row(way, Some(false), allocated) };
        let text = FitRow::text(&[never("plain", 90 * GIB), row("thrifty", Some(false), 30 * GIB)], Medium::PIPE);
        assert!(text.contains("\n  smaller batches do: up to 3 with thrifty\n"), "{text}");
        let text = FitRow::text(&[never("plain", 90 * GIB), never("thrifty", 30 * GIB)], Medium::PIPE);
        assert!(text.contains("does not train on 24GiB"), "{text}");
        assert!(text.contains("  the least is thrifty: 30.0 GiB are allocated at once"), "{text}");
        let server = FitRow { cache_tokens: Some(41_232), trains: false, ..row("server", Some(true), GIB) };
        let text = FitRow::text(&[row("plain", Some(true), GIB), server], Medium::PIPE);
        assert!(
            text.contains("server: the pool holds keys and values of 41,232 tokens. It is what is left of 90 %"),
            "{text}"
        );
        // A way that is not modelled might fit.
        let odd = FitRow { largest_batch: None, ..row("odd", None, 1) };
        let text = FitRow::text(&[never("plain", 90 * GIB), odd], Medium::PIPE);
        assert!(text.contains("is not known to train on 24GiB") && text.contains("the least is plain"), "{text}");
    }
}
