//! `oomph plugin-host`: the process that a plugin is loaded into. Started by `stress`, never by hand.

use std::{
    env, io,
    os::{fd::AsFd, unix::net::UnixStream},
    process, thread,
    time::Duration,
};

use super::{
    PLUGIN_HOST, exit,
    failure::{Failure, Outcome},
};
use crate::plugin::{self, HostProgram};

/// How long ending in an orderly way may take: what a plugin does at the exit of its process may never end.
const ORDERLY_END: Duration = Duration::from_secs(2);

/// Which plugin.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What follows `plugin:`.
    #[arg(value_name = "FILE[,PARAMETERS]")]
    parameters: String,
}

/// From now on plugins under stress run in processes of this program.
pub fn offer() -> Result<(), Failure> {
    let program = env::current_exe()?;
    plugin::host_with(HostProgram { program, arguments: vec![PLUGIN_HOST.into()] });
    Ok(())
}

pub fn run(args: &Args) -> Outcome {
    let connection = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let hosted = plugin::host(&args.parameters, connection);
    thread::spawn(|| {
        thread::sleep(ORDERLY_END);
        process::abort();
    });
    hosted?;
    Ok(exit::OK)
}
