//! The bound: the most bytes that are alive at one time. No allocator can do with less, whatever it knows.

use serde::Serialize;

use super::PlanError;
use crate::{CHUNK_EVENTS, Checker, Op, Source};
use oomph_base::round_up;

/// What every allocator needs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bound {
    /// Most requested bytes alive at one time.
    pub requested_bytes: u64,
    /// The same with every request rounded up to whole grains.
    pub rounded_bytes: u64,
}

impl Bound {
    /// Reads a source once. Memory follows the live blocks, not the length of the trace.
    ///
    /// ```
    /// use oomph_base::{StreamId, TagId};
    /// use oomph_trace::{TraceBuilder, plan::Bound};
    /// let mut story = TraceBuilder::new();
    /// let first = story.alloc(100, StreamId::DEFAULT, TagId(0));
    /// story.alloc(513, StreamId::DEFAULT, TagId(0));
    /// story.free(first);
    /// story.alloc(50, StreamId::DEFAULT, TagId(0));
    /// let bound = Bound::of(&story.finish("tiny"), 512)?;
    /// assert_eq!((bound.requested_bytes, bound.rounded_bytes), (613, 1536));
    /// # Ok::<(), oomph_trace::plan::PlanError>(())
    /// ```
    pub fn of(source: &dyn Source, grain: u64) -> Result<Bound, PlanError> {
        let mut reader = source.open()?;
        let mut checker = Checker::new();
        let mut chunk = Vec::with_capacity(CHUNK_EVENTS);
        let (mut requested, mut rounded) = (0_u64, 0_u64);
        let mut bound = Bound::default();
        loop {
            let (events, tables) = reader.lend(&mut chunk)?;
            if events.is_empty() {
                return Ok(bound);
            }
            for event in events {
                let resident = checker.check(event, tables)?;
                match (event.op, resident) {
                    (Op::Alloc { bytes, .. }, _) => {
                        requested = requested.saturating_add(bytes);
                        rounded = rounded.saturating_add(round_up(bytes, grain));
                        bound.requested_bytes = bound.requested_bytes.max(requested);
                        bound.rounded_bytes = bound.rounded_bytes.max(rounded);
                    }
                    (Op::Free { .. }, Some(block)) => {
                        requested = requested.saturating_sub(block.bytes);
                        rounded = rounded.saturating_sub(round_up(block.bytes, grain));
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{arbitrary::traces, check};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_bound_is_the_peak_that_the_checker_counts(trace in traces(80)) {
            let bound = Bound::of(&trace, 512).unwrap();
            prop_assert_eq!(bound.requested_bytes, check(&trace).unwrap().peak.bytes);
            prop_assert!(bound.rounded_bytes >= bound.requested_bytes || bound.requested_bytes > u64::MAX - 512);
        }
    }
}
