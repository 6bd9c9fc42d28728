//! The side that waits: starts a worker, watches it, and makes an outcome of whatever becomes of it.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::Receiver,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    STOP,
    complaints::{Complaints, last_line},
    fate::Fate,
    order::Order,
};
use crate::{
    base::{exit_description, last_bytes},
    measure::Status,
    plugin,
    suite::{Case, CaseOutcome, CaseRunner, CaseTimeout},
};

/// How often the clock and the stop flag are looked at while a worker is silent.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a pipe may stay open after its process is gone: somebody else may have inherited it.
const PIPE_GRACE: Duration = Duration::from_secs(1);
/// What a worker says beyond this is not read.
const MOST_OUTPUT_BYTES: u64 = 1 << 30;
/// As much of a worker's standard error as may hold its last line.
const LAST_WORDS_BYTES: usize = 4096;

/// Runs every case whole in a process of its own. A worker that dies, hangs beyond the case's time-out or talks nonsense
/// costs its case and nothing else.
#[derive(Clone, Debug)]
pub struct WorkerProcess<'a> {
    /// The program that becomes the worker, and carries out its [`Order`].
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Set from outside to end the running case itself, for runs whose cases are not worth waiting for.
    pub stop: Option<&'a AtomicBool>,
}

impl CaseRunner for WorkerProcess<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        self.outcome_of(case).unwrap_or_else(|fate| {
            let mut outcome = CaseOutcome::failed(&case.label, &fate.to_string());
            outcome.record.status = fate.status();
            outcome
        })
    }
}

impl WorkerProcess<'_> {
    fn outcome_of(&self, case: &Case) -> Result<CaseOutcome, Fate> {
        let mut worker = self.start(case).map_err(Fate::NotStarted)?;
        let status = self.watch(case, &mut worker)?;
        let said = worker.output.recv_timeout(PIPE_GRACE).unwrap_or_default();
        let complaints = Complaints::read(&worker.complaints.recv_timeout(PIPE_GRACE).unwrap_or_default());
        match (serde_json::from_str::<CaseOutcome>(last_line(&String::from_utf8_lossy(&said))), status.success()) {
            (Ok(outcome), true) => Ok(outcome),
            // The figures are sound, and whatever brought it down afterwards must not pass unseen.
            (Ok(mut outcome), false) => {
                outcome.record.status = Status::Error;
                outcome.record.reason =
                    format!("the case was done, and then the worker process {}", exit_description(status));
                Ok(outcome)
            }
            (Err(_), false) => Err(complaints.fate(status)),
            (Err(reason), true) => Err(Fate::Incomprehensible { reason, last_words: complaints.last_words }),
        }
    }

    fn start(&self, case: &Case) -> io::Result<Worker> {
        let order = serde_json::to_string(&Order::of(case))?;
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take();
        let output = last_bytes(child.stdout.take().map(|pipe| pipe.take(MOST_OUTPUT_BYTES)), usize::MAX);
        let complaints = last_bytes(child.stderr.take().map(|pipe| pipe.take(MOST_OUTPUT_BYTES)), LAST_WORDS_BYTES);
        tell(&mut input, &order);
        Ok(Worker { child, input, output, complaints })
    }

    /// Waits until the worker is gone, and sees to it that it goes when its time is up.
    fn watch(&self, case: &Case, worker: &mut Worker) -> Result<ExitStatus, Fate> {
        let began = Instant::now();
        let timeout = case.timeout.or_else(|| plugin::is_meant(&case.strategy).then_some(CaseTimeout::OF_PLUGINS));
        let mut told_to_stop = false;
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(status) = worker.child.try_wait().map_err(Fate::Unknown)? {
                return Ok(status);
            }
            if let Some(timeout) = timeout
                && began.elapsed() >= timeout.duration()
            {
                return Err(Fate::TimedOut(timeout));
            }
            if !told_to_stop && self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                tell(&mut worker.input, STOP);
                told_to_stop = true;
            }
            // Short cases are noticed at once, and long ones not disturbed.
            thread::sleep(pause);
            pause = (pause * 2).min(LOOK_EVERY);
        }
    }
}

/// A running worker. Dropped, it is ended if it still runs, on a panic's way out too.
struct Worker {
    child: Child,
    /// Open as long as somebody waits: the worker ends when it closes.
    input: Option<ChildStdin>,
    output: Receiver<Vec<u8>>,
    complaints: Receiver<Vec<u8>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a line. A worker that no longer listens tells why by the way it ends.
fn tell(input: &mut Option<ChildStdin>, line: &str) {
    if let Some(input) = input {
        let _ = input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush());
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::suite::{InProcess, test_case};

    /// A worker that is a shell script; its arguments begin at `$1`.
    fn script<'a>(text: &str, arguments: &[&str]) -> WorkerProcess<'a> {
        let arguments = ["-c", text, "worker"].iter().chain(arguments).map(OsString::from).collect();
        WorkerProcess { program: "sh".into(), arguments, stop: None }
    }

    fn fate_of(text: &str) -> (Status, String) {
        let outcome = script(text, &[]).run(&test_case("checkerboard", "null"));
        assert_eq!(outcome.record.case_id, outcome.detail.case_id);
        assert_eq!(outcome.record.workload, "checkerboard");
        (outcome.record.status, outcome.record.reason)
    }

    #[test]
    fn a_worker_that_dies_costs_its_case_and_the_reason_is_told() {
        for (text, reason) in [
            ("kill -SEGV $$", "the worker process was ended by SIGSEGV, a bad memory access"),
            (
                "echo 'free(): invalid pointer' >&2; kill -ABRT $$",
                "the worker process was ended by SIGABRT, an abort; its last words: free(): invalid pointer",
            ),
            (
                "kill -KILL $$",
                "the worker process was ended by SIGKILL: by hand, or by the kernel for want of host memory",
            ),
            ("kill -USR1 $$", "the worker process was ended by signal 10"),
            ("exit 3", "the worker process ended with exit code 3"),
            // More than a pipe holds: a worker that complains at length must not block.
            (
                "head -c 1000000 /dev/zero >&2; echo >&2; echo enough >&2; exit 4",
                "the worker process ended with exit code 4; its last words: enough",
            ),
        ] {
            assert_eq!(fate_of(text), (Status::Error, reason.to_owned()));
        }
    }

    #[test]
    fn a_worker_that_somebody_asked_to_end_is_interrupted_and_not_broken() {
        for signal in ["INT", "TERM", "HUP"] {
            let (status, reason) = fate_of(&format!("kill -{signal} $$"));
            assert_eq!(status, Status::Interrupted, "{reason}");
            assert!(reason.ends_with(&format!("SIG{signal}")), "{reason}");
        }
    }

    #[test]
    fn a_worker_that_talks_nonsense_or_nothing_is_told_so() {
        for text in ["read order; echo hello", "read order; echo \"$order\"", "true"] {
            let (status, reason) = fate_of(text);
            assert_eq!(status, Status::Error);
            assert!(reason.starts_with("the worker process ended without an outcome: "), "{reason}");
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_told_so() {
        let nowhere = WorkerProcess { program: "no/such/program".into(), arguments: Vec::new(), stop: None };
        let reason = nowhere.run(&test_case("checkerboard", "null")).record.reason;
        assert!(reason.starts_with("the worker process cannot be started: No such file"), "{reason}");
    }

    #[test]
    fn a_case_that_takes_too_long_is_ended() {
        let mut case = test_case("checkerboard", "null");
        case.timeout = Some("150ms".parse().unwrap());
        let began = Instant::now();
        let record = script("exec sleep 60", &[]).run(&case).record;
        assert_eq!((record.status, record.reason.as_str()), (Status::Error, "timed out after 150ms"));
        assert!((Duration::from_millis(150)..Duration::from_secs(30)).contains(&began.elapsed()));
    }

    #[test]
    fn a_worker_is_told_to_stop_and_its_outcome_is_awaited() {
        let stop = AtomicBool::new(true);
        let obedient = "read order; read word; [ \"$word\" = stop ] && exit 7";
        let worker = WorkerProcess { stop: Some(&stop), ..script(obedient, &[]) };
        let reason = worker.run(&test_case("checkerboard", "null")).record.reason;
        assert_eq!(reason, "the worker process ended with exit code 7");
    }

    #[test]
    fn the_outcome_arrives_as_it_was_sent_to_the_last_digit() {
        let case = test_case("variable-length", "caching");
        let sent = InProcess::default().run(&case);
        assert!(sent.record.external_fragmentation.is_some());
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
}
