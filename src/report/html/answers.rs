//! The sections of thresholds, techniques and claims.

use std::{collections::HashMap, fmt::Write as _};

use super::{
    super::{
        render::counted,
        techniques::{changed_numerics, numerics},
        thresholds::status_words,
    },
    element::{BarPart, Cell, HtmlTable, PageSection, code, escape, no_case, stacked},
    overview::tally,
    page_context::PageContext,
};
use crate::answer::{
    claims::{ClaimRecord, ClaimVerdict},
    techniques::TechniqueRecord,
    threshold::ThresholdRecord,
};

/// The smallest memory that is enough, by strategy.
pub(super) fn thresholds(context: &PageContext<'_>) -> Option<PageSection> {
    let rows = context.runs.all(|run| &run.thresholds);
    if rows.is_empty() {
        return None;
    }
    // Bars are scaled to the largest of the workload.
    let mut whole: HashMap<&str, u64> = HashMap::new();
    for row in &rows {
        let longest = whole.entry(&row.workload).or_default();
        *longest = row.needed_bytes.unwrap_or(0).max(*longest);
    }
    let bar = |row: &ThresholdRecord| {
        let whole = whole.get(row.workload.as_str()).copied().unwrap_or(0);
        Cell::html(threshold_bar(row, whole), row.needed_bytes.unwrap_or(0)).with_class("wide")
    };
    let stable = |row: &ThresholdRecord| row.stable.map_or("", |stable| if stable { "yes" } else { "no" });
    let table = HtmlTable::of(&rows)
        .words("workload", "workload", |row| Cell::name(&row.workload))
        .words("strategy", "strategy", |row| context.strategy(&row.strategy))
        .words("memory needed, live part in grey", "bar", |row| bar(row))
        .numbers("memory needed", "needed_bytes", |row| Cell::bytes(row.needed_bytes))
        .numbers("smallest device", "needed_card_bytes", |row| Cell::bytes(row.needed_card_bytes))
        .numbers("live", "live_peak_bytes", |row| Cell::bytes(row.live_peak_bytes))
        .numbers("lost", "lost_share", |row| Cell::share(row.lost_share))
        .words("stable", "stable", |row| Cell::text(stable(row)))
        .words("outcome", "status", |row| Cell::text(&status_words(row.status)));
    let table = table.html("The smallest memory that is enough", |row| Some(&row.case_id));
    let body = format!(
        "{table}<p class=\"note\">Memory needed: what the strategy itself reserves, in whole pages. Smallest device: \
         with context and libraries. Grey: peak of live bytes; the rest of a bar is lost.</p>\n"
    );
    Some(PageSection { id: "thresholds", subject: "Memory needed", finding: threshold_finding(&rows), body })
}

fn threshold_finding(rows: &[&ThresholdRecord]) -> String {
    let best = rows.chunk_by(|a, b| a.workload == b.workload).filter_map(|of_workload| {
        of_workload.iter().filter(|row| row.needed_bytes.is_some()).min_by_key(|row| row.needed_bytes)
    });
    let wins = tally(best.map(|row| row.strategy.as_str()));
    let workloads: usize = wins.iter().map(|(_, count)| count).sum();
    match wins.iter().max_by_key(|(_, count)| *count) {
        Some((name, count)) => format!("{} needs the least memory on {count} of {workloads} workloads", code(name)),
        None => "No memory was enough".to_owned(),
    }
}

fn threshold_bar(row: &ThresholdRecord, whole: u64) -> String {
    let Some(needed) = row.needed_bytes else { return String::new() };
    let live = row.live_peak_bytes.unwrap_or(0).min(needed);
    let parts = [
        BarPart { class: "live", bytes: live, meaning: "live" },
        BarPart { class: "cached", bytes: needed - live, meaning: "lost" },
    ];
    stacked(&parts, whole)
}

/// What techniques save, beside published figures.
pub(super) fn techniques(context: &PageContext<'_>) -> Option<PageSection> {
    let rows = context.runs.all(|run| &run.techniques);
    if rows.is_empty() {
        return None;
    }
    let title = |row: &TechniqueRecord| {
        let html = format!("<span title=\"{0}\">{0}</span>", escape(&row.title));
        Cell::html(html, &row.technique).with_class("prose")
    };
    let range = |row: &TechniqueRecord| {
        let bar = range_bar(published_range(&row.published_memory), saved_percent(row));
        Cell::html(bar, row.allocated_reduction_share.unwrap_or(-1.0)).with_class("wide")
    };
    let table = HtmlTable::of(&rows)
        .words("model", "model", |row| Cell::name(&row.model))
        .words("technique", "technique", |row| title(row))
        .words("numerics", "numerics", |row| Cell::text(numerics(row)))
        .words("saved: published range, measured dot", "range", |row| range(row))
        .numbers("saved", "allocated_reduction_share", |row| Cell::percent(row.allocated_reduction_share))
        .words("published", "published_memory", |row| Cell::text(&row.published_memory))
        .numbers("peak allocated", "peak_allocated_bytes", |row| Cell::bytes(row.peak_allocated_bytes))
        .numbers("peak reserved", "peak_reserved_bytes", |row| Cell::bytes(row.peak_reserved_bytes))
        .numbers("time per step", "step_ns", |row| Cell::nanos(row.step_ns))
        .numbers("time ratio to the base", "step_ratio", |row| Cell::decimal(row.step_ratio, 2))
        .words("published", "published_performance", |row| Cell::text(&row.published_performance))
        .words("best use", "best_use", |row| Cell::text(&row.best_use).with_class("prose"));
    let body = format!(
        "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"published\"></i>published range</li><li><i \
         class=\"dot\"></i>measured here</li></ul>\n{}<p class=\"note\">The axis goes from -20 % to 100 % of the base's \
         peak allocated memory. Published figures are from articles. Numerics: what the technique does to the numbers of \
         the base's training.</p>\n",
        table.html("Memory-saving techniques", no_case)
    );
    Some(PageSection { id: "techniques", subject: "Techniques", finding: technique_finding(&rows), body })
}

fn saved_percent(row: &TechniqueRecord) -> Option<f64> {
    row.allocated_reduction_share.map(|share| share * 100.0)
}

fn technique_finding(rows: &[&TechniqueRecord]) -> String {
    let best = rows.iter().filter_map(|row| Some((saved_percent(row)?, row))).max_by(|a, b| a.0.total_cmp(&b.0));
    let lead = best.map_or_else(String::new, |(saved, row)| {
        format!("{} saves {saved:.0} % on {}{}", escape(&row.title), escape(&row.model), changed_numerics(row))
    });
    let judged: Vec<bool> = rows
        .iter()
        .filter_map(|row| {
            let (low, high) = published_range(&row.published_memory)?;
            Some((low..=high).contains(&saved_percent(row)?))
        })
        .collect();
    let inside = judged.iter().filter(|inside| **inside).count();
    match judged.len() {
        0 => lead,
        all => format!("{lead}; {inside} of {all} savings are in the published range"),
    }
}

/// The first range of percentages in a text: `10-40 %`.
fn published_range(text: &str) -> Option<(f64, f64)> {
    let before = &text[..text.find('%')?];
    let digits = |c: char| c.is_ascii_digit() || c == '-' || c == '.';
    let word = before.trim_end().rsplit(|c: char| !digits(c)).next()?;
    let (low, high) = word.split_once('-')?;
    Some((low.parse().ok()?, high.parse().ok()?))
}

/// A band for the published range and a dot for the measured value, from -20 % to 100 %.
fn range_bar(range: Option<(f64, f64)>, measured: Option<f64>) -> String {
    let place = |percent: f64| ((percent + 20.0) / 1.2).clamp(0.0, 100.0);
    let mut bar = format!("<span class=\"range\"><u style=\"left:{:.1}%\"></u>", place(0.0));
    if let Some((low, high)) = range {
        let _ = write!(
            bar,
            "<i style=\"left:{:.1}%;width:{:.1}%\" title=\"published: {low:.0}-{high:.0} %\"></i>",
            place(low),
            (place(high) - place(low)).max(0.5)
        );
    }
    if let Some(measured) = measured {
        let _ = write!(bar, "<b style=\"left:{:.1}%\" title=\"measured: {measured:.1} %\"></b>", place(measured));
    }
    bar + "</span>"
}

/// The verdicts on published claims.
pub(super) fn claims(context: &PageContext<'_>) -> Option<PageSection> {
    let rows = context.runs.all(|run| &run.claims);
    if rows.is_empty() {
        return None;
    }
    let verdict = |row: &ClaimRecord| {
        let class = match row.verdict {
            ClaimVerdict::Confirmed => "confirmed",
            ClaimVerdict::Depends => "depends",
            ClaimVerdict::Refuted => "refuted",
            ClaimVerdict::NotMeasurable => "unknown",
        };
        let name = row.verdict.name();
        Cell::html(format!("<span class=\"verdict {class}\">{name}</span>"), name)
    };
    let table = HtmlTable::of(&rows)
        .words("claim", "id", |row| Cell::name(&row.id))
        .words("verdict", "verdict", |row| verdict(row))
        .words("statement", "claim", |row| Cell::text(&row.claim).with_class("prose"))
        .words("what happens", "lesson", |row| Cell::text(&row.lesson).with_class("prose"))
        .words("published", "published", |row| Cell::text(&row.published))
        .words("simulated", "simulated", |row| Cell::text(&row.simulated).with_class("prose"))
        .words("on the GPU", "on_device", |row| Cell::text(&row.on_device).with_class("prose"))
        .words("PyTorch", "pytorch", |row| Cell::text(&row.pytorch).with_class("prose"))
        .words("command", "command", |row| Cell::html(code(&row.command), &row.command));
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let (confirmed, refuted) = (count(ClaimVerdict::Confirmed), count(ClaimVerdict::Refuted));
    let all = counted(rows.len(), "claim", "claims");
    let finding = format!("Of {all}, {confirmed} are confirmed and {refuted} refuted");
    let body = table.html("Claims and verdicts", no_case);
    Some(PageSection { id: "claims", subject: "Claims", finding, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_ranges_are_found() {
        assert_eq!(published_range("10-40 %, scales with the reduction"), Some((10.0, 40.0)));
        assert_eq!(published_range("up to 30-50 % per device"), Some((30.0, 50.0)));
        assert_eq!(published_range("about 25-35 %"), Some((25.0, 35.0)));
        for none in ["", "significant latency increase", "half", "50 %", "%"] {
            assert_eq!(published_range(none), None, "{none}");
        }
    }

    #[test]
    fn dot_stays_on_the_axis() {
        let bar = range_bar(Some((0.0, 15.0)), Some(-300.0));
        assert!(bar.contains("<b style=\"left:0.0%\"") && bar.contains("left:16.7%;width:12.5%"), "{bar}");
    }
}
