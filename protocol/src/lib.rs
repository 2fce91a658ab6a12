//! BlueBridge requester and responder: state machines without I/O.
