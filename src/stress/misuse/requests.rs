//! Right handles with wrong streams and threads, requests that cannot be served, and commands that mean nothing.

use super::{
    handles::{SMALL, three},
    stage::{NO_STREAM, Stage, Unplayable},
};
use crate::{
    base::{MIB, StreamId, ThreadId},
    strategy::{Caller, Control},
};

const ELSEWHERE: StreamId = StreamId(1);

pub(super) fn free_on_other_stream(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.wrongly_free(block, Caller { stream: ELSEWHERE, thread: ThreadId(0) });
    let block = stage.alloc(SMALL, ELSEWHERE)?;
    stage.wrongly_free(block, Caller::default());
    Ok(())
}

pub(super) fn free_on_unknown_stream(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.wrongly_free(block, Caller { stream: NO_STREAM, thread: ThreadId(0) });
    Ok(())
}

/// The use may only be noted and the free be what fails. Such a block stays live until the strategy is closed: nobody can
/// say when the stream that nobody made is done with it.
pub(super) fn use_on_unknown_stream(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.wrongly_use(&block, NO_STREAM);
    stage.wrongly_free(block, Caller::default());
    stage.live.retain(|(live, _)| *live != block);
    Ok(())
}

/// As for a use: such a block may be one that only a close gives back.
pub(super) fn request_on_unknown_stream(stage: &mut Stage) -> Result<(), Unplayable> {
    three(stage)?;
    for bytes in [SMALL, 30 * MIB] {
        stage.wrongly_request(bytes, NO_STREAM);
    }
    let served: Vec<_> = stage.live.extract_if(.., |(_, stream)| *stream == NO_STREAM).collect();
    for (block, stream) in served {
        stage.wrongly_free(block, Caller { stream, thread: ThreadId(0) });
    }
    Ok(())
}

pub(super) fn free_from_other_thread(stage: &mut Stage) -> Result<(), Unplayable> {
    for thread in [1, 9, u16::MAX] {
        let [_, block, _] = three(stage)?;
        stage.wrongly_free(block, Caller { stream: StreamId::DEFAULT, thread: ThreadId(thread) });
    }
    Ok(())
}

pub(super) fn zero_bytes(stage: &mut Stage) -> Result<(), Unplayable> {
    stage.wrongly_request(0, StreamId::DEFAULT);
    three(stage)?;
    stage.wrongly_request(0, StreamId::DEFAULT);
    Ok(())
}

pub(super) fn more_than_device(stage: &mut Stage) -> Result<(), Unplayable> {
    let total = stage.device.props().total_bytes;
    requests(stage, &[total + 1, total + 2 * MIB, 3 * total, 1 << 48, 1 << 60])
}

pub(super) fn half_of_all_addresses(stage: &mut Stage) -> Result<(), Unplayable> {
    const HALF: u64 = 1 << 63;
    requests(stage, &[HALF - 2 * MIB, HALF - 1, HALF, HALF + 1, HALF + 2 * MIB])
}

/// Rounding up to 256, 512, a page or the next power of two would wrap around to a small size, and so would the sum of
/// what is reserved and what is wanted.
pub(super) fn size_overflow(stage: &mut Stage) -> Result<(), Unplayable> {
    let edges = [0, 1, 254, 255, 256, 511, 512, MIB, 2 * MIB - 1, 2 * MIB, 20 * MIB - 1, 32 * MIB, 1 << 30];
    requests(stage, &edges.map(|below| u64::MAX - below))
}

pub(super) fn unknown_pool(stage: &mut Stage) -> Result<(), Unplayable> {
    three(stage)?;
    let pool = (77, 0);
    stage.wrongly_tell(&Control::PoolEnd { pool });
    stage.wrongly_tell(&Control::PoolRelease { pool });
    stage.wrongly_tell(&Control::PoolBegin { pool, stream: Some(NO_STREAM) });
    stage.wrongly_tell(&Control::PoolBegin { pool, stream: Some(NO_STREAM) });
    stage.wrongly_tell(&Control::PoolEnd { pool });
    stage.wrongly_tell(&Control::PoolEnd { pool });
    Ok(())
}

pub(super) fn nonsense_settings(stage: &mut Stage) -> Result<(), Unplayable> {
    three(stage)?;
    for settings in ["", ":", "no_such_setting:1", "max_split_size_mb:-1", "max_split_size_mb:99999999999999999999"] {
        stage.wrongly_tell(&Control::Configure(settings));
    }
    for fraction in [f64::NAN, f64::INFINITY, -1.0, 2.0] {
        stage.wrongly_tell(&Control::Fraction(fraction));
    }
    Ok(())
}

/// Asks on an empty strategy, and again with memory reserved and partly free.
fn requests(stage: &mut Stage, sizes: &[u64]) -> Result<(), Unplayable> {
    for _ in 0..2 {
        for &bytes in sizes {
            stage.wrongly_request(bytes, StreamId::DEFAULT);
        }
        let [_, block, _] = three(stage)?;
        stage.free(block)?;
    }
    Ok(())
}
