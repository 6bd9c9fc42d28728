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

use oomph_shadow::served_call::{ServedArguments, ServedCall, ServedResults};

use super::{
    cuda::{CudaServer, answered_by},
    library::{PluginCall, PluginFunctions, PluginGone, PluginLibrary},
    symbols::{AllocatorSymbols, PluginError, PluginOptions},
    watchdog::{CALL_MARK, hang_message},
};
use oomph_base::{exit_description, last_bytes};

/// How long a process may take to end once it no longer answers.
const LEAVING: Duration = Duration::from_secs(2);
/// The shortest time-out for loading: the process has to start first, on a machine that may be
/// busy.
const LOADING: Duration = Duration::from_secs(3);
/// The shortest time-out for calls from several threads at once.
const THREADS: Duration = Duration::from_secs(30);
/// The end of its standard error, enough for its last line.
const LAST_LINE_BYTES: usize = 4096;
/// The longest refusal that is read.
const MOST_REFUSAL_BYTES: u64 = 1 << 16;
/// The caller notices first that a call takes too long; the process itself ends only where its
/// caller has gone.
const GRACE: Duration = Duration::from_secs(5);
/// A call that makes CUDA calls may take this many times as long as one that does not.
const MOST_EXTENSIONS: u32 = 12;

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
    host: HostProgram,
    /// What follows `plugin:`, and the device, as the process gets them.
    arguments: [String; 2],
    file: String,
    timeout: Duration,
    running: Option<RunningProcess>,
    /// Why it has ended, once it has.
    gone: Option<PluginGone>,
}

/// Whether a call only asks something, as a loop does that waits.
fn is_question(call: ServedCall) -> bool {
    matches!(call, ServedCall::MemGetInfo | ServedCall::StreamQuery | ServedCall::EventQuery)
}

/// A process that was started.
#[derive(Debug)]
struct RunningProcess {
    child: Child,
    connection: UnixStream,
    standard_error: Receiver<Vec<u8>>,
    /// Whether the plugin is loaded.
    is_loaded: bool,
    /// The CUDA call with which its loading waits.
    pending: Option<(ServedCall, ServedArguments)>,
}

/// What a plugin's process sends.
enum HostMessage {
    /// The result of a call.
    Result(Option<u64>),
    /// A CUDA call that has to be answered.
    Cuda(ServedCall, ServedArguments),
    /// The plugin is loaded, or cannot be.
    Loaded(Option<String>),
}

impl PluginProcess {
    /// Starts the process and loads the plugin there. If the process dies or hangs meanwhile, the
    /// first call reports it: then the plugin is broken, not the request for it.
    pub(super) fn start(
        host: &HostProgram,
        parameters: &str,
        options: &PluginOptions<'_>,
        device: String,
    ) -> Result<PluginProcess, PluginError> {
        let mut process = PluginProcess {
            host: host.clone(),
            arguments: [parameters.to_owned(), device],
            file: options.file.to_owned(),
            timeout: options.timeout,
            running: None,
            gone: None,
        };
        process.spawn().map_err(|source| PluginError::NoHost { source })?;
        match process.wait_for(PluginCall::Load, None) {
            Ok(HostMessage::Loaded(Some(reason))) => return Err(PluginError::Refused { reason }),
            Ok(HostMessage::Loaded(None)) => process.note_loaded(),
            // It goes on loading at the first call, which has a device.
            Ok(HostMessage::Cuda(call, arguments)) => {
                if let Some(running) = &mut process.running {
                    running.pending = Some((call, arguments));
                }
            }
            Ok(HostMessage::Result(_)) | Err(_) => {}
        }
        Ok(process)
    }

    fn spawn(&mut self) -> io::Result<()> {
        let (mut child, connection) = spawn(&self.host, &self.arguments)?;
        let standard_error = last_bytes(child.stderr.take(), LAST_LINE_BYTES);
        self.running = Some(RunningProcess { child, connection, standard_error, is_loaded: false, pending: None });
        Ok(())
    }

    fn note_loaded(&mut self) {
        if let Some(running) = &mut self.running {
            running.is_loaded = true;
        }
    }

    /// Starts the process again where it was ended, and waits until the plugin is loaded.
    fn finish_loading(&mut self, server: &mut dyn CudaServer) -> Result<(), PluginGone> {
        if self.running.is_none()
            && let Err(error) = self.spawn()
        {
            return Err(self.gone.insert(PluginGone::Died(format!("plugin {}: {error}", self.file))).clone());
        }
        if self.running.as_ref().is_some_and(|running| running.is_loaded) {
            return Ok(());
        }
        let pending = self.running.as_mut().and_then(|running| running.pending.take());
        if let Some((call, arguments)) = pending {
            let answer = server.serve(call, arguments);
            self.send_answer(PluginCall::Load, answer)?;
        }
        match self.wait_for(PluginCall::Load, Some(server))? {
            HostMessage::Loaded(Some(reason)) => Err(self.gone.insert(PluginGone::Died(reason)).clone()),
            _ => {
                self.note_loaded();
                Ok(())
            }
        }
    }

    /// The next message that is not a CUDA call; with a server these are answered.
    fn wait_for(
        &mut self,
        call: PluginCall,
        mut server: Option<&mut dyn CudaServer>,
    ) -> Result<HostMessage, PluginGone> {
        let (timeout, begin) = (self.timeout_of(call), Instant::now());
        let mut end = begin + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Some(running) = &mut self.running else {
                return Err(self.give_up(call, &io::ErrorKind::NotConnected.into()));
            };
            // Zero would mean to wait for ever.
            let message = running
                .connection
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))
                .and_then(|()| receive_message(&mut running.connection));
            let is_late = left.is_zero();
            match (message, &mut server) {
                (Ok(HostMessage::Cuda(..)), Some(_)) if is_late => {
                    return Err(self.give_up(call, &io::ErrorKind::TimedOut.into()));
                }
                (Ok(HostMessage::Cuda(cuda, arguments)), Some(server)) => {
                    let answer = server.serve(cuda, arguments);
                    self.send_answer(call, answer)?;
                    // A plugin that gives thousands of pages back does not hang; one that asks again and again may.
                    if !is_question(cuda) {
                        end = (Instant::now() + timeout).min(begin + timeout * MOST_EXTENSIONS);
                    }
                }
                (Ok(message), _) => return Ok(message),
                (Err(error), _) => return Err(self.give_up(call, &error)),
            }
        }
    }

    fn send_answer(&mut self, call: PluginCall, (code, values): (i32, ServedResults)) -> Result<(), PluginGone> {
        let [first, second, third, fourth] = values;
        let words = [u64::from(code.cast_unsigned()), first, second, third, fourth];
        let sent = self.running.as_mut().map(|running| send(&mut running.connection, words));
        sent.unwrap_or(Ok(())).map_err(|error| self.give_up(call, &error))
    }

    fn timeout_of(&self, call: PluginCall) -> Duration {
        match call {
            PluginCall::Load => self.timeout.max(LOADING),
            // Each thread makes many calls.
            PluginCall::Threads { .. } => self.timeout.max(THREADS),
            _ => self.timeout,
        }
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
                PluginGone::Hung(format!("plugin {}", hang_message(&self.file, call, self.timeout_of(call))))
            }
            None => died(&format!("no longer answers: {error}")),
        };
        self.gone.insert(gone).clone()
    }

    /// How the process ended, if it does so by itself within that time.
    fn wait_for_end(&mut self, patience: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        let running = self.running.as_mut()?;
        loop {
            match running.child.try_wait() {
                Ok(None) if began.elapsed() < patience => thread::sleep(Duration::from_millis(1)),
                ended => return ended.ok().flatten(),
            }
        }
    }

    /// Ends the process and its children. Once only: later its number may belong to another
    /// process.
    fn end_all(&mut self) {
        let Some(running) = &mut self.running else { return };
        // 0 and 1 would mean this process's own group and all processes.
        if let Some(group) = c_int::try_from(running.child.id()).ok().filter(|&group| group > 1) {
            // SAFETY: takes numbers and touches no memory. It fails only where the group is gone
            // already.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        // Fails only where it was waited for already.
        let _ = running.child.wait();
    }

    /// How the process ended, with its last line on standard error. Its children have ended too, so
    /// nothing can still be written there.
    fn exit_message(&self, status: ExitStatus) -> String {
        let running = self.running.as_ref();
        let printed = running.and_then(|running| running.standard_error.recv_timeout(LEAVING).ok()).unwrap_or_default();
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
    fn call(
        &mut self,
        call: PluginCall,
        device: c_int,
        stream: u64,
        server: &mut dyn CudaServer,
    ) -> Result<Option<u64>, PluginGone> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        self.finish_loading(server)?;
        let sent = self.running.as_mut().map(|running| send_call(&mut running.connection, call, device, stream));
        sent.unwrap_or(Ok(())).map_err(|error| self.give_up(call, &error))?;
        match self.wait_for(call, Some(server))? {
            HostMessage::Result(result) => Ok(result),
            _ => Err(self.give_up(call, &io::ErrorKind::InvalidData.into())),
        }
    }

    fn restart(&mut self) -> bool {
        if self.gone.is_none() {
            self.end_all();
            self.running = None;
        }
        true
    }
}

/// Starts the process with its end of a socket as standard input, so that what a plugin prints
/// cannot mix with results. It leads a process group, so that what the plugin starts can be ended
/// with it.
fn spawn(host: &HostProgram, arguments: &[String; 2]) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let child = Command::new(&host.program)
        .args(&host.arguments)
        .args(arguments)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    Ok((child, ours))
}

/// Loads the plugin that `parameters` (what follows `plugin:`) name, and serves its calls until the
/// connection ends. `device` describes the simulated device. From now on this process ignores
/// Ctrl-C, which some shells send to every process: the caller decides.
pub fn host(parameters: &str, device: &str, mut connection: UnixStream) -> io::Result<()> {
    // SAFETY: no handler is installed that could do anything wrong.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
    let mut asker = SocketServer { connection: connection.try_clone()? };
    let mut library = match answered_by(&mut asker, || load(parameters, device)) {
        Ok(library) => library,
        Err(refusal) => return send_loaded(&mut connection, Some(&refusal)),
    };
    send_loaded(&mut connection, None)?;
    loop {
        let (call, device, stream) = match receive_call(&mut connection) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        // A library that is loaded here is never gone: this process would be.
        let result = library.call(call, device, stream, &mut asker).ok().flatten();
        send(&mut connection, [u64::from(result.is_some()), result.unwrap_or(0), 0, 0, 0])?;
    }
}

/// Asks the other process.
struct SocketServer {
    connection: UnixStream,
}

impl CudaServer for SocketServer {
    fn serve(&mut self, call: ServedCall, [first, second, third]: ServedArguments) -> (i32, ServedResults) {
        let asked = send(&mut self.connection, [CUDA_CALL, u64::from(call as u32), first, second, third]);
        match asked.and_then(|()| receive(&mut self.connection)) {
            Ok::<[u64; 5], _>([code, results @ ..]) => ((code as u32).cast_signed(), results),
            // The caller has gone, and this process with it.
            Err(_) => std::process::exit(1),
        }
    }
}

fn load(parameters: &str, device: &str) -> Result<PluginLibrary, String> {
    let options = PluginOptions::parse(parameters).map_err(|error| error.to_string())?;
    let timeout = options.timeout.saturating_add(GRACE);
    AllocatorSymbols::find(&options)
        .and_then(|symbols| PluginLibrary::open(options.file, &symbols, timeout, Some(device)))
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

/// The first words of messages from a plugin's process; 0 and 1 are results.
const CUDA_CALL: u64 = 2;
const LOADED: u64 = 3;

/// Says why the plugin cannot be loaded, or that it is.
fn send_loaded(connection: &mut UnixStream, refusal: Option<&str>) -> io::Result<()> {
    let words = refusal.unwrap_or_default();
    send(connection, [LOADED, words.len() as u64, 0, 0, 0])?;
    connection.write_all(words.as_bytes())
}

fn receive_message(connection: &mut UnixStream) -> io::Result<HostMessage> {
    let [kind, first, second, third, fourth] = receive(connection)?;
    Ok(match kind {
        0 => HostMessage::Result(None),
        1 => HostMessage::Result(Some(first)),
        CUDA_CALL => {
            let call = u32::try_from(first).ok().and_then(ServedCall::numbered).ok_or(io::ErrorKind::InvalidData)?;
            HostMessage::Cuda(call, [second, third, fourth])
        }
        LOADED => {
            let mut words = String::new();
            connection.take(first.min(MOST_REFUSAL_BYTES)).read_to_string(&mut words)?;
            HostMessage::Loaded((!words.is_empty()).then_some(words))
        }
        _ => return Err(io::ErrorKind::InvalidData.into()),
    })
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
        send(&mut other, [1, u64::MAX, 0, 0, 0]).unwrap();
        assert!(matches!(receive_message(&mut one).unwrap(), HostMessage::Result(Some(u64::MAX))));
        send(&mut other, [CUDA_CALL, ServedCall::MemFree as u64, 7, 0, 0]).unwrap();
        assert!(matches!(receive_message(&mut one).unwrap(), HostMessage::Cuda(ServedCall::MemFree, [7, 0, 0])));
        for words in [None, Some("no such symbol")] {
            send_loaded(&mut other, words).unwrap();
            let HostMessage::Loaded(received) = receive_message(&mut one).unwrap() else { panic!("{words:?}") };
            assert_eq!(received.as_deref(), words);
        }
        send(&mut one, [99, 0, 0, 0, 0]).unwrap();
        assert_eq!(receive_call(&mut other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(one);
        assert_eq!(receive_call(&mut other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
