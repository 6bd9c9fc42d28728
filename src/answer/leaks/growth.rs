//! Whether a series of levels grows, and continues to grow.
//!
//! A line is fitted by ordinary least squares over equally spaced points, with a Student-t interval. Levels of memory
//! are not independent samples: one tooth of a saw lasts several steps. The lag-1 autocorrelation of the residuals
//! therefore says how many independent points the series is worth; error and degrees of freedom are those of that many.
//!
//! A significant slope is not yet a warning. The growth must be large enough ([`GrowthThreshold`]), the low points must rise with it
//! (a saw-tooth comes back down), and it must not have ended: start-up, a first validation or a cache that is now full
//! are steps to another steady level. Growth that began late is judged from where it began.
//!
//! A slope that is not significant is not yet steadiness. The interval must exclude growth that matters, or memory must
//! have come back to its earlier low level. Otherwise the series is [`CourseKind::Unclear`].

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::base::MIB;

/// From when on a slope counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GrowthThreshold {
    /// The slope's p-value must be below this.
    pub significance: f64,
    /// All growth together must be at least this share of the level.
    pub least_share: f64,
    /// All growth together must be at least this much.
    pub least_bytes: u64,
}

impl Default for GrowthThreshold {
    fn default() -> GrowthThreshold {
        GrowthThreshold { significance: 0.005, least_share: 0.01, least_bytes: 2 * MIB }
    }
}

impl GrowthThreshold {
    /// The least growth of a series with this level that counts.
    #[must_use]
    pub fn least(&self, level: f64) -> f64 {
        (level * self.least_share).max(self.least_bytes as f64)
    }
}

/// What a series does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeriesCourse {
    /// The line through the stretch that was judged.
    pub trend: Trend,
    /// Where that stretch begins: growth may have begun late.
    pub first: usize,
    /// The judgement.
    pub kind: CourseKind,
}

/// What a series does, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CourseKind {
    /// It grows and continues to grow.
    Growing,
    /// No slope that chance does not explain.
    Level,
    /// It falls.
    Falling,
    /// There is a slope, and it is too small to matter.
    Negligible,
    /// It grew, and has ended growing.
    Saturated,
    /// It rises and comes back down.
    SawTooth,
    /// It may be level and may grow.
    Unclear,
}

/// The second half may be this much less steep than the whole before growth has ended; the first half, before growth
/// has begun late.
const LEAST_SHARE_OF_SLOPE: f64 = 0.5;
/// Low points must rise by this share of what the slope says.
const LEAST_SHARE_OF_FLOOR: f64 = 0.25;
/// A series is level if its interval excludes growth by this share of the level.
const LEAST_SHARE_NOT_EXCLUDED: f64 = 0.02;
/// A slope below this p-value is not taken for chance, even if it is not significant.
const LEAST_P_OF_CHANCE: f64 = 0.05;
/// Growth has stopped if the last steps rise by less than this share of what the slope says.
const LEAST_SHARE_AT_END: f64 = 0.1;
/// The last steps are one part in so many, and at least as many as a line needs.
const PARTS_PER_END: usize = 5;
/// One in this many points may lie below what counts as the low point.
const POINTS_PER_OUTLIER: usize = 8;

/// Judges a series of levels; `None` where there are too few. Growth must be worth something against `level`.
#[must_use]
pub fn course(series: &[f64], level: f64, bar: &GrowthThreshold) -> Option<SeriesCourse> {
    let least = bar.least(level);
    let mut first = 0;
    loop {
        let stretch = &series[first..];
        let trend = Trend::of(stretch)?;
        let judged = |kind| Some(SeriesCourse { trend, first, kind });
        let (early, late) = stretch.split_at(stretch.len() / 2);
        if trend.p_value >= bar.significance {
            // A bent series may have no significant line and still grow from the bend on; a saw does not rise above its
            // own teeth.
            if late.len() >= FEWEST_POINTS && lies_above(&late[late.len() / 2..], early) {
                first += early.len();
                continue;
            }
            let moved_up = first > 0 || lies_above(late, &early[..early.len().div_ceil(2)]);
            return judged(if !is_settled(stretch, &trend, level, least) {
                if has_settled_late(stretch, least) { CourseKind::Saturated } else { CourseKind::Unclear }
            } else if moved_up {
                CourseKind::Saturated
            } else {
                CourseKind::Level
            });
        }
        if trend.slope <= 0.0 {
            return judged(CourseKind::Falling);
        }
        let flat = |half: &[f64]| Trend::of(half).is_some_and(|half| half.high < LEAST_SHARE_OF_SLOPE * trend.slope);
        if flat(late) {
            return judged(CourseKind::Saturated);
        }
        if flat(early) && late.len() >= FEWEST_POINTS {
            first += early.len();
            continue;
        }
        if trend.growth() < least {
            return judged(CourseKind::Negligible);
        }
        if comes_back_down(stretch, &trend) {
            return judged(CourseKind::SawTooth);
        }
        return judged(match steps_since_stop(stretch, &trend) {
            None => CourseKind::Growing,
            Some(steps) if steps > FEWEST_POINTS => CourseKind::Saturated,
            Some(_) => CourseKind::Unclear,
        });
    }
}

/// Whether a series without a significant slope is known not to grow: memory comes back to its earlier low level, or the
/// interval excludes growth that matters.
fn is_settled(stretch: &[f64], trend: &Trend, level: f64, least: f64) -> bool {
    let third = (stretch.len() / 3).max(1);
    let end = (stretch.len() * 2 / 5).max(1);
    let (early, late) = (low_point(&stretch[..third]), low_point(&stretch[stretch.len() - end..]));
    // One point is no low level of several, so that it must come back exactly.
    let tolerance = if third > 1 { least } else { 0.0 };
    if late <= early + tolerance {
        return true;
    }
    excludes_growth(trend, level, least)
}

/// Whether the interval of a slope excludes growth that matters.
pub(super) fn excludes_growth(trend: &Trend, level: f64, least: f64) -> bool {
    let by_chance = trend.p_value >= LEAST_P_OF_CHANCE || trend.growth() < least;
    by_chance && trend.most_growth() < (level * LEAST_SHARE_NOT_EXCLUDED).max(least)
}

/// Whether the last points are level, whatever came before.
fn has_settled_late(stretch: &[f64], least: f64) -> bool {
    let from = stretch.len() / 2;
    (from..=stretch.len().saturating_sub(FEWEST_POINTS))
        .step_by((stretch.len() / PARTS_PER_END).max(1))
        .filter_map(|first| Trend::of(&stretch[first..]))
        .any(|late| late.most_growth() < least && late.low <= 0.0)
}

/// The number of last steps without growth, if no earlier steps of that number were without growth.
fn steps_since_stop(stretch: &[f64], trend: &Trend) -> Option<usize> {
    let steps = (stretch.len() / PARTS_PER_END).max(FEWEST_POINTS);
    let is_flat = |part: &[f64]| part[steps] - part[0] < LEAST_SHARE_AT_END * trend.slope * steps as f64;
    let mut parts = stretch.windows(steps + 1).rev();
    (parts.next().is_some_and(is_flat) && !parts.skip(steps - 1).any(is_flat)).then_some(steps)
}

/// Whether every level of `these` is above every level of `those`.
fn lies_above(these: &[f64], those: &[f64]) -> bool {
    let highest = those.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    these.iter().all(|&level| level > highest)
}

/// Whether the lowest levels of the last third are about as low as those of the first.
fn comes_back_down(stretch: &[f64], trend: &Trend) -> bool {
    let third = (stretch.len() / 3).max(1);
    let rise = low_point(&stretch[stretch.len() - third..]) - low_point(&stretch[..third]);
    let expected = trend.slope * (stretch.len() - third) as f64;
    rise < LEAST_SHARE_OF_FLOOR * expected
}

/// A low level, with few enough below it to be outliers.
fn low_point(levels: &[f64]) -> f64 {
    let mut sorted = levels.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[levels.len() / POINTS_PER_OUTLIER]
}

/// How much of the time an interval holds the true slope.
pub const CONFIDENCE: f64 = 0.95;
/// A line through fewer points says nothing about its own error.
pub const FEWEST_POINTS: usize = 3;

/// From this many points on the estimate of the autocorrelation is corrected for its bias, which is then small.
const ENOUGH_TO_CORRECT: usize = 20;
/// Beyond this a series is worth hardly a point.
const MOST_AUTOCORRELATION: f64 = 0.95;

/// A straight line through a series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trend {
    /// What a step adds.
    pub slope: f64,
    /// Lower end of the slope's [`CONFIDENCE`] interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// How probable a slope at least this steep, up or down, is in a series that does not grow.
    pub p_value: f64,
    /// Points in the series.
    pub points: usize,
    /// How many independent points it is worth.
    pub effective_points: f64,
    /// The line at the first point.
    pub start: f64,
    /// Error of the slope.
    pub standard_error: f64,
}

impl Trend {
    /// The line through `series`, or `None` where there are fewer than [`FEWEST_POINTS`].
    ///
    /// ```
    /// use oomph::answer::leaks::Trend;
    /// let trend = Trend::of(&[10.0, 12.0, 14.0, 16.0]).unwrap();
    /// assert_eq!((trend.slope, trend.p_value), (2.0, 0.0));
    /// assert!(Trend::of(&[1.0, 2.0]).is_none());
    /// ```
    #[must_use]
    pub fn of(series: &[f64]) -> Option<Trend> {
        if series.len() < FEWEST_POINTS {
            return None;
        }
        let points = series.len() as f64;
        let (middle, mean) = ((points - 1.0) / 2.0, series.iter().sum::<f64>() / points);
        let offsets = || (0..series.len()).map(|step| step as f64 - middle);
        let spread: f64 = offsets().map(|offset| offset * offset).sum();
        let slope = offsets().zip(series).map(|(offset, level)| offset * (level - mean)).sum::<f64>() / spread;
        let residuals: Vec<f64> = offsets().zip(series).map(|(offset, level)| level - mean - slope * offset).collect();
        let unexplained: f64 = residuals.iter().map(|residual| residual * residual).sum();
        let correlation = autocorrelation(&residuals, unexplained);
        let effective_points = points * (1.0 - correlation) / (1.0 + correlation);
        let freedom = (effective_points - 2.0).max(1.0);
        // What is left of a perfect line is rounding: a part in 10^12 of the levels.
        let rounding = series.iter().fold(0.0_f64, |most, level| most.max(level.abs())) * 1e-12;
        let unexplained = if unexplained <= points * rounding * rounding { 0.0 } else { unexplained };
        let slope = if slope.abs() <= rounding { 0.0 } else { slope };
        let standard_error = (unexplained / freedom / spread).sqrt();
        let (p_value, reach) = student(slope, standard_error, freedom);
        Some(Trend {
            slope,
            low: slope - reach,
            high: slope + reach,
            p_value,
            points: series.len(),
            effective_points,
            start: mean - slope * middle,
            standard_error,
        })
    }

    /// What the line adds from the first point to the last.
    #[must_use]
    pub fn growth(&self) -> f64 {
        self.slope * (self.points - 1) as f64
    }

    /// The upper end of the interval of what the line adds.
    #[must_use]
    pub fn most_growth(&self) -> f64 {
        self.high * (self.points - 1) as f64
    }

    /// The line at its last point.
    #[must_use]
    pub fn end(&self) -> f64 {
        self.start + self.growth()
    }

    /// This slope beyond that of another series, with the errors of both.
    #[must_use]
    pub fn beyond(&self, other: &Trend) -> Trend {
        let slope = self.slope - other.slope;
        let standard_error = self.standard_error.hypot(other.standard_error);
        let freedom = (self.effective_points + other.effective_points - 4.0).max(1.0);
        let (p_value, reach) = student(slope, standard_error, freedom);
        Trend { slope, low: slope - reach, high: slope + reach, p_value, standard_error, ..*self }
    }
}

/// The p-value of a slope, and how far its interval reaches to either side.
fn student(slope: f64, standard_error: f64, freedom: f64) -> (f64, f64) {
    if standard_error == 0.0 {
        return (if slope == 0.0 { 1.0 } else { 0.0 }, 0.0);
    }
    // Location 0, scale 1 and at least one degree of freedom are never refused.
    match StudentsT::new(0.0, 1.0, freedom) {
        Ok(student) => {
            let reach = student.inverse_cdf(0.5 + CONFIDENCE / 2.0) * standard_error;
            ((2.0 * student.sf((slope / standard_error).abs())).min(1.0), reach)
        }
        Err(_) => (1.0, f64::INFINITY),
    }
}

/// Lag-1 autocorrelation, as far as it takes independence away: a series that alternates is not worth more than its
/// points.
fn autocorrelation(residuals: &[f64], sum_of_squares: f64) -> f64 {
    if sum_of_squares == 0.0 {
        return 0.0;
    }
    let products: f64 = residuals.windows(2).map(|pair| pair[0] * pair[1]).sum();
    let seen = products / sum_of_squares;
    let points = residuals.len() as f64;
    // Around a fitted line neighbours look less alike than they are, on average by (2 + 4 r) / n.
    let likely = if residuals.len() < ENOUGH_TO_CORRECT { seen } else { (seen + 2.0 / points) / (1.0 - 4.0 / points) };
    likely.clamp(0.0, MOST_AUTOCORRELATION)
}

#[cfg(test)]
mod growth_tests {
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::base::GIB;

    const LEVEL: f64 = 2.0 * GIB as f64;

    /// A normal deviate by Box and Muller.
    fn deviate(dice: &mut ChaCha8Rng) -> f64 {
        let (radius, angle): (f64, f64) = (dice.random(), dice.random());
        (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// Noise of 5 % of the level whose neighbours correlate by `memory`, around a line that gains `growth` of the level.
    fn noisy(seed: u64, epochs: usize, growth: f64, memory: f64) -> Vec<f64> {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut noise = deviate(&mut dice);
        (0..epochs)
            .map(|epoch| {
                noise = memory * noise + (1.0 - memory * memory).sqrt() * deviate(&mut dice);
                LEVEL * (1.0 + growth * epoch as f64 / epochs as f64 + 0.05 * noise)
            })
            .collect()
    }

    fn kind(series: &[f64]) -> CourseKind {
        course(series, LEVEL, &GrowthThreshold::default()).unwrap().kind
    }

    fn found(growth: f64, epochs: usize, memory: f64) -> usize {
        (0..1000).filter(|&seed| kind(&noisy(seed, epochs, growth, memory)) == CourseKind::Growing).count()
    }

    #[test]
    fn at_most_one_in_a_hundred_steady_runs_is_a_false_alarm() {
        for (epochs, memory) in [(100, 0.0), (100, 0.5), (20, 0.0), (400, 0.8)] {
            let alarms = found(0.0, epochs, memory);
            assert!(alarms <= 10, "{alarms} of 1000 with {epochs} epochs and a memory of {memory}");
        }
    }

    #[test]
    fn slow_growth_is_found_under_noise() {
        let seen = found(0.15, 100, 0.0);
        assert!(seen >= 980, "{seen} of 1000");
    }

    #[test]
    fn a_saw_that_ends_on_a_rise_does_not_grow() {
        for (length, teeth) in [(8, 24), (5, 24), (12, 60), (7, 13)] {
            for ends_at in 0..length {
                let saw: Vec<f64> =
                    (0..teeth + ends_at).map(|step| LEVEL + f64::from(step % length) * 64.0 * MIB as f64).collect();
                assert_ne!(kind(&saw), CourseKind::Growing, "teeth of {length}, {} steps", teeth + ends_at);
            }
        }
    }

    #[test]
    fn a_saw_on_a_slope_grows() {
        let saw: Vec<f64> =
            (0..60).map(|step| LEVEL + f64::from(step % 5) * 64.0 * MIB as f64 + f64::from(step) * 40e6).collect();
        assert_eq!(kind(&saw), CourseKind::Growing);
    }

    #[test]
    fn a_step_up_is_not_growth_wherever_it_comes() {
        for (seed, jump_at) in (0..200).zip((5..95).cycle()) {
            let mut series = noisy(seed, 100, 0.0, 0.0);
            series[jump_at..].iter_mut().for_each(|level| *level += LEVEL);
            assert_ne!(kind(&series), CourseKind::Growing, "seed {seed}, at {jump_at}");
        }
    }

    #[test]
    fn growth_that_begins_late_is_found_from_there_on() {
        let series: Vec<f64> = (0..60).map(|step| LEVEL + f64::from((step - 40_i32).max(0)) * 100e6).collect();
        let course = course(&series, LEVEL, &GrowthThreshold::default()).unwrap();
        assert_eq!(course.kind, CourseKind::Growing);
        assert!(course.first >= 30 && (course.trend.slope / 100e6 - 1.0).abs() < 0.35, "{course:?}");
    }

    #[test]
    fn growth_that_has_ended_and_growth_of_nothing_are_named() {
        let filled: Vec<f64> = (0..60).map(|step| LEVEL + f64::from(step.min(20)) * 100e6).collect();
        assert_eq!(kind(&filled), CourseKind::Saturated);
        let stepped: Vec<f64> = (0..12).map(|step| if step < 5 { LEVEL } else { 2.0 * LEVEL }).collect();
        assert_eq!(kind(&stepped), CourseKind::Saturated);
        let slight: Vec<f64> = (0..10).map(|step| LEVEL + f64::from(step) * 1e6).collect();
        assert_eq!(kind(&slight), CourseKind::Negligible);
        let falling: Vec<f64> = (0..10).map(|step| LEVEL - f64::from(step) * 1e8).collect();
        assert_eq!(kind(&falling), CourseKind::Falling);
    }

    proptest! {
        #[test]
        fn an_exact_line_is_found_from_three_points_on(points in 3_usize..200, share in 0.011..1.0_f64) {
            let line: Vec<f64> = (0..points).map(|at| LEVEL * (1.0 + share * at as f64 / (points - 1) as f64)).collect();
            prop_assert_eq!(kind(&line), CourseKind::Growing);
        }

        #[test]
        fn return_to_the_start_level_is_not_growth(tooth in 2_usize..12, after in 0_usize..3) {
            let line = (0..tooth).map(|step| LEVEL * (1.0 + step as f64));
            let series: Vec<f64> = line.chain((0..=after).map(|_| LEVEL)).collect();
            prop_assume!(series.len() >= 3);
            prop_assert_ne!(kind(&series), CourseKind::Growing);
        }
    }
}

#[cfg(test)]
mod trend_tests {
    use proptest::prelude::*;

    use super::*;

    /// By hand: five points, residuals -0.2, 0.4, -0.4, 0.4, -0.2, so s = sqrt(0.56 / 3), and t(0.975; 3) = 3.18245.
    #[test]
    fn the_interval_is_the_one_of_the_textbook() {
        let trend = Trend::of(&[0.8, 2.4, 2.6, 4.4, 4.8]).unwrap();
        let error = (0.56_f64 / 3.0 / 10.0).sqrt();
        assert!((trend.slope - 1.0).abs() < 1e-12, "{trend:?}");
        assert!((trend.standard_error - error).abs() < 1e-12, "{trend:?}");
        assert!((trend.high - (1.0 + 3.182_446 * error)).abs() < 1e-5, "{trend:?}");
        // R: 2 * pt(-7.319251, 3)
        assert!((trend.p_value - 0.005_271).abs() < 1e-4, "{trend:?}");
        assert_eq!(trend.effective_points, 5.0, "residuals that alternate take nothing away");
    }

    #[test]
    fn a_saw_is_worth_fewer_points_than_it_has() {
        let saw: Vec<f64> = (0..40).map(|step| f64::from(step % 8)).collect();
        let trend = Trend::of(&saw).unwrap();
        assert!(trend.effective_points < 25.0, "{trend:?}");
        assert!(trend.p_value > 0.05, "{trend:?}");
    }

    #[test]
    fn equal_slopes_leave_nothing_beyond_each_other() {
        let (this, other) = (Trend::of(&[1.0, 2.1, 2.9, 4.0]).unwrap(), Trend::of(&[5.0, 6.0, 7.1, 7.9]).unwrap());
        let difference = this.beyond(&other);
        assert!(difference.slope.abs() < 0.1 && difference.p_value > 0.3, "{difference:?}");
        let exact = Trend::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(exact.beyond(&exact).p_value, 1.0);
    }

    proptest! {
        /// Units and offsets change nothing about how sure a slope is.
        #[test]
        fn a_trend_scales_with_its_series(
            series in proptest::collection::vec(0.0..1e3_f64, 3..60),
            scale in 1e-3..1e9_f64,
            offset in -1e3..1e3_f64,
        ) {
            let (this, other) = (
                Trend::of(&series).unwrap(),
                Trend::of(&series.iter().map(|level| (level + offset) * scale).collect::<Vec<_>>()).unwrap(),
            );
            prop_assert!((this.slope * scale - other.slope).abs() <= 1e-6 * scale * (1.0 + this.slope.abs()));
            prop_assert!((this.p_value - other.p_value).abs() < 1e-6, "{this:?} {other:?}");
            prop_assert!(this.low <= this.slope && this.slope <= this.high);
            prop_assert!((0.0..=1.0).contains(&this.p_value));
        }
    }
}
