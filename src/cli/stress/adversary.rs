//! `oomph stress adversary`: who wastes how much at worst.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{common::owners_of_memory, evidence};
use crate::{
    base::{Bytes, GIB, parallel_map},
    cli::{
        exit,
        failure::{Failure, Outcome},
        interrupt,
        options::{DeviceOptions, Format},
        output, progress,
    },
    device::DeviceSpec,
    strategy::StrategySpec,
    stress::adversary::{AdversaryError, Assessment, Contender, Contest, EXHIBITS, MEMORY, assess},
    suite,
};

/// Makes up requests that hurt, within a budget of live memory: how much does each strategy take at worst?
///
/// Robson's adversary looks at the addresses it is given and frees just those blocks whose absence helps nobody. Whoever
/// never moves a block then needs M (log2(n) / 2 + 1) - n + 1 units for M units alive in blocks of 1 to n: theory's bound,
/// printed below the table. Moving pages beats it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph stress adversary                                          every strategy, 4 GiB alive
  oomph stress adversary --strategy caching --strategy 'pool:initial:{memory},maximum:{memory}'
  oomph stress adversary --live 64GiB --largest 8GiB --unit 64MiB --format csv
  oomph stress adversary --device cuda
  oomph stress adversary --strategy oomph --at-most 3             exit code 106 if it needs more

{memory} in a strategy's parameters stands for the memory that it is given: one region for everything.")]
pub struct Args {
    /// A strategy with its parameters; may be repeated [default: every strategy that owns memory, some on one region and
    /// some with smaller pages].
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    pub(super) strategy: Vec<String>,
    /// Where to run: `sim` (an H200), `sim:SIZE`, `sim:PROFILE`, `cuda[:N]` or `auto`.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    pub(super) device: String,
    /// Physical memory that a strategy may hold at most [default: as much as it takes; nine tenths of what is free on a
    /// real device].
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// What may be alive at any time.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(4 * GIB))]
    live: Bytes,
    /// The largest block: a power of two times the unit.
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    largest: Bytes,
    /// The smallest block.
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    unit: Bytes,
    /// Exit with 106 if a strategy needs more than this many times what is alive.
    #[arg(long, value_name = "RATIO")]
    at_most: Option<f64>,
    /// Save what the adversary did as traces in this folder.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: &Args) -> Outcome {
    let contest = Contest::new(args.live.0, args.largest.0, args.unit.0).map_err(Failure::usage)?;
    let contenders = args.contenders()?;
    let stop = interrupt::flag(interrupt::Running::Replay)?;
    let jobs = if contenders.iter().all(|contender| contender.device.is_simulated()) { suite::all_cores() } else { 1 };
    let bar = progress::of_cases(contenders.len(), 0);
    let assessed = parallel_map(&contenders, jobs, |contender| {
        bar.set_message(contender.strategy.to_string());
        let assessed = assess(&contest, contender, &stop);
        bar.inc(1);
        assessed
    });
    bar.finish_and_clear();
    let mut rows = Vec::new();
    let mut failed = false;
    for (contender, assessed) in contenders.iter().zip(assessed) {
        match assessed {
            Ok((row, trace)) => {
                if let (Some(folder), Some(trace)) = (&args.save, trace) {
                    evidence::save(&trace, folder, "robson", &row.strategy)?;
                }
                rows.push(row);
            }
            Err(AdversaryError::Interrupted) => {}
            Err(error) => {
                failed = true;
                output::complain(&format!("failed: {}: {error}", contender.strategy));
            }
        }
    }
    args.format.print(&rows)?;
    Ok(exit_code(&rows, args.at_most, failed, &stop))
}

fn exit_code(rows: &[Assessment], at_most: Option<f64>, failed: bool, stop: &AtomicBool) -> u8 {
    let too_much = |row: &&Assessment| match (row.needed_ratio, at_most) {
        (Some(ratio), Some(at_most)) => ratio > at_most,
        _ => false,
    };
    if rows.iter().any(|row| too_much(&row)) {
        return exit::STRESS_FAILED;
    }
    match (failed, stop.load(Ordering::Relaxed)) {
        (true, _) => exit::CASES_FAILED,
        (false, true) => exit::INTERRUPTED,
        (false, false) => exit::OK,
    }
}

impl Args {
    fn device(&self) -> Result<DeviceSpec, Failure> {
        DeviceOptions { device: self.device.clone(), limit: None }.spec()
    }

    fn contenders(&self) -> Result<Vec<Contender>, Failure> {
        let device = self.device()?;
        let texts: Vec<String> = if self.strategy.is_empty() {
            owners_of_memory().map(|entry| entry.name).chain(EXHIBITS).map(str::to_owned).collect()
        } else {
            self.strategy.clone()
        };
        texts
            .iter()
            .map(|text| {
                let strategy = StrategySpec::from(text.as_str());
                let contender =
                    Contender { strategy, device: device.clone(), memory_bytes: self.memory.map(|bytes| bytes.0) };
                // With some memory in place of the placeholder: whether the rest is right does not depend on how much.
                let settled = contender.with_memory(Some(self.live.0)).strategy;
                settled.check().map_err(|error| Failure::usage(anyhow!("{error} ({MEMORY} stands for the memory)")))?;
                Ok(contender)
            })
            .collect()
    }
}
