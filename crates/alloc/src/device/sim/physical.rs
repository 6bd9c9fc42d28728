//! Physical memory: how much there is, how much is taken, and by whom. Which page is which never matters.

/// The physical books of one device.
#[derive(Clone, Debug)]
pub(super) struct PhysicalMemory {
    total: u64,
    overhead: u64,
    held: u64,
}

impl PhysicalMemory {
    /// `overhead` is what the context takes.
    pub(super) fn new(total: u64, overhead: u64) -> PhysicalMemory {
        PhysicalMemory { total, overhead, held: 0 }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// What the context and loaded libraries take.
    pub(super) fn overhead(&self) -> u64 {
        self.overhead
    }

    /// What allocations take.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn free(&self) -> u64 {
        self.total.saturating_sub(self.overhead).saturating_sub(self.held)
    }

    /// Takes memory for an allocation. False, and nothing taken, where there is not enough.
    #[must_use]
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free();
        if fits {
            self.held += bytes;
        }
        fits
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.held -= bytes;
    }

    /// Takes memory for a library, for good. False, and nothing taken, where there is not enough.
    #[must_use]
    pub(super) fn load_library(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free();
        if fits {
            self.overhead += bytes;
        }
        fits
    }
}
