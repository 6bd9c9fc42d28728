//! A plugin in a process of its own: [`PluginProcess`] is the calling side, [`host`] runs in the
//! other process.
//!
//! Stress must survive a call that never returns or takes its process down, because the trace that
//! led to it is still to be shrunk. So `stress` runs plugins in a second process, connected by a
//! socket, wherever addresses and streams are plain numbers. On a real device they belong to one
//! process, and timed cases cannot wait for a socket: there the plugin is loaded into the process
//! that uses it.
#![expect(unsafe_code, reason = "signals are sent and ignored through the C library")]

use std::{
    ffi::{OsString, c_int},
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{OnceLock, mpsc::Receiver},
    thread,
    time::{Duration, Instant},
};

use super::{
    library::{PluginCall, PluginFunctions, PluginGone, PluginLibrary},
    options::PluginOptions,
    symbols::{AllocatorSymbols, PluginError},
    watchdog::{CALL_MARK, hang_message},
};
use oomph_base::{exit_description, last_bytes};

/// How long a process may take to end once it no longer answers.
const LEAVING: Duration = Duration::from_secs(2);
/// The shortest time-out for loading: the process has to start first, on a machine that may be
/// busy.
const LOADING: Duration = Duration::from_secs(3);
/// The end of its standard error, enough for its last line.
const LAST_LINE_BYTES: usize = 4096;
/// The longest refusal that is read.
const MOST_REFUSAL_BYTES: u64 = 1 << 16;
/// The caller notices first that a call takes too long; the process itself ends only where its
/// caller has gone.
const GRACE: Duration = Duration::from_secs(5);

/// The program that becomes a plugin's process.
#[derive(Clone, Debug)]
pub struct HostProgram {
    /// Usually this program.
    pub program: PathBuf,
    /// Its arguments; what follows `plugin:` is added as the last. It has to call [`host`] with its
    /// standard input.
    pub arguments: Vec<OsString>,
}

static HOST_PROGRAM: OnceLock<HostProgram> = OnceLock::new();

/// Names the program that can host plugins. The first call counts.
pub fn host_with(program: HostProgram) {
    let _ = HOST_PROGRAM.set(program);
}

/// The program that can host plugins, if one was named.
pub(super) fn host_program() -> Option<&'static HostProgram> {
    HOST_PROGRAM.get()
}

/// A plugin in a process of its own. When this is dropped, the process and all that it started are
/// ended.
#[derive(Debug)]
pub(super) struct PluginProcess {
    file: String,
    timeout: Duration,
    child: Child,
    connection: UnixStream,
    standard_error: Receiver<Vec<u8>>,
    /// Why it has ended, once it has.
    gone: Option<PluginGone>,
}

impl PluginProcess {
    /// Starts the process and loads the plugin there. If the process dies or hangs meanwhile, the
    /// first call reports it: then the plugin is broken, not the request for it.
    pub(super) fn start(
        host: &HostProgram,
        parameters: &str,
        options: &PluginOptions<'_>,
    ) -> Result<PluginProcess, PluginError> {
        let (mut child, connection) = spawn(host, parameters).map_err(|source| PluginError::NoHost { source })?;
        let mut process = PluginProcess {
            file: options.file.to_owned(),
            timeout: options.timeout,
            standard_error: last_bytes(child.stderr.take(), LAST_LINE_BYTES),
            child,
            connection,
            gone: None,
        };
        match process.wait_until_loaded() {
            Ok(None) => {}
            Ok(Some(reason)) => return Err(PluginError::Refused { reason }),
            Err(error) => {
                process.give_up(PluginCall::Load, &error);
            }
        }
        Ok(process)
    }

    /// Waits until the plugin is loaded; the reason where it cannot be.
    fn wait_until_loaded(&mut self) -> io::Result<Option<String>> {
        self.connection.set_read_timeout(Some(self.timeout.max(LOADING)))?;
        let refusal = receive_refusal(&mut self.connection)?;
        self.connection.set_read_timeout(Some(self.timeout))?;
        Ok(refusal)
    }

    /// Ends the process, if it has not ended by itself, and says what happened. A silent process
    /// may be dead too: a child of it can hold its end of the socket.
    fn give_up(&mut self, call: PluginCall, error: &io::Error) -> PluginGone {
        let is_silent = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let status = self.wait_for_end(if is_silent { Duration::ZERO } else { LEAVING });
        self.end_all();
        let died = |end: &str| PluginGone::Died(format!("plugin {}: {call}: its process {end}", self.file));
        let gone = match status {
            Some(status) => died(&self.exit_message(status)),
            None if is_silent => {
                let timeout = if call == PluginCall::Load { self.timeout.max(LOADING) } else { self.timeout };
                PluginGone::Hung(format!("plugin {}", hang_message(&self.file, call, timeout)))
            }
            None => died(&format!("no longer answers: {error}")),
        };
        self.gone.insert(gone).clone()
    }

    /// How the process ended, if it does so by itself within that time.
    fn wait_for_end(&mut self, patience: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if began.elapsed() < patience => thread::sleep(Duration::from_millis(1)),
                ended => return ended.ok().flatten(),
            }
        }
    }

    /// Ends the process and its children. Once only: later its number may belong to another
    /// process.
    fn end_all(&mut self) {
        // 0 and 1 would mean this process's own group and all processes.
        if let Some(group) = c_int::try_from(self.child.id()).ok().filter(|&group| group > 1) {
            // SAFETY: takes numbers and touches no memory. It fails only where the group is gone
            // already.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        // Fails only where it was waited for already.
        let _ = self.child.wait();
    }

    /// How the process ended, with its last line on standard error. Its children have ended too, so
    /// nothing can still be written there.
    fn exit_message(&self, status: ExitStatus) -> String {
        let printed = self.standard_error.recv_timeout(LEAVING).unwrap_or_default();
        let printed = String::from_utf8_lossy(&printed[printed.len().saturating_sub(LAST_LINE_BYTES)..]);
        let is_own = |line: &&str| !line.trim().is_empty() && !line.starts_with(CALL_MARK);
        match printed.lines().rev().find(is_own) {
            Some(line) => format!("{}; its last words: {}", exit_description(status), line.trim()),
            None => exit_description(status),
        }
    }
}

impl Drop for PluginProcess {
    fn drop(&mut self) {
        if self.gone.is_none() {
            self.end_all();
        }
    }
}

impl PluginFunctions for PluginProcess {
    fn call(&mut self, call: PluginCall, device: c_int, stream: u64) -> Result<Option<u64>, PluginGone> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        let answered =
            send_call(&mut self.connection, call, device, stream).and_then(|()| receive_result(&mut self.connection));
        answered.map_err(|error| self.give_up(call, &error))
    }
}

/// Starts the process with its end of a socket as standard input, so that what a plugin prints
/// cannot mix with results. It leads a process group, so that what the plugin starts can be ended
/// with it.
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

/// Loads the plugin that `parameters` (what follows `plugin:`) name, and serves its calls until the
/// connection ends. From now on this process ignores Ctrl-C, which some shells send to every
/// process: the caller decides.
pub fn host(parameters: &str, mut connection: UnixStream) -> io::Result<()> {
    // SAFETY: no handler is installed that could do anything wrong.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
    let mut library = match load(parameters) {
        Ok(library) => library,
        Err(refusal) => return send_refusal(&mut connection, Some(&refusal)),
    };
    send_refusal(&mut connection, None)?;
    loop {
        let (call, device, stream) = match receive_call(&mut connection) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        // A library that is loaded here is never gone: this process would be.
        send_result(&mut connection, library.call(call, device, stream).ok().flatten())?;
    }
}

fn load(parameters: &str) -> Result<PluginLibrary, String> {
    let options = PluginOptions::parse(parameters).map_err(|error| error.to_string())?;
    let timeout = options.timeout.saturating_add(GRACE);
    AllocatorSymbols::find(&options)
        .and_then(|symbols| PluginLibrary::open(options.file, &symbols, timeout))
        .map_err(|error| error.to_string())
}

fn send_call(connection: &mut UnixStream, call: PluginCall, device: c_int, stream: u64) -> io::Result<()> {
    let [kind, bytes, address] = call.numbers();
    send(connection, [kind, bytes, address, u64::from(device.cast_unsigned()), stream])
}

/// The next call; an error of kind `UnexpectedEof` where the caller has gone.
fn receive_call(connection: &mut UnixStream) -> io::Result<(PluginCall, c_int, u64)> {
    let [kind, bytes, address, device, stream] = receive(connection)?;
    let call = PluginCall::of_numbers([kind, bytes, address]).ok_or(io::ErrorKind::InvalidData)?;
    Ok((call, (device as u32).cast_signed(), stream))
}

fn send_result(connection: &mut UnixStream, result: Option<u64>) -> io::Result<()> {
    send(connection, [u64::from(result.is_some()), result.unwrap_or(0)])
}

fn receive_result(connection: &mut UnixStream) -> io::Result<Option<u64>> {
    let [is_some, value] = receive(connection)?;
    Ok((is_some != 0).then_some(value))
}

/// Says why the plugin cannot be loaded, or that it is.
fn send_refusal(connection: &mut UnixStream, refusal: Option<&str>) -> io::Result<()> {
    let words = refusal.unwrap_or_default();
    send(connection, [words.len() as u64])?;
    connection.write_all(words.as_bytes())
}

fn receive_refusal(connection: &mut UnixStream) -> io::Result<Option<String>> {
    let [length] = receive(connection)?;
    let mut words = String::new();
    connection.take(length.min(MOST_REFUSAL_BYTES)).read_to_string(&mut words)?;
    Ok((!words.is_empty()).then_some(words))
}

fn send<const N: usize>(connection: &mut UnixStream, numbers: [u64; N]) -> io::Result<()> {
    let bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
    connection.write_all(&bytes)
}

fn receive<const N: usize>(connection: &mut UnixStream) -> io::Result<[u64; N]> {
    let mut numbers = [[0; 8]; N];
    connection.read_exact(numbers.as_flattened_mut())?;
    Ok(numbers.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::Address;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let call = PluginCall::Free { address: Address(1 << 40), bytes: 7 };
        send_call(&mut one, call, -1, 3).unwrap();
        assert_eq!(receive_call(&mut other).unwrap(), (call, -1, 3));
        for result in [None, Some(0), Some(u64::MAX)] {
            send_result(&mut other, result).unwrap();
            assert_eq!(receive_result(&mut one).unwrap(), result);
        }
        for words in [None, Some("no such symbol")] {
            send_refusal(&mut other, words).unwrap();
            assert_eq!(receive_refusal(&mut one).unwrap().as_deref(), words);
        }
        send(&mut one, [99, 0, 0, 0, 0]).unwrap();
        assert_eq!(receive_call(&mut other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(one);
        assert_eq!(receive_call(&mut other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
