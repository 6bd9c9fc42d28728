//! Private pools for strategies that have none: each pool is an instance of the strategy, so that its memory serves only
//! its own requests. All instances share the device.

use std::collections::HashMap;

use crate::device::Capabilities;
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Request, Stats, Strategy, StrategyError,
};
use oomph_base::{Address, StreamId};

/// PyTorch's number of a pool.
type PoolKey = (u64, u64);

/// Makes the instance of another pool.
type ArenaBuilder = Box<dyn Fn() -> Result<Box<dyn Strategy>, StrategyError> + Send>;

/// A strategy with one instance for each private pool.
pub struct PoolArenas {
    /// The default pool comes first.
    arenas: Vec<PrivateArena>,
    build: ArenaBuilder,
    /// Pools that requests go to now, with the stream that this is limited to.
    scopes: Vec<(PoolKey, Option<StreamId>)>,
    /// The arenas of blocks in private pools.
    owners: HashMap<Address, usize>,
    /// Sums over all arenas.
    stats: Stats,
}

struct PrivateArena {
    key: PoolKey,
    /// Scopes and owners of the pool; without them its cached memory may be released.
    users: u32,
    strategy: Box<dyn Strategy>,
}

/// The place of the default pool.
const DEFAULT: usize = 0;

impl PoolArenas {
    /// `build` makes the instances of private pools.
    pub fn new(strategy: Box<dyn Strategy>, build: ArenaBuilder) -> PoolArenas {
        let arenas = vec![PrivateArena { key: (0, 0), users: 1, strategy }];
        PoolArenas { arenas, build, scopes: Vec::new(), owners: HashMap::new(), stats: Stats::default() }
    }

    fn find(&self, key: PoolKey) -> Option<usize> {
        self.arenas.iter().position(|arena| arena.key == key)
    }

    /// The arena of a request. The scope that began last counts, as in PyTorch from 2.10 on.
    fn arena_for(&self, stream: StreamId) -> usize {
        let fits = |only: Option<StreamId>| only.is_none_or(|only| only == stream);
        let scope = self.scopes.iter().rev().find(|(_, only)| fits(*only));
        scope.and_then(|(key, _)| self.find(*key)).unwrap_or(DEFAULT)
    }

    fn owner(&self, block: &Block) -> usize {
        self.owners.get(&block.address).copied().unwrap_or(DEFAULT)
    }

    fn retain(&mut self, key: PoolKey) -> Result<(), StrategyError> {
        match self.find(key) {
            Some(place) => self.arenas[place].users += 1,
            None => self.arenas.push(PrivateArena { key, users: 1, strategy: (self.build)()? }),
        }
        Ok(())
    }

    /// Releases the cached memory of pools without users; with a key, of this one alone.
    fn trim_unused(&mut self, cx: &mut Context<'_>, only: Option<PoolKey>) -> Result<(), StrategyError> {
        let unused = self.arenas.iter_mut().filter(|arena| arena.users == 0);
        for arena in unused.filter(|arena| only.is_none_or(|key| arena.key == key)) {
            arena.strategy.trim(cx)?;
        }
        Ok(())
    }

    fn count(&mut self) {
        let mut sum = Stats { peak: self.stats.peak, peak_segments: self.stats.peak_segments, ..Stats::default() };
        for arena in &self.arenas {
            sum.add(&arena.strategy.stats());
        }
        self.stats = sum;
    }
}

impl Strategy for PoolArenas {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let place = self.arena_for(request.stream);
        let mut attempt = self.arenas[place].strategy.alloc(cx, request)?;
        let holds_memory = |arena: &PrivateArena| arena.users == 0 && arena.strategy.stats().current.reserved > 0;
        if matches!(attempt, Attempt::OutOfMemory(_)) && self.arenas.iter().any(holds_memory) {
            self.trim_unused(cx, None)?;
            attempt = self.arenas[place].strategy.alloc(cx, request)?;
        }
        if let (Attempt::Served(block, _), true) = (&attempt, place != DEFAULT) {
            self.owners.insert(block.address, place);
        }
        self.count();
        Ok(attempt)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let place = self.owner(&block);
        let freed = self.arenas[place].strategy.free(cx, block, caller)?;
        self.owners.remove(&block.address);
        self.count();
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let place = self.owner(block);
        self.arenas[place].strategy.used_on(cx, block, stream)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        match *command {
            Control::PoolBegin { pool, stream } => {
                self.retain(pool)?;
                self.scopes.push((pool, stream));
            }
            Control::PoolEnd { pool } => {
                if let Some(place) = self.scopes.iter().rposition(|(key, _)| *key == pool) {
                    self.scopes.remove(place);
                }
            }
            Control::PoolRetain { pool, .. } => self.retain(pool)?,
            Control::PoolRelease { pool } => {
                if let Some(place) = self.find(pool).filter(|&place| place != DEFAULT) {
                    self.arenas[place].users = self.arenas[place].users.saturating_sub(1);
                }
            }
            Control::PoolTrim { pool } => self.trim_unused(cx, Some(pool))?,
            _ => {
                for arena in &mut self.arenas {
                    arena.strategy.control(cx, command)?;
                }
            }
        }
        self.count();
        Ok(())
    }

    fn serves_pools(&self) -> bool {
        true
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.arenas[DEFAULT].strategy.trim(cx)?;
        self.trim_unused(cx, None)?;
        self.count();
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        for arena in &mut self.arenas {
            arena.strategy.close(cx)?;
        }
        self.arenas.truncate(1);
        self.scopes.clear();
        self.owners.clear();
        self.stats = Stats::default();
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.arenas[self.arena_for(stream)].strategy.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        let mut segments = Vec::new();
        for arena in &self.arenas {
            let layout = arena.strategy.layout()?;
            segments.extend(layout.segments.into_iter().map(|mut segment| {
                segment.pool_id = arena.key;
                segment
            }));
        }
        Some(Layout::of(segments))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.arenas[DEFAULT].strategy.details()
    }

    fn trims(&self) -> bool {
        self.arenas[DEFAULT].strategy.trims()
    }

    fn requires(&self) -> Capabilities {
        self.arenas[DEFAULT].strategy.requires()
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        Device,
        sim::{SimConfig, SimDevice},
    };
    use crate::strategy::{Setup, Silent, StrategySpec, wrap::CheckedStrategy};
    use oomph_base::{MIB, SiteId, ThreadId};

    fn arenas(name: &'static str, device: &SimDevice) -> PoolArenas {
        let props = device.props().clone();
        let build = move || {
            let setup = Setup { props: &props, limit: None };
            StrategySpec::from(name).build(&setup).map_err(|error| StrategyError::Refused(error.to_string()))
        };
        PoolArenas::new(build().unwrap(), Box::new(build))
    }

    fn alloc(strategy: &mut dyn Strategy, cx: &mut Context<'_>, bytes: u64) -> Block {
        let request = Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        match strategy.alloc(cx, &request).unwrap() {
            Attempt::Served(block, _) => block,
            Attempt::OutOfMemory(shortage) => panic!("{shortage:?}"),
        }
    }

    /// A free block of a private pool serves only the pool, and goes back when the pool is given up.
    #[test]
    fn memory_of_a_pool_serves_only_its_own_requests() {
        for name in ["pool", "bfc", "tlsf"] {
            let mut device = SimDevice::new(SimConfig::default()).unwrap();
            let mut strategy = CheckedStrategy::new(arenas(name, &device));
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            let pool = (0, 1);
            strategy.control(&mut cx, &Control::PoolRetain { pool, use_on_oom: false }).unwrap();
            strategy.control(&mut cx, &Control::PoolBegin { pool, stream: None }).unwrap();
            let private = alloc(&mut strategy, &mut cx, 30 * MIB);
            strategy.free(&mut cx, private, Caller::default()).unwrap();
            strategy.control(&mut cx, &Control::PoolEnd { pool }).unwrap();
            strategy.control(&mut cx, &Control::PoolRelease { pool }).unwrap();
            let with_pool = strategy.stats().current.reserved;
            let default = alloc(&mut strategy, &mut cx, 30 * MIB);
            assert!(strategy.stats().current.reserved > with_pool, "{name}: the pool served a request of another");
            strategy.trim(&mut cx).unwrap();
            let before = strategy.stats().current.reserved;
            strategy.control(&mut cx, &Control::PoolRelease { pool }).unwrap();
            strategy.trim(&mut cx).unwrap();
            assert!(strategy.stats().current.reserved <= before, "{name}");
            strategy.free(&mut cx, default, Caller::default()).unwrap();
            strategy.close(&mut cx).unwrap();
            assert_eq!(strategy.violations(), [], "{name}");
            assert_eq!(device.held_bytes(), 0, "{name}");
        }
    }
}
