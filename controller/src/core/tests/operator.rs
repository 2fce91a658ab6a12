//! Requests of operators.

use super::*;

#[test]
fn memory_servers_are_asked_about_their_own_space() {
    let (mut core, now) = core();
    let server = join(&mut core, now, &memory("m1", 1, 10));
    let client = join(&mut core, now, &client("c1", 2));
    assert_eq!(core.memory_server(server.id(), SPACE).unwrap().record, server);
    let other = core.memory_server(server.id(), Space(2)).map(|_| ()).unwrap_err();
    assert_eq!(other.to_string(), "m1 serves space 1, not space 2");
    for id in [client.id(), NodeId(77)] {
        let error = core.memory_server(id, SPACE).map(|_| ()).unwrap_err();
        assert_eq!(error, OperatorError::NoServer(id.0));
    }
}
