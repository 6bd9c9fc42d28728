//! What was served, told when the program ends.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::Settings;
use oomph_alloc::strategy::Stats;
use oomph_base::Bytes;

/// What was served, on all GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// The form of this document.
    pub schema: u32,
    /// Who served.
    pub strategy: String,
    /// What might be held of each GPU.
    pub limit_bytes: Option<u64>,
    /// By number.
    pub devices: Vec<DeskStatistics>,
}

/// What was served on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeskStatistics {
    /// Its number in the program.
    pub device: i32,
    /// What it is called.
    pub name: String,
    /// How many streams the program asked on.
    pub streams: u64,
    /// Driver calls made for it.
    pub driver_calls: u64,
    /// The strategy's books.
    pub stats: Stats,
    /// Its own counters.
    pub details: BTreeMap<String, u64>,
}

impl Statistics {
    pub(super) fn of(settings: &Settings, devices: Vec<DeskStatistics>) -> Statistics {
        Statistics { schema: 1, strategy: settings.strategy.to_string(), limit_bytes: settings.limit, devices }
    }
}

impl fmt::Display for Statistics {
    /// A line for each GPU.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for DeskStatistics { device, name, stats, .. } in &self.devices {
            let [reserved, allocated] = [stats.peak.reserved, stats.peak.allocated].map(Bytes);
            writeln!(
                f,
                "oomph: {} on device {device} ({name}): peak reserved {reserved}, peak allocated {allocated}, \
                 {} allocs, {} frees, {} live, {} retries, {} out of memory",
                self.strategy, stats.allocs, stats.frees, stats.live_blocks, stats.retries, stats.ooms
            )?;
        }
        Ok(())
    }
}
