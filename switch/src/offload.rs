//! Offloads of an interface, by the ethtool ioctl (linux/ethtool.h).
//!
//! A switch sees frames as their sender left them. A soft or an XDP switch needs some offloads of the hosts' links
//! off, so that it gets no partial checksums and no unsplit datagrams.

use std::{io, mem, ptr};

use rustix::{
    fd::OwnedFd,
    ioctl::{self, Updater},
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
};

const SIOCETHTOOL: ioctl::Opcode = 0x8946;

/// Why offloads of an interface could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError {
    /// The name is not a valid interface name.
    #[error("{interface:?} is not an interface name: 1 to 15 characters, no space or slash")]
    NotAnInterfaceName {
        /// The name given.
        interface: String,
    },
    /// The kernel refused to read or change an offload.
    #[error("cannot {action} of {interface}: {source}")]
    Refused {
        /// The requested action.
        action: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The driver did not apply the change; another kind of interface may be needed.
    #[error("cannot {action} of {interface}: its driver did not change them")]
    Unchanged {
        /// The requested action.
        action: &'static str,
        /// The interface.
        interface: String,
    },
}

impl OffloadError {
    /// Whether more privileges would help.
    pub fn is_permission(&self) -> bool {
        let Self::Refused { source, .. } = self else { return false };
        source.kind() == io::ErrorKind::PermissionDenied
    }
}

/// Makes the sender of this interface write complete checksums and split datagrams itself.
///
/// # Errors
/// If the name is invalid, or if kernel or driver refuse.
pub fn disable_transmit_offloads(interface: &str) -> Result<(), OffloadError> {
    let ethtool = Ethtool::new(interface, "switch off the transmit offloads")?;
    TRANSMIT.iter().try_for_each(|offload| ethtool.set(*offload, false))?;
    TRANSMIT.iter().try_for_each(|offload| ethtool.assert(*offload, false))
}

/// Makes the sender of this interface write complete checksums, also for the pieces of datagrams that it splits later.
///
/// # Errors
/// As for [`disable_transmit_offloads`].
pub fn disable_transmit_checksums(interface: &str) -> Result<(), OffloadError> {
    let ethtool = Ethtool::new(interface, "switch off the transmit checksum offloads")?;
    ethtool.set(Offload::TRANSMIT_CHECKSUM, false)?;
    ethtool.assert(Offload::TRANSMIT_CHECKSUM, false)
}

/// Switches generic receive offload (GRO) on; without it a veth accepts no frames that XDP redirects to it.
///
/// # Errors
/// As for [`disable_transmit_offloads`].
pub fn enable_receive_offload(interface: &str) -> Result<(), OffloadError> {
    let ethtool = Ethtool::new(interface, "switch on the generic receive offload")?;
    ethtool.set(Offload::GENERIC_RECEIVE, true)?;
    ethtool.assert(Offload::GENERIC_RECEIVE, true)
}

/// Whether the sender leaves checksums or the splitting of datagrams to the interface.
///
/// # Errors
/// If the name is invalid, or if the kernel refuses.
pub fn has_transmit_offloads(interface: &str) -> Result<bool, OffloadError> {
    let ethtool = Ethtool::new(interface, "read the transmit offloads")?;
    for offload in TRANSMIT {
        if ethtool.is_on(offload)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The commands that read and change one offload (`ETHTOOL_G*`, `ETHTOOL_S*`).
#[derive(Clone, Copy)]
struct Offload {
    read: u32,
    change: u32,
}

impl Offload {
    const TRANSMIT_CHECKSUM: Self = Self { read: 0x16, change: 0x17 };
    const TCP_SEGMENTATION: Self = Self { read: 0x1e, change: 0x1f };
    const GENERIC_SEGMENTATION: Self = Self { read: 0x23, change: 0x24 };
    const GENERIC_RECEIVE: Self = Self { read: 0x2b, change: 0x2c };
}

const TRANSMIT: [Offload; 3] =
    [Offload::TRANSMIT_CHECKSUM, Offload::TCP_SEGMENTATION, Offload::GENERIC_SEGMENTATION];

/// `struct ethtool_value`: a command and its one argument or result.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// The ethtool ioctl of one interface.
struct Ethtool<'a> {
    interface: &'a str,
    action: &'static str,
    socket: OwnedFd,
}

impl<'a> Ethtool<'a> {
    fn new(interface: &'a str, action: &'static str) -> Result<Self, OffloadError> {
        let bad = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        if interface.is_empty() || interface.len() >= libc::IFNAMSIZ || interface.contains(bad) {
            return Err(OffloadError::NotAnInterfaceName { interface: interface.to_owned() });
        }
        let socket =
            socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        match socket {
            Ok(socket) => Ok(Self { interface, action, socket }),
            Err(errno) => Err(refused(interface, action, errno.into())),
        }
    }

    fn set(&self, offload: Offload, on: bool) -> Result<(), OffloadError> {
        self.call(offload.change, on.into()).map(drop)
    }

    fn is_on(&self, offload: Offload) -> Result<bool, OffloadError> {
        self.call(offload.read, 0).map(|data| data != 0)
    }

    /// The kernel may accept a change that the driver then does not apply.
    fn assert(&self, offload: Offload, on: bool) -> Result<(), OffloadError> {
        if self.is_on(offload)? == on {
            return Ok(());
        }
        Err(OffloadError::Unchanged { action: self.action, interface: self.interface.to_owned() })
    }

    fn call(&self, command: u32, data: u32) -> Result<u32, OffloadError> {
        let mut value = EthtoolValue { command, data };
        let mut name = [0; libc::IFNAMSIZ];
        for (slot, byte) in name.iter_mut().zip(self.interface.bytes()) {
            *slot = libc::c_char::from_ne_bytes([byte]);
        }
        // SAFETY: every bit pattern of zeroes is a valid `ifreq`, a C struct of integers and pointers.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        request.ifr_name = name;
        request.ifr_ifru.ifru_data = ptr::from_mut(&mut value).cast();
        // SAFETY: SIOCETHTOOL takes an `ifreq` whose data points to an ethtool command, which outlives the call.
        let call = unsafe { Updater::<SIOCETHTOOL, _>::new(&mut request) };
        // SAFETY: the call above is laid out for this opcode and the socket is open.
        let done = unsafe { ioctl::ioctl(&self.socket, call) };
        done.map_err(|errno| refused(self.interface, self.action, errno.into()))?;
        Ok(value.data)
    }
}

fn refused(interface: &str, action: &'static str, source: io::Error) -> OffloadError {
    OffloadError::Refused { action, interface: interface.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_name_and_a_missing_interface_are_different_errors() {
        for name in ["", "a/b", "a b", "sixteen-bytes-ok"] {
            let error = has_transmit_offloads(name).expect_err("it is no name");
            assert!(matches!(error, OffloadError::NotAnInterfaceName { .. }), "{error}");
        }
        let error = has_transmit_offloads("nope-of-offload").expect_err("it is not there");
        assert!(error.to_string().contains("of nope-of-offload: "), "{error}");
        assert!(!error.is_permission());
    }

    mod netns {
        use bluebridge_testkit::{ip, namespace::in_child};

        use super::*;

        #[test]
        fn offloads_are_switched_one_by_one() {
            in_child(|| {
                ip("link add offload0 type veth peer name offload1");
                let on =
                    |offload| Ethtool::new("offload0", "read").unwrap().is_on(offload).unwrap();
                assert!(has_transmit_offloads("offload0").unwrap());
                // The initial state depends on the kernel.
                let ethtool = Ethtool::new("offload0", "switch off").unwrap();
                ethtool.set(Offload::GENERIC_RECEIVE, false).unwrap();
                assert!(!on(Offload::GENERIC_RECEIVE));
                enable_receive_offload("offload0").unwrap();
                assert!(on(Offload::GENERIC_RECEIVE));
                disable_transmit_checksums("offload0").unwrap();
                assert!(!on(Offload::TRANSMIT_CHECKSUM));
                assert!(on(Offload::GENERIC_SEGMENTATION), "that stays as it was");
                disable_transmit_offloads("offload0").unwrap();
                assert!(!has_transmit_offloads("offload0").unwrap());
                assert!(on(Offload::GENERIC_RECEIVE), "that is of the other direction");
                assert!(has_transmit_offloads("offload1").unwrap(), "the peer's are its own");
            });
        }
    }
}
