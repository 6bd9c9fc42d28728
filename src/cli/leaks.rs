//! `oomph leaks`.

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit,
    failure::{Failure, Outcome},
    options::{DeviceOptions, Format},
    progress::Stages,
    ranks, replay_place,
    source::SourceOptions,
};
use crate::{
    answer::{
        leaks::{Bar, Finding, LeakError, Observed, Verdict, growers, judge, snapshots},
        ranks::RankRow,
    },
    base::Progress,
    replay::ReplayOptions,
    report::LeakReport,
    suite::RankFile,
    trace::{ProgressSource, Source, torch::Recording},
};

/// Says whether memory leaks, the cache grows, it fragments or all is steady, and who grows.
///
/// One source is replayed and judged step by step; its steps are those it marks, the annotated phase that repeats most
/// regularly, or the period of the sizes that it asks for. Several PyTorch snapshots, in order, are judged as one series.
/// The test is the slope of a straight line through what every step keeps, with a Student-t interval that knows how
/// much neighbouring steps resemble each other. Saw-teeth, start-up and growth that has ended are not growth.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload, a recipe or a trace file; or several PyTorch snapshots of one program in the order they were taken; or
    /// a folder, or a pattern in quotes, with one recording a rank.
    #[arg(value_name = "SOURCE", required = true)]
    sources: Vec<String>,
    /// Judge every source on its own, instead of several snapshots as one series.
    #[arg(long)]
    each: bool,
    /// Growth that this source shows as well is accepted; growth beyond it counts.
    #[arg(long, value_name = "SOURCE")]
    baseline: Option<String>,
    /// A step begins with the annotated phase of this name.
    #[arg(long, value_name = "PHASE")]
    step_at: Option<String>,
    /// The allocator [default: PyTorch's, with the settings of the recording].
    #[arg(long, short, value_name = "STRATEGY")]
    strategy: Option<String>,
    #[command(flatten)]
    device: DeviceOptions,
    /// Override a parameter of the workload, such as `--set steps=50`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Seed of the workload's random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Which GPU of a PyTorch snapshot that has several; without it the first that something is known about.
    #[arg(long, value_name = "N")]
    device_index: Option<u32>,
    /// How many names that grow are shown.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// A slope counts if chance gives such a one less often than this.
    #[arg(long, value_name = "P", default_value_t = Bar::default().significance)]
    significance: f64,
    /// Growth over all steps counts from this share of the level on, and from 2 MiB on.
    #[arg(long, value_name = "SHARE", default_value_t = Bar::default().least_share)]
    least_share: f64,
    /// Which verdicts end with exit code 105.
    #[arg(long, value_enum, default_value_t)]
    fail_on: FailOn,
    /// How it is printed.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  oomph leaks run.pickle                            one recording with several steps
  oomph leaks epoch1.pickle epoch2.pickle epoch3.pickle   snapshots in order
  oomph leaks snapshots/                            all ranks of a distributed program: which of them leaks?
  oomph leaks run.pickle --baseline yesterday.pickle      only what is worse than before
  oomph leaks leak-outputs --limit 24GiB            a workload by name: when will it run out?
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

pub fn run(args: Args) -> Outcome {
    if !(0.0..=1.0).contains(&args.significance) || args.least_share.is_nan() || args.least_share < 0.0 {
        return Err(Failure::usage(anyhow!("--significance is a probability and --least-share a share: 0.005, 0.01")));
    }
    let baseline = args.baseline.as_deref().map(|name| Played::open(&args, name, &Stages::of(name))).transpose()?;
    let baseline = baseline.as_ref().map(|played| &played.observed);
    if let Some(files) = ranks::files(&args.sources)? {
        return for_ranks(&args, &files, baseline);
    }
    let findings = if args.sources.len() > 1 && !args.each {
        vec![in_order(&args, baseline)?]
    } else {
        args.sources
            .iter()
            .map(|name| on_its_own(&args, name, baseline, &Stages::of(name)))
            .collect::<Result<_, _>>()?
    };
    let code = if findings.iter().any(|finding| args.fails(finding)) { exit::MEMORY_GROWS } else { exit::OK };
    args.format.print(&LeakReport { findings, top: args.top })?;
    Ok(code)
}

/// One answer for all ranks: a leak before growth of any other kind, and of those the steepest.
fn for_ranks(args: &Args, files: &[RankFile], baseline: Option<&Observed>) -> Outcome {
    let answers = ranks::ask(files, |name, progress| {
        Ok(LeakReport { findings: vec![on_its_own(args, name, baseline, progress)?], top: args.top })
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

    fn bar(&self) -> Bar {
        Bar { significance: self.significance, least_share: self.least_share, ..Bar::default() }
    }

    fn options(&self, name: &str) -> SourceOptions {
        let (set, seed, device_index) = (self.set.clone(), self.seed, self.device_index);
        SourceOptions { source: name.to_owned(), set, seed, device_index }
    }
}

/// A source that was replayed step by step.
struct Played {
    source: Box<dyn Source>,
    observed: Observed,
}

impl Played {
    fn open(args: &Args, name: &str, progress: &dyn Progress) -> Result<Played, Failure> {
        let options = args.options(name);
        let (source, settings): (Box<dyn Source>, _) = match options.recording(progress)? {
            Some(recording) => {
                let settings = recording.settings.conf().to_owned();
                (Box::new(recording), settings)
            }
            None => (options.resolve(progress)?, String::new()),
        };
        let spec = replay_place::strategy_or_recorded(args.strategy.as_deref(), &settings)?;
        let options = ReplayOptions { resumes: true, ..ReplayOptions::default() };
        // Its steps are looked for first.
        let observed = {
            let watched = ProgressSource::stage(&*source, progress, "playing it step by step", 2);
            let replay = replay_place::replay(&watched, &args.device, &spec)?.options(options);
            Observed::of_replay(&replay, args.step_at.as_deref()).map_err(refused)?
        };
        Ok(Played { source, observed })
    }
}

fn on_its_own(
    args: &Args,
    name: &str,
    baseline: Option<&Observed>,
    progress: &dyn Progress,
) -> Result<Finding, Failure> {
    let Played { source, observed } = Played::open(args, name, progress)?;
    let mut finding = judge(&observed, baseline, &args.bar()).map_err(refused)?;
    if finding.verdict == Verdict::Leak {
        let source = ProgressSource::stage(&*source, progress, "seeing who grows", 1);
        finding.growers = observed.growers(&source, finding.first_step).map_err(refused)?;
    }
    Ok(finding)
}

fn in_order(args: &Args, baseline: Option<&Observed>) -> Result<Finding, Failure> {
    let mut recordings: Vec<Recording> = Vec::new();
    for name in &args.sources {
        let recording = args.options(name).recording(&Stages::of(name))?;
        recordings.push(recording.ok_or_else(|| {
            Failure::usage(anyhow!("'{name}' is no PyTorch snapshot; --each judges every source on its own"))
        })?);
    }
    let mut finding = judge(&Observed::of_snapshots(&recordings), baseline, &args.bar()).map_err(refused)?;
    if finding.verdict == Verdict::Leak {
        let inventories = snapshots::inventories(&recordings);
        if let (Some(before), Some(after)) = (inventories.get(finding.first_step), inventories.last()) {
            finding.growers = growers::growers(before, after, inventories.len() - 1 - finding.first_step);
        }
    }
    Ok(finding)
}

/// What cannot be judged is the user's to change; a replay that breaks is not.
fn refused(error: LeakError) -> Failure {
    match error {
        LeakError::Trace(_) | LeakError::NoSuchPhase { .. } | LeakError::TooShort { .. } => Failure::usage(error),
        LeakError::Replay(error) => Failure::replay(error),
        LeakError::Strategy(_) => error.into(),
    }
}
