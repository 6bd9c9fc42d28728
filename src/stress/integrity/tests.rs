//! Every strategy keeps contents, and deliberately broken ones are caught by contents alone.

use std::collections::BTreeMap;

use super::*;
use crate::{
    base::{Address, KIB, MIB, StreamId},
    device::{Capabilities, PhysicalId, sim::SimDevice, wrap::LimitedDevice},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome as Found, Refusal, Request,
        STRATEGIES, Shortage, Stats, StrategyError,
    },
};

const MEMORY: u64 = 64 * MIB;
const PAGE: u64 = 2 * MIB;

/// Blocks that fit in a page, of many pages.
fn mixture() -> Mixture {
    Mixture {
        threads: 4,
        streams: 3,
        sizes: Sizes::MIXED.up_to(512 * KIB),
        live_bytes: MEMORY / 4,
        lasting_bytes: MEMORY / 8,
        replaced_one_in: 3,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
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

/// Blocks of powers of two, kept by stream and size, in pages that are mapped one by one; a trim maps all pages anew.
struct Shelves {
    flaw: Flaw,
    pages: Vec<(Address, PhysicalId)>,
    /// What is left of the last page.
    rest: Option<(Address, u64)>,
    free: BTreeMap<(Option<StreamId>, u64), Vec<Address>>,
    live: BTreeMap<Address, (u64, StreamId, Vec<StreamId>)>,
    trims: u32,
}

impl Shelves {
    fn boxed(flaw: Flaw) -> Box<dyn Strategy> {
        let (pages, free, live) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Box::new(Shelves { flaw, pages, rest: None, free, live, trims: 0 })
    }

    fn shelf(&self, stream: StreamId, size: u64) -> (Option<StreamId>, u64) {
        (Some(stream).filter(|_| self.flaw != Flaw::StreamsMixed), size)
    }

    /// Another page; `None` where there is no memory.
    fn grow(&mut self, cx: &mut Context<'_>) -> Result<Option<Address>, StrategyError> {
        let Some(memory) = cx.device.virtual_memory() else { return Ok(None) };
        let shown_before = self.pages.last().map(|&(_, physical)| physical);
        let physical = match shown_before.filter(|_| self.flaw == Flaw::Aliases && self.pages.len() % 2 == 1) {
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

impl Strategy for Shelves {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let mut size = request.bytes.next_power_of_two().max(256);
        if self.flaw == Flaw::Overlap && request.bytes > 256 && request.bytes < size / 2 + size / 8 {
            size /= 2;
        }
        // Shrinking lumps blocks together: what is larger than a page is nobody's flaw.
        if size > PAGE {
            let shortage = Shortage { rounded: size, asked: size, refused_by: Refusal::Size, device_free: None };
            return Ok(Attempt::OutOfMemory(shortage));
        }
        let reused = self.free.get_mut(&self.shelf(request.stream, size)).and_then(Vec::pop);
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
        for user in uses.into_iter().filter(|_| self.flaw != Flaw::IgnoresUses) {
            cx.device.stream_synchronize(user)?;
        }
        self.free.entry(self.shelf(stream, size)).or_default().push(block.address);
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

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        cx.device.synchronize()?;
        self.trims += 1;
        let Some(memory) = cx.device.virtual_memory() else { return Ok(()) };
        let unlucky = self.trims as usize % self.pages.len().max(1);
        for (place, (address, physical)) in self.pages.iter_mut().enumerate() {
            memory.unmap(*address, PAGE)?;
            if self.flaw == Flaw::LosesPage && place == unlucky {
                memory.release(*physical)?;
                *physical = memory.create(PAGE)?;
            }
            memory.map(*address, PAGE, *physical)?;
        }
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let Some(memory) = cx.device.virtual_memory() else { return Ok(()) };
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
        Capabilities { virtual_memory: true, ..Capabilities::NONE }
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}

fn device() -> Box<dyn Device> {
    let sim = SimDevice::new("sim".parse::<crate::device::sim::SimConfig>().unwrap()).unwrap();
    Box::new(LimitedDevice::to(MEMORY, Box::new(sim)))
}

fn keep_flawed(flaw: Flaw, trace: &Trace) -> Kept {
    keep((Shelves::boxed(flaw), device()), trace, &|| false)
}

#[test]
fn an_allocator_without_a_flaw_keeps_all_contents() {
    for seed in 0..5 {
        let kept = keep_flawed(Flaw::None, &story(&mixture(), seed, 1_000));
        assert_eq!(kept.broken, None);
        assert!(kept.tally.blocks >= 1_000 && kept.tally.crossings > 100 && kept.tally.trims > 0, "{:?}", kept.tally);
        assert!(kept.tally.comparisons > kept.tally.blocks + kept.tally.crossings, "{:?}", kept.tally);
    }
}

#[test]
fn every_flaw_is_seen_in_the_contents_and_shrinks_to_a_few_events() {
    for flaw in [Flaw::Overlap, Flaw::StreamsMixed, Flaw::IgnoresUses, Flaw::LosesPage, Flaw::Aliases] {
        let found = (0..5).map(|seed| story(&mixture(), seed, 1_000)).find_map(|trace| {
            let broken = keep_flawed(flaw, &trace).broken?;
            Some((trace, broken))
        });
        let (trace, broken) = found.unwrap_or_else(|| panic!("{flaw:?} is not seen"));
        assert_eq!(broken.0, "contents", "{flaw:?}: {}", broken.1);
        let (smallest, (_, told)) = smallest(&trace, broken, &mut || Some((Shelves::boxed(flaw), device())));
        // To see one page twice takes more than one page.
        let most = if flaw == Flaw::Aliases { 80 } else { 8 };
        assert!(smallest.events.len() <= most, "{flaw:?}: {told}: {:#?}", smallest.events);
        assert!(told.contains("has lost its contents at byte"), "{told}");
        assert_eq!(keep_flawed(Flaw::None, &smallest).broken, None, "{flaw:?}: the program is to blame");
    }
}

#[test]
fn threads_that_share_a_flawed_allocator_see_it_too() {
    let until = Until { blocks: Some(200_000), over: &|| false };
    for flaw in [Flaw::Overlap, Flaw::StreamsMixed, Flaw::Aliases] {
        let shift = crew::work(Shelves::boxed(flaw), device(), &mixture(), 1, &until, &mut |_| {});
        assert!(!shift.damaged.is_empty() && shift.tally.damaged > 0, "{flaw:?}: {:?}", shift.tally);
    }
}

#[test]
fn every_strategy_keeps_its_contents_in_simulation_and_under_threads() {
    for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
        let subject =
            Subject { strategy: spec.clone(), device: "sim".parse().unwrap(), memory_bytes: Some(4 * MEMORY) };
        let integrity = Integrity { subject, threads: 4, streams: 3, sizes: Sizes::MIXED, seed: 1 };
        let until = Until { blocks: Some(1_000), over: &|| false };
        let outcome = integrity.run(&until, &mut |_| {}).unwrap();
        if spec.name == "null" {
            assert_eq!(outcome.skipped.as_deref(), Some("its memory is imaginary"));
            continue;
        }
        assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
        assert!(outcome.tally.blocks >= 1_000, "{spec}: {:?} {:?}", outcome.skipped, outcome.tally);
        let pair = open(&integrity.subject).unwrap().unwrap();
        let outcome = integrity.with_threads(pair.0, pair.1, &until, &mut |_| {});
        assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
        assert!(outcome.tally.blocks >= 1_000 && outcome.tally.damaged == 0, "{spec}: {:?}", outcome.tally);
    }
}

#[test]
fn a_seed_gives_the_same_numbers_again() {
    let run = |seed| {
        let subject =
            Subject { strategy: "caching".into(), device: "sim".parse().unwrap(), memory_bytes: Some(MEMORY) };
        let integrity = Integrity { subject, threads: 2, streams: 4, sizes: Sizes::MIXED, seed };
        let until = Until { blocks: Some(1), over: &|| false };
        Tally { wall_ns: 0, ..integrity.run(&until, &mut |_| {}).unwrap().tally }
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
    assert!(run(3).compared_bytes > 100 * MIB);
}
