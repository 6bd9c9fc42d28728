//! `oomph claims`, and `oomph run` with the suites that have their own tables.

use std::fs;

use crate::command::run;

fn rows(text: &str) -> Vec<serde_json::Value> {
    let json: serde_json::Value = serde_json::from_str(text).unwrap();
    json["rows"].as_array().unwrap().clone()
}

/// Verdicts that real PyTorch runs support, for claims with short workloads.
#[test]
fn verdicts_match_pytorch() {
    let expected = [
        ("in-place", "refuted"),
        ("cudnn-bench", "confirmed"),
        ("outputs-list", "depends"),
        ("val-accumulate", "confirmed"),
        ("no-grad-val", "confirmed"),
        ("retain-graph", "depends"),
        ("zero-grad", "refuted"),
        ("restart", "not_measurable"),
        ("adoption", "not_measurable"),
    ];
    let names = expected.map(|(name, _)| name);
    let (out, _) = run(".", &[&["claims", "--format", "json"], names.as_slice()].concat(), 0);
    let rows = rows(&out);
    assert_eq!(rows.len(), expected.len());
    for (name, verdict) in expected {
        let row = rows.iter().find(|row| row["id"] == name).unwrap();
        assert_eq!(row["verdict"], verdict, "{row:#}");
        let text = |name: &str| row[name].as_str().unwrap();
        let measured = !text("simulated").is_empty() || !text("pytorch").is_empty();
        assert_eq!((measured, !text("decided_by").is_empty()), (verdict != "not_measurable", measured), "{row:#}");
        assert!(!text("lesson").is_empty() && !text("stated_by").is_empty(), "{row:#}");
    }
}

#[test]
fn named_claims_are_printed_in_full() {
    let (out, _) = run(".", &["claims", "zero-grad"], 0);
    for words in [
        "verdict:    refuted (PyTorch 2.11 on an H200: 1)",
        "PyTorch:    leak-no-zero-grad: 0 B per step",
        "see:        oomph leaks",
    ] {
        assert!(out.contains(words), "'{words}' is missing in\n{out}");
    }
    let (list, _) = run(".", &["claims", "--list"], 0);
    assert!(list.lines().count() >= 40 && list.contains("zero-grad"), "{list}");
    let (_, err) = run(".", &["claims", "zero-grd"], 2);
    assert!(err.contains("a similar value exists: 'zero-grad'"), "{err}");
}

#[test]
fn claims_run_can_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("run");
    let place = place.to_str().unwrap();
    run(".", &["run", "claims", "--exact", "--filter", "no-grad-val", "--output", place], 0);
    let (_, err) = run(".", &["run", "claims", "--exact", "--filter", "no-grad-val", "--output", place], 2);
    assert!(err.contains("already holds a run"), "{err}");
    let both = ["run", "claims", "--exact", "--filter", "no-grad-val", "--filter", "adoption", "--resume", place];
    let (out, _) = run(".", &both, 0);
    assert!(out.contains("2 claims: 1 confirmed, 0 depends, 0 refuted, 1 not measurable here."), "{out}");
    let csv = fs::read_to_string(format!("{place}/claims.csv")).unwrap();
    let page = fs::read_to_string(format!("{place}/claims.md")).unwrap();
    assert_eq!(csv.lines().count(), 3, "{csv}");
    let mut rows = csv::Reader::from_reader(csv.as_bytes());
    let columns = rows.headers().unwrap().clone();
    let place = |name: &str| columns.iter().position(|column| column == name).unwrap();
    for row in rows.records().map(Result::unwrap) {
        let cell = |name: &str| &row[place(name)];
        assert!(!cell("commit").is_empty() && !cell("device_name").is_empty(), "{row:?}");
        assert_eq!(cell("run_started"), "", "rows of a simulated device do not depend on the time");
    }
    assert!(page.contains("| **no-grad-val**") && page.contains("## Beyond measurement here"), "{page}");
}

#[test]
fn techniques_run_can_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("run");
    let place = place.to_str().unwrap();
    let (ids, _) = run(".", &["run", "techniques", "--list", "--filter", "resnet-50/*"], 0);
    assert!(ids.lines().any(|id| id == "resnet-50/half_batch"), "{ids}");
    let first = ["run", "techniques", "--exact", "--filter", "resnet-50/amp", "--format", "json", "--output", place];
    let (out, _) = run(".", &first, 0);
    let rows = rows(&out);
    assert_eq!((rows.len(), &rows[0]["technique"]), (1, &"amp".into()));
    assert!(rows[0]["largest_batch_24gib"].as_u64().unwrap() > rows[0]["largest_batch_8gib"].as_u64().unwrap());
    let more = ["run", "techniques", "--exact", "--filter", "resnet-50/base", "--filter", "resnet-50/amp"];
    run(".", &[more.as_slice(), &["--resume", place]].concat(), 0);
    let csv = fs::read_to_string(format!("{place}/techniques.csv")).unwrap();
    assert_eq!(csv.lines().count(), 3, "{csv}");
}

#[test]
fn suites_with_own_tables_run_alone() {
    let (_, err) = run(".", &["run", "claims", "quick"], 2);
    assert!(err.contains("run it by itself"), "{err}");
    let (_, err) = run(".", &["run", "techniques", "--limit", "8GiB"], 2);
    assert!(err.contains("no --limit"), "{err}");
    let (_, err) = run(".", &["run", "claims", "--filter", "nothing-like-it"], 4);
    assert!(err.contains("none of the claims passes the filters"), "{err}");
}
