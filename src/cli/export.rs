//! Snapshots of replays, and the rule for files that are already there: what `convert` and `replay --export-snapshot`
//! share.

use std::path::Path;

use anyhow::anyhow;

use super::{failure::Failure, output};
use crate::{
    base::Progress,
    device::{DeviceSpec, wrap::capped},
    measure::witness::{Witnessed, witness},
    plugin, replay,
    strategy::{Context, Setup, Silent, StrategySpec},
    trace::{self, Source},
};

/// A replay that is to be told as PyTorch would have recorded it.
pub struct Export<'a> {
    pub source: &'a dyn Source,
    pub strategy: StrategySpec,
    pub device: DeviceSpec,
    pub limit: Option<u64>,
    pub options: replay::Options<'a>,
}

impl Export<'_> {
    /// Replays on a fresh device. Where memory runs out and the replay ends, that is said.
    pub fn witness(&self) -> Result<Witnessed, Failure> {
        let mut device = capped(self.device.open()?, plugin::cap(&self.strategy, self.limit));
        let setup = Setup { props: device.props(), limit: self.limit };
        let mut strategy = plugin::build(&self.strategy, &setup).map_err(Failure::usage)?;
        let witnessed = witness(self.source, &self.strategy, &mut *strategy, &mut *device, &self.options)
            .map_err(Failure::usage)?;
        strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
        if let (Some(oom), replay::OnOutOfMemory::Stop) = (witnessed.replayed.first_oom, self.options.on_out_of_memory)
        {
            output::complain(&format!("memory runs out at event {}: the snapshot ends there", oom.event));
        }
        Ok(witnessed)
    }
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
