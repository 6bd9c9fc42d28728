//! A language model that answers requests: prefill and decode, batched as requests come and go.
//!
//! The model is the transformer's own, without a graph. Requests arrive at random; each step admits those that have a
//! place, runs their prompts one by one, and then decodes one token for every running sequence. Keys and values are kept
//! in one of the ways of [`cache`], and go when their sequence is complete. The model itself stays.

mod cache;
mod pass;

use cache::{Cache, CacheShape, Keeping};

use super::{
    machine::Machine,
    plan::Plan,
    precision::Precision,
    saving::Saving,
    shape::{self, Shape},
    technique::Techniques,
};
use crate::{
    Generator, GeneratorEntry, Parameter, Parameters, SeededRandom, WorkloadError,
    generator::{start, to_u32},
};
use oomph_trace::{MarkKind, TraceBuilder};

const MOST_TOKENS: u32 = 1 << 18;

pub(crate) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "serving",
    summary: "a language model that answers requests: prefill, decode, a growing cache of keys and values",
    seeded: true,
    parameters: &[
        Parameter::count("requests", 1..=100_000_000, "256", "how many requests come in all"),
        Parameter::count("batch", 1..=1 << 12, "32", "sequences that run at a time"),
        Parameter::number("arrivals", 0.001..=1.0, "0.5", "chance of a request to come before a step"),
        Parameter::count("min_prompt", 1..=MOST_TOKENS, "16", "shortest prompt, in tokens"),
        Parameter::count("max_prompt", 1..=MOST_TOKENS, "1024", "longest prompt, in tokens"),
        Parameter::count("min_output", 1..=MOST_TOKENS, "8", "shortest answer, in tokens"),
        Parameter::count("max_output", 1..=MOST_TOKENS, "256", "longest answer, in tokens"),
        Parameter::choice(
            "cache",
            &["paged", "concatenated", "preallocated"],
            "paged",
            "pages for all layers; tensors made anew with every token; tensors of the full context",
        ),
        Parameter::count("page_tokens", 1..=1 << 12, "16", "tokens of a page"),
        shape::LAYERS,
        shape::WIDTH,
        shape::HEADS,
        shape::VOCABULARY,
        Parameter::choice("precision", &["bf16", "fp32"], "bf16", "number format"),
    ],
    build: |parameters| {
        let (prompts, outputs) =
            (read_range(parameters, "min_prompt", "max_prompt")?, read_range(parameters, "min_output", "max_output")?);
        let context = prompts.1 + outputs.1;
        let batch = parameters.count("batch")?;
        let shape = Shape::read_model(parameters, context, batch)?;
        let precision = match parameters.choice("precision")? {
            "fp32" => Precision::Single { tf32: false },
            _ => Precision::HalfModel { master_weights: false },
        };
        let keeping = match parameters.choice("cache")? {
            "concatenated" => Keeping::Concatenated,
            "preallocated" => Keeping::Preallocated,
            _ => Keeping::Paged { tokens: parameters.count("page_tokens")? },
        };
        let bytes_per_token = u64::from(shape.width) * precision.of_weights().bytes();
        let cache = CacheShape { keeping, layers: shape.layers, bytes_per_token, context };
        let plan = Plan { shape, precision, techniques: Techniques::default() };
        let (requests, arrivals) = (parameters.count("requests")?, parameters.number("arrivals")?);
        Ok(start(move |random| Serving {
            random,
            machine: Machine::new(plan.clone()),
            cache,
            requests,
            arrivals,
            prompts,
            outputs,
            waiting: 0,
            running: Vec::new(),
        }))
    },
};

fn read_range(parameters: &Parameters<'_>, least: &str, most: &str) -> Result<(u32, u32), WorkloadError> {
    let (from, to) = (parameters.count(least)?, parameters.count(most)?);
    if from > to {
        return Err(parameters.refuse(format!("{least} ({from}) must not exceed {most} ({to})")));
    }
    Ok((from, to))
}

/// A request that is being answered.
#[derive(Debug)]
struct Sequence {
    /// Tokens that are in its cache.
    length: u32,
    /// Tokens that are still to come.
    left: u32,
    cache: Cache,
}

struct Serving {
    random: SeededRandom,
    machine: Machine,
    cache: CacheShape,
    /// Requests that have not come yet.
    requests: u32,
    arrivals: f64,
    prompts: (u32, u32),
    outputs: (u32, u32),
    /// Requests that have come and wait for a place.
    waiting: u32,
    running: Vec<Sequence>,
}

impl Serving {
    fn serve(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Step, "step", step);
        // Nobody waits for chance while nothing runs.
        if self.requests > 0 && (self.running.is_empty() || self.random.chance(self.arrivals)) {
            (self.requests, self.waiting) = (self.requests - 1, self.waiting + 1);
        }
        let most = self.machine.plan.shape.batch as usize;
        while self.waiting > 0 && self.running.len() < most {
            self.waiting -= 1;
            self.prefill(step);
        }
        self.machine.trace.mark(MarkKind::Phase, "decode", step);
        self.machine.generate(&mut self.running, 1, &self.cache);
        for place in (0..self.running.len()).rev() {
            self.running[place].left -= 1;
            if self.running[place].left == 0 {
                let complete = self.running.swap_remove(place);
                self.machine.drop_cache(complete.cache);
            }
        }
    }

    /// Runs the prompt of a new sequence; its first token comes of that, those that are left of decoding.
    fn prefill(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Phase, "prefill", step);
        let mut draw = |(least, most): (u32, u32)| self.random.between(least.into(), most.into()) as u32;
        let (prompt, output) = (draw(self.prompts), draw(self.outputs));
        let mut admitted = [Sequence { length: 0, left: output, cache: Cache::default() }];
        self.machine.generate(&mut admitted, prompt, &self.cache);
        self.running.extend(admitted);
    }
}

impl Generator for Serving {
    /// How many steps the answers take is not known beforehand.
    fn parts_left(&self, _written: u64) -> u64 {
        u64::from(self.requests) + u64::from(self.waiting) + self.running.len() as u64
    }

    fn write_part(&mut self, step: u64, trace: &mut TraceBuilder) {
        std::mem::swap(&mut self.machine.trace, trace);
        if step == 0 {
            self.machine.saving = Saving::Nothing;
            self.machine.load();
        }
        self.serve(to_u32(step));
        std::mem::swap(&mut self.machine.trace, trace);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{OpKind, Summary, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let shape = [("layers", "3"), ("width", "64"), ("heads", "4"), ("vocab", "500"), ("requests", "40")];
        let lengths = [("min_prompt", "4"), ("max_prompt", "60"), ("min_output", "2"), ("max_output", "50")];
        let all = shape.iter().chain(&lengths).chain(settings);
        all.fold(Recipe::named("llm-serve").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> Summary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    /// What stays: weights of embeddings, blocks and ending, and the workspaces of products.
    const STAYS: u64 = 2 + 3 * 12 + 3 + 2;

    #[test]
    fn ways_to_keep_the_cache_differ_in_memory_and_in_requests() {
        let of = |cache| summary(&[("cache", cache)]);
        let (paged, concatenated, preallocated) = (of("paged"), of("concatenated"), of("preallocated"));
        assert!(paged.peak.bytes < preallocated.peak.bytes);
        // Every step makes keys and values of three layers anew, for one sequence at least.
        assert!(concatenated.count(OpKind::Alloc) > paged.count(OpKind::Alloc) + 3 * 2 * paged.steps);
        for summary in [paged, concatenated, preallocated] {
            assert_eq!(summary.live_blocks, STAYS);
        }
    }

    #[test]
    fn pages_hold_the_tokens_of_all_layers() {
        // One request at a time, of 60 + 20 tokens, in pages of 16.
        let exact = [("min_prompt", "60"), ("min_output", "20"), ("max_output", "20"), ("batch", "1")];
        let pages = |page_tokens| {
            let settings: Vec<_> = exact.iter().copied().chain([("page_tokens", page_tokens)]).collect();
            summary(&settings).count(OpKind::Alloc)
        };
        // The prompt takes 4 pages of 16 and the answer one more; or 10 and 4 of 6.
        assert_eq!(pages("6") - pages("16"), 40 * (14 - 5));
    }

    #[test]
    fn lengths_that_contradict_are_refused() {
        let error = small(&[("min_prompt", "61")]).workload().err().unwrap().to_string();
        assert_eq!(error, "workload 'llm-serve': min_prompt (61) must not exceed max_prompt (60)");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn whatever_is_served_only_the_model_stays(
            (cache, batch, page_tokens) in (
                prop::sample::select(vec!["paged", "concatenated", "preallocated"]), 1..9_u32, 1..40_u32,
            ),
            (arrivals, requests, seed) in (0.01..1.0_f64, 1..30_u32, any::<u64>()),
        ) {
            let settings = [
                ("cache", cache.to_owned()), ("batch", batch.to_string()), ("page_tokens", page_tokens.to_string()),
                ("arrivals", arrivals.to_string()), ("requests", requests.to_string()),
            ];
            let settings = settings.each_ref().map(|(key, value)| (*key, value.as_str()));
            let summary = check(&small(&settings).seed(seed).workload().unwrap()).unwrap();
            prop_assert_eq!(summary.live_blocks, STAYS);
            prop_assert!(summary.steps >= 2);
        }
    }
}
