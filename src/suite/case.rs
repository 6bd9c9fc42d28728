//! One case: a workload, a strategy, a device, and everything else that decides what will be measured.

use std::sync::Arc;

use super::{
    CaseTimeout, Group, OnOom, Selection, SourceSpec, SuiteError, SuiteFile,
    filter::glob,
    story::{self, Story},
};
use crate::{
    device::DeviceSpec,
    measure::CaseLabel,
    models::{Recipe, WorkloadError, recipe_names},
    plugin,
    replay::{OnOutOfMemory, Pace},
    strategy::{STRATEGIES, StrategySpec},
    trace::Source,
};

/// One case, ready to run.
#[derive(Clone)]
pub struct Case {
    /// Its identity.
    pub label: CaseLabel,
    /// What happens.
    pub source: Arc<dyn Source>,
    /// How to find that again in another process.
    pub origin: SourceSpec,
    /// Who serves the requests.
    pub strategy: StrategySpec,
    /// Where memory comes from.
    pub device: DeviceSpec,
    /// What to do when a request fails.
    pub on_out_of_memory: OnOutOfMemory,
    /// How fast the host goes.
    pub pace: Pace,
    /// Whether work is left out, so that only requests for memory are carried out.
    pub without_work: bool,
    /// Whether wall-clock times are taken as well.
    pub timed: bool,
    /// With how many threads that share the strategy it is timed, beside the one that has it for itself.
    pub threads: Vec<u16>,
    /// How long it may take, where it runs in a process of its own.
    pub timeout: Option<CaseTimeout>,
}

/// What the command line says about all cases of a suite.
#[derive(Clone, Debug)]
pub struct CaseSettings {
    /// Where to run.
    pub device: DeviceSpec,
    /// A cap for every case, instead of the suite's own.
    pub limit: Option<u64>,
    /// One seed for every case, instead of the suite's own.
    pub seed: Option<u64>,
    /// A time-out for every case, instead of the suite's own.
    pub timeout: Option<CaseTimeout>,
}

impl SuiteFile {
    /// Unfolds the suite into its cases, in a fixed order: groups, then workloads and trace files, strategies, limits and seeds.
    pub fn cases(&self, settings: &CaseSettings) -> Result<Vec<Case>, SuiteError> {
        let mut cases = Vec::new();
        for group in &self.group {
            let strategies = self.strategies(group)?;
            let limits: Vec<Option<u64>> = match settings.limit {
                Some(limit) => vec![Some(limit)],
                None if group.limits.is_empty() => vec![None],
                None => group.limits.iter().map(|limit| Some(limit.0)).collect(),
            };
            let seeds = match settings.seed {
                Some(seed) => vec![seed],
                None => group.seeds.clone().unwrap_or_else(|| self.seeds.clone()),
            };
            for told in self.stories(group, &seeds)? {
                for strategy in &strategies {
                    for &limit in &limits {
                        cases.extend(told.iter().map(|story| self.case(group, story, strategy, limit, settings)));
                    }
                }
            }
        }
        match self.absent_files().first() {
            Some(pattern) if cases.is_empty() => Err(story::nowhere(&self.name, pattern)),
            _ => Ok(cases),
        }
    }

    /// The trace files that the suite names and that are not to be seen from the current folder. What came with the binary
    /// goes without their cases, as long as there are others; for any other suite they are an error.
    #[must_use]
    pub fn absent_files(&self) -> Vec<&str> {
        let names = self.group.iter().flat_map(|group| self.names(group));
        names.filter(|name| story::is_path(name) && story::files(&self.name, name).is_err()).collect()
    }

    fn case(
        &self,
        group: &Group,
        story: &Story,
        strategy: &StrategySpec,
        limit: Option<u64>,
        settings: &CaseSettings,
    ) -> Case {
        Case {
            label: CaseLabel {
                suite: self.name.clone(),
                workload: story.source.name().to_owned(),
                strategy: strategy.to_string(),
                device: settings.device.to_string(),
                limit,
                seed: story.origin.seed,
                repeat: group.repeat,
            },
            origin: story.origin.clone(),
            source: Arc::clone(&story.source),
            strategy: strategy.clone(),
            device: settings.device.clone(),
            on_out_of_memory: match group.on_oom {
                OnOom::Stop => OnOutOfMemory::Stop,
                OnOom::Skip => OnOutOfMemory::Skip,
            },
            pace: Pace::Flat,
            without_work: !group.work,
            timed: group.timed,
            threads: group.threads.clone(),
            timeout: settings.timeout.or(group.timeout).or(self.timeout),
        }
    }

    /// What the cases of a group tell: for every workload and trace file, once for every seed that makes a difference.
    fn stories(&self, group: &Group, seeds: &[u64]) -> Result<Vec<Vec<Story>>, SuiteError> {
        let mut stories = Vec::new();
        for name in self.names(group) {
            if story::is_path(name) {
                if !group.set.is_empty() {
                    return Err(SuiteError::NothingToSet { suite: self.name.clone(), path: name.to_owned() });
                }
                let seed = seeds.first().copied().unwrap_or_default();
                let files = match story::files(&self.name, name) {
                    Err(_) if self.is_embedded => Vec::new(),
                    found => found?,
                };
                stories.extend(files.iter().map(|path| vec![Story::of_file(path, seed)]));
            } else {
                let recipe = self.recipe(group, name)?;
                let with_seed = |&seed: &u64| Story::of_recipe(self, group, &recipe, seed);
                stories.push(seeds.iter().map(with_seed).collect::<Result<_, _>>()?);
            }
        }
        Ok(stories)
    }

    fn strategies(&self, group: &Group) -> Result<Vec<StrategySpec>, SuiteError> {
        let specs: Vec<StrategySpec> = match &group.strategies {
            Selection::All => STRATEGIES.iter().flat_map(|entry| entry.specs()).collect(),
            Selection::Names(names) => names.iter().map(|name| StrategySpec::from(name.as_str())).collect(),
        };
        // Against a base that does not exist nothing would be compared.
        let base = StrategySpec::from(self.base.as_str());
        for spec in specs.iter().chain([&base]) {
            plugin::check(spec).map_err(|source| SuiteError::Strategy { suite: self.name.clone(), source })?;
        }
        Ok(specs)
    }

    /// The workloads of all groups, with what each group sets.
    pub fn models(&self) -> Result<Vec<Recipe>, SuiteError> {
        let groups: Vec<Vec<Recipe>> = self.group.iter().map(|group| self.recipes(group)).collect::<Result<_, _>>()?;
        Ok(groups.into_iter().flatten().collect())
    }

    fn recipes(&self, group: &Group) -> Result<Vec<Recipe>, SuiteError> {
        self.names(group).map(|name| self.recipe(group, name)).collect()
    }

    fn names<'a>(&self, group: &'a Group) -> impl Iterator<Item = &'a str> {
        let names: Vec<&str> = match &group.workloads {
            Selection::All => recipe_names().collect(),
            Selection::Names(names) => names.iter().map(String::as_str).collect(),
        };
        names.into_iter().filter(|name| !group.except.iter().any(|pattern| glob(pattern, name)))
    }

    fn recipe(&self, group: &Group, name: &str) -> Result<Recipe, SuiteError> {
        let recipe = Recipe::named(name).map_err(|source| self.refuse(source))?;
        Ok(group.set.iter().fold(recipe, |recipe, (key, value)| recipe.with_value(key, value.clone())))
    }

    pub(super) fn refuse(&self, source: WorkloadError) -> SuiteError {
        SuiteError::Workload { suite: self.name.clone(), source: Box::new(source) }
    }
}
