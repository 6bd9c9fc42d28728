//! Snapshots of replays, and the rule for files that are already there: what `convert` and `replay --export-snapshot`
//! share.

use std::path::Path;

use anyhow::anyhow;

use super::{failure::Failure, output};
use crate::{
    base::Progress,
    measure::torch_snapshot::{WitnessError, Witnessed, witness},
    replay::{OnOutOfMemory, Replay, ReplayError},
    trace,
};

/// Replays on a fresh device, and returns the replay as PyTorch would have recorded it. If memory runs out and the
/// replay ends there, a note says so.
pub fn witnessed(replay: &Replay<'_>) -> Result<Witnessed, Failure> {
    let witnessed = witness(replay).map_err(|error| match error {
        WitnessError::Replay(ReplayError::DeviceSpec(error)) => error.into(),
        error => Failure::usage(error),
    })?;
    if let (Some(oom), OnOutOfMemory::Stop) = (witnessed.replayed.first_oom, replay.options.on_out_of_memory) {
        output::complain(&format!("memory runs out at event {}: the snapshot ends there", oom.event));
    }
    Ok(witnessed)
}

/// Writes a snapshot, whole or not at all, and says so.
pub fn save(witnessed: &Witnessed, path: &Path, progress: &dyn Progress) -> Result<String, Failure> {
    trace::save(path, |to| Ok(witnessed.snapshot.write(to, progress)?)).map_err(Failure::usage)?;
    let entries: usize = witnessed.snapshot.traces.iter().map(Vec::len).sum();
    Ok(format!("{entries} entries written to {}", path.display()))
}

/// Refuses to overwrite anything but a trace in oomph's own format, unless forced to: a recording of a program that ran
/// for days looks like a file that we made.
pub fn check_overwriting(path: &Path, force: bool) -> Result<(), Failure> {
    if force || !path.is_file() {
        return Ok(());
    }
    let what = match trace::recognise(path) {
        Ok(format) if format.name == trace::NATIVE => return Ok(()),
        Ok(format) => format!("may be a recording ({})", format.name),
        Err(_) => "is no trace".to_owned(),
    };
    let path = path.display();
    Err(Failure::usage(anyhow!("{path} is there already and {what}; --force overwrites it")))
}
