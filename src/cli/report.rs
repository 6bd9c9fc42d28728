//! `oomph report`.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};
use crate::report::{Environment, Shards, html, read_environment};

/// Makes one page of the folders of runs: pictures and tables, offline, in one file. Shards become one run again.
///
/// Everything comes from the files in the folders, so that it can be done on another machine. Several folders (shards,
/// devices, other suites) become one page; cases that two of them tell differently are kept apart.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders that `oomph run` wrote.
    #[arg(value_name = "RESULTS", required = true)]
    folders: Vec<PathBuf>,
    /// Where the page goes [default: report.html in the folder; of several folders, in the current one]. Of shards also a
    /// new folder: for the files that one process would have written, the page among them.
    #[arg(long, short, value_name = "FILE.html|DIR")]
    output: Option<PathBuf>,
    /// Draw cases whose id contains this in full, even where there are more than forty; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    show: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  oomph report results/local/2026-11-15-101112-quick
  oomph report shard-1 shard-2 shard-3 --output whole        the run that the shards are parts of: its CSVs and its page
  oomph report shard-1 shard-2 shard-3 --output all.html     its page only, even where cases are missing
  oomph report results/2026-11-15-h200/{quick,leaks} -o h200.html
  oomph report big-run --show training/caching               this case in full, whatever else is drawn

Shards (`oomph run --partition`) are checked: every case must be there exactly once, and all must be of one schema, commit,
device and settings. What is missing, double or different is named, with exit code 107, and no folder is written. Cases that failed in their shard are named once more, with exit code 104.";

pub fn run(args: Args) -> Outcome {
    let environments = args
        .folders
        .iter()
        .map(|folder| read_environment(folder))
        .collect::<Result<Vec<_>, _>>()
        .map_err(Failure::usage)?;
    // The page of one shard is a page like any other.
    let is_one_page = args.folders.len() == 1 && args.output.as_deref().is_none_or(is_page);
    if !is_one_page && args.output.as_deref().is_some_and(|place| !is_page(place)) {
        refuse_mixture(&args.folders, &environments)?;
    }
    let shards = match !is_one_page && environments.iter().all(|environment| environment.shard.is_some()) {
        true => Some(Shards::open(&args.folders).map_err(Failure::usage)?),
        false => None,
    };
    let problems = shards.as_ref().map_or(&[][..], Shards::problems);
    for problem in problems {
        output::complain(problem);
    }
    let mut code = exit::OK;
    match (&args.output, &shards) {
        (Some(place), Some(shards)) if !is_page(place) => {
            if problems.is_empty() {
                merge(&args, shards, place)?;
                code = output::complain_of_failures(&shards.records());
            }
        }
        (Some(place), None) if place.is_dir() => {
            return Err(Failure::usage(anyhow!("{} is a folder: name a file, such as report.html", place.display())));
        }
        _ => write_page(&args.folders, &args.show, &page_place(&args))?,
    }
    if problems.is_empty() {
        return Ok(code);
    }
    output::complain("the shards do not form one complete run");
    Ok(exit::NOT_WHOLE)
}

/// Shards beside whole runs can be shown on a page, but they are not one run.
fn refuse_mixture(folders: &[PathBuf], environments: &[Environment]) -> Result<(), Failure> {
    let whole = folders.iter().zip(environments).find(|(_, environment)| environment.shard.is_none());
    let is_mixed = environments.iter().any(|environment| environment.shard.is_some());
    match whole.filter(|_| is_mixed) {
        None => Ok(()),
        Some((folder, _)) => Err(Failure::usage(anyhow!(
            "{} is no shard, but a run of its own: leave it out to merge the others, or name a page such as all.html",
            folder.display()
        ))),
    }
}

fn is_page(place: &Path) -> bool {
    place.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("html") || ending.eq_ignore_ascii_case("htm"))
}

fn page_place(args: &Args) -> PathBuf {
    match (&args.output, args.folders.as_slice()) {
        (Some(path), _) => path.clone(),
        (None, [folder]) => folder.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    }
}

fn merge(args: &Args, shards: &Shards, place: &Path) -> Result<(), Failure> {
    let merged = shards.merge(place).map_err(Failure::usage)?;
    output::say(&format!("merged: {} ({} cases from {} shards)", place.display(), merged.cases, merged.shards))?;
    write_page(&[place.to_owned()], &args.show, &place.join("report.html"))
}

fn write_page(folders: &[PathBuf], show: &[String], place: &Path) -> Result<(), Failure> {
    html::write_page(folders, show, place).map_err(Failure::usage)?;
    Ok(output::say(&format!("report: {}", place.display()))?)
}
