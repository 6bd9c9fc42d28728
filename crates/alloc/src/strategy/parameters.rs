//! How strategies are described and built: registry lines, `NAME[:PARAMETERS]` texts and their
//! errors. Knows no strategy.

use std::fmt;

use super::Strategy;
use crate::device::DeviceProps;
use oomph_base::{Bytes, Parameter, did_you_mean, nearest};

/// A line of the registry.
pub struct StrategyEntry {
    /// The name that users type.
    pub name: &'static str,
    /// One line for `list`.
    pub summary: &'static str,
    /// What it models, with the source.
    pub origin: &'static str,
    /// In what it differs from that, one sentence each.
    pub differs: &'static [&'static str],
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Parameter texts to test besides the default.
    pub variants: &'static [&'static str],
    /// Builds the strategy.
    pub build: fn(parameters: &str, setup: &Setup<'_>) -> Built,
}

impl StrategyEntry {
    /// The error of parameters that the strategy does not accept.
    pub(crate) fn refused(&self, reason: String) -> SpecError {
        SpecError::BadParameters { strategy: self.name, reason }
    }

    /// The default and every variant: what `strategies = "all"` selects.
    pub fn specs(&self) -> impl Iterator<Item = StrategySpec> + '_ {
        std::iter::once("")
            .chain(self.variants.iter().copied())
            .map(|parameters| StrategySpec { name: self.name.to_owned(), parameters: parameters.to_owned() })
    }
}

/// A new strategy, or why it cannot be built.
pub type Built = Result<Box<dyn Strategy>, SpecError>;

/// What a strategy knows when it is built.
pub struct Setup<'a> {
    /// The device it will run on.
    pub props: &'a DeviceProps,
    /// `--limit`: physical bytes it may hold. The device enforces it; PyTorch's allocator also
    /// computes with it.
    pub limit: Option<u64>,
}

/// A strategy by name and parameters, as users type it: `caching:max_split_size_mb:128`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct StrategySpec {
    /// The part before the first colon.
    pub name: String,
    /// The part after it, in the strategy's own syntax.
    pub parameters: String,
}

/// A strategy text that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The name is unknown.
    #[error("unknown strategy '{name}'{hint}")]
    UnknownStrategy {
        /// The name in the text.
        name: String,
        /// The most similar names, as the end of the message.
        hint: String,
    },
    /// The strategy does not accept its parameters.
    #[error("strategy '{strategy}': {reason}")]
    BadParameters {
        /// The strategy.
        strategy: &'static str,
        /// Why.
        reason: String,
    },
}

/// Splits the text; [`StrategySpec::entry`] checks the name.
impl From<&str> for StrategySpec {
    fn from(text: &str) -> StrategySpec {
        let (name, parameters) = text.split_once(':').unwrap_or((text, ""));
        StrategySpec { name: name.trim().to_owned(), parameters: parameters.trim().to_owned() }
    }
}

impl fmt::Display for StrategySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if !self.parameters.is_empty() {
            write!(f, ":{}", self.parameters)?;
        }
        Ok(())
    }
}

/// One `key:value`; the strategy's entry names the key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting<'a> {
    pub(crate) key: &'a str,
    pub(crate) value: &'a str,
}

/// Passes every `key:value` of `text` to `apply`. An unknown key is refused with the most similar
/// known one.
pub(crate) fn read<'a>(
    entry: &StrategyEntry,
    text: &'a str,
    mut apply: impl FnMut(Setting<'a>) -> Result<(), String>,
) -> Result<(), SpecError> {
    text.split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .try_for_each(|part| apply(setting(entry.parameters, part)?))
        .map_err(|reason| entry.refused(reason))
}

/// Passes the default of every parameter to `apply`, then every `key:value` of `text`.
pub(crate) fn read_with_defaults(
    entry: &StrategyEntry,
    text: &str,
    apply: impl FnMut(Setting<'_>) -> Result<(), String>,
) -> Result<(), SpecError> {
    let defaults = entry.parameters.iter().map(|parameter| format!("{}:{},", parameter.name, parameter.default));
    read(entry, &(defaults.collect::<String>() + text), apply)
}

/// The value of the only parameter, an amount of memory.
pub(crate) fn read_amount(entry: &StrategyEntry, text: &str) -> Result<u64, SpecError> {
    let mut amount = 0;
    read_with_defaults(entry, text, |setting| setting.bytes().map(|bytes| amount = bytes))?;
    Ok(amount)
}

fn setting<'a>(known: &[Parameter], part: &'a str) -> Result<Setting<'a>, String> {
    if known.is_empty() {
        return Err(format!("takes no parameters, got '{part}'"));
    }
    let (key, value) = part.split_once(':').ok_or_else(|| format!("'{part}' is not of the form key:value"))?;
    let (key, value) = (key.trim(), value.trim());
    let names = || known.iter().map(|parameter| parameter.name);
    if names().any(|name| name == key) {
        return Ok(Setting { key, value });
    }
    Err(format!("unknown parameter '{key}'{}", did_you_mean(nearest(key, names()).as_deref())))
}

impl Setting<'_> {
    /// `True` or `False`, as PyTorch writes them.
    pub(super) fn truth(&self) -> Result<bool, String> {
        match self.value {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(self.refused(&format!("'{other}' is not True or False"))),
        }
    }

    /// An amount of memory: `512`, `2MiB`.
    pub(super) fn bytes(&self) -> Result<u64, String> {
        self.value.parse::<Bytes>().map(|bytes| bytes.0).map_err(|error| self.refused(&error.to_string()))
    }

    /// A number.
    pub(super) fn number<N: std::str::FromStr>(&self) -> Result<N, String> {
        self.value.parse().map_err(|_| self.refused(&format!("'{}' is not a valid number", self.value)))
    }

    /// An error message that begins with the parameter's name.
    pub(super) fn refused(&self, reason: &str) -> String {
        format!("'{}': {reason}", self.key)
    }
}
