//! The generators and their registry. Adding one is one file here and one line in [`GENERATORS`].

mod autograd;
mod checkerboard;
mod hot_pair;
mod mix;
mod power_law;
mod random;
mod rounds;
mod sawtooth;
mod script;
mod stream_mix;
mod streams;

use std::{fmt, sync::Arc};

use super::{Dice, Parameter, Parameters, WorkloadError};
use oomph_trace::TraceBuilder;

/// Every generator, in the order in which `list` shows them.
pub static GENERATORS: &[GeneratorEntry] = &[
    autograd::TRANSFORMER,
    autograd::FAULTY_TRAINING,
    autograd::RESNET,
    autograd::SERVING,
    streams::ENTRY,
    random::ENTRY,
    power_law::ENTRY,
    sawtooth::ENTRY,
    checkerboard::ENTRY,
    rounds::ENTRY,
    script::ENTRY,
    hot_pair::ENTRY,
    mix::ENTRY,
    stream_mix::ENTRY,
];

/// Tells a story part by part, in constant memory however long it is.
pub trait Generator: Send {
    /// Writes the next part (a step, or some thousand events). Returns false when there was nothing left to write.
    fn advance(&mut self, story: &mut TraceBuilder) -> bool;

    /// How much is left to write, in steps or blocks or whatever it counts in: never more than before, and nothing but
    /// what has to be cleared away at the end. Only for progress.
    fn left(&self) -> u64;
}

/// Starts the story from its beginning; called once for every opening of the workload.
pub type Start = Arc<dyn Fn(Dice) -> Box<dyn Generator> + Send + Sync>;

/// What the registry knows about a generator.
pub struct GeneratorEntry {
    /// What recipes call it.
    pub name: &'static str,
    /// One line for `list`.
    pub summary: &'static str,
    /// Whether there is chance in it: whether another seed can give other events.
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

    use proptest::prelude::*;

    use super::*;
    use crate::Recipe;
    use oomph_trace::{OpKind, check};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_model_of_any_shape_trains_without_contradiction(
            (layers, heads, head_width, vocabulary) in (1..5_u32, 1..5_u32, 1..20_u32, 1..300_u32),
            (context, batch, steps, seed) in (1..40_u32, 1..5_u32, 1..5_u32, any::<u64>()),
        ) {
            let shape = [
                ("layers", layers), ("heads", heads), ("width", heads * head_width), ("vocab", vocabulary),
                ("context", context), ("batch", batch), ("steps", steps), ("min_length", 1),
            ];
            let recipe = Recipe::named("variable-length").unwrap().seed(seed);
            let recipe = shape.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, &value.to_string()));
            let summary = check(&recipe.workload().unwrap()).unwrap();
            prop_assert_eq!(summary.steps, u64::from(steps));
            // Weights and their two means, three workspaces, the last batch and its loss.
            prop_assert_eq!(summary.live_blocks, u64::from(3 * (5 + 12 * layers) + 5));
        }

        #[test]
        fn churn_of_any_size_frees_all_that_it_allocates(
            (name, length) in prop::sample::select(vec![
                ("random", "allocations"), ("power-law", "allocations"), ("sawtooth", "teeth"), ("streams", "rounds"),
                ("stream-mix-4", "operations"),
            ]),
            (count, max_bytes, seed) in (1..60_u32, 1..1_000_000_u64, any::<u64>()),
        ) {
            let recipe = Recipe::named(name).unwrap().seed(seed).with(length, &count.to_string());
            let recipe = recipe.with("max_bytes", &max_bytes.to_string());
            let recipe = if name == "random" { recipe } else { recipe.with("min_bytes", "1") };
            let summary = check(&recipe.workload().unwrap()).unwrap();
            prop_assert_eq!(summary.count(OpKind::Alloc), summary.count(OpKind::Free));
            prop_assert!(summary.count(OpKind::Alloc) >= u64::from(count));
        }
    }

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
