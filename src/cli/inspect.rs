//! `oomph inspect`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    exit,
    failure::{Failure, Outcome},
    inspect_needs::{self, Needed},
    inspect_recording::{self, About},
    inspect_summary::{SummaryOptions, Told},
    options::Format,
    progress::Stages,
    ranks,
    source::SourceOptions,
};
use crate::{
    answer::ranks::RankRow,
    base::{Bytes, Progress},
    report::{Medium, Render, plot},
    suite::RankFile,
    trace::{self, Powers, ProgressSource, Source, Summary},
};

/// Says what is in a workload or trace: how many events of which kind, sizes, lifetimes, peak, steps and phases.
/// Reading it also checks it: a double free or an unknown stream is an error with the event's number. Of a PyTorch
/// snapshot it also tells the settings, the memory at the end, and what the file leaves open.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// Lay all blocks out with foresight, as low as a few seconds allow, and say how low that is.
    #[arg(long)]
    pack: bool,
    #[command(flatten)]
    moment: SummaryOptions,
    /// How it is printed.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json]))]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  oomph inspect run.pickle                          what is in it
  oomph inspect run.pickle --summary --at peak      torch.cuda.memory_summary() at the fullest moment
  oomph inspect run.pickle --summary --strategy caching:expandable_segments:True
  oomph inspect run.pickle --by site --top 20       who asked for memory
  oomph inspect gpt-124m --by tag --at step:1 --format json
  oomph inspect training --set batch=16 --pack      how little memory would do, with foresight
  oomph inspect snapshots/                          all ranks of a distributed program: a folder, or 'run-*.pickle'

The bound is the most that is alive at one time: no allocator can do with less. --pack looks for a layout of all blocks
in one stretch of memory, knowing when each comes and goes; what a strategy reserves beyond that is lost by its policy.";

/// How wide the longest bar of a histogram is.
const BAR_WIDTH: u64 = 40;

pub fn run(args: Args) -> Outcome {
    if let Some(files) = ranks::files(std::slice::from_ref(&args.source.source))? {
        return for_ranks(&args, &files);
    }
    let stages = Stages::of(&args.source.source);
    let inspected = inspect(&args, &args.source, &stages)?;
    stages.finish();
    args.format.print(&inspected)?;
    Ok(exit::OK)
}

/// One answer for all ranks: the one with the most alive at one time.
fn for_ranks(args: &Args, files: &[RankFile]) -> Outcome {
    let answers = ranks::ask(files, |name, progress| inspect(args, &args.source.at(name), progress));
    ranks::tell("bound", &answers, args.format, |inspected: &Inspected| RankRow {
        peak_bytes: Some(inspected.summary.peak.bytes),
        figure_bytes: Some(inspected.needed.bound_bytes()),
        verdict: format!(
            "{} events, {} live at the end",
            inspected.summary.events,
            Bytes(inspected.summary.live_bytes)
        ),
        ..RankRow::default()
    })
}

/// What is told of one source.
struct Inspected {
    name: String,
    summary: Summary,
    needed: Needed,
    about: Option<About>,
    told: Option<Told>,
    /// Everything above as JSON.
    row: Value,
}

fn inspect(args: &Args, options: &SourceOptions, progress: &dyn Progress) -> Result<Inspected, Failure> {
    let (source, about, settings): (Box<dyn Source>, Option<About>, String) = match options.recording(progress)? {
        Some(recording) => {
            let (about, settings) = (About::of(&recording), recording.settings.conf().to_owned());
            (Box::new(recording), Some(about), settings)
        }
        None => (options.resolve(progress)?, None, String::new()),
    };
    let once = |stage: &str| ProgressSource::stage(&*source, progress, stage, 1);
    let summary = trace::check(&once("looking through it")).map_err(Failure::usage)?;
    let needed = Needed::of(&*source, args.pack, progress)?;
    let told = if args.moment.is_asked() { Some(args.moment.tell(&*source, &settings, progress)?) } else { None };
    let name = source.name().to_owned();
    let mut inspected = Inspected { name, summary, needed, about, told, row: Value::Null };
    inspected.row = inspected.row()?;
    Ok(inspected)
}

impl Render for Inspected {
    type Row = Value;

    fn rows(&self) -> &[Value] {
        std::slice::from_ref(&self.row)
    }

    fn text(&self, medium: Medium) -> String {
        let mut facts = facts(&self.name, &self.summary, &self.needed, self.about.as_ref());
        if let Medium::Terminal(terminal) = medium
            && self.summary.live_over_time.len() > 1
        {
            facts.push_str(&plot::plot("\nlive memory over events", &self.summary.live_over_time, terminal));
        }
        // A question about one moment needs no histograms.
        facts + &self.told.as_ref().map_or_else(|| histograms(&self.summary), |told| told.text(medium))
    }
}

impl Inspected {
    fn row(&self) -> Result<Value, Failure> {
        let mut row = serde_json::to_value(&self.summary)?;
        if let Some(fields) = row.as_object_mut() {
            fields.insert("source".to_owned(), self.name.as_str().into());
            fields.insert("needs".to_owned(), json!(self.needed));
            if let Some(about) = &self.about {
                fields.insert("recording".to_owned(), json!(about));
            }
            fields.extend(self.told.iter().flat_map(Told::fields));
        }
        Ok(row)
    }
}

fn facts(name: &str, summary: &Summary, needed: &Needed, about: Option<&About>) -> String {
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<12} {value}");
    };
    let kinds: Vec<String> = summary.by_kind.iter().map(|(kind, count)| format!("{count} {}", kind.name())).collect();
    line("source", name.to_owned());
    line("events", format!("{}: {}", summary.events, kinds.join(", ")));
    line("streams", format!("{}, threads {}", summary.streams, summary.threads));
    line("requested", format!("{} in all, largest {}", Bytes(summary.requested_bytes), Bytes(summary.largest_request)));
    line(
        "peak live",
        format!("{} in {} blocks, at event {}", Bytes(summary.peak.bytes), summary.peak.blocks, summary.peak.event),
    );
    if summary.host_peak.bytes > 0 {
        line("peak pinned", format!("{} in {} buffers", Bytes(summary.host_peak.bytes), summary.host_peak.blocks));
    }
    line("at the end", format!("{} blocks alive, {}", summary.live_blocks, Bytes(summary.live_bytes)));
    if summary.steps > 0 {
        line("steps", summary.steps.to_string());
    }
    if !summary.phases.is_empty() {
        line("phases", summary.phases.join(", "));
    }
    if summary.span.0 > 0 {
        line("time span", summary.span.to_string());
    }
    out.push_str(&inspect_needs::text(needed));
    out.extend(about.map(inspect_recording::text));
    out
}

fn histograms(summary: &Summary) -> String {
    let mut out = histogram("\nsizes", &summary.sizes, |bytes| Bytes(bytes).to_string());
    out.push_str(&histogram("\nlifetimes in events", &summary.lifetimes, |events| events.to_string()));
    out
}

/// One bar a power of two.
fn histogram(title: &str, powers: &Powers, show: impl Fn(u64) -> String) -> String {
    let mut out = format!("{title}\n");
    let most = powers.buckets().map(|bucket| bucket.count).max().unwrap_or(0);
    for bucket in powers.buckets() {
        // Even a single block among millions is seen.
        let width = (bucket.count * BAR_WIDTH).div_ceil(most.max(1));
        let bar = "#".repeat(usize::try_from(width).unwrap_or(0));
        let _ = writeln!(out, "  {:>9} .. {:<9} {:>9}  {bar}", show(bucket.from), show(bucket.to), bucket.count);
    }
    out
}
