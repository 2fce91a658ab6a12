//! The parameters that a seed determines: the number of endpoints, the quality of the links, the
//! faults.

use core::time::Duration;

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::bugs::Bug;

/// A link's impairments: shares of frames, and times.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkPlan {
    /// Share lost.
    pub loss: f64,
    /// Share that arrives twice.
    pub duplicate: f64,
    /// Share held back, so that others overtake it.
    pub reorder: f64,
    /// Share with one to three flipped bits.
    pub corrupt: f64,
    /// Delay of every frame.
    pub delay: Duration,
    /// The most additional delay.
    pub jitter: Duration,
    /// The most additional delay of a frame that is held back.
    pub hold: Duration,
    /// If not 0, the switch's port impairs the downward direction, with this seed.
    pub switch_seed: u64,
}

impl LinkPlan {
    /// The link without its impairments.
    #[must_use]
    pub const fn clean(&self) -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: self.delay,
            jitter: Duration::ZERO,
            hold: Duration::ZERO,
            switch_seed: 0,
        }
    }
}

/// A fault, or an action of an operator.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The switch leads requests for a server's memory to another endpoint; those to the server's
    /// endpoint address arrive.
    Astray {
        /// Whose memory.
        server: usize,
        /// Where they arrive.
        endpoint: usize,
        /// How long.
        length: Duration,
    },
    /// The server has no authority for a while.
    Authority {
        /// Which server.
        server: usize,
        /// How long.
        length: Duration,
    },
    /// A client process is killed and starts again.
    ClientRestart {
        /// Which client.
        client: usize,
        /// Whether the old process still runs for a while.
        zombie: bool,
    },
    /// An endpoint pauses; arriving frames wait, up to a limit.
    Freeze {
        /// Which endpoint.
        endpoint: usize,
        /// How long.
        length: Duration,
    },
    /// A line of pages moves to another server; both servers are notified at once.
    Migrate,
    /// A line that moved moves back.
    MoveBack,
    /// A link drops all frames, in one direction or both.
    Partition {
        /// Whose link.
        endpoint: usize,
        /// Drops frames to the switch.
        up: bool,
        /// Drops frames from the switch.
        down: bool,
        /// How long.
        length: Duration,
    },
    /// A server process ends and starts again with the next incarnation.
    ServerRestart {
        /// Which server.
        server: usize,
        /// Whether it keeps its memory; else it uses the next arena generation.
        contents: bool,
        /// How long it is away.
        away: Duration,
    },
    /// The server stops in order: it responds SHUTTING_DOWN, and then restarts without contents.
    ServerShutdown {
        /// Which server.
        server: usize,
    },
    /// The switch restarts without state.
    SwitchRestart {
        /// Until the controller has programmed it again.
        away: Duration,
    },
    /// The switch's tables are emptied.
    SwitchWipe {
        /// Until the controller has programmed it again.
        away: Duration,
    },
}

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed of all random numbers.
    pub seed: u64,
    /// Operations that clients start, without the final checks.
    pub operation_count: usize,
    /// The most outstanding operations of a client.
    pub depth: usize,
    /// The piece size of each client, from the MTU of its space.
    pub client_piece_bytes: Vec<u16>,
    /// The piece size of each server.
    pub server_piece_bytes: Vec<u16>,
    /// Pages of each server's arena.
    pub arena_pages: Vec<u64>,
    /// Pages that a space may have on each server.
    pub quota_pages: Option<u64>,
    /// Servers that a requester keeps state of; if there are more, it evicts some.
    pub requester_servers: u16,
    /// Whether the servers' limits are as small as possible.
    pub tight_limits: bool,
    /// The idle time of sessions.
    pub session_idle: Duration,
    /// The time until unconfirmed pages are freed.
    pub provisional: Duration,
    /// A link per endpoint: clients, servers, prober.
    pub links: Vec<LinkPlan>,
    /// Parts per million that each endpoint's clock runs fast.
    pub skew_ppm: Vec<i64>,
    /// The faults, each after so many started operations.
    pub faults: Vec<(usize, Fault)>,
    /// Share of operations that are cancelled soon after their start.
    pub cancel: f64,
    /// Share of datagrams that the client's carrier refuses to send.
    pub refuse: f64,
    /// Deadlines of operations.
    pub deadlines: (Duration, Duration),
    /// The bug that this run must find.
    pub bug: Option<Bug>,
}

/// Operations of a run.
pub const OPERATIONS: usize = 500;

/// Sizes of pieces: those of spaces, and others, because an endpoint may propose any.
const PIECE_BYTES: [u16; 6] = [1024, 1264, 1368, 2048, 4096, 4096];

impl Plan {
    /// The run of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let clients = rng.random_range(1..=4);
        let servers = rng.random_range(1..=3);
        let endpoints = clients + servers + 1;
        let one_size = *PIECE_BYTES.choose(&mut rng).expect("some");
        let mixed = rng.random_bool(0.3);
        let mut pieces =
            |count: usize| -> Vec<u16> {
                (0..count)
                    .map(|_| {
                        if mixed { *PIECE_BYTES.choose(&mut rng).expect("some") } else { one_size }
                    })
                    .collect()
            };
        let (client_piece_bytes, server_piece_bytes) = (pieces(clients), pieces(servers));
        let links = links(&mut rng, endpoints);
        let short = rng.random_bool(0.2);
        let forgetful = rng.random_bool(0.1);
        // To follow a moved line, a requester must have state of two servers.
        let moves = servers > 1 && !forgetful && rng.random_bool(0.4);
        Self {
            seed,
            operation_count: OPERATIONS,
            depth: *[1, 2, 4, 8, 16].choose(&mut rng).expect("some"),
            client_piece_bytes,
            server_piece_bytes,
            arena_pages: (0..servers).map(|_| rng.random_range(60..=200)).collect(),
            quota_pages: rng.random_bool(0.1).then(|| rng.random_range(40..=80)),
            requester_servers: if forgetful { 1 } else { 16 },
            // A requester that evicts servers leaves sessions behind, which need room.
            tight_limits: !forgetful && rng.random_bool(0.25),
            session_idle: if short { Duration::from_millis(40) } else { Duration::from_secs(60) },
            provisional: Duration::from_millis(if short { 100 } else { 2000 }),
            skew_ppm: (0..endpoints).map(|_| rng.random_range(-10_000..=10_000)).collect(),
            faults: faults(&mut rng, (seed, clients, servers), moves),
            links,
            cancel: if rng.random_bool(0.3) { 0.02 } else { 0.0 },
            refuse: if rng.random_bool(0.2) { 0.002 } else { 0.0 },
            deadlines: if rng.random_bool(0.3) {
                (Duration::from_millis(2), Duration::from_millis(80))
            } else {
                (Duration::from_millis(200), Duration::from_secs(4))
            },
            bug: None,
        }
    }

    /// Clients.
    #[must_use]
    pub const fn clients(&self) -> usize {
        self.client_piece_bytes.len()
    }

    /// Servers.
    #[must_use]
    pub const fn servers(&self) -> usize {
        self.server_piece_bytes.len()
    }
}

/// A third of the runs has good links, a third bad ones, a third very bad ones.
fn links(rng: &mut SmallRng, endpoints: usize) -> Vec<LinkPlan> {
    let most: f64 = *[0.0, 0.05, 0.25].choose(rng).expect("some");
    let at_switch = rng.random_bool(0.3);
    (0..endpoints)
        .map(|_| LinkPlan {
            loss: most * rng.random::<f64>(),
            duplicate: most * rng.random::<f64>(),
            reorder: most * rng.random::<f64>(),
            corrupt: most * rng.random::<f64>() / 2.0,
            delay: Duration::from_micros(rng.random_range(1..=200)),
            jitter: Duration::from_micros(rng.random_range(0..=100)),
            hold: Duration::from_micros(rng.random_range(100..=20_000)),
            switch_seed: if at_switch { rng.random() } else { 0 },
        })
        .collect()
}

fn faults(
    rng: &mut SmallRng,
    (seed, clients, servers): (u64, usize, usize),
    moves: bool,
) -> Vec<(usize, Fault)> {
    let count = *[0, 0, 1, 3, 6, 10].choose(rng).expect("some");
    let ends = clients + servers;
    let mut faults: Vec<_> = (0..count)
        .map(|_| {
            let at = rng.random_range(0..OPERATIONS);
            let server = rng.random_range(0..servers);
            let endpoint = rng.random_range(0..ends);
            let short = Duration::from_micros(rng.random_range(100..=30_000));
            let long = Duration::from_micros(rng.random_range(100..=400_000));
            let fault = match rng.random_range(0..10) {
                0 => Fault::Authority { server, length: short },
                1 => {
                    let client = rng.random_range(0..clients);
                    Fault::ClientRestart { client, zombie: rng.random_bool(0.5) }
                }
                2 => Fault::Freeze { endpoint, length: long },
                3 | 4 => {
                    let (up, down) =
                        *[(true, false), (false, true), (true, true)].choose(rng).expect("some");
                    Fault::Partition { endpoint, up, down, length: long }
                }
                5 | 6 => {
                    let contents = rng.random_bool(0.5);
                    Fault::ServerRestart { server, contents, away: short }
                }
                7 => Fault::ServerShutdown { server },
                8 => Fault::SwitchRestart { away: short },
                _ => Fault::SwitchWipe { away: short },
            };
            (at, fault)
        })
        .collect();
    if moves {
        // Here a server's list of moved lines is lost when it restarts, so it may not restart.
        faults.retain(|(_, fault)| {
            !matches!(fault, Fault::ServerRestart { .. } | Fault::ServerShutdown { .. })
        });
        for _ in 0..rng.random_range(2..12) {
            let fault = if rng.random_bool(0.7) { Fault::Migrate } else { Fault::MoveBack };
            faults.push((rng.random_range(50..OPERATIONS), fault));
        }
    }
    faults.extend(astray(seed, clients, servers));
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// In half of the runs, the switch leads requests astray for a while, a few times.
fn astray(seed: u64, clients: usize, servers: usize) -> Vec<(usize, Fault)> {
    // Random numbers of its own, so that the rest of a seed's plan does not depend on it.
    let mut rng = SmallRng::seed_from_u64(seed ^ 0xa57a);
    let count = *[0, 0, 1, 4].choose(&mut rng).expect("some");
    (0..count)
        .map(|_| {
            let server = rng.random_range(0..servers);
            // Another server in most cases: a client does not reply.
            let others = (0..clients + servers).filter(|end| *end != clients + server);
            let first = if servers > 1 && rng.random_bool(0.8) { clients } else { 0 };
            let ends: Vec<_> = others.filter(|end| *end >= first).collect();
            let endpoint = *ends.choose(&mut rng).expect("there is a client");
            let length = Duration::from_micros(rng.random_range(1_000..=400_000));
            (rng.random_range(0..OPERATIONS), Fault::Astray { server, endpoint, length })
        })
        .collect()
}
