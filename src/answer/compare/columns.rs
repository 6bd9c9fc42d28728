//! Columns that must be equal, and which way is worse where they are not.

use serde::Serialize;
use serde_json::Value;

use crate::{device::Clock, measure::CaseRecord};

/// A column of a case that is not what it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Which case.
    pub case_id: String,
    /// Which column.
    pub column: String,
    /// What it was; null where there was nothing to say.
    pub old: Value,
    /// What it is.
    pub new: Value,
    /// Whether that is good.
    pub direction: Direction,
}

impl Change {
    /// New as a ratio to old, of numbers above zero.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        let (old, new) = (self.old.as_f64()?, self.new.as_f64()?);
        (old > 0.0).then_some(new / old)
    }
}

/// Whether a change is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Less is needed, or more succeeds.
    Better,
    /// More is needed, or less succeeds.
    Worse,
    /// Something else happens; whether that is good, the column does not say.
    Different,
}

/// Columns of which less is better.
const LESS_IS_BETTER: [&str; 14] = [
    "ooms",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "peak_device_used_bytes",
    "internal_fragmentation",
    "external_fragmentation",
    "peak_gap_share",
    "retries",
    "driver_calls",
    "driver_failures",
    "driver_ns",
    "elapsed_ns",
];

/// How cases end, the best first; being interrupted or skipped is neither.
const ENDINGS: [&str; 3] = ["completed", "oom", "error"];

/// The columns that differ. On a real clock times differ from run to run, and so are not among them.
#[must_use]
pub fn changes(old: &CaseRecord, new: &CaseRecord) -> Vec<Change> {
    let timed = new.clock == Some(Clock::Wall);
    let is_compared = |column: &str| column != "reason" && !(timed && column.ends_with("_ns"));
    cells(old)
        .into_iter()
        .zip(cells(new))
        .filter(|((column, old), (_, new))| old != new && is_compared(column))
        .map(|((column, before), (_, after))| {
            let direction = direction(&column, &before, &after);
            Change { case_id: new.case_id.clone(), column, old: before, new: after, direction }
        })
        .collect()
}

/// Name and value of every column, in order of names.
fn cells(record: &CaseRecord) -> Vec<(String, Value)> {
    match serde_json::to_value(record) {
        Ok(Value::Object(cells)) => cells.into_iter().collect(),
        _ => Vec::new(),
    }
}

fn direction(column: &str, old: &Value, new: &Value) -> Direction {
    let better_if = |better: bool| if better { Direction::Better } else { Direction::Worse };
    if column == "status" {
        let place = |value: &Value| ENDINGS.iter().position(|ending| value.as_str() == Some(ending));
        return match (place(old), place(new)) {
            (Some(old), Some(new)) => better_if(new < old),
            _ => Direction::Different,
        };
    }
    match (old.as_f64(), new.as_f64()) {
        (Some(old), Some(new)) if LESS_IS_BETTER.contains(&column) => better_if(new < old),
        _ => Direction::Different,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Status;

    fn record() -> CaseRecord {
        CaseRecord { clock: Some(Clock::Virtual), status: Status::Completed, driver_ns: 100, ..CaseRecord::default() }
    }

    #[test]
    fn a_single_byte_or_nanosecond_is_a_change() {
        assert_eq!(changes(&record(), &record()), []);
        let found = changes(&record(), &CaseRecord { peak_reserved_bytes: 1, driver_ns: 99, hits: 3, ..record() });
        let seen: Vec<_> = found.iter().map(|change| (change.column.as_str(), change.direction)).collect();
        assert_eq!(
            seen,
            [
                ("driver_ns", Direction::Better),
                ("hits", Direction::Different),
                ("peak_reserved_bytes", Direction::Worse)
            ]
        );
        assert_eq!((found[0].ratio(), found[2].ratio()), (Some(0.99), None));
    }

    #[test]
    fn on_a_real_clock_times_are_left_to_the_statistics() {
        let old = CaseRecord { clock: Some(Clock::Wall), ..record() };
        let new = CaseRecord { driver_ns: 7, peak_allocated_bytes: 7, ..old.clone() };
        let found = changes(&old, &new);
        assert_eq!(found.iter().map(|change| change.column.as_str()).collect::<Vec<_>>(), ["peak_allocated_bytes"]);
    }

    #[test]
    fn running_out_of_memory_is_worse_than_completing() {
        let oom = CaseRecord { status: Status::Oom, reason: "words".to_owned(), ..record() };
        assert_eq!(changes(&record(), &oom)[0].direction, Direction::Worse);
        assert_eq!(changes(&oom, &record())[0].direction, Direction::Better);
        assert_eq!(changes(&oom, &record()).len(), 1, "the reason is words about the status");
        let skipped = CaseRecord { status: Status::Skipped, ..record() };
        assert_eq!(changes(&skipped, &record())[0].direction, Direction::Different);
    }

    #[test]
    fn what_nobody_knew_of_the_device_got_neither_better_nor_worse() {
        let known = CaseRecord { peak_device_used_bytes: Some(7), ..record() };
        for (old, new) in [(record(), known.clone()), (known, record())] {
            let [change] = changes(&old, &new).try_into().unwrap();
            assert_eq!((change.direction, change.ratio()), (Direction::Different, None), "{change:?}");
        }
    }

    #[test]
    fn every_column_that_is_judged_exists() {
        let columns: Vec<String> = cells(&record()).into_iter().map(|(column, _)| column).collect();
        for name in LESS_IS_BETTER {
            assert!(columns.iter().any(|column| column == name), "{name}");
        }
    }
}
