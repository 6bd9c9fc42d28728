//! `oomph advise`.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;

use super::{
    exit,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format},
    output,
    progress::Stages,
    ranks,
    source::SourceOptions,
};
use crate::{
    answer::{
        advise::{self, Advice, AdviceQuestion, Confidence, Room, grid::Candidate},
        ranks::RankRow,
        threshold::ThresholdError,
    },
    base::{Bytes, Progress},
    device::DeviceSpec,
    report::AdviceReport,
    suite::{self, RankFile},
    trace::{ProgressSource, Trace, torch::DeadEnd},
};

/// Says which allocator settings a program should run with: one line to paste, the memory needed with it and without,
/// what it costs, how sure that is, and why nothing helps where nothing does.
///
/// A recording is replayed on the simulated GPU under more than thirty settings of PyTorch's allocator and under the
/// other allocators there are; for each the smallest memory in which it completes is searched.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph advise snapshot.pickle
  oomph advise snapshot.pickle --memory 24GiB             my card: what fits in it?
  oomph advise snapshot.pickle --limit 6GiB               what set_per_process_memory_fraction leaves
  oomph advise variable-length --set batch=8              a workload by name
  oomph advise *.pickle --format json                     each on its own
  oomph advise snapshots/                                 all ranks of a distributed program

From an OOM to the line to paste: record the program on a card where it runs, or up to where it dies (`oomph record`
prints the lines of Python), and ask. A recording that ends because memory ran out says how much there was, so neither
--memory nor --limit is needed; what the program would have done next is not in it.

Of the settings that need about the least (64 MiB or 1 % more) the simplest is recommended: what the program has now, then
the fewest settings, then the least memory. A smaller gain than that is no reason to change anything. A request that failed
when it was recorded must be served as well.

`Memory needed` is the allocator's own, to be compared with torch.cuda.max_memory_reserved; `Smallest device` adds what
the driver's context and the libraries take. With --memory the driver refuses what goes beyond, as a card of that size
does; otherwise the allocator's own limit does, as in `oomph threshold`. `Driver time` is the simulated time of all driver
calls of the whole recording: with --memory or --limit in that memory, otherwise with the whole device.

A folder, or a pattern in quotes ('run-*.pickle'), is one recording a rank. Ranks are read side by side; the answer is that
of the rank that needs most in full, then a line a rank, the spread, and the ranks that stand out (further from the median
than 3.5 times the usual distance, and than 1 %).

JSON has one row a source: `recommended`, `saved_bytes`, `confidence`, `reasons`, and `tried` with everything.")]
pub struct Args {
    /// PyTorch memory snapshots; or workloads, recipes and traces in any known format; or a folder with one a rank.
    #[arg(value_name = "SNAPSHOT", required = true)]
    sources: Vec<String>,
    /// The memory of my card, context and libraries included.
    #[arg(long, value_name = "SIZE", conflicts_with = "limit")]
    memory: Option<Bytes>,
    /// What the program may reserve: PyTorch's memory fraction, in bytes.
    #[arg(long, value_name = "SIZE")]
    limit: Option<Bytes>,
    /// The settings that the program has now, as in PYTORCH_CUDA_ALLOC_CONF [default: those of the recording].
    #[arg(long, value_name = "SETTINGS")]
    current: Option<String>,
    /// The simulated GPU: `sim` (an H200), `sim:SIZE` or `sim:PROFILE`.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: String,
    /// How often each must complete, back to back in one allocator.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Override a parameter of the workload, such as `--set batch=4`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Seed of the workload's random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Which GPU of a PyTorch snapshot that has several; without it the first that something is known about.
    #[arg(long, value_name = "N")]
    device_index: Option<u32>,
    /// How many of the settings that were tried are shown.
    #[arg(long, value_name = "N", default_value_t = 8)]
    top: usize,
    /// How it is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: Args) -> Outcome {
    let device = device(&args)?;
    let stop = interrupt::flag(interrupt::Running::Replay)?;
    if let Some(files) = ranks::files(&args.sources)? {
        return for_ranks(&args, &files, &device, &stop);
    }
    let mut advices = Vec::new();
    for name in &args.sources {
        let stages = Stages::of(name);
        match answer(&args, name, &device, suite::all_cores(), &stop, &stages)? {
            Some(advice) => advices.push(advice),
            None => return Ok(exit::INTERRUPTED),
        }
    }
    args.format.print(&AdviceReport { advices, top: args.top })?;
    Ok(exit::OK)
}

/// The advice for one source; `None` if somebody stopped it.
fn answer(
    args: &Args,
    name: &str,
    device: &DeviceSpec,
    jobs: usize,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Option<Advice>, Failure> {
    let Known { trace, current, confidence, dead_end } = Known::open(args, name, progress)?;
    let seen = dead_end.as_ref().and_then(|end| end.room_bytes).map(Room::OfCard);
    let room = room(args).or(seen);
    // A recording that died has shown that its device is too small: what it needs is more than that.
    let device = &match room {
        Some(Room::OfCard(bytes)) => device.with_room_for(bytes.saturating_mul(2)),
        _ => device.clone(),
    };
    let question = AdviceQuestion {
        room,
        dead_end: dead_end.as_ref(),
        repeat: args.repeat,
        jobs,
        stop: Some(stop),
        progress,
        ..AdviceQuestion::new(&trace, &current, device)
    };
    match advise::advise(&question) {
        Ok(advice) => Ok(Some(Advice { confidence, ..advice })),
        Err(ThresholdError::Interrupted) => Ok(None),
        Err(error @ ThresholdError::NoRoom { .. }) => Err(Failure::usage(error)),
        Err(error) => Err(error.into()),
    }
}

/// One answer for all ranks: settings are the same for all of them, and the one that needs most decides.
fn for_ranks(args: &Args, files: &[RankFile], device: &DeviceSpec, stop: &AtomicBool) -> Outcome {
    let jobs = ranks::jobs_of_each(files);
    let answers = ranks::ask(files, |name, progress| {
        let advice = answer(args, name, device, jobs, stop, progress)?;
        let advice = advice.ok_or_else(|| Failure::usage(anyhow!("interrupted")))?;
        Ok(AdviceReport { advices: vec![advice], top: args.top })
    });
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    ranks::tell("memory needed", &answers, args.format, |report| {
        let advice = &report.advices[0];
        RankRow {
            peak_bytes: Some(advice.live_peak_bytes),
            figure_bytes: advice.needed_bytes.or(Some(advice.live_peak_bytes)),
            severity: if advice.needed_bytes.is_none() || advice.fits == Some(false) { 1 } else { 0 },
            verdict: match (&advice.export, advice.needed_bytes, advice.fits) {
                (_, None, _) | (_, _, Some(false)) => "does not fit".to_owned(),
                (Some(_), ..) => advice.recommended.clone(),
                (None, ..) => "no change".to_owned(),
            },
            ..RankRow::default()
        }
    })
}

/// A source, and what is known about the program behind it.
struct Known {
    trace: Trace,
    current: String,
    confidence: Confidence,
    dead_end: Option<DeadEnd>,
}

impl Known {
    fn open(args: &Args, name: &str, progress: &dyn Progress) -> Result<Known, Failure> {
        let options = SourceOptions {
            source: name.to_owned(),
            set: args.set.clone(),
            seed: args.seed,
            device_index: args.device_index,
        };
        let spec = options.spec()?;
        let (trace, recorded, confidence, dead_end) = match spec.verified_recording(progress).map_err(Failure::usage)? {
            Some(_) if !args.set.is_empty() => return Err(Failure::usage(anyhow!("'{name}' has nothing to --set"))),
            Some((recording, verification)) => {
                let settings = recording.settings.conf().trim().to_owned();
                let dead_end = recording.dead_end();
                (recording.trace, settings, Confidence::of(&verification), dead_end)
            }
            None => {
                let source = spec.open(progress).map_err(Failure::usage)?;
                let source = ProgressSource::stage(source, progress, "reading it", 1);
                (Trace::read(&source).map_err(Failure::usage)?, String::new(), Confidence::Unverified, None)
            }
        };
        let current = match &args.current {
            Some(settings) => {
                Candidate::with_settings(settings.trim()).strategy.check().map_err(Failure::usage)?;
                settings.trim().to_owned()
            }
            None => recorded_settings(recorded),
        };
        Ok(Known { trace, current, confidence, dead_end })
    }
}

/// The settings of a recording, or PyTorch's defaults where they are beyond the model.
fn recorded_settings(recorded: String) -> String {
    match Candidate::with_settings(&recorded).strategy.check() {
        Ok(()) => recorded,
        Err(error) => {
            output::complain(&format!("note: PyTorch's default settings are used instead of the recording's: {error}"));
            String::new()
        }
    }
}

fn room(args: &Args) -> Option<Room> {
    let card = args.memory.map(|memory| Room::Card(memory.0));
    card.or(args.limit.map(|limit| Room::Limit(limit.0)))
}

/// Where it is replayed: with as much memory as the card has, at least.
fn device(args: &Args) -> Result<DeviceSpec, Failure> {
    let spec = DeviceOptions { device: args.device.clone(), limit: None }.spec()?;
    if !spec.is_simulated() {
        return Err(Failure::usage(anyhow!("settings are tried on a simulated device; leave out --device {spec}")));
    }
    Ok(args.memory.map_or_else(|| spec.clone(), |memory| spec.with_room_for(memory.0)))
}
