//! `oomph doctor`.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context;

use super::{
    exit::{self, Outcome},
    options::DeviceOptions,
    output,
};
use crate::{
    base::{Bytes, Dtype, Work},
    device::{
        Device, ProductSupport, calibrate,
        cuda::{self, CheckStatus, CudaCheck},
        sim::{Profile, ProfileFile, SimDevice, WorkTime},
    },
    models::recipe_names,
    strategy::STRATEGIES,
    suite::SuiteFile,
};

/// Checks the set-up: what is available, what is missing, and what that means.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Measure a device instead (driver calls by size, matrix products, memory, copies, launches) and write its profile to
    /// this file, for `--device sim:FILE`. Takes a minute; nothing else should use the device.
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// The device to measure.
    #[arg(long, value_name = "DEVICE", default_value = "cuda", requires = "calibrate")]
    device: String,
}

/// The result of one check.
enum SetupCheck {
    Ok(String),
    Missing(String),
    Broken(String),
}

impl From<CudaCheck> for SetupCheck {
    fn from(check: CudaCheck) -> SetupCheck {
        match check.status {
            CheckStatus::Ok => SetupCheck::Ok(check.details),
            CheckStatus::Missing => SetupCheck::Missing(check.details),
            CheckStatus::Broken => SetupCheck::Broken(check.details),
        }
    }
}

impl fmt::Display for SetupCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupCheck::Ok(words) => write!(f, "ok       {words}"),
            SetupCheck::Missing(words) => write!(f, "missing  {words}"),
            SetupCheck::Broken(words) => write!(f, "broken   {words}"),
        }
    }
}

pub fn run(args: Args) -> Outcome {
    match args.calibrate {
        Some(path) => measure(args.device, &path),
        None => examine(),
    }
}

/// Measures a device and writes its profile.
fn measure(device: String, path: &Path) -> Outcome {
    let spec = DeviceOptions { device, limit: None }.spec()?;
    let mut device = spec.open()?;
    output::complain(&format!("measuring {} ...", device.props().name));
    let products = match spec.lacks_products() {
        None => ProductSupport::Real,
        Some(reason) => {
            output::complain(&format!("matrix products cannot be measured: {reason}"));
            ProductSupport::Replaced
        }
    };
    let calibration = calibrate(&mut *device, products)?;
    let name = path.file_stem().map_or_else(|| "calibrated".into(), |stem| stem.to_string_lossy());
    let profile = calibration.into_profile(&name, spec.driver(), spec.footprint(), &*device);
    fs::write(path, profile.to_toml()?).with_context(|| format!("{} cannot be written", path.display()))?;
    for line in main_figures(&profile, products) {
        output::say(&line)?;
    }
    output::say(&format!(
        "wrote {} call costs and {} work times; simulate the device with --device sim:{}",
        profile.cost.len(),
        profile.work.len(),
        path.display()
    ))?;
    Ok(exit::OK)
}

/// The main figures.
fn main_figures(profile: &ProfileFile, products: ProductSupport) -> Vec<String> {
    let rates = profile.rates;
    let mut lines = Vec::new();
    if products == ProductSupport::Real {
        for dtype in Dtype::ALL {
            let is_it = |time: &&WorkTime| matches!(time.work, Work::Gemm { dtype: of, .. } if of == dtype);
            let speeds = profile.work.iter().filter(is_it).map(WorkTime::per_ns);
            let fastest = speeds.fold(0.0, f64::max) / 1e3;
            lines.push(format!("products       {} at up to {fastest:.0} TFLOP/s", dtype.name()));
        }
    }
    lines.extend([
        format!("memory         {:.0} GB/s", rates.memory_bytes_per_ns),
        format!(
            "copies         in {:.1} GB/s pinned, {:.1} pageable; out {:.1} pinned, {:.1} pageable",
            rates.pinned_copy_in_bytes_per_ns,
            rates.pageable_copy_in_bytes_per_ns,
            rates.pinned_copy_out_bytes_per_ns,
            rates.pageable_copy_out_bytes_per_ns
        ),
        format!("kernels        at least {} each when many are queued", rates.kernel_floor),
        format!(
            "overhead       {} context, including {} for our kernels; {} libraries after the first product, and {} \
             workspace",
            Bytes(profile.context_bytes),
            Bytes(profile.kernel_bytes.unwrap_or(0)),
            Bytes(profile.library_bytes),
            Bytes(profile.workspace_bytes.unwrap_or(0))
        ),
    ]);
    lines
}

/// Runs all checks and prints them.
fn examine() -> Outcome {
    let named = |name: &str, finding| (name.to_owned(), finding);
    let mut findings = vec![
        named("oomph", SetupCheck::Ok(super::VERSION.to_owned())),
        named("embedded", embedded()),
        named("cores", SetupCheck::Ok(thread::available_parallelism().map_or(1, usize::from).to_string())),
        named("simulated", simulated()),
    ];
    findings.extend(cuda::survey().into_iter().map(|finding| (finding.subject.clone(), finding.into())));
    findings.push(named("results", results_folder(Path::new("results/local"))));
    for (name, finding) in findings {
        output::say(&format!("{name:<14} {finding}"))?;
    }
    Ok(exit::OK)
}

fn embedded() -> SetupCheck {
    SetupCheck::Ok(format!(
        "{} strategies, {} workloads, {} suites",
        STRATEGIES.len(),
        recipe_names().count(),
        SuiteFile::embedded().count()
    ))
}

fn simulated() -> SetupCheck {
    let profile = Profile::h200();
    match SimDevice::new(profile) {
        Ok(device) => {
            let props = device.props();
            SetupCheck::Ok(format!(
                "{}, {} with {} for the context; supports: {}",
                props.name,
                Bytes(props.total_bytes),
                Bytes(props.context_bytes),
                props.capabilities
            ))
        }
        Err(error) => SetupCheck::Missing(error.to_string()),
    }
}

/// Whether the folder for results can be written, judged by its nearest existing ancestor.
fn results_folder(folder: &Path) -> SetupCheck {
    let existing = folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("."));
    let writable = fs::metadata(existing).is_ok_and(|metadata| !metadata.permissions().readonly());
    if writable {
        SetupCheck::Ok(format!("{} can be written", folder.display()))
    } else {
        SetupCheck::Missing(format!("{} cannot be written; use --output", folder.display()))
    }
}
