//! A device for tests, behind the functions of the library: it has one queue pair, executes requests at once or not at
//! all, and does what real devices do rarely.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::IntoRawFd;

use crate::device::Device;
use crate::library::Library;
use crate::memory::{BufferPool, ProtectionDomain};
use crate::queue_pair::{QueuePair, QueuePairAddress, QueuePairOptions};
use crate::sys::{self, state, status};
use crate::{PathMtu, Port};

/// What the device does, and has.
#[derive(Default)]
pub(crate) struct State {
    /// Requests that it still takes.
    pub(crate) takes: usize,
    /// Whether it executes them at once; otherwise they stay until the queue pair fails.
    pub(crate) executes: bool,
    /// Whether messages without contents arrive without end.
    pub(crate) is_flooded: bool,
    /// How long it takes to connect a queue pair.
    pub(crate) connects_after: Duration,
    /// Its addresses.
    pub(crate) addresses: Vec<[u8; 16]>,
    /// The heads and lengths of the messages that it sent.
    pub(crate) sent: Vec<([u8; 2], u32)>,
    events: VecDeque<(c_uint, usize)>,
    posted: VecDeque<u64>,
    receives: VecDeque<(u64, u64)>,
    completions: VecDeque<sys::Completion>,
}

// SAFETY: completions are numbers.
unsafe impl Send for State {}

#[repr(C)]
struct Simulated {
    /// First, so that a pointer to it is one to all.
    context: sys::Context,
    state: Mutex<State>,
    destroyed: AtomicUsize,
    queue: AtomicUsize,
}

/// Its number.
pub(crate) const NUMBER: u32 = 77;

/// A new device, which stays until the process ends.
pub(crate) struct Handle(&'static Simulated);

impl Handle {
    pub(crate) fn new() -> (Self, Device) {
        // SAFETY: all bytes zero are numbers, null pointers, and operations that are none.
        let mut context: sys::Context = unsafe { mem::zeroed() };
        context.operations.poll_cq = Some(poll_cq);
        context.operations.req_notify_cq = Some(request_notify);
        context.operations.post_send = Some(post_send);
        context.operations.post_recv = Some(post_receive);
        context.async_fd = event_fd();
        let state = State { takes: usize::MAX, executes: true, ..State::default() };
        let simulated = Box::leak(Box::new(Simulated {
            context,
            state: Mutex::new(state),
            destroyed: AtomicUsize::new(0),
            queue: AtomicUsize::new(0),
        }));
        let raw = NonNull::from(&mut *simulated).cast();
        (Self(simulated), Device::of(&LIBRARY, raw, "simulated".to_owned()))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many queue pairs were destroyed.
    pub(crate) fn destroyed(&self) -> usize {
        self.0.destroyed.load(Ordering::Relaxed)
    }

    /// The device reports that the completion queue has failed.
    pub(crate) fn fail_queue(&self) {
        let queue = self.0.queue.load(Ordering::Relaxed);
        self.state().events.push_back((sys::event::CQ_ERR, queue));
    }

    /// A queue pair, and a pool for it.
    pub(crate) fn queue_pair(device: &Device) -> (QueuePair, BufferPool) {
        let domain = ProtectionDomain::new(device).expect("made");
        let pool = BufferPool::new(&domain, 16, 256).expect("made");
        let port = Port {
            number: 1,
            is_active: true,
            mtu: PathMtu::Bytes1024,
            message_bytes: 1 << 20,
            address: PEER.address,
            address_index: 0,
        };
        let options = QueuePairOptions { requests: 4, receives: 4, ..Default::default() };
        (QueuePair::new(&domain, port, &pool, options).expect("made"), pool)
    }
}

pub(crate) const PEER: QueuePairAddress =
    QueuePairAddress { address: std::net::Ipv6Addr::LOCALHOST, number: 5, first_packet: 6 };

/// Soon, and long enough for every step that does not wait.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn event_fd() -> c_int {
    eventfd(0, EventfdFlags::NONBLOCK).expect("made").into_raw_fd()
}

fn of<'a>(context: *mut sys::Context) -> &'a Simulated {
    // SAFETY: all contexts are of `Handle::new`, and stay.
    unsafe { &*context.cast::<Simulated>() }
}

fn state_of<'a>(context: *mut sys::Context) -> MutexGuard<'a, State> {
    of(context).state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a caller gives to be read. Callers of the library's functions give valid pointers.
fn read<'a, T>(place: *const T) -> &'a T {
    // SAFETY: as above, and tests call no function while something else writes there.
    unsafe { &*place }
}

/// Where a caller wants so many values.
fn places<'a, T>(first: *mut T, room: usize) -> &'a mut [T] {
    // SAFETY: as above, and nothing else reads or writes there meanwhile.
    unsafe { std::slice::from_raw_parts_mut(first, room) }
}

/// Where a request's bytes are: in the pool's memory, and their buffer was given away with the request.
fn bytes<'a>(address: u64, length: usize) -> &'a mut [u8] {
    places(ptr::with_exposed_provenance_mut(address.try_into().expect("64 bits")), length)
}

/// Objects are leaked: tests make few of them.
fn leak<T>(object: T) -> *mut T {
    Box::leak(Box::new(object))
}

fn again() -> c_int {
    // SAFETY: it has no condition.
    let number = unsafe { libc::__errno_location() };
    places(number, 1).fill(libc::EAGAIN);
    -1
}

static LIBRARY: Library = Library {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid_table,
    get_async_event,
    ack_async_event,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp,
    modify_qp,
    destroy_qp,
};

unsafe extern "C" fn get_device_list(_: *mut c_int) -> *mut *mut sys::Device {
    ptr::null_mut()
}

unsafe extern "C" fn free_device_list(_: *mut *mut sys::Device) {}

unsafe extern "C" fn get_device_name(_: *mut sys::Device) -> *const c_char {
    c"simulated".as_ptr()
}

unsafe extern "C" fn open_device(_: *mut sys::Device) -> *mut sys::Context {
    ptr::null_mut()
}

unsafe extern "C" fn close_device(_: *mut sys::Context) -> c_int {
    0
}

unsafe extern "C" fn query_device(
    _: *mut sys::Context,
    found: *mut sys::DeviceAttributes,
) -> c_int {
    let [found] = places(found, 1) else { return libc::EINVAL };
    (found.requests_max, found.reads_in_max, found.reads_out_max) = (1024, 16, 16);
    found.ports = 1;
    0
}

unsafe extern "C" fn query_port(
    context: *mut sys::Context,
    _: u8,
    found: *mut sys::PortAttributes,
) -> c_int {
    let length = state_of(context).addresses.len();
    let [found] = places(found, 1) else { return libc::EINVAL };
    found.gid_table_length = length.try_into().expect("few");
    0
}

/// As the kernel does, refuses a table that is too short.
unsafe extern "C" fn query_gid_table(
    context: *mut sys::Context,
    entries: *mut sys::GidEntry,
    room: usize,
    _: u32,
    _: usize,
) -> isize {
    let addresses = state_of(context).addresses.clone();
    if addresses.len() > room {
        return -(libc::EINVAL as isize);
    }
    for ((number, gid), entry) in (0..).zip(&addresses).zip(places(entries, room)) {
        let kind = sys::GID_TYPE_ROCE_V2;
        *entry = sys::GidEntry { gid: *gid, index: number, port: 1, kind, interface: 1 };
    }
    addresses.len().try_into().expect("few")
}

unsafe extern "C" fn get_async_event(
    context: *mut sys::Context,
    event: *mut sys::AsyncEvent,
) -> c_int {
    let Some((kind, queue)) = state_of(context).events.pop_front() else { return again() };
    let completion_queue = ptr::with_exposed_provenance_mut(queue);
    let [event] = places(event, 1) else { return libc::EINVAL };
    *event = sys::AsyncEvent { element: sys::EventElement { completion_queue }, kind };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut sys::AsyncEvent) {}

unsafe extern "C" fn alloc_pd(context: *mut sys::Context) -> *mut sys::ProtectionDomain {
    leak(context).cast()
}

unsafe extern "C" fn dealloc_pd(_: *mut sys::ProtectionDomain) -> c_int {
    0
}

unsafe extern "C" fn reg_mr(
    domain: *mut sys::ProtectionDomain,
    address: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut sys::MemoryRegion {
    let context = ptr::null_mut();
    leak(sys::MemoryRegion {
        context,
        domain,
        address,
        length,
        handle: 0,
        local_key: 1,
        remote_key: 2,
    })
}

unsafe extern "C" fn dereg_mr(_: *mut sys::MemoryRegion) -> c_int {
    0
}

unsafe extern "C" fn create_comp_channel(
    context: *mut sys::Context,
) -> *mut sys::CompletionChannel {
    leak(sys::CompletionChannel { context, fd: event_fd() })
}

unsafe extern "C" fn destroy_comp_channel(_: *mut sys::CompletionChannel) -> c_int {
    0
}

unsafe extern "C" fn create_cq(
    context: *mut sys::Context,
    _: c_int,
    user: *mut c_void,
    channel: *mut sys::CompletionChannel,
    _: c_int,
) -> *mut sys::CompletionQueue {
    let queue = leak(sys::CompletionQueue { context, channel, user });
    of(context).queue.store(queue.expose_provenance(), Ordering::Relaxed);
    queue
}

unsafe extern "C" fn destroy_cq(_: *mut sys::CompletionQueue) -> c_int {
    0
}

/// Completions are there at once, so no test sleeps for one.
unsafe extern "C" fn get_cq_event(
    _: *mut sys::CompletionChannel,
    _: *mut *mut sys::CompletionQueue,
    _: *mut *mut c_void,
) -> c_int {
    again()
}

unsafe extern "C" fn ack_cq_events(_: *mut sys::CompletionQueue, _: c_uint) {}

unsafe extern "C" fn create_qp(
    domain: *mut sys::ProtectionDomain,
    init: *mut sys::QueuePairInit,
) -> *mut sys::QueuePair {
    // The domain is one of `alloc_pd`.
    let (context, init) = (*read(domain.cast::<*mut sys::Context>()), read(init));
    leak(sys::QueuePair {
        context,
        user: init.user,
        domain,
        send_cq: init.send_cq,
        receive_cq: init.receive_cq,
        shared_receive_queue: ptr::null_mut(),
        handle: 0,
        number: NUMBER,
    })
}

unsafe extern "C" fn modify_qp(
    queue_pair: *mut sys::QueuePair,
    change: *mut sys::QueuePairAttributes,
    _: c_int,
) -> c_int {
    let (context, change) = (read(queue_pair).context, read(change));
    if change.state == state::READY_TO_RECEIVE {
        let delay = state_of(context).connects_after;
        thread::sleep(delay);
    }
    if change.state == state::ERROR {
        let mut state = state_of(context);
        while let Some(id) = state.posted.pop_front() {
            let status = status::WR_FLUSH_ERR;
            state.completions.push_back(sys::Completion { id, status, ..Default::default() });
        }
    }
    0
}

unsafe extern "C" fn destroy_qp(queue_pair: *mut sys::QueuePair) -> c_int {
    of(read(queue_pair).context).destroyed.fetch_add(1, Ordering::Relaxed);
    0
}

unsafe extern "C" fn post_send(
    queue_pair: *mut sys::QueuePair,
    mut next: *mut sys::SendRequest,
    refused: *mut *mut sys::SendRequest,
) -> c_int {
    let mut state = state_of(read(queue_pair).context);
    while !next.is_null() {
        if state.takes == 0 {
            places(refused, 1).fill(next);
            return libc::ENOMEM;
        }
        state.takes -= 1;
        let request = read(next);
        let piece = read(request.pieces);
        if request.opcode == sys::WR_SEND {
            let head = *bytes(piece.address, 2).first_chunk().expect("two");
            state.sent.push((head, piece.length));
        }
        if !state.executes {
            state.posted.push_back(request.id);
        } else if request.flags & sys::SEND_SIGNALED != 0 {
            state.completions.push_back(sys::Completion { id: request.id, ..Default::default() });
        }
        next = request.next;
    }
    0
}

unsafe extern "C" fn post_receive(
    queue_pair: *mut sys::QueuePair,
    request: *mut sys::ReceiveRequest,
    _: *mut *mut sys::ReceiveRequest,
) -> c_int {
    let request = read(request);
    let mut state = state_of(read(queue_pair).context);
    state.receives.push_back((request.id, read(request.pieces).address));
    0
}

unsafe extern "C" fn poll_cq(
    queue: *mut sys::CompletionQueue,
    room: c_int,
    to: *mut sys::Completion,
) -> c_int {
    let mut state = state_of(read(queue).context);
    if state.is_flooded
        && let Some((id, _)) = state.receives.pop_front()
    {
        state.completions.push_back(sys::Completion { id, bytes: 8, ..Default::default() });
    }
    let count = state.completions.len().min(room.unsigned_abs() as usize);
    for (place, completion) in places(to, count).iter_mut().zip(state.completions.drain(..count)) {
        *place = completion;
    }
    count.try_into().expect("few")
}

unsafe extern "C" fn request_notify(_: *mut sys::CompletionQueue, _: c_int) -> c_int {
    0
}

/// A message arrives: the head, and other bytes.
pub(crate) fn arrive(handle: &Handle, credits: u16, contents: &[u8]) {
    let mut state = handle.state();
    let (id, address) = state.receives.pop_front().expect("a buffer waits");
    let message = [&credits.to_be_bytes()[..], &[0; 6], contents].concat();
    bytes(address, message.len()).copy_from_slice(&message);
    let length = message.len().try_into().expect("short");
    state.completions.push_back(sys::Completion { id, bytes: length, ..Default::default() });
}
