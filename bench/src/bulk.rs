//! The bulk baseline: a bare stream of UDP trains (UDP_SEGMENT, UDP_GRO) between two spinning ends.
//!
//! Each datagram has a header that says which part of the memory its payload is. The sender gathers payloads from its
//! memory, and the receiver lets the kernel put them where they belong, so no byte is copied but by the kernel. At most a
//! window is outstanding, so that no buffer overflows. What is lost nevertheless is sent again from there on.
//!
//! There is no check of the data, no session and no order of anything but the stream itself: it is what any protocol over
//! these sockets has to pay.

use std::{
    io,
    mem::{size_of, zeroed},
    net::{Ipv6Addr, SocketAddrV6, UdpSocket},
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use libc::{c_int, iovec, msghdr, sockaddr_in6};
use rustix::net::sockopt;

use crate::{flood::address, placement::now};

/// Time without progress after which the run ends with an error.
const SILENCE: Duration = Duration::from_secs(2);

/// Time without progress after which the sender repeats what is not acknowledged.
const REPEAT: Duration = Duration::from_millis(20);

/// How often the time until it is sent again doubles.
const REPEATS_DOUBLED: u32 = 4;

/// Acknowledgements of a window.
const ACKNOWLEDGEMENTS: usize = 8;

/// Room for datagrams that were received and not read yet; a window may use half of it.
const BUFFER_BYTES: usize = 8 << 20;

/// Most bytes of a train; see the UDP carrier.
const TRAIN_BYTES_MAX: usize = 65_473;

/// Most bytes of a train that is received.
const RECEIVED_BYTES_MAX: usize = 65_536;

/// Most datagrams of a train that is sent, and of one that is received.
const SENT_DATAGRAMS_MAX: usize = 64;
const RECEIVED_DATAGRAMS_MAX: usize = 128;

/// Polls of the socket between two readings of the clock.
const POLLS_PER_CLOCK_READING: u32 = 64;

/// The words of a datagram's header: its kind, the run, and the position of its payload or what the kind says.
const WORDS: usize = 5;

/// The length of the shortest header.
pub const HEADER_BYTES_MIN: usize = WORDS * size_of::<u64>();

/// The datagrams of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes in front of the payload, at least [`HEADER_BYTES_MIN`] and at most 128.
    pub header_bytes: usize,
    /// Payload bytes of a datagram, at least 1; the last of a run may have fewer.
    pub piece_bytes: usize,
    /// Datagrams that are sent at once; fewer if the system takes fewer.
    pub train_datagrams: usize,
    /// Payload bytes that may be outstanding; one train may, however long it is.
    pub window_bytes: usize,
}

const HEADER_BYTES_MAX: usize = 128;

impl Shape {
    const fn datagram_bytes(self) -> usize {
        self.header_bytes + self.piece_bytes
    }

    /// The longest train of these datagrams.
    #[must_use]
    pub fn longest_train(self) -> usize {
        (TRAIN_BYTES_MAX / self.datagram_bytes()).clamp(1, SENT_DATAGRAMS_MAX)
    }

    fn train_bytes(self) -> usize {
        self.train_datagrams.clamp(1, self.longest_train()) * self.piece_bytes
    }
}

/// Where the bytes go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From the server, as those of a READ.
    FromServer,
    /// To the server, as those of a WRITE.
    ToServer,
}

/// The first word of a header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// All bytes up to a position have arrived.
    Acknowledge,
    /// A part of the bytes, from a position on.
    Data,
    /// The client begins a run.
    Start,
}

#[derive(Clone, Copy, Debug)]
struct Head {
    kind: Kind,
    run: u64,
    /// Of data and acknowledgements; the length of a run that starts.
    position: usize,
    /// Of a run that starts.
    direction: Direction,
    train_datagrams: usize,
    window_bytes: usize,
}

impl Head {
    fn words(self) -> [u64; WORDS] {
        let kind = match (self.kind, self.direction) {
            (Kind::Acknowledge, _) => 1,
            (Kind::Data, _) => 2,
            (Kind::Start, Direction::FromServer) => 3,
            (Kind::Start, Direction::ToServer) => 4,
        };
        let rest = [self.position, self.train_datagrams, self.window_bytes].map(|it| it as u64);
        [kind, self.run, rest[0], rest[1], rest[2]]
    }

    fn write(self, to: &mut [u8]) {
        for (place, word) in to.chunks_exact_mut(size_of::<u64>()).zip(self.words()) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (index, word) in words.iter_mut().enumerate() {
            let at = index * size_of::<u64>();
            *word = u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?);
        }
        let (kind, direction) = match words[0] {
            1 => (Kind::Acknowledge, Direction::ToServer),
            2 => (Kind::Data, Direction::ToServer),
            3 => (Kind::Start, Direction::FromServer),
            4 => (Kind::Start, Direction::ToServer),
            _ => return None,
        };
        let number = |word: u64| usize::try_from(word).ok();
        Some(Self {
            kind,
            run: words[1],
            position: number(words[2])?,
            direction,
            train_datagrams: number(words[3])?,
            window_bytes: number(words[4])?,
        })
    }
}

/// What an end does at present.
#[derive(Clone, Copy, Debug)]
struct Run {
    id: u64,
    sends: bool,
    length: usize,
    /// Bytes that are sent, or that have arrived.
    position: usize,
    acknowledged: usize,
    progress_at: Duration,
    repeated_at: Duration,
    /// How often it was sent again since there was progress.
    repeats: u32,
}

impl Run {
    const fn is_done(&self) -> bool {
        self.acknowledged == self.length && self.position == self.length
    }
}

/// One end of the stream.
struct End<'a> {
    socket: &'a UdpSocket,
    shape: Shape,
    memory: &'a mut [u8],
    /// The other end; `None` if the socket is connected to it.
    to: Option<SocketAddrV6>,
    heads: Vec<[u8; HEADER_BYTES_MAX]>,
    slices: Vec<iovec>,
    run: Option<Run>,
}

impl<'a> End<'a> {
    fn new(socket: &'a UdpSocket, memory: &'a mut [u8], shape: Shape) -> io::Result<Self> {
        if !(HEADER_BYTES_MIN..=HEADER_BYTES_MAX).contains(&shape.header_bytes)
            || shape.piece_bytes == 0
            || shape.datagram_bytes() > TRAIN_BYTES_MAX
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let datagram = c_int::try_from(shape.datagram_bytes()).map_err(io::Error::other)?;
        set_udp_option(socket, libc::UDP_SEGMENT, datagram)?;
        set_udp_option(socket, libc::UDP_GRO, 1)?;
        // Without the right to have more than others, as much as the system gives.
        if sockopt::set_socket_recv_buffer_size_force(socket, BUFFER_BYTES).is_err() {
            sockopt::set_socket_recv_buffer_size(socket, BUFFER_BYTES)?;
        }
        let room = sockopt::socket_recv_buffer_size(socket)? / 2;
        let shape = Shape { window_bytes: shape.window_bytes.min(room), ..shape };
        Ok(Self {
            socket,
            shape,
            memory,
            to: None,
            heads: vec![[0; HEADER_BYTES_MAX]; RECEIVED_DATAGRAMS_MAX],
            slices: vec![
                iovec { iov_base: ptr::null_mut(), iov_len: 0 };
                2 * RECEIVED_DATAGRAMS_MAX
            ],
            run: None,
        })
    }

    /// Sends one header without data.
    fn say(&mut self, kind: Kind, position: usize, direction: Direction) -> io::Result<()> {
        let Some(run) = self.run else { return Ok(()) };
        let Shape { train_datagrams, window_bytes, .. } = self.shape;
        let head = Head { kind, run: run.id, position, direction, train_datagrams, window_bytes };
        let mut bytes = [0; HEADER_BYTES_MIN];
        head.write(&mut bytes);
        let sent = match self.to {
            Some(to) => self.socket.send_to(&bytes, to),
            None => self.socket.send(&bytes),
        };
        // What is lost here is said again.
        taken(sent).map(drop)
    }

    /// Sends the next train if the window has room for it.
    fn send_train(&mut self) -> io::Result<bool> {
        let Some(mut run) = self.run else { return Ok(false) };
        let bytes = self.shape.train_bytes().min(run.length - run.position);
        let outstanding = run.position - run.acknowledged;
        if bytes == 0 || outstanding > 0 && outstanding + bytes > self.shape.window_bytes {
            return Ok(false);
        }
        let (piece_bytes, header_bytes) = (self.shape.piece_bytes, self.shape.header_bytes);
        let mut used = 0;
        let data = &self.memory[run.position..run.position + bytes];
        for ((index, piece), bytes) in data.chunks(piece_bytes).enumerate().zip(&mut self.heads) {
            let head = Head {
                kind: Kind::Data,
                run: run.id,
                position: run.position + index * piece_bytes,
                direction: Direction::ToServer,
                train_datagrams: 0,
                window_bytes: 0,
            };
            head.write(bytes);
            self.slices[used] =
                iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: header_bytes };
            self.slices[used + 1] =
                iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
            used += 2;
        }
        let mut name = self.to.map(address);
        let mut header = empty_header();
        header.msg_iov = self.slices.as_mut_ptr();
        header.msg_iovlen = used;
        if let Some(name) = &mut name {
            header.msg_name = ptr::from_mut(name).cast();
            header.msg_namelen = NAME_BYTES;
        }
        // SAFETY: header, name, heads and memory are live, and their true lengths were passed.
        let sent = unsafe {
            libc::sendmsg(self.socket.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT)
        };
        if taken(usize::try_from(sent).map_err(|_| io::Error::last_os_error()))?.is_some() {
            run.position += bytes;
            self.run = Some(run);
        }
        Ok(true)
    }

    /// Reads one train or header, if one is there: payloads directly into the memory behind what has arrived.
    fn receive(&mut self) -> io::Result<bool> {
        let (piece_bytes, header_bytes) = (self.shape.piece_bytes, self.shape.header_bytes);
        let free = match self.run {
            Some(Run { sends: false, length, position, .. }) => position..length,
            _ => 0..0,
        };
        let mut used = 0;
        let mut pieces = self.memory[free].chunks_mut(piece_bytes);
        let most = RECEIVED_BYTES_MAX.div_ceil(self.shape.datagram_bytes());
        for head in self.heads.iter_mut().take(most) {
            self.slices[used] = iovec { iov_base: head.as_mut_ptr().cast(), iov_len: header_bytes };
            used += 1;
            let Some(piece) = pieces.next() else { break };
            self.slices[used] = iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() };
            used += 1;
        }
        let mut name = address(NOBODY);
        let mut header = empty_header();
        header.msg_iov = self.slices.as_mut_ptr();
        header.msg_iovlen = used;
        header.msg_name = ptr::from_mut(&mut name).cast();
        header.msg_namelen = NAME_BYTES;
        // SAFETY: header, name, heads and memory are live, and their true lengths were passed.
        let received =
            unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
        let received = taken(usize::try_from(received).map_err(|_| io::Error::last_os_error()))?;
        let Some(bytes) = received else { return Ok(false) };
        if self.to.is_some() {
            let port = u16::from_be(name.sin6_port);
            self.to = Some(SocketAddrV6::new(name.sin6_addr.s6_addr.into(), port, 0, 0));
        }
        self.accept(bytes)?;
        Ok(true)
    }

    /// Handles what was received: the headers are those of the datagrams, and the payloads are in place.
    fn accept(&mut self, bytes: usize) -> io::Result<()> {
        let datagram_bytes = self.shape.datagram_bytes();
        let begun_at = self.run.map_or(0, |run| run.position);
        for index in 0..bytes.div_ceil(datagram_bytes) {
            let payload = (bytes - index * datagram_bytes).min(datagram_bytes);
            let payload = payload.saturating_sub(self.shape.header_bytes);
            let Some(head) = self.heads.get(index).and_then(|head| Head::parse(head)) else {
                continue;
            };
            // Where the kernel put the payload.
            let place = begun_at + index * self.shape.piece_bytes;
            match (&mut self.run, head.kind) {
                (Some(run), Kind::Data)
                    if head.run == run.id
                        && !run.sends
                        && head.position == run.position
                        && place == run.position =>
                {
                    run.position = (run.position + payload).min(run.length);
                    run.progress_at = now();
                }
                (Some(run), Kind::Acknowledge)
                    if head.run == run.id
                        && run.sends
                        && (run.acknowledged..=run.length).contains(&head.position) =>
                {
                    run.acknowledged = head.position;
                    run.position = run.position.max(head.position);
                    run.progress_at = now();
                }
                (run, Kind::Start) => {
                    let is_known = run.is_some_and(|run| run.id == head.run);
                    if !is_known && head.position <= self.memory.len() {
                        self.shape.train_datagrams = head.train_datagrams;
                        self.shape.window_bytes = self.shape.window_bytes.min(head.window_bytes);
                        *run = Some(Run {
                            id: head.run,
                            sends: head.direction == Direction::FromServer,
                            length: head.position,
                            position: 0,
                            acknowledged: 0,
                            progress_at: now(),
                            repeated_at: now(),
                            repeats: 0,
                        });
                    }
                }
                // Of another run, or sent again.
                _ => {}
            }
        }
        self.acknowledge(begun_at)
    }

    /// Acknowledges if it is time: often enough that the window never closes, and whatever does not continue what has
    /// arrived up to `begun_at`: the other end goes on from there.
    fn acknowledge(&mut self, begun_at: usize) -> io::Result<()> {
        let Some(run) = self.run.filter(|run| !run.sends) else { return Ok(()) };
        let new = run.position - run.acknowledged;
        let is_due = new >= self.shape.window_bytes / ACKNOWLEDGEMENTS || run.is_complete();
        if is_due || run.position == begun_at {
            self.say(Kind::Acknowledge, run.position, Direction::ToServer)?;
            self.run = Some(Run { acknowledged: run.position, ..run });
        }
        Ok(())
    }

    /// Sends again what was not acknowledged for some time.
    fn repeat(&mut self, now: Duration) -> bool {
        let Some(run) = &mut self.run else { return false };
        if run.progress_at > run.repeated_at {
            run.repeats = 0;
        }
        let since = run.progress_at.max(run.repeated_at);
        // Twice as late each time: an end that is slow gets what was sent before, and not only the same again.
        let is_due =
            now.saturating_sub(since) > REPEAT * 2_u32.pow(run.repeats.min(REPEATS_DOUBLED));
        if is_due {
            run.repeats += 1;
            run.repeated_at = now;
            run.position = if run.sends { run.acknowledged } else { run.position };
        }
        is_due
    }
}

impl Run {
    const fn is_complete(&self) -> bool {
        self.position == self.length
    }
}

/// Who sent nothing yet.
const NOBODY: SocketAddrV6 = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0);

const NAME_BYTES: u32 = 28;
const _: () = assert!(size_of::<sockaddr_in6>() == NAME_BYTES as usize);

fn empty_header() -> msghdr {
    // SAFETY: an all-zero msghdr is valid: null pointers and zero lengths.
    unsafe { zeroed() }
}

/// What a call took; `None` if it could not take anything now.
fn taken(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => Ok(None),
            _ => Err(error),
        },
    }
}

fn set_udp_option(socket: &UdpSocket, option: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the option is read from a live number of the length that is passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            option,
            ptr::from_ref(&value).cast(),
            u32::try_from(size_of::<c_int>()).unwrap_or(0),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Does what clients ask for until the flag is set: sends from `memory`, or receives into it.
///
/// # Errors
/// The system's error.
pub fn serve(
    socket: &UdpSocket,
    memory: &mut [u8],
    shape: Shape,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut end = End::new(socket, memory, shape)?;
    end.to = Some(NOBODY);
    let mut polls = 0_u32;
    while !stop.load(Ordering::Acquire) {
        if end.receive()? {
            continue;
        }
        if end.run.is_some_and(|run| run.sends) && end.send_train()? {
            continue;
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(POLLS_PER_CLOCK_READING) {
            end.repeat(now());
        }
    }
    Ok(())
}

/// Moves `memory` to or from the server, whose memory is at least as long; returns the elapsed time. `run` is another
/// number than that of the run before. The socket is connected to the server.
///
/// # Errors
/// The system's error, or a server that does not respond.
pub fn run(
    socket: &UdpSocket,
    memory: &mut [u8],
    shape: Shape,
    direction: Direction,
    run: u64,
) -> io::Result<Duration> {
    let length = memory.len();
    let mut end = End::new(socket, memory, shape)?;
    // The end of an earlier run may still be on its way.
    while end.receive()? {}
    let begun = now();
    let sends = direction == Direction::ToServer;
    let fresh = Run {
        id: run,
        sends,
        length,
        position: 0,
        acknowledged: 0,
        progress_at: begun,
        repeated_at: begun,
        repeats: 0,
    };
    end.run = Some(fresh);
    end.say(Kind::Start, length, direction)?;
    let mut polls = 0_u32;
    loop {
        if end.run.is_some_and(|run| run.is_done()) {
            return Ok(now() - begun);
        }
        if end.receive()? || (sends && end.send_train()?) {
            continue;
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(POLLS_PER_CLOCK_READING) {
            let moment = now();
            let silent = end.run.map_or(Duration::ZERO, |run| moment - run.progress_at);
            if silent > SILENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if end.repeat(moment) {
                end.say(Kind::Start, length, direction)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::echo::bind;

    const SHAPE: Shape =
        Shape { header_bytes: 84, piece_bytes: 4096, train_datagrams: 8, window_bytes: 1 << 20 };

    /// Bytes of which no two pages are equal.
    fn pattern(length: usize, salt: usize) -> Vec<u8> {
        (0..length)
            .map(|at| u8::try_from((at / 251 + at % 251 + salt) % 256).unwrap_or(0))
            .collect()
    }

    /// Runs one after the other between two sockets, in both directions, with the bytes of each compared.
    fn moves(shape: Shape, length: usize) {
        let [server, client] = [(); 2].map(|()| bind(Ipv6Addr::LOCALHOST, 0).expect("a port"));
        client.connect(server.local_addr().expect("it is bound")).expect("it is local");
        let stop = AtomicBool::new(false);
        let mut far = pattern(length, 1);
        let sent = pattern(length, 2);
        let mut read = vec![0; length];
        thread::scope(|scope| {
            let serving = scope.spawn(|| serve(&server, &mut far, shape, &stop));
            run(&client, &mut read, shape, Direction::FromServer, 1).expect("it arrives");
            assert!(read == pattern(length, 1), "other bytes than the server's");
            let mut near = sent.clone();
            run(&client, &mut near, shape, Direction::ToServer, 2).expect("it arrives");
            run(&client, &mut read, shape, Direction::FromServer, 3).expect("it arrives");
            stop.store(true, Ordering::Release);
            serving.join().expect("it does not panic").expect("it serves");
        });
        assert!(far == sent, "the server has other bytes than were sent");
        assert!(read == sent, "other bytes than were sent before");
    }

    #[test]
    fn a_stream_puts_all_bytes_where_they_belong_in_both_directions() {
        moves(SHAPE, 4 << 20);
        moves(Shape { piece_bytes: 1368, train_datagrams: 24, ..SHAPE }, (1 << 20) + 5);
    }

    #[test]
    fn trains_are_as_long_as_the_system_takes_at_most() {
        let shape = Shape { train_datagrams: 1000, ..SHAPE };
        assert_eq!(shape.longest_train(), 15);
        moves(shape, 1 << 20);
        let short = Shape { piece_bytes: 100, ..shape };
        assert_eq!(short.longest_train(), SENT_DATAGRAMS_MAX);
    }

    #[test]
    fn a_window_below_a_train_still_moves() {
        moves(Shape { window_bytes: 1, ..SHAPE }, 1 << 18);
    }

    #[test]
    fn what_is_lost_is_sent_again() {
        let [server, client] = [(); 2].map(|()| bind(Ipv6Addr::LOCALHOST, 0).expect("a port"));
        let mut memory = pattern(8 << 20, 3);
        client.connect(server.local_addr().expect("it is bound")).expect("it is local");
        let stop = AtomicBool::new(false);
        let mut far = vec![0; memory.len()];
        let shape = Shape { window_bytes: 8 << 20, ..SHAPE };
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let mut end = End::new(&server, &mut far, shape)?;
                end.to = Some(NOBODY);
                let mut dropped = 0;
                while !stop.load(Ordering::Acquire) {
                    end.receive()?;
                    // A train of each MiB is lost.
                    let position = end.run.map_or(0, |run| run.position);
                    if position > (dropped + 1) << 20 && server.recv(&mut [0]).is_ok() {
                        dropped += 1;
                    }
                }
                Ok::<_, io::Error>(dropped)
            });
            let done = run(&client, &mut memory, shape, Direction::ToServer, 7);
            stop.store(true, Ordering::Release);
            let dropped = serving.join().expect("it does not panic").expect("it serves");
            done.expect("all arrives in the end");
            assert!(dropped > 1, "nothing was lost");
        });
        assert!(far == pattern(8 << 20, 3), "the server has other bytes than were sent");
    }

    #[test]
    fn a_server_that_is_not_there_ends_the_run() {
        let client = bind(Ipv6Addr::LOCALHOST, 0).expect("a port");
        let silent = bind(Ipv6Addr::LOCALHOST, 0).expect("a port");
        client.connect(silent.local_addr().expect("it is bound")).expect("it is local");
        let ended = run(&client, &mut [0; 100], SHAPE, Direction::FromServer, 1);
        assert_eq!(ended.expect_err("nobody answers").kind(), io::ErrorKind::TimedOut);
    }
}
