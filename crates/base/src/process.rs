//! Child processes: how one ended, and the last output of one.

use std::{
    io::{self, Read},
    process::ExitStatus,
    sync::mpsc::{self, Receiver},
    thread,
};

/// Signals by their number on Linux.
const SIGNALS: [(i32, &str); 15] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (3, "SIGQUIT"),
    (4, "SIGILL, an illegal instruction"),
    (5, "SIGTRAP"),
    (6, "SIGABRT, an abort"),
    (7, "SIGBUS, a bad memory access"),
    (8, "SIGFPE, an arithmetic error"),
    (9, "SIGKILL: sent by a user, or by the kernel when host memory ran out"),
    (11, "SIGSEGV, a bad memory access"),
    (13, "SIGPIPE"),
    (14, "SIGALRM"),
    (15, "SIGTERM"),
    (24, "SIGXCPU, too much processor time"),
    (25, "SIGXFSZ, too large a file"),
];

/// How a process ended, as a phrase that follows its name: `ended with exit code 1`.
#[must_use]
pub fn exit_description(status: ExitStatus) -> String {
    match (exit_signal(status), status.code()) {
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
pub fn exit_signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

/// Other systems have no signals.
#[cfg(not(unix))]
#[must_use]
pub fn exit_signal(_status: ExitStatus) -> Option<i32> {
    None
}

/// Reads a pipe to its end on its own thread, so that the writer never blocks, and sends what was written.
///
/// Of more than twice `most` bytes, only the end is kept: at least the last `most` bytes. Without a pipe it sends nothing.
///
/// ```
/// let said = oomph_base::last_bytes(Some(&b"one two three"[..]), 5).recv()?;
/// assert!(said.ends_with(b"three"));
/// # Ok::<(), std::sync::mpsc::RecvError>(())
/// ```
pub fn last_bytes(pipe: Option<impl Read + Send + 'static>, most: usize) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut chunk = [0; 1 << 16];
        if let Some(mut pipe) = pipe {
            loop {
                match pipe.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(count) => kept.extend_from_slice(&chunk[..count]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
                if kept.len() / 2 > most {
                    kept.drain(..kept.len() - most);
                }
            }
        }
        // The receiver may be gone already.
        let _ = sender.send(kept);
    });
    receiver
}
