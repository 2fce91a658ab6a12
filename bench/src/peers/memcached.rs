//! memcached: the text protocol, over TCP and over UDP
//! (<https://github.com/memcached/memcached/blob/master/doc/protocol.txt>).

use std::{
    io,
    net::{SocketAddrV6, UdpSocket},
    time::Duration,
};

use super::{Exchange, KEY, Waiting, value};
use crate::{contest::Contestant, placement::now};

/// `get` of a value of so many bytes.
#[must_use]
pub fn get(bytes: usize) -> Exchange {
    let head = format!("VALUE {KEY} 0 {bytes}\r\n");
    Exchange {
        request: format!("get {KEY}\r\n").into_bytes(),
        response: [head.as_bytes(), &value(bytes), b"\r\nEND\r\n"].concat(),
    }
}

/// `set` of a value of so many bytes.
#[must_use]
pub fn set(bytes: usize) -> Exchange {
    let head = format!("set {KEY} 0 0 {bytes}\r\n");
    Exchange {
        request: [head.as_bytes(), &value(bytes), b"\r\n"].concat(),
        response: b"STORED\r\n".to_vec(),
    }
}

/// The header of every datagram: the request's number, the datagram's number, how many there are, and zeros; two bytes each.
const HEADER_BYTES: usize = 8;

/// The largest datagram of memcached, with its header.
const DATAGRAM_BYTES: usize = 1400;

/// How long a response may take. A datagram that is lost is not sent again.
const DEADLINE: Duration = Duration::from_secs(2);

/// A client over UDP. A request must fit one datagram.
#[derive(Debug)]
pub struct Datagrams {
    name: String,
    socket: UdpSocket,
    waiting: Waiting,
    exchange: Exchange,
    request: Vec<u8>,
    number: u16,
    datagram: Vec<u8>,
    response: Vec<u8>,
}

impl Datagrams {
    /// Whether an exchange can be done over UDP.
    #[must_use]
    pub fn fit(exchange: &Exchange) -> bool {
        HEADER_BYTES + exchange.request.len() <= DATAGRAM_BYTES
    }

    /// The same exchange again and again.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(
        name: String,
        to: SocketAddrV6,
        waiting: Waiting,
        exchange: Exchange,
    ) -> io::Result<Self> {
        let socket = UdpSocket::bind("[::]:0")?;
        socket.connect(to)?;
        socket.set_nonblocking(waiting == Waiting::Spinning)?;
        socket.set_read_timeout(Some(DEADLINE))?;
        let request = [&[0, 0, 0, 0, 0, 1, 0, 0], exchange.request.as_slice()].concat();
        let response = vec![0; exchange.response.len()];
        let datagram = vec![0; 2 * DATAGRAM_BYTES];
        Ok(Self { name, socket, waiting, exchange, request, number: 0, datagram, response })
    }

    fn round_trip(&mut self) -> io::Result<()> {
        self.number = self.number.wrapping_add(1);
        self.request[..2].copy_from_slice(&self.number.to_be_bytes());
        self.socket.send(&self.request)?;
        let room = DATAGRAM_BYTES - HEADER_BYTES;
        let until = now() + DEADLINE;
        let (mut arrived, mut tries) = (0, 0_u32);
        while arrived < self.response.len() {
            let count = match self.socket.recv(&mut self.datagram) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tries += 1;
                    let is_late = tries.is_multiple_of(4096) && now() > until;
                    if is_late || self.waiting == Waiting::Sleeping {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some((header, data)) = self.datagram[..count].split_first_chunk::<HEADER_BYTES>()
            else {
                continue;
            };
            if header[..2] != self.number.to_be_bytes() {
                continue;
            }
            let at = usize::from(u16::from_be_bytes([header[2], header[3]])) * room;
            let place = self.response.get_mut(at..at + data.len());
            let place = place.ok_or_else(|| io::Error::other("a response is too long"))?;
            place.copy_from_slice(data);
            arrived += data.len();
        }
        Ok(())
    }
}

impl Contestant for Datagrams {
    fn name(&self) -> &str {
        &self.name
    }

    fn operate(&mut self) -> Result<(), String> {
        self.round_trip().map_err(|error| error.to_string())?;
        self.exchange.check_ends(&self.response)
    }

    fn end_turn(&mut self) -> Result<(), String> {
        self.exchange.check(&self.response)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn bytes_are_those_of_the_protocol() {
        let Exchange { request, response } = set(3);
        assert_eq!(request, b"set bluebridge 0 0 3\r\nabc\r\n");
        assert_eq!(response, b"STORED\r\n");
        let Exchange { request, response } = get(3);
        assert_eq!(request, b"get bluebridge\r\n");
        assert_eq!(response, b"VALUE bluebridge 0 3\r\nabc\r\nEND\r\n");
        assert!(
            Datagrams::fit(&get(4096)) && Datagrams::fit(&set(64)) && !Datagrams::fit(&set(4096))
        );
    }

    #[test]
    fn a_response_of_several_datagrams_is_put_together_in_any_order() {
        let server = UdpSocket::bind("[::1]:0").unwrap();
        let std::net::SocketAddr::V6(address) = server.local_addr().unwrap() else { panic!() };
        let exchange = get(4096);
        let response = exchange.response.clone();
        let serving = thread::spawn(move || {
            let mut request = [0; 100];
            for _ in 0..2 {
                let (count, from) = server.recv_from(&mut request).unwrap();
                assert_eq!(&request[2..count], b"\0\0\0\x01\0\0get bluebridge\r\n");
                // One of an earlier request comes first.
                server.send_to(&[0xff; 50], from).unwrap();
                let parts = response.chunks(DATAGRAM_BYTES - HEADER_BYTES);
                for (number, part) in (0..).zip(parts).collect::<Vec<(u8, _)>>().into_iter().rev() {
                    let header = [request[0], request[1], 0, number, 0, 3, 0, 0];
                    server.send_to(&[&header, part].concat(), from).unwrap();
                }
            }
        });
        for waiting in [Waiting::Spinning, Waiting::Sleeping] {
            let name = "peer".to_owned();
            let mut client = Datagrams::new(name, address, waiting, exchange.clone()).unwrap();
            client.operate().unwrap();
            client.end_turn().unwrap();
        }
        serving.join().unwrap();
    }
}
