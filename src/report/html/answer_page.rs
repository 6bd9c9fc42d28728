//! The pages of answers: `--export-html` of `advise`, `leaks` and `threshold`. Those of `inspect`, `rehearse` and `fits` are in
//! [`need_page`](super::need_page).
//!
//! The first section says what ran out or what is needed, why, what to do, and how sure that is. The evidence follows. The
//! sentences are those of the terminal.

use std::{collections::BTreeSet, fmt::Write as _};

use super::{
    super::{
        LeakAnswer, LeakReport, ReportError, advice, leaks,
        render::{capitalised, counted, in_mebibytes, signed_bytes},
        thresholds,
    },
    Pictures, assemble,
    chart_data::{ChartData, LeakChart, kib},
    element::{BarPart, Cell, HtmlTable, PageSection, against, chart, code, escape, folded, no_case},
    environment, memory,
    need_page::held_section,
    out_of_memory::{address_section, map_section},
    page_context::{CollectedRuns, PageContext, PageRun, moment},
};
use crate::{
    answer::{
        advise::{Advice, AdviceRow},
        holders::{GroupBy, Grower, HeldMemory},
        leaks::{Finding, Quantity, StepUse, UnjudgedSource, Verdict, growth},
        threshold::{ThresholdDetail, ThresholdRecord},
    },
    base::Bytes,
    measure::{CaseRecord, OomReport, Status},
    strategy::StrategySpec,
};

/// The first screen: the answer in one sentence, and a card for each question of the reader.
pub(super) struct AnswerScreen {
    /// The answer, as text.
    pub(super) headline: String,
    /// Question, and answer as HTML.
    pub(super) cards: Vec<(&'static str, String)>,
    /// What follows the cards, as HTML.
    pub(super) below: String,
}

impl AnswerScreen {
    /// The section; of several answers, each has its subject as a heading. `many` is what the subjects are.
    pub(super) fn section(screens: Vec<(String, AnswerScreen)>, many: &str) -> PageSection {
        let one = screens.len() == 1;
        let mut body = String::new();
        for (source, screen) in &screens {
            if !one {
                let _ = writeln!(body, "<h3>{}: {}</h3>", escape(source), escape(&screen.headline));
            }
            body.push_str("<div class=\"answer-cards\">\n");
            for (question, answer) in &screen.cards {
                let class = if *question == WHAT_TO_DO { " do" } else { "" };
                let _ = writeln!(body, "<div class=\"card{class}\"><h3>{question}</h3>{answer}</div>");
            }
            let _ = writeln!(body, "</div>\n{}", screen.below);
        }
        let finding = match &screens[..] {
            [(_, screen)] => escape(&screen.headline).into_owned(),
            several => format!("Answers for {}", counted(several.len(), many, many)),
        };
        PageSection { id: "overview", subject: "Answer", finding, body }
    }
}

pub(super) const WHAT_TO_DO: &str = "What to do?";
pub(super) const HOW_SURE: &str = "How sure is that?";
pub(super) const WHY: &str = "Why?";

/// A paragraph of text that begins with a capital letter.
pub(super) fn paragraph(text: &str) -> String {
    format!("<p>{}</p>", escape(&capitalised(text)))
}

/// The same, with the words before the first colon in bold.
fn with_bold_cause(text: &str) -> String {
    match text.split_once(": ") {
        Some((cause, rest)) => format!("<p><b>{}.</b> {}</p>", escape(&capitalised(cause)), escape(&capitalised(rest))),
        None => paragraph(text),
    }
}

/// A line to paste into a shell; the script adds a button that copies it.
pub(super) fn to_paste(line: &str) -> String {
    format!("<pre class=\"paste\"><code>{}</code></pre>", escape(line))
}

/// Label and value of each fact, as a list.
pub(super) fn fact_list(facts: &[(&'static str, String)]) -> String {
    let rows = facts.iter().map(|(label, value)| format!("<dt>{}</dt><dd>{}</dd>\n", escape(label), escape(value)));
    format!("<dl class=\"facts-list\">\n{}</dl>\n", rows.collect::<String>())
}

/// A page about one run in memory. `build` adds the sections; that of the environment is last.
pub(super) fn page_of(
    run: PageRun,
    build: impl FnOnce(&PageContext<'_>, &mut ChartData) -> Result<Vec<PageSection>, ReportError>,
) -> Result<String, ReportError> {
    let runs = [run];
    let collected = CollectedRuns::new(&runs);
    let context = PageContext::new(&collected);
    let mut chart_data = ChartData::new(&context.strategies);
    let mut sections = build(&context, &mut chart_data)?;
    sections.push(environment(&collected));
    assemble(&runs, &sections, &chart_data)
}

/// Timelines and memory maps of all cases.
pub(super) fn pictures(context: &PageContext<'_>, chart_data: &mut ChartData) -> Result<Vec<PageSection>, ReportError> {
    let drawn: BTreeSet<String> = context.runs.records.iter().map(|record| record.case_id.clone()).collect();
    let mut pictures = Pictures::default();
    for place in 0..context.groups.len() {
        pictures.add(context, place, &drawn)?;
    }
    let mut sections = Vec::new();
    for (place, chart) in &mut pictures.timelines {
        let group = &context.groups[*place];
        chart.headline = ends(&group.records);
        chart.sentence = "Grey is live memory: no allocator needs less.".to_owned();
        if let Some(limit) = group.scenario.limit_bytes {
            let _ = write!(chart.sentence, " The allocator may take {}.", Bytes(limit));
        }
    }
    if let Some((_, first)) = pictures.timelines.first() {
        let label = format!("Memory over time: {}", first.title);
        let mut body = chart("timeline", 0, &escape(&first.title), &first.sentence, &label);
        let shown: BTreeSet<usize> = pictures.timelines.iter().map(|(place, _)| *place).collect();
        body.push_str(&folded(&memory::as_table(context, &shown)));
        sections.push(PageSection { id: "memory", subject: "Over time", finding: first.headline.clone(), body });
    }
    chart_data.timelines = pictures.timelines.into_iter().map(|(_, chart)| chart).collect();
    if let Some((section, maps)) = map_section(context, pictures.mapped) {
        sections.push(section);
        chart_data.maps = maps;
    }
    if let Some(section) = address_section(context, &pictures.addresses) {
        sections.push(section);
        chart_data.addresses = pictures.addresses;
    }
    Ok(sections)
}

/// How each case ended, in one sentence.
fn ends(records: &[&CaseRecord]) -> String {
    let end = |record: &&CaseRecord| {
        let name = code(&record.strategy);
        let reserved = record.peak_reserved_bytes.map_or_else(String::new, |bytes| format!(" {}", Bytes(bytes)));
        match record.status {
            Status::Oom => format!("{name} runs out of memory ({})", escape(&moment(record))),
            // Whether the program would complete is not in a recording that ends early.
            Status::Completed => format!("{name} serves the whole recording and reserves{reserved} at most"),
            _ => format!("{name}: {}", escape(&record.reason)),
        }
    };
    records.iter().map(end).collect::<Vec<_>>().join("; ")
}

/// The page of `oomph advise`. The cases of the run are replays with the current and the recommended settings; `held` is what
/// each program held.
pub fn advice_page(advices: &[Advice], held: &[Option<HeldMemory>], run: PageRun) -> Result<String, ReportError> {
    page_of(run, |context, chart_data| {
        let screens = advices.iter().map(|advice| (advice.source.clone(), advice_screen(context, advice)));
        let mut sections = vec![AnswerScreen::section(screens.collect(), "sources")];
        sections.extend(pictures(context, chart_data)?);
        let known: Vec<(&str, &HeldMemory)> = advices
            .iter()
            .zip(held)
            .filter_map(|(advice, held)| Some((advice.source.as_str(), held.as_ref()?)))
            .collect();
        sections.extend(held_section(&known, chart_data));
        sections.extend(settings_section(advices));
        sections.push(details_section(advices));
        Ok(sections)
    })
}

fn advice_screen(context: &PageContext<'_>, advice: &Advice) -> AnswerScreen {
    let replayed = first_oom(context, advice);
    let mut cards = Vec::new();
    match &advice.dead_end {
        Some(end) => {
            let request = format!("<p><b>A request for {} of GPU memory failed.</b></p>", Bytes(end.requested_bytes));
            cards.push(("What ran out?", request + &paragraph(&advice::failure(end))));
        }
        None if advice.history_gap.is_none() => {
            let mut words = paragraph(&format!("Smallest limit: {}", advice::memory(advice)));
            words.extend(advice::available(advice).map(|words| paragraph(&words)));
            cards.push(("How much is needed?", words));
        }
        None => {}
    }
    let mut action = match &advice.export {
        Some(line) => format!("<p>Paste this before you start the program:</p>{}", to_paste(line)),
        None => paragraph(&advice::headline(advice)),
    };
    action.extend(advice.export_note.as_ref().map(|note| format!("<p class=\"note\">{}</p>", escape(note))));
    if advice.history_gap.is_none() {
        cards.push((WHY, with_bold_cause(&advice::cause(advice, replayed.as_ref()))));
        if let Some(end) = &advice.dead_end {
            let _ = write!(action, "<p>What the program does next is {}.</p>", escape(&advice::beyond(advice, end)));
        }
    }
    cards.push((WHAT_TO_DO, action));
    let mut sure = paragraph(&advice::confidence(advice));
    sure.extend(advice::prediction(advice).map(|words| paragraph(&words)));
    cards.push((HOW_SURE, sure));
    let mut named: Vec<&AdviceRow> =
        advice.tried.iter().filter(|row| row.current || row.recommended || row.closest).collect();
    named.sort_by_key(|row| !row.current);
    let below = if named.is_empty() { String::new() } else { settings_table(advice, &named, "Now and with the fix") };
    AnswerScreen { headline: capitalised(&advice::headline(advice)), cards, below }
}

/// The first request that fails in the replay with the current settings.
fn first_oom(context: &PageContext<'_>, advice: &Advice) -> Option<OomReport> {
    let is_now = |record: &&CaseRecord| record.workload == advice.source && record.strategy.starts_with("now: ");
    let record = context.runs.records.iter().find(is_now)?;
    context.runs.detail(&record.case_id).ok()??.ooms.first().cloned()
}

/// A bar for each setting that was tried, against the memory that there is.
fn settings_section(advices: &[Advice]) -> Option<PageSection> {
    let mut body = String::new();
    for advice in advices.iter().filter(|advice| !advice.tried.is_empty()) {
        if advices.len() > 1 {
            let _ = writeln!(body, "<h3>{}</h3>", escape(&advice.source));
        }
        let mut rows: Vec<&AdviceRow> = advice.tried.iter().collect();
        // Settings come before other allocators.
        rows.sort_by_key(|row| row.settings.is_none());
        body.push_str(&settings_table(advice, &rows, &format!("Settings that were tried: {}", advice.source)));
    }
    if body.is_empty() {
        return None;
    }
    body.push_str(
        "<p class=\"note\">Needed: the smallest limit in which the recording completes. Reserved if memory is enough: compare it with \
         <code>torch.cuda.max_memory_reserved</code>. Other allocators cannot be selected through PyTorch's settings.</p>\n",
    );
    let tried: usize = advices.iter().map(|advice| advice.tried.len()).sum();
    let fitting = advices.iter().flat_map(|advice| &advice.tried).filter(|row| row.fits == Some(true)).count();
    let finding = match advices.iter().any(|advice| advice.limit_bytes.is_some()) {
        true => format!("{fitting} of {} fit in the memory that there is", counted(tried, "candidate", "candidates")),
        false => format!("{} were tried", counted(tried, "candidate", "candidates")),
    };
    Some(PageSection { id: "settings", subject: "Settings tried", finding, body })
}

fn settings_table(advice: &Advice, rows: &[&AdviceRow], caption: &str) -> String {
    let most = rows.iter().filter_map(|row| row.needed_bytes).chain(advice.limit_bytes).max().unwrap_or(1);
    let bar = |row: &AdviceRow| {
        let Some(needed) = row.needed_bytes else { return String::new() };
        let live = advice.live_peak_bytes.min(needed);
        let parts = [
            BarPart { class: "live", bytes: live, meaning: "live" },
            BarPart { class: "cached", bytes: needed - live, meaning: "lost" },
        ];
        against(&parts, most, advice.limit_bytes.map(|limit| (limit, "there is")))
    };
    let left = |row: &AdviceRow| match (advice.limit_bytes, row.needed_bytes) {
        (Some(limit), Some(needed)) if needed > limit => {
            let short = in_mebibytes(Some(needed - limit));
            Cell::html(format!("<span class=\"oom\">{short} too little</span>"), limit as f64 - needed as f64)
                .with_class("number")
        }
        (Some(limit), Some(needed)) => {
            Cell::number(format!("{} left", in_mebibytes(Some(limit - needed))), limit - needed)
        }
        _ => Cell::empty(),
    };
    let cell = |row: &AdviceRow, place: usize| advice::cells(row)[place].clone();
    let name = |row: &AdviceRow| {
        let mark = cell(row, 6);
        let badge = if mark.is_empty() { String::new() } else { format!(" <b class=\"badge\">{mark}</b>") };
        Cell::html(format!("{}{badge}", super::element::breakable(&row.shown())), row.shown())
    };
    let mut table = HtmlTable::of(rows)
        .words("settings", "settings", |row| name(row))
        .words("memory needed", "bar", |row| Cell::html(bar(row), row.needed_bytes.unwrap_or(0)).with_class("wide"))
        .numbers("needed", "needed_bytes", |row| Cell::number(cell(row, 2), row.needed_bytes.unwrap_or(0)));
    if advice.limit_bytes.is_some() {
        table = table.numbers("headroom", "left_bytes", |row| left(row));
    }
    let table = table
        .numbers("smallest card, with context", "needed_card_bytes", |row| {
            Cell::number(cell(row, 3), row.needed_card_bytes.unwrap_or(0))
        })
        .numbers("reserved if memory is enough", "uncapped_reserved_bytes", |row| {
            Cell::number(in_mebibytes(row.uncapped_reserved_bytes), row.uncapped_reserved_bytes.unwrap_or(0))
        })
        .numbers("driver time in all", "driver_without_launches_ns", |row| Cell::nanos(row.driver_without_launches_ns))
        .html(caption, no_case);
    bar_legend(advice) + &table
}

/// What the parts of the bars are.
fn bar_legend(advice: &Advice) -> String {
    let limit = advice.limit_bytes.map_or_else(String::new, |limit| {
        format!("<li><i class=\"mark\"></i>available: {}</li>", in_mebibytes(Some(limit)))
    });
    let request = if advice.dead_end.is_some() { ", with the request that failed" } else { "" };
    format!(
        "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"live\"></i>live at the peak{request}</li><li><i \
         class=\"cached\"></i>lost to the allocator</li>{limit}</ul>\n"
    )
}

/// Everything that the terminal says.
fn details_section(advices: &[Advice]) -> PageSection {
    let mut body = String::new();
    for advice in advices {
        if advices.len() > 1 {
            let _ = writeln!(body, "<h3>{}</h3>", escape(&advice.source));
        }
        body.push_str(&fact_list(&advice::facts(advice)));
    }
    PageSection { id: "details", subject: "Details", finding: "All facts of the answer".to_owned(), body }
}

/// The page of `oomph leaks`. `strategy` is the allocator of the replay.
pub fn leaks_page(report: &LeakReport, strategy: &str, run: PageRun) -> Result<String, ReportError> {
    page_of(run, |_, chart_data| {
        chart_data.strategies = vec![strategy.to_owned()];
        let screens = report.findings.iter().map(|answer| match answer {
            LeakAnswer::Judged(finding) => (finding.source.clone(), leak_screen(finding)),
            LeakAnswer::Unjudged(unjudged) => (unjudged.source.clone(), unjudged_screen(unjudged)),
        });
        let mut sections = vec![AnswerScreen::section(screens.collect(), "sources")];
        let findings: Vec<&Finding> = report.findings.iter().filter_map(LeakAnswer::finding).collect();
        sections.extend(growth_section(&findings, chart_data));
        sections.extend(grower_section(&findings));
        sections.extend(step_section(&findings));
        Ok(sections)
    })
}

fn unjudged_screen(unjudged: &UnjudgedSource) -> AnswerScreen {
    AnswerScreen {
        headline: format!("Cannot tell: {}", unjudged.reason),
        cards: vec![(WHAT_TO_DO, paragraph(unjudged.doubt.remedy()))],
        below: String::new(),
    }
}

fn leak_screen(finding: &Finding) -> AnswerScreen {
    let facts = leaks::facts(finding);
    let of = |labels: &[&str]| -> String {
        let chosen = facts.iter().filter(|(label, _)| labels.contains(label));
        chosen.map(|(label, value)| paragraph(&format!("{label}: {value}"))).collect()
    };
    let growth = leaks::growth_words(finding);
    let grows = format!("<p><b>{}</b></p>{}", escape(&growth), of(&["left behind", "freed late", "baseline", "kept"]));
    let mut cards = vec![("What grows?", grows)];
    if !finding.growers.is_empty() {
        let grower = |grower: &Grower| {
            let (name, bytes) = (code(&leaks::grower_name(grower)), signed_bytes(grower.bytes_per_step));
            format!("<p>{name}: {bytes} per step, {} to {} blocks</p>", grower.blocks_before, grower.blocks_after)
        };
        let mut holders: String = finding.growers.iter().take(NAMED_GROWERS).map(grower).collect();
        if finding.growers.iter().any(|grower| grower.by == GroupBy::Size) {
            holders.push_str(&paragraph(leaks::WITHOUT_STACKS));
        }
        cards.push(("Who holds it?", holders));
    }
    let end = of(&["OOM", "will run out"]);
    if !end.is_empty() {
        cards.push(("When does memory run out?", end));
    }
    let action = match finding.verdict {
        Verdict::Leak => "<p>Find what keeps these blocks alive, and drop it before the next step.</p>",
        Verdict::Steady => "<p>Nothing: memory does not grow.</p>",
        _ => "",
    };
    cards.push((WHAT_TO_DO, action.to_owned() + &of(&["help", "recoverable"])));
    let sure = paragraph(&leaks::interval(finding)) + &of(&["judged", "left out", "reserved"]);
    cards.push((HOW_SURE, sure));
    AnswerScreen { headline: capitalised(&leaks::verdict(finding)), cards, below: String::new() }
}

/// The growers in the first screen.
const NAMED_GROWERS: usize = 3;

fn growth_section(findings: &[&Finding], chart_data: &mut ChartData) -> Option<PageSection> {
    chart_data.leaks = findings.iter().filter_map(|finding| leak_chart(finding)).collect();
    let first = chart_data.leaks.first()?;
    let label = format!("What steps keep: {}", first.title);
    let body = chart("leak", 0, &escape(&first.title), &first.sentence, &label);
    Some(PageSection { id: "growth", subject: "Growth", finding: first.headline.clone(), body })
}

/// The memory of every step, and the line that was fitted to the judged ones.
fn leak_chart(finding: &Finding) -> Option<LeakChart> {
    let judged =
        finding.per_step.get(finding.first_step..=finding.last_step.min(finding.per_step.len().checked_sub(1)?))?;
    let level = |step: &StepUse| match finding.quantity {
        Quantity::KeptBytes => step.kept_bytes as f64,
        // What is stuck is not drawn; reserved memory grows with it.
        Quantity::StuckBytes | Quantity::ReservedBytes => step.reserved_bytes as f64,
    };
    let series: Vec<f64> = judged.iter().map(level).collect();
    let trend = growth::Trend::of(&series)?;
    let number = |step: &StepUse| u32::try_from(step.step).unwrap_or(u32::MAX);
    let first = number(judged.first()?);
    let reach = finding.capacity_bytes.map(|capacity| capacity as f64).filter(|&capacity| {
        // A line that falls, or begins above the capacity, does not reach it.
        trend.slope > 0.0 && capacity > trend.start
    });
    Some(LeakChart {
        title: finding.source.clone(),
        headline: escape(&capitalised(&leaks::verdict(finding))).into_owned(),
        sentence: escape(&capitalised(&leaks::slope(finding))).into_owned(),
        strategy: 0,
        steps: finding.per_step.iter().map(number).collect(),
        kept: finding.per_step.iter().map(|step| kib(step.kept_bytes)).collect(),
        reserved: finding.per_step.iter().map(|step| kib(step.reserved_bytes)).collect(),
        reserved_at_end: true,
        fit: (first, trend.start / 1024.0, trend.slope / 1024.0),
        limit: finding.capacity_bytes.map(kib),
        reach: reach.map(|capacity| u64::from(first) + ((capacity - trend.start) / trend.slope).ceil() as u64),
    })
}

/// What grows, with a bar for each.
fn grower_section(findings: &[&Finding]) -> Option<PageSection> {
    let rows: Vec<(&Finding, &Grower)> =
        findings.iter().flat_map(|finding| finding.growers.iter().map(|grower| (*finding, grower))).collect();
    let most = rows.iter().map(|(_, grower)| grower.bytes_per_step as u64).max()?;
    let bar = |grower: &Grower| {
        let part = BarPart { class: "cached", bytes: grower.bytes_per_step as u64, meaning: "per step" };
        against(&[part], most, None)
    };
    let mut table = HtmlTable::of(&rows);
    if findings.len() > 1 {
        table = table.words("source", "source", |(finding, _)| Cell::name(&finding.source));
    }
    let table = table
        .words("what grows", "name", |(_, grower)| {
            Cell::html(code(&leaks::grower_name(grower)), grower.name.raw()).with_class("prose")
        })
        .words("growth", "bar", |(_, grower)| Cell::html(bar(grower), grower.bytes_per_step).with_class("wide"))
        .numbers("per step", "bytes_per_step", |(_, grower)| {
            Cell::number(signed_bytes(grower.bytes_per_step), grower.bytes_per_step.round())
        })
        .numbers("blocks before", "blocks_before", |(_, grower)| Cell::count(grower.blocks_before))
        .numbers("blocks after", "blocks_after", |(_, grower)| Cell::count(grower.blocks_after))
        .numbers("bytes before", "bytes_before", |(_, grower)| Cell::bytes(grower.bytes_before))
        .numbers("bytes after", "bytes_after", |(_, grower)| Cell::bytes(grower.bytes_after));
    let first = rows.first().map(|(_, grower)| leaks::grower_name(grower)).unwrap_or_default();
    let finding = format!("{} grows most", code(&first));
    Some(PageSection { id: "growers", subject: "Who grows", finding, body: table.html("What grows", no_case) })
}

fn step_section(findings: &[&Finding]) -> Option<PageSection> {
    let rows: Vec<(&Finding, &StepUse)> =
        findings.iter().flat_map(|finding| finding.per_step.iter().map(|step| (*finding, step))).collect();
    if rows.is_empty() {
        return None;
    }
    let mut table = HtmlTable::of(&rows);
    if findings.len() > 1 {
        table = table.words("source", "source", |(finding, _)| Cell::name(&finding.source));
    }
    let table = table
        .numbers("step", "step", |(_, step)| Cell::count(step.step as u64))
        .numbers("kept", "kept_bytes", |(_, step)| Cell::bytes(step.kept_bytes))
        .numbers("needed above it", "transient_bytes", |(_, step)| Cell::bytes(step.transient_bytes))
        .numbers("reserved at its end", "reserved_bytes", |(_, step)| Cell::bytes(step.reserved_bytes))
        .numbers("stuck in the cache", "stuck_bytes", |(_, step)| Cell::bytes(step.stuck_bytes))
        .numbers("blocks requested", "born_blocks", |(_, step)| Cell::count(step.born_blocks))
        .numbers("of which temporary", "passing_blocks", |(_, step)| Cell::count(step.passing_blocks));
    let finding = format!("Memory of {}", counted(rows.len(), "step", "steps"));
    Some(PageSection { id: "steps", subject: "Steps", finding, body: table.html("Memory of every step", no_case) })
}

/// The page of `oomph threshold`. The run has the rows.
pub fn threshold_page(details: &[ThresholdDetail], card_bytes: u64, run: PageRun) -> Result<String, ReportError> {
    page_of(run, |context, _| {
        let records: Vec<&ThresholdRecord> = details.iter().map(|detail| &detail.record).collect();
        // A strategy that takes a fixed part of the device is not compared by what it takes.
        let is_compared = |record: &&&ThresholdRecord| {
            record.needed_bytes.is_some() && !StrategySpec::from(record.strategy.as_str()).takes_fixed_part()
        };
        let least = records.iter().filter(is_compared).min_by_key(|record| record.needed_bytes);
        let headline = match least {
            Some(record) => format!(
                "{} is the least memory in which it completes, with {}",
                in_mebibytes(record.needed_bytes),
                record.strategy
            ),
            None => "No memory was enough".to_owned(),
        };
        let need = |record: &&ThresholdRecord| {
            format!("<p>{}: {}</p>", code(&record.strategy), escape(&thresholds::needed(record)))
        };
        let mut cards = vec![("How much is needed?", records.iter().map(need).collect::<String>())];
        if let Some(live) = records.iter().filter_map(|record| record.live_peak_bytes).max() {
            let words = format!(
                "At the peak {} are live: no allocator needs less. The rest of a bar is lost to the allocator",
                Bytes(live)
            );
            cards.push((WHY, paragraph(&words)));
        }
        if let Some(record) = least {
            let card = in_mebibytes(record.needed_card_bytes);
            cards.push((
                WHAT_TO_DO,
                paragraph(&format!(
                    "With {}, a card needs at least {card}, context and libraries included",
                    record.strategy
                )),
            ));
        }
        let rounds = details.iter().map(|detail| (detail.record.limit_enforcer, detail.record.repeat));
        let mut sure = paragraph(&thresholds::cap_legend(rounds));
        let unstable = records.iter().filter(|record| record.stable == Some(false)).count();
        sure.push_str(&match unstable {
            0 => paragraph("All limits that were tried around the answers agree"),
            some => paragraph(&format!("Not all limits around the answers agree, for {some} of {}", records.len())),
        });
        cards.push((HOW_SURE, sure));
        let notes = details.iter().flat_map(thresholds::notes);
        let notes: String = notes.map(|note| format!("<li>{}</li>\n", escape(&note))).collect();
        let bars = threshold_bars(context, &records, card_bytes);
        let below = format!("{bars}<h3>What fails with less</h3>\n<ul class=\"notes\">\n{notes}</ul>\n");
        let source = records.first().map_or_else(String::new, |record| record.workload.clone());
        Ok(vec![AnswerScreen::section(vec![(source, AnswerScreen { headline, cards, below })], "sources")])
    })
}

/// From this factor on, the card would make the bars too short to compare.
const FAR: u64 = 3;

fn threshold_bars(context: &PageContext<'_>, records: &[&ThresholdRecord], card_bytes: u64) -> String {
    let most = records.iter().filter_map(|record| record.needed_card_bytes.or(record.needed_bytes)).max().unwrap_or(1);
    let mark = (card_bytes <= most.saturating_mul(FAR)).then_some((card_bytes, "the card"));
    let whole = mark.map_or(most, |(card, _)| card.max(most));
    let bar = |record: &ThresholdRecord| {
        let Some(needed) = record.needed_bytes else { return String::new() };
        let live = record.live_peak_bytes.unwrap_or(0).min(needed);
        let card = record.needed_card_bytes.unwrap_or(needed).max(needed);
        let parts = [
            BarPart { class: "live", bytes: live, meaning: "live" },
            BarPart { class: "cached", bytes: needed - live, meaning: "lost" },
            BarPart { class: "pages", bytes: card - needed, meaning: "context and libraries" },
        ];
        against(&parts, whole, mark)
    };
    let table = HtmlTable::of(records)
        .words("strategy", "strategy", |record| context.strategy(&record.strategy))
        .words("smallest device", "bar", |record| {
            Cell::html(bar(record), record.needed_bytes.unwrap_or(0)).with_class("wide")
        })
        .numbers("memory needed", "needed_bytes", |record| {
            Cell::number(thresholds::needed(record), record.needed_bytes.unwrap_or(0))
        })
        .numbers("smallest card, with context", "needed_card_bytes", |record| {
            Cell::number(in_mebibytes(record.needed_card_bytes), record.needed_card_bytes.unwrap_or(0))
        })
        .numbers("peak of live bytes", "live_peak_bytes", |record| Cell::bytes(record.live_peak_bytes))
        .numbers("lost", "lost_share", |record| Cell::percent(record.lost_share))
        .numbers("without a limit", "uncapped_held_bytes", |record| Cell::bytes(record.uncapped_held_bytes));
    let card = match mark {
        Some(_) => "The line is the card.".to_owned(),
        None => format!("The card has {}, which is beyond the end of the bars.", Bytes(card_bytes)),
    };
    format!(
        "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"live\"></i>live at the peak</li><li><i \
         class=\"cached\"></i>lost to the allocator</li><li><i class=\"pages\"></i>context and libraries</li></ul>\n{}<p \
         class=\"note\">Memory needed: what the strategy itself reserves, in whole pages. {card}</p>\n",
        table.html("The smallest memory that is enough", |record| Some(&record.case_id))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        answer::{advise::Confidence, leaks::Doubt, threshold::ThresholdStatus},
        base::MIB,
        trace::torch::FinalOom,
    };

    fn row(settings: &str, needed_mib: u64) -> AdviceRow {
        AdviceRow {
            settings: Some(settings.to_owned()),
            strategy: format!("caching:{settings}"),
            status: ThresholdStatus::Found,
            needed_bytes: Some(needed_mib * MIB),
            ..AdviceRow::default()
        }
    }

    /// A recording that ended with an OOM, and the settings that avoid it.
    fn died() -> Advice {
        let end = FinalOom {
            requested_bytes: 700 * MIB,
            site: Some("<b>.py:7 forward".into()),
            allocated_bytes: 6000 * MIB,
            reserved_bytes: 6600 * MIB,
            device_free_bytes: 200 * MIB,
            room_bytes: Some(6800 * MIB),
            ..FinalOom::default()
        };
        Advice {
            source: "run.pickle".to_owned(),
            recommended: "expandable_segments:True".to_owned(),
            changes: true,
            export: Some("export PYTORCH_ALLOC_CONF=expandable_segments:True".to_owned()),
            needed_now_bytes: Some(6900 * MIB),
            needed_bytes: Some(6184 * MIB),
            saved_bytes: 716 * MIB,
            live_peak_bytes: 6100 * MIB,
            limit_bytes: Some(6800 * MIB),
            fits: Some(true),
            fits_now: Some(false),
            dead_end: Some(end),
            confidence: Confidence::Exact { entries: 20, blocks_before: 0 },
            tried: vec![
                AdviceRow { recommended: true, fits: Some(true), ..row("expandable_segments:True", 6184) },
                AdviceRow { current: true, fits: Some(false), ..row("", 6900) },
            ],
            ..Advice::default()
        }
    }

    /// The first section of a page.
    fn first_section(page: &str) -> &str {
        page.split("<section").nth(1).unwrap()
    }

    #[test]
    fn first_screen_of_advice_names_cause_fix_and_certainty() {
        let page = advice_page(&[died()], &[None], PageRun::default()).unwrap();
        let first = first_section(&page);
        for words in [
            "It ran out of memory; another setting avoids this OOM</h2>",
            "<b>A request for 700 MiB of GPU memory failed.</b>",
            "<b>Fragmentation.</b> 800 MiB were free, more than the 700 MiB requested",
            "<code>export PYTORCH_ALLOC_CONF=expandable_segments:True</code>",
            "EXACT for the recorded run",
            "100 MiB too little",
            "616 MiB left",
            "available: 6,800 MiB",
        ] {
            assert!(first.contains(words), "{words}: {first}");
        }
        assert!(!page.contains("<b>.py"), "names of a file are escaped");
        let now = first.find("(defaults)").unwrap();
        assert!(now < first.rfind("expandable_segments:<wbr>True").unwrap(), "the current settings come first");
    }

    #[test]
    fn exhaustion_is_not_called_fragmentation() {
        let mut full = died();
        full.dead_end.as_mut().unwrap().device_free_bytes = 50 * MIB;
        let page = advice_page(&[full], &[None], PageRun::default()).unwrap();
        let words = "<b>Exhaustion.</b> Only 650 MiB were free, less than the 700 MiB requested";
        assert!(first_section(&page).contains(words), "{}", first_section(&page));
    }

    #[test]
    fn several_answers_have_headings() {
        let other = Advice { source: "other.pickle".to_owned(), ..died() };
        let page = advice_page(&[died(), other], &[None, None], PageRun::default()).unwrap();
        assert!(first_section(&page).contains("Answers for 2 sources"));
        assert!(page.contains("<h3>other.pickle: It ran out of memory"), "{}", first_section(&page));
    }

    #[test]
    fn source_that_cannot_be_judged_says_what_helps() {
        let unjudged = UnjudgedSource {
            source: "run.pickle".to_owned(),
            verdict: Verdict::CannotTell,
            doubt: Doubt::WideInterval,
            reason: "too few steps".to_owned(),
        };
        let report = LeakReport { findings: vec![LeakAnswer::Unjudged(unjudged)], top: 3 };
        let page = leaks_page(&report, "caching", PageRun::default()).unwrap();
        assert!(first_section(&page).contains("Cannot tell: too few steps"), "{}", first_section(&page));
        assert!(first_section(&page).contains(&*escape(&capitalised(Doubt::WideInterval.remedy()))));
    }

    #[test]
    fn fixed_part_is_not_called_the_least() {
        let detail = |strategy: &str, needed_mib: u64| ThresholdDetail {
            record: ThresholdRecord {
                workload: "w".to_owned(),
                strategy: strategy.to_owned(),
                status: ThresholdStatus::Found,
                needed_bytes: Some(needed_mib * MIB),
                ..ThresholdRecord::default()
            },
            ..ThresholdDetail::default()
        };
        let fixed = crate::strategy::STRATEGIES
            .iter()
            .map(|entry| entry.name)
            .find(|name| StrategySpec::from(*name).takes_fixed_part())
            .unwrap();
        let page = threshold_page(&[detail(fixed, 10), detail("caching", 20)], 100 * MIB, PageRun::default()).unwrap();
        let first = first_section(&page);
        assert!(first.contains("20 MiB is the least memory in which it completes, with caching"), "{first}");
        assert!(first.contains("The card has 100 MiB, which is beyond the end of the bars."), "{first}");
    }
}
