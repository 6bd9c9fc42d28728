//! `report.html`: one page about a run, or about several.
//!
//! [`page`] uses the files of runs only, so it works on any machine. Tables are HTML and readable
//! without JavaScript; charts and memory maps are drawn by `script/` from one JSON text in the page
//! (`chart_data`). The page loads nothing.

mod answers;
mod chart_data;
mod element;
mod growth;
mod loss;
mod memory;
mod out_of_memory;
mod overview;
mod page_context;
mod speed;

use std::{collections::BTreeSet, fmt::Write as _, path::Path};

pub use page_context::{DetailStore, PageRun};

use self::{
    chart_data::{ChartData, TimelineChart},
    element::{PageSection, escape},
    growth::JudgedWorkload,
    memory::OpenCase,
    out_of_memory::MappedCase,
    page_context::{CollectedRuns, PageContext},
};
use super::{ReportError, rows};
use crate::measure::Status;

const SKELETON: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(
    "'use strict';\n(() => {\n",
    include_str!("script/format.js"),
    include_str!("script/svg.js"),
    include_str!("script/plot.js"),
    include_str!("script/timeline.js"),
    include_str!("script/growth.js"),
    include_str!("script/map.js"),
    include_str!("script/tables.js"),
    include_str!("script/start.js"),
    "})();\n"
);

/// Up to this many blocks, cases have all of their memory maps; further cases only those of the
/// peak, the failure and the end.
const MOST_BLOCKS: usize = 240_000;
/// Frames of a case with all memory maps.
const MOST_FRAMES: usize = 20;
/// Frames of the other cases.
const FEW_FRAMES: usize = 3;

/// The page about these runs. Cases whose id contains one of `wanted` are always drawn.
pub fn page(runs: &[PageRun], wanted: &[String]) -> Result<String, ReportError> {
    let collected = CollectedRuns::new(runs);
    let context = PageContext::new(&collected);
    let drawn = page_context::drawn(&context.groups, wanted);
    let mut chart_data = ChartData::new(&context.strategies);
    let mut pictures = Pictures::default();
    for place in 0..context.groups.len() {
        pictures.add(&context, place, &drawn)?;
    }
    let mut sections = vec![overview::overview(&context)];
    if !context.groups.is_empty() {
        let charts: Vec<(usize, &TimelineChart)> = pictures.timelines.iter().map(|(at, chart)| (*at, chart)).collect();
        sections.push(memory::section(&context, &charts, &pictures.sparks));
        sections.extend(loss::section(&context));
        sections.extend(out_of_memory::section(&context));
    }
    chart_data.timelines = pictures.timelines.into_iter().map(|(_, chart)| chart).collect();
    if let Some((section, maps)) = out_of_memory::map_section(&context, pictures.mapped) {
        sections.push(section);
        chart_data.maps = maps;
    }
    sections.extend(answers::thresholds(&context));
    if let Some((section, charts)) = growth::section(&context, &pictures.judged) {
        sections.push(section);
        chart_data.leaks = charts;
    }
    sections.extend(answers::techniques(&context));
    sections.extend(speed::section(&context));
    sections.extend(answers::claims(&context));
    sections.push(overview::environment(&collected));
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
        }
        Ok(())
    }
}

fn assemble(runs: &[PageRun], sections: &[PageSection], chart_data: &ChartData) -> Result<String, ReportError> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = escape(&names.join(" + ")).into_owned();
    let mut navigation = String::new();
    for section in sections {
        let _ = writeln!(navigation, "<li><a href=\"#{}\">{}</a></li>", section.id, section.subject);
    }
    let body: String = sections.iter().map(PageSection::html).collect();
    let devices: BTreeSet<String> = runs
        .iter()
        .map(|run| match run.environment.device_name.as_str() {
            "" => run.environment.device.clone(),
            name => name.to_owned(),
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
    let data = chart_data.json().map_err(ReportError::json(Path::new("report.html")))?;
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
