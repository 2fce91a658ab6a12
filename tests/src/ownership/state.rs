//! The state of the modelled rack.

/// The value that a thread's task leaves in the page: unique, never 0.
pub(super) type Value = u8;

/// The low four bits count the grants of one incarnation of the home, which is in the others.
pub(super) type Epoch = u8;

/// How a lease ended.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum End {
    /// Its owner sent an ABORT.
    Aborted,
    /// Its owner sent a COMMIT.
    Committed,
    /// A newer incarnation of the owner opened a session.
    Superseded,
    /// It expired.
    RanOut,
    /// The home does not know.
    Unknown,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Operation {
    Abort { epoch: Epoch },
    Add,
    Commit { epoch: Epoch, base: Value },
    Read,
    Renew { epoch: Epoch },
    StaleRead,
    Update,
}

impl Operation {
    /// Whether a second execution would have an effect.
    pub(super) const fn is_mutating(self) -> bool {
        !matches!(self, Self::Read | Self::StaleRead | Self::Update)
    }
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Request {
    pub(super) thread: u8,
    /// The endpoint's incarnation.
    pub(super) life: u8,
    /// The incarnation of the home in which the session was opened.
    pub(super) session: u8,
    pub(super) sequence: u8,
    pub(super) home_bit: bool,
    pub(super) value: Value,
    pub(super) operation: Operation,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Response {
    Busy { queued: bool },
    Done,
    Granted { epoch: Epoch, value: Value, remaining: u8 },
    LeaseLost(End),
    NoSession,
    NotOwner,
    Read { value: Value, stale: bool },
    Renewed { remaining: u8 },
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Reply {
    pub(super) thread: u8,
    pub(super) life: u8,
    pub(super) session: u8,
    pub(super) sequence: u8,
    pub(super) from_home: bool,
    /// The home bit of the request: it identifies the try.
    pub(super) home_bit: bool,
    pub(super) response: Response,
}

/// The part of a reply that the controller receives.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Copy {
    pub(super) epoch: Epoch,
    pub(super) owner: u8,
    pub(super) until: u8,
    pub(super) releases: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Message {
    Copy(Copy),
    Reply(Reply),
    Request(Request),
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Lease {
    pub(super) owner: u8,
    pub(super) life: u8,
    pub(super) epoch: Epoch,
    pub(super) deadline: u8,
    pub(super) contended: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Record {
    Response(Response),
    Grant(Epoch),
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Session {
    pub(super) life: u8,
    /// Low water: the highest number received, because a thread has one request at a time.
    pub(super) low: u8,
    pub(super) record: Option<Record>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Waiter {
    pub(super) request: Request,
    /// The tick after which it is removed unless it is repeated.
    pub(super) until: u8,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Home {
    pub(super) life: u8,
    pub(super) value: Value,
    pub(super) lease: Option<Lease>,
    pub(super) grants: u8,
    /// The previous lease, without its deadline.
    pub(super) last: Option<(Lease, End)>,
    pub(super) sessions: Vec<Option<Session>>,
    pub(super) queue: Vec<Waiter>,
    /// The highest incarnation seen of each endpoint.
    pub(super) lives: Vec<u8>,
}

/// A lease in its owner's view.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Held {
    pub(super) epoch: Epoch,
    pub(super) base: Value,
    /// By the endpoint's clock.
    pub(super) expires: u8,
    pub(super) renewed: bool,
}

/// A request that a thread waits for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Call {
    pub(super) operation: Operation,
    pub(super) home_bit: bool,
    pub(super) tries: u8,
    /// When it was first sent under this number, by the endpoint's clock.
    pub(super) sent: u8,
    /// The lease that a RENEW extends.
    pub(super) held: Option<Held>,
    /// The position in the order of changes that a value must have at least reached.
    pub(super) floor: u8,
    /// Tries that a wrong redirect cost.
    pub(super) bounces: u8,
    /// The same for requests with the home bit.
    pub(super) home_bounces: u8,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Doing {
    Holding(Held),
    Nothing,
    Waiting(Call),
}

/// How a task ended for its thread.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Outcome {
    /// The lease was ended without a change.
    Aborted,
    /// The page stayed leased to another.
    Busy,
    /// The process crashed.
    Crashed,
    /// Changed.
    Done,
    /// The lease ended before; nothing was changed.
    LeaseLost,
    /// No response; the page cannot have been changed.
    NoResponse,
    /// Read this value.
    Read(u8),
    /// No response; the page may have been changed.
    Unknown,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Thread {
    pub(super) session: Option<u8>,
    pub(super) sequence: u8,
    pub(super) doing: Doing,
    pub(super) outcomes: Vec<Outcome>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Endpoint {
    pub(super) life: u8,
    /// What its clock shows, if it stands still.
    pub(super) frozen: Option<u8>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Redirect {
    pub(super) owner: u8,
    pub(super) epoch: Epoch,
    pub(super) until: u8,
}

/// The remaining faults.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Budget {
    pub(super) duplicates: u8,
    pub(super) losses: u8,
    pub(super) client_crashes: u8,
    pub(super) home_crashes: u8,
    pub(super) network_crashes: u8,
    pub(super) freezes: u8,
    pub(super) false_hints: u8,
}

/// The global history, which no part of the rack knows; the properties use it.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Witness {
    /// The tasks that changed the page, in order.
    pub(super) changes: Vec<Value>,
    /// The latest position in that order that a client has observed.
    pub(super) floor: u8,
    pub(super) last_epoch: Epoch,
    pub(super) lost_update: bool,
    pub(super) repeated_epoch: bool,
    pub(super) stale_read: bool,
}

/// The modelled rack.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ModelRack {
    pub(super) now: u8,
    pub(super) home: Home,
    pub(super) ends: Vec<Endpoint>,
    pub(super) threads: Vec<Thread>,
    pub(super) redirect: Option<Redirect>,
    /// The highest epoch that the controller knows.
    pub(super) known_epoch: Epoch,
    /// Messages in flight: sorted, without duplicates.
    pub(super) messages: Vec<Message>,
    pub(super) budget: Budget,
    pub(super) witness: Witness,
}

impl ModelRack {
    pub(super) fn send(&mut self, message: Message) {
        if let Err(place) = self.messages.binary_search(&message) {
            self.messages.insert(place, message);
        }
    }

    pub(super) fn is_in_flight(&self, message: &Message) -> bool {
        self.messages.binary_search(message).is_ok()
    }

    /// The time of an endpoint's clock.
    pub(super) fn local(&self, end: u8) -> u8 {
        self.ends[usize::from(end)].frozen.unwrap_or(self.now)
    }

    /// The position of a value in the order of changes; `None` if the page never had it.
    pub(super) fn place(&self, value: Value) -> Option<u8> {
        if value == 0 {
            return Some(0);
        }
        let at = self.witness.changes.iter().position(|change| *change == value)?;
        u8::try_from(at + 1).ok()
    }
}
