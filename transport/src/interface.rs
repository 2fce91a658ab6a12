//! Network interfaces of the calling thread's namespace.

use std::io;

use socket2::{Domain, Socket, Type};

use crate::udp::sys;

/// The properties of its interface that an endpoint reports when it joins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Interface {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// The largest IP packet that it sends, in bytes.
    pub mtu: u32,
}

impl Interface {
    /// The interface called `name`.
    ///
    /// # Errors
    ///
    /// `ENODEV` if this namespace has none of that name.
    pub fn by_name(name: &str) -> io::Result<Self> {
        Self::of(&Socket::new(Domain::IPV6, Type::DGRAM, None)?, name)
    }

    /// As [`Self::by_name`], with a socket that is open.
    pub(crate) fn of(socket: &Socket, name: &str) -> io::Result<Self> {
        let mtu = sys::interface_mtu(socket, name)?;
        let mtu = u32::try_from(mtu).unwrap_or(u32::MAX);
        Ok(Self { mac: sys::interface_mac(socket, name)?, mtu })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_no_address_and_a_large_mtu() {
        let loopback = Interface::by_name("lo").unwrap();
        assert_eq!(loopback.mac, [0; 6]);
        assert!(loopback.mtu >= 1280);
    }

    #[test]
    fn a_missing_or_invalid_name_is_an_error() {
        for name in ["no-such-if", "a-name-of-more-than-fifteen-characters", ""] {
            let error = Interface::by_name(name).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{name:?}");
        }
    }
}
