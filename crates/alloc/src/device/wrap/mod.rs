//! Behaviour over any device, below the strategy: a cap on memory ([`LimitedDevice`]), injected
//! faults ([`FaultyDevice`]), and answers from a script ([`ScriptedDevice`]). A driver call is a
//! value here ([`DriverCall`]).

mod driver_call;
mod faults;
mod intercept;
mod scripted;
#[cfg(any(test, feature = "testing"))]
pub mod stand_in;

pub use driver_call::{DriverAnswer, DriverCall, DriverExchange, DriverReply};
pub(crate) use driver_call::{ReplyValue, device_from_responses, value_of, with_driver_calls};
pub use faults::{CallFailure, FaultInjector, FaultPlan, FaultSpec, FaultSpecError, FaultyDevice};
pub use intercept::{InterceptedDevice, Interceptor, LimitedDevice, MemoryCap, capped};
pub use scripted::{ScriptMismatch, ScriptOrder, ScriptedDevice};
