//! eBPF programs that only tests use; in a crate of their own, so that other builds do not compile them.

#![forbid(unsafe_code)]

/// Changes a page's record whenever a packet is sent (`bpf/change.bpf.c`); `None` if clang was missing when this was
/// built.
#[cfg(ebpf_object)]
pub static CHANGE: Option<&[u8]> =
    Some(aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/change.o")));
/// The same without clang.
#[cfg(not(ebpf_object))]
pub static CHANGE: Option<&[u8]> = None;
