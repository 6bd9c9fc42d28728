//! `oomph compare`, and the comparison of `run --baseline`.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult},
    options::Format,
    output,
    source::path_argument,
};
use crate::{
    answer::compare::{CompareError, Comparison, Run, TimeTolerance, compare},
    base::{escaped, text_path},
    report::{Render, StoredRun},
};

/// Compares two runs of the same cases.
///
/// Columns that do not depend on a real clock must be equal to the byte. Wall-clock times (cases
/// marked `timed`) are compared by a Mann-Whitney U test over their passes, and must also differ by
/// more than the noise threshold. Simulated and real clocks are never compared. Columns of runs with
/// an older schema are converted.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The folder of the old run, or the name of a saved baseline.
    #[arg(value_name = "OLD", value_parser = path_argument())]
    old: String,
    /// The folder of the new run, or the name of a saved baseline.
    #[arg(value_name = "NEW", value_parser = path_argument())]
    new: String,
    #[command(flatten)]
    tolerance: ToleranceOptions,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json]))]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  oomph compare results/local/yesterday results/local/today
  oomph run quick --save-baseline main              keep this run under a name
  oomph run quick --baseline main                   run, and compare with it
  oomph compare main results/local/today --fail-on change --format json";

/// Which differences count.
#[derive(Debug, clap::Args)]
pub struct ToleranceOptions {
    /// Times must differ by more than this share to count.
    #[arg(long, value_name = "SHARE", default_value_t = TimeTolerance::default().noise_threshold)]
    noise_threshold: f64,
    /// And the p-value must be below this.
    #[arg(long, value_name = "P", default_value_t = TimeTolerance::default().significance)]
    significance: f64,
    /// Which differences end with exit code 102.
    #[arg(long, value_enum, default_value_t)]
    fail_on: FailOn,
}

impl Default for ToleranceOptions {
    fn default() -> Self {
        let TimeTolerance { noise_threshold, significance } = TimeTolerance::default();
        ToleranceOptions { noise_threshold, significance, fail_on: FailOn::default() }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// Something got worse.
    #[default]
    Regression,
    /// Anything that must be equal is not, or a time changed.
    Change,
    /// None.
    Never,
}

impl ToleranceOptions {
    fn code(&self, comparison: &Comparison) -> u8 {
        let fails = match self.fail_on {
            FailOn::Regression => comparison.has_regressions(),
            FailOn::Change => comparison.has_changes(),
            FailOn::Never => false,
        };
        if fails { exit::REGRESSION } else { exit::OK }
    }
}

pub fn run(args: Args) -> CommandResult {
    let [old, new] = [&args.old, &args.new].map(|name| stored(&folder(name)?));
    let (old, new) = (old?, new?);
    let gaps = complain_of_gaps(&old) + complain_of_gaps(&new);
    let comparison = compared(&in_memory(old), &in_memory(new), &args.tolerance)?;
    args.format.print(&comparison)?;
    Ok(match args.tolerance.code(&comparison) {
        exit::OK if gaps > 0 && args.tolerance.fail_on != FailOn::Never => exit::NOT_WHOLE,
        code => code,
    })
}

/// A run to compare another one with, read and checked before that one begins.
pub struct Baseline {
    name: String,
    run: Run,
}

impl Baseline {
    /// Reads a baseline by its name or folder. One with missing rows is refused.
    pub fn read(name: &str) -> Result<Baseline, CommandError> {
        let stored = stored(&folder(name)?)?;
        if complain_of_gaps(&stored) > 0 {
            return Err(CommandError::usage(anyhow!(
                "the baseline '{name}' is not a complete run; keep another one with --save-baseline, or compare with \
                 `oomph compare` after the run"
            )));
        }
        Ok(Baseline { name: name.to_owned(), run: in_memory(stored) })
    }

    /// Compares a run with it. Prints to standard error, so that JSON output stays valid.
    pub fn compare(&self, run: &Path, tolerance: &ToleranceOptions) -> CommandResult {
        let comparison = compared(&self.run, &in_memory(stored(run)?), tolerance)?;
        output::complain(&format!("compared with {}:", self.name));
        output::complain(comparison.text(output::medium()).trim_end());
        Ok(tolerance.code(&comparison))
    }
}

/// The folder of a baseline.
pub fn baseline_folder(name: &str) -> Result<PathBuf, CommandError> {
    let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
    if !is_name {
        return Err(CommandError::usage(anyhow!("'{name}' is not a valid baseline name: no slashes, no leading dot")));
    }
    Ok(Path::new("results/local/baselines").join(name))
}

/// The folder of a run, by path or by the name of a baseline.
pub fn folder(text: &str) -> Result<PathBuf, CommandError> {
    let path = text_path(text);
    if path.is_dir() {
        return Ok(path);
    }
    match baseline_folder(text) {
        Ok(saved) if saved.is_dir() => Ok(saved),
        _ => Err(CommandError::usage(anyhow!(
            "'{}' is neither the folder of a run nor a saved baseline",
            path.display()
        ))),
    }
}

fn compared(old: &Run, new: &Run, tolerance: &ToleranceOptions) -> Result<Comparison, CommandError> {
    let ToleranceOptions { noise_threshold, significance, .. } = *tolerance;
    if !(0.0..=1.0).contains(&significance) || noise_threshold.is_nan() || noise_threshold < 0.0 {
        return Err(CommandError::usage(anyhow!(
            "--significance must be from 0 to 1 and --noise-threshold at least 0"
        )));
    }
    compare(old, new, &TimeTolerance { significance, noise_threshold }).map_err(|error| match error {
        CompareError::NothingInCommon { .. } => CommandError::nothing_selected(error),
        CompareError::Clocks { .. } => CommandError::usage(error),
    })
}

/// Reads the folder of a run.
fn stored(folder: &Path) -> Result<StoredRun, CommandError> {
    let run = StoredRun::read(folder).map_err(CommandError::usage)?;
    run.environment.schema_note(folder).iter().for_each(|note| output::complain(note));
    Ok(run)
}

/// Says what is missing in a run, and counts it.
fn complain_of_gaps(run: &StoredRun) -> usize {
    let gaps = run.gaps();
    gaps.iter().for_each(|gap| output::complain(&format!("{}: {gap}", run.path.display())));
    gaps.len()
}

fn in_memory(run: StoredRun) -> Run {
    let StoredRun { path, environment, records, timings, .. } = run;
    // Times of different processors, or different numbers of them, cannot be compared.
    let (processor, device) = (escaped(&environment.machine), escaped(&environment.device_name));
    let machine = format!("{processor}, {} CPUs, {device}", environment.cpus);
    Run { name: path.display().to_string(), machine, records, timings }
}
