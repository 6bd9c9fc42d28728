//! The same program under the rules of several releases of PyTorch.

use std::sync::atomic::AtomicBool;

use serde::Serialize;

use crate::{
    base::parallel_map,
    measure::{SCHEMA, Status, on_one_line},
    pytorch::Release,
    replay::{FailedRequest, LiveBlock, Observer, ReplayMoment},
    strategy::{EventSink, Outcome, StrategyEvent, StrategySpec},
    suite::{Case, all_cores},
};

/// A program under the rules of one release.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReleaseRow {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The workload or recording.
    pub workload: String,
    /// The strategy without its release.
    pub strategy: String,
    /// The release.
    pub release: Option<Release>,
    /// How the replay ended.
    pub status: Status,
    /// Why, where that is not plain.
    pub reason: String,
    /// Most bytes in blocks at one time.
    pub peak_allocated_bytes: Option<u64>,
    /// Most bytes taken from the device at one time.
    pub peak_reserved_bytes: Option<u64>,
    /// Requests that failed.
    pub ooms: Option<u64>,
    /// Requests that needed cached memory to be given back first.
    pub retries: Option<u64>,
    /// Requests, served or not.
    pub requests: Option<u64>,
    /// Requests whose block is at another address than under the first release, or which only one of the two serves. Requests
    /// that one of the two never came to do not count.
    pub moved_requests: Option<u64>,
}

/// Replays a program under several releases: `cases` differ in nothing but the release of their strategy. The first one
/// is what the others are compared with.
#[must_use]
pub fn compare_releases(cases: &[Case], stop: &AtomicBool) -> Vec<ReleaseRow> {
    let Some((first, others)) = cases.split_first() else { return Vec::new() };
    let mut kept = AddressLog::default();
    let mut rows = vec![replayed(first, stop, &mut kept)];
    // One real device runs one replay at a time.
    let jobs = if first.device.is_simulated() { all_cores() } else { 1 };
    rows.extend(parallel_map(others, jobs, |case| {
        let mut compared = AddressLog { first: Some(&kept.addresses), ..AddressLog::default() };
        replayed(case, stop, &mut compared)
    }));
    rows
}

fn replayed(case: &Case, stop: &AtomicBool, addresses: &mut AddressLog<'_>) -> ReleaseRow {
    let row = ReleaseRow {
        schema: SCHEMA,
        workload: case.label.workload.clone(),
        strategy: StrategySpec::at_release(&case.strategy, Release::DEFAULT).to_string(),
        release: case.strategy.release(),
        ..ReleaseRow::default()
    };
    let run = match case.replay(Some(stop)).run_observed(addresses) {
        Ok(run) => run,
        Err(error) => return ReleaseRow { status: Status::Error, reason: on_one_line(&error.to_string()), ..row },
    };
    let status = match (run.outcome.interrupted, run.outcome.ooms) {
        (true, _) => Status::Interrupted,
        (false, 0) => Status::Completed,
        (false, _) => Status::Oom,
    };
    ReleaseRow {
        status,
        peak_allocated_bytes: Some(run.stats.peak.allocated),
        peak_reserved_bytes: Some(run.stats.peak.reserved),
        ooms: Some(run.outcome.ooms),
        retries: Some(run.stats.retries),
        requests: Some(addresses.requests as u64),
        moved_requests: Some(addresses.moved),
        ..row
    }
}

/// The addresses that requests got, in their order, or how many of them differ from earlier ones.
#[derive(Default)]
struct AddressLog<'a> {
    /// What to compare with.
    first: Option<&'a [u64]>,
    /// Kept if there is nothing to compare with. 0 for a request that failed.
    addresses: Vec<u64>,
    requests: usize,
    moved: u64,
}

impl AddressLog<'_> {
    fn note(&mut self, address: u64) {
        match self.first {
            Some(first) => self.moved += u64::from(first.get(self.requests).is_some_and(|&before| before != address)),
            None => self.addresses.push(address),
        }
        self.requests += 1;
    }
}

impl EventSink for AddressLog<'_> {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for AddressLog<'_> {
    fn served(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, _: Outcome) {
        self.note(live.block.address.0);
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, _: &FailedRequest) {
        self.note(0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        base::{MIB, StreamId, TagId},
        measure::CaseLabel,
        trace::TraceBuilder,
    };

    /// Two segments of one size, on a device with descending addresses: 2.11 takes the lower one, later releases the older
    /// one.
    fn cases(releases: &[u8]) -> Vec<Case> {
        let mut trace = TraceBuilder::new();
        let alloc = |trace: &mut TraceBuilder| trace.alloc(64 * MIB, StreamId::DEFAULT, TagId(0));
        let (one, two) = (alloc(&mut trace), alloc(&mut trace));
        trace.free(one);
        trace.free(two);
        let three = alloc(&mut trace);
        trace.free(three);
        let source = Arc::new(trace.finish("two segments"));
        let of_release = |&minor: &u8| {
            let strategy = StrategySpec::from("caching").at_release(Release::new(minor));
            let label = CaseLabel {
                workload: "two segments".to_owned(),
                strategy: strategy.to_string(),
                ..CaseLabel::default()
            };
            Case::new(label, Arc::clone(&source) as _, strategy, "sim:8GiB".parse().unwrap())
        };
        releases.iter().map(of_release).collect()
    }

    #[test]
    fn requests_at_other_addresses_are_counted() {
        let rows = compare_releases(&cases(&[11, 13, 10]), &AtomicBool::new(false));
        let seen: Vec<_> =
            rows.iter().map(|row| (row.release.unwrap().to_string(), row.requests, row.moved_requests)).collect();
        let expected = [("2.11", 0), ("2.13", 1), ("2.10", 0)];
        assert_eq!(seen, expected.map(|(release, moved)| (release.to_owned(), Some(3), Some(moved))));
        assert!(rows.iter().all(|row| row.strategy == "caching" && row.peak_reserved_bytes == Some(128 * MIB)));
        assert!(rows.iter().all(|row| row.status == Status::Completed && row.ooms == Some(0)));
    }

    #[test]
    fn requests_after_an_oom_are_not_compared() {
        let mut limited = cases(&[13, 11]);
        limited[0].label.limit = Some(100 * MIB);
        let rows = compare_releases(&limited, &AtomicBool::new(false));
        assert_eq!((rows[0].status, rows[0].requests), (Status::Oom, Some(2)));
        assert_eq!((rows[1].requests, rows[1].moved_requests), (Some(3), Some(1)));
    }
}
