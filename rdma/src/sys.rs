//! The part of libibverbs that this crate uses: declarations of `<infiniband/verbs.h>` of rdma-core, as far as they
//! have been stable since version 1.1 of its interface (`IBVERBS_1.1`, 2006).
//!
//! Calls on the data path are no functions of the library: they go through the table of the device's driver
//! in [`Context`]. Sizes and offsets are those that a C compiler gives on 64-bit Linux; they are checked when
//! this crate is built.

#![allow(
    missing_docs,
    reason = "the specification and the manual pages (ibv_*, section 3) describe them"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// A device in the list; its contents are only for the library.
#[repr(C)]
pub(crate) struct Device {
    _opaque: [u8; 0],
}

/// A protection domain; its contents are only for the library.
#[repr(C)]
pub(crate) struct ProtectionDomain {
    _opaque: [u8; 0],
}

/// The beginning of `struct ibv_context`, which is longer and only made by the library.
#[repr(C)]
pub(crate) struct Context {
    pub device: *mut Device,
    pub operations: Operations,
    pub command_fd: c_int,
    pub async_fd: c_int,
    pub completion_vectors: c_int,
}

type Unused = *mut c_void;

/// `struct ibv_context_ops`.
#[repr(C)]
pub(crate) struct Operations {
    before_poll: [Unused; 11],
    pub poll_cq:
        Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut Completion) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int>,
    before_post: [Unused; 12],
    pub post_send: Option<
        unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int,
    >,
    pub post_recv: Option<
        unsafe extern "C" fn(
            *mut QueuePair,
            *mut ReceiveRequest,
            *mut *mut ReceiveRequest,
        ) -> c_int,
    >,
    after_post: [Unused; 5],
}

/// The beginning of `struct ibv_cq`.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub context: *mut Context,
    pub channel: *mut CompletionChannel,
    pub user: *mut c_void,
}

/// The beginning of `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct CompletionChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// The beginning of `struct ibv_qp`.
#[repr(C)]
pub(crate) struct QueuePair {
    pub context: *mut Context,
    pub user: *mut c_void,
    pub domain: *mut ProtectionDomain,
    pub send_cq: *mut CompletionQueue,
    pub receive_cq: *mut CompletionQueue,
    pub shared_receive_queue: *mut c_void,
    pub handle: u32,
    pub number: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct MemoryRegion {
    pub context: *mut Context,
    pub domain: *mut ProtectionDomain,
    pub address: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub local_key: u32,
    pub remote_key: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(crate) struct DeviceAttributes {
    pub firmware: [c_char; 64],
    pub node_guid: u64,
    pub system_guid: u64,
    pub region_bytes_max: u64,
    pub page_sizes: u64,
    pub vendor: u32,
    pub part: u32,
    pub hardware_version: u32,
    pub queue_pairs_max: c_int,
    pub requests_max: c_int,
    pub capabilities: c_uint,
    pub pieces_max: c_int,
    pub read_pieces_max: c_int,
    pub completion_queues_max: c_int,
    pub completions_max: c_int,
    pub regions_max: c_int,
    pub domains_max: c_int,
    pub reads_in_max: c_int,
    pub ee_reads_in_max: c_int,
    pub reads_of_device_max: c_int,
    pub reads_out_max: c_int,
    pub others: [c_int; 16],
    pub partition_keys_max: u16,
    pub acknowledgement_delay: u8,
    pub ports: u8,
}

/// `struct _compat_ibv_port_attr`, which is what the function `ibv_query_port` fills.
#[repr(C)]
#[derive(Default)]
pub(crate) struct PortAttributes {
    pub state: c_uint,
    pub mtu_max: c_uint,
    pub mtu: c_uint,
    pub gid_table_length: c_int,
    pub capabilities: u32,
    pub message_bytes_max: u32,
    pub bad_partition_keys: u32,
    pub bad_queue_keys: u32,
    pub partition_table_length: u16,
    pub local_id: u16,
    pub manager_id: u16,
    pub others: [u8; 8],
    pub link_layer: u8,
    pub flags: u8,
}

/// `struct ibv_gid_entry`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct GidEntry {
    pub gid: [u8; 16],
    pub index: u32,
    pub port: u32,
    pub kind: u32,
    pub interface: u32,
}

pub(crate) const GID_TYPE_ROCE_V2: u32 = 2;
pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;
pub(crate) const PORT_ACTIVE: c_uint = 4;

/// `union` in `struct ibv_async_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union EventElement {
    pub completion_queue: *mut CompletionQueue,
    pub queue_pair: *mut QueuePair,
    pub port: c_int,
}

/// `struct ibv_async_event`.
#[repr(C)]
pub(crate) struct AsyncEvent {
    pub element: EventElement,
    pub kind: c_uint,
}

pub(crate) mod event {
    use std::ffi::c_uint;

    pub(crate) const CQ_ERR: c_uint = 0;
    pub(crate) const QP_FATAL: c_uint = 1;
    pub(crate) const QP_REQ_ERR: c_uint = 2;
    pub(crate) const QP_ACCESS_ERR: c_uint = 3;
    pub(crate) const DEVICE_FATAL: c_uint = 8;
    pub(crate) const PORT_ACTIVE: c_uint = 9;
    pub(crate) const PORT_ERR: c_uint = 10;
    pub(crate) const GID_CHANGE: c_uint = 18;
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Completion {
    pub id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_error: u32,
    pub bytes: u32,
    pub immediate: u32,
    pub queue_pair: u32,
    pub source_queue_pair: u32,
    pub flags: c_uint,
    pub partition_key: u16,
    pub source_id: u16,
    pub service_level: u8,
    pub path_bits: u8,
}

pub(crate) mod status {
    use std::ffi::c_uint;

    pub(crate) const SUCCESS: c_uint = 0;
    pub(crate) const LOC_LEN_ERR: c_uint = 1;
    pub(crate) const WR_FLUSH_ERR: c_uint = 5;
    pub(crate) const REM_INV_REQ_ERR: c_uint = 9;
    pub(crate) const REM_ACCESS_ERR: c_uint = 10;
    pub(crate) const REM_OP_ERR: c_uint = 11;
    pub(crate) const RETRY_EXC_ERR: c_uint = 12;
    pub(crate) const RNR_RETRY_EXC_ERR: c_uint = 13;
}

pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_READ: c_int = 1 << 2;

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QueuePairCapacity {
    pub sends: u32,
    pub receives: u32,
    pub send_pieces: u32,
    pub receive_pieces: u32,
    pub inline_bytes: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QueuePairInit {
    pub user: *mut c_void,
    pub send_cq: *mut CompletionQueue,
    pub receive_cq: *mut CompletionQueue,
    pub shared_receive_queue: *mut c_void,
    pub capacity: QueuePairCapacity,
    pub kind: c_uint,
    pub signal_all: c_int,
}

/// Reliable connection.
pub(crate) const QPT_RC: c_uint = 2;

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    pub destination: [u8; 16],
    pub flow_label: u32,
    pub source_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AddressVector {
    pub route: GlobalRoute,
    pub local_id: u16,
    pub service_level: u8,
    pub path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QueuePairAttributes {
    pub state: c_uint,
    pub current_state: c_uint,
    pub path_mtu: c_uint,
    pub migration: c_uint,
    pub queue_key: u32,
    pub receive_psn: u32,
    pub send_psn: u32,
    pub peer: u32,
    pub access: c_uint,
    pub capacity: QueuePairCapacity,
    pub address: AddressVector,
    pub other_address: AddressVector,
    pub partition_index: u16,
    pub other_partition_index: u16,
    pub notify_drained: u8,
    pub is_draining: u8,
    pub reads_out: u8,
    pub reads_in: u8,
    pub not_ready_timer: u8,
    pub port: u8,
    pub timeout: u8,
    pub retries: u8,
    pub not_ready_retries: u8,
    pub other_port: u8,
    pub other_timeout: u8,
    pub rate_limit: u32,
}

pub(crate) mod attribute {
    use std::ffi::c_int;

    pub(crate) const STATE: c_int = 1;
    pub(crate) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
}

pub(crate) mod state {
    use std::ffi::c_uint;

    pub(crate) const INIT: c_uint = 1;
    pub(crate) const READY_TO_RECEIVE: c_uint = 2;
    pub(crate) const READY_TO_SEND: c_uint = 3;
    pub(crate) const ERROR: c_uint = 6;
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Piece {
    pub address: u64,
    pub length: u32,
    pub key: u32,
}

/// `struct ibv_send_wr`, with the member `rdma` of its union.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendRequest {
    pub id: u64,
    pub next: *mut Self,
    pub pieces: *mut Piece,
    pub piece_count: c_int,
    pub opcode: c_uint,
    pub flags: c_uint,
    pub immediate: u32,
    pub remote_address: u64,
    pub remote_key: u32,
    pub others: [u64; 9],
}

impl SendRequest {
    pub(crate) const NONE: Self = Self {
        id: 0,
        next: std::ptr::null_mut(),
        pieces: std::ptr::null_mut(),
        piece_count: 0,
        opcode: 0,
        flags: 0,
        immediate: 0,
        remote_address: 0,
        remote_key: 0,
        others: [0; 9],
    };
}

pub(crate) const WR_SEND: c_uint = 2;
pub(crate) const WR_RDMA_READ: c_uint = 4;
pub(crate) const SEND_SIGNALED: c_uint = 1 << 1;

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct ReceiveRequest {
    pub id: u64,
    pub next: *mut Self,
    pub pieces: *mut Piece,
    pub piece_count: c_int,
}

// What clang says of the header of rdma-core 55.
const _: () = {
    assert!(offset_of!(Context, operations) == 8);
    assert!(size_of::<Operations>() == 256);
    assert!(offset_of!(Operations, poll_cq) == 88);
    assert!(offset_of!(Operations, req_notify_cq) == 96);
    assert!(offset_of!(Operations, post_send) == 200);
    assert!(offset_of!(Operations, post_recv) == 208);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Context, completion_vectors) == 272);
    assert!(offset_of!(CompletionQueue, user) == 16);
    assert!(offset_of!(CompletionChannel, fd) == 8);
    assert!(offset_of!(QueuePair, number) == 52);
    assert!(size_of::<MemoryRegion>() == 48);
    assert!(offset_of!(MemoryRegion, local_key) == 36);
    assert!(size_of::<DeviceAttributes>() == 232);
    assert!(offset_of!(DeviceAttributes, queue_pairs_max) == 108);
    assert!(offset_of!(DeviceAttributes, reads_in_max) == 144);
    assert!(offset_of!(DeviceAttributes, reads_out_max) == 156);
    assert!(offset_of!(DeviceAttributes, ports) == 227);
    assert!(offset_of!(PortAttributes, gid_table_length) == 12);
    assert!(offset_of!(PortAttributes, message_bytes_max) == 20);
    assert!(offset_of!(PortAttributes, link_layer) == 46);
    assert!(size_of::<PortAttributes>() == 48);
    assert!(size_of::<GidEntry>() == 32);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(offset_of!(AsyncEvent, kind) == 8);
    assert!(size_of::<Completion>() == 48);
    assert!(offset_of!(Completion, bytes) == 20);
    assert!(offset_of!(Completion, queue_pair) == 28);
    assert!(size_of::<QueuePairInit>() == 64);
    assert!(offset_of!(QueuePairInit, capacity) == 32);
    assert!(offset_of!(QueuePairInit, kind) == 52);
    assert!(size_of::<GlobalRoute>() == 24);
    assert!(size_of::<AddressVector>() == 32);
    assert!(size_of::<QueuePairAttributes>() == 144);
    assert!(offset_of!(QueuePairAttributes, address) == 56);
    assert!(offset_of!(QueuePairAttributes, partition_index) == 120);
    assert!(offset_of!(QueuePairAttributes, reads_out) == 126);
    assert!(offset_of!(QueuePairAttributes, rate_limit) == 136);
    assert!(size_of::<Piece>() == 16);
    assert!(size_of::<SendRequest>() == 128);
    assert!(offset_of!(SendRequest, opcode) == 28);
    assert!(offset_of!(SendRequest, remote_address) == 40);
    assert!(size_of::<ReceiveRequest>() == 32);
};
