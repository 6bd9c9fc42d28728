//! Measures a device: what every driver call costs by size, how long work takes by kind and size, and what is taken
//! before a program has allocated anything.
//!
//! Called by `doctor --calibrate`; the result becomes a profile of the simulated device. Nothing here is about CUDA: it
//! is asked through [`Device`], so that a simulated device can be measured too, which must give the profile it has.
//! One file a subject: `calls` and `work`.

mod calls;
mod work;

use super::{
    Device, DeviceError,
    cuda::Footprint,
    sim::{Cost, ProfileFile, Rates, WorkTime},
};

/// More small allocations on one page than any page holds.
const MOST_SMALL: u64 = 8192;

/// What was measured on a device.
#[derive(Clone, Debug)]
pub struct Calibration {
    costs: Vec<Cost>,
    work: Vec<WorkTime>,
    rates: Rates,
    small_allocations_per_page: Option<u64>,
}

/// Whether matrix products run on a device, or something else keeps its streams busy in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// They run, and are measured.
    Real,
    /// They do not, and the rates of a built-in profile are taken over.
    StoodInFor,
}

/// Measures a device on which nothing else happens. Everything that is taken is given back, but for a few streams.
pub fn calibrate(device: &mut dyn Device, products: Products) -> Result<Calibration, DeviceError> {
    let room = device.memory_info()?.free / 4;
    let costs = calls::measure(device, room)?;
    let work = work::measure(device, room, products)?;
    let rates = work::rates(device, &work)?;
    let small_allocations_per_page = small_allocations_per_page(device)?;
    Ok(Calibration { costs, work, rates, small_allocations_per_page })
}

impl Calibration {
    /// The profile of the measured device. Where products did not run, their rates are those of a built-in profile.
    #[must_use]
    pub fn into_profile(
        self,
        name: &str,
        driver: Option<String>,
        footprint: Footprint,
        device: &dyn Device,
    ) -> ProfileFile {
        let props = device.props();
        ProfileFile {
            name: name.to_owned(),
            vendor_name: props.name.clone(),
            driver,
            total_bytes: props.total_bytes,
            context_bytes: props.context_bytes,
            library_bytes: footprint.library_bytes,
            workspace_bytes: Some(footprint.workspace_bytes),
            kernel_bytes: Some(footprint.kernel_bytes),
            page_bytes: props.page_bytes,
            granularity_bytes: props.granularity_bytes,
            small_allocations_per_page: self.small_allocations_per_page,
            rates: self.rates,
            work: self.work,
            cost: self.costs,
        }
    }
}

/// How many allocations of 512 bytes the driver puts on one page; `None` where free memory never tells.
fn small_allocations_per_page(device: &mut dyn Device) -> Result<Option<u64>, DeviceError> {
    let mut taken = Vec::new();
    let mut free = device.memory_info()?.free;
    let mut at_last_drop = None;
    let mut seen = None;
    for number in 0..MOST_SMALL {
        taken.push(device.alloc(512)?);
        let now = device.memory_info()?.free;
        if now < free {
            free = now;
            seen = at_last_drop.map(|last| number - last);
            at_last_drop = Some(number);
            if seen.is_some() {
                break;
            }
        }
    }
    for address in taken {
        device.free(address)?;
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        CallKind,
        sim::{Profile, SimDevice},
    };

    fn calibrated(profile: Profile, products: Products) -> Calibration {
        let mut device = SimDevice::new(profile).unwrap();
        let calibration = calibrate(&mut device, products).unwrap();
        assert_eq!(device.held_bytes(), 0, "everything is given back");
        calibration
    }

    #[test]
    fn a_simulated_device_is_measured_as_it_was_made() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), Products::Real);
        assert_eq!(calibration.small_allocations_per_page, Some(4096));
        for cost in &calibration.costs {
            let kind = CallKind::ALL.iter().copied().find(|kind| kind.name() == cost.call).unwrap();
            let nanos = (cost.median_us * 1e3).round() as u64;
            assert_eq!(nanos, made.costs.cost(kind, cost.bytes).0, "{cost:?}");
        }
        let launch_us = made.costs.cost(CallKind::Launch, 0).0 as f64 / 1e3;
        for time in &calibration.work {
            // Many small kernels are queued no faster than they can be launched.
            let expected = (made.duration(&time.work).0 as f64 / 1e3).max(launch_us);
            assert!((time.median_us / expected - 1.0).abs() < 0.05, "{time:?}, made to take {expected} us");
        }
    }

    #[test]
    fn a_profile_that_was_measured_predicts_what_was_measured() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), Products::Real);
        let device = SimDevice::new(made).unwrap();
        let file = calibration.clone().into_profile("again", None, Footprint::default(), &device);
        let again = ProfileFile::parse(&file.to_toml().unwrap()).unwrap();
        for time in &calibration.work {
            let predicted = again.duration(&time.work).0 as f64 / 1e3;
            assert!((predicted / time.median_us - 1.0).abs() < 0.1, "{time:?}, predicted {predicted}");
        }
    }

    #[test]
    fn products_that_do_not_run_are_not_measured() {
        let made = Profile::h200();
        let calibration = calibrated(made.clone(), Products::StoodInFor);
        assert!(calibration.work.iter().all(|time| time.work.flops() == 0.0));
        assert!(!calibration.work.is_empty());
        assert_eq!(calibration.rates.half_flops_per_ns, made.rates.half_flops_per_ns);
    }
}
