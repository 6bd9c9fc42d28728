//! The end that asks: starts the process, waits for answers no longer than it has to, and tells what became of it.

use std::{
    ffi::c_int,
    io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::Receiver,
    thread,
    time::{Duration, Instant},
};

use super::{
    HostProgram, signals,
    wire::{self, Answer, Question},
};
use crate::plugin::load::{
    PluginError,
    allocator::{Allocator, Gone},
    call::Call,
    watched::{CALL_MARK, hung},
    wish::Wish,
};
use oomph_base::{Address, exit_description, last_bytes};

/// How long a process may take to be gone once it no longer answers.
const LEAVING: Duration = Duration::from_secs(2);
/// How long loading may take at least: the process has to start first, on a machine that may be busy.
const LOADING: Duration = Duration::from_secs(3);
/// As much of its standard error as may hold its last line.
const LAST_WORDS_BYTES: usize = 4096;

/// A plugin in a process of its own. Dropped, the process and all that it started are ended, and it is waited for.
#[derive(Debug)]
pub(in crate::plugin::load) struct Apart {
    file: String,
    timeout: Duration,
    child: Child,
    connection: UnixStream,
    complaints: Receiver<Vec<u8>>,
    /// What became of it, once it is gone.
    gone: Option<Gone>,
}

impl Apart {
    /// Has the plugin loaded. A process that dies or hangs over that is one that the first call finds gone: it is the
    /// plugin that is broken then, and not the request for it.
    pub(in crate::plugin::load) fn start(
        host: &HostProgram,
        parameters: &str,
        wish: &Wish<'_>,
    ) -> Result<Apart, PluginError> {
        let (mut child, connection) = spawn(host, parameters).map_err(|source| PluginError::NoHost { source })?;
        let mut apart = Apart {
            file: wish.file.to_owned(),
            timeout: wish.timeout,
            complaints: last_bytes(child.stderr.take(), LAST_WORDS_BYTES),
            child,
            connection,
            gone: None,
        };
        match apart.loaded() {
            Ok(None) => {}
            Ok(Some(reason)) => return Err(PluginError::Refused { reason }),
            Err(error) => {
                apart.give_up(Call::Load, &error);
            }
        }
        Ok(apart)
    }

    /// Waits for the plugin to be loaded; in words where it cannot be.
    fn loaded(&mut self) -> io::Result<Option<String>> {
        self.connection.set_read_timeout(Some(self.timeout.max(LOADING)))?;
        let answer = wire::answered_load(&mut self.connection)?;
        self.connection.set_read_timeout(Some(self.timeout))?;
        Ok(answer)
    }

    fn ask(&mut self, call: Call, device: c_int, stream: u64) -> Result<Answer, Gone> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        let question = Question { call, device, stream };
        let answered = wire::ask(&mut self.connection, &question).and_then(|()| wire::answered(&mut self.connection));
        answered.map_err(|error| self.give_up(call, &error))
    }

    /// Ends the process, if it has not ended by itself, and puts what happened into words. One that is silent may be dead
    /// all the same: a child of it can hold its end of the socket.
    fn give_up(&mut self, call: Call, error: &io::Error) -> Gone {
        let is_silent = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let status = self.end_within(if is_silent { Duration::ZERO } else { LEAVING });
        self.end_all();
        let died = |end: &str| Gone::Died(format!("plugin {}: {call}: its process {end}", self.file));
        let gone = match status {
            Some(status) => died(&self.with_last_words(status)),
            None if is_silent => {
                let timeout = if call == Call::Load { self.timeout.max(LOADING) } else { self.timeout };
                Gone::Hung(format!("plugin {}", hung(&self.file, call, timeout)))
            }
            None => died(&format!("no longer answers: {error}")),
        };
        self.gone.insert(gone).clone()
    }

    /// How the process ended, if it does so by itself.
    fn end_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if began.elapsed() < patience => thread::sleep(Duration::from_millis(1)),
                ended => return ended.ok().flatten(),
            }
        }
    }

    /// Ends whatever runs of it, once: later its number may be another's.
    fn end_all(&mut self) {
        signals::end_group(self.child.id());
        // Fails only where it was waited for already.
        let _ = self.child.wait();
    }

    /// How the process ended. Its children are gone too, and with them all who could still write to its standard error.
    fn with_last_words(&self, status: ExitStatus) -> String {
        let said = self.complaints.recv_timeout(LEAVING).unwrap_or_default();
        let said = String::from_utf8_lossy(&said[said.len().saturating_sub(LAST_WORDS_BYTES)..]);
        let own_words = |line: &&str| !line.trim().is_empty() && !line.starts_with(CALL_MARK);
        match said.lines().rev().find(own_words) {
            Some(words) => format!("{}; its last words: {}", exit_description(status), words.trim()),
            None => exit_description(status),
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if self.gone.is_none() {
            self.end_all();
        }
    }
}

impl Allocator for Apart {
    fn alloc(&mut self, bytes: usize, device: c_int, stream: u64) -> Result<Address, Gone> {
        let answer = self.ask(Call::Alloc { bytes: bytes as u64 }, device, stream)?;
        Ok(Address(answer.unwrap_or(Address::NULL.0)))
    }

    fn free(&mut self, address: Address, bytes: usize, device: c_int, stream: u64) -> Result<(), Gone> {
        self.ask(Call::Free { address, bytes: bytes as u64 }, device, stream).map(drop)
    }

    fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, Gone> {
        self.ask(Call::RecordStream { address }, 0, stream).map(|answer| answer.is_some())
    }

    fn reset(&mut self) -> Result<(), Gone> {
        self.ask(Call::Reset, 0, 0).map(drop)
    }

    fn reserved(&mut self, device: c_int) -> Result<Option<u64>, Gone> {
        self.ask(Call::Reserved, device, 0)
    }

    fn limit(&mut self, device: c_int, bytes: u64) -> Result<bool, Gone> {
        self.ask(Call::Limit { bytes }, device, 0).map(|answer| answer.is_some())
    }
}

/// Starts the process with its end of a socket as standard input: what a plugin prints cannot get between answers. It leads
/// a group of its own, by which what the plugin starts can be ended with it.
fn spawn(host: &HostProgram, parameters: &str) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let child = Command::new(&host.program)
        .args(&host.arguments)
        .arg(parameters)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    Ok((child, ours))
}
