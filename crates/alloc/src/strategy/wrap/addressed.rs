//! Calling a strategy as PyTorch's callers do: by pointer and under a lock.
//!
//! A handle makes `free` a lookup by index; a pointer must first be found. PyTorch keeps such a
//! table too and searches it under its lock, so a fair comparison of timings includes both.
//! Decisions are those of the inner strategy.

use std::collections::BTreeMap;

use spin::{Yield, mutex::SpinMutexGuard};

use super::Lock;
use crate::strategy::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Parameter, Request, Setup, Strategy,
    StrategyEntry, StrategyError, StrategySpec,
};
use oomph_base::{Address, StreamId};

/// The registry's line.
pub(in crate::strategy) const ENTRY: StrategyEntry = StrategyEntry {
    name: "address",
    summary: "another strategy, called by address and under a lock as PyTorch's allocator is",
    origin: "the calling convention of PyTorch's raw_alloc and raw_delete",
    differs: &[],
    parameters: &[Parameter::text(
        "INNER",
        "any strategy with its parameters",
        "caching",
        "which strategy serves the requests",
    )],
    variants: &[],
    build,
};

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let inner = StrategySpec::from(if parameters.is_empty() { "caching" } else { parameters });
    if inner.name == ENTRY.name {
        return Err(ENTRY.refused("INNER already is called by address: name another strategy".to_owned()));
    }
    Ok(Box::new(ByAddress { lock: Lock::new(()), inner: AddressedStrategy::new(inner.build(setup)?) }))
}

/// A strategy behind a lock and an address table: the registry's `address`.
pub struct ByAddress {
    /// Guards no data: what counts is the cost of taking it.
    lock: Lock<()>,
    inner: AddressedStrategy<Box<dyn Strategy>>,
}

impl ByAddress {
    /// The strategy, and the guard that must live until the call has returned.
    fn locked(&mut self) -> (SpinMutexGuard<'_, (), Yield>, &mut AddressedStrategy<Box<dyn Strategy>>) {
        (self.lock.lock(), &mut self.inner)
    }
}

impl Strategy for ByAddress {
    forward!(self => self.locked().1; alloc free used_on control resume_from trim close);
    forward!(self => self.inner; views);

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(ByAddress { lock: Lock::new(()), inner: self.inner.fork_addressed()? }))
    }
}

/// A strategy whose blocks can be named by address.
#[derive(Clone, Debug)]
pub struct AddressedStrategy<S> {
    /// The strategy. Blocks that are allocated or freed through it bypass the address table.
    pub inner: S,
    live: AddressTable,
}

impl<S: Strategy> AddressedStrategy<S> {
    /// `inner` has no live blocks yet.
    pub fn new(inner: S) -> Self {
        AddressedStrategy { inner, live: AddressTable::default() }
    }

    /// The handle of the live block at `address`, without its size.
    fn block_at(&self, address: Address) -> Result<Block, StrategyError> {
        self.live.get(address).ok_or(StrategyError::UnknownBlock { address, slot: u32::MAX })
    }

    /// [`Strategy::free`] of the block that starts at `address`.
    pub fn free_by_address(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
    ) -> Result<Freed, StrategyError> {
        self.free_found(cx, address, caller, |_| true)
    }

    /// [`Strategy::fork`] with a concrete type.
    pub fn fork_addressed(&self) -> Option<AddressedStrategy<Box<dyn Strategy>>> {
        Some(AddressedStrategy { inner: self.inner.fork()?, live: self.live.clone() })
    }

    /// Frees the block at an address if `is_expected` accepts it. One search in the table serves
    /// both checks.
    #[inline]
    fn free_found(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
        is_expected: impl FnOnce(&Block) -> bool,
    ) -> Result<Freed, StrategyError> {
        let Some(block) = self.live.remove(address) else {
            return Err(StrategyError::UnknownBlock { address, slot: u32::MAX });
        };
        if !is_expected(&block) {
            self.put_back(block);
            return Err(StrategyError::UnknownBlock { address, slot: block.slot });
        }
        match self.inner.free(cx, block, caller) {
            Ok(freed) => Ok(freed),
            Err(error) => Err(self.put_back_after(block, error)),
        }
    }

    #[cold]
    fn put_back_after(&mut self, block: Block, error: StrategyError) -> StrategyError {
        self.put_back(block);
        error
    }

    /// A block that could not be freed is still live.
    #[cold]
    fn put_back(&mut self, block: Block) {
        self.live.insert(&block);
    }

    /// [`Strategy::used_on`] of the block that starts at `address`.
    pub fn used_on_by_address(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        stream: StreamId,
    ) -> Result<(), StrategyError> {
        let block = self.block_at(address)?;
        self.inner.used_on(cx, &block, stream)
    }
}

impl<S: Strategy> Strategy for AddressedStrategy<S> {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        // Rebuilt from its parts: passed on as a whole it would be copied.
        match self.inner.alloc(cx, request) {
            Ok(Attempt::Served(block, outcome)) => {
                self.live.insert(&block);
                Ok(Attempt::Served(block, outcome))
            }
            other => other,
        }
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        self.free_found(cx, block.address, caller, |found| {
            found.slot == block.slot && found.generation == block.generation
        })
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        let resumed = self.inner.resume_from(cx, initial)?;
        resumed.iter().flatten().for_each(|block| self.live.insert(block));
        Ok(resumed)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.inner.close(cx)?;
        self.live = AddressTable::default();
        Ok(())
    }

    forward!(self => self.inner; used_on control trim views);

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.fork_addressed()?))
    }
}

const WAYS: usize = 4;
const FEWEST_BUCKETS: usize = 64;

/// A hash table from the address of a block to the rest of its handle, made for one call per alloc
/// and free.
///
/// An address belongs to one bucket: a cache line with four places, all of which are compared at
/// once, so that the branch predictor need not guess the place. A block whose bucket is full goes
/// to an ordered map. The null address is never a key: it marks an empty place. An address is
/// inserted only once.
#[derive(Clone, Debug)]
pub(super) struct AddressTable {
    /// Their number is a power of two.
    buckets: Vec<AddressBucket>,
    /// Blocks whose bucket was full.
    spilled: BTreeMap<Address, SlotHandle>,
    /// How many more blocks fit before the table grows.
    spare: usize,
    /// The shift that turns a hash into a bucket number.
    shift: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct AddressBucket {
    addresses: [Address; WAYS],
    handles: [SlotHandle; WAYS],
}

/// The rest of a block's handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SlotHandle {
    slot: u32,
    generation: u32,
}

impl SlotHandle {
    /// The handle without the size, which strategies do not need to identify a block.
    #[inline]
    fn at(self, address: Address) -> Block {
        Block { address, size: 0, slot: self.slot, generation: self.generation }
    }
}

impl AddressBucket {
    const EMPTY: AddressBucket =
        AddressBucket { addresses: [Address::NULL; WAYS], handles: [SlotHandle { slot: 0, generation: 0 }; WAYS] };

    /// The first place that holds `wanted`. No branch until all four are compared.
    #[inline]
    fn way_of(&self, wanted: Address) -> Option<usize> {
        let [first, second, third, fourth] = self.addresses.map(|address| u32::from(address == wanted));
        let found = first | second << 1 | third << 2 | fourth << 3;
        (found != 0).then(|| found.trailing_zeros() as usize % WAYS)
    }
}

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable::with_buckets(FEWEST_BUCKETS)
    }
}

impl AddressTable {
    fn with_buckets(count: usize) -> AddressTable {
        AddressTable {
            buckets: vec![AddressBucket::EMPTY; count],
            spilled: BTreeMap::new(),
            spare: capacity_of(count),
            shift: 64 - count.trailing_zeros(),
        }
    }

    /// Inserts a block whose address is not in the table.
    #[inline]
    pub(super) fn insert(&mut self, block: &Block) {
        self.place(block.address, SlotHandle { slot: block.slot, generation: block.generation });
    }

    #[inline]
    fn place(&mut self, address: Address, handle: SlotHandle) {
        if address == Address::NULL {
            return;
        }
        if self.spare == 0 {
            self.grow();
        }
        self.spare -= 1;
        let number = self.bucket_of(address);
        let bucket = &mut self.buckets[number];
        match bucket.way_of(Address::NULL) {
            Some(way) => {
                bucket.addresses[way] = address;
                bucket.handles[way] = handle;
            }
            None => self.spill(address, handle),
        }
    }

    /// The handle of the block at this address, without its size.
    #[inline]
    pub(super) fn get(&self, address: Address) -> Option<Block> {
        let bucket = &self.buckets[self.bucket_of(address)];
        match bucket.way_of(address) {
            Some(way) if address != Address::NULL => Some(bucket.handles[way].at(address)),
            _ => self.spilled.get(&address).map(|handle| handle.at(address)),
        }
    }

    /// Removes the block at this address.
    #[inline]
    pub(super) fn remove(&mut self, address: Address) -> Option<Block> {
        let number = self.bucket_of(address);
        let bucket = &mut self.buckets[number];
        let handle = match bucket.way_of(address) {
            Some(way) if address != Address::NULL => {
                bucket.addresses[way] = Address::NULL;
                bucket.handles[way]
            }
            _ => self.spilled.remove(&address)?,
        };
        self.spare += 1;
        Some(handle.at(address))
    }

    #[cold]
    fn spill(&mut self, address: Address, handle: SlotHandle) {
        self.spilled.insert(address, handle);
    }

    #[cold]
    fn grow(&mut self) {
        let twice = AddressTable::with_buckets(self.buckets.len() * 2);
        let former = std::mem::replace(self, twice);
        let places = former.buckets.iter().flat_map(|bucket| bucket.addresses.into_iter().zip(bucket.handles));
        // `place` ignores empty places, whose address is null.
        for (address, handle) in places.chain(former.spilled) {
            self.place(address, handle);
        }
    }

    /// Multiplicative hashing: addresses differ in their middle bits, the product's top bits depend
    /// on all of them.
    #[inline]
    fn bucket_of(&self, address: Address) -> usize {
        (address.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }
}

/// How many blocks a table may hold. With 1.5 per bucket, one in a hundred finds its bucket full.
const fn capacity_of(buckets: usize) -> usize {
    buckets + buckets / 2
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    use super::*;
    use crate::strategy::{Silent, null::Null, test_device::simulated};
    use oomph_base::{MIB, SiteId, ThreadId};

    #[test]
    fn address_is_freed_once() {
        let mut device = simulated(64 * MIB);
        let mut cx = Context { device: &mut *device, sink: &mut Silent };
        let mut strategy = AddressedStrategy::new(Null::default());
        let request = Request { bytes: 512, stream: StreamId(0), thread: ThreadId(0), site: SiteId(0) };
        let Attempt::Served(block, _) = strategy.alloc(&mut cx, &request).unwrap() else { panic!("out of memory") };
        assert_eq!(strategy.block_at(block.address).map(|found| found.slot), Ok(block.slot));
        strategy.used_on_by_address(&mut cx, block.address, StreamId(1)).unwrap();
        let caller = Caller::default();
        assert!(strategy.free_by_address(&mut cx, block.address.offset(256), caller).is_err());
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Ok(Freed::Now));
        let unknown = StrategyError::UnknownBlock { address: block.address, slot: u32::MAX };
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Err(unknown.clone()));
        strategy.alloc(&mut cx, &request).unwrap();
        strategy.close(&mut cx).unwrap();
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Err(unknown));
    }

    #[test]
    fn nested_address_is_refused() {
        let device = simulated(64 * MIB);
        let error = |text: &str| StrategySpec::from(text).build(&Setup { props: device.props(), limit: None }).err();
        assert!(error("address:caching").is_none());
        let complaint = error(&"address:".repeat(16_000)).unwrap().to_string();
        assert!(complaint.contains("already is called by address"), "{complaint}");
    }

    proptest! {
        #[test]
        fn address_table_agrees_with_ordered_map(
            steps in prop::collection::vec((any::<bool>(), 1..400u64, any::<u32>()), 0..1_500),
            // A stride of 2^64 / (golden ratio) would put neighbours side by side; others crowd
            // some buckets.
            stride in prop::sample::select(vec![256u64, 512, 2 << 20, 0x9E37_79B9_7F4A_7C15 | 1, 1 << 44]),
        ) {
            let mut table = AddressTable::default();
            let mut map = BTreeMap::new();
            for (insert, place, slot) in steps {
                let address = Address(place.wrapping_mul(stride).max(1));
                let block = Block { address, size: 0, slot, generation: 0 };
                if insert && !map.contains_key(&address) {
                    table.insert(&block);
                    map.insert(address, block);
                } else {
                    prop_assert_eq!(table.remove(address), map.remove(&address));
                }
                prop_assert_eq!(capacity_of(table.buckets.len()) - table.spare, map.len());
            }
            for place in 0..400u64 {
                let address = Address(place.wrapping_mul(stride).max(1));
                prop_assert_eq!(table.get(address), map.get(&address).copied());
            }
        }
    }

    #[test]
    fn full_buckets_spill() {
        let mut table = AddressTable::default();
        let bucket = table.bucket_of(Address(512));
        let mut neighbours: Vec<Address> = Vec::new();
        neighbours
            .extend((1..).map(|n| Address(n * 512)).filter(|&address| table.bucket_of(address) == bucket).take(7));
        let block = |address| Block { address, size: 0, slot: 7, generation: 9 };
        neighbours.iter().for_each(|&address| table.insert(&block(address)));
        assert_eq!(table.spilled.len(), 3);
        for &address in &neighbours {
            assert_eq!(table.get(address), Some(block(address)));
            assert_eq!(table.remove(address), Some(block(address)));
            assert_eq!(table.remove(address), None);
        }
        assert_eq!(table.spare, capacity_of(FEWEST_BUCKETS));
    }

    #[test]
    fn bucket_fills_one_cache_line() {
        assert_eq!((size_of::<AddressBucket>(), align_of::<AddressBucket>()), (64, 64));
    }

    #[test]
    fn null_address_is_never_found() {
        let mut table = AddressTable::default();
        table.insert(&SlotHandle::default().at(Address::NULL));
        assert_eq!((table.get(Address::NULL), table.remove(Address::NULL)), (None, None));
    }
}
