//! What a page is made from: the files of runs, their cases in comparable groups, and the choice of
//! cases to draw, by interest.

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
    element::{Cell, HtmlTable, StrategyLook, breakable},
};
use crate::{
    answer::{claims::ClaimRecord, techniques::TechniqueRecord, threshold::ThresholdRecord},
    measure::{CaseDetail, CaseRecord, Status, TimingRecord},
    strategy::StrategySpec,
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

/// What the sections share: the cases in comparable groups, their titles, and the
/// strategies.
pub(super) struct PageContext<'a> {
    pub(super) runs: &'a CollectedRuns<'a>,
    pub(super) groups: Vec<CaseGroup<'a>>,
    /// One title per group.
    pub(super) titles: Vec<String>,
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

    /// The name of a strategy after its marker.
    pub(super) fn marked(&self, strategy: &str) -> String {
        format!("<span class=\"{}\"></span>{}", StrategyLook::of(strategy).swatch(), breakable(strategy))
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

/// The factor between the most and the least memory in a group; `None` if fewer than two cases can be compared.
pub(super) fn spread(group: &CaseGroup<'_>) -> Option<f64> {
    let bytes = |record| group.compared_bytes(record).unwrap_or(0);
    Some(bytes(most(group)?) as f64 / bytes(least(group)?).max(1) as f64)
}

/// At most this many cases are drawn: each has some 50 KB of points and a memory map. The other cases get a small line
/// beside their row.
const MOST_DRAWN: usize = 40;
/// In the first turn, a workload gets at most this many of its failures.
const MOST_FAILURES: usize = 2;

impl<'a> PageContext<'a> {
    /// The places of the groups, the most interesting first: some cases ran out of memory and others did not, all ran out,
    /// and then those in which strategies differ most.
    pub(super) fn by_interest(&self) -> Vec<usize> {
        let interest = |group: &CaseGroup<'_>| {
            let (failed, all) = (out_of_memory(group).count(), measured(group).count());
            let rank = if failed == 0 { 0 } else { 1 + u8::from(failed < all) };
            (rank, spread(group).unwrap_or(1.0))
        };
        let interests: Vec<(u8, f64)> = self.groups.iter().map(interest).collect();
        let mut places: Vec<usize> = (0..self.groups.len()).collect();
        places.sort_by(|&a, &b| interests[b].0.cmp(&interests[a].0).then(interests[b].1.total_cmp(&interests[a].1)));
        places
    }

    /// The ids of the cases to draw: those whose id contains one of `wanted`, then of every workload what explains it, and
    /// then the other cases, the most interesting workload first.
    pub(super) fn drawn(&self, wanted: &[String]) -> BTreeSet<String> {
        let is_wanted = |record: &&&CaseRecord| wanted.iter().any(|part| record.case_id.contains(part.as_str()));
        let bases: BTreeSet<&str> = self.runs.runs.iter().filter_map(base).collect();
        let groups: Vec<&CaseGroup<'_>> = self.by_interest().into_iter().map(|place| &self.groups[place]).collect();
        let wanted = groups.iter().flat_map(|group| group.records.iter().filter(is_wanted).copied());
        let explaining = groups.iter().flat_map(|group| explaining(group, &bases));
        let others = groups.iter().flat_map(|group| {
            let mut others: Vec<&CaseRecord> = measured(group).collect();
            others.sort_by_key(|record| takes_fixed_part(record));
            others
        });
        let mut chosen = BTreeSet::new();
        for record in wanted.chain(explaining).chain(others) {
            if chosen.len() == MOST_DRAWN {
                break;
            }
            chosen.insert(record.case_id.clone());
        }
        chosen
    }
}

/// The strategy that a run compares with.
fn base(run: &PageRun) -> Option<&str> {
    run.environment.settings.as_ref().map(|settings| settings.base.as_str())
}

/// Whether the strategy of a case takes a fixed part of the device. Its memory says nothing about the program.
pub(super) fn takes_fixed_part(record: &CaseRecord) -> bool {
    StrategySpec::from(record.strategy.as_str()).takes_fixed_part()
}

fn measured<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    group.records.iter().copied().filter(|record| record.clock.is_some())
}

/// The cases that explain a workload: failures, the base, the best and the worst.
fn explaining<'a>(group: &CaseGroup<'a>, bases: &BTreeSet<&str>) -> Vec<&'a CaseRecord> {
    let mut failed: Vec<&CaseRecord> = measured(group).filter(|record| record.status == Status::Oom).collect();
    failed.sort_by_key(|record| takes_fixed_part(record));
    failed.truncate(MOST_FAILURES);
    let base = measured(group).find(|record| bases.contains(record.strategy.as_str()));
    failed.into_iter().chain(base).chain(least(group)).chain(most(group)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::DeviceClock, measure::CaseLabel, report::RunSettings};

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

    fn names(chosen: &BTreeSet<String>) -> Vec<&str> {
        chosen.iter().map(|id| id.split('@').next().unwrap().trim_start_matches('/')).collect()
    }

    /// Many workloads: the last has the widest spread, one before it a failure.
    #[test]
    fn failures_are_drawn_first_and_then_the_widest_spread() {
        let few = [PageRun { records: records(6, 3), ..PageRun::default() }];
        assert_eq!(PageContext::new(&CollectedRuns::new(&few)).drawn(&[]).len(), 18, "all of a few");
        let mut many = records(35, 15);
        for record in many.iter_mut().filter(|record| record.workload == "w34") {
            record.peak_device_used_bytes = record.peak_device_used_bytes.map(|bytes| bytes * bytes);
        }
        many[20 * 15 + 7].status = Status::Oom;
        let settings = Some(RunSettings { base: "s05".to_owned(), ..RunSettings::default() });
        let environment = Environment { settings, ..Environment::default() };
        let runs = [PageRun { records: many, environment, ..PageRun::default() }];
        let collected = CollectedRuns::new(&runs);
        let context = PageContext::new(&collected);
        assert_eq!(context.by_interest()[..3], [20, 34, 0]);
        let chosen = context.drawn(&["w33/s07".to_owned()]);
        let names = names(&chosen);
        assert_eq!(chosen.len(), MOST_DRAWN);
        for expected in ["w33/s07", "w20/s07", "w20/s05", "w20/s14", "w20/s00", "w34/s05", "w34/s14", "w34/s00"] {
            assert!(names.contains(&expected), "{expected} is not in {names:?}");
        }
        assert!(!names.contains(&"w34/s03"), "base, best and worst only");
    }

    #[test]
    fn fixed_part_of_the_device_is_not_the_worst() {
        let mut group = records(1, 4);
        group[0].strategy = "arena".to_owned();
        let groups = groups(&group);
        let chosen: Vec<&str> =
            explaining(&groups[0], &BTreeSet::new()).iter().map(|record| record.strategy.as_str()).collect();
        assert_eq!(chosen, ["s03", "s01"], "the best and the worst");
        assert!(takes_fixed_part(&group[0]));
    }
}
