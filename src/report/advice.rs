//! The advice of `oomph advise`: the line to paste, what it saves, how sure that is, and everything
//! that was tried.

use std::{cmp::Ordering, fmt::Write as _};

use super::{
    Medium, Render, ReportError,
    leaks::grower_name,
    render::{TextTable, grouped, in_mebibytes, maybe_bytes, said},
    rows,
};
use crate::{
    answer::{
        advise::{Advice, AdviceReason, AdviceRow, CheckedPredictions, Confidence, checked_keys},
        threshold::ThresholdStatus,
    },
    base::{Bytes, Nanos},
    measure::{OomReport, ooms},
    trace::torch::{FinalOom, MemoryHolder, MemoryRefuser, RecordedLimit},
};

const HEADINGS: [&str; 7] =
    ["settings", "reserved,\nno limit", "smallest\nlimit", "smallest\ndevice", "driver\ntime", "fits", ""];

/// The columns that a narrow terminal loses first, by place.
const DISPENSABLE: [usize; 3] = [4, 3, 1];

/// The advice for one source or several.
pub struct AdviceReport {
    /// One advice per source.
    pub advices: Vec<Advice>,
    /// How many of the settings tried are shown.
    pub top: usize,
}

impl Render for AdviceReport {
    type Row = Advice;

    fn rows(&self) -> &[Advice] {
        &self.advices
    }

    /// One line for everything that was tried.
    fn csv(&self) -> Result<String, ReportError> {
        let tried = self.advices.iter().flat_map(|advice| advice.tried.iter().map(move |row| ((&advice.source,), row)));
        rows::to_csv_with(&["source"], tried)
    }

    fn text(&self, medium: Medium) -> String {
        self.advices.iter().map(|advice| text(advice, self.top, medium)).collect::<Vec<_>>().join("\n")
    }
}

fn text(advice: &Advice, top: usize, medium: Medium) -> String {
    let mut out = match medium {
        Medium::Terminal(_) => format!("{}: {}\n", advice.source, with_paste(advice)),
        Medium::Markdown => format!("## {}\n\n{}\n\n", advice.source, with_paste(advice)),
    };
    if let Some(line) = &advice.export {
        let _ = match medium {
            Medium::Terminal(_) => writeln!(out, "\n    {line}\n"),
            Medium::Markdown => writeln!(out, "```sh\n{line}\n```\n"),
        };
    }
    for (label, value) in facts(advice) {
        let _ = match medium {
            Medium::Terminal(_) => writeln!(out, "  {label:<14} {value}"),
            Medium::Markdown => writeln!(out, "- {label}: {value}"),
        };
    }
    if advice.history_gap.is_none() {
        let _ = writeln!(out, "\n{}", tried(advice, top, medium));
    }
    out
}

/// What is said about the advice, each with a label.
pub(super) fn facts(advice: &Advice) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    facts.extend(advice.export_note.clone().map(|words| ("variable", words)));
    if let Some(end) = &advice.dead_end {
        facts.push(("OOM", failure(end)));
        facts.extend(end.holders.iter().map(|holder| ("held by", held(holder))));
    }
    facts.extend(advice.recorded_limit.as_ref().and_then(recorded_with).map(|words| ("recorded with", words)));
    if advice.history_gap.is_some() {
        return facts;
    }
    let until_there = if advice.dead_end.is_some() { ", up to the OOM" } else { "" };
    facts.extend(reserved(advice).map(|words| ("reserved", format!("{words}{until_there}"))));
    facts.push(("smallest limit", format!("{}{until_there}", memory(advice))));
    facts.extend(available(advice).map(|words| ("available", words)));
    if let Some(end) = &advice.dead_end {
        facts.push(("after that", beyond(advice, end)));
    }
    if let Some(then) = advice.driver_without_launches_ns {
        facts.push(("driver time", cost(advice.driver_without_launches_now_ns.filter(|_| advice.changes), then)));
    }
    facts.push(("how sure", confidence(advice)));
    facts.extend(advice.release.clone().map(|release| ("PyTorch", release)));
    facts.extend(prediction(advice).map(|words| ("prediction", words)));
    facts.extend(advice.reasons.iter().map(|reason| reason_fact(reason, advice.fits)));
    if advice.changes && advice.recommended.contains("garbage_collection_threshold") {
        facts.push(("note", GARBAGE_COLLECTION_NOTE.to_owned()));
    }
    facts
}

const GARBAGE_COLLECTION_NOTE: &str =
    "PyTorch uses garbage_collection_threshold only after torch.cuda.set_per_process_memory_fraction was called";

/// The first line, which says that a line to paste follows.
fn with_paste(advice: &Advice) -> String {
    let words = headline(advice);
    if advice.changes { format!("{words}. Paste this before you start the program:") } else { words }
}

/// The advice in one line, for the answer of another command.
pub(super) fn one_line(advice: &Advice) -> String {
    let words = headline(advice);
    match (&advice.export, advice.needed_bytes, advice.needed_now_bytes) {
        (Some(export), Some(needed), Some(now)) => {
            let (needed, now) = (in_mebibytes(Some(needed)), in_mebibytes(Some(now)));
            format!("{words} ({needed} instead of {now}): {export}")
        }
        (Some(export), ..) => format!("{words}: {export}"),
        (None, ..) => words,
    }
}

/// What happened, then what to do.
pub(super) fn headline(advice: &Advice) -> String {
    if let Some(gap) = &advice.history_gap {
        return format!("cannot tell: {gap}");
    }
    if let Some(end) = &advice.dead_end {
        return format!("{}; {}", what_happened(advice, end), remedy(advice, end));
    }
    match (advice.changes, advice.fits) {
        (true, Some(true)) if advice.fits_now == Some(false) => {
            "it runs out of memory now; another setting avoids this OOM".to_owned()
        }
        (true, _) if advice.depends_on_limit => {
            format!("another setting helps, if the limit is at least {}", in_mebibytes(advice.needed_bytes))
        }
        (true, _) => "another setting needs less memory".to_owned(),
        (false, Some(false)) => closest(advice),
        (false, _) if advice.closest.is_some() => closest(advice),
        (false, _) => "keep your current settings".to_owned(),
    }
}

/// Why the recorded program died.
fn what_happened(advice: &Advice, end: &FinalOom) -> String {
    let leaks = advice.reasons.iter().any(|reason| matches!(reason, AdviceReason::Leak { .. }));
    match (end.room_bytes, leaks) {
        (None, false) => {
            format!("your own memory limit refused this request: the GPU had {} free", Bytes(end.device_free_bytes))
        }
        (None, true) => format!(
            "it leaks, and your own memory limit refused a request: the GPU had {} free",
            Bytes(end.device_free_bytes)
        ),
        (Some(_), true) => "it ran out of memory because it leaks".to_owned(),
        (Some(_), false) => "it ran out of memory".to_owned(),
    }
}

/// What to do about an OOM.
fn remedy(advice: &Advice, end: &FinalOom) -> String {
    if advice.reasons.iter().any(|reason| matches!(reason, AdviceReason::Leak { .. })) {
        return match advice.changes {
            true => "fix the leak. This setting only delays the OOM".to_owned(),
            false => "fix the leak. No setting helps".to_owned(),
        };
    }
    let raise = if end.room_bytes.is_none() { raised(advice) } else { String::new() };
    let words = match (advice.changes, advice.fits) {
        (true, _) if advice.depends_on_limit => format!(
            "another setting avoids this OOM only if the limit is at least {}",
            in_mebibytes(advice.needed_bytes)
        ),
        (true, Some(true)) => "another setting avoids this OOM".to_owned(),
        (true, _) => "another setting needs less up to that point".to_owned(),
        (false, Some(true)) => "in this much memory the current settings avoid this OOM".to_owned(),
        (false, _) => closest(advice),
    };
    format!("{raise}{words}")
}

/// What to do about a limit of the program's own, and what the rest of the sentence is about.
fn raised(advice: &Advice) -> String {
    let recorded = advice.recorded_limit.as_ref();
    match advice.limit_bytes {
        Some(bytes) if !recorded.is_some_and(|limit| limit.range.contains(bytes)) => {
            format!("raise or remove the limit. With {} for the allocator, ", in_mebibytes(Some(bytes)))
        }
        _ => "raise or remove the limit. With the limit, ".to_owned(),
    }
}

/// No setting is enough.
fn closest(advice: &Advice) -> String {
    match &advice.closest {
        Some(settings) if advice.depends_on_limit => {
            let needed = in_mebibytes(advice.needed_bytes);
            format!("no setting helps unless the limit is at least {needed}, which {settings} needs")
        }
        Some(settings) => {
            format!("no setting is enough; {settings} comes closest, with {}", in_mebibytes(advice.needed_bytes))
        }
        None => "no setting helps".to_owned(),
    }
}

/// The limit under which the program was recorded. A full device is shown as available memory.
fn recorded_with(limit: &RecordedLimit) -> Option<String> {
    let words = limit.in_words();
    Some(match limit.refused_by {
        MemoryRefuser::Device => return None,
        MemoryRefuser::OwnLimit if limit.inferred => {
            format!("a memory limit of the program's own (set_per_process_memory_fraction), {words}")
        }
        MemoryRefuser::OwnLimit => format!("a memory limit of {words}"),
        MemoryRefuser::Unknown => format!("a memory limit {words}: the program's own, or a device that was full"),
    })
}

/// How the recorded program failed.
pub(super) fn failure(end: &FinalOom) -> String {
    let site = end.site.as_ref().map(|site| format!(" at {site}")).unwrap_or_default();
    format!(
        "{} requested{site}; {} allocated, {} cached in pieces that are too small, {} free on the device",
        Bytes(end.requested_bytes),
        Bytes(end.allocated_bytes),
        Bytes(end.cached_bytes()),
        Bytes(end.device_free_bytes)
    )
}

/// Why the program ran out of memory, or why it needs as much as it does. `replayed` is the first request that fails in a replay
/// with the current settings, in the memory that there is.
pub(super) fn cause(advice: &Advice, replayed: Option<&OomReport>) -> String {
    let is_leak = |reason: &&AdviceReason| matches!(reason, AdviceReason::Leak { .. });
    if let Some(leak) = advice.reasons.iter().find(is_leak) {
        return format!("It leaks: {}", reason_fact(leak, advice.fits).1);
    }
    if let Some(end) = &advice.dead_end {
        return unserved(advice, end, replayed);
    }
    if let Some(oom) = replayed {
        return format!("In a replay with the current settings, a request fails: {}", oom.in_words());
    }
    match advice.reasons.first() {
        Some(reason) => reason_fact(reason, advice.fits).1,
        None => {
            let live = in_mebibytes(Some(advice.live_peak_bytes));
            let need = advice
                .needed_now_bytes
                .map_or_else(|| "more than the device has".to_owned(), |now| in_mebibytes(Some(now)));
            format!(
                "At the peak {live} are live. The current settings need {need}: the rest lies between live blocks, in pieces that later requests cannot use"
            )
        }
    }
}

/// Why free memory did not serve the request that ended the recording.
fn unserved(advice: &Advice, end: &FinalOom, replayed: Option<&OomReport>) -> String {
    let (request, free) = (Bytes(end.requested_bytes), end.cached_bytes().saturating_add(end.device_free_bytes));
    let largest = replayed.filter(|oom| oom.cached_free_bytes > 0).and_then(|oom| oom.largest_free_bytes);
    let largest = largest.map_or_else(String::new, |bytes| format!(" (the largest has {})", Bytes(bytes)));
    let cached = format!("{} in the cache, in pieces that are too small{largest}", Bytes(end.cached_bytes()));
    if end.room_bytes.is_none() {
        let words = what_happened(advice, end);
        return format!("A limit: {words}. Below the limit, there were {cached}");
    }
    let device = Bytes(end.device_free_bytes);
    if free >= end.requested_bytes {
        format!(
            "Fragmentation: {} were free, more than the {request} requested, but not in one piece: {cached}, and {device} on the device",
            Bytes(free)
        )
    } else {
        format!(
            "Exhaustion: only {} were free, less than the {request} requested: {cached}, and {device} on the device",
            Bytes(free)
        )
    }
}

/// From this share of allocated memory on, settings cannot gain much.
const FULL: f64 = 0.9;

/// What can be said about the time after the OOM.
pub(super) fn beyond(advice: &Advice, end: &FinalOom) -> String {
    let mut words = "not in the recording".to_owned();
    let Some(limit) = advice.limit_bytes else { return words };
    if let (Some(true), Some(needed)) = (advice.fits, advice.needed_bytes) {
        let left = limit.saturating_sub(needed);
        let share = left as f64 / limit.max(1) as f64 * 100.0;
        let _ = write!(words, "; {} ({share:.1} %) are left for it", in_mebibytes(Some(left)));
    }
    let used = end.allocated_bytes as f64 / limit.max(1) as f64;
    if used >= FULL {
        let _ = write!(
            words,
            ". {:.0} % of the memory was allocated: settings alone may not be enough (see `oomph techniques`, or use a \
             smaller batch)",
            used * 100.0
        );
    }
    words
}

/// What one call site held.
pub(super) fn held(holder: &MemoryHolder) -> String {
    let blocks = if holder.blocks == 1 { "block" } else { "blocks" };
    format!("{} in {} {blocks}: {}", Bytes(holder.bytes), holder.blocks, holder.site)
}

/// What users can compare with their own run.
fn reserved(advice: &Advice) -> Option<String> {
    let (now, then) = (advice.uncapped_reserved_now_bytes?, advice.uncapped_reserved_bytes?);
    let figure = "without a limit (torch.cuda.max_memory_reserved)";
    Some(match (advice.changes || advice.closest.is_some(), then.cmp(&now)) {
        (false, _) => format!("{} {figure}", Bytes(now)),
        (true, Ordering::Less) => format!("falls from {} to {} {figure}", Bytes(now), Bytes(then)),
        (true, Ordering::Equal) => format!("stays at {} {figure}", Bytes(now)),
        (true, Ordering::Greater) => format!("rises from {} to {} {figure}", Bytes(now), Bytes(then)),
    })
}

pub(super) fn memory(advice: &Advice) -> String {
    let needed = in_mebibytes(advice.needed_bytes);
    match (advice.needed_bytes, advice.needed_now_bytes) {
        (None, _) => "more than the device has".to_owned(),
        (Some(_), Some(now)) if advice.changes || advice.closest.is_some() => format!(
            "{needed} instead of {}: {} less ({:.1} %)",
            in_mebibytes(Some(now)),
            in_mebibytes(Some(advice.saved_bytes)),
            advice.saved_bytes as f64 / now.max(1) as f64 * 100.0
        ),
        (Some(_), None) => format!("{needed}; the current settings need more than the device has"),
        (Some(_), Some(_)) => {
            format!("{needed}; peak live bytes: {}", in_mebibytes(Some(advice.live_peak_bytes)))
        }
    }
}

pub(super) fn available(advice: &Advice) -> Option<String> {
    let limit = advice.limit_bytes?;
    if advice.depends_on_limit {
        let needed = in_mebibytes(advice.needed_bytes);
        let setting = advice.closest.as_deref().unwrap_or("this setting");
        return Some(format!("enough with {setting} if the limit is at least {needed}, which is not known"));
    }
    let verdict = |fits: Option<bool>| if fits == Some(true) { "enough" } else { "too little" };
    let words = match advice.changes {
        true => {
            format!("{} with this setting, {} with the current ones", verdict(advice.fits), verdict(advice.fits_now))
        }
        false => verdict(advice.fits).to_owned(),
    };
    Some(format!("{} for the allocator: {words}", in_mebibytes(Some(limit))))
}

fn cost(now: Option<u64>, then: u64) -> String {
    let Some(now) = now else { return format!("{} in total", Nanos(then)) };
    let difference = match then.checked_sub(now) {
        Some(more) => format!("{} more", Nanos(more)),
        None => format!("{} less", Nanos(now - then)),
    };
    format!("{} instead of {}: {difference} in total", Nanos(then), Nanos(now))
}

pub(super) fn confidence(advice: &Advice) -> String {
    let about_model = match &advice.confidence {
        Confidence::Exact { entries, blocks_before: 0 } => {
            format!("EXACT for the recorded run: the model matches PyTorch in all {} entries", grouped(*entries as u64))
        }
        Confidence::Exact { entries, blocks_before } => format!(
            "EXACT for the recorded run, from the middle: the model matches PyTorch in all {} entries; the \
             {blocks_before} blocks allocated before the recording are requested first, so the gaps between them are \
             ignored",
            grouped(*entries as u64)
        ),
        Confidence::Partial { reasons } => format!("PARTIAL: {}", reasons.join("; ")),
        Confidence::Diverged { entries_agreed, difference } => {
            format!("NOT EXACT: the model differs from PyTorch after {entries_agreed} entries: {difference}")
        }
        Confidence::Unverified => {
            "unverified: not a PyTorch snapshot, so there is no recording to compare with".to_owned()
        }
    };
    let settled = |row: &&AdviceRow| row.current || row.recommended;
    match advice.tried.iter().filter(settled).any(|row| row.stable == Some(false)) {
        true => format!("{about_model}; some limits above the smallest one fail, or some below it fit"),
        false => about_model,
    }
}

/// How far the answer for other settings can be trusted: it is a prediction.
pub(super) fn prediction(advice: &Advice) -> Option<String> {
    let settings = match &advice.closest {
        Some(closest) => closest,
        None if advice.changes => &advice.recommended,
        None => return None,
    };
    let CheckedPredictions { runs, exact } = advice.predictions;
    let keys = checked_keys(settings);
    Some(match runs {
        0 => format!("no prediction for {keys} has been compared with a real run"),
        _ => format!(
            "predictions for {keys} were compared with {runs} real runs: reserved memory was right to the byte in {exact} of \
             them"
        ),
    })
}

pub(super) fn reason_fact(reason: &AdviceReason, fits: Option<bool>) -> (&'static str, String) {
    let label = if matches!(reason, AdviceReason::Leak { .. }) { "but it leaks" } else { "why not less" };
    let words = match reason {
        AdviceReason::Exhaustion { live_peak_bytes } => {
            let live = in_mebibytes(Some(*live_peak_bytes));
            let words = match fits {
                Some(false) => format!("true exhaustion: peak live bytes are {live}"),
                _ => format!("of the smallest limit, {live} are live bytes at the peak"),
            };
            format!("{words}, and no allocator needs less (see `oomph techniques`)")
        }
        AdviceReason::Leak { bytes_per_step, grower } => {
            let by = grower.as_ref().map(|grower| format!(", most of it {}", grower_name(grower))).unwrap_or_default();
            format!("{} per step{by}: settings only delay the OOM (see `oomph leaks`)", Bytes(*bytes_per_step as u64))
        }
        AdviceReason::LargeRequest { requested_bytes, event, site } => {
            let site = site.as_ref().map(|site| format!(" at {site}")).unwrap_or_default();
            format!("one request asks for a large part of it: {}{site} (event {event})", Bytes(*requested_bytes))
        }
        AdviceReason::SideStream { stranded_bytes, requested_bytes } => format!(
            "{} are cached for other streams when {} are requested",
            Bytes(*stranded_bytes),
            Bytes(*requested_bytes)
        ),
        AdviceReason::Fragmentation { requested_bytes, kept_back } => format!(
            "fragmentation that no setting avoids: {} requested, {}",
            Bytes(*requested_bytes),
            ooms::in_words(kept_back)
        ),
    };
    (label, words)
}

/// The table: the best rows, those that the answer mentions, and the best of the other allocators.
fn tried(advice: &Advice, top: usize, medium: Medium) -> String {
    let mut table = TextTable::new(&HEADINGS, medium);
    let (settings, others): (Vec<_>, Vec<_>) = advice.tried.iter().partition(|row| row.settings.is_some());
    let (mut left_out, mut folds) = (0, false);
    let is_named = |row: &AdviceRow| row.current || row.recommended || row.closest;
    // Settings with the same figures share a row, except those that the answer mentions.
    let is_one_row = |one: &&AdviceRow, next: &&AdviceRow| {
        medium != Medium::Markdown && !is_named(one) && !is_named(next) && cells(one)[1..] == cells(next)[1..]
    };
    let mut add = |rows: &[&AdviceRow], most: usize| {
        for (place, same) in rows.chunk_by(is_one_row).enumerate() {
            if place >= most && !is_named(same[0]) {
                left_out += same.len();
                continue;
            }
            let mut cells = cells(same[0]);
            if same.len() > 1 {
                let _ = write!(cells[0], " (and {} more)", same.len() - 1);
                folds = true;
            }
            table.row(cells);
        }
    };
    add(&settings, top);
    add(&others, top.div_ceil(3));
    table.fit(&DISPENSABLE);
    let not_shown = format!("Not shown: {left_out} (--top 99 shows all).");
    let legend = said(&[
        (table.shows(1), "Reserved, no limit: compare it with torch.cuda.max_memory_reserved."),
        (true, "Smallest limit: in which everything completes."),
        (table.shows(3), "Smallest device: with context and libraries."),
        (true, "Other allocators cannot be selected through PyTorch's settings."),
        (folds, "Settings with the same figures share a row; --format csv names them."),
        (left_out > 0, &not_shown),
    ]);
    table.finish(&legend, [])
}

pub(super) fn cells(row: &AdviceRow) -> [String; 7] {
    let needed = match row.status {
        ThresholdStatus::Found => in_mebibytes(row.needed_bytes),
        ThresholdStatus::NeverFits => "never fits".to_owned(),
        _ => "not tried".to_owned(),
    };
    let mark = match (row.recommended, row.closest, row.current) {
        (true, _, true) => "keep",
        (true, _, false) => "recommended",
        (false, true, true) => "now, closest",
        (false, true, false) => "closest",
        (false, false, true) => "now",
        (false, false, false) => "",
    };
    let fits = match row.fits {
        Some(true) => "yes",
        Some(false) => "NO",
        None if row.depends_on_limit => "depends",
        None => "",
    };
    [
        row.shown(),
        maybe_bytes(row.uncapped_reserved_bytes),
        needed,
        in_mebibytes(row.needed_card_bytes),
        row.driver_without_launches_ns.map_or_else(String::new, |nanos| Nanos(nanos).to_string()),
        fits.to_owned(),
        mark.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pytorch::{Release, ReleaseSpan, export_line, variable_note};
    use crate::{
        answer::{
            advise::checked_predictions,
            holders::{GroupBy, Grower},
        },
        base::MIB,
        trace::torch::{HistoryGap, ProcessLimit},
    };

    fn shown(advice: &Advice, top: usize, medium: Medium) -> String {
        AdviceReport { advices: vec![advice.clone()], top }.text(medium)
    }

    fn row(settings: Option<&str>, needed_mib: u64) -> AdviceRow {
        AdviceRow {
            settings: settings.map(str::to_owned),
            strategy: settings.map_or("bfc".to_owned(), |settings| format!("caching:{settings}")),
            status: ThresholdStatus::Found,
            needed_bytes: Some(needed_mib * MIB),
            needed_card_bytes: Some((needed_mib + 594) * MIB),
            uncapped_reserved_bytes: Some(9000 * MIB),
            driver_without_launches_ns: Some(4_000_000),
            ..AdviceRow::default()
        }
    }

    fn sample() -> Advice {
        let mut best = row(Some("expandable_segments:True"), 6184);
        best.recommended = true;
        let mut now = row(Some(""), 6820);
        now.current = true;
        Advice {
            source: "run.pickle".to_owned(),
            recommended: "expandable_segments:True".to_owned(),
            changes: true,
            export: Some(export_line("expandable_segments:True", Some(ReleaseSpan::only(Release::new(10))))),
            export_note: Some(variable_note(Some(ReleaseSpan::only(Release::new(10)))).to_owned()),
            needed_now_bytes: now.needed_bytes,
            needed_bytes: best.needed_bytes,
            saved_bytes: 636 * MIB,
            uncapped_reserved_now_bytes: Some(9000 * MIB),
            uncapped_reserved_bytes: Some(6600 * MIB),
            predictions: checked_predictions("expandable_segments:True"),
            live_peak_bytes: 6006 * MIB,
            driver_without_launches_now_ns: Some(4_000_000),
            driver_without_launches_ns: Some(4_500_000),
            confidence: Confidence::Exact { entries: 55169, blocks_before: 0 },
            tried: vec![best, row(None, 6400), now, row(Some("max_split_size_mb:32"), 7000)],
            ..Advice::default()
        }
    }

    #[test]
    fn line_to_paste_comes_first() {
        insta::assert_snapshot!(shown(&sample(), 1, Medium::PIPE), @"
        run.pickle: another setting needs less memory. Paste this before you start the program:

            export PYTORCH_ALLOC_CONF=expandable_segments:True

          variable       PYTORCH_ALLOC_CONF is for PyTorch 2.10 and later, as recorded. The deprecated PYTORCH_CUDA_ALLOC_CONF wins if both are set: unset it
          reserved       falls from 8.79 GiB to 6.45 GiB without a limit (torch.cuda.max_memory_reserved)
          smallest limit 6,184 MiB instead of 6,820 MiB: 636 MiB less (9.3 %)
          driver time    4.50 ms instead of 4.00 ms: 500 us more in total
          how sure       EXACT for the recorded run: the model matches PyTorch in all 55,169 entries
          prediction     predictions for expandable_segments were compared with 8 real runs: reserved memory was right to the byte in 8 of them

        ─────────────────────────────────────────────────────────────────────────────────────────────
         settings                   reserved,    smallest    smallest    driver   fits
                                    no limit        limit      device      time
        ═════════════════════════════════════════════════════════════════════════════════════════════
         expandable_segments:True   8.79 GiB    6,184 MiB   6,778 MiB   4.00 ms          recommended
         (defaults)                 8.79 GiB    6,820 MiB   7,414 MiB   4.00 ms                  now
         another allocator: bfc     8.79 GiB    6,400 MiB   6,994 MiB   4.00 ms
        ─────────────────────────────────────────────────────────────────────────────────────────────
        Reserved, no limit: compare it with torch.cuda.max_memory_reserved. Smallest limit: in which everything completes. Smallest device: with context and libraries. Other allocators cannot be selected through PyTorch's settings. Not shown: 1 (--top 99 shows all).
        ");
    }

    #[test]
    fn reasons_are_explained() {
        let mut nothing = sample();
        let grower = Grower {
            by: GroupBy::Size,
            name: (48 * MIB).to_string().into(),
            bytes_before: 0,
            bytes_after: 480 * MIB,
            blocks_before: 0,
            blocks_after: 10,
            bytes_per_step: 48.0 * MIB as f64,
        };
        (nothing.changes, nothing.export, nothing.fits) = (false, None, Some(false));
        nothing.limit_bytes = Some(6000 * MIB);
        nothing.reasons = vec![
            AdviceReason::Leak { bytes_per_step: 64.0 * MIB as f64, grower: Some(grower) },
            AdviceReason::Exhaustion { live_peak_bytes: 6006 * MIB },
            AdviceReason::LargeRequest { requested_bytes: 2048 * MIB, event: 7, site: None },
            AdviceReason::SideStream { stranded_bytes: 100 * MIB, requested_bytes: 80 * MIB },
        ];
        let text = shown(&nothing, 1, Medium::PIPE);
        for words in [
            "run.pickle: no setting helps",
            "6,000 MiB for the allocator: too little",
            "but it leaks   64.0 MiB per step, most of it blocks of 48.0 MiB",
            "true exhaustion: peak live bytes are 6,006 MiB",
            "one request asks for a large part of it: 2.00 GiB (event 7)",
            "100 MiB are cached for other streams when 80.0 MiB are requested",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn csv_has_a_line_for_everything_tried() {
        let report = AdviceReport { advices: vec![sample()], top: 1 };
        let csv = report.csv().unwrap();
        assert_eq!(csv.lines().count(), 5, "{csv}");
        assert!(csv.lines().all(|line| line.split(',').count() == 17), "{csv}");
        let json = report.json();
        let answer = &json["rows"][0];
        assert_eq!(
            (answer["recommended"].as_str(), answer["saved_bytes"].as_u64()),
            (Some("expandable_segments:True"), Some(636 * MIB))
        );
        assert_eq!(answer["confidence"]["verdict"], "exact");
    }

    #[test]
    fn markdown_has_the_line_in_a_block() {
        let text = shown(&sample(), 4, Medium::Markdown);
        assert!(text.contains("```sh\nexport PYTORCH_ALLOC_CONF=expandable_segments:True\n```"), "{text}");
        assert!(text.contains("| another allocator: bfc"), "{text}");
    }

    /// Advice to change the settings, as `advise` gives it.
    fn advised() -> Advice {
        Advice {
            source: "run.pickle".to_owned(),
            recommended: "expandable_segments:True".to_owned(),
            changes: true,
            export: Some("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned()),
            needed_now_bytes: Some(6820 * MIB),
            needed_bytes: Some(6184 * MIB),
            saved_bytes: 636 * MIB,
            ..Advice::default()
        }
    }

    #[test]
    fn recording_with_an_oom_says_how_it_failed() {
        let end = FinalOom {
            requested_bytes: 700 * MIB,
            site: Some("torch/nn/linear.py:7 forward from train.py:45 <module>".into()),
            allocated_bytes: 6300 * MIB,
            reserved_bytes: 6600 * MIB,
            device_free_bytes: 200 * MIB,
            room_bytes: Some(6800 * MIB),
            own_limit: None,
            holders: vec![MemoryHolder { site: "model.py:3 f".into(), blocks: 24, bytes: 2048 * MIB }],
        };
        let limit_bytes = end.room_bytes;
        let died = Advice { dead_end: Some(end.clone()), limit_bytes, fits: Some(true), ..advised() };
        let text = shown(&died, 1, Medium::PIPE);
        let said: Vec<&str> = text.lines().take(9).map(str::trim_end).collect();
        insta::assert_snapshot!(said.join("\n"), @"
        run.pickle: it ran out of memory; another setting avoids this OOM. Paste this before you start the program:

            export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

          OOM            700 MiB requested at torch/nn/linear.py:7 forward from train.py:45 <module>; 6.15 GiB allocated, 300 MiB cached in pieces that are too small, 200 MiB free on the device
          held by        2.00 GiB in 24 blocks: model.py:3 f
          smallest limit 6,184 MiB instead of 6,820 MiB: 636 MiB less (9.3 %), up to the OOM
          available      6,800 MiB for the allocator: enough with this setting, too little with the current ones
          after that     not in the recording; 616 MiB (9.1 %) are left for it. 93 % of the memory was allocated: settings alone may not be enough (see `oomph techniques`, or use a smaller batch)
        ");
        let leak = AdviceReason::Leak { bytes_per_step: 1e9, grower: None };
        let leaky = shown(&Advice { reasons: vec![leak], ..died.clone() }, 1, Medium::PIPE);
        assert!(leaky.starts_with("run.pickle: it ran out of memory because it leaks; fix the leak."), "{leaky}");
        let kept = Advice { changes: false, export: None, ..died.clone() };
        let headline = |fits| headline(&Advice { fits, ..kept.clone() });
        assert!(headline(Some(true)).contains("in this much memory the current settings avoid this OOM"));
        assert!(headline(Some(false)).ends_with("no setting helps"));
    }

    /// An OOM that the program's own limit caused.
    fn died_of_its_limit() -> Advice {
        let range = ProcessLimit { at_least_bytes: 6600 * MIB, below_bytes: 7300 * MIB };
        let end = FinalOom {
            requested_bytes: 700 * MIB,
            allocated_bytes: 6300 * MIB,
            reserved_bytes: 6600 * MIB,
            device_free_bytes: 131 << 30,
            own_limit: Some(range),
            ..FinalOom::default()
        };
        let limit = RecordedLimit { range, inferred: true, ..RecordedLimit::given(range.at_least_bytes) };
        Advice { dead_end: Some(end), recorded_limit: Some(limit), limit_bytes: Some(6600 * MIB), ..advised() }
    }

    #[test]
    fn own_limit_is_named_first() {
        let died = Advice { fits: Some(true), ..died_of_its_limit() };
        let text = shown(&died, 1, Medium::PIPE);
        let first = "run.pickle: your own memory limit refused this request: the GPU had 131 GiB free; raise or remove \
                     the limit. With the limit, another setting avoids this OOM. Paste this before you start the program:";
        assert_eq!(text.lines().next(), Some(first));
        let limit = "set_per_process_memory_fraction), between 6600 and 7300 MiB";
        assert!(text.contains(limit), "{text}");
        let depends = Advice { depends_on_limit: true, ..died_of_its_limit() };
        let text = shown(&depends, 1, Medium::PIPE);
        assert!(text.contains("avoids this OOM only if the limit is at least 6,184 MiB"), "{text}");
        let closest = Some("expandable_segments:True".to_owned());
        let unlikely = Advice { changes: false, export: None, closest: closest.clone(), ..depends };
        let text = shown(&unlikely, 1, Medium::PIPE);
        let words = "no setting helps unless the limit is at least 6,184 MiB, which expandable_segments:True needs";
        assert!(text.lines().next().unwrap().ends_with(words), "{text}");
        let none = Advice { fits: Some(false), changes: false, export: None, closest, ..died_of_its_limit() };
        let text = shown(&none, 1, Medium::PIPE);
        let words = "With the limit, no setting is enough; expandable_segments:True comes closest, with 6,184 MiB";
        assert!(text.lines().next().unwrap().ends_with(words), "{text}");
    }

    #[test]
    fn no_history_is_no_answer() {
        let gap =
            Advice { history_gap: Some(HistoryGap::NoRequests), source: "run.pickle".to_owned(), ..Advice::default() };
        let text = shown(&gap, 1, Medium::PIPE);
        assert!(text.starts_with("run.pickle: cannot tell: it has no history of requests"), "{text}");
        assert!(text.contains("oomph record") && text.lines().count() == 1, "{text}");
    }

    #[test]
    fn insufficient_settings_are_not_recommended() {
        let mut best = row(Some("expandable_segments:True"), 6184);
        (best.closest, best.fits) = (true, Some(false));
        let mut maybe = row(Some("max_split_size_mb:32"), 7000);
        maybe.depends_on_limit = true;
        let cells = [cells(&best), cells(&maybe)];
        assert_eq!((&*cells[0][5], &*cells[0][6]), ("NO", "closest"));
        assert_eq!((&*cells[1][5], &*cells[1][6]), ("depends", ""));
    }

    #[test]
    fn predictions_say_how_often_they_were_checked() {
        let words = |settings: &str| {
            let recommended = settings.to_owned();
            prediction(&Advice { recommended, predictions: checked_predictions(settings), changes: true, ..advised() })
        };
        let checked = "predictions for expandable_segments were compared with 8 real runs: reserved memory was right to \
                       the byte in 8 of them";
        assert_eq!(words("expandable_segments:True").as_deref(), Some(checked));
        let unchecked = "no prediction for large_segment_size_mb has been compared with a real run";
        assert_eq!(words("large_segment_size_mb:64").as_deref(), Some(unchecked));
    }
}
