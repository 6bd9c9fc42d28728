//! Does a trace hold together? Follows the events one by one and refuses the first that contradicts those before it.
//!
//! The writer checks what it writes, `inspect` shows the summary, and tests check what generators make. Memory follows
//! the live blocks, not the length of the trace.

use std::collections::HashSet;

use super::{
    BlockSlot, CHUNK_EVENTS, Event, NO_OPERAND, Op, Source, Summary, Tables, TraceError, TraceEventId, summary::Tally,
};
use crate::unit::StreamId;

/// How far a new slot may lie beyond those seen. Slots are dense, but a trace from which events were taken out has gaps.
const WIDEST_GAP: usize = 1 << 16;

/// Reads a whole source, and says what is in it or what is wrong with it.
///
/// ```
/// use oomph::trace::{TraceBuilder, check};
/// use oomph::unit::{StreamId, TagId};
/// let mut story = TraceBuilder::new();
/// let block = story.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
/// story.free(block);
/// story.free(block);
/// let complaint = check(&story.finish("twice")).unwrap_err();
/// assert_eq!(complaint.to_string(), "event 2: double free: the block in slot 0 was freed already, at event 1");
/// ```
pub fn check(source: &dyn Source) -> Result<Summary, TraceError> {
    let mut reader = source.open()?;
    let mut checker = Checker::new();
    let mut tally = Tally::default();
    let mut chunk = Vec::with_capacity(CHUNK_EVENTS);
    loop {
        reader.read(&mut chunk)?;
        if chunk.is_empty() {
            return Ok(tally.finish(reader.tables()));
        }
        for event in &chunk {
            let resident = checker.check(event, reader.tables())?;
            tally.count(event, resident);
        }
    }
}

/// A live block, as far as the trace tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The how manieth block of the trace it is, from 1. Unlike a slot, it is never given again.
    pub number: u64,
    /// The event that asked for it, from 0.
    pub born: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// The stream it was asked for on; the default stream for host memory.
    pub stream: StreamId,
    /// Where it lives.
    pub place: Place,
}

/// Where a block lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In device memory.
    Device,
    /// In pinned host memory.
    Host,
}

impl Place {
    /// As in "a block of ...".
    const fn name(self) -> &'static str {
        match self {
            Place::Device => "device memory",
            Place::Host => "pinned host memory",
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Slot {
    Untouched,
    Freed { at: u64 },
    Live(Resident),
}

/// Follows a trace event by event.
#[derive(Clone, Debug, Default)]
pub struct Checker {
    /// Events checked so far, and so the number of the next one.
    index: u64,
    blocks: u64,
    slots: Vec<Slot>,
    recorded: HashSet<TraceEventId>,
}

impl Checker {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new() -> Checker {
        Checker::default()
    }

    /// Checks the next event. Gives the block that it allocates, frees or uses.
    pub fn check(&mut self, event: &Event, tables: &Tables) -> Result<Option<Resident>, TraceError> {
        let resident =
            self.judge(event, tables).map_err(|reason| TraceError::Contradiction { index: self.index, reason })?;
        self.index += 1;
        Ok(resident)
    }

    /// The live block in a slot.
    #[must_use]
    pub fn resident(&self, slot: BlockSlot) -> Option<Resident> {
        match self.slots.get(slot as usize) {
            Some(Slot::Live(resident)) => Some(*resident),
            _ => None,
        }
    }

    fn judge(&mut self, event: &Event, tables: &Tables) -> Result<Option<Resident>, String> {
        known("thread", event.thread.index(), tables.threads().len())?;
        let stream_known = |stream: StreamId| known("stream", stream.index(), tables.streams().len());
        match event.op {
            Op::Alloc { slot, bytes, stream, tag, site } => {
                stream_known(stream)?;
                known("tag", tag.index(), tables.tags().len())?;
                known("site", site.index(), tables.sites().len())?;
                self.settle(slot, bytes, stream, Place::Device).map(Some)
            }
            Op::Free { slot, stream } => {
                stream_known(stream)?;
                self.evict(slot, Place::Device).map(Some)
            }
            Op::HostAlloc { slot, bytes } => self.settle(slot, bytes, StreamId::DEFAULT, Place::Host).map(Some),
            Op::HostFree { slot } => self.evict(slot, Place::Host).map(Some),
            Op::Use { slot, stream } => {
                stream_known(stream)?;
                let resident = self.find(slot, "use")?;
                match resident.place {
                    Place::Device => Ok(Some(resident)),
                    Place::Host => Err(format!("use of slot {slot}, which holds {}", Place::Host.name())),
                }
            }
            Op::Work { shape, stream, operands } => {
                stream_known(stream)?;
                known("shape", shape as usize, tables.shapes().len())?;
                self.judge_operands(operands)?;
                Ok(None)
            }
            Op::EventRecord { event, stream } => {
                stream_known(stream)?;
                self.recorded.insert(event);
                Ok(None)
            }
            Op::EventWait { event, stream } => {
                stream_known(stream)?;
                if self.recorded.contains(&event) {
                    Ok(None)
                } else {
                    Err(format!("waits for event {event}, which was never recorded"))
                }
            }
            Op::StreamSync { stream } | Op::Collective { stream, .. } => stream_known(stream).map(|()| None),
            Op::Mark { label, .. } => known("label", label as usize, tables.labels().len()).map(|()| None),
            Op::DeviceSync | Op::EmptyCache | Op::Idle { .. } => Ok(None),
        }
    }

    fn judge_operands(&self, operands: [BlockSlot; 4]) -> Result<(), String> {
        let count = operands.iter().position(|&slot| slot == NO_OPERAND).unwrap_or(operands.len());
        let (present, absent) = operands.split_at(count);
        if absent.iter().any(|&slot| slot != NO_OPERAND) {
            return Err("work with a gap between its operands".to_owned());
        }
        present.iter().try_for_each(|&slot| self.find(slot, "work").map(|_| ()))
    }

    #[inline]
    fn settle(&mut self, slot: BlockSlot, bytes: u64, stream: StreamId, place: Place) -> Result<Resident, String> {
        if bytes == 0 {
            return Err(format!("a request for zero bytes, into slot {slot}"));
        }
        let position = slot as usize;
        if position >= self.slots.len() {
            if position - self.slots.len() > WIDEST_GAP {
                return Err(format!("slot {slot} after {} slots: slots are dense", self.slots.len()));
            }
            self.slots.resize(position + 1, Slot::Untouched);
        }
        if let Slot::Live(tenant) = self.slots[position] {
            return Err(format!("a request into slot {slot}, where the block of event {} still lives", tenant.born));
        }
        self.blocks += 1;
        let resident = Resident { number: self.blocks, born: self.index, bytes, stream, place };
        self.slots[position] = Slot::Live(resident);
        Ok(resident)
    }

    #[inline]
    fn evict(&mut self, slot: BlockSlot, place: Place) -> Result<Resident, String> {
        let resident = match self.slots.get(slot as usize) {
            Some(Slot::Freed { at }) => {
                return Err(format!("double free: the block in slot {slot} was freed already, at event {at}"));
            }
            _ => self.find(slot, "free")?,
        };
        if resident.place != place {
            return Err(format!(
                "frees slot {slot} as {}, but event {} asked for {}",
                place.name(),
                resident.born,
                resident.place.name()
            ));
        }
        self.slots[slot as usize] = Slot::Freed { at: self.index };
        Ok(resident)
    }

    #[inline]
    fn find(&self, slot: BlockSlot, what: &str) -> Result<Resident, String> {
        match self.slots.get(slot as usize) {
            Some(Slot::Live(resident)) => Ok(*resident),
            Some(Slot::Freed { at }) => Err(format!("{what} of slot {slot}, whose block was freed at event {at}")),
            Some(Slot::Untouched) | None => Err(format!("{what} of slot {slot} before any block was allocated there")),
        }
    }
}

#[inline]
fn known(table: &str, number: usize, count: usize) -> Result<(), String> {
    if number < count { Ok(()) } else { Err(format!("{table} {number} is not in the tables, which know {count}")) }
}
