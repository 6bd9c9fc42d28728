//! The program on a real device: host threads that share one strategy under one lock.
//!
//! Each thread has a share of the memory per stream and works in rounds on one stream: it compares
//! and frees some of its blocks, requests as many as its share has room for, and fills them; one
//! launch compares or fills all blocks of a round. Some blocks are also compared on a second
//! stream, behind a kernel that keeps it busy, and freed meanwhile. Some are freed by another
//! thread. Now and then cached memory is released and all blocks of the thread are compared. The
//! host decides the order of the threads, so a run cannot be repeated exactly.

use std::{
    panic::resume_unwind,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{ProgramMix, StopCondition};
use crate::{
    base::{EventId, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{Damage, Device, DeviceError, Patterned, Patterns},
    models::SeededRandom,
    strategy::{Attempt, Block, Caller, Control, Request, Silent, Strategy, StrategyError, wrap::LockedStrategy},
    stress::state::IntegrityCounts,
};

/// The most requests per round.
const ROUND_BLOCKS: usize = 256;
/// The most blocks per round that are compared on a second stream.
const MOST_CROSSINGS: usize = 16;
/// How long a second stream is kept busy.
const SPIN: Work = Work::Spin { nanos: Nanos(100_000) };
/// How often results are fetched while the threads work.
const FETCH_EVERY: Duration = Duration::from_millis(20);
/// After this many refused requests and none served the run ends.
const MOST_REFUSALS: u64 = 10_000;
/// Damage beyond this is only counted.
const MOST_KEPT: usize = 64;

/// The result of all threads.
pub(super) struct ThreadedRun {
    pub(super) counts: IntegrityCounts,
    pub(super) damaged: Vec<Damage>,
    /// Why they could not continue, if so.
    pub(super) error: Option<StrategyError>,
}

/// Runs the threads until the stop condition holds, and closes the strategy.
pub(super) fn run_threads(
    strategy: Box<dyn Strategy>,
    mut device: Box<dyn Device>,
    mix: &ProgramMix,
    seed: u64,
    until: &StopCondition<'_>,
    progress: &mut dyn FnMut(&IntegrityCounts),
) -> ThreadedRun {
    let begin = Instant::now();
    let mut run = ThreadedRun { counts: IntegrityCounts::default(), damaged: Vec::new(), error: None };
    for _ in 1..mix.streams {
        if let Err(error) = device.stream_create(0) {
            run.error = Some(error.into());
            return run;
        }
    }
    let team = ThreadTeam {
        locked: LockedStrategy::new(strategy, device, Silent),
        mix,
        inboxes: (0..mix.threads).map(|_| Mutex::default()).collect(),
        last_key: AtomicU32::new(0),
        blocks: AtomicU64::new(0),
        refusals: AtomicU64::new(0),
        over: AtomicBool::new(false),
    };
    let result = team.run(&mut run, seed, |run| {
        run.counts.wall_ns = begin.elapsed().as_nanos() as u64;
        progress(&run.counts);
        until.is_reached(&run.counts)
    });
    run.error = result.and_then(|()| team.finish(&mut run)).err();
    run.counts.wall_ns = begin.elapsed().as_nanos() as u64;
    run
}

/// A live block of a thread.
#[derive(Clone, Copy, Debug)]
struct HeldBlock {
    block: Block,
    contents: Patterned,
}

/// A block that another thread is to free, and its stream.
type BlockHandover = (HeldBlock, StreamId);

/// What all threads share.
struct ThreadTeam<'a> {
    locked: LockedStrategy<Box<dyn Strategy>, Silent>,
    mix: &'a ProgramMix,
    /// By thread.
    inboxes: Vec<Mutex<Vec<BlockHandover>>>,
    last_key: AtomicU32,
    /// Blocks so far.
    blocks: AtomicU64,
    /// Requests refused so far.
    refusals: AtomicU64,
    over: AtomicBool,
}

impl ThreadTeam<'_> {
    /// Starts the threads, fetches results until `enough` returns true, and waits for the threads.
    fn run(
        &self,
        run: &mut ThreadedRun,
        seed: u64,
        mut enough: impl FnMut(&mut ThreadedRun) -> bool,
    ) -> Result<(), StrategyError> {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..self.mix.threads)
                .map(|number| scope.spawn(move || TeamThread::new(self, number, seed).work()))
                .collect();
            let mut fetched = Ok(());
            while !self.over.load(Ordering::Relaxed) {
                thread::sleep(FETCH_EVERY);
                fetched = self.fetch_results(run);
                run.counts.blocks = self.blocks.load(Ordering::Relaxed);
                let hopeless = run.counts.blocks == 0 && self.refusals.load(Ordering::Relaxed) > MOST_REFUSALS;
                if hopeless || enough(run) || fetched.is_err() || !run.damaged.is_empty() {
                    self.over.store(true, Ordering::Relaxed);
                }
            }
            let mut result = fetched;
            for thread in threads {
                match thread.join().unwrap_or_else(|panic| resume_unwind(panic)) {
                    Ok(counts) => run.counts.add(&counts),
                    Err(error) => result = result.and(Err(error)),
                }
            }
            run.counts.blocks = self.blocks.load(Ordering::Relaxed);
            result
        })
    }

    /// After the threads: frees what is left, fetches the last results and closes the strategy.
    fn finish(&self, run: &mut ThreadedRun) -> Result<(), StrategyError> {
        for (thread, inbox) in (0..).zip(&self.inboxes) {
            for handover in std::mem::take(&mut *inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
                self.free_block(handover, ThreadId(thread))?;
            }
        }
        self.locked.with(|_, cx| cx.device.synchronize())?;
        self.fetch_results(run)?;
        self.locked.with(|strategy, cx| strategy.close(cx))
    }

    fn free_block(&self, (held, stream): BlockHandover, thread: ThreadId) -> Result<(), StrategyError> {
        self.locked.with(|strategy, cx| strategy.free(cx, held.block, Caller { stream, thread })).map(|_| ())
    }

    fn fetch_results(&self, run: &mut ThreadedRun) -> Result<(), StrategyError> {
        let verified = self.on_patterns(|patterns| patterns.verified())?;
        run.counts.comparisons += verified.blocks;
        run.counts.compared_bytes += verified.bytes;
        run.counts.damaged += verified.damaged.len() as u64;
        let room = MOST_KEPT.saturating_sub(run.damaged.len());
        run.damaged.extend(verified.damaged.into_iter().take(room));
        Ok(())
    }

    fn on_device<R>(&self, call: impl FnOnce(&mut dyn Device) -> Result<R, DeviceError>) -> Result<R, StrategyError> {
        Ok(self.locked.with(|_, cx| call(&mut *cx.device))?)
    }

    fn on_patterns<R>(
        &self,
        call: impl FnOnce(&mut dyn Patterns) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        self.on_device(|device| call(device.patterns()?))
    }

    /// 0 is not a valid key.
    fn next_key(&self) -> u32 {
        loop {
            let key = self.last_key.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            if key != 0 {
                return key;
            }
        }
    }
}

/// One thread of the program.
struct TeamThread<'a> {
    team: &'a ThreadTeam<'a>,
    thread: ThreadId,
    random: SeededRandom,
    /// By stream.
    held: Vec<Vec<HeldBlock>>,
    held_bytes: Vec<u64>,
    /// The most bytes per stream.
    share: u64,
    counts: IntegrityCounts,
}

impl<'a> TeamThread<'a> {
    fn new(team: &'a ThreadTeam<'a>, number: u16, seed: u64) -> TeamThread<'a> {
        let streams = usize::from(team.mix.streams.max(1));
        let shares = u64::from(team.mix.threads.max(1)) * streams as u64;
        TeamThread {
            team,
            thread: ThreadId(number),
            random: SeededRandom::new(
                seed.wrapping_mul(1_000_003).wrapping_add(u64::from(number)),
                "integrity threads",
            ),
            held: vec![Vec::new(); streams],
            held_bytes: vec![0; streams],
            share: team.mix.live_bytes / shares,
            counts: IntegrityCounts::default(),
        }
    }

    /// Works in rounds until the run is over, and frees its blocks. An error ends all threads.
    fn work(mut self) -> Result<IntegrityCounts, StrategyError> {
        let worked = self.rounds();
        if worked.is_err() {
            self.team.over.store(true, Ordering::Relaxed);
        }
        worked.map(|()| self.counts)
    }

    fn rounds(&mut self) -> Result<(), StrategyError> {
        let order = self.team.on_device(|device| device.event_create())?;
        let mut step = 0;
        while !self.team.over.load(Ordering::Relaxed) {
            self.empty_inbox()?;
            self.round(order)?;
            if self.thread == ThreadId(0) && self.random.chance(0.05) {
                step += 1;
                self.team.locked.with(|strategy, cx| strategy.control(cx, &Control::StepBegins(step)))?;
            }
            if self.random.chance(0.002) {
                self.team.locked.with(|strategy, cx| strategy.trim(cx))?;
                self.counts.trims += 1;
                self.compare_all()?;
            }
        }
        for stream in 0..self.held.len() {
            self.free_down_to(stream, 0)?;
        }
        self.empty_inbox()?;
        self.team.on_device(|device| device.event_destroy(order))
    }

    fn round(&mut self, order: EventId) -> Result<(), StrategyError> {
        let stream = self.random.index(self.held.len());
        let sizes = self.team.mix.sizes.up_to(self.share / 2);
        let (mut wanted, mut wanted_bytes) = (Vec::with_capacity(ROUND_BLOCKS), 0);
        while wanted.len() < ROUND_BLOCKS && wanted_bytes < self.share / 4 {
            let bytes = sizes.draw(&mut self.random);
            wanted.push(bytes);
            wanted_bytes += bytes;
        }
        self.free_down_to(stream, self.share.saturating_sub(wanted_bytes))?;
        let served = self.request(stream, &wanted)?;
        if served.len() < wanted.len() {
            // Memory has run out or is fragmented.
            self.free_down_to(stream, self.held_bytes[stream] / 2)?;
        }
        let home = StreamId(stream as u16);
        if served.is_empty() {
            return Ok(());
        }
        let contents: Vec<Patterned> = served.iter().map(|held| held.contents).collect();
        self.team.on_patterns(|patterns| patterns.fill_blocks(home, &contents))?;
        if self.random.chance(0.25) {
            self.compare_elsewhere(home, &served[..served.len().min(MOST_CROSSINGS)], order)?;
        }
        self.held_bytes[stream] += contents.iter().map(|block| block.bytes).sum::<u64>();
        self.held[stream].extend(served);
        Ok(())
    }

    fn request(&mut self, stream: usize, wanted: &[u64]) -> Result<Vec<HeldBlock>, StrategyError> {
        let mut served = Vec::with_capacity(wanted.len());
        for &bytes in wanted {
            let stream = StreamId(stream as u16);
            let request = Request { bytes, stream, thread: self.thread, site: SiteId(0) };
            match self.team.locked.with(|strategy, cx| strategy.alloc(cx, &request))? {
                Attempt::Served(block, _) => {
                    let contents = Patterned { address: block.address, bytes, key: self.team.next_key() };
                    served.push(HeldBlock { block, contents });
                }
                Attempt::OutOfMemory(_) => {
                    self.counts.ooms += 1;
                    self.team.refusals.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        Ok(served)
    }

    /// Compares blocks of one stream with one launch and frees them until at most `bytes` are held
    /// there.
    fn free_down_to(&mut self, stream: usize, bytes: u64) -> Result<(), StrategyError> {
        let mut leaving = Vec::new();
        while self.held_bytes[stream] > bytes && !self.held[stream].is_empty() {
            let place = self.random.index(self.held[stream].len());
            let held = self.held[stream].swap_remove(place);
            self.held_bytes[stream] -= held.contents.bytes;
            leaving.push(held);
        }
        if leaving.is_empty() {
            return Ok(());
        }
        let home = StreamId(stream as u16);
        let contents: Vec<Patterned> = leaving.iter().map(|held| held.contents).collect();
        self.team.on_patterns(|patterns| patterns.verify_blocks(home, &contents))?;
        for held in leaving {
            if self.team.inboxes.len() > 1 && self.random.chance(0.1) {
                self.counts.handovers += 1;
                let to = self.random.index(self.team.inboxes.len());
                self.team.inboxes[to].lock().unwrap_or_else(PoisonError::into_inner).push((held, home));
            } else {
                self.team.free_block((held, home), self.thread)?;
            }
        }
        self.team.blocks.fetch_add(contents.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn empty_inbox(&self) -> Result<(), StrategyError> {
        let inbox = &self.team.inboxes[self.thread.index()];
        for handover in std::mem::take(&mut *inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
            self.team.free_block(handover, self.thread)?;
        }
        Ok(())
    }

    /// Compares blocks that were just filled on a second stream too, which is often busy.
    fn compare_elsewhere(&mut self, home: StreamId, blocks: &[HeldBlock], order: EventId) -> Result<(), StrategyError> {
        if self.held.len() < 2 {
            return Ok(());
        }
        let other = (home.index() + 1 + self.random.index(self.held.len() - 1)) % self.held.len();
        let other = StreamId(other as u16);
        for held in blocks {
            self.team.locked.with(|strategy, cx| strategy.used_on(cx, &held.block, other))?;
        }
        let contents: Vec<Patterned> = blocks.iter().map(|held| held.contents).collect();
        let keeps_busy = self.random.chance(0.25);
        self.team.on_device(|device| {
            if keeps_busy && let Ok(compute) = device.compute() {
                compute.launch(other, &SPIN, &[])?;
            }
            device.event_record(order, home)?;
            device.stream_wait_event(other, order)
        })?;
        self.counts.crossings += contents.len() as u64;
        self.team.on_patterns(|patterns| patterns.verify_blocks(other, &contents))
    }

    fn compare_all(&self) -> Result<(), StrategyError> {
        for (stream, held) in (0..).zip(&self.held) {
            let contents: Vec<Patterned> = held.iter().map(|held| held.contents).collect();
            if !contents.is_empty() {
                self.team.on_patterns(|patterns| patterns.verify_blocks(StreamId(stream), &contents))?;
            }
        }
        Ok(())
    }
}
