//! The pipelined baseline: bare `sendmmsg` and `recvmmsg` with many requests outstanding.

use std::{
    io,
    mem::{size_of, zeroed},
    net::{SocketAddrV6, UdpSocket},
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use libc::{c_int, iovec, mmsghdr, sockaddr_in6};

use crate::{echo::Sizes, placement::now};

/// Most datagrams in one system call.
const BATCH: usize = 64;

/// Time without a datagram after which the run ends with an error.
const SILENCE: Duration = Duration::from_secs(2);

/// Time without a response after which requests are repeated.
const REPEAT: Duration = Duration::from_millis(1);

/// Time without a datagram after which the begin of a train is given up: the rest of it was lost. Shorter than
/// [`REPEAT`], so that a repeated train is not taken for that rest.
const TRAIN_GAP: Duration = Duration::from_micros(500);

/// Buffers for batches in both directions.
struct Batches {
    receive: Vec<Vec<u8>>,
    from: Vec<sockaddr_in6>,
    answer: Vec<u8>,
    /// Written again for each call, which alone reads them.
    headers: Vec<mmsghdr>,
    slices: Vec<iovec>,
}

impl Batches {
    fn new(receive_bytes: usize, send_bytes: usize) -> Self {
        // SAFETY: an `mmsghdr` of zeros is a valid one, without buffers.
        let empty: mmsghdr = unsafe { zeroed() };
        Self {
            receive: vec![vec![0; receive_bytes]; BATCH],
            from: vec![address(SocketAddrV6::new([0; 16].into(), 0, 0, 0)); BATCH],
            answer: vec![0; send_bytes],
            headers: vec![empty; BATCH],
            slices: vec![iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH],
        }
    }

    /// Receives what has arrived, at most a batch, and records the sources.
    fn receive(&mut self, socket: &UdpSocket, from: &mut Vec<sockaddr_in6>) -> io::Result<()> {
        let parts = self.slices.iter_mut().zip(&mut self.receive).zip(&mut self.from);
        for (header, ((slice, buffer), name)) in self.headers.iter_mut().zip(parts) {
            *slice = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
            point(header, slice, name);
        }
        // SAFETY: the loop has pointed every header at live buffers of this object, with their true
        // lengths.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count(self.headers.len()),
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let received = taken(received)?;
        from.extend(self.from.iter().take(received));
        Ok(())
    }

    /// Sends one datagram to each address, at most a batch; returns the number sent.
    fn send(&mut self, socket: &UdpSocket, to: &mut [sockaddr_in6]) -> io::Result<usize> {
        let (base, length) = (self.answer.as_mut_ptr(), self.answer.len());
        let parts = self.slices.iter_mut().zip(to.iter_mut());
        for (header, (slice, name)) in self.headers.iter_mut().zip(parts) {
            *slice = iovec { iov_base: base.cast(), iov_len: length };
            point(header, slice, name);
        }
        // SAFETY: the loop has pointed the passed number of headers at live buffers of this object and
        // of `to`, with their true lengths.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count(to.len().min(self.headers.len())),
                libc::MSG_DONTWAIT,
            )
        };
        taken(sent)
    }
}

/// Points a header at one buffer and the address of the other end.
fn point(header: &mut mmsghdr, slice: &mut iovec, name: &mut sockaddr_in6) {
    header.msg_hdr.msg_iov = slice;
    header.msg_hdr.msg_iovlen = 1;
    header.msg_hdr.msg_name = ptr::from_mut(name).cast();
    header.msg_hdr.msg_namelen = count(size_of::<sockaddr_in6>());
}

fn count(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}

/// How many messages a call took; none if it could take none now.
fn taken(result: c_int) -> io::Result<usize> {
    usize::try_from(result).or_else(|_| {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => Ok(0),
            _ => Err(error),
        }
    })
}

pub(crate) fn address(of: SocketAddrV6) -> sockaddr_in6 {
    sockaddr_in6 {
        sin6_family: libc::sa_family_t::try_from(libc::AF_INET6).unwrap_or(0),
        sin6_port: of.port().to_be(),
        sin6_flowinfo: of.flowinfo(),
        sin6_addr: libc::in6_addr { s6_addr: of.ip().octets() },
        sin6_scope_id: of.scope_id(),
    }
}

/// Responds to whole batches until the flag is set.
///
/// # Errors
/// The system's error.
pub fn serve(socket: &UdpSocket, sizes: Sizes, stop: &AtomicBool) -> io::Result<()> {
    sizes.apply(socket)?;
    let mut batches = Batches::new(sizes.request_bytes, sizes.answer_bytes);
    let (mut arrived, mut waiting) = (Vec::with_capacity(BATCH), Vec::with_capacity(2 * BATCH));
    let datagrams = sizes.request_datagrams();
    let mut empty_since = None;
    while !stop.load(Ordering::Acquire) {
        if waiting.len() < BATCH {
            let before = arrived.len();
            batches.receive(socket, &mut arrived)?;
            if arrived.len() > before || arrived.is_empty() {
                empty_since = None;
            } else {
                let since = *empty_since.get_or_insert_with(now);
                if now() - since >= TRAIN_GAP {
                    arrived.clear();
                }
            }
            let complete = arrived.len() - arrived.len() % datagrams;
            waiting.extend(arrived.drain(..complete).step_by(datagrams));
        }
        let first = waiting.len().min(BATCH);
        let sent = if first == 0 { 0 } else { batches.send(socket, &mut waiting[..first])? };
        waiting.drain(..sent);
    }
    Ok(())
}

/// Keeps `outstanding` requests in flight until `operation_count` have a response; returns the elapsed
/// time. Requests are repeated after [`REPEAT`] without a response.
///
/// # Errors
/// The system's error, or a server that does not respond.
pub fn run(
    socket: &UdpSocket,
    to: SocketAddrV6,
    sizes: Sizes,
    outstanding: usize,
    operation_count: usize,
) -> io::Result<Duration> {
    sizes.apply(socket)?;
    let mut batches = Batches::new(sizes.answer_bytes, sizes.request_bytes);
    let mut to = vec![address(to); BATCH];
    let mut answers = Vec::with_capacity(2 * BATCH);
    let (mut answered, mut in_flight) = (0, 0_usize);
    let start = now();
    let mut last_response = start;
    while answered < operation_count {
        let room = outstanding.saturating_sub(in_flight).min(BATCH);
        if room > 0 {
            in_flight += batches.send(socket, &mut to[..room])?;
        }
        let before = answers.len();
        batches.receive(socket, &mut answers)?;
        if answers.len() == before {
            let silence = now() - last_response;
            if silence > SILENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if silence > REPEAT {
                in_flight = 0;
                answers.clear();
            }
            continue;
        }
        last_response = now();
        let complete = answers.len() / sizes.answer_datagrams();
        answers.drain(..complete * sizes.answer_datagrams());
        answered += complete;
        in_flight = in_flight.saturating_sub(complete);
    }
    Ok(now() - start)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::echo::bind;

    #[test]
    fn every_request_of_a_flood_is_answered_to_where_it_came_from() {
        flood_of(Sizes { request_bytes: 100, answer_bytes: 300, datagram_bytes: 300 });
    }

    #[test]
    fn requests_and_responses_may_be_trains() {
        flood_of(Sizes { request_bytes: 100, answer_bytes: 300, datagram_bytes: 140 });
        flood_of(Sizes { request_bytes: 300, answer_bytes: 100, datagram_bytes: 140 });
    }

    #[test]
    fn a_train_that_lost_a_datagram_does_not_shift_those_behind_it() {
        let [server, client] = [(); 2].map(|()| bind(Ipv6Addr::LOCALHOST, 0).expect("a port"));
        client.set_nonblocking(false).expect("it is a socket");
        client.set_read_timeout(Some(Duration::from_millis(50))).expect("it is positive");
        client.connect(server.local_addr().expect("it is bound")).expect("it is local");
        let sizes = Sizes { request_bytes: 300, answer_bytes: 100, datagram_bytes: 140 };
        sizes.apply(&client).expect("the kernel makes trains");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve(&server, sizes, &stop));
            let send = |lengths: &[usize]| {
                for bytes in lengths {
                    client.send(&vec![0; *bytes]).expect("it is local");
                }
                client.recv(&mut [0; 400]).is_ok()
            };
            let mut early = 0;
            for _ in 0..3 {
                // The third is the first of another train, whatever came before.
                early += usize::from(send(&[140, 140])) + usize::from(send(&[140]));
            }
            // The answer may need longer on a busy machine.
            let has_answer = (0..100).any(|_| send(&[300]));
            stop.store(true, Ordering::Release);
            serving.join().expect("it does not panic").expect("it serves");
            // A server that did not run for that long sees no pause.
            assert!(early < 3, "the rest is kept");
            assert!(has_answer);
        });
    }

    fn flood_of(sizes: Sizes) {
        let [server, client] = [(); 2].map(|()| bind(Ipv6Addr::LOCALHOST, 0).expect("a port"));
        let port = server.local_addr().expect("it is bound").port();
        let to = SocketAddrV6::new(Ipv6Addr::LOCALHOST, port, 0, 0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve(&server, sizes, &stop));
            // More than a batch of both ends.
            let done = run(&client, to, sizes, 3 * BATCH, 10_000);
            stop.store(true, Ordering::Release);
            serving.join().expect("it does not panic").expect("it serves");
            done.expect("every request gets a response");
        });
        // Responses that were in flight when the last one arrived.
        let mut answer = [0; 400];
        let last = sizes.answer_bytes - (sizes.answer_datagrams() - 1) * sizes.datagram_bytes;
        while let Ok((bytes, from)) = client.recv_from(&mut answer) {
            assert!(bytes == last || bytes == sizes.datagram_bytes, "{bytes}");
            assert_eq!(from, to.into());
        }
    }
}
