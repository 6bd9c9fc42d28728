//! `pool` and `arena` compared with a simple implementation of RMM's rules, which walks lists from end
//! to end. Long random programs must get the same addresses.

use std::collections::BTreeMap;

use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use super::bench::RmmBench;
use oomph_base::{KIB, MIB};

const STREAMS: u16 = 3;

/// A run of free bytes.
type Span = (u64, u64);

/// Puts a span among others in address order, joined with its neighbours unless they begin a
/// region.
fn insert(spans: &mut Vec<Span>, span: Span, heads: &[u64]) {
    let place = spans.partition_point(|&(address, _)| address < span.0);
    spans.insert(place, span);
    for first in [place, place.wrapping_sub(1)] {
        let Some(&[(address, size), (next, more)]) = spans.get(first..).and_then(<[Span]>::first_chunk) else {
            continue;
        };
        if address + size == next && !heads.contains(&next) {
            spans[first] = (address, size + more);
            spans.remove(first + 1);
        }
    }
}

/// Takes `size` bytes from the front of a span.
fn cut(spans: &mut Vec<Span>, place: usize, size: u64) -> u64 {
    let (address, whole) = spans[place];
    if whole == size {
        spans.remove(place);
    } else {
        spans[place] = (address + size, whole - size);
    }
    address
}

#[derive(Default)]
struct PlainPool {
    /// In the order in which streams came.
    lists: Vec<(u16, Vec<Span>)>,
    heads: Vec<u64>,
    held: u64,
}

impl PlainPool {
    fn list(&mut self, stream: u16) -> &mut Vec<Span> {
        let place = self.lists.iter().position(|(owner, _)| *owner == stream).unwrap_or_else(|| {
            self.lists.push((stream, Vec::new()));
            self.lists.len() - 1
        });
        &mut self.lists[place].1
    }

    fn take(list: &mut Vec<Span>, size: u64) -> Option<u64> {
        let fits = (0..list.len()).filter(|&place| list[place].1 >= size);
        let best = fits.min_by_key(|&place| (list[place].1, list[place].0))?;
        Some(cut(list, best, size))
    }

    fn alloc(&mut self, size: u64, stream: u16) -> u64 {
        if let Some(address) = PlainPool::take(self.list(stream), size) {
            return address;
        }
        let mut others = self.lists.iter_mut().filter(|(owner, _)| *owner != stream);
        if let Some(address) = others.find_map(|(_, list)| PlainPool::take(list, size)) {
            return address;
        }
        for owner in (0..self.lists.len()).filter(|&place| self.lists[place].0 != stream).collect::<Vec<_>>() {
            for span in std::mem::take(&mut self.lists[owner].1) {
                let heads = self.heads.clone();
                insert(self.list(stream), span, &heads);
            }
            if let Some(address) = PlainPool::take(self.list(stream), size) {
                return address;
            }
        }
        let (start, grown) = (self.held, size.max(self.held));
        self.heads.push(start);
        self.held += grown;
        if grown > size {
            self.list(stream).push((start + size, grown - size));
            self.list(stream).sort_unstable();
        }
        start
    }

    fn free(&mut self, address: u64, size: u64, stream: u16) {
        let heads = self.heads.clone();
        insert(self.list(stream), (address, size), &heads);
    }
}

struct PlainSuperblock {
    start: u64,
    bytes: u64,
    /// The stream that has it, or `None` for the global arena.
    owner: Option<u16>,
    free: Vec<Span>,
}

impl PlainSuperblock {
    fn is_empty(&self) -> bool {
        self.free == [(self.start, self.bytes)]
    }
}

/// In address order.
struct PlainArena(Vec<PlainSuperblock>);

impl PlainArena {
    fn new(bytes: u64) -> PlainArena {
        PlainArena(vec![PlainSuperblock { start: 0, bytes, owner: None, free: vec![(0, bytes)] }])
    }

    fn first_fit(&self, owner: Option<u16>, size: u64) -> Option<(usize, usize)> {
        let fits = |superblock: &PlainSuperblock| superblock.free.iter().position(|&(_, free)| free >= size);
        self.0
            .iter()
            .enumerate()
            .filter(|(_, superblock)| superblock.owner == owner)
            .find_map(|(place, superblock)| fits(superblock).map(|block| (place, block)))
    }

    fn try_alloc(&mut self, size: u64, stream: u16) -> Option<u64> {
        let owner = (size <= MIB).then_some(stream);
        let own = owner.and_then(|_| self.first_fit(owner, size));
        let (place, block) = match own {
            Some(found) => found,
            None => {
                let (place, block) = self.first_fit(None, size)?;
                let least = size.max(MIB);
                let PlainSuperblock { start, bytes, .. } = self.0[place];
                if self.0[place].is_empty() && bytes >= least + MIB {
                    let rest = (start + least, bytes - least);
                    let tail = PlainSuperblock { start: rest.0, bytes: rest.1, owner: None, free: vec![rest] };
                    self.0.insert(place + 1, tail);
                    self.0[place].bytes = least;
                    self.0[place].free = vec![(start, least)];
                }
                self.0[place].owner = owner;
                (place, block)
            }
        };
        Some(cut(&mut self.0[place].free, block, size))
    }

    fn alloc(&mut self, size: u64, stream: u16) -> Option<u64> {
        self.try_alloc(size, stream).or_else(|| {
            self.0.iter_mut().for_each(|superblock| superblock.owner = None);
            self.join();
            self.try_alloc(size, stream)
        })
    }

    fn free(&mut self, address: u64, size: u64) {
        let place = self.0.partition_point(|superblock| superblock.start <= address) - 1;
        insert(&mut self.0[place].free, (address, size), &[]);
        self.join();
    }

    /// Joins empty neighbours of the global arena.
    fn join(&mut self) {
        let ready = |superblock: &PlainSuperblock| superblock.owner.is_none() && superblock.is_empty();
        let mut place = 0;
        while place + 1 < self.0.len() {
            if ready(&self.0[place]) && ready(&self.0[place + 1]) {
                let bytes = self.0.remove(place + 1).bytes;
                let superblock = &mut self.0[place];
                superblock.bytes += bytes;
                superblock.free = vec![(superblock.start, superblock.bytes)];
            } else {
                place += 1;
            }
        }
    }
}

/// Blocks in random order, as many as `live` at a time: what the program does, and who answers.
fn play(seed: u64, live: usize, mut step: impl FnMut(Step) -> Option<u64>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut blocks: BTreeMap<u32, (u64, u64, u16)> = BTreeMap::new();
    for number in 0..4000 {
        let stream = random.random_range(0..STREAMS);
        if blocks.len() >= live || (!blocks.is_empty() && random.random_bool(0.3)) {
            let place = random.random_range(0..blocks.len());
            let name = blocks.keys().copied().nth(place).unwrap();
            let (address, size, owner) = blocks.remove(&name).unwrap();
            // Now and then another stream frees it.
            let stream = if random.random_bool(0.1) { stream } else { owner };
            step(Step::Free { address, size, stream });
        } else {
            // Most are small, so that the free blocks are many.
            let size = (random.random_range(8.0..21.5_f64).exp2() as u64).next_multiple_of(256);
            if let Some(address) = step(Step::Alloc { size, stream }) {
                blocks.insert(number, (address, size, stream));
            }
        }
    }
}

enum Step {
    Alloc { size: u64, stream: u16 },
    Free { address: u64, size: u64, stream: u16 },
}

#[test]
fn pool_matches_the_linear_reference() {
    for (seed, live) in [(1, 10), (2, 100), (3, 1000), (4, 1500)] {
        let (mut ours, mut plain) = (RmmBench::new("pool", 1 << 44), PlainPool::default());
        play(seed, live, |step| match step {
            Step::Alloc { size, stream } => {
                let address = ours.alloc(size, stream);
                assert_eq!(address, plain.alloc(size, stream), "{size} bytes on stream {stream}");
                Some(address)
            }
            Step::Free { address, size, stream } => {
                ours.free(address, stream);
                plain.free(address, size, stream);
                None
            }
        });
        assert_eq!(ours.strategy.stats().current.reserved, plain.held);
    }
}

#[test]
fn arena_matches_the_linear_reference() {
    for (seed, live, mebibytes) in [(1, 10, 64), (2, 100, 24), (3, 1000, 160), (4, 1500, 512)] {
        let mut ours = RmmBench::new(&format!("arena:size:{mebibytes}MiB"), 1 << 40);
        let mut plain = PlainArena::new(mebibytes * MIB);
        let mut refused = 0;
        play(seed, live, |step| match step {
            Step::Alloc { size, stream } => {
                let address = ours.ask(size, stream).ok().map(|(address, _)| address);
                assert_eq!(address, plain.alloc(size, stream), "{} KiB on stream {stream}", size / KIB);
                refused += u32::from(address.is_none());
                address
            }
            Step::Free { address, size, stream } => {
                ours.free(address, stream);
                plain.free(address, size);
                None
            }
        });
        assert_eq!(ours.strategy.details()[0].1, plain.0.len() as u64);
        assert_eq!(
            refused > 0,
            mebibytes < 64 || mebibytes == 160,
            "{refused} requests were refused in {mebibytes} MiB"
        );
    }
}
