//! Help as wide as the terminal, manual pages and completion scripts, all made from the same texts.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use clap::{
    Command, Error,
    builder::styling::Style,
    error::{ContextKind, ContextValue},
};
use clap_complete::{Shell, generate};
use clap_mangen::Man;

use super::{
    exit::{self, CommandError, CommandResult},
    output,
};
use crate::{base::write_file, report::wrapped};

/// Headings of `--help` and their commands, by what users come for.
pub const GROUPS: [(&str, &[&str]); 3] = [
    (
        "You come with a problem",
        &["rehearse", "fits", "record", "advise", "leaks", "inspect", "threshold", "techniques"],
    ),
    ("You compare allocators", &["run", "replay", "compare", "report", "stress", "verify", "convert"]),
    ("Set-up", &["doctor", "list", "claims", "completions", "man"]),
];

/// The width of the column of names.
const NAMES: usize = 13;
/// Lines are as wide as the terminal, and at most this wide.
const MOST_COLUMNS: u16 = 120;
/// Their width where there is no terminal, as in clap's own texts.
const USUAL_COLUMNS: u16 = 100;

/// The program with its commands in groups.
pub fn grouped(program: Command) -> Command {
    let header = *program.get_styles().get_header();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\n{header}Options:{header:#}\n{{options}}{{after-help}}",
        overview(&program, header)
    );
    program.help_template(template)
}

/// The commands in groups, a line or more for each.
fn overview(program: &Command, header: Style) -> String {
    let mut text = String::new();
    for (title, names) in GROUPS {
        text.push_str(&format!("{header}{title}:{header:#}\n"));
        for name in names {
            let about = program.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let about = wrapped(&about.unwrap_or_default(), 2 + NAMES, columns());
            text.push_str(&format!("  {name:<NAMES$}{about}\n"));
        }
        text.push('\n');
    }
    text.push_str("`oomph COMMAND --help` explains a command, with examples.\n");
    text
}

/// The width of the texts.
fn columns() -> usize {
    output::terminal().width.unwrap_or(USUAL_COLUMNS).min(MOST_COLUMNS).into()
}

/// `oomph` by itself, in a folder without the quick suite.
pub fn print_overview(program: &Command) -> CommandResult {
    let about = program.get_about().map(ToString::to_string).unwrap_or_default();
    let about = wrapped(&format!("{about}."), 0, columns());
    let suite = "`oomph run quick` runs the quick suite: the patterns that matter most under three allocators, on the \
                 simulated GPU.";
    output::say(&format!("{about}\n\n{}\n{}\n", overview(program, Style::new()), wrapped(suite, 0, columns())))?;
    Ok(exit::OK)
}

/// The command with its paragraphs in one line each, so that clap wraps them at the terminal's
/// width. Examples and tables, which are indented, stay as they are.
pub fn flowing(command: Command) -> Command {
    let text = command.get_after_help().map(|text| flow(&text.to_string()));
    let command = match text {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(flowing)
}

fn flow(text: &str) -> String {
    let is_prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
    let mut flowing = String::new();
    let mut goes_on = false;
    for line in text.lines() {
        if !flowing.is_empty() {
            flowing.push(if goes_on && is_prose(line) { ' ' } else { '\n' });
        }
        flowing.push_str(line);
        goes_on = is_prose(line) && !line.ends_with(':');
    }
    flowing
}

/// A hint for a file in place of a command, and for one file too many.
pub fn tip(error: &Error) -> Option<String> {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(name)) if Path::new(name).exists() => Some(name),
        _ => None,
    };
    if let Some(name) = named(ContextKind::InvalidSubcommand) {
        return Some(format!(
            "\n  tip: '{name}' is a file; find better settings with `oomph advise {name}`, look for leaks with \
             `oomph leaks {name}`, see its contents with `oomph inspect {name}`"
        ));
    }
    let name = named(ContextKind::InvalidArg)?;
    Some(format!(
        "\n  tip: '{name}' is one file too many; advise, leaks, inspect and threshold take the recordings of several ranks as \
         a folder, or as a pattern in quotes such as 'run-*.pickle'"
    ))
}

/// Prints the manual page of the program or of one of its commands, in the format of `man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph man | man -l -                                   read it
  oomph man stress misuse | man -l -                     the page of one command
  oomph man --output ~/.local/share/man/man1             install all of them: then `man oomph-advise`")]
pub struct ManArgs {
    /// A command, such as `advise` or `stress misuse` [default: the program itself].
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder.
    #[arg(long, short, value_name = "DIR", conflicts_with = "command")]
    output: Option<PathBuf>,
}

pub fn man(args: &ManArgs, mut program: Command) -> CommandResult {
    // Pages are named after the full path of a command, which clap knows after this.
    program.build();
    if let Some(folder) = &args.output {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string()).map_err(CommandError::usage)?;
        let written = write_all(&program, folder)?;
        output::complain(&format!("wrote {written} pages to {}", folder.display()));
        return Ok(exit::OK);
    }
    let mut command = &program;
    for name in &args.command {
        let found = command.find_subcommand(name);
        command = found.ok_or_else(|| {
            CommandError::usage(anyhow!(
                "there is no command '{name}' in `{}`",
                command.get_bin_name().unwrap_or("oomph")
            ))
        })?;
    }
    output::say_data(&page(command)?)?;
    Ok(exit::OK)
}

/// Writes the pages of a command and of all its subcommands; returns their number.
fn write_all(command: &Command, folder: &Path) -> Result<usize, CommandError> {
    let path = folder.join(format!("{}.1", page_name(command)));
    write_file(&path, page(command)?.as_bytes()).with_context(|| path.display().to_string())?;
    let seen = command.get_subcommands().filter(|under| !under.is_hide_set() && under.get_name() != "help");
    seen.map(|under| write_all(under, folder)).try_fold(1, |sum, written| Ok(sum + written?))
}

/// The name of the page: `oomph-stress-misuse`.
fn page_name(command: &Command) -> String {
    command.get_bin_name().unwrap_or_else(|| command.get_name()).replace(' ', "-")
}

fn page(command: &Command) -> io::Result<String> {
    let mut text = Vec::new();
    let source = concat!("oomph ", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone().display_name(page_name(command))).source(source).render(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Prints a completion script. For bash: `oomph completions bash >
/// ~/.local/share/bash-completion/completions/oomph`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

pub fn completions(args: &CompletionsArgs, command: &mut clap::Command) -> CommandResult {
    let mut script = Vec::new();
    generate(args.shell, command, "oomph", &mut script);
    output::say_data(&String::from_utf8_lossy(&script))?;
    Ok(exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_commands_stay_in_their_column() {
        let text = wrapped("Make one page with charts and tables", 15, 40);
        assert_eq!(text, "Make one page with charts\n               and tables");
        assert_eq!(wrapped("", 15, 40), "");
        assert_eq!(wrapped("oomph unbreakable-and-long", 4, 10), "oomph\n    unbreakable-and-long");
    }

    #[test]
    fn paragraphs_flow_and_examples_stay() {
        let text = "Examples:\n  oomph one\n  oomph two\n\nA sentence that\ngoes on.\n\nAnd then:\nanother\n  three";
        let expected = "Examples:\n  oomph one\n  oomph two\n\nA sentence that goes on.\n\nAnd then:\nanother\n  three";
        assert_eq!(flow(text), expected);
    }
}
