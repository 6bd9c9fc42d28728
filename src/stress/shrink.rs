//! Makes a failing trace as small as it gets.
//!
//! Delta debugging on whole blocks first (request, uses and free at once), then on single events; blocks that matter
//! only together become one; then what is left is made plain: one thread, few streams, small round sizes, nothing in the tables that no event names. Every trace that
//! is tried holds together, so that what fails is the strategy and not the program. This file knows nothing of
//! strategies: whether a trace still fails is for the caller to say.

use super::draft::Draft;
use crate::{
    base::{KIB, MIB, round_up},
    trace::{Trace, check},
};

/// The smallest trace that was found, beginning with `trace`, for which `still_fails` holds; `trace` itself where
/// nothing smaller fails. At most `most_tries` traces are put to the question.
///
/// With tries enough, no block and no event can be left out of the result any more.
pub fn shrink(trace: &Trace, still_fails: &mut dyn FnMut(&Trace) -> bool, most_tries: usize) -> Trace {
    let mut search = Search { best: Draft::of(trace), smallest: trace.clone(), still_fails, tries_left: most_tries };
    search.cut_the_end();
    loop {
        let before = search.best.clone();
        search.drop_blocks();
        search.drop_events();
        search.lump_blocks();
        search.make_plain();
        if search.best == before || search.tries_left == 0 {
            return search.smallest;
        }
    }
}

struct Search<'a> {
    best: Draft,
    /// `best` as a trace, as it was put to the question.
    smallest: Trace,
    still_fails: &'a mut dyn FnMut(&Trace) -> bool,
    tries_left: usize,
}

impl Search<'_> {
    /// Puts a draft to the question; it is the best from now on if it still fails.
    fn accept(&mut self, draft: Draft) -> bool {
        if self.tries_left == 0 || draft == self.best {
            return false;
        }
        let trace = draft.to_trace(&self.smallest.name);
        if check(&trace).is_err() {
            return false;
        }
        self.tries_left -= 1;
        let fails = (self.still_fails)(&trace);
        if fails {
            self.best = draft;
            self.smallest = trace;
        }
        fails
    }

    /// What comes after the failure has nothing to do with it: halves until the failing part is no longer in the first.
    /// Who fails without a single event needs no search.
    fn cut_the_end(&mut self) {
        if self.accept(self.best.first(0)) {
            return;
        }
        let (mut passes, mut fails) = (0, self.best.len());
        while fails - passes > 1 {
            let middle = passes + (fails - passes) / 2;
            if self.accept(self.best.first(middle)) {
                fails = middle;
            } else {
                passes = middle;
            }
        }
    }

    /// Leaves blocks out: halves of all, then quarters, and single ones until none can go.
    fn drop_blocks(&mut self) {
        let blocks = self.best.blocks();
        self.drop_pieces(blocks, |draft, blocks| draft.without_blocks(blocks));
    }

    /// The same with single events.
    fn drop_events(&mut self) {
        let events = self.best.events();
        self.drop_pieces(events, |draft, events| draft.without_events(events));
    }

    /// Where many blocks matter only by what they take together, a few large ones do.
    fn lump_blocks(&mut self) {
        let mut blocks = self.best.blocks();
        while let Some(block) = blocks.pop() {
            if let Some(&into) = blocks.last() {
                // Pages are what runs out: each of the two may have filled its last one only in part.
                let pages = |block| round_up(self.best.size_of(block), 2 * MIB);
                let together = pages(into).saturating_add(pages(block));
                self.accept(self.best.with_size(into, together).without_blocks(&[block]));
            }
        }
    }

    fn drop_pieces(&mut self, mut pieces: Vec<u32>, without: impl Fn(&Draft, &[u32]) -> Draft) {
        let mut size = pieces.len().div_ceil(2).max(1);
        loop {
            let mut dropped = false;
            let mut at = 0;
            while at < pieces.len() && self.tries_left > 0 {
                let end = (at + size).min(pieces.len());
                let smaller = without(&self.best, &pieces[at..end]);
                // Gone already, with something else.
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
            // Single pieces again and again: what could not go before may go now.
            size = (size / 2).max(1);
        }
    }

    fn make_plain(&mut self) {
        self.accept(self.best.without_names());
        self.accept(self.best.without_pauses());
        let threads = self.best.threads();
        if !self.accept(self.best.merging_threads(&threads)) {
            for thread in threads {
                self.accept(self.best.merging_threads(&[thread]));
            }
        }
        let streams = self.best.streams();
        for &stream in streams.iter().rev() {
            // The lowest that will do.
            for &onto in streams.iter().take_while(|&&onto| onto < stream) {
                if self.accept(self.best.merging_stream(stream, onto)) {
                    break;
                }
            }
        }
        self.shrink_sizes();
    }

    /// Every size becomes the smallest round one that will do.
    fn shrink_sizes(&mut self) {
        for bytes in [512, KIB, MIB, 2 * MIB] {
            if self.accept(self.best.with_sizes_up_to(bytes)) {
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

/// Smaller and rounder sizes, the smallest first: powers of two from 512 on and a byte more than those, then the size cut
/// to whole MiB, KiB and half KiB.
fn rounder_than(bytes: u64) -> impl Iterator<Item = u64> {
    let powers = (9..63).flat_map(|power| [1 << power, (1 << power) + 1]).take_while(move |&power| power < bytes);
    let cut = [MIB, KIB, 512].map(|unit| bytes / unit * unit);
    powers.chain(cut.into_iter().filter(move |&cut| cut > 0 && cut < bytes && !cut.is_power_of_two()))
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

    /// Failures of several sorts: of blocks, of their order, of other events, of streams.
    fn complaints() -> Vec<fn(&Trace) -> bool> {
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
        fn what_comes_out_holds_together_still_fails_and_is_never_longer(trace in traces(60), tries in 0..400_usize) {
            for fails in complaints().into_iter().filter(|fails| fails(&trace)) {
                let small = shrink(&trace, &mut |trace| fails(trace), tries);
                prop_assert!(check(&small).is_ok() && fails(&small));
                prop_assert!(small.events.len() <= trace.events.len());
            }
        }

        #[test]
        fn with_tries_enough_no_block_can_be_left_out(trace in traces(60)) {
            for fails in complaints().into_iter().filter(|fails| fails(&trace)) {
                let small = shrink(&trace, &mut |trace| fails(trace), ENOUGH);
                let draft = Draft::of(&small);
                for block in draft.blocks() {
                    let smaller = draft.without_blocks(&[block]).to_trace("smaller");
                    prop_assert!(check(&smaller).is_err() || !fails(&smaller), "block {block} of {small:?}");
                }
            }
        }

        #[test]
        fn no_more_is_asked_than_allowed(trace in traces(40), tries in 0..50_usize) {
            let mut asked = 0;
            shrink(&trace, &mut |_| { asked += 1; true }, tries);
            prop_assert!(asked <= tries);
        }
    }

    #[test]
    fn two_blocks_that_matter_are_found_among_hundreds() {
        let mut story = TraceBuilder::new();
        let stream = story.new_stream().unwrap();
        for number in 0..300 {
            let slot =
                story.alloc(7_000_001 + number, if number % 3 == 0 { stream } else { StreamId::DEFAULT }, TagId(0));
            if number % 50 != 7 {
                story.free(slot);
            }
        }
        let large = |trace: &Trace| kept(trace).iter().filter(|&&bytes| bytes > 3_000_000).count() >= 2;
        let small = shrink(&story.finish("large"), &mut |trace| large(trace), ENOUGH);
        assert_eq!(kept(&small), [4 * MIB, 4 * MIB]);
        assert_eq!((small.events.len(), small.tables.streams().len()), (2, 1));
    }

    #[test]
    fn blocks_that_only_fill_memory_become_few() {
        let mut story = TraceBuilder::new();
        for _ in 0..40 {
            story.alloc(7 * MIB, StreamId::DEFAULT, TagId(0));
        }
        let full = |trace: &Trace| kept(trace).iter().sum::<u64>() > 200 * MIB;
        assert_eq!(kept(&shrink(&story.finish("full"), &mut |trace| full(trace), ENOUGH)).len(), 1);
    }

    #[test]
    fn sizes_are_tried_from_the_smallest_round_one_on() {
        assert_eq!(rounder_than(3000).collect::<Vec<_>>(), [512, 513, 1024, 1025, 2048, 2049, 2560]);
        assert_eq!(rounder_than(513).collect::<Vec<_>>(), [512], "and not itself");
        assert_eq!(rounder_than(512).count(), 0);
        assert_eq!(rounder_than(1).count(), 0);
    }
}
