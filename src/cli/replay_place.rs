//! Where a command replays a source for its own ends: the strategy, over a device that may be limited.

use super::{environment, failure::Failure, options::DeviceOptions, output};
use crate::{plugin, replay::Replay, strategy::StrategySpec, trace::Source};

/// A replay of `source` under a strategy, with the device and the limit that the options name.
pub fn replay<'a>(
    source: &'a dyn Source,
    options: &DeviceOptions,
    strategy: &StrategySpec,
) -> Result<Replay<'a>, Failure> {
    let limit = options.limit.map(|limit| limit.0);
    Ok(Replay::new(source).strategy(strategy.clone()).device(options.spec()?).limit(limit))
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
