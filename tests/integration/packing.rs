//! The lower bound and the packings of real training runs, and how the commands report them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::command::run;
use oomph::{
    base::{NoProgress, parallel_map},
    plan::{GRAIN, Lifetimes, PackingBudget, pack},
    suite::{SourceSpec, all_cores},
};
use tempfile::TempDir;

/// Every recorded training run, once: other allocator settings do not change the requests.
const TRAINING: [&str; 15] = [
    "train_accum4",
    "train_amp",
    "train_base",
    "train_ckpt",
    "train_ckpt_amp",
    "train_halfbatch",
    "train_inplace",
    "train_offload",
    "train_sgd",
    "train_zero_fill",
    "resnet_amp",
    "resnet_base",
    "streams",
    "varlen",
    "varlen.seed2",
];

fn recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"))
}

#[test]
fn recordings_pack_within_two_percent() {
    // In an unoptimised build a packing takes half a minute, so only two are checked.
    let recordings = if cfg!(debug_assertions) { &["train_sgd", "streams"][..] } else { &TRAINING };
    parallel_map(recordings, all_cores(), |name| {
        let path = recording(name).to_str().unwrap().to_owned();
        let source = SourceSpec { name: path, seed: 1, ..SourceSpec::default() }.open(&NoProgress).unwrap();
        let lifetimes = Lifetimes::read(&*source, GRAIN).unwrap();
        let packing = pack(&lifetimes, PackingBudget::QUICK);
        packing.check(&lifetimes).unwrap();
        let over = packing.over_bound() * 100.0;
        assert!((0.0..2.0).contains(&over), "{name}: {over:.2} % over the bound, by {}", packing.method);
    });
}

/// The challenging instances of MiniMalloc (<https://github.com/google/minimalloc>, Apache-2.0) fit into 1 MiB. For all
/// but D and J the bound is reached, so no layout is lower. The budget is that of `inspect --pack`.
#[test]
#[ignore = "needs the folder with MiniMalloc's instances A.1048576.csv to K.1048576.csv in OOMPH_MINIMALLOC"]
fn minimalloc_instances_are_solved() {
    let folder = PathBuf::from(std::env::var_os("OOMPH_MINIMALLOC").expect("OOMPH_MINIMALLOC names a folder"));
    for name in "ABCDEFGHIJK".chars() {
        let path = folder.join(format!("{name}.1048576.csv")).to_str().unwrap().to_owned();
        let source = SourceSpec { name: path, seed: 1, ..SourceSpec::default() }.open(&NoProgress).unwrap();
        let lifetimes = Lifetimes::read(&*source, GRAIN).unwrap();
        let packing = pack(&lifetimes, PackingBudget::THOROUGH);
        packing.check(&lifetimes).unwrap();
        assert!(packing.height_bytes <= 1 << 20, "{name}: {} bytes by {}", packing.height_bytes, packing.method);
        assert!(packing.is_optimal() || "DJ".contains(name), "{name}: {} bytes", packing.height_bytes);
    }
}

#[test]
fn a_longer_search_is_asked_for_in_steps() {
    let folder = TempDir::new().unwrap();
    // At most 3 KiB are live, but every layout has 3.5 KiB.
    let lives = [(0, 1, 3), (0, 2, 3), (1, 3, 1), (1, 4, 1), (2, 4, 2), (3, 6, 3), (4, 7, 3)];
    let rows = lives.iter().enumerate().map(|(id, (from, to, size))| format!("{id},{from},{to},{}\n", size * 512));
    fs::write(folder.path().join("seven.csv"), "id,lower,upper,size\n".to_owned() + &rows.collect::<String>()).unwrap();
    let with = |steps: &str| run(&folder, &["inspect", "seven.csv", "--pack", "--pack-steps", steps], 0).0;
    assert!(with("1").contains("no layout can be below 3.00 KiB"), "{}", with("1"));
    assert!(with("1000000").contains("packed       3.50 KiB"), "{}", with("1000000"));
    assert!(with("1000000").contains("no layout is lower"), "{}", with("1000000"));
    let (_, refused) = run(&folder, &["inspect", "seven.csv", "--pack-steps", "1"], 2);
    assert!(refused.contains("--pack"), "{refused}");
}

#[test]
fn inspect_prints_bound_and_packing() {
    let folder = TempDir::new().unwrap();
    // Two blocks, one freed, and a third that fits beside the other: birth order needs 4 KiB, but
    // only 3 KiB are live.
    let trap = "id,lower,upper,size\na,0,1,1024\nb,0,2,1024\nc,1,2,2048\n";
    fs::write(folder.path().join("trap.csv"), trap).unwrap();
    let text = |arguments: &[&str]| run(&folder, arguments, 0).0;
    let plain = text(&["inspect", "trap.csv"]);
    assert!(plain.contains("bound        3.00 KiB: no allocator needs less; 3.00 KiB in blocks of 512 B"), "{plain}");
    assert!(!plain.contains("packed"), "{plain}");
    let packed = text(&["inspect", "trap.csv", "--pack"]);
    assert!(packed.contains("packed       3.00 KiB, 0.00 % over the bound"), "{packed}");
    assert!(packed.contains("no layout is lower"), "{packed}");

    let json: serde_json::Value =
        serde_json::from_str(&text(&["inspect", "trap.csv", "--pack", "--format", "json"])).unwrap();
    let needs = &json["rows"][0]["needs"];
    assert_eq!((&needs["bound"]["rounded_bytes"], &needs["packing"]["packed_bytes"]), (&3072.into(), &3072.into()));
    assert_eq!(needs["packing"]["is_optimal"], true);
}

#[test]
fn waterfall_does_not_depend_on_jobs() {
    let folder = TempDir::new().unwrap();
    let with = |jobs: &str| {
        let arguments = ["run", "quick", "--filter", "checkerboard", "--filter", "power-law", "--pack", "--waterfall"];
        let (shown, _) = run(&folder, &[&arguments[..], &["--jobs", jobs, "--output", jobs]].concat(), 0);
        let read = |name: &str| fs::read_to_string(folder.path().join(jobs).join(name)).unwrap();
        (shown, read("runs.csv"), read("summary.md"))
    };
    let (shown, rows, summary) = with("1");
    assert_eq!(with("4").1, rows);
    for table in [&shown, &summary] {
        assert!(table.contains("over bound") && table.contains("packed"), "{table}");
    }
    assert!(summary.contains("## From requested to reserved"), "{summary}");
    let mut reader = csv::Reader::from_reader(rows.as_bytes());
    let headers = reader.headers().unwrap().clone();
    let column = |name: &str| headers.iter().position(|header| header == name).unwrap();
    let columns = ["live_peak_bytes", "live_peak_rounded_bytes", "packed_bytes"].map(column);
    let mut seen = 0;
    for row in reader.records().map(Result::unwrap) {
        let steps = columns.map(|column| row[column].parse::<u64>().unwrap());
        assert!(steps[0] > 0 && steps.is_sorted(), "{steps:?}");
        seen += 1;
    }
    assert!(seen > 1);
}
