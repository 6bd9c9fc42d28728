//! Folders of an older schema: `report` and `compare` convert them, `--resume` and merging refuse them.

use std::{fs, path::Path};

use tempfile::TempDir;

use crate::command::{remove_checksums, run};

/// The columns of `runs.csv` that had other names in schema 1.
const OLD_NAMES: [(&str, &str); 8] = [
    ("live_peak_bytes", "bound_requested_bytes"),
    ("live_peak_rounded_bytes", "bound_rounded_bytes"),
    ("internal_fragmentation_share", "internal_fragmentation"),
    ("external_fragmentation_share", "external_fragmentation"),
    ("oom_external_fragmentation_share", "oom_external_fragmentation"),
    ("idle_at_allocated_peak_share", "idle_share_at_allocated_peak"),
    ("idle_at_reserved_peak_share", "idle_share_at_reserved_peak"),
    ("fragmentation_share", "peak_gap_share"),
];

/// Rewrites the files of a run as schema 1 had them.
fn as_schema_1(folder: &Path) {
    remove_checksums(folder);
    let environment = fs::read_to_string(folder.join("env.json")).unwrap();
    fs::write(folder.join("env.json"), environment.replace("\"schema\": 2", "\"schema\": 1")).unwrap();
    let path = folder.join("runs.csv");
    let mut table = csv::Reader::from_path(&path).unwrap();
    let header = table.headers().unwrap().clone();
    let rows: Vec<csv::StringRecord> = table.records().map(Result::unwrap).collect();
    let mut writer = csv::Writer::from_path(&path).unwrap();
    let old = |name: &str| OLD_NAMES.iter().find(|(new, _)| *new == name).map(|(_, old)| (*old).to_owned());
    writer.write_record(header.iter().map(|name| old(name).unwrap_or_else(|| name.to_owned()))).unwrap();
    for row in &rows {
        let cells = header.iter().zip(row).map(|(name, cell)| match cell {
            _ if name == "schema" => "1".to_owned(),
            // Schema 1 had up to 17 digits.
            cell if name.ends_with("_share") && cell.len() == 8 => format!("{cell}00000001"),
            cell => cell.to_owned(),
        });
        writer.write_record(cells).unwrap();
    }
    writer.flush().unwrap();
}

/// Two runs of the same cases; the first one has schema 1.
fn two_runs() -> TempDir {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'Which is best?'\nseeds = [1]\n[[group]]\nworkloads = ['checkerboard']\n\
                 strategies = ['caching', 'direct', 'async']\n";
    fs::write(folder.path().join("some.toml"), suite).unwrap();
    for name in ["old", "new"] {
        run(&folder, &["run", "./some.toml", "--output", name, "--device", "sim:8GiB"], 0);
    }
    as_schema_1(&folder.path().join("old"));
    folder
}

#[test]
fn older_runs_are_compared_after_conversion() {
    let folder = two_runs();
    let (out, err) = run(&folder, &["compare", "old", "new"], 0);
    assert!(out.contains("all deterministic columns are equal"), "{out}");
    assert!(err.contains("note: old has schema 1") && err.contains("converted to schema 2"), "{err}");
    assert!(!err.contains("note: new"), "{err}");
}

#[test]
fn older_runs_have_a_page() {
    let folder = two_runs();
    let (_, err) = run(&folder, &["report", "old"], 0);
    assert!(err.contains("note: old has schema 1"), "{err}");
    assert!(fs::read_to_string(folder.path().join("old/report.html")).unwrap().contains("checkerboard"));
}

#[test]
fn older_runs_cannot_be_resumed() {
    let folder = two_runs();
    let before = fs::read(folder.path().join("old/runs.csv")).unwrap();
    let resume = ["run", "./some.toml", "--resume", "old", "--device", "sim:8GiB"];
    let (_, err) = run(&folder, &resume, 2);
    for words in ["old cannot be resumed", "it has schema 1", "writes schema 2", "--output"] {
        assert!(err.contains(words), "{words}: {err}");
    }
    assert_eq!(fs::read(folder.path().join("old/runs.csv")).unwrap(), before, "the folder is unchanged");
}

#[test]
fn published_results_of_schema_1_can_be_read() {
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/schema-1");
    let folder = TempDir::new().unwrap();
    for name in ["strategies", "oom-thresholds", "techniques", "claims", "throughput"] {
        let place = published.join(name);
        let (_, err) = run(&folder, &["report", place.to_str().unwrap(), "--output", "page.html"], 0);
        assert!(err.contains("has schema 1"), "{name}: {err}");
    }
    let records = oomph::report::read_records(&published.join("strategies")).unwrap();
    let is_known = |record: &oomph::measure::CaseRecord| record.peak_reserved_bytes.is_some();
    assert!(records.iter().all(|record| record.schema == 2 && is_known(record) == record.clock.is_some()));
    assert!(records.iter().any(|record| record.fragmentation_share > Some(0.1)));
    assert!(records.iter().any(|record| record.live_peak_bytes.is_some()));
}
