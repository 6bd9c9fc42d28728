//! `liboomph.so`: our strategies behind PyTorch's pluggable-allocator interface.
//!
//! ```python
//! allocator = torch.cuda.memory.CUDAPluggableAllocator("liboomph.so", "oomph_alloc", "oomph_free")
//! torch.cuda.memory.change_current_allocator(allocator)
//! ```
//!
//! `exports` has the exported functions, over one [`AllocatorService`] per process, which has a
//! `GpuService` per GPU. Calls come from any thread and on any stream; each GPU serves one at a
//! time. The environment selects the strategy ([`ServiceSettings`]): a library that PyTorch loads
//! has no command line.

mod comparison;
mod exports;
mod gpu_service;
mod history;
mod settings;

pub use exports::{oomph_alloc, oomph_free, oomph_memory_fraction, oomph_record_stream, oomph_reserved, oomph_reset};
pub use exports::{
    oomph_on_out_of_memory, oomph_record, oomph_reset_peaks, oomph_reset_totals, oomph_snapshot, oomph_statistics,
    oomph_text_free,
};

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::Serialize;

use self::{
    comparison::NativeVerdict,
    gpu_service::GpuService,
    history::{GpuSnapshot, HistorySettings, StackTable, StackTexts, VALUES},
    settings::{OutOfMemorySignal, ServiceSettings},
};
use oomph_alloc::device::{DeviceSpecError, MissingCapabilities};
use oomph_alloc::strategy::{SpecError, Stats, StrategyError};
use oomph_base::{Address, Bytes};

/// Why a call cannot be served. Out of memory is not an error.
#[derive(Debug, thiserror::Error)]
enum ServiceError {
    /// The GPU cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// The strategy refuses its parameters on this GPU.
    #[error(transparent)]
    Strategy(#[from] SpecError),
    /// The strategy needs an ability that this GPU lacks.
    #[error("{0}, which the strategy needs")]
    Unable(#[from] MissingCapabilities),
    /// The strategy failed.
    #[error(transparent)]
    Call(#[from] StrategyError),
    /// The program freed, or used on another stream, an address that is not a live block.
    #[error("{0} was never allocated, or was freed already")]
    Unknown(Address),
    /// The device number is negative.
    #[error("there is no device {0}")]
    NoDevice(i32),
}

/// The allocator of a program, for all threads, streams and GPUs.
#[derive(Debug)]
struct AllocatorService {
    settings: ServiceSettings,
    /// By device number. A GPU stays open once it was opened.
    gpus: Mutex<BTreeMap<i32, Arc<Mutex<GpuService>>>>,
    /// The history that is kept now.
    history: Mutex<Option<HistorySettings>>,
    /// Whether the stacks of requests are kept.
    with_stacks: AtomicBool,
    stacks: Mutex<StackTable>,
}

impl AllocatorService {
    /// Opens nothing yet: a GPU is opened by the first request for its memory.
    fn new(settings: ServiceSettings) -> AllocatorService {
        AllocatorService {
            settings,
            gpus: Mutex::default(),
            history: Mutex::default(),
            with_stacks: AtomicBool::new(false),
            stacks: Mutex::default(),
        }
    }

    /// A block of at least this size, ordered on the stream with this handle; `None` where memory
    /// has run out.
    fn alloc(&self, bytes: u64, device: i32, stream: u64) -> Result<Option<Address>, ServiceError> {
        // Before any lock is taken: it may wait for Python's.
        let stack = self.with_stacks.load(Ordering::Relaxed).then(|| history::capture(&self.stacks));
        let gpu = self.gpu(device)?;
        let mut gpu = lock(&gpu);
        gpu.watch.caller = stack.unwrap_or_default();
        gpu.alloc(bytes, stream)
    }

    /// Frees a block of a request for `bytes`.
    fn free(&self, address: Address, bytes: u64, device: i32, stream: u64) -> Result<(), ServiceError> {
        let gpu = self.opened(device).ok_or(ServiceError::Unknown(address))?;
        lock(&gpu).free(address, bytes, stream)
    }

    /// Notes that a block is also used on the stream with this handle. PyTorch's interface does not
    /// name the GPU.
    fn record_stream(&self, address: Address, stream: u64) -> Result<(), ServiceError> {
        for gpu in self.all() {
            if lock(&gpu).record_stream(address, stream)? {
                return Ok(());
            }
        }
        Err(ServiceError::Unknown(address))
    }

    /// Gives cached memory back, on all GPUs.
    fn reset(&self) -> Result<(), ServiceError> {
        self.all().iter().try_for_each(|gpu| lock(gpu).trim())
    }

    /// PyTorch's `set_per_process_memory_fraction`.
    fn memory_fraction(&self, fraction: f64, device: i32) -> Result<(), ServiceError> {
        let gpu = self.gpu(device)?;
        lock(&gpu).memory_fraction(fraction)
    }

    /// Bytes held on a GPU now; 0 for one that was not used yet.
    fn reserved(&self, device: i32) -> u64 {
        self.opened(device).map_or(0, |gpu| lock(&gpu).reserved())
    }

    /// The counters of a GPU; zeros for one that was not used yet.
    fn values(&self, device: i32) -> [u64; VALUES] {
        self.opened(device).map_or([0; VALUES], |gpu| lock(&gpu).values())
    }

    /// Begins a history on all GPUs, or ends it.
    fn record(&self, history: Option<HistorySettings>, with_stacks: bool, clear: bool) {
        *lock(&self.history) = history;
        self.with_stacks.store(with_stacks && history.is_some(), Ordering::Relaxed);
        self.all().iter().for_each(|gpu| lock(gpu).watch.record(history, clear));
    }

    /// The memory of all GPUs now, and their history.
    fn snapshot(&self, events: bool) -> ServiceSnapshot {
        let devices = self.all().iter().map(|gpu| lock(gpu).snapshot(events)).collect();
        ServiceSnapshot { strategy: self.settings.strategy.to_string(), devices, stacks: lock(&self.stacks).texts() }
    }

    /// The statistics of every GPU. A GPU where a call hangs is left out, because this is called
    /// when the program ends.
    fn statistics(&self) -> ServiceStatistics {
        let devices = self.all().iter().filter_map(|gpu| Some(gpu.try_lock().ok()?.statistics())).collect();
        let strategy = self.settings.strategy.to_string();
        ServiceStatistics { schema: 1, strategy, limit_bytes: self.settings.limit, devices }
    }

    fn gpu(&self, device: i32) -> Result<Arc<Mutex<GpuService>>, ServiceError> {
        if device < 0 {
            return Err(ServiceError::NoDevice(device));
        }
        let mut gpus = lock(&self.gpus);
        if let Some(gpu) = gpus.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Mutex::new(GpuService::open(device, &self.settings, *lock(&self.history))?));
        gpus.insert(device, Arc::clone(&gpu));
        Ok(gpu)
    }

    fn opened(&self, device: i32) -> Option<Arc<Mutex<GpuService>>> {
        lock(&self.gpus).get(&device).cloned()
    }

    fn all(&self) -> Vec<Arc<Mutex<GpuService>>> {
        lock(&self.gpus).values().cloned().collect()
    }
}

/// Locks a GPU or the table of GPUs. After a panic it stays usable, because a strategy keeps its
/// state consistent through every error.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `oomph_snapshot` returns, as JSON.
#[derive(Debug, Serialize)]
struct ServiceSnapshot {
    strategy: String,
    devices: Vec<GpuSnapshot>,
    #[serde(flatten)]
    stacks: StackTexts,
}

/// Statistics of all GPUs, written when the program ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct ServiceStatistics {
    /// The version of this format.
    schema: u32,
    /// The strategy.
    strategy: String,
    /// The limit per GPU.
    limit_bytes: Option<u64>,
    /// In the order of their numbers.
    devices: Vec<GpuStatistics>,
}

/// Statistics of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct GpuStatistics {
    /// Its device number.
    device: i32,
    /// Its name.
    name: String,
    /// The number of streams of the program.
    streams: u64,
    /// Driver calls.
    driver_calls: u64,
    /// The strategy's statistics.
    stats: Stats,
    /// The strategy's own counters.
    details: BTreeMap<String, u64>,
    /// What PyTorch's own allocator would have done, if that was asked for.
    native: Option<NativeVerdict>,
}

impl GpuStatistics {
    /// The sentence that compares with PyTorch's own allocator.
    fn write_comparison(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(native) = &self.native else { return Ok(()) };
        let own = self.stats.peak.reserved;
        write!(f, "oomph: device {}: peak reserved {}; ", self.device, Bytes(own))?;
        match native {
            NativeVerdict::Unknown(reason) => {
                writeln!(f, "what PyTorch's own allocator would have reserved is not known: {reason}")
            }
            NativeVerdict::RanOut { requests } => {
                let plural = if *requests == 1 { "" } else { "s" };
                writeln!(f, "PyTorch's own allocator would have failed to serve {requests} of the same request{plural}")
            }
            &NativeVerdict::Served { peak_reserved, depends_on_time } => {
                let about = if depends_on_time { "about " } else { "" };
                let percent = (peak_reserved as f64 / own.max(1) as f64 - 1.0) * 100.0;
                let difference = match percent.round().abs() {
                    0.0 => "the same within 0.5 %".to_owned(),
                    percent if peak_reserved > own => format!("{percent:.0} % more"),
                    percent => format!("{percent:.0} % less"),
                };
                writeln!(
                    f,
                    "PyTorch's own allocator would have reserved {about}{} for the same requests ({difference})",
                    Bytes(peak_reserved)
                )
            }
        }
    }
}

impl fmt::Display for ServiceStatistics {
    /// One line per GPU, and one that compares.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for gpu in &self.devices {
            let GpuStatistics { device, name, stats, .. } = gpu;
            let [reserved, allocated] = [stats.peak.reserved, stats.peak.allocated].map(Bytes);
            writeln!(
                f,
                "oomph: {} on device {device} ({name}): peak reserved {reserved}, peak allocated {allocated}, \
                 {} allocs, {} frees, {} live, {} retries, {} out of memory",
                self.strategy, stats.allocs, stats.frees, stats.live_blocks, stats.retries, stats.ooms
            )?;
            gpu.write_comparison(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_opened_by_its_first_request() {
        let variables = |name: &str| match name {
            "OOMPH_STRATEGY" => Some("caching".to_owned()),
            "OOMPH_DEVICE" => Some("sim".to_owned()),
            _ => None,
        };
        let service = AllocatorService::new(ServiceSettings::read(variables).unwrap());
        let block = service.alloc(1 << 20, 0, 0).unwrap().unwrap();
        assert_eq!(service.reserved(0), 2 << 20);
        service.free(block, 1 << 20, 0, 0).unwrap();
    }
}
