//! A CSV file that grows row by row and survives a crash: every row is one line, written at once.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

use super::ReportError;
use crate::measure::SCHEMA;

/// A row type: its default value is only used to find out the names of its columns.
pub(super) trait Row: Serialize + DeserializeOwned + Default {}

impl<T: Serialize + DeserializeOwned + Default> Row for T {}

/// A CSV file with one header and rows of one type.
#[derive(Debug)]
pub(super) struct RowFile<T> {
    path: PathBuf,
    file: File,
    row: PhantomData<fn(T)>,
}

impl<T: Row> RowFile<T> {
    /// Makes the file anew, with its header and these rows. A crash leaves the old file or the new one, never half of
    /// either.
    pub(super) fn write(path: &Path, rows: &[T]) -> Result<RowFile<T>, ReportError> {
        replace(path, &to_csv(rows)?)?;
        let file = OpenOptions::new().append(true).open(path).map_err(ReportError::io(path))?;
        Ok(RowFile { path: path.to_owned(), file, row: PhantomData })
    }

    /// Adds a row.
    pub(super) fn append(&mut self, row: &T) -> Result<(), ReportError> {
        let line = lines(std::slice::from_ref(row), false)?;
        self.file.write_all(&line).and_then(|()| self.file.flush()).map_err(ReportError::io(&self.path))
    }
}

/// The rows of a file. A last line without its end was cut short by a crash and is left out; a missing file has no rows.
pub(super) fn read<T: Row>(path: &Path) -> Result<Vec<T>, ReportError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(ReportError::io(path))?,
    };
    let whole = whole_rows(&bytes);
    if whole.is_empty() {
        return Ok(Vec::new());
    }
    if !whole.starts_with(&header::<T>()?) {
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

/// Without what follows the end of the last row: an end of line inside of quotes belongs to a text, such as the words of an
/// error that take several lines.
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

/// The rows of a file that another release may have written: columns that it did not know are left at their defaults, and
/// those that are not known here are left out. Another schema gives them another meaning and is refused.
pub(super) fn read_any_release<T: Row>(path: &Path) -> Result<Vec<T>, ReportError> {
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

/// Writes a text to a file, whole or not at all.
pub fn save(path: &Path, text: &str) -> Result<(), ReportError> {
    replace(path, text.as_bytes())
}

/// Header and rows as text.
pub(super) fn to_csv<T: Row>(rows: &[T]) -> Result<Vec<u8>, ReportError> {
    let mut text = header::<T>()?;
    text.extend(lines(rows, false)?);
    Ok(text)
}

/// Writes a file beside its place and moves it there: readers see the old one or the new one.
pub(super) fn replace(path: &Path, content: &[u8]) -> Result<(), ReportError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    fs::write(&beside, content).map_err(ReportError::io(path))?;
    fs::rename(&beside, path).map_err(ReportError::io(path))
}

fn header<T: Row>() -> Result<Vec<u8>, ReportError> {
    let mut text = lines(&[T::default()], true)?;
    text.truncate(text.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1));
    Ok(text)
}

fn lines<T: Serialize>(rows: &[T], has_headers: bool) -> Result<Vec<u8>, ReportError> {
    let mut writer = csv::WriterBuilder::new().has_headers(has_headers).from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    writer.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    struct Told {
        case: String,
        reason: String,
    }

    #[test]
    fn a_row_whose_text_has_several_lines_is_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("told.csv");
        let told = |case: &str| Told { case: case.to_owned(), reason: "left: \"1\"\nright: 2\n".to_owned() };
        let both = [told("a"), told("b")];
        RowFile::write(&path, &both).unwrap();
        let whole = fs::read(&path).unwrap();
        let first_ends = to_csv(&both[..1]).unwrap().len();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let kept = usize::from(cut >= first_ends) + usize::from(cut == whole.len());
            assert_eq!(read::<Told>(&path).unwrap(), both[..kept], "cut at {cut}");
        }
    }
}
