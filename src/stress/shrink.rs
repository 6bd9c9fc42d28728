//! Shrinks a failing trace.
//!
//! Delta debugging: first whole blocks (request, uses and free together), then single events;
//! blocks that matter only by their total size are joined; then the rest is simplified: one thread,
//! few streams, small round sizes, no unused table entries. Every candidate is a valid trace, so
//! that a failure is the strategy's and not the program's. This file does not know strategies: the
//! caller decides whether a trace still fails.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    base::{KIB, MIB, SiteId, StreamId, TagId, ThreadId, Work, round_up},
    trace::{BlockSlot, Event, NO_OPERAND, Op, Tables, Trace, check},
};

/// Returns the smallest trace found for which `still_fails` holds, or `trace` itself if nothing
/// smaller fails. Tries at most `most_tries` traces, until `over` returns true.
///
/// With enough tries, no block and no event of the result can be removed.
pub fn shrink(
    trace: &Trace,
    still_fails: &mut dyn FnMut(&Trace) -> bool,
    most_tries: usize,
    over: &dyn Fn() -> bool,
) -> Trace {
    let mut search = ShrinkSearch {
        best: EditableTrace::of(trace),
        smallest: trace.clone(),
        still_fails,
        tries_left: most_tries,
        over,
    };
    search.cut_end();
    loop {
        let before = search.best.clone();
        search.drop_blocks();
        search.drop_events();
        search.join_blocks();
        search.simplify();
        if search.best == before || search.tries_left == 0 {
            return search.smallest;
        }
    }
}

struct ShrinkSearch<'a> {
    best: EditableTrace,
    /// `best` as a trace, as it was tried.
    smallest: Trace,
    still_fails: &'a mut dyn FnMut(&Trace) -> bool,
    tries_left: usize,
    over: &'a dyn Fn() -> bool,
}

impl ShrinkSearch<'_> {
    /// Tries a candidate, which becomes the best if it still fails.
    fn accept(&mut self, candidate: EditableTrace) -> bool {
        if self.tries_left == 0 || candidate == self.best {
            return false;
        }
        let trace = candidate.to_trace(&self.smallest.name);
        if check(&trace).is_err() {
            return false;
        }
        self.tries_left -= 1;
        if (self.over)() {
            self.tries_left = 0;
            return false;
        }
        let fails = (self.still_fails)(&trace);
        if fails {
            self.best = candidate;
            self.smallest = trace;
        }
        fails
    }

    /// Removes the events after the failure by bisection. A strategy that fails without any event
    /// needs no search.
    fn cut_end(&mut self) {
        if self.accept(self.best.first(0)) {
            return;
        }
        let (mut passes, mut fails) = (0, self.best.parts.len());
        while fails - passes > 1 {
            let middle = passes + (fails - passes) / 2;
            if self.accept(self.best.first(middle)) {
                fails = middle;
            } else {
                passes = middle;
            }
        }
    }

    /// Removes blocks: halves of all, then quarters, and single ones until none can be removed.
    fn drop_blocks(&mut self) {
        let blocks = self.best.blocks();
        self.drop_pieces(blocks, |trace, blocks| trace.without_blocks(blocks));
    }

    /// Removes events in the same way.
    fn drop_events(&mut self) {
        let events = self.best.parts.iter().map(|part| part.number).collect();
        self.drop_pieces(events, |trace, events| trace.without_events(events));
    }

    /// Joins blocks: where only the total size matters, a few large blocks suffice.
    fn join_blocks(&mut self) {
        let mut blocks = self.best.blocks();
        while let Some(block) = blocks.pop() {
            if let Some(&into) = blocks.last() {
                // Memory runs out by pages, and each of the two may have filled its last page only
                // in part.
                let pages = |block| round_up(self.best.size_of(block), 2 * MIB);
                let together = pages(into).saturating_add(pages(block));
                self.accept(self.best.with_size(into, together).without_blocks(&[block]));
            }
        }
    }

    fn drop_pieces(&mut self, mut pieces: Vec<u32>, without: impl Fn(&EditableTrace, &[u32]) -> EditableTrace) {
        let mut size = pieces.len().div_ceil(2).max(1);
        loop {
            let mut dropped = false;
            let mut at = 0;
            while at < pieces.len() && self.tries_left > 0 {
                let end = (at + size).min(pieces.len());
                let smaller = without(&self.best, &pieces[at..end]);
                // Removed already, together with something else.
                let gone = smaller == self.best;
                if gone || self.accept(smaller) {
                    pieces.drain(at..end);
                    dropped |= !gone;
                } else {
                    at = end;
                }
            }
            if self.tries_left == 0 || (size == 1 && !dropped) {
                return;
            }
            // Single pieces are tried repeatedly: one that was needed before may not be needed any
            // more.
            size = (size / 2).max(1);
        }
    }

    /// Removes names, pauses, threads, streams and odd sizes.
    fn simplify(&mut self) {
        self.accept(self.best.with_each(|event| match &mut event.op {
            Op::Alloc { tag, site, .. } => (*tag, *site) = (TagId(0), SiteId(0)),
            Op::Mark { label, .. } => *label = 0,
            _ => {}
        }));
        self.accept(self.best.with_each(|event| event.delta_ns = 0));
        let threads = self.best.threads();
        if !self.accept(self.best.merging_threads(&threads)) {
            for thread in threads {
                self.accept(self.best.merging_threads(&[thread]));
            }
        }
        let streams = self.best.streams();
        for &stream in streams.iter().rev() {
            for &onto in streams.iter().take_while(|&&onto| onto < stream) {
                let merged = self.best.with_each(|event| {
                    if let Some(of) = stream_of(&mut event.op).filter(|of| **of == stream) {
                        *of = onto;
                    }
                });
                if self.accept(merged) {
                    break;
                }
            }
        }
        self.shrink_sizes();
    }

    /// Replaces every size by the smallest round one that still fails.
    fn shrink_sizes(&mut self) {
        for bytes in [512, KIB, MIB, 2 * MIB] {
            if self.accept(self.best.with_sizes(|_, old| old.min(bytes))) {
                break;
            }
        }
        for block in self.best.blocks() {
            for bytes in rounder_than(self.best.size_of(block)) {
                if self.accept(self.best.with_size(block, bytes)) {
                    break;
                }
            }
        }
    }
}

/// Smaller and rounder sizes, the smallest first: powers of two from 512 on and one byte more than
/// those, then the size rounded down to whole MiB, KiB and 512 bytes.
fn rounder_than(bytes: u64) -> impl Iterator<Item = u64> {
    let powers = (9..63).flat_map(|power| [1 << power, (1 << power) + 1]).take_while(move |&power| power < bytes);
    let cut = [MIB, KIB, 512].map(|unit| bytes / unit * unit);
    powers.chain(cut.into_iter().filter(move |&cut| cut > 0 && cut < bytes && !cut.is_power_of_two()))
}

/// A trace from which parts can be removed. Blocks have unique numbers here instead of recycled
/// slots. After every edit the rest becomes a valid trace again: slots are dense, nothing is used
/// that does not exist, and the tables hold only what events name.
#[derive(Clone, Debug)]
struct EditableTrace {
    parts: Vec<EditableEvent>,
    /// The tables of the original trace, which edits do not change.
    tables: Arc<Tables>,
}

/// One event. Slots in its operation hold the unique number of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EditableEvent {
    number: u32,
    event: Event,
}

impl PartialEq for EditableTrace {
    fn eq(&self, other: &EditableTrace) -> bool {
        self.parts == other.parts
    }
}

impl EditableTrace {
    fn of(trace: &Trace) -> EditableTrace {
        let mut blocks = 0;
        let mut blocks_by_slot: BTreeMap<BlockSlot, u32> = BTreeMap::new();
        let mut parts = Vec::with_capacity(trace.events.len());
        for (number, event) in (0..).zip(&trace.events) {
            if let Op::Alloc { slot, .. } | Op::HostAlloc { slot, .. } = event.op {
                blocks_by_slot.insert(slot, blocks);
                blocks += 1;
            }
            let mut event = *event;
            for slot in slots_of(&mut event.op) {
                // A slot that was never allocated gets a number that no block has, and is left out
                // below.
                *slot = blocks_by_slot.get(slot).copied().unwrap_or(NO_OPERAND - 1);
            }
            parts.push(EditableEvent { number, event });
        }
        EditableTrace { parts, tables: Arc::new(trace.tables.clone()) }
    }

    fn to_trace(&self, name: &str) -> Trace {
        let mut rebuilder = TraceRebuilder::new(self);
        let events = self.parts.iter().map(|part| rebuilder.rebuild(part.event)).collect();
        Trace { name: name.to_owned(), events, tables: rebuilder.tables, ..Trace::default() }
    }

    fn blocks(&self) -> Vec<u32> {
        self.parts.iter().filter_map(|part| requested(&part.event.op)).map(|(block, _)| block).collect()
    }

    fn size_of(&self, block: u32) -> u64 {
        let mut requests = self.parts.iter().filter_map(|part| requested(&part.event.op));
        requests.find(|&(of, _)| of == block).map_or(0, |(_, bytes)| bytes)
    }

    /// The streams in use, in order; always includes the default one.
    fn streams(&self) -> Vec<StreamId> {
        let mut streams = BTreeSet::from([StreamId::DEFAULT]);
        for part in &self.parts {
            streams.extend(stream_of(&mut part.event.op.clone()).copied());
        }
        streams.into_iter().collect()
    }

    /// The threads in use, in order; always includes the first one.
    fn threads(&self) -> Vec<ThreadId> {
        let used = self.parts.iter().map(|part| part.event.thread);
        used.chain([ThreadId(0)]).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn first(&self, count: usize) -> EditableTrace {
        self.keep_valid(self.parts[..count.min(self.parts.len())].to_vec())
    }

    /// Removes blocks and everything that is done with them.
    fn without_blocks(&self, blocks: &[u32]) -> EditableTrace {
        let blocks: BTreeSet<u32> = blocks.iter().copied().collect();
        let goes = |part: &EditableEvent| requested(&part.event.op).is_some_and(|(block, _)| blocks.contains(&block));
        self.keep_valid(self.parts.iter().copied().filter(|part| !goes(part)).collect())
    }

    /// Removes events. A removed request removes its block.
    fn without_events(&self, numbers: &[u32]) -> EditableTrace {
        let numbers: BTreeSet<u32> = numbers.iter().copied().collect();
        self.keep_valid(self.parts.iter().copied().filter(|part| !numbers.contains(&part.number)).collect())
    }

    /// Moves the events of these threads to the first one.
    fn merging_threads(&self, threads: &[ThreadId]) -> EditableTrace {
        self.with_each(|event| {
            if threads.contains(&event.thread) {
                event.thread = ThreadId(0);
            }
        })
    }

    /// Changes the size of a block.
    fn with_size(&self, block: u32, size: u64) -> EditableTrace {
        self.with_sizes(|changed, old| if changed == block { size } else { old })
    }

    /// Changes the sizes of blocks.
    fn with_sizes(&self, size: impl Fn(u32, u64) -> u64) -> EditableTrace {
        self.with_each(|event| {
            if let Op::Alloc { slot, bytes, .. } | Op::HostAlloc { slot, bytes } = &mut event.op {
                *bytes = size(*slot, *bytes);
            }
        })
    }

    fn with_each(&self, change: impl Fn(&mut Event)) -> EditableTrace {
        let mut parts = self.parts.clone();
        parts.iter_mut().for_each(|part| change(&mut part.event));
        EditableTrace { parts, tables: Arc::clone(&self.tables) }
    }

    /// Removes uses of blocks that are no longer allocated and waits for events that are no longer
    /// recorded.
    fn keep_valid(&self, mut parts: Vec<EditableEvent>) -> EditableTrace {
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
                // A spin needs no memory; other work would change without its operands.
                *operands = [NO_OPERAND; 4];
                matches!(self.tables.shapes().get(*shape as usize), Some(Work::Spin { .. }))
            }
            _ => true,
        });
        EditableTrace { parts, tables: Arc::clone(&self.tables) }
    }
}

/// The block that an operation requests, and its size.
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

/// Assigns slots and builds tables of what events name.
struct TraceRebuilder<'a> {
    old: &'a Tables,
    tables: Tables,
    streams: BTreeMap<StreamId, StreamId>,
    threads: BTreeMap<ThreadId, ThreadId>,
    slots: BTreeMap<u32, BlockSlot>,
    vacant: Vec<BlockSlot>,
    given: BlockSlot,
}

impl<'a> TraceRebuilder<'a> {
    fn new(trace: &'a EditableTrace) -> TraceRebuilder<'a> {
        let (old, mut tables) = (&*trace.tables, Tables::default());
        // Streams and threads keep their order and their handles, which strategies may depend on.
        let mut streams = BTreeMap::new();
        for stream in trace.streams() {
            let handle = old.streams().get(stream.index()).copied().unwrap_or(0);
            streams.insert(stream, tables.intern_stream(handle).unwrap_or_default());
        }
        let mut threads = BTreeMap::new();
        for thread in trace.threads() {
            let handle = old.threads().get(thread.index()).copied().unwrap_or(0);
            threads.insert(thread, tables.intern_thread(handle).unwrap_or_default());
        }
        TraceRebuilder { old, tables, streams, threads, slots: BTreeMap::new(), vacant: Vec::new(), given: 0 }
    }

    fn rebuild(&mut self, mut event: Event) -> Event {
        event.thread = self.threads.get(&event.thread).copied().unwrap_or_default();
        if let Some(stream) = stream_of(&mut event.op) {
            *stream = self.streams.get(stream).copied().unwrap_or_default();
        }
        match &mut event.op {
            Op::Alloc { tag, site, .. } => {
                *tag = self.old.tags().get(tag.index()).map_or(TagId(0), |tag| self.tables.intern_tag(*tag));
                *site =
                    self.old.sites().get(site.index()).map_or(SiteId(0), |site| self.tables.intern_site(site.raw()));
            }
            Op::Mark { label, .. } => {
                *label =
                    self.old.labels().get(*label as usize).map_or(0, |label| self.tables.intern_label(label.raw()));
            }
            Op::Work { shape, .. } => {
                if let Some(work) = self.old.shapes().get(*shape as usize) {
                    *shape = self.tables.intern_shape(*work);
                }
            }
            _ => {}
        }
        let (allocated, freed) = (
            requested(&event.op).map(|(block, _)| block),
            match event.op {
                Op::Free { slot, .. } | Op::HostFree { slot } => Some(slot),
                _ => None,
            },
        );
        if let Some(block) = allocated {
            let slot = self.vacant.pop().unwrap_or_else(|| {
                self.given += 1;
                self.given - 1
            });
            self.slots.insert(block, slot);
        }
        for slot in slots_of(&mut event.op) {
            *slot = self.slots.get(slot).copied().unwrap_or(NO_OPERAND - 1);
        }
        if let Some(slot) = freed.and_then(|block| self.slots.remove(&block)) {
            self.vacant.push(slot);
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        base::{StreamId, TagId},
        trace::{Op, TraceBuilder, arbitrary::traces},
    };

    const ENOUGH: usize = 1_000_000;

    /// Sizes of blocks that are never freed.
    fn kept(trace: &Trace) -> Vec<u64> {
        let mut live = std::collections::BTreeMap::new();
        for event in &trace.events {
            match event.op {
                Op::Alloc { slot, bytes, .. } => {
                    live.insert(slot, bytes);
                }
                Op::Free { slot, .. } => {
                    live.remove(&slot);
                }
                _ => {}
            }
        }
        live.into_values().collect()
    }

    /// Failures of several kinds: blocks, their order, other events, streams.
    fn predicates() -> Vec<fn(&Trace) -> bool> {
        vec![
            |trace| kept(trace).len() >= 2,
            |trace| kept(trace).iter().any(|&bytes| bytes > 100_000),
            |trace| trace.events.iter().any(|event| matches!(event.op, Op::Use { stream, .. } if stream.0 > 0)),
            |trace| trace.events.iter().filter(|event| matches!(event.op, Op::EventWait { .. })).count() >= 2,
            |trace| {
                trace.events.windows(2).any(|pair| {
                matches!((pair[0].op, pair[1].op), (Op::Free { .. }, Op::Alloc { bytes, .. }) if bytes % 3 == 1)
            })
            },
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn edited_trace_is_valid(trace in traces(60), removed in proptest::collection::vec(0..60_u32, 0..20)) {
            let whole = EditableTrace::of(&trace);
            prop_assert_eq!(whole.to_trace("same").events.len(), trace.events.len());
            for smaller in [whole.without_events(&removed), whole.without_blocks(&removed), whole.first(removed.len())] {
                let error = check(&smaller.to_trace("smaller")).err();
                prop_assert!(error.is_none(), "{error:?}");
            }
        }

        #[test]
        fn rebuilt_trace_is_the_same(trace in traces(40)) {
            let (before, after) = (check(&trace).unwrap(), check(&EditableTrace::of(&trace).to_trace(&trace.name)).unwrap());
            prop_assert_eq!(before.peak, after.peak);
            prop_assert_eq!(EditableTrace::of(&EditableTrace::of(&trace).to_trace("again")).to_trace("again").events, EditableTrace::of(&trace).to_trace("again").events);
        }

        #[test]
        fn result_is_valid_fails_and_is_not_longer(trace in traces(60), tries in 0..400_usize) {
            for fails in predicates().into_iter().filter(|fails| fails(&trace)) {
                let small = shrink(&trace, &mut |trace| fails(trace), tries, &|| false);
                prop_assert!(check(&small).is_ok() && fails(&small));
                prop_assert!(small.events.len() <= trace.events.len());
            }
        }

        #[test]
        fn no_block_can_be_removed(trace in traces(60)) {
            for fails in predicates().into_iter().filter(|fails| fails(&trace)) {
                let small = shrink(&trace, &mut |trace| fails(trace), ENOUGH, &|| false);
                let whole = EditableTrace::of(&small);
                for block in whole.blocks() {
                    let smaller = whole.without_blocks(&[block]).to_trace("smaller");
                    prop_assert!(check(&smaller).is_err() || !fails(&smaller), "block {block} of {small:?}");
                }
            }
        }

        #[test]
        fn number_of_tries_is_limited(trace in traces(40), tries in 0..50_usize) {
            let mut asked = 0;
            shrink(&trace, &mut |_| { asked += 1; true }, tries, &|| false);
            prop_assert!(asked <= tries);
        }
    }

    #[test]
    fn two_of_hundreds_of_blocks_remain() {
        let mut builder = TraceBuilder::new();
        let stream = builder.new_stream().unwrap();
        for number in 0..300 {
            let slot =
                builder.alloc(7_000_001 + number, if number % 3 == 0 { stream } else { StreamId::DEFAULT }, TagId(0));
            if number % 50 != 7 {
                builder.free(slot);
            }
        }
        let large = |trace: &Trace| kept(trace).iter().filter(|&&bytes| bytes > 3_000_000).count() >= 2;
        let small = shrink(&builder.finish("large"), &mut |trace| large(trace), ENOUGH, &|| false);
        assert_eq!(kept(&small), [4 * MIB, 4 * MIB]);
        assert_eq!((small.events.len(), small.tables.streams().len()), (2, 1));
    }

    #[test]
    fn blocks_are_joined() {
        let mut builder = TraceBuilder::new();
        for _ in 0..40 {
            builder.alloc(7 * MIB, StreamId::DEFAULT, TagId(0));
        }
        let full = |trace: &Trace| kept(trace).iter().sum::<u64>() > 200 * MIB;
        assert_eq!(kept(&shrink(&builder.finish("full"), &mut |trace| full(trace), ENOUGH, &|| false)).len(), 1);
    }

    #[test]
    fn sizes_are_tried_in_ascending_order() {
        assert_eq!(rounder_than(3000).collect::<Vec<_>>(), [512, 513, 1024, 1025, 2048, 2049, 2560]);
        assert_eq!(rounder_than(513).collect::<Vec<_>>(), [512]);
        assert_eq!(rounder_than(512).count(), 0);
        assert_eq!(rounder_than(1).count(), 0);
    }
}
