//! What can be set, in PyTorch's syntax.

use super::ENTRY;
use crate::{
    strategy::Parameter,
    unit::{KIB, MIB, did_you_mean, nearest, round_up},
};

/// How the allocator weighs memory against driver calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Rounded requests up to this are cut from slabs.
    pub small_limit: u64,
    /// Size of a slab.
    pub slab_bytes: u64,
    /// Growth is made of chunks a sixteenth of its size, but not below this.
    pub smallest_chunk: u64,
    /// Nor above this.
    pub largest_chunk: u64,
    /// Reserved memory grows by at least this.
    pub growth_step: u64,
    /// Growth that keeps reserved memory within so many thousandths of the highest live amount is not avoided by moving
    /// chunks, which would wait for the device.
    pub slack_permille: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            small_limit: 256 * KIB,
            slab_bytes: 2 * MIB,
            smallest_chunk: 40 * MIB,
            largest_chunk: 40 * MIB,
            growth_step: 20 * MIB,
            slack_permille: 10,
        }
    }
}

const SMALL: &str = "small_kib";
const SLAB: &str = "slab_kib";
const SMALLEST_CHUNK: &str = "smallest_chunk_mib";
const LARGEST_CHUNK: &str = "largest_chunk_mib";
const STEP: &str = "step_mib";
const SLACK: &str = "slack_permille";

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter { name: SMALL, values: "1 or more", default: "256", help: "requests up to this are cut from slabs" },
    Parameter { name: SLAB, values: "small_kib or more", default: "2048", help: "size of a slab" },
    Parameter {
        name: SMALLEST_CHUNK,
        values: "1 or more",
        default: "40",
        help: "physical memory is made, and moved, in chunks of at least this: small ones save memory and cost driver calls",
    },
    Parameter { name: LARGEST_CHUNK, values: "smallest_chunk_mib or more", default: "40", help: "and of at most this" },
    Parameter { name: STEP, values: "1 or more", default: "20", help: "reserved memory grows by at least this" },
    Parameter {
        name: SLACK,
        values: "0 or more",
        default: "10",
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
                SMALLEST_CHUNK => settings.smallest_chunk = amount(MIB).ok_or_else(refused)?,
                LARGEST_CHUNK => settings.largest_chunk = amount(MIB).ok_or_else(refused)?,
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
            return Err(format!("'{SLAB}' is less than '{SMALL}': a slab has no room for a small block"));
        }
        if settings.largest_chunk < settings.smallest_chunk {
            return Err(format!("'{LARGEST_CHUNK}' is less than '{SMALLEST_CHUNK}'"));
        }
        Ok(settings)
    }

    /// How large the chunks of a growth are, in whole pages.
    pub(super) fn chunk_for(&self, growth: u64, page: u64) -> u64 {
        round_up((growth / 16).clamp(self.smallest_chunk, self.largest_chunk), page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_refused_in_words() {
        let read = Settings::read("small_kib:64, smallest_chunk_mib:2,step_mib:8").unwrap();
        let expected =
            Settings { small_limit: 64 * KIB, smallest_chunk: 2 * MIB, growth_step: 8 * MIB, ..Settings::default() };
        assert_eq!(read, expected);
        for (text, reason) in [
            ("chunk", "not of the form key:value"),
            ("step_mb:2", "did you mean 'step_mib'"),
            ("step_mib:two", "not a whole number"),
            ("step_mib:0", "out of range"),
            ("slab_kib:100", "no room for a small block"),
            ("largest_chunk_mib:2", "less than 'smallest_chunk_mib'"),
        ] {
            let refusal = Settings::read(text).unwrap_err();
            assert!(refusal.contains(reason), "{refusal}");
        }
    }

    #[test]
    fn chunks_follow_the_growth_within_their_limits() {
        let settings = Settings { smallest_chunk: 2 * MIB, largest_chunk: 16 * MIB, ..Settings::default() };
        let chunk = |mib: u64| settings.chunk_for(mib * MIB, 2 * MIB) / MIB;
        assert_eq!([1, 33, 100, 1000].map(chunk), [2, 4, 8, 16]);
    }
}
