//! The first screen: the question of a suite, its answer in one sentence, and one chart.
//!
//! Here are the answers of suites that replay cases. Those of thresholds, techniques and claims are in `answers`, those of
//! timed suites in `speed`.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::Serialize;

use super::{
    super::{
        render::{counted, distinct},
        scenario::{BoundRow, CaseGroup, bounds, is_bounded},
    },
    chart_data::{ChartData, kib},
    element::{Cell, HtmlTable, code, escape, folded, listed, no_case},
    page_context::{PageContext, PageRun, moment},
};
use crate::{
    base::Bytes,
    device::{Card, CardFacts},
    measure::{CaseRecord, Status},
    models::Recipe,
    strategy::StrategySpec,
};

/// A question, its answer, and what shows it.
#[derive(Default)]
pub(super) struct Answer {
    /// As text.
    pub(super) question: String,
    /// One sentence, as HTML.
    pub(super) sentence: String,
    /// Who ran out of memory under a limit, why, and what completes: a second sentence, as HTML; empty without limits.
    pub(super) under_limits: String,
    /// The chart, as HTML.
    pub(super) picture: String,
    /// How to read the chart: one line, as HTML.
    pub(super) caption: String,
    /// The numbers of the chart and what else belongs to it, as HTML.
    pub(super) more: String,
}

impl Answer {
    /// Everything below the question.
    pub(super) fn html(&self) -> String {
        let Answer { sentence, under_limits, picture, caption, more, .. } = self;
        let mut html = format!("<p class=\"answer\">{sentence}</p>\n");
        if !under_limits.is_empty() {
            let _ = writeln!(html, "<p class=\"answer\">{under_limits}</p>");
        }
        html + picture + &format!("<p class=\"reading\">{caption}</p>\n{more}")
    }
}

/// What is drawn on the first screen by `script/first.js`.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum FirstChart {
    Strips(StripChart),
    Techniques(super::answers::TechniqueChart),
}

/// Adds a chart to the data and returns its place in the page. `label` is its accessible name.
pub(super) fn place_chart(data: &mut ChartData, chart: FirstChart, label: &str) -> String {
    data.first.push(chart);
    figure("first", data.first.len() - 1, label)
}

fn figure(kind: &str, index: usize, label: &str) -> String {
    format!(
        "<figure class=\"chart first\" data-chart=\"{kind}\" data-index=\"{index}\"><div class=\"canvas\" role=\"group\" \
         aria-label=\"{}\"></div></figure>\n",
        escape(label)
    )
}

/// One row for each strategy, one dot for each workload.
#[derive(Debug, Default, Serialize)]
pub(super) struct StripChart {
    /// What is drawn from left to right, with its unit.
    pub(super) axis: String,
    pub(super) unit: StripUnit,
    /// What the bars at the right are; empty without them.
    pub(super) time_axis: String,
    /// Titles, and ids of their cases with `{}` for the strategy; empty without a row in the page.
    pub(super) workloads: Vec<(String, String)>,
    /// In order, the best first.
    pub(super) rows: Vec<StripRow>,
}

/// How the values of a chart are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StripUnit {
    /// Multiples of the peak of live bytes.
    #[default]
    Times,
    Nanoseconds,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct StripRow {
    pub(super) strategy: usize,
    pub(super) median: Option<f64>,
    /// Of the median, 95 %.
    pub(super) interval: Option<(f64, f64)>,
    pub(super) p90: Option<f64>,
    pub(super) dots: Vec<StripDot>,
    /// In microseconds.
    pub(super) time: Option<u64>,
    /// Cases that did not complete.
    pub(super) failed: u64,
}

/// Place of the workload, value, and a note; for times also the fastest and slowest pass.
#[derive(Debug, Serialize)]
pub(super) struct StripDot(pub(super) usize, pub(super) f64, pub(super) String, pub(super) Option<(f64, f64)>);

/// Four digits behind the point are more than a chart shows.
pub(super) fn short(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// A case's id as a pattern for all strategies of its workload.
pub(super) fn id_pattern(case_id: &str, strategy: &str) -> String {
    let own = format!("/{strategy}@");
    if case_id.contains(&own) { case_id.replacen(&own, "/{}@", 1) } else { String::new() }
}

/// Titles of workloads with the pattern of their ids, in order of appearance.
#[derive(Default)]
pub(super) struct WorkloadList {
    places: BTreeMap<String, usize>,
    pub(super) all: Vec<(String, String)>,
}

impl WorkloadList {
    pub(super) fn place(&mut self, title: &str, pattern: &str) -> usize {
        let next = self.all.len();
        let place = *self.places.entry(title.to_owned()).or_insert(next);
        if place == next {
            self.all.push((title.to_owned(), pattern.to_owned()));
        }
        place
    }
}

/// The files of the suites, for runs of releases that did not keep the question.
const SUITES: [(&str, &str); 10] = [
    ("quick", include_str!("../../../suites/quick.toml")),
    ("strategies", include_str!("../../../suites/strategies.toml")),
    ("oom-thresholds", include_str!("../../../suites/oom-thresholds.toml")),
    ("fragmentation", include_str!("../../../suites/fragmentation.toml")),
    ("leaks", include_str!("../../../suites/leaks.toml")),
    ("throughput", include_str!("../../../suites/throughput.toml")),
    ("techniques", include_str!("../../../suites/techniques.toml")),
    ("claims", include_str!("../../../suites/claims.toml")),
    ("settings", include_str!("../../../suites/settings.toml")),
    ("peers", include_str!("../../../suites/peers.toml")),
];

/// The question of a suite: as its run keeps it, as the suite of that name asks it, or `otherwise`.
pub(super) fn question(runs: &[PageRun], suite: &str, otherwise: &str) -> String {
    // Cases with different results in two runs have the name of the run behind that of the suite.
    let suite = suite.split(" (").next().unwrap_or(suite);
    let settings = runs.iter().filter_map(|run| run.environment.settings.as_ref());
    let kept = settings.flat_map(|settings| settings.suites.iter().zip(&settings.questions));
    let asked = kept.into_iter().find(|(name, _)| *name == suite).map(|(_, question)| question.clone());
    let built_in = || {
        let (_, text) = SUITES.iter().find(|(name, _)| *name == suite)?;
        let line = text.lines().find_map(|line| line.strip_prefix("question = \""))?;
        Some(line.trim_end_matches('"').to_owned())
    };
    asked.or_else(built_in).unwrap_or_else(|| otherwise.to_owned())
}

/// The strategy that others are compared with.
fn base(runs: &[PageRun]) -> &str {
    let given = runs.iter().find_map(|run| run.environment.settings.as_ref()).map(|settings| settings.base.as_str());
    given.filter(|base| !base.is_empty()).unwrap_or("caching")
}

/// The answer of a suite from its cases; `None` if none ran.
pub(super) fn of_suite(context: &PageContext<'_>, data: &mut ChartData, suite: &str) -> Option<Answer> {
    let groups: Vec<(&CaseGroup<'_>, &str)> =
        context.titled().filter(|(group, _)| group.scenario.suite == suite).collect();
    let cases: Vec<CaseRecord> =
        groups.iter().flat_map(|(group, _)| group.records.iter().map(|record| (*record).clone())).collect();
    if !cases.iter().any(|record| record.clock.is_some()) {
        return None;
    }
    let strategies = distinct(cases.iter().map(|record| record.strategy.as_str())).len();
    let what = match &*groups {
        [(_, title)] => format!(" for {title}"),
        _ => String::new(),
    };
    let ask = |otherwise: &str| question(context.runs.runs, suite, &otherwise.replace("{}", &what));
    let is_free = cases.iter().any(|record| record.clock.is_some() && is_bounded(record));
    if let ([record], true) = (&*cases, is_free) {
        return Some(on_cards(data, record, ask("How much memory is needed{}, and on which card?")));
    }
    match is_free && strategies > 1 {
        true => Some(strips(context, data, &cases, &groups, ask("How much memory does each strategy need{}?"))),
        false => Some(outcomes(context, &groups, ask("When does memory run out{}?"))),
    }
}

/// Card sizes as a ruler with the bars of programs on it, drawn by `drawRuler` of `script/ruler.js`.
///
/// [`place_ruler`] puts it into the data and returns its figure.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct RulerChart {
    /// One bar each.
    needed: Vec<RulerBar>,
    cards: Vec<RulerCard>,
}

/// What a program takes.
#[derive(Debug, PartialEq, Serialize)]
struct RulerBar {
    name: String,
    kib: u64,
    /// Whether it ran to its end on the card that was asked about.
    fits: Option<bool>,
}

/// What a program may take of a card.
#[derive(Debug, PartialEq, Serialize)]
struct RulerCard {
    name: String,
    kib: u64,
}

impl RulerChart {
    /// With the cards that oomph knows. The context was measured on the H200 and is taken for all of them.
    pub(super) fn of_known_cards() -> RulerChart {
        let context_bytes = "h200".parse::<Card>().map_or(0, |card| card.context_bytes());
        let cards = CardFacts::all().iter().map(|card| (&card.name, card.total_bytes().saturating_sub(context_bytes)));
        cards.fold(RulerChart::default(), |ruler, (name, bytes)| ruler.card(name, bytes))
    }

    /// Adds a bar. `fits` is `None` where no card was asked about.
    pub(super) fn bar(mut self, name: &str, needed_bytes: u64, fits: Option<bool>) -> RulerChart {
        self.needed.push(RulerBar { name: name.to_owned(), kib: kib(needed_bytes), fits });
        self
    }

    /// Adds a card by the memory that it has left for a program: without context and libraries.
    pub(super) fn card(mut self, name: &str, available_bytes: u64) -> RulerChart {
        self.cards.push(RulerCard { name: name.to_owned(), kib: kib(available_bytes) });
        self
    }
}

/// Adds a ruler to the data and returns its place in the page. `label` is its accessible name.
pub(super) fn place_ruler(data: &mut ChartData, ruler: RulerChart, label: &str) -> String {
    data.rulers.push(ruler);
    figure("ruler", data.rulers.len() - 1, label)
}

/// One case: what it takes, beside the sizes of cards.
fn on_cards(data: &mut ChartData, record: &CaseRecord, question: String) -> Answer {
    let taken = record.needed_bytes.or(record.peak_reserved_bytes).unwrap_or(0);
    let verb = if record.needed_bytes.is_some() { "needs" } else { "reserves" };
    let ran_out = match record.status {
        Status::Oom => format!(", and runs out of memory in {}", escape(&moment(record))),
        _ => String::new(),
    };
    let live = record.live_peak_rounded_bytes.unwrap_or(0);
    let sentence = format!(
        "{} {verb} {} under {}{ran_out}; {} are alive at one time.",
        code(&record.workload),
        Bytes(taken),
        code(&record.strategy),
        Bytes(live)
    );
    let mut ruler = RulerChart::of_known_cards();
    if !StrategySpec::from(record.strategy.as_str()).takes_fixed_part() {
        ruler = ruler.bar(&format!("{verb} under {}", record.strategy), taken, None);
    }
    let ruler = ruler.bar("alive at one time", live, None);
    let picture = place_ruler(data, ruler, &format!("Memory of {} on a ruler of card sizes", record.workload));
    let spare = match record.needed_bytes {
        Some(_) => "",
        None => " With less, the allocator gives back its cache before a request fails: a smaller card may do.",
    };
    let caption =
        format!("A bar that ends left of a dashed line fits into what that card has left for a program.{spare}");
    Answer { question, sentence, picture, caption, ..Answer::default() }
}

/// How a strategy stands: the marks of its row.
pub(super) struct Standing<'a> {
    pub(super) strategy: &'a str,
    pub(super) median: f64,
    pub(super) p90: f64,
    pub(super) driver_ns: Option<u64>,
    /// Its memory, where there is only one workload.
    pub(super) taken: Option<u64>,
}

/// PyTorch's allocator with the setting that saves most.
pub(super) const EXPANDABLE: &str = "caching:expandable_segments:True";
/// A strategy with more than this many times the driver time of the base is not the answer.
const MUCH_SLOWER: f64 = 3.0;
/// With fewer values the mark of nine in ten is the worst, and an interval of the median says little.
pub(super) const TEN: usize = 10;

/// The sentence about strategies, the best first. `verb` is what they do with memory, `of` what the marks are over.
pub(super) fn compared(standings: &[Standing<'_>], base: &str, verb: &str, of: (usize, &str)) -> String {
    let own = standings.iter().find(|standing| standing.strategy == base);
    let slower = |standing: &Standing<'_>| {
        let ratio = standing.driver_ns? as f64 / own?.driver_ns.filter(|time| *time > 0)? as f64;
        Some(ratio).filter(|ratio| *ratio > MUCH_SLOWER)
    };
    let Some(best) = standings.iter().find(|standing| slower(standing).is_none()) else { return String::new() };
    let place = match of {
        (1, _) => String::new(),
        (count, what) if count < TEN => format!(" on all {count} {what}"),
        (_, what) => format!(" on nine in ten {what}"),
    };
    let amount = |standing: &Standing<'_>| match standing.taken {
        Some(bytes) => format!("{}, {}", Bytes(bytes), times(standing.p90)),
        None => format!("at most {}", times(standing.p90)),
    };
    let median = if of.0 >= TEN { format!(" (median {})", times(best.median)) } else { String::new() };
    let mut text = format!("{} {verb} {} the peak of live bytes{place}{median}", code(best.strategy), amount(best));
    if let Some(own) = own.filter(|own| own.strategy != best.strategy) {
        let _ = write!(text, ", {} {}", code(own.strategy), amount(own));
    }
    let thrifty = standings.iter().take_while(|standing| standing.strategy != best.strategy);
    let thrifty: Vec<String> = thrifty
        // Less means less as it is written.
        .filter(|standing| times(standing.p90) != times(best.p90))
        .filter_map(|standing| Some((standing, slower(standing)?)))
        .map(|(standing, ratio)| {
            format!("{} {} ({ratio:.0} times as long)", code(standing.strategy), times(standing.p90))
        })
        .collect();
    // What can be had without another allocator.
    let setting = standings
        .iter()
        .find(|standing| standing.strategy == EXPANDABLE && standing.p90 < own.map_or(0.0, |own| own.p90));
    if let Some(setting) = setting.filter(|setting| setting.strategy != best.strategy) {
        let _ = write!(text, ", with PyTorch's setting {} {}", code("expandable_segments:True"), amount(setting));
    }
    if !thrifty.is_empty() {
        let _ = write!(text, "; less at much more driver time than {}: {}", code(base), listed(&thrifty));
    }
    text
}

/// A ratio in words.
pub(super) fn times(ratio: f64) -> String {
    if ratio < 9.995 { format!("{ratio:.2} times") } else { format!("{ratio:.1} times") }
}

/// How to read strips: what the dots and the bars are.
pub(super) fn strip_caption(workloads: usize, of: (usize, &str)) -> String {
    let over = if of.0 < workloads { format!(" over {} {}", of.0, of.1) } else { String::new() };
    let bars = match of.0 {
        count if count < TEN => format!("Bar: median{over}."),
        _ => format!("Solid bar: median{over}, with its 95 % interval; hollow bar: nine in ten, in this order."),
    };
    format!("Dot: one of {workloads} workloads; left is better. Number: the worst. {bars}")
}

/// The note on strategies that are not drawn.
pub(super) fn left_out<'a>(strategies: impl IntoIterator<Item = &'a str>) -> String {
    let fixed: Vec<String> =
        distinct(strategies.into_iter().filter(|name| is_fixed(name))).into_iter().map(code).collect();
    match fixed.is_empty() {
        true => String::new(),
        false => format!(" Left out: {} (a fixed part of the device).", listed(&fixed)),
    }
}

pub(super) fn is_fixed(strategy: &str) -> bool {
    StrategySpec::from(strategy).takes_fixed_part()
}

/// The cases of a suite as strips.
struct CaseStrips<'a> {
    context: &'a PageContext<'a>,
    /// One for each strategy, the best first.
    rows: Vec<BoundRow>,
    /// Whether what suffices is known, and not only what is taken.
    is_by_need: bool,
    groups: &'a [(&'a CaseGroup<'a>, &'a str)],
}

impl<'a> CaseStrips<'a> {
    fn of(
        context: &'a PageContext<'a>,
        cases: &[CaseRecord],
        groups: &'a [(&'a CaseGroup<'a>, &'a str)],
    ) -> CaseStrips<'a> {
        let mut rows = bounds(cases);
        rows.retain(|row| row.is_of_all() && !is_fixed(&row.strategy));
        let is_by_need = rows.iter().all(|row| row.median_need_ratio.is_some());
        // The mark of nine in ten decides; a strategy without a completed case is last.
        rows.sort_by(|one, other| {
            let p90 = |row: &BoundRow| row.figures(is_by_need).p90.unwrap_or(f64::INFINITY);
            p90(one).total_cmp(&p90(other)).then(one.driver_ns.cmp(&other.driver_ns))
        });
        CaseStrips { context, rows, is_by_need, groups }
    }

    /// How many values the marks are over, and what they are.
    fn counted_once(&self) -> (usize, &'static str) {
        let families = self.rows.iter().map(|row| row.families).max().unwrap_or(0);
        let patterns = self.rows.iter().map(|row| row.patterns).max().unwrap_or(0);
        (families as usize, if families < patterns { "families of workloads" } else { "workloads" })
    }

    fn standings(&self) -> Vec<Standing<'_>> {
        let is_one = self.counted_once().0 == 1;
        let records = || self.groups.iter().flat_map(|(group, _)| group.records.iter());
        self.rows
            .iter()
            .filter_map(|row| {
                let figures = row.figures(self.is_by_need);
                let case = records().find(|record| record.strategy == row.strategy && is_bounded(record));
                let taken = case.filter(|_| is_one).and_then(|record| self.taken(record));
                Some(Standing {
                    strategy: &row.strategy,
                    median: figures.median?,
                    p90: figures.p90?,
                    driver_ns: row.driver_ns,
                    taken,
                })
            })
            .collect()
    }

    fn taken(&self, record: &CaseRecord) -> Option<u64> {
        if self.is_by_need { record.needed_bytes } else { record.peak_reserved_bytes }
    }

    fn chart(&self) -> StripChart {
        let ratio = if self.is_by_need { CaseRecord::need_ratio } else { CaseRecord::appetite_ratio };
        let records =
            || self.groups.iter().flat_map(|(group, title)| group.records.iter().map(move |record| (*record, *title)));
        let clock = records().find_map(|(record, _)| record.clock);
        let mut workloads = WorkloadList::default();
        let mut dots: BTreeMap<&str, Vec<StripDot>> = BTreeMap::new();
        for (record, title) in records().filter(|(record, _)| record.clock == clock && is_bounded(record)) {
            let Some(value) = ratio(record) else { continue };
            let place = workloads.place(title, &id_pattern(&record.case_id, &record.strategy));
            let live = Bytes(record.live_peak_rounded_bytes.unwrap_or(0));
            let note = format!("{} for {live} live", Bytes(self.taken(record).unwrap_or(0)));
            dots.entry(&record.strategy).or_default().push(StripDot(place, short(value), note, None));
        }
        // Of a few workloads the dots say all.
        let (count, _) = self.counted_once();
        let strip = |row: &BoundRow| {
            let figures = row.figures(self.is_by_need);
            StripRow {
                strategy: self.context.place(&row.strategy),
                median: figures.median.filter(|_| count > 1).map(short),
                interval: figures.interval.filter(|_| count >= TEN).map(|(low, high)| (short(low), short(high))),
                p90: figures.p90.filter(|_| count >= TEN).map(short),
                dots: dots.remove(row.strategy.as_str()).unwrap_or_default(),
                time: row.driver_ns.map(|time| time / 1000),
                failed: row.cases - row.completed_cases,
            }
        };
        let rows: Vec<StripRow> = self.rows.iter().map(strip).collect();
        StripChart {
            axis: match self.is_by_need {
                true => "memory needed ÷ peak of live bytes (log)".to_owned(),
                false => "peak of reserved memory ÷ peak of live bytes (log)".to_owned(),
            },
            unit: StripUnit::Times,
            time_axis: if rows.iter().any(|row| row.time.is_some()) { "driver time" } else { "" }.to_owned(),
            workloads: workloads.all,
            rows,
        }
    }

    /// The numbers of the chart.
    fn table(&self) -> String {
        let figures = |row: &BoundRow| row.figures(self.is_by_need);
        let table = HtmlTable::of(&self.rows)
            .words("strategy", "strategy", |row| self.context.strategy(&row.strategy))
            .numbers("median", "median_ratio", |row| Cell::decimal(figures(row).median, 3))
            .numbers("at least (95 %)", "median_low_ratio", |row| Cell::decimal(figures(row).interval.map(|i| i.0), 3))
            .numbers("at most (95 %)", "median_high_ratio", |row| Cell::decimal(figures(row).interval.map(|i| i.1), 3))
            .numbers("nine in ten", "p90_ratio", |row| Cell::decimal(figures(row).p90, 3))
            .numbers("worst", "worst_ratio", |row| Cell::decimal(row.worst(self.is_by_need).0, 2))
            .words("worst workload", "worst_workload", |row| Cell::name(row.worst(self.is_by_need).1.unwrap_or("")))
            .numbers("driver time", "sum_driver_ns", |row| Cell::nanos(row.driver_ns))
            .numbers("families", "families", |row| Cell::count(row.families))
            .numbers("completed", "completed_cases", |row| Cell::count(row.completed_cases))
            .numbers("cases", "cases", |row| Cell::count(row.cases));
        folded(&table.html("Memory by strategy, as multiples of the peak of live bytes", no_case))
    }
}

/// What strategies need over the bound, one dot for each workload, with their driver time.
fn strips(
    context: &PageContext<'_>,
    data: &mut ChartData,
    cases: &[CaseRecord],
    groups: &[(&CaseGroup<'_>, &str)],
    question: String,
) -> Answer {
    let strips = CaseStrips::of(context, cases, groups);
    let (count, what) = strips.counted_once();
    let verb = if strips.is_by_need { "needs" } else { "reserves" };
    let chart = strips.chart();
    let shown = chart.workloads.len();
    let sentence = compared(&strips.standings(), base(context.runs.runs), verb, (count, what)) + ".";
    let caption = match count {
        1 => "Dot: what the strategy takes; left is better.".to_owned(),
        _ if chart.time_axis.is_empty() => strip_caption(shown, (count, what)),
        _ => format!("{} Driver time: the sum of all {what}.", strip_caption(shown, (count, what))),
    } + &left_out(cases.iter().map(|record| record.strategy.as_str()));
    let label = format!("{}, one row for each strategy", chart.axis);
    let more = strips.table();
    let picture = place_chart(data, FirstChart::Strips(chart), &label);
    Answer { question, sentence, under_limits: under_limits(groups), picture, caption, more }
}

/// [`Answer::under_limits`].
fn under_limits(groups: &[(&CaseGroup<'_>, &str)]) -> String {
    let limited: Vec<&CaseRecord> = groups
        .iter()
        .filter(|(group, _)| group.scenario.limit_bytes.is_some())
        .flat_map(|(group, _)| group.records.iter().copied().filter(|record| record.clock.is_some()))
        .collect();
    let failed: Vec<&CaseRecord> = limited.iter().copied().filter(|record| record.status == Status::Oom).collect();
    match (&*limited, &*failed) {
        ([], _) => String::new(),
        (_, []) => format!("Under a limit, all {} complete.", counted(limited.len(), "case", "cases")),
        (_, [one, ..]) => {
            let is_one =
                failed.iter().all(|record| record.workload == one.workload && record.limit_bytes == one.limit_bytes);
            let who: Vec<String> = failed
                .iter()
                .take(MOST_NAMED)
                .map(|record| format!("{} ({})", code(&record.strategy), escape(&moment(record))))
                .collect();
            match is_one && failed.len() <= MOST_NAMED {
                true => format!(
                    "With {} for {}, {} {} out of memory{}.",
                    Bytes(one.limit_bytes.unwrap_or(0)),
                    code(&one.workload),
                    listed(&who),
                    if who.len() == 1 { "runs" } else { "run" },
                    cause_and_remedy(&limited, one)
                ),
                false => format!("Under a limit, {} of {} cases run out of memory.", failed.len(), limited.len()),
            }
        }
    }
}

/// Why cases like `failed` ran out of memory, and which of the others complete under the same limit.
fn cause_and_remedy(limited: &[&CaseRecord], failed: &CaseRecord) -> String {
    let alike = || {
        limited.iter().filter(|record| record.workload == failed.workload && record.limit_bytes == failed.limit_bytes)
    };
    let causes = distinct(alike().filter_map(|record| Some(record.oom_cause?.name())));
    let why = match (&*causes, failed.oom_requested_bytes.zip(failed.oom_free_bytes)) {
        (["fragmentation"], Some((requested, free))) => {
            format!(
                " by fragmentation: {} are requested, {} are free, but not in one piece",
                Bytes(requested),
                Bytes(free)
            )
        }
        (["exhaustion"], Some((requested, free))) => {
            format!(": {} are requested, and only {} are free", Bytes(requested), Bytes(free))
        }
        _ => String::new(),
    };
    let complete: Vec<String> =
        alike().filter(|record| record.status == Status::Completed).map(|record| code(&record.strategy)).collect();
    match complete.len() {
        0 => format!("{why}; none completes"),
        1..=MOST_NAMED => {
            format!("{why}; {} {}", listed(&complete), if complete.len() == 1 { "completes" } else { "complete" })
        }
        many => format!("{why}; {many} others complete"),
    }
}

/// The name of a workload without its parameters.
pub(super) fn stem(workload: &str) -> &str {
    workload.split('[').next().unwrap_or(workload)
}

/// More names are counted, not listed.
const MOST_NAMED: usize = 3;

/// The outcomes of a workload, by strategy.
struct OutcomeRow<'a> {
    /// The name of the workload, and what tells it from others of that name.
    label: &'a str,
    title: &'a str,
    group: &'a CaseGroup<'a>,
}

impl OutcomeRow<'_> {
    fn of_strategy(&self, strategy: &str) -> Option<&CaseRecord> {
        self.group.records.iter().copied().find(|record| record.strategy == strategy)
    }

    /// The cases that count in a sentence.
    fn measured(&self) -> impl Iterator<Item = &CaseRecord> {
        let records = self.group.records.iter().copied();
        records.filter(|record| record.clock.is_some() && !is_fixed(&record.strategy))
    }

    fn failures(&self) -> usize {
        self.measured().filter(|record| record.status == Status::Oom).count()
    }

    /// The first and the last failure by step. What does not have memory for the first step is not compared.
    fn steps(&self) -> Option<(&CaseRecord, &CaseRecord)> {
        let failed = || self.measured().filter(|record| record.oom_step.is_some_and(|step| step > 0));
        Some((failed().min_by_key(|record| record.oom_step)?, failed().max_by_key(|record| record.oom_step)?))
    }
}

/// When cases run out of memory: a table of workloads and strategies.
fn outcomes(context: &PageContext<'_>, groups: &[(&CaseGroup<'_>, &str)], question: String) -> Answer {
    let stems: Vec<&str> = groups.iter().map(|(group, _)| stem(group.scenario.workload)).collect();
    let label = |place: usize, title| {
        let is_alone = stems.iter().filter(|name| **name == stems[place]).count() == 1;
        if is_alone { stems[place] } else { title }
    };
    let rows: Vec<OutcomeRow<'_>> = groups
        .iter()
        .enumerate()
        .map(|(place, &(group, title))| OutcomeRow { label: label(place, title), title, group })
        .collect();
    let strategies =
        distinct(groups.iter().flat_map(|(group, _)| group.records.iter().map(|record| record.strategy.as_str())));
    let latest = rows.iter().filter_map(|row| row.steps()?.1.oom_step).max().unwrap_or(0);
    let mut head = String::new();
    for strategy in &strategies {
        let _ = write!(head, "<th scope=\"col\"><span>{}</span></th>", context.marked(strategy));
    }
    let mut body = String::new();
    for row in &rows {
        let purpose = Recipe::named(stem(row.group.scenario.workload)).map(|recipe| recipe.purpose).unwrap_or_default();
        let _ = write!(
            body,
            "<tr><th scope=\"row\" title=\"{}\">{} <small>{}</small></th>",
            escape(row.title),
            escape(row.label),
            escape(&purpose)
        );
        for strategy in &strategies {
            body.push_str(
                &row.of_strategy(strategy)
                    .map_or_else(|| "<td></td>".to_owned(), |record| outcome_cell(record, latest)),
            );
        }
        body.push_str("</tr>\n");
    }
    let picture = format!(
        "<div class=\"heat\" tabindex=\"0\" role=\"region\" aria-label=\"When memory runs out, by program and strategy\"><table>\n\
         <caption>When memory runs out</caption>\n<thead><tr><th scope=\"col\">program</th>{head}</tr></thead>\n\
         <tbody>\n{body}</tbody></table></div>\n"
    );
    let caption =
        "A number is the step in which memory runs out, in a stronger colour where that is earlier; <b>&ndash;</b> is no OOM."
            .to_owned()
            + &limits_in_words(groups)
            + &left_out(strategies.iter().copied()).replace("Left out", "Not in the sentence");
    Answer { question, sentence: outcome_sentence(&rows), picture, caption, ..Answer::default() }
}

/// The limits of the cases, behind a caption.
fn limits_in_words(groups: &[(&CaseGroup<'_>, &str)]) -> String {
    let mut limits: Vec<u64> = groups.iter().filter_map(|(group, _)| group.scenario.limit_bytes).collect();
    limits.sort_unstable();
    limits.dedup();
    let words: Vec<String> = limits.iter().map(|limit| Bytes(*limit).to_string()).collect();
    if words.is_empty() { String::new() } else { format!(" Memory is limited to {}.", words.join(" or ")) }
}

/// One case: the step of its OOM.
fn outcome_cell(record: &CaseRecord, latest: u32) -> String {
    let title = format!("{}, {}: ", escape(&record.workload), escape(&record.strategy));
    match (record.status, record.oom_step) {
        (Status::Completed, _) => format!("<td class=\"good\" title=\"{title}no OOM\">&ndash;</td>"),
        (Status::Oom, step) => {
            // From a tenth to a half of the colour: text on it stays readable.
            let log = |step: u32| f64::from(step + 1).ln();
            let early = 1.0 - log(step.unwrap_or(latest)) / log(latest.max(1));
            let heat = (12.0 + 40.0 * early).round();
            let text = step.map_or_else(|| "OOM".to_owned(), |step| step.to_string());
            let when = escape(&moment(record)).into_owned();
            format!("<td class=\"hot\" style=\"--heat:{heat}%\" title=\"{title}OOM in {when}\">{text}</td>")
        }
        (status, _) => format!("<td class=\"none\" title=\"{title}{}\">{}</td>", escape(&record.reason), status.name()),
    }
}

fn outcome_sentence(rows: &[OutcomeRow<'_>]) -> String {
    let programs = counted(rows.len(), "program", "programs");
    let all = rows.iter().filter(|row| row.failures() > 0 && row.failures() == row.measured().count()).count();
    let none = rows.iter().filter(|row| row.failures() == 0).count();
    if let [row] = rows {
        let failed: Vec<String> = row
            .measured()
            .filter(|record| record.status == Status::Oom)
            .map(|record| format!("{} ({})", code(&record.strategy), escape(&moment(record))))
            .collect();
        let measured: Vec<&CaseRecord> = row.measured().collect();
        return match measured.iter().find(|record| record.status == Status::Oom) {
            None => {
                format!("{} completes under {}.", code(row.label), counted(measured.len(), "strategy", "strategies"))
            }
            Some(first) => format!(
                "{} runs out of memory under {}{}.",
                code(row.label),
                listed(&failed),
                cause_and_remedy(&measured, first)
            ),
        };
    }
    let depends: Vec<String> = rows
        .iter()
        .filter(|row| row.failures() > 0 && row.failures() < row.measured().count())
        .map(|row| code(row.label))
        .collect();
    if none == rows.len() {
        return format!("None of {programs} runs out of memory.");
    }
    let mut text = match all {
        0 => format!("{} of {programs} run out of memory, none under every allocator", rows.len() - none),
        _ => format!("{all} of {programs} run out of memory under every allocator, {none} under none"),
    };
    match depends.len() {
        0 if all > 0 => {
            text.push_str("; no allocator avoids the OOM of such a program, so the program must be changed")
        }
        0 => {}
        count if count <= MOST_NAMED => {
            let _ = write!(text, "; the allocator decides for {}", listed(&depends));
        }
        count => {
            let _ = write!(text, "; the allocator decides for {count}");
        }
    }
    let spread = rows.iter().filter_map(|row| {
        let (first, last) = row.steps()?;
        Some((last.oom_step? - first.oom_step?, row, first, last))
    });
    if let Some((steps @ 1.., row, first, last)) = spread.max_by_key(|(steps, ..)| *steps) {
        let _ = write!(
            text,
            "; the step of an OOM differs by up to {steps} ({}: step {} with {}, {} with {})",
            code(row.label),
            first.oom_step.unwrap_or(0),
            code(&first.strategy),
            last.oom_step.unwrap_or(0),
            code(&last.strategy)
        );
    }
    text + "."
}

#[cfg(test)]
mod tests {
    use super::{super::page_context::CollectedRuns, *};
    use crate::{
        device::DeviceClock,
        measure::CaseLabel,
        replay::OomCause,
        report::{Environment, RunSettings},
    };

    fn case(workload: &str, strategy: &str, reserved: u64, driver_ns: u64) -> CaseRecord {
        let label = CaseLabel {
            suite: "s".to_owned(),
            workload: workload.to_owned(),
            strategy: strategy.to_owned(),
            device: "sim".to_owned(),
            ..CaseLabel::default()
        };
        CaseRecord {
            clock: Some(DeviceClock::Virtual),
            driver_alloc_calls: Some(1),
            live_peak_rounded_bytes: Some(100),
            peak_reserved_bytes: Some(reserved),
            driver_ns: Some(driver_ns),
            ..CaseRecord::unmeasured(&label, Status::Completed, "")
        }
    }

    fn oom(workload: &str, strategy: &str, step: u32) -> CaseRecord {
        let base = case(workload, strategy, 100, 1);
        CaseRecord { status: Status::Oom, oom_step: Some(step), limit_bytes: Some(1 << 30), ooms: Some(1), ..base }
    }

    fn within(workload: &str, strategy: &str) -> CaseRecord {
        CaseRecord { limit_bytes: Some(1 << 30), ..case(workload, strategy, 100, 1) }
    }

    /// The answer of the suite `s`, and the charts.
    fn answered(records: Vec<CaseRecord>) -> (Answer, ChartData) {
        let runs = [PageRun { records, ..PageRun::default() }];
        let collected = CollectedRuns::new(&runs);
        let context = PageContext::new(&collected);
        let mut data = ChartData::new(&context.strategies);
        (of_suite(&context, &mut data, "s").unwrap(), data)
    }

    #[test]
    fn question_is_that_of_the_run_then_that_of_the_suite() {
        let settings = RunSettings {
            suites: vec!["mine".to_owned(), "quick".to_owned()],
            questions: vec!["Why?".to_owned(), "Now what?".to_owned()],
            ..RunSettings::default()
        };
        let environment = Environment { settings: Some(settings), ..Environment::default() };
        let runs = [PageRun { environment, ..PageRun::default() }];
        assert_eq!(question(&runs, "mine (second)", ""), "Why?");
        assert_eq!(question(&runs, "quick", ""), "Now what?");
        assert!(question(&[], "leaks", "").starts_with("In which step does each training program"));
        assert_eq!(question(&[], "unknown", "What?"), "What?");
        for (name, _) in SUITES {
            assert!(question(&[], name, "").ends_with('?'), "{name}");
        }
    }

    #[test]
    fn slow_strategy_is_not_the_answer() {
        let standing = |strategy, p90, driver_ns, taken| Standing {
            strategy,
            median: 1.0,
            p90,
            driver_ns: Some(driver_ns),
            taken,
        };
        let rows = [
            standing("direct", 1.0, 900, None),
            standing("oomph", 1.07, 20, None),
            standing("caching", 1.62, 10, None),
        ];
        assert_eq!(
            compared(&rows, "caching", "needs", (40, "families")),
            "<code>oomph</code> needs at most 1.07 times the peak of live bytes on nine in ten families (median 1.00 times), \
             <code>caching</code> at most 1.62 times; less at much more driver time than <code>caching</code>: \
             <code>direct</code> 1.00 times (90 times as long)"
        );
        let one = [standing("oomph", 1.5, 20, Some(3 << 30)), standing("caching", 2.0, 10, Some(4 << 30))];
        assert_eq!(
            compared(&one, "caching", "needs", (1, "workloads")),
            "<code>oomph</code> needs 3.00 GiB, 1.50 times the peak of live bytes, <code>caching</code> 4.00 GiB, 2.00 times"
        );
    }

    #[test]
    fn strips_are_sorted_by_the_deciding_mark_without_fixed_parts() {
        let records = ["a", "b"].into_iter().flat_map(|workload| {
            [
                case(workload, "arena", 100, 1),
                case(workload, "caching", 150, 10),
                case(workload, "oomph", 110, 12),
                case(workload, "direct", 101, 500),
            ]
        });
        let (answer, data) = answered(records.collect());
        let [FirstChart::Strips(chart)] = &*data.first else { panic!("one chart") };
        let order: Vec<&str> = chart.rows.iter().map(|row| data.strategies[row.strategy].as_str()).collect();
        assert_eq!(order, ["direct", "oomph", "caching"]);
        assert_eq!(chart.workloads[0], ("a".to_owned(), "s/a/{}@sim#0".to_owned()));
        assert!(chart.axis.starts_with("peak of reserved memory"), "{}", chart.axis);
        assert!(answer.sentence.starts_with("<code>oomph</code> reserves at most 1.10 times"), "{}", answer.sentence);
        assert!(answer.caption.contains("Left out: <code>arena</code> (a fixed part of the device)"));
        assert!(!answer.sentence.contains("arena"), "{}", answer.sentence);
    }

    #[test]
    fn need_is_drawn_where_all_have_it() {
        let need = |strategy, needed| CaseRecord { needed_bytes: Some(needed), ..case("a", strategy, 900, 10) };
        let (answer, data) = answered(vec![need("caching", 4 << 20), need("oomph", 2 << 20)]);
        let [FirstChart::Strips(chart)] = &*data.first else { panic!("one chart") };
        assert!(chart.axis.starts_with("memory needed"), "{}", chart.axis);
        assert_eq!(chart.rows[0].dots[0].1, 1.0, "in whole pages");
        assert_eq!(chart.rows[0].median, None, "one workload has no median");
        assert!(answer.sentence.starts_with("<code>oomph</code> needs 2.00 MiB, 1.00 times"), "{}", answer.sentence);
    }

    #[test]
    fn limits_are_part_of_the_answer() {
        let mut records = vec![case("a", "caching", 150, 10), case("a", "oomph", 110, 12)];
        let fragmented = CaseRecord {
            oom_cause: Some(OomCause::Fragmentation),
            oom_requested_bytes: Some(2 << 20),
            oom_free_bytes: Some(3 << 20),
            ..oom("b", "caching", 7)
        };
        records.extend([fragmented, within("b", "oomph")]);
        let (answer, _) = answered(records);
        assert!(
            answer.under_limits.starts_with(
                "With 1.00 GiB for <code>b</code>, <code>caching</code> (step 7) runs out of memory by fragmentation: 2.00 \
                 MiB are requested, 3.00 MiB are free, but not in one piece; <code>oomph</code> completes."
            ),
            "{}",
            answer.under_limits
        );
    }

    #[test]
    fn outcomes_name_what_the_allocator_changes() {
        let records = vec![
            oom("leak", "caching", 10),
            oom("leak", "oomph", 14),
            oom("leak", "arena", 90),
            oom("odd", "caching", 3),
            within("odd", "oomph"),
            within("fine", "caching"),
            within("fine", "oomph"),
        ];
        let (answer, data) = answered(records);
        assert!(data.first.is_empty(), "the table is HTML");
        assert_eq!(
            answer.sentence,
            "1 of 3 programs run out of memory under every allocator, 1 under none; the allocator decides for \
             <code>odd</code>; the step of an OOM differs by up to 4 (<code>leak</code>: step 10 with <code>caching</code>, 14 with \
             <code>oomph</code>)."
        );
        assert!(answer.caption.ends_with("Not in the sentence: <code>arena</code> (a fixed part of the device)."));
        assert!(answer.picture.contains(">14</td>") && answer.picture.contains("&ndash;"), "{}", answer.picture);
    }

    #[test]
    fn one_case_is_put_on_a_ruler_of_cards() {
        let (answer, data) = answered(vec![case("a", "caching", 30 << 30, 1)]);
        let [ruler] = &*data.rulers else { panic!("one ruler") };
        assert_eq!(ruler.needed[0].kib, 30 << 20);
        assert!(ruler.cards.iter().any(|card| card.name == "h200" && card.kib < 150_109_880_320 >> 10));
        assert!(answer.sentence.contains("reserves 30.0 GiB under <code>caching</code>"), "{}", answer.sentence);
    }
}
