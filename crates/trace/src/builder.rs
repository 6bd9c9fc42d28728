//! Builds traces event by event, assigns slots, and marks requests that failed when they were recorded.

use crate::{
    BlockSlot, Category, CollectiveKind, Event, MarkKind, NO_OPERAND, Op, TableFull, Tables, Tag, Trace, TraceEventId,
};
use oomph_base::{FileText, Nanos, SiteId, StreamId, TagId, ThreadId, Work};

/// Builds a trace event by event. Slots of freed blocks are reused, so there are only as many slots as live
/// blocks.
///
/// ```
/// use oomph_base::{StreamId, TagId};
/// use oomph_trace::TraceBuilder;
/// let mut builder = TraceBuilder::new();
/// let block = builder.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
/// builder.free(block);
/// assert_eq!(builder.finish("tiny").events.len(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct TraceBuilder {
    events: Vec<Event>,
    /// The number of events that were taken already.
    taken: usize,
    tables: Tables,
    /// The stream of the block in each slot.
    streams: Vec<StreamId>,
    vacant: Vec<BlockSlot>,
    thread: ThreadId,
    delta_ns: u32,
    next_event: TraceEventId,
}

impl TraceBuilder {
    /// An empty trace.
    #[must_use]
    pub fn new() -> TraceBuilder {
        TraceBuilder::default()
    }

    /// Requests device memory.
    pub fn alloc(&mut self, bytes: u64, stream: StreamId, tag: TagId) -> BlockSlot {
        self.alloc_at(bytes, stream, tag, SiteId(0))
    }

    /// Requests device memory at a call site.
    pub fn alloc_at(&mut self, bytes: u64, stream: StreamId, tag: TagId, site: SiteId) -> BlockSlot {
        let slot = self.take_slot(stream);
        self.push(Op::Alloc { slot, bytes, stream, tag, site });
        slot
    }

    /// Frees a block on its own stream.
    pub fn free(&mut self, slot: BlockSlot) {
        self.free_on(slot, self.streams[slot as usize]);
    }

    /// Frees a block on another stream.
    pub fn free_on(&mut self, slot: BlockSlot, stream: StreamId) {
        self.push(Op::Free { slot, stream });
        self.vacant.push(slot);
    }

    /// Uses a block on another stream.
    pub fn use_on(&mut self, slot: BlockSlot, stream: StreamId) {
        self.push(Op::Use { slot, stream });
    }

    /// Requests pinned host memory.
    pub fn host_alloc(&mut self, bytes: u64) -> BlockSlot {
        let slot = self.take_slot(StreamId::DEFAULT);
        self.push(Op::HostAlloc { slot, bytes });
        slot
    }

    /// Frees pinned host memory.
    pub fn host_free(&mut self, slot: BlockSlot) {
        self.push(Op::HostFree { slot });
        self.vacant.push(slot);
    }

    /// A new stream event. It lives to the end of the trace, so record the same one repeatedly.
    pub fn new_event(&mut self) -> TraceEventId {
        let event = self.next_event;
        self.next_event += 1;
        event
    }

    /// Records an event on a stream.
    pub fn event_record(&mut self, event: TraceEventId, stream: StreamId) {
        self.push(Op::EventRecord { event, stream });
    }

    /// Makes a stream wait for an event.
    pub fn event_wait(&mut self, event: TraceEventId, stream: StreamId) {
        self.push(Op::EventWait { event, stream });
    }

    /// Waits for a stream.
    pub fn stream_sync(&mut self, stream: StreamId) {
        self.push(Op::StreamSync { stream });
    }

    /// Waits for all streams.
    pub fn device_sync(&mut self) {
        self.push(Op::DeviceSync);
    }

    /// Returns cached memory to the driver.
    pub fn empty_cache(&mut self) {
        self.push(Op::EmptyCache);
    }

    /// Lets requests use a pool of memory; `(0, 0)` is the default pool.
    pub fn use_pool(&mut self, pool: (u64, u64)) {
        self.push(Op::UsePool { pool });
    }

    /// Gives up a private pool. `trims`: its free memory goes back to the driver at once.
    pub fn release_pool(&mut self, pool: (u64, u64), trims: bool) {
        self.push(Op::ReleasePool { pool, trims });
    }

    /// Marks a place in the program.
    pub fn mark(&mut self, kind: MarkKind, label: &str, index: u32) {
        let label = self.tables.intern_label(label);
        self.push(Op::Mark { kind, label, index });
    }

    /// Queues work on a stream; at most four operands, the result last.
    pub fn work(&mut self, work: Work, stream: StreamId, operands: &[BlockSlot]) {
        let shape = self.tables.intern_shape(work);
        let mut slots = [NO_OPERAND; 4];
        for (place, &slot) in slots.iter_mut().zip(operands) {
            *place = slot;
        }
        self.push(Op::Work { shape, stream, operands: slots });
    }

    /// Ranks exchange data.
    pub fn collective(&mut self, kind: CollectiveKind, bytes: u64, ranks: u16, stream: StreamId) {
        self.push(Op::Collective { kind, bytes, ranks, stream });
    }

    /// A new stream.
    pub fn new_stream(&mut self) -> Result<StreamId, TableFull> {
        let handle = self.tables.streams().iter().copied().max().unwrap_or(0) + 16;
        self.tables.intern_stream(handle)
    }

    /// The stream with this handle in the traced program.
    pub fn stream_known_as(&mut self, handle: u64) -> Result<StreamId, TableFull> {
        self.tables.intern_stream(handle)
    }

    /// The thread with this handle in the traced program.
    pub fn thread_known_as(&mut self, handle: u64) -> Result<ThreadId, TableFull> {
        self.tables.intern_thread(handle)
    }

    /// The number of a tag.
    pub fn tag(&mut self, category: Category, layer: Option<u16>) -> TagId {
        self.tables.intern_tag(Tag { category, layer })
    }

    /// The number of a call site.
    pub fn site(&mut self, site: &str) -> SiteId {
        self.tables.intern_site(site)
    }

    /// Sets the thread of later events. A new thread gets a new handle.
    pub fn set_thread(&mut self, thread: ThreadId) {
        while self.tables.threads().len() <= thread.index() {
            let handle = self.tables.threads().iter().copied().max().map_or(0, |last| last + 1);
            if self.tables.intern_thread(handle).is_err() {
                break;
            }
        }
        self.thread = thread;
    }

    /// Advances the time of the next event.
    pub fn elapse(&mut self, time: Nanos) {
        match u32::try_from(u64::from(self.delta_ns).saturating_add(time.0)) {
            Ok(delta_ns) => self.delta_ns = delta_ns,
            Err(_) => self.push(Op::Idle { nanos: time.0 }),
        }
    }

    /// The number of live blocks and buffers.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.len() - self.vacant.len()
    }

    /// The number of events not yet taken.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.events.len() - self.taken
    }

    /// The tables so far.
    #[must_use]
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The oldest events that were not taken yet, at most `most`, and the tables. They are dropped when more are taken.
    pub fn take(&mut self, most: usize) -> (&[Event], &Tables) {
        // Events move only when at least as many were removed as move, so that each event moves once on average.
        if self.taken * 2 >= self.events.len() {
            self.events.drain(..self.taken);
            self.taken = 0;
        }
        let first = self.taken;
        self.taken += most.min(self.pending());
        (&self.events[first..self.taken], &self.tables)
    }

    /// The complete trace.
    #[must_use]
    pub fn finish(mut self, name: &str) -> Trace {
        self.events.drain(..self.taken);
        Trace { name: name.to_owned(), events: self.events, tables: self.tables, ..Trace::default() }
    }

    fn take_slot(&mut self, stream: StreamId) -> BlockSlot {
        if let Some(slot) = self.vacant.pop() {
            self.streams[slot as usize] = stream;
            return slot;
        }
        self.streams.push(stream);
        (self.streams.len() - 1) as BlockSlot
    }

    fn push(&mut self, op: Op) {
        self.events.push(Event { op, delta_ns: self.delta_ns, thread: self.thread });
        self.delta_ns = 0;
    }
}

/// The phase in which a trace requests the blocks that existed before its recording.
pub const BEFORE_RECORDING: &str = "before the recording";

const FAILED: &str = "(failed when recorded)";

/// Adds a request that failed when it was recorded: a request that is freed at once, at a call site that marks it.
///
/// A strategy with enough memory serves it for a moment; another one fails as the recorded allocator did. The call site
/// keeps the fact in every format.
pub(crate) fn add_failed_request(builder: &mut TraceBuilder, bytes: u64, stream: StreamId, site: Option<&str>) {
    let site = match site {
        Some(site) => builder.site(&format!("{FAILED} {site}")),
        None => builder.site(FAILED),
    };
    let block = builder.alloc_at(bytes, stream, TagId(0), site);
    builder.free(block);
}

/// Whether the requests of a call site failed when they were recorded.
///
/// ```
/// assert!(oomph_trace::failed_when_recorded(&"(failed when recorded) train.py:12 forward".into()));
/// assert!(!oomph_trace::failed_when_recorded(&"train.py:12 forward".into()));
/// ```
#[must_use]
pub fn failed_when_recorded(site: &FileText) -> bool {
    site.raw().starts_with(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_taken_in_order_while_others_are_added() {
        let (mut builder, mut taken, mut written) = (TraceBuilder::new(), Vec::new(), 0);
        for (added, most) in [(10, 3), (0, 3), (5, 4), (1, 20), (7, 0), (100, 60), (0, 30), (2, 5)] {
            for _ in 0..added {
                builder.elapse(Nanos(written));
                builder.device_sync();
                written += 1;
            }
            taken.extend_from_slice(builder.take(most).0);
            assert_eq!(builder.pending() + taken.len(), written as usize);
        }
        taken.extend(builder.finish("rest").events);
        assert!(taken.iter().map(|event| u64::from(event.delta_ns)).eq(0..written), "{taken:?}");
    }
}
