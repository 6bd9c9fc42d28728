//! Lets the third allocation of the driver fail, and shows that the strategy survives and loses nothing.
//!
//!     cargo run --release --example inject_faults

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use oomph::{
    base::{MIB, SiteId, StreamId, ThreadId},
    device::{
        CallKind, Device, DeviceSpec,
        wrap::{CallFailure, FaultPlan, FaultyDevice},
    },
    strategy::{Context, Request, Setup, Silent, StrategySpec},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plan = FaultPlan::none().fail_nth(Some(CallKind::MemAlloc), 3, CallFailure::UNKNOWN);
    let mut device = FaultyDevice::with(plan, DeviceSpec::default().open()?);
    let mut strategy = StrategySpec::from("bfc").build(&Setup { props: device.props(), limit: None })?;

    for megabytes in [10, 100, 200, 400] {
        let mut context = Context { device: &mut device, sink: &mut Silent };
        let request =
            Request { bytes: megabytes * MIB, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        match strategy.alloc(&mut context, &request) {
            Ok(attempt) => println!("{megabytes} MiB: {attempt:?}"),
            Err(error) => println!("{megabytes} MiB: {error}"),
        }
    }
    strategy.close(&mut Context { device: &mut device, sink: &mut Silent })?;
    println!("held on the device after close: {} bytes", strategy.stats().current.reserved);
    Ok(())
}
