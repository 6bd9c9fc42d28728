//! What users name as SOURCE: a workload, a workload TOML, or a trace file.
//!
//! A PyTorch snapshot is more than a trace: it is re-lived first, so that the story has the calls of `empty_cache` that
//! the file itself does not record.

use std::path::Path;

use anyhow::{Context, anyhow};
use clap::Args;

use super::failure::Failure;
use crate::{
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::{Companion, Verdict, verify},
    strategy::Setup,
    trace::{
        self, Source,
        torch::{self, Recording},
    },
    workload::{Recipe, recipe_names},
};

/// A source and how to change it.
#[derive(Debug, Args)]
pub struct SourceOptions {
    /// A workload (see `oomph list workloads`), a workload TOML, or a trace file in any known format.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Override a parameter of the workload, such as `--set batch=4`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Seed of the workload's random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Which GPU of a PyTorch snapshot that has several; without it the first that something is known about.
    #[arg(long, value_name = "N")]
    pub device_index: Option<u32>,
}

impl SourceOptions {
    /// Finds and prepares the source.
    pub fn resolve(&self) -> Result<Box<dyn Source>, Failure> {
        match self.recipe()? {
            Some(_) if self.device_index.is_some() => Err(not_a_snapshot()),
            Some(recipe) => {
                let recipe = apply(recipe, &self.set)?.seed(self.seed);
                Ok(Box::new(recipe.workload().map_err(Failure::usage)?))
            }
            None => {
                if !self.set.is_empty() {
                    return Err(Failure::usage(anyhow!("--set changes workloads; '{}' is a trace file", self.source)));
                }
                Ok(match self.recording()? {
                    Some(recording) => Box::new(recording.trace),
                    None => trace::open(Path::new(&self.source)).map_err(Failure::usage)?,
                })
            }
        }
    }

    /// The source as a recording, if it is a PyTorch snapshot. The snapshot's own limit is used to understand it, and
    /// nowhere else: a replay is limited by its own arguments only.
    pub fn recording(&self) -> Result<Option<Recording>, Failure> {
        let path = Path::new(&self.source);
        let is_file = path.is_file() && path.extension().is_none_or(|extension| extension != "toml");
        if !is_file || trace::recognise(path).map_err(Failure::usage)?.name != torch::NAME {
            return match self.device_index {
                Some(_) => Err(not_a_snapshot()),
                None => Ok(None),
            };
        }
        let recording = Recording::open(path, self.device_index).map_err(Failure::usage)?;
        let device = SimDevice::new(SimConfig::default())?;
        let props = device.props();
        let companion = Companion::beside(path).map_err(Failure::usage)?.unwrap_or_default();
        let limit = companion.memory_fraction.map(|fraction| (fraction * props.total_bytes as f64) as u64);
        let verification = verify(&recording, &Setup { props, limit }, &companion.counters);
        Ok(Some(match verification.verdict {
            Verdict::Exact => recording.with_empty_caches(verification.empty_caches)?,
            Verdict::Partial { .. } | Verdict::Diverged(_) => recording,
        }))
    }

    /// The recipe, or `None` if the source is a trace file.
    fn recipe(&self) -> Result<Option<Recipe>, Failure> {
        let path = Path::new(&self.source);
        if path.extension().is_some_and(|extension| extension == "toml") {
            return Ok(Some(Recipe::from_file(path).map_err(Failure::usage)?));
        }
        if path.is_file() {
            return Ok(None);
        }
        if path.is_dir() {
            return Err(Failure::usage(anyhow!("{}: is a directory; a trace file was expected", self.source)));
        }
        // Names may have a dot (`gpt-1.3b`).
        let is_name = recipe_names().any(|name| name == self.source);
        if !is_name && (self.source.contains('/') || path.extension().is_some()) {
            return Err(Failure::usage(anyhow!("{}: no such file", self.source)));
        }
        Ok(Some(Recipe::named(&self.source).map_err(Failure::usage)?))
    }
}

fn not_a_snapshot() -> Failure {
    Failure::usage(anyhow!("--device-index chooses among the GPUs of a PyTorch snapshot"))
}

/// Applies `KEY=VALUE` texts.
fn apply(mut recipe: Recipe, overrides: &[String]) -> Result<Recipe, Failure> {
    for text in overrides {
        let (key, value) = text
            .split_once('=')
            .with_context(|| format!("'{text}' is not KEY=VALUE; write it like --set batch=4"))
            .map_err(Failure::usage)?;
        recipe = recipe.with(key.trim(), value.trim());
    }
    Ok(recipe)
}
