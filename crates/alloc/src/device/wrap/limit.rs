//! A cap on the physical memory that a device hands out.

use super::{
    exchange::{Answer, Call, Reply},
    intercept::{Intercepted, Interceptor},
};
use crate::device::{Device, DeviceError};

/// A device that hands out at most so much physical memory, in whole pages, its context and libraries left out.
///
/// A stream-ordered pool grows when it sees fit, so its allocations pass: it is capped by the size it is made with.
///
/// ```
/// use oomph_alloc::device::{Device, sim::{SimConfig, SimDevice}, wrap::Limited};
/// let sim = SimDevice::new(SimConfig::default())?;
/// let mut device = Limited::to(64 << 20, Box::new(sim));
/// assert!(device.alloc(65 << 20).unwrap_err().is_out_of_memory());
/// assert_eq!(device.free_bytes(), 64 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Limited<P> = Intercepted<P, Limit>;

/// See [`Limited`].
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    bytes: u64,
}

impl<P> Limited<P> {
    /// Caps what `device` holds at `bytes`.
    pub fn to(bytes: u64, device: P) -> Self {
        Intercepted::new(device, Limit { bytes })
    }
}

/// The device, which hands out at most so much where there is a cap.
#[must_use]
pub fn capped(device: Box<dyn Device>, cap: Option<u64>) -> Box<dyn Device> {
    match cap {
        Some(cap) => Box::new(Limited::to(cap, device)),
        None => device,
    }
}

impl Limit {
    /// The cap.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    fn left<D: Device + ?Sized>(self, device: &D) -> u64 {
        self.bytes.saturating_sub(device.held_bytes())
    }
}

impl Interceptor for Limit {
    fn before<D: Device + ?Sized>(&mut self, call: &Call, device: &D) -> Result<(), DeviceError> {
        let growth = match *call {
            Call::Alloc { bytes } => device.growth_bytes(bytes),
            Call::Create { bytes } => bytes,
            _ => 0,
        };
        // An empty request is refused by the device itself, and not for want of memory.
        if growth > self.left(device) && call.requested_bytes() > 0 {
            return Err(DeviceError::OutOfMemory { call: call.kind(), requested: call.requested_bytes() });
        }
        Ok(())
    }

    fn after<D: Device + ?Sized>(&mut self, _call: &Call, answer: &mut Answer, device: &D) {
        if let Ok(Reply::MemoryInfo(info)) = answer {
            info.total = info.total.min(self.bytes.saturating_add(device.overhead_bytes()));
            info.free = info.free.min(self.left(device));
        }
    }

    fn free_bytes<D: Device + ?Sized>(&self, device: &D) -> u64 {
        device.free_bytes().min(self.left(device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        CallKind, VirtualMemory,
        sim::{SimConfig, SimDevice},
    };
    use oomph_base::MIB;

    fn limited(bytes: u64) -> Limited<Box<SimDevice>> {
        Limited::to(bytes, Box::new(SimDevice::new(SimConfig::default()).unwrap()))
    }

    #[test]
    fn what_is_held_never_exceeds_the_cap() {
        let mut device = limited(4 * MIB);
        let address = device.alloc(3 * MIB).unwrap();
        let refused = DeviceError::OutOfMemory { call: CallKind::MemAlloc, requested: 512 };
        assert_eq!(device.alloc(512), Err(refused), "three MiB take both pages");
        assert!(device.create(2 * MIB).unwrap_err().is_out_of_memory());
        device.free(address).unwrap();
        device.create(2 * MIB).unwrap();
        for _ in 0..4096 {
            device.alloc(512).unwrap();
        }
        assert!(device.alloc(512).unwrap_err().is_out_of_memory());
        assert_eq!(device.held_bytes(), 4 * MIB);
    }

    #[test]
    fn free_memory_is_told_up_to_the_cap() {
        let mut device = limited(10 * MIB);
        device.alloc(2 * MIB).unwrap();
        let info = device.memory_info().unwrap();
        assert_eq!((info.free, info.total), (8 * MIB, device.props().context_bytes + 10 * MIB));
        assert_eq!(device.free_bytes(), 8 * MIB);
        assert_eq!(device.props().total_bytes, 150_109_880_320);
        assert_eq!(limited(u64::MAX).memory_info().unwrap().total, 150_109_880_320);
    }

    #[test]
    fn wrappers_stack_over_a_device_of_any_kind() {
        let boxed: Box<dyn Device> = Box::new(SimDevice::new(SimConfig::default()).unwrap());
        let mut outer = Limited::to(8 * MIB, Box::new(Limited::to(4 * MIB, boxed)) as Box<dyn Device>);
        assert!(outer.alloc(6 * MIB).unwrap_err().is_out_of_memory());
        outer.alloc(4 * MIB).unwrap();
        assert_eq!((outer.free_bytes(), outer.calls().count), (0, 2));
    }

    #[test]
    fn a_refused_call_counts_as_a_failed_one() {
        let mut device = limited(MIB);
        device.alloc(1).unwrap_err();
        assert_eq!((device.calls().count, device.calls().failures), (1, 1));
        assert_eq!(device.ledger().of(CallKind::MemAlloc).failures, 1);
    }
}
