//! Settings under `/proc/sys/net`, which show the namespace of the thread that opens the file.

use std::fs;
use std::path::{Path, PathBuf};

use super::NetworkError;

/// The IPv6 settings of an interface that a rack changes (kernel documentation, ip-sysctl).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6Setting {
    /// Duplicate address detection: a delay of a second that a rack's fixed addresses do not need.
    AcceptDad,
    /// Router advertisements: a fabric has no routers.
    AcceptRa,
    /// Whether the interface has no IPv6 at all.
    DisableIpv6,
    /// How many router solicitations are sent.
    RouterSolicitations,
}

impl Ipv6Setting {
    fn file(self) -> &'static str {
        match self {
            Self::AcceptDad => "accept_dad",
            Self::AcceptRa => "accept_ra",
            Self::DisableIpv6 => "disable_ipv6",
            Self::RouterSolicitations => "router_solicitations",
        }
    }

    fn path(self, interface: &str) -> PathBuf {
        Path::new("/proc/sys/net/ipv6/conf").join(interface).join(self.file())
    }
}

/// Sets an IPv6 setting of an interface, or of `all` or `default`.
pub fn set_interface_setting(
    interface: &str,
    setting: Ipv6Setting,
    value: u32,
) -> Result<(), NetworkError> {
    write(&setting.path(interface), value)
}

/// Reads an IPv6 setting of an interface, or of `all` or `default`.
pub fn interface_setting(interface: &str, setting: Ipv6Setting) -> Result<u32, NetworkError> {
    read(&setting.path(interface))
}

pub(super) fn write(path: &Path, value: u32) -> Result<(), NetworkError> {
    fs::write(path, value.to_string())
        .map_err(|source| NetworkError::Sysctl { path: path.to_owned(), source })
}

pub(super) fn read(path: &Path) -> Result<u32, NetworkError> {
    let failed = |source| NetworkError::Sysctl { path: path.to_owned(), source };
    let text = fs::read_to_string(path).map_err(failed)?;
    text.trim().parse().map_err(|error| failed(std::io::Error::other(error)))
}
