//! The findings of `oomph leaks`, and the memory of every step as CSV.

use serde::Serialize;

use super::{
    Medium, Render, ReportError,
    plot::{Extremes, plot},
    render::{TextTable, counted, maybe_bytes, signed_bytes},
    rows,
};
use crate::{
    answer::{
        holders::{GroupBy, Grower},
        leaks::{
            CourseKind, Doubt, Finding, LeftOut, Quantity, RecoverableBy, StepUse, StepsFrom, UnjudgedSource, Verdict,
        },
    },
    base::Bytes,
};

/// Of more steps, only the last ones are listed.
const MOST_STEPS_SHOWN: usize = 12;
/// Longer call sites are cut.
const LONGEST_NAME: usize = 100;

const HEADINGS: [&str; 9] = [
    "step",
    "kept",
    "needed\nabove it",
    "reserved",
    "stuck in\nthe cache",
    "blocks\nrequested",
    "of which\ntemporary",
    "temporary\nbytes",
    "freed\nlate",
];

/// Where a replay reserves something else than the recorded program did.
const AS_RECORDED: &str = "as recorded: a replay reserves another amount, because a recording does not contain the memory \
                           fraction, or was made under another allocator. What is stuck in the cache is unknown";
/// Below growing blocks that are named by their size.
pub(super) const WITHOUT_STACKS: &str =
    "no call stacks were recorded: record with stacks=\"python\", as `oomph record` does";

/// The columns that a narrow terminal loses first, by place.
const DISPENSABLE: [usize; 4] = [6, 7, 5, 4];

/// The answer for one source.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum LeakAnswer {
    /// What memory does.
    Judged(Box<Finding>),
    /// There is too little to judge.
    Unjudged(UnjudgedSource),
}

impl LeakAnswer {
    /// The verdict.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self {
            LeakAnswer::Judged(finding) => finding.verdict,
            LeakAnswer::Unjudged(unjudged) => unjudged.verdict,
        }
    }

    /// What was found, if there was enough to judge.
    #[must_use]
    pub fn finding(&self) -> Option<&Finding> {
        match self {
            LeakAnswer::Judged(finding) => Some(finding),
            LeakAnswer::Unjudged(_) => None,
        }
    }

    fn text(&self, top: usize, medium: Medium) -> String {
        match self {
            LeakAnswer::Judged(finding) => text(finding, top, medium),
            LeakAnswer::Unjudged(UnjudgedSource { source, doubt, reason, .. }) => {
                format!("{source}: cannot tell: {reason}\n{}", labelled("help", doubt.remedy()))
            }
        }
    }
}

/// The findings for one source or several.
pub struct LeakReport {
    /// One answer per source.
    pub findings: Vec<LeakAnswer>,
    /// How many growing call sites, tags or sizes are named.
    pub top: usize,
}

impl Render for LeakReport {
    type Row = LeakAnswer;

    fn rows(&self) -> &[LeakAnswer] {
        &self.findings
    }

    /// One line per step.
    fn csv(&self) -> Result<String, ReportError> {
        let steps = self.findings.iter().filter_map(LeakAnswer::finding).flat_map(|finding| {
            finding.per_step.iter().map(move |step| ((&finding.source, finding.verdict.name()), step))
        });
        rows::to_csv_with(&["source", "verdict"], steps)
    }

    fn text(&self, medium: Medium) -> String {
        self.findings.iter().map(|answer| answer.text(self.top, medium)).collect::<Vec<_>>().join("\n")
    }
}

/// A line below the verdict.
fn labelled(label: &str, value: &str) -> String {
    format!("  {label:<12} {value}\n")
}

/// What is said about a finding, each with a label.
pub(super) fn facts(finding: &Finding) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    let mut line = |label: &'static str, value: String| facts.push((label, value));
    if let Some(doubt) = finding.doubt {
        line("help", help(finding, doubt));
    }
    line("slope", slope(finding));
    if let Some(accepted) = finding.baseline_bytes_per_step {
        line("baseline", format!("{} per step", signed_bytes(accepted)));
    }
    line("judged", format!("steps {} to {}, {}", finding.first_step, finding.last_step, found_by(&finding.steps_from)));
    if let Some(left_out) = &finding.left_out {
        line("left out", left_out_text(left_out));
    }
    if finding.reserved_from_recording {
        line("reserved", AS_RECORDED.to_owned());
    }
    line("kept", format!("{} on average", Bytes(finding.level_bytes)));
    if finding.collected_bytes > 0 {
        line("freed late", format!("{} in blocks of several ages at once", Bytes(finding.collected_bytes)));
    }
    if let Some(bytes) = finding.left_behind_bytes {
        let last = finding.last_step;
        line("left behind", format!("{} per step, in blocks that are alive when step {last} ends", Bytes(bytes)));
    }
    if let Some(advice) = advice(finding) {
        line("recoverable", advice.to_owned());
    }
    if let Some(step) = finding.ran_out_at_step {
        line("OOM", format!("in step {step}"));
    }
    if let (Some(step), Some(capacity)) = (finding.runs_out_at_step, finding.capacity_bytes) {
        line("will run out", format!("in step {step}, with {} available", Bytes(capacity)));
    }
    let has_replay = finding.steps_from != StepsFrom::Snapshots;
    if finding.verdict == Verdict::Leak && finding.capacity_bytes.is_none() && has_replay {
        line("will run out", "not known when: the recording does not name the GPU; --card does".to_owned());
    }
    facts
}

/// The finding in words, the `top` that grow most, the last steps, and what all steps keep as a
/// plot.
fn text(finding: &Finding, top: usize, medium: Medium) -> String {
    let mut out = format!("{}: {}\n", finding.source, verdict(finding));
    let mut line = |label: &str, value: String| out.push_str(&labelled(label, &value));
    for (label, value) in facts(finding) {
        line(label, value);
    }
    for (place, grower) in finding.growers.iter().take(top).enumerate() {
        line(if place == 0 { "growing" } else { "" }, growth(grower));
    }
    if finding.growers.first().is_some_and(|grower| grower.by == GroupBy::Size) {
        line("", WITHOUT_STACKS.to_owned());
    }
    let unnamed = finding.growers.len().saturating_sub(top);
    if unnamed > 0 {
        line("", format!("and {unnamed} more; --top {} names them", finding.growers.len()));
    }
    out.push_str(&steps(&finding.per_step, medium));
    if let Medium::Terminal(terminal) = medium
        && finding.per_step.len() > 1
    {
        let kept: Vec<Extremes> = finding.per_step.iter().map(|step| (step.kept_bytes, step.kept_bytes)).collect();
        out.push_str(&plot("kept per step", &kept, terminal));
    }
    out
}

/// What would help, with the number of steps that did not suffice.
fn help(finding: &Finding, doubt: Doubt) -> String {
    match doubt {
        Doubt::WideInterval | Doubt::ShortRise | Doubt::RecentStop | Doubt::BlocksFreed => {
            format!("{}: {} were judged", doubt.remedy(), finding.last_step + 1 - finding.first_step)
        }
        _ => doubt.remedy().to_owned(),
    }
}

fn left_out_text(left_out: &LeftOut) -> String {
    let what = if left_out.is_exit { "when the program exits" } else { "after the last step" };
    let events = left_out.events;
    format!("the last {events} events, which free {} {what}", Bytes(left_out.freed_bytes))
}

pub(super) fn slope(finding: &Finding) -> String {
    format!("{} ({})", growth_words(finding), interval(finding))
}

/// What a step adds.
pub(super) fn growth_words(finding: &Finding) -> String {
    let quantity = match finding.quantity {
        Quantity::KeptBytes => "kept memory",
        Quantity::StuckBytes => "free memory that cannot be released",
        Quantity::ReservedBytes => "reserved memory",
    };
    format!("{} of {quantity} per step", signed_bytes(finding.bytes_per_step))
}

/// How well the slope is known.
pub(super) fn interval(finding: &Finding) -> String {
    format!(
        "95 % interval {} to {}, p = {}",
        signed_bytes(finding.bytes_per_step_low),
        signed_bytes(finding.bytes_per_step_high),
        probability(finding.p_value),
    )
}

fn growth(grower: &Grower) -> String {
    format!(
        "{:>10} per step, {} -> {} blocks: {}",
        signed_bytes(grower.bytes_per_step),
        grower.blocks_before,
        grower.blocks_after,
        shortened(&grower_name(grower)),
    )
}

/// What a growing group of blocks is called.
pub(super) fn grower_name(grower: &Grower) -> String {
    match (grower.by, grower.name.raw().parse()) {
        (GroupBy::Size, Ok(size)) => format!("blocks of {}", Bytes(size)),
        _ => grower.name.to_string(),
    }
}

pub(super) fn verdict(finding: &Finding) -> String {
    let words = match (finding.verdict, finding.course) {
        (Verdict::CannotTell, _) => {
            return format!("cannot tell: {}", finding.doubt.unwrap_or(Doubt::WideInterval).sentence());
        }
        (Verdict::Leak, _) if finding.left_behind_bytes.is_some() => "leak: blocks pile up from step to step",
        (Verdict::Leak, _) => "leak: live memory grows from step to step",
        (Verdict::GrowingCache, _) => "growing cache: whole free segments pile up",
        (Verdict::Fragmentation, _) => "fragmentation: free memory piles up between live blocks",
        (Verdict::Steady, _) if finding.saw_tooth => "steady: it rises and falls again",
        (Verdict::Steady, CourseKind::Negligible) => "steady: the growth is too small to matter so far",
        (Verdict::Steady, CourseKind::Saturated) => "steady: it grew and has stopped growing",
        (Verdict::Steady, _) => "steady",
    };
    words.to_owned()
}

fn advice(finding: &Finding) -> Option<&'static str> {
    match (finding.verdict, finding.recoverable_by) {
        (Verdict::Steady, _) | (Verdict::CannotTell, _) => None,
        (_, RecoverableBy::EmptyCache) => {
            Some("by torch.cuda.empty_cache(); PyTorch's allocator does the same before a request fails")
        }
        (_, RecoverableBy::None) => Some("no: live blocks hold the segments; expandable segments avoid this"),
        (_, RecoverableBy::Unknown) => {
            Some("unknown: try gc.collect(), which helps only if reference cycles hold it; empty_cache does not help")
        }
    }
}

fn found_by(steps: &StepsFrom) -> String {
    match steps {
        StepsFrom::Marks => "as marked".to_owned(),
        StepsFrom::Phase(name) => format!("each beginning at '{name}'"),
        StepsFrom::Period(requests) => format!("a repeating pattern of {requests} requests"),
        StepsFrom::LowPoints => "each beginning at a low point of memory".to_owned(),
        StepsFrom::Windows => "parts of equal length: the source has no marks and no period".to_owned(),
        StepsFrom::Snapshots => "one per snapshot".to_owned(),
    }
}

fn probability(p_value: f64) -> String {
    match p_value {
        // A line through every point leaves no doubt that a double can express.
        0.0 => "0".to_owned(),
        _ if p_value >= 0.001 => format!("{p_value:.3}"),
        _ => format!("{p_value:.1e}"),
    }
}

fn shortened(name: &str) -> String {
    match name.char_indices().nth(LONGEST_NAME) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

fn steps(steps: &[StepUse], medium: Medium) -> String {
    let mut table = TextTable::new(&HEADINGS, medium).with_numbers(..);
    let left_out = steps.len().saturating_sub(MOST_STEPS_SHOWN);
    let bytes = |bytes: Option<u64>| match bytes {
        Some(0) => "-".to_owned(),
        bytes => maybe_bytes(bytes),
    };
    let count = |count: Option<u64>| count.map_or_else(String::new, |count| count.to_string());
    let figures = |step: &StepUse| {
        [
            bytes(Some(step.kept_bytes)),
            bytes(step.transient_bytes),
            bytes(Some(step.reserved_bytes)),
            bytes(step.stuck_bytes),
            count(step.born_blocks),
            count(step.passing_blocks),
            bytes(step.passing_bytes),
            bytes(step.collected_bytes),
        ]
    };
    let is_one_row = |one: &StepUse, next: &StepUse| medium != Medium::Markdown && figures(one) == figures(next);
    for row in steps[left_out..].chunk_by(is_one_row) {
        let (first, last) = (row[0].step, row[row.len() - 1].step);
        let name = if first == last { first.to_string() } else { format!("{first}-{last}") };
        table.row([name].into_iter().chain(figures(&row[0])));
    }
    table.fit(&DISPENSABLE);
    let earlier = (left_out > 0)
        .then(|| format!("{} in --format csv.", counted(left_out, "earlier step is", "earlier steps are")));
    table.finish(&earlier.unwrap_or_default(), [])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        answer::leaks::{GrowthThreshold, ObservedSteps, judge},
        base::MIB,
    };

    fn report(growth: u64) -> LeakReport {
        let mut observed = ObservedSteps::of_snapshots(&[]);
        observed.name = "builder".to_owned();
        observed.steps = (0..20)
            .map(|step| StepUse {
                step,
                kept_bytes: 100 * MIB + step as u64 * growth,
                reserved_bytes: 900 * MIB,
                ..StepUse::default()
            })
            .collect();
        observed.end_judged = 20;
        observed.capacity = Some(1000 * MIB);
        let finding = judge(&observed, None, &GrowthThreshold::default()).unwrap();
        LeakReport { findings: vec![LeakAnswer::Judged(Box::new(finding))], top: 10 }
    }

    #[test]
    fn leak_shows_its_slope_and_its_end() {
        let text = report(10 * MIB).text(Medium::PIPE);
        for words in [
            "builder: leak: live memory grows",
            "10.0 MiB of kept memory per step (95 % interval 10.0 MiB to 10.0 MiB, p = 0)",
            "will run out in step 91, with 1000 MiB available",
            "unknown: try gc.collect()",
            "8 earlier steps",
        ] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        let steady = report(0).text(Medium::PIPE);
        assert!(steady.contains("builder: steady\n") && !steady.contains("recoverable"), "{steady}");
    }

    #[test]
    fn json_has_all_names_and_csv_a_line_per_step() {
        let found = report(10 * MIB);
        let json = found.json();
        let row = &json["rows"][0];
        assert_eq!((&row["verdict"], &row["recoverable_by"]), (&"leak".into(), &"unknown".into()));
        assert_eq!(row["bytes_per_step"], 10.0 * MIB as f64);
        for name in ["bytes_per_step_low", "bytes_per_step_high", "p_value", "runs_out_at_step", "steps_from"] {
            assert!(!row[name].is_null(), "{name} is missing in {row}");
        }
        let csv = found.csv().unwrap();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 21);
        assert!(lines[0].starts_with("source,verdict,step,kept_bytes,"), "{}", lines[0]);
        assert!(lines[2].starts_with("builder,leak,1,115343360,"), "{}", lines[2]);
        assert_eq!(lines[0].split(',').count(), lines[2].split(',').count());
    }
}
