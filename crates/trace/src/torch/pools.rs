//! Which pool of memory a request of a recording used: the default pool, or a private one (a CUDA graph, a
//! `torch.cuda.MemPool`).
//!
//! Every segment of a snapshot has the number of its pool. Entries have it from PyTorch 2.12 on. In older recordings a
//! request belongs to the pool of the segment that it lies in at that time. The pool of a segment that was released before
//! the end is not recorded: [`MemoryLife::pool`] is `None`, and a model of the allocator infers it.

use std::collections::BTreeMap;

use super::{Action, Segment, TraceEntry};
use oomph_base::StreamId;

/// PyTorch's number of a pool (`MempoolId_t`). `(0, n)` is a `MemPool`, `(n, 0)` the pool of a captured graph.
pub type PoolKey = (u64, u64);

/// The default pool.
pub const DEFAULT_POOL: PoolKey = (0, 0);

/// The time from the first to the last use of an address range as a segment, or as one range of an expandable segment. All
/// of its memory is in one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLife {
    /// The lowest address.
    pub start: u64,
    /// The end of the highest address that was ever used.
    pub end: u64,
    /// The stream.
    pub stream: StreamId,
    /// The entry that created it; `None` if it existed before the recording.
    pub created: Option<usize>,
    /// The entry that released it; `None` if it exists at the end.
    pub released: Option<usize>,
    /// The pool, where the recording contains it.
    pub pool: Option<PoolKey>,
}

impl MemoryLife {
    /// Whether it exists right before an entry.
    #[must_use]
    pub fn exists_before(&self, entry: usize) -> bool {
        let begun = self.created.is_none_or(|created| created < entry);
        begun && self.released.is_none_or(|released| released >= entry)
    }
}

/// All lives of memory in a recording.
#[derive(Clone, Debug, Default)]
pub struct MemoryLives {
    /// In the order of their beginnings.
    pub lives: Vec<MemoryLife>,
    /// The life that each entry concerns, or [`NO_LIFE`].
    of_entry: Vec<u32>,
}

const NO_LIFE: u32 = u32::MAX;

/// A segment that exists now.
struct PresentSegment {
    end: u64,
    life: u32,
    expandable: bool,
    /// The mapped part of an expandable segment.
    mapped: u64,
}

/// Follows segments through the entries.
struct LifeTracker {
    found: MemoryLives,
    /// By lowest address.
    present: BTreeMap<u64, PresentSegment>,
}

impl MemoryLives {
    /// The lives of a recording that starts with the segments `initial`, goes through `entries` and ends with the segments
    /// `last`. `pools` are the pools that entries refer to.
    #[must_use]
    pub fn of(initial: &[Segment], entries: &[TraceEntry], last: &[Segment], pools: &[PoolKey]) -> MemoryLives {
        let found = MemoryLives { lives: Vec::new(), of_entry: Vec::with_capacity(entries.len()) };
        let mut tracker = LifeTracker { found, present: BTreeMap::new() };
        for segment in initial {
            tracker.begin(segment.address.0, segment.total_size, segment.stream, segment.expandable, None);
        }
        for (index, entry) in entries.iter().enumerate() {
            let life = tracker.follow(index, entry);
            tracker.found.of_entry.push(life);
            let pool = entry.pool_in(pools);
            if let (Some(life), Some(pool)) = (tracker.found.lives.get_mut(life as usize), pool) {
                life.pool = Some(pool);
            }
        }
        for segment in last {
            let life = tracker.at(segment.address.0);
            if let Some(life) = tracker.found.lives.get_mut(life as usize) {
                life.pool = Some(segment.pool);
            }
        }
        tracker.found
    }

    /// The life that an entry concerns: the segment that holds its block, or that it creates or releases.
    #[must_use]
    pub fn of_entry(&self, entry: usize) -> Option<usize> {
        self.of_entry.get(entry).filter(|&&life| life != NO_LIFE).map(|&life| life as usize)
    }

    /// The lives that exist right before an entry.
    #[must_use]
    pub fn present_at(&self, entry: usize) -> PresentLives<'_> {
        let present = self.lives.iter().enumerate().filter(|(_, life)| life.exists_before(entry));
        PresentLives { lives: &self.lives, by_start: present.map(|(place, life)| (life.start, place)).collect() }
    }
}

/// The lives that exist at one time.
pub struct PresentLives<'a> {
    lives: &'a [MemoryLife],
    by_start: BTreeMap<u64, usize>,
}

impl PresentLives<'_> {
    /// The life of an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<usize> {
        let (_, &life) = self.by_start.range(..=address).next_back()?;
        (address < self.lives[life].end).then_some(life)
    }
}

impl LifeTracker {
    /// Follows an entry. Returns the life that it concerns.
    fn follow(&mut self, index: usize, entry: &TraceEntry) -> u32 {
        let (start, size) = (entry.address.0, entry.size);
        match entry.action {
            Action::Alloc | Action::FreeRequested | Action::FreeCompleted => self.at(start),
            Action::SegmentAlloc => self.begin(start, size, entry.stream, false, Some(index)),
            Action::SegmentMap => match self.extend(start, size, entry.stream) {
                Some(life) => life,
                None => self.begin(start, size, entry.stream, true, Some(index)),
            },
            Action::SegmentFree | Action::SegmentUnmap => self.release(index, start, size),
            Action::OutOfMemory | Action::Snapshot | Action::Annotate | Action::Unknown => NO_LIFE,
        }
    }

    fn at(&self, address: u64) -> u32 {
        let before = self.present.range(..=address).next_back();
        before.filter(|(_, segment)| address < segment.end).map_or(NO_LIFE, |(_, segment)| segment.life)
    }

    fn begin(&mut self, start: u64, bytes: u64, stream: StreamId, expandable: bool, created: Option<usize>) -> u32 {
        let end = start.saturating_add(bytes);
        let number = self.found.lives.len() as u32;
        self.found.lives.push(MemoryLife { start, end, stream, created, released: None, pool: None });
        self.present.insert(start, PresentSegment { end, life: number, expandable, mapped: bytes });
        number
    }

    /// Maps more of an expandable segment. Its unmapped part begins where something was mapped before, or is a hole.
    fn extend(&mut self, start: u64, bytes: u64, stream: StreamId) -> Option<u32> {
        let (_, segment) = self.present.range_mut(..=start).next_back()?;
        let life = self.found.lives.get_mut(segment.life as usize)?;
        if !segment.expandable || life.stream != stream || start > segment.end {
            return None;
        }
        segment.end = segment.end.max(start.saturating_add(bytes));
        segment.mapped = segment.mapped.saturating_add(bytes);
        life.end = segment.end;
        Some(segment.life)
    }

    /// Releases a segment, or unmaps a part of an expandable one. Without mapped memory its addresses go back too.
    fn release(&mut self, index: usize, start: u64, bytes: u64) -> u32 {
        let Some((&first, segment)) = self.present.range_mut(..=start).next_back() else { return NO_LIFE };
        if start >= segment.end {
            return NO_LIFE;
        }
        segment.mapped = if segment.expandable { segment.mapped.saturating_sub(bytes) } else { 0 };
        let (life, is_over) = (segment.life, segment.mapped == 0);
        if is_over {
            self.present.remove(&first);
            self.found.lives[life as usize].released = Some(index);
        }
        life
    }
}

/// The pools of a recording's requests, in the order of its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestPools {
    /// The entries of requests from which on another pool is used, ascending. The default pool comes first.
    pub switches: Vec<(usize, PoolKey)>,
    /// Where the program gave up pools, ascending.
    pub releases: Vec<PoolRelease>,
}

/// The program gave up a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRelease {
    /// Before this entry.
    pub entry: usize,
    /// Which pool.
    pub pool: PoolKey,
    /// Whether its free memory went back at once.
    pub trims: bool,
}

impl RequestPools {
    /// The pools of all requests, given the pool of each one. Where that is unknown, the pool does not change.
    pub fn of(entries: &[TraceEntry], pool: impl Fn(usize) -> Option<PoolKey>) -> RequestPools {
        let mut switches: Vec<(usize, PoolKey)> = Vec::new();
        let is_request = |entry: &TraceEntry| matches!(entry.action, Action::Alloc | Action::OutOfMemory);
        for (index, _) in entries.iter().enumerate().filter(|(_, entry)| is_request(entry)) {
            let current = switches.last().map_or(DEFAULT_POOL, |(_, pool)| *pool);
            if let Some(pool) = pool(index).filter(|&pool| pool != current) {
                switches.push((index, pool));
            }
        }
        RequestPools { switches, releases: Vec::new() }
    }

    /// Whether a private pool is used.
    #[must_use]
    pub fn is_private(&self) -> bool {
        !self.switches.is_empty() || !self.releases.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::{SegmentKind, StackId};
    use oomph_base::{Address, MIB};

    fn entry(action: Action, address: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size, ..TraceEntry::default() }
    }

    fn segment(address: u64, total_size: u64, pool: PoolKey, expandable: bool) -> Segment {
        Segment {
            device: 0,
            address: Address(address),
            total_size,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool,
            expandable,
            stack: StackId::NONE,
            blocks: Vec::new(),
        }
    }

    fn pools(lives: &MemoryLives, entries: usize) -> Vec<Option<PoolKey>> {
        (0..entries).map(|index| lives.of_entry(index).and_then(|life| lives.lives[life].pool)).collect()
    }

    /// One address range is first a segment of an unknown pool, then one of a graph's pool.
    #[test]
    fn a_request_belongs_to_the_segment_of_its_time() {
        let entries = [
            entry(Action::SegmentAlloc, MIB, 2 * MIB),
            entry(Action::Alloc, MIB, 512),
            entry(Action::FreeRequested, MIB, 512),
            entry(Action::FreeCompleted, MIB, 512),
            entry(Action::SegmentFree, MIB, 2 * MIB),
            entry(Action::SegmentAlloc, MIB, 2 * MIB),
            entry(Action::Alloc, MIB, 512),
        ];
        let lives = MemoryLives::of(&[], &entries, &[segment(MIB, 2 * MIB, (1, 0), false)], &[]);
        let graph = Some((1, 0));
        assert_eq!(pools(&lives, 7), [None, None, None, None, None, graph, graph]);
        assert_eq!((lives.lives[0].created, lives.lives[0].released), (Some(0), Some(4)));
        let at = |entry| lives.present_at(entry).at(MIB);
        assert_eq!((at(4), at(5), at(6)), (Some(0), None, Some(1)));
    }

    /// Two ranges grow beside each other; a part that was unmapped later still belongs to its range.
    #[test]
    fn an_expandable_segment_is_one_range_of_addresses() {
        let (low, high) = (20 * MIB, 4000 * MIB);
        let entries = [
            entry(Action::SegmentMap, low, 20 * MIB),
            entry(Action::SegmentMap, high, 20 * MIB),
            entry(Action::SegmentMap, low + 20 * MIB, 20 * MIB),
            entry(Action::Alloc, low + 20 * MIB, MIB),
            entry(Action::Alloc, high, MIB),
            entry(Action::FreeRequested, low + 20 * MIB, MIB),
            entry(Action::FreeCompleted, low + 20 * MIB, MIB),
            entry(Action::SegmentUnmap, low + 20 * MIB, 20 * MIB),
        ];
        let last = [segment(low, 20 * MIB, (0, 3), true), segment(high, 20 * MIB, (0, 0), true)];
        let lives = MemoryLives::of(&[], &entries, &last, &[]);
        let (private, default) = (Some((0, 3)), Some((0, 0)));
        assert_eq!(pools(&lives, 8), [private, default, private, private, default, private, private, private]);
        assert_eq!(lives.lives.len(), 2);
    }

    #[test]
    fn entries_with_a_pool_tell_it() {
        let mut entries = [
            entry(Action::SegmentAlloc, MIB, 2 * MIB),
            entry(Action::Alloc, MIB, 512),
            entry(Action::FreeRequested, MIB, 512),
            entry(Action::FreeCompleted, MIB, 512),
            entry(Action::SegmentFree, MIB, 2 * MIB),
        ];
        entries[0].pool = Some(1);
        let lives = MemoryLives::of(&[], &entries, &[], &[(0, 0), (0, 7)]);
        assert_eq!(pools(&lives, 5), [Some((0, 7)); 5]);
        let pools = RequestPools::of(&entries, |index| pools(&lives, 5)[index]);
        assert_eq!(pools.switches, [(1, (0, 7))]);
    }
}
