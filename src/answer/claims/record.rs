//! The row of a claim.

use serde::{Deserialize, Serialize};

use super::{
    Claim, Group,
    finding::{Amount, Check, Figure, Finding, Verdict},
};
use crate::measure::SCHEMA;

/// One claim and what became of it: a row of `claims.csv`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`Claim::id`].
    pub id: String,
    /// [`Claim::group`].
    pub group: Group,
    /// [`Claim::statement`].
    pub claim: String,
    /// [`Claim::published`].
    pub published: String,
    /// What the simulated device showed.
    pub simulated: String,
    /// Which real device was asked as well.
    pub device: String,
    /// What that showed; empty where it was not asked.
    pub on_device: String,
    /// What PyTorch 2.11 showed on an H200, where that is known.
    pub pytorch: String,
    /// What follows.
    pub verdict: Verdict,
    /// What of the claim was seen.
    pub holds: String,
    /// What of the claim was not.
    pub fails: String,
    /// Of these, what PyTorch was seen to do otherwise than what was measured here; PyTorch decides.
    pub differs_from_pytorch: String,
    /// What really happens; or why nothing here can tell.
    pub lesson: String,
    /// The workload that shows it.
    pub command: String,
}

impl ClaimRecord {
    /// The row of a claim from what the simulated device showed, and a real one. Where there is one, it decides.
    #[must_use]
    pub fn new(claim: &Claim, simulated: &Finding, real: Option<(&str, &Finding)>) -> ClaimRecord {
        let decisive = real.map_or(simulated, |(_, finding)| finding);
        let lesson = if decisive.reason.is_empty() { claim.lesson } else { &decisive.reason };
        ClaimRecord {
            schema: SCHEMA,
            id: claim.id.to_owned(),
            group: claim.group,
            claim: claim.statement.to_owned(),
            published: claim.published.to_owned(),
            simulated: figures(simulated, |figure| Some(figure.here)),
            device: real.map_or("", |(device, _)| device).to_owned(),
            on_device: real.map_or_else(String::new, |(_, finding)| figures(finding, |figure| Some(figure.here))),
            pytorch: figures(simulated, |figure| figure.pytorch),
            verdict: decisive.verdict(),
            holds: statements(decisive, Check::counts_as_held),
            fails: statements(decisive, |check| !check.counts_as_held()),
            differs_from_pytorch: statements(decisive, Check::differs_from_pytorch),
            lesson: lesson.to_owned(),
            command: claim.command.to_owned(),
        }
    }
}

fn figures(finding: &Finding, of: impl Fn(&Figure) -> Option<Amount>) -> String {
    let shown = |figure: &Figure| of(figure).map(|amount| format!("{}: {amount}", figure.what));
    finding.figures.iter().filter_map(shown).collect::<Vec<_>>().join("; ")
}

fn statements(finding: &Finding, is_wanted: impl Fn(&Check) -> bool) -> String {
    let chosen = finding.checks.iter().filter(|check| is_wanted(check));
    chosen.map(|Check { statement, .. }| statement.as_str()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim {
            id: "x",
            group: Group::Leaks,
            statement: "It leaks",
            published: "2x",
            lesson: "It does not.",
            command: "oomph leaks x",
            on_gpu: true,
            test: |_| Ok(Finding::default()),
        }
    }

    fn finding(times: f64) -> Finding {
        let mut finding = Finding::default();
        finding.beside("memory", Amount::Times(times), Amount::Times(1.5));
        finding.figure("blocks", Amount::Count(3));
        finding.check("it doubles", times >= 2.0);
        finding
    }

    #[test]
    fn a_row_tells_what_was_seen_here_and_in_pytorch() {
        let row = ClaimRecord::new(&claim(), &finding(1.0), None);
        assert_eq!((row.simulated.as_str(), row.pytorch.as_str()), ("memory: 1.00x; blocks: 3", "memory: 1.50x"));
        assert_eq!((row.verdict, row.fails.as_str(), row.holds.as_str()), (Verdict::Refuted, "it doubles", ""));
        assert_eq!((row.lesson.as_str(), row.device.as_str()), ("It does not.", ""));
    }

    #[test]
    fn a_real_device_has_the_last_word() {
        let row = ClaimRecord::new(&claim(), &finding(1.0), Some(("cuda:0", &finding(2.0))));
        assert_eq!((row.verdict, row.on_device.as_str()), (Verdict::Confirmed, "memory: 2.00x; blocks: 3"));
        assert_eq!(row.device, "cuda:0");
    }

    #[test]
    fn what_cannot_be_measured_says_why() {
        let row = ClaimRecord::new(&claim(), &Finding::not_measurable("nobody can"), None);
        assert_eq!((row.verdict, row.lesson.as_str()), (Verdict::NotMeasurable, "nobody can"));
    }
}
