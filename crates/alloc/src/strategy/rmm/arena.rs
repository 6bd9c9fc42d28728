//! `arena`: RMM's arenas, one per stream or thread, over a global one.
//!
//! One allocation is taken from the device, and never another. The global arena divides it into
//! superblocks of at least 1 MiB. The global arena serves requests above 1 MiB with the lowest
//! block that fits; if that is an empty superblock, a superblock of the request's size is cut off
//! first. A smaller request takes the lowest block that fits in the superblocks of its own arena.
//! If there is none, its arena gets the superblock of the lowest block that fits in the global
//! arena, or 1 MiB cut from it.
//!
//! Free neighbours are joined within a superblock, and so are empty neighbouring superblocks of the
//! global arena. Memory that another stream might get next is safe because the free synchronizes
//! the freeing stream: for requests above 1 MiB, and for blocks that are not in the freeing
//! stream's own arena. An arena keeps its superblocks, empty or not, until a request fails. Then
//! the whole device is synchronized, every superblock goes back to the global arena, and the
//! request is tried once more.
//!
//! To find the lowest block that fits, RMM visits every block of a tree. Here blocks are divided by
//! the power of two of their size: in a higher class than the request's every block fits, so that
//! only the first of each has to be compared ([`AddressOrder`]).

use std::collections::BTreeMap;

use super::{EMPTY_CACHE, EMPTY_CACHE_PARAMETER, FIRST_REQUEST, QUANTUM, RECORD_STREAM, RmmAmount, rounded};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Caller, Outcome, Parameter, Refusal, Setup, Stats, StrategyEntry, parameters,
    pooled::{
        MemoryPiece, PieceState, PieceTable, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, RegionTable, TakenPiece,
    },
};
use oomph_base::{MIB, StreamId, ThreadId};

/// The registry's line.
pub(crate) const ENTRY: StrategyEntry = StrategyEntry {
    name: "arena",
    summary: "RMM's arenas: first fit in superblocks, one arena per stream or thread",
    origin: "RMM 26.10, arena_memory_resource; Spark on RAPIDS",
    differs: &[FIRST_REQUEST, RECORD_STREAM],
    parameters: &[
        Parameter::text("size", RmmAmount::VALUES, "50%", "taken at the first request; there is no growth"),
        Parameter::text(
            "per_thread",
            "True or False",
            "False",
            "whether threads have a default stream each, and with it an arena",
        ),
        EMPTY_CACHE_PARAMETER,
    ],
    variants: &["size:75%", "per_thread:True,empty_cache:True"],
    build,
};

/// The largest arena and block.
const LARGEST: u64 = u32::MAX as u64 * QUANTUM;
/// The smallest superblock. Requests above this size are served by the global arena.
const SUPERBLOCK: u64 = MIB;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut settings = ArenaSettings { size: RmmAmount::PercentOfFree(50), per_thread: false, empty_cache: false };
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "size" => settings.size = RmmAmount::read(&setting)?,
            EMPTY_CACHE => settings.empty_cache = setting.truth()?,
            _ => settings.per_thread = setting.truth()?,
        }
        Ok(())
    })?;
    if matches!(settings.size, RmmAmount::Bytes(bytes) if bytes < SUPERBLOCK) {
        let reason = format!("'size' is below a superblock of {SUPERBLOCK} bytes");
        return Err(ENTRY.refused(reason));
    }
    let policy = ArenaPolicy {
        settings,
        bytes: 0,
        superblocks: Superblocks::default(),
        free: vec![AddressOrder::default()],
        arenas: BTreeMap::new(),
        gathered: 0,
    };
    Ok(Box::new(PoolStrategy::new(ENTRY.name, policy)))
}

#[derive(Clone, Copy, Debug)]
struct ArenaSettings {
    size: RmmAmount,
    per_thread: bool,
    empty_cache: bool,
}

/// The global arena, and those of streams and threads.
#[derive(Clone, Debug)]
struct ArenaPolicy {
    settings: ArenaSettings,
    /// The size of the device allocation.
    bytes: u64,
    superblocks: Superblocks,
    /// The free blocks of every arena.
    free: Vec<AddressOrder>,
    /// The arena of each stream, or of each thread's default stream.
    arenas: BTreeMap<(StreamId, ThreadId), usize>,
    gathered: u64,
}

impl ArenaPolicy {
    /// The arena of a stream and thread, if it exists.
    #[inline]
    fn arena_of(&self, stream: StreamId, thread: ThreadId) -> Option<usize> {
        self.arenas.get(&self.arena_key(stream, thread)).copied()
    }

    /// Threads differ only on the default stream, and only where each thread has its own.
    #[inline]
    fn arena_key(&self, stream: StreamId, thread: ThreadId) -> (StreamId, ThreadId) {
        let per_thread = self.settings.per_thread && stream == StreamId::DEFAULT;
        (stream, if per_thread { thread } else { ThreadId::default() })
    }

    /// Takes the front of a free block of an arena.
    #[inline]
    fn cut(&mut self, table: &mut RegionTable, owner: usize, slot: u32, size: u64) -> (u32, Outcome) {
        let MemoryPiece { address, size: whole, .. } = table[slot];
        let free = &mut self.free[owner];
        free.remove(address, whole);
        if whole == size {
            return (slot, Outcome::Hit);
        }
        let rest = table.cut(slot, size);
        free.insert(address + size, whole - size, rest);
        (slot, Outcome::Split)
    }

    /// The lowest block of the global arena that fits. Its superblock was cut to size if it was
    /// empty and large.
    fn first_fit_in_global(&mut self, table: &mut RegionTable, size: u64) -> Option<u32> {
        let slot = self.free[GLOBAL].first_fit(size)?;
        let (number, least) = (table[slot].note, size.max(SUPERBLOCK));
        if self.superblocks.0[&number].bytes >= least + SUPERBLOCK && self.superblocks.is_empty(table, number) {
            let MemoryPiece { address, size: whole, .. } = table[slot];
            let rest = self.superblocks.split(table, number, least);
            let global = &mut self.free[GLOBAL];
            global.remove(address, whole);
            global.insert(address, least, slot);
            global.insert(table[rest].address, table[rest].size, rest);
        }
        Some(slot)
    }

    /// Gives a superblock with all its free blocks to another arena.
    fn hand_over(&mut self, table: &RegionTable, number: u32, to: usize) {
        let from = self.superblocks.owner(number);
        for slot in self.superblocks.free_pieces(table, number) {
            let MemoryPiece { address, size, .. } = table[slot];
            self.free[from].remove(address, size);
            self.free[to].insert(address, size, slot);
        }
        self.superblocks.0.entry(number).and_modify(|superblock| superblock.owner = to);
    }

    /// Joins an empty superblock of the global arena, given by its only piece, with empty
    /// neighbours.
    fn join_superblocks(&mut self, table: &mut RegionTable, mut slot: u32) {
        let MemoryPiece { previous, next, .. } = table[slot];
        if self.superblocks.is_empty_global(table, next) {
            self.absorb_next(table, slot);
        }
        if self.superblocks.is_empty_global(table, previous) {
            slot = previous;
            self.absorb_next(table, slot);
        }
        debug_assert!(self.superblocks.is_empty_global(table, slot));
    }

    fn absorb_next(&mut self, table: &mut RegionTable, slot: u32) {
        let global = &mut self.free[GLOBAL];
        for joined in [slot, table[slot].next] {
            global.remove(table[joined].address, table[joined].size);
        }
        self.superblocks.join_next(table, slot);
        global.insert(table[slot].address, table[slot].size, slot);
    }
}

impl PoolPolicy for ArenaPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        rounded(bytes).filter(|&size| size <= LARGEST)
    }

    fn begin(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.bytes = self.settings.size.resolve(device)?.clamp(SUPERBLOCK, LARGEST);
        self.superblocks = Superblocks::default();
        Ok(())
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, _: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let mut owner = GLOBAL;
        if request.size <= SUPERBLOCK {
            owner = match self.arena_of(request.stream, request.thread) {
                Some(owner) => owner,
                None => {
                    self.free.push(AddressOrder::default());
                    let owner = self.free.len() - 1;
                    self.arenas.insert(self.arena_key(request.stream, request.thread), owner);
                    owner
                }
            };
            if let Some(slot) = self.free[owner].first_fit(request.size) {
                return Ok(Some(self.cut(table, owner, slot, request.size)));
            }
        }
        let Some(slot) = self.first_fit_in_global(table, request.size) else { return Ok(None) };
        if owner != GLOBAL {
            self.hand_over(table, table[slot].note, owner);
        }
        Ok(Some(self.cut(table, owner, slot, request.size)))
    }

    #[inline]
    fn before_free(
        &mut self,
        table: &RegionTable,
        device: &mut dyn Device,
        slot: u32,
        caller: Caller,
    ) -> Result<(), DeviceError> {
        let MemoryPiece { size, note, .. } = table[slot];
        let in_own_arena = self.arena_of(caller.stream, caller.thread) == Some(self.superblocks.owner(note));
        if size <= SUPERBLOCK && in_own_arena { Ok(()) } else { device.stream_synchronize(caller.stream) }
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        let note = table[slot].note;
        let owner = self.superblocks.owner(note);
        let free = &mut self.free[owner];
        let take_out = |pieces: &mut PieceTable, gone| free.remove(pieces[gone].address, pieces[gone].size);
        let slot = table.join_free(slot, |piece| piece.note == note, take_out);
        free.insert(table[slot].address, table[slot].size, slot);
        if owner == GLOBAL && self.superblocks.is_empty(table, note) {
            self.join_superblocks(table, slot);
        }
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, _: &PoolRequest) {
        self.superblocks.add(table, slot);
        let MemoryPiece { address, size, .. } = table[slot];
        self.free[GLOBAL].insert(address, size, slot);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        let MemoryPiece { address, size, note, .. } = table[slot];
        self.free[self.superblocks.owner(note)].remove(address, size);
    }

    fn consolidate(&mut self, table: &mut RegionTable, device: &mut dyn Device) -> Result<(), DeviceError> {
        device.synchronize()?;
        for number in self.superblocks.handed_out() {
            self.hand_over(table, number, GLOBAL);
            if self.superblocks.is_empty(table, number) {
                self.join_superblocks(table, number);
            }
        }
        self.gathered += 1;
        Ok(())
    }

    fn trims(&self) -> bool {
        self.settings.empty_cache
    }

    /// Giving the only allocation back does not make room for a request that does not fit into it.
    fn has_released_enough(&self, _: &PoolRequest, _: &Stats, refused_by: Refusal) -> bool {
        refused_by == Refusal::Limit
    }

    fn growth(&mut self, _: &PoolRequest, stats: &Stats, attempt: u32) -> PoolGrowth {
        match (stats.segments, attempt) {
            (0, 0) => PoolGrowth::Ask(self.bytes),
            (0, _) => PoolGrowth::End,
            _ => PoolGrowth::BeyondLimit,
        }
    }

    fn largest_free(&self, _: &RegionTable, stream: StreamId) -> u64 {
        let global = self.free[GLOBAL].largest();
        let own = self.arena_of(stream, ThreadId(0)).map_or(0, |owner| self.free[owner].largest());
        global.max(own.min(SUPERBLOCK))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("superblocks", self.superblocks.0.len() as u64), ("gathered", self.gathered)]
    }
}

/// The arena from which the others take.
const GLOBAL: usize = 0;

/// A run of neighbouring pieces that have its number as their note.
#[derive(Clone, Copy, Debug)]
struct Superblock {
    bytes: u64,
    /// The arena that has it.
    owner: usize,
}

/// All superblocks. The number of each is the slot of its first piece, which never changes.
#[derive(Clone, Debug, Default)]
struct Superblocks(BTreeMap<u32, Superblock>);

impl Superblocks {
    /// Makes a free piece a superblock of the global arena.
    fn add(&mut self, table: &mut RegionTable, first: u32) {
        table[first].note = first;
        self.0.insert(first, Superblock { bytes: table[first].size, owner: GLOBAL });
    }

    #[inline]
    fn owner(&self, number: u32) -> usize {
        self.0[&number].owner
    }

    /// Whether nothing of it is in use: then its first piece is all of it.
    #[inline]
    fn is_empty(&self, table: &RegionTable, number: u32) -> bool {
        table.free_piece(number).is_some_and(|piece| piece.size == self.0[&number].bytes)
    }

    /// Whether a piece is an empty superblock of the global arena.
    fn is_empty_global(&self, table: &RegionTable, slot: u32) -> bool {
        let number = table.free_piece(slot).map(|piece| piece.note);
        number.is_some_and(|number| self.owner(number) == GLOBAL && self.is_empty(table, number))
    }

    /// Cuts an empty superblock; returns the rest, a superblock of the global arena.
    fn split(&mut self, table: &mut RegionTable, number: u32, bytes: u64) -> u32 {
        let rest = table.cut(number, bytes);
        self.0.insert(number, Superblock { bytes, owner: self.owner(number) });
        self.add(table, rest);
        rest
    }

    /// Joins an empty superblock with the next one, which is empty too.
    fn join_next(&mut self, table: &mut RegionTable, number: u32) {
        self.0.remove(&table[number].next);
        table.join_next(number);
        self.0.insert(number, Superblock { bytes: table[number].size, owner: GLOBAL });
    }

    /// The superblocks of streams and threads.
    fn handed_out(&self) -> Vec<u32> {
        self.0.iter().filter(|(_, superblock)| superblock.owner != GLOBAL).map(|(&number, _)| number).collect()
    }

    /// The free pieces of a superblock.
    fn free_pieces(&self, table: &RegionTable, number: u32) -> Vec<u32> {
        let pieces = table.chain(number).take_while(|&slot| table[slot].note == number);
        pieces.filter(|&slot| table[slot].state == PieceState::Free).collect()
    }
}

/// Free blocks in address order, with a fast search for the first that is large enough.
#[derive(Clone, Debug, Default)]
struct AddressOrder {
    /// Size and slot by power of two and address.
    blocks: BTreeMap<(u32, u64), (u64, u32)>,
}

impl AddressOrder {
    /// The slot of the block with the lowest address of at least `bytes`, which is not zero.
    #[inline]
    fn first_fit(&self, bytes: u64) -> Option<u32> {
        let mut power = bytes.ilog2();
        let mut own = self.blocks.range((power, 0)..(power + 1, 0));
        let mut first = own.find(|&(_, &(size, _))| size >= bytes).map(|(&(_, address), &(_, slot))| (address, slot));
        while let Some((&(higher, address), &(_, slot))) = self.blocks.range((power + 1, 0)..).next() {
            first = Some(first.map_or((address, slot), |lowest| lowest.min((address, slot))));
            power = higher;
        }
        first.map(|(_, slot)| slot)
    }

    /// The size of the largest block.
    fn largest(&self) -> u64 {
        let Some((&(power, _), _)) = self.blocks.last_key_value() else { return 0 };
        self.blocks.range((power, 0)..).map(|(_, &(size, _))| size).max().unwrap_or(0)
    }

    #[inline]
    fn insert(&mut self, address: u64, bytes: u64, slot: u32) {
        self.blocks.insert((bytes.ilog2(), address), (bytes, slot));
    }

    #[inline]
    fn remove(&mut self, address: u64, bytes: u64) {
        self.blocks.remove(&(bytes.ilog2(), address));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::bench::RmmBench, *};
    use crate::device::CallKind;
    use oomph_base::KIB;

    const ROOMY: u64 = 64 * MIB;

    #[test]
    fn a_large_request_gets_a_superblock_of_its_own_size() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        assert_eq!(arena.ask(2 * MIB, 0), Ok((0, Outcome::NewSegment)));
        assert_eq!(arena.ask(3 * MIB, 1), Ok((2 * MIB, Outcome::Hit)));
        assert_eq!(arena.growth(), [8 << 20]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
        // A superblock of 2 MiB is too small to cut 1.5 MiB off: it serves whole, and half a MiB
        // stays free in it.
        arena.free(0, 0);
        assert_eq!(arena.ask(1536 * KIB, 0), Ok((0, Outcome::Split)));
        assert_eq!(arena.free_blocks(), [(1536 * KIB, 512 * KIB), (5 * MIB, 3 * MIB)]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
    }

    #[test]
    fn small_requests_take_1_mib_superblocks() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        assert_eq!(arena.alloc(1000, 0), 0);
        assert_eq!(arena.alloc(1000, 1), MIB);
        assert_eq!(arena.alloc(1000, 0), KIB);
        assert_eq!(arena.alloc(1000, 1), MIB + KIB);
        // One MiB is still small, and does not fit beside what is there.
        assert_eq!(arena.alloc(MIB, 0), 2 * MIB);
        assert_eq!(arena.alloc(MIB + 1, 0), 3 * MIB);
        assert_eq!(arena.strategy.largest_free(StreamId(0)), Some(8 * MIB - 3 * MIB - MIB - 256));
    }

    #[test]
    fn the_lowest_block_that_fits_serves_whatever_its_size() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        let blocks = [8, 1, 2, 1].map(|kib| arena.alloc(kib * KIB, 0));
        arena.free(blocks[2], 0);
        arena.free(blocks[0], 0);
        assert_eq!(arena.ask(2 * KIB, 0), Ok((0, Outcome::Split)));
        assert_eq!(arena.ask(6 * KIB, 0), Ok((2 * KIB, Outcome::Hit)));
        assert_eq!(arena.ask(2 * KIB, 0), Ok((blocks[2], Outcome::Hit)));
    }

    #[test]
    fn rest_of_large_block_serves_small_arena() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        let first = arena.alloc(2 * MIB, 0);
        arena.alloc(2 * MIB, 0);
        arena.free(first, 0);
        assert_eq!(arena.alloc(1536 * KIB, 0), 0);
        assert_eq!(arena.ask(256 * KIB, 1), Ok((1536 * KIB, Outcome::Split)));
        // The large block came along: once freed it is the small arena's, and no large request gets
        // it.
        arena.free(0, 0);
        assert_eq!(arena.alloc(1536 * KIB, 0), 4 * MIB);
        assert_eq!(arena.alloc(MIB, 1), 0);
    }

    #[test]
    fn free_waits_if_another_stream_may_reuse() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        let [own, foreign, large] = [KIB, KIB, 2 * MIB].map(|bytes| arena.alloc(bytes, 0));
        arena.free(own, 0);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 0);
        arena.free(foreign, 1);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 1);
        arena.free(large, 0);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 2);
        // A block goes back to its own arena, whichever stream frees it.
        assert_eq!(arena.alloc(2 * KIB, 0), 0);
    }

    #[test]
    fn empty_superblocks_are_joined_with_their_neighbours() {
        let mut arena = RmmBench::new("arena:size:8MiB", ROOMY);
        let blocks = [0; 3].map(|_| arena.alloc(2 * MIB, 0));
        arena.free(blocks[0], 0);
        arena.free(blocks[2], 0);
        assert_eq!(arena.free_blocks(), [(0, 2 * MIB), (4 * MIB, 4 * MIB)]);
        arena.free(blocks[1], 0);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 1));
        assert_eq!(arena.ask(8 * MIB, 0), Ok((0, Outcome::Hit)));
    }

    #[test]
    fn an_arena_keeps_its_superblocks_until_a_request_fails() {
        let mut arena = RmmBench::new("arena:size:4MiB", ROOMY);
        let blocks = [0, 1, 2, 3].map(|stream| (arena.alloc(KIB, stream), stream));
        for (block, stream) in blocks.into_iter().filter(|&(_, stream)| stream != 1) {
            arena.free(block, stream);
        }
        // Stream 1 is still in its superblock: what is empty around it is joined.
        assert_eq!(arena.calls(CallKind::CtxSynchronize), 0);
        assert_eq!(arena.ask(2 * MIB, 0), Ok((2 * MIB, Outcome::ReleaseAndRetry)));
        assert_eq!(arena.calls(CallKind::CtxSynchronize), 1);
        assert_eq!(arena.strategy.details(), [("superblocks", 3), ("gathered", 1)]);
        // Its block is the global arena's now, so that a free waits.
        arena.free(blocks[1].0, 1);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 1);
        assert_eq!(arena.ask(2 * MIB, 1), Ok((0, Outcome::Hit)));
        assert_eq!(arena.ask(KIB, 0), Err(Refusal::Limit));
        assert_eq!(arena.growth(), [4 << 20]);
    }

    #[test]
    fn the_last_superblock_is_not_cut_below_one_mebibyte() {
        let mut arena = RmmBench::new("arena:size:3584KiB", ROOMY);
        assert_eq!([0, 1, 2].map(|stream| arena.alloc(256, stream)), [0, MIB, 2 * MIB]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
        assert_eq!(arena.alloc(MIB, 2), 2 * MIB + 256);
    }

    #[test]
    fn threads_have_arenas_where_they_have_default_streams() {
        let mut arena = RmmBench::new("arena:size:8MiB,per_thread:True", ROOMY);
        assert_eq!((arena.alloc(KIB, 0), arena.alloc(KIB, 1)), (0, MIB));
        arena.thread = ThreadId(1);
        assert_eq!((arena.alloc(KIB, 0), arena.alloc(KIB, 1)), (2 * MIB, MIB + KIB));
    }

    #[test]
    fn arena_takes_half_of_free_memory() {
        let mut arena = RmmBench::new("arena", ROOMY);
        arena.alloc(1, 0);
        assert_eq!(arena.growth(), [32 << 20]);
        let error = crate::strategy::StrategySpec::from("arena:size:512KiB").check().unwrap_err();
        assert_eq!(error.to_string(), "strategy 'arena': 'size' is below a superblock of 1048576 bytes");
    }

    proptest! {
        #[test]
        fn the_order_agrees_with_a_map(
            steps in prop::collection::vec((any::<bool>(), 0..900u64, 1..200u64), 1..600),
        ) {
            let (mut order, mut model) = (AddressOrder::default(), BTreeMap::new());
            for (number, (insert, address, bytes)) in (0u32..).zip(steps) {
                let near = model.range(address..).next().map(|(&address, &(bytes, _))| (address, bytes));
                match (insert, near) {
                    (true, _) if !model.contains_key(&address) => {
                        order.insert(address, bytes, number);
                        model.insert(address, (bytes, number));
                    }
                    (false, Some((near, bytes))) => {
                        order.remove(near, bytes);
                        model.remove(&near);
                    }
                    _ => {}
                }
                for wanted in [1, bytes, 150, 250] {
                    let fits = model.values().find(|&&(size, _)| size >= wanted);
                    prop_assert_eq!(order.first_fit(wanted), fits.map(|&(_, slot)| slot));
                }
                prop_assert_eq!(order.largest(), model.values().map(|&(size, _)| size).max().unwrap_or(0));
            }
        }
    }
}
