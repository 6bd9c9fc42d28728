//! `oomph report`.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult},
    output,
};
use crate::report::{Environment, Shards, html, read_environment};

/// Makes one page from the folders of runs: charts and tables in one file that loads nothing.
/// Merges shards into one run.
///
/// Only the files in the folders are used, so this works on any machine. Several folders (shards,
/// devices, suites) become one page; cases with different results in two folders are shown
/// separately.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders that `oomph run` wrote.
    #[arg(value_name = "RESULTS", required = true)]
    folders: Vec<PathBuf>,
    /// The page [default: report.html in the folder, or in the current folder for several]. For
    /// shards also a new folder: the merged run and its page.
    #[arg(long, short, value_name = "FILE.html|DIR")]
    output: Option<PathBuf>,
    /// Draw cases whose id contains this, even if there are more than 40 cases; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    show: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  oomph report results/local/2026-11-15-101112-quick
  oomph report shard-1 shard-2 shard-3 --output whole        merge: the CSVs and the page of the run
  oomph report shard-1 shard-2 shard-3 --output all.html     the page only, even if cases are missing
  oomph report results/2026-11-15-h200/{quick,leaks} -o h200.html
  oomph report big-run --show training/caching               always draw this case

Shards (`oomph run --partition`) are checked: every case must be there exactly once, and all shards must have the same
schema, commit, device and settings. Otherwise the problems are listed, the exit code is 107 and no folder is written.
Cases that failed in their shard are listed again, with exit code 104.";

pub fn run(args: Args) -> CommandResult {
    let environments = args
        .folders
        .iter()
        .map(|folder| read_environment(folder))
        .collect::<Result<Vec<_>, _>>()
        .map_err(CommandError::usage)?;
    for (folder, environment) in args.folders.iter().zip(&environments) {
        environment.schema_note(folder).iter().for_each(|note| output::complain(note));
    }
    // One shard alone is shown like any run.
    let is_one_page = args.folders.len() == 1 && args.output.as_deref().is_none_or(is_page);
    if !is_one_page && args.output.as_deref().is_some_and(|place| !is_page(place)) {
        refuse_mixture(&args.folders, &environments)?;
    }
    let shards = match !is_one_page && environments.iter().all(|environment| environment.shard.is_some()) {
        true => Some(Shards::open(&args.folders).map_err(CommandError::usage)?),
        false => None,
    };
    let problems = shards.as_ref().map_or(&[][..], |shards| &shards.problems[..]);
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
            return Err(CommandError::usage(anyhow!(
                "{} is a folder: name a file, such as report.html",
                place.display()
            )));
        }
        _ => write_page(&args.folders, &args.show, &page_place(&args))?,
    }
    if problems.is_empty() {
        return Ok(code);
    }
    output::complain("the shards do not form one complete run");
    Ok(exit::NOT_WHOLE)
}

/// Shards and whole runs can share a page, but cannot be merged.
fn refuse_mixture(folders: &[PathBuf], environments: &[Environment]) -> Result<(), CommandError> {
    let whole = folders.iter().zip(environments).find(|(_, environment)| environment.shard.is_none());
    let is_mixed = environments.iter().any(|environment| environment.shard.is_some());
    match whole.filter(|_| is_mixed) {
        None => Ok(()),
        Some((folder, _)) => Err(CommandError::usage(anyhow!(
            "{} is a complete run, not a shard: leave it out to merge the others, or name a page such as all.html",
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

fn merge(args: &Args, shards: &Shards, place: &Path) -> Result<(), CommandError> {
    let cases = shards.merge(place).map_err(CommandError::usage)?;
    output::say(&format!("merged: {} ({cases} cases from {} shards)", place.display(), args.folders.len()))?;
    write_page(&[place.to_owned()], &args.show, &place.join("report.html"))
}

fn write_page(folders: &[PathBuf], show: &[String], place: &Path) -> Result<(), CommandError> {
    html::write_page(folders, show, place).map_err(CommandError::usage)?;
    Ok(output::say(&format!("report: {}", place.display()))?)
}
