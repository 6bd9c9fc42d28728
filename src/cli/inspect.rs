//! `oomph inspect`.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc, time::Instant};

use serde::Serialize;

use super::{
    exit::{self, CommandError, CommandResult},
    export::{self, JsonExport, PageExport},
    options::{DeviceOptions, Format},
    progress::Stages,
    ranks,
    source::{self, RecordedProgram, SourceOptions},
};
use crate::{
    answer::{
        holders::{GroupBy, HeldMemory, RequesterUsage, lack_sites, requesters},
        ranks::RankRow,
        summary::{MemorySummary, SummaryError, SummaryMoment, summarize},
    },
    base::{Bytes, FileText, Nanos, Progress},
    measure::{CaseDetail, CaseLabel, CaseRecord, digits, measure_replay},
    plan::{GRAIN, Lifetimes, MemoryBound, PackingBudget, pack},
    pytorch::Release,
    report::{
        self, Medium, Render,
        html::{self, Inspection},
        plot::{self, Extremes},
    },
    strategy::StrategySpec,
    suite::RankFile,
    trace::{
        self, HistogramBucket, PowerHistogram, ProgressSource, Source, TraceSummary,
        torch::{
            Action, EntryNote, MemoryRefuser, PinnedUsage, RecordedLimit, Recording, SegmentKind, SettingsOrigin,
            SnapshotBlockState,
        },
    },
};

/// Shows what is in a workload or trace: events by kind, sizes, lifetimes, peak, steps and phases.
/// Reading also checks it: a double free or an unknown stream is an error with the number of the
/// event. For a PyTorch snapshot, also shows the settings, the memory at the end, and what the file
/// does not contain.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// Compute an offline layout of all blocks with full knowledge of lifetimes; takes a few
    /// seconds.
    #[arg(long)]
    pack: bool,
    /// The most steps of that computation, about three nanoseconds each. More steps can give a lower
    /// layout; the same number gives the same layout on every machine.
    #[arg(long, value_name = "STEPS", requires = "pack", default_value_t = PackingBudget::THOROUGH.steps)]
    pack_steps: u64,
    #[command(flatten)]
    moment: MomentOptions,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json]))]
    format: Format,
    #[command(flatten)]
    export: JsonExport,
    #[command(flatten)]
    page: PageExport,
}

impl Args {
    fn pack_within(&self) -> Option<PackingBudget> {
        self.pack.then_some(PackingBudget::of_steps(self.pack_steps))
    }
}

const EXAMPLES: &str = "\
Examples:
  oomph inspect run.pickle                          contents of a recording
  oomph inspect run.pickle --summary --at peak      torch.cuda.memory_summary() at the peak
  oomph inspect run.pickle --summary --strategy caching:expandable_segments:True
  oomph inspect run.pickle --by site --top 20       call sites that request memory
  oomph inspect run.pickle --export-html run.html   who holds memory, as a page with a flame graph
  oomph inspect reference-gpt-163m --by tag --at step:1 --format json
  oomph inspect training --set batch=16 --pack      the least memory, with full knowledge of lifetimes
  oomph inspect buffers.csv --pack --pack-steps 20000000000
  oomph inspect snapshots/                          all ranks of a distributed program: a folder, or 'run-*.pickle'

The bound is the peak of live bytes: no allocator needs less. --pack computes a layout of all blocks in one address range,
with full knowledge of lifetimes. What a strategy reserves beyond that is lost to its policy.";

/// The longest bar of a histogram.
const BAR_WIDTH: u128 = 32;

pub fn run(args: Args) -> CommandResult {
    args.export.check()?;
    args.page.check()?;
    if let Some(files) = ranks::files(std::slice::from_ref(&args.source.source))? {
        args.page.check_one_rank()?;
        return for_ranks(&args, &files);
    }
    let stages = Stages::of(&args.source.source);
    let inspected = inspect(&args, &args.source, &stages)?;
    stages.finish();
    args.export.print(&inspected, args.format)?;
    args.page.write(|| inspected.page(&args))?;
    Ok(exit::OK)
}

/// One answer for all ranks: the one with the highest peak of live bytes.
fn for_ranks(args: &Args, files: &[RankFile]) -> CommandResult {
    let answers = ranks::ask(files, |name, progress| inspect(args, &args.source.settings.of(name), progress));
    ranks::tell("bound", &answers, (args.format, &args.export), |inspected: &InspectedSource| RankRow {
        live_peak_bytes: Some(inspected.summary.peak.bytes),
        figure_bytes: Some(inspected.needs.bound.rounded_bytes),
        verdict: format!(
            "{} events, {} live at the end",
            inspected.summary.events,
            Bytes(inspected.summary.live_bytes)
        ),
        ..RankRow::default()
    })
}

/// What is known about one source.
#[derive(Serialize)]
struct InspectedSource {
    source: String,
    #[serde(flatten)]
    summary: TraceSummary,
    needs: TraceNeeds,
    #[serde(skip_serializing_if = "Option::is_none")]
    recording: Option<RecordingFacts>,
    #[serde(flatten)]
    moment: Option<MomentFacts>,
    #[serde(skip)]
    page: Option<PageFacts>,
}

/// What only the page shows.
struct PageFacts {
    held: HeldMemory,
    replayed: (CaseRecord, CaseDetail),
}

impl InspectedSource {
    fn page(&self, args: &Args) -> Result<String, CommandError> {
        let Some(PageFacts { held, replayed }) = &self.page else { return Ok(String::new()) };
        let inspection = Inspection {
            source: &self.source,
            summary: &self.summary,
            bound_bytes: self.needs.bound.rounded_bytes,
            held,
            is_recording: self.recording.is_some(),
            missing: self.recording.as_ref().map_or(&[], |recording| &recording.missing[..]),
            facts: facts(self),
        };
        let device = args.moment.device.spec()?;
        let run = export::page_run(
            &format!("inspect {}", self.source),
            &device,
            args.source.settings.seed,
            vec![replayed.clone()],
        )?;
        Ok(html::inspection_page(&inspection, run)?)
    }
}

fn inspect(args: &Args, options: &SourceOptions, progress: &dyn Progress) -> Result<InspectedSource, CommandError> {
    let mut held = None;
    let (source, recording, program): (Box<dyn Source>, _, _) = match options.recording(progress)? {
        Some(recording) => {
            held = args.page.is_asked().then(|| HeldMemory::of_recording(&recording)).flatten();
            let (facts, program) = (RecordingFacts::of(&recording), RecordedProgram::of(&recording));
            (Box::new(recording), Some(facts), Some(program))
        }
        None => (options.open(progress)?, None, None),
    };
    let once = |stage: &str| ProgressSource::stage(&*source, progress, stage, 1);
    let summary = trace::check(&once("checking")).map_err(CommandError::usage)?;
    let needs = TraceNeeds::of(&*source, args.pack_within(), progress)?;
    let asked = args.moment.is_asked();
    let moment = if asked { Some(args.moment.facts(&*source, program.as_ref(), progress)?) } else { None };
    let page = match (args.page.is_asked(), held) {
        (false, _) => None,
        (true, Some(held)) => Some(held),
        (true, None) => Some(HeldMemory::at_peak(&once("finding who holds memory"), summary.peak.event)?),
    };
    let page = match page {
        Some(held) => Some(PageFacts { held, replayed: args.moment.replayed(&*source, program.as_ref(), progress)? }),
        None => None,
    };
    Ok(InspectedSource { source: source.name().to_owned(), summary, needs, recording, moment, page })
}

impl Render for InspectedSource {
    type Row = InspectedSource;

    fn rows(&self) -> &[InspectedSource] {
        std::slice::from_ref(self)
    }

    fn text(&self, medium: Medium) -> String {
        let mut facts = facts(self);
        if let Medium::Terminal(terminal) = medium
            && self.summary.live_over_time.len() > 1
        {
            let TraceSummary { lowest_over_time, live_over_time, .. } = &self.summary;
            let levels: Vec<Extremes> = lowest_over_time.iter().copied().zip(live_over_time.iter().copied()).collect();
            facts.push_str(&plot::plot("\nlive memory over events", &levels, terminal));
        }
        // A question about one moment needs no histograms.
        facts + &self.moment.as_ref().map_or_else(|| histograms(&self.summary), |moment| moment.text(medium))
    }
}

fn facts(inspected: &InspectedSource) -> String {
    let InspectedSource { source, summary, needs, recording, .. } = inspected;
    let kinds: Vec<String> = summary.by_kind.iter().map(|(kind, count)| format!("{count} {}", kind.name())).collect();
    let (requested, largest) = (Bytes(summary.requested_bytes), Bytes(summary.largest_request));
    let peak = &summary.peak;
    let mut out = line("source", source)
        + &line("events", &format!("{}: {}", summary.events, kinds.join(", ")))
        + &line("streams", &format!("{}, threads {}", summary.streams, summary.threads))
        + &line("requested", &format!("{requested} in total, largest {largest}"))
        + &line("peak live", &format!("{} in {} blocks, at event {}", Bytes(peak.bytes), peak.blocks, peak.event));
    if summary.failed.requests > 0 {
        let (count, largest) = (summary.failed.requests, Bytes(summary.failed.largest_bytes));
        let requests = if count == 1 { "request" } else { "requests" };
        out += &line("OOM", &format!("{count} {requests} failed when recorded, the largest for {largest}; not live"));
    }
    if summary.host_peak.bytes > 0 {
        let host = &summary.host_peak;
        out += &line("peak pinned", &format!("{} in {} buffers", Bytes(host.bytes), host.blocks));
    }
    out += &line("at the end", &format!("{} live blocks, {}", summary.live_blocks, Bytes(summary.live_bytes)));
    if summary.steps > 0 {
        out += &line("steps", &summary.steps.to_string());
    }
    if !summary.phases.is_empty() {
        out += &line("phases", &few_names(summary.phases.iter()));
    }
    if summary.span.0 > 0 {
        out += &line("time span", &summary.span.to_string());
    }
    out.push_str(&needs_text(needs, summary.failed.requests > 0));
    out.extend(recording.as_ref().map(recording_text));
    out
}

/// A label and a value.
fn line(label: &str, value: &str) -> String {
    format!("{label:<12} {value}\n")
}

fn histograms(summary: &TraceSummary) -> String {
    let mut out = histogram("sizes", &summary.sizes, |bytes| Bytes(bytes).to_string());
    out.push_str(&histogram("lifetimes in events", &summary.lifetimes, |events| events.to_string()));
    out
}

/// A line per power of two with the number of blocks, and their bytes as a number and as a bar.
fn histogram(title: &str, powers: &PowerHistogram, show: impl Fn(u64) -> String) -> String {
    let mut out = format!("\n{title:<23} {:>9}  {:>9}\n", "blocks", "bytes");
    let most = powers.buckets().map(|bucket| bucket.bytes).max().unwrap_or(0);
    for HistogramBucket { from, to, count, bytes } in powers.buckets() {
        // A single block among millions is still visible.
        let width = (u128::from(bytes) * BAR_WIDTH).div_ceil(u128::from(most.max(1)));
        let bar = "#".repeat(usize::try_from(width).unwrap_or(0));
        let bytes = Bytes(bytes).to_string();
        let _ = writeln!(out, "{:>9} .. {:<10} {count:>9}  {bytes:>9}  {bar}", show(from), show(to));
    }
    out
}

/// What every allocator needs for a source.
#[derive(Debug, Serialize)]
struct TraceNeeds {
    bound: MemoryBound,
    packing: Option<PackedLayout>,
}

/// A layout computed with full knowledge of lifetimes.
#[derive(Debug, Serialize)]
struct PackedLayout {
    packed_bytes: u64,
    #[serde(serialize_with = "digits::required")]
    over_bound_share: f64,
    /// No layout is lower than this.
    proven_bytes: u64,
    is_optimal: bool,
    method: String,
    blocks: usize,
    /// Wall-clock time of this machine.
    wall_ns: u64,
}

impl TraceNeeds {
    /// Reads the source once, and once more for a layout.
    fn of(
        source: &dyn Source,
        pack_within: Option<PackingBudget>,
        progress: &dyn Progress,
    ) -> Result<TraceNeeds, CommandError> {
        let once = |stage: &str| ProgressSource::stage(source, progress, stage, 1);
        let bound = MemoryBound::of(&once("computing the bound"), GRAIN).map_err(CommandError::usage)?;
        let packing = match pack_within {
            Some(budget) => Some(packed(&once("collecting blocks"), budget, progress)?),
            None => None,
        };
        Ok(TraceNeeds { bound, packing })
    }
}

fn packed(source: &dyn Source, budget: PackingBudget, progress: &dyn Progress) -> Result<PackedLayout, CommandError> {
    let lifetimes = Lifetimes::read(source, GRAIN).map_err(CommandError::usage)?;
    progress.begin_stage("packing blocks", 0);
    let began = Instant::now();
    let packing = pack(&lifetimes, budget);
    let wall_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(PackedLayout {
        packed_bytes: packing.height_bytes,
        over_bound_share: packing.over_bound(),
        proven_bytes: packing.proven_bytes,
        is_optimal: packing.is_optimal(),
        method: packing.method.to_string(),
        blocks: lifetimes.blocks.len(),
        wall_ns,
    })
}

fn needs_text(needed: &TraceNeeds, with_failed: bool) -> String {
    let MemoryBound { requested_bytes, rounded_bytes } = needed.bound;
    let (requested, rounded) = (Bytes(requested_bytes), Bytes(rounded_bytes));
    let serves = if with_failed { " to serve the failed requests too" } else { "" };
    let mut out =
        line("bound", &format!("{requested}: no allocator needs less{serves}; {rounded} in blocks of {GRAIN} B"));
    if let Some(packing) = &needed.packing {
        let verdict = if packing.is_optimal {
            "no layout is lower".to_owned()
        } else {
            format!("no layout can be below {}", Bytes(packing.proven_bytes))
        };
        let PackedLayout { packed_bytes, over_bound_share, method, blocks, wall_ns, .. } = packing;
        let (packed, time, over_percent) = (Bytes(*packed_bytes), Nanos(*wall_ns), 100.0 * over_bound_share);
        out += &line(
            "packed",
            &format!(
                "{packed}, {over_percent:.2} % over the bound, by {method} of {blocks} blocks in {time}; {verdict}"
            ),
        );
    }
    out
}

/// What only a recording has.
#[derive(Debug, Serialize)]
struct RecordingFacts {
    device_index: u32,
    devices: Vec<u32>,
    settings: String,
    settings_from: SettingsOrigin,
    /// The allocator that replaced PyTorch's.
    #[serde(skip_serializing_if = "Option::is_none")]
    other_allocator: Option<String>,
    release: Release,
    release_known_by: String,
    entries: BTreeMap<&'static str, u64>,
    segments: Vec<KindTally>,
    blocks: Vec<KindTally>,
    largest_free_bytes: u64,
    annotations: BTreeMap<FileText, u64>,
    /// Blocks that the program annotated, by its words.
    annotated_blocks: BTreeMap<FileText, u64>,
    /// Entries with metadata of the program or of the allocator, by its words.
    user_metadata: BTreeMap<FileText, u64>,
    internal_metadata: BTreeMap<FileText, u64>,
    /// Page-locked memory of the host, if it was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<PinnedUsage>,
    empty_caches: usize,
    /// The memory limit that the program set itself.
    own_limit: Option<RecordedLimit>,
    /// What the file does not contain, one sentence each.
    missing: Vec<String>,
}

/// The number and bytes of one kind.
#[derive(Debug, Serialize)]
struct KindTally {
    kind: &'static str,
    count: u64,
    bytes: u64,
}

fn tally(kind: &'static str, sizes: impl Iterator<Item = u64>) -> KindTally {
    let (count, bytes) = sizes.fold((0, 0), |(count, sum): (u64, u64), size| (count + 1, sum.saturating_add(size)));
    KindTally { kind, count, bytes }
}

impl RecordingFacts {
    fn of(recording: &Recording) -> RecordingFacts {
        let mut entries = BTreeMap::new();
        for entry in &recording.witnessed {
            *entries.entry(entry.action.name()).or_default() += 1;
        }
        let mut annotations = BTreeMap::new();
        for annotation in &recording.annotations {
            *annotations.entry(annotation.name.clone()).or_default() += 1;
        }
        let segments = &recording.final_segments;
        let of_kind = |name, kind, expandable| {
            let chosen =
                segments.iter().filter(move |segment| segment.kind == kind && segment.expandable == expandable);
            tally(name, chosen.map(|segment| segment.total_size))
        };
        let all = || segments.iter().flat_map(|segment| &segment.blocks);
        let in_state =
            |name, state| tally(name, all().filter(move |block| block.state == state).map(|block| block.size));
        let free = all().filter(|block| block.state == SnapshotBlockState::Inactive).map(|block| block.size);
        RecordingFacts {
            device_index: recording.device,
            devices: recording.devices.clone(),
            settings: recording.settings.compact_conf(),
            settings_from: recording.settings_from,
            other_allocator: recording.settings.other_allocator().map(|name| FileText::from(name).to_string()),
            release: recording.release.assumed(),
            release_known_by: recording.release.to_string(),
            entries,
            segments: vec![
                of_kind("small", SegmentKind::Small, false),
                of_kind("large", SegmentKind::Large, false),
                of_kind("small expandable", SegmentKind::Small, true),
                of_kind("large expandable", SegmentKind::Large, true),
            ],
            blocks: vec![
                in_state("allocated", SnapshotBlockState::Allocated),
                in_state("waiting", SnapshotBlockState::PendingFree),
                in_state("free", SnapshotBlockState::Inactive),
            ],
            largest_free_bytes: free.max().unwrap_or(0),
            annotations,
            annotated_blocks: counted_texts(recording, Action::Annotate, |note| &note.user_metadata),
            user_metadata: counted_texts(recording, None, |note| &note.user_metadata),
            internal_metadata: counted_texts(recording, None, |note| &note.internal_metadata),
            pinned: recording.host.usage(),
            empty_caches: recording.empty_caches.len(),
            own_limit: recording.limit.clone(),
            missing: recording.gaps.sentences(),
        }
    }
}

/// How many entries have each text in their note; of one action, or of all others.
fn counted_texts(
    recording: &Recording,
    action: impl Into<Option<Action>>,
    text: fn(&EntryNote) -> &Arc<str>,
) -> BTreeMap<FileText, u64> {
    let action = action.into();
    let mut by_note: BTreeMap<u32, u64> = BTreeMap::new();
    let chosen = recording.witnessed.iter().filter(|entry| match action {
        Some(action) => entry.action == action,
        None => entry.action != Action::Annotate,
    });
    chosen.for_each(|entry| *by_note.entry(entry.note).or_default() += 1);
    let mut counts = BTreeMap::new();
    for (note, count) in by_note {
        let Some(text) = recording.notes.get(note as usize).map(text).filter(|text| !text.is_empty()) else { continue };
        *counts.entry(FileText::from(Arc::clone(text))).or_default() += count;
    }
    counts
}

/// The first names, escaped, and the number of the others.
fn few_names<'a>(names: impl ExactSizeIterator<Item = &'a FileText>) -> String {
    let more = names.len().saturating_sub(NAMES_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names.take(NAMES_SHOWN).map(FileText::to_string).collect::<Vec<_>>().join(", "))
}

fn pinned_text(usage: &PinnedUsage) -> String {
    let PinnedUsage { requests, buffers, reserved_bytes, allocated_bytes, peak_allocated_bytes, .. } = usage;
    let (reserved, allocated) = (Bytes(*reserved_bytes), Bytes(*allocated_bytes));
    let peak = Bytes(*peak_allocated_bytes);
    let text =
        format!("{buffers} buffers ({reserved}) at the end, {allocated} in use, peak {peak}; {requests} requests");
    line("pinned", &text)
}

fn settings_text(about: &RecordingFacts) -> String {
    let settings = if about.settings.is_empty() { "PyTorch's defaults" } else { &about.settings };
    let origin = match about.settings_from {
        SettingsOrigin::File => "",
        SettingsOrigin::Given => ", given by --settings",
        SettingsOrigin::Unknown => ", assumed: the file has none; give them with --settings",
    };
    format!("{settings}{origin}")
}

/// More phases and annotations are counted, not named.
const NAMES_SHOWN: usize = 8;

fn recording_text(about: &RecordingFacts) -> String {
    let mut out = String::new();
    if about.devices.len() > 1 {
        let devices: Vec<String> = about.devices.iter().map(u32::to_string).collect();
        out += &line("device", &format!("{} of {}; --device-index chooses", about.device_index, devices.join(", ")));
    }
    out += &line("PyTorch", &about.release_known_by);
    if let Some(allocator) = &about.other_allocator {
        out += &line("allocator", &format!("{allocator}, not PyTorch's: settings are those that PyTorch's would have"));
    }
    out += &line("settings", &settings_text(about));
    let entries: Vec<String> = about.entries.iter().map(|(name, count)| format!("{count} {name}")).collect();
    out += &line("recorded", &entries.join(", "));
    let listed = |tallies: &[KindTally]| {
        let shown = tallies.iter().filter(|tally| tally.count > 0);
        let texts: Vec<String> =
            shown.map(|tally| format!("{} {} ({})", tally.count, tally.kind, Bytes(tally.bytes))).collect();
        if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
    };
    out += &line("segments", &format!("at the end: {}", listed(&about.segments)));
    let largest = Bytes(about.largest_free_bytes);
    out += &line("blocks", &format!("at the end: {}; largest free {largest}", listed(&about.blocks)));
    if let Some(limit) = &about.own_limit {
        out += &match limit.refused_by {
            MemoryRefuser::Device => line("device", &format!("full: {} for the allocator", Bytes(limit.bytes))),
            MemoryRefuser::OwnLimit => line("own limit", &limit.in_words()),
            MemoryRefuser::Unknown => line("own limit", &format!("{}, or the device was full", limit.in_words())),
        };
    }
    if about.empty_caches > 0 {
        out += &line("empty_cache", &format!("called {} times, as far as can be inferred", about.empty_caches));
    }
    for (label, names) in [
        ("annotations", &about.annotations),
        ("annotated", &about.annotated_blocks),
        ("metadata", &about.user_metadata),
        ("internal", &about.internal_metadata),
    ] {
        out.extend((!names.is_empty()).then(|| line(label, &few_names(names.keys()))));
    }
    out.extend(about.pinned.as_ref().map(pinned_text));
    for (place, sentence) in about.missing.iter().enumerate() {
        out += &line(if place == 0 { "unknown" } else { "" }, sentence);
    }
    out
}

/// What to show of one moment.
#[derive(Debug, clap::Args)]
struct MomentOptions {
    /// Replay and show PyTorch's memory summary.
    #[arg(long)]
    summary: bool,
    /// Show which requests hold memory, grouped by this.
    #[arg(long, value_enum, value_name = "WHAT")]
    by: Option<GroupBy>,
    /// How many lines of it.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// The moment: end, peak, step:N, phase:NAME[:N] (its beginning) or event:N.
    #[arg(long, value_name = "MOMENT", default_value = "end")]
    at: String,
    /// The allocator [default: PyTorch's, with the settings of the recording].
    #[arg(long, short, value_name = "STRATEGY")]
    strategy: Option<String>,
    #[command(flatten)]
    device: DeviceOptions,
}

/// Memory at one moment.
#[derive(Serialize)]
struct MomentFacts {
    /// The strategy of the summary.
    #[serde(skip_serializing_if = "Option::is_none")]
    strategy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_summary: Option<MemorySummary>,
    /// How the replay relates to the recorded run.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// The first requesters.
    #[serde(skip_serializing_if = "Option::is_none")]
    operations: Option<Vec<RequesterUsage>>,
    /// Why they have no names.
    #[serde(skip_serializing_if = "Option::is_none")]
    operations_note: Option<&'static str>,
    /// All of them, for the text.
    #[serde(skip)]
    grouped: Option<GroupedRequesters>,
}

/// Requesters of memory, and what of them is shown.
struct GroupedRequesters {
    by: GroupBy,
    all: Vec<RequesterUsage>,
    /// The totals of tags by category; empty for other groups.
    categories: Vec<RequesterUsage>,
    top: usize,
}

impl MomentOptions {
    fn is_asked(&self) -> bool {
        self.summary || self.by.is_some()
    }

    fn facts(
        &self,
        source: &dyn Source,
        program: Option<&RecordedProgram>,
        progress: &dyn Progress,
    ) -> Result<MomentFacts, CommandError> {
        let at: SummaryMoment = self.at.parse().map_err(summary_failure)?;
        let strategy = source::strategy_or_recorded(self.strategy.as_deref(), program)?;
        // The peak depends on the allocator: blocks are larger than requests.
        let needs_replay = self.summary || at == SummaryMoment::Peak;
        let memory = if needs_replay { Some(self.memory(source, program, &strategy, &at, progress)?) } else { None };
        let until = match (&memory, &at) {
            (Some(memory), _) => Some(memory.event),
            (None, at) => {
                at.event(&ProgressSource::stage(source, progress, "finding the moment", 1)).map_err(summary_failure)?
            }
        };
        let mut facts = MomentFacts {
            strategy: self.summary.then(|| strategy.to_string()),
            memory_summary: memory.filter(|_| self.summary),
            note: program.filter(|_| self.summary).and_then(|program| program.note(&self.device)),
            operations: None,
            operations_note: None,
            grouped: None,
        };
        if let Some(by) = self.by {
            let by_category = by == GroupBy::Tag;
            let source = ProgressSource::stage(source, progress, "grouping requests", 1 + u64::from(by_category));
            let all = requesters(&source, by, until)?;
            if by == GroupBy::Site && lack_sites(&all) {
                facts.operations_note = Some(report::WITHOUT_STACKS);
            }
            let categories = if by_category { requesters(&source, GroupBy::Category, until)? } else { Vec::new() };
            facts.operations = Some(all.iter().take(self.top).cloned().collect());
            facts.grouped = Some(GroupedRequesters { by, all, categories, top: self.top });
        }
        Ok(facts)
    }

    /// Memory over time in a replay.
    fn replayed(
        &self,
        source: &dyn Source,
        program: Option<&RecordedProgram>,
        progress: &dyn Progress,
    ) -> Result<(CaseRecord, CaseDetail), CommandError> {
        let strategy = source::strategy_or_recorded(self.strategy.as_deref(), program)?;
        let label = CaseLabel {
            suite: "inspect".to_owned(),
            workload: source.name().to_owned(),
            strategy: strategy.to_string(),
            device: self.device.spec()?.to_string(),
            ..CaseLabel::default()
        };
        let source = ProgressSource::stage(source, progress, "measuring memory over time", 1);
        let replay = source::replay(&source, &self.device, &strategy, program)?;
        measure_replay(label, &replay).map_err(CommandError::replay)
    }

    fn memory(
        &self,
        source: &dyn Source,
        program: Option<&RecordedProgram>,
        strategy: &StrategySpec,
        at: &SummaryMoment,
        progress: &dyn Progress,
    ) -> Result<MemorySummary, CommandError> {
        // Steps and phases are found in a reading of their own.
        let readings = 1 + u64::from(matches!(at, SummaryMoment::Step(_) | SummaryMoment::Phase(..)));
        let source = ProgressSource::stage(source, progress, "replaying", readings);
        let replay = source::replay(&source, &self.device, strategy, program)?;
        summarize(&replay, at).map_err(summary_failure)
    }
}

impl MomentFacts {
    fn text(&self, medium: Medium) -> String {
        let mut out = String::new();
        if let (Some(strategy), Some(memory)) = (&self.strategy, &self.memory_summary) {
            out.push_str(&format!("\nmemory under {strategy}\n"));
            out.extend(self.note.iter().map(|note| format!("{note}\n")));
            out.push_str(&report::memory_summary(memory, medium));
        }
        if let Some(note) = self.operations_note {
            out.push_str(&format!("\nrequested memory by requester\n{note}\n"));
        } else if let Some(GroupedRequesters { by, all, categories, top }) = &self.grouped {
            out.push_str("\nrequested memory by requester\n");
            if !categories.is_empty() {
                out.push_str(&report::operations(categories, GroupBy::Category, usize::MAX, medium));
                out.push('\n');
            }
            out.push_str(&report::operations(all, *by, *top, medium));
        }
        out
    }
}

fn summary_failure(error: SummaryError) -> CommandError {
    match error {
        SummaryError::Replay(error) => CommandError::replay(error),
        _ => CommandError::usage(error),
    }
}
