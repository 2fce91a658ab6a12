//! Devices, their ports and addresses, and what they report by themselves.

use std::ffi::{CStr, c_int};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{OpenError, VerbError};
use crate::library::Library;
use crate::sys::{self, event};

/// A queue pair can name its own address only by a byte.
const ADDRESSES_MAX: usize = 256;

/// The names of this machine's RDMA devices.
///
/// # Errors
/// If there is no library, no device, or no access to them.
pub fn device_names() -> Result<Vec<String>, OpenError> {
    let list = DeviceList::new()?;
    Ok(list.devices().map(|(name, _)| name).collect())
}

/// The list of devices, which the library owns.
struct DeviceList {
    library: &'static Library,
    list: NonNull<*mut sys::Device>,
    count: usize,
}

impl DeviceList {
    fn new() -> Result<Self, OpenError> {
        let library = Library::load()?;
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        let Some(list) = NonNull::new(list) else {
            let error = io::Error::last_os_error();
            // The kernel has no part of RDMA that is visible to programs.
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => OpenError::NoDevice,
                _ => refused("list the RDMA devices", &error),
            });
        };
        let list = Self { library, list, count: usize::try_from(count).unwrap_or(0) };
        if list.count == 0 { Err(OpenError::NoDevice) } else { Ok(list) }
    }

    fn devices(&self) -> impl Iterator<Item = (String, NonNull<sys::Device>)> {
        // SAFETY: the library returned so many pointers, which stay until the list is freed by `drop`.
        let devices = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) };
        devices.iter().filter_map(|device| {
            let device = NonNull::new(*device)?;
            // SAFETY: the device is of a list that has not been freed.
            let name = unsafe { (self.library.get_device_name)(device.as_ptr()) };
            if name.is_null() {
                return None;
            }
            // SAFETY: it is a string of C inside of the device.
            let name = unsafe { CStr::from_ptr(name) };
            Some((name.to_string_lossy().into_owned(), device))
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list is one of `ibv_get_device_list`, and is freed once. Opened devices stay open.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

fn refused(action: impl Into<String>, error: &io::Error) -> OpenError {
    OpenError::Refused { action: action.into(), reason: error.to_string() }
}

/// An open device, which closes when everything that was made of it is gone.
#[derive(Clone, Debug)]
pub struct Device(pub(crate) Arc<Context>);

pub(crate) struct Context {
    pub(crate) library: &'static Library,
    pub(crate) raw: NonNull<sys::Context>,
    name: String,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Context").field(&self.name).finish()
    }
}

// SAFETY: the library locks its state, and a driver that of its queues: several threads may call verbs of one context.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device allows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Work requests in a queue.
    pub requests: u32,
    /// READs that a queue pair executes for its peer at the same time.
    pub reads_in: u8,
    /// READs that a queue pair has outstanding at the same time; more wait in the device.
    pub reads_out: u8,
    /// The longest region.
    pub region_bytes: u64,
    /// Ports, from number 1.
    pub ports: u8,
}

/// The largest payload of a packet.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum PathMtu {
    /// 256 bytes.
    Bytes256 = 1,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl PathMtu {
    const ALL: [Self; 5] =
        [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// The bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    /// The path MTU with so many bytes.
    #[must_use]
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

/// A port of a device, and the address by which it is used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it can send and receive.
    pub is_active: bool,
    /// The largest payload of a packet now.
    pub mtu: PathMtu,
    /// The longest message.
    pub message_bytes: u32,
    /// An address of it, which is a GID of RoCE version 2: the source of its packets.
    pub address: Ipv6Addr,
    /// The place of that address in the port's table.
    pub(crate) address_index: u8,
}

/// What a device reports by itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// The addresses of a port changed.
    AddressesChanged {
        /// The port.
        port: u8,
    },
    /// The device failed: everything made of it must be dropped.
    DeviceFailed,
    /// Anything else, by its number in `enum ibv_event_type`.
    Other(u32),
    /// A port cannot send and receive any more.
    PortDown {
        /// The port.
        port: u8,
    },
    /// A port can send and receive again.
    PortUp {
        /// The port.
        port: u8,
    },
    /// A queue pair failed, or its completions were lost: make another.
    QueuePairFailed {
        /// Its number.
        number: u32,
    },
}

impl Device {
    /// Opens the device with this name.
    ///
    /// # Errors
    /// If there is no library, no device of this name, or no access to it.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let list = DeviceList::new()?;
        let Some((_, device)) = list.devices().find(|(found, _)| found == name) else {
            let found: Vec<_> = list.devices().map(|(name, _)| name).collect();
            return Err(OpenError::UnknownDevice {
                name: name.to_owned(),
                found: found.join(", "),
            });
        };
        // SAFETY: the device is of a list that has not been freed.
        let context = unsafe { (list.library.open_device)(device.as_ptr()) };
        let Some(raw) = NonNull::new(context) else {
            return Err(refused(format!("open {name}"), &io::Error::last_os_error()));
        };
        let context = Context { library: list.library, raw, name: name.to_owned() };
        // An event must be waited for with a deadline, which the library does not do.
        rustix::io::ioctl_fionbio(context.events(), true)
            .map_err(|error| refused("wait for the device's events", &error.into()))?;
        Ok(Self(Arc::new(context)))
    }

    /// The first device that has this address, and the port that has it.
    ///
    /// # Errors
    /// If there is no library, no device, or none with this address.
    pub fn with_address(address: Ipv6Addr) -> Result<(Self, Port), OpenError> {
        let names = device_names()?;
        for name in &names {
            let device = Self::open(name)?;
            match device.port_with(address) {
                Ok(port) => return Ok((device, port)),
                Err(OpenError::NoAddress { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(OpenError::NoAddress { device: names.join(", "), address })
    }

    /// Its name, such as `rxe0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What it allows.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn limits(&self) -> Result<Limits, VerbError> {
        // SAFETY: all bytes zero are a value of this struct of numbers.
        let mut found: sys::DeviceAttributes = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open, and `found` is writable.
        let code = unsafe { (self.0.library.query_device)(self.0.raw.as_ptr(), &raw mut found) };
        VerbError::check("ibv_query_device", code)?;
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        let byte = |value: c_int| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
        Ok(Limits {
            requests: count(found.requests_max),
            reads_in: byte(found.reads_in_max),
            reads_out: byte(found.reads_out_max),
            region_bytes: found.region_bytes_max,
            ports: found.ports,
        })
    }

    /// The port that has this address.
    ///
    /// # Errors
    /// If none has it, or the device does not answer.
    pub fn port_with(&self, address: Ipv6Addr) -> Result<Port, OpenError> {
        let mut entries = [sys::GidEntry::default(); ADDRESSES_MAX];
        // SAFETY: the device is open; so many entries of this size are writable.
        let count = unsafe {
            (self.0.library.query_gid_table)(
                self.0.raw.as_ptr(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<sys::GidEntry>(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = i32::try_from(count.unsigned_abs()).unwrap_or(libc::EIO);
            let error = io::Error::from_raw_os_error(error);
            return Err(refused(format!("read the addresses of {}", self.name()), &error));
        };
        let is_wanted = |entry: &&sys::GidEntry| {
            entry.kind == sys::GID_TYPE_ROCE_V2 && entry.gid == address.octets()
        };
        let entry = entries.iter().take(count).find(is_wanted);
        let place = entry.and_then(|entry| {
            Some((u8::try_from(entry.port).ok()?, u8::try_from(entry.index).ok()?))
        });
        let Some((number, index)) = place else {
            return Err(OpenError::NoAddress { device: self.name().to_owned(), address });
        };
        self.port(number, address, index).map_err(|error| {
            refused(format!("read port {number} of {}", self.name()), &error.source)
        })
    }

    fn port(&self, number: u8, address: Ipv6Addr, address_index: u8) -> Result<Port, VerbError> {
        let mut found = sys::PortAttributes::default();
        // SAFETY: the device is open, and `found` is writable.
        let code =
            unsafe { (self.0.library.query_port)(self.0.raw.as_ptr(), number, &raw mut found) };
        VerbError::check("ibv_query_port", code)?;
        let mtu = PathMtu::ALL.into_iter().find(|mtu| *mtu as u32 == found.mtu);
        Ok(Port {
            number,
            is_active: found.state == sys::PORT_ACTIVE
                && found.link_layer == sys::LINK_LAYER_ETHERNET,
            mtu: mtu.unwrap_or(PathMtu::Bytes256),
            message_bytes: found.message_bytes_max,
            address,
            address_index,
        })
    }

    /// The next event that the device has reported, if there is one. The descriptor of [`AsFd`] is readable then.
    ///
    /// # Errors
    /// If the device does not answer any more.
    pub fn next_event(&self) -> Result<Option<DeviceEvent>, VerbError> {
        let (library, raw) = (self.0.library, self.0.raw.as_ptr());
        let mut event = sys::AsyncEvent { element: sys::EventElement { port: 0 }, kind: 0 };
        // SAFETY: the device is open, and `event` is writable.
        if unsafe { (library.get_async_event)(raw, &raw mut event) } != 0 {
            let error = VerbError::last("ibv_get_async_event");
            return match error.source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        let port = || {
            // SAFETY: events of this kind are of a port, whose number the library has written.
            let port = unsafe { event.element.port };
            u8::try_from(port).unwrap_or(0)
        };
        let queue_pair = || {
            // SAFETY: events of this kind are of a queue pair, to which the library has written a pointer.
            let queue_pair = unsafe { event.element.queue_pair };
            // SAFETY: a queue pair is not destroyed before its events are acknowledged, which is done below.
            unsafe { (*queue_pair).number }
        };
        let known = match event.kind {
            event::DEVICE_FATAL => DeviceEvent::DeviceFailed,
            event::GID_CHANGE => DeviceEvent::AddressesChanged { port: port() },
            event::PORT_ACTIVE => DeviceEvent::PortUp { port: port() },
            event::PORT_ERR => DeviceEvent::PortDown { port: port() },
            event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR => {
                DeviceEvent::QueuePairFailed { number: queue_pair() }
            }
            other => DeviceEvent::Other(other),
        };
        // SAFETY: the event is the one that the library returned, and is acknowledged once.
        unsafe { (library.ack_async_event)(&raw mut event) };
        Ok(Some(known))
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.events()
    }
}

impl Context {
    /// The descriptor that is readable when the device has reported something.
    fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the pointer is of the open device.
        let fd = unsafe { (*self.raw.as_ptr()).async_fd };
        // SAFETY: the descriptor is open as long as the device is, and that is as long as `self` is there.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all that was made of the device has an `Arc` of it, so nothing uses it any more. An error would
        // leave it open, which harms nothing.
        unsafe { (self.library.close_device)(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rdma_says_what_is_missing() {
        let error = match Device::open("none-has-this-name") {
            Ok(device) => panic!("{device:?}"),
            Err(error) => error.to_string(),
        };
        let has_help = ["apt-get install", "rdma link", "/dev/infiniband", "there are: "];
        assert!(has_help.iter().any(|help| error.contains(help)), "{error}");
        let names = device_names().map_err(|error| error.to_string());
        assert!(names.is_ok() == error.contains("there are: "), "{names:?}, {error}");
    }

    #[test]
    fn a_path_mtu_is_named_by_its_bytes() {
        for mtu in PathMtu::ALL {
            assert_eq!(PathMtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(PathMtu::Bytes4096.bytes(), 4096);
        assert_eq!(PathMtu::from_bytes(9000), None);
    }
}
