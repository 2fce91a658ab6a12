//! Options of an update.

use core::time::Duration;

use crate::service::OwnerPolicy;

/// Options of an update.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UpdateOptions {
    /// The requested duration of the lease, up to 65 s, rounded up to a millisecond; `None`: the server's
    /// default (1 s). The server may grant less (at most 10 s by default).
    pub lease: Option<Duration>,
    /// How the service thread responds to requests of others that the switch redirects here.
    pub owner_policy: OwnerPolicy,
    /// For how long after the UPDATE the service thread renews the lease.
    pub renew_limit: Duration,
    /// Whether to wait, until the call's deadline, for a lease of another holder.
    pub wait: bool,
}

impl Default for UpdateOptions {
    fn default() -> Self {
        Self {
            lease: None,
            owner_policy: OwnerPolicy::default(),
            renew_limit: Duration::from_secs(30),
            wait: true,
        }
    }
}

impl UpdateOptions {
    /// The duration as it is sent, in milliseconds; 0 is the server's default.
    pub(super) fn lease_ms(&self) -> u16 {
        let Some(lease) = self.lease else { return 0 };
        let milliseconds = lease.as_nanos().div_ceil(1_000_000).max(1);
        u16::try_from(milliseconds).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_travels_in_milliseconds() {
        let of = |lease| UpdateOptions { lease, ..UpdateOptions::default() }.lease_ms();
        assert_eq!(of(None), 0);
        assert_eq!(of(Some(Duration::ZERO)), 1, "0 would be the server's default");
        assert_eq!(of(Some(Duration::from_micros(1500))), 2);
        assert_eq!(of(Some(Duration::from_secs(100))), u16::MAX);
    }
}
