//! Paths as texts that keep names which are not UTF-8.
//!
//! A case names its source in JSON, and JSON has only text. A byte that is no UTF-8 is written as a zero character and two
//! hexadecimal digits: no path contains a zero.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

/// A path as text. Text that is UTF-8 stays as it is.
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
            let _ = write!(text, "\0{byte:02x}");
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

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_path_survives(bytes in prop::collection::vec(1..=u8::MAX, 0..40)) {
            let path = Path::new(OsStr::from_bytes(&bytes));
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
