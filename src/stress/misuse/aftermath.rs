//! What becomes of a strategy after it was misused: an ordinary program, and everything given back, twice.

use std::sync::LazyLock;

use super::stage::Stage;
use crate::{
    base::{KIB, MIB, Nanos, StreamId, TagId, ThreadId, Work},
    replay::{OnOutOfMemory, ReplayOptions, replay},
    strategy::{Caller, Context, Silent},
    trace::{Trace, TraceBuilder},
};

/// Goes on as if nothing had happened; what is wrong is added to the findings.
pub(super) fn live_on(stage: &mut Stage) {
    for _ in 0..2 {
        let (strategy, device) = stage.parts();
        let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..ReplayOptions::default() };
        if let Err(error) = replay(&*PROGRAM, strategy, device, &options, &mut Silent) {
            stage.findings.push(format!("an ordinary program fails afterwards: {error}"));
        }
        stage.strategy.inner_mut().audit();
        give_back(stage);
        stage.look();
    }
}

fn give_back(stage: &mut Stage) {
    for (block, stream) in std::mem::take(&mut stage.live) {
        let (strategy, device) = stage.parts();
        let mut cx = Context { device, sink: &mut Silent };
        if let Err(error) = strategy.free(&mut cx, block, Caller { stream, thread: ThreadId(0) }) {
            stage.findings.push(format!("a live block cannot be freed afterwards: {error}"));
        }
    }
    let _ = stage.device.synchronize();
    if let Err(error) = stage.trim() {
        stage.findings.push(format!("a trim fails afterwards: {error}"));
    }
    stage.strategy.inner_mut().audit();
    if let Err(error) = stage.close() {
        stage.findings.push(format!("a close fails afterwards: {error}"));
    }
    if let Some(foreign) = stage.foreign.take()
        && let Err(error) = stage.device.free(foreign)
    {
        stage.findings.push(format!("memory of somebody else is gone: {error}"));
    }
    let held = stage.device.held_bytes();
    if held > 0 {
        stage.findings.push(format!("after a close the device still holds {held} bytes"));
    }
}

/// Small and large blocks on three streams, some of them used elsewhere while that stream is busy.
static PROGRAM: LazyLock<Trace> = LazyLock::new(|| {
    let mut story = TraceBuilder::new();
    let streams: Vec<StreamId> =
        [Some(StreamId::DEFAULT), story.new_stream().ok(), story.new_stream().ok()].into_iter().flatten().collect();
    for round in 0..3u64 {
        let mut blocks = Vec::new();
        for (number, &stream) in (0u64..).zip(&streams) {
            for bytes in [700, 4 * KIB, MIB, 3 * MIB + round, 12 * MIB] {
                blocks.push(story.alloc(bytes + number, stream, TagId(0)));
            }
            story.work(Work::Spin { nanos: Nanos(50_000) }, stream, &[]);
        }
        for (number, &block) in blocks.iter().enumerate() {
            if number % 4 == 1 {
                story.use_on(block, streams[number % streams.len()]);
            }
        }
        let (even, odd): (Vec<_>, Vec<_>) = blocks.iter().partition(|&&block| block % 2 == 0);
        even.into_iter().chain(odd).for_each(|block| story.free(block));
        story.alloc(2 * MIB, streams[0], TagId(0));
        match round {
            0 => story.empty_cache(),
            1 => story.device_sync(),
            _ => {}
        }
    }
    story.finish("after misuse")
});
