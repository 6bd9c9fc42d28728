//! Ctrl-C and SIGTERM: the first finishes what is worth finishing, the second ends at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{exit, output};

/// What a signal meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    /// Cases whose results are kept: they are finished.
    Cases,
    /// One replay, which may take forever: it ends where it is.
    Replay,
}

/// A flag that the first signal sets.
pub fn flag(running: Running) -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
        if running == Running::Cases {
            output::complain("\nstopping after the cases that are running; press Ctrl-C again to end at once");
        }
    })?;
    Ok(stop)
}
