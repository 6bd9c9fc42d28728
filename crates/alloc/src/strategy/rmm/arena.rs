//! `arena`: RMM's arenas, one per stream or thread, over a global one.
//!
//! One allocation is taken from the device, and there never is another. The global arena divides it into superblocks of
//! at least 1 MiB. A request above 1 MiB is the global arena's: the lowest block that fits serves it, and where that
//! is an empty superblock, a superblock of the request's size is cut off first. A smaller one takes the lowest block
//! that fits in its own arena's superblocks; where there is none, its arena gets the superblock of the lowest block
//! that fits in the global arena, or 1 MiB cut from it.
//!
//! Free neighbours are joined within a superblock, and empty neighbours among the global arena's superblocks. Memory
//! that another stream might get next is safe because the freeing stream is waited for: for requests above 1 MiB,
//! and for blocks that are not in the freeing stream's own arena. An arena keeps its superblocks, empty or not, until a
//! request fails: then the whole device is waited for, every superblock goes back to the global arena, and the request
//! is tried once more.

use super::{
    RmmAmount,
    address_order::{AddressOrder, LARGEST},
    rounded,
};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Caller, Outcome, Parameter, Refusal, Setup, SpecError, Stats, StrategyEntry, parameters,
    pooled::{
        DeviceRegion, MemoryPiece, NONE, PieceState, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, RegionTable,
    },
};
use oomph_base::{MIB, StreamId, ThreadId};

/// The registry's line.
pub(crate) const ENTRY: StrategyEntry = StrategyEntry {
    name: "arena",
    summary: "RMM's arenas: first fit in superblocks, one arena per stream or thread",
    origin: "RMM 26.10, arena_memory_resource; Spark on RAPIDS",
    parameters: &[
        Parameter::text(SIZE, RmmAmount::VALUES, "50%", "taken at the first request; there is no growth"),
        Parameter::text(
            PER_THREAD,
            "True or False",
            "False",
            "whether threads have a default stream each, and with it an arena",
        ),
    ],
    variants: &["size:75%", "per_thread:True"],
    build,
};

const SIZE: &str = "size";
const PER_THREAD: &str = "per_thread";

/// Superblocks are no smaller, and larger requests are the global arena's.
const SUPERBLOCK: u64 = MIB;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut settings = ArenaSettings { size: RmmAmount::PercentOfFree(50), per_thread: false };
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            SIZE => settings.size = RmmAmount::read(&setting)?,
            _ => settings.per_thread = setting.truth()?,
        }
        Ok(())
    })?;
    if matches!(settings.size, RmmAmount::Bytes(bytes) if bytes < SUPERBLOCK) {
        let reason = format!("'{SIZE}' is below a superblock of {SUPERBLOCK} bytes");
        return Err(SpecError::BadParameters { strategy: ENTRY.name, reason });
    }
    Ok(Box::new(PoolStrategy::new(ArenaPolicy::new(settings))))
}

#[derive(Clone, Copy, Debug)]
struct ArenaSettings {
    size: RmmAmount,
    per_thread: bool,
}

/// The global arena, and those of streams and threads.
#[derive(Clone, Debug)]
struct ArenaPolicy {
    settings: ArenaSettings,
    /// What is asked of the device.
    bytes: u64,
    superblocks: Superblocks,
    /// The free blocks of every owner.
    free: Vec<AddressOrder>,
    of_streams: Vec<Option<ArenaId>>,
    of_threads: Vec<Option<ArenaId>>,
    gathered: u64,
}

impl ArenaPolicy {
    fn new(settings: ArenaSettings) -> ArenaPolicy {
        ArenaPolicy {
            settings,
            bytes: 0,
            superblocks: Superblocks::default(),
            free: vec![AddressOrder::default()],
            of_streams: Vec::new(),
            of_threads: Vec::new(),
            gathered: 0,
        }
    }

    /// Whose a stream and thread are.
    #[inline]
    fn arena_of(&self, stream: StreamId, thread: ThreadId) -> Option<ArenaId> {
        let owner = if self.settings.per_thread && stream == StreamId::DEFAULT {
            self.of_threads.get(thread.index())
        } else {
            self.of_streams.get(stream.index())
        };
        owner.copied().flatten()
    }

    #[cold]
    fn make_arena(&mut self, stream: StreamId, thread: ThreadId) -> ArenaId {
        let owner = ArenaId::arena(self.free.len() - 1);
        self.free.push(AddressOrder::default());
        let (owners, place) = if self.settings.per_thread && stream == StreamId::DEFAULT {
            (&mut self.of_threads, thread.index())
        } else {
            (&mut self.of_streams, stream.index())
        };
        if owners.len() <= place {
            owners.resize(place + 1, None);
        }
        owners[place] = Some(owner);
        owner
    }

    /// Takes the front of a free block of this owner.
    #[inline]
    fn cut(&mut self, table: &mut RegionTable, owner: ArenaId, slot: u32, size: u64) -> (u32, Outcome) {
        let MemoryPiece { address, size: whole, .. } = table[slot];
        let free = &mut self.free[owner.index()];
        if whole == size {
            free.remove(address);
            return (slot, Outcome::Hit);
        }
        let rest = table.cut(slot, size);
        free.replace(address, address + size, whole - size, rest);
        (slot, Outcome::Split)
    }

    /// The lowest block of the global arena that fits, in a superblock that was cut to size if it was empty and large.
    fn first_fit_in_global(&mut self, table: &mut RegionTable, size: u64) -> Option<u32> {
        let slot = self.free[ArenaId::GLOBAL.index()].first_fit(size)?;
        let (number, least) = (table[slot].note, size.max(SUPERBLOCK));
        if self.superblocks.bytes(number) >= least + SUPERBLOCK && self.superblocks.empty(table, number).is_some() {
            let rest = self.superblocks.split(table, number, least);
            let MemoryPiece { address, size, .. } = table[rest];
            let global = &mut self.free[ArenaId::GLOBAL.index()];
            global.replace(table[slot].address, address, size, rest);
            global.insert(table[slot].address, least, slot);
        }
        Some(slot)
    }

    /// Hands a superblock with all its free blocks to another owner.
    fn hand_over(&mut self, table: &RegionTable, number: u32, to: ArenaId) {
        let from = self.superblocks.owner(number);
        for slot in self.superblocks.free_pieces(table, number) {
            let MemoryPiece { address, size, .. } = table[slot];
            self.free[from.index()].remove(address);
            self.free[to.index()].insert(address, size, slot);
        }
        self.superblocks.give_to(number, to);
    }

    /// Joins an empty superblock of the global arena, given by its only piece, with its empty neighbours.
    fn join_superblocks(&mut self, table: &mut RegionTable, slot: u32) {
        let mut slot = slot;
        let MemoryPiece { previous, next, .. } = table[slot];
        if self.superblocks.empty_around(table, next).is_some() {
            self.absorb_next(table, slot);
        }
        if self.superblocks.empty_around(table, previous).is_some() {
            slot = previous;
            self.absorb_next(table, slot);
        }
        debug_assert!(self.superblocks.empty_around(table, slot).is_some());
    }

    fn absorb_next(&mut self, table: &mut RegionTable, slot: u32) {
        let next = table[table[slot].next].address;
        self.superblocks.join_next(table, slot);
        let MemoryPiece { address, size, .. } = table[slot];
        let global = &mut self.free[ArenaId::GLOBAL.index()];
        global.remove(next);
        global.replace(address, address, size, slot);
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
    fn take(
        &mut self,
        table: &mut RegionTable,
        _: &mut dyn Device,
        request: &PoolRequest,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        let mut owner = ArenaId::GLOBAL;
        if request.size <= SUPERBLOCK {
            owner = match self.arena_of(request.stream, request.thread) {
                Some(owner) => owner,
                None => self.make_arena(request.stream, request.thread),
            };
            if let Some(slot) = self.free[owner.index()].first_fit(request.size) {
                return Ok(Some(self.cut(table, owner, slot, request.size)));
            }
        }
        let Some(slot) = self.first_fit_in_global(table, request.size) else { return Ok(None) };
        if owner != ArenaId::GLOBAL {
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
        let MemoryPiece { address, size, previous, next, note, .. } = table[slot];
        let owner = self.superblocks.owner(note);
        let free = &mut self.free[owner.index()];
        let joins = |piece: &&MemoryPiece| piece.note == note;
        let before = table.free_piece(previous).filter(joins).map(|piece| (piece.address, piece.size));
        let after = table.free_piece(next).filter(joins).map(|piece| (piece.address, piece.size));
        let mut slot = slot;
        if after.is_some() {
            table.join_next(slot);
        }
        if before.is_some() {
            table.join_next(previous);
            slot = previous;
        }
        match (before, after) {
            (Some((address, before)), None) => free.replace(address, address, before + size, slot),
            (None, Some((next, after))) => free.replace(next, address, size + after, slot),
            (None, None) => free.insert(address, size, slot),
            (Some((address, before)), Some((next, after))) => {
                free.remove(next);
                free.replace(address, address, before + size + after, slot);
            }
        }
        if owner == ArenaId::GLOBAL && self.superblocks.empty(table, note).is_some() {
            self.join_superblocks(table, slot);
        }
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, _: &PoolRequest) {
        self.superblocks.add(table, slot);
        let MemoryPiece { address, size, .. } = table[slot];
        self.free[ArenaId::GLOBAL.index()].insert(address, size, slot);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        let MemoryPiece { address, note, .. } = table[slot];
        self.free[self.superblocks.owner(note).index()].remove(address);
    }

    fn consolidate(&mut self, table: &mut RegionTable, device: &mut dyn Device) -> Result<(), DeviceError> {
        device.synchronize()?;
        for number in self.superblocks.handed_out() {
            self.hand_over(table, number, ArenaId::GLOBAL);
            if let Some(first) = self.superblocks.empty(table, number) {
                self.join_superblocks(table, first);
            }
        }
        self.gathered += 1;
        Ok(())
    }

    /// What the one allocation has no room for, giving it back would not make room for.
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
        let global = self.free[ArenaId::GLOBAL.index()].largest();
        let own = self.arena_of(stream, ThreadId(0)).map_or(0, |owner| self.free[owner.index()].largest());
        global.max(own.min(SUPERBLOCK))
    }

    fn pool_name(&self, _: &DeviceRegion) -> &'static str {
        "arena"
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("superblocks", self.superblocks.count() as u64), ("gathered", self.gathered)]
    }

    fn renewed(&self) -> ArenaPolicy {
        ArenaPolicy::new(self.settings)
    }
}

/// Whom a superblock belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ArenaId(u32);

impl ArenaId {
    /// The arena from which the others take.
    const GLOBAL: ArenaId = ArenaId(0);

    /// The arena of a stream or thread, by number.
    fn arena(number: usize) -> ArenaId {
        ArenaId(number as u32 + 1)
    }

    /// The position in a table of all owners.
    #[inline]
    fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Superblock {
    /// Its first piece, or [`NONE`] if it is no more.
    first: u32,
    bytes: u64,
    owner: ArenaId,
}

/// All superblocks by number.
#[derive(Clone, Debug, Default)]
struct Superblocks {
    superblocks: Vec<Superblock>,
    vacant: Vec<u32>,
}

impl Superblocks {
    /// How many there are.
    fn count(&self) -> usize {
        self.superblocks.len() - self.vacant.len()
    }

    /// Makes a free piece a superblock of the global arena.
    fn add(&mut self, table: &mut RegionTable, first: u32) {
        let superblock = Superblock { first, bytes: table[first].size, owner: ArenaId::GLOBAL };
        let number = match self.vacant.pop() {
            Some(number) => {
                self.superblocks[number as usize] = superblock;
                number
            }
            None => {
                self.superblocks.push(superblock);
                (self.superblocks.len() - 1) as u32
            }
        };
        table[first].note = number;
    }

    #[inline]
    fn owner(&self, number: u32) -> ArenaId {
        self.superblocks[number as usize].owner
    }

    fn give_to(&mut self, number: u32, owner: ArenaId) {
        self.superblocks[number as usize].owner = owner;
    }

    #[inline]
    fn bytes(&self, number: u32) -> u64 {
        self.superblocks[number as usize].bytes
    }

    /// Its first piece, if nothing of it is in use: then that is all of it.
    #[inline]
    fn empty(&self, table: &RegionTable, number: u32) -> Option<u32> {
        let Superblock { first, bytes, .. } = self.superblocks[number as usize];
        table.free_piece(first).filter(|piece| piece.size == bytes).map(|_| first)
    }

    /// The first piece of an empty superblock of the global arena that holds this piece.
    fn empty_around(&self, table: &RegionTable, slot: u32) -> Option<u32> {
        let number = table.free_piece(slot)?.note;
        if self.owner(number) == ArenaId::GLOBAL { self.empty(table, number) } else { None }
    }

    /// Cuts an empty superblock. The rest, a superblock of the global arena, is returned by its only piece.
    fn split(&mut self, table: &mut RegionTable, number: u32, bytes: u64) -> u32 {
        let superblock = &mut self.superblocks[number as usize];
        superblock.bytes = bytes;
        let rest = table.cut(superblock.first, bytes);
        self.add(table, rest);
        rest
    }

    /// Adds the superblock of the next piece to that of this one; both are empty.
    fn join_next(&mut self, table: &mut RegionTable, slot: u32) {
        let (number, next) = (table[slot].note, table[table[slot].next].note);
        let gone = &mut self.superblocks[next as usize];
        gone.first = NONE;
        let bytes = gone.bytes;
        self.superblocks[number as usize].bytes += bytes;
        self.vacant.push(next);
        table.join_next(slot);
    }

    /// The superblocks that belong to streams and threads.
    fn handed_out(&self) -> Vec<u32> {
        let out = |superblock: &Superblock| superblock.first != NONE && superblock.owner != ArenaId::GLOBAL;
        (0u32..).zip(&self.superblocks).filter(|(_, superblock)| out(superblock)).map(|(number, _)| number).collect()
    }

    /// The free pieces of a superblock.
    fn free_pieces(&self, table: &RegionTable, number: u32) -> Vec<u32> {
        let first = Some(self.superblocks[number as usize].first);
        let next = |&slot: &u32| Some(table[slot].next).filter(|&next| next != NONE && table[next].note == number);
        std::iter::successors(first, next).filter(|&slot| table[slot].state == PieceState::Free).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::worked::Worked, *};
    use crate::device::CallKind;
    use oomph_base::KIB;

    const ROOMY: u64 = 64 * MIB;

    #[test]
    fn a_large_request_gets_a_superblock_of_its_own_size() {
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
        assert_eq!(arena.ask(2 * MIB, 0), Ok((0, Outcome::NewSegment)));
        assert_eq!(arena.ask(3 * MIB, 1), Ok((2 * MIB, Outcome::Hit)));
        assert_eq!(arena.growth(), [8 << 20]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
        // A superblock of 2 MiB is too small to cut 1.5 MiB off: it serves whole, and half a MiB stays free in it.
        arena.free(0, 0);
        assert_eq!(arena.ask(1536 * KIB, 0), Ok((0, Outcome::Split)));
        assert_eq!(arena.free_blocks(), [(1536 * KIB, 512 * KIB), (5 * MIB, 3 * MIB)]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
    }

    #[test]
    fn small_requests_take_superblocks_of_one_mebibyte_per_stream() {
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
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
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
        let blocks = [8, 1, 2, 1].map(|kib| arena.alloc(kib * KIB, 0));
        arena.free(blocks[2], 0);
        arena.free(blocks[0], 0);
        assert_eq!(arena.ask(2 * KIB, 0), Ok((0, Outcome::Split)));
        assert_eq!(arena.ask(6 * KIB, 0), Ok((2 * KIB, Outcome::Hit)));
        assert_eq!(arena.ask(2 * KIB, 0), Ok((blocks[2], Outcome::Hit)));
    }

    #[test]
    fn what_is_left_of_a_large_block_goes_to_a_small_arena_with_its_superblock() {
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
        let first = arena.alloc(2 * MIB, 0);
        arena.alloc(2 * MIB, 0);
        arena.free(first, 0);
        assert_eq!(arena.alloc(1536 * KIB, 0), 0);
        assert_eq!(arena.ask(256 * KIB, 1), Ok((1536 * KIB, Outcome::Split)));
        // The large block came along: once freed it is the small arena's, and no large request gets it.
        arena.free(0, 0);
        assert_eq!(arena.alloc(1536 * KIB, 0), 4 * MIB);
        assert_eq!(arena.alloc(MIB, 1), 0);
    }

    #[test]
    fn a_free_waits_for_its_stream_where_another_might_get_the_memory() {
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
        let [own, foreign, large] = [KIB, KIB, 2 * MIB].map(|bytes| arena.alloc(bytes, 0));
        arena.free(own, 0);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 0);
        arena.free(foreign, 1);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 1);
        arena.free(large, 0);
        assert_eq!(arena.calls(CallKind::StreamSynchronize), 2);
        // Whoever frees it, a block goes back where it came from.
        assert_eq!(arena.alloc(2 * KIB, 0), 0);
    }

    #[test]
    fn empty_superblocks_are_joined_with_their_neighbours() {
        let mut arena = Worked::new("arena:size:8MiB", ROOMY);
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
        let mut arena = Worked::new("arena:size:4MiB", ROOMY);
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
        let mut arena = Worked::new("arena:size:3584KiB", ROOMY);
        assert_eq!([0, 1, 2].map(|stream| arena.alloc(256, stream)), [0, MIB, 2 * MIB]);
        assert_eq!(arena.strategy.details()[0], ("superblocks", 3));
        assert_eq!(arena.alloc(MIB, 2), 2 * MIB + 256);
    }

    #[test]
    fn threads_have_arenas_where_they_have_default_streams() {
        let mut arena = Worked::new("arena:size:8MiB,per_thread:True", ROOMY);
        assert_eq!((arena.alloc(KIB, 0), arena.alloc(KIB, 1)), (0, MIB));
        arena.thread = ThreadId(1);
        assert_eq!((arena.alloc(KIB, 0), arena.alloc(KIB, 1)), (2 * MIB, MIB + KIB));
    }

    #[test]
    fn half_of_what_is_free_is_taken_and_no_less_than_a_superblock() {
        let mut arena = Worked::new("arena", ROOMY);
        arena.alloc(1, 0);
        assert_eq!(arena.growth(), [32 << 20]);
        let error = crate::strategy::StrategySpec::from("arena:size:512KiB").check().unwrap_err();
        assert_eq!(error.to_string(), "strategy 'arena': 'size' is below a superblock of 1048576 bytes");
    }
}
