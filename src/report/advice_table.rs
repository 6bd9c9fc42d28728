//! What `advise` recommends: for people, as JSON, and everything that was tried as CSV.

use std::fmt::Write as _;

use comfy_table::Cell;
use serde_json::json;

use super::{
    Medium, ReportError, dead_end,
    narrow::fit,
    threshold_table::{in_mebibytes, table},
};
use crate::{
    answer::{
        advise::{Advice, AdviceRow, Confidence, Reason},
        leaks::{Grower, GrownBy},
        threshold::ThresholdStatus,
    },
    base::{Bytes, Nanos},
    measure::{SCHEMA, obstacles},
};

const HEADINGS: [&str; 7] =
    ["settings", "memory\nneeded", "smallest\ndevice", "reserved with-\nout a limit", "driver\ntime", "fits", ""];

/// What can best be missed where a terminal is narrow, by place.
const DISPENSABLE: [usize; 3] = [3, 4, 2];

/// The line to paste, what it saves and costs, how sure that is, why nothing helps where nothing does; and the `top` rows
/// of what was tried.
#[must_use]
pub fn advice(advice: &Advice, top: usize, medium: Medium) -> String {
    let mut out = match medium {
        Medium::Terminal(_) => format!("{}: {}\n", advice.source, headline(advice)),
        Medium::Markdown => format!("## {}\n\n{}\n\n", advice.source, headline(advice)),
    };
    if let Some(line) = &advice.export {
        let _ = match medium {
            Medium::Terminal(_) => writeln!(out, "\n    {line}\n"),
            Medium::Markdown => writeln!(out, "```sh\n{line}\n```\n"),
        };
    }
    let mut say = |label: &str, value: String| {
        let _ = match medium {
            Medium::Terminal(_) => writeln!(out, "  {label:<14} {value}"),
            Medium::Markdown => writeln!(out, "- {label}: {value}"),
        };
    };
    if let Some(end) = &advice.dead_end {
        say("it ran out", dead_end::failure(end));
        for holder in &end.holders {
            say("in use by", dead_end::share(holder));
        }
    }
    let up_to = if advice.dead_end.is_some() { ", up to there" } else { "" };
    say("memory needed", format!("{}{up_to}", memory(advice)));
    if let Some(room) = room(advice) {
        say("there is", room);
    }
    if let Some(end) = &advice.dead_end {
        say("after that", dead_end::beyond(advice, end));
    }
    if let Some(then) = advice.driver_ns {
        say("driver time", cost(advice.driver_now_ns.filter(|_| advice.changes), then));
    }
    say("how sure", confidence(advice));
    for reason in &advice.reasons {
        say(reason_label(reason), reason_words(reason, advice.fits));
    }
    if let Some(note) = garbage_collection_note(advice) {
        say("note", note.to_owned());
    }
    let _ = writeln!(out, "\n{}", rows(advice, top, medium));
    out
}

/// `{"schema": 1, "rows": [...]}`, a row a source with all that was tried, in bytes and nanoseconds.
#[must_use]
pub fn advice_json(advices: &[Advice]) -> String {
    format!("{:#}\n", json!({ "schema": SCHEMA, "rows": advices }))
}

/// One line for everything that was tried.
pub fn advice_csv(advices: &[Advice]) -> Result<String, ReportError> {
    let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
    let columns = [
        "source",
        "settings",
        "strategy",
        "current",
        "recommended",
        "status",
        "needed_bytes",
        "device_bytes",
        "uncapped_reserved_bytes",
        "retries_at_need",
        "stable",
        "fits",
        "driver_ns",
        "reason",
    ];
    writer.write_record(columns)?;
    for advice in advices {
        for row in &advice.tried {
            writer.serialize((&advice.source, row))?;
        }
    }
    let bytes = writer.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn headline(advice: &Advice) -> &'static str {
    if advice.dead_end.is_some() {
        return dead_end::headline(advice);
    }
    match (advice.changes, advice.fits) {
        (true, Some(true)) if advice.fits_now == Some(false) => {
            "it runs out of memory now, and does not with another setting. Paste this before you start the program:"
        }
        (true, Some(false)) => "no setting is enough; this one comes nearest:",
        (true, _) => "another setting needs less memory. Paste this before you start the program:",
        (false, Some(false)) => "no setting helps",
        (false, _) => "keep the settings that you have",
    }
}

fn memory(advice: &Advice) -> String {
    let needed = in_mebibytes(advice.needed_bytes);
    match (advice.needed_bytes, advice.needed_now_bytes) {
        (None, _) => "more than the device has".to_owned(),
        (Some(_), Some(now)) if advice.changes => format!(
            "{needed} instead of {}: {} less ({:.1} %)",
            in_mebibytes(Some(now)),
            in_mebibytes(Some(advice.saved_bytes)),
            advice.saved_bytes as f64 / now.max(1) as f64 * 100.0
        ),
        (Some(_), None) => format!("{needed}; the device has too little for the current settings"),
        (Some(_), Some(_)) => {
            format!("{needed}, of which {} are alive at one time", in_mebibytes(Some(advice.live_peak_bytes)))
        }
    }
}

fn room(advice: &Advice) -> Option<String> {
    let limit = advice.limit_bytes?;
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
    let Some(now) = now else { return format!("{} in all", Nanos(then)) };
    let difference = match then.checked_sub(now) {
        Some(more) => format!("{} more", Nanos(more)),
        None => format!("{} less", Nanos(now - then)),
    };
    format!("{} instead of {}: {difference} in all", Nanos(then), Nanos(now))
}

fn confidence(advice: &Advice) -> String {
    let about_model = match &advice.confidence {
        Confidence::Exact { entries, blocks_before: 0 } => {
            format!("EXACT: the model does what PyTorch did in all {entries} entries of this recording")
        }
        Confidence::Exact { entries, blocks_before } => format!(
            "EXACT from the middle: the model does what PyTorch did in all {entries} entries; the {blocks_before} blocks \
             that were there before are asked for first, so holes between them are left out"
        ),
        Confidence::Partial { reasons } => format!("PARTIAL: {}", reasons.join("; ")),
        Confidence::Diverged { entries_agreed, difference } => {
            format!("NOT EXACT: the model does something else after {entries_agreed} entries: {difference}")
        }
        Confidence::Unverified => "not a PyTorch snapshot: there is nothing to hold the model against".to_owned(),
    };
    let settled = |row: &&AdviceRow| row.current || row.recommended;
    match advice.tried.iter().filter(settled).any(|row| row.stable == Some(false)) {
        true => format!("{about_model}; some amounts above the memory needed fail, or some below it fit"),
        false => about_model,
    }
}

fn reason_label(reason: &Reason) -> &'static str {
    match reason {
        Reason::Leak { .. } => "but it leaks",
        _ => "why no less",
    }
}

fn reason_words(reason: &Reason, fits: Option<bool>) -> String {
    match reason {
        Reason::Exhaustion { live_peak_bytes } => {
            let verdict = if fits == Some(false) { "true exhaustion" } else { "nearly all of it is in use" };
            let alive = in_mebibytes(Some(*live_peak_bytes));
            format!("{verdict}: {alive} are alive at one time, and no allocator needs less (see `oomph techniques`)")
        }
        Reason::Leak { bytes_per_step, grower } => {
            let by = grower.as_ref().map(|grower| format!(", most of it {}", name(grower))).unwrap_or_default();
            format!("{} a step{by}: settings only postpone the end (see `oomph leaks`)", Bytes(*bytes_per_step as u64))
        }
        Reason::LargeRequest { requested_bytes, event, site } => {
            let site = site.as_ref().map(|site| format!(" at {site}")).unwrap_or_default();
            format!("one allocation is too large: {}{site} (event {event})", Bytes(*requested_bytes))
        }
        Reason::SideStream { stranded_bytes, requested_bytes } => format!(
            "{} are stranded on other streams when {} are asked for",
            Bytes(*stranded_bytes),
            Bytes(*requested_bytes)
        ),
        Reason::Fragmentation { requested_bytes, kept_back } => format!(
            "fragmentation that no setting avoids: {} asked for, {}",
            Bytes(*requested_bytes),
            obstacles::in_words(kept_back)
        ),
    }
}

fn name(grower: &Grower) -> String {
    match (grower.by, grower.name.parse()) {
        (GrownBy::Size, Ok(size)) => format!("blocks of {}", Bytes(size)),
        _ => grower.name.clone(),
    }
}

fn garbage_collection_note(advice: &Advice) -> Option<&'static str> {
    let collects = advice.changes && advice.recommended.contains("garbage_collection_threshold");
    collects.then_some(
        "PyTorch looks at garbage_collection_threshold only where torch.cuda.set_per_process_memory_fraction was called",
    )
}

/// The table: the best rows, those that the answer speaks of, and the best of the other allocators.
fn rows(advice: &Advice, top: usize, medium: Medium) -> String {
    let mut shown = table(&HEADINGS, medium);
    let (settings, others): (Vec<_>, Vec<_>) = advice.tried.iter().partition(|row| row.settings.is_some());
    let mut left_out = 0;
    let mut add = |rows: &[&AdviceRow], most: usize| {
        for (place, row) in rows.iter().enumerate() {
            if place < most || row.current || row.recommended {
                shown.add_row(cells(row));
            } else {
                left_out += 1;
            }
        }
    };
    add(&settings, top);
    add(&others, top.div_ceil(3));
    let gap = if medium == Medium::Markdown { "\n" } else { "" };
    let mut more = if left_out > 0 { format!(" Left out: {left_out} (--top 99 shows all).") } else { String::new() };
    if let Medium::Terminal(width) = medium
        && let Some(said) = fit(&mut shown, width, &DISPENSABLE)
    {
        more.push_str(&format!("\n{said}"));
    }
    format!(
        "{}\n{gap}Memory needed: the least in which all of it completes. Smallest device: with the context and libraries. \
         Other allocators are no line to paste.{more}\n",
        shown.trim_fmt()
    )
}

fn cells(row: &AdviceRow) -> Vec<Cell> {
    let name = match row.settings.as_deref() {
        Some("") => "(defaults)".to_owned(),
        Some(settings) => settings.to_owned(),
        None => format!("another allocator: {}", row.strategy),
    };
    let needed = match row.status {
        ThresholdStatus::Found => in_mebibytes(row.needed_bytes),
        ThresholdStatus::NeverFits => "never fits".to_owned(),
        _ => "not tried".to_owned(),
    };
    let mark = match (row.recommended, row.current) {
        (true, true) => "keep",
        (true, false) => "recommended",
        (false, true) => "now",
        (false, false) => "",
    };
    [
        name,
        needed,
        in_mebibytes(row.device_bytes),
        row.uncapped_reserved_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string()),
        row.driver_ns.map_or_else(String::new, |nanos| Nanos(nanos).to_string()),
        row.fits.map_or("", |fits| if fits { "yes" } else { "NO" }).to_owned(),
        mark.to_owned(),
    ]
    .map(Cell::new_owned)
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::MIB;

    fn row(settings: Option<&str>, needed_mib: u64) -> AdviceRow {
        AdviceRow {
            settings: settings.map(str::to_owned),
            strategy: settings.map_or("bfc".to_owned(), |settings| format!("caching:{settings}")),
            status: ThresholdStatus::Found,
            needed_bytes: Some(needed_mib * MIB),
            device_bytes: Some((needed_mib + 594) * MIB),
            uncapped_reserved_bytes: Some(9000 * MIB),
            driver_ns: Some(4_000_000),
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
            export: Some("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned()),
            needed_now_bytes: now.needed_bytes,
            needed_bytes: best.needed_bytes,
            saved_bytes: 636 * MIB,
            live_peak_bytes: 6006 * MIB,
            driver_now_ns: Some(4_000_000),
            driver_ns: Some(4_500_000),
            confidence: Confidence::Exact { entries: 55169, blocks_before: 0 },
            tried: vec![best, row(None, 6400), now, row(Some("max_split_size_mb:32"), 7000)],
            ..Advice::default()
        }
    }

    #[test]
    fn the_line_to_paste_comes_first_and_then_what_it_is_worth() {
        insta::assert_snapshot!(advice(&sample(), 1, Medium::Terminal(None)), @"
        run.pickle: another setting needs less memory. Paste this before you start the program:

            export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

          memory needed  6,184 MiB instead of 6,820 MiB: 636 MiB less (9.3 %)
          driver time    4.50 ms instead of 4.00 ms: 500 us more in all
          how sure       EXACT: the model does what PyTorch did in all 55169 entries of this recording

        ──────────────────────────────────────────────────────────────────────────────────────────────────
         settings                   memory       smallest   reserved with-    driver   fits
                                    needed         device      out a limit      time
        ══════════════════════════════════════════════════════════════════════════════════════════════════
         expandable_segments:True   6,184 MiB   6,778 MiB         8.79 GiB   4.00 ms          recommended
         (defaults)                 6,820 MiB   7,414 MiB         8.79 GiB   4.00 ms                  now
         another allocator: bfc     6,400 MiB   6,994 MiB         8.79 GiB   4.00 ms
        ──────────────────────────────────────────────────────────────────────────────────────────────────
        Memory needed: the least in which all of it completes. Smallest device: with the context and libraries. Other allocators are no line to paste. Left out: 1 (--top 99 shows all).
        ");
    }

    #[test]
    fn why_nothing_helps_is_said_in_words() {
        let mut nothing = sample();
        let grower = Grower {
            by: GrownBy::Size,
            name: (48 * MIB).to_string(),
            bytes_before: 0,
            bytes_after: 480 * MIB,
            blocks_before: 0,
            blocks_after: 10,
            bytes_per_step: 48.0 * MIB as f64,
        };
        (nothing.changes, nothing.export, nothing.fits) = (false, None, Some(false));
        nothing.limit_bytes = Some(6000 * MIB);
        nothing.reasons = vec![
            Reason::Leak { bytes_per_step: 64.0 * MIB as f64, grower: Some(grower) },
            Reason::Exhaustion { live_peak_bytes: 6006 * MIB },
            Reason::LargeRequest { requested_bytes: 2048 * MIB, event: 7, site: None },
            Reason::SideStream { stranded_bytes: 100 * MIB, requested_bytes: 80 * MIB },
        ];
        let text = advice(&nothing, 1, Medium::Terminal(None));
        for words in [
            "run.pickle: no setting helps",
            "6,000 MiB for the allocator: too little",
            "but it leaks   64.0 MiB a step, most of it blocks of 48.0 MiB",
            "true exhaustion: 6,006 MiB are alive at one time",
            "one allocation is too large: 2.00 GiB (event 7)",
            "100 MiB are stranded on other streams when 80.0 MiB are asked for",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn csv_has_a_line_for_everything_and_json_the_answer() {
        let csv = advice_csv(&[sample()]).unwrap();
        assert_eq!(csv.lines().count(), 5, "{csv}");
        assert!(csv.lines().all(|line| line.split(',').count() == 14), "{csv}");
        let json: serde_json::Value = serde_json::from_str(&advice_json(&[sample()])).unwrap();
        let answer = &json["rows"][0];
        assert_eq!(
            (answer["recommended"].as_str(), answer["saved_bytes"].as_u64()),
            (Some("expandable_segments:True"), Some(636 * MIB))
        );
        assert_eq!(answer["confidence"]["verdict"], "exact");
    }

    #[test]
    fn markdown_has_the_line_in_a_block_of_its_own() {
        let text = advice(&sample(), 4, Medium::Markdown);
        assert!(text.contains("```sh\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n```"), "{text}");
        assert!(text.contains("| another allocator: bfc"), "{text}");
    }
}
