//! Queue pairs of the reliable connected service: chains of READs, messages, and their completions.

mod connect;

use std::ffi::c_int;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;

use crate::completions::Completions;
use crate::device::Port;
use crate::error::{ConnectError, Failure, PostError, VerbError};
use crate::library::Library;
use crate::memory::{Buffer, BufferPool, Pool, ProtectionDomain, RemotePlace};
use crate::slots::Slots;
use crate::sys::{self, attribute, state, status};

/// The most READs in a chain.
pub const CHAIN_MAX: usize = 4;

/// Marks the numbers of requests to receive.
const RECEIVE: u64 = 1 << 63;

/// Numbers of packets and of queue pairs have 24 bits.
const NUMBER_MASK: u32 = (1 << 24) - 1;

/// The most repetitions of a packet. The specification allows 7, but Linux's rxe (6.1 and 6.12) repeats for ever then.
const RETRIES_MAX: u8 = 6;

/// What a queue pair is made for.
#[derive(Clone, Debug)]
pub struct QueuePairOptions {
    /// Chains and messages that are outstanding at the same time.
    pub requests: u32,
    /// Buffers that wait for messages of the peer at the same time.
    pub receives: u32,
    /// READs of the peer that are executed at the same time; 0 forbids them.
    pub reads_in: u8,
    /// READs that are executed by the peer at the same time; more wait in the device. At most the peer's `reads_in`.
    pub reads_out: u8,
    /// The time in which the peer's device acknowledges a packet; rounded up to 4.096 us times a power of two.
    pub acknowledged_within: Duration,
    /// How often a packet is repeated, at most 6, before the queue pair fails.
    pub retries: u8,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        Self {
            requests: 32,
            receives: 32,
            reads_in: 16,
            reads_out: 16,
            acknowledged_within: Duration::from_millis(120),
            retries: RETRIES_MAX,
        }
    }
}

/// What a peer must know of a queue pair to connect its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueuePairAddress {
    /// The GID of the port.
    pub address: Ipv6Addr,
    /// The number of the queue pair at its device, of 24 bits.
    pub number: u32,
    /// The number of the first packet that it sends, of 24 bits.
    pub first_packet: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Work {
    /// Reads of the peer's memory.
    Read,
    /// Waits for a message of the peer.
    Receive,
    /// Sends a message.
    Send,
}

/// One READ of a chain: `length` bytes of the peer's memory `from` a place, to the bytes of the buffer from `into` on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Read {
    /// The place in the peer's memory.
    pub from: RemotePlace,
    /// Where in the buffer they go.
    pub into: usize,
    /// How many bytes.
    pub length: usize,
}

/// A request that ended.
#[derive(Debug)]
pub struct Completed {
    /// The number that the caller gave it.
    pub token: u64,
    /// What it did.
    pub work: Work,
    /// How it ended.
    pub result: Result<Done, Failure>,
}

/// A request that succeeded.
#[derive(Debug)]
pub struct Done {
    /// Its buffer.
    pub buffer: Buffer,
    /// The length of the message that was received; 0 otherwise.
    pub received: usize,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    New,
    Connected,
    Failed,
}

type PostSend = unsafe extern "C" fn(
    *mut sys::QueuePair,
    *mut sys::SendRequest,
    *mut *mut sys::SendRequest,
) -> c_int;
type PostReceive = unsafe extern "C" fn(
    *mut sys::QueuePair,
    *mut sys::ReceiveRequest,
    *mut *mut sys::ReceiveRequest,
) -> c_int;

/// A queue pair with its completion queue. Requests complete in any order of sends and receives, but those of each kind
/// in the order in which they were posted.
#[derive(Debug)]
pub struct QueuePair {
    sends: Slots,
    receives: Slots,
    state: State,
    options: QueuePairOptions,
    port: Port,
    first_packet: u32,
    post_send: PostSend,
    post_receive: PostReceive,
    /// After the deadline of `connect`: a thread that may still use the queue pair.
    connecting: Option<connect::Connecting>,
    /// `None` only in `drop`.
    raw: Option<NonNull<sys::QueuePair>>,
    completions: Completions,
    /// After the queue pair and its completions: the memory that the device uses until it is destroyed.
    pool: Arc<Pool>,
}

// SAFETY: the verbs are safe for threads, and everything that the program changes needs `&mut self`.
unsafe impl Send for QueuePair {}
// SAFETY: as above: what needs `&self` only reads fields that do not change.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A queue pair of a domain at a port, whose requests use buffers of one pool.
    ///
    /// # Errors
    /// If the device has no more, or allows less than was asked for.
    pub fn new(
        domain: &ProtectionDomain,
        port: Port,
        pool: &BufferPool,
        options: QueuePairOptions,
    ) -> Result<Self, ConnectError> {
        let domain = &domain.0;
        if !pool.0.is_in(domain) {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "a pool of another domain");
            return Err(VerbError { verb: "ibv_create_qp", source }.into());
        }
        let limits = crate::Device(Arc::clone(&domain.context)).limits()?;
        let chain = u32::try_from(CHAIN_MAX).unwrap_or(u32::MAX);
        let send_requests = options.requests.max(1).saturating_mul(chain);
        let receives = options.receives.max(1);
        for (what, wanted, most) in [
            ("work requests", send_requests.max(receives), limits.requests),
            ("READs of its peer", options.reads_in.into(), limits.reads_in.into()),
            ("READs", options.reads_out.into(), limits.reads_out.into()),
            ("repetitions", options.retries.into(), RETRIES_MAX.into()),
        ] {
            if wanted > most {
                return Err(ConnectError::TooMany { what, wanted, most });
            }
        }
        let completions = Completions::new(domain, send_requests.saturating_add(receives))?;
        let cq = completions.cq.as_ptr();
        let mut init = sys::QueuePairInit {
            user: ptr::null_mut(),
            send_cq: cq,
            receive_cq: cq,
            shared_receive_queue: ptr::null_mut(),
            capacity: sys::QueuePairCapacity {
                sends: send_requests,
                receives,
                send_pieces: 1,
                receive_pieces: 1,
                inline_bytes: 0,
            },
            kind: sys::QPT_RC,
            signal_all: 0,
        };
        let library = domain.context.library;
        // SAFETY: the domain and the completion queue exist; the latter stays until after the queue pair.
        let raw = unsafe { (library.create_qp)(domain.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_create_qp"))?;
        // SAFETY: the device is open.
        let operations = unsafe { &(*domain.context.raw.as_ptr()).operations };
        let (post_send, post_receive) = (operations.post_send, operations.post_recv);
        let mut random = [0; 4];
        // Of blocking kind it fails only before the system has started.
        let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
        let mut queue_pair = Self {
            sends: Slots::new(options.requests.max(1)),
            receives: Slots::new(receives),
            state: State::New,
            port,
            first_packet: u32::from_ne_bytes(random) & NUMBER_MASK,
            post_send: post_send.unwrap_or(no_post_send),
            post_receive: post_receive.unwrap_or(no_post_receive),
            connecting: None,
            raw: Some(raw),
            completions,
            pool: Arc::clone(&pool.0),
            options,
        };
        queue_pair.completions.serve(queue_pair.number());
        queue_pair.initialize()?;
        Ok(queue_pair)
    }

    /// What the peer must know to connect.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        let (address, first_packet) = (self.port.address, self.first_packet);
        QueuePairAddress { address, number: self.number(), first_packet }
    }

    /// Its number at its device, as [`crate::DeviceEvent::QueuePairFailed`] names it.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair exists until `drop`, and its number does not change.
        self.raw.map_or(0, |raw| unsafe { (*raw.as_ptr()).number })
    }

    fn library(&self) -> &'static Library {
        self.completions.domain.context.library
    }

    /// Posts READs that the peer's device executes in this order, and that complete together.
    ///
    /// # Errors
    /// With the buffer if nothing was posted. If the device refused a later READ of the chain it has the earlier ones: the
    /// chain counts as posted and fails ([`Failure::PartlyPosted`]) after all earlier ones have ended, and the queue pair
    /// has failed.
    pub fn read(
        &mut self,
        token: u64,
        buffer: Buffer,
        reads: &[Read],
    ) -> Result<(), (PostError, Buffer)> {
        if reads.is_empty() || reads.len() > CHAIN_MAX {
            return Err((PostError::Length { count: reads.len() }, buffer));
        }
        let mut pieces = ArrayVec::<_, CHAIN_MAX>::new();
        for read in reads {
            if read.length == 0 {
                return Err((PostError::NoBytes, buffer));
            }
            let Some(piece) = buffer.piece(read.into, read.length) else {
                return Err((outside(&buffer, read.into, read.length), buffer));
            };
            pieces.push(piece);
        }
        let mut chain = [sys::SendRequest::NONE; CHAIN_MAX];
        for (request, read) in chain.iter_mut().zip(reads) {
            request.opcode = sys::WR_RDMA_READ;
            request.remote_address = read.from.address;
            request.remote_key = read.from.key;
        }
        self.post(token, Work::Read, buffer, &mut chain[..reads.len()], &mut pieces)
    }

    /// Posts a message: the first bytes of the buffer.
    ///
    /// # Errors
    /// With the buffer if it was not posted.
    pub fn send(
        &mut self,
        token: u64,
        buffer: Buffer,
        length: usize,
    ) -> Result<(), (PostError, Buffer)> {
        if length == 0 {
            return Err((PostError::NoBytes, buffer));
        }
        let Some(piece) = buffer.piece(0, length) else {
            return Err((outside(&buffer, 0, length), buffer));
        };
        let mut chain = [sys::SendRequest { opcode: sys::WR_SEND, ..sys::SendRequest::NONE }];
        self.post(token, Work::Send, buffer, &mut chain, &mut [piece])
    }

    /// Links the requests with their pieces, and gives them to the device.
    fn post(
        &mut self,
        token: u64,
        work: Work,
        buffer: Buffer,
        chain: &mut [sys::SendRequest],
        pieces: &mut [sys::Piece],
    ) -> Result<(), (PostError, Buffer)> {
        if let Err(error) = self.may_post(&buffer, self.state == State::Connected) {
            return Err((error, buffer));
        }
        let Some(slot) = self.sends.next() else { return Err((PostError::Full, buffer)) };
        let mut next: *mut sys::SendRequest = ptr::null_mut();
        for (request, piece) in chain.iter_mut().zip(pieces).rev() {
            request.id = slot.into();
            request.pieces = piece;
            request.piece_count = 1;
            // Only the last one reports its success: it is executed after the others.
            request.flags = if next.is_null() { sys::SEND_SIGNALED } else { 0 };
            request.next = next;
            next = request;
        }
        let first = next;
        let mut refused = ptr::null_mut();
        let raw = self.raw.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the queue pair exists until `drop`. The requests and their pieces are on this thread's stack, and the
        // device copies them. The memory that they name is in the pool, which stays until the queue pair is destroyed,
        // and the program has given the buffer away until the device reports that it has finished.
        let code = unsafe { (self.post_send)(raw, first, &raw mut refused) };
        let result = VerbError::check("ibv_post_send", code);
        match result {
            Err(error) if refused == first => Err((error.into(), buffer)),
            Ok(()) => {
                self.sends.begin(token, work, buffer);
                Ok(())
            }
            Err(_) => {
                // The last request, which would have reported the success, is not there.
                self.sends.begin_cut(token, work, buffer);
                self.fail();
                Ok(())
            }
        }
    }

    /// Posts a buffer for a message of the peer.
    ///
    /// # Errors
    /// With the buffer if it was not posted.
    pub fn receive(&mut self, token: u64, buffer: Buffer) -> Result<(), (PostError, Buffer)> {
        if let Err(error) = self.may_post(&buffer, self.state != State::Failed) {
            return Err((error, buffer));
        }
        let Some(slot) = self.receives.next() else { return Err((PostError::Full, buffer)) };
        let length = buffer.pool.buffer_bytes();
        let Some(mut piece) = buffer.piece(0, length) else {
            return Err((outside(&buffer, 0, length), buffer));
        };
        let mut request = sys::ReceiveRequest {
            id: RECEIVE | u64::from(slot),
            next: ptr::null_mut(),
            pieces: &raw mut piece,
            piece_count: 1,
        };
        let mut refused = ptr::null_mut();
        let raw = self.raw.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: as in `post`.
        let code = unsafe { (self.post_receive)(raw, &raw mut request, &raw mut refused) };
        if let Err(error) = VerbError::check("ibv_post_recv", code) {
            return Err((error.into(), buffer));
        }
        self.receives.begin(token, Work::Receive, buffer);
        Ok(())
    }

    fn may_post(&self, buffer: &Buffer, is_ready: bool) -> Result<(), PostError> {
        if !is_ready {
            return Err(PostError::NotConnected);
        }
        if !Arc::ptr_eq(&buffer.pool, &self.pool) {
            return Err(PostError::ForeignBuffer);
        }
        Ok(())
    }

    /// Whether it can post requests: it is connected, and none of them has failed.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.state == State::Connected
    }

    /// Chains and messages that have not ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.sends.outstanding()
    }

    /// Marks it as failed, and makes the device end what is outstanding.
    fn fail(&mut self) {
        self.state = State::Failed;
        let mut change = sys::QueuePairAttributes { state: state::ERROR, ..Default::default() };
        // If the device does not do even that, the caller's deadline ends the wait.
        let _ = self.modify(&mut change, attribute::STATE);
    }

    /// The next request that has ended, without waiting.
    ///
    /// # Errors
    /// If the device does not answer any more.
    pub fn next_completed(&mut self) -> Result<Option<Completed>, VerbError> {
        while let Some(completion) = self.completions.next()? {
            if let Some(completed) = self.completed(&completion) {
                return Ok(Some(completed));
            }
        }
        let cut = self.sends.end_cut();
        Ok(cut.map(|(token, work)| Completed { token, work, result: Err(Failure::PartlyPosted) }))
    }

    fn completed(&mut self, completion: &sys::Completion) -> Option<Completed> {
        let is_receive = completion.id & RECEIVE != 0;
        let slots = if is_receive { &mut self.receives } else { &mut self.sends };
        let index = u32::try_from(completion.id & !RECEIVE).ok()?;
        let Some(failure) = failure(completion) else {
            let (token, work, buffer) = slots.succeed(index)?;
            let received = if is_receive { completion.bytes as usize } else { 0 };
            let received = received.min(buffer.len());
            return Some(Completed { token, work, result: Ok(Done { buffer, received }) });
        };
        let (token, work) = slots.fail(index)?;
        let is_cut = slots.is_cut(index) && failure == Failure::Flushed;
        let failure = if is_cut { Failure::PartlyPosted } else { failure };
        self.state = State::Failed;
        Some(Completed { token, work, result: Err(failure) })
    }

    /// The next request that ends: polls for the time of `spin`, and then sleeps. `None` at the deadline.
    ///
    /// # Errors
    /// If the device does not answer any more.
    pub fn wait_completed(
        &mut self,
        spin: Duration,
        deadline: Instant,
    ) -> Result<Option<Completed>, VerbError> {
        let begun = Instant::now();
        loop {
            if let Some(completed) = self.next_completed()? {
                return Ok(Some(completed));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            if now - begun < spin {
                std::hint::spin_loop();
                continue;
            }
            self.arm()?;
            // What ended before it was armed is not announced.
            if let Some(completed) = self.next_completed()? {
                return Ok(Some(completed));
            }
            self.completions.sleep(deadline)?;
            self.clear_events()?;
        }
    }

    /// Whether another chain or message can be posted.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.is_connected() && self.sends.next().is_some()
    }

    /// Makes the descriptor of [`AsFd`] readable at the next completion. What has ended before is not announced, so
    /// [`Self::next_completed`] comes after it, before the thread sleeps.
    ///
    /// # Errors
    /// If the device does not answer any more.
    pub fn arm(&mut self) -> Result<(), VerbError> {
        self.completions.arm()
    }

    /// Makes the descriptor unreadable again.
    ///
    /// # Errors
    /// If the device does not answer any more.
    pub fn clear_events(&mut self) -> Result<(), VerbError> {
        self.completions.clear_events()
    }
}

impl AsFd for QueuePair {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.completions.fd()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        let is_used = self
            .connecting
            .take()
            .is_some_and(|answered| matches!(answered.try_recv(), Err(mpsc::TryRecvError::Empty)));
        // SAFETY: the queue pair exists, no thread uses it, and this is the only place that destroys it.
        if is_used || unsafe { (self.library().destroy_qp)(raw.as_ptr()) } != 0 {
            // The device may still write to the buffers: they must stay as they are until the process ends, and the
            // device must stay open for the thread.
            std::mem::forget(Arc::clone(&self.completions.domain));
            std::mem::forget(Arc::clone(&self.pool));
            std::mem::forget(std::mem::replace(&mut self.sends, Slots::new(0)));
            std::mem::forget(std::mem::replace(&mut self.receives, Slots::new(0)));
        }
    }
}

// For a driver that lacks an operation, which none does.

unsafe extern "C" fn no_post_send(
    _: *mut sys::QueuePair,
    _: *mut sys::SendRequest,
    _: *mut *mut sys::SendRequest,
) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn no_post_receive(
    _: *mut sys::QueuePair,
    _: *mut sys::ReceiveRequest,
    _: *mut *mut sys::ReceiveRequest,
) -> c_int {
    libc::EOPNOTSUPP
}

fn outside(buffer: &Buffer, offset: usize, length: usize) -> PostError {
    PostError::Outside { offset, length, bytes: buffer.len() }
}

fn failure(completion: &sys::Completion) -> Option<Failure> {
    Some(match completion.status {
        status::SUCCESS => return None,
        status::LOC_LEN_ERR => Failure::Length,
        status::WR_FLUSH_ERR => Failure::Flushed,
        status::REM_ACCESS_ERR => Failure::RemoteAccess,
        status::REM_INV_REQ_ERR => Failure::RemoteInvalid,
        status::REM_OP_ERR => Failure::RemoteOperation,
        status::RETRY_EXC_ERR => Failure::Unreachable,
        status::RNR_RETRY_EXC_ERR => Failure::ReceiverNotReady,
        status => Failure::Other { status, vendor_error: completion.vendor_error },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathMtu;
    use crate::simulated::{Handle, PEER, soon};

    #[test]
    fn every_status_but_success_is_a_failure() {
        for status in 0..30 {
            let completion = sys::Completion { status, ..Default::default() };
            assert_eq!(failure(&completion).is_none(), status == 0, "{status}");
        }
    }

    fn connected(device: &crate::Device) -> (QueuePair, BufferPool) {
        let (mut queue_pair, pool) = Handle::queue_pair(device);
        queue_pair.connect(PEER, PathMtu::Bytes1024, soon()).expect("connected");
        (queue_pair, pool)
    }

    fn read(length: usize) -> Read {
        Read { from: RemotePlace { address: 0, key: 0 }, into: 0, length }
    }

    /// The tokens and failures of all that ends.
    fn ends(queue_pair: &mut QueuePair) -> Vec<(u64, Option<Failure>)> {
        let next = || queue_pair.next_completed().expect("looked");
        std::iter::from_fn(next).map(|it| (it.token, it.result.err())).collect()
    }

    #[test]
    fn a_chain_of_which_the_device_takes_a_part_is_reported_as_failed() {
        for executes in [true, false] {
            let (handle, device) = Handle::new();
            let (mut queue_pair, pool) = connected(&device);
            let free = pool.free();
            let mut post = |token, chain: &[Read]| {
                let posted = queue_pair.read(token, pool.take().expect("one"), chain);
                posted.map_err(|(error, _)| error)
            };
            handle.state().executes = executes;
            post(1, &[read(8)]).expect("posted");
            // Two of three.
            handle.state().takes = 2;
            post(2, &[read(8); 3]).expect("counts as posted");
            assert!(matches!(post(3, &[read(8)]), Err(PostError::NotConnected)));
            let first = if executes { None } else { Some(Failure::Flushed) };
            let expected = vec![(1, first), (2, Some(Failure::PartlyPosted))];
            let next = queue_pair.wait_completed(Duration::ZERO, soon()).expect("waited");
            let next = next.map(|it| (it.token, it.result.err()));
            let all: Vec<_> = next.into_iter().chain(ends(&mut queue_pair)).collect();
            assert_eq!(all, expected, "executes: {executes}");
            assert_eq!((queue_pair.outstanding(), ends(&mut queue_pair)), (0, Vec::new()));
            drop(queue_pair);
            assert_eq!((pool.free(), handle.destroyed()), (free, 1));
        }
    }

    #[test]
    fn a_chain_of_which_the_device_takes_nothing_comes_back() {
        let (handle, device) = Handle::new();
        let (mut queue_pair, pool) = connected(&device);
        handle.state().takes = 0;
        let refused = queue_pair.read(1, pool.take().expect("one"), &[read(8); 3]);
        assert!(matches!(refused, Err((PostError::Verb(_), _))), "{refused:?}");
        assert!(queue_pair.is_connected());
        assert_eq!(ends(&mut queue_pair), []);
    }

    #[test]
    fn requests_without_bytes_are_refused() {
        let (_handle, device) = Handle::new();
        let (mut queue_pair, pool) = connected(&device);
        let refused = queue_pair.read(1, pool.take().expect("one"), &[read(8), read(0)]);
        assert!(matches!(refused, Err((PostError::NoBytes, _))), "{refused:?}");
        let refused = queue_pair.send(1, pool.take().expect("one"), 0);
        assert!(matches!(refused, Err((PostError::NoBytes, _))), "{refused:?}");
        assert_eq!(ends(&mut queue_pair), []);
    }
}
