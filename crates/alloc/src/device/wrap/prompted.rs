//! A scripted device whose script arrives while it is being read.

use super::{
    exchange::{Answer, Call, Exchange},
    responder::Responder,
    script::{Manner, Mismatch},
    scripted::Scripted,
};
use crate::device::{CallLedger, CallTally, DeviceError, DeviceProps, Verified};
use oomph_base::{Nanos, StreamId};

/// A device that answers exactly as another one did, or does at this moment, and holds only the part of the script that
/// is being read: a run of any length can be followed.
///
/// ```
/// use oomph_alloc::device::{Device, sim::{SimConfig, SimDevice}, wrap::{Logged, Prompted}};
/// let mut logged = Logged::over(Box::new(SimDevice::new(SimConfig::default())?));
/// let addresses = [logged.alloc(512)?, logged.alloc(4096)?];
/// let props = logged.props().clone();
/// let mut pages = logged.into_parts().1.into_exchanges().into_iter();
/// let mut device = Prompted::new(props, move || pages.next().into_iter().collect());
/// assert_eq!([device.alloc(512)?, device.alloc(4096)?], addresses);
/// assert!(device.alloc(512).is_err(), "the script has ended");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Prompted<F> {
    scripted: Scripted,
    prompt: F,
}

impl<F: FnMut() -> Vec<Exchange>> Prompted<F> {
    /// A device that says `props` of itself and asks `prompt` for more whenever its script has been read; nothing more
    /// is the end.
    pub fn new(props: DeviceProps, prompt: F) -> Prompted<F> {
        Prompted { scripted: Scripted::new(props, Manner::Strict), prompt }
    }

    /// The first call that was not what the script says.
    #[must_use]
    pub fn mismatch(&self) -> Option<&Mismatch> {
        self.scripted.mismatch()
    }

    /// The next call that the script expects, if it has not ended.
    pub fn next_expected(&mut self) -> Option<&Call> {
        self.turn_the_page();
        self.scripted.next_expected()
    }

    fn turn_the_page(&mut self) {
        if self.scripted.unread() == 0 {
            self.scripted.clear_script();
            for exchange in (self.prompt)() {
                self.scripted.push(exchange.into());
            }
        }
    }
}

impl<F: FnMut() -> Vec<Exchange> + Send> Responder for Prompted<F> {
    fn respond(&mut self, call: Call) -> Answer {
        self.turn_the_page();
        self.scripted.respond(call)
    }

    fn props(&self) -> &DeviceProps {
        Responder::props(&self.scripted)
    }

    fn held_bytes(&self) -> u64 {
        Responder::held_bytes(&self.scripted)
    }

    fn growth_bytes(&self, bytes: u64) -> u64 {
        Responder::growth_bytes(&self.scripted, bytes)
    }

    fn free_bytes(&self) -> u64 {
        Responder::free_bytes(&self.scripted)
    }

    fn overhead_bytes(&self) -> u64 {
        Responder::overhead_bytes(&self.scripted)
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        Responder::stream_handle(&self.scripted, stream)
    }

    fn now(&self) -> Nanos {
        Responder::now(&self.scripted)
    }

    fn elapse(&mut self, time: Nanos) {
        Responder::elapse(&mut self.scripted, time);
    }

    fn ledger(&self) -> CallLedger {
        Responder::ledger(&self.scripted)
    }

    fn calls(&self) -> CallTally {
        Responder::calls(&self.scripted)
    }

    fn verified(&mut self) -> Result<Verified, DeviceError> {
        Responder::verified(&mut self.scripted)
    }
}
