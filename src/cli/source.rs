//! The SOURCE argument, strategies as typed, and replaying a source under one strategy.

use anyhow::{Context, anyhow};
use clap::Args;

use super::{environment, exit::CommandError, options::DeviceOptions, output};
use crate::{
    base::Progress,
    plugin,
    replay::Replay,
    strategy::StrategySpec,
    suite::SourceSpec,
    trace::{Source, torch::Recording},
};

/// The strategies that commands compare by default: the one without a cache, and both ways in which PyTorch reserves
/// memory.
pub const DEFAULT_STRATEGIES: [&str; 3] = ["direct", "caching", "caching:expandable_segments:True"];

/// A source and its options.
#[derive(Clone, Debug, Args)]
pub struct SourceOptions {
    /// A workload (see `oomph list workloads`), a workload TOML, or a trace file in any known
    /// format.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    #[command(flatten)]
    pub settings: SourceSettings,
}

/// The options of one source or several.
#[derive(Clone, Debug, Args)]
pub struct SourceSettings {
    /// Override a parameter of the workload, such as `--set batch=4`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Seed of the workload's random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The GPU to use from a PyTorch snapshot of several [default: the first one with data].
    #[arg(long, value_name = "N")]
    pub device_index: Option<u32>,
}

impl SourceSettings {
    /// A source with these options.
    pub fn of(&self, source: &str) -> SourceOptions {
        SourceOptions { source: source.to_owned(), settings: self.clone() }
    }
}

impl SourceOptions {
    pub fn spec(&self) -> Result<SourceSpec, CommandError> {
        let SourceSettings { set, seed, device_index } = &self.settings;
        let set = set.iter().map(|text| key_and_value(text)).collect::<Result<_, _>>()?;
        Ok(SourceSpec { name: self.source.clone(), set, seed: *seed, device_index: *device_index })
    }

    /// Opens the source.
    pub fn open(&self, progress: &dyn Progress) -> Result<Box<dyn Source>, CommandError> {
        self.spec()?.open(progress).map_err(CommandError::usage)
    }

    /// The source as a recording, if it is a PyTorch snapshot.
    pub fn recording(&self, progress: &dyn Progress) -> Result<Option<Recording>, CommandError> {
        self.spec()?.recording(progress).map_err(CommandError::usage)
    }
}

/// Splits KEY=VALUE.
pub fn key_and_value(text: &str) -> Result<(String, String), CommandError> {
    let (key, value) = text
        .split_once('=')
        .with_context(|| format!("'{text}' is not KEY=VALUE; write it like --set batch=4"))
        .map_err(CommandError::usage)?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// A strategy as typed. For `caching:env`, the settings found are reported.
pub fn strategy(text: &str) -> Result<StrategySpec, CommandError> {
    let (spec, note) = environment::resolve_settings(StrategySpec::from(text));
    plugin::check(&spec).map_err(CommandError::usage)?;
    note.iter().for_each(|note| output::complain(note));
    Ok(spec)
}

/// Strategies as typed, without plugins; `reason` says why they are refused.
pub fn strategies_without_plugins(texts: &[impl AsRef<str>], reason: &str) -> Result<Vec<StrategySpec>, CommandError> {
    let checked = |text: &str| match plugin::is_plugin(&StrategySpec::from(text)) {
        true => Err(CommandError::usage(anyhow!("{reason}; `oomph replay` runs plugins"))),
        false => strategy(text),
    };
    texts.iter().map(|text| checked(text.as_ref())).collect()
}

/// The strategy as typed, or PyTorch's allocator with the recorded settings.
pub fn strategy_or_recorded(typed: Option<&str>, recorded: &str) -> Result<StrategySpec, CommandError> {
    if let Some(text) = typed {
        return strategy(text);
    }
    Ok(StrategySpec { name: "caching".to_owned(), parameters: supported_settings(recorded.to_owned()) })
}

/// The settings of a recording, or PyTorch's defaults where the model does not support them.
pub fn supported_settings(recorded: String) -> String {
    let spec = StrategySpec { name: "caching".to_owned(), parameters: recorded };
    match spec.check() {
        Ok(()) => spec.parameters,
        Err(error) => {
            output::complain(&format!("note: using PyTorch's default settings instead of the recorded ones: {error}"));
            String::new()
        }
    }
}

/// A replay of `source` under a strategy, with the device and the limit of the options.
pub fn replay<'a>(
    source: &'a dyn Source,
    options: &DeviceOptions,
    strategy: &StrategySpec,
) -> Result<Replay<'a>, CommandError> {
    let limit = options.limit.map(|limit| limit.0);
    Ok(Replay::new(source).strategy(strategy.clone()).device(options.spec()?).limit(limit))
}
