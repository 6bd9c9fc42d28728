//! `report.html`: one page about a run, or about several.
//!
//! [`page`] uses the files of runs only, so it works on any machine. Tables are HTML and readable
//! without JavaScript, of long ones the first rows; charts and memory maps are drawn by `script/` from one compressed
//! JSON text in the page (`chart_data`). The page loads nothing.

mod answer_page;
mod answers;
mod chart_data;
mod element;
mod first_screen;
mod growth;
mod loss;
mod memory;
mod need_page;
mod out_of_memory;
mod page_context;
mod speed;

use std::{collections::BTreeSet, fmt::Write as _, path::Path};

pub use answer_page::{advice_page, leaks_page, threshold_page};
pub use need_page::{Inspection, fits_page, inspection_page, rehearsal_page};
pub use page_context::{DetailStore, PageRun};

use self::{
    chart_data::{AddressChart, ChartData, TimelineChart},
    element::{Cell, HtmlTable, PageSection, escape, no_case},
    first_screen::Answer,
    growth::JudgedWorkload,
    memory::OpenCase,
    out_of_memory::MappedCase,
    page_context::{CollectedRuns, PageContext},
};
use super::{
    Environment, ReportError, quoted,
    render::{counted, distinct},
    rows, without_options,
};
use crate::measure::Status;

const SKELETON: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(
    "'use strict';\n(() => {\n",
    include_str!("script/format.js"),
    include_str!("script/state.js"),
    include_str!("script/svg.js"),
    include_str!("script/plot.js"),
    include_str!("script/timeline.js"),
    include_str!("script/growth.js"),
    include_str!("script/map.js"),
    include_str!("script/sheet.js"),
    include_str!("script/ruler.js"),
    include_str!("script/strips.js"),
    include_str!("script/techniques.js"),
    include_str!("script/address.js"),
    include_str!("script/flame.js"),
    include_str!("script/tables.js"),
    include_str!("script/answer.js"),
    include_str!("script/start.js"),
    "})();\n"
);

/// Up to this many blocks, cases have all of their memory maps; further cases only those of the
/// peak, the failure and the end.
const MOST_BLOCKS: usize = 100_000;
/// Blocks in all pictures of addresses over time, where few cases are drawn.
const MOST_RECTANGLES: usize = 1_000_000;
/// The same where more cases are drawn: each gets an equal part.
const FEW_RECTANGLES: usize = 48_000;
/// Up to this many cases are few.
const FEW_CASES: usize = 6;
/// Frames of a case with all memory maps.
const MOST_FRAMES: usize = 20;
/// Frames of the other cases.
const FEW_FRAMES: usize = 3;

/// The page about these runs. Cases whose id contains one of `wanted` are always drawn.
pub fn page(runs: &[PageRun], wanted: &[String]) -> Result<String, ReportError> {
    let collected = CollectedRuns::new(runs);
    let context = PageContext::new(&collected);
    let drawn = context.drawn(wanted);
    let mut chart_data = ChartData::new(&context.strategies);
    let mut pictures = Pictures::default();
    // The most interesting workloads come first in every list, and have all of their memory maps.
    for place in context.by_interest() {
        pictures.add(&context, place, &drawn)?;
    }
    let mut sections = vec![overview(&context, &mut chart_data)];
    if !context.groups.is_empty() {
        let charts: Vec<(usize, &TimelineChart)> = pictures.timelines.iter().map(|(at, chart)| (*at, chart)).collect();
        sections.push(memory::section(&context, &charts, &pictures.sparks, &drawn));
        sections.extend(loss::section(&context));
        sections.extend(out_of_memory::section(&context));
    }
    chart_data.timelines = pictures.timelines.into_iter().map(|(_, chart)| chart).collect();
    if let Some((section, maps)) = out_of_memory::map_section(&context, pictures.mapped) {
        sections.push(section);
        chart_data.maps = maps;
    }
    if let Some(section) = out_of_memory::address_section(&context, &pictures.addresses) {
        sections.push(section);
        chart_data.addresses = pictures.addresses;
    }
    sections.extend(answers::thresholds(&context));
    if let Some((section, charts)) = growth::section(&context, &pictures.judged) {
        sections.push(section);
        chart_data.leaks = charts;
    }
    sections.extend(answers::techniques(&context));
    sections.extend(speed::section(&context));
    sections.extend(answers::claims(&context));
    sections.push(environment(&collected));
    assemble(runs, &sections, &chart_data)
}

/// Writes the page about these runs to `path`, whole or not at all.
pub fn write_page(runs: &[PageRun], wanted: &[String], path: &Path) -> Result<(), ReportError> {
    rows::save(path, page(runs, wanted)?.as_bytes())
}

/// What is drawn, collected group by group: only the details of one group are in memory.
#[derive(Default)]
struct Pictures<'a> {
    /// With the place of the group.
    timelines: Vec<(usize, TimelineChart)>,
    sparks: Vec<(String, Vec<u64>)>,
    mapped: Vec<MappedCase>,
    /// In the cases with all memory maps.
    blocks: usize,
    judged: Vec<JudgedWorkload<'a>>,
    addresses: Vec<AddressChart>,
}

impl<'a> Pictures<'a> {
    fn add(&mut self, context: &PageContext<'a>, place: usize, drawn: &BTreeSet<String>) -> Result<(), ReportError> {
        let (group, title) = (&context.groups[place], &context.titles[place]);
        let mut opened: Vec<OpenCase<'a>> = Vec::new();
        for &record in &group.records {
            if let Some(detail) = context.runs.detail(&record.case_id)? {
                opened.push(OpenCase { record, detail });
            }
        }
        for case in opened.iter().filter(|case| !case.detail.timeline.points.is_empty()) {
            self.sparks.push((case.record.case_id.clone(), chart_data::spark(&case.detail)));
        }
        self.timelines.extend(memory::timeline(context, group, title, &opened, drawn).map(|chart| (place, chart)));
        self.judged.extend(JudgedWorkload::of(title, &opened));
        let mut shown: Vec<&OpenCase<'_>> = opened.iter().filter(|case| drawn.contains(&case.record.case_id)).collect();
        // OOMs come first.
        shown.sort_by_key(|case| case.record.status != Status::Oom);
        for case in shown {
            let blocks = case.detail.frames.iter().flat_map(|frame| frame.blocks()).count();
            let most = if self.blocks + blocks <= MOST_BLOCKS { MOST_FRAMES } else { FEW_FRAMES };
            self.blocks += if most == MOST_FRAMES { blocks } else { 0 };
            self.mapped.extend(MappedCase::of(context, case.record, title, &case.detail, most));
            let rectangles = if drawn.len() <= FEW_CASES { MOST_RECTANGLES } else { FEW_RECTANGLES };
            let strategy = context.place(&case.record.strategy);
            let share = rectangles / drawn.len().max(1);
            self.addresses.extend(AddressChart::of(title, strategy, &case.detail, share));
        }
        Ok(())
    }
}

fn assemble(runs: &[PageRun], sections: &[PageSection], chart_data: &ChartData) -> Result<String, ReportError> {
    let title = escape(&title(runs)).into_owned();
    let mut navigation = String::new();
    for section in sections {
        let _ = writeln!(navigation, "<li><a href=\"#{}\">{}</a></li>", section.id, section.subject);
    }
    let body: String = sections.iter().map(PageSection::html).collect();
    let devices: BTreeSet<String> = runs
        .iter()
        .map(|run| match run.environment.device_name.as_str() {
            "" => run.environment.device.clone(),
            name => name.strip_suffix(" (simulated)").map_or_else(|| name.to_owned(), |gpu| format!("simulated {gpu}")),
        })
        .collect();
    let about = match runs.first() {
        Some(run) => format!(
            "{} &middot; {} &middot; oomph {} ({})",
            escape(&devices.into_iter().collect::<Vec<_>>().join(", ")),
            escape(&run.environment.started),
            escape(&run.environment.version),
            escape(&run.environment.commit)
        ),
        None => String::new(),
    };
    let data = chart_data.script_text().map_err(ReportError::io(Path::new("report.html")))?;
    Ok(filled(
        SKELETON,
        &[
            ("title", &title),
            ("style", STYLE),
            ("about", &about),
            ("navigation", &navigation),
            ("sections", &body),
            ("data", &data),
            ("script", SCRIPT),
        ],
    ))
}

/// The suites of one run, whatever its folder is called; of several runs, their names.
fn title(runs: &[PageRun]) -> String {
    let names: Vec<&str> = match runs {
        [PageRun { environment: Environment { settings: Some(settings), .. }, .. }] if !settings.suites.is_empty() => {
            settings.suites.iter().map(String::as_str).collect()
        }
        _ => runs.iter().map(|run| run.name.as_str()).collect(),
    };
    names.join(" + ")
}

/// The skeleton with `{{name}}` replaced in one pass, so that inserted text is not searched again.
fn filled(skeleton: &str, parts: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let mut pieces = skeleton.split("{{");
    out.push_str(pieces.next().unwrap_or(""));
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        out.push_str(parts.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text));
        out.push_str(rest);
    }
    out
}

/// The section: every question with its answer and its chart.
fn overview(context: &PageContext<'_>, data: &mut ChartData) -> PageSection {
    let answers = first_answers(context, data);
    let mut body = incomplete(context);
    let mut finding = if body.is_empty() { "Results" } else { "No result yet" }.to_owned();
    for (place, answer) in answers.iter().enumerate() {
        let question = escape(&answer.question).into_owned();
        match place {
            0 => finding = question,
            _ => {
                let _ = writeln!(body, "<h3 class=\"question\">{question}</h3>");
            }
        }
        body.push_str(&answer.html());
    }
    PageSection { id: "overview", subject: "Answer", finding, body }
}

/// The answers that the runs have, in the order of the sections.
fn first_answers(context: &PageContext<'_>, data: &mut ChartData) -> Vec<Answer> {
    let mut answers = Vec::new();
    for suite in distinct(context.groups.iter().map(|group| group.scenario.suite)) {
        // A suite about time is not about memory.
        match speed::is_timed(context, suite) {
            true => answers.extend(speed::answer(context, data, suite)),
            false => answers.extend(first_screen::of_suite(context, data, suite)),
        }
    }
    answers.extend(answers::threshold_answer(context, data));
    answers.extend(answers::technique_answer(context, data));
    answers.extend(answers::claim_answer(context));
    answers
}

/// What is missing in the files of the runs, as HTML; empty if nothing is.
fn incomplete(context: &PageContext<'_>) -> String {
    let gaps = context.runs.runs.iter().flat_map(|run| run.gaps.iter().map(move |gap| (run, gap)));
    let lines: String = gaps
        .map(|(run, gap)| format!("<li>{}: {}</li>", escape(&run.name), escape(gap).replace('\n', "<br>")))
        .collect();
    match lines.is_empty() {
        true => String::new(),
        false => {
            format!("<div class=\"card missing\"><h3>What is missing?</h3><ul class=\"oom\">{lines}</ul></div>\n")
        }
    }
}

/// The last section: one row per run, and the commands that repeat them.
fn environment(runs: &CollectedRuns<'_>) -> PageSection {
    let device = |run: &PageRun| match run.environment.device_name.as_str() {
        "" => run.environment.device.clone(),
        name => format!("{} ({name})", run.environment.device),
    };
    let machine = |run: &PageRun| {
        let environment = &run.environment;
        format!("{}, {} CPUs, {}", environment.machine, environment.cpus, environment.os)
    };
    let driver = |run: &PageRun| run.environment.driver.clone().unwrap_or_else(|| "none".to_owned());
    let table = HtmlTable::of(runs.runs)
        .words("run", "run", |run| Cell::name(&run.name))
        .words("started", "started", |run| Cell::text(&run.environment.started))
        .words("device", "device", |run| Cell::text(&device(run)))
        .words("driver", "driver", |run| Cell::text(&driver(run)))
        .words("machine", "machine", |run| Cell::text(&machine(run)))
        .words("version", "version", |run| Cell::text(&run.environment.version))
        .words("commit", "commit", |run| Cell::text(&run.environment.commit))
        .numbers("seed", "seed", |run| Cell::count(run.environment.seed));
    let commands: String = runs.runs.iter().map(|run| format!("{}\n", escape(&reproduce(run)))).collect();
    let body = format!(
        "{}<h3>Commands to repeat these runs</h3>\n<pre class=\"commands\">{commands}</pre>\n<p class=\"note\">On the \
         simulated device, the same commit and seed give the same rows to the byte. This page loads nothing from other \
         places.</p>\n",
        table.html("Environment", no_case)
    );
    let finding = format!("Made from {}", counted(runs.runs.len(), "run", "runs"));
    PageSection { id: "origin", subject: "Environment", finding, body }
}

/// The command line of a run, for a shell, without its output folder, which already exists.
fn reproduce(run: &PageRun) -> String {
    let kept = without_options(&run.environment.command, &["--output", "-o"]);
    kept.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_can_be_pasted_into_a_shell() {
        let command = ["oomph", "run", "my suite", "--output", "somewhere", "--limit", "24GiB", "it's"];
        let environment = Environment { command: command.map(str::to_owned).to_vec(), ..Environment::default() };
        let run = PageRun { environment, ..PageRun::default() };
        assert_eq!(reproduce(&run), r"oomph run 'my suite' --limit 24GiB 'it'\''s'");
    }
}
