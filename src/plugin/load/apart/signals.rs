//! Signals that the two ends are sent, and send.
#![expect(unsafe_code, reason = "signals are the C library's")]

use std::ffi::c_int;

const SIGKILL: c_int = 9;

unsafe extern "C" {
    fn kill(process: c_int, signal: c_int) -> c_int;
}

/// Ends a process that leads a group, if it still runs, and all that it has started and that is left of the group.
pub(super) fn end_group(leader: u32) {
    // Zero and one would mean this process's own group and everybody.
    let Some(group) = c_int::try_from(leader).ok().filter(|&group| group > 1) else { return };
    // SAFETY: takes numbers and touches no memory. It fails only where the group is gone already.
    unsafe { kill(-group, SIGKILL) };
}
