//! `oomph convert`.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult},
    export,
    options::DeviceOptions,
    output,
    progress::Stages,
    source::SourceOptions,
};
use crate::{
    replay::Replay,
    trace::{self, ProgressSource, WriteError, minimalloc, rmm},
};

/// Writes a workload or trace as a trace file.
///
/// A PyTorch snapshot needs addresses, which a trace does not have: it shows a replay under
/// PyTorch's allocator with default settings. Use `oomph replay --export-snapshot` to choose
/// strategy, settings and limit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph convert training steps.oomph.gz
  oomph convert snapshot.pickle log.csv --to rmm
  oomph convert checkerboard buffers.csv --to minimalloc
  oomph convert log.csv snapshot.pickle
  oomph convert snapshot.pickle - | less

RMM logs do not store marks, work or host memory. MiniMalloc lists also lack streams, threads and times.")]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// The file to write, compressed if its name ends in .gz; `-` is standard output.
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The format [default: by the ending of OUT, .oomph or .pickle].
    #[arg(long, value_enum, value_name = "FORMAT")]
    to: Option<TraceFormat>,
    /// Overwrite OUT even if it is not a trace in oomph's own format.
    #[arg(long)]
    force: bool,
}

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TraceFormat {
    /// Readable text with everything in the trace.
    Oomph,
    /// PyTorch memory snapshot, as torch.cuda.memory._dump_snapshot writes it.
    Torch,
    /// The CSV log of RMM's logging resource adaptor.
    Rmm,
    /// MiniMalloc's CSV of buffers: id, lower, upper, size.
    #[value(name = "minimalloc")]
    MiniMalloc,
}

/// The name that stands for standard output.
const STANDARD_OUTPUT: &str = "-";

pub fn run(args: Args) -> CommandResult {
    let to_standard_output = args.out.as_os_str() == STANDARD_OUTPUT;
    let target = match args.to {
        Some(target) => target,
        None if to_standard_output => TraceFormat::Oomph,
        None => TraceFormat::of_name(&args.out)?,
    };
    if !to_standard_output {
        export::check_overwriting(&args.out, args.force)?;
    }
    exit::clean_up_on_signals()?;
    let stages = Stages::of(&args.source.source);
    let progress = &stages;
    let stage = if target == TraceFormat::Torch { "replaying" } else { "writing the file" };
    let source = ProgressSource::stage(args.source.open(progress)?, progress, stage, 1);
    let snapshot = match target {
        // The replay that a snapshot shows.
        TraceFormat::Torch => {
            Some(export::witnessed(&Replay::new(&source).device(DeviceOptions::default().spec()?))?.snapshot)
        }
        _ => None,
    };
    let write = |mut to: &mut dyn Write| match (target, &snapshot) {
        (_, Some(snapshot)) => {
            snapshot.write(&mut to, progress)?;
            Ok((snapshot.traces.iter().map(|trace| trace.len() as u64).sum(), "entries"))
        }
        (TraceFormat::Rmm, _) => Ok((rmm::write(&source, to)?, "rows")),
        (TraceFormat::MiniMalloc, _) => Ok((minimalloc::write(&source, to)?, "buffers")),
        _ => Ok((trace::write_to(&source, to)?, "events")),
    };
    if to_standard_output {
        let written = write(&mut BufWriter::new(io::stdout().lock()));
        stages.finish();
        written.map_err(|error| match error {
            WriteError::Trace(error) => CommandError::usage(error),
            WriteError::Io(error) => CommandError::from(error),
        })?;
        return Ok(exit::OK);
    }
    let (count, what): (u64, &str) = trace::save(&args.out, write).map_err(CommandError::usage)?;
    stages.finish();
    output::say(&format!("{count} {what} written to {}", args.out.display()))?;
    Ok(exit::OK)
}

impl TraceFormat {
    /// The format of a file name.
    fn of_name(path: &Path) -> Result<TraceFormat, CommandError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let path = path.display();
        match name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("oomph") => Ok(TraceFormat::Oomph),
            Some("pickle" | "pkl") => Ok(TraceFormat::Torch),
            Some("csv") => {
                Err(CommandError::usage(anyhow!("{path}: two formats are CSV; choose --to rmm or --to minimalloc")))
            }
            _ => Err(CommandError::usage(anyhow!(
                "{path}: unknown ending; use .oomph, .pickle or .pkl, each with or without .gz, or .csv with --to rmm or \
                 --to minimalloc"
            ))),
        }
    }
}
