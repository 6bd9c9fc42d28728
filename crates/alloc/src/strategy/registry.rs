//! The registry of strategies, and building a strategy by its name.

use super::{
    Built, Setup, SpecError, StrategyEntry, StrategySpec, async_pool, bfc, buddy, caching, cub, direct, null, oomph,
    planned, rmm, slab, stitch, tlsf, wrap,
};
use crate::device::{Capabilities, DeviceClock, DeviceProps};
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
    wrap::addressed::ENTRY,
];

impl StrategySpec {
    /// The registry's entry for this name.
    pub fn entry(&self) -> Result<&'static StrategyEntry, SpecError> {
        let names = || STRATEGIES.iter().map(|entry| entry.name);
        STRATEGIES.iter().find(|entry| entry.name == self.name).ok_or_else(|| SpecError::UnknownStrategy {
            name: self.name.clone(),
            hint: did_you_mean_among(nearest(&self.name, names()).as_deref(), names()),
        })
    }

    /// Whether there is such a strategy and it takes these parameters, which does not depend on the
    /// device.
    pub fn check(&self) -> Result<(), SpecError> {
        let props = DeviceProps {
            name: String::new(),
            ordinal: 0,
            total_bytes: 80 * GIB,
            page_bytes: 2 * MIB,
            granularity_bytes: 2 * MIB,
            context_bytes: 0,
            capabilities: Capabilities::NONE,
            clock: DeviceClock::Virtual,
        };
        self.build(&Setup { props: &props, limit: None }).map(|_| ())
    }

    /// Builds the strategy.
    pub fn build(&self, setup: &Setup<'_>) -> Built {
        (self.entry()?.build)(&self.parameters, setup)
    }
}
