//! The straight line through a series, and how sure its slope is.
//!
//! Ordinary least squares over equally spaced points, with a Student-t interval. Levels of memory are no independent
//! samples: a tooth of a saw lasts several steps. The lag-1 autocorrelation of the residuals therefore says how many
//! independent points the series is worth, and error and degrees of freedom are those of that many points.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

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
mod tests {
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
