//! Whether what steps keep grows: by the floor of memory, and by the blocks that steps leave behind.
//!
//! The floor at a step is the lowest level from this step on: what is never given back later. The rules, in this order:
//!
//! 1. A last rise that memory has made before, and has come down from, is a tooth. The floor is judged up to its foot.
//! 2. A floor that rises by less than matters is steady, except where too few steps rise all the time.
//! 3. A floor that rose is steady if it has been level for clearly longer than ever between two rises, and, where memory
//!    also falls, if it has come down to that level several times.
//! 4. A floor that still rises is a leak if it has risen often enough and the blocks of these steps are alive, those of
//!    the first one included; or, where each step replaces its blocks by larger ones, if many steps rise.
//! 5. Where memory also falls, it is steady if the interval of the slope excludes growth that matters, or if steps renew
//!    what they keep: the blocks of earlier steps have been freed.
//! 6. Everything else is open, with the reason.

use super::{
    Doubt, GrowthThreshold, StepUse,
    growth::{CourseKind, FEWEST_POINTS, SeriesCourse, Trend, excludes_growth},
};

/// What steps keep, judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeptCourse {
    pub(super) course: SeriesCourse,
    pub(super) doubt: Option<Doubt>,
    /// Memory rises over steps and falls again.
    pub(super) saw_tooth: bool,
}

/// A fall must be this share of a later rise before that rise counts as a tooth.
const LEAST_SHARE_OF_FALL: f64 = 0.75;
/// An earlier rise must be this share of a later one before the later one counts as a tooth.
const LEAST_SHARE_OF_EARLIER_RISE: f64 = 0.5;
/// The floor has stopped to rise if it is level for more than so many times the longest time between two rises.
const TIMES_LONGEST_GAP: f64 = 1.5;
/// One rise alone: memory must then be level for almost as long as before it, and for so many steps.
const LEVEL_STEPS_AFTER_ONE_RISE: usize = 8;
const LEAST_SHARE_OF_TIME_BEFORE: f64 = 0.8;
/// One rise at the beginning is start-up if memory is level for so many times as long after it.
const TIMES_START_UP: usize = 6;
/// So many rises show that memory continues to rise; more where they begin late.
const ENOUGH_RISES: usize = 3;
const ENOUGH_LATE_RISES: usize = 5;
/// With fewer rises the longest time between two says little, and the middle one is taken.
const ENOUGH_FOR_LONGEST_GAP: usize = 6;
/// The least share of what the middle step leaves behind with which a step leaves something behind.
const LEAST_SHARE_LEFT_BEHIND: f64 = 0.05;
/// Live blocks explain a rise of the floor from this share on.
const LEAST_SHARE_ALIVE: f64 = 0.5;
/// Where only the blocks of the last two steps are alive, memory must have fallen by this share of what it rises.
const LEAST_FALL_PER_RISE: f64 = 0.5;
/// Without blocks that stay alive, a rise is growth from this number of steps on.
const ENOUGH_WITHOUT_BLOCKS: usize = 16;

/// Judges what steps keep; `None` where there are too few.
pub(super) fn judge_kept(steps: &[StepUse], bar: &GrowthThreshold) -> Option<KeptCourse> {
    let levels: Vec<f64> = steps.iter().map(|step| step.kept_bytes as f64).collect();
    let whole = Trend::of(&levels)?;
    let level = levels.iter().sum::<f64>() / levels.len() as f64;
    let least = bar.least(level);
    let teeth = Teeth::of(&levels, least);
    let floor = Floor::of(&levels[..=teeth.foot], least);
    let judged = |kind, first: usize, end: usize| {
        let trend = Trend::of(&levels[first..=end]).map_or((whole, 0), |trend| (trend, first));
        let course = SeriesCourse { trend: trend.0, first: trend.1, kind };
        Some(KeptCourse { course, doubt: None, saw_tooth: teeth.comes_down })
    };
    let open = |doubt| {
        let course = SeriesCourse { trend: whole, first: 0, kind: CourseKind::Unclear };
        Some(KeptCourse { course, doubt: Some(doubt), saw_tooth: teeth.comes_down })
    };
    let last = levels.len() - 1;
    let falls = teeth.deepest_fall >= least;
    let every = every_step_leaves_blocks(steps);
    let Some(rises) = floor.rises.as_ref().filter(|_| floor.growth >= least) else {
        return match floor.growth {
            growth if growth >= least / 2.0 && every && !falls => open(Doubt::ShortRise),
            growth if growth > 0.0 && !falls && whole.slope > 0.0 => judged(CourseKind::Negligible, 0, last),
            _ if whole.high < 0.0 => judged(CourseKind::Falling, 0, last),
            _ => judged(if falls { CourseKind::SawTooth } else { CourseKind::Level }, 0, last),
        };
    };
    if rises.have_stopped() && (!falls || floor.visits_since(&levels, rises.last + 1, least) >= FEWEST_POINTS) {
        return judged(CourseKind::Saturated, rises.last + 1, teeth.foot);
    }
    let go_on = rises.go_on(every) && teeth.trough.is_none_or(|trough| rises.first < trough);
    let blocks = LivingBlocks::of(steps, &floor, rises, teeth.foot);
    if go_on && blocks.pile_up && (falls || blocks.first_is_alive) {
        return judged(CourseKind::Growing, rises.first, teeth.foot);
    }
    let enough = teeth.foot + 1 >= ENOUGH_WITHOUT_BLOCKS && whole.p_value < bar.significance && whole.growth() >= least;
    if go_on && !blocks.pile_up && !blocks.some_are_alive && !falls && enough {
        return judged(CourseKind::Growing, 0, teeth.foot);
    }
    let is_renewed = is_renewed(steps, teeth.deepest_fall / floor.growth, least);
    if falls && (excludes_growth(&whole, level, least) || is_renewed) {
        return judged(CourseKind::SawTooth, 0, last);
    }
    open(match () {
        () if go_on && blocks.pile_up => Doubt::BlocksFreed,
        () if !falls && rises.since > rises.middle_gap => Doubt::RecentStop,
        () => Doubt::ShortRise,
    })
}

/// Where memory falls.
struct Teeth {
    /// The last step to judge: the foot of the last tooth, or the last step.
    foot: usize,
    /// The step of the last low point that memory has fallen to.
    trough: Option<usize>,
    /// The deepest fall up to the foot.
    deepest_fall: f64,
    /// Whether memory has risen and then fallen.
    comes_down: bool,
}

impl Teeth {
    fn of(levels: &[f64], least: f64) -> Teeth {
        let last = levels.len() - 1;
        let floor = floor_of(levels);
        let trough = (1..last).rev().find(|&at| {
            let top = levels[..at].iter().rev().take_while(|&&level| level > levels[at]).copied().fold(0.0, f64::max);
            levels[at] == floor[at] && top - levels[at] >= least
        });
        let foot = trough.filter(|&at| {
            let (rise, before) = (levels[last] - levels[at], &levels[..at]);
            let fall = before.iter().copied().fold(0.0, f64::max) - levels[at];
            rise >= least
                && fall >= LEAST_SHARE_OF_FALL * rise
                && greatest_rise(before) >= LEAST_SHARE_OF_EARLIER_RISE * rise - least
        });
        let foot = foot.unwrap_or(last);
        let judged = &levels[..=foot];
        let (mut top, mut deepest_fall, mut comes_down) = (judged[0], 0.0_f64, false);
        for (at, &level) in judged.iter().enumerate() {
            top = top.max(level);
            deepest_fall = deepest_fall.max(top - level);
            comes_down |= top - level >= least && greatest_rise(&judged[..at]) >= least;
        }
        Teeth { foot, trough, deepest_fall, comes_down }
    }
}

/// The lowest level from each step on.
fn floor_of(levels: &[f64]) -> Vec<f64> {
    let mut floor = levels.to_vec();
    for at in (1..floor.len()).rev() {
        floor[at - 1] = floor[at - 1].min(floor[at]);
    }
    floor
}

fn greatest_rise(levels: &[f64]) -> f64 {
    let (mut lowest, mut greatest) = (f64::INFINITY, 0.0_f64);
    for &level in levels {
        lowest = lowest.min(level);
        greatest = greatest.max(level - lowest);
    }
    greatest
}

struct Floor {
    levels: Vec<f64>,
    growth: f64,
    rises: Option<Rises>,
}

/// The steps over which the floor rises. A slow rise counts each time it has added half of what matters.
struct Rises {
    first: usize,
    last: usize,
    count: usize,
    /// By how much the first one rises.
    first_bytes: f64,
    /// The longest time between two, in steps; where there is one, the time before it.
    longest_gap: usize,
    /// The middle one of these times.
    middle_gap: usize,
    /// The steps since the last.
    since: usize,
    /// The number of times that the floor may rise.
    most: usize,
}

impl Floor {
    fn of(levels: &[f64], least: f64) -> Floor {
        let levels = floor_of(levels);
        let last = levels.len() - 1;
        let (mut places, mut first_bytes, mut from) = (Vec::new(), 0.0, levels[0]);
        for at in 0..last {
            let rise = levels[at + 1] - from;
            if rise >= least / 2.0 {
                from = levels[at + 1];
                places.push(at);
                first_bytes = if places.len() == 1 { rise } else { first_bytes };
            }
        }
        let rises = places.first().zip(places.last()).map(|(&first, &end)| {
            let mut gaps: Vec<usize> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
            gaps.sort_unstable();
            Rises {
                first,
                last: end,
                count: places.len(),
                first_bytes,
                longest_gap: gaps.last().copied().unwrap_or(first + 1),
                middle_gap: gaps.get(gaps.len() / 2).copied().unwrap_or(first + 1),
                since: last - 1 - end,
                most: last,
            }
        });
        Floor { growth: levels[last] - levels[0], levels, rises }
    }

    /// In how many steps from `first` on memory is at the floor.
    fn visits_since(&self, levels: &[f64], first: usize, least: f64) -> usize {
        self.levels.iter().zip(levels).skip(first).filter(|(floor, level)| *level - *floor < least / 2.0).count()
    }
}

impl Rises {
    fn have_stopped(&self) -> bool {
        let (since, gap) = (self.since as f64, self.longest_gap as f64);
        if self.count > 1 {
            return self.since >= FEWEST_POINTS && since > TIMES_LONGEST_GAP * gap;
        }
        self.since >= TIMES_START_UP * self.longest_gap
            || self.since >= LEVEL_STEPS_AFTER_ONE_RISE && since >= LEAST_SHARE_OF_TIME_BEFORE * gap
    }

    fn go_on(&self, every_step_leaves_blocks: bool) -> bool {
        let gap = if self.count < ENOUGH_FOR_LONGEST_GAP { self.middle_gap } else { self.longest_gap };
        self.since <= gap
            && (self.count >= ENOUGH_RISES && 2 * self.first < self.most
                || self.count >= ENOUGH_LATE_RISES
                || self.count == self.most
                || self.count > 1 && every_step_leaves_blocks)
    }
}

/// The blocks of the steps over which the floor rises.
struct LivingBlocks {
    /// They explain the rise.
    pile_up: bool,
    /// Some of them are alive, not those of the last step counted.
    some_are_alive: bool,
    /// Those of the first rise are alive.
    first_is_alive: bool,
}

impl LivingBlocks {
    fn of(steps: &[StepUse], floor: &Floor, rises: &Rises, end: usize) -> LivingBlocks {
        let alive = |steps: &[StepUse]| steps.iter().map(|step| step.survived() as f64).sum::<f64>();
        let all = alive(&steps[rises.first..end]);
        let third = ((end - rises.first) / 3).max(1);
        let early = alive(&steps[rises.first..rises.first + third]);
        let rise = floor.growth - (floor.levels[rises.first] - floor.levels[0]);
        let explains = all >= LEAST_SHARE_ALIVE * rise;
        LivingBlocks {
            pile_up: explains && early >= LEAST_SHARE_LEFT_BEHIND * all,
            some_are_alive: explains,
            first_is_alive: alive(&steps[rises.first..=rises.first]) >= LEAST_SHARE_LEFT_BEHIND * rises.first_bytes,
        }
    }
}

/// What the middle one of all steps but the last leaves behind: bytes that are alive when the last step ends. What the
/// last step requested may be temporary.
pub(super) fn left_behind(steps: &[StepUse]) -> u64 {
    let mut left: Vec<u64> = steps[..steps.len().saturating_sub(1)].iter().map(StepUse::survived).collect();
    left.sort_unstable();
    left.get(left.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

/// Whether every step but the last leaves blocks behind that are alive at the end.
pub(super) fn every_step_leaves_blocks(steps: &[StepUse]) -> bool {
    let middle = left_behind(steps) as f64;
    let earlier = &steps[..steps.len().saturating_sub(1)];
    middle > 0.0 && earlier.iter().all(|step| step.survived() as f64 >= LEAST_SHARE_LEFT_BEHIND * middle)
}

/// Whether steps renew what they keep: memory falls about as far as it rises, and the blocks of all steps but the last two,
/// or of the first two thirds, have been freed.
fn is_renewed(steps: &[StepUse], fall_per_rise: f64, least: f64) -> bool {
    let freed_before = |end: usize| (steps[..end].iter().map(StepUse::survived).sum::<u64>() as f64) < least;
    steps.len() >= 2 * FEWEST_POINTS
        && (fall_per_rise >= LEAST_FALL_PER_RISE && freed_before(steps.len() - 2)
            || fall_per_rise >= 1.0 && freed_before(steps.len() * 2 / 3))
}
