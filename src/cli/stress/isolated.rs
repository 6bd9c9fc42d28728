//! The same command once more, in a process of its own: what a plugin does to it is then seen from outside.

use std::{env, process::Command};

#[cfg(unix)]
use crate::cli::plugin_host;
use crate::{
    base::exit_description,
    cli::{
        exit,
        failure::{Failure, Outcome},
        options::DeviceOptions,
        output,
    },
    plugin,
    strategy::StrategySpec,
};

/// The option that tells the second process that it is the second.
pub const OPTION: &str = "in-this-process";

/// Whether one of the strategies might take this process down: plugins are served by other processes on the simulated
/// device, and on a real one cannot be.
pub fn is_needed(strategies: &[String], device: &str) -> Result<bool, Failure> {
    if !strategies.iter().any(|strategy| plugin::is_meant(&StrategySpec::from(strategy.as_str()))) {
        return Ok(false);
    }
    let device = DeviceOptions { device: device.to_owned(), limit: None }.spec()?;
    #[cfg(unix)]
    if device.is_simulated() {
        plugin_host::offer()?;
        return Ok(false);
    }
    Ok(true)
}

/// Runs it and passes its exit code on. An end that nobody asked for is a broken promise.
pub fn run_again() -> Outcome {
    // Ctrl-C reaches both processes; the second ends in order, and this one has its outcome to tell.
    ctrlc::set_handler(|| {})?;
    let program = env::current_exe().map_err(Failure::usage)?;
    let status = Command::new(program).args(env::args_os().skip(1)).arg(format!("--{OPTION}")).status()?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(code),
        None => {
            output::complain(&format!("failed: a plugin took its process down, which {}", exit_description(status)));
            Ok(exit::STRESS_FAILED)
        }
    }
}
