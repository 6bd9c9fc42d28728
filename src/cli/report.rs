//! `oomph report`.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult},
    output, threshold,
};
use crate::report::{Shards, StoredRun, html};

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
  oomph report quick-run leaks-run -o both.html              several runs on one page
  oomph report big-run --show training/caching               always draw this case

Shards (`oomph run --partition`) are checked: every case must be there exactly once, and all shards must have the same
schema, commit, device, settings and content of cases. Otherwise the problems are listed, the exit code is 107 and no
folder is written. Cases that failed in their shard are listed again, with exit code 104.

Where rows of a run are missing, because it was interrupted or its files were cut, the page is written and says so, and the
exit code is 107. A file that was changed or damaged after it was written is an error. The page replaces an older page
only.";

pub fn run(args: Args) -> CommandResult {
    let runs = args
        .folders
        .iter()
        .map(|folder| StoredRun::read(folder))
        .collect::<Result<Vec<_>, _>>()
        .map_err(CommandError::usage)?;
    for run in &runs {
        run.environment.schema_note(&run.path).iter().for_each(|note| output::complain(note));
    }
    // One shard alone is shown like any run.
    let is_one_page = runs.len() == 1 && args.output.as_deref().is_none_or(is_page);
    let merges = !is_one_page && args.output.as_deref().is_some_and(|place| !is_page(place));
    if merges {
        refuse_mixture(&runs)?;
    }
    if is_one_page || !runs.iter().all(|run| run.environment.shard.is_some()) {
        return page_of_runs(&args, runs);
    }
    let shards = Shards::open(runs.clone()).map_err(CommandError::usage)?;
    for problem in &shards.problems {
        output::complain(problem);
    }
    let code = match (&args.output, shards.problems.is_empty()) {
        (Some(place), true) if merges => merge(&args, &shards, place)?,
        (Some(_), false) if merges => exit::OK,
        _ => {
            write_page(&args, runs)?;
            exit::OK
        }
    };
    if shards.problems.is_empty() {
        return Ok(code);
    }
    output::complain("the shards do not form one complete run");
    Ok(exit::NOT_WHOLE)
}

/// The page about runs that are not merged. It is written even if rows are missing.
fn page_of_runs(args: &Args, runs: Vec<StoredRun>) -> CommandResult {
    let mut code = exit::OK;
    for run in &runs {
        for gap in run.gaps() {
            output::complain(&format!("{}: {gap}", run.path.display()));
            code = exit::NOT_WHOLE;
        }
    }
    write_page(args, runs)?;
    Ok(code)
}

/// Shards and whole runs can share a page, but cannot be merged.
fn refuse_mixture(runs: &[StoredRun]) -> Result<(), CommandError> {
    let whole = runs.iter().find(|run| run.environment.shard.is_none());
    let is_mixed = runs.iter().any(|run| run.environment.shard.is_some());
    match whole.filter(|_| is_mixed) {
        None => Ok(()),
        Some(run) => Err(CommandError::usage(anyhow!(
            "{} is a complete run, not a shard: leave it out to merge the others, or name a page such as all.html",
            run.path.display()
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

/// Merges the shards and returns the exit code for their cases.
fn merge(args: &Args, shards: &Shards, place: &Path) -> CommandResult {
    let cases = shards.merge(place, &args.show).map_err(CommandError::usage)?;
    output::say(&format!("merged: {} ({cases} cases from {} shards)", place.display(), args.folders.len()))?;
    output::say(&format!("report: {}", place.join("report.html").display()))?;
    let codes = [
        output::complain_of_failures(&shards.records()),
        threshold::complain_of_failures(&shards.thresholds()),
        output::complain_of(shards.failed_techniques()),
    ];
    Ok(codes.into_iter().find(|code| *code != exit::OK).unwrap_or(exit::OK))
}

fn write_page(args: &Args, runs: Vec<StoredRun>) -> Result<(), CommandError> {
    let place = page_place(args);
    check_page_place(&place)?;
    let runs: Vec<html::PageRun> = runs.into_iter().map(html::PageRun::from).collect();
    html::write_page(&runs, &args.show, &place).map_err(CommandError::usage)?;
    Ok(output::say(&format!("report: {}", place.display()))?)
}

/// The page replaces an older page, never another file: neither a file of a run folder, nor anything else.
fn check_page_place(place: &Path) -> Result<(), CommandError> {
    let shown = place.display();
    if place.is_dir() {
        return Err(CommandError::usage(anyhow!("{shown} is a folder: name a file, such as report.html")));
    }
    let folder = place.parent().map(|parent| if parent == Path::new("") { Path::new(".") } else { parent });
    let holds_run = |folder: &Path| folder.join("env.json").is_file();
    let is_in_run = folder.is_some_and(|folder| {
        holds_run(folder) || (folder.ends_with("cases") && folder.parent().is_some_and(holds_run))
    });
    if is_in_run && !is_page(place) {
        return Err(CommandError::usage(anyhow!(
            "{shown} would be in the folder of a run: name a page such as report.html"
        )));
    }
    match place.is_file() && !is_html(place)? {
        true => {
            Err(CommandError::usage(anyhow!("{shown} already exists and is not an HTML page: choose another name")))
        }
        false => Ok(()),
    }
}

/// Whether a file is empty or begins like an HTML page.
fn is_html(path: &Path) -> Result<bool, CommandError> {
    let unreadable = |error| CommandError::usage(anyhow!("{}: {error}", path.display()));
    let mut beginning = Vec::new();
    File::open(path).and_then(|file| file.take(256).read_to_end(&mut beginning)).map_err(unreadable)?;
    let beginning =
        String::from_utf8_lossy(&beginning).trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    Ok(beginning.is_empty() || beginning.starts_with("<!doctype html") || beginning.starts_with("<html"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn page_replaces_only_pages() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("run/cases")).unwrap();
        for (name, text) in [
            ("run/env.json", "{}"),
            ("run/runs.csv", ""),
            ("page.html", "\n<!DOCTYPE html><title>"),
            ("old.htm", "<html>"),
            ("empty", ""),
            ("notes.html", "my notes"),
            ("letter.txt", "dear"),
        ] {
            fs::write(at(name), text).unwrap();
        }
        for good in ["page.html", "old.htm", "empty", "new.html", "new", "run/report.html", "run/other.html"] {
            check_page_place(&at(good)).unwrap();
        }
        for bad in
            ["run/env.json", "run/runs.csv", "run/plan.csv", "run/cases/a.json.gz", "notes.html", "letter.txt", "run"]
        {
            assert!(check_page_place(&at(bad)).is_err(), "{bad}");
        }
        #[cfg(unix)]
        check_page_place(Path::new("/dev/null")).unwrap();
    }
}
