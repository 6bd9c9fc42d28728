//! Command lines that can be pasted into a shell.

/// Options that belong to one process of a run; all of them take a value.
pub const OPTIONS_OF_ONE_PROCESS: [&str; 4] = ["--output", "-o", "--resume", "--partition"];

/// A word, in quotes where a shell would interpret it.
pub fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "_.-/:,=%+@".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The words of a command line without these options and their values.
pub fn without<'a>(words: &'a [String], options: &[&str]) -> Vec<&'a str> {
    // The value may be attached: `--output=x`, `-ox`.
    let has_value = |word: &str| {
        options.iter().any(|option| {
            let value = word.strip_prefix(option).filter(|value| !value.is_empty());
            value.is_some_and(|value| value.starts_with('=') || !option.starts_with("--"))
        })
    };
    let mut kept = Vec::new();
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if options.contains(&word) {
            words.next();
        } else if !has_value(word) {
            kept.push(word);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("caching:expandable_segments:True"), "caching:expandable_segments:True");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn options_go_with_their_values() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for given in ["run a --output x --pack", "run a -o x --pack", "run a -ox --pack", "run a --output=x --pack"] {
            assert_eq!(without(&words(given), &["--output", "-o"]), ["run", "a", "--pack"], "{given}");
        }
        assert_eq!(without(&words("run --outputs x"), &["--output", "-o"]), ["run", "--outputs", "x"]);
        assert_eq!(without(&words("run -o"), &["-o"]), ["run"]);
    }
}
