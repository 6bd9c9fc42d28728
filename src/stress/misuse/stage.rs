//! A strategy under watch, its device, and a program that does not behave.

use super::Door;
use crate::{
    base::{Address, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{Device, DeviceError},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, Refusal, Request, Silent, Strategy, StrategyError,
        wrap::{Addressed, Checked, Rule},
    },
};

/// How many streams the program makes beside the default one.
pub(super) const STREAMS: u16 = 2;
/// A stream that nobody made.
pub(super) const NO_STREAM: StreamId = StreamId(4_000);

/// The strategy and all that the program knows of it.
pub(super) struct Stage {
    pub(super) strategy: Addressed<Checked<Box<dyn Strategy>>>,
    pub(super) device: Box<dyn Device>,
    door: Door,
    /// Blocks that the program holds, with their streams.
    pub(super) live: Vec<(Block, StreamId)>,
    /// Memory that somebody else holds on the same device.
    pub(super) foreign: Option<Address>,
    /// The words with which misuse was refused.
    pub(super) refusals: Vec<String>,
    /// What misuse did that it must not do.
    pub(super) findings: Vec<String>,
    /// Violations that were looked at already.
    judged: usize,
}

/// Why a misuse cannot be tried.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unplayable {
    /// It makes no sense here.
    #[error("{0}")]
    NotApplicable(&'static str),
    /// The strategy refuses what is right.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The device refuses what is right.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Stage {
    /// A program that knows its blocks in one of two ways.
    pub(super) fn new(
        strategy: Box<dyn Strategy>,
        mut device: Box<dyn Device>,
        door: Door,
    ) -> Result<Stage, DeviceError> {
        for stream in 1..=STREAMS {
            device.stream_create(u64::from(stream))?;
        }
        Ok(Stage {
            strategy: Addressed::new(Checked::new(strategy)),
            device,
            door,
            live: Vec::new(),
            foreign: None,
            refusals: Vec::new(),
            findings: Vec::new(),
            judged: 0,
        })
    }

    /// Whether blocks are known by their address alone.
    pub(super) fn knows_only_addresses(&self) -> bool {
        self.door == Door::Address
    }

    /// Asks for memory as one should.
    pub(super) fn alloc(&mut self, bytes: u64, stream: StreamId) -> Result<Block, Unplayable> {
        match self.request(bytes, stream)? {
            Attempt::Served(block, _) => {
                self.live.push((block, stream));
                Ok(block)
            }
            Attempt::OutOfMemory(shortage) if shortage.refused_by == Refusal::Size => {
                Err(Unplayable::NotApplicable("it serves no request of such a size"))
            }
            Attempt::OutOfMemory(_) => Err(Unplayable::NotApplicable("the device is too small")),
        }
    }

    /// Gives a block back as one should.
    pub(super) fn free(&mut self, block: Block) -> Result<Freed, Unplayable> {
        let stream = self.stream_of(&block);
        let freed = self.give_back(block, Caller { stream, thread: ThreadId(0) })?;
        self.forget(&block);
        Ok(freed)
    }

    /// Uses a block on another stream as one should.
    pub(super) fn used_on(&mut self, block: &Block, stream: StreamId) -> Result<(), Unplayable> {
        Ok(self.note_use(block, stream)?)
    }

    /// Keeps a stream busy; false where the device cannot.
    pub(super) fn keep_busy(&mut self, stream: StreamId, nanos: Nanos) -> Result<bool, Unplayable> {
        match self.device.compute() {
            Some(compute) => compute.launch(stream, &Work::Spin { nanos }, &[]).map(|()| true).map_err(Into::into),
            None => Ok(false),
        }
    }

    pub(super) fn trim(&mut self) -> Result<(), Unplayable> {
        Ok(self.call(|strategy, cx| strategy.trim(cx))?)
    }

    /// Closes the strategy; no block outlives it.
    pub(super) fn close(&mut self) -> Result<(), Unplayable> {
        self.call(|strategy, cx| strategy.close(cx))?;
        self.live.clear();
        Ok(())
    }

    /// Frees what must not be freed, or as it must not be freed. A live block that is taken is gone.
    pub(super) fn wrongly_free(&mut self, block: Block, caller: Caller) {
        if self.commit(Rule::Handle, |stage| stage.give_back(block, caller)).is_some() {
            self.forget(&block);
        }
    }

    /// Uses what must not be used, or where it must not be used.
    pub(super) fn wrongly_use(&mut self, block: &Block, stream: StreamId) {
        self.commit(Rule::Handle, |stage| stage.note_use(block, stream));
    }

    /// Asks for what cannot be had. Memory that the device has not got must not be handed out.
    pub(super) fn wrongly_request(&mut self, bytes: u64, stream: StreamId) {
        let pardoned = if bytes == 0 { Rule::Size } else { Rule::Handle };
        match self.commit(pardoned, |stage| stage.request(bytes, stream)) {
            Some(Attempt::Served(block, _)) => {
                self.live.push((block, stream));
                let held = self.device.held_bytes();
                // Imaginary memory may go this far; memory of the device does not.
                if bytes > held && self.strategy.stats().segments > 0 {
                    self.findings.push(format!("{bytes} bytes were served from the {held} that the device gave"));
                }
            }
            Some(Attempt::OutOfMemory(shortage)) => {
                self.refusals.push(format!("out of memory, {} bytes wanted", shortage.rounded));
            }
            None => {}
        }
    }

    /// Says what means nothing.
    pub(super) fn wrongly_tell(&mut self, command: &Control<'_>) {
        self.commit(Rule::Handle, |stage| stage.call(|strategy, cx| strategy.control(cx, command)));
    }

    /// The violations since the last look, all of them findings.
    pub(super) fn look(&mut self) {
        let violations = self.strategy.inner().violations();
        self.findings.extend(violations[self.judged..].iter().map(ToString::to_string));
        self.judged = violations.len();
    }

    /// The strategy, through the door by which the program came.
    pub(super) fn parts(&mut self) -> (&mut dyn Strategy, &mut dyn Device) {
        let strategy: &mut dyn Strategy = match self.door {
            Door::Handle => self.strategy.inner_mut(),
            Door::Address => &mut self.strategy,
        };
        (strategy, &mut *self.device)
    }

    /// Commits a misuse. That it is accepted is no finding yet: what `Checked` has to say about that (`pardoned`) does not
    /// count. All else does.
    fn commit<R>(&mut self, pardoned: Rule, misuse: impl FnOnce(&mut Stage) -> Result<R, StrategyError>) -> Option<R> {
        self.look();
        let answer = misuse(self);
        self.strategy.inner_mut().audit();
        let violations = self.strategy.inner().violations();
        let new = violations[self.judged..].iter().filter(|violation| violation.rule != pardoned);
        self.findings.extend(new.map(ToString::to_string));
        self.judged = violations.len();
        answer.map_err(|error| self.refusals.push(error.to_string())).ok()
    }

    fn request(&mut self, bytes: u64, stream: StreamId) -> Result<Attempt, StrategyError> {
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        self.call(|strategy, cx| strategy.alloc(cx, &request))
    }

    fn give_back(&mut self, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.door {
            Door::Handle => self.strategy.inner_mut().free(&mut cx, block, caller),
            Door::Address => self.strategy.free_by_address(&mut cx, block.address, caller),
        }
    }

    fn note_use(&mut self, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.door {
            Door::Handle => self.strategy.inner_mut().used_on(&mut cx, block, stream),
            Door::Address => self.strategy.used_on_by_address(&mut cx, block.address, stream),
        }
    }

    fn call<R>(
        &mut self,
        call: impl FnOnce(&mut dyn Strategy, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let (strategy, device) = self.parts();
        call(strategy, &mut Context { device, sink: &mut Silent })
    }

    fn stream_of(&self, block: &Block) -> StreamId {
        self.live.iter().find(|(live, _)| is_same(live, block)).map_or(StreamId::DEFAULT, |&(_, stream)| stream)
    }

    fn forget(&mut self, block: &Block) {
        self.live.retain(|(live, _)| !is_same(live, block));
    }
}

/// Whether two handles are of one block. The size is no part of its name.
fn is_same(one: &Block, other: &Block) -> bool {
    (one.address, one.slot, one.generation) == (other.address, other.slot, other.generation)
}
