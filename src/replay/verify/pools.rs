//! Private pools in a recording: which pool each request used.
//!
//! The pool of memory that exists at the end is recorded, and so is that of every entry from PyTorch 2.12 on. Other memory
//! is taken for memory of the default pool until the model contradicts: it finds a free block that PyTorch did not take, or
//! releases memory that PyTorch kept. Then the memory belongs to a private pool, and verification starts again.
//!
//! One pool for each segment never contradicts a recording. So what is not forced stays ambiguous, and is counted as such.

use std::collections::HashMap;

use super::{Assumptions, Counters, Divergence, ObservedAction, Verdict, Verification, verify_assuming};
use crate::{
    base::{Address, Progress},
    strategy::Setup,
    trace::torch::{Action, DEFAULT_POOL, MemoryLives, PoolKey, Recording, RequestPools},
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

/// The assumed pools of a recording's memory.
pub(super) struct PoolGuess<'a> {
    recording: &'a Recording,
    /// Computed when the recording has a private pool, or when the model contradicts.
    lives: Option<MemoryLives>,
    /// The pool of each life.
    pools: Vec<PoolKey>,
    /// How many pools were tried for each life before this one.
    moves: Vec<usize>,
    /// The private pools that the recording contains.
    recorded: Vec<PoolKey>,
    /// How many pools for one life alone were assumed.
    invented: usize,
    /// The last request of each private pool.
    last_use: HashMap<PoolKey, usize>,
}

impl<'a> PoolGuess<'a> {
    pub(super) fn of(recording: &'a Recording) -> PoolGuess<'a> {
        let mut guess = PoolGuess {
            recording,
            lives: None,
            pools: Vec::new(),
            moves: Vec::new(),
            recorded: Vec::new(),
            invented: 0,
            last_use: HashMap::new(),
        };
        if recording.has_private_pools() {
            guess.look_at_lives();
        }
        guess
    }

    fn look_at_lives(&mut self) {
        let lives = self.recording.memory_lives();
        self.pools = lives.lives.iter().map(|life| life.pool.unwrap_or(DEFAULT_POOL)).collect();
        self.moves = vec![0; lives.lives.len()];
        let in_lives = lives.lives.iter().filter_map(|life| life.pool);
        self.recorded =
            in_lives.chain(self.recording.pools.iter().copied()).filter(|&pool| pool != DEFAULT_POOL).collect();
        self.recorded.sort_unstable();
        self.recorded.dedup();
        self.lives = Some(lives);
        self.note_last_uses();
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

    /// The pool of the memory that an entry concerns, or of the request that failed there.
    pub(super) fn pool_of(&self, entry: usize) -> Option<PoolKey> {
        let Some(lives) = &self.lives else { return Some(DEFAULT_POOL) };
        let recorded = self.recording.witnessed.get(entry).and_then(|entry| entry.pool);
        let recorded = recorded.and_then(|pool| self.recording.pools.get(pool as usize).copied());
        recorded.or_else(|| lives.of_entry(entry).map(|life| self.pools[life]))
    }

    /// The pool of an address right before an entry.
    pub(super) fn pool_at(&self, entry: usize, address: Address) -> PoolKey {
        let life = self.lives.as_ref().and_then(|lives| lives.at(entry, address.0));
        life.map_or(DEFAULT_POOL, |life| self.pools[life])
    }

    /// Whether a private pool may have been given up before an entry: nothing uses it later.
    pub(super) fn is_over(&self, pool: PoolKey, entry: usize) -> bool {
        pool != DEFAULT_POOL && self.last_use.get(&pool).is_none_or(|&last| last < entry)
    }

    /// Changes the assumption that caused a divergence. Returns whether there was one to change.
    pub(super) fn mend(&mut self, divergence: &Divergence) -> bool {
        let Divergence::Entries { entry, recorded, modelled, .. } = divergence else { return false };
        if self.lives.is_none() {
            self.look_at_lives();
        }
        let changed = self.suspects(*entry, recorded, modelled).into_iter().filter(|&life| self.move_on(life)).count();
        if changed > 0 {
            self.note_last_uses();
        }
        changed > 0
    }

    /// The lives whose assumed pool contradicts the recording. `recorded` and `modelled` are the actions from the first
    /// difference on, which is at `entry`.
    fn suspects(&self, entry: usize, recorded: &[ObservedAction], modelled: &[ObservedAction]) -> Vec<usize> {
        let Some(lives) = &self.lives else { return Vec::new() };
        let is_open = |&life: &usize| lives.lives[life].pool.is_none();
        let released_by_pytorch: Vec<usize> = self.lives_of(entry, recorded.len(), is_release);
        let modelled_releases = modelled.iter().filter(|seen| is_release(seen.action));
        let released_by_model: Vec<usize> =
            modelled_releases.filter_map(|seen| lives.at(entry, seen.address.0)).collect();
        let kept: Vec<usize> =
            released_by_model.iter().copied().filter(|life| !released_by_pytorch.contains(life)).collect();
        if recorded.first().is_some_and(|seen| is_release(seen.action)) || !kept.is_empty() {
            // If PyTorch kept memory that is known to be the default pool's, it released a private pool.
            if !kept.is_empty() && kept.iter().all(is_open) {
                return kept;
            }
            return released_by_pytorch.into_iter().filter(is_open).collect();
        }
        let requested = self.lives_of(entry, recorded.len(), |action| action == Action::Alloc);
        let taken = modelled.iter().filter(|seen| seen.action == Action::Alloc);
        let taken = taken.filter_map(|seen| lives.at(entry, seen.address.0));
        // The model took a block that PyTorch did not take: the two are in different pools.
        let mut both: Vec<usize> = requested.into_iter().chain(taken).filter(is_open).collect();
        both.sort_by_key(|&life| (self.moves[life], std::cmp::Reverse(self.private_neighbours(life).len())));
        both.truncate(1);
        both
    }

    /// The lives of the entries from one on that have an action.
    fn lives_of(&self, entry: usize, count: usize, wanted: impl Fn(Action) -> bool) -> Vec<usize> {
        let Some(lives) = &self.lives else { return Vec::new() };
        let entries = self.recording.witnessed.iter().enumerate().skip(entry);
        let actions = entries.filter(|(_, entry)| entry.action != Action::Unknown).take(count);
        let wanted = actions.filter(|(_, entry)| wanted(entry.action));
        let mut found: Vec<usize> = wanted.filter_map(|(index, _)| lives.of_entry(index)).collect();
        found.dedup();
        found
    }

    /// The private pools of the requests before and after the first one of a life. A scope covers several requests.
    fn private_neighbours(&self, life: usize) -> Vec<PoolKey> {
        let Some(lives) = &self.lives else { return Vec::new() };
        let entries = &self.recording.witnessed;
        let created = lives.lives[life].created.unwrap_or(0);
        let other = |&index: &usize| entries[index].action == Action::Alloc && lives.of_entry(index) != Some(life);
        let before = (0..created).rev().find(other);
        let after = (created..entries.len()).find(other);
        let pools = [before, after].into_iter().flatten().filter_map(|index| self.pool_of(index));
        let mut pools: Vec<PoolKey> = pools.filter(|&pool| pool != DEFAULT_POOL).collect();
        pools.dedup();
        pools
    }

    /// Assumes the next pool for a life, or returns false if all were tried: the default pool, those of the neighbouring
    /// requests, all recorded ones, one that was released before the end, and one for this life alone.
    fn move_on(&mut self, life: usize) -> bool {
        let mut candidates = vec![DEFAULT_POOL];
        let unrecorded = [(UNRECORDED_POOL, 0), (UNRECORDED_POOL, 1 + life as u64)];
        let more = self.private_neighbours(life).into_iter().chain(self.recorded.iter().copied()).chain(unrecorded);
        for pool in more {
            if !candidates.contains(&pool) {
                candidates.push(pool);
            }
        }
        // The neighbours of a life change with the assumptions about them, so that its candidates may change places.
        let mut next = candidates.into_iter().nth(self.moves[life] + 1);
        if next == Some(unrecorded[1]) {
            self.invented += 1;
            next = next.filter(|_| self.invented <= MOST_INVENTED);
        }
        if let Some(pool) = next {
            self.moves[life] += 1;
            self.pools[life] = pool;
        }
        next.is_some()
    }

    /// The pools as they were assumed in the end.
    pub(super) fn settled(&self) -> InferredPools {
        let entries = &self.recording.witnessed;
        let needs_lives = self.lives.is_none() && entries.iter().any(|entry| is_release(entry.action));
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
            let moved = life.and_then(|life| self.moves.get(life)).is_some_and(|&moves| moves > 0);
            match (is_recorded, moved) {
                (true, _) => evidence.known += 1,
                // With several private pools it is not known which one it was.
                (false, true) if self.recorded.len() == 1 => evidence.inferred += 1,
                (false, _) => evidence.either += 1,
            }
            evidence.private += usize::from(self.pool_of(index).is_some_and(|pool| pool != DEFAULT_POOL));
        }
        let before = lives.lives.iter().enumerate().filter(|(_, life)| life.created.is_none());
        let segments =
            before.filter_map(|(place, life)| Some((Address(life.start), *self.pools.get(place)?))).collect();
        let requests = match self.lives {
            Some(_) => RequestPools::of(entries, |entry| self.pool_of(entry)),
            None => RequestPools::default(),
        };
        InferredPools { requests, segments, evidence }
    }
}

fn is_release(action: Action) -> bool {
    matches!(action, Action::SegmentFree | Action::SegmentUnmap)
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
