//! Callers that break the rules: what does a strategy make of a pointer freed twice, or of a request for 2^64 - 1 bytes?
//!
//! Every [`Misuse`] is a small scenario, played on a fresh strategy under the eyes of
//! [`Checked`](crate::strategy::wrap::Checked). Afterwards an ordinary program runs, everything is given back, and both
//! once more: only then a [`Consequence`] is spoken. A strategy may refuse misuse or shrug it off; it must not be damaged.

mod aftermath;
mod catalogue;
mod handles;
mod requests;
mod stage;

pub use catalogue::MISUSES;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use self::stage::{Stage, Unplayable};
use super::{
    Failure, KindOfStress, Subject, SubjectError, Verdict,
    patience::{Ended, PATIENCE, within},
};
use crate::{device::Device, strategy::Strategy};

/// What this kind of stress is called.
pub const KIND: &str = "misuse";

/// Its part in `all`.
pub(super) const EVERYTHING: KindOfStress = KindOfStress {
    name: KIND,
    judge: |subject, _, stop| misuses(subject, &MISUSES.iter().collect::<Vec<_>>(), stop).verdict,
};

/// How a caller names a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Door {
    /// By the handle that it was given.
    Handle,
    /// By its address alone, as callers of PyTorch's pluggable allocators do. Whoever is called like that keeps a table of
    /// live addresses ([`Addressed`](crate::strategy::wrap::Addressed)).
    Address,
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Door::Handle => "handle",
            Door::Address => "address",
        })
    }
}

/// Something that callers must not do.
pub struct Misuse {
    /// What users type.
    pub name: &'static str,
    /// What is done, in one line.
    pub summary: &'static str,
    /// In which ways the block can be named; where there is none to name, the handle's door is the only one.
    pub doors: &'static [Door],
    play: fn(&mut Stage) -> Result<(), Unplayable>,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// It was refused with an error or a result, in these words, and nothing came of it.
    Detected(String),
    /// It was accepted, and nothing came of it.
    Harmless,
    /// The strategy, or the memory of others, was damaged.
    Corrupts(String),
    /// It cannot be tried here, for this reason.
    NotApplicable(String),
}

impl Consequence {
    /// Its name in tables and files.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Consequence::Detected(_) => "detected",
            Consequence::Harmless => "harmless",
            Consequence::Corrupts(_) => "corrupts",
            Consequence::NotApplicable(_) => "not applicable",
        }
    }

    /// What there is to say beside the name.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self {
            Consequence::Detected(words) | Consequence::Corrupts(words) | Consequence::NotApplicable(words) => words,
            Consequence::Harmless => "",
        }
    }

    /// Whether a promise was broken.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Consequence::Corrupts(_))
    }
}

/// What became of one misuse, as a row of a table or file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the columns are the parts of a misuse and its consequence")]
pub struct MisuseRow {
    pub strategy: String,
    pub misuse: String,
    /// How the block was named: `handle` or `address`.
    pub door: String,
    /// `detected`, `harmless`, `corrupts` or `not applicable`.
    pub consequence: String,
    pub detail: String,
}

/// What became of all misuses of one strategy.
#[derive(Clone, Debug, Default)]
pub struct Misused {
    /// The verdict on the strategy.
    pub verdict: Verdict,
    /// One row a misuse and door.
    pub rows: Vec<MisuseRow>,
}

/// Misuses the subject in all these ways, through all doors; `stop` ends it early.
#[must_use]
pub fn misuses(subject: &Subject, misuses: &[&'static Misuse], stop: &dyn Fn() -> bool) -> Misused {
    let strategy = subject.strategy.to_string();
    let mut misused = Misused { verdict: Verdict::new(KIND, &strategy), rows: Vec::new() };
    for (entry, door) in misuses.iter().flat_map(|entry| entry.doors.iter().map(move |&door| (*entry, door))) {
        if stop() {
            break;
        }
        let consequence = match misuse(subject, entry, door) {
            Ok(consequence) => consequence,
            Err(error) => {
                misused.verdict.skipped = Some(error.to_string());
                break;
            }
        };
        misused.verdict.trials += 1;
        if consequence.is_damage() {
            misused.verdict.failures.push(Failure {
                found_by: KIND,
                strategy: strategy.clone(),
                detail: format!("{} by {door}: {}", entry.name, consequence.detail()),
                trace: None,
                conditions: vec![format!("--misuse {}", entry.name)],
            });
        }
        misused.rows.push(MisuseRow {
            strategy: strategy.clone(),
            misuse: entry.name.to_owned(),
            door: door.to_string(),
            consequence: consequence.name().to_owned(),
            detail: consequence.detail().to_owned(),
        });
    }
    misused
}

/// Misuses a fresh strategy of the subject's and says what became of it.
pub fn misuse(subject: &Subject, misuse: &'static Misuse, door: Door) -> Result<Consequence, SubjectError> {
    let owned = subject.clone();
    let ready = move || {
        let device = owned.open_device()?;
        let strategy = owned.build(device.props())?;
        Ok((strategy, device))
    };
    judge(misuse, door, PATIENCE, ready)
}

/// The same for any strategy and device. They are made in the thread that uses them, as contexts of a GPU demand.
fn judge(
    misuse: &'static Misuse,
    door: Door,
    patience: Duration,
    ready: impl FnOnce() -> Result<(Box<dyn Strategy>, Box<dyn Device>), SubjectError> + Send + 'static,
) -> Result<Consequence, SubjectError> {
    let trial = move || ready().map(|(strategy, device)| play(misuse, door, strategy, device));
    match within(patience, trial) {
        Ok(consequence) => consequence,
        Err(Ended::NotStarted(error)) => Ok(Consequence::NotApplicable(format!("no thread to try it in: {error}"))),
        Err(ended) => Ok(Consequence::Corrupts(ended.to_string())),
    }
}

fn play(misuse: &Misuse, door: Door, strategy: Box<dyn Strategy>, device: Box<dyn Device>) -> Consequence {
    if let Err(missing) = strategy.requires().check(device.props()) {
        return Consequence::NotApplicable(missing.to_string());
    }
    let mut stage = match Stage::new(strategy, device, door) {
        Ok(stage) => stage,
        Err(error) => return Consequence::NotApplicable(error.to_string()),
    };
    let played = (misuse.play)(&mut stage);
    stage.look();
    aftermath::live_on(&mut stage);
    match (stage.findings.split_first(), played) {
        (None, Err(Unplayable::NotApplicable(reason))) => Consequence::NotApplicable(reason.to_owned()),
        (None, Err(error)) => Consequence::Corrupts(format!("a rightful call was refused: {error}")),
        (Some((first, [])), _) => Consequence::Corrupts(first.clone()),
        (Some((first, more)), _) => Consequence::Corrupts(format!("{first} (and {} more)", more.len())),
        (None, Ok(())) => match stage.refusals.into_iter().next() {
            Some(words) => Consequence::Detected(words),
            None => Consequence::Harmless,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{STRATEGIES, StrategySpec};

    fn subject(strategy: &str) -> Subject {
        Subject {
            strategy: StrategySpec::from(strategy),
            device: "sim".parse().unwrap(),
            memory_bytes: Some(256 << 20),
        }
    }

    fn all() -> impl Iterator<Item = (&'static Misuse, Door)> {
        MISUSES.iter().flat_map(|misuse| misuse.doors.iter().map(move |&door| (misuse, door)))
    }

    #[test]
    fn no_misuse_damages_a_strategy_of_ours() {
        let mut damage = Vec::new();
        for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
            let subject = subject(&spec.to_string());
            for (entry, door) in all() {
                let consequence = misuse(&subject, entry, door).unwrap();
                if consequence.is_damage() {
                    damage.push(format!("{spec}: {} by {door}: {}", entry.name, consequence.detail()));
                }
            }
        }
        assert!(damage.is_empty(), "{}", damage.join("\n"));
    }

    #[test]
    fn damage_is_seen_and_told_from_what_is_harmless() {
        let consequence = |strategy: &str, name: &str| {
            let entry = MISUSES.iter().find(|entry| entry.name == name).unwrap();
            misuse(&subject(strategy), entry, Door::Handle).unwrap()
        };
        for (strategy, name) in [
            ("flawed:TrustsHandles", "double-free-reused"),
            ("flawed:TrustsHandles", "forged-handle"),
            ("flawed:WrapsAround", "size-overflow"),
            ("flawed:Panics", "more-than-device"),
            ("flawed:LeakOnClose", "double-free"),
        ] {
            let consequence = consequence(strategy, name);
            assert!(consequence.is_damage(), "{strategy}: {name}: {consequence:?}");
        }
        assert_eq!(consequence("flawed:ServesNothing", "zero-bytes"), Consequence::Harmless);
        assert_eq!(consequence("flawed:None", "wrong-size"), Consequence::Harmless);
        assert!(matches!(consequence("flawed:None", "double-free"), Consequence::Detected(_)));
        assert!(matches!(consequence("flawed:None", "double-free-waiting"), Consequence::NotApplicable(_)));
    }

    #[test]
    fn the_same_allocator_without_a_flaw_is_not_damaged() {
        let chosen: Vec<&Misuse> = MISUSES.iter().collect();
        let misused = misuses(&subject("flawed:None"), &chosen, &|| false);
        assert_eq!(misused.verdict.word(), "passed", "{:?}", misused.verdict.failures);
        assert_eq!(misused.rows.len(), all().count());
        assert_eq!(misuses(&subject("flawed:None"), &chosen, &|| true).rows, []);
    }

    #[test]
    fn who_hangs_is_not_waited_for() {
        let slow = || {
            std::thread::sleep(Duration::from_secs(2));
            let subject = subject("direct");
            let device = subject.open_device()?;
            Ok((subject.build(device.props())?, device))
        };
        let consequence = judge(&MISUSES[0], Door::Handle, Duration::from_millis(30), slow).unwrap();
        assert!(consequence.is_damage() && consequence.detail().contains("did not come back"), "{consequence:?}");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = MISUSES.iter().map(|misuse| misuse.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MISUSES.len());
    }
}
