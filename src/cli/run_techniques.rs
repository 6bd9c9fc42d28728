//! `oomph run techniques`: the comparison of techniques as a suite, with a folder for its results.

use anyhow::anyhow;

use super::{
    environment, exit,
    failure::{Failure, Outcome},
    options::Format,
    output,
    run::{Args, write_page},
    run_partition::Share,
    techniques::Comparison,
};
use crate::{
    answer::techniques::{CARDS, LINK_BYTES_PER_SECOND, TECHNIQUES, TechniqueRecord, row_id},
    report::{Environment, RecordFolder, RunSettings},
    suite::{self, SuiteFile},
};

/// Tries every technique on the workloads of the suite; what the folder holds is not tried again.
pub fn run(args: &Args, suite: &SuiteFile) -> Outcome {
    let mut comparison = Comparison {
        models: suite.models().map_err(Failure::usage)?,
        techniques: TECHNIQUES.iter().collect(),
        device: args.one_device(suite)?,
        cards: CARDS.to_vec(),
        confirm: None,
        link: LINK_BYTES_PER_SECOND,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        filter: args.filter(),
        own: None,
    };
    let ids: Vec<String> = comparison.pairs().map(|(model, technique)| row_id(&model, &technique)).collect();
    if ids.is_empty() {
        return Err(Failure::nothing_selected(anyhow!(
            "none of the rows passes the filters; `oomph run {} --list` shows their ids",
            suite.name
        )));
    }
    let share = Share::new(args.partition()?, &ids);
    comparison.own = share.own();
    if args.list {
        output::say(&share.of(ids).join("\n"))?;
        return Ok(exit::OK);
    }
    let contents = args.partition()?.is_some().then(|| suite::contents_of_models(&comparison.models));
    let environment = share.in_environment(Environment {
        settings: Some(RunSettings { contents, ..args.settings(std::slice::from_ref(suite)) }),
        ..environment::describe(&comparison.device, 0)?
    });
    let place = share.place(args);
    let files = share.open(args, &place, || RecordFolder::open(&place, &environment, args.resume.is_some()));
    let again = share.again(&place);
    let compared = comparison.run(Some(files.map_err(Failure::usage)?), Some(&again))?;
    let records: Vec<TechniqueRecord> = compared.rows.into_iter().map(|row| row.record).collect();
    args.format.print(&records)?;
    let page = write_page(&place)?;
    if args.format == Format::Table {
        output::say(&format!("\nresults: {}\nreport:  {}", place.display(), page.display()))?;
    }
    Ok(compared.code)
}
