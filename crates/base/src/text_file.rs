//! Small files that people write, such as suites and workloads: read within a bound, and checked for control characters.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use crate::{Bytes, escaped, escaped_lines};

/// The largest text file. The largest one of this repository has 28 KiB.
pub const LARGEST_TEXT_FILE: u64 = 1 << 20;

/// Reads a file of at most `most_bytes`. Pipes and devices are read up to the bound, so `/dev/zero` is an error, too.
pub fn read_within(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most_bytes {
        let reason = format!("the file is larger than {}, the most that is read of such a file", Bytes(most_bytes));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

/// Reads a text file of at most [`LARGEST_TEXT_FILE`] bytes.
pub fn read_text_file(path: &Path) -> io::Result<String> {
    String::from_utf8(read_within(path, LARGEST_TEXT_FILE)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the file is not UTF-8 text"))
}

/// Parses the text of a TOML file. Names and values in it reach terminals and other files, so one with a control, line-end or
/// direction character is refused. The error is the reason; it contains no such character but the ends of its own lines.
pub fn parse_toml<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, TomlRefusal> {
    // A file with a syntax error is reported below.
    if let Ok(table) = text.parse::<toml::Table>()
        && let Some(unsafe_text) = unsafe_text(&toml::Value::Table(table))
    {
        let reason =
            format!("\"{}\" contains a control character; write plain text in one line", escaped(&unsafe_text));
        return Err(TomlRefusal { reason: reason.clone(), shown: reason, offset: None });
    }
    toml::from_str(text).map_err(|error: toml::de::Error| TomlRefusal {
        reason: escaped(&error.message().replace('\n', "; ")).into_owned(),
        shown: escaped_lines(&error.to_string()).into_owned(),
        offset: error.span().map(|span| span.start),
    })
}

/// Why a TOML file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{shown}")]
pub struct TomlRefusal {
    /// The reason in one line, without its place.
    pub reason: String,
    /// The reason with the line of the file.
    shown: String,
    /// Where in the text, if it is one place.
    pub offset: Option<usize>,
}

/// The first key or text with an unsafe character.
fn unsafe_text(value: &toml::Value) -> Option<String> {
    let check = |text: &str| (escaped(text) != text).then(|| text.to_owned());
    match value {
        toml::Value::String(text) => check(text),
        toml::Value::Array(items) => items.iter().find_map(unsafe_text),
        toml::Value::Table(table) => table.iter().find_map(|(key, value)| check(key).or_else(|| unsafe_text(value))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use super::*;

    #[test]
    fn files_are_read_up_to_the_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        fs::write(&path, "abcd").unwrap();
        assert_eq!(read_within(&path, 4).unwrap(), b"abcd");
        assert_eq!(read_within(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(read_text_file(&path).unwrap(), "abcd");
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text_file(&path).unwrap_err().to_string(), "the file is not UTF-8 text");
        assert!(read_text_file(folder.path()).is_err());
        assert!(read_text_file(&folder.path().join("b")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn an_endless_device_is_refused() {
        let refusal = read_text_file(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(refusal, "the file is larger than 1.00 MiB, the most that is read of such a file");
    }

    #[test]
    fn control_characters_are_refused_wherever_they_are() {
        type Anything = BTreeMap<String, toml::Value>;
        assert!(parse_toml::<Anything>("a = 'naïve'\n[b]\nc = ['x', 2]\n").is_ok());
        for text in [
            r#"a = "x\u001b[2K""#,
            r#"a = "two\nlines""#,
            r#""a\u202e" = 1"#,
            r#"[[b]]
               c = [["\u009b"]]"#,
            "a = \"\u{9b}\"",
        ] {
            let refusal = parse_toml::<Anything>(text).unwrap_err();
            assert!(refusal.to_string().contains("contains a control character"), "{refusal}");
            assert_eq!(escaped(&refusal.to_string()), refusal.to_string());
        }
    }

    #[test]
    fn syntax_errors_do_not_repeat_control_characters() {
        for text in ["a = 1\u{9b}2K", "a = \"b\rc\"", "\u{1b}[2K"] {
            let refusal = parse_toml::<BTreeMap<String, i64>>(text).unwrap_err();
            assert_eq!(escaped_lines(&refusal.to_string()), refusal.to_string());
            assert!(refusal.offset.is_some());
        }
    }
}
