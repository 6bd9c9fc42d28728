//! Reading `key:value,key:value`, the way strategies take their parameters.

use super::{Parameter, SpecError, StrategyEntry};
use oomph_base::{Bytes, did_you_mean, nearest};

/// One `key:value`; the key is one that the strategy's entry names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting<'a> {
    pub(crate) key: &'a str,
    pub(crate) value: &'a str,
}

/// Hands every setting in `text` to `apply`; a key that the entry does not list is refused with the nearest that it does.
pub(crate) fn read<'a>(
    entry: &StrategyEntry,
    text: &'a str,
    mut apply: impl FnMut(Setting<'a>) -> Result<(), String>,
) -> Result<(), SpecError> {
    text.split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .try_for_each(|part| apply(setting(entry.parameters, part)?))
        .map_err(|reason| SpecError::BadParameters { strategy: entry.name, reason })
}

fn setting<'a>(known: &[Parameter], part: &'a str) -> Result<Setting<'a>, String> {
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

    /// Any number that Rust can parse.
    pub(super) fn number<N: std::str::FromStr>(&self) -> Result<N, String> {
        self.value.parse().map_err(|_| self.refused(&format!("'{}' is not a number it takes", self.value)))
    }

    /// Why the value will not do, with the parameter's name in front.
    pub(super) fn refused(&self, reason: &str) -> String {
        format!("'{}': {reason}", self.key)
    }
}
