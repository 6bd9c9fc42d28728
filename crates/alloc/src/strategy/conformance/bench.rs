//! A program that uses a strategy under watch.

use super::{Finding, Step, Subject, Watch};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Attempt, Block, Caller, Control, Freed, Outcome, Refusal, Request, Shortage, SpecError, Stats, Strategy,
    StrategyError,
};
use oomph_base::{Nanos, SiteId, StreamId, ThreadId, Work};

/// A strategy under watch, and the blocks that the program holds.
pub struct Bench {
    /// The strategy and its device.
    pub watch: Watch,
    live: Vec<Live>,
    /// Steps that have begun.
    steps: u32,
}

/// A block that the program holds.
#[derive(Clone, Debug)]
struct Live {
    block: Block,
    stream: StreamId,
    used_on: Vec<StreamId>,
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
    /// Of a call that has nothing to say when it succeeds.
    fn of(result: Result<(), StrategyError>) -> Echo {
        result.map_or_else(Echo::Failed, |()| Echo::Done)
    }

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
        let strategy = (subject.build)(device.props())?;
        let streams: Vec<u64> = (1..u64::from(Bench::STREAMS)).collect();
        Ok(Bench { watch: Watch::new(strategy, device, &streams), live: Vec::new(), steps: 0 })
    }

    /// A copy of strategy and program on a device that has gone through the same; `None` where the strategy cannot be
    /// copied.
    #[must_use]
    pub fn fork(&self, device: Box<dyn Device>) -> Option<Bench> {
        Some(Bench { watch: self.watch.fork(device)?, live: self.live.clone(), steps: self.steps })
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
            Step::Trim => Echo::of(self.watch.call(|strategy, cx| strategy.trim(cx))),
            Step::NextStep => self.next_step(),
        };
        self.watch.strategy.audit();
        echo
    }

    /// Does many steps; what each came to, and how the books stood after it.
    pub fn play(&mut self, steps: &[Step]) -> Vec<(Echo, Stats)> {
        steps.iter().map(|step| (self.step(step), self.watch.strategy.stats())).collect()
    }

    /// Asks for memory.
    pub fn alloc(&mut self, bytes: u64, stream: StreamId) -> Echo {
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        match self.watch.alloc(&request) {
            Ok(Attempt::Served(block, outcome)) => {
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
        let Live { block, stream, used_on: mut users } = self.live.remove(place);
        users.push(stream);
        match self.watch.free(block, Caller { stream, thread: ThreadId(0) }, &users) {
            Ok(freed) => Echo::Freed(freed),
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
        let echo = Echo::of(self.watch.call(|strategy, cx| strategy.used_on(cx, &block, stream)));
        if echo == Echo::Done {
            self.live[place].used_on.push(stream);
        }
        echo
    }

    /// Keeps a stream busy.
    pub fn work(&mut self, stream: StreamId, nanos: Nanos) -> Echo {
        self.watch.launch(stream, &Work::Spin { nanos }, &[]).map_or(Echo::LeftOut, Echo::of)
    }

    /// Tells the strategy that a step begins.
    fn next_step(&mut self) -> Echo {
        let number = self.steps;
        self.steps += 1;
        Echo::of(self.watch.call(|strategy, cx| strategy.control(cx, &Control::StepBegins(number))))
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
        self.watch.close();
    }

    /// Notes a broken promise.
    pub fn find(&mut self, detail: String) {
        self.watch.find("bench", detail);
    }

    /// Driver errors so far, those that a second try cured included.
    pub fn errors(&self) -> &[StrategyError] {
        self.watch.errors()
    }

    /// All that was found.
    #[must_use]
    pub fn into_findings(self) -> Vec<String> {
        self.watch.findings().into_iter().map(|Finding { detail, .. }| detail).collect()
    }

    fn on_device(&mut self, call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>) -> Echo {
        Echo::of(self.watch.on_device(call))
    }

    fn place(&self, nth: usize) -> Option<usize> {
        nth.checked_rem(self.live.len())
    }
}
