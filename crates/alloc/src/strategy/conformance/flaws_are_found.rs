//! Proof that the suite can fail: it finds every flaw of [`Flawed`] that there is.

use super::*;
use crate::strategy::{
    Strategy,
    flawed::{Flaw, Flawed},
    test_device::simulated,
};

#[test]
fn an_allocator_without_a_flaw_conforms() {
    let build = |_: &DeviceProps| Ok(Box::new(Flawed::new(Flaw::None)) as Box<dyn Strategy>);
    assert_eq!(conform(&Subject { build: &build, device: &simulated }), Report::default());
}

#[test]
fn every_flaw_is_found_and_named() {
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
        (Flaw::ServesNothing, "a request for nothing was served"),
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
        let mut report = Report::default();
        let found = PARTS.iter().any(|part| {
            part.add_to(&mut report, &Subject { build: &build, device: &simulated });
            report.findings.iter().any(|finding| finding.to_string().contains(says))
        });
        assert!(found, "{flaw:?} gave {report:#?}");
    }
}
