//! A strategy under observation, on its own device. Calls that fail with a driver error are
//! retried, early reuse is detected, and after a close the device must hold nothing.
//!
//! It knows blocks and streams but no program: a [`ConformanceProgram`](super::ConformanceProgram)
//! runs scripts on it, `stress` runs traces.

use crate::device::{CallKind, Device, DeviceClock, DeviceError};
use crate::strategy::{
    Attempt, Block, Caller, Context, Freed, Request, Silent, Strategy, StrategyError,
    wrap::{CheckedStrategy, ConformanceFinding, rules},
};
use oomph_base::{Address, Nanos, StreamId, Work};

/// How often a call that fails with a driver error is tried. A failed call must have no effect, so
/// a retry succeeds.
const TRIES: usize = 4;

/// The part of a [`ConformanceFinding`] about memory that was handed out while a stream still
/// worked on it.
pub const EARLY_REUSE: &str = "early reuse";

/// A strategy under observation, and its device.
pub struct ObservedStrategy {
    /// The strategy.
    pub strategy: CheckedStrategy<Box<dyn Strategy>>,
    /// The device.
    pub device: Box<dyn Device>,
    /// The earliest time at which each stream can be idle.
    busy_until: Vec<Nanos>,
    quarantine: Vec<QuarantinedRange>,
    /// Driver errors that the strategy returned, including those after which a retry succeeded.
    pub errors: Vec<StrategyError>,
    findings: Vec<ConformanceFinding>,
}

/// A freed range on which streams may still work.
#[derive(Clone, Debug)]
struct QuarantinedRange {
    address: Address,
    end: Address,
    users: Vec<(StreamId, Nanos)>,
}

impl ObservedStrategy {
    /// Observes a new strategy on a new device, with the default stream and one stream per handle.
    pub fn new(strategy: Box<dyn Strategy>, device: Box<dyn Device>, streams: &[u64]) -> ObservedStrategy {
        let mut watch = ObservedStrategy {
            strategy: CheckedStrategy::new(strategy),
            device,
            busy_until: vec![Nanos::ZERO; streams.len() + 1],
            quarantine: Vec::new(),
            errors: Vec::new(),
            findings: Vec::new(),
        };
        for &known_as in streams {
            if let Err(error) = watch.on_device(|device| device.stream_create(known_as)) {
                watch.find("streams", format!("a stream cannot be created: {error}"));
            }
        }
        watch
    }

    /// A copy of the strategy on a device in the same state; `None` if the strategy cannot be
    /// copied.
    #[must_use]
    pub fn fork(&self, device: Box<dyn Device>) -> Option<ObservedStrategy> {
        Some(ObservedStrategy {
            strategy: self.strategy.fork_checked()?,
            device,
            busy_until: self.busy_until.clone(),
            quarantine: self.quarantine.clone(),
            errors: self.errors.clone(),
            findings: Vec::new(),
        })
    }

    /// Requests memory.
    pub fn alloc(&mut self, request: &Request) -> Result<Attempt, StrategyError> {
        let attempt = self.call(|strategy, cx| strategy.alloc(cx, request))?;
        if let Attempt::Served(block, _) = &attempt {
            self.check_early_reuse(block, request.stream);
        }
        Ok(attempt)
    }

    /// Frees a block that `users` have used. It must not be reused before they have finished the
    /// work queued so far.
    pub fn free(&mut self, block: Block, caller: Caller, users: &[StreamId]) -> Result<Freed, StrategyError> {
        let users: Vec<(StreamId, Nanos)> = users.iter().map(|&user| (user, self.busy_until[user.index()])).collect();
        let freed = self.call(|strategy, cx| strategy.free(cx, block, caller))?;
        let end = Address(block.address.0.saturating_add(block.size));
        self.quarantine.push(QuarantinedRange { address: block.address, end, users });
        Ok(freed)
    }

    /// Queues work; `None` if the device cannot. Only the duration of [`Work::Spin`] is known.
    pub fn launch(
        &mut self,
        stream: StreamId,
        work: &Work,
        operands: &[(Address, u64)],
    ) -> Option<Result<(), StrategyError>> {
        self.device.compute().ok()?;
        let begin = self.device.now().max(self.busy_until[stream.index()]);
        let launched = self.on_device(|device| device.compute()?.launch(stream, work, operands));
        if let (Ok(()), Work::Spin { nanos }) = (&launched, work) {
            self.busy_until[stream.index()] = Nanos(begin.0.saturating_add(self.least_duration(*nanos).0));
        }
        Some(launched)
    }

    /// Whether no stream works.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let now = self.device.now();
        self.busy_until.iter().all(|&until| until <= now)
    }

    /// Closes the strategy and checks what the device still holds.
    pub fn close(&mut self) {
        if let Err(error) = self.call(|strategy, cx| strategy.close(cx)) {
            self.find(rules::CLOSE, format!("close failed: {error}"));
        }
        self.strategy.audit();
        let held = self.device.held_bytes();
        if held != 0 {
            self.find(rules::CLOSE, format!("after a close the device still holds {held} bytes"));
        }
        let ledger = self.device.ledger();
        for (take, give) in CallKind::ALL.iter().filter_map(|&take| Some((take, take.given_back_by()?))) {
            let done = |kind| ledger.of(kind).count - ledger.of(kind).failures;
            if done(take) != done(give) {
                let detail = format!("after a close there were {} {take} and {} {give}", done(take), done(give));
                self.find(rules::CLOSE, detail);
            }
        }
    }

    /// Records a finding.
    pub fn find(&mut self, check: &'static str, detail: String) {
        self.findings.push(ConformanceFinding { check, detail });
    }

    /// Whether there are findings.
    #[must_use]
    pub fn has_findings(&self) -> bool {
        !self.findings.is_empty() || self.strategy.violation_count() > 0
    }

    /// The findings so far, then the violations of the contract.
    #[must_use]
    pub fn findings(&self) -> Vec<ConformanceFinding> {
        self.findings.iter().chain(self.strategy.violations()).cloned().collect()
    }

    /// Makes a call, and retries it after a driver error.
    pub fn call<R>(
        &mut self,
        mut call: impl FnMut(&mut CheckedStrategy<Box<dyn Strategy>>, &mut Context<'_>) -> Result<R, StrategyError>,
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

    /// The same for a device call of the program.
    pub fn on_device<R>(
        &mut self,
        mut call: impl FnMut(&mut dyn Device) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        self.call(|_, cx| Ok(call(cx.device)?))
    }

    /// The least time that work takes by the host's clock. The clock of a real device drifts by
    /// some millionths.
    fn least_duration(&self, nanos: Nanos) -> Nanos {
        match self.device.props().clock {
            DeviceClock::Virtual => nanos,
            DeviceClock::Wall => Nanos(nanos.0 - nanos.0 / 1_000),
        }
    }

    /// Checks whether work that begins on `stream` now could overlap work of another stream on the
    /// same memory.
    ///
    /// The strategy may have waited, or have made the stream wait, so the time at which the stream
    /// can start counts.
    fn check_early_reuse(&mut self, block: &Block, stream: StreamId) {
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

    /// When `stream` has finished the queued work and waits; `u64::MAX` if that is unknown.
    fn when_idle(&mut self, stream: StreamId) -> Nanos {
        let Ok(event) = self.on_device(|device| device.event_create()) else { return Nanos(u64::MAX) };
        let recorded = self.on_device(|device| device.event_record(event, stream));
        let reached = self.on_device(|device| device.event_synchronize(event));
        let idle = self.device.now();
        let destroyed = self.on_device(|device| device.event_destroy(event));
        if [recorded, reached, destroyed].iter().all(Result::is_ok) { idle } else { Nanos(u64::MAX) }
    }
}
