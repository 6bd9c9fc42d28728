//! Memory over time: one chart in which a workload is chosen, and one row per case.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
};

use super::{
    super::scenario::{CaseGroup, is_contender},
    chart_data::{self, CaseLines, SPARK_POINTS, TimelineChart},
    element::{Cell, PageSection, StrategyLook, chart, code, escape, folded},
    page_context::{CaseRow, PageContext, least, moment, most, out_of_memory, spread, takes_fixed_part},
};
use crate::{
    base::Bytes,
    measure::{CaseDetail, CaseRecord, Status},
};

/// Up to this factor, two strategies need about the same memory.
const ABOUT_THE_SAME: f64 = 1.01;
/// More failures are not named below a chart.
const MOST_NAMED: usize = 3;

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
    let measured = group.records.iter().filter(|record| record.clock.is_some()).count();
    let mut words = failures(group) + &sentence(group);
    if shown.len() < measured {
        let _ = write!(words, " {} of {measured} strategies are drawn; the table has all.", shown.len());
    }
    Some(TimelineChart {
        title: title.to_owned(),
        headline: headline(group, title),
        sentence: words,
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
            let (verb, what) = match group.is_by_need() {
                true => ("needs", ""),
                false => ("takes", " of the device with the CUDA context, which the limit does not count,"),
            };
            if ratio < ABOUT_THE_SAME {
                return format!("Each {verb} about {}{what}.", Bytes(low_bytes));
            }
            let how_much = match ratio {
                1.995.. => format!("{ratio:.1} times as much"),
                1.095.. => format!("{:.0} % more", (ratio - 1.0) * 100.0),
                _ => format!("{:.1} % more", (ratio - 1.0) * 100.0),
            };
            format!(
                "{} {verb} the least, {}{what}; {} {verb} {how_much}, {}.",
                code(&low.strategy),
                Bytes(low_bytes),
                code(&high.strategy),
                Bytes(high_bytes)
            )
        }
        _ => String::new(),
    }
}

/// What a workload shows: who ran out of memory, or how far strategies differ.
fn headline(group: &CaseGroup<'_>, title: &str) -> String {
    let title = escape(title);
    let all = group.records.iter().filter(|record| record.clock.is_some()).count();
    let failed: Vec<&CaseRecord> = out_of_memory(group).collect();
    // A title that differs by its limit names it.
    let limit = group.scenario.limit_bytes.filter(|_| !title.contains(" &lt;= "));
    let within = limit.map_or_else(String::new, |limit| format!(" with {} of memory", Bytes(limit)));
    match (failed.as_slice(), least(group), most(group), spread(group)) {
        ([one], ..) => format!("On {title}{within}, {} ran out of memory", code(&one.strategy)),
        ([_, ..], ..) => format!("On {title}{within}, {} of {all} strategies ran out of memory", failed.len()),
        ([], Some(low), Some(high), Some(ratio)) if ratio >= ABOUT_THE_SAME => {
            let verb = if group.is_by_need() { "needs" } else { "takes" };
            format!(
                "On {title}, {} {verb} {ratio:.2} times the memory of {}",
                code(&high.strategy),
                code(&low.strategy)
            )
        }
        ([], Some(_), Some(_), _) => format!("On {title}, all strategies take about the same memory"),
        _ => format!("Memory on {title}"),
    }
}

/// When the first cases of a group ran out of memory.
fn failures(group: &CaseGroup<'_>) -> String {
    let moments: Vec<String> = out_of_memory(group)
        .take(MOST_NAMED)
        .map(|record| format!("{} in {}", code(&record.strategy), escape(&moment(record))))
        .collect();
    match moments.as_slice() {
        [] => String::new(),
        some => format!("Out of memory: {}. ", some.join("; ")),
    }
}

/// The section: a chart in which the reader chooses a workload, then all rows. The charts are in the order of interest.
pub(super) fn section(
    context: &PageContext<'_>,
    charts: &[(usize, &TimelineChart)],
    sparks: &[(String, Vec<u64>)],
    drawn: &BTreeSet<String>,
) -> PageSection {
    let mut body = String::new();
    if let Some((_, first)) = charts.first() {
        let label = format!("Memory over time: {}", first.title);
        body.push_str(&chart("timeline", 0, &escape(&first.title), &first.sentence, &label));
        let shown: BTreeSet<usize> = charts.iter().map(|(place, _)| *place).collect();
        body.push_str(&folded(&as_table(context, &shown)));
    }
    body.push_str("<h3>All cases</h3>\n");
    body.push_str(&results(context, sparks, drawn));
    body.push_str("<p class=\"note\">Fragmentation = 1 - peak allocated / peak reserved.");
    if !sparks.is_empty() {
        body.push_str(
            " Small lines: reserved memory over time, scaled to the workload. <code>oomph report FOLDER --show \
             CASE</code> draws a case that is not drawn.",
        );
    }
    body.push_str("</p>\n");
    let finding = charts.first().map_or_else(|| finding(context), |(_, first)| first.headline.clone());
    PageSection { id: "memory", subject: "Memory over time", finding, body }
}

/// The workload on which strategies differ most.
fn finding(context: &PageContext<'_>) -> String {
    let widest = context.titled().filter_map(|(group, title)| Some((spread(group)?, title)));
    match widest.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((ratio, title)) if ratio > 1.05 => {
            format!("Strategies differ most on {}: by a factor of {ratio:.1} in memory", escape(title))
        }
        Some(_) => "All strategies need about the same memory".to_owned(),
        None => "Memory of every case".to_owned(),
    }
}

/// The numbers of the charts of these groups.
pub(super) fn as_table(context: &PageContext<'_>, shown: &BTreeSet<usize>) -> String {
    let is_shown = |row: &CaseRow<'_>| shown.contains(&row.group) && row.record.clock.is_some();
    let rows: Vec<CaseRow<'_>> = context.rows().filter(is_shown).collect();
    let table = context
        .case_table(&rows)
        .numbers("peak live", "live_peak_bytes", |row| Cell::bytes(row.record.live_peak_bytes))
        .numbers("peak allocated", "peak_allocated_bytes", |row| Cell::bytes(row.record.peak_allocated_bytes))
        .numbers("at event", "peak_allocated_event", |row| Cell::count(row.record.peak_allocated_event))
        .numbers("peak reserved", "peak_reserved_bytes", |row| Cell::bytes(row.record.peak_reserved_bytes))
        .numbers("at event", "peak_reserved_event", |row| Cell::count(row.record.peak_reserved_event))
        .numbers("reserved at the end", "final_reserved_bytes", |row| Cell::bytes(row.record.final_reserved_bytes))
        .numbers("retries", "retries", |row| Cell::count(row.record.retries))
        .numbers("failed requests", "ooms", |row| Cell::count(row.record.ooms))
        .numbers("first at event", "oom_event", |row| Cell::count(row.record.oom_event));
    table.html("Memory over time", CaseRow::id)
}

/// Every case, with the least memory of its workload marked.
fn results(context: &PageContext<'_>, sparks: &[(String, Vec<u64>)], drawn: &BTreeSet<String>) -> String {
    let rows: Vec<CaseRow<'_>> = context.rows().collect();
    let least: Vec<Option<u64>> = context.groups.iter().map(CaseGroup::least_bytes).collect();
    let is_by_need: Vec<bool> = context.groups.iter().map(CaseGroup::is_by_need).collect();
    let lines: HashMap<&str, &Vec<u64>> = sparks.iter().map(|(id, line)| (id.as_str(), line)).collect();
    let spark = |record: &CaseRecord| lines.get(record.case_id.as_str()).copied();
    let highest_of = |group: &CaseGroup<'_>| {
        let scaled = group.records.iter().filter(|record| !takes_fixed_part(record));
        scaled.filter_map(|record| spark(record)?.iter().copied().max()).max().unwrap_or(0)
    };
    let highest: Vec<u64> = context.groups.iter().map(highest_of).collect();
    // The least memory is marked in the column that it is compared by.
    let memory = |row: &CaseRow<'_>, bytes: Option<u64>, is_compared: bool| {
        let is_best = is_compared && is_contender(row.record) && bytes.is_some() && bytes == least[row.group];
        Cell::bytes(bytes).with_class(if is_best { "number best" } else { "number" })
    };
    let line = |row: &CaseRow<'_>| {
        let line = spark(row.record)
            .map_or_else(String::new, |line| spark_line(line, highest[row.group], &row.record.strategy));
        let note = if drawn.contains(&row.record.case_id) { "" } else { "<small>not drawn</small>" };
        Cell::html(line + note, if note.is_empty() { "drawn" } else { "not drawn" })
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
        .numbers("fragmentation", "fragmentation_share", |row| {
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

/// A small line without axes, in the colour of the strategy.
fn spark_line(levels: &[u64], highest: u64, strategy: &str) -> String {
    let (width, height) = (SPARK_POINTS as f64, 16.0);
    let mut path = String::new();
    for (place, &level) in levels.iter().enumerate() {
        let x = place as f64 * width / levels.len().saturating_sub(1).max(1) as f64;
        let y = height - (level as f64 / highest.max(1) as f64).min(1.0) * (height - 1.0);
        let _ = write!(path, "{}{x:.0} {y:.1}", if place == 0 { "M" } else { "L" });
    }
    let colour = StrategyLook::of(strategy).colour();
    format!("<svg class=\"spark {colour}\" viewBox=\"0 0 60 16\" aria-hidden=\"true\"><path d=\"{path}\"/></svg>")
}

#[cfg(test)]
mod tests {
    use super::{super::super::scenario::groups, *};
    use crate::{device::DeviceClock, measure::CaseLabel};

    fn record(strategy: &str, bytes: u64) -> CaseRecord {
        let label = CaseLabel { workload: "w".to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        CaseRecord {
            clock: Some(DeviceClock::Virtual),
            driver_alloc_calls: Some(1),
            peak_device_used_bytes: Some(bytes),
            ..CaseRecord::unmeasured(&label, Status::Completed, "")
        }
    }

    #[test]
    fn headline_is_about_the_workload_shown() {
        let mut records = vec![record("a", 100), record("b", 250), record("arena", 9000)];
        let of = |records: &[CaseRecord]| headline(&groups(records)[0], "w");
        assert_eq!(of(&records), "On w, <code>b</code> takes 2.50 times the memory of <code>a</code>", "not arena");
        records[1].peak_device_used_bytes = Some(100);
        assert_eq!(of(&records), "On w, all strategies take about the same memory");
        records[1].status = Status::Oom;
        assert_eq!(of(&records), "On w, <code>b</code> ran out of memory");
        records[0].status = Status::Oom;
        assert_eq!(of(&records), "On w, 2 of 3 strategies ran out of memory");
    }
}
