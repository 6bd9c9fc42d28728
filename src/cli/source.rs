//! What users name as SOURCE: a workload, a workload TOML, or a trace file.

use std::path::Path;

use anyhow::{Context, anyhow};
use clap::Args;

use super::failure::Failure;
use crate::{
    trace::{self, Source},
    workload::Recipe,
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
}

impl SourceOptions {
    /// Finds and prepares the source.
    pub fn resolve(&self) -> Result<Box<dyn Source>, Failure> {
        match self.recipe()? {
            Some(recipe) => {
                let recipe = apply(recipe, &self.set)?.seed(self.seed);
                Ok(Box::new(recipe.workload().map_err(Failure::usage)?))
            }
            None => {
                if !self.set.is_empty() {
                    return Err(Failure::usage(anyhow!("--set changes workloads; '{}' is a trace file", self.source)));
                }
                Ok(trace::open(Path::new(&self.source)).map_err(Failure::usage)?)
            }
        }
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
        if self.source.contains('/') || path.extension().is_some() {
            return Err(Failure::usage(anyhow!("{}: no such file", self.source)));
        }
        Ok(Some(Recipe::named(&self.source).map_err(Failure::usage)?))
    }
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
