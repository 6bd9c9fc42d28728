//! Merges the shards of a run into the folder that one process would have written.
//!
//! Everything comes from the files of the shards, so merging works on any machine. `oomph report`
//! shows what is wrong with them and merges them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use super::{
    Environment, EnvironmentDifference, Partition, PlannedCase, RecordFolder, ReportError, RunFolder, ThresholdFiles,
    command_line, folder, folder::FolderRecord, render::counted,
};
use crate::{
    answer::{
        claims::ClaimRecord,
        techniques::TechniqueRecord,
        threshold::{ThresholdDetail, ThresholdStatus},
    },
    measure::{CaseRecord, Status, TimingRecord},
};

/// More cases than this are counted, not named.
const MOST_NAMED: usize = 10;

/// The folders of shards, and why they do not form one complete run.
#[derive(Debug)]
pub struct Shards {
    folders: Vec<ShardFolder>,
    /// Why they do not form one complete run, one message per problem.
    pub problems: Vec<String>,
}

/// The folder of one shard.
#[derive(Debug)]
struct ShardFolder {
    path: PathBuf,
    environment: Environment,
    shard: Partition,
    plan: Option<Vec<PlannedCase>>,
    rows: ShardRows,
    /// Cases whose detail files cannot be read.
    damaged: Vec<String>,
}

/// The rows of cases that were not interrupted.
#[derive(Debug, Default)]
struct ShardRows {
    records: Vec<CaseRecord>,
    timings: Vec<TimingRecord>,
    thresholds: Vec<ThresholdDetail>,
    techniques: Vec<TechniqueRecord>,
    claims: Vec<ClaimRecord>,
}

impl Shards {
    /// Reads the folders and looks for missing, duplicate and different parts. A folder that is not
    /// a shard is refused.
    pub fn open(paths: &[PathBuf]) -> Result<Shards, ReportError> {
        let folders = paths.iter().map(|path| ShardFolder::read(path)).collect::<Result<Vec<_>, _>>()?;
        let problems = problems(&folders);
        Ok(Shards { folders, problems })
    }

    /// Writes the merged run into the new folder `place`, and returns the number of its cases. Shards
    /// with problems are refused.
    pub fn merge(&self, place: &Path) -> Result<usize, ReportError> {
        let (Some(first), None) = (self.folders.first(), self.problems.first()) else {
            let reason = self.problems.first().map_or("there are none", String::as_str);
            return Err(ReportError::NotWhole { reason: reason.to_owned() });
        };
        for shard in &self.folders {
            folder::refuse_old_schema(&shard.path, &shard.environment, "cannot be merged")?;
        }
        let environment = self.environment(first);
        let base = environment.settings.as_ref().map_or("", |settings| settings.base.as_str());
        let case_ids: Vec<String> = first.plan.iter().flatten().map(|case| case.case_id.clone()).collect();
        folder::begin(place, &environment)?;
        if self.has_file("techniques.csv") {
            RecordFolder::with(place, self.all(|rows| &rows.techniques))?.finish(&case_ids)?;
        } else if self.has_file("claims.csv") {
            RecordFolder::with(place, self.all(|rows| &rows.claims))?.finish(&case_ids)?;
        } else {
            for folder in &self.folders {
                folder.copy_details(place)?;
            }
            let run = RunFolder::with_rows(place, &environment, self.records(), self.all(|rows| &rows.timings))?;
            run.finish(&case_ids, base)?;
            if self.has_file("thresholds.json") {
                ThresholdFiles::with(place, self.all(|rows| &rows.thresholds)).finish(&case_ids)?;
            }
        }
        Ok(case_ids.len())
    }

    /// The rows of all cases, shard by shard.
    pub fn records(&self) -> Vec<CaseRecord> {
        self.all(|rows| &rows.records)
    }

    fn has_file(&self, name: &str) -> bool {
        self.folders.iter().any(|folder| folder.path.join(name).is_file())
    }

    fn all<T: Clone>(&self, of: impl Fn(&ShardRows) -> &Vec<T>) -> Vec<T> {
        self.folders.iter().flat_map(|folder| of(&folder.rows)).cloned().collect()
    }

    /// The environment of the first folder, with the earliest start, the names of all machines, and
    /// the command that one process would have had.
    fn environment(&self, first: &ShardFolder) -> Environment {
        let all = || self.folders.iter().map(|folder| &folder.environment);
        let machines: BTreeSet<&str> = all().map(|run| run.machine.as_str()).collect();
        let command = command_line::without(&first.environment.command, &command_line::OPTIONS_OF_ONE_PROCESS);
        Environment {
            started: all().map(|run| &run.started).min().unwrap_or(&first.environment.started).clone(),
            machine: machines.into_iter().collect::<Vec<_>>().join(", "),
            command: command.into_iter().map(str::to_owned).collect(),
            shard: None,
            merged_shards: Some(first.shard.shards),
            ..first.environment.clone()
        }
    }
}

impl ShardFolder {
    fn read(path: &Path) -> Result<ShardFolder, ReportError> {
        let environment = folder::read_environment(path)?;
        let Some(shard) = environment.shard else {
            return Err(ReportError::NoShard { path: path.to_owned() });
        };
        let rows = ShardRows::read(path)?;
        let case_ids = rows.records.iter().map(|record| &record.case_id);
        let damaged = case_ids.filter(|id| folder::is_damaged(path, id)).cloned().collect();
        Ok(ShardFolder { path: path.to_owned(), environment, shard, plan: PlannedCase::read(path)?, rows, damaged })
    }

    /// Copies the detail files of cases, where there are any.
    fn copy_details(&self, place: &Path) -> Result<(), ReportError> {
        let cases = place.join("cases");
        for record in &self.rows.records {
            let from = folder::detail_path(&self.path, &record.case_id);
            // Published folders have rows only.
            if from.is_file() {
                fs::create_dir_all(&cases).map_err(ReportError::io(&cases))?;
                fs::copy(&from, folder::detail_path(place, &record.case_id)).map_err(ReportError::io(&from))?;
            }
        }
        Ok(())
    }
}

impl ShardRows {
    fn read(path: &Path) -> Result<ShardRows, ReportError> {
        let mut rows = ShardRows {
            records: folder::read_records(path)?,
            timings: folder::read_timings(path)?,
            thresholds: ThresholdFiles::read(path)?,
            techniques: RecordFolder::read(path)?,
            claims: RecordFolder::read(path)?,
        };
        rows.records.retain(|row| row.status != Status::Interrupted);
        rows.thresholds.retain(|row| row.record.status != ThresholdStatus::Interrupted);
        rows.techniques.retain(|row| row.status != Status::Interrupted);
        Ok(rows)
    }

    fn ids(&self) -> BTreeSet<String> {
        let cases = self.records.iter().map(|row| row.case_id.clone());
        let thresholds = self.thresholds.iter().map(|row| row.record.case_id.clone());
        let techniques = self.techniques.iter().map(FolderRecord::id);
        cases.chain(thresholds).chain(techniques).chain(self.claims.iter().map(FolderRecord::id)).collect()
    }
}

/// Everything that keeps the shards from being one run. Cases are only compared between shards that
/// belong together.
fn problems(folders: &[ShardFolder]) -> Vec<String> {
    let Some((first, others)) = folders.split_first() else { return Vec::new() };
    let first_path = first.path.display();
    let mut found = Vec::new();
    for other in others {
        for EnvironmentDifference { what, here, there } in first.environment.unlike_shards(&other.environment) {
            let path = other.path.display();
            found.push(format!("different: {path}: its {what} is '{there}', that of {first_path} is '{here}'"));
        }
    }
    for folder in folders {
        let path = folder.path.display();
        if folder.plan.is_none() {
            found.push(format!("{path}: it has no plan.csv"));
        } else if folder.plan != first.plan {
            found.push(format!("different: {path}: its plan.csv is not that of {first_path}"));
        }
    }
    let mut known: BTreeMap<u32, &ShardFolder> = BTreeMap::new();
    for folder in folders {
        if let Some(same) = known.insert(folder.shard.shard, folder) {
            let (one, other) = (same.path.display(), folder.path.display());
            found.push(format!("duplicate: {one} and {other} both hold shard {}", folder.shard));
        }
    }
    if let (true, Some(plan)) = (found.is_empty(), &first.plan) {
        found.extend(case_problems(&known, &first.shard, plan));
    }
    found
}

/// Missing, duplicate, unplanned and damaged cases of shards that belong together.
fn case_problems(folders: &BTreeMap<u32, &ShardFolder>, like: &Partition, plan: &[PlannedCase]) -> Vec<String> {
    let mut found = Vec::new();
    let mut holders: BTreeMap<String, &ShardFolder> = BTreeMap::new();
    let planned: BTreeSet<&str> = plan.iter().map(|case| case.case_id.as_str()).collect();
    for &folder in folders.values() {
        let path = folder.path.display();
        let mut duplicates: BTreeMap<&Path, Vec<String>> = BTreeMap::new();
        let mut unplanned = Vec::new();
        for id in folder.rows.ids() {
            if !planned.contains(id.as_str()) {
                unplanned.push(id);
            } else if let Some(holder) = holders.get(&id) {
                duplicates.entry(holder.path.as_path()).or_default().push(id);
            } else {
                holders.insert(id, folder);
            }
        }
        if !unplanned.is_empty() {
            found.push(format!("different: {path} holds cases that are not in its plan: {}", named(&unplanned)));
        }
        for (holder, ids) in duplicates {
            found.push(format!("duplicate: {} and {path} both hold {}", holder.display(), named(&ids)));
        }
    }
    // A shard without cases may be missing.
    let mut missing: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for case in plan.iter().filter(|case| !holders.contains_key(&case.case_id)) {
        missing.entry(case.shard).or_default().push(case.case_id.clone());
    }
    for (shard, ids) in missing {
        found.push(match folders.get(&shard) {
            None => format!("missing: shard {}, with {}", Partition { shard, ..*like }, named(&ids)),
            Some(folder) => {
                format!("missing: {} lacks {}\n  continue it with --resume", folder.path.display(), named(&ids))
            }
        });
    }
    for folder in folders.values().filter(|folder| !folder.damaged.is_empty()) {
        let (path, cases) = (folder.path.display(), named(&folder.damaged));
        found.push(format!(
            "damaged: {path}: the files in cases/ cannot be read for {cases}\n  copy the folder again, or continue it with \
             --resume"
        ));
    }
    found
}

/// The number of cases and the first of their names.
fn named(case_ids: &[String]) -> String {
    let shown = case_ids.iter().take(MOST_NAMED).map(|id| format!("\n  {id}")).collect::<String>();
    let rest = match case_ids.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        rest => format!("\n  and {rest} more"),
    };
    format!("{}{shown}{rest}", counted(case_ids.len(), "case", "cases"))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::report::PartitionRule;
    use crate::{
        measure::{CaseDetail, CaseLabel, SCHEMA},
        report::RunSettings,
    };

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
            schema: SCHEMA,
            started: format!("2026-11-1{}T00:00:00Z", 9 - shard),
            machine: format!("machine {shard}"),
            settings: Some(RunSettings { base: "caching".to_owned(), ..RunSettings::default() }),
            shard: Some(Partition { rule: PartitionRule::Slice, shard, shards: 2 }),
            ..Environment::default()
        }
    }

    fn timing(case_id: &str) -> TimingRecord {
        TimingRecord { schema: SCHEMA, case_id: case_id.to_owned(), ..TimingRecord::default() }
    }

    /// A folder of the shard with these rows.
    fn shard(folder: &TempDir, name: &str, environment: &Environment, rows: &[CaseRecord]) -> PathBuf {
        let path = folder.path().join(name);
        let run = RunFolder::create(&path, environment).unwrap();
        PlannedCase::write(&path, &plan()).unwrap();
        for row in rows {
            run.append_timing(&timing(&row.case_id)).unwrap();
            run.append(row, &CaseDetail { case_id: row.case_id.clone(), ..CaseDetail::default() }).unwrap();
        }
        path
    }

    fn problems_of(folders: &[PathBuf]) -> Vec<String> {
        Shards::open(folders).unwrap().problems.to_vec()
    }

    #[test]
    fn merged_run_equals_run_of_one_process() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["e", "a", "c"].map(record));
        let two = shard(&folder, "two", &environment(2), &["d", "b"].map(record));
        let alone = folder.path().join("alone");
        let run = RunFolder::create(&alone, &Environment { shard: None, ..environment(1) }).unwrap();
        for row in CASES.map(record) {
            run.append_timing(&timing(&row.case_id)).unwrap();
            run.append(&row, &CaseDetail { case_id: row.case_id.clone(), ..CaseDetail::default() }).unwrap();
        }
        run.finish(&CASES.map(|workload| record(workload).case_id), "caching").unwrap();

        let merged = folder.path().join("merged");
        let shards = Shards::open(&[two, one]).unwrap();
        assert_eq!(shards.merge(&merged).unwrap(), 5);
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
    fn missing_cases_and_shards_are_named() {
        let folder = TempDir::new().unwrap();
        let stopped = CaseRecord { status: Status::Interrupted, ..record("c") };
        let one = shard(&folder, "one", &environment(1), &[record("a"), stopped]);
        let found = problems_of(std::slice::from_ref(&one));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("lacks 2 cases\n  /c/caching@#0\n  /e/caching@#0"), "{found:?}");
        assert!(found[1].contains("missing: shard slice:2/2, with 2 cases\n  /b/"), "{found:?}");
        let refusal = Shards::open(&[one]).unwrap().merge(&folder.path().join("merged")).unwrap_err();
        assert!(matches!(refusal, ReportError::NotWhole { .. }));
        assert!(!folder.path().join("merged").exists());
    }

    #[test]
    fn shard_without_cases_may_be_missing() {
        let folder = TempDir::new().unwrap();
        let of = |shard| {
            let part = Partition { rule: PartitionRule::Slice, shard, shards: u32::MAX };
            Environment { shard: Some(part), ..environment(shard) }
        };
        let one = shard(&folder, "one", &of(1), &["a", "c", "e"].map(record));
        let two = shard(&folder, "two", &of(2), &["b", "d"].map(record));
        assert_eq!(problems_of(&[one, two]), Vec::<String>::new());
    }

    #[test]
    fn damaged_case_files_are_named() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d"].map(record));
        let cut = folder::detail_path(&one, &record("c").case_id);
        let whole = fs::read(&cut).unwrap();
        fs::write(&cut, &whole[..whole.len() - 9]).unwrap();
        fs::remove_file(folder::detail_path(&one, &record("e").case_id)).unwrap();
        let found = problems_of(&[one.clone(), two.clone()]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("damaged: ") && found[0].contains("for 2 cases\n  /c/"), "{found:?}");
        let resumed =
            RunFolder::resume(&one, &environment(1), &["a", "c", "e"].map(|case| record(case).case_id)).unwrap();
        assert_eq!(resumed.completed_cases(), BTreeSet::from([record("a").case_id]), "the others run again");
        fs::remove_dir_all(two.join("cases")).unwrap();
        let found = problems_of(&[two]);
        assert!(
            !found.iter().any(|problem| problem.starts_with("damaged")),
            "published folders have no details: {found:?}"
        );
    }

    #[test]
    fn duplicate_and_unplanned_cases_are_named() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e", "b"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d", "x"].map(record));
        let found = problems_of(&[one.clone(), two]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("not in its plan: 1 case\n  /x/"), "{found:?}");
        assert!(found[1].contains("both hold 1 case\n  /b/"), "{found:?}");
        let again = shard(&folder, "again", &environment(1), &[]);
        let found = problems_of(&[one, again]);
        assert!(found[0].ends_with("both hold shard slice:1/2"), "{found:?}");
    }

    #[test]
    fn shards_of_different_runs_are_refused() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &[]);
        let other = Environment { commit: "newer".to_owned(), ..environment(2) };
        let two = shard(&folder, "two", &other, &[]);
        PlannedCase::write(&two, &plan()[..4]).unwrap();
        let found = problems_of(&[one, two.clone()]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("two: its commit is 'newer'"), "{found:?}");
        assert!(found[1].contains("its plan.csv is not that of"), "{found:?}");
        fs::remove_file(two.join("plan.csv")).unwrap();
        assert!(problems_of(&[two])[0].ends_with("it has no plan.csv"));
        let whole = folder.path().join("whole");
        RunFolder::create(&whole, &Environment { shard: None, ..environment(1) }).unwrap();
        assert!(matches!(Shards::open(&[whole]), Err(ReportError::NoShard { .. })));
    }
}
