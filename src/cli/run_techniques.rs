//! `oomph run techniques`: the comparison of techniques as a suite, with a folder for its results.

use anyhow::anyhow;

use super::{
    environment, exit,
    failure::{Failure, Outcome},
    options::Format,
    output,
    run::{Args, write_page},
    techniques::{Comparison, formatted, row_id},
};
use crate::{
    answer::techniques::{CARDS, LINK_BYTES_PER_SECOND, TECHNIQUES, TechniqueRecord},
    report::TechniqueFiles,
    suite::{self, SuiteFile},
};

/// Tries every technique on the workloads of the suite; what the folder holds is not tried again.
pub fn run(args: &Args, suite: &SuiteFile) -> Outcome {
    let comparison = Comparison {
        models: suite.models().map_err(Failure::usage)?,
        techniques: TECHNIQUES.iter().collect(),
        device: args.device.spec()?,
        cards: CARDS.to_vec(),
        confirm: None,
        link: LINK_BYTES_PER_SECOND,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        filter: args.filter(),
    };
    let ids: Vec<String> = comparison.pairs().map(|(model, technique)| row_id(&model, &technique)).collect();
    if ids.is_empty() {
        return Err(Failure::nothing_selected(anyhow!(
            "none of the rows passes the filters; `oomph run {} --list` shows their ids",
            suite.name
        )));
    }
    if args.list {
        output::say(&ids.join("\n"))?;
        return Ok(exit::OK);
    }
    let environment = environment::describe(&comparison.device, 0)?;
    let (place, files) = match (&args.resume, &args.output) {
        (Some(path), _) => (path.clone(), TechniqueFiles::resume(path, &environment)),
        (None, Some(path)) => (path.clone(), TechniqueFiles::create(path, &environment)),
        (None, None) => {
            let path = environment::new_run_folder(&args.suites);
            let files = TechniqueFiles::create(&path, &environment);
            (path, files)
        }
    };
    let again = format!("oomph run {} --resume {}", args.suites.join(" "), place.display());
    let compared = comparison.run(Some(files.map_err(Failure::usage)?), Some(&again))?;
    let records: Vec<TechniqueRecord> = compared.rows.into_iter().map(|row| row.record).collect();
    output::say(&formatted(&records, args.format)?)?;
    let page = write_page(&place)?;
    if args.format == Format::Table {
        output::say(&format!("\nresults: {}\nreport:  {}", place.display(), page.display()))?;
    }
    Ok(compared.code)
}
