//! The SOURCE argument and its options.

use anyhow::Context;
use clap::Args;

use super::failure::Failure;
use crate::{
    base::Progress,
    suite::SourceSpec,
    trace::{Source, torch::Recording},
};

/// A source and how to change it.
#[derive(Clone, Debug, Args)]
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
    /// What they name.
    pub fn spec(&self) -> Result<SourceSpec, Failure> {
        let set = self.set.iter().map(|text| key_and_value(text)).collect::<Result<_, _>>()?;
        Ok(SourceSpec { name: self.source.clone(), set, seed: self.seed, device_index: self.device_index })
    }

    /// The same options for another source.
    pub fn at(&self, source: &str) -> SourceOptions {
        SourceOptions { source: source.to_owned(), ..self.clone() }
    }

    /// Finds and prepares the source.
    pub fn resolve(&self, progress: &dyn Progress) -> Result<Box<dyn Source>, Failure> {
        self.spec()?.open(progress).map_err(Failure::usage)
    }

    /// The source as a recording, if it is a PyTorch snapshot.
    pub fn recording(&self, progress: &dyn Progress) -> Result<Option<Recording>, Failure> {
        self.spec()?.recording(progress).map_err(Failure::usage)
    }
}

fn key_and_value(text: &str) -> Result<(String, String), Failure> {
    let (key, value) = text
        .split_once('=')
        .with_context(|| format!("'{text}' is not KEY=VALUE; write it like --set batch=4"))
        .map_err(Failure::usage)?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}
