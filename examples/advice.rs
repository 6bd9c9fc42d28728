//! Asks which allocator settings a recorded program should use.
//!
//!     cargo run --release --example advice -- workloads/recorded/varlen.pickle.xz

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use oomph::{
    answer::advise::{AdviceQuestion, advise},
    base::{Bytes, NoProgress},
    device::DeviceSpec,
    pytorch::export_line,
    trace::{self, Trace},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "workloads/recorded/varlen.pickle.xz".to_owned());
    let trace = Trace::read(&*trace::open(&path, &NoProgress)?)?;
    let device = DeviceSpec::default();
    let advice = advise(&AdviceQuestion::new(&trace, "", &device))?;
    println!("change the settings: {}, saves {}", advice.changes, Bytes(advice.saved_bytes));
    for row in advice.tried.iter().filter(|row| row.recommended) {
        println!("{}", export_line(row.settings.as_deref().unwrap_or_default(), None));
    }
    Ok(())
}
