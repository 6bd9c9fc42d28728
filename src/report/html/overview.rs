//! The first section: the least memory, losses, OOMs and speed; and the last one: the environment.

use std::{collections::HashMap, fmt::Write as _};

use super::{
    super::{quoted, render::counted, techniques::changed_numerics, without_options},
    element::{Cell, HtmlTable, PageSection, code, escape, listed, no_case},
    page_context::{CollectedRuns, PageContext, PageRun, fastest, least, moment, most, out_of_memory},
};
use crate::{
    answer::{claims::ClaimVerdict, threshold::ThresholdRecord},
    base::{Bytes, Nanos},
    measure::CaseRecord,
    report::scenario::CaseGroup,
    strategy::StrategySpec,
};

/// More names are counted, not listed.
const MOST_NAMED: usize = 4;
/// From this factor on, the slowness of a strategy is mentioned.
const MUCH_SLOWER: f64 = 3.0;

/// The section, for the data that the runs have.
pub(super) fn overview(context: &PageContext<'_>) -> PageSection {
    let mut cards: Vec<Card> = incomplete(context).into_iter().collect();
    if !context.groups.is_empty() {
        cards.extend([least_memory(context), lost(context), ran_out(context), fast(context)].into_iter().flatten());
    }
    cards.extend([thresholds(context), techniques(context), claims(context)].into_iter().flatten());
    let mut body = "<div class=\"cards\">\n".to_owned();
    for (question, answer) in &cards {
        let _ = writeln!(body, "<div class=\"card\"><h3>{question}</h3>{answer}</div>");
    }
    body.push_str("</div>\n");
    if !context.groups.is_empty() {
        body.push_str(&winners(context));
        body.push_str(
            "<p class=\"note\">Needed: the least memory in which the case completes. Device used: as shown by <code>nvidia-smi</code>, with whole pages, the driver's context and \
             libraries. Live: the peak of live bytes, the lower bound for every allocator.</p>\n",
        );
    }
    PageSection { id: "overview", subject: "Overview", finding: headline(context), body }
}

/// What is missing in the files of the runs.
fn incomplete(context: &PageContext<'_>) -> Option<Card> {
    let gaps = context.runs.runs.iter().flat_map(|run| run.gaps.iter().map(move |gap| (run, gap)));
    let lines: String = gaps
        .map(|(run, gap)| format!("<li>{}: {}</li>", escape(&run.name), escape(gap).replace('\n', "<br>")))
        .collect();
    (!lines.is_empty()).then(|| ("What is missing?", format!("<ul class=\"oom\">{lines}</ul>")))
}

/// The page in one sentence.
fn headline(context: &PageContext<'_>) -> String {
    let cases = context.runs.records.len();
    if cases == 0 {
        return "Results".to_owned();
    }
    let failed = context.groups.iter().flat_map(|group| out_of_memory(group)).count();
    let ran = counted(cases, "case", "cases");
    let workloads = counted(context.groups.len(), "workload", "workloads");
    match failed {
        0 => format!("{ran} on {workloads}, no OOM"),
        failed => format!("{ran} on {workloads}, {}", counted(failed, "OOM", "OOMs")),
    }
}

type Card = (&'static str, String);

/// How often each strategy is the best, sorted.
pub(super) fn tally<'a>(winners: impl Iterator<Item = &'a str>) -> Vec<(&'a str, usize)> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for winner in winners {
        let place = *places.entry(winner).or_insert_with(|| {
            counts.push((winner, 0));
            counts.len() - 1
        });
        counts[place].1 += 1;
    }
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    counts
}

fn in_words(counts: &[(&str, usize)], of: usize, what: &str) -> String {
    let named: Vec<String> = counts
        .iter()
        .take(MOST_NAMED)
        .enumerate()
        .map(|(place, (name, count))| {
            let share = if place == 0 { format!("{count} of {of} workloads") } else { count.to_string() };
            format!("{} on {share}", code(name))
        })
        .collect();
    format!("<p>{what} {}.</p>", listed(&named))
}

fn least_memory(context: &PageContext<'_>) -> Option<Card> {
    let counts = tally(context.groups.iter().filter_map(least).map(|record| record.strategy.as_str()));
    let (first, _) = counts.first()?;
    let of = counts.iter().map(|(_, count)| count).sum();
    let mut answer = in_words(&counts, of, "The least memory:");
    // A strategy that releases everything at once needs little memory and much time.
    let times: Vec<(u64, u64)> = context
        .groups
        .iter()
        .filter(|group| least(group).is_some_and(|record| record.strategy == *first))
        .filter_map(|group| Some((least(group)?.driver_ns?, fastest(group)?.driver_ns?)))
        .collect();
    let (own, best) = times.iter().fold((0, 0), |sum, time| (sum.0 + time.0, sum.1 + time.1));
    let ratio = own as f64 / best.max(1) as f64;
    if ratio >= MUCH_SLOWER {
        let _ = write!(answer, "<p>{} needs {ratio:.0} times the driver time of the fastest.</p>", code(first));
    }
    Some(("Which strategy needs the least memory?", answer))
}

fn lost(context: &PageContext<'_>) -> Option<Card> {
    let peaks = |record: &CaseRecord| record.peak_reserved_bytes.zip(record.peak_allocated_bytes);
    let unused = |record: &CaseRecord| peaks(record).map_or(0, |(reserved, used)| reserved.saturating_sub(used));
    // A strategy that takes a fixed part of the device is not compared.
    let rows = context.rows().filter(|row| !StrategySpec::from(row.record.strategy.as_str()).takes_fixed_part());
    let worst = rows.max_by_key(|row| unused(row.record)).filter(|row| unused(row.record) > 0)?;
    let (worst, title) = (worst.record, worst.title);
    let (reserved, allocated) = peaks(worst)?;
    let share = worst.fragmentation_share.unwrap_or(0.0) * 100.0;
    let answer = format!(
        "<p>Most by {} on {}: {} reserved for {} allocated.</p><p>{} ({share:.0} %) were idle in its cache.</p>",
        code(&worst.strategy),
        escape(&title),
        Bytes(reserved),
        Bytes(allocated),
        Bytes(unused(worst)),
    );
    Some(("Where was memory lost?", answer))
}

fn ran_out(context: &PageContext<'_>) -> Option<Card> {
    let failed: Vec<(&CaseRecord, &str)> =
        context.titled().flat_map(|(group, title)| out_of_memory(group).map(move |record| (record, title))).collect();
    let question = "When did memory run out?";
    if failed.is_empty() {
        return Some((question, "<p>Never: every request succeeded.</p>".to_owned()));
    }
    let mut answer = "<ul>".to_owned();
    for (record, title) in failed.iter().take(MOST_NAMED) {
        let _ = write!(answer, "<li>{}: {} in {}</li>", escape(title), code(&record.strategy), escape(&moment(record)));
    }
    answer.push_str("</ul>");
    if failed.len() > MOST_NAMED {
        let _ = write!(answer, "<p>and in <a href=\"#shortage\">{} more cases</a>.</p>", failed.len() - MOST_NAMED);
    }
    Some((question, answer))
}

fn fast(context: &PageContext<'_>) -> Option<Card> {
    let counts = tally(context.groups.iter().filter_map(fastest).map(|record| record.strategy.as_str()));
    counts.first()?;
    let of = counts.iter().map(|(_, count)| count).sum();
    Some(("Which strategy is fastest?", in_words(&counts, of, "The least time in driver calls:")))
}

fn thresholds(context: &PageContext<'_>) -> Option<Card> {
    let rows = context.runs.all(|run| &run.thresholds);
    let found = rows.iter().filter_map(|row| Some((row.needed_bytes?, row)));
    let lost = |row: &ThresholdRecord| row.lost_share.unwrap_or(1.0);
    let (_, row) = found.min_by(|a, b| lost(a.1).total_cmp(&lost(b.1)))?;
    let answer = format!(
        "<p>{} comes closest to the live bytes: {} on {} with {} live.</p>",
        code(&row.strategy),
        Bytes(row.needed_bytes.unwrap_or(0)),
        escape(&row.workload),
        Bytes(row.live_peak_bytes.unwrap_or(0)),
    );
    Some(("How little memory is enough?", answer))
}

fn techniques(context: &PageContext<'_>) -> Option<Card> {
    let rows = context.runs.all(|run| &run.techniques);
    let saved = rows.iter().filter_map(|row| Some((row.allocated_reduction_share?, row)));
    let (share, row) = saved.max_by(|a, b| a.0.total_cmp(&b.0))?;
    let percent = share * 100.0;
    let time = row.step_ratio.map_or_else(String::new, |ratio| format!(" and a step takes {ratio:.2} times as long"));
    let answer = format!(
        "<p>{} saves the most: {percent:.0} % on {}{time}{}.</p>",
        escape(&row.title),
        escape(&row.model),
        changed_numerics(row)
    );
    Some(("Which technique saves the most?", answer))
}

fn claims(context: &PageContext<'_>) -> Option<Card> {
    let rows = context.runs.all(|run| &run.claims);
    if rows.is_empty() {
        return None;
    }
    let all = [ClaimVerdict::Confirmed, ClaimVerdict::Depends, ClaimVerdict::Refuted, ClaimVerdict::NotMeasurable];
    let verdicts: Vec<String> = all
        .iter()
        .map(|&verdict| (verdict, rows.iter().filter(|row| row.verdict == verdict).count()))
        .filter(|(_, count)| *count > 0)
        .map(|(verdict, count)| format!("{count} {}", verdict.name()))
        .collect();
    Some(("Are published claims true?", format!("<p>{} claims: {}.</p>", rows.len(), listed(&verdicts))))
}

/// One row per workload.
fn winners(context: &PageContext<'_>) -> String {
    let named = |record: Option<&CaseRecord>| match record {
        Some(record) => context.strategy(&record.strategy),
        None => Cell::html("<span class=\"none\">no comparison</span>".to_owned(), ""),
    };
    let memory = |group: &CaseGroup<'_>, record: Option<&CaseRecord>| {
        Cell::bytes(record.and_then(|record| group.compared_bytes(record)))
    };
    let heading = match context.groups.iter().all(CaseGroup::is_by_need) {
        true => "needed",
        false => "device used",
    };
    let highest = |group: &CaseGroup<'_>| {
        let low = least(group)?.strategy.clone();
        most(group).filter(|high| high.strategy != low).map(|high| high.strategy.clone())
    };
    let quickest = |group: &CaseGroup<'_>| {
        fastest(group).map_or_else(Cell::empty, |record| {
            let html =
                format!("{} <small>{}</small>", context.marked(&record.strategy), Nanos(record.driver_ns.unwrap_or(0)));
            Cell::html(html, &record.strategy).with_class("strategy")
        })
    };
    let failed = |group: &CaseGroup<'_>| {
        let text = |record: &CaseRecord| format!("{} in {}", context.marked(&record.strategy), escape(&moment(record)));
        let failed: Vec<String> = out_of_memory(group).map(text).collect();
        match failed.as_slice() {
            [] => Cell::html("no".to_owned(), ""),
            some => Cell::html(format!("<span class=\"oom\">{}</span>", some.join("<br>")), some.len()),
        }
    };
    let bound = |group: &CaseGroup<'_>| group.records.iter().find_map(|record| record.live_peak_bytes);
    let no_comparison = || named(None);
    let rows: Vec<(&CaseGroup<'_>, &str)> = context.titled().collect();
    let table = HtmlTable::of(&rows)
        .words("workload", "workload", |(_, title)| Cell::name(title))
        .numbers("live", "live_peak_bytes", |(group, _)| Cell::bytes(bound(group)))
        .words("needs the least", "strategy", |(group, _)| named(least(group)))
        .numbers(heading, "least_bytes", |(group, _)| memory(group, least(group)))
        .words("needs the most", "most", |(group, _)| {
            highest(group).map_or_else(no_comparison, |strategy| context.strategy(&strategy))
        })
        .numbers(heading, "most_bytes", |(group, _)| memory(group, most(group).filter(|_| least(group).is_some())))
        .words("least driver time", "fastest", |(group, _)| quickest(group))
        .words("out of memory", "status", |(group, _)| failed(group));
    table.html("The least memory, by workload", no_case)
}

/// The last section: one row per run, and the commands that repeat them.
pub(super) fn environment(runs: &CollectedRuns<'_>) -> PageSection {
    let device = |run: &PageRun| match run.environment.device_name.as_str() {
        "" => run.environment.device.clone(),
        name => format!("{} ({name})", run.environment.device),
    };
    let machine = |run: &PageRun| {
        let environment = &run.environment;
        format!("{}, {} CPUs, {}", environment.machine, environment.cpus, environment.os)
    };
    let driver = |run: &PageRun| run.environment.driver.clone().unwrap_or_else(|| "none".to_owned());
    let table = HtmlTable::of(runs.runs)
        .words("run", "run", |run| Cell::name(&run.name))
        .words("started", "started", |run| Cell::text(&run.environment.started))
        .words("device", "device", |run| Cell::text(&device(run)))
        .words("driver", "driver", |run| Cell::text(&driver(run)))
        .words("machine", "machine", |run| Cell::text(&machine(run)))
        .words("version", "version", |run| Cell::text(&run.environment.version))
        .words("commit", "commit", |run| Cell::text(&run.environment.commit))
        .numbers("seed", "seed", |run| Cell::count(run.environment.seed));
    let commands: String = runs.runs.iter().map(|run| format!("{}\n", escape(&reproduce(run)))).collect();
    let body = format!(
        "{}<h3>Commands to repeat these runs</h3>\n<pre class=\"commands\">{commands}</pre>\n<p class=\"note\">On the \
         simulated device, the same commit and seed give the same rows to the byte. This page loads nothing from other \
         places.</p>\n",
        table.html("Environment", no_case)
    );
    let finding = format!("Made from {}", counted(runs.runs.len(), "run", "runs"));
    PageSection { id: "origin", subject: "Environment", finding, body }
}

/// The command line of a run, for a shell, without its output folder, which already exists.
fn reproduce(run: &PageRun) -> String {
    let kept = without_options(&run.environment.command, &["--output", "-o"]);
    kept.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Environment;

    #[test]
    fn command_can_be_pasted_into_a_shell() {
        let command = ["oomph", "run", "my suite", "--output", "somewhere", "--limit", "24GiB", "it's"];
        let environment = Environment { command: command.map(str::to_owned).to_vec(), ..Environment::default() };
        let run = PageRun { environment, ..PageRun::default() };
        assert_eq!(reproduce(&run), r"oomph run 'my suite' --limit 24GiB 'it'\''s'");
    }
}
