//! `oomph run claims`: the test of claims as a suite, with a folder for its results.

use anyhow::anyhow;

use super::{
    claims::Trial,
    environment, exit,
    failure::{Failure, Outcome},
    output,
    run::Args,
    run_partition::Share,
};
use crate::{
    answer::claims::{Claim, all_claims},
    report::{Environment, RecordFolder},
    suite::{self, SuiteFile},
};

/// Tests the claims that pass the filters; what the folder holds is not tested again.
pub fn run(args: &Args, suite: &SuiteFile) -> Outcome {
    let filter = args.filter();
    let claims: Vec<&Claim> = all_claims().filter(|claim| filter.takes(claim.id)).collect();
    if claims.is_empty() {
        return Err(Failure::nothing_selected(anyhow!(
            "none of the claims passes the filters; `oomph claims --list` shows their names"
        )));
    }
    let ids: Vec<String> = claims.iter().map(|claim| claim.id.to_owned()).collect();
    let share = Share::new(args.partition()?, &ids);
    if args.list {
        output::say(&share.of(ids).join("\n"))?;
        return Ok(exit::OK);
    }
    let trial = Trial {
        claims: claims.into_iter().filter(|claim| share.has(claim.id)).collect(),
        device: args.one_device(suite)?,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        in_full: false,
        format: args.format,
    };
    let environment = share.in_environment(Environment {
        settings: Some(args.settings(std::slice::from_ref(suite))),
        ..environment::describe(&trial.device, 0)?
    });
    let place = share.place(args);
    let files = share.open(args, &place, || RecordFolder::open(&place, &environment, args.resume.is_some()));
    trial.run_with_files(&place, files.map_err(Failure::usage)?, &share.again(&place))
}
