//! `oomph convert`.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit, export,
    failure::{Failure, Outcome},
    options::DeviceOptions,
    output,
    progress::Stages,
    source::SourceOptions,
};
use crate::{
    base::Progress,
    replay::Replay,
    trace::{self, ProgressSource, Source, WriteError, minimalloc, rmm},
};

/// Writes a workload or trace as a trace file.
///
/// A PyTorch snapshot has addresses, which a trace has not: it shows the replay under PyTorch's allocator with its
/// default settings. `oomph replay --export-snapshot` has the choice of strategy, settings and limit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph convert training steps.oomph.gz
  oomph convert snapshot.pickle log.csv --to rmm
  oomph convert checkerboard buffers.csv --to minimalloc
  oomph convert log.csv snapshot.pickle
  oomph convert snapshot.pickle - | less

An RMM log has no marks, work or host memory; MiniMalloc's list has no streams, threads or times either.")]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// The file to write, compressed if its name ends in .gz; `-` is standard output.
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The format; without it the ending of OUT decides: .oomph or .pickle.
    #[arg(long, value_enum, value_name = "FORMAT")]
    to: Option<Target>,
    /// Overwrite OUT even if it is no trace of our own: a recording, or no trace at all.
    #[arg(long)]
    force: bool,
}

/// A format that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Readable text, with everything that a trace tells.
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

pub fn run(args: Args) -> Outcome {
    let to_standard_output = args.out.as_os_str() == STANDARD_OUTPUT;
    let target = match args.to {
        Some(target) => target,
        None if to_standard_output => Target::Oomph,
        None => Target::of_name(&args.out)?,
    };
    if !to_standard_output {
        export::check_overwriting(&args.out, args.force)?;
    }
    let stages = Stages::of(&args.source.source);
    let progress = &stages;
    let source = ProgressSource::stage(args.source.resolve(progress)?, progress, target.stage(), 1);
    if to_standard_output {
        let mut out = BufWriter::new(io::stdout().lock());
        target.write(&source, &mut out, progress)?;
        stages.finish();
        return Ok(exit::OK);
    }
    let written = target.save(&source, &args.out, progress)?;
    stages.finish();
    output::say(&written)?;
    Ok(exit::OK)
}

impl Target {
    /// What the ending of a file name asks for.
    fn of_name(path: &Path) -> Result<Target, Failure> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let path = path.display();
        match name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("oomph") => Ok(Target::Oomph),
            Some("pickle" | "pkl") => Ok(Target::Torch),
            Some("csv") => Err(Failure::usage(anyhow!("{path}: two formats are CSV; say --to rmm or --to minimalloc"))),
            _ => Err(Failure::usage(anyhow!(
                "{path}: the ending tells no format; known are .oomph, .pickle and .pkl, each with or without .gz, \
                 and .csv with --to rmm or --to minimalloc"
            ))),
        }
    }

    /// What is done while the source is read.
    fn stage(self) -> &'static str {
        match self {
            Target::Torch => "playing it",
            Target::Oomph | Target::Rmm | Target::MiniMalloc => "writing the file",
        }
    }

    /// Writes a file, whole or not at all, and says what is in it.
    fn save(self, source: &dyn Source, path: &Path, progress: &dyn Progress) -> Result<String, Failure> {
        let (count, what) = match self {
            Target::Torch => return export::save(&export::witnessed(&default_replay(source)?)?, path, progress),
            Target::Oomph => (trace::write(source, path), "events"),
            Target::Rmm => (trace::save(path, |to| rmm::write(source, to)), "rows"),
            Target::MiniMalloc => (trace::save(path, |to| minimalloc::write(source, to)), "buffers"),
        };
        Ok(format!("{} {what} written to {}", count.map_err(Failure::usage)?, path.display()))
    }

    fn write(self, source: &dyn Source, mut to: &mut dyn Write, progress: &dyn Progress) -> Result<(), Failure> {
        let written = match self {
            Target::Torch => {
                export::witnessed(&default_replay(source)?)?.snapshot.write(&mut to, progress).map_err(WriteError::Io)
            }
            Target::Oomph => trace::write_to(source, to).map(drop),
            Target::Rmm => rmm::write(source, to).map(drop),
            Target::MiniMalloc => minimalloc::write(source, to).map(drop),
        };
        written.map_err(|error| match error {
            WriteError::Trace(error) => Failure::usage(error),
            WriteError::Io(error) => Failure::from(error),
        })
    }
}

/// The replay that a conversion to a snapshot shows.
fn default_replay(source: &dyn Source) -> Result<Replay<'_>, Failure> {
    Ok(Replay::new(source).device(DeviceOptions::default().spec()?))
}
