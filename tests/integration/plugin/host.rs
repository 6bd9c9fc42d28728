//! Signals to the process that loads a plugin for `stress`.

use std::{
    io::Read,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use super::PluginFixture;
use crate::command::{signal, with_default_signals};

/// A process that has loaded a plugin and waits for requests until the connection closes.
fn waiting_host(fixture: &PluginFixture) -> (Child, UnixStream) {
    let library = fixture.allocator("WELL_BEHAVED");
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut command = with_default_signals(&fixture.command(&["plugin-host", library.to_str().unwrap()]));
    let host = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
    drop(command);
    let mut message = [1; 40];
    ours.read_exact(&mut message).unwrap();
    // It is loaded, and there is no text of a refusal.
    assert_eq!((message[0], &message[1..]), (3, &[0; 39][..]));
    (host, ours)
}

#[test]
fn host_ignores_ctrl_c() {
    let Some(fixture) = PluginFixture::open() else { return };
    let (mut host, connection) = waiting_host(&fixture);
    signal("INT", host.id().into());
    thread::sleep(Duration::from_millis(100));
    assert_eq!(host.try_wait().unwrap(), None);
    drop(connection);
    assert_eq!(host.wait().unwrap().code(), Some(0));
}

#[test]
fn host_ends_on_signals() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (name, number) in [("TERM", 15), ("HUP", 1)] {
        let (mut host, connection) = waiting_host(&fixture);
        signal(name, host.id().into());
        thread::sleep(Duration::from_millis(200));
        // Without a signal the host ends with code 0 when the connection closes.
        drop(connection);
        assert_eq!(host.wait().unwrap().signal(), Some(number), "{name}");
    }
}
