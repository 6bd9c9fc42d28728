//! The step that a program repeats, and the places of its blocks.
//!
//! A request that is placed as it comes has a place that suits the present. In a program that repeats its requests, memory is
//! then lost, or chunks are moved in every step. The lifetimes of the last step are known, however, so all blocks of
//! the next one can be placed together.
//!
//! - [`StepHistory`] keeps the large requests. When memory must be moved or must grow, it looks for a period: the same
//!   requests, with the same bytes live, some requests ago.
//! - [`StepPlan`] follows the requests of the step. Where the fewest of its blocks are live, chunks are moved once to a
//!   range of addresses, and from then on every request of the step has its address there, or in free memory that cannot be moved. Steps make no driver
//!   call, except where memory passes from stream to stream, and where a block that other streams use is freed: the next request at its
//!   place waits for them on the GPU.
//!
//! The places of a plan are proposals. A request that is not in the plan, or whose place is not free, is served by the
//! memory outside of the plan. If that is not enough, or if the program does something else, the plan is given up and its memory serves all requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    ops::Range,
};

use super::{
    OomphAllocator, PLANNED, is_planned,
    page_heap::{FreeChunks, choose_chunks},
};
use crate::strategy::{
    Context, StrategyError,
    deferred::Patience,
    pooled::{MemoryPiece, NONE, PerStream},
};
use oomph_base::{
    MIB, StreamId,
    packing::{BlockLifetime, PackingBudget, PeriodicPlace, StreamSharing, pack_streams},
    round_up,
};

/// How many requests the history keeps. A step has at most half of them.
const KEPT_REQUESTS: u64 = 1 << 16;
/// Steps have more requests than this.
const SHORTEST_PERIOD: u64 = 8;
/// How many periods are looked at in one search.
const MOST_PERIODS: usize = 8;
/// A period is accepted when the last one part of this many was repeated. The first step is unlike the others (it makes the
/// optimizer's state), so a whole repetition would be one step later.
const REPEATED_PART: u64 = 4;
/// How far live bytes may differ from those one period ago: one part of this many. Layers repeat requests too, but
/// what they keep adds up.
const LIVE_TOLERANCE: u64 = 256;
/// At least this percentage of the bytes of a step is planned.
const LEAST_PLANNED: u64 = 90;
/// How many requests of a plan may be left out at once.
const LOOK_AHEAD: usize = 16;
/// A plan is given up when more than one request of this many in a period is not as planned.
const MOST_MISSES: usize = 8;
/// A plan that was followed for this many steps was right.
const STEPS_OF_SUCCESS: u64 = 4;
/// How much new memory a plan may take, in thousandths of the most that was live: so much more with each plan that needed more.
/// Moves often end after some steps, and then the memory would be lost for nothing.
const ALLOWED_PER_REFUSAL: u64 = 10;
const MOST_ALLOWED: u64 = 40;
/// Streams share memory only if a plan needs more new memory than this otherwise, in thousandths of the most that was live,
/// because sharing makes them wait. At first they share only [between phases](StreamSharing::BetweenPhases).
const WORTH_SHARING: u64 = 30;
/// Memory is not shared if a block then has its place where more than this many blocks of other streams have theirs, on average.
/// They are looked through for each request.
const MOST_SHARERS: usize = 64;
/// A plan also places blocks in free parts of chunks that are partly in use, if they have at least this size. Slabs need the rest.
const SMALLEST_ROOM: u64 = 4 * MIB;
/// The work for one packing of a step, in units of one to three nanoseconds. A step is packed up to four times.
const PACKING_STEPS: u64 = 50_000_000;

/// A stream and a rounded size.
type RequestShape = (StreamId, u64);

/// A free part of chunks that are partly in use, and the stream that it belongs to.
type FreeRoom = (StreamId, Range<u64>);

/// One large request.
#[derive(Clone, Copy, Debug)]
struct PastRequest {
    shape: RequestShape,
    /// Bytes that were live before it.
    live: u64,
    /// When it was made, and when its block was freed, counted in requests and frees.
    born: u64,
    freed: Option<u64>,
    /// Whether other streams used the block.
    is_shared: bool,
}

/// The latest large requests.
#[derive(Clone, Debug, Default)]
pub(super) struct StepHistory {
    /// A ring.
    requests: Vec<PastRequest>,
    count: u64,
    clock: u64,
    /// No period is looked for before this request.
    next_try: u64,
    /// Plans that were given up.
    failures: u32,
    /// Plans that needed too much memory.
    refusals: u64,
    /// The length of the last plan that was given up: a period is longer.
    failed_period: u64,
}

impl StepHistory {
    /// Keeps a request; returns its number for [`StepHistory::freed`].
    pub(super) fn request(&mut self, shape: RequestShape, live: u64) -> u32 {
        let request = PastRequest { shape, live, born: self.clock, freed: None, is_shared: false };
        let place = (self.count % KEPT_REQUESTS) as usize;
        match self.requests.get_mut(place) {
            Some(oldest) => *oldest = request,
            None => self.requests.push(request),
        }
        self.count += 1;
        self.clock += 1;
        self.number(self.count - 1)
    }

    /// Numbers are below [`NONE`](crate::strategy::pooled::NONE).
    fn number(&self, index: u64) -> u32 {
        (index % u64::from(u32::MAX)) as u32
    }

    /// The block of a request was freed.
    pub(super) fn freed(&mut self, number: u32, is_shared: bool) {
        let newest = u64::from(self.number(self.count - 1));
        let age = (newest + u64::from(u32::MAX) - u64::from(number)) % u64::from(u32::MAX);
        if age < self.requests.len() as u64 {
            let place = ((self.count - 1 - age) % KEPT_REQUESTS) as usize;
            self.requests[place] = PastRequest { freed: Some(self.clock), is_shared, ..self.requests[place] };
            self.clock += 1;
        }
    }

    fn at(&self, index: u64) -> &PastRequest {
        &self.requests[(index % KEPT_REQUESTS) as usize]
    }

    /// The step that ends with the latest request, if the program repeats itself.
    fn find_step(&mut self) -> Option<StepPlan> {
        if self.count < self.next_try.max(2 * SHORTEST_PERIOD) {
            return None;
        }
        // Where chunks are moved for every request, a search for each would cost more.
        self.next_try = self.count + SHORTEST_PERIOD;
        let (newest, oldest) = (self.count - 1, self.count - self.requests.len() as u64);
        let PastRequest { shape, live, .. } = *self.at(newest);
        let repeats = |&period: &u64| {
            let past = self.at(newest - period);
            let repeated = period.div_ceil(REPEATED_PART).max(SHORTEST_PERIOD);
            past.shape == shape
                && past.live.abs_diff(live) <= live / LIVE_TOLERANCE
                && newest - period >= oldest + repeated
                && (0..repeated).all(|back| self.at(newest - back).shape == self.at(newest - back - period).shape)
        };
        let shortest = self.failed_period.max(SHORTEST_PERIOD) + 1;
        let periods = (shortest..=(newest - oldest).min(KEPT_REQUESTS / 2)).filter(repeats).take(MOST_PERIODS);
        let periods: Vec<u64> = periods.collect();
        let history = &*self;
        let plans = |shared| periods.iter().map(move |&period| history.step(period, shared));
        plans(false).chain(plans(true)).find(|plan| plan.planned_percent() >= LEAST_PLANNED)
    }

    /// The last `period` requests and their lifetimes. Blocks that other streams use have places only if `shared`, because their
    /// stream then waits for the others.
    fn step(&self, period: u64, shared: bool) -> StepPlan {
        let (newest, oldest) = (self.count - 1, self.count - self.requests.len() as u64);
        let first = newest + 1 - period;
        let length = self.at(newest).born - self.at(newest - period).born;
        let request = |index: u64| {
            let now = self.at(index);
            // A block that is live now ends when the one before it did.
            let ended = if now.freed.is_none() && index >= oldest + period { self.at(index - period) } else { now };
            let life = ended.freed.map(|freed| freed - ended.born);
            // A block that lives longer than a period would overlap itself.
            let life = life.filter(|&life| ended.shape == now.shape && life <= length && (shared || !ended.is_shared));
            let begin = now.born - self.at(first).born;
            let lifetime = life.map(|life| (begin as u32, (begin + life) as u32));
            PlannedRequest::new(now.shape, lifetime, ended.is_shared)
        };
        StepPlan::new((first..=newest).map(request).collect(), length as u32)
    }

    /// A plan was given up after `followed` requests. If these were some steps, the program began something else, and
    /// the step may come again. Otherwise its period was wrong: the next try is some periods later, twice as many each time.
    fn failed(&mut self, period: u64, followed: u64) {
        if followed >= period * STEPS_OF_SUCCESS {
            (self.failures, self.failed_period) = (0, 0);
            self.next_try = self.count + period;
            return;
        }
        self.failures += 1;
        self.failed_period = period;
        self.next_try = self.count + ((period / 2) << self.failures.min(16));
    }

    /// A plan could not be placed: it needed too much new memory. Once the next one may take no more, it is made later
    /// each time.
    fn refused(&mut self, period: u64) {
        self.refusals += 1;
        let in_vain = self.refusals.saturating_sub(MOST_ALLOWED / ALLOWED_PER_REFUSAL);
        if in_vain > 0 {
            self.next_try = self.count + (period << in_vain.min(16));
        }
    }

    /// How much new memory a plan may take.
    fn allowed(&self, live: u64) -> u64 {
        live / 1000 * (self.refusals * ALLOWED_PER_REFUSAL).min(MOST_ALLOWED)
    }
}

/// One request of a step.
#[derive(Clone, Debug)]
struct PlannedRequest {
    shape: RequestShape,
    /// From the first request of the step on; the end may lie in the next one. `None` for a block that has no place.
    lifetime: Option<(u32, u32)>,
    /// Whether other streams use the block.
    is_shared: bool,
    address: Option<u64>,
    /// Empty if memory does not pass from stream to stream.
    shares_with: Sharers,
    /// The last free of its block, counted by each stream that used it. Streams that are known to be done are left out.
    last_free: Vec<CountedFree>,
}

impl PlannedRequest {
    fn new(shape: RequestShape, lifetime: Option<(u32, u32)>, is_shared: bool) -> PlannedRequest {
        PlannedRequest { shape, lifetime, is_shared, address: None, shares_with: Sharers::new(), last_free: Vec::new() }
    }
}

/// The requests that use some of the same memory as another one. Those of its own stream only if other streams use their blocks.
type Sharers = Vec<usize>;

/// A stream, and the number of a free among all frees of planned memory that it used.
type CountedFree = (StreamId, u64);

/// Places for all blocks of a step.
#[derive(Clone, Debug)]
struct StepLayout {
    /// By request; `None` for one that is not planned.
    addresses: Vec<Option<u64>>,
    /// By request; `None` if streams share no memory.
    sharers: Option<Vec<Sharers>>,
    /// The end of the places outside of the rooms.
    end: u64,
}

/// The requests of a step in order, and the position of the program in it.
#[derive(Clone, Debug)]
pub(super) struct StepPlan {
    requests: Vec<PlannedRequest>,
    /// The length of a step, in requests and frees.
    period: u32,
    /// The request before which the fewest planned bytes are live: memory is moved there.
    turn: usize,
    /// The request that is expected next.
    next: usize,
    misses: usize,
    /// Requests since the last count of misses began, and since the plan was made or placed.
    counted: usize,
    followed: u64,
    /// Set if memory passes from stream to stream.
    stream_order: Option<StreamOrder>,
    /// Freed blocks that other streams may still use, by address.
    pending: BTreeMap<u64, PendingFree>,
}

/// A freed block of a plan that other streams may still use.
#[derive(Clone, Copy, Debug)]
struct PendingFree {
    slot: u32,
    end: u64,
    /// The number of its request, if memory passes from stream to stream.
    number: Option<usize>,
}

/// Which frees of memory of a plan the streams have waited for.
#[derive(Clone, Debug, Default)]
struct StreamOrder {
    /// How often each stream freed memory of the plan.
    frees: PerStream<u64>,
    /// Of streams `a` and `b`: all later work of `a` runs after this many frees of `b`.
    follows: PerStream<PerStream<u64>>,
}

impl StreamOrder {
    fn frees_of(&self, stream: StreamId) -> u64 {
        self.frees.get(stream).copied().unwrap_or(0)
    }

    /// A stream frees memory that it used.
    fn count_free(&mut self, stream: StreamId) -> CountedFree {
        let frees = self.frees.of(stream);
        *frees += 1;
        (stream, *frees)
    }

    /// All later work of a stream comes after that free.
    fn note_follows(&mut self, stream: StreamId, (other, free): CountedFree) {
        let known = self.follows.of(stream).of(other);
        *known = free.max(*known);
    }

    fn follows(&self, stream: StreamId, other: StreamId) -> u64 {
        self.follows.get(stream).and_then(|frees| frees.get(other)).copied().unwrap_or(0)
    }

    /// A stream waits for all work of another one, and so for what that one has waited for.
    fn note_wait(&mut self, stream: StreamId, other: StreamId) {
        let third = self.follows.of(other).clone();
        (0..).zip(third.iter()).for_each(|(third, &frees)| self.note_follows(stream, (StreamId(third), frees)));
        self.note_follows(stream, (other, self.frees_of(other)));
    }
}

impl StepPlan {
    fn new(requests: Vec<PlannedRequest>, period: u32) -> StepPlan {
        let (turn, next, misses, counted, followed) = (0, 0, 0, 0, 0);
        let (stream_order, pending) = (None, BTreeMap::new());
        let mut plan = StepPlan { requests, period, turn, next, misses, counted, followed, stream_order, pending };
        plan.turn = plan.emptiest();
        plan
    }

    /// The percentage of bytes that is planned.
    fn planned_percent(&self) -> u64 {
        let bytes = |planned: bool| -> u64 {
            let requests = self.requests.iter().filter(|request| !planned || request.lifetime.is_some());
            requests.map(|request| request.shape.1).sum()
        };
        bytes(true) / (bytes(false) / 100).max(1)
    }

    /// Whether a block that other streams use has a place.
    fn has_shared_places(&self) -> bool {
        self.requests.iter().any(|request| request.is_shared && request.lifetime.is_some())
    }

    /// The numbers of the planned requests, and their streams and lifetimes.
    fn planned(&self) -> (Vec<usize>, Vec<(StreamId, BlockLifetime)>) {
        let planned = self.requests.iter().enumerate().filter_map(|(number, request)| {
            let ((begin, end), (stream, bytes)) = (request.lifetime?, request.shape);
            Some((number, (stream, BlockLifetime { begin, end, bytes })))
        });
        planned.unzip()
    }

    /// The planned request before which the fewest planned bytes are live.
    fn emptiest(&self) -> usize {
        let (numbers, blocks) = self.planned();
        let mut change = vec![0_i64; self.period as usize + 1];
        let mut live = 0_i64;
        for (_, block) in &blocks {
            change[block.begin as usize] += block.bytes.cast_signed();
            // What lives on in the next period is live at the beginning of this one.
            live += if block.end >= self.period { block.bytes.cast_signed() } else { 0 };
            change[(block.end % self.period.max(1)) as usize] -= block.bytes.cast_signed();
        }
        let mut begins = numbers.into_iter().zip(blocks.iter().map(|(_, block)| block.begin)).peekable();
        let mut least = (i64::MAX, 0);
        for (time, change) in (0_u32..).zip(change) {
            if let Some((number, _)) = begins.next_if(|&(_, begin)| begin == time) {
                least = least.min((live, number));
            }
            live += change;
        }
        least.1
    }

    /// The bytes of all requests of the step that have no place.
    fn unplanned_bytes(&self) -> u64 {
        let unplanned = self.requests.iter().filter(|request| request.lifetime.is_none());
        unplanned.map(|request| request.shape.1).sum()
    }

    /// Finds places for all blocks in `rooms` and from `base` on.
    fn lay_out(&self, base: u64, sharing: StreamSharing, rooms: &[FreeRoom]) -> Option<StepLayout> {
        let (numbers, blocks) = self.planned();
        let mut budget = PackingBudget::of_steps(PACKING_STEPS);
        let is_shared = sharing != StreamSharing::Never;
        // For `sharers`.
        if is_shared && !budget.spend((blocks.len() as u64).pow(2)) {
            return None;
        }
        let sizes: Vec<(StreamId, u64)> = rooms.iter().map(|(stream, room)| (*stream, room.end - room.start)).collect();
        let (places, height) = pack_streams(&blocks, self.period, sharing, &sizes, &mut budget)?;
        let mut addresses = vec![None; self.requests.len()];
        for (number, place) in numbers.into_iter().zip(places) {
            addresses[number] = Some(match place {
                PeriodicPlace::Room(room, offset) => rooms[room].1.start + offset,
                PeriodicPlace::Outside(offset) => base + offset,
            });
        }
        let sharers = if is_shared { Some(self.sharers(&addresses)?) } else { None };
        Some(StepLayout { addresses, sharers, end: base + height })
    }

    /// For each request, the others that use some of the same memory and must be waited for; `None` if these are too many.
    fn sharers(&self, addresses: &[Option<u64>]) -> Option<Vec<Sharers>> {
        let place = |(number, (request, address)): (usize, (&PlannedRequest, &Option<u64>))| {
            let (stream, bytes) = request.shape;
            address.map(|low| (low..low + bytes, stream, number))
        };
        let places: Vec<(Range<u64>, StreamId, usize)> =
            self.requests.iter().zip(addresses).enumerate().filter_map(place).collect();
        let mut found = vec![Sharers::new(); self.requests.len()];
        let mut left = places.len() * MOST_SHARERS;
        for (range, stream, number) in &places {
            for (other, user, sharer) in &places {
                let may_wait = user != stream || self.requests[*sharer].is_shared && sharer != number;
                if may_wait && other.start < range.end && range.start < other.end {
                    left = left.checked_sub(1)?;
                    found[*number].push(*sharer);
                }
            }
        }
        Some(found)
    }

    /// From now on, blocks have their places there.
    fn use_layout(&mut self, layout: StepLayout) {
        self.stream_order = layout.sharers.is_some().then(StreamOrder::default);
        let sharers = layout.sharers.into_iter().flatten().chain(iter::repeat_with(Sharers::new));
        for ((request, address), shares_with) in self.requests.iter_mut().zip(layout.addresses).zip(sharers) {
            (request.address, request.shares_with, request.last_free) = (address, shares_with, Vec::new());
        }
    }

    /// Drops rooms in which no block has its place, and the ends of the others that no block reaches.
    fn trim_rooms(&self, rooms: &mut Vec<FreeRoom>) {
        for (_, room) in rooms.iter_mut() {
            let placed = self.requests.iter().filter_map(|request| Some(request.address? + request.shape.1));
            room.end = placed.filter(|end| room.start < *end && *end <= room.end).max().unwrap_or(room.start);
        }
        rooms.retain(|(_, room)| !room.is_empty());
    }

    fn streams(&self) -> BTreeSet<StreamId> {
        self.requests.iter().map(|request| request.shape.0).collect()
    }

    /// Follows a request; returns its number in the step, or `None` if it is not expected.
    fn follow(&mut self, shape: RequestShape) -> Option<usize> {
        let count = self.requests.len();
        self.followed += 1;
        self.counted += 1;
        if self.counted > count {
            (self.counted, self.misses) = (0, 0);
        }
        let mut ahead = (self.next..self.next + LOOK_AHEAD.min(count / 2)).map(|number| number % count);
        let found = ahead.find(|&number| self.requests[number].shape == shape);
        if found.is_none_or(|number| number != self.next) {
            self.misses += 1;
        }
        let number = found?;
        self.next = (number + 1) % count;
        Some(number)
    }

    /// Whether the program does something else. A plan that was not placed in two steps is not going to be.
    fn has_failed(&self, placed: bool) -> bool {
        let count = self.requests.len();
        self.misses > count / MOST_MISSES + LOOK_AHEAD.min(count / 2) || !placed && self.followed > 2 * count as u64
    }

    /// A stream that must be waited for before a request gets its place: one that freed some of that memory since the stream of
    /// the request last waited for it.
    fn due_wait(&self, number: usize) -> Option<StreamId> {
        let order = self.stream_order.as_ref()?;
        let PlannedRequest { shape: (stream, _), shares_with, .. } = &self.requests[number];
        let mut frees = shares_with.iter().flat_map(|&sharer| &self.requests[sharer].last_free);
        frees.find(|&&(other, free)| other != *stream && order.follows(*stream, other) < free).map(|&(other, _)| other)
    }

    /// All later work of a stream comes after what another stream has queued so far.
    fn note_wait(&mut self, stream: StreamId, other: StreamId) {
        self.stream_order.iter_mut().for_each(|order| order.note_wait(stream, other));
    }

    /// A block of the plan was freed, and no other stream uses it, or no longer.
    #[inline]
    pub(super) fn note_free(&mut self, piece: &MemoryPiece) {
        let pending = if self.pending.is_empty() { None } else { self.pending.remove(&piece.address) };
        let Some(order) = &mut self.stream_order else { return };
        if let Some(request) = pending.and_then(|free| self.requests.get_mut(free.number?)) {
            request.last_free.retain(|&(user, _)| user == request.shape.0);
        } else if let Some(request) = self.requests.get_mut(piece.links[0] as usize) {
            request.last_free.clear();
            request.last_free.push(order.count_free(request.shape.0));
        }
    }

    /// A block of the plan was freed that other streams may still use. The next request at its place lets its stream wait for
    /// them. If that was not foreseen, the memory is free when they are done.
    pub(super) fn note_shared_free(&mut self, slot: u32, piece: &mut MemoryPiece, users: &[StreamId]) {
        let mut number = None;
        if let Some(order) = &mut self.stream_order {
            let user = piece.links[0] as usize;
            let Some(request) = self.requests.get_mut(user).filter(|request| request.is_shared) else { return };
            let frees = iter::once(&piece.stream).chain(users).map(|&user| order.count_free(user));
            request.last_free = frees.collect();
            number = Some(user);
            // From now on, the request is known by the address.
            piece.links[0] = NONE;
        }
        self.pending.insert(piece.address, PendingFree { slot, end: piece.end(), number });
    }

    /// The freed block at the place of a request that other streams may still use is handed over: the stream of the request has waited
    /// for them.
    fn note_handed_over(&mut self, stream: StreamId, address: u64) {
        let freed = self.pending.remove(&address);
        let (Some(order), Some(number)) = (&mut self.stream_order, freed.and_then(|free| free.number)) else { return };
        let PlannedRequest { shape: (own, _), last_free, .. } = &self.requests[number];
        for &free in last_free.iter().filter(|(user, _)| user != own && *user != stream) {
            order.note_follows(stream, free);
        }
    }

    /// The slot of a freed block at the place of a request that other streams may still use.
    fn pending_at(&self, number: usize) -> Option<u32> {
        if self.pending.is_empty() {
            return None;
        }
        let PlannedRequest { shape: (_, bytes), address, .. } = self.requests[number];
        let (_, free) = self.pending.range(..address? + bytes).next_back()?;
        (address? < free.end).then_some(free.slot)
    }
}

/// The memory of a plan. Its free blocks are in no list, so other requests do not find them.
impl OomphAllocator {
    /// A stream is going to be captured, and its events cannot be waited for then.
    pub(super) fn prepare_capture(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        match &self.plan {
            Some(plan) if plan.streams().len() > 1 => self.give_up_plan(cx),
            _ => Ok(()),
        }
    }

    /// Whether a request may grow memory while there is a plan: within the slack, and slabs up to a share of what is live.
    pub(super) fn may_grow_beside_plan(&mut self, bytes: u64) -> bool {
        if !self.is_placed || self.may_grow(bytes) {
            return true;
        }
        self.beside_plan += bytes;
        bytes <= self.settings.slab_bytes && self.beside_plan <= self.stats.peak.active / 1000 * ALLOWED_PER_REFUSAL
    }

    /// Looks for the step that the program repeats: called when a request finds no place.
    pub(super) fn look_for_step(&mut self) {
        if self.plan.is_none() && !self.is_fixed() {
            self.plan = self.history.find_step();
        }
    }

    /// Takes the free block that the plan has for this request; it is in no list.
    pub(super) fn take_planned(
        &mut self,
        cx: &mut Context<'_>,
        shape: RequestShape,
    ) -> Result<Option<u32>, StrategyError> {
        let Some(plan) = &mut self.plan else { return Ok(None) };
        let followed = plan.follow(shape);
        if plan.has_failed(self.is_placed) {
            self.give_up_plan(cx)?;
            return Ok(None);
        }
        let Some(number) = followed else { return Ok(None) };
        if number == plan.turn && !self.is_placed && !self.place_step(cx)? {
            return Ok(None);
        }
        self.take_over_pending(cx, shape.0, number)?;
        let Some((around, address)) = self.planned_block(number) else { return Ok(None) };
        if let Some(plan) = &mut self.plan {
            while let Some(other) = plan.due_wait(number) {
                self.wait_event.wait(cx.device, shape.0, other)?;
                plan.note_wait(shape.0, other);
            }
        }
        let slot = self.take_at(around, address);
        self.blocks[slot].stream = shape.0;
        self.blocks[slot].links[0] = number as u32;
        Ok(Some(slot))
    }

    /// Lets a stream wait for the others that may still use freed blocks at the place of its request. The host does not wait.
    fn take_over_pending(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        number: usize,
    ) -> Result<(), StrategyError> {
        while let Some(slot) = self.plan.as_ref().and_then(|plan| plan.pending_at(number)) {
            self.blocks.deferred.hand_over(cx.device, slot, stream)?;
            let address = self.blocks[slot].address;
            self.plan.iter_mut().for_each(|plan| plan.note_handed_over(stream, address));
            self.blocks.report_completed(cx, &mut self.stats, slot);
            self.free_block(slot);
        }
        Ok(())
    }

    /// The free block around the place of a request, and the address of the place, if all of it is free.
    fn planned_block(&self, number: usize) -> Option<(u32, u64)> {
        let request = &self.plan.as_ref()?.requests[number];
        let address = request.address?;
        let slot = self.planned_free.at_or_before(address)?;
        (self.blocks[slot].end() >= address + request.shape.1).then_some((slot, address))
    }

    /// Takes the part of a free block from `address` on; it is in no list.
    fn take_at(&mut self, slot: u32, address: u64) -> u32 {
        let before = address - self.blocks[slot].address;
        if before > 0 && is_planned(&self.blocks[slot]) {
            // The front stays where it is in the list.
            return self.blocks.cut(slot, before);
        }
        self.remove_free(slot);
        if before == 0 {
            return slot;
        }
        let rest = self.blocks.cut(slot, before);
        self.insert_free(slot);
        rest
    }

    /// Places the blocks of the step and moves memory there. Returns false, and the plan is gone, if that would need too much
    /// new memory, or if no places were found.
    fn place_step(&mut self, cx: &mut Context<'_>) -> Result<bool, StrategyError> {
        let Some(mut plan) = self.plan.take() else { return Ok(false) };
        let has_shared_places = plan.has_shared_places();
        if has_shared_places {
            // Much of the memory for the plan may still wait for other streams.
            self.complete_frees(cx, Patience::Wait)?;
        }
        self.mapping.mend(cx.device)?;
        self.mapping.release_loose(cx.device)?;
        let runs = self.runs(|_| true);
        let gaps = runs.iter().flatten().filter(|part| part.stream.is_none());
        let Some(gap) = gaps.max_by_key(|part| part.end - part.start).copied() else { return Ok(false) };
        let gap_bytes = gap.end - gap.start;
        let free = self.free_chunks(&runs, (0, 0));
        // What the plan does not place needs memory too.
        let free_bytes = free.iter().map(FreeChunks::bytes).sum::<u64>().saturating_sub(plan.unplanned_bytes());
        let live = self.stats.peak.active;
        // A layout, and the new memory that it needs.
        let lay_out = |sharing: StreamSharing, rooms: &[FreeRoom]| {
            let layout = plan.lay_out(gap.start, sharing, rooms)?;
            Some((round_up(layout.end - gap.start, self.page).saturating_sub(free_bytes), layout))
        };
        let needs_more = |best: &Option<(u64, StepLayout)>, than: u64| best.as_ref().is_none_or(|&(new, _)| new > than);
        let better = |best: Option<(u64, StepLayout)>, other| best.into_iter().chain(other).min_by_key(|&(new, _)| new);
        let streams = plan.streams();
        let (mut best, mut rooms) = (lay_out(StreamSharing::Never, &[]), Vec::new());
        if needs_more(&best, 0) {
            rooms = self.free_in_used_chunks(&runs, &streams);
            rooms.retain(|(_, room)| room.end - room.start >= SMALLEST_ROOM);
            if !rooms.is_empty() {
                best = better(best, lay_out(StreamSharing::Never, &rooms));
            }
        }
        for sharing in [StreamSharing::BetweenPhases, StreamSharing::Always] {
            if streams.len() > 1 && needs_more(&best, live / 1000 * WORTH_SHARING) {
                best = better(best, lay_out(sharing, &rooms));
            }
        }
        let allowed = self.history.allowed(live);
        // Counted as a refusal whatever happens from here on: a failing call would happen again in the next step.
        self.history.refused(plan.requests.len() as u64);
        let Some((new, layout)) = best else { return Ok(false) };
        let bytes = round_up(layout.end - gap.start, self.page);
        if new > allowed || bytes > gap_bytes {
            return Ok(false);
        }
        plan.use_layout(layout);
        plan.trim_rooms(&mut rooms);
        if plan.stream_order.is_some() && !rooms.is_empty() {
            // Rooms have been used by the streams that they belong to.
            self.wait_for_each_other(cx, &streams)?;
        }
        let taken = choose_chunks(free, bytes, gap_bytes);
        let moved: u64 = taken.iter().map(FreeChunks::bytes).sum();
        if bytes > moved && !self.create(cx, bytes - moved, gap_bytes - moved)? {
            return Ok(false);
        }
        if bytes > 0 {
            let slot = self.map_chunks(cx, taken, gap.start, plan.requests[0].shape.0)?;
            self.give_to_plan(slot, gap.start..gap.start + bytes);
        }
        for (stream, room) in rooms {
            if let Some(slot) = self.free_block_around(stream, &room) {
                self.give_to_plan(slot, room);
            }
        }
        self.is_placed = true;
        (plan.misses, plan.followed) = (0, 0);
        self.plan = Some(plan);
        self.beside_plan = 0;
        self.history.refusals -= 1;
        self.counters.steps_planned += 1;
        Ok(true)
    }

    /// All later work of each stream comes after what the others have queued so far.
    fn wait_for_each_other(&mut self, cx: &mut Context<'_>, streams: &BTreeSet<StreamId>) -> Result<(), StrategyError> {
        if streams.len() > 1 {
            for &other in streams {
                self.wait_event.record(cx.device, other)?;
                for &waits in streams.iter().filter(|&&waits| waits != other) {
                    self.wait_event.wait_for_recorded(cx.device, waits)?;
                }
            }
        }
        Ok(())
    }

    /// The free block of the stream that has these addresses; it is in a list.
    fn free_block_around(&self, stream: StreamId, range: &Range<u64>) -> Option<u32> {
        let mut free = self.free.get(stream)?.pages.iter(&self.blocks);
        free.find(|&slot| self.blocks[slot].address <= range.start && range.end <= self.blocks[slot].end())
    }

    /// Makes a part of a free block that is in a list memory of the plan.
    fn give_to_plan(&mut self, slot: u32, range: Range<u64>) {
        // The block was merged with free memory before it, and chunks may reach further.
        let slot = self.take_at(slot, range.start);
        self.cut_off(slot, range.end - range.start);
        self.blocks[slot].note = PLANNED;
        let merged = self.merge(slot);
        self.insert_free(merged);
    }

    /// Gives up the plan: its memory serves all requests.
    #[cold]
    pub(super) fn give_up_plan(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let Some(plan) = &self.plan else { return Ok(()) };
        // A plan of several streams is given up before a stream is captured (`prepare_capture`).
        if self.is_placed {
            // Free blocks of the plan were joined whatever streams used them.
            let streams = plan.streams();
            self.wait_for_each_other(cx, &streams)?;
        }
        let Some(plan) = self.plan.take() else { return Ok(()) };
        self.history.failed(plan.requests.len() as u64, if self.is_placed { plan.followed } else { 0 });
        self.counters.plans_given_up += u64::from(self.is_placed);
        if std::mem::take(&mut self.is_placed) {
            let planned = self.blocks.iter().filter(|(_, piece)| is_planned(piece)).map(|(slot, _)| slot);
            for slot in planned.collect::<Vec<u32>>() {
                self.blocks[slot].note = NONE;
            }
        }
        for slot in std::mem::take(&mut self.planned_free).iter() {
            let merged = self.merge(slot);
            self.insert_free(merged);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{
        Block, Silent, Strategy,
        oomph::tests::{OomphBench, in_chunks_of},
    };

    /// All of four chunks is in use, then every second block is freed: no chunk is free.
    fn with_free_parts() -> (OomphBench, Vec<u64>) {
        let mut bench = OomphBench::new(in_chunks_of(16 * MIB));
        let all = bench.alloc(64 * MIB, 0);
        bench.free(all);
        let blocks: Vec<Block> =
            [[5; 12].as_slice(), &[4]].concat().into_iter().map(|size| bench.alloc(size * MIB, 0)).collect();
        let free: Vec<Block> = blocks.into_iter().step_by(2).take(6).collect();
        free.iter().for_each(|&block| bench.free(block));
        (bench, free.iter().map(|block| block.address.0).collect())
    }

    impl OomphBench {
        /// Places a step of these requests, by stream, size in MiB and life, and returns what is reserved by it.
        fn place(&mut self, requests: &[(u16, u64, (u32, u32))], period: u32) -> u64 {
            let before = self.reserved();
            let request = |&(stream, mebibytes, life): &(u16, u64, (u32, u32))| {
                PlannedRequest::new((StreamId(stream), mebibytes * MIB), Some(life), false)
            };
            self.strategy.plan = Some(StepPlan::new(requests.iter().map(request).collect(), period));
            let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
            assert!(self.strategy.place_step(&mut cx).unwrap());
            self.reserved() - before
        }
    }

    /// Chunks that are partly in use have free memory, too: the plan takes no new memory for what fits there.
    #[test]
    fn a_plan_uses_free_memory_that_cannot_be_moved() {
        let (mut bench, free) = with_free_parts();
        let large = bench.alloc(30 * MIB, 0);
        bench.free(large);
        assert_eq!(bench.place(&[(0, 30, (0, 6)), (0, 5, (1, 3)), (0, 5, (2, 4))], 7), 0);
        let placed = [30, 5, 5].map(|mebibytes| bench.alloc(mebibytes * MIB, 0).address.0);
        assert!(free.contains(&placed[1]) && free.contains(&placed[2]) && placed[1] != placed[2], "{placed:?}");
        assert_eq!(bench.strategy.plan.as_ref().map(|plan| plan.misses), Some(0));
        bench.strategy.close(&mut Context { device: &mut *bench.device, sink: &mut Silent }).unwrap();
        assert_eq!(bench.device.held_bytes(), 0);
    }

    /// The same memory serves other streams of the plan, which wait for its last use (`OomphBench` checks that).
    #[test]
    fn streams_of_a_plan_use_free_memory_of_each_other() {
        let (mut bench, free) = with_free_parts();
        assert_eq!(bench.place(&[(0, 5, (0, 6)), (1, 5, (1, 4)), (1, 5, (2, 4))], 7), 0);
        let placed = [0, 1, 1].map(|stream| bench.alloc(5 * MIB, stream).address.0);
        assert!(placed.iter().all(|address| free.contains(address)), "{placed:?}");
    }

    #[test]
    fn a_stream_follows_what_the_other_has_waited_for() {
        let [first, second, third] = [0, 1, 2].map(StreamId);
        let mut order = StreamOrder::default();
        (*order.frees.of(first), *order.frees.of(second)) = (3, 5);
        order.note_wait(second, first);
        *order.frees.of(first) = 4;
        order.note_wait(third, second);
        assert_eq!([first, second].map(|of| order.follows(third, of)), [3, 5]);
        // What it knows already is not forgotten.
        order.note_wait(third, first);
        order.note_wait(third, second);
        assert_eq!(order.follows(third, first), 4);
        assert_eq!(order.follows(first, third), 0);
    }
}
