//! Merges the shards of a run into the folder that one process would have written.
//!
//! Everything comes from the files of the shards, so merging works on any machine. `oomph report`
//! shows what is wrong with them and merges them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Display, Path},
};

use super::{
    Environment, EnvironmentDifference, OPTIONS_OF_ONE_PROCESS, Partition, PlannedCase, RecordFolder, ReportError,
    RunFolder, StoredRun, ThresholdFiles,
    folder::{self, FolderRecord, detail_path, read_detail},
    html::{self, PageRun},
    lock::{NewFolder, RunLock},
    plan,
    stored_run::named,
    without_options,
};
use crate::{
    answer::threshold::{ThresholdDetail, ThresholdStatus},
    base::escaped,
    measure::{CaseRecord, Status},
};

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
    /// Its rows, without those of cases that were interrupted.
    run: StoredRun,
    shard: Partition,
    /// `thresholds.json`, which has more than the table.
    thresholds: Vec<ThresholdDetail>,
    /// Cases whose detail files cannot be read.
    damaged: Vec<String>,
}

impl Shards {
    /// Looks for missing, duplicate and different parts. A run that is not a shard is refused.
    pub fn open(runs: Vec<StoredRun>) -> Result<Shards, ReportError> {
        let folders = runs.into_iter().map(ShardFolder::of).collect::<Result<Vec<_>, _>>()?;
        let problems = problems(&folders);
        Ok(Shards { folders, problems })
    }

    /// Writes the merged run and its page into the new folder `place`, and returns the number of its cases. Cases whose
    /// id contains one of `wanted` are always drawn. Shards with problems are refused. A merge that fails leaves no
    /// folder.
    pub fn merge(&self, place: &Path, wanted: &[String]) -> Result<usize, ReportError> {
        let (Some(first), None) = (self.folders.first(), self.problems.first()) else {
            let reason = self.problems.first().map_or("there are none", String::as_str);
            return Err(ReportError::NotWhole { reason: reason.to_owned() });
        };
        for shard in &self.folders {
            folder::refuse_old_schema(&shard.run.path, &shard.run.environment, "cannot be merged")?;
        }
        folder::refuse_occupied(place)?;
        if place.is_file() {
            return Err(ReportError::NotAFolder { path: place.to_owned() });
        }
        // An existing folder is replaced by the new one, so it must be empty.
        if fs::read_dir(place).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(ReportError::NotEmpty { path: place.to_owned() });
        }
        let place = place.canonicalize().unwrap_or_else(|_| place.to_owned());
        let merged = NewFolder::beside(&place)?;
        let cases = self.write(first, &merged.path)?;
        let page = PageRun { name: folder::name(&place), ..PageRun::of_folder(&merged.path)? };
        html::write_page(&[page], wanted, &merged.path.join("report.html"))?;
        fs::rename(&merged.path, &place).map_err(ReportError::io(&place))?;
        Ok(cases)
    }

    /// Writes the files of the merged run.
    fn write(&self, first: &ShardFolder, place: &Path) -> Result<usize, ReportError> {
        let environment = self.environment(first);
        let base = environment.settings.as_ref().map_or("", |settings| settings.base.as_str());
        let whole = |case: &PlannedCase| PlannedCase { shard: None, ..case.clone() };
        let plan: Vec<PlannedCase> = first.run.plan.iter().flatten().map(whole).collect();
        let case_ids: Vec<String> = plan.iter().map(|case| case.case_id.clone()).collect();
        let lock: RunLock = folder::begin(place, &environment, &plan)?;
        if self.has_file("techniques.csv") {
            RecordFolder::with(place, lock, &environment, self.all(|shard| &shard.run.techniques))?
                .finish(&case_ids)?;
        } else if self.has_file("claims.csv") {
            RecordFolder::with(place, lock, &environment, self.all(|shard| &shard.run.claims))?.finish(&case_ids)?;
        } else {
            for folder in &self.folders {
                folder.copy_details(place)?;
            }
            let timings = self.all(|shard| &shard.run.timings);
            let run = RunFolder::with_rows(place, lock, &environment, self.records(), timings)?;
            run.finish(&case_ids, base)?;
            if self.has_file("thresholds.json") {
                ThresholdFiles::with(place, self.thresholds()).finish(&case_ids)?;
            }
        }
        Ok(case_ids.len())
    }

    /// The rows of all cases, shard by shard.
    pub fn records(&self) -> Vec<CaseRecord> {
        self.all(|shard| &shard.run.records)
    }

    /// The thresholds of all cases, shard by shard.
    pub fn thresholds(&self) -> Vec<ThresholdDetail> {
        self.all(|shard| &shard.thresholds)
    }

    /// The techniques of all shards that could not be measured, with the reasons.
    pub fn failed_techniques(&self) -> Vec<(String, String)> {
        let rows = self.folders.iter().flat_map(|shard| &shard.run.techniques);
        rows.filter_map(|row| Some((row.id(), row.failure()?.to_owned()))).collect()
    }

    fn has_file(&self, name: &str) -> bool {
        self.folders.iter().any(|folder| folder.run.path.join(name).is_file())
    }

    fn all<T: Clone>(&self, of: impl Fn(&ShardFolder) -> &Vec<T>) -> Vec<T> {
        self.folders.iter().flat_map(of).cloned().collect()
    }

    /// The environment of the merged run.
    fn environment(&self, first: &ShardFolder) -> Environment {
        let all = || self.folders.iter().map(|folder| &folder.run.environment);
        let machines: BTreeSet<&str> = all().map(|run| run.machine.as_str()).collect();
        let own = &first.run.environment;
        let command = without_options(&own.command, &OPTIONS_OF_ONE_PROCESS);
        Environment {
            started: all().map(|run| &run.started).min().unwrap_or(&own.started).clone(),
            machine: machines.into_iter().collect::<Vec<_>>().join(", "),
            command: command.into_iter().map(str::to_owned).collect(),
            shard: None,
            merged_shards: Some(first.shard.shards),
            ..own.clone()
        }
    }
}

impl ShardFolder {
    fn of(mut run: StoredRun) -> Result<ShardFolder, ReportError> {
        let Some(shard) = run.environment.shard else {
            return Err(ReportError::NoShard { path: run.path });
        };
        run.records.retain(|row| row.status != Status::Interrupted);
        run.thresholds.retain(|row| row.status != ThresholdStatus::Interrupted);
        run.techniques.retain(|row| row.status != Status::Interrupted);
        let mut thresholds = ThresholdFiles::read(&run.path)?;
        thresholds.retain(|row| row.record.status != ThresholdStatus::Interrupted);
        let case_ids = run.records.iter().map(|record| &record.case_id);
        let damaged = case_ids.filter(|id| read_detail(&run.path, id).is_err()).cloned().collect();
        Ok(ShardFolder { run, shard, thresholds, damaged })
    }

    fn path(&self) -> Display<'_> {
        self.run.path.display()
    }

    /// Copies the detail files of cases.
    fn copy_details(&self, place: &Path) -> Result<(), ReportError> {
        let cases = place.join("cases");
        fs::create_dir_all(&cases).map_err(ReportError::io(&cases))?;
        for record in &self.run.records {
            let from = detail_path(&self.run.path, &record.case_id);
            fs::copy(&from, detail_path(place, &record.case_id)).map_err(ReportError::io(&from))?;
        }
        Ok(())
    }

    /// Whether the table of thresholds and the document with their details have the same cases.
    fn has_all_thresholds(&self) -> bool {
        let table: BTreeSet<&str> = self.run.thresholds.iter().map(|row| row.case_id.as_str()).collect();
        table == self.thresholds.iter().map(|row| row.record.case_id.as_str()).collect()
    }
}

/// Everything that keeps the shards from being one run. Cases are only compared between shards that
/// belong together.
fn problems(folders: &[ShardFolder]) -> Vec<String> {
    let Some((first, others)) = folders.split_first() else { return Vec::new() };
    let first_path = first.path();
    let mut found = Vec::new();
    for other in others {
        for EnvironmentDifference { what, here, there } in first.run.environment.unlike_shards(&other.run.environment) {
            let (path, here, there) = (other.path(), escaped(&here), escaped(&there));
            found.push(format!("different: {path}: its {what} is '{there}', that of {first_path} is '{here}'"));
        }
    }
    for folder in folders {
        let path = folder.path();
        match (&folder.run.plan, &first.run.plan) {
            (None, _) => found.push(format!("{path}: it has no plan.csv")),
            (Some(plan), Some(expected)) if !plan::has_same_cases(plan, expected) => {
                found.push(format!("different: {path}: its plan.csv is not that of {first_path}"));
            }
            (Some(plan), Some(expected)) => {
                found.extend(content_problem(plan, expected).map(|problem| {
                    format!("different: {path}: its content of suites, workloads and trace files is not that of {first_path}: {problem}")
                }));
            }
            (Some(_), None) => {}
        }
    }
    let mut known: BTreeMap<u32, &ShardFolder> = BTreeMap::new();
    for folder in folders {
        if let Some(same) = known.insert(folder.shard.shard, folder) {
            let (one, other) = (same.path(), folder.path());
            found.push(format!("duplicate: {one} and {other} both hold shard {}", folder.shard));
        }
    }
    if let (true, Some(plan)) = (found.is_empty(), &first.run.plan) {
        found.extend(case_problems(&known, &first.shard, plan));
    }
    for folder in folders {
        let path = folder.path();
        found.extend(folder.run.defects.iter().map(|defect| format!("damaged: {path}: {defect}")));
        if !folder.has_all_thresholds() {
            found.push(format!("damaged: {path}: thresholds.csv and thresholds.json have different cases"));
        }
    }
    found
}

/// Missing, duplicate, unplanned and damaged cases of shards that belong together.
fn case_problems(folders: &BTreeMap<u32, &ShardFolder>, like: &Partition, plan: &[PlannedCase]) -> Vec<String> {
    let mut found = Vec::new();
    let mut holders: BTreeMap<String, &ShardFolder> = BTreeMap::new();
    let planned: BTreeSet<&str> = plan.iter().map(|case| case.case_id.as_str()).collect();
    for &folder in folders.values() {
        let path = folder.path();
        let mut duplicates: BTreeMap<&Path, Vec<String>> = BTreeMap::new();
        let mut unplanned = Vec::new();
        for id in folder.run.ids().into_iter().collect::<BTreeSet<_>>() {
            if !planned.contains(id.as_str()) {
                unplanned.push(id);
            } else if let Some(holder) = holders.get(&id) {
                duplicates.entry(holder.run.path.as_path()).or_default().push(id);
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
        missing.entry(case.shard.unwrap_or(1)).or_default().push(case.case_id.clone());
    }
    for (shard, ids) in missing {
        found.push(match folders.get(&shard) {
            None => format!("missing: shard {}, with {}", Partition { shard, ..*like }, named(&ids)),
            Some(folder) => {
                format!("missing: {} lacks {}\n  continue it with --resume", folder.path(), named(&ids))
            }
        });
    }
    for folder in folders.values().filter(|folder| !folder.damaged.is_empty()) {
        let (path, cases) = (folder.path(), named(&folder.damaged));
        found.push(format!(
            "damaged: {path}: the files in cases/ cannot be read for {cases}\n  copy the folder again, or continue it with \
             --resume"
        ));
    }
    found
}

/// The cases that contain something else than planned, and what.
fn content_problem(plan: &[PlannedCase], expected: &[PlannedCase]) -> Option<String> {
    let different = plan::different_cases(plan, expected);
    let (_, what) = different.first()?;
    let ids: Vec<String> = different.iter().map(|(case_id, _)| (*case_id).to_owned()).collect();
    Some(format!("{what}, of {}", named(&ids)))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;
    use crate::report::PartitionRule;
    use crate::{
        measure::{CaseDetail, CaseLabel, SCHEMA, TimingRecord},
        report::RunSettings,
    };

    const CASES: [&str; 5] = ["a", "b", "c", "d", "e"];

    fn record(workload: &str) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: "caching".to_owned(), ..CaseLabel::default() };
        CaseRecord::unmeasured(&label, Status::Completed, "")
    }

    fn plan() -> Vec<PlannedCase> {
        let case = |(place, workload): (u32, &&str)| PlannedCase {
            case_id: record(workload).case_id,
            shard: Some(place % 2 + 1),
            ..PlannedCase::default()
        };
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
        let run = RunFolder::create(&path, environment, &plan()).unwrap();
        for row in rows {
            run.append_timing(&timing(&row.case_id)).unwrap();
            run.append(row, &CaseDetail { case_id: row.case_id.clone(), ..CaseDetail::default() }).unwrap();
        }
        path
    }

    fn problems_of(folders: &[PathBuf]) -> Vec<String> {
        shards(folders).problems
    }

    fn shards(folders: &[PathBuf]) -> Shards {
        Shards::open(folders.iter().map(|folder| StoredRun::read(folder).unwrap()).collect()).unwrap()
    }

    #[test]
    fn merged_run_equals_run_of_one_process() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["e", "a", "c"].map(record));
        let two = shard(&folder, "two", &environment(2), &["d", "b"].map(record));
        let alone = folder.path().join("alone");
        let run = RunFolder::create(&alone, &Environment { shard: None, ..environment(1) }, &[]).unwrap();
        for row in CASES.map(record) {
            run.append_timing(&timing(&row.case_id)).unwrap();
            run.append(&row, &CaseDetail { case_id: row.case_id.clone(), ..CaseDetail::default() }).unwrap();
        }
        run.finish(&CASES.map(|workload| record(workload).case_id), "caching").unwrap();

        let merged = folder.path().join("merged");
        let shards = shards(&[two, one]);
        assert_eq!(shards.merge(&merged, &[]).unwrap(), 5);
        for name in ["runs.csv", "timings.csv", "comparison.csv"] {
            assert_eq!(fs::read(merged.join(name)).unwrap(), fs::read(alone.join(name)).unwrap(), "{name}");
        }
        for row in CASES.map(record) {
            let read = |path: &Path| fs::read(detail_path(path, &row.case_id)).unwrap();
            assert_eq!(read(&merged), read(&alone));
        }
        let made = folder::read_environment(&merged).unwrap();
        assert_eq!((made.shard, made.merged_shards), (None, Some(2)));
        assert_eq!((made.started.as_str(), made.machine.as_str()), ("2026-11-17T00:00:00Z", "machine 1, machine 2"));
        assert!(matches!(shards.merge(&merged, &[]), Err(ReportError::Occupied { .. })));
        assert_eq!(StoredRun::read(&merged).unwrap().gaps(), Vec::<String>::new());
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
        let refusal = shards(&[one]).merge(&folder.path().join("merged"), &[]).unwrap_err();
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
        let cut = detail_path(&one, &record("c").case_id);
        let whole = fs::read(&cut).unwrap();
        fs::write(&cut, &whole[..whole.len() - 9]).unwrap();
        fs::remove_file(detail_path(&one, &record("e").case_id)).unwrap();
        let found = problems_of(&[one.clone(), two.clone()]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("damaged: ") && found[0].contains("for 2 cases\n  /c/"), "{found:?}");
        let resumed = RunFolder::resume(&one, &environment(1), &plan()).unwrap();
        assert_eq!(resumed.completed_cases(), BTreeSet::from([record("a").case_id]), "the others run again");
        fs::remove_dir_all(two.join("cases")).unwrap();
        let found = problems_of(&[two]);
        assert!(
            found.iter().any(|problem| problem.starts_with("damaged: ") && problem.contains("for 2 cases")),
            "{found:?}"
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
        let found = problems_of(&[one.clone(), two.clone()]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("two: its commit is 'newer'"), "{found:?}");
        assert!(found[1].contains("its plan.csv is not that of"), "{found:?}");
        let other_recording = PlannedCase { source_fingerprint: "2".to_owned(), ..plan()[3].clone() };
        for (folder, case) in
            [(&one, PlannedCase { source_fingerprint: "1".to_owned(), ..plan()[3].clone() }), (&two, other_recording)]
        {
            PlannedCase::write(folder, &[plan()[0].clone(), case]).unwrap();
        }
        let found = problems_of(&[one, two.clone()]);
        assert!(found[1].ends_with("its workload or trace file, of 1 case\n  /d/caching@#0"), "{found:?}");
        fs::remove_file(two.join("plan.csv")).unwrap();
        assert!(problems_of(&[two])[0].ends_with("it has no plan.csv"));
        let whole = folder.path().join("whole");
        RunFolder::create(&whole, &Environment { shard: None, ..environment(1) }, &[]).unwrap();
        let refusal = Shards::open(vec![StoredRun::read(&whole).unwrap()]);
        assert!(matches!(refusal, Err(ReportError::NoShard { .. })));
    }

    #[test]
    fn repeated_rows_of_a_shard_are_refused() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e", "a"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d"].map(record));
        let found = problems_of(&[one, two]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("one: there is more than one row for 1 case\n  /a/"), "{found:?}");
    }

    #[test]
    fn failed_merge_leaves_no_folder() {
        let folder = TempDir::new().unwrap();
        let one = shard(&folder, "one", &environment(1), &["a", "c", "e"].map(record));
        let two = shard(&folder, "two", &environment(2), &["b", "d"].map(record));
        let shards = shards(&[one.clone(), two]);
        let lost = detail_path(&one, &record("e").case_id);
        let bytes = fs::read(&lost).unwrap();
        fs::remove_file(&lost).unwrap();
        let merged = folder.path().join("merged");
        let entries = || fs::read_dir(folder.path()).unwrap().count();
        let before = entries();
        assert!(shards.merge(&merged, &[]).is_err());
        assert_eq!(entries(), before, "nothing is left");
        fs::write(&lost, bytes).unwrap();
        assert_eq!(shards.merge(&merged, &[]).unwrap(), 5, "a retry works");
        let full = folder.path().join("full");
        fs::create_dir(&full).unwrap();
        assert_eq!(shards.merge(&full, &[]).unwrap(), 5, "an empty folder is as good as none");
        fs::create_dir_all(folder.path().join("other/inside")).unwrap();
        assert!(matches!(shards.merge(&folder.path().join("other"), &[]), Err(ReportError::NotEmpty { .. })));
    }
}
