//! What is published about GPU memory in training, put to the test claim by claim.
//!
//! A [`Claim`] is a sentence with its figure, and a test that replays the workloads which would show it. The test notes
//! what it measured beside what real PyTorch did, and cuts the sentence into things that hold or do not; the
//! [`Verdict`] follows from these by one rule. A refuted claim is worth as much as a confirmed one, so each says what
//! really happens. What nothing here can measure is listed with the reason.
//!
//! The command line asks, `report` shows; this room neither knows files nor prints. One file is one subject; a new claim is
//! one entry of its list.

mod allocator;
mod bench;
mod beyond;
mod cache;
mod finding;
mod growth;
mod headline;
mod leaks;
mod pytorch;
mod record;
mod sharding;
mod techniques;

pub use finding::{Amount, Check, Figure, Finding, Verdict};
pub use record::ClaimRecord;

use std::sync::atomic::AtomicBool;

use bench::Bench;
use serde::{Deserialize, Serialize};

use super::{leaks::LeakError, threshold::ThresholdError};
use crate::{
    base::parallel_for_each,
    device::{DeviceSpec, DeviceSpecError},
    models::WorkloadError,
    replay::ReplayError,
    strategy::{SpecError, StrategyError},
    trace::TraceError,
};

/// What claims are about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The table of techniques that articles print.
    #[default]
    Table,
    /// Techniques.
    Techniques,
    /// Allocators and their counters.
    Allocator,
    /// Leaks and growth.
    Leaks,
    /// What cannot be measured here.
    Beyond,
}

impl Group {
    /// A heading.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Group::Table => "The table of techniques",
            Group::Techniques => "Techniques",
            Group::Allocator => "Allocator",
            Group::Leaks => "Leaks and growth",
            Group::Beyond => "Beyond measurement here",
        }
    }
}

/// A sentence about memory that somebody published.
#[derive(Clone, Copy)]
pub struct Claim {
    /// A short name, for files and for the command line.
    pub id: &'static str,
    /// What it is about.
    pub group: Group,
    /// The sentence.
    pub statement: &'static str,
    /// Its figure, or what it promises.
    pub published: &'static str,
    /// What really happens.
    pub lesson: &'static str,
    /// The workload that shows it, as a command.
    pub command: &'static str,
    /// Whether a real GPU can say something that the simulated one cannot.
    pub on_gpu: bool,
    test: Test,
}

type Test = fn(&Bench<'_>) -> Result<Finding, ClaimError>;

/// Every claim, in the order in which the table shows them.
pub fn all_claims() -> impl Iterator<Item = &'static Claim> {
    let in_order: [&'static [Claim]; 8] = [
        headline::CLAIMS,
        techniques::CLAIMS,
        sharding::CLAIMS,
        allocator::CLAIMS,
        cache::CLAIMS,
        leaks::CLAIMS,
        growth::CLAIMS,
        beyond::CLAIMS,
    ];
    in_order.into_iter().flatten()
}

/// Why there is no row.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// A device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// A strategy cannot be made.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A strategy gave up.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// A replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A workload cannot be made; boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
    /// A search broke.
    #[error(transparent)]
    Threshold(#[from] ThresholdError),
    /// Steps cannot be judged.
    #[error(transparent)]
    Leak(#[from] LeakError),
    /// A replay ended with something worse than an OOM.
    #[error("{workload}: {reason}")]
    Broken {
        /// What was replayed.
        workload: String,
        /// How it ended.
        reason: String,
    },
    /// Somebody stopped it.
    #[error("stopped before an answer was found")]
    Interrupted,
}

/// What is asked.
#[derive(Clone, Copy)]
pub struct ClaimsQuestion<'a> {
    /// Which claims.
    pub claims: &'a [&'a Claim],
    /// Where they are put to the test: where that is a real device, there as well as on the simulated one.
    pub device: &'a DeviceSpec,
    /// The simulated device.
    pub simulated: &'a DeviceSpec,
    /// How many claims are tested side by side; on a real device they take turns.
    pub jobs: usize,
    /// Set from outside to end early.
    pub stop: &'a AtomicBool,
}

/// Tests every claim and tells `listener` of each as soon as it is done, in no particular order, with its place among the
/// claims. Who is stopped is left out.
pub fn claims(question: &ClaimsQuestion<'_>, mut listener: impl FnMut(usize, ClaimRecord)) -> Result<(), ClaimError> {
    let jobs = if question.device.is_simulated() { question.jobs } else { 1 };
    let work = |claim: &&Claim| question.tested(claim);
    parallel_for_each(question.claims, jobs, question.stop, work, |place, tested| {
        match tested {
            Ok(record) => listener(place, record),
            Err(ClaimError::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    })
}

impl ClaimsQuestion<'_> {
    fn tested(&self, claim: &Claim) -> Result<ClaimRecord, ClaimError> {
        let on = |device| Bench { device, simulated: self.simulated, stop: self.stop };
        let simulated = (claim.test)(&on(self.simulated))?;
        if self.device.is_simulated() || !claim.on_gpu {
            return Ok(ClaimRecord::new(claim, &simulated, None));
        }
        let real = (claim.test)(&on(self.device))?;
        Ok(ClaimRecord::new(claim, &simulated, Some((&self.device.to_string(), &real))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::recipe_names;

    #[test]
    fn every_claim_has_a_name_of_its_own_and_a_command_that_names_a_workload() {
        let claims: Vec<&Claim> = all_claims().collect();
        assert!(claims.len() >= 50, "{}", claims.len());
        for (place, claim) in claims.iter().enumerate() {
            assert!(claims[..place].iter().all(|other| other.id != claim.id), "{} twice", claim.id);
            let is_beyond = claim.group == Group::Beyond;
            assert_eq!((claim.lesson.is_empty(), claim.command.is_empty()), (is_beyond, is_beyond), "{}", claim.id);
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
    fn who_is_stopped_says_nothing_and_breaks_nothing() {
        let (device, stop) = ("sim".parse().unwrap(), AtomicBool::new(true));
        let claims: Vec<&Claim> = all_claims().collect();
        let question = ClaimsQuestion { claims: &claims, device: &device, simulated: &device, jobs: 2, stop: &stop };
        super::claims(&question, |_, record| panic!("{record:?}")).unwrap();
        let bench = Bench { device: &device, simulated: &device, stop: &stop };
        assert!(matches!((claims[0].test)(&bench), Err(ClaimError::Interrupted)));
    }
}
