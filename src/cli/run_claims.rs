//! `oomph run claims`: the test of claims as a suite, with a folder for its results.

use anyhow::anyhow;

use super::{
    claims::Trial,
    environment, exit,
    failure::{Failure, Outcome},
    output,
    run::Args,
};
use crate::{answer::claims::all_claims, suite};

/// Tests the claims that pass the filters; what the folder holds is not tested again.
pub fn run(args: &Args) -> Outcome {
    let filter = args.filter();
    let trial = Trial {
        claims: all_claims().filter(|claim| filter.takes(claim.id)).collect(),
        device: args.device.spec()?,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        in_full: false,
        format: args.format,
    };
    if trial.claims.is_empty() {
        return Err(Failure::nothing_selected(anyhow!(
            "none of the claims passes the filters; `oomph claims --list` shows their names"
        )));
    }
    if args.list {
        let ids: Vec<&str> = trial.claims.iter().map(|claim| claim.id).collect();
        output::say(&ids.join("\n"))?;
        return Ok(exit::OK);
    }
    let new = || environment::new_run_folder(&args.suites);
    let place = args.resume.clone().or_else(|| args.output.clone()).unwrap_or_else(new);
    let again = format!("oomph run {} --resume {}", args.suites.join(" "), place.display());
    trial.into_folder(&place, args.resume.is_some(), &again)
}
