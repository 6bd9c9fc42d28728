//! Results in files of the user's choice: `--export-csv` and its siblings, and snapshots of
//! replays.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::{environment, exit::CommandError, options::Format, output};
use crate::{
    base::{Progress, replaced_file},
    device::{Card, CardFacts, DeviceSpec},
    measure::{
        CaseDetail, CaseRecord,
        torch_snapshot::{RecordedReplay, SnapshotExportError, record_snapshot},
    },
    replay::{OnOutOfMemory, Replay, ReplayError},
    report::{
        self, Medium, Render,
        html::{self, DetailStore, PageRun},
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

/// Refuses to replace anything but a trace in oomph's own format, unless forced: another file may
/// be a recording of a program that ran for days.
pub fn check_overwriting(path: &Path, force: bool) -> Result<(), CommandError> {
    let Some(place) = replaced_file(path).filter(|_| !force) else { return Ok(()) };
    match trace::recognise(&place) {
        Ok(format) if format.name == trace::NATIVE && run_of(&place).is_none() => Ok(()),
        Ok(format) => Err(refusal(path, &format!("may be a recording ({})", format.name), true)),
        Err(_) => Err(refusal(path, "is not a trace", true)),
    }
}

/// Refuses to replace a trace of any format or a file of a run by a file of another kind, unless forced. `force` is `None`
/// for a command without `--force`. Any other file may be an earlier result and is replaced.
pub fn check_replacing(path: &Path, force: Option<bool>) -> Result<(), CommandError> {
    let Some(place) = replaced_file(path).filter(|_| force != Some(true)) else { return Ok(()) };
    let what = match (trace::recognise(&place), run_of(&place)) {
        (Ok(format), _) => format!("may be a recording ({})", format.name),
        (Err(_), Some(run)) => format!("belongs to the run in {}", run.display()),
        (Err(_), None) => return Ok(()),
    };
    Err(refusal(path, &what, force.is_some()))
}

fn refusal(path: &Path, what: &str, has_force: bool) -> CommandError {
    let way = if has_force { "--force overwrites it" } else { "choose another name, or delete it first" };
    CommandError::usage(anyhow!("{} already exists and {what}; {way}", path.display()))
}

/// Files of a run's folder.
const RUN_FILES: [&str; 13] = [
    "env.json",
    "plan.csv",
    "runs.csv",
    "timings.csv",
    "comparison.csv",
    "summary.md",
    "report.html",
    "thresholds.csv",
    "thresholds.json",
    "techniques.csv",
    "techniques.md",
    "claims.csv",
    "claims.md",
];

/// The folder of the run that a file belongs to, if it belongs to one.
fn run_of(file: &Path) -> Option<PathBuf> {
    let name = file.file_name()?;
    let folder = file.parent()?;
    let is_run = |folder: &Path| {
        let has = |file: &str| folder.join(file).is_file();
        has("env.json") && ["runs.csv", "thresholds.csv", "techniques.csv", "claims.csv"].into_iter().any(has)
    };
    let run = match folder.file_name().is_some_and(|folder| folder == "cases") {
        true => folder.parent()?,
        false if RUN_FILES.iter().any(|known| name == *known) => folder,
        false => return None,
    };
    is_run(run).then(|| if run.as_os_str().is_empty() { PathBuf::from(".") } else { run.to_owned() })
}

/// An answer as JSON in a file, besides the printed one.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct JsonExport {
    /// Also write the answer as JSON to this file.
    #[arg(long, value_name = "FILE")]
    export_json: Option<PathBuf>,
}

impl JsonExport {
    /// Refuses to overwrite recordings and files of runs. Call it before anything runs.
    pub fn check(&self) -> Result<(), CommandError> {
        self.export_json.as_deref().map_or(Ok(()), |path| check_replacing(path, None))
    }

    /// Prints an answer, and writes the file.
    pub fn print<R: Render + ?Sized>(&self, answer: &R, format: Format) -> Result<(), CommandError> {
        if let Some(path) = &self.export_json {
            report::save(path, &Format::Json.render(answer)?).map_err(CommandError::usage)?;
        }
        format.print(answer)
    }
}

/// The page about an answer in a file, besides the printed answer.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct PageExport {
    /// Also write the answer as a page with charts to this file.
    #[arg(long, value_name = "FILE")]
    export_html: Option<PathBuf>,
}

impl PageExport {
    /// Whether the page is wanted.
    pub fn is_asked(&self) -> bool {
        self.export_html.is_some()
    }

    /// Refuses to overwrite recordings and files of runs. Call it before anything runs.
    pub fn check(&self) -> Result<(), CommandError> {
        self.export_html.as_deref().map_or(Ok(()), |path| check_replacing(path, None))
    }

    /// Refuses the page where a command answers for several ranks.
    pub fn check_one_rank(&self) -> Result<(), CommandError> {
        match self.is_asked() {
            true => Err(CommandError::usage(anyhow!(
                "--export-html writes a page about one recording: name the file of one rank"
            ))),
            false => Ok(()),
        }
    }

    /// Writes the page, if it is wanted.
    pub fn write(&self, page: impl FnOnce() -> Result<String, CommandError>) -> Result<(), CommandError> {
        let Some(path) = &self.export_html else { return Ok(()) };
        save_file(path, &page()?)
    }
}

fn save_file(path: &Path, text: &str) -> Result<(), CommandError> {
    report::save(path, text).map_err(CommandError::usage)?;
    output::complain(&format!("wrote {}", path.display()));
    Ok(())
}

/// The run behind the page of an answer, with the cases that were measured for it.
pub fn page_run(
    name: &str,
    device: &DeviceSpec,
    seed: u64,
    measured: Vec<(CaseRecord, CaseDetail)>,
) -> Result<PageRun, CommandError> {
    let (records, details): (Vec<CaseRecord>, Vec<CaseDetail>) = measured.into_iter().unzip();
    Ok(PageRun {
        name: name.to_owned(),
        environment: environment::describe(device, seed)?,
        records,
        details: DetailStore::Held(details.into_iter().map(|detail| (detail.case_id.clone(), detail)).collect()),
        ..PageRun::default()
    })
}

/// The run with the cards that were named as its device. A card by its size is simulated with the costs of another.
pub fn on_cards(mut run: PageRun, named: &[Card]) -> PageRun {
    let names: Vec<String> = named.iter().map(Card::to_string).collect();
    if !names.is_empty() {
        run.environment.device_name = format!("{} (simulated)", names.join(", "));
    }
    run
}

/// The known cards and those that were named, with what each has for a program.
pub fn cards_for_programs(named: &[Card]) -> Vec<(String, u64)> {
    let known = CardFacts::all().iter().filter_map(|facts| facts.name.parse::<Card>().ok());
    let mut cards: Vec<(String, u64)> = Vec::new();
    for card in named.iter().cloned().chain(known) {
        let (name, bytes) = (card.to_string(), card.total_bytes().saturating_sub(card.context_bytes()));
        if !cards.iter().any(|(known, _)| *known == name) {
            cards.push((name, bytes));
        }
    }
    cards
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
    /// Let --export-... overwrite recordings and files of other runs.
    #[arg(long, help_heading = HEADING)]
    pub force: bool,
}

impl ExportOptions {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.export_csv, &self.export_json, &self.export_markdown, &self.export_html].into_iter().flatten()
    }

    /// Whether any file is wanted.
    pub fn is_asked(&self) -> bool {
        self.files().next().is_some()
    }

    /// Whether the page is wanted.
    pub fn wants_page(&self) -> bool {
        self.export_html.is_some()
    }

    /// Refuses to overwrite recordings and files of runs, unless forced. Call it before anything runs.
    pub fn check(&self) -> Result<(), CommandError> {
        self.files().try_for_each(|path| check_replacing(path, Some(self.force)))
    }

    /// Writes the wanted files; the page is made from `run`.
    pub fn write(
        &self,
        records: &[CaseRecord],
        run: impl FnOnce() -> Result<PageRun, CommandError>,
    ) -> Result<(), CommandError> {
        if let Some(path) = &self.export_csv {
            save_file(path, &records.csv()?)?;
        }
        if let Some(path) = &self.export_json {
            save_file(path, &format!("{:#}\n", records.json()))?;
        }
        if let Some(path) = &self.export_markdown {
            save_file(path, &records.text(Medium::Markdown))?;
        }
        if let Some(path) = &self.export_html {
            save_file(path, &html::page(&[run()?], &[])?)?;
        }
        Ok(())
    }
}
