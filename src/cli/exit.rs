//! How the program ends: exit codes, errors that carry one, and signals.

use std::{
    fmt, fs, io,
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::anyhow;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use super::output;
use crate::{base::abandon_unfinished_files, replay::ReplayError};

// Exit codes are a contract with scripts. 101 stays free: it is the code of a panic.

/// Success.
pub const OK: u8 = 0;
/// An unexpected error.
pub const FAILURE: u8 = 1;
/// The command line, a suite, a workload or a trace is wrong.
pub const USAGE: u8 = 2;
/// The filters leave no case to run.
pub const NOTHING_SELECTED: u8 = 4;
/// `verify`: a recording is not reproduced exactly, or a device decides differently. `threshold`: a
/// GPU does not confirm the answer.
pub const NOT_EXACT: u8 = 100;
/// `compare`, `run --baseline`: something got worse.
pub const REGRESSION: u8 = 102;
/// The requested device is not available.
pub const DEVICE_UNAVAILABLE: u8 = 103;
/// Some cases could not be run, crashed or took too long; the others are in the results.
pub const CASES_FAILED: u8 = 104;
/// `leaks`: memory grows in a way that `--fail-on` names.
pub const MEMORY_GROWS: u8 = 105;
/// `stress`: a strategy failed.
pub const STRESS_FAILED: u8 = 106;
/// `report`, `compare`: rows are missing, or the shards do not form one complete run.
pub const NOT_WHOLE: u8 = 107;
/// `rehearse`: the program does not fit on at least one of the cards.
pub const DOES_NOT_FIT: u8 = 108;
/// `advise`, `leaks`: the recording does not contain enough to tell.
pub const CANNOT_TELL: u8 = 109;
/// Ctrl-C, SIGTERM or SIGHUP: finished cases are in the results, and no unfinished file remains.
pub const INTERRUPTED: u8 = 130;

/// The table below `--help`.
pub const HELP: &str = "\
Exit codes:
    0  success (running out of memory is a result, not a failure)
    1  unexpected error
    2  invalid usage, suite, workload or trace
    4  nothing selected
  100  verify: a recording is not reproduced exactly; verify, threshold: a device disagrees
  102  compare, run --baseline: something got worse
  103  the requested device is not available
  104  some cases failed: they could not be run, crashed or timed out
  105  leaks: memory grows
  106  stress: a strategy failed
  107  report, compare: rows are missing; report: the shards do not form one complete run
  108  rehearse: the program does not fit on at least one card; fits: no way to train fits
  109  advise, leaks: the recording does not contain enough to tell; fits: a way is not modelled, and no other fits
  130  interrupted (Ctrl-C, SIGTERM, SIGHUP); finished cases are kept";

/// What a command returns: its exit code, or an error that has one.
pub type CommandResult = Result<u8, CommandError>;

/// An error and its exit code.
#[derive(Debug)]
pub struct CommandError {
    code: u8,
    error: anyhow::Error,
}

impl CommandError {
    /// The user's input is wrong.
    pub fn usage(error: impl Into<anyhow::Error>) -> CommandError {
        CommandError { code: USAGE, error: error.into() }
    }

    /// The device is not available.
    pub fn device(error: impl Into<anyhow::Error>) -> CommandError {
        CommandError { code: DEVICE_UNAVAILABLE, error: error.into() }
    }

    /// A replay that could not be run: a missing device and a wrong strategy have their own exit
    /// codes.
    pub fn replay(error: ReplayError) -> CommandError {
        match error {
            ReplayError::DeviceSpec(error) => CommandError::device(error),
            ReplayError::StrategySpec(error) => CommandError::usage(error),
            error => error.into(),
        }
    }

    /// The filters leave nothing.
    pub fn nothing_selected(error: impl Into<anyhow::Error>) -> CommandError {
        CommandError { code: NOTHING_SELECTED, error: error.into() }
    }

    /// The same error, with its subject named first.
    pub fn context(self, subject: &str) -> CommandError {
        CommandError { error: anyhow!("{subject}: {}", self.error), ..self }
    }

    /// Prints the error, whose message includes its causes, and returns the exit code. A reader
    /// that closes the pipe is not an error.
    pub fn report(self) -> ExitCode {
        let is_broken_pipe = |cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe;
        if self.error.chain().any(|cause| cause.downcast_ref().is_some_and(is_broken_pipe)) {
            return ExitCode::SUCCESS;
        }
        output::complain(&format!("error: {}", self.error));
        ExitCode::from(self.code)
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: Into<anyhow::Error>> From<E> for CommandError {
    fn from(error: E) -> CommandError {
        CommandError { code: FAILURE, error: error.into() }
    }
}

/// What the first Ctrl-C or SIGTERM does. The second one always ends the program at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopPolicy {
    /// Running cases are finished, because their results are kept.
    AfterRunningCases,
    /// The replay, which may take long, ends where it is.
    AtOnce,
}

/// What signals do: set a flag, or end the program.
static SIGNALS: Mutex<SignalHandling> = Mutex::new(SignalHandling { installed: false, stop: None });

struct SignalHandling {
    installed: bool,
    /// The flag of the command, if it has one.
    stop: Option<(StopPolicy, Arc<AtomicBool>)>,
}

impl SignalHandling {
    fn locked() -> MutexGuard<'static, SignalHandling> {
        SIGNALS.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A flag that the first signal sets.
pub fn stop_flag(policy: StopPolicy) -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    SignalHandling::locked().stop = Some((policy, Arc::clone(&stop)));
    clean_up_on_signals()?;
    Ok(stop)
}

/// From now on, a signal deletes unfinished files before it ends the program. A command with a stop flag is ended by the
/// second one.
pub fn clean_up_on_signals() -> io::Result<()> {
    let mut signals = SignalHandling::locked();
    if !signals.installed {
        on_signals(handle_signal)?;
        signals.installed = true;
    }
    Ok(())
}

fn handle_signal() {
    let stop = SignalHandling::locked().stop.clone();
    match stop {
        Some((policy, stop)) if !stop.swap(true, Ordering::Relaxed) => {
            if policy == StopPolicy::AfterRunningCases {
                output::complain("\nstopping after the cases that are running; press Ctrl-C again to stop at once");
            }
        }
        _ => {
            abandon_unfinished_files();
            std::process::exit(i32::from(INTERRUPTED));
        }
    }
}

/// Calls `handler` on a thread of its own for every SIGINT, SIGTERM and SIGHUP. Those that the program was started to
/// ignore stay ignored: SIGHUP under `nohup`, SIGINT of a background job in a script.
pub fn on_signals(handler: impl Fn() + Send + 'static) -> io::Result<()> {
    let ignored = ignored_signals(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    let heard = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = Signals::new(heard)?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || signals.forever().for_each(|_| handler()))?;
    Ok(())
}

/// The signals that a process ignores, as the system lists them: one bit each, SIGHUP (1) the lowest. Where there is no such
/// list, none.
fn ignored_signals(status: &str) -> u64 {
    let digits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        assert_eq!(ignored_signals("Name:\toomph\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"), 0x1001);
        assert_eq!(ignored_signals(""), 0);
    }
}
