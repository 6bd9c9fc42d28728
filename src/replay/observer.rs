//! Who watches a replay.

use super::OutOfMemory;
use crate::{
    base::TagId,
    device::Device,
    strategy::{Block, EventSink, Freed, Outcome, Request, Silent, Strategy},
    trace::{Event, Tables},
};

/// Watches a replay. Every method defaults to nothing, and the loop is generic over the observer, so that what is not
/// watched costs nothing.
///
/// Observers are also the [`EventSink`] of the strategy: its inner events arrive between the outer ones that cause
/// them.
pub trait Observer: EventSink {
    /// Before the event is carried out.
    fn before(&mut self, _now: &Moment<'_>) {}
    /// A request was served.
    fn served(&mut self, _now: &Moment<'_>, _live: &Live, _outcome: Outcome) {}
    /// A block is about to be given back.
    fn free_requested(&mut self, _now: &Moment<'_>, _live: &Live) {}
    /// A block was given back.
    fn freed(&mut self, _now: &Moment<'_>, _live: &Live, _freed: Freed) {}
    /// A request failed.
    fn out_of_memory(&mut self, _now: &Moment<'_>, _report: &OutOfMemory) {}
    /// After the event was carried out, whatever it was.
    fn after(&mut self, _now: &Moment<'_>) {}
    /// Between two rounds of a repeated trace: every block that is still alive is about to be given back, without
    /// events of its own.
    fn round_ends(&mut self, _strategy: &dyn Strategy) {}
}

/// Nobody watches.
impl Observer for Silent {}

/// A live block and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// The block.
    pub block: Block,
    /// What was asked for.
    pub request: Request,
    /// The number of the event that asked.
    pub born: u64,
    /// Category and layer.
    pub tag: TagId,
}

/// The state of the world at one event.
pub struct Moment<'a> {
    /// The event's number, from 0.
    pub index: u64,
    /// The event.
    pub event: &'a Event,
    /// The side tables.
    pub tables: &'a Tables,
    /// The strategy.
    pub strategy: &'a dyn Strategy,
    /// The device.
    pub device: &'a dyn Device,
}
