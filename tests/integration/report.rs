//! `oomph report` and the exports of `run` and `replay`, without a browser.

use std::{fs, path::Path};

use assert_cmd::Command;

fn oomph(folder: &Path) -> Command {
    let mut command = Command::cargo_bin("oomph").unwrap();
    command.current_dir(folder);
    command
}

#[test]
fn a_replay_is_exported_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let arguments = ["replay", "checkerboard", "--export-csv", "r.csv", "--export-json", "r.json"];
    let more = ["--export-markdown", "r.md", "--export-html", "r.html", "--strategy", "caching"];
    oomph(place).args(arguments).args(more).assert().success();
    let text = |name: &str| fs::read_to_string(place.join(name)).unwrap();
    assert!(text("r.csv").starts_with("schema,case_id,"));
    let json: serde_json::Value = serde_json::from_str(&text("r.json")).unwrap();
    assert_eq!(json["rows"][0]["strategy"], "caching");
    assert!(text("r.md").starts_with("| workload"));
    let page = text("r.html");
    let reserved = json["rows"][0]["peak_reserved_bytes"].to_string();
    assert!(page.contains(&format!("data-value=\"{reserved}\"")), "the page shows the numbers of the rows");
    assert!(page.contains("data-chart=\"timeline\"") && page.contains("data-chart=\"map\""));
}

#[test]
fn page_regenerated_from_files_is_identical() {
    let folder = tempfile::tempdir().unwrap();
    let run = ["run", "quick", "--filter", "checkerboard/caching@", "--output", "run", "--format", "csv"];
    oomph(folder.path()).args(run).assert().success();
    let first = fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    oomph(folder.path()).args(["report", "run"]).assert().success();
    assert_eq!(fs::read_to_string(folder.path().join("run/report.html")).unwrap(), first);
}

#[test]
fn report_reads_runs_of_older_releases() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/schema-1");
    let runs = ["quick", "throughput", "techniques", "oom-thresholds"].map(|name| published.join(name));
    oomph(folder.path()).arg("report").args(runs).arg("-o").arg(&page).assert().success();
    let text = fs::read_to_string(page).unwrap();
    for section in ["overview", "memory", "thresholds", "techniques", "speed", "origin"] {
        assert!(text.contains(&format!("<section id=\"{section}\"")), "{section}");
    }
    for chart in ["timeline", "map", "address"] {
        assert!(!text.contains(&format!("data-chart=\"{chart}\"")), "{chart} needs the files of cases");
    }
}

#[test]
fn invalid_run_folder_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let output = oomph(folder.path()).args(["report", "."]).assert().code(2).get_output().clone();
    assert!(String::from_utf8_lossy(&output.stderr).contains("error: "), "{output:?}");
    assert!(!folder.path().join("report.html").exists());
}
