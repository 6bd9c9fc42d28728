//! What a page is made from: the files of runs, their cases in comparable groups, and the choice of
//! cases to draw.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{
    super::{
        Environment, ReportError, StoredRun, folder,
        render::{Places, distinct},
        scenario::{CaseGroup, groups, titles},
    },
    element::{Cell, HtmlTable, breakable},
};
use crate::{
    answer::{claims::ClaimRecord, techniques::TechniqueRecord, threshold::ThresholdRecord},
    measure::{CaseDetail, CaseRecord, Status, TimingRecord},
};

/// A run for the page, from its folder or from memory.
#[derive(Debug, Default)]
pub struct PageRun {
    /// The name of its folder.
    pub name: String,
    /// Its environment.
    pub environment: Environment,
    /// The rows of `runs.csv`.
    pub records: Vec<CaseRecord>,
    /// The rows of `timings.csv`.
    pub timings: Vec<TimingRecord>,
    /// The rows of `thresholds.csv`.
    pub thresholds: Vec<ThresholdRecord>,
    /// The rows of `techniques.csv`.
    pub techniques: Vec<TechniqueRecord>,
    /// The rows of `claims.csv`.
    pub claims: Vec<ClaimRecord>,
    /// The details of its cases.
    pub details: DetailStore,
    /// Why it is not complete, one sentence per reason.
    pub gaps: Vec<String>,
}

impl From<StoredRun> for PageRun {
    fn from(run: StoredRun) -> PageRun {
        PageRun {
            name: folder::name(&run.path),
            gaps: run.gaps(),
            environment: run.environment,
            records: run.records,
            timings: run.timings,
            thresholds: run.thresholds,
            techniques: run.techniques,
            claims: run.claims,
            details: DetailStore::Folder(run.path),
        }
    }
}

/// The details of cases.
#[derive(Debug)]
pub enum DetailStore {
    /// In the folder of the run; a published folder has none.
    Folder(PathBuf),
    /// In memory, by case.
    Held(BTreeMap<String, CaseDetail>),
}

impl Default for DetailStore {
    fn default() -> DetailStore {
        DetailStore::Held(BTreeMap::new())
    }
}

impl PageRun {
    /// Reads the folder of a run. The details of cases are read later, one by one.
    pub fn of_folder(path: &Path) -> Result<PageRun, ReportError> {
        StoredRun::read(path).map(PageRun::from)
    }

    /// The detail of a case, if it has one.
    fn detail(&self, case_id: &str) -> Result<Option<Cow<'_, CaseDetail>>, ReportError> {
        match &self.details {
            DetailStore::Held(held) => Ok(held.get(case_id).map(Cow::Borrowed)),
            DetailStore::Folder(path) if folder::has_detail(path, case_id) => {
                folder::read_detail(path, case_id).map(|detail| Some(Cow::Owned(detail)))
            }
            DetailStore::Folder(_) => Ok(None),
        }
    }
}

/// Several runs as one.
pub(super) struct CollectedRuns<'a> {
    pub(super) runs: &'a [PageRun],
    /// The rows of all runs, each case once. A case with different results in two runs is named
    /// after its run.
    pub(super) records: Vec<CaseRecord>,
    /// By case: its run, its id there, and its place in `records`.
    origins: BTreeMap<String, (usize, String, usize)>,
}

impl<'a> CollectedRuns<'a> {
    pub(super) fn new(runs: &'a [PageRun]) -> CollectedRuns<'a> {
        let mut collected = CollectedRuns { runs, records: Vec::new(), origins: BTreeMap::new() };
        for (number, run) in runs.iter().enumerate() {
            for record in &run.records {
                collected.add(number, record);
            }
        }
        collected
    }

    fn add(&mut self, run: usize, record: &CaseRecord) {
        let known = self.origins.get(&record.case_id).map(|(_, _, place)| &self.records[*place]);
        let mut own = record.clone();
        match known {
            Some(known) if known == record => return,
            Some(_) => {
                let name = &self.runs[run].name;
                own.suite = format!("{} ({name})", record.suite);
                own.case_id = format!("{} ({name})", record.case_id);
            }
            None => {}
        }
        self.origins.insert(own.case_id.clone(), (run, record.case_id.clone(), self.records.len()));
        self.records.push(own);
    }

    /// The detail of a case.
    pub(super) fn detail(&self, case_id: &str) -> Result<Option<Cow<'a, CaseDetail>>, ReportError> {
        match self.origins.get(case_id) {
            Some((run, id, _)) => self.runs[*run].detail(id),
            None => Ok(None),
        }
    }

    /// Rows of one kind, of all runs.
    pub(super) fn all<T>(&self, rows: impl Fn(&'a PageRun) -> &'a Vec<T>) -> Vec<&'a T> {
        self.runs.iter().flat_map(rows).collect()
    }
}

/// The number of colours; further strategies repeat them with another dash.
const COLOURS: usize = 8;

/// What the sections share: the cases in comparable groups, their titles, and the colours of
/// strategies.
pub(super) struct PageContext<'a> {
    pub(super) runs: &'a CollectedRuns<'a>,
    pub(super) groups: Vec<CaseGroup<'a>>,
    /// One title per group.
    pub(super) titles: Vec<String>,
    /// In the order of their colours.
    pub(super) strategies: Vec<&'a str>,
    places: Places<'a>,
}

impl<'a> PageContext<'a> {
    pub(super) fn new(collected: &'a CollectedRuns<'a>) -> PageContext<'a> {
        let groups = groups(&collected.records);
        let titles = titles(&groups);
        let measured = collected.records.iter().map(|record| record.strategy.as_str());
        let searched = collected.runs.iter().flat_map(|run| &run.thresholds).map(|row| row.strategy.as_str());
        let strategies = distinct(measured.chain(searched));
        let places = Places::of(strategies.iter().copied());
        PageContext { runs: collected, groups, titles, strategies, places }
    }

    /// The groups with their titles.
    pub(super) fn titled(&self) -> impl Iterator<Item = (&CaseGroup<'a>, &str)> {
        self.groups.iter().zip(self.titles.iter().map(String::as_str))
    }

    /// All cases with the titles of their groups.
    pub(super) fn rows(&self) -> impl Iterator<Item = CaseRow<'a>> + use<'a, '_> {
        self.groups.iter().zip(&self.titles).enumerate().flat_map(|(place, (group, title))| {
            group.records.iter().map(move |record| CaseRow { title: title.clone(), group: place, record })
        })
    }

    /// A table of cases, with the columns that all of them begin with.
    pub(super) fn case_table<'t>(&'t self, rows: &'t [CaseRow<'a>]) -> HtmlTable<'t, CaseRow<'a>> {
        HtmlTable::of(rows).words("workload", "workload", |row| Cell::name(&row.title)).words(
            "strategy",
            "strategy",
            |row| self.strategy(&row.record.strategy),
        )
    }

    /// The place of a strategy in the list.
    pub(super) fn place(&self, strategy: &str) -> usize {
        match self.places.get(strategy) {
            usize::MAX => 0,
            place => place,
        }
    }

    /// The name of a strategy after its colour.
    pub(super) fn marked(&self, strategy: &str) -> String {
        format!("<span class=\"swatch c{}\"></span>{}", self.place(strategy) % COLOURS, breakable(strategy))
    }

    /// The same as a cell.
    pub(super) fn strategy(&self, strategy: &str) -> Cell {
        Cell::html(self.marked(strategy), strategy).with_class("strategy")
    }
}

/// A case and the title of its group: a row of most tables.
pub(super) struct CaseRow<'a> {
    pub(super) title: String,
    /// The place of its group.
    pub(super) group: usize,
    pub(super) record: &'a CaseRecord,
}

impl CaseRow<'_> {
    pub(super) fn id(&self) -> Option<&str> {
        Some(&self.record.case_id)
    }
}

/// The case that needs the least memory ([`CaseGroup::compared_bytes`]), among at least two; among equals the one with the
/// least driver time.
pub(super) fn least<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    group.least_bytes()?;
    known_memory(group).min_by_key(|record| (group.compared_bytes(record), record.driver_ns))
}

/// The case that needs the most memory.
pub(super) fn most<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    known_memory(group).max_by_key(|record| group.compared_bytes(record))
}

/// The contenders of a group whose memory is known.
fn known_memory<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    group.contenders().filter(|record| group.compared_bytes(record).is_some())
}

/// The case with the least driver time, among at least two.
pub(super) fn fastest<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    if group.contenders().count() < 2 { None } else { group.contenders().min_by_key(|record| record.driver_ns) }
}

/// The cases that ran out of memory.
pub(super) fn out_of_memory<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    group.records.iter().copied().filter(|record| record.status == Status::Oom)
}

/// When memory ran out: the step, with its phase, or the event.
pub(super) fn moment(record: &CaseRecord) -> String {
    match (record.oom_step, &record.oom_phase, record.oom_event) {
        (Some(step), Some(phase), _) => format!("step {step}, {phase}"),
        (Some(step), None, _) => format!("step {step}"),
        (None, Some(phase), Some(event)) => format!("{phase}, event {event}"),
        (None, _, Some(event)) => format!("event {event}"),
        (None, _, None) => String::new(),
    }
}

/// At most this many cases are drawn. A page of 500 timelines opens slowly; the other cases get a
/// small line beside their row.
const MOST_DRAWN: usize = 40;

/// The ids of the cases to draw: those whose id contains one of `wanted`, then from each group in
/// turn the best, those that ran out of memory, the worst, and the rest.
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

/// The measured cases of a group, the most interesting last.
fn by_interest<'a>(group: &CaseGroup<'a>) -> Vec<&'a CaseRecord> {
    let measured = || group.records.iter().copied().filter(|record| record.clock.is_some());
    let best = known_memory(group).min_by_key(|record| group.compared_bytes(record));
    let worst = group.contenders().max_by_key(|record| record.peak_reserved_bytes);
    let is = |one: Option<&CaseRecord>, record: &CaseRecord| one.is_some_and(|one| std::ptr::eq(one, record));
    let mut records: Vec<&CaseRecord> = measured().collect();
    // The sort is stable and the list is read from the back, so the first of equals must come last.
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
    use crate::{device::DeviceClock, measure::CaseLabel};

    fn run(name: &str, rows: &[(&str, u64)]) -> PageRun {
        let record = |&(workload, reserved): &(&str, u64)| {
            let label = CaseLabel { workload: workload.to_owned(), ..CaseLabel::default() };
            CaseRecord { peak_reserved_bytes: Some(reserved), ..CaseRecord::unmeasured(&label, Status::Completed, "") }
        };
        PageRun { name: name.to_owned(), records: rows.iter().map(record).collect(), ..PageRun::default() }
    }

    #[test]
    fn different_results_of_a_case_are_kept_apart() {
        let runs = [run("one", &[("a", 1), ("b", 2)]), run("two", &[("b", 2), ("c", 3)]), run("three", &[("a", 9)])];
        let collected = CollectedRuns::new(&runs);
        let rows: Vec<_> = collected.records.iter().map(|row| (row.workload.as_str(), row.suite.as_str())).collect();
        assert_eq!(rows, [("a", ""), ("b", ""), ("c", ""), ("a", " (three)")]);
    }

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
                    clock: Some(DeviceClock::Virtual),
                    driver_alloc_calls: Some(1),
                    peak_reserved_bytes: Some(100 + strategy as u64),
                    peak_device_used_bytes: Some(200 - strategy as u64),
                    ..CaseRecord::unmeasured(&label, Status::Completed, "")
                }
            })
            .collect()
    }

    #[test]
    fn best_case_of_every_workload_is_drawn() {
        let few = records(6, 3);
        assert_eq!(drawn(&groups(&few), &[]).len(), 18);
        let many = records(35, 15);
        let chosen = drawn(&groups(&many), &["w34/s07".to_owned()]);
        assert_eq!(chosen.len(), MOST_DRAWN);
        assert!(chosen.iter().any(|id| id.contains("w34/s07")), "wanted cases are drawn");
        for workload in 0..35 {
            assert!(chosen.iter().any(|id| id.contains(&format!("w{workload:02}/s14"))), "the best of {workload}");
        }
    }

    #[test]
    fn out_of_memory_comes_before_the_worst() {
        let mut group = records(1, 4);
        group[1].status = Status::Oom;
        let order: Vec<&str> =
            by_interest(&groups(&group)[0]).iter().rev().map(|record| record.strategy.as_str()).collect();
        assert_eq!(order, ["s03", "s01", "s00", "s02"], "best (and worst), out of memory, then in order");
    }
}
