//! What was found, beside what others make of it.

use serde::{Deserialize, Serialize};

use super::{AdversaryError, Find, toll};
use crate::stress::Subject;

/// A found trace, served by one strategy: a row of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FoundRow {
    /// For whom it was made, as users type it.
    pub made_for: String,
    /// Who served it.
    pub strategy: String,
    /// How many events it has.
    pub events: u64,
    /// What the trace has alive at most.
    pub live_bytes: u64,
    /// What was reserved for it at most; up to where memory ran out, if it did.
    pub peak_reserved_bytes: u64,
    /// That, in terms of what is alive.
    pub reserved_ratio: f64,
    /// Whether memory ran out.
    pub ran_out: bool,
    /// The try that found it, from 1.
    pub found_at: u32,
    /// Where it was saved.
    pub trace: String,
}

impl FoundRow {
    /// What `subject` takes for a trace that was made for another, or for itself. `None` if the device cannot run it.
    pub fn of(find: &Find, made_for: &str, subject: &Subject, trace: &str) -> Result<Option<FoundRow>, AdversaryError> {
        let toll = match toll(subject, &find.trace) {
            Err(AdversaryError::Unable { .. }) => return Ok(None),
            toll => toll?,
        };
        let live_bytes = toll.peak_requested_bytes;
        Ok(Some(FoundRow {
            made_for: made_for.to_owned(),
            strategy: subject.strategy.to_string(),
            events: find.trace.events.len() as u64,
            live_bytes,
            peak_reserved_bytes: toll.peak_reserved_bytes,
            reserved_ratio: toll.peak_reserved_bytes as f64 / live_bytes.max(1) as f64,
            ran_out: toll.ooms > 0,
            found_at: find.found_at,
            trace: trace.to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{MIB, StreamId, TagId},
        strategy::StrategySpec,
        trace::TraceBuilder,
    };

    #[test]
    fn a_row_says_what_each_takes_for_the_same_trace() {
        let mut story = TraceBuilder::new();
        let block = story.alloc(6 * MIB, StreamId::DEFAULT, TagId(0));
        story.free(block);
        let find = Find { trace: story.finish("six"), badness: 1.0, peak_reserved_bytes: 20 * MIB, found_at: 3 };
        let row = |strategy: &str, memory_bytes| {
            let subject =
                Subject { strategy: StrategySpec::from(strategy), device: "sim".parse().unwrap(), memory_bytes };
            FoundRow::of(&find, "caching", &subject, "six.oomph").unwrap().unwrap()
        };
        let caching = row("caching", None);
        assert_eq!((caching.live_bytes, caching.peak_reserved_bytes), (6 * MIB, 20 * MIB));
        assert_eq!((caching.events, caching.found_at, caching.trace.as_str()), (2, 3, "six.oomph"));
        assert!((caching.reserved_ratio - 20.0 / 6.0).abs() < 1e-9 && !caching.ran_out);
        assert_eq!(row("direct", None).reserved_ratio, 1.0);
        let short = row("direct", Some(4 * MIB));
        assert!(short.ran_out && short.reserved_ratio == 0.0);
    }
}
