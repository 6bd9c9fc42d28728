//! Shards of a run put together: what one process would have written.
//!
//! `oomph report` opens the folders, says what keeps them from being one whole run, and has them merged. Everything comes
//! from their files, so that it can be done on another machine than those that ran them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use super::{
    ClaimFiles, Difference, Environment, PlannedCase, ReportError, RunFolder, Settings, Shard, TechniqueFiles,
    ThresholdFiles, folder, plan, rows,
};
use crate::{
    answer::{
        claims::ClaimRecord,
        techniques::{TechniqueRecord, row_id},
        threshold::{ThresholdDetail, ThresholdStatus},
    },
    measure::{CaseRecord, Status, TimingRecord},
};

/// More cases than this are counted, not named.
const MOST_NAMED: usize = 10;

/// The folders of shards, and what keeps them from being one whole run.
#[derive(Debug)]
pub struct Shards {
    parts: Vec<Part>,
    flaws: Vec<Flaw>,
}

/// What was put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// So many cases.
    pub cases: usize,
    /// From so many shards.
    pub shards: usize,
}

/// Why shards are not one whole run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// A shard was made otherwise than another.
    Differs {
        /// Which folder.
        path: PathBuf,
        /// The folder that it is compared with.
        than: PathBuf,
        /// What differs.
        difference: Difference,
    },
    /// A shard has no plan, or another one: its run had other cases.
    OtherPlan {
        /// Which folder.
        path: PathBuf,
        /// The folder that it is compared with.
        than: PathBuf,
    },
    /// Two folders hold the same shard.
    SameShard {
        /// Which shard.
        shard: Shard,
        /// The folders.
        folders: [PathBuf; 2],
    },
    /// No folder holds the shard.
    MissingShard {
        /// Which shard.
        shard: Shard,
        /// Its cases.
        case_ids: Vec<String>,
    },
    /// A shard is not finished.
    Missing {
        /// Which folder.
        path: PathBuf,
        /// The cases that it should hold.
        case_ids: Vec<String>,
    },
    /// The files of cases were cut short or lost, such as by a copy that was not finished.
    Damaged {
        /// Which folder.
        path: PathBuf,
        /// The cases.
        case_ids: Vec<String>,
    },
    /// Cases are in two folders.
    Double {
        /// The folders.
        folders: [PathBuf; 2],
        /// The cases.
        case_ids: Vec<String>,
    },
    /// A folder has cases that are none of the run's.
    Strange {
        /// Which folder.
        path: PathBuf,
        /// The cases.
        case_ids: Vec<String>,
    },
}

/// One folder.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    environment: Environment,
    shard: Shard,
    plan: Option<Vec<PlannedCase>>,
    rows: Rows,
    /// Cases whose files cannot be read.
    damaged: Vec<String>,
}

/// The rows of cases that ended.
#[derive(Debug, Default)]
struct Rows {
    records: Vec<CaseRecord>,
    timings: Vec<TimingRecord>,
    thresholds: Vec<ThresholdDetail>,
    techniques: Vec<TechniqueRecord>,
    claims: Vec<ClaimRecord>,
}

impl Shards {
    /// Reads the folders and looks for what is missing, double or different. A folder that is no shard is refused.
    pub fn open(folders: &[PathBuf]) -> Result<Shards, ReportError> {
        let parts = folders.iter().map(|path| Part::read(path)).collect::<Result<Vec<_>, _>>()?;
        let flaws = flaws(&parts);
        Ok(Shards { parts, flaws })
    }

    /// What keeps them from being one whole run.
    #[must_use]
    pub fn flaws(&self) -> &[Flaw] {
        &self.flaws
    }

    /// Writes into the new folder `place` what one process would have written, in the order of its cases. Shards with
    /// flaws are refused.
    pub fn merge(&self, place: &Path) -> Result<Merged, ReportError> {
        let (Some(first), None) = (self.parts.first(), self.flaws.first()) else {
            let reason = self.flaws.first().map_or_else(|| "there are none".to_owned(), Flaw::to_string);
            return Err(ReportError::NotWhole { reason });
        };
        let environment = self.environment(first);
        let base = environment.settings.as_ref().map_or("", |settings: &Settings| settings.base.as_str());
        let case_ids: Vec<String> = first.plan.iter().flatten().map(|case| case.case_id.clone()).collect();
        let places: BTreeMap<&str, usize> = case_ids.iter().map(String::as_str).zip(0..).collect();
        let place_of = |id: &str| places.get(id).copied().unwrap_or(usize::MAX);
        folder::begin(place, &environment)?;
        if self.has_file("techniques.csv") {
            let files = TechniqueFiles::with(place, self.all(|rows| &rows.techniques))?;
            files.finish(|record| place_of(&technique_id(record)))?;
        } else if self.has_file("claims.csv") {
            let files = ClaimFiles::with(place, self.all(|rows| &rows.claims))?;
            files.finish(|record| place_of(&record.id))?;
        } else {
            for part in &self.parts {
                part.copy_details(place)?;
            }
            let run = RunFolder::with_rows(place, &environment, self.records(), self.all(|rows| &rows.timings))?;
            run.finish(&case_ids, base)?;
            if self.has_file("thresholds.json") {
                ThresholdFiles::with(place, self.all(|rows| &rows.thresholds)).finish(&case_ids)?;
            }
        }
        Ok(Merged { cases: case_ids.len(), shards: self.parts.len() })
    }

    /// The rows of all cases, shard by shard.
    #[must_use]
    pub fn records(&self) -> Vec<CaseRecord> {
        self.all(|rows| &rows.records)
    }

    fn has_file(&self, name: &str) -> bool {
        self.parts.iter().any(|part| part.path.join(name).is_file())
    }

    fn all<T: Clone>(&self, of: impl Fn(&Rows) -> &Vec<T>) -> Vec<T> {
        self.parts.iter().flat_map(|part| of(&part.rows)).cloned().collect()
    }

    /// That of the first folder, with the time at which the first shard began, the names of all machines, and the command
    /// that one process would have had.
    fn environment(&self, first: &Part) -> Environment {
        let all = || self.parts.iter().map(|part| &part.environment);
        let machines: BTreeSet<&str> = all().map(|run| run.machine.as_str()).collect();
        Environment {
            started: all().map(|run| &run.started).min().unwrap_or(&first.environment.started).clone(),
            machine: machines.into_iter().collect::<Vec<_>>().join(", "),
            command: without_values(&first.environment.command, &OF_ONE_SHARD),
            shard: None,
            merged_shards: Some(first.shard.shards),
            ..first.environment.clone()
        }
    }
}

/// Options that only one shard has, each with a value.
const OF_ONE_SHARD: [&str; 4] = ["--partition", "--output", "-o", "--resume"];

/// A command line without these options and their values.
fn without_values(command: &[String], options: &[&str]) -> Vec<String> {
    let mut kept = Vec::with_capacity(command.len());
    let mut words = command.iter();
    while let Some(word) = words.next() {
        let name = word.split_once('=').map_or(word.as_str(), |(name, _)| name);
        if !options.contains(&name) {
            kept.push(word.clone());
        } else if name == word {
            words.next();
        }
    }
    kept
}

impl Part {
    fn read(path: &Path) -> Result<Part, ReportError> {
        let environment = folder::read_environment(path)?;
        let Some(shard) = environment.shard.clone() else {
            return Err(ReportError::NoShard { path: path.to_owned() });
        };
        let rows = Rows::read(path)?;
        let case_ids = rows.records.iter().map(|record| &record.case_id);
        let damaged = case_ids.filter(|id| folder::is_damaged(path, id)).cloned().collect();
        Ok(Part { path: path.to_owned(), environment, shard, plan: plan::read(path)?, rows, damaged })
    }

    /// Copies what cases left behind beside their rows. Where nobody left anything there is no folder for it.
    fn copy_details(&self, place: &Path) -> Result<(), ReportError> {
        let cases = place.join("cases");
        for record in &self.rows.records {
            let from = folder::detail_path(&self.path, &record.case_id);
            // Published folders hold rows only.
            if from.is_file() {
                fs::create_dir_all(&cases).map_err(ReportError::io(&cases))?;
                fs::copy(&from, folder::detail_path(place, &record.case_id)).map_err(ReportError::io(&from))?;
            }
        }
        Ok(())
    }
}

impl Rows {
    fn read(path: &Path) -> Result<Rows, ReportError> {
        let mut rows = Rows {
            records: folder::read_records(path)?,
            timings: folder::read_timings(path)?,
            thresholds: ThresholdFiles::read(path)?,
            techniques: rows::read(&path.join("techniques.csv"))?,
            claims: rows::read(&path.join("claims.csv"))?,
        };
        rows.records.retain(|row| row.status != Status::Interrupted);
        rows.thresholds.retain(|row| row.record.status != ThresholdStatus::Interrupted);
        rows.techniques.retain(|row| row.status != Status::Interrupted);
        Ok(rows)
    }

    /// What each row tells about.
    fn ids(&self) -> BTreeSet<String> {
        let cases = self.records.iter().map(|row| row.case_id.clone());
        let thresholds = self.thresholds.iter().map(|row| row.record.case_id.clone());
        let techniques = self.techniques.iter().map(technique_id);
        cases.chain(thresholds).chain(techniques).chain(self.claims.iter().map(|row| row.id.clone())).collect()
    }
}

fn technique_id(record: &TechniqueRecord) -> String {
    row_id(&record.model, &record.technique)
}

/// Everything that keeps the parts from being one whole run: first what was made otherwise, because nothing can be said
/// about the cases of different runs.
fn flaws(parts: &[Part]) -> Vec<Flaw> {
    let Some((first, others)) = parts.split_first() else { return Vec::new() };
    let mut found = Vec::new();
    for other in others {
        let (path, than) = (&other.path, &first.path);
        let unlike = first.environment.unlike_shards(&other.environment).into_iter();
        found.extend(unlike.map(|difference| Flaw::Differs { path: path.clone(), than: than.clone(), difference }));
    }
    for part in parts.iter().filter(|part| part.plan.is_none() || part.plan != first.plan) {
        found.push(Flaw::OtherPlan { path: part.path.clone(), than: first.path.clone() });
    }
    let mut known: BTreeMap<u32, &Part> = BTreeMap::new();
    for part in parts {
        if let Some(same) = known.insert(part.shard.shard, part) {
            let folders = [same.path.clone(), part.path.clone()];
            found.push(Flaw::SameShard { shard: part.shard.clone(), folders });
        }
    }
    if let (true, Some(plan)) = (found.is_empty(), &first.plan) {
        found.extend(flaws_of_cases(&known, &first.shard, plan));
    }
    found
}

/// What is missing, double or strange among the cases of shards that belong together.
fn flaws_of_cases(parts: &BTreeMap<u32, &Part>, like: &Shard, plan: &[PlannedCase]) -> Vec<Flaw> {
    let mut found = Vec::new();
    let mut holders: BTreeMap<String, &Part> = BTreeMap::new();
    let planned: BTreeSet<&str> = plan.iter().map(|case| case.case_id.as_str()).collect();
    for &part in parts.values() {
        let mut double: BTreeMap<&Path, Vec<String>> = BTreeMap::new();
        let mut strange = Vec::new();
        for id in part.rows.ids() {
            if !planned.contains(id.as_str()) {
                strange.push(id);
            } else if let Some(holder) = holders.get(&id) {
                double.entry(holder.path.as_path()).or_default().push(id);
            } else {
                holders.insert(id, part);
            }
        }
        if !strange.is_empty() {
            found.push(Flaw::Strange { path: part.path.clone(), case_ids: strange });
        }
        found.extend(double.into_iter().map(|(holder, case_ids)| {
            let folders = [holder.to_owned(), part.path.clone()];
            Flaw::Double { folders, case_ids }
        }));
    }
    // A shard that was dealt no case is not missed.
    let mut missing: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for case in plan.iter().filter(|case| !holders.contains_key(&case.case_id)) {
        missing.entry(case.shard).or_default().push(case.case_id.clone());
    }
    found.extend(missing.into_iter().map(|(shard, case_ids)| match parts.get(&shard) {
        None => Flaw::MissingShard { shard: Shard { shard, ..like.clone() }, case_ids },
        Some(part) => Flaw::Missing { path: part.path.clone(), case_ids },
    }));
    let damaged = parts.values().filter(|part| !part.damaged.is_empty());
    found.extend(damaged.map(|part| Flaw::Damaged { path: part.path.clone(), case_ids: part.damaged.clone() }));
    found
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Differs { path, than, difference: Difference { what, here, there } } => {
                write!(
                    f,
                    "different: {}: its {what} is '{there}', that of {} is '{here}'",
                    path.display(),
                    than.display()
                )
            }
            Flaw::OtherPlan { path, than } if path == than => write!(f, "{}: it has no plan.csv", path.display()),
            Flaw::OtherPlan { path, than } => {
                write!(f, "different: {}: its plan.csv is not that of {}", path.display(), than.display())
            }
            Flaw::SameShard { shard, folders: [one, other] } => {
                write!(f, "double: {} and {} both hold shard {shard}", one.display(), other.display())
            }
            Flaw::MissingShard { shard, case_ids } => {
                write!(f, "missing: shard {shard}, with {}", named(case_ids))
            }
            Flaw::Missing { path, case_ids } => {
                write!(f, "missing: {} is to go on with --resume: it lacks {}", path.display(), named(case_ids))
            }
            Flaw::Damaged { path, case_ids } => {
                write!(f, "damaged: {} is to be copied again, or to go on with --resume: ", path.display())?;
                write!(f, "the file in cases/ cannot be read of {}", named(case_ids))
            }
            Flaw::Double { folders: [one, other], case_ids } => {
                write!(f, "double: {} and {} both hold {}", one.display(), other.display(), named(case_ids))
            }
            Flaw::Strange { path, case_ids } => {
                write!(f, "different: {} holds, beside its plan, {}", path.display(), named(case_ids))
            }
        }
    }
}

/// How many cases, and which.
fn named(case_ids: &[String]) -> String {
    let cases = if case_ids.len() == 1 { "case" } else { "cases" };
    let shown = case_ids.iter().take(MOST_NAMED).map(|id| format!("\n  {id}")).collect::<String>();
    let rest = match case_ids.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        rest => format!("\n  and {rest} more"),
    };
    format!("{} {cases}{shown}{rest}", case_ids.len())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::measure::{CaseDetail, CaseLabel};

    const CASES: [&str; 5] = ["a", "b", "c", "d", "e"];

    fn record(workload: &str) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: "caching".to_owned(), ..CaseLabel::default() };
        CaseRecord::unmeasured(&label, Status::Completed, "")
    }

    fn plan() -> Vec<PlannedCase> {
        let case =
            |(place, workload): (u32, &&str)| PlannedCase { case_id: record(workload).case_id, shard: place % 2 + 1 };
        (0..).zip(&CASES).map(case).collect()
    }

    fn environment(shard: u32) -> Environment {
        Environment {
            started: format!("2026-11-1{}T00:00:00Z", 9 - shard),
            machine: format!("machine {shard}"),
            settings: Some(Settings { base: "caching".to_owned(), ..Settings::default() }),
            shard: Some(Shard { rule: "slice".to_owned(), shard, shards: 2 }),
            ..Environment::default()
        }
    }

    /// A folder of the shard with these rows.
    fn shard(folder: &TempDir, name: &str, environment: &Environment, rows: &[CaseRecord]) -> PathBuf {
        let path = folder.path().join(name);
        let run = RunFolder::create(&path, environment).unwrap();
        super::super::write_plan(&path, &plan()).unwrap();
        for row in rows {
            run.append_timing(&TimingRecord { case_id: row.case_id.clone(), ..TimingRecord::default() }).unwrap();
            run.append(row, &CaseDetail::unmeasured(&row.label())).unwrap();
        }
        path
    }

    fn flaws_of(folders: &[PathBuf]) -> Vec<String> {
        let shards = Shards::open(folders).unwrap();
        shards.flaws().iter().map(Flaw::to_string).collect()
    }

    #[test]
    fn whole_shards_give_what_one_process_would_have_written() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["e", "a", "c"].map(record));
        let two = shard(&folder, "two", &environment(2), &["d", "b"].map(record));
        let alone = folder.path().join("alone");
        let run = RunFolder::create(&alone, &Environment::default()).unwrap();
        for row in CASES.map(record) {
            run.append_timing(&TimingRecord { case_id: row.case_id.clone(), ..TimingRecord::default() }).unwrap();
            run.append(&row, &CaseDetail::unmeasured(&row.label())).unwrap();
        }
        run.finish(&CASES.map(|workload| record(workload).case_id), "caching").unwrap();

        let merged = folder.path().join("merged");
        let shards = Shards::open(&[two, one]).unwrap();
        assert_eq!(shards.merge(&merged).unwrap(), Merged { cases: 5, shards: 2 });
        for name in ["runs.csv", "timings.csv", "comparison.csv"] {
            assert_eq!(fs::read(merged.join(name)).unwrap(), fs::read(alone.join(name)).unwrap(), "{name}");
        }
        for row in CASES.map(record) {
            let read = |path: &Path| fs::read(folder::detail_path(path, &row.case_id)).unwrap();
            assert_eq!(read(&merged), read(&alone));
        }
        let made = folder::read_environment(&merged).unwrap();
        assert_eq!((made.shard, made.merged_shards), (None, Some(2)));
        assert_eq!((made.started.as_str(), made.machine.as_str()), ("2026-11-17T00:00:00Z", "machine 1, machine 2"));
        assert!(matches!(shards.merge(&merged), Err(ReportError::Occupied { .. })));
    }

    #[test]
    fn what_is_missing_is_named_case_by_case_or_as_a_shard() {
        let folder = TempDir::new().unwrap();
        let stopped = CaseRecord { status: Status::Interrupted, ..record("c") };
        let one = shard(&folder, "one", &environment(1), &[record("a"), stopped]);
        let found = flaws_of(std::slice::from_ref(&one));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("it lacks 2 cases\n  /c/caching@#0\n  /e/caching@#0"), "{found:?}");
        assert!(found[1].contains("missing: shard slice:2/2, with 2 cases\n  /b/"), "{found:?}");
        let refusal = Shards::open(&[one]).unwrap().merge(&folder.path().join("merged")).unwrap_err();
        assert!(matches!(refusal, ReportError::NotWhole { .. }));
        assert!(!folder.path().join("merged").exists());
    }

    #[test]
    fn a_shard_without_cases_is_not_missed_however_many_there_are() {
        let folder = TempDir::new().unwrap();
        let of = |shard| {
            let part = Shard { rule: "slice".to_owned(), shard, shards: u32::MAX };
            Environment { shard: Some(part), ..environment(shard) }
        };
        let one = shard(&folder, "one", &of(1), &["a", "c", "e"].map(record));
        let two = shard(&folder, "two", &of(2), &["b", "d"].map(record));
        assert_eq!(flaws_of(&[one, two]), Vec::<String>::new());
    }

    #[test]
    fn files_of_cases_that_were_cut_or_lost_on_the_way_are_named() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d"].map(record));
        let cut = folder::detail_path(&one, &record("c").case_id);
        let whole = fs::read(&cut).unwrap();
        fs::write(&cut, &whole[..whole.len() - 9]).unwrap();
        fs::remove_file(folder::detail_path(&one, &record("e").case_id)).unwrap();
        let found = flaws_of(&[one.clone(), two.clone()]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("damaged: ") && found[0].contains("of 2 cases\n  /c/"), "{found:?}");
        let resumed =
            RunFolder::resume(&one, &environment(1), &["a", "c", "e"].map(|case| record(case).case_id)).unwrap();
        assert_eq!(resumed.completed_cases(), BTreeSet::from([record("a").case_id]), "the others run again");
        fs::remove_dir_all(two.join("cases")).unwrap();
        let found = flaws_of(&[two]);
        assert!(!found.iter().any(|flaw| flaw.starts_with("damaged")), "published folders hold rows only: {found:?}");
    }

    #[test]
    fn what_is_double_or_strange_is_named() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e", "b"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d", "x"].map(record));
        let found = flaws_of(&[one.clone(), two]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("beside its plan, 1 case\n  /x/"), "{found:?}");
        assert!(found[1].contains("both hold 1 case\n  /b/"), "{found:?}");
        let again = shard(&folder, "again", &environment(1), &[]);
        let found = flaws_of(&[one, again]);
        assert!(found[0].ends_with("both hold shard slice:1/2"), "{found:?}");
    }

    #[test]
    fn shards_of_different_runs_are_told_apart() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &[]);
        let other = Environment { commit: "newer".to_owned(), ..environment(2) };
        let two = shard(&folder, "two", &other, &[]);
        super::super::write_plan(&two, &plan()[..4]).unwrap();
        let found = flaws_of(&[one, two.clone()]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("two: its commit is 'newer'"), "{found:?}");
        assert!(found[1].contains("its plan.csv is not that of"), "{found:?}");
        fs::remove_file(two.join("plan.csv")).unwrap();
        assert!(flaws_of(&[two])[0].ends_with("it has no plan.csv"));
        let whole = folder.path().join("whole");
        RunFolder::create(&whole, &Environment::default()).unwrap();
        assert!(matches!(Shards::open(&[whole]), Err(ReportError::NoShard { .. })));
    }
}
