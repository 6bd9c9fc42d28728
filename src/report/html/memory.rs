//! Memory over time: one chart per workload, and one row per case.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
};

use super::{
    super::scenario::{CaseGroup, is_contender},
    chart_data::{self, CaseLines, SPARK_POINTS, TimelineChart},
    element::{Cell, HtmlTable, PageSection, chart, code, escape, folded},
    page_context::{CaseRow, PageContext, least, moment, most},
};
use crate::{
    base::Bytes,
    measure::{CaseDetail, CaseRecord, Status},
};

/// Up to this factor, two strategies need about the same memory.
const ABOUT_THE_SAME: f64 = 1.01;

/// A case and its details.
pub(super) struct OpenCase<'a> {
    pub(super) record: &'a CaseRecord,
    pub(super) detail: Cow<'a, CaseDetail>,
}

/// The chart of a group, from its drawn cases; `None` if none has a timeline.
pub(super) fn timeline(
    context: &PageContext<'_>,
    group: &CaseGroup<'_>,
    title: &str,
    opened: &[OpenCase<'_>],
    drawn: &BTreeSet<String>,
) -> Option<TimelineChart> {
    let shown: Vec<&OpenCase<'_>> = opened
        .iter()
        .filter(|case| drawn.contains(&case.record.case_id) && !case.detail.timeline.points.is_empty())
        .collect();
    let furthest = shown.iter().max_by_key(|case| case.record.events)?;
    Some(TimelineChart {
        title: title.to_owned(),
        bound: chart_data::bound(furthest.record),
        limit: group.scenario.limit_bytes.map(chart_data::kib),
        steps: chart_data::steps(&furthest.detail.steps),
        live: Some(chart_data::live(&furthest.detail)),
        cases: shown.iter().map(|case| CaseLines::of(context.place(&case.record.strategy), &case.detail)).collect(),
    })
}

/// What a case of a group is compared by, where that is known.
fn compared(group: &CaseGroup<'_>, record: &CaseRecord) -> u64 {
    group.compared_bytes(record).unwrap_or(0)
}

/// The main result of a chart.
fn sentence(group: &CaseGroup<'_>) -> String {
    match (least(group), most(group)) {
        (Some(low), Some(high)) if low.strategy != high.strategy => {
            let (low_bytes, high_bytes) = (compared(group, low), compared(group, high));
            let ratio = high_bytes as f64 / low_bytes.max(1) as f64;
            if ratio < ABOUT_THE_SAME {
                return format!("All need about the same, {}.", Bytes(low_bytes));
            }
            let how_much = if ratio >= 1.995 {
                format!("{ratio:.1} times as much")
            } else {
                format!("{:.0} % more", (ratio - 1.0) * 100.0)
            };
            format!(
                "{} needs the least, {}; {} needs {how_much}, {}.",
                code(&low.strategy),
                Bytes(low_bytes),
                code(&high.strategy),
                Bytes(high_bytes)
            )
        }
        _ => String::new(),
    }
}

/// The section: charts, then all rows.
pub(super) fn section(
    context: &PageContext<'_>,
    charts: &[(usize, &TimelineChart)],
    sparks: &[(String, Vec<u64>)],
) -> PageSection {
    let mut body = String::new();
    for (index, (place, data)) in charts.iter().enumerate() {
        let (group, title) = (&context.groups[*place], &context.titles[*place]);
        let measured = group.records.iter().filter(|record| record.clock.is_some()).count();
        let mut words = sentence(group);
        if data.cases.len() < measured {
            let _ = write!(words, " {} of {measured} strategies are drawn; the table has all.", data.cases.len());
        }
        let label = format!("Memory over time: {title}");
        body.push_str(&chart("timeline", index, &escape(title), &words, &label));
        body.push_str(&folded(&as_table(context, group, title)));
    }
    body.push_str("<h3>All cases</h3>\n");
    body.push_str(&results(context, sparks));
    body.push_str(
        "<p class=\"note\">Fragmentation = 1 - peak allocated / peak reserved. Small lines: reserved memory over time, scaled \
         to the workload.</p>\n",
    );
    PageSection { id: "memory", subject: "Memory over time", finding: finding(context), body }
}

/// The workload on which strategies differ most.
fn finding(context: &PageContext<'_>) -> String {
    let spread = |group: &CaseGroup<'_>| -> Option<f64> {
        let (low, high) = (least(group)?, most(group)?);
        Some(compared(group, high) as f64 / compared(group, low).max(1) as f64)
    };
    let widest = context.titled().filter_map(|(group, title)| Some((spread(group)?, title)));
    match widest.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((ratio, title)) if ratio > 1.05 => {
            format!("Strategies differ most on {}: by a factor of {ratio:.1} in memory", escape(title))
        }
        Some(_) => "All strategies need about the same memory".to_owned(),
        None => "Memory of every case".to_owned(),
    }
}

/// The numbers of a chart.
fn as_table(context: &PageContext<'_>, group: &CaseGroup<'_>, title: &str) -> String {
    let rows: Vec<&CaseRecord> = group.records.iter().copied().filter(|record| record.clock.is_some()).collect();
    let table = HtmlTable::of(&rows)
        .words("strategy", "strategy", |record| context.strategy(&record.strategy))
        .numbers("peak live", "live_peak_bytes", |record| Cell::bytes(record.live_peak_bytes))
        .numbers("peak allocated", "peak_allocated_bytes", |record| Cell::bytes(record.peak_allocated_bytes))
        .numbers("at event", "peak_allocated_event", |record| Cell::count(record.peak_allocated_event))
        .numbers("peak reserved", "peak_reserved_bytes", |record| Cell::bytes(record.peak_reserved_bytes))
        .numbers("at event", "peak_reserved_event", |record| Cell::count(record.peak_reserved_event))
        .numbers("reserved at the end", "final_reserved_bytes", |record| Cell::bytes(record.final_reserved_bytes))
        .numbers("retries", "retries", |record| Cell::count(record.retries))
        .numbers("failed requests", "ooms", |record| Cell::count(record.ooms))
        .numbers("first at event", "oom_event", |record| Cell::count(record.oom_event));
    table.html(&format!("Memory over time: {title}"), |record| Some(&record.case_id))
}

/// Every case, with the least memory of its workload marked.
fn results(context: &PageContext<'_>, sparks: &[(String, Vec<u64>)]) -> String {
    let rows: Vec<CaseRow<'_>> = context.rows().collect();
    let least: Vec<Option<u64>> = context.groups.iter().map(CaseGroup::least_bytes).collect();
    let is_by_need: Vec<bool> = context.groups.iter().map(CaseGroup::is_by_need).collect();
    let lines: HashMap<&str, &Vec<u64>> = sparks.iter().map(|(id, line)| (id.as_str(), line)).collect();
    let spark = |record: &CaseRecord| lines.get(record.case_id.as_str()).copied();
    let highest_of = |group: &CaseGroup<'_>| {
        let highest = group.records.iter().filter_map(|record| spark(record)?.iter().copied().max()).max();
        highest.unwrap_or(0)
    };
    let highest: Vec<u64> = context.groups.iter().map(highest_of).collect();
    // The least memory is marked in the column that it is compared by.
    let memory = |row: &CaseRow<'_>, bytes: Option<u64>, is_compared: bool| {
        let is_best = is_compared && is_contender(row.record) && bytes.is_some() && bytes == least[row.group];
        Cell::bytes(bytes).with_class(if is_best { "number best" } else { "number" })
    };
    let line = |row: &CaseRow<'_>| {
        let line = spark(row.record).map_or_else(String::new, |line| spark_line(line, highest[row.group]));
        Cell::html(line, "")
    };
    // Cases that did not run have no figures.
    let measured = |row: &CaseRow<'_>, cell: Cell| if row.record.clock.is_some() { cell } else { Cell::empty() };
    let table = context.case_table(&rows).words("outcome", "status", |row| outcome(row.record));
    let table = match rows.iter().any(|row| row.record.needed_bytes.is_some()) {
        true => table
            .numbers("needed", "needed_bytes", |row| memory(row, row.record.needed_bytes, is_by_need[row.group]))
            .numbers("need over bound", "need_ratio", |row| Cell::decimal(row.record.need_ratio(), 3))
            .numbers("appetite over bound", "appetite_ratio", |row| Cell::decimal(row.record.appetite_ratio(), 3)),
        false => table,
    };
    let table = table
        .numbers("peak allocated", "peak_allocated_bytes", |row| {
            measured(row, Cell::bytes(row.record.peak_allocated_bytes))
        })
        .numbers("peak reserved", "peak_reserved_bytes", |row| {
            measured(row, Cell::bytes(row.record.peak_reserved_bytes))
        })
        .numbers("device used", "peak_device_used_bytes", |row| {
            memory(row, row.record.peak_device_used_bytes, !is_by_need[row.group])
        })
        .numbers("fragmen&shy;tation", "fragmentation_share", |row| {
            measured(row, Cell::percent(row.record.fragmentation_share))
        })
        .numbers("driver calls", "driver_calls", |row| measured(row, Cell::count(row.record.driver_calls)))
        .numbers("driver time", "driver_ns", |row| measured(row, Cell::nanos(row.record.driver_ns)));
    let table = if sparks.is_empty() { table } else { table.words("over time", "timeline", line) };
    table.html("All cases", CaseRow::id)
}

fn outcome(record: &CaseRecord) -> Cell {
    let html = match record.status {
        Status::Completed => "completed".to_owned(),
        Status::Oom => format!("<span class=\"oom\">OOM: {}</span>", escape(&moment(record))),
        other => format!("{} <small>{}</small>", other.name(), escape(&record.reason)),
    };
    Cell::html(html, record.status.name())
}

/// A small line without axes.
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
