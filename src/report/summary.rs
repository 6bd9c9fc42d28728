//! `summary.md`: the run on one page.

use super::{Environment, table, waterfall};
use crate::measure::{CaseRecord, Status};

/// What was run, the table, and what did not complete.
pub(super) fn markdown(environment: &Environment, records: &[CaseRecord]) -> String {
    let mut page = String::from("# Run\n\n");
    let driver = environment.driver.as_ref().map_or(String::new(), |driver| format!(", driver {driver}"));
    page.push_str(&format!(
        "- command: `{}`\n- started: {}\n- program: {} ({})\n- device: {} ({}{driver})\n- machine: {}, {}, {} CPUs\n\
         - seed: {}\n\n",
        environment.command.join(" "),
        environment.started,
        environment.version,
        environment.commit,
        environment.device,
        environment.device_name,
        environment.machine,
        environment.os,
        environment.cpus,
        environment.seed,
    ));
    page.push_str(&format!("{}\n\n", counts(records)));
    page.push_str(&table::markdown(records));
    if let Some(table) = waterfall::markdown(records) {
        page.push_str(&format!("\n## From requested to reserved\n\n{table}"));
    }
    for (number, explanation) in explanations(records).enumerate() {
        page.push_str(if number == 0 { "\n## Cases that did not complete\n\n" } else { "" });
        page.push_str(&format!("- {explanation}\n"));
    }
    page
}

/// One line for every case that did not complete.
pub(super) fn explanations<'a>(records: impl IntoIterator<Item = &'a CaseRecord>) -> impl Iterator<Item = String> {
    records
        .into_iter()
        .filter(|record| record.status != Status::Completed)
        .map(|record| format!("{}: {}", record.case_id, explanation(record)))
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

/// Why a case did not complete, in one line.
fn explanation(record: &CaseRecord) -> String {
    use crate::{base::Bytes, replay::Cause};
    let (Status::Oom, Some(requested)) = (record.status, record.oom_requested_bytes) else {
        return format!("{}: {}", record.status.name(), record.reason);
    };
    let free = Bytes(record.oom_free_bytes.unwrap_or(0));
    let cause = record.oom_cause.unwrap_or(Cause::Exhaustion).name();
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
        "out of memory at event {}{place}: {} asked for, {free} free in all{most} ({cause}){remark}",
        record.oom_event.unwrap_or(0),
        Bytes(requested),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, measure::CaseLabel, replay::Cause};

    #[test]
    fn the_page_says_what_ran_and_why_cases_did_not_complete() {
        let label = CaseLabel { suite: "quick".to_owned(), workload: "w".to_owned(), ..CaseLabel::default() };
        let oom = CaseRecord {
            oom_event: Some(9),
            oom_step: Some(2),
            oom_requested_bytes: Some(20 * MIB),
            oom_free_bytes: Some(30 * MIB),
            oom_cause: Some(Cause::Fragmentation),
            ..CaseRecord::unmeasured(&label, Status::Oom, "the device had less")
        };
        let skipped = CaseRecord::skipped(&label, "this device has no virtual memory");
        let environment = Environment { command: vec!["oomph".to_owned(), "run".to_owned()], ..Environment::default() };
        let page = markdown(&environment, &[oom, skipped]);
        assert!(page.contains("- command: `oomph run`"), "{page}");
        assert!(page.contains("2 cases: 1 oom, 1 skipped."), "{page}");
        assert!(
            page.contains(
                "out of memory at event 9 in step 2: 20.0 MiB asked for, 30.0 MiB free in all (fragmentation); the \
                 device had less"
            ),
            "{page}"
        );
        assert!(page.contains("skipped: this device has no virtual memory"), "{page}");
    }
}
