//! Requests and responses over TCP, one at a time or many at once.

use std::{
    io::{self, Read, Write},
    net::{SocketAddrV6, TcpStream},
    time::Duration,
};

use super::Exchange;
use crate::{contest::Contestant, placement::now};

/// How long a response may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// How a client waits for a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Waiting {
    /// It asks again and again.
    Spinning,
    /// It sleeps in the kernel.
    Sleeping,
}

impl Waiting {
    /// As a part of a contestant's name.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Spinning => "spinning",
            Self::Sleeping => "sleeping",
        }
    }
}

/// A connection to a server.
#[derive(Debug)]
pub struct Stream {
    name: String,
    socket: TcpStream,
    waiting: Waiting,
    exchange: Exchange,
    /// At least a response, and what many of them may fill.
    buffer: Vec<u8>,
}

/// The most bytes that are read at once.
const BUFFER_BYTES: usize = 256 << 10;

impl Stream {
    /// A connection of its own.
    ///
    /// # Errors
    /// The system's error.
    pub fn connect(address: SocketAddrV6) -> io::Result<TcpStream> {
        let socket = TcpStream::connect_timeout(&address.into(), DEADLINE)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(DEADLINE))?;
        socket.set_write_timeout(Some(DEADLINE))?;
        Ok(socket)
    }

    /// The same exchange again and again over a connection, after whatever its protocol begins with.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(
        name: String,
        socket: TcpStream,
        waiting: Waiting,
        exchange: Exchange,
    ) -> io::Result<Self> {
        socket.set_nonblocking(waiting == Waiting::Spinning)?;
        let buffer = vec![0; exchange.response.len().max(BUFFER_BYTES)];
        Ok(Self { name, socket, waiting, exchange, buffer })
    }

    /// Sends bytes, however often that takes.
    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let until = now() + DEADLINE;
        while !bytes.is_empty() {
            match self.socket.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if self.may_wait(&error) && now() < until => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives up to the end of the buffer; at least a byte.
    fn receive(&mut self, from: usize) -> io::Result<usize> {
        let mut tries = 0_u32;
        let mut until = None;
        loop {
            match self.socket.read(&mut self.buffer[from..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => return Ok(count),
                Err(error) if self.may_wait(&error) => {}
                Err(error) => return Err(error),
            }
            tries += 1;
            // The clock is read rarely, so that it does not add to the measured time.
            if tries.is_multiple_of(4096) && now() > *until.get_or_insert_with(|| now() + DEADLINE)
            {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Whether the call is to be repeated. A sleeping one that would block has waited for as long as it may.
    fn may_wait(&self, error: &io::Error) -> bool {
        let is_early =
            self.waiting == Waiting::Spinning && error.kind() == io::ErrorKind::WouldBlock;
        is_early || error.kind() == io::ErrorKind::Interrupted
    }

    fn round_trip(&mut self) -> io::Result<()> {
        let request = std::mem::take(&mut self.exchange.request);
        let sent = self.send(&request);
        self.exchange.request = request;
        sent?;
        let length = self.exchange.response.len();
        let mut arrived = 0;
        while arrived < length {
            arrived += self.receive(arrived)?;
        }
        if arrived > length {
            return Err(io::Error::other(format!("a response of {arrived} bytes")));
        }
        Ok(())
    }

    /// Executes `count` operations with so many outstanding; returns the time.
    ///
    /// # Errors
    /// A text.
    pub fn pipeline(&mut self, count: usize, outstanding: usize) -> Result<Duration, String> {
        let length = self.exchange.response.len();
        let batch = self.exchange.request.repeat(outstanding.min(count));
        let failed = |error: io::Error| error.to_string();
        let one = self.exchange.request.len();
        let start = now();
        self.send(&batch).map_err(failed)?;
        let (mut sent, mut done, mut part) = (outstanding.min(count), 0, 0);
        while done < count {
            // The begin of a response stays where it is.
            let arrived = self.receive(part).map_err(failed)?;
            let bytes = part + arrived;
            let complete = bytes / length;
            for at in 0..complete {
                self.exchange.check_ends(&self.buffer[at * length..(at + 1) * length])?;
            }
            part = bytes - complete * length;
            self.buffer.copy_within(complete * length..bytes, 0);
            done += complete;
            let more = complete.min(count - sent);
            if more > 0 {
                self.send(&batch[..more * one]).map_err(failed)?;
                sent += more;
            }
        }
        Ok(now() - start)
    }
}

impl Contestant for Stream {
    fn name(&self) -> &str {
        &self.name
    }

    fn operate(&mut self) -> Result<(), String> {
        self.round_trip().map_err(|error| error.to_string())?;
        self.exchange.check_ends(&self.buffer[..self.exchange.response.len()])
    }

    fn end_turn(&mut self) -> Result<(), String> {
        self.exchange.check(&self.buffer[..self.exchange.response.len()])
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv6Addr, TcpListener},
        thread,
    };

    use super::*;

    /// Answers so many requests of so many bytes, in parts, and then ends.
    fn serve(listener: &TcpListener, requests: usize, exchange: &Exchange) {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = vec![0; exchange.request.len()];
        for number in 0..requests {
            socket.read_exact(&mut request).unwrap();
            assert_eq!(request, exchange.request);
            let middle = number % exchange.response.len();
            socket.write_all(&exchange.response[..middle]).unwrap();
            socket.write_all(&exchange.response[middle..]).unwrap();
        }
    }

    fn pair(requests: usize, waiting: Waiting, wrong: bool) -> (Stream, thread::JoinHandle<()>) {
        let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
        let std::net::SocketAddr::V6(address) = listener.local_addr().unwrap() else { panic!() };
        let exchange = Exchange { request: b"give".to_vec(), response: super::super::value(3000) };
        let mut served = exchange.clone();
        if wrong {
            served.response[1500] = 0;
        }
        let server = thread::spawn(move || serve(&listener, requests, &served));
        let socket = Stream::connect(address).unwrap();
        (Stream::new("peer".to_owned(), socket, waiting, exchange).unwrap(), server)
    }

    #[test]
    fn exchanges_are_one_at_a_time_or_many() {
        for waiting in [Waiting::Spinning, Waiting::Sleeping] {
            let (mut stream, server) = pair(510, waiting, false);
            for _ in 0..10 {
                stream.operate().unwrap();
            }
            stream.end_turn().unwrap();
            stream.pipeline(500, 64).unwrap();
            server.join().unwrap();
            assert!(stream.operate().is_err(), "the server has ended");
        }
    }

    #[test]
    fn a_wrong_byte_is_found() {
        let (mut stream, server) = pair(1, Waiting::Sleeping, true);
        stream.operate().unwrap();
        let error = stream.end_turn().unwrap_err();
        assert!(error.contains("a response of 3000 bytes"), "{error}");
        server.join().unwrap();
    }
}
