//! Walks through a recording with the model at its side, until the two part or the recording ends.

use std::collections::HashMap;

use super::{
    Divergence, Sighting,
    beginning::Start,
    held_back::{HeldBack, Lanes},
    model::{Deeds, Model},
    stretch::{Reading, Stretch},
};
use crate::{
    base::{Address, PROGRESS_STRIDE, Progress, StreamId},
    strategy::{Block, Freed, StrategyError},
    trace::torch::{Action, BlockState, Entry},
};

/// Where the walk is.
pub(super) struct Walk<'a> {
    entries: &'a [Entry],
    pub(super) model: Model,
    /// What the program holds, by address.
    live: HashMap<u64, Tenant>,
    held_back: HeldBack,
    lanes: Lanes,
    stretch: Stretch,
    deeds: Deeds,
    /// The next entry; all between the start and here agree.
    pub(super) at: usize,
    /// Before which entries `empty_cache` must have been called.
    pub(super) empty_caches: Vec<usize>,
    /// How often memory must have been refused from outside.
    pub(super) refusals: usize,
    /// The program had a limit that we do not know.
    by_unknown_limit: bool,
}

const TOO_FEW_LANES: &str = "more frees wait for streams than there are streams";

#[derive(Clone, Copy)]
struct Tenant {
    block: Block,
    requested: u64,
    stream: StreamId,
}

impl Tenant {
    fn sighting(&self, action: Action) -> Sighting {
        Sighting { action, address: self.block.address, bytes: self.requested, stream: self.stream }
    }
}

impl<'a> Walk<'a> {
    /// Sets out with the memory that was there at the start. Refused where the model cannot have such memory.
    pub(super) fn new(
        entries: &'a [Entry],
        mut model: Model,
        streams: usize,
        start: &Start,
        by_unknown_limit: bool,
    ) -> Result<Walk<'a>, StrategyError> {
        let adopted = model.adopt(&start.layout, &entries[start.entry..])?;
        let mut walk = Walk {
            entries,
            model,
            live: HashMap::new(),
            held_back: HeldBack::in_entries(entries, start.entry, start.waiting()),
            lanes: Lanes::above(streams),
            stretch: Stretch::default(),
            deeds: Deeds::default(),
            at: start.entry,
            empty_caches: Vec::new(),
            refusals: 0,
            by_unknown_limit,
        };
        for (block, (was, stream)) in adopted.into_iter().zip(start.memory.live()) {
            if was.state == BlockState::PendingFree {
                walk.wait_from_the_start(block, stream)?;
            } else {
                walk.live.insert(block.address.0, Tenant { block, requested: was.requested_size, stream });
            }
        }
        Ok(walk)
    }

    fn wait_from_the_start(&mut self, block: Block, stream: StreamId) -> Result<(), StrategyError> {
        let turn = self.held_back.turn(self.at);
        let lane = turn.and_then(|turn| self.lanes.lane(turn, &self.held_back));
        let lane = lane.ok_or_else(|| StrategyError::Refused(TOO_FEW_LANES.to_owned()))?;
        self.model.free(block, stream, Some(lane)).map(drop)
    }

    /// Goes on to the end.
    pub(super) fn finish(&mut self, progress: &dyn Progress) -> Result<(), Divergence> {
        progress.begin_stage("re-living it", (self.entries.len() - self.at) as u64);
        while self.at < self.entries.len() {
            let begun = self.at;
            self.go_until(begun.saturating_add(PROGRESS_STRIDE))?;
            progress.advance((self.at - begun) as u64);
        }
        Ok(())
    }

    /// Goes on to the end of the call that reaches `place`.
    fn go_until(&mut self, place: usize) -> Result<(), Divergence> {
        while self.at < place
            && let Some(entry) = self.entries.get(self.at)
        {
            self.at = match entry.action {
                Action::FreeRequested => self.free(entry)?,
                Action::Snapshot | Action::Annotate | Action::Unknown => self.at + 1,
                _ => self.call()?,
            };
        }
        Ok(())
    }

    /// The program frees a block. Says where the next call starts.
    fn free(&mut self, entry: &Entry) -> Result<usize, Divergence> {
        let at = self.at;
        let Some(tenant) = self.live.remove(&entry.address.0) else {
            return Err(self.free_diverges(at, 1, None, Some("no block of the program's is there".to_owned())));
        };
        let turn = self.held_back.turn(at);
        let lane = match turn {
            None => None,
            Some(turn) => match self.lanes.lane(turn, &self.held_back) {
                Some(lane) => Some(lane),
                None => {
                    let complaint = TOO_FEW_LANES.to_owned();
                    return Err(self.free_diverges(at, 1, Some(tenant), Some(complaint)));
                }
            },
        };
        let entries = if turn.is_some() { 1 } else { 2 };
        let expected = [Action::FreeRequested, Action::FreeCompleted].map(|action| tenant.sighting(action));
        let recorded = self.entries[at..].iter().take(entries).map(Sighting::of);
        if !recorded.eq(expected[..entries].iter().copied()) {
            return Err(self.free_diverges(at, entries, Some(tenant), None));
        }
        let freed = if lane.is_some() { Freed::Later } else { Freed::Now };
        match self.model.free(tenant.block, entry.stream, lane) {
            Ok(answer) if answer == freed => Ok(at + entries),
            Ok(_) => Err(self.free_diverges(at, entries, Some(tenant), Some("the block is kept waiting".to_owned()))),
            Err(error) => Err(self.free_diverges(at, entries, Some(tenant), Some(error.to_string()))),
        }
    }

    #[cold]
    fn free_diverges(
        &self,
        at: usize,
        entries: usize,
        tenant: Option<Tenant>,
        complaint: Option<String>,
    ) -> Divergence {
        let recorded: Vec<Sighting> = self.entries[at..].iter().take(entries).map(Sighting::of).collect();
        let model =
            tenant.map(|tenant| [Action::FreeRequested, Action::FreeCompleted].map(|action| tenant.sighting(action)));
        let model = model.into_iter().flatten().take(entries).collect();
        Divergence::entries(at, recorded, model, complaint)
    }

    /// A request, with what it made the allocator do, or a call of `empty_cache`. Says where the next call starts.
    fn call(&mut self) -> Result<usize, Divergence> {
        let next = self.stretch.read(self.entries, self.at);
        match self.stretch.request {
            None => self.empty_cache()?,
            Some(_) if self.stretch.is_plain() => self.plain_request()?,
            Some(_) => self.request()?,
        }
        if self.stretch.seen.iter().any(|seen| seen.action == Action::FreeCompleted) {
            self.lanes.next_group().for_each(|lane| self.model.set_idle(lane));
            self.lanes.vacate_next_group();
        }
        Ok(next)
    }

    /// Only one call explains what happened.
    fn empty_cache(&mut self) -> Result<(), Divergence> {
        self.model.empty_cache(&mut self.deeds);
        if self.deeds.seen != self.stretch.seen {
            return Err(self.diverges(Reading { empty_cache: true, polled: 0, refusals: 0 }));
        }
        self.empty_caches.push(self.at);
        Ok(())
    }

    /// Only one reading explains what happened, so the model need not be kept for another try.
    fn plain_request(&mut self) -> Result<(), Divergence> {
        if self.stretch.seen.len() > 1 {
            self.model.script(&self.stretch, None);
        }
        let reading = Reading::plain(self.stretch.completed_first);
        let block = self.model.request(&self.stretch, reading, self.lanes.next_group(), &mut self.deeds);
        if self.deeds.seen != self.stretch.seen {
            return Err(self.diverges(reading));
        }
        self.settle(block);
        Ok(())
    }

    /// Tries every reading, each on a copy of the model, and takes the first that gives what was recorded.
    fn request(&mut self) -> Result<(), Divergence> {
        let next_range = if self.stretch.runs_out() { self.next_range() } else { None };
        self.model.script(&self.stretch, next_range);
        let mut nearest: Option<(usize, Divergence)> = None;
        for reading in self.stretch.readings(self.by_unknown_limit) {
            let mut trial = self.model.clone();
            let block = trial.request(&self.stretch, reading, self.lanes.next_group(), &mut self.deeds);
            if self.deeds.seen == self.stretch.seen {
                self.model = trial;
                self.refusals += reading.refusals;
                if reading.empty_cache {
                    self.empty_caches.push(self.at);
                }
                self.settle(block);
                return Ok(());
            }
            let in_common = self.deeds.seen.iter().zip(&self.stretch.seen).take_while(|(a, b)| a == b).count();
            if nearest.as_ref().is_none_or(|(most, _)| in_common > *most) {
                nearest = Some((in_common, self.diverges(reading)));
            }
        }
        nearest.map_or(Ok(()), |(_, divergence)| Err(divergence))
    }

    fn settle(&mut self, block: Option<Block>) {
        if let (Some(block), Some(last)) = (block, self.stretch.seen.last()) {
            self.live.insert(block.address.0, Tenant { block, requested: last.bytes, stream: last.stream });
        }
    }

    /// Where a range begins that a failing request reserves: where the stream's next mapping is.
    fn next_range(&self) -> Option<Address> {
        let stream = self.stretch.seen.last()?.stream;
        let later = self.entries[self.at..].iter();
        let mut maps = later.filter(|entry| entry.action == Action::SegmentMap && entry.stream == stream);
        maps.next().map(|entry| entry.address)
    }

    #[cold]
    fn diverges(&self, reading: Reading) -> Divergence {
        let mut complaint = self.deeds.complaint.clone();
        if reading.empty_cache && complaint.is_none() && self.stretch.request.is_none() {
            complaint = Some("read as empty_cache".to_owned());
        }
        Divergence::entries(self.at, self.stretch.seen.clone(), self.deeds.seen.clone(), complaint)
    }
}
