//! Text that comes from a file, and paths as text. It may contain anything, so it is shown only with its control characters escaped.
//! Small files that people write, such as suites and workloads, are read within a bound and checked for control characters.

use std::{
    borrow::Cow,
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Bytes;

/// A text from a file, such as the name of a function in a recording.
///
/// Its `Display` escapes everything that could move the cursor, end a line or reorder the characters around it, so that a name
/// cannot imitate the output of the program. JSON and CSV, which quote it, get the text as it is.
///
/// ```
/// use oomph_base::FileText;
/// let name = FileText::from("forward\r\u{1b}[2K\nexport LD_PRELOAD=x");
/// assert_eq!(name.to_string(), r"forward\r\u{1b}[2K\nexport LD_PRELOAD=x");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileText(Arc<str>);

impl FileText {
    /// The text as it is in the file. Never print it.
    #[must_use]
    pub fn raw(&self) -> &str {
        &self.0
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl PartialEq<&str> for FileText {
    fn eq(&self, other: &&str) -> bool {
        &*self.0 == *other
    }
}

impl From<&str> for FileText {
    fn from(text: &str) -> FileText {
        FileText(text.into())
    }
}

impl From<String> for FileText {
    fn from(text: String) -> FileText {
        FileText(text.into())
    }
}

impl From<Arc<str>> for FileText {
    fn from(text: Arc<str>) -> FileText {
        FileText(text)
    }
}

impl fmt::Display for FileText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&escaped(&self.0))
    }
}

/// The text as it is.
impl Serialize for FileText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for FileText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FileText, D::Error> {
        String::deserialize(deserializer).map(FileText::from)
    }
}

/// A text with control, line-end and direction characters written as escapes such as `\n` and `\u{1b}`.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    escaped_where(text, is_unsafe)
}

/// Like [`escaped`], for a text of several lines.
#[must_use]
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escaped_where(text, |character| is_unsafe(character) && !matches!(character, '\n' | '\t'))
}

/// A text as plain text in a Markdown document: it cannot end a cell, and is no link, image or HTML.
#[must_use]
pub fn escaped_markdown(text: &str) -> String {
    escaped(text).replace('|', r"\|").replace('<', r"\<").replace("](", r"]\(").replace("][", r"]\[")
}

fn escaped_where(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_escaped(character) {
            safe.extend(character.escape_default());
        } else {
            safe.push(character);
        }
    }
    Cow::Owned(safe)
}

/// Whether a terminal would act on a character instead of showing it: control characters, line and paragraph separators, and
/// characters that change the direction of the text around them (Unicode, UAX 9, explicit formatting) or are not visible.
fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{00ad}' | '\u{061c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

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

/// A path as text. Text that is UTF-8 stays as it is.
///
/// A case names its source in JSON, and JSON has only text. A byte that is not UTF-8 is written as a zero character and two
/// hexadecimal digits: no path contains a zero.
///
/// ```
/// use oomph_base::{path_text, text_path};
/// use std::path::Path;
/// assert_eq!(path_text(Path::new("runs/naïve.pickle")), "runs/naïve.pickle");
/// # #[cfg(unix)] {
/// use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
/// let odd = Path::new(OsStr::from_bytes(b"run-\xfe.pickle"));
/// assert_eq!(text_path(&path_text(odd)), odd);
/// # }
/// ```
#[must_use]
pub fn path_text(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_encoded_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = fmt::Write::write_fmt(&mut text, format_args!("\0{byte:02x}"));
        }
    }
    text
}

/// The path of a text of [`path_text`]. Its `display` is for people.
#[must_use]
pub fn text_path(text: &str) -> PathBuf {
    let mut parts = text.split('\0');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            // Not from `path_text`: no file has such a name.
            None => return PathBuf::from(text),
        }
    }
    of_bytes(bytes, text)
}

#[cfg(unix)]
fn of_bytes(bytes: Vec<u8>, _text: &str) -> PathBuf {
    use std::{ffi::OsString, os::unix::ffi::OsStringExt};

    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(not(unix))]
fn of_bytes(bytes: Vec<u8>, text: &str) -> PathBuf {
    String::from_utf8(bytes).map_or_else(|_| PathBuf::from(text), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn harmless_text_is_not_copied() {
        for text in ["", "forward", "a/b.py:12 <lambda>", "naïve 模型 \u{1f600}", r"C:\n"] {
            assert!(matches!(escaped(text), Cow::Borrowed(_)), "{text}");
        }
    }

    #[test]
    fn dangerous_characters_are_escaped() {
        for (text, shown) in [
            ("\u{1b}[3A\r\u{1b}[2K", r"\u{1b}[3A\r\u{1b}[2K"),
            ("a\nb\tc", r"a\nb\tc"),
            ("\u{202e}gnp.exe", r"\u{202e}gnp.exe"),
            ("\u{9b}2K\u{7f}\0", r"\u{9b}2K\u{7f}\u{0}"),
            ("\u{2028}\u{2066}\u{feff}", r"\u{2028}\u{2066}\u{feff}"),
        ] {
            assert_eq!(FileText::from(text).to_string(), shown);
        }
    }

    #[test]
    fn lines_stay_lines() {
        assert_eq!(escaped_lines("a\n\tb\u{1b}[A\r\n"), "a\n\tb\\u{1b}[A\\r\n");
    }

    #[test]
    fn markdown_is_text() {
        assert_eq!(escaped_markdown("a | ![x](y) <b>\n"), r"a \| ![x]\(y) \<b>\n");
        assert_eq!(escaped_markdown("forward[0] (12 MiB) `x`"), "forward[0] (12 MiB) `x`");
    }

    #[test]
    fn json_gets_the_text_as_it_is() {
        let text = FileText::from("a\u{1b}\nb");
        assert_eq!(serde_json::from_str::<String>(&serde_json::to_string(&text).unwrap()).unwrap(), text.raw());
    }

    proptest! {
        #[test]
        fn shown_text_has_one_line_and_no_control_characters(text in any::<String>()) {
            let shown = FileText::from(text).to_string();
            prop_assert!(!shown.contains(is_unsafe));
        }
    }

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

    proptest! {
        #[cfg(unix)]
        #[test]
        fn every_path_survives(bytes in prop::collection::vec(1..=u8::MAX, 0..40)) {
            let path = Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&bytes));
            let text = path_text(path);
            prop_assert_eq!(text_path(&text), path);
            prop_assert_eq!(path.to_str().is_some(), !text.contains('\0'));
        }

        #[test]
        fn every_text_is_a_path(text in ".*") {
            let path = text_path(&text);
            prop_assert!(text.contains('\0') || path == Path::new(&text));
        }
    }
}
