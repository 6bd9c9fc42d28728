//! What a process says when a plugin brings it down: by a signal, by calling `exit`, or by never returning.
//!
//! Handlers run in a process that is broken already, so they take no lock and no memory: the line is put together on the
//! stack and written with one call. Then the signal does what it would have done. A plugin that overflows its stack, ends
//! by `_exit` or has handlers of its own dies without these words.
#![expect(unsafe_code, reason = "signals and standard error of a dying process are the C library's")]

use std::{
    ffi::{c_int, c_void},
    fmt::{self, Write},
};

use super::watched::{CALL_MARK, HANG_MARK, current};

/// Signals that a program brings upon itself, by number as all systems have them that matter here: SIGILL, SIGTRAP,
/// SIGABRT, SIGFPE, SIGSEGV, and SIGBUS, which is 7 on Linux and 10 elsewhere.
#[cfg(unix)]
const OWN_SIGNALS: [c_int; 6] = [4, 5, SIGABRT, 8, 11, if cfg!(target_os = "linux") { 7 } else { 10 }];
#[cfg(unix)]
const SIGABRT: c_int = 6;
/// The disposition that a signal has at first.
#[cfg(unix)]
const DEFAULT: usize = 0;
const STANDARD_ERROR: c_int = 2;

unsafe extern "C" {
    #[cfg(unix)]
    fn signal(signal: c_int, handler: usize) -> usize;
    #[cfg(unix)]
    fn raise(signal: c_int) -> c_int;
    fn atexit(handler: extern "C" fn()) -> c_int;
    fn write(file: c_int, bytes: *const c_void, count: usize) -> isize;
}

/// From now on a process that dies in a plugin's call says so.
pub(super) fn speak_when_dying() {
    #[cfg(unix)]
    for number in OWN_SIGNALS {
        // SAFETY: the handler has the type that the C library calls, and does nothing that a handler must not do.
        unsafe { signal(number, on_signal as *const () as usize) };
    }
    // SAFETY: the handler lives as long as the process, as does all that it looks at.
    unsafe { atexit(on_exit) };
}

/// Names the call that never returned and ends the process, with a core dump where those are kept: it shows where.
pub(super) fn end_the_process(words: &str) -> ! {
    say(format_args!("{HANG_MARK}{words}\n"));
    #[cfg(unix)]
    // SAFETY: the disposition is the first one, so no handler is installed, and SIGABRT is the number of a signal.
    unsafe {
        signal(SIGABRT, DEFAULT)
    };
    std::process::abort()
}

#[cfg(unix)]
extern "C" fn on_signal(number: c_int) {
    name_the_call();
    // SAFETY: both are allowed in a handler. The signal now ends the process, here or where it came from.
    unsafe {
        signal(number, DEFAULT);
        raise(number);
    }
}

extern "C" fn on_exit() {
    name_the_call();
}

fn name_the_call() {
    if let Some((file, call)) = current() {
        // On a line of its own, whatever the plugin has left there.
        say(format_args!("\n{CALL_MARK}{file}: {call}\n"));
    }
}

/// Writes to standard error without a lock and without memory of its own.
fn say(words: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 1024], length: 0 };
    // What does not fit is left out.
    let _ = line.write_fmt(words);
    // SAFETY: the bytes are there; nobody is left who could be told of a failure.
    unsafe { write(STANDARD_ERROR, line.bytes.as_ptr().cast(), line.length) };
}

/// Text on the stack.
struct Line {
    bytes: [u8; 1024],
    length: usize,
}

impl Write for Line {
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
    fn a_line_that_is_too_long_is_cut() {
        let mut line = Line { bytes: [0; 1024], length: 0 };
        assert!(line.write_str(&"a".repeat(1000)).is_ok());
        assert!(line.write_str(&"b".repeat(30)).is_err());
        assert_eq!((line.length, line.bytes[1023]), (1024, b'b'));
    }
}
