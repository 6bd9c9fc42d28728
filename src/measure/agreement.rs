//! Does a device agree with the simulated one? A case runs three times: on the device; on the answers that its driver
//! gave, where every decision must be the same; and freely on a simulated device, whose peaks are compared.
//!
//! Who wins a tie between two places depends on where the driver put them, and whether a block can be reused on whether
//! a kernel is done. So two free runs may differ although both are correct, and their difference is given as a share.

use serde::{Deserialize, Serialize};

use super::{CaseLabel, SCHEMA, digits};
use crate::{
    device::{Capabilities, Device},
    replay::{
        ReplayError, ReplayOptions,
        agreement::{CompletedRun, agree, perform},
    },
    strategy::{Silent, Strategy, async_pool},
    trace::Source,
};

oomph_base::named_enum! {
    /// What a comparison found.
    #[derive(Default)]
    pub enum AgreementFinding {
        /// Every decision is the same on the same answers.
        Agrees = "agrees",
        /// Some decision is not.
        Differs = "differs",
        /// The driver decides by itself: there are no answers to decide on, and only the free runs were compared.
        Unscripted = "unscripted",
        /// It was never run, and the reason says why.
        #[default]
        Skipped = "skipped",
        /// It was stopped from outside, and nothing was found.
        Interrupted = "interrupted",
        /// It could not be run to its end, and the reason says why.
        Failed = "failed",
    }
}

/// One row of a comparison. Unknown cells are empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgreementRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// What was run: see [`CaseLabel::workload`].
    pub workload: String,
    /// See [`CaseLabel::strategy`].
    pub strategy: String,
    /// See [`CaseLabel::device`].
    pub device: String,
    /// The simulated device of the free run, as users type it.
    pub simulated_device: String,
    /// See [`CaseLabel::limit`].
    pub limit_bytes: Option<u64>,
    /// See [`CaseLabel::seed`].
    pub seed: u64,
    /// What was found.
    pub finding: AgreementFinding,
    /// Why it was skipped or has failed.
    pub reason: String,
    /// Events of the run on the device.
    pub events: Option<u64>,
    /// Events at which the run on the same answers decided the same.
    pub events_agreed: Option<u64>,
    /// The share of those.
    #[serde(serialize_with = "digits::optional")]
    pub events_agreed_share: Option<f64>,
    /// The first difference in words, with its place in the trace.
    pub first_difference: Option<String>,
    /// Requests on the device that needed cached memory to be given back first.
    pub retries: Option<u64>,
    /// Requests that failed on the device.
    pub ooms: Option<u64>,
    /// Requests that failed on the simulated device.
    pub simulated_ooms: Option<u64>,
    /// Peak reserved on the device.
    pub peak_reserved_bytes: Option<u64>,
    /// Peak reserved on the simulated device.
    pub simulated_peak_reserved_bytes: Option<u64>,
    /// How much more the simulated device had reserved at its peak.
    #[serde(serialize_with = "digits::optional")]
    pub peak_reserved_difference_share: Option<f64>,
    /// Peak of what was in use on the device: blocks that were not yet reusable, or what the driver's pool counts as such.
    pub peak_active_bytes: Option<u64>,
    /// The same on the simulated device.
    pub simulated_peak_active_bytes: Option<u64>,
    /// How much more was in use on the simulated device at its peak.
    #[serde(serialize_with = "digits::optional")]
    pub peak_active_difference_share: Option<f64>,
}

/// Devices and strategies for the three runs, none of them used before.
pub struct AgreementSetup {
    /// Where the case runs.
    pub device: Box<dyn Device>,
    /// Where it runs freely.
    pub simulated: Box<dyn Device>,
    /// One strategy for each run: on the device, on its answers, on the simulated device.
    pub strategies: [Box<dyn Strategy>; 3],
}

impl AgreementRecord {
    /// The row of a case that has not been run.
    #[must_use]
    pub fn unmeasured(
        label: &CaseLabel,
        simulated_device: &str,
        finding: AgreementFinding,
        reason: &str,
    ) -> AgreementRecord {
        AgreementRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            simulated_device: simulated_device.to_owned(),
            limit_bytes: label.limit,
            seed: label.seed,
            finding,
            reason: reason.to_owned(),
            ..AgreementRecord::default()
        }
    }

    /// Runs a case three times and compares. What goes wrong is in the record.
    #[must_use]
    pub fn measure(
        label: &CaseLabel,
        simulated_device: &str,
        source: &dyn Source,
        setup: AgreementSetup,
        options: &ReplayOptions<'_>,
    ) -> AgreementRecord {
        let mut record = AgreementRecord::unmeasured(label, simulated_device, AgreementFinding::Agrees, "");
        if let Err(error) = record.run(source, setup, options) {
            let skipped = matches!(error, ReplayError::Incapable(_));
            record.finding = if skipped { AgreementFinding::Skipped } else { AgreementFinding::Failed };
            record.reason = error.to_string();
        }
        record
    }

    fn run(
        &mut self,
        source: &dyn Source,
        setup: AgreementSetup,
        options: &ReplayOptions<'_>,
    ) -> Result<(), ReplayError> {
        let AgreementSetup { mut device, mut simulated, strategies: [mut first, second, mut free] } = setup;
        let on_device = if first.requires().contains(Capabilities::STREAM_ORDERED_POOLS) {
            self.finding = AgreementFinding::Unscripted;
            perform(source, &mut *first, &mut *device, options, &mut Silent)?
        } else {
            let agreement = agree(source, [first, second], &mut *device, options)?;
            let events = agreement.performance.replayed.events;
            self.events_agreed = Some(agreement.agreed);
            self.events_agreed_share = share(agreement.agreed, events);
            if let Some(difference) = agreement.difference {
                self.finding = AgreementFinding::Differs;
                self.first_difference = Some(difference.to_string());
            }
            agreement.performance
        };
        self.events = Some(on_device.replayed.events);
        (self.retries, self.ooms) = (Some(on_device.stats.retries), Some(on_device.replayed.ooms));
        self.peak_reserved_bytes = Some(on_device.stats.peak.reserved);
        self.peak_active_bytes = Some(peak_used(&on_device));

        let in_free_run = perform(source, &mut *free, &mut *simulated, options, &mut Silent)?;
        self.simulated_ooms = Some(in_free_run.replayed.ooms);
        self.simulated_peak_reserved_bytes = Some(in_free_run.stats.peak.reserved);
        self.simulated_peak_active_bytes = Some(peak_used(&in_free_run));
        self.peak_reserved_difference_share = more(self.simulated_peak_reserved_bytes, self.peak_reserved_bytes);
        self.peak_active_difference_share = more(self.simulated_peak_active_bytes, self.peak_active_bytes);
        if on_device.replayed.interrupted || in_free_run.replayed.interrupted {
            self.finding = AgreementFinding::Interrupted;
        }
        Ok(())
    }
}

/// The driver's own figure where a pool of the driver's serves the blocks: it rounds as it likes.
fn peak_used(performance: &CompletedRun) -> u64 {
    let of_pool = performance.details.iter().find(|(name, _)| *name == async_pool::USED_HIGH);
    of_pool.map_or(performance.stats.peak.active, |&(_, bytes)| bytes)
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// How much more `value` is than `base`, as a share of it.
fn more(value: Option<u64>, base: Option<u64>) -> Option<f64> {
    Some(share(value?, base?)? - 1.0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::{
        base::{MIB, StreamId, TagId},
        device::{
            sim::{SimConfig, SimDevice},
            wrap::LimitedDevice,
        },
        strategy::{Setup, StrategySpec},
        trace::{Trace, TraceBuilder},
    };

    fn simulated() -> Box<dyn Device> {
        Box::new(SimDevice::new(SimConfig::default()).unwrap())
    }

    fn setup(specs: [&str; 3]) -> AgreementSetup {
        let (device, simulated) = (simulated(), simulated());
        let build = |spec| StrategySpec::from(spec).build(&Setup { props: device.props(), limit: None }).unwrap();
        let strategies = specs.map(build);
        AgreementSetup { device, simulated, strategies }
    }

    fn builder() -> Trace {
        let mut builder = TraceBuilder::new();
        let first = builder.alloc(3 * MIB, StreamId::DEFAULT, TagId(0));
        let second = builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0));
        builder.free(first);
        builder.free(second);
        builder.finish("builder")
    }

    fn measure(setup: AgreementSetup) -> AgreementRecord {
        let label = CaseLabel { workload: "builder".to_owned(), ..CaseLabel::default() };
        AgreementRecord::measure(&label, "sim", &builder(), setup, &ReplayOptions::default())
    }

    #[test]
    fn a_simulated_device_agrees_with_itself() {
        let record = measure(setup(["caching"; 3]));
        assert_eq!((record.finding, record.events, record.events_agreed), (AgreementFinding::Agrees, Some(4), Some(4)));
        assert_eq!((record.events_agreed_share, record.peak_reserved_difference_share), (Some(1.0), Some(0.0)));
        assert_eq!((record.peak_reserved_bytes, record.peak_active_bytes), (Some(50 * MIB), Some(33 * MIB)));
        assert_eq!(record.first_difference, None);
    }

    #[test]
    fn a_difference_has_its_share_and_its_words() {
        let record = measure(setup(["caching", "direct", "caching"]));
        assert_eq!((record.finding, record.events_agreed_share), (AgreementFinding::Differs, Some(0.0)));
        assert!(record.first_difference.unwrap().starts_with("event 0, alloc of 3145728 bytes"));
    }

    #[test]
    fn free_running_difference_is_a_share() {
        let record = measure(setup(["caching", "caching", "direct"]));
        assert_eq!((record.finding, record.simulated_peak_reserved_bytes), (AgreementFinding::Agrees, Some(33 * MIB)));
        assert!((record.peak_reserved_difference_share.unwrap() + 0.34).abs() < 1e-9);
        let mut small = setup(["caching"; 3]);
        small.simulated = Box::new(LimitedDevice::to(40 * MIB, small.simulated));
        let record = measure(small);
        assert_eq!((record.ooms, record.simulated_ooms), (Some(0), Some(1)));
    }

    #[test]
    fn the_drivers_own_pool_is_compared_by_its_peaks_alone() {
        let record = measure(setup(["async"; 3]));
        assert_eq!(
            (record.finding, record.events_agreed_share, record.events),
            (AgreementFinding::Unscripted, None, Some(4))
        );
        assert_eq!(record.peak_active_bytes, Some(33 * MIB));
        assert_eq!(record.peak_active_difference_share, Some(0.0));
        assert_eq!(record.peak_reserved_difference_share, Some(0.0));
    }

    #[test]
    fn unsupported_case_is_skipped_with_reason() {
        use crate::measure::fixture::tiny_device;
        let mut incapable = setup(["async"; 3]);
        incapable.device = Box::new(tiny_device(MIB));
        let record = measure(incapable);
        assert_eq!(
            (record.finding, record.events, record.peak_reserved_bytes),
            (AgreementFinding::Skipped, None, None)
        );
        assert_eq!(record.reason, "this device has no stream-ordered pools");
    }

    #[test]
    fn a_run_that_was_stopped_finds_nothing() {
        let stop = AtomicBool::new(true);
        let options = ReplayOptions { stop: Some(&stop), ..ReplayOptions::default() };
        let record =
            AgreementRecord::measure(&CaseLabel::default(), "sim", &builder(), setup(["caching"; 3]), &options);
        assert_eq!(record.finding, AgreementFinding::Interrupted);
    }
}
