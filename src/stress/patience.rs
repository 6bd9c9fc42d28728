//! Runs something that may panic, or never come back.
//!
//! Whoever is put under stress may loop without end where its arithmetic went wrong, and a thread cannot be ended from
//! outside: one that is out of patience is left behind, and what it was doing is a finding.

use std::{io, sync::mpsc, thread, time::Duration};

use super::trial::{on_trial, panicked};

/// How long a short trial may take. It takes milliseconds on a simulated device and seconds on a real one; the machine may
/// be busy with other things.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How much longer each event of a trace may take.
const PATIENCE_PER_EVENT: Duration = Duration::from_millis(20);

/// How long a trial with so many events may take.
pub(super) fn patience_for(events: usize) -> Duration {
    PATIENCE.saturating_add(PATIENCE_PER_EVENT.saturating_mul(u32::try_from(events).unwrap_or(u32::MAX)))
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// It panicked with these words.
    #[error("{0}")]
    Panicked(String),
    /// It did not come back.
    #[error("did not come back within {} s", .0.as_secs_f64())]
    Hung(Duration),
    /// The system has no thread for it.
    #[error("no thread to run it in: {0}")]
    NotStarted(#[from] io::Error),
}

/// Runs `trial` in a thread of its own, and waits for it no longer than `patience`.
pub(super) fn within<T: Send + 'static>(
    patience: Duration,
    trial: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Ended> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("stress".to_owned()).spawn(move || {
        // Nobody listens any more once patience has run out.
        let _ = sender.send(on_trial(trial));
    })?;
    match receiver.recv_timeout(patience) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(panic)) => Err(Ended::Panicked(panicked(&*panic))),
        Err(_) => Err(Ended::Hung(patience)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_comes_back() {
        assert_eq!(within(PATIENCE, || 6 * 7).unwrap(), 42);
    }

    #[test]
    fn a_panic_is_told_in_its_own_words() {
        let ended = within(PATIENCE, || assert_eq!(1, 2, "lost count")).unwrap_err();
        assert!(ended.to_string().contains("lost count"), "{ended}");
    }

    #[test]
    fn nobody_waits_for_ever() {
        let ended = within(Duration::from_millis(20), || thread::sleep(Duration::from_secs(3))).unwrap_err();
        assert!(matches!(ended, Ended::Hung(_)));
    }
}
