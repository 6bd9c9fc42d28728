//! The parameters of generators: declared once, read by type, refused with the reason.
//!
//! `list`, recipes and generators use the same [`Parameter`], defaults included. Values from recipes and from
//! `key=value` texts take the same path.

use std::{collections::BTreeMap, fmt, io, path::PathBuf};

use serde::Deserialize;
use toml::Value;

use super::GeneratorEntry;
use oomph_base::{Bytes, did_you_mean, did_you_mean_among, nearest};
pub use oomph_base::{Parameter, ParameterValues};

/// A value and where it was set.
#[derive(Clone, Debug)]
pub struct GivenValue {
    /// The value.
    pub value: Value,
    /// Where it was set.
    pub place: SettingPlace,
}

impl GivenValue {
    /// A value that was typed as `key=text`: TOML where it is TOML, otherwise the text itself.
    #[must_use]
    pub fn typed(key: &str, text: &str) -> GivenValue {
        let value = toml::de::ValueDeserializer::parse(text)
            .and_then(Value::deserialize)
            .unwrap_or_else(|_| Value::String(text.to_owned()));
        GivenValue { value, place: SettingPlace::Override(format!("{key}={text}")) }
    }
}

/// The values that a generator is built from.
pub struct Parameters<'a> {
    workload: &'a str,
    generator: &'static GeneratorEntry,
    given: &'a BTreeMap<String, GivenValue>,
}

/// An older name of words in a list, as it is set.
pub(crate) struct SetAlias {
    pub(crate) name: &'static str,
    pub(crate) word: &'static str,
    /// The word that adds nothing to the list.
    pub(crate) default: &'static str,
    /// All words that it takes.
    pub(crate) words: &'static [&'static str],
}

impl<'a> Parameters<'a> {
    /// The given values. Names that the generator does not declare are errors.
    pub fn new(
        workload: &'a str,
        generator: &'static GeneratorEntry,
        given: &'a BTreeMap<String, GivenValue>,
    ) -> Result<Self, WorkloadError> {
        let known = || generator.parameters.iter().map(|parameter| parameter.name);
        let unknown = given.iter().find(|(name, _)| known().all(|known| known != name.as_str()));
        let Some((name, given)) = unknown else { return Ok(Parameters { workload, generator, given }) };
        let current = generator.parameters.iter().filter(|parameter| !parameter.is_alias());
        let suggestion = nearest(name, current.map(|parameter| parameter.name));
        let reason =
            format!("generator '{}' has no parameter '{name}'{}", generator.name, did_you_mean(suggestion.as_deref()));
        Err(WorkloadError::Invalid { place: given.place.clone(), reason })
    }

    /// The value of a parameter that takes a whole number.
    pub fn count(&self, name: &str) -> Result<u32, WorkloadError> {
        self.read(name, |value, declared| match declared {
            // "1e4" is a float in TOML and a whole number to people.
            ParameterValues::Count { least, most } => as_number(value)
                .filter(|number| number.fract() == 0.0 && (f64::from(least)..=f64::from(most)).contains(number))
                .map(|number| number as u32),
            _ => None,
        })
    }

    /// The value of a parameter that takes an amount of memory, in bytes.
    pub fn size(&self, name: &str) -> Result<u64, WorkloadError> {
        self.read(name, |value, declared| match (value, declared) {
            (Value::Integer(_) | Value::String(_), ParameterValues::Size { least, most }) => {
                let Bytes(bytes) = Bytes::deserialize(value.clone()).ok()?;
                (least..=most).contains(&bytes).then_some(bytes)
            }
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
        self.read(name, |value, declared| match declared {
            ParameterValues::Number { least, most } => {
                as_number(value).filter(|number| (least..=most).contains(number))
            }
            _ => None,
        })
    }

    /// The value of a parameter that takes one of some words.
    pub fn choice(&self, name: &str) -> Result<&'static str, WorkloadError> {
        self.read(name, |value, declared| match (value, declared) {
            (Value::String(text), ParameterValues::Choice(words) | ParameterValues::Alias { words, .. }) => {
                words.iter().find(|word| *word == text).copied()
            }
            _ => None,
        })
    }

    /// Whether the generator declares a parameter.
    #[must_use]
    pub(crate) fn declares(&self, name: &str) -> bool {
        self.generator.parameters.iter().any(|parameter| parameter.name == name)
    }

    /// The parameters that are older names and that are set.
    pub(crate) fn aliases(&self) -> Result<Vec<SetAlias>, WorkloadError> {
        let set = self.generator.parameters.iter().filter(|known| self.given.contains_key(known.name));
        let alias = |known: &'static Parameter| {
            let ParameterValues::Alias { words, .. } = known.values else { return None };
            let Parameter { name, default, .. } = *known;
            Some(self.choice(name).map(|word| SetAlias { name, word, default, words }))
        };
        set.filter_map(alias).collect()
    }

    /// The value of a parameter that takes a text, which the caller checks.
    pub fn text(&self, name: &str) -> Result<String, WorkloadError> {
        self.read(name, |value, declared| match (value, declared) {
            (Value::String(text), ParameterValues::Text(_)) => Some(text.clone()),
            _ => None,
        })
    }

    /// The value of a parameter that takes a list of words. Numbers are words, too.
    pub fn words(&self, name: &str) -> Result<Vec<String>, WorkloadError> {
        let as_word = |item: &Value| match item {
            Value::String(word) => Some(word.clone()),
            Value::Integer(number) => Some(number.to_string()),
            _ => None,
        };
        let words: Vec<String> = self.read(name, |value, declared| match (value, declared) {
            (Value::String(text), ParameterValues::Words { .. }) => {
                Some(text.split(',').map(|word| word.trim().to_owned()).collect())
            }
            (Value::Array(items), ParameterValues::Words { .. }) => items.iter().map(as_word).collect(),
            (_, ParameterValues::Words { .. }) => as_word(value).map(|word| vec![word]),
            _ => None,
        })?;
        Ok(words.into_iter().filter(|word| !word.is_empty()).collect())
    }

    /// The error for a word in a list that the generator does not know.
    #[must_use]
    pub fn refuse_word(&self, name: &str, word: &str, known: &[&str]) -> WorkloadError {
        let suggestion = nearest(word, known.iter().copied());
        let hint = did_you_mean_among(suggestion.as_deref(), known.iter().copied());
        let reason = format!("'{name}' has no '{word}'{hint}");
        match self.given.get(name) {
            Some(given) => WorkloadError::Invalid { place: given.place.clone(), reason },
            None => self.refuse(reason),
        }
    }

    /// The error for values that are right each by itself and wrong together.
    #[must_use]
    pub fn refuse(&self, reason: impl Into<String>) -> WorkloadError {
        WorkloadError::Invalid { place: SettingPlace::Workload(self.workload.to_owned()), reason: reason.into() }
    }

    /// Converts the given value or the default; `convert` returns nothing where the declaration does not allow it.
    fn read<T>(&self, name: &str, convert: impl Fn(&Value, ParameterValues) -> Option<T>) -> Result<T, WorkloadError> {
        let Some(parameter) = self.generator.parameters.iter().find(|parameter| parameter.name == name) else {
            return Err(self.refuse(format!("generator '{}' does not declare '{name}'", self.generator.name)));
        };
        let given = self.given.get(name).cloned();
        let GivenValue { value, place } = given.unwrap_or_else(|| GivenValue::typed(name, parameter.default));
        convert(&value, parameter.values).ok_or_else(|| {
            let reason = format!("'{name}' takes {}, not {}", parameter.values, in_words(&value));
            WorkloadError::Invalid { place, reason }
        })
    }
}

fn as_number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
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

/// A workload that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No recipe has this name, neither in the binary nor in the current folder.
    #[error("unknown workload '{name}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().map(String::as_str)))]
    UnknownWorkload {
        /// The name.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
        /// All names.
        known: Vec<String>,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A recipe that is not valid, or a parameter that its generator refuses.
    #[error("{place}: {reason}")]
    Invalid {
        /// Where it was set.
        place: SettingPlace,
        /// Why.
        reason: String,
    },
}

/// Where a setting was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingPlace {
    /// In a file.
    File {
        /// Which file.
        file: String,
        /// Which line, from 1.
        line: usize,
        /// Which character of the line, from 1.
        column: usize,
    },
    /// In an override, as `key=value`.
    Override(String),
    /// In no single place: the parameters of this workload do not fit together.
    Workload(String),
}

impl SettingPlace {
    /// The place of the byte `offset` of a file's text.
    #[must_use]
    pub fn in_file(file: &str, text: &str, offset: usize) -> SettingPlace {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        SettingPlace::File {
            file: file.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for SettingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingPlace::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            SettingPlace::Override(text) => write!(f, "parameter {text}"),
            SettingPlace::Workload(name) => write!(f, "workload '{name}'"),
        }
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
        count_weights: None,
    };

    fn given(pairs: &[(&str, &str)]) -> BTreeMap<String, GivenValue> {
        pairs.iter().map(|&(key, text)| (key.to_owned(), GivenValue::typed(key, text))).collect()
    }

    fn read<T>(pairs: &[(&str, &str)], get: impl Fn(&Parameters<'_>) -> Result<T, WorkloadError>) -> Result<T, String> {
        let given = given(pairs);
        Parameters::new("w", &ENTRY, &given).and_then(|parameters| get(&parameters)).map_err(|error| error.to_string())
    }

    #[test]
    fn typed_values_are_read() {
        assert_eq!(read(&[("layers", "1e2")], |p| p.count("layers")), Ok(100));
        assert_eq!(read(&[("layers", "1_0")], |p| p.count("layers")), Ok(10));
        assert_eq!(read(&[("max_bytes", "20MiB")], |p| p.size("max_bytes")), Ok(20 * MIB));
        assert_eq!(read(&[("max_bytes", "\"20MiB\"")], |p| p.size("max_bytes")), Ok(20 * MIB));
        assert_eq!(read(&[("max_bytes", "4096")], |p| p.size("max_bytes")), Ok(4096));
        assert_eq!(read(&[("chance", "1")], |p| p.number("chance")), Ok(1.0));
    }

    #[test]
    fn words_are_read() {
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
    fn choice_takes_its_words() {
        assert_eq!(read(&[("mode", "infer")], |p| p.choice("mode")), Ok("infer"));
        assert_eq!(read(&[], |p| p.choice("mode")), Ok("train"));
        assert_eq!(
            read(&[("mode", "dream")], |p| p.choice("mode")).unwrap_err(),
            "parameter mode=dream: 'mode' takes one of train, infer, not the text 'dream'"
        );
        assert!(read(&[], |p| p.choice("layers")).is_err(), "a count is no choice");
    }

    #[test]
    fn unset_values_have_their_default() {
        assert_eq!(read(&[], |p| p.count("layers")), Ok(12));
        assert_eq!(read(&[], |p| p.size("max_bytes")), Ok(4 * MIB));
        assert_eq!(read(&[], |p| p.number("chance")), Ok(0.5));
    }

    #[test]
    fn unknown_name_names_the_nearest() {
        assert_eq!(
            read(&[("layer", "3")], |p| p.count("layers")).unwrap_err(),
            "parameter layer=3: generator 'example' has no parameter 'layer'; did you mean 'layers'?"
        );
    }

    #[test]
    fn wrong_types_are_refused() {
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
    fn values_out_of_range_are_refused() {
        for (name, text) in [("layers", "0"), ("layers", "101"), ("layers", "-3"), ("layers", "9223372036854775807")] {
            assert_eq!(
                read(&[(name, text)], |p| p.count("layers")).unwrap_err(),
                format!("parameter layers={text}: 'layers' takes a whole number from 1 to 100, not {text}")
            );
        }
        assert!(
            read(&[("max_bytes", "2GiB")], |p| p.size("max_bytes"))
                .unwrap_err()
                .ends_with("1.00 GiB, not the text '2GiB'")
        );
        assert!(read(&[("chance", "nan")], |p| p.number("chance")).unwrap_err().ends_with("not nan"));
    }
}
