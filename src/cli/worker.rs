//! Helper processes, never started by hand: `oomph worker` runs one case for `run` and `replay`;
//! `oomph plugin-host` holds a plugin for `stress`.

use std::{
    io::{self, BufRead},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult, on_signals},
    output,
};
use crate::{
    base::Nanos,
    suite::{
        CaseScope,
        worker::{PASS, READY, STOP, carry_out, carry_out_turns, read_case},
    },
};

/// How long an orderly exit may take. A driver or a plugin that hangs also hangs at the exit.
const EXIT_TIME: Duration = Duration::from_secs(2);

pub fn run() -> CommandResult {
    // Ctrl-C reaches every process of a terminal, and batch systems signal all of them. The parent
    // decides whether the case is worth finishing, and says so on standard input.
    on_signals(|| {})?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    // Before the listener starts: it ends the process as soon as standard input ends.
    let case = read_case(&line).map_err(CommandError::usage)?;
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, (asked, requests)) = (Arc::clone(&stop), mpsc::channel());
    thread::spawn(move || listen(&seen, &asked));
    if case.scope == CaseScope::Turns {
        let mut turn = |last: Option<Nanos>| {
            let answer = last.map_or_else(|| READY.to_owned(), |time| time.0.to_string());
            output::say_data(&answer).is_ok() && requests.recv().is_ok()
        };
        carry_out_turns(case, &stop, &mut turn).map_err(|reason| anyhow!(reason))?;
        return Ok(exit::OK);
    }
    output::say_data(&carry_out(case, &stop)?)?;
    Ok(exit::OK)
}

/// Waits for the order to stop, and passes requests for passes on. Exits when standard input ends: without a parent, the GPU must not
/// stay occupied.
fn listen(stop: &AtomicBool, asked: &mpsc::Sender<()>) {
    let mut line = String::new();
    while let Ok(1..) = io::stdin().lock().read_line(&mut line) {
        match line.trim() {
            STOP => stop.store(true, Ordering::Relaxed),
            // Cases that do not take turns have no receiver; the message is then dropped.
            PASS => drop(asked.send(())),
            _ => {}
        }
        line.clear();
    }
    abort_if_exit_hangs();
    process::exit(i32::from(exit::INTERRUPTED));
}

fn abort_if_exit_hangs() {
    thread::spawn(|| {
        thread::sleep(EXIT_TIME);
        process::abort();
    });
}

#[cfg(unix)]
pub mod plugin_host {
    //! The process that a plugin is loaded into.

    use std::{
        env, io,
        os::{fd::AsFd, unix::net::UnixStream},
    };

    use super::{CommandError, CommandResult, abort_if_exit_hangs, exit};
    use crate::{
        cli::PLUGIN_HOST,
        plugin::{self, HostProgram},
    };

    /// Which plugin.
    #[derive(Debug, clap::Args)]
    pub struct Args {
        /// What follows `plugin:`.
        #[arg(value_name = "FILE[,PARAMETERS]")]
        parameters: String,
        /// The simulated device that answers its CUDA calls.
        #[arg(value_name = "KEY=VALUE;...", default_value = "")]
        device: String,
    }

    /// From now on, plugins under stress run in processes of this program.
    pub fn offer() -> Result<(), CommandError> {
        let program = env::current_exe()?;
        plugin::host_with(HostProgram { program, arguments: vec![PLUGIN_HOST.into()] });
        Ok(())
    }

    pub fn run(args: &Args) -> CommandResult {
        let connection = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let hosted = plugin::host(&args.parameters, &args.device, connection);
        abort_if_exit_hangs();
        hosted?;
        Ok(exit::OK)
    }
}
