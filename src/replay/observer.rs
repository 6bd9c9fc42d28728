//! Who watches a replay.

use super::OutOfMemory;
use crate::{
    device::Device,
    strategy::{Block, EventSink, Freed, Outcome, Request, Strategy},
    trace::{Event, Tables},
};

/// Watches a replay. Every method defaults to nothing, and the loop is generic over the observer, so that what is not
/// watched costs nothing.
///
/// Observers are also the [`EventSink`] of the strategy: its inner events arrive between the outer ones that cause
/// them. Combine observers by nesting pairs: `(a, (b, c))`.
pub trait Observer: EventSink {
    /// Before the event is carried out.
    fn before(&mut self, _now: &Moment<'_>) {}
    /// A request was served.
    fn served(&mut self, _now: &Moment<'_>, _request: &Request, _block: &Block, _outcome: Outcome) {}
    /// A block was given back; `requested` is what had been asked for.
    fn freed(&mut self, _now: &Moment<'_>, _block: &Block, _freed: Freed) {}
    /// A request failed.
    fn out_of_memory(&mut self, _now: &Moment<'_>, _report: &OutOfMemory) {}
    /// After the event was carried out, whatever it was.
    fn after(&mut self, _now: &Moment<'_>) {}
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
