//! `oomph claims`, and the suite `claims`.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::builder::PossibleValuesParser;

use super::{
    exit::{self, CommandError, CommandResult},
    options::{DeviceChoice, Format},
    output,
    run::shared::{self, RecordCollector, ResultFolder, RunShare},
};
use crate::{
    answer::{
        claims::{Claim, ClaimRecord, ClaimsQuestion, all_claims, claims},
        simulated_beside,
    },
    device::DeviceSpec,
    report::ClaimReport,
    suite::{self, SuiteFile},
};

/// Tests published claims about GPU memory. For each claim: the published figure, what is measured
/// here, what PyTorch did where that is known, and a verdict.
///
/// Without names, all claims are tested and shown in a table. Named claims are shown in full.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph claims                               all claims
  oomph claims --list                        their names and statements
  oomph claims fp16-30 set-to-none           two claims, in full
  oomph claims --output results/local/claims also write claims.csv and claims.md
  oomph claims --device cuda --output DIR    also on a GPU; --resume DIR continues

With --device cuda the GPU is used in addition to the simulated one.

`oomph run claims` is the same as `oomph claims` with a folder for the results.")]
pub struct Args {
    /// Claims by name [default: all].
    #[arg(value_name = "CLAIM", value_parser = claim_names(), hide_possible_values = true)]
    names: Vec<String>,
    /// Print the names and statements, without testing them.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    device: DeviceChoice,
    /// How many claims are tested in parallel [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Write claims.csv, claims.md and env.json into this new folder.
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Continue the folder of an interrupted test.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub fn run(args: Args) -> CommandResult {
    let is_named = |claim: &Claim| args.names.iter().any(|name| name == claim.id);
    let test = ClaimTest {
        claims: all_claims().filter(|claim| args.names.is_empty() || is_named(claim)).collect(),
        device: args.device.spec()?,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        in_full: !args.names.is_empty(),
        format: args.format,
    };
    if args.list {
        output::say(&list(&test.claims))?;
        return Ok(exit::OK);
    }
    let place = args.resume.as_ref().or(args.output.as_ref());
    let share = RunShare::whole(&test.ids());
    let folder = |place: &PathBuf| ResultFolder::of_command(place, &test.device, share.plan(), args.resume.is_some());
    test.run(place.map(folder).transpose()?)
}

/// Tests the claims that pass the filters of a run.
pub fn run_suite(args: &shared::Args, suite: &SuiteFile) -> CommandResult {
    let filter = args.filter();
    let claims: Vec<&Claim> = all_claims().filter(|claim| filter.takes(claim.id)).collect();
    if claims.is_empty() {
        return Err(CommandError::nothing_selected(anyhow!(
            "none of the claims passes the filters; `oomph claims --list` shows their names"
        )));
    }
    let ids: Vec<String> = claims.iter().map(|claim| claim.id.to_owned()).collect();
    let share = RunShare::new(args, &ids);
    if args.list {
        output::say(&share.of(ids).join("\n"))?;
        return Ok(exit::OK);
    }
    let test = ClaimTest {
        claims: claims.into_iter().filter(|claim| share.has(claim.id)).collect(),
        device: args.one_device(suite)?,
        jobs: args.jobs(),
        in_full: false,
        format: args.format,
    };
    let settings = args.settings(std::slice::from_ref(suite))?;
    test.run(Some(share.result_folder(args, &test.device, settings)?))
}

/// Claims to test, for the command and for the suite.
struct ClaimTest {
    claims: Vec<&'static Claim>,
    device: DeviceSpec,
    jobs: usize,
    in_full: bool,
    format: Format,
}

impl ClaimTest {
    fn ids(&self) -> Vec<String> {
        self.claims.iter().map(|claim| claim.id.to_owned()).collect()
    }

    /// Tests the claims that the folder does not hold yet.
    fn run(&self, folder: Option<ResultFolder<ClaimRecord>>) -> CommandResult {
        let mut collector = RecordCollector::new(self.ids(), folder)?;
        let wanted = collector.wanted();
        let wanted: Vec<&Claim> = self.claims.iter().copied().filter(|claim| wanted.contains(claim.id)).collect();
        let (device, simulated, stop) = (&self.device, &simulated_beside(&self.device)?, &collector.stop());
        let question = ClaimsQuestion { claims: &wanted, device, simulated, jobs: self.jobs, stop };
        let mut records: Vec<ClaimRecord> = Vec::new();
        claims(&question, |record| {
            collector.add(&record);
            records.push(record);
        })?;
        let report = |records: &[ClaimRecord]| self.format.print(&ClaimReport { records, in_full: self.in_full });
        collector.finish(records, self.format, report)
    }
}

/// Names and statements.
fn list(claims: &[&Claim]) -> String {
    let width = claims.iter().map(|claim| claim.id.len()).max().unwrap_or(0);
    let line = |claim: &&Claim| format!("{:width$}  {}", claim.id, claim.statement);
    claims.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn claim_names() -> PossibleValuesParser {
    PossibleValuesParser::new(all_claims().map(|claim| claim.id))
}
