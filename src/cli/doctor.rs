//! `oomph doctor`.

use std::{env, fmt, fs, path::Path, thread};

use super::{exit, failure::Outcome, output};
use crate::{
    device::{Device, sim::Profile, sim::SimDevice},
    strategy::STRATEGIES,
    suite::SuiteFile,
    unit::Bytes,
    workload::recipe_names,
};

/// Checks the set-up line by line: what is there, what is missing, and what follows from that.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// How one check came out.
enum Finding {
    Ok(String),
    Missing(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Ok(words) => write!(f, "ok       {words}"),
            Finding::Missing(words) => write!(f, "missing  {words}"),
        }
    }
}

pub fn run(_: Args) -> Outcome {
    let findings = [
        ("oomph", Finding::Ok(super::VERSION.to_owned())),
        ("embedded", embedded()),
        ("cores", Finding::Ok(thread::available_parallelism().map_or(1, usize::from).to_string())),
        ("simulated", simulated()),
        ("cuda driver", cuda_driver()),
        (
            "cuda device",
            Finding::Missing("this version has no CUDA device; the simulated one is the default".to_owned()),
        ),
        ("results", results_folder(Path::new("results/local"))),
    ];
    for (name, finding) in findings {
        output::say(&format!("{name:<12} {finding}"))?;
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

/// Looks for the driver's library where the loader would, without loading it.
fn cuda_driver() -> Finding {
    let usual = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"];
    let named = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let found = named
        .split(':')
        .filter(|folder| !folder.is_empty())
        .chain(usual)
        .map(|folder| Path::new(folder).join("libcuda.so.1"))
        .find(|library| library.exists());
    match found {
        Some(library) => Finding::Ok(library.display().to_string()),
        None => Finding::Missing("libcuda.so.1 not found: no NVIDIA driver on this machine".to_owned()),
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
