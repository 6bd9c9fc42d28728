//! Where a command replays a source for its own ends: the strategy, over a device that may be limited.

use super::{environment, failure::Failure, options::DeviceOptions, output};
use crate::{
    device::{Device, default_limit, wrap::capped},
    plugin,
    strategy::{Setup, Strategy, StrategySpec},
};

/// A fresh strategy and a fresh device.
pub struct ReplayPlace {
    pub strategy: Box<dyn Strategy>,
    pub device: Box<dyn Device>,
    /// How much of the device may be held, where that is limited.
    pub limit: Option<u64>,
}

impl ReplayPlace {
    /// Opens the device and makes the strategy.
    pub fn open(options: &DeviceOptions, strategy: &StrategySpec) -> Result<ReplayPlace, Failure> {
        let device = options.spec()?.open().map_err(Failure::device)?;
        let asked = options.limit.map(|limit| limit.0);
        let limit = asked.or_else(|| plugin::cap(strategy, default_limit(&*device)));
        let device = capped(device, plugin::cap(strategy, limit));
        let setup = Setup { props: device.props(), limit: asked };
        let strategy = plugin::build(strategy, &setup).map_err(Failure::usage)?;
        Ok(ReplayPlace { strategy, device, limit })
    }
}

/// The strategy that was asked for; without one PyTorch's allocator, as the recorded program had set it.
pub fn strategy_or_recorded(asked: Option<&str>, recorded: &str) -> Result<StrategySpec, Failure> {
    if let Some(text) = asked {
        let (spec, note) = environment::resolve_settings(StrategySpec::from(text));
        plugin::check(&spec).map_err(Failure::usage)?;
        note.iter().for_each(|note| output::complain(note));
        return Ok(spec);
    }
    let spec = StrategySpec { name: "caching".to_owned(), parameters: recorded.to_owned() };
    match spec.check() {
        Ok(()) => Ok(spec),
        Err(error) => {
            output::complain(&format!("note: PyTorch's default settings stand in for the recording's: {error}"));
            Ok(StrategySpec::from("caching"))
        }
    }
}
