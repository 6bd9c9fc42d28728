//! Compares a strategy's layout with its books and with what callers hold.

use super::{
    checked::{Rule, Violations},
    shadow::Shadow,
};
use crate::strategy::{BlockState, BlockView, Layout, SegmentView, Strategy};
use oomph_base::StreamId;

/// Checks the layout; a strategy that has none is left alone.
pub(super) fn layout(strategy: &dyn Strategy, shadow: &Shadow, violations: &mut Violations) {
    let Some(layout) = strategy.layout() else { return };
    tiling(&layout, violations);
    sums(strategy, &layout, violations);
    holdings(&layout, shadow, violations);
}

/// Segments are in order and apart; the blocks of each fill it without gaps.
fn tiling(layout: &Layout, violations: &mut Violations) {
    let real: Vec<&SegmentView> = layout.segments.iter().filter(|segment| !segment.alias).collect();
    for pair in real.windows(2) {
        let end = pair[0].address.offset(pair[0].bytes);
        violations.expect(end <= pair[1].address, Rule::Layout, || {
            format!("the segment at {} ends at {end}, the next begins at {}", pair[0].address, pair[1].address)
        });
    }
    for segment in &layout.segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            violations.expect(block.address == at && block.size > 0, Rule::Layout, || {
                format!(
                    "in the segment at {}: {} bytes at {}, expected at {at}",
                    segment.address, block.size, block.address
                )
            });
            at = block.address.offset(block.size);
        }
        let end = segment.address.offset(segment.bytes);
        violations.expect(at == end, Rule::Layout, || {
            format!("the blocks of the segment at {} end at {at}, it ends at {end}", segment.address)
        });
    }
}

/// Segments sum to reserved, blocks to allocated and active.
fn sums(strategy: &dyn Strategy, layout: &Layout, violations: &mut Violations) {
    let stats = strategy.stats();
    let real = || layout.segments.iter().filter(|segment| !segment.alias);
    let in_state = |state| layout.blocks().filter(|block| block.state == state).map(|block| block.size).sum::<u64>();
    let allocated = in_state(BlockState::Allocated);
    let mut agree = |name: &str, layout: u64, books: u64| {
        violations
            .expect(layout == books, Rule::Layout, || format!("{name}: {layout} in the layout, {books} in the books"));
    };
    agree("reserved", real().map(|segment| segment.bytes).sum(), stats.current.reserved);
    agree("allocated", allocated, stats.current.allocated);
    agree("active", allocated + in_state(BlockState::Pending), stats.current.active);
    // How a strategy counts pieces of mapped memory is its own affair.
    if real().all(|segment| !segment.mapped) {
        agree("segments", real().count() as u64, stats.segments);
    }
    let in_aliases = layout.segments.iter().filter(|segment| segment.alias).flat_map(|segment| &segment.blocks);
    let shown: u64 = in_aliases.filter(|block| is_in_use(block)).map(|block| block.size).sum();
    let lent = in_state(BlockState::Lent);
    violations.expect(lent == shown, Rule::Layout, || {
        format!("{lent} bytes are lent, {shown} are in use under other addresses")
    });
    let free = in_state(BlockState::Free);
    for stream in layout.segments.iter().map(|segment| segment.stream).chain([StreamId::DEFAULT]) {
        let largest = strategy.largest_free(stream).unwrap_or(0);
        violations.expect(largest <= free, Rule::Layout, || {
            format!("{largest} bytes should be free in one piece for stream {stream}, {free} are free in all")
        });
    }
}

/// Every block that callers hold is in the layout, and no other is.
fn holdings(layout: &Layout, shadow: &Shadow, violations: &mut Violations) {
    let mut in_use: Vec<&BlockView> = layout.blocks().filter(|block| is_in_use(block)).collect();
    in_use.sort_unstable_by_key(|block| block.address);
    let mut theirs = in_use.iter().copied().map(|block| (block.address, block.size, block.requested, block.state));
    let mut ours = shadow.held().map(|held| {
        let state = if held.pending { BlockState::Pending } else { BlockState::Allocated };
        (held.block.address, held.block.size, held.requested, state)
    });
    loop {
        let (their, our) = (theirs.next(), ours.next());
        if their != our {
            violations.add(Rule::Layout, format!("the layout has {their:?} where callers hold {our:?}"));
            return;
        }
        if our.is_none() {
            return;
        }
    }
}

fn is_in_use(block: &BlockView) -> bool {
    matches!(block.state, BlockState::Allocated | BlockState::Pending)
}
