//! How long work takes: as measured, where its kind was; by a roofline from the profile's rates, where not.

use serde::{Deserialize, Serialize};

use super::{Profile, SimDevice, WorkTable};
use crate::device::{CallKind, Compute, DeviceError};
use oomph_base::{Address, Dtype, Nanos, StreamId, Work};

/// How fast a device is in general.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "WrittenRates")]
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
    pub pinned_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond to pinned host memory.
    pub pinned_copy_out_bytes_per_ns: f64,
    /// Bytes per nanosecond from pageable host memory.
    pub pageable_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond to pageable host memory.
    pub pageable_copy_out_bytes_per_ns: f64,
    /// What the smallest kernel takes.
    #[serde(rename = "kernel_floor_ns")]
    pub kernel_floor: Nanos,
}

/// Rates as they lie in a file. Before both ways were told apart there was one rate of pinned copies.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRates {
    f32_flops_per_ns: f64,
    tf32_flops_per_ns: f64,
    half_flops_per_ns: f64,
    memory_bytes_per_ns: f64,
    #[serde(alias = "pinned_copy_bytes_per_ns")]
    pinned_copy_in_bytes_per_ns: f64,
    pinned_copy_out_bytes_per_ns: Option<f64>,
    pageable_copy_in_bytes_per_ns: f64,
    pageable_copy_out_bytes_per_ns: f64,
    #[serde(rename = "kernel_floor_ns")]
    kernel_floor: Nanos,
}

impl From<WrittenRates> for Rates {
    fn from(written: WrittenRates) -> Rates {
        Rates {
            f32_flops_per_ns: written.f32_flops_per_ns,
            tf32_flops_per_ns: written.tf32_flops_per_ns,
            half_flops_per_ns: written.half_flops_per_ns,
            memory_bytes_per_ns: written.memory_bytes_per_ns,
            pinned_copy_in_bytes_per_ns: written.pinned_copy_in_bytes_per_ns,
            pinned_copy_out_bytes_per_ns: written
                .pinned_copy_out_bytes_per_ns
                .unwrap_or(written.pinned_copy_in_bytes_per_ns),
            pageable_copy_in_bytes_per_ns: written.pageable_copy_in_bytes_per_ns,
            pageable_copy_out_bytes_per_ns: written.pageable_copy_out_bytes_per_ns,
            kernel_floor: written.kernel_floor,
        }
    }
}

impl Rates {
    /// Whether every rate is one that a device can have.
    pub(super) fn are_possible(&self) -> bool {
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

    /// How long a kernel takes that only moves the operands.
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

/// How long a piece of work keeps its stream busy: as long as its like was measured to, and never less than moving the
/// operands of a product takes, because a long thin product is not like a square one.
pub(super) fn duration(rates: &Rates, times: &WorkTable, work: &Work) -> Nanos {
    match (times.duration(work), work) {
        (Some(measured), Work::Gemm { .. }) => measured.max(rates.moving(work)),
        (Some(measured), _) => measured,
        (None, _) => rates.duration(work),
    }
}

impl Profile {
    /// How long a piece of work keeps a stream of this GPU busy.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Nanos {
        duration(&self.rates, &self.work, work)
    }
}

impl Compute for SimDevice {
    /// Operands are not looked at: an address may be anything that the caller thinks it is.
    fn launch(&mut self, stream: StreamId, work: &Work, _operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        if let Err(unknown) = self.clocks.stream_ready(stream) {
            return self.conclude_checked(call, 0, Err(unknown));
        }
        if matches!(work, Work::Gemm { .. }) && !self.libraries_loaded {
            let requested = self.library_bytes;
            if !self.physical.load_library(requested) {
                return self.conclude(call, 0, Err(DeviceError::OutOfMemory { call, requested }));
            }
            self.libraries_loaded = true;
        }
        let launched = self.conclude(call, 0, Ok(()));
        let queued = self.clocks.run(stream, duration(&self.rates, &self.work, work));
        launched.and(queued.map_err(|unknown| DeviceError::InvalidValue { call, reason: unknown.to_string() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        Device,
        sim::{SimConfig, WorkTime},
    };
    use oomph_base::{MIB, ProductRole};

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
    fn large_products_are_bound_by_arithmetic_and_elementwise_work_by_memory() {
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
    fn copies_run_at_the_rate_of_their_way_and_memory() {
        let took = |work| RATES.duration(&work).0;
        let bytes = 1_000_000;
        assert_eq!(took(Work::CopyIn { bytes, pinned: true }), 20_000);
        assert_eq!(took(Work::CopyOut { bytes, pinned: true }), 25_000);
        assert_eq!(took(Work::CopyIn { bytes, pinned: false }), 100_000);
        assert_eq!(took(Work::CopyOut { bytes, pinned: false }), 200_000);
    }

    #[test]
    fn a_mask_halves_attention_and_its_way_back_takes_two_and_a_half_times() {
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
    fn measured_times_come_before_rates_but_not_before_moving_the_operands() {
        let times = WorkTable::of([WorkTime { median_us: 1_000.0, p99_us: None, work: PRODUCT }]).unwrap();
        assert_eq!(duration(&RATES, &times, &PRODUCT), Nanos(1_000_000));
        // As much arithmetic, but 137 GB of operands.
        let thin = Work::Gemm { m: 1 << 30, n: 8, k: 8, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert_eq!(thin.flops(), PRODUCT.flops());
        assert_eq!(duration(&RATES, &times, &thin), at_rate(thin.traffic_bytes(), 4_000.0));
        let other = Work::Gemm { m: 64, n: 64, k: 64, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        assert_eq!(duration(&RATES, &times, &other), RATES.duration(&other));
    }

    #[test]
    fn the_first_product_loads_the_library_and_later_ones_do_not() {
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
