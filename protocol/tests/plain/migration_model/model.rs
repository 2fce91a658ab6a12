//! The model for the checker: the possible next steps.

use stateright::{Model, Property};

use super::{
    LINES, Mutant, SERVERS, Scenario,
    lines::Owner,
    messages::Message,
    network::Fate,
    properties,
    world::{Forward, HOME, World, index},
};

/// One step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    Send {
        client: u8,
    },
    Resend {
        client: u8,
    },
    Resume {
        client: u8,
    },
    Ask {
        client: u8,
    },
    GiveUp {
        client: u8,
    },
    Arrive {
        message: usize,
        server: u8,
        fate: Fate,
    },
    Lie {
        message: usize,
    },
    Take {
        line: u8,
    },
    Fetch {
        line: u8,
    },
    Keep {
        line: u8,
    },
    Reopen {
        line: u8,
    },
    Order,
    Cancel,
    CrashController,
    Restart {
        server: u8,
        is_kept: bool,
    },
    LearnLoss {
        server: u8,
    },
    Report {
        server: u8,
    },
    Conclude,
    Leave,
    /// Another deputy follows.
    Succeed,
    Dismiss,
    ComeBack {
        is_kept: bool,
    },
    OpenLate {
        client: u8,
    },
    ArriveLate {
        message: usize,
    },
    FreePart {
        line: u8,
        is_heard: bool,
    },
    FreeAll,
    Strike {
        line: u8,
    },
    Discard {
        line: u8,
    },
    Reclaim {
        line: u8,
    },
    Renew {
        client: u8,
    },
    StopRenewing {
        client: u8,
    },
    Tick,
    TakeInVain {
        line: u8,
    },
    Allocate {
        server: u8,
    },
    /// Only with [`Mutant::LateOrderObeyed`].
    OrderLate,
    /// Only with [`Mutant::PresumedLost`].
    PresumeLost,
    /// Only with [`Mutant::ControllersYours`].
    TellTaker {
        line: u8,
    },
    /// A lease ends that its owner does not use any more.
    EndUnused {
        server: u8,
        line: u8,
        page: u8,
    },
    End {
        server: u8,
        line: u8,
        page: u8,
    },
}

impl Model for Scenario {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        self.ordinary(world, steps);
        steps.push(Step::Tick);
        self.faults(world, steps);
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Send { client } => self.send(&mut world, client)?,
            Step::Resend { client } => self.resend(&mut world, client)?,
            Step::Resume { client } => self.resume(&mut world, client)?,
            Step::Ask { client } => self.ask(&mut world, client)?,
            Step::GiveUp { client } => self.give_up(&mut world, client)?,
            Step::Arrive { message, server, fate } => {
                self.arrive(&mut world, (message, server), fate)?;
            }
            Step::Lie { message } => self.lie(&mut world, message)?,
            Step::Take { line } => self.take(&mut world, line)?,
            Step::Fetch { line } => self.fetch(&mut world, line)?,
            Step::Keep { line } => self.ask_to_keep(&mut world, line)?,
            Step::Reopen { line } => self.reopen(&mut world, line)?,
            Step::Order => self.order(&mut world)?,
            Step::Cancel => self.cancel(&mut world)?,
            Step::CrashController => self.crash_controller(&mut world)?,
            Step::Restart { server, is_kept } => self.restart(&mut world, server, is_kept)?,
            Step::LearnLoss { server } => self.learn_loss(&mut world, server)?,
            Step::Report { server } => self.report(&mut world, server)?,
            Step::Conclude => self.conclude(&mut world)?,
            Step::Leave => self.leave(&mut world)?,
            Step::Succeed => self.succeed(&mut world)?,
            Step::Dismiss => self.dismiss(&mut world)?,
            Step::ComeBack { is_kept } => self.come_back(&mut world, is_kept)?,
            Step::OpenLate { client } => self.open_late(&mut world, client)?,
            Step::ArriveLate { message } => self.arrive_late(&mut world, message)?,
            Step::FreePart { line, is_heard } => self.free_part(&mut world, line, is_heard)?,
            Step::FreeAll => self.free_all(&mut world)?,
            Step::Strike { line } => self.strike(&mut world, line)?,
            Step::Discard { line } => self.discard(&mut world, line)?,
            Step::Reclaim { line } => self.reclaim(&mut world, line)?,
            Step::Renew { client } => self.renew(&mut world, client)?,
            Step::StopRenewing { client } => self.stop_renewing(&mut world, client)?,
            Step::Tick => self.tick(&mut world)?,
            Step::TakeInVain { line } => self.take_in_vain(&mut world, line)?,
            Step::Allocate { server } => self.allocate(&mut world, server)?,
            Step::OrderLate => self.order_late(&mut world)?,
            Step::PresumeLost => self.presume_lost(&mut world)?,
            Step::TellTaker { line } => self.tell_taker(&mut world, line)?,
            Step::EndUnused { server, line, page } => {
                self.end_lease(&mut world, server, (line, page), true)?;
            }
            Step::End { server, line, page } => {
                self.end_lease(&mut world, server, (line, page), false)?;
            }
        }
        self.tidy(&mut world);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}

impl Scenario {
    /// What happens by itself.
    fn ordinary(&self, world: &World, steps: &mut Vec<Step>) {
        for client in 0..index(self.clients.len()) {
            steps.extend([Step::Send { client }, Step::Resend { client }]);
            steps.extend([Step::Resume { client }, Step::Ask { client }]);
            steps.push(Step::StopRenewing { client });
        }
        for (at, message) in world.network.iter().enumerate() {
            for server in self.destinations(message) {
                steps.push(Step::Arrive { message: at, server, fate: Fate::Plain });
            }
        }
        for line in self.line_numbers() {
            steps.extend([Step::Take { line }, Step::Fetch { line }, Step::Keep { line }]);
        }
        steps.push(Step::Order);
        steps.extend((1..index(SERVERS)).map(|server| Step::LearnLoss { server }));
        if world.forwards.contains(&Forward::Pending) {
            steps.extend((1..index(SERVERS)).map(|server| Step::Report { server }));
            steps.push(Step::Conclude);
        }
        if world.is_gone {
            steps.extend([true, false].map(|is_kept| Step::ComeBack { is_kept }));
        }
        if world.late.is_some() {
            steps.push(Step::Dismiss);
        }
        if world.servers.iter().any(|server| server.freeing.is_some()) {
            let lines = self.line_numbers();
            steps.extend(lines.map(|line| Step::FreePart { line, is_heard: true }));
            steps.push(Step::FreeAll);
        }
        if world.generation > 1 {
            let lines = self.line_numbers();
            steps.extend(lines.flat_map(|line| [Step::Strike { line }, Step::Discard { line }]));
        }
        if world.generation == 1 && world.forwards.contains(&Forward::Gone) {
            steps.extend(self.line_numbers().map(|line| Step::Reclaim { line }));
        }
        self.leases(world, |server, line, page| {
            steps.push(Step::EndUnused { server, line, page });
        });
    }

    fn faults(&self, world: &World, steps: &mut Vec<Step>) {
        let faults = world.faults;
        for (at, message) in world.network.iter().enumerate() {
            for server in self.destinations(message) {
                if faults.copies > 0 {
                    steps.push(Step::Arrive { message: at, server, fate: Fate::Stays });
                }
                if faults.copies > 0 && faults.losses > 0 {
                    steps.push(Step::Arrive { message: at, server, fate: Fate::Lingers });
                }
                if faults.losses > 0 {
                    steps.push(Step::Arrive { message: at, server, fate: Fate::Mute });
                }
            }
            if faults.lies > 0 {
                steps.push(Step::Lie { message: at });
            }
        }
        if faults.losses > 0 {
            steps.extend(self.line_numbers().map(|line| Step::TakeInVain { line }));
            let lines = self.line_numbers();
            steps.extend(lines.map(|line| Step::FreePart { line, is_heard: false }));
        }
        if faults.allocations > 0 {
            steps.extend((1..index(SERVERS)).map(|server| Step::Allocate { server }));
        }
        if self.has(Mutant::LateOrderObeyed) {
            steps.push(Step::OrderLate);
        }
        if faults.gives_up > 0 {
            steps.extend((0..index(self.clients.len())).map(|client| Step::GiveUp { client }));
        }
        if faults.sessions > 0 {
            steps.extend(self.line_numbers().map(|line| Step::Reopen { line }));
        }
        if faults.cancels > 0 {
            steps.push(Step::Cancel);
        }
        if faults.leaves > 0 {
            steps.push(Step::Leave);
        }
        if faults.successors > 0 {
            steps.push(Step::Succeed);
        }
        if world.late.is_some() && faults.late_answers > 0 {
            let clients = 0..index(self.clients.len());
            steps.extend(clients.map(|client| Step::OpenLate { client }));
            let messages = 0..world.network.len();
            steps.extend(messages.map(|message| Step::ArriveLate { message }));
        }
        if faults.controller_crashes > 0 {
            steps.push(Step::CrashController);
        }
        for server in 0..index(SERVERS) {
            if faults.crashes[usize::from(server)] > 0 {
                steps.push(Step::Restart { server, is_kept: true });
            }
            if faults.wipes[usize::from(server)] > 0 {
                steps.push(Step::Restart { server, is_kept: false });
            }
        }
        if self.ticks > 0 {
            steps.extend((0..index(self.clients.len())).map(|client| Step::Renew { client }));
        }
        if self.has(Mutant::PresumedLost) {
            steps.push(Step::PresumeLost);
        }
        if self.has(Mutant::ControllersYours) {
            steps.extend(self.line_numbers().map(|line| Step::TellTaker { line }));
        }
        if faults.ends > 0 {
            self.leases(world, |server, line, page| {
                steps.push(Step::End { server, line, page });
            });
        }
    }

    /// The servers at which a message may arrive.
    fn destinations(&self, message: &Message) -> impl Iterator<Item = u8> + use<> {
        let (only, any) = match message {
            Message::Request(request) if request.to_pointer => (HOME, true),
            Message::Request(request) => (request.server, false),
            Message::Keep(keep) => (self.migrations[usize::from(keep.migration)].0, false),
            Message::Kept(kept) => (self.migrations[usize::from(kept.keep.migration)].1, false),
        };
        // A third server that has no part in the migrations answers like the second one before.
        let count = if self.migrations.iter().any(|(_, taker)| *taker == 2) { 3 } else { 2 };
        (0..count).filter(move |server| any || *server == only)
    }

    fn leases(&self, world: &World, mut with: impl FnMut(u8, u8, u8)) {
        for server in 0..index(SERVERS) {
            for line in 0..index(LINES) {
                for page in self.page_numbers() {
                    if world.slot(server, line).leases[usize::from(page)].is_some() {
                        with(server, line, page);
                    }
                }
            }
        }
    }

    fn end_lease(
        &self,
        world: &mut World,
        server: u8,
        (line, page): (u8, u8),
        is_unused: bool,
    ) -> Option<()> {
        let lease = world.slot(server, line).leases[usize::from(page)]?;
        let is_used = match lease.owner {
            Owner::Client(client) => self.uses_lease(world, client, lease.epoch),
            owner @ Owner::Taker { .. } => self.is_lease_used(world, line, owner, lease.epoch),
        };
        if is_unused && is_used {
            return None;
        }
        if !is_unused {
            world.faults.ends = world.faults.ends.checked_sub(1)?;
        }
        world.slot_mut(server, line).leases[usize::from(page)] = None;
        Some(())
    }

    /// Whether nothing happens any more, except for faults.
    pub(super) fn is_at_rest(&self, world: &World) -> bool {
        world.now == self.ticks && self.is_quiet(world)
    }

    /// Whether nothing happens before the clock ticks, except for faults.
    pub(super) fn is_quiet(&self, world: &World) -> bool {
        let mut steps = Vec::new();
        self.ordinary(world, &mut steps);
        steps.into_iter().all(|step| self.next_state(world, step).is_none())
    }
}
