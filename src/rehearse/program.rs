//! Runs one program once on the shadow GPU and says how it ended.

use std::{
    env,
    ffi::OsString,
    fmt, fs, io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    compile_cache::{CompileCache, CompileCacheState},
    facts::{EventLog, ProcessFacts, ProgramEvent},
    running::{LOOK, ProcessFailure, RunningProgram, StartedProcess},
    world::World,
};
use crate::{
    base::{TemporaryFolder, exit_description, exit_signal},
    device::Card,
};

/// How long a program may take to end after Ctrl-C, which it received too.
const AFTER_INTERRUPT: Duration = Duration::from_secs(3);
/// How long the other ranks may run after one has failed: they may be about to fail in the same way.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

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
    /// One process for each of these ranks.
    pub world: Option<World>,
    /// Whether its standard output is ours; otherwise, where ours is for data, it goes to standard error.
    pub keeps_stdout: bool,
}

/// How a program ended.
#[derive(Debug)]
pub struct ProgramOutcome {
    /// How its process ended; with ranks, the first that failed.
    pub status: ExitStatus,
    /// The process that failed first.
    pub failure: Option<ProcessFailure>,
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
        let description = (!self.status.success()).then(|| exit_description(self.status))?;
        let rank = self.failure.as_ref().and_then(|failure| failure.rank);
        Some(rank.map_or_else(|| description.clone(), |rank| format!("{description} in rank {rank}")))
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
        let places = RunPlaces::create().map_err(io_error(&env::temp_dir()))?;
        let path = places.events();
        let mut log = EventLog::create(&path).map_err(io_error(&path))?;
        let began = Instant::now();
        let mut running = RunningProgram::default();
        let mut ended_by = None;
        if let Err(error) = self.start(&places, &mut running) {
            running.end(Duration::ZERO, &mut log, watch).map_err(io_error(&path))?;
            return Err(error);
        }
        while !running.look().map_err(io_error(&path))? {
            running.seen.take(&mut log, watch);
            let interrupted = stop.load(Ordering::Relaxed);
            if interrupted || self.timeout.is_some_and(|most| began.elapsed() > most) {
                let grace = if interrupted { AFTER_INTERRUPT } else { Duration::ZERO };
                running.end(grace, &mut log, watch).map_err(io_error(&path))?;
                ended_by = Some(match interrupted {
                    true => ProgramEnd::Interrupt,
                    false => ProgramEnd::Timeout(running.seen.terminated_at.take()),
                });
                break;
            }
            if running.failure().is_some_and(|failure| failure.seen.elapsed() > AFTER_FAILURE) {
                running.end(Duration::ZERO, &mut log, watch).map_err(io_error(&path))?;
                break;
            }
            thread::sleep(LOOK);
        }
        // A program that handles Ctrl-C itself may have ended before it was looked at.
        if ended_by.is_none() && stop.load(Ordering::Relaxed) {
            ended_by = Some(ProgramEnd::Interrupt);
        }
        running.seen.take(&mut log, watch);
        self.remove_empty_logs();
        let processes = ProcessFacts::all_in(&self.folder).map_err(io_error(&self.folder))?;
        let used = processes.iter().find_map(|process| process.compile.as_ref()?.cache.as_deref());
        let compile_cache = places.compile_cache.state_for(used.map(Path::new));
        let (status, failure, seen) = running.into_result();
        let outcome = ProgramOutcome { status, failure, ended_by, wall: began.elapsed(), processes, compile_cache };
        seen.judge(&outcome)?;
        Ok(outcome)
    }

    /// Starts the program, or one process for each rank.
    fn start(&self, places: &RunPlaces, running: &mut RunningProgram) -> Result<(), RehearsalError> {
        let (program, arguments) = self.words.split_first().ok_or(RehearsalError::NoPython)?;
        let start_error = |source| RehearsalError::Start { program: program.to_string_lossy().into_owned(), source };
        let command = || {
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::inherit());
            if !self.keeps_stdout {
                command.stdout(std::io::stderr());
            }
            self.set_variables(&mut command, places);
            command
        };
        let Some(world) = &self.world else {
            let child = command().spawn().map_err(start_error)?;
            running.add(StartedProcess { rank: None, child, log: None });
            return Ok(());
        };
        let port = free_port().map_err(start_error)?;
        for (index, &rank) in world.started().iter().enumerate() {
            let mut command = command();
            command.envs(world.variables(rank, port));
            // As torchrun does: the ranks share the processors of this machine.
            for (name, value) in [("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")] {
                if env::var_os(name).is_none() {
                    command.env(name, value);
                }
            }
            let mut log = None;
            if index > 0 {
                let path = self.log(rank);
                let file =
                    fs::File::create(&path).map_err(|source| RehearsalError::Io { path: path.clone(), source })?;
                let copy = file.try_clone().map_err(start_error)?;
                command.stdin(Stdio::null()).stdout(file).stderr(copy);
                log = Some(path);
            }
            running.add(StartedProcess { rank: Some(rank), child: command.spawn().map_err(start_error)?, log });
        }
        Ok(())
    }

    /// The variables that the injected module and the shadow GPU read.
    fn set_variables(&self, command: &mut Command, places: &RunPlaces) {
        let python_path = env::var_os("PYTHONPATH").filter(|path| !path.is_empty());
        let folders = [self.python.clone()].into_iter().chain(python_path.iter().flat_map(env::split_paths));
        // A folder with the path separator in its name cannot be in PYTHONPATH at all.
        command.env("PYTHONPATH", env::join_paths(folders).unwrap_or_else(|_| self.python.clone().into_os_string()));
        command
            .env("OOMPH_REHEARSE_FOLDER", &self.folder)
            .env("OOMPH_REHEARSE_PROGRAM", &self.oomph)
            .env("OOMPH_REHEARSE_EVENTS", places.events())
            .env("OOMPH_SHADOW_DEVICE", self.device.to_string())
            .env_remove("OOMPH_REHEARSE_LIBRARIES");
        places.compile_cache.set(command);
        let complete = self.world.as_ref().is_none_or(World::is_complete);
        let world = self.world.as_ref().map(|_| if complete { "complete" } else { "absent" }.to_owned());
        let numbers = [("OOMPH_REHEARSE_STEPS", self.steps), ("OOMPH_REHEARSE_LIMIT", self.limit_bytes)];
        let texts = numbers.into_iter().map(|(name, value)| (name, value.map(|value| value.to_string().into())));
        let exchange = complete.then(|| places.exchange().into_os_string());
        let others = [("OOMPH_REHEARSE_WORLD", world.map(OsString::from)), ("OOMPH_SHADOW_EXCHANGE", exchange)];
        for (name, value) in texts.chain(others) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }

    /// The output of a rank that is not passed through.
    fn log(&self, rank: u32) -> PathBuf {
        self.folder.join(format!("rank-{rank}.log"))
    }

    fn remove_empty_logs(&self) {
        for &rank in self.world.iter().flat_map(World::started) {
            let path = self.log(rank);
            if fs::metadata(&path).is_ok_and(|file| file.len() == 0) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// A port that nothing uses now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// What a run needs until its end, in a temporary folder: events, values that ranks exchange, caches of torch.compile.
struct RunPlaces {
    temporary: TemporaryFolder,
    compile_cache: CompileCache,
}

impl RunPlaces {
    fn create() -> io::Result<RunPlaces> {
        let temporary = TemporaryFolder::create()?;
        let compile_cache = CompileCache::create(temporary.path())?;
        let places = RunPlaces { temporary, compile_cache };
        fs::create_dir(places.exchange())?;
        Ok(places)
    }

    fn events(&self) -> PathBuf {
        self.temporary.path().join("events")
    }

    fn exchange(&self) -> PathBuf {
        self.temporary.path().join("exchange")
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
