//! CSV files that grow row by row and survive a crash, and the plan of a shared run.
//!
//! Every row is written at once and ends with a line break, so a cut line can be told from a whole
//! one.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::ReportError;
use crate::{
    answer::{claims::ClaimRecord, techniques::TechniqueRecord, threshold::ThresholdRecord},
    base::write_file,
    measure::{CaseRecord, SCHEMA, TimingRecord},
};

/// A row of a CSV file. The default value is only used to find the names of the columns.
///
/// Old names of columns are accepted (`serde(alias)`), and [`upgraded`](CsvRow::upgraded) corrects what a new name does
/// not: units, and values that were 0 where they are now unknown.
pub trait CsvRow: Serialize + DeserializeOwned + Default {
    /// A row that was read from a file of schema 1, as one of [`SCHEMA`].
    #[must_use]
    fn upgraded(self) -> Self;
}

impl CsvRow for CaseRecord {
    fn upgraded(self) -> CaseRecord {
        CaseRecord::upgraded(self)
    }
}

impl CsvRow for TimingRecord {
    fn upgraded(self) -> TimingRecord {
        TimingRecord { schema: SCHEMA, ..self }
    }
}

impl CsvRow for ThresholdRecord {
    fn upgraded(self) -> ThresholdRecord {
        ThresholdRecord { schema: SCHEMA, ..self }
    }
}

impl CsvRow for TechniqueRecord {
    fn upgraded(self) -> TechniqueRecord {
        TechniqueRecord::upgraded(self)
    }
}

impl CsvRow for ClaimRecord {
    fn upgraded(self) -> ClaimRecord {
        ClaimRecord { schema: SCHEMA, ..self }
    }
}

/// The oldest schema that can be read.
pub(super) const OLDEST_SCHEMA: u32 = 1;

/// Rows are put on the disk about this often: every time would take longer than a short case.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// A CSV file with one header and rows of one type.
#[derive(Debug)]
pub(super) struct RowFile<T> {
    path: PathBuf,
    file: File,
    /// When the rows were last put on the disk.
    synced: Instant,
    /// All of its rows.
    pub(super) rows: Vec<T>,
}

impl<T: CsvRow> RowFile<T> {
    /// Writes the file anew, with its header and these rows. A crash leaves the old file or the new
    /// one.
    pub(super) fn write(path: &Path, rows: Vec<T>) -> Result<RowFile<T>, ReportError> {
        save(path, to_csv(&rows)?)?;
        let file = OpenOptions::new().append(true).open(path).map_err(ReportError::io(path))?;
        Ok(RowFile { path: path.to_owned(), file, synced: Instant::now(), rows })
    }

    /// Adds a row.
    pub(super) fn append(&mut self, row: T) -> Result<(), ReportError> {
        let line = lines([&row], false)?;
        self.file.write_all(line.as_bytes()).and_then(|()| self.sync_rarely()).map_err(ReportError::io(&self.path))?;
        self.rows.push(row);
        Ok(())
    }

    /// Puts the rows on the disk, so that a power cut loses those of about one second.
    fn sync_rarely(&mut self) -> io::Result<()> {
        if self.synced.elapsed() >= SYNC_INTERVAL {
            self.file.sync_data()?;
            self.synced = Instant::now();
        }
        Ok(())
    }
}

/// The rows of a file with the columns of [`SCHEMA`]. A last line without a line break was cut by a crash and is ignored;
/// a missing file has no rows.
pub(super) fn read<T: CsvRow>(path: &Path) -> Result<Vec<T>, ReportError> {
    let bytes = contents(path)?;
    let whole = whole_rows(&bytes);
    if !whole.is_empty() && !whole.starts_with(header::<T>()?.as_bytes()) {
        return Err(ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA });
    }
    deserialized(path, whole)
}

/// The rows of a file that another release may have written. Missing columns get their defaults and unknown ones are
/// ignored. Rows of older schemas are converted; a newer schema is refused, because its columns may mean something else.
pub(super) fn read_any_release<T: CsvRow>(path: &Path) -> Result<Vec<T>, ReportError> {
    let bytes = contents(path)?;
    let whole = whole_rows(&bytes);
    let other = || ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA };
    if whole.is_empty() {
        return Ok(Vec::new());
    }
    let mut reader = csv::Reader::from_reader(whole);
    let place = reader.headers()?.iter().position(|name| name == "schema").ok_or_else(other)?;
    let headers = reader.headers()?.clone();
    let mut rows = Vec::new();
    for record in reader.into_records() {
        let record = record?;
        let schema = record.get(place).and_then(|schema| schema.parse().ok()).ok_or_else(other)?;
        check_schema(path, schema)?;
        let row: T = record.deserialize(Some(&headers)).map_err(|error| row_error(path, &error))?;
        rows.push(if schema < SCHEMA { row.upgraded() } else { row });
    }
    Ok(rows)
}

/// Fails if files of this schema cannot be read.
pub(super) fn check_schema(path: &Path, schema: u32) -> Result<(), ReportError> {
    if (OLDEST_SCHEMA..=SCHEMA).contains(&schema) {
        return Ok(());
    }
    Err(ReportError::UnknownSchema { path: path.to_owned(), there: schema, here: SCHEMA })
}

fn contents(path: &Path) -> Result<Vec<u8>, ReportError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(ReportError::io(path)),
    }
}

fn deserialized<T: DeserializeOwned>(path: &Path, whole: &[u8]) -> Result<Vec<T>, ReportError> {
    csv::Reader::from_reader(whole).into_deserialize().map(|row| row.map_err(|error| row_error(path, &error))).collect()
}

fn row_error(path: &Path, error: &csv::Error) -> ReportError {
    let line = error.position().map_or(0, csv::Position::line);
    ReportError::Row { path: path.to_owned(), line, reason: error.to_string() }
}

/// The bytes up to the end of the last whole row. A line break in quotes belongs to a text, such as
/// an error message of several lines.
fn whole_rows(bytes: &[u8]) -> &[u8] {
    let (mut in_quotes, mut end) = (false, 0);
    for (place, byte) in bytes.iter().enumerate() {
        match byte {
            b'"' => in_quotes = !in_quotes,
            b'\n' if !in_quotes => end = place + 1,
            _ => {}
        }
    }
    &bytes[..end]
}

/// Header and rows.
pub fn to_csv<T: Serialize + Default>(rows: &[T]) -> Result<String, ReportError> {
    Ok(header::<T>()? + &lines(rows, false)?)
}

/// Header and rows, with columns before those of the row type.
pub(super) fn to_csv_with<'a, P: Serialize, T: Serialize + Default + 'a>(
    columns: &[&str],
    rows: impl Iterator<Item = (P, &'a T)>,
) -> Result<String, ReportError> {
    let header = format!("{},{}", columns.join(","), header::<T>()?);
    Ok(header + &lines(rows, false)?)
}

pub(super) fn header<T: Serialize + Default>() -> Result<String, ReportError> {
    let mut text = lines([T::default()], true)?;
    text.truncate(text.find('\n').map_or(0, |end| end + 1));
    Ok(text)
}

/// Rows, and their header if wanted and if each row is one struct.
pub(super) fn lines(rows: impl IntoIterator<Item = impl Serialize>, has_headers: bool) -> Result<String, ReportError> {
    let mut writer = csv::WriterBuilder::new().has_headers(has_headers).from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    written(writer)
}

/// What a CSV writer wrote.
pub(super) fn written(writer: csv::Writer<Vec<u8>>) -> Result<String, ReportError> {
    let bytes = writer.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes a file, whole or not at all: readers see the old file or the new one.
pub fn save(path: &Path, content: impl AsRef<[u8]>) -> Result<(), ReportError> {
    write_file(path, content.as_ref()).map_err(ReportError::io(path))
}

/// A row of `plan.csv`, which lists every case of a shared run, in order, and the shard that runs
/// it. The folder of every shard has the whole plan, so that merging needs no suite and no rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedCase {
    /// The case.
    pub case_id: String,
    /// The shard that runs it, from 1.
    pub shard: u32,
}

impl PlannedCase {
    /// Fails if a folder has another plan; a folder without one is accepted.
    pub fn check(folder: &Path, plan: &[PlannedCase]) -> Result<(), ReportError> {
        match PlannedCase::read(folder)? {
            Some(there) if there != plan => Err(ReportError::OtherPlan { path: folder.to_owned() }),
            _ => Ok(()),
        }
    }

    /// Writes the plan into a folder.
    pub fn write(folder: &Path, plan: &[PlannedCase]) -> Result<(), ReportError> {
        save(&folder.join("plan.csv"), &to_csv(plan)?)
    }

    /// The plan of a folder, if it has one.
    pub(super) fn read(folder: &Path) -> Result<Option<Vec<PlannedCase>>, ReportError> {
        let path = folder.join("plan.csv");
        if !path.is_file() {
            return Ok(None);
        }
        let bytes = contents(&path)?;
        deserialized(&path, whole_rows(&bytes)).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    struct CaseReason {
        case: String,
        reason: String,
    }

    impl CsvRow for CaseReason {
        fn upgraded(self) -> CaseReason {
            self
        }
    }

    #[test]
    fn rows_with_several_lines_are_whole_or_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reasons.csv");
        let row = |case: &str| CaseReason { case: case.to_owned(), reason: "left: \"1\"\nright: 2\n".to_owned() };
        let both = [row("a"), row("b")];
        RowFile::write(&path, both.to_vec()).unwrap();
        let whole = fs::read(&path).unwrap();
        let first_ends = to_csv(&both[..1]).unwrap().len();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let kept = usize::from(cut >= first_ends) + usize::from(cut == whole.len());
            assert_eq!(read::<CaseReason>(&path).unwrap(), both[..kept], "cut at {cut}");
        }
    }

    #[test]
    fn another_plan_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case_id: &str, shard| PlannedCase { case_id: case_id.to_owned(), shard };
        let plan = [case("a,\"b\"\nc", 1), case("d", 2)];
        PlannedCase::check(folder.path(), &plan).unwrap();
        PlannedCase::write(folder.path(), &plan).unwrap();
        PlannedCase::check(folder.path(), &plan).unwrap();
        assert_eq!(PlannedCase::read(folder.path()).unwrap().unwrap(), plan);
        assert!(matches!(PlannedCase::check(folder.path(), &plan[..1]), Err(ReportError::OtherPlan { .. })));
    }
}
