//! PyTorch snapshots: whatever can be read can be told, checked, written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oomph::{
    base::NoProgress,
    trace::{check, torch::Snapshot},
};

fuzz_target!(|file: &[u8]| {
    let Ok(snapshot) = Snapshot::read(file) else { return };
    let mut written = Vec::new();
    snapshot.write(&mut written, &NoProgress).expect("a vector takes everything");
    let again = Snapshot::read(&written[..]).expect("what is written can be read");
    assert_eq!(again.segments.len(), snapshot.segments.len());
    assert_eq!(again.traces.len(), snapshot.traces.len());
    for device in snapshot.devices() {
        if let Ok(recording) = snapshot.clone().into_recording("fuzz", Some(device), &NoProgress) {
            check(&recording.trace).expect("a told story holds together");
        }
    }
});
