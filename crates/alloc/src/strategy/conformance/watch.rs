//! A strategy under watch on a device of its own: calls are tried again when a driver error ends them, memory that comes
//! back too early is seen, and after a close the device must hold nothing.
//!
//! It knows blocks and streams and no program: a [`Bench`](super::Bench) plays scripts on it, and the stress room traces.

use super::Finding;
use crate::device::{CallKind, Clock, Device, DeviceError};
use crate::strategy::{
    Attempt, Block, Caller, Context, Freed, Request, Silent, Strategy, StrategyError,
    wrap::{Checked, Rule},
};
use oomph_base::{Address, Nanos, StreamId, Work};

/// How often a call that a driver error ends is tried: a failed call must be as if it had not been made, so that
/// sooner or later one succeeds.
const TRIES: usize = 4;

/// The part of a [`Finding`] about memory that was handed out while a stream still worked on it.
pub const EARLY_REUSE: &str = "early reuse";

/// A strategy under watch, and its device.
pub struct Watch {
    /// The strategy.
    pub strategy: Checked<Box<dyn Strategy>>,
    /// The device.
    pub device: Box<dyn Device>,
    /// Until when each stream is busy at least.
    busy_until: Vec<Nanos>,
    quarantine: Vec<Quarantined>,
    /// Driver errors that came through.
    errors: Vec<StrategyError>,
    findings: Vec<Finding>,
}

/// A freed range on which streams may still work.
#[derive(Clone, Debug)]
struct Quarantined {
    address: Address,
    end: Address,
    users: Vec<(StreamId, Nanos)>,
}

impl Watch {
    /// Watches a new strategy on a new device. Beside the default stream there is one for every handle.
    pub fn new(strategy: Box<dyn Strategy>, device: Box<dyn Device>, streams: &[u64]) -> Watch {
        let mut watch = Watch {
            strategy: Checked::new(strategy),
            device,
            busy_until: vec![Nanos::ZERO; streams.len() + 1],
            quarantine: Vec::new(),
            errors: Vec::new(),
            findings: Vec::new(),
        };
        for &known_as in streams {
            if let Err(error) = watch.on_device(|device| device.stream_create(known_as)) {
                watch.find("streams", format!("a stream cannot be made: {error}"));
            }
        }
        watch
    }

    /// A copy of the strategy on a device that has gone through the same; `None` where the strategy cannot be copied.
    #[must_use]
    pub fn fork(&self, device: Box<dyn Device>) -> Option<Watch> {
        Some(Watch {
            strategy: self.strategy.fork_checked()?,
            device,
            busy_until: self.busy_until.clone(),
            quarantine: self.quarantine.clone(),
            errors: self.errors.clone(),
            findings: Vec::new(),
        })
    }

    /// Asks for memory.
    pub fn alloc(&mut self, request: &Request) -> Result<Attempt, StrategyError> {
        let attempt = self.call(|strategy, cx| strategy.alloc(cx, request))?;
        if let Attempt::Served(block, _) = &attempt {
            self.look_for_early_reuse(block, request.stream);
        }
        Ok(attempt)
    }

    /// Gives a block back that `users` have worked with: until they have done what is queued on them by now, nobody
    /// else may have it.
    pub fn free(&mut self, block: Block, caller: Caller, users: &[StreamId]) -> Result<Freed, StrategyError> {
        let users: Vec<(StreamId, Nanos)> = users.iter().map(|&user| (user, self.busy_until[user.index()])).collect();
        let freed = self.call(|strategy, cx| strategy.free(cx, block, caller))?;
        let end = Address(block.address.0.saturating_add(block.size));
        self.quarantine.push(Quarantined { address: block.address, end, users });
        Ok(freed)
    }

    /// Queues work; `None` where the device cannot. Only of [`Work::Spin`] it is known for sure how long it takes.
    pub fn launch(
        &mut self,
        stream: StreamId,
        work: &Work,
        operands: &[(Address, u64)],
    ) -> Option<Result<(), StrategyError>> {
        self.device.compute()?;
        let begin = self.device.now().max(self.busy_until[stream.index()]);
        let launched = self.on_device(|device| match device.compute() {
            Some(compute) => compute.launch(stream, work, operands),
            None => Ok(()),
        });
        if let (Ok(()), Work::Spin { nanos }) = (&launched, work) {
            self.busy_until[stream.index()] = Nanos(begin.0.saturating_add(self.surely(*nanos).0));
        }
        Some(launched)
    }

    /// Closes the strategy, live blocks or not, and looks at what the device still holds.
    pub fn close(&mut self) {
        if let Err(error) = self.call(|strategy, cx| strategy.close(cx)) {
            self.find(Rule::Close.name(), format!("close failed: {error}"));
        }
        self.strategy.audit();
        let held = self.device.held_bytes();
        if held != 0 {
            self.find(Rule::Close.name(), format!("after a close the device still holds {held} bytes"));
        }
        let ledger = self.device.ledger();
        for (take, give) in CallKind::ALL.iter().filter_map(|&take| Some((take, take.given_back_by()?))) {
            let done = |kind| ledger.of(kind).count - ledger.of(kind).failures;
            if done(take) != done(give) {
                let detail = format!("after a close there were {} {take} and {} {give}", done(take), done(give));
                self.find(Rule::Close.name(), detail);
            }
        }
    }

    /// Notes a broken promise.
    pub fn find(&mut self, part: &'static str, detail: String) {
        self.findings.push(Finding { part, detail });
    }

    /// Whether anything was found so far.
    #[must_use]
    pub fn has_findings(&self) -> bool {
        !self.findings.is_empty() || self.strategy.violation_count() > 0
    }

    /// All that was found so far: what was noted, then what the strategy did to its contract.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let violations = self.strategy.violations().iter();
        let violated = violations.map(|breach| Finding { part: breach.rule.name(), detail: breach.to_string() });
        self.findings.iter().cloned().chain(violated).collect()
    }

    /// Driver errors so far, those that a second try cured included.
    pub fn errors(&self) -> &[StrategyError] {
        &self.errors
    }

    /// Makes a call, and again if a driver error ended it.
    pub fn call<R>(
        &mut self,
        mut call: impl FnMut(&mut Checked<Box<dyn Strategy>>, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let mut result = Err(StrategyError::ZeroBytes);
        for _ in 0..TRIES {
            result = call(&mut self.strategy, &mut Context { device: &mut *self.device, sink: &mut Silent });
            match &result {
                Err(error @ StrategyError::Device(_)) => self.errors.push(error.clone()),
                _ => break,
            }
        }
        result
    }

    /// The same for a call of the program's own to the device.
    pub fn on_device<R>(
        &mut self,
        mut call: impl FnMut(&mut dyn Device) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        self.call(|_, cx| Ok(call(cx.device)?))
    }

    /// How long work of that length takes at least by the host's clock. A real device has a clock of its own, and the
    /// two drift apart by some millionths.
    fn surely(&self, nanos: Nanos) -> Nanos {
        match self.device.props().clock {
            Clock::Virtual => nanos,
            Clock::Wall => Nanos(nanos.0 - nanos.0 / 1_000),
        }
    }

    /// Whether work that begins on `stream` now would meet work of another stream on the same memory.
    ///
    /// The strategy may have waited, or have made the stream wait: what counts is when the stream gets to work.
    fn look_for_early_reuse(&mut self, block: &Block, stream: StreamId) {
        let now = self.device.now();
        self.quarantine.retain(|range| range.users.iter().any(|&(_, until)| until > now));
        let end = Address(block.address.0.saturating_add(block.size));
        let until = self
            .quarantine
            .iter()
            .filter(|range| range.address < end && block.address < range.end)
            .flat_map(|range| &range.users)
            .filter(|&&(user, _)| user != stream)
            .map(|&(_, until)| until)
            .max();
        if let Some(until) = until
            && until > now
            && self.when_idle(stream) < until
        {
            let detail = format!("{} was handed to stream {stream} while another stream worked on it", block.address);
            self.find(EARLY_REUSE, detail);
        }
    }

    /// When `stream` has done all that is queued on it, waits included; the end of time where that cannot be known.
    fn when_idle(&mut self, stream: StreamId) -> Nanos {
        let Ok(event) = self.on_device(|device| device.event_create()) else { return Nanos(u64::MAX) };
        let recorded = self.on_device(|device| device.event_record(event, stream));
        let reached = self.on_device(|device| device.event_synchronize(event));
        let idle = self.device.now();
        let destroyed = self.on_device(|device| device.event_destroy(event));
        if [recorded, reached, destroyed].iter().all(Result::is_ok) { idle } else { Nanos(u64::MAX) }
    }
}
