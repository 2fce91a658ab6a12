//! The input data of a command.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use anyhow::Context;

use crate::exit::{InputError, UsageError};

/// The most data held in memory at once, for an allocation whose size must be known first.
const INPUT_BYTES_MAX: u64 = 1 << 30;

/// The source of the data.
#[derive(Debug)]
pub(super) enum Source {
    Argument(String),
    File(PathBuf),
    StandardInput,
}

impl Source {
    pub(super) fn of(data: Option<String>, file: Option<PathBuf>) -> Self {
        match (data, file) {
            (Some(data), _) => Self::Argument(data),
            (None, Some(path)) => Self::File(path),
            (None, None) => Self::StandardInput,
        }
    }

    /// A reader, and the length if it is known in advance.
    pub(super) fn open(self) -> anyhow::Result<(Box<dyn Read>, Option<u64>)> {
        Ok(match self {
            Self::Argument(data) => {
                let length = data.len() as u64;
                (Box::new(io::Cursor::new(data.into_bytes())), Some(length))
            }
            Self::File(path) => {
                let opened = File::open(&path)
                    .and_then(|file| file.metadata().map(|metadata| (file, metadata)));
                let opened = opened.and_then(|(file, metadata)| match metadata.is_dir() {
                    // It can be opened; only reading fails.
                    true => Err(rustix::io::Errno::ISDIR.into()),
                    false => Ok((file, metadata)),
                });
                let (file, metadata) = opened.map_err(|source| InputError { path, source })?;
                let length = metadata.is_file().then_some(metadata.len());
                (Box::new(file), length)
            }
            Self::StandardInput => (Box::new(io::stdin().lock()), None),
        })
    }
}

/// Reads all data.
pub(super) fn read_all(source: Source) -> anyhow::Result<Vec<u8>> {
    let (reader, _) = source.open()?;
    let mut data = Vec::new();
    let mut reader = reader.take(INPUT_BYTES_MAX + 1);
    reader.read_to_end(&mut data).context("cannot read the data")?;
    match data.len() as u64 {
        0 => Err(UsageError("there is no data to write".to_owned()).into()),
        length if length > INPUT_BYTES_MAX => {
            let words = "more than 1 GiB at once: create the memory first, then write to it";
            Err(UsageError(words.to_owned()).into())
        }
        _ => Ok(data),
    }
}

/// Fills the buffer as far as the reader has data; returns the number of bytes.
pub(super) fn fill(reader: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match reader.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one byte at a time, like a slow pipe.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = buffer.len().min(1);
            self.0.read(&mut buffer[..count])
        }
    }

    #[test]
    fn a_slow_reader_fills_whole_chunks() {
        let mut reader = Slow(b"0123456789");
        let mut buffer = [0; 4];
        let mut lengths = Vec::new();
        loop {
            let length = fill(&mut reader, &mut buffer).expect("reads");
            lengths.push(length);
            if length < buffer.len() {
                break;
            }
        }
        assert_eq!((lengths.as_slice(), &buffer), (&[4, 4, 2][..], b"8967"));
    }
}
