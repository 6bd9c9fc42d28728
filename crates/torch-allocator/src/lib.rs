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
mod pools;
mod settings;

pub use exports::{
    oomph_alloc, oomph_free, oomph_memory_fraction, oomph_on_out_of_memory, oomph_record, oomph_record_stream,
    oomph_reserved, oomph_reset, oomph_reset_peaks, oomph_reset_totals, oomph_snapshot, oomph_statistics,
    oomph_text_free,
};
pub use pools::{oomph_begin_pool, oomph_driver_calls, oomph_end_pool, oomph_release_pool, oomph_serves_graphs};

use std::{
    collections::BTreeMap,
    fmt, process,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::Serialize;

use self::{
    comparison::NativeVerdict,
    gpu_service::GpuService,
    history::{GpuSnapshot, HistorySettings, StackTable, StackTexts, VALUES},
    pools::PoolKey,
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
    /// The device number is negative, or above those that PyTorch has.
    #[error("there is no device {0}")]
    NoDevice(i32),
    /// The end or release of a pool that did not begin.
    #[error("pool {0:?} was not begun, or was released already")]
    PoolNotBegun(PoolKey),
    /// A graph is captured under a strategy that does not keep the rules of captures.
    #[error("the strategy {0} serves no captured graphs; oomph and caching do")]
    NoGraphs(String),
}

/// As many devices as PyTorch can have: `C10_COMPILE_TIME_MAX_GPUS`, 2.11.
const MOST_DEVICES: usize = 120;

/// The allocator of a program, for all threads, streams and GPUs.
#[derive(Debug)]
struct AllocatorService {
    settings: ServiceSettings,
    /// The process that opened it. A forked one cannot use its GPUs, and its counters are copies.
    process: u32,
    /// By device number. A GPU stays open once it was opened, so that a request takes one lock only.
    gpus: Vec<OnceLock<Mutex<GpuService>>>,
    /// One GPU is opened at a time.
    opening: Mutex<()>,
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
            process: process::id(),
            gpus: std::iter::repeat_with(OnceLock::new).take(MOST_DEVICES).collect(),
            opening: Mutex::default(),
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
        let mut gpu = lock(self.gpu(device)?);
        gpu.watch.caller = stack.unwrap_or_default();
        gpu.alloc(bytes, stream)
    }

    /// What a program is told when memory has run out. It begins as PyTorch's own message does: trainers look for that.
    fn out_of_memory(&self, bytes: u64, device: i32) -> String {
        let start = format!("CUDA out of memory. Tried to allocate {}.", Bytes(bytes));
        let Some(gpu) = self.opened(device) else { return start };
        let mut gpu = lock(gpu);
        let (total, free) = gpu.memory();
        let (reserved, allocated) = gpu.held();
        let limit = gpu.cap().map_or_else(String::new, |limit| format!(" It may hold {}.", Bytes(limit)));
        format!(
            "{start} GPU {device} has a total capacity of {} of which {} is free. The allocator {} of liboomph.so holds {}: {} in \
             blocks of the program, and {} in its cache, in pieces that do not fit.{limit} Record the program with oomph.record(), \
             and `oomph advise` and `oomph inspect` show who holds the memory.",
            Bytes(total),
            Bytes(free),
            self.settings.strategy,
            Bytes(reserved),
            Bytes(allocated),
            Bytes(reserved.saturating_sub(allocated))
        )
    }

    /// Frees a block of a request for `bytes`.
    fn free(&self, address: Address, bytes: u64, device: i32, stream: u64) -> Result<(), ServiceError> {
        let gpu = self.opened(device).ok_or(ServiceError::Unknown(address))?;
        lock(gpu).free(address, bytes, stream)
    }

    /// Notes that a block is also used on the stream with this handle. PyTorch's interface does not
    /// name the GPU.
    fn record_stream(&self, address: Address, stream: u64) -> Result<(), ServiceError> {
        for gpu in self.all() {
            if lock(gpu).record_stream(address, stream)? {
                return Ok(());
            }
        }
        Err(ServiceError::Unknown(address))
    }

    /// Gives cached memory back, on all GPUs.
    fn reset(&self) -> Result<(), ServiceError> {
        self.all().try_for_each(|gpu| lock(gpu).trim())
    }

    /// PyTorch's `set_per_process_memory_fraction`.
    fn memory_fraction(&self, fraction: f64, device: i32) -> Result<(), ServiceError> {
        lock(self.gpu(device)?).memory_fraction(fraction)
    }

    /// Bytes held on a GPU now; 0 for one that was not used yet.
    fn reserved(&self, device: i32) -> u64 {
        self.opened(device).map_or(0, |gpu| lock(gpu).reserved())
    }

    /// The counters of a GPU; zeros for one that was not used yet.
    fn values(&self, device: i32) -> [u64; VALUES] {
        self.opened(device).map_or([0; VALUES], |gpu| lock(gpu).values())
    }

    /// Begins a history on all GPUs, or ends it.
    fn record(&self, history: Option<HistorySettings>, with_stacks: bool, clear: bool) {
        // A GPU that is being opened would miss it.
        let _opening = lock(&self.opening);
        *lock(&self.history) = history;
        self.with_stacks.store(with_stacks && history.is_some(), Ordering::Relaxed);
        self.all().for_each(|gpu| lock(gpu).watch.record(history, clear));
    }

    /// The memory of all GPUs now, and their history.
    fn snapshot(&self, events: bool) -> ServiceSnapshot {
        let devices = self.all().map(|gpu| lock(gpu).snapshot(events)).collect();
        ServiceSnapshot { strategy: self.settings.strategy.to_string(), devices, stacks: lock(&self.stacks).texts() }
    }

    /// The statistics of every GPU. A GPU where a call hangs is left out, because this is called
    /// when the program ends.
    fn statistics(&self) -> ServiceStatistics {
        let devices = self.all().filter_map(|gpu| Some(gpu.try_lock().ok()?.statistics())).collect();
        let strategy = self.settings.strategy.to_string();
        ServiceStatistics { schema: 1, strategy, limit_bytes: self.settings.limit, devices }
    }

    /// Calls a GPU, which is opened if needed.
    fn with_gpu<T>(
        &self,
        device: i32,
        call: impl FnOnce(&mut GpuService) -> Result<T, ServiceError>,
    ) -> Result<T, ServiceError> {
        call(&mut lock(self.gpu(device)?))
    }

    /// A GPU, which is opened if needed.
    #[inline]
    fn gpu(&self, device: i32) -> Result<&Mutex<GpuService>, ServiceError> {
        match self.opened(device) {
            Some(gpu) => Ok(gpu),
            None => self.open(device),
        }
    }

    #[cold]
    fn open(&self, device: i32) -> Result<&Mutex<GpuService>, ServiceError> {
        let place = usize::try_from(device).ok().and_then(|number| self.gpus.get(number));
        let place = place.ok_or(ServiceError::NoDevice(device))?;
        let _opening = lock(&self.opening);
        if let Some(gpu) = place.get() {
            return Ok(gpu);
        }
        let mut opened = GpuService::open(device, &self.settings, *lock(&self.history))?;
        // PyTorch copies between GPUs by kernels that read the other's memory, and does not say when it begins to.
        for mut other in self.all().map(lock) {
            let allowed = [opened.allow_peer(other.number()), other.allow_peer(device)];
            for failed in allowed.into_iter().filter_map(Result::err) {
                exports::report(&format!(
                    "GPUs {} and {device} cannot read each other's memory: {failed}",
                    other.number()
                ));
            }
        }
        Ok(place.get_or_init(|| Mutex::new(opened)))
    }

    #[inline]
    fn opened(&self, device: i32) -> Option<&Mutex<GpuService>> {
        self.gpus.get(usize::try_from(device).ok()?)?.get()
    }

    /// All GPUs that are open.
    fn all(&self) -> impl Iterator<Item = &Mutex<GpuService>> {
        self.gpus.iter().filter_map(OnceLock::get)
    }
}

/// Locks a GPU, or what all GPUs share. After a panic it stays usable, because a strategy keeps its
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
        if own == 0 {
            return Ok(());
        }
        write!(f, "oomph: device {}: peak reserved {}; ", self.device, Bytes(own))?;
        match native {
            NativeVerdict::Unknown(reason) => {
                writeln!(f, "what PyTorch's own allocator would have reserved is not known: {reason}")
            }
            NativeVerdict::RanOut { requests } => {
                let plural = if *requests == 1 { "" } else { "s" };
                writeln!(f, "PyTorch's own allocator would have failed to serve {requests} of the same request{plural}")
            }
            &NativeVerdict::Served { peak_reserved, depends_on_time: true } => writeln!(
                f,
                "PyTorch's own allocator would have reserved at least {} for the same requests; how much more depends on when \
                 the streams that share blocks finish with them",
                Bytes(peak_reserved)
            ),
            &NativeVerdict::Served { peak_reserved, depends_on_time: false } => {
                let percent = (peak_reserved as f64 / own as f64 - 1.0) * 100.0;
                let difference = match percent.round().abs() {
                    0.0 => "the same within 0.5 %".to_owned(),
                    percent if peak_reserved > own => format!("{percent:.0} % more"),
                    percent => format!("{percent:.0} % less"),
                };
                writeln!(
                    f,
                    "PyTorch's own allocator would have reserved {} for the same requests ({difference})",
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
    use std::time::Instant;

    use super::*;
    use oomph_base::MIB;

    fn service(strategy: &str, more: &[(&str, &str)]) -> AllocatorService {
        let variables = |name: &str| match name {
            "OOMPH_STRATEGY" => Some(strategy.to_owned()),
            "OOMPH_DEVICE" => Some("sim".to_owned()),
            _ => more.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()),
        };
        AllocatorService::new(ServiceSettings::read(variables).unwrap())
    }

    /// Requests of varying sizes on two streams, with frees in another order. Returns what is live.
    fn run(service: &AllocatorService, pairs: u64) -> Vec<(Address, u64)> {
        let mut live: Vec<(Address, u64)> = Vec::new();
        for number in 0..pairs {
            let bytes = 1 + (number * 7_919) % 97 * (number % 13) * 100_000;
            let stream = number % 3 / 2 * 77;
            live.push((service.alloc(bytes, 0, stream).unwrap().unwrap(), bytes));
            if live.len() > 20 {
                let (address, bytes) = live.swap_remove((number % 19) as usize);
                service.free(address, bytes, 0, 0).unwrap();
            }
            if number == pairs / 2 {
                service.reset().unwrap();
            }
        }
        live
    }

    fn native(service: &AllocatorService) -> Option<NativeVerdict> {
        service.statistics().devices.remove(0).native
    }

    /// PyTorch does not repeat a free: whatever fails, every block becomes free in the end, and all memory goes back.
    #[test]
    fn frees_that_the_driver_stops_are_finished_later() {
        let mut stopped = 0;
        for strategy in ["oomph", "caching", "caching:expandable_segments:True", "async"] {
            let service = service(strategy, &[("OOMPH_FAULTS", "7"), ("OOMPH_COMPARE", "off")]);
            let mut free = |(address, bytes)| stopped += u32::from(service.free(address, bytes, 0, 0).is_err());
            let mut live = Vec::new();
            for number in 0_u64..500 {
                let bytes = (1 + number * 7_919 % 97) * MIB;
                if let Ok(Some(address)) = service.alloc(bytes, 0, number % 3 * 77) {
                    // Not all calls succeed here, and not all blocks need a second stream.
                    let _ = service.record_stream(address, 77);
                    live.push((address, bytes));
                }
                if live.len() > 20 {
                    free(live.swap_remove((number % 19) as usize));
                }
            }
            live.into_iter().for_each(&mut free);
            let given_back = || service.reset().is_ok() && service.reserved(0) == 0;
            assert!((0..1_000).any(|_| given_back()), "{strategy}");
            assert_eq!(service.statistics().devices[0].stats.live_blocks, 0, "{strategy}");
        }
        assert!(stopped > 0);
    }

    #[test]
    fn every_device_has_its_own_memory() {
        let variables = |name: &str| match name {
            "OOMPH_DEVICE" => Some("sim:4GiB".to_owned()),
            _ => None,
        };
        let service = AllocatorService::new(ServiceSettings::read(variables).unwrap());
        let blocks = [0, 1].map(|device| service.alloc(3 << 30, device, 0).unwrap().unwrap());
        assert_eq!([0, 1, 2].map(|device| service.reserved(device)), [3 << 30, 3 << 30, 0]);
        assert!(service.alloc(3 << 30, 1, 0).unwrap().is_none());
        assert!(matches!(service.free(blocks[1], 3 << 30, 2, 0), Err(ServiceError::Unknown(_))));
        service.free(blocks[1], 3 << 30, 1, 0).unwrap();
        service.memory_fraction(0.5, 1).unwrap();
        assert!(service.alloc(2 << 30, 1, 0).unwrap().is_some() && service.reserved(0) == 3 << 30);
        assert!(matches!(service.alloc(1, -1, 0), Err(ServiceError::NoDevice(-1))));
    }

    #[test]
    fn a_memory_fraction_is_kept_by_every_strategy() {
        for strategy in ["oomph", "caching", "tlsf"] {
            let variables = |name: &str| match name {
                "OOMPH_STRATEGY" => Some(strategy.to_owned()),
                "OOMPH_DEVICE" => Some("sim:8GiB".to_owned()),
                _ => None,
            };
            let service = AllocatorService::new(ServiceSettings::read(variables).unwrap());
            service.memory_fraction(0.25, 0).unwrap();
            let served = (0..8).filter(|_| service.alloc(512 << 20, 0, 0).unwrap().is_some()).count();
            assert_eq!(served, 4, "{strategy}");
            let message = service.out_of_memory(512 << 20, 0);
            assert!(message.starts_with("CUDA out of memory. Tried to allocate 512 MiB."), "{message}");
            // The GPU has free memory beyond the fraction. Its context takes some.
            let free = lock(service.gpu(0).unwrap()).memory().1;
            assert!(free > 5 << 30 && message.contains(&format!("of which {} is free", Bytes(free))), "{message}");
            assert!(message.contains("It may hold 2.00 GiB."), "{message}");
            service.memory_fraction(1.0, 0).unwrap();
            assert!(service.alloc(512 << 20, 0, 0).unwrap().is_some(), "{strategy}");
        }
    }

    #[test]
    fn a_device_is_opened_by_its_first_request() {
        let service = service("caching", &[]);
        let block = service.alloc(1 << 20, 0, 0).unwrap().unwrap();
        assert_eq!(service.reserved(0), 2 << 20);
        service.free(block, 1 << 20, 0, 0).unwrap();
    }

    #[test]
    fn comparison_is_what_pytorchs_allocator_reserves() {
        for (pairs, conf) in [(3_000, ""), (3_000, "expandable_segments:True"), (600_000, "")] {
            let conf = [("PYTORCH_CUDA_ALLOC_CONF", conf)];
            let ours = service("oomph", &conf);
            run(&ours, pairs);
            let caching = service(&format!("caching:{}", conf[0].1), &[]);
            run(&caching, pairs);
            let peak_reserved = caching.statistics().devices[0].stats.peak.reserved;
            assert_eq!(native(&ours), Some(NativeVerdict::Served { peak_reserved, depends_on_time: false }));
            let text = ours.statistics().to_string();
            let figure = format!("own allocator would have reserved {} for the same", Bytes(peak_reserved));
            assert!(text.contains(&figure), "{text}");
        }
    }

    #[test]
    fn comparison_says_what_it_does_not_know() {
        let fraction = service("oomph", &[]);
        fraction.memory_fraction(0.5, 0).unwrap();
        run(&fraction, 10);
        assert_eq!(native(&fraction), Some(NativeVerdict::Unknown("the program set a memory fraction".to_owned())));
        let text = fraction.statistics().to_string();
        assert!(text.contains("reserved is not known: the program set a memory fraction"), "{text}");

        let wrong = service("oomph", &[("PYTORCH_CUDA_ALLOC_CONF", "nonsense:1")]);
        run(&wrong, 10);
        assert!(matches!(native(&wrong), Some(NativeVerdict::Unknown(reason)) if reason.contains("nonsense")));

        let streams = service("oomph", &[]);
        let (block, _) = run(&streams, 10)[0];
        streams.record_stream(block, 77).unwrap();
        assert!(matches!(native(&streams), Some(NativeVerdict::Served { depends_on_time: true, .. })));
        let text = streams.statistics().to_string();
        assert!(text.contains("would have reserved at least "), "{text}");

        // 15 blocks of 7 MiB fit in 110 MiB, but not with the 20 MiB segments of PyTorch's allocator.
        let small = service("oomph:smallest_chunk:2MiB,growth_step:2MiB", &[("OOMPH_LIMIT", "110MiB")]);
        let served = (0..15).filter(|_| small.alloc(7 * MIB, 0, 0).unwrap().is_some()).count();
        assert_eq!(served, 15);
        assert!(matches!(native(&small), Some(NativeVerdict::RanOut { requests: 5 })), "{:?}", native(&small));

        let off = service("oomph", &[("OOMPH_COMPARE", "off")]);
        run(&off, 10);
        assert_eq!((native(&off), off.statistics().to_string().lines().count()), (None, 1));
    }

    #[test]
    fn peaks_and_sums_are_those_since_their_reset() {
        // Allocated bytes are the first metric, reserved ones the fourth, blocks the fifth.
        let values = |service: &AllocatorService, metric: usize| service.values(0)[4 * metric..4 * metric + 4].to_vec();
        let service = service("caching", &[]);
        assert_eq!(service.values(0), [0; VALUES]);
        let blocks = [30, 50].map(|size| service.alloc(size * MIB, 0, 0).unwrap().unwrap());
        service.free(blocks[1], 50 * MIB, 0, 0).unwrap();
        assert_eq!(values(&service, 0), [30 * MIB, 80 * MIB, 80 * MIB, 50 * MIB]);
        assert_eq!(values(&service, 3), [80 * MIB, 80 * MIB, 80 * MIB, 0]);
        assert_eq!(values(&service, 4), [1, 2, 2, 1]);
        let gpu = service.opened(0).unwrap();
        lock(gpu).reset_peaks();
        lock(gpu).reset_totals();
        assert_eq!(values(&service, 0), [30 * MIB, 30 * MIB, 0, 0]);
        let third = service.alloc(40 * MIB, 0, 0).unwrap().unwrap();
        service.free(third, 40 * MIB, 0, 0).unwrap();
        assert_eq!(values(&service, 0), [30 * MIB, 70 * MIB, 40 * MIB, 40 * MIB]);
        assert_eq!(values(&service, 4), [1, 2, 1, 1]);
        // Above all peaks before the reset, the strategy's own peak is used.
        service.alloc(100 * MIB, 0, 0).unwrap();
        assert_eq!((values(&service, 0)[1], values(&service, 3)[1]), (130 * MIB, 180 * MIB));
        service.reset().unwrap();
        assert_eq!((service.values(0)[4 * 7 + 2], service.values(0)[4 * 7 + 3]), (1, 1));
    }

    #[test]
    fn history_has_the_newest_events_in_order() {
        let service = service("caching", &[]);
        let first = service.alloc(30 * MIB, 0, 0).unwrap().unwrap();
        service.record(Some(HistorySettings { events: true, most: 7 }), true, false);
        let second = service.alloc(5 * MIB, 0, 77).unwrap().unwrap();
        service.free(first, 30 * MIB, 0, 0).unwrap();
        service.reset().unwrap();
        let snapshot = serde_json::to_value(service.snapshot(true)).unwrap();
        let device = &snapshot["devices"][0];
        let actions = |device: &serde_json::Value| -> Vec<(String, u64, u64)> {
            let entries = device["entries"].as_array().unwrap().iter();
            let read = |entry: &serde_json::Value, place: usize| entry[place].as_u64().unwrap();
            entries.map(|entry| (entry[0].as_str().unwrap().to_owned(), read(entry, 2), read(entry, 3))).collect()
        };
        let expected = [
            ("segment_alloc", 20 * MIB, 77),
            ("alloc", 5 * MIB, 77),
            ("free_requested", 30 * MIB, 0),
            ("free_completed", 30 * MIB, 0),
            ("segment_free", 30 * MIB, 0),
        ];
        let expected = expected.map(|(action, size, stream)| (action.to_owned(), size, stream));
        assert_eq!(actions(device), expected);
        assert_eq!(device["segments"][0]["blocks"][0][0], second.0);
        assert_eq!(device["segments"][0]["blocks"][0][3], "active_allocated");
        assert_eq!((&snapshot["strategy"], &device["dropped"]), (&"caching".into(), &0.into()));
        // This process has no Python: every request was counted as one without a stack.
        service.free(second, 5 * MIB, 0, 77).unwrap();
        service.alloc(MIB, 0, 0).unwrap();
        let later = serde_json::to_value(service.snapshot(true)).unwrap();
        assert_eq!((actions(&later["devices"][0]).len(), &later["devices"][0]["dropped"]), (7, &2.into()));
        service.record(None, true, false);
        service.alloc(MIB, 0, 0).unwrap();
        assert_eq!(actions(&serde_json::to_value(service.snapshot(true)).unwrap()["devices"][0]).len(), 7);
        assert!(actions(&serde_json::to_value(service.snapshot(false)).unwrap()["devices"][0]).is_empty());
    }

    #[test]
    fn failed_request_is_in_the_history() {
        let service = service("caching", &[("OOMPH_LIMIT", "100MiB")]);
        service.record(Some(HistorySettings { events: true, most: 100 }), false, false);
        assert_eq!(service.alloc(200 * MIB, 0, 0).unwrap(), None);
        let snapshot = serde_json::to_value(service.snapshot(true)).unwrap();
        let last = snapshot["devices"][0]["entries"].as_array().unwrap().last().unwrap().clone();
        assert_eq!((&last[0], &last[2]), (&"oom".into(), &(200 * MIB).into()));
        assert_eq!(service.values(0)[4 * 7 + 1], 1);
    }

    /// Prints what a pair of alloc and free costs: `cargo test --release -p oomph-torch-allocator -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_a_pair() {
        let pairs = 3_000_000_u64;
        let time = |name: &str, more: &[(&str, &str)], history: Option<HistorySettings>| {
            let service = service("oomph", more);
            service.record(history, false, false);
            let kept: Vec<Address> = (0..64).map(|n| service.alloc((1 + n) << 14, 0, 0).unwrap().unwrap()).collect();
            let began = Instant::now();
            for number in 0..pairs {
                let bytes = (1 + number % 61) << 12;
                let block = service.alloc(bytes, 0, 0).unwrap().unwrap();
                service.free(block, bytes, 0, 0).unwrap();
            }
            println!("{name}: {:.1} ns", began.elapsed().as_nanos() as f64 / pairs as f64);
            drop(kept);
        };
        for _ in 0..3 {
            time("without comparison", &[("OOMPH_COMPARE", "off")], None);
            time("with comparison", &[], None);
            time("with comparison and history", &[], Some(HistorySettings { events: true, most: 100_000 }));
        }
    }
}
