//! `oomph leaks`.

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult},
    options::{DeviceOptions, Format},
    output,
    progress::Stages,
    ranks,
    source::{self, SourceSettings},
};
use crate::{
    answer::{
        holders::LiveInventory,
        leaks::{Finding, GrowthThreshold, LeakError, ObservedSteps, Verdict, judge},
        ranks::RankRow,
    },
    base::Progress,
    report::LeakReport,
    suite::RankFile,
    trace::{ProgressSource, Source, torch::Recording},
};

/// Detects leaks, a growing cache and fragmentation, and names the call sites that grow.
///
/// One source is replayed and judged step by step. Its steps are its marks, the annotated phase
/// that repeats most regularly, or the period of its request sizes. Several PyTorch snapshots, in
/// order, are judged as one series. The test is the slope of a straight line through what every
/// step keeps, with a Student-t interval that accounts for correlation between neighbouring steps.
/// Saw-teeth, start-up and growth that has ended do not count as growth.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload, a workload TOML or a trace file; several PyTorch snapshots of one program in the
    /// order they were taken; or a folder, or a pattern in quotes, with one recording per rank.
    #[arg(value_name = "SOURCE", required = true)]
    sources: Vec<String>,
    /// Judge every source on its own, instead of several snapshots as one series.
    #[arg(long)]
    each: bool,
    /// Accept the growth of this source; only more than that counts.
    #[arg(long, value_name = "SOURCE")]
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
    /// Which verdicts end with exit code 105.
    #[arg(long, value_enum, default_value_t)]
    fail_on: FailOn,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  oomph leaks run.pickle                            one recording with several steps
  oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle   snapshots in order
  oomph leaks snapshots/                            all ranks of a distributed program: which one leaks?
  oomph leaks run.pickle --baseline yesterday.pickle      only what is worse than before
  oomph leaks leak-outputs --limit 24GiB            a workload by name: when will memory run out?
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
    if !(0.0..=1.0).contains(&args.significance) || args.least_share.is_nan() || args.least_share < 0.0 {
        return Err(CommandError::usage(anyhow!("--significance must be from 0 to 1 and --least-share at least 0")));
    }
    let baseline =
        args.baseline.as_deref().map(|name| ReplayedSource::open(&args, name, &Stages::of(name))).transpose()?;
    let baseline = baseline.as_ref().map(|played| &played.observed);
    if let Some(files) = ranks::files(&args.sources)? {
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
    let code = if findings.iter().any(|finding| args.fails(finding)) { exit::MEMORY_GROWS } else { exit::OK };
    args.format.print(&LeakReport { findings, top: args.top })?;
    Ok(code)
}

/// One answer for all ranks: leaks first, then other growth, the steepest first.
fn for_ranks(args: &Args, files: &[RankFile], baseline: Option<&ObservedSteps>) -> CommandResult {
    let answers = ranks::ask(files, |name, progress| {
        Ok(LeakReport { findings: vec![judge_source(args, name, baseline, progress)?], top: args.top })
    });
    let code = ranks::tell("growth per step", &answers, args.format, |report| {
        let finding = &report.findings[0];
        RankRow {
            peak_bytes: finding.per_step.iter().map(|step| step.peak_allocated_bytes).max(),
            figure_bytes: Some(match finding.verdict {
                Verdict::Steady => 0,
                _ => finding.bytes_per_step.max(0.0) as u64,
            }),
            severity: match finding.verdict {
                Verdict::Leak => 3,
                Verdict::Fragmentation => 2,
                Verdict::GrowingCache => 1,
                Verdict::Steady => 0,
            },
            verdict: finding.verdict.name().replace('_', " "),
            ..RankRow::default()
        }
    })?;
    let mut findings =
        answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).flat_map(|report| &report.findings);
    Ok(if findings.any(|finding| args.fails(finding)) { exit::MEMORY_GROWS } else { code })
}

impl Args {
    /// Whether a verdict is one that `--fail-on` names.
    fn fails(&self, finding: &Finding) -> bool {
        match self.fail_on {
            FailOn::Leak => finding.verdict == Verdict::Leak,
            FailOn::Growth => finding.verdict != Verdict::Steady,
            FailOn::Never => false,
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
    fn open(args: &Args, name: &str, progress: &dyn Progress) -> Result<ReplayedSource, CommandError> {
        let options = args.settings.of(name);
        let (source, program) = options.open_with_program(progress)?;
        let settings = program.as_ref().map_or("", |program| &program.settings);
        let spec = source::strategy_or_recorded(args.strategy.as_deref(), settings)?;
        if let Some(note) = program.as_ref().and_then(|program| program.note(&args.device)) {
            output::complain(&format!("note: {name}: {note}"));
        }
        // Two readings: the first one looks for the steps.
        let observed = {
            let reading = ProgressSource::stage(&*source, progress, "replaying step by step", 2);
            let replay = source::replay(&reading, &args.device, &spec, program.as_ref())?;
            ObservedSteps::of_replay(&replay, args.step_at.as_deref()).map_err(leak_failure)?
        };
        Ok(ReplayedSource { source, observed })
    }
}

fn judge_source(
    args: &Args,
    name: &str,
    baseline: Option<&ObservedSteps>,
    progress: &dyn Progress,
) -> Result<Finding, CommandError> {
    let ReplayedSource { source, observed } = ReplayedSource::open(args, name, progress)?;
    let mut finding = judge(&observed, baseline, &args.bar()).map_err(leak_failure)?;
    if finding.verdict == Verdict::Leak {
        let source = ProgressSource::stage(&*source, progress, "finding what grows", 1);
        finding.growers = observed.growers(&source, finding.first_step).map_err(leak_failure)?;
    }
    Ok(finding)
}

fn judge_series(args: &Args, baseline: Option<&ObservedSteps>) -> Result<Finding, CommandError> {
    let mut recordings: Vec<Recording> = Vec::new();
    for name in &args.sources {
        let recording = args.settings.of(name).recording(&Stages::of(name))?;
        recordings.push(recording.ok_or_else(|| {
            CommandError::usage(anyhow!("'{name}' is not a PyTorch snapshot; --each judges every source on its own"))
        })?);
    }
    let mut finding = judge(&ObservedSteps::of_snapshots(&recordings), baseline, &args.bar()).map_err(leak_failure)?;
    if finding.verdict == Verdict::Leak {
        let inventories = LiveInventory::of_snapshots(&recordings);
        if let (Some(before), Some(after)) = (inventories.get(finding.first_step), inventories.last()) {
            finding.growers = before.growers(after, inventories.len() - 1 - finding.first_step);
        }
    }
    Ok(finding)
}

/// A source that cannot be judged is a usage error; a failed replay is not.
fn leak_failure(error: LeakError) -> CommandError {
    match error {
        LeakError::Trace(_) | LeakError::NoSuchPhase { .. } | LeakError::TooShort { .. } => CommandError::usage(error),
        LeakError::Replay(error) => CommandError::replay(error),
        LeakError::Strategy(_) => error.into(),
    }
}
