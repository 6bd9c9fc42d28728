//! Runs `oomph stress adversary` as a user does.

use crate::command::run;
use oomph::{
    base::MIB,
    device::DeviceSpec,
    models::Recipe,
    replay::{self, replay},
    strategy::{Setup, Silent, StrategySpec},
};
use serde_json::Value;
use tempfile::TempDir;

const SMALL: [&str; 8] = ["stress", "adversary", "--live", "128MiB", "--largest", "32MiB", "--unit", "2MiB"];

fn json(folder: &TempDir, arguments: &[&str]) -> Value {
    serde_json::from_str(&run(folder, &[arguments, &["--format", "json"]].concat(), 0).0).unwrap()
}

fn small(more: &[&'static str]) -> Vec<&'static str> {
    [&SMALL, more].concat()
}

/// 64 units in blocks of 1 to 16: 64 * 3 - 16 + 1 units.
#[test]
fn every_strategy_is_compared_with_the_bound() {
    let folder = TempDir::new().unwrap();
    let found = json(&folder, &SMALL);
    let rows = found["rows"].as_array().unwrap();
    let row = |strategy: &str| rows.iter().find(|row| row["strategy"] == strategy).unwrap();
    for row in rows {
        assert_eq!(row["robson_bound_bytes"], 177 * 2 * MIB, "{row}");
        assert!(row["strategy"] == "fixed" || row["needed_bytes"].as_u64().unwrap() >= 128 * MIB, "{row}");
    }
    for strategy in ["pool:initial:{memory},maximum:{memory}", "bfc:allow_growth:False,memory_limit:{memory}"] {
        assert_eq!(
            (&row(strategy)["needed_bytes"], &row(strategy)["standing"]),
            (&(177 * 2 * MIB).into(), &"at_the_bound".into())
        );
    }
    assert_eq!(row("direct")["standing"], "needs_what_is_alive");
    assert_eq!(row("fixed")["standing"], "refuses");
    assert!(rows.iter().all(|row| row["strategy"] != "null" && row["strategy"] != "address"));
}

#[test]
fn table_names_the_bound_and_csv_has_columns() {
    let folder = TempDir::new().unwrap();
    let (out, _) = run(&folder, &small(&["--strategy", "tlsf", "--strategy", "fixed"]), 0);
    for words in [
        "Robson",
        "An allocator that never moves blocks needs 354 MiB",
        "fixed: refuses: serves no requests of 2.00 MiB",
    ] {
        assert!(out.contains(words), "'{words}' is missing in {out}");
    }
    let (csv, _) = run(&folder, &small(&["--strategy", "tlsf", "--format", "csv"]), 0);
    assert!(csv.starts_with("strategy,device,live_peak_bytes,largest_bytes,unit_bytes,robson_bound_bytes,"), "{csv}");
}

#[test]
fn adversary_failure_can_be_replayed() {
    let folder = TempDir::new().unwrap();
    let pool = ["--strategy", "pool:initial:{memory},maximum:{memory}", "--at-most"];
    run(&folder, &small(&[&pool[..], &["2.7"]].concat()), 106);
    run(&folder, &small(&[&pool[..], &["2.8", "--save", "played"]].concat()), 0);
    let trace = folder.path().join("played/robson-pool_initial__memory__maximum__memory_.oomph");
    let (out, _) = run(&folder, &["replay", trace.to_str().unwrap(), "--strategy", "null"], 0);
    assert!(out.contains("128 MiB"), "the budget is the live bytes:\n{out}");
}

#[test]
fn invalid_adversary_options_are_refused() {
    let folder = TempDir::new().unwrap();
    let refused = |arguments: &[&str], words: &str| {
        let (_, err) = run(&folder, arguments, 2);
        assert!(err.contains(words), "'{words}' is missing in {err}");
    };
    refused(&["stress", "adversary", "--unit", "100"], "not a multiple of 256");
    refused(&["stress", "adversary", "--largest", "3MiB", "--unit", "2MiB"], "not a power of two times the unit");
    refused(&["stress", "adversary", "--live", "512MiB"], "cannot hold two blocks");
    refused(&["stress", "adversary", "--strategy", "pol"], "did you mean 'pool'");
    run(&folder, &["stress", "adversary", "--device", "cuda:4000"], 103);
}

/// The statements of workloads/README.md about the workloads found by search.
#[test]
fn adversary_workloads_hurt_their_target_only() {
    let reserved = |workload: &str, strategy: &str| {
        let workload = Recipe::named(workload).unwrap().workload().unwrap();
        let mut device = "sim".parse::<DeviceSpec>().unwrap().open().unwrap();
        let setup = Setup { props: device.props(), limit: None };
        let mut strategy = StrategySpec::from(strategy).build(&setup).unwrap();
        replay(&workload, &mut *strategy, &mut *device, &replay::ReplayOptions::default(), &mut Silent).unwrap();
        strategy.stats().peak.reserved / MIB
    };
    let expandable = "caching:expandable_segments:True";
    assert_eq!(reserved("adversary-ladder", "caching"), 5472);
    assert_eq!(reserved("adversary-ladder", expandable), 520);
    assert_eq!(reserved("adversary-near-miss", "caching"), 508);
    assert_eq!(reserved("adversary-near-miss", expandable), 940);
}
