//! How an update is made.

use core::time::Duration;

use crate::service::OwnerPolicy;

/// How an update is made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UpdateOptions {
    /// How long the lease is to be, up to 65 s, rounded up to a millisecond; `None`: what the server
    /// gives by itself (1 s). The server may grant less (at most 10 s by default).
    pub lease: Option<Duration>,
    /// What the service thread answers others who are sent here by the switch.
    pub owner_policy: OwnerPolicy,
    /// For how long after the UPDATE the service thread renews the lease.
    pub renew_limit: Duration,
    /// Whether to wait, until the call's deadline, for a lease that another has.
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
    /// As it travels; 0 is the server's default.
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
