//! Every strategy keeps contents, and flawed ones are found by contents alone.

use std::collections::BTreeMap;

use super::*;
use crate::{
    base::{Address, KIB, MIB, StreamId},
    device::{Capabilities, Device, PhysicalId, sim::SimDevice, wrap::LimitedDevice},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome as Found, Refusal, Request,
        STRATEGIES, Shortage, Stats, Strategy, StrategyError,
    },
};

const MEMORY: u64 = 64 * MIB;
const PAGE: u64 = 2 * MIB;

/// Blocks that fit in a page, of many pages.
fn mix() -> ProgramMix {
    ProgramMix {
        threads: 4,
        streams: 3,
        sizes: BlockSizes::MIXED.up_to(512 * KIB),
        live_bytes: MEMORY / 4,
        long_lived_bytes: MEMORY / 8,
        replaced_one_in: 3,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentsFlaw {
    None,
    /// Requests just above a size get a block of that size.
    Overlap,
    /// What one stream has freed, another one gets at once.
    StreamsMixed,
    /// Other streams that a block is used on are not waited for.
    IgnoresUses,
    /// When memory is mapped anew, one page is another one.
    LosesPage,
    /// Two pages show the same memory.
    Aliases,
}

/// Blocks of powers of two, kept by stream and size, in pages that are mapped one by one; a trim
/// maps all pages anew.
struct PagedAllocator {
    flaw: ContentsFlaw,
    pages: Vec<(Address, PhysicalId)>,
    /// What is left of the last page.
    rest: Option<(Address, u64)>,
    free: BTreeMap<(Option<StreamId>, u64), Vec<Address>>,
    live: BTreeMap<Address, (u64, StreamId, Vec<StreamId>)>,
    trims: u32,
}

impl PagedAllocator {
    fn boxed(flaw: ContentsFlaw) -> Box<dyn Strategy> {
        let (pages, free, live) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Box::new(PagedAllocator { flaw, pages, rest: None, free, live, trims: 0 })
    }

    fn free_list(&self, stream: StreamId, size: u64) -> (Option<StreamId>, u64) {
        (Some(stream).filter(|_| self.flaw != ContentsFlaw::StreamsMixed), size)
    }

    /// Another page; `None` where there is no memory.
    fn grow(&mut self, cx: &mut Context<'_>) -> Result<Option<Address>, StrategyError> {
        let Ok(memory) = cx.device.virtual_memory() else { return Ok(None) };
        let shown_before = self.pages.last().map(|&(_, physical)| physical);
        let physical = match shown_before.filter(|_| self.flaw == ContentsFlaw::Aliases && self.pages.len() % 2 == 1) {
            Some(physical) => physical,
            None => match memory.create(PAGE) {
                Err(error) if error.is_out_of_memory() => return Ok(None),
                created => created?,
            },
        };
        let address = memory.reserve(PAGE)?;
        memory.map(address, PAGE, physical)?;
        memory.set_access(address, PAGE)?;
        self.pages.push((address, physical));
        Ok(Some(address))
    }
}

impl Strategy for PagedAllocator {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let mut size = request.bytes.next_power_of_two().max(256);
        if self.flaw == ContentsFlaw::Overlap && request.bytes > 256 && request.bytes < size / 2 + size / 8 {
            size /= 2;
        }
        // Shrinking joins blocks; the flaws concern blocks up to a page.
        if size > PAGE {
            let shortage = Shortage { rounded: size, asked: size, refused_by: Refusal::Size, device_free: None };
            return Ok(Attempt::OutOfMemory(shortage));
        }
        let reused = self.free.get_mut(&self.free_list(request.stream, size)).and_then(Vec::pop);
        let address = match (reused, self.rest) {
            (Some(address), _) => address,
            (None, Some((address, left))) if left >= size => {
                self.rest = Some((address.offset(size), left - size));
                address
            }
            (None, _) => match self.grow(cx)? {
                Some(address) => {
                    self.rest = Some((address.offset(size), PAGE - size));
                    address
                }
                None => {
                    let shortage =
                        Shortage { rounded: size, asked: PAGE, refused_by: Refusal::Device, device_free: None };
                    return Ok(Attempt::OutOfMemory(shortage));
                }
            },
        };
        self.live.insert(address, (size, request.stream, Vec::new()));
        Ok(Attempt::Served(Block { address, size, slot: 0, generation: 0 }, Found::Split))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let unknown = StrategyError::UnknownBlock { address: block.address, slot: block.slot };
        let (size, stream, uses) = self.live.remove(&block.address).ok_or(unknown)?;
        for user in uses.into_iter().filter(|_| self.flaw != ContentsFlaw::IgnoresUses) {
            cx.device.stream_synchronize(user)?;
        }
        self.free.entry(self.free_list(stream, size)).or_default().push(block.address);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        if let Some((_, _, uses)) = self.live.get_mut(&block.address) {
            uses.push(stream);
        }
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn serves_pools(&self) -> bool {
        false
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        cx.device.synchronize()?;
        self.trims += 1;
        let Ok(memory) = cx.device.virtual_memory() else { return Ok(()) };
        let unlucky = self.trims as usize % self.pages.len().max(1);
        for (place, (address, physical)) in self.pages.iter_mut().enumerate() {
            memory.unmap(*address, PAGE)?;
            if self.flaw == ContentsFlaw::LosesPage && place == unlucky {
                memory.release(*physical)?;
                *physical = memory.create(PAGE)?;
            }
            memory.map(*address, PAGE, *physical)?;
        }
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let Ok(memory) = cx.device.virtual_memory() else { return Ok(()) };
        let mut released = Vec::new();
        for (address, physical) in self.pages.drain(..) {
            memory.unmap(address, PAGE)?;
            memory.address_free(address, PAGE)?;
            if !released.contains(&physical) {
                memory.release(physical)?;
                released.push(physical);
            }
        }
        Ok(())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        None
    }

    fn layout(&self) -> Option<Layout> {
        None
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn requires(&self) -> Capabilities {
        Capabilities::VIRTUAL_MEMORY
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}

fn device() -> Box<dyn Device> {
    let sim = SimDevice::new("sim".parse::<crate::device::sim::SimConfig>().unwrap()).unwrap();
    Box::new(LimitedDevice::to(MEMORY, Box::new(sim)))
}

fn play_flawed(flaw: ContentsFlaw, trace: &Trace) -> IntegrityRun {
    play((PagedAllocator::boxed(flaw), device()), trace, &|| false)
}

#[test]
fn flawless_allocator_keeps_contents() {
    for seed in 0..5 {
        let run = play_flawed(ContentsFlaw::None, &integrity_program(&mix(), seed, 1_000));
        assert_eq!(run.broken, None);
        assert!(run.counts.blocks >= 1_000 && run.counts.crossings > 100 && run.counts.trims > 0, "{:?}", run.counts);
        assert!(run.counts.comparisons > run.counts.blocks + run.counts.crossings, "{:?}", run.counts);
    }
}

#[test]
fn every_flaw_is_found_by_contents() {
    for flaw in [
        ContentsFlaw::Overlap,
        ContentsFlaw::StreamsMixed,
        ContentsFlaw::IgnoresUses,
        ContentsFlaw::LosesPage,
        ContentsFlaw::Aliases,
    ] {
        let found = (0..5).map(|seed| integrity_program(&mix(), seed, 1_000)).find_map(|trace| {
            let broken = play_flawed(flaw, &trace).broken?;
            Some((trace, broken))
        });
        let (trace, broken) = found.unwrap_or_else(|| panic!("{flaw:?} is not seen"));
        assert_eq!(broken.0, "contents", "{flaw:?}: {}", broken.1);
        let (smallest, (_, detail)) = smallest(
            &trace,
            broken,
            &mut |trace| play((PagedAllocator::boxed(flaw), device()), trace, &|| false).broken,
            &|| false,
        );
        // Two mappings of one page need more than one page.
        let most = if flaw == ContentsFlaw::Aliases { 80 } else { 8 };
        assert!(smallest.events.len() <= most, "{flaw:?}: {detail}: {:#?}", smallest.events);
        assert!(detail.contains("has lost its contents at byte"), "{detail}");
        assert_eq!(play_flawed(ContentsFlaw::None, &smallest).broken, None, "{flaw:?}: the program is to blame");
    }
}

#[test]
fn threads_find_flaws_too() {
    let until = StopCondition { blocks: Some(200_000), budget: StressBudget::unlimited(&|| false) };
    for flaw in [ContentsFlaw::Overlap, ContentsFlaw::StreamsMixed, ContentsFlaw::Aliases] {
        let run = threads::run_threads(PagedAllocator::boxed(flaw), device(), &mix(), 1, &until, &mut |_| {});
        assert!(!run.damaged.is_empty() && run.counts.damaged > 0, "{flaw:?}: {:?}", run.counts);
    }
}

#[test]
fn every_strategy_keeps_contents() {
    for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
        let target = StressTarget {
            strategy: spec.clone(),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(4 * MEMORY),
            varies_memory: false,
        };
        let integrity = EnduranceTest { target, threads: 4, streams: 3, sizes: BlockSizes::MIXED, seed: 1 };
        let until = StopCondition { blocks: Some(1_000), budget: StressBudget::unlimited(&|| false) };
        let outcome = integrity.run(&until, &mut |_| {});
        if spec.name == "null" {
            assert_eq!(outcome.unwrap_err().to_string(), "its memory is imaginary");
            continue;
        }
        let outcome = outcome.unwrap();
        assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
        assert!(outcome.counts.blocks >= 1_000, "{spec}: {:?} {:?}", outcome.skipped, outcome.counts);
        let opened = integrity.target.open_with_contents().unwrap();
        let outcome = integrity.with_threads(opened, &until, &mut |_| {});
        assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
        assert!(outcome.counts.blocks >= 1_000 && outcome.counts.damaged == 0, "{spec}: {:?}", outcome.counts);
    }
}

#[test]
fn same_seed_gives_the_same_counts() {
    let run = |seed| {
        let target = StressTarget {
            strategy: "caching".into(),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(MEMORY),
            varies_memory: false,
        };
        let integrity = EnduranceTest { target, threads: 2, streams: 4, sizes: BlockSizes::MIXED, seed };
        let until = StopCondition { blocks: Some(1), budget: StressBudget::unlimited(&|| false) };
        IntegrityCounts { wall_ns: 0, ..integrity.run(&until, &mut |_| {}).unwrap().counts }
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
    assert!(run(3).compared_bytes > 100 * MIB);
}
