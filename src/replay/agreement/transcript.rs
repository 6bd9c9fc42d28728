//! The channel from the run on the device to the run that repeats it: driver calls with their answers, and the
//! strategy's decisions, event by event.
//!
//! Both runs go on at the same time, and the channel is bounded: a trace of any length is compared in constant memory.
//! There is one channel for everything, so that neither run waits for something that the other holds back.

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use super::{Decision, DecisionSink};
use crate::device::{
    Device,
    wrap::{DriverAnswer, DriverCall, DriverExchange, Interceptor},
};

/// How many calls and decisions are sent together.
const CHUNK: usize = 4096;
/// How many chunks the channel holds, about 35 MB. A recording fits as a whole, so the run on the device never waits
/// for the other one, and its streams are as busy as they would be alone.
const CHUNKS_UNDER_WAY: usize = 64;

/// Opens the channel.
pub(super) fn transcript() -> (TranscriptWriter, TranscriptReader) {
    let (sender, receiver) = sync_channel(CHUNKS_UNDER_WAY);
    let unsent = UnsentChunk { chunk: TranscriptChunk::default(), sender: Some(sender) };
    let received = ReceivedChunks { receiver, exchanges: Vec::new(), items: VecDeque::new() };
    (TranscriptWriter(Arc::new(Mutex::new(unsent))), TranscriptReader(Arc::new(Mutex::new(received))))
}

#[derive(Debug, Default)]
struct TranscriptChunk {
    exchanges: Vec<DriverExchange>,
    items: Vec<TranscriptItem>,
}

#[derive(Clone, Copy, Debug)]
enum TranscriptItem {
    Decision(Decision),
    /// Everything so far belongs to one event.
    EventEnds,
}

/// The end that the run on the device writes to. Copies write to the same transcript; it is complete once all are
/// dropped.
#[derive(Clone, Debug)]
pub(super) struct TranscriptWriter(Arc<Mutex<UnsentChunk>>);

#[derive(Debug)]
struct UnsentChunk {
    chunk: TranscriptChunk,
    /// Nothing once the reader is gone.
    sender: Option<SyncSender<TranscriptChunk>>,
}

impl DecisionSink for TranscriptWriter {
    fn decision(&mut self, decision: Decision) {
        self.write(|chunk| chunk.items.push(TranscriptItem::Decision(decision)));
    }

    fn event_ends(&mut self) {
        self.write(|chunk| chunk.items.push(TranscriptItem::EventEnds));
    }
}

impl TranscriptWriter {
    fn write(&self, add: impl FnOnce(&mut TranscriptChunk)) {
        let mut unsent = lock(&self.0);
        if unsent.sender.is_none() {
            return;
        }
        add(&mut unsent.chunk);
        if unsent.chunk.exchanges.len() + unsent.chunk.items.len() >= CHUNK {
            unsent.send();
        }
    }
}

impl UnsentChunk {
    fn send(&mut self) {
        let chunk = mem::take(&mut self.chunk);
        if self.sender.as_ref().is_some_and(|sender| sender.send(chunk).is_err()) {
            self.sender = None;
        }
    }
}

impl Drop for UnsentChunk {
    fn drop(&mut self) {
        self.send();
    }
}

impl Interceptor for TranscriptWriter {
    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, _device: &D) {
        self.write(|chunk| chunk.exchanges.push(DriverExchange { call: call.clone(), answer: answer.clone() }));
    }
}

/// The end that the second run reads from; copies read the same transcript.
#[derive(Clone, Debug)]
pub(super) struct TranscriptReader(Arc<Mutex<ReceivedChunks>>);

#[derive(Debug)]
struct ReceivedChunks {
    receiver: Receiver<TranscriptChunk>,
    exchanges: Vec<DriverExchange>,
    items: VecDeque<TranscriptItem>,
}

impl TranscriptReader {
    /// What the driver was asked and answered since the last time; nothing at the end. Waits for the writer.
    pub(super) fn exchanges(&self) -> Vec<DriverExchange> {
        let mut received = lock(&self.0);
        while received.exchanges.is_empty() && received.receive() {}
        mem::take(&mut received.exchanges)
    }

    /// Replaces `decisions` by those of the next event, or by what comes after the last one. False where the transcript
    /// ends without such an event. Waits for the writer.
    pub(super) fn next_event(&self, decisions: &mut Vec<Decision>) -> bool {
        decisions.clear();
        let mut received = lock(&self.0);
        loop {
            match received.items.pop_front() {
                Some(TranscriptItem::Decision(decision)) => decisions.push(decision),
                Some(TranscriptItem::EventEnds) => return true,
                None if received.receive() => {}
                None => return false,
            }
        }
    }
}

impl ReceivedChunks {
    /// Takes the next chunk in; false where there is none.
    fn receive(&mut self) -> bool {
        let Ok(chunk) = self.receiver.recv() else { return false };
        self.exchanges.extend(chunk.exchanges);
        self.items.extend(chunk.items);
        true
    }
}

/// The data behind a lock is consistent at every moment, so a panic elsewhere does not matter.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::{
        device::{
            sim::{SimConfig, SimDevice},
            wrap::InterceptedDevice,
        },
        strategy::Freed,
    };

    #[test]
    fn more_than_fits_between_the_runs_gets_through_in_order() {
        let (mut writer, reader) = transcript();
        let events = CHUNK * (CHUNKS_UNDER_WAY + 3) + 17;
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut device =
                    InterceptedDevice::new(Box::new(SimDevice::new(SimConfig::default()).unwrap()), writer.clone());
                for number in 0..events {
                    if number % 3 == 0 {
                        device.synchronize().unwrap();
                    }
                    for _ in 0..number % 2 {
                        writer.decision(Decision::Freed(Freed::Now));
                    }
                    writer.event_ends();
                }
                writer.decision(Decision::Freed(Freed::Later));
            });
            let mut decisions = Vec::new();
            for number in 0..events {
                assert!(reader.next_event(&mut decisions));
                assert_eq!(decisions.len(), number % 2, "event {number}");
            }
            assert!(!reader.next_event(&mut decisions), "nothing ended after the last event");
            assert_eq!(decisions, [Decision::Freed(Freed::Later)]);
            assert_eq!(reader.exchanges().len(), events.div_ceil(3));
            assert!(reader.exchanges().is_empty());
        });
    }

    #[test]
    fn writer_without_reader_continues() {
        let (mut writer, reader) = transcript();
        drop(reader);
        for _ in 0..CHUNK * (CHUNKS_UNDER_WAY + 2) {
            writer.event_ends();
        }
        assert!(lock(&writer.0).sender.is_none());
    }
}
