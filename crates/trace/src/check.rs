//! Checks a trace: follows its live blocks event by event and rejects the first event that contradicts earlier ones.
//!
//! Every pass over the live blocks of a source goes through [`for_each_checked_event`].

use std::collections::HashSet;

use super::{
    BlockSlot, Event, NO_OPERAND, Op, Source, Tables, TraceError, TraceEventId, TraceSummary, for_each_event,
    summary::SummaryCounter,
};
use oomph_base::StreamId;

/// How far a new slot may be beyond the known ones. Slots are dense, but a trace from which events were removed has gaps.
const WIDEST_GAP: usize = 1 << 16;

/// Reads a whole source and returns its summary, or the first contradiction in it.
///
/// ```
/// use oomph_trace::{TraceBuilder, check};
/// use oomph_base::{StreamId, TagId};
/// let mut builder = TraceBuilder::new();
/// let block = builder.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
/// builder.free(block);
/// builder.free(block);
/// let complaint = check(&builder.finish("twice")).unwrap_err();
/// assert_eq!(complaint.to_string(), "event 2: double free: the block in slot 0 was freed already, at event 1");
/// ```
pub fn check(source: &dyn Source) -> Result<TraceSummary, TraceError> {
    let mut counter = SummaryCounter::default();
    for_each_checked_event(source, |event, block, tables| {
        counter.count(event, block, tables);
        Ok::<(), TraceError>(())
    })?;
    Ok(counter.finish())
}

/// Reads a source from beginning to end and checks it. `visit` gets every event with the block that it requests, frees or
/// uses. Memory use follows the live blocks, not the length of the trace.
pub fn for_each_checked_event<E: From<TraceError>>(
    source: &dyn Source,
    mut visit: impl FnMut(&Event, Option<TracedBlock>, &Tables) -> Result<(), E>,
) -> Result<(), E> {
    let mut checker = TraceChecker::default();
    for_each_event(source, |event, tables| {
        let block = checker.check(event, tables)?;
        visit(event, block, tables)
    })
}

/// A live block of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedBlock {
    /// The number of the block in the trace, from 1. Unlike a slot, it is not reused.
    pub number: u64,
    /// The event that requested it, from 0.
    pub born: u64,
    /// Requested bytes.
    pub bytes: u64,
    /// The stream of the request; the default stream for host memory.
    pub stream: StreamId,
    /// The kind of memory.
    pub memory: MemoryKind,
}

/// The memory that a block is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory.
    Device,
    /// Pinned host memory.
    Host,
}

impl MemoryKind {
    /// The name in messages.
    const fn name(self) -> &'static str {
        match self {
            MemoryKind::Device => "device memory",
            MemoryKind::Host => "pinned host memory",
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum SlotOccupancy {
    NeverUsed,
    Freed { at: u64 },
    Live(TracedBlock),
}

/// Follows the live blocks of a trace.
#[derive(Clone, Debug, Default)]
pub struct TraceChecker {
    /// Number of the next event.
    index: u64,
    blocks: u64,
    slots: Vec<SlotOccupancy>,
    recorded: HashSet<TraceEventId>,
    /// Released pools.
    released: HashSet<(u64, u64)>,
}

impl TraceChecker {
    /// Checks the next event. Returns the block that it requests, frees or uses.
    pub fn check(&mut self, event: &Event, tables: &Tables) -> Result<Option<TracedBlock>, TraceError> {
        let block =
            self.accept(event, tables).map_err(|reason| TraceError::Contradiction { index: self.index, reason })?;
        self.index += 1;
        Ok(block)
    }

    /// The live block in a slot.
    #[must_use]
    pub fn block(&self, slot: BlockSlot) -> Option<TracedBlock> {
        match self.slots.get(slot as usize) {
            Some(SlotOccupancy::Live(block)) => Some(*block),
            _ => None,
        }
    }

    fn accept(&mut self, event: &Event, tables: &Tables) -> Result<Option<TracedBlock>, String> {
        known("thread", event.thread.index(), tables.threads().len())?;
        let stream_known = |stream: StreamId| known("stream", stream.index(), tables.streams().len());
        match event.op {
            Op::Alloc { slot, bytes, stream, tag, site } => {
                stream_known(stream)?;
                known("tag", tag.index(), tables.tags().len())?;
                known("site", site.index(), tables.sites().len())?;
                self.add(slot, bytes, stream, MemoryKind::Device).map(Some)
            }
            Op::Free { slot, stream } => {
                stream_known(stream)?;
                self.remove(slot, MemoryKind::Device).map(Some)
            }
            Op::HostAlloc { slot, bytes } => self.add(slot, bytes, StreamId::DEFAULT, MemoryKind::Host).map(Some),
            Op::HostFree { slot } => self.remove(slot, MemoryKind::Host).map(Some),
            Op::Use { slot, stream } => {
                stream_known(stream)?;
                let block = self.find(slot, "use")?;
                match block.memory {
                    MemoryKind::Device => Ok(Some(block)),
                    MemoryKind::Host => Err(format!("use of slot {slot}, which holds {}", MemoryKind::Host.name())),
                }
            }
            Op::Work { shape, stream, operands } => {
                stream_known(stream)?;
                known("shape", shape as usize, tables.shapes().len())?;
                self.check_operands(operands)?;
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
            Op::UsePool { pool } if self.released.contains(&pool) => {
                Err(format!("requests use pool {pool:?}, which was released"))
            }
            Op::ReleasePool { pool: (0, 0), .. } => Err("the default pool cannot be released".to_owned()),
            Op::ReleasePool { pool, .. } if !self.released.insert(pool) => {
                Err(format!("pool {pool:?} was released already"))
            }
            Op::DeviceSync | Op::EmptyCache | Op::Idle { .. } | Op::UsePool { .. } | Op::ReleasePool { .. } => Ok(None),
        }
    }

    fn check_operands(&self, operands: [BlockSlot; 4]) -> Result<(), String> {
        let count = operands.iter().position(|&slot| slot == NO_OPERAND).unwrap_or(operands.len());
        let (present, absent) = operands.split_at(count);
        if absent.iter().any(|&slot| slot != NO_OPERAND) {
            return Err("work with a gap between its operands".to_owned());
        }
        present.iter().try_for_each(|&slot| self.find(slot, "work").map(|_| ()))
    }

    #[inline]
    fn add(
        &mut self,
        slot: BlockSlot,
        bytes: u64,
        stream: StreamId,
        memory: MemoryKind,
    ) -> Result<TracedBlock, String> {
        if bytes == 0 {
            return Err(format!("a request for zero bytes, into slot {slot}"));
        }
        let position = slot as usize;
        if position >= self.slots.len() {
            if position - self.slots.len() > WIDEST_GAP {
                return Err(format!("slot {slot} after {} slots: slots must be dense", self.slots.len()));
            }
            self.slots.resize(position + 1, SlotOccupancy::NeverUsed);
        }
        if let SlotOccupancy::Live(tenant) = self.slots[position] {
            return Err(format!("a request into slot {slot}, where the block of event {} still lives", tenant.born));
        }
        self.blocks += 1;
        let block = TracedBlock { number: self.blocks, born: self.index, bytes, stream, memory };
        self.slots[position] = SlotOccupancy::Live(block);
        Ok(block)
    }

    #[inline]
    fn remove(&mut self, slot: BlockSlot, memory: MemoryKind) -> Result<TracedBlock, String> {
        let block = match self.slots.get(slot as usize) {
            Some(SlotOccupancy::Freed { at }) => {
                return Err(format!("double free: the block in slot {slot} was freed already, at event {at}"));
            }
            _ => self.find(slot, "free")?,
        };
        if block.memory != memory {
            return Err(format!(
                "frees slot {slot} as {}, but event {} asked for {}",
                memory.name(),
                block.born,
                block.memory.name()
            ));
        }
        self.slots[slot as usize] = SlotOccupancy::Freed { at: self.index };
        Ok(block)
    }

    #[inline]
    fn find(&self, slot: BlockSlot, what: &str) -> Result<TracedBlock, String> {
        match self.slots.get(slot as usize) {
            Some(SlotOccupancy::Live(block)) => Ok(*block),
            Some(SlotOccupancy::Freed { at }) => {
                Err(format!("{what} of slot {slot}, whose block was freed at event {at}"))
            }
            Some(SlotOccupancy::NeverUsed) | None => {
                Err(format!("{what} of slot {slot} before any block was allocated there"))
            }
        }
    }
}

#[inline]
fn known(table: &str, number: usize, count: usize) -> Result<(), String> {
    if number < count { Ok(()) } else { Err(format!("{table} {number} is not in the tables, which know {count}")) }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::Index};

    use super::*;
    use crate::{OpKind, Trace, TraceBuilder, arbitrary::traces};
    use oomph_base::{SiteId, TagId, ThreadId, Work};

    /// A trace with at least one of everything that can go wrong.
    fn builder() -> Trace {
        let mut builder = TraceBuilder::new();
        let stream = builder.new_stream().unwrap();
        let block = builder.alloc(512, stream, TagId(0));
        let buffer = builder.host_alloc(64);
        builder.work(Work::Elementwise { bytes: 8 }, stream, &[buffer, block]);
        builder.use_on(block, StreamId::DEFAULT);
        let event = builder.new_event();
        builder.event_record(event, stream);
        builder.event_wait(event, StreamId::DEFAULT);
        builder.free(block);
        builder.host_free(buffer);
        builder.finish("builder")
    }

    fn complaint(events: Vec<Event>) -> (u64, String) {
        let trace = Trace { events, ..builder() };
        match check(&trace).unwrap_err() {
            TraceError::Contradiction { index, reason } => (index, reason),
            other => panic!("{other}"),
        }
    }

    /// The complaint when this event comes after the first two of the trace: device block in slot 0, buffer in slot 1.
    fn complaint_about(op: Op) -> String {
        let mut events = builder().events;
        events.truncate(2);
        events.push(Event::of(op));
        let (index, reason) = complaint(events);
        assert_eq!(index, 2, "{reason}");
        reason
    }

    fn alloc(slot: BlockSlot) -> Op {
        Op::Alloc { slot, bytes: 1, stream: StreamId(0), tag: TagId(0), site: SiteId(0) }
    }

    #[test]
    fn a_valid_trace_passes() {
        assert_eq!(check(&builder()).unwrap().events, 8);
    }

    #[test]
    fn impossible_requests_are_rejected() {
        assert_eq!(complaint_about(alloc(0)), "a request into slot 0, where the block of event 0 still lives");
        assert_eq!(complaint_about(Op::HostAlloc { slot: 2, bytes: 0 }), "a request for zero bytes, into slot 2");
        assert!(complaint_about(alloc(4_000_000_000)).contains("dense"));
        assert!(complaint_about(alloc(NO_OPERAND)).contains("dense"));
    }

    #[test]
    fn wrong_frees_are_rejected() {
        let stream = StreamId(0);
        assert_eq!(
            complaint_about(Op::Free { slot: 7, stream }),
            "free of slot 7 before any block was allocated there"
        );
        assert_eq!(
            complaint_about(Op::Free { slot: 1, stream }),
            "frees slot 1 as device memory, but event 1 asked for pinned host memory"
        );
        assert_eq!(
            complaint_about(Op::HostFree { slot: 0 }),
            "frees slot 0 as pinned host memory, but event 0 asked for device memory"
        );
        let mut events = builder().events;
        events.push(events[6]);
        assert_eq!(complaint(events), (8, "double free: the block in slot 0 was freed already, at event 6".to_owned()));
    }

    #[test]
    fn uses_of_freed_blocks_are_rejected() {
        let (stream, shape) = (StreamId(0), 0);
        assert!(complaint_about(Op::Use { slot: 1, stream }).contains("host memory"));
        let mut events = builder().events;
        events.push(Event::of(Op::Use { slot: 0, stream }));
        assert_eq!(complaint(events).1, "use of slot 0, whose block was freed at event 6");
        let operands = [0, 5, NO_OPERAND, NO_OPERAND];
        assert!(complaint_about(Op::Work { shape, stream, operands }).starts_with("work of slot 5 before"));
        let operands = [0, NO_OPERAND, 1, NO_OPERAND];
        assert!(complaint_about(Op::Work { shape, stream, operands }).contains("gap"));
    }

    #[test]
    fn numbers_outside_the_tables_are_rejected() {
        let (stream, tag, site) = (StreamId(0), TagId(0), SiteId(0));
        let strange = [
            (Op::StreamSync { stream: StreamId(2) }, "stream 2 is not in the tables, which know 2"),
            (Op::Free { slot: 0, stream: StreamId(9) }, "stream 9 "),
            (Op::Alloc { slot: 2, bytes: 1, stream, tag: TagId(1), site }, "tag 1 "),
            (Op::Alloc { slot: 2, bytes: 1, stream, tag, site: SiteId(1) }, "site 1 "),
            (Op::Mark { kind: crate::MarkKind::Step, label: 1, index: 0 }, "label 1 "),
            (Op::Work { shape: 1, stream, operands: [NO_OPERAND; 4] }, "shape 1 "),
            (Op::EventWait { event: 3, stream }, "waits for event 3, which was never recorded"),
        ];
        for (op, beginning) in strange {
            let reason = complaint_about(op);
            assert!(reason.starts_with(beginning), "{reason}");
        }
        let mut events = builder().events;
        events[0].thread = ThreadId(1);
        assert!(complaint(events).1.starts_with("thread 1 "));
    }

    #[test]
    fn the_summary_counts_events() {
        let summary = check(&builder()).unwrap();
        assert_eq!((summary.peak.bytes, summary.peak.blocks, summary.peak.event), (512, 1, 0));
        assert_eq!((summary.host_peak.bytes, summary.host_peak.event), (64, 1));
        assert_eq!((summary.live_blocks, summary.host_live_blocks), (0, 0));
        assert_eq!((summary.streams, summary.threads), (2, 1));
        assert_eq!((summary.count(OpKind::Free), summary.count(OpKind::Idle)), (1, 0));
        let lifetime = summary.lifetimes.quantile(0.5).unwrap();
        assert_eq!((lifetime.from, lifetime.to, lifetime.count), (4, 7, 1));
    }

    proptest! {
        #[test]
        fn built_traces_pass(trace in traces(200)) {
            let summary = check(&trace).unwrap();
            prop_assert_eq!(summary.events, trace.events.len() as u64);
            prop_assert_eq!(summary.sizes.total(), summary.count(OpKind::Alloc));
            prop_assert_eq!(summary.lifetimes.total(), summary.count(OpKind::Free));
            prop_assert_eq!(summary.count(OpKind::Alloc) - summary.count(OpKind::Free), summary.live_blocks);
        }

        #[test]
        fn a_repeated_event_is_rejected(mut trace in traces(100), which in any::<Index>()) {
            let owning = |event: &Event| {
                matches!(event.op.kind(), OpKind::Alloc | OpKind::Free | OpKind::HostAlloc | OpKind::HostFree)
            };
            let places: Vec<_> = (0..trace.events.len()).filter(|&place| owning(&trace.events[place])).collect();
            prop_assume!(!places.is_empty());
            let place = *which.get(&places);
            trace.events.insert(place, trace.events[place]);
            match check(&trace) {
                Err(TraceError::Contradiction { index, .. }) => prop_assert_eq!(index, place as u64 + 1),
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn a_block_whose_request_is_missing_is_noticed(mut trace in traces(100), which in any::<Index>()) {
            let frees: Vec<_> =
                (0..trace.events.len()).filter(|&place| trace.events[place].op.kind() == OpKind::Free).collect();
            prop_assume!(!frees.is_empty());
            let free = *which.get(&frees);
            let Op::Free { slot: freed, .. } = trace.events[free].op else { unreachable!() };
            let born = trace.events[..free]
                .iter()
                .rposition(|event| matches!(event.op, Op::Alloc { slot, .. } if slot == freed))
                .unwrap();
            trace.events.remove(born);
            let contradicts = matches!(check(&trace), Err(TraceError::Contradiction { .. }));
            prop_assert!(contradicts);
        }
    }
}
