//! Devices, their ports and addresses, and what they report by themselves.

use std::ffi::{CStr, c_int};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::completions::Completions;
use crate::error::{OpenError, VerbError};
use crate::library::Library;
use crate::sys::{self, event};

/// A queue pair can name its own address only by a byte.
const ADDRESSES_MAX: usize = 256;
/// The most addresses of a port that are asked for, whatever the device says.
const TABLE_MAX: usize = 1 << 16;

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
    /// A device of tests.
    #[cfg(test)]
    pub(crate) fn of(library: &'static Library, raw: NonNull<sys::Context>, name: String) -> Self {
        Self(Arc::new(Context { library, raw, name }))
    }

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

    /// The first device that has this address, and the port that has it. A device that cannot be opened, or does not tell
    /// its addresses, does not hide others.
    ///
    /// # Errors
    /// If there is no library, no device, or none with this address; what was wrong with a device if that is the only one.
    pub fn with_address(address: Ipv6Addr) -> Result<(Self, Port), OpenError> {
        first_with(address, device_names()?, |name| {
            let device = Self::open(name)?;
            let port = device.port_with(address)?;
            Ok((device, port))
        })
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
        let refused_table =
            |error: &io::Error| refused(format!("read the addresses of {}", self.name()), error);
        // The library takes no table that is shorter than the device's, although only the first ones are looked at.
        let length = self.table_length().map_err(|error| refused_table(&error.source))?;
        let mut entries = vec![sys::GidEntry::default(); length];
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
            return Err(refused_table(&io::Error::from_raw_os_error(error)));
        };
        let is_wanted = |entry: &&sys::GidEntry| {
            entry.kind == sys::GID_TYPE_ROCE_V2 && entry.gid == address.octets()
        };
        let entry = entries.iter().take(count).find(is_wanted);
        let place = entry.and_then(|entry| {
            Some((u8::try_from(entry.port).ok()?, u8::try_from(entry.index).ok()?))
        });
        let Some((number, index)) = place else {
            let device = self.name().to_owned();
            return Err(OpenError::NoAddress { device, address, skipped: Vec::new() });
        };
        self.port(number, address, index).map_err(|error| {
            refused(format!("read port {number} of {}", self.name()), &error.source)
        })
    }

    /// The room of the tables of addresses of all ports.
    fn table_length(&self) -> Result<usize, VerbError> {
        let mut length = ADDRESSES_MAX;
        for number in 1..=self.limits()?.ports {
            let of_port = self.port_attributes(number)?.gid_table_length;
            length += usize::try_from(of_port).unwrap_or(0).min(TABLE_MAX);
        }
        Ok(length)
    }

    fn port_attributes(&self, number: u8) -> Result<sys::PortAttributes, VerbError> {
        let mut found = sys::PortAttributes::default();
        // SAFETY: the device is open, and `found` is writable.
        let code =
            unsafe { (self.0.library.query_port)(self.0.raw.as_ptr(), number, &raw mut found) };
        VerbError::check("ibv_query_port", code)?;
        Ok(found)
    }

    fn port(&self, number: u8, address: Ipv6Addr, address_index: u8) -> Result<Port, VerbError> {
        let found = self.port_attributes(number)?;
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
            event::CQ_ERR => {
                // SAFETY: events of this kind are of a completion queue, to which the library has written a pointer.
                let queue = unsafe { event.element.completion_queue };
                // SAFETY: only this crate makes queues of the device, and one is not destroyed before its events are
                // acknowledged, which is done below.
                let number = unsafe { Completions::queue_pair_of(queue) };
                DeviceEvent::QueuePairFailed { number }
            }
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

/// What `look` finds first.
fn first_with<T>(
    address: Ipv6Addr,
    names: Vec<String>,
    look: impl Fn(&str) -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    let (mut without, mut skipped) = (Vec::new(), Vec::new());
    for name in names {
        match look(&name) {
            Ok(found) => return Ok(found),
            Err(OpenError::NoAddress { .. }) => without.push(name),
            Err(error) => skipped.push(error),
        }
    }
    match skipped.pop() {
        Some(only) if without.is_empty() && skipped.is_empty() => Err(only),
        last => {
            skipped.extend(last);
            Err(OpenError::NoAddress { device: without.join(", "), address, skipped })
        }
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
    use crate::simulated::{self, Handle};

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
    fn a_device_that_cannot_be_used_hides_no_other_one_and_is_named() {
        let address = Ipv6Addr::LOCALHOST;
        let look = |name: &str| match name {
            "good" => Ok(7),
            "without" => {
                Err(OpenError::NoAddress { device: name.to_owned(), address, skipped: Vec::new() })
            }
            _ => Err(refused(format!("open {name}"), &io::ErrorKind::PermissionDenied.into())),
        };
        let first = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            first_with(address, names, look).map_err(|error| error.to_string())
        };
        assert_eq!(first(&["broken", "without", "good"]), Ok(7));
        let error = first(&["broken"]).expect_err("none");
        assert!(
            error.contains("cannot open broken") && error.contains("/dev/infiniband"),
            "{error}"
        );
        let error = first(&["broken", "without", "other"]).expect_err("none");
        for part in ["device without has no", "cannot open broken", "cannot open other"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let error = first(&["broken", "other"]).expect_err("none");
        assert!(error.contains("open broken") && error.contains("open other"), "{error}");
    }

    #[test]
    fn a_device_has_any_number_of_addresses_of_which_the_first_256_can_be_used() {
        let (handle, device) = Handle::new();
        let address = |at: u16| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, at);
        for count in [0, 1, 256, 257, 1024] {
            handle.state().addresses = (0..count).map(|at| address(at).octets()).collect();
            for at in [0, 255, 256, 1023, 1024] {
                let found = device.port_with(address(at)).map(|port| port.address_index.into());
                match found {
                    Ok(index) => assert_eq!((index, at < count.min(256)), (at, true)),
                    Err(OpenError::NoAddress { .. }) => assert!(at >= count.min(256), "{at}"),
                    Err(error) => panic!("{at} of {count}: {error}"),
                }
            }
        }
    }

    #[test]
    fn a_completion_queue_that_failed_is_reported_as_the_end_of_its_queue_pair() {
        let (handle, device) = Handle::new();
        let (queue_pair, _) = Handle::queue_pair(&device);
        assert_eq!(device.next_event().expect("looked"), None);
        handle.fail_queue();
        let event = device.next_event().expect("looked");
        assert_eq!(event, Some(DeviceEvent::QueuePairFailed { number: queue_pair.number() }));
        assert_eq!(queue_pair.number(), simulated::NUMBER);
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
