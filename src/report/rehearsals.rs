//! The answer of a rehearsal: whether the program fits, its peaks, what holds memory, what is not known.

use std::fmt::Write as _;

use super::{
    Medium, Render, ReportError, advice,
    render::{TextTable, counted, maybe_bytes},
};
use crate::{
    answer::advise::Advice,
    base::{Bytes, FileText, path_text},
    rehearse::{
        compile_cache::CompileCacheState,
        facts::{CompileFacts, ReadFacts},
        record::{RankPeaks, RehearsalRecord, RehearsalVerdict},
        search::SearchedValue,
    },
};

/// How many lines of a list are shown.
const SHOWN: usize = 5;

/// All runs that a question needed.
#[derive(Clone, Debug, Default)]
pub struct RehearsalReport {
    /// One for each variant and card.
    pub records: Vec<RehearsalRecord>,
    /// Where the recordings are, if there are several.
    pub folder: String,
    /// The range of `--largest`.
    pub searched: Option<SearchedValue>,
    /// What held memory in the record that is explained: see [`RehearsalReport::explained`].
    pub holders: MemoryHolders,
    /// The allocator settings for it.
    pub advice: Option<Advice>,
}

/// The call sites that held most memory, in descending order.
#[derive(Clone, Debug, Default)]
pub struct MemoryHolders {
    /// Whether that is where memory ran out; otherwise it is at the peak.
    pub at_failure: bool,
    /// Bytes and call sites.
    pub sites: Vec<(u64, FileText)>,
}

impl RehearsalReport {
    /// The record whose details are shown: the first that does not fit, otherwise the first.
    #[must_use]
    pub fn explained(&self) -> Option<&RehearsalRecord> {
        let is_bad = |record: &&RehearsalRecord| record.verdict != RehearsalVerdict::Fits;
        self.records.iter().find(is_bad).or(self.records.first())
    }
}

impl Render for RehearsalReport {
    type Row = RehearsalRecord;

    fn rows(&self) -> &[RehearsalRecord] {
        &self.records
    }

    fn csv(&self) -> Result<String, ReportError> {
        Err(ReportError::NoCsv)
    }

    fn text(&self, medium: Medium) -> String {
        let Some(explained) = self.explained() else { return String::new() };
        let mut text = match &*self.records {
            [record] => {
                let headline = headline(record, self.searched.as_ref());
                let (peaks, files) = (line("peak", &peaks(record)), line("recording", &files(record)));
                format!("{headline}\n{peaks}\n{files}\n{}", ranks(record))
            }
            records => several(self, records, medium),
        };
        if self.records.len() > 1 && explained.verdict != RehearsalVerdict::Fits {
            let _ = writeln!(text, "{}", headline(explained, self.searched.as_ref()));
        }
        if let Some(advice) = &self.advice {
            let _ = writeln!(text, "{}", line("advice", &advice::one_line(advice)));
        }
        text.push_str(&details(explained, &self.holders));
        text
    }
}

/// Whether it fits on one card.
pub(super) fn headline(record: &RehearsalRecord, searched: Option<&SearchedValue>) -> String {
    let mut place = format!("{} ({})", record.card, Bytes(record.total_bytes));
    if let Some(limit) = record.limit_bytes {
        let _ = write!(place, " under a limit of {}", Bytes(limit));
    }
    let with = match (searched, record.value) {
        (Some(searched), Some(value)) => format!(" with {}={value}", searched.name),
        _ => String::new(),
    };
    let largest = match (searched, record.value) {
        (Some(searched), Some(value)) if value == searched.high => {
            format!("{with}, the end of the range (larger values were not tried),")
        }
        (Some(_), Some(_)) => format!("{with}, the largest value that fits,"),
        _ => String::new(),
    };
    let failure = record.failure.as_deref().unwrap_or("ended");
    match (record.verdict, &record.oom) {
        (RehearsalVerdict::Fits, _) => {
            let left =
                record.left_bytes().map_or_else(String::new, |left| format!(": {} are left at the peak", Bytes(left)));
            format!("fits{largest} on {place}{left}{}", condition(record))
        }
        (RehearsalVerdict::DoesNotFit, Some(oom)) => format!(
            "does not fit{with} on {place}: out of memory in step {}, with {} allocated and {} reserved, at a request for {}{}",
            oom.step,
            Bytes(oom.allocated),
            Bytes(oom.reserved),
            Bytes(oom.request),
            condition(record)
        ),
        (RehearsalVerdict::DoesNotFit, None) => format!("does not fit{with} on {place}"),
        (RehearsalVerdict::Failed, _) => format!("not known{with} for {place}: the program {failure}"),
        (RehearsalVerdict::TimedOut | RehearsalVerdict::Interrupted, _) => {
            format!("not known{with} for {place}: the program {failure}; the figures are those up to that moment")
        }
    }
}

/// What the verdict depends on, where sizes follow counts that a GPU would compute.
fn condition(record: &RehearsalRecord) -> &'static str {
    let counted = record.assumptions.iter().any(|name| name.raw() == "nonzero");
    if counted { ", if the counts that were assumed hold (see assumed)" } else { "" }
}

/// What it took at most.
pub(super) fn peaks(record: &RehearsalRecord) -> String {
    let (Some(allocated), Some(reserved)) = (record.peak_allocated_bytes, record.peak_reserved_bytes) else {
        return "nothing was recorded".to_owned();
    };
    let mut text = format!("{} allocated, {} reserved", Bytes(allocated), Bytes(reserved));
    if let Some(card) = record.peak_card_bytes {
        let _ = write!(text, ", {} of the card with its context", Bytes(card));
    }
    if record.processes > 1 {
        let _ = write!(text, " by the rank that reserved most of {}", record.processes);
    }
    if record.retries > 0 {
        let _ = write!(text, ", {}", counted(record.retries as usize, "retry", "retries"));
    }
    let steps = counted(record.steps as usize, "step", "steps");
    let _ = write!(text, "; {steps} in {:.1} s", record.wall_seconds);
    if record.steps > record.settled_after && record.settled_after > 0 {
        let _ = write!(text, ", the peaks did not rise after step {}", record.settled_after);
    } else if record.stopped && record.steps > 1 {
        text.push_str(", the peaks rose in the last one: more steps may need more");
    }
    text
}

/// Where the recordings are, and what to do with them.
pub(super) fn files(record: &RehearsalRecord) -> String {
    let Some(first) = record.recordings.first() else { return "none was written".to_owned() };
    let source = match record.recordings.len() {
        1 => first.clone(),
        _ => first.rsplit_once('/').map_or(".", |(folder, _)| folder).to_owned(),
    };
    let limit = record.limit_bytes.map(|limit| format!(" --limit {limit}B"));
    let card = limit.unwrap_or_else(|| format!(" --card {}", record.card));
    format!("{source}; next: oomph advise {source}{card}")
}

/// The peaks of each rank; ranks with the same peaks share a line.
fn ranks(record: &RehearsalRecord) -> String {
    let mut groups: Vec<(&RankPeaks, Vec<u32>)> = Vec::new();
    for one in &record.ranks {
        let same = |other: &RankPeaks| RankPeaks { rank: one.rank, ..other.clone() } == *one;
        match groups.iter_mut().find(|(other, _)| same(other)) {
            Some((_, ranks)) => ranks.push(one.rank),
            None => groups.push((one, vec![one.rank])),
        }
    }
    let mut text = String::new();
    for (peaks, ranks) in groups {
        let label = format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranges(&ranks));
        let ran_out = if peaks.ran_out { ", and ran out of memory" } else { "" };
        let (allocated, reserved) = (Bytes(peaks.allocated_bytes), Bytes(peaks.reserved_bytes));
        let _ = writeln!(text, "{}", line(&label, &format!("{allocated} allocated, {reserved} reserved{ran_out}")));
    }
    text
}

/// Numbers in order, such as 0-3,5.
fn ranges(numbers: &[u32]) -> String {
    let mut found: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match found.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => found.push((number, number)),
        }
    }
    let text = |&(start, end): &(u32, u32)| if start == end { start.to_string() } else { format!("{start}-{end}") };
    found.iter().map(text).collect::<Vec<_>>().join(",")
}

fn line(label: &str, value: &str) -> String {
    format!("{label:<12} {value}")
}

/// In how many cases it fits, and in which.
pub(super) fn tally(records: &[RehearsalRecord]) -> String {
    let fitting: Vec<&RehearsalRecord> = records.iter().filter(|one| one.verdict == RehearsalVerdict::Fits).collect();
    let name = |record: &RehearsalRecord| match record.variant.as_deref().filter(|words| !words.is_empty()) {
        Some(variant) => format!("{} with {variant}", record.card),
        None => record.card.clone(),
    };
    let names = if fitting.is_empty() || fitting.len() == records.len() {
        String::new()
    } else {
        format!(": {}", fitting.iter().map(|record| name(record)).collect::<Vec<_>>().join(", "))
    };
    let failing = records.iter().filter(|one| one.verdict == RehearsalVerdict::DoesNotFit).count();
    let unknown = match records.len() - fitting.len() - failing {
        0 => String::new(),
        unknown => format!("; not known for {unknown}"),
    };
    format!("fits in {} of {} cases{names}{unknown}", fitting.len(), records.len())
}

/// Several cards or variants: one line in words, then a table.
fn several(report: &RehearsalReport, records: &[RehearsalRecord], medium: Medium) -> String {
    let fitting: Vec<&RehearsalRecord> = records.iter().filter(|one| one.verdict == RehearsalVerdict::Fits).collect();
    let is_unknown =
        |one: &RehearsalRecord| !matches!(one.verdict, RehearsalVerdict::Fits | RehearsalVerdict::DoesNotFit);
    let mut text = format!("{}\n", tally(records));
    let most =
        fitting.iter().filter_map(|record| Some((record.peak_reserved_bytes?, record.peak_allocated_bytes?))).max();
    let peak = most.map_or_else(
        || if records.iter().any(is_unknown) { "not known" } else { "it fits in no case" }.to_owned(),
        |(reserved, allocated)| {
            format!("at most {} allocated, {} reserved where it fits", Bytes(allocated), Bytes(reserved))
        },
    );
    let _ = writeln!(text, "{}", line("peak", &peak));
    let next = records
        .iter()
        .find_map(|record| Some(format!("oomph advise {} --card {}", record.recordings.first()?, record.card)));
    let next = next.map_or_else(String::new, |next| format!("; next: {next}"));
    let _ = writeln!(text, "{}\n", line("recordings", &format!("{}{next}", report.folder)));
    text + &table(report, records, medium)
}

fn table(report: &RehearsalReport, records: &[RehearsalRecord], medium: Medium) -> String {
    let searched = report.searched.as_ref().map(|searched| format!("largest\n{}", searched.name));
    let with_variants = records.iter().any(|record| record.variant.is_some());
    let mut headings = if with_variants { vec!["variant"] } else { Vec::new() };
    headings.extend(["card", "memory", "verdict"]);
    headings.extend(searched.as_deref());
    headings.extend(["peak\nallocated", "peak\nreserved", "left", "steps"]);
    let first_number = if with_variants { 4 } else { 3 };
    let mut table = TextTable::new(&headings, medium).with_numbers(first_number..);
    for record in records {
        let mut cells = Vec::new();
        if with_variants {
            let variant = record.variant.as_deref().unwrap_or_default();
            cells.push(if variant.is_empty() { "as it is".to_owned() } else { variant.to_owned() });
        }
        let fits = record.verdict == RehearsalVerdict::Fits;
        cells.extend([record.card.clone(), Bytes(record.total_bytes).to_string(), verdict(record)]);
        if searched.is_some() {
            let value = record.value.filter(|_| fits);
            let is_end = report.searched.as_ref().map(|searched| searched.high) == value;
            let or_more = if is_end { " or more" } else { "" };
            cells.push(value.map_or_else(|| "none".to_owned(), |value| format!("{value}{or_more}")));
        }
        cells.extend([
            maybe_bytes(record.peak_allocated_bytes),
            maybe_bytes(record.peak_reserved_bytes),
            maybe_bytes(record.left_bytes().filter(|_| fits)),
            record.steps.to_string(),
        ]);
        table.row(cells);
    }
    let last = headings.len() - 1;
    table.fit(&[last, last - 3, last - 1]);
    table.finish("", [])
}

/// How it ended, in a few words.
pub(super) fn verdict(record: &RehearsalRecord) -> String {
    match record.verdict {
        RehearsalVerdict::Fits => "fits".to_owned(),
        RehearsalVerdict::DoesNotFit => match &record.oom {
            Some(oom) => format!("out of memory in step {}", oom.step),
            None => "does not fit".to_owned(),
        },
        _ => record.failure.clone().unwrap_or_else(|| "failed".to_owned()),
    }
}

/// The line of the request that failed, and what the driver had then.
pub(super) fn runs_out(record: &RehearsalRecord) -> Option<String> {
    let oom = record.oom.as_ref()?;
    let place = oom.r#where.as_ref().map_or_else(|| "an unknown line".to_owned(), FileText::to_string);
    let went_on = if record.failure.is_none() { "; the program caught the error and went on" } else { "" };
    let free = match record.limit_bytes {
        Some(_) => String::new(),
        None => format!(", when the driver had {} free", Bytes(oom.free)),
    };
    Some(format!("at {place}{free}{went_on}"))
}

/// What is not known or assumed, each with a label.
pub(super) fn notes(record: &RehearsalRecord) -> Vec<(&'static str, String)> {
    let mut notes = Vec::new();
    if let Some(compile) = &record.compile {
        notes.push(("compile", compile_note(compile, &record.compile_cache)));
    }
    if !record.reads.is_empty() {
        let places = read_places(&record.reads).into_iter().map(|(count, place)| format!("{count} {place}"));
        let text = format!("{}: {}", unknown(&record.reads), places.collect::<Vec<_>>().join("; "));
        notes.push(("not known", text));
    }
    notes.extend(assumed(record));
    notes
}

/// Where it runs out, what holds memory, what is not known.
fn details(record: &RehearsalRecord, holders: &MemoryHolders) -> String {
    let mut text = String::new();
    if let Some(words) = runs_out(record) {
        let _ = writeln!(text, "{}", line("runs out", &words));
    }
    if !holders.sites.is_empty() {
        text.push_str(if holders.at_failure { "held most then\n" } else { "held most at the peak\n" });
        for (bytes, site) in holders.sites.iter().take(SHOWN) {
            let _ = writeln!(text, "  {:>10}  {site}", Bytes(*bytes).to_string());
        }
    }
    if let Some(compile) = &record.compile {
        let _ = writeln!(text, "{}", line("compile", &compile_note(compile, &record.compile_cache)));
    }
    if !record.reads.is_empty() {
        let _ = writeln!(text, "{}", line("not known", &unknown(&record.reads)));
        for (count, place) in read_places(&record.reads) {
            match count.is_empty() {
                true => drop(writeln!(text, "  {place}")),
                false => drop(writeln!(text, "  {count:>10}  {place}")),
            }
        }
    }
    for (label, words) in assumed(record) {
        let _ = writeln!(text, "{}", line(label, &words));
    }
    text
}

/// Assumptions, what was not served or recorded, and what is not known about the card.
fn assumed(record: &RehearsalRecord) -> Vec<(&'static str, String)> {
    let mut notes: Vec<(&'static str, String)> =
        record.assumptions.iter().map(|name| ("assumed", assumption(name, record))).collect();
    for (label, names) in [("not served", &record.unserved), ("problems", &record.problems)] {
        if !names.is_empty() {
            let names: Vec<String> = names.iter().map(FileText::to_string).collect();
            notes.push((label, names.join(", ")));
        }
    }
    if !record.card_is_measured {
        let note = format!(
            "the memory of {} is as PyTorch reports it on such a card, its context ({}) as on the H200: neither was measured",
            record.card,
            Bytes(record.context_bytes)
        );
        notes.push(("card", note));
    }
    notes
}

/// An assumption of the shadow GPU in words.
fn assumption(name: &FileText, record: &RehearsalRecord) -> String {
    let words = match name.raw() {
        "nonzero" => "half of the elements that are counted on the GPU are not zero, or the share given by --nonzero",
        "false" => "conditions on values that were not computed are false: a program does not stop early",
        "all_true" => "checks whether all elements have a property are true",
        "cudnn_convolution_workspace_by_cudnn" => return workspaces_by_cudnn(record),
        "cudnn_convolution_workspace_by_rule" => return workspaces_by_rule(record),
        "cudnn_recurrent_space_by_rule" => {
            "workspaces of recurrent layers follow a rule that was measured on the H200 with cuDNN 9 only"
        }
        "cudnn_workspace_unknown" => "some workspaces of cuDNN are unknown and taken as empty",
        "nccl_buffers_not_counted" => {
            "NCCL's own buffers are not in these figures, nor in PyTorch's: one rank alone took 558 MiB for its first group and \
             388 MiB for a second on an H200; with more ranks they are not known, so what is left is an upper bound"
        }
        "absent_ranks" => {
            "some ranks were not rehearsed: in exchanges, the data of the rehearsed rank stands for theirs"
        }
        "rank_did_not_contribute" => {
            "a value was read that another rank did not send within 10 minutes; it is not known"
        }
        "nccl_split_size" => "the sizes of groups that NCCL splits are unknown",
        other => return FileText::from(other).to_string(),
    };
    words.to_owned()
}

/// Values that decide what the program does next, but were not computed.
fn unknown(reads: &[ReadFacts]) -> String {
    let count: u64 = reads.iter().map(|read| read.count).sum();
    let values = counted(count as usize, "value was", "values were");
    format!("{values} read back from the GPU, which computes nothing: the figures hold if they do not decide shapes")
}

/// How often, and the line that reads; of many, the first ones and the number of the others.
fn read_places(reads: &[ReadFacts]) -> Vec<(String, String)> {
    let mut places = Vec::new();
    for read in reads.iter().take(SHOWN) {
        let place = if read.r#where.raw().is_empty() { "an unknown line".to_owned() } else { read.r#where.to_string() };
        let kernel = if read.kernel.raw().is_empty() {
            String::new()
        } else {
            format!(", made by {}", FileText::from(kernel_name(read.kernel.raw())))
        };
        places.push((format!("{} x", read.count), format!("{place}{kernel}")));
    }
    if reads.len() > SHOWN {
        places.push((String::new(), format!("and {} more", counted(reads.len() - SHOWN, "place", "places"))));
    }
    places
}

/// Workspaces of convolutions that the installed cuDNN gave.
fn workspaces_by_cudnn(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_cudnn as usize, "plan", "plans");
    format!(
        "workspaces of convolutions ({plans}) come from the installed cuDNN, asked for a card with these properties"
    )
}

/// Workspaces of convolutions that a rule gave.
fn workspaces_by_rule(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_rule as usize, "plan", "plans");
    let rule = "follow a rule from measurements on the H200";
    match &record.cudnn_reason {
        Some(reason) => format!(
            "workspaces of convolutions ({plans}) {rule}; peaks of whole networks were up to 16 % off. They come from cuDNN itself where it is installed \
             (nvidia-cudnn-cu12 or nvidia-cudnn-cu13, 9.8 or newer, for the CUDA of PyTorch); not used here: {reason}"
        ),
        None => format!(
            "workspaces of convolutions ({plans}) that the installed cuDNN refuses or cannot know without a GPU {rule}; peaks of \
             whole networks were up to 6 % off"
        ),
    }
}

/// What torch.compile did: the state of Inductor's cache, and kernels chosen by simulated times.
fn compile_note(compile: &CompileFacts, cache: &CompileCacheState) -> String {
    let hits = format!("{} of {}", compile.graphs_from_cache, compile.graphs_from_cache + compile.graphs_compiled);
    let mut text = match cache {
        CompileCacheState::Empty => "torch.compile began with an empty cache".to_owned(),
        CompileCacheState::Copied { from, files: 0 } => {
            format!("torch.compile began with an empty cache, as {} is", path_text(from))
        }
        CompileCacheState::Copied { from, files } => format!(
            "torch.compile used a copy of your cache {} ({files} files), in which it found {hits} graphs",
            path_text(from)
        ),
        CompileCacheState::NotCopied { from, reason } => {
            format!("torch.compile began with an empty cache: {} was not copied ({reason})", path_text(from))
        }
        CompileCacheState::Chosen { folder } => format!(
            "torch.compile used the cache that the program chose, {}, and found {hits} graphs in it",
            path_text(folder)
        ),
    };
    if compile.candidates_measured > 0 {
        text.push_str("; the peaks include what Inductor allocates while it measures kernels");
        let kernels = compile
            .kernels_chosen
            .map_or_else(|| "kernels were".to_owned(), |chosen| counted(chosen as usize, "kernel was", "kernels were"));
        let _ = write!(text, "; {kernels} chosen by simulated times, a GPU may choose others");
        if let CompileCacheState::Chosen { .. } = cache {
            text.push_str(": these choices are in that cache now, delete it before you use it with a GPU");
        }
    }
    text
}

/// The last name of a mangled C++ function, without its namespaces and template arguments: `multi_tensor_apply_kernel` for
/// `_ZN2at6native25multi_tensor_apply_kernelINS1_...`. Other names stay as they are.
fn kernel_name(mangled: &str) -> &str {
    let Some(mut rest) = mangled.strip_prefix("_Z") else { return mangled };
    rest = rest.strip_prefix('N').unwrap_or(rest);
    let mut last = None;
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(length) = rest[..digits].parse::<usize>() else { break };
        let Some(name) = rest.get(digits..digits + length) else { break };
        if !name.starts_with("_GLOBAL__N") {
            last = Some(name);
        }
        rest = &rest[digits + length..];
    }
    last.unwrap_or(mangled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::GIB,
        rehearse::facts::{OomFacts, ReadFacts},
        report::{Glyphs, Terminal, flowing},
    };

    fn fitting() -> RehearsalRecord {
        RehearsalRecord {
            card: "24GiB".to_owned(),
            total_bytes: 24 * GIB,
            context_bytes: GIB,
            card_is_measured: true,
            verdict: RehearsalVerdict::Fits,
            peak_allocated_bytes: Some(3 * GIB),
            peak_reserved_bytes: Some(4 * GIB),
            steps: 5,
            settled_after: 2,
            wall_seconds: 4.25,
            processes: 1,
            recordings: vec!["out/rank-0.pickle".to_owned()],
            ..RehearsalRecord::default()
        }
    }

    fn failing() -> RehearsalRecord {
        let oom = OomFacts {
            step: 1,
            request: GIB,
            allocated: 3 * GIB,
            reserved: 4 * GIB,
            r#where: Some("a.py:3 f".into()),
            ..OomFacts::default()
        };
        let failure = Some("ended with exit code 1".to_owned());
        RehearsalRecord {
            card: "4GiB".to_owned(),
            verdict: RehearsalVerdict::DoesNotFit,
            oom: Some(oom),
            failure,
            ..fitting()
        }
    }

    #[test]
    fn the_first_three_lines_answer() {
        let report = RehearsalReport { records: vec![fitting()], ..RehearsalReport::default() };
        let text = report.text(Medium::PIPE);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "fits on 24GiB (24.0 GiB): 19.0 GiB are left at the peak");
        assert_eq!(
            lines[1],
            "peak         3.00 GiB allocated, 4.00 GiB reserved; 5 steps in 4.2 s, the peaks did not rise after step 2"
        );
        assert_eq!(lines[2], "recording    out/rank-0.pickle; next: oomph advise out/rank-0.pickle --card 24GiB");
        assert_eq!(lines.len(), 3, "{text}");
    }

    #[test]
    fn ranks_with_the_same_peaks_share_a_line() {
        let rank =
            |rank, gib, ran_out| RankPeaks { rank, allocated_bytes: gib * GIB, reserved_bytes: gib * GIB, ran_out };
        let ranks = vec![rank(0, 3, false), rank(1, 2, false), rank(2, 2, false), rank(3, 3, true), rank(5, 2, false)];
        let report =
            RehearsalReport { records: vec![RehearsalRecord { ranks, ..fitting() }], ..RehearsalReport::default() };
        let text = report.text(Medium::PIPE);
        let expected = "rank 0       3.00 GiB allocated, 3.00 GiB reserved\n\
                        ranks 1-2,5  2.00 GiB allocated, 2.00 GiB reserved\n\
                        rank 3       3.00 GiB allocated, 3.00 GiB reserved, and ran out of memory\n";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn a_verdict_that_depends_on_assumed_counts_says_so() {
        let record = RehearsalRecord { assumptions: vec!["nonzero".into()], ..fitting() };
        let report = RehearsalReport { records: vec![record], ..RehearsalReport::default() };
        let text = report.text(Medium::PIPE);
        assert!(text.contains(" are left at the peak, if the counts that were assumed hold (see assumed)\n"), "{text}");
    }

    #[test]
    fn an_out_of_memory_names_step_request_and_line() {
        let report = RehearsalReport { records: vec![failing()], ..RehearsalReport::default() };
        let text = report.text(Medium::PIPE);
        assert!(
            text.starts_with("does not fit on 4GiB (24.0 GiB): out of memory in step 1, with 3.00 GiB allocated"),
            "{text}"
        );
        assert!(text.contains("runs out     at a.py:3 f, when the driver had 0 B free\n"), "{text}");
    }

    #[test]
    fn several_cards_are_a_table_with_the_first_failure_explained() {
        let report = RehearsalReport {
            records: vec![fitting(), failing()],
            folder: "out".to_owned(),
            ..RehearsalReport::default()
        };
        let text = report.text(Medium::PIPE);
        assert!(text.starts_with("fits in 1 of 2 cases: 24GiB\npeak "), "{text}");
        assert!(text.contains("out of memory in step 1") && text.contains("does not fit on 4GiB"), "{text}");
        let narrow = Medium::Terminal(Terminal { width: Some(80), glyphs: Glyphs::Lines });
        let text = flowing(&report.text(narrow), Some(80));
        let is_command = |line: &str| line.contains("oomph advise");
        assert!(text.lines().all(|line| line.chars().count() <= 80 || is_command(line)), "{text}");
    }

    /// A program that fails for another reason says nothing about memory.
    #[test]
    fn failed_programs_are_not_known() {
        let failed = || RehearsalRecord { verdict: RehearsalVerdict::Failed, ..failing() };
        let text = |records: Vec<RehearsalRecord>| {
            RehearsalReport { records, ..RehearsalReport::default() }.text(Medium::PIPE)
        };
        let unknown = text(vec![failed(), failed()]);
        assert!(unknown.starts_with("fits in 0 of 2 cases; not known for 2\npeak         not known\n"), "{unknown}");
        let none = text(vec![failing(), failing()]);
        assert!(none.starts_with("fits in 0 of 2 cases\npeak         it fits in no case\n"), "{none}");
    }

    #[test]
    fn values_that_were_read_back_are_named_by_line() {
        let reads = vec![ReadFacts {
            r#where: "moe.py:9 route".into(),
            kernel: "topk".into(),
            count: 40,
            ..ReadFacts::default()
        }];
        let report =
            RehearsalReport { records: vec![RehearsalRecord { reads, ..fitting() }], ..RehearsalReport::default() };
        let text = report.text(Medium::PIPE);
        assert!(text.contains("not known    40 values were read back from the GPU"), "{text}");
        assert!(text.contains("40 x  moe.py:9 route, made by topk"), "{text}");
    }

    #[test]
    fn the_source_of_workspaces_is_named_with_the_reason() {
        let mut record =
            RehearsalRecord { convolutions_by_cudnn: 12, convolutions_by_rule: 1, ..RehearsalRecord::default() };
        assert!(
            workspaces_by_cudnn(&record)
                .starts_with("workspaces of convolutions (12 plans) come from the installed cuDNN")
        );
        assert!(
            workspaces_by_rule(&record)
                .starts_with("workspaces of convolutions (1 plan) that the installed cuDNN refuses or")
        );
        record.cudnn_reason = Some("cuDNN 9 is not installed".into());
        assert!(workspaces_by_rule(&record).ends_with("not used here: cuDNN 9 is not installed"));
    }

    #[test]
    fn the_state_of_the_cache_is_said() {
        let mut compile =
            CompileFacts { graphs_compiled: 2, candidates_measured: 9, kernels_chosen: Some(4), ..Default::default() };
        let text = compile_note(&compile, &CompileCacheState::Empty);
        assert!(text.contains("began with an empty cache; the peaks include"), "{text}");
        assert!(text.contains("4 kernels were chosen by simulated times"), "{text}");
        compile.kernels_chosen = None;
        let text = compile_note(&compile, &CompileCacheState::Chosen { folder: "/c".into() });
        assert!(text.contains("/c, and found 0 of 2 graphs") && text.contains("delete it"), "{text}");
        compile.candidates_measured = 0;
        let copied = CompileCacheState::Copied { from: "/c".into(), files: 3 };
        assert_eq!(
            compile_note(&compile, &copied),
            "torch.compile used a copy of your cache /c (3 files), in which it found 0 of 2 graphs"
        );
    }

    #[test]
    fn namespaces_and_arguments_are_left_out() {
        let mangled = "_ZN2at6native54_GLOBAL__N__f8a10d72_21_ForeachPointwiseOp_cu_ef478fac25multi_tensor_apply_kernelINS1_8TensorIfEEEvT_";
        assert_eq!(kernel_name(mangled), "multi_tensor_apply_kernel");
        assert_eq!(kernel_name("_Z6kernelPf"), "kernel");
        for other in ["triton_poi_fused_0", "", "_Z", "_ZN99short", "_ZTV5Class"] {
            assert_eq!(kernel_name(other), other);
        }
    }
}
