//! Watches whether a strategy keeps its contract.
//!
//! The wrapper keeps books of its own ([`Shadow`]) from nothing but requests, results and events, and compares them
//! with the strategy's after every call. What does not agree is collected as a value; the strategy's answers are
//! passed on unchanged, so that a run under watch goes the same way as one without.

use std::fmt;

use super::{audit, backing::Backing, shadow::Shadow};
use crate::device::{Device, wrap::InterceptedDevice};
use crate::strategy::{
    Attempt, Block, BlockState, Caller, Context, Control, EventSink, Freed, InitialLayout, Request, Stats, Strategy,
    StrategyError, StrategyEvent,
};
use oomph_base::{Address, StreamId};

/// After this many, violations are only counted: one broken book would otherwise be reported at every call.
const MOST_KEPT: usize = 64;

/// A strategy under watch.
#[derive(Clone, Debug)]
pub struct Checked<S> {
    inner: S,
    shadow: Shadow,
    backing: Backing,
    violations: Violations,
}

/// A part of the contract that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Live blocks never overlap, nor do they overlap blocks that still wait for a stream: not by their addresses, and
    /// not by the physical memory behind them.
    Overlap,
    /// Every block starts at a multiple of [`ALIGNMENT`](crate::strategy::ALIGNMENT).
    Alignment,
    /// A block is at least as large as its request, and a request for nothing is refused.
    Size,
    /// Live blocks can be freed and used; all other handles are refused.
    Handle,
    /// The strategy's books agree with what it did.
    Books,
    /// Segments and blocks tile memory and sum to the books.
    Layout,
    /// Events tell what happens: segments come and go, delayed frees complete once, failures are announced.
    Events,
    /// After a close the strategy is as new.
    Close,
}

impl Rule {
    /// Its name in findings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Rule::Overlap => "overlap",
            Rule::Alignment => "alignment",
            Rule::Size => "size",
            Rule::Handle => "handle",
            Rule::Books => "books",
            Rule::Layout => "layout",
            Rule::Events => "events",
            Rule::Close => "close",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One breach of the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// During which call to the strategy, from 1.
    pub call: u64,
    /// What was broken.
    pub rule: Rule,
    /// How.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call {}: {}: {}", self.call, self.rule, self.detail)
    }
}

/// What was found so far, and during which call we are.
#[derive(Clone, Debug, Default)]
pub(super) struct Violations {
    call: u64,
    kept: Vec<Violation>,
    count: u64,
}

impl Violations {
    /// Notes a breach.
    #[cold]
    pub(super) fn add(&mut self, rule: Rule, detail: String) {
        self.count += 1;
        if self.kept.len() < MOST_KEPT {
            self.kept.push(Violation { call: self.call, rule, detail });
        }
    }

    /// Notes a breach unless `holds`.
    pub(super) fn expect(&mut self, holds: bool, rule: Rule, detail: impl FnOnce() -> String) {
        if !holds {
            self.add(rule, detail());
        }
    }
}

impl<S: Strategy> Checked<S> {
    /// Watches `inner`, which has no live blocks yet.
    pub fn new(inner: S) -> Self {
        Checked { inner, shadow: Shadow::default(), backing: Backing::default(), violations: Violations::default() }
    }

    /// The first violations, oldest first.
    pub fn violations(&self) -> &[Violation] {
        &self.violations.kept
    }

    /// How many violations there were, those not kept included.
    pub fn violation_count(&self) -> u64 {
        self.violations.count
    }

    /// Whether it is known which blocks are live: not after a close that failed half-way.
    pub fn is_sound(&self) -> bool {
        self.shadow.is_known()
    }

    /// Compares the strategy's layout with the books, block by block. Slow; after a call that matters, and in tests.
    pub fn audit(&mut self) {
        if self.shadow.is_known() {
            audit::layout(&self.inner, &self.shadow, &mut self.violations);
        }
    }

    /// A copy of the strategy under the same watch, as [`Strategy::fork`] makes it.
    pub fn fork_checked(&self) -> Option<Checked<Box<dyn Strategy>>> {
        let (shadow, backing) = (self.shadow.clone(), self.backing.clone());
        Some(Checked { inner: self.inner.fork()?, shadow, backing, violations: self.violations.clone() })
    }

    /// The strategy inside.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// Makes one call with a listener in front of the event sink, and one in front of the device.
    fn watch<R>(&mut self, cx: &mut Context<'_>, call: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        self.violations.call += 1;
        let mut freed = Vec::new();
        let mut listener =
            Listener { shadow: &mut self.shadow, freed: &mut freed, violations: &mut self.violations, outer: cx.sink };
        let mut device = InterceptedDevice::new(&mut *cx.device, &mut self.backing);
        let result = call(&mut self.inner, &mut Context { device: &mut device, sink: &mut listener });
        freed.into_iter().for_each(|block| self.backing.vacate(block));
        result
    }

    /// A block was handed out for a request of `bytes`.
    fn take_note(&mut self, block: Block, bytes: u64) {
        self.shadow.served(block, bytes, &mut self.violations);
        if let Some(other) = self.backing.occupy(&block) {
            let detail = format!("physical memory of the block at {} is that of the one at {other}", block.address);
            self.violations.add(Rule::Overlap, detail);
        }
    }

    /// After a call.
    fn compare(&mut self, device: &dyn Device, error: Option<&StrategyError>) {
        if matches!(error, Some(StrategyError::Device(_))) {
            self.shadow.accept_reserved(&self.inner.stats());
        }
        self.shadow.compare(&self.inner.stats(), device.held_bytes(), &mut self.violations);
    }
}

impl<S: Strategy> Strategy for Checked<S> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let result = self.watch(cx, |inner, cx| inner.alloc(cx, request));
        match &result {
            Ok(Attempt::Served(block, _)) => self.take_note(*block, request.bytes),
            Ok(Attempt::OutOfMemory(shortage)) => self.shadow.ran_out(shortage.refused_by),
            Err(StrategyError::UnknownBlock { .. }) => {
                self.violations.add(Rule::Handle, "an alloc answered that a block is unknown".to_owned());
            }
            Err(error) => {
                let refused = *error == StrategyError::ZeroBytes;
                self.violations.expect(refused == (request.bytes == 0), Rule::Size, || {
                    format!("a request for {} bytes answered '{error}'", request.bytes)
                });
            }
        }
        self.compare(cx.device, result.as_ref().err());
        result
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let was_live = self.shadow.is_live(&block);
        let result = self.watch(cx, |inner, cx| inner.free(cx, block, caller));
        self.shadow.answered(&block, was_live, result.as_ref().err(), &mut self.violations);
        if let Ok(freed) = result
            && was_live
        {
            self.shadow.freed(&block, freed);
            if freed == Freed::Now {
                self.backing.vacate(block.address);
            }
        }
        self.compare(cx.device, result.as_ref().err());
        result
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let is_live = self.shadow.is_live(block);
        let result = self.watch(cx, |inner, cx| inner.used_on(cx, block, stream));
        self.shadow.answered(block, is_live, result.as_ref().err(), &mut self.violations);
        self.compare(cx.device, result.as_ref().err());
        result
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        let result = self.watch(cx, |inner, cx| inner.control(cx, command));
        self.compare(cx.device, result.as_ref().err());
        result
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        let result = self.watch(cx, |inner, cx| inner.resume_from(cx, initial));
        let requested = initial.layout.blocks().filter(|block| block.state != BlockState::Free);
        let resumed = result.iter().flatten().flatten().zip(requested.map(|block| block.requested));
        for (block, bytes) in resumed {
            self.take_note(*block, bytes);
        }
        self.compare(cx.device, result.as_ref().err());
        result
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let result = self.watch(cx, |inner, cx| inner.trim(cx));
        self.compare(cx.device, result.as_ref().err());
        result
    }

    /// After a close that failed half-way nobody can say which blocks are still live: the watch rests until a close
    /// succeeds.
    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.shadow.begin_close();
        let result = self.watch(cx, |inner, cx| inner.close(cx));
        if result.is_ok() {
            self.shadow = Shadow::default();
            self.backing.vacate_all();
            let stats = self.inner.stats();
            self.violations
                .expect(stats == Stats::default(), Rule::Close, || format!("after a close the books say {stats:?}"));
        }
        result
    }

    views_of_inner!();

    /// The copy is under watch as well; what was found so far goes along.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.fork_checked()?))
    }
}

/// Hears events before the sink that they are for.
struct Listener<'a> {
    shadow: &'a mut Shadow,
    /// Blocks whose delayed free is done.
    freed: &'a mut Vec<Address>,
    violations: &'a mut Violations,
    outer: &'a mut dyn EventSink,
}

impl EventSink for Listener<'_> {
    fn event(&mut self, event: StrategyEvent) {
        self.shadow.heard(event, self.violations);
        if let StrategyEvent::FreeCompleted { address, .. } = event {
            self.freed.push(address);
        }
        self.outer.event(event);
    }
}
