//! Results of `oomph stress`: verdicts, misuse, adversaries, and the endurance of `integrity` and
//! `soak`.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Medium, Render, ReportError,
    render::{RenderRow, TextTable, counted, distinct, maybe_bytes},
    rows,
};
use crate::{
    base::Bytes,
    measure::{SCHEMA, digits},
    stress::{
        StressState, TotalsRow, UNTESTED, VerdictRow,
        adversary::{AdversaryRow, BoundStanding},
        misuse::{MisuseConsequence, MisuseRow},
    },
};

const VERDICT_HEADINGS: [&str; 8] =
    ["kind", "strategy", "verdict", "trials", "events", "requests\nserved", "out of\nmemory", "driver\ncalls"];

impl RenderRow for VerdictRow {
    /// One line per strategy and kind of stress. Failures, and how to repeat them, are below.
    fn text(rows: &[VerdictRow], medium: Medium) -> String {
        let mut table = TextTable::new(&VERDICT_HEADINGS, medium).with_groups();
        let mut last = None;
        for row in rows {
            let subject = Some((&row.kind, &row.strategy));
            // The table shows the first failure of a strategy, the notes show all.
            if subject == last {
                continue;
            }
            let is_same_kind = last.is_some_and(|(kind, _)| *kind == row.kind) && medium != Medium::Markdown;
            last = subject;
            let kind = if is_same_kind { String::new() } else { row.kind.clone() };
            let numbers = [row.trials, row.events, row.served, row.ooms].map(|n| n.to_string());
            let calls = row.driver_calls.map_or_else(|| "-".to_owned(), |calls| calls.to_string());
            table.row([kind, row.strategy.clone(), row.verdict.clone()].into_iter().chain(numbers).chain([calls]));
        }
        table.fit(&[4, 7]);
        table.finish(&failures(rows), verdict_notes(rows, medium))
    }
}

/// The same verdicts as a matrix: one line per strategy, one column per kind of stress.
pub struct VerdictMatrix<'a>(
    /// The verdicts.
    pub &'a [VerdictRow],
);

impl Render for VerdictMatrix<'_> {
    type Row = VerdictRow;

    fn rows(&self) -> &[VerdictRow] {
        self.0
    }

    fn csv(&self) -> Result<String, ReportError> {
        self.0.csv()
    }

    fn text(&self, medium: Medium) -> String {
        let rows = self.0;
        let kinds = distinct(rows.iter().map(|row| row.kind.as_str()));
        let strategies = distinct(rows.iter().map(|row| row.strategy.as_str()));
        let table = matrix("strategy", &strategies, &kinds, medium, |strategy, kind| {
            let row = rows.iter().find(|row| row.strategy == strategy && row.kind == kind);
            row.map_or_else(String::new, |row| format!("{} {}", row.verdict, row.trials))
        });
        let legend = format!("Numbers are trials in the given time. {}", failures(rows));
        table.finish(&legend, verdict_notes(rows, medium))
    }
}

/// A table with a line for each of `lines` and a column for each of `columns`.
fn matrix(
    heading: &str,
    lines: &[&str],
    columns: &[&str],
    medium: Medium,
    cell: impl Fn(&str, &str) -> String,
) -> TextTable {
    let mut table = TextTable::new(&[&[heading], columns].concat(), medium).in_panels();
    for line in lines {
        table.row([(*line).to_owned()].into_iter().chain(columns.iter().map(|column| cell(line, column))));
    }
    table
}

fn failures(rows: &[VerdictRow]) -> String {
    let count = |verdict: &str| rows.iter().filter(|row| row.verdict == verdict).count();
    let untested = match count(UNTESTED) {
        0 => String::new(),
        many => format!("Not tested: {many} of {}, because the run ended first. ", rows.len()),
    };
    match count("failed") {
        0 => format!("{untested}No failures. Running out of memory is a result, not a failure."),
        many => format!("{untested}{}:", counted(many, "failure", "failures")),
    }
}

/// What is said about single rows. A terminal gets one note for all strategies of which the same is said.
fn verdict_notes(rows: &[VerdictRow], medium: Medium) -> Vec<String> {
    if medium == Medium::Markdown {
        return rows.iter().filter_map(verdict_note).collect();
    }
    let without_evidence = |row: &&VerdictRow| !row.detail.is_empty() && row.trace.is_empty() && row.command.is_empty();
    let key = |row: &VerdictRow| (row.verdict.clone(), row.kind.clone(), row.detail.clone());
    let mut notes = Vec::new();
    let mut said = BTreeSet::new();
    for row in rows {
        if !without_evidence(&row) {
            notes.extend(verdict_note(row));
        } else if said.insert(key(row)) {
            let same = rows.iter().filter(without_evidence).filter(|other| key(other) == key(row));
            let strategies = distinct(same.map(|other| other.strategy.as_str())).join(", ");
            notes.push(format!("{}: {strategies}: {}: {}", row.verdict, row.kind, row.detail));
        }
    }
    notes
}

fn verdict_note(row: &VerdictRow) -> Option<String> {
    let VerdictRow { kind, strategy, verdict, detail, trace, trace_events, command, .. } = row;
    let note = format!("{verdict}: {strategy}: {kind}: {detail}");
    (!detail.is_empty()).then(|| with_evidence(note, trace, *trace_events, command))
}

/// A note with the trace that shows the failure and the command that repeats it.
fn with_evidence(mut note: String, trace: &str, events: u64, command: &str) -> String {
    if !trace.is_empty() {
        let events = counted(events as usize, "event", "events");
        note.push_str(&format!("\n  trace: {trace} ({events})"));
    }
    if !command.is_empty() {
        note.push_str(&format!("\n  repeat: {command}"));
    }
    note
}

const MISUSE_LEGEND: &str = "\
d  detected: refused with an error or a result
h  harmless: accepted without damage
X  corrupts: the strategy or others are damaged
-  not applicable
Two letters: the block was named by its handle / by its address alone.";

impl RenderRow for MisuseRow {
    /// One strategy in full, several as a matrix.
    fn text(rows: &[MisuseRow], medium: Medium) -> String {
        match distinct(rows.iter().map(|row| row.strategy.as_str())).as_slice() {
            [strategy] => {
                let mut table =
                    TextTable::new(&["misuse", "by", "consequence", "detail"], medium).with_numbers(4..).with_groups();
                let mut group = "";
                for MisuseRow { misuse, access_path, consequence, detail, .. } in rows {
                    let is_same = misuse == group && medium != Medium::Markdown;
                    let name = if is_same { "" } else { misuse.as_str() };
                    table.row([name, &access_path.to_string(), shown(*consequence).1, detail]);
                    group = misuse;
                }
                table.finish(&format!("Strategy {strategy}."), [])
            }
            several => misuse_matrix(rows, several, medium),
        }
    }
}

fn misuse_matrix(rows: &[MisuseRow], strategies: &[&str], medium: Medium) -> String {
    let misuses = distinct(rows.iter().map(|row| row.misuse.as_str()));
    let table = matrix("misuse", &misuses, strategies, medium, |misuse, strategy| {
        let own = rows.iter().filter(|row| row.misuse == misuse && row.strategy == strategy);
        let mut letters: Vec<&str> = own.map(|row| shown(row.consequence).0).collect();
        letters.dedup();
        letters.join("/")
    });
    let damage = rows
        .iter()
        .filter(|row| row.consequence == MisuseConsequence::Corrupts)
        .map(|row| format!("corrupts: {}: {} by {}: {}", row.strategy, row.misuse, row.access_path, row.detail));
    table.finish(MISUSE_LEGEND, damage)
}

/// The letter and the word of a consequence.
const fn shown(consequence: MisuseConsequence) -> (&'static str, &'static str) {
    match consequence {
        MisuseConsequence::Detected => ("d", "detected"),
        MisuseConsequence::Harmless => ("h", "harmless"),
        MisuseConsequence::Corrupts => ("X", "corrupts"),
        MisuseConsequence::NotApplicable => ("-", "not applicable"),
    }
}

const ADVERSARY_HEADINGS: [&str; 7] = [
    "strategy",
    "result",
    "reserved,\nno limit",
    "up to its\nlast block",
    "memory\nneeded",
    "needed /\nlive",
    "fragmented by\nblocks up to",
];

impl RenderRow for AdversaryRow {
    /// One line per strategy, with the bound that applies to all of them below.
    fn text(rows: &[AdversaryRow], medium: Medium) -> String {
        let mut table = TextTable::new(&ADVERSARY_HEADINGS, medium);
        for row in rows {
            table.row([
                row.strategy.clone(),
                row.standing.words().to_owned(),
                maybe_bytes(row.peak_reserved_bytes),
                maybe_bytes(row.extent_bytes),
                maybe_bytes(row.needed_bytes),
                row.needed_ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")),
                maybe_bytes(row.fragmenting_bytes),
            ]);
        }
        table.fit(&[6, 3, 2]);
        table.finish(&rows.first().map_or(String::new(), bound), rows.iter().filter_map(assessment_note))
    }
}

fn bound(row: &AdversaryRow) -> String {
    let ratio = row.robson_bound_bytes as f64 / row.live_peak_bytes as f64;
    format!(
        "At most {} live, in blocks of {} to {}. An allocator that never moves blocks needs {}, {ratio:.3} times the \
         live bytes (Robson 1971).\nMemory needed: the smallest memory in which the strategy survives the adversary.",
        Bytes(row.live_peak_bytes),
        Bytes(row.unit_bytes),
        Bytes(row.largest_bytes),
        Bytes(row.robson_bound_bytes),
    )
}

fn assessment_note(row: &AdversaryRow) -> Option<String> {
    let without_figures =
        matches!(row.standing, BoundStanding::RunsOut | BoundStanding::Refuses | BoundStanding::Skipped);
    without_figures.then(|| format!("{}: {}: {}", row.strategy, row.standing.words(), row.reason))
}

const INTEGRITY_HEADINGS: [&str; 9] = [
    "strategy",
    "verdict",
    "blocks\nverified",
    "bytes\nverified",
    "damaged",
    "on another\nstream",
    "out of\nmemory",
    "blocks/s",
    "bytes/s",
];

const SOAK_HEADINGS: [&str; 10] = [
    "strategy",
    "verdict",
    "blocks\nverified",
    "damaged",
    "violations",
    "faults",
    "out of\nmemory",
    "least\nrequested",
    "mean\nrequested",
    "idle share\nof reserved",
];

/// What strategies endured under `stress integrity` and `stress soak`, all slices together.
pub struct Endurance<'a> {
    /// All slices.
    pub state: &'a StressState,
    /// One row per strategy.
    pub rows: &'a [TotalsRow<'a>],
}

/// One row of `stress integrity` and `stress soak` in CSV and JSON: [`TotalsRow`] without nested parts.
#[derive(Clone, Debug, Default, Serialize)]
struct EnduranceRow {
    kind: String,
    strategy: String,
    verdict: String,
    slices: u32,
    blocks: u64,
    comparisons: u64,
    compared_bytes: u64,
    damaged: u64,
    crossings: u64,
    handovers: u64,
    trims: u64,
    ooms: u64,
    faults: u64,
    violations: u64,
    wall_ns: u64,
    samples: u64,
    requested_min_bytes: Option<u64>,
    requested_mean_bytes: Option<u64>,
    requested_max_bytes: Option<u64>,
    reserved_max_bytes: Option<u64>,
    #[serde(serialize_with = "digits::optional")]
    idle_mean_share: Option<f64>,
    #[serde(serialize_with = "digits::optional")]
    idle_max_share: Option<f64>,
    detail: String,
    trace: String,
    trace_events: u64,
    command: String,
}

impl EnduranceRow {
    fn new(row: &TotalsRow<'_>) -> EnduranceRow {
        let (counts, levels, evidence) = (row.counts, row.levels, &row.evidence);
        let sampled = |bytes: u64| (levels.samples > 0).then_some(bytes);
        let share = |ppm: u64| sampled(ppm).map(|ppm| ppm as f64 / 1e6);
        EnduranceRow {
            kind: row.kind.to_owned(),
            strategy: row.strategy.to_owned(),
            verdict: row.verdict.to_owned(),
            slices: row.slices,
            blocks: counts.blocks,
            comparisons: counts.comparisons,
            compared_bytes: counts.compared_bytes,
            damaged: counts.damaged,
            crossings: counts.crossings,
            handovers: counts.handovers,
            trims: counts.trims,
            ooms: counts.ooms,
            faults: counts.faults,
            violations: counts.violations,
            wall_ns: counts.wall_ns,
            samples: levels.samples,
            requested_min_bytes: sampled(levels.requested_min_bytes),
            requested_mean_bytes: sampled(levels.requested_mean_bytes),
            requested_max_bytes: sampled(levels.requested_max_bytes),
            reserved_max_bytes: sampled(levels.reserved_max_bytes),
            idle_mean_share: share(levels.idle_mean_ppm),
            idle_max_share: share(levels.idle_max_ppm),
            detail: row.detail.to_owned(),
            trace: evidence.trace.clone(),
            trace_events: evidence.trace_events,
            command: evidence.command.clone(),
        }
    }
}

impl Endurance<'_> {
    fn flat_rows(&self) -> Vec<EnduranceRow> {
        self.rows.iter().map(EnduranceRow::new).collect()
    }
}

impl<'a> Render for Endurance<'a> {
    type Row = TotalsRow<'a>;

    fn rows(&self) -> &[TotalsRow<'a>] {
        self.rows
    }

    fn csv(&self) -> Result<String, ReportError> {
        rows::to_csv(&self.flat_rows())
    }

    /// `{"schema": 2, "rows": [...], "slices": [...], "total": {...}}`.
    fn json(&self) -> Value {
        json!({
            "schema": SCHEMA, "rows": self.flat_rows(), "slices": self.state.slices, "total": self.state.total(),
        })
    }

    fn text(&self, medium: Medium) -> String {
        let is_soak = self.rows.iter().any(|row| row.levels.samples > 0) && self.state.kind == "soak";
        let mut table = TextTable::new(if is_soak { &SOAK_HEADINGS } else { &INTEGRITY_HEADINGS }, medium);
        for row in self.rows {
            table.row(if is_soak { soak_cells(row, self.state) } else { integrity_cells(row) });
        }
        table.fit(if is_soak { &[7, 2, 5] } else { &[8, 5] });
        let total = self.state.total();
        let legend = format!(
            "In {}: {} blocks and {} verified, {} damaged. Running out of memory is a result, not a failure.",
            counted(self.state.slices.len(), "slice", "slices"),
            total.blocks,
            Bytes(total.compared_bytes),
            total.damaged
        );
        table.finish(&legend, self.rows.iter().filter_map(totals_note))
    }
}

fn integrity_cells(row: &TotalsRow<'_>) -> Vec<String> {
    let counts = row.counts;
    vec![
        row.strategy.to_owned(),
        row.verdict.to_owned(),
        counts.blocks.to_string(),
        Bytes(counts.compared_bytes).to_string(),
        counts.damaged.to_string(),
        counts.crossings.to_string(),
        counts.ooms.to_string(),
        format!("{:.0}", counts.per_second(counts.blocks)),
        Bytes(counts.per_second(counts.compared_bytes) as u64).to_string(),
    ]
}

fn soak_cells(row: &TotalsRow<'_>, state: &StressState) -> Vec<String> {
    let memory = state.slices.last().map_or(0, |slice| slice.memory_bytes).max(1);
    let of_memory = |bytes: u64| format!("{:.1} %", bytes as f64 * 100.0 / memory as f64);
    let numbers = [row.counts.blocks, row.counts.damaged, row.counts.violations, row.counts.faults, row.counts.ooms];
    let mut cells = vec![row.strategy.to_owned(), row.verdict.to_owned()];
    cells.extend(numbers.map(|number| number.to_string()));
    cells.extend([row.levels.requested_min_bytes, row.levels.requested_mean_bytes].map(of_memory));
    cells.push(format!("{:.1} %", row.levels.idle_mean_ppm as f64 / 1e4));
    cells
}

fn totals_note(row: &TotalsRow<'_>) -> Option<String> {
    let TotalsRow { verdict, strategy, kind, detail, evidence, .. } = row;
    let note = format!("{verdict}: {strategy}: {kind}: {detail}");
    (!detail.is_empty() && *verdict != "passed")
        .then(|| with_evidence(note, &evidence.trace, evidence.trace_events, &evidence.command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{GIB, MIB},
        stress::{FailureEvidence, IntegrityCounts, MemoryLevels, StrategyTotals, StressSlice, misuse::AccessPath},
    };

    fn verdicts() -> Vec<VerdictRow> {
        let passed = VerdictRow {
            kind: "properties".to_owned(),
            strategy: "caching".to_owned(),
            verdict: "passed".to_owned(),
            trials: 100,
            events: 9_000,
            served: 4_000,
            ooms: 12,
            driver_calls: Some(5_000),
            ..VerdictRow::default()
        };
        let failed = VerdictRow {
            strategy: "broken".to_owned(),
            verdict: "failed".to_owned(),
            detail: "overlap: two blocks at once".to_owned(),
            trace: "stress-failures/properties-broken.oomph".to_owned(),
            trace_events: 3,
            command: "oomph stress properties --trace stress-failures/properties-broken.oomph --strategy broken"
                .to_owned(),
            ..passed.clone()
        };
        vec![passed, failed.clone(), VerdictRow { detail: "books: one too many".to_owned(), ..failed }]
    }

    #[test]
    fn strategy_has_one_line_and_each_failure_its_command() {
        let text = verdicts().text(Medium::PIPE);
        assert_eq!(text.lines().filter(|line| line.contains(" broken ")).count(), 1, "{text}");
        assert_eq!(text.matches("repeat: oomph stress").count(), 2, "{text}");
        assert!(text.contains("2 failures:") && text.contains("broken.oomph (3 events)"), "{text}");
        assert!(verdicts()[..1].text(Medium::Markdown).contains("No failures."));
        let stopped = [verdicts().remove(0), VerdictRow { verdict: UNTESTED.to_owned(), ..VerdictRow::default() }];
        assert!(
            stopped[..]
                .text(Medium::Markdown)
                .contains("Not tested: 1 of 2, because the run ended first. No failures.")
        );
    }

    #[test]
    fn matrix_has_a_line_per_strategy_and_a_column_per_kind() {
        let mut rows = verdicts();
        rows.push(VerdictRow { kind: "faults".to_owned(), trials: 7, ..rows[0].clone() });
        let text = VerdictMatrix(&rows).text(Medium::Markdown);
        assert!(text.contains("| strategy | properties |   faults |"), "{text}");
        assert!(text.contains("| caching  | passed 100 | passed 7 |"), "{text}");
        assert!(text.contains("| broken   | failed 100 |          |"), "{text}");
    }

    #[test]
    fn verdict_csv_and_json_have_every_row() {
        let text = verdicts().csv().unwrap();
        let read: Vec<VerdictRow> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, verdicts());
        let value = verdicts().json();
        assert_eq!((&value["schema"], &value["rows"][1]["verdict"]), (&SCHEMA.into(), &"failed".into()));
    }

    fn misuse(strategy: &str, access_path: AccessPath, consequence: MisuseConsequence) -> MisuseRow {
        MisuseRow {
            strategy: strategy.to_owned(),
            misuse: "double-free".to_owned(),
            access_path,
            consequence,
            detail: "in its own words".to_owned(),
        }
    }

    #[test]
    fn several_misused_strategies_are_a_matrix() {
        let rows = [
            misuse("good", AccessPath::Handle, MisuseConsequence::Detected),
            misuse("good", AccessPath::Address, MisuseConsequence::Detected),
            misuse("bad", AccessPath::Handle, MisuseConsequence::Harmless),
            misuse("bad", AccessPath::Address, MisuseConsequence::Corrupts),
        ];
        let text = rows.text(Medium::PIPE);
        let line = text.lines().find(|line| line.contains("double-free")).unwrap();
        assert_eq!(line.split_whitespace().filter(|word| word.len() <= 3).collect::<Vec<_>>(), ["d", "h/X"], "{text}");
        assert!(text.contains("corrupts: bad: double-free by address: in its own words"), "{text}");
    }

    #[test]
    fn one_misused_strategy_is_shown_in_full() {
        let text = [misuse("good", AccessPath::Handle, MisuseConsequence::Detected)].text(Medium::Markdown);
        assert!(text.contains("in its own words") && text.contains("Strategy good."), "{text}");
    }

    #[test]
    fn misuse_csv_and_json_have_every_row() {
        let rows = [
            misuse("good", AccessPath::Handle, MisuseConsequence::Detected),
            misuse("bad", AccessPath::Address, MisuseConsequence::Corrupts),
        ];
        let text = rows.csv().unwrap();
        let read: Vec<MisuseRow> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, rows);
        let value = rows.json();
        assert_eq!((&value["schema"], &value["rows"][1]["consequence"]), (&SCHEMA.into(), &"corrupts".into()));
    }

    fn assessments() -> Vec<AdversaryRow> {
        let pool = AdversaryRow {
            strategy: "pool:initial:{memory}".to_owned(),
            device: "sim".to_owned(),
            live_peak_bytes: 4 * GIB,
            largest_bytes: 512 * MIB,
            unit_bytes: 2 * MIB,
            robson_bound_bytes: 20_940_062_720,
            peak_reserved_bytes: Some(30 * GIB),
            extent_bytes: Some(20_940_062_720),
            needed_bytes: Some(20_940_062_720),
            needed_ratio: Some(4.875),
            standing: BoundStanding::AtTheBound,
            trials: 16,
            ..AdversaryRow::default()
        };
        let fixed = AdversaryRow {
            strategy: "fixed".to_owned(),
            needed_bytes: None,
            standing: BoundStanding::Refuses,
            reason: "serves no requests of 2.00 MiB".to_owned(),
            ..pool.clone()
        };
        vec![pool, fixed]
    }

    #[test]
    fn adversary_table_names_the_bound() {
        let text = assessments().text(Medium::PIPE);
        assert!(text.contains("needs 19.5 GiB, 4.875 times the live bytes"), "{text}");
        assert!(text.contains("at the bound") && text.contains("fixed: refuses: serves no requests"), "{text}");
        let json = assessments().json();
        assert_eq!(json["rows"][0]["needed_bytes"], 20_940_062_720_u64);
        assert_eq!(json["rows"][1]["standing"], "refuses");
        let csv = assessments().csv().unwrap();
        assert!(csv.starts_with("strategy,device,live_peak_bytes,") && csv.lines().count() == 3, "{csv}");
    }

    fn state(kind: &str) -> StressState {
        let mut state = StressState::new(kind);
        state.slices.push(StressSlice { memory_bytes: 1 << 30, ..StressSlice::default() });
        let counts = IntegrityCounts {
            blocks: 2_000,
            compared_bytes: 4 << 30,
            wall_ns: 2_000_000_000,
            ..IntegrityCounts::default()
        };
        let levels = MemoryLevels {
            samples: 1,
            requested_mean_bytes: 1 << 29,
            idle_mean_ppm: 80_000,
            ..MemoryLevels::default()
        };
        let passed =
            StrategyTotals { strategy: "caching".to_owned(), slices: 1, counts, levels, ..StrategyTotals::default() };
        let broken = StrategyTotals {
            strategy: "broken".to_owned(),
            slices: 1,
            failures: vec!["block 3 has lost its contents at byte 0".to_owned()],
            ..StrategyTotals::default()
        };
        state.strategies = vec![passed, broken];
        state
    }

    #[test]
    fn endurance_shows_rates_and_failures() {
        let state = state("integrity");
        let evidence =
            FailureEvidence { trace: "a.oomph".to_owned(), trace_events: 4, command: "oomph stress".to_owned() };
        let rows = state.rows(&[("broken".to_owned(), evidence)]);
        let endurance = Endurance { state: &state, rows: &rows };
        let text = endurance.text(Medium::PIPE);
        assert!(text.contains("2000") && text.contains("1000") && text.contains("2.00 GiB"), "{text}");
        assert!(text.contains("failed: broken: integrity: block 3"), "{text}");
        assert!(text.contains("trace: a.oomph (4 events)\n  repeat: oomph stress"), "{text}");
        assert!(text.contains("In 1 slice: 2000 blocks and 4.00 GiB verified"), "{text}");
        let csv = endurance.csv().unwrap();
        assert!(csv.starts_with("kind,strategy,verdict,slices,blocks,") && csv.lines().count() == 3, "{csv}");
        assert_eq!(endurance.json()["rows"][0]["compared_bytes"], 4_u64 << 30);
    }

    #[test]
    fn soak_shows_how_full_memory_was() {
        let state = state("soak");
        let text = Endurance { state: &state, rows: &state.rows(&[]) }.text(Medium::Markdown);
        assert!(text.contains("50.0 %") && text.contains("8.0 %"), "{text}");
    }
}
