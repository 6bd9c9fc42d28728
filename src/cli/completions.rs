//! `oomph completions`.

use clap_complete::{Shell, generate};

use super::{exit, failure::Outcome, output};

/// Prints a completion script. For bash: `oomph completions bash > ~/.local/share/bash-completion/completions/oomph`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which shell.
    shell: Shell,
}

pub fn run(args: &Args, command: &mut clap::Command) -> Outcome {
    let mut script = Vec::new();
    generate(args.shell, command, "oomph", &mut script);
    output::say(&String::from_utf8_lossy(&script))?;
    Ok(exit::OK)
}
