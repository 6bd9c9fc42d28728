//! The sections for what runs of other kinds answer: thresholds, techniques and claims.

use std::fmt::Write as _;

use super::{
    element::{Cell, Column, Part, Section, Table, code, counted, escape, stacked},
    material::Material,
};
use crate::{
    answer::{
        claims::Verdict,
        techniques::TechniqueRecord,
        threshold::{ThresholdRecord, ThresholdStatus},
    },
    base::Nanos,
};

/// The smallest memory that suffices, by strategy.
pub(super) fn thresholds(material: &Material<'_>) -> Option<Section> {
    let rows = material.gathered.thresholds();
    if rows.is_empty() {
        return None;
    }
    let mut table = Table::new(
        "The smallest memory that suffices",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::words("needed, and what is live", "bar"),
            Column::numbers("memory needed", "threshold_bytes"),
            Column::numbers("smallest device", "device_bytes"),
            Column::numbers("live", "live_peak_bytes"),
            Column::numbers("lost", "lost_share"),
            Column::words("stable", "stable"),
            Column::words("outcome", "status"),
        ],
    );
    for of_workload in rows.chunk_by(|a, b| a.workload == b.workload) {
        let whole = of_workload.iter().filter_map(|row| row.threshold_bytes).max().unwrap_or(0);
        for row in of_workload {
            let stable = match row.stable {
                Some(true) => "yes",
                Some(false) => "no",
                None => "",
            };
            table.row_of(
                &row.case_id,
                vec![
                    Cell::name(&row.workload),
                    material.strategy(&row.strategy),
                    Cell::html(threshold_bar(row, whole), row.threshold_bytes.unwrap_or(0)).with_class("wide"),
                    Cell::maybe_bytes(row.threshold_bytes),
                    Cell::maybe_bytes(row.device_bytes),
                    Cell::maybe_bytes(row.live_peak_bytes),
                    Cell::share(row.lost_share),
                    Cell::text(stable),
                    Cell::text(outcome(row.status)),
                ],
            );
        }
    }
    let body = format!(
        "{}<p class=\"note\">Memory needed is the strategy's own, in whole pages; the smallest device has room for the \
         context and libraries too. Grey is what is live at most, the rest of a bar is lost.</p>\n",
        table.html()
    );
    Some(Section { id: "thresholds", subject: "Memory needed", finding: threshold_finding(&rows), body })
}

const fn outcome(status: ThresholdStatus) -> &'static str {
    match status {
        ThresholdStatus::Found => "found",
        ThresholdStatus::NeverFits => "never fits",
        ThresholdStatus::Skipped => "skipped",
        ThresholdStatus::Interrupted => "interrupted",
        ThresholdStatus::Error => "error",
    }
}

fn threshold_finding(rows: &[&ThresholdRecord]) -> String {
    let mut wins: Vec<(&str, usize)> = Vec::new();
    let mut workloads = 0;
    for of_workload in rows.chunk_by(|a, b| a.workload == b.workload) {
        let best = of_workload.iter().filter(|row| row.threshold_bytes.is_some()).min_by_key(|row| row.threshold_bytes);
        let Some(best) = best else { continue };
        workloads += 1;
        match wins.iter_mut().find(|(name, _)| *name == best.strategy) {
            Some((_, count)) => *count += 1,
            None => wins.push((&best.strategy, 1)),
        }
    }
    match wins.iter().max_by_key(|(_, count)| *count) {
        Some((name, count)) => format!("{} gets by with least on {count} of {workloads} workloads", code(name)),
        None => "No memory was enough".to_owned(),
    }
}

fn threshold_bar(row: &ThresholdRecord, whole: u64) -> String {
    let Some(needed) = row.threshold_bytes else { return String::new() };
    let live = row.live_peak_bytes.unwrap_or(0).min(needed);
    let parts = [
        Part { class: "live", bytes: live, meaning: "live" },
        Part { class: "cached", bytes: needed - live, meaning: "lost" },
    ];
    stacked(&parts, whole)
}

/// What techniques save, beside what is published.
pub(super) fn techniques(material: &Material<'_>) -> Option<Section> {
    let rows = material.gathered.techniques();
    if rows.is_empty() {
        return None;
    }
    let mut table = Table::new(
        "Memory-saving techniques",
        vec![
            Column::words("model", "model"),
            Column::words("technique", "technique"),
            Column::words("saved: published range, measured dot", "range"),
            Column::numbers("saved", "reduction_percent"),
            Column::words("published", "published_memory"),
            Column::numbers("peak allocated", "peak_allocated_bytes"),
            Column::numbers("peak reserved", "peak_reserved_bytes"),
            Column::numbers("a step", "step_ns"),
            Column::numbers("times the base", "step_ratio"),
            Column::words("published", "published_performance"),
            Column::words("best use", "best_use"),
        ],
    );
    let mut judged = [0, 0];
    for row in &rows {
        let range = published_range(&row.published_memory);
        if let (Some((low, high)), Some(saved)) = (range, row.reduction_percent) {
            judged[usize::from((low..=high).contains(&saved))] += 1;
        }
        table.row(vec![
            Cell::name(&row.model),
            Cell::html(format!("<span title=\"{0}\">{0}</span>", escape(&row.title)), &row.technique)
                .with_class("prose"),
            Cell::html(range_bar(range, row.reduction_percent), row.reduction_percent.unwrap_or(-100.0))
                .with_class("wide"),
            row.reduction_percent.map_or_else(Cell::empty, |saved| Cell::number(format!("{saved:.1} %"), saved)),
            Cell::text(&row.published_memory),
            Cell::maybe_bytes(row.peak_allocated_bytes),
            Cell::maybe_bytes(row.peak_reserved_bytes),
            row.step_ns.map_or_else(Cell::empty, |step| Cell::number(Nanos(step).to_string(), step)),
            row.step_ratio.map_or_else(Cell::empty, |ratio| Cell::number(format!("{ratio:.2}"), ratio)),
            Cell::text(&row.published_performance),
            Cell::text(&row.best_use).with_class("prose"),
        ]);
    }
    let body = format!(
        "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"published\"></i>published range</li><li><i \
         class=\"dot\"></i>measured here</li></ul>\n{}<p class=\"note\">The axis reaches from -20 % to 100 % of the base's \
         allocated peak. Published figures are those of articles.</p>\n",
        table.html()
    );
    Some(Section { id: "techniques", subject: "Techniques", finding: technique_finding(&rows, judged), body })
}

fn technique_finding(rows: &[&TechniqueRecord], [outside, inside]: [usize; 2]) -> String {
    let best = rows.iter().filter_map(|row| Some((row.reduction_percent?, row))).max_by(|a, b| a.0.total_cmp(&b.0));
    let lead = best.map_or_else(String::new, |(saved, row)| {
        format!("{} saves {saved:.0} % on {}", escape(&row.title), escape(&row.model))
    });
    match inside + outside {
        0 => lead,
        all => format!("{lead}; {inside} of {all} savings lie in the range that is published"),
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

/// A band for what is published and a dot for what was measured, from -20 % to 100 %.
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

/// What became of published claims.
pub(super) fn claims(material: &Material<'_>) -> Option<Section> {
    let rows = material.gathered.claims();
    if rows.is_empty() {
        return None;
    }
    let mut table = Table::new(
        "Claims and verdicts",
        vec![
            Column::words("claim", "id"),
            Column::words("verdict", "verdict"),
            Column::words("what is said", "claim"),
            Column::words("what happens", "lesson"),
            Column::words("published", "published"),
            Column::words("simulated", "simulated"),
            Column::words("on the GPU", "on_device"),
            Column::words("PyTorch", "pytorch"),
            Column::words("see for yourself", "command"),
        ],
    );
    for row in &rows {
        let class = match row.verdict {
            Verdict::Confirmed => "confirmed",
            Verdict::Depends => "depends",
            Verdict::Refuted => "refuted",
            Verdict::NotMeasurable => "unknown",
        };
        let verdict = row.verdict.name();
        table.row(vec![
            Cell::name(&row.id),
            Cell::html(format!("<span class=\"verdict {class}\">{verdict}</span>"), verdict),
            Cell::text(&row.claim).with_class("prose"),
            Cell::text(&row.lesson).with_class("prose"),
            Cell::text(&row.published),
            Cell::text(&row.simulated).with_class("prose"),
            Cell::text(&row.on_device).with_class("prose"),
            Cell::text(&row.pytorch).with_class("prose"),
            Cell::html(code(&row.command), &row.command),
        ]);
    }
    let refuted = rows.iter().filter(|row| row.verdict == Verdict::Refuted).count();
    let confirmed = rows.iter().filter(|row| row.verdict == Verdict::Confirmed).count();
    let finding = format!("Of {}, {confirmed} hold and {refuted} do not", counted(rows.len(), "claim", "claims"));
    Some(Section { id: "claims", subject: "Claims", finding, body: table.html() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_ranges_are_found_in_their_sentences() {
        assert_eq!(published_range("10-40 %, scales with the reduction"), Some((10.0, 40.0)));
        assert_eq!(published_range("up to 30-50 % per device"), Some((30.0, 50.0)));
        assert_eq!(published_range("about 25-35 %"), Some((25.0, 35.0)));
        for none in ["", "significant latency increase", "half", "50 %", "%"] {
            assert_eq!(published_range(none), None, "{none}");
        }
    }

    #[test]
    fn a_dot_beyond_the_axis_stays_on_it() {
        let bar = range_bar(Some((0.0, 15.0)), Some(-300.0));
        assert!(bar.contains("<b style=\"left:0.0%\"") && bar.contains("left:16.7%;width:12.5%"), "{bar}");
    }
}
