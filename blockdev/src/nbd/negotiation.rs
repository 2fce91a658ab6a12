//! From the greeting to the choice of an export.

use super::values::*;
use super::{Export, Reader, Transmission, Violation};

/// The longest option that is read; the longest of the protocol have a name of 4096 bytes and some numbers.
pub const OPTION_BYTES_MAX: u32 = 16 << 10;
/// The longest option that is read over, and refused.
pub const SKIPPED_BYTES_MAX: u32 = 1 << 20;
/// The most options of a client.
pub const OPTIONS_MAX: u32 = 64;

/// Bytes of an option without its data.
const OPTION_HEAD: usize = 16;
/// The zeroes after the answer to EXPORT_NAME.
const PADDING: usize = 124;

/// How a call went on.
#[derive(Debug)]
pub enum Progress {
    /// The client ended the negotiation; close the connection when the output is sent.
    Ended,
    /// More of the client's bytes are needed.
    NeedsMore,
    /// So many bytes were processed; call again with what follows.
    Processed(usize),
    /// So many bytes were processed, and the client chose the export.
    Transmission(usize, Transmission),
}

/// The negotiation of one connection; see the module's documentation.
#[derive(Debug)]
pub struct Negotiation<'a> {
    export: &'a Export,
    has_client_flags: bool,
    without_zeroes: bool,
    structured: bool,
    option_count: u32,
    /// Bytes of a refused option that are still to come.
    skipped: u32,
}

impl<'a> Negotiation<'a> {
    /// A negotiation with a client that has just connected; appends the greeting to the output.
    pub fn begin(export: &'a Export, output: &mut Vec<u8>) -> Self {
        output.extend(INIT_MAGIC);
        output.extend(OPTION_MAGIC.to_be_bytes());
        output.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Self {
            export,
            has_client_flags: false,
            without_zeroes: false,
            structured: false,
            option_count: 0,
            skipped: 0,
        }
    }

    /// Processes one message of the client from the beginning of `input`, if it is there as a whole, and appends the
    /// reply to the output.
    ///
    /// The longest message has [`OPTION_BYTES_MAX`] bytes and a head of 16.
    ///
    /// # Errors
    /// [`Violation`]: close the connection.
    pub fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<Progress, Violation> {
        if self.skipped > 0 {
            let length = u32::try_from(input.len()).unwrap_or(u32::MAX).min(self.skipped);
            self.skipped -= length;
            return Ok(match length {
                0 => Progress::NeedsMore,
                length => Progress::Processed(length as usize),
            });
        }
        let mut reader = Reader(input);
        if !self.has_client_flags {
            let Some(flags) = reader.u32() else { return Ok(Progress::NeedsMore) };
            if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                return Err(Violation::ClientFlags(flags));
            }
            self.has_client_flags = true;
            self.without_zeroes = flags & u32::from(NO_ZEROES) != 0;
            return Ok(Progress::Processed(4));
        }
        let Some(magic) = reader.u64() else { return Ok(Progress::NeedsMore) };
        if magic != OPTION_MAGIC {
            return Err(Violation::OptionMagic(magic));
        }
        let (Some(option), Some(length)) = (reader.u32(), reader.u32()) else {
            return Ok(Progress::NeedsMore);
        };
        if length > SKIPPED_BYTES_MAX {
            return Err(Violation::OptionTooLong { option, length });
        }
        let is_too_big = length > OPTION_BYTES_MAX;
        let Some(data) = reader.take(if is_too_big { 0 } else { length as usize }) else {
            return Ok(Progress::NeedsMore);
        };
        self.option_count += 1;
        if self.option_count > OPTIONS_MAX {
            return Err(Violation::TooManyOptions);
        }
        let processed = OPTION_HEAD + data.len();
        if is_too_big {
            self.skipped = length;
            if option == OPT_EXPORT_NAME {
                return Err(Violation::UnknownExport);
            }
            reply(output, option, REP_ERR_TOO_BIG, &[b"the option is too long"]);
            return Ok(Progress::Processed(processed));
        }
        match option {
            OPT_EXPORT_NAME => {
                if !self.is_export(data) {
                    return Err(Violation::UnknownExport);
                }
                output.extend(self.export.size_bytes.to_be_bytes());
                output.extend(self.flags().to_be_bytes());
                if !self.without_zeroes {
                    output.extend([0; PADDING]);
                }
                return Ok(Progress::Transmission(processed, self.transmission()));
            }
            OPT_ABORT => {
                reply(output, option, REP_ACK, &[]);
                return Ok(Progress::Ended);
            }
            OPT_LIST if data.is_empty() => {
                let name = self.export.name.as_bytes();
                reply(output, option, REP_SERVER, &[&length_of(name), name]);
                reply(output, option, REP_ACK, &[]);
            }
            OPT_STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                reply(output, option, REP_ACK, &[]);
            }
            OPT_LIST | OPT_STRUCTURED_REPLY => {
                reply(output, option, REP_ERR_INVALID, &[b"this option has no data"]);
            }
            OPT_INFO | OPT_GO => {
                let is_accepted = self.inform(option, data, output);
                if is_accepted && option == OPT_GO {
                    return Ok(Progress::Transmission(processed, self.transmission()));
                }
            }
            _ => reply(output, option, REP_ERR_UNSUP, &[b"this server does not know the option"]),
        }
        Ok(Progress::Processed(processed))
    }

    /// Answers INFO and GO; returns whether the export is there.
    fn inform(&self, option: u32, data: &[u8], output: &mut Vec<u8>) -> bool {
        let Some((name, wanted)) = asked(data) else {
            reply(output, option, REP_ERR_INVALID, &[b"the lengths in the option do not fit"]);
            return false;
        };
        if !self.is_export(name) {
            reply(output, option, REP_ERR_UNKNOWN, &[b"there is no export of this name"]);
            return false;
        }
        let export = self.export;
        let mut info = |kind: u16, parts: [&[u8]; 3]| {
            let [first, second, third] = parts;
            reply(output, option, REP_INFO, &[&kind.to_be_bytes(), first, second, third]);
        };
        let wants = |kind: u16| wanted.chunks_exact(2).any(|it| *it == kind.to_be_bytes());
        info(INFO_EXPORT, [&export.size_bytes.to_be_bytes(), &self.flags().to_be_bytes(), &[]]);
        if wants(INFO_NAME) {
            info(INFO_NAME, [export.name.as_bytes(), &[], &[]]);
        }
        if wants(INFO_DESCRIPTION) {
            info(INFO_DESCRIPTION, [export.description.as_bytes(), &[], &[]]);
        }
        if wants(INFO_BLOCK_SIZE) {
            let sizes = [BLOCK_BYTES_MIN, BLOCK_BYTES_PREFERRED, export.payload_bytes_max];
            let [first, second, third] = sizes.map(u32::to_be_bytes);
            info(INFO_BLOCK_SIZE, [&first, &second, &third]);
        }
        reply(output, option, REP_ACK, &[]);
        true
    }

    fn is_export(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }

    const fn flags(&self) -> u16 {
        // Acknowledged writes are in the servers' memory, whichever connection they came by.
        let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN;
        let structured = if self.structured { SEND_DF } else { 0 };
        let writing = if self.export.is_read_only {
            READ_ONLY
        } else {
            SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO
        };
        always | structured | writing
    }

    const fn transmission(&self) -> Transmission {
        Transmission::new(
            self.export.size_bytes,
            self.export.payload_bytes_max,
            self.export.is_read_only,
            self.structured,
        )
    }
}

/// The name and the list of kinds in an INFO or GO.
fn asked(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader(data);
    let length = reader.u32()?;
    let name = reader.take(usize::try_from(length).ok()?)?;
    let count = reader.u16()?;
    let wanted = reader.take(usize::from(count) * 2)?;
    reader.0.is_empty().then_some((name, wanted))
}

fn length_of(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(0).to_be_bytes()
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend(u32::try_from(length).unwrap_or(0).to_be_bytes());
    for part in parts {
        output.extend_from_slice(part);
    }
}

#[cfg(test)]
mod tests;
