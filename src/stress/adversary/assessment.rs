//! How much memory Robson's adversary costs a strategy: taken when there is plenty, and needed at least.

use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::{AdversaryError, Bout, Contest, Ending, play};
use crate::{
    base::{Bytes, MIB, round_up},
    device::{DeviceSpec, default_limit},
    strategy::StrategySpec,
    stress::Subject,
    trace::Trace,
};

/// In the parameters of a strategy, stands for the memory it is given: `pool:initial:{memory},maximum:{memory}` is a
/// pool on one region that never grows.
pub const MEMORY: &str = "{memory}";

/// Settings that theory speaks of, beside the usual ones: everything on one region, and pages that move.
pub const EXHIBITS: [&str; 7] = [
    "pool:initial:{memory},maximum:{memory}",
    "bfc:allow_growth:False,memory_limit:{memory}",
    "arena:size:{memory}",
    "tlsf:region:{memory}",
    "caching:expandable_segments:True",
    "stitch:fragLimit:2MiB",
    "oomph:smallest_chunk:2MiB,largest_chunk:2MiB",
];

/// Regions need not be whole pages, but they take them.
const PAGE: u64 = 2 * MIB;
/// Next to nothing is lost where no more than this is needed for what is alive.
const NEARLY_ALL_USED: f64 = 1.1;
/// As near to the bound as this is at the bound.
const AT_THE_BOUND: f64 = 0.01;

/// Who is put to the test, and where.
#[derive(Clone, Debug)]
pub struct Contender {
    /// Who; [`MEMORY`] among its parameters stands for the memory of a bout.
    pub strategy: StrategySpec,
    /// Where. A simulated device is given as much memory as it takes.
    pub device: DeviceSpec,
    /// Physical bytes that it may hold at most; `None` for all that the device has.
    pub memory_bytes: Option<u64>,
}

impl Contender {
    /// Whether the strategy is told how much memory there is, and takes it at once.
    #[must_use]
    pub fn has_one_region(&self) -> bool {
        self.strategy.parameters.contains(MEMORY)
    }

    /// The contender with so much memory: a region of that size, or a device that holds no more.
    #[must_use]
    pub fn with_memory(&self, bytes: Option<u64>) -> Subject {
        let region = bytes.filter(|_| self.has_one_region());
        let parameters = match region {
            Some(bytes) => self.strategy.parameters.replace(MEMORY, &bytes.to_string()),
            None => self.strategy.parameters.clone(),
        };
        Subject {
            strategy: StrategySpec { name: self.strategy.name.clone(), parameters },
            device: self.device.clone(),
            // Devices count whole pages.
            memory_bytes: bytes.map(|bytes| round_up(bytes, PAGE)).or(self.memory_bytes),
        }
    }
}

/// What Robson's adversary did to a strategy: a row of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Assessment {
    /// Who, as users type it.
    pub strategy: String,
    /// Where.
    pub device: String,
    /// What was alive at most.
    pub live_bytes: u64,
    /// The largest block.
    pub largest_bytes: u64,
    /// The smallest block.
    pub unit_bytes: u64,
    /// What no allocator can do without that never moves a block.
    pub bound_bytes: u64,
    /// What the strategy reserved at most where there was plenty; a region of its own choice included.
    pub peak_reserved_bytes: Option<u64>,
    /// Up to where its blocks lay, where they lay on one line.
    pub extent_bytes: Option<u64>,
    /// The least memory in which it survived: of all that were tried, no less was enough.
    pub needed_bytes: Option<u64>,
    /// That, in terms of what was alive.
    pub needed_ratio: Option<f64>,
    /// The largest blocks that could have forced it there: free pieces above this size it gives back or moves. `None` at
    /// the bound, where there are no such pieces.
    pub fragmenting_bytes: Option<u64>,
    /// What to make of it.
    pub standing: Standing,
    /// How often the adversary was let loose on it.
    pub bouts: u32,
    /// Why there are no figures, where there are none.
    pub reason: String,
}

/// Where a strategy stands between what is alive and the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It needs about what is alive.
    NeedsWhatIsAlive,
    /// It needs less than the bound: what is free beside live blocks is given back or moved, if it is a large enough piece.
    BelowTheBound,
    /// It needs what theory says that an allocator needs which never moves a block.
    AtTheBound,
    /// It needs more than that.
    AboveTheBound,
    /// It ran out of all the memory there is.
    RunsOut,
    /// It does not serve such requests.
    Refuses,
    /// It cannot run on this device.
    #[default]
    Skipped,
}

impl Standing {
    fn of(needed: u64, contest: &Contest) -> Standing {
        let (needed, bound) = (needed as f64, contest.bound_bytes() as f64);
        if needed <= contest.live_bytes as f64 * NEARLY_ALL_USED {
            Standing::NeedsWhatIsAlive
        } else if needed < bound * (1.0 - AT_THE_BOUND) {
            Standing::BelowTheBound
        } else if needed <= bound * (1.0 + AT_THE_BOUND) {
            Standing::AtTheBound
        } else {
            Standing::AboveTheBound
        }
    }

    /// Whether free memory is of use although it lies between live blocks.
    #[must_use]
    pub const fn moves(self) -> bool {
        matches!(self, Standing::NeedsWhatIsAlive | Standing::BelowTheBound)
    }

    /// In words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Standing::NeedsWhatIsAlive => "needs what is alive",
            Standing::BelowTheBound => "below the bound",
            Standing::AtTheBound => "at the bound",
            Standing::AboveTheBound => "above the bound",
            Standing::RunsOut => "runs out",
            Standing::Refuses => "refuses",
            Standing::Skipped => "skipped",
        }
    }
}

impl Assessment {
    fn without_figures(contender: &Contender, contest: &Contest, standing: Standing, reason: String) -> Assessment {
        Assessment {
            strategy: contender.strategy.to_string(),
            device: contender.device.to_string(),
            live_bytes: contest.live_bytes,
            largest_bytes: contest.largest_bytes,
            unit_bytes: contest.unit_bytes,
            bound_bytes: contest.bound_bytes(),
            standing,
            reason,
            ..Assessment::default()
        }
    }
}

/// Plays the adversary against a contender that has plenty of memory, and then with less and less, until what suffices and
/// what does not are a page (with one region: a unit) apart. The trace is that of the first bout.
pub fn assess(
    contest: &Contest,
    contender: &Contender,
    stop: &AtomicBool,
) -> Result<(Assessment, Option<Trace>), AdversaryError> {
    let contender = &Contender { device: contender.device.with_room_for(2 * plenty(contest)), ..contender.clone() };
    let mut trials = Trials { contest, contender, stop, bouts: 0 };
    let (room, page) = room(contest, contender)?;
    let first = match trials.bout(room) {
        Ok(bout) => bout,
        Err(AdversaryError::Unable(missing)) => {
            let reason = missing.to_string();
            return Ok((Assessment::without_figures(contender, contest, Standing::Skipped, reason), None));
        }
        Err(error) => return Err(error),
    };
    let (standing, reason, needed) = match first.ending {
        Ending::Survived => {
            let needed = trials.least_memory(&first, room, page)?;
            (Standing::of(needed, contest), String::new(), Some(needed))
        }
        Ending::RanOut { live_bytes, asked_bytes } => {
            let reason = format!("no room for {} with {} alive", Bytes(asked_bytes), Bytes(live_bytes));
            (Standing::RunsOut, reason, None)
        }
        Ending::Refused { asked_bytes } => {
            (Standing::Refuses, format!("serves no requests of {}", Bytes(asked_bytes)), None)
        }
    };
    let assessment = Assessment {
        peak_reserved_bytes: Some(first.peak_reserved_bytes).filter(|_| needed.is_some()),
        extent_bytes: first.extent_bytes.filter(|_| needed.is_some()),
        needed_bytes: needed,
        needed_ratio: needed.map(|needed| needed as f64 / contest.live_bytes as f64),
        fragmenting_bytes: needed.filter(|_| standing.moves()).map(|needed| contest.fragmenting_bytes(needed)),
        bouts: trials.bouts,
        ..Assessment::without_figures(contender, contest, standing, reason)
    };
    Ok((assessment, Some(first.trace)))
}

/// Enough for whoever places blocks with any sense.
fn plenty(contest: &Contest) -> u64 {
    contest.bound_bytes() * 3 / 2
}

/// The memory of the first bout, and the step in which less is tried.
fn room(contest: &Contest, contender: &Contender) -> Result<(Option<u64>, u64), AdversaryError> {
    let device = contender.with_memory(None).open_device()?;
    let most = contender.memory_bytes.or_else(|| default_limit(&*device));
    if contender.has_one_region() {
        let region = plenty(contest).min(most.unwrap_or(u64::MAX));
        return Ok((Some(region / contest.unit_bytes * contest.unit_bytes), contest.unit_bytes));
    }
    Ok((most, device.props().page_bytes))
}

/// Bouts with different amounts of memory.
struct Trials<'a> {
    contest: &'a Contest,
    contender: &'a Contender,
    stop: &'a AtomicBool,
    bouts: u32,
}

impl Trials<'_> {
    fn bout(&mut self, memory: Option<u64>) -> Result<Bout, AdversaryError> {
        self.bouts += 1;
        play(self.contest, &self.contender.with_memory(memory), self.stop)
    }

    fn survives(&mut self, memory: u64) -> Result<bool, AdversaryError> {
        Ok(self.bout(Some(memory))?.ending == Ending::Survived)
    }

    /// Narrows down where survival begins, from what was taken when there was plenty.
    fn least_memory(&mut self, roomy: &Bout, room: Option<u64>, step: u64) -> Result<u64, AdversaryError> {
        let touched = match roomy.extent_bytes {
            Some(extent) if self.contender.has_one_region() => extent,
            _ => roomy.peak_held_bytes,
        };
        let (mut fails, mut enough) = (self.contest.live_bytes / step, touched.div_ceil(step));
        if self.survives(round_up(self.contest.live_bytes, step))? {
            return Ok(round_up(self.contest.live_bytes, step));
        }
        // Less memory may mean other decisions, and so what was touched may not do.
        if !self.survives(enough * step)? {
            (fails, enough) = (enough, room.unwrap_or(2 * touched).div_ceil(step));
        }
        while enough.saturating_sub(fails) > 1 {
            let middle = fails + (enough - fails) / 2;
            if self.survives(middle * step)? {
                enough = middle;
            } else {
                fails = middle;
            }
        }
        Ok(enough * step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        replay::{self, replay},
        strategy::Silent,
    };

    fn assessed(strategy: &str, contest: &Contest) -> Assessment {
        let strategy = StrategySpec::from(strategy);
        let contender = Contender { strategy, device: "sim".parse().unwrap(), memory_bytes: None };
        assess(contest, &contender, &AtomicBool::new(false)).unwrap().0
    }

    fn units(live: u64, largest: u64) -> Contest {
        Contest::new(live * PAGE, largest * PAGE, PAGE).unwrap()
    }

    /// The theorem's figures, from the strategies that it is about, and to the unit: so much and no unit less.
    #[test]
    fn on_one_region_pool_bfc_and_arena_need_exactly_the_bound() {
        for (live, largest, bound) in [(1024, 16, 3057), (4096, 64, 16321)] {
            for strategy in [
                "pool:initial:{memory},maximum:{memory}",
                "bfc:allow_growth:False,memory_limit:{memory}",
                "arena:size:{memory}",
            ] {
                let seen = assessed(strategy, &units(live, largest));
                assert_eq!(seen.extent_bytes, Some(bound * PAGE), "{strategy}");
                assert_eq!(
                    (seen.needed_bytes, seen.standing),
                    (Some(bound * PAGE), Standing::AtTheBound),
                    "{strategy}"
                );
            }
        }
    }

    #[test]
    fn the_unit_does_not_matter_where_blocks_are_not_rounded() {
        let contest = Contest::new(1024 * 512, 16 * 512, 512).unwrap();
        let seen = assessed("pool:initial:{memory},maximum:{memory}", &contest);
        assert_eq!(seen.needed_bytes, Some(3057 * 512));
    }

    #[test]
    fn buddies_reserve_a_whole_multiple_of_what_is_alive() {
        for (live, largest, times) in [(1024, 16, 3), (4096, 64, 4)] {
            let seen = assessed("buddy", &units(live, largest));
            assert_eq!(seen.peak_reserved_bytes, Some(times * live * PAGE));
        }
    }

    #[test]
    fn who_moves_every_page_needs_what_is_alive() {
        for strategy in ["direct", "stitch:fragLimit:2MiB", "planned", "oomph:smallest_chunk:2MiB,largest_chunk:2MiB"] {
            let seen = assessed(strategy, &units(512, 64));
            assert_eq!(seen.standing, Standing::NeedsWhatIsAlive, "{seen:?}");
            assert!(seen.needed_bytes.unwrap() <= 520 * PAGE, "{seen:?}");
        }
    }

    /// Expandable segments are mapped 20 MiB at a time, the driver's pool grows by 32: finer holes are as good as lost.
    #[test]
    fn who_moves_larger_pages_is_fragmented_by_smaller_blocks() {
        let contest = units(1024, 64);
        for (strategy, pieces) in [("caching:expandable_segments:True", 16 * MIB), ("async", 32 * MIB)] {
            let seen = assessed(strategy, &contest);
            assert_eq!(seen.standing, Standing::BelowTheBound, "{seen:?}");
            assert_eq!(seen.fragmenting_bytes, Some(pieces), "{seen:?}");
        }
    }

    #[test]
    fn what_cannot_be_served_or_does_not_fit_is_said() {
        let contest = units(64, 8);
        let refused = assessed("fixed", &contest);
        assert_eq!((refused.standing, refused.needed_bytes), (Standing::Refuses, None));
        assert_eq!(refused.reason, "serves no requests of 2.00 MiB");
        let contender = Contender {
            strategy: StrategySpec::from("tlsf"),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(100 * MIB),
        };
        let (short, trace) = assess(&contest, &contender, &AtomicBool::new(false)).unwrap();
        assert_eq!(
            (short.standing, short.reason.as_str()),
            (Standing::RunsOut, "no room for 2.00 MiB with 100 MiB alive")
        );
        assert_eq!(trace.unwrap().events.len(), 51);
        let stopped = assess(&contest, &contender, &AtomicBool::new(true));
        assert!(matches!(stopped, Err(AdversaryError::Interrupted)));
    }

    /// What the adversary did is a trace: replayed against the same strategy it takes the same.
    #[test]
    fn a_bout_can_be_replayed() {
        let (contest, strategy) = (units(256, 32), StrategySpec::from("caching"));
        let contender = Contender { strategy, device: "sim".parse().unwrap(), memory_bytes: None };
        let (seen, trace) = assess(&contest, &contender, &AtomicBool::new(false)).unwrap();
        let mut device = contender.device.open().unwrap();
        let mut strategy = contender.with_memory(None).build(device.props()).unwrap();
        replay(&trace.unwrap(), &mut *strategy, &mut *device, &replay::ReplayOptions::default(), &mut Silent).unwrap();
        let peak = strategy.stats().peak;
        assert_eq!(Some(peak.reserved), seen.peak_reserved_bytes);
        assert_eq!(peak.requested, contest.live_bytes);
    }
}
