//! The SOURCE argument, strategies as typed, and replaying a source under one strategy.

use std::{fs, path::Path};

use anyhow::{Context, anyhow};
use clap::{
    Args,
    builder::{OsStringValueParser, TypedValueParser},
};

use super::{
    environment,
    exit::{self, CommandError},
    options::DeviceOptions,
    output,
};
use crate::{
    base::{Progress, copy_until_exit, path_text},
    plugin,
    pytorch::Release,
    replay::{LimitEnforcer, OnOutOfMemory, Replay, ReplayOptions},
    strategy::{STRATEGIES, StrategySpec},
    suite::{SourceError, SourceSpec},
    trace::{
        Source,
        torch::{Action, GivenFacts, MemoryRefuser, RecordedLimit, Recording},
    },
};

/// The strategies that commands compare by default: the one without a cache, and both ways in which PyTorch reserves
/// memory.
pub const DEFAULT_STRATEGIES: [&str; 3] = ["direct", "caching", "caching:expandable_segments:True"];

/// A source and its options.
#[derive(Clone, Debug, Args)]
pub struct SourceOptions {
    /// A workload (see `oomph list workloads`), a workload TOML, or a trace file in any known
    /// format.
    #[arg(value_name = "SOURCE", value_parser = source_argument())]
    pub source: String,
    #[command(flatten)]
    pub settings: SourceSettings,
}

/// The parser of an argument that may be a path, also one that is not UTF-8.
pub fn path_argument() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().map(|typed| path_text(Path::new(&typed)))
}

/// The parser of a SOURCE. A pipe, such as bash's `<(zcat run.pickle.gz)`, is copied: sources are read several times.
pub fn source_argument() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|typed| -> anyhow::Result<String> {
        let path = Path::new(&typed);
        if !is_pipe(path) {
            return Ok(path_text(path));
        }
        exit::clean_up_on_signals()?;
        Ok(path_text(&copy_until_exit(path)?))
    })
}

#[cfg(unix)]
fn is_pipe(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;

    fs::metadata(path).is_ok_and(|there| there.file_type().is_fifo())
}

#[cfg(not(unix))]
fn is_pipe(_path: &Path) -> bool {
    false
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
    #[command(flatten)]
    pub given: GivenOptions,
}

/// What users say about a PyTorch snapshot because the file does not contain it.
#[derive(Clone, Debug, Default, Args)]
pub struct GivenOptions {
    /// The release of PyTorch that wrote a snapshot, such as 2.13 [default: told from its keys, or by trying the
    /// releases that have them]. For `replay` also the release under whose rules a workload runs; several, such as
    /// 2.11,2.15, are compared.
    #[arg(long, value_name = "VERSION", value_delimiter = ',')]
    pub release: Vec<Release>,
    /// The allocator settings of a snapshot's program, as in PYTORCH_CUDA_ALLOC_CONF. PyTorch up to 2.2 does not record
    /// them [default: those in the file].
    #[arg(long, value_name = "SETTINGS")]
    pub settings: Option<String>,
}

impl GivenOptions {
    pub fn facts(&self) -> anyhow::Result<GivenFacts> {
        if self.release.len() > 1 {
            return Err(anyhow!("one release wrote the snapshot; only `oomph replay` compares several"));
        }
        Ok(GivenFacts { release: self.release.first().copied(), settings: self.settings.clone() })
    }
}

impl SourceSettings {
    /// A source with these options.
    pub fn of(&self, source: &str) -> SourceOptions {
        SourceOptions { source: source.to_owned(), settings: self.clone() }
    }
}

impl SourceOptions {
    pub fn spec(&self) -> Result<SourceSpec, CommandError> {
        let SourceSettings { set, seed, device_index, given } = &self.settings;
        let set = set.iter().map(|text| key_and_value(text)).collect::<Result<_, _>>()?;
        let given = given.facts().map_err(CommandError::usage)?;
        let spec = SourceSpec { name: self.source.clone(), set, seed: *seed, device_index: *device_index, given };
        spec.notes().iter().for_each(|note| output::complain_once(note));
        Ok(spec)
    }

    /// Opens the source.
    pub fn open(&self, progress: &dyn Progress) -> Result<Box<dyn Source>, CommandError> {
        self.spec()?.open(progress).map_err(CommandError::usage)
    }

    /// Opens the source, and says what is known about its program if it is a recording.
    pub fn open_with_program(
        &self,
        progress: &dyn Progress,
    ) -> Result<(Box<dyn Source>, Option<RecordedProgram>), CommandError> {
        Ok(match self.recording(progress)? {
            Some(recording) => {
                let program = RecordedProgram::of(&recording);
                (recording.into_source(), Some(program))
            }
            None => (self.open(progress)?, None),
        })
    }

    /// The source as a recording, if it is a PyTorch snapshot. It has no parameters to set.
    pub fn recording(&self, progress: &dyn Progress) -> Result<Option<Recording>, CommandError> {
        let recording = self.spec()?.recording(progress).map_err(CommandError::usage)?;
        if recording.is_some() && !self.settings.set.is_empty() {
            return Err(CommandError::usage(SourceError::NothingToSet(self.spec()?.shown())));
        }
        Ok(recording)
    }
}

/// What is known about the program of a recording.
pub struct RecordedProgram {
    /// The settings, as in PYTORCH_CUDA_ALLOC_CONF.
    pub settings: String,
    /// The release of PyTorch.
    pub release: Release,
    /// The limit under which it ran.
    pub limit: Option<RecordedLimit>,
    /// Requests that failed.
    pub failures: usize,
    /// Whether it ended with a failure.
    pub died: bool,
}

impl RecordedProgram {
    pub fn of(recording: &Recording) -> RecordedProgram {
        let failed = recording.witnessed.iter().filter(|entry| entry.action == Action::OutOfMemory);
        RecordedProgram {
            settings: recording.settings.compact_conf(),
            release: recording.release.assumed(),
            limit: recording.limit.clone(),
            failures: failed.count(),
            died: recording.dead_end().is_some(),
        }
    }

    /// The limit under which it ran, unless the options say otherwise: `--limit` replaces it, and `--card` replaces a
    /// device that was full.
    pub fn limit(&self, options: &DeviceOptions) -> Option<&RecordedLimit> {
        let is_replaced = |limit: &RecordedLimit| match limit.refused_by {
            MemoryRefuser::Device => options.choice.card.is_some(),
            MemoryRefuser::OwnLimit | MemoryRefuser::Unknown => false,
        };
        self.limit.as_ref().filter(|limit| options.limit.is_none() && !is_replaced(limit))
    }

    /// How a replay without `--limit` relates to the recorded run, if there is something to say.
    pub fn note(&self, options: &DeviceOptions) -> Option<String> {
        match (&self.limit, self.limit(options)) {
            (_, Some(limit)) => Some(format!(
                "replayed under the limit of the recorded program, {}; --limit sets another",
                limit.in_words()
            )),
            (None, None) if self.failures > 0 && options.limit.is_none() => Some(format!(
                "hypothetical: {} requests failed when recorded, under a limit that is not known; pass it with --limit",
                self.failures
            )),
            _ => None,
        }
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

/// The strategies of texts that may hold several each, `tlsf,buddy`, or `all`. A comma also separates parameters: it begins
/// another strategy behind one without parameters, and before the name of one.
pub fn listed_strategies(texts: &[String]) -> Result<Vec<String>, CommandError> {
    let mut all: Vec<String> = Vec::new();
    for text in texts.iter().flat_map(|text| split_strategies(text)) {
        if text == "all" {
            all.extend(STRATEGIES.iter().flat_map(|entry| entry.specs()).map(|spec| spec.to_string()));
        } else {
            all.push(strategy(&text)?.to_string());
        }
    }
    Ok(all)
}

fn split_strategies(text: &str) -> Vec<String> {
    let mut specs: Vec<String> = Vec::new();
    for part in text.split(',') {
        let spec = StrategySpec::from(part);
        let is_name = plugin::is_plugin(&spec) || spec.entry().is_ok();
        match specs.last_mut().filter(|last| last.contains(':') && !is_name) {
            Some(last) => *last = format!("{last},{part}"),
            None => specs.push(part.trim().to_owned()),
        }
    }
    specs
}

/// Strategies as typed, without plugins; `reason` says why they are refused.
pub fn strategies_without_plugins(texts: &[impl AsRef<str>], reason: &str) -> Result<Vec<StrategySpec>, CommandError> {
    let checked = |text: &str| match plugin::is_plugin(&StrategySpec::from(text)) {
        true => Err(CommandError::usage(anyhow!("{reason}; `oomph replay` runs plugins"))),
        false => strategy(text),
    };
    texts.iter().map(|text| checked(text.as_ref())).collect()
}

/// The strategy as typed, or PyTorch's allocator with the recorded settings; of the recorded release, unless another one is
/// named.
pub fn strategy_or_recorded(
    typed: Option<&str>,
    recorded: Option<&RecordedProgram>,
) -> Result<StrategySpec, CommandError> {
    let release = recorded.map_or(Release::DEFAULT, |recorded| recorded.release);
    if let Some(text) = typed.filter(|text| *text != RECORDED) {
        return Ok(strategy(text)?.of_release(release));
    }
    let settings = recorded.map_or_else(String::new, |recorded| recorded.settings.clone());
    let spec = StrategySpec { name: "caching".to_owned(), parameters: supported_settings(settings, release) };
    Ok(spec.of_release(release))
}

/// The settings of a recording, or PyTorch's defaults where the model does not support them.
pub fn supported_settings(recorded: String, release: Release) -> String {
    let spec = StrategySpec { name: "caching".to_owned(), parameters: recorded };
    match spec.clone().of_release(release).check() {
        Ok(()) => spec.parameters,
        Err(error) => {
            output::complain(&format!("note: using PyTorch's default settings instead of the recorded ones: {error}"));
            String::new()
        }
    }
}

/// A replay of `source` under a strategy, with the device and the limit of the options. Without a limit, that of
/// the recorded program applies, and requests that it refuses are skipped. The replay continues from the memory that
/// existed when a recording began.
pub fn replay<'a>(
    source: &'a dyn Source,
    options: &DeviceOptions,
    strategy: &StrategySpec,
    recorded: Option<&RecordedProgram>,
) -> Result<Replay<'a>, CommandError> {
    let replay = Replay::new(source).strategy(strategy.clone()).device(options.spec()?);
    let resuming = ReplayOptions { resumes: true, ..ReplayOptions::default() };
    Ok(match recorded.and_then(|recorded| recorded.limit(options)) {
        Some(recorded) => {
            let enforcer = match recorded.refused_by {
                MemoryRefuser::Device => LimitEnforcer::Device,
                MemoryRefuser::OwnLimit | MemoryRefuser::Unknown => LimitEnforcer::Allocator,
            };
            let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..resuming };
            replay.limit(recorded.bytes).enforced_by(enforcer).options(options)
        }
        None => replay.limit(options.limit_bytes()?).options(resuming),
    })
}

/// The name that stands for PyTorch's allocator with the settings of the recording.
pub const RECORDED: &str = "caching:recorded";

/// Strategies as typed, with `caching:env` resolved and reported.
pub fn resolved_strategies(typed: &[String]) -> Result<Vec<String>, CommandError> {
    let resolved = |text: &String| match text.as_str() {
        RECORDED => Ok(text.clone()),
        _ => Ok(strategy(text)?.to_string()),
    };
    typed.iter().map(resolved).collect()
}

/// Strategies as typed, or the usual ones; `caching:recorded` needs a recording as `source`.
pub fn strategies_of_recording(
    typed: &[String],
    source: &str,
    recorded: Option<&RecordedProgram>,
) -> Result<Vec<StrategySpec>, CommandError> {
    let one = |text: &str| match (text, recorded) {
        (_, Some(_)) => strategy_or_recorded(Some(text), recorded),
        (RECORDED, None) => {
            let reason = format!("takes the settings of a PyTorch snapshot, and '{source}' is something else");
            Err(CommandError::usage(anyhow!("{RECORDED} {reason}")))
        }
        _ => strategy(text),
    };
    if !typed.is_empty() {
        return typed.iter().map(|text| one(text)).collect();
    }
    let own = recorded.map(|_| RECORDED);
    let mut specs: Vec<StrategySpec> = Vec::new();
    for text in own.into_iter().chain(DEFAULT_STRATEGIES) {
        let spec = one(text)?;
        if !specs.contains(&spec) {
            specs.push(spec);
        }
    }
    Ok(specs)
}
