//! Known contents: keyed patterns that are written and compared on the device, and bytes copied
//! there and back.
//!
//! Many blocks at once for stress ([`Patterns`]), which waits for nothing; one at a time for tests
//! and `doctor`.

use std::{collections::BTreeMap, ptr};

use cudarc::driver::sys::{self, CUresult};

use super::{
    CudaDevice,
    context::{WITHOUT_TIMES, device_error, succeed},
    kernels::{Kernel, UNIT_BYTES},
};
use crate::device::{
    CallKind, Damage, DeviceError, LONGEST_PATTERN_BYTES, PatternPlace, Patterned, Patterns, Verified, WORD_BYTES,
};
use oomph_base::{Address, KIB, StreamId};

impl CudaDevice {
    /// Copies bytes into a block. Waits for the stream.
    pub fn write(&mut self, stream: StreamId, address: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.must_own(address, bytes.len() as u64)?;
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.drive(call, 0, || {
            // SAFETY: the block is live and long enough, and the bytes are there until the stream
            // is done.
            unsafe {
                let queued = sys::cuMemcpyHtoDAsync_v2(address.0, bytes.as_ptr().cast(), bytes.len(), on_stream);
                first_failure(queued, sys::cuStreamSynchronize(on_stream))
            }
        })
    }

    /// Copies bytes out of a block. Waits for the stream.
    pub fn read(&mut self, stream: StreamId, address: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.must_own(address, bytes.len() as u64)?;
        let on_stream = self.stream(CallKind::Launch, stream)?;
        self.fetch(on_stream, address.0, bytes)
    }

    /// Copies live device memory to the host, and waits for it.
    fn fetch(&mut self, stream: sys::CUstream, from: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.drive(CallKind::Launch, 0, || {
            // SAFETY: the memory is live and as long, and so is the place it is copied to until the
            // stream is done.
            unsafe {
                let queued = sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), stream);
                first_failure(queued, sys::cuStreamSynchronize(stream))
            }
        })
    }

    fn must_own(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        if self.owns(address, bytes) {
            return Ok(());
        }
        self.refuse_because(CallKind::Launch, format!("{bytes} bytes at {address} are not memory of this device"))
    }

    /// Queues launches over all blocks, as many at a time as fit.
    fn queue_blocks(&mut self, stream: StreamId, blocks: &[Patterned], compares: bool) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        for &Patterned { address, bytes, .. } in blocks {
            let holds = address.0.is_multiple_of(UNIT_BYTES) && bytes <= LONGEST_PATTERN_BYTES;
            if !holds || !self.owns(address, bytes) {
                return self.refuse_because(call, format!("{bytes} bytes at {address} cannot hold a pattern"));
            }
        }
        for some in blocks.chunks(MOST_BLOCKS) {
            self.enter(call)?;
            let batch = self.batches.prepare(some).map_err(|code| device_error(call, 0, code))?;
            let kernel = if compares {
                let room = MOST_REPORTS as u64;
                Kernel::VerifyTiles { list: batch.list, tiles: batch.tiles, findings: batch.findings, room }
            } else {
                Kernel::FillTiles { list: batch.list, tiles: batch.tiles }
            };
            let context = self.context;
            let mut batches = std::mem::take(&mut self.batches);
            let queued = self.drive(call, 0, || {
                batches.queue(&batch, compares, on_stream, || context.kernels.launch(on_stream, kernel))
            });
            self.batches = batches;
            queued?;
        }
        Ok(())
    }
}

impl Patterns for CudaDevice {
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_blocks(stream, blocks, false)
    }

    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.queue_blocks(stream, blocks, true)
    }

    fn verified(&mut self) -> Result<Verified, DeviceError> {
        let call = CallKind::Launch;
        self.enter(call)?;
        self.batches.collect_all().map_err(|code| device_error(call, 0, code))?;
        Ok(std::mem::take(&mut self.batches.verified))
    }
}

fn first_failure(first: CUresult, second: CUresult) -> CUresult {
    if first == CUresult::CUDA_SUCCESS { second } else { first }
}

/// The most launches in flight.
const SLOTS: usize = 128;
/// The most blocks of one launch.
const MOST_BLOCKS: usize = 4096;
/// The most tiles of one launch, not counting the first of each block.
const MOST_FULL_TILES: u64 = 4096;
/// The shortest full tile: shorter ones would be more work to list than to write.
const SHORTEST_TILE_BYTES: u64 = 16 * KIB;
/// How many reports a launch has room for; later ones are only counted.
const MOST_REPORTS: usize = 512;

/// Where in a slot the counters are: words that differ, and reports.
const COUNTER_BYTES: usize = 16;
/// Where in a slot the reports begin; the kernel knows it too.
const REPORTS_AT: usize = 64;
/// Where in a slot the list of tiles begins.
const TILES_AT: usize = REPORTS_AT + MOST_REPORTS * size_of::<MismatchReport>();
/// The size of a slot.
const SLOT_BYTES: usize =
    (TILES_AT + (MOST_BLOCKS + MOST_FULL_TILES as usize) * size_of::<PatternTile>()).next_multiple_of(256);

/// A part of a block, as the kernels read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct PatternTile {
    address: u64,
    bytes: u64,
    /// The key in the upper half, the number of the first word in the lower.
    first: u64,
}

/// The first wrong place that one thread found in a tile, as the kernel writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct MismatchReport {
    first: u64,
    offset: u64,
    found: u64,
    is_word: u64,
}

/// Memory for launches over many blocks: lists of tiles in pinned memory, their copies on the
/// device, and the findings of comparisons. It is made when it is first needed.
///
/// Slots are used in turn. One is used again when its launch is done, which its event shows; then
/// its findings are collected. So a launch waits only for the launch that used the same slot
/// before.
#[derive(Debug, Default)]
pub(super) struct PatternBatches {
    memory: Option<SlotMemory>,
    slots: Vec<LaunchSlot>,
    next: usize,
    /// Findings that were collected from slots and not yet fetched.
    pub(super) verified: Verified,
}

/// One allocation on either side, divided into slots.
#[derive(Clone, Copy, Debug)]
struct SlotMemory {
    host: *mut u8,
    device: sys::CUdeviceptr,
}

#[derive(Clone, Copy, Debug)]
struct LaunchSlot {
    done: sys::CUevent,
    queued: Option<QueuedLaunch>,
}

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueuedLaunch {
    Filling,
    Comparing { blocks: u64, bytes: u64 },
}

/// A list of tiles, ready to be copied to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct PatternBatch {
    slot: usize,
    pub(super) tiles: u64,
    bytes: u64,
    blocks: u64,
    /// Where the kernels find the list, and where they report.
    pub(super) list: sys::CUdeviceptr,
    pub(super) findings: sys::CUdeviceptr,
    host: *mut u8,
}

impl PatternBatches {
    /// Bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        if self.memory.is_some() { (SLOTS * SLOT_BYTES) as u64 } else { 0 }
    }

    /// Lists the tiles of at most [`MOST_BLOCKS`] blocks in the next slot, once that is free. The
    /// context is current.
    pub(super) fn prepare(&mut self, blocks: &[Patterned]) -> Result<PatternBatch, CUresult> {
        let memory = self.memory()?;
        let slot = self.next;
        // SAFETY: the event is live.
        succeed(unsafe { sys::cuEventSynchronize(self.slots[slot].done) })?;
        self.collect(slot)?;
        self.next = (slot + 1) % SLOTS;
        let offset = slot * SLOT_BYTES;
        // SAFETY: every slot lies in the piece.
        let host = unsafe { memory.host.add(offset) };
        let findings = memory.device + offset as u64;
        let mut batch = PatternBatch {
            slot,
            tiles: 0,
            bytes: blocks.iter().map(|block| block.bytes).sum(),
            blocks: blocks.len() as u64,
            list: findings + TILES_AT as u64,
            findings,
            host,
        };
        for tile in tiles_of(blocks) {
            // SAFETY: the list has room for the first tile of each block and for all full ones, it
            // is aligned, and no launch reads it: the last one that did is done.
            unsafe { host.add(TILES_AT).cast::<PatternTile>().add(batch.tiles as usize).write(tile) };
            batch.tiles += 1;
        }
        Ok(batch)
    }

    /// Copies the list to the device, lets `launch` queue its kernel, and copies the counters of a
    /// comparison back.
    pub(super) fn queue(
        &mut self,
        batch: &PatternBatch,
        compares: bool,
        stream: sys::CUstream,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let list_bytes = batch.tiles as usize * size_of::<PatternTile>();
        let done = self.slots[batch.slot].done;
        let queue_all = || {
            // SAFETY: both sides are live, long enough, and left alone until the event has
            // happened; so are the counters.
            unsafe {
                succeed(sys::cuMemcpyHtoDAsync_v2(batch.list, batch.host.add(TILES_AT).cast(), list_bytes, stream))?;
                succeed(launch())?;
                if compares {
                    succeed(sys::cuMemcpyDtoHAsync_v2(batch.host.cast(), batch.findings, COUNTER_BYTES, stream))?;
                }
                succeed(sys::cuEventRecord(done, stream))
            }
        };
        match queue_all() {
            Ok(()) => {
                let &PatternBatch { blocks, bytes, .. } = batch;
                let comparing = QueuedLaunch::Comparing { blocks, bytes };
                self.slots[batch.slot].queued = Some(if compares { comparing } else { QueuedLaunch::Filling });
                CUresult::CUDA_SUCCESS
            }
            Err(code) => {
                // The event is not behind what was queued, so wait: nothing of it may run when the
                // slot is used again. SAFETY: the stream is live.
                unsafe { sys::cuStreamSynchronize(stream) };
                code
            }
        }
    }

    /// Collects the findings of every launch that is done. The context is current.
    pub(super) fn collect_all(&mut self) -> Result<(), CUresult> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].queued.is_none() {
                continue;
            }
            // SAFETY: the event is live.
            match unsafe { sys::cuEventQuery(self.slots[slot].done) } {
                CUresult::CUDA_ERROR_NOT_READY => {}
                code => {
                    succeed(code)?;
                    self.collect(slot)?;
                }
            }
        }
        Ok(())
    }

    /// Collects the findings of a launch that is done.
    fn collect(&mut self, slot: usize) -> Result<(), CUresult> {
        let Some(QueuedLaunch::Comparing { blocks, bytes }) = self.slots[slot].queued.take() else { return Ok(()) };
        let Some(memory) = self.memory else { return Ok(()) };
        self.verified.blocks += blocks;
        self.verified.bytes += bytes;
        // SAFETY: the counters lie at the start of the slot, two aligned words that the launch has
        // copied back.
        let [wrong, reports] = unsafe { memory.host.add(slot * SLOT_BYTES).cast::<[u64; 2]>().read_volatile() };
        if wrong > 0 {
            let damaged = fetch_reports(memory, slot, (reports as usize).min(MOST_REPORTS))?;
            self.verified.damaged.extend(first_of_each(&damaged));
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<SlotMemory, CUresult> {
        if let Some(memory) = self.memory {
            return Ok(memory);
        }
        let (mut host, mut device) = (ptr::null_mut(), 0);
        // SAFETY: the pointers are to a live address and a live pointer; what one gave is given
        // back where the other fails.
        unsafe {
            succeed(sys::cuMemAlloc_v2(&raw mut device, SLOTS * SLOT_BYTES))?;
            succeed(sys::cuMemHostAlloc(&raw mut host, SLOTS * SLOT_BYTES, 0)).inspect_err(|_| {
                sys::cuMemFree_v2(device);
            })?;
        }
        let memory = *self.memory.insert(SlotMemory { host: host.cast(), device });
        // SAFETY: the memory is live and that long. Counters are zero before the first launch, on
        // whatever stream.
        unsafe {
            succeed(sys::cuMemsetD8_v2(device, 0, SLOTS * SLOT_BYTES))?;
            succeed(sys::cuStreamSynchronize(ptr::null_mut()))?;
        }
        while self.slots.len() < SLOTS {
            let mut done = ptr::null_mut();
            // SAFETY: the pointer is to a live handle.
            succeed(unsafe { sys::cuEventCreate(&raw mut done, WITHOUT_TIMES) })?;
            self.slots.push(LaunchSlot { done, queued: None });
        }
        Ok(memory)
    }

    /// Gives everything back. The context is current and idle; failures are ignored.
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

/// Copies the reports of a launch that is done, and clears its counters for the next. Slow; there
/// should be none.
#[cold]
fn fetch_reports(memory: SlotMemory, slot: usize, count: usize) -> Result<Vec<MismatchReport>, CUresult> {
    let nothing = MismatchReport { first: 0, offset: 0, found: 0, is_word: 0 };
    let mut reports = vec![nothing; count];
    let findings = memory.device + (slot * SLOT_BYTES) as u64;
    let bytes = count * size_of::<MismatchReport>();
    // SAFETY: both sides are live and that long, and no launch uses the slot.
    unsafe {
        succeed(sys::cuMemcpyDtoH_v2(reports.as_mut_ptr().cast(), findings + REPORTS_AT as u64, bytes))?;
        succeed(sys::cuMemsetD8_v2(findings, 0, COUNTER_BYTES))?;
        succeed(sys::cuStreamSynchronize(ptr::null_mut()))?;
    }
    Ok(reports)
}

/// The first wrong place of every block.
fn first_of_each(reports: &[MismatchReport]) -> impl Iterator<Item = Damage> {
    let mut first_by_key = BTreeMap::new();
    for report in reports {
        let key = (report.first >> 32) as u32;
        let offset = (report.first & 0xffff_ffff) * WORD_BYTES + report.offset;
        let found = Some(PatternPlace::in_word(report.found)).filter(|found| report.is_word == 1 && found.key != 0);
        let damage = Damage { key, offset, found };
        let first = first_by_key.entry(key).or_insert(damage);
        if offset < first.offset {
            *first = damage;
        }
    }
    first_by_key.into_values()
}

/// Cuts blocks into tiles, so that all warps have about the same work.
fn tiles_of(blocks: &[Patterned]) -> impl Iterator<Item = PatternTile> {
    let bytes: u64 = blocks.iter().map(|block| block.bytes).sum();
    let tile_bytes = bytes.div_ceil(MOST_FULL_TILES).next_power_of_two().max(SHORTEST_TILE_BYTES);
    blocks.iter().flat_map(move |block| {
        (0..block.bytes.div_ceil(tile_bytes)).map(move |number| {
            let offset = number * tile_bytes;
            PatternTile {
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
    use oomph_base::{GIB, MIB};

    fn block(address: u64, bytes: u64, key: u32) -> Patterned {
        Patterned { address: Address(address), bytes, key }
    }

    #[test]
    fn tiles_cover_every_block_once_and_fit_in_a_slot() {
        let mixtures = [
            vec![block(0x1000, 1, 1)],
            vec![block(0, 31 * GIB, 1), block(64 * GIB, 17, 2)],
            (0..MOST_BLOCKS as u64).map(|at| block(at * 32 * MIB, 16 * KIB + 1, at as u32)).collect(),
            (0..MOST_BLOCKS as u64).map(|at| block(at * 32 * MIB, 1 + at * 7919, at as u32)).collect(),
        ];
        for blocks in mixtures {
            let tiles: Vec<PatternTile> = tiles_of(&blocks).collect();
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
    fn the_first_mismatch_of_a_block_is_reported() {
        let wrong = |key: u64, tile_word: u64, offset, found: PatternPlace| MismatchReport {
            first: key << 32 | tile_word,
            offset,
            found: found.word(),
            is_word: 1,
        };
        let intruder = PatternPlace { key: 9, offset: 80 };
        let later = PatternPlace { key: 9, offset: 800 };
        let reports = [
            wrong(4, 2048, 16, later),
            wrong(4, 0, 64, intruder),
            MismatchReport { first: 5 << 32, offset: 20, found: 0xab, is_word: 0 },
        ];
        let told: Vec<Damage> = first_of_each(&reports).collect();
        assert_eq!(
            told,
            [Damage { key: 4, offset: 64, found: Some(intruder) }, Damage { key: 5, offset: 20, found: None }]
        );
    }
}
