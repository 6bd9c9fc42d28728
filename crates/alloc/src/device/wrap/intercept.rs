//! A device with a listener in front of it, who sees every call and may refuse it.

use std::ops::DerefMut;

use super::{
    exchange::{Answer, Call},
    responder::Responder,
};
use crate::device::{CallLedger, CallTally, Device, DeviceError, DeviceProps, Verified};
use oomph_base::{Nanos, StreamId};

/// Listens to the calls that a device gets.
pub trait Interceptor: Send {
    /// Before a call. An error refuses it: the device never hears of it.
    fn before<D: Device + ?Sized>(&mut self, call: &Call, device: &D) -> Result<(), DeviceError>;

    /// After a call, refused ones included. The answer may be changed.
    fn after<D: Device + ?Sized>(&mut self, call: &Call, answer: &mut Answer, device: &D);

    /// What the caller is told of free memory without a driver call.
    fn free_bytes<D: Device + ?Sized>(&self, device: &D) -> u64 {
        device.free_bytes()
    }
}

/// A device behind an [`Interceptor`].
///
/// The device is held through any pointer: `Box<dyn Device>`, `Box<SimDevice>`, or `&mut SimDevice` to get at it
/// afterwards. Refused calls count in the ledger as failures that took no time.
#[derive(Clone, Debug)]
pub struct Intercepted<P, I> {
    device: P,
    interceptor: I,
    refused: CallLedger,
}

impl<P, I> Intercepted<P, I> {
    /// Puts `interceptor` in front of `device`.
    pub fn new(device: P, interceptor: I) -> Self {
        Intercepted { device, interceptor, refused: CallLedger::default() }
    }

    /// Who listens.
    pub fn interceptor(&self) -> &I {
        &self.interceptor
    }

    /// Who listens, to be changed.
    pub fn interceptor_mut(&mut self) -> &mut I {
        &mut self.interceptor
    }

    /// Takes the two apart.
    pub fn into_parts(self) -> (P, I) {
        (self.device, self.interceptor)
    }
}

impl<P, I> Responder for Intercepted<P, I>
where
    P: DerefMut<Target: Device> + Send,
    I: Interceptor,
{
    fn respond(&mut self, call: Call) -> Answer {
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

    fn verified(&mut self) -> Result<Verified, DeviceError> {
        self.device.patterns().map_or_else(|| Ok(Verified::default()), |patterns| patterns.verified())
    }
}
