//! The pages of answers about need: `--export-html` of `inspect`, `rehearse` and `fits`; and who holds memory, as a flame graph.

use std::fmt::Write as _;

use super::{
    super::{
        RehearsalReport, ReportError, WITHOUT_STACKS, advice, fits, rehearsals,
        render::{capitalised, counted, distinct, maybe_bytes},
    },
    answer_page::{AnswerScreen, HOW_SURE, WHAT_TO_DO, WHY, page_of, paragraph, pictures, to_paste},
    chart_data::{ChartData, FlameChart, FlameNode, kib},
    element::{
        BarPart, Cell, HtmlTable, PageSection, against, breakable, chart, code, escape, folded, no_case, percent,
    },
    first_screen::{RulerChart, place_ruler},
    page_context::{PageContext, PageRun},
};
use crate::{
    answer::{
        fits::FitRow,
        holders::{GroupBy, HeldMemory, HeldNode},
    },
    base::Bytes,
    rehearse::record::{RehearsalRecord, RehearsalVerdict},
    trace::{TraceSummary, torch::MemoryHolder},
};

/// A name that holds less than this part of all bytes is drawn with others of its kind.
const LEAST_PART: u64 = 2000;

impl FlameChart {
    fn of(title: &str, held: &HeldMemory) -> FlameChart {
        FlameChart {
            title: title.to_owned(),
            by: match held.by {
                Some(GroupBy::Category | GroupBy::Tag) => "tag",
                Some(GroupBy::Size) => "size",
                Some(GroupBy::Site) | None => "stack",
            },
            total: kib(held.bytes),
            blocks: held.blocks,
            roots: FlameNode::all(&held.roots, held.bytes / LEAST_PART),
        }
    }
}

impl FlameNode {
    /// The nodes of one level; those below `least` bytes become one.
    fn all(nodes: &[HeldNode], least: u64) -> Vec<FlameNode> {
        let (large, small): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.bytes > least);
        let mut drawn: Vec<FlameNode> = large
            .into_iter()
            .map(|node| {
                let below = FlameNode::all(&node.children, least);
                FlameNode(node.name.to_string(), kib(node.bytes), node.blocks, node.is_installed, below)
            })
            .collect();
        let (bytes, blocks) =
            small.iter().fold((0, 0), |(bytes, blocks), node| (bytes + node.bytes, blocks + node.blocks));
        if blocks > 0 {
            let name = format!("{} with less than 0.05 % each", counted(small.len(), "other", "others"));
            drawn.push(FlameNode(name, kib(bytes), blocks, false, Vec::new()));
        }
        drawn
    }
}

/// Who held memory, for each source where that is known.
pub(super) fn held_section(known: &[(&str, &HeldMemory)], chart_data: &mut ChartData) -> Option<PageSection> {
    let mut body = String::new();
    for (source, held) in known.iter().filter(|(_, held)| held.by != Some(GroupBy::Size)) {
        let moment = moment_words(held);
        let words = match held.by {
            Some(GroupBy::Tag) => "A category above its layers; the width is bytes.",
            _ => "Callers above what they call; the width is bytes. The lowest bar of a column requested the memory.",
        };
        let title = format!("{} {moment}", Bytes(held.bytes));
        let label = format!("Who holds memory {moment}: {source}");
        body.push_str(&chart("flame", chart_data.flames.len(), &escape(&title), words, &label));
        chart_data.flames.push(FlameChart::of(source, held));
        body.push_str(&folded(&holder_table(held)));
    }
    let (_, first) = known.iter().find(|(_, held)| held.by != Some(GroupBy::Size))?;
    let finding = top_holder(first).map_or_else(
        || "Who holds memory".to_owned(),
        |(name, bytes)| {
            let share = percent(bytes, first.bytes);
            format!("{} holds {} {}, {share:.0} % of all", code(&name), Bytes(bytes), moment_words(first))
        },
    );
    Some(PageSection { id: "holders", subject: "Who holds memory", finding, body })
}

fn moment_words(held: &HeldMemory) -> &'static str {
    if held.at_failure { "when memory ran out" } else { "at the peak" }
}

/// The call site or category that holds most.
fn top_holder(held: &HeldMemory) -> Option<(String, u64)> {
    let site = held.sites.first().map(|holder| (holder.site.to_string(), holder.bytes));
    site.or_else(|| held.categories.first().map(|&(name, bytes)| (name.to_owned(), bytes)))
}

fn holder_table(held: &HeldMemory) -> String {
    if held.sites.is_empty() {
        return category_table(held);
    }
    let rows: Vec<&MemoryHolder> = held.sites.iter().collect();
    let most = rows.first().map_or(1, |holder| holder.bytes);
    HtmlTable::of(&rows)
        .words("call site", "site", |holder| {
            Cell::html(breakable(&holder.site.to_string()), holder.site.raw()).with_class("prose")
        })
        .words("bytes", "bar", |holder| byte_bar(holder.bytes, most))
        .numbers("bytes", "bytes", |holder| Cell::bytes(holder.bytes))
        .numbers("share", "share", |holder| Cell::percent(Some(holder.bytes as f64 / held.bytes.max(1) as f64)))
        .numbers("blocks", "blocks", |holder| Cell::count(holder.blocks))
        .html("Who holds memory, by call site", no_case)
}

fn byte_bar(bytes: u64, most: u64) -> Cell {
    let part = BarPart { class: "pages", bytes, meaning: "bytes" };
    Cell::html(against(&[part], most, None), bytes).with_class("wide")
}

fn category_table(held: &HeldMemory) -> String {
    let most = held.categories.first().map_or(1, |&(_, bytes)| bytes);
    HtmlTable::of(&held.categories)
        .words("category", "category", |(name, _)| Cell::text(name))
        .words("bytes", "bar", |&(_, bytes)| byte_bar(bytes, most))
        .numbers("bytes", "bytes", |&(_, bytes)| Cell::bytes(bytes))
        .numbers("share", "share", |&(_, bytes)| Cell::percent(Some(bytes as f64 / held.bytes.max(1) as f64)))
        .html("Memory by category", no_case)
}

/// Blocks by size, in bytes.
fn size_section(held: &HeldMemory) -> Option<PageSection> {
    let most = held.sizes.iter().map(|&(_, _, bytes)| bytes).max()?;
    let &(from, blocks, bytes) = held.sizes.iter().max_by_key(|&&(_, _, bytes)| bytes)?;
    let range = |from: u64| format!("{} to {}", Bytes(from), Bytes(from.saturating_mul(2)));
    let table = HtmlTable::of(&held.sizes)
        .words("size of a block", "from", |&(from, ..)| Cell::html(range(from), from))
        .words("bytes", "bar", |&(_, _, bytes)| byte_bar(bytes, most))
        .numbers("bytes", "bytes", |&(_, _, bytes)| Cell::bytes(bytes))
        .numbers("blocks", "blocks", |&(_, blocks, _)| Cell::count(blocks));
    let blocks = counted(blocks as usize, "block", "blocks");
    let finding = format!(
        "{blocks} of {} hold {} {}, {:.0} % of all",
        range(from),
        Bytes(bytes),
        moment_words(held),
        percent(bytes, held.bytes)
    );
    Some(PageSection { id: "sizes", subject: "Sizes", finding, body: table.html("Blocks by size", no_case) })
}

/// What `oomph inspect` knows about a source.
pub struct Inspection<'a> {
    /// Its name.
    pub source: &'a str,
    /// Events, sizes and peaks.
    pub summary: &'a TraceSummary,
    /// What no allocator can go below.
    pub bound_bytes: u64,
    /// What is held at the peak.
    pub held: &'a HeldMemory,
    /// Whether it is a recording.
    pub is_recording: bool,
    /// What the recording does not contain, one sentence each.
    pub missing: &'a [String],
    /// The facts as the terminal shows them.
    pub facts: String,
}

/// The page of `oomph inspect`. The case of the run is a replay.
pub fn inspection_page(inspection: &Inspection<'_>, run: PageRun) -> Result<String, ReportError> {
    page_of(run, |context, chart_data| {
        let Inspection { source, held, .. } = inspection;
        let mut sections = vec![AnswerScreen::section(
            vec![((*source).to_owned(), inspection_screen(context, inspection))],
            "sources",
        )];
        sections.extend(pictures(context, chart_data)?);
        // The curve comes first, then who holds memory, then the map.
        let place = sections.iter().position(|section| section.id == "map").unwrap_or(sections.len());
        let holders = held_section(&[(source, held)], chart_data);
        sections.splice(place..place, holders.into_iter().chain(size_section(held)));
        let body = format!("<pre class=\"commands\">{}</pre>\n", escape(&inspection.facts));
        sections.push(PageSection { id: "details", subject: "Details", finding: "All facts".to_owned(), body });
        Ok(sections)
    })
}

fn inspection_screen(context: &PageContext<'_>, inspection: &Inspection<'_>) -> AnswerScreen {
    let Inspection { source, summary, bound_bytes, held, missing, .. } = inspection;
    let peak = &summary.peak;
    let mut need = paragraph(&format!(
        "{} are live at the peak, in {}, at event {} of {}",
        Bytes(peak.bytes),
        counted(peak.blocks as usize, "block", "blocks"),
        peak.event,
        summary.events
    ));
    need.push_str(&paragraph(&format!("The bound is {}: no allocator needs less", Bytes(*bound_bytes))));
    if let Some(record) = context.runs.records.first()
        && let Some(reserved) = record.peak_reserved_bytes
    {
        let _ = write!(need, "<p>In a replay, {} reserves {}.</p>", code(&record.strategy), Bytes(reserved));
    }
    let share = |bytes| format!("{} ({:.0} %)", Bytes(bytes), percent(bytes, held.bytes));
    let line = |name: &str, bytes| format!("<p>{}: {}</p>", code(name), share(bytes));
    let holders: String = match (held.sites.is_empty(), held.categories.is_empty()) {
        (false, _) => held.sites.iter().take(3).map(|holder| line(&holder.site.to_string(), holder.bytes)).collect(),
        (true, false) => held.categories.iter().take(4).map(|&(name, bytes)| line(name, bytes)).collect(),
        (true, true) => paragraph(WITHOUT_STACKS),
    };
    let sure = match (inspection.is_recording, missing.is_empty()) {
        (true, true) => "<p>The recording is complete.</p>".to_owned(),
        (true, false) => missing.iter().map(|sentence| paragraph(sentence)).collect(),
        (false, _) => "<p>The events of a workload or a trace file, as they are. A program may differ.</p>".to_owned(),
    };
    let next = format!(
        "<p>Settings that need less: {}.</p><p>Growth from step to step: {}.</p>",
        code(&format!("oomph advise {source}")),
        code(&format!("oomph leaks {source}"))
    );
    AnswerScreen {
        headline: format!("{} are live at the peak", Bytes(peak.bytes)),
        cards: vec![
            ("How much is needed?", need),
            ("Who holds it at the peak?", holders),
            (WHAT_TO_DO, next),
            (HOW_SURE, sure),
        ],
        below: if held.categories.is_empty() { String::new() } else { category_table(held) },
    }
}

/// The page of `oomph rehearse`. `cards` are known cards with the memory that they have for a program; `held` is what the program of
/// the explained record held.
pub fn rehearsal_page(
    report: &RehearsalReport,
    held: Option<&HeldMemory>,
    cards: &[(String, u64)],
    run: PageRun,
) -> Result<String, ReportError> {
    page_of(run, |_, chart_data| {
        let Some(explained) = report.explained() else { return Ok(Vec::new()) };
        let name = report.records.iter().find_map(|record| record.recordings.first()).cloned().unwrap_or_default();
        let below = rehearsal_ruler(report, cards, chart_data);
        let screen = AnswerScreen { below, ..rehearsal_screen(report, explained) };
        let mut sections = vec![AnswerScreen::section(vec![(name, screen)], "rehearsals"), rehearsal_section(report)];
        if let Some(held) = held {
            sections.extend(held_section(&[("the rehearsed program", held)], chart_data));
        }
        sections.push(assumptions_section(explained));
        Ok(sections)
    })
}

fn rehearsal_screen(report: &RehearsalReport, explained: &RehearsalRecord) -> AnswerScreen {
    let searched = report.searched.as_ref();
    let headline = match &report.records[..] {
        [record] => rehearsals::headline(record, searched),
        records => rehearsals::tally(records),
    };
    let mut cards = Vec::new();
    if report.records.len() > 1 && explained.verdict != RehearsalVerdict::Fits {
        cards.push(("What does not fit?", paragraph(&rehearsals::headline(explained, searched))));
    }
    let fits = explained.verdict == RehearsalVerdict::Fits;
    let question = if fits { "How much is needed?" } else { "How much did it take until then?" };
    cards.push((question, paragraph(&rehearsals::peaks(explained))));
    let mut why: String =
        rehearsals::runs_out(explained).map(|words| paragraph(&format!("It runs out {words}"))).into_iter().collect();
    if !report.holders.sites.is_empty() {
        why.push_str(if report.holders.at_failure {
            "<p>Held most then:</p>"
        } else {
            "<p>Held most at the peak:</p>"
        });
        for (bytes, site) in report.holders.sites.iter().take(3) {
            let _ = write!(why, "<p>{} by {}</p>", Bytes(*bytes), code(&site.to_string()));
        }
    }
    if !why.is_empty() {
        cards.push((if explained.oom.is_some() { WHY } else { "Who holds it?" }, why));
    }
    let mut action = String::new();
    if let Some(advice) = &report.advice {
        action.push_str(&paragraph(&advice::headline(advice)));
        action.extend(advice.export.as_deref().map(to_paste));
        if let Some(end) = &advice.dead_end {
            let _ = write!(action, "<p>What the program does next is {}.</p>", escape(&advice::beyond(advice, end)));
        }
    }
    let _ = write!(action, "<p>Recording: {}</p>", escape(&rehearsals::files(explained)));
    cards.push((WHAT_TO_DO, action));
    let notes = rehearsals::notes(explained);
    let sure = match notes.len() {
        0 => "<p>Every value that the program read back was computed. Nothing was assumed.</p>".to_owned(),
        count => {
            let first: String =
                notes.iter().take(2).map(|(label, words)| paragraph(&format!("{label}: {words}"))).collect();
            let more = if count > 2 { "<p><a href=\"#assumed\">All that is not known or assumed</a></p>" } else { "" };
            format!("{first}{more}")
        }
    };
    cards.push((HOW_SURE, sure));
    AnswerScreen { headline: capitalised(&headline), cards, below: String::new() }
}

/// The peaks on a ruler of cards, as HTML; empty where none is known.
fn rehearsal_ruler(report: &RehearsalReport, cards: &[(String, u64)], chart_data: &mut ChartData) -> String {
    let only = report.records.len() == 1;
    let mut ruler = cards.iter().fold(RulerChart::default(), |ruler, (name, bytes)| ruler.card(name, *bytes));
    let mut any = false;
    for record in &report.records {
        let Some(reserved) = record.peak_reserved_bytes else { continue };
        let fits = record.verdict == RehearsalVerdict::Fits;
        let name = match (record.variant.as_deref().filter(|words| !words.is_empty()), only) {
            (Some(variant), _) => format!("{} with {variant}", record.card),
            (None, true) => "reserved at the peak".to_owned(),
            (None, false) => record.card.clone(),
        };
        let name = if fits { name } else { format!("{name}, up to the end of the run") };
        // One run that fits is compared with all cards.
        let verdict = match record.verdict {
            RehearsalVerdict::Fits if only => None,
            RehearsalVerdict::Fits => Some(true),
            RehearsalVerdict::DoesNotFit => Some(false),
            _ => None,
        };
        ruler = ruler.bar(&name, reserved, verdict);
        any = true;
    }
    if !any {
        return String::new();
    }
    let words = match report.records.iter().all(|record| record.verdict == RehearsalVerdict::Fits) {
        true => {
            "PyTorch releases cached memory before a request fails, so it may also run on a card that is a little smaller."
        }
        false => "Where it does not fit, the bar ends with the run: the program needs more.",
    };
    let figure = place_ruler(chart_data, ruler, "Memory needed, on a ruler of card sizes");
    format!("{figure}<p class=\"reading\">{words}</p>\n")
}

/// A row for each card and variant.
fn rehearsal_section(report: &RehearsalReport) -> PageSection {
    let fits = |record: &RehearsalRecord| record.verdict == RehearsalVerdict::Fits;
    let verdict = |record: &RehearsalRecord| {
        let words = rehearsals::verdict(record);
        match fits(record) {
            true => Cell::text(&words),
            false => Cell::html(format!("<span class=\"oom\">{}</span>", escape(&words)), &words),
        }
    };
    let mut table = HtmlTable::of(&report.records).words("card", "card", |record| Cell::text(&record.card));
    if report.records.iter().any(|record| record.variant.is_some()) {
        table = table.words("variant", "variant", |record| Cell::text(record.variant.as_deref().unwrap_or_default()));
    }
    table = table
        .numbers("memory", "total_bytes", |record| Cell::bytes(record.total_bytes))
        .words("verdict", "verdict", verdict);
    if report.searched.is_some() {
        table = table.numbers("largest value", "value", |record| Cell::count(record.value.filter(|_| fits(record))));
    }
    let body = table
        .numbers("peak allocated", "peak_allocated_bytes", |record| Cell::bytes(record.peak_allocated_bytes))
        .numbers("peak reserved", "peak_reserved_bytes", |record| Cell::bytes(record.peak_reserved_bytes))
        .numbers("left", "left_bytes", |record| Cell::bytes(record.left_bytes().filter(|_| fits(record))))
        .numbers("steps", "steps", |record| Cell::count(record.steps))
        .html("Rehearsals", no_case);
    let finding = format!("What {} takes", if report.records.len() == 1 { "the program" } else { "each run" });
    PageSection { id: "cards", subject: "Cards", finding, body }
}

fn assumptions_section(record: &RehearsalRecord) -> PageSection {
    let notes = rehearsals::notes(record);
    let body = match notes.is_empty() {
        true => "<p>Nothing was assumed.</p>\n".to_owned(),
        false => super::answer_page::fact_list(&notes),
    };
    let finding = "What is not known, and what was assumed".to_owned();
    PageSection { id: "assumed", subject: "Not known", finding, body }
}

/// The page of `oomph fits`. `cards` are known cards with the memory that they have for a program.
pub fn fits_page(rows: &[FitRow], cards: &[(String, u64)], run: PageRun) -> Result<String, ReportError> {
    page_of(run, |_, chart_data| {
        let names = distinct(rows.iter().map(|row| row.card.as_str()));
        let of_card = |card: &str| -> Vec<&FitRow> { rows.iter().filter(|row| row.card == card).collect() };
        let screens =
            names.iter().map(|card| ((*card).to_owned(), fits_screen(&of_card(card), cards, chart_data))).collect();
        let mut sections = vec![AnswerScreen::section(screens, "cards")];
        sections.extend(fits_ruler(rows, &names, cards, chart_data));
        Ok(sections)
    })
}

fn fits_screen(rows: &[&FitRow], known: &[(String, u64)], chart_data: &mut ChartData) -> AnswerScreen {
    let trained: Vec<&FitRow> = rows.iter().copied().filter(|row| row.trains).collect();
    let headline = rows.first().map_or_else(String::new, |first| fits::verdict(first, &trained));
    let (headline, how) = headline.split_once('\n').unwrap_or((&headline, ""));
    let mut cards = Vec::new();
    let mut below = String::new();
    if let Some(row) = fits::shown(&trained) {
        let (allocated, reserved) = (maybe_bytes(row.peak_allocated_bytes), maybe_bytes(row.peak_reserved_bytes));
        let (available, way) = (Bytes(row.available_bytes), escape(&row.way));
        let need = format!(
            "<p><b>{allocated} allocated, {reserved} reserved</b> at the peak with {way}, on a card with enough memory.</p><p>{} \
             has {available} for PyTorch.</p>",
            escape(&row.card)
        );
        cards.push(("How much is needed?", need));
        let parts = fits::categories(row);
        let most = parts.iter().map(|&(_, bytes)| bytes).max().unwrap_or(1);
        let table = HtmlTable::of(&parts)
            .words("category", "category", |(name, _)| Cell::text(name))
            .words("memory at the allocated peak", "bar", |&(_, bytes)| byte_bar(bytes, most))
            .numbers("bytes", "bytes", |&(_, bytes)| Cell::bytes(bytes));
        if let Some(reserved) = row.peak_reserved_bytes {
            let ruler = known.iter().fold(RulerChart::default(), |ruler, (name, bytes)| ruler.card(name, *bytes));
            let ruler = ruler.bar(&format!("reserved with {}", row.way), reserved, row.fits);
            below = place_ruler(chart_data, ruler, "Memory needed, on a ruler of card sizes");
        }
        below.push_str(&table.html(&format!("Where the memory of {} goes", row.way), no_case));
    }
    let how = how.trim();
    if how.starts_with("with ") {
        cards.push((WHAT_TO_DO, paragraph(&format!("train {how}"))));
    } else if !how.is_empty() {
        cards.push((WHAT_TO_DO, paragraph(how)));
    }
    let mut sure = paragraph(fits::LEGEND);
    sure.extend(fits::notes(rows).iter().map(|note| paragraph(note)));
    cards.push((HOW_SURE, sure));
    AnswerScreen { headline: headline.to_owned(), cards, below }
}

fn fits_ruler(
    rows: &[FitRow],
    names: &[&str],
    cards: &[(String, u64)],
    chart_data: &mut ChartData,
) -> Option<PageSection> {
    let ways = distinct(rows.iter().map(|row| row.way.as_str()));
    let mut ruler = cards.iter().fold(RulerChart::default(), |ruler, (name, bytes)| ruler.card(name, *bytes));
    let mut any = false;
    for way in ways {
        let Some(row) = rows.iter().find(|row| row.way == way) else { continue };
        // What is reserved with enough memory is surely enough. With less, a replay decides.
        let Some(reserved) = row.peak_reserved_bytes else { continue };
        ruler = ruler.bar(way, reserved, row.fits.filter(|_| names.len() == 1));
        any = true;
    }
    if !any {
        return None;
    }
    let words = "The bars are what PyTorch reserves with enough memory. With less it gives cached memory back, so a way may fit \
                 on a card that is smaller than its bar: see the table.";
    let mut body = chart(
        "ruler",
        chart_data.rulers.len(),
        "Ways to use the model",
        words,
        "Memory needed, on a ruler of card sizes",
    );
    chart_data.rulers.push(ruler);
    let table = HtmlTable::of(rows)
        .words("card", "card", |row| Cell::text(&row.card))
        .words("way to use it", "way", |row| Cell::text(&row.way).with_class("prose"))
        .words("fits", "fits", |row| match row.fits {
            Some(true) => Cell::text("yes"),
            Some(false) => Cell::html("<span class=\"oom\">no</span>".to_owned(), "no"),
            None => Cell::text("not known"),
        })
        .numbers("peak allocated", "peak_allocated_bytes", |row| Cell::bytes(row.peak_allocated_bytes))
        .numbers("peak reserved", "peak_reserved_bytes", |row| Cell::bytes(row.peak_reserved_bytes))
        .numbers("largest batch", "largest_batch", |row| Cell::count(row.largest_batch))
        .words("numerics", "numerics", |row| {
            Cell::text(&row.numerics.map_or_else(String::new, |effect| effect.to_string()))
        });
    body.push_str(&table.html("Ways to use the model", no_case));
    let fitting = rows.iter().filter(|row| row.fits == Some(true)).count();
    let finding = format!("{fitting} of {} fit", counted(rows.len(), "way", "ways"));
    Some(PageSection { id: "cards", subject: "Cards", finding, body })
}

#[cfg(test)]
mod tests {
    use super::{super::element::unpacked, *};
    use crate::base::{GIB, KIB};

    fn node(name: &str, bytes: u64, children: Vec<HeldNode>) -> HeldNode {
        HeldNode { name: name.into(), bytes, blocks: 1, children, ..HeldNode::default() }
    }

    #[test]
    fn small_names_become_one_bar() {
        let roots = vec![
            node("train.py:1 main", 9000 * KIB, vec![node("model.py:2 forward", 9000 * KIB, Vec::new())]),
            node("a", KIB, Vec::new()),
            node("b", 3 * KIB, Vec::new()),
        ];
        let held = HeldMemory { by: Some(GroupBy::Site), bytes: 9004 * KIB, blocks: 3, roots, ..HeldMemory::default() };
        let FlameChart { by, total, roots, .. } = FlameChart::of("t", &held);
        assert_eq!((by, total), ("stack", 9004));
        let FlameNode(name, kib, _, _, below) = &roots[0];
        assert_eq!((name.as_str(), *kib, below.len()), ("train.py:1 main", 9000, 1));
        assert_eq!(roots[1], FlameNode("2 others with less than 0.05 % each".to_owned(), 4, 2, false, Vec::new()));
    }

    /// A page and the data of its charts.
    fn with_data(page: String) -> String {
        let packed = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data = unpacked(packed);
        page + &data
    }

    #[test]
    fn page_of_a_rehearsal_says_what_was_assumed() {
        let record = RehearsalRecord {
            card: "24GiB".to_owned(),
            total_bytes: 24 * GIB,
            card_is_measured: true,
            verdict: RehearsalVerdict::Fits,
            peak_allocated_bytes: Some(9 * GIB),
            peak_reserved_bytes: Some(10 * GIB),
            assumptions: vec!["nonzero".into()],
            ..RehearsalRecord::default()
        };
        let report = RehearsalReport { records: vec![record], ..RehearsalReport::default() };
        let cards = [("rtx4090".to_owned(), 23 * GIB)];
        let page = with_data(rehearsal_page(&report, None, &cards, PageRun::default()).unwrap());
        for words in
            ["Fits on 24GiB (24.0 GiB)", "9.00 GiB allocated, 10.0 GiB reserved", "half of the elements", "\"rtx4090\""]
        {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn page_of_fits_has_a_bar_for_every_way() {
        let row = |way: &str, fits, reserved| FitRow {
            model: "llama".to_owned(),
            card: "24GiB".to_owned(),
            available_bytes: 23 * GIB,
            way: way.to_owned(),
            trains: true,
            fits,
            reason: "not modelled".to_owned(),
            peak_allocated_bytes: reserved,
            peak_reserved_bytes: reserved,
            weights_bytes: 8 * GIB,
            ..FitRow::default()
        };
        let rows = [
            row("plain", Some(false), Some(30 * GIB)),
            row("thrifty", Some(true), Some(20 * GIB)),
            row("odd", None, None),
        ];
        let page = with_data(fits_page(&rows, &[("24GiB".to_owned(), 23 * GIB)], PageRun::default()).unwrap());
        for words in [
            "llama: trains on 24GiB",
            "Train with thrifty",
            "Odd: not modelled",
            "20.0 GiB allocated",
            "{\"name\":\"plain\",\"kib\":31457280,\"fits\":false}",
        ] {
            assert!(page.contains(words), "{words}");
        }
    }
}
