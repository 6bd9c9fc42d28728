//! When and why memory ran out, and the layout of memory at that moment.

use super::{
    super::render::counted,
    chart_data::{AddressChart, MemoryMap, chosen_frames},
    element::{Cell, HtmlTable, PageSection, chart, code, escape, folded, no_case},
    page_context::{CaseRow, PageContext, moment},
};
use crate::{
    base::Bytes,
    measure::{CaseDetail, CaseRecord, FrameSums, LayoutFrame, Occasion, Status},
    replay::OomCause,
};

/// The section on failed requests; `None` if there are none.
pub(super) fn section(context: &PageContext<'_>) -> Option<PageSection> {
    let rows: Vec<CaseRow<'_>> = context.rows().filter(|row| row.record.status == Status::Oom).collect();
    if rows.is_empty() {
        return None;
    }
    let when = |record: &CaseRecord| {
        let event = record.oom_event.map_or_else(String::new, |event| event.to_string());
        Cell::html(escape(&moment(record)).into_owned(), event)
    };
    let cause = |record: &CaseRecord| Cell::text(record.oom_cause.map_or("", |cause| cause.name()));
    let table = context
        .case_table(&rows)
        .words("when", "oom_event", |row| when(row.record))
        .numbers("requested", "oom_requested_bytes", |row| Cell::bytes(row.record.oom_requested_bytes))
        .numbers("free in total", "oom_free_bytes", |row| Cell::bytes(row.record.oom_free_bytes))
        .numbers("of which cached", "oom_cached_free_bytes", |row| Cell::bytes(row.record.oom_cached_free_bytes))
        .numbers("largest piece", "oom_largest_free_bytes", |row| Cell::bytes(row.record.oom_largest_free_bytes))
        .words("cause", "oom_cause", |row| cause(row.record))
        .words("most of it", "oom_obstacle", |row| obstacle(row.record));
    let body = table.html("Cases that ran out of memory", CaseRow::id);
    let all = counted(rows.len(), "case", "cases");
    let fragmented = rows.iter().filter(|row| row.record.oom_cause == Some(OomCause::Fragmentation)).count();
    let finding = match fragmented {
        0 => format!("Memory ran out in {all}: there was not enough"),
        some if some == rows.len() => format!("Memory ran out in {all} although enough was free: it was in pieces"),
        some => format!("Memory ran out in {all}, in {some} of them although enough was free"),
    };
    Some(PageSection { id: "shortage", subject: "Out of memory", finding, body })
}

/// Where most of the free memory was.
fn obstacle(record: &CaseRecord) -> Cell {
    match (record.oom_obstacle, record.oom_obstacle_bytes) {
        (Some(obstacle), Some(bytes)) => Cell::text(&format!("{} {}", Bytes(bytes), obstacle.words())),
        _ => Cell::text(&record.reason),
    }
}

/// The memory maps of a case.
pub(super) struct MappedCase {
    map: MemoryMap,
    rows: Vec<FrameRow>,
    /// The most telling moment in a sentence, with its rank: OOMs first, then by free bytes.
    finding: (bool, u64, String),
}

/// A frame of a memory map as a row.
struct FrameRow {
    title: String,
    strategy: String,
    event: u64,
    occasion: Occasion,
    sums: FrameSums,
    /// It is the allocated peak itself, not a moment close to it.
    is_exact: bool,
}

impl MappedCase {
    /// At most `most` frames; `None` if the case has none.
    pub(super) fn of(
        context: &PageContext<'_>,
        record: &CaseRecord,
        title: &str,
        detail: &CaseDetail,
        most: usize,
    ) -> Option<MappedCase> {
        if detail.frames.is_empty() {
            return None;
        }
        let row = |frame: &LayoutFrame| FrameRow {
            title: title.to_owned(),
            strategy: record.strategy.clone(),
            event: frame.event,
            occasion: frame.occasion,
            sums: frame.sums(),
            is_exact: Some(frame.event) == record.peak_allocated_event,
        };
        Some(MappedCase {
            map: MemoryMap::of(title, context.place(&record.strategy), detail, most),
            rows: chosen_frames(&detail.frames, most).filter(|f| f.occasion != Occasion::Regular).map(row).collect(),
            finding: finding(record, title, &detail.frames),
        })
    }
}

/// The free memory when a request failed, otherwise at the peak.
fn finding(record: &CaseRecord, title: &str, frames: &[LayoutFrame]) -> (bool, u64, String) {
    let at = |occasion| frames.iter().find(|frame| frame.occasion == occasion);
    let Some(frame) = at(Occasion::OutOfMemory).or_else(|| at(Occasion::Peak)) else {
        return (false, 0, "Blocks in memory".to_owned());
    };
    let sums = frame.sums();
    let holes = counted(sums.holes as usize, "hole", "holes");
    let free = format!("{} were free in {holes}, the largest {}", Bytes(sums.free), Bytes(sums.largest_hole));
    let place = format!("{} on {}", code(&record.strategy), escape(title));
    let failed = frame.occasion == Occasion::OutOfMemory;
    let words = match record.oom_requested_bytes.filter(|_| failed) {
        Some(asked) => format!("When {place} failed to allocate {}, {free}", Bytes(asked)),
        None => format!("At the peak of {place}, {free}"),
    };
    (failed, sums.free, words)
}

fn occasion(row: &FrameRow) -> Cell {
    Cell::text(match row.occasion {
        Occasion::Regular => "regular",
        Occasion::Peak if row.is_exact => "peak",
        Occasion::Peak => "close to the peak",
        Occasion::OutOfMemory => "out of memory",
        Occasion::End => "end",
    })
}

/// The section with the memory maps; `None` if there are none.
pub(super) fn map_section(context: &PageContext<'_>, mapped: Vec<MappedCase>) -> Option<(PageSection, Vec<MemoryMap>)> {
    let telling = mapped.iter().max_by_key(|case| (case.finding.0, case.finding.1))?;
    let finding = telling.finding.2.clone();
    let (maps, rows): (Vec<MemoryMap>, Vec<Vec<FrameRow>>) =
        mapped.into_iter().map(|case| (case.map, case.rows)).unzip();
    let rows: Vec<FrameRow> = rows.into_iter().flatten().collect();
    let table = HtmlTable::of(&rows)
        .words("workload", "workload", |row| Cell::name(&row.title))
        .words("strategy", "strategy", |row| context.strategy(&row.strategy))
        .numbers("event", "event", |row| Cell::count(row.event))
        .words("moment", "occasion", occasion)
        .numbers("allocated", "allocated", |row| Cell::bytes(row.sums.allocated))
        .numbers("waiting for a stream", "pending", |row| Cell::bytes(row.sums.pending))
        .numbers("in holes", "free", |row| Cell::bytes(row.sums.free))
        .numbers("holes", "holes", |row| Cell::count(row.sums.holes))
        .numbers("largest hole", "largest_hole", |row| Cell::bytes(row.sums.largest_hole))
        .numbers("segments", "segments", |row| Cell::count(row.sums.segments));
    let table = table.html("Memory at the peak, at the first failure and at the end", no_case);
    let words = "All reserved memory in address order, in rows like lines of text. Orange is a hole: reserved \
                 and free. Other colours are blocks in use, with a white line between two of them. A black tick begins a segment.";
    let body = chart("map", 0, "Blocks in segments", words, "Memory map") + &folded(&table);
    Some((PageSection { id: "map", subject: "Memory map", finding, body }, maps))
}

/// The section with addresses over time; `None` if no case has any.
pub(super) fn address_section(context: &PageContext<'_>, charts: &[AddressChart]) -> Option<PageSection> {
    if charts.is_empty() {
        return None;
    }
    let table = HtmlTable::of(charts)
        .words("workload", "workload", |chart| Cell::name(&chart.title))
        .words("strategy", "strategy", |chart| context.strategy(context.strategies[chart.strategy]))
        .numbers("blocks", "blocks", |chart| Cell::count(chart.lifetimes.blocks_left_out.all))
        .numbers("drawn one by one", "drawn", |chart| Cell::count(chart.lifetimes.blocks.len() as u64))
        .numbers("bytes x events drawn as a mean", "left_out", |chart| Cell::text(&left_out(chart)));
    let table = table.html("Blocks in the pictures of addresses over time", no_case);
    let words = "Every rectangle is a block: from left to right its life, from bottom to top its addresses. Orange is reserved \
                 and free; what is orange beside blocks that never end is fragmentation. Segments that are far apart on \
                 the device are drawn one above another, without the gaps.";
    let body = chart("address", 0, "Blocks over addresses and time", words, "Addresses over time") + &folded(&table);
    let finding = "Where blocks lay, and how long".to_owned();
    Some(PageSection { id: "addresses", subject: "Addresses", finding, body })
}

/// The part of memory x time that is not drawn block by block, in percent.
fn left_out(chart: &AddressChart) -> String {
    match chart.lifetimes.blocks_left_out.millionths {
        0 => "0 %".to_owned(),
        millionths => format!("{:.4} %", millionths as f64 / 10_000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::CaseLabel;

    #[test]
    fn moment_names_the_step_before_the_event() {
        let label = CaseLabel::default();
        let record = CaseRecord { oom_event: Some(7), ..CaseRecord::unmeasured(&label, Status::Oom, "") };
        assert_eq!(moment(&record), "event 7");
        let in_step = CaseRecord { oom_step: Some(2), oom_phase: Some("backward".into()), ..record };
        assert_eq!(moment(&in_step), "step 2, backward");
    }
}
