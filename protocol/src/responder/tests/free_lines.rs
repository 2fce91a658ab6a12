//! Lines of other servers of which no page is allocated.

use super::{
    adopted::{HOME, foreign, home_line},
    giver::{LINE, MIGRATION, allowance, given},
    *,
};
use bluebridge_wire::ArenaGeneration;

use crate::responder::FreeLines;

fn lines(pages: Range<u64>) -> FreeLines {
    FreeLines { home: HOME, generation: store::GENERATION, pages }
}

#[test]
pub(super) fn free_lines_are_found_and_forgotten_unless_they_move_or_are_used() {
    let mut world = World::new();
    let homes = [512, 520, 528, 544, 1024];
    let places = homes.map(|first_page| world.adopt_line(home_line(first_page), 3, 5));
    assert_eq!(world.responder.free_lines(&world.store), Vec::<FreeLines>::new());
    let used = places[2];
    for place in places.into_iter().filter(|place| *place != used) {
        world.store.lines_mut().free_part(place..place + LINE);
    }
    let free = [512..528, 544..552, 1024..1032].map(lines);
    assert_eq!(world.responder.free_lines(&world.store), free, "neighbours at home are one row");
    assert_eq!(world.look(foreign(512)).0, Status::NotAllocated);
    // One of them is in a migration.
    world.allow(&allowance(places[3]..places[3] + LINE)).unwrap();
    let other = FreeLines { generation: ArenaGeneration::new(9).unwrap(), ..lines(0..4096) };
    world.responder.discard(&other, &mut world.store);
    world.responder.discard(&FreeLines { home: NodeId(77), ..other }, &mut world.store);
    assert_eq!(world.event(Event::LineDiscarded), 0);
    world.responder.discard(&lines(504..1024), &mut world.store);
    assert_eq!(world.event(Event::LineDiscarded), 2);
    assert_eq!(world.responder.free_lines(&world.store), [544..552, 1024..1032].map(lines));
    let statuses = homes.map(|page| world.look(foreign(page)).0);
    let [gone, there, free] = [Status::WrongNode, Status::Ok, Status::NotAllocated];
    assert_eq!(statuses, [gone, gone, there, free, free]);
    // The places may be used again, and the next process knows nothing of what was there.
    world.restart();
    assert_eq!(world.responder.free_lines(&world.store), [544..552, 1024..1032].map(lines));
    assert_eq!(homes.map(|page| world.look(foreign(page)).0), statuses);
    let again = world.adopt_line(home_line(512), 3, 6);
    assert!(places[..2].contains(&again));
    world.responder.discard(&lines(1024..1032), &mut world.store);
    assert_eq!(world.event(Event::LineDiscarded), 1);
}

#[test]
pub(super) fn an_own_line_that_was_lost_elsewhere_is_used_again_when_it_is_free() {
    let (mut world, [first, second, _], mut taker) = given();
    taker.move_line(&mut world, second);
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    let line = second.location.page()..second.location.page() + LINE;
    let own = FreeLines {
        home: world.responder.node,
        generation: store::GENERATION,
        pages: line.clone(),
    };
    let free = |world: &World| world.responder.free_lines(&world.store);
    // Where it is is known, and it is allocated.
    world.responder.discard(&own, &mut world.store);
    assert_eq!(free(&world), Vec::<FreeLines>::new());
    world.responder.learn(world.now, &[], core::slice::from_ref(&line), &world.store);
    assert_eq!(free(&world), Vec::<FreeLines>::new());
    world.responder.discard(&own, &mut world.store);
    assert_eq!(world.event(Event::LineReclaimed), 0);
    let freed = TestRequest::new(Command::Delete, first.to_ipv6());
    let freed = world.next(freed);
    assert_eq!(world.send(&freed), [], "a part is elsewhere");
    let id = world.responder.freeings().next().unwrap().id;
    assert!(world.responder.finish_freeing(world.now, id, &mut world.store).unwrap());
    world.drain();
    assert_eq!(free(&world), core::slice::from_ref(&own));
    let all = FreeLines { pages: 0..line.end + 8 * LINE, ..own };
    world.responder.discard(&all, &mut world.store);
    assert_eq!(world.event(Event::LineReclaimed), 1);
    assert_eq!(free(&world), Vec::<FreeLines>::new());
    assert_eq!(world.look(second).0, Status::NotAllocated);
    let again = world.create(20);
    assert_eq!(again.location.page(), first.location.page());
    assert_ne!(again.tag, first.tag);
}
