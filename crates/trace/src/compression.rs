//! Compressed files: gzip, xz and zstd are recognised by content, whatever a file is called, and decompressed on the way.
//!
//! Called by `file`; knows nothing of traces. Memory is bounded by the dictionaries that are accepted.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

const BUFFER_BYTES: usize = 256 << 10;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Enough for the largest preset of `xz` (64 MiB) and for `zstd --long` (128 MiB).
const LARGEST_DICTIONARY_KIB: u32 = 160 << 10;

/// The content of a file, decompressed if need be.
pub(super) fn decompressed<'a>(mut file: impl BufRead + Send + 'a) -> io::Result<Box<dyn BufRead + Send + 'a>> {
    let head = file.fill_buf()?;
    let decoder: Box<dyn Read + Send + 'a> = if head.starts_with(&GZIP) {
        Box::new(MultiGzDecoder::new(file))
    } else if head.starts_with(&XZ) {
        Box::new(XzReader::new_mem_limit(file, true, LARGEST_DICTIONARY_KIB))
    } else if head.starts_with(&ZSTD) {
        Box::new(ZstdReader { file, frame: FrameDecoder::new() })
    } else {
        return Ok(Box::new(file));
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder)))
}

/// Reads one zstd frame after the other, which is what `zstd` and `pzstd` write.
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

    /// The decoder does not say whether its input gave out or makes no sense.
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
        decompressed(Cursor::new(file.into()))?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn every_compression_is_recognised_by_content() {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(TEXT.as_bytes()).unwrap();
        for file in [gzip.finish().unwrap(), TEXT_ZSTD.to_vec(), TEXT_XZ.to_vec(), TEXT.as_bytes().to_vec()] {
            assert_eq!(content(file).unwrap(), TEXT.as_bytes());
        }
    }

    #[test]
    fn one_compressed_part_may_follow_another() {
        let twice = TEXT.repeat(2);
        assert_eq!(content([TEXT_XZ, TEXT_XZ].concat()).unwrap(), twice.as_bytes());
        assert_eq!(content([&TEXT_ZSTD[..], &SKIPPABLE, &TEXT_ZSTD].concat()).unwrap(), twice.as_bytes());
    }

    #[test]
    fn a_file_cut_short_is_noticed_wherever_the_cut_is() {
        for whole in [&TEXT_XZ[..], &TEXT_ZSTD[..]] {
            for length in 6..whole.len() {
                let complaint = content(&whole[..length]).unwrap_err();
                assert_eq!(complaint.kind(), io::ErrorKind::UnexpectedEof, "{length} of {whole:?}: {complaint}");
            }
        }
    }

    #[test]
    fn a_flipped_bit_in_the_text_is_noticed() {
        for (mut file, place) in [(TEXT_XZ.to_vec(), 32), (TEXT_ZSTD.to_vec(), 12)] {
            file[place] ^= 1;
            assert_eq!(content(file).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    proptest! {
        #[test]
        fn garbage_after_a_magic_number_is_an_error_or_text_but_never_a_panic(
            magic in prop::sample::select(vec![&GZIP[..], &XZ[..], &ZSTD[..]]),
            garbage in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = content([magic, &garbage].concat());
        }
    }
}
