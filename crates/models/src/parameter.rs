//! The parameters of generators: declared once, read by type, refused with the reason.
//!
//! What `list` shows, what a recipe may set and what a generator reads all come from the same [`Parameter`], defaults
//! included. ParameterValues from recipes and from `key=value` texts take the same path.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Value;

use super::{GeneratorEntry, Place, Problem, WorkloadError};
use oomph_base::{Bytes, nearest};
pub use oomph_base::{Parameter, ParameterValues};

/// A value and where it was set.
#[derive(Clone, Debug)]
pub struct Given {
    /// The value.
    pub value: Value,
    /// Where it was set.
    pub place: Place,
}

impl Given {
    /// A value that was typed as `key=text`: TOML where it is TOML, otherwise the text itself.
    #[must_use]
    pub fn typed(key: &str, text: &str) -> Given {
        let value = toml::de::ValueDeserializer::parse(text)
            .and_then(Value::deserialize)
            .unwrap_or_else(|_| Value::String(text.to_owned()));
        Given { value, place: Place::Override(format!("{key}={text}")) }
    }
}

/// The values that a generator is built from.
pub struct Parameters<'a> {
    workload: &'a str,
    generator: &'static GeneratorEntry,
    given: &'a BTreeMap<String, Given>,
}

impl<'a> Parameters<'a> {
    /// The given values, none of them unknown to the generator.
    pub fn new(
        workload: &'a str,
        generator: &'static GeneratorEntry,
        given: &'a BTreeMap<String, Given>,
    ) -> Result<Self, WorkloadError> {
        let known = || generator.parameters.iter().map(|parameter| parameter.name);
        match given.iter().find(|(name, _)| known().all(|known| known != name.as_str())) {
            Some((name, given)) => Err(WorkloadError::Parameter {
                place: given.place.clone(),
                problem: Problem::Unknown {
                    generator: generator.name,
                    name: name.clone(),
                    suggestion: nearest(name, known()),
                },
            }),
            None => Ok(Parameters { workload, generator, given }),
        }
    }

    /// The value of a parameter that takes a whole number.
    pub fn count(&self, name: &str) -> Result<u32, WorkloadError> {
        self.read(name, |value| match value {
            Value::Integer(number) => Some(*number as f64),
            // "1e4" is a float in TOML and a whole number to people.
            Value::Float(number) if number.fract() == 0.0 => Some(*number),
            _ => None,
        })
        .map(|number| number as u32)
    }

    /// The value of a parameter that takes an amount of memory, in bytes.
    pub fn size(&self, name: &str) -> Result<u64, WorkloadError> {
        self.read(name, |value| match value {
            Value::Integer(_) | Value::String(_) => Bytes::deserialize(value.clone()).ok().map(|bytes| bytes.0),
            _ => None,
        })
    }

    /// The values of two parameters that take amounts of memory, the first not above the second.
    pub fn size_range(&self, least: &str, most: &str) -> Result<(u64, u64), WorkloadError> {
        let (from, to) = (self.size(least)?, self.size(most)?);
        if from > to {
            return Err(self.refuse(format!("{least} ({}) must not exceed {most} ({})", Bytes(from), Bytes(to))));
        }
        Ok((from, to))
    }

    /// The values of two parameters that take whole numbers, the first not above the second.
    pub fn count_range(&self, least: &str, most: &str) -> Result<(u32, u32), WorkloadError> {
        let (from, to) = (self.count(least)?, self.count(most)?);
        if from > to {
            return Err(self.refuse(format!("{least} ({from}) must not exceed {most} ({to})")));
        }
        Ok((from, to))
    }

    /// The value of a parameter that takes any number.
    pub fn number(&self, name: &str) -> Result<f64, WorkloadError> {
        self.read(name, |value| match value {
            Value::Integer(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            _ => None,
        })
    }

    /// The value of a parameter that takes one of some words.
    pub fn choice(&self, name: &str) -> Result<&'static str, WorkloadError> {
        let word = self.read(name, |value| value.as_str().map(|word| Word(word.to_owned())))?;
        let declared = self.generator.parameters.iter().find(|parameter| parameter.name == name);
        match declared.map(|parameter| parameter.values) {
            Some(ParameterValues::Choice(words)) => {
                Ok(words.iter().find(|known| **known == word.0).copied().unwrap_or_default())
            }
            _ => Err(self.refuse(format!("generator '{}' declares no choice '{name}'", self.generator.name))),
        }
    }

    /// The value of a parameter that takes a list of words.
    pub fn words(&self, name: &str) -> Result<Vec<String>, WorkloadError> {
        self.read(name, |value| match value {
            Value::String(text) => Some(WordList(text.split(',').map(|word| word.trim().to_owned()).collect())),
            Value::Integer(number) => Some(WordList(vec![number.to_string()])),
            Value::Array(items) => items.iter().map(as_word).collect::<Option<_>>().map(WordList),
            _ => None,
        })
        .map(|words| words.0.into_iter().filter(|word| !word.is_empty()).collect())
    }

    /// The refusal of a word in a list that is none of those its generator knows.
    #[must_use]
    pub fn refuse_word(&self, name: &'static str, word: &str, known: &'static [&'static str]) -> WorkloadError {
        let place = match self.given.get(name) {
            Some(given) => given.place.clone(),
            None => Place::Workload(self.workload.to_owned()),
        };
        let suggestion = nearest(word, known.iter().copied());
        WorkloadError::Parameter {
            place,
            problem: Problem::UnknownWord { name, word: word.to_owned(), known, suggestion },
        }
    }

    /// The refusal of values that do not go together.
    #[must_use]
    pub fn refuse(&self, reason: impl Into<String>) -> WorkloadError {
        WorkloadError::Parameter {
            place: Place::Workload(self.workload.to_owned()),
            problem: Problem::Impossible(reason.into()),
        }
    }

    fn read<T: InRange>(&self, name: &str, convert: impl Fn(&Value) -> Option<T>) -> Result<T, WorkloadError> {
        let Some(parameter) = self.generator.parameters.iter().find(|parameter| parameter.name == name) else {
            return Err(self.refuse(format!("generator '{}' does not declare '{name}'", self.generator.name)));
        };
        let default;
        let given = match self.given.get(name) {
            Some(given) => given,
            None => {
                default = Given::typed(name, parameter.default);
                &default
            }
        };
        let problem = match convert(&given.value) {
            Some(value) if value.is_in(parameter.values) => return Ok(value),
            Some(_) => Problem::OutOfRange {
                name: parameter.name,
                expected: parameter.values.to_string(),
                found: in_words(&given.value),
            },
            None => Problem::WrongType {
                name: parameter.name,
                expected: parameter.values.to_string(),
                found: in_words(&given.value),
            },
        };
        Err(WorkloadError::Parameter { place: given.place.clone(), problem })
    }
}

/// ParameterValues that can be held against a declaration. A declaration of another type holds nothing.
trait InRange {
    fn is_in(&self, values: ParameterValues) -> bool;
}

impl InRange for u64 {
    fn is_in(&self, values: ParameterValues) -> bool {
        matches!(values, ParameterValues::Size { least, most } if (least..=most).contains(self))
    }
}

/// Whole numbers come as doubles too: those that a double cannot hold are out of every range.
impl InRange for f64 {
    fn is_in(&self, values: ParameterValues) -> bool {
        match values {
            ParameterValues::Count { least, most } => (f64::from(least)..=f64::from(most)).contains(self),
            ParameterValues::Number { least, most } => (least..=most).contains(self),
            ParameterValues::Size { .. }
            | ParameterValues::Choice(_)
            | ParameterValues::Words { .. }
            | ParameterValues::Text(_) => false,
        }
    }
}

/// An item of a list of words; numbers are words too.
fn as_word(item: &Value) -> Option<String> {
    match item {
        Value::String(word) => Some(word.clone()),
        Value::Integer(number) => Some(number.to_string()),
        _ => None,
    }
}

/// A word of a choice.
struct Word(String);

impl InRange for Word {
    fn is_in(&self, values: ParameterValues) -> bool {
        matches!(values, ParameterValues::Choice(words) if words.contains(&self.0.as_str()))
    }
}

/// A list of words.
struct WordList(Vec<String>);

impl InRange for WordList {
    fn is_in(&self, values: ParameterValues) -> bool {
        matches!(values, ParameterValues::Words { .. })
    }
}

fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the text '{text}'"),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        Value::Datetime(_) => format!("the date {value}"),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GeneratorStart;
    use oomph_base::{GIB, MIB};

    static ENTRY: GeneratorEntry = GeneratorEntry {
        name: "example",
        summary: "",
        seeded: false,
        parameters: &[
            Parameter::count("layers", 1..=100, "12", ""),
            Parameter::size("max_bytes", 1..=GIB, "4MiB", ""),
            Parameter::number("chance", 0.0..=1.0, "0.5", ""),
            Parameter::choice("mode", &["train", "infer"], "train", ""),
            Parameter::words("techniques", "amp,ckpt", "", ""),
        ],
        build: |parameters| -> Result<GeneratorStart, WorkloadError> { Err(parameters.refuse("never built")) },
    };

    fn given(pairs: &[(&str, &str)]) -> BTreeMap<String, Given> {
        pairs.iter().map(|&(key, text)| (key.to_owned(), Given::typed(key, text))).collect()
    }

    fn read<T>(pairs: &[(&str, &str)], get: impl Fn(&Parameters<'_>) -> Result<T, WorkloadError>) -> Result<T, String> {
        let given = given(pairs);
        Parameters::new("w", &ENTRY, &given).and_then(|parameters| get(&parameters)).map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_read_as_people_type_them() {
        assert_eq!(read(&[("layers", "1e2")], |p| p.count("layers")), Ok(100));
        assert_eq!(read(&[("layers", "1_0")], |p| p.count("layers")), Ok(10));
        assert_eq!(read(&[("max_bytes", "20MiB")], |p| p.size("max_bytes")), Ok(20 * MIB));
        assert_eq!(read(&[("max_bytes", "\"20MiB\"")], |p| p.size("max_bytes")), Ok(20 * MIB));
        assert_eq!(read(&[("max_bytes", "4096")], |p| p.size("max_bytes")), Ok(4096));
        assert_eq!(read(&[("chance", "1")], |p| p.number("chance")), Ok(1.0));
    }

    #[test]
    fn words_are_read_from_texts_lists_and_numbers() {
        let words = |text| read(&[("techniques", text)], |p| p.words("techniques"));
        let list = |words: &[&str]| Ok(words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(words("amp,ckpt"), list(&["amp", "ckpt"]));
        assert_eq!(words(" amp , ,ckpt"), list(&["amp", "ckpt"]));
        assert_eq!(words("[\"amp\", 4]"), list(&["amp", "4"]));
        assert_eq!(words("512"), list(&["512"]));
        assert_eq!(words(""), list(&[]));
        assert_eq!(
            words("true").unwrap_err(),
            "parameter techniques=true: 'techniques' takes a list of words such as amp,ckpt, not true"
        );
    }

    #[test]
    fn a_choice_takes_its_words_and_no_others() {
        assert_eq!(read(&[("mode", "infer")], |p| p.choice("mode")), Ok("infer"));
        assert_eq!(read(&[], |p| p.choice("mode")), Ok("train"));
        assert_eq!(
            read(&[("mode", "dream")], |p| p.choice("mode")).unwrap_err(),
            "parameter mode=dream: 'mode' takes one of train, infer; the text 'dream' is out of range"
        );
        assert!(read(&[], |p| p.choice("layers")).is_err(), "a count is no choice");
    }

    #[test]
    fn what_is_not_set_has_its_declared_default() {
        assert_eq!(read(&[], |p| p.count("layers")), Ok(12));
        assert_eq!(read(&[], |p| p.size("max_bytes")), Ok(4 * MIB));
        assert_eq!(read(&[], |p| p.number("chance")), Ok(0.5));
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_nearest_right_one() {
        assert_eq!(
            read(&[("layer", "3")], |p| p.count("layers")).unwrap_err(),
            "parameter layer=3: generator 'example' has no parameter 'layer'; did you mean 'layers'?"
        );
    }

    #[test]
    fn a_wrong_type_is_refused_with_the_right_one() {
        for (text, found) in
            [("many", "the text 'many'"), ("1.5", "1.5"), ("true", "true"), ("[1]", "a list"), ("", "the text ''")]
        {
            assert_eq!(
                read(&[("layers", text)], |p| p.count("layers")).unwrap_err(),
                format!("parameter layers={text}: 'layers' takes a whole number from 1 to 100, not {found}")
            );
        }
        assert_eq!(
            read(&[("max_bytes", "tall")], |p| p.size("max_bytes")).unwrap_err(),
            "parameter max_bytes=tall: 'max_bytes' takes a size from 1 B to 1.00 GiB, not the text 'tall'"
        );
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_the_range() {
        for (name, text) in [("layers", "0"), ("layers", "101"), ("layers", "-3"), ("layers", "9223372036854775807")] {
            assert_eq!(
                read(&[(name, text)], |p| p.count("layers")).unwrap_err(),
                format!("parameter layers={text}: 'layers' takes a whole number from 1 to 100; {text} is out of range")
            );
        }
        assert!(read(&[("max_bytes", "2GiB")], |p| p.size("max_bytes")).unwrap_err().ends_with("is out of range"));
        assert!(read(&[("chance", "nan")], |p| p.number("chance")).unwrap_err().ends_with("is out of range"));
    }
}
