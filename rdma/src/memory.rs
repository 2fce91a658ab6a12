//! Memory that a device may use: protection domains, regions, and pools of buffers.

use std::any::Any;
use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::device::{Context, Device};
use crate::error::{PoolError, VerbError};
use crate::sys;

/// A protection domain: a queue pair can use the regions of its own domain only, and so can its peer.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(pub(crate) Arc<Domain>);

#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: NonNull<sys::ProtectionDomain>,
}

// SAFETY: the verbs are safe for threads, as those of the device are.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl ProtectionDomain {
    /// A new domain of a device.
    ///
    /// # Errors
    /// If the device has no more.
    pub fn new(device: &Device) -> Result<Self, VerbError> {
        let context = Arc::clone(&device.0);
        // SAFETY: the device is open.
        let raw = unsafe { (context.library.alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_alloc_pd"))?;
        Ok(Self(Arc::new(Domain { context, raw })))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: all that was made in the domain has an `Arc` of it, so it is empty unless something could not
        // be destroyed; then this fails, too, and the domain stays until the process ends.
        unsafe { (self.context.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// Nothing: only requests of this process use it.
    Local,
    /// READ.
    RemoteRead,
}

impl Access {
    const fn flags(self) -> c_int {
        match self {
            Self::Local => sys::ACCESS_LOCAL_WRITE,
            // Without the right to write even of this process's own requests: nothing that a device does changes it.
            Self::RemoteRead => sys::ACCESS_REMOTE_READ,
        }
    }
}

/// Memory registered with a device: it may be used until this is dropped, and then its keys are revoked.
#[derive(Debug)]
pub struct MemoryRegion {
    domain: Arc<Domain>,
    raw: NonNull<sys::MemoryRegion>,
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the verbs are safe for threads, and this only passes the region to them.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; the fields of the region that are read do not change.
unsafe impl Sync for MemoryRegion {}

/// A place in a peer's memory, as the peer told it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RemotePlace {
    /// The virtual address in the peer's process.
    pub address: u64,
    /// The key of the region.
    pub key: u32,
}

impl RemotePlace {
    /// The place so many bytes later.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self { address: self.address.wrapping_add(bytes), key: self.key }
    }
}

impl MemoryRegion {
    /// Registers memory of which `owner` is the owner.
    ///
    /// A device that may READ it does so at any time, without an order to what this process writes.
    ///
    /// # Safety
    /// All of `memory` stays mapped, and mapped to the same pages, as long as a clone of `owner` exists. With
    /// [`Access::Local`], nothing in this process reads or writes a byte while a posted request uses it.
    ///
    /// # Errors
    /// If the system refuses, for example to lock so much memory (`ulimit -l`).
    pub unsafe fn register(
        domain: &ProtectionDomain,
        memory: NonNull<[u8]>,
        access: Access,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, VerbError> {
        let domain = Arc::clone(&domain.0);
        let start = memory.as_ptr().cast();
        // SAFETY: the domain exists, and the memory is mapped as long as the owner is there; the region keeps it.
        let raw = unsafe {
            (domain.context.library.reg_mr)(
                domain.raw.as_ptr(),
                start,
                memory.len(),
                access.flags(),
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_reg_mr"))?;
        Ok(Self { domain, raw, owner: Some(owner) })
    }

    /// Its first byte, for a peer that may use it.
    #[must_use]
    pub fn place(&self) -> RemotePlace {
        // SAFETY: the region is registered until `self` is dropped, and these fields do not change.
        let raw = unsafe { self.raw.as_ref() };
        RemotePlace { address: raw.address.addr() as u64, key: raw.remote_key }
    }

    /// Its length.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a region is never empty: the device refuses it"
    )]
    pub fn len(&self) -> usize {
        // SAFETY: as in `place`.
        unsafe { self.raw.as_ref() }.length
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: as in `place`.
        unsafe { self.raw.as_ref() }.local_key
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is registered, and this is the only place that ends that.
        if unsafe { (self.domain.context.library.dereg_mr)(self.raw.as_ptr()) } != 0 {
            // The device may still use the memory: it must stay mapped until the process ends.
            std::mem::forget(self.owner.take());
        }
    }
}

/// Registered buffers of one size, for the requests of this process; no peer has access by itself.
#[derive(Clone, Debug)]
pub struct BufferPool(pub(crate) Arc<Pool>);

#[derive(Debug)]
pub(crate) struct Pool {
    region: MemoryRegion,
    pub(crate) memory: Arc<Mapping>,
    buffer_bytes: usize,
    /// Buffers that nobody has. Its capacity is that of all, so that nothing is allocated later.
    free: Mutex<Vec<u32>>,
}

/// Memory of the process that is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is only an address; who may use which byte is the pool's to say.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Result<Self, VerbError> {
        let refused =
            |verb| move |error: rustix::io::Errno| VerbError { verb, source: error.into() };
        let (rights, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory, at no address that anything has.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, kind) };
        let start = start.map_err(refused("mmap"))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| VerbError::last("mmap"))?;
        let mapping = Self { start, bytes };
        // A child would otherwise get the pages that the device writes to, or this process others.
        // SAFETY: the memory is this mapping's.
        unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxDontFork) }
            .map_err(refused("madvise"))?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the memory is this mapping's, and nothing refers to it any more: buffers and regions keep it.
        // A failure would leave it mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// The longest buffer: some devices count a length in 31 bits.
pub const BUFFER_BYTES_MAX: usize = (1 << 31) - 64;

/// The bytes of each buffer and of all.
fn pool_bytes(count: u32, bytes: usize) -> Result<(usize, usize), PoolError> {
    if bytes > BUFFER_BYTES_MAX {
        return Err(PoolError::TooLong { bytes, most: BUFFER_BYTES_MAX });
    }
    let buffer_bytes = bytes.max(1).next_multiple_of(64);
    let all = usize::try_from(count.max(1)).ok().and_then(|count| count.checked_mul(buffer_bytes));
    let all = all.filter(|all| isize::try_from(*all).is_ok());
    Ok((buffer_bytes, all.ok_or(PoolError::TooMany { count, bytes })?))
}

impl BufferPool {
    /// A pool of `count` buffers of `bytes` each, rounded up to whole cache lines.
    ///
    /// # Errors
    /// If a buffer has more than [`BUFFER_BYTES_MAX`], or the system refuses so much memory, or to lock it (`ulimit -l`).
    pub fn new(domain: &ProtectionDomain, count: u32, bytes: usize) -> Result<Self, PoolError> {
        let (buffer_bytes, all) = pool_bytes(count, bytes)?;
        let memory = Arc::new(Mapping::new(all)?);
        let slice = NonNull::slice_from_raw_parts(memory.start, memory.bytes);
        let owner: Arc<dyn Any + Send + Sync> = memory.clone();
        // SAFETY: the mapping stays until its last clone is dropped. A byte of it is read and written only through a
        // `Buffer`, which a posted request has instead of the program.
        let region = unsafe { MemoryRegion::register(domain, slice, Access::Local, owner) }?;
        let free = Mutex::new((0..count.max(1)).rev().collect());
        Ok(Self(Arc::new(Pool { region, memory, buffer_bytes, free })))
    }

    /// A buffer that nobody has, if there is one. Its bytes are those of its last use.
    #[must_use]
    pub fn take(&self) -> Option<Buffer> {
        let index = self.0.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Buffer { pool: Arc::clone(&self.0), index })
    }

    /// The number of buffers that nobody has.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The size of each.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.0.buffer_bytes
    }
}

impl Pool {
    pub(crate) fn is_in(&self, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.region.domain, domain)
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    fn start(&self, index: u32) -> NonNull<u8> {
        // The pool has as many buffers as its index has numbers, so the product was computed when it was made.
        let offset = index as usize * self.buffer_bytes;
        // SAFETY: the buffer is inside of the mapping.
        unsafe { self.memory.start.add(offset) }
    }
}

/// A registered buffer that the program has for itself; dropped, it returns to its pool.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) pool: Arc<Pool>,
    index: u32,
}

impl Buffer {
    /// A part of it as the device takes it. The part must be inside of the buffer.
    pub(crate) fn piece(&self, offset: usize, length: usize) -> Option<sys::Piece> {
        let end = offset.checked_add(length)?;
        if end > self.pool.buffer_bytes {
            return None;
        }
        Some(sys::Piece {
            // Exposed, because the device writes there.
            address: (self.pool.start(self.index).as_ptr().expose_provenance() + offset) as u64,
            length: u32::try_from(length).ok()?,
            key: self.pool.region.local_key(),
        })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.pool.start(self.index);
        // SAFETY: the bytes are mapped and initialized. The index was taken out of the list of free ones, so no other
        // `Buffer` has it, and no request does: it has taken the `Buffer` itself.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.pool.buffer_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.pool.start(self.index);
        // SAFETY: as in `deref`, and `self` is borrowed for itself.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.pool.buffer_bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // There is room for all: nothing is allocated.
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_too_long_from_2_gib_on() {
        for bytes in [(1 << 31) - 63, (1 << 31) - 1, 1 << 31, 1 << 32, usize::MAX] {
            let refused = pool_bytes(1, bytes);
            assert!(matches!(refused, Err(PoolError::TooLong { .. })), "{bytes}: {refused:?}");
        }
        assert_eq!(pool_bytes(2, BUFFER_BYTES_MAX).ok(), Some(((1 << 31) - 64, (1 << 32) - 128)));
        assert_eq!(pool_bytes(0, 0).ok(), Some((64, 64)));
        assert_eq!(pool_bytes(3, 65).ok(), Some((128, 384)));
    }
}
