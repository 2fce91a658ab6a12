//! How a client joins.

use std::{env, ffi::OsString};

use bluebridge_northbound::{
    Attachment, Options,
    environment::{
        CONTROLLER_VARIABLE, EnvironmentError, FRAMES_VARIABLE, INTERFACE_VARIABLE, NAME_VARIABLE,
        SPACE_VARIABLE, SWITCH_PORT_VARIABLE, SwitchPort, TLS_ROOT_VARIABLE,
    },
};
use bluebridge_transport::udp::{UdpConfig, UdpTransport};
use bluebridge_wire::{NodeId, Space};

use super::JoinError;
use crate::{Client, EndpointConfig};

/// When an endpoint's service thread starts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ServiceStart {
    /// Before the client joins. That fails if another process has the fabric's port on the interface:
    /// then that process is the endpoint, and joining would expel it. (A client whose own socket has the
    /// fabric's port keeps others out by that, and its service starts on need.)
    #[default]
    AtOnce,
    /// With the first update or subscription. Until then another process can take the endpoint over by
    /// joining under the same name.
    OnNeed,
}

/// How a client joins.
///
/// [`JoinOptions::named`] and what follows describe the endpoint; [`JoinOptions::from_env`] takes that
/// from the environment, as `bluebridge rack exec` sets it.
///
/// ```no_run
/// use bluebridge::{Client, JoinOptions, Space};
///
/// # fn main() -> Result<(), bluebridge::JoinError> {
/// let options = JoinOptions::named("worker-7").space(Space(2)).interface("eth0").switch_port(4);
/// let client = Client::join("[fd00:bb::1]:7700", options)?;
/// let other = JoinOptions::from_env()?.join()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The endpoint's name; joining again under the same name gives the same node.
    pub name: String,
    /// The tenant.
    pub space: Space,
    /// Where the controller listens, for [`JoinOptions::join`].
    pub controller: Option<String>,
    /// The local interface that is connected to the switch.
    pub interface: String,
    /// The name of the switch to which that interface is connected; may be empty if there is only one.
    pub switch: String,
    /// The switch's port to which it is connected.
    pub attachment: Attachment,
    /// Deadlines and encryption of the membership.
    pub membership: Options,
    /// The UDP socket; its device is the interface unless it names one.
    pub carrier: UdpConfig,
    /// When the endpoint's service thread starts.
    pub service: ServiceStart,
    /// Whether servers are to send notices of memory that is created, freed or zeroed ([`Client::notices`]);
    /// they do so once they learned of this request, a heartbeat later.
    pub notices: bool,
    /// All other settings of the client; its identity and the list of nodes come from the controller.
    pub behaviour: EndpointConfig,
}

/// [`JoinOptions`] do not say which endpoint joins which rack; the caller or the environment is at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A file that a variable names cannot be read.
    #[error("cannot read {path}, which {variable} names: {error}")]
    File {
        /// The variable.
        variable: &'static str,
        /// The file.
        path: String,
        /// The system's error.
        #[source]
        error: std::io::Error,
    },
    /// A required option is missing.
    #[error("{what} is missing; set the option, or the variable {variable}")]
    Missing {
        /// The option.
        what: &'static str,
        /// The environment variable that sets it.
        variable: &'static str,
    },
    /// The environment asks for TLS, which this build cannot do.
    #[error(
        "{TLS_ROOT_VARIABLE} asks for TLS, which is not built in; build with the feature `tls`, or unset it"
    )]
    NoTls,
    /// The files that the environment names cannot be used for TLS.
    #[cfg(feature = "tls")]
    #[error("{TLS_ROOT_VARIABLE} asks for TLS: {0}")]
    Tls(#[from] bluebridge_northbound::tls::TlsFileError),
    /// A variable's value is invalid.
    #[error("the variable {variable} is invalid: {reason}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// What is wrong with its value.
        reason: String,
    },
}

impl JoinOptions {
    /// Default options for an endpoint of that name in space 1; interface and switch port must still be set.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        let space = Space(1);
        Self {
            name: name.into(),
            space,
            controller: None,
            interface: String::new(),
            switch: String::new(),
            attachment: Attachment::Interface(String::new()),
            membership: Options::default(),
            carrier: UdpConfig::default(),
            service: ServiceStart::default(),
            notices: false,
            behaviour: EndpointConfig::new(space, NodeId::ANY, 0),
        }
    }

    /// Options from the environment: `BLUEBRIDGE_NAME`, `BLUEBRIDGE_INTERFACE`, `BLUEBRIDGE_SWITCH_PORT`
    /// (`3` or `p3`, or `tor1/3` if there are several switches), `BLUEBRIDGE_CONTROLLER` (with or without `http://`), and, if it is not 1,
    /// `BLUEBRIDGE_SPACE`; `BLUEBRIDGE_FRAMES` (`auto`, `on` or `off`) says whether datagrams are sent as frames
    /// ([`Frames`](crate::transport::udp::Frames)).
    ///
    /// Joining is by TLS if `BLUEBRIDGE_TLS_ROOT` names the controller's root, with
    /// `BLUEBRIDGE_TLS_NAME`, `BLUEBRIDGE_TLS_CERTIFICATE` and `BLUEBRIDGE_TLS_KEY` as the command line
    /// knows them.
    ///
    /// # Errors
    /// [`OptionsError`], which names the variable.
    pub fn from_env() -> Result<Self, OptionsError> {
        Self::from_variables(|name| env::var_os(name))
    }

    /// [`JoinOptions::from_env`] with another environment than this process's.
    ///
    /// # Errors
    /// [`OptionsError`], which names the variable.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, OptionsError> {
        let optional = |name: &'static str| match variable(name).filter(|text| !text.is_empty()) {
            None => Ok(None),
            Some(text) => text.into_string().map(Some).map_err(|_| OptionsError::Value {
                variable: name,
                reason: "it is not UTF-8".to_owned(),
            }),
        };
        let needed = |variable: &'static str, what: &'static str| {
            optional(variable)?.ok_or(OptionsError::Missing { what, variable })
        };
        let wrong =
            |variable: &'static str, reason: String| OptionsError::Value { variable, reason };
        let port = needed(SWITCH_PORT_VARIABLE, "the switch's port")?.parse();
        let SwitchPort { switch, number } =
            port.map_err(|error: EnvironmentError| wrong(SWITCH_PORT_VARIABLE, error.to_string()))?;
        let mut options = Self::named(needed(NAME_VARIABLE, "the endpoint's name")?)
            .interface(needed(INTERFACE_VARIABLE, "the interface that leads to the switch")?)
            .switch(switch)
            .switch_port(number);
        options.controller = Some(needed(CONTROLLER_VARIABLE, "the controller's address")?);
        if let Some(space) = optional(SPACE_VARIABLE)? {
            let number = space.parse().map(Space);
            let number = number
                .map_err(|_| wrong(SPACE_VARIABLE, format!("{space:?} is no number of a space")))?;
            options = options.space(number);
        }
        if let Some(frames) = optional(FRAMES_VARIABLE)? {
            options.carrier.frames =
                frames.parse().map_err(|reason| wrong(FRAMES_VARIABLE, reason))?;
        }
        if let Some(root) = optional(TLS_ROOT_VARIABLE)? {
            options.trust(&root, &optional)?;
        }
        Ok(options)
    }

    /// The tenant.
    #[must_use]
    pub fn space(mut self, space: Space) -> Self {
        self.space = space;
        self.behaviour.space = space;
        self
    }

    /// The local interface that is connected to the switch.
    #[must_use]
    pub fn interface(mut self, name: impl Into<String>) -> Self {
        self.interface = name.into();
        self
    }

    /// The name of the switch that the interface is connected to, if there are several.
    #[must_use]
    pub fn switch(mut self, name: impl Into<String>) -> Self {
        self.switch = name.into();
        self
    }

    /// The number of the switch's port that the interface is connected to.
    #[must_use]
    pub fn switch_port(mut self, number: u16) -> Self {
        self.attachment = Attachment::Port(number);
        self
    }

    /// The name of the switch's interface that the interface is connected to; the controller looks it
    /// up.
    #[must_use]
    pub fn switch_interface(mut self, name: impl Into<String>) -> Self {
        self.attachment = Attachment::Interface(name.into());
        self
    }

    /// Waits in [`Client::join`] for as long as no controller responds, with pauses of up to a second, and
    /// logs a warning once: for programs that may be started before the controller. Without this, joining
    /// ends after [`crate::membership::Options::join_deadline`].
    #[must_use]
    pub const fn wait_for_controller(mut self) -> Self {
        self.membership.wait_for_controller = true;
        self
    }

    /// [`Client::join`] with the controller that the options name.
    ///
    /// # Errors
    /// [`JoinError`]; nothing keeps running.
    pub fn join(self) -> Result<Client<UdpTransport>, JoinError> {
        let missing = OptionsError::Missing {
            what: "the controller's address",
            variable: CONTROLLER_VARIABLE,
        };
        let controller = self.controller.clone().ok_or(missing)?;
        Client::join(&controller, self)
    }

    /// Checks that every option without a default is set.
    pub(super) fn check(&self) -> Result<(), OptionsError> {
        let is_attached = match &self.attachment {
            Attachment::Interface(name) => !name.is_empty(),
            Attachment::Port(_) => true,
        };
        for (is_said, what, variable) in [
            (!self.name.is_empty(), "the endpoint's name", NAME_VARIABLE),
            (
                !self.interface.is_empty(),
                "the interface that leads to the switch",
                INTERFACE_VARIABLE,
            ),
            (is_attached, "the switch's port", SWITCH_PORT_VARIABLE),
        ] {
            if !is_said {
                return Err(OptionsError::Missing { what, variable });
            }
        }
        Ok(())
    }

    /// The controller's address as gRPC expects it.
    pub(super) fn uri(&self, controller: &str) -> String {
        #[cfg(feature = "tls")]
        let scheme = if self.membership.tls.is_some() { "https" } else { "http" };
        #[cfg(not(feature = "tls"))]
        let scheme = "http";
        // A scheme that is given counts, also one that the membership refuses.
        if controller.contains("://") {
            controller.to_owned()
        } else {
            format!("{scheme}://{}", controller.trim())
        }
    }

    #[cfg(not(feature = "tls"))]
    #[allow(clippy::unused_self, clippy::needless_pass_by_ref_mut, reason = "as with TLS")]
    fn trust(
        &mut self,
        _root: &str,
        _optional: &impl Fn(&'static str) -> Result<Option<String>, OptionsError>,
    ) -> Result<(), OptionsError> {
        Err(OptionsError::NoTls)
    }

    /// Joins by TLS.
    #[cfg(feature = "tls")]
    fn trust(
        &mut self,
        root: &str,
        optional: &impl Fn(&'static str) -> Result<Option<String>, OptionsError>,
    ) -> Result<(), OptionsError> {
        use std::path::Path;

        use bluebridge_northbound::environment::{
            TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE, TLS_NAME_VARIABLE, parse_controller,
            without_scheme,
        };
        use bluebridge_northbound::tls::{EndpointFiles, TlsFileError};
        let (certificate, key) =
            match (optional(TLS_CERTIFICATE_VARIABLE)?, optional(TLS_KEY_VARIABLE)?) {
                (Some(_), None) => {
                    let what = "the private key of the endpoint's certificate";
                    return Err(OptionsError::Missing { what, variable: TLS_KEY_VARIABLE });
                }
                (None, Some(_)) => {
                    let what = "the endpoint's certificate";
                    return Err(OptionsError::Missing { what, variable: TLS_CERTIFICATE_VARIABLE });
                }
                both => both,
            };
        let address = self.controller.as_deref().map(parse_controller);
        let address = address.and_then(Result::ok).map(|address| address.ip().to_string());
        let name = optional(TLS_NAME_VARIABLE)?.or(address);
        let identity = certificate.as_deref().map(Path::new).zip(key.as_deref().map(Path::new));
        let files = EndpointFiles { root: Path::new(root), identity };
        let tls = files.config(name.as_deref()).map_err(|error| match error {
            TlsFileError::Read { path, source } => {
                let path = path.to_string_lossy().into_owned();
                let variable = if Some(&path) == certificate.as_ref() {
                    TLS_CERTIFICATE_VARIABLE
                } else if Some(&path) == key.as_ref() {
                    TLS_KEY_VARIABLE
                } else {
                    TLS_ROOT_VARIABLE
                };
                OptionsError::File { variable, path, error: source }
            }
            other => other.into(),
        })?;
        self.membership.tls = Some(tls);
        self.controller = self.controller.take().map(|text| {
            // Never without encryption, whatever scheme the variable has.
            format!("https://{}", without_scheme(&text))
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> Result<JoinOptions, OptionsError> {
        JoinOptions::from_variables(|name| {
            let mut found = variables.iter().filter(|(other, _)| *other == name);
            found.next().map(|(_, value)| OsString::from(value))
        })
    }

    const RACK: [(&str, &str); 4] = [
        ("BLUEBRIDGE_NAME", "c1"),
        ("BLUEBRIDGE_INTERFACE", "bb0"),
        ("BLUEBRIDGE_SWITCH_PORT", "3"),
        ("BLUEBRIDGE_CONTROLLER", "[fd00:bb::1]:7700"),
    ];

    #[test]
    fn the_environment_describes_an_endpoint() {
        for (port, controller, space) in [
            ("3", "[fd00:bb::1]:7700", None),
            ("p3", "http://[fd00:bb::1]:7700", Some("7")),
            ("3", "http://[fd00:bb::1]:7700/", Some("")),
        ] {
            let mut variables = RACK.to_vec();
            variables[2].1 = port;
            variables[3].1 = controller;
            variables.extend(space.map(|space| ("BLUEBRIDGE_SPACE", space)));
            let options = options(&variables).expect("all is said");
            assert_eq!((options.name.as_str(), options.interface.as_str()), ("c1", "bb0"));
            assert_eq!((options.switch.as_str(), &options.attachment), ("", &Attachment::Port(3)));
            let space = Space(if space == Some("7") { 7 } else { 1 });
            assert_eq!((options.space, options.behaviour.space), (space, space));
            let controller = options.controller.clone().expect("it is said");
            assert_eq!(options.uri(&controller).trim_end_matches('/'), "http://[fd00:bb::1]:7700");
            options.check().expect("all is said");
        }
        let mut variables = RACK.to_vec();
        variables[2].1 = "tor1/p3";
        let options = options(&variables).expect("all is said");
        assert_eq!((options.switch.as_str(), options.attachment), ("tor1", Attachment::Port(3)));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named_by_its_variable() {
        for (at, (name, _)) in RACK.iter().enumerate() {
            let mut variables = RACK.to_vec();
            variables.remove(at);
            let error = options(&variables).expect_err("something is missing");
            assert!(matches!(error, OptionsError::Missing { variable, .. } if variable == *name));
            assert!(error.to_string().contains(name), "{error}");
        }
        let mut variables = RACK.to_vec();
        variables[2].1 = "eth3";
        variables.push(("BLUEBRIDGE_SPACE", "65536"));
        for name in ["BLUEBRIDGE_SWITCH_PORT", "BLUEBRIDGE_SPACE"] {
            let error = options(&variables).expect_err("it is no number");
            assert!(matches!(error, OptionsError::Value { variable, .. } if variable == name));
            variables[2].1 = "3";
        }
        let unattached = JoinOptions::named("c1").interface("bb0");
        let error = Client::join("[::1]:1", unattached).map(drop).expect_err("which port?");
        assert!(matches!(error, JoinError::Options(OptionsError::Missing { .. })), "{error}");
        let aimless = JoinOptions::named("c1").interface("bb0").switch_port(1);
        let error = aimless.join().map(drop).expect_err("which controller?");
        assert!(error.to_string().contains("BLUEBRIDGE_CONTROLLER"), "{error}");
    }

    #[test]
    fn tls_is_never_left_out_in_silence() {
        let mut variables = RACK.to_vec();
        variables.push(("BLUEBRIDGE_TLS_ROOT", "/no/such/root.pem"));
        let error = options(&variables).expect_err("there is no such file");
        let is_told = match error {
            OptionsError::NoTls => cfg!(not(feature = "tls")),
            OptionsError::File { .. } => cfg!(feature = "tls"),
            _ => false,
        };
        assert!(is_told, "{error}");
    }

    #[test]
    fn a_scheme_that_is_given_counts() {
        let options = JoinOptions::named("c1");
        for uri in ["http://[::1]:1", "https://[::1]:1", "ftp://[::1]:1"] {
            assert_eq!(options.uri(uri), uri);
        }
        assert_eq!(options.uri("controller.example:7700"), "http://controller.example:7700");
    }
}
