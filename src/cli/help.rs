//! Help that is as wide as the terminal, and what is said to who names a file where a command belongs.
//!
//! Called by `main` when help was asked for; the manual pages are made from the same texts.

use std::path::Path;

use clap::{
    Command, Error,
    error::{ContextKind, ContextValue},
};

/// The command with its paragraphs in one line each, so that they are broken where the terminal ends and not where our
/// editor did; examples and tables, which are indented, stay as they are.
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

/// Whoever has a recording and no command yet is told which there are for it; whoever names several, how ranks are named.
pub fn tip(error: &Error) -> Option<String> {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(name)) if Path::new(name).exists() => Some(name),
        _ => None,
    };
    if let Some(name) = named(ContextKind::InvalidSubcommand) {
        return Some(format!(
            "\n  tip: '{name}' is a file; which settings help it: `oomph advise {name}`, whether it leaks: \
             `oomph leaks {name}`, what is in it: `oomph inspect {name}`"
        ));
    }
    let name = named(ContextKind::InvalidArg)?;
    Some(format!(
        "\n  tip: '{name}' is one file more than this takes; the recordings of several ranks are named by their folder, or \
         by a pattern in quotes such as 'run-*.pickle', for advise, leaks, inspect and threshold"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_flow_and_examples_stay() {
        let text = "Examples:\n  oomph one\n  oomph two\n\nA sentence that\ngoes on.\n\nAnd then:\nanother\n  three";
        let expected = "Examples:\n  oomph one\n  oomph two\n\nA sentence that goes on.\n\nAnd then:\nanother\n  three";
        assert_eq!(flow(text), expected);
    }
}
