//! `oomph verify --on DEVICE`: does this device agree with the simulated one?

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::anyhow;
use clap::Args;

use super::{
    exit::{self, CommandError, CommandResult, StopPolicy},
    options::DeviceChoice,
    output,
    progress::{self, OneOf},
    run::note_absent_files,
    source::{DEFAULT_STRATEGIES, strategies_without_plugins},
    verify,
};
use crate::{
    base::{NoProgress, parallel_map, path_text},
    device::{DeviceProps, DeviceSpec},
    measure::{AgreementRecord, CaseLabel, agreement::AgreementFinding},
    replay::verify::Companion,
    strategy::StrategySpec,
    suite::{self, Case, CaseFilter, CaseSettings, SourceSpec, SuiteFile},
    trace::Source,
};

const HEADING: &str = "Comparing devices";

/// The options of `--on`.
#[derive(Debug, Args)]
pub struct OnOptions {
    /// Compare this device with the simulated one: `cuda[:N]`, or `sim` for a self-test.
    #[arg(long = "on", id = "on", value_name = "DEVICE", help_heading = HEADING)]
    pub device: Option<String>,
    /// A strategy with its parameters; may be repeated. For `async`, only peaks can be compared.
    #[arg(long, short, value_name = "NAME[:PARAMETERS]", requires = "on", help_heading = HEADING,
        default_values = DEFAULT_STRATEGIES)]
    pub strategy: Vec<String>,
    /// Every workload of this suite with its limits and seeds; may be repeated; `all` is every
    /// suite.
    #[arg(long, value_name = "SUITE", requires = "on", help_heading = HEADING)]
    pub suite: Vec<String>,
    /// Run only cases whose id contains this; with a `*`, the pattern must match the whole id. May
    /// be repeated.
    #[arg(long, short, value_name = "PATTERN", requires = "on", help_heading = HEADING)]
    pub filter: Vec<String>,
}

/// One source and its cases. It is read when its turn comes: recordings are verified first, which
/// takes a while.
struct ComparedSource {
    source: SourceSpec,
    cases: Vec<(CaseLabel, StrategySpec)>,
}

/// The devices that are compared.
struct ComparedDevices {
    real: DeviceSpec,
    simulated: DeviceSpec,
}

pub fn run(args: &verify::Args) -> CommandResult {
    let devices = devices(args)?;
    let subjects = subjects(args, &devices)?;
    let total = subjects.iter().map(|subject| subject.cases.len()).sum();
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    let (readable, records): (Vec<bool>, Vec<AgreementRecord>) =
        compare_all(&subjects, &devices, total, &stop).into_iter().unzip();
    args.format.print(&records)?;
    if records.len() < total {
        output::complain(&format!("interrupted after {} of {total} cases", records.len()));
        return Ok(exit::INTERRUPTED);
    }
    let any = |finding| records.iter().any(|record| record.finding == finding);
    Ok(if any(AgreementFinding::Differs) {
        exit::NOT_EXACT
    } else if readable.contains(&false) {
        exit::USAGE
    } else if any(AgreementFinding::Failed) {
        exit::CASES_FAILED
    } else {
        exit::OK
    })
}

fn devices(args: &verify::Args) -> Result<ComparedDevices, CommandError> {
    let Some(name) = &args.on.device else { return Err(CommandError::usage(anyhow!("--on DEVICE is missing"))) };
    let choice = &args.device.choice;
    let simulated: DeviceSpec = choice.device.parse().map_err(CommandError::usage)?;
    if !simulated.is_simulated() {
        return Err(CommandError::usage(anyhow!(
            "--device {simulated}: with --on it names the simulated side of the comparison"
        )));
    }
    let simulated = choice.spec()?;
    let real = DeviceChoice::named(name).spec()?;
    // By default a simulated device is compared with itself.
    let is_default = choice.device == DeviceChoice::DEFAULT && choice.card.is_none();
    let simulated = if real.is_simulated() && is_default { real.clone() } else { simulated };
    Ok(ComparedDevices { real, simulated })
}

/// The cases that pass the filters.
fn subjects(args: &verify::Args, devices: &ComparedDevices) -> Result<Vec<ComparedSource>, CommandError> {
    let props = devices.real.open()?.props().clone();
    let reason = "a plugin calls the driver itself, so its calls cannot be compared";
    let strategies = strategies_without_plugins(&args.on.strategy, reason)?;
    let filter = CaseFilter { only: args.on.filter.clone(), ..CaseFilter::default() };
    let named = args.sources.iter().map(|path| named(args, path, devices, &props));
    let mut sources = named.collect::<Result<Vec<_>, _>>()?;
    sources.extend(of_suites(args, devices)?);
    let mut subjects = Vec::new();
    for (source, label) in sources {
        let labelled = |strategy: &StrategySpec| CaseLabel { strategy: strategy.to_string(), ..label.clone() };
        let cases = strategies.iter().map(|strategy| (labelled(strategy), strategy.clone()));
        let cases: Vec<_> = cases.filter(|(label, _)| filter.takes(&label.case_id())).collect();
        if !cases.is_empty() {
            subjects.push(ComparedSource { source, cases });
        }
    }
    if subjects.is_empty() {
        return Err(CommandError::nothing_selected(anyhow!("no case passes the filters")));
    }
    Ok(subjects)
}

/// A source as typed. A wrong name is an error before anything runs.
fn named(
    args: &verify::Args,
    path: &Path,
    devices: &ComparedDevices,
    props: &DeviceProps,
) -> Result<(SourceSpec, CaseLabel), CommandError> {
    let spec = SourceSpec {
        name: path_text(path),
        set: Vec::new(),
        seed: 1,
        device_index: args.device_index,
        given: args.given.facts().map_err(CommandError::usage)?,
    };
    let (workload, companion) = match spec.recipe().map_err(CommandError::usage)? {
        Some(_) => {
            let source = spec.open(&NoProgress).map_err(CommandError::usage)?;
            (source.name().to_owned(), Companion::default())
        }
        None => {
            let companion = Companion::beside(path).map_err(CommandError::usage)?.unwrap_or_default();
            (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), companion)
        }
    };
    let label = CaseLabel {
        suite: "verify".to_owned(),
        workload,
        device: devices.real.to_string(),
        limit: args.limit(&companion, args.device_index).and_then(|limit| limit.resolve(props.total_bytes)),
        seed: 1,
        repeat: 1,
        ..CaseLabel::default()
    };
    Ok((spec, label))
}

/// The workloads of the suites, once per limit and seed.
fn of_suites(args: &verify::Args, devices: &ComparedDevices) -> Result<Vec<(SourceSpec, CaseLabel)>, CommandError> {
    let every_suite = || SuiteFile::embedded().map(str::to_owned).collect();
    let names: Vec<String> =
        if args.on.suite.iter().any(|name| name == "all") { every_suite() } else { args.on.suite.clone() };
    let settings = CaseSettings { device: devices.real.clone(), limit: args.device.limit, seed: None, timeout: None };
    let mut found: Vec<(SourceSpec, CaseLabel)> = Vec::new();
    for name in &names {
        let suite = SuiteFile::load(name).map_err(CommandError::usage)?;
        note_absent_files(&suite);
        for case in suite.cases(&settings).map_err(CommandError::usage)? {
            let key = |label: &CaseLabel| (label.workload.clone(), label.limit, label.seed, label.repeat);
            if found.iter().all(|(_, known)| key(known) != key(&case.label)) {
                found.push((case.origin, case.label));
            }
        }
    }
    Ok(found)
}

/// Runs all cases, and says which sources could be read: in parallel on a simulated device; one at
/// a time on a real one, while the next sources are read.
fn compare_all(
    subjects: &[ComparedSource],
    devices: &ComparedDevices,
    total: usize,
    stop: &AtomicBool,
) -> Vec<(bool, AgreementRecord)> {
    let bar = progress::of_cases(total, 0);
    let turn = Mutex::new(());
    let compare = |source: &Result<Arc<dyn Source>, CommandError>, (label, strategy): &(CaseLabel, StrategySpec)| {
        let _turn = (!devices.real.is_simulated()).then(|| turn.lock());
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        bar.set_message(label.case_id());
        let record = match source {
            Ok(source) => {
                let case = Case::new(label.clone(), Arc::clone(source), strategy.clone(), devices.real.clone());
                suite::compare(&case, &devices.simulated, stop)
            }
            Err(failure) => {
                let simulated = devices.simulated.to_string();
                AgreementRecord::unmeasured(label, &simulated, AgreementFinding::Failed, &failure.to_string())
            }
        };
        bar.inc(1);
        (record.finding != AgreementFinding::Interrupted).then(|| (source.is_ok(), record))
    };
    let done = parallel_map(subjects, suite::all_cores(), |subject| {
        if stop.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let watcher = OneOf::of(&subject.source.name, &bar);
        let source = subject.source.open(&watcher).map(Arc::from).map_err(CommandError::usage);
        subject.cases.iter().filter_map(|case| compare(&source, case)).collect()
    });
    bar.finish_and_clear();
    done.into_iter().flatten().collect()
}
