//! `oomph worker`: the process in which one case runs. Started by `run` and `replay`, never by hand.

use std::{
    io::{self, BufRead},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};
use crate::suite::worker::{Order, STOP};

/// How long ending in an orderly way may take. A driver that hangs does so at the exit of a process too.
const ORDERLY_END: Duration = Duration::from_secs(2);

pub fn run() -> Outcome {
    // Ctrl-C in a terminal reaches every process in it, and batch systems signal all of them: whether the case is worth
    // finishing is for the process that waits to decide, and it says so on standard input.
    ctrlc::set_handler(|| {})?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let order = Order::read(&line).map_err(Failure::usage)?;
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    thread::spawn(move || listen(&told));
    output::say(&order.carry_out(&stop)?)?;
    Ok(exit::OK)
}

/// Waits for the word to stop, and for the end: with nobody left to tell, a GPU must not stay occupied.
fn listen(stop: &AtomicBool) {
    let mut line = String::new();
    while let Ok(1..) = io::stdin().lock().read_line(&mut line) {
        if line.trim() == STOP {
            stop.store(true, Ordering::Relaxed);
        }
        line.clear();
    }
    thread::spawn(|| {
        thread::sleep(ORDERLY_END);
        process::abort();
    });
    process::exit(i32::from(exit::INTERRUPTED));
}
