//! `oomph report`.

use std::path::PathBuf;

use anyhow::anyhow;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};
use crate::report::html;

/// Makes one page of the folders of runs: pictures and tables, offline, in one file.
///
/// Everything comes from the files in the folders, so that it can be done on another machine. Several folders (shards,
/// devices, other suites) become one page; cases that two of them tell differently are kept apart.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders that `oomph run` wrote.
    #[arg(value_name = "RESULTS", required = true)]
    folders: Vec<PathBuf>,
    /// Where the page goes [default: report.html in the folder; of several folders, in the current one].
    #[arg(long, short, value_name = "FILE.html")]
    output: Option<PathBuf>,
    /// Draw cases whose id contains this in full, even where there are more than forty; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    show: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  oomph report results/local/2026-11-15-101112-quick
  oomph report shard-1 shard-2 shard-3 --output all.html     shards as one page
  oomph report results/2026-11-15-h200/* -o h200.html        all runs of a device
  oomph report big-run --show training/caching               this case in full, whatever else is drawn";

pub fn run(args: Args) -> Outcome {
    let place = match (&args.output, args.folders.as_slice()) {
        (Some(path), _) => path.clone(),
        (None, [folder]) => folder.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    };
    if place.is_dir() {
        return Err(Failure::usage(anyhow!("{} is a folder: name a file, such as report.html", place.display())));
    }
    html::write_page(&args.folders, &args.show, &place).map_err(Failure::usage)?;
    output::say(&format!("report: {}", place.display()))?;
    Ok(exit::OK)
}
