//! Checksums of the files in a run folder, so that a file that was changed or damaged is noticed when it is read.

use std::{fs, path::Path};

use flate2::Crc;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::ReportError;

/// The last column of the CSV files in a run folder: the CRC-32 of the names of the columns and the cells of the row, as 8
/// hexadecimal digits.
pub const ROW_CHECKSUM: &str = "row_crc32";
/// The last field of the JSON documents in a run folder: the CRC-32 of the other fields.
const DOCUMENT_CHECKSUM: &str = "crc32";

/// The checksum of a row. Each text counts with its length, so that a byte cannot move from one cell to the next unnoticed.
pub(super) fn of_row<'a>(
    columns: impl IntoIterator<Item = &'a str>,
    cells: impl IntoIterator<Item = &'a str>,
) -> String {
    let mut checksum = Crc::new();
    for text in columns.into_iter().chain(cells) {
        checksum.update(&(text.len() as u64).to_le_bytes());
        checksum.update(text.as_bytes());
    }
    format!("{:08x}", checksum.sum())
}

/// A JSON document with its checksum.
#[derive(Serialize)]
struct SealedDocument<'a, T> {
    #[serde(flatten)]
    document: &'a T,
    crc32: String,
}

/// The text of a JSON document with its checksum. The document is an object.
pub(super) fn sealed(path: &Path, document: &impl Serialize) -> Result<String, ReportError> {
    let value = serde_json::to_value(document).map_err(ReportError::json(path))?;
    let sealed = SealedDocument { document, crc32: of_document(&value) };
    let text = serde_json::to_string_pretty(&sealed).map_err(ReportError::json(path))?;
    Ok(text + "\n")
}

/// A JSON document of a run folder, and whether it has a checksum; older releases wrote none. A wrong one is an error.
pub(super) fn read_document<T: DeserializeOwned>(path: &Path) -> Result<(T, bool), ReportError> {
    let text = fs::read(path).map_err(ReportError::io(path))?;
    let mut value: Value = serde_json::from_slice(&text).map_err(ReportError::json(path))?;
    let noted = value.as_object_mut().and_then(|fields| fields.remove(DOCUMENT_CHECKSUM));
    if noted.as_ref().is_some_and(|noted| noted.as_str() != Some(&of_document(&value))) {
        return Err(ReportError::ChangedFile { path: path.to_owned() });
    }
    let document = serde_json::from_slice(&text).map_err(ReportError::json(path))?;
    Ok((document, noted.is_some()))
}

/// The checksum of a document. `Value` sorts its keys, so the order and the white space of the file do not matter.
fn of_document(document: &Value) -> String {
    let mut checksum = Crc::new();
    checksum.update(document.to_string().as_bytes());
    format!("{:08x}", checksum.sum())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn row_checksum_depends_on_every_cell_and_name() {
        let known = of_row(["a", "b"], ["1", "2"]);
        assert_eq!(known.len(), 8);
        for (columns, cells) in [
            (["a", "b"], ["1", "3"]),
            (["a", "b"], ["12", ""]),
            (["b", "a"], ["1", "2"]),
            (["a", "c"], ["1", "2"]),
            (["a", "b"], ["2", "1"]),
        ] {
            assert_ne!(of_row(columns, cells), known, "{columns:?} {cells:?}");
        }
    }

    #[test]
    fn every_changed_byte_of_a_document_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let document = json!({ "share": 0.1, "seed": u64::MAX, "names": ["a\nb", "c"], "none": null });
        let whole = sealed(&path, &document).unwrap();
        fs::write(&path, &whole).unwrap();
        assert!(read_document::<Value>(&path).unwrap().1);
        let mut noticed = 0;
        for place in 0..whole.len() {
            for bit in 0..7 {
                let mut bytes = whole.clone().into_bytes();
                bytes[place] ^= 1 << bit;
                fs::write(&path, &bytes).unwrap();
                match read_document::<Value>(&path) {
                    Err(_) => noticed += 1,
                    Ok((read, is_sealed)) => {
                        let same =
                            document.as_object().unwrap().iter().all(|(key, value)| read.get(key) == Some(value));
                        let name = String::from_utf8_lossy(&bytes).into_owned();
                        assert!(same && (is_sealed || !name.contains("\"crc32\"")), "byte {place}, bit {bit}: {name}");
                    }
                }
            }
        }
        assert!(noticed > whole.len() * 5, "{noticed} of {}", whole.len() * 7);
    }

    #[test]
    fn documents_of_older_releases_have_no_checksum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(&path, "{\"a\": 1}").unwrap();
        let (document, is_sealed): (Value, bool) = read_document(&path).unwrap();
        assert_eq!((document, is_sealed), (json!({ "a": 1 }), false));
    }
}
