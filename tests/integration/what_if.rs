//! Predictions: would the program have run under other settings, or with less memory? The requests
//! of a recording are replayed with the model on the simulated driver, which knows the addresses of
//! the recording, and compared with the real run made that way.
//!
//! The table is published in `results/what-if`. To write it again:
//!
//! ```sh
//! OOMPH_PUBLISH=1 cargo test --release --test integration what_if
//! ```

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use oomph::{
    base::{NoProgress, parallel_map},
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::{
        Observer, OnOutOfMemory, Replay, ReplayOptions, replay,
        verify::{Companion, verify},
    },
    strategy::{EventSink, Setup, StrategySpec},
    suite::all_cores,
    trace::{Trace, torch::Recording},
};

/// Which run is predicted from which.
struct Question {
    /// The recording whose requests are replayed; it was made under default settings.
    from: &'static str,
    /// The real run.
    real: String,
}

fn questions() -> Vec<Question> {
    let mut questions = Vec::new();
    for from in ["varlen", "train_base", "streams", "infer_kv"] {
        for setting in ["exp", "exp_round", "gc", "round4", "split64"] {
            questions.push(Question { from, real: format!("{from}.{setting}") });
        }
    }
    for cap in ["042", "047", "052"] {
        for setting in ["", ".exp", ".gc", ".split64"] {
            questions.push(Question { from: "varlen", real: format!("varlen_cap{cap}{setting}") });
        }
    }
    for setting in ["exp", "gc", "split32"] {
        questions.push(Question { from: "fuzz1", real: format!("fuzz1.{setting}") });
    }
    questions
}

/// Real and predicted results.
struct Answer {
    from: &'static str,
    real: String,
    settings: String,
    fraction: Option<f64>,
    real_peak: u64,
    predicted_peak: u64,
    real_oom: bool,
    predicted_oom: bool,
}

impl Answer {
    fn peak_is_exact(&self) -> bool {
        self.real_peak == self.predicted_peak
    }

    fn oom_is_right(&self) -> bool {
        self.real_oom == self.predicted_oom
    }

    fn error_percent(&self) -> f64 {
        (self.predicted_peak as f64 / self.real_peak as f64 - 1.0) * 100.0
    }
}

struct NoObserver;

impl EventSink for NoObserver {}

impl Observer for NoObserver {}

fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"))
}

/// The requests of a recording, with the calls of `empty_cache` that `verify` infers.
fn recorded_requests(name: &str) -> Trace {
    let recording = Recording::open(path_of(name), None, &NoProgress).unwrap();
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let verification =
        verify(&recording, &Setup { props: device.props(), limit: None }, &Default::default(), &NoProgress);
    recording.with_empty_caches(verification.empty_caches, &NoProgress).unwrap().trace
}

fn answer(question: &Question, trace: &Trace) -> Answer {
    let Question { from, real } = question;
    let settings = Recording::open(path_of(real), None, &NoProgress).unwrap().settings.conf().to_owned();
    let Companion { memory_fraction: fraction, counters, .. } = Companion::beside(&path_of(real)).unwrap().unwrap();

    let mut device = SimDevice::new(SimConfig::default()).unwrap().placing_as(&trace.placements);
    let limit = fraction.map(|fraction| (fraction * device.props().total_bytes as f64) as u64);
    let spec = StrategySpec { name: "caching".to_owned(), parameters: settings.clone() };
    let mut strategy = spec.build(&Setup { props: device.props(), limit }).unwrap();
    let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Stop, ..ReplayOptions::default() };
    let replayed = replay(trace, &mut *strategy, &mut device, &options, &mut NoObserver).unwrap();
    Answer {
        from,
        real: real.clone(),
        settings,
        fraction,
        real_peak: counters.peak_reserved.unwrap(),
        predicted_peak: strategy.stats().peak.reserved,
        real_oom: counters.ooms.unwrap() > 0,
        predicted_oom: replayed.ooms > 0,
    }
}

/// All answers, computed on all cores, in the order of the questions.
fn answers() -> Vec<Answer> {
    let questions = questions();
    let mut traces = BTreeMap::new();
    for question in &questions {
        traces.entry(question.from).or_insert_with(|| recorded_requests(question.from));
    }
    parallel_map(&questions, all_cores(), |question| answer(question, &traces[question.from]))
}

#[test]
fn predictions_match_real_runs() {
    let answers = answers();
    if env::var_os("OOMPH_PUBLISH").is_some() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/what-if");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("what-if.csv"), csv(&answers)).unwrap();
        fs::write(folder.join("what-if.md"), markdown(&answers)).unwrap();
    }
    let exact = answers.iter().filter(|answer| answer.peak_is_exact()).count();
    assert!(answers.iter().all(Answer::oom_is_right), "{}", markdown(&answers));
    assert!(exact * 10 >= answers.len() * 9, "{}", markdown(&answers));
}

/// In the process of this recording, host memory was given back while the model was loaded, so that later segments lie on
/// both sides of the first one.
#[test]
fn replay_under_the_recorded_settings_gives_the_recorded_peak() {
    for name in ["infer_kv", "infer_kv.gc", "infer_kv.round4", "infer_kv.split64"] {
        let recording = Recording::open(path_of(name), None, &NoProgress).unwrap();
        let settings = recording.settings.conf().to_owned();
        let spec = StrategySpec { name: "caching".to_owned(), parameters: settings };
        let run = Replay::new(&recording).strategy(spec).run().unwrap();
        let counters = Companion::beside(&path_of(name)).unwrap().unwrap().counters;
        assert_eq!(Some(run.stats.peak.reserved), counters.peak_reserved, "{name}");
    }
}

fn csv(answers: &[Answer]) -> String {
    let mut table = String::from(
        "from,real,settings,memory_fraction,real_peak_reserved_bytes,foretold_peak_reserved_bytes,real_oom,foretold_oom\n",
    );
    for answer in answers {
        let Answer { from, real, settings, real_peak, predicted_peak, real_oom, predicted_oom, .. } = answer;
        let fraction = answer.fraction.map(|fraction| fraction.to_string()).unwrap_or_default();
        let settings = if settings.contains(',') { format!("\"{settings}\"") } else { settings.clone() };
        let _ = writeln!(
            table,
            "{from},{real},{settings},{fraction},{real_peak},{predicted_peak},{},{}",
            u8::from(*real_oom),
            u8::from(*predicted_oom)
        );
    }
    table
}

fn markdown(answers: &[Answer]) -> String {
    let exact = answers.iter().filter(|answer| answer.peak_is_exact()).count();
    let right = answers.iter().filter(|answer| answer.oom_is_right()).count();
    let count = answers.len();
    let mut text = format!(
        "# What if\n\n\
        The requests of a recording made under default settings without a limit, replayed under other settings or with \
        less memory, and compared with the real run made that way (`workloads/recorded`, PyTorch 2.11 on an NVIDIA \
        H200). The simulated driver places memory as it lay in the recording, as far as the requests to it are the same; a \
        capped run ends where memory runs out.\n\n\
        Peak reserved memory is predicted to the byte in {exact} of {count} pairs, and whether memory runs out in \
        {right} of {count}. Written by `OOMPH_PUBLISH=1 cargo test --release --test integration what_if`, which also \
        checks the limits (90 % and all).\n\n\
        | requests of | run | settings | share of the memory | peak reserved, real | predicted | error | out of memory, real | predicted |\n\
        |---|---|---|---:|---:|---:|---:|---|---|\n"
    );
    let yes = |oom: bool| if oom { "yes" } else { "no" };
    for answer in answers {
        let error = if answer.peak_is_exact() { "0".to_owned() } else { format!("{:+.2} %", answer.error_percent()) };
        let fraction = answer.fraction.map(|fraction| format!("{:.1} %", fraction * 100.0)).unwrap_or_default();
        let settings = if answer.settings.is_empty() { String::new() } else { format!("`{}`", answer.settings) };
        let _ = writeln!(
            text,
            "| {} | {} | {settings} | {fraction} | {} | {} | {error} | {} | {} |",
            answer.from,
            answer.real,
            answer.real_peak,
            answer.predicted_peak,
            yes(answer.real_oom),
            yes(answer.predicted_oom)
        );
    }
    text
}
