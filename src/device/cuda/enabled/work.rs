//! Work on streams: what of it is run for real, and what is stood in for.
//!
//! A spin spins. Elementwise work and reductions move their bytes through the last and the first operand, whose
//! contents stay as they are. Copies go to and from a staging buffer of the device's own. Matrix products and attention
//! need libraries that this device does not load: their stream is kept busy for as long as they would take at the
//! published rates of an H200, and no memory is touched.
//!
//! An operand that is not this device's memory is left alone: some strategies hand out imaginary addresses.

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{CudaDevice, answer, context::succeed, kernels::Kernel};
use crate::{
    device::{CallKind, Compute, DeviceError, sim::Rates},
    unit::{Address, MIB, StreamId, Work},
};

/// Size of a staging buffer; longer copies use it again and again.
const STAGING_BYTES: u64 = 64 * MIB;
/// Kernels take memory in words of this many bytes.
const WORD_BYTES: u64 = 8;

/// Memory of the device's own, made when it is first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pinned: Option<*mut u8>,
    pageable: Vec<u8>,
    /// One word of device memory, in which mismatches are counted.
    counter: Option<sys::CUdeviceptr>,
}

impl Staging {
    /// Gives everything back. The context is current and idle, and what fails cannot be helped.
    pub(super) fn free_all(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            // SAFETY: the memory is live and of `cuMemHostAlloc`.
            unsafe { sys::cuMemFreeHost(pinned.cast()) };
        }
        if let Some(counter) = self.counter.take() {
            // SAFETY: the memory is live and of `cuMemAlloc`.
            unsafe { sys::cuMemFree_v2(counter) };
        }
    }

    /// The start of a staging buffer in host memory. The context is current.
    fn buffer(&mut self, pinned: bool) -> Result<*mut u8, CUresult> {
        if !pinned {
            self.pageable.resize(STAGING_BYTES as usize, 0);
            return Ok(self.pageable.as_mut_ptr());
        }
        if let Some(start) = self.pinned {
            return Ok(start);
        }
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        succeed(unsafe { sys::cuMemHostAlloc(&raw mut start, STAGING_BYTES as usize, 0) })?;
        Ok(*self.pinned.insert(start.cast()))
    }

    /// The word in which mismatches are counted. The context is current.
    fn counter(&mut self) -> Result<sys::CUdeviceptr, CUresult> {
        if let Some(counter) = self.counter {
            return Ok(counter);
        }
        let mut counter = 0;
        // SAFETY: the pointer is to a live address.
        succeed(unsafe { sys::cuMemAlloc_v2(&raw mut counter, WORD_BYTES as usize) })?;
        Ok(*self.counter.insert(counter))
    }
}

/// Which way a copy goes.
#[derive(Clone, Copy)]
enum Direction {
    In,
    Out,
}

impl CudaDevice {
    /// Writes the pattern of `key` into a block, in whole words of eight bytes: what [`verify`](CudaDevice::verify)
    /// looks for. Two keys that differ give words that differ.
    pub fn fill(&mut self, stream: StreamId, address: Address, bytes: u64, key: u64) -> Result<(), DeviceError> {
        self.must_own(address, bytes)?;
        self.queue(stream, Kernel::Fill { address: address.0, words: bytes / WORD_BYTES, key })
    }

    /// How many words of a block are not those of `key`'s pattern. Waits for the stream.
    pub fn verify(&mut self, stream: StreamId, address: Address, bytes: u64, key: u64) -> Result<u64, DeviceError> {
        self.must_own(address, bytes)?;
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.context.enter().or_else(|code| answer::result(call, 0, code))?;
        let mismatches = match self.staging.counter() {
            Ok(counter) => counter,
            Err(code) => return answer::result(call, WORD_BYTES, code).map(|()| 0),
        };
        // SAFETY: the counter is two live half words.
        self.drive(call, 0, || unsafe { sys::cuMemsetD32Async(mismatches, 0, 2, on_stream) })?;
        let words = bytes / WORD_BYTES;
        self.queue(stream, Kernel::Verify { address: address.0, words, key, mismatches })?;
        let mut count = 0u64;
        self.drive(call, 0, || {
            // SAFETY: the counter is one live word, and so is the place it is copied to until the stream is done.
            unsafe {
                let queued =
                    sys::cuMemcpyDtoHAsync_v2((&raw mut count).cast(), mismatches, WORD_BYTES as usize, on_stream);
                let done = sys::cuStreamSynchronize(on_stream);
                if queued == CUresult::CUDA_SUCCESS { done } else { queued }
            }
        })?;
        Ok(count)
    }

    /// Queues a kernel whose operands are live.
    fn queue(&mut self, stream: StreamId, kernel: Kernel) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        let context = self.context;
        self.drive(call, 0, || context.kernels.launch(on_stream, kernel))
    }

    /// Copies between staging memory and an operand, the operand again and again if it is shorter.
    fn copy(
        &mut self,
        stream: StreamId,
        direction: Direction,
        bytes: u64,
        pinned: bool,
        operand: (Address, u64),
    ) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.context.enter().or_else(|code| answer::result(call, 0, code))?;
        let host = match self.staging.buffer(pinned) {
            Ok(host) => host,
            Err(code) => return answer::result(call, STAGING_BYTES, code),
        };
        let (Address(address), size) = operand;
        self.drive(call, 0, || {
            let mut left = bytes;
            while left > 0 {
                let piece = left.min(size).min(STAGING_BYTES);
                // SAFETY: operand and staging buffer are both live and at least this long; the staging buffer is
                // freed only after the context was waited for.
                let code = unsafe {
                    match direction {
                        Direction::In => {
                            sys::cuMemcpyHtoDAsync_v2(address, host.cast_const().cast(), piece as usize, on_stream)
                        }
                        Direction::Out => sys::cuMemcpyDtoHAsync_v2(host.cast(), address, piece as usize, on_stream),
                    }
                };
                if code != CUresult::CUDA_SUCCESS {
                    return code;
                }
                left -= piece;
            }
            CUresult::CUDA_SUCCESS
        })
    }

    /// Whether all of a range is memory that this device has handed out.
    fn owns(&self, address: Address, bytes: u64) -> bool {
        self.memory.covers(address, bytes)
            || self.pools.covers(address, bytes)
            || self.virtual_space.covers(address, bytes)
    }

    fn must_own(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        if bytes >= WORD_BYTES && self.owns(address, bytes) {
            return Ok(());
        }
        self.refuse_because(CallKind::Launch, format!("{bytes} bytes at {address} are not memory of this device"))
    }
}

impl Compute for CudaDevice {
    fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        let usable = |operand: Option<&(Address, u64)>| {
            operand.copied().filter(|&(address, bytes)| bytes >= WORD_BYTES && self.owns(address, bytes))
        };
        let (first, last) = (usable(operands.first()), usable(operands.last()));
        match *work {
            Work::Spin { nanos } => self.queue(stream, Kernel::Spin { nanos: nanos.0 }),
            Work::Gemm { .. } | Work::Attention { .. } => {
                let nanos = Rates::H200.duration(work).0;
                self.queue(stream, Kernel::Spin { nanos })
            }
            Work::Elementwise { bytes } => match last {
                // Each word is read and written.
                Some((address, size)) => self.queue(
                    stream,
                    Kernel::Touch { address: address.0, words: size / WORD_BYTES, total: bytes / (2 * WORD_BYTES) },
                ),
                None => Ok(()),
            },
            Work::Reduction { bytes } => match first {
                Some((address, size)) => self.queue(
                    stream,
                    Kernel::Read { address: address.0, words: size / WORD_BYTES, total: bytes / WORD_BYTES },
                ),
                None => Ok(()),
            },
            Work::CopyIn { bytes, pinned } => match last {
                Some(operand) => self.copy(stream, Direction::In, bytes, pinned, operand),
                None => Ok(()),
            },
            Work::CopyOut { bytes, pinned } => match first {
                Some(operand) => self.copy(stream, Direction::Out, bytes, pinned, operand),
                None => Ok(()),
            },
        }
    }
}
