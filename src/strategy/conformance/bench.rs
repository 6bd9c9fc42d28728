//! A strategy under watch on a device of its own, and a program that uses it.

use super::{Step, Subject};
use crate::{
    device::{CallKind, Clock, Device, DeviceError},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, Outcome, Refusal, Request, Shortage, Silent, SpecError, Stats,
        Strategy, StrategyError, wrap::Checked,
    },
    unit::{Address, Nanos, SiteId, StreamId, ThreadId, Work},
};

/// How often a call that a driver error ends is tried: a failed call must be as if it had not been made, so that
/// sooner or later one succeeds.
const TRIES: usize = 4;

/// A strategy under watch, its device, and the blocks that the program holds.
pub struct Bench {
    /// The strategy.
    pub strategy: Checked<Box<dyn Strategy>>,
    /// The device.
    pub device: Box<dyn Device>,
    live: Vec<Live>,
    /// Until when each stream is busy at least.
    busy_until: Vec<Nanos>,
    quarantine: Vec<Quarantined>,
    /// Steps that have begun.
    steps: u32,
    /// Driver errors that came through.
    errors: Vec<StrategyError>,
    findings: Vec<String>,
}

/// A block that the program holds.
#[derive(Clone, Debug)]
struct Live {
    block: Block,
    stream: StreamId,
    used_on: Vec<StreamId>,
}

/// A freed range on which streams may still work.
#[derive(Clone, Debug)]
struct Quarantined {
    address: Address,
    end: Address,
    users: Vec<(StreamId, Nanos)>,
}

/// What a step came to; equal calls must give equal echoes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Echo {
    /// A block was handed out.
    Served(Block, Outcome),
    /// Memory ran out.
    OutOfMemory(Shortage),
    /// A block was given back.
    Freed(Freed),
    /// It was done, and there is nothing to say.
    Done,
    /// There was no block to do it with, or no such ability.
    LeftOut,
    /// The call failed.
    Failed(StrategyError),
}

impl Echo {
    /// Whether the strategy serves no request of that size, which is its right.
    pub(super) fn is_refused_for_its_size(&self) -> bool {
        matches!(self, Echo::OutOfMemory(Shortage { refused_by: Refusal::Size, .. }))
    }
}

impl Bench {
    /// How many streams the program uses.
    pub const STREAMS: u16 = 3;

    /// A new strategy on a new device of `bytes`.
    pub fn new(subject: &Subject<'_>, bytes: u64) -> Result<Bench, SpecError> {
        Bench::on((subject.device)(bytes), subject)
    }

    /// A new strategy on a device that is there already.
    pub fn on(device: Box<dyn Device>, subject: &Subject<'_>) -> Result<Bench, SpecError> {
        let strategy = Checked::new((subject.build)(device.props())?);
        let (live, quarantine, errors, findings) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let busy_until = vec![Nanos::ZERO; usize::from(Bench::STREAMS)];
        let mut bench = Bench { strategy, device, live, busy_until, quarantine, steps: 0, errors, findings };
        for stream in 1..Bench::STREAMS {
            bench.on_device(|device| device.stream_create(u64::from(stream)).map(|_| ()));
        }
        Ok(bench)
    }

    /// A copy of strategy and program on a device that has gone through the same; `None` where the strategy cannot be
    /// copied.
    #[must_use]
    pub fn fork(&self, device: Box<dyn Device>) -> Option<Bench> {
        Some(Bench {
            strategy: self.strategy.fork_checked()?,
            device,
            live: self.live.clone(),
            busy_until: self.busy_until.clone(),
            quarantine: self.quarantine.clone(),
            steps: self.steps,
            errors: self.errors.clone(),
            findings: Vec::new(),
        })
    }

    /// Does one step, and looks whether all is well afterwards.
    pub fn step(&mut self, step: &Step) -> Echo {
        let echo = match *step {
            Step::Alloc { bytes, stream } => self.alloc(bytes, stream),
            Step::Free { nth } => match self.place(nth) {
                Some(place) => self.free(place),
                None => Echo::LeftOut,
            },
            Step::UsedOn { nth, stream } => match self.place(nth) {
                Some(place) => self.used_on(place, stream),
                None => Echo::LeftOut,
            },
            Step::Work { stream, nanos } => self.work(stream, nanos),
            Step::StreamSync { stream } => self.on_device(|device| device.stream_synchronize(stream)),
            Step::DeviceSync => self.on_device(|device| device.synchronize()),
            Step::Trim => self.call(|strategy, cx| strategy.trim(cx)).map_or_else(Echo::Failed, |()| Echo::Done),
            Step::NextStep => self.next_step(),
        };
        self.strategy.audit();
        echo
    }

    /// Does many steps; what each came to, and how the books stood after it.
    pub fn play(&mut self, steps: &[Step]) -> Vec<(Echo, Stats)> {
        steps.iter().map(|step| (self.step(step), self.strategy.stats())).collect()
    }

    /// Asks for memory.
    pub fn alloc(&mut self, bytes: u64, stream: StreamId) -> Echo {
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        match self.call(|strategy, cx| strategy.alloc(cx, &request)) {
            Ok(Attempt::Served(block, outcome)) => {
                self.look_for_early_reuse(&block, stream);
                self.live.push(Live { block, stream, used_on: Vec::new() });
                Echo::Served(block, outcome)
            }
            Ok(Attempt::OutOfMemory(shortage)) => Echo::OutOfMemory(shortage),
            Err(error) => Echo::Failed(error),
        }
    }

    /// Gives back the block at a place of the live list, where there is one: its request may have been refused.
    pub fn free(&mut self, place: usize) -> Echo {
        if place >= self.live.len() {
            return Echo::LeftOut;
        }
        let Live { block, stream, used_on } = self.live.remove(place);
        let users: Vec<(StreamId, Nanos)> =
            used_on.into_iter().chain([stream]).map(|user| (user, self.busy_until[user.index()])).collect();
        match self.call(|strategy, cx| strategy.free(cx, block, Caller { stream, thread: ThreadId(0) })) {
            Ok(freed) => {
                let end = block.address.offset(block.size);
                self.quarantine.push(Quarantined { address: block.address, end, users });
                Echo::Freed(freed)
            }
            Err(error) => Echo::Failed(error),
        }
    }

    /// Gives all blocks back, the oldest first.
    pub fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
    }

    /// Gives every other block back, so that free memory lies between live neighbours.
    pub fn free_every_other(&mut self) {
        for place in 0..self.live.len() / 2 {
            self.step(&Step::Free { nth: place });
        }
    }

    /// Uses the block at a place of the live list on a stream, where there is one.
    pub fn used_on(&mut self, place: usize, stream: StreamId) -> Echo {
        let Some(&Live { block, .. }) = self.live.get(place) else { return Echo::LeftOut };
        match self.call(|strategy, cx| strategy.used_on(cx, &block, stream)) {
            Ok(()) => {
                self.live[place].used_on.push(stream);
                Echo::Done
            }
            Err(error) => Echo::Failed(error),
        }
    }

    /// Keeps a stream busy.
    pub fn work(&mut self, stream: StreamId, nanos: Nanos) -> Echo {
        let begin = self.device.now().max(self.busy_until[stream.index()]);
        if self.device.compute().is_none() {
            return Echo::LeftOut;
        }
        let echo = self.on_device(|device| match device.compute() {
            Some(compute) => compute.launch(stream, &Work::Spin { nanos }, &[]),
            None => Ok(()),
        });
        if echo == Echo::Done {
            self.busy_until[stream.index()] = begin + self.surely(nanos);
        }
        echo
    }

    /// How long work of that length takes at least by the host's clock. A real device has a clock of its own, and the
    /// two drift apart by some millionths.
    fn surely(&self, nanos: Nanos) -> Nanos {
        match self.device.props().clock {
            Clock::Virtual => nanos,
            Clock::Wall => Nanos(nanos.0 - nanos.0 / 1_000),
        }
    }

    /// Tells the strategy that a step begins.
    fn next_step(&mut self) -> Echo {
        let number = self.steps;
        self.steps += 1;
        self.call(|strategy, cx| strategy.control(cx, &Control::StepBegins(number)))
            .map_or_else(Echo::Failed, |()| Echo::Done)
    }

    /// The blocks that the program holds, oldest first.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &Block> {
        self.live.iter().map(|live| &live.block)
    }

    /// Gives everything back in order (blocks, cache, the rest) and returns all that was found.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        self.wind_down();
        self.into_findings()
    }

    /// Gives everything back in order: blocks, cache, the rest.
    pub fn wind_down(&mut self) {
        self.free_all();
        self.step(&Step::DeviceSync);
        self.step(&Step::Trim);
        self.close();
    }

    /// Closes the strategy, live blocks or not, and looks at what the device still holds.
    pub fn close(&mut self) {
        self.live.clear();
        if let Err(error) = self.call(|strategy, cx| strategy.close(cx)) {
            self.find(format!("close failed: {error}"));
        }
        self.strategy.audit();
        let held = self.device.held_bytes();
        if held != 0 {
            self.find(format!("after a close the device still holds {held} bytes"));
        }
        let ledger = self.device.ledger();
        for (take, give) in CallKind::ALL.iter().filter_map(|&take| Some((take, take.given_back_by()?))) {
            let done = |kind| ledger.of(kind).count - ledger.of(kind).failures;
            if done(take) != done(give) {
                self.find(format!("after a close there were {} {take} and {} {give}", done(take), done(give)));
            }
        }
    }

    /// Notes a broken promise.
    pub fn find(&mut self, detail: String) {
        self.findings.push(detail);
    }

    /// Driver errors so far, those that a second try cured included.
    pub fn errors(&self) -> &[StrategyError] {
        &self.errors
    }

    /// All that was found.
    #[must_use]
    pub fn into_findings(mut self) -> Vec<String> {
        self.findings.extend(self.strategy.violations().iter().map(ToString::to_string));
        self.findings
    }

    /// Makes a call, and again if a driver error ended it.
    fn call<R>(
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
    fn on_device(&mut self, mut call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>) -> Echo {
        match self.call(|_, cx| Ok(call(cx.device)?)) {
            Ok(()) => Echo::Done,
            Err(error) => Echo::Failed(error),
        }
    }

    fn place(&self, nth: usize) -> Option<usize> {
        nth.checked_rem(self.live.len())
    }

    /// Whether work that begins on `stream` now would meet work of another stream on the same memory.
    ///
    /// The strategy may have waited, or have made the stream wait: what counts is when the stream gets to work.
    fn look_for_early_reuse(&mut self, block: &Block, stream: StreamId) {
        let now = self.device.now();
        self.quarantine.retain(|range| range.users.iter().any(|&(_, until)| until > now));
        let end = block.address.offset(block.size);
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
            self.find(format!("{} was handed to stream {stream} while another stream worked on it", block.address));
        }
    }

    /// When `stream` has done all that is queued on it, waits included; the end of time where that cannot be known.
    fn when_idle(&mut self, stream: StreamId) -> Nanos {
        let mut probe = None;
        self.on_device(|device| device.event_create().map(|event| probe = Some(event)));
        let Some(event) = probe else { return Nanos(u64::MAX) };
        let recorded = self.on_device(|device| device.event_record(event, stream));
        let reached = self.on_device(|device| device.event_synchronize(event));
        let idle = self.device.now();
        self.on_device(|device| device.event_destroy(event));
        if recorded == Echo::Done && reached == Echo::Done { idle } else { Nanos(u64::MAX) }
    }
}
