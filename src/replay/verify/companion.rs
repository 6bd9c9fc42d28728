//! `snapshots.csv` beside recordings: what PyTorch knew and a snapshot does not say.
//!
//! One row a recording, by file name without extensions. Columns that are missing or empty are unknown.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::Counters;

/// The name of the table.
const TABLE: &str = "snapshots.csv";

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
    /// Not a table, or a field that is no number.
    #[error("{}: {reason}", path.display())]
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
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CompanionError::Io { path, source }),
        };
        let file_name = recording.file_name().unwrap_or_default().to_string_lossy();
        row(&text, &file_name).map_err(|reason| CompanionError::Format { path, reason })
    }
}

fn row(text: &[u8], file_name: &str) -> Result<Option<Companion>, String> {
    let mut table = csv::Reader::from_reader(text);
    let headers = table.headers().map_err(|error| error.to_string())?.clone();
    for record in table.records() {
        let record = record.map_err(|error| error.to_string())?;
        let field = |name: &str| {
            let place = headers.iter().position(|header| header == name);
            place.and_then(|place| record.get(place)).filter(|text| !text.is_empty())
        };
        let is_this = field("snapshot").is_some_and(|name| {
            let rest = file_name.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(".pickle") || rest.starts_with(".pkl"))
        });
        if !is_this {
            continue;
        }
        let bad = |name: &str, text: &str| format!("'{text}' is no value for {name}");
        let count = |name: &str| field(name).map(|text| text.parse::<u64>().map_err(|_| bad(name, text))).transpose();
        let fraction = field("memory_fraction").map(|text| {
            let fraction = text.parse().ok().filter(|fraction: &f64| (0.0..=1.0).contains(fraction));
            fraction.ok_or_else(|| bad("memory_fraction", text))
        });
        return Ok(Some(Companion {
            memory_fraction: fraction.transpose()?,
            counters: Counters {
                peak_allocated: count("peak_allocated")?,
                peak_reserved: count("peak_reserved")?,
                final_segments: count("final_segments")?,
                final_inactive_split: count("final_inactive_split")?,
                alloc_retries: count("alloc_retries")?,
                ooms: count("ooms")?,
            },
        }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"snapshot,memory_fraction,ooms\nrun,,3\nrun.exp,0.25,\nodd,lots,\n";

    #[test]
    fn a_recording_finds_its_own_row_and_no_other() {
        let found = row(TABLE, "run.pickle.xz").unwrap().unwrap();
        assert_eq!((found.memory_fraction, found.counters.ooms), (None, Some(3)));
        let found = row(TABLE, "run.exp.pickle").unwrap().unwrap();
        assert_eq!((found.memory_fraction, found.counters), (Some(0.25), Counters::default()));
        assert_eq!(row(TABLE, "run2.pickle"), Ok(None));
    }

    #[test]
    fn a_field_that_is_no_number_is_named() {
        assert_eq!(row(TABLE, "odd.pickle"), Err("'lots' is no value for memory_fraction".to_owned()));
    }
}
