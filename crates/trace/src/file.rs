//! Files as bytes and lines: decompressed while reading, compressed while writing. Knows no trace format.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
};

use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};
use lzma_rust2::XzReader;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

use crate::TraceError;
use oomph_base::{OutputFile, Progress};

/// The content of a file, decompressed.
pub(crate) type Input<'a> = Box<dyn BufRead + Send + 'a>;

const BUFFER_BYTES: usize = 256 << 10;
/// Nearly three times as fast as the default level on traces, for files 6 % larger.
const COMPRESSION: Compression = Compression::new(3);

/// Opens a file at its beginning. Compression is recognised by content, not by name.
///
/// Reading the file is one stage of `progress`, measured in bytes on disk.
pub(crate) fn open<'a>(path: &Path, progress: &'a dyn Progress) -> Result<Input<'a>, TraceError> {
    let bytes = fs::metadata(path).map_err(|source| TraceError::Io { path: path.to_owned(), source })?.len();
    progress.begin_stage("reading the file", bytes);
    open_counted(path, move |bytes| progress.advance(bytes))
}

/// Like [`open`], calling `on_read` with the number of bytes of every read from disk, before decompression.
pub(crate) fn open_counted<'a>(path: &Path, on_read: impl FnMut(u64) + Send + 'a) -> Result<Input<'a>, TraceError> {
    let failed = |source| TraceError::Io { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(failed)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(refusal(path, "this is a folder, not a trace"));
    }
    if !kind.is_file() {
        return Err(refusal(path, "a trace is read more than once, so it must be a plain file, not a pipe or device"));
    }
    let file = CountedFile { file: File::open(path).map_err(failed)?, on_read };
    decompressed(BufReader::with_capacity(BUFFER_BYTES, file), most_content(metadata.len())).map_err(failed)
}

/// A file that reports every read.
struct CountedFile<F> {
    file: File,
    on_read: F,
}

impl<F: FnMut(u64)> Read for CountedFile<F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(to)?;
        (self.on_read)(count as u64);
        Ok(count)
    }
}

/// The error for a failed read.
#[cold]
pub(crate) fn read_failed(path: &Path, source: io::Error) -> TraceError {
    // Errors without a number come from a decompressor. Its words would not help: they name its internal states.
    if source.raw_os_error().is_some() {
        return TraceError::Io { path: path.to_owned(), source };
    }
    let reason = match source.kind() {
        io::ErrorKind::UnexpectedEof => "the compressed data end too early: the file is truncated",
        io::ErrorKind::FileTooLarge => {
            "the compressed data are more than 512 times as long as the file, as in a file made to fill a disk: \
             decompress it first if you trust it"
        }
        io::ErrorKind::OutOfMemory => "it was compressed with a window above 160 MiB: decompress it first",
        io::ErrorKind::Unsupported => "it was compressed with a method that cannot be read: decompress it first",
        _ => "the compressed data are damaged",
    };
    refusal(path, reason)
}

fn refusal(path: &Path, reason: &str) -> TraceError {
    TraceError::Format { path: path.to_owned(), reason: reason.to_owned() }
}

/// A file in writing, compressed if its name ends in `.gz`. It appears under its name when
/// [`finish`](TraceOutput::finish) is called.
pub(crate) enum TraceOutput {
    Plain(OutputFile),
    Gzip(GzEncoder<OutputFile>),
}

impl TraceOutput {
    pub(crate) fn create(path: &Path) -> io::Result<TraceOutput> {
        let output = OutputFile::create(path)?;
        let compressed = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gz"));
        Ok(if compressed { TraceOutput::Gzip(GzEncoder::new(output, COMPRESSION)) } else { TraceOutput::Plain(output) })
    }

    pub(crate) fn finish(self) -> io::Result<()> {
        match self {
            TraceOutput::Plain(output) => output.finish(),
            TraceOutput::Gzip(output) => output.finish()?.finish(),
        }
    }
}

impl Write for TraceOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            TraceOutput::Plain(output) => output.write(bytes),
            TraceOutput::Gzip(output) => output.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            TraceOutput::Plain(output) => output.flush(),
            // Flushing compressed data costs space, and the file is not read before it is complete.
            TraceOutput::Gzip(_) => Ok(()),
        }
    }
}

const GZIP: [u8; 2] = [0x1f, 0x8b];
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The largest preset of `xz` needs 64 MiB, `zstd --long` 128 MiB.
const LARGEST_DICTIONARY_KIB: u32 = 160 << 10;

/// No line may be longer, so that a file without line ends cannot fill the memory.
pub(crate) const LONGEST_LINE: usize = 1 << 20;

/// The lines of a file, with their numbers, in bounded memory.
pub(crate) struct LineReader<'a> {
    path: PathBuf,
    input: Input<'a>,
    line: Vec<u8>,
    number: u64,
}

impl<'a> LineReader<'a> {
    /// Starts at the first line. `path` is for errors.
    pub(crate) fn new(input: Input<'a>, path: &Path) -> LineReader<'a> {
        LineReader { path: path.to_owned(), input, line: Vec::new(), number: 0 }
    }

    /// The next line without its line end; `None` at the end of the file.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.line.clear();
        (&mut self.input)
            .take(LONGEST_LINE as u64 + 1)
            .read_until(b'\n', &mut self.line)
            .map_err(|error| read_failed(&self.path, error))?;
        if self.line.is_empty() {
            return Ok(None);
        }
        self.number += 1;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
            if self.line.last() == Some(&b'\r') {
                self.line.pop();
            }
        } else if self.line.len() > LONGEST_LINE {
            return Err(self.syntax_error(format!("the line is longer than {LONGEST_LINE} bytes")));
        }
        Ok(Some(&self.line))
    }

    /// The next line that is not blank, without white space around it.
    pub(crate) fn next_text(&mut self) -> Result<Option<&str>, TraceError> {
        while self.next()?.is_some_and(|line| line.trim_ascii().is_empty()) {}
        match std::str::from_utf8(self.line.trim_ascii()) {
            Ok("") => Ok(None),
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(self.syntax_error("")),
        }
    }

    /// An error in the current line.
    #[cold]
    pub(crate) fn syntax_error(&self, reason: impl ToString) -> TraceError {
        let reason = match std::str::from_utf8(&self.line) {
            Ok(_) => reason.to_string(),
            Err(error) => format!("not text at byte {} of the line", error.valid_up_to() + 1),
        };
        TraceError::Syntax { path: self.path.clone(), line: self.number, reason }
    }

    /// An error in the file as a whole.
    pub(crate) fn format_error(&self, reason: impl Into<String>) -> TraceError {
        TraceError::Format { path: self.path.clone(), reason: reason.into() }
    }
}

/// The most bytes that a compressed file of this size may hold, so that a small one is not read for minutes. Recordings and
/// traces compress to a hundredth at best.
fn most_content(file_bytes: u64) -> u64 {
    file_bytes.saturating_mul(512).saturating_add(64 << 20)
}

/// The content of a file. Gzip, xz and zstd are recognised by content. Compressed content is at most `most_bytes` long.
fn decompressed<'a>(mut file: impl BufRead + Send + 'a, most_bytes: u64) -> io::Result<Box<dyn BufRead + Send + 'a>> {
    let head = file.fill_buf()?;
    let decoder: Box<dyn Read + Send + 'a> = if head.starts_with(&GZIP) {
        Box::new(GzipReader { member: Some(GzDecoder::new(file)) })
    } else if head.starts_with(&XZ) {
        Box::new(XzReader::new_mem_limit(file, true, LARGEST_DICTIONARY_KIB))
    } else if head.starts_with(&ZSTD) {
        Box::new(ZstdReader { file, frame: FrameDecoder::new() })
    } else {
        return Ok(Box::new(file));
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, BoundedContent { decoder, left: most_bytes })))
}

/// The content of a compressed file, up to a bound.
struct BoundedContent<R> {
    decoder: R,
    left: u64,
}

impl<R: Read> Read for BoundedContent<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(to)?;
        self.left = self.left.checked_sub(count as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(count)
    }
}

/// Reads all gzip members of a file, and the zeros that tapes and block devices leave at its end. `MultiGzDecoder` refuses
/// them.
struct GzipReader<R: BufRead> {
    /// `None` at the end of the file.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Read for GzipReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        while let Some(member) = &mut self.member {
            let count = member.read(to)?;
            if count > 0 {
                return Ok(count);
            }
            let Some(mut file) = self.member.take().map(GzDecoder::into_inner) else { break };
            if !skip_zeros(&mut file)? {
                self.member = Some(GzDecoder::new(file));
            }
        }
        Ok(0)
    }
}

/// Skips zeros, and says whether the file ends there.
fn skip_zeros(file: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            return Ok(true);
        }
        let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
        let only_zeros = zeros == bytes.len();
        file.consume(zeros);
        if !only_zeros {
            return Ok(false);
        }
    }
}

/// Reads all zstd frames of a file: `zstd` and `pzstd` may write several.
struct ZstdReader<R> {
    file: R,
    frame: FrameDecoder,
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        loop {
            let count = self.frame.read(to)?;
            if count > 0 {
                return Ok(count);
            }
            if !self.frame.is_finished() {
                let some = BlockDecodingStrategy::UptoBytes(BUFFER_BYTES);
                self.frame.decode_blocks(&mut self.file, some).map_err(|error| self.damage(&error))?;
                continue;
            }
            self.compare_checksums()?;
            if self.file.fill_buf()?.is_empty() {
                return Ok(0);
            }
            self.next_frame()?;
        }
    }
}

impl<R: BufRead> ZstdReader<R> {
    fn next_frame(&mut self) -> io::Result<()> {
        match self.frame.reset(&mut self.file) {
            Ok(()) => Ok(()),
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                self.frame = FrameDecoder::new();
                let skipped = io::copy(&mut (&mut self.file).take(u64::from(length)), &mut io::sink())?;
                if skipped < u64::from(length) { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
            }
            Err(error) => Err(self.damage(&error)),
        }
    }

    fn compare_checksums(&self) -> io::Result<()> {
        match self.frame.get_checksum_from_data() {
            Some(written) if self.frame.get_calculated_checksum() != Some(written) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum does not match"))
            }
            _ => Ok(()),
        }
    }

    /// The decoder does not tell a truncated input from a damaged one.
    #[cold]
    fn damage(&mut self, error: &FrameDecoderError) -> io::Error {
        match self.file.fill_buf() {
            Ok([]) => io::ErrorKind::UnexpectedEof.into(),
            _ => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{NoProgress, ProgressLog};

    fn content(path: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        open(path, &NoProgress).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn gzip_is_written_by_name_and_read_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph.gz");
        let mut output = TraceOutput::create(&path).unwrap();
        output.write_all(&[b'x'; 100_000]).unwrap();
        output.finish().unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 1_000);
        let renamed = folder.path().join("a.txt");
        fs::rename(&path, &renamed).unwrap();
        assert_eq!(content(&renamed), [b'x'; 100_000]);
    }

    #[test]
    fn progress_counts_bytes_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph.gz");
        let mut output = TraceOutput::create(&path).unwrap();
        let text: Vec<u8> =
            (0..1_000_000u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        output.write_all(&text).unwrap();
        output.finish().unwrap();
        let on_disk = fs::metadata(&path).unwrap().len();
        let log = ProgressLog::default();
        let mut input = open(&path, &log).unwrap();
        let mut half = vec![0; text.len() / 2];
        input.read_exact(&mut half).unwrap();
        let [(stage, parts, done)] = log.stages().try_into().unwrap();
        assert_eq!((stage.as_str(), parts), ("reading the file", on_disk));
        assert!((on_disk / 3..on_disk * 2 / 3).contains(&done), "{done} of {on_disk}");
        input.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(log.stages(), [(stage, on_disk, on_disk)]);
    }
}

#[cfg(test)]
mod compression_tests {
    use std::io::{Cursor, Write};

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "alloc 1 512\nfree 1\n";
    /// `TEXT` as the `zstd` program writes it, with a checksum.
    const TEXT_ZSTD: [u8; 32] = [
        0x28, 0xb5, 0x2f, 0xfd, 0x24, 0x13, 0x99, 0x00, 0x00, 0x61, 0x6c, 0x6c, 0x6f, 0x63, 0x20, 0x31, 0x20, 0x35,
        0x31, 0x32, 0x0a, 0x66, 0x72, 0x65, 0x65, 0x20, 0x31, 0x0a, 0xb0, 0x67, 0x00, 0x0c,
    ];
    /// `TEXT` as the `xz` program writes it.
    const TEXT_XZ: [u8; 72] = [
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x01, 0x69, 0x22, 0xde, 0x36, 0x02, 0x00, 0x21, 0x01, 0x16, 0x00,
        0x00, 0x00, 0x74, 0x2f, 0xe5, 0xa3, 0x01, 0x00, 0x12, 0x61, 0x6c, 0x6c, 0x6f, 0x63, 0x20, 0x31, 0x20, 0x35,
        0x31, 0x32, 0x0a, 0x66, 0x72, 0x65, 0x65, 0x20, 0x31, 0x0a, 0x00, 0x00, 0x32, 0x77, 0x93, 0x32, 0x00, 0x01,
        0x27, 0x13, 0x90, 0x46, 0xfd, 0x7e, 0x90, 0x42, 0x99, 0x0d, 0x01, 0x00, 0x00, 0x00, 0x00, 0x01, 0x59, 0x5a,
    ];
    /// A zstd frame that holds four bytes for someone else.
    const SKIPPABLE: [u8; 12] = [0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4];

    fn content(file: impl Into<Vec<u8>>) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        decompressed(Cursor::new(file.into()), 1 << 20)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn content_that_is_far_longer_than_its_file_is_refused() {
        assert_eq!(content(gzip(&"a".repeat(1 << 20))).unwrap().len(), 1 << 20);
        let refusal = content(gzip(&"a".repeat((1 << 20) + 1))).unwrap_err();
        assert_eq!(refusal.kind(), io::ErrorKind::FileTooLarge);
        let said = read_failed(Path::new("a.gz"), refusal).to_string();
        assert!(said.contains("more than 512 times as long as the file"), "{said}");
        assert!(most_content(1 << 20) < 1 << 30);
        // Content that is not compressed has no bound.
        assert_eq!(content("a".repeat((1 << 20) + 1)).unwrap().len(), (1 << 20) + 1);
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    }

    #[test]
    fn every_compression_is_recognised_by_content() {
        for file in [gzip(TEXT), TEXT_ZSTD.to_vec(), TEXT_XZ.to_vec(), TEXT.as_bytes().to_vec()] {
            assert_eq!(content(file).unwrap(), TEXT.as_bytes());
        }
    }

    #[test]
    fn one_compressed_part_may_follow_another() {
        let twice = TEXT.repeat(2);
        let gzip = gzip(TEXT);
        assert_eq!(content([&gzip[..], &gzip].concat()).unwrap(), twice.as_bytes());
        assert_eq!(content([&gzip[..], &[0; 300_000], &gzip, &[0]].concat()).unwrap(), twice.as_bytes());
        assert_eq!(content([&TEXT_XZ[..], &[0; 8]].concat()).unwrap(), TEXT.as_bytes());
        assert_eq!(content([TEXT_XZ, TEXT_XZ].concat()).unwrap(), twice.as_bytes());
        assert_eq!(content([&TEXT_ZSTD[..], &SKIPPABLE, &TEXT_ZSTD].concat()).unwrap(), twice.as_bytes());
    }

    #[test]
    fn truncated_files_are_noticed() {
        for whole in [&TEXT_XZ[..], &TEXT_ZSTD[..]] {
            for length in 6..whole.len() {
                let complaint = content(&whole[..length]).unwrap_err();
                assert_eq!(complaint.kind(), io::ErrorKind::UnexpectedEof, "{length} of {whole:?}: {complaint}");
            }
        }
    }

    #[test]
    fn other_bytes_after_the_compressed_data_are_noticed() {
        for file in [&gzip(TEXT)[..], &TEXT_XZ, &TEXT_ZSTD] {
            for rest in [&b"x"[..], b"more", &[1; 100]] {
                assert!(content([file, rest].concat()).is_err(), "{rest:?} after {file:?}");
            }
        }
    }

    #[test]
    fn no_flipped_bit_gives_another_text() {
        for whole in [&gzip(TEXT)[..], &TEXT_XZ, &TEXT_ZSTD] {
            for bit in 8 * 6..8 * whole.len() {
                let mut file = whole.to_vec();
                file[bit / 8] ^= 1 << (bit % 8);
                // Some bits carry no data, such as the date in a gzip header.
                if let Ok(text) = content(file) {
                    assert_eq!(text, TEXT.as_bytes(), "bit {bit} of {whole:?}");
                }
            }
        }
    }

    #[test]
    fn errors_of_a_decompressor_are_said_in_plain_words() {
        let path = Path::new("a.xz");
        let said = |error| read_failed(path, error).to_string();
        assert_eq!(said(io::Error::other("dist overflow")), "a.xz: the compressed data are damaged");
        assert!(said(io::ErrorKind::UnexpectedEof.into()).ends_with("the file is truncated"));
        assert!(matches!(read_failed(path, io::Error::from_raw_os_error(5)), TraceError::Io { .. }));
    }

    proptest! {
        #[test]
        fn garbage_after_a_magic_number_does_not_panic(
            magic in prop::sample::select(vec![&GZIP[..], &XZ[..], &ZSTD[..]]),
            garbage in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = content([magic, &garbage].concat());
        }
    }
}
