//! Runs one program once on the shadow GPU and says how it ended.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fmt, fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    compile_cache::{CompileCache, CompileCacheState},
    facts::{EventKind, EventLog, ProcessFacts, ProgramEvent},
};
use crate::{
    base::{TemporaryFolder, exit_description, exit_signal},
    device::Card,
};

/// How often a running program is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long a program may take to end after Ctrl-C, which it received too, and after SIGTERM.
const AFTER_INTERRUPT: Duration = Duration::from_secs(3);
const AFTER_TERMINATE: Duration = Duration::from_secs(15);
/// The file of events in the temporary folder of a run.
const EVENT_FILE: &str = "events";

/// Why a program could not be rehearsed. The program's own failure is not one of these.
#[derive(Debug, thiserror::Error)]
pub enum RehearsalError {
    /// It was not started.
    #[error("cannot start '{program}': {source}")]
    Start {
        /// Its name.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The folder cannot be used.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The injected module refused it.
    #[error("{0}")]
    Refused(String),
    /// PyTorch is not installed.
    #[error(
        "PyTorch is not installed for {executable}: install a wheel with CUDA (pip install torch); a GPU is not needed"
    )]
    NoTorch {
        /// The Python.
        executable: String,
    },
    /// No Python with the injected module ran.
    #[error(
        "the command ran no Python program that could be rehearsed: other programs, statically linked ones among them, are \
         not supported, and Python with -I, -E or -S does not load what oomph adds"
    )]
    NoPython,
    /// It did not import PyTorch.
    #[error("the program ended without importing PyTorch, so there is nothing to rehearse")]
    TorchUnused,
    /// It did not use CUDA.
    #[error("the program ended without using a GPU: it never initialised CUDA (does it choose the CPU as its device?)")]
    GpuUnused,
}

/// A program to be run.
#[derive(Clone, Debug)]
pub struct ProgramCommand {
    /// Its words, the program first.
    pub words: Vec<OsString>,
    /// The device.
    pub device: ShadowDevice,
    /// What the process may take: PyTorch's memory fraction, in bytes.
    pub limit_bytes: Option<u64>,
    /// End after this many steps of the optimizer.
    pub steps: Option<u64>,
    /// End it after this time.
    pub timeout: Option<Duration>,
    /// Where recordings go. It exists.
    pub folder: PathBuf,
    /// The folder of the injected module.
    pub python: PathBuf,
    /// This program, which the injected module asks for libraries.
    pub oomph: PathBuf,
}

/// How a program ended.
#[derive(Debug)]
pub struct ProgramOutcome {
    /// How its process ended.
    pub status: ExitStatus,
    /// What ended it, if it did not end by itself.
    pub ended_by: Option<ProgramEnd>,
    /// From start to end.
    pub wall: Duration,
    /// What its processes wrote.
    pub processes: Vec<ProcessFacts>,
    /// What torch.compile found in its cache.
    pub compile_cache: CompileCacheState,
}

/// What ended a program that did not end by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    /// It took too long. The line at which it was, where that is known.
    Timeout(Option<String>),
    /// The user interrupted it.
    Interrupt,
}

impl ProgramOutcome {
    /// Whether a request failed.
    #[must_use]
    pub fn ran_out(&self) -> bool {
        self.processes.iter().any(|process| process.oom.is_some())
    }

    /// How it failed, if it did, as a phrase that follows its name.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        (!self.status.success()).then(|| exit_description(self.status))
    }

    /// The exit code that a shell would show.
    #[must_use]
    pub fn shell_code(&self) -> u8 {
        let code = self.status.code().or(exit_signal(self.status).map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

impl ProgramCommand {
    /// Runs it. `watch` gets every event.
    pub fn run(
        &self,
        stop: &AtomicBool,
        watch: &mut dyn FnMut(&ProgramEvent),
    ) -> Result<ProgramOutcome, RehearsalError> {
        let io_error = |path: &Path| {
            let path = path.to_owned();
            move |source| RehearsalError::Io { path, source }
        };
        let temporary = TemporaryFolder::create().map_err(io_error(&env::temp_dir()))?;
        let path = temporary.path().join(EVENT_FILE);
        let mut log = EventLog::create(&path).map_err(io_error(&path))?;
        let compile_cache = CompileCache::create(&self.folder).map_err(io_error(&self.folder))?;
        let began = Instant::now();
        let mut running =
            RunningProgram { child: self.start(log.path(), &compile_cache)?, seen: SeenEvents::default() };
        let mut ended_by = None;
        let status = loop {
            running.seen.take(&mut log, watch);
            if let Some(status) = running.child.try_wait().map_err(io_error(&path))? {
                break status;
            }
            let interrupted = stop.load(Ordering::Relaxed);
            if interrupted || self.timeout.is_some_and(|most| began.elapsed() > most) {
                let grace = if interrupted { AFTER_INTERRUPT } else { Duration::ZERO };
                let status = running.end(grace, &mut log, watch).map_err(io_error(&path))?;
                ended_by = Some(match interrupted {
                    true => ProgramEnd::Interrupt,
                    false => ProgramEnd::Timeout(running.seen.terminated_at.take()),
                });
                break status;
            }
            thread::sleep(LOOK);
        };
        running.seen.take(&mut log, watch);
        let processes = ProcessFacts::all_in(&self.folder).map_err(io_error(&self.folder))?;
        let used = processes.iter().find_map(|process| process.compile.as_ref()?.cache.as_deref());
        let compile_cache = compile_cache.state_for(used.map(Path::new));
        let outcome = ProgramOutcome { status, ended_by, wall: began.elapsed(), processes, compile_cache };
        running.seen.judge(&outcome)?;
        Ok(outcome)
    }

    fn start(&self, events: &Path, compile_cache: &CompileCache) -> Result<Child, RehearsalError> {
        let (program, arguments) = self.words.split_first().ok_or(RehearsalError::NoPython)?;
        let python_path = env::var_os("PYTHONPATH").filter(|path| !path.is_empty());
        let folders = [self.python.clone()].into_iter().chain(python_path.iter().flat_map(env::split_paths));
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::inherit());
        // A folder with the path separator in its name cannot be in PYTHONPATH at all.
        command.env("PYTHONPATH", env::join_paths(folders).unwrap_or_else(|_| self.python.clone().into_os_string()));
        command
            .env("OOMPH_REHEARSE_FOLDER", &self.folder)
            .env("OOMPH_REHEARSE_PROGRAM", &self.oomph)
            .env("OOMPH_REHEARSE_EVENTS", events)
            .env("OOMPH_SHADOW_DEVICE", self.device.to_string())
            .env_remove("OOMPH_REHEARSE_LIBRARIES");
        compile_cache.set(&mut command);
        for (name, value) in [("OOMPH_REHEARSE_STEPS", self.steps), ("OOMPH_REHEARSE_LIMIT", self.limit_bytes)] {
            match value {
                Some(value) => command.env(name, value.to_string()),
                None => command.env_remove(name),
            };
        }
        let start_error = |source| RehearsalError::Start { program: program.to_string_lossy().into_owned(), source };
        command.spawn().map_err(start_error)
    }
}

struct RunningProgram {
    child: Child,
    seen: SeenEvents,
}

impl RunningProgram {
    /// Ends it: SIGTERM, so that it writes what it recorded, then SIGKILL.
    fn end(
        &mut self,
        grace: Duration,
        log: &mut EventLog,
        watch: &mut dyn FnMut(&ProgramEvent),
    ) -> io::Result<ExitStatus> {
        if let Some(status) = self.wait(grace, log, watch)? {
            return Ok(status);
        }
        self.seen.terminate(self.child.id());
        if let Some(status) = self.wait(AFTER_TERMINATE, log, watch)? {
            return Ok(status);
        }
        self.child.kill()?;
        self.child.wait()
    }

    fn wait(
        &mut self,
        most: Duration,
        log: &mut EventLog,
        watch: &mut dyn FnMut(&ProgramEvent),
    ) -> io::Result<Option<ExitStatus>> {
        let began = Instant::now();
        while began.elapsed() < most {
            self.seen.take(log, watch);
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(LOOK);
        }
        Ok(None)
    }
}

/// What is known from the events.
#[derive(Default)]
struct SeenEvents {
    kinds: Vec<EventKind>,
    refusal: Option<String>,
    executable: String,
    terminated_at: Option<String>,
    /// Processes that use CUDA.
    recording: BTreeSet<u32>,
}

impl SeenEvents {
    fn take(&mut self, log: &mut EventLog, watch: &mut dyn FnMut(&ProgramEvent)) {
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
    fn judge(&self, outcome: &ProgramOutcome) -> Result<(), RehearsalError> {
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
    fn terminate(&self, child: u32) {
        let processes = self.recording.iter().copied().chain([child]).map(|pid| pid.to_string());
        let script = "for pid in \"$@\"; do kill -TERM \"$pid\" 2>/dev/null; done";
        // Without a shell, SIGKILL follows.
        let _ = Command::new("sh").args(["-c", script, "sh"]).args(processes).stderr(Stdio::null()).status();
    }
}

/// Removes what a rehearsal without a result left in a folder, and the folders that were made for it.
pub fn remove_empty(made: &[PathBuf]) {
    for folder in made {
        // Only empty folders are removed.
        let _ = fs::remove_dir(folder);
    }
}

/// A device, as the core reads it from `OOMPH_SHADOW_DEVICE`. Versions of libraries are added by the injected module, which
/// knows the wheel.
#[derive(Clone, Debug, PartialEq)]
pub struct ShadowDevice {
    pairs: Vec<(&'static str, String)>,
}

impl ShadowDevice {
    /// A number of cards of this kind. A card that is a size has the properties of the core's own default, the H200.
    #[must_use]
    pub fn of(card: &Card, gpus: u32, nonzero: Option<f64>) -> ShadowDevice {
        let mut pairs = vec![
            ("total", card.total_bytes().to_string()),
            ("context", card.context_bytes().to_string()),
            ("devices", gpus.to_string()),
        ];
        if let Some(facts) = card.facts() {
            pairs.extend([
                ("name", facts.vendor_name.clone()),
                ("sm", facts.multiprocessors.to_string()),
                ("major", facts.capability[0].to_string()),
                ("minor", facts.capability[1].to_string()),
                ("l2", facts.l2_bytes.to_string()),
            ]);
        }
        pairs.extend(nonzero.map(|share| ("nonzero", share.to_string())));
        ShadowDevice { pairs }
    }
}

impl fmt::Display for ShadowDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&pairs.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_keeps_the_properties_of_the_default() {
        let text = ShadowDevice::of(&"24GiB".parse().unwrap(), 1, None).to_string();
        assert_eq!(text, "total=25769803776;context=552402944;devices=1");
    }

    #[test]
    fn a_name_brings_its_own() {
        let text = ShadowDevice::of(&"rtx4090".parse().unwrap(), 2, Some(0.25)).to_string();
        assert!(text.contains(";devices=2;name=NVIDIA GeForce RTX 4090;sm=128;major=8;minor=9;l2=75497472"), "{text}");
        assert!(text.ends_with(";nonzero=0.25"), "{text}");
    }
}
