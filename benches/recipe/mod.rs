//! The recipe by which allocators are timed: a hot pair by size, and a random mix by number of live blocks.
//!
//! `tools/torch-oracle/bench.cpp` does the same to PyTorch's own allocator; what is changed here is changed there.

use oomph::{
    device::{
        Device,
        sim::{Profile, SimDevice},
    },
    strategy::{Attempt, Block, Caller, Context, Request, Setup, Silent, Strategy, StrategySpec},
    unit::{KIB, MIB, SiteId, StreamId, ThreadId},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Sizes of the hot pair, with their names.
pub const HOT: [(u64, &str); 5] =
    [(512, "hot 512 B"), (4 * KIB, "hot 4 KiB"), (MIB, "hot 1 MiB"), (4 * MIB, "hot 4 MiB"), (64 * MIB, "hot 64 MiB")];

/// Numbers of live blocks of the mix, with their names.
pub const MIX: [(usize, &str); 3] =
    [(100, "random live 100"), (1_000, "random live 1000"), (10_000, "random live 10000")];

/// Pairs in one pass over the mix.
pub const MIX_PAIRS: usize = 400_000;

/// A strategy on a simulated H200.
pub struct Bench {
    strategy: Box<dyn Strategy>,
    device: SimDevice,
}

impl Bench {
    /// `None` where the simulated device cannot do what the strategy needs.
    pub fn new(spec: &StrategySpec) -> Option<Bench> {
        let device = SimDevice::new(Profile::h200()).expect("the built-in profile is sound");
        let strategy = spec.build(&Setup { props: device.props(), limit: None }).expect("a registered strategy");
        let missing = strategy.requires().missing_from(device.props().capabilities);
        (missing == Default::default()).then_some(Bench { strategy, device })
    }

    #[inline]
    pub fn alloc(&mut self, bytes: u64) -> Block {
        let request = Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: &mut self.device, sink: &mut Silent };
        match self.strategy.alloc(&mut cx, &request) {
            Ok(Attempt::Served(block, _)) => block,
            other => panic!("{bytes} bytes were not served: {other:?}"),
        }
    }

    #[inline]
    pub fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut self.device, sink: &mut Silent };
        self.strategy.free(&mut cx, block, Caller::default()).expect("a live block");
    }
}

/// The random mix: which place is replaced, and by how large a block.
pub struct Mix {
    steps: Vec<(usize, u64)>,
    places: Vec<Option<Block>>,
    next: usize,
}

impl Mix {
    pub fn new(live: usize) -> Mix {
        let mut random = ChaCha8Rng::seed_from_u64(42);
        let steps = (0..MIX_PAIRS)
            .map(|_| (random.random_range(0..live), random.random_range(9.0..22.0_f64).exp2() as u64))
            .collect();
        Mix { steps, places: vec![None; live], next: 0 }
    }

    /// Replaces one block.
    #[inline]
    pub fn step(&mut self, bench: &mut Bench) {
        let (place, bytes) = self.steps[self.next];
        self.next = if self.next + 1 == self.steps.len() { 0 } else { self.next + 1 };
        if let Some(block) = self.places[place].take() {
            bench.free(block);
        }
        self.places[place] = Some(bench.alloc(bytes));
    }

    /// Every place is occupied, and free memory is as ragged as it gets.
    pub fn warm_up(&mut self, bench: &mut Bench) {
        for _ in 0..MIX_PAIRS {
            self.step(bench);
        }
    }
}
