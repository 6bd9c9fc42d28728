//! Memory for launches over many blocks: lists of tiles in pinned memory, their copies on the device, and what the
//! comparisons found.
//!
//! Slots go round. One is used again when its launch is done, which its event tells; that is also when what was found in
//! it is taken over. So a launch waits for nothing but for the one that many launches ago had the same slot.

use std::{collections::BTreeMap, ptr};

use cudarc::driver::sys::{self, CUresult};

use super::{context::succeed, streams::WITHOUT_TIMES};
use crate::device::{Damage, Patterned, Verified, WORD_BYTES, Written};
use oomph_base::KIB;

/// How many launches may be under way.
const SLOTS: usize = 128;
/// The most blocks of one launch.
pub(super) const MOST_BLOCKS: usize = 4096;
/// The most tiles of one launch, beside one that each block begins.
const MOST_FULL_TILES: u64 = 4096;
/// The shortest full tile: shorter ones would be more work to list than to write.
const SHORTEST_TILE_BYTES: u64 = 16 * KIB;
/// How many reports a launch has room for. Only their number is known of those beyond.
const MOST_REPORTS: usize = 512;

/// Where in a slot the counters are: words that differ, and reports.
const COUNTER_BYTES: usize = 16;
/// Where in a slot the reports begin; the kernel knows it too.
const REPORTS_AT: usize = 64;
/// Where in a slot the list of tiles begins.
const TILES_AT: usize = REPORTS_AT + MOST_REPORTS * size_of::<Report>();
/// From one slot to the next.
const SLOT_BYTES: usize =
    (TILES_AT + (MOST_BLOCKS + MOST_FULL_TILES as usize) * size_of::<Tile>()).next_multiple_of(256);

/// A part of a block, as the kernels read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Tile {
    address: u64,
    bytes: u64,
    /// The key in the upper half, the number of the first word in the lower.
    first: u64,
}

/// The first wrong place that one thread found in a tile, as the kernel writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Report {
    first: u64,
    offset: u64,
    found: u64,
    is_word: u64,
}

/// The slots, made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Batches {
    memory: Option<Memory>,
    slots: Vec<Slot>,
    next: usize,
    /// What was taken over from slots and not yet asked for.
    pub(super) verified: Verified,
}

/// One piece on either side, cut into slots.
#[derive(Clone, Copy, Debug)]
struct Memory {
    host: *mut u8,
    device: sys::CUdeviceptr,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    done: sys::CUevent,
    under_way: Option<UnderWay>,
}

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnderWay {
    Filling,
    Comparing { blocks: u64, bytes: u64 },
}

/// A list of tiles, ready to be carried to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    slot: usize,
    pub(super) tiles: u64,
    bytes: u64,
    blocks: u64,
    /// Where the kernels find the list, and where they report.
    pub(super) list: sys::CUdeviceptr,
    pub(super) findings: sys::CUdeviceptr,
    host: *mut u8,
}

impl Batches {
    /// Bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        if self.memory.is_some() { (SLOTS * SLOT_BYTES) as u64 } else { 0 }
    }

    /// How many reports the kernel may write.
    pub(super) const fn room() -> u64 {
        MOST_REPORTS as u64
    }

    /// Lists the tiles of at most [`MOST_BLOCKS`] blocks in the next slot, once that is free. The context is current.
    pub(super) fn prepare(&mut self, blocks: &[Patterned]) -> Result<Batch, CUresult> {
        let memory = self.memory()?;
        let slot = self.next;
        // SAFETY: the event is live.
        succeed(unsafe { sys::cuEventSynchronize(self.slots[slot].done) })?;
        self.take_over(slot)?;
        self.next = (slot + 1) % SLOTS;
        let offset = slot * SLOT_BYTES;
        // SAFETY: every slot lies in the piece.
        let host = unsafe { memory.host.add(offset) };
        let findings = memory.device + offset as u64;
        let mut batch = Batch {
            slot,
            tiles: 0,
            bytes: blocks.iter().map(|block| block.bytes).sum(),
            blocks: blocks.len() as u64,
            list: findings + TILES_AT as u64,
            findings,
            host,
        };
        for tile in tiles_of(blocks) {
            // SAFETY: the list has room for a tile that each block begins and for all full ones, it is aligned, and no
            // launch reads it: the last one that did is done.
            unsafe { host.add(TILES_AT).cast::<Tile>().add(batch.tiles as usize).write(tile) };
            batch.tiles += 1;
        }
        Ok(batch)
    }

    /// Carries the list over, lets `launch` queue its kernel, and carries the counters of a comparison back.
    pub(super) fn queue(
        &mut self,
        batch: &Batch,
        compares: bool,
        stream: sys::CUstream,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let list_bytes = batch.tiles as usize * size_of::<Tile>();
        let done = self.slots[batch.slot].done;
        let queued = || {
            // SAFETY: both sides are live, long enough, and left alone until the event has happened; so are the counters.
            unsafe {
                succeed(sys::cuMemcpyHtoDAsync_v2(batch.list, batch.host.add(TILES_AT).cast(), list_bytes, stream))?;
                succeed(launch())?;
                if compares {
                    succeed(sys::cuMemcpyDtoHAsync_v2(batch.host.cast(), batch.findings, COUNTER_BYTES, stream))?;
                }
                succeed(sys::cuEventRecord(done, stream))
            }
        };
        match queued() {
            Ok(()) => {
                let &Batch { blocks, bytes, .. } = batch;
                let comparing = UnderWay::Comparing { blocks, bytes };
                self.slots[batch.slot].under_way = Some(if compares { comparing } else { UnderWay::Filling });
                CUresult::CUDA_SUCCESS
            }
            Err(code) => {
                // The event does not stand behind what was queued: nothing of it may be left when the slot is used again.
                // SAFETY: the stream is live.
                unsafe { sys::cuStreamSynchronize(stream) };
                code
            }
        }
    }

    /// Takes over from every launch that is done. The context is current.
    pub(super) fn take_over_all(&mut self) -> Result<(), CUresult> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].under_way.is_none() {
                continue;
            }
            // SAFETY: the event is live.
            match unsafe { sys::cuEventQuery(self.slots[slot].done) } {
                CUresult::CUDA_ERROR_NOT_READY => {}
                code => {
                    succeed(code)?;
                    self.take_over(slot)?;
                }
            }
        }
        Ok(())
    }

    /// Takes over what a launch found that is done.
    fn take_over(&mut self, slot: usize) -> Result<(), CUresult> {
        let Some(UnderWay::Comparing { blocks, bytes }) = self.slots[slot].under_way.take() else { return Ok(()) };
        let Some(memory) = self.memory else { return Ok(()) };
        self.verified.blocks += blocks;
        self.verified.bytes += bytes;
        // SAFETY: the counters lie at the start of the slot, two aligned words that the launch has carried back.
        let [wrong, reports] = unsafe { memory.host.add(slot * SLOT_BYTES).cast::<[u64; 2]>().read_volatile() };
        if wrong > 0 {
            let damaged = fetch_reports(memory, slot, (reports as usize).min(MOST_REPORTS))?;
            self.verified.damaged.extend(first_of_each(&damaged));
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<Memory, CUresult> {
        if let Some(memory) = self.memory {
            return Ok(memory);
        }
        let (mut host, mut device) = (ptr::null_mut(), 0);
        // SAFETY: the pointers are to a live address and a live pointer; what one gave is given back where the other fails.
        unsafe {
            succeed(sys::cuMemAlloc_v2(&raw mut device, SLOTS * SLOT_BYTES))?;
            succeed(sys::cuMemHostAlloc(&raw mut host, SLOTS * SLOT_BYTES, 0)).inspect_err(|_| {
                sys::cuMemFree_v2(device);
            })?;
        }
        let memory = *self.memory.insert(Memory { host: host.cast(), device });
        // SAFETY: the memory is live and that long. Counters are zero before the first launch, on whatever stream.
        unsafe {
            succeed(sys::cuMemsetD8_v2(device, 0, SLOTS * SLOT_BYTES))?;
            succeed(sys::cuStreamSynchronize(ptr::null_mut()))?;
        }
        while self.slots.len() < SLOTS {
            let mut done = ptr::null_mut();
            // SAFETY: the pointer is to a live handle.
            succeed(unsafe { sys::cuEventCreate(&raw mut done, WITHOUT_TIMES) })?;
            self.slots.push(Slot { done, under_way: None });
        }
        Ok(memory)
    }

    /// Gives everything back. The context is current and idle, and what fails cannot be helped.
    pub(super) fn free_all(&mut self) {
        for slot in self.slots.drain(..) {
            // SAFETY: the event was made here and is destroyed only here.
            unsafe { sys::cuEventDestroy_v2(slot.done) };
        }
        if let Some(memory) = self.memory.take() {
            // SAFETY: both pieces are live and were made here.
            unsafe {
                sys::cuMemFree_v2(memory.device);
                sys::cuMemFreeHost(memory.host.cast());
            }
        }
    }
}

/// Copies the reports of a launch that is done, and clears its counters for the next. Slow; there should be none.
#[cold]
fn fetch_reports(memory: Memory, slot: usize, count: usize) -> Result<Vec<Report>, CUresult> {
    let nothing = Report { first: 0, offset: 0, found: 0, is_word: 0 };
    let mut reports = vec![nothing; count];
    let findings = memory.device + (slot * SLOT_BYTES) as u64;
    let bytes = count * size_of::<Report>();
    // SAFETY: both sides are live and that long, and no launch uses the slot.
    unsafe {
        succeed(sys::cuMemcpyDtoH_v2(reports.as_mut_ptr().cast(), findings + REPORTS_AT as u64, bytes))?;
        succeed(sys::cuMemsetD8_v2(findings, 0, COUNTER_BYTES))?;
        succeed(sys::cuStreamSynchronize(ptr::null_mut()))?;
    }
    Ok(reports)
}

/// The first wrong place of every block.
fn first_of_each(reports: &[Report]) -> impl Iterator<Item = Damage> {
    let mut first_by_key = BTreeMap::new();
    for report in reports {
        let key = (report.first >> 32) as u32;
        let offset = (report.first & 0xffff_ffff) * WORD_BYTES + report.offset;
        let found = Some(Written::in_word(report.found)).filter(|found| report.is_word == 1 && found.key != 0);
        let damage = Damage { key, offset, found };
        let first = first_by_key.entry(key).or_insert(damage);
        if offset < first.offset {
            *first = damage;
        }
    }
    first_by_key.into_values()
}

/// Cuts blocks into tiles, so that all warps have about as much to do.
fn tiles_of(blocks: &[Patterned]) -> impl Iterator<Item = Tile> {
    let bytes: u64 = blocks.iter().map(|block| block.bytes).sum();
    let tile_bytes = bytes.div_ceil(MOST_FULL_TILES).next_power_of_two().max(SHORTEST_TILE_BYTES);
    blocks.iter().flat_map(move |block| {
        (0..block.bytes.div_ceil(tile_bytes)).map(move |number| {
            let offset = number * tile_bytes;
            Tile {
                address: block.address.0 + offset,
                bytes: tile_bytes.min(block.bytes - offset),
                first: (u64::from(block.key) << 32) + offset / WORD_BYTES,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{Address, GIB, MIB};

    fn block(address: u64, bytes: u64, key: u32) -> Patterned {
        Patterned { address: Address(address), bytes, key }
    }

    #[test]
    fn tiles_cover_every_block_once_and_are_never_more_than_a_slot_holds() {
        let mixtures = [
            vec![block(0x1000, 1, 1)],
            vec![block(0, 31 * GIB, 1), block(64 * GIB, 17, 2)],
            (0..MOST_BLOCKS as u64).map(|at| block(at * 32 * MIB, 16 * KIB + 1, at as u32)).collect(),
            (0..MOST_BLOCKS as u64).map(|at| block(at * 32 * MIB, 1 + at * 7919, at as u32)).collect(),
        ];
        for blocks in mixtures {
            let tiles: Vec<Tile> = tiles_of(&blocks).collect();
            assert!(tiles.len() <= MOST_BLOCKS + MOST_FULL_TILES as usize, "{}", tiles.len());
            let mut tiles = tiles.into_iter();
            for block in &blocks {
                let mut offset = 0;
                while offset < block.bytes {
                    let tile = tiles.next().unwrap();
                    assert_eq!(tile.address, block.address.0 + offset);
                    assert_eq!(tile.first, (u64::from(block.key) << 32) + offset / WORD_BYTES);
                    assert!(tile.address.is_multiple_of(16));
                    offset += tile.bytes;
                }
                assert_eq!(offset, block.bytes);
            }
            assert_eq!(tiles.next(), None);
        }
    }

    #[test]
    fn of_many_reports_about_a_block_the_first_place_is_told() {
        let wrong = |key: u64, tile_word: u64, offset, found: Written| Report {
            first: key << 32 | tile_word,
            offset,
            found: found.word(),
            is_word: 1,
        };
        let intruder = Written { key: 9, offset: 80 };
        let later = Written { key: 9, offset: 800 };
        let reports = [
            wrong(4, 2048, 16, later),
            wrong(4, 0, 64, intruder),
            Report { first: 5 << 32, offset: 20, found: 0xab, is_word: 0 },
        ];
        let told: Vec<Damage> = first_of_each(&reports).collect();
        assert_eq!(
            told,
            [Damage { key: 4, offset: 64, found: Some(intruder) }, Damage { key: 5, offset: 20, found: None }]
        );
    }
}
