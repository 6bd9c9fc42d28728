//! The promise that no driver error does lasting damage.

use super::{Bench, Step, Subject, Unplayable, memory::TIGHT, mixed_script};
use crate::device::{
    CallKind, Clock,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use oomph_base::{MIB, Nanos, StreamId};

/// On a real device every turn would take minutes: of each kind this many fail, spread over the program.
const TURNS_ON_A_REAL_DEVICE: u64 = 6;

/// Plays one program again and again, each time with another driver call failing once: every kind, every turn.
pub(super) fn every_call(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut steps = mixed_script(51, 70, 30 * MIB, true);
    // Whatever the dice say: a block that other streams work on is given back, and memory is wanted right after.
    steps.extend([Step::Alloc { bytes: MIB, stream: StreamId(0) }]);
    steps.extend([1, 2].map(|user| Step::Work { stream: StreamId(user), nanos: Nanos(100_000) }));
    steps.extend([0, 1, 2].map(|user| Step::UsedOn { nth: 0, stream: StreamId(user) }));
    steps.extend([Step::Free { nth: 0 }, Step::Alloc { bytes: 3 * MIB, stream: StreamId(0) }, Step::Trim]);
    // Steps that are alike, one block of each freed in the next: what learns from steps has something to learn.
    for _ in 0..6 {
        let mut step = vec![Step::NextStep];
        step.extend([3 * MIB, 2 * MIB, 5 * MIB].map(|bytes| Step::Alloc { bytes, stream: StreamId(0) }));
        step.extend([0; 3].map(|nth| Step::Free { nth }));
        steps.extend(step);
    }
    let mut rehearsal = Bench::new(subject, TIGHT)?;
    rehearsal.play(&steps);
    rehearsal.wind_down();
    for (kind, tally) in rehearsal.watch.device.ledger().iter() {
        let step = match rehearsal.watch.device.props().clock {
            Clock::Virtual => 1,
            Clock::Wall => tally.count.div_ceil(TURNS_ON_A_REAL_DEVICE).max(1),
        };
        for turn in (1..=tally.count).step_by(step as usize) {
            for fault in faults_of(kind) {
                let plan = FaultPlan::none().fail_nth(Some(kind), turn, fault);
                let device = Box::new(FaultyDevice::with(plan, (subject.device)(TIGHT)));
                let mut bench = Bench::on(device, subject)?;
                bench.play(&steps);
                bench.wind_down();
                if bench.errors().len() > 1 {
                    bench.find(format!("one fault became {} errors", bench.errors().len()));
                }
                let findings = bench.into_findings().into_iter();
                found.extend(findings.map(|finding| format!("{kind} number {turn} fails ({fault:?}): {finding}")));
            }
        }
    }
    Ok(())
}

/// How a call of this kind may fail. Taking memory may also find none.
fn faults_of(kind: CallKind) -> Vec<CallFailure> {
    let mut faults = vec![CallFailure::UNKNOWN];
    if matches!(kind, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync) {
        faults.push(CallFailure::OutOfMemory);
    }
    faults
}
