//! Remote memory whose pointers are IPv6 addresses: the client library.
