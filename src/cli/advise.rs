//! `oomph advise`.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult, StopPolicy},
    export::{self, JsonExport, PageExport},
    options::{DeviceChoice, Format},
    output,
    progress::Stages,
    ranks,
    source::{SourceSettings, source_argument, supported_settings},
};
use crate::{
    answer::{
        advise::{self, Advice, AdviceQuestion, AvailableMemory, Confidence, SettingsCandidate},
        holders::HeldMemory,
        ranks::RankRow,
        threshold::ThresholdError,
    },
    base::{Bytes, MemoryLimit, Progress},
    device::{Card, DeviceSpec},
    measure::{CaseDetail, CaseRecord, SCHEMA},
    pytorch::Release,
    replay::verify::Verdict,
    report::{AdviceReport, html},
    suite::{self, RankFile},
    trace::{
        ProgressSource, Trace,
        torch::{FinalOom, HistoryGap, RecordedLimit, RecordedRelease},
    },
};

/// Recommends allocator settings for a program: one line to paste, the memory it needs with and
/// without it, what it costs, how sure that is, or why no setting helps.
///
/// The recording is replayed on the simulated GPU under more than thirty settings of PyTorch's
/// allocator and under other allocators. For each, the smallest memory in which it completes is
/// searched.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph advise snapshot.pickle
  oomph advise snapshot.pickle --card 24GiB               my card: what fits on it?
  oomph advise snapshot.pickle --limit 0.04               as with set_per_process_memory_fraction(0.04)
  oomph advise snapshot.pickle --limit 6GiB               the same as a size
  oomph advise variable-length --set batch=8              a workload by name
  oomph advise *.pickle --format json                     each on its own
  oomph advise snapshot.pickle --export-html answer.html  the answer with its evidence as a page
  oomph advise snapshots/                                 all ranks of a distributed program

From an OOM to the line to paste: record the program on a card where it runs, or up to the OOM (`python -m oomph record
train.py`; `oomph record` prints Python lines for a machine without the package), and run `oomph advise` on the file. A recording that ends with an OOM shows how much memory there was, so
neither --card nor --limit is needed. What the program would have done next is not in it. If the program's own memory
fraction refused the request, the answer says so first. A recording of the Python package has the fraction in a file beside
it. Otherwise the answer names the range in which it is, or the only round fraction in that range, and says from which limit
on a setting helps. A recording without a
history of requests cannot be judged (exit code 109).

Among the settings that need about the least memory (up to 64 MiB or 1 % more), the simplest is recommended: the current
ones, then the fewest settings, then the least memory. A smaller gain is not worth a change. Requests that failed in the
recording must succeed too.

`Reserved, no limit` is what PyTorch reserves if nothing limits it; compare it with torch.cuda.max_memory_reserved.
`Smallest limit` is the least memory in which the recording completes: PyTorch then releases cached memory and tries again.
`Smallest device` adds the driver's context and the libraries. With --card the driver refuses more, as a card of that
size does; otherwise the allocator's own limit does, as in `oomph threshold`. With both, the smaller one decides. `Driver
time` is the simulated time of all driver calls of the recording: in that memory with --card or --limit, otherwise on the
whole device.

--limit is the limit of the recorded program if the model then repeats the recording, as in `oomph verify --limit`.
Otherwise a note says so, and the answer is for the same program under that limit.

A folder, or a pattern in quotes ('run-*.pickle'), is one recording per rank. The answer shows the rank that needs most in
full, then one line per rank, the spread, and the outliers (further from the median than 3.5 times the usual distance, and
than 1 %).

`How sure` is about the recorded run: EXACT means that the model repeats every entry of it. The answer for other settings
is a prediction; the line says how many predictions for such settings were compared with real runs (results/what-if).

JSON has one row per source: `recommended`, `saved_bytes`, `confidence`, `predictions`, `recorded_limit`, `reasons`, and
`tried` with everything. If no setting is enough, `closest` names one, and nothing is recommended.")]
pub struct Args {
    /// PyTorch memory snapshots; workloads, workload TOMLs and traces in any known format; or a
    /// folder with one per rank.
    #[arg(value_name = "SNAPSHOT", required = true, value_parser = source_argument())]
    sources: Vec<String>,
    /// What the card has, context and libraries included: a size such as 24GiB, or a card by its name or profile file.
    #[arg(long, value_name = "SIZE|NAME")]
    card: Option<Card>,
    /// What the process may take: a size such as 6GiB, or a fraction of the card such as 0.04 or 4% (without --card, of
    /// an H200), as in PyTorch's set_per_process_memory_fraction; 1.0 is no limit.
    #[arg(long, value_name = "SIZE|FRACTION")]
    limit: Option<MemoryLimit>,
    /// The current settings of the program, as in PYTORCH_ALLOC_CONF [default: those of the
    /// recording].
    #[arg(long, value_name = "SETTINGS")]
    current: Option<String>,
    /// The simulated GPU.
    #[arg(long, value_name = "DEVICE", default_value = DeviceChoice::DEFAULT, hide = true)]
    device: String,
    /// How many times each must complete, back to back in one allocator.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    settings: SourceSettings,
    /// How many of the settings tried are shown.
    #[arg(long, value_name = "N", default_value_t = 8)]
    top: usize,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    export: JsonExport,
    #[command(flatten)]
    page: PageExport,
}

/// The advice for a recording that another command made on a card; `None` if it was interrupted.
pub(super) fn of_recording(
    name: &str,
    card: &Card,
    limit_bytes: Option<u64>,
    stop: &AtomicBool,
) -> Result<Option<Advice>, CommandError> {
    let settings = SourceSettings { set: Vec::new(), seed: 1, device_index: None, given: Default::default() };
    let args = Args {
        sources: vec![name.to_owned()],
        card: Some(card.clone()),
        limit: limit_bytes.map(|bytes| MemoryLimit::Size(Bytes(bytes))),
        current: None,
        device: DeviceChoice::DEFAULT.to_owned(),
        repeat: 1,
        settings,
        top: 0,
        format: Format::default(),
        export: JsonExport::default(),
        page: PageExport::default(),
    };
    let answered = answer(&AdviceRequest::new(args)?, name, suite::all_cores(), stop, &Stages::of(name))?;
    Ok(answered.map(|answered| answered.advice))
}

/// The arguments, and the memory that they mean.
struct AdviceRequest {
    args: Args,
    device: DeviceSpec,
    /// The limit of the process.
    limit_bytes: Option<u64>,
    room: Option<AvailableMemory>,
}

pub fn run(args: Args) -> CommandResult {
    args.export.check()?;
    args.page.check()?;
    let request = AdviceRequest::new(args)?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    if let Some(files) = ranks::files(&request.args.sources)? {
        request.args.page.check_one_rank()?;
        return for_ranks(&request, &files, &stop);
    }
    let args = &request.args;
    let (mut advices, mut held, mut measured) = (Vec::new(), Vec::new(), Vec::new());
    for name in &args.sources {
        let stages = Stages::of(name);
        match answer(&request, name, suite::all_cores(), &stop, &stages)? {
            Some(answered) => {
                advices.push(answered.advice);
                held.push(answered.held);
                measured.extend(answered.measured);
            }
            None => return Ok(exit::INTERRUPTED),
        }
    }
    let any_gap = advices.iter().any(|advice| advice.history_gap.is_some());
    let report = AdviceReport { advices, top: args.top };
    args.export.print(&report, args.format)?;
    args.page.write(|| {
        let name = match &report.advices[..] {
            [advice] => format!("advise {}", advice.source),
            several => format!("advise {} sources", several.len()),
        };
        let run = export::page_run(&name, &request.device, args.settings.seed, measured)?;
        Ok(html::advice_page(&report.advices, &held, run)?)
    })?;
    Ok(if any_gap { exit::CANNOT_TELL } else { exit::OK })
}

/// The advice for one source, and what only its page shows.
struct AnsweredSource {
    advice: Advice,
    /// What the program held, if its recording has call stacks.
    held: Option<HeldMemory>,
    /// Replays with the current and the recommended settings.
    measured: Vec<(CaseRecord, CaseDetail)>,
}

/// The answer for one source; `None` if it was interrupted.
fn answer(
    request: &AdviceRequest,
    name: &str,
    jobs: usize,
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Option<AnsweredSource>, CommandError> {
    let AdviceRequest { args, device, .. } = request;
    let program = AdvisedProgram::open(request, name, progress)?;
    if program.history_gap.is_some() {
        return Ok(Some(AnsweredSource { advice: program.without_answer(), held: None, measured: Vec::new() }));
    }
    let AdvisedProgram { trace, current, confidence, dead_end, recorded_limit, release, held, .. } = program;
    let seen = dead_end.as_ref().and_then(|end| end.room_bytes).map(AvailableMemory::OfCard);
    let room = request.room.or(recorded_limit.as_ref().map(AvailableMemory::of_recording)).or(seen);
    // A recording that ends with an OOM needs more than its device had.
    let device = &match room {
        Some(AvailableMemory::OfCard(bytes)) => device.with_room_for(bytes.saturating_mul(2)),
        _ => device.clone(),
    };
    let question = AdviceQuestion {
        room,
        dead_end: dead_end.as_ref(),
        recorded_limit: recorded_limit.as_ref(),
        release: release.as_ref(),
        repeat: args.repeat,
        jobs,
        stop: Some(stop),
        progress,
        ..AdviceQuestion::new(&trace, &current, device)
    };
    let answered = advise::advise(&question).and_then(|advice| {
        let measured = if args.page.is_asked() { question.over_time(&advice)? } else { Vec::new() };
        Ok(AnsweredSource { advice: Advice { confidence, ..advice }, held, measured })
    });
    match answered {
        Ok(answered) => Ok(Some(answered)),
        Err(ThresholdError::Interrupted) => Ok(None),
        Err(error @ ThresholdError::NoRoom { .. }) => Err(CommandError::usage(error)),
        Err(error) => Err(error.into()),
    }
}

/// One answer for all ranks: they share their settings, and the one that needs most decides.
fn for_ranks(request: &AdviceRequest, files: &[RankFile], stop: &AtomicBool) -> CommandResult {
    let args = &request.args;
    let jobs = ranks::jobs_of_each(files);
    let answers = ranks::ask(files, |name, progress| {
        let advice = answer(request, name, jobs, stop, progress)?;
        let advice = advice.ok_or_else(|| CommandError::usage(anyhow!("interrupted")))?.advice;
        if let Some(gap) = advice.history_gap {
            return Err(CommandError::usage(anyhow!("{name}: {gap}")));
        }
        Ok(AdviceReport { advices: vec![advice], top: args.top })
    });
    if stop.load(Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    ranks::tell("smallest limit", &answers, (args.format, &args.export), |report| {
        let advice = &report.advices[0];
        RankRow {
            live_peak_bytes: Some(advice.live_peak_bytes),
            figure_bytes: advice.needed_bytes.or(Some(advice.live_peak_bytes)),
            severity: if advice.needed_bytes.is_none() || advice.fits == Some(false) { 1 } else { 0 },
            verdict: match (&advice.export, advice.needed_bytes, advice.fits) {
                (_, None, _) | (_, _, Some(false)) => "does not fit".to_owned(),
                (Some(_), ..) => advice.recommended.clone(),
                (None, ..) => "no change".to_owned(),
            },
            ..RankRow::default()
        }
    })
}

/// A source, and what is known about its program.
struct AdvisedProgram {
    trace: Trace,
    current: String,
    confidence: Confidence,
    dead_end: Option<FinalOom>,
    recorded_limit: Option<RecordedLimit>,
    release: Option<RecordedRelease>,
    history_gap: Option<HistoryGap>,
    /// What it held, if the page is wanted and its recording has call stacks.
    held: Option<HeldMemory>,
}

impl AdvisedProgram {
    fn open(request: &AdviceRequest, name: &str, progress: &dyn Progress) -> Result<AdvisedProgram, CommandError> {
        let args = &request.args;
        let spec = args.settings.of(name).spec()?;
        let verified = spec.verified_recording(progress).map_err(CommandError::usage)?;
        let mut program = match verified {
            Some(_) if !args.settings.set.is_empty() => {
                return Err(CommandError::usage(anyhow!("'{name}' is a recording: it has no parameters for --set")));
            }
            Some((mut recording, mut verification)) => {
                // The limit may be that of the recorded program, or a question about another one.
                let is_open = verification.verdict != Verdict::Exact
                    || recording.limit.as_ref().is_some_and(|limit| limit.inferred);
                if let Some(limit) = request.limit_bytes
                    && let Some(under) = spec.verified_under(Some(limit), progress).map_err(CommandError::usage)?
                {
                    match under.1.verdict == Verdict::Exact {
                        true if is_open => (recording, verification) = under,
                        true => {}
                        false => output::complain(&format!(
                            "note: {name}: the recorded program did not run under a limit of {}; the answer is for the \
                             same requests under that limit",
                            Bytes(limit)
                        )),
                    }
                }
                AdvisedProgram {
                    held: args.page.is_asked().then(|| HeldMemory::of_recording(&recording)).flatten(),
                    current: recording.settings.compact_conf(),
                    confidence: Confidence::of(&verification),
                    dead_end: recording.dead_end(),
                    history_gap: recording.history_gap(),
                    recorded_limit: recording.limit,
                    release: Some(recording.release),
                    trace: recording.trace,
                }
            }
            None => {
                let source = spec.open(progress).map_err(CommandError::usage)?;
                let source = ProgressSource::stage(source, progress, "reading", 1);
                AdvisedProgram {
                    trace: Trace::read(&source).map_err(CommandError::usage)?,
                    current: String::new(),
                    confidence: Confidence::Unverified,
                    dead_end: None,
                    recorded_limit: None,
                    release: None,
                    history_gap: None,
                    held: None,
                }
            }
        };
        program.current = match &args.current {
            Some(settings) => {
                let strategy = SettingsCandidate::with_settings(settings.trim()).strategy.of_release(program.release());
                strategy.check().map_err(CommandError::usage)?;
                settings.trim().to_owned()
            }
            None => supported_settings(program.current.clone(), program.release()),
        };
        Ok(program)
    }

    /// The release of the recording, or the default.
    fn release(&self) -> Release {
        self.release.as_ref().map_or(Release::DEFAULT, RecordedRelease::assumed)
    }

    /// What can be said of a recording that cannot be judged.
    fn without_answer(self) -> Advice {
        Advice {
            schema: SCHEMA,
            source: self.trace.name,
            recommended: self.current.clone(),
            current: self.current,
            confidence: self.confidence,
            dead_end: self.dead_end,
            recorded_limit: self.recorded_limit,
            history_gap: self.history_gap,
            release: self.release.map(|release| release.to_string()),
            ..Advice::default()
        }
    }
}

impl AdviceRequest {
    fn new(args: Args) -> Result<AdviceRequest, CommandError> {
        let spec = DeviceChoice { device: args.device.clone(), card: args.card.clone() }.spec()?;
        if !spec.is_simulated() {
            return Err(CommandError::usage(anyhow!(
                "settings are tried on the simulated device; leave out --device {spec}"
            )));
        }
        let limit_bytes = args.limit.map(|limit| spec.limit_bytes(limit)).transpose()?.flatten();
        // No limit means all that the device has.
        let is_whole = args.limit.is_some() && limit_bytes.is_none();
        let card = args.card.is_some() || is_whole;
        let card = if card { Some(spec.total_bytes()?) } else { None };
        let overhead_bytes = spec.overhead_bytes()?;
        let room = match (card, limit_bytes) {
            (Some(card), Some(limit)) if limit.saturating_add(overhead_bytes) > card => {
                output::complain(&format!(
                    "note: a limit of {} is more than a card of {} has for the process; the card decides",
                    Bytes(limit),
                    Bytes(card)
                ));
                Some(AvailableMemory::Card(card))
            }
            (_, Some(limit)) => Some(AvailableMemory::Limit(limit)),
            (card, None) => card.map(AvailableMemory::Card),
        };
        // More than the card has: the answer says how much would be enough.
        let device = args.card.as_ref().map_or(spec, Card::device_for_search);
        Ok(AdviceRequest { args, device, limit_bytes, room })
    }
}
