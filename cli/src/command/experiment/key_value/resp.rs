//! As much of redis's protocol (RESP2) as loading and checking need: GET and SET, many at once.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long a connection and each read may take.
const DEADLINE: Duration = Duration::from_secs(120);
/// Longer values are refused by redis itself.
const VALUE_BYTES_MAX: usize = 512 << 20;

/// A connection.
pub(super) struct Connection {
    stream: BufReader<TcpStream>,
}

/// A reply of redis.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Reply {
    Text(String),
    Value(Vec<u8>),
    Nothing,
}

fn invalid(words: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, words)
}

impl Connection {
    pub(super) fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, DEADLINE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends commands together, and returns their replies.
    pub(super) fn call(&mut self, commands: &[Vec<&[u8]>]) -> io::Result<Vec<Reply>> {
        let mut bytes = Vec::new();
        for words in commands {
            write!(bytes, "*{}\r\n", words.len())?;
            for word in words {
                write!(bytes, "${}\r\n", word.len())?;
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        self.stream.get_mut().write_all(&bytes)?;
        commands.iter().map(|_| reply(&mut self.stream)).collect()
    }

    pub(super) fn ping(&mut self) -> io::Result<()> {
        match &self.call(&[vec![b"PING"]])?[..] {
            [Reply::Text(text)] if text == "PONG" => Ok(()),
            other => Err(invalid(format!("redis replied {other:?} to PING"))),
        }
    }
}

fn reply(from: &mut impl BufRead) -> io::Result<Reply> {
    let mut line = String::new();
    // A line of redis is short; what is not redis must not fill the memory.
    if from.by_ref().take(1 << 16).read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let text = line.trim_end();
    let (kind, rest) = text.split_at_checked(1).unwrap_or((text, ""));
    match (kind, rest) {
        ("+", rest) => Ok(Reply::Text(rest.to_owned())),
        ("-", rest) => Err(invalid(format!("redis refused: {rest}"))),
        ("$", "-1") => Ok(Reply::Nothing),
        ("$", length) => {
            let length = length.parse::<usize>().ok().filter(|length| *length <= VALUE_BYTES_MAX);
            let length = length.ok_or_else(|| invalid(format!("redis replied {text:?}")))?;
            let mut value = vec![0; length + 2];
            from.read_exact(&mut value)?;
            if !value.ends_with(b"\r\n") {
                return Err(invalid("a value of redis has no end".to_owned()));
            }
            value.truncate(length);
            Ok(Reply::Value(value))
        }
        _ => Err(invalid(format!("redis replied {text:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn replied(bytes: &[u8]) -> io::Result<Reply> {
        reply(&mut BufReader::new(bytes))
    }

    #[test]
    fn replies_are_read_and_others_are_errors() {
        assert_eq!(replied(b"+OK\r\n").expect("a reply"), Reply::Text("OK".to_owned()));
        assert_eq!(replied(b"$-1\r\n").expect("a reply"), Reply::Nothing);
        assert_eq!(
            replied(b"$4\r\na\r\nb\r\n").expect("a reply"),
            Reply::Value(b"a\r\nb".to_vec())
        );
        let refused = replied(b"-OOM command not allowed\r\n").expect_err("an error");
        assert!(refused.to_string().contains("OOM command"), "{refused}");
        for wrong in [
            &b""[..],
            b"\r\n",
            b"$x\r\n",
            b"$99999999999\r\n",
            b"$4\r\nab",
            b"$1\r\nabc",
            b"\xff\xff\r\n",
        ] {
            assert!(replied(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn commands_are_sent_as_lengths_and_bytes() {
        let listener = TcpListener::bind("[::1]:0").expect("a socket");
        let address = listener.local_addr().expect("bound");
        let other = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let expected =
                b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n";
            let mut bytes = vec![0; expected.len()];
            stream.read_exact(&mut bytes).expect("the commands");
            assert_eq!(bytes, expected);
            stream.write_all(b"+OK\r\n$2\r\n\r\n\r\n").expect("sent");
        });
        let mut connection = Connection::open(address).expect("connects");
        let set: Vec<&[u8]> = vec![b"SET", b"k", b"\r\n"];
        let replies = connection.call(&[set, vec![b"GET", b"k"]]).expect("replies");
        assert_eq!(replies, [Reply::Text("OK".to_owned()), Reply::Value(b"\r\n".to_vec())]);
        other.join().expect("it saw the commands");
    }
}
