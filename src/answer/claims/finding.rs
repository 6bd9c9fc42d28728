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
    fn of(checks: &[ClaimCheck]) -> ClaimVerdict {
        match checks.iter().filter(|(_, holds)| holds.decisive()).count() {
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
pub(super) enum ClaimAmount {
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

/// A value that was measured here, and in PyTorch 2.11 on an H200 where that is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured<T> {
    pub(super) here: T,
    pub(super) pytorch: Option<T>,
}

impl<T> Measured<T> {
    /// The same conclusion from both values.
    pub(super) fn map<U>(self, conclude: impl Fn(T) -> U) -> Measured<U> {
        Measured { here: conclude(self.here), pytorch: self.pytorch.map(conclude) }
    }

    /// The value that counts. Claims are about PyTorch, so an observation there takes precedence.
    fn decisive(self) -> T {
        self.pytorch.unwrap_or(self.here)
    }
}

impl<T> From<T> for Measured<T> {
    fn from(here: T) -> Measured<T> {
        Measured { here, pytorch: None }
    }
}

impl<T> From<(T, T)> for Measured<T> {
    fn from((here, pytorch): (T, T)) -> Measured<T> {
        Measured { here, pytorch: Some(pytorch) }
    }
}

/// A part of a claim, and whether it was observed.
type ClaimCheck = (String, Measured<bool>);

/// A number of a claim. What only PyTorch shows has no value here.
#[derive(Clone, Debug, PartialEq)]
struct ClaimFigure {
    what: String,
    here: Option<ClaimAmount>,
    pytorch: Option<ClaimAmount>,
}

/// What the test of a claim found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ClaimFinding {
    figures: Vec<ClaimFigure>,
    checks: Vec<ClaimCheck>,
}

impl ClaimFinding {
    /// Adds a number.
    pub(super) fn figure(&mut self, what: impl Into<String>, amount: impl Into<Measured<ClaimAmount>>) {
        let Measured { here, pytorch } = amount.into();
        self.figures.push(ClaimFigure { what: what.into(), here: Some(here), pytorch });
    }

    /// Adds a number that only PyTorch's own run shows: it has no counterpart here.
    pub(super) fn pytorch_figure(&mut self, what: impl Into<String>, amount: ClaimAmount) {
        self.figures.push(ClaimFigure { what: what.into(), here: None, pytorch: Some(amount) });
    }

    /// Adds a check that only PyTorch's own run decides.
    pub(super) fn pytorch_check(&mut self, statement: impl Into<String>, holds: bool) {
        self.check(statement, (holds, holds));
    }

    /// Adds a check.
    pub(super) fn check(&mut self, statement: impl Into<String>, holds: impl Into<Measured<bool>>) {
        self.checks.push((statement.into(), holds.into()));
    }

    /// Checks that a number lies in the published range. Numbers are rounded to whole ones, like the published range.
    pub(super) fn check_range(
        &mut self,
        what: &str,
        value: impl Into<Measured<f64>>,
        range: RangeInclusive<f64>,
        unit: &str,
    ) {
        let statement = format!("{what} {} to {}{unit}", range.start(), range.end());
        self.check(statement, value.into().map(|value| range.contains(&value.round())));
    }
}

/// The reduction from `base` to `changed` in percent; negative where it is an increase.
pub(super) fn reduction(base: impl Into<Measured<u64>>, changed: impl Into<Measured<u64>>) -> Measured<f64> {
    compare(base, changed, |base, changed| 100.0 * (1.0 - changed / base))
}

/// `changed` as a multiple of `base`.
pub(super) fn ratio(base: impl Into<Measured<u64>>, changed: impl Into<Measured<u64>>) -> Measured<f64> {
    compare(base, changed, |base, changed| changed / base)
}

/// Compares what was measured here, and what was measured in PyTorch; 0 where the base is 0.
fn compare(
    base: impl Into<Measured<u64>>,
    changed: impl Into<Measured<u64>>,
    change: impl Fn(f64, f64) -> f64,
) -> Measured<f64> {
    let (base, changed) = (base.into(), changed.into());
    let compare = |base: u64, changed: u64| if base == 0 { 0.0 } else { change(base as f64, changed as f64) };
    let pytorch = base.pytorch.zip(changed.pytorch).map(|(base, changed)| compare(base, changed));
    Measured { here: compare(base.here, changed.here), pytorch }
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
    /// [`Claim::source`]; empty in files of an older oomph.
    pub stated_by: String,
    /// [`Claim::statement`].
    pub claim: String,
    /// [`Claim::published`].
    pub published: String,
    /// The numbers of the simulated device.
    pub simulated: String,
    /// The real device on which the claim was tested, too.
    #[serde(alias = "device")]
    pub real_device: String,
    /// The numbers of the real device; empty without one.
    pub on_device: String,
    /// The numbers of PyTorch 2.11 on an H200, where they are known.
    pub pytorch: String,
    /// The verdict.
    pub verdict: ClaimVerdict,
    /// Which measurements decided it, with the number of checks of each; empty in files of an older oomph.
    pub decided_by: String,
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

    /// The commit of the program that measured the row; set by run folders.
    pub commit: String,
    /// The device on which the row was measured, as it calls itself; set by run folders.
    pub device_name: String,
    /// When the process that measured the row began; set by run folders, and not on a simulated device.
    pub run_started: String,
}

impl ClaimRecord {
    /// The row of a claim, from the simulated device and a real one. Where there is a real one, it decides.
    pub(super) fn new(claim: &Claim, simulated: &ClaimFinding, real: Option<(&str, &ClaimFinding)>) -> ClaimRecord {
        let (device, decisive) = real.unwrap_or(("", simulated));
        ClaimRecord {
            schema: SCHEMA,
            id: claim.id.to_owned(),
            group: claim.group(),
            stated_by: claim.source.to_owned(),
            claim: claim.statement.to_owned(),
            published: claim.published.to_owned(),
            simulated: figures(simulated, |figure| figure.here),
            real_device: device.to_owned(),
            on_device: real.map_or_else(String::new, |(_, finding)| figures(finding, |figure| figure.here)),
            pytorch: figures(simulated, |figure| figure.pytorch),
            verdict: ClaimVerdict::of(&decisive.checks),
            decided_by: decided_by(decisive, if real.is_some() { device } else { "simulated" }),
            holds: statements(decisive, Measured::decisive),
            fails: statements(decisive, |holds| !holds.decisive()),
            differs_from_pytorch: statements(decisive, |holds| holds.here != holds.decisive()),
            lesson: claim.lesson.to_owned(),
            command: claim.command.to_owned(),
            ..ClaimRecord::default()
        }
    }
}

/// Which measurements decided the checks of a claim: those on `device`, and those of PyTorch's own runs.
fn decided_by(finding: &ClaimFinding, device: &str) -> String {
    let of_pytorch = finding.checks.iter().filter(|(_, holds)| holds.pytorch.is_some()).count();
    let counts = [(device, finding.checks.len() - of_pytorch), (PYTORCH, of_pytorch)];
    let named = counts.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name}: {count}"));
    named.collect::<Vec<_>>().join("; ")
}

/// Where the figures of `pytorch.rs` were measured.
const PYTORCH: &str = "PyTorch 2.11 on an H200";

fn figures(finding: &ClaimFinding, of: impl Fn(&ClaimFigure) -> Option<ClaimAmount>) -> String {
    let shown = finding.figures.iter().filter_map(|figure| Some(format!("{}: {}", figure.what, of(figure)?)));
    shown.collect::<Vec<_>>().join("; ")
}

fn statements(finding: &ClaimFinding, is_wanted: impl Fn(Measured<bool>) -> bool) -> String {
    let chosen = finding.checks.iter().filter(|(_, holds)| is_wanted(*holds));
    chosen.map(|(statement, _)| statement.as_str()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::{super::ClaimTest, *};

    fn verdict(outcomes: &[bool]) -> ClaimVerdict {
        let mut finding = ClaimFinding::default();
        outcomes.iter().for_each(|holds| finding.check("it does", *holds));
        ClaimVerdict::of(&finding.checks)
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
        finding.check_range("slower by", (19.4, 20.3), 20.0..=40.0, " %");
        finding.check("it leaks", (true, true));
        let row = ClaimRecord::new(&claim(), &finding, None);
        assert_eq!((row.verdict, row.differs_from_pytorch.as_str()), (ClaimVerdict::Confirmed, "slower by 20 to 40 %"));
    }

    #[test]
    fn ranges_are_whole_numbers() {
        let holds = |value| {
            let mut finding = ClaimFinding::default();
            finding.check_range("saves", value, 20.0..=40.0, " %");
            assert_eq!(finding.checks[0].0, "saves 20 to 40 %");
            finding.checks[0].1.here
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
        let changes = [reduction(200_u64, 150_u64), reduction(0_u64, 5_u64), ratio((2, 2), (5, 6))];
        assert_eq!(changes, [25.0.into(), 0.0.into(), Measured::from((2.5, 3.0))]);
    }

    fn claim() -> Claim {
        Claim {
            id: "zero",
            source: "an article",
            statement: "It leaks",
            published: "2x",
            lesson: "It does not.",
            command: "oomph leaks x",
            test: ClaimTest::AnyDevice(|_, _| Ok(())),
        }
    }

    fn found(times: f64) -> ClaimFinding {
        let mut finding = ClaimFinding::default();
        finding.figure("memory", (ClaimAmount::Times(times), ClaimAmount::Times(1.5)));
        finding.figure("blocks", ClaimAmount::Count(3));
        finding.check("it doubles", times >= 2.0);
        finding
    }

    #[test]
    fn row_has_numbers_from_here_and_pytorch() {
        let row = ClaimRecord::new(&claim(), &found(1.0), None);
        assert_eq!((row.simulated.as_str(), row.pytorch.as_str()), ("memory: 1.00x; blocks: 3", "memory: 1.50x"));
        assert_eq!((row.verdict, row.fails.as_str(), row.holds.as_str()), (ClaimVerdict::Refuted, "it doubles", ""));
        assert_eq!((row.lesson.as_str(), row.real_device.as_str()), ("It does not.", ""));
        assert_eq!((row.stated_by.as_str(), row.decided_by.as_str()), ("an article", "simulated: 1"));
    }

    #[test]
    fn real_device_decides() {
        let row = ClaimRecord::new(&claim(), &found(1.0), Some(("cuda:0", &found(2.0))));
        assert_eq!((row.verdict, row.on_device.as_str()), (ClaimVerdict::Confirmed, "memory: 2.00x; blocks: 3"));
        assert_eq!((row.real_device.as_str(), row.decided_by.as_str()), ("cuda:0", "cuda:0: 1"));
    }

    #[test]
    fn what_only_pytorch_shows_has_no_figure_here() {
        let mut finding = found(1.0);
        finding.pytorch_figure("with tuning", ClaimAmount::Count(7));
        finding.pytorch_check("it is higher", true);
        let row = ClaimRecord::new(&claim(), &finding, None);
        assert_eq!(row.simulated, "memory: 1.00x; blocks: 3");
        assert_eq!(row.pytorch, "memory: 1.50x; with tuning: 7");
        assert_eq!(row.decided_by, "simulated: 1; PyTorch 2.11 on an H200: 1");
        assert_eq!((row.verdict, row.differs_from_pytorch.as_str()), (ClaimVerdict::Depends, ""));
    }
}
