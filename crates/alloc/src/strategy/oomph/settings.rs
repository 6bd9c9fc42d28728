//! What can be set: how memory is weighed against driver calls.

use super::shelves::QUANTUM;
use crate::strategy::{Parameter, parameters::Setting};
use oomph_base::{GIB, KIB, MIB, round_up};

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

const SMALL: &str = "small_limit";
const SLAB: &str = "slab";
const SMALLEST_CHUNK: &str = "smallest_chunk";
const LARGEST_CHUNK: &str = "largest_chunk";
const STEP: &str = "growth_step";
const SLACK: &str = "slack_permille";
const AN_AMOUNT: &str = "an amount of memory, up to 1TiB";

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter { name: SMALL, values: AN_AMOUNT, default: "256KiB", help: "requests up to this are cut from slabs" },
    Parameter { name: SLAB, values: AN_AMOUNT, default: "2MiB", help: "size of a slab" },
    Parameter {
        name: SMALLEST_CHUNK,
        values: AN_AMOUNT,
        default: "40MiB",
        help: "physical memory is made, and moved, in chunks of at least this: small ones save memory and cost driver calls",
    },
    Parameter { name: LARGEST_CHUNK, values: AN_AMOUNT, default: "40MiB", help: "and of at most this" },
    Parameter { name: STEP, values: AN_AMOUNT, default: "20MiB", help: "reserved memory grows by at least this" },
    Parameter {
        name: SLACK,
        values: "0 to 1000000",
        default: "10",
        help: "share of the highest live amount by which reserved memory may exceed it before chunks are moved",
    },
];

/// No amount may be larger.
const MOST: u64 = 1024 * GIB;

impl Settings {
    /// Takes over one setting.
    pub(super) fn apply(&mut self, setting: &Setting<'_>) -> Result<(), String> {
        let amount = match setting.key {
            SMALL => &mut self.small_limit,
            SLAB => &mut self.slab_bytes,
            SMALLEST_CHUNK => &mut self.smallest_chunk,
            LARGEST_CHUNK => &mut self.largest_chunk,
            STEP => &mut self.growth_step,
            _ => {
                let permille = setting.number()?;
                if permille > 1_000_000 {
                    return Err(setting.refused("more than 1000000"));
                }
                self.slack_permille = permille;
                return Ok(());
            }
        };
        *amount = setting.bytes()?;
        if !(QUANTUM..=MOST).contains(amount) || !amount.is_multiple_of(QUANTUM) {
            return Err(setting.refused(&format!("not a multiple of {QUANTUM} bytes between that and 1TiB")));
        }
        Ok(())
    }

    /// Whether the settings go together.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.slab_bytes < self.small_limit {
            return Err(format!("'{SLAB}' is less than '{SMALL}': a slab has no room for a small block"));
        }
        if self.largest_chunk < self.smallest_chunk {
            return Err(format!("'{LARGEST_CHUNK}' is less than '{SMALLEST_CHUNK}'"));
        }
        Ok(())
    }

    /// How large the chunks of a growth are, in whole pages.
    pub(super) fn chunk_for(&self, growth: u64, page: u64) -> u64 {
        round_up((growth / 16).clamp(self.smallest_chunk, self.largest_chunk), page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::StrategySpec;

    #[test]
    fn settings_are_refused_in_words() {
        let refused = |parameters: &str| {
            let spec = StrategySpec { name: "oomph".to_owned(), parameters: parameters.to_owned() };
            spec.check().map_err(|error| error.to_string()).unwrap_err()
        };
        for (text, reason) in [
            ("slab", "not of the form key:value"),
            ("grow_step:2MiB", "did you mean 'growth_step'"),
            ("growth_step:two", "not an amount of memory"),
            ("growth_step:0", "not a multiple of 512"),
            ("smallest_chunk:1000", "not a multiple of 512"),
            ("slack_permille:2000000", "more than 1000000"),
            ("slab:100KiB", "no room for a small block"),
            ("largest_chunk:2MiB", "less than 'smallest_chunk'"),
        ] {
            let refusal = refused(text);
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
