//! Releases of PyTorch in names of strategies, in tables, and side by side.

use crate::command::run;
use tempfile::TempDir;

/// The rows of a CSV as pairs of heading and cell.
fn cells(csv: &str, columns: &[&str]) -> Vec<Vec<String>> {
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let headings = reader.headers().unwrap().clone();
    let place = |column: &&str| headings.iter().position(|heading| heading == *column).unwrap();
    let places: Vec<usize> = columns.iter().map(place).collect();
    let rows = reader.records().map(|row| row.unwrap());
    rows.map(|row| places.iter().map(|&place| row[place].to_owned()).collect()).collect()
}

#[test]
fn rows_name_the_release() {
    let folder = TempDir::new().unwrap();
    let strategies = ["--strategy", "caching:release:2.13", "--strategy", "caching", "--strategy", "direct"];
    let arguments = [&["replay", "checkerboard", "--format", "csv"], &strategies[..]].concat();
    let (csv, _) = run(&folder, &arguments, 0);
    let expected = [["caching:release:2.13", "2.13"], ["caching", "2.11"], ["direct", ""]];
    assert_eq!(cells(&csv, &["strategy", "release"]), expected);
    let (json, _) = run(&folder, &["replay", "checkerboard", "--format", "json", "--release", "2.9"], 0);
    let rows: serde_json::Value = serde_json::from_str(&json).unwrap();
    let releases: Vec<_> = rows["rows"].as_array().unwrap().iter().map(|row| row["release"].clone()).collect();
    assert_eq!(releases, [serde_json::Value::Null, "2.9".into(), "2.9".into()]);
    let threshold = ["threshold", "checkerboard", "--strategy", "caching:release:2.15", "--format", "csv"];
    assert_eq!(cells(&run(&folder, &threshold, 0).0, &["release"]), [["2.15"]]);
}

#[test]
fn releases_are_shown_side_by_side() {
    let folder = TempDir::new().unwrap();
    let arguments = ["replay", "variable-length", "--release", "2.11,2.12,2.13,2.10", "--strategy", "caching"];
    let (csv, _) = run(&folder, &[&arguments[..], &["--format", "csv"]].concat(), 0);
    let rows = cells(&csv, &["strategy", "release", "status", "requests", "moved_requests", "peak_reserved_bytes"]);
    let releases: Vec<&str> = rows.iter().map(|row| row[1].as_str()).collect();
    assert_eq!(releases, ["2.11", "2.12", "2.13", "2.10"]);
    assert!(rows.iter().all(|row| row[0] == "caching" && row[2] == "completed" && row[3] == rows[0][3]), "{csv}");
    let moved = |row: usize| rows[row][4].parse::<u64>().unwrap();
    // 2.10 and 2.11 take the same free block, 2.13 another one.
    assert_eq!((moved(0), moved(3)), (0, 0), "{csv}");
    assert!(moved(2) > 0 && moved(2) < rows[0][3].parse().unwrap(), "{csv}");
    assert_eq!(rows[0][5], rows[3][5]);
    let (table, _) = run(&folder, &arguments, 0);
    assert!(table.contains("at another") && table.contains("2.13"), "{table}");
}

#[test]
fn contradictions_and_missing_settings_are_refused() {
    let folder = TempDir::new().unwrap();
    let replay = |more: &[&str]| run(&folder, &[&["replay", "checkerboard"], more].concat(), 2).1;
    let twice = replay(&["--strategy", "caching:release:2.13", "--release", "2.11"]);
    assert!(twice.contains("'caching:release:2.13' names a release, and so does --release"), "{twice}");
    let early = replay(&["--strategy", "caching:large_segment_size_mb:32", "--release", "2.11,2.4"]);
    assert!(early.contains("PyTorch 2.4 has no setting 'large_segment_size_mb': it exists since 2.11"), "{early}");
    let none = replay(&["--strategy", "direct", "--release", "2.11,2.4"]);
    assert!(none.contains("choose --strategy caching"), "{none}");
    let unknown = replay(&["--release", "2.99"]);
    assert!(unknown.contains("'2.99' is not a known release of PyTorch; write 2.0 to 2.15"), "{unknown}");
    let exported = replay(&["--release", "2.11,2.4", "--export-csv", "rows.csv"]);
    assert!(exported.contains("leave out --threads and --export-"), "{exported}");
}
