//! What follows `plugin:`, taken apart.

use crate::strategy::{SpecError, StrategyEntry, parameters};

/// A file, and the symbols that were asked for by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wish<'a> {
    pub(super) file: &'a str,
    pub(super) alloc: Option<&'a str>,
    pub(super) free: Option<&'a str>,
    pub(super) record_stream: Option<&'a str>,
    pub(super) reset: Option<&'a str>,
    pub(super) reserved: Option<&'a str>,
}

impl<'a> Wish<'a> {
    /// Reads `FILE[,key:value]..`. The file comes first, as what people know best.
    pub(super) fn read(entry: &StrategyEntry, text: &'a str) -> Result<Wish<'a>, SpecError> {
        let (file, settings) = text.split_once(',').unwrap_or((text, ""));
        let refuse = |reason: &str| SpecError::BadParameters { strategy: entry.name, reason: reason.to_owned() };
        let mut wish = Wish { file: file.trim(), ..Wish::default() };
        if wish.file.is_empty() {
            return Err(refuse("which file? Write plugin:FILE"));
        }
        parameters::read(entry, settings, |setting| {
            let place = match setting.key {
                "alloc" => &mut wish.alloc,
                "free" => &mut wish.free,
                "record_stream" => &mut wish.record_stream,
                "reset" => &mut wish.reset,
                _ => &mut wish.reserved,
            };
            *place = Some(setting.value);
            Ok(())
        })?;
        if wish.alloc.is_some() != wish.free.is_some() {
            return Err(refuse("'alloc' and 'free' belong together: name both or neither"));
        }
        Ok(wish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ENTRY;

    #[test]
    fn the_file_comes_first_and_symbols_by_name() {
        let wish = Wish::read(&ENTRY, "./a.so,alloc:take, free:give ,reserved:held").unwrap();
        let expected =
            Wish { file: "./a.so", alloc: Some("take"), free: Some("give"), reserved: Some("held"), ..Wish::default() };
        assert_eq!(wish, expected);
    }

    #[test]
    fn what_is_missing_or_misspelt_is_said() {
        for (text, words) in [
            ("", "which file?"),
            (",alloc:a,free:b", "which file?"),
            ("a.so,alloc:a", "'alloc' and 'free' belong together"),
            ("a.so,aloc:a", "unknown parameter 'aloc'; did you mean 'alloc'?"),
            ("a.so,take", "'take' is not of the form key:value"),
        ] {
            let message = Wish::read(&ENTRY, text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}
