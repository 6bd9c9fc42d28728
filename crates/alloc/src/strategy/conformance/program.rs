//! A program that uses a strategy under observation: its steps, and scripts of random steps.

use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use super::{ConformanceFinding, ConformanceSubject, ObservedStrategy};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Attempt, Block, Caller, Control, Freed, Outcome, Refusal, Request, Shortage, SpecError, Stats, Strategy,
    StrategyError,
};
use oomph_base::{KIB, MIB, Nanos, SiteId, StreamId, ThreadId, Work};

/// A program that uses a strategy under observation, and the blocks that it holds.
pub struct ConformanceProgram {
    /// The strategy and its device.
    pub watch: ObservedStrategy,
    live: Vec<ProgramBlock>,
    /// Steps that have begun.
    steps: u32,
}

/// A block that the program holds.
#[derive(Clone, Debug)]
struct ProgramBlock {
    block: Block,
    stream: StreamId,
    used_on: Vec<StreamId>,
}

/// The result of a step. Equal calls must give equal results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// A block was handed out.
    Served(Block, Outcome),
    /// Memory ran out.
    OutOfMemory(Shortage),
    /// A block was freed.
    Freed(Freed),
    /// The call succeeded without a result.
    Done,
    /// There was no block for it, or the device lacks the ability.
    LeftOut,
    /// The call failed.
    Failed(StrategyError),
}

impl StepOutcome {
    /// Of a call without a result.
    fn of(result: Result<(), StrategyError>) -> StepOutcome {
        result.map_or_else(StepOutcome::Failed, |()| StepOutcome::Done)
    }

    /// Whether the strategy does not serve requests of that size, which is allowed.
    pub(super) fn is_unsupported_size(&self) -> bool {
        matches!(self, StepOutcome::OutOfMemory(Shortage { refused_by: Refusal::Size, .. }))
    }
}

impl ConformanceProgram {
    /// The number of streams that the program uses.
    pub const STREAMS: u16 = 3;

    /// A new strategy on a new device of `bytes`.
    pub fn new(subject: &ConformanceSubject<'_>, bytes: u64) -> Result<ConformanceProgram, SpecError> {
        ConformanceProgram::on((subject.device)(bytes), subject)
    }

    /// A new strategy on this device.
    pub fn on(device: Box<dyn Device>, subject: &ConformanceSubject<'_>) -> Result<ConformanceProgram, SpecError> {
        let strategy = (subject.build)(device.props())?;
        let streams: Vec<u64> = (1..u64::from(ConformanceProgram::STREAMS)).collect();
        Ok(ConformanceProgram { watch: ObservedStrategy::new(strategy, device, &streams), live: Vec::new(), steps: 0 })
    }

    /// A copy of strategy and program on a device in the same state; `None` if the strategy cannot
    /// be copied.
    #[must_use]
    pub fn fork(&self, device: Box<dyn Device>) -> Option<ConformanceProgram> {
        Some(ConformanceProgram { watch: self.watch.fork(device)?, live: self.live.clone(), steps: self.steps })
    }

    /// Makes one step and audits the strategy afterwards.
    pub fn step(&mut self, step: &ProgramStep) -> StepOutcome {
        let echo = match *step {
            ProgramStep::Alloc { bytes, stream } => self.alloc(bytes, stream),
            ProgramStep::Free { nth } => match self.place(nth) {
                Some(place) => self.free(place),
                None => StepOutcome::LeftOut,
            },
            ProgramStep::UsedOn { nth, stream } => match self.place(nth) {
                Some(place) => self.used_on(place, stream),
                None => StepOutcome::LeftOut,
            },
            ProgramStep::Work { stream, nanos } => self.work(stream, nanos),
            ProgramStep::StreamSync { stream } => self.on_device(|device| device.stream_synchronize(stream)),
            ProgramStep::DeviceSync => self.on_device(|device| device.synchronize()),
            ProgramStep::Trim => StepOutcome::of(self.watch.call(|strategy, cx| strategy.trim(cx))),
            ProgramStep::NextStep => self.next_step(),
        };
        self.watch.strategy.audit();
        echo
    }

    /// Makes many steps. Returns the result of each and the counters after it.
    pub fn play(&mut self, steps: &[ProgramStep]) -> Vec<(StepOutcome, Stats)> {
        steps.iter().map(|step| (self.step(step), self.watch.strategy.stats())).collect()
    }

    /// Requests memory.
    pub fn alloc(&mut self, bytes: u64, stream: StreamId) -> StepOutcome {
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        match self.watch.alloc(&request) {
            Ok(Attempt::Served(block, outcome)) => {
                self.live.push(ProgramBlock { block, stream, used_on: Vec::new() });
                StepOutcome::Served(block, outcome)
            }
            Ok(Attempt::OutOfMemory(shortage)) => StepOutcome::OutOfMemory(shortage),
            Err(error) => StepOutcome::Failed(error),
        }
    }

    /// Frees the block at a place of the live list, if there is one: its request may have failed.
    pub fn free(&mut self, place: usize) -> StepOutcome {
        if place >= self.live.len() {
            return StepOutcome::LeftOut;
        }
        let ProgramBlock { block, stream, used_on: mut users } = self.live.remove(place);
        users.push(stream);
        match self.watch.free(block, Caller { stream, thread: ThreadId(0) }, &users) {
            Ok(freed) => StepOutcome::Freed(freed),
            Err(error) => StepOutcome::Failed(error),
        }
    }

    /// Frees all blocks, the oldest first.
    pub fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
    }

    /// Frees every other block, so that free memory lies between live neighbours.
    pub fn free_every_other(&mut self) {
        for place in 0..self.live.len() / 2 {
            self.step(&ProgramStep::Free { nth: place });
        }
    }

    /// Uses the block at a place of the live list on a stream, if there is one.
    pub fn used_on(&mut self, place: usize, stream: StreamId) -> StepOutcome {
        let Some(&ProgramBlock { block, .. }) = self.live.get(place) else { return StepOutcome::LeftOut };
        let echo = StepOutcome::of(self.watch.call(|strategy, cx| strategy.used_on(cx, &block, stream)));
        if echo == StepOutcome::Done {
            self.live[place].used_on.push(stream);
        }
        echo
    }

    /// Keeps a stream busy.
    pub fn work(&mut self, stream: StreamId, nanos: Nanos) -> StepOutcome {
        self.watch.launch(stream, &Work::Spin { nanos }, &[]).map_or(StepOutcome::LeftOut, StepOutcome::of)
    }

    /// Begins a step.
    fn next_step(&mut self) -> StepOutcome {
        let number = self.steps;
        self.steps += 1;
        StepOutcome::of(self.watch.call(|strategy, cx| strategy.control(cx, &Control::StepBegins(number))))
    }

    /// The blocks that the program holds, oldest first.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &Block> {
        self.live.iter().map(|live| &live.block)
    }

    /// Frees all blocks, trims, closes, and returns the findings.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        self.wind_down();
        self.into_findings()
    }

    /// Frees all blocks, trims and closes.
    pub fn wind_down(&mut self) {
        self.free_all();
        self.step(&ProgramStep::DeviceSync);
        self.step(&ProgramStep::Trim);
        self.close();
    }

    /// Closes the strategy and checks what the device still holds.
    pub fn close(&mut self) {
        self.live.clear();
        self.watch.close();
    }

    /// Records a finding.
    pub fn find(&mut self, detail: String) {
        self.watch.find("bench", detail);
    }

    /// The findings.
    #[must_use]
    pub fn into_findings(self) -> Vec<String> {
        self.watch.findings().into_iter().map(|ConformanceFinding { detail, .. }| detail).collect()
    }

    fn on_device(&mut self, call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>) -> StepOutcome {
        StepOutcome::of(self.watch.on_device(call))
    }

    fn place(&self, nth: usize) -> Option<usize> {
        nth.checked_rem(self.live.len())
    }
}

/// One step of a program. A block is named by its place among the live ones, modulo their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramStep {
    /// Requests memory.
    Alloc {
        /// The size.
        bytes: u64,
        /// The stream.
        stream: StreamId,
    },
    /// Frees a block.
    Free {
        /// The place or stream.
        nth: usize,
    },
    /// Uses a block on another stream.
    UsedOn {
        /// The place or stream.
        nth: usize,
        /// The stream.
        stream: StreamId,
    },
    /// Keeps a stream busy.
    Work {
        /// The place or stream.
        stream: StreamId,
        /// The duration.
        nanos: Nanos,
    },
    /// Waits for a stream.
    StreamSync {
        /// The place or stream.
        stream: StreamId,
    },
    /// Waits for all streams.
    DeviceSync,
    /// Empties the cache.
    Trim,
    /// Begins the next step of the program.
    NextStep,
}

/// A random program of `length` steps: about as many frees as allocs, sizes from bytes to `largest`
/// with every order of magnitude equally likely, work and uses on three streams if `busy`.
#[must_use]
pub fn mixed_script(seed: u64, length: usize, largest: u64, busy: bool) -> Vec<ProgramStep> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let streams = if busy { ConformanceProgram::STREAMS } else { 1 };
    (0..length)
        .map(|_| {
            let stream = StreamId(random.random_range(0..streams));
            let nth = random.random_range(0..1 << 16);
            match random.random_range(0..100) {
                0..42 => ProgramStep::Alloc { bytes: size(&mut random, largest), stream },
                42..44 => ProgramStep::NextStep,
                44..82 => ProgramStep::Free { nth },
                82..88 if busy => ProgramStep::UsedOn { nth, stream },
                88..96 if busy => ProgramStep::Work { stream, nanos: Nanos(random.random_range(1_000..2_000_000)) },
                96..98 if busy => ProgramStep::StreamSync { stream },
                98 => ProgramStep::DeviceSync,
                99 => ProgramStep::Trim,
                _ => ProgramStep::Alloc { bytes: size(&mut random, largest), stream },
            }
        })
        .collect()
}

fn size(random: &mut ChaCha8Rng, largest: u64) -> u64 {
    // Half of the requests are close to limits that allocators commonly use.
    const BORDERS: [u64; 8] = [256, 512, KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB];
    let bytes = if random.random_bool(0.5) {
        BORDERS[random.random_range(0..BORDERS.len())] + random.random_range(0..3) - 1
    } else {
        let magnitude = random.random_range(0..=largest.max(1).ilog2());
        (1 << magnitude) + random.random_range(0..1 << magnitude)
    };
    bytes.clamp(1, largest)
}
