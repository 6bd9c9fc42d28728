//! The command line: one file or folder per command. The only module that prints, reads the
//! environment and decides exit codes.
//!
//! Options are parsed here: every command turns its arguments into types of the library. Enums of
//! the library that are option values derive clap's `ValueEnum` where they are defined.

mod advise;
mod claims;
#[cfg(test)]
mod columns;
mod compare;
mod convert;
mod doctor;
mod environment;
pub mod exit;
mod export;
mod fits;
mod help;
mod inspect;
mod leaks;
mod list;
mod old_options;
mod options;
mod output;
mod progress;
mod ranks;
mod record;
mod rehearse;
mod replay;
mod report;
mod run;
mod source;
mod stress;
mod techniques;
mod threshold;
mod verify;
mod verify_on;
mod worker;

use std::{env, ffi::OsString, process::ExitCode};

use anyhow::anyhow;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

use self::{
    exit::{CommandError, CommandResult},
    old_options::Modernized,
};
use crate::{base::abandon_unfinished_files, device::cuda, suite::SuiteFile};

/// Replays GPU allocation patterns under different allocators, on a simulated or a real GPU, and
/// shows when memory runs out, how much is lost to fragmentation and what it costs.
///
/// Without a command, the quick suite runs on the simulated GPU if the current folder has
/// `suites/quick.toml`; elsewhere this overview is shown.
#[derive(Debug, Parser)]
#[command(name = "oomph", version = VERSION, after_help = exit::HELP, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// Version and the commit it was built from.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("OOMPH_COMMIT"), ")");

/// The command of a process that runs one case.
const WORKER: &str = "worker";
/// The command of a process that holds a plugin.
#[cfg(unix)]
const PLUGIN_HOST: &str = "plugin-host";

/// In the order of `--help`; [`help::GROUPS`] has the headings.
#[derive(Debug, Subcommand)]
enum Command {
    /// Run your own training program without a GPU, and learn whether it fits on a card.
    Rehearse(rehearse::Args),
    /// Say whether a model can be trained on a card, from its config.json.
    Fits(fits::Args),
    /// Print the Python lines that make PyTorch write a memory snapshot.
    Record(record::Args),
    /// Recommend allocator settings: what they save, how sure that is, or why no setting helps.
    Advise(advise::Args),
    /// Detect leaks, a growing cache and fragmentation, and name the call sites that grow.
    Leaks(leaks::Args),
    /// Show what is in a workload or trace: events, sizes, lifetimes, peak, lower bound and
    /// packing.
    Inspect(inspect::Args),
    /// Find the smallest memory that is enough, or the largest workload that fits.
    Threshold(threshold::Args),
    /// Compare memory-saving techniques: what each saves, what it costs, what fits on your card.
    Techniques(techniques::Args),
    /// Run benchmark suites: one table and a folder of CSVs.
    Run(run::Args),
    /// Run workloads or traces under several strategies and compare them.
    Replay(replay::Args),
    /// Compare two runs of the same cases: what changed, what got worse, what is noise.
    Compare(compare::Args),
    /// Make one page with charts and tables from the folders of runs; merge shards into one run.
    Report(report::Args),
    /// Try to break allocators with random programs, driver failures and misuse; failures are
    /// shrunk and saved.
    Stress(stress::Args),
    /// Check that the model reproduces PyTorch memory snapshots exactly, or that a GPU agrees with
    /// the simulated one.
    Verify(verify::Args),
    /// Write a workload or trace as a trace file.
    Convert(convert::Args),
    /// Check the set-up.
    Doctor(doctor::Args),
    /// List strategies, workloads, generators and suites.
    List(list::Args),
    /// Test published claims about GPU memory.
    Claims(claims::Args),
    /// Print a completion script for a shell.
    Completions(help::CompletionsArgs),
    /// Print a manual page, or write all of them.
    Man(help::ManArgs),
    /// Run the case on standard input; started by `run` and `replay`.
    #[command(name = WORKER, hide = true)]
    Worker,
    /// Serve a plugin on the socket that is standard input; started by `stress`.
    #[cfg(unix)]
    #[command(name = PLUGIN_HOST, hide = true)]
    PluginHost(worker::plugin_host::Args),
}

/// Parses the command line, runs the command and returns its exit code.
pub fn main() -> ExitCode {
    let code = run_command();
    abandon_unfinished_files();
    code
}

fn run_command() -> ExitCode {
    let Modernized { words, notes, .. } = match Modernized::of(env::args_os().skip(1)) {
        Ok(modern) => modern,
        Err(reason) => return CommandError::usage(anyhow!(reason)).report(),
    };
    let words = || [OsString::from("oomph")].into_iter().chain(words.clone());
    let parse = |command: clap::Command| {
        command.try_get_matches_from(words()).and_then(|matches| Cli::from_arg_matches(&matches))
    };
    // Flowing texts cost time and only help needs them; every case of a worker starts this program.
    let parsed = parse(Cli::command()).or_else(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            parse(help::flowing(help::grouped(Cli::command())))
        }
        _ => Err(error),
    });
    // The second process of a command would repeat the notes of the first.
    if !words().any(|word| word == *format!("--{}", stress::SECOND_PROCESS)) {
        notes.iter().for_each(|note| output::complain(note));
    }
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors for clap too.
            let _ = error.print();
            if let Some(tip) = help::tip(&error) {
                output::complain(&tip);
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(exit::USAGE));
        }
    };
    cuda::look_for_toolkit_in(environment::toolkit_folders);
    let Some(command) = cli.command else {
        return exit_code(match SuiteFile::is_in_current_folder(run::DEFAULT_SUITE) {
            true => run::run(run::Args::default()),
            false => help::print_overview(&Cli::command()),
        });
    };
    exit_code(match command {
        Command::Rehearse(args) => rehearse::run(&args),
        Command::Fits(args) => fits::run(args),
        Command::Record(args) => record::run(&args),
        Command::Advise(args) => advise::run(args),
        Command::Leaks(args) => leaks::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Threshold(args) => threshold::run(args),
        Command::Techniques(args) => techniques::run(args),
        Command::Run(args) => run::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Report(args) => report::run(args),
        Command::Stress(args) => stress::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::List(args) => list::run(args),
        Command::Claims(args) => claims::run(args),
        Command::Completions(args) => help::completions(&args, &mut help::flowing(Cli::command())),
        Command::Man(args) => help::man(&args, help::flowing(Cli::command())),
        Command::Worker => worker::run(),
        #[cfg(unix)]
        Command::PluginHost(args) => worker::plugin_host::run(&args),
    })
}

fn exit_code(outcome: CommandResult) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_one_place_in_the_overview() {
        let command = Cli::command();
        let grouped: Vec<&str> = help::GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let visible: Vec<&str> =
            command.get_subcommands().filter(|under| !under.is_hide_set()).map(clap::Command::get_name).collect();
        assert_eq!(grouped, visible, "groups and declarations have the same order");
        assert_eq!(grouped[..4], ["rehearse", "fits", "record", "advise"]);
    }
}
