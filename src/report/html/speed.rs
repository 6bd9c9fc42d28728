//! Speed: time in driver calls by outcome, and wall-clock times where they were measured.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    super::{render::counted, scenario::FamilyFigures},
    chart_data::ChartData,
    element::{Cell, HtmlTable, PageSection, code, escape, listed},
    first_screen::{
        Answer, FirstChart, StripChart, StripDot, StripRow, StripUnit, WorkloadList, id_pattern, place_chart, question,
        short, stem,
    },
    page_context::{CaseRow, PageContext, fastest},
};
use crate::{
    base::Nanos,
    measure::{CaseRecord, TimingRecord},
};

/// The strategy that does nothing: its time is that of the measurement.
const NOTHING: &str = "null";

/// Whether most cases of a suite have wall-clock times.
pub(super) fn is_timed(context: &PageContext<'_>, suite: &str) -> bool {
    let cases = context.groups.iter().filter(|group| group.scenario.suite == suite).map(|group| group.records.len());
    let timed: BTreeSet<&str> = timings(context, suite).map(|row| row.case_id.as_str()).collect();
    !timed.is_empty() && 2 * timed.len() >= cases.sum()
}

fn timings<'a>(context: &PageContext<'a>, suite: &str) -> impl Iterator<Item = &'a TimingRecord> {
    context.runs.all(|run| &run.timings).into_iter().filter(move |row| row.suite == suite)
}

/// How fast strategies are; `None` without times.
pub(super) fn answer(context: &PageContext<'_>, data: &mut ChartData, suite: &str) -> Option<Answer> {
    let mut workloads = WorkloadList::default();
    let mut strips: BTreeMap<&str, StripRow> = BTreeMap::new();
    let mut alone: BTreeMap<&str, BTreeMap<&str, (&str, f64)>> = BTreeMap::new();
    for row in timings(context, suite) {
        let strip = strips.entry(&row.strategy).or_default();
        strip.strategy = context.place(&row.strategy);
        let threads = row.threads.map_or_else(String::new, |threads| format!(", threads: {threads}"));
        let place = workloads.place(&format!("{}{threads}", row.workload), &id_pattern(&row.case_id, &row.strategy));
        let scale = row.ns_per_operation / (row.pass_median_ns.max(1)) as f64;
        let passes = (short(row.pass_min_ns as f64 * scale), short(row.pass_max_ns as f64 * scale));
        let note = format!("passes: {}", row.passes);
        strip.dots.push(StripDot(place, short(row.ns_per_operation), note, Some(passes)));
        if row.threads.is_none() {
            // Of several sizes of a pattern, the one without parameters of its own.
            let own = (row.workload.as_str(), row.ns_per_operation);
            let kept = alone.entry(&row.strategy).or_default().entry(stem(&row.workload)).or_insert(own);
            if row.workload.len() < kept.0.len() {
                *kept = own;
            }
        }
    }
    // Medians are compared over the patterns that all strategies ran.
    let shared: BTreeSet<&str> = alone
        .values()
        .map(|times| times.keys().copied().collect::<BTreeSet<&str>>())
        .reduce(|common, own| common.intersection(&own).copied().collect())
        .unwrap_or_default();
    for (strategy, strip) in &mut strips {
        let times = alone
            .get(strategy)
            .map(|times| shared.iter().filter_map(|name| times.get(name).map(|(_, time)| *time)).collect());
        strip.median = times.and_then(|times| FamilyFigures::of(times).median).map(short);
    }
    let mut strips: Vec<(&str, StripRow)> = strips.into_iter().collect();
    strips.sort_by(|one, other| {
        let median = |row: &StripRow| row.median.unwrap_or(f64::INFINITY);
        median(&one.1).total_cmp(&median(&other.1))
    });
    let sentence = time_sentence(&strips, &shared)?;
    let nothing = match strips.iter().any(|(name, _)| *name == NOTHING) {
        true => format!(" {} does nothing and only measures.", code(NOTHING)),
        false => String::new(),
    };
    let caption = format!(
        "Dot: one pattern, with its fastest and slowest pass; hollow: threads under a lock. Bar: median of {}.{nothing}",
        counted(shared.len(), "pattern", "patterns"),
    );
    let chart = StripChart {
        axis: "time per operation (log)".to_owned(),
        unit: StripUnit::Nanoseconds,
        time_axis: String::new(),
        workloads: workloads.all,
        rows: strips.into_iter().map(|(_, strip)| strip).collect(),
    };
    let picture = place_chart(data, FirstChart::Strips(chart), "Time per operation, one row for each strategy");
    let question = question(context.runs.runs, suite, "How fast is each strategy?");
    Some(Answer { question, sentence, picture, caption, ..Answer::default() })
}

/// The fastest, and how the others compare; `None` if nothing was timed.
fn time_sentence(strips: &[(&str, StripRow)], shared: &BTreeSet<&str>) -> Option<String> {
    let mut real = strips.iter().filter(|(name, _)| *name != NOTHING);
    let (name, fastest) = real.next()?;
    let Some(median) = fastest.median else {
        return Some("No pattern was run by all strategies, so their times cannot be compared.".to_owned());
    };
    let others: Vec<String> = real
        .filter_map(|(name, strip)| Some(format!("{} {}", code(name), Nanos(strip.median?.round() as u64))))
        .collect();
    let over = counted(shared.len(), "pattern", "patterns");
    let rest = if others.is_empty() { String::new() } else { format!("; {}", listed(&others)) };
    Some(format!("{} takes {} per operation (median over {over}){rest}.", code(name), Nanos(median.round() as u64)))
}

/// The section; `None` if nothing ran.
pub(super) fn section(context: &PageContext<'_>) -> Option<PageSection> {
    let rows: Vec<CaseRow<'_>> = context.rows().filter(|row| row.record.clock.is_some()).collect();
    let timings = context.runs.all(|run| &run.timings);
    if rows.is_empty() && timings.is_empty() {
        return None;
    }
    let mut body = String::new();
    if !rows.is_empty() {
        body.push_str("<h3>Driver time per operation</h3>\n");
        body.push_str(&latencies(context, &rows));
        body.push_str(
            "<p class=\"note\">Lines go from the median over the 99th percentile (dot) to the maximum, on a logarithmic \
             axis from 100 ns to 10 s. Operations without a driver call take no driver time. From cache: requests that \
             took no new memory from the device.</p>\n",
        );
    }
    if !timings.is_empty() {
        body.push_str("<h3>Wall-clock times</h3>\n");
        body.push_str(&wall_clock(context, &timings));
        body.push_str(
            "<p class=\"note\">Time per operation: the median pass, without sampling. Percentiles: a second pass that \
             times a sample.</p>\n",
        );
    }
    Some(PageSection { id: "speed", subject: "Speed", finding: finding(context), body })
}

fn finding(context: &PageContext<'_>) -> String {
    let spread = context.titled().filter_map(|(group, title)| {
        let best = fastest(group)?;
        let slow =
            group.records.iter().filter(|record| record.ooms == Some(0)).max_by_key(|record| record.driver_ns)?;
        let (best, slow) = ((best, best.driver_ns?), (slow, slow.driver_ns?));
        Some((slow.1 as f64 / best.1.max(1) as f64, best, slow, title))
    });
    match spread.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((ratio, (best, best_ns), (slow, slow_ns), title)) if ratio >= 1.5 => format!(
            "{} spends {} in the driver on {}; {} {}",
            code(&slow.strategy),
            Nanos(slow_ns),
            escape(title),
            code(&best.strategy),
            Nanos(best_ns)
        ),
        _ => "Time per operation".to_owned(),
    }
}

fn latencies(context: &PageContext<'_>, rows: &[CaseRow<'_>]) -> String {
    let new = |record: &CaseRecord| [record.new_segment_p50_ns, record.new_segment_p99_ns, record.new_segment_max_ns];
    let free = |record: &CaseRecord| [record.free_p50_ns, record.free_p99_ns, record.free_max_ns];
    // The median free needs no driver call under most strategies, so it has no column.
    let table = context
        .case_table(rows)
        .numbers("driver time", "driver_ns", |row| Cell::nanos(row.record.driver_ns))
        .numbers("from cache", "cache_share", |row| Cell::percent(from_cache(row.record)))
        .words("new memory", "new_segment", |row| whisker(new(row.record)))
        .numbers("p50", "new_segment_p50_ns", |row| Cell::nanos(row.record.new_segment_p50_ns))
        .numbers("p99", "new_segment_p99_ns", |row| Cell::nanos(row.record.new_segment_p99_ns))
        .numbers("max", "new_segment_max_ns", |row| Cell::nanos(row.record.new_segment_max_ns))
        .words("free", "free", |row| whisker(free(row.record)))
        .numbers("p99", "free_p99_ns", |row| Cell::nanos(row.record.free_p99_ns))
        .numbers("max", "free_max_ns", |row| Cell::nanos(row.record.free_max_ns));
    table.html("Driver time per operation", CaseRow::id)
}

fn from_cache(record: &CaseRecord) -> Option<f64> {
    let (requests, hits, splits) = (record.allocs.filter(|count| *count > 0)?, record.hits?, record.splits?);
    Some((hits + splits) as f64 / requests as f64)
}

/// Median, 99th percentile and maximum on a logarithmic axis from 100 ns to 10 s.
fn whisker(times: [Option<u64>; 3]) -> Cell {
    let [Some(median), Some(high), Some(longest @ 1..)] = times else { return Cell::html(String::new(), 0) };
    let place = |nanos: u64| (((nanos.max(100) as f64).log10() - 2.0) / 8.0 * 100.0).clamp(0.0, 100.0);
    let (left, dot, right) = (place(median), place(high), place(longest));
    let html = format!(
        "<span class=\"whisker\" title=\"p50 {}, p99 {}, max {}\"><i style=\"left:{left:.1}%;width:{:.1}%\"></i><b \
         style=\"left:{dot:.1}%\"></b></span>",
        Nanos(median),
        Nanos(high),
        Nanos(longest),
        right - left,
    );
    Cell::html(html, high)
}

fn wall_clock(context: &PageContext<'_>, rows: &[&TimingRecord]) -> String {
    let per_operation =
        |row: &TimingRecord| Cell::number(format!("{:.1} ns", row.ns_per_operation), row.ns_per_operation);
    let rate = |row: &TimingRecord| {
        Cell::number(format!("{:.1} M", row.operations_per_second / 1e6), row.operations_per_second)
    };
    let alloc = |row: &TimingRecord| [row.alloc_p50_ns, row.alloc_p99_ns, row.alloc_p999_ns];
    let free = |row: &TimingRecord| [row.free_p50_ns, row.free_p99_ns, row.free_p999_ns];
    let table = HtmlTable::of(rows)
        .words("workload", "workload", |row| Cell::name(&row.workload))
        .words("strategy", "strategy", |row| context.strategy(&row.strategy))
        .numbers("threads", "threads", |row| Cell::count(row.threads.map(u64::from)))
        .numbers("time per operation", "ns_per_operation", |row| per_operation(row))
        .numbers("operations/s", "operations_per_second", |row| rate(row))
        .numbers("spread of rounds", "round_spread_share", |row| Cell::percent(row.round_spread_share))
        .words("alloc", "alloc", |row| whisker(alloc(row)))
        .numbers("p50", "alloc_p50_ns", |row| Cell::nanos(row.alloc_p50_ns))
        .numbers("p99", "alloc_p99_ns", |row| Cell::nanos(row.alloc_p99_ns))
        .numbers("p99.9", "alloc_p999_ns", |row| Cell::nanos(row.alloc_p999_ns))
        .words("free", "free", |row| whisker(free(row)))
        .numbers("p50", "free_p50_ns", |row| Cell::nanos(row.free_p50_ns))
        .numbers("p99", "free_p99_ns", |row| Cell::nanos(row.free_p99_ns))
        .numbers("p99.9", "free_p999_ns", |row| Cell::nanos(row.free_p999_ns));
    table.html("Wall-clock times", |row| Some(&row.case_id))
}

#[cfg(test)]
mod tests {
    use super::{super::element::no_case, *};

    #[test]
    fn whisker_is_logarithmic() {
        let drawn = |times| HtmlTable::of(&[times]).words("w", "w", |times| whisker(*times)).html("t", no_case);
        let line = drawn([Some(100), Some(1_000_000), Some(10_000_000_000)]);
        assert!(line.contains("left:0.0%;width:100.0%") && line.contains("left:50.0%"), "{line}");
        assert!(!drawn([Some(0), Some(0), Some(0)]).contains("whisker"), "no time, no line");
        assert!(!drawn([None, None, None]).contains("whisker"));
    }
}
