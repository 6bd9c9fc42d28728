//! The command line: one file a subcommand. The only room that prints, reads the environment or decides exit codes.
//!
//! clap's types stop here: every subcommand turns its arguments into what the library works with.

mod advise;
mod claims;
mod compare;
mod completions;
mod convert;
mod doctor;
mod environment;
pub mod exit;
mod export;
mod export_tables;
mod failure;
mod help;
mod inspect;
mod inspect_needs;
mod inspect_recording;
mod inspect_summary;
mod interrupt;
mod leaks;
mod list;
mod man;
mod options;
mod output;
#[cfg(unix)]
mod plugin_host;
mod progress;
mod ranks;
mod record;
mod replay;
mod replay_place;
mod report;
mod run;
mod run_claims;
mod run_partition;
mod run_techniques;
mod run_thresholds;
mod source;
mod stress;
mod techniques;
mod threshold;
mod toolkit_folders;
mod verify;
mod verify_on;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

use crate::device::cuda;

/// Replays GPU allocation patterns against allocator strategies, on a simulated GPU or a real one, and tells when
/// memory runs out, how much is lost to fragmentation and what it costs.
///
/// Without a subcommand the quick suite runs on the simulated GPU.
#[derive(Debug, Parser)]
#[command(name = "oomph", version = VERSION, after_help = exit::HELP, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// Version and the commit it was built from.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("OOMPH_COMMIT"), ")");

/// The subcommand that a process is started with to run one case.
const WORKER: &str = "worker";
/// The subcommand that a process is started with to have a plugin in it.
#[cfg(unix)]
const PLUGIN_HOST: &str = "plugin-host";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run benchmark suites: cases, progress, one table, and a folder of CSVs.
    Run(run::Args),
    /// Run one pattern through some strategies and compare what happens.
    Replay(replay::Args),
    /// Find the smallest memory that suffices, or the largest workload that fits.
    Threshold(threshold::Args),
    /// Say which allocator settings to use, what they save, and why none helps.
    Advise(advise::Args),
    /// Say what is in a workload or trace: events, sizes, lifetimes, peak, the bound and a packing.
    Inspect(inspect::Args),
    /// Say whether memory leaks, the cache grows, it fragments or all is steady; and who grows.
    Leaks(leaks::Args),
    /// Re-live PyTorch memory snapshots and compare the model with them, entry by entry; or a GPU with the simulated one.
    Verify(verify::Args),
    /// Compare two runs of the same cases: what changed, what got worse, what is noise.
    Compare(compare::Args),
    /// Make one page of pictures and tables from the folders of runs, and one run of shards.
    Report(report::Args),
    /// Compare memory-saving techniques: what each saves, what it costs, what fits in your card.
    Techniques(techniques::Args),
    /// Put what is published about GPU memory to the test, claim by claim.
    Claims(claims::Args),
    /// Try to break allocators: random programs, failing drivers, misuse; what breaks one is shrunk and saved.
    Stress(stress::Args),
    /// Write a workload or trace as a trace file.
    Convert(convert::Args),
    /// Print the Python lines that make PyTorch write a memory snapshot.
    Record(record::Args),
    /// List strategies, workloads, generators and suites.
    List(list::Args),
    /// Check the set-up, line by line.
    Doctor(doctor::Args),
    /// Print a completion script for a shell.
    Completions(completions::Args),
    /// Print a manual page, or write all of them.
    Man(man::Args),
    /// Run the case on standard input; started by `run` and `replay`.
    #[command(name = WORKER, hide = true)]
    Worker,
    /// Answer for a plugin on the socket that is standard input; started by `stress`.
    #[cfg(unix)]
    #[command(name = PLUGIN_HOST, hide = true)]
    PluginHost(plugin_host::Args),
}

/// Parses, dispatches, and turns the outcome into an exit code.
#[must_use]
pub fn main() -> ExitCode {
    let parse = |command: clap::Command| command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    // Only help shows the texts that flow, and every case of a worker is a start of this program.
    let parsed = parse(Cli::command()).or_else(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            parse(help::flowing(Cli::command()))
        }
        _ => Err(error),
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too.
            let _ = error.print();
            if let Some(tip) = help::tip(&error) {
                output::complain(&tip);
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(exit::USAGE));
        }
    };
    cuda::look_for_toolkit_in(toolkit_folders::toolkit_folders);
    let outcome = match cli.command.unwrap_or_else(|| Command::Run(run::Args::default())) {
        Command::Run(args) => run::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Threshold(args) => threshold::run(args),
        Command::Advise(args) => advise::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Leaks(args) => leaks::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Report(args) => report::run(args),
        Command::Techniques(args) => techniques::run(args),
        Command::Claims(args) => claims::run(args),
        Command::Stress(args) => stress::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Record(args) => record::run(&args),
        Command::List(args) => list::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => completions::run(&args, &mut help::flowing(Cli::command())),
        Command::Man(args) => man::run(&args, help::flowing(Cli::command())),
        Command::Worker => worker::run(),
        #[cfg(unix)]
        Command::PluginHost(args) => plugin_host::run(&args),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
