//! What can be set, in PyTorch's syntax.

use super::ENTRY;
use crate::{
    strategy::Parameter,
    unit::{KIB, MIB, did_you_mean, nearest},
};

/// How the allocator weighs memory against driver calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Rounded requests up to this are cut from slabs.
    pub small_limit: u64,
    /// Size of a slab.
    pub slab_bytes: u64,
    /// No chunk of physical memory is made larger than this.
    pub largest_chunk: u64,
    /// Reserved memory grows by at least this.
    pub growth_step: u64,
    /// Growth that keeps reserved memory within so many thousandths of the highest live amount is not avoided by moving
    /// chunks.
    pub slack_permille: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            small_limit: 256 * KIB,
            slab_bytes: 2 * MIB,
            largest_chunk: 32 * MIB,
            growth_step: 8 * MIB,
            slack_permille: 0,
        }
    }
}

const SMALL: &str = "small_kib";
const SLAB: &str = "slab_kib";
const CHUNK: &str = "chunk_mib";
const STEP: &str = "step_mib";
const SLACK: &str = "slack_permille";

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter { name: SMALL, values: "1 or more", default: "256", help: "requests up to this are cut from slabs" },
    Parameter { name: SLAB, values: "a multiple of small_kib", default: "2048", help: "size of a slab" },
    Parameter {
        name: CHUNK,
        values: "2 or more",
        default: "32",
        help: "physical memory is made, and moved, in chunks of at most this",
    },
    Parameter { name: STEP, values: "2 or more", default: "8", help: "reserved memory grows by at least this" },
    Parameter {
        name: SLACK,
        values: "0 or more",
        default: "0",
        help: "share of the highest live amount by which reserved memory may exceed it before chunks are moved",
    },
];

impl Settings {
    /// Reads `key:value,key:value`.
    pub(super) fn read(text: &str) -> Result<Settings, String> {
        let mut settings = Settings::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once(':').ok_or_else(|| format!("'{part}' is not of the form key:value"))?;
            let number: u64 = value.trim().parse().map_err(|_| format!("'{key}': '{value}' is not a whole number"))?;
            let amount = |unit: u64| number.checked_mul(unit).filter(|&amount| amount > 0 && amount < 1 << 40);
            let refused = || format!("'{key}': {number} is out of range");
            match key.trim() {
                SMALL => settings.small_limit = amount(KIB).ok_or_else(refused)?,
                SLAB => settings.slab_bytes = amount(KIB).ok_or_else(refused)?,
                CHUNK => settings.largest_chunk = amount(MIB).ok_or_else(refused)?,
                STEP => settings.growth_step = amount(MIB).ok_or_else(refused)?,
                SLACK if number <= 1_000_000 => settings.slack_permille = number,
                SLACK => return Err(refused()),
                other => {
                    let known = ENTRY.parameters.iter().map(|parameter| parameter.name);
                    let meant = nearest(other, known);
                    return Err(format!("unknown parameter '{other}'{}", did_you_mean(meant.as_deref())));
                }
            }
        }
        if settings.slab_bytes < settings.small_limit {
            return Err(format!("a slab of {} bytes has no room for a small block", settings.slab_bytes));
        }
        Ok(settings)
    }
}
