//! Promises about memory that several streams use.

use super::{
    Bench, Echo, Step, Subject, Unplayable,
    memory::{ROOMY, TIGHT},
    mixed_script,
};
use crate::device::{Capabilities, Clock, MissingCapabilities};
use crate::strategy::Strategy;
use oomph_base::{KIB, MIB, Nanos, StreamId};

const HOME: StreamId = StreamId(0);
const ELSEWHERE: StreamId = StreamId(1);
/// Longer than all driver calls of a part together.
const LONG: Nanos = Nanos(10_000_000_000);
/// The same where somebody has to wait for it: what is given out after the work is done is not looked at.
const LONG_ENOUGH: Nanos = Nanos(300_000_000);

pub(super) fn used_elsewhere(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    for bytes in [512, 100 * KIB, 5 * MIB, 30 * MIB] {
        let mut bench = busy_bench(subject, ROOMY, ELSEWHERE)?;
        bench.alloc(bytes, HOME);
        bench.used_on(0, ELSEWHERE);
        bench.free(0);
        // The bench looks whether any of these is handed out too early.
        for _ in 0..3 {
            bench.step(&Step::Alloc { bytes, stream: HOME });
            bench.step(&Step::Alloc { bytes, stream: ELSEWHERE });
            bench.step(&Step::Alloc { bytes, stream: StreamId(2) });
        }
        bench.step(&Step::DeviceSync);
        bench.step(&Step::Alloc { bytes, stream: HOME });
        let usage = bench.watch.strategy.stats().current;
        if usage.active != usage.allocated {
            let waiting = usage.active - usage.allocated;
            bench.find(format!("{waiting} bytes still wait although all work is done and an alloc has come since"));
        }
        found.extend(bench.finish());
    }
    Ok(())
}

pub(super) fn other_stream(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    for bytes in [512, 100 * KIB, 5 * MIB, 30 * MIB] {
        let mut bench = busy_bench(subject, ROOMY, ELSEWHERE)?;
        bench.alloc(bytes, ELSEWHERE);
        bench.free(0);
        for stream in [HOME, StreamId(2), HOME] {
            bench.step(&Step::Alloc { bytes, stream });
        }
        found.extend(bench.finish());
    }
    Ok(())
}

pub(super) fn random(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    for (seed, room) in [(41, ROOMY), (42, TIGHT), (43, TIGHT)] {
        let mut bench = busy_bench(subject, room, HOME)?;
        bench.play(&mixed_script(seed, 300, 40 * MIB, true));
        found.extend(bench.finish());
    }
    Ok(())
}

/// A bench with one stream busy for long.
fn busy_bench(subject: &Subject<'_>, room: u64, stream: StreamId) -> Result<Bench, Unplayable> {
    let mut bench = Bench::new(subject, room)?;
    let long = match bench.watch.device.props().clock {
        Clock::Virtual => LONG,
        Clock::Wall => LONG_ENOUGH,
    };
    match bench.work(stream, long) {
        Echo::LeftOut => Err(MissingCapabilities(Capabilities { compute: true, ..Capabilities::NONE }).into()),
        _ => Ok(bench),
    }
}
