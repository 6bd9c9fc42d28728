//! What all kinds of stress have in common: their options, and what becomes of their verdicts.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::evidence;
use crate::{
    base::{Bytes, MIB, parallel_map},
    cli::{
        environment, exit,
        failure::{Failure, Outcome},
        interrupt,
        options::{DeviceOptions, Format},
        output,
        progress::{self, Stages},
    },
    plugin,
    report::VerdictMatrix,
    strategy::{STRATEGIES, StrategyEntry, StrategySpec},
    stress::{Subject, Verdict, VerdictRow},
    suite,
    trace::{self, ProgressSource, Trace},
};

/// Strategies that own no memory, or only stand for another.
const LEFT_OUT: [&str; 2] = ["null", "address"];

/// Every strategy that can be put under stress.
pub fn owners_of_memory() -> impl Iterator<Item = &'static StrategyEntry> {
    STRATEGIES.iter().filter(|entry| !LEFT_OUT.contains(&entry.name))
}

/// Who is put under stress, where, and what becomes of failures.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// A strategy with its parameters, such as caching:expandable_segments:True, or an allocator of your own by its file,
    /// plugin:./my_allocator.so; may be repeated [default: every strategy that owns memory].
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    pub strategy: Vec<String>,
    /// Also every parameter set worth testing of the strategies that run by default.
    #[arg(long, conflicts_with = "strategy")]
    pub all_variants: bool,
    /// Where to run: `sim` (an H200), `sim:SIZE`, `sim:PROFILE`, `cuda[:N]` or `auto`.
    #[arg(long, value_name = "DEVICE", default_value = Common::DEVICE)]
    pub device: String,
    /// Seed of everything random: the same seed, the same programs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Physical memory that a strategy may hold.
    #[arg(long, value_name = "SIZE", default_value_t = Common::MEMORY)]
    pub memory: Bytes,
    /// Play this trace instead of made-up programs.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Where failing traces go.
    #[arg(long, value_name = "DIR", default_value = Common::SAVE)]
    pub save: PathBuf,
    /// How the verdicts are printed.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

impl Common {
    /// Where it runs if nobody says.
    pub const DEVICE: &'static str = "sim";
    /// How much memory there is if nobody says: little, so that it runs out.
    pub const MEMORY: Bytes = Bytes(256 * MIB);
    /// Where failing traces go if nobody says.
    pub const SAVE: &'static str = "stress-failures";

    /// Everybody who is to be put under stress.
    pub fn subjects(&self) -> Result<Vec<Subject>, Failure> {
        let device = DeviceOptions { device: self.device.clone(), limit: None }.spec()?;
        let subject = |strategy| Subject { strategy, device: device.clone(), memory_bytes: Some(self.memory.0) };
        Ok(self.strategies()?.into_iter().map(subject).collect())
    }

    /// The trace to be played, if there is one.
    pub fn trace(&self) -> Result<Option<Trace>, Failure> {
        let Some(path) = &self.trace else { return Ok(None) };
        let stages = Stages::of(&path.to_string_lossy());
        let progress = &stages;
        let source = trace::open(path, progress).map_err(Failure::usage)?;
        let trace = Trace::read(&ProgressSource::stage(source, progress, "reading it", 1)).map_err(Failure::usage)?;
        trace::check(&ProgressSource::stage(&trace, progress, "looking through it", 1)).map_err(Failure::usage)?;
        Ok(Some(trace))
    }

    /// Judges every subject and concludes.
    pub fn judge(&self, judge: impl Fn(&Subject, &AtomicBool) -> Verdict + Sync) -> Outcome {
        let (verdicts, stop) = self.verdicts(judge)?;
        self.conclude(&verdicts, &stop)
    }

    /// Judges every subject, side by side where the device is of our making. `judge` should come to an end soon after the
    /// flag that it is given is set.
    pub fn verdicts(
        &self,
        judge: impl Fn(&Subject, &AtomicBool) -> Verdict + Sync,
    ) -> Result<(Vec<Verdict>, Arc<AtomicBool>), Failure> {
        let subjects = self.subjects()?;
        let stop = interrupt::flag(interrupt::Running::Replay)?;
        let bar = progress::of_cases(subjects.len(), 0);
        let verdicts = parallel_map(&subjects, Common::jobs(&subjects), |subject| {
            bar.set_message(subject.strategy.to_string());
            let verdict = judge(subject, &stop);
            bar.inc(1);
            verdict
        });
        bar.finish_and_clear();
        Ok((verdicts, stop))
    }

    /// How many subjects can run at once: a real device has only one of everything.
    pub fn jobs(subjects: &[Subject]) -> usize {
        let simulated = subjects.iter().all(|subject| subject.device.is_simulated());
        if simulated { suite::all_cores() } else { 1 }
    }

    /// Saves what broke, prints the verdicts, and says how the program ends.
    pub fn conclude(&self, verdicts: &[Verdict], stop: &AtomicBool) -> Outcome {
        self.format.print(&self.rows(verdicts)?)?;
        Ok(exit_code(verdicts, stop))
    }

    /// Like `conclude`, as a matrix of strategies and kinds.
    pub fn conclude_as_matrix(&self, verdicts: &[Verdict], stop: &AtomicBool) -> Outcome {
        self.format.print(&VerdictMatrix(&self.rows(verdicts)?))?;
        Ok(exit_code(verdicts, stop))
    }

    fn rows(&self, verdicts: &[Verdict]) -> Result<Vec<VerdictRow>, Failure> {
        let mut rows: Vec<VerdictRow> = Vec::new();
        for verdict in verdicts {
            let evidence: Result<Vec<_>, _> =
                verdict.failures.iter().map(|failure| evidence::of(failure, self)).collect();
            rows.extend(verdict.rows(&evidence?));
        }
        Ok(rows)
    }

    /// The same for a kind that has printed a table of its own: only what broke is still to be told.
    pub fn complain_of(&self, verdicts: &[Verdict], stop: &AtomicBool) -> Outcome {
        for failure in verdicts.iter().flat_map(|verdict| &verdict.failures) {
            output::complain(&format!("failed: {failure}\n  again: {}", evidence::of(failure, self)?.repeat));
        }
        Ok(exit_code(verdicts, stop))
    }

    fn strategies(&self) -> Result<Vec<StrategySpec>, Failure> {
        if self.strategy.is_empty() {
            let entries = owners_of_memory();
            let how_many = if self.all_variants { usize::MAX } else { 1 };
            return Ok(entries.flat_map(|entry| entry.specs().take(how_many)).collect());
        }
        let mut strategies = Vec::new();
        for text in &self.strategy {
            let (strategy, note) = environment::resolve_settings(StrategySpec::from(text.as_str()));
            plugin::check(&strategy).map_err(Failure::usage)?;
            if let Some(note) = note {
                output::complain(&note);
            }
            strategies.push(strategy);
        }
        Ok(strategies)
    }
}

fn exit_code(verdicts: &[Verdict], stop: &AtomicBool) -> u8 {
    let failed = verdicts.iter().any(|verdict| !verdict.failures.is_empty());
    match (failed, stop.load(Ordering::Relaxed)) {
        (true, _) => exit::STRESS_FAILED,
        (false, true) => exit::INTERRUPTED,
        (false, false) => exit::OK,
    }
}

impl Default for Common {
    fn default() -> Common {
        Common {
            strategy: Vec::new(),
            all_variants: false,
            device: Common::DEVICE.to_owned(),
            seed: 1,
            memory: Common::MEMORY,
            trace: None,
            save: Common::SAVE.into(),
            format: Format::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stress::properties::{Programs, properties};

    #[test]
    fn by_default_all_strategies_that_own_memory_are_put_under_stress() {
        let subjects = Common::default().subjects().unwrap();
        assert_eq!(subjects.len(), STRATEGIES.len() - LEFT_OUT.len());
        let all = Common { all_variants: true, ..Common::default() }.subjects().unwrap();
        assert!(all.len() > subjects.len());
        assert!(all.iter().all(|subject| subject.memory_bytes == Some(256 * MIB)));
    }

    #[test]
    fn what_broke_is_saved_and_ends_with_its_own_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        let common = Common { save: folder.path().to_owned(), format: Format::Csv, ..Common::default() };
        let subject = Subject {
            strategy: StrategySpec::from("flawed:RoundsDown"),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(common.memory.0),
        };
        let verdict = properties(&subject, &Programs { first: 0, count: 9, seed: 1 }, &|| false);
        let stop = AtomicBool::new(false);
        assert_eq!(common.conclude(&[verdict], &stop).unwrap(), exit::STRESS_FAILED);
        assert!(folder.path().join("properties-flawed_RoundsDown.oomph").exists());
        let fine = Verdict::new("properties", "caching");
        assert_eq!(common.conclude(std::slice::from_ref(&fine), &stop).unwrap(), exit::OK);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(common.conclude(&[fine], &stop).unwrap(), exit::INTERRUPTED);
    }

    #[test]
    fn a_strategy_that_is_none_is_refused() {
        let common = Common { strategy: vec!["cachin".to_owned()], ..Common::default() };
        assert!(common.subjects().unwrap_err().to_string().contains("did you mean 'caching'"));
    }
}
