//! What `leaks` found: for people, as JSON, and step by step as CSV.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment};

use super::{
    ReportError,
    narrow::fit,
    plot::{Pen, plot},
    table::{dress_for_terminal, headed},
};
use crate::{
    answer::leaks::{CourseKind, Finding, GrownBy, Quantity, RecoverableBy, StepUse, StepsFrom, Verdict},
    base::Bytes,
    measure::SCHEMA,
};

/// More steps than this are not listed one by one; the last ones are.
const MOST_STEPS_SHOWN: usize = 12;
/// The longest call site that fits on a line.
const LONGEST_NAME: usize = 100;

const HEADINGS: [&str; 9] = [
    "step",
    "kept",
    "needed\nabove",
    "reserved",
    "stuck in\nthe cache",
    "blocks\nborn",
    "of which\npassing",
    "passing\nbytes",
    "collected",
];

/// What can best be missed where a terminal is narrow, by place.
const DISPENSABLE: [usize; 4] = [6, 7, 5, 4];

/// The finding in words, the `top` names that grow, the last steps, and what all steps keep as a plot.
#[must_use]
pub fn leaks(finding: &Finding, top: usize, width: Option<u16>, pen: Option<Pen>) -> String {
    let mut out = format!("{}: {}\n", finding.source, verdict(finding));
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "  {label:<12} {value}");
    };
    line(
        "slope",
        format!(
            "{} a step of {} (95 % interval {} to {}, p = {})",
            signed(finding.bytes_per_step),
            quantity(finding.quantity),
            signed(finding.bytes_per_step_low),
            signed(finding.bytes_per_step_high),
            probability(finding.p_value),
        ),
    );
    if let Some(accepted) = finding.baseline_bytes_per_step {
        line("baseline", format!("{} a step of the same", signed(accepted)));
    }
    line("judged", format!("steps {} to {}, {}", finding.first_step, finding.last_step, found_by(&finding.steps_from)));
    line("kept", format!("{} on average", Bytes(finding.level_bytes)));
    if finding.collected_bytes > 0 {
        line("collected", format!("{} in blocks of several ages at once", Bytes(finding.collected_bytes)));
    }
    if let Some(advice) = advice(finding) {
        line("recoverable", advice.to_owned());
    }
    if let Some(step) = finding.ran_out_at_step {
        line("ran out", format!("in step {step}"));
    }
    if let (Some(step), Some(capacity)) = (finding.runs_out_at_step, finding.capacity_bytes) {
        line("will run out", format!("in step {step}, with {} there", Bytes(capacity)));
    }
    for (place, grower) in finding.growers.iter().take(top).enumerate() {
        let name = match grower.by {
            GrownBy::Size => {
                grower.name.parse().map_or_else(|_| grower.name.clone(), |size| format!("blocks of {}", Bytes(size)))
            }
            GrownBy::Site | GrownBy::Tag => shortened(&grower.name),
        };
        line(
            if place == 0 { "who grows" } else { "" },
            format!(
                "{:>10} a step, {} -> {} blocks: {name}",
                signed(grower.bytes_per_step),
                grower.blocks_before,
                grower.blocks_after
            ),
        );
    }
    let unnamed = finding.growers.len().saturating_sub(top);
    if unnamed > 0 {
        line("", format!("and {unnamed} more; --top {} names them", finding.growers.len()));
    }
    out.push_str(&steps(&finding.per_step, width));
    if let Some(pen) = pen
        && finding.per_step.len() > 1
    {
        let kept: Vec<u64> = finding.per_step.iter().map(|step| step.kept_bytes).collect();
        out.push_str(&plot("kept by step", &kept, pen));
    }
    out
}

/// `{"schema": 1, "rows": [...]}`, a row a finding, in bytes.
#[must_use]
pub fn leaks_json(findings: &[Finding]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": findings }))
}

/// One line a step.
pub fn leaks_csv(findings: &[Finding]) -> Result<String, ReportError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for finding in findings {
        for step in &finding.per_step {
            writer.serialize((&finding.source, finding.verdict.name(), Columns(step)))?;
        }
    }
    let bytes = writer.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))?;
    Ok(format!("source,verdict,{}\n{}", STEP_COLUMNS.join(","), String::from_utf8_lossy(&bytes)))
}

/// The columns of a step, in order.
const STEP_COLUMNS: [&str; 12] = [
    "step",
    "kept_bytes",
    "allocated_bytes",
    "peak_allocated_bytes",
    "transient_bytes",
    "reserved_bytes",
    "stuck_bytes",
    "releasable_bytes",
    "born_blocks",
    "passing_blocks",
    "passing_bytes",
    "collected_bytes",
];

/// A step as cells: the csv crate takes no struct inside a row.
struct Columns<'a>(&'a StepUse);

impl serde::Serialize for Columns<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let step = self.0;
        [
            step.step as u64,
            step.kept_bytes,
            step.allocated_bytes,
            step.peak_allocated_bytes,
            step.transient_bytes,
            step.reserved_bytes,
            step.stuck_bytes,
            step.releasable_bytes,
            step.born_blocks,
            step.passing_blocks,
            step.passing_bytes,
            step.collected_bytes,
        ]
        .serialize(serializer)
    }
}

fn verdict(finding: &Finding) -> &'static str {
    match (finding.verdict, finding.course) {
        (Verdict::Leak, _) => "leak: blocks pile up that nobody gives back",
        (Verdict::GrowingCache, _) => "growing cache: whole free segments pile up",
        (Verdict::Fragmentation, _) => "fragmentation: free memory piles up between live blocks",
        (Verdict::Steady, _) if finding.saw_tooth => "steady: a saw-tooth that the garbage collector brings down",
        (Verdict::Steady, CourseKind::Negligible) => "steady: what is kept grows by too little to matter so far",
        (Verdict::Steady, CourseKind::Saturated) => "steady: it grew and has ended growing",
        (Verdict::Steady, _) => "steady",
    }
}

fn advice(finding: &Finding) -> Option<&'static str> {
    match (finding.verdict, finding.recoverable_by) {
        (Verdict::Steady, RecoverableBy::None) => None,
        (_, RecoverableBy::Gc) => Some("by gc.collect(): blocks of several ages went at once"),
        (_, RecoverableBy::EmptyCache) => {
            Some("by torch.cuda.empty_cache(); PyTorch's allocator does the same before a request fails")
        }
        (Verdict::Leak, RecoverableBy::None) => {
            Some("by nothing: the collector ran and left it, empty_cache never helps")
        }
        (_, RecoverableBy::None) => {
            Some("by nothing: live blocks hold the segments; expandable segments would not have them")
        }
        (_, RecoverableBy::Unknown) => {
            Some("unknown: gc.collect() frees it only if cycles hold it, empty_cache does not help")
        }
    }
}

const fn quantity(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::KeptBytes => "what is kept",
        Quantity::StuckBytes => "free memory that cannot be given back",
        Quantity::ReservedBytes => "what is reserved",
    }
}

fn found_by(steps: &StepsFrom) -> String {
    match steps {
        StepsFrom::Marks => "as marked".to_owned(),
        StepsFrom::Phase(name) => format!("which begin at '{name}'"),
        StepsFrom::Period(requests) => format!("of {requests} requests, which repeat"),
        StepsFrom::Windows => "which are parts of equal length: no marks and no period were found".to_owned(),
        StepsFrom::Snapshots => "a snapshot each".to_owned(),
    }
}

fn signed(bytes: f64) -> String {
    let sign = if bytes < 0.0 { "-" } else { "" };
    format!("{sign}{}", Bytes(bytes.abs().round() as u64))
}

fn probability(p_value: f64) -> String {
    if p_value == 0.0 || p_value >= 0.001 { format!("{p_value:.3}") } else { format!("{p_value:.1e}") }
}

fn shortened(name: &str) -> String {
    match name.char_indices().nth(LONGEST_NAME) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

fn steps(steps: &[StepUse], width: Option<u16>) -> String {
    let mut table = headed(&HEADINGS);
    dress_for_terminal(&mut table, width);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let left_out = steps.len().saturating_sub(MOST_STEPS_SHOWN);
    for step in &steps[left_out..] {
        let bytes = |bytes: u64| if bytes == 0 { "-".to_owned() } else { Bytes(bytes).to_string() };
        table.add_row(
            [
                step.step.to_string(),
                bytes(step.kept_bytes),
                bytes(step.transient_bytes),
                bytes(step.reserved_bytes),
                bytes(step.stuck_bytes),
                step.born_blocks.to_string(),
                step.passing_blocks.to_string(),
                bytes(step.passing_bytes),
                bytes(step.collected_bytes),
            ]
            .map(Cell::new_owned),
        );
    }
    let narrowed = fit(&mut table, width, &DISPENSABLE).map_or_else(String::new, |said| format!("{said}\n"));
    let before =
        if left_out > 0 { format!("{left_out} steps before these are in --format csv.\n") } else { String::new() };
    format!("{}\n{narrowed}{before}", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        answer::leaks::{Bar, Observed, judge},
        base::MIB,
    };

    fn finding(growth: u64) -> Finding {
        let mut observed = Observed::of_snapshots(&[]);
        observed.name = "story".to_owned();
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
        judge(&observed, None, &Bar::default()).unwrap()
    }

    #[test]
    fn a_leak_is_told_with_its_slope_and_its_end() {
        let text = leaks(&finding(10 * MIB), 10, None, None);
        for words in [
            "story: leak: blocks pile up",
            "10.0 MiB a step of what is kept (95 % interval 10.0 MiB to 10.0 MiB, p = 0.000)",
            "will run out in step 91, with 1000 MiB there",
            "unknown: gc.collect()",
            "8 steps before these",
        ] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        let steady = leaks(&finding(0), 10, None, None);
        assert!(steady.contains("story: steady\n") && !steady.contains("recoverable"), "{steady}");
    }

    #[test]
    fn json_has_the_promised_names_and_csv_a_line_a_step() {
        let found = [finding(10 * MIB)];
        let json: serde_json::Value = serde_json::from_str(&leaks_json(&found)).unwrap();
        let row = &json["rows"][0];
        assert_eq!((&row["verdict"], &row["recoverable_by"]), (&"leak".into(), &"unknown".into()));
        assert_eq!(row["bytes_per_step"], 10.0 * MIB as f64);
        for name in ["bytes_per_step_low", "bytes_per_step_high", "p_value", "runs_out_at_step", "steps_from"] {
            assert!(!row[name].is_null(), "{name} is missing in {row}");
        }
        let csv = leaks_csv(&found).unwrap();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 21);
        assert!(lines[0].starts_with("source,verdict,step,kept_bytes,"), "{}", lines[0]);
        assert!(lines[2].starts_with("story,leak,1,115343360,"), "{}", lines[2]);
        assert_eq!(lines[0].split(',').count(), lines[2].split(',').count());
    }
}
