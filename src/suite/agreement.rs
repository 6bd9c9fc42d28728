//! Runs a case on its device, on that device's answers and on a simulated device, and compares.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::AtomicBool,
};

use super::{Case, in_process::in_words};
use crate::{
    device::{DeviceProps, DeviceSpec, default_limit, wrap::capped},
    measure::{
        AgreementRecord,
        agreement::{Cast, Finding},
    },
    replay::{ReplayError, ReplayOptions},
    strategy::{Built, Setup},
};

/// Compares a case's device with a simulated one under the same cap on memory. What goes wrong is in the record; what
/// the case says about failing requests and wall-clock times is not looked at.
///
/// ```
/// use std::sync::atomic::AtomicBool;
/// use oomph::measure::agreement::Finding;
/// use oomph::suite::{CaseSettings, SuiteFile, compare};
/// let device: oomph::device::DeviceSpec = "sim:80GiB".parse()?;
/// let settings = CaseSettings { device: device.clone(), limit: None, seed: None, timeout: None };
/// let cases = SuiteFile::load("quick")?.cases(&settings)?;
/// let record = compare(&cases[0], &device, &AtomicBool::new(false));
/// assert_eq!((record.finding, record.agreement_percent), (Finding::Agrees, Some(100.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn compare(case: &Case, simulated: &DeviceSpec, stop: &AtomicBool) -> AgreementRecord {
    let simulated_device = simulated.to_string();
    let failed = |reason: &str| AgreementRecord::unmeasured(&case.label, &simulated_device, Finding::Failed, reason);
    // A panic is a bug of ours, but it must cost one case and not the run.
    catch_unwind(AssertUnwindSafe(|| {
        let cast = cast(case, simulated).map_err(|trouble| trouble.to_string())?;
        let options = ReplayOptions {
            pace: case.pace,
            without_work: case.without_work,
            repeat: case.label.repeat,
            stop: Some(stop),
            ..ReplayOptions::default()
        };
        Ok(AgreementRecord::measure(&case.label, &simulated_device, &*case.source, cast, &options))
    }))
    .unwrap_or_else(|panic| Err(in_words(&*panic)))
    .unwrap_or_else(|reason| failed(&reason))
}

fn cast(case: &Case, simulated: &DeviceSpec) -> Result<Cast, ReplayError> {
    let (device, simulated) = (case.device.open()?, simulated.open()?);
    let limit = case.label.limit;
    let build = |props: &DeviceProps| -> Built { case.strategy.build(&Setup { props, limit }) };
    let strategies = [build(device.props())?, build(device.props())?, build(simulated.props())?];
    let cap = limit.or_else(|| default_limit(&*device));
    Ok(Cast { device: capped(device, cap), simulated: capped(simulated, cap), strategies })
}
