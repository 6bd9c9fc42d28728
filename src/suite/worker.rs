//! Cases in worker processes, so that a crash, a lost GPU context or a hang costs only one case.
//!
//! A worker is this same program, started for one case: [`WorkerProcess`] starts it, and it calls
//! [`carry_out`]. They exchange lines. The worker reads the case from its standard input, and
//! perhaps [`STOP`] later; the end of the input means that the parent is gone. It writes the
//! outcome as the last line of its standard output. Two workers that take turns ([`take_turns`])
//! time one pass per line [`PASS`] and answer with its nanoseconds. `cli` reads and writes the worker's pipes,
//! because a library neither reads standard input nor exits.

use std::{
    ffi::OsString,
    io::{self, BufRead, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Case, CaseOutcome, CaseRunner, CaseScope, CaseTimeout, InProcess, in_process, run::shuffled};
use crate::{
    base::{NoProgress, exit_description, exit_signal, last_bytes},
    measure::{PassTurn, Status},
    plugin::{self, CALL_MARK, HANG_MARK},
};

/// The line that asks a worker to end its case early and to return the outcome so far.
pub const STOP: &str = "stop";
/// The line that asks a worker of [`CaseScope::Turns`] for its next pass.
pub const PASS: &str = "pass";
/// The line with which such a worker says that its next pass can begin.
pub const READY: &str = "ready";
/// How often the clock and the stop flag are checked while a worker runs.
const CHECK_EVERY: Duration = Duration::from_millis(20);
/// How long a pipe may stay open after its process has ended: another process may have inherited
/// it.
const PIPE_GRACE: Duration = Duration::from_secs(1);
/// Output of a worker beyond this is not read.
const MOST_OUTPUT_BYTES: u64 = 1 << 30;
/// How much of a worker's standard error is kept, for its last line.
const KEPT_ERROR_BYTES: usize = 4096;

/// A line that is not a case, or an outcome that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The line was not written by [`WorkerProcess`].
    #[error("a worker is started by oomph itself and reads its case from standard input: {0}")]
    Order(serde_json::Error),
    /// The outcome cannot be written.
    #[error("the outcome cannot be written: {0}")]
    Outcome(serde_json::Error),
}

/// Reads the line that the parent wrote. The source of the case is not open yet.
pub fn read_case(line: &str) -> Result<Case, WorkerError> {
    serde_json::from_str(line).map_err(WorkerError::Order)
}

/// Runs a case of [`read_case`] in this process and returns its outcome as a line. Errors of the
/// case are part of the outcome.
pub fn carry_out(case: Case, stop: &AtomicBool) -> Result<String, WorkerError> {
    let outcome = match case.origin.open(&NoProgress) {
        Ok(source) => InProcess { stop: Some(stop) }.run(&Case { source: Arc::from(source), ..case }),
        Err(error) => CaseOutcome::failed(&case.label, &error.to_string()),
    };
    serde_json::to_string(&outcome).map_err(WorkerError::Outcome)
}

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
enum WorkerFailure {
    /// The worker could not be started.
    #[error("the worker process cannot be started: {0}")]
    NotStarted(io::Error),
    /// The system does not say how it ended.
    #[error("the worker process cannot be waited for: {0}")]
    Unknown(io::Error),
    /// It took too long and was killed.
    #[error("timed out after {0}")]
    TimedOut(CaseTimeout),
    /// A plugin did not return from a call, so the worker ended itself.
    #[error("plugin {0}")]
    Hung(String),
    /// It ended with a signal or an error code.
    #[error("{}the worker process {}{}", plugin_prefix(.plugin_call), exit_description(*.status), last_line_suffix(.last_line))]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// The plugin and the call in which it died, if so.
        plugin_call: Option<String>,
        /// The last line of its standard error.
        last_line: String,
    },
    /// It ended without error and without a valid outcome.
    #[error("the worker process ended without an outcome: {reason}{}", last_line_suffix(.last_line))]
    InvalidOutcome {
        /// What is wrong with its output.
        reason: serde_json::Error,
        /// The last line of its standard error.
        last_line: String,
    },
}

impl WorkerFailure {
    /// The status of the case: interrupted if a signal asked the worker to end, otherwise an error.
    fn status(&self) -> Status {
        match self {
            WorkerFailure::Ended { status, .. } if is_interruption(*status) => Status::Interrupted,
            _ => Status::Error,
        }
    }
}

/// Whether a signal asked the process to end: SIGHUP, SIGINT or SIGTERM.
fn is_interruption(status: ExitStatus) -> bool {
    matches!(exit_signal(status), Some(1 | 2 | 15))
}

fn plugin_prefix(plugin_call: &Option<String>) -> String {
    plugin_call.as_ref().map_or_else(String::new, |call| format!("plugin {call}: "))
}

fn last_line_suffix(line: &str) -> String {
    if line.is_empty() { String::new() } else { format!("; last output: {line}") }
}

/// What a worker wrote to its standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct WorkerStderr {
    /// The plugin and the call that did not return.
    hang: Option<String>,
    /// The plugin and the call in which the process died.
    plugin_call: Option<String>,
    /// The last other line that is not empty.
    last_line: String,
}

impl WorkerStderr {
    fn read(bytes: &[u8]) -> WorkerStderr {
        let text = String::from_utf8_lossy(bytes);
        let marked = |mark: &str| text.lines().rev().find_map(|line| line.strip_prefix(mark)).map(str::to_owned);
        let is_marked = |line: &&str| [CALL_MARK, HANG_MARK].iter().any(|mark| line.starts_with(mark));
        let others: Vec<&str> = text.lines().filter(|line| !is_marked(line)).collect();
        WorkerStderr {
            hang: marked(HANG_MARK),
            plugin_call: marked(CALL_MARK),
            last_line: last_line(&others.join("\n")).to_owned(),
        }
    }

    /// The failure of a worker that ended like this.
    fn failure(self, status: ExitStatus) -> WorkerFailure {
        let WorkerStderr { hang, plugin_call, last_line } = self;
        match hang {
            Some(call) => WorkerFailure::Hung(call),
            None => WorkerFailure::Ended { status, plugin_call, last_line },
        }
    }
}

/// The last line that is not empty.
fn last_line(text: &str) -> &str {
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default()
}

/// Runs every case in its own process. A worker that dies, exceeds the time-out or writes no valid
/// outcome fails only its case.
#[derive(Clone, Debug)]
pub struct WorkerProcess<'a> {
    /// The program that becomes the worker and calls [`carry_out`].
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Set from outside to end the running case early.
    pub stop: Option<&'a AtomicBool>,
}

impl CaseRunner for WorkerProcess<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        self.outcome_of(case).unwrap_or_else(|failure| {
            let mut outcome = CaseOutcome::failed(&case.label, &failure.to_string());
            outcome.record.status = failure.status();
            outcome.worker_failed = true;
            outcome
        })
    }
}

impl WorkerProcess<'_> {
    fn outcome_of(&self, case: &Case) -> Result<CaseOutcome, WorkerFailure> {
        let mut worker = self.start(case).map_err(WorkerFailure::NotStarted)?;
        let status = self.wait(case, &mut worker)?;
        let written = worker.output.recv_timeout(PIPE_GRACE).unwrap_or_default();
        let errors = WorkerStderr::read(&worker.errors.recv_timeout(PIPE_GRACE).unwrap_or_default());
        match (serde_json::from_str::<CaseOutcome>(last_line(&String::from_utf8_lossy(&written))), status.success()) {
            (Ok(outcome), true) => Ok(outcome),
            // The figures are valid, but the later failure must be visible.
            (Ok(mut outcome), false) => {
                outcome.worker_failed = true;
                outcome.record.status = Status::Error;
                outcome.record.reason =
                    format!("the case was done, and then the worker process {}", exit_description(status));
                Ok(outcome)
            }
            (Err(_), false) => Err(errors.failure(status)),
            (Err(reason), true) => Err(WorkerFailure::InvalidOutcome { reason, last_line: errors.last_line }),
        }
    }

    fn start(&self, case: &Case) -> io::Result<RunningWorker> {
        let (mut child, input) = self.spawn(case)?;
        let output = last_bytes(child.stdout.take().map(|pipe| pipe.take(MOST_OUTPUT_BYTES)), usize::MAX);
        let errors = last_bytes(child.stderr.take().map(|pipe| pipe.take(MOST_OUTPUT_BYTES)), KEPT_ERROR_BYTES);
        Ok(RunningWorker { child, input, output, errors })
    }

    /// Starts the process and sends it the case.
    fn spawn(&self, case: &Case) -> io::Result<(Child, Option<ChildStdin>)> {
        let order = serde_json::to_string(case)?;
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take();
        send(&mut input, &order);
        Ok((child, input))
    }

    /// Waits until the worker ends, or its time is up.
    fn wait(&self, case: &Case, worker: &mut RunningWorker) -> Result<ExitStatus, WorkerFailure> {
        let began = Instant::now();
        let timeout = case.timeout.or_else(|| plugin::is_plugin(&case.strategy).then_some(CaseTimeout::OF_PLUGINS));
        let mut stop_sent = false;
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(status) = worker.child.try_wait().map_err(WorkerFailure::Unknown)? {
                return Ok(status);
            }
            if let Some(timeout) = timeout
                && began.elapsed() >= timeout.duration()
            {
                return Err(WorkerFailure::TimedOut(timeout));
            }
            if !stop_sent && self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                send(&mut worker.input, STOP);
                stop_sent = true;
            }
            // The pause grows: short cases end promptly, and long ones are not disturbed.
            thread::sleep(pause);
            pause = (pause * 2).min(CHECK_EVERY);
        }
    }
}

/// A running worker, killed when dropped, also by a panic.
struct RunningWorker {
    child: Child,
    /// The worker ends when this closes.
    input: Option<ChildStdin>,
    output: Receiver<Vec<u8>>,
    errors: Receiver<Vec<u8>>,
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rounds of a case in two programs that took turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TurnTimes {
    /// Which case.
    pub case_id: String,
    /// Its strategy.
    pub strategy: String,
    /// With how many threads.
    pub threads: Option<u16>,
    /// Per round: the passes of the old and of the new program in nanoseconds, each pair one directly after the other.
    pub rounds: Vec<Vec<(u64, u64)>>,
    /// Why it could not be timed to the end.
    pub failure: Option<String>,
}

/// Pairs of passes in a round: at least so many, and more while passes are short. Processes of one program differ by about
/// 3 %, passes of one process by less, so that more rounds say more than more pairs.
const LEAST_PAIRS: usize = 4;
const MOST_PAIRS: usize = 20;
/// Enough pairs once their passes together took this long, in nanoseconds.
const ENOUGH_NS: u64 = 20_000_000;

/// A case and its twin, which the second program runs.
pub type CasePair = (Case, Case);

/// Lets two programs take turns: in every round each case is opened by a new process of both, which then time one pass at a
/// time, one directly after the other. Whatever slows the machine down slows both. The order of cases differs from round
/// to round, and so does the program that begins. After `least` rounds and each further one, `enough` decides whether there
/// is another, up to `most`.
pub fn take_turns(
    cases: &[CasePair],
    programs: [&WorkerProcess<'_>; 2],
    (least, most): (u32, u32),
    mut listener: impl FnMut(u32, &Case),
    mut enough: impl FnMut(&[TurnTimes]) -> bool,
) -> Vec<TurnTimes> {
    let orders: Vec<(CasePair, TurnTimes)> = cases.iter().flat_map(turn_orders).collect();
    let (orders, mut times): (Vec<CasePair>, Vec<TurnTimes>) = orders.into_iter().unzip();
    let stopped = || programs.iter().any(|program| program.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)));
    for round in 0..most {
        if round >= least && enough(&times) {
            break;
        }
        for (turn, place) in shuffled(orders.len(), round).into_iter().enumerate() {
            if stopped() {
                return times;
            }
            if times[place].failure.is_none() {
                listener(round, &orders[place].1);
                match turn_round(&orders[place], programs, (turn + round as usize) % 2 == 1) {
                    Ok(pairs) => times[place].rounds.push(pairs),
                    Err(reason) => times[place].failure = Some(reason),
                }
            }
        }
    }
    times
}

/// A case with one thread, and with each of its numbers of threads.
fn turn_orders((old, new): &CasePair) -> Vec<(CasePair, TurnTimes)> {
    let threads = [None].into_iter().chain(new.threads.iter().copied().map(Some));
    let order = |case: &Case, threads: Option<u16>| Case {
        scope: CaseScope::Turns,
        threads: threads.into_iter().collect(),
        ..case.clone()
    };
    let times = |threads| TurnTimes {
        case_id: new.label.case_id(),
        strategy: new.label.strategy.clone(),
        threads,
        ..TurnTimes::default()
    };
    threads.map(|threads| ((order(old, threads), order(new, threads)), times(threads))).collect()
}

/// One round of one case. The program that goes first changes from pair to pair.
fn turn_round(
    (old, new): &CasePair,
    programs: [&WorkerProcess<'_>; 2],
    new_begins: bool,
) -> Result<Vec<(u64, u64)>, String> {
    // One after the other: while a program reads its source, the other one must not measure.
    let mut workers = [TurnWorker::start(programs[0], old)?, TurnWorker::start(programs[1], new)?];
    let (mut pairs, mut taken) = (Vec::new(), 0);
    while pairs.len() < LEAST_PAIRS || (pairs.len() < MOST_PAIRS && taken < ENOUGH_NS) {
        let first = usize::from(new_begins) ^ (pairs.len() % 2);
        let mut pair = [0; 2];
        for side in [first, 1 - first] {
            pair[side] = workers[side].pass()?;
        }
        taken += pair[0] + pair[1];
        pairs.push((pair[0], pair[1]));
    }
    Ok(pairs)
}

/// A worker that times a pass whenever it is asked to. It is killed when dropped.
struct TurnWorker<'a> {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Receiver<Vec<u8>>,
    program: &'a WorkerProcess<'a>,
    patience: Duration,
}

impl<'a> TurnWorker<'a> {
    /// Starts it and waits until its first pass can begin.
    fn start(program: &'a WorkerProcess<'a>, case: &Case) -> Result<TurnWorker<'a>, String> {
        let (mut child, input) = program.spawn(case).map_err(|error| WorkerFailure::NotStarted(error).to_string())?;
        let errors = last_bytes(child.stderr.take(), KEPT_ERROR_BYTES);
        let output = child.stdout.take();
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let lines = output.into_iter().flat_map(|output| io::BufReader::new(output).lines().map_while(Result::ok));
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let patience = case.timeout.unwrap_or(CaseTimeout::OF_PLUGINS).duration();
        let mut worker = TurnWorker { child, input, lines, errors, program, patience };
        match worker.answer()?.as_str() {
            READY => Ok(worker),
            _ => Err(format!("{} does not take turns: it is an older oomph, or none", program.program.display())),
        }
    }

    fn pass(&mut self) -> Result<u64, String> {
        send(&mut self.input, PASS);
        let answer = self.answer()?;
        answer.parse().map_err(|_| format!("{} answered '{answer}'", self.program.program.display()))
    }

    /// Its next line.
    fn answer(&mut self) -> Result<String, String> {
        let began = Instant::now();
        loop {
            match self.lines.recv_timeout(CHECK_EVERY) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => {
                    let errors = WorkerStderr::read(&self.errors.recv_timeout(PIPE_GRACE).unwrap_or_default());
                    let status = self.child.wait().map_err(|error| WorkerFailure::Unknown(error).to_string())?;
                    return Err(errors.failure(status).to_string());
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() >= self.patience => {
                    return Err(format!("timed out after {}", humantime::format_duration(self.patience)));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for TurnWorker<'_> {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Times a case of [`read_case`] pass by pass. Returns why it could not.
pub fn carry_out_turns(case: Case, stop: &AtomicBool, turn: PassTurn<'_>) -> Result<(), String> {
    let source = case.origin.open(&NoProgress).map_err(|error| error.to_string())?;
    in_process::time_in_turns(&Case { source: Arc::from(source), ..case }, stop, turn)
}

/// Sends a line. If the worker no longer reads, the way it ends says why.
fn send(input: &mut Option<ChildStdin>, line: &str) {
    if let Some(input) = input {
        let _ = input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush());
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::{
        suite::{CaseSettings, SuiteFile, test_case},
        trace::Trace,
    };

    /// A worker that is a shell script; its arguments begin at `$1`.
    fn script<'a>(text: &str, arguments: &[&str]) -> WorkerProcess<'a> {
        let arguments = ["-c", text, "worker"].iter().chain(arguments).map(OsString::from).collect();
        WorkerProcess { program: "sh".into(), arguments, stop: None }
    }

    fn failure_of(text: &str) -> (Status, String) {
        let outcome = script(text, &[]).run(&test_case("checkerboard", "null"));
        assert_eq!(outcome.record.case_id, outcome.detail.case_id);
        assert_eq!(outcome.record.workload, "checkerboard");
        (outcome.record.status, outcome.record.reason)
    }

    #[test]
    fn dead_worker_fails_its_case() {
        for (text, reason) in [
            ("kill -SEGV $$", "the worker process was ended by SIGSEGV, a bad memory access"),
            (
                "echo 'free(): invalid pointer' >&2; kill -ABRT $$",
                "the worker process was ended by SIGABRT, an abort; last output: free(): invalid pointer",
            ),
            (
                "kill -KILL $$",
                "the worker process was ended by SIGKILL: sent by a user, or by the kernel when host memory ran out",
            ),
            ("kill -USR1 $$", "the worker process was ended by signal 10"),
            ("exit 3", "the worker process ended with exit code 3"),
            // More than a pipe holds: a worker that writes much must not block.
            (
                "head -c 1000000 /dev/zero >&2; echo >&2; echo enough >&2; exit 4",
                "the worker process ended with exit code 4; last output: enough",
            ),
        ] {
            assert_eq!(failure_of(text), (Status::Error, reason.to_owned()));
        }
    }

    /// SIGTERM is sent for real. SIGINT and SIGHUP are ignored under nohup and in background
    /// shells, and a shell cannot undo that for its children.
    #[test]
    fn signalled_worker_is_interrupted() {
        let (status, reason) = failure_of("kill -TERM $$");
        assert_eq!(status, Status::Interrupted, "{reason}");
        assert!(reason.ends_with("SIGTERM"), "{reason}");
        for (signal, status) in [(1, Status::Interrupted), (2, Status::Interrupted), (6, Status::Error)] {
            let ended = WorkerStderr::default().failure(ExitStatus::from_raw(signal));
            assert_eq!(ended.status(), status, "{ended}");
        }
    }

    #[test]
    fn invalid_outcome_is_reported() {
        for text in ["read order; echo hello", "read order; echo \"$order\"", "true"] {
            let (status, reason) = failure_of(text);
            assert_eq!(status, Status::Error);
            assert!(reason.starts_with("the worker process ended without an outcome: "), "{reason}");
        }
    }

    #[test]
    fn missing_program_is_reported() {
        let nowhere = WorkerProcess { program: "no/such/program".into(), arguments: Vec::new(), stop: None };
        let reason = nowhere.run(&test_case("checkerboard", "null")).record.reason;
        assert!(reason.starts_with("the worker process cannot be started: No such file"), "{reason}");
    }

    #[test]
    fn timed_out_worker_is_killed() {
        let mut case = test_case("checkerboard", "null");
        case.timeout = Some("150ms".parse().unwrap());
        let began = Instant::now();
        let record = script("exec sleep 60", &[]).run(&case).record;
        assert_eq!((record.status, record.reason.as_str()), (Status::Error, "timed out after 150ms"));
        assert!((Duration::from_millis(150)..Duration::from_secs(30)).contains(&began.elapsed()));
    }

    #[test]
    fn stop_is_sent_and_outcome_awaited() {
        let stop = AtomicBool::new(true);
        let obedient = "read order; read word; [ \"$word\" = stop ] && exit 7";
        let worker = WorkerProcess { stop: Some(&stop), ..script(obedient, &[]) };
        let reason = worker.run(&test_case("checkerboard", "null")).record.reason;
        assert_eq!(reason, "the worker process ended with exit code 7");
    }

    #[test]
    fn outcome_arrives_unchanged() {
        let case = test_case("variable-length", "caching");
        let sent = InProcess::default().run(&case);
        assert!(sent.record.external_fragmentation_share.is_some());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("outcome.json");
        std::fs::write(&path, serde_json::to_string(&sent).unwrap()).unwrap();
        let path = path.to_str().unwrap();
        assert!(script("echo noise; cat \"$1\"", &[path]).run(&case) == sent);

        let late = script("cat \"$1\"; kill -SEGV $$", &[path]).run(&case).record;
        assert_eq!(late.peak_reserved_bytes, sent.record.peak_reserved_bytes);
        let reason = "the case was done, and then the worker process was ended by SIGSEGV, a bad memory access";
        assert_eq!((late.status, late.reason.as_str()), (Status::Error, reason));
    }

    #[test]
    fn order_restores_the_case() {
        let text = r#"
            question = "the same?"
            [[group]]
            workloads = ["checkerboard", "random"]
            strategies = ["direct", "caching:max_split_size_mb:64,garbage_collection_threshold:0.8"]
            limits = ["6GiB"]
            seeds = [7]
            on_oom = "skip"
            timed = true
            threads = [2, 4]
            [[group]]
            workloads = ["checkerboard"]
            strategies = ["null"]
            set = { rounds = 2, block_bytes = "1MiB" }
        "#;
        let suite = SuiteFile::parse("orders", "orders.toml", text).unwrap();
        let settings = CaseSettings { device: "sim:80GiB".parse().unwrap(), limit: None, seed: None, timeout: None };
        for case in suite.cases(&settings).unwrap() {
            let line = serde_json::to_string(&case).unwrap();
            let again: Case = serde_json::from_str(&line).unwrap();
            assert_eq!(serde_json::to_string(&again).unwrap(), line);
            assert_eq!((again.strategy, again.device), (case.strategy, case.device), "{line}");
            let events = |source| Trace::read(source).unwrap().events;
            let source = again.origin.open(&NoProgress).unwrap();
            assert!(events(&*source) == events(&*case.source), "{line}: other events");
        }
    }

    #[test]
    fn plugin_call_is_recognised() {
        let text = format!("first\nmy pool is corrupt\n\n{CALL_MARK}./a.so: alloc of 512 bytes\n");
        let expected = WorkerStderr {
            hang: None,
            plugin_call: Some("./a.so: alloc of 512 bytes".to_owned()),
            last_line: "my pool is corrupt".to_owned(),
        };
        assert_eq!(WorkerStderr::read(text.as_bytes()), expected);
        let hung = WorkerStderr::read(format!("{HANG_MARK}./a.so: reset did not return within 1s").as_bytes());
        assert_eq!(hung.failure(ExitStatus::default()).to_string(), "plugin ./a.so: reset did not return within 1s");
        assert_eq!(WorkerStderr::read(b"\n \n"), WorkerStderr::default());
    }
}
