//! Files beside recordings: what PyTorch knew and a snapshot does not say.
//!
//! `snapshots.csv` has one row per recording, found by file name without extensions. Columns that are missing or empty are
//! unknown. Another table may have the same name: without the column `snapshot` and one of the others it is ignored.
//!
//! The Python package writes `rank0.json` beside `rank0.pickle`. Another file may have that name: without `oomph` and a
//! known `schema` it is ignored.

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::Counters;
use crate::{
    base::{Bytes, MemoryLimit, escaped, read_within},
    pytorch::Release,
    trace::torch::GivenFacts,
};

/// A table with 100,000 rows has about 8 MiB.
const LARGEST_TABLE: u64 = 16 << 20;
/// Facts of a run have about 2 KiB.
const LARGEST_FACTS: u64 = 1 << 20;
/// The schema of the facts that the Python package writes.
const FACTS_SCHEMA: u64 = 1;
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

/// What the files beside a recording say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Companion {
    /// The share of the device that the program might use, where it set one.
    pub memory_fraction: Option<f64>,
    /// PyTorch's own counters.
    pub counters: Counters,
    /// What the Python package wrote.
    facts: Option<RunFacts>,
}

/// The facts of a run, as the Python package writes them; those that are used here.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct RunFacts {
    oomph: Option<String>,
    schema: u64,
    torch: Option<String>,
    alloc_conf: Option<String>,
    devices: Vec<DeviceFacts>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct DeviceFacts {
    index: u32,
    limit_bytes: Option<u64>,
    free_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
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
    /// What is known of a recording, if there is a table with a row for it in its folder, or a file with its facts.
    pub fn beside(recording: &Path) -> Result<Option<Companion>, CompanionError> {
        let file_name = recording.file_name().unwrap_or_default().to_string_lossy();
        let table = recording.with_file_name(TABLE);
        let of_table = match read(&table, LARGEST_TABLE)? {
            Some(text) => row(&text, &file_name).map_err(|reason| CompanionError::Format { path: table, reason })?,
            None => None,
        };
        let facts = match facts_path(recording) {
            Some(path) => read(&path, LARGEST_FACTS)?.and_then(|text| run_facts(&text)),
            None => None,
        };
        Ok(match (of_table, facts) {
            (None, None) => None,
            (of_table, facts) => Some(Companion { facts, ..of_table.unwrap_or_default() }),
        })
    }

    /// The limit of the program on a GPU; without a number, on the first one.
    #[must_use]
    pub fn limit(&self, device: Option<u32>) -> Option<MemoryLimit> {
        let fraction = self.memory_fraction.map(MemoryLimit::Fraction);
        let bytes = self.device(device).and_then(|facts| facts.limit_bytes);
        fraction.or(bytes.map(|bytes| MemoryLimit::Size(Bytes(bytes))))
    }

    /// What the allocator could have had on a GPU when the recording was written: the memory that it held, and what was
    /// free, within the limit of the program.
    #[must_use]
    pub fn available(&self, device: u32) -> Option<u64> {
        let facts = self.device(Some(device))?;
        let available = facts.free_bytes? + facts.reserved_bytes?;
        Some(facts.limit_bytes.map_or(available, |limit| limit.min(available)))
    }

    fn device(&self, number: Option<u32>) -> Option<&DeviceFacts> {
        let mut devices = self.facts.iter().flat_map(|facts| &facts.devices);
        devices.find(|facts| number.is_none_or(|number| number == facts.index))
    }

    /// What the user says, completed by the facts of the run.
    #[must_use]
    pub fn complete(&self, given: &GivenFacts) -> GivenFacts {
        let known = self.facts.as_ref();
        let release = known.and_then(|facts| facts.torch.as_ref()?.parse::<Release>().ok());
        // Later releases record the settings themselves, with what the program changed.
        let settings = known.filter(|_| release.is_some_and(|release| release < Release::new(3)));
        GivenFacts {
            release: given.release.or(release),
            settings: given.settings.clone().or_else(|| settings?.alloc_conf.clone()),
        }
    }
}

/// The contents of a file, if it is one.
fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>, CompanionError> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = read_within(path, most).map_err(|source| CompanionError::Io { path: path.to_owned(), source })?;
    Ok(Some(text))
}

/// `rank0.json` for `rank0.pickle` and `rank0.pickle.xz`.
fn facts_path(recording: &Path) -> Option<PathBuf> {
    let name = recording.file_name()?.to_str()?;
    let end = [".pickle", ".pkl"].into_iter().find_map(|extension| name.rfind(extension))?;
    Some(recording.with_file_name(format!("{}.json", &name[..end])))
}

fn run_facts(text: &[u8]) -> Option<RunFacts> {
    let facts: RunFacts = serde_json::from_slice(text).ok()?;
    (facts.oomph.is_some() && facts.schema == FACTS_SCHEMA).then_some(facts)
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
        let counters = record.deserialize(Some(&headers)).map_err(words)?;
        return Ok(Some(Companion { memory_fraction, counters, facts: None }));
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
    fn facts_of_a_run_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let recording = folder.path().join("rank0.pickle.xz");
        let write = |text: &str| std::fs::write(folder.path().join("rank0.json"), text).unwrap();
        write(
            r#"{"schema": 1, "oomph": "0.1.0", "torch": "2.2.1+cu121", "alloc_conf": "max_split_size_mb:64", "new": 1,
                "devices": [{"index": 1, "limit_bytes": 4096, "free_bytes": 4000, "reserved_bytes": 1000},
                            {"index": 3, "limit_bytes": null, "free_bytes": 70, "reserved_bytes": 7}, {"index": 5}]}"#,
        );
        let found = Companion::beside(&recording).unwrap().unwrap();
        let limit = Some(MemoryLimit::Size(Bytes(4096)));
        assert_eq!([found.limit(None), found.limit(Some(1)), found.limit(Some(3))], [limit, limit, None]);
        assert_eq!([1, 3, 5, 7].map(|device| found.available(device)), [Some(4096), Some(77), None, None]);
        let known = found.complete(&GivenFacts::default());
        assert_eq!((known.release, known.settings.as_deref()), (Some(Release::new(2)), Some("max_split_size_mb:64")));
        let told = GivenFacts { release: Some(Release::new(5)), settings: Some(String::new()) };
        assert_eq!(found.complete(&told), told);
        for other in ["", "[]", r#"{"schema": 1}"#, r#"{"oomph": "9", "schema": 7}"#, r#"{"schema": "one"}"#] {
            write(other);
            assert_eq!(Companion::beside(&recording).unwrap(), None, "{other}");
        }
    }

    #[test]
    fn wrong_number_is_an_error() {
        assert_eq!(row(TABLE, "odd.pickle"), Err("'lots' is not a memory_fraction".to_owned()));
    }
}
