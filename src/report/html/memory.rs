//! Memory over time: a chart a workload, and a row a case.

use std::{borrow::Cow, collections::BTreeSet, fmt::Write as _};

use super::{
    super::scenario::{CaseGroup, is_contender},
    element::{Cell, Column, Section, Table, chart, code, escape},
    island::{self, CaseLines, SPARK_POINTS, TimelineChart},
    material::{Material, least, moment, most},
};
use crate::{
    base::Bytes,
    measure::{CaseDetail, CaseRecord, Status},
};

/// Whoever needs less than this times as much needs about the same.
const ABOUT_THE_SAME: f64 = 1.01;

/// A case with its details, for as long as they are looked at.
pub(super) struct Opened<'a> {
    pub(super) record: &'a CaseRecord,
    pub(super) detail: Cow<'a, CaseDetail>,
}

/// The data of a group's chart, from those of its cases that are drawn; nothing where none has a timeline.
pub(super) fn timeline(
    material: &Material<'_>,
    group: &CaseGroup<'_>,
    title: &str,
    opened: &[Opened<'_>],
    drawn: &BTreeSet<String>,
) -> Option<TimelineChart> {
    let shown: Vec<&Opened<'_>> = opened
        .iter()
        .filter(|case| drawn.contains(&case.record.case_id) && !case.detail.timeline.points.is_empty())
        .collect();
    let furthest = shown.iter().max_by_key(|case| case.record.events)?;
    Some(TimelineChart {
        title: title.to_owned(),
        bound: island::bound(furthest.record),
        limit: group.scenario.limit_bytes.map(island::kib),
        steps: island::steps(&furthest.detail.steps),
        live: Some(island::live(&furthest.detail)),
        cases: shown.iter().map(|case| CaseLines::of(material.place(&case.record.strategy), &case.detail)).collect(),
    })
}

/// Device memory use of a case for which it is known.
fn used(record: &CaseRecord) -> u64 {
    record.peak_device_used_bytes.unwrap_or(0)
}

/// What a chart shows, in a sentence.
fn sentence(group: &CaseGroup<'_>) -> String {
    match (least(group), most(group)) {
        (Some(low), Some(high)) if low.strategy != high.strategy => {
            let ratio = used(high) as f64 / used(low).max(1) as f64;
            if ratio < ABOUT_THE_SAME {
                return format!("All need about the same, {}.", Bytes(used(low)));
            }
            let how_much = if ratio >= 1.995 {
                format!("{ratio:.1} times as much")
            } else {
                format!("{:.0} % more", (ratio - 1.0) * 100.0)
            };
            format!(
                "{} needs least, {}; {} needs {how_much}, {}.",
                code(&low.strategy),
                Bytes(used(low)),
                code(&high.strategy),
                Bytes(used(high))
            )
        }
        _ => String::new(),
    }
}

/// The section: charts, then all rows.
pub(super) fn section(
    material: &Material<'_>,
    charts: &[(usize, &TimelineChart)],
    sparks: &[(String, Vec<u64>)],
) -> Section {
    let mut body = String::new();
    for (index, (place, data)) in charts.iter().enumerate() {
        let (group, title) = (&material.groups[*place], &material.titles[*place]);
        let measured = group.records.iter().filter(|record| record.clock.is_some()).count();
        let mut words = sentence(group);
        if data.cases.len() < measured {
            let _ =
                write!(words, " {} of {measured} strategies are drawn; the others are in the table.", data.cases.len());
        }
        let label = format!("Memory over time: {title}");
        body.push_str(&chart("timeline", index, &escape(title), &words, &label));
        body.push_str(&as_table(material, group, title).folded());
    }
    body.push_str("<h3>All cases</h3>\n");
    body.push_str(&results(material, sparks).html());
    body.push_str(
        "<p class=\"note\">Fragmentation is 1 - peak allocated / peak reserved. Small lines are reserved memory over time, \
         as high as the largest of the workload.</p>\n",
    );
    Section { id: "memory", subject: "Memory over time", finding: finding(material), body }
}

/// The workload on which strategies differ most.
fn finding(material: &Material<'_>) -> String {
    let spread = |group: &CaseGroup<'_>| -> Option<f64> {
        let (low, high) = (least(group)?, most(group)?);
        Some(used(high) as f64 / used(low).max(1) as f64)
    };
    let widest = material.titled().filter_map(|(group, title)| Some((spread(group)?, title)));
    match widest.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((ratio, title)) if ratio > 1.05 => {
            format!("The choice matters most on {}: a factor of {ratio:.1} in memory", escape(title))
        }
        Some(_) => "All strategies need about the same memory".to_owned(),
        None => "What every case took".to_owned(),
    }
}

/// The numbers behind a chart.
fn as_table(material: &Material<'_>, group: &CaseGroup<'_>, title: &str) -> Table {
    let mut table = Table::new(
        &format!("Memory over time: {title}"),
        vec![
            Column::words("strategy", "strategy"),
            Column::numbers("live at most", "bound_requested_bytes"),
            Column::numbers("allocated at most", "peak_allocated_bytes"),
            Column::numbers("at event", "peak_allocated_event"),
            Column::numbers("reserved at most", "peak_reserved_bytes"),
            Column::numbers("at event", "peak_reserved_event"),
            Column::numbers("reserved at the end", "final_reserved_bytes"),
            Column::numbers("retries", "retries"),
            Column::numbers("failed requests", "ooms"),
            Column::numbers("first at event", "oom_event"),
        ],
    );
    let count = |value: Option<u64>| value.map_or_else(Cell::empty, Cell::count);
    for record in group.records.iter().filter(|record| record.clock.is_some()) {
        table.row_of(
            &record.case_id,
            vec![
                material.strategy(&record.strategy),
                Cell::maybe_bytes(record.bound_requested_bytes),
                Cell::bytes(record.peak_allocated_bytes),
                count(record.peak_allocated_event),
                Cell::bytes(record.peak_reserved_bytes),
                count(record.peak_reserved_event),
                Cell::bytes(record.final_reserved_bytes),
                Cell::count(record.retries),
                Cell::count(record.ooms),
                count(record.oom_event),
            ],
        );
    }
    table
}

/// Every case, with the least of its workload marked.
fn results(material: &Material<'_>, sparks: &[(String, Vec<u64>)]) -> Table {
    let mut columns = vec![
        Column::words("workload", "workload"),
        Column::words("strategy", "strategy"),
        Column::words("outcome", "status"),
        Column::numbers("peak allocated", "peak_allocated_bytes"),
        Column::numbers("peak reserved", "peak_reserved_bytes"),
        Column::numbers("device used", "peak_device_used_bytes"),
        Column::numbers("fragmen&shy;tation", "peak_gap_share"),
        Column::numbers("driver calls", "driver_calls"),
        Column::numbers("driver time", "driver_ns"),
    ];
    if !sparks.is_empty() {
        columns.push(Column::words("over time", "timeline"));
    }
    let mut table = Table::new("All cases", columns);
    for (group, title) in material.titled() {
        let least = group.least_used();
        let spark = |record: &CaseRecord| sparks.iter().find(|(id, _)| *id == record.case_id).map(|(_, line)| line);
        let highest = group.records.iter().filter_map(|record| spark(record)?.iter().copied().max()).max().unwrap_or(0);
        for record in &group.records {
            let mut cells = vec![Cell::name(title), material.strategy(&record.strategy), outcome(record)];
            if record.clock.is_some() {
                let best = is_contender(record) && least.is_some() && least == record.peak_device_used_bytes;
                cells.extend([
                    Cell::bytes(record.peak_allocated_bytes),
                    Cell::bytes(record.peak_reserved_bytes),
                    Cell::maybe_bytes(record.peak_device_used_bytes).with_class(if best {
                        "number best"
                    } else {
                        "number"
                    }),
                    Cell::percent(record.peak_gap_share),
                    Cell::count(record.driver_calls),
                    Cell::nanos(record.driver_ns),
                ]);
            } else {
                cells.extend((0..6).map(|_| Cell::empty()));
            }
            if !sparks.is_empty() {
                let line = spark(record).map_or_else(String::new, |line| spark_line(line, highest));
                cells.push(Cell::html(line, ""));
            }
            table.row_of(&record.case_id, cells);
        }
    }
    table
}

fn outcome(record: &CaseRecord) -> Cell {
    let html = match record.status {
        Status::Completed => "completed".to_owned(),
        Status::Oom => format!("<span class=\"oom\">ran out: {}</span>", escape(&moment(record))),
        other => format!("{} <small>{}</small>", other.name(), escape(&record.reason)),
    };
    Cell::html(html, record.status.name())
}

/// A line without axes: how memory went.
fn spark_line(levels: &[u64], highest: u64) -> String {
    let (width, height) = (SPARK_POINTS as f64, 16.0);
    let mut path = String::new();
    for (place, &level) in levels.iter().enumerate() {
        let x = place as f64 * width / levels.len().saturating_sub(1).max(1) as f64;
        let y = height - level as f64 / highest.max(1) as f64 * (height - 1.0);
        let _ = write!(path, "{}{x:.0} {y:.1}", if place == 0 { "M" } else { "L" });
    }
    format!("<svg class=\"spark\" viewBox=\"0 0 60 16\" aria-hidden=\"true\"><path d=\"{path}\"/></svg>")
}
