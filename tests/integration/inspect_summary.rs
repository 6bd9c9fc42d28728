//! `oomph inspect --summary` and `--by` against PyTorch's own counters.

use std::path::Path;

use crate::command::run;
use serde_json::Value;

fn recorded(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded").join(name).display().to_string()
}

fn row(arguments: &[&str]) -> Value {
    let (out, _) = run(".", &[arguments, &["--format", "json"]].concat(), 0);
    serde_json::from_str::<Value>(&out).unwrap()["rows"][0].take()
}

/// A row of a table in the recordings' folder.
fn measured(table: &str, is_it: impl Fn(&[&str]) -> bool, column: &str) -> u64 {
    let mut table = csv::Reader::from_path(recorded(table)).unwrap();
    let headers = table.headers().unwrap().clone();
    let place = headers.iter().position(|header| header == column).unwrap();
    let rows: Vec<csv::StringRecord> = table.records().map(Result::unwrap).collect();
    let row = rows.iter().find(|row| is_it(&row.iter().collect::<Vec<_>>())).unwrap();
    row[place].parse().unwrap()
}

#[test]
fn summary_equals_pytorchs_counters() {
    for name in ["train_base", "varlen.exp", "fuzz1.split32"] {
        let path = recorded(&format!("{name}.pickle.xz"));
        let summary = &row(&["inspect", &path, "--summary"])["memory_summary"];
        for (ours, column) in [
            (&summary["allocated_bytes"]["current"], "final_allocated"),
            (&summary["allocated_bytes"]["peak"], "peak_allocated"),
            (&summary["reserved_bytes"]["current"], "final_reserved"),
            (&summary["reserved_bytes"]["peak"], "peak_reserved"),
        ] {
            assert_eq!(ours, &measured("snapshots.csv", |row| row[0] == name, column), "{name}: {column}");
        }
    }
}

/// PyTorch's statistics after a step equal those at the start of the next one, before its first
/// request.
#[test]
fn summary_at_step_equals_measurement() {
    for (name, step) in [("train_base", 3), ("leak_outputs", 4), ("leak_cycle", 6)] {
        let path = recorded(&format!("{name}.pickle.xz"));
        let summary = &row(&["inspect", &path, "--summary", "--at", &format!("step:{step}")])["memory_summary"];
        let after = (step - 1).to_string();
        let value = |column| measured("per_step.csv", |row| row[0] == name && row[1] == after, column);
        assert_eq!(summary["allocated_bytes"]["current"], value("allocated"), "{name}");
        assert_eq!(summary["reserved_bytes"]["current"], value("reserved"), "{name}");
        assert_eq!(summary["requested_bytes"]["current"], value("requested"), "{name}");
        assert_eq!(summary["inactive_split_bytes"], value("inactive_split"), "{name}");
    }
}

#[test]
fn summary_table_depends_on_the_strategy() {
    let (out, _) =
        run(".", &["inspect", "training", "--summary", "--at", "peak", "--strategy", "direct", "--by", "tag"], 0);
    for words in
        ["memory under direct", "GPU reserved memory", "CUDA OOMs: 0", "requested memory by requester", "parameter"]
    {
        assert!(out.contains(words), "'{words}' is missing in\n{out}");
    }
    let of = |strategy| row(&["inspect", "training", "--summary", "--strategy", strategy])["memory_summary"].clone();
    let (direct, caching) = (of("direct"), of("caching"));
    assert_eq!(direct["allocations"]["total_allocated"], caching["allocations"]["total_allocated"]);
    assert_ne!(direct["reserved_bytes"]["current"], caching["reserved_bytes"]["current"]);
    let ran_out = row(&["inspect", "training", "--summary", "--limit", "4GiB"]);
    assert_eq!(ran_out["memory_summary"]["ooms"], 1, "{ran_out}");
}

#[test]
fn summary_names_sites_and_refuses_absent_moments() {
    let stacks = recorded("varlen_stack.pickle.xz");
    let sites = row(&["inspect", &stacks, "--by", "site", "--top", "3"]);
    assert_eq!(sites["operations"].as_array().unwrap().len(), 3);
    let named = |operation: &Value| operation["name"].as_str().unwrap().contains(".py");
    assert!(sites["operations"].as_array().unwrap().iter().any(named), "{}", sites["operations"]);
    assert!(sites.get("memory_summary").is_none());
    let (_, err) = run(".", &["inspect", "training", "--summary", "--at", "noon"], 2);
    assert!(err.contains("'noon' is not a moment"), "{err}");
    let (_, err) = run(".", &["inspect", "training", "--by", "size", "--at", "step:9999"], 2);
    assert!(err.contains("no step 9999"), "{err}");
}
