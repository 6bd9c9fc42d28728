//! A case as it is sent to a worker: everything by name, to be found again over there.

use std::sync::{Arc, atomic::AtomicBool};

use serde::{Deserialize, Serialize};

use super::WorkerError;
use crate::{
    base::NoProgress,
    device::{DeviceSpec, DeviceSpecError},
    measure::CaseLabel,
    replay::{OnOutOfMemory, Pace},
    strategy::StrategySpec,
    suite::{Case, CaseOutcome, CaseRunner, InProcess, SourceError, SourceSpec},
};

/// A case in words: what a worker has to do.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    label: CaseLabel,
    source: SourceSpec,
    strategy: String,
    device: String,
    on_out_of_memory: OnOutOfMemory,
    pace: Pace,
    without_work: bool,
    timed: bool,
    threads: Vec<u16>,
}

/// Something that was there when the case was made and is not any more.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum OrderError {
    Source(#[from] SourceError),
    Device(#[from] DeviceSpecError),
}

impl Order {
    pub(in crate::suite) fn of(case: &Case) -> Order {
        // Named one by one, so that nothing new about a case is forgotten on the way. Keeping the time is the sender's.
        let Case {
            label,
            source: _,
            origin,
            strategy,
            device,
            on_out_of_memory,
            pace,
            without_work,
            timed,
            threads,
            timeout: _,
        } = case;
        Order {
            label: label.clone(),
            source: origin.clone(),
            strategy: strategy.to_string(),
            device: device.to_string(),
            on_out_of_memory: *on_out_of_memory,
            pace: *pace,
            without_work: *without_work,
            timed: *timed,
            threads: threads.clone(),
        }
    }

    /// Reads the line that the other side has written.
    pub fn read(line: &str) -> Result<Order, WorkerError> {
        serde_json::from_str(line).map_err(WorkerError::Order)
    }

    /// Runs the case in this process and returns its outcome as a line. Whatever goes wrong with the case itself is in the
    /// outcome.
    pub fn carry_out(self, stop: &AtomicBool) -> Result<String, WorkerError> {
        let label = self.label.clone();
        let outcome = match self.into_case() {
            Ok(case) => InProcess { stop: Some(stop) }.run(&case),
            Err(trouble) => CaseOutcome::failed(&label, &trouble.to_string()),
        };
        serde_json::to_string(&outcome).map_err(WorkerError::Outcome)
    }

    fn into_case(self) -> Result<Case, OrderError> {
        Ok(Case {
            source: Arc::from(self.source.open(&NoProgress)?),
            device: self.device.parse::<DeviceSpec>()?,
            label: self.label,
            origin: self.source,
            strategy: StrategySpec::from(self.strategy.as_str()),
            on_out_of_memory: self.on_out_of_memory,
            pace: self.pace,
            without_work: self.without_work,
            timed: self.timed,
            threads: self.threads,
            timeout: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        suite::{CaseSettings, SuiteFile},
        trace::Trace,
    };

    #[test]
    fn a_case_in_words_is_the_same_case_again() {
        let text = r#"
            question = "the same?"
            [[group]]
            workloads = ["checkerboard", "random"]
            strategies = ["direct", "caching:max_split_size_mb:64,garbage_collection_threshold:0.8"]
            limits = ["6GiB"]
            seeds = [7]
            on_oom = "skip"
            timed = true
            threads = [2, 4]
            [[group]]
            workloads = ["checkerboard"]
            strategies = ["null"]
            set = { rounds = 2, block_bytes = "1MiB" }
        "#;
        let suite = SuiteFile::parse("words", "words.toml", text).unwrap();
        let settings = CaseSettings { device: "sim:80GiB".parse().unwrap(), limit: None, seed: None, timeout: None };
        for case in suite.cases(&settings).unwrap() {
            let words = serde_json::to_string(&Order::of(&case)).unwrap();
            let again = Order::read(&words).unwrap().into_case().unwrap();
            assert_eq!(Order::of(&again), Order::of(&case), "{words}");
            assert_eq!((again.strategy, again.device), (case.strategy, case.device), "{words}");
            let events = |source| Trace::read(source).unwrap().events;
            assert!(events(&*again.source) == events(&*case.source), "{words}: other events");
        }
    }
}
