//! `oomph claims`.

use std::{
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use anyhow::anyhow;

use super::{
    environment, exit,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format},
    output, progress,
    run::write_page,
};
use crate::{
    answer::claims::{Claim, ClaimRecord, ClaimsQuestion, all_claims, claims},
    base::{did_you_mean, nearest},
    device::DeviceSpec,
    report::{ClaimReport, RecordFolder, ReportError},
    suite,
};

/// Puts what is published about GPU memory to the test: claim by claim, with the published figure, what is measured here,
/// what real PyTorch did where that is known, and a verdict.
///
/// Without names all claims are tested and told in a table; claims that are named are told in full.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph claims                               all of them
  oomph claims --list                        their names and what they say
  oomph claims fp16-30 set-to-none           two of them, in full
  oomph claims --output results/local/claims claims.csv and claims.md as well
  oomph claims --device cuda --output DIR    on a GPU too; --resume DIR goes on

`oomph run claims` is the same as `oomph claims` with a folder for the results.")]
pub struct Args {
    /// Which claims, by name; without any, all.
    #[arg(value_name = "CLAIM")]
    names: Vec<String>,
    /// Print the names and what they say, and test nothing.
    #[arg(long)]
    list: bool,
    /// Where they are tested: `sim` (an H200), `sim:PROFILE`, `cuda[:N]` or `auto`. A GPU is asked beside the simulated one.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: String,
    /// How many claims are tested side by side [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Write claims.csv, claims.md and env.json into this new folder.
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Go on with the folder of an interrupted test.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: Args) -> Outcome {
    let trial = Trial {
        claims: chosen(&args.names)?,
        device: DeviceOptions { device: args.device.clone(), limit: None }.spec()?,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        in_full: !args.names.is_empty(),
        format: args.format,
    };
    if args.list {
        output::say(&trial.list())?;
        return Ok(exit::OK);
    }
    let again = |place: &Path| format!("oomph claims --resume {}", place.display());
    match (&args.resume, &args.output) {
        (Some(path), _) => trial.run_in_folder(path, true, &again(path)),
        (None, Some(path)) => trial.run_in_folder(path, false, &again(path)),
        (None, None) => trial.run(None, None),
    }
}

/// Claims and how they are told: what the suite and the command have in common.
pub struct Trial {
    pub claims: Vec<&'static Claim>,
    pub device: DeviceSpec,
    pub jobs: usize,
    /// Whether each is told in full, where people read it.
    pub in_full: bool,
    pub format: Format,
}

impl Trial {
    /// Names and sentences.
    pub fn list(&self) -> String {
        let width = self.claims.iter().map(|claim| claim.id.len()).max().unwrap_or(0);
        let line = |claim: &&Claim| format!("{:width$}  {}", claim.id, claim.statement);
        self.claims.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// Tests what the folder does not hold yet. `again` is the command that would go on.
    pub fn run_in_folder(&self, place: &Path, resumes: bool, again: &str) -> Outcome {
        let environment = environment::describe(&self.device, 0)?;
        let files = RecordFolder::open(place, &environment, resumes);
        self.run_with_files(place, files.map_err(Failure::usage)?, again)
    }

    /// Tests what these files of the folder `place` do not hold yet.
    pub fn run_with_files(&self, place: &Path, files: RecordFolder<ClaimRecord>, again: &str) -> Outcome {
        let code = self.run(Some(files), Some(again))?;
        let page = write_page(place)?;
        if self.format == Format::Table {
            output::say(&format!("\nresults: {}\nreport:  {}", place.display(), page.display()))?;
        }
        Ok(code)
    }

    fn run(&self, mut files: Option<RecordFolder<ClaimRecord>>, again: Option<&str>) -> Outcome {
        let stop = interrupt::flag(interrupt::Running::Cases)?;
        let is_known = |claim: &&Claim| files.as_ref().is_some_and(|files| files.has(claim.id));
        let wanted: Vec<&Claim> = self.claims.iter().copied().filter(|claim| !is_known(claim)).collect();
        let bar = progress::of_cases(self.claims.len(), self.claims.len() - wanted.len());
        let simulated: DeviceSpec = if self.device.is_simulated() { self.device.clone() } else { "sim".parse()? };
        let question = ClaimsQuestion {
            claims: &wanted,
            device: &self.device,
            simulated: &simulated,
            jobs: self.jobs,
            stop: &stop,
        };
        let mut records: Vec<ClaimRecord> = Vec::new();
        let mut trouble: Result<(), ReportError> = Ok(());
        claims(&question, |_, record| {
            bar.set_message(record.id.clone());
            bar.inc(1);
            if let (Some(files), Ok(())) = (&mut files, &trouble) {
                trouble = files.append(&record);
                // Without a place for results there is no point in going on.
                if trouble.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            records.push(record);
        })?;
        bar.finish_and_clear();
        trouble?;
        let ids: Vec<String> = self.claims.iter().map(|claim| claim.id.to_owned()).collect();
        match files {
            Some(files) => records = files.finish(&ids)?,
            None => records.sort_by_key(|record| ids.iter().position(|id| *id == record.id)),
        }
        self.format.print(&ClaimReport { records: &records, in_full: self.in_full })?;
        if records.len() >= self.claims.len() || !stop.load(Ordering::Relaxed) {
            return Ok(exit::OK);
        }
        let how = again.map_or_else(String::new, |command| format!("; go on with: {command}"));
        output::complain(&format!("interrupted after {} of {} claims{how}", records.len(), self.claims.len()));
        Ok(exit::INTERRUPTED)
    }
}

fn chosen(names: &[String]) -> Result<Vec<&'static Claim>, Failure> {
    if let Some(unknown) = names.iter().find(|name| all_claims().all(|claim| claim.id != **name)) {
        let near = nearest(unknown, all_claims().map(|claim| claim.id));
        return Err(Failure::usage(anyhow!(
            "unknown claim '{unknown}'{}; `oomph claims --list` shows all",
            did_you_mean(near.as_deref())
        )));
    }
    Ok(all_claims().filter(|claim| names.is_empty() || names.iter().any(|name| name == claim.id)).collect())
}
