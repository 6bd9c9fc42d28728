//! `oomph doctor`.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context;

use super::{
    exit::{self, CommandResult},
    export,
    options::DeviceChoice,
    output,
};
use crate::{
    base::{Bytes, Dtype, Work, write_file},
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
    /// Measure a device instead (driver calls by size, matrix products, memory and how the driver clears it, copies,
    /// launches) and write its profile to this file, for `--card FILE`. Takes a minute; nothing else
    /// should use the device.
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// The device to measure.
    #[arg(long, value_name = "DEVICE", default_value = "cuda", requires = "calibrate")]
    device: String,
}

pub fn run(args: Args) -> CommandResult {
    match args.calibrate {
        Some(path) => measure(args.device, &path),
        None => examine(),
    }
}

/// Measures a device and writes its profile.
fn measure(device: String, path: &Path) -> CommandResult {
    // A minute of measurements must not end with a refusal.
    export::check_replacing(path, None)?;
    exit::clean_up_on_signals()?;
    let spec = DeviceChoice::named(&device).spec()?;
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
    write_file(path, profile.to_toml()?.as_bytes()).with_context(|| format!("{} cannot be written", path.display()))?;
    for line in main_figures(&profile, products) {
        output::say(&line)?;
    }
    output::say(&format!(
        "wrote {} call costs and {} work times; simulate the device with --card {}",
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
    ]);
    lines.extend(profile.clearing.map(|clearing| {
        format!(
            "given back     cleared at {:.0} GB/s; copies in {:.1} GB/s pinned, {:.1} pageable meanwhile",
            clearing.bytes_per_ns, clearing.pinned_copy_in_bytes_per_ns, clearing.pageable_copy_in_bytes_per_ns
        )
    }));
    lines.extend([
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
fn examine() -> CommandResult {
    let cores = thread::available_parallelism().map_or(1, usize::from).to_string();
    let mut checks = vec![
        check("oomph", CheckStatus::Ok, super::VERSION.to_owned()),
        embedded(),
        check("cores", CheckStatus::Ok, cores),
        simulated(),
    ];
    checks.extend(cuda::survey());
    checks.push(results_folder(Path::new("results/local")));
    for CudaCheck { subject, status, details } in checks {
        let status = match status {
            CheckStatus::Ok => "ok",
            CheckStatus::Missing => "missing",
            CheckStatus::Broken => "broken",
        };
        output::say(&format!("{subject:<14} {status:<8} {details}"))?;
    }
    Ok(exit::OK)
}

fn check(subject: &str, status: CheckStatus, details: String) -> CudaCheck {
    CudaCheck { subject: subject.to_owned(), status, details }
}

fn embedded() -> CudaCheck {
    let details = format!(
        "{} strategies, {} workloads, {} suites",
        STRATEGIES.len(),
        recipe_names().count(),
        SuiteFile::embedded().count()
    );
    check("embedded", CheckStatus::Ok, details)
}

fn simulated() -> CudaCheck {
    let profile = Profile::h200();
    match SimDevice::new(profile) {
        Ok(device) => {
            let props = device.props();
            let details = format!(
                "{}, {} with {} for the context; supports: {}",
                props.name,
                Bytes(props.total_bytes),
                Bytes(props.context_bytes),
                props.capabilities
            );
            check("simulated", CheckStatus::Ok, details)
        }
        Err(error) => check("simulated", CheckStatus::Missing, error.to_string()),
    }
}

/// Whether the folder for results can be written, judged by its nearest existing ancestor.
fn results_folder(folder: &Path) -> CudaCheck {
    let existing = folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("."));
    let writable = fs::metadata(existing).is_ok_and(|metadata| !metadata.permissions().readonly());
    if writable {
        check("results", CheckStatus::Ok, format!("{} can be written", folder.display()))
    } else {
        check("results", CheckStatus::Missing, format!("{} cannot be written; use --output", folder.display()))
    }
}
