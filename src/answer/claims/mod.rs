//! Published claims about GPU memory in training, put to the test.
//!
//! A [`Claim`] is a sentence with its figure, and a test that replays the workloads which would show it. The test notes
//! its measurements beside those of PyTorch and divides the sentence into checks; the [`ClaimVerdict`] follows from these
//! by one rule. Every claim says what really happens. Claims that cannot be measured here are listed with the reason.
//!
//! This module does not know files and does not print. A new claim is one entry in the list of its subject.

mod allocator;
mod bench;
mod finding;
mod leaks;
mod techniques;

pub use finding::{ClaimRecord, ClaimVerdict};

use std::sync::atomic::AtomicBool;

use bench::{ClaimBench, ClaimResult};
use finding::ClaimFinding;
use serde::{Deserialize, Serialize};

use super::{threshold::ThresholdError, trial::TrialError};
use crate::{base::parallel_for_each, device::DeviceSpec};

/// The subject of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimGroup {
    /// The table of techniques that articles print.
    #[default]
    Table,
    /// Techniques.
    Techniques,
    /// Allocators and their counters.
    Allocator,
    /// Leaks and growth.
    Leaks,
    /// Claims that cannot be measured here.
    Beyond,
}

impl ClaimGroup {
    /// A heading.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            ClaimGroup::Table => "The table of techniques",
            ClaimGroup::Techniques => "Techniques",
            ClaimGroup::Allocator => "Allocator",
            ClaimGroup::Leaks => "Leaks and growth",
            ClaimGroup::Beyond => "Beyond measurement here",
        }
    }
}

/// A published sentence about memory.
#[derive(Clone, Copy)]
pub struct Claim {
    /// A short name, for files and for the command line.
    pub id: &'static str,
    /// Who states it.
    pub source: &'static str,
    /// The sentence.
    pub statement: &'static str,
    /// Its figure, or what it promises.
    pub published: &'static str,
    /// What really happens, or why it cannot be measured here.
    pub lesson: &'static str,
    /// The workload that shows it, as a command.
    pub command: &'static str,
    test: ClaimTest,
}

/// Sentences that many articles repeat, without a figure.
const ARTICLES: &str = "articles about GPU memory in PyTorch";
/// Figures that articles repeat without saying how they were measured.
const FIGURES: &str = "articles about GPU memory in PyTorch; the figure has no known first source";

/// How a claim is tested.
#[derive(Clone, Copy)]
enum ClaimTest {
    /// On the simulated device, and on a real one where it is chosen.
    AnyDevice(ClaimTestFn),
    /// On the simulated device only: a real one cannot show more.
    SimulatedOnly(ClaimTestFn),
    /// Not at all; the lesson says why.
    NotMeasurable,
}

type ClaimTestFn = fn(&ClaimBench<'_>, &mut ClaimFinding) -> ClaimResult<()>;

/// Every claim by subject, in the order in which the table shows them.
const CLAIMS: &[(ClaimGroup, &[Claim])] = &[
    (ClaimGroup::Table, techniques::TABLE),
    (ClaimGroup::Techniques, techniques::ONE_DEVICE),
    (ClaimGroup::Techniques, techniques::SEVERAL_DEVICES),
    (ClaimGroup::Allocator, allocator::CLAIMS),
    (ClaimGroup::Leaks, leaks::CLAIMS),
    (ClaimGroup::Beyond, NOT_MEASURABLE),
];

const NOT_MEASURABLE: &[Claim] = &[
    not_measurable(
        "accuracy-16-bit",
        "Training in 16 bits stays within 1-2 points of accuracy",
        "1-2 points",
        "nothing is learnt here: work runs for its memory and time, over arbitrary numbers",
    ),
    not_measurable(
        "small-batch-convergence",
        "A small batch converges more slowly and with more variance",
        "slower",
        "nothing is learnt here: convergence depends on the data, not on memory",
    ),
    not_measurable(
        "system-leaks",
        "Leaks of the operating system and of other processes take GPU memory",
        "some",
        "only the driver calls of one process are visible here",
    ),
    not_measurable(
        "adoption",
        "Companies and tools that use these techniques",
        "figures of adoption",
        "this is a question for surveys, not for measurements",
    ),
];

const fn not_measurable(
    id: &'static str,
    statement: &'static str,
    published: &'static str,
    lesson: &'static str,
) -> Claim {
    Claim { id, source: ARTICLES, statement, published, lesson, command: "", test: ClaimTest::NotMeasurable }
}

/// Every claim, in the order in which the table shows them.
pub fn all_claims() -> impl Iterator<Item = &'static Claim> {
    CLAIMS.iter().flat_map(|(_, claims)| *claims)
}

impl Claim {
    /// Its subject.
    #[must_use]
    pub fn group(&self) -> ClaimGroup {
        let has_it = |claims: &[Claim]| claims.iter().any(|claim| claim.id == self.id);
        CLAIMS.iter().find(|(_, claims)| has_it(claims)).map_or(ClaimGroup::Beyond, |(group, _)| *group)
    }
}

/// The question: which claims, tested where.
#[derive(Clone, Copy)]
pub struct ClaimsQuestion<'a> {
    /// The claims.
    pub claims: &'a [&'a Claim],
    /// Where they are tested. A real device is used in addition to the simulated one.
    pub device: &'a DeviceSpec,
    /// The simulated device.
    pub simulated: &'a DeviceSpec,
    /// How many claims are tested in parallel; on a real device they run one after the other.
    pub jobs: usize,
    /// Set from outside to end early.
    pub stop: &'a AtomicBool,
}

/// Tests every claim and calls `listener` with each record as soon as it is done, in any order. Interrupted claims are
/// left out.
pub fn claims(question: &ClaimsQuestion<'_>, mut listener: impl FnMut(ClaimRecord)) -> Result<(), TrialError> {
    let jobs = if question.device.is_simulated() { question.jobs } else { 1 };
    let work = |claim: &&Claim| question.tested(claim);
    parallel_for_each(question.claims, jobs, question.stop, work, |_, tested| {
        match tested {
            Ok(record) => listener(record),
            Err(TrialError::Interrupted | TrialError::Threshold(ThresholdError::Interrupted)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    })
}

impl ClaimsQuestion<'_> {
    fn tested(&self, claim: &Claim) -> Result<ClaimRecord, TrialError> {
        let finding = self.finding(claim.test, self.simulated)?;
        if self.device.is_simulated() || !matches!(claim.test, ClaimTest::AnyDevice(_)) {
            return Ok(ClaimRecord::new(claim, &finding, None));
        }
        let real = self.finding(claim.test, self.device)?;
        Ok(ClaimRecord::new(claim, &finding, Some((&self.device.to_string(), &real))))
    }

    fn finding(&self, test: ClaimTest, device: &DeviceSpec) -> Result<ClaimFinding, TrialError> {
        let mut finding = ClaimFinding::default();
        if let ClaimTest::AnyDevice(test) | ClaimTest::SimulatedOnly(test) = test {
            test(&ClaimBench { device, simulated: self.simulated, stop: self.stop }, &mut finding)?;
        }
        Ok(finding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::recipe_names;

    #[test]
    fn claims_have_unique_names_and_commands() {
        let claims: Vec<&Claim> = all_claims().collect();
        assert!(claims.len() >= 40, "{}", claims.len());
        for (place, claim) in claims.iter().enumerate() {
            assert!(claims[..place].iter().all(|other| other.id != claim.id), "{} twice", claim.id);
            assert!(!claim.source.is_empty(), "{}", claim.id);
            let is_beyond = claim.group() == ClaimGroup::Beyond;
            assert_eq!((claim.lesson.is_empty(), claim.command.is_empty()), (false, is_beyond), "{}", claim.id);
            let words: Vec<&str> = claim.command.split(|c: char| c.is_whitespace() || c == ';').collect();
            let names_workload = words.iter().any(|word| recipe_names().any(|name| name == *word));
            assert!(
                names_workload || is_beyond || claim.command.contains(".pickle"),
                "{}: {}",
                claim.id,
                claim.command
            );
        }
    }

    #[test]
    fn unmeasurable_claims_have_a_reason_and_no_numbers() {
        let (device, stop) = ("sim".parse().unwrap(), AtomicBool::new(false));
        let claims: Vec<&Claim> = all_claims().filter(|claim| matches!(claim.test, ClaimTest::NotMeasurable)).collect();
        let question = ClaimsQuestion { claims: &claims, device: &device, simulated: &device, jobs: 1, stop: &stop };
        let mut rows = 0;
        super::claims(&question, |record| {
            assert_eq!((record.verdict, record.simulated.as_str()), (ClaimVerdict::NotMeasurable, ""));
            assert!(!record.lesson.is_empty(), "{record:?}");
            rows += 1;
        })
        .unwrap();
        assert_eq!(rows, claims.len());
    }

    #[test]
    fn interrupted_claims_are_left_out() {
        let (device, stop) = ("sim".parse().unwrap(), AtomicBool::new(true));
        let claims: Vec<&Claim> = all_claims().collect();
        let question = ClaimsQuestion { claims: &claims, device: &device, simulated: &device, jobs: 2, stop: &stop };
        super::claims(&question, |record| panic!("{record:?}")).unwrap();
        assert!(matches!(question.finding(claims[0].test, &device), Err(TrialError::Interrupted)));
    }
}
