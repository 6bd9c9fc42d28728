//! All scenarios of misuse. A new one is a function here and an entry in [`MISUSES`].

use super::{
    Misuse,
    session::{MisuseSession, NO_STREAM, ScenarioError},
};
use crate::{
    base::{Address, KIB, MIB, Nanos, StreamId, ThreadId},
    strategy::{Block, Caller, Control, Freed},
};

/// Every misuse, in the order of tables.
pub static MISUSES: &[Misuse] = &[
    Misuse::by_handle_and_address("double-free", "a block is freed twice", double_free),
    Misuse::by_handle_and_address(
        "double-free-reused",
        "a block is freed again after its memory was reused",
        double_free_reused,
    ),
    Misuse::by_handle_and_address(
        "double-free-waiting",
        "a block is freed again while its first free waits for a stream",
        double_free_waiting,
    ),
    Misuse::by_handle_and_address("foreign-pointer", "memory of another owner is freed and used", foreign_pointer),
    Misuse::by_handle_and_address("interior-pointer", "an address inside a block is freed and used", interior_pointer),
    Misuse::by_handle_and_address("null-pointer", "the null address is freed and used", null_pointer),
    Misuse::by_handle("forged-handle", "handles with a wrong slot, generation or address", forged_handle),
    Misuse::by_handle("wrong-size", "a block is freed with a wrong size", wrong_size),
    Misuse::by_handle_and_address("use-after-free", "a freed block is used on a stream", use_after_free),
    Misuse::by_handle_and_address(
        "use-after-reuse",
        "a freed block is used after its memory was reused",
        use_after_reuse,
    ),
    Misuse::by_handle_and_address(
        "free-after-trim",
        "a block is freed again after its memory was returned to the device",
        free_after_trim,
    ),
    Misuse::by_handle_and_address(
        "use-after-trim",
        "a block is used after its memory was returned to the device",
        use_after_trim,
    ),
    Misuse::by_handle_and_address("free-after-close", "a block outlives its strategy and is freed", free_after_close),
    Misuse::by_handle_and_address("use-after-close", "a block outlives its strategy and is used", use_after_close),
    Misuse::by_handle_and_address(
        "free-on-other-stream",
        "a free is ordered on a stream other than the block's",
        free_on_other_stream,
    ),
    Misuse::by_handle_and_address(
        "free-on-unknown-stream",
        "a free is ordered on a stream that does not exist",
        free_on_unknown_stream,
    ),
    Misuse::by_handle_and_address(
        "use-on-unknown-stream",
        "a block is used on a stream that does not exist, and freed",
        use_on_unknown_stream,
    ),
    Misuse::by_handle(
        "request-on-unknown-stream",
        "memory is requested on a stream that does not exist, and freed there",
        request_on_unknown_stream,
    ),
    Misuse::by_handle_and_address(
        "free-from-other-thread",
        "a thread frees a block that another allocated",
        free_from_other_thread,
    ),
    Misuse::by_handle("zero-bytes", "0 bytes are requested", zero_bytes),
    Misuse::by_handle("more-than-device", "more is requested than the device has", more_than_device),
    Misuse::by_handle("half-of-all-addresses", "about 2^63 bytes are requested", half_of_all_addresses),
    Misuse::by_handle("size-overflow", "sizes are requested that overflow when rounded up", size_overflow),
    Misuse::by_handle("unknown-pool", "private pools are ended and released without having begun", unknown_pool),
    Misuse::by_handle("nonsense-settings", "invalid settings and memory fractions", nonsense_settings),
];

const HOME: StreamId = StreamId::DEFAULT;
const ELSEWHERE: StreamId = StreamId(1);
/// A size that every strategy serves.
const SMALL: u64 = 4 * KIB;
/// Longer than all driver calls of a scenario.
const LONG: Nanos = Nanos(20_000_000);

fn double_free(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.free(block)?;
    session.wrongly_free(block, Caller::default());
    Ok(())
}

fn double_free_reused(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let (stale, _) = reused(session)?;
    session.wrongly_free(stale, Caller::default());
    Ok(())
}

fn double_free_waiting(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    if !session.keep_busy(ELSEWHERE, LONG)? {
        return Err(ScenarioError::NotApplicable("the device cannot keep a stream busy"));
    }
    session.used_on(&block, ELSEWHERE)?;
    match session.free(block)? {
        Freed::Later => session.wrongly_free(block, Caller::default()),
        Freed::Now => return Err(ScenarioError::NotApplicable("its frees do not wait")),
    }
    Ok(())
}

fn foreign_pointer(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    // Allocated first, because some strategies take all memory at once.
    let address = session.device.alloc(2 * MIB)?;
    session.foreign = Some(address);
    let [block, _, _] = three(session)?;
    session.wrongly_free(Block { address, ..block }, Caller::default());
    session.wrongly_use(&Block { address, ..block }, ELSEWHERE);
    Ok(())
}

fn interior_pointer(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    for offset in [1, 256, block.size / 2, block.size - 1] {
        let inside = Block { address: block.address.offset(offset), ..block };
        session.wrongly_use(&inside, ELSEWHERE);
        session.wrongly_free(inside, Caller::default());
    }
    Ok(())
}

fn null_pointer(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [block, freed, _] = three(session)?;
    // A vacant slot is often marked with a null address.
    session.free(freed)?;
    for block in [block, freed, Block { generation: freed.generation.wrapping_add(1), ..freed }] {
        let nowhere = Block { address: Address::NULL, ..block };
        session.wrongly_use(&nowhere, ELSEWHERE);
        session.wrongly_free(nowhere, Caller::default());
    }
    Ok(())
}

fn forged_handle(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [block, other, _] = three(session)?;
    let forged = [
        Block { generation: block.generation.wrapping_add(1), ..block },
        Block { generation: u32::MAX, ..block },
        Block { slot: u32::MAX, ..block },
        Block { slot: u32::MAX - 1, ..block },
        Block { address: Address(u64::MAX - 255), ..block },
        Block { slot: other.slot, generation: other.generation, ..block },
    ];
    for forged in forged {
        session.wrongly_use(&forged, ELSEWHERE);
        session.wrongly_free(forged, Caller::default());
    }
    Ok(())
}

fn wrong_size(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    for wrong in [0, 1, SMALL / 2, 64 * MIB, u64::MAX] {
        let [_, block, _] = three(session)?;
        session.wrongly_use(&Block { size: wrong, ..block }, ELSEWHERE);
        session.wrongly_free(Block { size: wrong, ..block }, Caller::default());
    }
    Ok(())
}

fn use_after_free(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.free(block)?;
    session.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

fn use_after_reuse(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let (stale, _) = reused(session)?;
    session.wrongly_use(&stale, ELSEWHERE);
    Ok(())
}

fn free_after_trim(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let block = trimmed(session)?;
    session.wrongly_free(block, Caller::default());
    Ok(())
}

fn use_after_trim(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let block = trimmed(session)?;
    session.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

fn free_after_close(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.close()?;
    session.wrongly_free(block, Caller::default());
    Ok(())
}

fn use_after_close(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.close()?;
    session.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

/// Three neighbouring blocks, so that misuse of the one in the middle can damage others.
fn three(session: &mut MisuseSession) -> Result<[Block; 3], ScenarioError> {
    Ok([session.alloc(SMALL, HOME)?, session.alloc(SMALL, HOME)?, session.alloc(SMALL, HOME)?])
}

/// A stale handle, and the next block, which most strategies put in the same place.
fn reused(session: &mut MisuseSession) -> Result<(Block, Block), ScenarioError> {
    let [_, stale, _] = three(session)?;
    session.free(stale)?;
    let fresh = session.alloc(SMALL, HOME)?;
    if session.knows_only_addresses() && stale.address == fresh.address {
        return Err(ScenarioError::NotApplicable(
            "the address is that of the next block, so the misuse cannot be detected",
        ));
    }
    if stale == fresh {
        session.findings.push("a block has the same handle as the one before it".to_owned());
    }
    Ok((stale, fresh))
}

/// A freed block whose memory was returned to the device.
fn trimmed(session: &mut MisuseSession) -> Result<Block, ScenarioError> {
    let block = session.alloc(SMALL, HOME)?;
    session.free(block)?;
    session.trim()?;
    Ok(block)
}

fn free_on_other_stream(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.wrongly_free(block, Caller { stream: ELSEWHERE, thread: ThreadId(0) });
    let block = session.alloc(SMALL, ELSEWHERE)?;
    session.wrongly_free(block, Caller::default());
    Ok(())
}

fn free_on_unknown_stream(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.wrongly_free(block, Caller { stream: NO_STREAM, thread: ThreadId(0) });
    Ok(())
}

/// The use may be accepted and only the free fail. The block then stays live until the strategy is
/// closed.
fn use_on_unknown_stream(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.wrongly_use(&block, NO_STREAM);
    session.wrongly_free(block, Caller::default());
    session.live.retain(|(live, _)| *live != block);
    Ok(())
}

/// As for a use, only a close may free such a block.
fn request_on_unknown_stream(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    three(session)?;
    for bytes in [SMALL, 30 * MIB] {
        session.wrongly_request(bytes, NO_STREAM);
    }
    let served: Vec<_> = session.live.extract_if(.., |(_, stream)| *stream == NO_STREAM).collect();
    for (block, stream) in served {
        session.wrongly_free(block, Caller { stream, thread: ThreadId(0) });
    }
    Ok(())
}

fn free_from_other_thread(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    for thread in [1, 9, u16::MAX] {
        let [_, block, _] = three(session)?;
        session.wrongly_free(block, Caller { stream: StreamId::DEFAULT, thread: ThreadId(thread) });
    }
    Ok(())
}

fn zero_bytes(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    session.wrongly_request(0, StreamId::DEFAULT);
    three(session)?;
    session.wrongly_request(0, StreamId::DEFAULT);
    Ok(())
}

fn more_than_device(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let total = session.device.props().total_bytes;
    requests(session, &[total + 1, total + 2 * MIB, 3 * total, 1 << 48, 1 << 60])
}

fn half_of_all_addresses(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    const HALF: u64 = 1 << 63;
    requests(session, &[HALF - 2 * MIB, HALF - 1, HALF, HALF + 1, HALF + 2 * MIB])
}

/// Rounding up to 256, 512, a page or the next power of two overflows to a small size, and so does
/// the sum of reserved and requested bytes.
fn size_overflow(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let edges = [0, 1, 254, 255, 256, 511, 512, MIB, 2 * MIB - 1, 2 * MIB, 20 * MIB - 1, 32 * MIB, 1 << 30];
    requests(session, &edges.map(|below| u64::MAX - below))
}

fn unknown_pool(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    three(session)?;
    let pool = (77, 0);
    session.wrongly_control(&Control::PoolEnd { pool });
    session.wrongly_control(&Control::PoolRelease { pool });
    session.wrongly_control(&Control::PoolBegin { pool, stream: Some(NO_STREAM) });
    session.wrongly_control(&Control::PoolBegin { pool, stream: Some(NO_STREAM) });
    session.wrongly_control(&Control::PoolEnd { pool });
    session.wrongly_control(&Control::PoolEnd { pool });
    Ok(())
}

fn nonsense_settings(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    three(session)?;
    for settings in ["", ":", "no_such_setting:1", "max_split_size_mb:-1", "max_split_size_mb:99999999999999999999"] {
        session.wrongly_control(&Control::Configure(settings));
    }
    for fraction in [f64::NAN, f64::INFINITY, -1.0, 2.0] {
        session.wrongly_control(&Control::Fraction(fraction));
    }
    Ok(())
}

/// Requests these sizes on an empty strategy, and again with memory reserved and partly free.
fn requests(session: &mut MisuseSession, sizes: &[u64]) -> Result<(), ScenarioError> {
    for _ in 0..2 {
        for &bytes in sizes {
            session.wrongly_request(bytes, StreamId::DEFAULT);
        }
        let [_, block, _] = three(session)?;
        session.free(block)?;
    }
    Ok(())
}
