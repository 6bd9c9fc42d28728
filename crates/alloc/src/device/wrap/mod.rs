//! Behaviour over any device: a cap on memory ([`Limited`]), calls that fail on purpose ([`Faulty`]), a list of what
//! was asked and answered ([`Logged`]), a device whose answers come from such a list ([`Scripted`]), and one that is
//! prompted line by line while the list is still being written ([`Prompted`]).
//!
//! A driver call here is a value ([`Call`]), so each of these is one small rule. They sit below the strategy, which
//! notices nothing: what is capped is memory reserved, and any call can fail on any device.

mod exchange;
mod faults;
mod granted;
mod intercept;
mod limit;
mod logged;
mod prompted;
mod responder;
mod script;
mod scripted;

pub use exchange::{Answer, Call, Exchange, Reply};
pub use faults::{Fault, FaultPlan, Faults, Faulty};
pub use intercept::{Intercepted, Interceptor};
pub use limit::{Limit, Limited, capped};
pub use logged::{Log, Logged};
pub use prompted::Prompted;
pub use responder::Responder;
pub use script::{Expected, Line, Manner, Mismatch};
pub use scripted::Scripted;
