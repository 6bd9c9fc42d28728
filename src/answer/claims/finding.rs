//! What a test of a claim finds, and the rule by which that becomes a verdict.

use std::{fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use crate::base::{Bytes, Nanos};

/// What is to be thought of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Everything that it says was seen.
    Confirmed,
    /// Some of it was seen and some not.
    Depends,
    /// Nothing of it was seen.
    Refuted,
    /// Nothing here can tell.
    #[default]
    NotMeasurable,
}

impl Verdict {
    /// The rule, the same for all claims: a claim is cut into things that can be checked. If all hold it is confirmed, if
    /// none does it is refuted, otherwise it depends. Where nothing can be checked nothing is said.
    #[must_use]
    pub fn of(checks: &[Check]) -> Verdict {
        match checks.iter().filter(|check| check.counts_as_held()).count() {
            _ if checks.is_empty() => Verdict::NotMeasurable,
            0 => Verdict::Refuted,
            holding if holding == checks.len() => Verdict::Confirmed,
            _ => Verdict::Depends,
        }
    }

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Confirmed => "confirmed",
            Verdict::Depends => "depends",
            Verdict::Refuted => "refuted",
            Verdict::NotMeasurable => "not measurable here",
        }
    }
}

/// A number with what it is a number of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// Of a hundred.
    Percent(f64),
    /// Memory.
    Size(u64),
    /// Memory that a step adds, or takes away.
    SizePerStep(f64),
    /// Time.
    Time(u64),
    /// So many times as much.
    Times(f64),
    /// How many.
    Count(u64),
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // What rounds to nothing is nothing, and not less than nothing.
            Amount::Percent(value) if value.abs() < 0.05 => f.write_str("0 %"),
            Amount::Percent(value) => write!(f, "{value:.1} %"),
            Amount::Size(bytes) => Bytes(bytes).fmt(f),
            Amount::SizePerStep(bytes) if bytes < 0.0 => write!(f, "-{} a step", Bytes(-bytes as u64)),
            Amount::SizePerStep(bytes) => write!(f, "{} a step", Bytes(bytes as u64)),
            Amount::Time(nanos) => Nanos(nanos).fmt(f),
            Amount::Times(value) => write!(f, "{value:.2}x"),
            Amount::Count(value) => value.fmt(f),
        }
    }
}

/// Something that was measured, and what real PyTorch showed where that is known.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What.
    pub what: String,
    /// As measured.
    pub here: Amount,
    /// PyTorch 2.11 on an H200.
    pub pytorch: Option<Amount>,
}

/// One of the things that a claim says, put so that it holds or does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What is checked.
    pub statement: String,
    /// Whether it was seen here.
    pub holds: bool,
    /// Whether it was seen in PyTorch, where that was measured.
    pub pytorch: Option<bool>,
}

impl Check {
    /// Whether it is taken to hold: claims are about PyTorch, so what was seen there counts for more.
    #[must_use]
    pub fn counts_as_held(&self) -> bool {
        self.pytorch.unwrap_or(self.holds)
    }

    /// Whether PyTorch was seen to do otherwise.
    #[must_use]
    pub fn differs_from_pytorch(&self) -> bool {
        self.pytorch.is_some_and(|there| there != self.holds)
    }
}

/// What a test of a claim found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    /// What was measured.
    pub figures: Vec<Figure>,
    /// What follows for the claim.
    pub checks: Vec<Check>,
    /// Why there is nothing to check, where there is nothing.
    pub reason: String,
}

impl Finding {
    /// Nothing here can tell, and why.
    pub(super) fn not_measurable(reason: &str) -> Finding {
        Finding { reason: reason.to_owned(), ..Finding::default() }
    }

    /// Adds a number.
    pub(super) fn figure(&mut self, what: impl Into<String>, here: Amount) {
        self.figures.push(Figure { what: what.into(), here, pytorch: None });
    }

    /// Adds a number that is known of PyTorch too.
    pub(super) fn beside(&mut self, what: impl Into<String>, here: Amount, pytorch: Amount) {
        self.figures.push(Figure { what: what.into(), here, pytorch: Some(pytorch) });
    }

    /// Adds a check.
    pub(super) fn check(&mut self, statement: impl Into<String>, holds: bool) {
        self.checks.push(Check { statement: statement.into(), holds, pytorch: None });
    }

    /// Adds a check that was made in PyTorch too.
    pub(super) fn check_beside(&mut self, statement: impl Into<String>, holds: bool, pytorch: bool) {
        self.checks.push(Check { statement: statement.into(), holds, pytorch: Some(pytorch) });
    }

    /// Checks that a number, and PyTorch's where it is known, lies in the published range, rounded as it is published: to
    /// whole numbers.
    pub(super) fn check_range(
        &mut self,
        what: &str,
        (value, pytorch): (f64, Option<f64>),
        range: RangeInclusive<f64>,
        unit: &str,
    ) {
        let statement = format!("{what} {} to {}{unit}", range.start(), range.end());
        let lies_within = |value: f64| range.contains(&value.round());
        self.checks.push(Check { statement, holds: lies_within(value), pytorch: pytorch.map(lies_within) });
    }

    /// What follows from the checks.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.checks)
    }
}

/// How much less than `base` something is, in percent; negative where it is more.
pub(super) fn reduction(base: u64, changed: u64) -> f64 {
    if base == 0 { 0.0 } else { 100.0 * (1.0 - changed as f64 / base as f64) }
}

/// How many times `base` something is; nothing is no multiple of nothing.
pub(super) fn ratio(base: u64, changed: u64) -> f64 {
    if base == 0 { 0.0 } else { changed as f64 / base as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(outcomes: &[bool]) -> Verdict {
        let mut finding = Finding::default();
        outcomes.iter().for_each(|holds| finding.check("it does", *holds));
        finding.verdict()
    }

    #[test]
    fn a_verdict_follows_from_what_holds_and_nothing_else() {
        assert_eq!(verdict(&[true, true]), Verdict::Confirmed);
        assert_eq!(verdict(&[false, true]), Verdict::Depends);
        assert_eq!(verdict(&[false, false]), Verdict::Refuted);
        assert_eq!(verdict(&[]), Verdict::NotMeasurable);
        assert_eq!(Finding::not_measurable("no model learns here").verdict(), Verdict::NotMeasurable);
    }

    #[test]
    fn what_pytorch_did_counts_for_more() {
        let mut finding = Finding::default();
        finding.check_range("slower by", (19.4, Some(20.3)), 20.0..=40.0, " %");
        assert_eq!((finding.verdict(), finding.checks[0].differs_from_pytorch()), (Verdict::Confirmed, true));
        finding.check_beside("it leaks", true, true);
        assert!(!finding.checks[1].differs_from_pytorch());
    }

    #[test]
    fn a_range_is_as_coarse_as_it_is_published() {
        let holds = |value| {
            let mut finding = Finding::default();
            finding.check_range("saves", (value, None), 20.0..=40.0, " %");
            assert_eq!(finding.checks[0].statement, "saves 20 to 40 %");
            finding.checks[0].holds
        };
        assert!(holds(19.6) && holds(40.4) && !holds(19.4) && !holds(41.0));
    }

    #[test]
    fn amounts_are_written_for_people() {
        for (amount, text) in [
            (Amount::Percent(-0.01), "0 %"),
            (Amount::Percent(37.42), "37.4 %"),
            (Amount::SizePerStep(1_331_871_744.0), "1.24 GiB a step"),
            (Amount::SizePerStep(-1024.0), "-1.00 KiB a step"),
            (Amount::Times(2.697), "2.70x"),
            (Amount::Count(3), "3"),
        ] {
            assert_eq!(amount.to_string(), text);
        }
        assert_eq!((reduction(200, 150), reduction(0, 5), ratio(2, 5)), (25.0, 0.0, 2.5));
    }
}
