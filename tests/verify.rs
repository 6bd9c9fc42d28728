//! Re-lives every recording in `workloads/recorded` and compares it entry by entry; and sees what is changed on purpose.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use oomph::{
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::{Companion, Counters, Verdict, Verification, verify},
    strategy::Setup,
    trace::torch::Recording,
};

/// The 72 recordings, by name.
fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded");
    let mut paths: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xz"));
    paths.sort();
    assert_eq!(paths.len(), 72);
    paths
}

fn verify_as_recorded(recording: &Recording, companion: &Companion) -> Verification {
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let limit = companion.memory_fraction.map(|fraction| (fraction * device.props().total_bytes as f64) as u64);
    verify(recording, &Setup { props: device.props(), limit }, &companion.counters)
}

#[test]
fn every_recording_is_exact() {
    let paths = recordings();
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let counted = Mutex::new((0, 0, 0, 0));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let recording = Recording::open(path, None).unwrap();
                    let companion = Companion::beside(path).unwrap().unwrap();
                    let verification = verify_as_recorded(&recording, &companion);
                    if verification.verdict != Verdict::Exact {
                        failures.lock().unwrap().push(format!("{}: {:?}", path.display(), verification.verdict));
                    }
                    let mut sums = counted.lock().unwrap();
                    sums.0 += verification.agreed;
                    sums.1 += verification.empty_caches.len();
                    sums.2 += verification.stats.retries;
                    sums.3 += verification.stats.ooms;
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} diverge:\n{}", failures.len(), failures.join("\n"));
    println!("{:?}", counted.into_inner().unwrap());
}
