//! `cargo bench --bench replay_cost`: the cost of replay itself, measured with the strategy `null`,
//! which does almost nothing.
//!
//! Every pass replays a trace in memory through `null` without an observer, like the untimed pass
//! of a timed case. The fastest pass is the cost, because other processes can only slow a pass
//! down; the median shows how noisy the machine is. `OOMPH_REPLAY_PASSES` sets the number of passes
//! (2 is enough when instructions are counted).

#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench prints its results, and panics if it cannot run"
)]

use std::{env, time::Instant};

use oomph::{
    device::{
        Device,
        sim::{Profile, SimDevice},
    },
    models::Recipe,
    replay::{Observer, ReplayOptions, replay},
    strategy::{EventSink, Setup, StrategySpec},
    trace::Trace,
};

/// The hot pair and the mix have only allocations and frees; training also has marks, work and
/// events.
const WORKLOADS: [&str; 5] = ["hot-512", "mix-100", "mix-1000", "mix-10000", "training"];
const PASSES: usize = 41;

struct Unwatched;

impl EventSink for Unwatched {}

impl Observer for Unwatched {}

fn main() {
    let passes = env::var("OOMPH_REPLAY_PASSES").map_or(PASSES, |text| text.parse().expect("a number of passes"));
    println!("{:<12} {:>9} {:>12} {:>12}", "workload", "events", "ns/event", "median");
    for name in WORKLOADS {
        let workload = Recipe::named(name).and_then(|recipe| recipe.workload()).expect("an embedded recipe");
        let trace = Trace::read(&workload).expect("a generator does not fail");
        let events = trace.events.len();
        let mut times: Vec<f64> = (0..passes).map(|_| pass(&trace) / events as f64).collect();
        times.sort_by(f64::total_cmp);
        println!("{name:<12} {events:>9} {:>12.2} {:>12.2}", times[0], times[times.len() / 2]);
    }
}

/// Nanoseconds of one pass.
fn pass(trace: &Trace) -> f64 {
    let mut device = SimDevice::new(Profile::h200()).expect("a valid built-in profile");
    let spec = StrategySpec::from("null");
    let mut strategy = spec.build(&Setup { props: device.props(), limit: None }).expect("a registered strategy");
    let began = Instant::now();
    replay(trace, &mut *strategy, &mut device, &ReplayOptions::default(), &mut Unwatched).expect("a valid trace");
    began.elapsed().as_nanos() as f64
}
