//! Placing blocks with known lifetimes at offsets in one range of memory: pure arithmetic.
//!
//! The offline packing of a trace and the plans of the strategies `planned` and `oomph` use it. It knows
//! neither traces nor strategies.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Serialize;

use crate::StreamId;

/// One block: live from time `begin` up to but not including time `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLifetime {
    /// When it is allocated.
    pub begin: u32,
    /// When it is freed; after `begin`.
    pub end: u32,
    /// Its size.
    pub bytes: u64,
}

impl BlockLifetime {
    /// Whether both are live at the same time.
    #[must_use]
    pub const fn meets(&self, other: &BlockLifetime) -> bool {
        self.begin < other.end && other.begin < self.end
    }

    /// Bytes times length of life.
    #[must_use]
    pub const fn area(&self) -> u128 {
        self.bytes as u128 * (self.end - self.begin) as u128
    }
}

/// The live bytes at each time, from 0 to the end of the last block.
#[must_use]
pub fn live_bytes_over_time(blocks: &[BlockLifetime]) -> Vec<u64> {
    let times = blocks.iter().map(|block| block.end).max().unwrap_or(0) as usize;
    let mut change = vec![0_i64; times + 1];
    for block in blocks {
        // The caller keeps the sum of all blocks below 2^63.
        change[block.begin as usize] += block.bytes.cast_signed();
        change[block.end as usize] -= block.bytes.cast_signed();
    }
    change.pop();
    let running = change.into_iter().scan(0_i64, |live, change| {
        *live += change;
        Some(live.cast_unsigned())
    });
    running.collect()
}

/// The most bytes that are live at the same time: no layout is lower.
#[must_use]
pub fn peak_live_bytes(blocks: &[BlockLifetime]) -> u64 {
    live_bytes_over_time(blocks).into_iter().max().unwrap_or(0)
}

/// The work that a packing may take, in steps and not in seconds: the same blocks get the same
/// layout on every machine. A step is about one comparison with one neighbour, one to three
/// nanoseconds.
///
/// What is left after the first layout goes into better ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackingBudget {
    /// How many steps are left.
    pub steps: u64,
}

impl PackingBudget {
    /// A fraction of a second: for suites, where every source is packed.
    pub const QUICK: PackingBudget = PackingBudget::of_steps(200_000_000);
    /// Some seconds: for a single source.
    pub const THOROUGH: PackingBudget = PackingBudget::of_steps(1_000_000_000);

    /// A budget of this many steps.
    #[must_use]
    pub const fn of_steps(steps: u64) -> PackingBudget {
        PackingBudget { steps }
    }

    /// Takes steps away and returns whether any are left.
    pub const fn spend(&mut self, steps: u64) -> bool {
        self.steps = self.steps.saturating_sub(steps);
        self.steps > 0
    }

    /// A budget of `share` / `whole` of the steps that are left.
    #[must_use]
    pub fn portion(&self, share: usize, whole: usize) -> PackingBudget {
        let steps = u128::from(self.steps) * share as u128 / whole.max(1) as u128;
        PackingBudget { steps: u64::try_from(steps).unwrap_or(u64::MAX) }
    }
}

/// The order in which blocks are placed: the first ones get the low offsets. All but
/// [`PlacementOrder::Birth`] put the largest first; equal blocks stay in order of allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementOrder {
    /// As they are allocated.
    Birth,
    /// By bytes, then by length of life.
    Bytes,
    /// By bytes; equal sizes as they are allocated.
    BytesBirth,
    /// By length of life.
    Lifetime,
    /// By bytes times length of life.
    Area,
    /// By the most live bytes at any time of their life, then by area.
    Crowd,
    /// By the most live bytes at any time of their life, then by length of life.
    CrowdLifetime,
}

impl PlacementOrder {
    /// The orders that use what is known about the future, the most promising first.
    pub const OFFLINE: [PlacementOrder; 6] = [
        PlacementOrder::Bytes,
        PlacementOrder::BytesBirth,
        PlacementOrder::Area,
        PlacementOrder::Lifetime,
        PlacementOrder::Crowd,
        PlacementOrder::CrowdLifetime,
    ];

    /// What it sorts by, as in "first fit by size".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PlacementOrder::Birth => "birth",
            PlacementOrder::Bytes => "size",
            PlacementOrder::BytesBirth => "size and birth",
            PlacementOrder::Lifetime => "lifetime",
            PlacementOrder::Area => "area",
            PlacementOrder::Crowd => "fullest section and area",
            PlacementOrder::CrowdLifetime => "fullest section and lifetime",
        }
    }

    /// The indices of the blocks in this order.
    #[must_use]
    pub fn of(self, blocks: &[BlockLifetime]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        let length = |block: &BlockLifetime| u128::from(block.end - block.begin);
        let crowds = match self {
            PlacementOrder::Crowd | PlacementOrder::CrowdLifetime => crowds(blocks),
            _ => Vec::new(),
        };
        order.sort_by_cached_key(|&index| {
            let block = &blocks[index as usize];
            let crowd = || u128::from(crowds[index as usize]);
            Reverse(match self {
                PlacementOrder::Birth => (0, 0),
                PlacementOrder::Bytes => (u128::from(block.bytes), length(block)),
                PlacementOrder::BytesBirth => (u128::from(block.bytes), 0),
                PlacementOrder::Lifetime => (length(block), u128::from(block.bytes)),
                PlacementOrder::Area => (block.area(), u128::from(block.bytes)),
                PlacementOrder::Crowd => (crowd(), block.area()),
                PlacementOrder::CrowdLifetime => (crowd(), length(block)),
            })
        });
        order
    }
}

/// The most live bytes at any time of each block's life.
fn crowds(blocks: &[BlockLifetime]) -> Vec<u64> {
    const CHUNK: usize = 256;
    let live = live_bytes_over_time(blocks);
    let most = |live: &[u64]| live.iter().copied().max().unwrap_or(0);
    // The maximum of each chunk, so that a long life does not read every time of it.
    let chunks: Vec<u64> = live.chunks(CHUNK).map(most).collect();
    let crowd = |block: &BlockLifetime| {
        let (begin, end) = (block.begin as usize, block.end as usize);
        let (first, last) = (begin.div_ceil(CHUNK), end / CHUNK);
        if first >= last {
            return most(&live[begin..end]);
        }
        let edges = most(&live[begin..first * CHUNK]).max(most(&live[last * CHUNK..end]));
        edges.max(most(&chunks[first..last]))
    };
    blocks.iter().map(crowd).collect()
}

/// Which gap a block goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapChoice {
    /// The lowest in which it fits.
    Lowest,
    /// The narrowest in which it fits; the lowest of those.
    Narrowest,
}

/// The offset for a block of `bytes` among its neighbours, given by offset and end, lowest first.
pub fn find_gap(neighbours: impl IntoIterator<Item = (u64, u64)>, bytes: u64, choice: GapChoice) -> u64 {
    let mut floor = 0;
    let mut narrowest: Option<(u64, u64)> = None;
    for (offset, end) in neighbours {
        if offset >= floor && offset - floor >= bytes {
            match choice {
                GapChoice::Lowest => return floor,
                GapChoice::Narrowest => {
                    let gap = (offset - floor, floor);
                    narrowest = Some(narrowest.map_or(gap, |least| least.min(gap)));
                }
            }
        }
        floor = floor.max(end);
    }
    narrowest.map_or(floor, |(_, offset)| offset)
}

/// Where a periodic block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeriodicPlace {
    /// In the room of this number, at this offset.
    Room(usize, u64),
    /// Outside of all rooms, at this offset.
    Outside(u64),
}

/// The places of blocks that come again after every `period`, and the bytes that are needed outside of the rooms; `None` if the
/// budget is spent before the first layout.
///
/// Each block goes to the first room with space for it, otherwise to the lowest free offset outside, in several orders, and the
/// lowest result is kept. For training steps the order by size is hard to improve on.
pub fn pack_periodic(
    blocks: &[BlockLifetime],
    period: u32,
    rooms: &[u64],
    budget: &mut PackingBudget,
) -> Option<(Vec<PeriodicPlace>, u64)> {
    let bound = peak_live_bytes(blocks).saturating_sub(rooms.iter().sum());
    // The rooms are the lowest part of one range, with a wall after each: a block that is live all the time.
    let walls = rooms.iter().map(|_| BlockLifetime { begin: 0, end: period, bytes: ROOM_WALL });
    let all: Vec<BlockLifetime> = walls.chain(blocks.iter().copied()).collect();
    let mut starts = vec![0];
    starts.extend(rooms.iter().scan(0, |end, bytes| {
        *end += bytes + ROOM_WALL;
        Some(*end)
    }));
    let outside = starts[rooms.len()];
    let mut placer = BlockPlacer::periodic(&all, period);
    let mut best: Option<(Vec<u64>, u64)> = None;
    for order in [PlacementOrder::Bytes, PlacementOrder::Area, PlacementOrder::Lifetime] {
        if best.as_ref().is_some_and(|&(_, height)| height <= outside + bound) {
            break;
        }
        let ceiling = best.as_ref().map_or(u64::MAX, |(_, height)| height.saturating_sub(1));
        placer.clear();
        (0..rooms.len()).for_each(|room| placer.place(room, starts[room + 1] - ROOM_WALL));
        let numbers: Vec<u32> = order.of(blocks).into_iter().map(|block| block + rooms.len() as u32).collect();
        if placer.place_all(&numbers, GapChoice::Lowest, ceiling, budget) == PlacementOutcome::Done {
            best = Some((placer.offsets[rooms.len()..].to_vec(), placer.height().max(outside)));
        }
    }
    let (offsets, height) = best?;
    let place = |offset: u64| match starts.partition_point(|&start| start <= offset) - 1 {
        room if room < rooms.len() => PeriodicPlace::Room(room, offset - starts[room]),
        _ => PeriodicPlace::Outside(offset - outside),
    };
    Some((offsets.into_iter().map(place).collect(), height - outside))
}

/// How the streams of a repeated step share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamSharing {
    /// Each stream has memory of its own.
    Never,
    /// Memory passes between two streams only where one of them has had no block for at least an eighth of the period. They
    /// wait for each other a few times in a step, and their work overlaps in between.
    BetweenPhases,
    /// Memory passes to any stream as soon as its block is freed.
    Always,
}

/// A stream is idle when it has no block for one part of this many of the period.
const IDLE_PART: u32 = 8;

/// The block of this number, or a place for it.
type Numbered<T> = (usize, T);

/// Blocks that are placed as one block, and where each of them lies in it.
struct BlockGroup {
    life: BlockLifetime,
    members: Vec<Numbered<u64>>,
}

impl BlockGroup {
    fn of_one(&(number, life): &Numbered<BlockLifetime>) -> BlockGroup {
        BlockGroup { life, members: vec![(number, 0)] }
    }

    /// Packs blocks that come again after `length` into one block that lives from `begin` on, all that time.
    fn packed(
        blocks: &[Numbered<BlockLifetime>],
        begin: u32,
        length: u32,
        budget: &mut PackingBudget,
    ) -> Option<BlockGroup> {
        let shifted =
            |life: &BlockLifetime| BlockLifetime { begin: life.begin - begin, end: life.end - begin, ..*life };
        let lives: Vec<BlockLifetime> = blocks.iter().map(|(_, life)| shifted(life)).collect();
        let (places, bytes) = pack_periodic(&lives, length, &[], budget)?;
        let offset = |place| match place {
            PeriodicPlace::Outside(offset) | PeriodicPlace::Room(_, offset) => offset,
        };
        let members = blocks.iter().zip(places).map(|(&(number, _), place)| (number, offset(place))).collect();
        Some(BlockGroup { life: BlockLifetime { begin, end: begin + length, bytes }, members })
    }
}

/// [`pack_periodic`] for blocks of several streams, in any order. Each room belongs to a stream; others use it only if streams
/// share memory.
pub fn pack_streams(
    blocks: &[(StreamId, BlockLifetime)],
    period: u32,
    sharing: StreamSharing,
    rooms: &[(StreamId, u64)],
    budget: &mut PackingBudget,
) -> Option<(Vec<PeriodicPlace>, u64)> {
    let mut streams: BTreeMap<StreamId, Vec<Numbered<BlockLifetime>>> = BTreeMap::new();
    for (number, &(stream, life)) in blocks.iter().enumerate() {
        streams.entry(stream).or_default().push((number, life));
    }
    let area = |blocks: &[Numbered<BlockLifetime>]| blocks.iter().map(|(_, life)| life.area()).sum::<u128>();
    let largest = streams.iter().max_by_key(|(_, blocks)| area(blocks)).map(|(&stream, _)| stream);
    // The blocks that are packed together, by the stream whose rooms they use.
    let mut packings: BTreeMap<Option<StreamId>, Vec<BlockGroup>> = BTreeMap::new();
    for (stream, mut blocks) in streams {
        blocks.sort_by_key(|(_, life)| life.begin);
        let groups = if sharing == StreamSharing::BetweenPhases && Some(stream) != largest {
            phases(blocks, period, budget)?
        } else {
            blocks.iter().map(BlockGroup::of_one).collect()
        };
        packings.entry((sharing == StreamSharing::Never).then_some(stream)).or_default().extend(groups);
    }
    let (mut places, mut height) = (vec![PeriodicPlace::Outside(0); blocks.len()], 0);
    let mut left = packings.len();
    for (owner, mut groups) in packings {
        groups.sort_by_key(|group| group.life.begin);
        let lives: Vec<BlockLifetime> = groups.iter().map(|group| group.life).collect();
        let own = rooms.iter().enumerate().filter(|(_, (stream, _))| owner.is_none_or(|owner| owner == *stream));
        let (own, sizes): (Vec<usize>, Vec<u64>) = own.map(|(room, &(_, bytes))| (room, bytes)).unzip();
        // Better layouts of one stream do not take the budget of the next one.
        let share = budget.portion(1, left);
        let mut unspent = share;
        let (group_places, bytes) = pack_periodic(&lives, period, &sizes, &mut unspent)?;
        budget.spend(share.steps - unspent.steps);
        left -= 1;
        for (group, place) in groups.iter().zip(group_places) {
            for &(number, within) in &group.members {
                places[number] = match place {
                    PeriodicPlace::Room(room, offset) => PeriodicPlace::Room(own[room], offset + within),
                    PeriodicPlace::Outside(offset) => PeriodicPlace::Outside(height + offset + within),
                };
            }
        }
        height += bytes;
    }
    Some((places, height))
}

/// The blocks of a stream, in order of their beginnings, as one group for each phase between two idle times.
fn phases(
    mut blocks: Vec<Numbered<BlockLifetime>>,
    period: u32,
    budget: &mut PackingBudget,
) -> Option<Vec<BlockGroup>> {
    let idle = i64::from((period / IDLE_PART).max(1));
    // The latest end of all blocks before: at first of those of the period before.
    let mut reached = blocks.iter().map(|(_, life)| i64::from(life.end) - i64::from(period)).max()?;
    let mut firsts = Vec::new();
    for (index, (_, life)) in blocks.iter().enumerate() {
        if i64::from(life.begin) >= reached + idle {
            firsts.push(index);
        }
        reached = reached.max(life.end.into());
    }
    let Some(&first) = firsts.first() else { return Some(vec![BlockGroup::packed(&blocks, 0, period, budget)?]) };
    // The blocks before the first phase belong to the last one, which began in the period before.
    for (_, life) in &mut blocks[..first] {
        (life.begin, life.end) = (life.begin + period, life.end + period);
    }
    blocks.rotate_left(first);
    let ends = firsts[1..].iter().copied().chain([first + blocks.len()]);
    let phase = |(from, to): (&usize, usize)| {
        let blocks = &blocks[from - first..to - first];
        let (begin, end) = (blocks[0].1.begin, blocks.iter().map(|(_, life)| life.end).max()?);
        BlockGroup::packed(blocks, begin, end - begin, budget)
    };
    firsts.iter().zip(ends).map(phase).collect()
}

/// The size of the wall after each room. Offsets in rooms and outside stay multiples of this, if all sizes are.
const ROOM_WALL: u64 = 512;

/// This many blocks share an entry of the lower index, and this many entries one of the upper.
const FAN: usize = 32;

/// How [`BlockPlacer::place_all`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementOutcome {
    /// All are placed.
    Done,
    /// The block at this index of the list would have ended above the ceiling; it and all blocks
    /// after it are not placed.
    Ceiling(usize),
    /// The budget is spent.
    Spent,
}

/// Places blocks one by one, in any order, into the gaps between those that are placed already.
///
/// The blocks stay in order of allocation, and an index over their ends tells which are placed. The
/// neighbours of a block began before its end (a prefix of the blocks) and end after its beginning
/// (found by the index). A placement therefore costs as many steps as it has placed neighbours, not
/// as there are blocks.
#[derive(Debug)]
pub struct BlockPlacer<'a> {
    blocks: &'a [BlockLifetime],
    period: Option<u32>,
    /// Where the blocks are.
    pub offsets: Vec<u64>,
    /// When a placed block ends; 0 where it is not placed.
    ends: Vec<u32>,
    /// The latest end of every [`FAN`] blocks, and of every [`FAN`] of these.
    group_ends: Vec<u32>,
    supergroup_ends: Vec<u32>,
    /// How many blocks begin before the end of each block.
    prefixes: Vec<u32>,
    /// Offset and end of the placed neighbours of one block.
    neighbours: Vec<(u64, u64)>,
    /// How many entries were read to find them.
    looked_at: usize,
}

impl<'a> BlockPlacer<'a> {
    /// Nothing is placed yet. The blocks are in order of their beginnings.
    #[must_use]
    pub fn new(blocks: &'a [BlockLifetime]) -> BlockPlacer<'a> {
        let groups = blocks.len().div_ceil(FAN);
        BlockPlacer {
            blocks,
            period: None,
            offsets: vec![0; blocks.len()],
            ends: vec![0; blocks.len()],
            group_ends: vec![0; groups],
            supergroup_ends: vec![0; groups.div_ceil(FAN)],
            prefixes: blocks.iter().map(|block| begun_before(blocks, block.end)).collect(),
            neighbours: Vec::new(),
            looked_at: 0,
        }
    }

    /// The same for blocks that come again after every `period`. They begin within it and live at
    /// most that long, so their ends may lie in the next period.
    #[must_use]
    pub fn periodic(blocks: &'a [BlockLifetime], period: u32) -> BlockPlacer<'a> {
        BlockPlacer { period: Some(period), ..BlockPlacer::new(blocks) }
    }

    /// Removes all blocks.
    pub fn clear(&mut self) {
        self.ends.fill(0);
        self.group_ends.fill(0);
        self.supergroup_ends.fill(0);
    }

    /// The highest end of all placed blocks.
    #[must_use]
    pub fn height(&self) -> u64 {
        let placed = self.blocks.iter().zip(&self.offsets).zip(&self.ends).filter(|(_, end)| **end > 0);
        placed.map(|((block, offset), _)| offset + block.bytes).max().unwrap_or(0)
    }

    /// Places the blocks of a list, in its order, none of them above the ceiling.
    pub fn place_all(
        &mut self,
        order: &[u32],
        choice: GapChoice,
        ceiling: u64,
        budget: &mut PackingBudget,
    ) -> PlacementOutcome {
        for (index, &block) in order.iter().enumerate() {
            let block = block as usize;
            self.find_neighbours(block);
            let offset = find_gap(self.neighbours.iter().copied(), self.blocks[block].bytes, choice);
            let sorted = self.neighbours.len() as u64 + 1;
            if !budget.spend(self.looked_at as u64 + sorted * u64::from(sorted.ilog2() + 1)) {
                return PlacementOutcome::Spent;
            }
            if offset + self.blocks[block].bytes > ceiling {
                return PlacementOutcome::Ceiling(index);
            }
            self.place(block, offset);
        }
        PlacementOutcome::Done
    }

    fn place(&mut self, block: usize, offset: u64) {
        let end = self.blocks[block].end;
        self.offsets[block] = offset;
        self.ends[block] = end;
        let (group, supergroup) = (block / FAN, block / FAN / FAN);
        self.group_ends[group] = self.group_ends[group].max(end);
        self.supergroup_ends[supergroup] = self.supergroup_ends[supergroup].max(end);
    }

    /// Removes a placed block.
    pub fn remove(&mut self, block: usize) {
        let end = std::mem::take(&mut self.ends[block]);
        let (group, supergroup) = (block / FAN, block / FAN / FAN);
        if self.group_ends[group] == end {
            self.group_ends[group] = latest(&self.ends, group);
            if self.supergroup_ends[supergroup] == end {
                self.supergroup_ends[supergroup] = latest(&self.group_ends, supergroup);
            }
        }
    }

    /// Collects the placed blocks that meet this one, lowest first.
    fn find_neighbours(&mut self, block: usize) {
        self.neighbours.clear();
        self.looked_at = 0;
        let BlockLifetime { begin, end, .. } = self.blocks[block];
        self.collect_live(begin, self.prefixes[block]);
        if let Some(period) = self.period {
            // What this block reaches of the next period, and who reaches into this one from there.
            if end > period {
                self.collect_live(0, begun_before(self.blocks, end - period));
            }
            self.collect_live(begin + period, self.blocks.len() as u32);
        }
        self.neighbours.sort_unstable();
    }

    /// Collects those of the first `prefix` blocks that are placed and end after `begin`.
    fn collect_live(&mut self, begin: u32, prefix: u32) {
        let prefix = prefix as usize;
        let supergroups = &self.supergroup_ends[..prefix.div_ceil(FAN * FAN)];
        self.looked_at += supergroups.len();
        for (supergroup, &latest) in supergroups.iter().enumerate() {
            if latest <= begin {
                continue;
            }
            let groups = supergroup * FAN..((supergroup + 1) * FAN).min(prefix.div_ceil(FAN));
            self.looked_at += groups.len();
            for group in groups {
                if self.group_ends[group] <= begin {
                    continue;
                }
                let members = group * FAN..((group + 1) * FAN).min(prefix);
                self.looked_at += members.len();
                for other in members {
                    if self.ends[other] > begin {
                        let offset = self.offsets[other];
                        self.neighbours.push((offset, offset + self.blocks[other].bytes));
                    }
                }
            }
        }
    }
}

fn begun_before(blocks: &[BlockLifetime], time: u32) -> u32 {
    blocks.partition_point(|block| block.begin < time) as u32
}

/// The latest of the ends that an entry of an index stands for.
fn latest(ends: &[u32], entry: usize) -> u32 {
    let members = &ends[entry * FAN..((entry + 1) * FAN).min(ends.len())];
    members.iter().copied().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_sizes_stay_in_order_of_birth_or_go_by_lifetime() {
        let life = |begin, end, bytes| BlockLifetime { begin, end, bytes };
        let blocks = [life(0, 1, 2), life(0, 9, 1), life(1, 5, 2), life(2, 3, 2)];
        assert_eq!(PlacementOrder::BytesBirth.of(&blocks), [0, 2, 3, 1]);
        assert_eq!(PlacementOrder::Bytes.of(&blocks), [2, 0, 3, 1]);
    }

    #[test]
    fn rooms_are_used_before_new_memory() {
        let life = |begin, end, bytes| BlockLifetime { begin, end, bytes };
        let blocks = [life(0, 4, 5120), life(1, 3, 1024), life(2, 4, 1024), life(4, 6, 1024)];
        let (places, height) =
            pack_periodic(&blocks, 8, &[1536, 1024], &mut PackingBudget::of_steps(u64::MAX)).unwrap();
        let expected = [
            PeriodicPlace::Outside(0),
            PeriodicPlace::Room(0, 0),
            PeriodicPlace::Room(1, 0),
            PeriodicPlace::Room(0, 0),
        ];
        assert_eq!((places, height), (expected.to_vec(), 5120));
    }

    /// The blocks of the second stream come in two phases. The first stream uses their memory when they are over, but not within.
    #[test]
    fn memory_passes_between_phases_only() {
        let life = |begin, end| BlockLifetime { begin, end, bytes: 1024 };
        let [first, second] = [0, 1].map(StreamId);
        let phases = [(second, life(4, 8)), (second, life(9, 12)), (second, life(24, 28)), (second, life(29, 31))];
        let others = [
            (first, life(0, 3)),
            (first, life(8, 9)),
            (first, life(14, 22)),
            (first, life(28, 29)),
            (first, life(33, 39)),
        ];
        let blocks = [&phases[..], &others[..]].concat();
        let pack = |sharing| pack_streams(&blocks, 40, sharing, &[], &mut PackingBudget::of_steps(u64::MAX)).unwrap();
        let outside = |places: Vec<PeriodicPlace>| -> Vec<bool> {
            let is_shared = |place: &PeriodicPlace| places[..4].contains(place);
            places[4..].iter().map(is_shared).collect()
        };
        let (places, height) = pack(StreamSharing::Never);
        assert_eq!((outside(places), height), (vec![false; 5], 2048));
        let (places, height) = pack(StreamSharing::Always);
        assert_eq!((outside(places), height), (vec![true; 5], 1024));
        let (places, height) = pack(StreamSharing::BetweenPhases);
        assert_eq!((outside(places), height), (vec![true, false, true, false, true], 2048));
    }

    const PERIOD: u32 = 40;

    /// The times of the period in which a block is live.
    fn times(life: &BlockLifetime) -> Vec<bool> {
        let mut times = vec![false; PERIOD as usize];
        (life.begin..life.end).for_each(|time| times[(time % PERIOD) as usize] = true);
        times
    }

    /// The phase of a stream that a block belongs to: the times that are reached from its first one without an idle time.
    fn phase_around(life: &BlockLifetime, of_stream: &[BlockLifetime]) -> Vec<bool> {
        let live: Vec<bool> =
            (0..PERIOD as usize).map(|time| of_stream.iter().any(|other| times(other)[time])).collect();
        let (mut phase, idle) = (times(life), (PERIOD / IDLE_PART) as usize);
        let at = |time: u32| (time % PERIOD) as usize;
        for (from, step) in [(life.begin, 1), (life.begin, PERIOD - 1)] {
            let (mut time, mut pause) = (from, Vec::new());
            for _ in 0..PERIOD {
                time = time % PERIOD + step;
                pause.push(at(time));
                if live[at(time)] {
                    pause.drain(..).for_each(|time| phase[time] = true);
                } else if pause.len() == idle {
                    break;
                }
            }
        }
        phase
    }

    fn sharings() -> impl Strategy<Value = StreamSharing> {
        prop::sample::select(vec![StreamSharing::Never, StreamSharing::BetweenPhases, StreamSharing::Always])
    }

    proptest! {
        #[test]
        fn periodic_blocks_are_apart_and_in_their_rooms(
            lives in prop::collection::vec((0..PERIOD, 1..=PERIOD, 1u64..30, 0u16..3), 1..40),
            shortening in 1u32..20,
            rooms in prop::collection::vec((0u16..3, 1u64..40), 0..4),
            sharing in sharings(),
        ) {
            let block = |(begin, life, quanta, stream): (u32, u32, u64, u16)| {
                let life = life.div_ceil(shortening);
                (StreamId(stream), BlockLifetime { begin, end: begin + life, bytes: 512 * quanta })
            };
            let blocks: Vec<(StreamId, BlockLifetime)> = lives.into_iter().map(block).collect();
            let rooms: Vec<(StreamId, u64)> = rooms.into_iter().map(|(stream, quanta)| (StreamId(stream), 512 * quanta)).collect();
            let (places, height) = pack_streams(&blocks, PERIOD, sharing, &rooms, &mut PackingBudget::of_steps(u64::MAX)).unwrap();
            let range = |index: usize| match places[index] {
                PeriodicPlace::Room(room, offset) => (room, offset, offset + blocks[index].1.bytes),
                PeriodicPlace::Outside(offset) => (rooms.len(), offset, offset + blocks[index].1.bytes),
            };
            let of_stream = |wanted: StreamId| -> Vec<BlockLifetime> {
                blocks.iter().filter(|(stream, _)| *stream == wanted).map(|(_, life)| *life).collect()
            };
            let area = |stream: StreamId| of_stream(stream).iter().map(BlockLifetime::area).sum::<u128>();
            let largest = (0..3).map(StreamId).max_by_key(|&stream| area(stream)).unwrap();
            let meet = |one: &[bool], other: &[bool]| one.iter().zip(other).any(|(one, other)| *one && *other);
            let phase = |(stream, life): &(StreamId, BlockLifetime)| {
                if *stream == largest { times(life) } else { phase_around(life, &of_stream(*stream)) }
            };
            for (one, (stream, life)) in blocks.iter().enumerate() {
                let (room, low, high) = range(one);
                prop_assert!(high <= rooms.get(room).map_or(height, |room| room.1));
                prop_assert!(sharing != StreamSharing::Never || rooms.get(room).is_none_or(|room| room.0 == *stream));
                for (other, (other_stream, other_life)) in blocks[..one].iter().enumerate() {
                    let (other_room, other_low, other_high) = range(other);
                    if room != other_room || high <= other_low || other_high <= low {
                        continue;
                    }
                    prop_assert!(!meet(&times(life), &times(other_life)));
                    if stream != other_stream {
                        prop_assert!(sharing != StreamSharing::Never);
                        let phases_meet = || meet(&phase(&blocks[one]), &phase(&blocks[other]));
                        prop_assert!(sharing != StreamSharing::BetweenPhases || !phases_meet());
                    }
                }
            }
        }
    }
}
