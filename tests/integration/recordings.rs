//! The recordings of real PyTorch programs in the repository, for all tests that verify them.

use std::path::{Path, PathBuf};

use oomph::{
    base::NoProgress,
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::{Companion, Verification, verify},
    strategy::Setup,
    trace::torch::Recording,
};

/// All 72 recordings, by name.
pub fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded");
    let mut paths: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xz"));
    paths.sort();
    assert_eq!(paths.len(), 72);
    paths
}

/// Verifies a recording under the memory fraction that it was made with.
pub fn verify_as_recorded(recording: &Recording, companion: &Companion) -> Verification {
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let limit = companion.memory_fraction.map(|fraction| (fraction * device.props().total_bytes as f64) as u64);
    verify(recording, &Setup { props: device.props(), limit }, &companion.counters, &NoProgress)
}
