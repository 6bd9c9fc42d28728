//! How long work takes: as measured, interpolated by kind and size; from general rates (a roofline)
//! where its kind was not measured.

use serde::{Deserialize, Serialize};

use super::{Profile, SimDevice, clock::UnknownHandle};
use crate::device::{CallKind, Compute, DeviceError};
use oomph_base::{Address, Dtype, Nanos, ProductRole, StreamId, Work};

/// One piece of work and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTime {
    /// The median in microseconds.
    pub median_us: f64,
    /// The 99th percentile in microseconds, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// What was run.
    #[serde(rename = "shape")]
    pub work: Work,
}

impl WorkTime {
    /// Floating-point operations per nanosecond (a thousand are one TFLOP/s), or bytes per
    /// nanosecond (GB/s) where there is no arithmetic.
    #[must_use]
    pub fn per_ns(&self) -> f64 {
        size(&self.work) / (self.median_us * 1e3)
    }

    fn is_possible(&self) -> bool {
        self.median_us > 0.0 && self.median_us.is_finite()
    }
}

/// A measured time that is not a positive number.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{median_us} us for {work:?} is not a valid time")]
pub struct ImpossibleTime {
    median_us: f64,
    work: Work,
}

/// Measured times by kind of work.
///
/// Between two measured sizes the speed is interpolated over the logarithm of the size. Smaller
/// work takes as long as the smallest measured, and larger work runs at the speed of the largest
/// measured. A product is then corrected by the measured products whose sides are nearest to its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkTable {
    curves: Vec<(WorkKind, Vec<SpeedPoint>)>,
    corrections: Vec<ShapeCorrection>,
}

/// How much longer a measured product took than [`Profile::duration`] says by its size alone.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ShapeCorrection {
    kind: WorkKind,
    sides: LogSides,
    log_ratio: f64,
}

/// The binary logarithms of the sides of a product: rows, columns, and the length of a dot product.
type LogSides = [f64; 3];

fn log_sides(work: &Work) -> Option<LogSides> {
    let Work::Gemm { m, n, k, batch, .. } = *work else { return None };
    Some([m.saturating_mul(batch), n, k].map(|side| f64::from(side.max(1)).log2()))
}

/// A product with few rows, columns or terms beside many is slower than a cube of the same size, so its time says nothing about
/// others of its size.
fn is_thin(work: &Work) -> bool {
    let Work::Gemm { m, n, k, .. } = *work else { return false };
    let (shortest, longest) = (m.min(n).min(k), m.max(n).max(k));
    shortest < THIN_SIDE && longest / THIN_RATIO >= shortest
}

/// Thin products have a side shorter than this, and another that is at least `THIN_RATIO` times as long.
const THIN_SIDE: u32 = 512;
const THIN_RATIO: u32 = 8;
/// At this distance, in doublings of a side, a measured product counts as much as the size alone.
const FAR: f64 = 4.0;

#[derive(Clone, Copy, Debug, PartialEq)]
struct SpeedPoint {
    size: f64,
    per_ns: f64,
}

impl SpeedPoint {
    fn nanos(&self) -> f64 {
        self.size / self.per_ns
    }
}

/// Work that is compared by its size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkKind {
    /// Products whose rows are aligned as fast kernels want, and the others: a vocabulary of 50257
    /// is the usual case. How slow the others are depends on which rows are unaligned.
    Product {
        dtype: Dtype,
        ragged: Option<ProductRole>,
    },
    Attention {
        dtype: Dtype,
        backward: bool,
    },
    Elementwise,
    Reduction,
    CopyIn {
        pinned: bool,
    },
    CopyOut {
        pinned: bool,
    },
}

impl WorkKind {
    fn of(work: &Work) -> Option<WorkKind> {
        Some(match *work {
            Work::Spin { .. } => return None,
            Work::Gemm { m, n, k, dtype, role, .. } => {
                let [left, right] = role.row_lengths(m, n, k);
                let aligned = [left, right, n].iter().all(|row| row.is_multiple_of(8));
                WorkKind::Product { dtype, ragged: (!aligned).then_some(role) }
            }
            Work::Attention { dtype, backward, .. } => WorkKind::Attention { dtype, backward },
            Work::Elementwise { .. } => WorkKind::Elementwise,
            Work::Reduction { .. } => WorkKind::Reduction,
            Work::CopyIn { pinned, .. } => WorkKind::CopyIn { pinned },
            Work::CopyOut { pinned, .. } => WorkKind::CopyOut { pinned },
        })
    }

    /// The kind whose times are used where this one was not measured.
    fn stand_in(self) -> Option<WorkKind> {
        match self {
            WorkKind::Product { dtype, ragged: Some(_) } => Some(WorkKind::Product { dtype, ragged: None }),
            WorkKind::Reduction => Some(WorkKind::Elementwise),
            _ => None,
        }
    }
}

/// What work is compared by: arithmetic, or bytes where there is none.
fn size(work: &Work) -> f64 {
    match work {
        Work::Gemm { .. } | Work::Attention { .. } => work.flops(),
        _ => work.traffic_bytes(),
    }
}

impl WorkTable {
    /// A table of these times. Where a size was measured in several shapes, their mean speed
    /// counts.
    pub fn of(times: impl IntoIterator<Item = WorkTime>) -> Result<WorkTable, ImpossibleTime> {
        let mut table = WorkTable::default();
        for time in times {
            let WorkTime { median_us, work, .. } = time;
            if !time.is_possible() {
                return Err(ImpossibleTime { median_us, work });
            }
            let Some(kind) = WorkKind::of(&work) else { continue };
            let point = SpeedPoint { size: size(&work), per_ns: time.per_ns() };
            if point.size < 1.0 {
                continue;
            }
            match table.curves.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, curve)) => curve.push(point),
                None => table.curves.push((kind, vec![point])),
            }
        }
        for (_, curve) in &mut table.curves {
            curve.sort_by(|a, b| a.size.total_cmp(&b.size));
            *curve = curve.chunk_by(|a, b| a.size == b.size).map(mean).collect();
        }
        Ok(table)
    }

    /// The table of a profile with these rates.
    pub(super) fn of_profile(times: &[WorkTime], rates: &Rates) -> Result<WorkTable, ImpossibleTime> {
        let (thin, others): (Vec<WorkTime>, Vec<WorkTime>) = times.iter().partition(|time| is_thin(&time.work));
        if let Some(&WorkTime { median_us, work, .. }) = thin.iter().find(|time| !time.is_possible()) {
            return Err(ImpossibleTime { median_us, work });
        }
        let mut table = WorkTable::of(others.into_iter().map(|time| rates.arithmetic_alone(time)))?;
        let correction = |time: &WorkTime| {
            let (kind, sides) = (WorkKind::of(&time.work)?, log_sides(&time.work)?);
            let predicted = rates.moved_meanwhile(table.duration(&time.work)?, &time.work);
            Some(ShapeCorrection { kind, sides, log_ratio: (time.median_us * 1e3 / predicted).ln() })
        };
        table.corrections = times.iter().filter_map(correction).collect();
        Ok(table)
    }

    /// How many times as long a product takes as its size says: what measured products of its kind did, weighted by how near their
    /// sides are. The weight falls with the fourth power of the distance, so that a measured product takes what was measured, and
    /// one that is far from all of them takes what its size says.
    fn correction(&self, work: &Work) -> f64 {
        let (Some(kind), Some(sides)) = (WorkKind::of(work), log_sides(work)) else { return 1.0 };
        let (mut weights, mut sum) = (FAR.powi(-4), 0.0);
        for other in self.corrections.iter().filter(|other| other.kind == kind) {
            let square: f64 = sides.iter().zip(other.sides).map(|(own, other)| (own - other).powi(2)).sum();
            // The smallest distance of different products is far above this.
            let weight = square.max(1e-9).powi(-2);
            weights += weight;
            sum += weight * other.log_ratio;
        }
        (sum / weights).exp()
    }

    /// How long a piece of work takes; `None` where nothing of its kind was measured.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Option<Nanos> {
        let kind = WorkKind::of(work)?;
        let (own, stand_in) = (self.curve(kind), kind.stand_in().and_then(|kind| self.curve(kind)));
        let size = size(work);
        let nanos = match (own, stand_in) {
            // Only large work of this kind was measured: assume that smaller work is slower than
            // similar work by the same factor.
            (Some(own), Some(similar)) if size < own.first()?.size => {
                let smallest = own.first()?;
                let times_slower = smallest.nanos() / time_on(similar, smallest.size)?;
                time_on(similar, size)? * times_slower
            }
            (own, similar) => time_on(own.or(similar)?, size)?,
        };
        Some(Nanos(nanos.round() as u64))
    }

    fn curve(&self, kind: WorkKind) -> Option<&[SpeedPoint]> {
        self.curves.iter().find(|(known, _)| *known == kind).map(|(_, curve)| curve.as_slice())
    }
}

/// Nanoseconds for work of a size, by the points of its kind.
fn time_on(curve: &[SpeedPoint], size: f64) -> Option<f64> {
    let (first, last) = (curve.first()?, curve.last()?);
    Some(if size <= first.size {
        first.nanos()
    } else if size >= last.size {
        size / last.per_ns
    } else {
        let upper = curve.partition_point(|point| point.size < size);
        let (below, above) = (curve[upper - 1], curve[upper]);
        let way = (size / below.size).ln() / (above.size / below.size).ln();
        size / (below.per_ns + way * (above.per_ns - below.per_ns))
    })
}

/// Points of one size as one.
fn mean(points: &[SpeedPoint]) -> SpeedPoint {
    let per_ns = points.iter().map(|point| point.per_ns).sum::<f64>() / points.len() as f64;
    SpeedPoint { size: points[0].size, per_ns }
}

/// How fast a device is in general.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Floating-point operations per nanosecond in single precision.
    pub f32_flops_per_ns: f64,
    /// The same with TF32 tensor cores.
    pub tf32_flops_per_ns: f64,
    /// The same in 16-bit formats.
    pub half_flops_per_ns: f64,
    /// Bytes per nanosecond to and from device memory.
    pub memory_bytes_per_ns: f64,
    /// Bytes per nanosecond from pinned host memory.
    #[serde(alias = "pinned_copy_bytes_per_ns")]
    pub pinned_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond to pinned host memory. Older profiles have one rate for both
    /// directions.
    #[serde(default = "unknown_rate")]
    pub pinned_copy_out_bytes_per_ns: f64,
    /// Bytes per nanosecond from pageable host memory.
    pub pageable_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond to pageable host memory.
    pub pageable_copy_out_bytes_per_ns: f64,
    /// The duration of the smallest kernel.
    #[serde(rename = "kernel_floor_ns")]
    pub kernel_floor: Nanos,
}

/// How the driver clears memory that was given back. Copies from the host take longer meanwhile, on an H200; copies to pinned host
/// memory and fills of memory do not. A `cuMemAlloc` some time after a large free may wait there, which is not simulated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClearingRates {
    /// Bytes that are cleared per nanosecond.
    pub bytes_per_ns: f64,
    /// Bytes per nanosecond from pinned host memory meanwhile.
    pub pinned_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond from pageable host memory meanwhile.
    pub pageable_copy_in_bytes_per_ns: f64,
}

impl ClearingRates {
    /// `None` where a rate is not a positive number.
    pub(super) fn checked(self) -> Option<ClearingRates> {
        [self.bytes_per_ns, self.pinned_copy_in_bytes_per_ns, self.pageable_copy_in_bytes_per_ns]
            .iter()
            .all(|rate| *rate > 0.0 && rate.is_finite())
            .then_some(self)
    }

    /// How long it takes to clear memory.
    pub(super) fn time(&self, bytes: u64) -> Nanos {
        at_rate(bytes as f64, self.bytes_per_ns)
    }

    /// The time of a copy from the host that takes `usual` at rest, while memory is being cleared for another `left`.
    fn copy_in(&self, bytes: u64, pinned: bool, usual: Nanos, left: Nanos) -> Nanos {
        let rate = if pinned { self.pinned_copy_in_bytes_per_ns } else { self.pageable_copy_in_bytes_per_ns };
        let slow = at_rate(bytes as f64, rate).max(usual);
        if slow <= left {
            return slow;
        }
        let copied_slowly = left.0 as f64 / slow.0 as f64;
        left + Nanos((usual.0 as f64 * (1.0 - copied_slowly)).round() as u64)
    }
}

/// The least share of a product's time that is arithmetic.
const LEAST_ARITHMETIC: f64 = 0.1;

fn unknown_rate() -> f64 {
    f64::NAN
}

impl Rates {
    /// Fills in what older profiles lack; `None` where a rate is not a positive number.
    pub(super) fn checked(mut self) -> Option<Rates> {
        if self.pinned_copy_out_bytes_per_ns.is_nan() {
            self.pinned_copy_out_bytes_per_ns = self.pinned_copy_in_bytes_per_ns;
        }
        [
            self.f32_flops_per_ns,
            self.tf32_flops_per_ns,
            self.half_flops_per_ns,
            self.memory_bytes_per_ns,
            self.pinned_copy_in_bytes_per_ns,
            self.pinned_copy_out_bytes_per_ns,
            self.pageable_copy_in_bytes_per_ns,
            self.pageable_copy_out_bytes_per_ns,
        ]
        .iter()
        .all(|rate| *rate > 0.0 && rate.is_finite())
        .then_some(self)
    }

    /// How long a piece of work keeps its stream busy.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Nanos {
        let bytes = work.traffic_bytes();
        match *work {
            Work::Spin { nanos } => nanos,
            Work::Gemm { dtype, .. } | Work::Attention { dtype, .. } => {
                at_rate(work.flops(), self.flops_per_ns(dtype)).max(self.moving(work))
            }
            Work::Elementwise { .. } | Work::Reduction { .. } => self.moving(work),
            Work::CopyIn { pinned: true, .. } => at_rate(bytes, self.pinned_copy_in_bytes_per_ns),
            Work::CopyOut { pinned: true, .. } => at_rate(bytes, self.pinned_copy_out_bytes_per_ns),
            Work::CopyIn { pinned: false, .. } => at_rate(bytes, self.pageable_copy_in_bytes_per_ns),
            Work::CopyOut { pinned: false, .. } => at_rate(bytes, self.pageable_copy_out_bytes_per_ns),
        }
    }

    /// The time of a product without the part that [`Profile::duration`] adds for moving its operands.
    pub(super) fn arithmetic_alone(&self, time: WorkTime) -> WorkTime {
        let is_valid = time.median_us > 0.0;
        if !is_valid || !matches!(time.work, Work::Gemm { .. }) {
            return time;
        }
        let moving_us = time.work.traffic_bytes() / self.memory_bytes_per_ns / 1e3;
        // Operands that stay in the cache are moved faster than memory allows.
        let square = time.median_us.powi(2) - moving_us.powi(2);
        WorkTime { median_us: square.max(0.0).sqrt().max(LEAST_ARITHMETIC * time.median_us), ..time }
    }

    /// How long a product takes that computes for `arithmetic` and moves its operands meanwhile.
    ///
    /// Its time is near the longer of the two, and above it where both take about as long: the root of the sum of their squares.
    fn moved_meanwhile(&self, arithmetic: Nanos, work: &Work) -> f64 {
        (work.traffic_bytes() / self.memory_bytes_per_ns).hypot(arithmetic.0 as f64)
    }

    /// How long a kernel takes that only moves its operands.
    fn moving(&self, work: &Work) -> Nanos {
        at_rate(work.traffic_bytes(), self.memory_bytes_per_ns).max(self.kernel_floor)
    }

    fn flops_per_ns(&self, dtype: Dtype) -> f64 {
        match dtype {
            Dtype::F32 => self.f32_flops_per_ns,
            Dtype::Tf32 => self.tf32_flops_per_ns,
            Dtype::Bf16 | Dtype::F16 => self.half_flops_per_ns,
        }
    }
}

fn at_rate(amount: f64, per_ns: f64) -> Nanos {
    Nanos((amount / per_ns).ceil() as u64)
}

impl Profile {
    /// How long work takes: measured if there are times of its kind, otherwise by the rates.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Nanos {
        match (self.work.duration(work), work) {
            (Some(arithmetic), Work::Gemm { .. }) => {
                let by_size = self.rates.moved_meanwhile(arithmetic, work);
                Nanos((by_size * self.work.correction(work)).round() as u64)
            }
            (Some(measured), _) => measured,
            (None, _) => self.rates.duration(work),
        }
    }
}

impl Compute for SimDevice {
    /// Operands are ignored: addresses need not be valid.
    fn launch(&mut self, stream: StreamId, work: &Work, _operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        if let Err(unknown) = self.clocks.stream_ready(stream) {
            return self.conclude_checked(call, 0, Err(unknown));
        }
        if matches!(work, Work::Gemm { .. }) && !self.libraries_loaded {
            let requested = self.profile.library_bytes;
            if requested > self.memory.free() {
                return self.conclude(call, 0, Err(DeviceError::OutOfMemory { call, requested }));
            }
            self.memory.overhead += requested;
            self.libraries_loaded = true;
        }
        self.queue(stream, work)
    }
}

impl SimDevice {
    /// How long work takes that a stream does next.
    fn duration_on(&self, stream: StreamId, work: &Work) -> Nanos {
        let usual = self.profile.duration(work);
        match (self.profile.clearing, *work) {
            (Some(clearing), Work::CopyIn { bytes, pinned }) => {
                let begin = self.clocks.stream_ready(stream).unwrap_or_default().max(self.clocks.now());
                clearing.copy_in(bytes, pinned, usual, self.cleared_at.since(begin))
            }
            _ => usual,
        }
    }

    /// Queues work. The host waits where the stream's queue is full, and for the end of a copy from or to pageable host
    /// memory, which the driver makes in parts of its own.
    fn queue(&mut self, stream: StreamId, work: &Work) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let unknown = |handle: UnknownHandle| DeviceError::InvalidValue { call, reason: handle.to_string() };
        let time = self.duration_on(stream, work);
        match work {
            Work::CopyIn { pinned: false, .. } | Work::CopyOut { pinned: false, .. } => {
                self.clocks.run(stream, time).map_err(unknown)?;
                let done = self.clocks.stream_ready(stream).map_err(unknown)?;
                // The measured time of such a copy includes the call.
                self.conclude_costing(Nanos::ZERO, done, call, Ok(()))
            }
            _ => {
                let room = self.clocks.queue_has_room(stream, self.profile.launch_queue).map_err(unknown)?;
                self.conclude_after(room, call, 0, Ok(()))?;
                self.clocks.run(stream, time).map_err(unknown)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::sync::Arc;

    use super::*;
    use crate::device::{Device, sim::SimConfig};
    use oomph_base::{GIB, MIB};

    fn product(m: u32, dtype: Dtype) -> Work {
        Work::Gemm { m, n: 1024, k: 1024, batch: 1, dtype, role: ProductRole::Output }
    }

    fn took(work: Work, median_us: f64) -> WorkTime {
        WorkTime { median_us, p99_us: None, work }
    }

    fn table() -> WorkTable {
        WorkTable::of([
            took(product(8192, Dtype::Bf16), 40.0),
            took(product(1024, Dtype::Bf16), 10.0),
            took(Work::Elementwise { bytes: 1_000_000 }, 2.0),
        ])
        .unwrap()
    }

    #[test]
    fn measured_work_takes_what_was_measured() {
        assert_eq!(table().duration(&product(8192, Dtype::Bf16)), Some(Nanos(40_000)));
        assert_eq!(table().duration(&product(1024, Dtype::Bf16)), Some(Nanos(10_000)));
    }

    #[test]
    fn work_beyond_the_measured_sizes() {
        assert_eq!(table().duration(&product(8, Dtype::Bf16)), Some(Nanos(10_000)));
        assert_eq!(table().duration(&product(81_920, Dtype::Bf16)), Some(Nanos(400_000)));
    }

    #[test]
    fn small_work_scales_by_one_factor() {
        let ragged = |m| Work::Gemm { m, n: 1024, k: 1025, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let measured = [took(product(8200, Dtype::Bf16), 40.0), took(product(1024, Dtype::Bf16), 10.0)];
        // 8192 x 1025 and 8200 x 1024 are the same arithmetic, within a thousandth.
        let table = WorkTable::of(measured.into_iter().chain([took(ragged(8192), 80.0)])).unwrap();
        let Nanos(small) = table.duration(&ragged(1023)).unwrap();
        assert!((19_900..20_100).contains(&small), "{small} ns");
    }

    #[test]
    fn unmeasured_work_uses_similar_work_or_is_unknown() {
        assert_eq!(table().duration(&product(8192, Dtype::F32)), None);
        assert_eq!(table().duration(&Work::Reduction { bytes: 1_000_000 }), Some(Nanos(2_000)));
        let ragged = Work::Gemm { m: 1024, n: 1023, k: 1024, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert_eq!(table().duration(&ragged), Some(Nanos(10_000)));
        assert_eq!(table().duration(&Work::Spin { nanos: Nanos(5) }), None);
    }

    #[test]
    fn ragged_products_have_their_own_times() {
        let ragged =
            Work::Gemm { m: 1024, n: 50_257, k: 1024, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let table = WorkTable::of([took(product(1024, Dtype::Bf16), 10.0), took(ragged, 900.0)]).unwrap();
        assert_eq!(table.duration(&ragged), Some(Nanos(900_000)));
        // The same numbers in another role have rows of other lengths.
        let Work::Gemm { m, n, k, batch, dtype, .. } = ragged else { unreachable!() };
        let of_weight = Work::Gemm { m: n, n: k, k: m, batch, dtype, role: ProductRole::WeightGradient };
        assert!(table.duration(&of_weight) < Some(Nanos(900_000)), "slow only where it was measured to be");
        let as_output = Work::Gemm { m: n, n: k, k: m, batch, dtype, role: ProductRole::Output };
        let likes = Work::Gemm { m: 50_256, n: k, k: m, batch, dtype, role: ProductRole::Output };
        let [Nanos(as_output), Nanos(likes)] = [as_output, likes].map(|work| table.duration(&work).unwrap());
        assert!(as_output.abs_diff(likes) < likes / 1000, "many rows are not ragged rows");
    }

    #[test]
    fn shapes_of_one_size_count_with_their_mean_speed() {
        let turned = Work::Gemm { m: 1024, n: 8192, k: 1024, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        let table = WorkTable::of([took(product(8192, Dtype::F32), 100.0), took(turned, 50.0)]).unwrap();
        assert_eq!(table.duration(&turned), Some(Nanos(66_667)));
    }

    #[test]
    fn impossible_times_are_refused() {
        let refused = WorkTable::of([took(product(8, Dtype::F32), 0.0)]).unwrap_err().to_string();
        assert!(refused.starts_with("0 us for Gemm"), "{refused}");
    }

    proptest! {
        #[test]
        fn no_work_is_faster_than_the_fastest_measured(bytes in 1u64..1 << 40) {
            let measured = [(1_000, 2.0), (1_000_000, 3.0), (1_000_000_000, 300.0)]
                .map(|(bytes, median_us)| took(Work::Elementwise { bytes }, median_us));
            let fastest = measured.iter().map(WorkTime::per_ns).fold(0.0, f64::max);
            let took = WorkTable::of(measured).unwrap().duration(&Work::Elementwise { bytes }).unwrap();
            // Times are whole nanoseconds.
            prop_assert!(took.0 as f64 + 1.0 >= (bytes as f64 / fastest).max(2_000.0));
        }
    }

    const PRODUCT: Work =
        Work::Gemm { m: 4096, n: 4096, k: 4096, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };

    const RATES: Rates = Rates {
        f32_flops_per_ns: 50_000.0,
        tf32_flops_per_ns: 400_000.0,
        half_flops_per_ns: 800_000.0,
        memory_bytes_per_ns: 4_000.0,
        pinned_copy_in_bytes_per_ns: 50.0,
        pinned_copy_out_bytes_per_ns: 40.0,
        pageable_copy_in_bytes_per_ns: 10.0,
        pageable_copy_out_bytes_per_ns: 5.0,
        kernel_floor: Nanos(2_000),
    };

    #[test]
    fn products_are_bound_by_arithmetic_and_passes_by_memory() {
        let flops = 2.0 * 4096f64.powi(3);
        assert_eq!(RATES.duration(&PRODUCT), Nanos((flops / 800_000.0).ceil() as u64));
        assert_eq!(RATES.duration(&Work::Elementwise { bytes: 40_000_000 }), Nanos(10_000));
        assert_eq!(RATES.duration(&Work::Elementwise { bytes: 4 }), RATES.kernel_floor);
        assert_eq!(RATES.duration(&Work::Spin { nanos: Nanos(3) }), Nanos(3));
    }

    #[test]
    fn thin_products_are_bound_by_memory() {
        let thin = Work::Gemm { m: 1 << 20, n: 8, k: 512, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert_eq!(RATES.duration(&thin), at_rate(thin.traffic_bytes(), 4_000.0));
        assert!(RATES.duration(&thin) > at_rate(thin.flops(), 800_000.0));
    }

    #[test]
    fn thin_products_are_measured_by_their_shape() {
        let thin = |k| Work::Gemm { m: 64, n: 64, k, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let cubes = [took(product(1024, Dtype::Bf16), 10.0), took(PRODUCT, 200.0)];
        let profile = |times: &[WorkTime]| {
            let work = Arc::new(WorkTable::of_profile(times, &RATES).unwrap());
            Profile { rates: RATES, work, ..Profile::h200() }
        };
        let by_size = profile(&cubes);
        let by_shape = profile(&[cubes[0], cubes[1], took(thin(1 << 18), 90.0)]);
        assert_eq!(by_shape.duration(&thin(1 << 18)), Nanos(90_000));
        let longer = |work| by_shape.duration(&work).0 as f64 / by_size.duration(&work).0 as f64;
        assert!(longer(thin(1 << 18)) > 2.0);
        assert!((longer(thin(1 << 17)) / longer(thin(1 << 18)) - 1.0).abs() < 0.05, "{}", longer(thin(1 << 17)));
        // Far from all that was measured.
        let row = Work::Gemm { m: 1, n: 4096, k: 4096, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert!((longer(row) - 1.0).abs() < 0.1, "{}", longer(row));
        assert!(cubes.iter().all(|cube| (longer(cube.work) - 1.0).abs() < 1e-3));
    }

    #[test]
    fn copies_run_at_the_rate_of_their_way_and_memory() {
        let took = |work| RATES.duration(&work).0;
        let bytes = 1_000_000;
        assert_eq!(took(Work::CopyIn { bytes, pinned: true }), 20_000);
        assert_eq!(took(Work::CopyOut { bytes, pinned: true }), 25_000);
        assert_eq!(took(Work::CopyIn { bytes, pinned: false }), 100_000);
        assert_eq!(took(Work::CopyOut { bytes, pinned: false }), 200_000);
    }

    #[test]
    fn copies_from_the_host_are_slower_while_memory_is_cleared() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let clearing = device.profile.clearing.unwrap();
        let bytes = 32 * MIB;
        let target = device.alloc(bytes).unwrap();
        let took = |device: &mut SimDevice, work: Work| {
            let begin = device.now();
            device.launch(StreamId::DEFAULT, &work, &[(target, bytes)]).unwrap();
            device.synchronize().unwrap();
            device.now().since(begin).0 as f64
        };
        let works = [Work::CopyIn { bytes, pinned: false }, Work::CopyOut { bytes, pinned: false }];
        let [usual_in, usual_out] = works.map(|work| took(&mut device, work));
        let blocks: Vec<Address> = (0..64).map(|_| device.alloc(GIB).unwrap()).collect();
        blocks.into_iter().for_each(|block| device.free(block).unwrap());
        let [slow_in, same_out] = works.map(|work| took(&mut device, work));
        assert!((slow_in / (bytes as f64 / clearing.pageable_copy_in_bytes_per_ns) - 1.0).abs() < 0.01);
        assert!(slow_in > 2.0 * usual_in && (same_out / usual_out - 1.0).abs() < 0.01);
        device.elapse(clearing.time(64 * GIB));
        assert!((took(&mut device, works[0]) / usual_in - 1.0).abs() < 0.01);
    }

    #[test]
    fn memory_is_cleared_when_the_work_that_uses_it_is_done() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let clearing = device.profile.clearing.unwrap();
        let blocks = [32 * MIB, GIB].map(|bytes| device.alloc(bytes).unwrap());
        device.launch(StreamId::DEFAULT, &Work::Spin { nanos: Nanos(100_000_000) }, &[]).unwrap();
        device.free(blocks[1]).unwrap();
        assert!(device.cleared_at >= Nanos(100_000_000) + clearing.time(GIB));
        assert!(device.cleared_at > device.now());
    }

    #[test]
    fn a_copy_ends_at_its_usual_rate_when_memory_is_cleared() {
        let rates =
            ClearingRates { bytes_per_ns: 1.0, pinned_copy_in_bytes_per_ns: 50.0, pageable_copy_in_bytes_per_ns: 2.0 };
        let took = |left: u64| rates.copy_in(1_000, false, Nanos(100), Nanos(left)).0;
        assert_eq!([0, 250, 499, 500, 9_000].map(took), [100, 300, 499, 500, 500]);
        // No copy is faster meanwhile.
        assert_eq!(rates.copy_in(1_000, true, Nanos(100), Nanos(9_000)).0, 100);
    }

    #[test]
    fn causal_and_backward_attention() {
        let attention = |backward, causal| {
            let shape = |dtype| Work::Attention {
                batch: 8,
                heads: 16,
                queries: 4096,
                keys: 4096,
                head_width: 64,
                dtype,
                backward,
                causal,
            };
            RATES.duration(&shape(Dtype::F32)).0 as f64
        };
        assert!((attention(false, false) / attention(false, true) - 2.0).abs() < 0.01);
        assert!((attention(true, false) / attention(false, false) - 2.5).abs() < 0.01);
    }

    #[test]
    fn measured_times_precede_rates_but_not_traffic() {
        let measured = took(PRODUCT, 1_000.0);
        let times = WorkTable::of([RATES.arithmetic_alone(measured)]).unwrap();
        let profile = Profile { rates: RATES, work: Arc::new(times), ..Profile::h200() };
        assert_eq!(profile.duration(&PRODUCT), Nanos(1_000_000));
        // As much arithmetic in 1 ms, and operands that are moved in 1 ms.
        let wide =
            Work::Gemm { m: 1 << 20, n: 1 << 8, k: 1 << 8, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let slow =
            Profile { rates: Rates { memory_bytes_per_ns: wide.traffic_bytes() / 1e6, ..RATES }, ..profile.clone() };
        assert_eq!(wide.flops(), PRODUCT.flops());
        assert!((slow.duration(&wide).0 as f64 / 1e6 - 2f64.sqrt()).abs() < 0.001, "{:?}", slow.duration(&wide));
        // As much arithmetic, but 34 GB of operands.
        let thin = Work::Gemm { m: 1 << 30, n: 8, k: 8, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert_eq!(thin.flops(), PRODUCT.flops());
        let moving = at_rate(thin.traffic_bytes(), 4_000.0).0 as f64;
        assert!((1.0..1.05).contains(&(profile.duration(&thin).0 as f64 / moving)));
        let other = Work::Gemm { m: 64, n: 64, k: 64, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        assert_eq!(profile.duration(&other), RATES.duration(&other));
    }

    #[test]
    fn the_first_product_loads_the_library() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let library_bytes = SimConfig::default().profile.library_bytes;
        let before = (device.overhead_bytes(), device.free_bytes());
        device.launch(StreamId(0), &Work::Elementwise { bytes: 512 }, &[]).unwrap();
        assert_eq!(device.overhead_bytes(), before.0);
        for _ in 0..2 {
            device.launch(StreamId(0), &PRODUCT, &[]).unwrap();
            let after = (device.overhead_bytes(), device.free_bytes());
            assert_eq!(after, (before.0 + library_bytes, before.1 - library_bytes));
        }
        assert!(library_bytes > 0);
        assert_eq!(device.held_bytes(), 0);
    }

    #[test]
    fn a_library_that_does_not_fit_is_out_of_memory() {
        let Profile { context_bytes, .. } = SimConfig::default().profile;
        let config = SimConfig { capacity_bytes: Some(context_bytes + 10 * MIB), ..SimConfig::default() };
        let mut device = SimDevice::new(config).unwrap();
        assert!(device.launch(StreamId(0), &PRODUCT, &[]).unwrap_err().is_out_of_memory());
        assert_eq!(device.overhead_bytes(), context_bytes);
    }
}
