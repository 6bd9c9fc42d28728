//! Plugins with a seeded bug, each of which a kind of stress must find; and correct plugins, on which it must raise no alarm.
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

/// Which kind of stress finds a bug. How much it plays is counted, not timed: a busy machine finds what an idle one does.
#[derive(Clone, Copy, PartialEq)]
enum FoundBy {
    /// Every driver call fails in turn: a trace of at most 20 events.
    Faults,
    /// Programs that are repeated: a trace of at most 20 events.
    History,
    /// The same, but it shows only after many calls.
    LongHistory,
    /// Random programs: a trace of at most 20 events.
    Properties,
    /// The same, but it shows only with many blocks.
    ManyBlocks,
    /// A plugin that serves nothing: there is no trace.
    NoService,
    /// Calls that break a rule: there is no trace.
    Misuse,
    /// Calls from several threads: there is no trace. A race is a matter of luck, so this is tried often.
    Threads,
}
use FoundBy::{Faults, History, LongHistory, ManyBlocks, Misuse, NoService, Properties, Threads};

impl FoundBy {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Faults => &["faults"],
            History | LongHistory => &["history", "--cases", "4"],
            Properties | ManyBlocks | NoService => &["properties", "--cases", "64"],
            Misuse => &["misuse"],
            Threads => &["threads", "--processes", "2000"],
        }
    }

    /// Whether a bug must show in a short program.
    fn is_short(self) -> bool {
        matches!(self, Faults | History | Properties)
    }
}

/// Number, what is wrong, whether it is in an optional function, and what finds it.
type SeededBug = (u32, &'static str, bool, FoundBy);

const BUGS: [SeededBug; 37] = [
    (1, "the rest of a split block begins inside the block", false, Faults),
    (2, "sizes are rounded down", false, History),
    (3, "some blocks are not aligned", false, Faults),
    (4, "the 1000th free enters a block twice", false, LongHistory),
    (5, "every 50th free is forgotten", false, LongHistory),
    (6, "every 50th free is forgotten, and the books say otherwise", true, LongHistory),
    (7, "there is no lock", false, Threads),
    (8, "a request of zero bytes crashes", false, Misuse),
    (9, "a size near 2^64 wraps around", false, Misuse),
    (10, "blocks of all streams are in one list", false, History),
    (11, "other streams are forgotten", true, Faults),
    (12, "the event is recorded on the wrong stream", true, History),
    (13, "events are not asked whether they are done", true, Faults),
    (14, "running out of memory crashes", false, Faults),
    (15, "cached memory is not given back when memory runs out", false, Properties),
    (16, "every request fails", false, NoService),
    (17, "a block is reused for a larger request", false, Faults),
    (18, "sizes are kept in 32 bits", false, Properties),
    (19, "segments with live blocks are given back", false, History),
    (20, "every 64th request never returns", false, LongHistory),
    (21, "the lock is kept when memory runs out", false, Faults),
    (22, "it says that it holds half of what it holds", true, Faults),
    (23, "a merged block is too large", false, Properties),
    (24, "freed blocks go to the default stream", false, History),
    (25, "a segment is given back twice", false, Faults),
    (26, "the segment of a large block is given back at its free, and used again", false, Faults),
    (27, "events are never used again", true, LongHistory),
    (28, "blocks of segments that were given back stay in the list", false, Faults),
    (29, "each block is given back to the driver, and kept", false, Faults),
    (30, "reset forgets segments instead of giving them back", true, Faults),
    (31, "events are used after they were destroyed", true, Faults),
    (32, "a failed request is counted as held", true, Faults),
    (33, "running out of memory throws", false, Faults),
    (34, "the fifth stream and later ones share a list", false, Properties),
    (35, "live blocks of a segment are counted in 8 bits", true, ManyBlocks),
    (36, "the lock is not held while memory is given back", false, Threads),
    (37, "a thread's blocks are lost when it ends", false, Threads),
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
    for_each_bug(find_bug);
}

/// For the scheduled run: it depends on the machine's speed.
#[test]
#[ignore = "takes ten minutes"]
fn every_seeded_bug_is_found_within_the_default_time() {
    for_each_bug(|fixture, &(number, what, in_hook, found_by)| {
        let (rows, code) = stressed(fixture, &build_bug(fixture, number, in_hook), "120");
        let failed: Vec<&Value> = rows.iter().filter(|row| row["verdict"] == "failed").collect();
        assert!(code == Some(106) && !failed.is_empty(), "{number}, {what}: {rows:#?}");
        assert!(!found_by.is_short() || is_short(&failed), "{number}, {what}: {failed:#?}");
    });
}

/// Two at a time: this takes longer than all other tests together.
fn for_each_bug(find: fn(&PluginFixture, &SeededBug)) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let Some(fixture) = PluginFixture::open() else { return };
                while let Some(bug) = BUGS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    find(&fixture, bug);
                }
            });
        }
    });
}

/// Whether one of the failures has a trace of at most 20 events.
fn is_short(failed: &[&Value]) -> bool {
    let traces = failed.iter().filter(|row| row["trace"] != "");
    traces.filter_map(|row| row["trace_events"].as_u64()).min().is_some_and(|fewest| fewest <= 20)
}

fn find_bug(fixture: &PluginFixture, &(number, what, in_hook, found_by): &SeededBug) {
    let library = build_bug(fixture, number, in_hook);
    let strategy = plugin(&library);
    let saved = format!("failures{number}");
    let options = ["--strategy", &strategy, "--save", &saved, "--format", "json"];
    let output = fixture.oomph(&[&["stress"], found_by.arguments(), &options[..]].concat());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(106), "{number}, {what}: {said}");
    let document: Value = serde_json::from_str(&said).unwrap();
    let rows = document["rows"].as_array().unwrap();
    let failed: Vec<&Value> =
        rows.iter().filter(|row| row["verdict"] == "failed" || row["consequence"] == "corrupts").collect();
    assert!(!found_by.is_short() || is_short(&failed), "{number}, {what}: {said}");
    say(&format!("bug {number}, {what}: {}", failed[0]["detail"]));
}

fn build_bug(fixture: &PluginFixture, number: u32, in_hook: bool) -> PathBuf {
    let mut flags = vec![format!("-DSEEDED={number}")];
    flags.extend(in_hook.then(|| "-DHOOKS".to_owned()));
    build(fixture, "caching.cpp", &flags, &format!("bug{number}"))
}

/// `stress all` plays each kind that finds bugs here. These three bugs show in the kinds that it plays first.
#[test]
fn all_kinds_together_find_bugs() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (number, kind) in [(3, "faults"), (7, "threads"), (8, "misuse")] {
        let (rows, code) = stressed(&fixture, &build_bug(&fixture, number, false), "20");
        let is_found = rows.iter().any(|row| row["kind"] == kind && row["verdict"] == "failed");
        assert!(code == Some(106) && is_found, "{number}: {rows:#?}");
    }
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
