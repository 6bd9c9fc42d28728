//! A trace taken apart, so that pieces can be left out: what [`shrink`](super::shrink) works on.
//!
//! Blocks have numbers of their own here instead of recycled slots. Whatever is left out, the rest becomes a trace again
//! in which slots are dense, nothing is used that is not there, and the tables hold what events name and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    base::{SiteId, StreamId, TagId, ThreadId, Work},
    trace::{BlockSlot, Event, NO_OPERAND, Op, Tables, Trace},
};

/// A trace taken apart.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    parts: Vec<Part>,
    /// Those of the trace; no draft changes them.
    tables: Arc<Tables>,
}

/// One event. Where its operation names a slot, that is the number of a block, which is never given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    number: u32,
    event: Event,
}

impl PartialEq for Draft {
    fn eq(&self, other: &Draft) -> bool {
        self.parts == other.parts
    }
}

impl Draft {
    /// Takes a trace apart.
    pub(super) fn of(trace: &Trace) -> Draft {
        let mut blocks = 0;
        let mut tenants: BTreeMap<BlockSlot, u32> = BTreeMap::new();
        let mut parts = Vec::with_capacity(trace.events.len());
        for (number, event) in (0..).zip(&trace.events) {
            if let Op::Alloc { slot, .. } | Op::HostAlloc { slot, .. } = event.op {
                tenants.insert(slot, blocks);
                blocks += 1;
            }
            let mut event = *event;
            for slot in slots_of(&mut event.op) {
                // What the trace names without having asked for it stays nobody's, and is left out below.
                *slot = tenants.get(slot).copied().unwrap_or(NO_OPERAND - 1);
            }
            parts.push(Part { number, event });
        }
        Draft { parts, tables: Arc::new(trace.tables.clone()) }
    }

    /// Puts it together again.
    pub(super) fn to_trace(&self, name: &str) -> Trace {
        let mut binder = Binder::new(self);
        let events = self.parts.iter().map(|part| binder.bind(part.event)).collect();
        Trace { name: name.to_owned(), events, tables: binder.tables }
    }

    /// How many events there are.
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    /// The blocks, by number.
    pub(super) fn blocks(&self) -> Vec<u32> {
        self.parts.iter().filter_map(|part| requested(&part.event.op)).map(|(block, _)| block).collect()
    }

    /// The events, by number.
    pub(super) fn events(&self) -> Vec<u32> {
        self.parts.iter().map(|part| part.number).collect()
    }

    /// How much is asked for a block.
    pub(super) fn size_of(&self, block: u32) -> u64 {
        let mut requests = self.parts.iter().filter_map(|part| requested(&part.event.op));
        requests.find(|&(of, _)| of == block).map_or(0, |(_, bytes)| bytes)
    }

    /// The streams that are used, in order; the default one is always there.
    pub(super) fn streams(&self) -> Vec<StreamId> {
        let mut streams = BTreeSet::from([StreamId::DEFAULT]);
        for part in &self.parts {
            streams.extend(stream_of(&mut part.event.op.clone()).copied());
        }
        streams.into_iter().collect()
    }

    /// The threads that are used, in order; the first one is always there.
    pub(super) fn threads(&self) -> Vec<ThreadId> {
        let used = self.parts.iter().map(|part| part.event.thread);
        used.chain([ThreadId(0)]).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Only the first events.
    pub(super) fn first(&self, count: usize) -> Draft {
        self.made_of(self.parts[..count.min(self.parts.len())].to_vec())
    }

    /// Leaves blocks out, with all that is done with them.
    pub(super) fn without_blocks(&self, blocks: &[u32]) -> Draft {
        let blocks: BTreeSet<u32> = blocks.iter().copied().collect();
        let goes = |part: &Part| requested(&part.event.op).is_some_and(|(block, _)| blocks.contains(&block));
        self.made_of(self.parts.iter().copied().filter(|part| !goes(part)).collect())
    }

    /// Leaves events out. With a request goes its block.
    pub(super) fn without_events(&self, numbers: &[u32]) -> Draft {
        let numbers: BTreeSet<u32> = numbers.iter().copied().collect();
        self.made_of(self.parts.iter().copied().filter(|part| !numbers.contains(&part.number)).collect())
    }

    /// Without tags, call sites and names of phases.
    pub(super) fn without_names(&self) -> Draft {
        self.with_each(|event| match &mut event.op {
            Op::Alloc { tag, site, .. } => (*tag, *site) = (TagId(0), SiteId(0)),
            Op::Mark { label, .. } => *label = 0,
            _ => {}
        })
    }

    /// Every event right after the one before.
    pub(super) fn without_pauses(&self) -> Draft {
        self.with_each(|event| event.delta_ns = 0)
    }

    /// What these threads do, the first one does.
    pub(super) fn merging_threads(&self, threads: &[ThreadId]) -> Draft {
        self.with_each(|event| {
            if threads.contains(&event.thread) {
                event.thread = ThreadId(0);
            }
        })
    }

    /// What happens on one stream happens on another.
    pub(super) fn merging_stream(&self, stream: StreamId, onto: StreamId) -> Draft {
        self.with_each(|event| {
            if let Some(of) = stream_of(&mut event.op).filter(|of| **of == stream) {
                *of = onto;
            }
        })
    }

    /// Asks for another size.
    pub(super) fn with_size(&self, block: u32, size: u64) -> Draft {
        self.with_each(|event| match &mut event.op {
            Op::Alloc { slot, bytes, .. } | Op::HostAlloc { slot, bytes } if *slot == block => *bytes = size,
            _ => {}
        })
    }

    /// Asks for no more than so much for any block.
    pub(super) fn with_sizes_up_to(&self, most: u64) -> Draft {
        self.with_each(|event| {
            if let Op::Alloc { bytes, .. } | Op::HostAlloc { bytes, .. } = &mut event.op {
                *bytes = (*bytes).min(most);
            }
        })
    }

    fn with_each(&self, change: impl Fn(&mut Event)) -> Draft {
        let mut parts = self.parts.clone();
        parts.iter_mut().for_each(|part| change(&mut part.event));
        Draft { parts, tables: Arc::clone(&self.tables) }
    }

    /// Leaves out what can no longer be done: with blocks that nobody asks for, after events that nobody records.
    fn made_of(&self, mut parts: Vec<Part>) -> Draft {
        let (mut blocks, mut recorded) = (BTreeSet::new(), BTreeSet::new());
        parts.retain_mut(|part| match &mut part.event.op {
            Op::Alloc { slot, .. } | Op::HostAlloc { slot, .. } => {
                blocks.insert(*slot);
                true
            }
            Op::Free { slot, .. } | Op::Use { slot, .. } | Op::HostFree { slot } => blocks.contains(slot),
            Op::EventRecord { event, .. } => {
                recorded.insert(*event);
                true
            }
            Op::EventWait { event, .. } => recorded.contains(event),
            Op::Work { shape, operands, .. } => {
                let gone = |slot: &BlockSlot| *slot != NO_OPERAND && !blocks.contains(slot);
                if !operands.iter().any(gone) {
                    return true;
                }
                // A wait needs no memory; other work without its operands is other work.
                *operands = [NO_OPERAND; 4];
                matches!(self.tables.shapes().get(*shape as usize), Some(Work::Spin { .. }))
            }
            _ => true,
        });
        Draft { parts, tables: Arc::clone(&self.tables) }
    }
}

/// The block that an operation asks for, and how large it is to be.
fn requested(op: &Op) -> Option<(u32, u64)> {
    match *op {
        Op::Alloc { slot, bytes, .. } | Op::HostAlloc { slot, bytes } => Some((slot, bytes)),
        _ => None,
    }
}

/// The slots that an operation names.
fn slots_of(op: &mut Op) -> Vec<&mut BlockSlot> {
    match op {
        Op::Alloc { slot, .. }
        | Op::Free { slot, .. }
        | Op::Use { slot, .. }
        | Op::HostAlloc { slot, .. }
        | Op::HostFree { slot } => vec![slot],
        Op::Work { operands, .. } => operands.iter_mut().filter(|slot| **slot != NO_OPERAND).collect(),
        _ => Vec::new(),
    }
}

/// The stream that an operation is about.
fn stream_of(op: &mut Op) -> Option<&mut StreamId> {
    match op {
        Op::Alloc { stream, .. }
        | Op::Free { stream, .. }
        | Op::Use { stream, .. }
        | Op::EventRecord { stream, .. }
        | Op::EventWait { stream, .. }
        | Op::StreamSync { stream }
        | Op::Work { stream, .. }
        | Op::Collective { stream, .. } => Some(stream),
        _ => None,
    }
}

/// Gives slots, and makes tables of what is named.
struct Binder<'a> {
    old: &'a Tables,
    tables: Tables,
    streams: BTreeMap<StreamId, StreamId>,
    threads: BTreeMap<ThreadId, ThreadId>,
    slots: BTreeMap<u32, BlockSlot>,
    vacant: Vec<BlockSlot>,
    given: BlockSlot,
}

impl<'a> Binder<'a> {
    fn new(draft: &'a Draft) -> Binder<'a> {
        let (old, mut tables) = (&*draft.tables, Tables::default());
        // Streams and threads keep their order and their handles: strategies may look at both.
        let mut streams = BTreeMap::new();
        for stream in draft.streams() {
            let handle = old.streams().get(stream.index()).copied().unwrap_or(0);
            streams.insert(stream, tables.intern_stream(handle).unwrap_or_default());
        }
        let mut threads = BTreeMap::new();
        for thread in draft.threads() {
            let handle = old.threads().get(thread.index()).copied().unwrap_or(0);
            threads.insert(thread, tables.intern_thread(handle).unwrap_or_default());
        }
        Binder { old, tables, streams, threads, slots: BTreeMap::new(), vacant: Vec::new(), given: 0 }
    }

    fn bind(&mut self, mut event: Event) -> Event {
        event.thread = self.threads.get(&event.thread).copied().unwrap_or_default();
        if let Some(stream) = stream_of(&mut event.op) {
            *stream = self.streams.get(stream).copied().unwrap_or_default();
        }
        match &mut event.op {
            Op::Alloc { tag, site, .. } => {
                *tag = self.old.tags().get(tag.index()).map_or(TagId(0), |tag| self.tables.intern_tag(*tag));
                *site = self.old.sites().get(site.index()).map_or(SiteId(0), |site| self.tables.intern_site(site));
            }
            Op::Mark { label, .. } => {
                *label = self.old.labels().get(*label as usize).map_or(0, |label| self.tables.intern_label(label));
            }
            Op::Work { shape, .. } => {
                if let Some(work) = self.old.shapes().get(*shape as usize) {
                    *shape = self.tables.intern_shape(*work);
                }
            }
            _ => {}
        }
        let (comes, goes) = (
            requested(&event.op).map(|(block, _)| block),
            match event.op {
                Op::Free { slot, .. } | Op::HostFree { slot } => Some(slot),
                _ => None,
            },
        );
        if let Some(block) = comes {
            let slot = self.vacant.pop().unwrap_or_else(|| {
                self.given += 1;
                self.given - 1
            });
            self.slots.insert(block, slot);
        }
        for slot in slots_of(&mut event.op) {
            *slot = self.slots.get(slot).copied().unwrap_or(NO_OPERAND - 1);
        }
        if let Some(slot) = goes.and_then(|block| self.slots.remove(&block)) {
            self.vacant.push(slot);
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::{arbitrary::traces, check};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_is_left_out_the_rest_holds_together(trace in traces(60), left_out in proptest::collection::vec(0..60_u32, 0..20)) {
            let draft = Draft::of(&trace);
            prop_assert_eq!(draft.to_trace("same").events.len(), trace.events.len());
            for smaller in [draft.without_events(&left_out), draft.without_blocks(&left_out), draft.first(left_out.len())] {
                let complaint = check(&smaller.to_trace("smaller")).err();
                prop_assert!(complaint.is_none(), "{complaint:?}");
            }
        }

        #[test]
        fn put_together_again_it_is_the_same_story(trace in traces(40)) {
            let (before, after) = (check(&trace).unwrap(), check(&Draft::of(&trace).to_trace(&trace.name)).unwrap());
            prop_assert_eq!(before.peak, after.peak);
            prop_assert_eq!(Draft::of(&Draft::of(&trace).to_trace("again")).to_trace("again").events, Draft::of(&trace).to_trace("again").events);
        }
    }
}
