//! Recipes: small TOML files that name a generator and set its parameters.
//!
//! Those in `workloads/` are part of the binary, so that it works wherever it is installed. A file of that name in the
//! `workloads/` of the current folder is taken instead; any other is read from where it is.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use toml::{Spanned, Value};

use crate::{
    GENERATORS, GeneratorEntry, GivenValue, NumericEffect, Parameters, SettingPlace, Workload, WorkloadError,
    autograd::{self, TechniqueWords},
};
use oomph_base::{Catalog, CatalogEntry, did_you_mean, nearest, parse_toml, read_text_file};

/// Recipes by name.
const CATALOG: Catalog = Catalog { folder: "workloads", built_in: include!(concat!(env!("OUT_DIR"), "/workloads.rs")) };

/// The names of all embedded recipes. What `"all"` workloads means: it must not depend on the current folder.
pub fn recipe_names() -> impl Iterator<Item = &'static str> {
    CATALOG.built_in_names()
}

/// Every recipe that has a name here: the embedded ones, and those in the `workloads/` of the current folder.
#[must_use]
pub fn all_recipes() -> Vec<CatalogEntry> {
    CATALOG.all()
}

/// Names of earlier versions, and the names now. They were called after models of others, with other weights.
const OLDER_NAMES: [(&str, &str); 5] = [
    ("gpt-124m", "reference-gpt-163m"),
    ("gpt-355m", "reference-gpt-406m"),
    ("gpt-1.3b", "reference-gpt-1.4b"),
    ("gpt-13b", "reference-gpt-13b"),
    ("gpt-moe-8x124m", "reference-gpt-moe-560m"),
];

/// Whether there is a recipe of this name, in the current folder or in the binary.
#[must_use]
pub fn is_recipe_name(name: &str) -> bool {
    CATALOG.own_file(name).is_some() || CATALOG.built_in_text(current_name(name)).is_some()
}

/// The name of a recipe of this program: the same, or the one that replaced it.
fn current_name(name: &str) -> &str {
    OLDER_NAMES.iter().find(|(older, _)| *older == name).map_or(name, |(_, now)| now)
}

/// A generator with its parameters, which are checked when the workload is made.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// Its generator.
    pub generator: &'static GeneratorEntry,
    /// Why it exists.
    pub purpose: String,
    /// Where its pattern comes from.
    pub origin: String,
    given: BTreeMap<String, GivenValue>,
    /// Overrides of the file in their order, for the workload's name.
    overrides: Vec<(String, String)>,
    /// What it was asked for by, where that is a name of earlier versions.
    older_name: Option<String>,
    seed: u64,
}

/// The file format.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    generator: Spanned<String>,
    purpose: String,
    origin: String,
    #[serde(default)]
    set: BTreeMap<Spanned<String>, Value>,
}

impl Recipe {
    /// The recipe of this name: `workloads/NAME.toml` of the current folder, or else the embedded one.
    pub fn named(name: &str) -> Result<Recipe, WorkloadError> {
        if let Some(path) = CATALOG.own_file(name) {
            return Recipe::from_file(&path);
        }
        let current = current_name(name);
        let Some(text) = CATALOG.built_in_text(current) else {
            let (suggestion, known) = CATALOG.nearest_and_all(name);
            return Err(WorkloadError::UnknownWorkload { name: name.to_owned(), suggestion, known });
        };
        let recipe = Recipe::parse(current, &format!("workloads/{current}.toml"), text)?;
        Ok(Recipe { older_name: (current != name).then(|| name.to_owned()), ..recipe })
    }

    /// The recipe in a file; its name is the file's, without the ending.
    pub fn from_file(path: &Path) -> Result<Recipe, WorkloadError> {
        let text = read_text_file(path).map_err(|source| WorkloadError::Io { path: path.to_owned(), source })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Recipe::parse(&name, &path.display().to_string(), &text)
    }

    fn parse(name: &str, file: &str, text: &str) -> Result<Recipe, WorkloadError> {
        let refused =
            |offset, reason| WorkloadError::Invalid { place: SettingPlace::in_file(file, text, offset), reason };
        let parsed: RecipeFile = parse_toml(text).map_err(|error| refused(error.offset.unwrap_or(0), error.reason))?;
        let wanted = parsed.generator.get_ref().as_str();
        let generator = GENERATORS.iter().find(|entry| entry.name == wanted).ok_or_else(|| {
            let near = nearest(wanted, GENERATORS.iter().map(|entry| entry.name));
            let suggestion = did_you_mean(near.as_deref());
            refused(parsed.generator.span().start, format!("unknown generator '{wanted}'{suggestion}"))
        })?;
        let given = parsed
            .set
            .into_iter()
            .map(|(key, value)| {
                let place = SettingPlace::in_file(file, text, key.span().start);
                (key.into_inner(), GivenValue { value, place })
            })
            .collect();
        Ok(Recipe {
            name: name.to_owned(),
            generator,
            purpose: parsed.purpose,
            origin: parsed.origin,
            given,
            overrides: Vec::new(),
            older_name: None,
            seed: 0,
        })
    }

    /// A recipe of a generator with these settings, from a file that is not a recipe.
    pub(crate) fn of_settings(
        name: String,
        generator: &'static GeneratorEntry,
        file: &str,
        settings: Vec<(&'static str, String)>,
    ) -> Recipe {
        let place = SettingPlace::File { file: file.to_owned(), line: 1, column: 1 };
        let given = settings.into_iter().map(|(key, text)| {
            let GivenValue { value, .. } = GivenValue::typed(key, &text);
            (key.to_owned(), GivenValue { value, place: place.clone() })
        });
        Recipe {
            name,
            generator,
            purpose: "A model by its configuration.".to_owned(),
            origin: format!("{file}, as Hugging Face's transformers runs it"),
            given: given.collect(),
            overrides: Vec::new(),
            older_name: None,
            seed: 0,
        }
    }

    /// The number of weights, where the generator makes a model.
    pub fn weight_count(&self) -> Result<Option<u64>, WorkloadError> {
        let parameters = Parameters::new(&self.name, self.generator, &self.given)?;
        self.generator.count_weights.map(|count| count(&parameters)).transpose()
    }

    /// The same model answering prompts instead of learning: prompts and answers together have the length of the context,
    /// and answers at most this many tokens. Nothing where that is not modelled.
    #[must_use]
    pub fn answering(&self, answer: u64) -> Option<Recipe> {
        if self.generator.name != autograd::DECODER.name {
            return None;
        }
        let generator = &autograd::GENERATION;
        let context = self.count("context")?;
        let answer = answer.min(context / 2).max(1);
        let is_shared = |key: &String| generator.parameters.iter().any(|parameter| parameter.name == key);
        let given = self.given.iter().filter(|(key, _)| is_shared(key));
        let given = given.map(|(key, given)| (key.clone(), given.clone())).collect();
        let recipe = Recipe { generator, given, overrides: Vec::new(), ..self.clone() };
        Some(recipe.with("prompt", &(context - answer).to_string()).with("answer", &answer.to_string()))
    }

    /// The same model in a server with a pool of pages, which starts: passes of this many tokens, after which a token is
    /// drawn for this many sequences. Nothing where that is not modelled.
    #[must_use]
    pub fn serving(&self, tokens: u64, sequences: u64, pages: u64) -> Option<Recipe> {
        let recipe = self.answering(1)?.with("batch", &sequences.to_string());
        Some(recipe.with("served_tokens", &tokens.to_string()).with("pages", &pages.to_string()))
    }

    /// Sets a parameter from a text: TOML where it is TOML, otherwise the text itself.
    #[must_use]
    pub fn with(self, key: &str, text: &str) -> Recipe {
        self.with_given(key, text.to_owned(), GivenValue::typed(key, text))
    }

    /// Sets a parameter from a TOML value, such as a suite's.
    #[must_use]
    pub fn with_value(self, key: &str, value: Value) -> Recipe {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let place = SettingPlace::Override(format!("{key}={text}"));
        self.with_given(key, text, GivenValue { value, place })
    }

    fn with_given(mut self, key: &str, text: String, given: GivenValue) -> Recipe {
        self.given.insert(key.to_owned(), given);
        match self.overrides.iter_mut().find(|(known, _)| known == key) {
            Some((_, value)) => *value = text,
            None => self.overrides.push((key.to_owned(), text)),
        }
        self
    }

    /// Sets the seed; the default is 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Recipe {
        self.seed = seed;
        self
    }

    /// Checks the parameters and makes the workload.
    pub fn workload(&self) -> Result<Workload, WorkloadError> {
        let parameters = Parameters::new(&self.name, self.generator, &self.given)?;
        Ok(Workload {
            title: self.title(),
            recipe: self.name.clone(),
            start: (self.generator.build)(&parameters)?,
            seed: self.seed,
        })
    }

    /// Generator and parameters as text: recipes with the same text make the same events from the same seed.
    #[must_use]
    pub fn words(&self) -> String {
        let given = self.given.iter().map(|(key, given)| format!("; {key} = {}", given.value));
        given.fold(self.generator.name.to_owned(), |words, more| words + &more)
    }

    /// The value of a parameter that takes a whole number, or its default; `None` for other parameters.
    #[must_use]
    pub fn count(&self, key: &str) -> Option<u64> {
        match self.given.get(key) {
            Some(given) => given.value.as_integer().and_then(|value| value.try_into().ok()),
            None => self.generator.parameters.iter().find(|known| known.name == key)?.default.parse().ok(),
        }
    }

    /// What was set beyond the file, in its order: names and values.
    pub fn overrides(&self) -> impl Iterator<Item = (&str, &str)> {
        self.overrides.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The techniques that are set, each by its word in `techniques`. None where the generator has no techniques.
    pub fn technique_words(&self) -> Result<Vec<String>, WorkloadError> {
        Ok(self.read_technique_words()?.words)
    }

    /// The same recipe with these techniques and no others.
    #[must_use]
    pub fn with_technique_words(mut self, words: &[String]) -> Recipe {
        let aliases = self.generator.parameters.iter().filter(|parameter| parameter.is_alias());
        for alias in aliases {
            self.given.remove(alias.name);
            self.overrides.retain(|(key, _)| key != alias.name);
        }
        self.with(autograd::TECHNIQUES.name, &words.join(","))
    }

    /// What is set by an older name: a sentence each, with the name to use.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let now = &self.name;
        let of_name = self.older_name.iter().map(|older| format!("'{older}' is an older name; write {now}"));
        of_name.chain(self.read_technique_words().unwrap_or_default().notes).collect()
    }

    fn read_technique_words(&self) -> Result<TechniqueWords, WorkloadError> {
        TechniqueWords::read(&Parameters::new(&self.name, self.generator, &self.given)?)
    }

    /// What techniques do to the numbers of this model's training, when they are added to it.
    #[must_use]
    pub fn numeric_effect(&self, words: &[String]) -> NumericEffect {
        let has_batch_norm = self.generator.name == autograd::RESNET.name;
        NumericEffect::of_words(words.iter().map(String::as_str), has_batch_norm)
    }

    /// `name`, or `name[key=value;key=value]`: semicolons, because values may hold commas.
    #[must_use]
    pub fn title(&self) -> String {
        if self.overrides.is_empty() {
            return self.name.clone();
        }
        let overrides: Vec<String> = self.overrides.iter().map(|(key, value)| format!("{key}={value}")).collect();
        format!("{}[{}]", self.name, overrides.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{BTreeMap, BTreeSet},
        fs,
    };

    use super::*;
    use oomph_trace::{Category, Event, MarkKind, Op, Source, Tables, Trace, check};

    fn read(workload: &Workload) -> (Vec<Event>, Tables) {
        let trace = Trace::read(workload).unwrap();
        (trace.events, trace.tables)
    }

    fn recipe_in(text: &str) -> Result<Workload, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        fs::write(&path, text).unwrap();
        Recipe::from_file(&path)
            .and_then(|recipe| recipe.workload())
            .map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
    }

    /// Weights of the models that workloads are called after, as their authors publish them (for BERT with the head for
    /// masked tokens, whose weights are those of the table of tokens).
    const PUBLISHED_WEIGHTS: [(&str, u64); 10] = [
        ("gpt2", 124_439_808),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-0.6b", 596_049_920),
        ("bert-base-uncased", 109_514_298),
        ("t5-small", 60_506_624),
        ("vit-base-patch16-224", 86_567_656),
        ("resnet-50", 25_557_032),
    ];

    fn is_published_model(name: &str) -> bool {
        PUBLISHED_WEIGHTS.iter().any(|(published, _)| *published == name)
    }

    #[test]
    fn workloads_called_after_a_model_are_that_model() {
        for (name, weights) in PUBLISHED_WEIGHTS {
            assert_eq!(Recipe::named(name).unwrap().weight_count().unwrap(), Some(weights), "{name}");
        }
        for (name, millions) in [("163m", 163), ("406m", 406), ("1.4b", 1_419), ("13b", 13_111), ("moe-560m", 560)] {
            let recipe = Recipe::named(&format!("reference-gpt-{name}")).unwrap();
            let weights = recipe.weight_count().unwrap().unwrap();
            assert_eq!((weights + 500_000) / 1_000_000, millions, "reference-gpt-{name}");
        }
    }

    #[test]
    fn older_names_of_workloads_are_read_with_a_note() {
        for (older, now) in OLDER_NAMES {
            let recipe = Recipe::named(older).unwrap();
            assert_eq!((recipe.name.as_str(), is_recipe_name(older)), (now, true));
            assert_eq!(recipe.notes(), [format!("'{older}' is an older name; write {now}")]);
            assert!(Recipe::named(now).unwrap().notes().is_empty());
        }
    }

    /// Benchmarks of other allocators are as short as their authors made them.
    fn is_of_a_peer(name: &str) -> bool {
        name.starts_with("kernels-") || name.starts_with("priming-")
    }

    #[test]
    fn embedded_recipes_are_consistent_and_of_suite_size() {
        assert!(recipe_names().count() >= 8);
        for name in recipe_names() {
            let workload = Recipe::named(name).unwrap().workload().unwrap();
            let summary = check(&workload).unwrap_or_else(|error| panic!("{name}: {error}"));
            // Times need repetition and no memory: those recipes are longer, and small.
            let for_timing = name.starts_with("hot-") || name.starts_with("mix-");
            // Exhibits are as long and as large as the reports that they come from, and finds as small as they could be made.
            let is_exhibit = name.starts_with("museum-") || name.starts_with("adversary-");
            let events = match name {
                _ if is_of_a_peer(name) => 200..5_000,
                _ if for_timing => 400_000..1_000_000,
                // A token takes a pass through all layers, and an answer hundreds of tokens.
                _ if name.starts_with("llm-") => 100_000..1_000_000,
                _ if is_exhibit => 20..100_000,
                _ => 5_000..100_000,
            };
            assert!(events.contains(&summary.events), "{name}: {} events", summary.events);
            let gigabytes = summary.peak.bytes as f64 / 1e9;
            let sizes = match name {
                _ if for_timing => 0.0..40.0,
                // The large models are there to not fit.
                _ if name.starts_with("reference-gpt-") || is_published_model(name) => 0.5..400.0,
                _ if name.starts_with("load-") => 0.5..800.0,
                _ if is_exhibit => 0.1..80.0,
                _ if is_of_a_peer(name) => 0.0..80.0,
                _ => 0.5..40.0,
            };
            assert!(sizes.contains(&gigabytes), "{name}: {gigabytes} GB live");
        }
    }

    #[test]
    fn only_a_model_is_live_at_the_end() {
        for name in recipe_names() {
            let (events, tables) = read(&Recipe::named(name).unwrap().workload().unwrap());
            let mut tenants = BTreeMap::new();
            for event in &events {
                match event.op {
                    Op::Alloc { slot, tag, .. } => drop(tenants.insert(slot, tables.tags()[tag.index()].category)),
                    Op::Free { slot, .. } => drop(tenants.remove(&slot)),
                    _ => {}
                }
            }
            let left: BTreeSet<Category> = tenants.into_values().collect();
            let generator = Recipe::named(name).unwrap().generator.name;
            if generator == "faulty_training" {
                assert!(left.contains(&Category::Parameter), "{name}: what else is left is the fault");
                continue;
            }
            let expected: &[Category] = match generator {
                // The activation is the last loss.
                "transformer" | "resnet" | "decoder" | "encoder" | "encoder_decoder" | "vision_encoder" => &[
                    Category::Parameter,
                    Category::Optimizer,
                    Category::Activation,
                    Category::Workspace,
                    Category::Input,
                ],
                // A pool of pages and the buffers of inputs stay.
                "serving" if name == "llm-serve-pool" => {
                    &[Category::Parameter, Category::Cache, Category::Workspace, Category::Input]
                }
                "serving" => &[Category::Parameter, Category::Workspace],
                _ => &[],
            };
            assert_eq!(left, expected.iter().copied().collect(), "{name}");
        }
    }

    #[test]
    fn every_workload_has_steps_and_phases() {
        for name in recipe_names() {
            let (events, tables) = read(&Recipe::named(name).unwrap().workload().unwrap());
            let marks = |wanted| {
                events.iter().filter_map(move |event| match event.op {
                    Op::Mark { kind, label, index } if kind == wanted => Some((label, index)),
                    _ => None,
                })
            };
            assert!(
                marks(MarkKind::Step).map(|(_, index)| index).eq(0..marks(MarkKind::Step).count() as u32),
                "{name}"
            );
            assert!(marks(MarkKind::Step).count() > usize::from(!is_of_a_peer(name)), "{name}");
            assert!(marks(MarkKind::Phase).next().is_some(), "{name}");
            if name == "training" {
                let phases: Vec<_> =
                    marks(MarkKind::Phase).map(|(label, _)| tables.labels()[label as usize].raw()).take(4).collect();
                assert_eq!(phases, ["load", "forward", "backward", "optimizer"]);
            }
        }
    }

    #[test]
    fn seeds_decide_the_events() {
        for name in recipe_names() {
            let seeded = |seed| Recipe::named(name).unwrap().seed(seed).workload().unwrap();
            let first = seeded(1);
            let events = read(&first).0;
            assert!(events == read(&first).0, "{name}: two openings differ");
            assert!(events == read(&seeded(1)).0, "{name}: two workloads of one seed differ");
            let differs = events != read(&seeded(2)).0;
            let generator = Recipe::named(name).unwrap().generator;
            let is_without_chance = match generator.name {
                "transformer" => !["variable-length", "reference-gpt-moe-560m"].contains(&name),
                "decoder" | "encoder" | "encoder_decoder" | "vision_encoder" => true,
                "faulty_training" => !name.starts_with("churn"),
                // One size on one stream leaves nothing to chance.
                _ => name == "kernels-1",
            };
            assert_eq!(differs, generator.seeded && !is_without_chance, "{name}");
        }
    }

    #[test]
    fn unknown_workload_names_the_nearest() {
        let error = Recipe::named("checkerbord").unwrap_err();
        assert_eq!(error.to_string(), "unknown workload 'checkerbord'; did you mean 'checkerboard'?");
        let far_off = Recipe::named("zzz").unwrap_err().to_string();
        assert_eq!(far_off, format!("unknown workload 'zzz'; `oomph list` names all {}", recipe_names().count()));
    }

    #[test]
    fn overrides_reach_generator_and_name() {
        let recipe =
            Recipe::named("checkerboard").unwrap().with("rounds", "1").with("blocks", "64").with("rounds", "2");
        let workload = recipe.with_value("block_bytes", "1MiB".into()).workload().unwrap();
        assert_eq!(workload.name(), "checkerboard[rounds=2;blocks=64;block_bytes=1MiB]");
        let allocs = read(&workload).0.iter().filter(|event| matches!(event.op, Op::Alloc { .. })).count();
        assert_eq!(allocs, 2 * (64 + 16));
    }

    /// Parameters are checked when all are there: 20 heads divide 1280 and not 768.
    #[test]
    fn overrides_are_checked_together() {
        let gpt = || Recipe::named("training").unwrap();
        assert!(gpt().with("heads", "20").with("width", "1280").workload().is_ok());
        assert!(gpt().with("width", "1280").with("heads", "20").workload().is_ok());
        let error = gpt().with("heads", "20").workload().err().unwrap();
        assert_eq!(error.to_string(), "workload 'training': 20 heads do not divide a width of 768");
    }

    #[test]
    fn contradicting_values_are_refused() {
        for (name, overrides, reason) in [
            (
                "random",
                [("max_bytes", "2GiB"), ("live_limit", "1GiB")],
                "max_bytes (2.00 GiB) must be below live_limit (1.00 GiB)",
            ),
            (
                "checkerboard",
                [("blocks", "8"), ("doublings", "2")],
                "8 blocks are too few for 2 doublings, which need 16",
            ),
            (
                "sawtooth",
                [("min_bytes", "2MiB"), ("max_bytes", "1MiB")],
                "min_bytes (2.00 MiB) must not exceed max_bytes (1.00 MiB)",
            ),
            (
                "power-law",
                [("min_lifetime", "9"), ("max_lifetime", "8")],
                "min_lifetime (9) must not exceed max_lifetime (8)",
            ),
            (
                "streams",
                [("min_bytes", "2MiB"), ("max_bytes", "1MiB")],
                "min_bytes (2.00 MiB) must not exceed max_bytes (1.00 MiB)",
            ),
            (
                "variable-length",
                [("min_length", "65"), ("context", "64")],
                "min_length (65) must not exceed the context (64)",
            ),
        ] {
            let recipe =
                overrides.iter().fold(Recipe::named(name).unwrap(), |recipe, (key, text)| recipe.with(key, text));
            assert_eq!(recipe.workload().err().unwrap().to_string(), format!("workload '{name}': {reason}"));
        }
    }

    #[test]
    fn file_is_read_as_a_recipe() {
        let text = "generator = 'random'\npurpose = 'p'\norigin = 'o'\n[set]\nallocations = 10\n";
        let workload = recipe_in(text).unwrap();
        assert_eq!(workload.name(), "mine");
        assert_eq!(read(&workload).0.iter().filter(|event| matches!(event.op, Op::Free { .. })).count(), 10);
    }

    #[test]
    fn errors_in_files_have_line_and_column() {
        let head = "generator = 'random'\npurpose = 'p'\norigin = 'o'\n";
        for (text, message) in [
            (
                format!("{head}[set]\nallocation = 1\n"),
                "mine.toml:5:1: generator 'random' has no parameter 'allocation'; did you mean 'allocations'?",
            ),
            (
                format!("{head}set = {{ allocations = 'x' }}\n"),
                "mine.toml:4:9: 'allocations' takes a whole number from 1 to 1000000000, not the text 'x'",
            ),
            (
                format!("{head}[set]\n max_bytes = 0\n"),
                "mine.toml:5:2: 'max_bytes' takes a size from 1 B to 1024 GiB, not 0",
            ),
            (
                format!("{head}steps = 1\n"),
                "mine.toml:4:1: unknown field `steps`, expected one of `generator`, `purpose`, `origin`, `set`",
            ),
            (
                "generator = 'randm'\npurpose = ''\norigin = ''\n".to_owned(),
                "mine.toml:1:13: unknown generator 'randm'; did you mean 'random'?",
            ),
            ("generator = 'random'\norigin = ''\n".to_owned(), "mine.toml:1:1: missing field `purpose`"),
            ("generator = \n".to_owned(), "mine.toml:1:13: string values must be quoted, expected literal string"),
        ] {
            assert_eq!(recipe_in(&text).err().unwrap(), message);
        }
    }

    #[test]
    fn unreadable_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = Recipe::from_file(&folder.path().join("none.toml")).unwrap_err().to_string();
        assert!(missing.contains("none.toml: No such file"), "{missing}");
        assert!(Recipe::from_file(folder.path()).is_err(), "a folder is no recipe");
    }
}
