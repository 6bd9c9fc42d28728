//! The latest large requests of a program: the step that it repeats, and whether its blocks grow.
//!
//! When memory must be moved or must grow, [`StepHistory`] looks for a period: the same requests, with the same bytes live, some
//! requests ago. A [`StepPlan`] is made of it.
//!
//! Blocks grow where tokens are added to caches: every request is slightly larger than a block that is freed soon after. The
//! memory of that block fits no request until it merges with a neighbour. Chunks that are moved out of it leave parts that fit
//! nothing, and moves would go on in every step. So memory grows instead, as in expandable segments.

use std::{collections::BTreeSet, ops::RangeInclusive};

use super::steps::{ALLOWED_PER_REFUSAL, PlannedRequest, RequestShape, StepPlan};
use oomph_base::MIB;

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
/// Whether blocks grow is seen in this many of the latest requests.
const GROWTH_WINDOW: u64 = 2048;
/// And not in fewer than this.
const SHORTEST_GROWTH: u64 = 64;
/// Only blocks of the size of some chunks count: where smaller ones are freed, whole chunks become free, and most of a larger one is in chunks
/// that can be moved.
const GROWING_SIZES: RangeInclusive<u64> = 8 * MIB..=128 * MIB;
/// Blocks grow if at least this percentage of requests, in balance, are slightly larger than an earlier one.
const LEAST_GROWTH: i64 = 20;
/// A slightly larger request exceeds an earlier one by at most one part of this many.
const GROWTH_PART: u64 = 128;
/// A plan that was followed for this many steps was right.
const STEPS_OF_SUCCESS: u64 = 4;
/// The most new memory that a plan may take, in thousandths of the most that was live.
const MOST_ALLOWED: u64 = 40;

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
    pub(super) refusals: u64,
    /// The length of the last plan that was given up: a period is longer.
    failed_period: u64,
    /// Whether blocks grow, and the request before which that is not judged again.
    blocks_grow: bool,
    next_look: u64,
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

    /// Whether the latest requests replace blocks by slightly larger ones.
    pub(super) fn blocks_grow(&mut self) -> bool {
        if self.count >= self.next_look {
            let latest = self.count.min(GROWTH_WINDOW);
            self.next_look = self.count + (latest / 2).max(SHORTEST_GROWTH);
            let shapes = (self.count - latest..self.count).map(|index| self.at(index).shape);
            let growing: Vec<RequestShape> = shapes.filter(|(_, bytes)| GROWING_SIZES.contains(bytes)).collect();
            self.blocks_grow = growing.len() as u64 >= SHORTEST_GROWTH && growth_percent(&growing) >= LEAST_GROWTH;
        }
        self.blocks_grow
    }

    fn at(&self, index: u64) -> &PastRequest {
        &self.requests[(index % KEPT_REQUESTS) as usize]
    }

    /// The step that ends with the latest request, if the program repeats itself.
    pub(super) fn find_step(&mut self) -> Option<StepPlan> {
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
    pub(super) fn failed(&mut self, period: u64, followed: u64) {
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
    pub(super) fn refused(&mut self, period: u64) {
        self.refusals += 1;
        let in_vain = self.refusals.saturating_sub(MOST_ALLOWED / ALLOWED_PER_REFUSAL);
        if in_vain > 0 {
            self.next_try = self.count + (period << in_vain.min(16));
        }
    }

    /// How much new memory a plan may take.
    pub(super) fn allowed(&self, live: u64) -> u64 {
        live / 1000 * (self.refusals * ALLOWED_PER_REFUSAL).min(MOST_ALLOWED)
    }
}

/// The percentage of requests that are slightly larger than an earlier one, less those that are slightly smaller. It is near 0 where sizes
/// come in any order.
fn growth_percent(shapes: &[RequestShape]) -> i64 {
    let (mut earlier, mut balance) = (BTreeSet::new(), 0);
    for &(stream, bytes) in shapes {
        let near = bytes / GROWTH_PART;
        let between = |low: u64, high: u64| earlier.range((stream, low)..(stream, high)).next().is_some();
        balance += i64::from(between(bytes - near, bytes)) - i64::from(between(bytes + 1, bytes + 1 + near));
        earlier.insert((stream, bytes));
    }
    balance * 100 / (shapes.len() as i64).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use oomph_base::StreamId;

    #[test]
    fn growth_is_told_from_sizes_in_any_order() {
        let percent = |sizes: Vec<u64>| {
            growth_percent(&sizes.into_iter().map(|bytes| (StreamId(0), bytes * MIB)).collect::<Vec<_>>())
        };
        // Three caches of 1,000 to 1,600 tokens.
        let growing = || (0..100).flat_map(|step| [1000, 1300, 1600].map(|tokens| tokens + step));
        assert_eq!(percent(growing().collect()), 99);
        assert_eq!(percent(growing().map(|tokens| 3000 - tokens).collect()), -99);
        // The same sizes in an order without a direction.
        let shuffled = growing().enumerate().map(|(number, tokens)| (number * 7919 % 300, tokens));
        assert!(percent(shuffled.collect::<BTreeMap<_, _>>().into_values().collect()).abs() < 10);
        // A step that is repeated.
        assert_eq!(percent((0..300).map(|number| 100 + number % 10 * 50).collect()), 0);
    }
}
