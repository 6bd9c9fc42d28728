//! What `run`, `claims` and `techniques` share: the options of a run, the part of it that this
//! process takes, and collecting rows in a folder.

use std::{
    collections::{BTreeSet, HashSet},
    env,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use indicatif::ProgressBar;

use crate::{
    cli::{
        compare::ToleranceOptions,
        environment,
        exit::{self, CommandError, StopPolicy},
        export::ExportOptions,
        options::{DeviceOptions, Format, NeedsOptions, WorkerOptions},
        output, progress,
        source::{listed_strategies, path_argument},
    },
    device::DeviceSpec,
    report::{
        Environment, FolderRecord, OPTIONS_OF_ONE_PROCESS, Partition, PartitionError, Places, PlannedCase,
        RecordFolder, ReportError, RunSettings, html, quoted, without_options,
    },
    suite::{self, CaseFilter, CaseFingerprint, Isolation, SuiteFile, SuiteKind},
};

/// Runs suites case by case: progress while it works, one table at the end, and a folder with the
/// CSVs. Every row is written when its case is done. Ctrl-C finishes the running cases; `--resume`
/// continues.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Suites by name (see `oomph list suites`) or path [default: quick].
    #[arg(value_name = "SUITE", value_parser = path_argument())]
    pub suites: Vec<String>,
    /// Run only cases whose id contains this; with a `*`, the pattern must match the whole id. May
    /// be repeated.
    #[arg(long, short, value_name = "PATTERN")]
    filter: Vec<String>,
    /// Leave out cases whose id contains or matches this; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,
    /// Patterns must equal the whole id.
    #[arg(long)]
    exact: bool,
    /// Print the cases that would run, without running them.
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub device: DeviceOptions,
    /// One seed for all cases, instead of those in the suite.
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub workers: WorkerOptions,
    #[command(flatten)]
    pub needs: NeedsOptions,
    /// Also search the least memory in which each case completes (`needed_bytes`), to 0.2 % of the bound. Takes about seven
    /// more replays of each case. Suites with `need = true` do it without the option.
    #[arg(long)]
    pub need: bool,
    #[command(flatten)]
    pub exports: ExportOptions,
    /// Strategies besides those of the suite, such as tlsf or plugin:./my_allocator.so, on every
    /// workload of it; may be repeated or separated by commas. `all` adds every strategy.
    #[arg(long, short, value_name = "NAME[:PARAMETERS]")]
    strategy: Vec<String>,
    /// How often timed cases are timed, each time in a new process [default: 16].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// How many simulated cases run in parallel [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// The folder for the results [default: results/local/TIME-SUITE].
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Continue an interrupted run: cases in its folder are not run again.
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Run one part of the cases, to share a run among machines: `slice:2/4` takes every fourth
    /// case starting with the second, `hash:2/4` distributes by case id, `slurm` takes the part of
    /// this task of a job array. `oomph report` merges the folders.
    #[arg(long, value_name = "PART", value_parser = parse_partition, conflicts_with_all = ["save_baseline", "baseline"])]
    pub partition: Option<Partition>,
    /// Keep this run under a name, to compare others with.
    #[arg(long, value_name = "NAME")]
    pub save_baseline: Option<String>,
    /// Compare with a kept run or with the folder of a run: exit code 102 if something got worse.
    #[arg(long, value_name = "NAME")]
    pub baseline: Option<String>,
    #[command(flatten)]
    pub tolerance: ToleranceOptions,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// Enough for a slowdown of 5 % on a machine without other work: the spread between processes is then about 1 to 2 %.
pub const DEFAULT_ROUNDS: u32 = 16;

/// The suite that runs where none is named.
pub const DEFAULT_SUITE: &str = "quick";

impl Args {
    pub fn suite_names(&self) -> Vec<String> {
        if self.suites.is_empty() { vec![DEFAULT_SUITE.to_owned()] } else { self.suites.clone() }
    }

    pub fn jobs(&self) -> usize {
        self.jobs.unwrap_or_else(suite::all_cores)
    }

    /// The strategies that are added to those of the suites.
    pub fn added_strategies(&self) -> Result<Vec<String>, CommandError> {
        listed_strategies(&self.strategy)
    }

    /// The rounds of timed cases. Without processes of their own there is one: more of them would not be independent.
    pub fn rounds(&self) -> u32 {
        if self.workers.isolate == Isolation::Never { 1 } else { self.rounds.unwrap_or(DEFAULT_ROUNDS) }
    }

    pub fn filter(&self) -> CaseFilter {
        CaseFilter { only: self.filter.clone(), skip: self.skip.clone(), exact: self.exact }
    }

    /// Whether the least memory of the suite's cases is searched.
    pub fn searches_need(&self, suite: &SuiteFile) -> bool {
        suite.kind == SuiteKind::Run && (self.need || suite.need)
    }

    /// What `env.json` says about the options.
    pub fn settings(&self, suites: &[SuiteFile]) -> Result<RunSettings, CommandError> {
        Ok(RunSettings {
            suites: suites.iter().map(|suite| suite.name.clone()).collect(),
            questions: suites.iter().map(|suite| suite.question.clone()).collect(),
            only: self.filter.clone(),
            skip: self.skip.clone(),
            exact: self.exact,
            limit_bytes: self.device.limit_bytes()?,
            seed: self.seed,
            case_timeout: self.workers.case_timeout.map(|timeout| timeout.to_string()),
            pack: self.needs.pack,
            need: suites.iter().any(|suite| self.searches_need(suite)),
            base: suites.first().map_or_else(String::new, |suite| suite.base.clone()),
        })
    }

    /// The device of a suite that cannot be shared among several.
    pub fn one_device(&self, suite: &SuiteFile) -> Result<DeviceSpec, CommandError> {
        self.device.spec().map_err(|failure| failure.context(&format!("suite '{}'", suite.name)))
    }
}

/// The value of `--partition`; `slurm` is the part of this task of a Slurm job array.
fn parse_partition(text: &str) -> Result<Partition, PartitionError> {
    if text == "slurm" { Partition::of_array_task(|name| env::var(name).ok()) } else { text.parse() }
}

/// The plan of a run, and the cases of it that this process takes: all, or those of its shard.
pub struct RunShare {
    partition: Option<Partition>,
    /// All cases of the run.
    plan: Vec<PlannedCase>,
    own: HashSet<String>,
}

impl RunShare {
    /// All cases, in one process.
    pub fn whole(case_ids: &[String]) -> RunShare {
        RunShare::new(&Args::default(), case_ids)
    }

    /// Distributes the cases of the whole run.
    pub fn new(args: &Args, case_ids: &[String]) -> RunShare {
        let planned =
            |case_id: &str, shard| PlannedCase { case_id: case_id.to_owned(), shard, ..PlannedCase::default() };
        let plan: Vec<PlannedCase> = match args.partition {
            None => case_ids.iter().map(|id| planned(id, None)).collect(),
            Some(partition) => {
                let dealt = partition.deal(case_ids.iter().map(String::as_str));
                dealt.into_iter().map(|(id, shard)| planned(id, Some(shard))).collect()
            }
        };
        let shard = args.partition.map(|partition| partition.shard);
        let own = plan.iter().filter(|case| case.shard == shard).map(|case| case.case_id.clone()).collect();
        RunShare { partition: args.partition, plan, own }
    }

    /// Notes what the cases contain; `fingerprint` is asked once per case.
    pub fn note_contents(&mut self, fingerprint: impl Fn(&str) -> CaseFingerprint) {
        for case in &mut self.plan {
            let CaseFingerprint { settings, source } = fingerprint(&case.case_id);
            (case.settings_fingerprint, case.source_fingerprint) = (settings, source);
        }
    }

    /// All cases of the run.
    pub fn plan(&self) -> &[PlannedCase] {
        &self.plan
    }

    /// Whether the case runs here.
    pub fn has(&self, case_id: &str) -> bool {
        self.own.contains(case_id)
    }

    /// The cases that run here.
    pub fn of(&self, case_ids: Vec<String>) -> Vec<String> {
        case_ids.into_iter().filter(|id| self.has(id)).collect()
    }

    /// The environment with the shard and the settings.
    pub fn in_environment(&self, environment: Environment, settings: RunSettings) -> Environment {
        Environment { shard: self.partition, settings: Some(settings), ..environment }
    }

    /// The folder that the command line names, or a new one whose name has the shard.
    pub fn place(&self, args: &Args) -> Result<PathBuf, CommandError> {
        let part = self.partition.map(|partition| {
            let digits = partition.shards.to_string().len();
            format!("{:0digits$}-of-{}", partition.shard, partition.shards)
        });
        match args.resume.as_ref().or(args.output.as_ref()) {
            Some(place) => Ok(place.clone()),
            None => environment::new_run_folder(&args.suite_names(), part.as_deref()),
        }
    }

    /// The folder for the records of a suite with its own table.
    pub fn result_folder<T: FolderRecord>(
        &self,
        args: &Args,
        device: &DeviceSpec,
        settings: RunSettings,
    ) -> Result<ResultFolder<T>, CommandError> {
        let environment = self.in_environment(environment::describe(device, 0)?, settings);
        let place = self.place(args)?;
        let records = RecordFolder::open(&place, &environment, &self.plan, args.resume.is_some());
        let records = records.map_err(CommandError::usage)?;
        let resume_command = self.resume_command(&place);
        Ok(ResultFolder { place, records, resume_command })
    }

    /// The command that continues this run in a folder.
    pub fn resume_command(&self, place: &Path) -> String {
        let words: Vec<String> = environment::arguments().collect();
        continued(&words, self.partition.as_ref(), place)
    }
}

/// The command line of a run, resuming a folder. A shard is named by its number: `slurm` means
/// another one elsewhere.
fn continued(words: &[String], part: Option<&Partition>, place: &Path) -> String {
    let mut command = vec!["oomph".to_owned()];
    if words.is_empty() {
        command.push("run".to_owned());
    }
    let kept = without_options(words, &OPTIONS_OF_ONE_PROCESS);
    command.extend(kept.into_iter().map(quoted));
    command.extend(part.into_iter().flat_map(|part| ["--partition".to_owned(), part.to_string()]));
    command.extend(["--resume".to_owned(), quoted(&place.to_string_lossy())]);
    command.join(" ")
}

/// A folder of records and the command that resumes it.
pub struct ResultFolder<T> {
    place: PathBuf,
    records: RecordFolder<T>,
    resume_command: String,
}

impl<T: FolderRecord> ResultFolder<T> {
    /// The folder of `oomph COMMAND --output DIR` or `--resume DIR`, for rows with these ids.
    pub fn of_command(
        place: &Path,
        device: &DeviceSpec,
        plan: &[PlannedCase],
        resumes: bool,
    ) -> Result<Self, CommandError> {
        let environment = environment::describe(device, 0)?;
        let records = RecordFolder::open(place, &environment, plan, resumes).map_err(CommandError::usage)?;
        let words: Vec<String> = environment::arguments().collect();
        let resume_command = continued(&words, None, place);
        Ok(ResultFolder { place: place.to_owned(), records, resume_command })
    }
}

/// Collects the records of a test that may take hours: shows progress, writes every record to the
/// folder, and stops when that fails.
pub struct RecordCollector<T> {
    /// The ids of all records, in order.
    ids: Vec<String>,
    folder: Option<ResultFolder<T>>,
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
    written: Result<(), ReportError>,
}

impl<T: FolderRecord> RecordCollector<T> {
    pub fn new(ids: Vec<String>, folder: Option<ResultFolder<T>>) -> Result<RecordCollector<T>, CommandError> {
        let stop = exit::stop_flag(StopPolicy::AfterRunningCases)?;
        let known = |id: &&String| folder.as_ref().is_some_and(|folder| folder.records.has(id));
        let bar = progress::of_cases(ids.len(), ids.iter().filter(known).count());
        Ok(RecordCollector { ids, folder, bar, stop, written: Ok(()) })
    }

    /// The records of earlier parts of the test.
    pub fn earlier(&self) -> &[T] {
        self.folder.as_ref().map_or(&[], |folder| folder.records.rows())
    }

    /// The flag that ends the test.
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// The ids of records that are not yet in the folder.
    pub fn wanted(&self) -> BTreeSet<String> {
        let is_known = |id: &str| self.folder.as_ref().is_some_and(|folder| folder.records.has(id));
        self.ids.iter().filter(|id| !is_known(id)).cloned().collect()
    }

    pub fn add(&mut self, record: &T) {
        self.bar.set_message(record.id());
        self.bar.inc(1);
        if let (Some(folder), Ok(())) = (&mut self.folder, &self.written) {
            self.written = folder.records.append(record);
            // Results that cannot be written are not worth waiting for.
            if self.written.is_err() {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
    }

    /// All records in order, those of earlier parts of the test included, and the exit code.
    /// `print` is called before the place of the results is printed.
    pub fn finish(
        self,
        mut records: Vec<T>,
        format: Format,
        print: impl FnOnce(&[T]) -> Result<(), CommandError>,
    ) -> Result<u8, CommandError> {
        self.bar.finish_and_clear();
        self.written?;
        let places = Places::of(self.ids.iter().map(String::as_str));
        records.sort_by_cached_key(|record| places.get(&record.id()));
        let mut hint = String::new();
        let mut place = None;
        if let Some(folder) = self.folder {
            records = folder.records.finish(&self.ids)?;
            hint = format!("; continue with: {}", folder.resume_command);
            place = Some(folder.place);
        }
        print(&records)?;
        if let Some(place) = place {
            let page = write_page(&place)?;
            print_place(&place, &page, format)?;
        }
        if records.len() >= self.ids.len() || !self.stop.load(Ordering::Relaxed) {
            let failed = records.iter().filter_map(|record| Some((record.id(), record.failure()?.to_owned())));
            return Ok(output::complain_of(failed));
        }
        output::complain(&format!("interrupted after {} of {} rows{hint}", records.len(), self.ids.len()));
        Ok(exit::INTERRUPTED)
    }
}

/// Writes the page of a run into its folder.
pub fn write_page(folder: &Path) -> Result<PathBuf, CommandError> {
    let place = folder.join("report.html");
    html::write_page(&[html::PageRun::of_folder(folder)?], &[], &place)?;
    Ok(place)
}

/// Says where results and page are, below a table.
pub fn print_place(place: &Path, page: &Path, format: Format) -> Result<(), CommandError> {
    if format == Format::Table {
        output::say(&format!("\nresults: {}\nreport:  {}", place.display(), page.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resumed_run_keeps_its_options() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let part: Partition = "slice:2/4".parse().unwrap();
        let asked = words("run quick --filter a* --partition slurm --card 8GiB -o out");
        assert_eq!(
            continued(&asked, Some(&part), Path::new("out")),
            "oomph run quick --filter 'a*' --card 8GiB --partition slice:2/4 --resume out"
        );
        assert_eq!(continued(&[], None, Path::new("new run")), "oomph run --resume 'new run'");
    }
}
