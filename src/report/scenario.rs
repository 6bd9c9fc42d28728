//! Cases that may be compared: same work, same device, same limit, different strategies.

use crate::{
    base::Bytes,
    measure::{CaseRecord, Status},
};

/// Everything that must be equal before two strategies may be compared. Simulated and real devices have different
/// names, so their clocks never meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scenario<'a> {
    pub(super) suite: &'a str,
    pub(super) workload: &'a str,
    pub(super) device: &'a str,
    pub(super) limit_bytes: Option<u64>,
    pub(super) seed: u64,
    pub(super) repeat: u32,
}

impl<'a> Scenario<'a> {
    fn of(record: &'a CaseRecord) -> Scenario<'a> {
        Scenario {
            suite: &record.suite,
            workload: &record.workload,
            device: &record.device,
            limit_bytes: record.limit_bytes,
            seed: record.seed,
            repeat: record.repeat,
        }
    }
}

/// The cases of one scenario.
pub(super) struct Group<'a> {
    pub(super) scenario: Scenario<'a>,
    pub(super) records: Vec<&'a CaseRecord>,
}

impl Group<'_> {
    /// The least that any strategy of the group took of the device and completed with. Only said where there was a choice.
    pub(super) fn least_used(&self) -> Option<u64> {
        let contenders = || self.records.iter().filter(|record| is_contender(record));
        if contenders().count() < 2 { None } else { contenders().map(|record| record.peak_device_used_bytes).min() }
    }
}

/// Whether a case can be the one that needed least memory: it must have completed, and with memory from the device. A
/// strategy that only pretends (`null`) has none to save.
pub(super) fn is_contender(record: &CaseRecord) -> bool {
    let memory_calls = record.driver_alloc_calls + record.driver_mapping_calls + record.driver_pool_calls;
    record.status == Status::Completed && memory_calls > 0
}

/// The records by scenario, both in order of first appearance.
pub(super) fn groups(records: &[CaseRecord]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for record in records {
        let scenario = Scenario::of(record);
        match groups.iter_mut().find(|group| group.scenario == scenario) {
            Some(group) => group.records.push(record),
            None => groups.push(Group { scenario, records: vec![record] }),
        }
    }
    groups
}

/// The strategies in order of first appearance.
pub(super) fn strategies(records: &[CaseRecord]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for record in records {
        if !names.contains(&record.strategy.as_str()) {
            names.push(&record.strategy);
        }
    }
    names
}

/// The workload's name, and whatever else tells this scenario from the others on the page.
pub(super) fn title(scenario: &Scenario<'_>, all: &[Group<'_>]) -> String {
    let differs =
        |differs: fn(&Scenario<'_>, &Scenario<'_>) -> bool| all.iter().any(|group| differs(&group.scenario, scenario));
    let mut title = scenario.workload.to_owned();
    if differs(|a, b| a.suite != b.suite) {
        title = format!("{}/{title}", scenario.suite);
    }
    if differs(|a, b| a.device != b.device) {
        title.push_str(&format!(" @{}", scenario.device));
    }
    if let Some(limit) = scenario.limit_bytes
        && differs(|a, b| a.limit_bytes != b.limit_bytes)
    {
        title.push_str(&format!(" <= {}", Bytes(limit)));
    }
    if differs(|a, b| a.seed != b.seed) {
        title.push_str(&format!(" #{}", scenario.seed));
    }
    if differs(|a, b| a.repeat != b.repeat) {
        title.push_str(&format!(" x{}", scenario.repeat));
    }
    title
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::CaseLabel;

    fn record(workload: &str, strategy: &str, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let record = CaseRecord::unmeasured(&label, Status::Completed, "");
        CaseRecord { peak_device_used_bytes: reserved, driver_alloc_calls: 1, ..record }
    }

    #[test]
    fn the_least_is_only_said_among_completed_cases_that_used_memory() {
        let mut records = vec![record("w", "a", 10), record("w", "b", 8), record("w", "c", 3), record("w", "null", 1)];
        records[2].status = Status::Oom;
        records[3].driver_alloc_calls = 0;
        records[3].driver_event_calls = 7;
        assert_eq!(groups(&records)[0].least_used(), Some(8));
        assert_eq!(groups(&records[1..])[0].least_used(), None, "one completed case has won against nobody");
    }

    #[test]
    fn a_title_says_no_more_than_what_tells_scenarios_apart() {
        let mut records = vec![record("v", "a", 1), record("w", "a", 1)];
        let titles = |records: &[CaseRecord]| {
            let all = groups(records);
            all.iter().map(|group| title(&group.scenario, &all)).collect::<Vec<_>>()
        };
        assert_eq!(titles(&records), ["v", "w"]);
        records[1] = CaseRecord { limit_bytes: Some(1 << 30), seed: 4, ..record("v", "a", 1) };
        assert_eq!(titles(&records), ["v #0", "v <= 1.00 GiB #4"]);
    }
}
