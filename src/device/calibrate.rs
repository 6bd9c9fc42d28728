//! Measures a device: what every driver call costs by size, and how fast memory and copies are.
//!
//! Called by `doctor --calibrate`; the result becomes a profile of the simulated device. Nothing here is about CUDA: it
//! is asked through [`Device`], so that a simulated device can be measured too, which must give the profile it has.

use super::{
    CallKind, Device, DeviceError, PoolSettings,
    sim::{Cost, ProfileFile, Rates},
};
use crate::unit::{Address, EventId, GIB, KIB, MIB, Nanos, StreamId, Work};

/// Sizes at which calls about memory are measured.
const SIZES: [u64; 8] = [512, 64 * KIB, MIB, 2 * MIB, 20 * MIB, 256 * MIB, GIB, 8 * GIB];
/// Page-locked memory is slow to make, and host memory is not ours alone.
const MOST_HOST_BYTES: u64 = 256 * MIB;
/// How often a call is measured; the largest sizes less often.
const SAMPLES: usize = 101;
const SAMPLES_OF_LARGE: usize = 11;
/// Streams are never given back before the device is, so only a few are made.
const STREAMS: usize = 8;
/// How many small kernels are queued to see how long one takes.
const KERNELS: u32 = 200;
/// More small allocations on one page than any page holds.
const MOST_SMALL: u64 = 8192;

const STREAM: StreamId = StreamId::DEFAULT;

/// What was measured on a device.
#[derive(Clone, Debug)]
pub struct Calibration {
    costs: Vec<Cost>,
    rates: Rates,
    small_allocations_per_page: Option<u64>,
}

/// Measures a device on which nothing else happens. Everything that is taken is given back, but for a few streams.
pub fn calibrate(device: &mut dyn Device) -> Result<Calibration, DeviceError> {
    let room = device.memory_info()?.free / 4;
    let sizes: Vec<u64> = SIZES.into_iter().filter(|&bytes| bytes <= room).collect();
    let mut meter = Meter { device, samples: Vec::new() };
    meter.plain_memory(&sizes)?;
    meter.virtual_memory(&sizes)?;
    meter.pools(&sizes)?;
    meter.pinned_host(&sizes)?;
    meter.streams_and_events()?;
    let costs = meter.costs();
    let rates = rates(meter.device, room)?;
    let small_allocations_per_page = small_allocations_per_page(meter.device)?;
    Ok(Calibration { costs, rates, small_allocations_per_page })
}

impl Calibration {
    /// The profile of the measured device. The rates of arithmetic are the published ones of an H200: they were not
    /// measured, and neither was what libraries take.
    #[must_use]
    pub fn into_profile(self, name: &str, driver: Option<String>, device: &dyn Device) -> ProfileFile {
        let props = device.props();
        ProfileFile {
            name: name.to_owned(),
            vendor_name: props.name.clone(),
            driver,
            total_bytes: props.total_bytes,
            context_bytes: props.context_bytes,
            library_bytes: 0,
            page_bytes: props.page_bytes,
            granularity_bytes: props.granularity_bytes,
            small_allocations_per_page: self.small_allocations_per_page,
            rates: self.rates,
            cost: self.costs,
        }
    }
}

/// Makes calls, and keeps what each cost by the device's own ledger.
struct Meter<'a> {
    device: &'a mut dyn Device,
    samples: Vec<(CallKind, u64, Nanos)>,
}

impl Meter<'_> {
    fn time<T>(
        &mut self,
        call: CallKind,
        bytes: u64,
        make: impl FnOnce(&mut dyn Device) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let before = self.device.ledger().of(call).time;
        let answer = make(&mut *self.device)?;
        self.samples.push((call, bytes, self.device.ledger().of(call).time.since(before)));
        Ok(answer)
    }

    fn plain_memory(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        for &bytes in sizes {
            for _ in 0..rounds(bytes) {
                let address = self.time(CallKind::MemAlloc, bytes, |device| device.alloc(bytes))?;
                self.time(CallKind::MemFree, bytes, |device| device.free(address))?;
            }
        }
        for _ in 0..SAMPLES {
            self.time(CallKind::MemGetInfo, 0, |device| device.memory_info())?;
        }
        Ok(())
    }

    fn virtual_memory(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        let granularity = self.device.props().granularity_bytes;
        for &bytes in sizes.iter().filter(|bytes| bytes.is_multiple_of(granularity)) {
            for _ in 0..rounds(bytes) {
                if self.device.virtual_memory().is_none() {
                    return Ok(());
                }
                self.map_and_unmap(bytes)?;
            }
        }
        Ok(())
    }

    fn map_and_unmap(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let base = self.time(CallKind::AddressReserve, bytes, |device| virtual_of(device)?.reserve(bytes))?;
        let piece = self.time(CallKind::MemCreate, bytes, |device| virtual_of(device)?.create(bytes))?;
        self.time(CallKind::MemMap, bytes, |device| virtual_of(device)?.map(base, bytes, piece))?;
        self.time(CallKind::MemSetAccess, bytes, |device| virtual_of(device)?.set_access(base, bytes))?;
        self.time(CallKind::MemUnmap, bytes, |device| virtual_of(device)?.unmap(base, bytes))?;
        self.time(CallKind::MemRelease, bytes, |device| virtual_of(device)?.release(piece))?;
        self.time(CallKind::AddressFree, bytes, |device| virtual_of(device)?.address_free(base, bytes))
    }

    /// Allocations from a pool that has the memory already, as in the middle of a run.
    fn pools(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        if self.device.stream_ordered_pools().is_none() {
            return Ok(());
        }
        let settings = PoolSettings {
            release_threshold: u64::MAX,
            follow_event_dependencies: true,
            allow_opportunistic: true,
            allow_internal_dependencies: true,
        };
        for &bytes in sizes {
            let pool = self.time(CallKind::PoolCreate, 0, |device| pools_of(device)?.pool_create(None))?;
            self.time(CallKind::PoolSetAttribute, 0, |device| pools_of(device)?.pool_configure(pool, settings))?;
            let first = pools_of(self.device)?.alloc_async(pool, bytes, STREAM)?;
            pools_of(self.device)?.free_async(first, STREAM)?;
            for _ in 0..SAMPLES {
                let taken = self.time(CallKind::MemAllocAsync, bytes, |device| {
                    pools_of(device)?.alloc_async(pool, bytes, STREAM)
                })?;
                self.time(CallKind::MemFreeAsync, bytes, |device| pools_of(device)?.free_async(taken, STREAM))?;
                self.time(CallKind::PoolGetAttribute, 0, |device| pools_of(device)?.pool_usage(pool))?;
            }
            self.device.synchronize()?;
            self.time(CallKind::PoolTrim, bytes, |device| pools_of(device)?.pool_trim(pool, 0))?;
            self.time(CallKind::PoolDestroy, 0, |device| pools_of(device)?.pool_destroy(pool))?;
        }
        Ok(())
    }

    fn pinned_host(&mut self, sizes: &[u64]) -> Result<(), DeviceError> {
        for &bytes in sizes.iter().filter(|&&bytes| bytes <= MOST_HOST_BYTES) {
            for _ in 0..SAMPLES_OF_LARGE {
                let Some(host) = self.device.pinned_host() else { return Ok(()) };
                // Asked once outside, so that the first use of a size is not what is measured.
                let first = host.host_alloc(bytes)?;
                host.host_free(first)?;
                let address = self.time(CallKind::HostAlloc, bytes, |device| match device.pinned_host() {
                    Some(host) => host.host_alloc(bytes),
                    None => Ok(Address::NULL),
                })?;
                self.time(CallKind::HostFree, bytes, |device| match device.pinned_host() {
                    Some(host) => host.host_free(address),
                    None => Ok(()),
                })?;
            }
        }
        Ok(())
    }

    fn streams_and_events(&mut self) -> Result<(), DeviceError> {
        for _ in 0..STREAMS {
            self.time(CallKind::StreamCreate, 0, |device| device.stream_create(0))?;
        }
        for _ in 0..SAMPLES {
            let event: EventId = self.time(CallKind::EventCreate, 0, |device| device.event_create())?;
            self.time(CallKind::EventRecord, 0, |device| device.event_record(event, STREAM))?;
            self.time(CallKind::StreamWaitEvent, 0, |device| device.stream_wait_event(StreamId(1), event))?;
            self.device.synchronize()?;
            self.time(CallKind::EventQuery, 0, |device| device.event_query(event))?;
            self.time(CallKind::EventSynchronize, 0, |device| device.event_synchronize(event))?;
            self.time(CallKind::StreamSynchronize, 0, |device| device.stream_synchronize(STREAM))?;
            self.time(CallKind::CtxSynchronize, 0, |device| device.synchronize())?;
            self.time(CallKind::EventDestroy, 0, |device| device.event_destroy(event))?;
            if self.device.compute().is_some() {
                self.time(CallKind::Launch, 0, |device| launch(device, &Work::Spin { nanos: Nanos::ZERO }, &[]))?;
            }
        }
        Ok(())
    }

    /// Median and 99th percentile of every call and size.
    fn costs(&mut self) -> Vec<Cost> {
        self.samples.sort_unstable();
        let groups = self.samples.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1));
        let microseconds = |sample: &(CallKind, u64, Nanos)| sample.2.0 as f64 / 1e3;
        groups
            .map(|group| Cost {
                call: group[0].0.name().to_owned(),
                bytes: group[0].1,
                median_us: microseconds(&group[group.len() / 2]),
                p99_us: Some(microseconds(&group[(group.len() * 99 / 100).min(group.len() - 1)])),
            })
            .collect()
    }
}

fn rounds(bytes: u64) -> usize {
    if bytes < GIB { SAMPLES } else { SAMPLES_OF_LARGE }
}

fn virtual_of(device: &mut dyn Device) -> Result<&mut dyn super::VirtualMemory, DeviceError> {
    device.virtual_memory().ok_or(DeviceError::Unsupported { capability: "virtual memory" })
}

fn pools_of(device: &mut dyn Device) -> Result<&mut dyn super::StreamOrderedPools, DeviceError> {
    device.stream_ordered_pools().ok_or(DeviceError::Unsupported { capability: "stream-ordered pools" })
}

fn launch(device: &mut dyn Device, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
    match device.compute() {
        Some(compute) => compute.launch(STREAM, work, operands),
        None => Ok(()),
    }
}

/// How fast copies and memory are; a device without compute has the published rates of an H200.
fn rates(device: &mut dyn Device, room: u64) -> Result<Rates, DeviceError> {
    let mut rates = Rates::H200;
    if device.compute().is_none() {
        return Ok(rates);
    }
    let bytes = GIB.min(room);
    let operand = [(device.alloc(bytes)?, bytes)];
    let mut per_ns = |work: Work, moved: u64| -> Result<f64, DeviceError> {
        // The first run warms up: staging memory is made, pages are touched.
        let time = duration(device, &work, &operand)?.min(duration(device, &work, &operand)?);
        Ok(moved as f64 / time.0.max(1) as f64)
    };
    rates.pinned_copy_bytes_per_ns =
        per_ns(Work::CopyIn { bytes, pinned: true }, bytes)?.min(per_ns(Work::CopyOut { bytes, pinned: true }, bytes)?);
    rates.pageable_copy_in_bytes_per_ns = per_ns(Work::CopyIn { bytes, pinned: false }, bytes)?;
    rates.pageable_copy_out_bytes_per_ns = per_ns(Work::CopyOut { bytes, pinned: false }, bytes)?;
    let traffic = 16 * bytes;
    rates.memory_bytes_per_ns = per_ns(Work::Elementwise { bytes: traffic }, traffic)?;
    let small = Work::Elementwise { bytes: 512 };
    device.synchronize()?;
    let begin = device.now();
    for _ in 0..KERNELS {
        launch(device, &small, &operand)?;
    }
    device.synchronize()?;
    rates.kernel_floor = Nanos(device.now().since(begin).0 / u64::from(KERNELS));
    device.free(operand[0].0)?;
    Ok(rates)
}

/// How long a piece of work takes, from an idle device to an idle device.
fn duration(device: &mut dyn Device, work: &Work, operands: &[(Address, u64)]) -> Result<Nanos, DeviceError> {
    device.synchronize()?;
    let begin = device.now();
    launch(device, work, operands)?;
    device.synchronize()?;
    Ok(device.now().since(begin))
}

/// How many allocations of 512 bytes the driver puts on one page; `None` where free memory never tells.
fn small_allocations_per_page(device: &mut dyn Device) -> Result<Option<u64>, DeviceError> {
    let mut taken = Vec::new();
    let mut free = device.memory_info()?.free;
    let mut at_last_drop = None;
    let mut seen = None;
    for number in 0..MOST_SMALL {
        taken.push(device.alloc(512)?);
        let now = device.memory_info()?.free;
        if now < free {
            free = now;
            seen = at_last_drop.map(|last| number - last);
            at_last_drop = Some(number);
            if seen.is_some() {
                break;
            }
        }
    }
    for address in taken {
        device.free(address)?;
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::{CostTable, SimConfig, SimDevice};

    #[test]
    fn a_simulated_device_is_measured_as_it_was_made() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let calibration = calibrate(&mut device).unwrap();
        assert_eq!(device.held_bytes(), 0, "everything is given back");
        assert_eq!(calibration.small_allocations_per_page, Some(4096));
        let made = CostTable::h200();
        for cost in &calibration.costs {
            let kind = CallKind::ALL.iter().copied().find(|kind| kind.name() == cost.call).unwrap();
            let nanos = (cost.median_us * 1e3).round() as u64;
            assert_eq!(nanos, made.cost(kind, cost.bytes).0, "{cost:?}");
        }
        let near = |measured: f64, made: f64| (measured / made - 1.0).abs() < 0.05;
        assert!(near(calibration.rates.pinned_copy_bytes_per_ns, 55.0));
        assert!(near(calibration.rates.memory_bytes_per_ns, 4_800.0));
    }
}
