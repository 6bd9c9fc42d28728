//! CSV files that grow row by row and survive a crash.
//!
//! Every row is written at once and ends with a line break, so a cut line can be told from a whole
//! one. Its last cell is a checksum, so a changed or damaged row is noticed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use csv::StringRecord;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Environment, ReportError,
    checksum::{self, ROW_CHECKSUM},
};
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

    /// The cells for commit, name of the device and start of the process, where the row has them.
    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        None
    }
}

/// What the rows of one process have in common. Rows of several processes can be in one file, so each has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RowOrigin {
    commit: String,
    device_name: String,
    run_started: String,
}

impl RowOrigin {
    /// The origin of the rows that a process with this environment measures. A device without a driver is simulated: its
    /// rows do not depend on the time, and have none.
    pub(super) fn of(environment: &Environment) -> RowOrigin {
        let Environment { commit, device_name, started, driver, .. } = environment;
        let run_started = driver.as_ref().map_or_else(String::new, |_| started.clone());
        RowOrigin { commit: commit.clone(), device_name: device_name.clone(), run_started }
    }

    /// The row with this origin.
    pub(super) fn stamped<T: CsvRow>(&self, mut row: T) -> T {
        if let Some(cells) = row.origin_cells() {
            for (cell, value) in cells.into_iter().zip([&self.commit, &self.device_name, &self.run_started]) {
                cell.clone_from(value);
            }
        }
        row
    }
}

impl CsvRow for CaseRecord {
    fn upgraded(self) -> CaseRecord {
        CaseRecord::upgraded(self)
    }

    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        Some([&mut self.commit, &mut self.device_name, &mut self.run_started])
    }
}

impl CsvRow for TimingRecord {
    fn upgraded(self) -> TimingRecord {
        TimingRecord { schema: SCHEMA, ..self }
    }

    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        Some([&mut self.commit, &mut self.device_name, &mut self.run_started])
    }
}

impl CsvRow for ThresholdRecord {
    fn upgraded(self) -> ThresholdRecord {
        ThresholdRecord { schema: SCHEMA, ..self }
    }

    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        Some([&mut self.commit, &mut self.device_name, &mut self.run_started])
    }
}

impl CsvRow for TechniqueRecord {
    fn upgraded(self) -> TechniqueRecord {
        TechniqueRecord::upgraded(self)
    }

    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        Some([&mut self.commit, &mut self.device_name, &mut self.run_started])
    }
}

impl CsvRow for ClaimRecord {
    fn upgraded(self) -> ClaimRecord {
        ClaimRecord { schema: SCHEMA, ..self }
    }

    fn origin_cells(&mut self) -> Option<[&mut String; 3]> {
        Some([&mut self.commit, &mut self.device_name, &mut self.run_started])
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
        save(path, to_checked_csv(&rows)?)?;
        let file = OpenOptions::new().append(true).open(path).map_err(ReportError::io(path))?;
        Ok(RowFile { path: path.to_owned(), file, synced: Instant::now(), rows })
    }

    /// Adds a row.
    pub(super) fn append(&mut self, row: T) -> Result<(), ReportError> {
        let line = checked_line(&header::<T>()?, &row)?;
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

/// The rows of a file, and whether its last line was cut.
#[derive(Debug)]
pub(super) struct ReadRows<T> {
    pub(super) rows: Vec<T>,
    /// Whether the last line has no line break, or the file has no header: a crash cut it. Such a line is left out.
    pub(super) is_cut: bool,
}

/// The rows of a file with the columns of [`SCHEMA`], without a line that a crash cut; a missing file has no rows.
pub(super) fn read<T: CsvRow>(path: &Path) -> Result<Vec<T>, ReportError> {
    let Some(CsvTable { columns, records, .. }) = CsvTable::read(path)? else { return Ok(Vec::new()) };
    let is_current = columns.is_empty() || has_columns_of::<T>(&columns)?;
    if !is_current {
        return Err(ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA });
    }
    records.iter().map(|record| deserialized(path, record, &columns)).collect()
}

/// The rows of a file that another release may have written. Missing columns get their defaults and unknown ones are
/// ignored. Rows of older schemas are converted; a newer schema is refused, because its columns may mean something else.
pub(super) fn read_any_release<T: CsvRow>(path: &Path) -> Result<ReadRows<T>, ReportError> {
    let Some(CsvTable { columns, records, is_cut }) = CsvTable::read(path)? else {
        return Ok(ReadRows { rows: Vec::new(), is_cut: false });
    };
    let other = || ReportError::OtherColumns { path: path.to_owned(), schema: SCHEMA };
    let place = columns.iter().position(|name| name == "schema");
    if place.is_none() && !columns.is_empty() {
        return Err(other());
    }
    let mut rows = Vec::new();
    for record in records {
        let schema = place.and_then(|place| record.get(place)?.parse().ok()).ok_or_else(other)?;
        check_schema(path, schema)?;
        let row: T = deserialized(path, &record, &columns)?;
        rows.push(if schema < SCHEMA { row.upgraded() } else { row });
    }
    Ok(ReadRows { rows, is_cut })
}

/// The records of a CSV file whose rows are unchanged.
pub(super) struct CsvTable {
    /// Empty where the header itself was cut.
    pub(super) columns: StringRecord,
    pub(super) records: Vec<StringRecord>,
    /// Whether the last line, or the header, was cut.
    pub(super) is_cut: bool,
}

impl CsvTable {
    /// Reads a file; `None` if it does not exist. Rows with a checksum must match it. In a file without checksums, a quote
    /// that joins rows is an error.
    pub(super) fn read(path: &Path) -> Result<Option<CsvTable>, ReportError> {
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(ReportError::io(path))?,
        };
        let extent = extent_of_rows(&bytes);
        let refused = |line, reason: &str| ReportError::Row { path: path.to_owned(), line, reason: reason.to_owned() };
        if let Some(line) = extent.stray_quote {
            return Err(refused(line, STRAY_QUOTE));
        }
        let (whole, rest) = bytes.split_at(extent.end);
        let mut reader = csv::Reader::from_reader(whole);
        let columns = reader.headers().map_err(|error| row_error(path, &error, 1))?.clone();
        let checksum = columns.iter().position(|name| name == ROW_CHECKSUM);
        let mut records = Vec::new();
        for record in reader.into_records() {
            let record = record.map_err(|error| row_error(path, &error, 0))?;
            let line = record.position().map_or(0, csv::Position::line);
            match checksum {
                Some(place) if !has_checksum(&columns, &record, place) => {
                    return Err(ReportError::ChangedRow { path: path.to_owned(), line });
                }
                None if record.iter().any(|cell| is_several_rows(cell, columns.len())) => {
                    return Err(refused(line, STRAY_QUOTE));
                }
                _ => records.push(record),
            }
        }
        // A cut row cannot contain a whole one.
        let lines = rest.split_inclusive(|&byte| byte == b'\n').skip(1).filter_map(lone_record);
        for line in lines.filter(|line| line.len() == columns.len()) {
            if checksum.is_none_or(|place| has_checksum(&columns, &line, place)) {
                return Err(refused(extent.lines + 1, STRAY_QUOTE));
            }
        }
        Ok(Some(CsvTable { is_cut: !rest.is_empty() || columns.is_empty(), columns, records }))
    }
}

const STRAY_QUOTE: &str =
    "a quotation mark is out of place and joins rows; the file was changed or damaged after it was written";

fn has_checksum(columns: &StringRecord, record: &StringRecord, place: usize) -> bool {
    let found = checksum::of_row(cells_beside(columns, place), cells_beside(record, place));
    record.get(place) == Some(&*found)
}

/// All cells but the one at this place.
fn cells_beside(record: &StringRecord, place: usize) -> impl Iterator<Item = &str> {
    record.iter().enumerate().filter(move |(at, _)| *at != place).map(|(_, cell)| cell)
}

/// Whether a cell has as many separators as a row and a line break: a quote began it in one row and ended it in another.
fn is_several_rows(cell: &str, columns: usize) -> bool {
    cell.contains('\n') && cell.matches(',').count() + 1 >= columns
}

/// A line as a record of its own.
fn lone_record(line: &[u8]) -> Option<StringRecord> {
    csv::ReaderBuilder::new().has_headers(false).from_reader(line).into_records().next()?.ok()
}

/// Which bytes of a CSV file are whole rows.
struct RowExtent {
    /// The end of the last whole row.
    end: usize,
    /// The lines up to there.
    lines: u64,
    /// The line of a quote within a cell that does not begin with one, or after its closing quote. Such cells are never
    /// written.
    stray_quote: Option<u64>,
}

/// Finds the whole rows. A line break in quotes belongs to a text, such as an error message of several lines.
fn extent_of_rows(bytes: &[u8]) -> RowExtent {
    #[derive(Clone, Copy, PartialEq)]
    enum Place {
        CellStart,
        InCell,
        InQuotes,
        AfterQuote,
    }
    let mut extent = RowExtent { end: 0, lines: 0, stray_quote: None };
    let (mut place, mut lines) = (Place::CellStart, 0);
    for (at, byte) in bytes.iter().enumerate() {
        lines += u64::from(*byte == b'\n');
        place = match (place, byte) {
            (Place::CellStart, b'"') => Place::InQuotes,
            (Place::InQuotes, b'"') => Place::AfterQuote,
            (Place::AfterQuote, b'"') | (Place::InQuotes, _) => Place::InQuotes,
            (_, b'\n') => {
                (extent.end, extent.lines) = (at + 1, lines);
                Place::CellStart
            }
            (_, b',') => Place::CellStart,
            (Place::AfterQuote, b'\r') => Place::AfterQuote,
            (Place::InCell, b'"') | (Place::AfterQuote, _) => {
                extent.stray_quote = extent.stray_quote.or(Some(lines + 1));
                Place::InCell
            }
            _ => Place::InCell,
        };
    }
    extent
}

/// Whether a file has the columns that are written now, with or without checksums.
fn has_columns_of<T: CsvRow>(columns: &StringRecord) -> Result<bool, ReportError> {
    let current = header::<T>()?;
    Ok(current.trim_end().split(',').eq(columns.iter().filter(|name| *name != ROW_CHECKSUM)))
}

/// Fails if files of this schema cannot be read.
pub(super) fn check_schema(path: &Path, schema: u32) -> Result<(), ReportError> {
    if (OLDEST_SCHEMA..=SCHEMA).contains(&schema) {
        return Ok(());
    }
    Err(ReportError::UnknownSchema { path: path.to_owned(), there: schema, here: SCHEMA })
}

/// A record as a row.
pub(super) fn deserialized<T: DeserializeOwned>(
    path: &Path,
    record: &StringRecord,
    columns: &StringRecord,
) -> Result<T, ReportError> {
    let line = record.position().map_or(0, csv::Position::line);
    record.deserialize(Some(columns)).map_err(|error| row_error(path, &error, line))
}

fn row_error(path: &Path, error: &csv::Error, line: u64) -> ReportError {
    let line = error.position().map_or(line, csv::Position::line);
    ReportError::Row { path: path.to_owned(), line, reason: error.to_string() }
}

/// Header and rows.
pub fn to_csv<T: Serialize + Default>(rows: &[T]) -> Result<String, ReportError> {
    Ok(header::<T>()? + &lines(rows, false)?)
}

/// Header and rows of a file in a run folder: the last column is the checksum of the row.
pub fn to_checked_csv<T: Serialize + Default>(rows: &[T]) -> Result<String, ReportError> {
    let header = header::<T>()?;
    let mut text = format!("{},{ROW_CHECKSUM}\n", header.trim_end());
    for row in rows {
        text.push_str(&checked_line(&header, row)?);
    }
    Ok(text)
}

/// A row with its checksum, under this header.
fn checked_line(header: &str, row: &impl Serialize) -> Result<String, ReportError> {
    let line = lines([row], false)?;
    let record = lone_record(line.as_bytes()).unwrap_or_default();
    let checksum = checksum::of_row(header.trim_end().split(','), record.iter());
    Ok(format!("{},{checksum}\n", line.trim_end_matches('\n')))
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

#[cfg(test)]
mod tests {
    use serde::Deserialize;

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
        let first_ends = to_checked_csv(&both[..1]).unwrap().len();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let kept = usize::from(cut >= first_ends) + usize::from(cut == whole.len());
            assert_eq!(read::<CaseReason>(&path).unwrap(), both[..kept], "cut at {cut}");
        }
    }

    /// Two rows with checksums, and the same file without.
    fn two_files(folder: &Path) -> [(PathBuf, String); 2] {
        let row = |case: &str| CaseReason { case: case.to_owned(), reason: "a, \"b\"".to_owned() };
        let rows = [row("first"), row("second"), row("third")];
        [("checked.csv", to_checked_csv(&rows).unwrap()), ("plain.csv", to_csv(&rows).unwrap())]
            .map(|(name, text)| (folder.join(name), text))
    }

    #[test]
    fn every_changed_byte_of_a_row_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let [(path, whole), _] = two_files(folder.path());
        fs::write(&path, &whole).unwrap();
        let rows = read::<CaseReason>(&path).unwrap();
        assert_eq!(rows.len(), 3);
        let name_of_checksum = whole.find(ROW_CHECKSUM).unwrap()..whole.find('\n').unwrap();
        for place in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone().into_bytes();
                bytes[place] ^= 1 << bit;
                fs::write(&path, &bytes).unwrap();
                let table = CsvTable::read(&path);
                let is_noticed = table.as_ref().map_or(true, |table| table.as_ref().is_some_and(|table| table.is_cut));
                // Without the name of its column, the file is one of an older release.
                assert!(is_noticed || name_of_checksum.contains(&place), "byte {place}, bit {bit}");
            }
        }
    }

    #[test]
    fn changed_row_is_named_by_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let [(path, whole), _] = two_files(folder.path());
        fs::write(&path, whole.replace("second", "secund")).unwrap();
        let refusal = read::<CaseReason>(&path).unwrap_err();
        assert!(matches!(refusal, ReportError::ChangedRow { line: 3, .. }), "{refusal}");
        assert!(refusal.to_string().contains("was changed or damaged after it was written"), "{refusal}");
    }

    /// A stray quote anywhere is an error, or the rows are as before, or the last row is missing and that is said.
    #[test]
    fn stray_quote_never_drops_rows_silently() {
        let folder = tempfile::tempdir().unwrap();
        for (path, whole) in two_files(folder.path()) {
            for place in 0..=whole.len() {
                for quotes in ["\"", "\"\""] {
                    let text = format!("{}{quotes}{}", &whole[..place], &whole[place..]);
                    fs::write(&path, &text).unwrap();
                    if let Ok(Some(CsvTable { records, is_cut, .. })) = CsvTable::read(&path) {
                        assert_eq!(
                            records.len() + usize::from(is_cut),
                            3 + usize::from(place == whole.len()),
                            "{text}"
                        );
                    }
                }
            }
        }
    }

    /// Two quotes can join rows to one with the right number of cells.
    #[test]
    fn joined_rows_are_noticed_without_checksums() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        for text in ["case,reason\na,\"b\nc,d\ne,f\"\n", "case,reason\na,\"b\nc,\"d\n", "case,reason\na,b\"\n"] {
            fs::write(&path, text).unwrap();
            assert!(CsvTable::read(&path).is_err(), "{text}");
        }
        fs::write(&path, "case,reason\na,\"two\nlines\"\n").unwrap();
        assert_eq!(CsvTable::read(&path).unwrap().unwrap().records.len(), 1);
    }

    #[test]
    fn empty_file_is_a_cut_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        assert!(CsvTable::read(&path).unwrap().is_none());
        for text in ["", "case,rea"] {
            fs::write(&path, text).unwrap();
            assert!(CsvTable::read(&path).unwrap().unwrap().is_cut);
        }
    }
}
