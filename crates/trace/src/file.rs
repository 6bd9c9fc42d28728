//! Files as bytes: decompressed on reading, whole or not at all on writing. Knows nothing of what they say.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use flate2::{Compression, write::GzEncoder};

use super::{TraceError, compression::decompressed};
use oomph_base::Progress;

/// The bytes of a file after decompression.
pub(super) type Input<'a> = Box<dyn BufRead + Send + 'a>;

const BUFFER_BYTES: usize = 256 << 10;
/// Nearly three times as fast as the default level on traces, for files 6 % larger.
const COMPRESSION: Compression = Compression::new(3);

/// Opens a file at its beginning. Compression is recognised by content, not by name.
///
/// Reading the file is one stage of `progress`, measured in bytes on disk.
pub(super) fn open<'a>(path: &Path, progress: &'a dyn Progress) -> Result<Input<'a>, TraceError> {
    let bytes = fs::metadata(path).map_err(|source| TraceError::Io { path: path.to_owned(), source })?.len();
    progress.begin_stage("reading the file", bytes);
    open_counted(path, move |bytes| progress.advance(bytes))
}

/// Like [`open`], calling `on_read` with the number of bytes of every read from disk, before decompression.
pub(super) fn open_counted<'a>(path: &Path, on_read: impl FnMut(u64) + Send + 'a) -> Result<Input<'a>, TraceError> {
    let failed = |source| TraceError::Io { path: path.to_owned(), source };
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    if kind.is_dir() {
        return Err(refusal(path, "this is a folder, not a trace"));
    }
    if !kind.is_file() {
        return Err(refusal(path, "a trace is read more than once, so it must be a plain file, not a pipe or device"));
    }
    let file = Counted { file: File::open(path).map_err(failed)?, on_read };
    decompressed(BufReader::with_capacity(BUFFER_BYTES, file)).map_err(failed)
}

/// A file that says how much of it was read.
struct Counted<F> {
    file: File,
    on_read: F,
}

impl<F: FnMut(u64)> Read for Counted<F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(to)?;
        (self.on_read)(count as u64);
        Ok(count)
    }
}

/// What a failure while reading means.
#[cold]
pub(super) fn read_failed(path: &Path, source: io::Error) -> TraceError {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => refusal(path, "the compressed data stop in the middle: the file was cut short"),
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
            refusal(path, &format!("the compressed data are damaged: {source}"))
        }
        _ => TraceError::Io { path: path.to_owned(), source },
    }
}

fn refusal(path: &Path, reason: &str) -> TraceError {
    TraceError::Format { path: path.to_owned(), reason: reason.to_owned() }
}

/// A file in the making. Nothing is seen under its name before [`finish`](Output::finish); without it, nothing stays.
pub(super) struct Output {
    encoder: Encoder,
    /// The unfinished file, and the name it gets at the end; none where the target is a pipe or a device.
    unfinished: Option<Unfinished>,
}

enum Encoder {
    Plain(BufWriter<File>),
    Gzip(GzEncoder<BufWriter<File>>),
}

impl Output {
    /// Begins a file; it is compressed where the name ends in `.gz`.
    pub(super) fn create(path: &Path) -> io::Result<Output> {
        let (file, unfinished) = match fs::metadata(path) {
            Ok(target) if target.is_dir() => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            // A pipe or a device must not be replaced by a file of its name.
            Ok(target) if !target.is_file() => (OpenOptions::new().write(true).open(path)?, None),
            Ok(_) => Unfinished::beside(&fs::canonicalize(path)?).map(|(file, name)| (file, Some(name)))?,
            Err(_) => Unfinished::beside(path).map(|(file, name)| (file, Some(name)))?,
        };
        let buffered = BufWriter::with_capacity(BUFFER_BYTES, file);
        let compressed = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gz"));
        let encoder =
            if compressed { Encoder::Gzip(GzEncoder::new(buffered, COMPRESSION)) } else { Encoder::Plain(buffered) };
        Ok(Output { encoder, unfinished })
    }

    /// The file is complete: it appears under its name, replacing what was there.
    pub(super) fn finish(self) -> io::Result<()> {
        match self.encoder {
            Encoder::Plain(mut output) => output.flush()?,
            Encoder::Gzip(output) => output.finish()?.flush()?,
        }
        match self.unfinished {
            Some(unfinished) => unfinished.rename(),
            None => Ok(()),
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.encoder {
            Encoder::Plain(output) => output.write(bytes),
            Encoder::Gzip(output) => output.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.encoder {
            Encoder::Plain(output) => output.flush(),
            // Flushing what is compressed would cost space, and nobody reads it before it is finished.
            Encoder::Gzip(_) => Ok(()),
        }
    }
}

/// A file that goes away unless it is renamed.
struct Unfinished {
    path: PathBuf,
    target: PathBuf,
    renamed: bool,
}

impl Unfinished {
    fn beside(target: &Path) -> io::Result<(File, Unfinished)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut name = target.file_name().map_or_else(OsString::new, OsString::from);
        name.push(format!(".{}-{}.partial", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let path = target.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok((file, Unfinished { path, target: target.to_owned(), renamed: false }))
    }

    fn rename(mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.renamed {
            // Nobody could act on a failure here; the name says what the file is.
            let _ = fs::remove_file(&self.path);
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
    fn a_file_appears_when_it_is_finished_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph");
        let mut output = Output::create(&path).unwrap();
        output.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(output);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

        let mut output = Output::create(&path).unwrap();
        output.write_all(b"whole").unwrap();
        output.finish().unwrap();
        assert_eq!(content(&path), b"whole");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn gzip_is_chosen_by_name_and_recognised_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph.gz");
        let mut output = Output::create(&path).unwrap();
        output.write_all(&[b'x'; 100_000]).unwrap();
        output.finish().unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 1_000);
        let renamed = folder.path().join("a.txt");
        fs::rename(&path, &renamed).unwrap();
        assert_eq!(content(&renamed), [b'x'; 100_000]);
    }

    #[test]
    fn reading_is_a_stage_as_long_as_the_file_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph.gz");
        let mut output = Output::create(&path).unwrap();
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

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        use std::os::unix::fs::FileTypeExt;
        let null = Path::new("/dev/null");
        let mut output = Output::create(null).unwrap();
        output.write_all(b"gone").unwrap();
        output.finish().unwrap();
        assert!(fs::metadata(null).unwrap().file_type().is_char_device());
    }
}
