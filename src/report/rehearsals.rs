//! The answer of a rehearsal: whether the program fits, its peaks, what holds memory, what is not known.

use std::fmt::Write as _;

use super::{
    Medium, Render, ReportError, advice,
    rehearsal_unknowns::{assumption, compile_note, unknown},
    render::{TextTable, counted, maybe_bytes},
};
use crate::{
    answer::advise::Advice,
    base::{Bytes, FileText},
    rehearse::{
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
                format!("{headline}\n{}\n{}\n{}", peaks(record), files(record), ranks(record))
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
fn headline(record: &RehearsalRecord, searched: Option<&SearchedValue>) -> String {
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

fn peaks(record: &RehearsalRecord) -> String {
    let (Some(allocated), Some(reserved)) = (record.peak_allocated_bytes, record.peak_reserved_bytes) else {
        return line("peak", "nothing was recorded");
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
    line("peak", &text)
}

fn files(record: &RehearsalRecord) -> String {
    let Some(first) = record.recordings.first() else { return line("recording", "none was written") };
    let source = match record.recordings.len() {
        1 => first.clone(),
        _ => first.rsplit_once('/').map_or(".", |(folder, _)| folder).to_owned(),
    };
    let limit = record.limit_bytes.map(|limit| format!(" --limit {limit}B"));
    let card = limit.unwrap_or_else(|| format!(" --card {}", record.card));
    line("recording", &format!("{source}; next: oomph advise {source}{card}"))
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

pub(super) fn line(label: &str, value: &str) -> String {
    format!("{label:<12} {value}")
}

/// Several cards or variants: one line in words, then a table.
fn several(report: &RehearsalReport, records: &[RehearsalRecord], medium: Medium) -> String {
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
    let mut text = format!("fits in {} of {} cases{names}{unknown}\n", fitting.len(), records.len());
    let most =
        fitting.iter().filter_map(|record| Some((record.peak_reserved_bytes?, record.peak_allocated_bytes?))).max();
    let peak = most.map_or_else(
        || if unknown.is_empty() { "it fits in no case" } else { "not known" }.to_owned(),
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
        let verdict = match record.verdict {
            RehearsalVerdict::Fits => "fits".to_owned(),
            RehearsalVerdict::DoesNotFit => match &record.oom {
                Some(oom) => format!("out of memory in step {}", oom.step),
                None => "does not fit".to_owned(),
            },
            _ => record.failure.clone().unwrap_or_else(|| "failed".to_owned()),
        };
        let fits = record.verdict == RehearsalVerdict::Fits;
        cells.extend([record.card.clone(), Bytes(record.total_bytes).to_string(), verdict]);
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
    table.finish("", [])
}

/// Where it runs out, what holds memory, what is not known.
fn details(record: &RehearsalRecord, holders: &MemoryHolders) -> String {
    let mut text = String::new();
    if let Some(oom) = &record.oom {
        let place = oom.r#where.as_ref().map_or_else(|| "an unknown line".to_owned(), FileText::to_string);
        let went_on = if record.failure.is_none() { "; the program caught the error and went on" } else { "" };
        let free = match record.limit_bytes {
            Some(_) => String::new(),
            None => format!(", when the driver had {} free", Bytes(oom.free)),
        };
        let _ = writeln!(text, "{}", line("runs out", &format!("at {place}{free}{went_on}")));
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
    text.push_str(&unknown(&record.reads));
    for name in &record.assumptions {
        let _ = writeln!(text, "{}", line("assumed", &assumption(name, record)));
    }
    for (label, names) in [("not served", &record.unserved), ("problems", &record.problems)] {
        if !names.is_empty() {
            let names: Vec<String> = names.iter().map(FileText::to_string).collect();
            let _ = writeln!(text, "{}", line(label, &names.join(", ")));
        }
    }
    if !record.card_is_measured {
        let note = format!(
            "the memory of {} is as PyTorch reports it on such a card, its context ({}) as on the H200: neither was measured",
            record.card,
            Bytes(record.context_bytes)
        );
        let _ = writeln!(text, "{}", line("card", &note));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::GIB,
        rehearse::facts::{OomFacts, ReadFacts},
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
}
