//! Replays a workload under two settings of PyTorch's allocator with little memory, and says where each runs out.
//!
//!     cargo run --release --example replay

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use oomph::{
    base::{Bytes, GIB},
    models::Recipe,
    replay::Replay,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let workload = Recipe::named("variable-length")?.workload()?;
    for strategy in ["caching", "caching:expandable_segments:True"] {
        let run = Replay::new(&workload).strategy(strategy).limit(6 * GIB).run()?;
        let peak = Bytes(run.stats.peak.reserved);
        match run.outcome.first_oom {
            Some(oom) => {
                println!("{strategy}: out of memory at event {} ({:?}), {peak} reserved", oom.event, oom.cause)
            }
            None => println!("{strategy}: completes with {peak} reserved"),
        }
    }
    Ok(())
}
