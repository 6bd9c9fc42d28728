//! Where the numbers come from, and how to get them again.

use super::{
    super::command_line,
    element::{Cell, Column, Section, Table, counted, escape},
    gather::{Gathered, Run},
};

/// The section: a row a run, and its commands.
pub(super) fn section(gathered: &Gathered<'_>) -> Section {
    let mut table = Table::new(
        "Where the numbers come from",
        vec![
            Column::words("run", "run"),
            Column::words("started", "started"),
            Column::words("device", "device"),
            Column::words("driver", "driver"),
            Column::words("machine", "machine"),
            Column::words("version", "version"),
            Column::words("commit", "commit"),
            Column::numbers("seed", "seed"),
        ],
    );
    let mut commands = String::new();
    for run in gathered.runs {
        let environment = &run.environment;
        let device = match environment.device_name.as_str() {
            "" => environment.device.clone(),
            name => format!("{} ({name})", environment.device),
        };
        table.row(vec![
            Cell::name(&run.name),
            Cell::text(&environment.started),
            Cell::text(&device),
            Cell::text(environment.driver.as_deref().unwrap_or("none")),
            Cell::text(&format!("{}, {} CPUs, {}", environment.machine, environment.cpus, environment.os)),
            Cell::text(&environment.version),
            Cell::text(&environment.commit),
            Cell::count(environment.seed),
        ]);
        commands.push_str(&escape(&reproduce(run)));
        commands.push('\n');
    }
    let body = format!(
        "{}<h3>To get these numbers again</h3>\n<pre class=\"commands\">{commands}</pre>\n<p class=\"note\">On the simulated \
         device the same commit and seed give the same rows to the byte. Nothing in this page is loaded from \
         elsewhere.</p>\n",
        table.html()
    );
    let finding = format!("Made from {}", counted(gathered.runs.len(), "run", "runs"));
    Section { id: "origin", subject: "Environment", finding, body }
}

/// The command line of a run, for a shell. Where it wrote to is left out: that place is taken.
fn reproduce(run: &Run) -> String {
    let kept = command_line::without(&run.environment.command, &["--output", "-o"]);
    kept.into_iter().map(command_line::quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Environment;

    #[test]
    fn a_command_can_be_pasted_into_a_shell() {
        let command = ["oomph", "run", "my suite", "--output", "somewhere", "--limit", "24GiB", "it's"];
        let environment = Environment { command: command.map(str::to_owned).to_vec(), ..Environment::default() };
        let run = Run { environment, ..Run::default() };
        assert_eq!(reproduce(&run), r"oomph run 'my suite' --limit 24GiB 'it'\''s'");
    }
}
