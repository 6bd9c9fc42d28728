//! `oomph rehearse`: a user's own program on a GPU that computes nothing. Beyond peaks, its recording shows what holds memory
//! and the allocator settings to use.

use std::{
    cmp::Reverse,
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};

use super::{
    advise, environment,
    exit::{self, CommandError, CommandResult, StopPolicy},
    export::{self, JsonExport, PageExport},
    options::{DeviceChoice, Format},
    output,
    progress::Stages,
};
use crate::{
    answer::{
        advise::Advice,
        holders::{GroupBy, HeldMemory, lack_sites, requesters},
    },
    base::{Bytes, FileText, MemoryLimit, path_text},
    device::Card,
    rehearse::{
        SUPPORTED,
        cache::{CacheError, RehearsalCache},
        facts::{EventKind, ProgramEvent},
        program::{ProgramCommand, ProgramOutcome, RehearsalError, ShadowDevice, remove_empty},
        record::{RehearsalRecord, RehearsalVerdict},
        search::{SearchError, SearchedValue, divided, with_variant},
        world::{World, WorldError, launcher},
    },
    report::{MemoryHolders, RehearsalReport, html},
    suite::{CaseTimeout, SourceSpec},
    trace,
};

/// Runs your own PyTorch program without a GPU and answers whether it fits on a card.
///
/// The program runs unchanged in its own Python, with its own PyTorch: only the GPU's kernels are not run. So PyTorch
/// allocates as it would on the card, and the recording that is written is PyTorch's own. Nothing is estimated.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The card: a size such as 24GiB (otherwise it is an H200), or a name such as rtx4090; several are separated by commas, and
    /// the program runs once on each.
    #[arg(long, value_name = "SIZE|NAME,..", value_delimiter = ',', default_value = "h200")]
    card: Vec<Card>,
    /// What the process may take: a size such as 20GiB, or a fraction of the card, as in PyTorch's
    /// set_per_process_memory_fraction.
    #[arg(long, value_name = "SIZE|FRACTION")]
    limit: Option<MemoryLimit>,
    /// End the program after N steps of its optimizer: memory repeats after a few [default: its own end].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// End the program after this time, such as 90s or 5m: one that waits for a value that is never computed does not end.
    #[arg(long, value_name = "TIME")]
    timeout: Option<CaseTimeout>,
    /// How many GPUs the program sees; a launcher such as torchrun gets one for each of its processes [default: 1; with
    /// --ranks, 8 per node].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    gpus: Option<u32>,
    /// Start the command once for each rank of a world of N, all on this machine, as torchrun would on nodes with --gpus GPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// Start only these ranks of --ranks, such as 0,5; they run as if the others had the same data.
    #[arg(long, value_name = "R,..", value_delimiter = ',', requires = "ranks")]
    rank: Vec<u32>,
    /// The share of elements that are not zero, where the program asks the GPU for such a count [default: 0.5].
    #[arg(long, value_name = "SHARE", value_parser = share)]
    nonzero: Option<f64>,
    /// Find the largest value of {NAME} in the command that fits, such as batch=1..256.
    #[arg(long, value_name = "NAME=LO..HI")]
    largest: Option<SearchedValue>,
    /// Compare the command with itself plus these words, at its end or in the place of {try}; may be repeated.
    #[arg(long = "try", value_name = "WORDS", allow_hyphen_values = true)]
    variants: Vec<String>,
    /// The folder for recordings [default: a new one in results/local].
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json]))]
    format: Format,
    #[command(flatten)]
    export: JsonExport,
    #[command(flatten)]
    page: PageExport,
    /// Only the answer on standard output: what the program prints there goes to standard error. With `--format json`
    /// always.
    #[arg(long)]
    answer_only: bool,
    /// Write the libraries for the PyTorch in this folder and print their paths; used inside a rehearsed program.
    #[arg(long, value_name = "DIR", hide = true)]
    prepare: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, value_name = "COMMAND", required_unless_present = "prepare")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  oomph rehearse -- python train.py                              does it fit on an H200?
  oomph rehearse --card 24GiB --steps 5 -- python train.py       on a card with 24 GiB, five steps
  oomph rehearse --card rtx4090,a100-40g,h100 -- python train.py
  oomph rehearse --card 24GiB --largest batch=1..256 -- python train.py --batch {batch}
  oomph rehearse --try --checkpoint --try \"--bf16 --fused\" -- python train.py
  oomph rehearse --ranks 8 -- python train.py                    eight ranks, as torchrun would start them
  oomph rehearse --ranks 64 --rank 0,63 -- python train.py       two ranks of a world of 64
  oomph rehearse --gpus 8 -- torchrun --nproc-per-node 8 train.py

And then, with the recording that it names:
  oomph advise results/local/.../rank-0.pickle       the allocator settings to use
  oomph inspect results/local/.../rank-0.pickle --by site --at peak

Values that the program reads back from the GPU are not computed; the answer names the lines that do so. The exit code is 0
if the program fits, 108 if it does not fit on at least one card, otherwise the program's own.";

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a number from 0 to 1".to_owned())
}

pub fn run(args: &Args) -> CommandResult {
    if !SUPPORTED {
        return Err(CommandError::device(anyhow!(
            "rehearsals need Linux on x86-64: the libraries that stand in for NVIDIA's are written for it; record the \
             program on its GPU instead (`oomph record`)"
        )));
    }
    let user_cache = environment::cache_folder();
    let user_cache = user_cache
        .ok_or_else(|| CommandError::usage(anyhow!("no folder for the cache: set XDG_CACHE_HOME or HOME")))?;
    let cache = RehearsalCache::inside(&user_cache);
    if let Some(torch) = &args.prepare {
        return prepare(&cache, torch);
    }
    if let Some(searched) = args.largest.as_ref().filter(|searched| !searched.is_in(&args.command)) {
        return Err(CommandError::usage(SearchError::Unused(searched.name.clone())));
    }
    args.export.check()?;
    args.page.check()?;
    let world = world(args)?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    let mut folder = OutputFolder::new(args.output.as_deref())?;
    let (python, oomph) = (cache.python()?, env::current_exe()?);
    let outcome = Rehearsals { args, world, python, oomph, stop: &stop, failed_code: None }.answer(&mut folder);
    folder.finish();
    let (report, code) = outcome?;
    args.export.print(&report, args.format)?;
    args.page.write(|| page(args, &report))?;
    Ok(code)
}

/// The answer as a page. The record that is explained has the recording.
fn page(args: &Args, report: &RehearsalReport) -> Result<String, CommandError> {
    let explained = report.explained();
    let card = explained.and_then(|record| args.card.iter().find(|card| card.to_string() == record.card));
    let device = DeviceChoice { card: card.cloned(), ..DeviceChoice::default() }.spec()?;
    let held = explained.and_then(|record| record.largest_recording.as_deref()).and_then(held_in);
    let words: Vec<String> = args.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let run = export::page_run(&format!("rehearse {}", words.join(" ")), &device, 1, Vec::new())?;
    let run = export::on_cards(run, &args.card);
    Ok(html::rehearsal_page(report, held.as_ref(), &export::cards_for_programs(&args.card), run)?)
}

/// What the program of a recording held. A recording that cannot be read has been reported before.
fn held_in(recording: &str) -> Option<HeldMemory> {
    let spec = SourceSpec { name: recording.to_owned(), seed: 1, ..SourceSpec::default() };
    let (recording, _) = spec.verified_recording(&Stages::of(recording)).ok().flatten()?;
    HeldMemory::of_recording(&recording)
}

/// The ranks to be started, where the user asks for some.
fn world(args: &Args) -> Result<Option<World>, CommandError> {
    let Some(size) = args.ranks else { return Ok(None) };
    if let Some(name) = launcher(&args.command) {
        return Err(CommandError::usage(WorldError::Launcher(name)));
    }
    World::new(size, &args.rank, args.gpus).map(Some).map_err(CommandError::usage)
}

/// The hidden part: run by the injected module when the program imports PyTorch.
fn prepare(cache: &RehearsalCache, torch: &Path) -> CommandResult {
    let files = cache.libraries(torch).map_err(|error| match error {
        error @ CacheError::Needs(_) => CommandError::usage(error),
        error => error.into(),
    })?;
    output::say_data(&files.iter().map(|file| format!("{}\n", file.display())).collect::<String>())?;
    Ok(exit::OK)
}

/// All runs of one question.
struct Rehearsals<'a> {
    args: &'a Args,
    world: Option<World>,
    python: PathBuf,
    oomph: PathBuf,
    stop: &'a AtomicBool,
    /// The exit code of the first run that failed by itself.
    failed_code: Option<u8>,
}

impl Rehearsals<'_> {
    /// The answer and the exit code.
    fn answer(&mut self, folder: &mut OutputFolder) -> Result<(RehearsalReport, u8), CommandError> {
        let args = self.args;
        let variants = match &*args.variants {
            [] => vec![None],
            words => [""].into_iter().chain(words.iter().map(String::as_str)).map(Some).collect(),
        };
        let many = args.card.len() * variants.len() > 1;
        let mut records = Vec::new();
        for (number, variant) in variants.iter().enumerate() {
            let extra = divided(variant.unwrap_or_default()).map_err(CommandError::usage)?;
            let words = with_variant(&args.command, &extra);
            for card in &args.card {
                if self.is_interrupted(&records) {
                    break;
                }
                let name = match variant {
                    Some(_) => format!("{card}-{number}"),
                    None => card.to_string(),
                };
                let place = if many { folder.path.join(name.replace('/', "_")) } else { folder.path.clone() };
                let record = self.on_card(card, &words, &place, folder)?;
                records.push(RehearsalRecord { variant: variant.map(str::to_owned), ..record });
            }
        }
        let mut report = RehearsalReport {
            records,
            folder: path_text(&folder.path),
            searched: args.largest.clone(),
            ..RehearsalReport::default()
        };
        explain(&mut report, &args.card, self.stop);
        let code = self.exit_code(&report.records);
        Ok((report, code))
    }

    fn is_interrupted(&self, records: &[RehearsalRecord]) -> bool {
        self.stop.load(Ordering::Relaxed)
            || records.last().is_some_and(|last| last.verdict == RehearsalVerdict::Interrupted)
    }

    fn exit_code(&self, records: &[RehearsalRecord]) -> u8 {
        let any = |verdict| records.iter().any(|record| record.verdict == verdict);
        if any(RehearsalVerdict::Interrupted) {
            exit::INTERRUPTED
        } else if any(RehearsalVerdict::DoesNotFit) {
            exit::DOES_NOT_FIT
        } else if any(RehearsalVerdict::TimedOut) {
            exit::CASES_FAILED
        } else {
            self.failed_code.unwrap_or(exit::OK)
        }
    }

    /// One card: one run, or as many as the search needs. Only the files of the run in the answer are kept.
    fn on_card(
        &mut self,
        card: &Card,
        words: &[OsString],
        place: &Path,
        folder: &mut OutputFolder,
    ) -> Result<RehearsalRecord, CommandError> {
        let Some(searched) = &self.args.largest else { return self.once(card, words, place, folder) };
        let mut best: Option<RehearsalRecord> = None;
        let mut worst: Option<RehearsalRecord> = None;
        let found = searched.largest(|value| -> Result<bool, Option<CommandError>> {
            let trial = trial_folder(searched, place, value);
            let record = self.once(card, &searched.set(words, value), &trial, folder).map_err(Some)?;
            output::complain(&format!("{}={value} on {card}: {}", searched.name, short_verdict(&record)));
            let record = RehearsalRecord { value: Some(value), ..record };
            match record.verdict {
                RehearsalVerdict::Fits => {
                    remove_run(searched, place, best.replace(record));
                    Ok(true)
                }
                RehearsalVerdict::DoesNotFit => {
                    remove_run(searched, place, worst.replace(record));
                    Ok(false)
                }
                _ => {
                    worst = Some(record);
                    Err(None)
                }
            }
        });
        match found {
            Err(Some(error)) => return Err(error),
            Err(None) => return worst.ok_or_else(|| anyhow!("a run without a result").into()),
            Ok(_) => {}
        }
        if best.is_some() {
            remove_run(searched, place, worst.take());
        }
        best.or(worst).ok_or_else(|| anyhow!("a search without a run").into())
    }

    fn once(
        &mut self,
        card: &Card,
        words: &[OsString],
        place: &Path,
        folder: &mut OutputFolder,
    ) -> Result<RehearsalRecord, CommandError> {
        folder.create(place)?;
        let args = self.args;
        let limit_bytes = args.limit.and_then(|limit| limit.resolve(card.total_bytes()));
        let gpus = self.world.as_ref().map_or(args.gpus.unwrap_or(1), World::gpus_per_node);
        let command = ProgramCommand {
            words: words.to_vec(),
            device: ShadowDevice::of(card, gpus, args.nonzero),
            limit_bytes,
            steps: args.steps,
            timeout: args.timeout.map(CaseTimeout::duration),
            // The program may change its working folder.
            folder: std::path::absolute(place)?,
            python: self.python.clone(),
            oomph: self.oomph.clone(),
            world: self.world.clone(),
            keeps_stdout: args.format == Format::Table && !args.answer_only,
        };
        let first_rank = self.world.as_ref().and_then(|world| world.started().first().copied()).unwrap_or(0);
        let mut ticker = Ticker::new(&card.to_string(), first_rank);
        let outcome = command.run(self.stop, &mut |event| ticker.show(event)).map_err(|error| match error {
            error @ RehearsalError::Io { .. } => CommandError::from(error),
            error => CommandError::usage(error),
        })?;
        if outcome.ended_by.is_none() {
            show_log(&outcome);
        }
        let record = RehearsalRecord::of(card, limit_bytes, &outcome, place);
        if record.verdict == RehearsalVerdict::Failed {
            self.failed_code.get_or_insert(outcome.shell_code());
        }
        Ok(record)
    }
}

/// The output of the rank that failed, where it was not passed through.
fn show_log(outcome: &ProgramOutcome) {
    let Some(failure) = &outcome.failure else { return };
    let (Some(rank), Some(path)) = (failure.rank, &failure.log) else { return };
    let text = fs::read(path).unwrap_or_default();
    let shown = String::from_utf8_lossy(&text[text.len().saturating_sub(SHOWN_LOG_BYTES)..]).into_owned();
    output::complain(&format!("rank {rank} wrote (all of it is in {}):\n{}", path.display(), shown.trim_end()));
}

/// How much of the output of a failed rank is shown: its end.
const SHOWN_LOG_BYTES: usize = 16 << 10;

fn short_verdict(record: &RehearsalRecord) -> String {
    match (record.verdict, record.peak_reserved_bytes) {
        (RehearsalVerdict::Fits, Some(reserved)) => format!("fits, {} reserved", Bytes(reserved)),
        (RehearsalVerdict::Fits, None) => "fits".to_owned(),
        (RehearsalVerdict::DoesNotFit, _) => "does not fit".to_owned(),
        _ => format!("the program {}", record.failure.as_deref().unwrap_or("failed")),
    }
}

/// Deletes the folder of a run that is not in the answer; it was made for this run alone.
fn remove_run(searched: &SearchedValue, place: &Path, record: Option<RehearsalRecord>) {
    if let Some(value) = record.and_then(|record| record.value) {
        let _ = fs::remove_dir_all(trial_folder(searched, place, value));
    }
}

fn trial_folder(searched: &SearchedValue, place: &Path, value: u64) -> PathBuf {
    place.join(format!("{}-{value}", searched.name))
}

/// Lines on standard error while the program runs. They come rarer the longer it takes: the program's own output is between
/// them.
struct Ticker {
    card: String,
    /// The rank whose steps are shown.
    rank: u32,
    began: Instant,
    next: Duration,
}

const FIRST_LINE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

impl Ticker {
    fn new(card: &str, rank: u32) -> Ticker {
        Ticker { card: card.to_owned(), rank, began: Instant::now(), next: FIRST_LINE }
    }

    fn show(&mut self, event: &ProgramEvent) {
        let elapsed = self.began.elapsed();
        if event.event != EventKind::Step || event.rank != self.rank || elapsed < self.next {
            return;
        }
        self.next = elapsed + elapsed.min(LONGEST_PAUSE);
        output::complain(&format!(
            "rehearsal on {}: step {}, {} allocated, {} reserved, {:.0} s",
            self.card,
            event.step,
            Bytes(event.allocated),
            Bytes(event.reserved),
            elapsed.as_secs_f64()
        ));
    }
}

/// The folder of the recordings, and which folders were made for it: those that stay empty are removed.
struct OutputFolder {
    path: PathBuf,
    made: Vec<PathBuf>,
}

impl OutputFolder {
    fn new(named: Option<&Path>) -> Result<OutputFolder, CommandError> {
        let Some(path) = named else {
            let parents = [Path::new("results/local"), Path::new("results")].map(Path::to_owned);
            let mut made: Vec<PathBuf> = parents.into_iter().filter(|parent| !parent.exists()).collect();
            let path = environment::new_run_folder(&["rehearsal".to_owned()], None)?;
            made.insert(0, path.clone());
            return Ok(OutputFolder { path, made });
        };
        let taken = fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
        if taken {
            return Err(CommandError::usage(anyhow!(
                "{}: the folder is not empty; name a new one with -o",
                path.display()
            )));
        }
        let mut folder = OutputFolder { path: path.to_owned(), made: Vec::new() };
        folder.create(path)?;
        Ok(folder)
    }

    /// Makes a folder and its parents.
    fn create(&mut self, place: &Path) -> Result<(), CommandError> {
        let missing = place.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        fs::create_dir_all(place).with_context(|| place.display().to_string()).map_err(CommandError::usage)?;
        self.made.splice(0..0, missing);
        Ok(())
    }

    fn finish(&self) {
        remove_empty(&self.made);
    }
}

/// Advice replays a recording under more than thirty settings. A larger recording, of some hundred thousand entries, is left to
/// `oomph advise`.
const LARGEST_RECORDING: u64 = 128 << 20;

/// Adds the advice and the holders of the record that is explained.
fn explain(report: &mut RehearsalReport, cards: &[Card], stop: &AtomicBool) {
    let Some(record) = report.explained() else { return };
    let Some(recording) = record.largest_recording.clone() else { return };
    let card = cards.iter().find(|card| card.to_string() == record.card);
    let is_small = fs::metadata(&recording).is_ok_and(|file| file.len() <= LARGEST_RECORDING);
    let advice = card.filter(|_| is_small).and_then(|card| {
        // The recording is kept, and the answer names the command: a failure here loses nothing.
        advise::of_recording(&recording, card, record.limit_bytes, stop).ok().flatten()
    });
    report.holders = holders_of(record, &recording, advice.as_ref());
    report.advice = advice;
}

/// What held memory where it ran out, or else at the peak of the recording.
fn holders_of(record: &RehearsalRecord, recording: &str, advice: Option<&Advice>) -> MemoryHolders {
    let end = advice.filter(|_| record.oom.is_some()).and_then(|advice| advice.dead_end.as_ref());
    match end {
        Some(end) if !end.holders.is_empty() => {
            let sites = end.holders.iter().map(|holder| (holder.bytes, holder.site.clone()));
            MemoryHolders { at_failure: true, sites: sites.collect() }
        }
        _ => MemoryHolders { at_failure: false, sites: at_peak(recording) },
    }
}

/// What held memory at the peak of a recording, by call site.
fn at_peak(name: &str) -> Vec<(u64, FileText)> {
    let stages = Stages::of(name);
    let spec =
        SourceSpec { name: name.to_owned(), set: Vec::new(), seed: 1, device_index: None, given: Default::default() };
    let Ok(source) = spec.open(&stages) else { return Vec::new() };
    let Ok(summary) = trace::check(&*source) else { return Vec::new() };
    let mut usages = requesters(&*source, GroupBy::Site, Some(summary.peak.event + 1)).unwrap_or_default();
    stages.finish();
    if lack_sites(&usages) {
        return Vec::new();
    }
    usages.retain(|usage| usage.live_bytes > 0);
    usages.sort_by_key(|usage| Reverse(usage.live_bytes));
    usages.into_iter().map(|usage| (usage.live_bytes, usage.name)).collect()
}
