//! The other floor: bare `sendmmsg` and `recvmmsg` with many requests outstanding.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{SocketAddrV6, UdpSocket},
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrIn6, recvmmsg, sendmmsg};

use crate::{echo::Sizes, placement::now};

/// Datagrams in one system call at most.
const BATCH: usize = 64;

/// How long nothing may come before the run ends in an error.
const SILENCE: Duration = Duration::from_secs(2);

/// Buffers for batches in both directions.
struct Batches {
    receive: Vec<Vec<u8>>,
    headers: MultiHeaders<SockaddrIn6>,
    send: MultiHeaders<SockaddrIn6>,
    answer: Vec<u8>,
}

impl Batches {
    fn new(receive_bytes: usize, send_bytes: usize) -> Self {
        Self {
            receive: vec![vec![0; receive_bytes]; BATCH],
            headers: MultiHeaders::preallocate(BATCH, None),
            send: MultiHeaders::preallocate(BATCH, None),
            answer: vec![0; send_bytes],
        }
    }

    /// What is there, at most a batch; where each came from.
    fn receive(&mut self, socket: &UdpSocket, from: &mut Vec<SockaddrIn6>) -> io::Result<()> {
        let mut slices: Vec<_> =
            self.receive.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let received = recvmmsg(
            socket.as_raw_fd(),
            &mut self.headers,
            slices.iter_mut(),
            MsgFlags::MSG_DONTWAIT,
            None,
        );
        match received {
            Ok(messages) => from.extend(messages.filter_map(|message| message.address)),
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// One datagram to each address; how many went out.
    fn send(&mut self, socket: &UdpSocket, to: &[SockaddrIn6]) -> io::Result<usize> {
        let slices: Vec<_> = to.iter().map(|_| [IoSlice::new(&self.answer)]).collect();
        let to: Vec<_> = to.iter().map(|address| Some(*address)).collect();
        match sendmmsg(socket.as_raw_fd(), &mut self.send, &slices, &to, [], MsgFlags::MSG_DONTWAIT)
        {
            Ok(results) => Ok(results.count()),
            Err(nix::Error::EAGAIN | nix::Error::ENOBUFS | nix::Error::EINTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

/// Answers whole batches until the flag is set.
///
/// # Errors
/// What the system says.
pub fn serve(socket: &UdpSocket, sizes: Sizes, stop: &AtomicBool) -> io::Result<()> {
    let mut batches = Batches::new(sizes.request_bytes, sizes.answer_bytes);
    let mut waiting = Vec::with_capacity(2 * BATCH);
    while !stop.load(Ordering::Acquire) {
        if waiting.len() < BATCH {
            batches.receive(socket, &mut waiting)?;
        }
        let first = &waiting[..waiting.len().min(BATCH)];
        let sent = if first.is_empty() { 0 } else { batches.send(socket, first)? };
        waiting.drain(..sent);
    }
    Ok(())
}

/// Keeps `outstanding` requests on their way until `operation_count` were answered; answers how
/// long that took. What the network loses is asked again after a silence of a millisecond.
///
/// # Errors
/// What the system says, or a server that is silent.
pub fn run(
    socket: &UdpSocket,
    to: SocketAddrV6,
    sizes: Sizes,
    outstanding: usize,
    operation_count: usize,
) -> io::Result<Duration> {
    let mut batches = Batches::new(sizes.answer_bytes, sizes.request_bytes);
    let to = vec![SockaddrIn6::from(to); BATCH];
    let mut answers = Vec::with_capacity(BATCH);
    let (mut answered, mut in_flight) = (0, 0_usize);
    let start = now();
    let mut heard = start;
    while answered < operation_count {
        let room = outstanding.saturating_sub(in_flight).min(BATCH);
        if room > 0 {
            in_flight += batches.send(socket, &to[..room])?;
        }
        answers.clear();
        batches.receive(socket, &mut answers)?;
        if answers.is_empty() {
            let silence = now() - heard;
            if silence > SILENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if silence > Duration::from_millis(1) {
                in_flight = 0;
            }
            continue;
        }
        heard = now();
        answered += answers.len();
        in_flight = in_flight.saturating_sub(answers.len());
    }
    Ok(now() - start)
}
