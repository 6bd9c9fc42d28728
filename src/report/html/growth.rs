//! Growth of memory from step to step: what steps keep, with the fitted line.
//!
//! The test is that of `oomph leaks`, on the steps of a case. A growing cache and fragmentation
//! need a replay, so the command is named.

use std::fmt::Write as _;

use super::{
    super::render::{counted, signed_bytes},
    chart_data::{LeakChart, kib},
    element::{Cell, HtmlTable, PageSection, chart, code, escape, no_case},
    memory::OpenCase,
    page_context::{PageContext, moment},
};
use crate::{
    answer::leaks::{
        CourseKind, GrowthThreshold,
        growth::{SeriesCourse, course},
    },
    base::Bytes,
    measure::{CaseRecord, Status, StepPeak},
};

/// Fewer steps, without the first one, are not judged.
const FEWEST_STEPS: usize = 8;
/// More charts are not drawn.
const MOST_CHARTS: usize = 12;

/// The steps of a workload and their course.
pub(super) struct JudgedWorkload<'a> {
    title: String,
    record: &'a CaseRecord,
    steps: Vec<StepPeak>,
    course: SeriesCourse,
}

impl<'a> JudgedWorkload<'a> {
    /// Judges the case of a group that came furthest; `None` with too few steps.
    pub(super) fn of(title: &str, opened: &[OpenCase<'a>]) -> Option<JudgedWorkload<'a>> {
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
        let course = course(&kept, level, &GrowthThreshold::default())?;
        Some(JudgedWorkload { title: title.to_owned(), record: furthest.record, steps, course })
    }

    fn grows(&self) -> bool {
        self.course.kind == CourseKind::Growing
    }

    /// The first step of the fitted line.
    fn first(&self) -> u32 {
        self.steps.get(1 + self.course.first).map_or(0, |step| step.first_step)
    }

    /// The step in which what is kept alone reaches the limit, if it goes on like this.
    fn reach(&self) -> Option<u64> {
        let (trend, limit) = (&self.course.trend, self.record.limit_bytes? as f64);
        (trend.slope > 0.0 && limit > trend.start)
            .then(|| u64::from(self.first()) + ((limit - trend.start) / trend.slope).ceil() as u64)
    }

    /// What the chart shows, in two sentences.
    fn sentence(&self) -> String {
        let trend = &self.course.trend;
        let mut words = format!(
            "Every step keeps {} more (95 % interval {} to {}) under {}.",
            signed_bytes(trend.slope),
            signed_bytes(trend.low),
            signed_bytes(trend.high),
            code(&self.record.strategy)
        );
        if self.record.status == Status::Oom {
            let _ = write!(words, " Memory ran out in {}.", escape(&moment(self.record)));
        } else if let (Some(step), Some(limit)) = (self.reach(), self.record.limit_bytes) {
            let _ = write!(
                words,
                " At this rate, what is kept alone reaches the limit of {} in step {step}; memory runs out before.",
                Bytes(limit)
            );
        }
        words
    }

    fn chart(&self, strategy: usize) -> LeakChart {
        let first = self.first();
        LeakChart {
            title: self.title.clone(),
            headline: format!(
                "{}: every step keeps {} more",
                escape(&self.title),
                signed_bytes(self.course.trend.slope)
            ),
            sentence: self.sentence(),
            strategy,
            steps: self.steps.iter().map(|step| step.first_step).collect(),
            kept: self.steps.iter().map(|step| kib(step.lowest_allocated_bytes)).collect(),
            reserved: self.steps.iter().map(|step| kib(step.peak.reserved_bytes)).collect(),
            reserved_at_end: false,
            fit: (first, self.course.trend.start / 1024.0, self.course.trend.slope / 1024.0),
            limit: self.record.limit_bytes.map(kib),
            reach: self.reach(),
        }
    }
}

/// The section and its charts; `None` if no workload has enough steps.
pub(super) fn section(
    context: &PageContext<'_>,
    judged: &[JudgedWorkload<'_>],
) -> Option<(PageSection, Vec<LeakChart>)> {
    if judged.is_empty() {
        return None;
    }
    let mut steepest: Vec<&JudgedWorkload<'_>> = judged.iter().filter(|workload| workload.grows()).collect();
    steepest.sort_by(|a, b| b.course.trend.slope.total_cmp(&a.course.trend.slope));
    let growing = steepest.len();
    steepest.truncate(MOST_CHARTS);
    let charts: Vec<LeakChart> =
        steepest.iter().map(|workload| workload.chart(context.place(&workload.record.strategy))).collect();
    // The other charts are chosen in it.
    let mut body = charts.first().map_or_else(String::new, |first| {
        let label = format!("What steps keep: {}", first.title);
        chart("leak", 0, &escape(&first.title), &first.sentence, &label)
    });
    body.push_str(&as_table(context, judged));
    body.push_str(
        "<p class=\"note\">Kept: the lowest allocated memory during a step. The first step is start-up and is not judged. \
         <code>oomph leaks</code> also detects a growing cache and fragmentation, and names the call sites that \
         grow.</p>\n",
    );
    let finding = match growing {
        0 => format!("Memory does not grow from step to step in {}", counted(judged.len(), "workload", "workloads")),
        some => {
            format!("Memory grows from step to step in {some} of {}", counted(judged.len(), "workload", "workloads"))
        }
    };
    Some((PageSection { id: "growth", subject: "Growth", finding, body }, charts))
}

fn as_table(context: &PageContext<'_>, judged: &[JudgedWorkload<'_>]) -> String {
    type Row<'a> = JudgedWorkload<'a>;
    let number = |bytes: f64| Cell::number(signed_bytes(bytes), bytes.round());
    let kept = |row: &Row<'_>| row.steps.last().map(|step| step.lowest_allocated_bytes);
    let table = HtmlTable::of(judged)
        .words("workload", "workload", |row| Cell::name(&row.title))
        .words("strategy", "strategy", |row| context.strategy(&row.record.strategy))
        .words("verdict", "verdict", |row| Cell::text(verdict(row.course.kind)))
        .numbers("kept per step", "bytes_per_step", |row| number(row.course.trend.slope))
        .numbers("at least", "bytes_per_step_low", |row| number(row.course.trend.low))
        .numbers("at most", "bytes_per_step_high", |row| number(row.course.trend.high))
        .numbers("p", "p_value", |row| Cell::decimal(Some(row.course.trend.p_value), 3))
        .numbers("steps", "steps", |row| Cell::count(row.steps.len() as u64))
        .numbers("kept at the end", "kept_bytes", |row| Cell::bytes(kept(row)));
    table.html("What steps keep", no_case)
}

const fn verdict(kind: CourseKind) -> &'static str {
    match kind {
        CourseKind::Growing => "grows",
        CourseKind::Level => "steady",
        CourseKind::Falling => "falls",
        CourseKind::Negligible => "steady: negligible growth",
        CourseKind::Saturated => "steady: has stopped growing",
        CourseKind::SawTooth => "steady: a saw-tooth",
        CourseKind::Unclear => "cannot tell",
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::{
        base::MIB,
        measure::{CaseDetail, CaseLabel, Levels},
    };

    fn opened(record: &CaseRecord, growth: u64) -> OpenCase<'_> {
        let steps = (0..20)
            .map(|step| StepPeak {
                first_step: step,
                last_step: step,
                event: u64::from(step) * 10,
                peak: Levels::default(),
                lowest_allocated_bytes: 100 * MIB + u64::from(step) * growth,
            })
            .collect();
        OpenCase { record, detail: Cow::Owned(CaseDetail { steps, ..CaseDetail::default() }) }
    }

    #[test]
    fn leak_has_a_slope_and_steady_memory_none() {
        let record = CaseRecord::unmeasured(&CaseLabel::default(), Status::Completed, "");
        let leak = JudgedWorkload::of("leak", &[opened(&record, 10 * MIB)]).unwrap();
        assert!(leak.grows());
        let chart = leak.chart(0);
        assert_eq!(chart.fit, (1, 110.0 * 1024.0, 10.0 * 1024.0));
        assert_eq!(chart.reach, None, "there is no limit");
        let limited = CaseRecord { limit_bytes: Some(1000 * MIB), ..record.clone() };
        let leak = JudgedWorkload::of("leak", &[opened(&limited, 10 * MIB)]).unwrap();
        assert_eq!(leak.chart(0).reach, Some(90), "110 MiB in step 1 and 10 MiB more in each step");
        assert!(leak.sentence().contains("reaches the limit of 1000 MiB in step 90"), "{}", leak.sentence());
        assert!(!JudgedWorkload::of("steady", &[opened(&record, 0)]).unwrap().grows());
        assert!(JudgedWorkload::of("nothing", &[]).is_none());
    }
}
