//! A checked strategy, its device, and a program that breaks the rules.

use super::AccessPath;
use crate::{
    base::{Address, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{Device, DeviceError},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, Refusal, Request, Silent, Strategy, StrategyError,
        wrap::{AddressedStrategy, CheckedStrategy, rules},
    },
};

/// How many streams the program creates beside the default one.
pub(super) const STREAMS: u16 = 2;
/// A stream that does not exist.
pub(super) const NO_STREAM: StreamId = StreamId(4_000);

/// The strategy and what the program knows about it.
pub(super) struct MisuseSession {
    pub(super) strategy: AddressedStrategy<CheckedStrategy<Box<dyn Strategy>>>,
    pub(super) device: Box<dyn Device>,
    access: AccessPath,
    /// Live blocks of the program, with their streams.
    pub(super) live: Vec<(Block, StreamId)>,
    /// Memory on the same device that does not belong to the strategy.
    pub(super) foreign: Option<Address>,
    /// The messages with which misuse was refused.
    pub(super) refusals: Vec<String>,
    /// Damage that misuse did.
    pub(super) findings: Vec<String>,
    /// The number of violations that were judged already.
    judged: usize,
}

/// Why a scenario cannot be played.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScenarioError {
    /// It does not apply here.
    #[error("{0}")]
    NotApplicable(&'static str),
    /// The strategy refuses a valid call.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The device refuses a valid call.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl MisuseSession {
    pub(super) fn new(
        strategy: Box<dyn Strategy>,
        mut device: Box<dyn Device>,
        access: AccessPath,
    ) -> Result<MisuseSession, DeviceError> {
        for stream in 1..=STREAMS {
            device.stream_create(u64::from(stream))?;
        }
        Ok(MisuseSession {
            strategy: AddressedStrategy::new(CheckedStrategy::new(strategy)),
            device,
            access,
            live: Vec::new(),
            foreign: None,
            refusals: Vec::new(),
            findings: Vec::new(),
            judged: 0,
        })
    }

    /// Whether blocks are named by their address alone.
    pub(super) fn knows_only_addresses(&self) -> bool {
        self.access == AccessPath::Address
    }

    /// A valid request.
    pub(super) fn alloc(&mut self, bytes: u64, stream: StreamId) -> Result<Block, ScenarioError> {
        match self.request(bytes, stream)? {
            Attempt::Served(block, _) => {
                self.live.push((block, stream));
                Ok(block)
            }
            Attempt::OutOfMemory(shortage) if shortage.refused_by == Refusal::Size => {
                Err(ScenarioError::NotApplicable("it serves no requests of this size"))
            }
            Attempt::OutOfMemory(_) => Err(ScenarioError::NotApplicable("the device is too small")),
        }
    }

    /// A valid free.
    pub(super) fn free(&mut self, block: Block) -> Result<Freed, ScenarioError> {
        let live = self.live.iter().find(|(live, _)| is_same(live, &block));
        let stream = live.map_or(StreamId::DEFAULT, |&(_, stream)| stream);
        let freed = self.free_block(block, Caller { stream, thread: ThreadId(0) })?;
        self.forget(&block);
        Ok(freed)
    }

    /// A valid use on another stream.
    pub(super) fn used_on(&mut self, block: &Block, stream: StreamId) -> Result<(), ScenarioError> {
        Ok(self.note_use(block, stream)?)
    }

    /// Keeps a stream busy; false if the device cannot.
    pub(super) fn keep_busy(&mut self, stream: StreamId, nanos: Nanos) -> Result<bool, ScenarioError> {
        match self.device.compute() {
            Ok(compute) => compute.launch(stream, &Work::Spin { nanos }, &[]).map(|()| true).map_err(Into::into),
            Err(_) => Ok(false),
        }
    }

    pub(super) fn trim(&mut self) -> Result<(), ScenarioError> {
        Ok(self.call(|strategy, cx| strategy.trim(cx))?)
    }

    /// Closes the strategy, which ends all blocks.
    pub(super) fn close(&mut self) -> Result<(), ScenarioError> {
        self.call(|strategy, cx| strategy.close(cx))?;
        self.live.clear();
        Ok(())
    }

    /// An invalid free. If it is accepted, a live block is gone.
    pub(super) fn wrongly_free(&mut self, block: Block, caller: Caller) {
        if self.commit(rules::HANDLE, |session| session.free_block(block, caller)).is_some() {
            self.forget(&block);
        }
    }

    /// An invalid use.
    pub(super) fn wrongly_use(&mut self, block: &Block, stream: StreamId) {
        self.commit(rules::HANDLE, |session| session.note_use(block, stream));
    }

    /// A request that cannot be served. Memory that the device does not have must not be handed
    /// out.
    pub(super) fn wrongly_request(&mut self, bytes: u64, stream: StreamId) {
        let accepted = if bytes == 0 { rules::SIZE } else { rules::HANDLE };
        match self.commit(accepted, |session| session.request(bytes, stream)) {
            Some(Attempt::Served(block, _)) => {
                self.live.push((block, stream));
                let held = self.device.held_bytes();
                // A strategy without segments hands out imaginary memory.
                if bytes > held && self.strategy.stats().segments > 0 {
                    self.findings.push(format!("{bytes} bytes were served from the {held} that the device gave"));
                }
            }
            Some(Attempt::OutOfMemory(shortage)) => {
                self.refusals.push(format!("out of memory, {} bytes requested", shortage.rounded));
            }
            None => {}
        }
    }

    /// An invalid command.
    pub(super) fn wrongly_control(&mut self, command: &Control<'_>) {
        self.commit(rules::HANDLE, |session| session.call(|strategy, cx| strategy.control(cx, command)));
    }

    /// Makes findings of all violations since the last call.
    pub(super) fn collect_violations(&mut self) {
        let violations = self.strategy.inner.violations();
        self.findings.extend(violations[self.judged..].iter().map(|violation| violation.detail.clone()));
        self.judged = violations.len();
    }

    /// The strategy in the way the program uses it, and the device.
    pub(super) fn parts(&mut self) -> (&mut dyn Strategy, &mut dyn Device) {
        let strategy: &mut dyn Strategy = match self.access {
            AccessPath::Handle => &mut self.strategy.inner,
            AccessPath::Address => &mut self.strategy,
        };
        (strategy, &mut *self.device)
    }

    /// Commits a misuse. To accept it is not damage yet, so violations of the rule `accepted` do
    /// not count; all others do.
    fn commit<R>(
        &mut self,
        accepted: &'static str,
        misuse: impl FnOnce(&mut MisuseSession) -> Result<R, StrategyError>,
    ) -> Option<R> {
        self.collect_violations();
        let answer = misuse(self);
        self.strategy.inner.audit();
        let violations = self.strategy.inner.violations();
        let new = violations[self.judged..].iter().filter(|violation| violation.check != accepted);
        self.findings.extend(new.map(|violation| violation.detail.clone()));
        self.judged = violations.len();
        answer.map_err(|error| self.refusals.push(error.to_string())).ok()
    }

    fn request(&mut self, bytes: u64, stream: StreamId) -> Result<Attempt, StrategyError> {
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        self.call(|strategy, cx| strategy.alloc(cx, &request))
    }

    fn free_block(&mut self, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.access {
            AccessPath::Handle => self.strategy.inner.free(&mut cx, block, caller),
            AccessPath::Address => self.strategy.free_by_address(&mut cx, block.address, caller),
        }
    }

    fn note_use(&mut self, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        match self.access {
            AccessPath::Handle => self.strategy.inner.used_on(&mut cx, block, stream),
            AccessPath::Address => self.strategy.used_on_by_address(&mut cx, block.address, stream),
        }
    }

    fn call<R>(
        &mut self,
        call: impl FnOnce(&mut dyn Strategy, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let (strategy, device) = self.parts();
        call(strategy, &mut Context { device, sink: &mut Silent })
    }

    /// Removes a block from the live ones.
    pub(super) fn forget(&mut self, block: &Block) {
        self.live.retain(|(live, _)| !is_same(live, block));
    }
}

/// Whether two handles name the same block. The size is not part of a handle.
fn is_same(one: &Block, other: &Block) -> bool {
    (one.address, one.slot, one.generation) == (other.address, other.slot, other.generation)
}
