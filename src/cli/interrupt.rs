//! Ctrl-C and SIGTERM: the first finishes what is running, the second ends at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{exit, output};

/// A flag that the first signal sets.
pub fn flag() -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
        output::complain("\nstopping after the cases that are running; press Ctrl-C again to end at once");
    })?;
    Ok(stop)
}
