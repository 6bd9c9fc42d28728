//! The program on a device whose time is real: threads of the host that share one strategy under one lock.
//!
//! Every thread has a share of the memory for each stream and goes on in rounds on one of them: it compares some of its
//! blocks, gives them back, asks for as many others as its share has room for, and fills those; one launch compares or
//! fills all blocks of a round. Some blocks are compared on a second stream too, behind a kernel that keeps it busy,
//! and given back meanwhile. Some are given back by another thread. Now and then cached memory is given back, and all that
//! the thread holds is compared. Which thread comes when is up to the host, so a run cannot be repeated.

use std::{
    panic::resume_unwind,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Mixture, Tally, Until};
use crate::{
    base::{EventId, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{Damage, Device, DeviceError, Patterned, Patterns},
    models::SeededRandom,
    strategy::{Attempt, Block, Caller, Control, Request, Silent, Strategy, StrategyError, wrap::Locked},
};

/// The most blocks that are asked for in a round.
const ROUND_BLOCKS: usize = 256;
/// The most blocks of a round that are compared on a second stream.
const MOST_CROSSING: usize = 16;
/// How long a second stream is kept busy.
const SPIN: Work = Work::Spin { nanos: Nanos(100_000) };
/// How often findings are taken over while the threads work.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// After so many requests refused, and none served, there is nothing to hope for.
const MOST_REFUSALS: u64 = 10_000;
/// Damage beyond this is only counted.
const MOST_KEPT: usize = 64;

/// What the threads came to.
pub(super) struct Shift {
    pub(super) tally: Tally,
    pub(super) damaged: Vec<Damage>,
    /// Why they could not go on, if so.
    pub(super) error: Option<StrategyError>,
}

/// Lets the threads work until it is enough, and closes the strategy.
pub(super) fn work(
    strategy: Box<dyn Strategy>,
    mut device: Box<dyn Device>,
    mixture: &Mixture,
    seed: u64,
    until: &Until<'_>,
    progress: &mut dyn FnMut(&Tally),
) -> Shift {
    let begin = Instant::now();
    let mut shift = Shift { tally: Tally::default(), damaged: Vec::new(), error: None };
    for _ in 1..mixture.streams {
        if let Err(error) = device.stream_create(0) {
            shift.error = Some(error.into());
            return shift;
        }
    }
    let crew = Crew {
        locked: Locked::new(strategy, device, Silent),
        mixture,
        inboxes: (0..mixture.threads).map(|_| Mutex::default()).collect(),
        last_key: AtomicU32::new(0),
        blocks: AtomicU64::new(0),
        refusals: AtomicU64::new(0),
        over: AtomicBool::new(false),
    };
    let result = crew.run(&mut shift, seed, |shift| {
        shift.tally.wall_ns = begin.elapsed().as_nanos() as u64;
        progress(&shift.tally);
        until.is_reached(&shift.tally)
    });
    shift.error = result.and_then(|()| crew.clear(&mut shift)).err();
    shift.tally.wall_ns = begin.elapsed().as_nanos() as u64;
    shift
}

/// A block that some thread holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    block: Block,
    contents: Patterned,
}

/// A block that is to be given back by another thread than had asked for it.
type Handover = (Held, StreamId);

/// What all threads share.
struct Crew<'a> {
    locked: Locked<Box<dyn Strategy>, Silent>,
    mixture: &'a Mixture,
    /// By thread.
    inboxes: Vec<Mutex<Vec<Handover>>>,
    last_key: AtomicU32,
    /// Blocks so far, for those who watch.
    blocks: AtomicU64,
    /// Requests refused so far.
    refusals: AtomicU64,
    over: AtomicBool,
}

impl Crew<'_> {
    /// Starts the threads, takes over findings until `enough`, and waits for the threads.
    fn run(
        &self,
        shift: &mut Shift,
        seed: u64,
        mut enough: impl FnMut(&mut Shift) -> bool,
    ) -> Result<(), StrategyError> {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..self.mixture.threads)
                .map(|number| scope.spawn(move || Worker::new(self, number, seed).work()))
                .collect();
            let mut looked = Ok(());
            while !self.over.load(Ordering::Relaxed) {
                thread::sleep(LOOK_EVERY);
                looked = self.look(shift);
                shift.tally.blocks = self.blocks.load(Ordering::Relaxed);
                let hopeless = shift.tally.blocks == 0 && self.refusals.load(Ordering::Relaxed) > MOST_REFUSALS;
                if hopeless || enough(shift) || looked.is_err() || !shift.damaged.is_empty() {
                    self.over.store(true, Ordering::Relaxed);
                }
            }
            let mut result = looked;
            for thread in threads {
                match thread.join().unwrap_or_else(|panic| resume_unwind(panic)) {
                    Ok(tally) => shift.tally.absorb(&tally),
                    Err(error) => result = result.and(Err(error)),
                }
            }
            shift.tally.blocks = self.blocks.load(Ordering::Relaxed);
            result
        })
    }

    /// When the threads are done: what nobody has given back, the last findings, and the end of the strategy.
    fn clear(&self, shift: &mut Shift) -> Result<(), StrategyError> {
        for (thread, inbox) in (0..).zip(&self.inboxes) {
            for handover in std::mem::take(&mut *inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
                self.give_back(handover, ThreadId(thread))?;
            }
        }
        self.locked.with(|_, cx| cx.device.synchronize())?;
        self.look(shift)?;
        self.locked.close()
    }

    fn give_back(&self, (held, stream): Handover, thread: ThreadId) -> Result<(), StrategyError> {
        self.locked.free(held.block, Caller { stream, thread }).map(|_| ())
    }

    fn look(&self, shift: &mut Shift) -> Result<(), StrategyError> {
        let verified = self.on_patterns(|patterns| patterns.verified())?;
        shift.tally.comparisons += verified.blocks;
        shift.tally.compared_bytes += verified.bytes;
        shift.tally.damaged += verified.damaged.len() as u64;
        let room = MOST_KEPT.saturating_sub(shift.damaged.len());
        shift.damaged.extend(verified.damaged.into_iter().take(room));
        Ok(())
    }

    fn on_device<R>(&self, call: impl FnOnce(&mut dyn Device) -> Result<R, DeviceError>) -> Result<R, StrategyError> {
        Ok(self.locked.with(|_, cx| call(&mut *cx.device))?)
    }

    fn on_patterns<R>(
        &self,
        call: impl FnOnce(&mut dyn Patterns) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        self.on_device(|device| call(device.require_patterns()?))
    }

    /// Zero is the key of no block.
    fn next_key(&self) -> u32 {
        loop {
            let key = self.last_key.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            if key != 0 {
                return key;
            }
        }
    }
}

/// One thread.
struct Worker<'a> {
    crew: &'a Crew<'a>,
    thread: ThreadId,
    dice: SeededRandom,
    /// By stream.
    held: Vec<Vec<Held>>,
    held_bytes: Vec<u64>,
    /// Bytes that it may hold on each stream.
    share: u64,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(crew: &'a Crew<'a>, number: u16, seed: u64) -> Worker<'a> {
        let streams = usize::from(crew.mixture.streams.max(1));
        let shares = u64::from(crew.mixture.threads.max(1)) * streams as u64;
        Worker {
            crew,
            thread: ThreadId(number),
            dice: SeededRandom::new(seed.wrapping_mul(1_000_003).wrapping_add(u64::from(number)), "integrity crew"),
            held: vec![Vec::new(); streams],
            held_bytes: vec![0; streams],
            share: crew.mixture.live_bytes / shares,
            tally: Tally::default(),
        }
    }

    /// Rounds until it is over. Nothing of its own is left then; whatever goes wrong ends the work of all.
    fn work(mut self) -> Result<Tally, StrategyError> {
        let worked = self.rounds();
        if worked.is_err() {
            self.crew.over.store(true, Ordering::Relaxed);
        }
        worked.map(|()| self.tally)
    }

    fn rounds(&mut self) -> Result<(), StrategyError> {
        let order = self.crew.on_device(|device| device.event_create())?;
        let mut step = 0;
        while !self.crew.over.load(Ordering::Relaxed) {
            self.empty_inbox()?;
            self.round(order)?;
            if self.thread == ThreadId(0) && self.dice.chance(0.05) {
                step += 1;
                self.crew.locked.control(&Control::StepBegins(step))?;
            }
            if self.dice.chance(0.002) {
                self.crew.locked.trim()?;
                self.tally.trims += 1;
                self.compare_all()?;
            }
        }
        for stream in 0..self.held.len() {
            self.give_back_until(stream, 0)?;
        }
        self.empty_inbox()?;
        self.crew.on_device(|device| device.event_destroy(order))
    }

    fn round(&mut self, order: EventId) -> Result<(), StrategyError> {
        let stream = self.dice.index(self.held.len());
        let sizes = self.crew.mixture.sizes.up_to(self.share / 2);
        let (mut wanted, mut wanted_bytes) = (Vec::with_capacity(ROUND_BLOCKS), 0);
        while wanted.len() < ROUND_BLOCKS && wanted_bytes < self.share / 4 {
            let bytes = sizes.draw(&mut self.dice);
            wanted.push(bytes);
            wanted_bytes += bytes;
        }
        self.give_back_until(stream, self.share.saturating_sub(wanted_bytes))?;
        let came = self.ask_for(stream, &wanted)?;
        if came.len() < wanted.len() {
            // Memory has run out, or what there is lies in pieces.
            self.give_back_until(stream, self.held_bytes[stream] / 2)?;
        }
        let home = StreamId(stream as u16);
        if came.is_empty() {
            return Ok(());
        }
        let contents: Vec<Patterned> = came.iter().map(|held| held.contents).collect();
        self.crew.on_patterns(|patterns| patterns.fill_blocks(home, &contents))?;
        if self.dice.chance(0.25) {
            self.cross_over(home, &came[..came.len().min(MOST_CROSSING)], order)?;
        }
        self.held_bytes[stream] += contents.iter().map(|block| block.bytes).sum::<u64>();
        self.held[stream].extend(came);
        Ok(())
    }

    fn ask_for(&mut self, stream: usize, wanted: &[u64]) -> Result<Vec<Held>, StrategyError> {
        let mut came = Vec::with_capacity(wanted.len());
        for &bytes in wanted {
            let stream = StreamId(stream as u16);
            let request = Request { bytes, stream, thread: self.thread, site: SiteId(0) };
            match self.crew.locked.alloc(&request)? {
                Attempt::Served(block, _) => {
                    let contents = Patterned { address: block.address, bytes, key: self.crew.next_key() };
                    came.push(Held { block, contents });
                }
                Attempt::OutOfMemory(_) => {
                    self.tally.ooms += 1;
                    self.crew.refusals.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        Ok(came)
    }

    /// Compares blocks of one stream, all by one launch, and gives them back until no more bytes are held there.
    fn give_back_until(&mut self, stream: usize, bytes: u64) -> Result<(), StrategyError> {
        let mut goes = Vec::new();
        while self.held_bytes[stream] > bytes && !self.held[stream].is_empty() {
            let place = self.dice.index(self.held[stream].len());
            let held = self.held[stream].swap_remove(place);
            self.held_bytes[stream] -= held.contents.bytes;
            goes.push(held);
        }
        if goes.is_empty() {
            return Ok(());
        }
        let home = StreamId(stream as u16);
        let contents: Vec<Patterned> = goes.iter().map(|held| held.contents).collect();
        self.crew.on_patterns(|patterns| patterns.verify_blocks(home, &contents))?;
        for held in goes {
            if self.crew.inboxes.len() > 1 && self.dice.chance(0.1) {
                self.tally.handovers += 1;
                let to = self.dice.index(self.crew.inboxes.len());
                self.crew.inboxes[to].lock().unwrap_or_else(PoisonError::into_inner).push((held, home));
            } else {
                self.crew.give_back((held, home), self.thread)?;
            }
        }
        self.crew.blocks.fetch_add(contents.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn empty_inbox(&self) -> Result<(), StrategyError> {
        let inbox = &self.crew.inboxes[self.thread.index()];
        for handover in std::mem::take(&mut *inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
            self.crew.give_back(handover, self.thread)?;
        }
        Ok(())
    }

    /// Compares blocks that were just filled on a second stream as well, which often has something else to do first.
    fn cross_over(&mut self, home: StreamId, blocks: &[Held], order: EventId) -> Result<(), StrategyError> {
        if self.held.len() < 2 {
            return Ok(());
        }
        let away = (home.index() + 1 + self.dice.index(self.held.len() - 1)) % self.held.len();
        let away = StreamId(away as u16);
        for held in blocks {
            self.crew.locked.used_on(&held.block, away)?;
        }
        let contents: Vec<Patterned> = blocks.iter().map(|held| held.contents).collect();
        let keeps_busy = self.dice.chance(0.25);
        self.crew.on_device(|device| {
            if keeps_busy && let Some(compute) = device.compute() {
                compute.launch(away, &SPIN, &[])?;
            }
            device.event_record(order, home)?;
            device.stream_wait_event(away, order)
        })?;
        self.tally.crossings += contents.len() as u64;
        self.crew.on_patterns(|patterns| patterns.verify_blocks(away, &contents))
    }

    fn compare_all(&self) -> Result<(), StrategyError> {
        for (stream, held) in (0..).zip(&self.held) {
            let contents: Vec<Patterned> = held.iter().map(|held| held.contents).collect();
            if !contents.is_empty() {
                self.crew.on_patterns(|patterns| patterns.verify_blocks(StreamId(stream), &contents))?;
            }
        }
        Ok(())
    }
}
