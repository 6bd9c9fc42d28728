//! What it costs: time in driver calls by outcome, and wall-clock times where they were taken.

use super::{
    element::{Cell, Column, Section, Table, code, escape},
    material::{Material, fastest},
};
use crate::{base::Nanos, measure::CaseRecord};

/// The section; none where nothing ran.
pub(super) fn section(material: &Material<'_>) -> Option<Section> {
    let measured = material.gathered.records.iter().any(|record| record.clock.is_some());
    let timed = timings(material);
    if !measured && timed.is_empty() {
        return None;
    }
    let mut body = String::new();
    if measured {
        body.push_str("<h3>Driver time of an operation</h3>\n");
        body.push_str(&latencies(material).html());
        body.push_str(
            "<p class=\"note\">Lines reach from the median over the 99th percentile (the dot) to the longest, on one \
             logarithmic axis from 100 ns to 10 s; operations that need no driver call take no driver time. From cache: \
             requests for which nothing new was taken from the device.</p>\n",
        );
    }
    if !timed.is_empty() {
        body.push_str("<h3>Wall-clock times</h3>\n");
        body.push_str(&timed.html());
        body.push_str(
            "<p class=\"note\">An operation takes the median pass with nobody watching; percentiles come from a second \
             pass that times some of them.</p>\n",
        );
    }
    Some(Section { id: "speed", subject: "Speed", finding: finding(material), body })
}

fn finding(material: &Material<'_>) -> String {
    let spread = material.titled().filter_map(|(group, title)| {
        let best = fastest(group)?;
        let slow = group.records.iter().filter(|record| record.ooms == 0).max_by_key(|record| record.driver_ns)?;
        Some((slow.driver_ns as f64 / best.driver_ns.max(1) as f64, best, slow, title))
    });
    match spread.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((ratio, best, slow, title)) if ratio >= 1.5 => format!(
            "{} spends {} in the driver on {}, {} {}",
            code(&slow.strategy),
            Nanos(slow.driver_ns),
            escape(title),
            code(&best.strategy),
            Nanos(best.driver_ns)
        ),
        _ => "What operations cost".to_owned(),
    }
}

fn latencies(material: &Material<'_>) -> Table {
    let mut table = Table::new(
        "Driver time of an operation",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::numbers("driver time", "driver_ns"),
            Column::numbers("from cache", "cache_share"),
            Column::words("new memory", "new_segment"),
            Column::numbers("p50", "new_segment_p50_ns"),
            Column::numbers("p99", "new_segment_p99_ns"),
            Column::numbers("max", "new_segment_max_ns"),
            Column::words("free", "free"),
            Column::numbers("p99", "free_p99_ns"),
            Column::numbers("max", "free_max_ns"),
        ],
    );
    for (group, title) in material.titled() {
        for record in group.records.iter().filter(|record| record.clock.is_some()) {
            let new = [record.new_segment_p50_ns, record.new_segment_p99_ns, record.new_segment_max_ns];
            let free = [record.free_p50_ns, record.free_p99_ns, record.free_max_ns];
            let mut cells = vec![
                Cell::name(title),
                material.strategy(&record.strategy),
                Cell::nanos(record.driver_ns),
                Cell::percent(from_cache(record)),
            ];
            cells.push(Cell::html(whisker(new), new[1].unwrap_or(0)));
            cells.extend(new.map(Cell::maybe_nanos));
            // The median free needs no driver call under most strategies.
            cells.push(Cell::html(whisker(free), free[1].unwrap_or(0)));
            cells.extend(free[1..].iter().copied().map(Cell::maybe_nanos));
            table.row_of(&record.case_id, cells);
        }
    }
    table
}

fn from_cache(record: &CaseRecord) -> Option<f64> {
    (record.allocs > 0).then(|| (record.hits + record.splits) as f64 / record.allocs as f64)
}

/// Median, 99th percentile and longest on a logarithmic axis from 100 ns to 10 s.
fn whisker(times: [Option<u64>; 3]) -> String {
    let [Some(median), Some(high), Some(longest)] = times else { return String::new() };
    if longest == 0 {
        return String::new();
    }
    let place = |nanos: u64| (((nanos.max(100) as f64).log10() - 2.0) / 8.0 * 100.0).clamp(0.0, 100.0);
    let (left, dot, right) = (place(median), place(high), place(longest));
    format!(
        "<span class=\"whisker\" title=\"p50 {}, p99 {}, max {}\"><i style=\"left:{left:.1}%;width:{:.1}%\"></i><b \
         style=\"left:{dot:.1}%\"></b></span>",
        Nanos(median),
        Nanos(high),
        Nanos(longest),
        right - left,
    )
}

fn timings(material: &Material<'_>) -> Table {
    let mut table = Table::new(
        "Wall-clock times",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::numbers("threads", "threads"),
            Column::numbers("an operation", "ns_per_operation"),
            Column::numbers("operations a second", "operations_per_second"),
            Column::words("alloc", "alloc"),
            Column::numbers("p50", "alloc_p50_ns"),
            Column::numbers("p99", "alloc_p99_ns"),
            Column::numbers("p99.9", "alloc_p999_ns"),
            Column::words("free", "free"),
            Column::numbers("p50", "free_p50_ns"),
            Column::numbers("p99", "free_p99_ns"),
            Column::numbers("p99.9", "free_p999_ns"),
        ],
    );
    for record in material.gathered.timings() {
        let alloc = [record.alloc_p50_ns, record.alloc_p99_ns, record.alloc_p999_ns];
        let free = [record.free_p50_ns, record.free_p99_ns, record.free_p999_ns];
        let mut cells = vec![
            Cell::name(&record.workload),
            material.strategy(&record.strategy),
            record.threads.map_or_else(Cell::empty, |threads| Cell::count(threads.into())),
            Cell::number(format!("{:.1} ns", record.ns_per_operation), record.ns_per_operation),
            Cell::number(format!("{:.1} M", record.operations_per_second / 1e6), record.operations_per_second),
        ];
        for times in [alloc, free] {
            cells.push(Cell::html(whisker(times), times[1].unwrap_or(0)));
            cells.extend(times.map(Cell::maybe_nanos));
        }
        table.row_of(&record.case_id, cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_lies_on_a_logarithmic_axis() {
        let line = whisker([Some(100), Some(1_000_000), Some(10_000_000_000)]);
        assert!(line.contains("left:0.0%;width:100.0%") && line.contains("left:50.0%"), "{line}");
        assert_eq!(whisker([Some(0), Some(0), Some(0)]), "", "nothing took no time");
        assert_eq!(whisker([None, None, None]), "");
    }
}
