//! One case: a workload, a strategy, a device, and everything else that decides what will be measured.

use std::sync::Arc;

use super::{
    CaseTimeout, Group, OnOom, Selection, SourceSpec, SuiteError, SuiteFile,
    filter::glob,
    recorded::{self, RecordedSource},
};
use crate::{
    device::DeviceSpec,
    measure::CaseLabel,
    replay::{OnOutOfMemory, Pace},
    strategy::{STRATEGIES, StrategySpec},
    trace::Source,
    workload::{Recipe, WorkloadError, recipe_names},
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
    /// Unfolds the suite into its cases, in a fixed order: groups, then workloads, strategies, limits and seeds.
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
            for path in group.recordings.iter().flat_map(|pattern| recorded::matching(pattern)) {
                let source = Arc::new(RecordedSource::new(&path));
                for strategy in &strategies {
                    for &limit in &limits {
                        let origin = source.spec().clone();
                        cases.push(self.case_of(group, source.clone(), origin, strategy, limit, settings));
                    }
                }
            }
            for recipe in self.recipes(group)? {
                for strategy in &strategies {
                    for &limit in &limits {
                        for &seed in &seeds {
                            let recipe = recipe.clone().seed(seed);
                            cases.push(self.case(group, &recipe, strategy, limit, settings)?);
                        }
                    }
                }
            }
        }
        Ok(cases)
    }

    fn case(
        &self,
        group: &Group,
        recipe: &Recipe,
        strategy: &StrategySpec,
        limit: Option<u64>,
        settings: &CaseSettings,
    ) -> Result<Case, SuiteError> {
        let workload = recipe.workload().map_err(|source| self.refuse(source))?;
        let origin = SourceSpec {
            name: recipe.name().to_owned(),
            set: group.set.iter().map(|(key, value)| (key.clone(), value.to_string())).collect(),
            seed: workload.seed(),
            device_index: None,
        };
        Ok(self.case_of(group, Arc::new(workload), origin, strategy, limit, settings))
    }

    fn case_of(
        &self,
        group: &Group,
        source: Arc<dyn Source>,
        origin: SourceSpec,
        strategy: &StrategySpec,
        limit: Option<u64>,
        settings: &CaseSettings,
    ) -> Case {
        Case {
            label: CaseLabel {
                suite: self.name.clone(),
                workload: source.name().to_owned(),
                strategy: strategy.to_string(),
                device: settings.device.to_string(),
                limit,
                seed: origin.seed,
                repeat: group.repeat,
            },
            origin,
            source,
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

    /// Patterns of recordings that no file matches: their cases are left out.
    pub fn unmatched(&self) -> impl Iterator<Item = &str> {
        let patterns = self.group.iter().flat_map(|group| &group.recordings);
        patterns.filter(|pattern| recorded::matching(pattern).is_empty()).map(String::as_str)
    }

    fn strategies(&self, group: &Group) -> Result<Vec<StrategySpec>, SuiteError> {
        let specs: Vec<StrategySpec> = match &group.strategies {
            Selection::All => STRATEGIES.iter().flat_map(|entry| entry.specs()).collect(),
            Selection::Names(names) => names.iter().map(|name| StrategySpec::from(name.as_str())).collect(),
        };
        for spec in &specs {
            spec.check().map_err(|source| SuiteError::Strategy { suite: self.name.clone(), source })?;
        }
        Ok(specs)
    }

    /// The workloads of all groups, with what each group sets.
    pub fn models(&self) -> Result<Vec<Recipe>, SuiteError> {
        let groups: Vec<Vec<Recipe>> = self.group.iter().map(|group| self.recipes(group)).collect::<Result<_, _>>()?;
        Ok(groups.into_iter().flatten().collect())
    }

    fn recipes(&self, group: &Group) -> Result<Vec<Recipe>, SuiteError> {
        let names: Vec<&str> = match &group.workloads {
            Selection::All => recipe_names().collect(),
            Selection::Names(names) => names.iter().map(String::as_str).collect(),
        };
        names
            .into_iter()
            .filter(|name| !group.except.iter().any(|pattern| glob(pattern, name)))
            .map(|name| {
                let recipe = Recipe::named(name).map_err(|source| self.refuse(source))?;
                Ok(group.set.iter().fold(recipe, |recipe, (key, value)| recipe.with_value(key, value.clone())))
            })
            .collect()
    }

    fn refuse(&self, source: WorkloadError) -> SuiteError {
        SuiteError::Workload { suite: self.name.clone(), source: Box::new(source) }
    }
}
