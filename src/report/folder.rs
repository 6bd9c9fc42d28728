//! The folders that runs write: cases ([`RunFolder`]), claims and techniques ([`RecordFolder`]). What is too large for a row
//! of a case is in the files `cases/*.json.gz`.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    io::{self, BufRead, Read, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};

use super::{
    Environment, EnvironmentDifference, PlannedCase, ReportError, ThresholdFiles, cases, checksum,
    lock::RunLock,
    plan,
    render::Places,
    rows::{self, CsvRow, RowFile, RowOrigin},
    scenario,
};
use crate::{
    base::remove_left_files,
    measure::{CaseDetail, CaseRecord, SCHEMA, TimingRecord, file_stem},
};

/// A run's folder: `env.json`, `plan.csv`, `runs.csv`, `timings.csv`, `cases/`, and after
/// [`finish`](RunFolder::finish) `comparison.csv`, `bounds.csv` and `summary.md`.
///
/// Cases may be added from several threads, in any order. Every row is on disk before the next case
/// begins on that thread, and `finish` sorts them in the suite's order. Only one process at a time can have the folder.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    environment: Environment,
    /// The origin of the rows that this process adds.
    origin: RowOrigin,
    content: Mutex<RunRows>,
    _lock: RunLock,
}

#[derive(Debug)]
struct RunRows {
    runs: RowFile<CaseRecord>,
    /// Created with the first row: most runs have no wall-clock times.
    timings: Option<RowFile<TimingRecord>>,
}

/// Creates a folder with its `env.json` and `plan.csv`, and locks it. A folder that already holds a run is refused.
pub(super) fn begin(path: &Path, environment: &Environment, plan: &[PlannedCase]) -> Result<RunLock, ReportError> {
    if path.is_file() {
        return Err(ReportError::NotAFolder { path: path.to_owned() });
    }
    fs::create_dir_all(path).map_err(ReportError::io(path))?;
    let lock = RunLock::acquire(path)?;
    refuse_occupied(path)?;
    // The plan comes first: a folder with an environment has its plan, even after a crash.
    PlannedCase::write(path, plan)?;
    let env_path = path.join("env.json");
    rows::save(&env_path, checksum::sealed(&env_path, environment)?)?;
    Ok(lock)
}

/// Refuses a folder that holds a run.
pub(super) fn refuse_occupied(path: &Path) -> Result<(), ReportError> {
    match path.join("env.json").exists() || path.join("runs.csv").exists() {
        true => Err(ReportError::Occupied { path: path.to_owned() }),
        false => Ok(()),
    }
}

/// Locks the folder of a run that continues.
fn lock_run(path: &Path) -> Result<RunLock, ReportError> {
    // Nothing is written into a folder that holds no run.
    read_environment(path)?;
    RunLock::acquire(path)
}

/// The environment of a locked folder, if its rows may be mixed with rows of `environment`. A shard must have the same
/// plan.
fn check_environment(path: &Path, environment: &Environment, plan: &[PlannedCase]) -> Result<Environment, ReportError> {
    if environment.shard.is_some()
        && let Some(there) = PlannedCase::read(path)?
        && !plan::has_same_cases(plan, &there)
    {
        return Err(ReportError::OtherPlan { path: path.to_owned() });
    }
    let there = read_environment(path)?;
    refuse_old_schema(path, &there, "cannot be resumed")?;
    match environment.conflict(&there) {
        Some(EnvironmentDifference { what, here, there }) => {
            Err(ReportError::OtherEnvironment { path: path.to_owned(), what, here, there })
        }
        None => Ok(there),
    }
}

/// The plan of a run that continues with `plan`. The cases with the ids `held` keep their rows, and all cases of a shard
/// must be those of the other shards: they must contain what they contained when the run began.
fn continued_plan(
    path: &Path,
    environment: &Environment,
    plan: &[PlannedCase],
    held: &HashSet<String>,
) -> Result<Vec<PlannedCase>, ReportError> {
    let Some(there) = PlannedCase::read(path)? else { return Ok(plan.to_vec()) };
    let changed = plan::different_cases(plan, &there);
    let is_kept = |case_id: &str| environment.shard.is_some() || held.contains(case_id);
    match changed.into_iter().find(|(case_id, _)| is_kept(case_id)) {
        Some((case_id, what)) => {
            Err(ReportError::ChangedCase { path: path.to_owned(), case_id: case_id.to_owned(), what })
        }
        None => Ok(plan::grown(plan, &there)),
    }
}

/// Refuses a folder whose rows have another schema than those that are written now.
pub(super) fn refuse_old_schema(path: &Path, there: &Environment, cannot: &'static str) -> Result<(), ReportError> {
    if there.schema == SCHEMA {
        return Ok(());
    }
    let version = format!("{}, commit {}", there.version, there.commit);
    Err(ReportError::OldSchema { path: path.to_owned(), cannot, there: there.schema, here: SCHEMA, version })
}

impl RunFolder {
    /// Creates a folder for a new run of the cases of `plan`. A folder that already holds a run is refused.
    pub fn create(path: &Path, environment: &Environment, plan: &[PlannedCase]) -> Result<RunFolder, ReportError> {
        let lock = begin(path, environment, plan)?;
        fs::create_dir_all(path.join("cases")).map_err(ReportError::io(path))?;
        RunFolder::with_rows(path, lock, environment, Vec::new(), Vec::new())
    }

    /// Continues an interrupted run with the cases of `plan`; for a shard, `plan` also has those of other shards.
    /// Half-written rows, and rows of cases that must run again (failed, or with unreadable files), are dropped. A run
    /// with another environment, other cases or cases with another content is refused and left unchanged: its rows would
    /// not be comparable.
    pub fn resume(path: &Path, environment: &Environment, plan: &[PlannedCase]) -> Result<RunFolder, ReportError> {
        let lock = lock_run(path)?;
        let there = check_environment(path, environment, plan)?;
        let mut records: Vec<CaseRecord> = rows::read(&path.join("runs.csv"))?;
        let timings: Vec<TimingRecord> = rows::read(&path.join("timings.csv"))?;
        let own = environment.shard.map(|partition| partition.shard);
        let ours = plan.iter().filter(|case| own.is_none() || case.shard == own);
        let known: HashSet<&String> = ours.map(|case| &case.case_id).collect();
        let held = records.iter().map(|row| &row.case_id).chain(timings.iter().map(|row| &row.case_id));
        if let Some(other) = held.into_iter().find(|case_id| !known.contains(case_id)) {
            return Err(ReportError::OtherCases { path: path.to_owned(), case_id: other.clone() });
        }
        records.retain(|record| record.status.is_final() && !is_damaged(path, &record.case_id));
        let mut kept: HashSet<String> = records.iter().map(|record| record.case_id.clone()).collect();
        kept.extend(ThresholdFiles::open(path)?.completed_cases());
        let plan = continued_plan(path, environment, plan, &kept)?;
        fs::create_dir_all(path.join("cases")).map_err(ReportError::io(path))?;
        remove_left_files(path).and_then(|()| remove_left_files(&path.join("cases"))).map_err(ReportError::io(path))?;
        PlannedCase::write(path, &plan)?;
        // `env.json` is of the process that began the run.
        Ok(RunFolder {
            origin: RowOrigin::of(environment),
            ..RunFolder::with_rows(path, lock, &there, records, timings)?
        })
    }

    /// A folder with exactly these rows.
    pub(super) fn with_rows(
        path: &Path,
        lock: RunLock,
        environment: &Environment,
        records: Vec<CaseRecord>,
        timings: Vec<TimingRecord>,
    ) -> Result<RunFolder, ReportError> {
        let runs = RowFile::write(&path.join("runs.csv"), records)?;
        let timings = Some(timings).filter(|timings| !timings.is_empty());
        let timings = timings.map(|timings| RowFile::write(&path.join("timings.csv"), timings)).transpose()?;
        let content = Mutex::new(RunRows { runs, timings });
        let origin = RowOrigin::of(environment);
        Ok(RunFolder { path: path.to_owned(), environment: environment.clone(), origin, content, _lock: lock })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The origin of the rows that this process adds.
    pub(super) fn origin(&self) -> &RowOrigin {
        &self.origin
    }

    /// The ids of the cases that need not run again.
    pub fn completed_cases(&self) -> BTreeSet<String> {
        let content = self.content();
        let completed = content.runs.rows.iter().filter(|record| record.status.is_final());
        completed.map(|record| record.case_id.clone()).collect()
    }

    /// Adds a case. Its file is written before its row, so that every row has its file.
    pub fn append(&self, record: &CaseRecord, detail: &CaseDetail) -> Result<(), ReportError> {
        let path = detail_path(&self.path, &record.case_id);
        rows::save(&path, &compressed(detail, &path)?)?;
        self.content().runs.append(self.origin.stamped(record.clone()))
    }

    /// Adds the times of a case.
    pub fn append_timing(&self, record: &TimingRecord) -> Result<(), ReportError> {
        let record = self.origin.stamped(record.clone());
        let mut content = self.content();
        match &mut content.timings {
            Some(timings) => timings.append(record)?,
            None => content.timings = Some(RowFile::write(&self.path.join("timings.csv"), vec![record])?),
        }
        Ok(())
    }

    /// Sorts the rows by `case_ids` (rows of other cases follow, by id), writes `comparison.csv`
    /// with ratios to the strategy `base`, `bounds.csv` and `summary.md`. Returns the sorted rows.
    pub fn finish(&self, case_ids: &[String], base: &str) -> Result<Vec<CaseRecord>, ReportError> {
        let mut content = self.content();
        let records = in_order(&content.runs.rows, case_ids, |record| (&record.case_id, 0));
        content.runs = RowFile::write(&self.path.join("runs.csv"), records.clone())?;
        if let Some(timings) = &content.timings {
            let timings = in_order(&timings.rows, case_ids, |record| (&record.case_id, record.threads.unwrap_or(0)));
            content.timings = Some(RowFile::write(&self.path.join("timings.csv"), timings)?);
        }
        rows::save(&self.path.join("comparison.csv"), &scenario::comparison_csv(&records, base)?)?;
        rows::save(&self.path.join("bounds.csv"), rows::to_csv(&scenario::bounds(&records))?)?;
        rows::save(&self.path.join("summary.md"), cases::summary(&self.environment, &records))?;
        Ok(records)
    }

    /// A poisoned lock is safe to use: it is held for whole rows only.
    fn content(&self) -> MutexGuard<'_, RunRows> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A record that has a folder of its own: `env.json`, `plan.csv`, `NAME.csv` and `NAME.md`.
pub trait FolderRecord: CsvRow + Clone {
    /// The name of its files.
    const NAME: &'static str;

    /// Which row it is.
    fn id(&self) -> String;

    /// Whether it need not be measured again.
    fn is_final(&self) -> bool {
        true
    }

    /// Why it could not be measured, if it could not.
    fn failure(&self) -> Option<&str> {
        None
    }

    /// The Markdown page.
    fn page(records: &[Self]) -> String;
}

/// A folder of records: every row is on disk before the next one is measured.
#[derive(Debug)]
pub struct RecordFolder<T> {
    path: PathBuf,
    table: RowFile<T>,
    ids: HashSet<String>,
    /// The origin of the rows that this process adds.
    origin: RowOrigin,
    _lock: RunLock,
}

impl<T: FolderRecord> RecordFolder<T> {
    /// A new folder, or the rest of an interrupted one. A folder that already holds a run cannot be
    /// created; a run with another environment, or whose rows have another content, cannot be resumed.
    pub fn open(
        path: &Path,
        environment: &Environment,
        plan: &[PlannedCase],
        resumes: bool,
    ) -> Result<RecordFolder<T>, ReportError> {
        if !resumes {
            let lock = begin(path, environment, plan)?;
            return RecordFolder::with(path, lock, environment, Vec::new());
        }
        let lock = lock_run(path)?;
        check_environment(path, environment, plan)?;
        let mut records: Vec<T> = rows::read(&Self::csv(path))?;
        records.retain(T::is_final);
        let kept = records.iter().map(T::id).collect();
        let plan = continued_plan(path, environment, plan, &kept)?;
        remove_left_files(path).map_err(ReportError::io(path))?;
        PlannedCase::write(path, &plan)?;
        RecordFolder::with(path, lock, environment, records)
    }

    /// The folder, with exactly these rows.
    pub(super) fn with(
        path: &Path,
        lock: RunLock,
        environment: &Environment,
        records: Vec<T>,
    ) -> Result<RecordFolder<T>, ReportError> {
        let (ids, origin) = (records.iter().map(T::id).collect(), RowOrigin::of(environment));
        let table = RowFile::write(&Self::csv(path), records)?;
        Ok(RecordFolder { path: path.to_owned(), table, ids, origin, _lock: lock })
    }

    fn csv(path: &Path) -> PathBuf {
        path.join(T::NAME).with_extension("csv")
    }

    /// The rows so far.
    #[must_use]
    pub fn rows(&self) -> &[T] {
        &self.table.rows
    }

    /// Whether the row is there.
    pub fn has(&self, id: &str) -> bool {
        self.ids.contains(id)
    }

    /// Adds a row.
    pub fn append(&mut self, record: &T) -> Result<(), ReportError> {
        self.table.append(self.origin.stamped(record.clone()))?;
        self.ids.insert(record.id());
        Ok(())
    }

    /// Sorts the rows by `ids`, writes the page, and returns the rows.
    pub fn finish(self, ids: &[String]) -> Result<Vec<T>, ReportError> {
        let mut records = self.table.rows;
        let places = Places::of(ids.iter().map(String::as_str));
        records.sort_by_cached_key(|record| places.get(&record.id()));
        rows::save(&Self::csv(&self.path), rows::to_checked_csv(&records)?)?;
        rows::save(&self.path.join(T::NAME).with_extension("md"), T::page(&records))?;
        Ok(records)
    }
}

/// The rows of a run, finished or not, in file order. Rows of an older schema are converted.
pub fn read_records(folder: &Path) -> Result<Vec<CaseRecord>, ReportError> {
    Ok(rows::read_any_release(&folder.join("runs.csv"))?.rows)
}

/// The wall-clock rows of a run. Rows of an older schema are converted.
pub fn read_timings(folder: &Path) -> Result<Vec<TimingRecord>, ReportError> {
    Ok(rows::read_any_release(&folder.join("timings.csv"))?.rows)
}

/// The environment of a run. A schema that cannot be read is refused.
pub fn read_environment(folder: &Path) -> Result<Environment, ReportError> {
    Ok(sealed_environment(folder)?.0)
}

/// The environment of a run, and whether its release writes checksums and plans.
pub(super) fn sealed_environment(folder: &Path) -> Result<(Environment, bool), ReportError> {
    let path = folder.join("env.json");
    if !path.is_file() {
        let path = folder.to_owned();
        return Err(match () {
            () if folder.is_dir() => ReportError::NoRun { path },
            () if folder.exists() => ReportError::NotAFolder { path },
            () => ReportError::NoFolder { path },
        });
    }
    let (environment, is_sealed): (Environment, bool) = checksum::read_document(&path)?;
    rows::check_schema(folder, environment.schema)?;
    Ok((environment, is_sealed))
}

/// The name of a folder.
pub(super) fn name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    whole.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// One row per key, the last one where a case ran twice: first in the order of `case_ids`, then the
/// others by id.
fn in_order<T: Clone>(rows: &[T], case_ids: &[String], key: impl Fn(&T) -> (&String, u16)) -> Vec<T> {
    let places: BTreeMap<&String, usize> = case_ids.iter().zip(0..).collect();
    let last: BTreeMap<(usize, &String, u16), &T> = rows
        .iter()
        .map(|row| {
            let (id, part) = key(row);
            ((places.get(id).copied().unwrap_or(usize::MAX), id, part), row)
        })
        .collect();
    last.into_values().cloned().collect()
}

/// Whether a case has a detail file; published folders have none.
pub(super) fn has_detail(folder: &Path, case_id: &str) -> bool {
    detail_path(folder, case_id).is_file()
}

/// Whether the detail file of a case is missing or unreadable. Published folders have no such files
/// and are not damaged.
fn is_damaged(folder: &Path, case_id: &str) -> bool {
    folder.join("cases").is_dir() && read_detail(folder, case_id).is_err()
}

/// The path of the detail file of a case.
pub(super) fn detail_path(folder: &Path, case_id: &str) -> PathBuf {
    folder.join("cases").join(format!("{}.json.gz", file_stem(case_id)))
}

/// A detail file unpacks to at most this many bytes, and this many times its own size: few bytes cannot take all memory.
const LEAST_DETAIL_LIMIT: u64 = 64 << 20;
const MOST_COMPRESSION: u64 = 64;

/// The detail of a case. The file is read to its end, where gzip has its checksum.
pub fn read_detail(folder: &Path, case_id: &str) -> Result<CaseDetail, ReportError> {
    let path = detail_path(folder, case_id);
    let file = fs::File::open(&path).map_err(ReportError::io(&path))?;
    let packed_bytes = file.metadata().map_err(ReportError::io(&path))?.len();
    let most_bytes = LEAST_DETAIL_LIMIT.max(packed_bytes.saturating_mul(MOST_COMPRESSION));
    let mut decoder = GzDecoder::new(io::BufReader::new(file));
    let mut text = Vec::new();
    decoder.by_ref().take(most_bytes + 1).read_to_end(&mut text).map_err(ReportError::io(&path))?;
    if text.len() as u64 > most_bytes {
        return Err(ReportError::DetailTooLarge { path, most_bytes });
    }
    if !decoder.get_mut().fill_buf().map_err(ReportError::io(&path))?.is_empty() {
        return Err(ReportError::ChangedFile { path });
    }
    let detail: CaseDetail = serde_json::from_slice(&text).map_err(ReportError::json(&path))?;
    match detail.case_id == case_id {
        true => Ok(detail),
        false => Err(ReportError::OtherDetail { path, case_id: detail.case_id.into() }),
    }
}

/// The file of a case. The gzip header has no time stamp, so that the same case gives the same bytes.
fn compressed(detail: &CaseDetail, path: &Path) -> Result<Vec<u8>, ReportError> {
    // In one write: the encoder clears the rest of its buffer at every write, and serde_json writes
    // word by word.
    let mut json = serde_json::to_vec(detail).map_err(ReportError::json(path))?;
    json.push(b'\n');
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&json).and_then(|()| encoder.finish()).map_err(ReportError::io(path))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde::{Deserialize, Serialize};
    use tempfile::TempDir;

    use super::*;
    use crate::{
        answer::{
            claims::{ClaimRecord, ClaimVerdict},
            techniques::{TechniqueRecord, row_id},
        },
        base::{KIB, StreamId, TagId},
        measure::{
            CaseLabel, Status,
            fixture::{TinyStrategy, tiny_device},
            measure,
        },
        replay::ReplayOptions,
        report::{StoredRun, copy_run},
        trace::TraceBuilder,
    };

    fn environment() -> Environment {
        let (commit, device) = ("abc".to_owned(), "sim".to_owned());
        Environment { schema: SCHEMA, commit, device, seed: 1, ..Environment::default() }
    }

    fn case(workload: &str) -> (CaseRecord, CaseDetail) {
        let label = CaseLabel { workload: workload.to_owned(), strategy: "shelf".to_owned(), ..CaseLabel::default() };
        let mut builder = TraceBuilder::new();
        for bytes in 1..=50 {
            let block = builder.alloc(bytes * 100, StreamId::DEFAULT, TagId(0));
            if bytes % 3 != 0 {
                builder.free(block);
            }
        }
        let mut device = tiny_device(64 * KIB);
        measure(&label, &builder.finish(workload), &mut TinyStrategy::default(), &mut device, &ReplayOptions::default())
    }

    /// The ids of the cases of the runs made here, in order.
    fn all_cases() -> [String; 3] {
        ["a", "b", "c"].map(|workload| case(workload).0.case_id)
    }

    fn plan() -> Vec<PlannedCase> {
        all_cases().map(|case_id| PlannedCase { case_id, ..PlannedCase::default() }).to_vec()
    }

    fn write_run(folder: &Path, workloads: &[&str]) {
        let run = RunFolder::create(folder, &environment(), &plan()).unwrap();
        for workload in workloads {
            let (record, detail) = case(workload);
            run.append(&record, &detail).unwrap();
        }
        run.finish(&all_cases(), "shelf").unwrap();
    }

    fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        entries(folder)
            .chain(entries(&folder.join("cases")))
            .filter(|path| path.is_file())
            .map(|path| (path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap()))
            .collect()
    }

    #[test]
    fn order_of_completion_does_not_matter() {
        let (one, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write_run(one.path(), &["a", "b", "c"]);
        write_run(other.path(), &["c", "a", "b"]);
        let written = files(one.path());
        assert_eq!(written, files(other.path()));
        let names: Vec<&str> =
            written.keys().filter_map(|path| path.to_str()).filter(|name| !name.contains('/')).collect();
        assert_eq!(names, ["bounds.csv", "comparison.csv", "env.json", "plan.csv", "runs.csv", "summary.md"]);
        assert_eq!(written.len(), 6 + 3, "and three cases: {written:?}");
    }

    #[test]
    fn copied_run_replaces_only_runs() {
        let folder = TempDir::new().unwrap();
        let (run, kept) = (folder.path().join("run"), folder.path().join("kept"));
        write_run(&run, &["a", "b"]);
        copy_run(&run, &kept).unwrap();
        assert_eq!(read_records(&kept).unwrap(), read_records(&run).unwrap());
        let other = folder.path().join("other");
        write_run(&other, &["c"]);
        copy_run(&other, &kept).unwrap();
        assert_eq!(read_records(&kept).unwrap().len(), 1);
        let precious = folder.path().join("precious");
        fs::create_dir(&precious).unwrap();
        assert!(matches!(copy_run(&run, &precious), Err(ReportError::NoRun { .. })));
        assert!(precious.is_dir());
        let names = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 4, "no temporary folder is left");
        assert_eq!(StoredRun::read(&kept).unwrap().gaps().len(), 1, "the copy knows which rows are missing");
    }

    #[test]
    fn rows_are_on_disk_before_the_run_ends() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment(), &plan()).unwrap();
        assert_eq!(read_records(folder.path()).unwrap(), []);
        let (record, detail) = case("a");
        run.append(&record, &detail).unwrap();
        let stamped = RowOrigin::of(&environment()).stamped(record.clone());
        assert_eq!(read_records(folder.path()).unwrap(), [stamped]);
        assert_eq!(read_detail(folder.path(), &record.case_id).unwrap(), detail);
        assert_eq!(read_environment(folder.path()).unwrap(), environment());
    }

    #[test]
    fn cut_line_is_dropped() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment(), &plan()).unwrap();
        for workload in ["a", "b"] {
            let (record, detail) = case(workload);
            run.append(&record, &detail).unwrap();
        }
        drop(run);
        let runs = folder.path().join("runs.csv");
        let whole = fs::read(&runs).unwrap();
        let ends: Vec<usize> = (1..=whole.len()).filter(|&end| whole[end - 1] == b'\n').collect();
        let cuts = (0..whole.len()).step_by(97).chain(ends.iter().flat_map(|end| [end - 1, *end]));
        for cut in cuts {
            fs::write(&runs, &whole[..cut]).unwrap();
            let resumed = RunFolder::resume(folder.path(), &environment(), &plan()).unwrap();
            let complete = ends.iter().filter(|&&end| end <= cut).count().saturating_sub(1);
            assert_eq!(resumed.completed_cases().len(), complete, "cut at {cut}");
            assert_eq!(fs::read(&runs).unwrap(), whole[..ends[complete]], "cut at {cut}");
        }
    }

    #[test]
    fn resumed_run_equals_uninterrupted_run() {
        let (straight, resumed) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write_run(straight.path(), &["a", "b", "c"]);
        let run = RunFolder::create(resumed.path(), &environment(), &plan()).unwrap();
        let (record, detail) = case("b");
        run.append(&record, &detail).unwrap();
        let broken = CaseRecord { status: Status::Error, ..case("c").0 };
        run.append(&broken, &CaseDetail { case_id: broken.case_id.clone(), ..CaseDetail::default() }).unwrap();
        drop(run);
        for left in ["runs.csv.123-4.partial", "cases/a.json.gz.123-5.partial"] {
            fs::write(resumed.path().join(left), "half").unwrap();
        }

        let run = RunFolder::resume(resumed.path(), &environment(), &plan()).unwrap();
        assert_eq!(run.completed_cases(), BTreeSet::from([record.case_id]), "a broken case runs again");
        for workload in ["c", "a"] {
            let (record, detail) = case(workload);
            run.append(&record, &detail).unwrap();
        }
        run.finish(&all_cases(), "shelf").unwrap();
        drop(run);
        assert_eq!(files(straight.path()), files(resumed.path()));
    }

    #[test]
    fn other_environment_is_refused() {
        let folder = TempDir::new().unwrap();
        assert!(matches!(RunFolder::resume(folder.path(), &environment(), &plan()), Err(ReportError::NoRun { .. })));
        RunFolder::create(folder.path(), &environment(), &plan()).unwrap();
        assert!(matches!(RunFolder::create(folder.path(), &environment(), &plan()), Err(ReportError::Occupied { .. })));
        let elsewhere = Environment { device: "cuda:0".to_owned(), ..environment() };
        let refusal = RunFolder::resume(folder.path(), &elsewhere, &plan()).unwrap_err().to_string();
        assert!(refusal.ends_with("its device is 'sim', this run's is 'cuda:0'"), "{refusal}");
        fs::write(folder.path().join("runs.csv"), "old,columns\n1,2\n").unwrap();
        let refusal = RunFolder::resume(folder.path(), &environment(), &plan());
        assert!(matches!(refusal, Err(ReportError::OtherColumns { .. })));
    }

    #[test]
    fn bad_row_is_named_by_its_line() {
        let folder = TempDir::new().unwrap();
        write_run(folder.path(), &["a"]);
        let runs = folder.path().join("runs.csv");
        let mut text = fs::read_to_string(&runs).unwrap();
        text.push_str("1,too,short\n");
        fs::write(&runs, text).unwrap();
        let refusal = RunFolder::resume(folder.path(), &environment(), &plan()).unwrap_err();
        assert!(matches!(refusal, ReportError::Row { line: 3, .. }), "{refusal}");
    }

    #[test]
    fn one_process_at_a_time_writes() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment(), &plan()).unwrap();
        let resumed = RunFolder::resume(folder.path(), &environment(), &plan());
        assert!(matches!(resumed, Err(ReportError::Locked { .. })));
        let created = RunFolder::create(folder.path(), &environment(), &plan());
        assert!(matches!(created, Err(ReportError::Locked { .. })));
        drop(run);
        assert!(!folder.path().join("run.lock").exists());
        RunFolder::resume(folder.path(), &environment(), &plan()).unwrap();
    }

    #[test]
    fn case_with_another_content_is_not_resumed() {
        let folder = TempDir::new().unwrap();
        let with = |source: &str| -> Vec<PlannedCase> {
            plan().into_iter().map(|case| PlannedCase { source_fingerprint: source.to_owned(), ..case }).collect()
        };
        let run = RunFolder::create(folder.path(), &environment(), &with("1")[..2]).unwrap();
        let (record, detail) = case("a");
        run.append(&record, &detail).unwrap();
        drop(run);
        let before = files(folder.path());
        let refusal = RunFolder::resume(folder.path(), &environment(), &with("2")).unwrap_err().to_string();
        assert!(refusal.contains("its workload or trace file is not what it was for the case"), "{refusal}");
        assert!(refusal.contains(&record.case_id), "{refusal}");
        assert_eq!(files(folder.path()), before);
        // A case without a row may change, and the plan may grow.
        let mut plan = with("2");
        plan[0].source_fingerprint = "1".to_owned();
        RunFolder::resume(folder.path(), &environment(), &plan).unwrap();
        assert_eq!(PlannedCase::read(folder.path()).unwrap().unwrap(), plan);
        let gaps = StoredRun::read(folder.path()).unwrap().gaps();
        assert!(gaps[0].starts_with("2 of 3 cases have no row\n  "), "{gaps:?}");
    }

    #[test]
    fn missing_rows_are_noticed() {
        let folder = TempDir::new().unwrap();
        write_run(folder.path(), &["a", "b", "c"]);
        let gaps = || StoredRun::read(folder.path()).unwrap().gaps();
        assert_eq!(gaps(), Vec::<String>::new());
        let runs = folder.path().join("runs.csv");
        let whole = fs::read_to_string(&runs).unwrap();
        let lines: Vec<&str> = whole.lines().collect();
        fs::write(&runs, format!("{}\n{}\n", lines[0], lines[3])).unwrap();
        assert!(gaps()[0].starts_with("2 of 3 cases have no row"), "{:?}", gaps());
        fs::write(&runs, &whole[..whole.len() - 5]).unwrap();
        assert!(
            gaps()[0].contains("the end of runs.csv is missing") && gaps()[1].starts_with("1 of 3"),
            "{:?}",
            gaps()
        );
        fs::write(&runs, "").unwrap();
        assert!(gaps().iter().any(|gap| gap.starts_with("3 of 3 cases have no row")), "{:?}", gaps());
        fs::remove_file(&runs).unwrap();
        assert!(gaps()[0].starts_with("3 of 3"), "{:?}", gaps());
        fs::write(&runs, format!("{whole}{}\n", lines[1])).unwrap();
        assert!(gaps()[0].starts_with("there is more than one row for 1 case"), "{:?}", gaps());
        fs::write(&runs, &whole).unwrap();
        fs::remove_file(folder.path().join("plan.csv")).unwrap();
        assert!(gaps()[0].starts_with("plan.csv is missing"), "{:?}", gaps());
    }

    #[test]
    fn damaged_details_are_noticed_and_measured_again() {
        let folder = TempDir::new().unwrap();
        write_run(folder.path(), &["a", "b", "c"]);
        let (record, detail) = case("b");
        let path = detail_path(folder.path(), &record.case_id);
        let whole = fs::read(&path).unwrap();
        let other = fs::read(detail_path(folder.path(), &case("a").0.case_id)).unwrap();
        let mut wrong_checksum = whole.clone();
        let place = whole.len() - 8;
        wrong_checksum[place] ^= 1;
        let packed = |text: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        let bomb = packed(&vec![b' '; (LEAST_DETAIL_LIMIT + (1 << 20)) as usize]);
        let damages = [wrong_checksum, [&whole[..], b"more"].concat(), packed(b"{}"), packed(b"not JSON"), other, bomb];
        for damage in damages {
            fs::write(&path, &damage).unwrap();
            assert!(read_detail(folder.path(), &record.case_id).is_err());
            let run = RunFolder::resume(folder.path(), &environment(), &plan()).unwrap();
            assert!(!run.completed_cases().contains(&record.case_id), "it runs again");
            run.append(&record, &detail).unwrap();
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn timings_have_their_own_file() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment(), &plan()).unwrap();
        let commit = environment().commit;
        let timing = |case_id: &str| TimingRecord {
            schema: SCHEMA,
            case_id: case_id.to_owned(),
            commit: commit.clone(),
            ..TimingRecord::default()
        };
        run.append_timing(&timing("b")).unwrap();
        run.append_timing(&timing("a")).unwrap();
        run.finish(&["a".to_owned(), "b".to_owned()], "shelf").unwrap();
        assert_eq!(read_timings(folder.path()).unwrap(), [timing("a"), timing("b")]);
        let with_threads = |case_id, threads| TimingRecord { threads: Some(threads), ..timing(case_id) };
        for row in [with_threads("b", 8), with_threads("b", 2), with_threads("b", 8)] {
            run.append_timing(&row).unwrap();
        }
        run.finish(&["b".to_owned(), "a".to_owned()], "shelf").unwrap();
        let rows = [timing("b"), with_threads("b", 2), with_threads("b", 8), timing("a")];
        assert_eq!(read_timings(folder.path()).unwrap(), rows, "one row per case and number of threads");
        assert_eq!(read_records(folder.path()).unwrap(), []);
    }

    #[test]
    fn every_row_names_the_process_that_measured_it() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("run");
        let row = |id: &str| ClaimRecord { schema: SCHEMA, id: id.to_owned(), ..ClaimRecord::default() };
        let on = |started: &str, driver: Option<&str>| Environment {
            started: started.to_owned(),
            commit: "abc".to_owned(),
            device_name: "H200".to_owned(),
            driver: driver.map(str::to_owned),
            ..environment()
        };
        let mut files = RecordFolder::open(&path, &on("Monday", Some("13.0")), &[], false).unwrap();
        files.append(&row("first")).unwrap();
        drop(files);
        let mut files = RecordFolder::open(&path, &on("Tuesday", Some("13.0")), &[], true).unwrap();
        files.append(&row("second")).unwrap();
        let rows = files.finish(&["first".to_owned(), "second".to_owned()]).unwrap();
        let origin = |row: &ClaimRecord| format!("{} {} {}", row.commit, row.device_name, row.run_started);
        assert_eq!(rows.iter().map(origin).collect::<Vec<_>>(), ["abc H200 Monday", "abc H200 Tuesday"]);
        let simulated = RowOrigin::of(&on("Monday", None)).stamped(row("third"));
        assert_eq!(origin(&simulated), "abc H200 ", "simulated rows do not depend on the time");
    }

    #[test]
    fn claims_are_kept_and_sorted() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("run");
        let row = |id: &str| ClaimRecord {
            schema: SCHEMA,
            id: id.to_owned(),
            verdict: ClaimVerdict::Depends,
            lesson: "Sometimes.".to_owned(),
            ..ClaimRecord::default()
        };
        let open = |resumes| RecordFolder::<ClaimRecord>::open(&path, &environment(), &[], resumes);
        let mut files = open(false).unwrap();
        files.append(&row("second")).unwrap();
        drop(files);
        assert!(open(false).is_err(), "a run is not overwritten");
        let mut files = open(true).unwrap();
        assert!(files.has("second") && !files.has("first"));
        files.append(&row("first")).unwrap();
        let records = files.finish(&["first".to_owned(), "second".to_owned()]).unwrap();
        assert_eq!(records.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["first", "second"]);
        let csv = fs::read_to_string(path.join("claims.csv")).unwrap();
        assert!(csv.lines().nth(1).unwrap().contains("first") && csv.contains("depends"), "{csv}");
        assert!(fs::read_to_string(path.join("claims.md")).unwrap().contains("**second**: Sometimes."));
    }

    #[test]
    fn failed_techniques_run_again() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("run");
        let row = |technique: &str, status| TechniqueRecord {
            schema: SCHEMA,
            model: "gpt".to_owned(),
            technique: technique.to_owned(),
            title: technique.to_owned(),
            status,
            ..TechniqueRecord::default()
        };
        let mut files = RecordFolder::open(&path, &environment(), &[], false).unwrap();
        files.append(&row("amp", Status::Completed)).unwrap();
        files.append(&row("ckpt", Status::Error)).unwrap();
        drop(files);
        let mut files = RecordFolder::<TechniqueRecord>::open(&path, &environment(), &[], true).unwrap();
        assert!(files.has(&row_id("gpt", "amp")) && !files.has(&row_id("gpt", "ckpt")));
        files.append(&row("base", Status::Completed)).unwrap();
        let records = files.finish(&[row_id("gpt", "base")]).unwrap();
        assert_eq!(records[0].technique, "base");
        assert!(fs::read_to_string(path.join("techniques.md")).unwrap().contains("| amp"));
    }

    thread_local! {
        /// How often a record was asked for its id.
        static ASKED: Cell<usize> = const { Cell::new(0) };
    }

    #[derive(Clone, Debug, Default, Serialize, Deserialize)]
    struct CountedRecord {
        schema: u32,
        name: String,
    }

    impl CsvRow for CountedRecord {
        fn upgraded(self) -> CountedRecord {
            self
        }
    }

    impl FolderRecord for CountedRecord {
        const NAME: &'static str = "counted";

        fn id(&self) -> String {
            ASKED.set(ASKED.get() + 1);
            self.name.clone()
        }

        fn page(_: &[CountedRecord]) -> String {
            String::new()
        }
    }

    /// The work grows with the number of rows, not with its square.
    #[test]
    fn ids_are_looked_up_and_not_searched() {
        const ROWS: usize = 300;
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("run");
        let ids: Vec<String> = (0..ROWS).rev().map(|number| format!("case {number}")).collect();
        let mut files = RecordFolder::<CountedRecord>::open(&path, &environment(), &[], false).unwrap();
        for name in ids.iter().rev() {
            assert!(!files.has(name));
            files.append(&CountedRecord { schema: SCHEMA, name: name.clone() }).unwrap();
            assert!(files.has(name));
        }
        let rows = files.finish(&ids).unwrap();
        assert_eq!(rows.first().unwrap().name, ids[0]);
        assert!(ASKED.get() <= 3 * ROWS, "{} questions for {ROWS} rows", ASKED.get());
    }
}
