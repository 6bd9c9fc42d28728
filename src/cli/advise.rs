//! `oomph advise`.

use anyhow::anyhow;

use super::{
    exit,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format},
    output,
    source::SourceOptions,
};
use crate::{
    answer::{
        advise::{self, Advice, AdviceQuestion, Confidence, Room, grid::Candidate},
        threshold::ThresholdError,
    },
    device::DeviceSpec,
    report::{self, Medium},
    suite,
    trace::Trace,
    unit::Bytes,
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
  oomph advise *.pickle --format json

From an OOM to the line to paste: record the program on a card where it runs, or up to where it dies, with
torch.cuda.memory._record_memory_history() before the first allocation, write it with
torch.cuda.memory._dump_snapshot('snapshot.pickle'), and ask.

Of the settings that need about the least (64 MiB or 1 % more) the simplest is recommended: what the program has now, then
the fewest settings, then the least memory. A smaller gain than that is no reason to change anything. A request that failed
when it was recorded must be served as well.

`Memory needed` is the allocator's own, to be compared with torch.cuda.max_memory_reserved; `Smallest device` adds what
the driver's context and the libraries take. With --memory the driver refuses what goes beyond, as a card of that size
does; otherwise the allocator's own limit does, as in `oomph threshold`. `Driver time` is the simulated time of all driver
calls of the whole recording: with --memory or --limit in that memory, otherwise with the whole device.

JSON has one row a source: `recommended`, `saved_bytes`, `confidence`, `reasons`, and `tried` with everything.")]
pub struct Args {
    /// PyTorch memory snapshots; or workloads, recipes and traces in any known format.
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
    let mut advices = Vec::new();
    for name in &args.sources {
        let Watched { trace, current, confidence } = Watched::open(&args, name)?;
        let question = AdviceQuestion {
            room: room(&args),
            repeat: args.repeat,
            jobs: suite::all_cores(),
            stop: Some(&stop),
            ..AdviceQuestion::new(&trace, &current, &device)
        };
        match advise::advise(&question) {
            Ok(advice) => advices.push(Advice { confidence, ..advice }),
            Err(ThresholdError::Interrupted) => return Ok(exit::INTERRUPTED),
            Err(error) => return Err(error.into()),
        }
    }
    let each = |medium: Medium| {
        advices.iter().map(|advice| report::advice(advice, args.top, medium)).collect::<Vec<_>>().join("\n")
    };
    output::say(&match args.format {
        Format::Table => each(Medium::Terminal(output::terminal_width())),
        Format::Markdown => each(Medium::Markdown),
        Format::Json => report::advice_json(&advices),
        Format::Csv => report::advice_csv(&advices)?,
    })?;
    Ok(exit::OK)
}

/// A source, and what is known about the program behind it.
struct Watched {
    trace: Trace,
    current: String,
    confidence: Confidence,
}

impl Watched {
    fn open(args: &Args, name: &str) -> Result<Watched, Failure> {
        let options = SourceOptions {
            source: name.to_owned(),
            set: args.set.clone(),
            seed: args.seed,
            device_index: args.device_index,
        };
        let spec = options.spec()?;
        let (trace, recorded, confidence) = match spec.verified_recording().map_err(Failure::usage)? {
            Some(_) if !args.set.is_empty() => return Err(Failure::usage(anyhow!("'{name}' has nothing to --set"))),
            Some((recording, verification)) => {
                let settings = recording.settings.conf().trim().to_owned();
                (recording.trace, settings, Confidence::of(&verification))
            }
            None => {
                let source = spec.open().map_err(Failure::usage)?;
                (Trace::read(&*source).map_err(Failure::usage)?, String::new(), Confidence::Unverified)
            }
        };
        let current = match &args.current {
            Some(settings) => {
                Candidate::with_settings(settings.trim()).strategy.check().map_err(Failure::usage)?;
                settings.trim().to_owned()
            }
            None => recorded_settings(recorded),
        };
        Ok(Watched { trace, current, confidence })
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
