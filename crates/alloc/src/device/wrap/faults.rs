//! Driver calls that fail on purpose: one fault ([`FaultSpec`]), several ([`FaultPlan`]), and the
//! wrapper that injects them ([`FaultyDevice`]). Conformance, stress and verification use this one
//! mechanism.

use std::{
    fmt,
    num::NonZeroU64,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rand_chacha::{ChaCha8Rng, rand_core::Rng};

use super::{
    driver_call::{DriverAnswer, DriverCall, DriverReply},
    intercept::{InterceptedDevice, Interceptor},
};
use crate::device::{CallKind, CallLedger, Device, DeviceError};
use oomph_base::{Address, Nanos, did_you_mean, nearest};

/// How often a strategy may query events within one of its own calls before it counts as spinning.
const MOST_QUERIES: u64 = 10_000;

/// A device whose calls fail as a [`FaultPlan`] says. A call that fails does not reach the device
/// below.
///
/// ```
/// use oomph_alloc::device::{CallKind, Device, sim::{SimConfig, SimDevice}, wrap::{CallFailure, FaultPlan, FaultyDevice}};
/// let sim = SimDevice::new(SimConfig::default())?;
/// let plan = FaultPlan::none().fail_nth(Some(CallKind::MemAlloc), 2, CallFailure::OutOfMemory);
/// let mut device = FaultyDevice::with(plan, Box::new(sim));
/// device.alloc(512)?;
/// assert!(device.alloc(512).unwrap_err().is_out_of_memory());
/// device.alloc(512)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type FaultyDevice<P> = InterceptedDevice<P, FaultInjector>;

impl<P> FaultyDevice<P> {
    /// Makes calls to `device` fail as `plan` says.
    pub fn with(plan: FaultPlan, device: P) -> Self {
        InterceptedDevice::new(device, FaultInjector::new(plan))
    }
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The device reports that memory has run out.
    OutOfMemory,
    /// The driver returns this error.
    Driver(&'static str),
}

impl CallFailure {
    /// The error that says nothing about its cause.
    pub const UNKNOWN: CallFailure = CallFailure::Driver("CUDA_ERROR_UNKNOWN");
    const TIMEOUT: CallFailure = CallFailure::Driver("CUDA_ERROR_TIMEOUT");
}

/// One fault, as users write it. Driver calls and strategy calls (alloc, free, trim ...) are
/// counted from 1.
///
/// ```
/// use oomph_alloc::device::wrap::FaultSpec;
/// for text in ["cuMemCreate:3", "cuMemCreate:3:oom", "cuMemMap:3+4", "any:17+6", "taken:12+20", "stuck:5"] {
///     assert_eq!(text.parse::<FaultSpec>()?.to_string(), text);
/// }
/// # Ok::<(), oomph_alloc::device::wrap::FaultSpecError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSpec {
    /// Driver calls fail: `KIND:N`, `KIND:N+COUNT`, `any:N+COUNT`, each with `:oom` for "out of
    /// memory".
    Calls {
        /// The kind of call that fails; `None` for any kind.
        kind: Option<CallKind>,
        /// The first call that fails.
        first: u64,
        /// How many calls fail.
        count: NonZeroU64,
        /// How they fail.
        failure: CallFailure,
    },
    /// Another process takes all free memory for a number of strategy calls: `taken:N+COUNT`.
    MemoryTaken {
        /// The strategy call before which it takes the memory.
        first: u64,
        /// The number of strategy calls after which it gives it back.
        count: NonZeroU64,
    },
    /// From a strategy call on no event completes, and waiting times out: `stuck:N`.
    Stuck {
        /// The first strategy call concerned.
        first: u64,
    },
}

/// Why a text is not a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultSpecError {
    /// The name is unknown.
    #[error("unknown fault '{name}', write a driver call, any, taken or stuck{}", did_you_mean(suggestion.as_deref()))]
    Unknown {
        /// What was typed.
        name: String,
        /// The nearest valid name.
        suggestion: Option<String>,
    },
    /// The text has another form.
    #[error("fault '{0}': write NAME:N, NAME:N+COUNT or NAME:N:oom, counted from 1, such as cuMemCreate:3")]
    Syntax(String),
}

impl FaultSpec {
    /// The `n`-th call of a kind fails.
    #[must_use]
    pub const fn once(kind: CallKind, n: u64, failure: CallFailure) -> FaultSpec {
        FaultSpec::Calls { kind: Some(kind), first: n, count: NonZeroU64::MIN, failure }
    }

    /// The same fault, starting at another call.
    #[must_use]
    pub const fn moved_to(self, first: u64) -> FaultSpec {
        match self {
            FaultSpec::Calls { kind, count, failure, .. } => FaultSpec::Calls { kind, first, count, failure },
            FaultSpec::MemoryTaken { count, .. } => FaultSpec::MemoryTaken { first, count },
            FaultSpec::Stuck { .. } => FaultSpec::Stuck { first },
        }
    }

    /// The call at which it starts.
    #[must_use]
    pub const fn first(self) -> u64 {
        match self {
            FaultSpec::Calls { first, .. } | FaultSpec::MemoryTaken { first, .. } | FaultSpec::Stuck { first } => first,
        }
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            FaultSpec::Calls { kind, first, count, failure } => {
                write!(f, "{}:{first}", kind.map_or("any", CallKind::name))?;
                if count.get() > 1 {
                    write!(f, "+{count}")?;
                }
                f.write_str(if failure == CallFailure::OutOfMemory { ":oom" } else { "" })
            }
            FaultSpec::MemoryTaken { first, count } => write!(f, "taken:{first}+{count}"),
            FaultSpec::Stuck { first } => write!(f, "stuck:{first}"),
        }
    }
}

impl FromStr for FaultSpec {
    type Err = FaultSpecError;

    fn from_str(text: &str) -> Result<FaultSpec, FaultSpecError> {
        let syntax = || FaultSpecError::Syntax(text.to_owned());
        let (name, rest) = text.split_once(':').ok_or_else(syntax)?;
        let (place, failure) = match rest.split_once(':') {
            None => (rest, CallFailure::UNKNOWN),
            Some((place, "oom")) => (place, CallFailure::OutOfMemory),
            Some(_) => return Err(syntax()),
        };
        let number = |text: &str| text.parse::<NonZeroU64>().map_err(|_| syntax());
        let (first, count) = match place.split_once('+') {
            None => (number(place)?.get(), NonZeroU64::MIN),
            Some((first, count)) => (number(first)?.get(), number(count)?),
        };
        let plain = failure == CallFailure::UNKNOWN;
        match name {
            "any" => Ok(FaultSpec::Calls { kind: None, first, count, failure }),
            "taken" if plain => Ok(FaultSpec::MemoryTaken { first, count }),
            "stuck" if plain && count == NonZeroU64::MIN => Ok(FaultSpec::Stuck { first }),
            "taken" | "stuck" => Err(syntax()),
            _ => match CallKind::named(name) {
                Some(kind) => Ok(FaultSpec::Calls { kind: Some(kind), first, count, failure }),
                None => {
                    let names = CallKind::ALL.iter().map(|kind| kind.name()).chain(["any", "taken", "stuck"]);
                    Err(FaultSpecError::Unknown { name: name.to_owned(), suggestion: nearest(name, names) })
                }
            },
        }
    }
}

/// Which calls fail, and how. The first rule that applies to a call decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    rules: Vec<FaultRule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FaultRule {
    Spec(FaultSpec),
    Every { kind: Option<CallKind>, n: u64, failure: CallFailure },
    OneIn { n: u64, random: Box<ChaCha8Rng> },
}

impl FaultPlan {
    /// Nothing fails; calls are still counted.
    #[must_use]
    pub fn none() -> FaultPlan {
        FaultPlan::default()
    }

    /// The `n`-th call of a kind, or of any kind, fails.
    #[must_use]
    pub fn fail_nth(self, kind: Option<CallKind>, n: u64, failure: CallFailure) -> FaultPlan {
        self.with(FaultSpec::Calls { kind, first: n, count: NonZeroU64::MIN, failure })
    }

    /// Every `n`-th call of a kind, or of any kind, fails. With 0, none does.
    #[must_use]
    pub fn fail_every(mut self, kind: Option<CallKind>, n: u64, failure: CallFailure) -> FaultPlan {
        self.rules.push(FaultRule::Every { kind, n, failure });
        self
    }

    /// One call in `n` fails at random: with "out of memory" if it requests memory, otherwise with
    /// an unknown error. With 0, none does.
    #[must_use]
    pub fn fail_one_in(mut self, n: u64, random: ChaCha8Rng) -> FaultPlan {
        self.rules.push(FaultRule::OneIn { n, random: Box::new(random) });
        self
    }

    /// Adds a fault.
    #[must_use]
    pub fn with(mut self, fault: FaultSpec) -> FaultPlan {
        self.rules.push(FaultRule::Spec(fault));
        self
    }
}

impl FaultRule {
    /// How a call fails that is number `of_kind` of its kind and number `of_all` of all.
    fn failure(&mut self, call: &DriverCall, of_kind: u64, of_all: u64) -> Option<CallFailure> {
        let number = |kind: Option<CallKind>| match kind {
            None => Some(of_all),
            Some(kind) => (kind == call.kind()).then_some(of_kind),
        };
        match self {
            FaultRule::Spec(FaultSpec::Calls { kind, first, count, failure }) => {
                let past = number(*kind)?.checked_sub(*first)?;
                (past < count.get()).then_some(*failure)
            }
            FaultRule::Spec(FaultSpec::MemoryTaken { .. } | FaultSpec::Stuck { .. }) => None,
            FaultRule::Every { kind, n, failure } => (*n > 0 && number(*kind)?.is_multiple_of(*n)).then_some(*failure),
            FaultRule::OneIn { n: 0, .. } => None,
            FaultRule::OneIn { n, random } => {
                // The high word of the product: a number below n, all equally likely, the same on
                // every machine.
                let drawn = (u128::from(random.next_u64()) * u128::from(*n)) >> 64;
                let failure = if call.requested_bytes() > 0 { CallFailure::OutOfMemory } else { CallFailure::UNKNOWN };
                (drawn == 0).then_some(failure)
            }
        }
    }
}

/// A [`FaultPlan`] at work, and what it has seen so far.
#[derive(Debug, Default)]
pub struct FaultInjector {
    plan: FaultPlan,
    /// All driver calls so far by kind; those that were made to fail are its failures.
    pub calls: CallLedger,
    /// The number of calls that were made to fail, kept up to date for others to read.
    pub injected: Arc<AtomicU64>,
    /// The number of strategy calls so far.
    pub strategy_calls: u64,
    /// Event queries within the current strategy call.
    queries: u64,
    /// Whether a strategy queried events thousands of times within one of its calls.
    pub spins: bool,
    taken: Vec<Address>,
    /// How much memory another process has taken, kept up to date for others to read.
    pub taken_bytes: Arc<AtomicU64>,
}

impl FaultInjector {
    /// Injects the faults of a plan.
    #[must_use]
    pub fn new(plan: FaultPlan) -> FaultInjector {
        FaultInjector { plan, ..FaultInjector::default() }
    }

    /// Ends all faults, and gives back the memory that was taken from `device`.
    pub fn lift(&mut self, device: &mut dyn Device) {
        self.plan = FaultPlan::none();
        self.return_memory(device);
    }

    /// Announces a strategy call, which [`FaultSpec::MemoryTaken`] and [`FaultSpec::Stuck`] count.
    /// `device` is the one that other processes see as well.
    pub fn begin_strategy_call(&mut self, device: &mut dyn Device) {
        self.strategy_calls += 1;
        self.queries = 0;
        for rule in self.plan.rules.clone() {
            if let FaultRule::Spec(FaultSpec::MemoryTaken { first, count }) = rule {
                if self.strategy_calls == first {
                    self.take_memory(device);
                } else if self.strategy_calls == first.saturating_add(count.get()) {
                    self.return_memory(device);
                }
            }
        }
    }

    /// Takes all free memory, in as few allocations as the device allows.
    fn take_memory(&mut self, device: &mut dyn Device) {
        let page = device.props().page_bytes.max(1);
        let held = device.held_bytes();
        let mut bytes = device.free_bytes() / page * page;
        while bytes > 0 {
            match device.alloc(bytes) {
                Ok(address) => self.taken.push(address),
                Err(_) => bytes = bytes / 2 / page * page,
            }
            bytes = bytes.min(device.free_bytes() / page * page);
        }
        self.taken_bytes.store(device.held_bytes().saturating_sub(held), Ordering::Relaxed);
    }

    fn return_memory(&mut self, device: &mut dyn Device) {
        for address in std::mem::take(&mut self.taken) {
            // A failure shows in what the device holds.
            let _ = device.free(address);
        }
        self.taken_bytes.store(0, Ordering::Relaxed);
    }

    fn is_stuck(&self) -> bool {
        let begins = |rule: &FaultRule| match rule {
            FaultRule::Spec(FaultSpec::Stuck { first }) => self.strategy_calls >= *first,
            _ => false,
        };
        self.plan.rules.iter().any(begins)
    }

    fn failure(&mut self, call: &DriverCall) -> Option<CallFailure> {
        let kind = call.kind();
        if kind == CallKind::EventQuery && self.strategy_calls > 0 {
            self.queries += 1;
            if self.queries > MOST_QUERIES {
                self.spins = true;
                return Some(CallFailure::TIMEOUT);
            }
        }
        let waits = [CallKind::EventSynchronize, CallKind::StreamSynchronize, CallKind::CtxSynchronize];
        if waits.contains(&kind) && self.is_stuck() {
            return Some(CallFailure::TIMEOUT);
        }
        let (of_kind, of_all) = (self.calls.of(kind).count + 1, self.calls.total().count + 1);
        self.plan.rules.iter_mut().find_map(|rule| rule.failure(call, of_kind, of_all))
    }
}

impl Interceptor for FaultInjector {
    fn before<D: Device + ?Sized>(&mut self, call: &DriverCall, _device: &D) -> Result<(), DeviceError> {
        let failure = self.failure(call);
        let call_kind = call.kind();
        self.calls.note(call_kind, Nanos::ZERO, failure.is_some());
        let Some(failure) = failure else { return Ok(()) };
        self.injected.fetch_add(1, Ordering::Relaxed);
        Err(match failure {
            CallFailure::OutOfMemory => DeviceError::OutOfMemory { call: call_kind, requested: call.requested_bytes() },
            CallFailure::Driver(name) => DeviceError::Driver { call: call_kind, name: name.to_owned() },
        })
    }

    fn after<D: Device + ?Sized>(&mut self, _call: &DriverCall, answer: &mut DriverAnswer, _device: &D) {
        if let Ok(DriverReply::Ready(ready)) = answer
            && self.is_stuck()
        {
            *ready = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;
    use crate::device::sim::{SimConfig, SimDevice};

    fn faulty(plan: FaultPlan) -> FaultyDevice<Box<SimDevice>> {
        FaultyDevice::with(plan, Box::new(SimDevice::new(SimConfig::default()).unwrap()))
    }

    /// Which of six calls fail: three allocations and three queries of memory, in turn.
    fn failing(plan: FaultPlan) -> Vec<usize> {
        let mut device = faulty(plan);
        let fails = (1..=6)
            .filter(|turn| if turn % 2 == 1 { device.alloc(512).is_err() } else { device.memory_info().is_err() });
        fails.collect()
    }

    #[test]
    fn the_nth_call_fails_of_one_kind_or_of_any() {
        assert_eq!(failing(FaultPlan::none()), [0; 0]);
        assert_eq!(failing(FaultPlan::none().fail_nth(None, 4, CallFailure::OutOfMemory)), [4]);
        assert_eq!(failing(FaultPlan::none().fail_nth(Some(CallKind::MemAlloc), 2, CallFailure::OutOfMemory)), [3]);
        assert_eq!(failing(FaultPlan::none().with("any:2+3".parse().unwrap())), [2, 3, 4]);
    }

    #[test]
    fn every_nth_call_fails_and_rules_add_up() {
        assert_eq!(failing(FaultPlan::none().fail_every(None, 3, CallFailure::OutOfMemory)), [3, 6]);
        assert_eq!(failing(FaultPlan::none().fail_every(None, 0, CallFailure::OutOfMemory)), [0; 0]);
        let (count, failure) = (NonZeroU64::MAX, CallFailure::OutOfMemory);
        let from_four = FaultSpec::Calls { kind: None, first: 4, count, failure };
        assert_eq!(failing(FaultPlan::none().with(from_four)), [4, 5, 6]);
        let both = FaultPlan::none().fail_every(Some(CallKind::MemGetInfo), 2, CallFailure::OutOfMemory);
        assert_eq!(failing(both.fail_nth(None, 1, CallFailure::OutOfMemory)), [1, 4]);
    }

    #[test]
    fn calls_fail_at_random() {
        let random = || ChaCha8Rng::seed_from_u64(1);
        assert_eq!(failing(FaultPlan::none().fail_one_in(1, random())), [1, 2, 3, 4, 5, 6]);
        assert_eq!(failing(FaultPlan::none().fail_one_in(0, random())), [0; 0]);
        let mut device = faulty(FaultPlan::none().fail_one_in(1, random()));
        assert!(device.alloc(512).unwrap_err().is_out_of_memory());
        assert!(matches!(device.memory_info(), Err(DeviceError::Driver { .. })));
    }

    #[test]
    fn a_failing_call_does_not_reach_the_device() {
        let mut device = faulty(FaultPlan::none().fail_nth(None, 1, CallFailure::UNKNOWN));
        assert_eq!(device.alloc(512).unwrap_err().to_string(), "cuMemAlloc: CUDA_ERROR_UNKNOWN");
        assert_eq!((device.held_bytes(), device.calls().failures), (0, 1));
        device.alloc(512).unwrap();
        let injector = &device.interceptor;
        let seen = injector.calls.of(CallKind::MemAlloc);
        assert_eq!((seen.count, seen.failures, injector.injected.load(Ordering::Relaxed)), (2, 1, 1));
    }

    #[test]
    fn faults_take_memory_and_stall_events() {
        let mut sim = SimDevice::new(SimConfig::default()).unwrap();
        let mut injector =
            FaultInjector::new(FaultPlan::none().with("taken:2+1".parse().unwrap()).with("stuck:3".parse().unwrap()));
        let free = sim.free_bytes();
        let event = sim.event_create().unwrap();
        let mut seen = Vec::new();
        for _ in 1..=3 {
            injector.begin_strategy_call(&mut sim);
            let mut device = InterceptedDevice::new(&mut sim, &mut injector);
            let is_stuck = !device.event_query(event).unwrap() && device.synchronize().is_err();
            seen.push((device.free_bytes() == free, is_stuck));
        }
        assert_eq!(seen, [(true, false), (false, false), (true, true)]);
        injector.lift(&mut sim);
        assert!(InterceptedDevice::new(&mut sim, &mut injector).event_query(event).unwrap());
    }

    #[test]
    fn misspelt_faults_are_explained() {
        let message = "cuMemCreat:3".parse::<FaultSpec>().unwrap_err().to_string();
        assert!(message.contains("did you mean 'cuMemCreate'?"), "{message}");
        for wrong in
            ["cuMemMap", "cuMemMap:0", "cuMemMap:x", "cuMemMap:1+0", "cuMemMap:1:why", "stuck:1+2", "taken:1:oom"]
        {
            let message = wrong.parse::<FaultSpec>().unwrap_err().to_string();
            assert!(message.contains("counted from 1"), "{wrong}: {message}");
        }
    }
}
