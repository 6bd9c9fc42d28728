//! The words of a command with placeholders, and the search for the largest value that fits.

use std::{ffi::OsString, str::FromStr};

/// Why a search cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// The text is not a range.
    #[error("--largest {0}: write NAME=LO..HI, such as batch=1..256, with LO not above HI")]
    Range(String),
    /// The command does not use the value.
    #[error("--largest {0}: the command does not contain {{{0}}}, so every run would be the same")]
    Unused(String),
    /// Quotes are not closed.
    #[error("--try \"{0}\": a quote is not closed")]
    Quote(String),
}

/// The values that are searched: whole numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchedValue {
    /// The name between braces.
    pub name: String,
    /// The smallest value.
    pub low: u64,
    /// The largest value.
    pub high: u64,
}

impl FromStr for SearchedValue {
    type Err = SearchError;

    /// Reads `batch=1..256`.
    fn from_str(text: &str) -> Result<SearchedValue, SearchError> {
        let parse = || {
            let (name, range) = text.split_once('=')?;
            let (low, high) = range.split_once("..")?;
            let (low, high) = (low.trim().parse().ok()?, high.trim_start_matches('=').trim().parse().ok()?);
            let named = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
            (named && low <= high).then(|| SearchedValue { name: name.to_owned(), low, high })
        };
        parse().ok_or_else(|| SearchError::Range(text.to_owned()))
    }
}

impl SearchedValue {
    /// Whether a word contains the placeholder.
    #[must_use]
    pub fn is_in(&self, words: &[OsString]) -> bool {
        words.iter().any(|word| word.to_str().is_some_and(|word| word.contains(&self.placeholder())))
    }

    /// The words with the value in the place of the placeholder.
    #[must_use]
    pub fn set(&self, words: &[OsString], value: u64) -> Vec<OsString> {
        replaced(words, &self.placeholder(), &value.to_string())
    }

    fn placeholder(&self) -> String {
        format!("{{{}}}", self.name)
    }

    /// The largest value that fits, by bisection: what fits with a value is taken to fit with a smaller one. `fits` answers
    /// for one value; `Ok(None)` if the smallest does not fit.
    pub fn largest<E>(&self, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
        if !fits(self.low)? {
            return Ok(None);
        }
        if self.low == self.high || fits(self.high)? {
            return Ok(Some(self.high));
        }
        let (mut good, mut bad) = (self.low, self.high);
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle)? { good = middle } else { bad = middle }
        }
        Ok(Some(good))
    }
}

/// Where `--try` puts its words; without it they go to the end.
const TRY: &str = "{try}";

/// The words of a variant: in the place of `{try}`, or at the end.
#[must_use]
pub fn with_variant(words: &[OsString], variant: &[String]) -> Vec<OsString> {
    let Some(place) = words.iter().position(|word| word == TRY) else {
        return words.iter().cloned().chain(variant.iter().map(OsString::from)).collect();
    };
    let (before, after) = words.split_at(place);
    before.iter().cloned().chain(variant.iter().map(OsString::from)).chain(after[1..].iter().cloned()).collect()
}

/// The words of a text, as a shell would divide it: at blanks outside of quotes.
pub fn divided(text: &str) -> Result<Vec<String>, SearchError> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in text.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    if quote.is_some() { Err(SearchError::Quote(text.to_owned())) } else { Ok(words) }
}

fn replaced(words: &[OsString], from: &str, to: &str) -> Vec<OsString> {
    words.iter().map(|word| word.to_str().map_or_else(|| word.clone(), |text| text.replace(from, to).into())).collect()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn ranges_are_read() {
        let value: SearchedValue = "batch=1..256".parse().unwrap();
        assert_eq!((value.name.as_str(), value.low, value.high), ("batch", 1, 256));
        for bad in ["batch", "batch=1", "=1..2", "batch=2..1", "batch=a..b", "ba tch=1..2", "batch=-1..3"] {
            assert_eq!(bad.parse::<SearchedValue>(), Err(SearchError::Range(bad.to_owned())));
        }
    }

    #[test]
    fn the_largest_is_found_with_few_runs() {
        let value: SearchedValue = "n=1..256".parse().unwrap();
        for most in [0, 1, 2, 77, 255, 256, 1000] {
            let mut runs = 0;
            let found = value.largest(|n| {
                runs += 1;
                Ok::<bool, Infallible>(n <= most)
            });
            assert_eq!(found, Ok((most >= 1).then_some(most.min(256))));
            assert!(runs <= 10, "{runs} runs");
        }
    }

    #[test]
    fn placeholders_are_replaced_inside_words() {
        let words: Vec<OsString> = ["python", "t.py", "--batch={b}", "{b}"].map(OsString::from).into();
        let value: SearchedValue = "b=1..4".parse().unwrap();
        assert!(value.is_in(&words));
        assert_eq!(value.set(&words, 3), ["python", "t.py", "--batch=3", "3"]);
        assert!(!"c=1..4".parse::<SearchedValue>().unwrap().is_in(&words));
    }

    #[test]
    fn variants_go_to_their_place_or_to_the_end() {
        let words: Vec<OsString> = ["python", "{try}", "t.py"].map(OsString::from).into();
        let variant = divided("-X 'two words' --flag=\"a b\" ''").unwrap();
        assert_eq!(variant, ["-X", "two words", "--flag=a b", ""]);
        assert_eq!(with_variant(&words, &variant[..1]), ["python", "-X", "t.py"]);
        assert_eq!(with_variant(&words[2..], &variant[..1]), ["t.py", "-X"]);
        assert_eq!(divided("'open"), Err(SearchError::Quote("'open".to_owned())));
    }
}
