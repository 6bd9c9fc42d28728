//! `oomph doctor`.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context;

use super::{exit, failure::Outcome, options::DeviceOptions, output};
use crate::{
    device::{
        Device, calibrate,
        cuda::{self, Verdict},
        sim::{Profile, SimDevice},
    },
    strategy::STRATEGIES,
    suite::SuiteFile,
    unit::Bytes,
    workload::recipe_names,
};

/// Checks the set-up line by line: what is there, what is missing, and what follows from that.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Measure a device instead (every driver call by size, copies, launches) and write a profile to this file, which
    /// `--device sim:FILE` then simulates. Takes a minute, and wants the device for itself.
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// Which device is measured.
    #[arg(long, value_name = "DEVICE", default_value = "cuda", requires = "calibrate")]
    device: String,
}

/// How one check came out.
enum Finding {
    Ok(String),
    Missing(String),
    Broken(String),
}

impl From<cuda::Finding> for Finding {
    fn from(finding: cuda::Finding) -> Finding {
        match finding.verdict {
            Verdict::Ok => Finding::Ok(finding.words),
            Verdict::Missing => Finding::Missing(finding.words),
            Verdict::Broken => Finding::Broken(finding.words),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Ok(words) => write!(f, "ok       {words}"),
            Finding::Missing(words) => write!(f, "missing  {words}"),
            Finding::Broken(words) => write!(f, "broken   {words}"),
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
    let calibration = calibrate(&mut *device)?;
    let name = path.file_stem().map_or_else(|| "calibrated".into(), |stem| stem.to_string_lossy());
    let profile = calibration.into_profile(&name, spec.driver(), &*device);
    fs::write(path, profile.to_toml()?).with_context(|| format!("{} cannot be written", path.display()))?;
    output::say(&format!("{} costs written; simulate it with --device sim:{}", profile.cost.len(), path.display()))?;
    Ok(exit::OK)
}

/// Looks at the set-up and says what was found.
fn examine() -> Outcome {
    let named = |name: &str, finding| (name.to_owned(), finding);
    let mut findings = vec![
        named("oomph", Finding::Ok(super::VERSION.to_owned())),
        named("embedded", embedded()),
        named("cores", Finding::Ok(thread::available_parallelism().map_or(1, usize::from).to_string())),
        named("simulated", simulated()),
    ];
    findings.extend(cuda::survey().into_iter().map(|finding| (finding.subject.clone(), finding.into())));
    findings.push(named("cublas", library("libcublas.so")));
    findings.push(named("nvrtc", library("libnvrtc.so")));
    findings.push(named("results", results_folder(Path::new("results/local"))));
    for (name, finding) in findings {
        output::say(&format!("{name:<14} {finding}"))?;
    }
    Ok(exit::OK)
}

fn embedded() -> Finding {
    Finding::Ok(format!(
        "{} strategies, {} workloads, {} suites",
        STRATEGIES.len(),
        recipe_names().count(),
        SuiteFile::embedded().count()
    ))
}

fn simulated() -> Finding {
    let profile = Profile::h200();
    match SimDevice::new(profile) {
        Ok(device) => {
            let props = device.props();
            Finding::Ok(format!(
                "{}, {} of which {} for the context; can: {}",
                props.name,
                Bytes(props.total_bytes),
                Bytes(props.context_bytes),
                props.capabilities
            ))
        }
        Err(error) => Finding::Missing(error.to_string()),
    }
}

/// Where the loader finds libraries beside the folders of `LD_LIBRARY_PATH`, and where the toolkit puts its own.
const LIBRARY_FOLDERS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
];

/// Looks for a library of the toolkit, of any version, without loading it. None is needed: the kernels of this program
/// load with the driver alone.
fn library(prefix: &str) -> Finding {
    let named = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let found = named
        .split(':')
        .filter(|folder| !folder.is_empty())
        .chain(LIBRARY_FOLDERS)
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten())
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .min();
    match found {
        Some(path) => Finding::Ok(path.display().to_string()),
        None => Finding::Missing(format!("no {prefix} where the loader looks; nothing here needs it")),
    }
}

/// Whether the folder for results can be written, tried at the nearest ancestor that exists.
fn results_folder(folder: &Path) -> Finding {
    let existing = folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("."));
    let writable = fs::metadata(existing).is_ok_and(|metadata| !metadata.permissions().readonly());
    if writable {
        Finding::Ok(format!("{} can be written", folder.display()))
    } else {
        Finding::Missing(format!("{} cannot be written; use --output", folder.display()))
    }
}
