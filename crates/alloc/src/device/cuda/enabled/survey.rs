//! Checks of the machine's CUDA, step by step, for `doctor`.

use super::{
    super::{CheckStatus, CudaCheck},
    CudaDevice, blas, kernels, library,
};
use crate::device::{Compute, Device, DeviceError, Patterned, Patterns};
use oomph_base::{Bytes, Dtype, MIB, ProductRole, StreamId, Work};

const STREAM: StreamId = StreamId::DEFAULT;

/// Checks the library, the driver, every GPU with its kernels and products, and cuBLAS.
#[must_use]
pub fn survey() -> Vec<CudaCheck> {
    let mut checks = driver_and_devices();
    let cublas = blas::blas().map(|blas| format!("{}, {}", blas.version, blas.place));
    checks.push(CudaCheck::of(
        "cublas",
        cublas.map_err(|reason| {
            (
                CheckStatus::Missing,
                format!("{reason}; without it matrix products are replaced by waiting; everything else works"),
            )
        }),
    ));
    checks
}

/// Stops at the first failing step that later ones need.
fn driver_and_devices() -> Vec<CudaCheck> {
    let mut checks = Vec::new();
    let library = if library::is_present() {
        Ok("the driver's library was found".to_owned())
    } else {
        Err((CheckStatus::Missing, "libcuda.so.1 was not found: no NVIDIA driver on this machine".to_owned()))
    };
    let present = library.is_ok();
    checks.push(CudaCheck::of("cuda library", library));
    if !present {
        let words = format!("no driver to load them; they need {}", kernels::OLDEST);
        checks.push(CudaCheck::of("cuda kernels", Err((CheckStatus::Missing, words))));
        return checks;
    }
    let driver =
        library::initialise().map_err(|reason| (CheckStatus::Broken, reason)).map(|()| match library::version() {
            Some((major, minor)) => format!("supports CUDA up to {major}.{minor}"),
            None => "does not report its version".to_owned(),
        });
    let starts = driver.is_ok();
    checks.push(CudaCheck::of("cuda driver", driver));
    if !starts {
        return checks;
    }
    match library::device_count() {
        Ok(0) => {
            checks.push(CudaCheck::of("cuda devices", Err((CheckStatus::Missing, "the driver sees no GPU".to_owned()))))
        }
        Ok(count) => checks.extend((0..count).flat_map(check_gpu)),
        Err(reason) => checks.push(CudaCheck::of("cuda devices", Err((CheckStatus::Broken, reason)))),
    }
    checks
}

/// One GPU and its kernels.
fn check_gpu(ordinal: u32) -> Vec<CudaCheck> {
    let subject = format!("cuda:{ordinal}");
    let mut device = match CudaDevice::open(ordinal) {
        Ok(device) => device,
        Err(reason) => return vec![CudaCheck::of(subject, Err((CheckStatus::Broken, reason.to_string())))],
    };
    let props = device.props();
    let words = format!(
        "{}, {} of which {} are free; pages of {}; can: {}",
        props.name,
        Bytes(props.total_bytes),
        Bytes(device.free_bytes()),
        Bytes(props.page_bytes),
        props.capabilities
    );
    let kernels = match round_trip(&mut device) {
        Ok(true) => Ok(format!("load and run: a pattern was written and found again; they need {}", kernels::OLDEST)),
        Ok(false) => Err((CheckStatus::Broken, "a pattern that was written was not found again".to_owned())),
        Err(error) => Err((CheckStatus::Broken, error.to_string())),
    };
    let mut checks =
        vec![CudaCheck::of(subject.clone(), Ok(words)), CudaCheck::of(format!("{subject} kernels"), kernels)];
    if blas::blas().is_ok() {
        checks.push(CudaCheck::of(format!("{subject} products"), products(&mut device)));
    }
    checks
}

/// Whether a pattern that is written to memory is found there again, and another one is not.
fn round_trip(device: &mut CudaDevice) -> Result<bool, DeviceError> {
    let block = Patterned { address: device.alloc(MIB)?, bytes: MIB, key: 1 };
    device.fill_blocks(STREAM, &[block])?;
    device.verify_blocks(STREAM, &[block, Patterned { key: 2, ..block }])?;
    device.synchronize()?;
    let found = device.verified()?;
    device.free(block.address)?;
    Ok(found.blocks == 2 && found.damaged.iter().map(|damage| damage.key).eq([2]))
}

/// Checks that products are correct in every format.
fn products(device: &mut CudaDevice) -> Result<String, (CheckStatus, String)> {
    for dtype in Dtype::ALL {
        let failure = match ones_times_ones(device, dtype) {
            Ok(true) => continue,
            Ok(false) => "the product of two matrices of ones is wrong".to_owned(),
            Err(error) => error.to_string(),
        };
        return Err((CheckStatus::Broken, format!("{}: {failure}", dtype.name())));
    }
    Ok(format!("{} are correct", Dtype::ALL.map(Dtype::name).join(", ")))
}

/// Whether the product of two matrices of ones is correct.
fn ones_times_ones(device: &mut CudaDevice, dtype: Dtype) -> Result<bool, DeviceError> {
    const SIDE: u32 = 64;
    let bytes = u64::from(SIDE * SIDE) * dtype.bytes();
    let one = number(dtype, 1.0);
    let ones: Vec<u8> = one.iter().copied().cycle().take(bytes as usize).collect();
    let [left, right, result] = [0; 3].map(|_| device.alloc(bytes));
    let operands = [(left?, bytes), (right?, bytes), (result?, bytes)];
    for (address, _) in operands {
        device.write(STREAM, address, &ones)?;
    }
    let work = Work::Gemm { m: SIDE, n: SIDE, k: SIDE, batch: 1, dtype, role: ProductRole::Output };
    device.launch(STREAM, &work, &operands)?;
    let mut seen = vec![0; bytes as usize];
    device.read(STREAM, operands[2].0, &mut seen)?;
    for (address, _) in operands {
        device.free(address)?;
    }
    let expected = number(dtype, SIDE as f32);
    Ok(seen.chunks_exact(expected.len()).all(|found| *found == expected))
}

/// A number as it is stored. Only powers of two are used, which every format has.
fn number(dtype: Dtype, value: f32) -> Vec<u8> {
    let single = value.to_bits();
    match dtype {
        Dtype::F32 | Dtype::Tf32 => single.to_le_bytes().to_vec(),
        Dtype::Bf16 => ((single >> 16) as u16).to_le_bytes().to_vec(),
        // Half precision has a shorter exponent with another middle; no fraction is left to carry
        // over.
        Dtype::F16 => ((((single >> 23) + 15 - 127) << 10) as u16).to_le_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_in_every_format() {
        for dtype in Dtype::ALL {
            assert_eq!(number(dtype, 64.0).len() as u64, dtype.bytes());
        }
        assert_eq!(number(Dtype::F32, 64.0), 64f32.to_le_bytes());
        assert_eq!(number(Dtype::F16, 64.0), [0x00, 0x54]);
        assert_eq!(number(Dtype::F16, 1.0), [0x00, 0x3c]);
        assert_eq!(number(Dtype::Bf16, 1.0), [0x80, 0x3f]);
    }

    #[test]
    fn a_survey_covers_kernels_and_cublas() {
        let checks = survey();
        let subjects: Vec<&str> = checks.iter().map(|check| check.subject.as_str()).collect();
        assert!(subjects.ends_with(&["cublas"]), "{subjects:?}");
        assert!(checks.iter().any(|check| check.details.contains("CUDA 9.0")) || subjects.contains(&"cuda devices"));
    }
}
