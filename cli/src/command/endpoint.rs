//! The options that describe an endpoint.

use std::net::SocketAddr;

use bluebridge_northbound::environment::{
    CONTROLLER_VARIABLE, FRAMES_VARIABLE, INTERFACE_VARIABLE, NAME_VARIABLE, SPACE_VARIABLE,
    SWITCH_PORT_VARIABLE, SwitchPort, parse_controller,
};
use bluebridge_transport::udp::Frames;
use clap::Args;

use super::trust::Trust;

/// Parses the name of an endpoint.
pub(super) fn parse_name(text: &str) -> Result<String, String> {
    if bluebridge_northbound::is_name(text) {
        return Ok(text.to_owned());
    }
    Err("a name has 1 to 64 letters, digits, '.', '_' and '-'".to_owned())
}

/// The endpoint of a process. Inside a rack, all values are in the environment.
#[derive(Clone, Debug, Args)]
pub(super) struct Endpoint {
    /// The endpoint's name; the same name is the same node again, unless it joined in another space meanwhile
    #[arg(long, env = NAME_VARIABLE, value_parser = parse_name)]
    pub(super) name: String,
    /// The interface that leads to the switch; see `bluebridge host up`
    #[arg(long, env = INTERFACE_VARIABLE, value_name = "NAME")]
    pub(super) interface: String,
    /// The switch's port to which this interface is connected, such as 3 or p3; tor1/3 if there are several switches
    #[arg(long, env = SWITCH_PORT_VARIABLE, value_name = "[SWITCH/]PORT")]
    pub(super) switch_port: SwitchPort,
    /// The address of the controller, with or without http://
    #[arg(long, env = CONTROLLER_VARIABLE, value_name = "ADDRESS", value_parser = parse_controller)]
    pub(super) controller: SocketAddr,
    /// The space (tenant) to join
    #[arg(long, env = SPACE_VARIABLE, value_name = "N", default_value_t = 1)]
    pub(super) space: u16,
    /// Send datagrams as frames, past the host's routes: takes half the time, and needs CAP_NET_RAW. With `auto` the
    /// UDP socket sends where that is not possible
    #[arg(long, env = FRAMES_VARIABLE, value_name = "auto|on|off", default_value_t)]
    pub(super) frames: Frames,
    #[command(flatten)]
    pub(super) trust: Trust,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        endpoint: Endpoint,
    }

    fn endpoint(port: &str, controller: &str) -> Result<Endpoint, clap::Error> {
        let who = ["memserver", "--name", "s1", "--interface", "bb0"];
        let place = ["--switch-port", port, "--controller", controller];
        Line::try_parse_from(who.into_iter().chain(place)).map(|line| line.endpoint)
    }

    #[test]
    fn a_port_may_have_its_letter_and_a_controller_its_scheme() {
        for (port, controller) in [("3", "[fd00:bb::1]:7700"), ("p3", "http://[fd00:bb::1]:7700")] {
            let endpoint = endpoint(port, controller).expect("both are understood");
            assert_eq!(endpoint.switch_port, 3.into());
            assert_eq!(endpoint.controller.to_string(), "[fd00:bb::1]:7700");
        }
        let error = endpoint("eth3", "[fd00:bb::1]:7700").expect_err("an interface is no port");
        assert!(error.to_string().contains("write a number such as 3, or p3"), "{error}");
    }
}
