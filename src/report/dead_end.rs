//! What `advise` says about a recording that ends because memory ran out.

use std::fmt::Write as _;

use super::threshold_table::in_mebibytes;
use crate::{
    answer::advise::{Advice, Reason},
    base::Bytes,
    trace::torch::{DeadEnd, Holder, OwnLimit},
};

/// The answer in one line.
pub(super) fn headline(advice: &Advice) -> &'static str {
    if advice.reasons.iter().any(|reason| matches!(reason, Reason::Leak { .. })) {
        return match advice.changes {
            true => "it ran out of memory because it leaks: mend that. This setting only gets a little further:",
            false => "it ran out of memory because it leaks: mend that. No setting helps",
        };
    }
    match (advice.changes, advice.fits) {
        (true, Some(true)) => {
            "it ran out of memory; another setting gets past that point. Paste this before you start the program:"
        }
        (true, Some(false)) => "it ran out of memory, and no setting gets past that point; this one comes nearest:",
        (true, None) => {
            "it ran out of memory; another setting needs less up to that point. Paste this before you start the program:"
        }
        (false, Some(true)) => {
            "it ran out of memory where it was recorded; in this much it gets past that point as it is set"
        }
        (false, _) => "it ran out of memory, and no setting helps",
    }
}

/// How the recorded program failed.
pub(super) fn failure(end: &DeadEnd) -> String {
    let site = end.site.as_ref().map(|site| format!(" at {site}")).unwrap_or_default();
    let refused = match end.own_limit {
        Some(OwnLimit { at_least_bytes: least, below_bytes: most }) => format!(
            "; refused by its own limit, a memory fraction of {} to {}: give it by --limit",
            in_mebibytes(Some(least)),
            in_mebibytes(Some(most))
        ),
        None => format!(", {} free on the device", Bytes(end.device_free_bytes)),
    };
    format!(
        "{} asked for{site}; {} in use, {} cached in pieces too small{refused}",
        Bytes(end.requested_bytes),
        Bytes(end.allocated_bytes),
        Bytes(end.cached_bytes())
    )
}

/// In use at the failure from this share of the memory on, settings cannot gain much.
const FULL: f64 = 0.9;

/// What can be said about the time after the failure.
pub(super) fn beyond(advice: &Advice, end: &DeadEnd) -> String {
    let mut words = "what it does next is not in the recording".to_owned();
    let Some(limit) = advice.limit_bytes else { return words };
    if let (Some(true), Some(needed)) = (advice.fits, advice.needed_bytes) {
        let left = limit.saturating_sub(needed);
        let share = left as f64 / limit.max(1) as f64 * 100.0;
        let _ = write!(words, "; {} ({share:.1} %) are left for it", in_mebibytes(Some(left)));
    }
    let used = end.allocated_bytes as f64 / limit.max(1) as f64;
    if used >= FULL {
        let _ = write!(
            words,
            ". {:.0} % of the memory was in use: settings alone may not do (see `oomph techniques`, or a smaller batch)",
            used * 100.0
        );
    }
    words
}

/// What one call site held.
pub(super) fn share(holder: &Holder) -> String {
    let blocks = if holder.blocks == 1 { "block" } else { "blocks" };
    format!("{} in {} {blocks}: {}", Bytes(holder.bytes), holder.blocks, holder.site)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        report::{Medium, advice},
    };

    /// Advice to change the settings, as `advise` gives it.
    fn advised() -> Advice {
        Advice {
            source: "run.pickle".to_owned(),
            recommended: "expandable_segments:True".to_owned(),
            changes: true,
            export: Some("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".to_owned()),
            needed_now_bytes: Some(6820 * MIB),
            needed_bytes: Some(6184 * MIB),
            saved_bytes: 636 * MIB,
            ..Advice::default()
        }
    }

    #[test]
    fn a_recording_that_died_says_how_and_that_the_rest_is_unknown() {
        let end = DeadEnd {
            requested_bytes: 700 * MIB,
            site: Some("torch/nn/linear.py:7 forward from train.py:45 <module>".to_owned()),
            allocated_bytes: 6300 * MIB,
            reserved_bytes: 6600 * MIB,
            device_free_bytes: 200 * MIB,
            room_bytes: Some(6800 * MIB),
            own_limit: None,
            holders: vec![Holder { site: "model.py:3 f".to_owned(), blocks: 24, bytes: 2048 * MIB }],
        };
        let limit_bytes = end.room_bytes;
        let died = Advice { dead_end: Some(end.clone()), limit_bytes, fits: Some(true), ..advised() };
        let text = advice(&died, 1, Medium::Terminal(None));
        let said: Vec<&str> = text.lines().take(9).map(str::trim_end).collect();
        insta::assert_snapshot!(said.join("\n"), @"
        run.pickle: it ran out of memory; another setting gets past that point. Paste this before you start the program:

            export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

          it ran out     700 MiB asked for at torch/nn/linear.py:7 forward from train.py:45 <module>; 6.15 GiB in use, 300 MiB cached in pieces too small, 200 MiB free on the device
          in use by      2.00 GiB in 24 blocks: model.py:3 f
          memory needed  6,184 MiB instead of 6,820 MiB: 636 MiB less (9.3 %), up to there
          there is       6,800 MiB for the allocator: enough with this setting, too little with the current ones
          after that     what it does next is not in the recording; 616 MiB (9.1 %) are left for it. 93 % of the memory was in use: settings alone may not do (see `oomph techniques`, or a smaller batch)
        ");
        let leak = Reason::Leak { bytes_per_step: 1e9, grower: None };
        let leaky = advice(&Advice { reasons: vec![leak], ..died.clone() }, 1, Medium::Terminal(None));
        assert!(leaky.starts_with("run.pickle: it ran out of memory because it leaks: mend that."), "{leaky}");
        let kept = Advice { changes: false, export: None, ..died.clone() };
        let headline = |fits| headline(&Advice { fits, ..kept.clone() });
        assert!(headline(Some(true)).contains("in this much it gets past that point as it is set"));
        assert!(headline(Some(false)).ends_with("no setting helps"));
        let own_limit = Some(OwnLimit { at_least_bytes: 6600 * MIB, below_bytes: 7300 * MIB });
        let own_limit = DeadEnd { device_free_bytes: 9000 * MIB, room_bytes: None, own_limit, ..end };
        let text = advice(&Advice { dead_end: Some(own_limit), fits: None, ..died }, 1, Medium::Terminal(None));
        assert!(text.contains("a memory fraction of 6,600 MiB to 7,300 MiB: give it by --limit"), "{text}");
        assert!(text.contains("another setting needs less up to that point"), "{text}");
    }
}
