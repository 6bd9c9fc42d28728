//! Thresholds, techniques and claims: their answers on the first screen and their sections.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
};

use serde::Serialize;

use super::{
    super::{
        render::{counted, distinct},
        scenario::FamilyFigures,
        techniques::{changed_numerics, numerics},
        thresholds::status_words,
    },
    chart_data::{ChartData, kib},
    element::{BarPart, Cell, HtmlTable, PageSection, code, escape, listed, no_case, stacked},
    first_screen::{
        Answer, EXPANDABLE, FirstChart, StripChart, StripDot, StripRow, StripUnit, TEN, WorkloadList, id_pattern,
        is_fixed, left_out, place_chart, question, short, strip_caption, times,
    },
    page_context::PageContext,
};
use crate::{
    answer::{
        claims::{ClaimRecord, ClaimVerdict},
        techniques::{BASE, TechniqueRecord},
        threshold::ThresholdRecord,
    },
    base::Bytes,
};

/// How much memory suffices, over what is alive; `None` without thresholds.
pub(super) fn threshold_answer(context: &PageContext<'_>, data: &mut ChartData) -> Option<Answer> {
    let rows = context.runs.all(|run| &run.thresholds);
    let suite = &rows.first()?.suite;
    let mut workloads = WorkloadList::default();
    let mut strips: BTreeMap<&str, StripRow> = BTreeMap::new();
    for row in rows.iter().filter(|row| !is_fixed(&row.strategy)) {
        let strip = strips.entry(&row.strategy).or_default();
        strip.strategy = context.place(&row.strategy);
        let (Some(needed), Some(live @ 1..)) = (row.needed_bytes, row.live_peak_bytes) else {
            strip.failed += 1;
            continue;
        };
        let place = workloads.place(&row.workload, &id_pattern(&row.case_id, &row.strategy));
        let card = row.needed_card_bytes.map_or_else(String::new, |card| format!("; a card of {}", Bytes(card)));
        let note = format!("{} for {} live{card}", Bytes(needed), Bytes(live));
        strip.dots.push(StripDot(place, short(needed as f64 / live as f64), note, None));
    }
    let mut strips: Vec<(&str, StripRow)> = strips.into_iter().collect();
    let count = workloads.all.len();
    for (_, strip) in strips.iter_mut().filter(|_| count > 1) {
        let figures = FamilyFigures::of(strip.dots.iter().map(|dot| dot.1).collect());
        strip.median = figures.median;
        (strip.interval, strip.p90) = (figures.interval, figures.p90);
    }
    let decisive = |row: &StripRow| row.p90.or_else(|| Some(row.dots.first()?.1)).unwrap_or(f64::INFINITY);
    strips.sort_by(|one, other| decisive(&one.1).total_cmp(&decisive(&other.1)));
    let sentence =
        threshold_sentence(&strips.iter().map(|(name, row)| (*name, decisive(row))).collect::<Vec<_>>(), count);
    // Of a few workloads the dots say all.
    for (_, strip) in strips.iter_mut().filter(|_| count < TEN) {
        (strip.interval, strip.p90) = (None, None);
    }
    let chart = StripChart {
        axis: "memory needed ÷ peak of live bytes (log)".to_owned(),
        unit: StripUnit::Times,
        time_axis: String::new(),
        workloads: workloads.all,
        rows: strips.into_iter().map(|(_, strip)| strip).collect(),
    };
    let caption = strip_caption(count, (count, "workloads")) + &left_out(rows.iter().map(|row| row.strategy.as_str()));
    let question = question(context.runs.runs, suite, "How much memory does each strategy need?");
    let picture = place_chart(data, FirstChart::Strips(chart), "Memory needed over live bytes, by strategy");
    Some(Answer { question, sentence, picture, caption, ..Answer::default() })
}

/// The strategies that need the least, and PyTorch's allocator. The search has no driver time, so none of them is the answer alone.
fn threshold_sentence(decisive: &[(&str, f64)], workloads: usize) -> String {
    let known: Vec<&(&str, f64)> = decisive.iter().filter(|(_, ratio)| ratio.is_finite()).collect();
    let place = match workloads {
        1 => String::new(),
        count if count < TEN => format!("On all {count} workloads, "),
        _ => "On nine in ten workloads, ".to_owned(),
    };
    let shown =
        known.iter().enumerate().filter(|(place, (name, _))| *place < BEST_NAMED || ALWAYS_NAMED.contains(name));
    let words: Vec<String> = shown.map(|(_, (name, ratio))| format!("{} {}", code(name), times(*ratio))).collect();
    match words.is_empty() {
        true => "No memory was enough.".to_owned(),
        false => format!("{place}the memory needed over the peak of live bytes is at most: {}.", listed(&words)),
    }
}

/// The strategies that a sentence about thresholds names.
const BEST_NAMED: usize = 3;
/// What PyTorch users have: named wherever they stand.
const ALWAYS_NAMED: [&str; 2] = ["caching", EXPANDABLE];

/// Memory against time of a step, for each model.
#[derive(Debug, Default, Serialize)]
pub(super) struct TechniqueChart {
    models: Vec<TechniqueModel>,
}

#[derive(Debug, Default, Serialize)]
struct TechniqueModel {
    name: String,
    /// The answer for it, as HTML.
    sentence: String,
    dots: Vec<TechniqueDot>,
}

#[derive(Debug, Default, Serialize)]
struct TechniqueDot {
    id: String,
    title: String,
    /// Peak reserved, in KiB.
    reserved: u64,
    /// The same as a share of the base's.
    memory: f64,
    /// Of a step, as a multiple of the base's, with its 95 % interval.
    time: f64,
    interval: Option<(f64, f64)>,
    /// What it does to the numbers; empty where that was not recorded.
    numerics: &'static str,
    /// Whether the device computes less in a step than in the base's.
    less_work: bool,
    /// Of allocated memory, in percent.
    saved: Option<f64>,
    published: Option<(f64, f64)>,
    /// That fits in 24 GiB.
    #[serde(skip)]
    largest_batch: Option<u64>,
}

/// Techniques that give a part of the arithmetic of a step to other devices.
const DIVIDED: [&str; 3] = ["tensor_parallel", "sequence_parallel", "pipeline"];

impl TechniqueDot {
    /// `None` where memory or time of the row are not known.
    fn of(row: &TechniqueRecord, base: &TechniqueRecord) -> Option<TechniqueDot> {
        let memory = row.peak_reserved_bytes? as f64 / base.peak_reserved_bytes.filter(|bytes| *bytes > 0)? as f64;
        Some(TechniqueDot {
            id: row.technique.clone(),
            title: row.title.clone(),
            reserved: kib(row.peak_reserved_bytes?),
            memory: short(memory),
            time: short(row.step_ratio.filter(|ratio| *ratio > 0.0)?),
            interval: row.step_ratio_low.zip(row.step_ratio_high).map(|(low, high)| (short(low), short(high))),
            numerics: numerics(row),
            less_work: row.batch < base.batch || row.technique.split('+').any(|word| DIVIDED.contains(&word)),
            saved: saved_percent(row).map(short),
            published: published_range(&row.published_memory),
            largest_batch: row.largest_batch_24gib,
        })
    }
}

/// What techniques save and cost; `None` without techniques.
pub(super) fn technique_answer(context: &PageContext<'_>, data: &mut ChartData) -> Option<Answer> {
    let rows = context.runs.all(|run| &run.techniques);
    let models: Vec<TechniqueModel> = distinct(rows.iter().map(|row| row.model.as_str()))
        .into_iter()
        .filter_map(|name| {
            let of_model = || rows.iter().copied().filter(|row| row.model == name);
            let base = of_model().find(|row| row.technique == BASE)?;
            let dots: Vec<TechniqueDot> = of_model().filter_map(|row| TechniqueDot::of(row, base)).collect();
            (dots.len() > 1).then(|| TechniqueModel {
                name: name.to_owned(),
                sentence: technique_sentence(name, &dots),
                dots,
            })
        })
        .collect();
    let first = models.first()?;
    let sentence = first.sentence.clone();
    let unknown = first.dots.iter().all(|dot| dot.numerics.is_empty());
    let front = match unknown {
        true => "of those that compute all of a step",
        false => "of those that compute all of a step and keep the training result",
    };
    let base = rows.iter().find(|row| row.model == first.name && row.technique == BASE);
    let base = base.map_or_else(String::new, |row| format!("{}, batch {}. ", escape(&row.title), row.batch));
    let caption = format!(
        "{base}Mark: one technique; down and left is better. Green line: no other technique is better in both, {front}. At the right, allocated memory, not reserved: a filled dot is inside the published band, a hollow one outside."
    );
    let chart = FirstChart::Techniques(TechniqueChart { models });
    let picture = place_chart(data, chart, "Memory of techniques against the time of a step");
    let question = question(context.runs.runs, "techniques", "Which technique saves memory, and at what cost?");
    Some(Answer { question, sentence, picture, caption, ..Answer::default() })
}

/// The most saved without and with an effect on the numbers.
fn technique_sentence(model: &str, dots: &[TechniqueDot]) -> String {
    let best = |effect: &str| {
        let whole = dots.iter().filter(|dot| !dot.less_work && dot.numerics == effect);
        whole.filter(|dot| dot.memory < 1.0).min_by(|one, other| one.memory.total_cmp(&other.memory))
    };
    let words = |dot: &TechniqueDot| {
        let time = match dot.time {
            ..0.995 => format!("a step is {} as fast", times(1.0 / dot.time)),
            1.005.. => format!("a step takes {} as long", times(dot.time)),
            _ => "a step takes as long".to_owned(),
        };
        format!("{} saves {:.0} % of reserved memory, and {time}", code(&dot.id), (1.0 - dot.memory) * 100.0)
    };
    let found: Vec<String> = [("same", "with the same numerics"), ("rounding", "with changed rounding"), ("", "")]
        .into_iter()
        .filter_map(|(effect, meaning)| Some(format!("{meaning} {}", words(best(effect)?)).trim().to_owned()))
        .collect();
    let base = dots.iter().find(|dot| dot.id == BASE).and_then(|dot| dot.largest_batch);
    let chosen = ["rounding", "same", ""].into_iter().find_map(best);
    let batch = match (base, chosen.and_then(|dot| Some((dot, dot.largest_batch?)))) {
        (Some(base), Some((dot, batch))) => {
            format!(". In 24 GiB the largest batch is {base} in the base and {batch} with {}", code(&dot.id))
        }
        _ => String::new(),
    };
    match found.is_empty() {
        true => format!("No technique saves memory on {} with all of the work of a step.", code(model)),
        false => format!("On {}, {}{batch}.", code(model), found.join("; ")),
    }
}

/// The verdicts in the order of the bar, with their classes.
const VERDICTS: [(ClaimVerdict, &str); 4] = [
    (ClaimVerdict::Confirmed, "confirmed"),
    (ClaimVerdict::Depends, "depends"),
    (ClaimVerdict::Refuted, "refuted"),
    (ClaimVerdict::NotMeasurable, "unknown"),
];

fn verdict_class(verdict: ClaimVerdict) -> &'static str {
    VERDICTS.iter().find(|(known, _)| *known == verdict).map_or("unknown", |(_, class)| class)
}

/// Cards of claims on the first screen; the table has all.
const MOST_CARDS: usize = 6;

/// Which claims are true; `None` without claims.
pub(super) fn claim_answer(context: &PageContext<'_>) -> Option<Answer> {
    let rows = context.runs.all(|run| &run.claims);
    if rows.is_empty() {
        return None;
    }
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let mut bar = String::new();
    let mut words = Vec::new();
    for (verdict, class) in VERDICTS {
        let many = count(verdict);
        if many == 0 {
            continue;
        }
        let name = verdict.name();
        let _ = write!(bar, "<li class=\"{class}\" style=\"flex-grow:{many}\"><b>{many}</b> <span>{name}</span></li>");
        words.push(match verdict {
            ClaimVerdict::Confirmed => format!("{many} are confirmed"),
            ClaimVerdict::Depends => format!("{many} depend on the program"),
            ClaimVerdict::Refuted => format!("{many} are refuted"),
            ClaimVerdict::NotMeasurable => format!("{many} cannot be measured here"),
        });
    }
    let picture = format!("<ul class=\"verdicts\" aria-label=\"Verdicts on {} claims\">{bar}</ul>\n", rows.len());
    let mut wrong: Vec<&&ClaimRecord> = rows.iter().filter(|row| row.verdict == ClaimVerdict::Refuted).collect();
    wrong.extend(rows.iter().filter(|row| row.verdict == ClaimVerdict::Depends));
    let cards: String = wrong.iter().take(MOST_CARDS).map(|row| claim_card(row)).collect();
    let more = format!("<div class=\"cards claims\">\n{cards}</div>\n");
    let sentence = format!("Of {}, {}.", counted(rows.len(), "published claim", "published claims"), listed(&words));
    let caption = format!(
        "A part of the bar is as wide as its number of claims. Below: the first {} that are refuted or depend on the program; <a \
         href=\"#claims\">the table</a> has all.",
        wrong.len().min(MOST_CARDS)
    );
    let question = question(context.runs.runs, "claims", "Which published claims are true?");
    Some(Answer { question, sentence, picture, caption, more, ..Answer::default() })
}

/// A claim, who states it, what happens, and what was measured: by PyTorch if it was asked, then on the GPU, then simulated.
fn claim_card(row: &ClaimRecord) -> String {
    let measured = [(&row.pytorch, "PyTorch"), (&row.on_device, "GPU"), (&row.simulated, "simulated")];
    let numbers = match measured.into_iter().find(|(text, _)| !text.is_empty()) {
        Some((text, place)) => {
            format!("<p class=\"measured\" title=\"{0}\"><b>{place}:</b> {0}</p>", escape(text))
        }
        None => String::new(),
    };
    let source = match row.stated_by.as_str() {
        "" => String::new(),
        by => format!("<p class=\"source\">Stated by {}</p>", escape(by)),
    };
    format!(
        "<div class=\"card claim\"><h3>{} <span class=\"verdict {}\">{}</span></h3><p class=\"stated\">{}</p>{source}<p \
         class=\"measured\">{}</p>{numbers}</div>\n",
        code(&row.id),
        verdict_class(row.verdict),
        row.verdict.name(),
        escape(&row.claim),
        escape(&row.lesson)
    )
}

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
    let found = rows.iter().filter(|row| row.needed_bytes.is_some()).count();
    let workloads = distinct(rows.iter().map(|row| row.workload.as_str())).len();
    format!("The smallest memory that is enough: {found} found on {}", counted(workloads, "workload", "workloads"))
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
        .words("saved: published range, dot in this run", "range", |row| range(row))
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
         class=\"dot\"></i>in this run</li></ul>\n{}<p class=\"note\">The axis goes from -20 % to 100 % of the base's \
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

/// The first range of percentages in a text: `10-40 %`. A share of activations is not one of all memory.
fn published_range(text: &str) -> Option<(f64, f64)> {
    if text.contains("of activation") {
        return None;
    }
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
        let (class, name) = (verdict_class(row.verdict), row.verdict.name());
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
        for none in ["", "40-60 % of activation memory", "significant latency increase", "half", "50 %", "%"] {
            assert_eq!(published_range(none), None, "{none}");
        }
    }

    #[test]
    fn less_work_and_other_training_are_no_answer() {
        let dot = |id: &str, memory, numerics, less_work| TechniqueDot {
            id: id.to_owned(),
            memory,
            time: 1.5,
            numerics,
            less_work,
            largest_batch: Some(if id == "amp" { 32 } else { 16 }),
            ..TechniqueDot::default()
        };
        let dots = vec![
            dot("base", 1.0, "same", false),
            dot("half_batch", 0.1, "training", true),
            dot("pipeline", 0.2, "same", true),
            dot("ckpt", 0.6, "same", false),
            dot("amp", 0.5, "rounding", false),
            dot("sgd", 0.3, "training", false),
        ];
        assert_eq!(
            technique_sentence("gpt", &dots),
            "On <code>gpt</code>, with the same numerics <code>ckpt</code> saves 40 % of reserved memory, and a step takes 1.50 \
             times as long; with changed rounding <code>amp</code> saves 50 % of reserved memory, and a step takes 1.50 times as long. \
             In 24 GiB the largest batch is 16 in the base and 32 with <code>amp</code>."
        );
    }

    #[test]
    fn smaller_batch_is_less_work() {
        let row = |technique: &str, batch| TechniqueRecord {
            technique: technique.to_owned(),
            batch,
            peak_reserved_bytes: Some(1 << 30),
            step_ratio: Some(1.0),
            ..TechniqueRecord::default()
        };
        let base = row("base", 8);
        let less = |technique, batch| TechniqueDot::of(&row(technique, batch), &base).unwrap().less_work;
        assert!(less("half_batch", 4) && less("pipeline", 8) && less("amp+pipeline", 8));
        assert!(!less("accum4", 8) && !less("zero3", 8));
        assert!(TechniqueDot::of(&TechniqueRecord { step_ratio: None, ..base.clone() }, &base).is_none());
    }

    #[test]
    fn dot_stays_on_the_axis() {
        let bar = range_bar(Some((0.0, 15.0)), Some(-300.0));
        assert!(bar.contains("<b style=\"left:0.0%\"") && bar.contains("left:16.7%;width:12.5%"), "{bar}");
    }
}
