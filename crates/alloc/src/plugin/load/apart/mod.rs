//! A plugin in a process that does nothing else: what becomes of that process is an answer like any other.
//!
//! Under stress a call that never returns, or takes its process down, must be survived: the trace that led to it is still
//! to be shrunk. So `stress` has plugins served by a second process, a socket away, wherever addresses and streams are
//! mere numbers. On a real device they belong to one process, and timed cases cannot wait for a socket: there the plugin
//! is loaded into the process that uses it. [`Apart`] is this end, [`host`] the other.

mod client;
mod host;
mod signals;
mod wire;

pub(super) use client::Apart;
pub use host::host;

use std::{ffi::OsString, path::PathBuf, sync::OnceLock};

/// The program that becomes a plugin's process.
#[derive(Clone, Debug)]
pub struct HostProgram {
    /// This program, as a rule.
    pub program: PathBuf,
    /// Its arguments; what follows `plugin:` is added as the last. It has to call [`host`] with its standard input.
    pub arguments: Vec<OsString>,
}

static HOST_PROGRAM: OnceLock<HostProgram> = OnceLock::new();

/// From now on plugins can be served by other processes of this program. The first word counts.
pub fn host_with(program: HostProgram) {
    let _ = HOST_PROGRAM.set(program);
}

/// Who can serve plugins, if anybody was named.
pub(super) fn host_program() -> Option<&'static HostProgram> {
    HOST_PROGRAM.get()
}
