//! Text that comes from a file. It may contain anything, so it is shown only with its control characters escaped.

use std::{borrow::Cow, fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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

#[cfg(test)]
mod tests {
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
}
