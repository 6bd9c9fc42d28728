//! Reads a PyTorch memory snapshot and prints its size, its peak and its largest requests.
//!
//!     cargo run --release --example read_snapshot -- workloads/recorded/varlen.pickle.xz

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use oomph::{
    base::{Bytes, NoProgress},
    trace::{self, Op, Trace},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "workloads/recorded/varlen.pickle.xz".to_owned());
    let trace = Trace::read(&*trace::open(&path, &NoProgress)?)?;

    let mut sizes: Vec<u64> = Vec::new();
    for event in &trace.events {
        if let Op::Alloc { bytes, .. } = event.op {
            sizes.push(bytes);
        }
    }
    sizes.sort_unstable_by(|a, b| b.cmp(a));

    println!("{path}: {} events, {} requests", trace.events.len(), sizes.len());
    println!(
        "least memory that any allocator needs: {}",
        Bytes(oomph::plan::MemoryBound::of(&trace, 512)?.requested_bytes)
    );
    for bytes in sizes.iter().take(5) {
        println!("  {}", Bytes(*bytes));
    }
    Ok(())
}
