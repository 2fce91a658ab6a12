//! Which copies of replies are accepted (docs/protocol.md, section 10, "Redirects"), and how the others are
//! counted.

use bluebridge_p4::pipeline::{SwitchPort, Ternary};
use bluebridge_wire::{Command, NodeId, ReplyCopy, Space, Status, WireCommand};

use crate::core::{Attached, Endpoints, NotifyRule, Role};

/// Which leased pages are redirected to the owners of their leases.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RedirectPolicy {
    /// Every leased page.
    Always,
    /// Contended pages, as reported by their home.
    #[default]
    Contended,
    /// None.
    Off,
}

impl RedirectPolicy {
    /// The policy with a name: `always`, `contended` or `off`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Always, Self::Contended, Self::Off].into_iter().find(|policy| policy.name() == name)
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Contended => "contended",
            Self::Off => "off",
        }
    }

    /// The copies that the switch must make.
    pub(crate) fn notify_rules(self) -> Vec<NotifyRule> {
        const EITHER_FORM: u8 = !WireCommand::CONTENDED;
        let both = WireCommand::REPLY | WireCommand::CONTENDED;
        let contended = NotifyRule {
            src_command: Ternary { value: both, mask: both },
            ..NotifyRule::default()
        };
        let done = |command| NotifyRule {
            src_command: Ternary { value: WireCommand::reply(command).bits(), mask: EITHER_FORM },
            src_status: Ternary { value: Status::Ok.code(), mask: u8::MAX },
            ..NotifyRule::default()
        };
        match self {
            Self::Off => Vec::new(),
            Self::Contended => vec![contended],
            Self::Always => {
                let commands = [Command::Update, Command::Commit, Command::Abort, Command::Renew];
                std::iter::once(contended).chain(commands.map(done)).collect()
            }
        }
    }
}

/// Why a copy was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(usize)]
pub enum Refusal {
    /// There are as many redirects as the budget allows.
    BudgetFull,
    /// The lease that it reports had no time left.
    Ended,
    /// The limit of tracked leases is reached.
    KnownFull,
    /// It is not a reply, or cannot be parsed.
    Malformed,
    /// Its source does not serve the page.
    NotServing,
    /// Redirects are switched off.
    Off,
    /// A newer lease of the page is known, or this one was released.
    StaleEpoch,
    /// The owner is not an attached client of the space.
    UnknownOwner,
    /// It is not about a lease.
    Unrelated,
    /// It came in by another port than that of its source node.
    WrongPort,
}

impl Refusal {
    /// Every reason.
    pub const ALL: [Self; 10] = [
        Self::BudgetFull,
        Self::Ended,
        Self::KnownFull,
        Self::Malformed,
        Self::NotServing,
        Self::Off,
        Self::StaleEpoch,
        Self::UnknownOwner,
        Self::Unrelated,
        Self::WrongPort,
    ];

    /// Its name in a status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BudgetFull => "budget_full",
            Self::Ended => "ended",
            Self::KnownFull => "known_full",
            Self::Malformed => "malformed",
            Self::NotServing => "not_serving",
            Self::Off => "off",
            Self::StaleEpoch => "stale_epoch",
            Self::UnknownOwner => "unknown_owner",
            Self::Unrelated => "unrelated",
            Self::WrongPort => "wrong_port",
        }
    }
}

/// The event of a page's lease that a copy reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LeaseEvent {
    /// It is held, as reported by the grant itself or by a BUSY.
    Granted,
    /// It was extended; this applies to the rest of the line too.
    Renewed,
    /// It was released.
    Released,
}

impl LeaseEvent {
    /// The event that a reply reports, if any.
    pub(super) const fn of(reply: &ReplyCopy) -> Result<Self, Refusal> {
        match (reply.command, reply.status) {
            (Command::Update, Status::Ok) | (_, Status::Busy) => Ok(Self::Granted),
            (Command::Renew, Status::Ok) => Ok(Self::Renewed),
            (Command::Commit | Command::Abort, Status::Ok) => Ok(Self::Released),
            _ => Err(Refusal::Unrelated),
        }
    }
}

/// The node that serves the page of a reply; it must be the reply's source.
pub(super) fn serving(
    endpoints: &Endpoints,
    port: SwitchPort,
    reply: &ReplyCopy,
) -> Result<Attached, Refusal> {
    // A range is served by its home; migrated ranges will be added together with migration.
    let home = endpoints
        .get(&reply.from.node)
        .filter(|_| reply.from.node == reply.target.node)
        .filter(|home| home.role == Role::Memory && home.space == reply.from.space)
        .filter(|home| {
            let (first, last) = home.generations;
            (first..=last).contains(&generation(reply.target.location))
        })
        .ok_or(Refusal::NotServing)?;
    if home.forward.port != port {
        return Err(Refusal::WrongPort);
    }
    Ok(*home)
}

/// A client of a space.
pub(super) fn client(endpoints: &Endpoints, space: Space, node: NodeId) -> Option<&Attached> {
    endpoints.get(&node).filter(|owner| owner.role == Role::Client && owner.space == space)
}

/// The arena generation of a location with bit 63 clear.
const fn generation(location: u64) -> u16 {
    let [high, low, ..] = location.to_be_bytes();
    u16::from_be_bytes([high, low])
}
