//! Private pools in a recording: which pool each request used.
//!
//! The pool of memory that exists at the end is recorded, and so is that of every entry from PyTorch 2.12 on. Other memory
//! is taken for memory of the default pool until the model contradicts: it finds a free block that PyTorch did not take, or
//! releases memory that PyTorch kept. Then the memory belongs to a private pool, and verification starts again.
//!
//! One pool for each segment never contradicts a recording. So what is not forced stays ambiguous, and is counted as such.

use std::collections::{HashMap, HashSet};

use super::{Assumptions, Counters, Divergence, ObservedAction, Verdict, Verification, verify_assuming};
use crate::{
    base::{Address, Progress},
    strategy::{SegmentView, Setup},
    trace::torch::{Action, DEFAULT_POOL, MemoryLife, MemoryLives, PoolKey, Recording, RequestPools, TraceEntry},
};

/// The pools of a recording, as far as they are known or were inferred.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InferredPools {
    /// Those of requests, with the places where pools were given up.
    pub requests: RequestPools,
    /// Those of segments that existed before the recording, by address.
    pub segments: Vec<(Address, PoolKey)>,
    /// How they are known.
    pub evidence: PoolEvidence,
}

/// How the pools of requests are known. Requests of recordings in which nothing was released are all known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PoolEvidence {
    /// Requests in a private pool.
    pub private: usize,
    /// Requests whose pool is recorded: their memory exists at the end, or entries have the pool.
    pub known: usize,
    /// Requests whose pool follows from the allocator's decisions.
    pub inferred: usize,
    /// Requests that may have used the default pool or a private one: their memory was released before the end.
    pub either: usize,
}

/// Pools that were released before the end have no recorded number. These numbers do not occur in PyTorch, which counts
/// up from 1.
pub(super) const UNRECORDED_POOL: u64 = u64::MAX;

/// How many pools for one life alone may be assumed. Any recording can be explained by enough of them.
const MOST_INVENTED: usize = 4;
const MOST_INVENTED_BESIDE_RECORDED: usize = 64;

/// What the allocator's decisions say about the pool of a life. As long as the model agrees, each of these is certain: which
/// blocks are free does not depend on the assumptions.
#[derive(Clone, Debug, Default)]
struct PoolConstraints {
    /// It is the default pool.
    is_default: bool,
    /// Pools that it is not.
    excluded: Vec<PoolKey>,
    /// Lives in another pool.
    apart_from: Vec<usize>,
}

/// The requests of a life, as entries.
#[derive(Clone, Debug, Default)]
struct LifeRequests {
    /// The requests of other lives before and after its first one.
    beside: [Option<usize>; 2],
    last: Option<usize>,
}

impl LifeRequests {
    /// Of all lives of a recording.
    fn of(lives: &MemoryLives, recording: &Recording) -> Vec<LifeRequests> {
        let mut requests = vec![LifeRequests::default(); lives.lives.len()];
        let mut before: Option<(usize, usize)> = None;
        // Lives whose next request of another life has not come yet.
        let mut waiting: Vec<usize> = Vec::new();
        for (index, _) in recording.witnessed.iter().enumerate().filter(|(_, entry)| entry.action == Action::Alloc) {
            let Some(life) = lives.of_entry(index) else { continue };
            waiting.retain(|&other| {
                if other != life {
                    requests[other].beside[1] = Some(index);
                }
                other == life
            });
            if requests[life].last.is_none() {
                requests[life].beside[0] = before.filter(|(_, other)| *other != life).map(|(index, _)| index);
                waiting.push(life);
            }
            requests[life].last = Some(index);
            before = Some((index, life));
        }
        requests
    }
}

/// When a private pool is used and released: all requests come before the first release, because memory of a pool is
/// released after the program has given it up.
#[derive(Clone, Copy, Debug)]
struct PoolTime {
    last_request: Option<usize>,
    first_release: usize,
}

impl PoolTime {
    const EMPTY: PoolTime = PoolTime { last_request: None, first_release: usize::MAX };

    fn with(self, other: PoolTime) -> PoolTime {
        PoolTime {
            last_request: self.last_request.max(other.last_request),
            first_release: self.first_release.min(other.first_release),
        }
    }

    fn is_possible(self) -> bool {
        self.last_request.is_none_or(|last| last < self.first_release)
    }
}

/// The assumed pools of a recording's memory.
pub(super) struct PoolGuess<'a> {
    recording: &'a Recording,
    /// Computed when the recording has a private pool, or when the model contradicts.
    lives: Option<MemoryLives>,
    /// The pool of each life.
    pools: Vec<PoolKey>,
    constraints: Vec<PoolConstraints>,
    requests: Vec<LifeRequests>,
    /// Lives from this size on may be released while their pool is in use (`max_split_size`).
    oversize: u64,
    /// The private pools that the recording contains.
    recorded: Vec<PoolKey>,
    /// The last request of each private pool.
    last_use: HashMap<PoolKey, usize>,
}

impl<'a> PoolGuess<'a> {
    pub(super) fn of(recording: &'a Recording) -> PoolGuess<'a> {
        let mut guess = PoolGuess {
            recording,
            lives: None,
            pools: Vec::new(),
            constraints: Vec::new(),
            requests: Vec::new(),
            oversize: recording.settings_in_force().map_or(0, |settings| settings.max_split_size),
            recorded: Vec::new(),
            last_use: HashMap::new(),
        };
        if recording.has_private_pools() {
            guess.look_at_lives();
        }
        guess
    }

    fn look_at_lives(&mut self) {
        let lives = self.recording.memory_lives();
        self.constraints = vec![PoolConstraints::default(); lives.lives.len()];
        self.pools = lives.lives.iter().map(|life| life.pool.unwrap_or(DEFAULT_POOL)).collect();
        let in_lives = lives.lives.iter().filter_map(|life| life.pool);
        let all = in_lives.chain(self.recording.pools.iter().copied());
        self.recorded = all.filter(|&pool| pool != DEFAULT_POOL).collect();
        self.recorded.sort_unstable();
        self.recorded.dedup();
        self.requests = LifeRequests::of(&lives, self.recording);
        self.lives = Some(lives);
        self.assume();
    }

    fn note_last_uses(&mut self) {
        let requests = self.recording.witnessed.iter().enumerate().filter(|(_, entry)| entry.action == Action::Alloc);
        let used = requests.filter_map(|(index, _)| Some((self.pool_of(index)?, index)));
        self.last_use = used.filter(|&(pool, _)| pool != DEFAULT_POOL).collect();
    }

    /// Whether any memory is assumed to be in a private pool.
    pub(super) fn has_private(&self) -> bool {
        !self.last_use.is_empty() || !self.recorded.is_empty()
    }

    /// Whether there is memory of unknown pool in a recording with private pools.
    pub(super) fn is_open(&self) -> bool {
        let lives = self.lives.iter().flat_map(|lives| &lives.lives);
        self.has_private() && lives.into_iter().any(|life| life.pool.is_none())
    }

    /// Whether segments from before the recording were released in it, so that nothing says in which pool they were.
    pub(super) fn began_with_unknown(&self) -> bool {
        let found;
        let lives = match &self.lives {
            Some(lives) => lives,
            None => {
                found = self.recording.memory_lives();
                &found
            }
        };
        lives.lives.iter().any(|life| life.created.is_none() && life.pool.is_none())
    }

    /// The pool of the memory that an entry concerns, or of the request that failed there.
    pub(super) fn pool_of(&self, entry: usize) -> Option<PoolKey> {
        let Some(lives) = &self.lives else { return Some(DEFAULT_POOL) };
        self.recording.pool_of(entry, lives, |life| self.pools[life])
    }

    /// Sets the pools of segments that exist right before an entry.
    pub(super) fn set_pools(&self, entry: usize, segments: &mut [SegmentView]) {
        let Some(lives) = &self.lives else { return };
        let present = lives.present_at(entry);
        for segment in segments {
            segment.pool_id = present.at(segment.address.0).map_or(DEFAULT_POOL, |life| self.pools[life]);
        }
    }

    /// Whether a private pool may have been given up before an entry: nothing uses it later.
    pub(super) fn is_over(&self, pool: PoolKey, entry: usize) -> bool {
        pool != DEFAULT_POOL && self.last_use.get(&pool).is_none_or(|&last| last < entry)
    }

    /// Learns from a divergence. Returns whether there are other assumptions to try.
    pub(super) fn mend(&mut self, divergence: &Divergence) -> bool {
        let Divergence::Entries { entry, recorded, modelled, .. } = divergence else { return false };
        if self.lives.is_none() {
            self.look_at_lives();
        }
        self.learn(*entry, recorded, modelled) && self.assume()
    }

    /// Derives constraints. `recorded` and `modelled` are the actions from the first difference on, which is at `entry`.
    fn learn(&mut self, entry: usize, recorded: &[ObservedAction], modelled: &[ObservedAction]) -> bool {
        let Some(lives) = &self.lives else { return false };
        let released = self.lives_of(entry, recorded.len(), Action::is_release);
        let present = lives.present_at(entry);
        let by_model = modelled.iter().filter(|seen| seen.action.is_release());
        let by_model = by_model.filter_map(|seen| present.at(seen.address.0));
        let by_pytorch: HashSet<usize> = released.iter().copied().collect();
        let kept: Vec<usize> = by_model.filter(|life| !by_pytorch.contains(life)).collect();
        if recorded.first().is_some_and(|seen| seen.action.is_release()) || !kept.is_empty() {
            return self.learn_from_release(entry, released, kept);
        }
        let requested = self.lives_of(entry, recorded.len(), |action| action == Action::Alloc);
        // While requests use a private pool, no free completes.
        if recorded.first().is_some_and(|seen| seen.action == Action::FreeCompleted) {
            let private =
                requested.into_iter().filter(|&life| self.is_changeable(life) && self.pools[life] != DEFAULT_POOL);
            let private: Vec<usize> = private.collect();
            private.iter().for_each(|&life| self.constraints[life].is_default = true);
            return !private.is_empty();
        }
        // The model took a block that PyTorch did not take: the two are in different pools.
        let taken = modelled.iter().find(|seen| seen.action == Action::Alloc);
        let taken = taken.and_then(|seen| present.at(seen.address.0));
        match (requested.first(), taken) {
            (Some(&requested), Some(taken)) if requested != taken => self.keep_apart(requested, taken),
            (Some(&requested), None) => self.exclude(requested, self.pools[requested]),
            _ => false,
        }
    }

    /// PyTorch released the lives `released`, and kept `kept`, which the model released.
    fn learn_from_release(&mut self, entry: usize, released: Vec<usize>, kept: Vec<usize>) -> bool {
        // A pool that is used later cannot have been released.
        let in_use = released.iter().copied().filter(|&life| self.is_in_use(life, entry));
        // Nothing that is free in a pool is kept once the pool is given up.
        let given_up = kept.iter().copied().filter(|&life| self.pools[life] != DEFAULT_POOL);
        let wrong: Vec<usize> = in_use.chain(given_up).collect();
        let excluded = wrong.into_iter().filter(|&life| self.exclude(life, self.pools[life])).count();
        if excluded > 0 {
            return true;
        }
        // The release of a pool spares nothing of it that is free.
        let by_pool: HashMap<PoolKey, usize> = released.iter().rev().map(|&life| (self.pools[life], life)).collect();
        let gone: HashSet<usize> = released.iter().copied().collect();
        let spared = self.free_lives(entry).into_iter().filter(|life| !gone.contains(life));
        let spared: Vec<usize> = spared.filter(|&life| self.pools[life] != DEFAULT_POOL).collect();
        let mut learnt = false;
        for spared in spared {
            learnt |= by_pool.get(&self.pools[spared]).is_some_and(|&life| self.keep_apart(life, spared));
        }
        if learnt {
            return true;
        }
        let is_default = |&life: &usize| !self.is_changeable(life) && self.pools[life] == DEFAULT_POOL;
        let whole_cache = released.iter().any(is_default);
        let one_pool = kept.iter().any(is_default);
        let open = |lives: &[usize]| lives.iter().filter(|&&life| self.is_changeable(life)).count();
        // It released either all free memory of the default pool, or that of private pools.
        let private = match (whole_cache, one_pool) {
            (true, _) => kept,
            (false, true) => released,
            _ if !kept.is_empty() && open(&kept) <= open(&released) => kept,
            _ => released,
        };
        // If nothing says more, the next pool is tried for what was released.
        let excluded = |life: usize| if one_pool || whole_cache { DEFAULT_POOL } else { self.pools[life] };
        let excluded: Vec<(usize, PoolKey)> = private.into_iter().map(|life| (life, excluded(life))).collect();
        excluded.into_iter().filter(|&(life, pool)| self.exclude(life, pool)).count() > 0
    }

    /// The lives that exist right before an entry and hold no block. What existed before the recording is left out: its
    /// blocks are not counted.
    fn free_lives(&self, entry: usize) -> Vec<usize> {
        let Some(lives) = &self.lives else { return Vec::new() };
        let mut blocks = vec![0_u64; lives.lives.len()];
        for (index, seen) in self.recording.witnessed.iter().enumerate().take(entry) {
            let Some(life) = lives.of_entry(index) else { continue };
            match seen.action {
                Action::Alloc => blocks[life] += 1,
                Action::FreeCompleted => blocks[life] = blocks[life].saturating_sub(1),
                _ => {}
            }
        }
        let exists = |life: &MemoryLife| life.created.is_some() && life.exists_before(entry);
        let free =
            lives.lives.iter().zip(blocks).enumerate().filter(|(_, (life, blocks))| exists(life) && *blocks == 0);
        free.map(|(place, _)| place).collect()
    }

    fn is_in_use(&self, life: usize, entry: usize) -> bool {
        self.pools[life] != DEFAULT_POOL && !self.is_over(self.pools[life], entry)
    }

    fn is_changeable(&self, life: usize) -> bool {
        self.lives.as_ref().is_some_and(|lives| lives.lives[life].pool.is_none())
    }

    fn exclude(&mut self, life: usize, pool: PoolKey) -> bool {
        let new = self.is_changeable(life) && !self.constraints[life].excluded.contains(&pool);
        if new {
            self.constraints[life].excluded.push(pool);
        }
        new
    }

    fn keep_apart(&mut self, one: usize, other: usize) -> bool {
        let new = (self.is_changeable(one) || self.is_changeable(other))
            && !self.constraints[one].apart_from.contains(&other);
        if new {
            self.constraints[one].apart_from.push(other);
            self.constraints[other].apart_from.push(one);
        }
        new
    }

    /// The lives of the entries from one on that have an action.
    fn lives_of(&self, entry: usize, count: usize, wanted: impl Fn(Action) -> bool) -> Vec<usize> {
        let Some(lives) = &self.lives else { return Vec::new() };
        let actions = known_actions(&self.recording.witnessed, entry).take(count);
        let wanted = actions.filter(|(_, entry)| wanted(entry.action));
        let mut found: Vec<usize> = wanted.filter_map(|(index, _)| lives.of_entry(index)).collect();
        found.dedup();
        found
    }

    /// Gives each life of unknown pool the likeliest pool that its constraints allow. Returns false if too many pools would
    /// have to be invented.
    fn assume(&mut self) -> bool {
        let mut invented = 0;
        let mut times: HashMap<PoolKey, PoolTime> = HashMap::new();
        for life in (0..self.pools.len()).filter(|&life| !self.is_changeable(life)) {
            let time = times.entry(self.pools[life]).or_insert(PoolTime::EMPTY);
            *time = time.with(self.time(life));
        }
        for life in 0..self.pools.len() {
            if !self.is_changeable(life) {
                continue;
            }
            let constraints = &self.constraints[life];
            let apart = constraints.apart_from.iter().filter(|&&other| other < life || !self.is_changeable(other));
            let others: Vec<PoolKey> = apart.map(|&other| self.pools[other]).collect();
            let time_in = |pool: &PoolKey| times.get(pool).copied().unwrap_or(PoolTime::EMPTY).with(self.time(life));
            let allowed = |pool: &PoolKey| {
                let in_time = *pool == DEFAULT_POOL || time_in(pool).is_possible();
                in_time && !constraints.excluded.contains(pool) && !others.contains(pool)
            };
            let own = (UNRECORDED_POOL, 1 + life as u64);
            let pool = match constraints.is_default {
                true => DEFAULT_POOL,
                false => self.candidates(life).into_iter().find(allowed).unwrap_or(own),
            };
            invented += usize::from(pool == own);
            let time = time_in(&pool);
            times.insert(pool, time);
            self.pools[life] = pool;
        }
        self.note_last_uses();
        invented <= if self.recorded.is_empty() { MOST_INVENTED } else { MOST_INVENTED_BESIDE_RECORDED }
    }

    fn time(&self, life: usize) -> PoolTime {
        let Some(lives) = &self.lives else { return PoolTime::EMPTY };
        let MemoryLife { start, end, released, .. } = lives.lives[life];
        let released = released.filter(|_| end - start < self.oversize);
        PoolTime { last_request: self.requests[life].last, first_release: released.unwrap_or(usize::MAX) }
    }

    /// The pools that a life may have, the likeliest first. A scope covers several requests, so the pools of the requests
    /// before and after count most; then the default pool, the recorded ones, and one that was released before the end.
    fn candidates(&self, life: usize) -> Vec<PoolKey> {
        let beside = self.requests[life].beside.map(|request| request.and_then(|request| self.pool_of(request)));
        let both = beside[0].filter(|_| beside[0] == beside[1]);
        let beside = beside.into_iter().flatten().filter(|&pool| pool != DEFAULT_POOL);
        let more = beside.chain(self.recorded.iter().copied()).chain([(UNRECORDED_POOL, 0)]);
        both.into_iter().chain([DEFAULT_POOL]).chain(more).collect()
    }

    /// Whether the default pool is excluded for a life.
    fn is_proven_private(&self, life: Option<usize>) -> bool {
        let Some(constraints) = life.and_then(|life| self.constraints.get(life)) else { return false };
        let is_default = |&other: &usize| !self.is_changeable(other) && self.pools[other] == DEFAULT_POOL;
        constraints.excluded.contains(&DEFAULT_POOL) || constraints.apart_from.iter().any(is_default)
    }

    /// The pools as they were assumed in the end.
    pub(super) fn settled(&self, failed: &[(usize, PoolKey)]) -> InferredPools {
        let entries = &self.recording.witnessed;
        let needs_lives = self.lives.is_none() && entries.iter().any(|entry| entry.action.is_release());
        let found;
        let lives = match &self.lives {
            Some(lives) => lives,
            None => {
                found = if needs_lives { self.recording.memory_lives() } else { MemoryLives::default() };
                &found
            }
        };
        let mut evidence = PoolEvidence::default();
        for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.action == Action::Alloc) {
            let life = lives.of_entry(index);
            let is_recorded = entry.pool.is_some() || life.is_none_or(|life| lives.lives[life].pool.is_some());
            let is_private = life.and_then(|life| self.pools.get(life)).is_some_and(|&pool| pool != DEFAULT_POOL);
            match (is_recorded, is_private) {
                (true, _) => evidence.known += 1,
                // With several private pools it is not known which one it was.
                (false, true) if self.recorded.len() == 1 && self.is_proven_private(life) => evidence.inferred += 1,
                (false, _) => evidence.either += 1,
            }
            evidence.private += usize::from(self.pool_of(index).is_some_and(|pool| pool != DEFAULT_POOL));
        }
        let before = lives.lives.iter().enumerate().filter(|(_, life)| life.created.is_none());
        let segments =
            before.filter_map(|(place, life)| Some((Address(life.start), *self.pools.get(place)?))).collect();
        let requests = match self.lives {
            Some(_) => RequestPools::of(entries, |entry| {
                let failed =
                    failed.binary_search_by_key(&entry, |(failed, _)| *failed).ok().map(|place| failed[place].1);
                self.pool_of(entry).or(failed)
            }),
            None => RequestPools::default(),
        };
        InferredPools { requests, segments, evidence }
    }
}

/// The entries from one on that a call can consist of, with their numbers: the reader leaves unknown actions out.
pub(super) fn known_actions(entries: &[TraceEntry], from: usize) -> impl Iterator<Item = (usize, &TraceEntry)> {
    entries.iter().enumerate().skip(from).filter(|(_, entry)| entry.action != Action::Unknown)
}

/// Explains a divergence by private pools that were released before the end, if that explains everything.
pub(super) fn explain(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    diverged: &Verification,
    progress: &dyn Progress,
) -> Option<Verification> {
    let assumptions = Assumptions::of(recording);
    if assumptions.private_pools || !matches!(diverged.divergence(), Some(Divergence::Entries { .. })) {
        return None;
    }
    let assumptions = Assumptions { private_pools: true, ..assumptions };
    let explained = verify_assuming(recording, setup, counters, &assumptions, progress);
    (explained.verdict == Verdict::Exact).then_some(explained)
}
