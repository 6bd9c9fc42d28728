//! Which strategies there are, and how a `NAME[:PARAMETERS]` text becomes one.

use std::fmt;

use super::{
    Strategy, async_pool, bfc, buddy, by_address, caching, cub, direct, null, oomph, planned, rmm, slab, stitch, tlsf,
};
use crate::device::{Capabilities, Clock, DeviceProps};
use oomph_base::{GIB, MIB, did_you_mean_among, nearest};

/// Every strategy, in the order in which `list` shows them. Adding one is one line here.
pub static STRATEGIES: &[StrategyEntry] = &[
    null::ENTRY,
    direct::ENTRY,
    async_pool::ENTRY,
    caching::ENTRY,
    rmm::pool::ENTRY,
    rmm::arena::ENTRY,
    rmm::fixed::ENTRY,
    rmm::binning::ENTRY,
    bfc::ENTRY,
    cub::ENTRY,
    buddy::ENTRY,
    tlsf::ENTRY,
    slab::ENTRY,
    stitch::ENTRY,
    planned::ENTRY,
    oomph::ENTRY,
    by_address::ENTRY,
];

/// What the registry knows about a strategy.
pub struct StrategyEntry {
    /// What users type.
    pub name: &'static str,
    /// One line for `list`.
    pub summary: &'static str,
    /// What it models, and where that comes from.
    pub origin: &'static str,
    /// What can be set.
    pub parameters: &'static [Parameter],
    /// Parameter texts worth testing beside the default (`""` is always tested).
    pub variants: &'static [&'static str],
    /// Makes one.
    pub build: fn(parameters: &str, setup: &Setup<'_>) -> Built,
}

impl StrategyEntry {
    /// The default and every variant, as users would type them: what `strategies = "all"` means.
    pub fn specs(&self) -> impl Iterator<Item = StrategySpec> + '_ {
        std::iter::once("")
            .chain(self.variants.iter().copied())
            .map(|parameters| StrategySpec { name: self.name.to_owned(), parameters: parameters.to_owned() })
    }
}
/// A new strategy, or why there is none.
pub type Built = Result<Box<dyn Strategy>, SpecError>;

/// One parameter of a strategy.
pub struct Parameter {
    /// What users type before the colon.
    pub name: &'static str,
    /// Which values it takes, in words.
    pub values: &'static str,
    /// What holds where it is not given.
    pub default: &'static str,
    /// What it does.
    pub help: &'static str,
}

/// What a strategy may know when it is made.
pub struct Setup<'a> {
    /// The device it will run on.
    pub props: &'a DeviceProps,
    /// `--limit`: physical bytes it may hold. The device enforces it; PyTorch's allocator also computes with it.
    pub limit: Option<u64>,
}

/// A strategy by name and parameters, as users type it: `caching:max_split_size_mb:128`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StrategySpec {
    /// The part before the first colon.
    pub name: String,
    /// The part after it, in the strategy's own syntax.
    pub parameters: String,
}

/// A strategy text that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No strategy of that name.
    #[error("unknown strategy '{name}'{}", did_you_mean_among(suggestion.as_deref(), STRATEGIES.iter().map(|entry| entry.name)))]
    UnknownStrategy {
        /// What was typed.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// The strategy refuses its parameters.
    #[error("strategy '{strategy}': {reason}")]
    BadParameters {
        /// Which strategy.
        strategy: &'static str,
        /// Why, in its own words.
        reason: String,
    },
}

impl SpecError {
    /// What a strategy without parameters answers to some.
    pub(super) fn unless_empty(strategy: &'static str, parameters: &str) -> Result<(), SpecError> {
        match parameters {
            "" => Ok(()),
            _ => Err(SpecError::BadParameters { strategy, reason: format!("takes no parameters, got '{parameters}'") }),
        }
    }
}

impl StrategySpec {
    /// The registry's entry for this name.
    pub fn entry(&self) -> Result<&'static StrategyEntry, SpecError> {
        STRATEGIES.iter().find(|entry| entry.name == self.name).ok_or_else(|| SpecError::UnknownStrategy {
            name: self.name.clone(),
            suggestion: nearest(&self.name, STRATEGIES.iter().map(|entry| entry.name)),
        })
    }

    /// Whether there is such a strategy and it takes these parameters, which does not depend on the device.
    pub fn check(&self) -> Result<(), SpecError> {
        let props = DeviceProps {
            name: String::new(),
            ordinal: 0,
            total_bytes: 80 * GIB,
            page_bytes: 2 * MIB,
            granularity_bytes: 2 * MIB,
            context_bytes: 0,
            capabilities: Capabilities::NONE,
            clock: Clock::Virtual,
        };
        self.build(&Setup { props: &props, limit: None }).map(|_| ())
    }

    /// Makes the strategy.
    pub fn build(&self, setup: &Setup<'_>) -> Built {
        (self.entry()?.build)(&self.parameters, setup)
    }
}

/// Syntax only: whether there is such a strategy is [`StrategySpec::entry`]'s to say.
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
