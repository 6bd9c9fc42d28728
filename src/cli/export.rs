//! Results in files of the user's choice: `--export-csv` and its siblings, and snapshots of
//! replays.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::{exit::CommandError, output};
use crate::{
    base::Progress,
    measure::{
        CaseRecord,
        torch_snapshot::{RecordedReplay, SnapshotExportError, record_snapshot},
    },
    replay::{OnOutOfMemory, Replay, ReplayError},
    report::{
        self, Medium, Render,
        html::{self, PageRun},
    },
    trace,
};

/// Replays on a fresh device, and returns the replay as PyTorch would have recorded it. An OOM that
/// ends the replay is reported.
pub fn witnessed(replay: &Replay<'_>) -> Result<RecordedReplay, CommandError> {
    let witnessed = record_snapshot(replay).map_err(|error| match error {
        SnapshotExportError::Replay(ReplayError::DeviceSpec(error)) => error.into(),
        error => CommandError::usage(error),
    })?;
    if let (Some(oom), OnOutOfMemory::Stop) = (witnessed.replayed.first_oom, replay.options.on_out_of_memory) {
        output::complain(&format!("out of memory at event {}: the snapshot ends there", oom.event));
    }
    Ok(witnessed)
}

/// Writes a snapshot, whole or not at all, and returns a message.
pub fn save(witnessed: &RecordedReplay, path: &Path, progress: &dyn Progress) -> Result<String, CommandError> {
    trace::save(path, |to| Ok(witnessed.snapshot.write(to, progress)?)).map_err(CommandError::usage)?;
    let entries: usize = witnessed.snapshot.traces.iter().map(Vec::len).sum();
    Ok(format!("{entries} entries written to {}", path.display()))
}

/// Refuses to overwrite anything but a trace in oomph's own format, unless forced: another file may
/// be a recording of a program that ran for days.
pub fn check_overwriting(path: &Path, force: bool) -> Result<(), CommandError> {
    if force || !path.is_file() {
        return Ok(());
    }
    let what = match trace::recognise(path) {
        Ok(format) if format.name == trace::NATIVE => return Ok(()),
        Ok(format) => format!("may be a recording ({})", format.name),
        Err(_) => "is not a trace".to_owned(),
    };
    let path = path.display();
    Err(CommandError::usage(anyhow!("{path} already exists and {what}; --force overwrites it")))
}

/// Set for each option: a heading for the next options would apply to all that follow.
const HEADING: &str = "Exports";

/// Files for the results, besides the printed table.
#[derive(Debug, Default, clap::Args)]
pub struct ExportOptions {
    /// Also write all columns as CSV to this file.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_csv: Option<PathBuf>,
    /// Also write all columns as JSON to this file.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_json: Option<PathBuf>,
    /// Also write the table as Markdown to this file.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_markdown: Option<PathBuf>,
    /// Also write the page with charts and tables to this file.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_html: Option<PathBuf>,
}

impl ExportOptions {
    /// Whether any file is wanted.
    pub fn is_asked(&self) -> bool {
        [&self.export_csv, &self.export_json, &self.export_markdown, &self.export_html]
            .iter()
            .any(|path| path.is_some())
    }

    /// Writes the wanted files; the page is made from `run`.
    pub fn write(
        &self,
        records: &[CaseRecord],
        run: impl FnOnce() -> Result<PageRun, CommandError>,
    ) -> Result<(), CommandError> {
        let save = |path: &PathBuf, text: &str| -> Result<(), CommandError> {
            report::save(path, text).map_err(CommandError::usage)?;
            output::complain(&format!("wrote {}", path.display()));
            Ok(())
        };
        if let Some(path) = &self.export_csv {
            save(path, &records.csv()?)?;
        }
        if let Some(path) = &self.export_json {
            save(path, &format!("{:#}\n", records.json()))?;
        }
        if let Some(path) = &self.export_markdown {
            save(path, &records.text(Medium::Markdown))?;
        }
        if let Some(path) = &self.export_html {
            save(path, &html::page(&[run()?], &[])?)?;
        }
        Ok(())
    }
}
