//! `oomph man`: manual pages from the same structs as `--help`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use clap::Command;
use clap_mangen::Man;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};

/// Prints the manual page of the program or of one of its commands, in the format of `man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph man | man -l -                                   read it
  oomph man stress misuse | man -l -                     that of one command
  oomph man --output ~/.local/share/man/man1             install all of them: then `man oomph-advise`")]
pub struct Args {
    /// A command, such as `advise` or `stress misuse` [default: the program itself].
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder, which is made.
    #[arg(long, short, value_name = "DIR", conflicts_with = "command")]
    output: Option<PathBuf>,
}

pub fn run(args: &Args, mut program: Command) -> Outcome {
    // Pages are named after the whole way to a command, which clap knows after this.
    program.build();
    if let Some(folder) = &args.output {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string()).map_err(Failure::usage)?;
        let written = write_all(&program, folder)?;
        output::complain(&format!("{written} pages are in {}", folder.display()));
        return Ok(exit::OK);
    }
    let mut command = &program;
    for name in &args.command {
        let found = command.find_subcommand(name);
        command = found.ok_or_else(|| {
            Failure::usage(anyhow!("there is no command '{name}' in `{}`", command.get_bin_name().unwrap_or("oomph")))
        })?;
    }
    output::say(&page(command)?)?;
    Ok(exit::OK)
}

/// Writes the page of a command and those of all under it, and says how many.
fn write_all(command: &Command, folder: &Path) -> Result<usize, Failure> {
    let path = folder.join(format!("{}.1", page_name(command)));
    fs::write(&path, page(command)?).with_context(|| path.display().to_string())?;
    let seen = command.get_subcommands().filter(|under| !under.is_hide_set() && under.get_name() != "help");
    seen.map(|under| write_all(under, folder)).try_fold(1, |sum, written| Ok(sum + written?))
}

/// What `man` calls the page: `oomph-stress-misuse`.
fn page_name(command: &Command) -> String {
    command.get_bin_name().unwrap_or_else(|| command.get_name()).replace(' ', "-")
}

fn page(command: &Command) -> io::Result<String> {
    let mut text = Vec::new();
    let source = concat!("oomph ", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone().display_name(page_name(command))).source(source).render(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
