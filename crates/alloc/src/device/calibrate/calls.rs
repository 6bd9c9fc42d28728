//! What every driver call costs by size, read from the device's own ledger.

use crate::device::{CallKind, Device, DeviceError, PoolSettings, sim::Cost};
use oomph_base::{EventId, GIB, KIB, MIB, Nanos, StreamId, Work, round_up};

/// Sizes at which calls about memory are measured.
const SIZES: [u64; 8] = [512, 64 * KIB, MIB, 2 * MIB, 20 * MIB, 256 * MIB, GIB, 8 * GIB];
/// Page-locked memory is slow to make, and host memory is not ours alone.
const MOST_HOST_BYTES: u64 = 256 * MIB;
/// How often a call is measured; the largest sizes less often.
const SAMPLES: usize = 101;
const SAMPLES_OF_LARGE: usize = 11;
/// How often a pool is trimmed, which the largest take their time for.
const TRIMS: usize = 5;
/// Streams are never given back before the device is, so only a few are made.
const STREAMS: usize = 8;
const STREAM: StreamId = StreamId::DEFAULT;

/// Measures every call at every size that fits into `room`. Everything is given back but a few streams.
pub(super) fn measure(device: &mut dyn Device, room: u64) -> Result<Vec<Cost>, DeviceError> {
    let sizes: Vec<u64> = SIZES.into_iter().filter(|&bytes| bytes <= room).collect();
    let mut meter = Meter { device, samples: Vec::new() };
    meter.plain_memory(&sizes)?;
    meter.virtual_memory(&sizes)?;
    meter.pools(&sizes)?;
    meter.pinned_host(&sizes)?;
    meter.streams_and_events()?;
    Ok(meter.costs())
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
        // As much as an expandable segment reserves: an eighth more than there is memory.
        let total = self.device.props().total_bytes;
        let whole = round_up(total.saturating_add(total / 8), granularity.max(1));
        for _ in 0..SAMPLES_OF_LARGE {
            if self.device.virtual_memory().is_none() {
                return Ok(());
            }
            let base =
                self.time(CallKind::AddressReserve, whole, |device| device.require_virtual_memory()?.reserve(whole))?;
            self.time(CallKind::AddressFree, whole, |device| {
                device.require_virtual_memory()?.address_free(base, whole)
            })?;
        }
        Ok(())
    }

    fn map_and_unmap(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let base =
            self.time(CallKind::AddressReserve, bytes, |device| device.require_virtual_memory()?.reserve(bytes))?;
        let piece = self.time(CallKind::MemCreate, bytes, |device| device.require_virtual_memory()?.create(bytes))?;
        self.time(CallKind::MemMap, bytes, |device| device.require_virtual_memory()?.map(base, bytes, piece))?;
        self.time(CallKind::MemSetAccess, bytes, |device| device.require_virtual_memory()?.set_access(base, bytes))?;
        self.time(CallKind::MemUnmap, bytes, |device| device.require_virtual_memory()?.unmap(base, bytes))?;
        self.time(CallKind::MemRelease, bytes, |device| device.require_virtual_memory()?.release(piece))?;
        self.time(CallKind::AddressFree, bytes, |device| device.require_virtual_memory()?.address_free(base, bytes))
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
            let pool =
                self.time(CallKind::PoolCreate, 0, |device| device.require_stream_ordered_pools()?.pool_create(None))?;
            self.time(CallKind::PoolSetAttribute, 0, |device| {
                device.require_stream_ordered_pools()?.pool_configure(pool, settings)
            })?;
            let first = self.device.require_stream_ordered_pools()?.alloc_async(pool, bytes, STREAM)?;
            self.device.require_stream_ordered_pools()?.free_async(first, STREAM)?;
            for _ in 0..SAMPLES {
                let taken = self.time(CallKind::MemAllocAsync, bytes, |device| {
                    device.require_stream_ordered_pools()?.alloc_async(pool, bytes, STREAM)
                })?;
                self.time(CallKind::MemFreeAsync, bytes, |device| {
                    device.require_stream_ordered_pools()?.free_async(taken, STREAM)
                })?;
                self.time(CallKind::PoolGetAttribute, 0, |device| {
                    device.require_stream_ordered_pools()?.pool_usage(pool)
                })?;
            }
            for _ in 0..TRIMS {
                self.device.synchronize()?;
                // A pool takes more than it is asked for, and gives that back.
                let held = self.device.require_stream_ordered_pools()?.pool_usage(pool)?.reserved;
                self.time(CallKind::PoolTrim, held, |device| {
                    device.require_stream_ordered_pools()?.pool_trim(pool, 0)
                })?;
                let again = self.device.require_stream_ordered_pools()?.alloc_async(pool, bytes, STREAM)?;
                self.device.require_stream_ordered_pools()?.free_async(again, STREAM)?;
            }
            self.device.synchronize()?;
            self.time(CallKind::PoolDestroy, 0, |device| device.require_stream_ordered_pools()?.pool_destroy(pool))?;
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
                let address =
                    self.time(CallKind::HostAlloc, bytes, |device| device.require_pinned_host()?.host_alloc(bytes))?;
                self.time(CallKind::HostFree, bytes, |device| device.require_pinned_host()?.host_free(address))?;
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
                let nothing = Work::Spin { nanos: Nanos::ZERO };
                self.time(CallKind::Launch, 0, |device| device.require_compute()?.launch(STREAM, &nothing, &[]))?;
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
