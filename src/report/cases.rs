//! The cases of a run: the table that people look at first, the steps from requested to reserved
//! memory, wall-clock times, releases of PyTorch side by side, and `summary.md`.

use super::{
    Environment, Medium, Render,
    render::{RenderRow, TextTable, maybe_bytes, said},
    scenario::{bounds, groups, is_contender, titles},
};
use crate::{
    answer::releases::ReleaseRow,
    base::{Bytes, Nanos, escaped, escaped_markdown},
    measure::{CaseRecord, Status, ThreadSharing, TimingRecord},
    replay::OomCause,
};

const HEADINGS: [&str; 9] = [
    "workload",
    "strategy",
    "peak\nallocated",
    "peak\nreserved",
    "device\nused",
    "fragmen-\ntation",
    "out of\nmemory",
    "driver\ncalls",
    "driver\ntime",
];
/// The columns that a narrow terminal loses first, by place.
const DISPENSABLE: [usize; 4] = [7, 8, 2, 5];
/// The columns after the strategy where the need of a case is known.
const NEED_HEADINGS: [&str; 2] = ["need", "appetite"];
/// As `DISPENSABLE`, for a table with these columns. What is reserved is the appetite in bytes.
const DISPENSABLE_WITH_NEED: [usize; 6] = [9, 4, 7, 6, 5, 10];
const NEED_LEGEND: &str = "Need: the least memory in which the case completes, appetite: peak reserved memory without a \
                           limit, both as multiples of the bound (the most bytes alive at one time).";
const NEED_STAR_LEGEND: &str = "* = lowest need.";
const LEGEND: &str = "Fragmentation = 1 - peak allocated / peak reserved.";
const STAR_LEGEND: &str = "* = lowest device memory use (whole pages and context included).";

impl RenderRow for CaseRecord {
    fn text(rows: &[CaseRecord], medium: Medium) -> String {
        let has_need = rows.iter().any(|record| record.needed_bytes.is_some());
        let mut headings = HEADINGS.to_vec();
        if has_need {
            headings.splice(2..2, NEED_HEADINGS);
        }
        let mut table = TextTable::new(&headings, medium).with_groups();
        let groups = groups(rows);
        let (mut need_star, mut use_star) = (false, false);
        for (group, mut heading) in groups.iter().zip(titles(&groups)) {
            let (least, is_by_need) = (group.least_bytes(), group.is_by_need());
            (need_star, use_star) =
                (need_star | (is_by_need && least.is_some()), use_star | (!is_by_need && least.is_some()));
            for record in &group.records {
                let best = is_contender(record) && least.is_some() && least == group.compared_bytes(record);
                let mut cells = row(std::mem::take(&mut heading), record, best && !is_by_need);
                if has_need {
                    cells.splice(2..2, need_cells(record, best && is_by_need));
                }
                table.row(cells);
            }
        }
        let dispensable = if has_need { &DISPENSABLE_WITH_NEED[..] } else { &DISPENSABLE };
        table.fit(dispensable);
        // The columns after the strategy are two further to the right.
        let shows = |place: usize| table.shows(if has_need { place + NEED_HEADINGS.len() } else { place });
        let legend = said(&[
            (has_need, NEED_LEGEND),
            (need_star, NEED_STAR_LEGEND),
            (use_star && shows(4), STAR_LEGEND),
            (shows(5), LEGEND),
        ]);
        // Errors are reported by the caller. In a document, explanations have a section of their
        // own.
        let explained = |record: &&CaseRecord| record.status != Status::Error && medium != Medium::Markdown;
        table.finish(&legend, explanations(rows.iter().filter(explained)))
    }
}

/// Need and appetite as multiples of the bound; empty where they are not known.
fn need_cells(record: &CaseRecord, best: bool) -> [String; 2] {
    let text = |ratio: Option<f64>| ratio.map_or_else(String::new, |ratio| format!("{ratio:.3}"));
    let star = if best { "*" } else { " " };
    [format!("{} {star}", text(record.need_ratio())), text(record.appetite_ratio())]
}

fn row(heading: String, record: &CaseRecord, best: bool) -> Vec<String> {
    let mut cells = vec![heading, record.strategy.clone()];
    if record.clock.is_some() {
        // The star has its own place, so that digits stay aligned.
        let star = if best { "*" } else { " " };
        cells.extend([
            maybe_bytes(record.peak_allocated_bytes),
            maybe_bytes(record.peak_reserved_bytes),
            format!("{} {star}", maybe_bytes(record.peak_device_used_bytes)),
            record.fragmentation_share.map_or_else(String::new, |share| format!("{:.1} %", share * 100.0)),
            verdict(record),
            record.driver_calls.map_or_else(String::new, |calls| calls.to_string()),
            record.driver_ns.map_or_else(String::new, |time| Nanos(time).to_string()),
        ]);
    } else {
        cells.extend(["", "", "", "", &verdict(record), "", ""].map(str::to_owned));
    }
    cells
}

/// Whether memory ran out, and where.
fn verdict(record: &CaseRecord) -> String {
    match record.status {
        Status::Completed => "no".to_owned(),
        Status::Oom => match (record.oom_step, record.oom_event) {
            (Some(step), _) => format!("step {step}"),
            (None, Some(event)) => format!("event {event}"),
            (None, None) => "yes".to_owned(),
        },
        Status::Skipped | Status::Interrupted | Status::Error => record.status.name().to_owned(),
    }
}

const WATERFALL_LEGEND: &str = "Requested: peak live bytes, the lower bound for every allocator.";
const ROUNDED_LEGEND: &str = "Rounded: the same in blocks of 512 B.";
const ROUNDED_ALONE_LEGEND: &str = "Rounded: peak live bytes in blocks of 512 B.";
const OVER_LEGEND: &str = "Over bound: reserved compared with rounded.";
const PACKED_LEGEND: &str = "Packed: the best layout found with full knowledge of lifetimes.";

/// What each completed case reserved, beside what its trace needs at least; `None` without such a
/// case.
///
/// Requested and rounded are bounds of the trace, packed is an offline layout, reserved and device
/// used are peaks of the case. Each is a maximum over the whole trace, at its own moment.
pub fn waterfall(records: &[CaseRecord], medium: Medium) -> Option<String> {
    let packed = records.iter().any(|record| record.packed_bytes.is_some());
    let mut headings = vec!["workload", "strategy", "requested", "rounded", "reserved", "device used", "over bound"];
    if packed {
        headings.insert(4, "packed");
    }
    let mut table = TextTable::new(&headings, medium).with_groups();
    let groups = groups(records);
    for (group, mut heading) in groups.iter().zip(titles(&groups)) {
        for record in &group.records {
            // A case that ended early held less than its trace needs.
            let (Status::Completed, Some(requested), Some(rounded), Some(reserved)) =
                (record.status, record.live_peak_bytes, record.live_peak_rounded_bytes, record.peak_reserved_bytes)
            else {
                continue;
            };
            let mut cells = vec![
                std::mem::take(&mut heading),
                record.strategy.clone(),
                Bytes(requested).to_string(),
                Bytes(rounded).to_string(),
                Bytes(reserved).to_string(),
                maybe_bytes(record.peak_device_used_bytes),
                over_bound(reserved, rounded),
            ];
            if packed {
                cells.insert(4, maybe_bytes(record.packed_bytes));
            }
            table.row(cells);
        }
    }
    // Requested and rounded differ little.
    table.fit(&[2, 4 + usize::from(packed) + 1]);
    let legend = said(&[
        (table.shows(2), WATERFALL_LEGEND),
        (table.shows(2), ROUNDED_LEGEND),
        (!table.shows(2), ROUNDED_ALONE_LEGEND),
        (true, OVER_LEGEND),
        (packed, PACKED_LEGEND),
    ]);
    (!table.is_empty()).then(|| table.finish(&legend, []))
}

/// In percent; empty for a strategy that reserves nothing.
fn over_bound(reserved: u64, bound: u64) -> String {
    if reserved == 0 || bound == 0 {
        return String::new();
    }
    format!("{:+.1} %", (reserved as f64 / bound as f64 - 1.0) * 100.0)
}

const TIMING_HEADINGS: [&str; 8] = [
    "workload",
    "strategy",
    "threads",
    "per event",
    "events/s",
    "spread",
    "alloc ns\np50 / p99 / p99.9",
    "free ns\np50 / p99 / p99.9",
];

/// Rounds that spread by more than this share ran beside other work.
const NOISY: f64 = 0.1;

/// Wall-clock times, grouped by workload in order of first appearance.
pub fn timings(records: &[TimingRecord], medium: Medium) -> String {
    let mut table = TextTable::new(&TIMING_HEADINGS, medium).with_groups();
    let mut workload = "";
    for record in records {
        let heading = if record.workload == workload { "" } else { &record.workload };
        workload = &record.workload;
        table.row(timing_row(heading, record));
    }
    let timer = records.iter().map(|record| record.timer_ns).max().unwrap_or(0);
    let sampled_one_in = records.first().map_or(0, |record| record.sampled_one_in);
    table.fit(&[7, 6, 5]);
    let percentiles = format!(
        "Percentiles: a second pass that times one operation in {sampled_one_in}; each value includes about {timer} ns for \
         reading the clock."
    );
    let mut legend = said(&[
        (true, "Wall-clock times. Per event: the median pass, without sampling."),
        (table.shows(6) || table.shows(7), &percentiles),
    ]);
    if let Some(rounds) = records.iter().filter_map(|record| record.rounds).max().filter(|rounds| *rounds > 1)
        && table.shows(5)
    {
        legend.push_str(&format!(
            "\nSpread: standard deviation of {rounds} rounds, each the fastest pass of a new process."
        ));
    }
    let noisy = records.iter().filter(|record| record.round_spread_share > Some(NOISY)).count();
    if noisy > 0 {
        legend.push_str(&format!(
            "\nThe machine was busy: {noisy} of {} rows spread by more than {:.0} %.",
            records.len(),
            NOISY * 100.0
        ));
    }
    if records.iter().any(|record| record.threads.is_some()) {
        legend.push_str(
            "\nThreads share the strategy under one lock, each with its own copy of the workload. Per event: the time \
             of one thread, including waiting. events/s: all threads together.",
        );
    }
    for (sharing, meaning) in [
        (ThreadSharing::Relayed, "every block is freed by the next thread, at its next request."),
        (ThreadSharing::Own, "every thread has a strategy of its own, and there is no lock."),
    ] {
        if records.iter().any(|record| record.sharing == Some(sharing)) {
            legend.push_str(&format!(" {sharing}: {meaning}"));
        }
    }
    table.finish(&legend, [])
}

/// A number of threads, and how they share the strategy where that is not the usual way.
fn threads_text(threads: Option<u16>, sharing: Option<ThreadSharing>) -> String {
    match (threads, sharing.filter(|sharing| !sharing.is_default())) {
        (Some(threads), Some(sharing)) => format!("{threads} {sharing}"),
        (Some(threads), None) => threads.to_string(),
        (None, _) => String::new(),
    }
}

fn timing_row(heading: &str, record: &TimingRecord) -> [String; 8] {
    let between_events = record.pass_median_ns as f64 / record.events.max(1) as f64;
    let per_event = between_events * f64::from(record.threads.unwrap_or(1));
    let percentiles = |times: [Option<u64>; 3]| {
        times.map(|time| time.map_or_else(|| "-".to_owned(), |time| time.to_string())).join(" / ")
    };
    [
        heading.to_owned(),
        record.strategy.clone(),
        threads_text(record.threads, record.sharing),
        format!("{per_event:.1} ns"),
        format!("{:.1} M", 1e3 / between_events),
        record.round_spread_share.map_or_else(String::new, |share| format!("{:.1} %", share * 100.0)),
        percentiles([record.alloc_p50_ns, record.alloc_p99_ns, record.alloc_p999_ns]),
        percentiles([record.free_p50_ns, record.free_p99_ns, record.free_p999_ns]),
    ]
}

/// `summary.md`: the environment, the tables, and why cases did not complete.
pub(super) fn summary(environment: &Environment, records: &[CaseRecord]) -> String {
    let driver =
        environment.driver.as_ref().map_or(String::new(), |driver| format!(", driver {}", escaped_markdown(driver)));
    let mut page = format!(
        "# Run\n\n- command: `{}`\n- started: {}\n- program: {} ({})\n- device: {} ({}{driver})\n- machine: {}, {}, {} \
         CPUs\n- seed: {}\n\n{}\n\n{}",
        escaped(&environment.command.join(" ")),
        escaped_markdown(&environment.started),
        escaped_markdown(&environment.version),
        escaped_markdown(&environment.commit),
        escaped_markdown(&environment.device),
        escaped_markdown(&environment.device_name),
        escaped_markdown(&environment.machine),
        escaped_markdown(&environment.os),
        environment.cpus,
        environment.seed,
        counts(records),
        records.text(Medium::Markdown),
    );
    if let Some(table) = waterfall(records, Medium::Markdown) {
        page.push_str(&format!("\n## From requested to reserved\n\n{table}"));
    }
    let bounds = bounds(records);
    if !bounds.is_empty() {
        page.push_str(&format!("\n## Over the bound\n\n{}", bounds.text(Medium::Markdown)));
    }
    for (number, explanation) in explanations(records).enumerate() {
        page.push_str(if number == 0 { "\n## Cases that did not complete\n\n" } else { "" });
        page.push_str(&format!("- {explanation}\n"));
    }
    page
}

fn counts(records: &[CaseRecord]) -> String {
    let parts: Vec<String> = [Status::Completed, Status::Oom, Status::Skipped, Status::Interrupted, Status::Error]
        .into_iter()
        .map(|status| (status, records.iter().filter(|record| record.status == status).count()))
        .filter(|(_, count)| *count > 0)
        .map(|(status, count)| format!("{count} {}", status.name()))
        .collect();
    format!("{} cases: {}.", records.len(), if parts.is_empty() { "none".to_owned() } else { parts.join(", ") })
}

/// One line for every case that did not complete.
fn explanations<'a>(records: impl IntoIterator<Item = &'a CaseRecord>) -> impl Iterator<Item = String> {
    records
        .into_iter()
        .filter(|record| record.status != Status::Completed)
        .map(|record| format!("{}: {}", escaped(&record.case_id), escaped(&explanation(record))))
}

fn explanation(record: &CaseRecord) -> String {
    let (Status::Oom, Some(requested)) = (record.status, record.oom_requested_bytes) else {
        return format!("{}: {}", record.status.name(), record.reason);
    };
    let free = record.oom_free_bytes.map_or_else(String::new, |free| format!(", {} free in total", Bytes(free)));
    let place = match (record.oom_step, &record.oom_phase) {
        (Some(step), Some(phase)) => format!(" in step {step}, {phase}"),
        (Some(step), None) => format!(" in step {step}"),
        (None, Some(phase)) => format!(" in {phase}"),
        (None, None) => String::new(),
    };
    let most = match (record.oom_obstacle, record.oom_obstacle_bytes) {
        (Some(obstacle), Some(bytes)) => format!(", {} {}", Bytes(bytes), obstacle.words()),
        _ => String::new(),
    };
    let remark = if record.reason.is_empty() { String::new() } else { format!("; {}", record.reason) };
    format!(
        "out of memory at event {}{place}: {} requested{free}{most} ({}){remark}",
        record.oom_event.unwrap_or(0),
        Bytes(requested),
        record.oom_cause.unwrap_or(OomCause::Exhaustion).name(),
    )
}

const RELEASE_HEADINGS: [&str; 9] = [
    "source",
    "strategy",
    "release",
    "peak\nallocated",
    "peak\nreserved",
    "OOMs",
    "retries",
    "requests",
    "at another\naddress",
];

const RELEASE_LEGEND: &str = "At another address: requests whose block is not where it is under the first release, or which only one of the \
                      two serves. A CUDA graph is recorded again where its addresses change.";

/// One program under several releases of PyTorch, side by side.
impl RenderRow for ReleaseRow {
    fn text(rows: &[ReleaseRow], medium: Medium) -> String {
        let mut table = TextTable::new(&RELEASE_HEADINGS, medium).with_groups();
        let mut group = ("", "");
        for row in rows {
            let key = (row.workload.as_str(), row.strategy.as_str());
            let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
            let is_first = key != group;
            table.row([
                if key.0 == group.0 { String::new() } else { key.0.to_owned() },
                if is_first { key.1.to_owned() } else { String::new() },
                row.release.map_or_else(String::new, |release| release.to_string()),
                maybe_bytes(row.peak_allocated_bytes),
                maybe_bytes(row.peak_reserved_bytes),
                count(row.ooms),
                count(row.retries),
                count(row.requests),
                if is_first { String::new() } else { moved(row) },
            ]);
            group = key;
        }
        table.fit(&[7, 6, 3]);
        let notes = rows.iter().filter(|row| !row.reason.is_empty());
        table.finish(RELEASE_LEGEND, notes.map(|row| format!("{}/{}: {}", row.workload, row.strategy, row.reason)))
    }
}

/// Number and share of the requests at another address.
fn moved(row: &ReleaseRow) -> String {
    match (row.moved_requests, row.requests) {
        (Some(moved), Some(requests)) if requests > 0 => {
            format!("{moved} ({:.1} %)", 100.0 * moved as f64 / requests as f64)
        }
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        device::DeviceClock,
        measure::CaseLabel,
        report::{Glyphs, Terminal},
    };

    fn record(workload: &str, strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        let label = CaseLabel { workload: workload.to_owned(), strategy: strategy.to_owned(), ..CaseLabel::default() };
        let measured = status != Status::Skipped;
        CaseRecord {
            clock: measured.then_some(DeviceClock::Virtual),
            peak_allocated_bytes: measured.then_some(30 * MIB),
            peak_reserved_bytes: measured.then_some(reserved),
            peak_device_used_bytes: Some(reserved + MIB),
            fragmentation_share: crate::measure::lost_share(30 * MIB, reserved),
            oom_event: (status == Status::Oom).then_some(17),
            oom_requested_bytes: (status == Status::Oom).then_some(8 * MIB),
            oom_free_bytes: (status == Status::Oom).then_some(9 * MIB),
            oom_cause: (status == Status::Oom).then_some(OomCause::Fragmentation),
            driver_calls: measured.then_some(4),
            driver_alloc_calls: measured.then_some(2),
            driver_ns: measured.then_some(1_234_000),
            ..CaseRecord::unmeasured(&label, status, "because")
        }
    }

    fn sample() -> Vec<CaseRecord> {
        vec![
            record("saw-tooth", "caching", Status::Completed, 40 * MIB),
            record("saw-tooth", "direct", Status::Completed, 32 * MIB),
            record("checkerboard", "caching", Status::Oom, 64 * MIB),
            record("checkerboard", "pools", Status::Skipped, 0),
        ]
    }

    #[test]
    fn terminal_table_marks_the_least_memory() {
        insta::assert_snapshot!(sample().text(Medium::PIPE), @"
        ──────────────────────────────────────────────────────────────────────────────────────────────────────
         workload       strategy        peak       peak       device   fragmen-     out of   driver    driver
                                   allocated   reserved         used     tation     memory    calls      time
        ══════════════════════════════════════════════════════════════════════════════════════════════════════
         saw-tooth      caching     30.0 MiB   40.0 MiB   41.0 MiB       25.0 %         no        4   1.23 ms
                        direct      30.0 MiB   32.0 MiB   33.0 MiB *      6.2 %         no        4   1.23 ms
         checkerboard   caching     30.0 MiB   64.0 MiB   65.0 MiB       53.1 %   event 17        4   1.23 ms
                        pools                                                      skipped
        ──────────────────────────────────────────────────────────────────────────────────────────────────────
        * = lowest device memory use (whole pages and context included). Fragmentation = 1 - peak allocated / peak reserved.

        /checkerboard/caching@#0: out of memory at event 17: 8.00 MiB requested, 9.00 MiB free in total (fragmentation); because
        /checkerboard/pools@#0: skipped: because
        ");
    }

    #[test]
    fn markdown_table_has_the_same_cells() {
        insta::assert_snapshot!(sample().text(Medium::Markdown), @"
        | workload     | strategy | peak allocated | peak reserved | device used | fragmentation | out of memory | driver calls | driver time |
        |--------------|----------|----------------|---------------|-------------|---------------|---------------|--------------|-------------|
        | saw-tooth    | caching  |       30.0 MiB |      40.0 MiB |  41.0 MiB   |        25.0 % |            no |            4 |     1.23 ms |
        |              | direct   |       30.0 MiB |      32.0 MiB |  33.0 MiB * |         6.2 % |            no |            4 |     1.23 ms |
        | checkerboard | caching  |       30.0 MiB |      64.0 MiB |  65.0 MiB   |        53.1 % |      event 17 |            4 |     1.23 ms |
        |              | pools    |                |               |             |               |       skipped |              |             |

        * = lowest device memory use (whole pages and context included). Fragmentation = 1 - peak allocated / peak reserved.
        ");
    }

    #[test]
    fn narrow_terminal_gets_a_narrow_table() {
        let text = sample().text(Medium::Terminal(Terminal { width: Some(80), glyphs: Glyphs::Blocks }));
        let table = text.lines().take_while(|line| !line.contains(LEGEND));
        assert!(table.clone().count() > 4);
        assert!(table.clone().all(|line| line.chars().count() <= 80), "{text}");
        for whole in ["workload", "checkerboard", "40.0 MiB", "event 17"] {
            assert!(text.contains(whole), "{whole} is not in one piece:\n{text}");
        }
        assert!(text.contains("terminal is narrow: driver calls."), "{text}");
    }

    #[test]
    fn json_has_a_schema_and_base_units() {
        let value = sample().json();
        assert_eq!(value["schema"], 2);
        assert_eq!(value["rows"][1]["peak_reserved_bytes"], 32 * MIB);
        assert_eq!(value["rows"][3]["status"], "skipped");
    }

    #[test]
    fn csv_can_be_read_back() {
        let text = sample().csv().unwrap();
        let read: Vec<CaseRecord> =
            csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(Result::unwrap).collect();
        assert_eq!(read, sample());
    }

    fn bounded(strategy: &str, status: Status, reserved: u64) -> CaseRecord {
        CaseRecord {
            live_peak_bytes: Some(39 * MIB),
            live_peak_rounded_bytes: Some(40 * MIB),
            peak_device_used_bytes: Some(reserved + 500 * MIB),
            ..record("w", strategy, status, reserved)
        }
    }

    #[test]
    fn waterfall_shows_the_steps_to_device_used() {
        let mut records = vec![
            bounded("caching", Status::Completed, 50 * MIB),
            bounded("null", Status::Completed, 0),
            bounded("direct", Status::Oom, 10 * MIB),
        ];
        let without = waterfall(&records, Medium::Markdown).unwrap();
        assert!(!without.contains("packed") && !without.contains("Packed"), "{without}");
        records[0].packed_bytes = Some(41 * MIB);
        insta::assert_snapshot!(waterfall(&records, Medium::Markdown).unwrap(), @"
        | workload | strategy | requested |  rounded |   packed | reserved | device used | over bound |
        |----------|----------|-----------|----------|----------|----------|-------------|------------|
        | w        | caching  |  39.0 MiB | 40.0 MiB | 41.0 MiB | 50.0 MiB |     550 MiB |    +25.0 % |
        |          | null     |  39.0 MiB | 40.0 MiB |          |      0 B |     500 MiB |            |

        Requested: peak live bytes, the lower bound for every allocator. Rounded: the same in blocks of 512 B. Over bound: reserved compared with rounded. Packed: the best layout found with full knowledge of lifetimes.
        ");
    }

    #[test]
    fn waterfall_needs_a_bound() {
        let records = [CaseRecord { live_peak_rounded_bytes: None, ..bounded("caching", Status::Completed, MIB) }];
        assert_eq!(waterfall(&records, Medium::PIPE), None);
    }

    #[test]
    fn summary_says_what_ran_and_why_cases_failed() {
        let label = CaseLabel { suite: "quick".to_owned(), workload: "w".to_owned(), ..CaseLabel::default() };
        let oom = CaseRecord {
            oom_event: Some(9),
            oom_step: Some(2),
            oom_requested_bytes: Some(20 * MIB),
            oom_free_bytes: Some(30 * MIB),
            oom_cause: Some(OomCause::Fragmentation),
            ..CaseRecord::unmeasured(&label, Status::Oom, "the device had less")
        };
        let skipped = CaseRecord::unmeasured(&label, Status::Skipped, "this device has no virtual memory");
        let environment = Environment { command: vec!["oomph".to_owned(), "run".to_owned()], ..Environment::default() };
        let page = summary(&environment, &[oom, skipped]);
        for words in [
            "- command: `oomph run`",
            "2 cases: 1 oom, 1 skipped.",
            "out of memory at event 9 in step 2: 20.0 MiB requested, 30.0 MiB free in total (fragmentation); the device had",
            "skipped: this device has no virtual memory",
        ] {
            assert!(page.contains(words), "'{words}' is missing in\n{page}");
        }
    }

    #[test]
    fn times_are_per_event_and_grouped_by_workload() {
        let record = TimingRecord {
            workload: "hot".to_owned(),
            strategy: "null".to_owned(),
            events: 1000,
            pass_median_ns: 5000,
            sampled_one_in: 16,
            timer_ns: 20,
            alloc_p50_ns: Some(25),
            ..TimingRecord::default()
        };
        let other = TimingRecord { strategy: "caching".to_owned(), ..record.clone() };
        let text = timings(&[record, other], Medium::PIPE);
        assert!(text.contains("5.0 ns") && text.contains("200.0 M") && text.contains("25 / - / -"), "{text}");
        assert_eq!(text.matches("hot").count(), 1, "{text}");
        assert!(text.contains("about 20 ns for reading the clock"), "{text}");
        assert!(!text.contains("under one lock"), "{text}");
    }

    #[test]
    fn time_per_event_of_a_thread_includes_waiting() {
        let record = TimingRecord { events: 1000, pass_median_ns: 5000, threads: Some(8), ..TimingRecord::default() };
        let text = timings(&[record], Medium::PIPE);
        assert!(text.contains("40.0 ns") && text.contains("200.0 M") && text.contains("under one lock"), "{text}");
    }

    #[test]
    fn first_release_has_nothing_to_be_compared_with() {
        let row = |minor, moved| ReleaseRow {
            workload: "w".to_owned(),
            strategy: "caching".to_owned(),
            release: Some(crate::pytorch::Release::new(minor)),
            status: Status::Completed,
            requests: Some(400),
            moved_requests: Some(moved),
            ..ReleaseRow::default()
        };
        let text = ReleaseRow::text(&[row(11, 0), row(15, 5)], Medium::PIPE);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("400")).collect();
        assert!(lines[0].contains("caching") && lines[0].contains("2.11") && !lines[0].contains('%'), "{text}");
        assert!(!lines[1].contains("caching") && lines[1].contains("2.15") && lines[1].contains("5 (1.2 %)"), "{text}");
    }
}
