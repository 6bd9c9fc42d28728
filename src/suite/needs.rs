//! Writes beside every case what its source needs at least. That is the same under every strategy, limit and device, so
//! it is computed once a source, by whichever case of it ends first.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{Case, CaseOutcome, CaseRunner, SourceSpec};
use crate::{
    measure::Status,
    plan::{Needs, PackingBudget},
};

/// Runs cases by another runner and adds the bound, and the packing where that is asked for, to the rows of those that
/// were measured.
pub struct WithNeeds<'a> {
    runner: &'a dyn CaseRunner,
    pack_within: Option<PackingBudget>,
    known: Mutex<Vec<(SourceSpec, Shared)>>,
}

/// Computed by whoever comes first; the others wait for it. None of a source that cannot be read.
type Shared = Arc<OnceLock<Option<Needs>>>;

impl<'a> WithNeeds<'a> {
    /// With a budget every source is packed too.
    #[must_use]
    pub fn new(runner: &'a dyn CaseRunner, pack_within: Option<PackingBudget>) -> WithNeeds<'a> {
        WithNeeds { runner, pack_within, known: Mutex::default() }
    }

    /// What the source of a case needs; nothing is said of a source that cannot be read, because the case itself says why.
    fn needs(&self, case: &Case) -> Option<Needs> {
        let entry = {
            // A list that a panic left behind is still a list.
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            match known.iter().find(|(origin, _)| *origin == case.origin) {
                Some((_, entry)) => Arc::clone(entry),
                None => {
                    let entry = Shared::default();
                    known.push((case.origin.clone(), Arc::clone(&entry)));
                    entry
                }
            }
        };
        *entry.get_or_init(|| Needs::of(&*case.source, self.pack_within).ok())
    }
}

impl CaseRunner for WithNeeds<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        let mut outcome = self.runner.run(case);
        // Whoever interrupts a case does not want to wait for another reading of its source.
        if outcome.record.clock.is_some()
            && outcome.record.status != Status::Interrupted
            && let Some(needs) = self.needs(case)
        {
            outcome.record.set_needs(&needs);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::{
        suite::{InProcess, test_case},
        trace::{EventReader, InitialLayout, Source, TraceError},
    };

    /// Counts how often a source is read.
    struct Counted(Arc<dyn Source>, AtomicUsize);

    impl Source for Counted {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn initial_layout(&self) -> Option<InitialLayout> {
            self.0.initial_layout()
        }

        fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.open()
        }
    }

    #[test]
    fn needs_are_computed_once_a_source_and_lie_below_what_is_reserved() {
        let mut first = test_case("training", "caching");
        let source = Arc::new(Counted(first.source, AtomicUsize::new(0)));
        first.source = source.clone();
        let second = Case { strategy: "direct".into(), ..first.clone() };
        let here = InProcess::default();
        let runner = WithNeeds::new(&here, Some(PackingBudget::QUICK));
        for case in [&first, &second, &first] {
            let record = runner.run(case).record;
            let steps = [
                record.bound_requested_bytes.unwrap(),
                record.bound_rounded_bytes.unwrap(),
                record.packed_bytes.unwrap(),
                record.peak_reserved_bytes,
                record.peak_device_used_bytes.unwrap(),
            ];
            assert!(steps.is_sorted(), "{steps:?}");
            assert_eq!(record.bound_requested_bytes, Some(record.peak_requested_bytes));
        }
        assert_eq!(source.1.load(Ordering::Relaxed), 3 + 2, "three runs, one bound, one packing");
    }

    #[test]
    fn an_interrupted_case_is_not_read_again() {
        let stop = AtomicBool::new(true);
        let mut case = test_case("checkerboard", "caching");
        let source = Arc::new(Counted(case.source, AtomicUsize::new(0)));
        case.source = source.clone();
        let here = InProcess { stop: Some(&stop) };
        let record = WithNeeds::new(&here, None).run(&case).record;
        assert_eq!((record.status, record.bound_requested_bytes), (Status::Interrupted, None));
        assert_eq!(source.1.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn without_a_budget_there_is_a_bound_and_no_packing() {
        let here = InProcess::default();
        let record = WithNeeds::new(&here, None).run(&test_case("checkerboard", "caching")).record;
        assert!(record.bound_rounded_bytes.is_some());
        assert_eq!(record.packed_bytes, None);
    }
}
