//! Making room in the page heap: what is free is used where it lies, taken over from other streams, moved together; and
//! only what is missing then is new.
//!
//! Moving costs an unmap for each place that memory is taken from and waits for the streams that used it last, so it
//! is the last resort before growth. The request is put where the least memory has to come from elsewhere.

use super::{
    Oomph,
    blocks::{NONE, Record, State},
    stretches::{Run, Span, Stretch, choose, mapped_parts},
};
use crate::device::DeviceError;
use crate::strategy::{Context, StrategyError, StrategyEvent};
use oomph_base::{Address, StreamId, round_up};

/// Ranges have addresses for so many times the device's memory, so that there is nearly always a large gap.
const RANGE_PER_DEVICE: u64 = 4;

/// Where a request is put: the part of a gap that must be filled so that it makes, with its free neighbours, one piece.
#[derive(Clone, Copy, Debug)]
struct Site {
    /// The addresses to be filled. Nothing lies behind them up to `limit`.
    fill: (u64, u64),
    limit: u64,
    /// The free memory on either side that the request needs: it is not moved away.
    kept: (u64, u64),
}

impl Site {
    fn missing(&self) -> u64 {
        self.fill.1 - self.fill.0
    }
}

impl Oomph {
    /// A free block of the page heap for the stream, on no shelf, and whether new memory was needed; `None` where the
    /// device has no more.
    pub(super) fn find_in_pages(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        bytes: u64,
    ) -> Result<Option<(u32, bool)>, StrategyError> {
        if let Some(slot) = self.take_cached(stream, bytes, false) {
            return Ok(Some((slot, false)));
        }
        if self.return_empty_slabs()
            && let Some(slot) = self.take_cached(stream, bytes, false)
        {
            return Ok(Some((slot, false)));
        }
        if let Some(slot) = self.take_over(cx, stream, bytes)? {
            return Ok(Some((slot, false)));
        }
        self.mapping.mend(cx.device)?;
        let runs = self.runs();
        let (slot, created) = match self.joined(&runs, bytes) {
            Some(slot) => (slot, false),
            None => {
                let site = match self.cheapest_site(&runs, bytes) {
                    Some(site) => site,
                    None => self.new_range(cx, bytes)?,
                };
                match self.fill(cx, &runs, &site, stream)? {
                    Some(filled) => filled,
                    None => return Ok(None),
                }
            }
        };
        let united = self.unite(cx, slot, stream, bytes)?;
        Ok(united.map(|slot| (slot, created)))
    }

    /// All free blocks and gaps of the page heap, neighbours together, in address order.
    pub(super) fn runs(&self) -> Vec<Run> {
        let free = self.homes.iter().flat_map(|home| home.pages.at_least(&self.blocks, 0));
        let mut slots: Vec<u32> = free.chain(self.gaps.values().copied()).collect();
        slots.sort_unstable_by_key(|&slot| self.blocks[slot].address);
        let mut runs: Vec<Run> = Vec::new();
        let mut follows = NONE;
        for slot in slots {
            let record = &self.blocks[slot];
            let owner = (record.state == State::Free).then_some(record.stream);
            let span = Span { slot, start: record.address, end: record.end(), owner };
            match runs.last_mut() {
                Some(run) if follows == slot => run.push(span),
                _ => runs.push(vec![span]),
            }
            follows = record.next;
        }
        runs
    }

    /// Where blocks of several streams lie side by side and suffice together.
    fn joined(&self, runs: &[Run], bytes: u64) -> Option<u32> {
        let together = mapped_parts(runs).map(|spans| (spans[spans.len() - 1].end - spans[0].start, spans[0].slot));
        together.filter(|&(free, _)| free >= bytes).min_by_key(|&(free, _)| free).map(|(_, slot)| slot)
    }

    /// The place where the least memory is missing.
    fn cheapest_site(&self, runs: &[Run], bytes: u64) -> Option<Site> {
        let sites = runs.iter().flat_map(|run| {
            let gaps = (0..run.len()).filter(|&place| run[place].owner.is_none());
            gaps.filter_map(|place| self.site_at(run, place, bytes))
        });
        sites.min_by_key(|site| (site.missing(), site.fill.0))
    }

    /// How a request would be put over one gap of a run.
    fn site_at(&self, run: &[Span], place: usize, bytes: u64) -> Option<Site> {
        let gap = run[place];
        let before = run[..place].iter().rev().take_while(|span| span.owner.is_some()).last();
        let behind = run[place + 1..].iter().take_while(|span| span.owner.is_some()).last();
        let low = before.map_or(gap.start, |span| span.start);
        let high = behind.map_or(gap.end, |span| span.end);
        let after_front = round_up(bytes.saturating_sub(gap.start - low), self.page);
        let before_rear = round_up(bytes.saturating_sub(high - gap.end), self.page);
        let at = |fill: (u64, u64), kept| Site { fill, limit: gap.end, kept };
        if after_front.min(before_rear) <= gap.bytes() {
            Some(if after_front <= before_rear {
                at((gap.start, gap.start + after_front), (low, gap.start))
            } else {
                at((gap.end - before_rear, gap.end), (gap.end, high))
            })
        } else {
            (high - low >= bytes).then(|| at((gap.start, gap.end), (low, high)))
        }
    }

    /// Addresses for a request that fits nowhere.
    fn new_range(&mut self, cx: &mut Context<'_>, bytes: u64) -> Result<Site, DeviceError> {
        let range = round_up(self.device_bytes, self.page) * RANGE_PER_DEVICE;
        let base = self.mapping.reserve(cx.device, range)?;
        let gap = self.blocks.insert(Record::lone(base, range, NONE, StreamId::DEFAULT, State::Unmapped));
        self.gaps.insert(base, gap);
        let fill = (base, base + round_up(bytes, self.page));
        Ok(Site { fill, limit: base + range, kept: (base, base) })
    }

    /// Puts memory behind a site's addresses: free chunks from elsewhere, and new ones for the rest. Returns the free
    /// block there, and whether anything in it is new; `None`, and nothing has changed, where the device has no more.
    fn fill(
        &mut self,
        cx: &mut Context<'_>,
        runs: &[Run],
        site: &Site,
        stream: StreamId,
    ) -> Result<Option<(u32, bool)>, StrategyError> {
        // What an earlier failure left loose would be mapped along, and may not fit here.
        self.mapping.release_loose(cx.device)?;
        let room = site.limit - site.fill.0;
        let mut taken = Vec::new();
        let grown = self.may_grow(site.missing()) && self.create(cx, site.missing(), room)?;
        if !grown {
            taken = choose(self.free_stretches(runs, site.kept), site.missing(), room);
            let moved: u64 = taken.iter().map(Stretch::bytes).sum();
            let shortfall = site.missing().saturating_sub(moved);
            if shortfall > 0 && !self.create(cx, shortfall, room - moved)? {
                return Ok(None);
            }
        }
        let created = self.mapping.loose_bytes() > 0;
        self.take_away(cx, &taken)?;
        self.count_moved(&taken);
        let chunks = self.mapping.mapped_chunks();
        let (low, high) = (site.fill.0, self.mapping.map_loose(cx.device, site.fill.0)?);
        cx.sink.event(StrategyEvent::SegmentMap { address: Address(low), bytes: high - low, stream });
        self.stats.on_reserve(high - low, self.mapping.mapped_chunks() - chunks);
        let mapped = self.turn_mapped(low, high, stream);
        self.shelve(mapped);
        Ok(Some((mapped, created)))
    }

    fn count_moved(&mut self, taken: &[Stretch]) {
        self.counters.moves += u64::from(!taken.is_empty());
        self.counters.chunks_moved += taken.iter().map(|stretch| stretch.chunks.len() as u64).sum::<u64>();
        self.counters.bytes_moved += taken.iter().map(Stretch::bytes).sum::<u64>();
    }

    /// Makes one free block for the stream of a free block and its free neighbours, whosever they are, until it is
    /// large enough; returns it, on no shelf.
    fn unite(
        &mut self,
        cx: &mut Context<'_>,
        mut slot: u32,
        stream: StreamId,
        bytes: u64,
    ) -> Result<Option<u32>, StrategyError> {
        let mut waited = vec![stream];
        let mut joins = slot;
        loop {
            let owner = self.blocks[joins].stream;
            if !waited.contains(&owner) {
                self.wait_for(cx, stream, owner)?;
                waited.push(owner);
            }
            self.unshelve(joins);
            self.counters.blocks_taken_over += u64::from(owner != stream);
            self.blocks[joins].stream = stream;
            slot = self.merge(joins);
            if self.blocks[slot].size >= bytes {
                return Ok(Some(slot));
            }
            self.shelve(slot);
            let record = &self.blocks[slot];
            match [record.previous, record.next].into_iter().find(|&other| self.is_free(other)) {
                Some(other) => joins = other,
                None => return Ok(None),
            }
        }
    }

    /// Whether growth by so much leaves reserved memory close enough to the highest live amount.
    fn may_grow(&self, bytes: u64) -> bool {
        let highest = self.stats.peak.active.max(self.stats.current.active + bytes);
        let allowed = highest + highest / 1000 * self.settings.slack_permille;
        self.settings.slack_permille > 0 && self.stats.current.reserved + bytes <= allowed
    }

    /// Makes loose chunks of `bytes`, or of the growth step where there is room for it; says no, and has made none,
    /// where the device has no more.
    fn create(&mut self, cx: &mut Context<'_>, bytes: u64, room: u64) -> Result<bool, StrategyError> {
        // A program that needs little gets little: the step is at most what there is already.
        let step = round_up(self.settings.growth_step.min(self.stats.current.reserved), self.page);
        let generous = bytes.max(step).min(room);
        let largest = self.settings.chunk_for(bytes, self.page);
        for amount in [generous, bytes] {
            let mut rest = amount;
            while rest > 0 {
                let chunk = rest.min(largest);
                match self.mapping.create(cx.device, chunk) {
                    Ok(true) => rest -= chunk,
                    Ok(false) => break,
                    Err(error) => return Err(error.into()),
                }
                self.counters.chunks_created += 1;
                self.counters.bytes_created += chunk;
            }
            if rest == 0 {
                return Ok(true);
            }
            self.mapping.release_loose(cx.device)?;
        }
        Ok(false)
    }

    /// The free chunks of all runs outside of `kept`.
    pub(super) fn free_stretches(&self, runs: &[Run], kept: (u64, u64)) -> Vec<Stretch> {
        let elsewhere =
            mapped_parts(runs).filter(|spans| spans[spans.len() - 1].end <= kept.0 || kept.1 <= spans[0].start);
        let stretches = elsewhere.filter_map(|spans| {
            let mut chunks = self.mapping.chunks_within(spans[0].start, spans[spans.len() - 1].end).peekable();
            let start = chunks.peek()?.0;
            Some(Stretch { start, chunks: chunks.map(|(_, chunk)| chunk.bytes).collect(), spans: spans.to_vec() })
        });
        stretches.collect()
    }

    /// Makes free chunks loose, after all work on them is done.
    pub(super) fn take_away(&mut self, cx: &mut Context<'_>, stretches: &[Stretch]) -> Result<(), StrategyError> {
        let mut waited: Vec<StreamId> = Vec::new();
        for stretch in stretches {
            let (start, end) = (stretch.start, stretch.start + stretch.bytes());
            let parts = || stretch.spans.iter().filter(|span| span.start < end && start < span.end);
            for owner in parts().filter_map(|span| span.owner) {
                if !waited.contains(&owner) {
                    cx.device.stream_synchronize(owner)?;
                    waited.push(owner);
                }
            }
            self.mapping.unmap(cx.device, start, end)?;
            for span in parts() {
                self.turn_unmapped(span.slot, span.start.max(start), span.end.min(end));
            }
            let (address, stream) = (Address(start), stretch.spans[0].owner.unwrap_or_default());
            cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes: end - start, stream });
            self.stats.on_release(end - start, stretch.chunks.len() as u64);
        }
        Ok(())
    }
}
