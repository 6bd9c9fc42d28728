//! Where memory was lost: from live bytes to device memory use, and the shares in between.

use super::{
    super::scenario::{BoundRow, bounds, is_contender, takes_memory},
    element::{BarPart, Cell, HtmlTable, PageSection, code, escape, no_case, stacked},
    page_context::{CaseRow, PageContext, takes_fixed_part},
};
use crate::{
    base::Bytes,
    measure::{CaseRecord, Split},
};

const LEGEND: &str = "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"live\"></i>live: peak of live \
                      bytes</li><li><i class=\"rounding\"></i>rounding: blocks larger than what was asked \
                      for</li><li><i class=\"cached\"></i>cache: reserved and in no block</li><li><i \
                      class=\"pages\"></i>pages, context and libraries</li></ul>\n";

/// The section; `None` if no completed case has a bound.
pub(super) fn section(context: &PageContext<'_>) -> Option<PageSection> {
    let body = format!(
        "<h3>From requested to reserved</h3>\n{LEGEND}{}<p class=\"note\">Each number is a maximum over the whole run, at \
         its own moment; cases that ended early are left out. Over live: reserved compared with live.</p>\n\
         <h3>Fragmentation</h3>\n{}<p class=\"note\">Internal: lost to rounding inside blocks. External: cached free \
         memory outside its largest piece. Idle: reserved but not in a block, when most was allocated and when most was \
         reserved.</p>\n{}",
        waterfall(context)?,
        fragmentation(context),
        over_bound(context)
    );
    Some(PageSection { id: "loss", subject: "Lost memory", finding: finding(context), body })
}

/// The four parts of a bar: the steps from one peak to the next, at least zero. The last is zero if
/// the device memory use is unknown.
fn parts(record: &CaseRecord) -> [BarPart; 4] {
    let live = record.live_peak_bytes.unwrap_or(0);
    let allocated = record.peak_allocated_bytes.unwrap_or(0).max(live);
    let reserved = record.peak_reserved_bytes.unwrap_or(0).max(allocated);
    let used = record.peak_device_used_bytes.unwrap_or(0).max(reserved);
    [
        BarPart { class: "live", bytes: live, meaning: "live" },
        BarPart { class: "rounding", bytes: allocated - live, meaning: "rounding" },
        BarPart { class: "cached", bytes: reserved - allocated, meaning: "cache" },
        BarPart { class: "pages", bytes: used - reserved, meaning: "pages and context" },
    ]
}

fn waterfall(context: &PageContext<'_>) -> Option<String> {
    let is_shown = |record: &CaseRecord| takes_memory(record) && record.live_peak_bytes.is_some();
    let rows: Vec<CaseRow<'_>> = context.rows().filter(|row| is_shown(row.record)).collect();
    if rows.is_empty() {
        return None;
    }
    let length = |record: &CaseRecord| parts(record).iter().map(|part| part.bytes).sum::<u64>();
    // Bars are scaled to the longest of the workload. A fixed part of the device would make all others short.
    let mut whole = vec![0; context.groups.len()];
    for row in rows.iter().filter(|row| !takes_fixed_part(row.record)) {
        whole[row.group] = length(row.record).max(whole[row.group]);
    }
    let bar = |row: &CaseRow<'_>| {
        let bar = match takes_fixed_part(row.record) {
            true => "<small>a fixed part of the device</small>".to_owned(),
            false => stacked(&parts(row.record), whole[row.group]),
        };
        let used = row.record.peak_device_used_bytes;
        Cell::html(bar, used.map_or_else(String::new, |bytes| bytes.to_string())).with_class("wide")
    };
    let over = |record: &CaseRecord| {
        let live = record.live_peak_bytes.unwrap_or(0).max(1);
        let over = record.peak_reserved_bytes.unwrap_or(0) as f64 / live as f64 - 1.0;
        Cell::number(format!("{:+.1} %", over * 100.0), over)
    };
    let table = context
        .case_table(&rows)
        .words("live &rarr; rounding &rarr; cache &rarr; pages", "waterfall", bar)
        .numbers("live", "live_peak_bytes", |row| Cell::bytes(row.record.live_peak_bytes));
    let table = match rows.iter().any(|row| row.record.packed_bytes.is_some()) {
        true => table.numbers("packed", "packed_bytes", |row| Cell::bytes(row.record.packed_bytes)),
        false => table,
    };
    let table = table
        .numbers("allocated", "peak_allocated_bytes", |row| Cell::bytes(row.record.peak_allocated_bytes))
        .numbers("reserved", "peak_reserved_bytes", |row| Cell::bytes(row.record.peak_reserved_bytes))
        .numbers("device used", "peak_device_used_bytes", |row| Cell::bytes(row.record.peak_device_used_bytes))
        .numbers("over live", "over_live", |row| over(row.record));
    Some(table.html("From requested to reserved", CaseRow::id))
}

fn fragmentation(context: &PageContext<'_>) -> String {
    let rows: Vec<CaseRow<'_>> = context.rows().filter(|row| row.record.clock.is_some()).collect();
    let table = context
        .case_table(&rows)
        .numbers("internal", "internal_fragmentation_share", |row| Cell::share(row.record.internal_fragmentation_share))
        .numbers("external", "external_fragmentation_share", |row| Cell::share(row.record.external_fragmentation_share))
        .numbers("idle at allocated peak", "idle_at_allocated_peak_share", |row| {
            Cell::share(row.record.idle_at_allocated_peak_share)
        })
        .numbers("idle at reserved peak", "idle_at_reserved_peak_share", |row| {
            Cell::share(row.record.idle_at_reserved_peak_share)
        })
        .numbers("most segments", "peak_segments", |row| Cell::count(row.record.peak_segments));
    table.html("Fragmentation", CaseRow::id)
}

/// What strategies need and take over all workloads; nothing with one strategy or one workload.
fn over_bound(context: &PageContext<'_>) -> String {
    let records: Vec<CaseRecord> = context.rows().map(|row| row.record.clone()).collect();
    let rows: Vec<BoundRow> = bounds(&records);
    let strategies = rows.iter().filter(|row| row.is_of_all()).count();
    if strategies < 2 || context.groups.len() < 2 {
        return String::new();
    }
    let table = HtmlTable::of(&rows)
        .words("strategy", "strategy", |row| context.strategy(&row.strategy))
        .words("split", "split", |row| Cell::text(row.split.map_or("all", Split::name)))
        .words("generator", "generator", |row| Cell::text(row.generator.as_deref().unwrap_or("all")))
        .numbers("families", "families", |row| Cell::count(row.families))
        .numbers("completed cases", "completed_cases", |row| Cell::count(row.completed_cases));
    let table = match rows.iter().any(|row| row.median_need_ratio.is_some()) {
        true => table
            .numbers("need, median", "median_need_ratio", |row| Cell::decimal(row.median_need_ratio, 3))
            .numbers("from", "median_need_low_ratio", |row| Cell::decimal(row.median_need_low_ratio, 3))
            .numbers("to", "median_need_high_ratio", |row| Cell::decimal(row.median_need_high_ratio, 3))
            .numbers("need, 90th percentile", "p90_need_ratio", |row| Cell::decimal(row.p90_need_ratio, 3))
            .numbers("need, worst", "worst_need_ratio", |row| Cell::decimal(row.worst_need_ratio, 3)),
        false => table,
    };
    let table = table
        .numbers("appetite, median", "median_appetite_ratio", |row| Cell::decimal(row.median_appetite_ratio, 3))
        .numbers("from", "median_appetite_low_ratio", |row| Cell::decimal(row.median_appetite_low_ratio, 3))
        .numbers("to", "median_appetite_high_ratio", |row| Cell::decimal(row.median_appetite_high_ratio, 3))
        .numbers("appetite, 90th percentile", "p90_appetite_ratio", |row| Cell::decimal(row.p90_appetite_ratio, 3))
        .numbers("appetite, worst", "worst_appetite_ratio", |row| Cell::decimal(row.worst_appetite_ratio, 3));
    format!(
        "<h3>Over the bound</h3>\n{}<p class=\"note\">Need: the least memory in which a case completes. Appetite: peak \
         reserved memory without a limit. Both as multiples of the bound (the most bytes alive at one time, in blocks of \
         512 B), of completed cases. A family of variants of one program counts once, by the median of its patterns; from \
         and to: 95 % interval of the median over families. Worst: of all patterns. Settings of strategies were chosen on \
         the split train, and not on test. Strategies that take a fixed part of the device come last.</p>\n",
        table.html("Over the bound", no_case)
    )
}

/// The case that lost most, and to what.
fn finding(context: &PageContext<'_>) -> String {
    let contenders = context.rows().filter(|row| is_contender(row.record) && row.record.live_peak_bytes.is_some());
    let losses = contenders.map(|row| {
        let [_, rounding, cached, _] = parts(row.record);
        match cached.bytes >= rounding.bytes {
            true => (cached.bytes, "idle in its cache", row),
            false => (rounding.bytes, "to rounding", row),
        }
    });
    match losses.max_by_key(|loss| loss.0).filter(|loss| loss.0 > 0) {
        Some((bytes, where_to, row)) => {
            let (strategy, title) = (code(&row.record.strategy), escape(&row.title));
            format!("{strategy} loses {} {where_to} on {title}", Bytes(bytes))
        }
        None => "No memory was lost".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::page_context::{CollectedRuns, PageRun},
        *,
    };
    use crate::{device::DeviceClock, measure::Status};

    #[test]
    fn unknown_device_use_is_an_empty_cell() {
        let record = CaseRecord {
            status: Status::Completed,
            clock: Some(DeviceClock::Virtual),
            driver_alloc_calls: Some(1),
            live_peak_bytes: Some(1 << 20),
            peak_allocated_bytes: Some(1 << 20),
            peak_reserved_bytes: Some(2 << 20),
            ..CaseRecord::default()
        };
        let runs = [PageRun { records: vec![record], ..PageRun::default() }];
        let collected = CollectedRuns::new(&runs);
        let html = waterfall(&PageContext::new(&collected)).unwrap();
        assert!(!html.contains(">0 B<"), "{html}");
        assert_eq!(html.matches("style=\"width:50.000%\"").count(), 2, "{html}");
    }

    #[test]
    fn parts_of_a_bar_add_up() {
        let record = CaseRecord {
            live_peak_bytes: Some(70),
            peak_allocated_bytes: Some(80),
            peak_reserved_bytes: Some(100),
            peak_device_used_bytes: Some(130),
            ..CaseRecord::default()
        };
        assert_eq!(parts(&record).map(|part| part.bytes), [70, 10, 20, 30]);
        let pages_only = CaseRecord { peak_reserved_bytes: Some(75), ..record };
        assert_eq!(parts(&pages_only).map(|part| part.bytes), [70, 10, 0, 50], "reserved below allocated: stitched");
    }
}
