//! The registry of strategies, and building a strategy by its name.

use super::{
    Built, Setup, SpecError, StrategyEntry, StrategySpec, async_pool, bfc, buddy, caching, cub, direct, null, oomph,
    planned, rmm, slab, stitch, tlsf, wrap,
};
use crate::device::{Capabilities, DeviceClock, DeviceProps};
use oomph_base::{GIB, MIB, did_you_mean_among, nearest};
use oomph_pytorch::{AllocatorSettings, Release};

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

/// How `caching` names its release.
const RELEASE: &str = "release:";

fn is_release(part: &str) -> bool {
    part.trim().starts_with(RELEASE)
}

impl StrategySpec {
    /// The registry's entry for this name.
    pub fn entry(&self) -> Result<&'static StrategyEntry, SpecError> {
        let names = || STRATEGIES.iter().map(|entry| entry.name);
        STRATEGIES.iter().find(|entry| entry.name == self.name).ok_or_else(|| SpecError::UnknownStrategy {
            name: self.name.clone(),
            hint: did_you_mean_among(nearest(&self.name, names()).as_deref(), names()),
        })
    }

    /// Whether it is the model of PyTorch's allocator.
    #[must_use]
    pub fn is_pytorch_model(&self) -> bool {
        self.name == caching::ENTRY.name
    }

    /// Whether it takes a fixed part of the device or of its limit at the first request. What it reserves then says nothing
    /// about the program.
    ///
    /// ```
    /// use oomph_alloc::strategy::StrategySpec;
    /// let is_fixed = |text: &str| StrategySpec::from(text).takes_fixed_part();
    /// assert!(is_fixed("arena") && is_fixed("bfc") && is_fixed("pool:initial:50%") && is_fixed("address:arena"));
    /// assert!(!is_fixed("caching") && !is_fixed("bfc:allow_growth:True") && !is_fixed("pool:initial:4MiB"));
    /// ```
    #[must_use]
    pub fn takes_fixed_part(&self) -> bool {
        let is_share = |part: &str| part.trim().starts_with("initial:") && part.trim().ends_with('%');
        match &*self.name {
            name if name == wrap::addressed::ENTRY.name => {
                StrategySpec::from(self.parameters.as_str()).takes_fixed_part()
            }
            name if name == rmm::arena::ENTRY.name => true,
            name if name == bfc::ENTRY.name => !self.parts().any(|part| part.trim() == "allow_growth:True"),
            _ => self.parts().any(is_share),
        }
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

    /// The release of PyTorch whose allocator this is. `None` for strategies that do not model
    /// PyTorch's allocator, and for parameters that are not valid.
    ///
    /// ```
    /// use oomph_alloc::strategy::StrategySpec;
    /// let release = |text: &str| StrategySpec::from(text).release().map(|release| release.to_string());
    /// assert_eq!(release("caching:release:2.13").as_deref(), Some("2.13"));
    /// assert_eq!(release("address:caching").as_deref(), Some("2.11"));
    /// assert_eq!(release("direct"), None);
    /// ```
    #[must_use]
    pub fn release(&self) -> Option<Release> {
        let caching = self.pytorch_allocator()?;
        Some(AllocatorSettings::with_release(&caching.parameters).ok()?.release)
    }

    /// Whether it names its release.
    #[must_use]
    pub fn names_release(&self) -> bool {
        self.pytorch_allocator().is_some_and(|caching| caching.parts().any(is_release))
    }

    /// The strategy with the rules of a release of PyTorch, if it is PyTorch's allocator and names no release itself.
    ///
    /// ```
    /// use oomph_alloc::strategy::StrategySpec;
    /// use oomph_pytorch::Release;
    /// let of = |text: &str| StrategySpec::from(text).of_release(Release::new(13)).to_string();
    /// assert_eq!(of("caching:expandable_segments:True"), "caching:release:2.13,expandable_segments:True");
    /// assert_eq!(of("caching:release:2.4"), "caching:release:2.4");
    /// assert_eq!(of("direct"), "direct");
    /// ```
    #[must_use]
    pub fn of_release(self, release: Release) -> StrategySpec {
        if self.names_release() { self } else { self.at_release(release) }
    }

    /// The same strategy as of another release, if it models PyTorch's allocator.
    #[must_use]
    pub fn at_release(&self, release: Release) -> StrategySpec {
        let Some(caching) = self.pytorch_allocator() else { return self.clone() };
        // The default is not named, so that its name stays short.
        let named = (release != Release::DEFAULT).then(|| format!("{RELEASE}{release}"));
        let others = caching.parts().filter(|part| !is_release(part)).map(str::to_owned);
        let parameters = named.into_iter().chain(others).collect::<Vec<String>>().join(",");
        let caching = StrategySpec { parameters, ..caching };
        match self.name == caching.name {
            true => caching,
            false => StrategySpec { name: self.name.clone(), parameters: caching.to_string() },
        }
    }

    /// The model of PyTorch's allocator that it is or wraps.
    fn pytorch_allocator(&self) -> Option<StrategySpec> {
        if self.name == wrap::addressed::ENTRY.name {
            return StrategySpec::from(self.parameters.as_str()).pytorch_allocator();
        }
        (self.name == caching::ENTRY.name).then(|| self.clone())
    }

    fn parts(&self) -> impl Iterator<Item = &str> {
        self.parameters.split(',').filter(|part| !part.is_empty())
    }

    /// Builds the strategy.
    pub fn build(&self, setup: &Setup<'_>) -> Built {
        (self.entry()?.build)(&self.parameters, setup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_replaced_and_the_default_is_not_named() {
        let at = |text: &str, minor| StrategySpec::from(text).at_release(Release::new(minor)).to_string();
        assert_eq!(at("caching", 13), "caching:release:2.13");
        assert_eq!(at("caching:release:2.13", 11), "caching");
        let list = "roundup_power2_divisions:[256:1,>:8]";
        assert_eq!(at(&format!("caching:release:2.4,{list}"), 5), format!("caching:release:2.5,{list}"));
        assert_eq!(at(&format!("caching:{list},release:2.4"), 11), format!("caching:{list}"));
        assert_eq!(at("address:caching:max_split_size_mb:64", 15), "address:caching:release:2.15,max_split_size_mb:64");
        assert_eq!(at("direct", 15), "direct");
        assert!(StrategySpec::from("address:caching:release:2.11").names_release());
        assert!(!StrategySpec::from("caching:expandable_segments:True").names_release());
    }

    #[test]
    fn setting_of_a_later_release_is_refused_with_its_first_release() {
        let refused =
            StrategySpec::from("caching:release:2.4,large_segment_size_mb:32").check().unwrap_err().to_string();
        assert_eq!(
            refused,
            "strategy 'caching': PyTorch 2.4 has no setting 'large_segment_size_mb': it exists since 2.11"
        );
        let unknown = StrategySpec::from("caching:release:2.99").check().unwrap_err().to_string();
        assert!(unknown.contains("'2.99' is not a known release of PyTorch; write 2.0 to 2.15"), "{unknown}");
    }
}
