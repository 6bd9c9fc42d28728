//! The conformance suite: what every strategy must do, on any device.
//!
//! The tests run it over the whole registry, so a new strategy inherits it. It is a library
//! function, because a strategy under test need not be registered and a device need not be
//! simulated. A violation is a [`ConformanceFinding`], never a panic. The suite knows only the
//! [`Strategy`](super::Strategy) trait.
//!
//! Each check runs a [`ConformanceProgram`] over [`CheckedStrategy`](super::wrap::CheckedStrategy),
//! so blocks, handles, counters, layout and events are compared after every call.

mod checks;
mod observed;
mod program;

pub use super::wrap::ConformanceFinding;
pub use observed::{EARLY_REUSE, ObservedStrategy};
pub use program::{ConformanceProgram, ProgramStep, StepOutcome, mixed_script};

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Built, Setup, SpecError, StrategySpec};
use crate::device::{Device, DeviceProps, MissingCapabilities};

/// A strategy to check, and the devices to check it on.
pub struct ConformanceSubject<'a> {
    /// Makes a new strategy for a device.
    pub build: &'a dyn Fn(&DeviceProps) -> Built,
    /// Makes a new device on which this many bytes can be allocated.
    pub device: &'a dyn Fn(u64) -> Box<dyn Device>,
}

/// The result of the suite.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Violations.
    pub findings: Vec<ConformanceFinding>,
    /// Checks that could not run, and why.
    pub skipped: Vec<ConformanceFinding>,
}

/// Why a check cannot run.
#[derive(Debug, thiserror::Error)]
enum CheckSkipped {
    /// The device lacks something.
    #[error(transparent)]
    Missing(#[from] MissingCapabilities),
    /// The strategy does not offer what the check needs.
    #[error("{0}")]
    NotOffered(&'static str),
    /// The strategy cannot be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// One rule of the contract, and its check.
struct ConformanceCheck {
    promise: &'static str,
    play: fn(&ConformanceSubject<'_>, &mut Vec<String>) -> Result<(), CheckSkipped>,
}

impl ConformanceCheck {
    /// Runs the check. A panic is a finding.
    fn add_to(&self, report: &mut ConformanceReport, subject: &ConformanceSubject<'_>) {
        let mut details = Vec::new();
        match catch_unwind(AssertUnwindSafe(|| (self.play)(subject, &mut details))) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => {
                report.skipped.push(ConformanceFinding { check: self.promise, detail: reason.to_string() })
            }
            Err(_) => details.push("panicked".to_owned()),
        }
        report.findings.extend(details.into_iter().map(|detail| ConformanceFinding { check: self.promise, detail }));
    }
}

const CHECKS: &[ConformanceCheck] = &[
    ConformanceCheck { promise: "blocks are disjoint, aligned and large enough", play: checks::sizes },
    ConformanceCheck { promise: "a request for zero bytes is refused", play: checks::zero_bytes },
    ConformanceCheck { promise: "an impossible request is refused", play: checks::huge_requests },
    ConformanceCheck { promise: "a stale or foreign handle does no damage", play: checks::handles },
    ConformanceCheck { promise: "running out of memory is survived", play: checks::exhaustion },
    ConformanceCheck { promise: "the largest free block can be allocated", play: checks::largest_free },
    ConformanceCheck { promise: "trim releases free memory", play: checks::trim },
    ConformanceCheck { promise: "close releases everything, repeatedly", play: checks::close },
    ConformanceCheck { promise: "random calls keep the counters right", play: checks::random_calls },
    ConformanceCheck { promise: "the same calls give the same result", play: checks::same_calls },
    ConformanceCheck { promise: "a fork is an equal and independent copy", play: checks::fork },
    ConformanceCheck { promise: "a block in use on another stream is not reused", play: checks::used_elsewhere },
    ConformanceCheck { promise: "memory is not handed to another stream early", play: checks::other_stream },
    ConformanceCheck {
        promise: "random calls on busy streams reuse nothing early",
        play: checks::random_calls_on_busy_streams,
    },
    ConformanceCheck { promise: "a failing driver call loses nothing", play: checks::driver_failures },
];

/// Runs all checks.
#[must_use]
pub fn conform(subject: &ConformanceSubject<'_>) -> ConformanceReport {
    let mut report = ConformanceReport::default();
    if let Err(reason) = playable(subject) {
        report.skipped.push(ConformanceFinding { check: "everything", detail: reason.to_string() });
        return report;
    }
    for check in CHECKS {
        check.add_to(&mut report, subject);
    }
    report
}

/// Runs all checks on a registered strategy.
#[must_use]
pub fn conform_spec(spec: &StrategySpec, device: &dyn Fn(u64) -> Box<dyn Device>) -> ConformanceReport {
    conform(&ConformanceSubject { build: &|props| spec.build(&Setup { props, limit: None }), device })
}

fn playable(subject: &ConformanceSubject<'_>) -> Result<(), CheckSkipped> {
    let device = (subject.device)(checks::LARGE_DEVICE);
    let strategy = (subject.build)(device.props())?;
    Ok(strategy.requires().check(device.props())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{
        STRATEGIES, Strategy,
        flawed::{Flaw, Flawed},
        test_device::simulated,
        wrap::{AddressedStrategy, CheckedStrategy},
    };

    #[test]
    fn registered_strategies_conform() {
        let mut findings = Vec::new();
        for entry in STRATEGIES {
            for parameters in [""].iter().chain(entry.variants) {
                let spec = StrategySpec { name: entry.name.to_owned(), parameters: (*parameters).to_owned() };
                let report = conform_spec(&spec, &simulated);
                for skipped in report.skipped {
                    println!("{spec}: skipped: {skipped}");
                }
                findings.extend(report.findings.into_iter().map(|finding| format!("{spec}: {finding}")));
            }
        }
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    }

    #[test]
    fn wrapped_strategy_conforms() {
        let build = |props: &DeviceProps| {
            let spec = StrategySpec { name: "direct".to_owned(), parameters: String::new() };
            let direct = spec.build(&Setup { props, limit: None })?;
            Ok(Box::new(AddressedStrategy::new(CheckedStrategy::new(direct))) as Box<dyn Strategy>)
        };
        assert_eq!(conform(&ConformanceSubject { build: &build, device: &simulated }), ConformanceReport::default());
    }

    #[test]
    fn unbuildable_strategy_is_skipped() {
        let spec = StrategySpec { name: "direct".to_owned(), parameters: "x".to_owned() };
        let skipped = conform_spec(&spec, &simulated).skipped;
        assert_eq!(skipped[0].to_string(), "everything: strategy 'direct': takes no parameters, got 'x'");
    }

    #[test]
    fn allocator_without_a_flaw_conforms() {
        let build = |_: &DeviceProps| Ok(Box::new(Flawed::new(Flaw::None)) as Box<dyn Strategy>);
        assert_eq!(conform(&ConformanceSubject { build: &build, device: &simulated }), ConformanceReport::default());
    }

    #[test]
    fn every_flaw_is_found() {
        let flaws = [
            (Flaw::OverlappingSplit, "overlap: "),
            (Flaw::Misaligned, "alignment: "),
            (Flaw::LostAccounting, "books: active is "),
            (Flaw::EarlyReuse, "a block in use on another stream is not reused: "),
            (Flaw::StreamsMixed, "memory is not handed to another stream early: "),
            (Flaw::LeakOnClose, "after a close the device still holds "),
            (Flaw::KeepsCache, "trim kept free segments: "),
            (Flaw::TrustsHandles, "a stale or foreign handle for "),
            (Flaw::BooksTooEarly, "reserved"),
            (Flaw::ForgetsOnFailure, "a failing driver call loses nothing: "),
            (Flaw::SharedFork, "a fork is an equal and independent copy: "),
            (Flaw::SilentSegments, "events sum to "),
            (Flaw::ServesNothing, "a request for zero bytes was served"),
            (Flaw::FailsOnExhaustion, "running out of memory is survived: "),
            (Flaw::BoastsOfLargestFree, "should be free in one piece"),
            (Flaw::Panics, "panicked"),
            (Flaw::LostCoalesce, "layout: "),
            (Flaw::LeakOnRetry, "after a close the device still holds "),
            (Flaw::DoubleHandOutAfterTrim, "layout: "),
            (Flaw::RoundsDown, "size: "),
            (Flaw::LosesSegmentOnFailure, "a failing driver call loses nothing: "),
        ];
        assert_eq!(flaws.map(|(flaw, _)| flaw), Flaw::ALL);
        for (flaw, says) in flaws {
            let build = |_: &DeviceProps| Ok(Box::new(Flawed::new(flaw)) as Box<dyn Strategy>);
            let mut report = ConformanceReport::default();
            let found = CHECKS.iter().any(|check| {
                check.add_to(&mut report, &ConformanceSubject { build: &build, device: &simulated });
                report.findings.iter().any(|finding| finding.to_string().contains(says))
            });
            assert!(found, "{flaw:?} gave {report:#?}");
        }
    }
}
