//! Transmit offloads of an interface, by the ethtool ioctl (linux/ethtool.h).

use std::io;
use std::mem;
use std::ptr;

use rustix::fd::OwnedFd;
use rustix::ioctl::{self, Updater};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::NetworkError;
use super::netlink::check_interface_name;

const SIOCETHTOOL: u32 = 0x8946;
const ETHTOOL_GTXCSUM: u32 = 0x16;
const ETHTOOL_STXCSUM: u32 = 0x17;
const ETHTOOL_GTSO: u32 = 0x1e;
const ETHTOOL_STSO: u32 = 0x1f;
const ETHTOOL_GGSO: u32 = 0x23;
const ETHTOOL_SGSO: u32 = 0x24;

/// `struct ethtool_value`: a command and its one argument or answer.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// Makes the interface's sender write whole checksums and split datagrams itself.
///
/// A user-space or XDP switch sees packets as the sender left them, so partial checksums and unsplit
/// datagrams would reach it otherwise.
pub fn disable_transmit_offloads(interface: &str) -> Result<(), NetworkError> {
    check_interface_name(interface)?;
    let failed = |source| NetworkError::Offload { interface: interface.to_owned(), source };
    let socket = control_socket().map_err(failed)?;
    for command in [ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO] {
        ethtool(&socket, interface, command, 0).map_err(failed)?;
    }
    match has_transmit_offloads(interface)? {
        false => Ok(()),
        true => Err(failed(io::Error::other("the driver keeps them on"))),
    }
}

/// Whether the sender leaves checksums or the splitting of datagrams to the interface.
pub fn has_transmit_offloads(interface: &str) -> Result<bool, NetworkError> {
    check_interface_name(interface)?;
    let failed = |source| NetworkError::Offload { interface: interface.to_owned(), source };
    let socket = control_socket().map_err(failed)?;
    for command in [ETHTOOL_GTXCSUM, ETHTOOL_GTSO, ETHTOOL_GGSO] {
        if ethtool(&socket, interface, command, 0).map_err(failed)? != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn ethtool(socket: &OwnedFd, interface: &str, command: u32, data: u32) -> io::Result<u32> {
    let mut value = EthtoolValue { command, data };
    let mut name = [0; libc::IFNAMSIZ];
    for (slot, byte) in name.iter_mut().zip(interface.bytes().take(libc::IFNAMSIZ - 1)) {
        *slot = libc::c_char::from_ne_bytes([byte]);
    }
    // SAFETY: every bit pattern of zeroes is a valid `ifreq`, a C struct of integers and pointers.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    request.ifr_name = name;
    request.ifr_ifru.ifru_data = ptr::from_mut(&mut value).cast();
    // SAFETY: SIOCETHTOOL takes an `ifreq` whose data points to an ethtool command, which outlives the call.
    let call = unsafe { Updater::<SIOCETHTOOL_OPCODE, _>::new(&mut request) };
    // SAFETY: the call above is laid out for this opcode and the socket is open.
    unsafe { ioctl::ioctl(socket, call) }?;
    Ok(value.data)
}

const SIOCETHTOOL_OPCODE: ioctl::Opcode = SIOCETHTOOL as ioctl::Opcode;
