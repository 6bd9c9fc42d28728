//! Calls of a plugin under watch: one that does not return in time ends the process, and one that brings the process down
//! is named on the way.
//!
//! A thread cannot be ended from outside, and what a plugin has done to its process cannot be mended; so the process goes,
//! which is why there is one for every case. The last line on standard error says which call it was, beginning with
//! [`CALL_MARK`] or [`HANG_MARK`]: whoever waits for the process reads it there. What is written down before a call is a
//! few plain stores, because timed cases run through here too.

use std::{
    cell::Cell,
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{call::Call, last_words};

/// Begins the line that names the call in which a plugin brought its process down.
pub const CALL_MARK: &str = "oomph: in a plugin's call: ";
/// Begins the line that names the call from which a plugin does not return.
pub const HANG_MARK: &str = "oomph: a plugin hangs: ";

/// How often calls are looked at, as a part of the shortest time that one may take.
const LOOKS_PER_TIMEOUT: u32 = 16;
/// And no less often than this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What is known of a plugin's calls from outside its thread.
#[derive(Debug)]
pub(super) struct Watched {
    file: String,
    timeout: Duration,
    /// Odd during a call, and another number for every one.
    turn: AtomicU64,
    call: [AtomicU64; 3],
}

/// All plugins of this process; none is ever unloaded.
static ALL: Mutex<Vec<&'static Watched>> = Mutex::new(Vec::new());
static WATCHMAN: LazyLock<()> = LazyLock::new(|| {
    last_words::speak_when_dying();
    let (started, start) = mpsc::channel();
    let watchman = move || {
        let _ = started.send(());
        watch();
    };
    // Without a thread nobody watches; whoever waits for the whole case still does. Its start is waited for: a thread
    // cannot set itself up while a library is being loaded, and loading may be what never ends.
    if thread::Builder::new().name("plugin watch".to_owned()).spawn(watchman).is_ok() {
        let _ = start.recv();
    }
});

thread_local! {
    /// The plugin that this thread is in.
    static CURRENT: Cell<Option<&'static Watched>> = const { Cell::new(None) };
}

impl Watched {
    /// Has the calls of a plugin watched, until the process ends.
    pub(super) fn new(file: &str, timeout: Duration) -> &'static Watched {
        let watched = Box::leak(Box::new(Watched {
            file: file.to_owned(),
            timeout,
            turn: AtomicU64::new(0),
            call: Default::default(),
        }));
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
        LazyLock::force(&WATCHMAN);
        watched
    }

    /// Makes a call. Whoever has the plugin makes one at a time.
    pub(super) fn during<R>(&'static self, call: Call, make: impl FnOnce() -> R) -> R {
        for (place, number) in self.call.iter().zip(call.numbers()) {
            place.store(number, Ordering::Relaxed);
        }
        let outer = CURRENT.replace(Some(self));
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn + 1, Ordering::Release);
        let answer = make();
        self.turn.store(turn + 2, Ordering::Release);
        CURRENT.set(outer);
        answer
    }

    /// The call that runs, if one does.
    fn running(&self) -> Option<(u64, Call)> {
        let turn = self.turn.load(Ordering::Acquire);
        let call = Call::of_numbers(self.call.each_ref().map(|number| number.load(Ordering::Relaxed)))?;
        (turn % 2 == 1).then_some((turn, call))
    }
}

/// The file and the call that this thread is in. Takes no lock and no memory: a dying thread asks.
pub(super) fn current() -> Option<(&'static str, Call)> {
    let watched = CURRENT.get()?;
    watched.running().map(|(_, call)| (watched.file.as_str(), call))
}

/// Looks at all plugins for ever.
fn watch() {
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
                last_words::end_the_process(&hung(&watched.file, call, watched.timeout));
            }
        }
        let shortest = all.iter().map(|watched| watched.timeout).min().unwrap_or(LONGEST_PAUSE);
        thread::sleep((shortest / LOOKS_PER_TIMEOUT).min(LONGEST_PAUSE));
    }
}

/// Says that a plugin does not return from a call.
pub(super) fn hung(file: &str, call: Call, timeout: Duration) -> String {
    format!("{file}: {call} did not return within {}", humantime::format_duration(timeout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_in_progress_is_known_and_forgotten_afterwards() {
        let watched = Watched::new("a.so", Duration::from_secs(3600));
        let call = Call::Alloc { bytes: 7 };
        assert_eq!(watched.during(call, current), Some(("a.so", call)));
        assert_eq!(current(), None);
        let elsewhere = watched.during(call, || thread::spawn(current).join().unwrap());
        assert_eq!(elsewhere, None, "another thread is not in the call");
        let other = Watched::new("b.so", Duration::from_secs(3600));
        let nested = watched.during(call, || (other.during(Call::Reset, current), current()));
        assert_eq!(nested, (Some(("b.so", Call::Reset)), Some(("a.so", call))));
    }
}
