//! Options under their former names: they still work, and a note names the new ones. They are not in help texts.
//!
//! The command line is rewritten before it is parsed, so that commands know the new options only.

use std::ffi::OsString;

/// The option that says what a device has.
const CARD: &str = "card";
/// The option that says what a process may take.
const LIMIT: &str = "limit";

/// An option under its former name.
struct OldOption {
    /// The commands that have it.
    commands: &'static [&'static str],
    name: &'static str,
    /// Its name now.
    new: &'static str,
    /// Its value now.
    value: fn(&str) -> String,
}

const OLD_OPTIONS: &[OldOption] = &[
    OldOption { commands: &["advise", "threshold", "techniques"], name: "memory", new: CARD, value: str::to_owned },
    OldOption { commands: &["stress"], name: "memory", new: LIMIT, value: str::to_owned },
    OldOption { commands: &["verify"], name: "fraction", new: LIMIT, value: decimal },
    OldOption { commands: &["threshold"], name: "cap", new: "smallest", value: searched },
];

/// With a decimal point: a whole number would be bytes.
fn decimal(fraction: &str) -> String {
    fraction.parse::<f64>().map_or_else(|_| fraction.to_owned(), |fraction| format!("{fraction:?}"))
}

/// What the search was for when it named who enforces the limit.
fn searched(enforcer: &str) -> String {
    match enforcer {
        "device" => CARD,
        "allocator" => LIMIT,
        other => other,
    }
    .to_owned()
}

/// Device and card of `sim:24GiB` or `4xsim:24GiB`.
fn device_and_card(device: &str) -> Option<(&str, &str)> {
    let (device, card) = device.split_once(':')?;
    let count = device.strip_suffix("sim")?;
    let is_count = |count: &str| count.strip_suffix('x').is_some_and(|count| count.parse::<u32>().is_ok());
    (count.is_empty() || is_count(count)).then_some((device, card))
}

/// A command line with new options only.
#[derive(Debug, Default)]
pub struct Modernized {
    /// The words after the name of the program.
    pub words: Vec<OsString>,
    /// One sentence per old option.
    pub notes: Vec<String>,
    given: Vec<GivenOption>,
}

/// An option by its new name, and what was typed.
#[derive(Debug)]
struct GivenOption {
    name: String,
    typed: String,
    is_old: bool,
}

impl Modernized {
    /// Replaces old options. It is an error if an option is given under both names.
    pub fn of(words: impl IntoIterator<Item = OsString>) -> Result<Modernized, String> {
        let mut modern = Modernized::default();
        let mut words = words.into_iter();
        modern.words.extend(words.next());
        let command = modern.words.first().cloned().unwrap_or_default();
        let has = |option: &&OldOption| option.commands.iter().any(|name| command == *name);
        while let Some(word) = words.next() {
            if word == "--" {
                modern.words.push(word);
                modern.words.extend(words);
                break;
            }
            let text = word.to_string_lossy().into_owned();
            let Some(option) = text.strip_prefix("--") else {
                modern.words.push(word);
                continue;
            };
            let (name, inline) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
            let old = OLD_OPTIONS.iter().filter(has).find(|old| old.name == name);
            if old.is_none() && name != "device" {
                modern.give(name, format!("--{name}"), false)?;
                modern.words.push(word);
                continue;
            }
            let value = match inline {
                Some(value) => Some(value.to_owned()),
                None => words.next().map(|value| value.to_string_lossy().into_owned()),
            };
            match (old, value) {
                (Some(old), Some(value)) => modern.replace(old, &value)?,
                // The parser says that the value is missing.
                (Some(old), None) => modern.words.push(format!("--{}", old.new).into()),
                (None, value) => modern.device(value)?,
            }
        }
        Ok(modern)
    }

    fn replace(&mut self, old: &OldOption, value: &str) -> Result<(), String> {
        let OldOption { name, new, .. } = old;
        let new_value = (old.value)(value);
        self.notes.push(match new_value == value {
            true => format!("note: --{name} is now --{new}"),
            false => format!("note: --{name} {value} is now --{new} {new_value}"),
        });
        self.give(new, format!("--{name} {value}"), true)?;
        self.words.extend([format!("--{new}").into(), new_value.into()]);
        Ok(())
    }

    /// The device, which once named its card.
    fn device(&mut self, value: Option<String>) -> Result<(), String> {
        self.give("device", "--device".to_owned(), false)?;
        self.words.push("--device".into());
        match value.as_deref().and_then(device_and_card) {
            Some((device, card)) => {
                let typed = format!("--device {device}:{card}");
                self.notes.push(match device {
                    "sim" => format!("note: {typed} is now --card {card}"),
                    several => format!("note: {typed} is now --device {several} --card {card}"),
                });
                self.give(CARD, typed, true)?;
                self.words.extend([device.into(), "--card".into(), card.into()]);
            }
            None => self.words.extend(value.map(OsString::from)),
        }
        Ok(())
    }

    fn give(&mut self, name: &str, typed: String, is_old: bool) -> Result<(), String> {
        let same = self.given.iter().find(|given| given.name == name && (is_old || given.is_old));
        if let Some(GivenOption { typed: other, .. }) = same {
            return Err(format!("{other} and {typed} mean the same; write --{name} once"));
        }
        self.given.push(GivenOption { name: name.to_owned(), typed, is_old });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The new command line, and the notes.
    fn modernized(line: &str) -> Result<(String, Vec<String>), String> {
        let modern = Modernized::of(line.split(' ').map(OsString::from))?;
        let words: Vec<_> = modern.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        Ok((words.join(" "), modern.notes))
    }

    #[test]
    fn old_options_become_new_ones() {
        for (old, new, note) in [
            ("advise a --memory 24GiB", "advise a --card 24GiB", "note: --memory is now --card"),
            ("techniques --memory=24GiB -j 2", "techniques --card 24GiB -j 2", "note: --memory is now --card"),
            ("stress all --memory 1GiB", "stress all --limit 1GiB", "note: --memory is now --limit"),
            ("verify --fraction 0.5 a", "verify --limit 0.5 a", "note: --fraction is now --limit"),
            ("verify --fraction 1 a", "verify --limit 1.0 a", "note: --fraction 1 is now --limit 1.0"),
            ("threshold a --cap device", "threshold a --smallest card", "note: --cap device is now --smallest card"),
            (
                "replay a --device sim:8GiB",
                "replay a --device sim --card 8GiB",
                "note: --device sim:8GiB is now --card 8GiB",
            ),
            (
                "run --device=4xsim:h200",
                "run --device 4xsim --card h200",
                "note: --device 4xsim:h200 is now --device 4xsim --card h200",
            ),
        ] {
            assert_eq!(modernized(old), Ok((new.to_owned(), vec![note.to_owned()])));
        }
    }

    #[test]
    fn other_words_stay() {
        for line in [
            "run",
            "replay a --device sim --limit 8GiB",
            "replay a --device cuda:1",
            "run --device cuda:all",
            "run --device 2xcuda:1",
            "inspect --memory",
            "threshold a --memories 8GiB",
            "advise -- --memory 8GiB --device sim:8GiB",
            "verify a --device",
        ] {
            assert_eq!(modernized(line), Ok((line.to_owned(), vec![])));
        }
        assert_eq!(modernized("advise a --memory").unwrap().0, "advise a --card");
    }

    #[test]
    fn both_names_are_an_error() {
        for (line, message) in [
            ("advise --card 8GiB --memory 9GiB", "--card and --memory 9GiB mean the same; write --card once"),
            ("verify --fraction 0.5 --limit=8GiB", "--fraction 0.5 and --limit mean the same; write --limit once"),
            ("run --device sim:8GiB --card 9GiB", "--device sim:8GiB and --card mean the same; write --card once"),
            (
                "advise --memory 8GiB --device sim:9GiB",
                "--memory 8GiB and --device sim:9GiB mean the same; write --card once",
            ),
        ] {
            assert_eq!(modernized(line), Err(message.to_owned()));
        }
        modernized("replay a --strategy x --strategy y").unwrap();
    }
}
