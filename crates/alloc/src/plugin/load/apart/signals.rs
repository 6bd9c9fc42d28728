//! Signals that the two ends are sent, and send.
#![expect(unsafe_code, reason = "signals are the C library's")]

use std::ffi::c_int;

const SIGINT: c_int = 2;
const SIGKILL: c_int = 9;
/// The disposition of a signal that is not to arrive.
const IGNORED: usize = 1;

unsafe extern "C" {
    fn signal(signal: c_int, handler: usize) -> usize;
    fn kill(process: c_int, signal: c_int) -> c_int;
}

/// Leaves Ctrl-C, which some starters send to every process, to the one that asks. All else ends this process.
pub(super) fn ignore_interrupts() {
    // SAFETY: no handler is installed that could do anything wrong.
    unsafe { signal(SIGINT, IGNORED) };
}

/// Ends a process that leads a group, if it still runs, and all that it has started and that is left of the group.
pub(super) fn end_group(leader: u32) {
    // Zero and one would mean this process's own group and everybody.
    let Some(group) = c_int::try_from(leader).ok().filter(|&group| group > 1) else { return };
    // SAFETY: takes numbers and touches no memory. It fails only where the group is gone already.
    unsafe { kill(-group, SIGKILL) };
}
