//! The files `cases/*.json.gz` of a run folder: what is too large for a row.

use std::{
    fs,
    io::{self, BufRead, Read, Write},
    path::{Path, PathBuf},
};

use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};

use super::ReportError;
use crate::measure::{CaseDetail, file_stem};

/// Whether a case has a detail file; published folders have none.
pub(super) fn has_detail(folder: &Path, case_id: &str) -> bool {
    detail_path(folder, case_id).is_file()
}

/// Whether the detail file of a case is missing or unreadable. Published folders have no such files
/// and are not damaged.
pub(super) fn is_damaged(folder: &Path, case_id: &str) -> bool {
    folder.join("cases").is_dir() && read_detail(folder, case_id).is_err()
}

/// The path of the detail file of a case.
pub(super) fn detail_path(folder: &Path, case_id: &str) -> PathBuf {
    folder.join("cases").join(format!("{}.json.gz", file_stem(case_id)))
}

/// A detail file unpacks to at most this many bytes, and this many times its own size: few bytes cannot take all memory.
pub(super) const LEAST_DETAIL_LIMIT: u64 = 64 << 20;
const MOST_COMPRESSION: u64 = 64;

/// The detail of a case. The file is read to its end, where gzip has its checksum.
pub fn read_detail(folder: &Path, case_id: &str) -> Result<CaseDetail, ReportError> {
    let path = detail_path(folder, case_id);
    let file = fs::File::open(&path).map_err(ReportError::io(&path))?;
    let packed_bytes = file.metadata().map_err(ReportError::io(&path))?.len();
    let most_bytes = LEAST_DETAIL_LIMIT.max(packed_bytes.saturating_mul(MOST_COMPRESSION));
    let mut decoder = GzDecoder::new(io::BufReader::new(file));
    let mut text = Vec::new();
    decoder.by_ref().take(most_bytes + 1).read_to_end(&mut text).map_err(ReportError::io(&path))?;
    if text.len() as u64 > most_bytes {
        return Err(ReportError::DetailTooLarge { path, most_bytes });
    }
    if !decoder.get_mut().fill_buf().map_err(ReportError::io(&path))?.is_empty() {
        return Err(ReportError::ChangedFile { path });
    }
    let detail: CaseDetail = serde_json::from_slice(&text).map_err(ReportError::json(&path))?;
    match detail.case_id == case_id {
        true => Ok(detail),
        false => Err(ReportError::OtherDetail { path, case_id: detail.case_id.into() }),
    }
}

/// The file of a case. The gzip header has no time stamp, so that the same case gives the same bytes.
pub(super) fn compressed(detail: &CaseDetail, path: &Path) -> Result<Vec<u8>, ReportError> {
    // In one write: the encoder clears the rest of its buffer at every write, and serde_json writes
    // word by word.
    let mut json = serde_json::to_vec(detail).map_err(ReportError::json(path))?;
    json.push(b'\n');
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&json).and_then(|()| encoder.finish()).map_err(ReportError::io(path))
}
