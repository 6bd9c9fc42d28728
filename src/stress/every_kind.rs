//! All kinds of stress in one go: what CI runs in a minute.
//!
//! Each kind is judged by its own file; here is only the list, and how time is shared out among strategies and kinds.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{Subject, Verdict, faults, integrity, misuse, properties};

/// A kind of stress as `all` sees it.
pub struct KindOfStress {
    /// What users type.
    pub name: &'static str,
    /// Puts a subject under it, with a seed, until it has nothing more to try or is told to stop.
    pub judge: fn(&Subject, u64, &dyn Fn() -> bool) -> Verdict,
}

/// Every kind that needs no question of its own, in the order of tables. Those that come to an end by themselves stand
/// behind and are played first: what they leave of their time is then there for the others.
pub const KINDS: &[KindOfStress] =
    &[integrity::UNTIL_STOPPED, properties::UNTIL_STOPPED, faults::EVERYTHING, misuse::EVERYTHING];

/// Time that several pieces of work share, side by side: each gets its part of what is left, so that what one does not
/// need is there for the others.
#[derive(Debug)]
pub struct TimeShare {
    end: Instant,
    jobs: u32,
    left: AtomicU64,
}

impl TimeShare {
    /// So much time from now on for so many pieces of work, `jobs` of them at once.
    #[must_use]
    pub fn new(time: Duration, pieces: usize, jobs: usize) -> TimeShare {
        TimeShare { end: Instant::now() + time, jobs: jobs.max(1) as u32, left: AtomicU64::new(pieces as u64) }
    }

    /// When the piece of work that begins now must end.
    #[must_use]
    pub fn next_end(&self) -> Instant {
        let left = self.left.fetch_sub(1, Ordering::Relaxed).max(1);
        let now = Instant::now();
        let share = self.end.saturating_duration_since(now) * self.jobs.min(left as u32) / left as u32;
        (now + share).min(self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_does_not_need_is_there_for_the_others() {
        let time = TimeShare::new(Duration::from_secs(90), 3, 1);
        let begun = Instant::now();
        let shares = [(); 3].map(|()| (time.next_end() - begun).as_secs_f64().round());
        assert_eq!(shares, [30.0, 45.0, 90.0], "nobody has used any of it");
    }

    #[test]
    fn two_at_once_have_twice_the_time_and_never_more_than_there_is() {
        let time = TimeShare::new(Duration::from_secs(60), 4, 2);
        let begun = Instant::now();
        let shares = [(); 5].map(|()| (time.next_end() - begun).as_secs_f64().round());
        assert_eq!(shares, [30.0, 40.0, 60.0, 60.0, 60.0]);
    }
}
