//! `report.html`: one page with everything that a run, or several, found out.
//!
//! [`page`] is made from the files of runs alone ([`Run::of_folder`]), on any machine. Tables are HTML, written here and
//! readable without JavaScript; what is drawn over time or block by block is drawn by `script/` from one JSON text in the
//! page (`island`). The page loads nothing from elsewhere. `run` writes one at its end, `oomph report` from folders.

mod answers;
mod choice;
mod element;
mod gather;
mod growth;
mod island;
mod loss;
mod material;
mod memory;
mod origin;
mod overview;
mod shortage;
mod speed;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    path::{Path, PathBuf},
};

pub use gather::{Details, Run};

use self::{
    element::{Section, escape},
    gather::Gathered,
    growth::Judged,
    island::{Island, TimelineChart},
    material::Material,
    memory::Opened,
    shortage::Pictured,
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

/// Cases have all of their pictures of memory as long as no more than so many blocks are drawn; from then on those of the
/// peak, the failure and the end.
const MOST_BLOCKS: usize = 240_000;
/// Frames of a case that is shown in full.
const MOST_FRAMES: usize = 20;
/// Frames of the others.
const FEW_FRAMES: usize = 3;

/// The page about these runs, as text. Cases whose id contains one of `wanted` are drawn in full whatever else is.
pub fn page(runs: &[Run], wanted: &[String]) -> Result<String, ReportError> {
    let gathered = Gathered::new(runs);
    let material = Material::new(&gathered);
    let drawn = choice::drawn(&material.groups, wanted);
    let mut island = Island::new(&material.strategies);
    let mut pictures = Pictures::default();
    for place in 0..material.groups.len() {
        pictures.add(&material, place, &drawn)?;
    }
    let mut sections = vec![overview::overview(&material)];
    if !material.groups.is_empty() {
        let charts: Vec<(usize, &TimelineChart)> = pictures.timelines.iter().map(|(at, chart)| (*at, chart)).collect();
        sections.push(memory::section(&material, &charts, &pictures.sparks));
        sections.extend(loss::section(&material));
        sections.extend(shortage::section(&material));
    }
    island.timelines = pictures.timelines.into_iter().map(|(_, chart)| chart).collect();
    if let Some((section, maps)) = shortage::map_section(pictures.pictured) {
        sections.push(section);
        island.maps = maps;
    }
    sections.extend(answers::thresholds(&material));
    if let Some((section, charts)) = growth::section(&material, &pictures.judged) {
        sections.push(section);
        island.leaks = charts;
    }
    sections.extend(answers::techniques(&material));
    sections.extend(speed::section(&material));
    sections.extend(answers::claims(&material));
    sections.push(origin::section(&gathered));
    assemble(runs, &sections, &island)
}

/// Writes the page about the runs in `folders` to `path`, whole or not at all.
pub fn write_page(folders: &[PathBuf], wanted: &[String], path: &Path) -> Result<(), ReportError> {
    let runs = folders.iter().map(|folder| Run::of_folder(folder)).collect::<Result<Vec<_>, _>>()?;
    rows::replace(path, page(&runs, wanted)?.as_bytes())
}

/// What is drawn, gathered group by group so that only one group's details are in memory.
#[derive(Default)]
struct Pictures<'a> {
    /// With the place of the group.
    timelines: Vec<(usize, TimelineChart)>,
    sparks: Vec<(String, Vec<u64>)>,
    pictured: Vec<Pictured>,
    /// In the cases that have all of their pictures.
    blocks: usize,
    judged: Vec<Judged<'a>>,
}

impl<'a> Pictures<'a> {
    fn add(&mut self, material: &Material<'a>, place: usize, drawn: &BTreeSet<String>) -> Result<(), ReportError> {
        let (group, title) = (&material.groups[place], &material.titles[place]);
        let mut opened: Vec<Opened<'a>> = Vec::new();
        for &record in &group.records {
            if let Some(detail) = material.gathered.detail(&record.case_id)? {
                opened.push(Opened { record, detail });
            }
        }
        for case in opened.iter().filter(|case| !case.detail.timeline.points.is_empty()) {
            self.sparks.push((case.record.case_id.clone(), island::spark(&case.detail)));
        }
        self.timelines.extend(memory::timeline(material, group, title, &opened, drawn).map(|chart| (place, chart)));
        self.judged.extend(Judged::of(title, &opened));
        let mut shown: Vec<&Opened<'_>> = opened.iter().filter(|case| drawn.contains(&case.record.case_id)).collect();
        // Whoever ran out is looked at first.
        shown.sort_by_key(|case| case.record.status != Status::Oom);
        for case in shown {
            let blocks = case.detail.frames.iter().flat_map(|frame| frame.blocks()).count();
            let most = if self.blocks + blocks <= MOST_BLOCKS { MOST_FRAMES } else { FEW_FRAMES };
            self.blocks += if most == MOST_FRAMES { blocks } else { 0 };
            self.pictured.extend(Pictured::of(material, case.record, title, &case.detail, most));
        }
        Ok(())
    }
}

fn assemble(runs: &[Run], sections: &[Section], island: &Island) -> Result<String, ReportError> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = escape(&names.join(" + ")).into_owned();
    let mut navigation = String::new();
    for section in sections {
        let _ = writeln!(navigation, "<li><a href=\"#{}\">{}</a></li>", section.id, section.subject);
    }
    let body: String = sections.iter().map(Section::html).collect();
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
    let data = island.json().map_err(ReportError::json(Path::new("report.html")))?;
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

/// The skeleton with `{{name}}` replaced, in one pass: what is put in is not looked through again.
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
