//! How a process ended, in words.

use std::process::ExitStatus;

/// Signals by number, as Linux has them.
const SIGNALS: [(i32, &str); 15] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (3, "SIGQUIT"),
    (4, "SIGILL, an illegal instruction"),
    (5, "SIGTRAP"),
    (6, "SIGABRT, an abort"),
    (7, "SIGBUS, a bad memory access"),
    (8, "SIGFPE, an arithmetic error"),
    (9, "SIGKILL: by hand, or by the kernel for want of host memory"),
    (11, "SIGSEGV, a bad memory access"),
    (13, "SIGPIPE"),
    (14, "SIGALRM"),
    (15, "SIGTERM"),
    (24, "SIGXCPU, too much processor time"),
    (25, "SIGXFSZ, too large a file"),
];

/// How a process ended, in words that follow its name.
#[must_use]
pub fn ending(status: ExitStatus) -> String {
    match (signal(status), status.code()) {
        (Some(number), _) => match SIGNALS.iter().find(|(known, _)| *known == number) {
            Some((_, name)) => format!("was ended by {name}"),
            None => format!("was ended by signal {number}"),
        },
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The signal that ended a process, if one did.
#[cfg(unix)]
#[must_use]
pub fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

/// There are no signals here.
#[cfg(not(unix))]
#[must_use]
pub fn signal(_status: ExitStatus) -> Option<i32> {
    None
}
