//! `snapshots.csv` beside recordings: what PyTorch knew and a snapshot does not say.
//!
//! One row per recording, found by file name without extensions. Columns that are missing or empty are unknown. Another table
//! may have the same name: without the column `snapshot` and one of the others it is ignored.

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::Counters;
use crate::base::{escaped, read_within};

/// A table with 100,000 rows has about 8 MiB.
const LARGEST_TABLE: u64 = 16 << 20;
/// The name of the table.
const TABLE: &str = "snapshots.csv";
/// Its first column.
const NAME_COLUMN: &str = "snapshot";
/// The columns of which it has at least one.
const VALUE_COLUMNS: [&str; 7] = [
    "memory_fraction",
    "peak_allocated",
    "peak_reserved",
    "final_segments",
    "final_inactive_split",
    "alloc_retries",
    "ooms",
];

/// A row of the table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Companion {
    /// The share of the device that the program might use, where it set one.
    pub memory_fraction: Option<f64>,
    /// PyTorch's own counters.
    pub counters: Counters,
}

/// A table that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CompanionError {
    /// The file exists and cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a table, or a field is not a number.
    #[error("{}: {}", path.display(), escaped(reason))]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl Companion {
    /// The row of a recording, if there is a table in its folder and a row in it.
    pub fn beside(recording: &Path) -> Result<Option<Companion>, CompanionError> {
        let path = recording.with_file_name(TABLE);
        if !path.is_file() {
            return Ok(None);
        }
        let text =
            read_within(&path, LARGEST_TABLE).map_err(|source| CompanionError::Io { path: path.clone(), source })?;
        let file_name = recording.file_name().unwrap_or_default().to_string_lossy();
        row(&text, &file_name).map_err(|reason| CompanionError::Format { path, reason })
    }
}

fn is_known(headers: &csv::StringRecord) -> bool {
    let has = |column: &str| headers.iter().any(|header| header == column);
    has(NAME_COLUMN) && VALUE_COLUMNS.into_iter().any(has)
}

fn row(text: &[u8], file_name: &str) -> Result<Option<Companion>, String> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Row {
        snapshot: String,
        memory_fraction: String,
    }
    let words = |error: csv::Error| error.to_string();
    let mut table = csv::Reader::from_reader(text);
    let headers = match table.headers() {
        Ok(headers) if is_known(headers) => headers.clone(),
        _ => return Ok(None),
    };
    for record in table.records() {
        let record = record.map_err(words)?;
        let Row { snapshot, memory_fraction } = record.deserialize(Some(&headers)).map_err(words)?;
        let ending = file_name.strip_prefix(&snapshot);
        if !ending.is_some_and(|end| end.is_empty() || end.starts_with(".pickle") || end.starts_with(".pkl")) {
            continue;
        }
        let memory_fraction = match memory_fraction.parse().ok().filter(|fraction: &f64| (0.0..=1.0).contains(fraction))
        {
            None if !memory_fraction.is_empty() => return Err(format!("'{memory_fraction}' is not a memory_fraction")),
            fraction => fraction,
        };
        return Ok(Some(Companion { memory_fraction, counters: record.deserialize(Some(&headers)).map_err(words)? }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"snapshot,memory_fraction,ooms\nrun,,3\nrun.exp,0.25,\nodd,lots,\n";

    #[test]
    fn row_is_found_by_file_name() {
        let found = row(TABLE, "run.pickle.xz").unwrap().unwrap();
        assert_eq!((found.memory_fraction, found.counters.ooms), (None, Some(3)));
        let found = row(TABLE, "run.exp.pickle").unwrap().unwrap();
        assert_eq!((found.memory_fraction, found.counters), (Some(0.25), Counters::default()));
        assert_eq!(row(TABLE, "run2.pickle"), Ok(None));
    }

    #[test]
    fn another_table_of_that_name_is_ignored() {
        for other in [&b"volume,snapshot,date\nhome,run,yesterday\nshort\n"[..], b"\xff\xfe\x00\n\x00", b"", b"\"\n"] {
            assert_eq!(row(other, "run.pickle"), Ok(None), "{other:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("snapshots.csv")).unwrap();
        assert_eq!(Companion::beside(&folder.path().join("run.pickle")).unwrap(), None);
    }

    #[test]
    fn every_value_column_is_read() {
        for column in VALUE_COLUMNS {
            let value = if column == "memory_fraction" { "0.5" } else { "7" };
            let found = row(format!("snapshot,{column}\nrun,{value}\n").as_bytes(), "run.pickle").unwrap();
            assert_ne!(found, Some(Companion::default()), "{column}");
        }
    }

    #[test]
    fn wrong_number_is_an_error() {
        assert_eq!(row(TABLE, "odd.pickle"), Err("'lots' is not a memory_fraction".to_owned()));
    }
}
