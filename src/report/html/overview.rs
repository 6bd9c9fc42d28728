//! The first thing that is read: who needs least memory where, where memory was lost, when it ran out, who is fastest.

use std::fmt::Write as _;

use super::{
    element::{Cell, Column, Section, Table, code, counted, escape, listed},
    material::{Material, fastest, least, moment, most, out_of_memory},
};
use crate::{
    answer::claims::Verdict,
    base::{Bytes, Nanos},
    measure::CaseRecord,
};

/// More failures than this are counted and not told one by one.
const MOST_TOLD: usize = 4;
/// Somebody who is slower by this is told to be slow.
const MUCH_SLOWER: f64 = 3.0;

/// The section, for whatever the runs hold.
pub(super) fn overview(material: &Material<'_>) -> Section {
    let mut cards = Vec::new();
    if !material.groups.is_empty() {
        cards.extend([least_memory(material), lost(material), ran_out(material), fast(material)].into_iter().flatten());
    }
    cards.extend([thresholds(material), techniques(material), claims(material)].into_iter().flatten());
    let mut body = "<div class=\"cards\">\n".to_owned();
    for (question, answer) in &cards {
        let _ = writeln!(body, "<div class=\"card\"><h3>{question}</h3>{answer}</div>");
    }
    body.push_str("</div>\n");
    let table = winners(material);
    if !table.is_empty() {
        body.push_str(&table.html());
        body.push_str(
            "<p class=\"note\">Device used is what <code>nvidia-smi</code> would show: whole pages, the driver's context \
             and libraries included. Live is the most that the program held at one time: no allocator can do with \
             less.</p>\n",
        );
    }
    Section { id: "overview", subject: "Overview", finding: headline(material), body }
}

/// The page in a sentence.
fn headline(material: &Material<'_>) -> String {
    let cases = material.gathered.records.len();
    if cases == 0 {
        return "What was found".to_owned();
    }
    let failed = material.groups.iter().flat_map(|group| out_of_memory(group)).count();
    let ran = counted(cases, "case", "cases");
    let workloads = counted(material.groups.len(), "workload", "workloads");
    match failed {
        0 => format!("{ran} on {workloads}: memory never ran out"),
        failed => format!("{ran} on {workloads}: memory ran out in {failed}"),
    }
}

type Card = (&'static str, String);

/// How often each strategy is the first, most often first.
fn tally<'a>(winners: impl Iterator<Item = &'a CaseRecord>) -> Vec<(&'a str, usize)> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for winner in winners {
        match counts.iter_mut().find(|(name, _)| *name == winner.strategy) {
            Some((_, count)) => *count += 1,
            None => counts.push((&winner.strategy, 1)),
        }
    }
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    counts
}

fn in_words(counts: &[(&str, usize)], of: usize, what: &str) -> String {
    let told: Vec<String> = counts
        .iter()
        .take(MOST_TOLD)
        .enumerate()
        .map(|(place, (name, count))| {
            let share = if place == 0 { format!("{count} of {of} workloads") } else { count.to_string() };
            format!("{} on {share}", code(name))
        })
        .collect();
    format!("<p>{what} {}.</p>", listed(&told))
}

fn least_memory(material: &Material<'_>) -> Option<Card> {
    let counts = tally(material.groups.iter().filter_map(least));
    let (first, _) = counts.first()?;
    let of = counts.iter().map(|(_, count)| count).sum();
    let mut answer = in_words(&counts, of, "Least is needed by");
    // Whoever gives everything back at once needs little and waits long: both belong together.
    let times: Vec<(u64, u64)> = material
        .groups
        .iter()
        .filter(|group| least(group).is_some_and(|record| record.strategy == *first))
        .filter_map(|group| Some((least(group)?.driver_ns, fastest(group)?.driver_ns)))
        .collect();
    let (own, best) = times.iter().fold((0, 0), |sum, time| (sum.0 + time.0, sum.1 + time.1));
    let ratio = own as f64 / best.max(1) as f64;
    if ratio >= MUCH_SLOWER {
        let _ =
            write!(answer, "<p>{} pays for it with {ratio:.0} times the driver time of the fastest.</p>", code(first));
    }
    Some(("Who needs least memory?", answer))
}

fn lost(material: &Material<'_>) -> Option<Card> {
    let unused = |record: &CaseRecord| record.peak_reserved_bytes.saturating_sub(record.peak_allocated_bytes);
    let cases = material.titled().flat_map(|(group, title)| group.records.iter().map(move |record| (*record, title)));
    let (worst, title) = cases.max_by_key(|(record, _)| unused(record)).filter(|(record, _)| unused(record) > 0)?;
    let share = worst.peak_gap_share.unwrap_or(0.0) * 100.0;
    let answer = format!(
        "<p>Most under {} on {}: {} reserved for {} in use.</p><p>{} ({share:.0} %) lay idle in its cache.</p>",
        code(&worst.strategy),
        escape(title),
        Bytes(worst.peak_reserved_bytes),
        Bytes(worst.peak_allocated_bytes),
        Bytes(unused(worst)),
    );
    Some(("Where was memory lost?", answer))
}

fn ran_out(material: &Material<'_>) -> Option<Card> {
    let failed: Vec<(&CaseRecord, &str)> =
        material.titled().flat_map(|(group, title)| out_of_memory(group).map(move |record| (record, title))).collect();
    let question = "When did it run out?";
    if failed.is_empty() {
        return Some((question, "<p>Never: every request was served.</p>".to_owned()));
    }
    let mut answer = "<ul>".to_owned();
    for (record, title) in failed.iter().take(MOST_TOLD) {
        let _ = write!(answer, "<li>{}: {} in {}</li>", escape(title), code(&record.strategy), escape(&moment(record)));
    }
    answer.push_str("</ul>");
    if failed.len() > MOST_TOLD {
        let _ = write!(answer, "<p>and in <a href=\"#shortage\">{} more cases</a>.</p>", failed.len() - MOST_TOLD);
    }
    Some((question, answer))
}

fn fast(material: &Material<'_>) -> Option<Card> {
    let counts = tally(material.groups.iter().filter_map(fastest));
    counts.first()?;
    let of = counts.iter().map(|(_, count)| count).sum();
    Some(("Who is fastest?", in_words(&counts, of, "Least time in driver calls:")))
}

fn thresholds(material: &Material<'_>) -> Option<Card> {
    let rows = material.gathered.thresholds();
    let found = rows.iter().filter_map(|row| Some((row.threshold_bytes?, row)));
    let (_, row) = found.min_by(|a, b| lost_share(a.1).total_cmp(&lost_share(b.1)))?;
    let answer = format!(
        "<p>{} comes closest to what the program holds: {} on {} with {} of live memory.</p>",
        code(&row.strategy),
        Bytes(row.threshold_bytes.unwrap_or(0)),
        escape(&row.workload),
        Bytes(row.live_peak_bytes.unwrap_or(0)),
    );
    Some(("How little memory is enough?", answer))
}

fn lost_share(row: &crate::answer::threshold::ThresholdRecord) -> f64 {
    row.lost_share.unwrap_or(1.0)
}

fn techniques(material: &Material<'_>) -> Option<Card> {
    let rows = material.gathered.techniques();
    let saved = rows.iter().filter_map(|row| Some((row.reduction_percent?, row)));
    let (percent, row) = saved.max_by(|a, b| a.0.total_cmp(&b.0))?;
    let time = row.step_ratio.map_or_else(String::new, |ratio| format!(", a step takes {ratio:.2} times as long"));
    let answer = format!("<p>{} saves most: {percent:.0} % on {}{time}.</p>", escape(&row.title), escape(&row.model));
    Some(("Which technique saves most?", answer))
}

fn claims(material: &Material<'_>) -> Option<Card> {
    let rows = material.gathered.claims();
    if rows.is_empty() {
        return None;
    }
    let verdicts = [Verdict::Confirmed, Verdict::Depends, Verdict::Refuted, Verdict::NotMeasurable];
    let counted: Vec<String> = verdicts
        .iter()
        .map(|&verdict| (verdict, rows.iter().filter(|row| row.verdict == verdict).count()))
        .filter(|(_, count)| *count > 0)
        .map(|(verdict, count)| format!("{count} {}", verdict.name()))
        .collect();
    Some(("Is it true what they say?", format!("<p>{} claims: {}.</p>", rows.len(), listed(&counted))))
}

/// One row a workload.
fn winners(material: &Material<'_>) -> Table {
    let mut table = Table::new(
        "Who needs least memory, by workload",
        vec![
            Column::words("workload", "workload"),
            Column::numbers("live", "bound_requested_bytes"),
            Column::words("needs least", "strategy"),
            Column::numbers("device used", "peak_device_used_bytes"),
            Column::words("needs most", "most"),
            Column::numbers("device used", "most_device_used_bytes"),
            Column::words("fastest in the driver", "fastest"),
            Column::words("ran out of memory", "status"),
        ],
    );
    for (group, title) in material.titled() {
        let bound = group.records.iter().find_map(|record| record.bound_requested_bytes);
        let nobody = || Cell::html("<span class=\"none\">nobody to compare with</span>".to_owned(), "");
        let device =
            |record: Option<&CaseRecord>| Cell::maybe_bytes(record.and_then(|record| record.peak_device_used_bytes));
        let named = |record: Option<&CaseRecord>| match record {
            Some(record) => material.strategy(&record.strategy),
            None => nobody(),
        };
        let (low, high) = (least(group), most(group));
        let failed: Vec<String> = out_of_memory(group)
            .map(|record| format!("{} in {}", material.marked(&record.strategy), escape(&moment(record))))
            .collect();
        let fate = match failed.as_slice() {
            [] => Cell::html("no".to_owned(), ""),
            some => Cell::html(format!("<span class=\"oom\">{}</span>", some.join("<br>")), some.len()),
        };
        let quick = fastest(group).map_or_else(Cell::empty, |record| {
            let time = Nanos(record.driver_ns);
            Cell::html(format!("{} <small>{time}</small>", material.marked(&record.strategy)), &record.strategy)
                .with_class("strategy")
        });
        table.row(vec![
            Cell::name(title),
            Cell::maybe_bytes(bound),
            named(low),
            device(low),
            named(high.filter(|high| low.is_some_and(|low| low.strategy != high.strategy))),
            device(high.filter(|_| low.is_some())),
            quick,
            fate,
        ]);
    }
    table
}
