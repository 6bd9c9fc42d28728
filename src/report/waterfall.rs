//! How requested becomes reserved: what each case took, beside what its trace needs at least.
//!
//! From left to right every number is at least the one before, as long as a strategy needs addresses in a row: requested
//! and rounded are bounds of the trace itself, packed is a layout of it by somebody who looks ahead, reserved and device
//! used are this case's peaks. Each is the highest over the whole trace, at its own moment.

use comfy_table::{Cell, ContentArrangement, Table, presets};

use super::{
    scenario::{groups, title},
    table::{dress_for_terminal, headed, known_bytes},
};
use crate::{
    base::Bytes,
    measure::{CaseRecord, Status},
};

const LEGEND: &str = "Requested is the most that is alive at one time, which no allocator can do without, and rounded the \
                      same in whole 512 B. Over bound is reserved against rounded.";
const LEGEND_OF_PACKED: &str = " Packed is the best layout found with foresight.";

/// The table for a terminal of `width` columns; nothing where no case both completed and has a bound.
#[must_use]
pub fn waterfall(records: &[CaseRecord], width: Option<u16>) -> Option<String> {
    let mut table = table(records)?;
    dress_for_terminal(&mut table, width);
    Some(format!("{}\n{}\n", table.trim_fmt(), legend(records)))
}

/// The same as markdown.
pub(super) fn markdown(records: &[CaseRecord]) -> Option<String> {
    let mut table = table(records)?;
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Disabled);
    Some(format!("{}\n\n{}\n", table.trim_fmt(), legend(records)))
}

fn legend(records: &[CaseRecord]) -> String {
    format!("{LEGEND}{}", if has_packings(records) { LEGEND_OF_PACKED } else { "" })
}

fn has_packings(records: &[CaseRecord]) -> bool {
    records.iter().any(|record| record.packed_bytes.is_some())
}

/// A case that ended early held less than its trace needs: only those that completed can be set beside a bound.
fn table(records: &[CaseRecord]) -> Option<Table> {
    let packed = has_packings(records);
    let mut headings = vec!["workload", "strategy", "requested", "rounded", "packed", "reserved", "device used"];
    headings.push("over bound");
    if !packed {
        headings.retain(|heading| *heading != "packed");
    }
    let mut table = headed(&headings);
    let groups = groups(records);
    for group in &groups {
        let mut heading = title(&group.scenario, &groups);
        for record in &group.records {
            let (Status::Completed, Some(requested), Some(rounded)) =
                (record.status, record.bound_requested_bytes, record.bound_rounded_bytes)
            else {
                continue;
            };
            let mut cells = vec![std::mem::take(&mut heading), record.strategy.clone()];
            cells.extend([requested, rounded].map(|bytes| Bytes(bytes).to_string()));
            if packed {
                cells.push(record.packed_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string()));
            }
            cells.extend([Bytes(record.peak_reserved_bytes).to_string(), known_bytes(record.peak_device_used_bytes)]);
            cells.push(over(record.peak_reserved_bytes, rounded));
            table.add_row(cells.into_iter().map(Cell::new_owned));
        }
    }
    (table.row_count() > 0).then_some(table)
}

/// How much more than the bound, in percent; empty for a strategy that reserves nothing.
fn over(reserved: u64, bound: u64) -> String {
    if reserved == 0 || bound == 0 {
        return String::new();
    }
    format!("{:+.1} %", (reserved as f64 / bound as f64 - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, measure::CaseLabel};

    fn record(strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: "w".to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        CaseRecord {
            bound_requested_bytes: Some(39 * MIB),
            bound_rounded_bytes: Some(40 * MIB),
            peak_reserved_bytes: reserved,
            peak_device_used_bytes: reserved + 500 * MIB,
            ..CaseRecord::unmeasured(&label, status, "")
        }
    }

    #[test]
    fn the_steps_from_requested_to_device_used_stand_side_by_side() {
        let mut records = vec![
            record("caching", Status::Completed, 50 * MIB),
            record("null", Status::Completed, 0),
            record("direct", Status::Oom, 10 * MIB),
        ];
        let without = markdown(&records).unwrap();
        assert!(!without.contains("packed") && !without.contains("Packed"), "{without}");
        records[0].packed_bytes = Some(41 * MIB);
        insta::assert_snapshot!(markdown(&records).unwrap(), @"
        | workload | strategy | requested |  rounded |   packed | reserved | device used | over bound |
        |----------|----------|-----------|----------|----------|----------|-------------|------------|
        | w        | caching  |  39.0 MiB | 40.0 MiB | 41.0 MiB | 50.0 MiB |     550 MiB |    +25.0 % |
        |          | null     |  39.0 MiB | 40.0 MiB |          |      0 B |     500 MiB |            |

        Requested is the most that is alive at one time, which no allocator can do without, and rounded the same in whole 512 B. Over bound is reserved against rounded. Packed is the best layout found with foresight.
        ");
    }

    #[test]
    fn nothing_is_said_of_cases_without_a_bound() {
        let records = [CaseRecord { bound_rounded_bytes: None, ..record("caching", Status::Completed, MIB) }];
        assert_eq!(waterfall(&records, None), None);
    }
}
