//! Coverage-guided fuzzing of every reader. One binary holds all targets; the variable `FUZZ_TARGET` names the one to run
//! (`tools/fuzz.sh` sets it). A new reader is one function and one line in `TARGETS`, and seeds in `corpus/NAME`.

#![no_main]

use std::{
    env, fs,
    path::PathBuf,
    process,
    sync::LazyLock,
};

use libfuzzer_sys::fuzz_target;
use oomph::{
    base::NoProgress,
    device::{
        Device, DeviceSpec,
        sim::{ProfileFile, SimConfig, SimDevice},
    },
    measure::file_stem,
    models::Recipe,
    pytorch::AllocatorSettings,
    replay::verify::{Companion, Counters, RecordedConditions, verify_recording},
    report,
    strategy::StrategySpec,
    suite::{CaseSettings, SuiteFile},
    trace::{self, EventReader, Source, Trace, torch::Snapshot},
};

type Target = fn(&[u8]);

/// Every target: its name and what it does with the bytes of a file.
const TARGETS: &[(&str, Target)] = &[
    ("case_file", case_file),
    ("companion", companion),
    ("compressed", read_trace),
    ("config", config),
    ("environment", environment),
    ("minimalloc", read_trace),
    ("native", read_trace),
    ("profile", profile),
    ("recipe", recipe),
    ("rmm", read_trace),
    ("rows", rows),
    ("settings", settings),
    ("snapshot", snapshot),
    ("stalloc", read_trace),
    ("strategy", strategy),
    ("suite", suite),
    ("umpire", read_trace),
    ("verify", verify),
];

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let wanted = env::var("FUZZ_TARGET").unwrap_or_default();
    match TARGETS.iter().find(|(name, _)| *name == wanted) {
        Some((_, target)) => *target,
        None => {
            let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
            eprintln!("FUZZ_TARGET={wanted:?} is not one of: {}", names.join(" "));
            process::exit(2);
        }
    }
});

/// A folder of this process for readers that take a path.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = env::var_os("FUZZ_FOLDER").map_or_else(env::temp_dir, PathBuf::from);
    let folder = folder.join(format!("oomph-fuzz-{}", process::id()));
    fs::create_dir_all(folder.join("cases")).expect("the temporary folder is writable");
    folder
});

fuzz_target!(|file: &[u8]| (*TARGET)(file));

fn saved(name: &str, file: &[u8]) -> PathBuf {
    let path = FOLDER.join(name);
    fs::write(&path, file).expect("the temporary folder is writable");
    path
}

/// Trace files of every format and compression, recognised by content. A trace that can be read can be checked, written and
/// read again.
fn read_trace(file: &[u8]) {
    let path = saved("trace", file);
    let Ok(source) = trace::open(&path, &NoProgress) else { return };
    let is_native = trace::recognise(&path).is_ok_and(|format| format.name == trace::NATIVE);
    let Ok(whole) = Trace::read(&*source) else { return };
    let checked = trace::check(&whole);
    // A native trace can describe impossible events. Readers of other formats refuse them.
    assert!(is_native || checked.is_ok(), "an imported trace is inconsistent: {:?}", checked.err());
    let mut written = Vec::new();
    if trace::write_to(&whole, &mut written).is_ok() {
        let again = trace::open(saved("again.oomph", &written), &NoProgress).expect("a written trace can be opened");
        assert_eq!(again.name(), whole.name());
        let mut reader = again.open().expect("a written trace can be opened");
        let events = count_events(&mut *reader);
        assert_eq!(events, whole.events.len());
    }
}

fn count_events(reader: &mut dyn EventReader) -> usize {
    let mut events = 0;
    loop {
        match reader.next_chunk().expect("a written trace can be read").0.len() {
            0 => return events,
            count => events += count,
        }
    }
}

/// PyTorch snapshots: a file that can be read can be written and read again, and its trace is consistent.
fn snapshot(file: &[u8]) {
    let Ok(snapshot) = Snapshot::read(file) else { return };
    let mut written = Vec::new();
    snapshot.write(&mut written, &NoProgress).expect("writing to a vector cannot fail");
    let again = Snapshot::read(&written[..]).expect("a written snapshot can be read");
    assert_eq!(again.segments.len(), snapshot.segments.len());
    assert_eq!(again.traces.len(), snapshot.traces.len());
    for device in snapshot.devices() {
        if let Ok(recording) = snapshot.clone().into_recording("fuzz", Some(device), &NoProgress) {
            trace::check(&recording.trace).expect("the trace of a snapshot is consistent");
        }
    }
}

/// The verification of any snapshot ends.
fn verify(file: &[u8]) {
    let Ok(snapshot) = Snapshot::read(file) else { return };
    let device = SimDevice::new(SimConfig::default()).expect("the default device is possible");
    let counters = Counters::default();
    let conditions = RecordedConditions { props: device.props(), limit: None, counters: &counters };
    for number in snapshot.devices() {
        if let Ok(recording) = snapshot.clone().into_recording("fuzz", Some(number), &NoProgress) {
            let _ = verify_recording(&recording, &conditions, &NoProgress);
        }
    }
}

fn recipe(file: &[u8]) {
    if let Ok(recipe) = Recipe::from_file(&saved("recipe.toml", file)) {
        let _ = recipe.workload().map(|workload| workload.name().len());
        let _ = (recipe.title(), recipe.notes(), recipe.words());
    }
}

/// A configuration that is accepted has a program.
fn config(file: &[u8]) {
    let path = saved("config.json", file);
    let is_config = Recipe::is_config(&path);
    if let Ok(recipe) = Recipe::from_config(&path) {
        assert!(is_config, "a file is read as a configuration and not recognised as one");
        let _ = recipe.workload().map(|workload| workload.name().len());
    }
}

fn suite(file: &[u8]) {
    let Ok(text) = std::str::from_utf8(file) else { return };
    if let Ok(suite) = SuiteFile::parse("fuzz", "fuzz.toml", text) {
        let device: DeviceSpec = "sim".parse().expect("a device");
        let _ = suite.cases(&CaseSettings { device, limit: None, seed: None, timeout: None }).map(|cases| cases.len());
    }
}

/// Device profiles: a device of any profile is made or refused.
fn profile(file: &[u8]) {
    if let Ok(profile) = ProfileFile::load(&saved("profile.toml", file)) {
        let _ = SimDevice::new(SimConfig::from(profile));
    }
}

fn environment(file: &[u8]) {
    saved("env.json", file);
    let _ = report::read_environment(&FOLDER);
}

/// The tables of a run folder.
fn rows(file: &[u8]) {
    saved("runs.csv", file);
    saved("timings.csv", file);
    let _ = report::read_records(&FOLDER);
    let _ = report::read_timings(&FOLDER);
}

fn case_file(file: &[u8]) {
    saved(&format!("cases/{}.json.gz", file_stem("fuzz")), file);
    let _ = report::read_detail(&FOLDER, "fuzz");
}

fn companion(file: &[u8]) {
    saved("snapshots.csv", file);
    let _ = Companion::beside(&FOLDER.join("run.pickle"));
}

/// Strategies as users write them. What can be built is printed and read as the same strategy.
fn strategy(file: &[u8]) {
    let Ok(text) = std::str::from_utf8(file) else { return };
    let spec = StrategySpec::from(text);
    let is_valid = spec.check().is_ok();
    let again = StrategySpec::from(spec.to_string().as_str());
    assert!(!is_valid || again.check().is_ok(), "{spec} is valid, but not when it is read again");
}

fn settings(file: &[u8]) {
    if let Ok(text) = std::str::from_utf8(file) {
        let _ = AllocatorSettings::default().updated(text).and_then(|settings| settings.updated(text));
    }
}
