//! The recipe for timing allocators: a hot pair per size, and a random mix per number of live
//! blocks. `OOMPH_BENCH_DEVICE` sets the device (default: `sim`).
//!
//! `tools/allocator_recipe.h` is the same recipe for PyTorch's allocator and RMM. Change both
//! together.

use std::env;

use oomph::{
    base::{KIB, MIB, SiteId, StreamId, ThreadId},
    device::{Device, DeviceSpec},
    strategy::{Attempt, Block, Caller, Context, Request, Setup, Silent, Strategy, StrategySpec},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Sizes of the hot pair, and their case names.
pub const HOT: [(u64, &str); 5] =
    [(512, "hot 512 B"), (4 * KIB, "hot 4 KiB"), (MIB, "hot 1 MiB"), (4 * MIB, "hot 4 MiB"), (64 * MIB, "hot 64 MiB")];

/// Numbers of live blocks in the mix, and their case names.
pub const MIX: [(usize, &str); 3] =
    [(100, "random live 100"), (1_000, "random live 1000"), (10_000, "random live 10000")];

/// Pairs in one pass over the mix.
pub const MIX_PAIRS: usize = 400_000;

/// A new strategy on a new device.
pub fn fresh(spec: &StrategySpec) -> (Box<dyn Strategy>, Box<dyn Device>) {
    let device = env::var("OOMPH_BENCH_DEVICE").unwrap_or_else(|_| "sim".to_owned());
    let device: DeviceSpec = device.parse().expect("a device such as sim or cuda");
    let device = device.open().expect("an available device");
    let strategy = spec.build(&Setup { props: device.props(), limit: None }).expect("a registered strategy");
    (strategy, device)
}

/// An allocator under test: PyTorch's callers hold a pointer, ours may hold a handle.
pub trait Allocator {
    /// What the caller keeps for a block.
    type Held: Copy;
    fn alloc(&mut self, bytes: u64) -> Self::Held;
    fn free(&mut self, held: Self::Held);
}

/// A strategy on its device, called by handle.
pub struct ByHandle {
    strategy: Box<dyn Strategy>,
    device: Box<dyn Device>,
}

impl ByHandle {
    /// `None` if the device lacks a feature that the strategy needs.
    pub fn new(spec: &StrategySpec) -> Option<ByHandle> {
        let (strategy, device) = fresh(spec);
        strategy.requires().check(device.props()).is_ok().then_some(ByHandle { strategy, device })
    }
}

impl Allocator for ByHandle {
    type Held = Block;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> Block {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        served(self.strategy.alloc(&mut cx, &request(bytes)))
    }

    #[inline]
    fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        self.strategy.free(&mut cx, block, Caller::default()).expect("a live block");
    }
}

/// Frees device memory before the device is dropped, because a GPU may be shared.
impl Drop for ByHandle {
    fn drop(&mut self) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        self.strategy.close(&mut cx).expect("the device frees its memory");
    }
}

/// A request from the first thread on the default stream.
pub fn request(bytes: u64) -> Request {
    Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) }
}

/// Returns the block; panics otherwise, because a bench must not run out of memory.
#[inline]
pub fn served<E: std::fmt::Debug>(attempt: Result<Attempt, E>) -> Block {
    match attempt {
        Ok(Attempt::Served(block, _)) => block,
        other => panic!("a request was not served: {other:?}"),
    }
}

/// The steps of the random mix: which slot is replaced, and the size of the new block.
pub fn steps(live: usize, pairs: usize, seed: u64) -> Vec<(usize, u64)> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..pairs).map(|_| (random.random_range(0..live), random.random_range(9.0..22.0_f64).exp2() as u64)).collect()
}

/// The random mix.
pub struct Mix<B> {
    steps: Vec<(usize, u64)>,
    places: Vec<Option<B>>,
    next: usize,
}

impl<B: Copy> Mix<B> {
    pub fn new(live: usize) -> Mix<B> {
        Mix { steps: steps(live, MIX_PAIRS, 42), places: vec![None; live], next: 0 }
    }

    /// Replaces one block.
    #[inline]
    pub fn step(&mut self, allocator: &mut impl Allocator<Held = B>) {
        let (place, bytes) = self.steps[self.next];
        self.next = if self.next + 1 == self.steps.len() { 0 } else { self.next + 1 };
        if let Some(held) = self.places[place].take() {
            allocator.free(held);
        }
        self.places[place] = Some(allocator.alloc(bytes));
    }

    /// Fills every slot and fragments free memory before timing starts.
    pub fn warm_up(&mut self, allocator: &mut impl Allocator<Held = B>) {
        for _ in 0..MIX_PAIRS {
            self.step(allocator);
        }
    }
}
