//! Signals that ask the program to end.

use std::{fs, io, thread};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

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
