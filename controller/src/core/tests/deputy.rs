//! Deputies: servers that answer for others, which are drained and gone.
#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use std::time::Duration;

use bluebridge_northbound::migration::{Order, Report};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::drain::{CAPACITY, Rack, S1, S2, S3};
use super::*;
use crate::migration::{Answers, Stage, Wanted};

impl Rack {
    /// All servers can stop allocating, and answer for others.
    fn with_abilities(mut self) -> Self {
        self.members.clone().iter().for_each(|record| self.note_abilities(record.id()));
        self
    }

    fn note_abilities(&mut self, id: NodeId) {
        let migrations = self.core.migrations_mut();
        migrations.note_abilities(id, id.0.into(), false, BTreeMap::new());
    }

    /// A server ends in order.
    fn leave(&mut self, id: NodeId) {
        let record = self.core.node(id).unwrap().record.clone();
        self.core.leave(self.now, member(&record)).unwrap();
        self.core.migrations_mut().disconnect(id, id.0.into());
        self.store();
    }

    /// Time passes, and only the servers that are there are heard of.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        for record in self.members.clone() {
            let is_there = !self.away.contains(&record.id());
            let record = &self.core.node(record.id()).unwrap().record;
            if is_there && record.attached {
                let who = member(record);
                self.core.heartbeat(self.now, who, CAPACITY / 2).unwrap();
            }
        }
        self.core.handle_timeout(self.now);
        self.store();
    }

    /// A server joins again with its memory.
    fn come_back(&mut self, id: NodeId) -> Result<(), JoinError> {
        let record = self.core.node(id).unwrap().record.clone();
        let contents = ArenaGeneration::new(record.generation);
        let previous = Previous { node: id, token: record.token, contents };
        let at = self.members.iter().position(|record| record.id() == id).unwrap();
        let before = memory(&record.name, u16::try_from(at + 1).unwrap(), CAPACITY);
        let join = Join { previous: Some(previous), ..again(&before) };
        let record = self.core.join(self.now, &join, [7; 16])?.0;
        self.core.migrations_mut().connect(id, id.0.into(), true);
        self.note_abilities(id);
        self.members[at] = record;
        self.store();
        Ok(())
    }

    fn deputy(&self, home: NodeId) -> Option<NodeId> {
        self.core.migrations().deputy_of(home).map(|of| of.deputy())
    }

    /// Where the switch leads what is for a node itself, and the ports at which it may be the source.
    fn leads(&self, node: NodeId) -> (Option<u16>, Vec<u16>) {
        let tables = self.core.desired(SWITCH);
        let forward = |body: &Body| match &body.action {
            Some(Action::Forward(forward)) => Some(forward.port.0),
            _ => None,
        };
        let to = tables.entries.get(&desired::node_prefix(SPACE, node)).and_then(forward);
        let guard = |key: &Key| match key {
            Key::IngressGuard { port, src_node, .. } if *src_node == node.0 => Some(port.0),
            _ => None,
        };
        (to, tables.entries.keys().filter_map(guard).collect())
    }
}

/// Three servers, of which the first is drained.
fn drained() -> Rack {
    let mut rack = Rack::new(&[900, 400, 700]).with_abilities();
    rack.own.insert(S1, vec![0..64]);
    rack.core.drain(S1);
    rack.run(&[S1]);
    rack.own.remove(&S1);
    for record in &rack.members {
        let free = rack.core.node(record.id()).unwrap().free_pages.unwrap();
        rack.core.heartbeat(rack.now, member(record), free).unwrap();
    }
    rack
}

#[test]
fn a_server_counts_as_drained_when_it_allocates_nothing_and_is_looked_through_once_more() {
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S1);
    assert_eq!(rack.core.migrations().orders(S1), [], "it may allocate while memory moves away");
    assert!(!rack.step(S1));
    assert_eq!(rack.core.migrations().orders(S1), [Order::Seal(true)]);
    assert!(!rack.step(S1), "it has not said that it allocates nothing");
    rack.obey(S1);
    assert!(!rack.step(S1), "what was allocated before that may not have been looked at");
    assert!(!rack.core.migrations().drain_of(S1).unwrap().may_leave);
    assert!(rack.step(S1));
    assert!(rack.core.migrations().drain_of(S1).unwrap().may_leave);
    rack.core.undrain(S1);
    assert_eq!(rack.core.migrations().orders(S1), [Order::Seal(false)]);
}

#[test]
fn without_another_server_a_drained_one_must_stay() {
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S2);
    rack.core.drain(S1);
    rack.run(&[S1]);
    assert!(!rack.core.migrations().drain_of(S1).unwrap().may_leave, "the other one is drained");
    rack.leave(S1);
    assert_eq!(rack.deputy(S1), None);
    rack.core.undrain(S2);
    rack.pass(Duration::from_secs(1));
    assert_eq!(rack.deputy(S1), Some(S2));
}

#[test]
fn another_server_answers_for_one_that_is_drained_and_gone() {
    let mut rack = drained();
    let before = rack.core.node(S1).unwrap().record.clone();
    assert_eq!(rack.leads(S1), (Some(1), vec![1]));
    rack.leave(S1);
    assert_eq!(rack.deputy(S1), Some(S2));
    assert_eq!(rack.leads(S1), (Some(2), vec![2]), "in place of its own entries");
    let orders = rack.core.migrations().orders(S2);
    let [Order::Deputize(of)] = &orders[..] else { panic!("{orders:?}") };
    let record = &rack.core.node(S1).unwrap().record;
    assert_eq!(record.incarnation, before.incarnation + 1, "of no process of its own");
    assert_eq!(
        (of.home, of.incarnation, of.range_epoch),
        (S1, record.incarnation, record.range_epoch)
    );
    let rows: Vec<_> = of.rows.iter().map(|row| (row.pages.clone(), row.at)).collect();
    assert_eq!(rows, [(0..64, Some(S3))]);
    assert_eq!(of.contents, [ArenaGeneration::new(before.generation).unwrap()]);
    assert_eq!(of.last_generation.number(), before.last_generation);
    rack.obey(S2);
    assert_eq!(rack.core.migrations().orders(S2), []);
    // A heartbeat of the process that was replaced.
    let stale = rack.core.heartbeat(rack.now, member(&before), 0);
    let words = "s1 was drained and gone, so the memory server s2 answers for it, and this process is no member any more; \
                 start it again: s2 then stops answering";
    assert_eq!(stale.unwrap_err().to_string(), words);
}

#[test]
fn a_server_that_is_not_drained_has_no_deputy() {
    let mut rack = Rack::new(&[900, 400, 700]).with_abilities();
    rack.own.insert(S1, vec![0..64]);
    rack.core.drain(S1);
    rack.step(S1);
    rack.leave(S1);
    rack.pass(Duration::from_secs(60));
    assert_eq!(rack.deputy(S1), None, "it still has its pages");
}

#[test]
fn the_deputy_of_a_server_that_was_killed_is_chosen_soon() {
    let mut rack = drained();
    rack.away.insert(S1);
    rack.core.migrations_mut().disconnect(S1, 1);
    rack.pass(Duration::from_millis(250));
    rack.pass(Duration::from_secs(1));
    assert_eq!(rack.deputy(S1), None, "it may be connecting again");
    rack.pass(Duration::from_secs(1));
    assert_eq!(rack.deputy(S1), Some(S2), "before clients give up");
    let idle = rack.core.migrations().deputy_of(S1).unwrap().idle_ms;
    assert!(idle >= 2250, "since it was drained: {idle} ms");
}

#[test]
fn another_deputy_is_chosen_when_one_dies_or_is_drained() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    let first = rack.core.migrations().deputy_of(S1).unwrap();
    rack.away.insert(S2);
    rack.core.migrations_mut().disconnect(S2, 2);
    rack.pass(Duration::from_millis(250));
    rack.pass(Duration::from_secs(2));
    let second = rack.core.migrations().deputy_of(S1).unwrap();
    assert_eq!((second.deputy(), second.incarnation), (S3, first.incarnation + 1));
    assert!(second.idle_ms >= first.idle_ms + 2000);
    // The first one is back, and still answers.
    rack.away.remove(&S2);
    rack.core.migrations_mut().connect(S2, 2, true);
    let answers = BTreeMap::from([(S1, first.incarnation)]);
    rack.core.migrations_mut().note_abilities(S2, 2, false, answers);
    let dismiss = Order::Dismiss { home: S1, incarnation: first.incarnation };
    assert_eq!(rack.core.migrations().orders(S2), [dismiss]);
    rack.obey(S2);
    assert_eq!(rack.core.migrations().orders(S2), []);
    rack.core.drain(S3);
    rack.pass(Duration::from_millis(250));
    assert_eq!(rack.deputy(S1), Some(S2), "before the other one goes");
}

#[test]
fn a_deputy_that_hangs_is_replaced_and_what_it_says_late_changes_nothing() {
    let mut rack = drained();
    rack.leave(S1);
    let due = rack.core.migrations().orders(S2);
    rack.obey(S2);
    let first = rack.core.migrations().deputy_of(S1).unwrap();
    // Its connection stays open.
    rack.away.insert(S2);
    rack.pass(Duration::from_secs(3));
    rack.pass(Duration::from_millis(1900));
    assert!(!rack.core.node(S2).unwrap().live);
    assert_eq!(rack.deputy(S1), Some(S2), "it may only be slow");
    rack.pass(Duration::from_millis(100));
    let second = rack.core.migrations().deputy_of(S1).unwrap();
    assert_eq!((second.deputy(), second.incarnation), (S3, first.incarnation + 1));
    assert_eq!(rack.leads(S1), (Some(3), vec![3]), "only the new one may use the addresses");
    rack.obey(S3);
    // It goes on: an order that it got before it hung, and then a heartbeat.
    rack.away.remove(&S2);
    let [order @ Order::Deputize(_)] = &due[..] else { panic!("{due:?}") };
    let late = rack.report(S2, order.clone());
    assert!(
        matches!(late, Report::Deputized { incarnation, .. } if incarnation == first.incarnation)
    );
    rack.hear(S2, late);
    let is_as_before = |rack: &Rack| {
        assert_eq!(rack.core.migrations().deputy_of(S1), Some(second));
        assert_eq!(rack.leads(S1), (Some(3), vec![3]));
        assert_eq!(rack.core.migrations().orders(S3), [], "it has learned all that is due");
    };
    is_as_before(&rack);
    let dismiss = Order::Dismiss { home: S1, incarnation: first.incarnation };
    assert_eq!(rack.core.migrations().orders(S2), [dismiss]);
    rack.pass(Duration::from_secs(1));
    assert!(rack.core.node(S2).unwrap().live, "it is a member as before, with its lines");
    rack.obey(S2);
    assert_eq!(rack.core.migrations().orders(S2), []);
    is_as_before(&rack);
}

#[test]
fn a_drained_server_that_hangs_is_replaced_like_one_that_was_killed() {
    let mut rack = drained();
    let before = rack.core.node(S1).unwrap().record.clone();
    rack.away.insert(S1);
    rack.pass(Duration::from_millis(4900));
    assert_eq!(rack.deputy(S1), None, "it may only be slow");
    rack.pass(Duration::from_millis(100));
    assert_eq!((rack.deputy(S1), rack.leads(S1)), (Some(S2), (Some(2), vec![2])));
    let late = rack.core.heartbeat(rack.now, member(&before), 0);
    assert!(matches!(late, Err(MemberError::Deputized { .. })), "{late:?}");
}

/// Its lines are lost only when it comes back without them, or an operator says so.
#[test]
fn a_silent_server_that_has_pages_is_never_replaced() {
    let mut rack = Rack::new(&[900, 400, 700]).with_abilities();
    rack.own.insert(S1, vec![0..64]);
    rack.core.drain(S1);
    rack.step(S1);
    rack.pass(Duration::ZERO);
    // One is drained and has pages left, the other one is not drained.
    let before = [S1, S2].map(|id| rack.core.node(id).unwrap().record.clone());
    rack.away.extend([S1, S2]);
    for _ in 0..60 {
        rack.pass(Duration::from_secs(1));
    }
    assert!(before.iter().all(|it| !rack.core.node(it.id()).unwrap().live));
    assert_eq!([S1, S2].map(|id| rack.core.node(id).unwrap().record.incarnation), [1, 1]);
    assert_eq!(rack.core.migrations().deputies().count(), 0);
    assert_eq!([rack.leads(S1), rack.leads(S2)], [(Some(1), vec![1]), (Some(2), vec![2])]);
    for record in &before {
        rack.core.heartbeat(rack.now, member(record), 1).expect("they are members as before");
    }
}

#[test]
fn time_in_which_the_controller_was_stopped_replaces_nobody() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    let stalled = Duration::from_secs(60);
    rack.now += stalled;
    rack.core.excuse_silence(rack.now, stalled);
    rack.core.handle_timeout(rack.now);
    assert_eq!(rack.deputy(S1), Some(S2));
}

#[test]
fn a_deputy_that_hangs_holds_no_server_up() {
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S1);
    rack.run(&[S1]);
    rack.pass(Duration::ZERO);
    rack.leave(S1);
    rack.obey(S2);
    rack.away.insert(S2);
    rack.pass(Duration::from_secs(4));
    assert!(rack.come_back(S1).is_err(), "it may only be slow");
    rack.pass(Duration::from_secs(1));
    rack.come_back(S1).expect("the switch lets only the server itself use the addresses");
    assert_eq!((rack.deputy(S1), rack.leads(S1)), (None, (Some(1), vec![1])));
    // It goes on, and still answers.
    rack.away.remove(&S2);
    let orders = rack.core.migrations().orders(S2);
    assert!(matches!(orders[..], [Order::Dismiss { home: S1, .. }]), "{orders:?}");
}

#[test]
fn what_moves_on_is_learned_by_the_deputy_before_its_server_forgets_it() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    rack.core.drain(S3);
    rack.away.insert(S2);
    let taker = join(&mut rack.core, rack.now, &memory("s4", 4, CAPACITY));
    let s4 = taker.id();
    rack.core.migrations_mut().connect(s4, s4.0.into(), true);
    rack.members.push(taker);
    for _ in 0..20 {
        rack.pass(Duration::from_millis(100));
        rack.step(S3);
        [S3, s4].iter().for_each(|id| rack.obey(*id));
    }
    let stage = rack.core.migrations().iter().last().unwrap().record.stage;
    assert_eq!((rack.at(S1, 0), stage), (s4, Stage::Settled), "the deputy does not know it yet");
    rack.away.remove(&S2);
    let orders = rack.core.migrations().orders(S2);
    let [Order::Deputize(of)] = &orders[..] else { panic!("{orders:?}") };
    assert_eq!(of.rows.iter().map(|row| row.at).collect::<Vec<_>>(), [Some(s4)]);
    rack.run(&[S3]);
}

#[test]
fn a_drained_deputy_stays_until_its_successor_has_confirmed() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    rack.core.drain(S2);
    rack.step(S2);
    rack.obey(S2);
    assert!(!rack.step(S2) && rack.step(S2), "it has nothing");
    let shown = |rack: &Rack| {
        let drain = rack.core.migrations().drain_of(S2).unwrap();
        (drain.may_leave, drain.problem)
    };
    let waits = |words: &str| (false, Some(words.to_owned()));
    assert_eq!(shown(&rack), waits("another server must answer for s1 first"));
    rack.pass(Duration::ZERO);
    assert_eq!(rack.deputy(S1), Some(S3));
    assert_eq!(shown(&rack), waits("s3 must confirm first that it answers for s1"));
    rack.obey(S2);
    assert_eq!(shown(&rack), waits("s3 must confirm first that it answers for s1"));
    rack.obey(S3);
    assert_eq!(shown(&rack), (true, None));
    // The next controller asks again.
    rack.restart();
    rack.note_abilities(S2);
    assert!(!shown(&rack).0);
    let answers = BTreeMap::from([(S1, rack.core.node(S1).unwrap().record.incarnation)]);
    rack.core.migrations_mut().note_abilities(S3, 3, false, answers);
    assert_eq!(shown(&rack), (true, None));
}

#[test]
fn what_kept_the_last_process_from_being_drained_is_forgotten() {
    let mut rack = Rack::new(&[900, 4, 7]).with_abilities();
    rack.own.insert(S1, vec![0..64]);
    rack.core.drain(S1);
    rack.step(S1);
    let problem = rack.problem(S1);
    assert!(problem.as_ref().is_some_and(|it| it.contains("has room")), "{problem:?}");
    rack.come_back(S1).unwrap();
    assert_eq!(rack.problem(S1), None, "nothing was tried since");
    rack.step(S1);
    assert_eq!(rack.problem(S1), problem, "it is found again");
}

#[test]
fn what_others_have_of_a_server_that_is_gone_can_move() {
    let mut rack = drained();
    rack.leave(S1);
    let wanted = |pages| Wanted { home: S1, space: SPACE, generation: None, pages, taker: S2 };
    rack.obey(S2);
    let refused = rack.core.migrate(&wanted(Some(64..128)));
    let text = refused.unwrap_err().to_string();
    assert_eq!(text, "s1 is drained and gone, and no server has any of these pages");
    // A range of which the rest is nowhere, and then all.
    for (pages, moved) in [(Some(56..200), 56), (None, 0)] {
        let ids = rack.core.migrate(&wanted(pages.clone())).unwrap();
        assert_eq!(ids.len(), 1, "{pages:?}");
        for _ in 0..20 {
            [S2, S3].iter().for_each(|id| rack.obey(*id));
        }
        assert_eq!([moved, 63].map(|page| rack.at(S1, page)), [S2; 2], "{pages:?}");
    }
    let stages: Vec<_> = rack.core.migrations().iter().map(|of| of.record.stage).collect();
    assert!(stages.iter().all(|stage| *stage == Stage::Closed), "{stages:?}");
    assert!(rack.core.migrate(&wanted(None)).is_err(), "all is there");
    let home = Wanted { taker: S1, ..wanted(None) };
    let refused = rack.core.migrate(&home).unwrap_err().to_string();
    assert!(refused.starts_with("an operator drains s1; choose another server"), "{refused}");
}

#[test]
fn a_server_that_comes_back_waits_until_its_deputy_has_ended() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    let refused = rack.come_back(S1);
    let words = "the memory server s2 answers for s1, which was drained and gone, and has not confirmed yet that it \
                 stops; try again, and if this goes on, see the log of s2";
    assert_eq!(refused.unwrap_err().to_string(), words);
    let incarnation = rack.core.migrations().deputy_of(S1).unwrap().incarnation;
    assert_eq!(rack.core.migrations().orders(S2), [Order::Dismiss { home: S1, incarnation }]);
    assert!(rack.come_back(S1).is_err(), "it has not ended");
    rack.obey(S2);
    rack.come_back(S1).expect("nobody answers for it any more");
    assert_eq!((rack.deputy(S1), rack.leads(S1)), (None, (Some(1), vec![1])));
    assert!(rack.core.node(S1).unwrap().record.incarnation > incarnation);
    assert!(!rack.is_drained(S1), "its next process may have allocated since");
    rack.run(&[S1]);
    assert!(rack.core.undrain(S1));
}

#[test]
fn a_server_that_began_to_come_back_and_died_gets_a_deputy_again() {
    let mut rack = drained();
    rack.leave(S1);
    rack.obey(S2);
    assert!(rack.come_back(S1).is_err());
    rack.obey(S2);
    assert_eq!(rack.deputy(S1), None);
    rack.pass(Duration::from_secs(9));
    assert_eq!(rack.deputy(S1), None, "it may be about to join");
    rack.pass(Duration::from_secs(2));
    assert_eq!(rack.deputy(S1), Some(S2));
}

#[test]
fn that_nobody_answers_is_said_with_the_reason_and_what_to_do() {
    let nobody = |rack: &Rack| match rack.core.migrations().answers_for(rack.now, S1) {
        Some(Answers::Nobody(why)) => why,
        other => panic!("{other:?}"),
    };
    let to_do = "no other memory server of its space can take over: start s1, s2 or another one, or end the draining of \
                 one that runs with `bluebridge undrain`";
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S1);
    rack.run(&[S1]);
    rack.pass(Duration::ZERO);
    assert_eq!(rack.core.migrations().answers_for(rack.now, S1), None, "it is there");
    rack.leave(S1);
    assert_eq!(nobody(&rack), "s2 was chosen, and has not confirmed yet that it answers");
    rack.obey(S2);
    assert_eq!(rack.core.migrations().answers_for(rack.now, S1), Some(Answers::Deputy(S2)));
    rack.away.insert(S2);
    rack.pass(Duration::from_secs(5));
    assert_eq!(nobody(&rack), format!("its deputy s2 sends no heartbeats; {to_do}"));
    rack.core.migrations_mut().disconnect(S2, 2);
    assert_eq!(
        nobody(&rack),
        format!("its deputy s2 has no connection to the controller; {to_do}")
    );
    rack.leave(S2);
    assert_eq!(nobody(&rack), format!("its deputy s2 left; {to_do}"));
    // One that is there helps.
    let third = join(&mut rack.core, rack.now, &memory("s3", 3, CAPACITY));
    rack.core.migrations_mut().connect(third.id(), third.node.into(), true);
    rack.note_abilities(third.id());
    assert_eq!(nobody(&rack), "its deputy s2 left; another memory server is chosen within seconds");
    rack.pass(Duration::ZERO);
    rack.obey(third.id());
    assert_eq!(rack.core.migrations().answers_for(rack.now, S1), Some(Answers::Deputy(third.id())));

    // Without any other server no deputy is chosen at all.
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S2);
    rack.core.drain(S1);
    rack.run(&[S1]);
    rack.leave(S1);
    let to_do = to_do.replace("s1, s2 or", "s1 or");
    assert_eq!(nobody(&rack), format!("s1 is gone; {to_do}"));
}

/// Otherwise nobody would answer for it if its next process died before it has joined.
#[test]
fn a_server_that_is_gone_stays_drained() {
    let mut rack = drained();
    assert_eq!(rack.core.check_undrain(S1), Ok(()), "it is still there");
    rack.leave(S1);
    let gone: Result<(), _> = Err(OperatorError::Gone("s1".to_owned()));
    assert_eq!(rack.core.check_undrain(S1), gone.clone(), "nobody was chosen yet");
    rack.obey(S2);
    assert!(rack.come_back(S1).is_err());
    rack.obey(S2);
    assert_eq!((rack.deputy(S1), rack.core.check_undrain(S1)), (None, gone), "it has not joined");
    rack.come_back(S1).expect("nobody answers for it any more");
    assert_eq!(rack.core.check_undrain(S1), Ok(()));
    assert_eq!(rack.core.check_undrain(S2), Ok(()), "it is not drained");
}

#[test]
fn a_deputy_that_died_holds_no_server_up() {
    let mut rack = Rack::new(&[900, 400]).with_abilities();
    rack.core.drain(S1);
    rack.run(&[S1]);
    rack.leave(S1);
    rack.obey(S2);
    rack.leave(S2);
    assert_eq!(rack.deputy(S1), Some(S2), "there is no other one");
    rack.come_back(S1).expect("the deputy's process has ended");
    assert_eq!(rack.deputy(S1), None);
}

#[test]
fn deputies_outlive_the_controller() {
    let mut rack = drained();
    rack.leave(S1);
    let record = rack.core.migrations().deputy_of(S1).unwrap();
    rack.away.insert(S1);
    rack.members.retain(|it| it.id() != S1);
    rack.restart();
    assert_eq!(rack.core.migrations().deputy_of(S1), Some(record));
    rack.note_abilities(S2);
    rack.note_abilities(S3);
    rack.pass(Duration::from_secs(1));
    assert_eq!(rack.core.migrations().deputy_of(S1), Some(record), "it is there");
    assert_eq!(rack.leads(S1), (Some(2), vec![2]));
    let orders = rack.core.migrations().orders(S2);
    assert!(matches!(&orders[..], [Order::Deputize(_)]), "{orders:?}");
    // One that was drained when the controller was killed may leave afterwards.
    let mut rack = drained();
    rack.restart();
    [S1, S2, S3].iter().for_each(|id| rack.note_abilities(*id));
    rack.leave(S1);
    assert_eq!(rack.deputy(S1), Some(S2));
}

/// Servers that hang, are killed, are drained and come back, and what each believes to answer for.
struct Random {
    rack: Rack,
    answers: BTreeMap<NodeId, BTreeMap<NodeId, u32>>,
    dead: BTreeSet<NodeId>,
    /// Who was ordered to answer for a home under an incarnation.
    ordered: BTreeMap<(NodeId, u32), NodeId>,
    returns: usize,
}

impl Random {
    fn new() -> Self {
        let mut rack = Rack::new(&[900, 400, 700, 800]).with_abilities();
        rack.own = (1..=4).map(|id| (NodeId(id), vec![0..u64::from(id) * 16])).collect();
        let (answers, dead, ordered) = Default::default();
        Self { rack, answers, dead, ordered, returns: 0 }
    }

    fn ids() -> impl Iterator<Item = NodeId> {
        (1..=4).map(NodeId)
    }

    /// A server does what it is ordered, and has it done when it says so.
    fn obey(&mut self, id: NodeId) {
        if self.rack.away.contains(&id) || !self.rack.core.node(id).unwrap().record.attached {
            return;
        }
        for order in self.rack.core.migrations().orders(id) {
            let its = self.answers.entry(id).or_default();
            match &order {
                Order::Deputize(of) => {
                    its.insert(of.home, of.incarnation);
                    let key = (of.home, of.incarnation);
                    let first = *self.ordered.entry(key).or_insert(id);
                    assert_eq!(first, id, "two answer under one incarnation: {key:?}");
                }
                Order::Dismiss { home, .. } => drop(its.remove(home)),
                _ => {}
            }
            let report = self.rack.report(id, order);
            self.rack.hear(id, report);
        }
    }

    fn kill(&mut self, id: NodeId) {
        self.rack.away.insert(id);
        self.dead.insert(id);
        self.rack.core.migrations_mut().disconnect(id, id.0.into());
    }

    /// A process that hung goes on. If another one answers for it, it learns that and ends.
    fn go_on(&mut self, id: NodeId) {
        if self.dead.contains(&id) || !self.rack.away.remove(&id) {
            return;
        }
        let incarnation = self.rack.members[usize::from(id.0) - 1].incarnation;
        let record = &self.rack.core.node(id).unwrap().record;
        if !record.attached || record.incarnation != incarnation {
            self.kill(id);
        } else {
            self.attend(id);
        }
    }

    /// A server opens its call.
    fn attend(&mut self, id: NodeId) {
        let answers = self.answers.get(&id).cloned().unwrap_or_default();
        let is_sealed = self.rack.core.migrations().drain_of(id).is_some_and(|it| it.is_done);
        let migrations = self.rack.core.migrations_mut();
        migrations.connect(id, id.0.into(), true);
        migrations.note_abilities(id, id.0.into(), is_sealed, answers);
    }

    fn come_back(&mut self, id: NodeId) {
        if !self.dead.contains(&id) || self.rack.come_back(id).is_err() {
            return;
        }
        self.returns += 1;
        self.dead.remove(&id);
        self.rack.away.remove(&id);
        self.answers.remove(&id);
        let beside = self
            .answers
            .iter()
            .filter(|(at, its)| its.contains_key(&id) && !self.rack.away.contains(at));
        assert_eq!(beside.count(), 0, "{id} answers beside its deputy");
    }

    fn restart(&mut self) {
        self.rack.restart();
        for id in Self::ids().filter(|id| !self.rack.away.contains(id)).collect::<Vec<_>>() {
            if self.rack.core.node(id).unwrap().record.attached {
                self.attend(id);
            }
        }
    }

    /// Time passes, and servers that are drained are looked after.
    fn pass(&mut self, time: Duration) {
        let before: BTreeSet<_> =
            self.rack.core.migrations().deputies().map(|of| of.home()).collect();
        self.rack.pass(time);
        for of in self.rack.core.migrations().deputies().collect::<Vec<_>>() {
            let home = of.home();
            let (leads, own) = (self.rack.leads(home), &self.rack.own[&home]);
            assert!(leads.1.len() <= 1, "two may use the addresses of {home}: {leads:?}");
            let mut own = own.iter().flat_map(|pages| pages.clone());
            let is_new = !before.contains(&home);
            assert!(
                !is_new || own.all(|page| self.rack.at(home, page) != home),
                "{home} has pages"
            );
        }
        for id in Self::ids() {
            self.rack.step(id);
        }
    }
}

#[test]
fn never_do_two_answer_for_one_server_whatever_hangs_dies_and_comes_back() {
    let (mut returns, mut chosen) = (0, 0);
    for seed in 0..40 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut all = Random::new();
        for _ in 0..250 {
            let id = NodeId(rng.random_range(1..=4));
            match rng.random_range(0..16) {
                0 => drop(all.rack.away.insert(id)),
                1 => all.kill(id),
                2 | 3 => all.go_on(id),
                4..7 => all.come_back(id),
                7 | 8 => drop(all.rack.core.drain(id)),
                9 if all.rack.core.check_undrain(id).is_ok() => drop(all.rack.core.undrain(id)),
                10 => all.restart(),
                _ => {}
            }
            all.rack.store();
            for id in Random::ids().filter(|_| rng.random_bool(0.7)).collect::<Vec<_>>() {
                all.obey(id);
            }
            all.pass(Duration::from_millis(rng.random_range(100..2000)));
        }
        returns += all.returns;
        chosen += all.ordered.len();
        // In the end all are back, and each answers for itself.
        for _ in 0..40 {
            for id in Random::ids() {
                all.go_on(id);
                all.come_back(id);
                all.obey(id);
            }
            all.pass(Duration::from_secs(1));
        }
        assert_eq!(all.rack.core.migrations().deputies().count(), 0, "seed {seed}");
        assert!(all.answers.values().all(BTreeMap::is_empty), "seed {seed}: {:?}", all.answers);
        assert_eq!(all.dead, BTreeSet::new(), "seed {seed}");
    }
    println!("{chosen} deputies, {returns} returns");
    assert!(returns > 200 && chosen > 100, "{returns} returns, {chosen} deputies");
}
