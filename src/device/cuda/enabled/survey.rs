//! A look at the machine's CUDA, step by step, for `doctor`.

use super::{
    super::{Finding, Verdict},
    CudaDevice, library,
};
use crate::{
    device::{Device, DeviceError},
    unit::{Bytes, MIB, StreamId},
};

/// Looks at the library, the driver, every GPU, and whether the kernels run there. Ends with the first step that the
/// later ones need and that fails.
#[must_use]
pub fn survey() -> Vec<Finding> {
    let mut findings = Vec::new();
    let library = if library::is_present() {
        Ok("the driver's library was found".to_owned())
    } else {
        Err((Verdict::Missing, "libcuda.so.1 was not found: no NVIDIA driver on this machine".to_owned()))
    };
    let present = library.is_ok();
    findings.push(Finding::of("cuda library", library));
    if !present {
        return findings;
    }
    let driver = library::initialise().map_err(|reason| (Verdict::Broken, reason)).map(|()| match library::version() {
        Some((major, minor)) => format!("supports CUDA up to {major}.{minor}"),
        None => "does not tell its version".to_owned(),
    });
    let starts = driver.is_ok();
    findings.push(Finding::of("cuda driver", driver));
    if !starts {
        return findings;
    }
    match library::device_count() {
        Ok(0) => {
            findings.push(Finding::of("cuda devices", Err((Verdict::Missing, "the driver sees no GPU".to_owned()))))
        }
        Ok(count) => findings.extend((0..count).flat_map(look_at)),
        Err(reason) => findings.push(Finding::of("cuda devices", Err((Verdict::Broken, reason)))),
    }
    findings
}

/// One GPU and its kernels.
fn look_at(ordinal: u32) -> Vec<Finding> {
    let subject = format!("cuda:{ordinal}");
    let mut device = match CudaDevice::open(ordinal) {
        Ok(device) => device,
        Err(reason) => return vec![Finding::of(subject, Err((Verdict::Broken, reason.to_string())))],
    };
    let props = device.props();
    let words = format!(
        "{}, {} of which {} are free; pages of {}; can: {}",
        props.name,
        Bytes(props.total_bytes),
        Bytes(device.free_bytes()),
        Bytes(props.page_bytes),
        props.capabilities
    );
    let kernels = match round_trip(&mut device) {
        Ok(0) => Ok("load and run: a pattern was written and found again".to_owned()),
        Ok(words) => Err((Verdict::Broken, format!("{words} words of a pattern were lost"))),
        Err(error) => Err((Verdict::Broken, error.to_string())),
    };
    vec![Finding::of(subject.clone(), Ok(words)), Finding::of(format!("{subject} kernels"), kernels)]
}

/// Writes a pattern and counts the words that are not found again; another pattern must not be found.
fn round_trip(device: &mut CudaDevice) -> Result<u64, DeviceError> {
    const BYTES: u64 = MIB;
    let stream = StreamId::DEFAULT;
    let address = device.alloc(BYTES)?;
    device.fill(stream, address, BYTES, 1)?;
    let lost = device.verify(stream, address, BYTES, 1)?;
    let seen_wrongly = BYTES / 8 - device.verify(stream, address, BYTES, 2)?;
    device.free(address)?;
    Ok(lost + seen_wrongly)
}
