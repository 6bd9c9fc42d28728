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
    checks.push(match blas::blas() {
        Ok(blas) => CudaCheck::new(CheckStatus::Ok, "cublas", format!("{}, {}", blas.version, blas.place)),
        Err(reason) => {
            let without = "without it matrix products are replaced by waiting; everything else works";
            CudaCheck::new(CheckStatus::Missing, "cublas", format!("{reason}; {without}"))
        }
    });
    checks
}

/// Stops at the first failing step that later ones need.
fn driver_and_devices() -> Vec<CudaCheck> {
    if !library::is_present() {
        let kernels = format!("no driver to load them; they need {}", kernels::OLDEST);
        let library = "libcuda.so.1 was not found: no NVIDIA driver on this machine";
        return vec![
            CudaCheck::new(CheckStatus::Missing, "cuda library", library),
            CudaCheck::new(CheckStatus::Missing, "cuda kernels", kernels),
        ];
    }
    let mut checks = vec![CudaCheck::new(CheckStatus::Ok, "cuda library", "the driver's library was found")];
    if let Err(reason) = library::initialise() {
        checks.push(CudaCheck::new(CheckStatus::Broken, "cuda driver", reason));
        return checks;
    }
    let driver = match library::version() {
        Some((major, minor)) => format!("supports CUDA up to {major}.{minor}"),
        None => "does not report its version".to_owned(),
    };
    checks.push(CudaCheck::new(CheckStatus::Ok, "cuda driver", driver));
    match library::device_count() {
        Ok(0) => checks.push(CudaCheck::new(CheckStatus::Missing, "cuda devices", "the driver sees no GPU")),
        Ok(count) => checks.extend((0..count).flat_map(check_gpu)),
        Err(reason) => checks.push(CudaCheck::new(CheckStatus::Broken, "cuda devices", reason)),
    }
    checks
}

/// One GPU, its kernels and its products.
fn check_gpu(ordinal: u32) -> Vec<CudaCheck> {
    let subject = format!("cuda:{ordinal}");
    let mut device = match CudaDevice::open(ordinal) {
        Ok(device) => device,
        Err(reason) => return vec![CudaCheck::new(CheckStatus::Broken, subject, reason.to_string())],
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
    let (status, kernels) = match round_trip(&mut device) {
        Ok(true) => (
            CheckStatus::Ok,
            format!("load and run: a pattern was written and found again; they need {}", kernels::OLDEST),
        ),
        Ok(false) => (CheckStatus::Broken, "a pattern that was written was not found again".to_owned()),
        Err(error) => (CheckStatus::Broken, error.to_string()),
    };
    let mut checks = vec![
        CudaCheck::new(CheckStatus::Ok, subject.clone(), words),
        CudaCheck::new(status, format!("{subject} kernels"), kernels),
    ];
    if blas::blas().is_ok() {
        let (status, products) = products(&mut device)
            .map_or_else(|failure| (CheckStatus::Broken, failure), |right| (CheckStatus::Ok, right));
        checks.push(CudaCheck::new(status, format!("{subject} products"), products));
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
fn products(device: &mut CudaDevice) -> Result<String, String> {
    for dtype in Dtype::ALL {
        let failure = match ones_times_ones(device, dtype) {
            Ok(true) => continue,
            Ok(false) => "the product of two matrices of ones is wrong".to_owned(),
            Err(error) => error.to_string(),
        };
        return Err(format!("{}: {failure}", dtype.name()));
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
