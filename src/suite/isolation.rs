//! Which cases run in a process of their own.

use super::{Case, CaseOutcome, CaseRunner, InProcess, WorkerProcess};
use crate::plugin;

/// Which cases run in a process of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Those on a real device, because some of its errors leave a process that can no longer use it; those with a plugin,
    /// which may do anything; and those that have a time to keep, because nothing else ends a case that hangs.
    #[default]
    Auto,
    /// All.
    Always,
    /// None, not even for a time-out.
    Never,
}

impl Isolation {
    /// Whether the case runs in a process of its own.
    #[must_use]
    pub fn isolates(self, case: &Case) -> bool {
        match self {
            Isolation::Auto => {
                !case.device.is_simulated() || plugin::is_meant(&case.strategy) || case.timeout.is_some()
            }
            Isolation::Always => true,
            Isolation::Never => false,
        }
    }
}

/// Runs every case where it belongs.
#[derive(Clone, Debug)]
pub struct Isolating<'a> {
    /// Where that is.
    pub isolation: Isolation,
    /// Runs those that stay here.
    pub here: InProcess<'a>,
    /// Runs the others.
    pub worker: WorkerProcess<'a>,
}

impl CaseRunner for Isolating<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        if self.isolation.isolates(case) { self.worker.run(case) } else { self.here.run(case) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::test_case;

    #[test]
    fn what_a_process_might_not_survive_or_never_end_gets_its_own() {
        let plain = test_case("checkerboard", "null");
        let mut impatient = plain.clone();
        impatient.timeout = Some("1s".parse().unwrap());
        let mut real = plain.clone();
        real.device = "cuda".parse().unwrap();
        let foreign = Case { strategy: "plugin:./any.so".into(), ..plain.clone() };
        let isolated =
            |isolation: Isolation| [&plain, &impatient, &real, &foreign].map(|case| isolation.isolates(case));
        assert_eq!(isolated(Isolation::Auto), [false, true, true, true]);
        assert_eq!(isolated(Isolation::Always), [true; 4]);
        assert_eq!(isolated(Isolation::Never), [false; 4]);
    }
}
