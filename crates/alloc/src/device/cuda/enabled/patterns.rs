//! Known contents: keyed patterns that are written and looked for on the device, and bytes carried there and back.
//!
//! Many blocks at once for stress ([`Patterns`]), which waits for nothing; one at a time for tests and `doctor`.

use cudarc::driver::sys::{self, CUresult};

use super::{
    CudaDevice, answer,
    batches::{Batches, MOST_BLOCKS},
    kernels::{Kernel, UNIT_BYTES},
};
use crate::device::{CallKind, DeviceError, LONGEST_PATTERN_BYTES, Patterned, Patterns, Verified, WORD_BYTES};
use oomph_base::{Address, StreamId};

impl CudaDevice {
    /// Writes the pattern of `key` into a block, in whole words of eight bytes: what [`verify`](CudaDevice::verify)
    /// looks for. Two keys that differ give words that differ.
    pub fn fill(&mut self, stream: StreamId, address: Address, bytes: u64, key: u64) -> Result<(), DeviceError> {
        self.must_hold_a_word(address, bytes)?;
        self.queue(stream, Kernel::Fill { address: address.0, words: bytes / WORD_BYTES, key })
    }

    /// How many words of a block are not those of `key`'s pattern. Waits for the stream.
    pub fn verify(&mut self, stream: StreamId, address: Address, bytes: u64, key: u64) -> Result<u64, DeviceError> {
        self.must_hold_a_word(address, bytes)?;
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.context.enter().or_else(|code| answer::result(call, 0, code))?;
        let mismatches = match self.scratch.counter() {
            Ok(counter) => counter,
            Err(code) => return answer::result(call, WORD_BYTES, code).map(|()| 0),
        };
        // SAFETY: the counter is two live half words.
        self.drive(call, 0, || unsafe { sys::cuMemsetD32Async(mismatches, 0, 2, on_stream) })?;
        let words = bytes / WORD_BYTES;
        self.queue(stream, Kernel::Verify { address: address.0, words, key, mismatches })?;
        let mut count = [0; WORD_BYTES as usize];
        self.fetch(on_stream, mismatches, &mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Carries bytes into a block. Waits for the stream.
    pub fn write(&mut self, stream: StreamId, address: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.must_own(address, bytes.len() as u64)?;
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.drive(call, 0, || {
            // SAFETY: the block is live and long enough, and the bytes are there until the stream is done.
            unsafe {
                let queued = sys::cuMemcpyHtoDAsync_v2(address.0, bytes.as_ptr().cast(), bytes.len(), on_stream);
                first_failure(queued, sys::cuStreamSynchronize(on_stream))
            }
        })
    }

    /// Carries bytes out of a block. Waits for the stream.
    pub fn read(&mut self, stream: StreamId, address: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.must_own(address, bytes.len() as u64)?;
        let on_stream = self.stream(CallKind::Launch, stream)?;
        self.fetch(on_stream, address.0, bytes)
    }

    /// Copies device memory that is live, and waits until it is here.
    fn fetch(&mut self, stream: sys::CUstream, from: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.drive(CallKind::Launch, 0, || {
            // SAFETY: the memory is live and as long, and so is the place it is copied to until the stream is done.
            unsafe {
                let queued = sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), stream);
                first_failure(queued, sys::cuStreamSynchronize(stream))
            }
        })
    }

    /// A pattern is one of whole words: of less than one nothing would be written, and nothing compared.
    fn must_hold_a_word(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        if bytes < WORD_BYTES {
            return self.refuse_because(CallKind::Launch, format!("{bytes} bytes at {address} cannot hold a pattern"));
        }
        self.must_own(address, bytes)
    }

    fn must_own(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        if self.owns(address, bytes) {
            return Ok(());
        }
        self.refuse_because(CallKind::Launch, format!("{bytes} bytes at {address} are not memory of this device"))
    }
}

impl CudaDevice {
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
            self.context.enter().or_else(|code| answer::result(call, 0, code))?;
            let batch = match self.batches.prepare(some) {
                Ok(batch) => batch,
                Err(code) => return answer::result(call, 0, code),
            };
            let kernel = if compares {
                let room = Batches::room();
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
        let taken = self.context.enter().and_then(|()| self.batches.take_over_all());
        taken.or_else(|code| answer::result(call, 0, code))?;
        Ok(std::mem::take(&mut self.batches.verified))
    }
}

fn first_failure(first: CUresult, second: CUresult) -> CUresult {
    if first == CUresult::CUDA_SUCCESS { second } else { first }
}
