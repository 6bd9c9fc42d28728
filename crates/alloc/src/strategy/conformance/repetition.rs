//! Promises about doing the same thing twice.

use super::{
    Bench, Subject, Unplayable,
    memory::{ROOMY, TIGHT},
    mixed_script,
};
use crate::device::{Clock, Device};
use crate::strategy::Strategy;
use oomph_base::MIB;

/// A real device answers with other addresses and other times whenever it is asked.
fn answers_alike(device: &dyn Device) -> Result<(), Unplayable> {
    match device.props().clock {
        Clock::Virtual => Ok(()),
        Clock::Wall => Err(Unplayable::NotOffered("a real device does not answer twice alike")),
    }
}

pub(super) fn same_calls(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    answers_alike(&*(subject.device)(TIGHT))?;
    for room in [ROOMY, TIGHT] {
        let steps = mixed_script(21, 200, 30 * MIB, true);
        let (mut first, mut second) = (Bench::new(subject, room)?, Bench::new(subject, room)?);
        let difference = first.play(&steps).into_iter().zip(second.play(&steps)).position(|(a, b)| a != b);
        if let Some(number) = difference {
            first.find(format!("step {number}, {:?}, came out differently the second time", steps[number]));
        }
        if first.watch.device.ledger() != second.watch.device.ledger() {
            first.find("the second time other driver calls were made".to_owned());
        }
        found.extend(first.finish());
    }
    Ok(())
}

pub(super) fn fork(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    answers_alike(&*(subject.device)(TIGHT))?;
    let (past, future) = (mixed_script(31, 150, 30 * MIB, true), mixed_script(32, 100, 30 * MIB, true));
    let (mut original, mut twin) = (Bench::new(subject, TIGHT)?, Bench::new(subject, TIGHT)?);
    original.play(&past);
    twin.play(&past);
    // The copy lives on with the twin's device, which has gone through the same.
    let Some(mut copy) = original.fork(twin.watch.device) else {
        found.extend(original.finish());
        return Err(Unplayable::NotOffered("the strategy cannot be copied"));
    };
    let (stats, layout) = (original.watch.strategy.stats(), original.watch.strategy.layout());
    if copy.watch.strategy.stats() != stats || copy.watch.strategy.layout() != layout {
        original.find("the copy has other books or another layout".to_owned());
    }
    let told_by_copy = copy.play(&future);
    if original.watch.strategy.stats() != stats || original.watch.strategy.layout() != layout {
        original.find("what happened to the copy changed the original".to_owned());
    }
    let difference = original.play(&future).into_iter().zip(told_by_copy).position(|(a, b)| a != b);
    if let Some(number) = difference {
        original.find(format!("step {number}, {:?}, came out differently in the copy", future[number]));
    }
    found.extend(original.finish());
    found.extend(copy.finish());
    Ok(())
}
