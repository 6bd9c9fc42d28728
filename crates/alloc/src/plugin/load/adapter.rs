//! A loaded plugin behind the trait that all strategies have.
//!
//! The interface has an alloc, a free and nothing else that must be there. What is missing is made up for here: blocks
//! get handles, the books are kept, and a free waits for other streams where the plugin is not told about them. A plugin
//! never sees our device: it calls the driver itself, or makes addresses up. A limit therefore cannot be imposed on it
//! from below. It is told the limit where it can be; a request that takes what it holds beyond the limit, as far as that
//! is known, is undone and has failed.

use std::{collections::BTreeMap, ffi::c_int};

use super::{
    allocator::{Allocator, Gone},
    reserved::Reserved,
    symbols::Choice,
};
use crate::device::Capabilities;
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, OffBooks, Outcome, Refusal, Request, Setup,
    Shortage, Stats, Strategy, StrategyError, StrategyEvent,
    deferred::{DeferredFrees, Patience},
    slots::Slots,
};
use oomph_base::{Address, StreamId};

/// An allocator in a shared library.
#[derive(Debug)]
pub struct Plugin {
    plugin: Box<dyn Allocator>,
    /// The device's number, as the plugin is told it.
    number: c_int,
    limit: Option<u64>,
    /// Whether the plugin has yet to be told the limit.
    is_new: bool,
    /// Whether it was closed, and nothing asked of it since.
    is_closed: bool,
    blocks: Slots<Owner>,
    /// The other streams that use a block, by its slot, where the plugin does not wait for them itself.
    uses: BTreeMap<u32, Vec<StreamId>>,
    waiting: DeferredFrees<Leaving>,
    released: Vec<Leaving>,
    reserved: Reserved,
    stats: Stats,
}

/// Who asked for a block.
#[derive(Clone, Copy, Debug)]
struct Owner {
    stream: StreamId,
    /// The driver's name of the stream, which a free must repeat.
    handle: u64,
}

/// A block that was given back and waits for other streams.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    address: Address,
    size: u64,
    owner: Owner,
}

impl Plugin {
    pub(super) fn new(plugin: Box<dyn Allocator>, choice: &Choice, setup: &Setup<'_>) -> Plugin {
        Plugin {
            plugin,
            number: c_int::try_from(setup.props.ordinal).unwrap_or(c_int::MAX),
            limit: setup.limit,
            is_new: true,
            is_closed: false,
            blocks: Slots::default(),
            uses: BTreeMap::new(),
            waiting: DeferredFrees::default(),
            released: Vec::new(),
            reserved: Reserved::of(choice.reserved.is_some(), setup.props),
            stats: Stats::default(),
        }
    }

    /// Gives a block to the plugin; it is reusable from here on.
    fn give_back(&mut self, leaving: &Leaving) -> Result<(), Gone> {
        let Leaving { address, size, owner } = *leaving;
        self.plugin.free(address, size as usize, self.number, owner.handle)?;
        self.stats.on_reusable(size, size);
        Ok(())
    }

    /// Gives back what no longer waits for other streams.
    fn release(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut released = std::mem::take(&mut self.released);
        let polled = self.waiting.release(cx.device, patience, &mut released);
        for leaving in released.drain(..) {
            self.give_back(&leaving)?;
            let Leaving { address, size: requested, owner: Owner { stream, .. } } = leaving;
            cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
        }
        self.released = released;
        Ok(polled?)
    }

    /// Brings the books up to date with what is held. What is live is held in any case. Where the driver does not answer,
    /// the figure stays: what the plugin has done is done, and must not be taken back over a figure.
    fn note_reserved(&mut self, cx: &mut Context<'_>) {
        let told = self.reserved.look(&mut *self.plugin, self.number, cx.device);
        let told = told.unwrap_or(Some(self.stats.current.reserved)).unwrap_or(0);
        let held = told.max(self.stats.current.active);
        self.stats.current.reserved = held;
        self.stats.peak.reserved = self.stats.peak.reserved.max(held);
    }

    /// What must happen before the plugin first does anything with the device.
    fn before_first(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.reserved.before_first(cx.device)?;
        if let (true, Some(limit)) = (self.is_new, self.limit) {
            self.plugin.limit(self.number, limit)?;
        }
        (self.is_new, self.is_closed) = (false, false);
        Ok(())
    }

    /// Asks for a block. One that takes what is held beyond the limit, as far as anybody tells, is given back at once.
    fn take(
        &mut self,
        cx: &mut Context<'_>,
        size: usize,
        owner: Owner,
    ) -> Result<Result<Address, Refusal>, StrategyError> {
        let address = self.plugin.alloc(size, self.number, owner.handle)?;
        if address == Address::NULL {
            return Ok(Err(Refusal::Device));
        }
        // Where the driver does not answer, the block stays: it must not be lost over a figure.
        let held = |plugin: &mut Plugin, cx: &mut Context<'_>| {
            plugin.reserved.look(&mut *plugin.plugin, plugin.number, cx.device).ok().flatten()
        };
        if let Some(limit) = self.limit
            && held(self, cx).is_some_and(|held| held > limit)
        {
            self.plugin.free(address, size, self.number, owner.handle)?;
            return Ok(Err(Refusal::Limit));
        }
        Ok(Ok(address))
    }

    fn refused(&mut self, cx: &mut Context<'_>, request: &Request, refused_by: Refusal) -> Attempt {
        self.stats.ooms += 1;
        let &Request { bytes: rounded, stream, .. } = request;
        // The device's books lack what the plugin holds.
        let all = cx.device.free_bytes().min(self.limit.unwrap_or(u64::MAX));
        let device_free = Some(all.saturating_sub(self.stats.current.reserved));
        cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free });
        Attempt::OutOfMemory(Shortage { rounded, asked: rounded, refused_by, device_free })
    }
}

impl Strategy for Plugin {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let &Request { bytes, stream, .. } = request;
        if bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        self.release(cx, Patience::Poll)?;
        if self.limit.is_some_and(|limit| self.stats.current.active.saturating_add(bytes) > limit) {
            return Ok(self.refused(cx, request, Refusal::Limit));
        }
        let Ok(size) = usize::try_from(bytes) else { return Ok(self.refused(cx, request, Refusal::Size)) };
        self.before_first(cx)?;
        let owner = Owner { stream, handle: cx.device.stream_handle(stream) };
        let mut taken = self.take(cx, size, owner)?;
        if taken.is_err() && !self.waiting.is_empty() {
            // What waits here is out of the plugin's reach: to it, it is live.
            self.stats.retries += 1;
            cx.sink.event(StrategyEvent::Retry { rounded: bytes });
            self.release(cx, Patience::Wait)?;
            taken = self.take(cx, size, owner)?;
        }
        if taken == Err(Refusal::Limit) {
            self.plugin.reset()?;
            taken = self.take(cx, size, owner)?;
        }
        let address = match taken {
            Ok(address) => address,
            Err(refused_by) => {
                self.note_reserved(cx);
                return Ok(self.refused(cx, request, refused_by));
            }
        };
        let block = self.blocks.insert(address, bytes, owner);
        self.stats.on_alloc(bytes, bytes);
        let before = self.stats.current.reserved;
        if self.reserved.may_have_grown(&block, self.stats.current.allocated) {
            self.note_reserved(cx);
        }
        let has_grown = self.stats.current.reserved > before;
        Ok(Attempt::Served(block, if has_grown { Outcome::NewSegment } else { Outcome::Hit }))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (size, owner) = self.blocks.get(&block)?;
        let leaving = Leaving { address: block.address, size, owner };
        let others = self.uses.get(&block.slot);
        if let Some(streams) = others {
            self.waiting.hold(cx.device, leaving, streams)?;
        }
        let freed = if others.is_some() { Freed::Later } else { Freed::Now };
        if freed == Freed::Now {
            self.plugin.free(block.address, size as usize, self.number, owner.handle)?;
        }
        self.uses.remove(&block.slot);
        self.blocks.remove(&block)?;
        self.stats.on_free(size);
        if freed == Freed::Now {
            self.stats.on_reusable(size, size);
        }
        if self.reserved.is_free_to_ask() {
            self.note_reserved(cx);
        }
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let (_, owner) = self.blocks.get(block)?;
        if stream == owner.stream || self.plugin.record_stream(block.address, cx.device.stream_handle(stream))? {
            return Ok(());
        }
        let streams = self.uses.entry(block.slot).or_default();
        if let Err(place) = streams.binary_search(&stream) {
            streams.insert(place, stream);
        }
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release(cx, Patience::Wait)?;
        self.plugin.reset()?;
        self.note_reserved(cx);
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release(cx, Patience::Wait)?;
        self.waiting.destroy_idle_events(cx.device)?;
        // A plugin may give the memory to another stream at once, or to the driver: nobody may still be using it.
        cx.device.synchronize()?;
        let live: Vec<(Block, Owner)> = self.blocks.iter().collect();
        for (block, owner) in live {
            self.blocks.remove(&block)?;
            self.plugin.free(block.address, block.size as usize, self.number, owner.handle)?;
        }
        self.plugin.reset()?;
        self.uses.clear();
        self.stats = Stats::default();
        self.is_closed = true;
        Ok(())
    }

    fn stats(&self) -> Stats {
        let off_books = if self.is_closed { OffBooks::Nothing } else { self.reserved.off_books() };
        Stats { off_books, ..self.stats }
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        None
    }

    fn layout(&self) -> Option<Layout> {
        None
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("reserved_is_known", u64::from(self.reserved.is_known())), ("frees_waiting", self.waiting.len() as u64)]
    }

    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}
