//! `stress misuse`: what does a strategy do with a pointer that is freed twice, or a request for
//! 2^64 - 1 bytes?
//!
//! Every [`Misuse`] is a small scenario, played on a fresh strategy under
//! [`CheckedStrategy`](crate::strategy::wrap::CheckedStrategy). Then an ordinary program runs,
//! everything is freed, and both are repeated before the [`MisuseConsequence`] is decided. A
//! strategy may refuse misuse or ignore it, but must not be damaged.

mod scenarios;
mod session;

pub use scenarios::MISUSES;

use std::{fmt, sync::LazyLock, time::Duration};

use serde::{Deserialize, Serialize};

use self::{
    scenarios::Scenario,
    session::{MisuseSession, ScenarioError},
};
use super::{
    StressBudget, StressFailure, StressKind, StressTarget, StressVerdict, TargetError,
    checked_run::{RunAborted, TIME_LIMIT, run_within},
    target::OpenedTarget,
};
use crate::{
    base::{KIB, MIB, Nanos, StreamId, TagId, ThreadId, Work},
    replay::{OnOutOfMemory, ReplayOptions, replay},
    strategy::{Caller, Context, Silent},
    trace::{Trace, TraceBuilder},
};

/// The name of this kind of stress.
const KIND: &str = "misuse";

/// Its part in `stress all`.
pub(super) const STRESS: StressKind = StressKind {
    name: KIND,
    applies: |_| true,
    judge: |target, _, budget| misuses(target, &MISUSES.iter().collect::<Vec<_>>(), budget).verdict,
};

/// How a caller names a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessPath {
    /// By its handle.
    #[default]
    Handle,
    /// By its address alone, as callers of PyTorch's pluggable allocators do. This needs a table of
    /// live addresses ([`AddressedStrategy`](crate::strategy::wrap::AddressedStrategy)).
    Address,
}

impl fmt::Display for AccessPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AccessPath::Handle => "handle",
            AccessPath::Address => "address",
        })
    }
}

/// Something that callers must not do.
pub struct Misuse {
    /// The name that users type.
    pub name: &'static str,
    /// What is done, in one line.
    pub summary: &'static str,
    /// The ways in which the block is named; only by handle if no block is named.
    pub access: &'static [AccessPath],
    scenario: Scenario,
}

/// The misuse of a free with a wrong size.
const WRONG_SIZE: &str = "wrong-size";
/// Misuses that the functions of a plugin can see. All others name a block that is not live, or a command that a plugin
/// does not have.
const REACH_PLUGINS: [&str; 5] =
    [WRONG_SIZE, "zero-bytes", "size-overflow", "half-of-all-addresses", "more-than-device"];
/// Why other misuses are not tried on plugins.
const NOT_SEEN: &str = "refused before the plugin sees it, as PyTorch does";

impl Misuse {
    /// Whether a plugin sees it.
    fn reaches_plugins(&self, access: AccessPath) -> bool {
        REACH_PLUGINS.contains(&self.name) && access == AccessPath::Handle
    }
}

/// The result of a misuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MisuseConsequence {
    /// It was refused, without damage.
    #[serde(rename = "detected")]
    Detected,
    /// It was accepted, without damage.
    #[default]
    #[serde(rename = "harmless")]
    Harmless,
    /// The strategy, or memory of another owner, was damaged.
    #[serde(rename = "corrupts")]
    Corrupts,
    /// It cannot be tried.
    #[serde(rename = "not applicable")]
    NotApplicable,
}

/// A consequence, and the message or reason; empty if there is none.
type JudgedMisuse = (MisuseConsequence, String);

/// The result of one misuse as a row of a table or file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the columns are the parts of a misuse and its consequence")]
pub struct MisuseRow {
    pub strategy: String,
    pub misuse: String,
    /// How the block was named.
    pub access_path: AccessPath,
    pub consequence: MisuseConsequence,
    pub detail: String,
}

/// The results of all misuses of one strategy.
#[derive(Clone, Debug, Default)]
pub struct MisuseReport {
    /// The verdict on the strategy.
    pub verdict: StressVerdict,
    /// One row per misuse and way of naming the block.
    pub rows: Vec<MisuseRow>,
}

/// Misuses the target in all these ways until the time is up.
pub fn misuses(target: &StressTarget, misuses: &[&'static Misuse], budget: &StressBudget<'_>) -> MisuseReport {
    let strategy = target.strategy.to_string();
    let mut report = MisuseReport { verdict: StressVerdict::new(KIND, &strategy), rows: Vec::new() };
    for (entry, access) in misuses.iter().flat_map(|entry| entry.access.iter().map(move |&access| (*entry, access))) {
        if budget.search_is_over() {
            break;
        }
        let judged = match (target.is_plugin(), entry.reaches_plugins(access)) {
            (true, false) => Ok((MisuseConsequence::NotApplicable, NOT_SEEN.to_owned())),
            _ => misuse(target, entry, access),
        };
        let (consequence, detail) = match judged {
            Ok(judged) => judged,
            Err(error) => {
                report.verdict.skipped = Some(error.to_string());
                break;
            }
        };
        report.verdict.row.trials += 1;
        // A plugin may trust the size that it is given: PyTorch passes the one of the request.
        let may_trust = target.is_plugin() && entry.name == WRONG_SIZE;
        if consequence == MisuseConsequence::Corrupts && !may_trust {
            report.verdict.failures.push(StressFailure {
                conditions: vec![format!("--misuse {}", entry.name)],
                ..target.failure(KIND, format!("{} by {access}: {detail}", entry.name))
            });
        }
        report.rows.push(MisuseRow {
            strategy: strategy.clone(),
            misuse: entry.name.to_owned(),
            access_path: access,
            consequence,
            detail,
        });
    }
    report
}

/// Misuses a fresh strategy of the target.
fn misuse(target: &StressTarget, misuse: &'static Misuse, access: AccessPath) -> Result<JudgedMisuse, TargetError> {
    let target = target.clone();
    judge(misuse, access, TIME_LIMIT, move || target.open())
}

/// The same for any strategy and device. They are created in the thread that uses them, as GPU
/// contexts require.
fn judge(
    misuse: &'static Misuse,
    access: AccessPath,
    limit: Duration,
    open: impl FnOnce() -> Result<OpenedTarget, TargetError> + Send + 'static,
) -> Result<JudgedMisuse, TargetError> {
    match run_within(limit, move || open().map(|opened| play(misuse, access, opened))) {
        Ok(Err(missing @ TargetError::Missing(_))) => Ok((MisuseConsequence::NotApplicable, missing.to_string())),
        Ok(judged) => judged,
        Err(aborted @ RunAborted::NotStarted(_)) => Ok((MisuseConsequence::NotApplicable, aborted.to_string())),
        Err(aborted) => Ok((MisuseConsequence::Corrupts, aborted.to_string())),
    }
}

fn play(misuse: &Misuse, access: AccessPath, (strategy, device): OpenedTarget) -> JudgedMisuse {
    let mut session = match MisuseSession::new(strategy, device, access) {
        Ok(session) => session,
        Err(error) => return (MisuseConsequence::NotApplicable, error.to_string()),
    };
    let played = misuse.scenario.play(&mut session);
    session.collect_violations();
    check_afterwards(&mut session);
    match (session.findings.split_first(), played) {
        (None, Err(ScenarioError::NotApplicable(reason))) => (MisuseConsequence::NotApplicable, reason.to_owned()),
        (None, Err(error)) => (MisuseConsequence::Corrupts, format!("a valid call was refused: {error}")),
        (Some((first, [])), _) => (MisuseConsequence::Corrupts, first.clone()),
        (Some((first, more)), _) => (MisuseConsequence::Corrupts, format!("{first} (and {} more)", more.len())),
        (None, Ok(())) => match session.refusals.into_iter().next() {
            Some(message) => (MisuseConsequence::Detected, message),
            None => (MisuseConsequence::Harmless, String::new()),
        },
    }
}

/// Runs an ordinary program and frees everything, twice; what goes wrong is added to the findings.
fn check_afterwards(session: &mut MisuseSession) {
    for _ in 0..2 {
        let (strategy, device) = session.parts();
        let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..ReplayOptions::default() };
        if let Err(error) = replay(&*PROGRAM, strategy, device, &options, &mut Silent) {
            session.findings.push(format!("an ordinary program fails afterwards: {error}"));
        }
        session.strategy.inner.audit();
        free_everything(session);
        session.collect_violations();
    }
}

fn free_everything(session: &mut MisuseSession) {
    for (block, stream) in std::mem::take(&mut session.live) {
        let (strategy, device) = session.parts();
        let mut cx = Context { device, sink: &mut Silent };
        if let Err(error) = strategy.free(&mut cx, block, Caller { stream, thread: ThreadId(0) }) {
            session.findings.push(format!("a live block cannot be freed afterwards: {error}"));
        }
    }
    let _ = session.device.synchronize();
    if let Err(error) = session.trim() {
        session.findings.push(format!("a trim fails afterwards: {error}"));
    }
    session.strategy.inner.audit();
    if let Err(error) = session.close() {
        session.findings.push(format!("a close fails afterwards: {error}"));
    }
    if let Some(foreign) = session.foreign.take()
        && let Err(error) = session.device.free(foreign)
    {
        session.findings.push(format!("memory of another owner is gone: {error}"));
    }
    let held = session.device.held_bytes();
    if held > 0 {
        session.findings.push(format!("after a close the device still holds {held} bytes"));
    }
}

/// Small and large blocks on three streams, some of them used on another stream while that is busy.
static PROGRAM: LazyLock<Trace> = LazyLock::new(|| {
    let mut trace = TraceBuilder::new();
    let streams: Vec<StreamId> =
        [Some(StreamId::DEFAULT), trace.new_stream().ok(), trace.new_stream().ok()].into_iter().flatten().collect();
    for round in 0..3u64 {
        let mut blocks = Vec::new();
        for (number, &stream) in (0u64..).zip(&streams) {
            for bytes in [700, 4 * KIB, MIB, 3 * MIB + round, 12 * MIB] {
                blocks.push(trace.alloc(bytes + number, stream, TagId(0)));
            }
            trace.work(Work::Spin { nanos: Nanos(50_000) }, stream, &[]);
        }
        for (number, &block) in blocks.iter().enumerate() {
            if number % 4 == 1 {
                trace.use_on(block, streams[number % streams.len()]);
            }
        }
        let (even, odd): (Vec<_>, Vec<_>) = blocks.iter().partition(|&&block| block % 2 == 0);
        even.into_iter().chain(odd).for_each(|block| trace.free(block));
        trace.alloc(2 * MIB, streams[0], TagId(0));
        match round {
            0 => trace.empty_cache(),
            1 => trace.device_sync(),
            _ => {}
        }
    }
    trace.finish("after misuse")
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::STRATEGIES;

    fn target(strategy: &str) -> StressTarget {
        StressTarget::simulated(strategy, 256 << 20)
    }

    fn all() -> impl Iterator<Item = (&'static Misuse, AccessPath)> {
        MISUSES.iter().flat_map(|misuse| misuse.access.iter().map(move |&access| (misuse, access)))
    }

    #[test]
    fn no_misuse_damages_a_strategy() {
        let mut damage = Vec::new();
        for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
            let target = target(&spec.to_string());
            for (entry, access) in all() {
                let (consequence, detail) = misuse(&target, entry, access).unwrap();
                if consequence == MisuseConsequence::Corrupts {
                    damage.push(format!("{spec}: {} by {access}: {detail}", entry.name));
                }
            }
        }
        assert!(damage.is_empty(), "{}", damage.join("\n"));
    }

    #[test]
    fn damage_is_detected() {
        let consequence = |strategy: &str, name: &str| {
            let entry = MISUSES.iter().find(|entry| entry.name == name).unwrap();
            misuse(&target(strategy), entry, AccessPath::Handle).unwrap().0
        };
        for (strategy, name) in [
            ("flawed:TrustsHandles", "double-free-reused"),
            ("flawed:TrustsHandles", "forged-handle"),
            ("flawed:WrapsAround", "size-overflow"),
            ("flawed:Panics", "more-than-device"),
            ("flawed:LeakOnClose", "double-free"),
        ] {
            assert_eq!(consequence(strategy, name), MisuseConsequence::Corrupts, "{strategy}: {name}");
        }
        assert_eq!(consequence("flawed:ServesNothing", "zero-bytes"), MisuseConsequence::Harmless);
        assert_eq!(consequence("flawed:None", "wrong-size"), MisuseConsequence::Harmless);
        assert_eq!(consequence("flawed:None", "double-free"), MisuseConsequence::Detected);
        assert_eq!(consequence("flawed:None", "double-free-waiting"), MisuseConsequence::NotApplicable);
    }

    #[test]
    fn flawless_allocator_is_not_damaged() {
        let chosen: Vec<&Misuse> = MISUSES.iter().collect();
        let report = misuses(&target("flawed:None"), &chosen, &StressBudget::unlimited(&|| false));
        assert_eq!(report.verdict.word(), "passed", "{:?}", report.verdict.failures);
        assert_eq!(report.rows.len(), all().count());
        assert_eq!(misuses(&target("flawed:None"), &chosen, &StressBudget::unlimited(&|| true)).rows, []);
    }

    #[test]
    fn hanging_scenario_is_abandoned() {
        let slow = || {
            std::thread::sleep(Duration::from_secs(2));
            target("direct").open()
        };
        let (consequence, detail) = judge(&MISUSES[0], AccessPath::Handle, Duration::from_millis(30), slow).unwrap();
        assert_eq!(consequence, MisuseConsequence::Corrupts);
        assert!(detail.contains("did not return"), "{detail}");
    }

    #[test]
    fn misuses_of_plugins_exist() {
        assert!(REACH_PLUGINS.iter().all(|name| MISUSES.iter().any(|misuse| misuse.name == *name)));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = MISUSES.iter().map(|misuse| misuse.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MISUSES.len());
    }
}
