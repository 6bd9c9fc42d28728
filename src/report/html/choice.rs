//! Which cases are drawn in full. A page of five hundred timelines opens slowly and nobody looks at them all: the
//! others get a small line beside their row.

use std::collections::BTreeSet;

use super::super::scenario::{CaseGroup, is_contender};
use crate::measure::{CaseRecord, Status};

/// At most this many cases are drawn in full.
pub(super) const MOST_DRAWN: usize = 40;

/// The ids of the cases to draw: those whose id contains one of `wanted`, then from every group in turn its best, those
/// that ran out, its worst, and the rest, until there are enough.
pub(super) fn drawn(groups: &[CaseGroup<'_>], wanted: &[String]) -> BTreeSet<String> {
    let mut chosen = BTreeSet::new();
    let all = groups.iter().flat_map(|group| &group.records);
    let is_wanted = |record: &CaseRecord| wanted.iter().any(|pattern| record.case_id.contains(pattern.as_str()));
    chosen.extend(all.filter(|record| is_wanted(record)).take(MOST_DRAWN).map(|record| record.case_id.clone()));
    let mut queues: Vec<Vec<&CaseRecord>> = groups.iter().map(by_interest).collect();
    while chosen.len() < MOST_DRAWN && queues.iter().any(|queue| !queue.is_empty()) {
        for queue in &mut queues {
            if chosen.len() < MOST_DRAWN
                && let Some(record) = queue.pop()
            {
                chosen.insert(record.case_id.clone());
            }
        }
    }
    chosen
}

/// The cases of a group that were measured, the most interesting last.
fn by_interest<'a>(group: &CaseGroup<'a>) -> Vec<&'a CaseRecord> {
    let measured = || group.records.iter().copied().filter(|record| record.clock.is_some());
    let best = measured()
        .filter(|record| is_contender(record) && record.peak_device_used_bytes.is_some())
        .min_by_key(|record| record.peak_device_used_bytes);
    let worst = measured().max_by_key(|record| record.peak_reserved_bytes);
    let is = |one: Option<&CaseRecord>, record: &CaseRecord| one.is_some_and(|one| std::ptr::eq(one, record));
    let mut records: Vec<&CaseRecord> = measured().collect();
    // Stable, and read from the back: the first of equals must come last.
    records.reverse();
    records.sort_by_key(|record| match record.status {
        _ if is(best, record) => 3,
        Status::Oom => 2,
        _ if is(worst, record) => 1,
        _ => 0,
    });
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::Clock, measure::CaseLabel, report::scenario::groups};

    fn records(workloads: usize, strategies: usize) -> Vec<CaseRecord> {
        let pairs = (0..workloads).flat_map(|workload| (0..strategies).map(move |strategy| (workload, strategy)));
        pairs
            .map(|(workload, strategy)| {
                let label = CaseLabel {
                    workload: format!("w{workload:02}"),
                    strategy: format!("s{strategy:02}"),
                    ..CaseLabel::default()
                };
                CaseRecord {
                    clock: Some(Clock::Virtual),
                    driver_alloc_calls: 1,
                    peak_reserved_bytes: 100 + strategy as u64,
                    peak_device_used_bytes: Some(200 - strategy as u64),
                    ..CaseRecord::unmeasured(&label, Status::Completed, "")
                }
            })
            .collect()
    }

    #[test]
    fn few_cases_are_all_drawn_and_of_many_the_best_of_every_workload() {
        let few = records(6, 3);
        assert_eq!(drawn(&groups(&few), &[]).len(), 18);
        let many = records(35, 15);
        let chosen = drawn(&groups(&many), &["w34/s07".to_owned()]);
        assert_eq!(chosen.len(), MOST_DRAWN);
        assert!(chosen.iter().any(|id| id.contains("w34/s07")), "whoever is asked for is there");
        for workload in 0..35 {
            assert!(chosen.iter().any(|id| id.contains(&format!("w{workload:02}/s14"))), "the best of {workload}");
        }
    }

    #[test]
    fn whoever_ran_out_comes_before_the_worst() {
        let mut group = records(1, 4);
        group[1].status = Status::Oom;
        let order: Vec<&str> =
            by_interest(&groups(&group)[0]).iter().rev().map(|record| record.strategy.as_str()).collect();
        assert_eq!(order, ["s03", "s01", "s00", "s02"], "best (and worst), out of memory, then in order");
    }
}
