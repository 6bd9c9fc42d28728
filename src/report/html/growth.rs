//! Does memory grow from step to step: what steps keep, with the line through it.
//!
//! The judgement is that of `oomph leaks`, made from the steps that a case left behind. Growth of the cache and
//! fragmentation need a replay: for those the command is named.

use super::{
    element::{Cell, Column, Section, Table, chart, code, counted, escape},
    island::{LeakChart, kib},
    material::Material,
    memory::Opened,
};
use crate::{
    answer::leaks::{
        Bar, CourseKind,
        growth::{Course, course},
    },
    base::Bytes,
    measure::{CaseRecord, Status, StepPeak},
};

/// Fewer steps than this, the first left out, are not judged.
const FEWEST_STEPS: usize = 8;
/// More charts than this nobody compares.
const MOST_CHARTS: usize = 12;

/// What became of a workload's steps.
pub(super) struct Judged<'a> {
    title: String,
    record: &'a CaseRecord,
    steps: Vec<StepPeak>,
    course: Course,
}

impl<'a> Judged<'a> {
    /// Judges the case of a group that came furthest; none where it has too few steps.
    pub(super) fn of(title: &str, opened: &[Opened<'a>]) -> Option<Judged<'a>> {
        let furthest = opened.iter().max_by_key(|case| (case.detail.steps.len(), case.record.events))?;
        let mut steps = furthest.detail.steps.clone();
        if furthest.record.status == Status::Oom {
            steps.pop();
        }
        // The first step is start-up.
        let judged = steps.get(1..)?;
        if judged.len() < FEWEST_STEPS {
            return None;
        }
        let kept: Vec<f64> = judged.iter().map(|step| step.lowest_allocated_bytes as f64).collect();
        let level = kept.iter().sum::<f64>() / kept.len() as f64;
        let course = course(&kept, level, &Bar::default())?;
        Some(Judged { title: title.to_owned(), record: furthest.record, steps, course })
    }

    fn grows(&self) -> bool {
        self.course.kind == CourseKind::Growing
    }

    fn chart(&self, strategy: usize) -> LeakChart {
        let first = self.steps.get(1 + self.course.first).map_or(0, |step| step.first_step);
        LeakChart {
            title: self.title.clone(),
            strategy,
            steps: self.steps.iter().map(|step| step.first_step).collect(),
            kept: self.steps.iter().map(|step| kib(step.lowest_allocated_bytes)).collect(),
            reserved: self.steps.iter().map(|step| kib(step.peak.reserved_bytes)).collect(),
            fit: (first, self.course.trend.start / 1024.0, self.course.trend.slope / 1024.0),
            limit: self.record.limit_bytes.map(kib),
        }
    }
}

/// The section and its charts; none where no workload has enough steps.
pub(super) fn section(material: &Material<'_>, judged: &[Judged<'_>]) -> Option<(Section, Vec<LeakChart>)> {
    if judged.is_empty() {
        return None;
    }
    let mut steepest: Vec<&Judged<'_>> = judged.iter().filter(|workload| workload.grows()).collect();
    steepest.sort_by(|a, b| b.course.trend.slope.total_cmp(&a.course.trend.slope));
    let growing = steepest.len();
    steepest.truncate(MOST_CHARTS);
    let mut body = String::new();
    for (index, workload) in steepest.iter().enumerate() {
        let trend = &workload.course.trend;
        let words = format!(
            "Every step keeps {} more (95 % interval {} to {}), under {}.",
            amount(trend.slope),
            amount(trend.low),
            amount(trend.high),
            code(&workload.record.strategy)
        );
        let label = format!("What steps keep: {}", workload.title);
        body.push_str(&chart("leak", index, &escape(&workload.title), &words, &label));
    }
    body.push_str(&table(material, judged).html());
    body.push_str(
        "<p class=\"note\">Kept is the lowest that allocated memory goes in a step. The first step is start-up and is not \
         judged. <code>oomph leaks</code> also tells a growing cache from fragmentation, and names who grows.</p>\n",
    );
    let finding = match growing {
        0 => format!("Nothing grows from step to step in {}", counted(judged.len(), "workload", "workloads")),
        some => {
            format!("Memory grows from step to step in {some} of {}", counted(judged.len(), "workload", "workloads"))
        }
    };
    let charts = steepest.iter().map(|workload| workload.chart(material.place(&workload.record.strategy))).collect();
    Some((Section { id: "growth", subject: "Growth", finding, body }, charts))
}

fn table(material: &Material<'_>, judged: &[Judged<'_>]) -> Table {
    let mut table = Table::new(
        "What steps keep",
        vec![
            Column::words("workload", "workload"),
            Column::words("under", "strategy"),
            Column::words("verdict", "verdict"),
            Column::numbers("kept a step", "bytes_per_step"),
            Column::numbers("at least", "bytes_per_step_low"),
            Column::numbers("at most", "bytes_per_step_high"),
            Column::numbers("p", "p_value"),
            Column::numbers("steps", "steps"),
            Column::numbers("kept at the end", "kept_bytes"),
        ],
    );
    for workload in judged {
        let trend = &workload.course.trend;
        let number = |bytes: f64| Cell::number(amount(bytes), bytes.round());
        table.row(vec![
            Cell::name(&workload.title),
            material.strategy(&workload.record.strategy),
            Cell::text(verdict(workload.course.kind)),
            number(trend.slope),
            number(trend.low),
            number(trend.high),
            Cell::number(format!("{:.3}", trend.p_value), trend.p_value),
            Cell::count(workload.steps.len() as u64),
            Cell::maybe_bytes(workload.steps.last().map(|step| step.lowest_allocated_bytes)),
        ]);
    }
    table
}

const fn verdict(kind: CourseKind) -> &'static str {
    match kind {
        CourseKind::Growing => "grows",
        CourseKind::Level => "steady",
        CourseKind::Falling => "falls",
        CourseKind::Negligible => "steady: too little to matter",
        CourseKind::Saturated => "steady: has ended growing",
        CourseKind::SawTooth => "steady: a saw-tooth",
    }
}

fn amount(bytes: f64) -> String {
    let sign = if bytes < -0.5 { "-" } else { "" };
    format!("{sign}{}", Bytes(bytes.abs().round() as u64))
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::{
        base::MIB,
        measure::{CaseDetail, CaseLabel, Levels},
    };

    fn opened(record: &CaseRecord, growth: u64) -> Opened<'_> {
        let steps = (0..20)
            .map(|step| StepPeak {
                first_step: step,
                last_step: step,
                event: u64::from(step) * 10,
                peak: Levels::default(),
                lowest_allocated_bytes: 100 * MIB + u64::from(step) * growth,
            })
            .collect();
        Opened { record, detail: Cow::Owned(CaseDetail { steps, ..CaseDetail::default() }) }
    }

    #[test]
    fn a_leak_is_a_line_with_its_slope_and_steady_memory_is_none() {
        let record = CaseRecord::unmeasured(&CaseLabel::default(), Status::Completed, "");
        let leak = Judged::of("leak", &[opened(&record, 10 * MIB)]).unwrap();
        assert!(leak.grows());
        let chart = leak.chart(0);
        assert_eq!(chart.fit, (1, 110.0 * 1024.0, 10.0 * 1024.0));
        assert!(!Judged::of("steady", &[opened(&record, 0)]).unwrap().grows());
        assert!(Judged::of("nothing", &[]).is_none());
    }
}
