//! Host memory of the device's own, which copies go to and from where the program names none.

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{context::succeed, kernels};
use oomph_base::MIB;

/// Size of a staging buffer; longer copies use it again and again.
pub(super) const STAGING_BYTES: u64 = 64 * MIB;

/// The two buffers, made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pinned: Option<*mut u64>,
    pageable: Vec<u64>,
}

impl Staging {
    /// The start of a staging buffer. The context is current.
    pub(super) fn buffer(&mut self, pinned: bool) -> Result<*mut u8, CUresult> {
        let words = (STAGING_BYTES / 8) as usize;
        if !pinned {
            if self.pageable.is_empty() {
                self.pageable = (0..words as u64).map(kernels::plausible_numbers).collect();
            }
            return Ok(self.pageable.as_mut_ptr().cast());
        }
        if let Some(start) = self.pinned {
            return Ok(start.cast());
        }
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        succeed(unsafe { sys::cuMemHostAlloc(&raw mut start, STAGING_BYTES as usize, 0) })?;
        let start: *mut u64 = start.cast();
        for word in 0..words {
            // SAFETY: the buffer is this many words long, on a boundary of pages, and nobody else's yet.
            unsafe { start.add(word).write(kernels::plausible_numbers(word as u64)) };
        }
        self.pinned = Some(start);
        Ok(start.cast())
    }

    /// Gives everything back. The context is current and idle, and what fails cannot be helped.
    pub(super) fn free_all(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            // SAFETY: the memory is live and of `cuMemHostAlloc`.
            unsafe { sys::cuMemFreeHost(pinned.cast()) };
        }
    }
}
