//! Driver calls that fail on purpose.

use super::{
    exchange::{Answer, Call},
    intercept::{Intercepted, Interceptor},
};
use crate::device::{CallKind, Device, DeviceError};

/// A device whose calls fail as a [`FaultPlan`] says. A call that fails never reaches the device below.
///
/// ```
/// use oomph_alloc::device::{CallKind, Device, sim::{SimConfig, SimDevice}, wrap::{Fault, FaultPlan, Faulty}};
/// let sim = SimDevice::new(SimConfig::default())?;
/// let plan = FaultPlan::none().fail_nth(Some(CallKind::MemAlloc), 2, Fault::OutOfMemory);
/// let mut device = Faulty::with(plan, Box::new(sim));
/// device.alloc(512)?;
/// assert!(device.alloc(512).unwrap_err().is_out_of_memory());
/// device.alloc(512)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Faulty<P> = Intercepted<P, Faults>;

/// How a call fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device says that memory has run out.
    OutOfMemory,
    /// The driver answers with this error.
    Driver(String),
}

/// Which calls fail, and how. The first rule that fits decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// Any kind where there is none.
    kind: Option<CallKind>,
    turn: Turn,
    fault: Fault,
}

/// Calls are counted from one, those that failed included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Nth(u64),
    Every(u64),
    From(u64),
}

impl FaultPlan {
    /// Nothing fails; calls are still counted.
    #[must_use]
    pub fn none() -> FaultPlan {
        FaultPlan::default()
    }

    /// The `n`-th call of a kind fails, or of any kind; the first is number 1.
    #[must_use]
    pub fn fail_nth(mut self, kind: Option<CallKind>, n: u64, fault: Fault) -> FaultPlan {
        self.rules.push(Rule { kind, turn: Turn::Nth(n), fault });
        self
    }

    /// The `n`-th call of a kind fails, or of any kind, and all that follow: a context that is lost, or memory that others
    /// have taken for good.
    #[must_use]
    pub fn fail_from(mut self, kind: Option<CallKind>, n: u64, fault: Fault) -> FaultPlan {
        self.rules.push(Rule { kind, turn: Turn::From(n), fault });
        self
    }

    /// Every `n`-th call of a kind fails, or of any kind. With 0, none does.
    #[must_use]
    pub fn fail_every(mut self, kind: Option<CallKind>, n: u64, fault: Fault) -> FaultPlan {
        self.rules.push(Rule { kind, turn: Turn::Every(n), fault });
        self
    }
}

/// A plan and how far it has got. See [`Faulty`].
#[derive(Clone, Debug)]
pub struct Faults {
    plan: FaultPlan,
    seen: u64,
    seen_by_kind: [u64; CallKind::ALL.len()],
    injected: u64,
}

impl<P> Faulty<P> {
    /// Lets calls to `device` fail as `plan` says.
    pub fn with(plan: FaultPlan, device: P) -> Self {
        let faults = Faults { plan, seen: 0, seen_by_kind: [0; CallKind::ALL.len()], injected: 0 };
        Intercepted::new(device, faults)
    }
}

impl Faults {
    /// Calls so far: the range that `n` must cover for every call of a run to fail once.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Calls of one kind so far.
    #[must_use]
    pub fn seen_of(&self, kind: CallKind) -> u64 {
        self.seen_by_kind[kind as usize]
    }

    /// Calls that failed on purpose so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.injected
    }
}

impl Interceptor for Faults {
    fn before<D: Device + ?Sized>(&mut self, call: &Call, _device: &D) -> Result<(), DeviceError> {
        let kind = call.kind();
        self.seen += 1;
        self.seen_by_kind[kind as usize] += 1;
        let fitting = self.plan.rules.iter().find(|rule| {
            let count = match rule.kind {
                Some(of) if of == kind => self.seen_by_kind[kind as usize],
                Some(_) => return false,
                None => self.seen,
            };
            match rule.turn {
                Turn::Nth(n) => count == n,
                Turn::Every(n) => n > 0 && count.is_multiple_of(n),
                Turn::From(n) => count >= n,
            }
        });
        let Some(rule) = fitting else { return Ok(()) };
        self.injected += 1;
        Err(match &rule.fault {
            Fault::OutOfMemory => DeviceError::OutOfMemory { call: kind, requested: call.requested_bytes() },
            Fault::Driver(name) => DeviceError::Driver { call: kind, name: name.clone() },
        })
    }

    fn after<D: Device + ?Sized>(&mut self, _call: &Call, _answer: &mut Answer, _device: &D) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::{SimConfig, SimDevice};

    fn faulty(plan: FaultPlan) -> Faulty<Box<SimDevice>> {
        Faulty::with(plan, Box::new(SimDevice::new(SimConfig::default()).unwrap()))
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
        assert_eq!(failing(FaultPlan::none().fail_nth(None, 4, Fault::OutOfMemory)), [4]);
        assert_eq!(failing(FaultPlan::none().fail_nth(Some(CallKind::MemAlloc), 2, Fault::OutOfMemory)), [3]);
    }

    #[test]
    fn every_nth_call_fails_and_rules_add_up() {
        assert_eq!(failing(FaultPlan::none().fail_every(None, 3, Fault::OutOfMemory)), [3, 6]);
        assert_eq!(failing(FaultPlan::none().fail_every(None, 0, Fault::OutOfMemory)), [0; 0]);
        assert_eq!(failing(FaultPlan::none().fail_from(None, 4, Fault::OutOfMemory)), [4, 5, 6]);
        let both = FaultPlan::none().fail_every(Some(CallKind::MemGetInfo), 2, Fault::OutOfMemory);
        assert_eq!(failing(both.fail_nth(None, 1, Fault::OutOfMemory)), [1, 4]);
    }

    #[test]
    fn a_fault_changes_nothing_and_says_what_the_plan_says() {
        let mut device = faulty(FaultPlan::none().fail_nth(None, 1, Fault::Driver("CUDA_ERROR_UNKNOWN".to_owned())));
        assert_eq!(device.alloc(512).unwrap_err().to_string(), "cuMemAlloc: CUDA_ERROR_UNKNOWN");
        assert_eq!((device.held_bytes(), device.calls().failures), (0, 1));
        device.alloc(512).unwrap();
        assert_eq!((device.interceptor().seen(), device.interceptor().injected()), (2, 1));
        assert_eq!(device.interceptor().seen_of(CallKind::MemAlloc), 2);
    }
}
