//! The generators and their registry. Adding one is one file here and one line in [`GENERATORS`].

mod checkerboard;
mod decoder;
mod power_law;
mod random;
mod sawtooth;
mod streams;
mod training;
mod variable_length;

use std::{fmt, sync::Arc};

use super::{Dice, Parameter, Parameters, WorkloadError};
use crate::trace::TraceBuilder;

/// Every generator, in the order in which `list` shows them.
pub static GENERATORS: &[GeneratorEntry] = &[
    training::ENTRY,
    variable_length::ENTRY,
    streams::ENTRY,
    random::ENTRY,
    power_law::ENTRY,
    sawtooth::ENTRY,
    checkerboard::ENTRY,
];

/// Tells a story part by part, in constant memory however long it is.
pub trait Generator: Send {
    /// Writes the next part (a step, or some thousand events). Returns false when there was nothing left to write.
    fn advance(&mut self, story: &mut TraceBuilder) -> bool;
}

/// Starts the story from its beginning; called once for every opening of the workload.
pub type Start = Arc<dyn Fn(Dice) -> Box<dyn Generator> + Send + Sync>;

/// What the registry knows about a generator.
pub struct GeneratorEntry {
    /// What recipes call it.
    pub name: &'static str,
    /// One line for `list`.
    pub summary: &'static str,
    /// Whether another seed gives other events.
    pub seeded: bool,
    /// What can be set.
    pub parameters: &'static [Parameter],
    /// Reads and checks the parameters.
    pub build: fn(&Parameters<'_>) -> Result<Start, WorkloadError>,
}

impl fmt::Debug for GeneratorEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GeneratorEntry").field(&self.name).finish()
    }
}

/// Makes a [`Start`] of a function that makes a generator.
fn start<G: Generator + 'static>(make: impl Fn(Dice) -> G + Send + Sync + 'static) -> Start {
    Arc::new(move |dice| Box::new(make(dice)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_generator_can_be_built_from_its_declared_defaults() {
        for entry in GENERATORS {
            let given = BTreeMap::new();
            let parameters = Parameters::new(entry.name, entry, &given).unwrap();
            (entry.build)(&parameters).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
        }
    }

    #[test]
    fn names_are_unique_and_everything_is_described() {
        let names: std::collections::BTreeSet<_> = GENERATORS.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), GENERATORS.len());
        for entry in GENERATORS {
            assert!(!entry.summary.is_empty(), "{}", entry.name);
            for parameter in entry.parameters {
                assert!(!parameter.help.is_empty(), "{}: {}", entry.name, parameter.name);
            }
        }
    }
}
