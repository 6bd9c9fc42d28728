//! All scenarios of misuse. A new one is an entry in [`MISUSES`], with a function if its steps are
//! not among [`MisuseStep`].

use self::MisuseStep::{BadFree, BadUse, Close, Forget, Free, Reuse, Trim};
use super::{
    AccessPath, Misuse,
    session::{MisuseSession, NO_STREAM, ScenarioError},
};
use crate::{
    base::{Address, KIB, MIB, Nanos, StreamId, ThreadId},
    strategy::{Block, Caller, Control, Freed},
};

/// Every misuse, in the order of tables.
pub static MISUSES: &[Misuse] = &[
    of_block("double-free", "a block is freed twice", &[Free, BadFree(HOME)]),
    of_block("double-free-reused", "a block is freed again after its memory was reused", &[Free, Reuse, BadFree(HOME)]),
    of_block_by("double-free-waiting", "a block is freed again while its first free waits", double_free_waiting),
    of_block_by("foreign-pointer", "memory of another owner is freed and used", foreign_pointer),
    of_block_by("interior-pointer", "an address inside a block is freed and used", interior_pointer),
    of_block_by("null-pointer", "the null address is freed and used", null_pointer),
    of_call("forged-handle", "handles with a wrong slot, generation or address", forged_handle),
    of_call("wrong-size", "a block is freed with a wrong size", wrong_size),
    of_block("use-after-free", "a freed block is used on a stream", &[Free, BadUse(ELSEWHERE)]),
    of_block("use-after-reuse", "a freed block is used after its memory was reused", &[Free, Reuse, BadUse(ELSEWHERE)]),
    of_block("free-after-trim", "a block is freed again after a trim", &[Free, Trim, BadFree(HOME)]),
    of_block("use-after-trim", "a block is used after a trim", &[Free, Trim, BadUse(ELSEWHERE)]),
    of_block("free-after-close", "a block outlives its strategy and is freed", &[Close, BadFree(HOME)]),
    of_block("use-after-close", "a block outlives its strategy and is used", &[Close, BadUse(ELSEWHERE)]),
    of_block_by("free-on-other-stream", "a free is ordered on a stream other than the block's", free_on_other_stream),
    of_block("free-on-unknown-stream", "a free is ordered on a stream that does not exist", &[BadFree(NO_STREAM)]),
    of_block(
        "use-on-unknown-stream",
        "a block is used on a stream that does not exist",
        &[BadUse(NO_STREAM), BadFree(HOME), Forget],
    ),
    of_call(
        "request-on-unknown-stream",
        "memory is requested on a stream that does not exist",
        request_on_unknown_stream,
    ),
    of_block_by("free-from-other-thread", "a thread frees a block that another allocated", free_from_other_thread),
    of_call("zero-bytes", "0 bytes are requested", zero_bytes),
    of_call("more-than-device", "more is requested than the device has", more_than_device),
    of_call("half-of-all-addresses", "about 2^63 bytes are requested", half_of_all_addresses),
    of_call("size-overflow", "sizes are requested that overflow when rounded up", size_overflow),
    of_call("unknown-pool", "private pools are ended and released without having begun", unknown_pool),
    of_call("nonsense-settings", "invalid settings and memory fractions", nonsense_settings),
];

/// Both ways to name a block.
const BOTH: &[AccessPath] = &[AccessPath::Handle, AccessPath::Address];

/// Steps with a block that is named by its handle and by its address.
const fn of_block(name: &'static str, summary: &'static str, steps: &'static [MisuseStep]) -> Misuse {
    Misuse { name, summary, access: BOTH, scenario: Scenario::Steps(steps) }
}

/// Any other misuse of a block that is named by its handle and by its address.
const fn of_block_by(name: &'static str, summary: &'static str, play: ScenarioFunction) -> Misuse {
    Misuse { name, summary, access: BOTH, scenario: Scenario::Function(play) }
}

/// Misuse that names no block, or only by its handle.
const fn of_call(name: &'static str, summary: &'static str, play: ScenarioFunction) -> Misuse {
    Misuse { name, summary, access: &[AccessPath::Handle], scenario: Scenario::Function(play) }
}

const HOME: StreamId = StreamId::DEFAULT;
const ELSEWHERE: StreamId = StreamId(1);
/// A size that every strategy serves.
const SMALL: u64 = 4 * KIB;
/// Longer than all driver calls of a scenario.
const LONG: Nanos = Nanos(20_000_000);

/// A scenario in code.
type ScenarioFunction = fn(&mut MisuseSession) -> Result<(), ScenarioError>;

/// What is done to a strategy.
pub(super) enum Scenario {
    /// Steps with the middle one of three neighbouring blocks, so that they can damage others.
    Steps(&'static [MisuseStep]),
    /// Anything else.
    Function(ScenarioFunction),
}

/// One step with a block.
pub(super) enum MisuseStep {
    /// It is freed.
    Free,
    /// Another block is requested, which most strategies put in the same place.
    Reuse,
    /// Its neighbours are freed, and its memory is returned to the device.
    Trim,
    /// The strategy is closed.
    Close,
    /// An invalid free on this stream.
    BadFree(StreamId),
    /// An invalid use on this stream.
    BadUse(StreamId),
    /// It stays live until the strategy is closed: an invalid use may be accepted and only the free
    /// fail.
    Forget,
}

impl Scenario {
    pub(super) fn play(&self, session: &mut MisuseSession) -> Result<(), ScenarioError> {
        match self {
            Scenario::Steps(steps) => {
                let blocks = three(session)?;
                steps.iter().try_for_each(|step| step.take(session, blocks))
            }
            Scenario::Function(play) => play(session),
        }
    }
}

impl MisuseStep {
    fn take(&self, session: &mut MisuseSession, [before, block, behind]: [Block; 3]) -> Result<(), ScenarioError> {
        match *self {
            Free => drop(session.free(block)?),
            Reuse => reuse(session, block)?,
            Trim => {
                session.free(before)?;
                session.free(behind)?;
                session.trim()?;
            }
            Close => session.close()?,
            BadFree(stream) => session.wrongly_free(block, Caller { stream, thread: ThreadId(0) }),
            BadUse(stream) => session.wrongly_use(&block, stream),
            Forget => session.forget(&block),
        }
        Ok(())
    }
}

fn reuse(session: &mut MisuseSession, stale: Block) -> Result<(), ScenarioError> {
    let fresh = session.alloc(SMALL, HOME)?;
    if session.knows_only_addresses() && stale.address == fresh.address {
        return Err(ScenarioError::NotApplicable(
            "the address is that of the next block, so the misuse cannot be detected",
        ));
    }
    if stale == fresh {
        session.findings.push("a block has the same handle as the one before it".to_owned());
    }
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

fn free_on_other_stream(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let [_, block, _] = three(session)?;
    session.wrongly_free(block, Caller { stream: ELSEWHERE, thread: ThreadId(0) });
    let block = session.alloc(SMALL, ELSEWHERE)?;
    session.wrongly_free(block, Caller::default());
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

fn more_than_device(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let total = session.device.props().total_bytes;
    requests(session, &[total + 1, total + 2 * MIB, 3 * total, 1 << 48, 1 << 60])
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

/// Three neighbouring blocks, so that misuse of the one in the middle can damage others.
fn three(session: &mut MisuseSession) -> Result<[Block; 3], ScenarioError> {
    Ok([session.alloc(SMALL, HOME)?, session.alloc(SMALL, HOME)?, session.alloc(SMALL, HOME)?])
}

/// Rounding up to 256, 512, a page or the next power of two overflows to a small size, and so does
/// the sum of reserved and requested bytes.
fn size_overflow(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    let edges = [0, 1, 254, 255, 256, 511, 512, MIB, 2 * MIB - 1, 2 * MIB, 20 * MIB - 1, 32 * MIB, 1 << 30];
    requests(session, &edges.map(|below| u64::MAX - below))
}

fn zero_bytes(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    requests(session, &[0])
}

fn half_of_all_addresses(session: &mut MisuseSession) -> Result<(), ScenarioError> {
    const HALF: u64 = 1 << 63;
    requests(session, &[HALF - 2 * MIB, HALF - 1, HALF, HALF + 1, HALF + 2 * MIB])
}
