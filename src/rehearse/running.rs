//! The processes of a running program: one, or one for each rank.

use std::{
    collections::BTreeSet,
    io,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    facts::{EventKind, EventLog, ProgramEvent},
    program::{ProgramOutcome, RehearsalError},
};

/// How often a running program is looked at.
pub const LOOK: Duration = Duration::from_millis(50);
/// How long a program may take to end after SIGTERM, as with torchrun: all ranks write their recordings at the same time.
const AFTER_TERMINATE: Duration = Duration::from_secs(30);

/// One started process.
pub struct StartedProcess {
    /// Its rank, where oomph started ranks.
    pub rank: Option<u32>,
    /// The process.
    pub child: Child,
    /// Where its output goes, unless it is passed through.
    pub log: Option<PathBuf>,
}

/// A process that did not end well.
#[derive(Debug)]
pub struct ProcessFailure {
    /// Its rank, where oomph started ranks.
    pub rank: Option<u32>,
    /// How it ended.
    pub status: ExitStatus,
    /// Where its output is, unless it was passed through.
    pub log: Option<PathBuf>,
    /// When this was seen.
    pub seen: Instant,
}

/// All started processes, and what they said so far.
#[derive(Default)]
pub struct RunningProgram {
    running: Vec<StartedProcess>,
    /// The last one that ended well.
    ended: Option<ExitStatus>,
    failure: Option<ProcessFailure>,
    /// What is known from the events.
    pub seen: SeenEvents,
}

impl RunningProgram {
    /// Adds a process.
    pub fn add(&mut self, process: StartedProcess) {
        self.running.push(process);
    }

    /// The first failure.
    pub fn failure(&self) -> Option<&ProcessFailure> {
        self.failure.as_ref()
    }

    /// How the program ended: its first failure counts.
    pub fn into_result(self) -> (ExitStatus, Option<ProcessFailure>, SeenEvents) {
        let status = self.failure.as_ref().map(|failure| failure.status).or(self.ended).unwrap_or_default();
        (status, self.failure, self.seen)
    }

    /// Looks at the processes; whether all have ended.
    pub fn look(&mut self) -> io::Result<bool> {
        let mut still = Vec::new();
        for mut process in self.running.drain(..) {
            match process.child.try_wait()? {
                None => still.push(process),
                Some(status) if status.success() || self.failure.is_some() => self.ended = Some(status),
                Some(status) => {
                    let (rank, log) = (process.rank, process.log);
                    self.failure = Some(ProcessFailure { rank, status, log, seen: Instant::now() });
                }
            }
        }
        self.running = still;
        Ok(self.running.is_empty())
    }

    /// Ends all processes: SIGTERM, so that they write what they recorded, then SIGKILL.
    pub fn end(&mut self, grace: Duration, log: &mut EventLog, watch: &mut dyn FnMut(&ProgramEvent)) -> io::Result<()> {
        if self.wait(grace, log, watch)? {
            return Ok(());
        }
        self.seen.terminate(self.running.iter().map(|process| process.child.id()));
        if self.wait(AFTER_TERMINATE, log, watch)? {
            return Ok(());
        }
        for process in &mut self.running {
            process.child.kill()?;
            process.child.wait()?;
        }
        self.look().map(drop)
    }

    fn wait(&mut self, most: Duration, log: &mut EventLog, watch: &mut dyn FnMut(&ProgramEvent)) -> io::Result<bool> {
        let began = Instant::now();
        while began.elapsed() < most {
            self.seen.take(log, watch);
            if self.look()? {
                return Ok(true);
            }
            thread::sleep(LOOK);
        }
        Ok(false)
    }
}

/// What is known from the events.
#[derive(Default)]
pub struct SeenEvents {
    kinds: Vec<EventKind>,
    refusal: Option<String>,
    executable: String,
    /// The line at which a process was when it got SIGTERM.
    pub terminated_at: Option<String>,
    /// Processes that use CUDA.
    recording: BTreeSet<u32>,
}

impl SeenEvents {
    /// Reads new events; `watch` gets each.
    pub fn take(&mut self, log: &mut EventLog, watch: &mut dyn FnMut(&ProgramEvent)) {
        for event in log.new_events() {
            if !self.kinds.contains(&event.event) {
                self.kinds.push(event.event);
            }
            match event.event {
                EventKind::Refused => self.refusal = Some(event.reason.clone()),
                EventKind::Missing => self.executable.clone_from(&event.executable),
                EventKind::Cuda => {
                    self.recording.insert(event.pid);
                }
                EventKind::End => {
                    self.recording.remove(&event.pid);
                }
                EventKind::Terminated => self.terminated_at.clone_from(&event.r#where),
                EventKind::Python | EventKind::Torch | EventKind::Step => {}
            }
            watch(&event);
        }
    }

    fn has(&self, kind: EventKind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Why there is nothing to answer, if so. A program that failed by itself has shown why.
    pub fn judge(&self, outcome: &ProgramOutcome) -> Result<(), RehearsalError> {
        if let Some(reason) = &self.refusal {
            return Err(RehearsalError::Refused(reason.clone()));
        }
        if self.has(EventKind::Missing) && !self.has(EventKind::Torch) {
            return Err(RehearsalError::NoTorch { executable: self.executable.clone() });
        }
        if !outcome.status.success() || outcome.ended_by.is_some() || !outcome.processes.is_empty() {
            return Ok(());
        }
        Err(if !self.has(EventKind::Python) {
            RehearsalError::NoPython
        } else if !self.has(EventKind::Torch) {
            RehearsalError::TorchUnused
        } else {
            RehearsalError::GpuUnused
        })
    }

    /// Sends SIGTERM to the program and to its processes that record. The shell does it, because a signal can be sent
    /// to another process only by unsafe code.
    fn terminate(&self, children: impl Iterator<Item = u32>) {
        let processes: BTreeSet<u32> = self.recording.iter().copied().chain(children).collect();
        let processes = processes.iter().map(u32::to_string);
        let script = "for pid in \"$@\"; do kill -TERM \"$pid\" 2>/dev/null; done";
        // Without a shell, SIGKILL follows.
        let _ = Command::new("sh").args(["-c", script, "sh"]).args(processes).stderr(Stdio::null()).status();
    }
}
