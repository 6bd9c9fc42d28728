//! How long work takes: a roofline from the profile's rates.
//!
//! The rates are the vendor's published peaks, not measurements, except for the copies: good enough to keep streams
//! busy for about the right time, too good for a prediction of step times.

use super::SimDevice;
use crate::{
    device::{CallKind, Compute, DeviceError},
    unit::{Address, Dtype, Nanos, StreamId, Work},
};

/// How fast a device is.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
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
    /// Bytes per nanosecond between device and pinned host memory.
    pub pinned_copy_bytes_per_ns: f64,
    /// Bytes per nanosecond from pageable host memory.
    pub pageable_copy_in_bytes_per_ns: f64,
    /// Bytes per nanosecond to pageable host memory.
    pub pageable_copy_out_bytes_per_ns: f64,
    /// What the smallest kernel takes.
    #[serde(rename = "kernel_floor_ns")]
    pub kernel_floor: Nanos,
}

impl Rates {
    /// Published dense peaks of an H200 SXM; the copies as measured.
    pub const H200: Rates = Rates {
        f32_flops_per_ns: 67_000.0,
        tf32_flops_per_ns: 494_500.0,
        half_flops_per_ns: 989_000.0,
        memory_bytes_per_ns: 4_800.0,
        pinned_copy_bytes_per_ns: 55.0,
        pageable_copy_in_bytes_per_ns: 18.0,
        pageable_copy_out_bytes_per_ns: 3.9,
        kernel_floor: Nanos(2_000),
    };

    /// How long a piece of work keeps its stream busy.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Nanos {
        match *work {
            Work::Spin { nanos } => nanos,
            Work::Gemm { m, n, k, batch, dtype } => {
                let [m, n, k, batch] = [m, n, k, batch].map(f64::from);
                self.kernel(2.0 * m * n * k * batch, (m * k + k * n + m * n) * batch * width(dtype), dtype)
            }
            Work::Attention { batch, heads, queries, keys, head_width, dtype, backward, causal } => {
                let [batch, heads, queries, keys, head_width] =
                    [batch, heads, queries, keys, head_width].map(f64::from);
                let passes = if backward { 2.5 } else { 1.0 };
                let seen = if causal { 0.5 } else { 1.0 };
                let rows = batch * heads * head_width;
                let flops = 4.0 * rows * queries * keys * seen * passes;
                self.kernel(flops, 2.0 * rows * (queries + keys) * width(dtype) * passes, dtype)
            }
            Work::Elementwise { bytes } | Work::Reduction { bytes } => self.kernel(0.0, bytes as f64, Dtype::F32),
            Work::CopyIn { bytes, pinned: false } => at_rate(bytes as f64, self.pageable_copy_in_bytes_per_ns),
            Work::CopyOut { bytes, pinned: false } => at_rate(bytes as f64, self.pageable_copy_out_bytes_per_ns),
            Work::CopyIn { bytes, pinned: true } | Work::CopyOut { bytes, pinned: true } => {
                at_rate(bytes as f64, self.pinned_copy_bytes_per_ns)
            }
        }
    }

    /// Whichever takes longer: the arithmetic, or moving the operands.
    fn kernel(&self, flops: f64, bytes: f64, dtype: Dtype) -> Nanos {
        let flops_per_ns = match dtype {
            Dtype::F32 => self.f32_flops_per_ns,
            Dtype::Tf32 => self.tf32_flops_per_ns,
            Dtype::Bf16 | Dtype::F16 => self.half_flops_per_ns,
        };
        at_rate(flops, flops_per_ns).max(at_rate(bytes, self.memory_bytes_per_ns)).max(self.kernel_floor)
    }
}

/// Bytes of one number.
fn width(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 | Dtype::Tf32 => 4.0,
        Dtype::Bf16 | Dtype::F16 => 2.0,
    }
}

fn at_rate(amount: f64, per_ns: f64) -> Nanos {
    Nanos((amount / per_ns).ceil() as u64)
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
        let queued = self.clocks.run(stream, self.rates.duration(work));
        launched.and(queued.map_err(|unknown| DeviceError::InvalidValue { call, reason: unknown.to_string() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::{Device, sim::SimConfig},
        unit::{GIB, MIB},
    };

    const PRODUCT: Work = Work::Gemm { m: 4096, n: 4096, k: 4096, batch: 1, dtype: Dtype::Bf16 };

    #[test]
    fn large_products_are_bound_by_arithmetic_and_elementwise_work_by_memory() {
        let rates = Rates::H200;
        let flops = 2.0 * 4096f64.powi(3);
        assert_eq!(rates.duration(&PRODUCT), Nanos((flops / 989_000.0).ceil() as u64));
        assert_eq!(rates.duration(&Work::Elementwise { bytes: 48 * 1_000_000 }), Nanos(10_000));
        assert_eq!(rates.duration(&Work::Elementwise { bytes: 4 }), rates.kernel_floor);
        assert_eq!(rates.duration(&Work::Spin { nanos: Nanos(3) }), Nanos(3));
    }

    #[test]
    fn pinned_copies_are_faster() {
        let copy_out = |pinned| Rates::H200.duration(&Work::CopyOut { bytes: GIB, pinned });
        assert!(copy_out(true).0 * 10 < copy_out(false).0);
    }

    #[test]
    fn the_first_product_loads_the_library_and_later_ones_do_not() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let before = (device.overhead_bytes(), device.free_bytes());
        device.launch(StreamId(0), &Work::Elementwise { bytes: 512 }, &[]).unwrap();
        assert_eq!(device.overhead_bytes(), before.0);
        for _ in 0..2 {
            device.launch(StreamId(0), &PRODUCT, &[]).unwrap();
            assert_eq!((device.overhead_bytes(), device.free_bytes()), (before.0 + 68 * MIB, before.1 - 68 * MIB));
        }
        assert_eq!(device.held_bytes(), 0);
    }

    #[test]
    fn a_library_that_does_not_fit_is_out_of_memory() {
        let mut device = SimDevice::new(SimConfig { capacity_bytes: Some(580 * MIB), ..SimConfig::default() }).unwrap();
        assert!(device.launch(StreamId(0), &PRODUCT, &[]).unwrap_err().is_out_of_memory());
        assert_eq!(device.overhead_bytes(), 526 * MIB);
    }
}
