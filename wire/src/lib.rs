//! BlueBridge on the wire: addresses, header and commands; parse and emit, nothing else.
