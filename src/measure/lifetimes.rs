//! Where blocks lay and how long: the rectangles of a picture of addresses over time.
//!
//! A block is a rectangle: its addresses, from the event that asked for it to the event after which its memory could be
//! used again. A run can have more blocks than a picture can show, so the most visible ones are kept (bytes x events).
//! Of the others a coarse grid says how much of each cell they cover, so that they do not look free. Memory taken from
//! the device is kept in the same way, so that what is reserved and free can be seen between the blocks.
//!
//! Segments can be far apart on the device. In [`Lifetimes`] the ranges that were ever used follow each other without
//! gaps.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::{
    base::{Address, FileText, SiteId, StreamId, TagId},
    replay::{LiveBlock, ReplayMoment},
    strategy::{Freed, Layout, StrategyEvent},
    trace::{Category, Op, Tag},
};

/// Blocks and segments that a case of a suite keeps, of each kind.
pub const MOST_LIVES: usize = 3000;
/// Where a page is made at once from the replay.
pub const EVERY_LIFE: usize = 1_000_000;

/// Up to this many are candidates for the kept ones. The grid has the rest of them; what is lighter than all candidates is only
/// counted.
const CANDIDATES: usize = 32_768;
/// The grid of what is not kept: columns of events and rows of addresses.
pub const SHADE_COLUMNS: usize = 96;
/// Rows of the grid, the lowest addresses first.
pub const SHADE_ROWS: usize = 64;

/// The block that was last served in a slot of the trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotOwner {
    pub(super) address: Address,
    pub(super) born: u64,
    bytes: u64,
    pub(super) tag: TagId,
    pub(super) site: SiteId,
    stream: StreamId,
    alive: bool,
}

/// Which block is in which slot, and the names of what blocks are for and who asked for them.
#[derive(Debug, Default)]
pub(super) struct SlotOwners {
    /// By slot. Freed blocks stay: a later owner of the same address has a later birth.
    pub(super) owners: Vec<SlotOwner>,
    tags: Vec<Tag>,
    sites: Vec<FileText>,
}

impl SlotOwners {
    /// What a block is for.
    pub(super) fn category(&self, tag: TagId) -> Category {
        self.tags.get(tag.index()).map_or(Category::Unknown, |tag| tag.category)
    }

    /// Remembers which block is in a slot of the trace.
    #[inline]
    pub(super) fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock) {
        let Op::Alloc { slot, .. } = now.event.op else { return };
        let owner = SlotOwner {
            address: live.block.address,
            born: live.born,
            bytes: live.block.size,
            tag: live.tag,
            site: live.request.site,
            stream: live.request.stream,
            alive: true,
        };
        match self.owners.get_mut(slot as usize) {
            Some(place) => *place = owner,
            None => self.grow(slot as usize, owner),
        }
        if live.tag.index() >= self.tags.len() || live.request.site.index() >= self.sites.len() {
            self.read_names(now);
        }
    }

    #[cold]
    fn grow(&mut self, slot: usize, owner: SlotOwner) {
        let nobody = SlotOwner { address: Address::NULL, born: 0, alive: false, ..owner };
        self.owners.resize(slot + 1, nobody);
        self.owners[slot] = owner;
    }

    /// Tables only grow while a trace is read.
    #[cold]
    fn read_names(&mut self, now: &ReplayMoment<'_>) {
        let (tags, sites) = (now.tables.tags(), now.tables.sites());
        self.tags.extend_from_slice(tags.get(self.tags.len()..).unwrap_or_default());
        self.sites.extend_from_slice(sites.get(self.sites.len()..).unwrap_or_default());
    }

    #[inline]
    fn freed(&mut self, now: &ReplayMoment<'_>) {
        if let Op::Free { slot, .. } = now.event.op
            && let Some(owner) = self.owners.get_mut(slot as usize)
        {
            owner.alive = false;
        }
    }

    /// The names of these sites, of those that have one. Their places in the list replace their numbers.
    pub(super) fn name_sites<'a>(&self, sites: impl Iterator<Item = &'a mut Option<u32>>) -> Vec<FileText> {
        let mut names = Vec::new();
        let mut places: HashMap<u32, Option<u32>> = HashMap::new();
        for site in sites {
            let Some(number) = *site else { continue };
            *site = *places.entry(number).or_insert_with(|| {
                let name = self.sites.get(number as usize).filter(|name| !name.is_empty())?;
                names.push(name.clone());
                Some(names.len() as u32 - 1)
            });
        }
        names
    }
}

/// A rectangle: a block or a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Life {
    address: u64,
    bytes: u64,
    born: u64,
    /// The event after which its memory could be used again; `None` if that never happened.
    ended: Option<u64>,
    tag: TagId,
    site: SiteId,
    stream: StreamId,
}

impl Life {
    /// Bytes x events, up to `end` for what never ended.
    #[inline]
    fn weight(&self, end: u64) -> u64 {
        self.bytes.saturating_mul(self.ended.unwrap_or(end).saturating_sub(self.born).max(1))
    }
}

/// The heaviest of all that were added, in bounded space.
#[derive(Debug)]
struct HeaviestLives {
    kept: Vec<Life>,
    most: usize,
    /// What is lighter cannot be among the heaviest.
    least: u64,
    /// How many were added.
    count: u64,
    /// Their weight.
    weight: u128,
}

impl HeaviestLives {
    fn new(most: usize) -> HeaviestLives {
        HeaviestLives { kept: Vec::new(), most, least: 0, count: 0, weight: 0 }
    }

    #[inline]
    fn add(&mut self, life: Life, end: u64) {
        let weight = life.weight(end);
        self.count += 1;
        self.weight += u128::from(weight);
        if weight < self.least {
            return;
        }
        self.kept.push(life);
        if self.kept.len() >= 2 * self.most {
            self.thin(end);
        }
    }

    /// Happens once for every `most` that are added.
    #[cold]
    fn thin(&mut self, end: u64) {
        if self.kept.len() > self.most {
            // Of equals, the earlier one is kept, so that results do not depend on the order of the selection.
            let rank = |life: &Life| (std::cmp::Reverse(life.weight(end)), life.born, life.address);
            self.kept.select_nth_unstable_by_key(self.most, rank);
            self.kept.truncate(self.most);
            self.least = self.kept.iter().map(|life| life.weight(end)).min().unwrap_or(0);
        }
    }

    fn finish(mut self, end: u64) -> (Vec<Life>, LeftOut) {
        self.thin(end);
        self.kept.sort_unstable_by_key(|life| (life.born, life.address));
        let kept: u128 = self.kept.iter().map(|life| u128::from(life.weight(end))).sum();
        let missing = millionths(self.weight.saturating_sub(kept), self.weight);
        (self.kept, LeftOut { all: self.count, millionths: missing, missing_millionths: missing })
    }
}

/// The part in millionths, rounded up.
fn millionths(part: u128, whole: u128) -> u64 {
    (part * 1_000_000).div_ceil(whole.max(1)) as u64
}

/// Records where blocks lay and how long.
#[derive(Debug)]
pub(super) struct LifetimeRecorder {
    most: usize,
    pub(super) owners: SlotOwners,
    blocks: HeaviestLives,
    segments: HeaviestLives,
    /// What the device has given, by address.
    reserved: BTreeMap<u64, Life>,
    /// Freed blocks that wait for a stream, by address.
    waiting: HashMap<u64, Life>,
    /// The number of the present event.
    now: u64,
    /// A block was served.
    begun: bool,
}

impl LifetimeRecorder {
    /// Keeps at most `most` blocks and as many segments.
    pub(super) fn new(most: usize) -> LifetimeRecorder {
        let candidates = most.max(CANDIDATES);
        LifetimeRecorder {
            most,
            owners: SlotOwners::default(),
            blocks: HeaviestLives::new(candidates),
            segments: HeaviestLives::new(candidates),
            reserved: BTreeMap::new(),
            waiting: HashMap::new(),
            now: 0,
            begun: false,
        }
    }

    /// A request was served.
    #[inline]
    pub(super) fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock) {
        self.owners.served(now, live);
        if !self.begun {
            self.begun = true;
            self.begin(now.strategy.layout());
        }
    }

    /// A recording that began in the middle has segments that no event reports.
    #[cold]
    fn begin(&mut self, layout: Option<Layout>) {
        for segment in layout.iter().flat_map(|layout| &layout.segments).filter(|segment| !segment.alias) {
            let inside = self.reserved.range(..=segment.address.0).next_back();
            if inside.is_none_or(|(&address, known)| address + known.bytes <= segment.address.0) {
                self.reserve(segment.address, segment.bytes, segment.stream);
            }
        }
    }

    /// A block was freed.
    #[inline]
    pub(super) fn freed(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock, freed: Freed) {
        self.owners.freed(now);
        let life = Life {
            address: live.block.address.0,
            bytes: live.block.size,
            born: live.born,
            ended: Some(now.index),
            tag: live.tag,
            site: live.request.site,
            stream: live.request.stream,
        };
        match freed {
            Freed::Now => self.blocks.add(life, now.index),
            Freed::Later => {
                self.waiting.insert(life.address, life);
            }
        }
    }

    /// An event is over.
    #[inline]
    pub(super) fn after(&mut self, now: &ReplayMoment<'_>) {
        self.now = now.index + 1;
    }

    /// All live blocks are freed between two rounds.
    pub(super) fn round_ends(&mut self) {
        self.end_living(Some(self.now));
    }

    /// Something happened inside the strategy.
    pub(super) fn event(&mut self, event: StrategyEvent) {
        match event {
            StrategyEvent::SegmentAlloc { address, bytes, stream }
            | StrategyEvent::SegmentMap { address, bytes, stream } => {
                self.reserve(address, bytes, stream);
            }
            StrategyEvent::SegmentFree { address, bytes, .. } | StrategyEvent::SegmentUnmap { address, bytes, .. } => {
                self.release(address.0, bytes);
            }
            StrategyEvent::FreeCompleted { address, .. } => {
                if let Some(life) = self.waiting.remove(&address.0) {
                    self.blocks.add(Life { ended: Some(self.now), ..life }, self.now);
                }
            }
            StrategyEvent::Retry { .. } | StrategyEvent::OutOfMemory { .. } => {}
        }
    }

    fn reserve(&mut self, address: Address, bytes: u64, stream: StreamId) {
        let (tag, site) = (TagId(0), SiteId(0));
        let life = Life { address: address.0, bytes, born: self.now, ended: None, tag, site, stream };
        self.reserved.insert(address.0, life);
    }

    /// Memory goes back to the device: whole segments, or parts of mapped ranges.
    fn release(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        while let Some((&start, &life)) = self.reserved.range(..end).next_back() {
            let life_end = start.saturating_add(life.bytes);
            if life_end <= address {
                break;
            }
            self.reserved.remove(&start);
            let (from, to) = (start.max(address), life_end.min(end));
            self.segments.add(Life { address: from, bytes: to - from, ended: Some(self.now), ..life }, self.now);
            for (from, to) in [(start, from), (to, life_end)] {
                if from < to {
                    self.reserved.insert(from, Life { address: from, bytes: to - from, ..life });
                }
            }
        }
    }

    fn end_living(&mut self, ended: Option<u64>) {
        for owner in self.owners.owners.iter_mut().filter(|owner| owner.alive) {
            owner.alive = false;
            let &mut SlotOwner { address: Address(address), bytes, born, tag, site, stream, .. } = owner;
            self.blocks.add(Life { address, bytes, born, ended, tag, site, stream }, self.now);
        }
        for (_, life) in self.waiting.drain() {
            self.blocks.add(Life { ended, ..life }, self.now);
        }
    }

    /// The result, and who owned the slots. Sites are numbers of the trace.
    pub(super) fn finish(mut self) -> (Lifetimes, SlotOwners) {
        self.end_living(None);
        let end = self.now;
        for life in std::mem::take(&mut self.reserved).into_values() {
            self.segments.add(life, end);
        }
        let (blocks, blocks_left_out) = self.blocks.finish(end);
        let (segments, segments_left_out) = self.segments.finish(end);
        let ranges = joined_ranges(segments.iter().chain(&blocks).map(|life| (life.address, life.bytes)).collect());
        let bits = ranges.iter().map(|(address, bytes)| address | bytes);
        let bits = blocks
            .iter()
            .chain(&segments)
            .fold(bits.fold(0, |a, b| a | b), |all, life| all | life.address | life.bytes);
        let unit = 1 << bits.trailing_zeros().min(20);
        let columns = |lives: &[Life]| LifeColumns::of(lives, &ranges, unit, &self.owners);
        let lifetimes = Lifetimes {
            events: end,
            unit,
            blocks: columns(&blocks),
            segments: columns(&segments),
            ranges,
            blocks_left_out,
            segments_left_out,
        };
        (lifetimes.limited(self.most), self.owners)
    }
}

/// Ranges of addresses that overlap or touch, joined; in address order.
fn joined_ranges(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (address, bytes) in ranges {
        match joined.last_mut() {
            Some(last) if address <= last.0 + last.1 => last.1 = last.1.max(address + bytes - last.0),
            _ => joined.push((address, bytes)),
        }
    }
    joined
}

/// What is not in a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// How many there were in the run, those in the list included.
    pub all: u64,
    /// The part that is not in the list, of the bytes x events of all, in millionths, rounded up.
    pub millionths: u64,
    /// The part of it that is not in the grid either.
    pub missing_millionths: u64,
}

/// Blocks and segments as rectangles of addresses and events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetimes {
    /// The number of events of the run: where what never ended ends in a picture.
    pub events: u64,
    /// Bytes in one unit of offsets and sizes.
    pub unit: u64,
    /// Address and bytes of the ranges that were used, in address order. Offsets count from the first of them and leave
    /// out what lies between them.
    pub ranges: Vec<(u64, u64)>,
    /// The heaviest blocks.
    pub blocks: LifeColumns,
    /// The heaviest segments, or parts of mapped ranges.
    pub segments: LifeColumns,
    /// Which blocks are not in the list.
    pub blocks_left_out: LeftOut,
    /// Which segments are not in the list.
    pub segments_left_out: LeftOut,
}

/// Rectangles, one list for each property, in order of their first events. There can be a million of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LifeColumns {
    /// The event that asked for it, less that of the one before.
    pub born: Vec<u64>,
    /// Events until its memory could be used again; 0 if that never happened.
    pub life: Vec<u64>,
    /// Where it begins, in units.
    pub offset: Vec<u64>,
    /// How large it is, in units.
    pub size: Vec<u64>,
    /// The place of its category in [`Category::ALL`]; empty if all are unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub category: Vec<u8>,
    /// Its stream; empty if all are the default stream.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stream: Vec<u16>,
    /// The place of its call site in [`CaseDetail::sites`](super::CaseDetail::sites); empty if none is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub site: Vec<Option<u32>>,
    /// What those that are not in the lists cover of each cell of a grid ([`SHADE_COLUMNS`] x [`SHADE_ROWS`], row by row),
    /// in percent; empty if all are in the lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shade: Vec<u8>,
}

impl LifeColumns {
    fn of(lives: &[Life], ranges: &[(u64, u64)], unit: u64, owners: &SlotOwners) -> LifeColumns {
        let mut before = 0;
        let mut starts = Vec::with_capacity(ranges.len());
        for (_, bytes) in ranges {
            starts.push(before);
            before += bytes;
        }
        let offset = |life: &Life| {
            let range = ranges.partition_point(|range| range.0 <= life.address).saturating_sub(1);
            (starts[range] + life.address - ranges[range].0) / unit
        };
        let mut last = 0;
        LifeColumns {
            born: lives.iter().map(|life| life.born - std::mem::replace(&mut last, life.born)).collect(),
            life: lives
                .iter()
                .map(|life| life.ended.map_or(0, |ended| ended.saturating_sub(life.born).max(1)))
                .collect(),
            offset: lives.iter().map(offset).collect(),
            size: lives.iter().map(|life| life.bytes / unit).collect(),
            category: lives.iter().map(|life| owners.category(life.tag) as u8).collect(),
            stream: lives.iter().map(|life| life.stream.0).collect(),
            site: lives.iter().map(|life| Some(life.site.index() as u32)).collect(),
            shade: Vec::new(),
        }
    }

    /// Leaves out columns that say nothing.
    fn drop_defaults(&mut self) {
        let unknown = Category::Unknown as u8;
        if self.category.iter().all(|&category| category == unknown) {
            self.category.clear();
        }
        if self.stream.iter().all(|&stream| stream == 0) {
            self.stream.clear();
        }
        if self.site.iter().all(Option::is_none) {
            self.site.clear();
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.born.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.born.is_empty()
    }

    /// First and last event of each, up to `end` for what never ended.
    fn spans(&self, end: u64) -> Vec<(u64, u64)> {
        let mut event = 0;
        let span = |(&born, &life): (&u64, &u64)| {
            event += born;
            (event, if life == 0 { end.max(event + 1) } else { event + life })
        };
        self.born.iter().zip(&self.life).map(span).collect()
    }

    /// Those at these places, which are in order.
    fn at(&self, places: &[usize]) -> LifeColumns {
        fn pick<T: Copy>(column: &[T], places: &[usize]) -> Vec<T> {
            if column.is_empty() { Vec::new() } else { places.iter().map(|&place| column[place]).collect() }
        }
        let mut events = self.born.clone();
        (1..events.len()).for_each(|place| events[place] += events[place - 1]);
        let mut last = 0;
        LifeColumns {
            born: places.iter().map(|&place| events[place] - std::mem::replace(&mut last, events[place])).collect(),
            life: pick(&self.life, places),
            offset: pick(&self.offset, places),
            size: pick(&self.size, places),
            category: pick(&self.category, places),
            stream: pick(&self.stream, places),
            site: pick(&self.site, places),
            shade: self.shade.clone(),
        }
    }

    /// The `most` heaviest in lists and the others in the grid, which reaches to event `end` and offset `top`.
    fn heaviest(&self, most: usize, end: u64, top: u64, left_out: LeftOut) -> (LifeColumns, LeftOut) {
        if self.len() <= most {
            return (self.clone(), left_out);
        }
        let spans = self.spans(end);
        let weight = |place: usize| self.size[place].saturating_mul(spans[place].1 - spans[place].0);
        let mut places: Vec<usize> = (0..self.len()).collect();
        places.sort_by_key(|&place| std::cmp::Reverse(weight(place)));
        let (kept, others) = places.split_at_mut(most);
        kept.sort_unstable();
        let mut columns = self.at(kept);
        columns.add_shade(others.iter().map(|&place| (spans[place], self.offset[place], self.size[place])), end, top);
        let sum = |places: &[usize]| places.iter().map(|&place| u128::from(weight(place))).sum::<u128>();
        let (kept, others) = (sum(kept), sum(others));
        // The lists had this part of all.
        let had = 1_000_000_u64.saturating_sub(left_out.millionths);
        let lost = (others * u128::from(had)).div_ceil((kept + others).max(1)) as u64;
        (columns, LeftOut { millionths: left_out.millionths + lost, ..left_out })
    }

    /// Adds rectangles (events, offset, size) to the grid.
    fn add_shade(&mut self, lives: impl Iterator<Item = ((u64, u64), u64, u64)>, end: u64, top: u64) {
        let (wide, tall) = (end.max(1) as f64 / SHADE_COLUMNS as f64, top.max(1) as f64 / SHADE_ROWS as f64);
        // Which cells a stretch covers, and how much of each.
        let cells = |from: u64, to: u64, cell: f64, most: usize| {
            let (from, to) = (from as f64 / cell, (to as f64 / cell).min(most as f64));
            (from as usize..most.min(to.ceil() as usize))
                .map(move |place| (place, to.min(place as f64 + 1.0) - from.max(place as f64)))
        };
        let mut covered = vec![0.0; SHADE_COLUMNS * SHADE_ROWS];
        for ((born, ended), offset, size) in lives {
            for (row, height) in cells(offset, offset + size, tall, SHADE_ROWS) {
                for (column, width) in cells(born, ended, wide, SHADE_COLUMNS) {
                    covered[row * SHADE_COLUMNS + column] += height * width;
                }
            }
        }
        self.shade.resize(covered.len(), 0);
        for (shade, part) in self.shade.iter_mut().zip(covered) {
            *shade = (f64::from(*shade) + part * 100.0).round().min(100.0) as u8;
        }
    }
}

impl Lifetimes {
    /// Leaves out columns that say nothing. Sites are places of names now.
    pub(super) fn drop_defaults(&mut self) {
        self.blocks.drop_defaults();
        let LifeColumns { category, stream, site, .. } = &mut self.segments;
        category.clear();
        site.clear();
        if stream.iter().all(|&stream| stream == 0) {
            stream.clear();
        }
    }

    /// With at most `most` blocks and as many segments in lists.
    #[must_use]
    pub fn limited(&self, most: usize) -> Lifetimes {
        let top = self.ranges.iter().map(|range| range.1).sum::<u64>() / self.unit.max(1);
        let (blocks, blocks_left_out) = self.blocks.heaviest(most, self.events, top, self.blocks_left_out);
        let (segments, segments_left_out) = self.segments.heaviest(most, self.events, top, self.segments_left_out);
        Lifetimes { ranges: self.ranges.clone(), blocks, segments, blocks_left_out, segments_left_out, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, MIB},
        device::{
            Device,
            sim::{SimConfig, SimDevice},
        },
        measure::{
            CaseDetail, CaseLabel,
            fixture::{TinyStrategy, tiny_device},
            measure, measure_lives,
        },
        replay::ReplayOptions,
        strategy::{Setup, StrategySpec},
        trace::{Trace, TraceBuilder},
    };

    /// The detail of a trace under a strategy of the registry.
    fn replayed(trace: &Trace, strategy: &str, options: &ReplayOptions<'_>, most: usize) -> CaseDetail {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let setup = Setup { props: device.props(), limit: None };
        let mut strategy = StrategySpec::from(strategy).build(&setup).unwrap();
        measure_lives(&CaseLabel::default(), trace, &mut *strategy, &mut device, options, most).1
    }

    /// First event, end (or `None`) and bytes of each.
    fn lives(columns: &LifeColumns, unit: u64) -> Vec<(u64, Option<u64>, u64)> {
        let mut event = 0;
        (0..columns.len())
            .map(|place| {
                event += columns.born[place];
                let life = columns.life[place];
                (event, (life > 0).then_some(event + life), columns.size[place] * unit)
            })
            .collect()
    }

    fn three_blocks() -> Trace {
        let mut builder = TraceBuilder::new();
        let weights = builder.tag(Category::Parameter, None);
        builder.alloc(30 * MIB, StreamId::DEFAULT, weights);
        let second = builder.alloc(40 * MIB, StreamId::DEFAULT, TagId(0));
        builder.free(second);
        builder.alloc(20 * MIB, StreamId::DEFAULT, TagId(0));
        builder.finish("three")
    }

    #[test]
    fn blocks_have_their_addresses_and_lives() {
        let detail = replayed(&three_blocks(), "caching", &ReplayOptions::default(), MOST_LIVES);
        let seen = &detail.lifetimes;
        assert_eq!(
            lives(&seen.blocks, seen.unit),
            [(0, None, 30 * MIB), (1, Some(2), 40 * MIB), (3, None, 20 * MIB)],
            "event, end and size"
        );
        assert_eq!(lives(&seen.segments, seen.unit), [(0, None, 30 * MIB), (1, None, 40 * MIB)]);
        assert_eq!(seen.blocks.offset[1], seen.blocks.offset[2], "the third block lies where the second was");
        assert_eq!(seen.ranges.iter().map(|range| range.1).sum::<u64>(), 70 * MIB);
        assert_eq!(seen.blocks.category, [Category::Parameter, Category::Unknown, Category::Unknown].map(|c| c as u8));
        assert_eq!((seen.events, seen.blocks_left_out), (4, LeftOut { all: 3, millionths: 0, missing_millionths: 0 }));
        assert!(seen.blocks.stream.is_empty() && seen.blocks.site.is_empty(), "columns that say nothing are left out");
    }

    #[test]
    fn blocks_alive_at_an_event_sum_to_what_is_allocated() {
        let mut builder = TraceBuilder::new();
        let mut held = Vec::new();
        for number in 0..300_u64 {
            held.push(builder.alloc((number % 7 + 1) * 3 * MIB, StreamId::DEFAULT, TagId(0)));
            if number % 3 == 2 {
                let block = held.remove((number as usize * 5) % held.len());
                builder.free(block);
            }
        }
        let trace = builder.finish("churn");
        for strategy in ["caching", "caching:expandable_segments:True", "direct", "buddy"] {
            let detail = replayed(&trace, strategy, &ReplayOptions::default(), EVERY_LIFE);
            let seen = &detail.lifetimes;
            let alive = |columns: &LifeColumns, event: u64| -> u64 {
                let within =
                    |&(born, end, _): &(u64, Option<u64>, u64)| born <= event && end.is_none_or(|end| end > event);
                lives(columns, seen.unit).iter().filter(|life| within(life)).map(|life| life.2).sum()
            };
            for point in detail.timeline.points.iter().step_by(37) {
                assert_eq!(alive(&seen.blocks, point.event), point.allocated_bytes.max, "{strategy}: {}", point.event);
                assert_eq!(alive(&seen.segments, point.event), point.reserved_bytes.max, "{strategy}: {}", point.event);
            }
        }
    }

    #[test]
    fn heaviest_blocks_are_kept_and_the_others_counted() {
        let mut builder = TraceBuilder::new();
        for _ in 0..1000 {
            let small = builder.alloc(MIB, StreamId::DEFAULT, TagId(0));
            builder.free(small);
        }
        builder.alloc(1000 * MIB, StreamId::DEFAULT, TagId(0));
        let detail = replayed(&builder.finish("many"), "caching", &ReplayOptions::default(), 10);
        let seen = &detail.lifetimes;
        assert_eq!(seen.blocks.len(), 10);
        // 1000 blocks of 1 MiB x 1 event beside 1000 MiB x 1 event; 9 of the small ones are kept.
        let left_out = LeftOut { all: 1001, millionths: 495_500, missing_millionths: 0 };
        assert_eq!(seen.blocks_left_out, left_out);
        let one = seen.limited(1);
        assert_eq!(lives(&one.blocks, one.unit), [(2000, None, 1000 * MIB)]);
        assert!((500_000..500_010).contains(&one.blocks_left_out.millionths), "{:?}", one.blocks_left_out);
        assert_eq!(seen.limited(10), *seen);
    }

    #[test]
    fn grid_covers_what_is_not_in_the_lists() {
        let mut builder = TraceBuilder::new();
        let mut held = Vec::new();
        for number in 0..2000_u64 {
            held.push(builder.alloc((number % 5 + 1) * 8 * MIB, StreamId::DEFAULT, TagId(0)));
            if held.len() > 40 {
                let block = held.remove((number as usize * 7) % held.len());
                builder.free(block);
            }
        }
        let trace = builder.finish("grid");
        let whole = replayed(&trace, "caching", &ReplayOptions::default(), EVERY_LIFE).lifetimes;
        let part = replayed(&trace, "caching", &ReplayOptions::default(), 100).lifetimes;
        assert!(whole.blocks.shade.is_empty() && part.blocks.len() == 100);
        let area = |columns: &LifeColumns| -> f64 {
            let end = columns.spans(whole.events);
            columns.size.iter().zip(end).map(|(&size, (from, to))| size as f64 * (to - from) as f64).sum()
        };
        let top = whole.ranges.iter().map(|range| range.1).sum::<u64>() / whole.unit;
        let cell = top as f64 * whole.events as f64 / (SHADE_COLUMNS * SHADE_ROWS) as f64 / 100.0;
        let shaded: f64 = part.blocks.shade.iter().map(|&percent| f64::from(percent) * cell).sum();
        let missing = area(&whole.blocks) - area(&part.blocks);
        assert!((shaded / missing - 1.0).abs() < 0.02, "{shaded} in the grid, {missing} not in the lists");
        assert_eq!(part.blocks_left_out.missing_millionths, 0);
    }

    #[test]
    fn a_block_that_waits_for_a_stream_lives_until_it_can_be_used_again() {
        let mut builder = TraceBuilder::new();
        let shared = builder.alloc(1000, StreamId::DEFAULT, TagId(0));
        builder.use_on(shared, StreamId(1));
        builder.free(shared);
        builder.alloc(4000, StreamId::DEFAULT, TagId(0));
        let (mut strategy, mut device) = (TinyStrategy::default(), tiny_device(64 * KIB));
        let trace = builder.finish("waiting");
        let detail = measure(&CaseLabel::default(), &trace, &mut strategy, &mut device, &ReplayOptions::default()).1;
        let seen = &detail.lifetimes;
        assert_eq!(lives(&seen.blocks, seen.unit)[0], (0, None, KIB), "the tiny strategy never ends the wait");
    }

    #[test]
    fn blocks_of_a_round_end_with_it() {
        let options = ReplayOptions { repeat: 2, ..ReplayOptions::default() };
        let detail = replayed(&three_blocks(), "caching", &options, MOST_LIVES);
        let seen = &detail.lifetimes;
        let never_freed = lives(&seen.blocks, seen.unit).iter().filter(|life| life.1.is_none()).count();
        assert_eq!((seen.blocks.len(), never_freed), (6, 2));
    }

    #[test]
    fn part_of_a_mapped_range_is_released() {
        let mut recorder = LifetimeRecorder::new(10);
        let (address, stream) = (Address(100), StreamId::DEFAULT);
        recorder.event(StrategyEvent::SegmentMap { address, bytes: 50, stream });
        recorder.now = 7;
        recorder.event(StrategyEvent::SegmentUnmap { address: Address(110), bytes: 20, stream });
        let (seen, _) = recorder.finish();
        assert_eq!(lives(&seen.segments, seen.unit), [(0, None, 10), (0, Some(7), 20), (0, None, 20)]);
        assert_eq!(seen.ranges, [(100, 50)]);
    }
}
