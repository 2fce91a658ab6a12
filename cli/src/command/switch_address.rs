//! The address of a switch on the command line.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use bluebridge_controller::driver::OpenFlowAddress;

/// A switch, and the protocol that it speaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SwitchAddress {
    /// A P4Runtime server.
    P4Runtime(SocketAddr),
    /// OpenFlow.
    OpenFlow(OpenFlowAddress),
}

impl FromStr for SwitchAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |address: &str| {
            address.parse::<SocketAddr>().map_err(|_| {
                format!(
                    "{address:?} is not an address with a port. Use ADDRESS for P4Runtime, openflow://ADDRESS \
                     for a switch that listens, openflow-listen://ADDRESS for a switch that connects"
                )
            })
        };
        if let Some(address) = text.strip_prefix("openflow://") {
            return Ok(Self::OpenFlow(OpenFlowAddress::Connect(parse(address)?)));
        }
        if let Some(address) = text.strip_prefix("openflow-listen://") {
            return Ok(Self::OpenFlow(OpenFlowAddress::Listen(parse(address)?)));
        }
        parse(text.strip_prefix("p4runtime://").unwrap_or(text)).map(Self::P4Runtime)
    }
}

impl fmt::Display for SwitchAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::P4Runtime(address) => address.fmt(f),
            Self::OpenFlow(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_its_protocol() {
        let address: SocketAddr = "[::1]:6653".parse().unwrap();
        let connect = SwitchAddress::OpenFlow(OpenFlowAddress::Connect(address));
        let listen = SwitchAddress::OpenFlow(OpenFlowAddress::Listen(address));
        for (text, expected) in [
            ("[::1]:6653", SwitchAddress::P4Runtime(address)),
            ("openflow://[::1]:6653", connect),
            ("openflow-listen://[::1]:6653", listen),
        ] {
            let parsed: SwitchAddress = text.parse().unwrap();
            assert_eq!((parsed, parsed.to_string().as_str()), (expected, text));
        }
        assert_eq!("p4runtime://[::1]:6653".parse(), Ok(SwitchAddress::P4Runtime(address)));
        for bad in ["", "::1", "openflow://", "openflow://somewhere:1", "http://[::1]:6653"] {
            let error = bad.parse::<SwitchAddress>().unwrap_err();
            assert!(error.contains("openflow://ADDRESS"), "{error}");
        }
    }
}
