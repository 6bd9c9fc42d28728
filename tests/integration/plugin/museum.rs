//! Plugins with a seeded bug, each of which `stress all` must find; and correct plugins, on which it must raise no alarm.
//!
//! The sources are in `tests/plugins`. They call CUDA, which the simulated device answers.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use serde_json::Value;

use super::{PluginFixture, plugin, say};

/// How a bug shows.
enum Shows {
    /// In a program of at most 20 events.
    AtOnce,
    /// Only after a long history.
    Later,
    /// Without a trace: in several threads, by a misuse, or because nothing is served.
    WithoutTrace,
    /// Without a trace, and only if threads meet in a short moment.
    ByChance,
}
use Shows::{AtOnce, ByChance, Later, WithoutTrace};

/// Number, what is wrong, whether it is in an optional function, and how it shows.
const BUGS: [(u32, &str, bool, Shows); 37] = [
    (1, "the rest of a split block begins inside the block", false, AtOnce),
    (2, "sizes are rounded down", false, AtOnce),
    (3, "some blocks are not aligned", false, AtOnce),
    (4, "the 1000th free enters a block twice", false, Later),
    (5, "every 50th free is forgotten", false, Later),
    (6, "every 50th free is forgotten, and the books say otherwise", true, Later),
    (7, "there is no lock", false, WithoutTrace),
    (8, "a request of zero bytes crashes", false, WithoutTrace),
    (9, "a size near 2^64 wraps around", false, WithoutTrace),
    (10, "blocks of all streams are in one list", false, AtOnce),
    (11, "other streams are forgotten", true, AtOnce),
    (12, "the event is recorded on the wrong stream", true, AtOnce),
    (13, "events are not asked whether they are done", true, AtOnce),
    (14, "running out of memory crashes", false, AtOnce),
    (15, "cached memory is not given back when memory runs out", false, AtOnce),
    (16, "every request fails", false, WithoutTrace),
    (17, "a block is reused for a larger request", false, AtOnce),
    (18, "sizes are kept in 32 bits", false, AtOnce),
    (19, "segments with live blocks are given back", false, AtOnce),
    (20, "every 64th request never returns", false, Later),
    (21, "the lock is kept when memory runs out", false, AtOnce),
    (22, "it says that it holds half of what it holds", true, AtOnce),
    (23, "a merged block is too large", false, AtOnce),
    (24, "freed blocks go to the default stream", false, AtOnce),
    (25, "a segment is given back twice", false, AtOnce),
    (26, "the segment of a large block is given back at its free, and used again", false, AtOnce),
    (27, "events are never used again", true, Later),
    (28, "blocks of segments that were given back stay in the list", false, AtOnce),
    (29, "each block is given back to the driver, and kept", false, AtOnce),
    (30, "reset forgets segments instead of giving them back", true, AtOnce),
    (31, "events are used after they were destroyed", true, AtOnce),
    (32, "a failed request is counted as held", true, AtOnce),
    (33, "running out of memory throws", false, AtOnce),
    (34, "the fifth stream and later ones share a list", false, AtOnce),
    (35, "live blocks of a segment are counted in 8 bits", true, Later),
    (36, "the lock is not held while memory is given back", false, ByChance),
    (37, "a thread's blocks are lost when it ends", false, WithoutTrace),
];

/// Correct plugins: the macro that chooses one.
const CORRECT: [&str; 5] = ["DIRECT", "POOLED", "ORDERED", "MAPPED", "ARENA"];

fn build(fixture: &PluginFixture, source: &str, flags: &[String], name: &str) -> PathBuf {
    let library = fixture.0.path().join(format!("{name}.so"));
    let flags: Vec<&str> =
        ["-shared", "-fPIC", "-lstdc++"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    fixture.compile(&flags, &Path::new("../../plugins").join(source).to_string_lossy(), &library);
    library
}

/// The rows of `stress all`, and its exit code.
fn stressed(fixture: &PluginFixture, library: &Path, seconds: &str) -> (Vec<Value>, Option<i32>) {
    let strategy = plugin(library);
    let output = fixture.oomph(&["stress", "all", "--strategy", &strategy, "--seconds", seconds, "--format", "json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    let document: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}: {said}", library.display()));
    (document["rows"].as_array().cloned().unwrap_or_default(), output.status.code())
}

#[test]
fn every_seeded_bug_is_found() {
    let next = AtomicUsize::new(0);
    // Two at a time: this test takes longer than all others together.
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let Some(fixture) = PluginFixture::open() else { return };
                while let Some(bug) = BUGS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    find_bug(&fixture, bug);
                }
            });
        }
    });
}

fn find_bug(fixture: &PluginFixture, &(number, what, in_hook, ref shows): &(u32, &str, bool, Shows)) {
    let mut flags = vec![format!("-DSEEDED={number}")];
    flags.extend(in_hook.then(|| "-DHOOKS".to_owned()));
    let library = build(fixture, "caching.cpp", &flags, &format!("bug{number}"));
    // No search ends early without a trace; these bugs are found in the first seconds.
    let seconds = match shows {
        WithoutTrace => "20",
        ByChance => "60",
        AtOnce | Later => "120",
    };
    let (rows, code) = stressed(fixture, &library, seconds);
    let failed: Vec<&Value> = rows.iter().filter(|row| row["verdict"] == "failed").collect();
    assert!(code == Some(106) && !failed.is_empty(), "{number}, {what}: {rows:#?}");
    let fewest = failed.iter().filter(|row| row["trace"] != "").filter_map(|row| row["trace_events"].as_u64()).min();
    if let AtOnce = shows {
        assert!(fewest.is_some_and(|fewest| fewest <= 20), "{number}, {what}: {failed:#?}");
    }
    say(&format!("bug {number}, {what}: {}", failed[0]["detail"]));
}

#[test]
fn leaked_address_ranges_are_found() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = build(&fixture, "correct.cpp", &["-DMAPPED".to_owned(), "-DLEAKS_RANGES".to_owned()], "ranges");
    // By count, not by time: the second program runs out of memory, and that is where it leaks.
    let strategy = plugin(&library);
    let options = ["--strategy", &strategy, "--rounds", "64", "--cases", "4", "--format", "json"];
    let output = fixture.oomph(&[&["stress", "history"][..], &options].concat());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(106), "{said}");
    assert!(said.contains("it leaks address ranges"), "{said}");
}

#[test]
fn correct_plugins_raise_no_alarm() {
    let Some(fixture) = PluginFixture::open() else { return };
    let mut all: Vec<PathBuf> =
        CORRECT.iter().map(|which| build(&fixture, "correct.cpp", &[format!("-D{which}")], which)).collect();
    all.push(build(&fixture, "caching.cpp", &[], "without_hooks"));
    all.push(build(&fixture, "caching.cpp", &["-DHOOKS".to_owned()], "with_hooks"));
    all.push(fixture.allocator("WELL_BEHAVED"));
    let mut passed = BTreeSet::new();
    for library in all {
        let (rows, code) = stressed(&fixture, &library, "8");
        assert_eq!(code, Some(0), "{}: {rows:#?}", library.display());
        for row in &rows {
            // On a busy machine the seconds may be over before the last kind begins.
            let is_late = row["verdict"] == "skipped" && row["detail"] == "no time was left for it";
            assert!(row["verdict"] == "passed" || is_late, "{}: {row:#?}", library.display());
            passed.extend((row["verdict"] == "passed").then(|| row["kind"].to_string()));
        }
    }
    assert_eq!(passed.len(), 6, "{passed:?}");
}
