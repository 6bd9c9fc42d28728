//! The process that `stress` has a plugin loaded into, and signals.

use std::{
    io::Read,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use super::Workshop;

/// A process that has loaded a plugin and waits for questions, which end with the connection.
fn waiting(workshop: &Workshop) -> (Child, UnixStream) {
    let library = workshop.allocator("WELL_BEHAVED");
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut command = workshop.command(&["plugin-host", library.to_str().unwrap()]);
    let host = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
    drop(command);
    let mut length_of_refusal = [1; 8];
    ours.read_exact(&mut length_of_refusal).unwrap();
    assert_eq!(length_of_refusal, [0; 8]);
    (host, ours)
}

fn send(signal: &str, host: &Child) {
    assert!(Command::new("kill").args(["-s", signal, &host.id().to_string()]).status().unwrap().success());
}

#[test]
fn ctrl_c_is_left_to_the_process_that_asks() {
    let Some(workshop) = Workshop::open() else { return };
    let (mut host, connection) = waiting(&workshop);
    send("INT", &host);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(host.try_wait().unwrap(), None);
    drop(connection);
    assert_eq!(host.wait().unwrap().code(), Some(0));
}

#[test]
fn a_signal_that_means_the_host_ends_it() {
    let Some(workshop) = Workshop::open() else { return };
    for (signal, number) in [("TERM", 15), ("HUP", 1)] {
        let (mut host, connection) = waiting(&workshop);
        send(signal, &host);
        thread::sleep(Duration::from_millis(200));
        // Of itself the host ends in order once nobody asks any more.
        drop(connection);
        assert_eq!(host.wait().unwrap().signal(), Some(number), "{signal}");
    }
}
