//! Devices behind an [`Interceptor`], which sees every driver call and may refuse it. A cap on
//! physical memory ([`LimitedDevice`]) and a record of all calls (a `Vec` of [`DriverExchange`])
//! are the two interceptors here.

use std::ops::DerefMut;

use super::driver_call::{DriverAnswer, DriverCall, DriverReply, device_from_responses, value_of, with_driver_calls};
use crate::device::{
    CallKind, CallLedger, CallTally, Compute, Device, DeviceError, DeviceProps, MemoryInfo, Patterned, Patterns,
    PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage, StreamOrderedPools, Verified, VirtualMemory,
};
use oomph_base::{Address, EventId, Nanos, StreamId, Work};

/// Sees the calls to a device.
pub trait Interceptor: Send {
    /// Called before a driver call. An error refuses the call: the device does not receive it.
    fn before<D: Device + ?Sized>(&mut self, _call: &DriverCall, _device: &D) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called after a driver call, refused ones included. It may change the answer.
    fn after<D: Device + ?Sized>(&mut self, _call: &DriverCall, _answer: &mut DriverAnswer, _device: &D) {}

    /// What the caller sees as free memory without a driver call.
    fn free_bytes<D: Device + ?Sized>(&self, device: &D) -> u64 {
        device.free_bytes()
    }
}

/// So that the owner of an interceptor can lend it for a while.
impl<I: Interceptor> Interceptor for &mut I {
    fn before<D: Device + ?Sized>(&mut self, call: &DriverCall, device: &D) -> Result<(), DeviceError> {
        (**self).before(call, device)
    }

    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, device: &D) {
        (**self).after(call, answer, device);
    }

    fn free_bytes<D: Device + ?Sized>(&self, device: &D) -> u64 {
        (**self).free_bytes(device)
    }
}

/// A device behind an [`Interceptor`].
///
/// The device is held through any pointer: `Box<dyn Device>`, `Box<SimDevice>`, or `&mut
/// SimDevice`. Refused calls count in the ledger as failures that took no time.
#[derive(Debug)]
pub struct InterceptedDevice<P, I> {
    /// The device below.
    pub device: P,
    /// What stands between it and the caller.
    pub interceptor: I,
    refused: CallLedger,
}

impl<P, I> InterceptedDevice<P, I> {
    /// Puts `interceptor` in front of `device`.
    pub fn new(device: P, interceptor: I) -> Self {
        InterceptedDevice { device, interceptor, refused: CallLedger::default() }
    }
}

impl<P: DerefMut<Target: Device>, I: Interceptor> InterceptedDevice<P, I> {
    fn respond(&mut self, call: DriverCall) -> DriverAnswer {
        let mut answer = match self.interceptor.before(&call, &*self.device) {
            Ok(()) => call.make(&mut *self.device),
            Err(refusal) => {
                self.refused.note(call.kind(), Nanos::ZERO, true);
                Err(refusal)
            }
        };
        self.interceptor.after(&call, &mut answer, &*self.device);
        answer
    }
}

with_driver_calls! { device_from_responses! {
    [P, I] InterceptedDevice<P, I>, [P: DerefMut<Target: Device> + Send, I: Interceptor],
    {
        fn props(&self) -> &DeviceProps {
            self.device.props()
        }
        fn held_bytes(&self) -> u64 {
            self.device.held_bytes()
        }
        fn growth_bytes(&self, bytes: u64) -> u64 {
            self.device.growth_bytes(bytes)
        }
        fn free_bytes(&self) -> u64 {
            self.interceptor.free_bytes(&*self.device)
        }
        fn overhead_bytes(&self) -> u64 {
            self.device.overhead_bytes()
        }
        fn stream_handle(&self, stream: StreamId) -> u64 {
            self.device.stream_handle(stream)
        }
        fn now(&self) -> Nanos {
            self.device.now()
        }
        fn elapse(&mut self, time: Nanos) {
            self.device.elapse(time);
        }
        fn ledger(&self) -> CallLedger {
            let mut ledger = self.device.ledger();
            ledger.absorb(&self.refused);
            ledger
        }
        fn calls(&self) -> CallTally {
            self.device.calls() + self.refused.total()
        }
    },
    {
        fn verified(&mut self) -> Result<Verified, DeviceError> {
            self.device.patterns()?.verified()
        }
    }
}}

/// A device with a cap on physical memory, in whole pages, not counting its context and libraries.
///
/// Allocations from a stream-ordered pool pass, because a pool grows on its own: the size given at
/// its creation caps it.
///
/// ```
/// use oomph_alloc::device::{Device, sim::{SimConfig, SimDevice}, wrap::LimitedDevice};
/// let sim = SimDevice::new(SimConfig::default())?;
/// let mut device = LimitedDevice::to(64 << 20, Box::new(sim));
/// assert!(device.alloc(65 << 20).unwrap_err().is_out_of_memory());
/// assert_eq!(device.free_bytes(), 64 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type LimitedDevice<P> = InterceptedDevice<P, MemoryCap>;

/// The interceptor of a [`LimitedDevice`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryCap {
    bytes: u64,
}

impl<P> LimitedDevice<P> {
    /// Caps what `device` holds at `bytes`.
    pub fn to(bytes: u64, device: P) -> Self {
        InterceptedDevice::new(device, MemoryCap { bytes })
    }

    /// Another cap from now on. What is held beyond it stays.
    pub fn set_cap(&mut self, bytes: u64) {
        self.interceptor.bytes = bytes;
    }
}

/// The device, with a cap where there is one.
#[must_use]
pub fn capped(device: Box<dyn Device>, cap: Option<u64>) -> Box<dyn Device> {
    match cap {
        Some(cap) => Box::new(LimitedDevice::to(cap, device)),
        None => device,
    }
}

impl MemoryCap {
    fn left<D: Device + ?Sized>(self, device: &D) -> u64 {
        self.bytes.saturating_sub(device.held_bytes())
    }
}

impl Interceptor for MemoryCap {
    fn before<D: Device + ?Sized>(&mut self, call: &DriverCall, device: &D) -> Result<(), DeviceError> {
        let growth = match *call {
            DriverCall::Alloc { bytes } => device.growth_bytes(bytes),
            DriverCall::Create { bytes } => bytes,
            _ => 0,
        };
        // The device itself refuses an empty request, and not because memory has run out.
        if growth > self.left(device) && call.requested_bytes() > 0 {
            return Err(DeviceError::OutOfMemory { call: call.kind(), requested: call.requested_bytes() });
        }
        Ok(())
    }

    fn after<D: Device + ?Sized>(&mut self, _call: &DriverCall, answer: &mut DriverAnswer, device: &D) {
        if let Ok(DriverReply::MemoryInfo(info)) = answer {
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
    use crate::device::sim::{SimConfig, SimDevice};
    use crate::device::wrap::{DriverExchange, stand_in::CallLog};
    use oomph_base::MIB;

    fn limited(bytes: u64) -> LimitedDevice<Box<SimDevice>> {
        LimitedDevice::to(bytes, Box::new(SimDevice::new(SimConfig::default()).unwrap()))
    }

    #[test]
    fn held_memory_never_exceeds_the_cap() {
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
    fn free_memory_is_reported_up_to_the_cap() {
        let mut device = limited(10 * MIB);
        device.alloc(2 * MIB).unwrap();
        let info = device.memory_info().unwrap();
        assert_eq!((info.free, info.total), (8 * MIB, device.props().context_bytes + 10 * MIB));
        assert_eq!(device.free_bytes(), 8 * MIB);
        assert_eq!(device.props().total_bytes, 150_109_880_320);
        assert_eq!(limited(u64::MAX).memory_info().unwrap().total, 150_109_880_320);
    }

    #[test]
    fn wrappers_stack() {
        let boxed: Box<dyn Device> = Box::new(SimDevice::new(SimConfig::default()).unwrap());
        let mut outer = LimitedDevice::to(8 * MIB, Box::new(LimitedDevice::to(4 * MIB, boxed)) as Box<dyn Device>);
        assert!(outer.alloc(6 * MIB).unwrap_err().is_out_of_memory());
        outer.alloc(4 * MIB).unwrap();
        assert_eq!((outer.free_bytes(), outer.calls().count), (0, 2));
    }

    #[test]
    fn refused_calls_count_as_failures() {
        let mut device = limited(MIB);
        device.alloc(1).unwrap_err();
        assert_eq!((device.calls().count, device.calls().failures), (1, 1));
        assert_eq!(device.ledger().of(CallKind::MemAlloc).failures, 1);
    }

    #[test]
    fn calls_are_recorded_in_order_with_their_answers() {
        let mut sim = SimDevice::new(SimConfig::default()).unwrap();
        let mut device = InterceptedDevice::new(&mut sim, CallLog::default());
        let address = device.alloc(512).unwrap();
        let refused = device.free(Address(1)).unwrap_err();
        let expected = [
            DriverExchange { call: DriverCall::Alloc { bytes: 512 }, answer: Ok(DriverReply::Address(address)) },
            DriverExchange { call: DriverCall::Free { address: Address(1) }, answer: Err(refused) },
        ];
        assert_eq!(device.interceptor.0, expected);
        assert_eq!(sim.calls().count, 2, "the device below is still there");
    }
}
