//! Where memory was lost: from what the program holds to what the device shows, and the shares in between.

use super::{
    super::scenario::is_contender,
    element::{Cell, Column, Part, Section, Table, code, escape, stacked},
    material::Material,
};
use crate::{base::Bytes, measure::CaseRecord};

const LEGEND: &str = "<ul class=\"legend\" aria-label=\"Parts of the bars\"><li><i class=\"live\"></i>live: what the \
                      program held</li><li><i class=\"rounding\"></i>rounding: blocks larger than what was asked \
                      for</li><li><i class=\"cached\"></i>cache: reserved and in no block</li><li><i \
                      class=\"pages\"></i>pages, context and libraries</li></ul>\n";

/// The section; none where no case both completed and has a bound.
pub(super) fn section(material: &Material<'_>) -> Option<Section> {
    let waterfall = waterfall(material)?;
    let shares = fragmentation(material);
    let body = format!(
        "<h3>From requested to reserved</h3>\n{LEGEND}{}<p class=\"note\">Each number is the highest over the whole \
         run, at its own moment; a case that ended early is left out. Over live is reserved against what was \
         live.</p>\n<h3>Fragmentation</h3>\n{}<p class=\"note\">Internal: lost to rounding inside blocks. External: free \
         memory of the cache outside its largest piece. Idle: reserved and in no block, at the moment when most was \
         allocated, and when most was reserved.</p>\n",
        waterfall.html(),
        shares.html()
    );
    Some(Section { id: "loss", subject: "Where memory was lost", finding: finding(material), body })
}

/// The four parts of a bar: each the step from one peak to the next, none below zero. Where nobody knows what the device
/// shows, the last is missing.
fn parts(record: &CaseRecord) -> [Part; 4] {
    let live = record.bound_requested_bytes.unwrap_or(0);
    let allocated = record.peak_allocated_bytes.max(live);
    let reserved = record.peak_reserved_bytes.max(allocated);
    let used = record.peak_device_used_bytes.unwrap_or(0).max(reserved);
    [
        Part { class: "live", bytes: live, meaning: "live" },
        Part { class: "rounding", bytes: allocated - live, meaning: "rounding" },
        Part { class: "cached", bytes: reserved - allocated, meaning: "cache" },
        Part { class: "pages", bytes: used - reserved, meaning: "pages and context" },
    ]
}

fn waterfall(material: &Material<'_>) -> Option<Table> {
    let mut columns = vec![
        Column::words("workload", "workload"),
        Column::words("strategy", "strategy"),
        Column::words("live &rarr; rounding &rarr; cache &rarr; pages", "waterfall"),
        Column::numbers("live", "bound_requested_bytes"),
        Column::numbers("allocated", "peak_allocated_bytes"),
        Column::numbers("reserved", "peak_reserved_bytes"),
        Column::numbers("device used", "peak_device_used_bytes"),
        Column::numbers("over live", "over_live"),
    ];
    let packed = material.gathered.records.iter().any(|record| record.packed_bytes.is_some());
    if packed {
        columns.insert(4, Column::numbers("packed", "packed_bytes"));
    }
    let mut table = Table::new("From requested to reserved", columns);
    for (group, title) in material.titled() {
        let length = |record: &&CaseRecord| parts(record).iter().map(|part| part.bytes).sum::<u64>();
        let whole = group.records.iter().map(length).max().unwrap_or(0);
        for record in group.records.iter().filter(|record| is_contender(record)) {
            let Some(live) = record.bound_requested_bytes else { continue };
            let used = record.peak_device_used_bytes;
            let over = record.peak_reserved_bytes as f64 / live.max(1) as f64 - 1.0;
            let mut cells = vec![
                Cell::name(title),
                material.strategy(&record.strategy),
                Cell::html(stacked(&parts(record), whole), used.map_or_else(String::new, |bytes| bytes.to_string()))
                    .with_class("wide"),
                Cell::bytes(live),
                Cell::bytes(record.peak_allocated_bytes),
                Cell::bytes(record.peak_reserved_bytes),
                Cell::maybe_bytes(used),
                Cell::number(format!("{:+.1} %", over * 100.0), over),
            ];
            if packed {
                cells.insert(4, Cell::maybe_bytes(record.packed_bytes));
            }
            table.row_of(&record.case_id, cells);
        }
    }
    (!table.is_empty()).then_some(table)
}

fn fragmentation(material: &Material<'_>) -> Table {
    let mut table = Table::new(
        "Fragmentation",
        vec![
            Column::words("workload", "workload"),
            Column::words("strategy", "strategy"),
            Column::numbers("internal", "internal_fragmentation"),
            Column::numbers("external", "external_fragmentation"),
            Column::numbers("idle at allocated peak", "idle_share_at_allocated_peak"),
            Column::numbers("idle at reserved peak", "idle_share_at_reserved_peak"),
            Column::numbers("segments at most", "peak_segments"),
        ],
    );
    for (group, title) in material.titled() {
        for record in group.records.iter().filter(|record| record.clock.is_some()) {
            table.row_of(
                &record.case_id,
                vec![
                    Cell::name(title),
                    material.strategy(&record.strategy),
                    Cell::share(record.internal_fragmentation),
                    Cell::share(record.external_fragmentation),
                    Cell::share(record.idle_share_at_allocated_peak),
                    Cell::share(record.idle_share_at_reserved_peak),
                    Cell::count(record.peak_segments),
                ],
            );
        }
    }
    table
}

/// The case that lost most, and to what.
fn finding(material: &Material<'_>) -> String {
    let cases = material.titled().flat_map(|(group, title)| group.records.iter().map(move |record| (*record, title)));
    let losses = cases.filter(|(record, _)| is_contender(record) && record.bound_requested_bytes.is_some()).map(
        |(record, title)| {
            let [_, rounding, cached, _] = parts(record);
            let (bytes, does, what) = if cached.bytes >= rounding.bytes {
                (cached.bytes, "leaves", "idle in its cache")
            } else {
                (rounding.bytes, "loses", "to rounding")
            };
            (bytes, does, what, record, title)
        },
    );
    match losses.max_by_key(|loss| loss.0).filter(|loss| loss.0 > 0) {
        Some((bytes, does, what, record, title)) => {
            format!("{} {does} {} {what} on {}", code(&record.strategy), Bytes(bytes), escape(title))
        }
        None => "Nothing was lost".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::gather::{Gathered, Run},
        *,
    };
    use crate::{device::Clock, measure::Status};

    #[test]
    fn what_nobody_knows_of_the_device_is_an_empty_cell_beside_a_bar_of_the_rest() {
        let record = CaseRecord {
            status: Status::Completed,
            clock: Some(Clock::Virtual),
            driver_alloc_calls: 1,
            bound_requested_bytes: Some(1 << 20),
            peak_allocated_bytes: 1 << 20,
            peak_reserved_bytes: 2 << 20,
            ..CaseRecord::default()
        };
        let runs = [Run { records: vec![record], ..Run::default() }];
        let gathered = Gathered::new(&runs);
        let html = waterfall(&Material::new(&gathered)).unwrap().html();
        assert!(!html.contains(">0 B<"), "{html}");
        assert_eq!(html.matches("style=\"width:50.000%\"").count(), 2, "{html}");
    }

    #[test]
    fn the_parts_of_a_bar_add_up_to_what_the_device_shows() {
        let record = CaseRecord {
            bound_requested_bytes: Some(70),
            peak_allocated_bytes: 80,
            peak_reserved_bytes: 100,
            peak_device_used_bytes: Some(130),
            ..CaseRecord::default()
        };
        assert_eq!(parts(&record).map(|part| part.bytes), [70, 10, 20, 30]);
        let pages_only = CaseRecord { peak_reserved_bytes: 75, ..record };
        assert_eq!(parts(&pages_only).map(|part| part.bytes), [70, 10, 0, 50], "reserved below allocated: stitched");
    }
}
