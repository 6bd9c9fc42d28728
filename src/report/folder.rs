//! The folders that runs write: cases ([`RunFolder`]), claims and techniques ([`RecordFolder`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};

use super::{
    Environment, EnvironmentDifference, ReportError, cases,
    rows::{self, CsvRow, RowFile},
    scenario,
};
use crate::measure::{CaseDetail, CaseRecord, SCHEMA, TimingRecord, file_stem};

/// A run's folder: `env.json`, `runs.csv`, `timings.csv`, `cases/`, and after [`finish`](RunFolder::finish)
/// `comparison.csv` and `summary.md`.
///
/// Cases may be added from several threads, in any order. Every row is on disk before the next case
/// begins on that thread, and `finish` sorts them in the suite's order.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    environment: Environment,
    content: Mutex<RunRows>,
}

#[derive(Debug)]
struct RunRows {
    runs: RowFile<CaseRecord>,
    /// Created with the first row: most runs have no wall-clock times.
    timings: Option<RowFile<TimingRecord>>,
}

/// Creates a folder with its `env.json`. A folder that already holds a run is refused.
pub(super) fn begin(path: &Path, environment: &Environment) -> Result<(), ReportError> {
    let env_path = path.join("env.json");
    if env_path.exists() || path.join("runs.csv").exists() {
        return Err(ReportError::Occupied { path: path.to_owned() });
    }
    if path.is_file() {
        return Err(ReportError::NotAFolder { path: path.to_owned() });
    }
    fs::create_dir_all(path).map_err(ReportError::io(path))?;
    let mut json = serde_json::to_vec_pretty(environment).map_err(ReportError::json(&env_path))?;
    json.push(b'\n');
    rows::save(&env_path, &json)
}

/// The environment of a folder, if its rows may be mixed with rows of `environment`.
pub(super) fn check_environment(path: &Path, environment: &Environment) -> Result<Environment, ReportError> {
    let there = read_environment(path)?;
    refuse_old_schema(path, &there, "cannot be resumed")?;
    match environment.conflict(&there) {
        Some(EnvironmentDifference { what, here, there }) => {
            Err(ReportError::OtherEnvironment { path: path.to_owned(), what, here, there })
        }
        None => Ok(there),
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
    /// Creates a folder for a new run. A folder that already holds a run is refused.
    pub fn create(path: &Path, environment: &Environment) -> Result<RunFolder, ReportError> {
        begin(path, environment)?;
        fs::create_dir_all(path.join("cases")).map_err(ReportError::io(path))?;
        RunFolder::with_rows(path, environment, Vec::new(), Vec::new())
    }

    /// Continues an interrupted run of the cases `case_ids`. Half-written rows, and rows of cases
    /// that must run again (failed, or with unreadable files), are dropped. A run with another
    /// environment or other cases is refused and left unchanged: its rows would not be comparable.
    pub fn resume(path: &Path, environment: &Environment, case_ids: &[String]) -> Result<RunFolder, ReportError> {
        let there = check_environment(path, environment)?;
        let mut records: Vec<CaseRecord> = rows::read(&path.join("runs.csv"))?;
        let timings: Vec<TimingRecord> = rows::read(&path.join("timings.csv"))?;
        let known: BTreeSet<&String> = case_ids.iter().collect();
        let held = records.iter().map(|row| &row.case_id).chain(timings.iter().map(|row| &row.case_id));
        if let Some(other) = held.into_iter().find(|case_id| !known.contains(case_id)) {
            return Err(ReportError::OtherCases { path: path.to_owned(), case_id: other.clone() });
        }
        records.retain(|record| record.status.is_final() && !is_damaged(path, &record.case_id));
        fs::create_dir_all(path.join("cases")).map_err(ReportError::io(path))?;
        RunFolder::with_rows(path, &there, records, timings)
    }

    /// A folder with exactly these rows.
    pub(super) fn with_rows(
        path: &Path,
        environment: &Environment,
        records: Vec<CaseRecord>,
        timings: Vec<TimingRecord>,
    ) -> Result<RunFolder, ReportError> {
        let runs = RowFile::write(&path.join("runs.csv"), records)?;
        let timings = Some(timings).filter(|timings| !timings.is_empty());
        let timings = timings.map(|timings| RowFile::write(&path.join("timings.csv"), timings)).transpose()?;
        let content = Mutex::new(RunRows { runs, timings });
        Ok(RunFolder { path: path.to_owned(), environment: environment.clone(), content })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
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
        self.content().runs.append(record.clone())
    }

    /// Adds the times of a case.
    pub fn append_timing(&self, record: &TimingRecord) -> Result<(), ReportError> {
        let mut content = self.content();
        match &mut content.timings {
            Some(timings) => timings.append(record.clone())?,
            None => content.timings = Some(RowFile::write(&self.path.join("timings.csv"), vec![record.clone()])?),
        }
        Ok(())
    }

    /// Sorts the rows by `case_ids` (rows of other cases follow, by id), writes `comparison.csv`
    /// with ratios to the strategy `base`, and `summary.md`. Returns the sorted rows.
    pub fn finish(&self, case_ids: &[String], base: &str) -> Result<Vec<CaseRecord>, ReportError> {
        let mut content = self.content();
        let records = in_order(&content.runs.rows, case_ids, |record| (&record.case_id, 0));
        content.runs = RowFile::write(&self.path.join("runs.csv"), records.clone())?;
        if let Some(timings) = &content.timings {
            let timings = in_order(&timings.rows, case_ids, |record| (&record.case_id, record.threads.unwrap_or(0)));
            content.timings = Some(RowFile::write(&self.path.join("timings.csv"), timings)?);
        }
        rows::save(&self.path.join("comparison.csv"), &scenario::comparison_csv(&records, base)?)?;
        rows::save(&self.path.join("summary.md"), cases::summary(&self.environment, &records))?;
        Ok(records)
    }

    /// A poisoned lock is safe to use: it is held for whole rows only.
    fn content(&self) -> MutexGuard<'_, RunRows> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A record that has a folder of its own: `env.json`, `NAME.csv` and `NAME.md`.
pub trait FolderRecord: CsvRow + Clone {
    /// The name of its files.
    const NAME: &'static str;

    /// Which row it is.
    fn id(&self) -> String;

    /// Whether it need not be measured again.
    fn is_final(&self) -> bool {
        true
    }

    /// The Markdown page.
    fn page(records: &[Self]) -> String;
}

/// A folder of records: every row is on disk before the next one is measured.
#[derive(Debug)]
pub struct RecordFolder<T> {
    path: PathBuf,
    table: RowFile<T>,
}

impl<T: FolderRecord> RecordFolder<T> {
    /// A new folder, or the rest of an interrupted one. A folder that already holds a run cannot be
    /// created; a run with another environment cannot be resumed.
    pub fn open(path: &Path, environment: &Environment, resumes: bool) -> Result<RecordFolder<T>, ReportError> {
        if !resumes {
            begin(path, environment)?;
            return RecordFolder::with(path, Vec::new());
        }
        check_environment(path, environment)?;
        let mut records: Vec<T> = RecordFolder::read(path)?;
        records.retain(T::is_final);
        RecordFolder::with(path, records)
    }

    /// The folder, with exactly these rows.
    pub(super) fn with(path: &Path, records: Vec<T>) -> Result<RecordFolder<T>, ReportError> {
        Ok(RecordFolder { path: path.to_owned(), table: RowFile::write(&Self::csv(path), records)? })
    }

    /// The rows of a folder.
    pub(super) fn read(path: &Path) -> Result<Vec<T>, ReportError> {
        rows::read_any_release(&Self::csv(path))
    }

    pub(super) fn csv(path: &Path) -> PathBuf {
        path.join(T::NAME).with_extension("csv")
    }

    /// The rows so far.
    #[must_use]
    pub fn rows(&self) -> &[T] {
        &self.table.rows
    }

    /// Whether the row is there.
    pub fn has(&self, id: &str) -> bool {
        self.table.rows.iter().any(|record| record.id() == id)
    }

    /// Adds a row.
    pub fn append(&mut self, record: &T) -> Result<(), ReportError> {
        self.table.append(record.clone())
    }

    /// Sorts the rows by `ids`, writes the page, and returns the rows.
    pub fn finish(self, ids: &[String]) -> Result<Vec<T>, ReportError> {
        let mut records = self.table.rows;
        records.sort_by_key(|record| ids.iter().position(|id| *id == record.id()).unwrap_or(ids.len()));
        rows::save(&Self::csv(&self.path), rows::to_csv(&records)?)?;
        rows::save(&self.path.join(T::NAME).with_extension("md"), T::page(&records))?;
        Ok(records)
    }
}

/// Copies the files needed for comparisons to `place`, replacing the run there. The copy is
/// complete before it gets its name.
pub fn copy_run(folder: &Path, place: &Path) -> Result<(), ReportError> {
    let mut beside = place.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    for stale in [&beside, &place.to_owned()] {
        if stale.exists() && read_environment(stale).is_err() {
            return Err(ReportError::NoRun { path: stale.clone() });
        }
    }
    let replaced = |path: &Path| match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ReportError::io(path)(error)),
        _ => Ok(()),
    };
    replaced(&beside)?;
    fs::create_dir_all(&beside).map_err(ReportError::io(&beside))?;
    for name in ["env.json", "runs.csv", "timings.csv", "summary.md"] {
        let from = folder.join(name);
        if from.is_file() {
            fs::copy(&from, beside.join(name)).map_err(ReportError::io(&from))?;
        }
    }
    replaced(place)?;
    fs::rename(&beside, place).map_err(ReportError::io(place))
}

/// The rows of a run, finished or not, in file order. Rows of an older schema are converted.
pub fn read_records(folder: &Path) -> Result<Vec<CaseRecord>, ReportError> {
    rows::read_any_release(&folder.join("runs.csv"))
}

/// The wall-clock rows of a run. Rows of an older schema are converted.
pub fn read_timings(folder: &Path) -> Result<Vec<TimingRecord>, ReportError> {
    rows::read_any_release(&folder.join("timings.csv"))
}

/// The environment of a run. A schema that cannot be read is refused.
pub fn read_environment(folder: &Path) -> Result<Environment, ReportError> {
    let path = folder.join("env.json");
    if !path.is_file() {
        let path = folder.to_owned();
        return Err(match () {
            () if folder.is_dir() => ReportError::NoRun { path },
            () if folder.exists() => ReportError::NotAFolder { path },
            () => ReportError::NoFolder { path },
        });
    }
    let text = fs::read(&path).map_err(ReportError::io(&path))?;
    let environment: Environment = serde_json::from_slice(&text).map_err(ReportError::json(&path))?;
    rows::check_schema(folder, environment.schema)?;
    Ok(environment)
}

/// Whether a case has a detail file; published folders have none.
pub(super) fn has_detail(folder: &Path, case_id: &str) -> bool {
    detail_path(folder, case_id).is_file()
}

/// Whether the detail file of a case is missing or unreadable. Published folders have no such files
/// and are not damaged.
pub(super) fn is_damaged(folder: &Path, case_id: &str) -> bool {
    let read = |file| io::copy(&mut GzDecoder::new(io::BufReader::new(file)), &mut io::sink());
    folder.join("cases").is_dir() && fs::File::open(detail_path(folder, case_id)).and_then(read).is_err()
}

/// The path of the detail file of a case.
pub(super) fn detail_path(folder: &Path, case_id: &str) -> PathBuf {
    folder.join("cases").join(format!("{}.json.gz", file_stem(case_id)))
}

/// The detail of a case.
pub fn read_detail(folder: &Path, case_id: &str) -> Result<CaseDetail, ReportError> {
    let path = detail_path(folder, case_id);
    let file = fs::File::open(&path).map_err(ReportError::io(&path))?;
    let text = io::BufReader::new(GzDecoder::new(file));
    serde_json::from_reader(text).map_err(ReportError::json(&path))
}

/// The gzip header has no time stamp, so that the same case gives the same bytes.
fn compressed(detail: &CaseDetail, path: &Path) -> Result<Vec<u8>, ReportError> {
    // In one write: the encoder clears the rest of its buffer at every write, and serde_json writes
    // word by word.
    let mut json = serde_json::to_vec(detail).map_err(ReportError::json(path))?;
    json.push(b'\n');
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&json).and_then(|()| encoder.finish()).map_err(ReportError::io(path))
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

#[cfg(test)]
mod tests {
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

    fn write_run(folder: &Path, workloads: &[&str]) {
        let run = RunFolder::create(folder, &environment()).unwrap();
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
        assert_eq!(written.len(), 4 + 3, "env.json, runs.csv, comparison.csv, summary.md and three cases: {written:?}");
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
    }

    #[test]
    fn rows_are_on_disk_before_the_run_ends() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment()).unwrap();
        assert_eq!(read_records(folder.path()).unwrap(), []);
        let (record, detail) = case("a");
        run.append(&record, &detail).unwrap();
        assert_eq!(read_records(folder.path()).unwrap(), std::slice::from_ref(&record));
        assert_eq!(read_detail(folder.path(), &record.case_id).unwrap(), detail);
        assert_eq!(read_environment(folder.path()).unwrap(), environment());
    }

    #[test]
    fn cut_line_is_dropped() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment()).unwrap();
        for workload in ["a", "b"] {
            let (record, detail) = case(workload);
            run.append(&record, &detail).unwrap();
        }
        let runs = folder.path().join("runs.csv");
        let whole = fs::read(&runs).unwrap();
        let ends: Vec<usize> = (1..=whole.len()).filter(|&end| whole[end - 1] == b'\n').collect();
        let cuts = (0..whole.len()).step_by(97).chain(ends.iter().flat_map(|end| [end - 1, *end]));
        for cut in cuts {
            fs::write(&runs, &whole[..cut]).unwrap();
            let resumed = RunFolder::resume(folder.path(), &environment(), &all_cases()).unwrap();
            let complete = ends.iter().filter(|&&end| end <= cut).count().saturating_sub(1);
            assert_eq!(resumed.completed_cases().len(), complete, "cut at {cut}");
            assert_eq!(fs::read(&runs).unwrap(), whole[..ends[complete]], "cut at {cut}");
        }
    }

    #[test]
    fn resumed_run_equals_uninterrupted_run() {
        let (straight, resumed) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write_run(straight.path(), &["a", "b", "c"]);
        let run = RunFolder::create(resumed.path(), &environment()).unwrap();
        let (record, detail) = case("b");
        run.append(&record, &detail).unwrap();
        let broken = CaseRecord { status: Status::Error, ..case("c").0 };
        run.append(&broken, &CaseDetail { case_id: broken.case_id.clone(), ..CaseDetail::default() }).unwrap();
        drop(run);

        let run = RunFolder::resume(resumed.path(), &environment(), &all_cases()).unwrap();
        assert_eq!(run.completed_cases(), BTreeSet::from([record.case_id]), "a broken case runs again");
        for workload in ["c", "a"] {
            let (record, detail) = case(workload);
            run.append(&record, &detail).unwrap();
        }
        run.finish(&all_cases(), "shelf").unwrap();
        assert_eq!(files(straight.path()), files(resumed.path()));
    }

    #[test]
    fn other_environment_is_refused() {
        let folder = TempDir::new().unwrap();
        assert!(matches!(
            RunFolder::resume(folder.path(), &environment(), &all_cases()),
            Err(ReportError::NoRun { .. })
        ));
        RunFolder::create(folder.path(), &environment()).unwrap();
        assert!(matches!(RunFolder::create(folder.path(), &environment()), Err(ReportError::Occupied { .. })));
        let elsewhere = Environment { device: "cuda:0".to_owned(), ..environment() };
        let refusal = RunFolder::resume(folder.path(), &elsewhere, &all_cases()).unwrap_err().to_string();
        assert!(refusal.ends_with("its device is 'sim', this run's is 'cuda:0'"), "{refusal}");
        fs::write(folder.path().join("runs.csv"), "old,columns\n1,2\n").unwrap();
        let refusal = RunFolder::resume(folder.path(), &environment(), &all_cases());
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
        let refusal = RunFolder::resume(folder.path(), &environment(), &all_cases()).unwrap_err();
        assert!(matches!(refusal, ReportError::Row { line: 3, .. }), "{refusal}");
    }

    #[test]
    fn timings_have_their_own_file() {
        let folder = TempDir::new().unwrap();
        let run = RunFolder::create(folder.path(), &environment()).unwrap();
        let timing =
            |case_id: &str| TimingRecord { schema: SCHEMA, case_id: case_id.to_owned(), ..TimingRecord::default() };
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
        let open = |resumes| RecordFolder::<ClaimRecord>::open(&path, &environment(), resumes);
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
        let mut files = RecordFolder::open(&path, &environment(), false).unwrap();
        files.append(&row("amp", Status::Completed)).unwrap();
        files.append(&row("ckpt", Status::Error)).unwrap();
        drop(files);
        let mut files = RecordFolder::<TechniqueRecord>::open(&path, &environment(), true).unwrap();
        assert!(files.has(&row_id("gpt", "amp")) && !files.has(&row_id("gpt", "ckpt")));
        files.append(&row("base", Status::Completed)).unwrap();
        let records = files.finish(&[row_id("gpt", "base")]).unwrap();
        assert_eq!(records[0].technique, "base");
        assert!(fs::read_to_string(path.join("techniques.md")).unwrap().contains("| amp"));
    }
}
