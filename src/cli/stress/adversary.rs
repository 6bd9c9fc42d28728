//! `oomph stress adversary`: the most memory that each strategy needs.

use std::path::PathBuf;

use anyhow::anyhow;

use super::common::{exit_code, save_trace, strategies_with_memory, test_targets};
use crate::{
    base::{Bytes, GIB, MemoryLimit},
    cli::{
        exit::{self, CommandError, CommandResult, StopPolicy},
        options::{DeviceChoice, Format},
        output,
    },
    strategy::StrategySpec,
    stress::{
        StressTarget,
        adversary::{AdversaryError, EXTRA_STRATEGIES, MEMORY_PLACEHOLDER, RobsonParameters, assess},
    },
};

/// Measures the worst case: how much memory does each strategy need within a budget of live memory?
///
/// Robson's adversary looks at the addresses of its blocks and frees exactly those whose memory
/// cannot be used again. An allocator that never moves a block then needs M (log2(n) / 2 + 1) - n +
/// 1 units for M live units in blocks of 1 to n: the theoretical bound, printed below the table.
/// Remapping pages beats it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress adversary                                          every strategy, 4 GiB live
  oomph stress adversary --strategy caching --strategy 'pool:initial:{memory},maximum:{memory}'
  oomph stress adversary --live 64GiB --largest 8GiB --unit 64MiB --format csv
  oomph stress adversary --device cuda
  oomph stress adversary --strategy oomph --at-most 3             exit code 106 if it needs more

{memory} in a strategy's parameters stands for the memory that it is given, as one region.")]
pub struct AdversaryArgs {
    /// A strategy with its parameters; may be repeated [default: every strategy that owns memory,
    /// some also on one region or with smaller pages].
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    pub(super) strategy: Vec<String>,
    #[command(flatten)]
    pub(super) device: DeviceChoice,
    /// What a strategy may take: a size such as 8GiB, or a fraction of the device such as 0.5 or 50% [default: as much
    /// as it takes; 90 % of the free memory on a real device].
    #[arg(long, value_name = "SIZE|FRACTION")]
    limit: Option<MemoryLimit>,
    /// The most live memory at any time.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(4 * GIB))]
    live: Bytes,
    /// The largest block: a power of two times the unit.
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    largest: Bytes,
    /// The smallest block.
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    unit: Bytes,
    /// Exit with 106 if a strategy needs more than this many times the live memory.
    #[arg(long, value_name = "RATIO")]
    at_most: Option<f64>,
    /// Save what the adversary did as traces in this folder.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// The output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl AdversaryArgs {
    pub(super) fn run(&self) -> CommandResult {
        let parameters =
            RobsonParameters::new(self.live.0, self.largest.0, self.unit.0).map_err(CommandError::usage)?;
        let targets = self.targets()?;
        let stop = exit::stop_flag(StopPolicy::AtOnce)?;
        let results = test_targets(&targets, |target| assess(&parameters, target, &stop));
        let mut rows = Vec::new();
        let mut errors = false;
        for (target, result) in targets.iter().zip(results) {
            match result {
                Ok((row, trace)) => {
                    if let (Some(folder), Some(trace)) = (&self.save, trace) {
                        save_trace(&trace, folder, "robson", &row.strategy)?;
                    }
                    rows.push(row);
                }
                Err(AdversaryError::Interrupted) => {}
                Err(error) => {
                    errors = true;
                    output::complain(&format!("failed: {}: {error}", target.strategy));
                }
            }
        }
        self.format.print(&rows)?;
        let too_much =
            rows.iter().any(|row| row.needed_ratio.zip(self.at_most).is_some_and(|(ratio, most)| ratio > most));
        Ok(if errors && !too_much { exit::CASES_FAILED } else { exit_code(too_much, &stop) })
    }

    fn targets(&self) -> Result<Vec<StressTarget>, CommandError> {
        let device = self.device.spec()?;
        let memory_bytes = self.limit.map(|limit| device.limit_bytes(limit)).transpose()?.flatten();
        let texts: Vec<String> = if self.strategy.is_empty() {
            strategies_with_memory().map(|entry| entry.name).chain(EXTRA_STRATEGIES).map(str::to_owned).collect()
        } else {
            self.strategy.clone()
        };
        texts
            .iter()
            .map(|text| {
                let strategy = StrategySpec::from(text.as_str());
                let target = StressTarget { strategy, device: device.clone(), memory_bytes, varies_memory: false };
                // Checked with some amount in place of the placeholder; the other parameters do not
                // depend on it.
                let checked = target.with_memory(Some(self.live.0)).strategy.check();
                checked.map_err(|error| {
                    CommandError::usage(anyhow!("{error} ({MEMORY_PLACEHOLDER} stands for the memory)"))
                })?;
                Ok(target)
            })
            .collect()
    }
}
