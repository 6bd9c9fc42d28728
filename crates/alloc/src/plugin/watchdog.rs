//! Watches the calls of plugins: a call that does not return in time ends the process, and the last
//! line on standard error names the call in which a process hangs or dies. The line begins with
//! [`CALL_MARK`] or [`HANG_MARK`], for the program that waits for the process.
//!
//! A thread cannot be ended from outside, and the damage of a plugin to its process cannot be
//! repaired; so the process ends. Before a call only a few plain stores are made, because timed
//! cases run through here too. Signal handlers run in a broken process: they take no lock and no
//! memory, print one line, and let the signal do what it would have done. A plugin that overflows
//! its stack, calls `_exit` or installs its own handlers dies without that line.
#![expect(unsafe_code, reason = "signals and the standard error of a dying process belong to the C library")]

use std::{
    cell::Cell,
    fmt::{self, Write},
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::library::PluginCall;

/// Begins the line that names the call in which a plugin's process died.
pub const CALL_MARK: &str = "oomph: in a plugin's call: ";
/// Begins the line that names the call that did not return.
pub const HANG_MARK: &str = "oomph: a plugin hangs: ";

/// How often calls are checked per shortest time-out.
const CHECKS_PER_TIMEOUT: u32 = 16;
/// The longest pause between checks.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A plugin's current call, readable from other threads and from signal handlers.
#[derive(Debug)]
pub(super) struct WatchedPlugin {
    file: String,
    timeout: Duration,
    /// Odd during a call, and different for every call.
    turn: AtomicU64,
    call: [AtomicU64; 3],
}

/// All plugins of this process; none is ever unloaded.
static ALL: Mutex<Vec<&'static WatchedPlugin>> = Mutex::new(Vec::new());
static WATCH_THREAD: LazyLock<()> = LazyLock::new(|| {
    report_when_dying();
    let (started, start) = mpsc::channel();
    let watch = move || {
        let _ = started.send(());
        watch_all();
    };
    // Without the thread nothing is watched here; the time-out of the whole case still applies. Its
    // start is waited for: a thread cannot set itself up while a library is being loaded, and
    // loading may be what never ends.
    if thread::Builder::new().name("plugin watch".to_owned()).spawn(watch).is_ok() {
        let _ = start.recv();
    }
});

thread_local! {
    /// The plugin that this thread is in.
    static CURRENT: Cell<Option<&'static WatchedPlugin>> = const { Cell::new(None) };
}

impl WatchedPlugin {
    /// Watches the calls of a plugin until the process ends.
    pub(super) fn new(file: &str, timeout: Duration) -> &'static WatchedPlugin {
        let watched = Box::leak(Box::new(WatchedPlugin {
            file: file.to_owned(),
            timeout,
            turn: AtomicU64::new(0),
            call: Default::default(),
        }));
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
        LazyLock::force(&WATCH_THREAD);
        watched
    }

    /// Makes a call. The owner of the plugin makes one at a time.
    pub(super) fn during<R>(&'static self, call: PluginCall, make: impl FnOnce() -> R) -> R {
        for (place, number) in self.call.iter().zip(call.numbers()) {
            place.store(number, Ordering::Relaxed);
        }
        let outer = CURRENT.replace(Some(self));
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn + 1, Ordering::Release);
        let result = make();
        self.turn.store(turn + 2, Ordering::Release);
        CURRENT.set(outer);
        result
    }

    /// The call in progress and its turn.
    fn running(&self) -> Option<(u64, PluginCall)> {
        let turn = self.turn.load(Ordering::Acquire);
        let call = PluginCall::of_numbers(self.call.each_ref().map(|number| number.load(Ordering::Relaxed)))?;
        (turn % 2 == 1).then_some((turn, call))
    }
}

/// The file and the call that this thread is in. Takes no lock and no memory: a dying thread asks.
fn current() -> Option<(&'static str, PluginCall)> {
    let watched = CURRENT.get()?;
    watched.running().map(|(_, call)| (watched.file.as_str(), call))
}

/// Checks all plugins for ever.
fn watch_all() {
    let mut since: Vec<(u64, Instant)> = Vec::new();
    loop {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (index, watched) in all.iter().enumerate() {
            let Some((turn, call)) = watched.running() else { continue };
            if since.len() <= index {
                since.resize(index + 1, (0, Instant::now()));
            }
            let (seen, began) = &mut since[index];
            if *seen != turn {
                (*seen, *began) = (turn, Instant::now());
            } else if began.elapsed() >= watched.timeout {
                end_process(&hang_message(&watched.file, call, watched.timeout));
            }
        }
        let shortest = all.iter().map(|watched| watched.timeout).min().unwrap_or(LONGEST_PAUSE);
        thread::sleep((shortest / CHECKS_PER_TIMEOUT).min(LONGEST_PAUSE));
    }
}

/// Says that a plugin does not return from a call.
pub(super) fn hang_message(file: &str, call: PluginCall, timeout: Duration) -> String {
    format!("{file}: {call} did not return within {}", humantime::format_duration(timeout))
}

/// From now on a process that dies in a plugin's call names the call.
fn report_when_dying() {
    #[cfg(unix)]
    for number in [libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGFPE, libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the handler has the type that the C library calls, and does nothing that a
        // handler must not do.
        unsafe { libc::signal(number, on_signal as *const () as libc::sighandler_t) };
    }
    // SAFETY: the handler lives as long as the process, as does all that it reads.
    unsafe { libc::atexit(report_call) };
}

/// Prints the reason and ends the process, with a core dump where those are enabled: it shows where
/// the call hangs.
fn end_process(reason: &str) -> ! {
    print_line(format_args!("{HANG_MARK}{reason}\n"));
    #[cfg(unix)]
    // SAFETY: this is the default disposition, so no handler is installed.
    unsafe {
        libc::signal(libc::SIGABRT, libc::SIG_DFL)
    };
    std::process::abort()
}

#[cfg(unix)]
extern "C" fn on_signal(number: std::ffi::c_int) {
    report_call();
    // SAFETY: both are allowed in a handler. The signal now ends the process, here or where it came
    // from.
    unsafe {
        libc::signal(number, libc::SIG_DFL);
        libc::raise(number);
    }
}

extern "C" fn report_call() {
    if let Some((file, call)) = current() {
        // On a line of its own, after whatever the plugin has printed.
        print_line(format_args!("\n{CALL_MARK}{file}: {call}\n"));
    }
}

/// Writes to standard error without a lock and without allocating.
fn print_line(words: fmt::Arguments<'_>) {
    let mut line = StackLine { bytes: [0; 1024], length: 0 };
    // What does not fit is cut.
    let _ = line.write_fmt(words);
    // SAFETY: the bytes are there; a failure cannot be reported anywhere.
    unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length) };
}

/// Text on the stack.
struct StackLine {
    bytes: [u8; 1024],
    length: usize,
}

impl Write for StackLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let count = room.len().min(text.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        if count < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_in_progress_is_known_and_forgotten_afterwards() {
        let watched = WatchedPlugin::new("a.so", Duration::from_secs(3600));
        let call = PluginCall::Alloc { bytes: 7 };
        assert_eq!(watched.during(call, current), Some(("a.so", call)));
        assert_eq!(current(), None);
        let elsewhere = watched.during(call, || thread::spawn(current).join().unwrap());
        assert_eq!(elsewhere, None, "another thread is not in the call");
        let other = WatchedPlugin::new("b.so", Duration::from_secs(3600));
        let nested = watched.during(call, || (other.during(PluginCall::Reset, current), current()));
        assert_eq!(nested, (Some(("b.so", PluginCall::Reset)), Some(("a.so", call))));
    }

    #[test]
    fn a_line_that_is_too_long_is_cut() {
        let mut line = StackLine { bytes: [0; 1024], length: 0 };
        assert!(line.write_str(&"a".repeat(1000)).is_ok());
        assert!(line.write_str(&"b".repeat(30)).is_err());
        assert_eq!((line.length, line.bytes[1023]), (1024, b'b'));
    }
}
