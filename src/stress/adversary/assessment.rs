//! How much memory Robson's adversary costs a strategy: taken when there is plenty, and needed at least.

use std::sync::atomic::AtomicBool;

use serde::Serialize;

use super::{AdversaryError, Bout, Contest, Ending, play};
use crate::{
    device::{DeviceSpec, default_limit},
    strategy::StrategySpec,
    stress::Subject,
    unit::{Bytes, MIB, round_up},
};

/// In the parameters of a strategy, stands for the memory it is given: `pool:initial:{memory},maximum:{memory}` is a
/// pool on one region that never grows.
pub const MEMORY: &str = "{memory}";

/// Regions need not be whole pages, but they take them.
const PAGE: u64 = 2 * MIB;
/// Pages move where no more than this is needed for what is alive.
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

/// What Robson's adversary did to a strategy.
#[derive(Clone, Debug, Serialize)]
pub struct Assessment {
    /// Who, as users type it.
    pub strategy: String,
    /// Where.
    pub device: String,
    /// The rules.
    #[serde(flatten)]
    pub contest: Contest,
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
    /// What to make of it.
    pub verdict: Verdict,
    /// How often the adversary asked, freed and in how many bouts it did so.
    pub bouts: u32,
    /// Why there are no figures, where there are none.
    pub reason: String,
}

/// What to make of an assessment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It needs about what is alive.
    MovesPages,
    /// It needs less than an allocator that moves nothing.
    GivesBack,
    /// It needs what theory says that an allocator needs which never moves a block.
    AtTheBound,
    /// It needs more than that.
    AboveTheBound,
    /// It ran out of all the memory there is.
    RunsOut,
    /// It does not serve such requests.
    Refuses,
    /// It cannot run on this device.
    Skipped,
}

impl Verdict {
    fn of(needed: u64, contest: &Contest) -> Verdict {
        let (needed, bound) = (needed as f64, contest.bound_bytes() as f64);
        if needed <= contest.live_bytes as f64 * NEARLY_ALL_USED {
            Verdict::MovesPages
        } else if needed < bound * (1.0 - AT_THE_BOUND) {
            Verdict::GivesBack
        } else if needed <= bound * (1.0 + AT_THE_BOUND) {
            Verdict::AtTheBound
        } else {
            Verdict::AboveTheBound
        }
    }

    /// In words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Verdict::MovesPages => "moves pages",
            Verdict::GivesBack => "gives memory back",
            Verdict::AtTheBound => "at the bound",
            Verdict::AboveTheBound => "above the bound",
            Verdict::RunsOut => "runs out",
            Verdict::Refuses => "refuses",
            Verdict::Skipped => "skipped",
        }
    }
}

impl Assessment {
    fn without_figures(contender: &Contender, contest: &Contest, verdict: Verdict, reason: String) -> Assessment {
        Assessment {
            strategy: contender.strategy.to_string(),
            device: contender.device.to_string(),
            contest: *contest,
            bound_bytes: contest.bound_bytes(),
            peak_reserved_bytes: None,
            extent_bytes: None,
            needed_bytes: None,
            needed_ratio: None,
            verdict,
            bouts: 0,
            reason,
        }
    }
}

/// Plays the adversary against a contender that has plenty of memory, and then with less and less, until what suffices and
/// what does not are a page (with one region: a unit) apart. The trace is that of the first bout.
pub fn assess(
    contest: &Contest,
    contender: &Contender,
    stop: &AtomicBool,
) -> Result<(Assessment, Option<crate::trace::Trace>), AdversaryError> {
    let contender = &Contender { device: contender.device.with_room_for(2 * plenty(contest)), ..contender.clone() };
    let mut trials = Trials { contest, contender, stop, bouts: 0 };
    let (room, page) = room(contest, contender)?;
    let first = match trials.bout(room) {
        Ok(bout) => bout,
        Err(AdversaryError::Unable { missing }) => {
            let reason = format!("this device has no {missing}");
            return Ok((Assessment::without_figures(contender, contest, Verdict::Skipped, reason), None));
        }
        Err(error) => return Err(error),
    };
    let (verdict, reason, needed) = match first.ending {
        Ending::Survived => {
            let needed = trials.least_memory(&first, room, page)?;
            (Verdict::of(needed, contest), String::new(), Some(needed))
        }
        Ending::RanOut { live_bytes, asked_bytes } => {
            let reason = format!("no room for {} with {} alive", Bytes(asked_bytes), Bytes(live_bytes));
            (Verdict::RunsOut, reason, None)
        }
        Ending::Refused { asked_bytes } => {
            (Verdict::Refuses, format!("serves no requests of {}", Bytes(asked_bytes)), None)
        }
    };
    let assessment = Assessment {
        peak_reserved_bytes: Some(first.peak_reserved_bytes).filter(|_| needed.is_some()),
        extent_bytes: first.extent_bytes.filter(|_| needed.is_some()),
        needed_bytes: needed,
        needed_ratio: needed.map(|needed| needed as f64 / contest.live_bytes as f64),
        bouts: trials.bouts,
        ..Assessment::without_figures(contender, contest, verdict, reason)
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
    use crate::strategy::STRATEGIES;

    #[test]
    fn scratch() {
        let contest = Contest::default();
        let mut specs: Vec<String> = STRATEGIES.iter().filter(|e| e.name != "null" && e.name != "address").map(|e| e.name.to_owned()).collect();
        for s in ["caching:expandable_segments:True", "pool:initial:{memory},maximum:{memory}", "bfc:allow_growth:False,memory_limit:{memory}", "arena:size:{memory}", "tlsf:region:{memory}", "buddy:region:64GiB", "oomph:smallest_chunk:2MiB,largest_chunk:2MiB", "stitch:fragLimit:2MiB", "async:release_threshold:0"] { specs.push(s.to_owned()); }
        for text in specs {
            let t = std::time::Instant::now();
            let contender = Contender { strategy: StrategySpec::from(text.as_str()), device: "sim".parse().unwrap(), memory_bytes: None };
            match assess(&contest, &contender, &AtomicBool::new(false)) {
                Ok((a, trace)) => eprintln!("{text:50} reserved {:?} extent {:?} needed {:?} ratio {:?} {:?} bouts {} events {:?} {} {:?}", a.peak_reserved_bytes.map(|b| b as f64 / contest.live_bytes as f64), a.extent_bytes.map(|b| b as f64 / contest.live_bytes as f64), a.needed_bytes.map(Bytes), a.needed_ratio, a.verdict, a.bouts, trace.map(|t| t.events.len()), a.reason, t.elapsed()),
                Err(e) => eprintln!("{text}: {e}"),
            }
        }
    }
}
