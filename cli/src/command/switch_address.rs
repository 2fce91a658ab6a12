//! The address of a switch on the command line.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use bluebridge_controller::driver::{OpenFlowAddress, OpenFlowSwitch};
use bluebridge_northbound::environment::SwitchPort;

/// A switch, and the protocol that it speaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SwitchAddress {
    /// A P4Runtime server.
    P4Runtime(SocketAddr),
    /// OpenFlow.
    OpenFlow(OpenFlowSwitch),
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
        let openflow = |text: &str, address: fn(SocketAddr) -> OpenFlowAddress| {
            let (text, option) = text.split_once('?').map_or((text, None), |(a, b)| (a, Some(b)));
            let datapath_id = option.map(parse_datapath_id).transpose()?;
            Ok(Self::OpenFlow(OpenFlowSwitch { address: address(parse(text)?), datapath_id }))
        };
        if let Some(address) = text.strip_prefix("openflow://") {
            return openflow(address, OpenFlowAddress::Connect);
        }
        if let Some(address) = text.strip_prefix("openflow-listen://") {
            return openflow(address, OpenFlowAddress::Listen);
        }
        parse(text.strip_prefix("p4runtime://").unwrap_or(text)).map(Self::P4Runtime)
    }
}

/// The datapath id that an OpenFlow address requires, such as `datapath-id=00000000000000bb`.
fn parse_datapath_id(option: &str) -> Result<u64, String> {
    let digits = option.strip_prefix("datapath-id=").ok_or_else(|| {
        format!("{option:?} is no option of an OpenFlow address; write ?datapath-id=ID")
    })?;
    let digits = digits.strip_prefix("0x").unwrap_or(digits);
    // `from_str_radix` also takes a sign.
    let are_digits = digits.len() <= 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| are_digits).ok_or_else(|| {
        format!(
            "{digits:?} is not a datapath id, which has up to 16 hexadecimal digits; \
             `ovs-vsctl get bridge BRIDGE datapath_id` prints that of an Open vSwitch"
        )
    })
}

impl fmt::Display for SwitchAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::P4Runtime(address) => address.fmt(f),
            Self::OpenFlow(switch) => switch.fmt(f),
        }
    }
}

/// A switch of a controller, with its name if there are several.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct NamedSwitch {
    pub(super) name: String,
    pub(super) address: SwitchAddress,
}

impl FromStr for NamedSwitch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // An option of an address has the same sign.
        let named = text.split_once('=').filter(|(name, _)| !name.contains("://"));
        let (name, address) = named.unwrap_or(("", text));
        Ok(Self { name: name.to_owned(), address: address.parse()? })
    }
}

/// The ports at the ends of a link between two switches.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Link(pub(super) SwitchPort, pub(super) SwitchPort);

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Names of switches may contain '-', numbers of ports do not.
        let (one, other) = text
            .split_once('/')
            .and_then(|(name, rest)| {
                let (port, other) = rest.split_once('-')?;
                Some((format!("{name}/{port}"), other))
            })
            .ok_or_else(|| format!("{text:?} is no link; write SWITCH/PORT-SWITCH/PORT"))?;
        let end = |text: &str| text.parse::<SwitchPort>().map_err(|error| error.to_string());
        Ok(Self(end(&one)?, end(other)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_may_have_a_name_and_a_link_two_ends() {
        let named: NamedSwitch = "tor-1=openflow://[::1]:6653".parse().unwrap();
        assert_eq!(
            (named.name.as_str(), named.address.to_string().as_str()),
            ("tor-1", "openflow://[::1]:6653")
        );
        let unnamed: NamedSwitch = "[::1]:9559".parse().unwrap();
        assert_eq!(unnamed.name, "");
        let pinned = "openflow-listen://[::1]:6653?datapath-id=00000000000000bb";
        for (text, name) in [(pinned.to_owned(), ""), (format!("tor-1={pinned}"), "tor-1")] {
            let switch: NamedSwitch = text.parse().unwrap();
            assert_eq!((switch.name.as_str(), switch.address.to_string().as_str()), (name, pinned));
        }
        let end = |switch: &str, number| SwitchPort { switch: switch.to_owned(), number };
        assert_eq!("tor-1/9-spine-a/p1".parse(), Ok(Link(end("tor-1", 9), end("spine-a", 1))));
        for bad in
            ["", "tor1-spine", "tor1/9", "tor1/9-", "tor1/x-spine/1", "/9-spine/1", "a/1-b/2-c/3"]
        {
            assert!(bad.parse::<Link>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_names_its_protocol() {
        let address: SocketAddr = "[::1]:6653".parse().unwrap();
        let connect = SwitchAddress::OpenFlow(OpenFlowAddress::Connect(address).into());
        let listen = OpenFlowSwitch::from(OpenFlowAddress::Listen(address));
        let pinned = OpenFlowSwitch { datapath_id: Some(0xbb), ..listen };
        let [listen, pinned] = [listen, pinned].map(SwitchAddress::OpenFlow);
        for (text, expected) in [
            ("[::1]:6653", SwitchAddress::P4Runtime(address)),
            ("openflow://[::1]:6653", connect),
            ("openflow-listen://[::1]:6653", listen),
            ("openflow-listen://[::1]:6653?datapath-id=00000000000000bb", pinned),
        ] {
            let parsed: SwitchAddress = text.parse().unwrap();
            assert_eq!((parsed, parsed.to_string().as_str()), (expected, text));
        }
        assert_eq!("p4runtime://[::1]:6653".parse(), Ok(SwitchAddress::P4Runtime(address)));
        assert_eq!("openflow-listen://[::1]:6653?datapath-id=0xBB".parse(), Ok(pinned));
        for bad in ["datapath-id=", "datapath-id=+1", "datapath-id=00000000000000000", "id=1", ""] {
            let error = format!("openflow://[::1]:6653?{bad}").parse::<SwitchAddress>();
            let error = error.expect_err(bad);
            assert!(error.contains("datapath"), "{error}");
        }
        for bad in ["", "::1", "openflow://", "openflow://somewhere:1", "http://[::1]:6653"] {
            let error = bad.parse::<SwitchAddress>().unwrap_err();
            assert!(error.contains("openflow://ADDRESS"), "{error}");
        }
    }
}
