//! How a queue pair is initialized and connected: the changes of its state.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{NUMBER_MASK, QueuePair, QueuePairAddress, State};
use crate::device::PathMtu;
use crate::error::{ConnectError, VerbError};
use crate::sys::{self, attribute, state};

/// How long a sender waits that found no buffer at its peer: 10 ms, by its code in the specification.
const NOT_READY_TIMER: u8 = 20;
/// How often it does. Senders with credits never do; 7 would mean for ever.
const NOT_READY_RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;

/// A queue pair for a thread that connects it.
struct Raw(*mut sys::QueuePair);

// SAFETY: the verbs are safe for threads.
unsafe impl Send for Raw {}

/// The answer of a thread that connects a queue pair.
pub(super) type Connecting = mpsc::Receiver<Result<(), VerbError>>;

impl QueuePair {
    /// Connects it with its peer's, with the smaller of both ports' path MTU. Messages may arrive from now on, so buffers
    /// for them should have been posted before.
    ///
    /// The system may look for the way to the peer meanwhile, and cannot be interrupted.
    ///
    /// # Errors
    /// If the device refuses: the peer's address has no route, or a number is none. If it takes longer than until the
    /// deadline, the queue pair cannot be used any more; dropped before the system has answered, it keeps its memory until
    /// the process ends.
    pub fn connect(
        &mut self,
        peer: QueuePairAddress,
        mtu: PathMtu,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        if self.state != State::New {
            return Err(ConnectError::AlreadyConnected);
        }
        let to_receive = sys::QueuePairAttributes {
            state: state::READY_TO_RECEIVE,
            path_mtu: mtu as u32,
            peer: peer.number & NUMBER_MASK,
            receive_psn: peer.first_packet & NUMBER_MASK,
            reads_in: self.options.reads_in,
            not_ready_timer: NOT_READY_TIMER,
            address: sys::AddressVector {
                route: sys::GlobalRoute {
                    destination: peer.address.octets(),
                    source_index: self.port.address_index,
                    hop_limit: HOP_LIMIT,
                    ..Default::default()
                },
                is_global: 1,
                port: self.port.number,
                ..Default::default()
            },
            ..Default::default()
        };
        let mask = attribute::STATE
            | attribute::AV
            | attribute::PATH_MTU
            | attribute::DEST_QPN
            | attribute::RQ_PSN
            | attribute::MAX_DEST_RD_ATOMIC
            | attribute::MIN_RNR_TIMER;
        let to_receive = (to_receive, mask);
        let to_send = sys::QueuePairAttributes {
            state: state::READY_TO_SEND,
            send_psn: self.first_packet,
            timeout: timeout_code(self.options.acknowledged_within),
            retries: self.options.retries,
            not_ready_retries: NOT_READY_RETRIES,
            reads_out: self.options.reads_out,
            ..Default::default()
        };
        let mask = attribute::STATE
            | attribute::SQ_PSN
            | attribute::TIMEOUT
            | attribute::RETRY_CNT
            | attribute::RNR_RETRY
            | attribute::MAX_QP_RD_ATOMIC;
        let raw = Raw(self.raw.map_or(ptr::null_mut(), NonNull::as_ptr));
        let library = self.library();
        // What was changed is of no use if this fails.
        self.state = State::Failed;
        let begun = Instant::now();
        let (answer, answered) = mpsc::sync_channel(1);
        let change_all = move || {
            let Raw(raw) = { raw };
            let result =
                [to_receive, (to_send, mask)].into_iter().try_for_each(|(mut change, mask)| {
                    // SAFETY: the queue pair is not destroyed before this has answered, and the change has all that the
                    // mask names.
                    let code = unsafe { (library.modify_qp)(raw, &raw mut change, mask) };
                    VerbError::check("ibv_modify_qp", code)
                });
            // If nobody waits any more, nobody needs it.
            let _ = answer.send(result);
        };
        let thread = thread::Builder::new().name("rdma-connect".to_owned()).spawn(change_all);
        thread.map_err(|source| VerbError { verb: "pthread_create", source })?;
        match answered.recv_timeout(deadline.saturating_duration_since(begun)) {
            Ok(result) => result?,
            Err(_) => {
                self.connecting = Some(answered);
                return Err(ConnectError::Deadline { waited: begun.elapsed() });
            }
        }
        self.state = State::Connected;
        Ok(())
    }

    /// Lets it receive requests to receive.
    pub(super) fn initialize(&mut self) -> Result<(), ConnectError> {
        let access = if self.options.reads_in == 0 { 0 } else { sys::ACCESS_REMOTE_READ };
        let mut change = sys::QueuePairAttributes {
            state: state::INIT,
            port: self.port.number,
            access: access.unsigned_abs(),
            ..Default::default()
        };
        let mask =
            attribute::STATE | attribute::PKEY_INDEX | attribute::PORT | attribute::ACCESS_FLAGS;
        Ok(self.modify(&mut change, mask)?)
    }

    pub(super) fn modify(
        &mut self,
        change: &mut sys::QueuePairAttributes,
        mask: c_int,
    ) -> Result<(), VerbError> {
        let raw = self.raw.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the queue pair exists until `drop`, and the change has all that the mask names.
        let code = unsafe { (self.library().modify_qp)(raw, change, mask) };
        VerbError::check("ibv_modify_qp", code)
    }
}

/// The code of a time in the specification: 4.096 us times two to the power of the code, 0 being for ever.
fn timeout_code(time: Duration) -> u8 {
    let is_enough = |code: &u8| Duration::from_nanos(4096 << *code) >= time;
    (1..31).find(is_enough).unwrap_or(31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulated::{Handle, PEER, soon};

    #[test]
    fn times_are_rounded_up_and_never_for_ever() {
        for (time, code) in [
            (Duration::ZERO, 1),
            (Duration::from_nanos(8192), 1),
            (Duration::from_nanos(8193), 2),
            (Duration::from_millis(60), 14),
            (Duration::from_millis(68), 15),
            (Duration::MAX, 31),
        ] {
            assert_eq!(timeout_code(time), code, "{time:?}");
        }
    }

    #[test]
    fn connecting_ends_at_its_deadline_and_the_queue_pair_stays_while_the_system_uses_it() {
        for waits in [false, true] {
            let (handle, device) = Handle::new();
            let (mut queue_pair, pool) = Handle::queue_pair(&device);
            queue_pair.receive(1, pool.take().expect("one")).expect("posted");
            let free = pool.free();
            handle.state().connects_after = Duration::from_millis(300);
            let deadline = Instant::now() + Duration::from_millis(10);
            let late = queue_pair.connect(PEER, PathMtu::Bytes1024, deadline);
            assert!(matches!(late, Err(ConnectError::Deadline { .. })), "{late:?}");
            assert!(!queue_pair.is_connected());
            let again = queue_pair.connect(PEER, PathMtu::Bytes1024, soon());
            assert!(matches!(again, Err(ConnectError::AlreadyConnected)), "{again:?}");
            if waits {
                let answered = queue_pair.connecting.take().expect("a thread connects");
                answered.recv().expect("an answer").expect("connected");
            }
            drop(queue_pair);
            let expected = if waits { (1, free + 1) } else { (0, free) };
            assert_eq!((handle.destroyed(), pool.free()), expected);
        }
    }
}
