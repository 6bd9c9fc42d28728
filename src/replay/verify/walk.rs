//! Walks through a recording and drives the model with the same calls, until the two differ or the recording ends.

use std::collections::HashMap;

use super::{
    Divergence, ObservedAction, SettingsPhase,
    call::{CallEntries, CallReading},
    model::{AllocatorModel, GivenUp, ModelActions, UNKNOWN_SCOPE},
    pending_frees::{PendingFrees, WaitStreams},
    pools::{PoolGuess, known_actions},
    start::StartState,
};
use crate::{
    base::{Address, PROGRESS_STRIDE, Progress, StreamId},
    pytorch::SMALL_SIZE,
    strategy::{Block, Freed, StrategyError, caching::Caching},
    trace::torch::{Action, DEFAULT_POOL, PoolKey, PoolRelease, SnapshotBlockState, TraceEntry},
};

/// The state of the walk.
pub(super) struct RecordingWalk<'a> {
    entries: &'a [TraceEntry],
    pub(super) model: AllocatorModel,
    /// The program's blocks, by address.
    live: HashMap<u64, VerifiedBlock>,
    pending: PendingFrees,
    lanes: WaitStreams,
    call_entries: CallEntries,
    actions: ModelActions,
    /// The next entry; all between the start and here agree.
    pub(super) at: usize,
    /// Before which entries `empty_cache` must have been called.
    pub(super) empty_caches: Vec<usize>,
    /// How often memory must have been refused from outside.
    pub(super) refusals: usize,
    /// The program had a limit of unknown size.
    by_unknown_limit: bool,
    pools: &'a PoolGuess<'a>,
    /// Where the program gave up private pools.
    pool_releases: Vec<PoolRelease>,
    /// Failed requests that used a private pool.
    request_pools: Vec<(usize, PoolKey)>,
    /// Where the program changes settings from here on.
    changes: &'a [SettingsPhase],
    /// A call since the last request or free has completed frees of the next group.
    group_has_begun: bool,
    /// How many ranges failed requests have reserved that no entry shows.
    unrecorded_ranges: u64,
}

/// What is left of a walk.
pub(super) struct WalkOutcome {
    pub(super) caching: Caching,
    pub(super) at: usize,
    pub(super) empty_caches: Vec<usize>,
    pub(super) refusals: usize,
    pub(super) pool_releases: Vec<PoolRelease>,
    pub(super) request_pools: Vec<(usize, PoolKey)>,
}

impl WalkOutcome {
    pub(super) fn of(walk: RecordingWalk<'_>) -> WalkOutcome {
        let RecordingWalk { model, at, empty_caches, refusals, pool_releases, request_pools, .. } = walk;
        WalkOutcome { caching: model.caching, at, empty_caches, refusals, pool_releases, request_pools }
    }
}

/// Where ranges lie that no entry shows, above all addresses of a GPU.
const UNRECORDED_RANGES: u64 = 1 << 48;
/// More than the memory of a device and an eighth, which is the size of a range.
const UNRECORDED_RANGE_BYTES: u64 = 1 << 42;
const UNRECORDED_RANGES_AT_MOST: u64 = 1 << 20;

/// How many slots PyTorch's table of pools without users may have at least. The order of release depends on it, and on the
/// order in which pools were given up, and pools whose memory stays in use are not seen.
const TABLE_SLOTS: [usize; 4] = [1, 8, 16, 64];

/// How many ways to divide the released pools among calls are tried.
const MOST_DIVISIONS: usize = 16;

/// How far away a request counts as a neighbour.
const NEAR: usize = 256;

const TOO_FEW_LANES: &str = "more frees wait for streams than there are streams";

#[derive(Clone, Copy)]
struct VerifiedBlock {
    block: Block,
    requested: u64,
    stream: StreamId,
}

impl VerifiedBlock {
    fn sighting(&self, action: Action) -> ObservedAction {
        ObservedAction { action, address: self.block.address, bytes: self.requested, stream: self.stream }
    }
}

impl<'a> RecordingWalk<'a> {
    /// Starts with the memory that was there. An error if the model cannot have such memory.
    pub(super) fn new(
        entries: &'a [TraceEntry],
        mut model: AllocatorModel,
        streams: usize,
        start: &StartState,
        pools: &'a PoolGuess<'a>,
        by_unknown_limit: bool,
    ) -> Result<RecordingWalk<'a>, StrategyError> {
        let adopted = model.adopt(&start.layout, &entries[start.entry..])?;
        let mut walk = RecordingWalk {
            entries,
            model,
            live: HashMap::new(),
            pending: PendingFrees::in_entries(entries, start.entry, start.waiting()),
            lanes: WaitStreams::above(streams),
            call_entries: CallEntries::default(),
            actions: ModelActions::default(),
            at: start.entry,
            empty_caches: Vec::new(),
            refusals: 0,
            by_unknown_limit,
            pools,
            pool_releases: Vec::new(),
            request_pools: Vec::new(),
            changes: &[],
            group_has_begun: false,
            unrecorded_ranges: 0,
        };
        for (block, (was, stream)) in adopted.into_iter().zip(start.memory.live()) {
            if was.state == SnapshotBlockState::PendingFree {
                walk.wait_from_the_start(block, stream)?;
            } else {
                walk.live.insert(block.address.0, VerifiedBlock { block, requested: was.requested_size, stream });
            }
        }
        Ok(walk)
    }

    /// The program changes its settings on the way.
    pub(super) fn with_changes(self, changes: &'a [SettingsPhase]) -> RecordingWalk<'a> {
        RecordingWalk { changes, ..self }
    }

    fn wait_from_the_start(&mut self, block: Block, stream: StreamId) -> Result<(), StrategyError> {
        let turn = self.pending.turn(self.at);
        let lane = turn.and_then(|turn| self.lanes.lane(turn, &self.pending));
        let lane = lane.ok_or_else(|| StrategyError::Refused(TOO_FEW_LANES.to_owned()))?;
        self.model.free(block, stream, Some(lane)).map(drop)
    }

    /// Walks to the end.
    pub(super) fn finish(&mut self, progress: &dyn Progress) -> Result<(), Divergence> {
        progress.begin_stage("verifying", (self.entries.len() - self.at) as u64);
        while self.at < self.entries.len() {
            let begun = self.at;
            self.go_until(begun.saturating_add(PROGRESS_STRIDE))?;
            progress.advance((self.at - begun) as u64);
        }
        Ok(())
    }

    /// Walks to the end of the call that reaches `place`.
    fn go_until(&mut self, place: usize) -> Result<(), Divergence> {
        while self.at < place
            && let Some(entry) = self.entries.get(self.at)
        {
            while let Some((change, later)) = self.changes.split_first().filter(|(change, _)| change.entry <= self.at) {
                self.model.caching.configure(change.settings.clone());
                self.changes = later;
            }
            self.at = match entry.action {
                Action::FreeRequested => self.free(entry)?,
                Action::Snapshot | Action::Annotate | Action::Unknown => self.at + 1,
                _ => self.call()?,
            };
        }
        Ok(())
    }

    /// The program frees a block. Returns where the next call starts.
    fn free(&mut self, entry: &TraceEntry) -> Result<usize, Divergence> {
        let at = self.at;
        let Some(held) = self.live.remove(&entry.address.0) else {
            return Err(self.free_diverges(at, 1, None, Some("the program has no block there".to_owned())));
        };
        let turn = self.pending.turn(at);
        let lane = match turn {
            None => None,
            Some(turn) => match self.lanes.lane(turn, &self.pending) {
                Some(lane) => Some(lane),
                None => {
                    let complaint = TOO_FEW_LANES.to_owned();
                    return Err(self.free_diverges(at, 1, Some(held), Some(complaint)));
                }
            },
        };
        let entries = if turn.is_some() { 1 } else { 2 };
        let expected = [Action::FreeRequested, Action::FreeCompleted].map(|action| held.sighting(action));
        let recorded = self.entries[at..].iter().take(entries).map(ObservedAction::of);
        if !recorded.eq(expected[..entries].iter().copied()) {
            return Err(self.free_diverges(at, entries, Some(held), None));
        }
        let freed = if lane.is_some() { Freed::Later } else { Freed::Now };
        match self.model.free(held.block, entry.stream, lane) {
            Ok(answer) if answer == freed => Ok(at + entries),
            Ok(_) => Err(self.free_diverges(at, entries, Some(held), Some("the block waits for a stream".to_owned()))),
            Err(error) => Err(self.free_diverges(at, entries, Some(held), Some(error.to_string()))),
        }
    }

    #[cold]
    fn free_diverges(
        &self,
        at: usize,
        entries: usize,
        held: Option<VerifiedBlock>,
        complaint: Option<String>,
    ) -> Divergence {
        let recorded: Vec<ObservedAction> = self.entries[at..].iter().take(entries).map(ObservedAction::of).collect();
        let model = held.map(|held| [Action::FreeRequested, Action::FreeCompleted].map(|action| held.sighting(action)));
        let model = model.into_iter().flatten().take(entries).collect();
        Divergence::entries(at, recorded, model, complaint)
    }

    /// A request with the actions that it caused, or a call of `empty_cache`. Returns where the next call starts.
    fn call(&mut self) -> Result<usize, Divergence> {
        let end = self.call_entries.read(self.entries, self.at);
        let next = self.explained_call(end)?;
        let done = &self.entries[self.at..next.min(self.entries.len())];
        self.group_has_begun |= done.iter().any(|entry| entry.action == Action::FreeCompleted);
        if next >= end && std::mem::take(&mut self.group_has_begun) {
            self.lanes.next_group().for_each(|lane| self.model.set_idle(lane));
            self.lanes.vacate_next_group();
        }
        Ok(next)
    }

    /// Carries out the call whose entries were read up to `end`. Returns where the next call starts.
    fn explained_call(&mut self, end: usize) -> Result<usize, Divergence> {
        if self.pools.has_private()
            && let Some(next) = self.release_of_pool()
        {
            return Ok(next);
        }
        match self.call_entries.request {
            None => self.empty_cache(end),
            Some(_) if self.call_entries.is_plain() => self.plain_request().map(|()| end),
            Some(_) => match self.request() {
                Ok(()) => Ok(end),
                // With all pools known, the calls before the request can be told apart.
                Err(divergence) if self.pools.has_private() && !self.pools.is_open() => {
                    self.empty_cache(end).map_err(|_| divergence)
                }
                Err(divergence) => Err(divergence),
            },
        }
    }

    /// The first actions are the release of a private pool: a `MemPool` was deleted, or `empty_cache` was called during a
    /// capture, which releases only pools that were given up. Returns where the next call starts.
    fn release_of_pool(&mut self) -> Option<usize> {
        let mut seen = self.call_entries.seen.iter().map(|seen| seen.action);
        seen.find(|&action| action != Action::FreeCompleted).filter(|action| action.is_release())?;
        let pool = self.releases().next().filter(|&pool| pool != DEFAULT_POOL)?;
        let over = self.released_pools();
        let mut trial = self.model.clone();
        trial.trim_pool(pool, over.contains(&pool), &mut self.actions);
        if let Some(next) = self.explained_part() {
            self.model = trial;
            if over.contains(&pool) {
                self.pool_releases.push(PoolRelease { entry: self.at, pool, trims: true });
            }
            return Some(next);
        }
        for given_up in self.divisions(&over) {
            let mut trial = self.model.clone();
            trial.give_up(&given_up);
            trial.empty_cache_in_scope(&mut self.actions);
            if let Some(next) = self.explained_part() {
                self.model = trial;
                self.note_given_up(given_up.pools, true);
                return Some(next);
            }
        }
        None
    }

    /// Where the next call starts, if the model's actions are the first ones of the call, or all.
    fn explained_part(&self) -> Option<usize> {
        let explained = self.actions.seen.len();
        if explained == 0 || self.call_entries.seen.get(..explained) != Some(&self.actions.seen[..]) {
            return None;
        }
        let mut rest = known_actions(self.entries, self.at).map(|(index, _)| index).skip(explained);
        Some(rest.next().unwrap_or(self.entries.len()))
    }

    /// What the program may have given up before the first call, the likeliest first. The entries may be those of several
    /// calls.
    fn divisions<'p>(&self, released: &'p [PoolKey]) -> Vec<GivenUp<'p>> {
        let mut order: Vec<PoolKey> = Vec::new();
        for pool in self.releases().filter(|&pool| pool != DEFAULT_POOL) {
            if !order.contains(&pool) {
                order.push(pool);
            }
        }
        let tables = if order.len() > 1 { &TABLE_SLOTS[..] } else { &[] };
        let tables = std::iter::once(None).chain(tables.iter().map(|&slots| Some((slots, order.clone()))));
        let parts = (0..=released.len()).rev().take(MOST_DIVISIONS).map(|count| &released[..count]);
        tables.flat_map(|table| parts.clone().map(move |pools| GivenUp { pools, table: table.clone() })).collect()
    }

    /// The private pools whose memory the call releases, and which the program has not given up yet. Nothing uses them
    /// later.
    fn released_pools(&self) -> Vec<PoolKey> {
        let mut pools = Vec::new();
        if !self.pools.has_private() {
            return pools;
        }
        for pool in self.releases() {
            let is_given_up = self.pool_releases.iter().any(|release| release.pool == pool);
            if self.pools.is_over(pool, self.at) && !is_given_up && !pools.contains(&pool) {
                pools.push(pool);
            }
        }
        pools
    }

    /// The pools of the memory that the call releases.
    fn releases(&self) -> impl Iterator<Item = PoolKey> + '_ {
        let known = known_actions(self.entries, self.at).take(self.call_entries.seen.len());
        let releases = known.filter(|(_, entry)| entry.action.is_release());
        releases.map(|(index, _)| self.pools.pool_of(index).unwrap_or(DEFAULT_POOL))
    }

    fn note_given_up(&mut self, pools: &[PoolKey], trims: bool) {
        let releases = pools.iter().map(|&pool| PoolRelease { entry: self.at, pool, trims });
        self.pool_releases.extend(releases);
    }

    /// The pools that the request of the call may use. The entry of a request that failed has no address: it may have been
    /// in the scope of the request before or after, or in one without another request.
    fn request_pools(&self) -> Vec<PoolKey> {
        let recorded = self.call_entries.request.and_then(|request| self.pools.pool_of(request));
        if let Some(pool) = recorded {
            return vec![pool];
        }
        let mut pools = vec![DEFAULT_POOL];
        if self.pools.has_private() {
            let is_request = |&index: &usize| self.entries[index].action == Action::Alloc;
            let before = (0..self.at).rev().take(NEAR).find(is_request);
            let after = (self.at..self.entries.len()).take(NEAR).find(is_request);
            let near = [before, after].into_iter().flatten().filter_map(|index| self.pools.pool_of(index));
            for pool in near.chain([UNKNOWN_SCOPE]) {
                let is_given_up = self.pool_releases.iter().any(|release| release.pool == pool);
                if !pools.contains(&pool) && !is_given_up {
                    pools.push(pool);
                }
            }
        }
        pools
    }

    /// Only a call of `empty_cache` explains the actions. Returns where the next call starts: if private pools are
    /// released too, the actions may be those of several calls.
    fn empty_cache(&mut self, next: usize) -> Result<usize, Divergence> {
        let released = self.released_pools();
        let before = self.pools.has_private().then(|| self.model.clone());
        for given_up in self.divisions(&released) {
            if let Some(before) = &before {
                self.model = before.clone();
            }
            self.model.give_up(&given_up);
            self.model.empty_cache(&mut self.actions);
            let explained = if self.actions.seen == self.call_entries.seen {
                Some(next)
            } else {
                self.explained_part().filter(|_| before.is_some())
            };
            if let Some(next) = explained {
                self.note_given_up(given_up.pools, false);
                self.empty_caches.push(self.at);
                return Ok(next);
            }
        }
        Err(self.diverges(CallReading::after_empty_cache()))
    }

    /// Only one reading is possible, so no copy of the model is needed.
    fn plain_request(&mut self) -> Result<(), Divergence> {
        if self.call_entries.seen.len() > 1 {
            self.model.script(&self.call_entries, None);
        }
        let reading = CallReading::plain(self.call_entries.completed_first);
        let pool = self.call_entries.request.and_then(|request| self.pools.pool_of(request)).unwrap_or(DEFAULT_POOL);
        let block = self.model.request(&self.call_entries, pool, reading, self.lanes.next_group(), &mut self.actions);
        if self.actions.seen != self.call_entries.seen {
            return Err(self.diverges(reading));
        }
        self.settle(block);
        Ok(())
    }

    /// Tries every reading on a copy of the model, and takes the first that gives what was recorded.
    fn request(&mut self) -> Result<(), Divergence> {
        let next_range = if self.call_entries.runs_out() { self.next_range() } else { None };
        self.model.script(&self.call_entries, next_range);
        let mut nearest: Option<(usize, Divergence)> = None;
        let released = self.released_pools();
        let pools = self.request_pools();
        let mut given_up = self.divisions(&released);
        if !released.is_empty() {
            given_up.sort_by_key(|given_up| !given_up.pools.is_empty());
        }
        let readings = self.call_entries.readings(self.by_unknown_limit, self.pools.has_private());
        let cases = pools.iter().flat_map(|&pool| given_up.iter().map(move |given_up| (pool, given_up)));
        for ((pool, given_up), reading) in cases.flat_map(|case| readings.iter().map(move |&reading| (case, reading))) {
            let mut trial = self.model.clone();
            trial.give_up(given_up);
            let block = trial.request(&self.call_entries, pool, reading, self.lanes.next_group(), &mut self.actions);
            if self.actions.seen == self.call_entries.seen {
                self.model = trial;
                self.refusals += reading.refusals;
                self.note_given_up(given_up.pools, false);
                if let (Some(request), true) = (self.call_entries.request, pool != DEFAULT_POOL) {
                    self.request_pools.push((request, pool));
                }
                if reading.empty_cache {
                    self.empty_caches.push(self.at);
                }
                self.unrecorded_ranges += u64::from(next_range.is_some());
                self.settle(block);
                return Ok(());
            }
            let in_common = self.actions.seen.iter().zip(&self.call_entries.seen).take_while(|(a, b)| a == b).count();
            if nearest.as_ref().is_none_or(|(most, _)| in_common > *most) {
                nearest = Some((in_common, self.diverges(reading)));
            }
        }
        nearest.map_or(Ok(()), |(_, divergence)| Err(divergence))
    }

    fn settle(&mut self, block: Option<Block>) {
        if let (Some(block), Some(last)) = (block, self.call_entries.seen.last()) {
            self.live.insert(block.address.0, VerifiedBlock { block, requested: last.bytes, stream: last.stream });
        }
    }

    /// Where a failing request reserves a range: at the next mapping of its stream, pool and size class. If nothing is
    /// mapped there later, no entry shows the address, and any that is unused will do.
    fn next_range(&self) -> Option<Address> {
        let request = self.call_entries.seen.last()?;
        let pool = self.call_entries.request.and_then(|request| self.pools.pool_of(request));
        let is_small = request.bytes <= SMALL_SIZE;
        let later = self.entries.iter().enumerate().skip(self.at);
        let mut maps = later.filter(|(index, entry)| {
            entry.action == Action::SegmentMap
                && entry.stream == request.stream
                && pool.is_none_or(|pool| self.pools.pool_of(*index) == Some(pool))
                && self.is_mapped_for_small(*index).is_none_or(|small| small == is_small)
        });
        let unrecorded =
            UNRECORDED_RANGES + self.unrecorded_ranges % UNRECORDED_RANGES_AT_MOST * UNRECORDED_RANGE_BYTES;
        Some(maps.next().map_or(Address(unrecorded), |(_, entry)| entry.address))
    }

    /// Whether memory was mapped for a small request.
    fn is_mapped_for_small(&self, map: usize) -> Option<bool> {
        let ends = |entry: &&TraceEntry| matches!(entry.action, Action::Alloc | Action::OutOfMemory);
        self.entries[map..].iter().find(ends).map(|entry| entry.size <= SMALL_SIZE)
    }

    #[cold]
    fn diverges(&self, reading: CallReading) -> Divergence {
        let mut complaint = self.actions.complaint.clone();
        if reading.empty_cache && complaint.is_none() && self.call_entries.request.is_none() {
            complaint = Some("read as empty_cache".to_owned());
        }
        Divergence::entries(self.at, self.call_entries.seen.clone(), self.actions.seen.clone(), complaint)
    }
}
