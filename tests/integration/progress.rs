//! Progress of long operations: what the modules report, and what a terminal and a pipe show.

use crate::command;
use std::{
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
};

use oomph::{
    answer::threshold::{ThresholdQuestion, threshold},
    base::{NoProgress, Progress},
    device::DeviceSpec,
    models::Recipe,
    strategy::StrategySpec,
    suite::SourceSpec,
    trace::Trace,
};

const RECORDED: &str = "workloads/recorded/train_base.pickle.xz";

/// Every stage with its total, and how much of it was reported.
#[derive(Default)]
struct ProgressLog(Mutex<Vec<(String, u64, u64)>>);

impl Progress for ProgressLog {
    fn begin_stage(&self, stage: &str, total: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((stage.to_owned(), total, 0));
    }

    fn advance(&self, count: u64) {
        let mut stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, _, done)) = stages.last_mut() else { panic!("a stage begins before it advances") };
        *done += count;
    }
}

impl ProgressLog {
    /// The names of the stages, all of which completed.
    fn names(self) -> Vec<String> {
        let stages = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let whole = |(stage, parts, done): (String, u64, u64)| {
            assert!(parts > 0 && done == parts, "{stage}: {done} of {parts}");
            stage
        };
        stages.into_iter().map(whole).collect()
    }
}

#[test]
fn every_stage_of_a_recording_is_reported() {
    let log = ProgressLog::default();
    let spec = SourceSpec { name: RECORDED.to_owned(), ..SourceSpec::default() };
    let watched = Trace::read(&*spec.open(&log).unwrap()).unwrap();
    let stages =
        ["reading the file", "rewinding to the beginning", "making the trace", "verifying", "making the trace"];
    assert_eq!(log.names(), stages);
    assert_eq!(
        watched.events,
        Trace::read(&*spec.open(&NoProgress).unwrap()).unwrap().events,
        "progress reporting changes the result"
    );
}

#[test]
fn search_reports_every_probe() {
    let recipe = Recipe::named("checkerboard").unwrap().with("rounds", "1").with("blocks", "128");
    let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
    let (strategy, device): (_, DeviceSpec) = (StrategySpec::from("caching"), "sim".parse().unwrap());
    for jobs in [1, 3] {
        let log = ProgressLog::default();
        let progress = &log;
        let question = ThresholdQuestion { progress, jobs, ..ThresholdQuestion::new(&trace, &strategy, &device) };
        let found = threshold(&question).unwrap();
        assert!(found.probes.iter().any(|probe| !probe.fits));
        let names = log.names();
        assert_eq!(names.first().unwrap(), "caching: the whole device");
        assert!(names[1].starts_with("caching: try 1, ") && names[1].ends_with("iB"), "{names:?}");
        assert!(names.iter().any(|name| name.contains("amounts from")), "{names:?}");
        assert_eq!(names.last().unwrap(), "caching: what fails below");
    }
}

/// The output on a terminal of 120 columns; `None` without the program `script`, which provides
/// one.
fn on_a_terminal(arguments: &str) -> Option<String> {
    let command = format!("stty rows 24 cols 120 2>/dev/null; {} {arguments}", env!("CARGO_BIN_EXE_oomph"));
    let shown = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("TERM", "xterm")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    Some(String::from_utf8_lossy(&shown.stdout).into_owned())
}

#[test]
fn terminal_shows_progress_then_the_answer() {
    for (command, stage, answer) in [
        (format!("verify {RECORDED}"), "train_base.pickle.xz: reading the file", "EXACT"),
        (format!("replay {RECORDED} --strategy caching"), "train_base.pickle.xz: reading the file", "strategy"),
        ("replay random --strategy direct".to_owned(), "random: replaying", "strategy"),
        ("inspect random".to_owned(), "random: checking", "events"),
        ("leaks training".to_owned(), "training: replaying step by step", "teady"),
        ("threshold checkerboard --strategy caching".to_owned(), "checkerboard: caching: try ", "caching"),
    ] {
        let Some(shown) = on_a_terminal(&command) else { return };
        let (before, last) = shown.rsplit_once("(left: ").unwrap_or_else(|| panic!("{command}: no bar in {shown:?}"));
        assert!(shown.contains(stage) && before.contains(" %  "), "{command}: {shown:?}");
        assert!(!last.contains("[31m") && !last.contains("[32m"), "{command}: unexpected colours in {shown:?}");
        let after = last.rsplit("\u{1b}[2K").next().unwrap_or_default();
        assert!(after.contains(answer), "{command}: {after:?}");
    }
}

#[test]
fn several_recordings_show_count_and_stage() {
    let Some(shown) = on_a_terminal(&format!("verify {RECORDED} {RECORDED}")) else { return };
    assert!(shown.contains("/2 cases") && shown.contains("train_base.pickle.xz: "), "{shown:?}");
}

#[test]
fn a_pipe_sees_no_bar() {
    for arguments in [vec!["verify", RECORDED], vec!["replay", "random"], vec!["inspect", "random"]] {
        let (out, err) = command::run(env!("CARGO_MANIFEST_DIR"), &arguments, 0);
        assert_eq!(err, "", "{arguments:?}");
        assert!(!out.contains('\u{1b}'), "{arguments:?}");
    }
}
