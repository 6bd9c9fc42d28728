//! `oomph leaks`.

use std::path::Path;

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult},
    export::{self, JsonExport, PageExport},
    options::{DeviceOptions, Format},
    output,
    progress::Stages,
    ranks,
    source::{self, RecordedProgram, SourceSettings, source_argument},
};
use crate::{
    answer::{
        holders::LiveInventory,
        leaks::{GrowthThreshold, LeakError, ObservedSteps, Verdict, judge},
        ranks::RankRow,
    },
    base::{Progress, text_path},
    device::DeviceSpec,
    replay::verify::Companion,
    report::{LeakAnswer, LeakReport, html},
    suite::RankFile,
    trace::{ProgressSource, Source, torch::Recording},
};

/// Detects leaks, a growing cache and fragmentation, and names the call sites that grow.
///
/// One source is replayed and judged step by step. Its steps are its marks, the annotated phase
/// that repeats most regularly, or the period of its request sizes. Several PyTorch snapshots, in
/// order, are judged as one series. A leak is a floor of memory that continues to rise while the blocks
/// of these steps stay alive; snapshots are judged by the slope of a line through their levels, with a
/// Student-t interval. Saw-teeth, start-up and growth that has ended do not count as growth. What the
/// program frees after its last step is not judged. Where growth may go on and may have ended, or where
/// the recording has no history, the answer is that it cannot be told.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload, a workload TOML or a trace file; several PyTorch snapshots of one program in the
    /// order they were taken; or a folder, or a pattern in quotes, with one recording per rank.
    #[arg(value_name = "SOURCE", required = true, value_parser = source_argument())]
    sources: Vec<String>,
    /// Judge every source on its own, instead of several snapshots as one series.
    #[arg(long)]
    each: bool,
    /// Accept the growth of this source; only more than that counts.
    #[arg(long, value_name = "SOURCE", value_parser = source_argument())]
    baseline: Option<String>,
    /// Steps begin at the annotated phase of this name.
    #[arg(long, value_name = "PHASE")]
    step_at: Option<String>,
    /// The allocator [default: PyTorch's, with the settings of the recording].
    #[arg(long, short, value_name = "STRATEGY")]
    strategy: Option<String>,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    settings: SourceSettings,
    /// How many growing call sites, tags or sizes are shown.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// A slope counts if its p-value is below this.
    #[arg(long, value_name = "P", default_value_t = GrowthThreshold::default().significance)]
    significance: f64,
    /// Growth over all steps counts if it is at least this share of the level, and at least 2 MiB.
    #[arg(long, value_name = "SHARE", default_value_t = GrowthThreshold::default().least_share)]
    least_share: f64,
    /// Which verdicts end with exit code 105. `cannot tell` ends with 109, except with `never`.
    #[arg(long, value_enum, default_value_t)]
    fail_on: FailOn,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    format: Format,
    #[command(flatten)]
    export: JsonExport,
    #[command(flatten)]
    page: PageExport,
}

const EXAMPLES: &str = "\
Examples:
  oomph leaks run.pickle                            one recording with several steps
  oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle   snapshots in order
  oomph leaks snapshots/                            all ranks of a distributed program: which one leaks?
  oomph leaks run.pickle --baseline yesterday.pickle      only what is worse than before
  oomph leaks leak-outputs --limit 24GiB            a workload by name: when will memory run out?
  oomph leaks run.pickle --export-html leak.html    the answer with its evidence as a page
  oomph leaks run.pickle --step-at 'Optimizer.step#AdamW.step'
  oomph leaks --each *.pickle --format json --fail-on growth";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// A leak.
    #[default]
    Leak,
    /// A leak, fragmentation or a growing cache.
    Growth,
    /// Nothing.
    Never,
}

pub fn run(args: Args) -> CommandResult {
    args.export.check()?;
    args.page.check()?;
    if !(0.0..=1.0).contains(&args.significance) || args.least_share.is_nan() || args.least_share < 0.0 {
        return Err(CommandError::usage(anyhow!("--significance must be from 0 to 1 and --least-share at least 0")));
    }
    let baseline =
        args.baseline.as_deref().map(|name| ReplayedSource::open(&args, name, &Stages::of(name))).transpose()?;
    let baseline = baseline.as_ref().map(|played| &played.observed);
    if let Some(files) = ranks::files(&args.sources)? {
        args.page.check_one_rank()?;
        return for_ranks(&args, &files, baseline);
    }
    let findings = if args.sources.len() > 1 && !args.each {
        vec![judge_series(&args, baseline)?]
    } else {
        args.sources
            .iter()
            .map(|name| judge_source(&args, name, baseline, &Stages::of(name)))
            .collect::<Result<_, _>>()?
    };
    let code = args.code(findings.iter().map(LeakAnswer::verdict));
    let report = LeakReport { findings, top: args.top };
    args.export.print(&report, args.format)?;
    args.page.write(|| {
        let name = match &args.sources[..] {
            [source] => format!("leaks {}", text_path(source).file_name().unwrap_or_default().to_string_lossy()),
            several => format!("leaks {} sources", several.len()),
        };
        let run = export::page_run(&name, &args.device.spec()?, args.settings.seed, Vec::new())?;
        let strategy = args.strategy.as_deref().unwrap_or("PyTorch's allocator");
        Ok(html::leaks_page(&report, strategy, run)?)
    })?;
    Ok(code)
}

/// One answer for all ranks: leaks first, then other growth, the steepest first.
fn for_ranks(args: &Args, files: &[RankFile], baseline: Option<&ObservedSteps>) -> CommandResult {
    let answers = ranks::ask(files, |name, progress| {
        Ok(LeakReport { findings: vec![judge_source(args, name, baseline, progress)?], top: args.top })
    });
    let code = ranks::tell("growth per step", &answers, (args.format, &args.export), |report| {
        let answer = &report.findings[0];
        let finding = answer.finding();
        let verdict = answer.verdict();
        RankRow {
            peak_allocated_bytes: finding
                .and_then(|found| found.per_step.iter().map(|step| step.peak_allocated_bytes).max()),
            figure_bytes: match verdict {
                Verdict::Steady => Some(0),
                Verdict::CannotTell => None,
                _ => finding.map(|found| found.bytes_per_step.max(0.0) as u64),
            },
            severity: match verdict {
                Verdict::Leak => 4,
                Verdict::Fragmentation => 3,
                Verdict::GrowingCache => 2,
                Verdict::CannotTell => 1,
                Verdict::Steady => 0,
            },
            verdict: verdict.name().replace('_', " "),
            ..RankRow::default()
        }
    })?;
    let findings = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).flat_map(|report| &report.findings);
    let judged = args.code(findings.map(LeakAnswer::verdict));
    Ok(if judged == exit::OK { code } else { judged })
}

impl Args {
    /// The exit code for these verdicts: growth that `--fail-on` names comes first.
    fn code(&self, verdicts: impl Iterator<Item = Verdict> + Clone) -> u8 {
        let fails = |verdict: Verdict| match self.fail_on {
            FailOn::Leak => verdict == Verdict::Leak,
            FailOn::Growth => !matches!(verdict, Verdict::Steady | Verdict::CannotTell),
            FailOn::Never => false,
        };
        if verdicts.clone().any(fails) {
            exit::MEMORY_GROWS
        } else if self.fail_on != FailOn::Never && verdicts.clone().any(|verdict| verdict == Verdict::CannotTell) {
            exit::CANNOT_TELL
        } else {
            exit::OK
        }
    }

    fn bar(&self) -> GrowthThreshold {
        GrowthThreshold { significance: self.significance, least_share: self.least_share, ..GrowthThreshold::default() }
    }
}

/// A source and its replay, step by step.
struct ReplayedSource {
    source: Box<dyn Source>,
    observed: ObservedSteps,
}

impl ReplayedSource {
    fn open(args: &Args, name: &str, progress: &dyn Progress) -> Result<ReplayedSource, LeakFailure> {
        let options = args.settings.of(name);
        let recording = options.recording(progress)?;
        let program = recording.as_ref().map(RecordedProgram::of);
        let spec = source::strategy_or_recorded(args.strategy.as_deref(), program.as_ref())?;
        if let Some(note) = program.as_ref().and_then(|program| program.note(&args.device)) {
            output::complain(&format!("note: {name}: {note}"));
        }
        let observe = |source: &dyn Source| {
            // Three readings: the first two look for the steps.
            let reading = ProgressSource::stage(source, progress, "replaying step by step", 3);
            let replay = source::replay(&reading, &args.device, &spec, program.as_ref())?;
            Ok::<_, LeakFailure>(ObservedSteps::of_replay(&replay, args.step_at.as_deref())?)
        };
        let Some(recording) = recording else {
            let source = options.open(progress)?;
            let observed = observe(&*source)?;
            return Ok(ReplayedSource { source, observed });
        };
        let observed = observe(&recording)?;
        let is_hypothetical =
            args.strategy.is_some() || args.device.limit.is_some() || args.device.spec()? != DeviceSpec::default();
        let observed = if is_hypothetical {
            observed
        } else {
            let mut recorded = observed.with_recorded_reserved(&recording);
            recorded.capacity = recorded_capacity(name, &recording)?;
            recorded
        };
        let source: Box<dyn Source> = Box::new(recording);
        Ok(ReplayedSource { source, observed })
    }
}

/// What the allocator of the recorded program could have had: its limit, or what the file beside the recording says.
/// Without either the size of the GPU is not known.
fn recorded_capacity(name: &str, recording: &Recording) -> Result<Option<u64>, CommandError> {
    let companion = Companion::beside(Path::new(name)).map_err(CommandError::usage)?;
    let limit = recording.limit.as_ref().map(|limit| limit.bytes);
    Ok(limit.or_else(|| companion?.available(recording.device)))
}

fn judge_source(
    args: &Args,
    name: &str,
    baseline: Option<&ObservedSteps>,
    progress: &dyn Progress,
) -> Result<LeakAnswer, CommandError> {
    let judged = ReplayedSource::open(args, name, progress).and_then(|ReplayedSource { source, observed }| {
        let mut finding = judge(&observed, baseline, &args.bar())?;
        if finding.verdict == Verdict::Leak {
            let source = ProgressSource::stage(&*source, progress, "finding what grows", 1);
            finding.growers = observed.growers(&source, finding.first_step)?;
        }
        Ok(LeakAnswer::Judged(Box::new(finding)))
    });
    judged.or_else(|failure| failure.answer(name))
}

fn judge_series(args: &Args, baseline: Option<&ObservedSteps>) -> Result<LeakAnswer, CommandError> {
    let mut recordings: Vec<Recording> = Vec::new();
    for name in &args.sources {
        let recording = args.settings.of(name).recording(&Stages::of(name))?;
        recordings.push(recording.ok_or_else(|| {
            CommandError::usage(anyhow!("'{name}' is not a PyTorch snapshot; --each judges every source on its own"))
        })?);
    }
    let observed = ObservedSteps::of_snapshots(&recordings);
    let mut finding = match judge(&observed, baseline, &args.bar()) {
        Ok(finding) => finding,
        Err(error) => return LeakFailure::Leak(error).answer(&observed.name),
    };
    if finding.verdict == Verdict::Leak {
        let inventories = LiveInventory::of_snapshots(&recordings);
        if let (Some(before), Some(after)) = (inventories.get(finding.first_step), inventories.last()) {
            finding.growers = before.growers(after, inventories.len() - 1 - finding.first_step);
        }
    }
    Ok(LeakAnswer::Judged(Box::new(finding)))
}

/// Why a source was not judged: it has too little for a verdict, or something failed.
enum LeakFailure {
    Leak(LeakError),
    Command(CommandError),
}

impl From<LeakError> for LeakFailure {
    fn from(error: LeakError) -> LeakFailure {
        LeakFailure::Leak(error)
    }
}

impl From<CommandError> for LeakFailure {
    fn from(error: CommandError) -> LeakFailure {
        LeakFailure::Command(error)
    }
}

impl From<LeakFailure> for CommandError {
    /// A source that cannot be judged is a usage error; a failed replay is not.
    fn from(failure: LeakFailure) -> CommandError {
        match failure {
            LeakFailure::Command(error) => error,
            LeakFailure::Leak(LeakError::Replay(error)) => CommandError::replay(error),
            LeakFailure::Leak(error @ LeakError::Strategy(_)) => error.into(),
            LeakFailure::Leak(error) => CommandError::usage(error),
        }
    }
}

impl LeakFailure {
    /// Too little to judge is an answer.
    fn answer(self, source: &str) -> Result<LeakAnswer, CommandError> {
        match self {
            LeakFailure::Leak(error) => match error.unjudged(source) {
                Ok(unjudged) => Ok(LeakAnswer::Unjudged(unjudged)),
                Err(error) => Err(LeakFailure::Leak(error).into()),
            },
            LeakFailure::Command(error) => Err(error),
        }
    }
}
