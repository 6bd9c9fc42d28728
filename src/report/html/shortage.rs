//! When memory ran out and why, and what memory looked like then.

use super::{
    element::{Cell, Column, Section, Table, chart, code, counted, escape},
    island::{MemoryMap, chosen_frames},
    material::{Material, moment, out_of_memory},
};
use crate::{
    base::Bytes,
    measure::{CaseDetail, CaseRecord, Frame, Occasion},
    strategy::BlockState,
};

/// The section on failed requests; a sentence where there are none.
pub(super) fn section(material: &Material<'_>) -> Option<Section> {
    let mut table = Table::new(
        "Cases in which memory ran out",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::words("when", "oom_event"),
            Column::numbers("asked for", "oom_requested_bytes"),
            Column::numbers("free in all", "oom_free_bytes"),
            Column::numbers("of which cached", "oom_cached_free_bytes"),
            Column::numbers("largest piece", "oom_largest_free_bytes"),
            Column::words("cause", "oom_cause"),
            Column::words("most of it", "oom_obstacle"),
        ],
    );
    let mut causes = [0, 0];
    for (group, title) in material.titled() {
        for record in out_of_memory(group) {
            let cause = record.oom_cause.map_or("", |cause| cause.name());
            causes[usize::from(cause == "fragmentation")] += 1;
            table.row_of(
                &record.case_id,
                vec![
                    Cell::name(title),
                    material.strategy(&record.strategy),
                    Cell::html(escape(&moment(record)).into_owned(), when(record)),
                    Cell::maybe_bytes(record.oom_requested_bytes),
                    Cell::maybe_bytes(record.oom_free_bytes),
                    Cell::maybe_bytes(record.oom_cached_free_bytes),
                    Cell::maybe_bytes(record.oom_largest_free_bytes),
                    Cell::text(cause),
                    obstacle(record),
                ],
            );
        }
    }
    if table.is_empty() {
        return None;
    }
    let [exhausted, fragmented] = causes;
    let finding = match (exhausted, fragmented) {
        (_, 0) => format!("Memory ran out in {}: there was not enough", counted(exhausted, "case", "cases")),
        (0, _) => format!(
            "Memory ran out in {} although enough was free: it lay in pieces",
            counted(fragmented, "case", "cases")
        ),
        _ => format!(
            "Memory ran out in {}, in {fragmented} of them although enough was free",
            counted(exhausted + fragmented, "case", "cases")
        ),
    };
    Some(Section { id: "shortage", subject: "Out of memory", finding, body: table.html() })
}

/// Where most of the free memory lay.
fn obstacle(record: &CaseRecord) -> Cell {
    match (record.oom_obstacle, record.oom_obstacle_bytes) {
        (Some(obstacle), Some(bytes)) => Cell::text(&format!("{} {}", Bytes(bytes), obstacle.words())),
        _ => Cell::text(&record.reason),
    }
}

fn when(record: &CaseRecord) -> String {
    record.oom_event.map_or_else(String::new, |event| event.to_string())
}

/// Pictures of a case's memory, with the same frames as rows.
pub(super) struct Pictured {
    pub(super) map: MemoryMap,
    rows: Vec<Vec<Cell>>,
    /// The most telling moment in a sentence, and how telling it is.
    finding: (bool, u64, String),
}

impl Pictured {
    /// At most `most` frames; none where the case has no pictures.
    pub(super) fn of(
        material: &Material<'_>,
        record: &CaseRecord,
        title: &str,
        detail: &CaseDetail,
        most: usize,
    ) -> Option<Pictured> {
        if detail.frames.is_empty() {
            return None;
        }
        let row = |frame: &Frame| {
            let amounts =
                [BlockState::Allocated, BlockState::Pending, BlockState::Free].map(|state| frame.bytes_in(state));
            let largest = frame.blocks().filter(|b| b.state == BlockState::Free).map(|b| b.bytes).max().unwrap_or(0);
            let pieces: u64 = frame.segments.iter().map(|segment| u64::from(segment.pieces)).sum();
            let mut cells =
                vec![Cell::name(title), material.strategy(&record.strategy), Cell::count(frame.event), occasion(frame)];
            cells.extend(amounts.map(Cell::bytes));
            cells.extend([Cell::bytes(largest), Cell::count(pieces)]);
            cells
        };
        Some(Pictured {
            map: MemoryMap::of(title, material.place(&record.strategy), &detail.frames, most),
            rows: chosen_frames(&detail.frames, most).filter(|f| f.occasion != Occasion::Regular).map(row).collect(),
            finding: finding(record, title, &detail.frames),
        })
    }
}

/// What lay free where a request failed; otherwise at the peak.
fn finding(record: &CaseRecord, title: &str, frames: &[Frame]) -> (bool, u64, String) {
    let at = |occasion| frames.iter().find(|frame| frame.occasion == occasion);
    let Some(frame) = at(Occasion::OutOfMemory).or_else(|| at(Occasion::Peak)) else {
        return (false, 0, "How blocks lie in memory".to_owned());
    };
    let free = || frame.blocks().filter(|block| block.state == BlockState::Free);
    let (bytes, pieces) = (free().map(|block| block.bytes).sum::<u64>(), free().count());
    let largest = Bytes(free().map(|block| block.bytes).max().unwrap_or(0));
    let lay = format!("{} lay free in {}, the largest {largest}", Bytes(bytes), counted(pieces, "piece", "pieces"));
    let place = format!("{} on {}", code(&record.strategy), escape(title));
    let failed = frame.occasion == Occasion::OutOfMemory;
    let words = match record.oom_requested_bytes.filter(|_| failed) {
        Some(asked) => format!("When {place} could not serve {}, {lay}", Bytes(asked)),
        None => format!("At the peak of {place} {lay}"),
    };
    (failed, bytes, words)
}

fn occasion(frame: &Frame) -> Cell {
    Cell::text(match frame.occasion {
        Occasion::Regular => "on the way",
        Occasion::Peak => "peak",
        Occasion::OutOfMemory => "out of memory",
        Occasion::End => "end",
    })
}

/// The section with the memory map; none where nothing was pictured.
pub(super) fn map_section(pictured: Vec<Pictured>) -> Option<(Section, Vec<MemoryMap>)> {
    if pictured.is_empty() {
        return None;
    }
    let mut table = Table::new(
        "Memory at the peak, at the first failure and at the end",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::numbers("event", "event"),
            Column::words("moment", "occasion"),
            Column::numbers("in blocks", "allocated"),
            Column::numbers("waiting for a stream", "pending"),
            Column::numbers("free", "free"),
            Column::numbers("largest free block", "largest_free"),
            Column::numbers("segments", "segments"),
        ],
    );
    let telling = pictured.iter().max_by_key(|case| (case.finding.0, case.finding.1));
    let finding = telling.map_or_else(String::new, |case| case.finding.2.clone());
    let mut maps = Vec::new();
    for Pictured { map, rows, .. } in pictured {
        maps.push(map);
        rows.into_iter().for_each(|row| table.row(row));
    }
    let words = "Segments follow each other in address order like words in a text, with a hair of space between them; every \
                 rectangle is a block. Choose a case and step through its moments.";
    let body = chart("map", 0, "Blocks in segments", words, "Memory map") + &table.folded();
    Some((Section { id: "map", subject: "Memory map", finding, body }, maps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CaseLabel, Status};

    #[test]
    fn the_moment_names_the_step_before_the_event() {
        let label = CaseLabel::default();
        let record = CaseRecord { oom_event: Some(7), ..CaseRecord::unmeasured(&label, Status::Oom, "") };
        assert_eq!(moment(&record), "event 7");
        let in_step = CaseRecord { oom_step: Some(2), oom_phase: Some("backward".to_owned()), ..record };
        assert_eq!(moment(&in_step), "step 2, backward");
    }
}
