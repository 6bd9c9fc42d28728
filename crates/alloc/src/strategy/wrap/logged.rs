//! Keeps a list of all calls to a strategy and what came of them.

use crate::strategy::{Attempt, Block, Caller, Context, Control, Freed, Request, Strategy, StrategyError};
use oomph_base::StreamId;

/// A strategy whose calls are written down.
#[derive(Clone, Debug)]
pub struct Logged<S> {
    inner: S,
    calls: Vec<Call>,
}

/// One call and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`Strategy::alloc`].
    Alloc {
        /// What was asked for.
        request: Request,
        /// What came of it.
        result: Result<Attempt, StrategyError>,
    },
    /// [`Strategy::free`].
    Free {
        /// Which block.
        block: Block,
        /// Who gave it back.
        caller: Caller,
        /// What came of it.
        result: Result<Freed, StrategyError>,
    },
    /// [`Strategy::used_on`].
    UsedOn {
        /// Which block.
        block: Block,
        /// On which stream.
        stream: StreamId,
        /// What came of it.
        result: Result<(), StrategyError>,
    },
    /// [`Strategy::control`].
    Control {
        /// The command, as `Debug` shows it.
        command: String,
        /// What came of it.
        result: Result<(), StrategyError>,
    },
    /// [`Strategy::trim`].
    Trim {
        /// What came of it.
        result: Result<(), StrategyError>,
    },
    /// [`Strategy::close`].
    Close {
        /// What came of it.
        result: Result<(), StrategyError>,
    },
}

impl<S> Logged<S> {
    /// Writes down what happens to `inner` from now on.
    pub fn new(inner: S) -> Self {
        Logged { inner, calls: Vec::new() }
    }

    /// The calls so far, oldest first.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// The strategy inside and the calls it got.
    pub fn into_parts(self) -> (S, Vec<Call>) {
        (self.inner, self.calls)
    }
}

impl<S: Strategy> Strategy for Logged<S> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let result = self.inner.alloc(cx, request);
        self.calls.push(Call::Alloc { request: *request, result: result.clone() });
        result
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let result = self.inner.free(cx, block, caller);
        self.calls.push(Call::Free { block, caller, result: result.clone() });
        result
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let result = self.inner.used_on(cx, block, stream);
        self.calls.push(Call::UsedOn { block: *block, stream, result: result.clone() });
        result
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        let result = self.inner.control(cx, command);
        self.calls.push(Call::Control { command: format!("{command:?}"), result: result.clone() });
        result
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let result = self.inner.trim(cx);
        self.calls.push(Call::Trim { result: result.clone() });
        result
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let result = self.inner.close(cx);
        self.calls.push(Call::Close { result: result.clone() });
        result
    }

    views_of_inner!();

    /// The copy takes the list along and goes on with its own.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(Logged { inner: self.inner.fork()?, calls: self.calls.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{Outcome, Silent, null::Null, test_device::simulated};
    use oomph_base::{MIB, SiteId, ThreadId};

    #[test]
    fn every_call_is_on_the_list_with_its_result() {
        let mut device = simulated(64 * MIB);
        let mut cx = Context { device: &mut *device, sink: &mut Silent };
        let mut strategy = Logged::new(Null::default());
        let request = Request { bytes: 512, stream: StreamId(0), thread: ThreadId(0), site: SiteId(0) };
        let Attempt::Served(block, outcome) = strategy.alloc(&mut cx, &request).unwrap() else { panic!() };
        strategy.used_on(&mut cx, &block, StreamId(1)).unwrap();
        strategy.free(&mut cx, block, Caller::default()).unwrap();
        strategy.free(&mut cx, block, Caller::default()).unwrap_err();
        strategy.control(&mut cx, &Control::StepBegins(3)).unwrap();
        strategy.trim(&mut cx).unwrap();
        strategy.close(&mut cx).unwrap();
        let refused = StrategyError::UnknownBlock { address: block.address, slot: block.slot };
        let caller = Caller::default();
        let expected = [
            Call::Alloc { request, result: Ok(Attempt::Served(block, outcome)) },
            Call::UsedOn { block, stream: StreamId(1), result: Ok(()) },
            Call::Free { block, caller, result: Ok(Freed::Now) },
            Call::Free { block, caller, result: Err(refused) },
            Call::Control { command: "StepBegins(3)".to_owned(), result: Ok(()) },
            Call::Trim { result: Ok(()) },
            Call::Close { result: Ok(()) },
        ];
        assert_eq!(strategy.calls(), expected);
        assert_eq!(outcome, Outcome::Hit);
    }
}
