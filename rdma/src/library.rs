//! libibverbs, loaded when it is first needed.
//!
//! A machine without it builds and runs this program, and learns at the first call what is missing.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::OpenError;
use crate::sys;

/// The interface that the library has had since 2006, and that of `_ibv_query_gid_table` (rdma-core 32, 2020).
const BASE: &CStr = c"IBVERBS_1.1";
const GID_TABLE: &CStr = c"IBVERBS_1.11";
/// The file's name has the version of the binary interface.
const FILE: &CStr = c"libibverbs.so.1";

/// Declares the functions of the library, and a function that finds all of them.
macro_rules! functions {
    ($($(#[$about:meta])* $field:ident: $symbol:literal $version:ident fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library.
        pub(crate) struct Library {
            $($(#[$about])* pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(handle: Handle) -> Result<Self, OpenError> {
                Ok(Self {
                    $($field: {
                        let found = handle.symbol($symbol, $version)?;
                        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
                        // SAFETY: the symbol with this version has this type in the library's header, and a
                        // pointer to a function has the size of one to data on every system with `dlsym`.
                        unsafe { std::mem::transmute::<*mut c_void, Function>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    get_device_list: c"ibv_get_device_list" BASE fn(*mut c_int) -> *mut *mut sys::Device;
    free_device_list: c"ibv_free_device_list" BASE fn(*mut *mut sys::Device);
    get_device_name: c"ibv_get_device_name" BASE fn(*mut sys::Device) -> *const c_char;
    open_device: c"ibv_open_device" BASE fn(*mut sys::Device) -> *mut sys::Context;
    close_device: c"ibv_close_device" BASE fn(*mut sys::Context) -> c_int;
    query_device: c"ibv_query_device" BASE fn(*mut sys::Context, *mut sys::DeviceAttributes) -> c_int;
    query_port: c"ibv_query_port" BASE fn(*mut sys::Context, u8, *mut sys::PortAttributes) -> c_int;
    query_gid_table: c"_ibv_query_gid_table" GID_TABLE
        fn(*mut sys::Context, *mut sys::GidEntry, usize, u32, usize) -> isize;
    get_async_event: c"ibv_get_async_event" BASE fn(*mut sys::Context, *mut sys::AsyncEvent) -> c_int;
    ack_async_event: c"ibv_ack_async_event" BASE fn(*mut sys::AsyncEvent);
    alloc_pd: c"ibv_alloc_pd" BASE fn(*mut sys::Context) -> *mut sys::ProtectionDomain;
    dealloc_pd: c"ibv_dealloc_pd" BASE fn(*mut sys::ProtectionDomain) -> c_int;
    reg_mr: c"ibv_reg_mr" BASE
        fn(*mut sys::ProtectionDomain, *mut c_void, usize, c_int) -> *mut sys::MemoryRegion;
    dereg_mr: c"ibv_dereg_mr" BASE fn(*mut sys::MemoryRegion) -> c_int;
    create_comp_channel: c"ibv_create_comp_channel" OLD fn(*mut sys::Context) -> *mut sys::CompletionChannel;
    destroy_comp_channel: c"ibv_destroy_comp_channel" OLD fn(*mut sys::CompletionChannel) -> c_int;
    create_cq: c"ibv_create_cq" BASE
        fn(*mut sys::Context, c_int, *mut c_void, *mut sys::CompletionChannel, c_int) -> *mut sys::CompletionQueue;
    destroy_cq: c"ibv_destroy_cq" BASE fn(*mut sys::CompletionQueue) -> c_int;
    get_cq_event: c"ibv_get_cq_event" BASE
        fn(*mut sys::CompletionChannel, *mut *mut sys::CompletionQueue, *mut *mut c_void) -> c_int;
    ack_cq_events: c"ibv_ack_cq_events" BASE fn(*mut sys::CompletionQueue, c_uint);
    create_qp: c"ibv_create_qp" BASE
        fn(*mut sys::ProtectionDomain, *mut sys::QueuePairInit) -> *mut sys::QueuePair;
    modify_qp: c"ibv_modify_qp" BASE fn(*mut sys::QueuePair, *mut sys::QueuePairAttributes, c_int) -> c_int;
    destroy_qp: c"ibv_destroy_qp" BASE fn(*mut sys::QueuePair) -> c_int;
}

/// The version of symbols that have not changed since the first interface.
const OLD: &CStr = c"IBVERBS_1.0";

impl Library {
    /// The library of this process. It stays loaded: its drivers keep state that cannot be unloaded.
    pub(crate) fn load() -> Result<&'static Self, OpenError> {
        static LIBRARY: OnceLock<Result<Library, OpenError>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| Handle::open(FILE).and_then(Self::find));
        loaded.as_ref().map_err(Clone::clone)
    }
}

/// A loaded library, which is never unloaded.
#[derive(Clone, Copy)]
struct Handle(*mut c_void);

impl Handle {
    fn open(file: &CStr) -> Result<Self, OpenError> {
        // SAFETY: the name is a string of C. The library's initializers only set up its own state; it is the
        // system's library of this name, which the administrator installed.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            Err(OpenError::NoLibrary { reason: dl_error() })
        } else {
            Ok(Self(handle))
        }
    }

    fn symbol(self, name: &CStr, version: &CStr) -> Result<*mut c_void, OpenError> {
        // SAFETY: the handle is one of `dlopen` that was never closed, and both names are strings of C.
        let found = unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) };
        if found.is_null() {
            let text = |text: &CStr| text.to_string_lossy().into_owned();
            return Err(OpenError::OldLibrary { symbol: text(name), version: text(version) });
        }
        Ok(found)
    }
}

/// Why the last call failed.
fn dl_error() -> String {
    // SAFETY: it has no condition.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the system gives no reason".to_owned();
    }
    // SAFETY: the pointer is not null, so it is a string of C that stays until this thread's next call.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let Err(OpenError::NoLibrary { reason }) = Handle::open(c"libbluebridge-has-none.so.1")
        else {
            panic!("there is no such library");
        };
        assert!(reason.contains("libbluebridge-has-none.so.1"), "{reason}");
    }

    #[test]
    fn a_library_of_another_version_lacks_a_symbol() {
        // Every program has it, so it is there; nobody's verbs are in it.
        let handle = Handle::open(c"libc.so.6").expect("this program uses it");
        let Err(OpenError::OldLibrary { symbol, version }) = Library::find(handle).map(drop) else {
            panic!("libc has no verbs");
        };
        assert_eq!((symbol.as_str(), version.as_str()), ("ibv_get_device_list", "IBVERBS_1.1"));
    }
}
