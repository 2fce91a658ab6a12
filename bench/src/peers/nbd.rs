//! A disk over NBD (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>): the fixed newstyle negotiation
//! and simple replies, as much as reads and writes of one place need.

use std::io::{self, Read, Write};

use super::{Exchange, value};

const NBD_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// NBD_FLAG_FIXED_NEWSTYLE and NBD_FLAG_NO_ZEROES of the server; the client's flags have the same bits.
const FLAGS: u16 = 3;

/// NBD_OPT_EXPORT_NAME.
const EXPORT_NAME: u32 = 1;

/// NBD_CMD_READ and NBD_CMD_WRITE.
const READ: u16 = 0;
const WRITE: u16 = 1;

/// The same for all requests: the server returns it.
const COOKIE: u64 = 0x626c_7565_6272_6964;

/// Begins with the default export, and returns its size in bytes.
///
/// # Errors
/// The system's error, or what the server does not do.
pub fn begin(socket: &mut (impl Read + Write)) -> io::Result<u64> {
    let other = |what: &str| io::Error::other(format!("the NBD server {what}"));
    if read_u64(socket)? != NBD_MAGIC || read_u64(socket)? != OPTION_MAGIC {
        return Err(other("does not begin with the newstyle negotiation"));
    }
    let mut flags = [0; 2];
    socket.read_exact(&mut flags)?;
    if u16::from_be_bytes(flags) & FLAGS != FLAGS {
        return Err(other("does not know the fixed newstyle negotiation without zeros"));
    }
    let mut option = u32::from(FLAGS).to_be_bytes().to_vec();
    option.extend(OPTION_MAGIC.to_be_bytes());
    option.extend(EXPORT_NAME.to_be_bytes());
    option.extend(0_u32.to_be_bytes());
    socket.write_all(&option)?;
    let size = read_u64(socket)?;
    let mut transmission_flags = [0; 2];
    socket.read_exact(&mut transmission_flags)?;
    Ok(size)
}

fn read_u64(socket: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    socket.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

/// A read of so many bytes at the begin, after [`write()`] of as many.
#[must_use]
pub fn read(bytes: usize) -> Exchange {
    let response = [reply().as_slice(), &value(bytes)].concat();
    Exchange { request: request(READ, bytes), response }
}

/// A write of so many bytes at the begin.
#[must_use]
pub fn write(bytes: usize) -> Exchange {
    let request = [request(WRITE, bytes).as_slice(), &value(bytes)].concat();
    Exchange { request, response: reply() }
}

fn request(command: u16, bytes: usize) -> Vec<u8> {
    let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
    request.extend(0_u16.to_be_bytes());
    request.extend(command.to_be_bytes());
    request.extend(COOKIE.to_be_bytes());
    request.extend(0_u64.to_be_bytes());
    request.extend(u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes());
    request
}

fn reply() -> Vec<u8> {
    let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend(0_u32.to_be_bytes());
    reply.extend(COOKIE.to_be_bytes());
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a server sent, and what it is to get.
    struct Script {
        sent: io::Cursor<Vec<u8>>,
        got: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.sent.read(buffer)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.got.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn script(parts: &[&[u8]]) -> Script {
        Script { sent: io::Cursor::new(parts.concat()), got: Vec::new() }
    }

    #[test]
    fn the_negotiation_chooses_the_default_export() {
        let size = (64_u64 << 20).to_be_bytes();
        let mut server = script(&[b"NBDMAGICIHAVEOPT", &[0, 3], &size, &[0, 0xed]]);
        assert_eq!(begin(&mut server).unwrap(), 64 << 20);
        assert_eq!(server.got, [b"\0\0\0\x03IHAVEOPT".as_slice(), b"\0\0\0\x01\0\0\0\0"].concat());
        for (parts, words) in [
            ([b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".as_slice(), &[0; 2]], "newstyle"),
            ([b"NBDMAGICIHAVEOPT".as_slice(), &[0, 1]], "without zeros"),
        ] {
            let error = begin(&mut script(&parts)).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(begin(&mut script(&[b"NBD"])).is_err());
    }

    #[test]
    fn requests_and_replies_are_those_of_the_protocol() {
        let Exchange { request, response } = write(3);
        let head = b"\x25\x60\x95\x13\0\0\0\x01bluebrid\0\0\0\0\0\0\0\0\0\0\0\x03";
        assert_eq!(request, [head.as_slice(), b"abc"].concat());
        assert_eq!(response, b"\x67\x44\x66\x98\0\0\0\0bluebrid");
        let Exchange { request, response } = read(3);
        assert_eq!(request[6..8], [0, 0]);
        assert_eq!(response, b"\x67\x44\x66\x98\0\0\0\0bluebridabc");
    }
}
