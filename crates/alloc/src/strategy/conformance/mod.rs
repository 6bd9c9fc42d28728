//! What every strategy must do, as a suite that runs on any strategy and device.
//!
//! The tests run it over the whole registry, so that a new strategy inherits it; it is a library function because an
//! allocator under test need not be in the registry and a device need not be simulated. A breach is a [`Finding`],
//! never a panic. The suite knows the [`Strategy`](super::Strategy) trait and no strategy in particular.
//!
//! Each part is one promise of the contract, played out on a [`Bench`] under the eyes of
//! [`Checked`](super::wrap::Checked): whatever a part is about, blocks, handles, books, layout and events are compared
//! after every call.

mod bench;
mod faults;
#[cfg(test)]
mod flaws_are_found;
mod memory;
mod repetition;
mod script;
mod streams;
mod watch;

pub use bench::{Bench, Echo};
pub use script::{Step, mixed_script};
pub use watch::{EARLY_REUSE, Watch};

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{Built, Setup, SpecError, StrategySpec};
use crate::device::{Device, DeviceProps, MissingCapabilities};

/// A strategy to look at, and the devices to look at it on.
pub struct Subject<'a> {
    /// Makes a new strategy for a device.
    pub build: &'a dyn Fn(&DeviceProps) -> Built,
    /// Makes a new device on which this many bytes can be allocated.
    pub device: &'a dyn Fn(u64) -> Box<dyn Device>,
}

/// A promise that was not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which part of the suite found it.
    pub part: &'static str,
    /// What happened.
    pub detail: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.part, self.detail)
    }
}

/// What the suite has to say about a strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Broken promises.
    pub findings: Vec<Finding>,
    /// Parts that could not be played, and why.
    pub skipped: Vec<Finding>,
}

/// Why a part cannot be played.
#[derive(Debug, thiserror::Error)]
enum Unplayable {
    /// The device lacks something.
    #[error(transparent)]
    Missing(#[from] MissingCapabilities),
    /// The strategy does not offer what the part is about.
    #[error("{0}")]
    NotOffered(&'static str),
    /// There is no strategy.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// One promise, and how it is put to the test.
struct Part {
    promise: &'static str,
    play: fn(&Subject<'_>, &mut Vec<String>) -> Result<(), Unplayable>,
}

impl Part {
    /// Plays the part. A strategy that panics has broken its promise like any other.
    fn add_to(&self, report: &mut Report, subject: &Subject<'_>) {
        let mut details = Vec::new();
        match catch_unwind(AssertUnwindSafe(|| (self.play)(subject, &mut details))) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => report.skipped.push(Finding { part: self.promise, detail: reason.to_string() }),
            Err(_) => details.push("panicked".to_owned()),
        }
        report.findings.extend(details.into_iter().map(|detail| Finding { part: self.promise, detail }));
    }
}

const PARTS: &[Part] = &[
    Part { promise: "blocks are apart, aligned and large enough", play: memory::sizes },
    Part { promise: "a request for nothing is refused", play: memory::nothing },
    Part { promise: "an absurd request is refused", play: memory::absurd },
    Part { promise: "a stale or foreign handle does no damage", play: memory::handles },
    Part { promise: "running out of memory is survived", play: memory::exhaustion },
    Part { promise: "the largest free block can be had", play: memory::largest_free },
    Part { promise: "trim gives back what is free", play: memory::trim },
    Part { promise: "close gives everything back, and again", play: memory::close },
    Part { promise: "random calls keep the books", play: memory::random },
    Part { promise: "the same calls give the same result", play: repetition::same_calls },
    Part { promise: "a fork is an equal and independent copy", play: repetition::fork },
    Part { promise: "a block in use on another stream is not reused", play: streams::used_elsewhere },
    Part { promise: "memory is not handed to another stream early", play: streams::other_stream },
    Part { promise: "random calls on busy streams reuse nothing early", play: streams::random },
    Part { promise: "a failing driver call loses nothing", play: faults::every_call },
];

/// Plays all parts.
#[must_use]
pub fn conform(subject: &Subject<'_>) -> Report {
    let mut report = Report::default();
    if let Err(reason) = playable(subject) {
        report.skipped.push(Finding { part: "everything", detail: reason.to_string() });
        return report;
    }
    for part in PARTS {
        part.add_to(&mut report, subject);
    }
    report
}

/// Plays all parts on a registered strategy.
#[must_use]
pub fn conform_spec(spec: &StrategySpec, device: &dyn Fn(u64) -> Box<dyn Device>) -> Report {
    conform(&Subject { build: &|props| spec.build(&Setup { props, limit: None }), device })
}

fn playable(subject: &Subject<'_>) -> Result<(), Unplayable> {
    let device = (subject.device)(memory::ROOMY);
    let strategy = (subject.build)(device.props())?;
    Ok(strategy.requires().check(device.props())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{
        STRATEGIES, Strategy,
        test_device::simulated,
        wrap::{Addressed, Checked},
    };

    #[test]
    fn every_registered_strategy_conforms() {
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
    fn wrappers_pass_everything_on() {
        let build = |props: &DeviceProps| {
            let spec = StrategySpec { name: "direct".to_owned(), parameters: String::new() };
            let direct = spec.build(&Setup { props, limit: None })?;
            Ok(Box::new(Addressed::new(Checked::new(direct))) as Box<dyn Strategy>)
        };
        assert_eq!(conform(&Subject { build: &build, device: &simulated }), Report::default());
    }

    #[test]
    fn what_cannot_be_played_is_skipped_with_a_reason() {
        let spec = StrategySpec { name: "direct".to_owned(), parameters: "x".to_owned() };
        let skipped = conform_spec(&spec, &simulated).skipped;
        assert_eq!(skipped[0].to_string(), "everything: strategy 'direct': takes no parameters, got 'x'");
    }
}
