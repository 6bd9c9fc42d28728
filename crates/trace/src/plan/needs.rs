//! What a source needs, whoever serves it: computed once and written beside every case that runs it.

use super::{Bound, GRAIN, Lifetimes, PackingBudget, PlanError, pack};
use crate::Source;

/// The memory that a source needs at least, and what it takes to lay it out with foresight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// No allocator can do with less.
    pub bound: Bound,
    /// The height of the best layout found, where one was looked for.
    pub packed_bytes: Option<u64>,
}

impl Needs {
    /// Reads a source once for the bound and, with a budget, once more for a layout. Requests are rounded to [`GRAIN`].
    pub fn of(source: &dyn Source, pack_within: Option<PackingBudget>) -> Result<Needs, PlanError> {
        let bound = Bound::of(source, GRAIN)?;
        let packed_bytes = match pack_within {
            Some(budget) => Some(pack(&Lifetimes::read(source, GRAIN)?, budget).height_bytes),
            None => None,
        };
        Ok(Needs { bound, packed_bytes })
    }
}
