//! `oomph replay --release A,B`: one table with the program under the rules of each release.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult},
    options::Format,
    output,
    progress::Stages,
};
use crate::{
    answer::releases::{ReleaseRow, compare_releases},
    measure::Status,
    pytorch::Release,
    strategy::StrategySpec,
    suite::Case,
};

/// The strategies as of these releases, where they model PyTorch's allocator. With several releases, only those stay.
pub fn strategies_at(
    specs: Vec<StrategySpec>,
    releases: &[Release],
    typed: &[String],
) -> Result<Vec<StrategySpec>, CommandError> {
    if releases.is_empty() {
        return Ok(specs);
    }
    if let Some(named) = typed.iter().find(|text| StrategySpec::from(text.as_str()).names_release()) {
        let message = format!("'{named}' names a release, and so does --release: leave out one of them");
        return Err(CommandError::usage(anyhow!(message)));
    }
    let mut at_releases: Vec<StrategySpec> = Vec::new();
    for spec in specs.iter().filter(|spec| releases.len() == 1 || spec.release().is_some()) {
        for release in releases {
            let spec = spec.at_release(*release);
            spec.check().map_err(CommandError::usage)?;
            if !at_releases.contains(&spec) {
                at_releases.push(spec);
            }
        }
    }
    if at_releases.is_empty() {
        let message =
            "--release compares releases of PyTorch's allocator: choose --strategy caching, with settings or without";
        return Err(CommandError::usage(anyhow!(message)));
    }
    Ok(at_releases)
}

/// Replays all cases, those of one program and strategy together, and prints the table.
pub fn run(cases: &[Case], format: Format, stages: &Stages, stop: &AtomicBool) -> CommandResult {
    let is_same = |one: &Case, other: &Case| {
        let unnamed = |case: &Case| case.strategy.at_release(Release::DEFAULT);
        one.label.workload == other.label.workload && unnamed(one) == unnamed(other)
    };
    let rows: Vec<ReleaseRow> = cases.chunk_by(is_same).flat_map(|group| compare_releases(group, stop)).collect();
    stages.finish();
    format.print(&rows)?;
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    let failed = rows.iter().filter(|row| row.status == Status::Error);
    Ok(output::complain_of(failed.map(|row| (format!("{}/{}", row.workload, row.strategy), row.reason.clone()))))
}
