//! What the test of a claim finds, the rule that turns it into a verdict, and the row of the table.

use std::{fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use super::{Claim, ClaimGroup};
use crate::{
    base::{Bytes, Nanos},
    measure::SCHEMA,
};

/// The verdict on a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimVerdict {
    /// Every part of it was observed.
    Confirmed,
    /// Some parts of it were observed.
    Depends,
    /// No part of it was observed.
    Refuted,
    /// It cannot be measured here.
    #[default]
    NotMeasurable,
}

impl ClaimVerdict {
    /// The rule for all claims. A claim is divided into checks. If all hold it is confirmed, if none holds it is refuted,
    /// otherwise it depends. Without checks it is not measurable.
    #[must_use]
    pub fn of(checks: &[ClaimCheck]) -> ClaimVerdict {
        match checks.iter().filter(|check| check.counts_as_held()).count() {
            _ if checks.is_empty() => ClaimVerdict::NotMeasurable,
            0 => ClaimVerdict::Refuted,
            holding if holding == checks.len() => ClaimVerdict::Confirmed,
            _ => ClaimVerdict::Depends,
        }
    }

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ClaimVerdict::Confirmed => "confirmed",
            ClaimVerdict::Depends => "depends",
            ClaimVerdict::Refuted => "refuted",
            ClaimVerdict::NotMeasurable => "not measurable here",
        }
    }
}

/// A number with its unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ClaimAmount {
    /// Percent.
    Percent(f64),
    /// Memory.
    Size(u64),
    /// Memory that a step adds, or frees where it is negative.
    SizePerStep(f64),
    /// Time.
    Time(u64),
    /// A ratio.
    Times(f64),
    /// A count.
    Count(u64),
}

impl fmt::Display for ClaimAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // A small negative value must not show as -0.0.
            ClaimAmount::Percent(value) if value.abs() < 0.05 => f.write_str("0 %"),
            ClaimAmount::Percent(value) => write!(f, "{value:.1} %"),
            ClaimAmount::Size(bytes) => Bytes(bytes).fmt(f),
            ClaimAmount::SizePerStep(bytes) if bytes < 0.0 => write!(f, "-{} per step", Bytes(-bytes as u64)),
            ClaimAmount::SizePerStep(bytes) => write!(f, "{} per step", Bytes(bytes as u64)),
            ClaimAmount::Time(nanos) => Nanos(nanos).fmt(f),
            ClaimAmount::Times(value) => write!(f, "{value:.2}x"),
            ClaimAmount::Count(value) => value.fmt(f),
        }
    }
}

/// A measured number, and PyTorch's where it is known.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimFigure {
    /// What was measured.
    pub what: String,
    /// The number measured here.
    pub here: ClaimAmount,
    /// PyTorch 2.11 on an H200.
    pub pytorch: Option<ClaimAmount>,
}

/// A part of a claim that holds or does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimCheck {
    /// What is checked.
    pub statement: String,
    /// Whether it was observed here.
    pub holds: bool,
    /// Whether it was observed in PyTorch, where that was measured.
    pub pytorch: Option<bool>,
}

impl ClaimCheck {
    /// Whether it holds. Claims are about PyTorch, so an observation there takes precedence.
    #[must_use]
    pub fn counts_as_held(&self) -> bool {
        self.pytorch.unwrap_or(self.holds)
    }

    /// Whether the observation in PyTorch differs from the one here.
    #[must_use]
    pub fn differs_from_pytorch(&self) -> bool {
        self.pytorch.is_some_and(|there| there != self.holds)
    }
}

/// What the test of a claim found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimFinding {
    /// The measured numbers.
    pub figures: Vec<ClaimFigure>,
    /// The parts of the claim.
    pub checks: Vec<ClaimCheck>,
    /// Why nothing can be checked, where there are no checks.
    pub reason: String,
}

impl ClaimFinding {
    /// Says why the claim cannot be measured here.
    pub(super) fn not_measurable(&mut self, reason: &str) {
        self.reason = reason.to_owned();
    }

    /// Adds a number.
    pub(super) fn figure(&mut self, what: impl Into<String>, here: ClaimAmount) {
        self.figures.push(ClaimFigure { what: what.into(), here, pytorch: None });
    }

    /// Adds a number that was measured in PyTorch, too.
    pub(super) fn beside(&mut self, what: impl Into<String>, here: ClaimAmount, pytorch: ClaimAmount) {
        self.figures.push(ClaimFigure { what: what.into(), here, pytorch: Some(pytorch) });
    }

    /// Adds a check.
    pub(super) fn check(&mut self, statement: impl Into<String>, holds: bool) {
        self.checks.push(ClaimCheck { statement: statement.into(), holds, pytorch: None });
    }

    /// Adds a check that was made in PyTorch, too.
    pub(super) fn check_beside(&mut self, statement: impl Into<String>, holds: bool, pytorch: bool) {
        self.checks.push(ClaimCheck { statement: statement.into(), holds, pytorch: Some(pytorch) });
    }

    /// Checks that a number, and PyTorch's where it is known, lies in the published range. Numbers are rounded to whole
    /// ones, like the published range.
    pub(super) fn check_range(
        &mut self,
        what: &str,
        (value, pytorch): (f64, Option<f64>),
        range: RangeInclusive<f64>,
        unit: &str,
    ) {
        let statement = format!("{what} {} to {}{unit}", range.start(), range.end());
        let lies_within = |value: f64| range.contains(&value.round());
        self.checks.push(ClaimCheck { statement, holds: lies_within(value), pytorch: pytorch.map(lies_within) });
    }

    /// The verdict that follows from the checks.
    #[must_use]
    pub fn verdict(&self) -> ClaimVerdict {
        ClaimVerdict::of(&self.checks)
    }
}

/// The reduction from `base` to `changed` in percent; negative where it is an increase.
pub(super) fn reduction(base: u64, changed: u64) -> f64 {
    if base == 0 { 0.0 } else { 100.0 * (1.0 - changed as f64 / base as f64) }
}

/// `changed` as a multiple of `base`; 0 where the base is 0.
pub(super) fn ratio(base: u64, changed: u64) -> f64 {
    if base == 0 { 0.0 } else { changed as f64 / base as f64 }
}

/// A claim and its verdict: a row of `claims.csv`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`Claim::id`].
    pub id: String,
    /// [`Claim::group`].
    pub group: ClaimGroup,
    /// [`Claim::statement`].
    pub claim: String,
    /// [`Claim::published`].
    pub published: String,
    /// The numbers of the simulated device.
    pub simulated: String,
    /// The real device on which the claim was tested, too.
    pub device: String,
    /// The numbers of the real device; empty without one.
    pub on_device: String,
    /// The numbers of PyTorch 2.11 on an H200, where they are known.
    pub pytorch: String,
    /// The verdict.
    pub verdict: ClaimVerdict,
    /// The parts of the claim that hold.
    pub holds: String,
    /// The parts of the claim that do not hold.
    pub fails: String,
    /// The parts in which PyTorch differs from the measurement here; PyTorch decides.
    pub differs_from_pytorch: String,
    /// What really happens, or why it cannot be measured here.
    pub lesson: String,
    /// The workload that shows it.
    pub command: String,
}

impl ClaimRecord {
    /// The row of a claim, from the simulated device and a real one. Where there is a real one, it decides.
    #[must_use]
    pub fn new(claim: &Claim, simulated: &ClaimFinding, real: Option<(&str, &ClaimFinding)>) -> ClaimRecord {
        let decisive = real.map_or(simulated, |(_, finding)| finding);
        let lesson = if decisive.reason.is_empty() { claim.lesson } else { &decisive.reason };
        ClaimRecord {
            schema: SCHEMA,
            id: claim.id.to_owned(),
            group: claim.group(),
            claim: claim.statement.to_owned(),
            published: claim.published.to_owned(),
            simulated: figures(simulated, |figure| Some(figure.here)),
            device: real.map_or("", |(device, _)| device).to_owned(),
            on_device: real.map_or_else(String::new, |(_, finding)| figures(finding, |figure| Some(figure.here))),
            pytorch: figures(simulated, |figure| figure.pytorch),
            verdict: decisive.verdict(),
            holds: statements(decisive, ClaimCheck::counts_as_held),
            fails: statements(decisive, |check| !check.counts_as_held()),
            differs_from_pytorch: statements(decisive, ClaimCheck::differs_from_pytorch),
            lesson: lesson.to_owned(),
            command: claim.command.to_owned(),
        }
    }
}

fn figures(finding: &ClaimFinding, of: impl Fn(&ClaimFigure) -> Option<ClaimAmount>) -> String {
    let shown = |figure: &ClaimFigure| of(figure).map(|amount| format!("{}: {amount}", figure.what));
    finding.figures.iter().filter_map(shown).collect::<Vec<_>>().join("; ")
}

fn statements(finding: &ClaimFinding, is_wanted: impl Fn(&ClaimCheck) -> bool) -> String {
    let chosen = finding.checks.iter().filter(|check| is_wanted(check));
    chosen.map(|ClaimCheck { statement, .. }| statement.as_str()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(outcomes: &[bool]) -> ClaimVerdict {
        let mut finding = ClaimFinding::default();
        outcomes.iter().for_each(|holds| finding.check("it does", *holds));
        finding.verdict()
    }

    #[test]
    fn verdict_follows_from_checks() {
        assert_eq!(verdict(&[true, true]), ClaimVerdict::Confirmed);
        assert_eq!(verdict(&[false, true]), ClaimVerdict::Depends);
        assert_eq!(verdict(&[false, false]), ClaimVerdict::Refuted);
        assert_eq!(verdict(&[]), ClaimVerdict::NotMeasurable);
    }

    #[test]
    fn pytorch_takes_precedence() {
        let mut finding = ClaimFinding::default();
        finding.check_range("slower by", (19.4, Some(20.3)), 20.0..=40.0, " %");
        assert_eq!((finding.verdict(), finding.checks[0].differs_from_pytorch()), (ClaimVerdict::Confirmed, true));
        finding.check_beside("it leaks", true, true);
        assert!(!finding.checks[1].differs_from_pytorch());
    }

    #[test]
    fn ranges_are_whole_numbers() {
        let holds = |value| {
            let mut finding = ClaimFinding::default();
            finding.check_range("saves", (value, None), 20.0..=40.0, " %");
            assert_eq!(finding.checks[0].statement, "saves 20 to 40 %");
            finding.checks[0].holds
        };
        assert!(holds(19.6) && holds(40.4) && !holds(19.4) && !holds(41.0));
    }

    #[test]
    fn amounts_are_written_for_people() {
        for (amount, text) in [
            (ClaimAmount::Percent(-0.01), "0 %"),
            (ClaimAmount::Percent(37.42), "37.4 %"),
            (ClaimAmount::SizePerStep(1_331_871_744.0), "1.24 GiB per step"),
            (ClaimAmount::SizePerStep(-1024.0), "-1.00 KiB per step"),
            (ClaimAmount::Times(2.697), "2.70x"),
            (ClaimAmount::Count(3), "3"),
        ] {
            assert_eq!(amount.to_string(), text);
        }
        assert_eq!((reduction(200, 150), reduction(0, 5), ratio(2, 5)), (25.0, 0.0, 2.5));
    }

    fn claim() -> Claim {
        Claim {
            id: "zero",
            statement: "It leaks",
            published: "2x",
            lesson: "It does not.",
            command: "oomph leaks x",
            on_gpu: true,
            test: |_, _| Ok(()),
        }
    }

    fn found(times: f64) -> ClaimFinding {
        let mut finding = ClaimFinding::default();
        finding.beside("memory", ClaimAmount::Times(times), ClaimAmount::Times(1.5));
        finding.figure("blocks", ClaimAmount::Count(3));
        finding.check("it doubles", times >= 2.0);
        finding
    }

    #[test]
    fn row_has_numbers_from_here_and_pytorch() {
        let row = ClaimRecord::new(&claim(), &found(1.0), None);
        assert_eq!((row.simulated.as_str(), row.pytorch.as_str()), ("memory: 1.00x; blocks: 3", "memory: 1.50x"));
        assert_eq!((row.verdict, row.fails.as_str(), row.holds.as_str()), (ClaimVerdict::Refuted, "it doubles", ""));
        assert_eq!((row.lesson.as_str(), row.device.as_str()), ("It does not.", ""));
    }

    #[test]
    fn real_device_decides() {
        let row = ClaimRecord::new(&claim(), &found(1.0), Some(("cuda:0", &found(2.0))));
        assert_eq!((row.verdict, row.on_device.as_str()), (ClaimVerdict::Confirmed, "memory: 2.00x; blocks: 3"));
        assert_eq!(row.device, "cuda:0");
    }

    #[test]
    fn unmeasurable_claim_has_a_reason() {
        let mut finding = ClaimFinding::default();
        finding.not_measurable("not visible here");
        let row = ClaimRecord::new(&claim(), &finding, None);
        assert_eq!((row.verdict, row.lesson.as_str()), (ClaimVerdict::NotMeasurable, "not visible here"));
    }
}
