//! PyTorch snapshots: every file that can be read can be converted to a trace, checked, written and
//! read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oomph::{
    base::NoProgress,
    trace::{check, torch::Snapshot},
};

fuzz_target!(|file: &[u8]| {
    let Ok(snapshot) = Snapshot::read(file) else { return };
    let mut written = Vec::new();
    snapshot.write(&mut written, &NoProgress).expect("writing to a vector cannot fail");
    let again = Snapshot::read(&written[..]).expect("a written snapshot can be read");
    assert_eq!(again.segments.len(), snapshot.segments.len());
    assert_eq!(again.traces.len(), snapshot.traces.len());
    for device in snapshot.devices() {
        if let Ok(recording) = snapshot.clone().into_recording("fuzz", Some(device), &NoProgress) {
            check(&recording.trace).expect("the trace of a snapshot is consistent");
        }
    }
});
