//! The environment variables that describe an endpoint.
//!
//! There is one set of variables, for the command line, the client library and every other program that
//! joins; `bluebridge rack exec` sets all of them.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// The address of the controller: `[address]:port`, with or without `http://` or `https://`.
pub const CONTROLLER_VARIABLE: &str = "BLUEBRIDGE_CONTROLLER";

/// The interface that is connected to the switch.
pub const INTERFACE_VARIABLE: &str = "BLUEBRIDGE_INTERFACE";

/// The endpoint's name.
pub const NAME_VARIABLE: &str = "BLUEBRIDGE_NAME";

/// The space, a number; 1 if not set.
pub const SPACE_VARIABLE: &str = "BLUEBRIDGE_SPACE";

/// The switch's port to which the interface is connected ([`SwitchPort`]).
pub const SWITCH_PORT_VARIABLE: &str = "BLUEBRIDGE_SWITCH_PORT";

/// Whether datagrams are sent as frames: `auto` if not set, `on` or `off`.
pub const FRAMES_VARIABLE: &str = "BLUEBRIDGE_FRAMES";

/// The root (a PEM file) of the controller's certificate; without it, joining uses no
/// TLS.
pub const TLS_ROOT_VARIABLE: &str = "BLUEBRIDGE_TLS_ROOT";

/// The name in the controller's certificate; the default is its address.
pub const TLS_NAME_VARIABLE: &str = "BLUEBRIDGE_TLS_NAME";

/// The endpoint's own certificate chain (a PEM file), if the controller requires one.
pub const TLS_CERTIFICATE_VARIABLE: &str = "BLUEBRIDGE_TLS_CERTIFICATE";

/// The private key of the endpoint's own certificate (a PEM file).
pub const TLS_KEY_VARIABLE: &str = "BLUEBRIDGE_TLS_KEY";

/// A variable or an option has an invalid value; correct it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum EnvironmentError {
    /// It is not an address of a controller.
    #[error("{0:?} is not an address of a controller; write [ADDRESS]:PORT")]
    Controller(String),
    /// It is not a port of a switch.
    #[error(
        "{0:?} is not a port of a switch; write a number such as 3, or p3, with the name of the switch if \
         there are several: tor1/3"
    )]
    SwitchPort(String),
}

/// A port of a switch: `3` or `p3`, or `tor1/3` if there are several switches.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SwitchPort {
    /// The name of the switch; empty if it was not given.
    pub switch: String,
    /// The number of the port.
    pub number: u16,
}

impl From<u16> for SwitchPort {
    /// A port of the only switch.
    fn from(number: u16) -> Self {
        Self { switch: String::new(), number }
    }
}

impl fmt::Display for SwitchPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.switch.as_str() {
            "" => write!(f, "{}", self.number),
            switch => write!(f, "{switch}/{}", self.number),
        }
    }
}

impl FromStr for SwitchPort {
    type Err = EnvironmentError;

    fn from_str(text: &str) -> Result<Self, EnvironmentError> {
        let error = || EnvironmentError::SwitchPort(text.to_owned());
        let (switch, port) = match text.split_once('/') {
            Some((switch, port)) if crate::is_name(switch) => (switch, port),
            Some(_) => return Err(error()),
            None => ("", text),
        };
        let digits = port.strip_prefix('p').unwrap_or(port);
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(error());
        }
        let number = digits.parse().map_err(|_| error())?;
        Ok(Self { switch: switch.to_owned(), number })
    }
}

/// The controller's address in a text, with or without a scheme.
///
/// # Errors
/// [`EnvironmentError::Controller`].
pub fn parse_controller(text: &str) -> Result<SocketAddr, EnvironmentError> {
    let address = without_scheme(text);
    address.parse().map_err(|_| EnvironmentError::Controller(text.to_owned()))
}

/// A controller's address or host name, without a scheme.
#[must_use]
pub fn without_scheme(text: &str) -> &str {
    let text = text.trim();
    let scheme = ["http://", "https://"].into_iter().find_map(|scheme| text.strip_prefix(scheme));
    let address = scheme.unwrap_or(text);
    address.strip_suffix('/').unwrap_or(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_port_has_a_number_and_perhaps_a_letter_and_a_switch() {
        assert_eq!(("3".parse(), "p3".parse()), (Ok(SwitchPort::from(3)), Ok(SwitchPort::from(3))));
        let of_tor = SwitchPort { switch: "tor1".to_owned(), number: 3 };
        assert_eq!(("tor1/3".parse(), "tor1/p3".parse()), (Ok(of_tor.clone()), Ok(of_tor.clone())));
        assert_eq!(
            (of_tor.to_string(), SwitchPort::from(3).to_string()),
            ("tor1/3".into(), "3".into())
        );
        for bad in
            ["", "p", "pp3", "3p", "+3", "p+3", "-1", "65536", "eth3", "/3", "a/", "a b/3", "a/b/3"]
        {
            assert_eq!(
                bad.parse::<SwitchPort>(),
                Err(EnvironmentError::SwitchPort(bad.to_owned()))
            );
        }
    }

    #[test]
    fn a_controller_has_an_address_and_perhaps_a_scheme() {
        let address = "[fd00:bb::1]:7700".parse().expect("an address");
        for text in ["[fd00:bb::1]:7700", "http://[fd00:bb::1]:7700", "https://[fd00:bb::1]:7700/"]
        {
            assert_eq!(parse_controller(text), Ok(address), "{text}");
        }
        for bad in ["", "http://", "fd00:bb::1", "ftp://[fd00:bb::1]:7700", "[fd00:bb::1]"] {
            assert_eq!(parse_controller(bad), Err(EnvironmentError::Controller(bad.to_owned())));
        }
    }
}
