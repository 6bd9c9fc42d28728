//! CSV files that grow row by row and survive a crash, and the plan of a shared run.
//!
//! Every row is written at once and ends with a line break, so a cut line can be told from a whole
//! one.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::ReportError;
use crate::measure::SCHEMA;

/// A row of a CSV file. The default value is only used to find the names of the columns.
pub trait CsvRow: Serialize + DeserializeOwned + Default {}

impl<T: Serialize + DeserializeOwned + Default> CsvRow for T {}

/// A CSV file with one header and rows of one type.
#[derive(Debug)]
pub(super) struct RowFile<T> {
    path: PathBuf,
    file: File,
    /// All of its rows.
    pub(super) rows: Vec<T>,
}

impl<T: CsvRow> RowFile<T> {
    /// Writes the file anew, with its header and these rows. A crash leaves the old file or the new
    /// one.
    pub(super) fn write(path: &Path, rows: Vec<T>) -> Result<RowFile<T>, ReportError> {
        save(path, to_csv(&rows)?)?;
        let file = OpenOptions::new().append(true).open(path).map_err(ReportError::io(path))?;
        Ok(RowFile { path: path.to_owned(), file, rows })
    }

    /// Adds a row.
    pub(super) fn append(&mut self, row: T) -> Result<(), ReportError> {
        let line = lines([&row], false)?;
        self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush()).map_err(ReportError::io(&self.path))?;
        self.rows.push(row);
        Ok(())
    }
}

/// The rows of a file. A last line without a line break was cut by a crash and is ignored; a
/// missing file has no rows.
pub(super) fn read<T: CsvRow>(path: &Path) -> Result<Vec<T>, ReportError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(ReportError::io(path))?,
    };
    let whole = whole_rows(&bytes);
    if whole.is_empty() {
        return Ok(Vec::new());
    }
    if !whole.starts_with(header::<T>()?.as_bytes()) {
        return Err(ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA });
    }
    csv::Reader::from_reader(whole)
        .into_deserialize()
        .map(|row| {
            row.map_err(|error| ReportError::Row {
                path: path.to_owned(),
                line: error.position().map_or(0, csv::Position::line),
                reason: error.to_string(),
            })
        })
        .collect()
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

/// The rows of a file that another release may have written. Missing columns get their defaults and
/// unknown ones are ignored. A file of another schema is refused: its columns mean something else.
pub(super) fn read_any_release<T: CsvRow>(path: &Path) -> Result<Vec<T>, ReportError> {
    match read(path) {
        Err(ReportError::OtherColumns { .. }) => {}
        known => return known,
    }
    let other = || ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA };
    let mut reader = csv::Reader::from_path(path).map_err(|_| other())?;
    let place = reader.headers()?.iter().position(|name| name == "schema").ok_or_else(other)?;
    let headers = reader.headers()?.clone();
    let mut rows = Vec::new();
    for record in reader.into_records() {
        let record = record?;
        if record.get(place) != Some(&*SCHEMA.to_string()) {
            return Err(other());
        }
        rows.push(record.deserialize(Some(&headers)).map_err(|_| other())?);
    }
    Ok(rows)
}

/// Header and rows.
pub(super) fn to_csv<T: Serialize + Default>(rows: &[T]) -> Result<String, ReportError> {
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

fn header<T: Serialize + Default>() -> Result<String, ReportError> {
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
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    fs::write(&beside, content).map_err(ReportError::io(path))?;
    fs::rename(&beside, path).map_err(ReportError::io(path))
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
        if path.is_file() { read(&path).map(Some) } else { Ok(None) }
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
