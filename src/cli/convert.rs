//! `oomph convert`.

use std::path::PathBuf;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
    source::SourceOptions,
};
use crate::trace;

/// Writes a workload or trace as a trace file: readable text, compressed if the name ends in `.gz`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// The file to write, such as steps.oomph or steps.oomph.gz.
    #[arg(value_name = "OUT")]
    out: PathBuf,
}

pub fn run(args: Args) -> Outcome {
    let source = args.source.resolve()?;
    let events = trace::write(&*source, &args.out).map_err(Failure::usage)?;
    output::say(&format!("{events} events written to {}", args.out.display()))?;
    Ok(exit::OK)
}
