//! Continuing from an initial layout: the memory that PyTorch's allocator held when a recording
//! began.
//!
//! Segments and ranges are allocated anew and filled with the blocks of the layout. Where the
//! device puts them elsewhere, blocks keep their offsets in their segment, and segments of one size
//! keep their order, because of two free blocks that fit equally well the lower one is taken.
//! Segments of different sizes keep their order as far as the driver hands out descending
//! addresses, which it does except within 32 MiB.

use std::collections::BTreeMap;

use super::{Caching, MIN_BLOCK_SIZE, pools::DEFAULT_POOL};
use crate::strategy::{
    Block, BlockState, Context, Layout, SegmentView, Strategy, StrategyError,
    pooled::{NONE, PieceState},
};
use oomph_base::Address;

/// Mapped runs of a layout that lie in one range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRange {
    /// Indices of the runs among the segments, in address order; there is at least one.
    pub runs: Vec<usize>,
    /// The size of the range.
    pub bytes: u64,
    /// The step in which it grows.
    pub granule: u64,
}

impl Caching {
    /// Allocates and fills `layout`. Returns the blocks that are not free in it, in its order; the
    /// caller then holds them. They include pending blocks: the layout does not say which streams
    /// those wait for, so the caller frees them again.
    ///
    /// Fails if the allocator already has memory, if PyTorch's allocator cannot have produced the
    /// layout, or if the device has too little memory. The allocator is then as new.
    pub fn load_layout(&mut self, cx: &mut Context<'_>, layout: &Layout) -> Result<Vec<Block>, StrategyError> {
        if self.blocks.iter().next().is_some() {
            return Err(StrategyError::Refused(
                "only an allocator without memory can continue from a layout".to_owned(),
            ));
        }
        let step = if self.rules().one_division_keeps_size { 1 } else { MIN_BLOCK_SIZE };
        layout.segments.iter().try_for_each(|segment| check(segment, step))?;
        let loaded = self.load_segments(cx, layout);
        if loaded.is_err() {
            self.close(cx)?;
        }
        loaded
    }

    fn load_segments(&mut self, cx: &mut Context<'_>, layout: &Layout) -> Result<Vec<Block>, StrategyError> {
        let segments = &layout.segments;
        let mut heads = vec![NONE; segments.len()];
        for range in self.shared_ranges(layout) {
            self.load_range(cx, segments, &range, &mut heads)?;
        }
        for (segment, head) in segments.iter().zip(&mut heads).filter(|(segment, _)| !segment.mapped).rev() {
            *head = self.load_segment(cx, segment)?;
        }
        self.sort_equal_segments(segments, &mut heads);
        let mut held = Vec::new();
        for (segment, head) in segments.iter().zip(heads) {
            self.fill(segment, head, &mut held);
        }
        Ok(held)
    }

    /// The mapped runs by range: runs of one arena that are close enough share one. The order is
    /// that in which [`load_layout`](Caching::load_layout) reserves ranges.
    pub fn shared_ranges(&self, layout: &Layout) -> Vec<SharedRange> {
        let segments = &layout.segments;
        let mut ranges: Vec<SharedRange> = Vec::new();
        for (place, run) in segments.iter().enumerate().filter(|(_, segment)| segment.mapped) {
            let (bytes, granule) = self.range_size(is_large(run));
            let same = |range: &&mut SharedRange| {
                let first = &segments[range.runs[0]];
                let arena = |run: &SegmentView| (run.stream, is_large(run), run.pool_id);
                arena(first) == arena(run) && end(run).saturating_sub(first.address.0) <= bytes
            };
            match ranges.iter_mut().find(same) {
                Some(range) => range.runs.push(place),
                None => ranges.push(SharedRange { runs: vec![place], bytes, granule }),
            }
        }
        ranges
    }

    /// Reserves a range and maps its runs, at their old addresses if those lie in it.
    fn load_range(
        &mut self,
        cx: &mut Context<'_>,
        segments: &[SegmentView],
        range: &SharedRange,
        heads: &mut [u32],
    ) -> Result<(), StrategyError> {
        let first = &segments[range.runs[0]];
        let arena = self.layout_arena(first)?;
        let mut rest = self.reserve_range(cx, arena)?;
        let (base, all) = (self.blocks[rest].address, self.blocks[rest].end());
        let fits = |run: &SegmentView| {
            run.address.0 >= base && end(run) <= all && (run.address.0 - base).is_multiple_of(range.granule)
        };
        let stays = range.runs.iter().all(|&run| fits(&segments[run]));
        for &place in &range.runs {
            let run = &segments[place];
            let address = if stays { run.address.0 } else { base + (run.address.0 - first.address.0) };
            // The unmapped rest of the range begins at the end of the previous run; two runs never
            // touch.
            let left = if rest == NONE { all } else { self.blocks[rest].address };
            let touches = address < left || address == left && place > range.runs[0];
            if touches || address.checked_add(run.bytes).is_none_or(|end| end > all) {
                let reason = format!("the mapped run at {} does not fit in one range with the others", run.address);
                return Err(StrategyError::Refused(reason));
            }
            let offset = address - left;
            if !offset.is_multiple_of(range.granule) || !run.bytes.is_multiple_of(range.granule) {
                let (address, granule) = (run.address, range.granule);
                return Err(StrategyError::Refused(format!(
                    "the mapped run at {address} is not in steps of {granule}"
                )));
            }
            if offset > 0 {
                self.split_unmapped(rest, offset);
            }
            if !self.map_block(cx, rest, run.bytes)? {
                return Err(StrategyError::Refused("the device has too little memory for the layout".to_owned()));
            }
            let pool = self.pools.arenas[arena as usize].pool();
            self.pools.pools[pool as usize].segments += 1;
            heads[place] = rest;
            rest = self.blocks[rest].next;
        }
        Ok(())
    }

    /// Splits the first `bytes` off an unmapped block.
    fn split_unmapped(&mut self, slot: u32, bytes: u64) {
        let block = &mut self.blocks[slot];
        let (address, arena) = (block.address, block.arena());
        (block.address, block.size) = (address + bytes, block.size - bytes);
        let front = block.sibling(address, bytes, PieceState::Unmapped, self.numbers.of_part(block.number()));
        let front = self.blocks.insert_before(slot, front);
        let unmapped = &mut self.pools.arenas[arena].unmapped;
        unmapped.insert(address, front);
        unmapped.insert(address + bytes, slot);
    }

    /// Allocates an ordinary segment.
    fn load_segment(&mut self, cx: &mut Context<'_>, segment: &SegmentView) -> Result<u32, StrategyError> {
        cx.expect_stream(segment.stream)?;
        let arena = self.layout_arena(segment)?;
        let address = cx.device.alloc(segment.bytes)?;
        let slot = self.record_segment(cx, arena, address, segment.bytes);
        self.pools.arenas[arena as usize].free.insert(self.blocks[slot].entry(slot));
        Ok(slot)
    }

    /// Assigns new segments of one arena and size to the segments of the layout in address order.
    fn sort_equal_segments(&self, segments: &[SegmentView], heads: &mut [u32]) {
        let mut alike: BTreeMap<(u32, u64), Vec<usize>> = BTreeMap::new();
        for (place, segment) in segments.iter().enumerate().filter(|(_, segment)| !segment.mapped) {
            alike.entry((self.blocks[heads[place]].region, segment.bytes)).or_default().push(place);
        }
        for places in alike.values_mut() {
            places.sort_unstable_by_key(|&place| segments[place].address);
            let mut in_order: Vec<u32> = places.iter().map(|&place| heads[place]).collect();
            in_order.sort_unstable_by_key(|&head| self.blocks[head].address);
            for (&mut place, head) in places.iter_mut().zip(in_order) {
                heads[place] = head;
            }
        }
    }

    fn layout_arena(&mut self, segment: &SegmentView) -> Result<u32, StrategyError> {
        let pool = match segment.pool_id {
            (0, 0) => DEFAULT_POOL,
            key => self.pools.inherit(key)?,
        };
        Ok(self.pools.arena(pool * 2 + u32::from(is_large(segment)), segment.stream))
    }

    /// Splits a segment, which is one free block so far, into its blocks.
    fn fill(&mut self, segment: &SegmentView, head: u32, held: &mut Vec<Block>) {
        let owner = &mut self.pools.arenas[self.blocks[head].arena()];
        owner.free.remove(self.blocks[head].entry(head));
        let (large, now) = (owner.is_large(), owner.clock);
        let last = segment.blocks.len() - 1;
        for (place, view) in segment.blocks.iter().enumerate() {
            let slot = if place < last { self.blocks.cut_front(head, view.size, now).0 } else { head };
            let block = &mut self.blocks[slot];
            if place < last {
                block.links[1] = self.numbers.of_part(block.links[1]);
            }
            block.requested = view.requested;
            block.set_freed_at(now);
            if view.state == BlockState::Free {
                block.state = PieceState::Free;
                owner.free.insert(block.entry(slot));
                if last > 0 && !segment.mapped {
                    self.statistics.raise_inactive_split(large, 1, view.size);
                }
                continue;
            }
            block.state = PieceState::Allocated;
            block.generation = block.generation.wrapping_add(1);
            let (address, generation) = (Address(block.address), block.generation);
            held.push(Block { address, size: view.size, slot, generation });
            self.statistics.on_alloc(large, view.requested, view.size);
            if view.size >= self.settings.max_split_size {
                self.statistics.oversize_allocations.raise();
            }
        }
    }
}

fn is_large(segment: &SegmentView) -> bool {
    segment.pool == "large"
}

fn end(segment: &SegmentView) -> u64 {
    segment.address.0.saturating_add(segment.bytes)
}

/// Refuses what PyTorch's allocator never leaves: gaps, adjacent free blocks, sizes that are not
/// rounded.
fn check(segment: &SegmentView, step: u64) -> Result<(), StrategyError> {
    let mut at = segment.address.0;
    let mut after_free = false;
    for block in &segment.blocks {
        let is_free = block.state == BlockState::Free;
        let behind = at.checked_add(block.size);
        let sound = block.address.0 == at
            && behind.is_some()
            && block.size >= MIN_BLOCK_SIZE
            && block.size.is_multiple_of(step)
            && (is_free || block.requested <= block.size)
            && !(is_free && after_free)
            && block.state != BlockState::Lent;
        if !sound {
            let reason = format!("the block at {} cannot lie in a segment of this allocator", block.address);
            return Err(StrategyError::Refused(reason));
        }
        (at, after_free) = (behind.unwrap_or(at), is_free);
    }
    let fill_it = segment.address.0.checked_add(segment.bytes) == Some(at);
    if segment.blocks.is_empty() || !fill_it || segment.alias {
        let reason = format!("the blocks of the segment at {} do not fill it", segment.address);
        return Err(StrategyError::Refused(reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        CallKind, Device,
        sim::{SimConfig, SimDevice},
        wrap::{CallFailure, FaultPlan, FaultyDevice},
    };
    use crate::strategy::{Attempt, BlockView, Caller, Request, Setup, Silent};
    use oomph_base::{MIB, SiteId, StreamId, ThreadId};
    use oomph_pytorch::AllocatorSettings;

    fn device() -> SimDevice {
        let mut device = SimDevice::new("sim:8GiB".parse::<SimConfig>().unwrap()).unwrap();
        device.stream_create(32).unwrap();
        device
    }

    fn caching(settings: &str, device: &SimDevice) -> Caching {
        let settings = AllocatorSettings::default().updated(settings).unwrap();
        Caching::new(settings, &Setup { props: device.props(), limit: None })
    }

    fn alloc(caching: &mut Caching, device: &mut dyn Device, bytes: u64, stream: u16) -> Block {
        let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
        match caching.alloc(&mut Context { device, sink: &mut Silent }, &request).unwrap() {
            Attempt::Served(block, _) => block,
            other => panic!("{other:?}"),
        }
    }

    fn free(caching: &mut Caching, device: &mut dyn Device, block: Block) {
        caching.free(&mut Context { device, sink: &mut Silent }, block, Caller::default()).unwrap();
    }

    /// Sizes from 1 byte to 40 MiB on two streams, with holes.
    fn after_a_while(settings: &str) -> (Caching, SimDevice) {
        let mut device = device();
        let mut caching = caching(settings, &device);
        let mut live = Vec::new();
        for step in 0..400_u64 {
            let bytes = if step % 2 == 0 { 1 + step * 7_919 % MIB } else { 1 + step * 7_919_993 % (40 * MIB) };
            live.push(alloc(&mut caching, &mut device, bytes, (step % 2) as u16));
            if step % 3 > 0 {
                free(&mut caching, &mut device, live.swap_remove((step * 31 % live.len() as u64) as usize));
            }
            if step == 200 {
                caching.trim(&mut Context { device: &mut device, sink: &mut Silent }).unwrap();
            }
        }
        (caching, device)
    }

    /// Everything but where segments lie, which for new ones is the device's affair.
    fn shape(mut layout: Layout) -> Layout {
        for segment in &mut layout.segments {
            let start = std::mem::replace(&mut segment.address, Address(0)).0;
            segment.blocks.iter_mut().for_each(|block| block.address.0 -= start);
        }
        layout.segments.sort_by_cached_key(|segment| format!("{segment:?}"));
        layout
    }

    /// Sizes and states of the blocks of a segment.
    type Content = Vec<(u64, BlockState)>;

    /// What lies in the segments of each size and stream, in the order of their addresses.
    fn in_order(layout: &Layout) -> BTreeMap<(u64, StreamId, String), Vec<Content>> {
        let mut kinds: BTreeMap<_, Vec<_>> = BTreeMap::new();
        assert!(layout.segments.is_sorted_by_key(|segment| segment.address));
        for segment in &layout.segments {
            let blocks = segment.blocks.iter().map(|block| (block.size, block.state)).collect();
            kinds.entry((segment.bytes, segment.stream, segment.pool.to_string())).or_default().push(blocks);
        }
        kinds
    }

    const SETTINGS: [&str; 3] = ["", "expandable_segments:True", "max_split_size_mb:20"];

    #[test]
    fn resumed_allocator_decides_the_same() {
        for settings in SETTINGS {
            let (mut caching, mut device) = after_a_while(settings);
            let layout = caching.layout().unwrap();
            let mut other = self::device();
            let mut resumed = self::caching(settings, &other);
            let held = resumed.load_layout(&mut Context { device: &mut other, sink: &mut Silent }, &layout).unwrap();
            assert_eq!(held.len() as u64, caching.stats().live_blocks, "{settings}");
            assert_eq!(in_order(&resumed.layout().unwrap()), in_order(&layout), "{settings}");
            assert_eq!(resumed.stats().current, caching.stats().current, "{settings}");
            for name in ["segment.all.current", "inactive_split.all.current", "inactive_split_bytes.small_pool.current"]
            {
                let figure = |caching: &Caching| caching.details().into_iter().find(|(known, _)| *known == name);
                assert_eq!(figure(&resumed), figure(&caching), "{settings}: {name}");
            }
            for step in 0..100_u64 {
                let (bytes, stream) = (1 + step * 2_919_991 % (30 * MIB), (step % 2) as u16);
                let one = alloc(&mut caching, &mut device, bytes, stream);
                let two = alloc(&mut resumed, &mut other, bytes, stream);
                assert_eq!(one.size, two.size, "{settings}: {step}");
                if step % 3 == 0 {
                    free(&mut caching, &mut device, one);
                    free(&mut resumed, &mut other, two);
                }
            }
            assert_eq!(shape(resumed.layout().unwrap()), shape(caching.layout().unwrap()), "{settings}");
            let mut cx = Context { device: &mut other, sink: &mut Silent };
            for block in held {
                resumed.free(&mut cx, block, Caller::default()).unwrap();
            }
            resumed.close(&mut cx).unwrap();
            assert_eq!(other.held_bytes(), 0, "{settings}");
        }
    }

    #[test]
    fn failed_load_keeps_nothing() {
        for (settings, call) in [("", CallKind::MemAlloc), ("expandable_segments:True", CallKind::MemCreate)] {
            let (caching, _) = after_a_while(settings);
            let layout = caching.layout().unwrap();
            let mut sim = device();
            let mut resumed = self::caching(settings, &sim);
            let plan = FaultPlan::none().fail_nth(Some(call), 5, CallFailure::OutOfMemory);
            let mut device = FaultyDevice::with(plan, &mut sim as &mut dyn Device);
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            resumed.load_layout(&mut cx, &layout).unwrap_err();
            assert_eq!((device.held_bytes(), resumed.stats().current.reserved), (0, 0), "{settings}");
        }
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let (caching, _) = after_a_while("");
        let sound = caching.layout().unwrap();
        let refused = |spoil: &dyn Fn(&mut Layout)| {
            let mut layout = sound.clone();
            spoil(&mut layout);
            let mut device = device();
            let mut resumed = self::caching("", &device);
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            matches!(resumed.load_layout(&mut cx, &layout), Err(StrategyError::Refused(_)))
        };
        assert!(!refused(&|_| {}));
        assert!(refused(&|layout| layout.segments[0].bytes += 512));
        assert!(refused(&|layout| layout.segments[0].blocks[0].size += 1));
        assert!(refused(&|layout| layout.segments[0].blocks.clear()));
        assert!(
            refused(&|layout| {
                let segment = &mut layout.segments[0];
                (segment.address, segment.bytes) = (Address(u64::MAX - 511), 1024);
                let (address, state) = (segment.address, BlockState::Free);
                segment.blocks = vec![BlockView { address, size: 1024, requested: 0, state }];
            }),
            "it ends behind the last address"
        );
        let mut device = device();
        let mut resumed = self::caching("", &device);
        alloc(&mut resumed, &mut device, 1, 0);
        assert!(resumed.load_layout(&mut Context { device: &mut device, sink: &mut Silent }, &sound).is_err());
    }

    #[test]
    fn touching_or_misaligned_runs_are_refused() {
        let (caching, _) = after_a_while("expandable_segments:True");
        let runs = caching.layout().unwrap().segments;
        let refused = |segments: Vec<SegmentView>| {
            let mut device = device();
            let mut resumed = self::caching("expandable_segments:True", &device);
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            resumed.load_layout(&mut cx, &Layout { segments }).is_err()
        };
        let free = |address: u64, bytes: u64| {
            let mut run = runs[0].clone();
            let block = BlockView { address: Address(address), size: bytes, requested: 0, state: BlockState::Free };
            (run.address, run.bytes, run.blocks) = (Address(address), bytes, vec![block]);
            run.pool = "large".into();
            run
        };
        let granule = 20 * MIB;
        assert!(!refused(vec![free(granule, granule), free(4 * granule, granule)]));
        assert!(refused(vec![free(granule, granule), free(2 * granule, granule)]));
        assert!(refused(vec![free(granule, 2 * granule), free(2 * granule, granule)]));
        assert!(refused(vec![free(granule, granule + 512)]));
        assert!(refused(vec![free(granule, granule), free(3 * granule + 512, granule)]));
        assert!(refused(vec![free(granule, 1 << 40)]));
        for bytes in [u64::MAX - 511, (u64::MAX - 2 * granule) / granule * granule] {
            assert!(refused(vec![free(granule, bytes)]), "{bytes}");
        }
    }
}
