//! A device that keeps a list of what it was asked and what it answered.

use super::{
    exchange::{Answer, Call, Exchange},
    intercept::{Intercepted, Interceptor},
};
use crate::device::{Device, DeviceError};

/// A device whose calls and answers are kept, to be read or [replayed](super::Scripted).
pub type Logged<P> = Intercepted<P, Log>;

/// The calls and answers so far, in order.
#[derive(Clone, Debug, Default)]
pub struct Log {
    exchanges: Vec<Exchange>,
}

impl<P> Logged<P> {
    /// Keeps what `device` is asked from now on.
    pub fn over(device: P) -> Self {
        Intercepted::new(device, Log::default())
    }
}

impl Log {
    /// All calls and their answers.
    #[must_use]
    pub fn exchanges(&self) -> &[Exchange] {
        &self.exchanges
    }

    /// The list itself, for a script.
    #[must_use]
    pub fn into_exchanges(self) -> Vec<Exchange> {
        self.exchanges
    }
}

impl Interceptor for Log {
    fn before<D: Device + ?Sized>(&mut self, _call: &Call, _device: &D) -> Result<(), DeviceError> {
        Ok(())
    }

    fn after<D: Device + ?Sized>(&mut self, call: &Call, answer: &mut Answer, _device: &D) {
        self.exchanges.push(Exchange { call: call.clone(), answer: answer.clone() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        sim::{SimConfig, SimDevice},
        wrap::Reply,
    };
    use oomph_base::Address;

    #[test]
    fn calls_are_kept_in_order_with_their_answers() {
        let mut sim = SimDevice::new(SimConfig::default()).unwrap();
        let mut device = Logged::over(&mut sim);
        let address = device.alloc(512).unwrap();
        let refused = device.free(Address(1)).unwrap_err();
        let expected = [
            Exchange { call: Call::Alloc { bytes: 512 }, answer: Ok(Reply::Address(address)) },
            Exchange { call: Call::Free { address: Address(1) }, answer: Err(refused) },
        ];
        assert_eq!(device.interceptor().exchanges(), expected);
        assert_eq!(sim.calls().count, 2, "the device below is still there");
    }
}
