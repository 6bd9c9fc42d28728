//! The generators: trait, registry entry and registry. Adding one is one constant beside it and one line in
//! [`GENERATORS`].

use std::{fmt, sync::Arc};

use crate::{
    Parameter, Parameters, SeededRandom, WorkloadError, autograd,
    synthetic::{mix, script, single_stream, streams},
};
use oomph_trace::TraceBuilder;

/// Every generator, in the order in which `list` shows them.
pub static GENERATORS: &[GeneratorEntry] = &[
    autograd::TRANSFORMER,
    autograd::DECODER,
    autograd::ENCODER,
    autograd::VISION_ENCODER,
    autograd::ENCODER_DECODER,
    autograd::FAULTY_TRAINING,
    autograd::RESNET,
    autograd::GENERATION,
    autograd::SERVING,
    streams::STREAMS,
    single_stream::RANDOM,
    single_stream::POWER_LAW,
    single_stream::SAWTOOTH,
    single_stream::CHECKERBOARD,
    single_stream::ROUNDS,
    script::SCRIPT,
    mix::HOT_PAIR,
    mix::MIX,
    mix::STREAM_MIX,
];

/// Writes a trace part by part, in constant memory whatever its length.
pub trait Generator: Send {
    /// How many parts are left after `written` ones. Where the number is not known beforehand, any number that never
    /// grows and is 0 at the end.
    fn parts_left(&self, written: u32) -> u64;

    /// Writes a part: a step, some thousand events, or the end of the trace.
    fn write_part(&mut self, part: u32, trace: &mut TraceBuilder);
}

/// Starts a generator from the beginning of its trace; called once for every opening of the workload.
pub type GeneratorStart = Arc<dyn Fn(SeededRandom) -> Box<dyn Generator> + Send + Sync>;

/// Counts the weights of a model with these parameters.
pub type WeightCounter = fn(&Parameters<'_>) -> Result<u64, WorkloadError>;

/// What the registry knows about a generator.
pub struct GeneratorEntry {
    /// Its name in recipes.
    pub name: &'static str,
    /// One line for `list`.
    pub summary: &'static str,
    /// Whether another seed can give other events.
    pub seeded: bool,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Reads and checks the parameters.
    pub build: fn(&Parameters<'_>) -> Result<GeneratorStart, WorkloadError>,
    /// Counts the weights of the model, where it makes one.
    pub count_weights: Option<WeightCounter>,
}

impl fmt::Debug for GeneratorEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GeneratorEntry").field(&self.name).finish()
    }
}

/// A generator that writes `parts` parts. `begin` is called for every opening and returns the function that writes them.
pub(crate) fn in_parts<W: FnMut(u32, &mut TraceBuilder) + Send + 'static>(
    parts: u64,
    begin: impl Fn(SeededRandom) -> W + Send + Sync + 'static,
) -> GeneratorStart {
    Arc::new(move |random| Box::new(Parts { count: parts, write: begin(random) }))
}

struct Parts<W> {
    count: u64,
    write: W,
}

impl<W: FnMut(u32, &mut TraceBuilder) + Send> Generator for Parts<W> {
    fn parts_left(&self, written: u32) -> u64 {
        self.count - u64::from(written)
    }

    fn write_part(&mut self, part: u32, trace: &mut TraceBuilder) {
        (self.write)(part, trace);
    }
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
        fn transformer_of_any_shape_trains(
            (layers, heads, head_width, vocabulary) in (1..5_u32, 1..5_u32, 1..6_u32, 1..300_u32),
            (context, batch, steps, seed) in (1..40_u32, 1..5_u32, 1..5_u32, any::<u64>()),
        ) {
            let shape = [
                ("layers", layers), ("heads", heads), ("width", heads * 4 * head_width), ("vocab", vocabulary),
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
        fn churn_of_any_size_frees_all(
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
    fn every_generator_builds_from_its_defaults() {
        for entry in GENERATORS {
            let given = BTreeMap::new();
            let parameters = Parameters::new(entry.name, entry, &given).unwrap();
            (entry.build)(&parameters).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
        }
    }

    #[test]
    fn names_are_unique_and_described() {
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
